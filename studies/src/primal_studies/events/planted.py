"""Study of processes whose answer is known: periods, decays and likelihoods.

A kernel of time is fitted by least squares: its value ψ(Δ) to what happens at the distance Δ. Two
events of :class:`PeriodicMarks` have the same type with a probability that is periodic in Δ. An
event of :class:`GapMarks` is of type 1 with a probability that decays with the gap before it. So
the period and the decay can be read off the learned kernel.

The likelihoods are those of a small ``EventPredictor`` on new samples of a process, beside that
of the process itself on the same samples.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from primal_attention.support.output import markdown_table
from primal_attention.support.settings import at_least_one
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.kit.tables import Files

if TYPE_CHECKING:
    from torch import Tensor

    from primal_attention.datasets.events.generators import EventProcess, SampledEvents
    from primal_attention.kernels import BochnerTime, MercerTime, TimeFeatures

__all__ = [
    "Planted",
    "PlantedOptions",
    "fit_kernel",
    "follow_ups",
    "learn_decay",
    "learn_period",
    "same_types",
]

_POINTS = 160
"""Points of a curve in the picture."""


class Pairs(NamedTuple):
    """What happened at some distances in time."""

    gaps: "Tensor"
    """Distances, float64."""
    happened: "Tensor"
    """One or zero, float64."""


def same_types(events: "SampledEvents") -> Pairs:
    """Return all pairs of events of a sequence: their distance, and whether the types agree."""
    import torch

    times, types = (torch.as_tensor(x) for x in events)
    first, second = torch.triu_indices(times.shape[1], times.shape[1], 1)
    gaps = times[:, second] - times[:, first]
    return Pairs(gaps.flatten(), (types[:, second] == types[:, first]).flatten().double())


def follow_ups(events: "SampledEvents") -> Pairs:
    """Return the gap before every event but the first, and whether it is of type 1."""
    import torch

    times, types = (torch.as_tensor(x) for x in events)
    return Pairs(times.diff(dim=1).flatten(), types[:, 1:].flatten().double())


def fit_kernel(
    features: "TimeFeatures", pairs: Pairs, *, steps: int = 120, lr: float = 0.03
) -> "TimeFeatures":
    """Fit ψ(Δ) to what happened, in place, by least squares; return the features in eval mode.

    Least squares makes ψ(Δ) the probability at Δ, as far as the kernel can follow it.
    """
    import torch

    from primal_attention.kernels import TimeKernel

    kernel = TimeKernel(features.eval())
    optimizer = torch.optim.Adam(features.parameters(), lr=lr)
    for _ in range(steps):
        loss = (kernel.psi(pairs.gaps) - pairs.happened).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return features


def learn_period(events: "SampledEvents") -> "tuple[float, MercerTime]":
    """Return the strongest period of the types in a log, and the fitted kernel.

    Example:
        >>> from primal_attention.datasets import PeriodicMarks
        >>> period, _ = learn_period(PeriodicMarks(period=7.0).sample(200, 20))
        >>> abs(period / 7.0 - 1) < 0.02
        True
    """
    import torch

    from primal_attention.kernels import MercerTime

    pairs = same_types(events)
    # a dense grid of periods, of which one is near; then that one alone, since neighbours share it
    scan = MercerTime(24, degree=1).start_from(follow_ups(events).gaps, float(pairs.gaps.max()))
    fit_kernel(scan, pairs, steps=80)
    with torch.no_grad():
        frequency, weight = scan.spectrum()
        near = frequency[1 + int(weight[1:].argmax())]
        features = MercerTime(1, degree=1)
        features.log_period.fill_(float((2 * math.pi / near).log10()))
        # least squares gives the coefficients of this period; softplus(gamma) = coefficient
        wave, happened = (near * pairs.gaps).cos(), pairs.happened
        swing = (wave * (happened - happened.mean())).sum() / wave.square().sum()
        start = torch.stack([happened.mean(), swing.clamp_min(1e-3)])
        features.gamma.copy_(start.expm1().log())
    fit_kernel(features, pairs)
    return float(features.periods.detach()), features


def learn_decay(events: "SampledEvents") -> "tuple[float, BochnerTime]":
    """Return the rate at which follow-ups fade with the gap, and the fitted kernel.

    The rate ``s`` of ``ψ(Δ) = exp(-(s Δ)² / 2)`` is the root mean square of the normal spectrum.

    Example:
        >>> from primal_attention.datasets import GapMarks
        >>> decay, _ = learn_decay(GapMarks(decay=2.0).sample(100, 50))
        >>> abs(decay / 2.0 - 1) < 0.1
        True
    """
    from primal_attention.kernels import BochnerTime

    pairs = follow_ups(events)
    features = BochnerTime(64, spectrum="normal").start_from(pairs.gaps, float(pairs.gaps.max()))
    fit_kernel(features, pairs)
    spectrum = {name: float(value.detach()) for name, value in features.quantile.named_parameters()}
    return math.hypot(spectrum["mu"], math.exp(spectrum["log_sigma"])), features


@dataclass(frozen=True)
class PlantedOptions:
    """Periods, decays and likelihoods that are known, and what is learned of them."""

    periods: tuple[float, ...] = (3.0, 5.0, 7.0, 11.0)
    """Planted periods; gaps are 1 in the mean."""
    decays: tuple[float, ...] = (0.5, 1.0, 3.0)
    """Planted decay rates; gaps are 1 in the median."""
    processes: tuple[str, ...] = ("Poisson", "Hawkes")
    """Processes whose likelihood is learned."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the samples."""
    sequences: int = 200
    """Sequences of a sample."""

    def __post_init__(self) -> None:
        at_least_one(self, "sequences")
        unknown = set(self.processes) - {"Poisson", "Hawkes"}
        if unknown:
            raise ValueError(f"Unknown processes {sorted(unknown)}; choose from Poisson, Hawkes.")


