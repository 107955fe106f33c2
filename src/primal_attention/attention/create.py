"""New layers by name."""

from typing import Any

from primal_attention.attention.base import Attention
from primal_attention.attention.registry import attention_entry
from primal_attention.attention.time import Fusion, TimeOptions, add_time

__all__ = ["create_attention"]


def create_attention(
    name: str,
    dim: int,
    num_heads: int = 8,
    *,
    time: Fusion | TimeOptions | None = None,
    **options: Any,
) -> Attention:
    """Return a new layer of the attention with this name.

    Args:
        name: Name in the registry.
        dim: Model width.
        num_heads: Heads; must divide ``dim``.
        time: How the times of tokens enter: ``"concat"``, ``"concat-mlp"``, ``"add"``,
            ``"stationary-bias"``, ``"rotary"``, ``"product"``, or more in a
            :class:`~primal_attention.attention.TimeOptions`. The layer then takes ``times``.
            ``Capabilities.time`` lists what an attention allows.
        options: Further arguments of its constructor.

    Example:
        >>> create_attention("linear", 64, 4).num_heads
        4
        >>> layer = create_attention("primal-dual", 64, 4, time="rotary")
        >>> when = torch.rand(2, 9, dtype=torch.float64).cumsum(1)
        >>> layer(torch.randn(2, 9, 64), times=when, is_causal=True).shape
        torch.Size([2, 9, 64])
    """
    entry = attention_entry(name)
    if time is None:
        return entry.factory(dim, num_heads, **options)
    return add_time(entry, dim, num_heads, time, options)
