"""Table, picture and verdict of the study of starts at the counts of a corpus."""

import math
from collections.abc import Sequence
from statistics import mean, stdev

from primal_attention.support.command import needs
from primal_attention.support.output import markdown_table, page
from primal_attention.tasks.study import Row
from primal_studies.kit.tables import Column, Files, Picture, columns_table, grouped, spread

__all__ = ["corpus_init_tables", "corpus_init_verdict", "differences"]

_SCORES = {"imdb": ("accuracy", 1.0), "wikitext-2": ("loss of the next word in nats", -1.0)}
"""What is scored, and the sign with which more is better."""
_STARTS = {
    "random": "random",
    "projections": "projections from counts",
    "embeddings": "embeddings from counts",
    "both": "embeddings and projections from counts",
}

_COMPARED = (("embeddings", "random"), ("projections", "random"), ("both", "embeddings"))
"""Starts that are compared, each with the one that it adds to."""


def corpus_init_tables(rows: Sequence[Row]) -> Files:
    """Return the files of the study; the order of the rows does not matter."""
    starts = list(_STARTS)
    rows = sorted(
        rows, key=lambda r: (r["task"], r["attention"], starts.index(r["start"]), r["seed"])
    )
    steps = [0, *rows[0]["steps"]]
    columns: dict[str, Column] = {
        "attention": "{attention}",
        "start": lambda mine: _STARTS[mine[0]["start"]],
        "fit of queries, keys": _fit,
    }
    for place, step in enumerate(steps):
        columns[str(step)] = _scores_at(place)
    parts = []
    by_task = grouped(rows, "task")
    for task in (task for task in _SCORES if task in by_task):
        count = len({row["seed"] for row in by_task[task]})
        score = _SCORES[task][0]
        parts += [
            f"{task}, {score} by step: mean and standard deviation over {count} seeds.",
            columns_table(grouped(by_task[task], "attention", "start").values(), columns),
        ]
    return {
        "table.md": page(*parts),
        "picture.png": _picture(rows, steps),
        "gains.md": _gains_table(rows),
        "verdict.md": page(corpus_init_verdict(rows)),
    }


def _scores_at(place: int) -> Column:
    return lambda rows: spread([row["curve"][place] for row in rows], 3)


def _fit(rows: Sequence[Row]) -> str:
    if "fit" not in rows[0]:
        return "—"
    return ", ".join(f"{mean(row['fit'][i] for row in rows):.2f}" for i in range(2))


def differences(rows: Sequence[Row], start: str, base: str, place: int) -> dict[str, list[float]]:
    """Return the paired gains of one start over another, by task and attention.

    A positive number is better. Pairs share the seed.

    Args:
        rows: Rows of the study.
        start: The start that may gain.
        base: The start it is compared with.
        place: Which point of the curves.
    """
    found: dict[str, list[float]] = {}
    score = {(r["task"], r["attention"], r["seed"], r["start"]): r["curve"][place] for r in rows}
    for (task, attention, seed, name), value in score.items():
        if name == start and (task, attention, seed, base) in score:
            gain = _SCORES[task][1] * (value - score[task, attention, seed, base])
            found.setdefault(f"{task}, {attention}", []).append(gain)
    return found


def _half_width(gains: Sequence[float]) -> float:
    """Return half the 95 % interval of the mean, from the t distribution; infinite for one seed."""
    if len(gains) < 2:
        return math.inf
    with needs("sklearn", "The interval"):
        from scipy.stats import t

    return float(t.ppf(0.975, len(gains) - 1) * stdev(gains) / math.sqrt(len(gains)))


def _gains_table(rows: Sequence[Row]) -> str:
    """Return the paired gains in the middle and at the end of the curves."""
    steps = [0, *rows[0]["steps"]]
    body = []
    for start, base in _COMPARED:
        found = [differences(rows, start, base, place) for place in _places(rows)]
        for name in found[0]:
            cells = [f"{mean(f[name]):+.3f} ± {_half_width(f[name]):.3f}" for f in found]
            body.append([_STARTS[start], _STARTS[base], name, *cells])
    caption = (
        "Gain of a start over another, paired by seed, with its 95 % interval; positive is better "
        "(accuracy, or nats less)."
    )
    header = ["start", "over", "task, attention"]
    header += [f"after {steps[place]} steps" for place in _places(rows)]
    return page(caption, markdown_table(header, body))


def _places(rows: Sequence[Row]) -> tuple[int, int]:
    """Return the points of the curves that are compared: one in the middle and the last."""
    last = len(rows[0]["curve"]) - 1
    return (last + 1) // 2, last


def corpus_init_verdict(rows: Sequence[Row]) -> str:
    """Return the findings in sentences whose numbers come from the rows."""
    steps, places = [0, *rows[0]["steps"]], _places(rows)

    def clear(compared: Sequence[tuple[str, str]], place: int) -> str:
        gains = [g for pair in compared for g in differences(rows, *pair, place).values()]
        better = sum(mean(g) > _half_width(g) for g in gains)
        worse = sum(-mean(g) > _half_width(g) for g in gains)
        return f"{better} of {len(gains)}" + (f" (worse in {worse})" if worse else "")

    parts = []
    for what, compared in (
        ("Embeddings from counts are better", _COMPARED[:1]),
        (
            "Projections from counts, with random embeddings or with those, are better",
            _COMPARED[1:],
        ),
    ):
        early, late = (clear(compared, place) for place in places)
        parts.append(
            f"{what} in {early} comparisons after {steps[places[0]]} steps and in {late} after "
            f"{steps[places[1]]}."
        )
    seeds = len({row["seed"] for row in rows})
    largest = max(
        abs(mean(g)) for pair in _COMPARED[1:] for g in differences(rows, *pair, places[1]).values()
    )
    return (
        " ".join(parts) + f" A difference counts if its 95 % interval over {seeds} seeds excludes "
        f"zero; the largest mean difference of projections at the end is {largest:.3f}."
    )


def _picture(rows: Sequence[Row], steps: Sequence[int]) -> bytes:
    panels = grouped(rows, "task", "attention")
    picture = Picture(len(panels), size=(4.2 * len(panels), 3.8), is_spaced=False)
    for number, ((task, attention), group) in enumerate(panels.items()):
        axis, by_start = picture.axes[number], grouped(group, "start")
        # the loss before training would hide all others
        first = int(_SCORES[task][1] < 0)
        for color, (start, label) in zip(picture.colors, _STARTS.items(), strict=False):
            mine = by_start.get(start, [])
            for place, row in enumerate(mine):
                axis.plot(steps[first:], row["curve"][first:], color=color, lw=0.7, alpha=0.5)
                if place == 0:
                    axis.plot([], [], color=color, label=label)
            if mine:
                means = [mean(row["curve"][i] for row in mine) for i in range(len(steps))]
                axis.plot(steps[first:], means[first:], "o-", ms=3, color=color)
        axis.set(title=f"{task}, {attention}", xlabel="steps", ylabel=_SCORES[task][0])
        axis.set_xscale("symlog", linthresh=max(steps[1], 1))
        picture.ticks(number, steps[first:], "{}", fontsize=8)
    picture.legend()
    return picture.png(grid=0.25, is_open=False)
