"""Experiments: train a task's model with one attention or several, measure them, write a report.

    task, data = SeriesTask.load(recipe.data)
    results = run_experiment(task, data, recipe, out="outputs/mine")

A run folder holds one folder a model, which :func:`primal_attention.load` reads::

    <out>/report.html, result.csv, result.json, spectra.png, config.yaml
    <out>/<attention>/model/           configuration and weights
    <out>/<attention>/task.json        how to read, score and show data
    <out>/<attention>/config.yaml      the recipe
    <out>/<attention>/checkpoints/     to resume; history.csv, history.jsonl, result.json
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from primal_attention.support.command import user_errors
from primal_attention.support.output import remove_folder, to_json, write_atomically
from primal_attention.support.settings import check_limits, to_yaml
from primal_attention.tasks.results import Result, write_report
from primal_attention.tasks.task import Parts, Task, find_task, save_task
from primal_attention.tasks.trained import check_lengths, save_trained
from primal_attention.training.config import TrainingConfig

if TYPE_CHECKING:
    from primal_attention.models import PretrainedModel
    from primal_attention.training import FitCost

__all__ = [
    "Recipe",
    "check_experiment",
    "recipe_type",
    "run_experiment",
    "trained_models",
]

DataT = TypeVar("DataT")
ModelT = TypeVar("ModelT")


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
        check_limits(self)

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
        changes: dict[str, object] = {
            "attention": attention,
            "attention_options": {},
            "primal_layers": "all",
        }
        return replace(model, **changes)


def recipe_type(task: str) -> type[Recipe[Any, Any]]:
    """Return the type of a task's recipes."""
    kind = find_task(task)
    return Recipe[kind.Settings, kind.Model]  # type: ignore[name-defined]


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
    verbose: bool | None

    @property
    def settings(self) -> str:
        """The recipe as YAML, below its comment."""
        comment = "".join(f"# {line}".rstrip() + "\n" for line in self.comment)
        return comment + to_yaml(self.recipe)

    def build(self, name: str) -> "PretrainedModel":
        """Return the untrained model with one attention, the same each time."""
        from primal_attention.support.randomness import isolated

        with isolated(self.recipe.training.seed):
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
    overwrite: bool = False,
    title: str = "",
    comment: Sequence[str] = (),
    report: Callable[[str], None] = lambda _: None,
    verbose: bool | None = None,
) -> list[Result]:
    """Train the models of a recipe one after the other, score the test part once, write a report.

    Args:
        task: How to read, score and show the data.
        data: Training, validation and test part.
        recipe: What to train, and how.
        out: Folder of everything that is written; locked meanwhile.
        resume: Continue the run in ``out``; it ends with the weights of a run without a break.
        overwrite: Remove the models of an earlier run in ``out``.
        title: Name of the experiment; by default that of the folder.
        comment: What the recipe says about itself, line by line.
        report: Called with a line before each model.
        verbose: Whether to show the progress of every training, as in ``fit``.

    Raises:
        UserError: If a model cannot be built or cannot read the data, or another process writes
            into ``out``.
    """
    from primal_attention.training import join_processes
    from primal_attention.training.processes import in_main_process, one_writer

    out = Path(out)
    is_main = join_processes().is_main_process
    run = _Run(task, data, recipe, out, resume, title or out.name, comment, is_main, verbose)
    check_experiment(task, data, recipe)
    with one_writer(out):
        if overwrite:
            in_main_process(lambda: _remove_models(out, recipe.names))
        results = []
        for name in recipe.names:
            cost = _cost(run, name)
            if run.writes:
                report(f"Training {name}: {cost} …")
            results.append(_train(run, name, cost))
        if run.writes:
            baselines = task.baselines(data)
            results = [replace(result, baselines=baselines) for result in results]
            write_report(
                out,
                results,
                task=task,
                data=data,
                title=run.title,
                settings=to_yaml(recipe),
                comment=comment,
            )
    return results


