"""Lists to train a re-ranker on."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.data import Dataset

from primal_attention.tasks.lists.gallery import Gallery, as_vectors, check_ids
from primal_attention.training import pad_collate
from primal_attention.training.data import Item

__all__ = ["GivenLists", "TrainingLists", "collate_lists"]


class TrainingLists(Dataset[dict[str, Tensor]]):
    """The result list of every item within its own set: tokens and which of them are relevant.

    Several sets may be joined; narrower vectors are filled with zeros, which changes no cosine.

    Args:
        sets: Vectors [n d] and group labels [n] of each set.
        candidates: Length of the lists, the item itself included.

    Example:
        >>> x = np.array([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8], [0.0, 1.0]], "float32")
        >>> TrainingLists([(x[[0, 1, 3]], [0, 0, 1])], 3)[1]["labels"]
        tensor([1, 1, 0])
    """

    def __init__(self, sets: Sequence[tuple[object, object]], candidates: int) -> None:
        prepared = [(as_vectors(x, "X", False), np.asarray(y)) for x, y in sets]
        self._width = max(x.shape[1] for x, _ in prepared)
        self._sets = [
            (x, torch.from_numpy(np.unique(y, return_inverse=True)[1])) for x, y in prepared
        ]
        self._lists = [_own_lists(x, candidates) for x, _ in self._sets]
        self._place = [(s, i) for s, (x, _) in enumerate(self._sets) for i in range(len(x))]

    def __len__(self) -> int:
        return len(self._place)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        s, i = self._place[index]
        x, y = self._sets[s]
        ids = self._lists[s][i]
        tokens = torch.nn.functional.pad(x[ids], (0, self._width - x.shape[1]))
        return {"tokens": tokens, "labels": (y[ids] == y[i]).long()}


class GivenLists(Dataset[dict[str, Tensor]]):
    """Lists of a search and which of their results are relevant.

    Args:
        xq: Vectors of the queries [queries, width].
        xb: The gallery, as for :meth:`BaseReranker.rerank`.
        ids: Results [queries, results], best first; -1 is an empty slot.
        relevance: 1 or ``True`` where a result is relevant, in the shape of ``ids``.
        candidates: Results of a list that are used.
        normalize: Whether to scale vectors to norm one.
    """

    def __init__(
        self,
        xq: object,
        xb: object,
        ids: object,
        relevance: object,
        candidates: int,
        normalize: bool,
    ) -> None:
        self._queries, found = as_vectors(xq, "xq", normalize), check_ids(ids)
        relevant = np.asarray(relevance)
        if relevant.shape != found.shape or len(found) != len(self._queries):
            raise ValueError(
                f"relevance must have the shape of ids, {found.shape}, one list for each of the "
                f"{len(self._queries)} queries, got {relevant.shape}."
            )
        if not np.isin(relevant, (0, 1)).all():
            raise ValueError("relevance must hold 0 and 1, or False and True, only.")
        self._gallery = Gallery(xb, normalize=normalize)
        rows = [ids[ids >= 0][:candidates] for ids in found]
        marks = [r[i >= 0][:candidates] for r, i in zip(relevant, found, strict=True)]
        # a list teaches an order if it has relevant and other results
        self._lists = [
            (q, ids, mark.astype(np.int64))
            for q, (ids, mark) in enumerate(zip(rows, marks, strict=True))
            if 0 < mark.sum() < len(mark)
        ]
        if not self._lists:
            raise ValueError(
                "No list has both relevant and other results, so there is no order to learn."
            )

    def __len__(self) -> int:
        return len(self._lists)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        q, ids, relevant = self._lists[index]
        tokens = torch.cat([self._queries[q][None], self._gallery.take(ids)])
        return {"tokens": tokens, "labels": torch.from_numpy(np.concatenate([[1], relevant]))}


def _own_lists(x: Float[Tensor, "n d"], candidates: int) -> Tensor:
    """Return the nearest items of each item, itself first."""
    parts = []
    for block in torch.arange(len(x)).split(1024):
        cosines = x[block] @ x.T
        cosines[torch.arange(len(block)), block] = 2  # first, also among duplicates
        parts.append(cosines.topk(min(candidates, len(x)), dim=1).indices)
    return torch.cat(parts)


def collate_lists(items: Sequence[Item]) -> dict[str, Tensor]:
    """Return a batch of lists; short ones are filled with empty slots."""
    batch = pad_collate(items)
    if "tokens_mask" in batch:
        batch["keep"] = batch.pop("tokens_mask")
    return batch
