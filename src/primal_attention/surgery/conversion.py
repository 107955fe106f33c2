"""Replace attention modules of a model in place, and put the originals back.

    conversion = convert(model, SurgeryConfig("primal-dual", layers="last:2"))
    print(conversion)
    revert(model, conversion)

All checks come first: a model is changed only if every selected layer can be replaced.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import nn

from primal_attention.hosts import (
    Batch,
    ConversionError,
    ConvertedLayer,
    HostLibrary,
    converted_layers,
    find_attentions,
)
from primal_attention.surgery.building import build_attention
from primal_attention.surgery.config import SurgeryConfig
from primal_attention.surgery.targets import Target, inspect_targets, targets_table

__all__ = [
    "Conversion",
    "PreparedConversion",
    "apply_conversion",
    "conversion_record",
    "convert",
    "prepare_conversion",
    "revert",
]


@dataclass
class Conversion:
    """Result of :func:`convert`. It holds the original modules; delete it to free them."""

    config: SurgeryConfig
    targets: list[Target]
    """Every attention module of the model; the selected ones were converted."""
    originals: dict[str, nn.Module] = field(repr=False)
    _layers: dict[str, ConvertedLayer] = field(repr=False)
    _undo: list[Callable[[], None]] = field(repr=False)

    @property
    def names(self) -> list[str]:
        """Names of the converted modules, in the order of the model."""
        return list(self.originals)

    def __str__(self) -> str:
        return targets_table(self.targets)


@dataclass
class PreparedConversion:
    """The new layers of a conversion, built but not yet part of the model."""

    config: SurgeryConfig
    targets: list[Target]
    layers: dict[str, ConvertedLayer] = field(default_factory=dict)
    originals: dict[str, nn.Module] = field(default_factory=dict)
    libraries: dict[str, HostLibrary] = field(default_factory=dict)
    attentions: dict[str, nn.Module] = field(default_factory=dict)
    """Every attention module of the model, also those that stay."""


def convert(
    model: nn.Module,
    config: SurgeryConfig | None = None,
    *,
    data: Sequence[Batch] | None = None,
) -> Conversion:
    """Replace the selected attention layers of a model in place; their weights are copied.

    Args:
        model: A model of torch.
        config: What to convert, into what; by default all layers into ``adaptive``, which is
            softmax on short inputs and needs no training.
        data: For ``layers="auto"``: batches, as for ``advise``.

    Raises:
        ConversionError: If nothing is selected or a selected layer cannot be replaced. The model
            is not changed then.

    Example:
        >>> layer = nn.TransformerEncoderLayer(16, 2, batch_first=True)
        >>> conversion = convert(layer, SurgeryConfig("linear"))
        >>> layer(torch.randn(2, 5, 16)).shape
        torch.Size([2, 5, 16])
        >>> revert(layer, conversion)
    """
    config = SurgeryConfig() if config is None else config
    return apply_conversion(model, prepare_conversion(model, config, data=data))


def prepare_conversion(
    model: nn.Module, config: SurgeryConfig, *, data: Sequence[Batch] | None = None
) -> PreparedConversion:
    """Return the new layers of a conversion without changing the model."""
    targets = inspect_targets(model, config, data=data)
    selected = [t for t in targets if t.selected]
    if not selected:
        names = ", ".join(t.name for t in targets) or "none at all"
        raise ConversionError(
            f"layers={config.layers!r} matches no attention module; the model has: {names}."
        )
    bad: dict[str, list[str]] = {}
    for t in selected:
        if t.reason:
            bad.setdefault(t.reason, []).append(f"{t.name} ({t.kind})")
    if bad:
        raise ConversionError(
            "These layers cannot be converted, so nothing was:\n"
            + "\n".join(f"- {', '.join(names)}: {reason}" for reason, names in bad.items())
            + "\nLeave them out with layers=..., or choose another attention."
        )
    prepared = PreparedConversion(config, targets)
    wanted = {t.name for t in selected}
    for name, module, library in find_attentions(model):
        prepared.attentions[name] = module
        if name not in wanted or library is None:
            continue
        parts = library.read(module).canonical()
        attention = build_attention(config.attention, config.options, parts)
        layer = library.wrap(module, attention, parts).train(module.training)
        layer.settings = config.to_dict()
        frozen = not any(p.requires_grad for p in module.parameters())
        prepared.layers[name] = layer.requires_grad_(False) if frozen else layer
        prepared.originals[name] = module
        prepared.libraries[name] = library
    return prepared


def apply_conversion(model: nn.Module, prepared: PreparedConversion) -> Conversion:
    """Put prepared layers into the model."""
    for name, layer in prepared.layers.items():
        model.set_submodule(name, layer)
    undo: list[Callable[[], None]] = []
    record = conversion_record(model)
    for library in {one.name: one for one in prepared.libraries.values()}.values():
        own = {
            n: m
            for n, m in prepared.originals.items()
            if prepared.libraries[n].name == library.name
        }
        undo += library.adapt_model(model, own, prepared.attentions, record)
    return Conversion(prepared.config, prepared.targets, prepared.originals, prepared.layers, undo)


def revert(model: nn.Module, conversion: Conversion) -> None:
    """Put the original modules back, with the weights they had.

    Args:
        model: The model that was converted.
        conversion: What ``convert`` returned for it.
    """
    for name, layer in conversion._layers.items():
        if _submodule(model, name) is not layer:
            raise ConversionError(
                f"{name!r} is not the module that this conversion put there; revert the converted "
                "model itself, not a copy, and only once."
            )
    for name, module in conversion.originals.items():
        module.train(conversion._layers[name].training)
        model.set_submodule(name, module)
    for undo in reversed(conversion._undo):
        undo()


def conversion_record(model: nn.Module) -> dict[str, object] | None:
    """Return the conversion of a model as JSON values; ``None`` if it is not converted."""
    layers = {n: m for n, m in converted_layers(model).items() if m.settings is not None}
    settings = next((m.settings for m in layers.values()), None)
    if settings is None:
        return None
    rows = [
        {"name": n, "library": m.library, "dim": m.attention.dim, "heads": m.attention.num_heads}
        for n, m in layers.items()
    ]
    return {"config": {**settings, "layers": list(layers)}, "layers": rows}


def _submodule(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None
