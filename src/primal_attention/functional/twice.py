"""Gradients that can be differentiated again, for functions with a backward pass of their own."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from primal_attention.functional.precision import full_precision

__all__ = ["Context", "gradients"]

if TYPE_CHECKING:

    class Context(FunctionCtx):
        """What a forward pass written by hand leaves for its backward pass."""

        saved_tensors: tuple[Tensor, ...]
        needs_input_grad: tuple[bool, ...]

        def save_for_backward(self, *tensors: Tensor | None) -> None:
            """Keep tensors for the backward pass."""

        # a function may leave anything
        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: object) -> None: ...
else:
    Context = FunctionCtx


def gradients(
    formula: Callable[..., Sequence[Tensor | None]],
    given: Sequence[Tensor | None],
    needed: Sequence[bool],
    grads: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of a formula in its arguments, as functions of all that they depend on.

    A backward pass written by hand calls this where ``torch.is_grad_enabled()``: that is so inside
    backward if and only if the caller asked for ``create_graph=True``. ``once_differentiable`` is
    no protection, because it raises only if the *incoming* gradients depend on something: where a
    layer has a skip connection and a linear end they are constant, and second derivatives would
    silently be zero.

    Args:
        formula: The forward pass in operations that autograd knows.
        given: Its arguments, as ``ctx.saved_tensors`` has them.
        needed: Which arguments need a gradient.
        grads: The gradients of the results; ``None`` where a result does not count.
    """
    # a view of every argument: one may have been computed from another, and the gradient in that
    # other one must not run through the first
    own = [t if t is None else t.view_as(t) for t in given]
    wanted = [t for t, need in zip(own, needed, strict=True) if need and t is not None]
    with full_precision(next(t for t in own if t is not None)):
        results = formula(*own)
        counted = [
            (y, grad)
            for y, grad in zip(results, grads, strict=True)
            if y is not None and grad is not None and y.requires_grad
        ]
        outputs, pulls = zip(*counted, strict=True) if counted else ((), ())
        if not outputs:
            return (None,) * len(own)
        found = iter(
            torch.autograd.grad(outputs, wanted, pulls, create_graph=True, allow_unused=True)
        )
    return tuple(
        next(found) if need and t is not None else None for t, need in zip(own, needed, strict=True)
    )
