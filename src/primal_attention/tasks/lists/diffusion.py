"""Diffusion on the graph of a list: linear attention of infinite depth with tied weights.

Items are the nodes of a graph. Two items are connected if each is among the ``k`` nearest of the
other; the edge has the weight ``max(x_i·x_j, 0)^γ``. With ``S = D^{-1/2} W D^{-1/2}`` the scores
are ``(I − αS)^{-1} y = Σ_t (αS)^t y``, where ``y`` marks the query. Conjugate gradients solve this
in about twenty steps; a truncated series needs hundreds at ``α = 0.99``. (Iscen et al., CVPR 2017.)
"""

from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from primal_attention.tasks.lists.base import (
    BaseReranker,
    Lists,
    Reranked,
    pairwise_neighbours,
)
from primal_attention.tasks.lists.gallery import Gallery

__all__ = ["DiffusionReranker", "ListGraph", "diffuse", "graph_of_cosines", "list_graph"]


class ListGraph(NamedTuple):
    """A sparse symmetric graph for each list: ``k`` neighbours of each node."""

    places: Int[Tensor, "b n k"]
    weights: Float[Tensor, "b n k"]
    """Entries of ``S``; zero where there is no edge."""

    def smooth(self, f: Float[Tensor, "b n c"]) -> Float[Tensor, "b n c"]:
        """Return ``S f``: ``O(n k c)``."""
        result = torch.zeros_like(f)
        for j in range(self.places.shape[2]):
            place = self.places[:, :, j, None].expand(-1, -1, f.shape[2])
            result += self.weights[:, :, j, None] * f.gather(1, place)
        return result


def list_graph(
    x: Float[Tensor, "b n d"], keep: Bool[Tensor, "b n"], *, k: int = 10, gamma: float = 3.0
) -> ListGraph:
    """Return the mutual neighbour graph of the items of each list, with normalised weights.

    Computed in blocks of rows: ``O(n² d)`` time and ``O(n k)`` memory.

    Args:
        x: Unit vectors.
        keep: ``True`` where there is an item.
        k: Number of neighbours.
        gamma: Exponent of the similarities.

    Example:
        >>> x = torch.tensor([[[1.0, 0.0], [0.8, 0.6], [-1.0, 0.0]]])
        >>> list_graph(x, torch.ones(1, 3, dtype=torch.bool), k=1).weights[0, :, 0]
        tensor([1., 1., 0.])
    """
    return _mutual_graph(*pairwise_neighbours(x, keep, k), gamma)


def graph_of_cosines(
    cosines: Float[Tensor, "b n n"], keep: Bool[Tensor, "b n"], *, k: int = 10, gamma: float = 3.0
) -> ListGraph:
    """Return the graph of :func:`list_graph` from the cosines of all pairs.

    Example:
        >>> cosines = torch.tensor([[[1.0, 0.8], [0.8, 1.0]]])
        >>> graph_of_cosines(cosines, torch.ones(1, 2, dtype=torch.bool)).weights[0, :, 0]
        tensor([1., 1.])
    """
    n = cosines.shape[1]
    own = torch.eye(n, dtype=torch.bool, device=cosines.device)
    hidden = own | ~keep[:, None, :] | ~keep[:, :, None]
    best = cosines.masked_fill(hidden, -torch.inf).topk(min(k, n - 1), dim=2)
    return _mutual_graph(best.values, best.indices, gamma)


def _mutual_graph(
    cosines: Float[Tensor, "b n k"], places: Int[Tensor, "b n k"], gamma: float
) -> ListGraph:
    """Return the edges between items that are neighbours of each other."""
    b, n, k = places.shape
    own = torch.arange(n).view(1, n, 1)
    if not k:
        return ListGraph(places, cosines)
    # an edge is mutual if the node is among the neighbours of its neighbour
    theirs = places.gather(1, places.reshape(b, n * k, 1).expand(-1, -1, k)).view(b, n, k, k)
    mutual = (theirs == own[..., None]).any(3)
    edges = torch.where(mutual & (cosines > 0), cosines.clamp_min(0) ** gamma, 0.0)
    degree = edges.sum(2)
    # a node without an edge stays alone instead of dividing by zero
    scale = torch.where(degree > 0, degree.clamp_min(1e-12).rsqrt(), 0.0)
    other = scale.gather(1, places.reshape(b, n * k)).view(b, n, k)
    return ListGraph(places, edges * scale[:, :, None] * other)


