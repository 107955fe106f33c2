"""Readers of byte-level text, pairs of texts and grey pictures, as in Long Range Arena.

Text is a sequence of bytes, each raised by one so that zero stays free for padding; only the first
4,000 bytes count. Pictures are sequences of grey values, row by row.
"""

import ast
import io
import json
import lzma
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from primal_attention.command import needs
from primal_attention.tasks.files import TABLE_SUFFIXES, read_table, take_column
from primal_attention.tasks.longrange.listops import (
    ListOpsConfig,
    encode,
    generate_listops,
    read_listops,
)
from primal_attention.tasks.longrange.pathfinder import generate_pathfinder
from primal_attention.tasks.longrange.sequences import PairSequences, TokenSequences
from primal_attention.tasks.longrange.settings import Kind, TokenSettings

__all__ = [
    "Tokens",
    "data_root",
    "encode_bytes",
    "load_tokens",
    "read_aan",
    "read_cifar10",
    "read_imdb",
    "read_tokens",
]

Tokens = TokenSequences | PairSequences

_GREY = np.array([0.2989, 0.5870, 0.1140])
"""How much red, green and blue count."""


def encode_bytes(text: str | bytes, length: int = 4000) -> np.ndarray:
    """Return the first ``length`` bytes of a text as ids from 1 to 256.

    Example:
        >>> encode_bytes("Aé")
        array([ 66, 196, 170], dtype=uint16)
    """
    data = text.encode() if isinstance(text, str) else text
    return np.frombuffer(data[:length], np.uint8).astype(np.uint16) + np.uint16(1)


def read_imdb(path: Path, *, length: int = 4000) -> TokenSequences:
    """Read movie reviews, one JSON object with ``text`` and ``label`` a line, plain or ``.xz``.

    Args:
        path: ``train.jsonl.xz`` or ``test.jsonl.xz``.
        length: Bytes to keep of each review.
    """
    path = Path(path)
    rows, labels = [], []
    opened = lzma.open if path.suffix == ".xz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                item = json.loads(line)
                text, label = item["text"], item["label"]
            except (ValueError, KeyError, TypeError):
                raise ValueError(
                    f"{path}, line {number}: expected a JSON object with 'text' and 'label', got "
                    f"{line[:60]!r}."
                ) from None
            rows.append(encode_bytes(text, length))
            labels.append(int(label))
    return TokenSequences.pack(rows, labels, np.uint16)


def read_cifar10(path: Path, *, limit: int | None = None, seed: int = 0) -> TokenSequences:
    """Read CIFAR-10 as sequences of 1,024 grey values, from JPEG files joined in an ``.npz``.

    Args:
        path: ``train_jpeg.npz`` or ``test_jpeg.npz``, with ``data``, ``offsets`` and ``labels``.
        limit: Decode only so many, drawn without replacement; the files are sorted by class.
        seed: Seed of that draw.
    """
    with needs("vision", "Reading pictures"):
        from PIL import Image

    with np.load(path, allow_pickle=False) as file:
        missing = {"data", "offsets", "labels"} - set(file.files)
        if missing:
            raise ValueError(f"{path} lacks {sorted(missing)}; it holds {sorted(file.files)}.")
        data, offsets, labels = file["data"], file["offsets"], file["labels"]
    chosen = np.arange(len(labels))
    if limit is not None:
        chosen = np.random.default_rng(seed).permutation(len(labels))[:limit]

    def pixels() -> Iterator[np.ndarray]:
        for i in chosen:
            jpeg = data[offsets[i] : offsets[i + 1]].tobytes()
            yield (np.asarray(Image.open(io.BytesIO(jpeg))) @ _GREY).astype(np.uint8).reshape(-1)

    return TokenSequences.pack(pixels(), labels[chosen])


def read_aan(path: Path, *, length: int = 4000) -> PairSequences:
    """Read pairs of papers, of which class 1 cites the other: Long Range Arena's Retrieval.

    A line has five fields separated by tabs: label (``0.0`` or ``1.0``), two identifiers, and two
    texts, either plain or written as Python bytes (``b'…'``), as the released files have them.

    Args:
        path: ``new_aan_pairs.train.tsv``, ``….eval.tsv`` or ``….test.tsv``.
        length: Bytes to keep of each text.
    """
    labels: list[int] = []
    sides: tuple[list[Any], list[Any]] = ([], [])
    with open(path, encoding="utf-8", newline="\n") as file:
        for number, line in enumerate(file, 1):
            fields = line.rstrip("\n").split("\t")
            if len(fields) != 5 or fields[0] not in ("0", "1", "0.0", "1.0"):
                raise ValueError(
                    f"{path}, line {number}: expected label, two identifiers and two texts "
                    f"separated by tabs, got {len(fields)} fields: {line[:60]!r}."
                )
            labels.append(int(float(fields[0])))
            for side, text in zip(sides, fields[3:], strict=True):
                side.append(encode_bytes(_as_bytes(text), length))
    first, second = (TokenSequences.pack(side, labels, np.uint16) for side in sides)
    return PairSequences(first, second)


