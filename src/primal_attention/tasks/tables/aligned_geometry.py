"""Where classes go, and which point goes where: centres, dummy clouds and their matching.

Each class ``c`` has a centre ``μ_c`` and a cloud of dummies drawn from ``N(μ_c, I)``, one for each
point of the class. Optimal transport matches points with dummies inside each class. A point is
found by its pair (instance, token), never by arithmetic on flat indices.
"""

import math
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from primal_attention.functional.transport import cost_matrix, minibatch_assignment, sinkhorn
from primal_attention.support.command import needs
from primal_attention.tasks.tables.settings import Dummies, Match

__all__ = [
    "Geometry",
    "MatchedClasses",
    "class_means",
    "match_classes",
    "num_outputs",
    "pair_up",
    "place_centres",
]

Geometry = Literal["aligned-simplex", "simplex", "circle", "class-means", "learned"]
"""How centres are placed; ``"learned"`` starts from the aligned simplex."""
Floats = NDArray[np.float64]
Labels = NDArray[np.int64]

_RADIUS = 6.0
"""Distance of the centres from the origin; clouds of deviation one then overlap little."""
_EPSILON = 0.01
"""Strength of the entropy when weights are unequal, relative to the mean cost."""
_MOST_COPIES = 4
"""Whole weights are matched exactly as copies of the points, up to this many copies a point."""


def num_outputs(num_inputs: int, num_classes: int, geometry: Geometry) -> int:
    """Return the smallest number of coordinates that has room for points and centres.

    Example:
        >>> num_outputs(2, 10, "aligned-simplex"), num_outputs(2, 10, "circle")
        (9, 2)
    """
    if geometry not in get_args(Geometry):
        raise ValueError(f"geometry must be one of {get_args(Geometry)}, got {geometry!r}.")
    needed = {"circle": 2, "class-means": 1}.get(geometry, num_classes - 1)
    return max(num_inputs, needed)


def class_means(points: Floats, labels: Labels, count: int, weights: Floats) -> Floats:
    """Return the mean of every class ``[k q]``; zero for a class without points.

    Args:
        points: All points ``[n t q]``.
        labels: Class of every instance ``[n]``.
        count: Number of classes.
        weights: Weight of every instance ``[n]``.
    """
    mass = weights * (labels == np.arange(count)[:, None])  # [k n]
    return mass @ points.mean(1) / np.maximum(mass.sum(1), 1e-300)[:, None]


def place_centres(means: Floats, geometry: Geometry) -> Floats:
    """Return the centres of the classes ``[k q]``.

    Args:
        means: Means of the classes in the space of the centres ``[k q]``.
        geometry: How to place them. ``"circle"`` is the published one: ``k`` points on a circle of
            radius ``3 k``, whatever the data.

    Example:
        >>> centres = place_centres(np.eye(3), "aligned-simplex")
        >>> np.round(np.linalg.norm(centres[0] - centres[1:], axis=1), 3)
        array([10.392, 10.392])
    """
    k, q = means.shape
    centres = np.zeros((k, q))
    if geometry == "circle":
        angles = 2 * math.pi * np.arange(k) / k
        centres[:, :2] = 3 * k * np.stack([np.sin(angles), np.cos(angles)], 1)
        return centres
    if k == 1:
        return centres
    if geometry == "class-means":
        return _push_apart(means)
    vertices = _simplex(k)
    if geometry == "simplex":
        centres[:, : k - 1] = vertices
        return centres
    # orthogonal Procrustes. Every exchange of two vertices is a reflection, so the best rotation
    # or reflection already is the best assignment of classes to vertices
    left, _, right = np.linalg.svd(means.T @ vertices, full_matrices=False)
    return vertices @ (left @ right).T


def _simplex(k: int) -> Floats:
    """Return ``k`` points ``[k k−1]`` with equal distances from each other and the origin."""
    # a basis of the vectors with sum zero: row c has the same entry before place c, then one more
    basis = np.zeros((k - 1, k))
    for row in range(k - 1):
        basis[row, : row + 1], basis[row, row + 1] = 1, -(row + 1)
    basis /= np.linalg.norm(basis, axis=1, keepdims=True)
    return _RADIUS * basis.T / math.sqrt((k - 1) / k)


def _push_apart(means: Floats) -> Floats:
    """Return the means, scaled so that the nearest two are as far apart as on a simplex."""
    k = len(means)
    apart = np.linalg.norm(means[:, None] - means, axis=-1)[np.triu_indices(k, 1)].min()
    if apart < 1e-3:
        raise ValueError(
            "two classes have the same mean, so geometry='class-means' cannot tell them apart; "
            "use geometry='aligned-simplex'."
        )
    middle = means.mean(0)
    return middle + (means - middle) * _RADIUS * math.sqrt(2 * k / (k - 1)) / apart


class MatchedClasses(NamedTuple):
    """Where every point should go."""

    targets: Floats
    """Target of every point ``[n t q]``."""
    dummies: tuple[Floats, ...]
    """Cloud of every class."""
    cost: float
    """Mean squared distance between points and targets."""


