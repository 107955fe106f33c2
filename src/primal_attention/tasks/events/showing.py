"""What a report shows of a model of next events: kernel, calibration, influence, sequences."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from primal_attention.kernels import BochnerTime
from primal_attention.report.plots import model_colors, panel_layout, plain
from primal_attention.tasks.events.model import NextEventModel
from primal_attention.tasks.events.scheme import LogScheme
from primal_attention.tasks.events.windows import collate_events

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from primal_attention.report import Report
    from primal_attention.tasks.results import Result

__all__ = ["inspect_model", "kernel_curve", "show_events"]

_POINTS, _FINE = 200, 32
"""Points of a kernel's curve, and times over which each is a mean."""
_PROBED = 32
"""Sequences in the measurement of influence."""
_BINS = 12
"""Bins of elapsed time."""
_DRAWN, _EVENTS = 4, 24
"""Sequences that are drawn, and their last events."""


def inspect_model(model: Any, data: Any, scheme: LogScheme) -> dict[str, Tensor]:
    """Return the kernel, the influence of past events and a few predicted sequences.

    Args:
        model: A :class:`NextEventModel`.
        data: Its :class:`EventWindows`.
        scheme: Units.
    """
    long = [i for i, n in enumerate(data.lengths) if n >= 3]
    chosen = long[:: max(1, len(long) // _PROBED)][:_PROBED]
    found = kernel_curve(model, scheme)
    if chosen:
        batch = collate_events([data[i] for i in chosen])
        labels = batch.pop("labels")
        found |= _influence(model, batch, scheme.scale)
        found |= _predicted(model, batch, labels, scheme)
    return {name: value for name, value in found.items() if len(value)}


@torch.no_grad()
def kernel_curve(model: NextEventModel, scheme: LogScheme) -> dict[str, Tensor]:
    """Return ``ψ(Δ)`` of the model's features of time, and its periods, in units of the log.

    Empty if the features have no stationary kernel.
    """
    time = model.features.time
    if time is None or not time.is_stationary:
        return {}
    low, high = np.log10(scheme.gap_quantiles[5]), np.log10(max(scheme.span, scheme.longest_gap))
    gap = torch.logspace(low, high, _POINTS * _FINE, dtype=torch.float64)
    was, _ = time.training, time.eval()
    frequency, weight = time.spectrum()
    time.train(was)
    if isinstance(time, BochnerTime):
        weight = weight * _energy(model, len(frequency))
    weight = weight / weight.sum()
    psi = torch.stack(
        [
            (torch.cos(part[:, None] / scheme.scale * frequency) * weight).sum(1)
            for part in gap.chunk(_FINE)
        ]
    )
    turning = frequency.abs() > 0
    period = 2 * torch.pi / frequency.abs()[turning] * scheme.scale
    return {
        "kernel_gap": gap.view(_POINTS, _FINE).log().mean(1).exp(),
        # waves shorter than a step of the curve cancel
        "kernel_psi": psi.view(_POINTS, _FINE).mean(1),
        "kernel_period": period,
        "kernel_weight": weight[turning],
    }


def _energy(model: NextEventModel, count: int) -> Tensor:
    """Return how strongly the layers behind the features of time read each frequency."""
    first = model.embed.project.weight[:, model.config.dim :]
    readers = (
        [first] if model.type_head.from_gap is None else [first, model.type_head.from_gap.weight]
    )
    # cosines come first, then sines
    columns = sum(w[:, : 2 * count].double().square().sum(0) for w in readers)
    return cast(Tensor, columns).view(2, count).sum(0)


def _influence(
    model: NextEventModel, batch: Mapping[str, Tensor], scale: float
) -> dict[str, Tensor]:
    """Return the share of influence of past events on the last one, by elapsed time.

    The influence of an event is the norm of the gradient of the history at the last event, in a
    random direction, with respect to the event's vector. This is defined for every attention.
    """
    keep, times = batch["key_mask"], batch["times"]
    caught: list[Tensor] = []
    handle = model.embed.register_forward_hook(lambda _m, _a, out: caught.append(_kept(out)))
    modes = model.training
    try:
        model.eval()
        with torch.enable_grad():
            output = model(**batch)
            rows = torch.arange(len(keep))
            last = output.hidden[rows, keep.sum(1) - 1]
            direction = torch.randn(last.shape, generator=torch.Generator().manual_seed(0))
            (gradient,) = torch.autograd.grad((last * direction.to(last)).sum(), caught)
    finally:
        handle.remove()
        model.train(modes)
    norm = gradient.norm(dim=-1)
    elapsed = torch.where(keep, times.amax(1, keepdim=True) - times, 0.0)
    past = keep & (elapsed > 0)
    share = norm / torch.where(past, norm, 0.0).sum(1, keepdim=True).clamp_min(1e-12)
    at, value = elapsed[past] * scale, share[past]
    if len(at) < _BINS:
        return {}
    edges = at.quantile(torch.linspace(0, 1, _BINS + 1, dtype=at.dtype))
    place = torch.bucketize(at, edges[1:-1])
    counts = torch.bincount(place, minlength=_BINS).clamp_min(1)
    totals = torch.zeros(2, _BINS, dtype=torch.float64)
    totals[0].index_add_(0, place, at.log())
    totals[1].index_add_(0, place, value.double())
    means = totals / counts
    return {"influence_elapsed": means[0].exp(), "influence": means[1].detach()}


def _kept(output: Tensor) -> Tensor:
    if output.requires_grad:
        output.retain_grad()
    return output


@torch.no_grad()
def _predicted(
    model: NextEventModel, batch: Mapping[str, Tensor], labels: Tensor, scheme: LogScheme
) -> dict[str, Tensor]:
    """Return the last events of a few sequences with what was predicted before each."""
    modes = model.training
    model.eval()
    output = model(**{k: v[:_DRAWN] for k, v in batch.items()})
    model.train(modes)
    columns: dict[str, list[Tensor]] = {}
    for i in range(len(output.hidden)):
        length = int(batch["key_mask"][i].sum())
        span = slice(max(0, length - 1 - _EVENTS), length - 1)
        waiting = type(output.waiting)(*(t[i, span] for t in output.waiting)).double()
        shares = model.type_marginal(output.hidden[i, span], waiting.nodes()).exp()
        types = batch["types"][i, span.start + 1 : span.stop + 1]
        start = batch["times"][i, span]
        edges = {
            name: waiting.quantile(torch.full_like(start, p))
            for name, p in (("lower", 0.1), ("upper", 0.9))
        }
        rows = {
            "sequence": torch.full((len(types),), i),
            "time": (batch["times"][i, span.start + 1 : span.stop + 1] - start[0]) * scheme.scale,
            "type": types,
            "guess": shares.argmax(1),
            "share": shares.gather(1, types[:, None])[:, 0],
            **{k: (start - start[0] + v) * scheme.scale for k, v in edges.items()},
        }
        for name, value in rows.items():
            columns.setdefault(f"drawn_{name}", []).append(value)
    return {name: torch.cat(values) for name, values in columns.items()}


_T_REF = (
    "t_ref=last_event: the model knows the past up to the last event. t_ref=target: it also knows "
    "when the next event happens, as in the tables of most papers."
)
_KERNEL = (
    "Kernel ψ(Δ) of the time features, mean over neighbouring Δ: how alike the model takes two "
    "times at distance Δ. Ticks below: the learned periods, longer for larger weights. A weight "
    "counts how strongly the layers behind the features read a frequency."
)
_CALIBRATION = (
    "Left: of the events whose most likely type had the probability on the horizontal axis, the "
    "share where it was right; on the diagonal the probabilities can be taken at their word. "
    "Right: the probability integral transform of the waiting times. A flat histogram is a "
    "calibrated distribution; the band holds 95 % of the bins of one."
)
_INFLUENCE = (
    "Mean share of influence that one past event has on the history at the last event, by the "
    "time between the two: norms of gradients, which every attention has."
)
_SEQUENCES = (
    "Last events of a few test sequences. A dot is an event; filled where its type was the most "
    "likely one (t_ref=last_event), hollow where not. A bar is the 80 % interval that was "
    "predicted for its time when the event before had happened."
)


def show_events(report: "Report", results: "Sequence[Result]", scheme: LogScheme) -> None:
    """Add the sections of next events to a report: words first, then pictures."""
    answers = {r.name: r.test.answers for r in results}
    report.section("Next events").verdict(_words(answers, scheme)).text(_T_REF)
    report.figure(_plot_calibration(answers), _CALIBRATION)
    kernels = {name: a for name, a in answers.items() if "kernel_psi" in a}
    if kernels:
        report.section("Kernel of time").figure(_plot_kernels(kernels, scheme.unit), _KERNEL)
        report.table(
            ["model", f"periods with the largest weights ({scheme.unit})"],
            [[name, ", ".join(f"{p:.3g}" for p in main_periods(a))] for name, a in kernels.items()],
        )
    influence = {name: a for name, a in answers.items() if "influence" in a}
    if influence:
        report.section("Influence against elapsed time").figure(
            _plot_influence(influence, scheme.unit), _INFLUENCE
        )
    first = next((a for a in answers.values() if "drawn_time" in a), None)
    if first is not None:
        report.section("Sequences").figure(_plot_sequences(first, scheme), _SEQUENCES)


def main_periods(answers: Mapping[str, Tensor], count: int = 5) -> list[float]:
    """Return the periods with the largest weights, longest last."""
    weight, period = answers["kernel_weight"], answers["kernel_period"]
    best = weight.argsort(descending=True, stable=True)[:count]
    return sorted(period[best].tolist())


def _words(answers: Mapping[str, Mapping[str, Tensor]], scheme: LogScheme) -> str:
    sentences = []
    for name, a in answers.items():
        right, told = (
            100 * float((a[k] == a["type"]).double().mean()) for k in ("guess_blind", "guess")
        )
        usual = 100 * float(torch.bincount(a["type"]).max()) / len(a["type"])
        pit = a["pit"].sort().values
        even = (torch.arange(len(pit), dtype=pit.dtype) + 0.5) / len(pit)
        off = 100 * float((pit - even).abs().max())
        sentences.append(
            f"{name} names the next type of {right:.1f} % of the events (t_ref=last_event; the "
            f"most frequent type alone: {usual:.1f} %), and of {told:.1f} % once it is told when "
            f"(t_ref=target). Its distribution of waiting times is off by at most {off:.1f} "
            f"percentage points."
        )
    return " ".join(sentences)


def _plot_calibration(answers: Mapping[str, Mapping[str, Tensor]]) -> "Figure":
    from matplotlib import pyplot as plt

    color = model_colors(answers)
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.2), layout=panel_layout())
    left.plot([0, 1], [0, 1], color="#5b6472", lw=1, ls=":")
    count = 0
    for name, a in answers.items():
        for suffix, style in (("_blind", "-"), ("", "--")):
            sure, hit = a[f"sure{suffix}"], (a[f"guess{suffix}"] == a["type"]).double()
            edges = sure.quantile(torch.linspace(0, 1, 11, dtype=sure.dtype))
            place = torch.bucketize(sure, edges[1:-1])
            rows = [
                (float(sure[place == i].mean()), float(hit[place == i].mean()))
                for i in place.unique()
            ]
            label = f"{name}, t_ref={'last_event' if suffix else 'target'}"
            left.plot(
                *zip(*rows, strict=True), style, marker="o", ms=4, color=color[name], label=label
            )
        right.hist(
            a["pit"].numpy(),
            bins=20,
            range=(0, 1),
            density=True,
            histtype="step",
            color=color[name],
        )
        count = len(a["pit"])
    band = 1.96 * (20 / max(count, 1)) ** 0.5
    right.axhspan(1 - band, 1 + band, color="#5b6472", alpha=0.15, lw=0)
    right.axhline(1, color="#5b6472", lw=1, ls=":")
    right.set(
        title="waiting times",
        xlabel="probability integral transform",
        ylabel="density",
        ylim=(0, None),
    )
    left.set(
        title="types",
        xlabel="predicted probability",
        ylabel="share that is right",
        xlim=(0, 1),
        ylim=(0, 1),
    )
    left.legend(frameon=False, fontsize=8)
    for axis in (left, right):
        axis.grid(alpha=0.25)
    return figure


