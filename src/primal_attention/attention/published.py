"""The five published variants of Primal-Attention: their conventions and parameter names.

The released experiments differ from each other and from what a careful user wants: which rows are
sampled, how the parameters start, whether ``ℓ`` is kept positive, how the loss is reduced, what a
mask does. :class:`Conventions` holds these choices; :data:`SOUND` are ours.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from primal_attention.functional import Reduction

__all__ = [
    "PUBLISHED",
    "SOUND",
    "Conventions",
    "published_state_dict",
    "start_linear",
    "translate_state_dict",
]


@dataclass(frozen=True)
class Conventions:
    """Choices that change numbers but that nobody should have to make."""

    mask: Literal["aware", "output", "refuse"] = "aware"
    """``aware``: padding influences nothing. ``output``: only zeroes the heads' outputs (LRA)."""
    standardize: bool = True
    """Standardise sampled rows, so that scores do not grow with the input."""
    positive_lam: bool = True
    """Store ``ℓ`` through a softplus instead of raw."""
    flat_init: bool = False
    """Orthogonalise the flattened heads against each other instead of each head's columns."""
    linear_init: Literal["torch", "gpt2", "fairseq"] = "torch"
    """How the linear maps start; see :func:`start_linear`."""
    reduction: Reduction = "sample"
    """How ``J`` becomes a loss."""
    eps: float = 1e-6
    """Norms below this count as this."""
    causal_only: bool = False
    """The published layer exists in causal form only."""
    weights: Literal["data", "static"] = "data"
    """Which projection weights a published layer uses."""
    names: tuple[tuple[str, str], ...] = ()
    """Its parameter names: pairs (theirs, ours)."""


SOUND = Conventions()

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


PUBLISHED = {
    "uea": _published(_UEA_NAMES),
    "lra": _published(_LRA_NAMES, mask="output", reduction="batch"),
    "vit": _published(_VIT_NAMES, reduction="batch"),
    "d4rl": _published(_D4RL_NAMES, causal=True, linear_init="gpt2"),
    "wikitext": _published(_WIKITEXT_NAMES, causal=True, linear_init="fairseq"),
}


def start_linear(conventions: Conventions, name: str, linear: nn.Linear) -> None:
    """Draw the parameters of the layer's map ``name`` where that variant departs from torch.

    ``gpt2`` redraws every map from ``N(0, 0.02²)`` with a zero bias; ``fairseq`` draws queries and
    keys by Xavier's rule with gain ``1/√2``, the output with gain one and a zero bias.
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
        ValueError: If a name is not one of that variant's.
    """
    ours: dict[str, Tensor] = {}
    for name, value in state_dict.items():
        stem, target, rest = _match(name, conventions.names)
        if target == "q_proj+k_proj":
            ours[f"q_proj{rest}"], ours[f"k_proj{rest}"] = value.chunk(2, dim=0)
        elif stem:
            ours[f"{target}{rest}"] = value
        else:
            known = ", ".join(theirs for theirs, _ in conventions.names)
            raise ValueError(
                f"Unknown parameter {name!r}; a layer of this variant has {known}. Pass the "
                "entries of one attention layer with its prefix removed."
            )
    return ours


def published_state_dict(
    conventions: Conventions, state_dict: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return our parameters under a published layer's names: :func:`translate_state_dict` undone.

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
    for theirs, ours in pairs:
        if name == theirs or name.startswith(f"{theirs}."):
            return theirs, ours, name[len(theirs) :]
    return "", "", ""
