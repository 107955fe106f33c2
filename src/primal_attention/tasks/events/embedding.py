"""Vectors of events: type, time, marks and covariates, concatenated and projected."""

from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from primal_attention.tasks.events.settings import EventOptions

__all__ = ["EventConfig", "EventEmbedding"]

_MARK_DROPOUT = 0.1
"""Share of events whose marks are hidden in training: sampled future events have none."""


@dataclass(frozen=True, kw_only=True)
class EventConfig(EventOptions):
    """What the data decide of every model of events."""

    num_types: int
    """Types of events."""
    mark_numbers: int = 0
    """Numeric marks."""
    mark_levels: tuple[int, ...] = ()
    """Levels of every categorical mark."""
    covariate_numbers: int = 0
    """Numeric covariates."""
    covariate_levels: tuple[int, ...] = ()
    """Levels of every categorical covariate."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("mark_levels", "covariate_levels"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check_count("num_types")


class EventEmbedding(nn.Module):
    """One vector for every event: its type, its time, its marks, the covariates.

    The parts are concatenated, then projected, so that no part is added onto another.

    Args:
        config: Sizes.
        features: Width of the features of time.
        extra_types: Types beyond those of the data.
    """

    def __init__(self, config: EventConfig, features: int, extra_types: int = 0) -> None:
        super().__init__()
        self.num_types = config.num_types + extra_types
        self.types = nn.Embedding(self.num_types, config.dim)
        self.mark_levels = _embeddings(config.mark_levels)
        self.covariate_levels = _embeddings(config.covariate_levels)
        width = config.dim + features
        width += 2 * (config.mark_numbers + config.covariate_numbers)
        width += _LEVEL_DIM * (len(config.mark_levels) + len(config.covariate_levels))
        self.sizes = (
            config.mark_numbers,
            len(config.mark_levels),
            config.covariate_numbers,
            len(config.covariate_levels),
        )
        self.project = nn.Linear(width, config.dim)

    def forward(
        self,
        types: Int[Tensor, "b n"],
        features: Float[Tensor, "b n p"],
        marks_numbers: Float[Tensor, "b n k"] | None = None,
        marks_levels: Int[Tensor, "b n k"] | None = None,
        covariates_numbers: Float[Tensor, "b k"] | None = None,
        covariates_levels: Int[Tensor, "b k"] | None = None,
    ) -> Float[Tensor, "b n c"]:
        """Return the stream before the first block.

        Args:
            types: Types of events; zero at padded positions.
            features: Features of time.
            marks_numbers: Standardised numeric marks; NaN where missing.
            marks_levels: Categorical marks; −1 where missing.
            covariates_numbers: Standardised numeric covariates; NaN where missing.
            covariates_levels: Categorical covariates; −1 where missing.
        """
        parts = [self.types(types), features]
        given = (marks_numbers, marks_levels, covariates_numbers, covariates_levels)
        names = ("numeric marks", "categorical marks", "numeric covariates")
        for value, size, name in zip(
            given, self.sizes, (*names, "categorical covariates"), strict=True
        ):
            found = 0 if value is None else value.shape[-1]
            if found != size:
                raise ValueError(f"The model has {size} {name}, got {found}.")
        hidden = None
        if self.training and any(self.sizes[:2]):
            hidden = torch.rand(types.shape, device=types.device) < _MARK_DROPOUT
        if marks_numbers is not None:
            parts.append(_numbers(marks_numbers, hidden))
        if marks_levels is not None:
            parts.append(_levels(self.mark_levels, marks_levels, hidden))
        for wide in (
            None if covariates_numbers is None else _numbers(covariates_numbers),
            None
            if covariates_levels is None
            else _levels(self.covariate_levels, covariates_levels),
        ):
            if wide is not None:
                parts.append(wide[:, None].expand(-1, types.shape[1], -1))
        return self.project(torch.cat([p.to(features.dtype) for p in parts], -1))


_LEVEL_DIM = 8
"""Width of the embedding of a categorical mark or covariate."""


def _embeddings(levels: tuple[int, ...]) -> nn.ModuleList:
    # the last row stands for a missing level
    return nn.ModuleList(nn.Embedding(count + 1, _LEVEL_DIM) for count in levels)


def _numbers(values: Tensor, hidden: Tensor | None = None) -> Tensor:
    """Return numbers with zero for missing ones, and which of them are there."""
    there = ~values.isnan()
    if hidden is not None:
        there = there & ~hidden[..., None]
    return torch.cat([torch.where(there, values, 0.0), there.to(values.dtype)], -1)


def _levels(tables: nn.ModuleList, values: Tensor, hidden: Tensor | None = None) -> Tensor:
    columns = []
    for table, column in zip(tables, values.unbind(-1), strict=True):
        missing = column < 0 if hidden is None else (column < 0) | hidden
        last = cast(nn.Embedding, table).num_embeddings - 1
        columns.append(table(torch.where(missing, last, column)))
    return torch.cat(columns, -1)
