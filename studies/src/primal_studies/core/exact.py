"""The error of an attention against the exact kernel that it approximates.

That kernel is computed exactly on the same queries, keys and values: softmax for FAVOR+,
Nyströmformer and Linformer, the Gaussian kernel for Skyformer, the series ``f(q·k)`` for SchoenbAt,
the weighted exponential for kernelized attention. All other attentions are exact.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from primal_attention.attention import Core, MultiHeadAttention, create_attention
from primal_attention.attention.favor import FavorCore
from primal_attention.attention.features import slots
from primal_attention.attention.gaussian import GaussianCore
from primal_attention.attention.kernelized import KernelizedCore
from primal_attention.attention.linformer import LinformerCore
from primal_attention.attention.nystromformer import NystromformerCore
from primal_attention.attention.schoenbat import SchoenbatCore, center_l2
from primal_attention.attention.skyformer import SkyformerCore
from primal_attention.attention.windowed import WindowedCore
from primal_attention.functional.gaussian import gaussian_attention
from primal_attention.functional.nystromformer import token_convolution

__all__ = ["exact_rows", "output_error", "stands_for", "tokens"]

SAMPLED = 256
"""Queries whose exact outputs are computed."""


def tokens(n: int, dim: int, seed: int = 0) -> Float[Tensor, "1 n c"]:
    """Return one sequence whose neighbours are alike and whose contents recur.

    A chain over 64 normal centres that moves on at every eighth token, plus noise of a third; the
    entries have variance one.
    """
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(64, dim, generator=generator)
    moves = torch.rand(n, generator=generator) < 1 / 8
    visited = torch.randint(64, (n + 1,), generator=generator)
    noise = torch.randn(n, dim, generator=generator)
    return ((centres[visited[moves.cumsum(0)]] + noise / 3) / (10 / 9) ** 0.5)[None]


def stands_for(name: str) -> str | None:
    """Return the kernel that a mechanism approximates, or ``None`` if it is its own definition.

    Example:
        >>> stands_for("favor"), stands_for("linear")
        ('softmax', None)
    """
    layer = create_attention(name, 16, 2, device="meta")
    core = layer.core if isinstance(layer, MultiHeadAttention) else None
    return next((kernel for kind, kernel, _ in _EXACT if isinstance(core, kind)), None)


def exact_rows(
    core: Core,
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h m d"],
    v: Float[Tensor, "b h m v"],
    rows: Int[Tensor, " r"],
) -> Float[Tensor, "b h r v"] | None:
    """Return outputs at some queries with the exact kernel; ``None`` if ``core`` is exact."""
    for kind, _, compute in _EXACT:
        if isinstance(core, kind):
            return compute(core, q, k, v, rows)
    return None


def _softmax(core: Any, q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    return scaled_dot_product_attention(q[:, :, rows], k, v)


def _gaussian(core: GaussianCore, q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    points = core.points(q[:, :, rows]), core.points(k)
    return gaussian_attention(*points, v, normalize=core.normalize)


def _series(core: SchoenbatCore, q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    root = core.temperature.sqrt()[:, None, None]
    weights = core.features.gram(center_l2(q[:, :, rows]) * root, center_l2(k) * root)
    return core.scale_output(weights @ v / weights.sum(-1, keepdim=True))


def _lagged(core: KernelizedCore, q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    q, k = core.normalize(q[:, :, rows]), core.normalize(k)
    at = core.position.places(slots(k)[0])
    weights = (q @ k.mT).exp() * core.position.weight(at - at[rows][:, None])
    return weights @ v / weights.sum(-1, keepdim=True)


_EXACT: tuple[tuple[type[Core], str, Callable[..., Tensor]], ...] = (
    (FavorCore, "softmax", _softmax),
    (NystromformerCore, "softmax", _softmax),
    (LinformerCore, "softmax", _softmax),
    (WindowedCore, "softmax", _softmax),
    (SkyformerCore, "Gaussian kernel", _gaussian),
    (SchoenbatCore, "series f(q·k)", _series),
    (KernelizedCore, "c(j−i) exp(q̂·k̂)", _lagged),
)


@torch.no_grad()
def output_error(
    layer: nn.Module, x: Float[Tensor, "1 n c"], sharpness: float = 1.0
) -> tuple[float, float]:
    """Return the relative error of the heads' outputs, and that of a plain average in their place.

    Args:
        layer: Any attention; the error of one that is exact is zero.
        x: Tokens.
        sharpness: Factor on the scores: queries and keys are multiplied by its root.

    Example:
        >>> output_error(create_attention("linear", 16, 2), torch.randn(1, 9, 16))
        (0.0, 0.0)
    """
    if not isinstance(layer, MultiHeadAttention):
        return 0.0, 0.0
    q, k, v = (layer._split(p(x)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    q, k = q * sharpness**0.5, k * sharpness**0.5
    rows = torch.linspace(0, x.shape[1] - 1, min(SAMPLED, x.shape[1])).round().long()
    exact = exact_rows(layer.core, q, k, v, rows)
    if exact is None:
        return 0.0, 0.0
    got = layer.core(q, k, v)[:, :, rows]
    if isinstance(layer.core, NystromformerCore) and layer.core.conv is not None:
        # the convolution that Nyströmformer adds is no part of the kernel
        got = got - token_convolution(v, layer.core.conv)[:, :, rows]
    average = v.mean(2, keepdim=True)
    size = exact.norm()
    return float((got - exact).norm() / size), float((average - exact).norm() / size)
