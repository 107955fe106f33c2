"""``primal bench kernel-convergence``: how fast features converge to their exact Gram matrix.

Root mean square error over pairs of random unit rows, relative to the root mean square of the
matrix, against the number of features.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primal_attention.support.output import page
from primal_attention.support.settings import at_least_one
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.kit.tables import group_lines, pivot, plot_lines

if TYPE_CHECKING:
    from primal_attention.kernels import FeatureMap

__all__ = ["ConvergenceOptions", "ConvergenceStudy"]

DIM, PAIRS = 16, 64
# rows have length √τ; series other than exp converge for τ < 1 only
_PANELS = ("exponential, τ = 1", "Gaussian, τ = 1", "dot-product series, τ = 0.5")


@dataclass(frozen=True)
class ConvergenceOptions:
    """Error of random features against their kernel, by number of features."""

    sizes: tuple[int, ...] = (32, 64, 128, 256, 512, 1024)
    """Numbers of features."""
    draws: int = 16
    """Draws of the features."""

    def __post_init__(self) -> None:
        at_least_one(self, "sizes", "draws")


class ConvergenceStudy(Study[ConvergenceOptions]):
    """One cell a kernel, kind of features and size."""

    name = "kernel-convergence"
    Options = ConvergenceOptions

    def cells(self, options: ConvergenceOptions) -> Sequence[Cell]:
        """Return the cells, kernel by kernel."""
        return [
            {"kernel": panel, "features": name, "p": size, "draws": options.draws}
            for panel, maps in _maps().items()
            for name in maps
            for size in options.sizes
        ]

    def run(self, cell: Cell, options: ConvergenceOptions, scratch: Path) -> Row:
        """Return the error of one kind of features."""
        import torch

        rows = torch.randn(2, PAIRS, DIM, generator=torch.Generator().manual_seed(0)).double()
        rows = rows / rows.norm(dim=-1, keepdim=True)
        x, y = rows * float(cell["kernel"].split("= ")[1]) ** 0.5
        squares = []
        for seed in range(cell["draws"]):
            generator = torch.Generator().manual_seed(seed)
            make = _maps()[cell["kernel"]][cell["features"]]
            phi = make(cell["p"], generator=generator, dtype=torch.float64)
            squares.append((phi.approximate(x, y) - phi.gram(x, y)).square().mean())
        error = (torch.stack(squares).mean() / phi.gram(x, y).square().mean()).sqrt()
        return {"error": round(float(error), 5)}

    def tables(self, rows: Sequence[Row], options: ConvergenceOptions) -> Mapping[str, str | bytes]:
        """Return one table, and a picture with one panel a kernel."""
        panels = group_lines((r["kernel"], r["features"], r["p"], r["error"]) for r in rows)
        lines = {"kernel": "kernel", "features": "features"}
        caption = (
            f"Relative error of the Gram matrix by number of features; d = {DIM}, {PAIRS} × "
            f"{PAIRS} pairs of rows of length √τ, {rows[0]['draws']} draws, seed 0."
        )
        return {
            "table.md": page(caption, pivot(rows, lines, "p", "{error:.5f}", title="{}")),
            "picture.png": plot_lines(
                panels,
                xlabel="features",
                ylabels=["relative error of the Gram matrix"],
                dashed=["published", "iid"],
            ),
        }


def _maps() -> "dict[str, dict[str, Callable[..., FeatureMap]]]":
    """Return the kinds of features of each kernel; each takes a size, generator and dtype."""
    from primal_attention.kernels import MaclaurinFeatures, PositiveFeatures, TrigonometricFeatures

    positive = partial(PositiveFeatures, DIM)
    fourier = partial(TrigonometricFeatures, DIM)
    published: dict[str, Any] = {"exact_degree": 0, "law": "geometric", "stratified": False}
    exponential: dict[str, Callable[..., FeatureMap]] = {
        "positive, iid": partial(positive, directions="iid"),
        "positive, orthogonal": positive,
        "positive, orthogonal ±": partial(positive, antithetic=True),
        "positive, tilted": partial(positive, spread=2.0),
        "Maclaurin": partial(MaclaurinFeatures, DIM, exact_degree=1),
    }
    gaussian: dict[str, Callable[..., FeatureMap]] = {
        "positive": partial(positive, kernel="gaussian"),
        "Fourier, iid": partial(fourier, directions="iid"),
        "Fourier, orthogonal": fourier,
    }
    series: dict[str, Callable[..., FeatureMap]] = {
        f"{name}, {kind}": partial(MaclaurinFeatures, DIM, series=name, scale=0.5, **options)
        for name in ("exp", "inverse", "logi", "sqrt")
        for kind, options in (("published", published), ("ours", {"exact_degree": 1}))
    }
    return dict(zip(_PANELS, (exponential, gaussian, series), strict=True))
