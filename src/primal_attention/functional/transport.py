"""Optimal transport between clouds of points: exact, sorted, sliced, Gaussian; and the Monge gap.

    W_p^p(x, y) = min_P Σ_ij P_ij ‖x_i − y_j‖^p        P ≥ 0,  P 1 = a,  Pᵀ 1 = b

With equal numbers of points and uniform weights an optimal plan is a permutation ``σ``. The Monge
gap of a map ``x_i ↦ y_i`` is what it costs more than the best way to reach the same cloud:

    gap = (1/n) Σ_i ‖x_i − y_i‖^p − W_p^p(x, y) ≥ 0

It is zero if and only if the pairs are cyclically monotone, for ``p = 2`` for example where
``x ↦ y`` is the gradient of a convex function. All costs have gradients. Those of exact costs keep
the optimal plan fixed, which is exact wherever the plan is unique (Danskin's theorem).

References: Uscidda & Cuturi 2023, arXiv 2302.04953 (Monge gap); Peyré & Cuturi 2019. Entropic
solvers are in :mod:`primal_attention.functional.sinkhorn`.
"""

from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from primal_attention.functional.sinkhorn import (
    FactoredScaling,
    SinkhornSolution,
    cost_matrix,
    factored_sinkhorn,
    sinkhorn,
    sinkhorn_divergence,
)
from primal_attention.support.command import needs

__all__ = [
    "EXACT_UP_TO",
    "AffineMap",
    "FactoredScaling",
    "SinkhornSolution",
    "Solver",
    "cost_matrix",
    "factored_sinkhorn",
    "gaussian_map",
    "gaussian_wasserstein",
    "minibatch_assignment",
    "monge_gap",
    "optimal_assignment",
    "pair_costs",
    "sinkhorn",
    "sinkhorn_divergence",
    "sliced_wasserstein",
    "wasserstein",
    "wasserstein_1d",
]

Solver = Literal["auto", "exact", "debiased", "plan", "kl", "entropy"]
"""How the optimal cost is computed; see :func:`monge_gap`."""

EXACT_UP_TO = 1500
"""Number of points up to which ``solver="auto"`` is exact; about one second on one core."""


def pair_costs(
    x: Float[Tensor, "n d"], y: Float[Tensor, "n d"], p: Literal[1, 2] = 2
) -> Float[Tensor, " n"]:
    """Return ``‖x_i − y_i‖^p``.

    Example:
        >>> pair_costs(torch.zeros(1, 2), torch.tensor([[3.0, 4.0]]), p=1)
        tensor([5.])
    """
    moved = y - x
    return moved.square().sum(-1) if p == 2 else torch.linalg.vector_norm(moved, dim=-1)


def optimal_assignment(cost: Float[Tensor, "n n"]) -> Int[Tensor, " n"]:
    """Return the permutation ``σ`` of least ``Σ_i C_{i σ(i)}``; ``O(n³)`` time. Needs scipy.

    Example:
        >>> optimal_assignment(torch.tensor([[3.0, 1.0], [0.0, 3.0]]))
        tensor([1, 0])
    """
    if cost.shape[0] != cost.shape[1]:
        raise ValueError(
            f"An assignment needs equal numbers of points, got {cost.shape[0]} and "
            f"{cost.shape[1]}; use wasserstein(..., backend='pot') or sinkhorn."
        )
    # the solver would fail with a sentence that does not name the cause
    if not bool(cost.isfinite().all()):
        raise ValueError("cost has NaN or infinite values; check the points.")
    with needs("sklearn", "Exact transport"):
        from scipy.optimize import linear_sum_assignment
    _, columns = linear_sum_assignment(cost.detach().double().cpu().numpy())
    return torch.from_numpy(columns).to(cost.device)


