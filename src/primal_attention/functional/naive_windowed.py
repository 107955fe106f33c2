"""Exact softmax near, features far, with every pair of tokens, straight from the formula.

    y_i = (Σ_{j ∈ N_i} e^{q_i·k_j/√d} v_j + Σ_{j ∉ N_i} Σ_p e^{a_ip + b_jp} v_j) / Z_i

``N_i`` holds the first ``sinks`` keys and those fewer than ``window`` places away; ``Z_i`` is
the sum of all weights.
"""

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["windowed_attention", "windowed_weights"]


def windowed_weights(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    log_q: Float[Tensor, "b h n p"],
    log_k: Float[Tensor, "b h n p"],
    *,
    window: int,
    sinks: int,
    is_causal: bool = False,
) -> Float[Tensor, "b h n n"]:
    """Return the weight of every key for every query, before they are divided by their sum.

    Args:
        q: Queries.
        k: Keys.
        log_q: Logarithms of the query features; without features far keys count nothing.
        log_k: Logarithms of the key features.
        window: Places, the own one included, within which weights are exact.
        sinks: First keys, whose weights are always exact.
        is_causal: Keys ``j ≤ i`` only.
    """
    near = (q @ k.mT / q.shape[-1] ** 0.5).exp()
    far = (log_q[:, :, :, None] + log_k[:, :, None]).exp().sum(-1)
    place = torch.arange(q.shape[2])
    is_near = (place[:, None] - place).abs() < window
    weights = torch.where(is_near | (place < sinks), near, far)
    return weights.tril() if is_causal else weights


def windowed_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    v: Float[Tensor, "b h n v"],
    log_q: Float[Tensor, "b h n p"],
    log_k: Float[Tensor, "b h n p"],
    *,
    window: int,
    sinks: int,
    is_causal: bool = False,
) -> Float[Tensor, "b h n v"]:
    """Return the means of the values by :func:`windowed_weights`; arguments as there."""
    weights = windowed_weights(q, k, log_q, log_k, window=window, sinks=sinks, is_causal=is_causal)
    return weights @ v / weights.sum(-1, keepdim=True)
