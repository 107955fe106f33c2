from .data import EventSequences, LogColumn
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
from .model import (
    EventClassifier,
    EventClassifierConfig,
    NextEventConfig,
    NextEventModel,
    NextEventOutput,
)
from .scheme import LogScheme
from .settings import EventOptions, EventSettings
from .windows import EventWindows, collate_events, last_windows, tile_windows

__all__ = [
    "EventClassifier",
    "EventClassifierConfig",
    "EventOptions",
    "EventProcess",
    "EventSequences",
    "EventSettings",
    "EventWindows",
    "GapMarks",
    "HawkesProcess",
    "IrregularSinusoids",
    "LogColumn",
    "LogNormalMixture",
    "LogScheme",
    "NextEventConfig",
    "NextEventModel",
    "NextEventOutput",
    "PeriodicMarks",
    "PoissonProcess",
    "SampledEvents",
    "SampledSeries",
    "collate_events",
    "last_windows",
    "tile_windows",
]
