"""Readers of byte-level text, pairs of texts and grey pictures, as in Long Range Arena.

Text is a sequence of bytes, each raised by one so that zero stays free for padding; only the first
4,000 bytes count. Pictures are sequences of grey values, row by row.
"""

import ast
import io
import json
import lzma
import os
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from primal_attention.command import needs
from primal_attention.files import open_text
from primal_attention.tasks.datasets import data_folder
from primal_attention.tasks.files import (
    TABLE_SUFFIXES,
    ending,
    read_table,
    take_column,
    take_labels,
)
from primal_attention.tasks.longrange.listops import (
    ListOpsConfig,
    encode,
    generate_listops,
    read_listops,
)
from primal_attention.tasks.longrange.pathfinder import generate_pathfinder
from primal_attention.tasks.longrange.sequences import PairSequences, TokenSequences
from primal_attention.tasks.longrange.settings import IMAGES, Kind, TokenSettings
from primal_attention.tasks.splits import class_indices

__all__ = [
    "Tokens",
    "encode_bytes",
    "load_tokens",
    "pack_texts",
    "read_aan",
    "read_cifar10",
    "read_imdb",
    "read_picture",
    "read_tokens",
    "reviews_from_archive",
]

Tokens = TokenSequences | PairSequences

_SIDE = 32
"""Rows and columns of a picture from a folder; others are scaled."""
_MAX_ITEMS, _MAX_LINE = 50_000_000, 50_000_000
"""Lines of a file, and characters of a line, beyond which it is refused."""
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
    rows, labels = [], []
    for number, item in _json_lines(Path(path), ("text", "label")):
        if not isinstance(item["label"], int):
            raise ValueError(f"{path}, line {number}: label must be 0 or 1, got {item['label']!r}.")
        rows.append(encode_bytes(str(item["text"]), length))
        labels.append(item["label"])
    return TokenSequences.pack(rows, labels, np.uint16)


def reviews_from_archive(archive: Path, name: str) -> bytes:
    """Return the reviews of one part from the ``.tar.gz`` of the publisher, as :func:`read_imdb`.

    Args:
        archive: Holds texts ``…/PART/neg/ID_RATING.txt`` and ``…/PART/pos/ID_RATING.txt``.
        name: ``train.jsonl.xz`` or ``test.jsonl.xz``.
    """
    part = name.partition(".")[0]
    rows = []
    with tarfile.open(archive, "r:gz") as file:
        for member in file:
            place, path = member.name.split("/")[-3:], Path(member.name)
            if place[:-1] not in ([part, "neg"], [part, "pos"]) or not member.isfile():
                continue
            number, _, rating = path.stem.partition("_")
            text = file.extractfile(member).read(_MAX_LINE).decode()  # type: ignore[union-attr]
            rows.append((int(place[1] == "pos"), int(number), int(rating), text))
    lines = [
        json.dumps(
            {"id": number, "label": label, "rating": rating, "text": text},
            ensure_ascii=False,
            separators=(",", ":"),
        )
        for label, number, rating, text in sorted(rows)
    ]
    return lzma.compress("".join(f"{line}\n" for line in lines).encode())


