"""Keep freed memory in the process, so that a benchmark reuses it as a long run does."""

import ctypes
import gc
import os

__all__ = ["keep_memory", "return_memory"]

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # names of mallopt(3)


def keep_memory() -> bool:
    """Let tensors reuse memory that others freed, in huge pages; call it before importing torch.

    By default the C library returns large blocks to the system, and every new tensor needs new
    pages. At 65,536 tokens this takes half of a training step. On accelerators torch keeps the
    memory itself. This function helps any training on the CPU.

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
    """Return unused memory to the system, which :func:`keep_memory` otherwise prevents.

    Returns:
        Whether this system's C library can do it.
    """
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):  # another C library
        return False
    return True
