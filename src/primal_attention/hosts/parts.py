"""Weights and sizes of a softmax attention, in one form for all libraries."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from primal_attention.hosts.errors import ConversionError

__all__ = ["AttentionParts", "LinearWeights"]


class LinearWeights(NamedTuple):
    """Weight and bias of a linear map."""

    weight: Float[Tensor, "o c"]
    bias: Float[Tensor, " o"] | None

    def split(self) -> "list[LinearWeights]":
        """Return queries, keys and values of a fused map."""
        biases = (None,) * 3 if self.bias is None else self.bias.chunk(3)
        return [LinearWeights(w, b) for w, b in zip(self.weight.chunk(3), biases, strict=True)]

    def linear(self) -> nn.Linear:
        """Return a layer with copies of the weights."""
        out, width = self.weight.shape
        layer = nn.Linear(
            width, out, self.bias is not None, device=self.weight.device, dtype=self.weight.dtype
        )
        with torch.no_grad():
            layer.weight.copy_(self.weight)
            if self.bias is not None:
                layer.bias.copy_(self.bias)
        return layer


@dataclass(frozen=True)
class AttentionParts:
    """Weights and sizes of a softmax attention."""

    q: LinearWeights
    k: LinearWeights
    v: LinearWeights
    out: LinearWeights | None
    """Output map; ``None`` if another module holds it, as in BERT."""
    num_heads: int
    kv_heads: int
    scaling: float
    """Factor of the scores before the softmax."""
    is_causal: bool = False
    rotary: bool = False
    """Whether the model passes rotary positions to the layer."""
    dropout: float = 0.0
    """Dropout after the output map."""

    @property
    def dim(self) -> int:
        """Model width."""
        return self.q.weight.shape[1]

    @property
    def head_dim(self) -> int:
        """Head width."""
        return self.q.weight.shape[0] // self.num_heads

    def check(self) -> None:
        """Raise for shapes that this library does not support."""
        if self.head_dim * self.num_heads != self.dim:
            raise ConversionError(
                f"{self.num_heads} heads of width {self.head_dim} do not add up to the model "
                f"width {self.dim}"
            )
        if self.num_heads % self.kv_heads:
            raise ConversionError(
                f"{self.kv_heads} key heads do not divide {self.num_heads} query heads"
            )
        keys = (self.kv_heads * self.head_dim, self.dim)
        if self.k.weight.shape != keys or self.v.weight.shape != keys:
            raise ConversionError(
                f"keys and values have weights of shape {tuple(self.k.weight.shape)} and "
                f"{tuple(self.v.weight.shape)}, expected {keys}"
            )
        if self.out is not None and self.out.weight.shape != (self.dim, self.dim):
            raise ConversionError(
                f"the output map has shape {tuple(self.out.weight.shape)}, expected "
                f"{(self.dim, self.dim)}"
            )

    def canonical(self) -> "AttentionParts":
        """Return parts of the same function with scale ``1/√d``, which the query weights take."""
        return replace(
            self,
            q=_scaled(self.q, self.scaling * math.sqrt(self.head_dim)),
            scaling=1 / math.sqrt(self.head_dim),
        )

    def ungrouped(self) -> "AttentionParts":
        """Return parts of the same function with a head of keys for each head of queries.

        Keys and values of a group are repeated, for mechanisms that cannot share them.
        """
        return replace(
            self, k=self._repeated(self.k), v=self._repeated(self.v), kv_heads=self.num_heads
        )

    def _repeated(self, p: LinearWeights) -> LinearWeights:
        times = self.num_heads // self.kv_heads
        if times == 1:
            return p
        groups = (self.kv_heads, self.head_dim)
        weight = p.weight.unflatten(0, groups).repeat_interleave(times, 0).flatten(0, 1)
        bias = p.bias
        if bias is not None:
            bias = bias.unflatten(0, groups).repeat_interleave(times, 0).flatten()
        return LinearWeights(weight, bias)


def _scaled(p: LinearWeights, scale: float) -> LinearWeights:
    if abs(scale - 1) < 1e-6:
        return p
    return LinearWeights(p.weight * scale, None if p.bias is None else p.bias * scale)