def diffuse(
    graph: ListGraph,
    y: Float[Tensor, "b n c"],
    *,
    alpha: float = 0.95,
    tol: float = 1e-6,
    max_steps: int = 200,
) -> Float[Tensor, "b n c"]:
    """Return ``(I − αS)^{-1} y`` by conjugate gradients.

    Args:
        graph: The graph of each list.
        y: Where the diffusion starts.
        alpha: Share of every step that is passed on; below 1.
        tol: Relative residual at which to stop.
        max_steps: Largest number of steps.

    Example:
        >>> x = torch.tensor([[[1.0, 0.0], [0.8, 0.6]]])
        >>> graph = list_graph(x, torch.ones(1, 2, dtype=torch.bool))
        >>> diffuse(graph, torch.tensor([[[1.0], [0.0]]]), alpha=0.5)[0, :, 0]
        tensor([1.3333, 0.6667])
    """
    if not 0 <= alpha < 1:
        raise ValueError(f"alpha must be at least 0 and below 1, got {alpha}.")
    f = y.clone()
    # S is symmetric with norm at most 1, so I − αS is positive definite for alpha below 1
    residual = y - (f - alpha * graph.smooth(f))
    direction = residual.clone()
    energy = residual.square().sum(1, keepdim=True)
    enough = tol**2 * y.square().sum(1, keepdim=True)
    for _ in range(max_steps):
        active = energy > enough
        if not active.any():
            break
        image = direction - alpha * graph.smooth(direction)
        step = energy / (direction * image).sum(1, keepdim=True).clamp_min(1e-30)
        # a finished column waits for the others, so a list does not depend on its batch
        step = torch.where(active, step, 0.0)
        f = f + step * direction
        residual = residual - step * image
        new = residual.square().sum(1, keepdim=True)
        direction = residual + new / energy.clamp_min(1e-30) * direction
        energy = new
    return f


class DiffusionReranker(BaseReranker):
    """Order by diffusion from the query on the graph of the list.

    Candidates that the query cannot reach keep their order behind the others. Time ``O(K² d)`` and
    memory ``O(K k)`` a list. ``scope="gallery"`` uses the graph of the whole gallery; it finds
    more and takes ``O(N² d)`` time and ``O(N (d + k))`` memory once for each call.

    Args:
        k: Number of neighbours in the graph.
        gamma: Exponent of the similarities.
        alpha: Share of every step that is passed on.
        scope: ``"list"`` or ``"gallery"``.

    Example:
        >>> import numpy as np
        >>> x = np.array([[1.0, 0.0], [0.8, 0.6], [0.6, -0.8]])
        >>> DiffusionReranker().rerank(x[:1], x, [[0, 1, 2]]).ids
        array([[0, 1, 2]])
    """

    def __init__(
        self,
        k: int = 10,
        gamma: float = 3.0,
        alpha: float = 0.95,
        scope: Literal["list", "gallery"] = "list",
    ) -> None:
        self.k = k
        self.gamma = gamma
        self.alpha = alpha
        self.scope = scope

    def rerank(self, xq: object, xb: object, ids: object, **options: Any) -> Reranked:
        """Return the results of a search in a better order; see :meth:`BaseReranker.rerank`."""
        if self.scope == "list":
            return super().rerank(xq, xb, ids, **options)
        if self.scope != "gallery":
            raise ValueError(f"scope must be 'list' or 'gallery', got {self.scope!r}.")
        vectors = Gallery(xb, normalize=options.get("normalize", False)).everything(
            options.get("max_memory", 2**29), extra=8 * self.k
        )
        return _OnGallery(self, vectors).rerank(xq, xb, ids, **options)

    def score_lists(self, lists: Lists) -> tuple[Float[Tensor, "b k"], Lists]:
        """Return how much of the query's mark reaches each candidate."""
        tokens = torch.cat([lists.query[:, None], lists.items], 1)
        keep = torch.cat([torch.ones_like(lists.keep[:, :1]), lists.keep], 1)
        graph = list_graph(tokens, keep, k=self.k, gamma=self.gamma)
        start = tokens.new_zeros(*tokens.shape[:2], 1)
        start[:, 0] = 1
        return diffuse(graph, start, alpha=self.alpha)[:, 1:, 0], lists


class _OnGallery(BaseReranker):
    """Diffusion on the graph of a whole gallery, from the nearest items of each query."""

    def __init__(self, settings: DiffusionReranker, vectors: Float[Tensor, "n d"]) -> None:
        self._settings, self._vectors = settings, vectors
        keep = torch.ones(1, len(vectors), dtype=torch.bool)
        self._graph = list_graph(vectors[None], keep, k=settings.k, gamma=settings.gamma)

    def score_lists(self, lists: Lists) -> tuple[Float[Tensor, "b k"], Lists]:
        k, gamma = min(self._settings.k, len(self._vectors)), self._settings.gamma
        cosines, places = (lists.query @ self._vectors.T).topk(k, dim=1)
        start = lists.query.new_zeros(len(self._vectors), len(lists.query))
        start.scatter_(0, places.T, cosines.T.clamp_min(0) ** gamma)
        reached = diffuse(self._graph, start[None], alpha=self._settings.alpha)[0]
        return reached.T.gather(1, lists.ids.clamp_min(0)), lists
