"""Folders of transformers: read within limits, without a download, and without running their code.

Folders hold files of other people. A number in ``config.json`` may ask for any amount of memory, so
the configuration is compared with the weights before a model is built. Whatever transformers,
tokenizers and safetensors raise becomes a :class:`ConversionError` that names the folder.
"""

import inspect
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from primal_attention.hosts import ConversionError
from primal_attention.hosts.optional import require_transformers
from primal_attention.hosts.transformers import allow_build
from primal_attention.support.command import MissingPackageError, UserError
from primal_attention.support.files import check_large_weights, open_bytes, parse_json, read_json

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "SAFE",
    "as_damaged",
    "check_size",
    "check_weights",
    "find_class",
    "load_checked",
    "load_tokenizer",
    "loading_errors",
    "random_model",
    "read_config",
    "weight_files",
]

SAFE = {"trust_remote_code": False, "local_files_only": True}
"""Arguments of every ``from_pretrained``: no code of the folder, no download."""
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_COUNT = re.compile(r"layer|block|depth|stage|group|expert|label")
"""Settings that count modules or names: each takes time, whatever its size."""
_SIZE = re.compile(r"size|dim|width|label2id|id2label")
_MODULES, _LABELS = 1000, 1_000_000
"""Most modules of a kind, unless there are as many tensors; most labels."""
_SPARE = 50_000_000
"""Numbers that a model may need beyond twice those of its files: buffers, tied weights."""


@contextmanager
def loading_errors(what: str) -> Iterator[None]:
    """Turn every error inside the context into a :class:`ConversionError` that names ``what``.

    Only for calls into transformers and tokenizers with files of a user: they raise anything.
    """
    try:
        yield
    except (ConversionError, MissingPackageError):
        raise
    except UserError as error:
        raise ConversionError(str(error)) from error
    except Exception as error:
        raise ConversionError(_sentence(what, error)) from error
    except BaseException as error:
        # a panic inside Rust code arrives as a BaseException
        if type(error).__name__ != "PanicException":
            raise
        raise ConversionError(_sentence(what, error)) from None


@contextmanager
def as_damaged(where: str | Path) -> Iterator[None]:
    """Turn errors about the content of a model into one sentence that says where it lies."""
    try:
        yield
    except ConversionError as error:
        if str(where) in str(error):
            raise
        raise ConversionError(f"{where}: {error}") from error
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        words = " ".join(str(error).split()) or type(error).__name__
        raise ConversionError(f"The model in {where} is damaged: {words}.") from error


def _sentence(what: str, error: BaseException) -> str:
    words = " ".join(str(error).split())[:300]
    return (
        f"{what} cannot be loaded ({type(error).__name__}: {words}); it is damaged or incomplete."
    )


def read_config(folder: Path) -> "PretrainedConfig":
    """Return the configuration of the model in a folder, after a look at its numbers."""
    transformers = require_transformers()
    with loading_errors(f"The model in {folder}"):
        raw = read_json(folder / "config.json")
        names = raw.get("architectures")
        # transformers reads it without a look, and others index it
        if names is not None and not (isinstance(names, list) and all(map(_is_word, names))):
            raise ConversionError(
                f"{folder / 'config.json'} has architectures = {str(names)[:80]}; it must be a "
                "list of names of classes. Save the model again."
            )
        if "primal_attention" in raw:
            raise ConversionError(
                f"{folder / 'config.json'} is a conversion by an earlier version of this library, "
                "whose format is no longer read; convert the original model again."
            )
        _check_counts(raw, sum(len(_shapes(file)) for file in weight_files(folder)), folder)
        config = transformers.AutoConfig.from_pretrained(folder, **SAFE)
        allow_build(config)
        return config


def _is_word(value: object) -> bool:
    return isinstance(value, str)


