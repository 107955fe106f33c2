"""The time of a run, and how much of the training is done."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["Clock"]


class Clock:
    """Measures the time of the steps, and shares it with all processes.

    Args:
        device: Where the model runs. On a CPU the time is that of the processor, so that other
            programs do not count; elsewhere it is wall-clock time.
        max_seconds: Time that ends the training, if there is a limit.

    Example:
        >>> clock = Clock(torch.device("cpu"), max_seconds=2.0)
        >>> clock.seconds = 0.5
        >>> clock.progress(0.1), clock.is_over()
        (0.25, False)
    """

    def __init__(self, device: torch.device, max_seconds: float | None) -> None:
        self.device, self.max_seconds = device, max_seconds
        self.seconds = 0.0
        """Time of all steps so far."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Add the time of the context."""
        started = self._now()
        yield
        self.seconds += self._now() - started

    def progress(self, steps: float) -> float:
        """Return the share of the training that is done: of its steps, or of its time."""
        return steps if self.max_seconds is None else max(steps, self._share())

    def is_over(self) -> bool:
        """Return whether the time is used up."""
        return self.max_seconds is not None and self._share() >= 1

    def _share(self) -> float:
        share = torch.tensor(self.seconds / (self.max_seconds or math.inf))
        # with clocks of their own, processes would stop at different steps and wait forever
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            share = share.to(self.device)
            torch.distributed.broadcast(share, 0)
        return float(share)

    def _now(self) -> float:
        return time.process_time() if self.device.type == "cpu" else time.perf_counter()
