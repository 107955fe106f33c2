"""Parts of a softmax attention, the layer built from them, and the module that holds the layer.

:class:`AttentionParts` has one form for all libraries. A :class:`ConvertedLayer` takes the
arguments of the module it replaces and passes them to an attention of this library.
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
from primal_attention.surgery.config import CONVERSION_DEFAULTS, ConversionError, SurgeryConfig

__all__ = [
    "AttentionParts",
    "ConvertedLayer",
    "HostInputs",
    "LinearWeights",
    "build_attention",
    "conversion_record",
    "converted_layers",
]


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
        """Return parts of the same function with one key head per query head and scale ``1/√d``.

        Both changes are exact: keys and values of a group are repeated, and the scale is moved into
        the query weights.
        """
        scale = self.scaling * math.sqrt(self.head_dim)
        return AttentionParts(
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


class HostInputs(NamedTuple):
    """Arguments that the host model passes to an attention."""

    x: Float[Tensor, "b n c"]
    key_mask: Bool[Tensor, "b n"] | None = None
    is_causal: bool = False
    rotary: Rotary | None = None


class ConvertedLayer(nn.Module):
    """Base of the modules that replace an attention of another library.

    Args:
        attention: The attention of this library.
        is_causal: Whether the layer is causal by default.
        rotary: Whether the host passes rotary positions.
    """

    library: str = ""
    settings: SurgeryConfig | None = None
    """Configuration of the conversion; ``None`` for layers that ``convert`` did not make."""

    def __init__(
        self, attention: Attention, *, is_causal: bool = False, rotary: bool = False
    ) -> None:
        super().__init__()
        self.attention = attention
        self.is_causal = is_causal
        self.uses_rotary = rotary and attention.capabilities.rotary

    def attend(self, inputs: HostInputs) -> Float[Tensor, "b n c"]:
        """Return the output of the attention."""
        also: dict[str, Any] = {}
        if self.uses_rotary:
            also["rotary"] = inputs.rotary
        return self.attention(
            inputs.x, key_mask=inputs.key_mask, is_causal=inputs.is_causal, **also
        )


def converted_layers(model: nn.Module) -> dict[str, ConvertedLayer]:
    """Return the converted modules of a model by name.

    Example:
        >>> converted_layers(nn.Linear(2, 2))
        {}
    """
    return {name: m for name, m in model.named_modules() if isinstance(m, ConvertedLayer)}


def conversion_record(model: nn.Module) -> dict[str, Any] | None:
    """Return the conversion of a model as JSON values; ``None`` if it is not converted."""
    layers = {n: m for n, m in converted_layers(model).items() if m.settings is not None}
    settings = next((m.settings for m in layers.values()), None)
    if settings is None:
        return None
    rows = [
        {"name": n, "library": m.library, "dim": m.attention.dim, "heads": m.attention.num_heads}
        for n, m in layers.items()
    ]
    return {"config": {**settings.to_dict(), "layers": list(layers)}, "layers": rows}


def build_attention(
    name: str, options: Mapping[str, Any], parts: AttentionParts, device: Any = None
) -> Attention:
    """Return an attention with the given weights.

    The maps of queries, keys, values and outputs are copied if the attention has them. Layers with
    dual variables compute them from the value weights, and start with zero weights for the key-side
    scores.

    Args:
        name: Name in the registry.
        options: Options of its constructor.
        parts: Weights and sizes of the layer to replace.
        device: Where to build the layer; by default where the weights are. On ``"meta"`` no weight
            is copied.
    """
    weight = parts.q.weight
    attention = create_attention(
        name,
        parts.dim,
        parts.num_heads,
        bias=parts.out is None or parts.out.bias is not None,
        device=weight.device if device is None else device,
        dtype=weight.dtype,
        **{"dropout": parts.dropout, **CONVERSION_DEFAULTS.get(name, {}), **options},
    )
    meta = torch.device(weight.device if device is None else device).type == "meta"
    for part, projection in (("q_proj", parts.q), ("k_proj", parts.k), ("v_proj", parts.v)):
        if hasattr(attention, part):
            setattr(attention, part, _placed(projection, meta))
    attention.out_proj = nn.Identity() if parts.out is None else _placed(parts.out, meta)
    if not meta and hasattr(attention, "dual_r"):
        _tie_duals(attention, parts)
    return attention


def _placed(projection: LinearWeights, meta: bool) -> nn.Linear:
    if meta:
        tensors = (None if t is None else t.to("meta") for t in projection)
        return LinearWeights(*tensors).linear()  # type: ignore[arg-type]
    return projection.linear()


@torch.no_grad()
def _tie_duals(attention: Any, parts: AttentionParts) -> None:
    """Set the dual variables of the query side from the value weights.

    With ``h_j = Uᵀ v_j`` and ``C = (U, 0)`` the layer averages values with cosine weights. ``U``
    holds the leading directions of the value weights of all heads; at full rank it is the identity.
    """
    h, d, s = parts.num_heads, parts.head_dim, attention.rank
    values = parts.v.weight.unflatten(0, (h, d))
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
