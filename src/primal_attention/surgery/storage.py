"""Save and load converted models.

    save_converted(model, "folder")          # conversion.json, conversion.safetensors, SHA256SUMS
    load_converted(original, "folder")       # converts the original and loads the weights

No file is pickled and no code is run from a folder.
"""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from primal_attention.hosts import (
    ConversionError,
    ConvertedLayer,
    converted_layers,
    find_attentions,
)
from primal_attention.hosts.transformers import METHOD
from primal_attention.support.command import UserError
from primal_attention.support.files import (
    SealedFolder,
    finish_save,
    parse_json,
    parse_tensors,
    save_sealed,
    to_bytes,
)
from primal_attention.support.output import to_json
from primal_attention.support.randomness import isolated
from primal_attention.surgery.building import build_attention
from primal_attention.surgery.config import SurgeryConfig
from primal_attention.surgery.conversion import (
    Conversion,
    apply_conversion,
    conversion_record,
    prepare_conversion,
)
from primal_attention.surgery.fold import is_folded
from primal_attention.surgery.folders import (
    as_damaged,
    check_weights,
    load_checked,
    read_config,
)
from primal_attention.surgery.targets import inspect_targets

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["load_converted", "load_pretrained", "read_conversion", "save_converted"]

FORMAT = 3
_READ = (2, 3)
"""Formats that are read; the second had a checksum of its own."""
_DESCRIPTION, _WEIGHTS = "conversion.json", "conversion.safetensors"
_SPARE = 10_000_000
"""Numbers that a layer may need beyond twice its saved weights."""
_PARTS = {"config": dict, "layers": list, "model": str, "source": str, "host": str}
"""Parts of a description, and their types."""


def save_converted(model: nn.Module, folder: str | Path) -> Path:
    """Write the converted layers of a model, and return the folder.

    The other layers are not written, only a checksum of their weights: loading needs the same
    original model.

    Args:
        model: A model after ``convert``.
        folder: Where to write ``conversion.json`` and ``conversion.safetensors``.
    """
    layers = converted_layers(model)
    record = conversion_record(model)
    if not layers or record is None:
        raise ConversionError("The model has no converted layers to save; call convert first.")
    folded = [name for name, layer in layers.items() if is_folded(layer)]
    if folded:
        raise ConversionError(
            f"{folded[0]!r} was folded and cannot be saved as a conversion; save the model before "
            "fold_output."
        )
    tensors = {
        f"{name}.{key}": value
        for name, layer in layers.items()
        for key, value in layer.state_dict().items()
    }
    content = {
        "format": FORMAT,
        **record,
        "model": type(model).__name__,
        "source": _source(model),
        "host": _checksum(model, layers),
    }
    files: dict[str, str | bytes] = {_WEIGHTS: to_bytes(tensors)}
    save_sealed(Path(folder), {**files, _DESCRIPTION: to_json(content)})
    return Path(folder)


def _source(model: nn.Module) -> str:
    """Return where transformers loaded a model from; empty for other models."""
    source = getattr(model, "name_or_path", "")
    return str(Path(source).resolve()) if source and Path(source).is_dir() else str(source)


def load_converted(model: nn.Module, folder: str | Path, *, check_host: bool = True) -> Conversion:
    """Convert a model as it was when saved, load the saved weights, and return the conversion.

    Args:
        model: The original model, not converted.
        folder: Where ``save_converted`` wrote.
        check_host: Require that the other layers have the same weights as when saved.

    Raises:
        ConversionError: If the folder holds no conversion, a damaged one or one of another model.
            The model is not changed then.
    """
    content, tensors = read_conversion(folder)
    with as_damaged(folder):
        config = SurgeryConfig.from_dict(content["config"])
        names = [str(layer["name"]) for layer in content["layers"]]
    modules = dict(model.named_modules())
    missing = [name for name in names if name not in modules]
    if missing:
        raise ConversionError(
            f"The conversion in {folder} is of another model ({content['model']}): this "
            f"{type(model).__name__} has no module {missing[0]!r}."
        )
    with isolated(), as_damaged(folder):
        _check_sizes(model, config, tensors)
        prepared = prepare_conversion(model, config)
    for name, layer in prepared.layers.items():
        _load_layer(layer, name, tensors, f"{folder} is of another model ({content['model']})")
        check_weights(layer, f"The weights of {name!r} in {folder}")
    if check_host and _checksum(model, prepared.layers) != content["host"]:
        raise ConversionError(
            f"{folder}: the layers that were not converted have other weights than when the "
            "checkpoint was saved. Load the same original model. If those layers were trained too, "
            "save the whole model with save_pretrained. check_host=False loads the converted "
            "layers regardless."
        )
    return apply_conversion(model, prepared)


