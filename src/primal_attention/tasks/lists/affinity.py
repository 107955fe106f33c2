"""Affinities: each token of a list described by its similarity to the first tokens, the anchors.

Token 0 is the query, then come the candidates. Column ``l`` always means "the l-th best": anchor 0
is the query, anchor 1 the best candidate. Two kernels are used. ``"inner"`` is the cosine.
``"diffusion"`` is ``log(1 + 100 g) / 3``, ``g`` a column of ``(I − 0.95 S)^{-1}`` on the graph of
the list; it follows chains of neighbours. An affinity map of cosines is an empirical kernel map:
``a_i · a_j = x_iᵀ (AᵀA) x_j``.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from primal_attention.tasks.lists.diffusion import diffuse, graph_of_cosines, list_graph
from primal_attention.tasks.lists.settings import WIDTHS, Affinity, kernel_names

__all__ = ["Anchors", "affinities", "affinities_of_cosines", "running_means"]

_GRAPH = 2048
"""Tokens in the graph of a list. Later ones take the mean of their neighbours in it."""
_K, _GAMMA, _ALPHA = 10, 3.0, 0.95


class Anchors:
    """The top of a list, to which all tokens are compared.

    Args:
        tokens: The first tokens of each list, at most 2048 are used; query first.
        keep: ``True`` where there is a token; real tokens come first.
        anchors: Number of anchors.
        affinity: Which kernels.
    """

    def __init__(
        self,
        tokens: Float[Tensor, "b g d"],
        keep: Bool[Tensor, "b g"],
        anchors: int,
        affinity: Affinity,
    ) -> None:
        self._top, keep = tokens[:, :_GRAPH], keep[:, :_GRAPH]
        self._known, self._count = keep[:, :anchors], anchors
        self._kernels = kernel_names(affinity)
        self._reached: Tensor | None = None
        if "diffusion" in self._kernels:
            graph = list_graph(self._top, keep, k=_K, gamma=_GAMMA)
            b, g, _ = self._top.shape
            start = torch.eye(g, min(g, anchors), dtype=tokens.dtype, device=tokens.device)
            self._reached = diffuse(graph, start.expand(b, -1, -1), alpha=_ALPHA)

    def compare(self, tokens: Float[Tensor, "b n d"], start: int) -> Float[Tensor, "b n kernels l"]:
        """Return the affinities of tokens that begin at the rank ``start`` of their list.

        Ranks 0 to 2047 belong to the graph; later tokens take the mean of their neighbours in it.
        """
        parts = []
        for kernel in self._kernels:
            if kernel == "inner":
                values = tokens @ self._top[:, : self._count].transpose(1, 2)
            else:
                values = torch.log1p(100 * self._diffused(tokens, start).clamp_min(0)) / 3
            values = torch.where(self._known[:, None], values, 0.0)
            parts.append(torch.nn.functional.pad(values, (0, self._count - values.shape[2])))
        return torch.stack(parts, 2)

    def _diffused(self, tokens: Tensor, start: int) -> Float[Tensor, "b n l"]:
        if self._reached is None:
            raise RuntimeError("The anchors were built without diffusion.")
        inside = max(0, min(self._top.shape[1] - start, tokens.shape[1]))
        first = self._reached[:, start : start + inside]
        if inside == tokens.shape[1]:
            return first
        later = [self._extended(part) for part in tokens[:, inside:].split(_GRAPH, 1)]
        return torch.cat([first, *later], 1)

    def _extended(self, tokens: Tensor) -> Float[Tensor, "b n l"]:
        """Return weighted means over the nearest tokens in the graph."""
        reached: Any = self._reached
        cosines, places = (tokens @ self._top.transpose(1, 2)).topk(
            min(_K, self._top.shape[1]), dim=2
        )
        weights = cosines.clamp_min(0) ** _GAMMA
        weights = _ALPHA * weights / weights.sum(2, keepdim=True).clamp_min(1e-12)
        total = reached.new_zeros(*tokens.shape[:2], reached.shape[2])
        for j in range(places.shape[2]):
            place = places[:, :, j, None].expand(-1, -1, reached.shape[2])
            total += weights[:, :, j, None] * reached.gather(1, place)
        return total


def affinities(
    tokens: Float[Tensor, "b n d"],
    keep: Bool[Tensor, "b n"],
    anchors: int,
    affinity: Affinity = "both",
) -> Float[Tensor, "b n kernels l"]:
    """Return the similarities of all tokens to the first ``anchors`` tokens.

    Time ``O(n l d)`` for cosines and ``O(n g d)`` for diffusion, with ``g`` at most 2048 tokens in
    the graph; memory ``O(n l)``.

    Args:
        tokens: Query and candidates as unit vectors, best first.
        keep: ``True`` where there is a token; real tokens come first.
        anchors: Number of anchors; columns of missing ones are zero.
        affinity: Which kernels.

    Example:
        >>> x = torch.nn.functional.normalize(torch.randn(1, 5, 3), dim=-1)
        >>> affinities(x, torch.ones(1, 5, dtype=torch.bool), 4, "inner").shape
        torch.Size([1, 5, 1, 4])
    """
    tokens = torch.where(keep[:, :, None], tokens, 0.0)
    found = Anchors(tokens, keep, anchors, affinity).compare(tokens, 0)
    return torch.where(keep[:, :, None, None], found, 0.0)


def affinities_of_cosines(
    cosines: Float[Tensor, "b n m"],
    keep: Bool[Tensor, "b n"],
    anchors: int,
    affinity: Affinity = "both",
) -> Float[Tensor, "b n kernels l"]:
    """Return the affinities of lists whose vectors are not known, from their cosines.

    Args:
        cosines: Cosines between all tokens, query first; for ``"inner"`` those with the first
            tokens are enough. At most 2048 tokens if the graph is needed.
        keep: ``True`` where there is a token; real tokens come first.
        anchors: Number of anchors; columns of missing ones are zero.
        affinity: Which kernels.

    Example:
        >>> x = torch.nn.functional.normalize(torch.randn(1, 5, 3), dim=-1)
        >>> keep = torch.ones(1, 5, dtype=torch.bool)
        >>> found = affinities_of_cosines(x @ x.transpose(1, 2), keep, 4)
        >>> torch.allclose(found, affinities(x, keep, 4), atol=1e-4)
        True
    """
    b, n, m = cosines.shape
    count = min(anchors, m)
    pairs = keep[:, :, None] & keep[:, None, :m]
    cosines = torch.where(pairs, cosines, 0.0)
    parts = []
    for kernel in kernel_names(affinity):
        values = cosines[:, :, :count]
        if kernel == "diffusion":
            if m != n or n > _GRAPH:
                raise ValueError(
                    f"a must hold the cosines of all pairs of at most {_GRAPH} tokens, got "
                    f"{n} rows and {m} columns; use a re-ranker with affinity='inner', or vectors."
                )
            graph = graph_of_cosines(cosines, keep, k=_K, gamma=_GAMMA)
            start = torch.eye(n, count, dtype=cosines.dtype, device=cosines.device)
            values = diffuse(graph, start.expand(b, -1, -1), alpha=_ALPHA)
            values = torch.log1p(100 * values.clamp_min(0)) / 3
        values = torch.where(pairs[:, :, :count], values, 0.0)
        parts.append(torch.nn.functional.pad(values, (0, anchors - count)))
    return torch.stack(parts, 2)


def running_means(
    a: Float[Tensor, "b n kernels l"], known: Int[Tensor, " b"]
) -> Float[Tensor, "b n features"]:
    """Return the means of the affinities to the first 1, 2, 3, 4, 6, … 64 anchors.

    The number of features does not depend on the number of anchors, and the order of the anchors
    still counts. A list with fewer anchors takes the mean over those it has.

    Args:
        a: Affinities.
        known: Number of anchors of each list.

    Example:
        >>> a = torch.tensor([4.0, 2.0, 0.0]).expand(1, 1, 1, 3)
        >>> running_means(a, torch.tensor([2]))[0, 0, :3]
        tensor([4., 3., 3.])
    """
    sums = a.cumsum(3)
    widths = torch.tensor(WIDTHS, device=a.device)
    counts = torch.minimum(widths, known.clamp_min(1)[:, None])  # [b widths]
    places = (counts - 1).clamp_max(a.shape[3] - 1)
    index = places[:, None, None].expand(*a.shape[:3], -1)
    means = sums.gather(3, index) / counts[:, None, None]
    return means.flatten(2)
