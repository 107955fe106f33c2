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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from primal_attention.attention import (
    Attention,
    Core,
    MultiHeadAttention,
    PrimalAttention,
    ksvd_loss,
    ksvd_terms,
)
from primal_attention.attention.multihead import real_first
from primal_attention.output import write_atomically

__all__ = [
    "Call",
    "DistillConfig",
    "Distilled",
    "differing_layers",
    "distill",
    "fit_outputs",
    "fit_recorded",
    "layer_r2",
    "record_calls",
    "recorded_r2",
]

Batch = Mapping[str, Any] | Sequence[Any] | Tensor
"""What a model's forward takes: keyword arguments, positional arguments, or one tensor."""
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


class Call(NamedTuple):
    """One call of a layer: what it was asked and what it answered."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Float[Tensor, "b n c"]


Recording = tuple[Batch, dict[str, Call]]
"""A batch, and what each layer was asked and answered while the original ran on it."""


def differing_layers(model: nn.Module, teacher: nn.Module) -> list[str]:
    """Return the names under which the two models have modules of different classes, outermost.

    Example:
        >>> names = "abc"
        >>> model, teacher = (nn.ModuleDict({n: nn.ReLU() for n in names}) for _ in range(2))
        >>> model["b"] = nn.GELU()
        >>> differing_layers(model, teacher)
        ['b']
    """
    theirs = dict(teacher.named_modules())
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{other}.") for other in found)
        if not inside and name in theirs and type(module) is not type(theirs[name]):
            found.append(name)
    if not found:
        raise ValueError(
            "model and teacher have the same layers everywhere; convert one of two copies first."
        )
    if found == [""]:
        raise ValueError(
            f"model is a {type(model).__name__} and teacher a {type(teacher).__name__}; the "
            "teacher must be a copy of the model made before converting it (copy.deepcopy)."
        )
    return found


@contextmanager
def record_calls(
    model: nn.Module, names: Sequence[str], into: dict[str, Call]
) -> Iterator[dict[str, Call]]:
    """Keep the last call of each named layer while the context lasts.

    A cache among the arguments is left out: what is recorded can be asked again.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        >>> with record_calls(model, ["0"], {}) as calls:
        ...     _ = model(torch.ones(4, 5, 2))
        >>> calls["0"].output.shape
        torch.Size([4, 5, 3])
    """

    def hook(name: str) -> Any:
        def keep(_: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            plain = {k: None if k in _CACHES else v for k, v in kwargs.items()}
            into[name] = Call(args, plain, _first(output))

        return keep

    handles = [
        model.get_submodule(name).register_forward_hook(hook(name), with_kwargs=True)
        for name in names
    ]
    try:
        yield into
    finally:
        for handle in handles:
            handle.remove()


_CACHES = ("past_key_values", "past_key_value", "layer_past")


def _first(output: Any) -> Tensor:
    while not isinstance(output, Tensor):
        output = output[0]
    return output


@torch.no_grad()
def layer_r2(
    model: nn.Module, teacher: nn.Module, data: Sequence[Batch], names: Sequence[str] | None = None
) -> dict[str, float]:
    """Return how much of each original layer's output its replacement explains.

    One minus the squared error over the variance, on the original's inputs and real tokens; zero
    for a layer that answers the mean, one for a perfect copy.

    Args:
        model: The converted model.
        teacher: The original.
        data: Batches, kept apart from those that the model has learned from.
        names: Layers; all converted ones unless given.
    """
    names = differing_layers(model, teacher) if names is None else names
    with evaluating(teacher):
        return recorded_r2(model, ((batch, ask_layers(teacher, names, batch)) for batch in data))


@torch.no_grad()
def recorded_r2(model: nn.Module, recordings: Iterable[Recording]) -> dict[str, float]:
    """Return :func:`layer_r2` from calls of the original that were recorded before."""
    sums: dict[str, _Variance] = {}
    with evaluating(model):
        for batch, calls in recordings:
            for name, call in calls.items():
                keep = _real_tokens(batch, call.output)
                answer = _answer(model, name, call)
                sums.setdefault(name, _Variance()).add(answer[keep], call.output[keep])
    return {name: s.r2 for name, s in sums.items()}


class _Variance:
    """Squared errors and the variance of what was to be explained."""

    def __init__(self) -> None:
        self.error, self.square, self.total, self.count = 0.0, 0.0, torch.zeros(1), 0

    def add(self, guess: Float[Tensor, "t c"], truth: Float[Tensor, "t c"]) -> None:
        guess, truth = guess.double(), truth.double()
        self.error += float((guess - truth).square().sum())
        self.square += float(truth.square().sum())
        self.total = self.total.to(truth.device) + truth.sum(0)
        self.count += len(truth)

    @property
    def r2(self) -> float:
        spread = self.square - float(self.total.square().sum()) / max(self.count, 1)
        return 1 - self.error / max(spread, 1e-12)


def ask_layers(model: nn.Module, names: Sequence[str], batch: Batch) -> dict[str, Call]:
    """Return what the named layers were asked and answered in one forward."""
    with record_calls(model, names, {}) as calls, torch.no_grad():
        _run(model, batch)
    missing = [name for name in names if name not in calls]
    if missing:
        raise RuntimeError(
            f"The forward never called {missing[0]!r}; layers skipped at random (layer dropout) "
            "cannot be matched, and batches must be what the model's forward takes."
        )
    return calls


def _answer(model: nn.Module, name: str, call: Call) -> Tensor:
    return _first(model.get_submodule(name)(*call.args, **call.kwargs))


def _run(model: nn.Module, batch: Batch, *, labels: bool = False) -> Any:
    """Return the model's output on a batch, without a cache, and without labels unless asked."""
    if isinstance(batch, Tensor):
        return model(batch)
    if not isinstance(batch, Mapping):
        return model(*batch)
    given = dict(batch) if labels else {k: v for k, v in batch.items() if k != "labels"}
    if getattr(getattr(model, "config", None), "use_cache", False) is True:
        given.setdefault("use_cache", False)
    return model(**given)


