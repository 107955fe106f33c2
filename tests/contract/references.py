"""What each core computes, straight from its formula: one unpadded sequence, dense, no shortcuts.

A mechanism without a function here fails ``test_core_is_its_formula``: write it down first.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad, softplus

from primal_attention.functional import (
    naive_adaptive,
    naive_family,
    naive_nystrom,
    naive_transport,
    naive_windowed,
)

Reference = Callable[[Any, Tensor, Tensor, Tensor, bool], Tensor]


def _softmax(core: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return naive_family.normalized_attention(scores.exp(), v, None, is_causal)


def _sparse(core: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    f, g = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    kernel = (f @ g.mT).sum(1)
    scores = (q @ k.mT / q.shape[-1] ** 0.5).exp()
    rows = []
    for i in range(q.shape[2]):
        seen = i + 1 if is_causal else k.shape[2]
        ranked = kernel[:, i, :seen].sort(-1, descending=True).values
        factor = torch.ones_like(kernel[:, i])
        if seen > core.num_keys:
            least = ranked[:, core.num_keys, None]
            above, most = (kernel[:, i] - least).clamp_min(0), ranked[:, :1] - least
            # ties share their weight; key t + 1 has none
            factor = torch.where(above > 0, (above + 1e-3) / (most + 1e-3), 0.0)
        rows.append(scores[:, :, i] * factor[:, None])
    return naive_family.normalized_attention(torch.stack(rows, 2), v, None, is_causal)


def _distributional(core: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    bias = torch.einsum("bhmd,hd->bhm", k, core.direction)
    return naive_family.key_bias_attention(q, k, bias, v, None, is_causal)


def _linear(core: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    q, k = (torch.where(x > 0, x + 1, x.exp()) for x in (q, k))
    return naive_family.feature_attention(q, k, v, None, is_causal)


def _favor(core: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    q, k = (x * x.shape[-1] ** -0.25 for x in (q, k))
    w = core.features.directions
    q, k = (x @ w.mT - x.square().sum(-1, keepdim=True) / 2 for x in (q, k))
    return naive_family.exponential_attention(q, k, v, None, is_causal)


def _cosformer(core: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    weights = naive_family.cosformer_weights(q, k, core.horizon, core.power)
    return naive_family.normalized_attention(weights, v, None, is_causal)


def _flow(core: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    flow = naive_family.causal_flow_attention if is_causal else naive_family.flow_attention
    return flow(q, k, v)


def _schoenbat(core: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    tau = core.temperature.sqrt()[:, None, None]
    q, k = (core.features.query_features(tau * naive_family.schoenbat_rows(x, 1)) for x in (q, k))
    y = naive_family.feature_attention(q, k, v, None, is_causal)
    if core.post == "power":
        # the power is smooth at zero
        y = y * (y.square() + 1e-12) ** ((softplus(core.beta) - 1) / 2)
    return core.gamma * y


def _kernelized(core: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    if core.temperature is not None:
        heat = softplus(core.temperature).clamp_max(3).sqrt()[:, None, None]
        q, k = heat * q, heat * k
    position, reach = core.position, core.position.reach
    at_q, at_k = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    lag = at_k - at_q
    if position.kind == "window":
        c = position.table[:, lag.clamp(-reach, reach) + reach].exp()
    elif position.kind == "grid":
        w = position.width
        rows, columns = at_k // w - at_q // w, at_k % w - at_q % w
        rows, columns = (t.clamp(-reach, reach) + reach for t in (rows, columns))
        c = position.table[:, rows, columns].exp()
    else:
        c = position.weight(lag)
    weights = c * (core.features.query_features(q) @ core.features.query_features(k).mT)
    return naive_family.normalized_attention(weights, v, None, is_causal)


def _points(core: Any, x: Tensor) -> Tensor:
    if core.scale is not None:
        size = x.square().mean(-1, keepdim=True).sqrt()
        x = core.scale.exp()[:, None, None] * x / size
    return x * x.shape[-1] ** -0.25


def _gaussian(core: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    q, k = (_points(core, x) for x in (q, k))
    return naive_nystrom.gaussian_attention(q, k, v, None, is_causal, core.normalize)


def _spaced(x: Tensor, num: int) -> Tensor:
    return x[:, :, [i * (x.shape[2] - 1) // (num - 1) for i in range(num)]]


def _means(x: Tensor, num: int) -> Tensor:
    each = [[naive_nystrom.segment_means(h, num) for h in sequence] for sequence in x]
    return torch.stack([torch.stack(heads) for heads in each])


def _skyformer(core: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    q, k = (_points(core, x) for x in (q, k))
    if is_causal:
        return naive_nystrom.windowed_nystrom(
            q, k, v, core.z, core.window, core.ridge, None, core.normalize
        )
    s = core.num_landmarks
    if core.landmarks in ("strided", "segments"):
        pick = _spaced if core.landmarks == "strided" else _means
        z = torch.cat([pick(q, s // 2), pick(k, s - s // 2)], dim=2)
    else:
        z = core.choose_landmarks(q, k)
    gram = naive_nystrom.gaussian_gram(z, z) + core.ridge * torch.eye(s, dtype=z.dtype)
    if core.inverse == "cholesky":
        # landmarks that repeat give equal eigenvalues, whose vectors have no gradient
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))
    else:
        steps = {"schulz": (8, False), "published": (6, True)}[core.inverse]
        each = [naive_nystrom.schulz_inverse(m, *steps) for m in gram.flatten(0, 1)]
        inverse = torch.stack(each).view_as(gram)
    left, right = naive_nystrom.gaussian_gram(q, z), naive_nystrom.gaussian_gram(z, k)
    weights = left @ inverse @ right
    if core.normalize:
        total = weights.sum(-1, keepdim=True)
        weights = weights * total / (total.square() + core.ridge**2)
    return weights @ v


def _nystromformer(core: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    q_l, k_l = (_means(x, core.num_landmarks) for x in (q, k))
    y = naive_nystrom.nystromformer_attention(q, k, v, q_l, k_l)
    if core.conv is None:
        return y
    half = core.conv.shape[1] // 2
    rows = [
        conv1d(pad(v[:, h].mT, (half, half)).flatten(0, 1)[:, None], own[None, None])
        for h, own in enumerate(core.conv)
    ]
    return y + torch.stack([r.view(v.shape[0], v.shape[3], -1).mT for r in rows], dim=1)


def _linformer(core: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    m, s = k.shape[2], core.num_projections
    at = (torch.arange(m, dtype=k.dtype) + 0.5) / m
    waves = [(2**0.5 if i else 1) * torch.cos(torch.pi * i * at) * (i < m) for i in range(s)]
    e_k, e_v = ((e @ torch.stack(waves) / m)[None] for e in (core.e_k, core.e_v))
    return naive_nystrom.linformer_attention(q, k, v, e_k, e_v)


def _transport(core: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    mass, steps = core.log_mass.softmax(-1), core.num_steps
    each = [
        [
            naive_transport.anchored_weights(q[i, h], k[i, h], core.z[h], mass[h], steps)
            for h in range(len(mass))
        ]
        for i in range(len(q))
    ]
    return torch.stack([torch.stack(heads) for heads in each]) @ v


def _adaptive(core: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    plan = core.plan._asdict()
    return naive_adaptive.adaptive_attention(q, k, v, is_causal=is_causal, **plan).y


def _windowed(core: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    far = core.features
    if far is None:
        logs = q[..., :0], k[..., :0]
    elif core.far == "favor":
        logs = tuple(
            x @ far.directions.mT / x.shape[-1] ** 0.25
            - x.square().sum(-1, keepdim=True) / (2 * x.shape[-1] ** 0.5)
            - math.log(far.num_features) / 2
            for x in (q, k)
        )
    else:
        a = torch.einsum("bhnd,hpd->bhnp", q, far.centers) / q.shape[-1] ** 0.5
        b = torch.einsum("bhnd,hpd->bhnp", k, far.shares) + far.share_levels[:, None]
        shares = b.exp() / b.exp().sum(-1, keepdim=True)
        logs = a + far.center_levels[:, None], shares.log()
    return naive_windowed.windowed_attention(
        q, k, v, *logs, window=core.window, sinks=core.sinks, is_causal=is_causal
    )


REFERENCES: dict[str, Reference] = {
    "adaptive": _adaptive,
    "cosformer": _cosformer,
    "distributional": _distributional,
    "favor": _favor,
    "flow": _flow,
    "gaussian": _gaussian,
    "kernelized": _kernelized,
    "kernelized-log": _kernelized,
    "linear": _linear,
    "linformer": _linformer,
    "nystromformer": _nystromformer,
    "primal-sparse": _sparse,
    "schoenbat": _schoenbat,
    "skyformer": _skyformer,
    "skyformer-learned": _skyformer,
    "softmax": _softmax,
    "softmax-explicit": _softmax,
    "transport": _transport,
    "window-linear": _windowed,
}