def minibatch_assignment(
    x: Float[Tensor, "n d"],
    y: Float[Tensor, "n d"],
    *,
    p: Literal[1, 2] = 2,
    batch_size: int = 512,
    generator: torch.Generator | None = None,
) -> Int[Tensor, " n"]:
    """Return a permutation that is optimal within random batches of both clouds only.

    It is biased: the cost of its pairs is at least the optimal cost, and larger for smaller
    batches. Time is ``O(n batch_size²)``. Use it above about ten thousand points.

    Args:
        x: First cloud.
        y: Second cloud, with as many points.
        p: Exponent of the distance.
        batch_size: Largest number of points that are matched at once.
        generator: Random generator of the batches, on the CPU.

    Example:
        >>> x = torch.randn(30, 2)
        >>> minibatch_assignment(x, x, batch_size=10).sort().values.equal(torch.arange(30))
        True
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
    if len(x) != len(y):
        raise ValueError(
            f"x and y must have equal numbers of points, got {len(x)} and {len(y)}; draw a sample."
        )
    left, right = (torch.randperm(len(x), generator=generator).to(x.device) for _ in range(2))
    order = torch.empty_like(left)
    # batches of nearly equal size: a small last batch would be matched badly
    count = max(1, -(-len(x) // batch_size))
    for i, j in zip(left.tensor_split(count), right.tensor_split(count), strict=True):
        order[i] = j[optimal_assignment(cost_matrix(x[i].double(), y[j].double(), p))]
    return order


def wasserstein(
    x: Float[Tensor, "n d"],
    y: Float[Tensor, "m d"],
    *,
    a: Float[Tensor, " n"] | None = None,
    b: Float[Tensor, " m"] | None = None,
    p: Literal[1, 2] = 2,
    backend: Literal["scipy", "pot"] = "scipy",
) -> Float[Tensor, ""]:
    """Return the exact ``W_p^p`` between two clouds; its gradient keeps the plan fixed.

    Args:
        x: First cloud.
        y: Second cloud.
        a: Weights of ``x``, with sum one; uniform by default. Needs ``backend="pot"``.
        b: Weights of ``y``.
        p: Exponent of the distance.
        backend: ``"scipy"`` matches equal numbers of points with equal weights. ``"pot"`` takes any
            numbers and weights, and needs the package POT.

    Example:
        >>> x = torch.tensor([[0.0], [1.0]])
        >>> wasserstein(x, torch.tensor([[2.0], [1.0]]))
        tensor(1.)
    """
    if backend == "pot":
        with needs("transport", "backend='pot'"):
            import ot
        cost = cost_matrix(x, y, p)
        u, v = (
            (torch.full((count,), 1 / count) if w is None else w.detach()).double().cpu().numpy()
            for w, count in ((a, len(x)), (b, len(y)))
        )
        plan = ot.emd(u, v, cost.detach().double().cpu().numpy())
        # the plan is optimal, so to first order the cost changes with it held fixed
        return (torch.from_numpy(plan).to(cost) * cost).sum()
    if backend != "scipy":
        raise ValueError(f"backend must be 'scipy' or 'pot', got {backend!r}.")
    if a is not None or b is not None:
        raise ValueError(
            "backend='scipy' takes uniform weights only; use backend='pot' or sinkhorn_divergence."
        )
    return pair_costs(x, y[_matching(x, y, p)], p).mean()


def _matching(x: Tensor, y: Tensor, p: Literal[1, 2]) -> Int[Tensor, " n"]:
    # in float64, so that the matching does not depend on rounding of the costs
    return optimal_assignment(cost_matrix(x.detach().double(), y.detach().double(), p))


def monge_gap(
    x: Float[Tensor, "n d"],
    y: Float[Tensor, "n d"],
    *,
    p: Literal[1, 2] = 2,
    solver: Solver = "auto",
    epsilon: float = 0.1,
) -> Float[Tensor, ""]:
    """Return what the map ``x_i ↦ y_i`` costs above the optimum, ``(1/n) Σ_i c(x_i, y_i) − W``.

    Add it to a loss to ask for a map without detours. It is never clamped at zero.

    Args:
        x: Points before the map.
        y: Points after the map.
        p: Exponent of the distance in ``c``.
        solver: What is subtracted. ``"exact"``: the optimal cost; the gap is at least zero.
            ``"debiased"``: the Sinkhorn divergence, off by a few per cent of the cost. ``"auto"``:
            exact up to 1,500 points, else debiased. ``"plan"``: ``⟨P, C⟩`` of the entropic plan.
            ``"kl"``: ``⟨P, C⟩ + ε KL``, too large, so the gap can be negative. ``"entropy"``:
            ``⟨P, C⟩ − ε H``, too small, so the gap is positive even for an optimal map.
        epsilon: Strength of the entropy, relative to the mean cost of all pairs.

    Example:
        >>> x = torch.randn(20, 2)
        >>> float(monge_gap(x, 2 * x)), bool(monge_gap(x, -x) > 0)
        (0.0, True)
    """
    if x.shape != y.shape:
        raise ValueError(
            f"x and y must have the same shape, got {tuple(x.shape)} and {tuple(y.shape)}; row i "
            "of y is where row i of x goes."
        )
    return pair_costs(x, y, p).mean() - _optimal_cost(x, y, p, solver, epsilon)


def _optimal_cost(x: Tensor, y: Tensor, p: Literal[1, 2], solver: Solver, epsilon: float) -> Tensor:
    # an exact matching takes n³ steps, a Sinkhorn divergence n² for each iteration
    if solver == "auto":
        solver = "exact" if len(x) <= EXACT_UP_TO else "debiased"
    if solver == "exact":
        return wasserstein(x, y, p=p)
    if solver == "debiased":
        return sinkhorn_divergence(x, y, p=p, epsilon=epsilon)
    if solver not in get_args(Solver):
        raise ValueError(f"solver must be one of {get_args(Solver)}, got {solver!r}.")
    solution = sinkhorn(cost_matrix(x, y, p), epsilon=epsilon)
    names = {"plan": "transport", "kl": "value", "entropy": "entropic_value"}
    found: Tensor = getattr(solution, names[solver])
    return found


def wasserstein_1d(
    x: Float[Tensor, "*b n"], y: Float[Tensor, "*b m"], *, p: Literal[1, 2] = 2
) -> Float[Tensor, "*b"]:
    """Return the exact ``W_p^p`` of clouds on a line, by sorting; ``O(n log n)`` time.

    Example:
        >>> wasserstein_1d(torch.tensor([0.0, 2.0]), torch.tensor([1.0]))
        tensor(1.)
    """
    n, m = x.shape[-1], y.shape[-1]
    # quantile functions are constant between multiples of 1/n and of 1/m; in units of 1/(n m)
    ends = torch.cat([m * torch.arange(1, n + 1), n * torch.arange(1, m + 1)]).unique()
    lengths = ends.diff(prepend=ends.new_zeros(1)).to(x) / (n * m)
    rows, columns = ((ends - 1) // m).to(x.device), ((ends - 1) // n).to(x.device)
    moved = (x.sort(-1).values[..., rows] - y.sort(-1).values[..., columns]).abs()
    return (lengths * (moved.square() if p == 2 else moved)).sum(-1)


def sliced_wasserstein(
    x: Float[Tensor, "n d"],
    y: Float[Tensor, "m d"],
    *,
    p: Literal[1, 2] = 2,
    num_projections: int = 128,
    generator: torch.Generator | None = None,
) -> Float[Tensor, ""]:
    """Return the mean of ``W_p^p`` over random projections onto a line.

    ``O((n + m) log(n + m))`` time, for monitoring at scale. For ``p = 2`` it is at most ``W_2²/d``
    in expectation, with equality for a translation.

    Args:
        x: First cloud.
        y: Second cloud.
        p: Exponent of the distance.
        num_projections: Number of random directions.
        generator: Random generator of the directions, on the CPU.

    Example:
        >>> x = torch.randn(100, 3)
        >>> float(sliced_wasserstein(x, x))
        0.0
    """
    if num_projections < 1:
        raise ValueError(f"num_projections must be at least 1, got {num_projections}.")
    # drawn in float64 on the CPU: a seed gives the same directions for every type and device
    drawn = torch.randn(num_projections, x.shape[1], generator=generator, dtype=torch.float64)
    directions = torch.nn.functional.normalize(drawn, dim=1).to(x)
    return wasserstein_1d(directions @ x.T, directions @ y.T, p=p).mean()


class AffineMap(NamedTuple):
    """The map ``x ↦ A x + offset``, with symmetric positive ``A``."""

    matrix: Float[Tensor, "d d"]
    offset: Float[Tensor, " d"]

    def __call__(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """Return the images of the rows of ``x``."""
        return x @ self.matrix.T + self.offset


def gaussian_wasserstein(
    mean_x: Float[Tensor, " d"],
    covariance_x: Float[Tensor, "d d"],
    mean_y: Float[Tensor, " d"],
    covariance_y: Float[Tensor, "d d"],
) -> Float[Tensor, ""]:
    """Return ``W_2²`` of two Gaussians, ``‖m − m'‖² + tr(S + S' − 2 (S^½ S' S^½)^½)``.

    Example:
        >>> one, zero = torch.eye(2), torch.zeros(2)
        >>> gaussian_wasserstein(zero, one, torch.tensor([3.0, 4.0]), 4 * one)
        tensor(27.)
    """
    root = _power(covariance_x, 0.5)
    # symmetric, unlike the product of the covariances: eigvalsh needs no complex numbers
    cross = torch.linalg.eigvalsh(root @ covariance_y @ root).clamp_min(0).sqrt().sum()
    spread = covariance_x.trace() + covariance_y.trace() - 2 * cross
    return (mean_x - mean_y).square().sum() + spread


def gaussian_map(
    mean_x: Float[Tensor, " d"],
    covariance_x: Float[Tensor, "d d"],
    mean_y: Float[Tensor, " d"],
    covariance_y: Float[Tensor, "d d"],
) -> AffineMap:
    """Return the optimal map from one Gaussian to another; the first covariance is invertible.

    Example:
        >>> one, zero = torch.eye(2), torch.zeros(2)
        >>> gaussian_map(zero, one, torch.ones(2), 4 * one)(torch.ones(1, 2))
        tensor([[3., 3.]])
    """
    root, inverse = _power(covariance_x, 0.5), _power(covariance_x, -0.5)
    matrix = inverse @ _power(root @ covariance_y @ root, 0.5) @ inverse
    return AffineMap(matrix, mean_y - matrix @ mean_x)


def _power(matrix: Float[Tensor, "d d"], exponent: float) -> Float[Tensor, "d d"]:
    """Return a power of a symmetric matrix without negative eigenvalues."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp_min(0) ** exponent) @ vectors.T
