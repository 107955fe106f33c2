"""Study of a large table: primal row attention on 100,000 rows, and what a pass costs by rows.

The table is Friedman's first function of ten uniform columns with noise of deviation one, so the
best possible RMSE is one.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from primal_attention.support.command import needs
from primal_attention.support.output import markdown_table, page
from primal_attention.support.settings import at_least_one
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.kit.tables import Column, Files, Picture, columns_table

if TYPE_CHECKING:
    from primal_attention.tasks.tables.model import NPTModel

__all__ = ["Scale", "ScaleOptions"]

_TEST = 10_000
"""Most rows to predict; a small table is tested with as many rows as it has."""
_TIMED = {"softmax": "softmax", "hybrid": "primal-sparse", "primal": "primal-dual"}
"""Row attentions that are timed, and their names in the registry."""
_WIDTH, _HEADS = 64, 4
"""Width and heads of the timed layers."""
_REPEATS = 3
_GB = 1e9


@dataclass(frozen=True)
class ScaleOptions:
    """Fit primal rows on a large table, and time attention between rows."""

    rows: int = 100_000
    """Training rows of ten columns."""
    steps: int = 1000
    """Training steps of 256 rows."""
    timed: tuple[int, ...] = (2048, 4096, 8192, 16384)
    """Rows of the timed passes; hybrid is timed up to 8,192, primal also for 32,768 and 65,536."""
    seed: int = 0
    """Seed of table and training."""

    def __post_init__(self) -> None:
        at_least_one(self, "rows", "steps", "timed")


class Scale(Study[ScaleOptions]):
    """Fit a large table, then time single layers."""

    name = "tables-scale"
    Options = ScaleOptions

    def cells(self, options: ScaleOptions) -> list[Cell]:
        """Return the fit first, since its peak of memory is that of the process."""
        fit = {"kind": "fit", "rows": options.rows, "steps": options.steps, "seed": options.seed}
        return [fit, {"kind": "time", "rows": list(options.timed)}]

    def run(self, cell: Cell, options: ScaleOptions, scratch: Path) -> Row | Sequence[Row]:
        """Fit and check the estimator, or time all layers with all numbers of rows."""
        return _fit(cell) if cell["kind"] == "fit" else _time(cell["rows"])

    def describe(self, row: Row) -> str:
        """Return what was measured."""
        if row["kind"] == "fit":
            return f"{row['rows']:,} rows: {row['fit_seconds']:.0f} s, RMSE {row['rmse']:.3f}"
        return f"{row['attention']}, {row['n']:,} rows: {1e3 * row['seconds']:.1f} ms"

    def tables(self, rows: Sequence[Row], options: ScaleOptions) -> Mapping[str, str | bytes]:
        """Return what the large table costs, times by rows, and a picture of them."""
        fits = [r for r in rows if r["kind"] == "fit"]
        timed = [r for r in rows if r["kind"] == "time" and r["rows"] == list(options.timed)]
        files: Files = {}
        if fits:
            files["fit.md"] = _fit_page(fits[0])
        if timed:
            files["time.md"] = _time_page(timed)
        if fits and timed:
            files["picture.png"] = _picture(fits[0], timed)
        return files


# a large table


def _friedman(rows: int, seed: int) -> Any:
    with needs("sklearn", "A large table"):
        from sklearn.datasets import make_friedman1
    return make_friedman1(rows, n_features=10, noise=1.0, random_state=seed)


def _rmse(y: Any, guess: Any) -> float:
    return float(((y - guess) ** 2).mean() ** 0.5)


def _fit(cell: Cell) -> Row:
    """Fit primal rows, and compare what is kept with attention to all single rows."""
    import torch
    from sklearn.ensemble import HistGradientBoostingRegressor

    from primal_attention.tasks.tables import TableRegressor
    from primal_studies.tables.methods import row_settings

    n, seed = cell["rows"], cell["seed"]
    X, y = _friedman(n + min(n, _TEST), seed)
    began, started = time.process_time(), time.perf_counter()
    settings = row_settings("primal", steps=cell["steps"], n_jobs=1)
    model = TableRegressor(**settings, random_state=seed)
    model.fit(X[:n], y[:n])
    fitted, ended = time.process_time(), time.perf_counter()
    guess = model.predict(X[n:])
    predicted = time.process_time()
    peak = _peak_bytes()
    rows, asked = model.task_.rows(X[:n], y[:n]), model.task_.rows(X[n:])
    with torch.no_grad():
        gaps = _streaming_gaps(model.model_, rows, asked)
        sizes = {size: _kept(model.model_, rows, size) for size in (1000, 10_000, n) if size <= n}
    forest = HistGradientBoostingRegressor(random_state=seed).fit(X[:n], y[:n])
    return {
        "fit_seconds": fitted - began,
        "wall_seconds": ended - started,
        "predict_seconds": predicted - fitted,
        "peak_bytes": peak,
        "rmse": _rmse(y[n:], guess),
        "boosting_rmse": _rmse(y[n:], forest.predict(X[n:])),
        "deviation": float(y[:n].std()),
        **gaps,
        "kept_bytes": {str(size): kept for size, kept in sizes.items()},
        "row_bytes": rows.values[0].nbytes + rows.missing[0].nbytes,
    }


def _peak_bytes() -> int:
    """Return the largest memory that the process has had."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _streaming_gaps(model: "NPTModel", rows: Any, asked: Any) -> dict[str, float]:
    """Return the largest differences between ways to read the context, in deviations."""
    context = rows.values, rows.missing
    dense = model.stream(*context, keeps_rows=True, chunk=len(rows))
    ways = {"one_part": model.stream(*context, chunk=len(rows)), "parts": model.stream(*context)}
    x = model.embedding(asked.values, asked.missing)
    truth = model.predict_from(x, memories=dense).logits
    found = {name: model.predict_from(x, memories=m).logits for name, m in ways.items()}
    found["kept"] = model.predict_from(x).logits
    return {f"gap_{name}": float((logits - truth).abs().max()) for name, logits in found.items()}


