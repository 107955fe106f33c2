"""Convert a model, and compare it with the original at the length that matters.

Inputs are split in order: some fit the new layers, if these have something to fit; some choose the
layers, if they are chosen; the others test the result. Nothing is chosen by what tests.
"""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from primal_attention.attention import AdaptiveAttention
from primal_attention.attention.windowed import LearnedFar
from primal_attention.hosts import (
    Batch,
    ConversionError,
    ConvertedLayer,
    converted_layers,
    record_calls,
    run_batch,
)
from primal_attention.hosts.inputs import LayerInputs, batch_arguments
from primal_attention.support.randomness import isolated
from primal_attention.surgery.config import KEEPS_WEIGHTS, SurgeryConfig, conversion_defaults
from primal_attention.surgery.conversion import (
    Conversion,
    apply_conversion,
    convert,
    prepare_conversion,
    revert,
)
from primal_attention.surgery.fidelity import Fidelity, Original, longest_input
from primal_attention.surgery.fitting import fit_outputs
from primal_attention.surgery.hybrid import linear_part_off, linear_parts, start_at_clusters
from primal_attention.surgery.outcome import ConvertedModel, CurvePoint, ExtensionLoss
from primal_attention.surgery.positions import ExtendedPositions, extend_positions, position_limit
from primal_attention.surgery.recording import layer_r2, record_layers, replay_call
from primal_attention.surgery.targets import inspect_targets
from primal_attention.training.cost import Cost, compare_costs
from primal_attention.training.evaluation import eval_mode

__all__ = ["convert_and_compare", "default_length", "least_batches"]

_LONGEST = 2048
"""Largest number of tokens to measure at, unless the user asks for more."""
_RANK = 8
"""Rank of the changes of projections beside learned features."""
_POINTS = 6
"""Points of the curve of loss against time saved."""
_ENOUGH = 2048
"""Tokens on which the curve is measured."""


def default_length(model: nn.Module, batches: Sequence[Batch] = ()) -> int:
    """Return the length to measure at: the longest that the model takes, at most 2048.

    Args:
        model: The model.
        batches: Its inputs; their longest counts if nothing limits the model.
    """
    return min(position_limit(model) or longest_input(batches) or _LONGEST, _LONGEST)


def least_batches(attention: str, *, distill: bool = False) -> int:
    """Return how many batches a conversion wants: to fit, to choose layers, and to test."""
    return 2 if attention in KEEPS_WEIGHTS and not distill else 4


class _Parts(NamedTuple):
    """Batches by what they are for."""

    fit: list[Batch]
    choose: list[Batch]
    test: list[Batch]

    @classmethod
    def split(cls, batches: Sequence[Batch], *, fits: bool) -> Self:
        half = len(batches) // 2
        first, second = list(batches[:half]), list(batches[half:])
        if not fits:
            return cls([], first, second)
        if len(second) == 1:
            # nothing may be chosen by the last one
            return cls(first, first, second)
        quarter = len(second) // 2
        return cls(first, second[:quarter], second[quarter:])