def weight_files(folder: Path) -> list[Path]:
    """Return the files of weights in a folder, as transformers names them."""
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    if not (folder / _INDEX).is_file():
        raise ConversionError(
            f"{folder} holds no weights: there is no {_WEIGHTS}; save the model with "
            "save_pretrained."
        )
    found = read_json(folder / _INDEX).get("weight_map")
    names = sorted(set(map(str, found.values()))) if isinstance(found, dict) else []
    for name in names:
        if not re.fullmatch(r"[\w.-]+\.safetensors", name) or not (folder / name).is_file():
            raise ConversionError(f"{folder / _INDEX} names {name[:80]!r}, which is not there.")
    return [folder / name for name in names]


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a file, from its header."""
    check_large_weights(path)
    with open_bytes(path) as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(min(length, path.stat().st_size))
    if len(header) < max(length, 2):
        raise ConversionError(f"{path} is truncated, or no safetensors file.")
    found = {}
    for name, entry in parse_json(header, f"the header of {path}").items():
        if name != "__metadata__":
            shape = entry.get("shape") if isinstance(entry, dict) else None
            if not isinstance(shape, list) or not all(isinstance(n, int) and n >= 0 for n in shape):
                raise ConversionError(f"{path} is damaged: {name[:80]!r} has no shape.")
            found[name] = tuple(shape)
    return found


def _check_counts(value: object, tensors: int, folder: Path, key: str = "") -> None:
    """Raise for settings that ask for more modules than there are tensors, or for code."""
    if isinstance(value, dict):
        for name, inner in value.items():
            _check_counts(inner, tensors, folder, name)
    elif isinstance(value, list):
        for inner in value:
            _check_counts(inner, tensors, folder, key)
    elif isinstance(value, str) and "implementation" in key and "/" in value:
        raise ConversionError(
            f"{folder / 'config.json'} has {key} = {value[:80]!r}, code that would be downloaded; "
            "it is never run. Remove the setting."
        )
    elif isinstance(value, int) and _COUNT.search(key) and not _SIZE.search(key):
        limit = _LABELS if "label" in key else max(_MODULES, tensors)
        if value > limit:
            raise ConversionError(
                f"{folder / 'config.json'} has {key} = {value:,}, but there are only {tensors:,} "
                "tensors in the folder; they do not belong together. Save the model again."
            )


def check_size(model: nn.Module, folder: Path, files: Sequence[Path] | None = None) -> None:
    """Raise if a model, built on the meta device, needs much more memory than its files hold.

    Args:
        model: The model.
        folder: Where its configuration lies.
        files: Its weights; by default those in the folder.
    """
    parts = [*model.parameters(), *model.buffers()]
    needed = sum(part.numel() for part in parts)
    files = weight_files(folder) if files is None else files
    shapes = [shape for file in files for shape in _shapes(file).values()]
    stored = sum(map(math.prod, shapes))
    if needed > 2 * stored + _SPARE:
        raise ConversionError(
            f"{folder / 'config.json'} describes a model of {needed:,} numbers, but the files of "
            f"weights hold {stored:,}; they do not belong together. Save the model again."
        )


def check_weights(module: nn.Module, where: str) -> None:
    """Raise if a weight is not finite: such a model runs, but answers NaN.

    Args:
        module: What was loaded.
        where: What the message is about, such as ``"The weights in FOLDER"``.
    """
    broken = [name for name, p in module.named_parameters() if not bool(p.isfinite().all())]
    # a buffer may hold infinity on purpose, as a mask does
    broken += [name for name, b in module.named_buffers() if bool(b.isnan().any())]
    if broken:
        raise ConversionError(
            f"{where} are damaged: {broken[0]!r} holds a value that is not finite (NaN or "
            "infinite). Every weight must be finite; save or download the model again."
        )


def random_model(
    model_class: "type[PreTrainedModel]", config: "PretrainedConfig"
) -> "PreTrainedModel":
    """Return a model of a class, or of an ``Auto`` class, with random weights."""
    if hasattr(model_class, "from_config"):
        return model_class.from_config(config, trust_remote_code=False)
    return model_class._from_config(config)  # type: ignore[no-untyped-call]


def find_class(config: "PretrainedConfig") -> Any:
    """Return the class that a config names if it is one of transformers, else ``AutoModel``."""
    transformers = require_transformers()
    names = getattr(config, "architectures", None) or [""]
    found = getattr(transformers, str(names[0]), None)
    if inspect.isclass(found) and issubclass(found, transformers.PreTrainedModel):
        return found
    return transformers.AutoModel


def load_checked(
    model_class: Any, config: "PretrainedConfig", folder: Path, **options: Any
) -> "PreTrainedModel":
    """Return the model in a folder, in evaluation mode and with every weight finite.

    Args:
        model_class: A model class of transformers, or one of its ``Auto`` classes.
        config: What ``read_config`` returned.
        folder: The folder.
        options: More arguments of ``from_pretrained``.
    """
    with loading_errors(f"The model in {folder}"):
        with torch.device("meta"):  # a wrong number may ask for any amount of memory
            check_size(random_model(model_class, config), folder)
        model, info = model_class.from_pretrained(
            folder, config=config, use_safetensors=True, output_loading_info=True, **options, **SAFE
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise ConversionError(
            f"The weights in {folder} lack {len(missing)} tensors of {type(model).__name__}, such "
            f"as {missing[0]!r}; save the whole model again."
        )
    check_weights(model, f"The weights in {folder}")
    return cast("PreTrainedModel", model.eval())


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerBase | None":
    """Return the tokenizer in a folder; ``None`` if there is none."""
    if not any(folder.glob("tokenizer*")) and not any(folder.glob("vocab*")):
        return None
    transformers = require_transformers()
    with loading_errors(f"The tokenizer in {folder}"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **SAFE)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        tokenizer("a")  # damage of some parts shows only now
        return tokenizer
