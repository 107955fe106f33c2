from .data import (
    SeriesCollection,
    SeriesDataset,
    Standardizer,
    collate_series,
    series_from_arrays,
)
from .estimator import SeriesClassifier, SeriesRegressor
from .files import list_series, load_series, read_npz, read_series, series_root
from .model import SeriesConfig, SeriesNetwork
from .regression import SeriesValueTask
from .settings import SeriesFitOptions, SeriesOptions, SeriesSettings, SeriesValueSettings
from .task import SeriesTask
from .ts import read_ts

__all__ = [
    "SeriesClassifier",
    "SeriesCollection",
    "SeriesConfig",
    "SeriesDataset",
    "SeriesFitOptions",
    "SeriesNetwork",
    "SeriesOptions",
    "SeriesRegressor",
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
