"""Shares of attention between modalities, their chance level and their mean over samples.

For one layer and one sample, with the weights ``A`` of its heads and ``P_a`` the indicator of the
tokens of modality ``a``::

    F[a ← c] = (1/H) Σ_h P_aᵀ A^h P_c         what the tokens of a receive from those of c
    R[a ← c] = F[a ← c] / Σ_c F[a ← c]        received share; rows sum to one
    IMF      = Σ_{a≠c} F[a ← c] / Σ F         share that crosses between modalities

The chance level is the same for attention that is uniform over what each token can see. The lift
``R / chance`` is one for attention that does not care about modalities. Shares are taken for each
sample, and then averaged: long samples do not count more than short ones.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = [
    "LayerFlow",
    "SampleFlow",
    "average_shares",
    "expected_sums",
    "membership",
    "visible_counts",
]


class SampleFlow(NamedTuple):
    """Sums ``F`` of one layer on one sample."""

    received: Float[Tensor, "h M M"]
    """``P_aᵀ W P_c`` of every head; receivers are rows."""
    expected: Float[Tensor, "M M"]
    """The same for weights that are uniform over the visible tokens."""


class LayerFlow(NamedTuple):
    """Shares of one layer, mean over samples; zero where no sample has the modality."""

    flow: Float[Tensor, "M M"]
    by_head: Float[Tensor, "h M M"]
    chance: Float[Tensor, "M M"]
    lift: Float[Tensor, "M M"]
    has_lift: Bool[Tensor, "M M"]
    """Whether a sample has both modalities and lets the one see the other."""
    imf: Float[Tensor, ""]
    imf_chance: Float[Tensor, ""]
    imf_lift: Float[Tensor, ""]


def membership(ids: Int[Tensor, " n"], count: int) -> Float[Tensor, "n M"]:
    """Return the indicator ``P`` of the modalities; tokens with a negative id belong to none.

    Example:
        >>> membership(torch.tensor([1, -1, 0]), 2)
        tensor([[0., 1.],
                [0., 0.],
                [1., 0.]], dtype=torch.float64)
    """
    return (ids[:, None] == torch.arange(count, device=ids.device)).double()


def visible_counts(
    senders: Float[Tensor, "m M"], queries: int, *, is_causal: bool
) -> Float[Tensor, "n M"]:
    """Return how many tokens of each modality every query can see.

    Causal queries are the last ones of the keys, as with a cache of earlier keys.
    """
    if not is_causal:
        return senders.sum(0).expand(queries, -1)
    return senders.cumsum(0)[len(senders) - queries :]


def expected_sums(
    receivers: Float[Tensor, "n M"], counts: Float[Tensor, "n M"], *, power: int = 1
) -> Float[Tensor, "M M"]:
    """Return ``F`` of weights ``(1/k_i)^power`` on the ``k_i`` tokens that query ``i`` can see.

    Args:
        receivers: Modality of the queries.
        counts: From :func:`visible_counts`.
        power: 2 for energies.
    """
    total = counts.sum(1, keepdim=True).clamp_min(1)
    return receivers.T @ (counts / total**power)


def average_shares(samples: Sequence[SampleFlow]) -> LayerFlow:
    """Return the shares of a layer, averaged over samples after normalising each.

    A sample without tokens of a modality does not count for its row. So nothing is divided by zero.

    Example:
        >>> one = SampleFlow(torch.eye(2)[None].double(), torch.full((2, 2), 0.5).double())
        >>> average_shares([one]).lift
        tensor([[2., 0.],
                [0., 2.]], dtype=torch.float64)
    """
    heads = torch.stack([sample.received for sample in samples])  # [b h M M]
    expected = torch.stack([sample.expected for sample in samples])  # [b M M]
    received = heads.mean(1)
    share, has_row = _normalize(received)
    chance, has_chance = _normalize(expected)
    by_head, has_head = _normalize(heads)
    compared = has_row & has_chance & (chance > 0)
    lift = share / torch.where(chance > 0, chance, 1.0)
    imf, has_imf = _crossing(received)
    imf_chance, _ = _crossing(expected)
    compares = has_imf & (imf_chance > 0)
    return LayerFlow(
        _mean(share, has_row),
        _mean(by_head, has_head),
        _mean(chance, has_chance & has_row),
        _mean(lift, compared),
        compared.any(0),
        _mean(imf, has_imf),
        _mean(imf_chance, has_imf),
        _mean(imf / torch.where(imf_chance > 0, imf_chance, 1.0), compares),
    )


def _normalize(sums: Float[Tensor, "*b M M"]) -> tuple[Tensor, Bool[Tensor, "*b M 1"]]:
    """Return rows that sum to one, and which rows have a sum."""
    total = sums.sum(-1, keepdim=True)
    return sums / torch.where(total > 0, total, 1.0), total > 0


def _crossing(sums: Float[Tensor, "b M M"]) -> tuple[Tensor, Bool[Tensor, " b"]]:
    """Return the share off the diagonal, and which samples have any sum."""
    total = sums.sum((-2, -1))
    # not total minus diagonal: rounding would leave a little where nothing crosses
    outside = sums - torch.diag_embed(sums.diagonal(dim1=-2, dim2=-1))
    return outside.sum((-2, -1)) / torch.where(total > 0, total, 1.0), total > 0


def _mean(values: Float[Tensor, "b *rest"], valid: Tensor) -> Float[Tensor, "*rest"]:
    """Return the mean over the samples that are valid; zero without any."""
    valid = valid.expand(values.shape)
    return torch.where(valid, values, 0.0).sum(0) / valid.sum(0).clamp_min(1)
