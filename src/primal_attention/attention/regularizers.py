"""The regularisers of a primal layer that need only the energy of its scores.

``ksvd`` is the published ``J²``; ``balance`` compares the energies of the two sides. The third
regulariser, ``kkt``, needs the features too: see :mod:`primal_attention.attention.kernel_problem`.
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from primal_attention.functional import (
    Reduction,
    average_over_sequences,
    balance,
    ksvd_objective,
    parameter_trace,
    reduce_objective,
)
from primal_attention.functional.ksvd import FLOOR, SampleLoss
from primal_attention.functional.precision import is_traced, representable

__all__ = ["Regularizer", "TokenCount", "all_of", "energy_term"]

Regularizer = Literal["ksvd", "kkt", "balance"]


class TokenCount(NamedTuple):
    """Tokens of a batch of sequences, some of them padding."""

    tokens: int
    """Tokens of each sequence, padding included."""
    key_mask: Bool[Tensor, "b n"] | None
    """``True`` where a token is real."""

    def mean(self, total: Float[Tensor, "b *rest"]) -> Float[Tensor, "b *rest"]:
        """Return a sum over tokens divided by the number of real ones."""
        if self.key_mask is None:
            return total / max(self.tokens, 1)
        return total / self.key_mask.sum(1).clamp_min(1).view(-1, *[1] * (total.dim() - 1))

    def nonempty(self, like: Tensor) -> Bool[Tensor, " b"] | None:
        """Return which sequences have a real token; ``None`` if all have."""
        if self.key_mask is not None:
            return self.key_mask.any(1)
        if self.tokens:
            return None
        return torch.zeros(len(like), dtype=torch.bool, device=like.device)


def energy_term(
    regularizer: Literal["ksvd", "balance"],
    reduction: Reduction,
    energy: Float[Tensor, "b both s"],
    counts: tuple[TokenCount, TokenCount],
    ell: Float[Tensor, "h s"],
    coupled: tuple[Float[Tensor, "*b h k s"], Float[Tensor, "*b h k s"]],
    floor: float | None = None,
) -> Float[Tensor, ""]:
    """Return a regulariser from the energy of the scores, unweighted, in float32 or better.

    Args:
        regularizer: Which one.
        reduction: How the published ``ksvd`` goes from objectives to one number.
        energy: Of the query side and, after it, of the key side.
        counts: Tokens of the query side and of the key side.
        ell: ``ℓ``, in float32 or better.
        coupled: The two factors of the trace ``Tr(W_eᵀ W_r)``.
        floor: Scores below this count as this in ``balance``; by default what ``coupled`` allows.
    """
    (tokens, mask), b, h = counts[0], energy.shape[0], ell.shape[0]
    # the common case in one function of autograd: on short inputs the number of calls decides
    usual = (regularizer, reduction) == ("ksvd", "sample") and counts[0] is counts[1]
    if usual and tokens * b and energy.dtype == coupled[0].dtype and not is_traced():
        share: float | Tensor = 0.5 / (h * tokens)
        weight: float | Tensor = 1 / b
        if mask is not None:
            real = mask.any(1).to(energy.dtype)
            share = 0.5 / (h * mask.sum(1).clamp_min(1).to(energy.dtype))
            weight = real / real.sum().clamp_min(1)
        return SampleLoss.apply(energy, ell, *coupled, share, weight)  # type: ignore[no-untyped-call]
    energy_e, energy_r = energy.chunk(2, dim=1)
    moments = counts[0].mean(energy_e), counts[1].mean(energy_r)
    nonempty = all_of([c.nonempty(energy) for c in counts])
    if regularizer == "balance":
        # in float16 the inverse square of the usual floor would overflow
        floor = representable(FLOOR, coupled[0]) if floor is None else floor
        return average_over_sequences(balance(*moments, floor=floor).mean(1), nonempty)
    objective = ksvd_objective(*moments, ell, parameter_trace(*coupled))
    return reduce_objective(objective, reduction, keep=nonempty)


def all_of(masks: list[Bool[Tensor, " b"] | None]) -> Bool[Tensor, " b"] | None:
    """Return which sequences every mask keeps; ``None`` keeps all."""
    given = [mask for mask in masks if mask is not None]
    return torch.stack(given).all(0) if given else None
