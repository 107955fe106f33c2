"""``primal repro adaptive``: what trained models keep when they read a part of the keys.

SmolLM2-135M reads WikiText-2, MiniLM reads reviews of IMDb, all layers converted, without training.
A row is one way to choose what is read exactly and what becomes of the rest; the share of pairs of
queries and keys that a way reads stands beside what is left of the model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primal_attention.support.output import page
from primal_attention.support.settings import at_least_one, one_of
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.kit.tables import Column, Files, Picture, columns_table, grouped

if TYPE_CHECKING:
    from primal_studies.surgery.adaptive_ways import Way

__all__ = ["AdaptiveStudy", "AdaptiveStudyOptions"]

_MODELS = ("minilm", "smollm2")
_LENGTHS = {"smollm2": (2048, 1024, 8192), "minilm": (512, 256)}
"""Tokens, the most important length first."""
_BASE: dict[str, dict[str, Any]] = {
    "smollm2": {"block": 16, "window": 4, "top": 16, "sinks": 4, "rank": 4, "exact": 0},
    "minilm": {"block": 16, "window": 1, "top": 8, "sinks": 4, "rank": 4, "exact": 0},
}
"""What ``adaptive`` reads here; chosen on text for validation."""
_ORIGINAL, _ADAPTIVE, _STREAMING, _WINDOW = "original", "adaptive", "streaming", "window only"
_MAIN = (_ADAPTIVE, _STREAMING)
_CURVE = 8192
"""From this length on, only the main ways are measured."""


def _ways(model: str, tokens: int) -> dict[str, dict[str, Any]]:
    """Return the ways of a model by name: settings of the plan, and of scores and the rest."""
    base = _BASE[model]
    top, window = base["top"], base["window"]
    # a window that reads as many blocks as the chosen ones and the near ones
    sides = 1 if model == "smollm2" else 2
    wide = {"top": 0, "far": "nothing"}
    ways: dict[str, dict[str, Any]] = {
        _ADAPTIVE: {},
        _STREAMING: wide | {"window": window + top // sides},
    }
    if tokens < _CURVE:
        ways |= {
            _WINDOW: wide | {"window": window + top // sides, "sinks": 0},
            "no sinks": {"sinks": 0},
            "no choice": {"top": 0, "window": window + top // sides},
            "chosen by mass": {"score": "mass"},
            "chosen by mean key": {"score": "mean"},
            "rest by means": {"far": "means"},
        }
    ways["rest left out"] = {"far": "nothing"}
    for count in (top // 4, top // 2, 3 * top // 2) if tokens < _CURVE else (top // 2,):
        ways[f"{_ADAPTIVE}, top {count}"] = {"top": count}
        blocks = window + count // sides
        ways[f"{_STREAMING}, {blocks} blocks"] = wide | {"window": blocks}
    return {name: base | changes for name, changes in ways.items()}


@dataclass(frozen=True)
class AdaptiveStudyOptions:
    """Quality of trained models against the share of pairs that they read."""

    models: tuple[str, ...] = _MODELS
    """Models: smollm2, minilm."""
    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 8192)
    """Tokens of a text; each model takes those that it was trained for."""
    num_texts: int = 2
    """Texts of WikiText-2; one from 8,192 tokens on."""
    num_reviews: int = 24
    """Reviews of IMDb."""
    validation: bool = False
    """Read text for validation, where settings may be chosen, instead of text for tests."""
    data: Path | None = None
    """Folder with text/imdb and text/wikitext-2; by default that of PRIMAL_DATA."""

    def __post_init__(self) -> None:
        at_least_one(self, "lengths", "num_texts", "num_reviews")


class AdaptiveStudy(Study[AdaptiveStudyOptions]):
    """One cell a model, a length and a way to read."""

    name = "adaptive"
    Options = AdaptiveStudyOptions

    def cells(self, options: AdaptiveStudyOptions) -> Sequence[Cell]:
        """Return the cells: at every length first the main ways, then what changes one thing."""
        one_of(options, "models", _MODELS)
        part = "validation" if options.validation else "test"
        cells: dict[bool, list[Cell]] = {True: [], False: []}
        for model, lengths in ((m, _LENGTHS[m]) for m in _MODELS if m in options.models):
            for tokens in (n for n in lengths if n in options.lengths):
                count = options.num_reviews if model == "minilm" else options.num_texts
                count = 1 if tokens >= _CURVE else count
                fixed = {"model": model, "tokens": tokens, "texts": count, "part": part}
                if model == "smollm2":
                    cells[True].append({**fixed, "way": _ORIGINAL})
                for name, settings in _ways(model, tokens).items():
                    cells[name in _MAIN].append({**fixed, "way": name, **settings})
        return [*cells[True], *cells[False]]

    def run(self, cell: Cell, options: AdaptiveStudyOptions, scratch: Path) -> Row:
        """Read the texts in one way, and compare with the original."""
        import time

        from primal_studies.surgery.adaptive_ways import compare_encoders, measure_decoder

        is_test, way = cell["part"] == "test", _way(cell)
        where = (cell["tokens"], cell["texts"])
        start = time.thread_time()
        if cell["model"] == "smollm2":
            found = measure_decoder(way, *where, "test" if is_test else "valid", options.data)
        else:
            assert way is not None
            found = compare_encoders(way, *where, "test" if is_test else "train", options.data)
        return {**found, "cpu seconds": round(time.thread_time() - start, 1)}

    def tables(
        self, rows: Sequence[Row], options: AdaptiveStudyOptions
    ) -> Mapping[str, str | bytes]:
        """Return the tables of both models, and quality over the share of pairs read."""
        rows = [row for row in rows if row["part"] == rows[0]["part"]]
        files: Files = {}
        for model, header in (("smollm2", _decoder_columns), ("minilm", _encoder_columns)):
            mine = [row for row in rows if row["model"] == model]
            if mine:
                files[f"{model}.md"] = _table(model, mine, header(mine))
        files["picture.png"] = _picture(rows)
        return files


def _way(cell: Cell) -> "Way | None":
    """Return what a cell reads; nothing is left out if there is none."""
    from primal_attention.functional.adaptive_blocks import BlockPlan
    from primal_studies.surgery.adaptive_ways import Way

    if cell["way"] == _ORIGINAL:
        return None
    plan = BlockPlan(**{key: cell[key] for key in _BASE["minilm"]})
    return Way(plan, cell.get("score", "bound"), cell.get("far", "moments"))


def _ratios(rows: Sequence[Row]) -> dict[int, float]:
    """Return the perplexity of the original by length."""
    return {row["tokens"]: row["perplexity"] for row in rows if row["way"] == _ORIGINAL}


def _decoder_columns(rows: Sequence[Row]) -> dict[str, Column]:
    original = _ratios(rows)
    return {
        "perplexity": "{perplexity:.2f}",
        "of original": lambda row: (
            f"{row['perplexity'] / original[row['tokens']]:.3f}"
            if row["tokens"] in original
            else "—"
        ),
    }


def _encoder_columns(rows: Sequence[Row]) -> dict[str, Column]:
    return {
        "cosine (lowest)": "{cosine:.4f} ({lowest:.3f})",
        "R² of outputs": "{R²:.3f}",
        "same nearest": lambda row: f"{100 * row['same nearest']:.0f} %",
        "ten nearest": lambda row: f"{100 * row['ten nearest']:.0f} %",
    }


def _table(model: str, rows: Sequence[Row], columns: Mapping[str, Column]) -> str:
    base = _BASE[model]
    texts = {"smollm2": "WikiText-2", "minilm": "reviews of IMDb"}[model]
    counts = ", ".join(
        f"{group[0]['texts']} of {tokens:,} tokens"
        for tokens, group in grouped(rows, "tokens").items()
    )
    words = (
        f"{ {'smollm2': 'SmolLM2-135M-Instruct', 'minilm': 'all-MiniLM-L6-v2'}[model] }, all "
        f"layers, no training; {texts}, {rows[0]['part']} part: {counts}. *Read* is the share of "
        f"pairs that are read exactly. *adaptive*: blocks of {base['block']}, {base['window']} "
        f"near, {base['top']} chosen, {base['sinks']} first keys, rank {base['rank']}; other rows "
        "change what they name. *streaming* and *window only* read a window of as many blocks, "
        "with and without the first keys. *no choice* sums all beyond such a window by moments."
    )
    shown: dict[str, Column] = {
        "tokens": "{tokens:,}",
        "way": "{way}",
        "read": lambda row: f"{100 * row['read']:.1f} %",
    }
    return page(words, columns_table(rows, shown | dict(columns)))


def _picture(rows: Sequence[Row]) -> bytes:
    """Return quality over the share of pairs read: one panel a model and length."""
    panels = grouped([row for row in rows if row["way"] != _ORIGINAL], "model", "tokens")
    picture = Picture(len(panels), size=(4.2 * len(panels), 3.8))
    for axis, ((model, tokens), group) in zip(picture.axes, panels.items(), strict=False):
        original = _ratios([row for row in rows if row["model"] == model])
        for name in (_ADAPTIVE, _STREAMING):
            mine = sorted((r for r in group if r["way"].startswith(name)), key=lambda r: r["read"])
            axis.plot(*_points(mine, original), "o-", label=name)
        for row in group:
            if not row["way"].startswith((_ADAPTIVE, _STREAMING)):
                axis.plot(*_points([row], original), "x", label=row["way"])
        is_decoder = model == "smollm2"
        axis.set(title=f"{model}, {tokens:,} tokens", xlabel="share of pairs read")
        axis.set_ylabel("perplexity, of original" if is_decoder else "1 − R² of outputs")
        if not is_decoder:
            axis.set_yscale("log")
        axis.legend(fontsize=7, frameon=False)
    return picture.png(is_open=False)


def _points(rows: Sequence[Row], original: Mapping[int, float]) -> tuple[list[float], list[float]]:
    quality = [
        row["perplexity"] / original.get(row["tokens"], 1.0)
        if "perplexity" in row
        else 1 - row["R²"]
        for row in rows
    ]
    return [row["read"] for row in rows], quality
