"""Several re-rankers after another."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from primal_attention.tasks.lists.base import BaseReranker, Lists

__all__ = ["Chain"]


class Chain(BaseReranker):
    """Re-rank several times: each step gets the order and the refined vectors of the one before.

    Args:
        steps: Re-rankers in their order.

    Example:
        >>> import numpy as np
        >>> from primal_attention.tasks.lists import AlphaQE, DatabaseAugmentation
        >>> x = np.array([[1.0, 0.0], [0.8, 0.6], [0.6, -0.8]])
        >>> Chain([DatabaseAugmentation(1), AlphaQE(2)]).rerank(x[:1], x, [[0, 1, 2]]).ids
        array([[0, 1, 2]])
    """

    def __init__(self, steps: Sequence[BaseReranker]) -> None:
        self.steps = steps

    def score_lists(self, lists: Lists) -> tuple[Float[Tensor, "b k"], Lists]:
        """Return the scores of the last step."""
        if not self.steps:
            raise ValueError("steps is empty; give at least one re-ranker.")
        place = torch.arange(lists.ids.shape[1]).expand(lists.ids.shape)
        scores = torch.zeros(lists.ids.shape)
        for step in self.steps:
            scores, lists = step.score_lists(lists)
            order = torch.where(lists.keep, scores.float(), -torch.inf).sort(
                dim=1, descending=True, stable=True
            )[1]
            lists, place, scores = (
                lists.reorder(order),
                place.gather(1, order),
                scores.gather(1, order),
            )
        return torch.zeros_like(scores).scatter(1, place, scores), lists
