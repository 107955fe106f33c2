"""Study of mechanism: does a self-attention parser, or hiding groups, raise the flow of attention?

The thesis of Xue et al. (*Probing Inter-modality*, 2021) has parts that a small model can test: a
parser with self-attention raises the flow between modalities against patches or convolutions of
equal size; masked features raise it too; hiding groups is harder than hiding tokens at random; and
more flow goes with a better model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from primal_attention.support.output import page
from primal_attention.support.settings import at_least_one, one_of
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.kit.tables import GREY, Column, Picture, columns_table, grouped, mean_of, spread

__all__ = ["Mechanism", "MechanismOptions", "mechanism_verdict"]

_PARSERS = ("self-attention", "linear", "cnn", "dual-tied")
_MASKS = ("none", "groups", "random")
_STYLES = ("sides", "relations", "sizes")
_FEWEST = 5
"""Fewest seeds for a verdict, and fewest cells of a seed for a correlation."""


@dataclass(frozen=True)
class MechanismOptions:
    """Parsers and masked features in a small model of scenes."""

    parsers: tuple[str, ...] = _PARSERS
    """Parsers: self-attention, linear, cnn, dual-tied."""
    masks: tuple[str, ...] = _MASKS
    """Masked features: none, groups, random."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Seeds of parameters, masks and scenes."""
    steps: int = 2000
    """Training steps of 64 scenes."""
    style: str = "sides"
    """Captions: sides, relations or sizes."""
    scenes: int = 1000
    """New scenes to measure on."""

    def __post_init__(self) -> None:
        one_of(self, "parsers", _PARSERS)
        one_of(self, "masks", _MASKS)
        one_of(self, "style", _STYLES)
        at_least_one(self, "steps", "scenes")
        for name in ("parsers", "masks", "seeds"):
            if not getattr(self, name):
                raise ValueError(f"{name} must not be empty; leave it out to run all.")


class Mechanism(Study[MechanismOptions]):
    """Train small models of scenes; measure what they know, and how modalities exchange."""

    name = "pairs-mechanism"
    Options = MechanismOptions

    def cells(self, options: MechanismOptions) -> list[Cell]:
        """Return the cells of a seed in the order in which they say most."""
        pairs = [(p, m) for p in options.parsers for m in options.masks]
        pairs.sort(key=lambda pair: (pair[1] == "random", pair[0] in _PARSERS[2:]))
        return [
            {
                "parser": parser,
                "mfr": mfr,
                "seed": seed,
                "steps": options.steps,
                "style": options.style,
                "scenes": options.scenes,
            }
            for seed in options.seeds
            for parser, mfr in pairs
        ]

    def run(self, cell: Cell, options: MechanismOptions, scratch: Path) -> Row:
        """Train a model and measure it."""
        from primal_studies.pairs.mechanism_models import measure_scenes, train_on_scenes

        found = train_on_scenes(
            cell["parser"],
            cell["mfr"],
            seed=cell["seed"],
            steps=cell["steps"],
            style=cell["style"],
        )
        scores = measure_scenes(found.model, style=cell["style"], count=cell["scenes"])
        return {
            "parameters": sum(p.numel() for p in found.model.parser.parameters()),
            "seconds": round(found.seconds, 1),
            "losses": found.losses,
            **{k: round(v, 4) if isinstance(v, float) else v for k, v in scores.items()},
        }

    def describe(self, row: Row) -> str:
        """Return parser, masks and the main scores of a row."""
        return (
            f"{row['parser']}, MFR {row['mfr']}, seed {row['seed']}: hard {row['itm hard']:.2f}, "
            f"words {row['words']:.2f}, IMF lift {fmean(row['imf lift']):.2f}, "
            f"{row['seconds']:.0f} s"
        )

    def tables(self, rows: Sequence[Row], options: MechanismOptions) -> Mapping[str, str | bytes]:
        """Return scores, flow by layer, the verdict and a picture."""
        same = ("steps", "style", "scenes")
        kept = [r for r in rows if all(r[k] == getattr(options, k) for k in same)]
        if not kept:
            return {}
        wanted = len(self.cells(options))
        return {
            "table.md": _scores(kept, wanted),
            "flow.md": _layers(kept),
            "verdict.md": page(mechanism_verdict(kept)),
            "picture.png": _picture(kept),
        }


