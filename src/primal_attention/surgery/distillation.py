"""Recovery: teach a converted model what its layers did before.

Three stages, each a separate switch of the config:

1. closed form: the last linear map of every converted layer is refit by ridge regression on what
   the original layer answered, shrunk towards the weights that conversion copied;
2. layer by layer: each converted layer gets the inputs of the original one and learns its outputs,
   all layers at once, with no gradient between them;
3. end to end: the model as a whole learns the original's predictions (or embeddings, or the task),
   with the KSVD term of its primal layers.

No labels are needed. A run can be killed at any time; started again with the same ``folder`` it
ends with the same weights.
"""

import io
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from primal_attention.attention import ksvd_loss, ksvd_terms
from primal_attention.output import write_atomically
from primal_attention.surgery.fitting import fit_outputs
from primal_attention.surgery.recording import (
    Batch,
    ask_again,
    ask_layers,
    differing_layers,
    evaluating,
    first_tensor,
    real_tokens,
    run_batch,
)

__all__ = ["DistillConfig", "Distilled", "distill"]

Objective = Literal["auto", "logits", "hidden", "task"]
Loss = Callable[[Any, Any, Batch], Tensor]


@dataclass(frozen=True)
class DistillConfig:
    """How long and how a converted model learns from the original."""

    closed_form: bool = True
    """Start by refitting output maps by ridge regression."""
    fit_batches: int = 16
    """Batches for the closed form."""
    ridge: float | None = None
    """Strength of the regression's pull towards the copied weights, relative to the features;
    chosen on tokens that were not fitted unless given."""
    layer_steps: int = 200
    """Steps of layer-by-layer matching."""
    layer_lr: float = 1e-3
    """Its highest learning rate."""
    end_steps: int = 200
    """Steps of end-to-end matching."""
    end_lr: float = 3e-4
    """Its highest learning rate."""
    objective: Objective = "auto"
    """``"logits"`` (divergence of predictions), ``"hidden"`` (embeddings of the last layer),
    ``"task"`` (the model's own loss on labels), or ``"auto"``: logits where there are any."""
    temperature: float = 1.0
    """Of the predictions that are compared."""
    eta: float = 0.01
    """Weight of the KSVD term, for layers that have one."""
    train_all: bool = False
    """End to end, train every parameter instead of those of the converted layers."""
    clip: float = 1.0
    """Largest norm of a gradient."""
    seed: int = 0
    """Of the order of batches and of dropout."""
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
class Distilled:
    """What a run did."""

    layers: list[str]
    """The converted layers."""
    fitted: list[str]
    """Those whose output map was refit in closed form."""
    history: list[dict[str, float | str]]
    """Stage, step and loss of every step."""
    seconds: float
    """Processor time of this process, of all runs that led here together."""
    resumed_at: int = field(default=0)
    """Step at which this run took over from an earlier one."""


