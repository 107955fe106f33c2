"""Optimal transport from its definitions: all permutations, corner rule, plain scaling."""

from itertools import permutations

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = [
    "anchored_weights",
    "best_permutation",
    "corner_cost",
    "danskin_gradient",
    "plain_sinkhorn",
]


def best_permutation(cost: Float[Tensor, "n n"]) -> Int[Tensor, " n"]:
    """Return the permutation ``σ`` of least ``Σ_i C_{i σ(i)}``, by trying all of them."""
    orders = torch.tensor(list(permutations(range(len(cost)))))
    totals = cost[torch.arange(len(cost)), orders].sum(1)
    return orders[totals.argmin()]


def corner_cost(x: Float[Tensor, " n"], y: Float[Tensor, " m"], p: int = 2) -> Float[Tensor, ""]:
    """Return ``W_p^p`` of two clouds on a line: fill the sorted plan from its first corner."""
    x, y = x.sort().values, y.sort().values
    n, m = len(x), len(y)
    # masses in units of 1/(n m), so that they are integers
    left, right, total = [m] * n, [n] * m, x.new_zeros(())
    i = j = 0
    while i < n and j < m:
        moved = min(left[i], right[j])
        total = total + moved * (x[i] - y[j]).abs() ** p
        left[i], right[j] = left[i] - moved, right[j] - moved
        i, j = i + (left[i] == 0), j + (right[j] == 0)
    return total / (n * m)


def danskin_gradient(
    x: Float[Tensor, "n d"], y: Float[Tensor, "n d"], order: Int[Tensor, " n"]
) -> Float[Tensor, "n d"]:
    """Return ``∂gap/∂y`` for the squared distance, with the permutation ``σ`` held fixed.

    ``∂gap/∂y_i = (2/n) [(y_i − x_i) − (y_i − x_{σ⁻¹(i)})]``.
    """
    inverse = order.argsort()
    return 2 / len(x) * ((y - x) - (y - x[inverse]))


def plain_sinkhorn(
    cost: Float[Tensor, "n m"],
    a: Float[Tensor, " n"],
    b: Float[Tensor, " m"],
    epsilon: float,
    iterations: int = 5000,
) -> Float[Tensor, "n m"]:
    """Return the plan ``diag(u) exp(−C/ε) diag(v)`` by alternating scalings, without logarithms."""
    kernel = (-cost / epsilon).exp()
    u, v = torch.ones_like(a), torch.ones_like(b)
    for _ in range(iterations):
        u = a / (kernel @ v)
        v = b / (kernel.T @ u)
    return u[:, None] * kernel * v


def anchored_weights(
    q: Float[Tensor, "n d"],
    k: Float[Tensor, "m d"],
    z: Float[Tensor, "r d"],
    mass: Float[Tensor, " r"],
    num_steps: int,
    floor: float = 1e-6,
) -> Float[Tensor, "n m"]:
    """Return the weights of transport attention: two dense plans through the anchors ``z``."""

    def plan(x: Tensor) -> Tensor:
        found = (x @ z.T / z.shape[1] ** 0.5).softmax(1) + floor
        found = found * mass / (found * mass).sum(1, keepdim=True)
        for _ in range(num_steps):
            found = found / found.sum(0) * len(x) * mass  # the column of anchor a sums to n μ_a
            found = found / found.sum(1, keepdim=True)  # every row sums to one
        return found

    to_keys = plan(k)
    return plan(q) @ (to_keys / to_keys.sum(0)).T
