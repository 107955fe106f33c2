"""The five published variants of Primal-Attention: their conventions and parameter names.

The released experiments differ in details: what a mask does, how sampled rows are scaled, how
parameters are initialised, whether ``ℓ`` stays positive, how the loss is reduced.
:class:`Conventions` holds these choices. :data:`PUBLISHED` has those of each experiment,
:data:`OURS` those of every other layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from primal_attention.functional import Reduction

__all__ = [
    "OURS",
    "PUBLISHED",
    "Conventions",
    "init_linear",
    "published_state_dict",
    "translate_state_dict",
]


@dataclass(frozen=True)
class Conventions:
    """Details of a layer that differ between the published experiments and are not options."""

    mask: Literal["aware", "output", "refuse"] = "aware"
    """``aware``: padding has no effect. ``output``: the mask only zeroes the outputs of heads
    (LRA). ``refuse``: a mask is an error."""
    standardize: bool = True
    """Whether sampled rows are standardised, so that scores do not grow with the input."""
    positive_lam: bool = True
    """Whether ``ℓ`` is the softplus of its parameter; otherwise it is the parameter."""
    flat_init: bool = False
    """Whether ``W_e`` and ``W_r`` start orthogonal as one flat matrix, not head by head."""
    linear_init: Literal["torch", "gpt2", "fairseq"] = "torch"
    """How linear maps are initialised; see :func:`init_linear`."""
    reduction: Reduction = "sample"
    """How the objectives ``J`` of all sequences and heads become one loss."""
    eps: float = 1e-6
    """Smallest norm by which a row is divided."""
    causal_only: bool = False
    """Whether the layer exists in causal form only."""
    weights: Literal["data", "static"] = "data"
    """Source of the projection weights of a published layer."""
    names: tuple[tuple[str, str], ...] = ()
    """Parameter names of a published layer: pairs (theirs, ours)."""


OURS = Conventions()
"""Conventions of every layer that is not a published variant."""

_UEA_NAMES = (
    ("query_projection", "q_proj"),
    ("key_projection", "k_proj"),
    ("out_projection", "out_proj"),
    ("We", "w_e"),
    ("Wr", "w_r"),
    ("inner_attention.Lambda", "lam"),
    ("inner_attention.concate_weight", "concat"),
)
_LRA_NAMES = (
    ("W_q", "q_proj"),
    ("W_k", "k_proj"),
    ("ff", "out_proj"),
    ("We", "w_e"),
    ("Wr", "w_r"),
    ("attn.Lambda", "lam"),
    ("attn.concate_weight", "concat"),
)
_VIT_NAMES = (
    ("qk", "q_proj+k_proj"),
    ("proj", "out_proj"),
    ("we", "w_e"),
    ("wr", "w_r"),
    ("Lambda", "lam"),
    ("concate_weight", "concat"),
)
_D4RL_NAMES = (*_UEA_NAMES[:5], ("Lambda", "lam"), ("concate_weight", "concat"))
_WIKITEXT_NAMES = (
    ("q_proj", "q_proj"),
    ("k_proj", "k_proj"),
    ("out_proj", "out_proj"),
    *_D4RL_NAMES[3:],
)


def _published(
    names: tuple[tuple[str, str], ...],
    *,
    mask: Literal["output", "refuse"] = "refuse",
    reduction: Reduction = "sample",
    causal: bool = False,
    linear_init: Literal["torch", "gpt2", "fairseq"] = "torch",
) -> Conventions:
    return Conventions(
        mask=mask,
        standardize=False,
        positive_lam=False,
        flat_init=True,
        linear_init=linear_init,
        reduction=reduction,
        eps=1e-12,
        causal_only=causal,
        weights="static" if causal else "data",
        names=names,
    )


PUBLISHED: dict[str, Conventions] = {
    "uea": _published(_UEA_NAMES),
    "lra": _published(_LRA_NAMES, mask="output", reduction="batch"),
    "vit": _published(_VIT_NAMES, reduction="batch"),
    "d4rl": _published(_D4RL_NAMES, causal=True, linear_init="gpt2"),
    "wikitext": _published(_WIKITEXT_NAMES, causal=True, linear_init="fairseq"),
}


def init_linear(conventions: Conventions, name: str, linear: nn.Linear) -> None:
    """Initialise a linear map as the conventions say; ``torch`` leaves it as it is.

    ``gpt2`` draws every weight from ``N(0, 0.02²)`` and sets biases to zero. ``fairseq`` uses
    Xavier's rule for queries and keys (gain ``1/√2``) and for the output (gain 1, zero bias).

    Args:
        conventions: The conventions of the layer.
        name: Name of the map in the layer, such as ``"q_proj"``.
        linear: The map.
    """
    rule = conventions.linear_init
    if rule == "gpt2":
        nn.init.normal_(linear.weight, std=0.02)
    elif rule == "fairseq" and name in ("q_proj", "k_proj", "out_proj"):
        nn.init.xavier_uniform_(linear.weight, 1.0 if name == "out_proj" else 0.5**0.5)
    if rule == "gpt2" or (rule == "fairseq" and name == "out_proj"):
        nn.init.zeros_(linear.bias)


def translate_state_dict(
    conventions: Conventions, state_dict: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return a published layer's parameters under our names.

    Args:
        conventions: One of :data:`PUBLISHED`.
        state_dict: Parameters of one attention layer, without a prefix.

    Raises:
        ValueError: If the variant has no parameter of a given name.
    """
    ours: dict[str, Tensor] = {}
    for name, value in state_dict.items():
        theirs, target, rest = _match(name, conventions.names)
        if target == "q_proj+k_proj":
            ours[f"q_proj{rest}"], ours[f"k_proj{rest}"] = value.chunk(2, dim=0)
        elif theirs:
            ours[f"{target}{rest}"] = value
        else:
            known = ", ".join(stem for stem, _ in conventions.names)
            raise ValueError(
                f"Unknown parameter {name!r}; a layer of this variant has {known}. Pass the "
                "entries of one attention layer with its prefix removed."
            )
    return ours


def published_state_dict(
    conventions: Conventions, state_dict: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return our parameters under a published layer's names; undoes :func:`translate_state_dict`.

    Args:
        conventions: One of :data:`PUBLISHED`.
        state_dict: Parameters of one layer with these conventions.
    """
    theirs: dict[str, Tensor] = {}
    for name, target in conventions.names:
        for rest in ("", ".weight", ".bias"):
            ours = [f"{part}{rest}" for part in target.split("+")]
            if ours[0] in state_dict:
                parts = [state_dict[part] for part in ours]
                theirs[f"{name}{rest}"] = torch.cat(parts) if len(parts) > 1 else parts[0]
    return theirs


def _match(name: str, pairs: tuple[tuple[str, str], ...]) -> tuple[str, str, str]:
    """Return their name and ours of the module, and the rest of ``name``; empty if unknown."""
    for theirs, ours in pairs:
        if name == theirs or name.startswith(f"{theirs}."):
            return theirs, ours, name[len(theirs) :]
    return "", "", ""
