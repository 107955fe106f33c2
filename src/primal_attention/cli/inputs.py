"""The model folder and the inputs that ``primal convert`` and ``primal analyze`` share."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from primal_attention.support.command import UserError, progress
from primal_attention.support.settings import at_least_one

if TYPE_CHECKING:
    from torch import Tensor

    from primal_attention.surgery.loading import LoadedModel

__all__ = [
    "ModelInputs",
    "ModelSource",
    "check_samples",
    "load",
    "one_sentence",
    "read_batches",
    "read_documents",
    "read_texts",
]


_AT_ONCE = 2048
"""Most tokens of a batch of long inputs."""


@dataclass(frozen=True)
class ModelSource:
    """A folder with a model, and a file of inputs."""

    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Folder of the model: of Hugging Face, of primal convert, or of primal train."""
    data: Path | None = None
    """Text file with one input a line, blank lines left out, or file .npz or .safetensors whose
    arrays are the arguments of the model's forward. By default passages of the Python reference
    manual are used."""
    batch_size: int = 4
    """Inputs to run at once."""
    threads: int = 1
    """Threads of torch."""
    overwrite: bool = False
    """Replace the folder --out if this command wrote it."""

    def __post_init__(self) -> None:
        at_least_one(self, "batch_size", "threads")

    @property
    def source(self) -> str:
        """What the model is measured on, in words."""
        return "passages of the Python reference manual" if self.data is None else str(self.data)

    @property
    def has_arrays(self) -> bool:
        """Whether the file holds arrays, not texts."""
        return self.data is not None and self.data.suffix in (".npz", ".safetensors")


@dataclass(frozen=True)
class ModelInputs(ModelSource):
    """A folder with a model, and how many inputs of a file to measure it on."""

    samples: int = 32
    """Largest number of inputs."""
    tokens: int = 128
    """Longest text; more tokens are cut off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "tokens")
        check_samples(self.samples)


def check_samples(samples: int) -> None:
    """Raise if there are too few inputs to split them."""
    if samples < 2:
        raise ValueError(f"samples must be at least 2, got {samples}.")


@contextmanager
def one_sentence() -> Iterator[None]:
    """Print errors about the model, its files and its inputs as one sentence, with exit code 2."""
    try:
        yield
    except (ValueError, ImportError) as error:
        raise UserError(" ".join(str(error).split())) from error


def load(options: ModelSource, *, original: Path | None = None) -> "LoadedModel":
    """Return the model, with torch set up and the messages of transformers switched off."""
    import torch

    from primal_attention.hosts.optional import quiet_transformers
    from primal_attention.surgery.loading import load_any

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    with one_sentence():
        quiet_transformers()
        progress(f"loading {options.model}")
        return load_any(options.model, original=original)


def read_batches(options: ModelInputs, loaded: "LoadedModel") -> "list[dict[str, Tensor]]":
    """Return at least two batches of inputs, one text each."""
    return read_texts(options, loaded, tokens=options.tokens, samples=options.samples)


def read_texts(
    options: ModelSource, loaded: "LoadedModel", *, tokens: int, samples: int
) -> "list[dict[str, Tensor]]":
    """Return at least two batches of inputs, one text each, cut to so many tokens."""
    from primal_attention.surgery.loading import sample_texts, text_batches

    with one_sentence():
        if options.has_arrays:
            batches = _arrays(options, loaded, samples)
        else:
            texts = (
                sample_texts(samples) if options.data is None else _lines(options.data)[:samples]
            )
            # two batches are the least that can be split into one to fit and one to test
            size = max(min(options.batch_size, len(texts) // 2), 1)
            batches = text_batches(loaded, texts, tokens=tokens, batch_size=size)
    return _checked(options, loaded, batches)


def read_documents(
    options: ModelSource, loaded: "LoadedModel", *, tokens: int, samples: int, least: int
) -> "list[dict[str, Tensor]]":
    """Return batches of inputs of so many tokens: texts are joined until they are long enough.

    Args:
        options: Where the texts are.
        loaded: The model.
        tokens: Tokens of an input, at most as many as the model takes.
        samples: Largest number of inputs.
        least: Number of batches that are wanted.
    """
    from primal_attention.surgery.loading import document_batches, sample_texts

    with one_sentence():
        if options.has_arrays:
            batches = _arrays(options, loaded, samples)
        else:
            batches = document_batches(
                loaded,
                # all passages, in order
                sample_texts(sys.maxsize) if options.data is None else _lines(options.data),
                tokens=tokens,
                count=samples,
                least=least,
                batch_size=max(min(options.batch_size, _AT_ONCE // tokens), 1),
            )
    return _checked(options, loaded, batches)


def _arrays(options: ModelSource, loaded: "LoadedModel", samples: int) -> "list[dict[str, Tensor]]":
    from primal_attention.surgery.loading import file_batches

    batches = file_batches(loaded.model, str(options.data), batch_size=options.batch_size)
    return batches[: -(-samples // options.batch_size)]


def _checked(
    options: ModelSource, loaded: "LoadedModel", batches: "list[dict[str, Tensor]]"
) -> "list[dict[str, Tensor]]":
    """Return the batches; raise if they are too few or the model cannot read them."""
    from primal_attention.surgery.loading import check_answer

    if len(batches) < 2:
        raise UserError(
            f"{options.source} gives {len(batches)} batch of inputs, and two are needed: one to "
            "fit and one to test; give more inputs or a smaller --batch-size."
        )
    with one_sentence():
        check_answer(loaded.model, batches[0])
    return batches


def _lines(path: Path) -> list[str]:
    from primal_attention.support.files import read_lines

    # samples to measure on, where blank lines part paragraphs; no result is counted by line
    return [line.strip() for line in read_lines(path) if line.strip()]
