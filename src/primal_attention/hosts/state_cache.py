"""Decode with converted models: a state of constant size replaces keys and values.

``generate()`` makes a cache with one object per layer of the model. On its first call a converted
layer replaces its object by a :class:`StateLayer`; other layers keep theirs. The user does nothing.
Beams, batches, prompts padded on the left and assisted decoding work as before.

    layer = state_layer(past_key_values, layer_idx)
    y = layer.step(attention, LayerInputs(x, key_mask=keep))

Assisted decoding removes tokens again. Sums cannot be undone, so a layer keeps two earlier states
and the inputs since the first of them; removing tokens goes back to one of them and repeats the
inputs that stay. Attention that stores keys removes keys.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from primal_attention.attention import Attention, Rotary
from primal_attention.attention.base import State
from primal_attention.hosts.inputs import LayerInputs
from primal_attention.hosts.optional import require_transformers

require_transformers()
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache  # noqa: E402

__all__ = ["CROPPABLE", "StateLayer", "cache_numel", "state_layer"]

CROPPABLE = 64
"""Last tokens that can always be removed from a state."""


class _Mark(NamedTuple):
    """The state after the first ``seen`` tokens; ``None`` before the first token."""

    seen: int
    state: State | None


class StateLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of a transformers cache that holds a :class:`State` instead of keys and values."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, allocated: int = -1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # masks must also fit the other layers of a cache that was allocated for so many keys
        self.allocated = allocated
        self.seen = 0
        self._state: State | None = None
        self._marks: list[_Mark] = []  # at most two, the oldest first
        self._inputs: LayerInputs | None = None  # those since the oldest mark
        self._is_cropped = False  # until the next step the state has tokens that were removed
        self._has_keys = False

    @property
    def state(self) -> State | None:
        """State after the tokens so far; ``None`` before the first token."""
        if self._is_cropped:
            raise RuntimeError("Tokens were removed; the next step computes the state. Call step.")
        if self._state is None and self.seen:
            raise RuntimeError(
                "This cache comes from a forward pass in training mode or over packed documents, "
                f"which keeps no state of its {self.seen} tokens; call model.eval() and pass one "
                "document a row before decoding."
            )
        return self._state

    def step(self, attention: Attention, inputs: LayerInputs) -> Tensor:
        """Return the outputs of the next tokens, and keep the state after them.

        Args:
            attention: The attention of this layer.
            inputs: The new tokens, their mask and their rotary positions.
        """
        crop = getattr(getattr(attention, "core", None), "crop", None)
        self._has_keys = crop is not None
        if self._is_cropped:
            self._is_cropped = False
            if crop is not None:
                self._state = crop(self._state, self.seen)
            else:
                self._repeat(attention)
        if crop is not None:
            return self._run(attention, inputs)
        first = inputs.x.shape[1] - CROPPABLE
        if first <= 0:
            self._remember(inputs)
            return self._run(attention, inputs)
        # of a prompt only the end can be removed, so the inputs of the rest are not kept
        before = self._run(attention, _cut(inputs, 0, first))
        self._marks, self._inputs = [], None
        return torch.cat([before, self.step(attention, _cut(inputs, first))], 1)

    def _run(self, attention: Attention, inputs: LayerInputs) -> Tensor:
        state = self.state
        if state is None:
            state = attention.init_state(inputs.x.shape[0])
        also = {} if inputs.rotary is None else {"rotary": inputs.rotary}
        y, self._state = attention.step(inputs.x, state, key_mask=inputs.key_mask, **also)
        self.seen += inputs.x.shape[1]
        return y

    def _remember(self, inputs: LayerInputs) -> None:
        """Keep inputs that come next, and at times the state before them."""
        if not self._marks or self.seen - self._marks[-1].seen >= CROPPABLE:
            if self._inputs is not None and len(self._marks) > 1:
                self._inputs = _cut(self._inputs, self._marks[1].seen - self._marks[0].seen)
            self._marks = [*self._marks[-1:], _Mark(self.seen, self.state)]
        self._inputs = inputs if self._inputs is None else _join(self._inputs, inputs)

    def _repeat(self, attention: Attention) -> None:
        """Compute the state from the last mark and the inputs after it."""
        length, last = self.seen, self._marks[-1]
        self._state, self.seen = last.state, last.seen
        if self._inputs is not None and length > last.seen:
            self._run(attention, _cut(self._inputs, last.seen - self._marks[0].seen))

    def skip(self, tokens: int) -> None:
        """Count tokens of a forward that keeps no state: in training, or over documents."""
        self.seen += tokens

    @property
    def numel(self) -> int:
        """Number of elements of all states and inputs that are kept."""
        states = [self._state, *(mark.state for mark in self._marks)]
        inputs = [] if self._inputs is None else _tensors(self._inputs)
        return sum(s.numel for s in states if s is not None) + sum(t.numel() for t in inputs)

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
        self.seen, self._state, self._is_cropped = 0, None, False
        self._marks, self._inputs = [], None

    def reorder_cache(self, beam_idx: Int[Tensor, " k"]) -> None:
        """Keep the sequences that beam search chose."""
        if self._state is None:
            return
        index = beam_idx.to(self._state.seen.device)
        self._state = self._state.reorder(index)
        self._marks = [
            _Mark(seen, None if state is None else state.reorder(index))
            for seen, state in self._marks
        ]
        if self._inputs is not None:
            self._inputs = _take(self._inputs, index)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        if self._state is not None:
            each = torch.arange(len(self._state.seen), device=self._state.seen.device)
            self.reorder_cache(each.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some sequences, given by index or as a mask."""
        if self._state is not None:
            each = torch.arange(len(self._state.seen), device=self._state.seen.device)
            self.reorder_cache(each[indices.to(each.device)])

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens.

        Args:
            tokens_to_remove: Their number, negative as in every layer of transformers.

        Raises:
            RuntimeError: If a state of constant size would lose more than it can.
        """
        if tokens_to_remove > 0 or tokens_to_remove < -self.seen:
            raise ValueError(
                f"crop takes minus the number of tokens to remove, at most {self.seen}, got "
                f"{tokens_to_remove}; write crop(-3) to remove three."
            )
        if not tokens_to_remove:
            return
        length = self.seen + tokens_to_remove
        if not self._has_keys:
            marks = [mark for mark in self._marks if mark.seen <= length]
            if not marks or self._inputs is None:
                raise RuntimeError(
                    f"The state of a converted layer cannot go back to its first {length} tokens: "
                    f"only the last {CROPPABLE} tokens can be removed. Lower num_assistant_tokens, "
                    "or start with a new cache."
                )
            self._inputs = _cut(self._inputs, 0, length - marks[0].seen)
            self._marks = marks
        self.seen, self._is_cropped = length, True

    def offload(self) -> None:
        """Move everything to the CPU."""
        if self._state is not None:
            self.device = self._state.seen.device
            self._move("cpu")

    def prefetch(self) -> None:
        """Move everything back to where it was."""
        if self._state is not None and hasattr(self, "device"):
            self._move(self.device)

    def _move(self, device: torch.device | str) -> None:
        self._state = None if self._state is None else self._state.to(device)
        self._marks = [
            _Mark(seen, None if state is None else state.to(device)) for seen, state in self._marks
        ]
        if self._inputs is not None:
            x, keep, rotary = self._inputs.x, self._inputs.key_mask, self._inputs.rotary
            self._inputs = self._inputs._replace(
                x=x.to(device),
                key_mask=None if keep is None else keep.to(device),
                rotary=None if rotary is None else Rotary(*(t.to(device) for t in rotary)),
            )


def _tensors(inputs: LayerInputs) -> list[Tensor]:
    found = [inputs.x, inputs.key_mask, *(inputs.rotary or ())]
    return [tensor for tensor in found if tensor is not None]


def _cut(inputs: LayerInputs, start: int, stop: int | None = None) -> LayerInputs:
    """Return some of the tokens."""
    part, keep, rotary = slice(start, stop), inputs.key_mask, inputs.rotary
    return inputs._replace(
        x=inputs.x[:, part],
        key_mask=None if keep is None else keep[:, part],
        rotary=None if rotary is None else Rotary(*(t[:, part] for t in rotary)),
    )


def _take(inputs: LayerInputs, index: Tensor) -> LayerInputs:
    """Return the tokens of some sequences."""
    keep, rotary = inputs.key_mask, inputs.rotary
    if rotary is not None and len(rotary.cos) > 1:  # otherwise all sequences share the angles
        rotary = Rotary(*(t[index] for t in rotary))
    keep = None if keep is None else keep[index]
    return inputs._replace(x=inputs.x[index], key_mask=keep, rotary=rotary)


def _join(first: LayerInputs, second: LayerInputs) -> LayerInputs:
    """Return all tokens of two inputs."""
    keep, rotary = None, None
    if first.key_mask is not None or second.key_mask is not None:
        keep = torch.cat([_mask(first), _mask(second)], 1)
    if first.rotary is not None and second.rotary is not None:
        b = max(len(first.rotary.cos), len(second.rotary.cos))
        pairs = zip(first.rotary, second.rotary, strict=True)
        rotary = Rotary(*(torch.cat([t.expand(b, -1, -1) for t in pair], 1) for pair in pairs))
    x = torch.cat([first.x, second.x], 1)
    return first._replace(x=x, key_mask=keep, rotary=rotary)


def _mask(inputs: LayerInputs) -> Tensor:
    if inputs.key_mask is not None:
        return inputs.key_mask
    return torch.ones(inputs.x.shape[:2], dtype=torch.bool, device=inputs.x.device)


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
