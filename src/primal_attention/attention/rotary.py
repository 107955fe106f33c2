"""Rotary positions (Su et al. 2021, arXiv 2104.09864): turn queries and keys by their position.

Pairs of features turn by angles that grow with the position, so the inner product of a query and a
key depends on their distance only. A layer that takes ``rotary=`` turns the heads of queries and
keys after projecting them and before its feature map.
"""

from typing import NamedTuple, Protocol, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["Rotary", "Turn"]


class Turn(Protocol):
    """What positions or times do to the heads of queries and keys, after the projections."""

    def queries(self, x: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h n p"]:
        """Return changed heads of queries."""

    def keys(self, x: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h n p"]:
        """Return changed heads of keys."""

    def both(self, x: Float[Tensor, "b both n d"]) -> Float[Tensor, "b both n p"]:
        """Return changed heads of queries and, after them, of keys."""

    def take(self, slots: Int[Tensor, "b k"]) -> Self:
        """Return the changes of the tokens in the given slots of each sequence."""


class Rotary(NamedTuple):
    """Cosines and sines of the angles of every token, both halves of a head written out.

    Example:
        >>> angle = torch.linspace(0, 1, 5)[None, :, None] * torch.tensor([1.0, 0.1])
        >>> rotary = Rotary(angle.cos().repeat(1, 1, 2), angle.sin().repeat(1, 1, 2))
        >>> rotary.turn(torch.randn(2, 3, 5, 4)).shape
        torch.Size([2, 3, 5, 4])
    """

    cos: Float[Tensor, "#b n p"]
    sin: Float[Tensor, "#b n p"]

    def turn(self, x: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h n d"]:
        """Return heads whose first ``p`` features are turned; the others pass."""
        cos, sin = self.cos[:, None].to(x.dtype), self.sin[:, None].to(x.dtype)
        turned, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
        first, second = turned.chunk(2, dim=-1)
        turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
        return torch.cat([turned, rest], dim=-1)

    def queries(self, x: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h n d"]:
        """Return turned heads; queries, keys and both turn alike."""
        return self.turn(x)

    def keys(self, x: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h n d"]:
        """Return turned heads."""
        return self.turn(x)

    def both(self, x: Float[Tensor, "b both n d"]) -> Float[Tensor, "b both n d"]:
        """Return turned heads."""
        return self.turn(x)

    def take(self, slots: Int[Tensor, "b k"]) -> Self:
        """Return the angles of the tokens in the given slots of each sequence."""
        at = slots[:, :, None].expand(-1, -1, self.cos.shape[-1])
        cos, sin = (t.expand(len(slots), -1, -1).gather(1, at) for t in self)
        return type(self)(cos, sin)
