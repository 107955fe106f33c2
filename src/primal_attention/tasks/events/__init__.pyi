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
    "GapMarks",
    "HawkesProcess",
    "IrregularSinusoids",
    "PeriodicMarks",
    "PoissonProcess",
    "SampledEvents",
    "SampledSeries",
]
