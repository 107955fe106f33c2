"""Decode with converted models: a state of constant size replaces keys and values.

``generate()`` makes a cache with one object per layer of the model. On its first call a converted
layer replaces its object by a :class:`StateLayer`; other layers keep theirs. The user does nothing.
Beams, batches and prompts padded on the left work as before.

    layer = state_layer(past_key_values, layer_idx)
    y, state = attention.step(x, layer.state or attention.init_state(len(x)), key_mask=keep)
    layer.advance(state, x.shape[1])
"""

from collections.abc import Iterator
from typing import Any

from jaxtyping import Int
from torch import Tensor

from primal_attention.attention.base import State
from primal_attention.hosts.optional import require_transformers

require_transformers()
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache  # noqa: E402

__all__ = ["StateLayer", "cache_numel", "state_layer"]


class StateLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of a transformers cache that holds a :class:`State` instead of keys and values."""

    is_sliding = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, allocated: int = -1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # masks must also fit the other layers of a cache that was allocated for so many keys
        self.allocated = allocated
        self.seen = 0
        self._state: State | None = None

    @property
    def state(self) -> State | None:
        """State after the tokens so far; ``None`` before the first token."""
        if self._state is None and self.seen:
            raise RuntimeError(
                f"This cache comes from a forward pass in training mode, which keeps no state of "
                f"its {self.seen} tokens; call model.eval() before decoding."
            )
        return self._state

    def advance(self, state: State | None, tokens: int) -> None:
        """Store the state after ``tokens`` more tokens; ``None`` in training mode."""
        self._state = state
        self.seen += tokens

    @property
    def numel(self) -> int:
        """Number of elements of the state."""
        return 0 if self._state is None else self._state.numel

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: no keys and values are stored."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Raise: a converted layer stores a state, not keys and values."""
        raise RuntimeError(
            "This layer of the cache holds the state of a converted attention, not keys and "
            "values; make a new cache after converting or reverting a model."
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of masks, as if all keys were stored."""
        return max(self.seen + query_length, self.allocated), 0

    def get_seq_length(self) -> int:
        """Return the number of tokens so far, padding included."""
        return self.seen

    def get_max_length(self) -> int:
        """Return -1: the length is not limited."""
        return -1

    def reset(self) -> None:
        """Remove the state."""
        self.seen, self._state = 0, None

    def reorder_cache(self, beam_idx: Int[Tensor, " k"]) -> None:
        """Keep the sequences that beam search chose."""
        if self._state is not None:
            self._state = self._state.reorder(beam_idx.to(self._state.seen.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        if self._state is not None:
            each = self._state.seen.new_tensor(range(len(self._state.seen)))
            self._state = self._state.reorder(each.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some sequences, given by index or as a mask."""
        if self._state is not None:
            each = self._state.seen.new_tensor(range(len(self._state.seen)))
            self._state = self._state.reorder(each[indices])

    def crop(self, tokens_to_remove: int) -> None:
        """Raise: the last tokens cannot be removed from the sums of a state."""
        if tokens_to_remove:
            raise RuntimeError(
                f"A state of constant size cannot remove its last {abs(tokens_to_remove)} tokens, "
                "as assisted decoding needs; use greedy search, sampling or beams."
            )

    def offload(self) -> None:
        """Move the state to the CPU."""
        if self._state is not None:
            self.device = self._state.seen.device
            self._state = self._state.to("cpu")

    def prefetch(self) -> None:
        """Move the state back to where it was."""
        if self._state is not None and hasattr(self, "device"):
            self._state = self._state.to(self.device)


def state_layer(cache: Cache, layer_idx: int) -> StateLayer:
    """Return the state layer of a cache; make it if that layer of the cache is still empty.

    Args:
        cache: The ``past_key_values`` of the model's forward; changed in place.
        layer_idx: Index of the layer in the model.

    Example:
        >>> from transformers import DynamicCache
        >>> cache = DynamicCache()
        >>> state_layer(cache, 1).get_seq_length()
        0
        >>> [type(layer).__name__ for layer in cache.layers]
        ['DynamicLayer', 'StateLayer']
    """
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    if not isinstance(cache, Cache):
        raise TypeError(
            f"past_key_values must be a transformers Cache, got {type(cache).__name__}; pass "
            "DynamicCache() or nothing."
        )
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= layer_idx:
            cache.layers.append(cache.layer_class_to_replicate())
    if layer_idx >= len(cache.layers):
        raise ValueError(
            f"The cache has {len(cache.layers)} layers, so none with index {layer_idx}; make it "
            "from this model's config."
        )
    layer: Any = cache.layers[layer_idx]
    if isinstance(layer, StateLayer):
        return layer
    if int(layer.get_seq_length()):
        raise RuntimeError(
            f"Layer {layer_idx} of the cache already holds {int(layer.get_seq_length())} keys; "
            "make a new cache after converting a model."
        )
    cache.layers[layer_idx] = state = StateLayer(layer.get_max_length())
    return state


def cache_numel(cache: Cache) -> int:
    """Return the number of elements of all states, keys and values in a cache.

    Example:
        >>> from transformers import DynamicCache
        >>> cache_numel(DynamicCache())
        0
    """
    return sum(_sizes(cache))


def _sizes(cache: Any) -> Iterator[int]:
    for layer in cache.layers:
        if isinstance(layer, StateLayer):
            yield layer.numel
        else:
            yield from (t.numel() for t in (layer.keys, layer.values) if t is not None)
