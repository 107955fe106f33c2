"""``primal repro rerank``: every re-ranker on pictures of objects and palms it never saw.

Every item of the test groups is a query; the other test items are the gallery. Trained re-rankers
learn on the training groups of one set, and are tested on the test groups of both sets.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primal_attention.support.output import markdown_table, page
from primal_attention.support.settings import at_least_one
from primal_attention.tasks.study import Cell, Row, Study

if TYPE_CHECKING:
    from primal_attention.datasets.lists import Search
    from primal_attention.tasks.lists.base import BaseReranker

__all__ = ["RerankOptions", "RerankStudy"]

_SETS = ("coil20", "palm")
_TRAINED: dict[str, tuple[str, dict[str, Any]]] = {
    "context, dual-tied": ("primal-dual", {}),
    "context, softmax": ("softmax", {}),
    "context, static": ("primal-static", {}),
    "context, published": ("softmax", {"affinity": "inner", "input": "linear"}),
}
"""Attention and options of :class:`Reranker` by the name in the tables."""
_LENGTHS = (150, 400)
"""Candidates that are re-ordered."""


@dataclass(frozen=True)
class RerankOptions:
    """Mean average precision of every re-ranker on COIL-20 and Palm, and after transfer."""

    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Splits of the groups into training and test parts; also the seeds of training."""
    steps: int = 400
    """Training steps of a re-ranker."""
    data: Path | None = None
    """Folder of the data; by default that of PRIMAL_DATA."""

    def __post_init__(self) -> None:
        at_least_one(self, "steps")


class RerankStudy(Study[RerankOptions]):
    """One cell a set and seed for methods without training, and one for each trained method."""

    name = "rerank"
    Options = RerankOptions

    def cells(self, options: RerankOptions) -> Sequence[Cell]:
        """Return the cells, seed by seed."""
        return [
            {"home": name, "seed": seed, "trained": method, "steps": options.steps if method else 0}
            for seed in options.seeds
            for method in ("", *_TRAINED)
            for name in _SETS
        ]

    def run(self, cell: Cell, options: RerankOptions, scratch: Path) -> Sequence[Row]:
        """Return the scores of methods without training on a set, or of a trained one on both."""
        from primal_attention.datasets.lists import describe, load_pictures, split_groups
        from primal_attention.tasks.lists.context import Reranker

        seed, home, trained = cell["seed"], cell["home"], cell["trained"]
        if not trained:
            search = _search(home, seed, options.data)
            return [
                row
                for method, untrained in _untrained().items()
                for row in _scores(method, untrained, home, search, "")
            ]
        pictures = load_pictures(home, options.data)
        train = split_groups(pictures.groups, seed)
        x = describe(pictures.images, train)
        attention, changes = _TRAINED[trained]
        rare = {"candidates": 150, "epoch_steps": cell["steps"], **changes}
        reranker = Reranker(attention=attention, max_epochs=1, options=rare, random_state=seed)
        reranker.fit(x[train], pictures.groups[train])
        return [
            row
            for name in _SETS
            for row in _scores(trained, reranker, name, _search(name, seed, options.data), home)
        ]

    def describe(self, row: Row) -> str:
        """Return a row in one line."""
        return f"{row['method']} on {row['set']}, {row['candidates']} results: {row['map']:.1f}"

    def tables(self, rows: Sequence[Row], options: RerankOptions) -> Mapping[str, str | bytes]:
        """Return a table for each set and length, a verdict, and a picture."""
        from primal_studies.lists.tables import gain_picture, rerank_verdict

        header = ["method", *(f"{s}, {k} results" for s in _SETS for k in _LENGTHS)]
        caption = (
            f"Mean average precision in percent over all queries, {_splits(rows)}. Groups of "
            "training and test are disjoint; – was not run. Results behind the list keep their "
            "order and count too. The last row is the share of relevant items that are in the list."
        )
        home = [r for r in rows if r["source"] in ("", r["set"])]
        away = [r for r in rows if r["source"] not in ("", r["set"])]
        return {
            "table.md": page(caption, markdown_table(header, [*_cells(home), _recall(home)])),
            "transfer.md": page(
                "The same after training on the other set.", markdown_table(header, _cells(away))
            ),
            "verdict.md": rerank_verdict(rows),
            "picture.png": gain_picture(rows),
        }


def _splits(rows: Sequence[Row]) -> str:
    count = len({row["seed"] for row in rows})
    return "one split" if count == 1 else f"mean ± standard deviation over {count} splits"


def _cells(rows: Sequence[Row]) -> list[list[str]]:
    methods = dict.fromkeys(r["method"] for r in rows)
    return [[m, *_line([r for r in rows if r["method"] == m], "map")] for m in methods]


def _recall(rows: Sequence[Row]) -> list[str]:
    """Return the share of relevant items that are in the list: no order can move up the others."""
    first = [r for r in rows if r["method"] == "first search"]
    return ["recall of the list", *_line(first, "ceiling")]


def _line(rows: Sequence[Row], score: str) -> list[str]:
    """Return mean and deviation of a score for every set and length."""
    import numpy as np

    line = []
    for place in ((name, length) for name in _SETS for length in _LENGTHS):
        values = [r[score] for r in rows if (r["set"], r["candidates"]) == place]
        if len(values) > 1:
            line.append(f"{np.mean(values):.1f} ± {np.std(values, ddof=1):.1f}")
        else:
            line.append(f"{values[0]:.1f}" if values else "–")
    return line


def _untrained() -> "dict[str, BaseReranker | None]":
    from primal_attention.tasks.lists import (
        AlphaQE,
        Chain,
        DatabaseAugmentation,
        DiffusionReranker,
        KReciprocal,
        NeighbourRefine,
    )

    return {
        "first search": None,
        "query expansion": AlphaQE(),
        "augmentation + expansion": Chain([DatabaseAugmentation(), AlphaQE()]),
        "neighbour refinement": NeighbourRefine(),
        "k-reciprocal, list": KReciprocal(),
        "diffusion, list": DiffusionReranker(),
        "diffusion, whole gallery": DiffusionReranker(scope="gallery", alpha=0.99),
    }


def _search(name: str, seed: int, data: Path | None) -> "Search":
    """Return the search among the test groups of a set."""
    from primal_attention.datasets.lists import (
        describe,
        load_pictures,
        search_all,
        split_groups,
    )

    pictures = load_pictures(name, data)
    train = split_groups(pictures.groups, seed)
    x = describe(pictures.images, train)
    return search_all(x[~train], pictures.groups[~train], len(x))


def _scores(
    method: str, reranker: "BaseReranker | None", name: str, search: "Search", source: str
) -> list[Row]:
    """Return the rows of a method on one search."""
    from primal_attention.tasks.lists.metrics import mean_average_precision, recall_at

    rows: list[Row] = []
    for length in _LENGTHS:
        started = time.process_time()
        ids = search.ids
        if reranker is not None:
            ids = reranker.rerank(search.xq, search.xb, ids, candidates=length).ids
        seconds = time.process_time() - started
        rows.append(
            {
                "method": method,
                "set": name,
                "source": source,
                "candidates": length,
                "map": round(100 * mean_average_precision(ids, search.relevant), 2),
                "ceiling": round(100 * recall_at(search.ids, search.relevant, length), 1),
                "ms_a_query": round(1000 * seconds / len(ids), 2),
            }
        )
    return rows
