"""Inputs of models and of their attention layers."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from jaxtyping import Bool, Float, Int
from torch import Tensor

from primal_attention.attention import MultiHeadAttention, Rotary

__all__ = ["Batch", "LayerInputs", "batch_arguments", "model_arguments"]

Batch = Mapping[str, Any] | Sequence[Any] | Tensor
"""Inputs of a model: keyword arguments, positional arguments, or one tensor."""


class LayerInputs(NamedTuple):
    """Inputs of an attention layer in one forward."""

    x: Float[Tensor, "b n c"]
    context: Float[Tensor, "b m c"] | None = None
    key_mask: Bool[Tensor, "b m"] | None = None
    is_causal: bool = False
    rotary: Rotary | None = None
    document_ids: Int[Tensor, "b n"] | None = None

    @classmethod
    def of_call(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Self:
        """Return the inputs from the arguments of a layer's forward."""
        return cls(
            args[0] if args else kwargs["x"],
            args[1] if len(args) > 1 else kwargs.get("context"),
            kwargs.get("key_mask"),
            bool(kwargs.get("is_causal", False)),
            kwargs.get("rotary"),
            kwargs.get("document_ids"),
        )

    def check_rows(self) -> None:
        """Raise if a row holds several documents."""
        if self.document_ids is not None:
            raise ValueError(
                "The rows of this batch hold several documents (document_ids), and a layer is "
                "read one document a row; pass a batch without document_ids."
            )

    def matrices(self, layer: MultiHeadAttention) -> list[Float[Tensor, "h n m"]]:
        """Return the attention matrix of each sequence, rows and columns of real tokens only.

        Sequences of one length are computed together and without a mask. Every mechanism gives the
        same result for a sequence alone as for the sequence in a padded batch.
        """
        self.check_rows()
        q, k = layer.q_proj(self.x), layer.k_proj(self.x if self.context is None else self.context)
        q = q.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)
        k = k.unflatten(-1, (layer.kv_heads, -1)).transpose(1, 2)
        if self.rotary is not None:
            q, k = self.rotary.turn(q), self.rotary.turn(k)
        keep, is_self = self.key_mask, self.context is None
        if keep is None:
            return list(layer.core.weights(q, k, is_causal=self.is_causal).float())
        lengths = keep.sum(1)
        found = [q.new_zeros(q.shape[1], 0 if is_self else q.shape[2], 0)] * len(q)
        for length in lengths[lengths > 0].unique().tolist():
            chosen = (lengths == length).nonzero().flatten()
            keys = _real_tokens(k, keep, chosen)
            queries = _real_tokens(q, keep, chosen) if is_self else q[chosen]
            weights = layer.core.weights(queries, keys, is_causal=self.is_causal)
            for i, matrix in zip(chosen.tolist(), weights.float(), strict=True):
                found[i] = matrix
        return found


def _real_tokens(t: Tensor, keep: Tensor, chosen: Tensor) -> Float[Tensor, "k h l d"]:
    """Return the real tokens of the chosen sequences, which all have the same number of them."""
    rows = t[chosen].transpose(1, 2)[keep[chosen]]
    return rows.unflatten(0, (len(chosen), -1)).transpose(1, 2)


def batch_arguments(
    batch: Batch, sequences: int | None = None
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return a batch as positional and keyword arguments of a forward.

    Args:
        batch: Inputs of the model.
        sequences: Number of sequences to keep; by default all.

    Example:
        >>> batch_arguments({"x": torch.ones(3, 1), "is_causal": True}, 1)
        ((), {'x': tensor([[1.]]), 'is_causal': True})
    """

    def cut(value: object) -> object:
        # all of a tensor is the tensor itself: modules ask whether query, key and value are one
        if sequences is None or not isinstance(value, Tensor):
            return value
        return value[:sequences]

    if isinstance(batch, Mapping):
        return (), {key: cut(value) for key, value in batch.items()}
    return tuple(map(cut, [batch] if isinstance(batch, Tensor) else batch)), {}


def model_arguments(model: object, batch: Batch, *, labels: bool = False) -> Batch:
    """Return a batch for a forward that makes no cache, and with labels only if asked."""
    if not isinstance(batch, Mapping):
        return batch
    given = {k: v for k, v in batch.items() if labels or k != "labels"}
    if getattr(getattr(model, "config", None), "use_cache", False) is True:
        given.setdefault("use_cache", False)
    return given
