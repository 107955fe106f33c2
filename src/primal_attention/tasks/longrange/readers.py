"""Readers of byte-level text, pairs of texts and grey pictures, as in Long Range Arena.

Text is a sequence of bytes, each raised by one so that zero stays free for padding; only the first
4,000 bytes count. Pictures are sequences of grey values, row by row.
"""

import ast
import io
import itertools
import json
import lzma
import math
import os
import re
import tarfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from primal_attention.datasets.longrange.listops import (
    ListOpsConfig,
    encode_line,
    generate_listops,
    read_listops,
)
from primal_attention.datasets.longrange.pathfinder import generate_pathfinder
from primal_attention.datasets.longrange.sequences import PairSequences, TokenSequences
from primal_attention.datasets.public import data_folder
from primal_attention.support.command import UserError, user_errors
from primal_attention.support.files import (
    list_arrays,
    read_json_lines,
    read_lines,
    read_start,
    take_arrays,
)
from primal_attention.support.files.folders import folder_classes, list_files
from primal_attention.support.files.images import open_image
from primal_attention.support.files.tables import (
    TABLE_SUFFIXES,
    ending,
    read_table,
    take_column,
    take_labels,
)
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
_MAX_REVIEW = 50_000_000
"""Most bytes of a review in an archive."""
_BYTES = re.compile(r"b'([^'\\]|\\.)*'|b\"([^\"\\]|\\.)*\"")
"""Bytes as Python writes them."""
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
    for where, item in _json_items(Path(path), ("text", "label")):
        if item["label"] not in (0, 1):
            raise UserError(f"{where}: label must be 0 or 1, got {str(item['label'])[:80]!r}.")
        rows.append(_encode(item["text"], where, length))
        labels.append(int(item["label"]))
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
            text = file.extractfile(member).read(_MAX_REVIEW).decode()  # type: ignore[union-attr]
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


def _json_items(path: Path, keys: Sequence[str]) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the object of every line, and where it is; one without one of the keys is an error."""
    for number, item in read_json_lines(path, skip_blank=False):
        where = f"{path}, line {number}"
        lost = [key for key in keys if key not in item]
        if lost:
            there = ", ".join(repr(key[:80]) for key in list(item)[:12]) or "nothing"
            raise UserError(f"{where} has no {lost[0]!r}; it has {there}.")
        yield where, item


def _encode(text: object, where: str, length: int = 4000) -> np.ndarray:
    """Return the ids of a text; an empty one is an error, because a model needs a token."""
    if not isinstance(text, str):
        raise UserError(f"{where}: the text must be words, got {_describe(text)}.")
    if not text:
        raise UserError(f"{where}: the text is empty; remove it, or write a text.")
    try:
        return encode_bytes(text, length)
    except UnicodeEncodeError:
        raise UserError(
            f"{where}: the text has half of a character (a lone surrogate); save it as UTF-8."
        ) from None


def _label(value: object, where: str) -> str:
    """Return a class as a word."""
    is_number = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    if not is_number and not (isinstance(value, str) and value):
        raise UserError(f"{where}: a class must be a word or a number, got {_describe(value)}.")
    return str(value)


def _describe(value: object) -> str:
    if value is None or (isinstance(value, str) and not value):
        return "none"
    kinds = {
        dict: "an object",
        list: "a list",
        np.ndarray: "a list",
        bool: "true or false",
        str: "words",
    }
    return kinds.get(type(value), str(value)[:80])


def read_cifar10(path: Path, *, limit: int | None = None, seed: int = 0) -> TokenSequences:
    """Read CIFAR-10 as sequences of 1,024 grey values, from JPEG files joined in an ``.npz``.

    Args:
        path: ``train_jpeg.npz`` or ``test_jpeg.npz``, with ``data``, ``offsets`` and ``labels``.
        limit: Decode only so many, drawn without replacement; the files are sorted by class.
        seed: Seed of that draw.
    """
    sorts = {"data": ("bytes", 1), "offsets": ("whole numbers", 1), "labels": ("whole numbers", 1)}
    found = take_arrays(Path(path), sorts)
    with user_errors(str(path)):
        files = TokenSequences(found["data"], found["offsets"], found["labels"])
    chosen = np.arange(len(files))
    if limit is not None:
        chosen = np.random.default_rng(seed).permutation(len(files))[:limit]

    def pixels() -> Iterator[np.ndarray]:
        for i in chosen:
            where = f"{path}, picture {i}, counted from 0,"
            with open_image(io.BytesIO(files.row(int(i)).tobytes()), where) as picture:
                if picture.size != (_SIDE, _SIDE):
                    raise UserError(f"{where} must have 32 × 32 points, got {picture.size}.")
                yield (np.asarray(picture.convert("RGB")) @ _GREY).astype(np.uint8).reshape(-1)

    return TokenSequences.pack(pixels(), files.labels[chosen])


def read_aan(path: Path, *, length: int = 4000) -> PairSequences:
    """Read pairs of papers, of which class 1 cites the other: Long Range Arena's Retrieval.

    A line has five fields separated by tabs: label (``0.0`` or ``1.0``), two identifiers, and two
    texts, either plain or written as Python bytes (``b'…'``), as the released files have them.

    Args:
        path: ``new_aan_pairs.train.tsv``, ``….eval.tsv`` or ``….test.tsv``.
        length: Bytes to keep of each text.
    """
    labels: list[int] = []
    sides: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for number, line in enumerate(read_lines(Path(path)), 1):
        where = f"{path}, line {number}"
        fields = line.split("\t")
        if len(fields) != 5 or fields[0] not in ("0", "1", "0.0", "1.0"):
            raise UserError(
                f"{where}: expected label, two identifiers and two texts separated by tabs, got "
                f"{len(fields)} fields: {line[:60]!r}."
            )
        labels.append(int(fields[0][0]))
        for side, text in zip(sides, fields[3:], strict=True):
            side.append(_encode_pair(text, where, length))
    first, second = (TokenSequences.pack(side, labels, np.uint16) for side in sides)
    return PairSequences(first, second)


def _encode_pair(text: str, where: str, length: int) -> np.ndarray:
    """Return the ids of a text that may be written as Python bytes."""
    if not _BYTES.fullmatch(text):
        return _encode(text, where, length)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a backslash that escapes nothing
            value = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return _encode(text, where, length)
    if not value:
        raise UserError(f"{where}: the text is empty; remove it, or write a text.")
    return encode_bytes(value, length)


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

    Every line, row or file is one sequence, in this order. An empty one is an error that names its
    place: none is left out.
    """
    suffix = ending(path)
    rows: list[np.ndarray]
    if path.is_dir() or (kind == "image" and suffix in IMAGES):
        rows, labels = _read_folder(kind, path, labelled)
    elif kind == "text" and suffix == ".jsonl":
        keys = (text, target) if labelled else (text,)
        items = list(_json_items(path, keys))
        rows = [_encode(item[text], where) for where, item in items]
        labels = [_label(item[target], where) for where, item in items] if labelled else None
    elif kind == "text" and suffix in TABLE_SUFFIXES:
        frame = read_table(path, words=(text, target))
        column = take_column(frame, text, path, "text")
        column = column.astype(object).where(column.notna(), "")
        rows = [_encode(value, f"{path}, row {i}") for i, value in enumerate(column, 1)]
        labels = take_labels(frame, target, path) if labelled else None
    else:
        return _read_fixed(kind, path, suffix, labelled), tuple(classes)
    if labels is None:
        return TokenSequences.pack(rows, [0] * len(rows), np.uint16), tuple(classes)
    names = tuple(classes) or tuple(sorted(set(labels)))
    numbers = {str(i) for i in range(len(names))}
    if set(labels) - set(names) and set(labels) <= numbers:
        labels = [names[int(v)] for v in labels]  # numbers of classes, as in IMDb
    return TokenSequences.pack(rows, class_indices(labels, names), np.uint16), names


