"""Pictures of flow between modalities."""

from typing import TYPE_CHECKING

import torch

from primal_attention.analysis.flow.result import FlowResult
from primal_attention.report.plots import COLORS, model_colors, panel_layout
from primal_attention.support.command import needs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_directions", "plot_flow"]

_SPAN = 2.0
"""Colours span lifts from 1/4 to 4."""


_SMALLEST = 1e-4
"""Directions with a smaller share of the spectrum are not drawn."""


def plot_flow(result: FlowResult) -> "Figure":
    """Return a heat map of the lift of layers and directions, and one dot for each head.

    Args:
        result: From :func:`modality_flow`.
    """
    with needs("analysis", "A picture"):
        from matplotlib import pyplot as plt

    pairs = result.directions()
    titles = [f"{result.names[a]} ← {result.names[c]}" for a, c in pairs]
    height = 0.42 * len(result.layers) + 1.8
    figure, axes = plt.subplots(
        1,
        2,
        figsize=(10.5 + 0.8 * max(len(pairs) - 2, 0), max(height, 3.0)),
        width_ratios=(max(len(pairs), 2), 4),
        layout=panel_layout(),
    )
    rows = torch.stack([result.lift[:, a, c] for a, c in pairs], 1)
    has = torch.stack([result.has_lift[:, a, c] for a, c in pairs], 1)
    shade = torch.where(has, rows.clamp_min(1e-6).log2(), torch.nan)
    map_ = axes[0].imshow(shade.numpy(), cmap="RdBu_r", vmin=-_SPAN, vmax=_SPAN, aspect="auto")
    for i in range(len(result.layers)):
        for j, (a, c) in enumerate(pairs):
            words = f"×{float(rows[i, j]):.2f}  ({float(result.flow[i, a, c]):.2f})"
            dark = abs(float(shade[i, j])) > 0.7 * _SPAN
            axes[0].text(
                j,
                i,
                words if has[i, j] else "cannot see",
                ha="center",
                va="center",
                fontsize=8,
                color="white" if dark and has[i, j] else "#1c2330",
            )
    axes[0].set_xticks(range(len(pairs)), titles)
    axes[0].set_yticks(range(len(result.layers)), _short(result.layers), fontsize=8)
    axes[0].set_title("lift over chance (share)")
    bar = figure.colorbar(map_, ax=axes[0], ticks=[-2, -1, 0, 1, 2], shrink=0.8)
    bar.ax.set_yticklabels(["¼", "½", "1", "2", "4"])
    _draw_heads(axes[1], result, pairs, titles)
    return figure


def _draw_heads(
    axis: "Axes", result: FlowResult, pairs: list[tuple[int, int]], titles: list[str]
) -> None:
    """Draw the lift of every head of every layer."""
    lift = result.head_lift
    for j, (a, c) in enumerate(pairs):
        x, y = [], []
        for i, count in enumerate(result.num_heads):
            if result.has_lift[i, a, c]:
                x += [float(lift[i, h, a, c]) for h in range(count)]
                y += [i + 0.5 * (j + 0.5) / len(pairs) - 0.25] * count
        color = COLORS[j % len(COLORS)]
        axis.scatter(x, y, s=16, alpha=0.7, color=color, label=titles[j])
    axis.axvline(1, color="#5b6472", lw=1, ls=":")
    axis.set_yticks(range(len(result.layers)), [""] * len(result.layers))
    axis.set(title="lift of every head", xlabel="1 is indifferent", xlim=(0, None))
    axis.set_ylim(len(result.layers) - 0.5, -0.5)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)


def plot_directions(result: FlowResult) -> "Figure":
    """Return alignment against share of the spectrum, one dot for each singular direction.

    Args:
        result: From :func:`modality_flow`, with at least one primal layer.
    """
    with needs("analysis", "A picture"):
        from matplotlib import pyplot as plt

    shown = {
        name: one
        for name, one in zip(_short(result.layers), result.primal, strict=True)
        if one is not None and one.sigma is not None and one.alignment is not None
    }
    if not shown:
        raise ValueError("result has no primal layer with a kernel; there is nothing to draw.")
    figure, axis = plt.subplots(figsize=(7, 4), layout=panel_layout())
    colors = model_colors(shown)
    for name, one in shown.items():
        if one.sigma is None or one.alignment is None:
            continue
        share = one.sigma / one.sigma.sum(-1, keepdim=True).clamp_min(1e-300)
        axis.scatter(
            share.flatten(),
            one.alignment.flatten(),
            s=18,
            alpha=0.7,
            color=colors[name],
            label=name,
        )
    chances = [one.alignment_chance for one in shown.values() if one.alignment_chance is not None]
    axis.axhline(sum(chances) / len(chances), color="#5b6472", lw=1, ls=":")
    axis.set(
        xlabel="share of the spectrum",
        ylabel="alignment between modalities",
        xscale="log",
        xlim=(_SMALLEST, 1.5),
        ylim=(-0.02, 1.02),
    )
    axis.set_title("singular directions: parsing below, alignment above; dotted: chance")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
    return figure


def _short(names: tuple[str, ...]) -> list[str]:
    """Return names without what all of them share at both ends."""
    parts = [name.split(".") for name in names]
    if len(names) < 2 or any(len(p) != len(parts[0]) for p in parts):
        return list(names)
    varying = [i for i in range(len(parts[0])) if len({p[i] for p in parts}) > 1]
    if not varying:
        return list(names)
    first = max(varying[0] - 1, 0)
    return [".".join(p[first : varying[-1] + 1]) for p in parts]