def match_classes(
    points: Floats,
    labels: Labels,
    centres: Floats,
    *,
    weights: Floats | None = None,
    match: Match = "ot",
    dummies: Dummies = "random",
    ot_batch: int = 512,
    seed: int = 0,
) -> MatchedClasses:
    """Return the targets of all points: dummies of their class, matched by optimal transport.

    Args:
        points: All points ``[n t q]``: instances, tokens, coordinates.
        labels: Class of every instance ``[n]``.
        centres: Centres of the classes ``[k q]``.
        weights: Weight of every instance ``[n]``. Small whole weights count as copies of the point,
            which goes to the mean of their dummies. For others the plan is entropic.
        match: ``"ot"``, ``"random"`` dummies of the class, or its ``"centre"``.
        dummies: ``"random"`` normal numbers or ``"quasi-random"`` nodes, which do not depend on
            the seed.
        ot_batch: Largest number of points that are matched at once. Larger classes are matched in
            random batches, which is biased towards longer ways.
        seed: Seed of dummies and batches.

    Example:
        >>> found = match_classes(np.zeros((4, 1, 2)), np.array([0, 0, 1, 1]), 9 * np.eye(2))
        >>> found.targets.shape
        (4, 1, 2)
    """
    for name, value, kind in (("match", match, Match), ("dummies", dummies, Dummies)):
        if value not in get_args(kind):
            raise ValueError(f"{name} must be one of {get_args(kind)}, got {value!r}.")
    weights = np.ones(len(points)) if weights is None else weights
    targets, clouds = np.empty_like(points), []
    for c, centre in enumerate(centres):
        instance, token = np.nonzero((labels == c)[:, None] & np.ones(points.shape[1], bool))
        copies = _copies(weights[instance])
        count = len(instance) if copies is None else int(copies.sum())
        # the last number keeps dummies apart from data that were drawn with the same seed
        rng = np.random.default_rng([seed, c, 1])
        cloud = centre + _normal(count, points.shape[2], dummies, rng)
        if match == "centre":
            cloud = np.broadcast_to(centre, cloud.shape)
        if count:
            targets[instance, token] = _class_targets(
                points[instance, token], cloud, weights[instance], copies, match, ot_batch, rng
            )
        clouds.append(cloud)
    share = weights / weights.sum()
    cost = float(share @ ((points - targets) ** 2).sum(-1).mean(1))
    return MatchedClasses(targets, tuple(clouds), cost)


def _copies(weights: Floats) -> Labels | None:
    """Return how often to repeat each point for equal masses; ``None`` if that is impossible."""
    if not len(weights):
        return np.zeros(0, np.int64)
    if np.ptp(weights) <= 1e-12 * weights.max():
        return np.ones(len(weights), np.int64)
    whole = np.round(weights)
    if (whole != weights).any() or whole.max() > 2**53:
        return None
    copies = whole.astype(np.int64)
    copies //= np.gcd.reduce(copies)
    return copies if copies.sum() <= _MOST_COPIES * len(copies) else None


def _class_targets(
    points: Floats,
    cloud: Floats,
    weights: Floats,
    copies: Labels | None,
    match: Match,
    ot_batch: int,
    rng: np.random.Generator,
) -> Floats:
    """Return the targets of the points of one class ``[n q]``."""
    if copies is None and match == "ot":
        return _entropic_targets(points, cloud, weights, ot_batch, rng)
    copies = np.ones(len(points), np.int64) if copies is None else copies
    owner = np.repeat(np.arange(len(points)), copies)
    if match == "ot":
        found = cloud[pair_up(points[owner], cloud, ot_batch, rng)]
    else:
        found = rng.permutation(cloud)
    sums = np.zeros_like(points)
    np.add.at(sums, owner, found)
    return sums / copies[:, None]


def pair_up(points: Floats, cloud: Floats, ot_batch: int, rng: np.random.Generator) -> Labels:
    """Return the permutation of a cloud that is nearest to the points; on a line by sorting.

    Example:
        >>> x = np.array([[0.0], [5.0], [1.0]])
        >>> pair_up(x, x[::-1], 512, np.random.default_rng(0)).tolist()
        [2, 1, 0]
    """
    if points.shape[1] == 1:
        order = np.empty(len(points), np.int64)
        order[np.argsort(points[:, 0], kind="stable")] = np.argsort(cloud[:, 0], kind="stable")
        return order
    found = minibatch_assignment(
        torch.from_numpy(points),
        torch.from_numpy(np.ascontiguousarray(cloud)),
        batch_size=ot_batch,
        generator=torch.Generator().manual_seed(int(rng.integers(2**31))),
    )
    return found.numpy()


def _entropic_targets(
    points: Floats, cloud: Floats, weights: Floats, ot_batch: int, rng: np.random.Generator
) -> Floats:
    """Return the mean dummy of every point under an entropic plan between unequal weights."""
    targets = np.empty_like(points)
    count = -(-len(points) // ot_batch)
    left, right = rng.permutation(len(points)), rng.permutation(len(points))
    for i, j in zip(np.array_split(left, count), np.array_split(right, count), strict=True):
        cost = cost_matrix(torch.from_numpy(points[i]), torch.from_numpy(cloud[j]))
        mass = torch.from_numpy(weights[i] / weights[i].sum())
        plan = sinkhorn(cost, mass, epsilon=_EPSILON, tolerance=1e-4).plan.numpy()
        targets[i] = plan @ cloud[j] / plan.sum(1, keepdims=True)
    return targets


def _normal(count: int, width: int, kind: Dummies, rng: np.random.Generator) -> Floats:
    """Return standard normal points ``[count width]``."""
    if kind == "random" or not count or not width:
        return rng.normal(size=(count, width))
    with needs("sklearn", "dummies='quasi-random'"):
        from scipy.stats import norm, qmc
    # Sobol points are balanced in powers of two; scrambling keeps them off the borders
    nodes = qmc.Sobol(width, rng=np.random.default_rng(0)).random_base2(math.ceil(math.log2(count)))
    return norm.ppf(nodes[:count])
