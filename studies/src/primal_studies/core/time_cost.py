"""``primal bench time``: what times cost in attention, and how well features match their kernel.

Two parts. *cost*: a causal training step of each attention with and without times, over length.
*kernel*: the error of Bochner features against closed forms, with frequencies drawn at random and
with mid-quantiles, by their number.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primal_attention.support.output import page
from primal_attention.support.settings import at_least_one, one_of
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.kit.tables import (
    Column,
    Files,
    Picture,
    columns_table,
    exponent,
    group_lines,
    grouped,
    pivot,
    plot_lines,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["TimeCostOptions", "TimeCostStudy"]

PARTS = ("cost", "kernel")
DIM, HEADS, PRODUCT_FEATURES = 64, 4, 8
SPAN, POINTS, LINEAR_FROM = 5.0, 200, 4096
SPECTRA = ("normal, mean 0", "normal, mean 2", "Cauchy", "uniform")


@dataclass(frozen=True)
class TimeCostOptions:
    """Cost of times in attention over length, and the error of time features."""

    parts: tuple[str, ...] = PARTS
    """Parts: cost, kernel."""
    names: tuple[str, ...] = ("linear", "primal-dual", "softmax")
    """Attentions."""
    lengths: tuple[int, ...] = (256, 1024, 4096, 16_384, 65_536)
    """Events of a sequence."""
    quadratic_up_to: int = 4096
    """Longest sequence of attentions whose cost is quadratic."""
    repeats: int = 5
    """Timed steps of each layer."""
    sizes: tuple[int, ...] = (16, 64, 256, 1024)
    """Numbers of frequencies."""
    draws: int = 16
    """Random draws of the frequencies."""
    seed: int = 0
    """Seed of parameters, tokens and times."""

    def __post_init__(self) -> None:
        one_of(self, "parts", PARTS)
        at_least_one(self, "lengths", "repeats", "sizes", "draws")


class TimeCostStudy(Study[TimeCostOptions]):
    """One cell a length, and one a spectrum and size."""

    name = "time"
    Options = TimeCostOptions

    def cells(self, options: TimeCostOptions) -> Sequence[Cell]:
        """Return the cells, short lengths first."""
        from primal_attention.attention import attention_entry

        quadratic = {name for name in options.names if "²" in attention_entry(name).cost}
        cells: dict[str, list[Cell]] = {"cost": [], "kernel": []}
        for n in sorted(options.lengths):
            is_long = n > options.quadratic_up_to
            names = [a for a in options.names if not (is_long and a in quadratic)]
            cells["cost"].append({"names": names, "n": n, "seed": options.seed})
        for spectrum in SPECTRA:
            for m in options.sizes:
                cells["kernel"].append({"spectrum": spectrum, "m": m, "draws": options.draws})
        return [{"part": part, **cell} for part in options.parts for cell in cells[part]]

    def run(self, cell: Cell, options: TimeCostOptions, scratch: Path) -> Row | Sequence[Row]:
        """Measure all layers at one length, or one error."""
        if cell["part"] == "kernel":
            return _errors(cell)
        return _costs(cell, options.repeats)

    def tables(self, rows: Sequence[Row], options: TimeCostOptions) -> Mapping[str, str | bytes]:
        """Return ratios to the attention without times, slopes, errors, and pictures."""
        files: Files = {}
        costs = [row for row in rows if row["part"] == "cost"]
        errors = [row for row in rows if row["part"] == "kernel"]
        if costs:
            files["cost.md"], files["cost.png"] = _cost_table(costs), _cost_picture(costs)
        if errors:
            files["kernel.md"], files["kernel.png"] = _error_table(errors), _kernel_picture()
        return files


def _costs(cell: Cell, repeats: int) -> list[Row]:
    import torch
    from torch import nn

    from primal_attention.attention import TimeOptions, attention_entry, create_attention
    from primal_studies.kit.timing import layer_costs, machine

    class Causal(nn.Module):
        """A layer that has its times with it, as the timer calls layers with tokens alone."""

        def __init__(self, layer: nn.Module, times: "Tensor | None") -> None:
            super().__init__()
            self.layer = layer
            self.also = {} if times is None else {"times": times}

        def forward(self, x: "Tensor") -> "Tensor":
            return self.layer(x, is_causal=True, **self.also)

    torch.manual_seed(cell["seed"])
    times = torch.rand(1, cell["n"], dtype=torch.float64).mul(2).cumsum(1)
    layers: dict[tuple[str, str], nn.Module] = {}
    for name in cell["names"]:
        layers[name, "none"] = Causal(create_attention(name, DIM, HEADS), None)
        for fusion in sorted(attention_entry(name).capabilities.time):
            width = PRODUCT_FEATURES if fusion == "product" else None
            time = TimeOptions(fusion, num_features=width)  # type: ignore[arg-type]
            layers[name, fusion] = Causal(create_attention(name, DIM, HEADS, time=time), times)
    x = torch.randn(1, cell["n"], DIM, requires_grad=True)
    found = layer_costs(layers, x, repeats, seconds=30.0)
    return [
        {"name": name, "time": fusion, **costs, "machine": machine()}
        for (name, fusion), costs in found.items()
    ]


def _cost_table(rows: Sequence[Row]) -> str:
    plain: dict[int, dict[str, float]] = {row["n"]: {} for row in rows}
    for row in rows:
        if row["time"] == "none":
            plain[row["n"]][row["name"]] = row["step_ms"]

    def cell(row: Row) -> str:
        base = plain[row["n"]].get(row["name"])
        return "—" if base is None else f"{row['step_ms']:,.1f} ({row['step_ms'] / base:.2f})"

    caption = (
        f"{rows[0]['machine']}; one sequence, width {DIM}, {HEADS} heads, causal, "
        f"{PRODUCT_FEATURES} features of time in a product, else the defaults; processor time of "
        f"one thread, median of {rows[0]['repeats']} steps in turns, seed {rows[0]['seed']}. "
        "Forward and backward in ms; in brackets as multiple of the same attention without times."
    )
    parts = [caption, pivot(rows, {"attention": "name", "time": "time"}, "n", cell)]
    long = [row for row in rows if row["n"] >= LINEAR_FROM]
    groups = [group for group in grouped(long, "name", "time").values() if len(group) > 1]
    if groups:
        columns: dict[str, Column] = {
            "attention": "{name}",
            "time": "{time}",
            "of step time": lambda group: f"{exponent((r['n'], r['step_ms']) for r in group):.2f}",
            "of memory": lambda group: f"{exponent((r['n'], r['peak_mb']) for r in group):.2f}",
        }
        parts.append(
            f"Exponent of the cost over the number of events, from {LINEAR_FROM:,} events: 1 is "
            "linear."
        )
        parts.append(columns_table(groups, columns))
    return page(*parts)


def _cost_picture(rows: Sequence[Row]) -> bytes:
    panels = group_lines((row["name"], row["time"], row["n"], row["step_ms"]) for row in rows)
    return plot_lines(panels, xlabel="events", ylabels=["step, ms"], dashed=["none"])


def _errors(cell: Cell) -> Row:
    import torch

    delta = torch.linspace(0, SPAN, POINTS, dtype=torch.float64)
    truth = _closed_form(cell["spectrum"], delta)
    m, generator = cell["m"], torch.Generator().manual_seed(0)

    def error(u: "Tensor") -> float:
        psi = _kernel(cell["spectrum"], u).psi(delta)
        return float((psi - truth).abs().max())

    draws = [
        error(torch.rand(m, dtype=torch.float64, generator=generator)) for _ in range(cell["draws"])
    ]
    nodes = (torch.arange(m, dtype=torch.float64) + 0.5) / m
    return {"random": round(sum(draws) / len(draws), 6), "mid-quantiles": round(error(nodes), 6)}


def _kernel(spectrum: str, u: "Tensor") -> Any:
    """Return the kernel of Bochner features with the frequencies of some quantiles."""
    import torch

    from primal_attention.kernels import BochnerTime, TimeKernel

    quantile = {
        "normal, mean 0": torch.special.ndtri,
        "normal, mean 2": lambda u: 2 + torch.special.ndtri(u),
        "Cauchy": lambda u: (math.pi * (u - 0.5)).tan(),
        "uniform": lambda u: 4 * u - 2,
    }[spectrum]
    features = BochnerTime(2 * len(u), dtype=torch.float64).requires_grad_(False)
    features.get_parameter("quantile.omega").copy_(quantile(u))
    return TimeKernel(features)


def _closed_form(spectrum: str, delta: "Tensor") -> "Tensor":
    """Return the Fourier transform of a spectrum."""
    if spectrum == "Cauchy":
        return (-delta).exp()
    if spectrum == "uniform":
        return (2 * delta / math.pi).sinc()
    mean = 2.0 if spectrum.endswith("2") else 0.0
    return (-delta.square() / 2).exp() * (mean * delta).cos()


def _error_table(rows: Sequence[Row]) -> str:
    caption = (
        f"Largest error of ψ(Δ) for gaps from 0 to {SPAN:g} against the closed form, by number of "
        f"frequencies; random: mean of {rows[0]['draws']} draws, seed 0."
    )
    kinds = ("random", "mid-quantiles")
    split = [{**row, "kind": kind, "error": row[kind]} for row in rows for kind in kinds]
    split.sort(key=lambda row: (SPECTRA.index(row["spectrum"]), kinds.index(row["kind"])))
    lines = {"spectrum": "spectrum", "frequencies": "kind"}
    return page(caption, pivot(split, lines, "m", "{error:.4f}", title="{}"))


def _kernel_picture() -> bytes:
    """Return ψ(Δ) of each spectrum with 16 mid-quantiles, beside the closed form."""
    import torch

    from primal_attention.kernels import MercerTime, TimeKernel

    picture = Picture(len(SPECTRA) + 1, size=(15, 2.8), share="y", is_spaced=False)
    delta = torch.linspace(0, 2 * SPAN, POINTS, dtype=torch.float64)
    nodes = (torch.arange(16, dtype=torch.float64) + 0.5) / 16
    *axes, last = picture.axes
    for axis, spectrum in zip(axes, SPECTRA, strict=True):
        axis.plot(delta, _kernel(spectrum, nodes).psi(delta), label="16 frequencies")
        axis.plot(delta, _closed_form(spectrum, delta), "k--", lw=1, label="closed form")
        axis.set(title=spectrum, xlabel="gap Δ")
    mercer = MercerTime(1, 3, dtype=torch.float64).requires_grad_(False)
    mercer.get_parameter("log_period").fill_(math.log10(SPAN))
    last.plot(delta, TimeKernel(mercer).psi(delta), label="period 5, degree 3")
    last.set(title="Mercer, equal coefficients", xlabel="gap Δ")
    axes[0].set_ylabel("ψ(Δ)")
    for axis in picture.axes:
        axis.legend(fontsize=8, frameon=False)
    return picture.png(is_open=False)
