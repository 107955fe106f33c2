"""The Monge gap of layers as a term of the training loss.

    with MongeGapTerm(model.blocks) as gap:
        loss = task_loss + eta * ksvd_loss(model) + lam * gap.collect()

A hook keeps input and output of the last training forward of each watched module. ``collect``
returns the mean gap over the modules, on a sample of the real tokens, and forgets the tensors.
"""

from collections.abc import Iterable
from typing import Any, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from primal_attention.attention.terms import in_backward
from primal_attention.functional.precision import accumulator
from primal_attention.functional.transport import monge_gap

__all__ = ["MongeGapTerm"]


class MongeGapTerm:
    """Monge gap between inputs and outputs of modules: what a map costs above the optimum.

    The gradient reaches the module and what comes before it. An exact solve on 256 points takes a
    few milliseconds.

    Args:
        modules: A module or several. Each gets its tokens as first argument or as ``x=``, and
            returns tokens of the same shape, or a tuple that begins with them. Padding is left out
            if the module is called with ``key_mask=``.
        num_points: Largest number of tokens of one module in the term.
        seed: Seed of the samples of tokens.

    Example:
        >>> from primal_attention.attention import create_attention
        >>> layer, x = create_attention("softmax", 16, 2), torch.randn(2, 40, 16)
        >>> with MongeGapTerm(layer, num_points=50) as gap:
        ...     loss = layer(x).square().mean() + 0.1 * gap.collect()
        >>> loss.backward()
    """

    def __init__(
        self, modules: nn.Module | Iterable[nn.Module], *, num_points: int = 256, seed: int = 0
    ) -> None:
        # a ModuleList is a module that is never called: its items are meant
        if isinstance(modules, nn.ModuleList) or not isinstance(modules, nn.Module):
            self.modules = list(modules)
        else:
            self.modules = [modules]
        if not self.modules or num_points < 2:
            raise ValueError(
                f"MongeGapTerm needs at least one module and two points, got {len(self.modules)} "
                f"modules and num_points={num_points}."
            )
        self.num_points = num_points
        self._generator = torch.Generator().manual_seed(seed)
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}
        self._handles = [
            module.register_forward_hook(self._keep, with_kwargs=True) for module in self.modules
        ]

    def collect(self) -> Float[Tensor, ""]:
        """Return the mean gap of the last training forward, and forget its tensors.

        Raises:
            RuntimeError: If no watched module ran in training mode since the last call.
        """
        if not self._pairs:
            raise RuntimeError(
                "MongeGapTerm found no forward of its modules in training mode. Call model.train() "
                "and run a forward, then collect once."
            )
        gaps = [monge_gap(*self._sample(x, y)) for x, y in self._pairs.values()]
        self._pairs = {}
        return torch.stack(gaps).mean()

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._pairs = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __getstate__(self) -> dict[str, object]:
        # a copy of a watched model must not take the graph of a forward along
        return {**self.__dict__, "_pairs": {}}

    def _keep(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        # activation checkpointing runs forward again inside backward: that is not a new step
        if not module.training or in_backward():
            return
        x = args[0] if args else kwargs["x"]
        y = output[0] if isinstance(output, tuple) else output
        if x.shape != y.shape:
            raise ValueError(
                f"{type(module).__name__} maps {tuple(x.shape)} to {tuple(y.shape)}; the Monge gap "
                "needs input and output of one shape. Watch a module that keeps the width."
            )
        keep = kwargs.get("key_mask")
        flat = (x.flatten(0, -2), y.flatten(0, -2)) if keep is None else (x[keep], y[keep])
        self._pairs[id(module)] = flat

    def _sample(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if len(x) > self.num_points:
            order = torch.randperm(len(x), generator=self._generator)[: self.num_points]
            x, y = x[order.to(x.device)], y[order.to(x.device)]
        return x.to(accumulator(x)), y.to(accumulator(x))
