"""Save and load converted models.

    save_converted(model, "folder")          # conversion.json, conversion.safetensors
    load_converted(original, "folder")       # converts the original and loads the weights

No file is pickled and no code is run from a folder.
"""

import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from primal_attention.output import to_json, write_atomically
from primal_attention.surgery.config import ConversionError, SurgeryConfig
from primal_attention.surgery.conversion import (
    Conversion,
    apply_conversion,
    prepare_conversion,
)
from primal_attention.surgery.fold import is_folded
from primal_attention.surgery.layers import ConvertedLayer, conversion_record, converted_layers
from primal_attention.surgery.optional import require_transformers

__all__ = ["load_converted", "load_pretrained", "read_conversion", "save_converted"]

FORMAT = 2
_DESCRIPTION, _WEIGHTS = "conversion.json", "conversion.safetensors"


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
        f"{name}.{key}": value.detach().cpu().contiguous().clone()
        for name, layer in layers.items()
        for key, value in layer.state_dict().items()
    }
    data = save_tensors(tensors)
    content = {
        "format": FORMAT,
        **record,
        "model": type(model).__name__,
        "source": _source(model),
        "host": _checksum(model, layers),
        "weights": f"{zlib.crc32(data):08x}",
    }
    folder = Path(folder)
    # the description goes last: a folder without it holds no conversion
    write_atomically(folder / _WEIGHTS, data)
    write_atomically(folder / _DESCRIPTION, to_json(content))
    return folder


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
    with _as_damaged(folder):
        config = SurgeryConfig.from_dict(content["config"])
        names = [str(layer["name"]) for layer in content["layers"]]
    modules = dict(model.named_modules())
    missing = [name for name in names if name not in modules]
    if missing:
        raise ConversionError(
            f"The checkpoint is of another model ({content['model']}): this "
            f"{type(model).__name__} has no module {missing[0]!r}."
        )
    with torch.random.fork_rng(devices=[]):
        prepared = prepare_conversion(model, config)
    for name, layer in prepared.layers.items():
        _load_layer(layer, name, tensors, str(content["model"]))
    if check_host and _checksum(model, prepared.layers) != content["host"]:
        raise ConversionError(
            "The layers that were not converted have other weights than when the checkpoint was "
            "saved. Load the same original model. If those layers were trained too, save the whole "
            "model with save_pretrained. check_host=False loads the converted layers regardless."
        )
    return apply_conversion(model, prepared)


def read_conversion(folder: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the description and the tensors that ``save_converted`` wrote."""
    folder = Path(folder)
    try:
        with _as_damaged(folder):
            content = json.loads((folder / _DESCRIPTION).read_text("utf-8"))
            data = (folder / _WEIGHTS).read_bytes()
            tensors = load_tensors(data)
    except FileNotFoundError as error:
        raise ConversionError(f"There is no conversion in {folder}: {error}.") from error
    version = content.get("format") if isinstance(content, dict) else None
    if version != FORMAT:
        raise ConversionError(
            f"The conversion in {folder} has format {version!r}, expected {FORMAT}; load it with "
            "the version of the library that wrote it."
        )
    missing = {"config", "layers", "model", "source", "host", "weights"} - set(content)
    if missing:
        raise ConversionError(
            f"The conversion in {folder} is damaged: {_DESCRIPTION} lacks {min(missing)!r}."
        )
    if content["weights"] != f"{zlib.crc32(data):08x}":
        raise ConversionError(
            f"The two files in {folder} do not belong together; copy both from one save."
        )
    return content, tensors


@contextmanager
def _as_damaged(folder: str | Path) -> Iterator[None]:
    """Turn errors of reading a folder into one sentence that names the folder."""
    try:
        yield
    except ConversionError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
        words = " ".join(str(error).split()) or type(error).__name__
        raise ConversionError(f"The model in {folder} is damaged: {words}.") from error


def _load_layer(
    layer: ConvertedLayer, name: str, tensors: Mapping[str, Tensor], model: str
) -> None:
    prefix = f"{name}."
    own = {k[len(prefix) :]: t for k, t in tensors.items() if k.startswith(prefix)}
    if _shapes(own) != _shapes(layer.state_dict()):
        raise ConversionError(
            f"The checkpoint is of another model ({model}): the weights of {name!r} have other "
            "names or shapes than this model's."
        )
    layer.load_state_dict(own)


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


def load_pretrained(model_class: Any, folder: str | Path) -> nn.Module:
    """Return a converted model of transformers that ``save_pretrained`` wrote.

    ``from_pretrained`` ignores the record of the conversion in ``config.json``, and would build the
    original layers with random weights. Code in the folder (``auto_map``) is never run.

    Args:
        model_class: A model class of transformers, or one of its ``Auto`` classes.
        folder: Where ``save_pretrained`` wrote.

    Raises:
        ConversionError: If the folder holds no converted model, or a damaged one.
    """
    transformers, folder = require_transformers(), Path(folder)
    try:
        with _as_damaged(folder):
            config = transformers.AutoConfig.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True
            )
            tensors: dict[str, Tensor] = {}
            for file in sorted(folder.glob("*.safetensors")):
                tensors.update(load_tensors(file.read_bytes()))
    except OSError as error:
        raise ConversionError(
            f"{folder} holds no model of transformers: {' '.join(str(error).split())}"
        ) from error
    record = getattr(config, "primal_attention", None)
    if record is None:
        raise ConversionError(
            f"The model in {folder} is not converted; load it with {model_class.__name__}"
            ".from_pretrained."
        )
    del config.primal_attention
    with _as_damaged(folder):
        settings = SurgeryConfig.from_dict(record["config"])
        if hasattr(model_class, "from_config"):
            model = model_class.from_config(config, trust_remote_code=False)
        else:
            model = model_class._from_config(config)
    apply_conversion(model, prepare_conversion(model, settings))
    # tied weights are saved under one of their names
    for tied, kept in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if kept in tensors:
            tensors.setdefault(tied, tensors[kept])
    _load_all(model, tensors, folder)
    model.tie_weights()
    return model.eval()


def _load_all(model: nn.Module, tensors: Mapping[str, Tensor], folder: Path) -> None:
    expected, found = _shapes(model.state_dict()), _shapes(tensors)
    if found != expected:
        missing, unknown = sorted(expected.keys() - found), sorted(found.keys() - expected)
        other = [k for k in expected if k in found and found[k] != expected[k]]
        raise ConversionError(
            f"The weights in {folder} do not belong to its config.json: missing {missing[:3]}, "
            f"unknown {unknown[:3]}, of another shape {other[:3]}."
        )
    model.load_state_dict(dict(tensors))
