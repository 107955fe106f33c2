"""Attention of the joint layers, read beside a forward that is not changed by it."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from primal_attention.attention import Attention, MultiHeadAttention, PrimalAttention
from primal_attention.hosts import LayerInputs
from primal_attention.models.stack import BlockStack
from primal_attention.tasks.pairs.rows import has_rows, kernel_rows

__all__ = ["joint_attentions"]


def joint_attentions(
    blocks: BlockStack, run: Callable[[], object]
) -> tuple[Any, tuple[Float[Tensor, "b h n n"], ...]]:
    """Return what a forward returns, and the attention of its layers.

    Rows and columns of padding are zero. Weights of softmax and the like are rows that sum to one;
    a primal layer gives its kernel ``E Λ Rᵀ``, which has signs.

    Args:
        blocks: The layers.
        run: Runs them.
    """
    layers: list[Attention] = [block.attention for block in blocks]  # type: ignore[misc]
    if wrong := [layer for layer in layers if not has_rows(layer)]:
        raise ValueError(
            f"{type(wrong[0]).__name__} has no matrix of attention; leave output_attentions out."
        )
    seen: list[LayerInputs] = []

    def keep(_: object, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        seen.append(LayerInputs.of_call(args, kwargs))

    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_pre_hook(keep, with_kwargs=True).remove)
        result = run()
    found = (_matrices(*pair) for pair in zip(layers, seen, strict=True))
    return result, tuple(found)


@torch.no_grad()
def _matrices(layer: Attention, inputs: LayerInputs) -> Float[Tensor, "b h n n"]:
    x, keep = inputs.x, inputs.key_mask
    if isinstance(layer, PrimalAttention):
        return kernel_rows(layer, x, key_mask=keep)
    if not isinstance(layer, MultiHeadAttention):
        raise TypeError(f"{type(layer).__name__} has no matrix of attention.")
    b, n, _ = x.shape
    whole = x.new_zeros(b, layer.num_heads, n, n)
    real: Bool[Tensor, "b n"] = x.new_ones(b, n, dtype=torch.bool) if keep is None else keep
    for i, matrix in enumerate(inputs.matrices(layer)):
        tokens = real[i].nonzero()[:, 0]
        whole[i][:, tokens[:, None], tokens] = matrix.to(x.dtype)
    return whole
