"""Attention of any model on one batch, whichever library it comes from.

Fused attention returns no weights. ``capture`` therefore watches the forward: it keeps the queries,
keys, values and masks that reach ``scaled_dot_product_attention``, or the softmax of a model that
computes its weights itself. This works for transformers with every implementation,
``torch.nn.MultiheadAttention``, timm, and models of one's own. Layers of this library are read from
their inputs.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from primal_attention.attention import Attention
from primal_attention.hosts.captured import CapturedLayer, DotProductLayer, WeightsLayer
from primal_attention.hosts.inputs import Batch, LayerInputs, batch_arguments
from primal_attention.hosts.ours import OwnLayer
from primal_attention.hosts.recording import ModuleCall, find_tensor, watch_modules
from primal_attention.training.evaluation import eval_mode

__all__ = ["Layers", "capture", "capture_call"]

Layers = str | int | Sequence[str | int]
"""Which layers: ``"all"``, ``"last"``, a name, an index, or several names or indices."""


class _Watch(TorchFunctionMode):
    """Records the attention of the modules that are running."""

    def __init__(self, model: nn.Module, wanted: set[str] | None) -> None:
        super().__init__()
        self.modules, self.wanted = dict(model.named_modules()), wanted
        self.running: list[str] = []
        self.closed = 0
        """Number of running layers of this library; what they do inside is not recorded."""
        self.found: dict[str, CapturedLayer] = {}
        self._latest: Tensor | None = None
        """Result of the last softmax; it is attention if it is then multiplied by values."""

    def enter(self, name: str, call: ModuleCall) -> None:
        """Note that a module starts, and keep the inputs of a layer of this library."""
        self.running.append(name)
        module = self.modules[name]
        if isinstance(module, Attention):
            if self._is_wanted():
                self.found[name] = OwnLayer(module, LayerInputs.of_call(call.args, call.kwargs))
            self.closed += 1

    def leave(self, name: str, call: ModuleCall) -> None:
        """Note that a module ends, and keep its output."""
        self.running.pop()
        self.closed -= isinstance(self.modules[name], Attention)
        first = find_tensor(call.output)
        if name in self.found and first is not None:
            self.found[name].output = first.detach()

    def __torch_function__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func is nn.functional.multi_head_attention_forward and self._is_wanted():
            # with need_weights the function multiplies queries and keys itself, unseen: a first
            # call without weights goes through the fused function, a second one gives the answer
            with self._inside_function():
                func(*args, **{**kwargs, "need_weights": False})
            return func(*args, **kwargs)
        if func is nn.functional.scaled_dot_product_attention and self._is_wanted():
            self._keep_dot_product(*args, **kwargs)
        result = func(*args, **kwargs)
        if func in _SOFTMAX and self._is_wanted() and result.ndim == 4:
            self._latest = result
        elif func in _PRODUCT and self._latest is not None:
            left, right = args[:2]
            # the product may get another tensor than the softmax returned, on the same memory:
            # dropout outside training returns a view
            if isinstance(left, Tensor) and left.data_ptr() == self._latest.data_ptr():
                self.found[self.running[-1]] = WeightsLayer(left, right)
                self._latest = None
        return result

    @contextmanager
    def _inside_function(self) -> Iterator[None]:
        """Record the dot products of a function of torch.

        While ``__torch_function__`` runs, the mode is off, so the function is replaced by name.
        """
        attend = nn.functional.scaled_dot_product_attention

        def recorded(*args: Any, **kwargs: Any) -> Tensor:
            self._keep_dot_product(*args, **kwargs)
            return attend(*args, **kwargs)

        nn.functional.scaled_dot_product_attention = recorded
        try:
            yield
        finally:
            nn.functional.scaled_dot_product_attention = attend

    def _is_wanted(self) -> bool:
        if not self.running or self.closed:
            return False
        return self.wanted is None or self.running[-1] in self.wanted

    def _keep_dot_product(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        if query.ndim != 4:
            return
        if attn_mask is not None and attn_mask.ndim < 4:
            attn_mask = attn_mask[(None,) * (4 - attn_mask.ndim)]
        self.found[self.running[-1]] = DotProductLayer(
            query, key, value, attn_mask, is_causal, scale
        )


_SOFTMAX = (torch.softmax, nn.functional.softmax, Tensor.softmax)
_PRODUCT = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm)


def capture_call(
    model: nn.Module,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    wanted: set[str] | None = None,
) -> dict[str, CapturedLayer]:
    """Return the attention of every layer in one call of a model, by name; may be empty."""
    watch = _Watch(model, wanted)
    hooks = watch_modules(watch.modules, enter=watch.enter, leave=watch.leave)
    with torch.no_grad(), eval_mode(model), hooks, watch:
        model(*args, **kwargs)
    mask = kwargs.get("attention_mask")
    for name, layer in watch.found.items():
        layer.name = name
        if layer.layer is None:
            _cut_padding(layer, mask)
    return watch.found


def _cut_padding(layer: CapturedLayer, mask: object) -> None:
    """Mark padded queries and keys with the model's own ``attention_mask``, where it fits.

    It fits the keys if no real query attends to what it calls padding. In cross-attention between
    texts and images of equal length it may be the mask of the other side.
    """
    real = mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None
    is_self = layer.query_keep.shape == layer.keep.shape
    if real is not None and real.shape == layer.keep.shape:
        queries = real if is_self else layer.query_keep
        if layer.forbids(queries, ~real):
            layer.keep = real
    if is_self:
        layer.query_keep = layer.keep
    elif real is not None and real.shape == layer.query_keep.shape:
        layer.query_keep = real


def capture(model: nn.Module, batch: Batch, *, layers: Layers = "all") -> list[CapturedLayer]:
    """Return the attention of the layers of a model on a batch, in the order of the forward.

    The forward runs in evaluation mode and without gradients; the model is not changed. Queries,
    keys and values of the wanted layers are kept: ``O(b n c)`` memory for each. A model that
    computes its own softmax makes the ``n × n`` weights itself; they are kept as they are. If a
    module attends twice in one forward, the last call counts.

    Args:
        model: A model of transformers, timm, torch, this library, or any other PyTorch model.
        batch: Its inputs: keyword arguments, positional arguments, or one tensor.
        layers: ``"all"``, ``"last"``, an index in the order of the forward, a name, or several.

    Raises:
        ValueError: If the model has no attention, or no such layer.

    Example:
        >>> from primal_attention.attention import create_attention
        >>> layer = create_attention("softmax", 8, 2)
        >>> found = capture(layer, torch.randn(1, 5, 8))[0]
        >>> found.weights().shape, found.weights().sum(-1).round(decimals=6).unique()
        (torch.Size([2, 5, 5]), tensor([1.], dtype=torch.float64))
    """
    wanted = None
    if isinstance(layers, str) and layers not in ("all", "last"):
        wanted = {layers}
    found = capture_call(model, *batch_arguments(batch), wanted)
    if not found:
        what = "no attention layer" if wanted is None else f"no attention layer named {layers!r}"
        raise ValueError(
            f"{type(model).__name__} has {what} that ran on this batch; give a model with "
            "attention, and a name that capture(model, batch) lists."
        )
    if layers == "all":
        return list(found.values())
    names = list(found)
    chosen = [-1] if layers == "last" else [layers] if isinstance(layers, str | int) else layers
    return [found[_name(names, which)] for which in chosen]


def _name(names: list[str], which: str | int) -> str:
    if isinstance(which, str) and which in names:
        return which
    if isinstance(which, int) and -len(names) <= which < len(names):
        return names[which]
    raise ValueError(
        f"There is no attention layer {which!r}; the model has {len(names)}: {', '.join(names)}."
    )
