"""The attention modules of a model, and which of them a configuration selects."""

import re
from collections.abc import Sequence

from torch import nn

from primal_attention.hosts import (
    Batch,
    ConversionError,
    FoundModule,
    converted_layers,
    find_attentions,
)
from primal_attention.support.output import markdown_table
from primal_attention.support.randomness import isolated
from primal_attention.surgery.checks import Target, examine
from primal_attention.surgery.config import SurgeryConfig

__all__ = ["Target", "inspect_targets", "targets_table"]


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
    header = ("module", "kind", "heads", "width", "parameters", "after", "selected", "remark")
    return markdown_table(header, rows)


def inspect_targets(
    model: nn.Module,
    config: SurgeryConfig | None = None,
    *,
    data: Sequence[Batch] | None = None,
) -> list[Target]:
    """Return every attention module of a model, and what a conversion would do with it.

    The model is not changed.

    Args:
        model: A model of torch.
        config: What to convert, into what; by default all layers into ``adaptive``.
        data: For ``layers="auto"``: batches, as for ``advise``.

    Example:
        >>> layer = nn.TransformerEncoderLayer(16, 2, batch_first=True)
        >>> [t.name for t in inspect_targets(layer, SurgeryConfig("linear"))]
        ['self_attn']
    """
    config = SurgeryConfig() if config is None else config
    _check_arguments(model, config)
    found = list(find_attentions(model))
    selected = _select(model, [f.name for f in found], config, data)
    shared = _shared_weights(model, found)
    targets = []
    for name, module, library in found:
        target = Target(
            name,
            "" if library is None else library.name,
            type(module).__name__,
            name in selected,
            parameters_before=sum(p.numel() for p in module.parameters()),
        )
        # an inspection must not change the numbers that are drawn after it
        with isolated():
            targets.append(examine(target, module, library, config, shared.get(name)))
    return targets


def _check_arguments(model: object, config: object) -> None:
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


def _select(
    model: nn.Module, names: list[str], config: SurgeryConfig, data: Sequence[Batch] | None
) -> set[str]:
    """Return the names that ``layers`` selects; raise if a part of it selects nothing."""
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
    each = [layers] if isinstance(layers, str | int) else layers
    return {name for one in each for name in _matching(names, one)}


def _matching(names: list[str], layer: str | int) -> list[str]:
    """Return the names that one index, name or regular expression selects."""
    if isinstance(layer, int):
        if not -len(names) <= layer < len(names):
            raise ConversionError(
                f"layers has the index {layer}, but the model has {len(names)} attention modules."
            )
        return [names[layer]]
    matching = [layer] if layer in names else [n for n in names if re.fullmatch(layer, n)]
    if not matching:
        raise ConversionError(
            f"layers={layer!r} matches no attention module; the model has: "
            f"{', '.join(names) or 'none at all'}."
        )
    return matching


def _advised(model: nn.Module, config: SurgeryConfig, data: Sequence[Batch] | None) -> set[str]:
    if data is None:
        raise ConversionError(
            "layers='auto' selects layers by advise, which needs data; pass data= with the batches."
        )
    from primal_attention.surgery.advisor import advise
    from primal_attention.surgery.options import AdviceConfig

    options = {config.attention: config.options}
    advice = advise(model, data, AdviceConfig((config.attention,)), options=options)
    selected = advice.layers_for(config.attention)
    if not selected:
        raise ConversionError(f"layers='auto' selects no layer. {advice.verdict()}")
    return set(selected)


def _shared_weights(model: nn.Module, found: list[FoundModule]) -> dict[str, str]:
    """Return, by module, with what it shares itself or a parameter."""
    places: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        places.setdefault(id(module), []).append(name)
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    shared = {}
    for name, module, _ in found:
        other = [p for p in places[id(module)] if p != name]
        if other:
            shared[name] = f"the same module is also {other[0]!r}"
            continue
        for inner, parameter in module.named_parameters():
            full = f"{name}.{inner}" if name else inner
            other = [o for o in owners[id(parameter)] if o != full]
            if other:
                shared[name] = f"its parameter {inner!r} is shared with {other[0]!r}"
                break
    return shared
