"""Train a converted model to match the original. No labels are needed.

Three stages, each with its own switch in :class:`DistillConfig`:

1. closed form: ridge regression refits the last linear map of every converted layer to the output
   of the original layer, shrunk towards the copied weights;
2. layer by layer: each converted layer gets the inputs of the original layer and learns its output.
   All layers are trained at once, without gradients between them. One backward pass serves all of
   them, so the activations of all converted layers are in memory together;
3. end to end: the whole model learns the predictions or embeddings of the original, or the task,
   plus the KSVD term of its primal layers.

With ``lora_rank`` the projections stay those of the original in stage two: only what is new learns,
such as features (attention transfer, as in LoLCATs, arXiv 2410.10254). Stage three then trains
low-rank changes of the projections, and merges them at the end.

Stages two and three are runs of :func:`primal_attention.training.fit`, which needs the extra
``train``. With a ``folder`` they can be stopped at any time. Started again, they end with the same
weights.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, cast, get_args

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from primal_attention.attention import PublishesTerms, ksvd_loss
from primal_attention.hosts import Batch, run_batch
from primal_attention.support.files import read_json
from primal_attention.support.output import to_json, write_atomically
from primal_attention.support.settings import check_limits
from primal_attention.surgery.fitting import fit_outputs
from primal_attention.surgery.low_rank import low_rank_changes, new_parts
from primal_attention.surgery.objectives import end_loss, unexplained_share
from primal_attention.surgery.recording import (
    differing_layers,
    real_tokens,
    record_layers,
    replay_call,
)
from primal_attention.training import (
    CheckpointError,
    History,
    TrainingConfig,
    fit,
    join_processes,
)
from primal_attention.training.checkpoint import reading
from primal_attention.training.data import map_tensors
from primal_attention.training.evaluation import device_of, eval_mode
from primal_attention.training.processes import in_main_process, one_writer

__all__ = ["DistillConfig", "DistillResult", "distill"]

DistillObjective = Literal["auto", "logits", "hidden", "task"]
Loss = Callable[[Any, Any, Batch], Tensor]
_EPOCHS = 20
"""Most epochs of a stage, and about how often it writes a checkpoint."""


@dataclass(frozen=True)
class DistillConfig:
    """Stages, steps and objective of :func:`distill`."""

    closed_form: bool = True
    """Start with ridge regression of the output maps."""
    fit_batches: int = 16
    """Batches for the closed form."""
    ridge: float | None = None
    """Strength of the shrinkage towards the copied weights, relative to the mean square of the
    features; by default chosen by two-fold cross-validation."""
    layer_steps: int = 200
    """Steps of the stage layer by layer."""
    layer_lr: float = 1e-3
    """Largest learning rate of that stage."""
    end_steps: int = 200
    """Steps of the stage end to end."""
    end_lr: float = 3e-4
    """Largest learning rate of that stage."""
    objective: DistillObjective = "auto"
    """End to end: ``"logits"`` (divergence of the predictions), ``"hidden"`` (error of the last
    hidden states), ``"task"`` (the model's own loss on labels), or ``"auto"`` (``"logits"`` if the
    model returns logits, else ``"hidden"``)."""
    temperature: float = 1.0
    """Temperature of the predictions in ``"logits"``."""
    eta: float = 0.01
    """Weight of the KSVD term, for layers that have one."""
    train_all: bool = False
    """End to end, train every parameter, not only those of the converted layers."""
    lora_rank: int = 0
    """Rank of the changes of queries, keys, values and outputs, which are trained end to end in
    place of these maps and merged at the end; layer by layer the maps stay. Needs the extra
    ``lora``. With 0 the maps themselves are trained in both stages."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    seed: int = 0
    """Seed of the order of batches and of dropout."""

    def __post_init__(self) -> None:
        if self.ridge is not None and self.ridge <= 0:
            raise ValueError(f"ridge must be positive or None, got {self.ridge}.")
        if self.objective not in get_args(DistillObjective):
            raise ValueError(
                f"objective must be one of {get_args(DistillObjective)}, got {self.objective!r}."
            )
        if self.lora_rank and self.train_all:
            raise ValueError(
                "train_all trains every parameter and lora_rank only low-rank changes; set one."
            )
        for name in ("layer_steps", "end_steps", "lora_rank"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}.")
        if self.fit_batches < 1:
            raise ValueError(f"fit_batches must be at least 1, got {self.fit_batches}.")
        if self.eta < 0:
            raise ValueError(f"eta must not be negative, got {self.eta}.")
        for name in ("layer_lr", "end_lr", "temperature", "clip"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}.")
        check_limits(self)


