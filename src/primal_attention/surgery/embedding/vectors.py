"""A file of texts in, a Parquet file of vectors out: bounded memory, and nothing is done twice.

The texts are read once to count tokens, then window by window. Every window becomes a complete file
in the folder ``OUT.parts``. A run that was stopped finds them and goes on; at the end they become
the row groups of one file. Which texts make a window depends on the texts alone, so that a resumed
run computes the same batches, and the same bits, as one that was never stopped.
"""

import hashlib
import json
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from primal_attention.support.command import UserError, needs, user_errors
from primal_attention.support.files import TextRow, locked, open_bytes, read_json, read_text_rows
from primal_attention.support.files.parquet import join_parquet, parquet_types, write_parquet
from primal_attention.support.files.tables import ending
from primal_attention.support.output import remove_folder, to_json, write_atomically
from primal_attention.surgery.embedding.embedder import Embedder
from primal_attention.surgery.embedding.memory import free_bytes

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Embedded", "embed_file"]

_OWN = ("row", "tokens", "vector")
"""Columns of every file of vectors."""


class Embedded(NamedTuple):
    """What :func:`embed_file` has done."""

    texts: int
    tokens: int
    """Of all texts, special tokens included."""
    tokens_per_second: float
    """Of the windows that this call has embedded; zero if all were there."""


class _Texts(NamedTuple):
    """What one pass over a file tells."""

    lengths: np.ndarray
    """Tokens of every text."""
    types: "list[pa.DataType]"
    """Types of the columns to keep."""
    windows: list[int]
    """Texts of every window."""


def embed_file(
    embedder: Embedder,
    path: str | Path,
    out: str | Path,
    *,
    column: str = "text",
    keep: Sequence[str] = (),
    report: Callable[[str], None] = print,
) -> Embedded:
    """Write the vectors of the texts of a file, and go on where a stopped call left off.

    The file ``out`` has the columns ``row`` (from 0), those to keep, ``tokens`` and ``vector``.

    Args:
        embedder: The model.
        path: A ``.txt`` file with one text a line, or a table ``.jsonl``, ``.csv``, ``.tsv`` or
            ``.parquet``.
        out: File to write, ``.parquet``.
        column: Column of the texts.
        keep: Other columns to write beside the vectors.
        report: Called with lines about the work: memory before it starts, then progress.

    Raises:
        UserError: If the file cannot be read, a text is too long, the memory does not suffice, or
            another run has left parts of other vectors.
    """
    path, out = Path(path), Path(out)
    with needs("tables", "Writing vectors"):
        import pyarrow  # noqa: F401
    twice = [name for name in keep if name in _OWN or list(keep).count(name) > 1]
    if twice:
        raise UserError(
            f"--keep has {twice[0]!r}, which is given twice or a column of every file of vectors "
            f"({', '.join(_OWN)}); leave it out, or rename it in {path}."
        )
    texts = _count(embedder, path, column, keep)
    _check_memory(embedder, texts, report)
    parts = out.with_name(f"{out.name}.parts")
    with locked(parts):
        _check_settings(parts / "settings.json", _settings(embedder, path, column, keep))
        speed = _write_parts(embedder, path, parts, texts, column, keep, report)
        join_parquet([_part(parts, number) for number in range(len(texts.windows))], out)
        remove_folder(parts)
    return Embedded(len(texts.lengths), int(texts.lengths.sum()), speed)


def _count(embedder: Embedder, path: Path, column: str, keep: Sequence[str]) -> _Texts:
    """Read a file once: tokens of every text, and types of the columns to keep."""
    kinds: list[set[type]] = [set() for _ in keep]

    def texts() -> Iterator[str]:
        for row in read_text_rows(path, column, keep):
            for found, value in zip(kinds, row.kept, strict=True):
                found.add(type(value))
            yield row.text

    with user_errors(str(path), ValueError):
        lengths = np.fromiter(map(len, embedder.tokenize(texts())), np.int32)
    if not len(lengths):
        raise UserError(f"{path} has no texts, and at least one is needed; give another file.")
    types = _stored_types(path, keep) or [_arrow_type(found) for found in kinds]
    return _Texts(lengths, types, list(embedder.windows(lengths.tolist())))


def _stored_types(path: Path, keep: Sequence[str]) -> "list[pa.DataType] | None":
    """Return the types of columns of a Parquet file; none for other files."""
    return parquet_types(path, keep) if ending(path) == ".parquet" else None


def _arrow_type(kinds: set[type]) -> "pa.DataType":
    """Return the type for values of these kinds; words where they are mixed."""
    import pyarrow as pa

    kinds = kinds - {type(None)}
    if kinds == {bool}:
        return pa.bool_()
    if kinds and kinds <= {int, float}:
        return pa.int64() if kinds == {int} else pa.float64()
    return pa.string()