def _flow(row: Row) -> float:
    return fmean(row["imf lift"])


def _difficulty(row: Row) -> float:
    """Return the loss of masked features at the end of the training."""
    return float(row["losses"]["mfr"][-1])


class _Comparison(NamedTuple):
    """A number of every seed, positive if the thesis is right."""

    values: list[float]

    @property
    def word(self) -> str:
        """What follows; cells of one seed are no independent evidence, so seeds are counted."""
        if len(self.values) >= _FEWEST and all(value > 0 for value in self.values):
            return "supported"
        if len(self.values) >= _FEWEST and all(value < 0 for value in self.values):
            return "contradicted"
        return "undecided"

    def say(self, what: str) -> str:
        """Return what follows and why."""
        if not self.values:
            return "not measured"
        higher = sum(value > 0 for value in self.values)
        seeds = "1 seed" if len(self.values) == 1 else f"{len(self.values)} seeds"
        return f"{self.word} ({what} {fmean(self.values):+.2f}, positive in {higher} of {seeds})"


def _gaps(
    rows: Sequence[Row],
    key: str,
    ours: Sequence[str],
    theirs: Sequence[str],
    value: Callable[[Row], float] = _flow,
) -> _Comparison:
    """Return how a value differs between settings: for every seed, the mean over pairs."""
    other = "mfr" if key == "parser" else "parser"
    by_seed: dict[int, list[float]] = {}
    for a in rows:
        for b in rows:
            is_pair = a[key] in ours and b[key] in theirs
            if is_pair and (a[other], a["seed"]) == (b[other], b["seed"]):
                by_seed.setdefault(a["seed"], []).append(value(a) - value(b))
    return _Comparison([fmean(values) for values in by_seed.values()])


def _links(rows: Sequence[Row]) -> _Comparison:
    """Return the rank correlation of flow and accuracy on hard negatives for every seed."""
    import numpy as np

    def ranks(values: Sequence[float]) -> Any:
        x = np.asarray(values)
        return (x[:, None] > x).sum(1) + (x[:, None] == x).sum(1) / 2

    found = []
    for seed in sorted({row["seed"] for row in rows}):
        own = [row for row in rows if row["seed"] == seed]
        x, y = ranks([_flow(row) for row in own]), ranks([row["itm hard"] for row in own])
        if len(own) >= _FEWEST and x.std() and y.std():
            found.append(float(np.corrcoef(x, y)[0, 1]))
    return _Comparison(found)


def mechanism_verdict(rows: Sequence[Row]) -> str:
    """Return one sentence about the thesis, computed from the rows.

    A part of it is supported, or contradicted, if five seeds or more all say so.

    Args:
        rows: Rows of the study.

    Example:
        >>> row = {"seed": 0, "mfr": "none", "parser": "linear", "imf lift": [1.0], "itm hard": 0.5}
        >>> mechanism_verdict([row]).startswith("With 1 cell the thesis")
        True
    """
    parser = _gaps(rows, "parser", _PARSERS[:1], _PARSERS[1:3]).say("lift of IMF")
    masks = _gaps(rows, "mfr", _MASKS[1:], _MASKS[:1]).say("lift of IMF")
    groups = _gaps(rows, "mfr", _MASKS[1:2], _MASKS[2:], _difficulty).say("loss")
    link = _links(rows).say("rank correlation with the accuracy on hard negatives")
    cells = "1 cell" if len(rows) == 1 else f"{len(rows)} cells"
    return (
        f"With {cells} the thesis stands as follows: that self-attention in the parser raises the "
        f"flow is {parser}; that masked features raise it is {masks}; that groups are harder to "
        f"predict than tokens at random is {groups}; that more flow goes with a better model is "
        f"{link}."
    )


def _groups(rows: Sequence[Row]) -> list[list[Row]]:
    found = grouped(rows, "parser", "mfr")
    order = ((parser, mfr) for parser in _PARSERS for mfr in _MASKS)
    return [found[key] for key in order if key in found]


