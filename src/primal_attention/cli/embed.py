"""``primal embed``: a file of texts in, a Parquet file of their vectors out."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from primal_attention.cli.inputs import one_sentence
from primal_attention.support.command import UserError, progress
from primal_attention.support.output import is_same_place
from primal_attention.support.settings import parse

__all__ = ["main"]


@dataclass(frozen=True)
class Embed:
    """Write one vector a text, long texts whole, with any encoder of Hugging Face.

    A run that was stopped goes on when the same command is given again.
    """

    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Folder of the model: of Hugging Face, of sentence-transformers, or of primal convert."""
    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """Texts: .txt with one a line, or a table .jsonl, .csv, .tsv or .parquet."""
    out: Path = field(kw_only=True)
    """File to write, .parquet: the columns row, those of --keep, tokens and vector."""
    column: str = "text"
    """Column of the texts."""
    keep: tuple[str, ...] = ()
    """Other columns to write beside the vectors, such as id."""
    attention: Literal["adaptive"] | None = None
    """Read far tokens of long texts in part; by default the attention that the model has."""
    extend: int | None = None
    """Positions to give to the model, if it has fewer; this changes vectors of short texts, too."""
    chunk: Literal["average"] | None = None
    """Embed texts that are longer than the model's positions in pieces, and average them."""
    batch_tokens: int = 8192
    """Most tokens of a batch of several texts; fewer take less memory."""
    threads: int | None = None
    """Threads of torch; by default as many as torch takes."""
    original: Path | None = None
    """For a folder of primal convert: the original model, if it was moved."""
    overwrite: bool = False
    """Replace the file --out."""

    def __post_init__(self) -> None:
        if self.batch_tokens < 1:
            raise ValueError(f"batch_tokens must be at least 1, got {self.batch_tokens}.")
        if self.extend is not None and self.extend < 1:
            raise ValueError(f"extend must be at least 1, got {self.extend}.")
        if self.out.suffix.lower() != ".parquet":
            raise ValueError(f"out must end in .parquet, got {self.out.name!r}; rename it.")


def main(argv: list[str]) -> int:
    """Embed, and say how much and how fast."""
    options = parse(Embed, argv, prog="primal embed")
    _check_out(options)

    import torch

    from primal_attention.hosts.optional import quiet_transformers
    from primal_attention.surgery.embedding import Embedder, embed_file

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    quiet_transformers()
    with one_sentence():
        progress(f"loading {options.model}")
        embedder = Embedder(
            options.model,
            attention=options.attention,
            extend=options.extend,
            chunk=options.chunk,
            batch_tokens=options.batch_tokens,
            original=options.original,
        )
        done = embed_file(
            embedder,
            options.file,
            options.out,
            column=options.column,
            keep=options.keep,
            report=progress,
        )
    print(
        f"Wrote {done.texts:,} vectors of {embedder.dim} numbers to {options.out}: "
        f"{done.tokens:,} tokens, {done.tokens_per_second:,.0f} a second."
    )
    return 0


def _check_out(options: Embed) -> None:
    """Raise if the file to write must not be written."""
    if options.out.is_dir():
        raise UserError(f"--out {options.out} is a folder; name a file that ends in .parquet.")
    if is_same_place(options.out, options.file):
        raise UserError(f"--out would replace {options.file}, the file to read; choose another.")
    if options.out.exists() and not options.overwrite:
        raise UserError(f"--out {options.out} is there; name another file or add --overwrite.")