class Planted(Study[PlantedOptions]):
    """Learn what was planted."""

    name = "events-planted"
    Options = PlantedOptions

    def cells(self, options: PlantedOptions) -> list[Cell]:
        """Return the kernels first, then the likelihoods."""
        kinds: list[tuple[str, Any]] = [
            *(("period", value) for value in options.periods),
            *(("decay", value) for value in options.decays),
            *(("likelihood", name) for name in options.processes),
        ]
        return [
            {"kind": kind, "planted": value, "seed": seed, "sequences": options.sequences}
            for kind, value in kinds
            for seed in options.seeds
        ]

    def run(self, cell: Cell, options: PlantedOptions, scratch: Path) -> Row:
        """Sample a process and learn it."""
        kind, planted, seed, count = (cell[key] for key in ("kind", "planted", "seed", "sequences"))
        if kind == "likelihood":
            return _learn_process(_PROCESSES[planted](), count, seed)
        from primal_attention.datasets.events.generators import GapMarks, PeriodicMarks

        if kind == "period":
            periodic = PeriodicMarks(period=planted)
            found, features = learn_period(periodic.sample(count, 20, seed=seed))
            return {"found": found, **_curves(features, 3 * planted, periodic.same_type)}
        fading = GapMarks(decay=planted)
        found, spectrum = learn_decay(fading.sample(count, 20, seed=seed))
        return {"found": found, **_curves(spectrum, 4 / planted, fading.follow_up)}

    def tables(self, rows: Sequence[Row], options: PlantedOptions) -> Mapping[str, str | bytes]:
        """Return what was planted and found, and two learned kernels as a picture."""
        from primal_studies.events.pictures import planted_picture

        files: Files = {}
        kernels = [row for row in rows if row["kind"] != "likelihood"]
        if kernels:
            files["kernels.md"] = _kernel_table(kernels)
            panels = [
                (f"planted {kind} {row['planted']:g}, learned {row['found']:.3g}", row)
                for kind in ("period", "decay")
                for row in [r for r in kernels if r["kind"] == kind][-1:]
            ]
            files["picture.png"] = planted_picture(panels)
        likelihoods = [row for row in rows if row["kind"] == "likelihood"]
        if likelihoods:
            files["likelihoods.md"] = _likelihood_table(likelihoods)
        return files