def _real_tokens(batch: Batch, output: Tensor) -> Bool[Tensor, "..."]:
    """Return which tokens of ``output`` count: those the batch's padding mask keeps, or all."""
    if isinstance(batch, Mapping):
        for word in ("attention_mask", "key_mask"):
            mask = batch.get(word)
            if isinstance(mask, Tensor) and mask.shape == output.shape[:-1]:
                return mask.bool()
        mask = batch.get("src_key_padding_mask")
        if isinstance(mask, Tensor) and mask.shape == output.shape[:-1]:
            return ~mask.bool()
    return torch.ones(output.shape[:-1], dtype=torch.bool, device=output.device)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and every module back into its own afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


class _Normal:
    """The normal equations of a linear map, in float64; one for each head where heads differ.

    ``weight`` and ``bias`` are views of the map's parameters, ``[h o k]`` and ``[h o]``. Tokens are
    kept in two folds, so that the ridge can be chosen on tokens that were not fitted.
    """

    def __init__(self, weight: Float[Tensor, "h o k"], bias: Float[Tensor, "h o"] | None) -> None:
        self.weight, self.bias = weight, bias
        h, out, k = weight.shape
        wide = k + (bias is not None)
        self.gram = torch.zeros(2, h, wide, wide, dtype=torch.float64, device=weight.device)
        self.cross = torch.zeros(2, h, wide, out, dtype=torch.float64, device=weight.device)

    def add(self, z: Float[Tensor, "h t k"], missing: Float[Tensor, "h t o"]) -> None:
        z, missing = z.double(), missing.double()
        if self.bias is not None:
            z = torch.cat([z, torch.ones_like(z[..., :1])], dim=-1)
        for fold, (rows, wanted) in enumerate(zip(z.chunk(2, 1), missing.chunk(2, 1), strict=True)):
            self.gram[fold] += rows.mT @ rows
            self.cross[fold] += rows.mT @ wanted

    def solve(self, ridge: float | None) -> None:
        """Add to the map what the equations say is missing, or nothing if that does not help."""
        if ridge is None:
            ridge = min(_RIDGES, key=self._unseen_error)
            if self._unseen_error(ridge) >= 0:
                return
        k = self.weight.shape[-1]
        change = self._change(self.gram.sum(0), self.cross.sum(0), ridge)
        self.weight += change[:, :k].mT.to(self.weight)
        if self.bias is not None:
            self.bias += change[:, k].to(self.bias)

    def _change(self, gram: Tensor, cross: Tensor, ridge: float) -> Float[Tensor, "h k o"]:
        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        mean = diagonal[:, : self.weight.shape[-1]].mean(-1, keepdim=True).clamp_min(1e-12)
        shifted = gram + torch.diag_embed((ridge * mean).expand_as(diagonal))
        factor, info = torch.linalg.cholesky_ex(shifted)
        # features that are all alike leave a matrix without a factor: that head stays as it was
        solved = torch.cholesky_solve(cross, factor)
        return torch.where((info == 0)[:, None, None], solved, 0.0)

    def _unseen_error(self, ridge: float) -> float:
        """Return by how much the squared error changes on each fold after a fit on the other."""
        total = 0.0
        for mine, other in ((0, 1), (1, 0)):
            change = self._change(self.gram[mine], self.cross[mine], ridge)
            quadratic = (change * (self.gram[other] @ change)).sum()
            total += float(quadratic - 2 * (change * self.cross[other]).sum())
        return total


_RIDGES = (1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0)
"""Strengths to choose from, relative to the mean square of the features."""


@torch.no_grad()
def fit_outputs(
    model: nn.Module,
    teacher: nn.Module,
    data: Sequence[Batch],
    *,
    names: Sequence[str] | None = None,
    ridge: float | None = None,
) -> list[str]:
    """Refit the last linear map of each converted layer to the original's answers, closed form.

    That is the output map; where the host model keeps it in another module (BERT), the value map of
    each head, or the map of a primal layer from scores to heads. Layers with none of these are left
    as they are.

    Args:
        model: The converted model; changed in place.
        teacher: The original.
        data: A few batches; as many tokens as the model is wide, times ten, is plenty.
        names: Layers; all converted ones unless given.
        ridge: Pull towards the present weights, relative to the mean square of the features;
            unless given, what does best on one half of the tokens after a fit on the other.

    Returns:
        The names of the layers that were refit.
    """
    names = differing_layers(model, teacher) if names is None else names
    with evaluating(teacher):
        calls = ((batch, ask_layers(teacher, names, batch)) for batch in data)
        return fit_recorded(model, calls, ridge=ridge)


