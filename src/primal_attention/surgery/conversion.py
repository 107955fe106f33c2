"""Replace the attention of a model in place: match, check everything, replace, report, undo.

    conversion = convert(model, SurgeryConfig("primal-dual", layers="last:2"))
    print(conversion)
    revert(model, conversion)

Nothing is touched unless every chosen layer can be replaced. Before that, each of them is asked
what it answers to a few random tokens, and the answer must be that of plain softmax attention with
the weights we read: a bias, a window or a norm we do not know of cannot slip through.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from primal_attention.attention import Attention, Rotary, attention_entry
from primal_attention.output import markdown_table
from primal_attention.surgery.config import ConversionError, SurgeryConfig
from primal_attention.surgery.dialects import Dialect, dialects
from primal_attention.surgery.layers import (
    Converted,
    Inputs,
    Reading,
    build_attention,
    converted_layers,
)

__all__ = [
    "Conversion",
    "Plan",
    "Target",
    "carry_out",
    "convert",
    "inspect_targets",
    "plan_conversion",
    "read_attention",
    "revert",
    "targets_table",
]

_TOLERANCE = 1e-3
"""Largest difference, relative to the answer, between a layer and our reading of it."""


@dataclass(frozen=True)
class Target:
    """An attention module of a model, and what converting it would do."""

    name: str
    dialect: str
    """Library it is written for; empty if its signature is unknown."""
    kind: str
    """Class of the module."""
    selected: bool
    """Whether ``layers`` names it."""
    num_heads: int | None = None
    dim: int | None = None
    is_causal: bool = False
    parameters_before: int = 0
    parameters_after: int | None = None
    reason: str = ""
    """Why it cannot be converted; empty if it can."""
    note: str = ""
    """What changes besides the attention."""


@dataclass
class Conversion:
    """What ``convert`` did, and what it takes to undo it.

    Holds the original modules; drop it to free them.
    """

    config: SurgeryConfig
    targets: list[Target]
    """Every attention module found; the selected ones were converted."""
    originals: dict[str, nn.Module] = field(repr=False)
    _layers: dict[str, Converted] = field(repr=False)
    _undo: list[Callable[[], None]] = field(repr=False)

    @property
    def names(self) -> list[str]:
        """The modules that were converted, in the order of the model."""
        return list(self.originals)

    def __str__(self) -> str:
        return targets_table(self.targets)


@dataclass
class Plan:
    """Everything ``convert`` will put into the model, built before the first change."""

    targets: list[Target]
    layers: dict[str, Converted]
    originals: dict[str, nn.Module]
    every: dict[str, nn.Module]
    dialects: dict[str, Dialect]


def targets_table(targets: list[Target]) -> str:
    """Return targets as a table to print."""
    rows = [
        (
            t.name,
            t.kind,
            t.num_heads or "",
            t.dim or "",
            t.parameters_before,
            "" if t.parameters_after is None else t.parameters_after,
            "yes" if t.selected else "no",
            t.reason or t.note,
        )
        for t in targets
    ]
    header = ("module", "kind", "heads", "width", "parameters", "after", "chosen", "remark")
    return markdown_table(header, rows)


def inspect_targets(model: nn.Module, config: SurgeryConfig, *, data: Any = None) -> list[Target]:
    """Return every attention module of a model and what converting it would do; a dry run.

    Args:
        model: Any model.
        config: What to convert, into what.
        data: For ``layers="auto"``: batches, as for ``advise``.

    Example:
        >>> layer = nn.TransformerEncoderLayer(16, 2, batch_first=True)
        >>> [t.name for t in inspect_targets(layer, SurgeryConfig("linear"))]
        ['self_attn']
    """
    _check_arguments(model, config)
    found = list(_attentions(model))
    chosen = _chosen(model, [name for name, _, _ in found], config, data)
    problems = _tied(model, found)
    targets = []
    for name, module, dialect in found:
        target = Target(
            name,
            "" if dialect is None else dialect.name,
            type(module).__name__,
            name in chosen,
            parameters_before=sum(p.numel() for p in module.parameters()),
        )
        try:
            # looking must not change what is drawn next
            with torch.random.fork_rng(devices=[]):
                target = _examine(target, module, dialect, config, problems.get(name))
        except ConversionError as error:
            target = dataclasses.replace(target, reason=str(error))
        targets.append(target)
    return targets


def convert(model: nn.Module, config: SurgeryConfig, *, data: Any = None) -> Conversion:
    """Replace the chosen attention layers of a model in place, weights carried over.

    Args:
        model: Any model.
        config: What to convert, into what.
        data: For ``layers="auto"``: batches, as for ``advise``.

    Raises:
        ConversionError: If nothing matches or any chosen layer cannot be replaced. The model is
            then as it was.

    Example:
        >>> layer = nn.TransformerEncoderLayer(16, 2, batch_first=True)
        >>> conversion = convert(layer, SurgeryConfig("linear"))
        >>> layer(torch.randn(2, 5, 16)).shape
        torch.Size([2, 5, 16])
        >>> revert(layer, conversion)
    """
    return carry_out(model, plan_conversion(model, config, data=data), config)


def revert(model: nn.Module, conversion: Conversion) -> None:
    """Put the original modules back, with the weights they had.

    Args:
        model: The model that was converted.
        conversion: What ``convert`` returned for it.
    """
    for name, layer in conversion._layers.items():
        if _get(model, name) is not layer:
            raise ConversionError(
                f"{name!r} does not hold the module that this conversion put there; revert the "
                "model itself, not a copy, and only once."
            )
    for name, module in conversion.originals.items():
        module.train(conversion._layers[name].training)
        model.set_submodule(name, module)
    for undo in reversed(conversion._undo):
        undo()


def read_attention(module: nn.Module) -> Reading:
    """Return what an attention module of another library is made of.

    Example:
        >>> read_attention(nn.MultiheadAttention(16, 2)).head_dim
        8
    """
    for dialect in dialects():
        if dialect.matches(module):
            reading = dialect.read(module)
            reading.check()
            return reading
    raise ConversionError(f"{type(module).__name__} has an unknown signature")


def _check_arguments(model: Any, config: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}.")
    if not isinstance(config, SurgeryConfig):
        raise TypeError(
            f"config must be a SurgeryConfig, got {type(config).__name__}; write "
            "SurgeryConfig('primal-dual'), or SurgeryConfig.from_dict(...) for a mapping."
        )
    done = list(converted_layers(model))
    if done:
        raise ConversionError(
            f"The model is converted already ({', '.join(done[:3])}{' …' if done[3:] else ''}); "
            "revert it first, or convert all layers at once."
        )


def plan_conversion(model: nn.Module, config: SurgeryConfig, *, data: Any = None) -> Plan:
    """Return everything that ``convert`` would put into a model, without touching it."""
    targets = inspect_targets(model, config, data=data)
    chosen = [t for t in targets if t.selected]
    if not chosen:
        names = ", ".join(t.name for t in targets) or "none at all"
        raise ConversionError(
            f"layers={config.layers!r} matches no attention module; the model has: {names}."
        )
    bad = [f"- {t.name} ({t.kind}): {t.reason}" for t in chosen if t.reason]
    if bad:
        raise ConversionError(
            "These layers cannot be converted, so nothing was:\n"
            + "\n".join(bad)
            + "\nLeave them out with layers=..., or choose another attention."
        )
    found = {name: (module, dialect) for name, module, dialect in _attentions(model)}
    plan = Plan(targets, {}, {}, {n: m for n, (m, _) in found.items()}, {})
    for target in chosen:
        module, dialect = found[target.name]
        if dialect is None:
            raise ConversionError(f"{target.name} has an unknown signature.")
        reading = dialect.read(module).plain()
        attention = build_attention(config.attention, config.options, reading)
        layer = dialect.wrap(module, attention, reading).train(module.training)
        layer.settings = config
        frozen = not any(p.requires_grad for p in module.parameters())
        plan.layers[target.name] = layer.requires_grad_(False) if frozen else layer
        plan.originals[target.name] = module
        plan.dialects[target.name] = dialect
    return plan


def carry_out(model: nn.Module, plan: Plan, config: SurgeryConfig) -> Conversion:
    """Put what was planned into the model."""
    for name, layer in plan.layers.items():
        model.set_submodule(name, layer)
    undo: list[Callable[[], None]] = []
    for spoken in {d.name: d for d in plan.dialects.values()}.values():
        own = {n: m for n, m in plan.originals.items() if plan.dialects[n].name == spoken.name}
        undo += spoken.settle(model, own, plan.every)
    return Conversion(config, plan.targets, plan.originals, plan.layers, undo)


def _get(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def _attentions(model: nn.Module) -> Iterator[tuple[str, nn.Module, Dialect | None]]:
    """Yield the innermost attention modules, also those that nobody can read."""
    spoken = dialects()
    found: list[tuple[str, nn.Module, Dialect | None]] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") or outer == "" for outer, _, d in found if d):
            continue
        dialect = next((d for d in spoken if d.matches(module)), None)
        called = re.search(r"Atten|Attn", type(module).__name__)
        if dialect is not None or (called and any(True for _ in module.parameters())):
            found.append((name, module, dialect))
    for name, module, dialect in found:
        inner = any(other.startswith(f"{name}.") or not name for other, _, _ in found if other)
        if dialect is not None or not (inner and len(found) > 1):
            yield name, module, dialect


def _chosen(model: nn.Module, names: list[str], config: SurgeryConfig, data: Any) -> set[str]:
    """Return the names that ``layers`` means; raise for one that means nothing."""
    layers = config.layers
    if layers == "all":
        return set(names)
    if layers == "auto":
        return _advised(model, config, data)
    if isinstance(layers, str) and (last := re.fullmatch(r"last:(\d+)", layers)):
        k = int(last[1])
        if not 0 < k <= len(names):
            raise ConversionError(
                f"layers={layers!r} asks for the last {k} attention modules, but the model has "
                f"{len(names)}."
            )
        return set(names[-k:])
    chosen: set[str] = set()
    for one in [layers] if isinstance(layers, str | int) else layers:
        if isinstance(one, int):
            if not -len(names) <= one < len(names):
                raise ConversionError(
                    f"layers has the index {one}, but the model has {len(names)} attention modules."
                )
            chosen.add(names[one])
            continue
        means = {one} if one in names else {n for n in names if re.fullmatch(one, n)}
        if not means:
            raise ConversionError(
                f"layers={one!r} matches no attention module; the model has: "
                f"{', '.join(names) or 'none at all'}."
            )
        chosen |= means
    return chosen


def _advised(model: nn.Module, config: SurgeryConfig, data: Any) -> set[str]:
    if data is None:
        raise ConversionError(
            "layers='auto' follows advice on your data; pass data=, the batches that advise takes."
        )
    from primal_attention.surgery.advice import advise

    advice = advise(model, data, attentions={config.attention: config.options})
    chosen = advice.layers_for(config.attention)
    if not chosen:
        raise ConversionError(f"layers='auto' found nothing to convert. {advice.verdict()}")
    return set(chosen)


def _tied(model: nn.Module, found: list[tuple[str, nn.Module, Dialect | None]]) -> dict[str, str]:
    """Return, by module, with what it shares itself or its parameters."""
    places: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        places.setdefault(id(module), []).append(name)
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    tied = {}
    for name, module, _ in found:
        other = [p for p in places[id(module)] if p != name]
        if other:
            tied[name] = f"the same module is also {other[0]!r}"
            continue
        for inner, parameter in module.named_parameters():
            full = f"{name}.{inner}" if name else inner
            other = [o for o in owners[id(parameter)] if o != full]
            if other:
                tied[name] = f"its parameter {inner!r} is shared with {other[0]!r}"
                break
    return tied


def _examine(
    target: Target,
    module: nn.Module,
    dialect: Dialect | None,
    config: SurgeryConfig,
    tied: str | None,
) -> Target:
    """Return the target with sizes, or raise with the reason why it cannot be converted."""
    if isinstance(module, Attention):
        raise ConversionError("it is an attention of this library already")
    if dialect is None:
        raise ConversionError("unknown signature: none of the dialects can read it")
    if not target.name:
        raise ConversionError("it is the whole model; convert the model around it")
    reading = dialect.read(module)
    target = dataclasses.replace(
        target, num_heads=reading.num_heads, dim=reading.dim, is_causal=reading.is_causal
    )
    try:
        reading.check()
        if tied is not None:
            raise ConversionError(f"{tied}: converting one would silently untie them")
        _check_tensors(module)
        _check_hooks(module)
        _check_abilities(reading, config)
        attention = _built_on_meta(config, reading)
        layer = dialect.wrap(module, attention, reading)
        target = dataclasses.replace(
            target,
            parameters_after=sum(p.numel() for p in layer.parameters()),
            note=_note(reading, attention),
        )
        _probe(dialect, module, reading)
    except ConversionError as error:
        return dataclasses.replace(target, reason=str(error))
    return target


def _built_on_meta(config: SurgeryConfig, reading: Reading) -> Attention:
    try:
        return build_attention(config.attention, config.options, reading.plain(), device="meta")
    except (TypeError, ValueError) as error:
        raise ConversionError(f"{config.attention!r} cannot be built: {error}") from error


def _check_tensors(module: nn.Module) -> None:
    tensors = [*module.parameters(), *module.buffers()]
    devices = sorted({str(t.device) for t in tensors})
    if "meta" in devices:
        raise ConversionError(
            "its parameters are on the meta device and have no values; load the weights first"
        )
    if len(devices) > 1:
        raise ConversionError(f"it is spread over {', '.join(devices)}; move it to one device")
    for name, p in module.named_parameters():
        if p.dtype not in (torch.float32, torch.float64):
            raise ConversionError(
                f"{name} is {p.dtype}; convert in float32 (model.float()) and lower the "
                "precision afterwards"
            )


def _check_hooks(module: nn.Module) -> None:
    for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks):
        for hook in hooks.values():
            # transformers leaves this one behind whenever hidden states were asked for
            if "output_capturing_hook" not in getattr(hook, "__qualname__", ""):
                name = getattr(hook, "__qualname__", repr(hook))
                raise ConversionError(f"it has a hook ({name}) that would be lost; remove it first")
    if hasattr(module, "_hf_hook"):
        raise ConversionError("accelerate dispatches it; remove its hooks first")


def _check_abilities(reading: Reading, config: SurgeryConfig) -> None:
    can = attention_entry(config.attention).capabilities
    if reading.is_causal and not can.causal:
        raise ConversionError(f"the layer is causal, which {config.attention!r} cannot be")
    if not can.padding:
        raise ConversionError(f"{config.attention!r} cannot honour a padding mask")
    if not can.mixes_without_order and not reading.is_causal:
        raise ConversionError(f"{config.attention!r} mixes no tokens in a layer that is not causal")


def _note(reading: Reading, attention: Attention) -> str:
    notes = []
    if reading.kv_heads != reading.num_heads:
        notes.append(f"keys and values of {reading.kv_heads} groups repeated, exactly")
    if reading.rotary and not attention.capabilities.rotary:
        notes.append("rotary positions have no place in this attention")
    if not hasattr(attention, "v_proj") and not hasattr(attention, "dual_r"):
        notes.append("value weights have no place in this attention")
    return "; ".join(notes)


@torch.no_grad()
def _probe(dialect: Dialect, module: nn.Module, reading: Reading) -> None:
    """Raise unless the module answers like softmax attention with the weights we read."""
    inputs = _question(reading, dialect.pads)
    plain = reading.plain()
    softmax = build_attention("softmax", {}, plain).eval()
    ours = dialect.wrap(module, softmax, plain).eval()
    try:
        answer = dialect.ask(module, inputs)
    except ConversionError:
        raise
    except Exception as error:
        raise ConversionError(
            f"unknown signature: a trial call failed with {type(error).__name__}: {error}"
        ) from error
    expected = ours.attend(inputs)
    real = torch.ones_like(answer[..., :1], dtype=torch.bool)
    real = real if inputs.key_mask is None else inputs.key_mask[:, :, None]
    difference = torch.where(real, answer - expected, 0.0).abs().max()
    scale = torch.where(real, expected, 0.0).abs().max()
    if not bool(difference <= _TOLERANCE * scale + 1e-6):
        raise ConversionError(
            "it computes something else than softmax attention with its weights (a relative bias, "
            "a norm, a cap or the like): a trial answer is off by "
            f"{float(difference / scale):.0%}"
        )


def _question(reading: Reading, padded: bool) -> Inputs:
    """Return a few random tokens, some of them padding, for a trial call."""
    weight, n = reading.q.weight, 6
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, n, reading.dim, generator=generator).to(weight)
    keep = torch.arange(n, device=weight.device) < torch.tensor([[n], [4]], device=weight.device)
    q, k = (x @ p.weight.T for p in (reading.q, reading.k))
    # large enough for scores to matter, whatever the scale of the weights
    scores = q.square().mean().sqrt() * k.square().mean().sqrt()
    scores = scores * reading.scaling * reading.head_dim**0.5
    x = x * (2 / scores.clamp_min(1e-12)).sqrt().clamp_max(1e3)
    rotary: Rotary | None = None
    if reading.rotary:
        half = reading.head_dim // 2
        angle = torch.arange(n)[None, :, None] * torch.linspace(0.5, 0.1, half)
        angles = angle.repeat(1, 1, 2).to(weight)
        rotary = Rotary(angles.cos(), angles.sin())
    return Inputs(x, keep if padded else None, reading.is_causal, rotary)
