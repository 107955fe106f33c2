"""``primal bench approximation``: error of features against the exact kernel, in attention.

Attention over random tokens with rows of length ``√τ`` and kernel ``exp(q·k)``, exactly and by
features; the error of the output, relative, in the Frobenius norm. The last column is how far the
exact output is from a plain average: with an error above it, the average is the better estimate.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primal_attention.support.output import page
from primal_attention.support.settings import at_least_one
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.kit.tables import group_lines, pivot, plot_lines

if TYPE_CHECKING:
    from torch import Tensor

    from primal_attention.kernels import FeatureMap

__all__ = ["METHODS", "ApproximationOptions", "ApproximationStudy"]

METHODS = ("maclaurin-published", "maclaurin", "favor", "favor-antithetic", "fourier")
SIZES = (64, 128, 512)


@dataclass(frozen=True)
class ApproximationOptions:
    """Error of random features in attention against the exact kernel."""

    dim: int = 32
    """Head width."""
    tokens: int = 256
    """Tokens."""
    draws: int = 8
    """Draws of the features."""

    def __post_init__(self) -> None:
        at_least_one(self, "dim", "tokens", "draws")


class ApproximationStudy(Study[ApproximationOptions]):
    """One cell a temperature and number of features."""

    name = "approximation"
    Options = ApproximationOptions

    def cells(self, options: ApproximationOptions) -> Sequence[Cell]:
        """Return the cells, low temperatures first."""
        common = {"dim": options.dim, "tokens": options.tokens, "draws": options.draws}
        return [
            {"tau": tau, "num_features": size, **common}
            for tau in (options.dim**-0.5, 1.0, 2.0, 4.0)
            for size in SIZES
        ]

    def run(self, cell: Cell, options: ApproximationOptions, scratch: Path) -> Sequence[Row]:
        """Return the mean error of every method over draws."""
        import torch

        from primal_attention.attention.schoenbat import center_l2

        tau, tokens, dim = cell["tau"], cell["tokens"], cell["dim"]
        data = torch.Generator().manual_seed(0)
        q, k, v = torch.randn(3, tokens, dim, generator=data, dtype=torch.float64)
        q, k = center_l2(q) * tau**0.5, center_l2(k) * tau**0.5
        exact = _attend((q @ k.T).exp(), v)
        average = float((exact - v.mean(0)).norm() / exact.norm())
        rows = []
        for method in METHODS:
            maps = (_features(method, cell, seed) for seed in range(cell["draws"]))
            found = [(_attend(phi.approximate(q, k), v) - exact).norm() for phi in maps]
            error = float(torch.stack(found).mean() / exact.norm())
            rows.append({"method": method, "error": error, "from_average": average})
        return rows

    def tables(
        self, rows: Sequence[Row], options: ApproximationOptions
    ) -> Mapping[str, str | bytes]:
        """Return one table, and a picture with one panel a temperature."""
        panels = group_lines(
            (f"τ = {row['tau']:.3g}", name, row["num_features"], row[key])
            for row in rows
            for name, key in ((row["method"], "error"), ("plain average", "from_average"))
        )
        rows = [{**row, "τ": f"{row['tau']:.3f}"} for row in rows]
        caption = (
            f"Relative error of the attention output; exp kernel, head width {rows[0]['dim']}, "
            f"{rows[0]['tokens']} tokens, mean of {rows[0]['draws']} draws, seed 0."
        )
        table = pivot(
            rows,
            {"τ": "τ", "features": "num_features"},
            "method",
            "{error:.4f}",
            title="{}",
            values=METHODS,
            last={"exact to average": lambda group: f"{group[0]['from_average']:.3f}"},
        )
        return {
            "table.md": page(caption, table),
            "picture.png": plot_lines(
                panels,
                xlabel="features",
                ylabels=["relative error of the output"],
                dashed=["plain average"],
            ),
        }


def _features(method: str, cell: Cell, seed: int) -> "FeatureMap":
    import torch

    from primal_attention.kernels import (
        MaclaurinFeatures,
        PositiveFeatures,
        TrigonometricFeatures,
    )

    size = cell["dim"], cell["num_features"]
    common: dict[str, Any] = {
        "generator": torch.Generator().manual_seed(seed),
        "dtype": torch.float64,
    }
    makers: dict[str, Callable[[], FeatureMap]] = {
        "maclaurin-published": lambda: MaclaurinFeatures(
            *size, exact_degree=0, law="geometric", stratified=False, **common
        ),
        "maclaurin": lambda: MaclaurinFeatures(*size, scale=cell["tau"], **common),
        "favor": lambda: PositiveFeatures(*size, **common),
        "favor-antithetic": lambda: PositiveFeatures(*size, antithetic=True, **common),
        "fourier": lambda: TrigonometricFeatures(*size, kernel="exponential", **common),
    }
    return makers[method]()


def _attend(weights: "Tensor", v: "Tensor") -> "Tensor":
    return weights @ v / weights.sum(-1, keepdim=True)
