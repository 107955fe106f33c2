"""What a report shows of a model of tables: calibration, influential rows, the learned map."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from primal_attention.analysis import LayerSpectrum, layer_spectra
from primal_attention.report.plots import add_legend, model_colors, panel_layout, plain
from primal_attention.tasks.tables.columns import TableColumn
from primal_attention.tasks.tables.data import TableRows
from primal_attention.tasks.tables.influence import RowInfluence, corrupt, row_influence
from primal_attention.tasks.tables.model import NPTModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from primal_attention.report import Report
    from primal_attention.tasks.results import Result
    from primal_attention.tasks.tables.task import TableTask
    from primal_attention.tasks.task import Parts
    from primal_attention.training.scores import Answers

__all__ = ["row_spectra", "show_calibration", "show_rows"]

_SPECTRUM, _MAPPED = 128, 300
"""Rows in the measurement of spectra, and rows that are drawn as arrows."""
_BINS, _BIN = 10, 15
"""Most bins of a reliability curve, and fewest items of each."""
_ROWS, _COLUMNS, _LETTERS = 5, 8, 20
"""Influential rows, and columns and letters of a cell that a table shows."""
_SHUFFLES = 3
"""Corrupted contexts."""
_LONG = 30 * 86400.0
"""Dates with a larger deviation, in seconds, are shown without the time of day."""
_ARROW = 0.12
"""Least mean length of an arrow, as a share of the spread of the points."""


class _WithRows(nn.Module):
    """A model that attends to the rows of its context through the layers themselves.

    In prediction a primal layer reads its memory instead, and no hook sees its inputs.
    """

    def __init__(self, model: NPTModel) -> None:
        super().__init__()
        self.row_blocks, self._model = model.row_blocks, (model,)

    def forward(self, values: Tensor, missing: Tensor) -> Any:
        model = self._model[0]
        found = model.stream(model.context_values, model.context_missing, keeps_rows=True)
        return model.predict_from(_embed(model, values, missing), memories=found)


def _embed(model: NPTModel, values: Tensor, missing: Tensor) -> Tensor:
    hidden = missing.clone()
    hidden[:, model.config.num_features :] = True
    return model.embedding(values, hidden)


def row_spectra(model: NPTModel, data: TableRows) -> list[LayerSpectrum]:
    """Return the spectrum of every row attention, from some rows to the context of the model.

    Args:
        model: With rows as its context; a model without row attention has no spectrum.
        data: Rows that attend.
    """
    if not model.config.context_rows or not model.config.has_rows:
        return []
    rows = data.take(torch.arange(0, len(data), -(-len(data) // _SPECTRUM)))
    modes = [(module, module.training) for module in model.modules()]
    try:
        found = layer_spectra(_WithRows(model.eval()), rows.values, rows.missing)
    finally:
        for module, mode in modes:
            module.training = mode
    # attention between columns runs too, outside the modules that the wrapper shows
    return [
        layer._replace(name=layer.name.rpartition(".block")[0]) for layer in found if layer.name
    ]


# calibration


def show_calibration(task: "TableTask", report: "Report", results: "Sequence[Result]") -> None:
    """Add how far probabilities, or intervals, can be trusted on the test part."""
    answers = {r.name: r.test.answers for r in results}
    draw = _plot_reliability if task.is_class else _plot_coverage
    report.section("Calibration").figure(
        draw(answers), _RELIABILITY if task.is_class else _COVERAGE
    )


_RELIABILITY = (
    "Left: probability of the predicted class against the share of right answers, in bins of equal "
    "size; bars: one standard error. On the dotted line probabilities can be taken at their word. "
    "Right: how often probabilities of this size occur."
)
_COVERAGE = (
    "Left: share of the test targets inside predicted intervals, against the probability that an "
    "interval states; band: one standard error. On the dotted line intervals can be taken at their "
    "word. Right: errors in predicted standard deviations, beside the normal distribution."
)


class _Curve(NamedTuple):
    stated: NDArray[np.float64]
    found: NDArray[np.float64]
    error: NDArray[np.float64]


def _reliability(answers: "Answers") -> _Curve:
    """Return stated and found shares of right answers, in bins of equal size."""
    stated, chosen = answers["logits"].double().softmax(1).max(1)
    hits = (chosen == answers["labels"]).double().numpy()
    order = np.argsort(stated.numpy())
    bins = np.array_split(order, min(max(len(order) // _BIN, 1), _BINS))
    counts = np.array([len(b) for b in bins])
    share = np.array([hits[b].mean() for b in bins])
    # one more case of each kind: all right is not certainty
    sure = (share * counts + 1) / (counts + 2)
    means = np.array([stated.numpy()[b].mean() for b in bins])
    return _Curve(means, share, np.sqrt(sure * (1 - sure) / counts))


def _coverage(answers: "Answers") -> _Curve:
    """Return stated and found shares of targets inside central intervals."""
    levels = torch.linspace(0.05, 0.95, 19, dtype=torch.float64)
    half = 2**0.5 * torch.erfinv(levels)
    away = ((answers["labels"] - answers["values"]) / answers["std"]).abs().double()
    share = (away[:, None] <= half).double().mean(0).numpy()
    stated = levels.numpy()
    return _Curve(stated, share, np.sqrt(stated * (1 - stated) / len(away)))


def _plot_reliability(answers: "Mapping[str, Answers]") -> "Figure":
    figure, (left, right), colors = _panels(answers)
    curves = {name: _reliability(found) for name, found in answers.items()}
    low = min(min(c.stated.min(), c.found.min()) for c in curves.values())
    ends = max(min(low, 0.9) - 0.05, 0), 1
    left.plot(ends, ends, color="#5b6472", lw=1, ls=":")
    for name, curve in curves.items():
        left.errorbar(*curve, color=colors[name], marker="o", ms=4, capsize=2)
        stated = answers[name]["logits"].double().softmax(1).amax(1).numpy()
        right.hist(stated, np.linspace(ends[0], 1, 21), color=colors[name], histtype="step", lw=1.5)
    left.set(xlabel="predicted probability", ylabel="share of right answers")
    right.set(xlabel="predicted probability", ylabel="test rows")
    return figure


def _plot_coverage(answers: "Mapping[str, Answers]") -> "Figure":
    figure, (left, right), colors = _panels(answers)
    left.plot((0, 1), (0, 1), color="#5b6472", lw=1, ls=":")
    for name, found in answers.items():
        curve = _coverage(found)
        left.plot(curve.stated, curve.found, color=colors[name])
        band = curve.found - curve.error, curve.found + curve.error
        left.fill_between(curve.stated, *band, color=colors[name], alpha=0.15, lw=0)
        away = ((found["values"] - found["labels"]) / found["std"]).clamp(-5, 5).numpy()
        bins: Any = {"bins": np.linspace(-5, 5, 31), "density": True}
        right.hist(away, **bins, color=colors[name], histtype="step", lw=1.5)
    z = np.linspace(-5, 5, 200)
    right.plot(z, np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi), color="#5b6472", lw=1, ls=":")
    left.set(xlabel="probability of the interval", ylabel="share of targets inside")
    right.set(xlabel="error / predicted deviation", ylabel="density")
    return figure


def _panels(names: Mapping[str, Any]) -> "tuple[Figure, Any, dict[str, str]]":
    """Return a figure of two panels with a legend of the models, and their colours."""
    from matplotlib import pyplot as plt

    colors = model_colors(names)
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.2), layout=panel_layout())
    for axis in axes:
        axis.grid(alpha=0.25)
    add_legend(figure, colors)
    return figure, axes, colors


# rows


def show_rows(
    task: "TableTask", report: "Report", results: "Sequence[Result]", data: "Parts"
) -> None:
    """Add influential rows, the corruption test and the learned map; nothing without rows."""
    parts: Any = data
    rows = parts.train.append(parts.valid)
    chosen = rows.sample(task.max_context)
    models = {
        r.name: r.trained.model.with_context(rows.values[chosen], rows.missing[chosen]).eval()  # type: ignore[operator]
        for r in results
        if r.trained is not None and r.trained.model.config.has_rows
    }
    if not models:
        report.section("Other rows").text("The model attends to no other rows.")
        return
    first = next(r for r in results if r.name in models)
    places = [data.rows[i] for i in chosen.tolist()]
    _show_influence(task, report, models[first.name], first, parts.test, places)
    _show_corruption(task, report, models, parts.test)
    report.section("Learned map").figure(_plot_map(task, models, parts.test), _MAP)


_MAP = (
    "What attention between rows does to test rows: an arrow goes from the vector of a row to the "
    "vector plus what the row reads from the training rows. First two principal components of "
    "the vectors; colours are true targets."
)
_INFLUENCE = (
    "The training rows on which three test predictions lean most. The influence of a row is what "
    "attention to it adds to the {what}, to first order. Small influences mean that the model "
    "reads little from other rows. Rows of the file are counted from 1."
)


def _show_influence(
    task: "TableTask",
    report: "Report",
    model: NPTModel,
    result: "Result",
    test: TableRows,
    places: Sequence[int],
) -> None:
    """Add tables of the most influential training rows, in the units of the user."""
    what = "probability of the predicted class" if task.is_class else "predicted number"
    note = _INFLUENCE.format(what=what)
    if len(task.columns) > _COLUMNS:
        note += f" The first {_COLUMNS} of {len(task.columns)} columns are shown."
    report.section("Influential rows").text(note)
    for title, i in _examples(task, result.test.answers).items():
        row = test.take([i])
        (found,) = row_influence(model, task, row, _ROWS)
        report.text(f"{title}: {_told(task, result.test.answers, i)}")
        report.table(*_influence_table(task, row, found, places))


def _examples(task: "TableTask", answers: "Answers") -> dict[str, int]:
    """Return a good, a typical and the worst prediction."""
    if task.is_class:
        shares = answers["logits"].double().softmax(1)
        error = 1 - shares.gather(1, answers["labels"][:, None])[:, 0]
    else:
        error = (answers["values"] - answers["labels"]).abs()
    order, last = error.argsort().tolist(), len(error) - 1
    places = {"A good prediction": last // 10, "A typical one": last // 2, "The worst one": last}
    return {title: order[place] for title, place in places.items()}


def _told(task: "TableTask", answers: "Answers", i: int) -> str:
    """Return prediction and truth of a test row in words."""
    if not task.is_class:
        mean, std, true = (float(answers[k][i]) for k in ("values", "std", "labels"))
        return f"test row {i + 1}, predicted {mean:.4g} ± {std:.2g}, true {true:.4g}."
    shares = answers["logits"][i].double().softmax(0)
    best, true = int(shares.argmax()), int(answers["labels"][i])
    return (
        f"test row {i + 1}, predicted {task.classes[best]} with {float(shares[best]):.0%}, true "
        f"{task.classes[true]}."
    )


def _influence_table(
    task: "TableTask", row: TableRows, found: RowInfluence, places: Sequence[int]
) -> tuple[list[str], list[list[str]]]:
    target, f = task._numeric_target, len(task.columns)
    values = row.values.double().numpy()
    own = task.encoder.decode(values[:, :f], row.missing[:, :f].numpy())
    true = target.decode(values[:, f])
    lines = [["this row", "", _cell(true[0], target), *_cells(own, 0, task)]]
    for k, index in enumerate(found.rows):
        name = f"row {places[index] + 1:,}"
        cells = [_cell(found.target[k], target), *_cells(found.features, k, task)]
        lines.append([name, f"{found.influence[k]:+.3g}", *cells])
    names = [c.name for c in task.columns[:_COLUMNS]]
    return ["", "influence", target.name, *names], lines


def _cells(table: Any, i: int, task: "TableTask") -> list[str]:
    row = table.iloc[i] if hasattr(table, "iloc") else table[i]
    pairs = zip(list(row)[:_COLUMNS], task.columns, strict=False)
    return [_cell(value, column) for value, column in pairs]


def _cell(value: Any, column: "TableColumn") -> str:
    """Return a cell of a table in words."""
    if value is None or value != value:  # also NaN and NaT
        return "–"
    if column.form == "datetime" and not column.is_categorical:
        # standardised numbers have seven digits: minutes among decades
        unit, slack = ("D", 300) if column.scale > _LONG else ("m", 30)
        moment = np.datetime64(value, "s") + np.timedelta64(slack, "s")
        return str(moment.astype(f"datetime64[{unit}]")).replace("T", " ")
    if isinstance(value, float | np.floating):
        number = float(value)
        return f"{number if abs(number) > 1e-5 * column.scale else 0:.4g}"
    words = str(value)
    return words if len(words) <= _LETTERS else f"{words[: _LETTERS - 1]}…"


def _show_corruption(
    task: "TableTask", report: "Report", models: Mapping[str, NPTModel], test: TableRows
) -> None:
    """Add the test scores with a context whose columns are shuffled."""
    rows, sentences = [], []
    for name, model in models.items():
        whole = task.measure(model, test).scores
        score = next(n for n in whole if n != "loss")
        broken = [task.measure(corrupt(model, seed), test)[score] for seed in range(_SHUFFLES)]
        mean, was = float(np.mean(broken)), whole[score]
        change = mean - was.value
        words = f"{100 * change:+.1f} points" if was.is_share else f"{change:+.3g}"
        rows.append([name, str(was), str(replace(was, value=mean, error=None)), words])
        is_worse = was.is_better_than(mean) and abs(mean - was.value) > 2 * (was.error or 0)
        uses = "leans on" if is_worse else "hardly needs"
        sentences.append(f"{name} {uses} other rows.")
    report.section("Corruption test").verdict(" ".join(sentences)).table(
        ["", f"test {score}", f"test {score} with shuffled context", "change"], rows
    ).text(
        "Every column of the training rows, the target included, is shuffled by itself, so that "
        f"only single columns keep their meaning; mean over {_SHUFFLES} shuffles. A change below "
        "two standard errors counts as none."
    )


# map


@torch.no_grad()
def _steps(model: NPTModel, rows: TableRows) -> list[tuple[Tensor, Tensor]]:
    """Return the vectors of rows before every row attention, and what attention adds to them."""
    memories = model.stream(model.context_values, model.context_missing, keeps_rows=True)
    x = _embed(model, rows.values, rows.missing)
    found = []
    for row, cell, memory in zip(model.row_blocks, model.cell_blocks, memories, strict=True):
        block: Any = row
        tokens = block.tokens(x)
        added = block.block.attention(block.block.attention_norm(tokens), memory)
        found.append((tokens[0], added[0]))
        x = cell(block.cells(x, block.block.finish(tokens, added)))
    return found


def _plot_map(task: "TableTask", models: Mapping[str, NPTModel], test: TableRows) -> "Figure":
    from matplotlib import pyplot as plt
    from matplotlib.colors import to_hex

    rows = test.take(torch.arange(0, len(test), -(-len(test) // _MAPPED)))
    steps = {name: _steps(model, rows) for name, model in models.items()}
    depth = max(map(len, steps.values()))
    figure, axes = plt.subplots(
        len(steps), depth, figsize=(5 * depth, 4.4 * len(steps)), squeeze=False,
        layout=panel_layout(),
    )  # fmt: skip
    for (name, layers), line in zip(steps.items(), axes, strict=True):
        for number, ((before, added), axis) in enumerate(zip(layers, line, strict=False), 1):
            drawn, factor = _draw_arrows(axis, before.double(), added.double(), task, rows)
            words = f", arrows × {factor}" if factor > 1 else ""
            axis.set(title=f"{name}, layer {number}{words}", xticks=[], yticks=[])
    if task.is_class:
        palette = plt.get_cmap("tab10")
        add_legend(figure, {name: to_hex(palette(i)) for i, name in enumerate(task.classes[:10])})
    else:
        figure.colorbar(drawn, ax=axes, label=plain(task._numeric_target.name), shrink=0.8)
    return figure


def _draw_arrows(
    axis: Any, before: Tensor, added: Tensor, task: "TableTask", rows: TableRows
) -> tuple[Any, int]:
    """Draw arrows in the plane of the two largest principal components.

    Returns:
        What has the colours, and the factor by which short arrows are drawn longer.
    """
    both = torch.cat([before, before + added])
    plane = torch.linalg.svd(both - both.mean(0), full_matrices=False).Vh[:2].mT
    start, step = (before - both.mean(0)) @ plane, added @ plane
    length = float(step.norm(dim=1).mean() / start.std(0, correction=0).norm().clamp_min(1e-12))
    factor = next((f for f in (1, 2, 5, 10, 20, 50) if f * length >= _ARROW), 100)
    values = rows.labels.numpy()
    options: Any = {"cmap": "viridis"}
    if task.is_class:
        values, options = values % 10, {"cmap": "tab10", "clim": (-0.5, 9.5)}
    else:
        values = task._numeric_target.mean + task._numeric_target.scale * values
    place, moved = start.numpy().T, factor * step.numpy().T
    arrows = axis.quiver(
        *place, *moved, values, angles="xy", scale_units="xy", scale=1, width=0.003, **options
    )
    axis.scatter(*place, c=values, s=4, cmap=options["cmap"], norm=arrows.norm)
    ends = place + moved
    for least, most, set_limits in zip(
        np.minimum(place, ends).min(1), np.maximum(place, ends).max(1),
        (axis.set_xlim, axis.set_ylim), strict=True,
    ):  # fmt: skip
        margin = 0.05 * (most - least) + 1e-9
        set_limits(least - margin, most + margin)
    return arrows, factor
