"""Study of damaged series: what unequal lengths and missing values cost a classifier.

The last part of every series is cut off at random, or values are taken away at random, in the
training and in the test part. Ours takes such series as they are. MiniRocket takes neither: it gets
zeros, or series that were interpolated and stretched before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from primal_attention.support.output import markdown_table, page
from primal_attention.support.settings import one_of
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.kit.tables import Column, bullets, columns_table
from primal_studies.series.contenders import MINIROCKET, OURS
from primal_studies.series.study import ArchiveOptions, describe_parts

if TYPE_CHECKING:
    from primal_attention.tasks.series.data import SeriesCollection

__all__ = ["SeriesDamage", "SeriesDamageOptions"]

_SETS = (
    "Adiac",
    "ArrowHead",
    "BME",
    "CBF",
    "Chinatown",
    "CricketX",
    "DistalPhalanxOutlineCorrect",
    "DistalPhalanxTW",
)
"""Short sets without gaps of their own."""
_DAMAGES = {
    "none": "whole",
    "cut": "unequal lengths",
    "missing": "30 % missing",
}
"""Kinds of damage and their names in tables."""
_ZEROS, _FILLED = "minirocket-zeros", "minirocket-stretched"
_METHODS = {
    OURS: "ours",
    _ZEROS: "zero-padded MiniRocket",
    _FILLED: "stretched MiniRocket",
}
"""Methods and their names in tables."""


@dataclass(frozen=True, kw_only=True)
class SeriesDamageOptions(ArchiveOptions):
    """What unequal lengths and missing values cost ours and MiniRocket, on 8 short UCR sets."""

    methods: tuple[str, ...] = ()
    """Names of methods; by default all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, "methods", _METHODS)

    def known_sets(self) -> Sequence[str]:
        """Return the names of all sets of the study."""
        return _SETS


class SeriesDamage(Study[SeriesDamageOptions]):
    """Fit every method on every set, whole and damaged."""

    name = "series-damage"
    Options = SeriesDamageOptions

    def cells(self, options: SeriesDamageOptions) -> list[Cell]:
        """Return all methods and kinds of damage of a set together, all sets before any again."""
        from primal_studies.series.archive import check_archive

        check_archive(options.chosen_sets(), options.root)
        marks = {method: _mark(method) for method in options.methods or _METHODS}
        return [
            {"set": name, "seed": seed, "damage": damage, "method": method, "settings": settings}
            for seed in options.seeds
            for name in options.chosen_sets()
            for damage in _DAMAGES
            for method, settings in marks.items()
            # whole series need no filling: both ways are the same
            if (damage, method) != ("none", _FILLED)
        ]

    def run(self, cell: Cell, options: SeriesDamageOptions, scratch: Path) -> Row:
        """Damage both parts, fit one method and score it."""
        import numpy as np

        from primal_studies.peers.series import measure
        from primal_studies.series.archive import damaged, read_archive

        rng = np.random.default_rng([cell["seed"], _SETS.index(cell["set"])])
        whole = read_archive(cell["set"], options.root)
        steps = max(int(part.length.max()) for part in whole)
        train, test = (
            _prepare(damaged(part, cell["damage"], rng), cell["method"], steps) for part in whole
        )
        name = OURS if cell["method"] == OURS else MINIROCKET
        return {**measure(name, train, test, cell["seed"]), **describe_parts(train, test)}

    def describe(self, row: Row) -> str:
        """Return method, set, damage and accuracy of a row."""
        return (
            f"{row['method']} on {row['set']}, {_DAMAGES[row['damage']]}, seed {row['seed']}: "
            f"{100 * row['accuracy']:.1f} %"
        )

    def tables(
        self, rows: Sequence[Row], options: SeriesDamageOptions
    ) -> Mapping[str, str | bytes]:
        """Return a verdict, average accuracies with losses, and the losses on every set."""
        marks = {method: _mark(method) for method in _METHODS}
        kept = [row for row in rows if row["settings"] == marks.get(row["method"])]
        sets, grid = _grid(kept)
        if not sets:
            return {}
        return {
            "verdict.md": _verdict(sets, grid),
            "table.md": _table(sets, grid),
            "sets.md": _set_table(sets, grid),
        }


def _mark(method: str) -> str:
    from primal_studies.peers.series import mark

    return mark(OURS if method == OURS else MINIROCKET)


