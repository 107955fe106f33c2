"""``primal bench toeplitz``: what norms and dynamic range cost.

First table: positive random features against softmax over 1024 keys, ``‖A − Â‖₁`` per row, for
queries and keys of norm ``R``. Second table: causal sums in float32 against float64, by one
transform of the whole sequence and by divide and conquer, for random weights of the lags and for
weights that rise with the distance from ``exp(−R)`` to ``exp(R)``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

__all__ = ["Plan", "feature_error", "main", "range_error"]


def feature_error(
    norms: Sequence[float] = (1.0, 2.0, 4.0, 8.0),
    sizes: Sequence[int] = (4, 16, 64, 256, 1024),
    *,
    dim: int = 64,
    keys: int = 1024,
    trials: int = 20,
) -> list[dict[str, Any]]:
    """Return ``‖A − Â‖₁`` of softmax weights by independent positive features, mean over trials.

    Example:
        >>> row = feature_error([1.0], [4, 256], dim=8, keys=50, trials=3)[0]
        >>> row["4 features"] > row["256 features"]
        True
    """
    import torch

    from primal_attention.kernels import PositiveFeatures

    rows = []
    for norm in norms:
        row: dict[str, Any] = {"R": norm}
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
                logs = phi.log_features(k)
                # a factor common to all keys cancels; without it the sums overflow at R = 8
                features = (logs - logs.max()).exp()
                query = phi.log_features(q)
                weights = (query - query.max()).exp() @ features.mT
                exact = (q @ k.mT).softmax(-1)
                errors.append(float((weights / weights.sum() - exact).abs().sum()))
            row[f"{size} features"] = mean(errors)
        rows.append(row)
    return rows


def range_error(
    levels: Sequence[float] = (2, 4, 6, 8, 10, 16),
    *,
    n: int = 512,
    dim: int = 16,
    num_features: int = 32,
) -> list[dict[str, Any]]:
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

    def error(bias: Any, is_causal: bool, backend: Backend) -> float:
        c = (bias - bias.max()).exp()[None]
        exact = toeplitz_sums(q, k, v, c, is_causal=is_causal, backend="dense")
        single = [t.float() for t in (q, k, v, c)]
        got = toeplitz_sums(*single, is_causal=is_causal, backend=backend)
        exact, got = (t[..., :-1] / t[..., -1:] for t in (exact, got))
        return float((got.double() - exact).abs().max())

    rows = []
    for level in levels:
        random = level * noise / noise.abs().max()
        rising = level * (2 * lag / (n - 1) - 1)
        rows.append(
            {
                "R": level,
                "random, one transform": error(random, True, "fft"),
                "random, blocks": error(random, True, "split"),
                "rising, one transform": error(rising, True, "fft"),
                "rising, blocks": error(rising, True, "split"),
                "rising, bidirectional": error(rising, False, "fft"),
            }
        )
    return rows


@dataclass(frozen=True)
class Plan:
    """Error of sums weighted by distance: what norms and dynamic range cost."""

    out: Path = Path("outputs/toeplitz_error")
    """Folder of the results."""


def main(plan: Plan) -> None:
    """Print both tables and save them as CSV."""
    from primal_attention.output import markdown_table, to_csv, write_atomically

    tables = (
        ("features", "‖A − Â‖₁, head width 64, 1024 keys, 20 trials", feature_error),
        ("range", "largest error of causal averages, float32, 512 tokens", range_error),
    )
    for name, title, run in tables:
        rows = [{a: f"{b:.3g}" for a, b in row.items()} for row in run()]
        print(f"\n{title}\n\n{markdown_table(list(rows[0]), [list(r.values()) for r in rows])}")
        write_atomically(plan.out / f"toeplitz_{name}.csv", to_csv(rows, title))
    print(f"\nsaved to {plan.out}/")
