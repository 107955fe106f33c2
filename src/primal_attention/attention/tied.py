"""Softmax attention with tied values, which is an optimal transport map.

    T(x) = Σ_h W_qhᵀ Σ_j softmax_j(⟨q_h, k_hj⟩/√d) k_hj        q_h = W_qh x + b_h

The values are the keys, and the output map is the transpose of the query map. So ``T`` is the
gradient of the convex function ``x ↦ Σ_h √d log Σ_j exp(⟨W_qh x + b_h, k_hj⟩/√d)``. Such a map
moves any cloud of points to its image at the least cost: its Monge gap is zero, with or without an
identity residual, for any weights. A free value or output map loses this.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.types import Device

from primal_attention.attention.base import Attention, Aux, Capabilities
from primal_attention.attention.registry import register_attention
from primal_attention.attention.rotary import Turn
from primal_attention.attention.softmax import SoftmaxAttention, SoftmaxCore
from primal_attention.functional.precision import accumulator

__all__ = ["TiedSoftmaxAttention", "create_softmax"]


class TiedSoftmaxAttention(Attention):
    """Softmax attention with zero Monge gap: values and output map are tied to queries and keys.

    *Several heads.* The output is the sum over heads of ``W_qhᵀ y_h``. A sum of gradients of convex
    functions is one, too. So the gap is zero for any number of heads, and the tie holds for each
    head separately.

    *Where it holds.* All tokens must attend to the same context: the tokens of one sequence, or
    queries on one memory. Tokens of different sequences, and tokens in causal order, have different
    contexts; together they need not form one optimal map.

    The layer has no value and output projections, so pretrained weights have no place in it. By
    name it is ``create_attention("softmax", dim, num_heads, value="tied")``.

    Args:
        dim: Model width.
        num_heads: Number of heads; must divide ``dim``.
        bias: Whether queries, keys and output have a bias; it changes no gap.
        dropout: Probability of dropping an element of the output in training.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Example:
        >>> from primal_attention.functional.transport import monge_gap
        >>> attn, x = TiedSoftmaxAttention(16, 4), torch.randn(1, 50, 16)
        >>> float(monge_gap(x[0], attn(x)[0]).detach())
        0.0
    """

    capabilities = Capabilities(stateful=False, rotary=False)

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        bias: bool = True,
        dropout: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, num_heads, dropout=dropout)
        self.q_proj = nn.Linear(dim, dim, bias, device, dtype)
        self.k_proj = nn.Linear(dim, dim, bias, device, dtype)
        self.core = SoftmaxCore()
        shift = torch.zeros(dim, device=device, dtype=dtype) if bias else None
        self.out_bias = nn.Parameter(shift) if shift is not None else None

    def _forward(
        self,
        x: Tensor,
        context: Tensor | None,
        key_mask: Tensor | None,
        rotary: Turn | None,
        *,
        is_causal: bool,
        return_aux: bool,
    ) -> tuple[Tensor, Aux | None]:
        q, k = self._heads(x, context, key_mask)
        y = self._merge(self.core(q, k, k, key_mask=key_mask, is_causal=is_causal))
        y = y @ self.q_proj.weight
        y = self.dropout(y if self.out_bias is None else y + self.out_bias)
        if key_mask is not None and context is None:
            y = torch.where(key_mask[:, :, None], y, 0.0)
        return y, None

    def potential(
        self,
        x: Float[Tensor, "b n c"],
        context: Float[Tensor, "b m c"],
        *,
        key_mask: Bool[Tensor, "b m"] | None = None,
    ) -> Float[Tensor, "b n"]:
        """Return the convex function of ``x``, for a fixed context, whose gradient is the output.

        Forms the ``n × m`` scores.
        """
        self._check(x, context, key_mask)
        q, k = self._heads(x, context, key_mask)
        wide, root = accumulator(q), self.head_dim**0.5
        scores = q.to(wide) @ k.to(wide).mT / root
        if key_mask is not None:
            scores = scores.masked_fill(~key_mask[:, None, None, :], -torch.inf)
        total = root * scores.logsumexp(-1).sum(1)
        return total if self.out_bias is None else total + (x @ self.out_bias).to(wide)

    def _heads(
        self, x: Tensor, context: Tensor | None, key_mask: Tensor | None
    ) -> tuple[Float[Tensor, "b h n d"], Float[Tensor, "b h m d"]]:
        memory = x if context is None else context
        if key_mask is not None:
            # where instead of multiply: NaN times zero is NaN
            memory = torch.where(key_mask[:, :, None], memory, 0.0)
        queries = memory if context is None else x
        return self._split(self.q_proj(queries)), self._split(self.k_proj(memory))


def create_softmax(
    dim: int,
    num_heads: int = 8,
    *,
    value: Literal["free", "tied"] = "free",
    bias: bool = True,
    dropout: float = 0.0,
    device: Device = None,
    dtype: torch.dtype | None = None,
) -> Attention:
    """Return the layer of the name ``softmax``.

    Args:
        dim: Model width.
        num_heads: Number of heads; must divide ``dim``.
        value: ``"free"``: projections of values and output; ``"tied"``: both follow from queries
            and keys, and the layer is an optimal transport map (:class:`TiedSoftmaxAttention`).
        bias: Whether the projections have a bias.
        dropout: Probability of dropping an element of the output in training.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Example:
        >>> type(create_softmax(16, 4, value="tied")).__name__
        'TiedSoftmaxAttention'
    """
    layers = {"free": SoftmaxAttention, "tied": TiedSoftmaxAttention}
    if value not in layers:
        raise ValueError(f"value must be 'free' or 'tied', got {value!r}.")
    return layers[value](dim, num_heads, bias=bias, dropout=dropout, device=device, dtype=dtype)


register_attention(
    "softmax",
    create_softmax,
    capabilities=SoftmaxCore.capabilities,
    cost="n²",
    summary="exact softmax through scaled_dot_product_attention",
)