def _json_lines(path: Path, keys: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number and object of every line; a line without one of the keys is an error."""
    with open_text(path) as file:
        for number in range(1, _MAX_ITEMS):
            line = file.readline(_MAX_LINE)
            if not line:
                return
            try:
                item = json.loads(line)
                lacks = [key for key in keys if key not in item]
            except (ValueError, TypeError):
                lacks = list(keys)
            if lacks or not isinstance(item, dict):
                raise ValueError(
                    f"{path}, line {number}: expected a JSON object with "
                    f"{' and '.join(map(repr, keys))}, got {line[:60]!r}."
                )
            yield number, item
    raise ValueError(f"{path} has {_MAX_ITEMS:,} lines or more, too many to read at once.")


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
    root = data_folder()
    if settings.kind == "text":
        return read_imdb(root / "text" / "imdb" / f"{part}.jsonl.xz")
    if settings.kind == "retrieval":
        return read_aan(root / "text" / "aan" / f"new_aan_pairs.{part}.tsv")
    return read_cifar10(root / "vision" / "cifar-10" / f"{part}_jpeg.npz", limit=size)


def read_tokens(
    kind: Kind,
    path: Path,
    *,
    labelled: bool,
    classes: Sequence[str],
    text: str = "text",
    target: str = "label",
) -> tuple[Tokens, tuple[str, ...]]:
    """Return the sequences of a file or folder, and the names of their classes.

    Args:
        kind: Kind of sequence.
        path: Text: ``.jsonl``, ``.csv``, ``.tsv`` or ``.parquet``, a folder with one folder of
            ``.txt`` files for each class, or ``.txt`` with one text a line. ListOps: ``.tsv``
            (``.gz``), or one expression a line. Pairs: ``.tsv``, or two texts separated by a tab a
            line. Pictures: a folder of them for each class. Pictures, and all kinds as saved by us:
            ``.npz``.
        labelled: Whether labels are needed; otherwise those in the file are ignored.
        classes: Names of the classes; if empty, the sorted labels of texts and of folders.
        text: Tables: column of the texts.
        target: Tables: column of the classes.
    """
    suffix = ending(path)
    rows: list[Any]
    if path.is_dir() or (kind == "image" and suffix in IMAGES):
        rows, labels = _read_folder(kind, path, labelled)
    elif kind == "text" and suffix == ".jsonl":
        keys = (text, target) if labelled else (text,)
        items = [item for _, item in _json_lines(path, keys)]
        rows = [encode_bytes(str(item[text])) for item in items]
        labels = [str(item[target]) for item in items] if labelled else None
    elif kind == "text" and suffix in TABLE_SUFFIXES:
        frame = read_table(path)
        rows = [encode_bytes(str(value)) for value in take_column(frame, text, path, "text")]
        labels = take_labels(frame, target, path) if labelled else None
    else:
        return _read_fixed(kind, path, suffix, labelled), tuple(classes)
    if labels is None:
        return TokenSequences.pack(rows, [0] * len(rows), np.uint16), tuple(classes)
    names = tuple(classes) or tuple(sorted(set(labels)))
    if set(labels) - set(names) and all(v.isdecimal() and int(v) < len(names) for v in labels):
        labels = [names[int(v)] for v in labels]  # numbers of classes, as in IMDb
    return TokenSequences.pack(rows, class_indices(labels, names), np.uint16), names


def _read_fixed(kind: Kind, path: Path, suffix: str, labelled: bool) -> Tokens:
    """Return the sequences of a format whose labels are numbers of known classes."""
    if kind == "retrieval":
        return read_aan(path) if labelled or suffix == ".tsv" else _read_pairs(path)
    if kind == "listops" and suffix == ".tsv":
        return read_listops(path)
    if suffix == ".npz":
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            is_jpeg = "data" in file.files
        return read_cifar10(path) if kind == "image" and is_jpeg else TokenSequences.load(path)
    if kind not in ("text", "listops") or labelled:
        known = {"text": "a .jsonl, a table or a folder of texts", "listops": "a .tsv"}
        known["image"] = "a folder of pictures or an .npz"
        raise ValueError(
            f"labelled data of the kind {kind} are read from {known.get(kind, 'an .npz')}, got "
            f"{path.name!r}."
        )
    lines = _lines(path)
    if kind == "listops":
        return TokenSequences.pack([encode(line) for line in lines], [0] * len(lines))
    return pack_texts(lines)


def _read_folder(kind: Kind, path: Path, labelled: bool) -> tuple[list[Any], list[str] | None]:
    """Return the sequences of all files in a folder, and the names of their folders as labels."""
    endings = {"text": (".txt",), "image": IMAGES}.get(kind)
    if endings is None:
        raise ValueError(f"data of the kind {kind} are read from a file, got the folder {path}.")
    found = sorted(path.rglob("*")) if path.is_dir() else [path]
    files = [f for f in found if f.suffix.lower() in endings and not f.name.startswith(".")]
    if not files:
        raise ValueError(f"{path} holds no files that end in {', '.join(endings)}.")
    labels = [f.relative_to(path).parts[0] for f in files] if labelled else None
    if labelled and any(f.parent == path for f in files):
        raise ValueError(f"{path} has files without a class; put them into one folder a class.")
    if kind == "text":
        rows = [_read_start(file) for file in files]
    else:
        rows = [read_picture(file) for file in files]
    empty = [file for file, row in zip(files, rows, strict=True) if not len(row)]
    if empty:
        raise ValueError(f"{empty[0]} is empty; remove it, or put a text into it.")
    return rows, labels


def _read_start(path: Path) -> np.ndarray:
    with path.open("rb") as file:
        return encode_bytes(file.read(4000))


def read_picture(path: Path) -> np.ndarray:
    """Return the grey values of a picture scaled to 32 × 32, row by row."""
    with needs("vision", "Reading pictures"):
        from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as picture:
            return np.asarray(picture.convert("L").resize((_SIDE, _SIDE))).reshape(-1)
    except UnidentifiedImageError as error:
        raise ValueError(f"{path} is not a readable picture.") from error


def _read_pairs(path: Path) -> PairSequences:
    rows = [line.split("\t") for line in _lines(path)]
    for number, row in enumerate(rows, 1):
        if len(row) != 2:
            raise ValueError(f"pair {number}: expected two texts and a tab, got {len(row)} fields.")
    return PairSequences(*(pack_texts([row[i] for row in rows]) for i in range(2)))


def _lines(path: Path) -> list[str]:
    # only line feeds end a line; str.splitlines knows ten other characters
    lines = (line.rstrip("\r") for line in path.read_text("utf-8").split("\n"))
    return [line for line in lines if line.strip()]


def pack_texts(texts: Sequence[str]) -> TokenSequences:
    """Return texts byte by byte, without labels."""
    return TokenSequences.pack([encode_bytes(t) for t in texts], [0] * len(texts), np.uint16)
