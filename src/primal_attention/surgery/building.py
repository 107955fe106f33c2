"""Attention of this library with the weights of the attention it replaces."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.types import Device

from primal_attention.attention import (
    Attention,
    MultiHeadAttention,
    PrimalAttention,
    create_attention,
)
from primal_attention.functional.precision import accumulator
from primal_attention.hosts import AttentionParts, LinearWeights
from primal_attention.surgery.config import conversion_defaults

__all__ = ["build_attention"]


def build_attention(
    name: str, options: Mapping[str, Any], parts: AttentionParts, device: Device = None
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
    given = {**conversion_defaults(name), **options}
    attention = create_attention(
        name,
        parts.dim,
        parts.num_heads,
        bias=parts.out is None or parts.out.bias is not None,
        device=weight.device if device is None else device,
        dtype=weight.dtype,
        **{"dropout": parts.dropout, **given},
    )
    if isinstance(attention, MultiHeadAttention) and attention.core.takes_groups:
        attention.kv_heads = parts.kv_heads
    else:
        parts = parts.ungrouped()
    meta = torch.device(weight.device if device is None else device).type == "meta"
    for part, projection in (("q_proj", parts.q), ("k_proj", parts.k), ("v_proj", parts.v)):
        if hasattr(attention, part):
            setattr(attention, part, _placed(projection, meta))
    attention.out_proj = nn.Identity() if parts.out is None else _placed(parts.out, meta)
    if not meta and isinstance(attention, PrimalAttention) and hasattr(attention, "dual_r"):
        _tie_duals(attention, parts)
    return attention


def _placed(projection: LinearWeights, meta: bool) -> nn.Linear:
    if meta:
        tensors = (None if t is None else t.to("meta") for t in projection)
        return LinearWeights(*tensors).linear()  # type: ignore[arg-type]
    return projection.linear()


@torch.no_grad()
def _tie_duals(attention: PrimalAttention, parts: AttentionParts) -> None:
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
