"""Order by affinities alone, without training."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from primal_attention.tasks.lists.base import BaseReranker, Lists

__all__ = ["AffinityReranker"]


class AffinityReranker(BaseReranker):
    """Order by the similarity of affinities: how alike query and candidate see the top of the list.

    The affinities ``a_i = (x_i·A_1, …, x_i·A_L)`` to the anchors, which are the query and the best
    results, have the inner products ``a_i·a_j = x_iᵀ M x_j`` with ``M = Σ A_l A_lᵀ``. So directions
    that are frequent among the top results count more, as in a principal component analysis of
    them. It can lower the precision: with few anchors, affinities of distant candidates are mostly
    noise. Prefer :class:`DiffusionReranker` if nothing is trained. Time ``O(K d min(L, d))`` a
    list.

    Args:
        anchors: Number of anchors, the query included.
        normalize: ``"both"`` divides by the norms of both affinities (published), ``"query"``
            orders by ``x_iᵀ M q``.

    Example:
        >>> import numpy as np
        >>> x = np.array([[1.0, 0.0], [0.8, 0.6], [0.6, -0.8]])
        >>> AffinityReranker().rerank(x[:1], x, [[0, 1, 2]]).ids
        array([[0, 1, 2]])
    """

    def __init__(self, anchors: int = 128, normalize: Literal["both", "query"] = "both") -> None:
        self.anchors = anchors
        self.normalize = normalize

    def score_lists(self, lists: Lists) -> tuple[Float[Tensor, "b k"], Lists]:
        """Return the cosines of affinities, or their products with the affinities of the query."""
        if self.normalize not in ("both", "query"):
            raise ValueError(f"normalize must be 'both' or 'query', got {self.normalize!r}.")
        if self.anchors < 1:
            raise ValueError(f"anchors must be at least 1, got {self.anchors}.")
        tokens = torch.cat([lists.query[:, None], lists.items], 1)
        seen = _affinity_features(tokens, tokens[:, : self.anchors])
        if self.normalize == "both":
            seen = normalize(seen, dim=2)
        query = normalize(seen[:, 0], dim=1)
        return torch.einsum("bd,bkd->bk", query, seen[:, 1:]), lists


def _affinity_features(
    tokens: Float[Tensor, "b n d"], anchors: Float[Tensor, "b l d"]
) -> Float[Tensor, "b n p"]:
    """Return features with the inner products of the affinities, of the smaller width of two.

    With fewer anchors than dimensions these are the affinities; otherwise ``R x`` with ``M = RᵀR``.
    """
    if anchors.shape[1] <= anchors.shape[2]:
        return tokens @ anchors.transpose(1, 2)
    factor: Tensor = torch.linalg.qr(anchors, mode="r").R  # anchors = Q R, so that M = RᵀR
    return tokens @ factor.transpose(1, 2)
