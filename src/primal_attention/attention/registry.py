"""Every attention by name."""

import difflib
import fnmatch
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from primal_attention.attention.base import Attention, Capabilities

__all__ = ["Entry", "attention_entry", "create_attention", "list_attentions", "register_attention"]


@dataclass(frozen=True)
class Entry:
    """One row of the registry."""

    name: str
    factory: Callable[..., Attention]
    capabilities: Capabilities
    cost: str
    """Time of one forward in the number of tokens, without the projections."""
    summary: str


_ENTRIES: dict[str, Entry] = {}


def register_attention(
    name: str,
    factory: Callable[..., Attention],
    *,
    capabilities: Capabilities,
    cost: str,
    summary: str,
) -> None:
    """Add a mechanism under a new name.

    Args:
        name: What users type.
        factory: Takes ``(dim, num_heads, **options)`` and returns the layer.
        capabilities: What the layer can do.
        cost: Time in the number of tokens, for tables.
        summary: One line, for tables.
    """
    if name in _ENTRIES:
        raise ValueError(f"An attention named {name!r} is already registered; choose another name.")
    _ENTRIES[name] = Entry(name, factory, capabilities, cost, summary)


def list_attentions(pattern: str = "*", **capabilities: bool) -> list[str]:
    """Return the names that match a pattern and have the given capabilities.

    Example:
        >>> list_attentions(aux_loss=True, cross=True)
        ['primal', 'primal-dual']
    """
    return sorted(
        name
        for name, entry in _ENTRIES.items()
        if fnmatch.fnmatch(name, pattern)
        and all(getattr(entry.capabilities, k) == v for k, v in capabilities.items())
    )


def attention_entry(name: str) -> Entry:
    """Return the registry row of ``name``."""
    if name not in _ENTRIES:
        close = difflib.get_close_matches(name, _ENTRIES, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"There is no attention named {name!r}.{hint} "
            f"Known names: {', '.join(sorted(_ENTRIES))}."
        )
    return _ENTRIES[name]


def create_attention(name: str, dim: int, num_heads: int = 8, **options: Any) -> Attention:
    """Build an attention by name; ``options`` are those of its constructor.

    Example:
        >>> create_attention("linear", 64, 4).num_heads
        4
    """
    return attention_entry(name).factory(dim, num_heads, **options)
