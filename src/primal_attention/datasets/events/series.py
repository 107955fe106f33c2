"""Irregular multivariate series: values of several channels at irregular times, some missing."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from primal_attention.datasets.events.log import EventSequences
from primal_attention.support.files.tables import list_some

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["IrregularSeries", "SeriesQueries", "collate_queries"]

_TYPE = "observation"
_COLUMN = "type of every observation"
"""Column with that one type, beside those of a frame, which may well have an ``observation``."""


@dataclass(frozen=True, repr=False, eq=False)
class IrregularSeries:
    """Series whose channels are observed at irregular times; NaN means not observed.

    Example:
        >>> series = IrregularSeries.from_arrays([[0.0, 0.4, 1.0]], [[[1.0], [np.nan], [3.0]]])
        >>> series
        IrregularSeries(1 series, 3 observations, 1 channels, times in 'units')
    """

    log: EventSequences
    """The observations as events, with the channels as numeric marks."""

    def __post_init__(self) -> None:
        words = [n for n, c in self.log.marks.items() if c.levels is not None]
        if words or not self.log.marks:
            raise ValueError(
                f"Channels must hold numbers; {', '.join(words) or 'there are none'}."
                " Name numeric columns as values."
            )

    @classmethod
    def from_frame(
        cls,
        frame: "pd.DataFrame",
        *,
        values: Sequence[str],
        time: str | None = None,
        sequence: str | None = None,
        unit: str | None = None,
    ) -> Self:
        """Return the series in a pandas frame with one row for every observation time.

        Args:
            frame: The table; empty cells are missing values.
            values: Columns of the channels.
            time: Column of the times, as in :meth:`EventSequences.from_frame`.
            sequence: Column that tells series apart.
            unit: Unit of the times.
        """
        _check_channels(values, len(values))
        log = EventSequences.from_frame(
            frame.assign(**{_COLUMN: _TYPE}),
            time=time,
            event=_COLUMN,
            sequence=sequence,
            marks=list(values),
            unit=unit,
        )
        return cls(log)

    @classmethod
    def from_csv(cls, path: str | Path, **columns: Any) -> Self:
        """Return the series in a CSV, TSV or Parquet file; options as in :meth:`from_frame`."""
        from primal_attention.datasets.events.tables import read_log_table

        return cls.from_frame(read_log_table(Path(path)), **columns)

    @classmethod
    def from_arrays(
        cls,
        times: Sequence[Sequence[object] | np.ndarray],
        values: Sequence[ArrayLike],
        *,
        channels: Sequence[str] | None = None,
        keys: Sequence[object] | None = None,
        unit: str | None = None,
    ) -> Self:
        """Return the series of arrays, one for every series.

        Args:
            times: Times of every series: numbers or ``datetime64``.
            values: ``[times, channels]`` of every series; NaN where not observed.
            channels: Names of the channels; by default 0, 1, 2, …
            keys: Names of the series.
            unit: Unit of the times.
        """
        rows = [np.asarray(v, dtype=np.float64) for v in values]
        if not rows or len(rows) != len(times):
            raise ValueError(
                f"times and values must hold the same series, one or more, got {len(times)} and "
                f"{len(rows)}."
            )
        wrong = [
            v.shape for v, t in zip(rows, times, strict=True) if v.ndim != 2 or len(v) != len(t)
        ]
        widths = {v.shape[1] for v in rows if v.ndim == 2}
        if wrong or len(widths) != 1:
            raise ValueError(
                "values must have shape [times, channels] with one row for every time and the same "
                f"channels, got {wrong[:3] or sorted(widths)}."
            )
        width = widths.pop()
        names = [str(i) for i in range(width)] if channels is None else list(channels)
        _check_channels(names, width)
        log = EventSequences.from_arrays(
            times,
            [[_TYPE] * len(t) for t in times],
            keys=keys,
            marks={name: [v[:, i] for v in rows] for i, name in enumerate(names)},
            unit=unit,
        )
        return cls(log)

    def __len__(self) -> int:
        return len(self.log)

    def __iter__(self) -> Iterator[slice]:
        return iter(self.log)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self):,} series, {len(self.log.times):,} observations, "
            f"{len(self.channels)} channels, times in {self.log.unit!r})"
        )

    @property
    def channels(self) -> tuple[str, ...]:
        """Names of the channels."""
        return tuple(self.log.marks)

    @property
    def values(self) -> NDArray[np.float64]:
        """Values ``[observations, channels]``; NaN where not observed."""
        return np.stack([column.values for column in self.log.marks.values()], -1)

    def take(self, index: np.ndarray | Sequence[int]) -> Self:
        """Return some of the series, by index or boolean mask."""
        return replace(self, log=self.log.take(index))


def _check_channels(names: Sequence[str], width: int) -> None:
    """Raise unless every channel has a name of its own."""
    if len(names) != width or len(set(names)) < width:
        raise ValueError(
            f"Every channel needs a name of its own, got {list_some(names)} for {width} channels."
        )


class SeriesQueries(Dataset[dict[str, Tensor]]):
    """Data set of series with some observations hidden, to be predicted from the others.

    Times count from the last visible observation, in scaled units.

    Args:
        series: Series with standardised values.
        scale: Unit of the items' times, in units of the series.
        length: Most recent observations of a series that are read.
        queries: Times to predict for each series, in units of the series; without them a part of
            the observations is hidden: half of the time at random places, half at the end.
        is_fixed: Hide the same observations each time.
    """

    def __init__(
        self,
        series: IrregularSeries,
        scale: float,
        length: int,
        *,
        queries: Sequence[NDArray[np.float64]] | None = None,
        is_fixed: bool = True,
    ) -> None:
        self.series, self.scale, self.length = series, scale, length
        self.queries, self.is_fixed = queries, is_fixed
        self._values = series.values.astype(np.float32)
        self._spans = list(series)

    def __len__(self) -> int:
        return len(self._spans)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Observations of every series that are read."""
        return np.minimum(self.series.log.lengths, self.length)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        span = self._spans[index]
        span = slice(max(span.start, span.stop - self.length), span.stop)
        times, values = self.series.log.times[span], torch.from_numpy(self._values[span])
        if self.queries is None:
            hidden = self._hide(index, len(times))
            asked, labels = times[hidden.numpy()], values[hidden]
            times, values = times[~hidden.numpy()], values[~hidden]
        else:
            asked = self.queries[index]
            labels = torch.full((len(asked), values.shape[1]), torch.nan)
        start = times[-1]
        return {
            "times": torch.from_numpy((times - start) / self.scale),
            "values": values,
            "queries": torch.from_numpy((asked - start) / self.scale),
            "labels": labels,
        }

    def _hide(self, index: int, count: int) -> Tensor:
        """Return which observations are hidden; at least one stays and one is hidden."""
        generator = torch.Generator().manual_seed(index) if self.is_fixed else None
        share, kind = torch.rand(2, generator=generator).tolist()
        most = max(1, min(count - 1, round(count * (0.1 + 0.5 * share))))
        hidden = torch.zeros(count, dtype=torch.bool)
        if kind < 0.5:
            hidden[torch.randperm(count, generator=generator)[:most]] = True
        else:
            hidden[count - most :] = True
        return hidden


def collate_queries(items: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return a batch padded at the end, with ``key_mask`` and ``query_mask``."""
    batch = {
        name: pad_sequence(
            [item[name] for item in items],
            batch_first=True,
            padding_value=torch.nan if name == "labels" else 0,
        )
        for name in items[0]
    }
    for name, mask in (("times", "key_mask"), ("queries", "query_mask")):
        lengths = torch.tensor([len(item[name]) for item in items])
        batch[mask] = torch.arange(int(lengths.max())) < lengths[:, None]
    return batch