@dataclass(frozen=True)
class DistillResult:
    """Result of :func:`distill`."""

    layers: list[str]
    """The converted layers."""
    fitted: list[str]
    """Layers whose output map was refit in closed form."""
    history: dict[str, History]
    """History of the stages ``"layers"`` and ``"end"``, without those that have no steps. An epoch
    is at least a twentieth of a stage. The first stage computes no KSVD term."""
    seconds: float
    """Time of the closed form and of all steps (processor time on a CPU), also of the steps before
    the run was resumed."""


def distill(
    model: nn.Module,
    teacher: nn.Module,
    data: Sequence[Batch],
    config: DistillConfig | None = None,
    *,
    folder: Path | str | None = None,
    loss: Loss | None = None,
) -> DistillResult:
    """Train a converted model in place to match the original, and return the history.

    Args:
        model: The converted model; in evaluation mode afterwards.
        teacher: A copy made before the conversion; not changed.
        data: Batches: mappings of keyword arguments, tuples of positional ones, or tensors. Only
            ``objective="task"`` uses labels.
        config: Steps, learning rates and objective.
        folder: Where to write checkpoints and logs, and where to resume from; locked meanwhile.
        loss: Replaces the end-to-end objective; a function of the student's output, the teacher's
            output and the batch.

    Raises:
        CheckpointError: If ``folder`` holds another run, or damaged checkpoints.
        UserError: If another process writes into ``folder``.
        NonFiniteLossError: If the loss or its gradient is no longer finite.

    Example:
        >>> import copy
        >>> from primal_attention.attention import create_attention
        >>> from primal_attention.surgery import layer_r2
        >>> teacher = nn.Sequential(create_attention("softmax", 8, 2), nn.Linear(8, 3))
        >>> model = copy.deepcopy(teacher)
        >>> model[0] = create_attention("linear", 8, 2)
        >>> data = [torch.randn(4, 10, 8) for _ in range(6)]
        >>> before = layer_r2(model, teacher, data)["0"]
        >>> done = distill(model, teacher, data, DistillConfig(layer_steps=40, end_steps=10))
        >>> layer_r2(model, teacher, data)["0"] > before
        True
    """
    config = DistillConfig() if config is None else config
    if len(data) == 0:
        raise ValueError("data holds no batch; pass at least one.")
    names = differing_layers(model, teacher)
    folder = None if folder is None else Path(folder)
    layers = nn.ModuleList(model.get_submodule(name) for name in names)
    settings = {
        "layers": _training(config, config.layer_steps, config.layer_lr, eta=0.0),
        "end": _training(config, config.end_steps, config.end_lr, eta=config.eta),
    }
    losses = {
        "layers": partial(_layers_loss, model, teacher, names),
        "end": partial(_end_loss, model, teacher, config, loss),
    }
    device = join_processes().device
    history: dict[str, History] = {}
    with one_writer(folder), _restored(model, teacher), eval_mode(teacher):
        if folder is not None:
            path, asked = folder / "distill.json", {**asdict(config), "layers": names}
            in_main_process(lambda: _check_same_run(path, asked))
        start = time.process_time()
        fitted = _closed_form(model, teacher, data, config, names) if config.closed_form else []
        seconds = time.process_time() - start
        for part in (model, teacher):
            part.to(device).requires_grad_(False)
        for name, training in settings.items():
            if training is None:
                continue
            with _trained(model, layers, config, name) as trained:
                stage = _Stage(model, trained, losses[name], in_eval_mode=name == "layers")
                for p in stage.parameters():
                    p.requires_grad_(p.is_floating_point())
                history[name] = fit(
                    stage,
                    cast("Dataset[object]", data),
                    config=training,
                    objective=lambda output, labels: output,
                    collate=_whole_batch,
                    out=None if folder is None else folder / name,
                    resume=folder is not None,
                )
                model.requires_grad_(False)
    model.eval()
    seconds += sum(stage.records[-1].seconds for stage in history.values())
    return DistillResult(names, fitted, history, seconds)


