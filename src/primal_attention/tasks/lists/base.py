"""The face of every re-ranker: two arrays in, two arrays out.

A re-ranker reads the query and its candidates as unit vectors, first candidate first. It may refine
the vectors, and it returns one score for each candidate. Everything happens within one list, so
memory grows with the lists and never with the square of the gallery.
"""

from abc import abstractmethod
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from primal_attention.support.command import needs
from primal_attention.tasks.lists.gallery import Gallery, as_vectors, check_ids

with needs("sklearn", "A re-ranker"):
    from sklearn.base import BaseEstimator

__all__ = ["BaseReranker", "Lists", "Reranked"]


class Reranked(NamedTuple):
    """Result of a re-ranking, in the shape of the lists that came in."""

    ids: Any
    """Ids, best first; empty slots (-1) are last."""
    scores: Any
    """New scores; ``-inf`` for results beyond the candidates and for empty slots."""


class Lists(NamedTuple):
    """Queries and their candidates as unit vectors, best candidate first."""

    query: Float[Tensor, "b d"]
    items: Float[Tensor, "b k d"]
    """Zero in empty slots, which are all at the end."""
    ids: Int[Tensor, "b k"]
    """Places in the gallery; -1 in empty slots."""

    @property
    def keep(self) -> Bool[Tensor, "b k"]:
        """``True`` where there is a candidate."""
        return self.ids >= 0

    @property
    def first_scores(self) -> Float[Tensor, "b k"]:
        """Cosine of each candidate with the query."""
        return torch.einsum("bd,bkd->bk", self.query, self.items)

    def reorder(self, order: Tensor) -> Self:
        """Return the lists with their candidates in another order."""
        items = self.items.gather(1, order[:, :, None].expand_as(self.items))
        return type(self)(self.query, items, self.ids.gather(1, order))


