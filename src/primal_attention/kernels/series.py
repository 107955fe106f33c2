"""Power series ``f(s) = Σ_N a_N s^N`` with ``a_N ≥ 0``.

``f(x·y)`` is positive definite in every dimension exactly if all ``a_N ≥ 0`` (Schoenberg 1942).

    exp       e^s              a_N = 1/N!
    trigh     sinh s + cosh s  another name for exp
    inverse   1/(1 − s)        a_N = 1
    logi      1 − log(1 − s)   a_0 = 1, a_N = 1/N
    sqrt      2 − √(1 − s)     a_0 = 1, a_N = (2N − 3)!! / (2^N N!)
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Inexact
from torch import Tensor

__all__ = ["SERIES", "PowerSeries", "as_series"]


@dataclass(frozen=True)
class PowerSeries:
    """A power series with non-negative coefficients.

    Args:
        name: Name used in error messages.
        coefficient: Function ``N ↦ a_N``.
        radius: The series converges for ``|s| < radius``.
        closed: Closed form of ``f``; without it the series is summed up to ``degree``.
        degree: Last degree of the sum without a closed form.

    Example:
        >>> as_series("inverse").coefficients(3)
        [1.0, 1.0, 1.0, 1.0]
    """

    name: str
    coefficient: Callable[[int], float]
    radius: float = math.inf
    closed: Callable[[Tensor], Tensor] | None = None
    degree: int = 20

    def __call__(self, s: Inexact[Tensor, "*shape"]) -> Inexact[Tensor, "*shape"]:
        """Return ``f(s)``."""
        return self.truncated(s, self.degree) if self.closed is None else self.closed(s)

    def truncated(self, s: Inexact[Tensor, "*shape"], degree: int) -> Inexact[Tensor, "*shape"]:
        """Return ``Σ_{N ≤ degree} a_N s^N``."""
        total = torch.zeros_like(s)
        for a in reversed(self.coefficients(degree)):
            total = total * s + a
        return total

    def coefficients(self, degree: int) -> list[float]:
        """Return ``a_0 … a_degree``."""
        found = [float(self.coefficient(n)) for n in range(degree + 1)]
        for n, a in enumerate(found):
            if not (a >= 0 and math.isfinite(a)):
                raise ValueError(
                    f"Coefficient {n} of the series {self.name!r} is {a}; all coefficients must be "
                    "finite and non-negative, otherwise the kernel is not positive definite."
                )
        return found


# named functions, not lambdas: a module that holds a series must be picklable
def _exp_coefficient(n: int) -> float:
    return 1 / math.factorial(n)


def _inverse_coefficient(n: int) -> float:
    return 1.0


def _logi_coefficient(n: int) -> float:
    return 1 / max(n, 1)


def _sqrt_coefficient(n: int) -> float:
    # a_1 = 1/2, a_n = a_{n-1} (2n - 3) / (2n)
    return math.prod(((2 * i - 3) / (2 * i) for i in range(2, n + 1)), start=0.5 if n else 1.0)


def _given_coefficient(given: tuple[float, ...], n: int) -> float:
    return given[n] if n < len(given) else 0.0


def _inverse(s: Tensor) -> Tensor:
    return 1 / (1 - s)


def _logi(s: Tensor) -> Tensor:
    return 1 - torch.log1p(-s)


def _sqrt(s: Tensor) -> Tensor:
    return 2 - (1 - s).sqrt()


SERIES: dict[str, PowerSeries] = {
    "exp": PowerSeries("exp", _exp_coefficient, math.inf, torch.exp),
    "inverse": PowerSeries("inverse", _inverse_coefficient, 1.0, _inverse),
    "logi": PowerSeries("logi", _logi_coefficient, 1.0, _logi),
    "sqrt": PowerSeries("sqrt", _sqrt_coefficient, 1.0, _sqrt),
    "trigh": PowerSeries("trigh", _exp_coefficient, math.inf, torch.exp),
}
"""The five published series by name."""


def as_series(series: str | PowerSeries | Sequence[float]) -> PowerSeries:
    """Return a series from its name or its coefficients; a series is returned as it is.

    Example:
        >>> as_series([1.0, 0.0, 0.5])(torch.tensor(2.0))
        tensor(3.)
    """
    if isinstance(series, PowerSeries):
        return series
    if isinstance(series, str):
        if series not in SERIES:
            raise ValueError(
                f"There is no series named {series!r}; use one of {', '.join(SERIES)}, or pass "
                "the coefficients a_0, a_1, …."
            )
        return SERIES[series]
    given = tuple(float(a) for a in series)
    if not any(given):
        raise ValueError(f"All coefficients are zero: {given}; at least one must be positive.")
    degree = len(given) - 1
    polynomial = PowerSeries("custom", partial(_given_coefficient, given), degree=degree)
    polynomial.coefficients(degree)
    return polynomial
