"""``primal bench nystrom``: error of landmarks against the exact kernel.

Gaussian kernel matrices of 512 queries and keys of width 32, and their lifted Nyström forms: by
number of landmarks and kind of inverse, by steps of the Schulz iteration, by choice of landmarks.
``s`` is the scale of normal queries and keys; ``clusters`` are 32 shared centres plus noise.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from primal_attention.support.settings import at_least_one
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.kit.tables import tables_by_name

if TYPE_CHECKING:
    from torch import Generator, Tensor

__all__ = ["NystromOptions", "NystromStudy", "by_inverse", "by_landmarks", "by_steps"]

DATA = ("s=0.5", "s=1", "clusters")
_SIZES = "; {tokens} queries and keys of width 32, float64."
_CAPTIONS = {
    "inverse": "Relative spectral error, mean of 2 draws" + _SIZES,
    "steps": "Residual of the Schulz iteration, 128 landmarks, ridge 0.1" + _SIZES,
    "landmarks": "Relative spectral error, ridge 1e-3, mean of 3 draws" + _SIZES,
}


@dataclass(frozen=True)
class NystromOptions:
    """Error of landmark attentions against the exact kernel."""

    tokens: int = 512
    """Queries and keys."""

    def __post_init__(self) -> None:
        at_least_one(self, "tokens")


class NystromStudy(Study[NystromOptions]):
    """Three tables; one cell a line of each."""

    name = "nystrom"
    Options = NystromOptions

    def cells(self, options: NystromOptions) -> Sequence[Cell]:
        """Return the cells, table by table."""
        inverse = [("inverse", data, size) for data in DATA for size in (16, 64, 128, 256)]
        steps = [("steps", f"s={scale:g}", 128) for scale in (0.1, 0.25, 0.5, 1.0)]
        landmarks = [("landmarks", data, size) for data in DATA for size in (64, 128)]
        return [
            {"table": table, "data": data, "landmarks": size, "tokens": options.tokens}
            for table, data, size in (*inverse, *steps, *landmarks)
        ]

    def run(self, cell: Cell, options: NystromOptions, scratch: Path) -> Row:
        """Return one line of a table."""
        tables: dict[str, Callable[[str, int, int], dict[str, float]]] = {
            "inverse": by_inverse,
            "steps": by_steps,
            "landmarks": by_landmarks,
        }
        found = tables[cell["table"]](cell["data"], cell["landmarks"], cell["tokens"])
        return {name: float(f"{value:.3g}") for name, value in found.items()}

    def tables(self, rows: Sequence[Row], options: NystromOptions) -> Mapping[str, str | bytes]:
        """Return the three tables."""
        return tables_by_name(rows, _CAPTIONS, hidden=("tokens",))


def _draw(data: str, seed: int, n: int, d: int = 32) -> "tuple[Tensor, Tensor, Generator]":
    """Return scaled queries and keys, ``[1 1 n d]`` each, and the generator they came from."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 1, 1, n, d, generator=generator, dtype=torch.float64)
    if data == "clusters":
        centres = torch.randn(32, d, generator=generator, dtype=torch.float64)
        pick = torch.randint(32, (2, n), generator=generator)
        q, k = centres[pick[0]] + 0.3 * q, centres[pick[1]] + 0.3 * k
    else:
        scale = float(data.removeprefix("s="))
        q, k = scale * q, scale * k
    return q * d**-0.25, k * d**-0.25, generator


def _uniform(q: "Tensor", k: "Tensor", num: int, generator: "Generator") -> "Tensor":
    """Return landmarks drawn with replacement, half of the queries and half of the keys."""
    import torch

    picks = torch.randint(q.shape[2], (2, num // 2), generator=generator)
    return torch.cat([q[:, :, picks[0]], k[:, :, picks[1]]], dim=2)


def _means(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: mean(errors[name] for errors in found) for name in found[0]}


def by_inverse(data: str, size: int, n: int = 512, *, seeds: int = 2) -> dict[str, float]:
    """Return the relative spectral error by kind of inverse.

    Example:
        >>> few, many = (by_inverse("s=1", size, 40, seeds=1) for size in (8, 32))
        >>> few["exact 1e-3"] > many["exact 1e-3"]
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

    found = []
    for seed in range(seeds):
        q, k, generator = _draw(data, seed, n)
        z = _uniform(q, k, size, generator)
        # repeated landmarks make the matrix singular: cut what rounding leaves of zeros
        pinv = torch.linalg.pinv(gaussian_gram(z, z), rtol=1e-10, hermitian=True)
        published = nystrom_error(q, k, z, ridge=0.1, inverse="published")
        identity = schulz_inverse(landmark_gram(z, 0.1), 6)
        found.append(
            {
                "pinv": with_inverse(q, k, z, pinv),
                "exact 1e-3": float(nystrom_error(q, k, z, ridge=1e-3)),
                "exact 0.1": float(nystrom_error(q, k, z, ridge=0.1)),
                "published, 6 steps": float(published),
                "identity, 6 steps": with_inverse(q, k, z, identity),
            }
        )
    return _means(found)


def by_steps(data: str, size: int = 128, n: int = 512) -> dict[str, float]:
    """Return the residual ``‖N Z − I‖₂`` of the Schulz iteration by start and steps."""
    import torch

    from primal_attention.functional.nystrom import landmark_gram
    from primal_attention.functional.schulz import schulz_inverse

    q, k, generator = _draw(data, 0, n)
    m = landmark_gram(_uniform(q, k, size, generator), 0.1)
    root = m.sum(-1, keepdim=True).rsqrt()
    n_m = root * m * root.mT
    eye = torch.eye(size, dtype=m.dtype)
    row = {"smallest eigenvalue": float(torch.linalg.eigvalsh(n_m).min())}
    for start, steps in (("published", (6, 10, 15)), ("identity", (6, 8))):
        for count in steps:
            inverse = schulz_inverse(m, count, published_start=start == "published")
            residual = n_m @ (inverse / (root * root.mT)) - eye
            row[f"{start}, {count} steps"] = float(torch.linalg.matrix_norm(residual, 2))
    return row


def by_landmarks(data: str, size: int, n: int = 512, *, seeds: int = 3) -> dict[str, float]:
    """Return the relative spectral error by choice of landmarks.

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

    found = []
    for seed in range(seeds):
        q, k, generator = _draw(data, seed, n)
        spectrum = torch.linalg.svdvals(gaussian_gram(q, k))[0, 0]
        half = size // 2
        strided = torch.cat([strided_landmarks(t, half) for t in (q, k)], dim=2)
        choices = {
            "uniform": _uniform(q, k, size, generator),
            "strided": strided,
            "segments": torch.cat([segment_means(t, half) for t in (q, k)], dim=2),
            "kmeans": kmeans_landmarks(torch.cat([q, k], dim=2), strided),
        }
        errors = {"best": float(spectrum[size] / spectrum[0])}
        errors |= {name: float(nystrom_error(q, k, z)) for name, z in choices.items()}
        found.append(errors)
    return _means(found)
