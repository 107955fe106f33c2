"""Entropic optimal transport: Sinkhorn in the log domain, its divergence, and factored kernels.

    W_ε(a, b) = min_P ⟨P, C⟩ + ε KL(P | a bᵀ)        P ≥ 0,  P 1 = a,  Pᵀ 1 = b

The solution is ``P_ij = a_i b_j exp((f_i + g_j − C_ij)/ε)``. The scalings alternate until the
marginals hold. The *debiased* divergence ``W_ε(x, y) − ½ W_ε(x, x) − ½ W_ε(y, y)`` is zero for
equal clouds and tends to the exact cost as ``ε → 0``.

If the kernel is an inner product of features, ``K = Φ_q Φ_kᵀ ≥ 0``, a scaling step costs
``O((n + m) p)`` and no matrix is formed (Scetbon & Cuturi 2020).

References: Cuturi 2013; Feydy et al. 2019 (debiasing).
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from primal_attention.functional.gaussian import square_distances

__all__ = [
    "FactoredScaling",
    "SinkhornSolution",
    "cost_matrix",
    "factored_sinkhorn",
    "sinkhorn",
    "sinkhorn_divergence",
]


def cost_matrix(
    x: Float[Tensor, "n d"], y: Float[Tensor, "m d"], p: Literal[1, 2] = 2
) -> Float[Tensor, "n m"]:
    """Return ``‖x_i − y_j‖^p``.

    Example:
        >>> cost_matrix(torch.zeros(1, 2), torch.tensor([[3.0, 4.0]]))
        tensor([[25.]])
    """
    if p == 2:
        return square_distances(x, y)
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")


class SinkhornSolution(NamedTuple):
    """Potentials of an entropic transport problem, and what follows from them.

    Potentials and plan are constants for autograd. The gradient of ``value`` is exact where the
    marginals hold (envelope theorem); that of ``transport`` keeps the plan fixed.
    """

    cost: Float[Tensor, "n m"]
    a: Float[Tensor, " n"]
    b: Float[Tensor, " m"]
    f: Float[Tensor, " n"]
    g: Float[Tensor, " m"]
    epsilon: Float[Tensor, ""]
    """Absolute ``ε``."""
    error: float
    """``‖P 1 − a‖₁``; the other marginal holds up to rounding."""
    iterations: int

    @property
    def plan(self) -> Float[Tensor, "n m"]:
        """The plan ``P``, a constant for autograd."""
        return self._plan(self.cost.detach()).detach()

    @property
    def transport(self) -> Float[Tensor, ""]:
        """``⟨P, C⟩``."""
        return (self.plan * self.cost).sum()

    @property
    def value(self) -> Float[Tensor, ""]:
        """``W_ε = ⟨P, C⟩ + ε KL(P | a bᵀ)``, from the dual problem."""
        # the dual value: its gradient in the cost is the plan, without solving again
        mass = self._plan(self.cost).sum()
        return self.a @ self.f + self.b @ self.g - self.epsilon * (mass - 1)

    @property
    def entropic_value(self) -> Float[Tensor, ""]:
        """``⟨P, C⟩ − ε H(P)`` with the entropy ``H(P) = −Σ P log P``."""
        shift = torch.xlogy(self.a, self.a).sum() + torch.xlogy(self.b, self.b).sum()
        return self.value + self.epsilon * shift

    def _plan(self, cost: Tensor) -> Tensor:
        exponent = (self.f[:, None] + self.g - cost) / self.epsilon
        return self.a[:, None] * self.b * exponent.exp()


def sinkhorn(
    cost: Float[Tensor, "n m"],
    a: Float[Tensor, " n"] | None = None,
    b: Float[Tensor, " m"] | None = None,
    *,
    epsilon: float = 0.1,
    scale: Float[Tensor, ""] | float | None = None,
    max_iterations: int = 1000,
    tolerance: float = 1e-5,
) -> SinkhornSolution:
    """Return the entropic transport between two weighted clouds, solved in the log domain.

    Args:
        cost: ``C``.
        a: Weights of the rows, with sum one; uniform by default.
        b: Weights of the columns, with sum one.
        epsilon: Strength of the entropy, relative to ``scale``.
        scale: Cost that ``epsilon`` is relative to, a constant; by default the mean of ``cost``.
        max_iterations: Stop after this many iterations.
        tolerance: Stop when ``‖P 1 − a‖₁`` is at most this.

    Example:
        >>> cost = torch.tensor([[0.0, 4.0], [4.0, 0.0]])
        >>> sinkhorn(cost).plan.round(decimals=3)
        tensor([[0.5000, 0.0000],
                [0.0000, 0.5000]])
    """
    if epsilon <= 0 or max_iterations < 1:
        raise ValueError(
            f"epsilon must be positive and max_iterations at least 1, got {epsilon} and "
            f"{max_iterations}."
        )
    # gradients flow through the cost alone: at the optimum those of the potentials vanish
    fixed = cost.detach()
    a = _weights(a, cost.shape[0], fixed)
    b = _weights(b, cost.shape[1], fixed)
    size = fixed.mean() if scale is None else torch.as_tensor(scale).to(fixed).detach()
    # equal points everywhere: any plan is optimal
    final = epsilon * torch.where(size > 0, size, 1.0)
    log_a, log_b = a.detach().log(), b.detach().log()
    f, g, error, iterations = torch.zeros_like(log_a), torch.zeros_like(log_b), float("inf"), 0
    # start smooth and halve: a small ε alone needs many more iterations
    step, is_final = torch.maximum(fixed.max(), final), False
    while iterations < max_iterations:
        iterations += 1
        before, f = f, _soft_min(fixed - g, log_b, step, 1)
        if is_final:
            # the error of the previous pair of potentials, without another pass over the costs
            error = float((a * ((before - f) / step).expm1().abs()).sum())
            if error <= tolerance:
                f = before
                break
        g = _soft_min(fixed - f[:, None], log_a, step, 0)
        is_final = bool(step <= final)
        step = torch.maximum(step / 2, final)
    return SinkhornSolution(cost, a, b, f, g, final, error, iterations)


def _soft_min(values: Tensor, log_weights: Tensor, epsilon: Tensor, dim: int) -> Tensor:
    weights = log_weights if dim == 1 else log_weights[:, None]
    return -epsilon * (weights - values / epsilon).logsumexp(dim)


def _weights(weights: Tensor | None, count: int, like: Tensor) -> Tensor:
    if weights is None:
        return like.new_full((count,), 1 / count)
    total = float(weights.sum())
    if weights.shape != (count,) or bool((weights < 0).any()) or abs(total - 1) > 1e-4:
        raise ValueError(
            f"weights must be {count} numbers that are not negative and have sum 1, got shape "
            f"{tuple(weights.shape)} with sum {total:.4g}; divide them by their sum."
        )
    return weights.to(like)


def sinkhorn_divergence(
    x: Float[Tensor, "n d"],
    y: Float[Tensor, "m d"],
    *,
    a: Float[Tensor, " n"] | None = None,
    b: Float[Tensor, " m"] | None = None,
    p: Literal[1, 2] = 2,
    epsilon: float = 0.1,
    max_iterations: int = 1000,
    tolerance: float = 1e-5,
) -> Float[Tensor, ""]:
    """Return ``W_ε(x, y) − ½ W_ε(x, x) − ½ W_ε(y, y)``, with gradients.

    Arguments as in :func:`sinkhorn`; ``epsilon`` is relative to the mean cost between ``x`` and
    ``y`` in all three problems.

    Example:
        >>> x = torch.randn(50, 2)
        >>> sinkhorn_divergence(x, x + torch.tensor([3.0, 4.0])).round()
        tensor(25.)
    """
    between = cost_matrix(x, y, p)
    # one scale for all three problems: otherwise their biases do not cancel
    scale = between.detach().mean()
    values = [
        sinkhorn(
            cost,
            left,
            right,
            epsilon=epsilon,
            scale=scale,
            max_iterations=max_iterations,
            tolerance=tolerance,
        ).value
        for cost, left, right in (
            (between, a, b),
            (cost_matrix(x, x, p), a, a),
            (cost_matrix(y, y, p), b, b),
        )
    ]
    return values[0] - (values[1] + values[2]) / 2


class FactoredScaling(NamedTuple):
    """Scalings that give ``diag(u) Φ_q Φ_kᵀ diag(v)`` the wanted marginals."""

    u: Float[Tensor, "*b n"]
    v: Float[Tensor, "*b m"]
    error: Float[Tensor, "*b"]
    """``Σ_i |row sum − a_i|``; the column sums hold up to rounding."""


def factored_sinkhorn(
    phi_q: Float[Tensor, "*b n f"],
    phi_k: Float[Tensor, "*b m f"],
    a: Float[Tensor, "*b n"] | None = None,
    b: Float[Tensor, "*b m"] | None = None,
    *,
    max_iterations: int = 1000,
    tolerance: float = 1e-5,
) -> FactoredScaling:
    """Return the scalings of ``Φ_q Φ_kᵀ ≥ 0`` in ``O((n + m) p)`` per iteration, with gradients.

    Args:
        phi_q: Query-side features. All inner products with key-side features must be positive.
        phi_k: Key-side features.
        a: Row sums of the result; ``1/n`` by default.
        b: Column sums of the result; ``1/m`` by default.
        max_iterations: Stop after this many iterations.
        tolerance: Stop when the row sums are this close to ``a``, summed over rows.

    Example:
        >>> phi_q, phi_k = torch.rand(5, 3), torch.rand(4, 3)
        >>> u, v, _ = factored_sinkhorn(phi_q, phi_k)
        >>> (u[:, None] * (phi_q @ phi_k.T) * v).sum(0)
        tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    n, m = phi_q.shape[-2], phi_k.shape[-2]
    a = phi_q.new_full(phi_q.shape[:-1], 1 / n) if a is None else a
    b = phi_k.new_full(phi_k.shape[:-1], 1 / m) if b is None else b
    rows = _product(phi_q, phi_k, torch.ones_like(b))
    columns = _product(phi_k, phi_q, torch.ones_like(a))
    # a sum that is not positive has no scaling; the loop would return NaN
    if not bool((rows > 0).all() & (columns > 0).all()):
        raise ValueError(
            "Φ_q Φ_kᵀ has a row or column whose sum is not positive, so no scaling exists; use "
            "positive features."
        )
    u = a / rows
    v, error = b, rows.new_full(rows.shape[:-1], torch.inf)
    for _ in range(max_iterations):
        v = b / _product(phi_k, phi_q, u)
        rows = _product(phi_q, phi_k, v)
        error = (u * rows - a).abs().sum(-1)
        if bool((error <= tolerance).all()):
            break
        u = a / rows
    return FactoredScaling(u, v, error)


def _product(left: Tensor, right: Tensor, weights: Tensor) -> Tensor:
    """Return ``left rightᵀ weights`` without the matrix."""
    return (left @ (right.mT @ weights[..., None]))[..., 0]
