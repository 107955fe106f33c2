"""Study of duplicate lookup: which attention between rows can copy, and from how many rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from primal_attention.support.output import page
from primal_attention.support.settings import at_least_one, one_of
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.kit.tables import GREY, Column, Picture, columns_table, grouped, spread

__all__ = ["Probes", "ProbesOptions"]

_ATTENTIONS = ("softmax", "hybrid", "primal", "none", "1-nn")
_VARIANTS = ("original", "add-one", "random-features", "both", "any-column")
_EXTRA = ("both", "any-column")
"""Variants that run with the fewest rows and one seed."""
_FEW = 12
"""Up to so many rows all seeds run; with more rows the first one."""
_ASKED = 8
"""Rows whose targets are overwritten."""
_POINTS = 40
"""Points of a training curve."""
_GOAL = 0.2
"""Largest error of a model that solves the task."""


@dataclass(frozen=True)
class ProbesOptions:
    """Duplicate lookup with every attention between rows, beside 1-NN."""

    attentions: tuple[str, ...] = _ATTENTIONS
    """Row attentions, and 1-nn."""
    rows: tuple[int, ...] = (12, 64, 256)
    """Rows with a visible target in each table."""
    variants: tuple[str, ...] = _VARIANTS
    """Forms of the task; both and any-column run with the fewest rows and one seed."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds; tables with more than 12 rows run with the first one."""
    steps: int = 1600
    """Training steps."""

    def __post_init__(self) -> None:
        one_of(self, "attentions", _ATTENTIONS)
        one_of(self, "variants", _VARIANTS)
        at_least_one(self, "rows", "steps")
        for name in ("attentions", "variants", "seeds"):
            if not getattr(self, name):
                raise ValueError(f"{name} must not be empty; leave it out to run all.")


