"""Experiments: train a task's model with one attention or several, measure them, write a report.

    task, data = SeriesTask.load(recipe.data)
    results = run_experiment(task, data, recipe, out="outputs/mine")

A run folder holds one folder a model, which :func:`load_trained` reads::

    <out>/report.html, result.csv, result.json, spectra.png, config.yaml
    <out>/<attention>/model/           configuration and weights
    <out>/<attention>/task.json        how to read, score and show data
    <out>/<attention>/config.yaml      the recipe
    <out>/<attention>/checkpoints/     to resume; history.csv, history.jsonl, result.json
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from primal_attention.command import UserError, user_errors
from primal_attention.output import hardware, to_csv, to_json, write_atomically
from primal_attention.settings import to_yaml
from primal_attention.tasks.task import Parts, Task, find_task, load_task, save_task
from primal_attention.training.config import TrainingConfig

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.data import Dataset

    from primal_attention.analysis import LayerSpectrum
    from primal_attention.models import PretrainedModel
    from primal_attention.training import History
    from primal_attention.training.evaluation import Evaluation
    from primal_attention.training.scores import Answers, Score

__all__ = [
    "Recipe",
    "Result",
    "TrainedModel",
    "check_experiment",
    "check_finite",
    "check_lengths",
    "load_trained",
    "recipe_type",
    "result_table",
    "run_experiment",
    "save_trained",
    "verdict",
]

DataT = TypeVar("DataT")
ModelT = TypeVar("ModelT")

_SEQUENCES, _TOKENS, _MATRIX = 128, 256, 4096
"""Most sequences, tokens of each, and tokens of all in the measurement of spectra: the time of a
singular value decomposition grows with the cube of the length."""


@dataclass(frozen=True)
class Recipe(Generic[DataT, ModelT]):
    """Train the models of a recipe; any setting can be changed here."""

    task: str
    """Kind of data; primal list tasks shows them."""
    data: DataT
    """What to learn from."""
    model: ModelT
    """What to train."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """How to train."""
    compare: tuple[str, ...] = ()
    """Other attentions to train beside, in the same model."""
    threads: int = 1
    """Threads of torch; small models do not gain from a second one."""

    def __post_init__(self) -> None:
        for name in self.compare:
            self.options(name)  # an unknown name raises
        if self.threads < 1:
            raise ValueError(f"threads must be at least 1, got {self.threads}.")

    @property
    def names(self) -> tuple[str, ...]:
        """The attentions to train, the recipe's own first."""
        model: Any = self.model
        return tuple(dict.fromkeys((model.attention, *self.compare)))

    def options(self, attention: str) -> ModelT:
        """Return the model with an attention; another than the recipe's has its default options."""
        model: Any = self.model
        if attention == model.attention:
            return self.model
        changes: Any = {"attention": attention, "attention_options": {}, "primal_layers": "all"}
        return replace(model, **changes)


def recipe_type(task: str) -> type[Recipe[Any, Any]]:
    """Return the type of a task's recipes."""
    kind = find_task(task)
    return Recipe[kind.Settings, kind.Model]  # type: ignore[name-defined]


class TrainedModel(NamedTuple):
    """A trained model and the task that reads its data."""

    task: Task
    model: "PretrainedModel"


def save_trained(folder: Path, task: Task, model: "PretrainedModel") -> None:
    """Write a model and its task to a folder that :func:`load_trained` reads."""
    model.save_pretrained(folder / "model")
    save_task(task, folder)


def load_trained(folder: Path) -> TrainedModel:
    """Return the model in a folder that an experiment or an estimator wrote.

    Raises:
        UserError: If the folder holds no finished model, or model and task do not match.
    """
    from primal_attention.models import ModelFileError, PretrainedModel

    task = load_task(folder)
    if not (folder / "model").is_dir():
        raise UserError(
            f"{folder} holds no finished model; finish it with primal train {folder.parent} "
            "--resume."
        )
    with user_errors("", ModelFileError, OSError):
        model = PretrainedModel.from_pretrained(folder / "model")
    found = {name: getattr(model.config, name, None) for name in task.sizes}
    if found != dict(task.sizes):
        raise UserError(
            f"{folder}: model and task.json do not belong together; the model has {found}, the "
            f"task {dict(task.sizes)}."
        )
    return TrainedModel(task, model)


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

    @property
    def numbers(self) -> dict[str, Any]:
        """Everything measured, as plain values by name."""
        scores: dict[str, Any] = {}
        for name, score in self.test.scores.items():
            scores[f"test {name}"] = score.value
            if score.error is not None:
                scores[f"test {name}, standard error"] = score.error
        return scores | dict(self.facts)