def _kept(model: "NPTModel", rows: Any, size: int) -> int:
    """Return the bytes that a fitted model keeps of its first rows."""
    small = model.with_context(rows.values[:size], rows.missing[:size]).eval().condense()
    return sum(b.nbytes for name, b in small.named_buffers() if name.startswith(("mem", "context")))


def _fit_page(row: Row) -> str:
    kept = ", ".join(f"{int(n):,}: {size:,}" for n, size in row["kept_bytes"].items())
    largest = max(row[key] for key in ("gap_one_part", "gap_parts", "gap_kept"))
    lines = [
        ["training, processor time", f"{row['fit_seconds'] / 60:.1f} min", "< 30 min"],
        ["peak memory of the process", f"{row['peak_bytes'] / _GB:.2f} GB", "< 4 GB"],
        ["context read in parts, largest difference", f"{row['gap_parts']:.1e}", "≤ 1e-5"],
        ["all of these and what is kept, largest difference", f"{largest:.1e}", "≤ 1e-5"],
        ["bytes kept after the fit, by rows", kept, "constant"],
        ["bytes of all encoded rows", f"{row['rows'] * row['row_bytes']:,}", ""],
        [f"prediction of {min(row['rows'], _TEST):,} rows", f"{row['predict_seconds']:.2f} s", ""],
        ["RMSE (noise 1)", f"{row['rmse']:.3f}", ""],
        ["RMSE of histogram boosting", f"{row['boosting_rmse']:.3f}", ""],
    ]
    caption = (
        f'{row["rows"]:,} training rows of ten columns, `attention="primal-dual"`, '
        f"{row['steps']:,} steps of 256 rows on one thread. Differences are those of predictions "
        "from attention to all single rows, in standard deviations of the target."
    )
    return page(caption, markdown_table(["quantity", "measured", "goal"], lines))


# time by rows


def _time(sizes: Sequence[int]) -> list[Row]:
    """Return the processor seconds of forward and backward, median of interleaved repeats."""
    import torch

    from primal_attention.attention import create_attention

    longest = {"softmax": max(sizes), "hybrid": 8192, "primal": 4 * max(sizes)}
    every = sorted({*sizes, *(2 * n for n in sizes), *(4 * n for n in sizes)})
    torch.manual_seed(0)
    layers = {a: create_attention(name, _WIDTH, _HEADS).eval() for a, name in _TIMED.items()}
    times: dict[tuple[str, int], list[float]] = {}
    for repeat in range(_REPEATS + 1):
        for n in every:
            x = torch.randn(1, n, _WIDTH)
            for attention, layer in layers.items():
                if n <= longest[attention]:
                    began = time.process_time()
                    layer(x).square().mean().backward()
                    if repeat:  # the first pass is a warm-up
                        spent = time.process_time() - began
                        times.setdefault((attention, n), []).append(spent)
    return [{"attention": a, "n": n, "seconds": median(t)} for (a, n), t in times.items()]


def _time_page(rows: Sequence[Row]) -> str:
    seconds = {(r["attention"], r["n"]): r["seconds"] for r in rows}

    def now(attention: str) -> Column:
        return lambda n: f"{1e3 * seconds[attention, n]:.1f}" if (attention, n) in seconds else "–"

    def ratio(attention: str) -> Column:
        def cell(n: int) -> str:
            full, half = seconds.get((attention, n)), seconds.get((attention, n // 2))
            return "–" if full is None or half is None else f"{full / half:.2f}"

        return cell

    columns: list[tuple[str, Column]] = [("rows", lambda n: f"{n:,}")]
    for attention in _TIMED:
        columns += [(f"{attention}, ms", now(attention)), ("× half the rows", ratio(attention))]
    caption = (
        f"Forward and backward of one layer of width {_WIDTH} with {_HEADS} heads: processor time, "
        f"one thread, median of {_REPEATS} interleaved repeats; and the ratio to half the rows."
    )
    return page(caption, columns_table(sorted({n for _, n in seconds}), columns))


def _picture(fit: Row, timed: Sequence[Row]) -> bytes:
    """Return a PNG: time by rows, and bytes that a fitted model keeps by rows."""
    picture = Picture(2, size=(10, 3.6))
    from primal_attention.report.plots import model_colors

    colors = model_colors(_TIMED)
    by_time, by_size = picture.axes
    for attention, color in colors.items():
        points = sorted((r["n"], r["seconds"]) for r in timed if r["attention"] == attention)
        by_time.plot(*zip(*points, strict=True), "o-", color=color)
    sizes = sorted(int(n) for n in fit["kept_bytes"])
    by_size.plot(sizes, [n * fit["row_bytes"] for n in sizes], "o-", color=colors["softmax"])
    kept = [fit["kept_bytes"][str(n)] for n in sizes]
    by_size.plot(sizes, kept, "o-", color=colors["primal"])
    by_time.set(xlabel="rows", ylabel="seconds", title="forward and backward of a layer")
    by_size.set(xlabel="training rows", ylabel="bytes", title="kept after the fit")
    for axis in picture.axes:
        axis.set(xscale="log", yscale="log")
    ticks = sorted({row["n"] for row in timed})
    by_time.set_xticks(ticks, [f"{n // 1024}k" for n in ticks])
    by_time.minorticks_off()
    return picture.png(models=colors)