class _Stage(PublishesTerms):
    """A module whose parameters are those that a stage trains, and whose output is its loss.

    The optimizer and the checkpoints hold ``trained`` alone; the student is not registered.
    """

    def __init__(
        self,
        student: nn.Module,
        trained: nn.Module,
        loss: Callable[[Batch], Tensor],
        *,
        in_eval_mode: bool = False,
    ) -> None:
        super().__init__()
        self.trained, self.loss, self.in_eval_mode = trained, loss, in_eval_mode
        # a module inside a tuple is not registered
        self.unregistered = (student,)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the student too."""
        self.training = mode
        self.unregistered[0].train(mode and not self.in_eval_mode)
        return self

    def forward(self, batch: Batch) -> Tensor:
        """Return the loss of a batch."""
        value = self.loss(batch)
        # the student may publish its terms outside of the trained layers
        self.publish({"student": ksvd_loss(self.unregistered[0])})
        return value


@contextmanager
def _trained(
    model: nn.Module, layers: nn.ModuleList, config: DistillConfig, stage: str
) -> Iterator[nn.Module]:
    """Give the modules that a stage trains."""
    if stage == "end" and config.lora_rank:
        with low_rank_changes(layers, config.lora_rank, config.seed) as trained:
            yield trained
    elif config.lora_rank:
        parts = new_parts(layers)
        if not parts:
            raise ValueError(
                "With lora_rank the stage layer by layer trains what is new in the layers, and "
                "these have nothing but their projections; set layer_steps=0."
            )
        yield parts
    else:
        yield model if stage == "end" and config.train_all else layers


def _training(config: DistillConfig, steps: int, lr: float, *, eta: float) -> TrainingConfig | None:
    """Return the settings of a stage; none without steps."""
    if not steps:
        return None
    epochs = max(n for n in range(1, _EPOCHS + 1) if steps % n == 0)
    return TrainingConfig(
        epochs=epochs,
        epoch_steps=steps // epochs,
        batch_size=1,
        lr=lr,
        schedule="linear",
        weight_decay=0.0,
        clip=config.clip,
        eta=eta,
        # with a prime number of steps there is one epoch
        save_steps=-(-steps // _EPOCHS),
        seed=config.seed,
    )


def _whole_batch(items: Sequence[Batch]) -> dict[str, object]:
    """Return the only item, which is a batch, on the CPU as the data loader needs it."""
    return {"batch": map_tensors(Tensor.cpu, items[0]), "labels": None}


def _closed_form(
    model: nn.Module,
    teacher: nn.Module,
    data: Sequence[Batch],
    config: DistillConfig,
    names: Sequence[str],
) -> list[str]:
    """Refit the output maps on evenly spaced batches; return the layers that have one."""
    chosen = range(0, len(data), -(-len(data) // config.fit_batches))
    return fit_outputs(model, teacher, [data[i] for i in chosen], names=names, ridge=config.ridge)


def _layers_loss(
    model: nn.Module, teacher: nn.Module, names: Sequence[str], batch: Batch
) -> Tensor:
    """Return the mean relative error of the layers on the inputs of the original ones."""
    errors = []
    for name, call in record_layers(teacher, names, batch).items():
        keep = real_tokens(batch, call.output)
        errors.append(unexplained_share(replay_call(model, name, call)[keep], call.output[keep]))
    return torch.stack(errors).mean()


def _end_loss(
    model: nn.Module, teacher: nn.Module, config: DistillConfig, loss: Loss | None, batch: Batch
) -> Tensor:
    """Return the end-to-end loss."""
    with torch.no_grad():
        target = run_batch(teacher, batch)
    output = run_batch(model, batch, labels=config.objective == "task")
    if loss is not None:
        return loss(output, target, batch)
    return end_loss(output, target, batch, config)


def _check_same_run(path: Path, settings: dict[str, object]) -> None:
    """Raise if the file holds other settings; write it if there is none."""
    if not path.exists():
        write_atomically(path, to_json(settings))
        return
    with reading(path):
        saved = read_json(path)
    changed = [
        f"{k} was {saved.get(k)!r} and is {v!r}" for k, v in settings.items() if saved.get(k) != v
    ]
    if changed:
        raise CheckpointError(
            f"{path} belongs to another run: {'; '.join(changed)}. Resume with what it was started "
            "with, or choose another folder."
        )


@contextmanager
def _restored(*models: nn.Module) -> Iterator[None]:
    """Restore at the end on which device the models are, and which parameters are frozen."""
    homes = [device_of(model) for model in models]
    flags = [(p, p.requires_grad) for model in models for p in model.parameters()]
    try:
        yield
    finally:
        for p, flag in flags:
            p.requires_grad_(flag)
        for model, home in zip(models, homes, strict=True):
            model.to(home)
