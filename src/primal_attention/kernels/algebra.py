"""Sums and products of kernels, each part on its own columns of a row.

    sum       κ_x + κ_t      features [φ_x ; φ_t]      width p_x + p_t
    product   κ_x · κ_t      features  φ_x ⊗ φ_t       width p_x · p_t

Inside an exponential the sum turns into a product: ``exp(κ_x + κ_t) = exp(κ_x) exp(κ_t)``. This is
what softmax attention does with features that are joined before the projections.
"""

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from primal_attention.kernels.base import FeatureMap, Kernel, Relation

__all__ = ["ProductFeatures", "ProductKernel", "SumFeatures", "SumKernel", "kronecker"]

# from the best relation to the weakest: a combination is as good as its weakest part
_RELATIONS: tuple[Relation, ...] = ("exact", "unbiased", "truncated", "near")


def kronecker(
    x: Float[Tensor, "*#batch p"], y: Float[Tensor, "*#batch q"]
) -> Float[Tensor, "... pq"]:
    """Return ``x ⊗ y`` for every row; its inner products are products of inner products.

    Example:
        >>> kronecker(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0]))
        tensor([ 3.,  5.,  6., 10.])
    """
    return (x[..., :, None] * y[..., None, :]).flatten(-2)


class _Combined(Kernel):
    """Kernels of separate columns."""

    def __init__(self, parts: Sequence[Kernel], widths: Sequence[int]) -> None:
        super().__init__()
        if len(parts) < 2 or len(parts) != len(widths) or min(widths) < 1:
            raise ValueError(
                f"{type(self).__name__} needs two or more kernels and a positive number of columns "
                f"for each, got {len(parts)} kernels and widths={tuple(widths)}."
            )
        self.parts, self.widths = nn.ModuleList(parts), tuple(widths)

    def _columns(self, x: Tensor) -> tuple[Tensor, ...]:
        if x.shape[-1] != sum(self.widths):
            raise ValueError(
                f"Rows have {x.shape[-1]} columns, but the kernels take {self.widths}; join the "
                "columns of all parts, in order."
            )
        return x.split(self.widths, dim=-1)

    def _grams(self, x: Tensor, y: Tensor) -> Iterable[Tensor]:
        columns = zip(self._columns(x), self._columns(y), strict=True)
        parts = cast(Iterable[Kernel], self.parts)
        return (part.gram(*pair) for part, pair in zip(parts, columns, strict=True))

    def extra_repr(self) -> str:
        """Return the columns of each part."""
        return f"widths={self.widths}"


class SumKernel(_Combined):
    """``κ_1 + κ_2 + …``, each on its own columns.

    Args:
        parts: The kernels.
        widths: How many columns each one takes.

    Example:
        >>> from primal_attention.kernels import BochnerTime, Gaussian, TimeColumn
        >>> kernel = SumKernel([Gaussian(), TimeColumn(BochnerTime(8))], [3, 1])
        >>> rows = torch.randn(5, 4)
        >>> bool((kernel.gram(rows, rows).diagonal() - 2).abs().max() < 1e-5)
        True
    """

    def gram(
        self, x: Float[Tensor, "*batch n d"], y: Float[Tensor, "*batch m d"]
    ) -> Float[Tensor, "*batch n m"]:
        """Return the sum of the matrices."""
        return functools.reduce(operator.add, self._grams(x, y))


class ProductKernel(_Combined):
    """``κ_1 · κ_2 · …``, each on its own columns.

    Args:
        parts: The kernels.
        widths: How many columns each one takes.

    Example:
        >>> from primal_attention.kernels import BochnerTime, Gaussian, TimeColumn
        >>> kernel = ProductKernel([Gaussian(), TimeColumn(BochnerTime(8))], [3, 1])
        >>> kernel.gram(torch.randn(5, 4), torch.randn(6, 4)).shape
        torch.Size([5, 6])
    """

    def gram(
        self, x: Float[Tensor, "*batch n d"], y: Float[Tensor, "*batch m d"]
    ) -> Float[Tensor, "*batch n m"]:
        """Return the product of the matrices."""
        return functools.reduce(operator.mul, self._grams(x, y))


class _CombinedFeatures(FeatureMap):
    def __init__(self, parts: Sequence[FeatureMap], kernel: _Combined, num_features: int) -> None:
        super().__init__()
        self.kernel: _Combined = kernel
        self.num_features = num_features
        self.relation = max((part.relation for part in parts), key=_RELATIONS.index)
        self.is_positive = all(part.is_positive for part in parts)

    def query_features(self, x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n p"]:
        """Return the features of the queries."""
        return self._join([part.query_features(a) for part, a in self._pairs(x)])

    def key_features(self, x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n p"]:
        """Return the features of the keys."""
        return self._join([part.key_features(a) for part, a in self._pairs(x)])

    def _pairs(self, x: Tensor) -> Iterable[tuple[FeatureMap, Tensor]]:
        parts = cast(Iterable[FeatureMap], self.kernel.parts)
        return zip(parts, self.kernel._columns(x), strict=True)

    def _join(self, features: list[Tensor]) -> Tensor:
        raise NotImplementedError  # abstract


class SumFeatures(_CombinedFeatures):
    """Features ``[φ_1 ; φ_2 ; …]`` of a sum of kernels.

    Args:
        parts: The feature maps.
        widths: How many columns each one takes.

    Example:
        >>> from primal_attention.kernels import BochnerTime, Cosine, TimeColumn
        >>> phi = SumFeatures([Cosine(3), TimeColumn(BochnerTime(8))], [3, 1])
        >>> phi.query_features(torch.randn(5, 4)).shape
        torch.Size([5, 11])
    """

    def __init__(self, parts: Sequence[FeatureMap], widths: Sequence[int]) -> None:
        super().__init__(parts, SumKernel(parts, widths), sum(p.num_features for p in parts))

    def _join(self, features: list[Tensor]) -> Tensor:
        return torch.cat(features, dim=-1)


class ProductFeatures(_CombinedFeatures):
    """Features ``φ_1 ⊗ φ_2 ⊗ …`` of a product of kernels.

    Args:
        parts: The feature maps.
        widths: How many columns each one takes.

    Example:
        >>> from primal_attention.kernels import BochnerTime, Cosine, TimeColumn
        >>> phi = ProductFeatures([Cosine(3), TimeColumn(BochnerTime(8))], [3, 1])
        >>> phi.query_features(torch.randn(5, 4)).shape
        torch.Size([5, 24])
    """

    def __init__(self, parts: Sequence[FeatureMap], widths: Sequence[int]) -> None:
        width = functools.reduce(operator.mul, (p.num_features for p in parts))
        super().__init__(parts, ProductKernel(parts, widths), width)

    def _join(self, features: list[Tensor]) -> Tensor:
        return functools.reduce(kronecker, features)
