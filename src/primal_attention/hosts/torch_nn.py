"""``nn.MultiheadAttention``, alone or inside the Transformer layers of torch.

Masks of torch are true where a token is *ignored*; only this module inverts them.
"""

import copy
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from primal_attention.attention import Attention
from primal_attention.hosts.converted import ConvertedLayer
from primal_attention.hosts.errors import ConversionError
from primal_attention.hosts.inputs import LayerInputs
from primal_attention.hosts.library import HostLibrary
from primal_attention.hosts.masks import is_tracing
from primal_attention.hosts.parts import AttentionParts, LinearWeights

__all__ = ["ConvertedMultihead", "TorchMultihead"]


class ConvertedMultihead(ConvertedLayer):
    """Takes the arguments of ``nn.MultiheadAttention``, returns ``(output, None)``.

    Args:
        attention: The attention of this library.
        batch_first: Whether tensors are ``[b n c]`` instead of ``[n b c]``.
    """

    library = "torch"
    # with these values a Transformer layer of torch does not take its fused path in evaluation,
    # which would not call the attention
    in_proj_weight = None
    in_proj_bias = None
    _qkv_same_embed_dim = False

    def __init__(self, attention: Attention, *, batch_first: bool) -> None:
        super().__init__(attention)
        self.batch_first = batch_first
        self.embed_dim, self.num_heads = attention.dim, attention.num_heads
        self.head_dim = attention.head_dim

    @property
    def out_proj(self) -> nn.Module:
        """The output map."""
        return self.attention.out_proj  # type: ignore[return-value]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Return the layer's output, and ``None`` in place of attention weights."""
        if need_weights:
            raise ValueError(
                "A converted layer computes no attention weights; call it with need_weights=False."
            )
        if value is not key:
            raise ValueError(
                "A converted layer projects keys and values from one sequence; pass the same "
                "tensor as key and value."
            )
        context = None if key is query else key
        single, turned = query.dim() == 2, not self.batch_first and query.dim() == 3
        if single:
            query, context = query[None], None if context is None else context[None]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif turned:
            query = query.transpose(0, 1)
            context = None if context is None else context.transpose(0, 1)
        causal = self._order(attn_mask, is_causal)
        y = self.attention(query, context, key_mask=_keep(key_padding_mask), is_causal=causal)
        if single:
            return y[0], None
        return (y.transpose(0, 1) if turned else y), None

    def _order(self, mask: Tensor | None, is_causal: bool) -> bool:
        """Return whether a mask over pairs is causal; raise if it is neither causal nor empty."""
        if mask is None:
            if is_causal:
                raise ValueError("is_causal=True needs attn_mask, as in nn.MultiheadAttention.")
            return False
        if is_tracing():
            # the values of a mask are unknown here, so the caller's word must do
            if not is_causal:
                raise ConversionError(
                    "attn_mask cannot be read while torch compiles or exports; pass is_causal=True "
                    "if it is causal, or no attn_mask."
                )
            return True
        ignore = mask if mask.dtype == torch.bool else mask != 0
        if mask.dtype != torch.bool and bool((mask[ignore] > -1e4).any()):
            raise ConversionError(_PAIRS.format("adds a bias to scores"))
        # torch passes a causal mask with or without is_causal=True, so the values decide
        later = torch.ones_like(ignore).triu(1)
        if bool((ignore == later).all()):
            return True
        if not bool(ignore.any()):
            return False
        raise ConversionError(_PAIRS.format("hides pairs of tokens"))


_PAIRS = (
    "attn_mask {} and is not causal order; attention without a score matrix does not support it. "
    "Pass key_padding_mask for padding, or do not convert this layer."
)


def _keep(mask: Tensor | None) -> Tensor | None:
    """Return which keys are real, from a mask of torch: boolean, or added to scores."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        return ~mask
    if not is_tracing() and bool(((mask != 0) & (mask > -1e4)).any()):
        raise ConversionError(
            "key_padding_mask adds a finite bias to scores, which attention without a score "
            "matrix does not support; pass a boolean mask with True for padding."
        )
    return mask == 0


class TorchMultihead(HostLibrary):
    """Reads and replaces ``nn.MultiheadAttention``."""

    name = "torch"

    def matches(self, module: nn.Module) -> bool:
        """Return whether a module is ``nn.MultiheadAttention`` itself, not a subclass."""
        return type(module) is nn.MultiheadAttention

    def read(self, module: Any) -> AttentionParts:
        """Return weights and sizes of the module."""
        if not module._qkv_same_embed_dim:
            raise ConversionError("keys or values have another width than queries (kdim, vdim)")
        if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
            raise ConversionError("it adds a key and a value (bias_k, bias_v, add_zero_attn)")
        q, k, v = LinearWeights(module.in_proj_weight, module.in_proj_bias).split()
        out = LinearWeights(module.out_proj.weight, module.out_proj.bias)
        h = module.num_heads
        return AttentionParts(q, k, v, out, h, h, 1 / math.sqrt(module.head_dim))

    def wrap(self, module: Any, attention: Attention, parts: AttentionParts) -> ConvertedLayer:
        """Return the module that replaces ``module``."""
        return ConvertedMultihead(attention, batch_first=module.batch_first)

    def run_original(self, module: Any, inputs: LayerInputs) -> Tensor:
        """Return the output of the original module."""
        module = copy.deepcopy(module).eval()
        x = inputs.x if module.batch_first else inputs.x.transpose(0, 1)
        ignore = None if inputs.key_mask is None else ~inputs.key_mask
        y = module(x, x, x, key_padding_mask=ignore, need_weights=False)[0]
        return y if module.batch_first else y.transpose(0, 1)

    def adapt_model(
        self,
        model: nn.Module,
        modules: Mapping[str, nn.Module],
        every: Mapping[str, nn.Module],
        record: Mapping[str, object] | None,
    ) -> list[Callable[[], None]]:
        """Switch off nested tensors in the encoders around replaced layers."""
        undo: list[Callable[[], None]] = []
        for name, module in model.named_modules():
            around = f"{name}." if name else ""
            if isinstance(module, nn.TransformerEncoder) and any(
                inner.startswith(around) for inner in modules
            ):
                # a nested tensor has no padding and no key mask; our layers take dense tensors
                before = module.use_nested_tensor
                undo.append(partial(setattr, module, "use_nested_tensor", before))
                module.use_nested_tensor = False
        return undo
