"""The five published variants of Primal-Attention: their conventions and parameter names.

The released experiments differ from each other and from what a careful user wants: which rows are
sampled, how the parameters start, whether ``ℓ`` is kept positive, how the loss is reduced, what a
mask does. :class:`Conventions` holds these choices; :data:`SOUND` are ours.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from primal_attention.attention.base import Attention
from primal_attention.functional import Reduction

__all__ = [
    "PUBLISHED",
    "SAMPLES_PER_DIRECTION",
    "SOUND",
    "Conventions",
    "PublishedVariants",
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

SAMPLES_PER_DIRECTION = 10
"""Sampled rows per direction, the paper's rule."""

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


class PublishedVariants(nn.Module):
    """The part of a layer that builds, loads and saves the published variants."""

    conventions: Conventions

    @classmethod
    def reference(
        cls,
        variant: str,
        dim: int,
        num_heads: int = 8,
        *,
        rank: int,
        num_samples: int | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> Self:
        """Build the layer of one published experiment exactly, with its quirks.

        Sampling ignores masks (``"uea"``, ``"vit"``, ``"d4rl"`` and ``"wikitext"`` refuse one,
        ``"lra"`` zeroes outputs), sampled rows are not normalised, ``lam`` is unconstrained,
        weights start as the released code starts them, the loss is reduced as there.

        Args:
            variant: ``"uea"``, ``"lra"``, ``"d4rl"``, ``"vit"`` or ``"wikitext"``.
            dim: Model width.
            num_heads: Heads.
            rank: Directions per head.
            num_samples: Sampled rows; by default ten per direction, as for LRA. The released UEA
                layer has ``min(longest training series, 5 or 10 × rank)``, the ViT one 197.
            device: Where to create the parameters.
            dtype: Type of the parameters.

        Example:
            >>> from primal_attention import PrimalAttention
            >>> PrimalAttention.reference("uea", 512, rank=30, num_samples=300).num_samples
            300
        """
        if variant not in PUBLISHED:
            raise ValueError(f"variant must be one of {tuple(PUBLISHED)}, got {variant!r}.")
        layer = cls.__new__(cls)
        Attention.__init__(layer, dim, num_heads)  # type: ignore[arg-type]
        layer._build(  # type: ignore[operator]
            rank,
            PUBLISHED[variant].weights,
            "table",
            None,
            "ksvd",
            True,
            {"device": device, "dtype": dtype},
            num_samples=SAMPLES_PER_DIRECTION * rank if num_samples is None else num_samples,
            conventions=PUBLISHED[variant],
        )
        return layer

    def load_reference_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load the parameters of a released layer under their original names.

        Args:
            state_dict: The entries of one attention layer, its prefix removed.
        """
        self._check_published()
        self.load_state_dict(translate_state_dict(self.conventions, state_dict))

    def reference_state_dict(self) -> dict[str, Tensor]:
        """Return the parameters under the names of the released layer, for its own code to load.

        Example:
            >>> from primal_attention import PrimalAttention
            >>> sorted(PrimalAttention.reference("lra", 8, 2, rank=3).reference_state_dict())[:3]
            ['W_k.bias', 'W_k.weight', 'W_q.bias']
        """
        self._check_published()
        return published_state_dict(self.conventions, self.state_dict())

    def _check_published(self) -> None:
        if self.conventions == SOUND:
            raise RuntimeError(
                "This layer follows our conventions, not a published variant's; build it with "
                "PrimalAttention.reference(variant, ...) and use that."
            )
