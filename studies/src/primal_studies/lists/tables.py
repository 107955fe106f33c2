"""The verdict and the picture of the study of re-rankers."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from primal_attention.report import to_png
from primal_attention.tasks.study import Row

__all__ = ["picture", "verdict"]

_OURS, _RIVAL = "context, dual-tied", "diffusion, list"


def _values(
    rows: Sequence[Row], method: str, name: str, length: int, source: str | None
) -> list[float]:
    return [
        r["map"]
        for r in sorted(rows, key=lambda r: r["seed"])
        if (r["method"], r["set"], r["candidates"]) == (method, name, length)
        and (source is None or r["source"] == source)
    ]


def verdict(rows: Sequence[Row]) -> str:
    """Return in words how the trained re-ranker does beside diffusion on the list.

    The difference is that of equal splits; the interval is two standard errors over splits.
    """
    sentences = []
    for name, other in (("coil20", "palm"), ("palm", "coil20")):
        for length in (150, 400):
            rival = _values(rows, _RIVAL, name, length, None)
            first = _values(rows, "first search", name, length, None)
            for source, words in (
                (name, "trained on its other groups"),
                (other, f"trained on {other}"),
            ):
                ours = _values(rows, _OURS, name, length, source)
                count = min(len(ours), len(rival))
                if not count:
                    continue
                gap = np.array(ours[:count]) - np.array(rival[:count])
                sentences.append(
                    f"On {name} with {length} results, {words}, it reaches {np.mean(ours):.1f} "
                    f"({np.mean(first):.1f} before); {_beside(gap)}."
                )
    return "The dual-tied re-ranker with both kernels. " + " ".join(sentences) + "\n"


def _beside(gap: NDArray[np.float64]) -> str:
    """Return how differences from list diffusion are to be read."""
    if len(gap) == 1:
        return f"that is {gap[0]:+.1f} beside list diffusion, in one split"
    error = 2 * gap.std(ddof=1) / len(gap) ** 0.5
    place = (gap.mean() > error) - int(gap.mean() < -error)
    words = {1: "ahead of", 0: "level with", -1: "behind"}[int(place)]
    mean = round(float(gap.mean()), 1) + 0.0  # not -0.0
    return f"it is {words} list diffusion ({mean:+.1f} ± {error:.1f})"


def picture(rows: Sequence[Row]) -> bytes:
    """Return the gain of each method over the first search, one panel a set and length."""
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D

    panels = [(name, length) for name in ("coil20", "palm") for length in (150, 400)]
    methods = [m for m in dict.fromkeys(r["method"] for r in rows) if m != "first search"]
    figure, axes = plt.subplots(1, 4, figsize=(13, 4.2), sharey=True, layout="constrained")
    for axis, (name, length) in zip(axes, panels, strict=True):
        base = np.array(_values(rows, "first search", name, length, None))
        for y, method in enumerate(methods):
            for source, color, shift in (("home", "#1d4ed8", 0.0), ("away", "#c2410c", 0.25)):
                found = [
                    r["map"]
                    for r in sorted(rows, key=lambda r: r["seed"])
                    if (r["method"], r["set"], r["candidates"]) == (method, name, length)
                    and (r["source"] in ("", name)) == (source == "home")
                ]
                gains = np.array(found[: len(base)]) - base[: len(found)]
                if len(gains):
                    axis.scatter(
                        gains, np.full(len(gains), y + shift), s=12, color=color, alpha=0.5
                    )
                    axis.plot(gains.mean(), y + shift, "|", ms=13, mew=2, color=color)
        axis.axvline(0, color="#5b6472", lw=0.8)
        axis.set(title=f"{name}, {length} results", xlabel="points of mAP gained")
        axis.grid(axis="x", alpha=0.25)
    axes[0].set_yticks(range(len(methods)), methods)
    axes[0].invert_yaxis()
    handles = [
        Line2D([], [], color=c, marker="o", ls="", label=label)
        for c, label in (
            ("#1d4ed8", "without training, or same set"),
            ("#c2410c", "trained on the other set"),
        )
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
    return to_png(figure)
