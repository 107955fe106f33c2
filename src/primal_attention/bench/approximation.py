"""``primal bench approximation``: error of features against the exact kernel.

Attention over random tokens with rows of length ``√τ`` and kernel ``exp(q·k)``, exactly and by
features; the error of the output, relative, in the Frobenius norm. The last column is how far the
exact output is from a plain average: with an error above it, the average is the better estimate.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from primal_attention.settings import at_least_one

__all__ = ["Plan", "Row", "feature_errors", "main"]

METHODS = ("maclaurin-published", "maclaurin", "favor", "favor-antithetic", "fourier")


@dataclass(frozen=True)
class Row:
    """Mean error of each method over draws."""

    tau: float
    num_features: int
    method: str
    error: float
    spread: float
    """Standard deviation over draws."""
    from_average: float
    """Distance of the exact output from the average of the values."""


def feature_errors(
    taus: Sequence[float],
    sizes: Sequence[int],
    *,
    dim: int = 32,
    tokens: int = 256,
    draws: int = 8,
    methods: Sequence[str] = METHODS,
) -> list[Row]:
    """Return the error of every method, temperature and number of features.

    Example:
        >>> row = feature_errors([0.2], [64], dim=8, tokens=20, draws=2, methods=["maclaurin"])[0]
        >>> row.error < row.from_average
        True
    """
    import torch
    from torch import Tensor

    from primal_attention.attention.schoenbat import center_l2
    from primal_attention.kernels import (
        FeatureMap,
        MaclaurinFeatures,
        PositiveFeatures,
        TrigonometricFeatures,
    )

    def build(method: str, tau: float, p: int, seed: int) -> FeatureMap:
        common: dict[str, Any] = {
            "generator": torch.Generator().manual_seed(seed),
            "dtype": torch.float64,
        }
        makers: dict[str, Callable[[], FeatureMap]] = {
            "maclaurin-published": lambda: MaclaurinFeatures(
                dim, p, exact_degree=0, law="geometric", stratified=False, **common
            ),
            "maclaurin": lambda: MaclaurinFeatures(dim, p, scale=tau, **common),
            "favor": lambda: PositiveFeatures(dim, p, **common),
            "favor-antithetic": lambda: PositiveFeatures(dim, p, antithetic=True, **common),
            "fourier": lambda: TrigonometricFeatures(dim, p, kernel="exponential", **common),
        }
        return makers[method]()

    def attend(weights: Tensor, v: Tensor) -> Tensor:
        return weights @ v / weights.sum(-1, keepdim=True)

    rows = []
    for tau in taus:
        data = torch.Generator().manual_seed(0)
        q, k, v = torch.randn(3, tokens, dim, generator=data, dtype=torch.float64)
        q, k = center_l2(q) * tau**0.5, center_l2(k) * tau**0.5
        exact = attend((q @ k.T).exp(), v)
        average = float((exact - v.mean(0)).norm() / exact.norm())
        for p in sizes:
            for method in methods:
                maps = (build(method, tau, p, seed) for seed in range(draws))
                errors = torch.stack(
                    [(attend(phi.approximate(q, k), v) - exact).norm() for phi in maps]
                ).div(exact.norm())
                spread = float(errors.std()) if draws > 1 else 0.0
                rows.append(Row(tau, p, method, float(errors.mean()), spread, average))
    return rows


def plot(rows: Sequence[Row]) -> bytes:
    """Return a PNG with one panel per temperature: error against features."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "Plots need matplotlib; install it with: pip install 'primal-attention[analysis]'"
        ) from error
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    taus = sorted({row.tau for row in rows})
    figure, axes = plt.subplots(
        1, len(taus), figsize=(3.6 * len(taus), 3.6), sharey=True, squeeze=False
    )
    for axis, tau in zip(axes[0], taus, strict=True):
        for method in dict.fromkeys(row.method for row in rows):
            found = [row for row in rows if (row.tau, row.method) == (tau, method)]
            errors = [row.error for row in found]
            axis.loglog([row.num_features for row in found], errors, marker="o", label=method)
        level = next(row.from_average for row in rows if row.tau == tau)
        axis.axhline(level, color="black", linestyle="--", label="plain average")
        axis.set_title(f"τ = {tau:.3g}")
        axis.set_xlabel("features")
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("relative error of the output")
    axes[0, 0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    plt.close(figure)
    return buffer.getvalue()


@dataclass(frozen=True)
class Plan:
    """Error of random features in attention against the exact kernel."""

    dim: int = 32
    """Head width."""
    tokens: int = 256
    """Tokens."""
    draws: int = 8
    """Draws of the features."""
    out: Path = Path("outputs/approximation")
    """Folder of the results."""

    def __post_init__(self) -> None:
        at_least_one(self, "dim", "tokens", "draws")


def main(plan: Plan) -> None:
    """Print the table, save it as CSV and PNG."""
    from primal_attention.output import markdown_table, to_csv, write_atomically

    taus, sizes = (plan.dim**-0.5, 1.0, 2.0, 4.0), (64, 128, 512)
    rows = feature_errors(taus, sizes, dim=plan.dim, tokens=plan.tokens, draws=plan.draws)
    table = []
    for tau in taus:
        for p in sizes:
            found = [row for row in rows if (row.tau, row.num_features) == (tau, p)]
            errors = [f"{row.error:.4f}" for row in found]
            table.append([f"{tau:.3f}", p, *errors, f"{found[0].from_average:.3f}"])
    print(markdown_table(["τ", "features", *METHODS, "exact to average"], table))
    facts = f"exp kernel, d={plan.dim}, {plan.tokens} tokens, {plan.draws} draws, seed 0"
    write_atomically(plan.out / "approximation.csv", to_csv([asdict(row) for row in rows], facts))
    write_atomically(plan.out / "approximation.png", plot(rows))
    print(f"\n{facts}; saved to {plan.out}/")
