"""The model folder and the inputs that ``primal convert`` and ``primal analyze`` share."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from primal_attention.support.command import UserError, progress

if TYPE_CHECKING:
    from torch import Tensor

    from primal_attention.surgery.loading import LoadedModel

__all__ = ["ModelInputs", "load", "one_sentence", "read_batches"]


@dataclass(frozen=True)
class ModelInputs:
    """A folder with a model, and inputs to measure it on."""

    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Folder of the model: of Hugging Face, of primal convert, or of primal train."""
    data: Path | None = None
    """Text file with one input a line, blank lines left out, or file .npz or .safetensors whose
    arrays are the arguments of the model's forward. By default passages of the Python reference
    manual are used."""
    samples: int = 32
    """Largest number of inputs."""
    tokens: int = 128
    """Longest text; more tokens are cut off."""
    batch_size: int = 4
    """Inputs to run at once."""
    threads: int = 1
    """Threads of torch."""
    overwrite: bool = False
    """Replace the folder --out if this command wrote it."""

    def __post_init__(self) -> None:
        for name in ("tokens", "batch_size", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.samples < 2:
            raise ValueError(f"samples must be at least 2, got {self.samples}.")

    @property
    def source(self) -> str:
        """What the model is measured on, in words."""
        return "passages of the Python reference manual" if self.data is None else str(self.data)


@contextmanager
def one_sentence() -> Iterator[None]:
    """Print errors about the model, its files and its inputs as one sentence, with exit code 2."""
    try:
        yield
    except (ValueError, ImportError) as error:
        raise UserError(" ".join(str(error).split())) from error


def load(options: ModelInputs, *, original: Path | None = None) -> "LoadedModel":
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
    """Return at least two batches of inputs."""
    from primal_attention.surgery.loading import (
        check_answer,
        file_batches,
        sample_texts,
        text_batches,
    )

    with one_sentence():
        if options.data is not None and options.data.suffix in (".npz", ".safetensors"):
            batches = file_batches(loaded.model, options.data, batch_size=options.batch_size)
            batches = batches[: -(-options.samples // options.batch_size)]
        else:
            texts = (
                sample_texts(options.samples)
                if options.data is None
                else _lines(options.data)[: options.samples]
            )
            # two batches are the least that can be split into one to fit and one to test
            size = max(min(options.batch_size, len(texts) // 2), 1)
            batches = text_batches(loaded, texts, tokens=options.tokens, batch_size=size)
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
