from .classifier import EventSequenceClassifier
from .estimator import NextEventPredictor
from .heads import LogNormalMixture
from .interpolation import InterpolationConfig, InterpolationModel
from .irregular import IrregularTask
from .labels import EventLabelTask
from .model import (
    EventClassifier,
    EventClassifierConfig,
    NextEventConfig,
    NextEventModel,
    NextEventOutput,
    Past,
)
from .regressor import IrregularSeriesRegressor, PredictedValues
from .results import EventSamples, EventScores, LogLikelihood, NextEvents
from .scheme import LogScheme
from .settings import (
    EventLabelSettings,
    EventOptions,
    EventSettings,
    InterpolationOptions,
    IrregularSettings,
)
from .task import NextEventTask, load_stackoverflow
from .windows import EventWindows, collate_events, last_windows, tile_windows

__all__ = [
    "EventClassifier",
    "EventClassifierConfig",
    "EventLabelSettings",
    "EventLabelTask",
    "EventOptions",
    "EventSamples",
    "EventScores",
    "EventSequenceClassifier",
    "EventSettings",
    "EventWindows",
    "InterpolationConfig",
    "InterpolationModel",
    "InterpolationOptions",
    "IrregularSeriesRegressor",
    "IrregularSettings",
    "IrregularTask",
    "LogLikelihood",
    "LogNormalMixture",
    "LogScheme",
    "NextEventConfig",
    "NextEventModel",
    "NextEventOutput",
    "NextEventPredictor",
    "NextEventTask",
    "NextEvents",
    "Past",
    "PredictedValues",
    "collate_events",
    "last_windows",
    "load_stackoverflow",
    "tile_windows",
]
