"""Generated data by name, to try the tasks without a file."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from primal_attention.datasets.events.log import EventSequences
    from primal_attention.datasets.events.series import IrregularSeries

__all__ = ["bursts_log", "hawkes_log", "sinusoid_series"]

_SEQUENCES = 300
"""Sequences of an example."""


def hawkes_log(seed: int) -> "EventSequences":
    """Return events that excite each other, in hours."""
    from primal_attention.datasets.events.generators import HawkesProcess

    return HawkesProcess().sample(_SEQUENCES, 40, seed=seed).to_log("hours")


def bursts_log(seed: int) -> "tuple[EventSequences, list[str]]":
    """Return sequences of equal mean rates, and whether their events come in bursts.

    Only the times tell: half of the sequences are of a Hawkes process, half of a Poisson process.
    """
    import numpy as np

    from primal_attention.datasets.events.generators import HawkesProcess, PoissonProcess
    from primal_attention.datasets.events.log import EventSequences

    hawkes = HawkesProcess()
    calm = PoissonProcess(tuple(hawkes.mean_rates.tolist()))
    half = _SEQUENCES // 2
    parts = [hawkes.sample(half, 30, seed=seed), calm.sample(half, 30, seed=seed + 1)]
    log = EventSequences.from_arrays(
        list(np.concatenate([p.times for p in parts])),
        list(np.concatenate([p.types for p in parts])),
        unit="hours",
    )
    return log, ["bursts"] * half + ["even"] * half


def sinusoid_series(seed: int) -> "IrregularSeries":
    """Return noisy sinusoids of two channels, seen at random times."""
    from primal_attention.datasets.events.generators import IrregularSinusoids
    from primal_attention.datasets.events.series import IrregularSeries

    sampled = IrregularSinusoids().sample(_SEQUENCES, 40, seed=seed)
    return IrregularSeries.from_arrays(list(sampled.times), list(sampled.values), unit="hours")
