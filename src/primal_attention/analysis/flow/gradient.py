"""Relevance of attention for one output: ``max(0, A ∂L/∂A)`` (Chefer et al. 2021, 2103.15679)."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from primal_attention.analysis.flow.layers import GivenLayer
from primal_attention.attention import MultiHeadAttention
from primal_attention.hosts import Batch, CapturedLayer, batch_arguments, record_calls
from primal_attention.training.evaluation import eval_mode

__all__ = ["OutputLoss", "default_loss", "relevance_layers"]

OutputLoss = Callable[[Any], Tensor]
"""From the output of a model, which may be anything, to the number to explain."""


def default_loss(output: object) -> Float[Tensor, ""]:
    """Return the sum over samples of the largest logit, which every classifier has.

    Args:
        output: Output of a model: an object or mapping with ``logits``, or a tensor.
    """
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise ValueError(
            f"weighting='gradient' needs one output to explain, and {type(output).__name__} has no "
            "logits; give loss=, a function from the output to a number."
        )
    return logits.flatten(1).amax(1).sum()


def relevance_layers(
    model: nn.Module,
    batch: Batch,
    layers: Sequence[CapturedLayer],
    loss: OutputLoss | None = None,
) -> list[CapturedLayer]:
    """Return layers whose weights are ``max(0, A ∂L/∂A)``.

    Layers of this library give the gradient of their heads, ``∂L/∂A_ij = ⟨∂L/∂o_i, v_j⟩``. Models
    of transformers must return their weights, which takes ``n × n`` numbers for each head.

    Args:
        model: The model; it is not changed.
        batch: Its inputs.
        layers: Its captured layers.
        loss: From the output to the number to explain; by default :func:`default_loss`.
    """
    explain = default_loss if loss is None else loss
    own = [layer for layer in layers if isinstance(layer.layer, MultiHeadAttention)]
    if len(own) == len(layers):
        return _own_layers(model, batch, layers, explain)
    args, kwargs = batch_arguments(batch)
    if "output_attentions" not in _parameters(model):
        raise ValueError(
            f"weighting='gradient' needs the weights of {type(model).__name__}, which does not "
            "return them; give attentions and gradients=, or use another weighting."
        )
    with torch.enable_grad(), eval_mode(model), _eager(model):
        output = model(*args, **{**kwargs, "output_attentions": True})
        weights = [t for t in (output.attentions or ()) if isinstance(t, Tensor)]
        if len(weights) != len(layers):
            raise ValueError(
                f"{type(model).__name__} returns the weights of {len(weights)} layers, but "
                f"{len(layers)} are measured; give attentions and gradients= instead."
            )
        gradients = torch.autograd.grad(explain(output), weights, allow_unused=True)
    return [
        GivenLayer(
            _relevance(a, g),
            layer.keep,
            query_keep=layer.query_keep,
            name=layer.name,
            is_causal=layer.is_causal,
        )
        for a, g, layer in zip(weights, gradients, layers, strict=True)
    ]


def _relevance(weights: Tensor, gradient: Tensor | None) -> Tensor:
    if gradient is None:
        return torch.zeros_like(weights).detach()
    return (weights * gradient).clamp_min(0).detach()


def _parameters(model: nn.Module) -> Mapping[str, object]:
    found = inspect.signature(model.forward).parameters
    # decorated forwards of transformers take further options as keywords
    has_more = any(p.kind is p.VAR_KEYWORD for p in found.values())
    return {"output_attentions": None} if has_more else found


@contextmanager
def _eager(model: Any) -> Iterator[None]:
    """Let a model of transformers compute its weights, inside the context."""
    before = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if before in (None, "eager"):
        yield
        return
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _own_layers(
    model: nn.Module,
    batch: Batch,
    layers: Sequence[CapturedLayer],
    explain: OutputLoss,
) -> list[CapturedLayer]:
    """Return the relevance of layers of this library from the gradients of their heads."""
    names = [f"{layer.name}.core".lstrip(".") for layer in layers]
    args, kwargs = batch_arguments(batch)
    with torch.enable_grad(), eval_mode(model), record_calls(model, names, {}) as calls:
        loss = explain(model(*args, **kwargs))
    heads = [calls[name].output for name in names]
    gradients = torch.autograd.grad(loss, heads, allow_unused=True)
    return [
        _Relevance(layer, torch.zeros_like(o) if g is None else g)
        for layer, g, o in zip(layers, gradients, heads, strict=True)
    ]


class _Relevance(CapturedLayer):
    """Relevance of a layer from the gradient of its heads."""

    def __init__(self, inner: CapturedLayer, gradient: Float[Tensor, "b h n v"]) -> None:
        self.inner, self._gradient = inner, gradient.detach()
        self.name, self.is_causal = inner.name, inner.is_causal
        self.num_heads, self.head_dim = inner.num_heads, inner.head_dim
        self.keep, self.query_keep = inner.keep, inner.query_keep

    def _rows(self, sequence: int, rows: slice) -> Float[Tensor, "h rows m"]:
        layer, inputs = self.inner.layer, self.inner.inputs
        real = self.query_keep[sequence].nonzero()[:, 0]
        is_ordered = isinstance(layer, MultiHeadAttention) and layer.core.ordered
        if is_ordered and inputs is not None and inputs.context is None:
            real = torch.arange(len(real))  # such a core gets all padding behind the real tokens
        g = self._gradient[sequence][:, real[rows]].double()
        weights = self.inner.weights(sequence, rows=rows)
        return (weights * (g @ self.inner.values(sequence).mT)).clamp_min(0)

    def values(self, sequence: int = 0) -> Float[Tensor, "h m v"]:
        """Return the values of the real keys."""
        return self.inner.values(sequence)