def _check_memory(embedder: Embedder, texts: _Texts, report: Callable[[str], None]) -> None:
    """Say how much memory the work takes at most, and raise if there is less."""
    longest = int(texts.lengths.max())
    bound = embedder.memory(longest)
    fits = min(longest, embedder.max_tokens or longest)
    needed, free = bound.batch(fits, embedder.batch_tokens), free_bytes()
    words = (
        f"{len(texts.lengths):,} texts of {texts.lengths.min():,} to {longest:,} tokens, "
        f"{texts.lengths.sum():,} in all; a batch takes at most {_size(needed)} beside the model"
    )
    report(words + ("" if free is None else f", and {_size(free)} are free"))
    if free is not None and needed > free:
        raise UserError(
            f"a batch takes up to {_size(needed)}, and {_size(free)} are free. Give a smaller "
            "--batch-tokens; for long texts, embed pieces of them (--chunk average), or take an "
            "attention that needs less (--attention adaptive)."
        )


def _size(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{max(count / 1e6, 1):.0f} MB"


def _settings(
    embedder: Embedder, path: Path, column: str, keep: Sequence[str]
) -> dict[str, object]:
    """Return all that decides the bits of the vectors, as plain values."""
    weights = 0
    for name, tensor in sorted(embedder.model.state_dict().items()):
        raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        weights = zlib.crc32(raw, zlib.crc32(name.encode(), weights))
    digest = hashlib.sha256()
    with open_bytes(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {
        "model": f"{type(embedder.model).__name__} {weights:08x}",
        "texts": digest.hexdigest(),
        "column": column,
        "keep": list(keep),
        "attention": embedder.attention,
        "pooling": [*embedder.pooling.modes, embedder.pooling.is_unit],
        "chunk": embedder.chunk,
        "batch tokens": embedder.batch_tokens,
        "positions": embedder.max_tokens,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _check_settings(path: Path, settings: dict[str, object]) -> None:
    """Write the settings of the parts of a new run; raise if there are parts of another."""
    if path.exists():
        before = read_json(path)
        different = [name for name in settings if before.get(name) != settings[name]]
        if different:
            raise UserError(
                f"{path.parent} holds parts of a run with another value of {different[0]!r}: "
                f"{before.get(different[0])}, now {settings[different[0]]}. Vectors of one file "
                "come from one model and one setting; repeat the options of that run, or remove "
                "the folder to begin again."
            )
    write_atomically(path, to_json(settings))


def _write_parts(
    embedder: Embedder,
    path: Path,
    parts: Path,
    texts: _Texts,
    column: str,
    keep: Sequence[str],
    report: Callable[[str], None],
) -> float:
    """Embed the windows that have no file yet; return tokens per second."""
    rows = read_text_rows(path, column, keep)
    done = tokens = 0
    total, started = int(texts.lengths.sum()), time.monotonic()
    missing = [w for w in range(len(texts.windows)) if not _part(parts, w).exists()]
    if len(missing) < len(texts.windows):
        report(f"{len(texts.windows) - len(missing)} of {len(texts.windows)} parts are there")
    left, speed = len(missing), 0.0
    for number, count in enumerate(texts.windows):
        window = list(islice(rows, count))
        lengths = texts.lengths[done : done + count]
        if not _part(parts, number).exists():
            _write_part(_part(parts, number), embedder, window, done, keep, texts)
            tokens += int(lengths.sum())
            speed, left = tokens / (time.monotonic() - started), left - 1
            rest = total - int(texts.lengths[: done + count].sum())
            minutes = f", about {rest / speed / 60:.0f} min left" if left else ""
            report(
                f"{done + count:,} of {len(texts.lengths):,} texts, {speed:,.0f} tokens per "
                f"second{minutes}"
            )
        done += count
    return speed


def _part(parts: Path, number: int) -> Path:
    return parts / f"{number:06d}.parquet"


def _write_part(
    path: Path,
    embedder: Embedder,
    window: Sequence[TextRow],
    first: int,
    keep: Sequence[str],
    texts: _Texts,
) -> None:
    import pyarrow as pa

    ids = list(embedder.tokenize((row.text for row in window), first=first + 1))
    vectors = embedder.encode_tokens(ids)
    columns = {"row": pa.array(range(first, first + len(window)), pa.int64())}
    for place, (name, kind) in enumerate(zip(keep, texts.types, strict=True)):
        values = [row.kept[place] for row in window]
        columns[name] = pa.array(_words(values) if pa.types.is_string(kind) else values, kind)
    columns["tokens"] = pa.array(map(len, ids), pa.int32())
    columns["vector"] = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), embedder.dim)
    write_parquet(path, columns)


def _words(values: Sequence[object]) -> list[str | None]:
    """Return values as words: those that are none as JSON."""
    return [v if v is None or isinstance(v, str) else json.dumps(v) for v in values]
