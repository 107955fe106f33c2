"""Query expansion and its mirror, the augmentation of the gallery: attention without weights.

Query expansion replaces the query by ``q + Σ max(q·x_i, 0)^α x_i`` over its best results. It is
one readout of attention with the vectors as queries, keys and values. Augmentation of the gallery
does the same for every candidate: self-attention. (Radenovic et al., PAMI 2019; Arandjelović and
Zisserman, CVPR 2012.)
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from primal_attention.tasks.lists.base import (
    BaseReranker,
    Lists,
    gather_items,
    pairwise_neighbours,
)

__all__ = ["AlphaQE", "DatabaseAugmentation", "NeighbourRefine"]


class AlphaQE(BaseReranker):
    """Weighted query expansion: ``q + Σ_{i ≤ m} max(q·x_i, 0)^α x_i``; ``O(K d)`` a list.

    Args:
        m: Number of results to add; 0 leaves the order unchanged.
        alpha: Exponent of the similarities; 0 is the plain average.

    Example:
        >>> import numpy as np
        >>> x = np.array([[1.0, 0.0], [0.8, 0.6], [0.6, -0.8]])
        >>> AlphaQE(m=2).rerank(x[:1], x, [[0, 1, 2]]).ids
        array([[0, 1, 2]])
    """

    def __init__(self, m: int = 10, alpha: float = 3.0) -> None:
        self.m = m
        self.alpha = alpha

    def score_lists(self, lists: Lists) -> tuple[Float[Tensor, "b k"], Lists]:
        """Return the cosines with the expanded query, which replaces the query."""
        if self.m < 0:
            raise ValueError(f"m must be at least 0, got {self.m}.")
        best = lists.items[:, : self.m]
        weights = lists.first_scores[:, : self.m].clamp_min(0) ** self.alpha
        weights = torch.where(lists.keep[:, : self.m], weights, 0.0)
        added = torch.einsum("bk,bkd->bd", weights, best)
        expanded = lists._replace(query=normalize(lists.query + added, dim=1))
        return expanded.first_scores, expanded


class DatabaseAugmentation(BaseReranker):
    """Every candidate becomes a weighted sum with its neighbours in the list; ``O(K² d)`` time.

    Args:
        m: Number of neighbours to add.
        alpha: Exponent of the similarities.

    Example:
        >>> import numpy as np
        >>> x = np.array([[1.0, 0.0], [0.8, 0.6], [0.6, -0.8]])
        >>> DatabaseAugmentation(m=1).rerank(x[:1], x, [[0, 1, 2]]).ids
        array([[0, 1, 2]])
    """

    def __init__(self, m: int = 5, alpha: float = 3.0) -> None:
        self.m = m
        self.alpha = alpha

    def score_lists(self, lists: Lists) -> tuple[Float[Tensor, "b k"], Lists]:
        """Return the cosines of the augmented candidates, which replace the candidates."""
        augmented = lists._replace(items=_augment(lists, self.m, self.alpha))
        return augmented.first_scores, augmented


class NeighbourRefine(BaseReranker):
    """Mean of two views: expanded query with candidates, query with refined candidates.

    The form of SuperGlobal without its image features (Shao et al., ICCV 2023). ``O(K² d)`` time.

    Args:
        m: Number of neighbours of the query and of each candidate.
        weight: Weight of a neighbour beside the item itself.

    Example:
        >>> import numpy as np
        >>> x = np.array([[1.0, 0.0], [0.8, 0.6], [0.6, -0.8]])
        >>> NeighbourRefine(m=1).rerank(x[:1], x, [[0, 1, 2]]).ids
        array([[0, 1, 2]])
    """

    def __init__(self, m: int = 9, weight: float = 0.15) -> None:
        self.m = m
        self.weight = weight

    def score_lists(self, lists: Lists) -> tuple[Float[Tensor, "b k"], Lists]:
        """Return the mean of both views; query and candidates are replaced by the refined ones."""
        _, expanded = AlphaQE(self.m, 1.0).score_lists(lists)
        refined = lists._replace(items=_augment(lists, self.m, 1.0, self.weight))
        scores = (expanded.first_scores + refined.first_scores) / 2
        return scores, Lists(expanded.query, refined.items, lists.ids)


def _augment(lists: Lists, m: int, alpha: float, weight: float = 1.0) -> Float[Tensor, "b k d"]:
    """Return every candidate plus its weighted neighbours, with norm one."""
    if m < 0:
        raise ValueError(f"m must be at least 0, got {m}.")
    cosines, places = pairwise_neighbours(lists.items, lists.keep, m)
    if not places.shape[2]:
        return lists.items
    weights = torch.where(cosines > 0, cosines.clamp_min(0) ** alpha, 0.0)
    added = torch.zeros_like(lists.items)
    for j in range(places.shape[2]):  # one neighbour at a time: O(K d) memory
        added += weights[:, :, j, None] * gather_items(lists.items, places[:, :, j, None])[:, :, 0]
    return normalize(lists.items + weight * added, dim=2)
