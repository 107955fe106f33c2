"""Processes of a run: one of them writes files, and all learn what went wrong there."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from primal_attention.support.command import UserError, needs
from primal_attention.support.files import locked

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["in_main_process", "join_processes", "one_writer"]

T = TypeVar("T")


def join_processes() -> "Accelerator":
    """Return the accelerator of this process, joined with the other processes of ``torchrun``.

    ``fit`` calls this itself. Its ``is_main_process`` tells which process writes files.
    """
    with needs("train", "Training"):
        from accelerate import Accelerator
        from accelerate.utils import DistributedType
    # without cpu=True accelerate ignores torchrun on a CPU, and every process trains alone
    accelerator = Accelerator(mixed_precision="no", cpu=not torch.accelerator.is_available())
    if accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        raise ValueError(
            f"fit trains data parallel, got an accelerate configuration for "
            f"{accelerator.distributed_type.value}; launch with torchrun or a plain configuration."
        )
    return accelerator


def in_main_process(action: Callable[[], T]) -> T:
    """Do something in the main process alone, and return what it found in all of them.

    All processes wait for it. If it raises a :class:`UserError`, all of them do. They must have
    been joined before.
    """
    if not torch.distributed.is_initialized():
        return action()
    found: list[Any] = [None, None]
    if torch.distributed.get_rank() == 0:
        try:
            found = [action(), None]
        except UserError as error:
            found = [None, error]
    torch.distributed.broadcast_object_list(found, 0)
    result, refusal = found
    if refusal is not None:
        raise refusal
    return result


@contextmanager
def one_writer(folder: Path | None) -> Iterator[None]:
    """Hold the lock of a run's folder in the main process; other runs are refused meanwhile.

    Args:
        folder: The folder; ``None`` locks nothing.

    Raises:
        UserError: If another run writes into the folder.
    """
    with ExitStack() as lock:
        if folder is not None:
            in_main_process(lambda: lock.enter_context(locked(folder)))
        yield
