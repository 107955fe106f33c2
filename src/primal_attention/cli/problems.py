"""Data for the commands: read, split and standardised, and read the same way again later.

A :class:`Reader` is what a trained model must remember of its data: the kind, the classes, and the
statistics of the training part. It is saved beside the model as ``reader.json``.
"""

import importlib.util
import json
import lzma
import os
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from primal_attention.cli.recipes import build
from primal_attention.cli.settings import DataSettings
from primal_attention.command import UserError, user_errors
from primal_attention.models import DualTowerClassifier, EncoderClassifier
from primal_attention.output import to_json, write_atomically
from primal_attention.tasks.longrange.listops import (
    ListOpsConfig,
    encode,
    generate_listops,
    read_listops,
)
from primal_attention.tasks.longrange.pathfinder import generate_pathfinder
from primal_attention.tasks.longrange.readers import (
    encode_bytes,
    read_aan,
    read_cifar10,
    read_imdb,
)
from primal_attention.tasks.longrange.sequences import PairSequences, TokenSequences
from primal_attention.tasks.longrange.settings import LRA
from primal_attention.tasks.timeseries.data import (
    Part,
    Series,
    SeriesDataset,
    Split,
    Standardizer,
    as_float32,
    collate_series,
    load_series,
    read_npz,
    read_ts,
    stratified_sample,
    stratified_split,
)
from primal_attention.training import pad_collate
from primal_attention.training.evaluation import Collate

__all__ = ["Problem", "Reader", "load_problem"]

_BROKEN: tuple[type[Exception], ...] = (
    *(ValueError, TypeError, OSError, EOFError, KeyError, IndexError),
    *(zlib.error, zipfile.BadZipFile, lzma.LZMAError),
)
"""What readers raise on a file that is missing, damaged or of another kind."""

_FARTHEST = 1e15
"""Largest standardised value; the squares of much larger ones overflow in a model."""

_CLASSES = {
    "text": ("negative", "positive"),
    "listops": tuple("0123456789"),
    "image": (
        *("airplane", "automobile", "bird", "cat", "deer"),
        *("dog", "frog", "horse", "ship", "truck"),
    ),
    "pathfinder": ("apart", "joined"),
    "retrieval": ("unrelated", "citing"),
}
_VOCABULARY = {name: LRA[name].vocab_size for name in _CLASSES}

Tokens = TokenSequences | PairSequences


