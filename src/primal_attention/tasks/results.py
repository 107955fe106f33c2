"""Results of an experiment: tables, a verdict in words, and the report."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primal_attention.support.output import hardware, to_csv, write_atomically
from primal_attention.tasks.task import Parts, Task

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from primal_attention.analysis import LayerSpectrum
    from primal_attention.tasks.trained import TrainedModel
    from primal_attention.training import History
    from primal_attention.training.evaluation import Evaluation
    from primal_attention.training.scores import Score, Scores

__all__ = ["Result", "baseline_table", "result_table", "verdict", "write_report"]


@dataclass(frozen=True)
class Result:
    """One trained model and what was measured."""

    name: str
    """Its attention."""
    history: "History"
    test: "Evaluation"
    """Scores and answers of the test part."""
    facts: Mapping[str, Any]
    """Chosen epoch, seconds, peak memory, parameters; diagnostics of the layers."""
    spectra: "Sequence[LayerSpectrum]" = ()
    """Of the trained layers."""
    control: "Sequence[LayerSpectrum]" = ()
    """Of the same layers before training."""
    trained: "TrainedModel | None" = None
    """The model, and the task that reads its data."""
    baselines: "Mapping[str, Scores]" = field(default_factory=dict)
    """Test scores of simple methods on the same parts."""

    @property
    def numbers(self) -> dict[str, object]:
        """Everything measured, as plain values by name."""
        scores: dict[str, object] = {}
        for name, score in self.test.scores.items():
            scores[f"test {name}"] = score.value
            if score.error is not None:
                scores[f"test {name}, standard error"] = score.error
        return scores | dict(self.facts)


def result_table(results: Sequence[Result]) -> list[list[str]]:
    """Return scores and costs as rows of text, names of the models first."""
    return _table({r.name: _cells(r) for r in results})


def baseline_table(results: Sequence[Result]) -> list[list[str]]:
    """Return the scores of models and baselines as rows of text, the best first."""
    first = results[0]
    every = {**{r.name: r.test.scores for r in results}, **first.baselines}
    name = _main_score(first)
    sign = -1 if first.test.scores[name].larger_is_better else 1
    order = sorted(every, key=lambda method: sign * every[method][name].value)
    shown = [n for n in first.test.scores if any(n in s for s in first.baselines.values())]
    rows = [[m, *(str(every[m].get(n, "–")) for n in shown)] for m in order]
    return [["", *(f"test {n}" for n in shown)], *rows]


def diagnostics_table(results: Sequence[Result]) -> list[list[str]]:
    """Return the diagnostics of the layers as rows of text, names of the models first."""
    return _table({r.name: _diagnostic_cells(r) for r in results})


def _table(columns: Mapping[str, Mapping[str, str]]) -> list[list[str]]:
    keys = dict.fromkeys(key for column in columns.values() for key in column)
    rows = [[key, *(column.get(key, "–") for column in columns.values())] for key in keys]
    return [["", *columns], *rows]


def _cells(result: Result) -> dict[str, str]:
    cells = {f"test {name}": str(score) for name, score in result.test.scores.items()}
    facts = result.facts
    cells |= {
        "chosen epoch": str(facts["chosen epoch"]),
        "seconds": f"{facts['seconds']:.1f}",
        "peak memory (MB)": f"{facts['peak memory (MB)']:.1f}",
        "parameters": f"{facts['parameters']:,}",
    }
    return cells


def _diagnostic_cells(result: Result) -> dict[str, str]:
    facts = result.facts
    return {
        key: f"{value:.3g} (untrained {facts[f'{key}, untrained']:.3g})"
        for key, value in facts.items()
        if f"{key}, untrained" in facts
    }


def verdict(results: Sequence[Result]) -> str:
    """Return who won by the first score after the loss, by how much, and at what cost.

    The first model is compared with each of the others, the best model with the best baseline. A
    difference below two standard errors counts as none.
    """
    first, *others = results
    name = _main_score(first)
    mine = first.test.scores[name]
    sentences = []
    for other in others:
        theirs = other.test.scores[name]
        sentences.append(
            f"{_comparison(first.name, mine, other.name, theirs, name)} {_cost(first, other)}"
        )
    if not others:
        sentences.append(f"{first.name} reaches a test {name} of {mine}.")
    if first.baselines:
        sentences.append(_beside_baselines(results, name))
    return " ".join(sentences)


def _main_score(result: Result) -> str:
    """Return the name of the first score after the loss."""
    return next((n for n in result.test.scores if n != "loss"), "loss")


def _beside_baselines(results: Sequence[Result], name: str) -> str:
    """Return whether the best model beats the best baseline, in words."""
    ours = _best({r.name: r.test.scores[name] for r in results})
    peer = _best({n: scores[name] for n, scores in results[0].baselines.items()})
    if not _is_tie(ours[1], peer[1]) and peer[1].is_better_than(ours[1].value):
        return f"A baseline wins: {_comparison(*peer, *ours, name)}"
    return _comparison(*ours, f"the best baseline ({peer[0]})", peer[1], name)


def _best(scores: "Mapping[str, Score]") -> "tuple[str, Score]":
    name, found = next(iter(scores.items()))
    for other, score in scores.items():
        if score.is_better_than(found.value):
            name, found = other, score
    return name, found


def _is_tie(mine: "Score", theirs: "Score") -> bool:
    noise = 2 * ((mine.error or 0.0) ** 2 + (theirs.error or 0.0) ** 2) ** 0.5
    return abs(mine.value - theirs.value) <= noise


def _comparison(first: str, mine: "Score", second: str, theirs: "Score", name: str) -> str:
    numbers = f"test {name} {mine} against {theirs}"
    if _is_tie(mine, theirs):
        return f"{first} and {second} do equally well within the error: {numbers}."
    word = "better" if mine.is_better_than(theirs.value) else "worse"
    return f"{first} does {word} than {second}: {numbers}."


def _cost(first: Result, other: Result) -> str:
    parts = []
    for key, words in (("seconds", "of the training time"), ("peak memory (MB)", "of the memory")):
        if other.facts[key] > 0:
            parts.append(f"{first.facts[key] / other.facts[key]:.2f} {words}")
    return f"It takes {' and '.join(parts)} of {other.name}." if parts else ""


_NOTES = (
    "One seed: ± is the standard error over the test items. The epoch was chosen on a part of the "
    "training data; the test part was scored once. Seconds are training alone, in processor time "
    "on a CPU. Peak memory is the most bytes of tensors alive in one training step, model and "
    "optimiser included."
)
_BASELINES = (
    "The best first. Baselines learn from the training and the validation part, and are scored on "
    "the same test part."
)
_SPECTRA = (
    "Share of the sum of singular values in the first k, {what}; band: one standard deviation. "
    "Primal layers: of the kernel they induce. Other layers: of the attention matrix. Dotted: the "
    "same layers before training."
)
_DIAGNOSTICS = (
    "On validation items after every epoch. A squared KKT residual of 0 would mean that the "
    "learned directions are singular directions; balance and off-diagonality are 0 there too. The "
    "effective rank counts the directions that carry the spectrum."
)


def write_report(
    out: Path,
    results: Sequence[Result],
    *,
    task: Task,
    data: Parts,
    title: str,
    settings: str,
    comment: Sequence[str] = (),
) -> None:
    """Write ``report.html``, ``spectra.png``, ``result.csv`` and ``result.json`` of a run.

    Args:
        out: Folder to write to.
        results: The trained models.
        task: Adds its own section.
        data: The parts that were used.
        title: Name of the experiment.
        settings: The recipe as YAML.
        comment: What the recipe says about itself, line by line.
    """
    from primal_attention.analysis import plot_spectra
    from primal_attention.report import Report, plot_curves, to_png

    sizes = [len(part) for part in data[:3]]  # type: ignore[arg-type]
    lead = (
        f"{task.summary[:1].upper()}{task.summary[1:]}, {sizes[0]:,} training, "
        f"{sizes[1]:,} validation and {sizes[2]:,} test items."
    )
    report = Report(f"{title}: {' and '.join(r.name for r in results)}", lead)
    rows = result_table(results)
    report.section("Result").verdict(verdict(results)).tiles(_tiles(results))
    report.table(rows[0], rows[1:]).text(_NOTES)
    if data.note:
        report.text(data.note)
    if any(comment):
        report.text(f"The recipe says: {' '.join(filter(None, comment))}")
    if results[0].baselines:
        rows = baseline_table(results)
        report.section("Beside baselines").table(rows[0], rows[1:]).text(_BASELINES)
    report.section("Curves").figure(_curves(results), _curves_caption(results))
    task.show(report, results)
    task.explain(report, results, data)
    measured = {r.name: r.spectra for r in results if r.spectra}
    if measured:
        picture = to_png(plot_spectra(measured, {r.name: r.control for r in results}))
        write_atomically(out / "spectra.png", picture)
        count = next(iter(measured.values()))[0].singular_values.shape[0]
        report.section("Spectra").figure(
            picture, _SPECTRA.format(what=task.spectra_of.format(count=count))
        )
        chosen = {r.name: r.history.best_epoch or 0 for r in results}
        shown = diagnostics_table(results)
        report.section("KSVD diagnostics").figure(
            plot_curves(_diagnostics(results), chosen=chosen), _DIAGNOSTICS
        ).table(shown[0], shown[1:])
    facts = "".join(f"# {key}: {value}\n" for key, value in hardware().items())
    report.section("Configuration").config(facts + settings)
    report.write(out / "report.html")
    records = [{"model": r.name, **r.numbers} for r in results]
    keys = dict.fromkeys(key for record in records for key in record)
    write_atomically(out / "result.csv", to_csv([{k: r.get(k) for k in keys} for r in records]))
    histories = {r.name: r.history.to_dict() for r in results}
    baselines = {
        name: {score: found.value for score, found in scores.items()}
        for name, scores in results[0].baselines.items()
    }
    content = {"title": title, "results": records, "histories": histories, "baselines": baselines}
    write_atomically(out / "result.json", json.dumps(content) + "\n")


def _tiles(results: Sequence[Result]) -> dict[str, str]:
    tiles = {}
    for result in results:
        name = next((n for n in result.test.scores if n != "loss"), "loss")
        tiles[f"{result.name}: test {name}"] = str(result.test.scores[name])
        tiles[f"{result.name}: training time"] = f"{result.facts['seconds']:.1f} s"
        peak = result.facts["peak memory (MB)"]
        tiles[f"{result.name}: peak memory of a step"] = f"{peak:.1f} MB"
    return tiles


def _curves(results: Sequence[Result]) -> "Figure":
    from primal_attention.report import plot_curves

    panels: dict[str, dict[str, list[float]]] = {"loss": {}}
    for result in results:
        rows = [asdict(record) for record in result.history.records]
        panels["loss"][f"{result.name}, training"] = [row["loss"] for row in rows]
        for score in rows[0]["valid"] if rows else ():
            line = [row["valid"][score] for row in rows]
            panels.setdefault(score, {})[f"{result.name}, validation"] = line
        if rows and rows[0]["ksvd"] is not None:
            panels.setdefault("KSVD term", {})[result.name] = [row["ksvd"] for row in rows]
    dashed = [name for name in panels["loss"] if name.endswith("training")]
    chosen = {r.name: r.history.best_epoch or 0 for r in results}
    if "KSVD term" in panels:
        panels["KSVD term"] = panels.pop("KSVD term")  # last
    # a log-likelihood may be negative
    log = [
        name
        for name in ("loss", "KSVD term")
        if all(value > 0 for line in panels.get(name, {}).values() for value in line)
    ]
    return plot_curves(panels, dashed=dashed, log=log, chosen=chosen)


def _curves_caption(results: Sequence[Result]) -> str:
    words = "Loss and scores over the epochs; dashed: training"
    if any(r.history.records[0].ksvd is not None for r in results):
        words += "; the KSVD term of primal layers, before its weight eta"
    return f"{words}. The dotted line marks the chosen epoch."


def _diagnostics(results: Sequence[Result]) -> dict[str, dict[str, list[float]]]:
    """Return the diagnostics of every epoch: quantity, model, numbers."""
    panels: dict[str, dict[str, list[float]]] = {}
    for result in results:
        keys = dict.fromkeys(k for record in result.history.records for k in record.metrics)
        for key in keys:
            line = [record.metrics.get(key, float("nan")) for record in result.history.records]
            panels.setdefault(key, {})[result.name] = line
    return panels
