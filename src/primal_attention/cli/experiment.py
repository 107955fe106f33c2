"""Train the models of a recipe one after the other, measure them the same way, show the result."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.utils.data import Dataset

from primal_attention.analysis import (
    LayerSpectrum,
    PeakMemory,
    Report,
    layer_spectra,
    plot_confusion,
    plot_curves,
    plot_spectra,
    spectrum_summary,
    to_png,
)
from primal_attention.attention import ksvd_loss
from primal_attention.cli.lengths import check_length
from primal_attention.cli.problems import Problem
from primal_attention.cli.recipes import to_yaml
from primal_attention.cli.settings import Recipe
from primal_attention.command import user_errors
from primal_attention.models import DualTowerClassifier, EncoderClassifier
from primal_attention.output import hardware, to_csv, to_json, write_atomically
from primal_attention.training import (
    History,
    NonFiniteLossError,
    TrainingConfig,
    cross_entropy,
    evaluate,
    fit,
)
from primal_attention.training.checkpoint import latest_checkpoint

__all__ = ["Result", "Run", "confusion", "standard_error", "train_model", "write_report"]

_SEQUENCES, _TOKENS, _MATRIX = 128, 256, 4096
"""Most sequences, tokens of each, and tokens of all on which spectra are measured: the time of a
singular value decomposition grows with the cube of the length."""


@dataclass(frozen=True)
class Run:
    """A recipe that is being carried out."""

    name: str
    """Of the recipe, for titles."""
    recipe: Recipe
    problem: Problem
    out: Path
    """Folder of everything that is written."""
    resume: bool = False
    """Continue the training in ``out``."""
    writes: bool = True
    """Whether this process is the one of several that writes the files."""
    comment: Sequence[str] = ()
    """What the recipe says about itself, line by line."""

    def save(self, name: str) -> None:
        """Write the settings and how a model reads its data: what makes a folder a run's."""
        self.problem.reader.save(self.out / name)
        write_atomically(self.out / name / "config.yaml", self.settings)
        write_atomically(self.out / "config.yaml", self.settings)

    def build(self, name: str) -> EncoderClassifier | DualTowerClassifier:
        """Return the untrained model with one attention, the same each time."""
        reader = self.problem.reader
        torch.manual_seed(self.recipe.training.seed)
        settings = self.recipe.model.named(name).config(len(reader.classes), reader.inputs)
        return reader.model(settings)

    def check(self) -> None:
        """Raise for models that cannot be built, or cannot read the data."""
        for name in self.recipe.names:
            with user_errors(f"the model {name}"):
                longest = self.build(name).config.max_length
            for part in ("train", "valid", "test"):
                check_length(getattr(self.problem, part), longest, f"the {part} part of the data")

    @property
    def settings(self) -> str:
        """The recipe as YAML, below its comment."""
        return "".join(f"# {line}".rstrip() + "\n" for line in self.comment) + to_yaml(self.recipe)


@dataclass(frozen=True)
class Result:
    """One trained model and what was measured."""

    name: str
    history: History
    numbers: dict[str, Any]
    """Rows of the table."""
    confusion: Int[Tensor, "classes classes"]
    """Test cases: true class by predicted class."""
    spectra: list[LayerSpectrum]
    """Of the trained layers."""
    control: list[LayerSpectrum]
    """Of the same layers before training."""