def _plot_kernels(answers: Mapping[str, Mapping[str, Tensor]], unit: str) -> "Figure":
    from matplotlib import pyplot as plt

    color = model_colors(answers)
    figure, axis = plt.subplots(figsize=(10, 3.8), layout=panel_layout())
    lows = [float(a["kernel_psi"].min()) for a in answers.values()]
    base = min(*lows, 0.0) - 0.25
    for name, a in answers.items():
        axis.plot(a["kernel_gap"], a["kernel_psi"], color=color[name], label=name)
        height = 0.2 * a["kernel_weight"] / a["kernel_weight"].max()
        axis.vlines(a["kernel_period"], base, base + height, color=color[name], lw=1.2)
    gaps = next(iter(answers.values()))["kernel_gap"]
    axis.axhline(0, color="#5b6472", lw=0.8, ls=":")
    axis.set(
        xscale="log", xlabel=f"Δ ({unit})", ylabel="ψ(Δ)", xlim=(float(gaps[0]), float(gaps[-1]))
    )
    axis.xaxis.set_major_formatter("{x:g}")
    axis.grid(alpha=0.25)
    axis.legend(frameon=False)
    return figure


def _plot_influence(answers: Mapping[str, Mapping[str, Tensor]], unit: str) -> "Figure":
    from matplotlib import pyplot as plt

    color = model_colors(answers)
    figure, axis = plt.subplots(figsize=(10, 3.4), layout=panel_layout())
    for name, a in answers.items():
        axis.plot(
            a["influence_elapsed"], a["influence"], marker="o", ms=4, color=color[name], label=name
        )
    axis.set(
        xscale="log",
        xlabel=f"elapsed time ({unit})",
        ylabel="share of influence of an event",
        ylim=(0, None),
    )
    for formatter in (axis.xaxis.set_major_formatter, axis.xaxis.set_minor_formatter):
        formatter("{x:g}")
    axis.grid(alpha=0.25)
    axis.legend(frameon=False)
    return figure


