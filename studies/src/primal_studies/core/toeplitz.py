"""``primal bench toeplitz``: what norms and dynamic range cost.

First table: positive random features against softmax over 1024 keys, ``‖A − Â‖₁`` per row, for
queries and keys of norm ``R``. Second table: causal sums in float32 against float64, by one
transform of the whole sequence and by divide and conquer, for random weights of the lags and for
weights that rise with the distance from ``exp(−R)`` to ``exp(R)``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from primal_attention.support.settings import at_least_one
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.kit.tables import tables_by_name

__all__ = ["ToeplitzOptions", "ToeplitzStudy", "feature_error", "range_error"]


_CAPTIONS = {
    "features": "‖A − Â‖₁, head width 64, 1024 keys, mean of {trials} trials.",
    "range": "Largest error of causal averages of unit-variance values, float32, 512 tokens.",
}


@dataclass(frozen=True)
class ToeplitzOptions:
    """Error of sums weighted by distance: what norms and dynamic range cost."""

    trials: int = 20
    """Draws of queries, keys and features in the first table."""

    def __post_init__(self) -> None:
        at_least_one(self, "trials")


class ToeplitzStudy(Study[ToeplitzOptions]):
    """Two tables; one cell a line of each."""

    name = "toeplitz"
    Options = ToeplitzOptions

    def cells(self, options: ToeplitzOptions) -> Sequence[Cell]:
        """Return the cells, table by table."""
        norms = [{"table": "features", "R": r, "trials": options.trials} for r in (1, 2, 4, 8)]
        return [*norms, *({"table": "range", "R": r} for r in (2, 4, 6, 8, 10, 16))]

    def run(self, cell: Cell, options: ToeplitzOptions, scratch: Path) -> Row:
        """Return one line of a table."""
        if cell["table"] == "features":
            found = feature_error(cell["R"], trials=cell["trials"])
        else:
            found = range_error(cell["R"])
        return {name: float(f"{value:.3g}") for name, value in found.items()}

    def tables(self, rows: Sequence[Row], options: ToeplitzOptions) -> Mapping[str, str | bytes]:
        """Return both tables."""
        return tables_by_name(rows, _CAPTIONS, hidden=("trials",))


def feature_error(
    norm: float,
    sizes: Sequence[int] = (4, 16, 64, 256, 1024),
    *,
    dim: int = 64,
    keys: int = 1024,
    trials: int = 20,
) -> dict[str, float]:
    """Return ``‖A − Â‖₁`` of softmax weights by independent positive features, mean over trials.

    Example:
        >>> row = feature_error(1.0, [4, 256], dim=8, keys=50, trials=3)
        >>> row["4 features"] > row["256 features"]
        True
    """
    import torch

    from primal_attention.kernels import PositiveFeatures

    row = {}
    for size in sizes:
        errors = []
        for seed in range(trials):
            generator = torch.Generator().manual_seed(seed)
            q, k = (
                torch.randn(n, dim, generator=generator, dtype=torch.float64) for n in (1, keys)
            )
            q, k = (norm * t / t.norm(dim=-1, keepdim=True) for t in (q, k))
            phi = PositiveFeatures(
                dim, size, directions="iid", generator=generator, dtype=torch.float64
            )
            logs, query = phi.log_features(k), phi.log_features(q)
            # a factor common to all keys cancels; without it the sums overflow at R = 8
            features = (logs - logs.max()).exp()
            weights = (query - query.max()).exp() @ features.mT
            exact = (q @ k.mT).softmax(-1)
            errors.append(float((weights / weights.sum() - exact).abs().sum()))
        row[f"{size} features"] = mean(errors)
    return row


def range_error(
    level: float, *, n: int = 512, dim: int = 16, num_features: int = 32
) -> dict[str, float]:
    """Return the largest absolute error of averages of unit-variance values, in float32."""
    import torch

    from primal_attention.functional.toeplitz import Backend, toeplitz_sums
    from primal_attention.kernels import PositiveFeatures

    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, n, dim, generator=generator, dtype=torch.float64)
    phi = PositiveFeatures(
        dim,
        num_features,
        normalize=True,
        directions="iid",
        generator=generator,
        dtype=torch.float64,
    )
    q, k = phi.query_features(q), phi.key_features(k)
    v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
    noise = torch.randn(2 * n - 1, generator=generator, dtype=torch.float64)
    lag = (torch.arange(2 * n - 1) - n + 1).abs().double()
    random = level * noise / noise.abs().max()
    rising = level * (2 * lag / (n - 1) - 1)

    def error(bias: Any, is_causal: bool, backend: Backend) -> float:
        c = (bias - bias.max()).exp()[None]
        exact = toeplitz_sums(q, k, v, c, is_causal=is_causal, backend="dense")
        single = [t.float() for t in (q, k, v, c)]
        got = toeplitz_sums(*single, is_causal=is_causal, backend=backend)
        exact, got = (t[..., :-1] / t[..., -1:] for t in (exact, got))
        return float((got.double() - exact).abs().max())

    return {
        "random, one transform": error(random, True, "fft"),
        "random, blocks": error(random, True, "split"),
        "rising, one transform": error(rising, True, "fft"),
        "rising, blocks": error(rising, True, "split"),
        "rising, bidirectional": error(rising, False, "fft"),
    }
