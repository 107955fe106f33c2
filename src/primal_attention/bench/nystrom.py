"""``primal bench nystrom``: error of landmarks against the exact kernel.

Gaussian kernel matrices of 512 queries and keys of width 32, and their lifted Nyström forms: by
number of landmarks and kind of inverse, by steps of the Schulz iteration, by choice of landmarks.
``s`` is the scale of normal queries and keys; ``clusters`` are 32 shared centres plus noise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

__all__ = ["Plan", "by_inverse", "by_landmarks", "by_steps", "main"]

Data = float | str
DATA: tuple[Data, ...] = (0.5, 1.0, "clusters")


def _draw(kind: Data, seed: int, n: int = 512, d: int = 32) -> Any:
    """Return scaled queries and keys, ``[1 1 n d]`` each, and the generator they came from."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 1, 1, n, d, generator=generator, dtype=torch.float64)
    if isinstance(kind, str):
        centres = torch.randn(32, d, generator=generator, dtype=torch.float64)
        pick = torch.randint(32, (2, n), generator=generator)
        q, k = centres[pick[0]] + 0.3 * q, centres[pick[1]] + 0.3 * k
    else:
        q, k = kind * q, kind * k
    return q * d**-0.25, k * d**-0.25, generator


def _uniform(q: Any, k: Any, num: int, generator: Any) -> Any:
    """Return landmarks drawn with replacement, half of the queries and half of the keys."""
    import torch

    n = q.shape[2]
    picks = torch.randint(n, (2, num // 2), generator=generator)
    return torch.cat([q[:, :, picks[0]], k[:, :, picks[1]]], dim=2)


def by_inverse(
    sizes: Sequence[int] = (16, 64, 128, 256), *, seeds: int = 2, n: int = 512
) -> list[dict[str, Any]]:
    """Return the relative spectral error per data set, number of landmarks and inverse.

    Example:
        >>> rows = by_inverse([8, 32], seeds=1, n=40)
        >>> rows[0]["exact 1e-3"] > rows[1]["exact 1e-3"]
        True
    """
    import torch

    from primal_attention.functional.gaussian import gaussian_gram
    from primal_attention.functional.nystrom import landmark_gram, nystrom_error
    from primal_attention.functional.schulz import schulz_inverse

    def with_inverse(q: Any, k: Any, z: Any, inverse: Any) -> float:
        exact = gaussian_gram(q, k)
        low = gaussian_gram(q, z) @ inverse @ gaussian_gram(z, k)
        return float(torch.linalg.matrix_norm(exact - low, 2) / torch.linalg.matrix_norm(exact, 2))

    rows = []
    for kind in DATA:
        for size in sizes:
            found: dict[str, list[float]] = {}
            for seed in range(seeds):
                q, k, generator = _draw(kind, seed, n)
                z = _uniform(q, k, size, generator)
                m = landmark_gram(z, 0.1)
                # repeated landmarks make the matrix singular: cut what rounding leaves of zeros
                pinv = torch.linalg.pinv(gaussian_gram(z, z), rtol=1e-10, hermitian=True)
                errors = {
                    "pinv": with_inverse(q, k, z, pinv),
                    "exact 1e-3": float(nystrom_error(q, k, z, ridge=1e-3)),
                    "exact 0.1": float(nystrom_error(q, k, z, ridge=0.1)),
                    "published, 6 steps": float(
                        nystrom_error(q, k, z, ridge=0.1, inverse="published")
                    ),
                    "identity, 6 steps": with_inverse(q, k, z, schulz_inverse(m, 6)),
                }
                for name, error in errors.items():
                    found.setdefault(name, []).append(error)
            rows.append(
                {"data": _label(kind), "landmarks": size, **{a: mean(b) for a, b in found.items()}}
            )
    return rows


def by_steps(
    scales: Sequence[float] = (0.1, 0.25, 0.5, 1.0), *, size: int = 128
) -> list[dict[str, Any]]:
    """Return the residual ``‖N Z − I‖₂`` of the Schulz iteration per scale, start and steps."""
    import torch

    from primal_attention.functional.nystrom import landmark_gram
    from primal_attention.functional.schulz import schulz_inverse

    rows = []
    for scale in scales:
        q, k, generator = _draw(scale, 0)
        m = landmark_gram(_uniform(q, k, size, generator), 0.1)
        root = m.sum(-1, keepdim=True).rsqrt()
        n_m = root * m * root.mT
        eye = torch.eye(size, dtype=m.dtype)
        row = {"s": scale, "smallest eigenvalue": float(torch.linalg.eigvalsh(n_m).min())}
        for start, steps in (("published", (6, 10, 15)), ("identity", (6, 8))):
            for count in steps:
                inverse = schulz_inverse(m, count, published_start=start == "published")
                residual = n_m @ (inverse / (root * root.mT)) - eye
                row[f"{start}, {count} steps"] = float(torch.linalg.matrix_norm(residual, 2))
        rows.append(row)
    return rows


def by_landmarks(
    sizes: Sequence[int] = (64, 128), *, seeds: int = 3, n: int = 512
) -> list[dict[str, Any]]:
    """Return the relative spectral error per data set, number and choice of landmarks.

    ``best`` is the best matrix of that rank, by the singular value decomposition.
    """
    import torch

    from primal_attention.functional.gaussian import gaussian_gram
    from primal_attention.functional.landmarks import (
        kmeans_landmarks,
        segment_means,
        strided_landmarks,
    )
    from primal_attention.functional.nystrom import nystrom_error

    rows = []
    for kind in DATA:
        for size in sizes:
            found: dict[str, list[float]] = {}
            for seed in range(seeds):
                q, k, generator = _draw(kind, seed, n)
                spectrum = torch.linalg.svdvals(gaussian_gram(q, k))[0, 0]
                half = size // 2
                strided = torch.cat([strided_landmarks(t, half) for t in (q, k)], dim=2)
                choices = {
                    "uniform": _uniform(q, k, size, generator),
                    "strided": strided,
                    "segments": torch.cat([segment_means(t, half) for t in (q, k)], dim=2),
                    "kmeans": kmeans_landmarks(torch.cat([q, k], dim=2), strided),
                }
                found.setdefault("best", []).append(float(spectrum[size] / spectrum[0]))
                for name, z in choices.items():
                    found.setdefault(name, []).append(float(nystrom_error(q, k, z)))
            rows.append(
                {"data": _label(kind), "landmarks": size, **{a: mean(b) for a, b in found.items()}}
            )
    return rows


def _label(kind: Data) -> str:
    return kind if isinstance(kind, str) else f"s={kind:g}"


@dataclass(frozen=True)
class Plan:
    """Error of landmark attentions against the exact kernel."""

    out: Path = Path("outputs/nystrom_error")
    """Folder of the results."""


def main(plan: Plan) -> None:
    """Print the three tables and save them as CSV."""
    from primal_attention.output import markdown_table, to_csv, write_atomically

    tables = (
        ("inverse", "relative spectral error, 2 draws", by_inverse),
        ("steps", "residual of the Schulz iteration, 128 landmarks, ridge 0.1", by_steps),
        ("landmarks", "relative spectral error, ridge 1e-3, 3 draws", by_landmarks),
    )
    for name, title, run in tables:
        rows = [{a: _rounded(b) for a, b in row.items()} for row in run()]
        print(f"\n{title}\n\n{markdown_table(list(rows[0]), [list(r.values()) for r in rows])}")
        facts = f"{title}; 512 queries and keys of width 32, float64"
        write_atomically(plan.out / f"nystrom_{name}.csv", to_csv(rows, facts))
    print(f"\nsaved to {plan.out}/")


def _rounded(value: Any) -> Any:
    return f"{value:.3g}" if isinstance(value, float) else value
