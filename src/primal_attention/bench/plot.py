"""The picture of a sweep: time and memory against length."""

import io
from collections.abc import Sequence

from primal_attention.bench.layers import Measurement

__all__ = ["plot_sweep"]


def plot_sweep(rows: Sequence[Measurement]) -> bytes:
    """Return a PNG with one column per shape: step time above, memory kept for backward below."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "Plots need matplotlib; install it with: pip install 'primal-attention[analysis]'"
        ) from error
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    rows = [r for r in rows if r.mode == rows[0].mode]
    shapes = sorted({(r.heads, r.head_dim) for r in rows})
    names = list(dict.fromkeys(r.name for r in rows))
    figure, axes = plt.subplots(
        2, len(shapes), figsize=(5.5 * len(shapes), 7.5), sharex=True, squeeze=False
    )
    for column, (heads, head_dim) in enumerate(shapes):
        for color, name in zip(matplotlib.color_sequences["tab10"] * 3, names, strict=False):
            found = [r for r in rows if (r.name, r.heads) == (name, heads)]
            style = {"color": color, "marker": "o", "markersize": 3.5, "label": name}
            if name == "floor":
                style.update(linestyle="--", color="black", label="projections alone")
            lengths = [r.n for r in found]
            axes[0, column].loglog(lengths, [r.step_ms for r in found], **style)
            axes[1, column].loglog(lengths, [max(r.kept_mb, 1e-3) for r in found], **style)
        axes[0, column].set_title(f"{heads} heads of {head_dim}")
        axes[1, column].set_xlabel("tokens")
        for axis in axes[:, column]:
            axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("forward + backward, ms")
    axes[1, 0].set_ylabel("kept for backward, MiB")
    axes[0, 0].legend(frameon=False, fontsize=9)
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    plt.close(figure)
    return buffer.getvalue()
