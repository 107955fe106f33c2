"""Settings of logs of events: the data and the models of experiments, and the estimators."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from primal_attention.models.config import StackConfig
from primal_attention.tasks.task import DataSettings

__all__ = [
    "EventFitOptions",
    "EventLabelSettings",
    "EventOptions",
    "EventSettings",
    "InterpolationOptions",
    "IrregularFitOptions",
    "IrregularSettings",
    "NextEventFitOptions",
    "TimeCode",
]

TimeCode = Literal[
    "bochner",
    "bochner-normal",
    "bochner-inverse-cdf",
    "mercer",
    "log-gap",
    "time2vec",
    "tgat",
    "position",
    "none",
]
"""Features of ``create_time``, the position in the sequence, or none."""

WINDOW = 128
"""Events of a training window."""


_MOST_REFERENCES = 65536
"""Most reference points; no weight depends on their number."""


@dataclass(frozen=True, kw_only=True)
class EventSettings(DataSettings):
    """A log of events: stackoverflow, hawkes (generated), or a .csv, .tsv or .parquet file.

    A file has one row for every event. Columns with usual names are recognised.
    """

    time: str | None = None
    """Column of the times (numbers, or dates as ISO 8601); by default recognised by its name."""
    event: str | None = None
    """Column of the types of events; by default recognised by its name."""
    sequence: str | None = None
    """Column that tells sequences apart; by default recognised by its name."""
    marks: tuple[str, ...] = ()
    """Columns with more about every event, numbers or categories."""
    covariates: tuple[str, ...] = ()
    """Columns with one value for each sequence, numbers or categories."""
    unit: str | None = None
    """Unit of times, milliseconds to weeks for dates (days), any name for numbers."""
    length: int | None = WINDOW
    """Events of a window; longer sequences are trained in windows, the most recent one predicts."""
    fold: int = 0
    """Which of the five test parts of StackOverflow."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length is not None and self.length < 2:
            raise ValueError(f"length must be at least 2 events, got {self.length}.")
        if not 0 <= self.fold < 5:
            raise ValueError(f"fold must be from 0 to 4, got {self.fold}.")

    def columns(self) -> dict[str, Any]:
        """Return which column is which, as :meth:`EventSequences.from_frame` takes them."""
        names = ("time", "event", "sequence", "marks", "covariates", "unit")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class EventLabelSettings(EventSettings):
    """A log with a class for every sequence: bursts (generated), or a table as a file."""

    target: str = "label"
    """Column of the classes, constant in a sequence."""


@dataclass(frozen=True, kw_only=True)
class IrregularSettings(DataSettings):
    """Irregular series: sinusoids (generated), or a table with one row for every time."""

    values: tuple[str, ...] = ()
    """Columns of the channels; empty cells are missing values."""
    time: str | None = None
    """Column of the times (numbers, or dates as ISO 8601); by default recognised by its name."""
    sequence: str | None = None
    """Column that tells series apart; by default recognised by its name."""
    unit: str | None = None
    """Unit of times, milliseconds to weeks for dates (days), any name for numbers."""
    length: int | None = WINDOW
    """Most recent observations of a series that are read."""


@dataclass(frozen=True, kw_only=True)
class EventOptions(StackConfig):
    """A model of events without what the data decide: types, marks, covariates."""

    hidden_ratio: ClassVar[int] = 2

    dim: int = 64
    """Model width."""
    num_heads: int = 4
    """Heads; must divide ``dim``."""
    attention: str = "linear"
    """Name of an attention in the registry; the default is linear in the length."""
    dropout: float = 0.1
    """Probability of dropping an element of each branch in training."""
    time: TimeCode = "bochner"
    """Features of time."""
    time_features: int = 32
    """Width of the features of time."""
    log_time: bool = True
    """Also give the logarithm of gaps and elapsed times."""
    components: int = 16
    """Log-normal components of a waiting time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("time", TimeCode)
        for name in ("time_features", "components"):
            self._check_count(name)


@dataclass(frozen=True, kw_only=True)
class InterpolationOptions(StackConfig):
    """A model of irregular series without what the data decide: the channels."""

    hidden_ratio: ClassVar[int] = 2

    dim: int = 64
    """Model width."""
    num_heads: int = 4
    """Heads; must divide ``dim``."""
    num_layers: int = 1
    """Blocks over the reference points."""
    attention: str = "softmax"
    """Attention between observations, reference points and queries."""
    dropout: float = 0.0
    """Probability of dropping an element of each branch in training."""
    time: TimeCode = "bochner"
    """Features of time."""
    time_features: int = 64
    """Width of the features of time."""
    references: int = 32
    """Reference points, evenly spaced from the first to the last observation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        from primal_attention.attention import attention_entry, list_attentions

        self._check_choice("time", TimeCode)
        if self.time in ("none", "position"):
            raise ValueError(f"Irregular series need features of time, got time={self.time!r}.")
        for name in ("time_features", "references"):
            self._check_count(name)
        if self.references > _MOST_REFERENCES:
            raise ValueError(
                f"references must be at most {_MOST_REFERENCES}, got {self.references}."
            )
        for name in self.layer_attentions:
            if not attention_entry(name).capabilities.cross:
                raise ValueError(
                    f"{name!r} cannot attend to other tokens than its own; use one of: "
                    f"{', '.join(list_attentions(cross=True))}."
                )


@dataclass(frozen=True, kw_only=True)
class EventFitOptions:
    """What is rarely changed in ``EventClassifier``, and what all estimators of events share.

    Example:
        >>> EventFitOptions(time="mercer").max_events
        128
    """

    attention_options: Mapping[str, object] = field(default_factory=dict, hash=False)
    """Options of the attention's constructor, such as ``{"rank": 16}``."""
    time: TimeCode = "bochner"
    """Features of time."""
    dropout: float = 0.1
    """Probability of dropping an element of each branch in training."""
    max_events: int = WINDOW
    """Events of a window. The most recent window predicts; some estimators train on all."""
    patience: int | None = 5
    """Epochs without a better one on the validation part after which to stop; None never stops."""
    eta: float = 0.1
    """Weight of the KSVD term of primal layers."""
    validation: float = 0.1
    """Share of the sequences that chooses the epoch; none if there are fewer than ten."""

    def __post_init__(self) -> None:
        if not 0 <= self.validation < 1:
            raise ValueError(
                f"validation must be a share from 0 to below 1, got {self.validation}."
            )


@dataclass(frozen=True, kw_only=True)
class NextEventFitOptions(EventFitOptions):
    """What is rarely changed in ``EventPredictor``."""

    components: int = 16
    """Log-normal components of a waiting time."""


@dataclass(frozen=True, kw_only=True)
class IrregularFitOptions(EventFitOptions):
    """What is rarely changed in ``IrregularSeriesRegressor``."""

    dropout: float = 0.0
    """Probability of dropping an element of each branch in training."""
    patience: int | None = 15
    """Epochs without a better one on the validation part after which to stop; None never stops."""
    references: int = 32
    """Reference points, evenly spaced from the first to the last observation."""
