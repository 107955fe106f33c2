from .data import (
    SeriesCollection,
    SeriesDataset,
    Standardizer,
    collate_series,
    series_from_arrays,
)
from .estimator import PrimalTimeSeriesClassifier, PrimalTimeSeriesRegressor
from .files import list_series, load_series, read_npz, read_series, series_root
from .model import SeriesClassifier, SeriesConfig
from .regression import SeriesValueTask
from .settings import SeriesOptions, SeriesSettings, SeriesValueSettings
from .task import SeriesTask
from .ts import read_ts

__all__ = [
    "PrimalTimeSeriesClassifier",
    "PrimalTimeSeriesRegressor",
    "SeriesClassifier",
    "SeriesCollection",
    "SeriesConfig",
    "SeriesDataset",
    "SeriesOptions",
    "SeriesSettings",
    "SeriesTask",
    "SeriesValueSettings",
    "SeriesValueTask",
    "Standardizer",
    "collate_series",
    "list_series",
    "load_series",
    "read_npz",
    "read_series",
    "read_ts",
    "series_from_arrays",
    "series_root",
]