def distill(
    model: nn.Module,
    teacher: nn.Module,
    data: Sequence[Batch],
    config: DistillConfig | None = None,
    *,
    folder: Path | str | None = None,
    loss: Loss | None = None,
    progress: bool = True,
) -> Distilled:
    """Teach a converted model its original's layers, then its predictions.

    Args:
        model: The converted model; trained in place and left in evaluation mode.
        teacher: A copy made before conversion, in evaluation mode; not changed.
        data: Batches by index: mappings of keyword arguments, tuples of positional ones, or
            tensors. Labels are used by ``objective="task"`` alone.
        config: Steps, rates and objective.
        folder: Where to keep a checkpoint; an interrupted run is taken up from there.
        loss: Replaces the end-to-end objective: ``(student output, teacher output, batch)`` to a
            number.
        progress: Show a progress bar (needs the extra ``cli``) on a terminal.

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
        raise ValueError("data holds no batch; give at least one.")
    run = _Run(model, teacher, data, config, None if folder is None else Path(folder), loss)
    return run.go(progress)


class _Run:
    """The state of a distillation between two steps."""

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
        self.path = None if folder is None else folder / "distill.pt"
        self.loss = loss
        self.step, self.spent = 0, 0.0
        self.fitted: list[str] = []
        self.history: list[dict[str, float | str]] = []
        self.optimizer: torch.optim.Optimizer | None = None

    @property
    def total(self) -> int:
        return self.config.layer_steps + self.config.end_steps

    def go(self, progress: bool) -> Distilled:
        started, self.clock = self._restore(), time.process_time()
        wanted = [p.requires_grad for p in self.model.parameters()]
        teacher_wanted = [p.requires_grad for p in self.teacher.parameters()]
        self.teacher.requires_grad_(False)
        try:
            with evaluating(self.teacher), _bar(self.total, self.step, progress) as advance:
                if self.step == 0 and started == 0 and self.config.closed_form:
                    fit = [self.data[i] for i in self._order(0)[: self.config.fit_batches]]
                    self.fitted = fit_outputs(
                        self.model, self.teacher, fit, names=self.names, ridge=self.config.ridge
                    )
                while self.step < self.total:
                    value, stage = self._one()
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
        return Distilled(self.names, self.fitted, self.history, self._seconds(), started)

    def _seconds(self) -> float:
        return self.spent + time.process_time() - self.clock

    def _order(self, epoch: int) -> list[int]:
        order = list(range(len(self.data)))
        random.Random(f"{self.config.seed}-{epoch}").shuffle(order)
        return order

    def _batch(self) -> Batch:
        epoch, at = divmod(self.step, len(self.data))
        return self.data[self._order(epoch)[at]]

    def _one(self) -> tuple[float, str]:
        """Take one step; return its loss and the name of the stage."""
        layerwise = self.step < self.config.layer_steps
        if self.optimizer is None or self.step == self.config.layer_steps:
            self.optimizer = self._start_stage(layerwise)
        # dropout of a step depends on the step alone, whatever ran before
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
                f"The loss is {value} at step {self.step}; lower the learning rate "
                f"({'layer_lr' if layerwise else 'end_lr'}={rate}) and start from the checkpoint."
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
        """Back-propagate the mean relative error of all layers, one layer at a time."""
        calls = ask_layers(self.teacher, self.names, batch)
        total = 0.0
        for name in self.names:
            call = calls.pop(name)
            keep = real_tokens(batch, call.output)
            answer, truth = ask_again(self.model, name, call)[keep], call.output[keep]
            error = _relative_error(answer, truth) / len(self.names)
            error.backward()
            total += float(error.detach())
        return total

    def _match_end(self, batch: Batch) -> float:
        with torch.no_grad():
            truth = run_batch(self.teacher, batch)
        answer = run_batch(self.model, batch, labels=self.config.objective == "task")
        if self.loss is not None:
            value = self.loss(answer, truth, batch)
        else:
            value = _end_loss(answer, truth, batch, self.config)
        if ksvd_terms(self.model):
            value = value + self.config.eta * ksvd_loss(self.model)
        value.backward()
        return float(value.detach())

    # checkpoints

    def _save(self) -> None:
        if self.path is None or self.optimizer is None:
            return
        content = {
            "config": asdict(self.config),
            "names": self.names,
            "batches": len(self.data),
            "step": self.step,
            "seconds": self._seconds(),
            "fitted": self.fitted,
            "history": self.history,
            "model": self._trained_state(),
            "optimizer": self.optimizer.state_dict(),
        }
        buffer = io.BytesIO()
        torch.save(content, buffer)
        write_atomically(self.path, buffer.getvalue())

    def _trained_state(self) -> dict[str, Tensor]:
        state = self.model.state_dict()
        if self.config.train_all:
            return dict(state)
        inside = tuple(f"{name}." for name in self.names)
        return {key: value for key, value in state.items() if key.startswith(inside)}

    def _restore(self) -> int:
        """Take up an earlier run; return the step it had reached."""
        if self.path is None or not self.path.exists():
            return 0
        saved = torch.load(self.path, weights_only=True)
        mine = {"config": asdict(self.config), "names": self.names, "batches": len(self.data)}
        for key, value in mine.items():
            if saved[key] != value:
                raise RuntimeError(
                    f"{self.path} belongs to another run: its {key} is {saved[key]}, yours is "
                    f"{value}; choose another folder or delete it."
                )
        self.step, self.spent = saved["step"], saved["seconds"]
        self.fitted, self.history = saved["fitted"], saved["history"]
        self.model.load_state_dict(saved["model"], strict=False)
        if self.step < self.total:
            # the step that opens the second stage makes an optimizer of its own
            layerwise = self.step < self.config.layer_steps or self.config.end_steps == 0
            if self.step != self.config.layer_steps:
                self.optimizer = self._start_stage(layerwise)
                self.optimizer.load_state_dict(saved["optimizer"])
        return self.step


def _schedule(step: int, steps: int) -> float:
    """Return the share of the highest rate: up for a tenth of the way, then down to zero."""
    warm = max(steps // 10, 1)
    if step < warm:
        return (step + 1) / warm
    return max(1 - (step - warm) / max(steps - warm, 1), 0.0)


def _relative_error(answer: Float[Tensor, "t c"], truth: Float[Tensor, "t c"]) -> Float[Tensor, ""]:
    """Return ``1 − R²`` on the tokens of one batch."""
    answer, truth = answer.float(), truth.float()
    spread = (truth - truth.mean(0)).square().sum().clamp_min(1e-12)
    return (answer - truth).square().sum() / spread


def _end_loss(answer: Any, truth: Any, batch: Batch, config: DistillConfig) -> Tensor:
    if config.objective == "task":
        own = _part(answer, "loss")
        if own is None:
            raise ValueError(
                "objective='task' needs a model that returns its loss; put 'labels' into the "
                "batches, or pass loss=."
            )
        return own
    logits = _part(truth, "logits")
    if config.objective == "logits" and logits is None:
        raise ValueError(
            "objective='logits' needs a model that returns logits; use 'hidden', or pass loss=."
        )
    if config.objective != "hidden" and logits is not None:
        mine = _part(answer, "logits")
        keep = real_tokens(batch, logits)
        t = config.temperature
        student, wanted = (x[keep].float().div(t).log_softmax(-1) for x in (mine, logits))
        return nn.functional.kl_div(student, wanted, log_target=True, reduction="batchmean") * t * t
    hidden, target = _hidden(answer), _hidden(truth)
    keep = real_tokens(batch, target)
    return _relative_error(hidden[keep], target[keep])


def _part(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def _hidden(output: Any) -> Tensor:
    hidden = _part(output, "last_hidden_state")
    if hidden is not None:
        return hidden
    if isinstance(output, Mapping):
        raise ValueError(
            f"objective='hidden' needs a model that returns last_hidden_state, got "
            f"{', '.join(output)}; use 'logits', or pass loss=."
        )
    return first_tensor(output)


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
