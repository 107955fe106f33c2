"""How a layer's regulariser reaches the training loop.

    loss = task_loss + eta * ksvd_loss(model)

A layer inside another model publishes the term of its last training forward. The models of this
library call their layers with ``return_aux=True`` and publish all terms themselves, once.
``ksvd_loss`` collects what was published and clears it. Terms are never pickled or copied.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

__all__ = ["PublishesTerms", "in_backward", "ksvd_loss", "ksvd_terms"]


class PublishesTerms(nn.Module):
    """A module that holds the loss terms of its last training forward until they are collected."""

    _terms: dict[str, Tensor] | None = None
    _had_gradients: bool = True

    def publish(self, terms: dict[str, Tensor] | None) -> None:
        """Replace what was published before; does nothing outside training.

        Args:
            terms: The terms by name; ``None`` if another module publishes them. Then only whether
                gradients are on is noted.
        """
        is_compiling = torch.compiler.is_compiling()
        # activation checkpointing runs forward again inside backward: that is not a new step
        if not self.training or (not is_compiling and in_backward()):
            return
        if terms is not None:
            self._terms = terms
        if terms is not None or not is_compiling:
            self._had_gradients = torch.is_grad_enabled()

    @property
    def expects_term(self) -> bool:
        """Whether a forward in the present mode gives a term."""
        capabilities = getattr(self, "capabilities", None)
        return self.training and capabilities is not None and bool(capabilities.aux_loss)

    def _lost_gradients(self) -> bool:
        """Return whether the last forward left no graph although there is something to train."""
        return not self._had_gradients and any(p.requires_grad for p in self.parameters())

    def __getstate__(self) -> dict[str, object]:
        # terms belong to one graph: a copy or a pickle must not drag it along
        dropped = "_terms", "_had_gradients"
        return {k: v for k, v in self.__dict__.items() if k not in dropped}


def in_backward() -> bool:
    """Return whether a backward pass is running: checkpointing repeats forward inside it."""
    return torch._C._current_graph_task_id() != -1


def ksvd_terms(model: nn.Module) -> dict[str, Float[Tensor, ""]]:
    """Return the published terms by layer name, and leave them where they are.

    Example:
        >>> import primal_attention as pa
        >>> layer = pa.PrimalAttention(8, 2)
        >>> _ = layer(torch.randn(1, 5, 8))
        >>> list(pa.ksvd_terms(layer))
        ['']
    """
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, PublishesTerms) and module._terms is not None:
            for inner, term in module._terms.items():
                found[".".join(filter(None, (name, inner)))] = term
    return found


def ksvd_loss(model: nn.Module, *, layers: Literal["mean", "sum"] = "mean") -> Float[Tensor, ""]:
    """Collect the regularisers of the last training forward as one number, and clear them.

    A frozen layer whose input needs no gradient has a constant term. It counts in the value, so
    that freezing a layer leaves the weight of the others as it is, and adds no gradient.

    Args:
        model: Any module with primal layers somewhere inside.
        layers: Average over layers, as the published code does, or sum, as the paper writes.

    The loss is zero where there is nothing to collect: no layer has a regulariser, or the model is
    in evaluation mode.

    Raises:
        RuntimeError: If a layer with a regulariser is in training mode and nothing was published
            since the last call, or if gradients are on now but were off in the forward of a module
            that has something to train.

    Example:
        >>> import primal_attention as pa
        >>> layer = pa.PrimalAttention(8, 2)
        >>> y = layer(torch.randn(1, 5, 8))
        >>> loss = y.square().mean() + 0.1 * pa.ksvd_loss(layer)
    """
    if layers not in ("mean", "sum"):
        raise ValueError(f"layers must be 'mean' or 'sum', got {layers!r}.")
    found = [(n, m) for n, m in model.named_modules() if isinstance(m, PublishesTerms)]
    terms = [term for _, module in found for term in (module._terms or {}).values()]
    if not terms:
        if any(module.expects_term for _, module in found):
            raise RuntimeError(
                "ksvd_loss found no published term. Run a forward in training mode "
                "(model.train()), then call ksvd_loss once."
            )
        return _zero(model)
    if torch.is_grad_enabled():
        for name, module in found:
            if module._lost_gradients():
                lost = ".".join(filter(None, (name, next(iter(module._terms or {}), ""))))
                raise RuntimeError(
                    f"The KSVD term of layer {lost or 'model'!r} carries no gradient: the forward "
                    "ran under no_grad or inside reentrant activation checkpointing. Use "
                    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
                )
    for _, module in found:
        module._terms, module._had_gradients = None, True
    if len(terms) == 1:
        return terms[0]
    total = torch.stack(terms).sum()
    return total / len(terms) if layers == "mean" else total


def _zero(model: nn.Module) -> Float[Tensor, ""]:
    """Return zero where the parameters of a model are."""
    like = next(model.parameters(), None)
    return torch.zeros((), device=None if like is None else like.device)
