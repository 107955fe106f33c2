"""Numbers that compare a map of points with an optimal one, and a path with a straight one.

Point ``i`` starts at ``a_i`` and ends at ``b_i``; ``c(a, b) = ‖a − b‖^p``:

    cost        (1/n) Σ_i c(a_i, b_i)                       what the map costs
    optimal     (1/n) min_σ Σ_i c(a_i, b_σ(i))              what the same cloud costs at least
    gap         cost − optimal ≥ 0                          the Monge gap
    optimality  (optimal / cost)^(1/p)                      1 if and only if the gap is zero
    matching    share of points with σ(i) = i
    efficiency  Σ_i ‖a_i − b_i‖ / Σ_i length of path i      1 if every path is straight
    regret      W_p(now, end)                               distance that is left

``scope="pooled"`` compares all points: the test of a map. ``scope="class"`` optimises within each
class. Names with ``root_`` are definitions of a published code, kept for parity; their efficiency
divides a root of a sum of squares by a sum of lengths, so straight paths have about ``√(2/n)``.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from primal_attention.functional.transport import (
    EXACT_UP_TO,
    cost_matrix,
    optimal_assignment,
    pair_costs,
    sinkhorn,
    sinkhorn_divergence,
)

__all__ = [
    "MapMetrics",
    "PathMetrics",
    "RootMetrics",
    "Scope",
    "map_metrics",
    "path_metrics",
    "root_metrics",
]

Scope = Literal["pooled", "class"]
Method = Literal["auto", "exact", "debiased"]


class MapMetrics(NamedTuple):
    """A map of points beside the optimal one."""

    cost: float
    optimal: float
    gap: float
    optimality: float
    matching: float
    spread: float
    """Standard deviation of the images over that of the points, within classes if they are the
    scope. A map to one point is optimal, too: near zero, the other numbers mean little."""
    num_points: int
    solver: str
    """``"exact"`` or ``"debiased"``."""


class PathMetrics(NamedTuple):
    """Where points are after an epoch, compared with the start and with the end."""

    epoch: int
    cost: float
    optimal: float
    gap: float
    optimality: float
    matching: float
    length: float
    """Mean length of the paths so far."""
    efficiency: float
    regret: float
    step_gap: float
    """Gap of the move since the last recorded epoch."""
    step_optimality: float


class RootMetrics(NamedTuple):
    """The coded definitions, for parity: roots of sums of squares, summed over classes."""

    root_distance: float
    """``D = Σ_c (Σ_{i ∈ c} ‖a_i − b_i‖²)^½``."""
    root_transport: float
    """``W = Σ_c (min_σ Σ_{i ∈ c} ‖a_i − b_σ(i)‖²)^½``."""
    total_length: float
    """Sum of the lengths of all paths."""
    root_gap: float
    """``D − W``."""
    root_optimality: float
    """``W / D``."""
    root_efficiency: float
    """``D / total_length``."""


def map_metrics(
    x: Float[Tensor, "n d"],
    y: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"] | None = None,
    *,
    scope: Scope = "pooled",
    p: Literal[1, 2] = 2,
    solver: Method = "auto",
    epsilon: float = 0.1,
) -> MapMetrics:
    """Return how far the map ``x_i ↦ y_i`` is from an optimal one.

    Args:
        x: Points before the map.
        y: Points after the map.
        labels: Class of each point; needed for ``scope="class"``.
        scope: ``"pooled"`` or ``"class"``.
        p: Exponent of the distance.
        solver: ``"exact"``, ``"debiased"`` (Sinkhorn), or ``"auto"``: exact up to 1,500 points. The
            debiased gap can be slightly negative; it is not clamped.
        epsilon: Strength of the entropy of ``"debiased"``, relative to the mean cost.

    Example:
        >>> x = torch.randn(40, 2)
        >>> turned = map_metrics(x, -x)
        >>> map_metrics(x, 3 * x + 1).optimality, turned.optimality < 0.3
        (1.0, True)
    """
    if x.shape != y.shape or x.dim() != 2:
        raise ValueError(
            f"x and y must have one shape [points, width], got {tuple(x.shape)} and "
            f"{tuple(y.shape)}; row i of y is where row i of x goes."
        )
    x, y = x.detach().double(), y.detach().double()
    groups, n = _groups(len(x), labels, scope), len(x)
    largest = max(len(group) for group in groups)
    is_exact = solver == "exact" or (solver == "auto" and largest <= EXACT_UP_TO)
    if solver not in ("auto", "exact", "debiased"):
        raise ValueError(f"solver must be 'auto', 'exact' or 'debiased', got {solver!r}.")
    best = matched = 0.0
    for group in groups:
        found = (
            _exact(x[group], y[group], p) if is_exact else _entropic(x[group], y[group], p, epsilon)
        )
        best, matched = best + found[0], matched + found[1]
    cost = float(pair_costs(x, y, p).mean())
    optimal = best / n
    return MapMetrics(
        cost,
        optimal,
        cost - optimal,
        _ratio(optimal, cost) ** (1 / p),
        matched / n,
        _ratio(_spread(y, groups), _spread(x, groups)),
        n,
        "exact" if is_exact else "debiased",
    )


def _groups(n: int, labels: Tensor | None, scope: Scope) -> list[Tensor]:
    if n < 1:
        raise ValueError("There are no points; transport needs at least one.")
    if scope == "pooled":
        return [torch.arange(n)]
    if scope != "class":
        raise ValueError(f"scope must be 'pooled' or 'class', got {scope!r}.")
    if labels is None:
        raise ValueError("scope='class' needs labels; give the class of each point.")
    return [(labels == c).nonzero().flatten().cpu() for c in labels.unique()]


def _exact(x: Tensor, y: Tensor, p: Literal[1, 2]) -> tuple[float, float]:
    """Return the least total cost, and the number of points matched with their own image."""
    order = optimal_assignment(cost_matrix(x, y, p))
    # images that coincide are the same image
    matched = (y[order] == y).all(1).sum()
    return float(pair_costs(x, y[order], p).sum()), float(matched)


def _entropic(x: Tensor, y: Tensor, p: Literal[1, 2], epsilon: float) -> tuple[float, float]:
    plan = sinkhorn(cost_matrix(x, y, p), epsilon=epsilon).plan
    # an entropic plan splits points: the largest share tells where one goes
    matched = (plan.argmax(1) == torch.arange(len(x), device=x.device)).sum()
    return len(x) * float(sinkhorn_divergence(x, y, p=p, epsilon=epsilon)), float(matched)


def _spread(x: Tensor, groups: Sequence[Tensor]) -> float:
    """Return the standard deviation of points from the mean of their group."""
    squares = [(x[group] - x[group].mean(0)).square().sum() for group in groups]
    return float((torch.stack(squares).sum() / len(x)).sqrt())


def _ratio(part: float, whole: float) -> float:
    """Return a share between zero and one; one if there is nothing to share."""
    return max(part, 0.0) / whole if whole > 0 else 1.0


def path_metrics(
    positions: Float[Tensor, "e n d"],
    labels: Int[Tensor, " n"] | None = None,
    *,
    epochs: Sequence[int] | None = None,
    scope: Scope = "pooled",
    p: Literal[1, 2] = 2,
    solver: Method = "auto",
) -> list[PathMetrics]:
    """Return the numbers of every recorded epoch of a path.

    Three optimal matchings an epoch: from the start, to the end, and since the last one.

    Args:
        positions: Positions of the same points at several times; the first are the start.
        labels: Class of each point.
        epochs: Numbers of the epochs; by default ``0, 1, …``.
        scope: ``"pooled"`` or ``"class"``.
        p: Exponent of the distance.
        solver: As in :func:`map_metrics`.

    Example:
        >>> start = torch.randn(30, 2)
        >>> path = torch.stack([start, start + 1, start + 2])
        >>> [round(row.efficiency, 6) for row in path_metrics(path)]
        [1.0, 1.0, 1.0]
    """
    positions = positions.detach().double()
    names = range(len(positions)) if epochs is None else epochs

    def between(a: Tensor, b: Tensor) -> MapMetrics:
        return map_metrics(a, b, labels, scope=scope, p=p, solver=solver)

    lengths = torch.linalg.vector_norm(positions.diff(dim=0), dim=-1).cumsum(0)
    rows = []
    for i, (epoch, now) in enumerate(zip(names, positions, strict=True)):
        whole, left = between(positions[0], now), between(now, positions[-1])
        step = between(positions[max(i - 1, 0)], now)
        walked = float(lengths[i - 1].sum()) if i else 0.0
        straight = float(pair_costs(positions[0], now, 1).sum())
        rows.append(
            PathMetrics(
                epoch,
                *whole[:5],
                walked / len(now),
                _ratio(straight, walked),
                max(left.optimal, 0.0) ** (1 / p),
                step.gap,
                step.optimality,
            )
        )
    return rows


def root_metrics(
    positions: Float[Tensor, "e n d"], labels: Int[Tensor, " n"] | None = None
) -> RootMetrics:
    """Return the coded definitions of distance, transport, gap, optimality and efficiency.

    Args:
        positions: Positions of the same points at several times.
        labels: Class of each point; one class by default.

    Example:
        >>> start = torch.zeros(50, 2)
        >>> round(root_metrics(torch.stack([start, start + 1])).root_efficiency, 3)
        0.141
    """
    positions = positions.detach().double()
    start, end = positions[0], positions[-1]
    groups = _groups(len(start), labels, "pooled" if labels is None else "class")
    distance = sum(float(pair_costs(start[g], end[g]).sum()) ** 0.5 for g in groups)
    transport = sum(_exact(start[g], end[g], 2)[0] ** 0.5 for g in groups)
    length = float(torch.linalg.vector_norm(positions.diff(dim=0), dim=-1).sum())
    return RootMetrics(
        distance,
        transport,
        length,
        distance - transport,
        _ratio(transport, distance),
        _ratio(distance, length),
    )
