"""Power series ``f(s) = Σ_N a_N s^N`` with ``a_N ≥ 0``.

These, and only these, make ``f(x·y)`` positive definite in every dimension (Schoenberg 1942).

    exp       e^s              a_N = 1/N!
    trigh     sinh s + cosh s  the same function under another name
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

__all__ = ["SERIES", "Series", "named_series"]


@dataclass(frozen=True)
class Series:
    """A power series with non-negative coefficients.

    Args:
        name: For messages.
        coefficient: ``N ↦ a_N``.
        radius: Where the series converges: ``|s| < radius``.
        closed: ``f`` itself; without it the series is summed to ``degree``.
        degree: Last degree that is summed when there is no closed form.

    Example:
        >>> named_series("inverse").coefficients(3)
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
                    f"Coefficient {n} of the series {self.name!r} is {a}; all must be finite and "
                    "not negative, or the kernel is not positive definite."
                )
        return found


# functions with a name, not lambdas: modules that hold a series must pickle
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


SERIES: dict[str, Series] = {
    "exp": Series("exp", _exp_coefficient, math.inf, torch.exp),
    "inverse": Series("inverse", _inverse_coefficient, 1.0, _inverse),
    "logi": Series("logi", _logi_coefficient, 1.0, _logi),
    "sqrt": Series("sqrt", _sqrt_coefficient, 1.0, _sqrt),
    "trigh": Series("trigh", _exp_coefficient, math.inf, torch.exp),
}
"""The five published series by name."""


def named_series(series: str | Series | Sequence[float]) -> Series:
    """Return the series of that name, or the polynomial with these coefficients.

    Example:
        >>> named_series([1.0, 0.0, 0.5])(torch.tensor(2.0))
        tensor(3.)
    """
    if isinstance(series, Series):
        return series
    if isinstance(series, str):
        if series not in SERIES:
            raise ValueError(
                f"There is no series named {series!r}; use one of {', '.join(SERIES)}, or pass "
                "the coefficients a_0, a_1, …"
            )
        return SERIES[series]
    given = tuple(float(a) for a in series)
    if not any(given):
        raise ValueError(
            f"A series needs a coefficient above zero, got {given}; pass a_0, a_1, … or a name."
        )
    degree = len(given) - 1
    polynomial = Series("custom", partial(_given_coefficient, given), degree=degree)
    polynomial.coefficients(degree)
    return polynomial
