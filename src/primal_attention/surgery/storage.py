"""Converted layers on disk: a JSON file that says what was converted, and the new weights alone.

save_converted(model, "folder")          # conversion.json, conversion.safetensors
load_converted(other_copy, "folder")     # the same original model, converted and loaded
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from primal_attention.output import to_json, write_atomically
from primal_attention.surgery.config import ConversionError, SurgeryConfig
from primal_attention.surgery.conversion import Conversion, carry_out, plan_conversion
from primal_attention.surgery.fold import is_folded
from primal_attention.surgery.layers import Converted, conversion_record, converted_layers

__all__ = ["load_converted", "load_pretrained", "save_converted"]

_FORMAT = 1


def save_converted(model: nn.Module, folder: str | Path) -> Path:
    """Write the converted layers of a model, and return the folder.

    The weights of the rest are not written, only a checksum of them: loading needs the same
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
            f"{folded[0]!r} was folded for inference and cannot be loaded into a fresh conversion; "
            "save before fold_output."
        )
    tensors = {
        f"{name}.{key}": value.detach().cpu().contiguous().clone()
        for name, layer in layers.items()
        for key, value in layer.state_dict().items()
    }
    data = save_tensors(tensors)
    content = {
        "format": _FORMAT,
        **record,
        "model": type(model).__name__,
        "host": _checksum(model, layers),
        "weights": f"{zlib.crc32(data):08x}",
    }
    folder = Path(folder)
    # the description goes last: without it there is no checkpoint
    write_atomically(folder / "conversion.safetensors", data)
    write_atomically(folder / "conversion.json", to_json(content))
    return folder


def load_converted(model: nn.Module, folder: str | Path, *, check_host: bool = True) -> Conversion:
    """Convert a model as it was when saved, with the saved weights, and return the conversion.

    Args:
        model: The original model, not converted.
        folder: Where ``save_converted`` wrote.
        check_host: Insist that the layers that were not converted have the weights they had then.

    Raises:
        ConversionError: If the checkpoint is of another model or damaged. The model is then as it
            was.
    """
    content, tensors = _read(Path(folder))
    config = SurgeryConfig.from_dict(content["config"])
    names = [layer["name"] for layer in content["layers"]]
    have = dict(model.named_modules())
    missing = [name for name in names if name not in have]
    if missing:
        raise ConversionError(
            f"The checkpoint is of another model ({content['model']}): this "
            f"{type(model).__name__} has no module {missing[0]!r}."
        )
    with torch.random.fork_rng(devices=[]):
        plan = plan_conversion(model, config)
    for name, layer in plan.layers.items():
        _load(layer, name, tensors, str(content["model"]))
    if check_host and _checksum(model, plan.layers) != content["host"]:
        raise ConversionError(
            "The layers that were not converted have other weights than when the checkpoint was "
            "saved: load the same original model, or, if those layers were trained too, save the "
            "whole state_dict. check_host=False loads the converted layers all the same."
        )
    return carry_out(model, plan, config)


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        content = json.loads((folder / "conversion.json").read_text("utf-8"))
        data = (folder / "conversion.safetensors").read_bytes()
        tensors = load_tensors(data)
    except FileNotFoundError as error:
        raise ConversionError(f"There is no conversion in {folder}: {error}.") from error
    except (ValueError, SafetensorError) as error:
        raise ConversionError(f"The conversion in {folder} is damaged: {error}.") from error
    version = content.get("format") if isinstance(content, dict) else None
    if version != _FORMAT:
        raise ConversionError(
            f"The conversion in {folder} has format {version!r}, expected {_FORMAT}; load it with "
            "the version of the library that wrote it."
        )
    missing = {"config", "layers", "model", "host", "weights"} - set(content)
    if missing:
        raise ConversionError(
            f"The conversion in {folder} is damaged: conversion.json lacks {min(missing)!r}."
        )
    if content["weights"] != f"{zlib.crc32(data):08x}":
        raise ConversionError(
            f"The two files in {folder} do not belong together; copy both from one save."
        )
    return content, tensors


def _load(layer: Converted, name: str, tensors: Mapping[str, Tensor], model: str) -> None:
    prefix = f"{name}."
    own = {k[len(prefix) :]: t for k, t in tensors.items() if k.startswith(prefix)}
    expected = {k: tuple(t.shape) for k, t in layer.state_dict().items()}
    if {k: tuple(t.shape) for k, t in own.items()} != expected:
        raise ConversionError(
            f"The checkpoint is of another model ({model}): the weights of {name!r} have other "
            "names or shapes than this model's."
        )
    layer.load_state_dict(own)


def _checksum(model: nn.Module, layers: Mapping[str, nn.Module]) -> str:
    """Return a checksum of all parameters and buffers outside the given modules."""
    prefixes = tuple(f"{name}." if name else "" for name in layers)
    total = 0
    for name, tensor in sorted(model.state_dict().items()):
        if not name.startswith(prefixes):
            raw = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
            total = zlib.crc32(raw.tobytes(), zlib.crc32(name.encode(), total))
    return f"{total:08x}"


def load_pretrained(model_class: Any, folder: str | Path) -> nn.Module:
    """Return a converted transformers model that ``save_pretrained`` wrote.

    ``from_pretrained`` knows nothing of conversions and would build the original layers with random
    weights. The record of the conversion is in ``config.json``.

    Args:
        model_class: A model class of transformers, or one of its ``Auto`` classes.
        folder: Where ``save_pretrained`` wrote.
    """
    from transformers import AutoConfig

    folder = Path(folder)
    config = AutoConfig.from_pretrained(folder)
    record = getattr(config, "primal_attention", None)
    if record is None:
        raise ConversionError(
            f"The model in {folder} is not converted; load it with {model_class.__name__}"
            ".from_pretrained."
        )
    del config.primal_attention
    build = getattr(model_class, "from_config", None) or model_class._from_config
    model = build(config)
    settings = SurgeryConfig.from_dict(record["config"])
    carry_out(model, plan_conversion(model, settings), settings)
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_tensors(file.read_bytes()))
    result = model.load_state_dict(tensors, strict=False)
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    missing = [key for key in result.missing_keys if key not in tied]
    if missing or result.unexpected_keys:
        raise ConversionError(
            f"The weights in {folder} are of another model: missing {missing[:3]}, unexpected "
            f"{result.unexpected_keys[:3]}."
        )
    model.tie_weights()
    return model.eval()
