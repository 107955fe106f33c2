"""Byte-level text, pairs of texts and grey pictures, as Long Range Arena reads them.

Text is a sequence of bytes, each raised by one so that zero stays free for padding; only the first
4,000 bytes count. Pictures are sequences of grey values, row by row.
"""

import ast
import io
import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from primal_attention.tasks.longrange.sequences import PairSequences, TokenSequences

__all__ = ["encode_bytes", "read_aan", "read_cifar10", "read_imdb"]

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
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            "Pictures need Pillow; install it with: pip install 'primal-attention[vision]'"
        ) from error

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
