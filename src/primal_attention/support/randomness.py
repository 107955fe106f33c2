"""Seeds, and the state of every random generator of a run."""

import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "deterministic_algorithms",
    "isolated",
    "random_state",
    "restore_random_state",
    "seed_everything",
]


def seed_everything(seed: int) -> None:
    """Seed torch on every device, numpy and Python."""
    seed = int(seed)  # Python refuses the integers of numpy
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def random_state() -> dict[str, Tensor]:
    """Return the state of the generators of torch, numpy and Python as tensors."""
    name, keys, position, has_gauss, gauss = np.random.get_state()
    version, words, next_gauss = random.getstate()
    if name != "MT19937" or version != 3:
        raise RuntimeError(f"Unknown random generators: numpy {name}, Python version {version}.")
    # tensors, because nothing in a checkpoint is pickled; both gauss values are the second number
    # of a pair that was drawn, which the next call returns
    state = {
        "torch": torch.get_rng_state(),
        "numpy": torch.tensor(np.concatenate([keys, [position, has_gauss]]).astype(np.int64)),
        "numpy_gauss": torch.tensor(gauss, dtype=torch.float64),
        "python": torch.tensor(words),
        "python_gauss": torch.tensor(
            [] if next_gauss is None else [next_gauss], dtype=torch.float64
        ),
    }
    if torch.cuda.is_available():
        state |= {f"cuda{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    return state


def restore_random_state(state: dict[str, Tensor]) -> None:
    """Restore the generators to a state of :func:`random_state`."""
    torch.set_rng_state(state["torch"])
    *keys, position, has_gauss = state["numpy"].tolist()
    gauss = state["numpy_gauss"].item()
    np.random.set_state(("MT19937", np.array(keys, np.uint32), position, has_gauss, gauss))
    words = tuple(state["python"].tolist())
    random.setstate((3, words, next(iter(state["python_gauss"].tolist()), None)))
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            torch.cuda.set_rng_state(state[f"cuda{i}"], i)


_ALONE = threading.RLock()
"""Held while a thread draws from the global generators: layers and dropout know no others."""


def _prepare_fork() -> None:
    """Give a forked process a lock and a thread of its own: those of its parent are not there."""
    global _ALONE
    _ALONE = threading.RLock()
    # more threads would wait for ever for those of the parent, as in the workers of a DataLoader
    torch.set_num_threads(1)


os.register_at_fork(after_in_child=_prepare_fork)


@contextmanager
def isolated(seed: int | None = None) -> Iterator[None]:
    """Draw random numbers alone in this process, and restore the caller's random state at the end.

    Other threads wait where they enter such a context. So what a thread builds or trains inside
    does not depend on the others.

    Args:
        seed: Seed of the generators inside the context; by default they go on.

    Example:
        >>> before = torch.get_rng_state()
        >>> with isolated(0):
        ...     _ = torch.rand(3)
        >>> torch.get_rng_state().equal(before)
        True
    """
    with _ALONE:
        before = random_state()
        try:
            if seed is not None:
                seed_everything(seed)
            yield
        finally:
            restore_random_state(before)


@contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """Allow deterministic algorithms only, inside the context."""
    if not enabled:
        yield
        return
    # matrix products of CUDA need it
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark
