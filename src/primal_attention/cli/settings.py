"""What a recipe holds: the data, the model and the training, each a frozen dataclass."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import tyro

from primal_attention.cli.recipes import FROM_DATA, check_value
from primal_attention.command import UserError, did_you_mean
from primal_attention.models import EncoderConfig
from primal_attention.training import TrainingConfig

__all__ = ["DataSettings", "ModelSettings", "Recipe", "TrainOptions"]

Task = Literal["timeseries", "text", "listops", "retrieval", "image", "pathfinder"]


@dataclass(frozen=True)
class DataSettings:
    """What to learn from: a known set, drawn examples, or files of one's own."""

    task: Task = "timeseries"
    """Kind of data: timeseries, text (bytes), listops, retrieval (pairs), image or pathfinder."""
    name: str | None = None
    """Time series: exact name of a UEA set."""
    train: Path | None = None
    """File to train on, instead of a known set."""
    test: Path | None = None
    """File to score at the end; belongs to train."""
    valid: float = 0.2
    """Share of the training part that chooses the epoch, the same of every class."""
    length: int | None = None
    """Longest sequence; what is longer is cut off."""
    train_size: int | None = None
    """Training sequences, those for validation included; by default all, 10,000 if drawn."""
    test_size: int | None = None
    """Test sequences; by default all, 1,000 if drawn."""
    seed: int = 0
    """Seed of the split, and of what is drawn."""

    def __post_init__(self) -> None:
        if not 0 < self.valid < 1:
            raise ValueError(f"valid must be a share between 0 and 1, got {self.valid}.")
        for key in ("length", "train_size", "test_size"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"{key} must be at least 1, got {value}.")
        if (self.train is None) != (self.test is None):
            raise ValueError("train and test are given together: files to learn from and to score.")
        if self.name is not None and self.train is not None:
            raise ValueError("give a name or the files train and test, not both.")
        if self.name is not None and self.task != "timeseries":
            raise ValueError(f"name is for time series; the task {self.task} has no sets to name.")


@dataclass(frozen=True, kw_only=True)
class ModelSettings(EncoderConfig):
    """The model; how many classes and channels it has is read off the data."""

    num_classes: tyro.conf.Suppress[int] = field(default=1, metadata=FROM_DATA)
    num_features: tyro.conf.Suppress[int | None] = field(default=None, metadata=FROM_DATA)
    vocab_size: tyro.conf.Suppress[int | None] = field(default=1, metadata=FROM_DATA)

    def __post_init__(self) -> None:
        super().__post_init__()
        used = set(self.layer_attentions)
        for kind in ("attention", "other"):
            name = self.attention if kind == "attention" else self.other_attention
            if name in used:
                _check_options(name, getattr(self, f"{kind}_options"), f"model.{kind}_options")

    def named(self, attention: str) -> "ModelSettings":
        """Return the same model with another attention, at the defaults of its options."""
        if attention == self.attention:
            return self
        return replace(self, attention=attention, attention_options={}, primal_layers="all")

    def config(self, num_classes: int, inputs: Mapping[str, int]) -> EncoderConfig:
        """Return the model for some data."""
        values = {f.name: getattr(self, f.name) for f in fields(EncoderConfig)}
        sizes: dict[str, Any] = {"num_features": None, "vocab_size": None, **inputs}
        return EncoderConfig(**{**values, "num_classes": num_classes, **sizes})


def _check_options(attention: str, options: Mapping[str, Any], where: str) -> None:
    """Raise for options that an attention does not have, and values of another type."""
    from primal_attention.attention import attention_entry

    given = {"dim", "num_heads", "generator", "device", "dtype"}
    parameters = inspect.signature(attention_entry(attention).factory).parameters
    known = {name: p.annotation for name, p in parameters.items() if name not in given}
    for key, value in options.items():
        if key not in known:
            raise UserError(
                f"{where}: the attention {attention} has no option {key!r}."
                f"{did_you_mean(str(key), known)} Its options: {', '.join(known)}."
            )
        check_value(value, known[key], f"{where}.{key} of the attention {attention}")


@dataclass(frozen=True)
class Recipe:
    """Train the models of a recipe; any setting can be changed here."""

    data: DataSettings
    """What to learn from."""
    model: ModelSettings = field(default_factory=ModelSettings)
    """What to train."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """How to train."""
    compare: tuple[str, ...] = ()
    """Other attentions to train beside, in the same model."""
    threads: int = 1
    """Threads of torch; small models only wait for a second one."""

    def __post_init__(self) -> None:
        for name in self.compare:
            self.model.named(name)  # an unknown name raises
        if self.threads < 1:
            raise ValueError(f"threads must be at least 1, got {self.threads}.")

    @property
    def names(self) -> tuple[str, ...]:
        """The attentions to train, the recipe's own first."""
        return tuple(dict.fromkeys((self.model.attention, *self.compare)))


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Recipe):
    """Train the models of a recipe; any setting can be changed here."""

    out: Path
    """Folder for models, checkpoints, table and report."""
    resume: bool = False
    """Continue the run in that folder, to the same weights as a run without a break."""
    overwrite: bool = False
    """Start anew in a folder that already holds a run."""

    @property
    def recipe(self) -> Recipe:
        """The settings without where to put the result."""
        return Recipe(**{f.name: getattr(self, f.name) for f in fields(Recipe)})