def _prepare(series: "SeriesCollection", method: str, steps: int) -> "SeriesCollection":
    """Return the series that a method gets: as they are, with zeros, or stretched."""
    from primal_studies.series.archive import stretched, zero_padded

    if method == _ZEROS:
        return zero_padded(series, steps)
    return stretched(series, steps) if method == _FILLED else series


Grid = Mapping[tuple[str, str, str], float]
"""Mean accuracy over seeds in %, by set, damage and method."""


def _grid(rows: Sequence[Row]) -> tuple[list[str], Grid]:
    """Return the complete sets and their accuracies, over the seeds that all have."""
    found: dict[str, dict[tuple[str, str], dict[int, float]]] = {}
    for row in rows:
        groups = found.setdefault(row["set"], {})
        groups.setdefault((row["damage"], row["method"]), {})[row["seed"]] = 100 * row["accuracy"]
    wanted = {(d, m) for d in _DAMAGES for m in _METHODS if (d, m) != ("none", _FILLED)}
    sets, grid = [], {}
    for name in _SETS:
        groups = found.get(name, {})
        shared = set.intersection(*map(set, groups.values())) if set(groups) == wanted else set()
        if not shared:
            continue
        sets.append(name)
        for (damage, method), scores in groups.items():
            grid[name, damage, method] = fmean(scores[seed] for seed in shared)
        grid[name, "none", _FILLED] = grid[name, "none", _ZEROS]
    return sets, grid


def _losses(sets: Sequence[str], grid: Grid, damage: str, method: str) -> list[float]:
    """Return how many points a damage costs, set by set."""
    return [grid[name, "none", method] - grid[name, damage, method] for name in sets]


def _table(sets: Sequence[str], grid: Grid) -> str:
    columns: list[tuple[str, Column]] = [("method", lambda method: _METHODS[method])]
    for damage, words in _DAMAGES.items():
        columns.append((words, _left(sets, grid, damage)))
        if damage != "none":
            columns.append(("loss", _lost(sets, grid, damage)))
    caption = (
        f"Accuracy in % and its loss in points against the whole series, average over {len(sets)} "
        "sets of means over seeds. Unequal lengths: a share from 0 to 50 % of every series is cut "
        "off at its end. Missing: 30 % of the values are missing at random. Both parts of a set "
        "are damaged. *Zero-padded*: zeros in gaps and beyond the ends. *Stretched*: gaps are "
        "filled linearly, then every series is resampled to the full length."
    )
    return page(caption, columns_table(_METHODS, columns))


def _left(sets: Sequence[str], grid: Grid, damage: str) -> Column:
    return lambda method: f"{fmean(grid[name, damage, method] for name in sets):.1f}"


def _lost(sets: Sequence[str], grid: Grid, damage: str) -> Column:
    return lambda method: f"{fmean(_losses(sets, grid, damage, method)):.1f}"


def _set_table(sets: Sequence[str], grid: Grid) -> str:
    pairs = [
        (damage, m) for m in _METHODS for damage in _DAMAGES if (damage, m) != ("none", _FILLED)
    ]
    header = ["set", *(f"{_METHODS[method]}: {_DAMAGES[damage]}" for damage, method in pairs)]
    body = [[name, *(f"{grid[name, *pair]:.1f}" for pair in pairs)] for name in sets]
    return page("Accuracy in %, mean over seeds.", markdown_table(header, body))


def _verdict(sets: Sequence[str], grid: Grid) -> str:
    """Return who loses less, in sentences."""
    lines = []
    for damage in ("cut", "missing"):
        loss = {m: fmean(_losses(sets, grid, damage, m)) for m in _METHODS}
        left = {m: fmean(grid[name, damage, m] for name in sets) for m in _METHODS}
        order = sorted(_METHODS, key=lambda m: loss[m])
        told = ", ".join(f"{_METHODS[m]} {loss[m]:.1f}" for m in order)
        best = max(left, key=lambda m: left[m])
        sides = [f"{_compare(loss[OURS], loss[m])} {_METHODS[m]}" for m in (_ZEROS, _FILLED)]
        lines.append(
            f"**{_DAMAGES[damage].capitalize()}**: ours loses {' and '.join(sides)} (points lost: "
            f"{told}). {_METHODS[best]} has the highest accuracy, {left[best]:.1f} %."
        )
    return bullets(lines) + "\n"


def _compare(ours: float, theirs: float) -> str:
    if f"{ours:.1f}" == f"{theirs:.1f}":
        return "as much as"
    return "less than" if ours < theirs else "more than"
