"""Pictures of re-ranked lists."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_gains", "plot_list_spectrum"]


def plot_gains(gains: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> "Figure":
    """Return a picture of the average precision of every list, after against before.

    Args:
        gains: Average precisions before and after, by the name of the method.

    Example:
        >>> figure = plot_gains({"diffusion": (np.array([0.2, 0.9]), np.array([0.6, 0.8]))})
        >>> figure.axes[0].get_title()
        'diffusion: 1 better, 1 worse'
    """
    from matplotlib.figure import Figure as NewFigure

    figure = NewFigure(figsize=(4.6 * len(gains), 4.4), layout="constrained")
    axes = figure.subplots(1, len(gains), squeeze=False)[0]
    for axis, (name, (before, after)) in zip(axes, gains.items(), strict=True):
        better, worse = int((after > before + 1e-9).sum()), int((after < before - 1e-9).sum())
        color = np.where(after >= before, "#1d4ed8", "#c2410c")
        axis.scatter(before, after, s=9, alpha=0.5, c=color, linewidths=0)
        axis.plot([0, 1], [0, 1], color="#5b6472", lw=0.8)
        axis.set(
            title=f"{name}: {better} better, {worse} worse",
            xlabel="average precision before",
            ylabel="after",
            aspect="equal",
        )
    return figure


def plot_list_spectrum(spectra: Sequence[np.ndarray], counts: Sequence[float]) -> "Figure":
    """Return a picture of the spectra of list kernels, and of how many groups they show.

    Args:
        spectra: Eigenvalues of the cosines of each list, largest first, of sum one.
        counts: Effective number of groups of each list.

    Example:
        >>> plot_list_spectrum([np.array([0.7, 0.3])], [1.7]).axes[0].get_xlabel()
        'direction'
    """
    from matplotlib.figure import Figure as NewFigure

    figure = NewFigure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    length = max(map(len, spectra))
    padded = np.full((len(spectra), length), np.nan)
    for row, values in zip(padded, spectra, strict=True):
        row[: len(values)] = values
    ranks = np.arange(1, length + 1)
    low, middle, high = np.nanquantile(padded, (0.1, 0.5, 0.9), axis=0)
    left.fill_between(ranks, low, high, color="#1d4ed8", alpha=0.2, lw=0)
    left.plot(ranks, middle, color="#1d4ed8")
    left.set(xlabel="direction", ylabel="share of the kernel", yscale="log", xscale="log")
    left.grid(alpha=0.25)
    right.hist(counts, bins=min(30, max(5, len(counts) // 4)), color="#1d4ed8")
    right.set(xlabel="effective number of directions", ylabel="lists")
    return figure
