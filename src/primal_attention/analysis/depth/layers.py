"""Attention layers as polynomials over a prime field: no softmax, no norm, no activation.

::

    standard        y_i = Σ_h W_O Σ_j ⟨W_Q x_i, W_K x_j⟩ W_V x_j         cubic
    linear          the same sum, keys and values first                    cubic
    primal          e_i = W_eᵀ X (W_Q x_i),  r_i = W_rᵀ X (W_K x_i)      bilinear
                    y_i = W_O [e_i; r_i]      with one code per position in W_e and W_r
    primal-static   e_i = W_eᵀ W_Q x_i,  r_i = W_rᵀ W_K x_i              no other token
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from primal_attention.analysis.depth.field import Integers, PrimeField
from primal_attention.support.command import did_you_mean

__all__ = [
    "ATTENTIONS",
    "Layer",
    "LayerFactory",
    "LayerShape",
    "find_layer",
    "poly_primal_attention",
    "poly_self_attention",
    "poly_static_attention",
]

Layer = Callable[[Integers], Integers]
"""A layer with its weights: maps tokens ``[b n d]`` to tokens ``[b n d]``."""


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a polynomial layer."""

    width: int
    """Model width ``d``."""
    heads: int = 1
    """Heads; must divide the width."""
    tokens: int = 4
    """Number of tokens."""
    rank: int | None = None
    """Directions ``s`` of a primal head; by default the head width."""

    def __post_init__(self) -> None:
        for name in ("width", "heads", "tokens", "rank"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if self.width % self.heads:
            raise ValueError(
                f"heads must divide width, got {self.heads} heads and width {self.width}."
            )

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.width // self.heads


LayerFactory = Callable[[PrimeField, LayerShape], Layer]
"""Draws the weights of a layer and returns the layer."""


def poly_self_attention(
    field: PrimeField, shape: LayerShape, *, residual: bool = False, keys_first: bool = False
) -> Layer:
    """Return self-attention without softmax, with random weights.

    Args:
        field: Field of the weights; draws them.
        shape: Sizes of the layer.
        residual: Add the input to the output.
        keys_first: Sum the products of keys and values before the queries, as linear attention
            does. The result is the same.

    Example:
        >>> field = PrimeField(seed=0)
        >>> layer = poly_self_attention(field, LayerShape(width=2))
        >>> layer(field.random(1, 4, 2)).shape
        (1, 4, 2)
    """
    d, h, a = shape.width, shape.heads, shape.head_width
    w_q, w_k, w_v = (field.random(h, d, a) for _ in range(3))
    w_o = field.random(h, a, d)

    def layer(x: Integers) -> Integers:
        total = x if residual else np.zeros_like(x)
        for i in range(h):
            q, k, v = (field.matmul(x, w[i]) for w in (w_q, w_k, w_v))
            if keys_first:
                y = field.matmul(q, field.matmul(k.swapaxes(1, 2), v))
            else:
                y = field.matmul(field.matmul(q, k.swapaxes(1, 2)), v)
            total = total + field.matmul(y, w_o[i])
        return field.reduce(total)

    return layer


def poly_primal_attention(field: PrimeField, shape: LayerShape) -> Layer:
    """Return data-dependent primal attention without the norm of its features.

    Its weights are tied to positions: ``W_e`` and ``W_r`` have a row for each token.

    Args:
        field: Field of the weights; draws them.
        shape: Sizes of the layer.
    """
    d, h, a = shape.width, shape.heads, shape.head_width
    s = a if shape.rank is None else shape.rank
    maps = field.random(h, 2, d, a)
    codes = field.random(h, 2, s, shape.tokens)
    w_f = field.random(h, d, a)
    w_o = field.random(h, 2, s, d)

    def layer(x: Integers) -> Integers:
        total = np.zeros_like(x)
        for i in range(h):
            features = field.matmul(x, w_f[i])
            for side in range(2):
                weights = field.matmul(codes[i, side], features)  # [b s a]
                scores = field.matmul(field.matmul(x, maps[i, side]), weights.swapaxes(1, 2))
                total = total + field.matmul(scores, w_o[i, side])
        return field.reduce(total)

    return layer


def poly_static_attention(field: PrimeField, shape: LayerShape) -> Layer:
    """Return data-independent primal attention, which maps every token by itself.

    Args:
        field: Field of the weights; draws them.
        shape: Sizes of the layer.
    """
    d, h, a = shape.width, shape.heads, shape.head_width
    s = a if shape.rank is None else shape.rank
    maps, weights = field.random(h, 2, d, a), field.random(h, 2, a, s)
    w_o = field.random(h, 2, s, d)

    def layer(x: Integers) -> Integers:
        total = np.zeros_like(x)
        for i in range(h):
            for side in range(2):
                scores = field.matmul(field.matmul(x, maps[i, side]), weights[i, side])
                total = total + field.matmul(scores, w_o[i, side])
        return field.reduce(total)

    return layer


ATTENTIONS: dict[str, LayerFactory] = {
    "standard": poly_self_attention,
    "softmax-free": poly_self_attention,
    "softmax": poly_self_attention,
    "residual": partial(poly_self_attention, residual=True),
    "linear": partial(poly_self_attention, keys_first=True),
    "primal": poly_primal_attention,
    "primal-static": poly_static_attention,
}
"""Polynomial layers by name. ``softmax`` stands for its softmax-free form, as in the theory."""


def find_layer(attention: str | LayerFactory) -> LayerFactory:
    """Return the factory of a polynomial layer, by name or as given."""
    if callable(attention):
        return attention
    if attention not in ATTENTIONS:
        raise ValueError(
            f"there is no polynomial form of the attention {attention!r}."
            f"{did_you_mean(attention, ATTENTIONS)} Known: {', '.join(ATTENTIONS)}; or give a "
            "function (field, shape) that returns a layer."
        )
    return ATTENTIONS[attention]
