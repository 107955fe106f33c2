"""The face of every kernel and feature map.

A kernel answers ``gram(x, y)``: the matrix ``κ(x_i, y_j)``. A feature map is a kernel that also
has features, ``φ_q(x_i)·φ_k(y_j) ≈ κ(x_i, y_j)``, and says how the two relate.
"""

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from primal_attention.functional.precision import accumulator

__all__ = ["FeatureMap", "Kernel", "RandomFeatureMap", "Relation"]

Relation = Literal["exact", "unbiased", "truncated", "near"]
"""Features reproduce the kernel exactly, on average over draws, up to a cut of its series, or stand
for another kernel that is near it."""


class Kernel(nn.Module):
    """A kernel ``κ(x, y)`` between rows."""

    def gram(
        self, x: Float[Tensor, "*batch n d"], y: Float[Tensor, "*batch m d"]
    ) -> Float[Tensor, "*batch n m"]:
        """Return the matrix ``κ(x_i, y_j)``, in float32 or better; ``O(n m d)``."""
        raise NotImplementedError  # abstract

    def forward(
        self, x: Float[Tensor, "*batch n d"], y: Float[Tensor, "*batch m d"]
    ) -> Float[Tensor, "*batch n m"]:
        """Return ``gram(x, y)``."""
        return self.gram(x, y)


class FeatureMap(Kernel):
    """A kernel with explicit features for queries and for keys.

    Attributes:
        kernel: What the features stand for.
        relation: How ``approximate`` relates to ``gram``.
        is_positive: Whether no feature is ever negative.
        num_features: Width ``p`` of the features.
    """

    kernel: Kernel
    relation: Relation
    is_positive: bool
    num_features: int

    def gram(
        self, x: Float[Tensor, "*batch n d"], y: Float[Tensor, "*batch m d"]
    ) -> Float[Tensor, "*batch n m"]:
        """Return the exact matrix ``κ(x_i, y_j)``."""
        return self.kernel.gram(x, y)

    def query_features(self, x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n p"]:
        """Return ``φ_q(x_i)``, in float32 or better."""
        raise NotImplementedError  # abstract

    def key_features(self, x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n p"]:
        """Return ``φ_k(x_i)``; the same as for queries unless a map says otherwise."""
        return self.query_features(x)

    def approximate(
        self, x: Float[Tensor, "*batch n d"], y: Float[Tensor, "*batch m d"]
    ) -> Float[Tensor, "*batch n m"]:
        """Return the matrix ``φ_q(x_i)·φ_k(y_j)`` that the features stand for."""
        return self.query_features(x) @ self.key_features(y).transpose(-1, -2)


class RandomFeatureMap(FeatureMap):
    """A feature map with a random draw: a buffer, saved with the module, redrawn only on request.

    The draw is made on the CPU in float64, so that a seed gives the same features everywhere.
    """

    relation: Relation = "unbiased"

    def redraw_(self, generator: torch.Generator | None = None) -> None:
        """Draw anew, in place. Call it between training steps; it changes the function."""
        raise NotImplementedError  # abstract

    def _store(self, name: str, draw: Tensor, device: Any = None, dtype: Any = None) -> None:
        """Register a draw, or replace it where and as the old one was."""
        if name in self._buffers:
            self._buffers[name] = draw.to(self.get_buffer(name))
        else:
            dtype = torch.get_default_dtype() if dtype is None else dtype
            self.register_buffer(name, draw.to(device=device, dtype=dtype))


def wide(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return ``x`` in the precision sums are made in."""
    return x.to(accumulator(x))
