"""Headers of ``.safetensors`` files, read before the weights: a header may promise anything."""

import os
from pathlib import Path

from primal_attention.support.command import UserError
from primal_attention.support.files.text import open_bytes
from primal_attention.support.files.values import parse_json

__all__ = ["check_large_weights"]

_LARGE = 1_000_000_000
"""Bytes from which a header is read first: less is read whole sooner than looked at twice."""
_MAX_HEADER = 100_000_000
"""The limit of the format itself."""


def check_large_weights(path: Path) -> None:
    """Raise if a large file does not hold what its header promises, or exceeds the memory.

    A sparse file of any size costs its author nothing, and its reader all memory.

    Raises:
        UserError: If the file cannot be read, is damaged, or too large.
    """
    with open_bytes(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size < _LARGE:
            return
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if length <= _MAX_HEADER else b""
    if length < 2 or len(header) < length:
        raise UserError(_damaged(path, f"its header has {length:,} bytes", size))
    entries = parse_json(header, f"the header of {path}")
    offsets = [e.get("data_offsets") for e in entries.values() if isinstance(e, dict)]
    ends = [o[1] for o in offsets if isinstance(o, list) and len(o) == 2 and isinstance(o[1], int)]
    promised = 8 + length + max(ends, default=0)
    if promised != size:
        raise UserError(_damaged(path, f"its header promises {promised:,} bytes", size))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > memory:
        raise UserError(
            f"{path} has {size:,} bytes, and this machine has {memory:,} bytes of memory; read it "
            "on a larger machine."
        )


def _damaged(path: Path, why: str, size: int) -> str:
    return (
        f"{path} is damaged, or no safetensors file ({why}); it has {size:,} bytes. Write or copy "
        "it again."
    )
