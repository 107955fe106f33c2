"""Load a model from a folder, and inputs for it from files. Nothing is downloaded or unpickled."""

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from primal_attention import models
from primal_attention.hosts import Batch, ConversionError, run_batch
from primal_attention.hosts.recording import find_tensor
from primal_attention.support.command import UserError
from primal_attention.support.files import read_arrays, read_json, read_tensors
from primal_attention.support.randomness import isolated
from primal_attention.surgery.folders import (
    check_weights,
    find_class,
    load_checked,
    load_tokenizer,
    read_config,
)
from primal_attention.surgery.positions import position_limit
from primal_attention.surgery.storage import load_converted, read_conversion
from primal_attention.training.evaluation import eval_mode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "LoadedModel",
    "check_answer",
    "document_batches",
    "file_batches",
    "load_any",
    "sample_texts",
    "text_batches",
]

Batches = list[dict[str, Tensor]]
_SHORTEST = 8
"""Fewest words of a document."""


@dataclass(frozen=True)
class LoadedModel:
    """A model from a folder."""

    model: nn.Module
    folder: Path
    """Where its ``config.json`` is."""
    tokenizer: "PreTrainedTokenizerBase | None" = None
    """Tokenizer of transformers, if the folder has one."""


def load_any(folder: str | Path, *, original: str | Path | None = None) -> LoadedModel:
    """Return the model in a folder, in evaluation mode.

    Args:
        folder: A model of transformers, a model of this library, a folder of ``primal train``, or
            a folder of ``save_converted``.
        original: For ``save_converted``: the folder of the original model, if it was moved.

    Raises:
        ConversionError: If there is no such model, or it cannot be loaded.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConversionError(
            f"{folder} is not a folder; give a folder with a model. Models are not downloaded."
        )
    if (folder / "conversion.json").is_file():
        return _load_conversion(folder, original)
    if not (folder / "config.json").is_file() and (folder / "model").is_dir():
        folder = folder / "model"
    if not (folder / "config.json").is_file():
        raise ConversionError(f"{folder} holds no model: it has no config.json.")
    try:
        content = read_json(folder / "config.json")
    except UserError as error:
        raise ConversionError(str(error)) from error
    if "model_type" in content:
        return _load_transformers(folder)
    model = _load_own(folder)
    check_weights(model, f"The weights in {folder}")
    return LoadedModel(model, folder)


def _load_own(folder: Path) -> nn.Module:
    """Return a model of this library, such as ``primal train`` saves."""
    for name in models.__all__:
        getattr(models, name)  # a class is known to from_pretrained once it is imported
    return models.PretrainedModel.from_pretrained(folder)


def _load_conversion(folder: Path, original: str | Path | None) -> LoadedModel:
    content, _ = read_conversion(folder)
    source = Path(original or str(content["source"]))
    if str(source) == "." or not source.is_dir():
        raise ConversionError(
            f"{folder} holds converted layers only, and the original model is not in "
            f"{str(content['source']) or 'a known folder'}; give its folder with --original."
        )
    loaded = load_any(source)
    load_converted(loaded.model, folder)
    return loaded


def _load_transformers(folder: Path) -> LoadedModel:
    config = read_config(folder)
    model = load_checked(find_class(config), config, folder, dtype=torch.float32)
    return LoadedModel(model, folder, load_tokenizer(folder))


@torch.no_grad()
def check_answer(model: nn.Module, batch: Batch) -> None:
    """Raise if the model's output on a batch is not finite: then no measurement means anything.

    Finite weights do not ensure this: a large one makes the output overflow.
    """
    with eval_mode(model), isolated():
        output = run_batch(model, batch)
    answer = find_tensor(getattr(output, "logits", output))
    if answer is not None and not bool(answer.isfinite().all()):
        raise ConversionError(
            f"The output of {type(model).__name__} holds NaN or infinity on the first inputs, so "
            "nothing can be measured. Its weights are damaged, or the inputs are far from those of "
            "its training; save the model again, or give other inputs."
        )


def sample_texts(count: int, words: int = 80) -> list[str]:
    """Return English texts of about ``words`` words, from the reference manual inside Python.

    Example:
        >>> len(sample_texts(3))
        3
    """
    from pydoc_data.topics import topics

    found: list[str] = []
    text: list[str] = []
    for topic in sorted(topics):
        # indented paragraphs are code
        paragraphs = [p for p in topics[topic].split("\n\n") if p and not p.startswith(" ")]
        for word in re.sub(r"[*\"|=~-]{2,}|\"", "", " ".join(paragraphs)).split():
            text.append(word)
            if len(text) >= words:
                found.append(" ".join(text))
                text = []
    # spread over all topics
    step = max(len(found) // count, 1)
    return found[::step][:count]


def text_batches(
    loaded: LoadedModel, texts: Sequence[str], *, tokens: int, batch_size: int
) -> Batches:
    """Return texts as batches of the model's inputs, cut to ``tokens`` tokens each."""
    if loaded.tokenizer is None:
        raise ConversionError(
            "The folder of the model has no tokenizer, so texts cannot be read; give its inputs "
            "with --data."
        )
    takes = inspect.signature(loaded.model.forward).parameters
    limit = position_limit(loaded.model)
    tokens = tokens if limit is None else min(tokens, limit)
    batches = []
    for start in range(0, len(texts), batch_size):
        found = loaded.tokenizer(
            list(texts[start : start + batch_size]),
            padding=True,
            truncation=True,
            max_length=tokens,
            return_tensors="pt",
        )
        batches.append({key: value for key, value in found.items() if key in takes})
    return batches