@dataclass(frozen=True)
class _Run:
    """An experiment under way."""

    task: Task
    data: Parts
    recipe: Recipe[Any, Any]
    out: Path
    resume: bool
    title: str
    comment: Sequence[str]
    writes: bool
    """Whether this process is the one of several that writes files."""

    @property
    def settings(self) -> str:
        """The recipe as YAML, below its comment."""
        comment = "".join(f"# {line}".rstrip() + "\n" for line in self.comment)
        return comment + to_yaml(self.recipe)

    def build(self, name: str) -> "PretrainedModel":
        """Return the untrained model with one attention, the same each time."""
        import torch

        torch.manual_seed(self.recipe.training.seed)
        return self.task.build(self.recipe.options(name))

    def save_settings(self, name: str) -> None:
        """Write the recipe and the task; they mark the folder as a run."""
        save_task(self.task, self.out / name)
        write_atomically(self.out / name / "config.yaml", self.settings)
        write_atomically(self.out / "config.yaml", self.settings)


def run_experiment(
    task: Task,
    data: Parts,
    recipe: Recipe[Any, Any],
    *,
    out: str | Path,
    resume: bool = False,
    title: str = "",
    comment: Sequence[str] = (),
    report: Callable[[str], None] = lambda _: None,
) -> list[Result]:
    """Train the models of a recipe one after the other, score the test part once, write a report.

    Args:
        task: How to read, score and show the data.
        data: Training, validation and test part.
        recipe: What to train, and how.
        out: Folder of everything that is written.
        resume: Continue the run in ``out``; it ends with the weights of a run without a break.
        title: Name of the experiment; by default that of the folder.
        comment: What the recipe says about itself, line by line.
        report: Called with a line before each model.

    Raises:
        UserError: If a model cannot be built or cannot read the data.
    """
    from primal_attention.training import join_processes

    out = Path(out)
    processes = join_processes()
    run = _Run(
        task, data, recipe, out, resume, title or out.name, comment, processes.is_main_process
    )
    check_experiment(task, data, recipe)
    results = []
    for name in recipe.names:
        if run.writes:
            report(f"Training {name} …")
        results.append(_train(run, name))
    if run.writes:
        _write_report(run, results)
    return results


def check_experiment(task: Task, data: Parts, recipe: Recipe[Any, Any]) -> None:
    """Raise if a model of a recipe cannot be built, or cannot read the data."""
    for name in recipe.names:
        with user_errors(f"the model {name}"):
            model = task.build(recipe.options(name))
        for part in ("train", "valid", "test"):
            check_lengths(getattr(data, part), model, f"the {part} part of the data")


def check_lengths(data: "Dataset[Any]", model: "PretrainedModel", where: str) -> None:
    """Raise if a sequence has more tokens than the learned positions of a model.

    Args:
        data: What the model would read; sets without ``lengths`` pass.
        model: Its configuration may have ``max_length``.
        where: The name of the data.
    """
    most, lengths = getattr(model.config, "max_length", None), getattr(data, "lengths", None)
    if most is None or lengths is None or not len(lengths) or max(lengths) <= most:
        return
    raise UserError(
        f"{where}: the longest sequence has {max(lengths)} tokens, but the learned positions of "
        f"the model end at max_length={most}; cut the sequences, or train with a larger "
        "model.max_length or other positions."
    )


def check_finite(answers: "Answers") -> None:
    """Raise if a model has no finite answer to an item."""
    for tensor in answers.values():
        broken = (~tensor.reshape(len(tensor), -1).isfinite().all(1)).nonzero().tolist()
        if broken:
            raise UserError(
                f"the model has no finite answer to item {broken[0][0]}, counted from 0; its "
                "weights are damaged, or the item is far from those of its training."
            )


