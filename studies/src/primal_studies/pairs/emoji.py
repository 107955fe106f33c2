"""Study of emoji: finding names for drawings, and drawings for names, in a style never seen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from primal_attention.support.output import page
from primal_attention.support.settings import at_least_one, one_of
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.kit.tables import Column, Picture, columns_table, grouped, spread

__all__ = ["EmojiOptions", "EmojiStudy"]

_MODELS = ("bag-of-words", "matcher", "visual-parser", "dual-encoder", "dual-encoder-3x")
_PARTS = ("seen", "unseen")
_SCORES = ("image to text R@1", "image to text R@5", "text to image R@1", "text to image R@5")


@dataclass(frozen=True)
class EmojiOptions:
    """A small vision-language model on emoji, beside a dual encoder and a bag of words."""

    models: tuple[str, ...] = _MODELS
    """Models: bag-of-words, matcher, visual-parser, dual-encoder, dual-encoder-3x."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the split, of parameters and of batches."""
    steps: int = 2000
    """Training steps of 64 pairs; dual-encoder-3x has three times as many."""
    held_out: int = 200
    """Concepts that are held out in every style."""
    data: Path | None = None
    """Folder of the data; by default that of PRIMAL_DATA."""

    def __post_init__(self) -> None:
        one_of(self, "models", _MODELS)
        at_least_one(self, "steps", "held_out")
        for name in ("models", "seeds"):
            if not getattr(self, name):
                raise ValueError(f"{name} must not be empty; leave it out to run all.")


class EmojiStudy(Study[EmojiOptions]):
    """Train on two styles of drawing, and search in the third."""

    name = "pairs-emoji"
    Options = EmojiOptions

    def cells(self, options: EmojiOptions) -> list[Cell]:
        """Return every model of the first seed, then of the next."""
        return [
            {"model": model, "seed": seed, "steps": options.steps, "held_out": options.held_out}
            for seed in options.seeds
            for model in (m for m in _MODELS if m in options.models)
        ]

    def run(self, cell: Cell, options: EmojiOptions, scratch: Path) -> list[Row]:
        """Train a model and return a row for each of its stages."""
        from primal_studies.pairs import emoji_models as models
        from primal_studies.pairs.emoji_data import load_emoji, split_emoji

        emoji = load_emoji(options.data)
        split = split_emoji(emoji, unseen=cell["held_out"], seed=cell["seed"])
        pairs, seed, steps = models.EmojiPairs(emoji, split), cell["seed"], cell["steps"]
        if cell["model"] == "bag-of-words":
            found = models.bag_of_words(pairs)
        elif cell["model"] == "matcher":
            # the steps of the estimator are its own; a smaller study is shorter
            limit = None if steps >= EmojiOptions.steps else steps / 10
            found = models.matcher(pairs, seed=seed, time_limit=limit)
        elif cell["model"] == "visual-parser":
            found = models.visual_parser(pairs, steps=steps, seed=seed)
        else:
            times = 3 if cell["model"].endswith("3x") else 1
            found = models.dual_encoder(pairs, steps=times * steps, seed=seed)
        rows: dict[str, dict[str, Any]] = {}
        for part in _PARTS:
            concepts = getattr(split, part)
            for stage, scores in found.scores(*pairs.test(concepts)).items():
                row = rows.setdefault(stage, {"stage": stage})
                row[part] = {k: round(v, 4) for k, v in models.recalls(*scores).items()}
                row[f"{part} candidates"] = len(concepts)
        about = {"parameters": found.parameters, "seconds": round(found.seconds, 1)}
        return [row | about for row in rows.values()]

    def describe(self, row: Row) -> str:
        """Return a model and how often its first result is right."""
        found = ", ".join(f"{part} {row[part][_SCORES[0]]:.1%}" for part in _PARTS)
        return f"{_title(row)}, seed {row['seed']}: image to text R@1 {found}, {row['seconds']} s"

    def tables(self, rows: Sequence[Row], options: EmojiOptions) -> Mapping[str, str | bytes]:
        """Return recalls of seen and unseen concepts, a verdict, and a picture."""
        kept = [r for r in rows if (r["steps"], r["held_out"]) == (options.steps, options.held_out)]
        if not kept:
            return {}
        done = len({(r["model"], r["seed"]) for r in kept})
        return {
            "table.md": _table(kept, done, len(self.cells(options))),
            "verdict.md": page(_verdict(kept, options.models)),
            "picture.png": _picture(kept),
        }


