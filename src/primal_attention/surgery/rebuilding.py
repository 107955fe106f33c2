"""Rebuild the layers of a conversion in a model of transformers whose weights come afterwards."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from primal_attention.hosts import ConversionError, converted_layers, find_attentions
from primal_attention.hosts.transformers import RECORD_FORMAT
from primal_attention.support.command import UserError
from primal_attention.support.files import SUMS, SealedFolder
from primal_attention.surgery.building import build_attention
from primal_attention.surgery.config import SurgeryConfig
from primal_attention.surgery.conversion import PreparedConversion, apply_conversion
from primal_attention.surgery.folders import as_damaged, check_size

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["check_loaded", "rebuild_conversion"]


def rebuild_conversion(
    model: "PreTrainedModel", record: Mapping[str, Any], files: Sequence[Path]
) -> None:
    """Put the layers of a conversion into a model on the meta device.

    Args:
        model: The original model, as its config describes it.
        record: What ``config.json`` says of the conversion.
        files: The files whose weights will be loaded.

    Raises:
        ConversionError: If the record is damaged, or belongs to another model or other weights.
    """
    where = str(model.name_or_path)
    if record.get("format") != RECORD_FORMAT:
        raise ConversionError(
            f"The conversion in {where} has format {record.get('format')!r}, expected "
            f"{RECORD_FORMAT}; load it with the version of the library that wrote it."
        )
    with as_damaged(where):
        config = SurgeryConfig.from_dict(record["config"])
        names = _names_in(model, [str(layer["name"]) for layer in record["layers"]])
        if record.get("sealed"):
            _check_sums(files)
        prepared = _prepare(model, config, names)
        apply_conversion(model, prepared)
        _check_files(model, files)


def _names_in(model: "PreTrainedModel", saved: Sequence[str]) -> set[str]:
    """Return the names in this model of the layers that were saved.

    ``AutoModel`` loads the inner model of a folder with a head, and the reverse.
    """
    prefix, known = f"{model.base_model_prefix}.", dict(model.named_modules())
    for names in (
        set(saved),
        {name.removeprefix(prefix) for name in saved},
        {prefix + name for name in saved},
    ):
        if names and names <= known.keys():
            return names
    raise ConversionError(
        f"the conversion names {len(saved)} layers, such as {''.join(saved[:1])!r}, which "
        f"{type(model).__name__} does not have; load the class that was converted."
    )


def _prepare(model: nn.Module, config: SurgeryConfig, names: set[str]) -> PreparedConversion:
    """Return the new layers; there are no weights yet, so nothing is tried or copied."""
    prepared = PreparedConversion(config, [])
    for name, module, library in find_attentions(model):
        prepared.attentions[name] = module
        if name in names and library is not None:
            parts = library.read(module).canonical()
            attention = build_attention(config.attention, config.options, parts, device="meta")
            layer = library.wrap(module, attention, parts)
            layer.settings = config.to_dict()
            prepared.layers[name] = layer
            prepared.originals[name] = module
            prepared.libraries[name] = library
    lost = sorted(names - prepared.layers.keys())
    if lost:
        raise ConversionError(f"{lost[0]!r} is no attention that can be converted.")
    return prepared


def _check_sums(files: Sequence[Path]) -> None:
    """Raise if files of a sealed save were changed since; a download may lack the checksums."""
    for folder in {file.parent for file in files}:
        if (folder / SUMS).is_file():
            sealed = SealedFolder(folder)
            for name in ("config.json", *(f.name for f in files if f.parent == folder)):
                try:
                    sealed.read(name)
                except UserError as error:
                    raise ConversionError(str(error)) from error


def _check_files(model: nn.Module, files: Sequence[Path]) -> None:
    """Raise for pickled weights, and if the model needs much more memory than the files hold."""
    pickled = [file.name for file in files if file.suffix != ".safetensors"]
    if pickled:
        raise ConversionError(f"weights are read from .safetensors only, got {pickled[0]}.")
    if files:  # otherwise the caller gives a state_dict
        check_size(model, files[0].parent, files)


def check_loaded(model: "PreTrainedModel") -> None:
    """Raise if a weight of a converted layer was not in the files.

    Transformers draws such weights at random, with a warning; it marks those that were loaded.
    """
    lost = [
        f"{name}.{key}"
        for name, layer in converted_layers(model).items()
        for key, tensor in layer.state_dict(keep_vars=True).items()
        if not tensor.is_meta and not getattr(tensor, "_is_hf_initialized", False)
    ]
    if lost:
        raise ConversionError(
            f"The weights in {model.name_or_path} lack {len(lost)} tensors of the conversion that "
            f"config.json describes, or have them in other shapes, such as {lost[0]!r}; save the "
            "whole model again."
        )
