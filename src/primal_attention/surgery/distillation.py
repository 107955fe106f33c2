"""Train a converted model to match the original. No labels are needed.

Three stages, each with its own switch in :class:`DistillConfig`:

1. closed form: ridge regression refits the last linear map of every converted layer to the output
   of the original layer, shrunk towards the copied weights;
2. layer by layer: each converted layer gets the inputs of the original layer and learns its output.
   All layers are trained at once, without gradients between them;
3. end to end: the whole model learns the predictions or embeddings of the original, or the task,
   plus the KSVD term of its primal layers.

With a ``folder`` a run can be stopped at any time. Started again, it ends with the same weights.
"""

import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from primal_attention.attention import ksvd_loss, ksvd_terms
from primal_attention.output import write_atomically
from primal_attention.surgery.config import ConversionError
from primal_attention.surgery.fitting import fit_outputs
from primal_attention.surgery.objectives import end_loss, relative_error
from primal_attention.surgery.recording import (
    Batch,
    differing_layers,
    eval_mode,
    real_tokens,
    record_layers,
    replay_call,
    run_batch,
)

__all__ = ["DistillConfig", "DistillResult", "distill"]

Objective = Literal["auto", "logits", "hidden", "task"]
Loss = Callable[[Any, Any, Batch], Tensor]


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
    objective: Objective = "auto"
    """End to end: ``"logits"`` (divergence of the predictions), ``"hidden"`` (error of the last
    hidden states), ``"task"`` (the model's own loss on labels), or ``"auto"`` (``"logits"`` if the
    model returns logits, else ``"hidden"``)."""
    temperature: float = 1.0
    """Temperature of the predictions in ``"logits"``."""
    eta: float = 0.01
    """Weight of the KSVD term, for layers that have one."""
    train_all: bool = False
    """End to end, train every parameter, not only those of the converted layers."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    seed: int = 0
    """Seed of the order of batches and of dropout."""
    save_every: int = 50
    """Steps between checkpoints."""

    def __post_init__(self) -> None:
        if self.ridge is not None and self.ridge <= 0:
            raise ValueError(f"ridge must be positive or None, got {self.ridge}.")
        if self.objective not in get_args(Objective):
            raise ValueError(
                f"objective must be one of {get_args(Objective)}, got {self.objective!r}."
            )
        for name in ("layer_steps", "end_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}.")
        for name in ("fit_batches", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        for name in ("layer_lr", "end_lr", "temperature", "clip"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}.")


@dataclass(frozen=True)
class DistillResult:
    """Result of :func:`distill`."""

    layers: list[str]
    """The converted layers."""
    fitted: list[str]
    """Layers whose output map was refit in closed form."""
    history: list[dict[str, float | str]]
    """Stage, step and loss of every step."""
    seconds: float
    """Processor time, summed over all starts of the run."""
    resumed_at: int = field(default=0)
    """Step at which this start resumed the run; 0 for a new one."""


def distill(
    model: nn.Module,
    teacher: nn.Module,
    data: Sequence[Batch],
    config: DistillConfig | None = None,
    *,
    folder: Path | str | None = None,
    loss: Loss | None = None,
    progress: bool = True,
) -> DistillResult:
    """Train a converted model in place to match the original, and return the history.

    Args:
        model: The converted model; in evaluation mode afterwards.
        teacher: A copy made before the conversion; not changed.
        data: Batches: mappings of keyword arguments, tuples of positional ones, or tensors. Only
            ``objective="task"`` uses labels.
        config: Steps, learning rates and objective.
        folder: Where to write the checkpoint, and where to resume from.
        loss: Replaces the end-to-end objective; a function of the student's output, the teacher's
            output and the batch.
        progress: Show a progress bar on a terminal; needs the extra ``cli``.

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
    run = _Run(model, teacher, data, config, None if folder is None else Path(folder), loss)
    return run.go(progress)


