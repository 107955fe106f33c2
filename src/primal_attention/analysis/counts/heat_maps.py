"""Heat maps of attention between words."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from primal_attention.report.plots import panel_layout
from primal_attention.support.command import needs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_weights"]

# with more words the numbers in the cells are too small to read
_WITH_NUMBERS = 12


def plot_weights(
    panels: Mapping[str, tuple[Sequence[str], ArrayLike]],
    *,
    columns: int = 3,
    largest: float | None = 1.0,
) -> "Figure":
    """Return a figure with a heat map for each panel: rows are queries, columns are keys.

    Args:
        panels: Words and weights ``[n n]`` of each panel, by its title.
        columns: Panels side by side.
        largest: Weight with the darkest shade; ``None`` for the largest of each panel.

    Example:
        >>> figure = plot_weights({"counts": (["river", "bank"], [[0.0, 1.0], [0.5, 0.5]])})
        >>> [axis.get_title() for axis in figure.axes]
        ['counts']
    """
    with needs("analysis", "A heat map"):
        from matplotlib import pyplot as plt

    if not panels:
        raise ValueError("there are no panels; give words and weights of at least one.")
    wide = min(columns, len(panels))
    high = -(-len(panels) // wide)
    size = max(2.6, 0.42 * max(len(words) for words, _ in panels.values()) + 1.2)
    figure, axes = plt.subplots(
        high, wide, figsize=(wide * size, high * size), layout=panel_layout(), squeeze=False
    )
    for axis in list(axes.flat)[len(panels) :]:
        axis.remove()
    for axis, (title, (words, weights)) in zip(axes.flat, panels.items(), strict=False):
        matrix = np.asarray(weights, np.float64)
        if matrix.shape != (len(words), len(words)):
            raise ValueError(
                f"weights of {title!r} have shape {matrix.shape} for {len(words)} words; they must "
                "be square, one row for each word."
            )
        top = max(float(matrix.max()), 1e-9) if largest is None else largest
        axis.imshow(matrix, cmap="Oranges", vmin=0, vmax=top)
        # words may have a dollar sign, which is no formula
        axis.set_xticks(
            range(len(words)), words, rotation=60, ha="right", fontsize=8, parse_math=False
        )
        axis.set_yticks(range(len(words)), words, fontsize=8, parse_math=False)
        axis.set_title(title, fontsize=9, parse_math=False)
        axis.set_xlabel("key", fontsize=8)
        axis.set_ylabel("query", fontsize=8)
        if len(words) <= _WITH_NUMBERS:
            for (i, j), value in np.ndenumerate(matrix):
                color = "white" if value > 0.6 * top else "black"
                axis.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=7, color=color)
    return figure