def _as_bytes(text: str) -> bytes:
    if text[:2] in ("b'", 'b"') and text[-1:] == text[1]:
        try:
            value = ast.literal_eval(text)
        except (SyntaxError, ValueError):
            return text.encode()
        return value if isinstance(value, bytes) else text.encode()
    return text.encode()


def data_root() -> Path:
    """Return the folder of ``PRIMAL_DATA``, which holds ``text/imdb`` and ``vision/cifar-10``."""
    if "PRIMAL_DATA" not in os.environ:
        raise ValueError(
            "texts, pairs and pictures are read from the folder in the environment variable "
            "PRIMAL_DATA, which is not set; set it, or give data.train and data.test."
        )
    return Path(os.environ["PRIMAL_DATA"])


def load_tokens(settings: TokenSettings, part: str) -> Tokens:
    """Return one part of a known set: generated, or read from the folder of ``PRIMAL_DATA``."""
    size = settings.train_size if part == "train" else settings.test_size
    if settings.kind in ("listops", "pathfinder"):
        count = size or {"train": 10_000, "test": 1_000}[part]
        # a few are done before another process has started
        workers = (os.cpu_count() or 1) if count > 5_000 else 1
        if settings.kind == "pathfinder":
            return generate_pathfinder(count, split=part, seed=settings.seed, workers=workers)
        longest = settings.length or 2000
        config = ListOpsConfig(min_length=min(500, max(longest // 4, 1)), max_length=longest)
        return generate_listops(
            count, split=part, seed=settings.seed, config=config, workers=workers
        )
    root = data_root()
    if settings.kind == "text":
        return read_imdb(root / "text" / "imdb" / f"{part}.jsonl.xz")
    if settings.kind == "retrieval":
        return read_aan(root / "text" / "aan" / f"new_aan_pairs.{part}.tsv")
    return read_cifar10(root / "vision" / "cifar-10" / f"{part}_jpeg.npz", limit=size)


def read_tokens(
    kind: Kind, path: Path, *, labelled: bool, text: str = "text", target: str = "label"
) -> Tokens:
    """Return the sequences of a file.

    Args:
        kind: Kind of sequence.
        path: Text: ``.jsonl`` (``.xz``), ``.csv``, ``.tsv`` or ``.parquet``, or ``.txt`` with one
            text a line. ListOps: ``.tsv`` (``.gz``), or one expression a line. Pairs: ``.tsv``, or
            two texts separated by a tab a line. Pictures, and all kinds as saved by us: ``.npz``.
        labelled: Whether labels are needed; otherwise those in the file are ignored.
        text: Tables: column of the texts.
        target: Tables: column of the classes.
    """
    suffixes = path.suffixes
    if kind == "retrieval":
        return read_aan(path) if labelled or ".tsv" in suffixes else _read_pairs(path)
    if kind == "text" and ".jsonl" in suffixes:
        return read_imdb(path)
    if kind == "text" and path.suffix in TABLE_SUFFIXES:
        return _read_frame(path, labelled, text, target)
    if kind == "listops" and ".tsv" in suffixes:
        return read_listops(path)
    if path.suffix == ".npz":
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            is_jpeg = "data" in file.files
        return read_cifar10(path) if kind == "image" and is_jpeg else TokenSequences.load(path)
    if kind not in ("text", "listops") or labelled:
        kinds = {"text": "a .jsonl or .csv with text and label", "listops": "a .tsv"}
        raise ValueError(
            f"labelled data of the kind {kind} are read from {kinds.get(kind, 'an .npz')}."
        )
    lines = _lines(path)
    if kind == "listops":
        return TokenSequences.pack([encode(line) for line in lines], [0] * len(lines))
    return _pack_texts(lines)


def _read_frame(path: Path, labelled: bool, text: str, target: str) -> TokenSequences:
    frame = read_table(path)
    texts = [str(value) for value in take_column(frame, text, path, "text")]
    if not labelled:
        return _pack_texts(texts)
    return _pack_texts(texts, [int(v) for v in take_column(frame, target, path, "target")])


def _read_pairs(path: Path) -> PairSequences:
    rows = [line.split("\t") for line in _lines(path)]
    for number, row in enumerate(rows, 1):
        if len(row) != 2:
            raise ValueError(f"pair {number}: expected two texts and a tab, got {len(row)} fields.")
    return PairSequences(*(_pack_texts([row[i] for row in rows]) for i in range(2)))


def _lines(path: Path) -> list[str]:
    # only line feeds end a line; str.splitlines knows ten other characters
    lines = (line.rstrip("\r") for line in path.read_text("utf-8").split("\n"))
    return [line for line in lines if line.strip()]


def _pack_texts(texts: list[str], labels: list[int] | None = None) -> TokenSequences:
    rows = [encode_bytes(text) for text in texts]
    return TokenSequences.pack(rows, labels or [0] * len(rows), np.uint16)