def convert_and_compare(
    model: nn.Module,
    batches: Sequence[Batch],
    config: SurgeryConfig | None = None,
    *,
    length: int | None = None,
    threshold: float = 0.9,
    distill_steps: int = 0,
    extension: ExtendedPositions | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> ConvertedModel:
    """Convert a model in place and return how close it stays and what it saves.

    With ``layers="auto"`` layers are added one by one, those with the least loss for the time that
    they save first, while R² of the model's output is at least ``threshold``.

    Args:
        model: The model to convert.
        batches: At least two batches of its inputs, as long as the inputs to come. With three, a
            mechanism that is fitted chooses layers on other inputs than it was fitted on.
        config: The conversion; by default all layers into ``adaptive``.
        length: Tokens at which time and memory are measured; by default the longest that the
            model takes, at most 2048. If it takes fewer, the costs are those of one layer.
        threshold: Least R² of the output for ``layers="auto"``.
        distill_steps: Training steps layer by layer, then half as many end to end; with 0 the new
            layers are fitted in closed form, if they have something to fit.
        extension: What ``extend_positions`` returned for the model, to measure what that lost.
        report: Called with a line before each part.

    Raises:
        ConversionError: If R² of a layer or of the output is below 0 on inputs that nothing was
            fitted on. The model is not changed then.
    """
    config = SurgeryConfig() if config is None else config
    if len(batches) < 2:
        raise ValueError(
            f"convert_and_compare needs at least two batches, got {len(batches)}; one of them "
            "tests the result."
        )
    is_auto = config.layers == "auto"
    if is_auto:
        config = replace(config, layers=_convertible(model, config))
    fits = distill_steps > 0 or config.attention not in KEEPS_WEIGHTS
    parts = _Parts.split(batches, fits=fits)
    report(f"converting to {config.attention}")
    student = _Student(model, config)
    names, causal = student.names, student.is_causal
    if fits:
        report("fitting the new layers")
        _fit(student.model, model, parts.fit, distill_steps)
    length = default_length(model, batches) if length is None else length
    one = _one_input(model, parts.test[0], length)
    report("measuring time and memory of the model")
    costs = compare_costs(_whole_runs(model, student.model, one))
    gains = _gains(model, student.model, one)
    report("comparing the layers with the original")
    choice = layer_r2(student.model, model, parts.choose, names)
    order = sorted(names, key=lambda name: (1 - choice[name]) / max(gains[name], 1e-3))
    curve = _Curve(
        student,
        order,
        Original(model, _few(parts.choose), is_causal=causal),
        [gains[name] / max(costs["original"].milliseconds, 1e-9) for name in order],
        report,
    )
    if is_auto:
        good = [name for name in order if choice[name] >= 0]
        chosen = curve.largest(order.index(good[-1]) + 1 if good else 0, threshold)
        names = [name for name in names if name in order[:chosen] and name in good]
        if not names:
            raise ConversionError(_nothing_good(config.attention, order, choice, curve, threshold))
    curve.fill()
    if len(names) < len(student.names):
        student.keep(names)
        costs = compare_costs(_whole_runs(model, student.model, one))
    report("comparing the model with the original")
    layers = layer_r2(student.model, model, parts.test, names)
    original = Original(model, parts.test, is_causal=causal)
    fidelity = original.compare(student.model)
    _refuse_useless(config.attention, layers, fidelity)
    neglected = _neglected(student.model, parts.test[0])
    off = None
    if linear_parts(student.model):
        with linear_part_off(student.model):
            off = original.compare(student.model)
    size = longest_input([one])
    whole = not size or size >= length
    if not whole:
        costs = _layer_costs(model, student.model, one, length)
    found = ConvertedModel(
        model=type(model).__name__,
        attention=config.attention,
        options={**conversion_defaults(config.attention), **config.options},
        layers=layers,
        all_layers=len(inspect_targets(model, config)),
        fidelity=fidelity,
        length=length if size else longest_input([one]),
        data_length=longest_input(parts.test),
        inputs=sum(_sequences(batch) for batch in parts.test),
        costs=costs,
        whole=whole,
        limit=position_limit(model),
        reach=None if fits else _reach(student.model),
        curve=tuple(curve.points()),
        threshold=threshold if is_auto else None,
        neglected=neglected,
        linear_off=off,
        extension=_extension_loss(model, extension, parts, original, causal),
    )
    _put_in(model, replace(config, layers=names), student.layers)
    return found


class _Student:
    """A copy of a model with some layers converted; which ones may change."""

    def __init__(self, model: nn.Module, config: SurgeryConfig) -> None:
        self.model, self.config = copy.deepcopy(model).eval(), config
        self._conversion = convert(self.model, config)
        self.layers = converted_layers(self.model)

    @property
    def names(self) -> list[str]:
        """Names of all layers that were converted at first."""
        return list(self.layers)

    @property
    def is_causal(self) -> bool:
        """Whether tokens see earlier ones only."""
        return any(layer.is_causal for layer in self.layers.values())

    def keep(self, names: Sequence[str]) -> None:
        """Convert these layers only; they keep what they learned."""
        revert(self.model, self._conversion)
        config = replace(self.config, layers=list(names))
        self._conversion = _put_in(self.model, config, self.layers)


class _Curve:
    """Loss of the output with the first layers of an order converted, against time saved.

    Args:
        student: The copy with the new layers.
        order: Its layers, those to convert first at the front.
        original: Answers of the original to compare with.
        saved: Share of the model's time that each layer saves.
        report: Called with a line before each point.
    """

    def __init__(
        self,
        student: _Student,
        order: Sequence[str],
        original: Original,
        saved: Sequence[float],
        report: Callable[[str], None],
    ) -> None:
        self._student, self._order, self._original = student, list(order), original
        self._saved, self._report = list(saved), report
        self._r2: dict[int, float] = {0: 1.0}

    def r2(self, layers: int) -> float:
        """Return R² of the output with so many layers converted."""
        if layers not in self._r2:
            self._report(f"measuring the loss of {layers} of {len(self._order)} layers")
            self._student.keep(self._order[:layers])
            self._r2[layers] = self._original.compare(self._student.model).r2
        return self._r2[layers]

    def largest(self, most: int, threshold: float) -> int:
        """Return how many layers can be converted with at least this R²."""
        if self.r2(most) >= threshold:
            return most
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.r2(middle) >= threshold else (low, middle)
        return low

    def fill(self) -> None:
        """Measure some points, the last one included; all layers are converted after it."""
        count = len(self._order)
        for i in range(1, _POINTS + 1):
            self.r2(-(-i * count // _POINTS))
        self._student.keep(self._order)

    def points(self) -> list[CurvePoint]:
        """Return what was measured."""
        return [CurvePoint(k, r2, sum(self._saved[:k])) for k, r2 in sorted(self._r2.items())]


def _convertible(model: nn.Module, config: SurgeryConfig) -> list[str]:
    """Return the layers that can be converted; raise if there is none."""
    targets = inspect_targets(model, replace(config, layers="all"))
    names = [target.name for target in targets if not target.reason]
    if not names:
        why = "; ".join(f"{t.name}: {t.reason}" for t in targets) or "it has no attention module"
        raise ConversionError(f"No layer of the model can be converted: {why}.")
    return names


def _put_in(
    model: nn.Module, config: SurgeryConfig, layers: Mapping[str, ConvertedLayer]
) -> Conversion:
    """Convert layers of a model, and return the conversion; the new layers are given."""
    with isolated():
        prepared = prepare_conversion(model, config)
    for name, fresh in prepared.layers.items():
        layer = layers[name].train(fresh.training)
        layer.settings = fresh.settings
        for mine, theirs in zip(layer.parameters(), fresh.parameters(), strict=True):
            mine.requires_grad_(theirs.requires_grad)
        prepared.layers[name] = layer
    return apply_conversion(model, prepared)


def _fit(student: nn.Module, model: nn.Module, batches: Sequence[Batch], steps: int) -> None:
    """Train the new layers, or fit them in closed form; learned slots start at clusters of keys."""
    has_slots = any(isinstance(module, LearnedFar) for module in student.modules())
    if has_slots:
        start_at_clusters(student, batches)
    if not steps:
        fit_outputs(student, model, batches)
        return
    # imports the training loop, which needs an extra
    from primal_attention.surgery.distillation import DistillConfig, distill

    config = DistillConfig(layer_steps=steps, end_steps=steps // 2)
    if has_slots:
        # exact near weights need the projections as they are, so only the features learn at first
        config = replace(config, closed_form=False, lora_rank=_RANK, layer_lr=1e-2)
    distill(student, model, batches, config)


def _one_input(model: nn.Module, batch: Batch, length: int) -> Batch:
    """Return one sequence of the length; a shorter one if the model takes no more."""
    if isinstance(batch, Mapping) and "input_ids" in batch:
        ids, limit = batch["input_ids"][:1], position_limit(model)
        length = length if limit is None else min(length, limit)
        return {"input_ids": ids.repeat(1, -(-length // ids.shape[1]))[:, :length]}
    args, kwargs = batch_arguments(batch, 1)
    return kwargs or args


def _whole_runs(
    model: nn.Module, student: nn.Module, one: Batch
) -> dict[str, Callable[[], object]]:
    """Return calls of both models, without logits that nobody reads."""
    if isinstance(one, Mapping) and "logits_to_keep" in inspect.signature(model.forward).parameters:
        one = {**one, "logits_to_keep": 1}

    def run(which: nn.Module) -> None:
        with eval_mode(which):
            run_batch(which, one)

    return {"original": partial(run, model), "converted": partial(run, student)}


def _gains(model: nn.Module, student: nn.Module, one: Batch) -> dict[str, float]:
    """Return the milliseconds that each converted layer saves; equal layers are measured once."""
    groups: dict[object, list[str]] = {}
    for name in converted_layers(student):
        old = model.get_submodule(name)
        shapes = tuple(tuple(p.shape) for p in old.parameters())
        groups.setdefault((type(old), shapes), []).append(name)
    calls = record_layers(model, [names[0] for names in groups.values()], one)
    gains: dict[str, float] = {}
    for names in groups.values():
        call = calls[names[0]]
        runs = {
            side: partial(replay_call, which, names[0], call)
            for side, which in (("original", model), ("converted", student))
        }
        with eval_mode(model):
            costs = compare_costs(runs)
        gain = costs["original"].milliseconds - costs["converted"].milliseconds
        gains |= dict.fromkeys(names, gain)
    return {name: gains[name] for name in converted_layers(student)}


def _layer_costs(model: nn.Module, student: nn.Module, one: Batch, length: int) -> dict[str, Cost]:
    """Return the cost of one layer at a length that the model does not take."""
    layers = converted_layers(student)
    layer = next(iter(layers.values()))
    softmax = copy.deepcopy(model)
    names = list(layers)[:1]
    convert(softmax, SurgeryConfig("softmax", layers=names))
    twin = converted_layers(softmax)[names[0]]
    x = torch.randn(1, length, layer.attention.dim, generator=torch.Generator().manual_seed(0))
    x = x.to(next(layer.parameters()))
    runs = {
        side: partial(which.attention, x, is_causal=layer.is_causal)
        for side, which in (("original", twin), ("converted", layer))
    }
    return compare_costs(runs)


def _few(batches: Sequence[Batch]) -> list[Batch]:
    """Return the first batches, until they hold enough tokens."""
    found: list[Batch] = []
    tokens = 0
    for batch in batches:
        found.append(batch)
        tokens += longest_input([batch]) * _sequences(batch)
        if tokens >= _ENOUGH:
            break
    return found


def _sequences(batch: Batch) -> int:
    args, kwargs = batch_arguments(batch)
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
    return len(tensors[0]) if tensors else 1


def _nothing_good(
    attention: str,
    order: Sequence[str],
    choice: Mapping[str, float],
    curve: _Curve,
    threshold: float,
) -> str:
    best = max(order, key=choice.__getitem__)
    if choice[best] < 0:
        return (
            f"no layer can become {attention!r}: R² of its output is below 0 everywhere (best: "
            f"{choice[best]:.2f} in {best}), so its mean output would be closer. Convert to "
            "'adaptive', or train the new layers by distillation."
        )
    return (
        f"with one layer as {attention!r} ({order[0]}, R² {choice[order[0]]:.2f}) R² of the "
        f"model's output is {curve.r2(1):.2f}, and at least {threshold} is asked for. Lower the "
        "threshold, convert to 'adaptive', or train the new layers by distillation."
    )


def _refuse_useless(attention: str, layers: Mapping[str, float], fidelity: Fidelity) -> None:
    """Raise if a result is worse than a constant."""
    worst = min(layers, key=lambda name: layers[name] if layers[name] == layers[name] else -1e9)
    # not below 0, but not at least 0: NaN is no good layer
    if not layers[worst] >= 0:
        raise ConversionError(
            f"{worst} cannot become {attention!r}: R² of its output is {layers[worst]:.2f} on "
            "held-out inputs, below 0, so its mean output would be closer. Leave this layer out, "
            "convert to 'adaptive', or train the new layers by distillation."
        )
    if not fidelity.r2 >= 0:
        raise ConversionError(
            f"the model with {len(layers)} layers as {attention!r} is of no use: R² of its output "
            f"is {fidelity.r2:.2f} on held-out inputs, below 0. Convert fewer layers, convert to "
            "'adaptive', or train the new layers by distillation."
        )


@torch.no_grad()
def _neglected(student: nn.Module, batch: Batch) -> dict[str, list[float]]:
    """Return the neglected mass of every head of every adaptive layer on a batch."""
    layers = {
        name: layer.attention
        for name, layer in converted_layers(student).items()
        if isinstance(layer.attention, AdaptiveAttention)
    }
    with eval_mode(student), record_calls(student, [f"{n}.attention" for n in layers], {}) as calls:
        if layers:
            run_batch(student, batch)
    found = {}
    for name, attention in layers.items():
        args, kwargs, _ = calls[f"{name}.attention"]
        given = LayerInputs.of_call(args, kwargs)
        mass = attention.diagnose(
            given.x,
            given.context,
            key_mask=given.key_mask,
            is_causal=given.is_causal,
            rotary=given.rotary,
        ).mass
        found[name] = mass.mean(0).tolist()
    return found


def _reach(student: nn.Module) -> int | None:
    """Return up to how many tokens all converted layers are softmax, if all are adaptive."""
    cores = [layer.attention for layer in converted_layers(student).values()]
    reaches = [core.core.plan.reach for core in cores if isinstance(core, AdaptiveAttention)]
    return min(reaches) if len(reaches) == len(cores) else None


def _extension_loss(
    model: nn.Module,
    extension: ExtendedPositions | None,
    parts: _Parts,
    long: Original,
    causal: bool,
) -> ExtensionLoss | None:
    """Compare the model with itself before its positions were extended."""
    if extension is None or extension.before >= extension.after:
        return None
    short = [_cut(batch, extension.before) for batch in (*parts.choose, *parts.test)]
    extension.undo()
    original = Original(model, short, is_causal=causal)
    extend_positions(model, extension.after, method=extension.method)
    return ExtensionLoss(
        extension.verdict(),
        extension.method,
        extension.before,
        extension.after,
        original.compare(model),
        longest_input(short),
        long.perplexity,
    )


def _cut(batch: Batch, tokens: int) -> Batch:
    """Return the first tokens of every sequence."""
    if not isinstance(batch, Mapping):
        return batch
    n = longest_input([batch])
    return {
        key: value[:, :tokens] if value.dim() == 2 and value.shape[1] == n else value
        for key, value in batch.items()
    }
