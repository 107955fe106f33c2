"""Kernels in closed form.

cosine        x·y / ‖x‖‖y‖
exponential   exp(scale · x·y)              softmax attention before normalisation
gaussian      exp(−scale · ‖x − y‖² / 2)    = exp(scale · x·y) up to a factor per row and column
dot product   f(scale · x·y),  f(s) = Σ_N a_N s^N,  a_N ≥ 0      (Schoenberg 1942)
"""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from primal_attention.functional.gaussian import gaussian_gram
from primal_attention.functional.precision import full_precision
from primal_attention.kernels.base import FeatureMap, Kernel, Relation, widen
from primal_attention.kernels.series import PowerSeries, as_series

__all__ = ["Cosine", "DotProduct", "Exponential", "Gaussian"]


def _inner(x: Tensor, y: Tensor) -> Tensor:
    with full_precision(x):
        return widen(x) @ widen(y).transpose(-1, -2)


def unit(x: Float[Tensor, "*batch d"], eps: float = 1e-12) -> Float[Tensor, "*batch d"]:
    """Return ``x / √(‖x‖² + eps)``, rows of length one; a zero row stays zero."""
    x = widen(x)
    return x * (x.square().sum(-1, keepdim=True) + eps).rsqrt()


class Cosine(FeatureMap):
    """The cosine of the angle between two rows; its features are the normalised rows.

    Args:
        dim: Width of the rows.

    Example:
        >>> Cosine(2).gram(torch.tensor([[3.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
        tensor([[1., 0.]])
    """

    relation: Relation = "exact"
    is_positive = False

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.num_features = dim

    def gram(
        self, x: Float[Tensor, "*batch n d"], y: Float[Tensor, "*batch m d"]
    ) -> Float[Tensor, "*batch n m"]:
        """Return ``x_i·y_j / ‖x_i‖‖y_j‖``."""
        return _inner(unit(x), unit(y))

    def query_features(self, x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """Return ``x_i / ‖x_i‖``."""
        return unit(x)


class Exponential(Kernel):
    """``exp(scale · x·y)``.

    Args:
        scale: Inverse temperature; ``d ** -0.5`` gives the weights of softmax attention.
        normalize: Scale rows to length one first.

    Example:
        >>> Exponential().gram(torch.zeros(1, 2), torch.ones(1, 2))
        tensor([[1.]])
    """

    def __init__(self, scale: float = 1.0, *, normalize: bool = False) -> None:
        super().__init__()
        self.scale, self.normalize = scale, normalize

    def gram(
        self, x: Float[Tensor, "*batch n d"], y: Float[Tensor, "*batch m d"]
    ) -> Float[Tensor, "*batch n m"]:
        """Return ``exp(scale · x_i·y_j)``."""
        if self.normalize:
            x, y = unit(x), unit(y)
        return (self.scale * _inner(x, y)).exp()


class Gaussian(Kernel):
    """``exp(−scale · ‖x − y‖² / 2)``.

    Args:
        scale: Inverse squared width.
        normalize: Scale rows to length one first.

    Example:
        >>> Gaussian(2.0).gram(torch.zeros(1, 1), torch.ones(1, 1))
        tensor([[0.3679]])
    """

    def __init__(self, scale: float = 1.0, *, normalize: bool = False) -> None:
        super().__init__()
        self.scale, self.normalize = scale, normalize

    def gram(
        self, x: Float[Tensor, "*batch n d"], y: Float[Tensor, "*batch m d"]
    ) -> Float[Tensor, "*batch n m"]:
        """Return ``exp(−scale · ‖x_i − y_j‖² / 2)``; never above one."""
        if self.normalize:
            x, y = unit(x), unit(y)
        return gaussian_gram(widen(x) * self.scale**0.5, widen(y) * self.scale**0.5)


class DotProduct(Kernel):
    """``f(scale · x·y)`` with a power series ``f`` of non-negative coefficients.

    Args:
        series: A name in :data:`~primal_attention.kernels.series.SERIES`, a series, or its
            coefficients.
        scale: Factor on the inner product.

    Example:
        >>> DotProduct("inverse").gram(torch.tensor([[0.5]]), torch.tensor([[1.0]]))
        tensor([[2.]])
    """

    def __init__(
        self, series: str | PowerSeries | Sequence[float] = "exp", scale: float = 1.0
    ) -> None:
        super().__init__()
        self.series, self.scale = as_series(series), scale

    def gram(
        self, x: Float[Tensor, "*batch n d"], y: Float[Tensor, "*batch m d"]
    ) -> Float[Tensor, "*batch n m"]:
        """Return ``f(scale · x_i·y_j)``; infinite or NaN outside the radius of convergence."""
        return self.series(self.scale * _inner(x, y))
