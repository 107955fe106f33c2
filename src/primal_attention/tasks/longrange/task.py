"""The task of classifying long token sequences."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from primal_attention.models.config import EncoderConfig, EncoderOptions
from primal_attention.support.command import UserError, user_errors
from primal_attention.support.files.tables import TABLE_SUFFIXES, list_some
from primal_attention.tasks.longrange.settings import IMAGES, Kind, TokenSettings
from primal_attention.tasks.sources import Recognition, Source, check_target, existing
from primal_attention.tasks.task import ClassificationTask, Parts

if TYPE_CHECKING:
    from primal_attention.models import DualTowerClassifier, EncoderClassifier
    from primal_attention.tasks.longrange.readers import Tokens

__all__ = ["TokenTask"]

_CLASSES: dict[Kind, tuple[str, ...]] = {
    "text": ("negative", "positive"),
    "listops": tuple("0123456789"),
    "image": (
        *("airplane", "automobile", "bird", "cat", "deer"),
        *("dog", "frog", "horse", "ship", "truck"),
    ),
    "pathfinder": ("apart", "joined"),
    "retrieval": ("unrelated", "citing"),
}


_REST: Mapping[str, Mapping[str, object]] = {
    "model": {"dim": 64, "num_heads": 4},
    "training": {"epochs": 10, "min_steps": 400},
}
"""Settings for texts and pictures of which nothing is known."""
_FEW_COLUMNS = 4
"""A table with more columns holds texts only if they are longer than names or addresses."""


@dataclass(frozen=True)
class TokenTask(ClassificationTask):
    """Classify token sequences: what a model must know of its training data."""

    Settings: ClassVar[type[TokenSettings]] = TokenSettings
    Model: ClassVar[type[EncoderOptions]] = EncoderOptions
    endings: ClassVar[tuple[str, ...]] = (".jsonl", ".npz", *TABLE_SUFFIXES)
    starter: ClassVar[Mapping[str, object]] = {
        "data": {"kind": "listops", "length": 100, "train_size": 2000, "test_size": 500},
        **_REST,
    }

    kind: Kind
    """Kind of sequence."""
    classes: tuple[str, ...]
    """Names of the classes, in the order of the logits."""
    length: int | None = None
    """Longest sequence to read; what is longer is cut off."""
    text: str = "text"
    """Tables: column of the texts."""
    target: str = "label"
    """Tables: column of the classes."""

    @classmethod
    def recognize(cls, source: Source, given: Mapping[str, str]) -> Recognition | None:
        """Return how to read texts or pictures: a folder of them, a table, or JSON lines."""
        parts: dict[str, object] = {}
        if source.is_folder:
            kind, parts = _recognize_folder(source)
            words = {"text": "a folder of texts", "image": "a folder of pictures"}[kind]
        elif {"data", "offsets", "labels"} <= source.arrays.keys():
            kind, words = "image", "pictures in one file"
        elif source.suffix in (*TABLE_SUFFIXES, ".jsonl"):
            column = _text_column(source, given)
            if column is None:
                return None
            check_target(source, given.get("target", "label"))
            kind, words = "text", f"a table of texts in the column {column!r}"
            parts = {"text": column}
        elif {"tokens", "offsets", "labels"} <= source.arrays.keys() or source.suffix == ".txt":
            raise UserError(
                "a .txt file has no labels, and saved sequences do not say their kind; give a "
                "table, a folder for each class, or --task longrange --kind KIND."
            )
        else:
            return None
        data = {"kind": kind, **parts, **({"length": 1000} if kind == "text" else {})}
        return Recognition(f"{words}, read as {_TOKENS[kind]}", {"data": data, **_REST})

    @classmethod
    def load(cls, settings: TokenSettings) -> tuple[Self, Parts]:
        """Return the task and the three parts: of files, generated, or of the known set."""
        import numpy as np

        from primal_attention.tasks.splits import check_classes, choose, hold_out

        kind, names = settings.kind, _CLASSES[settings.kind]
        task = cls(kind, names, settings.length, settings.text, settings.target)
        if settings.train is not None and kind in ("text", "image"):
            task = replace(task, classes=())  # those of the file
        official, names = task._part(settings, "train")
        task = replace(task, classes=names or _CLASSES[kind])
        is_held = settings.train is not None and settings.test is None
        pool, held = np.arange(len(official)), np.arange(0)
        with user_errors(str(settings.train or ""), UserError):
            check_classes(task.classes)
            if is_held:
                pool, held = hold_out(official.labels, settings.test_share, settings.seed + 1)
            chosen = pool[choose(official.labels[pool], settings.train_size)]
            split = hold_out(official.labels[chosen], settings.valid, settings.seed)
        test = official.select(held) if is_held else task._part(settings, "test")[0]
        rows = chosen[split.train]
        return task, Parts(
            official.select(rows),
            official.select(chosen[split.valid]),
            test.select(choose(test.labels, settings.test_size)),
            rows.tolist(),
            settings.note,
        )

    def _part(self, settings: TokenSettings, part: str) -> "tuple[Tokens, tuple[str, ...]]":
        from primal_attention.tasks.longrange.readers import load_tokens

        path = settings.train if part == "train" else settings.test
        if path is not None:
            with user_errors(str(path)):
                return self._read(path, labelled=True)
        with user_errors(""):
            return self.cut(load_tokens(settings, part)), self.classes

    @property
    def sizes(self) -> Mapping[str, Any]:
        """Classes and rows of the embedding."""
        from primal_attention.tasks.longrange.published import LRA

        return {"num_classes": len(self.classes), "vocab_size": LRA[self.kind].vocab_size}

    def build(self, options: EncoderOptions) -> "EncoderClassifier | DualTowerClassifier":
        """Return an untrained encoder; pairs get two towers."""
        from primal_attention.models import DualTowerClassifier, EncoderClassifier

        kind = DualTowerClassifier if self.kind == "retrieval" else EncoderClassifier
        return kind(EncoderConfig(**asdict(options), **self.sizes))

    def read(self, path: Path, *, labelled: bool, part: str = "test") -> "Tokens":
        """Return the sequences of a file or folder."""
        with user_errors(str(path)):
            return self._read(path, labelled=labelled)[0]

    def _read(self, path: Path, *, labelled: bool) -> "tuple[Tokens, tuple[str, ...]]":
        from primal_attention.tasks.longrange.readers import read_tokens

        data, names = read_tokens(
            self.kind,
            existing(path),
            labelled=labelled,
            classes=self.classes,
            text=self.text,
            target=self.target,
        )
        names = names or _CLASSES[self.kind]
        return replace(self, classes=names).cut(data), names

    def from_arrays(self, data: Any) -> "Tokens":
        """Return a list of texts, or pictures ``[cases, 32, 32]`` of grey values from 0 to 255."""
        import numpy as np

        from primal_attention.datasets.longrange.sequences import TokenSequences
        from primal_attention.tasks.longrange.readers import pack_texts

        if self.kind == "text":
            return self.cut(pack_texts(data))
        if self.kind not in ("image", "pathfinder"):
            return super().from_arrays(data)  # type: ignore[return-value]
        pictures = [np.asarray(picture) for picture in data]
        for i, picture in enumerate(pictures):
            is_grey = picture.ndim == 2 and picture.dtype.kind in "biuf"
            if not is_grey or not (np.isin(picture, np.arange(256))).all():
                raise ValueError(
                    f"picture {i}, counted from 0, must be grey values, whole numbers from 0 to "
                    f"255 in rows, got {picture.dtype} of the shape {picture.shape}."
                )
        rows = [picture.reshape(-1).astype(np.uint8) for picture in pictures]
        return self.cut(TokenSequences.pack(rows, [0] * len(rows)))

    def cut(self, data: "Tokens") -> "Tokens":
        """Return sequences cut to length; ids and labels must be those of the kind."""
        from primal_attention.datasets.longrange.sequences import PairSequences

        most = self.sizes["vocab_size"]
        for side in (data.first, data.second) if isinstance(data, PairSequences) else (data,):
            if not len(side):
                raise ValueError("there are no sequences.")
            if not side.lengths.min():
                raise ValueError(
                    f"sequence {side.lengths.argmin()}, counted from 0, is empty; a model needs at "
                    "least one token."
                )
            if int(side.tokens.max()) >= most or side.tokens.min() < 0:
                raise ValueError(
                    f"tokens of the kind {self.kind} must be from 0 to {most - 1}, got "
                    f"{side.tokens.min()} to {side.tokens.max()}."
                )
        if not 0 <= data.labels.min() <= data.labels.max() < len(self.classes):
            raise ValueError(
                f"labels must be from 0 to {len(self.classes) - 1}, got {data.labels.min()} to "
                f"{data.labels.max()}."
            )
        return data if self.length is None else data.truncate(self.length)


_TOKENS = {"text": "bytes", "image": "grey values of 32 × 32 points"}


def _recognize_folder(source: Source) -> tuple[str, dict[str, object]]:
    """Return the kind of a folder with one folder for each class, and its parts."""
    ends = list_some([f"{count} {end or 'others'}" for end, count in source.endings.items()])
    if set(source.endings) == {".txt"}:
        kind = "text"
    elif source.endings and set(source.endings) <= set(IMAGES):
        kind = "image"
    else:
        raise UserError(
            f"the folder holds {f'the files {ends}' if ends else 'no files'}; a folder of data has "
            f"one kind: .txt, or pictures ({', '.join(IMAGES)})."
        )
    if not source.folders:
        raise UserError(
            "the files have no classes; put those of each class into a folder of its own."
        )
    if "train" not in source.folders or set(source.folders) - {"train", "test"}:
        return kind, {}
    return kind, {part: str(source.path / part) for part in source.folders}


def _text_column(source: Source, given: Mapping[str, str]) -> str | None:
    """Return the column of the texts: the one named so, else the one with the most words."""
    named = given.get("text", "text")
    if named in source.columns:
        return named
    target = given.get("target", "label")
    texts = {n: c.words for n, c in source.columns.items() if c.kind == "text" and n != target}
    longest = max(texts, key=lambda name: texts[name], default=None)
    # beside several other columns, a name or an address is one feature of a table
    fewest = 2 if "task" in given or len(source.columns) <= _FEW_COLUMNS else 8
    return longest if longest is not None and texts[longest] >= fewest else None
