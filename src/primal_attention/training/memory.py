"""Memory of tensors: the peak while running, and the bytes kept for backward."""

import weakref
from collections.abc import Callable, Iterable
from typing import Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["PeakMemory", "kept_for_backward"]


class PeakMemory(TorchDispatchMode):
    """Context manager that counts the bytes of all tensors created inside, and their peak.

    The count is exact for tensors. It does not include scratch space inside an operator.

    Example:
        >>> with PeakMemory() as memory:
        ...     _ = torch.ones(1000)
        >>> memory.peak
        4000
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._seen: dict[int, int] = {}

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Run an operator and count the storages it creates."""
        before = {_address(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and _address(tensor) not in before:
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen[key] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        self.live -= self._seen.pop(key, 0)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def kept_for_backward(run: Callable[[], object], known: Iterable[Tensor] | nn.Module) -> int:
    """Return the bytes that autograd keeps after ``run``, without inputs and parameters.

    Args:
        run: A forward pass.
        known: Inputs and parameters, or the module that owns the parameters. They are not counted.
    """
    known = known.parameters() if isinstance(known, nn.Module) else known
    outside = {_address(t) for t in known}
    kept: dict[int, tuple[torch.UntypedStorage, int]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in outside:
            kept[storage._cdata] = (storage, storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = run()
    total = sum(size for _, size in kept.values())
    del result
    return total
