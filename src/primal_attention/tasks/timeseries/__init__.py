"""Time series: readers, a classifier of whole series, and Table 1 of the paper."""

from typing import TYPE_CHECKING, Any

from primal_attention.tasks.timeseries.data import (
    Series,
    SeriesDataset,
    Standardizer,
    collate_series,
    list_series,
    load_series,
    read_npz,
    read_ts,
    series_from_arrays,
    series_root,
    stratified_split,
)
from primal_attention.tasks.timeseries.model import SeriesClassifier, SeriesConfig

if TYPE_CHECKING:
    from primal_attention.tasks.timeseries.estimator import PrimalTimeSeriesClassifier

__all__ = [
    "PrimalTimeSeriesClassifier",
    "Series",
    "SeriesClassifier",
    "SeriesConfig",
    "SeriesDataset",
    "Standardizer",
    "collate_series",
    "list_series",
    "load_series",
    "read_npz",
    "read_ts",
    "series_from_arrays",
    "series_root",
    "stratified_split",
]


def __getattr__(name: str) -> Any:
    # its base class is aeon's, which only those who use it need
    if name == "PrimalTimeSeriesClassifier":
        from primal_attention.tasks.timeseries.estimator import PrimalTimeSeriesClassifier

        return PrimalTimeSeriesClassifier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