_COLUMNS = {
    "matching, random": "itm random",
    "matching, hard": "itm hard",
    "nouns": "itm hard nouns",
    "attributes": "itm hard attributes",
    "relation": "itm hard relation",
    "words": "words",
    "blind": "words blind",
    "side word": "side word",
    "image → text": "image to text",
    "text → image": "text to image",
}


def _scores(rows: Sequence[Row], wanted: int) -> str:
    columns: dict[str, Column] = {
        "parser": "{parser}",
        "MFR": "{mfr}",
        "seeds": len,
        "parameters": "{parameters:,}",
        **{title: mean_of(key, 2) for title, key in _COLUMNS.items()},
        "lift text ← image": lambda group: spread([fmean(r["text from image"]) for r in group], 2),
        "lift image ← text": lambda group: spread([fmean(r["image from text"]) for r in group], 2),
        "seconds": lambda group: f"{fmean(r['seconds'] for r in group):.0f}",
    }
    chance = fmean(r["retrieval chance"] for r in rows)
    caption = (
        f"{len(rows)} of {wanted} cells; mean ± standard deviation over seeds. Matching: mean of "
        "true captions accepted and false ones rejected, 0.5 is chance; hard negatives exchange "
        "nouns or attributes, or reverse the relation. Words: hidden one at a "
        "time, 0.25 is chance; blind: the same with a grey image. Retrieval: R@1 among 50 with "
        f"distinct captions, {chance:.2f} is chance. Lift: attention received over that of "
        "uniform attention, mean of joint layers; 1 is indifferent. Parameters are those of the "
        "parser, seconds those of the processor."
    )
    return page(caption, columns_table(_groups(rows), columns))


_DIRECTIONS = ("text from image", "image from text")


def _layers(rows: Sequence[Row]) -> str:
    columns: dict[str, Column] = {"parser": "{parser}", "MFR": "{mfr}"}
    keys = (*_DIRECTIONS, "imf")
    for key, title in zip(keys, ("text ← image", "image ← text", "IMF"), strict=True):
        for layer in range(len(rows[0]["imf"])):
            columns[f"{title}, {layer + 1}"] = _at_layer(key, layer)
    chance = rows[0]["imf"][0] / rows[0]["imf lift"][0]
    caption = (
        "Lift in both directions, and plain IMF, of every joint layer. [CLS] and [SEP] are apart "
        f"in the lifts and count as text in IMF, whose chance level is {chance:.2f}."
    )
    return page(caption, columns_table(_groups(rows), columns))


def _at_layer(key: str, layer: int) -> Column:
    return lambda group: spread([row[key][layer] for row in group], 2)


def _picture(rows: Sequence[Row]) -> bytes:
    """Return a PNG: lift by layer in both directions, and lift against hard negatives."""
    picture = Picture(3, size=(12, 3.6))
    from primal_attention.report.plots import model_colors

    colors = model_colors(p for p in _PARSERS if any(r["parser"] == p for r in rows))
    styles = {"none": ("-", "o"), "groups": ("--", "^"), "random": (":", "s")}
    *lifts, accuracy = picture.axes
    for group in _groups(rows):
        color, (line, marker) = colors[group[0]["parser"]], styles[group[0]["mfr"]]
        for axis, key in zip(lifts, _DIRECTIONS, strict=True):
            depth = range(1, len(group[0][key]) + 1)
            means = [fmean(values) for values in zip(*(r[key] for r in group), strict=True)]
            axis.plot(depth, means, line, marker=marker, ms=4, color=color)
            axis.set_xticks(list(depth))
        scores = [r["itm hard"] for r in group]
        accuracy.plot([_flow(r) for r in group], scores, marker, ls="", ms=5, color=color)
    for axis, title in zip(lifts, ("text ← image", "image ← text"), strict=True):
        axis.axhline(1, color=GREY, lw=1)
        axis.set(xlabel="joint layer", ylabel="lift", title=title)
    accuracy.set(xlabel="lift of IMF", ylabel="matching, hard negatives", title="flow and accuracy")
    for mfr, (line, marker) in styles.items():
        lifts[0].plot([], [], line, marker=marker, ms=4, color=GREY, label=f"MFR {mfr}")
    lifts[0].legend(frameon=False, fontsize=8)
    return picture.png(models=colors)
