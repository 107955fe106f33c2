"""Vectors of a gallery, read by id: arrays, memory maps, tensors, functions, faiss indexes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Gallery", "as_vectors"]

_UNIT = 1e-3
"""Largest deviation of a norm from one."""


class Gallery:
    """Unit vectors by id; only the rows that are asked for are read.

    Args:
        source: Array or memory map [items, width], tensor, function from ids to vectors, or an
            index of faiss that can reconstruct its vectors.
        normalize: Whether to scale vectors to norm one. Without it other norms are refused.

    Example:
        >>> Gallery(np.eye(3, dtype="float32")).take(np.array([[2, -1]]))
        tensor([[[0., 0., 1.],
                 [0., 0., 0.]]])
    """

    def __init__(self, source: object, *, normalize: bool = False) -> None:
        self.normalize = normalize
        self._read, self.size = _reader(source)

    def everything(self, max_memory: int, *, extra: int = 0) -> Float[Tensor, "n d"]:
        """Return all vectors; refuse if they and ``extra`` bytes for each take too much memory."""
        if self.size is None:
            raise ValueError(
                "The whole gallery is needed, but its size is not known; pass an array or an index "
                "instead of a function."
            )
        width = self.take(np.zeros(1, dtype=np.int64)).shape[1] if self.size else 0
        needed = self.size * (4 * width + extra)
        if needed > max_memory:
            raise ValueError(
                f"The whole gallery takes {needed / 2**20:.0f} MB with its graph, more than "
                f"max_memory ({max_memory / 2**20:.0f} MB); pass max_memory={needed}, or use the "
                "graph of each list."
            )
        return self.take(np.arange(self.size))

    def take(self, ids: NDArray[np.int64]) -> Float[Tensor, "*b d"]:
        """Return the vectors of ids in float32; zeros where an id is -1."""
        used, places = np.unique(ids, return_inverse=True)
        real = used[used >= 0]
        if self.size is not None and len(real) and real[-1] >= self.size:
            raise ValueError(
                f"ids holds {real[-1]}, but the gallery has {self.size} items; pass the gallery "
                "that the index was built on."
            )
        vectors = as_vectors(self._read(real), "the gallery", self.normalize)
        if len(vectors) != len(real):
            raise ValueError(
                f"The gallery returned {len(vectors)} vectors for {len(real)} ids; it must return "
                "one vector for each id, in order."
            )
        if len(used) > len(real):
            vectors = torch.cat([vectors.new_zeros(1, vectors.shape[1]), vectors])
        return vectors[torch.from_numpy(places.reshape(ids.shape))]


def _reader(source: Any) -> tuple[Callable[[NDArray[np.int64]], Any], int | None]:
    """Return a function from ids to vectors, and the number of items if it is known."""
    if hasattr(source, "reconstruct_batch"):
        return source.reconstruct_batch, getattr(source, "ntotal", None)
    if callable(source):
        return source, None
    if not hasattr(source, "shape"):
        source = np.asarray(source)
    if source.ndim != 2:
        raise ValueError(
            f"The gallery must have the shape [items, width], got {tuple(source.shape)}; pass one "
            "vector for each item."
        )
    if isinstance(source, Tensor):
        return lambda ids: source[torch.from_numpy(ids).to(source.device)], len(source)
    return lambda ids: source[ids], len(source)


def as_vectors(x: object, name: str, normalize: bool) -> Float[Tensor, "n d"]:
    """Return finite unit vectors as a tensor in float32.

    Example:
        >>> as_vectors([[3.0, 4.0]], "xq", normalize=True)
        tensor([[0.6000, 0.8000]])
    """
    numbers = _real_numbers(x, name)
    if numbers.ndim != 2:
        raise ValueError(f"{name} must have the shape [n, width], got {tuple(numbers.shape)}.")
    if not numbers.isfinite().all():
        raise ValueError(f"{name} holds a value that is not finite; remove or replace it.")
    if normalize:
        numbers = _moderate(numbers)
    vectors = numbers.float()
    norms = vectors.norm(dim=1, keepdim=True)
    if normalize:
        return vectors / norms.clamp_min(torch.finfo(torch.float32).tiny)
    worst = (norms - 1).abs().max().item() if len(norms) else 0.0
    if worst > _UNIT:
        raise ValueError(
            f"{name} holds a vector of norm {norms[(norms - 1).abs().argmax()].item():.3g}; "
            "similarities are cosines, so norms must be 1. Pass normalize=True, or --normalize."
        )
    return vectors


def _real_numbers(x: object, name: str) -> Tensor:
    """Return numbers as a tensor; float64 stays, because float32 may not hold its values."""
    if isinstance(x, Tensor):
        if x.is_complex():
            raise ValueError(f"{name} must hold real numbers, got {x.dtype}.")
        values: Tensor = x.detach().cpu()
        return values if values.is_floating_point() else values.float()
    try:
        array = np.asarray(x)
    except ValueError:
        raise ValueError(
            f"{name} must have the shape [n, width]; its rows have different lengths."
        ) from None
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{name} must hold real numbers, got {array.dtype}.")
    array = np.asarray(array, np.float64 if array.dtype.itemsize > 4 else np.float32)
    # a memory map is read only, which torch does not know
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _moderate(x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """Return rows whose squares float32 can hold; usual rows stay as they are, bit for bit."""
    if not x.numel():
        return x
    top = x.abs().amax(1, keepdim=True)
    is_extreme = (top > 1e15) | ((top < 1e-15) & (top > 0))
    return torch.where(is_extreme, x / top.clamp_min(torch.finfo(x.dtype).tiny), x)


def check_ids(ids: Any) -> Int[NDArray[np.int64], "q k"]:
    """Return lists of ids as one array, short ones filled with -1.

    Example:
        >>> check_ids([[4, 2], [7]])
        array([[ 4,  2],
               [ 7, -1]])
    """
    if isinstance(ids, Tensor):
        ids = ids.detach().cpu().numpy()
    if not isinstance(ids, np.ndarray) or ids.dtype == object:
        rows = [np.asarray(row) for row in ids]
        width = max((len(row) for row in rows), default=0)
        filled = np.full((len(rows), width), -1, dtype=np.int64)
        for row, values in zip(filled, rows, strict=True):
            _check_integers(values)
            row[: len(values)] = values
        return filled
    if ids.ndim != 2:
        raise ValueError(f"ids must have the shape [queries, results], got {ids.shape}.")
    _check_integers(ids)
    found = ids.astype(np.int64)
    if (found < -1).any():
        raise ValueError(f"ids holds {found.min()}; an id is at least 0, and -1 is an empty slot.")
    return found


def _check_integers(values: np.ndarray) -> None:
    if values.size and not np.issubdtype(values.dtype, np.integer):
        raise ValueError(
            f"ids must be integers, got {values.dtype}; pass the second array of index.search, not "
            "the scores."
        )
    if values.size and values.dtype.kind == "u" and values.max() > np.iinfo(np.int64).max:
        raise ValueError(f"ids holds {values.max()}; an id is below 2**63, and -1 is empty.")
