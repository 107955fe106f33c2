"""The verdict and the picture of the study of re-rankers."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from primal_attention.tasks.study import Row
from primal_studies.kit.tables import GREY, Picture

__all__ = ["gain_picture", "rerank_verdict"]

_OURS, _RIVAL = "context, dual-tied", "diffusion, list"
_CASES = tuple((name, length) for name in ("coil20", "palm") for length in (150, 400))
"""Sets and numbers of results that are told and shown."""


def _values(
    rows: Sequence[Row], method: str, name: str, length: int, source: str | None = None
) -> list[float]:
    return [
        r["map"]
        for r in sorted(rows, key=lambda r: r["seed"])
        if (r["method"], r["set"], r["candidates"]) == (method, name, length)
        and (source is None or r["source"] == source)
    ]


def rerank_verdict(rows: Sequence[Row]) -> str:
    """Return in words how the trained re-ranker does beside diffusion on the list.

    The difference is that of equal splits; the interval is two standard errors over splits.
    """
    sentences = []
    for name, length in _CASES:
        other = "palm" if name == "coil20" else "coil20"
        rival, first = (_values(rows, m, name, length) for m in (_RIVAL, "first search"))
        for source, words in ((name, "its other groups"), (other, other)):
            ours = _values(rows, _OURS, name, length, source)
            if count := min(len(ours), len(rival)):
                gap = np.array(ours[:count]) - np.array(rival[:count])
                sentences.append(
                    f"On {name} with {length} results, trained on {words}, it reaches "
                    f"{np.mean(ours):.1f} ({np.mean(first):.1f} before); {_beside(gap)}."
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


def gain_picture(rows: Sequence[Row]) -> bytes:
    """Return the gain of each method over the first search, one panel a set and length."""
    methods = [m for m in dict.fromkeys(r["method"] for r in rows) if m != "first search"]
    picture = Picture(4, size=(13, 4.2), share="y", is_spaced=False)
    colors = {
        "without training, or same set": picture.colors[1],
        "trained on the other set": picture.colors[0],
    }
    for axis, (name, length) in zip(picture.axes, _CASES, strict=True):
        base = np.array(_values(rows, "first search", name, length))
        for y, method in enumerate(methods):
            for place, color in enumerate(colors.values()):
                near = [r for r in rows if (r["source"] not in ("", name)) == bool(place)]
                found = _values(near, method, name, length)
                gains = np.array(found[: len(base)]) - base[: len(found)]
                if len(gains):
                    height = y + 0.25 * place
                    axis.scatter(gains, np.full(len(gains), height), s=12, color=color, alpha=0.5)
                    axis.plot(gains.mean(), height, "|", ms=13, mew=2, color=color)
        axis.axvline(0, color=GREY, lw=0.8)
        axis.set(title=f"{name}, {length} results", xlabel="points of mAP gained")
    picture.name_lines(methods)
    picture.legend(colors, where="outside lower center", columns=2, marker="o")
    return picture.png(grid=0.25, along="x", is_open=False)
