"""Study of the parts of our classifier: what each one gains, and what another attention gains.

Three groups of sets: UEA sets with several channels, UCR sets, and a generated set in which only
the relation of two far events decides. All have at least 100 training series; with fewer the
classifier has no attention part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from primal_attention.support.output import markdown_table, page
from primal_attention.support.settings import one_of
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.kit.tables import bullets
from primal_studies.series.contenders import OURS, SETS
from primal_studies.series.study import ArchiveOptions, describe_parts

if TYPE_CHECKING:
    from primal_attention.tasks.series.data import SeriesCollection

__all__ = ["SeriesParts", "SeriesPartsOptions", "two_waves"]

_FEWEST = 100
"""Training series from which on the classifier has an attention part."""
_UEA = (
    "Handwriting",
    "Heartbeat",
    "JapaneseVowels",
    "NATOPS",
    "SelfRegulationSCP1",
    "SelfRegulationSCP2",
    "SpokenArabicDigits",
    "UWaveGestureLibrary",
)
_GENERATED = "two waves"
_GROUPS = ("several channels", "one channel", "generated")
_STEPS, _CASES = 2000, 400
"""Length of a generated series, and series in each part of the set."""

_ALL, _WITHOUT = "all", "without attention"
_VARIANTS: dict[str, dict[str, Any]] = {
    _ALL: {},
    "without convolutions": {"options": {"parts": ("quantiles", "attention")}},
    "without quantiles": {"options": {"parts": ("convolutions", "attention")}},
    _WITHOUT: {"options": {"parts": ("convolutions", "quantiles")}},
    "convolutions alone": {"options": {"parts": ("convolutions",)}},
    "attention alone": {"options": {"parts": ("attention",)}},
    "softmax": {"attention": "softmax"},
    "linear": {"attention": "linear"},
}
"""Changes of the defaults by name."""
_GAINS = {
    "convolutions": (_ALL, "without convolutions"),
    "quantiles": (_ALL, "without quantiles"),
    "attention": (_ALL, _WITHOUT),
    "softmax attention": ("softmax", _WITHOUT),
    "linear attention": ("linear", _WITHOUT),
}
"""What a part gains: the accuracy of the first variant less that of the second."""


@dataclass(frozen=True, kw_only=True)
class SeriesPartsOptions(ArchiveOptions):
    """Our classifier without one of its parts, and with another attention."""

    variants: tuple[str, ...] = ()
    """Names of variants; by default all."""
    uea: Path | None = None
    """Folder of the UEA sets; by default uea in the folder of PRIMAL_DATA."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, "variants", _VARIANTS)

    def known_sets(self) -> Sequence[str]:
        """Return the names of all sets of the study, group by group."""
        return (*_UEA, *(name for name, cases in SETS.items() if cases >= _FEWEST), _GENERATED)


class SeriesParts(Study[SeriesPartsOptions]):
    """Fit every variant on every set."""

    name = "series-parts"
    Options = SeriesPartsOptions

    def cells(self, options: SeriesPartsOptions) -> list[Cell]:
        """Return all variants of a set together, all sets once before any again."""
        sets = options.chosen_sets()
        _check_data(sets, options)
        marks = {name: _mark(name) for name in options.variants or _VARIANTS}
        return [
            {"set": name, "seed": seed, "variant": variant, "settings": settings}
            for seed in options.seeds
            for name in sets
            for variant, settings in marks.items()
        ]

    def run(self, cell: Cell, options: SeriesPartsOptions, scratch: Path) -> Row:
        """Fit one variant on one set and score its test part."""
        from primal_studies.peers.series import measure

        train, test = _read(cell["set"], options)
        found = measure(OURS, train, test, cell["seed"], **_VARIANTS[cell["variant"]])
        return {**found, **describe_parts(train, test)}

    def describe(self, row: Row) -> str:
        """Return variant, set and accuracy of a row."""
        return (
            f"{row['variant']} on {row['set']}, seed {row['seed']}: {100 * row['accuracy']:.1f} %, "
            f"{row['fit_seconds']:.1f} s to fit"
        )

    def tables(self, rows: Sequence[Row], options: SeriesPartsOptions) -> Mapping[str, str | bytes]:
        """Return a verdict, gains and accuracies by group, and accuracies by set."""
        marks = {name: _mark(name) for name in _VARIANTS}
        kept = [row for row in rows if row["settings"] == marks.get(row["variant"])]
        sets, grid = _grid(kept, options.known_sets())
        if not sets:
            return {}
        return {
            "verdict.md": _verdict(sets, grid),
            "gains.md": _gain_table(sets, grid),
            "table.md": _table(sets, grid),
            "sets.md": _set_table(sets, grid),
        }


