"""Table, picture and verdict of the study of starts at the counts of a corpus."""

import math
from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from primal_attention.command import needs
from primal_attention.output import markdown_table, page

__all__ = ["corpus_init_tables", "differences", "verdict"]

Row = Mapping[str, Any]

_SCORES = {"imdb": ("accuracy", 1.0), "wikitext-2": ("loss of the next word in nats", -1.0)}
"""What is scored, and the sign with which more is better."""
_STARTS = {
    "random": "random",
    "projections": "projections from counts",
    "embeddings": "embeddings from counts",
    "both": "embeddings and projections from counts",
}


def corpus_init_tables(rows: Sequence[Row]) -> dict[str, str | bytes]:
    """Return the files of the study."""
    groups = _groups(rows)
    steps = [0, *rows[0]["steps"]]
    parts = []
    for task, (score, _) in _SCORES.items():
        body = [
            [attention, _STARTS[start], _fit(mine), *(_spread(mine, i) for i in range(len(steps)))]
            for (name, attention, start), mine in groups.items()
            if name == task
        ]
        if body:
            count = len({row["seed"] for row in rows if row["task"] == task})
            caption = f"{task}, {score} by step: mean and standard deviation over {count} seeds."
            header = ["attention", "start", "fit of queries, keys", *map(str, steps)]
            parts += [caption, markdown_table(header, body)]
    files: dict[str, str | bytes] = {"table.md": page(*parts)}
    files["picture.png"] = _picture(groups, steps)
    files["verdict.md"] = page(verdict(rows))
    return files


def _groups(rows: Sequence[Row]) -> dict[tuple[str, str, str], list[Row]]:
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["attention"], row["start"]), []).append(row)
    return groups


def _fit(rows: Sequence[Row]) -> str:
    if "fit" not in rows[0]:
        return "—"
    return ", ".join(f"{mean(row['fit'][i] for row in rows):.2f}" for i in range(2))


def _spread(rows: Sequence[Row], place: int) -> str:
    values = [row["curve"][place] for row in rows]
    spread = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
    return f"{mean(values):.3f}{spread}"


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


def _interval(gains: Sequence[float]) -> str:
    error = stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else float("nan")
    return f"{mean(gains):+.3f} ± {error:.3f}"


def _is_clear(gains: Sequence[float]) -> bool:
    """Return whether the mean exceeds two standard errors and no seed disagrees."""
    if len(gains) < 2:
        return False
    error = stdev(gains) / math.sqrt(len(gains))
    return abs(mean(gains)) > 2 * error and len({gain > 0 for gain in gains}) == 1


def verdict(rows: Sequence[Row]) -> str:
    """Return the findings in sentences whose numbers come from the rows."""
    last = len(rows[0]["curve"]) - 1
    early = (last + 1) // 2
    steps = [0, *rows[0]["steps"]]
    sentences = []
    for start, base, what in (
        ("projections", "random", "Projections from counts alone"),
        ("embeddings", "random", "Embeddings from counts"),
        ("both", "embeddings", "Projections from counts on top of such embeddings"),
    ):
        parts = []
        for place in (early, last):
            gains = differences(rows, start, base, place)
            listed = "; ".join(
                f"{name} {_interval(values)}{'' if _is_clear(values) else ' (not clear)'}"
                for name, values in gains.items()
            )
            parts.append(f"after {steps[place]} steps {listed}")
        sentences.append(f"{what}, gain over {base}: {', and '.join(parts)}.")
    clear = [
        _is_clear(values) and mean(values) > 0
        for start, base in (("projections", "random"), ("both", "embeddings"))
        for values in differences(rows, start, base, last).values()
    ]
    sentences.append(
        f"At the end, projections from counts are clearly better in {sum(clear)} of {len(clear)} "
        "comparisons (two standard errors, all seeds agree)."
    )
    return " ".join(sentences)


def _picture(groups: Mapping[tuple[str, str, str], Sequence[Row]], steps: Sequence[int]) -> bytes:
    with needs("analysis", "A picture"):
        import matplotlib
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    from primal_attention.analysis.plots import COLORS
    from primal_attention.analysis.report import to_png

    panels = list(dict.fromkeys((task, attention) for task, attention, _ in groups))
    figure, axes = plt.subplots(
        1, len(panels), figsize=(4.2 * len(panels), 3.8), squeeze=False, layout="constrained"
    )
    for axis, (task, attention) in zip(axes[0], panels, strict=True):
        for color, (start, label) in zip(COLORS, _STARTS.items(), strict=False):
            mine = groups.get((task, attention, start), ())
            for number, row in enumerate(mine):
                axis.plot(steps, row["curve"], color=color, lw=0.7, alpha=0.5)
                if number == 0:
                    axis.plot([], [], color=color, label=label)
            if mine:
                means = [mean(row["curve"][i] for row in mine) for i in range(len(steps))]
                axis.plot(steps, means, "o-", ms=3, color=color)
        axis.set(title=f"{task}, {attention}", xlabel="steps", ylabel=_SCORES[task][0])
        axis.set_xscale("symlog", linthresh=max(steps[1], 1))
        axis.set_xticks(steps, [str(step) for step in steps], fontsize=8)
        axis.minorticks_off()
        axis.grid(alpha=0.25)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)
    return to_png(figure)
