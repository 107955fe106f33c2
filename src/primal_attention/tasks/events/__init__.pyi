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

__all__ = [
    "EventProcess",
    "EventSequences",
    "GapMarks",
    "HawkesProcess",
    "IrregularSinusoids",
    "LogColumn",
    "PeriodicMarks",
    "PoissonProcess",
    "SampledEvents",
    "SampledSeries",
]
