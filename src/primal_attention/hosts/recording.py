"""Run a model and record the calls of its modules. All hooks of this package are set here."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from primal_attention.hosts.inputs import Batch, batch_arguments, model_arguments
from primal_attention.training.evaluation import eval_mode

__all__ = [
    "ModuleCall",
    "change_output",
    "find_tensor",
    "first_tensor",
    "record_calls",
    "record_run",
    "run_batch",
    "watch_modules",
]

Key = TypeVar("Key", bound=Hashable)


class ModuleCall(NamedTuple):
    """Arguments and output of one call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None
    """What the module returned; ``None`` while it runs."""


@contextmanager
def watch_modules(
    modules: Mapping[Key, nn.Module],
    *,
    enter: Callable[[Key, ModuleCall], None] = lambda key, call: None,
    leave: Callable[[Key, ModuleCall], None] = lambda key, call: None,
) -> Iterator[None]:
    """Call functions whenever one of the modules starts and ends, inside the context.

    Args:
        modules: The modules, by the key that the functions get.
        enter: Called before a forward, in the order in which forwards start.
        leave: Called after a forward, with its output.
    """

    def before(key: Key) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            enter(key, ModuleCall(args, kwargs))

        return hook

    def after(key: Key) -> Callable[..., None]:
        def hook(
            module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object
        ) -> None:
            leave(key, ModuleCall(args, kwargs, output))

        return hook

    handles = []
    # a hook on any part of an nn.TransformerEncoderLayer also switches off its fused path, which
    # would not call the attention
    for key, module in modules.items():
        handles.append(module.register_forward_pre_hook(before(key), with_kwargs=True))
        handles.append(module.register_forward_hook(after(key), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def record_calls(
    model: nn.Module, names: Sequence[str], into: dict[str, ModuleCall]
) -> Iterator[dict[str, ModuleCall]]:
    """Record the last call of each named module within the context, in the order of the forward.

    A cache among the arguments is left out, so that the call can be replayed. Of several outputs
    the first tensor is recorded.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        >>> with record_calls(model, ["0"], {}) as calls:
        ...     _ = model(torch.ones(4, 5, 2))
        >>> calls["0"].output.shape
        torch.Size([4, 5, 3])
    """

    def keep(name: str, call: ModuleCall) -> None:
        kwargs = {k: None if k in _CACHES else v for k, v in call.kwargs.items()}
        into[name] = ModuleCall(call.args, kwargs, find_tensor(call.output))

    # kept at the start, too: a module that contains another one of the names comes first
    with watch_modules({n: model.get_submodule(n) for n in names}, enter=keep, leave=keep):
        yield into


_CACHES = ("past_key_values", "past_key_value", "layer_past")


@torch.no_grad()
def record_run(
    model: nn.Module, names: Sequence[str], *args: object, **kwargs: object
) -> dict[str, ModuleCall]:
    """Return the last call of each named module in one forward, which runs in evaluation mode.

    Args:
        model: The model; it is not changed.
        names: Names of the modules; those that the forward does not call are left out.
        args: Positional arguments of the model's forward.
        kwargs: Keyword arguments of the model's forward.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        >>> record_run(model, ["1"], torch.ones(4, 2))["1"].args[0].shape
        torch.Size([4, 3])
    """
    with eval_mode(model), record_calls(model, names, {}) as calls:
        model(*args, **kwargs)
    return calls


@contextmanager
def change_output(module: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replace the output of a module, or the first of several, in every forward in the context.

    Example:
        >>> layer = nn.Identity()
        >>> with change_output(layer, torch.neg):
        ...     print(layer(torch.ones(2)))
        tensor([-1., -1.])
    """

    def hook(_: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> object:
        if isinstance(output, tuple):
            return (change(output[0]), *output[1:])
        return change(output)

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def run_batch(model: nn.Module, batch: Batch, *, labels: bool = False) -> Any:
    """Return the model's output on a batch, without a cache, and with labels only if asked."""
    args, kwargs = batch_arguments(model_arguments(model, batch, labels=labels))
    return model(*args, **kwargs)


def find_tensor(output: object) -> Tensor | None:
    """Return an output, or the first part of several; ``None`` if that is no tensor."""
    while isinstance(output, Mapping | tuple | list) and output:
        if isinstance(output, Mapping):
            output = [part for part in output.values() if part is not None] or None
        else:
            output = output[0]
    return output if isinstance(output, Tensor) else None


def first_tensor(output: object) -> Tensor:
    """Return an output, or the first part of several; raise if that is no tensor."""
    found = find_tensor(output)
    if found is None:
        raise TypeError(f"The model must return a tensor first, got {type(output).__name__}.")
    return found
