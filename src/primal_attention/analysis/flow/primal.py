"""Flow between modalities in primal layers, from scores and without an ``n × n`` matrix.

A primal layer with scores ``E``, ``R`` and weights ``Λ`` of its directions stands for the kernel
``K̂ = E Λ Rᵀ``. With ``P`` the indicator of the modalities:

- *energy* ``‖K̂_ac‖² = Tr(Λ G_a Λ G_c)``, with the Gram matrices of the scores of each modality;
- *contribution*: projection weights are sums over tokens, so the score of every token is exactly
  the sum of one part for each modality; see :func:`split_scores`;
- *directions*: the singular directions of ``K̂``, and how much of each is in which modality.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from primal_attention.hosts import CapturedScores

__all__ = ["DirectionShares", "block_energy", "direction_shares"]

_CHUNK = 256
"""Rows of the causal energy that are compared pair by pair."""


def block_energy(
    scores: CapturedScores,
    receivers: Float[Tensor, "n M"],
    senders: Float[Tensor, "m M"],
    *,
    is_causal: bool = False,
) -> Float[Tensor, "h M M"]:
    """Return ``‖K̂_ac‖²`` of every block; the blocks sum to ``‖K̂‖²``. Costs ``O(n s²)``.

    Args:
        scores: Scores of one sequence.
        receivers: Modality of the queries, from :func:`membership`.
        senders: Modality of the keys.
        is_causal: Whether pairs with a later key count as zero.

    Example:
        >>> one = torch.tensor([[[1.0], [2.0]]])
        >>> block_energy(CapturedScores(one, one, torch.ones(1, 1)), torch.eye(2), torch.eye(2))
        tensor([[[ 1.,  4.],
                 [ 4., 16.]]])
    """
    e, r = scores.e * scores.lam[:, None], scores.r
    if not is_causal:
        gram_e = torch.einsum("na,hns,hnt->hast", receivers, e, e)
        gram_r = torch.einsum("mc,hms,hmt->hcst", senders, r, r)
        return torch.einsum("hast,hcst->hac", gram_e, gram_r)
    h, n, s = e.shape
    found = e.new_zeros(h, receivers.shape[1], senders.shape[1])
    gram = e.new_zeros(h, senders.shape[1], s, s)
    for start in range(0, n, _CHUNK):
        rows = slice(start, min(start + _CHUNK, n))
        now, keys, member = e[:, rows], r[:, rows], senders[rows]
        before = torch.einsum("hns,hcst,hnt->hnc", now, gram, now)
        inside = (now @ keys.mT).square().tril() @ member
        found += torch.einsum("na,hnc->hac", receivers[rows], before + inside)
        gram += torch.einsum("mc,hms,hmt->hcst", member, keys, keys)
    return found


class DirectionShares(NamedTuple):
    """Singular directions of ``K̂`` of every head, and their parts in each modality."""

    sigma: Float[Tensor, "h s"]
    """Singular values, largest first; zero beyond the number of tokens."""
    receivers: Float[Tensor, "h s M"]
    """Share of each left direction that lies on the receivers of each modality."""
    senders: Float[Tensor, "h s M"]
    """Share of each right direction that lies on the senders of each modality."""

    @property
    def alignment(self) -> Float[Tensor, "h s"]:
        """How much of each direction leads from one modality to another, 0 to 1."""
        pairs = torch.einsum("hsa,hsc->hsac", self.receivers, self.senders)
        outside = pairs - torch.diag_embed(pairs.diagonal(dim1=-2, dim2=-1))
        return outside.sum((-2, -1))


def direction_shares(
    scores: CapturedScores, receivers: Float[Tensor, "n M"], senders: Float[Tensor, "m M"]
) -> DirectionShares:
    """Return the singular directions of ``K̂`` and their shares by modality, in ``O(n s²)``.

    A direction that reads from one modality and writes to another aligns them. A direction confined
    to one modality works inside it ("parsing"). Learned directions need not be singular
    directions, so these are computed from the scores, by two QR decompositions.

    Args:
        scores: Scores of one sequence.
        receivers: Modality of the queries, from :func:`membership`.
        senders: Modality of the keys.

    Example:
        >>> e, r = torch.tensor([[[1.0], [0.0]]]), torch.tensor([[[0.0], [1.0]]])
        >>> found = direction_shares(CapturedScores(e, r, torch.ones(1, 1)), *2 * [torch.eye(2)])
        >>> found.alignment
        tensor([[1.]])
    """
    (h, _, s), count = scores.e.shape, receivers.shape[1]
    q_e, t_e = torch.linalg.qr(scores.e)
    q_r, t_r = torch.linalg.qr(scores.r)
    u, sigma, vh = torch.linalg.svd(t_e * scores.lam[:, None] @ t_r.mT, full_matrices=False)
    left, right = (q_e @ u).square(), (q_r @ vh.mT).square()
    found = DirectionShares(
        scores.e.new_zeros(h, s), *(scores.e.new_zeros(h, s, count) for _ in range(2))
    )
    k = sigma.shape[-1]
    found.sigma[:, :k] = sigma
    found.receivers[:, :k] = torch.einsum("hns,na->hsa", left, receivers)
    found.senders[:, :k] = torch.einsum("hms,mc->hsc", right, senders)
    return found