@torch.no_grad()
def fit_recorded(
    model: nn.Module, recordings: Iterable[Recording], *, ridge: float | None = None
) -> list[str]:
    """Do what :func:`fit_outputs` does, from calls of the original that were recorded before."""
    systems: dict[str, _Normal | None] = {}
    with evaluating(model):
        for batch, calls in recordings:
            for name, call in calls.items():
                if name in systems and systems[name] is None:
                    continue
                systems[name] = _collect(model, name, call, batch, systems.get(name))
    for system in systems.values():
        if system is not None:
            system.solve(ridge)
    return [name for name, system in systems.items() if system is not None]


def _collect(
    model: nn.Module, name: str, call: Call, batch: Batch, system: _Normal | None
) -> _Normal | None:
    """Add one batch to the equations of a layer; ``None`` if there is no linear map to refit."""
    layer = model.get_submodule(name)
    seen: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any], Any]] = {}

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        seen[module] = args, kwargs, out

    watched = nn.Linear | Core | Attention
    handles = [
        m.register_forward_hook(keep, with_kwargs=True)
        for m in layer.modules()
        if isinstance(m, watched)
    ]
    try:
        answer = _answer(model, name, call)
    finally:
        for handle in handles:
            handle.remove()
    real, missing = _real_tokens(batch, answer), call.output - answer
    for module, (args, _, out) in seen.items():
        if (
            isinstance(module, nn.Linear)
            and out.shape == answer.shape
            and torch.equal(out[real], answer[real])
        ):
            bias = None if module.bias is None else module.bias.data[None]
            system = system or _Normal(module.weight.data[None], bias)
            system.add(args[0][real][None], missing[real][None])
            return system
    for module, (_, kwargs, _) in seen.items():
        if isinstance(module, Attention) and isinstance(module.out_proj, nn.Identity):
            return _collect_inside(module, seen, kwargs.get("key_mask"), real, missing, system)
    return None


def _collect_inside(
    layer: Any,
    seen: Mapping[nn.Module, Any],
    key_mask: Tensor | None,
    real: Tensor,
    missing: Tensor,
    system: _Normal | None,
) -> _Normal | None:
    """Add one batch to the equations of a layer whose host model keeps the output map."""
    heads = layer.num_heads

    def rows(x: Tensor) -> Tensor:
        return x.transpose(0, 1)[:, real]  # [h t k]

    if isinstance(layer, PrimalAttention):
        if layer.concat not in seen:
            return None
        # one map for all heads: their rows are equations of one system
        z, y = rows(seen[layer.concat][0][0]), rows(_heads(missing, heads))
        bias = None if layer.concat.bias is None else layer.concat.bias.data[None]
        system = system or _Normal(layer.concat.weight.data[None], bias)
        system.add(z.flatten(0, 1)[None], y.flatten(0, 1)[None])
        return system
    if not isinstance(layer, MultiHeadAttention) or getattr(layer.core, "post", "") == "power":
        return None
    # heads are linear in their values, so in the map that makes them: average tokens, then map
    (q, k, _), kwargs, _ = seen[layer.core]
    x = seen[layer.v_proj][0][0]
    z = layer.core(q, k, x[:, None].expand(-1, heads, -1, -1), **kwargs)
    if layer.core.ordered and key_mask is not None:
        back = real_first(key_mask).argsort(1)[:, None, :, None]
        z = z.gather(2, back.expand_as(z))
    bias = layer.v_proj.bias
    system = system or _Normal(
        layer.v_proj.weight.data.unflatten(0, (heads, -1)),
        None if bias is None else bias.data.unflatten(0, (heads, -1)),
    )
    system.add(rows(z), rows(_heads(missing, heads)))
    return system


def _heads(x: Float[Tensor, "b n c"], heads: int) -> Float[Tensor, "b h n d"]:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


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
            keep = _real_tokens(batch, call.output)
            answer, truth = _answer(self.model, name, call)[keep], call.output[keep]
            error = _relative_error(answer, truth) / len(self.names)
            error.backward()
            total += float(error.detach())
        return total

    def _match_end(self, batch: Batch) -> float:
        with torch.no_grad():
            truth = _run(self.teacher, batch)
        answer = _run(self.model, batch, labels=self.config.objective == "task")
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
        keep = _real_tokens(batch, logits)
        t = config.temperature
        student, wanted = (x[keep].float().div(t).log_softmax(-1) for x in (mine, logits))
        return nn.functional.kl_div(student, wanted, log_target=True, reduction="batchmean") * t * t
    hidden, target = _hidden(answer), _hidden(truth)
    keep = _real_tokens(batch, target)
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
    return _first(output)


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
