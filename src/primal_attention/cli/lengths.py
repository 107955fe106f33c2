"""Whether sequences fit the positions of a model."""

from typing import Any

from torch.utils.data import Dataset

from primal_attention.command import UserError
from primal_attention.tasks.longrange.sequences import PairSequences, TokenSequences
from primal_attention.tasks.timeseries.data import SeriesDataset

__all__ = ["check_length"]


def check_length(data: Dataset[Any], max_length: int | None, where: str) -> None:
    """Raise if a sequence has more tokens than learned positions can tell.

    Args:
        data: What the model would read.
        max_length: Where its positions end, if they do.
        where: The name of the data.
    """
    if max_length is None:
        return
    sides = (data.first, data.second) if isinstance(data, PairSequences) else (data,)
    longest = max(int(_lengths(side).max()) for side in sides)
    if longest > max_length:
        raise UserError(
            f"{where}: the longest sequence has {longest} tokens, but the learned positions of the "
            f"model end at max_length={max_length}; cut the sequences, or train with a larger "
            "model.max_length or other positions."
        )


def _lengths(data: Dataset[Any]) -> Any:
    if isinstance(data, SeriesDataset):
        return data.series.length
    if isinstance(data, TokenSequences):
        return data.lengths
    raise TypeError(f"There is no telling the lengths of {type(data).__name__}.")