def train_model(run: Run, name: str) -> Result:
    """Train the recipe's model with one attention; save it, and score the test part once."""
    recipe, problem = run.recipe, run.problem
    reader, config = problem.reader, recipe.training
    model, folder = run.build(name), run.out / name
    sample = _sample(problem.test, reader.collate)
    watched = _sample(problem.valid, reader.collate)
    control = layer_spectra(model, **sample)
    is_new = latest_checkpoint(folder / "checkpoints") is None
    if run.writes and is_new:
        run.save(name)
    try:
        history = fit(
            model,
            problem.train,
            config=config,
            valid=problem.valid,
            collate=reader.collate,
            out=folder,
            resume=run.resume,
            evaluate=lambda m: spectrum_summary(layer_spectra(m, **watched)),
        )
    except NonFiniteLossError as error:
        rows = [problem.rows[i] for i in error.indices]
        raise NonFiniteLossError(error.what, rows, error.checkpoint) from error
    if run.writes and not is_new:
        run.save(name)  # not before the run has been accepted as the same
    found = evaluate(model, problem.test, collate=reader.collate)
    matrix = confusion(found.logits, found.labels, len(reader.classes))
    spectra = layer_spectra(model, **sample)
    count = int(matrix.sum())
    numbers: dict[str, Any] = {
        "test accuracy": found.accuracy,
        "standard error": standard_error(found.accuracy, count),
        "test loss": found.loss,
        "chosen epoch": history.best_epoch,
        "seconds": history.records[-1].seconds,
        "peak memory (MB)": _peak_memory(lambda: run.build(name), problem, config),
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    before, after = spectrum_summary(control), spectrum_summary(spectra)
    for key, value in after.items():
        numbers[key] = value
        numbers[f"{key}, untrained"] = before[key]
    if run.writes:
        content = to_json({"model": name, "cases": count, **numbers})
        write_atomically(folder / "result.json", content)
    return Result(name, history, numbers, matrix, spectra, control)


def standard_error(accuracy: float, count: int) -> float:
    """Return the binomial standard error of an accuracy.

    Example:
        >>> standard_error(0.5, 100)
        0.05
    """
    return float((accuracy * (1 - accuracy) / max(count, 1)) ** 0.5)


def confusion(
    logits: Tensor | None, labels: Tensor | None, classes: int
) -> Int[Tensor, "classes classes"]:
    """Return how often each class (row) was taken for each (column).

    Example:
        >>> confusion(torch.eye(2)[[0, 1, 1]], torch.tensor([0, 0, 1]), 2)
        tensor([[1, 1],
                [0, 1]])
    """
    if logits is None or labels is None:
        raise ValueError("Evaluate with keep_outputs=True to count which class is taken for which.")
    pairs = labels * classes + logits.argmax(-1)
    return torch.bincount(pairs, minlength=classes**2).view(classes, classes)


def _sample(data: Dataset[Any], collate: Any) -> dict[str, Tensor]:
    """Return the inputs of some sequences, evenly taken, the beginnings of long ones."""
    total = len(data)  # type: ignore[arg-type]
    chosen = range(0, total, -(-total // _SEQUENCES))
    batch = collate([data[i] for i in chosen])
    inputs = {key: value[:, :_TOKENS] for key, value in batch.items() if key != "labels"}
    tokens = inputs["x"].shape[1]
    step = -(-len(chosen) * tokens // _MATRIX)
    return {key: value[:: max(step, 1)] for key, value in inputs.items()}


def _peak_memory(build: Callable[[], nn.Module], problem: Problem, config: TrainingConfig) -> float:
    """Return the peak of one training step in MB: parameters, activations, gradients, Adam."""
    count = min(config.batch_size, len(problem.train))  # type: ignore[arg-type]
    batch = dict(problem.reader.collate([problem.train[i] for i in range(count)]))
    labels = batch.pop("labels")
    with torch.random.fork_rng(devices=[]), PeakMemory() as memory:
        model = build()
        optimizer = torch.optim.AdamW(model.parameters())
        output = model(**batch)
        loss = cross_entropy(output, labels)
        if output.aux_loss is not None:
            loss = loss + config.eta * ksvd_loss(model)
        loss.backward()
        optimizer.step()
    return memory.peak / 1e6


# showing


def table(results: Sequence[Result]) -> list[list[str]]:
    """Return the result as rows of text, names of the models first."""
    columns = {r.name: _cells(r.numbers) for r in results}
    keys = dict.fromkeys(key for column in columns.values() for key in column)
    rows = [[key, *(column.get(key, "–") for column in columns.values())] for key in keys]
    return [["", *columns], *rows]


def _cells(numbers: Mapping[str, Any]) -> dict[str, str]:
    accuracy, error = 100 * numbers["test accuracy"], 100 * numbers["standard error"]
    cells = {
        "test accuracy (%)": f"{accuracy:.1f} ± {error:.1f}",
        "test loss": f"{numbers['test loss']:.3f}",
        "chosen epoch": str(numbers["chosen epoch"]),
        "seconds": f"{numbers['seconds']:.1f}",
        "peak memory (MB)": f"{numbers['peak memory (MB)']:.1f}",
        "parameters": f"{numbers['parameters']:,}",
    }
    for key, value in numbers.items():
        if f"{key}, untrained" in numbers:
            cells[key] = f"{value:.3g} (untrained {numbers[f'{key}, untrained']:.3g})"
    return cells


_NOTES = (
    "One seed: ± is the binomial standard error of the test part. The epoch was chosen on a part "
    "of the training data; the test part was scored once. Seconds are training alone, in processor "
    "time on a CPU. Peak memory is the most bytes of tensors alive in one training step, model and "
    "optimiser included."
)
_SPECTRA = (
    "Share of the sum of singular values that the first k hold, mean over {count} test sequences "
    "(their first {tokens} tokens) and all heads; band: one standard deviation. Primal layers: of "
    "the kernel they induce. Other layers: of the attention matrix. Dotted: the same layers before "
    "training; compare before reading anything into a spectrum."
)
_DIAGNOSTICS = (
    "On validation sequences after every epoch. A squared KKT residual of 0 would mean that the "
    "learned directions are singular directions; balance and off-diagonality are 0 there too. The "
    "effective rank counts the directions that carry the spectrum."
)


def write_report(run: Run, results: Sequence[Result]) -> None:
    """Write ``report.html``, ``spectra.png``, ``result.csv`` and ``result.json`` of a run."""
    out, reader = run.out, run.problem.reader
    sizes = [len(d) for d in (run.problem.train, run.problem.valid, run.problem.test)]  # type: ignore[arg-type]
    kind = f"{run.recipe.data.name or run.recipe.data.task}: {len(reader.classes)} classes"
    lead = f"{kind}, {sizes[0]:,} training, {sizes[1]:,} validation and {sizes[2]:,} test sequences"
    report = Report(f"{run.name}: {' and '.join(r.name for r in results)}", f"{lead}.")
    tiles = {}
    for result in results:
        numbers = result.numbers
        tiles[f"{result.name}: test accuracy"] = f"{numbers['test accuracy']:.1%}"
        tiles[f"{result.name}: training time"] = f"{numbers['seconds']:.1f} s"
        tiles[f"{result.name}: peak memory of a step"] = f"{numbers['peak memory (MB)']:.1f} MB"
    rows = table(results)
    report.tiles(tiles).section("Result").table(rows[0], rows[1:]).text(_NOTES)
    if any(run.comment):
        report.text(f"The recipe says: {' '.join(filter(None, run.comment))}")
    report.section("Curves").figure(_curves(results), _curves_caption(results))
    report.section("Confusion").figure(
        plot_confusion({r.name: r.confusion for r in results}, reader.classes),
        "Test cases of each true class (row) by predicted class (column).",
    )
    measured = {r.name: r.spectra for r in results if r.spectra}
    if measured:
        picture = to_png(plot_spectra(measured, {r.name: r.control for r in results}))
        write_atomically(out / "spectra.png", picture)
        count = next(iter(measured.values()))[0].singular_values.shape[0]
        words = _SPECTRA.format(count=count, tokens=_TOKENS)
        report.section("Spectra").figure(picture, words)
        diagnostics = _diagnostics(results)
        chosen = {r.name: r.history.best_epoch or 0 for r in results}
        report.section("KSVD diagnostics").figure(
            plot_curves(diagnostics, chosen=chosen), _DIAGNOSTICS
        )
    facts = "".join(f"# {key}: {value}\n" for key, value in hardware().items())
    report.section("Configuration").config(facts + to_yaml(run.recipe))
    report.write(out / "report.html")
    records = [{"model": r.name, **r.numbers} for r in results]
    keys = dict.fromkeys(key for record in records for key in record)
    write_atomically(out / "result.csv", to_csv([{k: r.get(k) for k in keys} for r in records]))
    histories = {r.name: r.history.to_dict() for r in results}
    content = {"recipe": run.name, "results": records, "histories": histories}
    write_atomically(out / "result.json", json.dumps(content) + "\n")


def _curves(results: Sequence[Result]) -> Any:
    loss: dict[str, list[float]] = {}
    accuracy: dict[str, list[float]] = {}
    term: dict[str, list[float]] = {}
    for result in results:
        rows = [asdict(record) for record in result.history.records]
        loss[f"{result.name}, training"] = [row["loss"] for row in rows]
        loss[f"{result.name}, validation"] = [row["valid_loss"] for row in rows]
        accuracy[f"{result.name}, validation"] = [row["valid_accuracy"] for row in rows]
        if rows and rows[0]["ksvd"] is not None:
            term[result.name] = [row["ksvd"] for row in rows]
    panels = {"loss": loss, "accuracy": accuracy} | ({"KSVD term": term} if term else {})
    dashed = [name for name in loss if name.endswith("training")]
    chosen = {r.name: r.history.best_epoch or 0 for r in results}
    return plot_curves(panels, dashed=dashed, log=("loss", "KSVD term"), chosen=chosen)


def _curves_caption(results: Sequence[Result]) -> str:
    words = "Loss and accuracy over the epochs; dashed: training"
    if any(r.history.records[0].ksvd is not None for r in results):
        words += "; the KSVD term of primal layers, before its weight eta"
    return f"{words}. The dotted line marks the chosen epoch."


def _diagnostics(results: Sequence[Result]) -> dict[str, dict[str, list[float]]]:
    """Return the diagnostics of every epoch: quantity, model, numbers."""
    panels: dict[str, dict[str, list[float]]] = {}
    for result in results:
        keys = dict.fromkeys(k for record in result.history.records for k in record.metrics)
        for key in keys:
            series = [record.metrics.get(key, float("nan")) for record in result.history.records]
            panels.setdefault(key, {})[result.name] = series
    return panels
