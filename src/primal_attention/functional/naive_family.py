"""Readable reference versions of the kernel attentions, written as their formulas.

They form ``n × m`` matrices and loop over positions. Only tests import them. The letters are those
of :mod:`~primal_attention.functional.naive`, and ``p`` features.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

__all__ = [
    "causal_flow_attention",
    "cosformer_weights",
    "exponential_attention",
    "feature_attention",
    "flow_attention",
    "key_bias_attention",
    "normalized_attention",
    "schoenbat_rows",
]


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


def feature_attention(
    phi_q: Float[Tensor, "b h n p"],
    phi_k: Float[Tensor, "b h m p"],
    v: Float[Tensor, "b h m v"],
    key_mask: Bool[Tensor, "b m"] | None = None,
    is_causal: bool = False,
) -> Float[Tensor, "b h n v"]:
    """Return attention with weights ``φ(q_i)·φ(k_j)`` divided by their row sum."""
    return normalized_attention(phi_q @ phi_k.transpose(-1, -2), v, key_mask, is_causal)


def key_bias_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h m d"],
    bias: Float[Tensor, "b h m"],
    v: Float[Tensor, "b h m v"],
    key_mask: Bool[Tensor, "b m"] | None = None,
    is_causal: bool = False,
) -> Float[Tensor, "b h n v"]:
    """Return attention with weights ``exp(q_i·k_j / √d + b_j)`` divided by their row sum."""
    weights = torch.zeros(*q.shape[:3], k.shape[2], dtype=q.dtype, device=q.device)
    for j in range(k.shape[2]):
        logit = (q * k[:, :, j, None]).sum(-1) / q.shape[-1] ** 0.5 + bias[:, :, j, None]
        weights[..., j] = logit.exp()
    return normalized_attention(weights, v, key_mask, is_causal)


def normalized_attention(
    weights: Float[Tensor, "b h n m"],
    v: Float[Tensor, "b h m v"],
    key_mask: Bool[Tensor, "b m"] | None = None,
    is_causal: bool = False,
) -> Float[Tensor, "b h n v"]:
    """Return ``diag(A 1)⁻¹ A v`` for a matrix of weights ``A``."""
    weights = torch.where(_keep(weights, key_mask, is_causal), weights, 0.0)
    total = weights.sum(-1, keepdim=True)
    return weights @ v / torch.where(total == 0, 1.0, total)


def cosformer_weights(
    q: Float[Tensor, "b h n d"], k: Float[Tensor, "b h m d"], horizon: int, power: int
) -> Float[Tensor, "b h n m"]:
    """Return ``ReLU(q_i)·ReLU(k_j) c_ij``; for power two ``ε + (1 − ε) c²`` replaces ``c``.

    ``c_ij = cos(π (i − j) / 2M)`` and ``ε = 1/1024``.
    """
    i = torch.arange(q.shape[2], dtype=q.dtype)[:, None]
    j = torch.arange(k.shape[2], dtype=q.dtype)[None, :]
    cosine = torch.cos(torch.pi * (i - j) / (2 * horizon))
    fade = cosine if power == 1 else 1 / 1024 + (1 - 1 / 1024) * cosine.square()
    return q.relu() @ k.relu().transpose(-1, -2) * fade


def schoenbat_rows(x: Float[Tensor, "*batch d"], tau: float) -> Float[Tensor, "*batch d"]:
    """Return rows after the three published steps: centre, standardise, scale to length ``√τ``."""
    x = x - x.mean(-1, keepdim=True)
    x = x / (x.var(-1, keepdim=True, correction=0) + 1e-12).sqrt()
    return tau**0.5 * x / x.norm(dim=-1, keepdim=True)


def flow_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h m d"],
    v: Float[Tensor, "b h m v"],
    eps: float = 1e-6,
) -> Float[Tensor, "b h n v"]:
    """Return flow attention over all keys, with the dense matrix of flows ``Q_i·K_j``."""
    query, key = q.sigmoid(), k.sigmoid()
    n, m = q.shape[2], k.shape[2]
    incoming = ((query + eps) * (key.sum(2, keepdim=True) + eps)).sum(-1)  # [b h n]
    outgoing = ((key + eps) * (query.sum(2, keepdim=True) + eps)).sum(-1)  # [b h m]
    from_sources = (key / outgoing[..., None]).sum(2, keepdim=True)
    to_sinks = (query / incoming[..., None]).sum(2, keepdim=True)
    sink = ((query + eps) * (from_sources + eps)).sum(-1)
    source = ((key + eps) * (to_sinks + eps)).sum(-1).clamp(-1, 1)
    flows = query @ key.transpose(-1, -2) / incoming[..., None]
    weights = flows * (m * source.softmax(-1))[:, :, None, :]
    return (sink * n / m).sigmoid()[..., None] * (weights @ v)


def causal_flow_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    v: Float[Tensor, "b h n v"],
    eps: float = 1e-6,
) -> Float[Tensor, "b h n v"]:
    """Return flow attention over the tokens so far, computed token by token."""
    query, key = q.sigmoid(), k.sigmoid()
    rows: list[Tensor] = []
    sources: list[Tensor] = []
    sinks: list[Tensor] = []
    shares: list[Tensor] = []
    moved: list[Tensor] = []
    for t in range(q.shape[2]):
        now_q, now_k, seen = query[:, :, t], key[:, :, t], t + 1
        keys, queries = key[:, :, :seen].sum(2), query[:, :, :seen].sum(2)
        incoming = ((now_q + eps) * (keys + eps)).sum(-1, keepdim=True) / seen
        outgoing = ((now_k + eps) * (queries + eps)).sum(-1, keepdim=True) / seen
        sources.append(now_k / outgoing)
        sinks.append(now_q / incoming)
        sink = ((now_q + eps) * (torch.stack(sources).sum(0) + eps)).sum(-1, keepdim=True) / seen
        source = ((now_k + eps) * (torch.stack(sinks).sum(0) + eps)).sum(-1, keepdim=True) / seen
        shares.append(source.clamp(-1, 1).exp())
        moved.append(seen * shares[-1] / torch.stack(shares).sum(0) * v[:, :, t])
        flows = torch.einsum("bhd,bhud->bhu", now_q / (incoming * seen), key[:, :, :seen])
        collected = torch.einsum("bhu,bhuv->bhv", flows, torch.stack(moved, dim=2))
        rows.append(sink.sigmoid() * collected)
    return torch.stack(rows, dim=2)
