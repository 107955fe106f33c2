"""Settings of time series: the data and the model of an experiment, and the estimators."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

from primal_attention.models.config import StackConfig
from primal_attention.support.command import did_you_mean
from primal_attention.tasks.task import DataSettings

__all__ = [
    "PARTS",
    "Part",
    "SeriesFitOptions",
    "SeriesOptions",
    "SeriesSettings",
    "SeriesValueSettings",
    "Stem",
]

Part = Literal["convolutions", "quantiles", "attention"]
"""Parts of a model of series."""
PARTS: tuple[Part, ...] = get_args(Part)
"""All of them, in the order of their shares."""
Stem = Literal["both", "conv", "patch"]

CONV_WIDTHS = (3, 9, 19)
"""Widths of the stem's convolutions, in time steps, or in strides where they stride."""


@dataclass(frozen=True, kw_only=True)
class SeriesSettings(DataSettings):
    """Time series: a UEA set by name, or files: .ts, .npz, .csv, .tsv or .parquet.

    A table has one row a time step if it has the column of cases, else one row a series.
    """

    target: str = "label"
    """Tables: column of the classes, or of the numbers to predict."""
    case: str = "case"
    """Tables with one row a time step: column with the name of the series."""
    jitter: float = 0.0
    """Strength of random changes of every training series, such as 0.1; 0 for none."""


@dataclass(frozen=True, kw_only=True)
class SeriesValueSettings(SeriesSettings):
    """Time series with a number each: a set by name, or files: .ts, .npz, .csv, .tsv or .parquet.

    A table has one row a time step if it has the column of cases, else one row a series.
    """

    @property
    def note(self) -> str:
        """What a report says of a test part that was held out; empty with a test file."""
        if self.train is None or self.test is not None:
            return ""
        return (
            f"There is no test file: {self.test_share:.0%} of {self.train.name} were held out at "
            "random, and scored once."
        )


@dataclass(frozen=True, kw_only=True)
class SeriesOptions(StackConfig):
    """A network of series without what the data decide: channels, classes, patch."""

    hidden_ratio: ClassVar[int] = 2

    dim: int = 64
    """Model width."""
    num_heads: int = 4
    """Heads; must divide ``dim``."""
    attention: str = "primal-dual"
    """Name of an attention in the registry."""
    dropout: float = 0.2
    """Probability of dropping an element of each branch in training."""
    stem: Stem = "both"
    """Stem: patch (a linear map of every patch), conv (convolutions of three widths), or both."""
    max_tokens: int = 48
    """Longer series are cut into at most so many patches; a patch is one token."""
    segments: int = 8
    """Points of the series around which the head averages."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("stem", Stem)
        for name in ("max_tokens", "segments"):
            self._check_count(name)
        if self.stem != "patch" and self.dim < len(CONV_WIDTHS):
            raise ValueError(
                f"stem={self.stem!r} needs dim of at least {len(CONV_WIDTHS)}, got {self.dim}."
            )


@dataclass(frozen=True, kw_only=True)
class SeriesFitOptions:
    """What is rarely changed in ``SeriesClassifier`` and ``SeriesRegressor``.

    Example:
        >>> SeriesFitOptions(parts=("convolutions", "quantiles")).dropout
        0.2
    """

    parts: tuple[str, ...] = PARTS
    """Parts to fit, some of convolutions, quantiles and attention."""
    attention_options: Mapping[str, object] = field(default_factory=dict, hash=False)
    """Options of the attention's constructor, such as ``{"rank": 16}``."""
    dropout: float = 0.2
    """Probability of dropping an element of each branch in training."""

    def __post_init__(self) -> None:
        given: object = self.parts
        named = list(given) if isinstance(given, Collection) and not isinstance(given, str) else []
        unknown = [name for name in named if name not in PARTS]
        if not named or unknown:
            wrong = unknown[0] if unknown else given
            raise ValueError(
                f"parts must be a tuple with some of {', '.join(PARTS)}, got {given!r}."
                f"{did_you_mean(wrong, PARTS) if isinstance(wrong, str) else ''}"
            )