@dataclass(frozen=True)
class Reader:
    """How a model reads files: everything it must know of the data it was trained on."""

    task: str
    """Kind of data, as in a recipe."""
    classes: tuple[str, ...]
    """Names of the classes, in the order of the logits."""
    length: int | None = None
    """Longest sequence; what is longer is cut off."""
    mean: tuple[float, ...] | None = None
    """Mean of every channel of the training part; time series only."""
    std: tuple[float, ...] | None = None
    """Standard deviation of every channel of the training part; time series only."""

    @property
    def inputs(self) -> dict[str, int]:
        """What the model must take: channels or token ids."""
        if self.mean is not None:
            return {"num_features": len(self.mean)}
        return {"vocab_size": _VOCABULARY[self.task]}

    @property
    def model(self) -> type[EncoderClassifier] | type[DualTowerClassifier]:
        """What the task is learned with: one tower, or two for pairs."""
        is_pair = self.task in LRA and LRA[self.task].is_pair
        return DualTowerClassifier if is_pair else EncoderClassifier

    @property
    def collate(self) -> Collate:
        """How items become a batch."""
        return collate_series if self.task == "timeseries" else pad_collate

    def read(self, path: Path, *, labelled: bool, part: Part = "test") -> Dataset[Any]:
        """Return the sequences of a file, ready for the model.

        Args:
            path: Time series: ``.ts`` or ``.npz``. Text: ``.txt`` with one text a line, or
                ``.jsonl`` (``.xz``) with ``text`` and ``label``. ListOps: ``.tsv`` (``.gz``) or one
                expression a line. Pairs: ``.tsv``, or two texts separated by a tab a line.
                Pictures: ``.npz``.
            labelled: Whether labels are needed; otherwise those in the file are left alone.
            part: Which part of an ``.npz`` file with several.
        """
        with user_errors(str(path), *_BROKEN):
            if not path.is_file():
                raise UserError(f"there is no file {path}.")
            if self.task == "timeseries":
                return self.prepare(self._read_series(path, labelled, part))
            return self.cut(_read_tokens(self.task, path, labelled))

    def _read_series(self, path: Path, labelled: bool, part: Part) -> Series:
        series = read_series(path, part, self.classes if labelled else None)
        if labelled and series.y is None:
            raise UserError(f"{path} has no labels; primal predict needs none.")
        if not labelled:
            return replace(series, y=np.zeros(len(series), np.int64), classes=self.classes)
        if series.classes != self.classes:
            raise UserError(
                f"{path} has the classes {_some(series.classes)}, the model knows "
                f"{_some(self.classes)}."
            )
        return series

    def prepare(self, series: Series) -> SeriesDataset:
        """Return series standardised as the training part was, and cut to length."""
        if not len(series):
            raise ValueError("it holds no series.")
        standardize = Standardizer(np.asarray(self.mean), np.asarray(self.std))
        series = _shorten(standardize(series), self.length)
        far = np.flatnonzero(np.abs(series.x).max((1, 2)) > _FARTHEST)
        if len(far):
            raise ValueError(
                f"Case {far[0]}, counted from 0, holds a value more than {_FARTHEST:g} standard "
                "deviations from the mean of the training part."
            )
        return SeriesDataset(series)

    def cut(self, data: Tokens) -> Tokens:
        """Return token sequences cut to length; ids and labels must be those of the task."""
        for side in (data.first, data.second) if isinstance(data, PairSequences) else (data,):
            if not len(side) or not side.lengths.min():
                raise ValueError("it holds no sequences, or empty ones.")
            if int(side.tokens.max()) >= _VOCABULARY[self.task] or side.tokens.min() < 0:
                raise ValueError(
                    f"ids must be below {_VOCABULARY[self.task]} for {self.task}, got "
                    f"{side.tokens.min()} to {side.tokens.max()}."
                )
        if not 0 <= data.labels.min() <= data.labels.max() < len(self.classes):
            raise ValueError(
                f"labels must be from 0 to {len(self.classes) - 1}, got {data.labels.min()} to "
                f"{data.labels.max()}."
            )
        return data if self.length is None else data.truncate(self.length)

    def save(self, folder: Path) -> None:
        """Write ``reader.json`` into a folder."""
        write_atomically(folder / "reader.json", to_json(asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> "Reader":
        """Return the reader of a trained model."""
        path = folder / "reader.json"
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}; give the folder of a trained model.")
        if not path.is_file():
            inside = [p.parent.name for p in sorted(folder.glob("*/reader.json"))]
            hint = f" Did you mean {folder / inside[0]}?" if inside else ""
            raise UserError(f"{folder} is not the folder of a model that primal trained.{hint}")
        with user_errors(f"{path} is damaged", UserError, *_BROKEN):
            values = json.loads(path.read_text("utf-8"))
            reader = build(cls, values)
            if reader.task not in ("timeseries", *_VOCABULARY):
                raise ValueError(f"there is no task {reader.task!r}.")
            return reader


@dataclass(frozen=True)
class Problem:
    """Three parts of some data, and how to read more of it."""

    train: Dataset[Any]
    valid: Dataset[Any]
    test: Dataset[Any]
    reader: Reader
    rows: Sequence[int]
    """Where the items of the training part stood in its file, or as they were drawn."""


def load_problem(settings: DataSettings) -> Problem:
    """Return the data of a recipe: training, validation and test part."""
    where = "" if settings.train is None else str(settings.train)
    with user_errors(where, *_BROKEN):
        if settings.task == "timeseries":
            return _series_problem(settings)
        return _token_problem(settings)


def _series_problem(settings: DataSettings) -> Problem:
    if settings.train is not None and settings.test is not None:
        official = read_series(settings.train, "train", None)
        test = read_series(settings.test, "test", official.classes)
    elif settings.name is None:
        raise UserError("data.name, a UEA set, or the files data.train and data.test are missing.")
    else:
        root = _series_root(settings.name)
        official = load_series(settings.name, "train", root=root)
        test = load_series(settings.name, "test", root=root)
    if official.y is None or test.y is None:
        raise UserError("the files to train on and to score need labels.")
    chosen = _chosen(official.y, settings.train_size)
    split = _split(official.y[chosen], settings)
    train, valid = chosen[split.train], chosen[split.valid]
    fitted = Standardizer.fit(official.take(train))
    reader = Reader(
        "timeseries",
        official.classes,
        settings.length,
        tuple(fitted.mean.tolist()),
        tuple(fitted.std.tolist()),
    )
    whole = reader.prepare(official).series  # all of a file: a broken case keeps its number
    with user_errors(str(settings.test or "the test part"), *_BROKEN):
        held = reader.prepare(test).series
    held = held.take(_chosen(test.y, settings.test_size))
    return Problem(
        SeriesDataset(whole.take(train)),
        SeriesDataset(whole.take(valid)),
        SeriesDataset(held),
        reader,
        train.tolist(),
    )


def _series_root(name: str) -> Path | None:
    """Return the folder of a set that comes with aeon; ``None`` for the folder of PRIMAL_DATA."""
    if (Path(os.environ.get("PRIMAL_DATA", "")) / "uea" / name).is_dir():
        return None
    found = importlib.util.find_spec("aeon")
    if found is not None and found.submodule_search_locations:
        root = Path(found.submodule_search_locations[0]) / "datasets" / "data"
        if (root / name).is_dir():
            return root
    return None


def read_series(path: Path, part: Part, classes: Sequence[str] | None) -> Series:
    """Return the series of a ``.ts`` file, or of an ``.npz`` file with parts or with ``X``.

    Args:
        path: The file.
        part: Which part of an ``.npz`` file with several.
        classes: Names of the classes in their order; by default those of the file.
    """
    with user_errors(str(path), *_BROKEN):
        return (
            read_ts(path, classes=classes)
            if path.suffix == ".ts"
            else _read_npz(path, part, classes)
        )


def _read_npz(path: Path, part: Part, classes: Sequence[str] | None) -> Series:
    if path.suffix != ".npz":
        raise ValueError(f"a file of time series ends in .ts or .npz, got {path.name!r}.")
    with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
        names = set(file.files)
        if "X" not in names:
            return read_npz(path, part)
        x = as_float32(file["X"])
        lengths = file["length"] if "length" in names else np.full(len(x), x.shape[1])
        labels = file["y"] if "y" in names else None
    if labels is None:
        return Series(x, lengths.astype(np.int64))
    words = [str(label) for label in labels.tolist()]
    known = tuple(sorted(set(words)) if classes is None else classes)
    unknown = sorted(set(words) - set(known))
    if unknown:
        raise ValueError(f"labels {_some(unknown)} are not among the classes {_some(known)}.")
    y = np.array([known.index(word) for word in words], dtype=np.int64)
    return Series(x, lengths.astype(np.int64), y, known)


def _chosen(labels: NDArray[np.int64], size: int | None) -> NDArray[np.int64]:
    """Return the indices of ``size`` cases, the same share of every class; of all if fewer."""
    return stratified_sample(labels, len(labels) if size is None else size)


def _split(labels: NDArray[np.int64], settings: DataSettings) -> Split:
    """Return the cases to train on, and those that choose the epoch."""
    split = stratified_split(labels, settings.valid, seed=settings.seed)
    if not len(split.valid):
        raise UserError(
            "the validation part would be empty: no class has two training cases, one to learn "
            "from and one to choose the epoch."
        )
    return split


def _shorten(series: Series, length: int | None) -> Series:
    if length is None or series.x.shape[1] <= length:
        return series
    return replace(series, x=series.x[:, :length], length=np.minimum(series.length, length))


def _token_problem(settings: DataSettings) -> Problem:
    reader = Reader(settings.task, _CLASSES[settings.task], settings.length)
    official = _tokens_of(settings, reader, "train", settings.train, settings.train_size)
    test = _tokens_of(settings, reader, "test", settings.test, settings.test_size)
    chosen = _chosen(official.labels, settings.train_size)
    split = _split(official.labels[chosen], settings)
    train, valid = official.select(chosen[split.train]), official.select(chosen[split.valid])
    test = test.select(_chosen(test.labels, settings.test_size))
    return Problem(train, valid, test, reader, chosen[split.train].tolist())


def _tokens_of(
    settings: DataSettings, reader: Reader, part: Part, path: Path | None, size: int | None
) -> Tokens:
    """Return one part: of a file of one's own, drawn, or of the known set."""
    if path is None:
        return reader.cut(_known_tokens(settings, part, size))
    with user_errors(str(path), *_BROKEN):
        return reader.cut(_read_tokens(settings.task, path, True))


def _known_tokens(settings: DataSettings, part: Part, size: int | None) -> Tokens:
    if settings.task in ("listops", "pathfinder"):
        count = size or {"train": 10_000, "test": 1_000}[part]
        # a handful is drawn before another process has started
        workers = (os.cpu_count() or 1) if count > 5_000 else 1
        if settings.task == "pathfinder":
            return generate_pathfinder(count, split=part, seed=settings.seed, workers=workers)
        longest = settings.length or 2000
        config = ListOpsConfig(min_length=min(500, max(longest // 4, 1)), max_length=longest)
        return generate_listops(
            count, split=part, seed=settings.seed, config=config, workers=workers
        )
    if "PRIMAL_DATA" not in os.environ:
        raise UserError(
            f"the task {settings.task} reads its files from the folder in the environment variable "
            "PRIMAL_DATA, which is not set; or give data.train and data.test."
        )
    root = Path(os.environ["PRIMAL_DATA"])
    if settings.task == "text":
        return read_imdb(root / "text" / "imdb" / f"{part}.jsonl.xz")
    if settings.task == "retrieval":
        return read_aan(root / "text" / "aan" / f"new_aan_pairs.{part}.tsv")
    return read_cifar10(root / "vision" / "cifar-10" / f"{part}_jpeg.npz", limit=size)


def _read_tokens(task: str, path: Path, labelled: bool) -> Tokens:
    suffixes = path.suffixes
    if task == "retrieval":
        return read_aan(path) if labelled or ".tsv" in suffixes else _read_pairs(path)
    if task == "text" and ".jsonl" in suffixes:
        return read_imdb(path)
    if task == "listops" and ".tsv" in suffixes:
        return read_listops(path)
    if path.suffix == ".npz":
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            is_jpeg = "data" in file.files
        return read_cifar10(path) if task == "image" and is_jpeg else TokenSequences.load(path)
    if task not in ("text", "listops") or labelled:
        kinds = {"text": ".jsonl with text and label", "listops": ".tsv"}.get(task, ".npz")
        raise ValueError(f"labelled data of the task {task} are read from a {kinds}, or an .npz.")
    lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    if task == "listops":
        return TokenSequences.pack([encode(line) for line in lines], [0] * len(lines))
    rows = [encode_bytes(line) for line in lines]
    return TokenSequences.pack(rows, [0] * len(lines), np.uint16)


def _read_pairs(path: Path) -> PairSequences:
    rows = [line.split("\t") for line in path.read_text("utf-8").splitlines() if line.strip()]
    for number, row in enumerate(rows, 1):
        if len(row) != 2:
            raise ValueError(f"pair {number}: expected two texts and a tab, got {len(row)} fields.")
    first, second = (
        TokenSequences.pack([encode_bytes(row[i]) for row in rows], [0] * len(rows), np.uint16)
        for i in range(2)
    )
    return PairSequences(first, second)


def _some(names: Sequence[str], most: int = 12) -> str:
    """Return names separated by commas, the first ones if there are many."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