def read_conversion(folder: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the description and the tensors that ``save_converted`` wrote."""
    folder = Path(folder)
    with as_damaged(folder):
        finish_save(folder)
    if not (folder / _DESCRIPTION).is_file():
        raise ConversionError(f"There is no conversion in {folder}: it has no {_DESCRIPTION}.")
    try:
        sealed = SealedFolder(folder)
        content = parse_json(sealed.read(_DESCRIPTION), folder / _DESCRIPTION)
        tensors = parse_tensors(sealed.read(_WEIGHTS), folder / _WEIGHTS)
    except UserError as error:
        raise ConversionError(str(error)) from error
    if content.get("format") not in _READ:
        raise ConversionError(
            f"The conversion in {folder} has format {content.get('format')!r}, expected {FORMAT}; "
            "load it with the version of the library that wrote it."
        )
    for name, kind in _PARTS.items():
        if not isinstance(content.get(name), kind):
            raise ConversionError(
                f"The conversion in {folder} is damaged: {_DESCRIPTION} has no valid {name!r}."
            )
    return content, tensors


def _check_sizes(model: nn.Module, config: SurgeryConfig, tensors: Mapping[str, Tensor]) -> None:
    """Raise if a layer needs more memory than its weights: an option may ask for any amount."""
    names = {t.name for t in inspect_targets(model, config) if t.selected and not t.reason}
    for name, module, library in find_attentions(model):
        if name in names and library is not None:
            parts = library.read(module).canonical()
            made = build_attention(config.attention, config.options, parts, device="meta")
            needed = sum(t.numel() for t in made.state_dict().values())
            stored = sum(t.numel() for t in _tensors_of(name, tensors).values())
            if needed > 2 * stored + _SPARE:
                raise ConversionError(
                    f"The options of {config.attention!r} ask for {needed:,} numbers in {name!r}, "
                    f"but its saved weights have {stored:,}; they do not belong together."
                )


def _load_layer(
    layer: ConvertedLayer, name: str, tensors: Mapping[str, Tensor], mismatch: str
) -> None:
    own = _tensors_of(name, tensors)
    if _shapes(own) != _shapes(layer.state_dict()):
        raise ConversionError(
            f"The conversion in {mismatch}: the weights of {name!r} have other names or shapes "
            "than this model's."
        )
    layer.load_state_dict(own)


def _tensors_of(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a layer by their names inside it."""
    prefix = f"{name}."
    return {k[len(prefix) :]: t for k, t in tensors.items() if k.startswith(prefix)}


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _checksum(model: nn.Module, layers: Mapping[str, nn.Module]) -> str:
    """Return a checksum of all parameters and buffers outside the given modules."""
    prefixes = tuple(f"{name}." if name else "" for name in layers)
    total = 0
    for name, tensor in sorted(model.state_dict().items()):
        if not name.startswith(prefixes):
            raw = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
            total = zlib.crc32(raw.tobytes(), zlib.crc32(name.encode(), total))
    return f"{total:08x}"


def load_pretrained(model_class: "type[PreTrainedModel]", folder: str | Path) -> nn.Module:
    """Return a converted model of transformers that ``save_pretrained`` wrote, after checks.

    ``model_class.from_pretrained`` loads it too. This function is for folders of strangers: it
    compares sizes before it takes memory, and refuses weights that are not finite or incomplete.
    Code in the folder (``auto_map``) is never run.

    Args:
        model_class: A model class of transformers, or one of its ``Auto`` classes.
        folder: Where ``save_pretrained`` wrote.

    Raises:
        ConversionError: If the folder holds no converted model, or a damaged one.
    """
    folder = Path(folder)
    config = read_config(folder)
    record = getattr(config, "quantization_config", None)
    if not isinstance(record, dict) or record.get("quant_method") != METHOD:
        raise ConversionError(
            f"The model in {folder} is not converted; load it with {model_class.__name__}"
            ".from_pretrained."
        )
    return load_checked(model_class, config, folder)
