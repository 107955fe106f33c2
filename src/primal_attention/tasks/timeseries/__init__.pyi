from .data import (
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
from .estimator import PrimalTimeSeriesClassifier
from .model import SeriesClassifier, SeriesConfig

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