def trained_models(out: Path, names: Sequence[str]) -> list[str]:
    """Return those of some models whose training has begun in a run folder."""
    return [name for name in names if (out / name / "checkpoints").is_dir()]


def _remove_models(out: Path, names: Sequence[str]) -> None:
    """Remove models; their settings stay, so that a kill leaves a run that can start anew."""
    for name in trained_models(out, names):
        for path in sorted((out / name).iterdir(), key=lambda p: p.name != "checkpoints"):
            if path.is_dir():
                remove_folder(path)
            elif path.name not in ("config.yaml", "task.json", ".lock"):
                path.unlink()


def check_experiment(task: Task, data: Parts, recipe: Recipe[Any, Any]) -> None:
    """Raise if a model of a recipe cannot be built, or cannot read the data."""
    for name in recipe.names:
        with user_errors(f"the model {name}"), _too_large():
            model = task.build(recipe.options(name))
        for part in ("train", "valid", "test"):
            check_lengths(getattr(data, part), model, f"the {part} part of the data")


@contextmanager
def _too_large() -> Iterator[None]:
    """Turn what torch and Python raise if weights do not fit into memory into ``ValueError``."""
    try:
        yield
    except (MemoryError, RuntimeError, OverflowError) as error:
        words = str(error).lower()
        if isinstance(error, RuntimeError) and not ("allocate" in words or "overflow" in words):
            raise
        raise ValueError(
            "its weights do not fit into memory; choose smaller settings, such as model.dim."
        ) from error


def _train(run: _Run, name: str, cost: "FitCost") -> Result:
    """Train the recipe's model with one attention; save it, and score the test part once."""
    from primal_attention.analysis import spectrum_summary
    from primal_attention.training import NonFiniteLossError, fit
    from primal_attention.training.checkpoint import latest_checkpoint

    task, data, config = run.task, run.data, run.recipe.training
    model, folder = run.build(name), run.out / name
    keep_items: Any = getattr(model, "keep_items", None)
    if keep_items is not None:
        keep_items(data.train)  # as fit does; the control reads them, too
    control = task.spectra(model, data.test)
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
            evaluate=lambda m: spectrum_summary(task.spectra(m, data.valid)),
            verbose=run.verbose,
        )
    except NonFiniteLossError as error:
        rows = [data.rows[i] for i in error.indices] if len(data.rows) else error.indices
        raise NonFiniteLossError(error.what, rows, error.checkpoint) from error
    if run.writes and not is_new:
        run.save_settings(name)  # not before the run has been accepted as the same
    trained = task.finish(model, data)
    if run.writes:
        save_trained(folder, *trained)  # also seals what fit has saved
    test = trained.task.measure(trained.model, data.test)
    spectra = task.spectra(model, data.test)
    facts: dict[str, object] = {
        "chosen epoch": history.best_epoch,
        "seconds": history.records[-1].seconds,
        "peak memory (MB)": cost.bytes / 1e6,
        "parameters": cost.parameters,
    }
    before, after = spectrum_summary(control), spectrum_summary(spectra)
    for key, value in after.items():
        facts[key] = value
        facts[f"{key}, untrained"] = before[key]
    result = Result(name, history, test, facts, spectra, control, trained)
    if run.writes:
        content = to_json({"model": name, "items": len(data.test), **result.numbers})  # type: ignore[arg-type]
        write_atomically(folder / "result.json", content)
    return result


def _cost(run: _Run, name: str) -> "FitCost":
    """Return what a training will cost, from a few steps of a fresh model."""
    from primal_attention.support.randomness import isolated
    from primal_attention.training import fit_cost

    config, data = run.recipe.training, run.data.train
    total = len(data)  # type: ignore[arg-type]
    with isolated():
        batch = run.task.collate([data[i] for i in range(min(config.batch_size, total))])
        return fit_cost(
            lambda: run.build(name),
            batch,
            objective=run.task.objective,
            config=config,
            steps=config.epochs * config.steps_of_epoch(total),
        )