def _poisson() -> "EventProcess":
    from primal_attention.datasets.events.generators import PoissonProcess

    return PoissonProcess((0.02, 0.01))


def _hawkes() -> "EventProcess":
    from primal_attention.datasets.events.generators import HawkesProcess

    return HawkesProcess((0.2, 0.1), ((0.5, 0.2), (0.1, 0.4)), decay=1.0)


_PROCESSES = {"Poisson": _poisson, "Hawkes": _hawkes}


def _learn_process(process: "EventProcess", count: int, seed: int) -> Row:
    """Return the log-likelihood and the mean wait of a small model, and those of the process."""
    import numpy as np

    from primal_attention.datasets import SampledEvents
    from primal_attention.tasks.events import EventPredictor

    train, test = (process.sample(count, 100, seed=2 * seed + i) for i in range(2))
    model = EventPredictor(
        dim=32,
        num_heads=2,
        num_layers=1,
        max_epochs=12,
        batch_size=8,
        options={"components": 8, "dropout": 0.0},
        random_state=seed,
        verbose=False,
    ).fit(train.to_log())
    # the wait after every history of 20, 30, … events, beside the gap that followed
    waits, gaps = [], []
    for length in range(20, 100, 10):
        past = SampledEvents(test.times[:, :length], test.types[:, :length])
        waits.append(model.predict_next(past.to_log()).mean)
        gaps.append(test.times[:, length] - test.times[:, length - 1])
    return {
        "log_likelihood": model.log_likelihood(test.to_log()).per_event,
        "truth": process.log_likelihood(test),
        "mean_wait": float(np.mean(waits)),
        "mean_gap": float(np.mean(gaps)),
        "true_mean": float(1 / process.mean_rates.sum()),
    }


def _curves(features: "TimeFeatures", longest: float, planted: Any) -> dict[str, list[float]]:
    """Return the learned and the planted kernel for the picture."""
    import torch

    from primal_attention.kernels import TimeKernel

    gaps = torch.linspace(0, longest, _POINTS, dtype=torch.float64)
    with torch.no_grad():
        learned = TimeKernel(features).psi(gaps)
    curves = {"curve_gaps": gaps, "curve": learned, "curve_planted": planted(gaps.numpy())}
    return {name: [round(float(x), 4) for x in curve] for name, curve in curves.items()}


def _kernel_table(rows: Sequence[Row]) -> str:
    names = {"period": "period (Mercer)", "decay": "decay (Bochner, normal)"}
    lines = []
    for kind, planted in dict.fromkeys((row["kind"], row["planted"]) for row in rows):
        found = [r["found"] for r in rows if (r["kind"], r["planted"]) == (kind, planted)]
        worst = max(abs(value / planted - 1) for value in found)
        shown = ", ".join(f"{value:.3g}" for value in found)
        lines.append([names[kind], f"{planted:g}", shown, f"{100 * worst:.1f} %"])
    return markdown_table(["kernel", "planted", "learned, by seed", "largest error"], lines) + "\n"


def _likelihood_table(rows: Sequence[Row]) -> str:
    lines = [
        [
            row["planted"],
            str(row["seed"]),
            f"{row['log_likelihood']:.3f}",
            f"{row['truth']:.3f}",
            f"{row['log_likelihood'] - row['truth']:+.3f}",
            f"{row['mean_wait']:.3g}",
            f"{row['true_mean']:.3g}",
            f"{100 * (row['mean_wait'] / row['true_mean'] - 1):+.1f} %",
        ]
        for row in rows
    ]
    header = [
        "process",
        "seed",
        "nats per event",
        "of the process",
        "difference",
        "mean wait",
        "of the process",
        "difference",
    ]
    return markdown_table(header, lines) + "\n"