class Probes(Study[ProbesOptions]):
    """Train small models to look up duplicates, and overwrite what they should copy."""

    name = "tables-probes"
    Options = ProbesOptions

    def cells(self, options: ProbesOptions) -> list[Cell]:
        """Return the tables with few rows first."""
        return [
            {"rows": n, "variant": v, "attention": a, "seed": s, "steps": options.steps}
            for n in sorted(options.rows)
            for v in options.variants
            if v not in _EXTRA or n == min(options.rows)
            for s in (options.seeds if n <= _FEW and v not in _EXTRA else options.seeds[:1])
            for a in options.attentions
        ]

    def run(self, cell: Cell, options: ProbesOptions, scratch: Path) -> Row:
        """Train a model and probe it; 1-NN has nothing to train."""
        from primal_studies.tables import lookup

        given = {"rows": cell["rows"], "variant": cell["variant"], "seed": cell["seed"]}
        if cell["attention"] == "1-nn":
            return {"rmse": lookup.lookup_error(lookup.nearest_targets, **given)}
        found = lookup.train_lookup(cell["attention"], steps=cell["steps"], **given)
        size = max(1, len(found.losses) // _POINTS)
        parts = [found.losses[i : i + size] for i in range(0, len(found.losses), size)]
        curve = [round(fmean(part) ** 0.5, 4) for part in parts]
        probes = {} if cell["variant"] == "any-column" else _intervene(found.model, cell)
        return {"rmse": found.rmse, "seconds": found.seconds, "curve": curve, **probes}

    def describe(self, row: Row) -> str:
        """Return task, attention and error of a row."""
        return (
            f"{row['variant']}, {row['rows']} rows, {row['attention']}, seed {row['seed']}: "
            f"RMSE {row['rmse']:.3f}"
        )

    def tables(self, rows: Sequence[Row], options: ProbesOptions) -> Mapping[str, str | bytes]:
        """Return errors and slopes, and a picture of the original task."""
        kept = [row for row in rows if row["steps"] == options.steps]
        return {"table.md": _table(kept, options), "picture.png": _picture(kept)} if kept else {}


def _intervene(model: Any, cell: Cell) -> dict[str, Any]:
    """Return how predictions follow overwritten targets, mean over some rows of a new table."""
    import torch

    from primal_attention.tasks.tables.probes import intervention
    from primal_studies.tables.lookup import sample_lookup

    n = cell["rows"]
    generator = torch.Generator().manual_seed(2**33 + cell["seed"])
    tables = sample_lookup(1, n, cell["variant"], generator=generator)
    seen, twins = tables.values[0].split(n)
    holes = tables.hidden[0, :n]
    found = [
        intervention(model, seen, holes, row, twin=twins[row]) for row in range(min(n, _ASKED))
    ]
    return {
        "slope": fmean(f.slope for f in found),
        "correlation": fmean(f.correlation for f in found),
        "sweep": found[0].sweep.tolist(),
        "predictions": [[round(float(p), 3) for p in f.predictions] for f in found],
    }


def _table(rows: Sequence[Row], options: ProbesOptions) -> str:
    sizes = sorted({row["rows"] for row in rows})
    columns: dict[str, Column] = {
        "task": lambda group: group[0]["variant"].replace("-", " "),
        "attention": "{attention}",
        **{f"RMSE, {n} rows": _errors_at(n) for n in sizes},
        **{f"slope, {n} rows": _slope_at(n) for n in sizes},
        f"seconds, {sizes[-1]} rows": lambda group: _mean(
            [r["seconds"] for r in group if r["rows"] == sizes[-1] and "seconds" in r], 0
        ),
    }
    groups = grouped(rows, "variant", "attention")
    order = ((variant, attention) for variant in _VARIANTS for attention in _ATTENTIONS)
    count = len(options.seeds)
    caption = (
        "RMSE on new tables in standard deviations of the target; at most "
        f"{_GOAL} in bold. The slope is that of the predicted target of a twin, when the target it "
        f"should copy is overwritten. Up to {_FEW} rows: mean ± standard deviation over {count} "
        "seeds; more rows, and the last two tasks: one seed. Seconds are processor seconds of "
        f"{options.steps:,} training steps."
    )
    return page(caption, columns_table([groups[key] for key in order if key in groups], columns))


def _errors_at(size: int) -> Column:
    """Return a column of groups: errors of tables with some rows, bold if the goal is reached."""

    def cell(group: Sequence[Row]) -> str:
        mean, *rest = spread([r["rmse"] for r in group if r["rows"] == size], 3).split(" ")
        is_reached = mean != "–" and float(mean) <= _GOAL
        return " ".join([f"**{mean}**" if is_reached else mean, *rest])

    return cell


def _slope_at(size: int) -> Column:
    return lambda group: _mean([r["slope"] for r in group if r["rows"] == size and "slope" in r], 2)


def _mean(values: Sequence[float], digits: int) -> str:
    # adding zero turns -0.0 into 0.0
    return f"{round(fmean(values), digits) + 0.0:.{digits}f}" if values else "–"


def _picture(rows: Sequence[Row]) -> bytes:
    """Return a PNG of the original task: error by rows, training, and intervention."""
    picture = Picture(3, size=(12, 3.6))
    from primal_attention.report.plots import model_colors

    by_rows, training, following = picture.axes
    first = [r for r in rows if r["variant"] == "original" and "curve" in r] or list(rows)
    colors = model_colors(a for a in _ATTENTIONS if any(r["attention"] == a for r in first))
    largest = max(r["rows"] for r in first)
    for attention, color in colors.items():
        own = [r for r in first if r["attention"] == attention]
        sizes = sorted({r["rows"] for r in own})
        means = [fmean(r["rmse"] for r in own if r["rows"] == n) for n in sizes]
        by_rows.plot(sizes, means, "-", color=color)
        by_rows.plot([r["rows"] for r in own], [r["rmse"] for r in own], "o", ms=4, color=color)
        for row in [r for r in own if r["rows"] == largest and "curve" in r][:1]:
            steps = [row["steps"] * (i + 1) / len(row["curve"]) for i in range(len(row["curve"]))]
            training.plot(steps, row["curve"], color=color)
            for predictions in row["predictions"]:
                following.plot(row["sweep"], predictions, color=color, lw=1, alpha=0.6)
    by_rows.axhline(_GOAL, color=GREY, lw=1, ls=":")
    by_rows.set(xscale="log", xlabel="rows", ylabel="RMSE, deviations", title="error by rows")
    picture.ticks(0, sorted({r["rows"] for r in first}), "{}")
    training.set(xlabel="step", ylabel="RMSE", title=f"training, {largest} rows")
    title, ylabel = f"intervention, {largest} rows", "prediction of the twin"
    following.set(xlabel="target that was written", ylabel=ylabel, title=title)
    return picture.png(models=colors)