def _read_fixed(kind: Kind, path: Path, suffix: str, labelled: bool) -> Tokens:
    """Return the sequences of a format whose labels are numbers of known classes."""
    if kind == "retrieval":
        return read_aan(path) if labelled or suffix == ".tsv" else _read_pairs(path)
    if kind == "listops" and suffix == ".tsv":
        return read_listops(path)
    if suffix == ".npz":
        is_jpeg = kind == "image" and "data" in list_arrays(path)
        return read_cifar10(path) if is_jpeg else TokenSequences.load(path, labelled=labelled)
    if kind not in ("text", "listops") or labelled:
        known = {"text": "a .jsonl, a table or a folder of texts", "listops": "a .tsv"}
        known["image"] = "a folder of pictures or an .npz"
        raise UserError(
            f"labelled data of the kind {kind} are read from {known.get(kind, 'an .npz')}, got "
            f"{path.name!r}."
        )
    lines = read_lines(path)
    if kind == "text":
        return pack_texts(lines, path)
    rows = [encode_line(line, f"{path}, line {n}") for n, line in enumerate(lines, 1)]
    return TokenSequences.pack(rows, [0] * len(rows))


def _read_folder(
    kind: Kind, path: Path, labelled: bool
) -> tuple[list[np.ndarray], list[str] | None]:
    """Return the sequences of all files in a folder, and the names of their folders as labels."""
    endings = {"text": (".txt",), "image": IMAGES}.get(kind)
    if endings is None:
        raise UserError(f"data of the kind {kind} are read from a file, got the folder {path}.")
    files = list_files(path, endings) if path.is_dir() else [path]
    if labelled and not path.is_dir():
        raise UserError(f"{path} has no class; put pictures into one folder a class.")
    labels = folder_classes(path, files) if labelled else None
    if kind == "text":
        rows = [encode_bytes(read_start(file, 4000)) for file in files]
    else:
        rows = [read_picture(file) for file in files]
    empty = [file for file, row in zip(files, rows, strict=True) if not len(row)]
    if empty:
        raise UserError(f"{empty[0]} is empty; remove it, or put a text into it.")
    return rows, labels


def read_picture(path: Path) -> np.ndarray:
    """Return the grey values of a picture scaled to 32 × 32, row by row.

    Raises:
        UserError: If the file is no picture, is damaged, or has too many points.
    """
    with open_image(path) as picture:
        return np.asarray(picture.convert("L").resize((_SIDE, _SIDE))).reshape(-1)


def _read_pairs(path: Path) -> PairSequences:
    sides: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for number, line in enumerate(read_lines(path), 1):
        where = f"{path}, line {number}"
        fields = line.split("\t")
        if len(fields) != 2:
            raise UserError(f"{where}: expected two texts and a tab, got {len(fields)} fields.")
        for side, text in zip(sides, fields, strict=True):
            side.append(_encode(text, where))
    first, second = (TokenSequences.pack(side, [0] * len(side), np.uint16) for side in sides)
    return PairSequences(first, second)


def pack_texts(texts: Iterable[str], path: Path | None = None) -> TokenSequences:
    """Return texts byte by byte, without labels.

    Args:
        texts: The texts.
        path: The file that has them as lines, for messages.
    """
    places = (
        f"text {i - 1}, counted from 0" if path is None else f"{path}, line {i}"
        for i in itertools.count(1)
    )
    rows = [_encode(text, where) for text, where in zip(texts, places, strict=False)]
    return TokenSequences.pack(rows, [0] * len(rows), np.uint16)
