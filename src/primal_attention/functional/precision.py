"""In which precision sums, norms and losses are computed, and whether a tracer looks on."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

__all__ = ["accumulator", "autocast_dtype", "full_precision", "is_traced", "representable"]


def accumulator(x: Tensor) -> torch.dtype:
    """Return the dtype for sums over ``x``: float64 stays, everything narrower becomes float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def representable(eps: float, x: Tensor) -> float:
    """Return ``eps``, raised so far that ``1 / eps²`` is finite in the dtype of ``x``.

    That is what backward needs; it concerns float16 alone.
    """
    return max(eps, torch.finfo(x.dtype).max ** -0.5)


def full_precision(x: Tensor) -> AbstractContextManager[object]:
    """Return a context in which autocast leaves matrix products on the device of ``x`` alone."""
    if torch.amp.is_autocast_available(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return nullcontext()


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the type that autocast asks of matrix products with ``x``; ``None`` if it is off."""
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return None


def is_traced() -> bool:
    """Return whether a compiler or a function transform must see every operation."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
