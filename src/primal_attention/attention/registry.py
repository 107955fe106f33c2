"""The registry: attentions by name, with their capabilities and costs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from primal_attention.attention.base import Attention
from primal_attention.attention.capabilities import DECLARED, Capabilities, capable_attentions
from primal_attention.support.command import did_you_mean

__all__ = ["Entry", "attention_entry", "list_attentions", "register_attention"]


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


_ENTRIES = cast(dict[str, Entry], DECLARED)


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
    return capable_attentions(pattern, **capabilities)


def attention_entry(name: str) -> Entry:
    """Return the entry of an attention; an unknown name is an error that lists all names."""
    if name not in _ENTRIES:
        raise ValueError(
            f"There is no attention named {name!r}.{did_you_mean(name, _ENTRIES)} "
            f"Known names: {', '.join(sorted(_ENTRIES))}."
        )
    return _ENTRIES[name]
