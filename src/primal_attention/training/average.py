"""An exponential moving average of the weights.

The arithmetic is that of ``torch.optim.swa_utils``. Its ``AveragedModel`` is not used: it copies
the whole model, with the data that some models keep, and its first update forgets the initial
weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

__all__ = ["WeightAverage", "weights_of"]


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all parameters and saved buffers by name."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


class WeightAverage:
    """The average ``a ← a + (1 − decay) (w − a)`` of floating-point weights; others are copied.

    The decay starts small, ``(1 + t) / (10 + t)`` at update ``t``, so that the initial weights are
    forgotten quickly.

    Args:
        model: The model to follow.
        decay: Share of the old average that an update keeps.

    Example:
        >>> model = torch.nn.Linear(2, 2)
        >>> average = WeightAverage(model, 0.999)
        >>> average.update(model)  # after every optimiser step
        >>> with average.applied(model):
        ...     y = model(torch.ones(1, 2))
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self.weights = weights_of(model)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move the average towards the model's present weights."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        now = model.state_dict()
        names = [name for name, tensor in now.items() if tensor.is_floating_point()]
        average, current = ([tensors[name] for name in names] for tensors in (self.weights, now))
        get_ema_multi_avg_fn(decay)(average, current, self.updates)
        # an average of counters would be no counter
        for name in now.keys() - set(names):
            self.weights[name].copy_(now[name])

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Give the model the averaged weights inside the context."""
        own = weights_of(model)
        model.load_state_dict(self.weights)
        try:
            yield
        finally:
            model.load_state_dict(own)
