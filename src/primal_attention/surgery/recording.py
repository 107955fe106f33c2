"""Record the inputs and outputs of a model's layers, and compare other layers on them."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from primal_attention.hosts import (
    Batch,
    ConversionError,
    ModuleCall,
    batch_arguments,
    record_run,
    run_batch,
)
from primal_attention.hosts.inputs import model_arguments
from primal_attention.hosts.recording import first_tensor
from primal_attention.training.evaluation import eval_mode

__all__ = [
    "Recording",
    "Variance",
    "differing_layers",
    "layer_r2",
    "output_r2",
    "real_tokens",
    "record_layers",
    "recorded_r2",
    "replay_call",
]


Recording = tuple[Batch, dict[str, ModuleCall]]
"""A batch, and the calls of the original's layers on it."""


def differing_layers(model: nn.Module, teacher: nn.Module) -> list[str]:
    """Return the names of the outermost modules whose classes differ between two models.

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


@torch.no_grad()
def layer_r2(
    model: nn.Module, teacher: nn.Module, data: Sequence[Batch], names: Sequence[str] | None = None
) -> dict[str, float]:
    """Return the explained variance (R²) of each original layer's output by its replacement.

    Both layers get the inputs of the original. R² is one minus the squared error over the variance,
    on real tokens: 1 for a perfect copy, 0 for a layer that returns the mean output.

    Args:
        model: The converted model.
        teacher: The original.
        data: Batches that the model was not trained on.
        names: Layers; all converted ones unless given.
    """
    names = differing_layers(model, teacher) if names is None else names
    return recorded_r2(model, ((batch, record_layers(teacher, names, batch)) for batch in data))


@torch.no_grad()
def recorded_r2(model: nn.Module, recordings: Iterable[Recording]) -> dict[str, float]:
    """Do :func:`layer_r2` with recorded calls of the original."""
    sums: dict[str, Variance] = {}
    with eval_mode(model):
        for batch, calls in recordings:
            for name, call in calls.items():
                keep = real_tokens(batch, call.output)
                answer = replay_call(model, name, call)
                sums.setdefault(name, Variance()).add(answer[keep], call.output[keep])
    return {name: s.r2 for name, s in sums.items()}


@torch.no_grad()
def output_r2(model: nn.Module, teacher: nn.Module, data: Sequence[Batch]) -> float:
    """Return the explained variance (R²) of the original model's output by the converted model's.

    Args:
        model: The converted model.
        teacher: The original.
        data: Batches that the model was not trained on.
    """
    sums = Variance()
    with eval_mode(model), eval_mode(teacher):
        for batch in data:
            mine, theirs = (first_tensor(run_batch(m, batch)) for m in (model, teacher))
            keep = real_tokens(batch, theirs)
            sums.add(mine[keep].flatten(1), theirs[keep].flatten(1))
    return sums.r2


class Variance:
    """Sums for the explained variance (R²), added batch by batch."""

    def __init__(self) -> None:
        self.error, self.square, self.total, self.count = 0.0, 0.0, torch.zeros(1), 0

    def add(self, guess: Float[Tensor, "t c"], truth: Float[Tensor, "t c"]) -> None:
        """Add outputs of a copy and of the original."""
        guess, truth = guess.double(), truth.double()
        # NaN in a copy is a bad copy; NaN in the original leaves nothing to compare with
        if not bool(truth.isfinite().all()):
            raise ConversionError(
                "The original's output holds NaN or infinity, so R² cannot be measured. Its "
                "weights or the data are damaged; load the model again, or give finite data."
            )
        self.error += float((guess - truth).square().sum())
        self.square += float(truth.square().sum())
        self.total = self.total.to(truth.device) + truth.sum(0)
        self.count += len(truth)

    @property
    def r2(self) -> float:
        """Return one minus the squared error over the variance."""
        spread = self.square - float(self.total.square().sum()) / max(self.count, 1)
        return 1 - self.error / max(spread, 1e-12)


def record_layers(model: nn.Module, names: Sequence[str], batch: Batch) -> dict[str, ModuleCall]:
    """Return the calls of the named layers in one forward pass in evaluation mode."""
    args, kwargs = batch_arguments(model_arguments(model, batch))
    calls = record_run(model, names, *args, **kwargs)
    missing = [name for name in names if name not in calls]
    if missing:
        raise RuntimeError(
            f"The forward pass did not call {missing[0]!r}; switch layer dropout off, and pass "
            "batches that the model's forward takes."
        )
    return calls


def replay_call(model: nn.Module, name: str, call: ModuleCall) -> Tensor:
    """Return the output of a layer of this model on the arguments of a recorded call."""
    return first_tensor(model.get_submodule(name)(*call.args, **call.kwargs))


def real_tokens(batch: Batch, output: Tensor) -> Bool[Tensor, "..."]:
    """Return which tokens of ``output`` are real by the batch's padding mask; all without one."""
    if isinstance(batch, Mapping):
        for word in ("attention_mask", "key_mask"):
            mask = batch.get(word)
            if isinstance(mask, Tensor) and mask.shape == output.shape[:-1]:
                return mask.bool()
        mask = batch.get("src_key_padding_mask")
        if isinstance(mask, Tensor) and mask.shape == output.shape[:-1]:
            return ~mask.bool()
    return torch.ones(output.shape[:-1], dtype=torch.bool, device=output.device)
