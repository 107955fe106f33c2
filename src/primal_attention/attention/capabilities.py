"""What an attention can do, and which attentions of the registry can do it."""

import fnmatch
from dataclasses import dataclass
from typing import Protocol

__all__ = [
    "DECLARED",
    "JOINED_TIME",
    "SQUARES_FIT",
    "Capabilities",
    "Declared",
    "capable_attentions",
]

JOINED_TIME = frozenset({"add", "concat", "concat-mlp"})
"""Values of ``time=`` that change the tokens alone, so that every attention allows them."""

SQUARES_FIT = 1e16
"""Largest numbers whose squares, summed over a wide head, fit into float32. Attentions with bounded
features need no more: their gradients do not grow with the tokens."""


@dataclass(frozen=True)
class Capabilities:
    """What a mechanism can do. Anything else raises."""

    padding: bool = True
    """Accepts ``key_mask``; padded tokens influence nothing."""
    causal: bool = True
    """Accepts ``is_causal=True``; no output depends on a later token."""
    cross: bool = True
    """Accepts a ``context`` of another length."""
    stateful: bool = True
    """Decodes with ``init_state`` and ``step``."""
    relative_position: bool = False
    """Its weights depend on the distance of two tokens."""
    aux_loss: bool = False
    """Has a regulariser of its own, collected by ``ksvd_loss``."""
    deterministic: bool = True
    """Two training forwards of the same input agree."""
    documents: bool = True
    """Accepts ``document_ids``: keeps several documents of one row apart."""
    rotary: bool = True
    """Accepts ``rotary=``: turns queries and keys by their positions."""
    mixes_without_order: bool = True
    """Without ``is_causal=True``, outputs depend on other tokens than their own."""
    time: frozenset[str] = JOINED_TIME
    """Values of ``time=`` in ``create_attention``: how the times of tokens can enter."""
    max_magnitude: float = 1e9
    """Largest number in tokens for which output, gradients and regulariser stay finite, for the
    weights of a new layer in float32, float64 or bfloat16."""
    max_magnitude_float16: float = 1e3
    """The same in float16."""


class Declared(Protocol):
    """Anything that says what an attention can do, such as an entry of the registry."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""


DECLARED: dict[str, Declared] = {}
"""The attentions by name; the registry fills it."""


def capable_attentions(pattern: str = "*", **capabilities: bool | str) -> list[str]:
    """Return the names that match a pattern and have the given capabilities, sorted.

    A layer names them in its errors. The registry imports layers, so it cannot answer this.

    Args:
        pattern: A name, in which ``*`` stands for any letters.
        capabilities: Fields of :class:`Capabilities`, and the values they must have; for ``time``
            a value that they must allow.
    """
    return sorted(
        name
        for name, entry in DECLARED.items()
        if fnmatch.fnmatch(name, pattern)
        and all(_has(entry.capabilities, *wanted) for wanted in capabilities.items())
    )


def _has(capabilities: Capabilities, name: str, value: bool | str) -> bool:
    return value in capabilities.time if name == "time" else getattr(capabilities, name) == value