def document_batches(
    loaded: LoadedModel,
    texts: Sequence[str],
    *,
    tokens: int,
    count: int,
    batch_size: int,
    least: int = 2,
) -> Batches:
    """Return documents of ``tokens`` tokens as batches of the model's inputs.

    Texts are joined until a document is long enough. If they do not suffice, documents are shorter,
    but not shorter than eight words.

    Args:
        loaded: The model and its tokenizer.
        texts: The texts, in order.
        tokens: Tokens of a document, at most as many as the model takes.
        count: Most documents.
        batch_size: Most documents in a batch.
        least: Batches to make at least, if the texts suffice.
    """
    # a word has at least one token, so this many words of every document suffice
    words = " ".join(texts).split()
    size = max(min(tokens, len(words) // least), _SHORTEST)
    documents = [" ".join(words[i : i + size]) for i in range(0, len(words), size)]
    if len(words) % size and len(documents) > least:
        documents.pop()  # the last one is shorter
    documents = documents[:count]
    each = max(min(batch_size, len(documents) // least), 1)
    return text_batches(loaded, documents, tokens=tokens, batch_size=each)


def file_batches(model: nn.Module, path: str | Path, *, batch_size: int) -> Batches:
    """Return the arrays of an .npz or .safetensors file as batches of the model's inputs.

    Each array is one argument of the model's forward, and its first axis counts sequences.
    """
    path = Path(path)
    if path.suffix not in (".npz", ".safetensors"):
        raise ConversionError(f"{path} must be an .npz or a .safetensors file.")
    try:
        if path.suffix == ".npz":
            arrays = {name: torch.from_numpy(a) for name, a in read_arrays(path).items()}
        else:
            arrays = read_tensors(path)
    except UserError as error:
        raise ConversionError(str(error)) from error
    except TypeError as error:  # an array of words is no tensor
        raise ConversionError(f"{path} cannot be read: {error}") from error
    takes = inspect.signature(model.forward).parameters
    unknown = [name for name in arrays if name not in takes]
    if unknown or not arrays:
        raise ConversionError(
            f"{path} holds {unknown[0]!r}, which {type(model).__name__} does not take; name arrays "
            f"like its arguments: {', '.join(list(takes)[:6])}."
            if unknown
            else f"{path} holds no array."
        )
    sizes = {name: len(array) if array.dim() else 0 for name, array in arrays.items()}
    count = min(sizes.values())
    if count != max(sizes.values()) or not count:
        raise ConversionError(f"The arrays in {path} must have one number of rows, got {sizes}.")
    return [
        {name: array[start : start + batch_size] for name, array in arrays.items()}
        for start in range(0, count, batch_size)
    ]
