from .classifier import EventSequenceClassifier
from .data import EventSequences, LogColumn
from .estimator import NextEventPredictor
from .generators import (
    EventProcess,
    GapMarks,
    HawkesProcess,
    IrregularSinusoids,
    PeriodicMarks,
    PoissonProcess,
    SampledEvents,
    SampledSeries,
)
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
from .series import IrregularSeries
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
    "EventProcess",
    "EventSamples",
    "EventScores",
    "EventSequenceClassifier",
    "EventSequences",
    "EventSettings",
    "EventWindows",
    "GapMarks",
    "HawkesProcess",
    "InterpolationConfig",
    "InterpolationModel",
    "InterpolationOptions",
    "IrregularSeries",
    "IrregularSeriesRegressor",
    "IrregularSettings",
    "IrregularSinusoids",
    "IrregularTask",
    "LogColumn",
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
    "PeriodicMarks",
    "PoissonProcess",
    "PredictedValues",
    "SampledEvents",
    "SampledSeries",
    "collate_events",
    "last_windows",
    "load_stackoverflow",
    "tile_windows",
]
