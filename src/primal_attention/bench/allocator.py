"""Memory as a long run sees it: fetched from the system once, then reused."""

import ctypes
import gc
import os

__all__ = ["keep_memory", "return_memory"]

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # names of mallopt(3)


def keep_memory() -> bool:
    """Let tensors reuse memory that others freed, in huge pages; call it before importing torch.

    The C library returns large blocks to the system at once, and the next tensor pays for fresh
    pages: at 65,536 tokens half of a training step. Accelerators never do this, since torch keeps
    their memory itself. Helps any training on the CPU.

    Returns:
        Whether this system's C library can do it.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # read by torch
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return False
    return bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1))


def return_memory() -> bool:
    """Return to the system what nothing uses; without it :func:`keep_memory` keeps it for good.

    Returns:
        Whether this system's C library can do it.
    """
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):  # another C library
        return False
    return True
