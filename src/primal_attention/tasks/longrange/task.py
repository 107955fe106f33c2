"""The task of classifying long token sequences."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from primal_attention.command import UserError, user_errors
from primal_attention.models.config import EncoderConfig, EncoderOptions
from primal_attention.tasks.files import FILE_ERRORS
from primal_attention.tasks.longrange.settings import Kind, TokenSettings
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


@dataclass(frozen=True)
class TokenTask(ClassificationTask):
    """Classify token sequences: what a model must know of its training data."""

    Settings: ClassVar[type[TokenSettings]] = TokenSettings
    Model: ClassVar[type[EncoderOptions]] = EncoderOptions

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
    def load(cls, settings: TokenSettings) -> tuple[Self, Parts]:
        """Return the task and the three parts: of files, generated, or of the known set."""
        import numpy as np

        from primal_attention.tasks.splits import choose, hold_out

        task = cls(
            settings.kind,
            _CLASSES[settings.kind],
            settings.length,
            settings.text,
            settings.target,
        )
        official = task._part(settings, "train")
        if settings.train is not None and settings.test is None:
            pool, held = hold_out(official.labels, settings.test_share, settings.seed + 1)
            test = official.select(held)
        else:
            pool, test = np.arange(len(official)), task._part(settings, "test")
        chosen = pool[choose(official.labels[pool], settings.train_size)]
        split = hold_out(official.labels[chosen], settings.valid, settings.seed)
        rows = chosen[split.train]
        return task, Parts(
            official.select(rows),
            official.select(chosen[split.valid]),
            test.select(choose(test.labels, settings.test_size)),
            rows.tolist(),
            settings.note,
        )

    def _part(self, settings: TokenSettings, part: str) -> "Tokens":
        from primal_attention.tasks.longrange.readers import load_tokens

        path = settings.train if part == "train" else settings.test
        if path is not None:
            with user_errors(str(path), *FILE_ERRORS):
                return self._read(path, labelled=True)
        with user_errors("", *FILE_ERRORS):
            return self.cut(load_tokens(settings, part))

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
        """Return the sequences of a file."""
        with user_errors(str(path), *FILE_ERRORS):
            if not path.is_file():
                raise UserError(f"there is no file {path}.")
            return self._read(path, labelled=labelled)

    def _read(self, path: Path, *, labelled: bool) -> "Tokens":
        from primal_attention.tasks.longrange.readers import read_tokens

        return self.cut(
            read_tokens(self.kind, path, labelled=labelled, text=self.text, target=self.target)
        )

    def cut(self, data: "Tokens") -> "Tokens":
        """Return sequences cut to length; ids and labels must be those of the kind."""
        from primal_attention.tasks.longrange.sequences import PairSequences

        most = self.sizes["vocab_size"]
        for side in (data.first, data.second) if isinstance(data, PairSequences) else (data,):
            if not len(side) or not side.lengths.min():
                raise ValueError("it holds no sequences, or empty ones.")
            if int(side.tokens.max()) >= most or side.tokens.min() < 0:
                raise ValueError(
                    f"ids must be below {most} for {self.kind}, got {side.tokens.min()} to "
                    f"{side.tokens.max()}."
                )
        if not 0 <= data.labels.min() <= data.labels.max() < len(self.classes):
            raise ValueError(
                f"labels must be from 0 to {len(self.classes) - 1}, got {data.labels.min()} to "
                f"{data.labels.max()}."
            )
        return data if self.length is None else data.truncate(self.length)
