import pytest
import torch
from torch import nn

from primal_attention.attention import create_attention
from primal_attention.surgery.generation import StateLayer, cache_numel, state_layer

transformers = pytest.importorskip("transformers")


def filled(tokens: int = 3) -> tuple[StateLayer, nn.Module]:
    attention = create_attention("linear", 8, 2).eval()
    layer = StateLayer()
    _, state = attention.step(torch.randn(4, tokens, 8), attention.init_state(4))
    layer.advance(state, tokens)
    return layer, attention


def test_a_state_takes_the_unused_place_of_any_cache():
    config = transformers.LlamaConfig(num_hidden_layers=3)
    caches = [
        transformers.DynamicCache(),
        transformers.DynamicCache(config=config),
        transformers.StaticCache(config=config, max_cache_len=9),
    ]
    for cache in caches:
        layer = state_layer(cache, 1)
        assert state_layer(cache, 1) is layer
        assert layer.state is None
        assert cache_numel(cache) == 0
    inner = transformers.EncoderDecoderCache(caches[0], transformers.DynamicCache())
    assert state_layer(inner, 1) is state_layer(caches[0], 1)


def test_a_used_place_is_refused():
    cache = transformers.DynamicCache()
    cache.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 0)
    with pytest.raises(RuntimeError, match="already holds 2 keys"):
        state_layer(cache, 0)
    with pytest.raises(TypeError, match="got tuple"):
        state_layer(((), ()), 0)
    one = transformers.DynamicCache(config=transformers.LlamaConfig(num_hidden_layers=1))
    with pytest.raises(ValueError, match="none with index 4"):
        state_layer(one, 4)
    with pytest.raises(RuntimeError, match="no keys and"):
        StateLayer().update(torch.ones(1), torch.ones(1))


def test_sequences_are_reordered_repeated_and_selected():
    layer, _ = filled()
    assert layer.state is not None
    before = layer.state.tensors[0]
    layer.reorder_cache(torch.tensor([3, 3, 0, 1]))
    assert torch.equal(layer.state.tensors[0], before[[3, 3, 0, 1]])
    layer.batch_select_indices(torch.tensor([True, False, True, False]))
    assert torch.equal(layer.state.tensors[0], before[[3, 0]])
    layer.batch_repeat_interleave(2)
    assert torch.equal(layer.state.tensors[0], before[[3, 3, 0, 0]])
    layer.offload()
    layer.prefetch()
    assert torch.equal(layer.state.tensors[0], before[[3, 3, 0, 0]])


def test_the_size_is_constant_and_masks_see_all_slots():
    layer, attention = filled()
    size = layer.numel
    for _ in range(5):
        _, state = attention.step(torch.randn(4, 1, 8), layer.state)
        layer.advance(state, 1)
    assert layer.numel == size
    assert layer.get_seq_length() == 8
    assert layer.get_mask_sizes(2) == (10, 0)
    layer.reset()
    assert (layer.numel, layer.get_seq_length(), layer.state) == (0, 0, None)


def test_tokens_cannot_be_taken_back():
    layer, _ = filled()
    layer.crop(0)
    with pytest.raises(RuntimeError, match="cannot take back 2 tokens"):
        layer.crop(-2)


def test_a_cache_filled_in_training_says_so():
    layer = StateLayer()
    layer.advance(None, 7)
    with pytest.raises(RuntimeError, match=r"its 7 tokens; call model.eval"):
        _ = layer.state
