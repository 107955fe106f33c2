"""``primal repro long-documents``: one vector for a long document, on one thread of a laptop.

Cost: time and peak memory of one forward, for the shape of MiniLM and that of a small ModernBERT
with random weights. Quality: MiniLM without training, on texts with known answers. Reading a
document whole stands beside cutting it into pieces that the published model can read.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from primal_attention.support.output import page
from primal_attention.support.settings import at_least_one, one_of
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.kit.tables import columns_table, grouped, pivot, plot_lines

__all__ = ["LongDocuments", "LongDocumentsOptions"]

_WAYS = (
    "whole, adaptive",
    "whole, softmax",
    "whole, repeated positions",
    "pieces, average",
    "pieces, best",
    "start",
)
_TEXTS = {"reviews": 1024, "articles": 2048, "planted": 2048}
"""Sets of documents, and the most tokens of one."""
_MODELS = ("minilm", "modernbert")
_ONE_RUN = 16_384
"""From this length on, the run that counts the memory is also the one that is timed."""


@dataclass(frozen=True)
class LongDocumentsOptions:
    """One vector for a long document: cost and quality."""

    lengths: tuple[int, ...] = (512, 2048, 8192, 32_768)
    """Tokens of a document whose cost is measured."""
    models: tuple[str, ...] = _MODELS
    """Shapes: minilm, modernbert."""
    texts: tuple[str, ...] = tuple(_TEXTS)
    """Documents: halves of reviews or articles, or articles with a planted sentence."""
    num_documents: int = 40
    """Documents of each kind."""
    repeats: int = 3
    """Turns of every way; documents from 16,384 tokens on are read once."""
    data: Path | None = None
    """Folder with text/imdb and text/wikitext-2; by default that of PRIMAL_DATA."""

    def __post_init__(self) -> None:
        at_least_one(self, "lengths", "num_documents", "repeats")


class LongDocuments(Study[LongDocumentsOptions]):
    """One cell a length, whose ways take turns, and one a way to embed texts."""

    name = "long-documents"
    Options = LongDocumentsOptions

    def cells(self, options: LongDocumentsOptions) -> Sequence[Cell]:
        """Return the cost, shortest documents first, and the quality before the longest ones."""
        one_of(options, "models", _MODELS)
        one_of(options, "texts", _TEXTS)
        quality = [
            {"texts": texts, "way": way, "count": options.num_documents, "most": _TEXTS[texts]}
            for texts in options.texts
            for way in _WAYS
        ]
        cost: list[dict[str, Any]] = [
            {"model": model, "tokens": tokens, "repeats": options.repeats}
            for tokens in sorted(options.lengths)
            for model in options.models
        ]
        short = [cell for cell in cost if cell["tokens"] < _ONE_RUN]
        return [*short, *quality, *cost[len(short) :]]

    def run(self, cell: Cell, options: LongDocumentsOptions, scratch: Path) -> Row | Sequence[Row]:
        """Embed and score, or time."""
        return self._quality(cell, options) if "texts" in cell else self._cost(cell)

    def _quality(self, cell: Cell, options: LongDocumentsOptions) -> Row:
        import time

        from primal_studies.kit.pretrained import minilm
        from primal_studies.surgery.long_documents_models import embed_way
        from primal_studies.surgery.long_documents_texts import make_pairs, score

        tokenizer = minilm()[1]
        pairs = make_pairs(cell["texts"], cell["count"], cell["most"], tokenizer, options.data)
        lengths = [len(tokenizer(t, truncation=False).input_ids) for t in pairs.documents]
        start = time.thread_time()
        vectors = embed_way(cell["way"], [*pairs.queries, *pairs.documents])
        seconds = time.thread_time() - start
        found = score(vectors[: len(pairs.queries)], vectors[len(pairs.queries) :])
        return {**found, "median tokens": int(median(lengths)), "cpu seconds": round(seconds, 1)}

    def _cost(self, cell: Cell) -> list[Row]:
        from primal_studies.kit.timing import machine, peak_mb, take_turns
        from primal_studies.surgery.long_documents_models import forwards

        runs = forwards(cell["model"], cell["tokens"])
        peaks, times = dict[str, float](), dict[str, list[float]]()
        for name, run in runs.items():
            # counting takes some microseconds an operator, which long documents do not notice
            peaks[name] = peak_mb(lambda: times.update(take_turns({name: run}, 1)))  # noqa: B023
        if cell["tokens"] < _ONE_RUN:
            times = take_turns(runs, cell["repeats"])
        return [
            {
                "way": name,
                "seconds": float(f"{median(times[name]):.3g}"),
                "MB": round(peaks[name], 1),
                "machine": machine(),
            }
            for name in runs
        ]

    def tables(
        self, rows: Sequence[Row], options: LongDocumentsOptions
    ) -> Mapping[str, str | bytes]:
        """Return the tables of quality and cost, and a picture of the cost."""
        quality = [row for row in rows if "texts" in row]
        cost = [row for row in rows if "tokens" in row]
        parts = [*_quality_parts(quality), *_cost_parts(cost)]
        files: dict[str, str | bytes] = {"table.md": page(*parts)}
        if cost:
            files["picture.png"] = _picture(cost)
        return files


def _quality_parts(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    words = (
        "all-MiniLM-L6-v2 without training, in one thread. *Reviews* and *articles*: the first "
        "half of a document looks for its second half. *Planted*: a sentence looks for the article "
        "that it was put into. *Whole* interpolates the positions of the model, or repeats them. "
        "*Pieces* have 512 tokens; their vectors are averaged, or the best one counts. *First* is "
        "the share of queries whose own document is the nearest, with its standard error; *rank* "
        "the mean reciprocal rank."
    )
    table = columns_table(
        rows,
        {
            "documents": "{texts}",
            "number": "{count}",
            "tokens (median)": "{median tokens:,}",
            "way": "{way}",
            "first": lambda row: f"{100 * row['first']:.0f} ± {_error(row):.0f} %",
            "rank": "{reciprocal rank:.3f}",
            "cpu seconds": "{cpu seconds}",
        },
    )
    return [words, table]


def _error(row: Row) -> float:
    """Return the standard error of a share, in percent."""
    return 100 * math.sqrt(row["first"] * (1 - row["first"]) / row["count"])


def _cost_parts(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    parts = [
        "Time and peak memory of the tensors of one forward over one document, without the "
        "weights; ways take turns in one process, median of processor time of one thread, and one "
        f"run from {_ONE_RUN:,} tokens on. *Pieces* are of 512 tokens, read as one batch by the "
        f"published model. {rows[0]['machine']}."
    ]
    for column, shown in (("seconds", "{seconds}"), ("MB", "{MB:,.0f}")):
        lines = {"model": "model", f"{column} by way": "way"}
        parts.append(pivot(rows, lines, "tokens", shown, title="{:,}"))
    return parts


def _picture(rows: Sequence[Row]) -> bytes:
    """Return time and memory over length, one panel a model."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for column in ("seconds", "MB"):
        for (model, way), found in grouped(rows, "model", "way").items():
            points = [(row["tokens"], row[column]) for row in found]
            panels.setdefault(f"{model}: {column}", {})[way] = points
    return plot_lines(
        panels,
        xlabel="tokens of a document",
        ylabels=["seconds", "MB"],
        columns=len({row["model"] for row in rows}),
        dashed=["pieces"],
    )
