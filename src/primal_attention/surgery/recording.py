"""What the layers of a model are asked and answer, and how well others answer in their place."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

__all__ = [
    "Batch",
    "Call",
    "Recording",
    "ask_again",
    "ask_layers",
    "differing_layers",
    "evaluating",
    "first_tensor",
    "layer_r2",
    "real_tokens",
    "record_calls",
    "recorded_r2",
    "run_batch",
]

Batch = Mapping[str, Any] | Sequence[Any] | Tensor
"""What a model's forward takes: keyword arguments, positional arguments, or one tensor."""


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
            into[name] = Call(args, plain, first_tensor(output))

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


def first_tensor(output: Any) -> Tensor:
    """Return a module's output, or the first tensor of it."""
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
                keep = real_tokens(batch, call.output)
                answer = ask_again(model, name, call)
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
        run_batch(model, batch)
    missing = [name for name in names if name not in calls]
    if missing:
        raise RuntimeError(
            f"The forward never called {missing[0]!r}; layers skipped at random (layer dropout) "
            "cannot be matched, and batches must be what the model's forward takes."
        )
    return calls


def ask_again(model: nn.Module, name: str, call: Call) -> Tensor:
    """Return what a layer of this model answers to a recorded call."""
    return first_tensor(model.get_submodule(name)(*call.args, **call.kwargs))


def run_batch(model: nn.Module, batch: Batch, *, labels: bool = False) -> Any:
    """Return the model's output on a batch, without a cache, and without labels unless asked."""
    if isinstance(batch, Tensor):
        return model(batch)
    if not isinstance(batch, Mapping):
        return model(*batch)
    given = dict(batch) if labels else {k: v for k, v in batch.items() if k != "labels"}
    if getattr(getattr(model, "config", None), "use_cache", False) is True:
        given.setdefault("use_cache", False)
    return model(**given)


def real_tokens(batch: Batch, output: Tensor) -> Bool[Tensor, "..."]:
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
