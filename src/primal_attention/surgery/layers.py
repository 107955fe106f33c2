"""What the dialects share: reading an attention, building its successor, standing in for it.

A *reading* is everything a softmax attention is made of, in one form whatever library it comes
from. A *converted* module has the face of the attention it replaced and one of ours inside.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from primal_attention.attention import (
    Attention,
    Rotary,
    create_attention,
)
from primal_attention.functional.precision import accumulator
from primal_attention.surgery.config import STANDING_IN, ConversionError, SurgeryConfig

__all__ = [
    "Converted",
    "Inputs",
    "Projection",
    "Reading",
    "build_attention",
    "conversion_record",
    "converted_layers",
]


class Projection(NamedTuple):
    """An affine map of tokens."""

    weight: Float[Tensor, "o c"]
    bias: Float[Tensor, " o"] | None

    def linear(self) -> nn.Linear:
        """Return the map as a layer with weights of its own."""
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
class Reading:
    """What a softmax attention is made of."""

    q: Projection
    k: Projection
    v: Projection
    out: Projection | None
    """``None`` if the output map belongs to another module, as in BERT."""
    num_heads: int
    kv_heads: int
    scaling: float
    """What scores are multiplied by before the softmax."""
    is_causal: bool = False
    rotary: bool = False
    """Whether the model hands rotary positions to the layer."""
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
        """Raise for shapes that no attention of the library has."""
        if self.head_dim * self.num_heads != self.dim:
            raise ConversionError(
                f"{self.num_heads} heads of width {self.head_dim} do not make the model width "
                f"{self.dim}"
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

    def plain(self) -> "Reading":
        """Return the same function with one key head per query head and scores over ``√d``.

        Both changes are exact: keys and values of a group are repeated, the scale moves into the
        query weights.
        """
        scale = self.scaling * math.sqrt(self.head_dim)
        return Reading(
            _scaled(self.q, scale),
            self._repeated(self.k),
            self._repeated(self.v),
            self.out,
            self.num_heads,
            self.num_heads,
            1 / math.sqrt(self.head_dim),
            self.is_causal,
            self.rotary,
            self.dropout,
        )

    def _repeated(self, p: Projection) -> Projection:
        times = self.num_heads // self.kv_heads
        if times == 1:
            return p
        groups = (self.kv_heads, self.head_dim)
        weight = p.weight.unflatten(0, groups).repeat_interleave(times, 0).flatten(0, 1)
        bias = p.bias
        if bias is not None:
            bias = bias.unflatten(0, groups).repeat_interleave(times, 0).flatten()
        return Projection(weight, bias)


def _scaled(p: Projection, scale: float) -> Projection:
    if abs(scale - 1) < 1e-6:
        return p
    return Projection(p.weight * scale, None if p.bias is None else p.bias * scale)


class Inputs(NamedTuple):
    """What the host model passed to an attention, in our terms."""

    x: Float[Tensor, "b n c"]
    key_mask: Bool[Tensor, "b n"] | None = None
    is_causal: bool = False
    rotary: Rotary | None = None


class Converted(nn.Module):
    """Base of the modules that stand in a host model: its face outside, ours inside.

    Args:
        attention: The layer that does the work.
        is_causal: Whether the layer is causal unless the call says otherwise.
        rotary: Whether the host passes rotary positions.
    """

    dialect: str = ""
    settings: SurgeryConfig | None = None
    """What ``convert`` was asked for; ``None`` for layers that were built, not converted."""

    def __init__(
        self, attention: Attention, *, is_causal: bool = False, rotary: bool = False
    ) -> None:
        super().__init__()
        self.attention = attention
        self.is_causal = is_causal
        self.uses_rotary = rotary and attention.capabilities.rotary

    def attend(self, inputs: Inputs) -> Float[Tensor, "b n c"]:
        """Return the attention's output on what the host passed."""
        also: dict[str, Any] = {}
        if self.uses_rotary:
            also["rotary"] = inputs.rotary
        return self.attention(
            inputs.x, key_mask=inputs.key_mask, is_causal=inputs.is_causal, **also
        )


def converted_layers(model: nn.Module) -> dict[str, Converted]:
    """Return the converted modules of a model by name.

    Example:
        >>> converted_layers(nn.Linear(2, 2))
        {}
    """
    return {name: m for name, m in model.named_modules() if isinstance(m, Converted)}


def conversion_record(model: nn.Module) -> dict[str, Any] | None:
    """Return what JSON needs to know to convert a model in the same way; ``None`` if it was not."""
    layers = {n: m for n, m in converted_layers(model).items() if m.settings is not None}
    settings = next((m.settings for m in layers.values()), None)
    if settings is None:
        return None
    rows = [
        {"name": n, "dialect": m.dialect, "dim": m.attention.dim, "heads": m.attention.num_heads}
        for n, m in layers.items()
    ]
    return {"config": {**settings.to_dict(), "layers": list(layers)}, "layers": rows}


def build_attention(
    name: str, options: Mapping[str, Any], reading: Reading, device: Any = None
) -> Attention:
    """Return the attention ``name`` with every weight of the reading that it has a place for.

    Queries, keys, values and the output map are copied. Layers with dual variables read them from
    the value weights, and start with key-side scores switched off.

    Args:
        name: Name in the registry.
        options: Options of its constructor, before those it has in the place of softmax.
        reading: What the layer replaces.
        device: Build here instead of where the weights are, without copying them.
    """
    weight = reading.q.weight
    attention = create_attention(
        name,
        reading.dim,
        reading.num_heads,
        bias=reading.out is None or reading.out.bias is not None,
        device=weight.device if device is None else device,
        dtype=weight.dtype,
        **{"dropout": reading.dropout, **STANDING_IN.get(name, {}), **options},
    )
    meta = torch.device(weight.device if device is None else device).type == "meta"
    for part, projection in (("q_proj", reading.q), ("k_proj", reading.k), ("v_proj", reading.v)):
        if hasattr(attention, part):
            setattr(attention, part, _placed(projection, meta))
    attention.out_proj = nn.Identity() if reading.out is None else _placed(reading.out, meta)
    if not meta and hasattr(attention, "dual_r"):
        _tie_duals(attention, reading)
    return attention


def _placed(projection: Projection, meta: bool) -> nn.Linear:
    if meta:
        tensors = (None if t is None else t.to("meta") for t in projection)
        return Projection(*tensors).linear()  # type: ignore[arg-type]
    return projection.linear()


@torch.no_grad()
def _tie_duals(attention: Any, reading: Reading) -> None:
    """Read the dual variables of the query side from the value weights.

    With ``h_j = Uᵀ v_j`` and ``C = (U, 0)`` the layer averages values with cosine weights; ``U``
    holds the directions in which the values of all heads vary most, or is the identity at full
    rank.
    """
    h, d, s = reading.num_heads, reading.head_dim, attention.rank
    values = reading.v.weight.unflatten(0, (h, d))
    wide = values.to(accumulator(values))
    if s < d:
        _, vectors = torch.linalg.eigh(torch.einsum("hdc,hec->de", wide, wide))
        basis = vectors[:, -s:].flip(1)
    else:
        basis = torch.eye(d, s, dtype=wide.dtype, device=wide.device)
    attention.dual_r.weight.copy_(torch.einsum("ds,hdc->hsc", basis, wide).flatten(0, 1))
    attention.concat.weight.zero_()
    attention.concat.weight[:, :s].copy_(basis)
    if attention.concat.bias is not None:
        attention.concat.bias.zero_()
