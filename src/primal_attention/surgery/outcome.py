"""Convert a model on measurements, and compare the result with the original."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from primal_attention.hosts import run_batch
from primal_attention.surgery.advice import Advice
from primal_attention.surgery.config import SurgeryConfig
from primal_attention.surgery.conversion import convert
from primal_attention.surgery.fitting import fit_outputs
from primal_attention.surgery.recording import layer_r2, output_r2
from primal_attention.training.cost import Cost, compare_costs

__all__ = ["ConvertedModel", "convert_and_compare"]


@dataclass(frozen=True)
class ConvertedModel:
    """Quality and cost of a converted model, measured on held-out inputs."""

    model: str
    """Class of the model."""
    attention: str
    layers: dict[str, float]
    """R² of the converted layers."""
    all_layers: int
    output_r2: float
    """R² of the output of the whole model."""
    length: int
    costs: dict[str, Cost]
    """Of the whole model at ``length`` tokens; of one layer if the model takes fewer."""
    whole: bool
    """Whether ``costs`` are of the whole model."""
    data_length: int

    def verdict(self) -> str:
        """Return in words what was converted, how good the copy is, and what it saves."""
        before, after = self.costs["original"], self.costs["converted"]
        low, high = min(self.layers.values()), max(self.layers.values())
        r2 = f"{low:.2f}" if low == high else f"{low:.2f} to {high:.2f}"
        caution = (
            f" R² was measured on inputs of at most {self.data_length:,} tokens: it can be lower "
            "on longer ones."
            if self.data_length < self.length
            else ""
        )
        return (
            f"Converted {len(self.layers)} of {self.all_layers} layers of {self.model} to "
            f"{self.attention}. On held-out inputs R² is {r2} for the output of the layers and "
            f"{self.output_r2:.2f} for the output of the model. At {self.length:,} tokens "
            f"{'the model' if self.whole else 'a layer'} takes {after.milliseconds:.1f} ms instead "
            f"of {before.milliseconds:.1f} ({_change(before.milliseconds, after.milliseconds)}) "
            f"and {after.megabytes:.1f} MB instead of {before.megabytes:.1f} "
            f"({_change(before.megabytes, after.megabytes)}).{caution}"
        )

    @property
    def numbers(self) -> dict[str, object]:
        """Everything measured, as plain values."""
        return {
            "model": self.model,
            "attention": self.attention,
            "length": self.length,
            "layer_r2": self.layers,
            "output_r2": self.output_r2,
            "costs_of": "model" if self.whole else "layer",
            "costs": {name: cost._asdict() for name, cost in self.costs.items()},
        }


def convert_and_compare(
    model: nn.Module,
    batches: Sequence[Mapping[str, Tensor]],
    advice: Advice,
    config: SurgeryConfig,
    *,
    distill_steps: int = 0,
    report: Callable[[str], None] = lambda _: None,
) -> ConvertedModel:
    """Convert a model in place and return how close it stays and what it saves.

    The new layers are fitted or trained on the first half of the inputs and compared with the
    original on the second half. Time and memory are those of the whole model at the length of the
    advice, or of one layer if the model takes fewer tokens.

    Args:
        model: The model to convert.
        batches: At least two batches of its inputs.
        advice: Measurements of :func:`~primal_attention.surgery.advise` on the same inputs.
        config: The conversion, such as ``advice.config()``.
        distill_steps: Training steps layer by layer, then half as many end to end; with 0 the new
            layers are fitted in closed form.
        report: Called with a line before each part.
    """
    teacher = copy.deepcopy(model)
    report(f"converting to {config.attention}")
    convert(model, config)
    half = list(batches[: len(batches) // 2])
    if distill_steps:
        # imports the training loop, which needs an extra
        from primal_attention.surgery.distillation import DistillConfig, distill

        steps = DistillConfig(layer_steps=distill_steps, end_steps=distill_steps // 2)
        distill(model, teacher, half, steps)
    else:
        fit_outputs(model, teacher, half)
    report("comparing with the original")
    tests = list(batches[len(batches) // 2 :])
    one = _one_input(model, tests[0], advice.length)
    if one is not None:
        runs = {"original": partial(run_batch, teacher, one)}
        costs = compare_costs({**runs, "converted": partial(run_batch, model, one)})
    else:
        layer = {c.attention: Cost(c.milliseconds, c.megabytes) for c in advice.costs}
        costs = {"original": layer["softmax"], "converted": layer[config.attention]}
    return ConvertedModel(
        model=type(model).__name__,
        attention=config.attention,
        layers=layer_r2(model, teacher, tests),
        all_layers=len(dict.fromkeys(fit.layer for fit in advice.fits)),
        output_r2=output_r2(model, teacher, tests),
        length=advice.length,
        costs=costs,
        whole=one is not None,
        data_length=advice.data_length,
    )


def _one_input(
    model: nn.Module, batch: Mapping[str, Tensor], length: int
) -> dict[str, Tensor] | None:
    """Return one sequence of ``length`` tokens made from a batch; ``None`` if that is impossible.

    It is impossible if the model takes no tokens, or not so many.
    """
    ids = batch.get("input_ids")
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if ids is None or ids.dim() != 2 or (isinstance(limit, int) and limit < length):
        return None
    return {"input_ids": ids[:1].repeat(1, -(-length // ids.shape[1]))[:, :length]}


def _change(before: float, after: float) -> str:
    share = round(after / max(before, 1e-9) - 1, 2)
    if not share:
        return "the same"
    return f"{abs(share):.0%} {'less' if share < 0 else 'more'}"