_NAMES = {
    "bag-of-words": "bag of words",
    "matcher": "ImageTextMatcher",
    "dual-encoder": "dual encoder (open_clip)",
    "visual-parser": "VisualParser",
    "dual-encoder-3x": "dual encoder, 3 × the steps",
}


def _title(row: Row) -> str:
    return _NAMES[row["model"]] + (f", {row['stage']}" if row["stage"] else "")


def _by_title(rows: Sequence[Row]) -> dict[str, list[Row]]:
    rows = sorted(rows, key=lambda r: _MODELS.index(r["model"]))
    return grouped([{**row, "title": _title(row)} for row in rows], "title")


def _table(rows: Sequence[Row], done: int, wanted: int) -> str:
    columns: dict[str, Column] = {
        "model": lambda group: _title(group[0]),
        "seeds": len,
        "parameters": "{parameters:,}",
        "seconds": lambda group: f"{fmean(r['seconds'] for r in group):.0f}",
    }
    for part in _PARTS:
        for score in _SCORES:
            columns[f"{part}, {score.replace(' to ', ' → ')}"] = _recall(part, score)
    first = rows[0]
    chance = " and ".join(f"{100 / first[f'{part} candidates']:.2f}" for part in _PARTS)
    caption = (
        f"{done} of {wanted} cells. Recall in % on drawings of the third style, among "
        f"{first['seen candidates']:,} concepts that were seen in two other styles, and among "
        f"{first['unseen candidates']} that were not; R@1 of chance is {chance}. Seconds are "
        "processor seconds of training. Mean ± standard deviation over seeds."
    )
    return page(caption, columns_table(_by_title(rows).values(), columns))


def _recall(part: str, score: str) -> Column:
    return lambda group: spread([row[part][score] for row in group], 1, 100)


def _verdict(rows: Sequence[Row], models: Sequence[str]) -> str:
    """Return who finds most at the first place, in both directions together, and who is missing."""
    said = []
    for part in _PARTS:
        found = {
            name: fmean(fmean((r[part][_SCORES[0]], r[part][_SCORES[2]])) for r in group)
            for name, group in _by_title(rows).items()
        }
        order = sorted(found, key=lambda name: -found[name])
        said.append(", ".join(f"{name} {100 * found[name]:.1f} %" for name in order))
    seeds = len({row["seed"] for row in rows})
    missing = [_NAMES[m] for m in models if all(row["model"] != m for row in rows)]
    return (
        f"R@1, mean of both directions and of {seeds} seed{'s' * (seeds > 1)}, best first. "
        f"Seen: {said[0]}. Unseen: {said[1]}."
        + f" Not measured yet: {'; '.join(missing)}."
        * bool(missing)
    )


def _picture(rows: Sequence[Row]) -> bytes:
    """Return a PNG of R@1 and R@5 of every model."""
    picture = Picture(2, size=(11, 3.6))
    from primal_attention.report.plots import model_colors

    groups = _by_title(rows)
    colors = model_colors(groups)
    for axis, part in zip(picture.axes, _PARTS, strict=True):
        for i, (name, group) in enumerate(groups.items()):
            heights = [100 * fmean(r[part][score] for r in group) for score in _SCORES]
            places = [j + 0.8 * (i + 0.5) / len(groups) - 0.4 for j in range(len(_SCORES))]
            axis.bar(places, heights, 0.75 / len(groups), color=colors[name])
        axis.set_xticks(range(len(_SCORES)), [s.replace(" R@", "\nR@") for s in _SCORES])
        axis.set(title=f"{part} concepts, third style", ylabel="found, %")
    return picture.png(along="y", models=colors)
