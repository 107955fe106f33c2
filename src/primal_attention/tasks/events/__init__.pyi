from .classifier import EventClassifier
from .estimator import EventPredictor
from .heads import LogNormalMixture
from .interpolation import InterpolationConfig, InterpolationModel
from .irregular import IrregularTask
from .labels import EventLabelTask
from .model import (
    EventSequenceConfig,
    EventSequenceNetwork,
    NextEventConfig,
    NextEventModel,
    NextEventOutput,
    Past,
)
from .regressor import IrregularSeriesRegressor, PredictedValues
from .results import EventSamples, EventScores, LogLikelihood, NextEvents
from .scheme import LogScheme
from .settings import (
    EventFitOptions,
    EventLabelSettings,
    EventOptions,
    EventSettings,
    InterpolationOptions,
    IrregularFitOptions,
    IrregularSettings,
    NextEventFitOptions,
)
from .task import NextEventTask, load_stackoverflow
from .windows import EventWindows, collate_events, last_windows, tile_windows

__all__ = [
    "EventClassifier",
    "EventFitOptions",
    "EventLabelSettings",
    "EventLabelTask",
    "EventOptions",
    "EventPredictor",
    "EventSamples",
    "EventScores",
    "EventSequenceConfig",
    "EventSequenceNetwork",
    "EventSettings",
    "EventWindows",
    "InterpolationConfig",
    "InterpolationModel",
    "InterpolationOptions",
    "IrregularFitOptions",
    "IrregularSeriesRegressor",
    "IrregularSettings",
    "IrregularTask",
    "LogLikelihood",
    "LogNormalMixture",
    "LogScheme",
    "NextEventConfig",
    "NextEventFitOptions",
    "NextEventModel",
    "NextEventOutput",
    "NextEventTask",
    "NextEvents",
    "Past",
    "PredictedValues",
    "collate_events",
    "last_windows",
    "load_stackoverflow",
    "tile_windows",
]
