"""Base classes of kernels and feature maps.

A kernel computes ``gram(x, y)``, the matrix ``κ(x_i, y_j)``. A feature map is a kernel that also
computes features with ``φ_q(x_i)·φ_k(y_j) ≈ κ(x_i, y_j)``. Its ``relation`` says how good the
approximation is.
"""

from typing import Literal, TypedDict

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.types import Device

from primal_attention.functional.precision import accumulator

__all__ = ["Factory", "FeatureMap", "Kernel", "RandomFeatureMap", "Relation"]

Relation = Literal["exact", "unbiased", "truncated", "near"]
"""How features relate to their kernel:

- ``"exact"``: equal;
- ``"unbiased"``: equal in the mean over draws;
- ``"truncated"``: equal in the mean, up to the degrees that are cut off;
- ``"near"``: the mean is another kernel, close to this one.
"""


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
        kernel: The kernel that the features approximate.
        relation: How ``approximate`` relates to ``gram``.
        is_positive: Whether all features are non-negative.
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
        """Return ``φ_k(x_i)``; by default equal to ``φ_q(x_i)``."""
        return self.query_features(x)

    def approximate(
        self, x: Float[Tensor, "*batch n d"], y: Float[Tensor, "*batch m d"]
    ) -> Float[Tensor, "*batch n m"]:
        """Return the matrix ``φ_q(x_i)·φ_k(y_j)``."""
        return self.query_features(x) @ self.key_features(y).transpose(-1, -2)


class RandomFeatureMap(FeatureMap):
    """A feature map with random numbers in a buffer, which is saved with the module.

    The numbers change only through :meth:`redraw_`. They are drawn on the CPU in float64, so a seed
    gives the same features on every device.
    """

    relation: Relation = "unbiased"

    def redraw_(self, generator: torch.Generator | None = None) -> None:
        """Replace the random numbers in place. Call it between training steps: outputs change."""
        raise NotImplementedError  # abstract

    def _store(
        self, name: str, draw: Tensor, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        """Store a draw in a buffer; keep the device and dtype of an existing buffer."""
        if name in self._buffers:
            self._buffers[name] = draw.to(self.get_buffer(name))
        else:
            dtype = torch.get_default_dtype() if dtype is None else dtype
            self.register_buffer(name, draw.to(device=device, dtype=dtype))


class Factory(TypedDict):
    """Where a module creates its tensors, and of which type: its last two arguments."""

    device: Device
    dtype: torch.dtype | None


def widen(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return ``x`` in the dtype in which sums are computed: float32 or better."""
    return x.to(accumulator(x))
