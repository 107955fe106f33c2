"""Rows of the attention of one layer, for a few tokens only.

    softmax:   P[i, :] = softmax(q_i Kᵀ / √d)            mean over heads
    primal:    P[i, :] = e_i Λ Rᵀ                        from scores, O(m n s) for m rows
    roll-out:  P = Π_l ½ (A^l + I)                       through all blocks
    cosine:    P[i, :] = cos(v_i, v_j)                   where there is no attention

The rows say which visual tokens belong together.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from primal_attention.attention import Attention, MultiHeadAttention, PrimalAttention
from primal_attention.attention.kernel_problem import pose_on_tokens

__all__ = ["attention_rows", "cosine_rows", "has_rows", "kernel_rows", "rollout_rows", "take_rows"]


def has_rows(layer: Attention) -> bool:
    """Return whether the attention of a layer can be read by rows.

    Example:
        >>> from primal_attention.attention import create_attention
        >>> has_rows(create_attention("primal-dual", 8, 2))
        True
    """
    return isinstance(layer, MultiHeadAttention | PrimalAttention)


def take_rows(x: Float[Tensor, "*b n c"], rows: Int[Tensor, "b m"]) -> Float[Tensor, "*b m c"]:
    """Return rows of every sequence; ``x`` may have heads after the batch."""
    while rows.ndim < x.ndim - 1:
        rows = rows[:, None]
    return torch.take_along_dim(x, rows[..., None], dim=-2)


@torch.no_grad()
def attention_rows(
    layer: Attention, x: Float[Tensor, "b n c"], rows: Int[Tensor, "b m"] | None = None
) -> Float[Tensor, "b m n"]:
    """Return rows of the self-attention of a layer, mean over heads, without gradient.

    A primal layer has a kernel with signs instead of weights; its rows are those of ``E Λ Rᵀ``.

    Args:
        layer: A layer for which :func:`has_rows` holds.
        x: Its input, without padding.
        rows: Which tokens; by default all.

    Example:
        >>> from primal_attention.attention import create_attention
        >>> found = attention_rows(create_attention("softmax", 8, 2), torch.randn(1, 5, 8))
        >>> found.sum(-1).round(decimals=5)
        tensor([[1., 1., 1., 1., 1.]])
    """
    if isinstance(layer, PrimalAttention):
        found = kernel_rows(layer, x, rows)
    elif isinstance(layer, MultiHeadAttention):
        found = _core_rows(layer, x, rows)
    else:
        raise ValueError(f"{type(layer).__name__} has no rows of attention; use cosine_rows.")
    return found.mean(1)


def _core_rows(
    layer: MultiHeadAttention, x: Tensor, rows: Tensor | None
) -> Float[Tensor, "b h m n"]:
    q, k = layer._split(layer.q_proj(x)), layer._split(layer.k_proj(x))
    core: Any = layer.core
    is_coupled = core.ordered or core.takes_query_mask
    if rows is None or is_coupled:
        # a row may depend on the other queries, so all of them are needed
        found: Tensor = core.weights(q, k)
        return found if rows is None else take_rows(found, rows)
    return core.weights(take_rows(q, rows), k)


@torch.no_grad()
def kernel_rows(
    layer: PrimalAttention,
    x: Float[Tensor, "b n c"],
    rows: Int[Tensor, "b m"] | None = None,
    *,
    key_mask: Bool[Tensor, "b n"] | None = None,
) -> Float[Tensor, "b h m n"]:
    """Return rows of the kernel ``E Λ Rᵀ`` of a primal layer, without gradient.

    Args:
        layer: A primal layer.
        x: Its input.
        rows: Which tokens; by default all.
        key_mask: ``True`` where a token is real; rows and columns of others are zero.

    Example:
        >>> kernel_rows(PrimalAttention(8, 2, weights="dual"), torch.randn(1, 5, 8)).shape
        torch.Size([1, 2, 5, 5])
    """
    if key_mask is not None:
        x = torch.where(key_mask[:, :, None], x, 0.0)
    problem = pose_on_tokens(layer, x, None, key_mask, is_causal=False)
    w_e, w_r = problem.weights.chunk(2, dim=1)
    q = problem.queries.inputs
    q = q if rows is None else take_rows(q, rows)
    e, r = (
        normalize(t, dim=-1, eps=problem.eps) @ w.to(t.dtype)
        for t, w in ((q, w_e), (problem.keys.inputs, w_r))
    )
    lam = problem.ell.square().to(e.dtype)  # [h s]
    found = (e * lam[:, None]) @ r.mT
    if key_mask is not None:
        real = key_mask if rows is None else key_mask.gather(1, rows)
        found = torch.where(real[:, None, :, None] & key_mask[:, None, None], found, 0.0)
    return found


@torch.no_grad()
def rollout_rows(
    layers: Sequence[Attention],
    inputs: Sequence[Float[Tensor, "b n c"]],
    rows: Int[Tensor, "b m"],
) -> Float[Tensor, "b m n"]:
    """Return rows of the product of all layers, residuals included, without gradient.

    Args:
        layers: Layers with weights, first to last; a kernel with signs has no roll-out.
        inputs: The input of each.
        rows: Which tokens.

    Example:
        >>> from primal_attention.attention import create_attention
        >>> layers, x = [create_attention("softmax", 8, 2) for _ in range(2)], torch.randn(1, 5, 8)
        >>> rollout_rows(layers, [x, x], torch.tensor([[3]])).sum(-1).round(decimals=5)
        tensor([[1.]])
    """
    n = inputs[-1].shape[1]
    found = torch.nn.functional.one_hot(rows, n).to(inputs[-1].dtype)
    found = (found + attention_rows(layers[-1], inputs[-1], rows)) / 2
    for layer, x in zip(reversed(layers[:-1]), reversed(inputs[:-1]), strict=True):
        found = (found + found @ attention_rows(layer, x)) / 2
    return found


@torch.no_grad()
def cosine_rows(
    v: Float[Tensor, "b n c"], rows: Int[Tensor, "b m"] | None = None
) -> Float[Tensor, "b m n"]:
    """Return rows of the cosine similarity of tokens, without gradient.

    Example:
        >>> cosine_rows(torch.eye(2)[None])
        tensor([[[1., 0.],
                 [0., 1.]]])
    """
    v = normalize(v, dim=-1)
    return (v if rows is None else take_rows(v, rows)) @ v.mT