class BaseReranker(BaseEstimator):  # type: ignore[misc]
    """Base class: reads lists in blocks, re-orders them, and leaves the rest in place."""

    @abstractmethod
    def score_lists(self, lists: Lists) -> tuple[Float[Tensor, "b k"], Lists]:
        """Return the scores of all candidates, and the lists with refined vectors.

        Scores of empty slots are ignored.
        """

    def rerank(
        self,
        xq: object,
        xb: object,
        ids: object,
        *,
        candidates: int | None = None,
        blend: float = 0.0,
        normalize: bool = False,
        max_memory: int = 2**29,
    ) -> Reranked:
        """Return the results of a search in a better order.

        Args:
            xq: Vectors of the queries [queries, width].
            xb: Vectors of the gallery: an array or memory map [items, width], a tensor, a function
                from ids to vectors, or an index of faiss. Only rows of candidates are read.
            ids: Results of the search [queries, results], best first; -1 is an empty slot. Lists
                of different lengths may come as a list of arrays.
            candidates: Number of results to re-order; by default all. The others stay behind them
                in their order.
            blend: Share of the first search in the new order, from 0 to 1. Both scores are
                standardised within each list first.
            normalize: Whether to scale all vectors to norm one. Without it other norms are refused.
            max_memory: Bytes of vectors to hold at once; long lists are read a few at a time.

        Returns:
            Ids and scores: tensors if ``ids`` is a tensor, else arrays.
        """
        if not 0 <= blend <= 1:
            raise ValueError(f"blend must be between 0 and 1, got {blend}.")
        if candidates is not None and candidates < 0:
            raise ValueError(f"candidates must be at least 0, got {candidates}.")
        queries, found = as_vectors(xq, "xq (the queries)", normalize), check_ids(ids)
        if len(queries) != len(found):
            raise ValueError(
                f"xq holds {len(queries)} queries and ids {len(found)} lists; give one list for "
                "each query."
            )
        gallery = Gallery(xb, normalize=normalize)
        found = _empty_last(found)
        count = found.shape[1] if candidates is None else min(candidates, found.shape[1])
        scores = np.full(found.shape, -np.inf, dtype=np.float32)
        size = max(1, max_memory // max(1, 4 * count * queries.shape[1]))
        for start in range(0, len(found) if count else 0, size):
            rows = slice(start, start + size)
            head = found[rows, :count]
            order, values = self._rerank_block(queries[rows], gallery, head, blend, max_memory)
            found[rows, :count] = np.take_along_axis(head, order, 1)
            scores[rows, :count] = values
        if isinstance(ids, Tensor):
            return Reranked(torch.from_numpy(found).to(ids.device), torch.from_numpy(scores))
        return Reranked(found, scores)

    @torch.no_grad()
    def _rerank_block(
        self,
        queries: Tensor,
        gallery: Gallery,
        ids: NDArray[np.int64],
        blend: float,
        max_memory: int,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the new order of the candidates of some lists, and their scores in it."""
        items = gallery.take(ids)
        if items.shape[-1] != queries.shape[1]:
            raise ValueError(
                f"xq has width {queries.shape[1]} and the gallery {items.shape[-1]}; both must "
                "come from the same model."
            )
        lists = Lists(queries, items, torch.from_numpy(ids))
        scores = self.score_lists(lists)[0].float()
        return ordered(scores, lists.first_scores, lists.keep, blend)


def ordered(
    scores: Tensor, first: Tensor, keep: Tensor, blend: float
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the order of candidates and their scores in it; empty slots are last."""
    if not torch.where(keep, scores, 0.0).isfinite().all():
        raise ValueError(
            "The re-ranker has no finite score for a candidate; its weights are damaged, train or "
            "load it again."
        )
    if blend:
        old, new = (_standardise(values, keep) for values in (first, scores))
        scores = (1 - blend) * new + blend * old
    scores = torch.where(keep, scores, -torch.inf)
    # stable: equal scores keep the order of the first search
    values, order = scores.sort(dim=1, descending=True, stable=True)
    return order.numpy(), values.numpy()


def _standardise(scores: Tensor, keep: Tensor) -> Tensor:
    count = keep.sum(1, keepdim=True).clamp_min(1)
    kept = torch.where(keep, scores, 0.0)
    centred = torch.where(keep, scores - kept.sum(1, keepdim=True) / count, 0.0)
    spread = (centred.square().sum(1, keepdim=True) / count).sqrt()
    return centred / spread.clamp_min(1e-12)


def _empty_last(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the lists with empty slots behind all results, which keep their order."""
    order = np.argsort(ids < 0, axis=1, kind="stable")
    return np.take_along_axis(ids, order, 1)


def pairwise_neighbours(
    x: Float[Tensor, "b n d"], keep: Bool[Tensor, "b n"], k: int, *, block: int = 2**24
) -> tuple[Tensor, Tensor]:
    """Return the ``k`` most similar other items of each item: cosines and places [b n k].

    Computed in blocks of rows: ``O(n k)`` memory. Missing neighbours have the cosine ``-inf``.
    """
    b, n, _ = x.shape
    k = min(k, n - 1)
    if k < 1:
        empty = x.new_zeros(b, n, 0)
        return empty, empty.long()
    rows = max(1, block // (b * n))
    values, places = [], []
    for start in range(0, n, rows):
        part = x[:, start : start + rows]
        cosines = part @ x.transpose(1, 2)  # [b rows n]
        own = torch.arange(start, start + part.shape[1])
        cosines[:, torch.arange(part.shape[1]), own] = -torch.inf
        cosines.masked_fill_(~keep[:, None, :], -torch.inf)
        best = cosines.topk(k, dim=2)
        values.append(best.values)
        places.append(best.indices)
    found = torch.cat(values, 1)
    return found.masked_fill(~keep[:, :, None], -torch.inf), torch.cat(places, 1)


def gather_items(x: Float[Tensor, "b n d"], places: Tensor) -> Float[Tensor, "b m k d"]:
    """Return the items in given places [b m k] of each list."""
    b, m, k = places.shape
    return x.gather(1, places.reshape(b, m * k, 1).expand(-1, -1, x.shape[2])).view(b, m, k, -1)
