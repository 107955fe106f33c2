"""Decoding converted models: a constant-size state in the place of keys and values.

``generate()`` makes a cache with one layer object per layer of the model. A converted layer puts a
:class:`StateLayer` in its own place of that cache the first time it sees it; layers that were not
converted keep theirs. Nothing has to be asked for, and beams, batches and prompts padded on the
left work as before.

    layer = state_layer(past_key_values, layer_idx)
    y, state = attention.step(x, layer.state or attention.init_state(len(x)), key_mask=keep)
    layer.advance(state, x.shape[1])
"""

from collections.abc import Iterator
from typing import Any

from jaxtyping import Int
from torch import Tensor

from primal_attention.attention.base import State

try:
    from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache
except ImportError as error:
    raise ImportError(
        "Decoding through a cache needs transformers; install primal-attention[hf]."
    ) from error

__all__ = ["StateLayer", "cache_numel", "state_layer"]


class StateLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of a transformers cache that holds a :class:`State` instead of keys and values."""

    is_sliding = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, allocated: int = -1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # masks must also fit the other layers of a cache with room for so many keys
        self.allocated = allocated
        self.seen = 0
        self._state: State | None = None

    @property
    def state(self) -> State | None:
        """What the layer remembers; ``None`` before the first token."""
        if self._state is None and self.seen:
            raise RuntimeError(
                f"This cache was filled by a forward in training mode, which keeps no state of its "
                f"{self.seen} tokens; call model.eval() before decoding."
            )
        return self._state

    def advance(self, state: State | None, tokens: int) -> None:
        """Take the state after ``tokens`` more slots; ``None`` if a training forward kept none."""
        self._state = state
        self.seen += tokens

    @property
    def numel(self) -> int:
        """How many numbers the layer holds."""
        return 0 if self._state is None else self._state.numel

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: there are no keys and values to make room for."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Refuse: this place belongs to a converted layer."""
        raise RuntimeError(
            "This layer of the cache holds the state of a converted attention and takes no keys "
            "and values; make a new cache after converting or reverting a model."
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and offset that masks are made for, as if all keys were kept."""
        return max(self.seen + query_length, self.allocated), 0

    def get_seq_length(self) -> int:
        """Return how many slots have been decoded, padding included."""
        return self.seen

    def get_max_length(self) -> int:
        """Return -1: there is no longest sequence."""
        return -1

    def reset(self) -> None:
        """Forget everything."""
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
        """Refuse to forget the last tokens: sums cannot tell them from the others."""
        if tokens_to_remove:
            raise RuntimeError(
                f"A state of constant size cannot take back {abs(tokens_to_remove)} tokens, as "
                "assisted decoding asks; use greedy search, sampling or beams."
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


def state_layer(cache: Any, layer_idx: int) -> StateLayer:
    """Return the state layer at ``layer_idx``, put there if the place is empty or unused.

    Args:
        cache: The ``past_key_values`` of the model's forward; changed in place.
        layer_idx: Which layer of the model.

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


def cache_numel(cache: Any) -> int:
    """Return how many numbers a cache holds, states, keys and values together.

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