def _mark(variant: str) -> str:
    from primal_studies.peers.series import mark

    return mark(OURS, **_VARIANTS[variant])


# data


def two_waves(cases: int, seed: int, steps: int = _STEPS) -> "SeriesCollection":
    """Return noisy series whose class is whether two far waves have the same sign.

    One wave is in the first part of a series and one in the last; each is a single cycle that
    begins upwards or downwards. Each sign is as frequent in both classes at both places, so that
    neither wave alone, nor any weighted sum over short patterns, tells the class.

    Args:
        cases: Number of series, half of them in each class.
        seed: Seed of signs, places and noise.
        steps: Length of a series.
    """
    import numpy as np

    from primal_attention.tasks.series.data import series_from_arrays

    rng = np.random.default_rng(seed)
    length = steps // 12
    wave = 3 * np.hanning(length) * np.sin(2 * np.pi * np.arange(length) / length)
    number = np.arange(cases)
    sign, is_same = np.where(number // 2 % 2, 1, -1), number % 2 == 1
    x = 0.3 * rng.normal(size=(cases, steps))
    for row, first, same in zip(x, sign, is_same, strict=True):
        second = first if same else -first
        for begin, way in ((0, first), (3 * steps // 4 - length, second)):
            start = begin + int(rng.integers(steps // 4))
            row[start : start + length] += way * wave
    return series_from_arrays(list(x), np.where(is_same, "same", "other"))


def _read(name: str, options: SeriesPartsOptions) -> "tuple[SeriesCollection, SeriesCollection]":
    from primal_attention.tasks.series.files import load_series
    from primal_studies.series.archive import read_archive

    if name == _GENERATED:
        return two_waves(_CASES, 0), two_waves(_CASES, 1)
    if name not in _UEA:
        return read_archive(name, options.root)
    train, test = (load_series(name, part, root=options.uea) for part in ("train", "test"))
    return train, test


def _check_data(sets: Sequence[str], options: SeriesPartsOptions) -> None:
    """Raise if the files of a set are missing."""
    from primal_attention.tasks.series.files import list_series
    from primal_studies.series.archive import check_archive

    if ucr := [name for name in sets if _group(name) == "one channel"]:
        check_archive(ucr, options.root)
    if uea := [name for name in sets if name in _UEA]:
        missing = sorted(set(uea) - set(list_series(options.uea)))
        if missing:
            raise ValueError(
                f"the folder of the UEA sets lacks {', '.join(missing)}; name those to run with "
                "--sets."
            )


def _group(name: str) -> str:
    if name == _GENERATED:
        return "generated"
    return "several channels" if name in _UEA else "one channel"


# tables

Grid = Mapping[tuple[str, str], float]
"""Mean accuracy over seeds in %, by set and variant."""


def _grid(rows: Sequence[Row], known: Sequence[str]) -> tuple[list[str], Grid]:
    """Return the sets with all variants and their accuracies, over the seeds that all have."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for row in rows:
        group = found.setdefault(row["set"], {})
        group.setdefault(row["variant"], {})[row["seed"]] = 100 * row["accuracy"]
    sets, grid = [], {}
    for name in known:
        group = found.get(name, {})
        shared = (
            set.intersection(*map(set, group.values())) if set(group) == set(_VARIANTS) else set()
        )
        if shared:
            sets.append(name)
            for variant, scores in group.items():
                grid[name, variant] = fmean(scores[seed] for seed in shared)
    return sets, grid


def _by_group(sets: Sequence[str]) -> dict[str, list[str]]:
    found = {group: [name for name in sets if _group(name) == group] for group in _GROUPS}
    return {group: names for group, names in found.items() if names}


def _differences(sets: Sequence[str], grid: Grid, gain: str) -> list[float]:
    """Return what a part gains in points, set by set."""
    more, less = _GAINS[gain]
    return [grid[name, more] - grid[name, less] for name in sets]


def _duels(values: Sequence[float]) -> tuple[int, int, int]:
    """Return how many values are above, at and below zero."""
    above, below = sum(v > 1e-9 for v in values), sum(v < -1e-9 for v in values)
    return above, len(values) - above - below, below


def _gain_table(sets: Sequence[str], grid: Grid) -> str:
    groups = _by_group(sets)
    lines = []
    for gain in _GAINS:
        line = [gain]
        for names in groups.values():
            values = _differences(names, grid, gain)
            line.append(f"{fmean(values):+.1f} ({' / '.join(map(str, _duels(values)))})")
        lines.append(line)
    caption = (
        "Gain of each part in points of accuracy: the whole classifier less the one without the "
        "part, average over sets of means over seeds; in brackets on how many sets it gains, "
        "changes nothing and loses. *Softmax attention* and *linear attention* stand in the place "
        "of primal attention and are compared with the classifier without attention."
    )
    return page(caption, markdown_table(["part", *_header(groups)], lines))


def _table(sets: Sequence[str], grid: Grid) -> str:
    groups = _by_group(sets)
    lines = [
        [
            variant,
            *(f"{fmean(grid[name, variant] for name in names):.1f}" for names in groups.values()),
        ]
        for variant in _VARIANTS
    ]
    caption = "Test accuracy in %, mean over seeds, then over sets."
    return page(caption, markdown_table(["variant", *_header(groups)], lines))


def _header(groups: Mapping[str, Sequence[str]]) -> list[str]:
    return [f"{group}, {len(names)} set{'s' * (len(names) > 1)}" for group, names in groups.items()]


def _set_table(sets: Sequence[str], grid: Grid) -> str:
    lines = [[name, *(f"{grid[name, v]:.1f}" for v in _VARIANTS)] for name in sets]
    caption = "Test accuracy in % of every variant, mean over seeds."
    return page(caption, markdown_table(["set", *_VARIANTS], lines))


def _verdict(sets: Sequence[str], grid: Grid) -> str:
    """Return which part gains most, and what each attention gains, group by group."""
    lines = []
    for group, names in _by_group(sets).items():
        gains = {gain: fmean(_differences(names, grid, gain)) for gain in _GAINS}
        parts = ("convolutions", "quantiles", "attention")
        order = sorted(parts, key=lambda gain: -gains[gain])
        told = ", ".join(f"{gain} {gains[gain]:+.1f}" for gain in order)
        wins, draws, losses = _duels(_differences(names, grid, "attention"))
        where = f"{len(names)} sets" if len(names) > 1 else "one set"
        lines.append(
            f"**{group.capitalize()}** ({where}): points gained by {told}. "
            f"Attention {_effect(gains['attention'])}: it gains on {wins}, changes nothing on "
            f"{draws} and loses on {losses}. In its place softmax has "
            f"{gains['softmax attention']:+.1f} and linear attention "
            f"{gains['linear attention']:+.1f}."
        )
    return bullets(lines) + "\n"


def _effect(gain: float) -> str:
    shown = f"{gain:+.1f}"
    if float(shown) == 0:
        return "earns nothing"
    return "helps" if gain > 0 else "harms"