class _Run:
    """A distillation: its position, its optimizer, and the loop over steps."""

    def __init__(
        self,
        model: nn.Module,
        teacher: nn.Module,
        data: Sequence[Batch],
        config: DistillConfig,
        folder: Path | None,
        loss: Loss | None,
    ) -> None:
        self.model, self.teacher, self.data, self.config = model, teacher, data, config
        self.names = differing_layers(model, teacher)
        self.path = None if folder is None else folder / "distill.safetensors"
        self.loss = loss
        self.step, self.spent = 0, 0.0
        self.fitted: list[str] = []
        self.history: list[dict[str, float | str]] = []
        self.optimizer: torch.optim.Optimizer | None = None

    @property
    def total(self) -> int:
        return self.config.layer_steps + self.config.end_steps

    def go(self, progress: bool) -> DistillResult:
        started, self.clock = self._restore(), time.process_time()
        wanted = [p.requires_grad for p in self.model.parameters()]
        teacher_wanted = [p.requires_grad for p in self.teacher.parameters()]
        self.teacher.requires_grad_(False)
        try:
            with eval_mode(self.teacher), _bar(self.total, self.step, progress) as advance:
                if self.step == 0 and started == 0 and self.config.closed_form:
                    fit = [self.data[i] for i in self._order(0)[: self.config.fit_batches]]
                    self.fitted = fit_outputs(
                        self.model, self.teacher, fit, names=self.names, ridge=self.config.ridge
                    )
                while self.step < self.total:
                    value, stage = self._take_step()
                    self.history.append({"stage": stage, "step": self.step, "loss": value})
                    self.step += 1
                    advance(stage, value)
                    if self.step % self.config.save_every == 0 or self.step == self.total:
                        self._save()
        finally:
            for p, flag in zip(self.model.parameters(), wanted, strict=True):
                p.requires_grad_(flag)
            for p, flag in zip(self.teacher.parameters(), teacher_wanted, strict=True):
                p.requires_grad_(flag)
        self.model.eval()
        return DistillResult(self.names, self.fitted, self.history, self._seconds(), started)

    def _seconds(self) -> float:
        return self.spent + time.process_time() - self.clock

    def _order(self, epoch: int) -> list[int]:
        order = list(range(len(self.data)))
        random.Random(f"{self.config.seed}-{epoch}").shuffle(order)
        return order

    def _batch(self) -> Batch:
        epoch, at = divmod(self.step, len(self.data))
        return self.data[self._order(epoch)[at]]

    def _take_step(self) -> tuple[float, str]:
        """Take one step; return its loss and the name of the stage."""
        layerwise = self.step < self.config.layer_steps
        if self.optimizer is None or self.step == self.config.layer_steps:
            self.optimizer = self._start_stage(layerwise)
        # seeded by the step, so that a resumed run draws the same dropout
        torch.manual_seed(self.config.seed * 1_000_003 + self.step)
        first = 0 if layerwise else self.config.layer_steps
        steps = self.config.layer_steps if layerwise else self.config.end_steps
        rate = self.config.layer_lr if layerwise else self.config.end_lr
        for group in self.optimizer.param_groups:
            group["lr"] = rate * _schedule(self.step - first, steps)
        self.optimizer.zero_grad(set_to_none=True)
        batch = self._batch()
        value = self._match_layers(batch) if layerwise else self._match_end(batch)
        if value != value or value in (float("inf"), float("-inf")):
            raise RuntimeError(
                f"The loss is {value} at step {self.step}; check the inputs for NaN, or lower "
                f"{'layer_lr' if layerwise else 'end_lr'}, which is {rate}."
            )
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(trained, self.config.clip)
        self.optimizer.step()
        return value, "layers" if layerwise else "end to end"

    def _start_stage(self, layerwise: bool) -> torch.optim.Optimizer:
        inner = {id(p) for n in self.names for p in self.model.get_submodule(n).parameters()}
        everything = self.config.train_all and not layerwise
        trained = []
        for p in self.model.parameters():
            p.requires_grad_(p.is_floating_point() and (everything or id(p) in inner))
            if p.requires_grad:
                trained.append(p)
        self.model.train(not layerwise)
        return torch.optim.AdamW(trained, weight_decay=0.0)

    def _match_layers(self, batch: Batch) -> float:
        """Compute gradients of the mean relative error, one layer at a time; return the error."""
        calls = record_layers(self.teacher, self.names, batch)
        total = 0.0
        for name in self.names:
            call = calls.pop(name)
            keep = real_tokens(batch, call.output)
            output, target = replay_call(self.model, name, call)[keep], call.output[keep]
            error = relative_error(output, target) / len(self.names)
            error.backward()
            total += float(error.detach())
        return total

    def _match_end(self, batch: Batch) -> float:
        """Compute gradients of the end-to-end loss; return the loss."""
        with torch.no_grad():
            target = run_batch(self.teacher, batch)
        output = run_batch(self.model, batch, labels=self.config.objective == "task")
        if self.loss is not None:
            value = self.loss(output, target, batch)
        else:
            value = end_loss(output, target, batch, self.config)
        if ksvd_terms(self.model):
            value = value + self.config.eta * ksvd_loss(self.model)
        value.backward()
        return float(value.detach())

    def _identity(self) -> dict[str, Any]:
        """Return what must agree between the starts of a run."""
        return {"config": asdict(self.config), "names": self.names, "batches": len(self.data)}

    def _save(self) -> None:
        """Write the checkpoint: tensors, and JSON in the header of the same file."""
        if self.path is None or self.optimizer is None:
            return
        tensors = {f"model.{k}": v.detach() for k, v in self._trained_state().items()}
        for index, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{k}": torch.as_tensor(v) for k, v in state.items()}
        content = {
            **self._identity(),
            "step": self.step,
            "seconds": self._seconds(),
            "fitted": self.fitted,
            "history": self.history,
        }
        tensors = {k: v.cpu().contiguous().clone() for k, v in tensors.items()}
        write_atomically(self.path, save_tensors(tensors, {"run": json.dumps(content)}))

    def _trained_state(self) -> dict[str, Tensor]:
        state = self.model.state_dict()
        if self.config.train_all:
            return dict(state)
        inside = tuple(f"{name}." for name in self.names)
        return {key: value for key, value in state.items() if key.startswith(inside)}

    def _restore(self) -> int:
        """Load the checkpoint, if there is one; return its step."""
        if self.path is None or not self.path.exists():
            return 0
        try:
            with safe_open(self.path, "pt") as file:
                saved = json.loads(file.metadata()["run"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ConversionError(f"{self.path} is damaged: {error}; delete it.") from error
        for key, value in json.loads(json.dumps(self._identity())).items():
            if saved[key] != value:
                raise RuntimeError(
                    f"{self.path} belongs to another run: its {key} is {saved[key]}, yours is "
                    f"{value}; choose another folder or delete the file."
                )
        self.step, self.spent = saved["step"], saved["seconds"]
        self.fitted, self.history = saved["fitted"], saved["history"]
        self._load_model({k[6:]: t for k, t in tensors.items() if k.startswith("model.")})
        # the first step of the second stage makes a new optimizer
        if self.step < self.total and self.step != self.config.layer_steps:
            self.optimizer = self._start_stage(self.step < self.config.layer_steps)
            state: dict[int, dict[str, Tensor]] = {}
            for name, tensor in tensors.items():
                if name.startswith("optimizer."):
                    _, index, key = name.split(".", 2)
                    state.setdefault(int(index), {})[key] = tensor
            groups = self.optimizer.state_dict()["param_groups"]
            self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        return self.step

    @torch.no_grad()
    def _load_model(self, saved: Mapping[str, Tensor]) -> None:
        own = self._trained_state()
        if {k: t.shape for k, t in saved.items()} != {k: t.shape for k, t in own.items()}:
            raise ConversionError(
                f"{self.path} belongs to another model: its tensors have other names or shapes; "
                "choose another folder or delete the file."
            )
        for key, tensor in own.items():
            tensor.copy_(saved[key])


def _schedule(step: int, steps: int) -> float:
    """Return the factor of the learning rate: a linear warm-up over a tenth, then down to zero."""
    warm = max(steps // 10, 1)
    if step < warm:
        return (step + 1) / warm
    return max(1 - (step - warm) / max(steps - warm, 1), 0.0)


@contextmanager
def _bar(total: int, done: int, progress: bool) -> Iterator[Callable[[str, float], None]]:
    """Show a progress bar on a terminal; do nothing elsewhere."""
    if progress:
        try:
            from rich.console import Console
            from rich.progress import Progress
        except ImportError as error:
            raise ImportError(
                "The progress bar needs rich; install primal-attention[cli] or pass progress=False."
            ) from error
        console = Console(stderr=True)
        if console.is_terminal:
            with Progress(console=console) as bar:
                task = bar.add_task("distill", total=total, completed=done)

                def advance(stage: str, loss: float) -> None:
                    bar.update(task, advance=1, description=f"{stage}, loss {loss:.4f}")

                yield advance
            return
    yield lambda stage, loss: None