def _train(run: _Run, name: str) -> Result:
    """Train the recipe's model with one attention; save it, and score the test part once."""
    from primal_attention.analysis import layer_spectra, spectrum_summary
    from primal_attention.training import NonFiniteLossError, fit
    from primal_attention.training.checkpoint import latest_checkpoint

    task, data, config = run.task, run.data, run.recipe.training
    model, folder = run.build(name), run.out / name
    sample, watched = _sample(task, data.test), _sample(task, data.valid)
    control = layer_spectra(model, **sample)
    is_new = latest_checkpoint(folder / "checkpoints") is None
    if run.writes and is_new:
        run.save_settings(name)
    try:
        history = fit(
            model,
            data.train,
            config=config,
            valid=data.valid,
            objective=task.objective,
            measure=lambda m, part: task.measure(m, part, batch_size=config.batch_size).scores,
            collate=task.collate,
            out=folder,
            resume=run.resume,
            evaluate=lambda m: spectrum_summary(layer_spectra(m, **watched)),
        )
    except NonFiniteLossError as error:
        rows = [data.rows[i] for i in error.indices] if len(data.rows) else error.indices
        raise NonFiniteLossError(error.what, rows, error.checkpoint) from error
    if run.writes and not is_new:
        run.save_settings(name)  # not before the run has been accepted as the same
    test = task.measure(model, data.test)
    spectra = layer_spectra(model, **sample)
    facts: dict[str, Any] = {
        "chosen epoch": history.best_epoch,
        "seconds": history.records[-1].seconds,
        "peak memory (MB)": _peak_memory(run, name),
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    before, after = spectrum_summary(control), spectrum_summary(spectra)
    for key, value in after.items():
        facts[key] = value
        facts[f"{key}, untrained"] = before[key]
    result = Result(name, history, test, facts, spectra, control)
    if run.writes:
        content = to_json({"model": name, "items": len(data.test), **result.numbers})  # type: ignore[arg-type]
        write_atomically(folder / "result.json", content)
    return result


def _sample(task: Task, data: "Dataset[Any]") -> "dict[str, Tensor]":
    """Return the inputs of some items, evenly taken, the beginnings of long ones."""
    total = len(data)  # type: ignore[arg-type]
    chosen = range(0, total, -(-total // _SEQUENCES))
    batch = task.collate([data[i] for i in chosen])
    inputs = {key: value[:, :_TOKENS] for key, value in batch.items() if key != "labels"}
    tokens = max(value.shape[1] for value in inputs.values())
    step = -(-len(chosen) * tokens // _MATRIX)
    return {key: value[:: max(step, 1)] for key, value in inputs.items()}


def _peak_memory(run: _Run, name: str) -> float:
    """Return the peak of one training step in MB: parameters, activations, gradients, Adam."""
    import torch

    from primal_attention.analysis import PeakMemory
    from primal_attention.attention import ksvd_loss

    config, data = run.recipe.training, run.data.train
    count = min(config.batch_size, len(data))  # type: ignore[arg-type]
    batch = dict(run.task.collate([data[i] for i in range(count)]))
    labels = batch.pop("labels")
    with torch.random.fork_rng(devices=[]), PeakMemory() as memory:
        model = run.build(name)
        optimizer = torch.optim.AdamW(model.parameters())
        output = model(**batch)
        loss = run.task.objective(output, labels)
        if output.aux_loss is not None:
            loss = loss + config.eta * ksvd_loss(model)
        loss.backward()
        optimizer.step()
    return memory.peak / 1e6


# showing


def result_table(results: Sequence[Result]) -> list[list[str]]:
    """Return the results as rows of text, names of the models first."""
    columns = {r.name: _cells(r) for r in results}
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
    for key, value in facts.items():
        if f"{key}, untrained" in facts:
            cells[key] = f"{value:.3g} (untrained {facts[f'{key}, untrained']:.3g})"
    return cells


def verdict(results: Sequence[Result]) -> str:
    """Return who won by the first score after the loss, by how much, and at what cost.

    The first model is compared with each of the others. A difference below two standard errors
    counts as none.
    """
    first, *others = results
    name = next((n for n in first.test.scores if n != "loss"), "loss")
    mine = first.test.scores[name]
    if not others:
        return f"{first.name} reaches a test {name} of {mine}."
    sentences = []
    for other in others:
        theirs = other.test.scores[name]
        sentences.append(
            f"{_comparison(first.name, mine, other.name, theirs, name)} {_cost(first, other)}"
        )
    return " ".join(sentences)


def _comparison(first: str, mine: "Score", second: str, theirs: "Score", name: str) -> str:
    noise = 2 * ((mine.error or 0.0) ** 2 + (theirs.error or 0.0) ** 2) ** 0.5
    numbers = f"test {name} {mine} against {theirs}"
    if abs(mine.value - theirs.value) <= noise:
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
_SPECTRA = (
    "Share of the sum of singular values in the first k, mean over {count} test items (their first "
    "{tokens} tokens) and all heads; band: one standard deviation. Primal layers: of the kernel "
    "they induce. Other layers: of the attention matrix. Dotted: the same layers before training."
)
_DIAGNOSTICS = (
    "On validation items after every epoch. A squared KKT residual of 0 would mean that the "
    "learned directions are singular directions; balance and off-diagonality are 0 there too. The "
    "effective rank counts the directions that carry the spectrum."
)


def _write_report(run: _Run, results: Sequence[Result]) -> None:
    """Write ``report.html``, ``spectra.png``, ``result.csv`` and ``result.json`` of a run."""
    from primal_attention.analysis import Report, plot_curves, plot_spectra, to_png

    out, sizes = run.out, [len(d) for d in run.data[:3]]  # type: ignore[arg-type]
    lead = (
        f"{run.task.summary[:1].upper()}{run.task.summary[1:]}, {sizes[0]:,} training, "
        f"{sizes[1]:,} validation and {sizes[2]:,} test items."
    )
    report = Report(f"{run.title}: {' and '.join(r.name for r in results)}", lead)
    report.section("Result").text(verdict(results))
    rows = result_table(results)
    report.tiles(_tiles(results)).table(rows[0], rows[1:]).text(_NOTES)
    if any(run.comment):
        report.text(f"The recipe says: {' '.join(filter(None, run.comment))}")
    report.section("Curves").figure(_curves(results), _curves_caption(results))
    run.task.show(report, results)
    measured = {r.name: r.spectra for r in results if r.spectra}
    if measured:
        picture = to_png(plot_spectra(measured, {r.name: r.control for r in results}))
        write_atomically(out / "spectra.png", picture)
        count = next(iter(measured.values()))[0].singular_values.shape[0]
        report.section("Spectra").figure(picture, _SPECTRA.format(count=count, tokens=_TOKENS))
        chosen = {r.name: r.history.best_epoch or 0 for r in results}
        report.section("KSVD diagnostics").figure(
            plot_curves(_diagnostics(results), chosen=chosen), _DIAGNOSTICS
        )
    facts = "".join(f"# {key}: {value}\n" for key, value in hardware().items())
    report.section("Configuration").config(facts + to_yaml(run.recipe))
    report.write(out / "report.html")
    records = [{"model": r.name, **r.numbers} for r in results]
    keys = dict.fromkeys(key for record in records for key in record)
    write_atomically(out / "result.csv", to_csv([{k: r.get(k) for k in keys} for r in records]))
    histories = {r.name: r.history.to_dict() for r in results}
    content = {"title": run.title, "results": records, "histories": histories}
    write_atomically(out / "result.json", json.dumps(content) + "\n")


def _tiles(results: Sequence[Result]) -> dict[str, str]:
    tiles = {}
    for result in results:
        name = next((n for n in result.test.scores if n != "loss"), "loss")
        tiles[f"{result.name}: test {name}"] = f"{result.test[name]:.3f}"
        tiles[f"{result.name}: training time"] = f"{result.facts['seconds']:.1f} s"
        peak = result.facts["peak memory (MB)"]
        tiles[f"{result.name}: peak memory of a step"] = f"{peak:.1f} MB"
    return tiles


def _curves(results: Sequence[Result]) -> Any:
    from primal_attention.analysis import plot_curves

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
    return plot_curves(panels, dashed=dashed, log=("loss", "KSVD term"), chosen=chosen)


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
