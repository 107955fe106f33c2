"""k-reciprocal encoding: items are alike if they have the same mutual neighbours.

Each item is encoded by its k-reciprocal neighbours, extended by those of them that share most of
their own, with weights ``exp(-distance)`` and averaged over its nearest items. The new distance is
a mix of the Jaccard distance between the codes and the first distance. (Zhong et al., CVPR 2017.)
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from primal_attention.tasks.lists.base import BaseReranker, Lists, pairwise_neighbours

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

__all__ = ["KReciprocal"]


class KReciprocal(BaseReranker):
    """Order by Jaccard distance between sets of mutual neighbours within the list.

    Time ``O(K² d)`` and memory ``O(K k1)`` a list; the published form needs a matrix over all
    queries and the whole gallery.

    Args:
        k1: Number of neighbours of the encoding.
        k2: Number of nearest items over which codes are averaged.
        weight: Share of the first distance.

    Example:
        >>> x = np.array([[1.0, 0.0], [0.8, 0.6], [0.6, -0.8]])
        >>> KReciprocal(k1=2, k2=1).rerank(x[:1], x, [[0, 1, 2]]).ids
        array([[0, 1, 2]])
    """

    def __init__(self, k1: int = 20, k2: int = 6, weight: float = 0.3) -> None:
        self.k1 = k1
        self.k2 = k2
        self.weight = weight

    def score_lists(self, lists: Lists) -> tuple[Float[Tensor, "b k"], Lists]:
        """Return the negative mixed distance of each candidate."""
        if self.k1 < 1 or self.k2 < 1:
            raise ValueError(f"k1 and k2 must be at least 1, got {self.k1} and {self.k2}.")
        scores = torch.zeros(lists.ids.shape)
        for i, count in enumerate(lists.keep.sum(1).tolist()):
            if count:
                tokens = torch.cat([lists.query[i : i + 1], lists.items[i, :count]])
                scores[i, :count] = torch.from_numpy(-self._distances(tokens)).float()
        return scores, lists

    def _distances(self, x: Float[Tensor, "n d"]) -> NDArray[np.float64]:
        """Return the mixed distances of all tokens but the first to the first."""
        keep = torch.ones(1, len(x), dtype=torch.bool)
        cosines, places = pairwise_neighbours(x[None], keep, self.k1)
        near = np.concatenate([np.arange(len(x))[:, None], places[0].numpy()], 1)  # self first
        close = np.concatenate([np.ones((len(x), 1)), cosines[0].numpy()], 1)
        # squared distances, as a share of the largest one from the query
        first = 2 - 2 * (x[1:] @ x[0]).double().numpy()
        largest = max(first.max(), 1e-12)
        codes = self._codes(near, (2 - 2 * close) / largest)
        query, others = codes[0], codes[1:]
        shared = others.minimum(_repeat(query, len(x) - 1)).sum(1).A1
        jaccard = 1 - shared / (2 - shared)
        return (1 - self.weight) * jaccard + self.weight * first / largest

    def _codes(self, near: NDArray[np.int64], distance: NDArray[np.float64]) -> "csr_matrix":
        """Return the codes as a sparse matrix [n n] with rows of sum one."""
        from scipy import sparse

        n, wide = near.shape
        half = 1 + min(round(self.k1 / 2), wide - 1)
        mutual = _mutual(near, n)
        inner = _mutual(near[:, :half], n)
        # neighbours of neighbours join if two thirds of their own set is shared
        overlap = inner @ mutual.T  # [j i]: items of j's small set in i's set
        sizes = np.diff(inner.indptr)
        overlap = overlap.tocoo()
        enough = overlap.data > 2 / 3 * sizes[overlap.row]
        joins = sparse.csr_matrix(
            (np.ones(enough.sum()), (overlap.col[enough], overlap.row[enough])), shape=(n, n)
        ).multiply(mutual)
        extended = ((joins @ inner + mutual) > 0).astype(np.float64).tocoo()
        known = sparse.csr_matrix(
            (np.exp(-distance).ravel(), (np.repeat(np.arange(n), wide), near.ravel())), (n, n)
        )
        weights = extended.tocsr().multiply(known).tocsr()
        # an item that joined from farther than k1 gets the weight of the farthest neighbour
        farthest = np.exp(-distance[:, -1])
        missing = (extended.tocsr() - (weights > 0)).tocoo()
        filled = sparse.csr_matrix(
            (farthest[missing.row] * missing.data, (missing.row, missing.col)), (n, n)
        )
        weights = weights + filled
        weights = sparse.diags_array(1 / weights.sum(1).A1) @ weights
        nearest = near[:, : self.k2]
        mean = sparse.csr_matrix(
            (
                np.full(nearest.size, 1 / nearest.shape[1]),
                (np.repeat(np.arange(n), nearest.shape[1]), nearest.ravel()),
            ),
            (n, n),
        )
        return (mean @ weights).tocsr()


def _mutual(near: NDArray[np.int64], n: int) -> "csr_matrix":
    """Return the matrix of mutual neighbours, each item its own."""
    from scipy import sparse

    ones = np.ones(near.size)
    rows = np.repeat(np.arange(n), near.shape[1])
    links = sparse.csr_matrix((ones, (rows, near.ravel())), (n, n))
    return links.multiply(links.T).tocsr()


def _repeat(row: "csr_matrix", count: int) -> "csr_matrix":
    from scipy import sparse

    return sparse.csr_matrix(np.ones((count, 1))) @ row