def _plot_sequences(answers: Mapping[str, Tensor], scheme: LogScheme) -> "Figure":
    from matplotlib import pyplot as plt

    a = {k.removeprefix("drawn_"): v.numpy() for k, v in answers.items() if k.startswith("drawn_")}
    owners = np.unique(a["sequence"])
    figure, axes = plt.subplots(
        len(owners), 1, figsize=(12, 2.6 * len(owners)), squeeze=False, layout=panel_layout()
    )
    for axis, owner in zip(axes.flat, owners, strict=True):
        at = a["sequence"] == owner
        shown = np.unique(a["type"][at])
        place = {t: i for i, t in enumerate(shown)}
        y = np.array([place[t] for t in a["type"][at]])
        x, right = a["time"][at], a["guess"][at] == a["type"][at]
        end = x[-1] * 1.03
        axis.hlines(
            y, a["lower"][at], np.minimum(a["upper"][at], end), color="#1d4ed8", alpha=0.35, lw=3
        )
        axis.scatter(x[right], y[right], color="#c2410c", s=28, zorder=3)
        axis.scatter(x[~right], y[~right], facecolors="white", edgecolors="#c2410c", s=28, zorder=3)
        axis.set_yticks(range(len(shown)), [plain(scheme.names[t], 24) for t in shown], fontsize=8)
        axis.set(
            xlabel=f"time ({scheme.unit})", xlim=(-0.02 * end, end), ylim=(-0.6, len(shown) - 0.4)
        )
        axis.grid(alpha=0.25)
    return figure
