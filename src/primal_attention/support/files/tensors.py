"""Tensors in ``.safetensors`` files."""

from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from primal_attention.support.command import UserError
from primal_attention.support.files.headers import check_large_weights
from primal_attention.support.files.text import read_bytes

__all__ = ["parse_tensors", "read_tensors", "to_bytes"]

_MAX_BYTES = 200_000_000_000
"""Largest file of weights: no weights are larger than the memory that must hold them."""


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name.

    Raises:
        UserError: If the file cannot be read or is damaged.
    """
    check_large_weights(path)
    return parse_tensors(read_bytes(path, _MAX_BYTES), path)


def parse_tensors(data: bytes, where: Path | str) -> dict[str, Tensor]:
    """Return the tensors of the content of a ``.safetensors`` file.

    Args:
        data: The content.
        where: Name of the file, for messages.

    Raises:
        UserError: If the content is damaged.

    Example:
        >>> import torch
        >>> parse_tensors(to_bytes({"a": torch.ones(2)}), "model.safetensors")
        {'a': tensor([1., 1.])}
    """
    try:
        return safetensors.torch.load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        words = " ".join(str(error).split())[:200]
        raise UserError(
            f"{where} is damaged, or no safetensors file ({words}); it has {len(data):,} bytes. "
            "Write or copy it again."
        ) from error


def to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """Return tensors as the content of a ``.safetensors`` file; shared memory is written twice."""
    plain = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    return safetensors.torch.save(plain)
