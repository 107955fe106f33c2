"""The readable truth of the kernel-attention family, straight from its formulas.

Like :mod:`~primal_attention.functional.naive`: matrices of size ``n × m`` are formed, loops run
over positions, and only tests import it. Letters as there, and ``p`` features.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

__all__ = ["exponential_attention"]


def _keep(
    weights: Float[Tensor, "b h n m"], key_mask: Bool[Tensor, "b m"] | None, is_causal: bool
) -> Bool[Tensor, "b h n m"]:
    keep = torch.ones_like(weights, dtype=torch.bool)
    if key_mask is not None:
        keep = keep & key_mask[:, None, None, :]
    return keep.tril() if is_causal else keep


def exponential_attention(
    log_q: Float[Tensor, "b h n p"],
    log_k: Float[Tensor, "b h m p"],
    v: Float[Tensor, "b h m v"],
    key_mask: Bool[Tensor, "b m"] | None = None,
    is_causal: bool = False,
) -> Float[Tensor, "b h n v"]:
    """Return attention with weights ``Σ_p exp(log_q_ip + log_k_jp)``; zero without keys."""
    logs = torch.logsumexp(log_q[:, :, :, None, :] + log_k[:, :, None, :, :], dim=-1)
    keep = _keep(logs, key_mask, is_causal)
    weights = torch.where(keep, logs, -torch.inf).softmax(-1)
    return torch.where(keep, weights, 0.0) @ v
