"""The registry: attentions by name, with their capabilities and costs."""

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from primal_attention.attention.base import Attention, Capabilities
from primal_attention.support.command import did_you_mean

if TYPE_CHECKING:
    from primal_attention.attention.time import Fusion, TimeOptions

__all__ = ["Entry", "attention_entry", "create_attention", "list_attentions", "register_attention"]


@dataclass(frozen=True)
class Entry:
    """One attention of the registry."""

    name: str
    factory: Callable[..., Attention]
    """Takes ``(dim, num_heads, **options)`` and returns a layer."""
    capabilities: Capabilities
    cost: str
    """Order of the time of a forward pass in the number ``n`` of tokens, without projections."""
    summary: str
    """One line for tables."""


_ENTRIES: dict[str, Entry] = {}


def register_attention(
    name: str,
    factory: Callable[..., Attention],
    *,
    capabilities: Capabilities,
    cost: str,
    summary: str,
) -> None:
    """Add an attention to the registry.

    Args:
        name: A new name, by which users create the layer.
        factory: Takes ``(dim, num_heads, **options)`` and returns a layer.
        capabilities: What the layer supports.
        cost: Order of the time of a forward pass, such as ``"n"`` or ``"n²"``.
        summary: One line for tables.

    Raises:
        ValueError: If the name is taken.
    """
    if name in _ENTRIES:
        raise ValueError(f"The name {name!r} is already registered; choose another name.")
    _ENTRIES[name] = Entry(name, factory, capabilities, cost, summary)


def list_attentions(pattern: str = "*", **capabilities: bool | str) -> list[str]:
    """Return the names that match a pattern and have the given capabilities, sorted.

    Args:
        pattern: A name, in which ``*`` stands for any letters.
        capabilities: Fields of ``Capabilities``, and the values they must have; for ``time`` a
            value that they must allow.

    Example:
        >>> list_attentions(aux_loss=True, cross=True)
        ['primal', 'primal-dual']
        >>> list_attentions(time="stationary-bias")
        ['softmax', 'softmax-explicit']
    """
    return sorted(
        name
        for name, entry in _ENTRIES.items()
        if fnmatch.fnmatch(name, pattern)
        and all(_has(entry.capabilities, *wanted) for wanted in capabilities.items())
    )


def _has(capabilities: Capabilities, name: str, value: bool | str) -> bool:
    return value in capabilities.time if name == "time" else getattr(capabilities, name) == value


def attention_entry(name: str) -> Entry:
    """Return the entry of an attention; an unknown name is an error that lists all names."""
    if name not in _ENTRIES:
        raise ValueError(
            f"There is no attention named {name!r}.{did_you_mean(name, _ENTRIES)} "
            f"Known names: {', '.join(sorted(_ENTRIES))}."
        )
    return _ENTRIES[name]


def create_attention(
    name: str,
    dim: int,
    num_heads: int = 8,
    *,
    time: "Fusion | TimeOptions | None" = None,
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
    from primal_attention.attention.time import add_time

    return add_time(entry, dim, num_heads, time, options)
