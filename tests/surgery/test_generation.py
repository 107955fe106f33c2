import pytest
import torch
from tests.surgery.conftest import text
from torch import nn

from primal_attention.attention import attention_entry, create_attention, list_attentions
from primal_attention.hosts.state_cache import StateLayer, cache_numel, state_layer
from primal_attention.surgery import SurgeryConfig, convert

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
    with pytest.raises(RuntimeError, match="not keys and"):
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
    with pytest.raises(RuntimeError, match="cannot remove its last 2 tokens"):
        layer.crop(-2)


def test_a_cache_filled_in_training_says_so():
    layer = StateLayer()
    layer.advance(None, 7)
    with pytest.raises(RuntimeError, match=r"its 7 tokens; call model.eval"):
        _ = layer.state


LEFT = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]])
STATEFUL = [n for n in list_attentions(stateful=True) if attention_entry(n).cost == "n"]


def decoder(kind: str, attention: str | None, layers: object = "all") -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=64, **sizes)
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, **sizes,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(12)
    if attention is not None:
        convert(model, SurgeryConfig(attention, layers=layers))
    return model.eval()


def decode(model: nn.Module, ids: torch.Tensor, keep: torch.Tensor, **options: object):
    found = model.generate(
        ids, attention_mask=keep, max_new_tokens=7, do_sample=False,
        return_dict_in_generate=True, output_logits=True, **options,
    )  # fmt: skip
    return found.sequences, torch.stack(found.logits)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("name", STATEFUL)
@torch.no_grad()
def test_generate_with_a_state_is_the_full_forward(kind, name):
    model, ids = decoder(kind, name), torch.randint(2, 40, (3, 6))
    sequences, logits = decode(model, ids, LEFT)
    full, wanted = decode(model, ids, LEFT, use_cache=False)
    assert torch.equal(sequences, full)
    torch.testing.assert_close(logits, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("layers", ["all", "last:1", 0])
@torch.no_grad()
def test_generate_with_some_layers_converted_is_the_full_forward(layers):
    model, ids = decoder("llama", "primal-dual", layers), torch.randint(2, 40, (3, 6))
    want = decode(model, ids, LEFT, use_cache=False)
    for options in ({}, {"cache_implementation": "static", "disable_compile": True}):
        got = decode(model, ids, LEFT, **options)
        assert torch.equal(got[0], want[0])
        torch.testing.assert_close(got[1], want[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["linear", "primal-dual", "skyformer-learned"])
@torch.no_grad()
def test_beams_take_their_state_with_them(name):
    model, ids = decoder("llama", name), torch.randint(2, 40, (3, 6))
    options = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 6, "do_sample": False}
    cached, full = (
        model.generate(ids, attention_mask=LEFT, use_cache=use_cache, **options)
        for use_cache in (True, False)
    )
    assert torch.equal(cached, full)


@torch.no_grad()
def test_the_cache_of_a_converted_model_does_not_grow():
    model = decoder("llama", "linear")
    sizes, times = [], []
    cache = transformers.DynamicCache(config=model.config)
    for length in (5, 1, 1, 300):
        model(torch.randint(2, 40, (2, length)), past_key_values=cache)
        sizes.append(cache_numel(cache))
        times.append(cache.get_seq_length())
    assert len(set(sizes)) == 1
    assert times == [5, 6, 7, 307]
    plain = transformers.DynamicCache(config=model.config)
    decoder("llama", None)(torch.randint(2, 40, (2, 300)), past_key_values=plain)
    assert cache_numel(plain) > sizes[0]


@pytest.mark.parametrize("name", ["softmax", "adaptive"])
@pytest.mark.parametrize("groups", [1, 2])
@torch.no_grad()
def test_grouped_keys_are_not_repeated_in_weights_or_state(name, groups):
    model = text("LlamaForCausalLM", num_key_value_heads=groups)
    ids = torch.randint(3, 50, (2, 40))
    before, size = model(ids).logits, sum(p.numel() for p in model.parameters())
    written = model.generate(ids[:, :9], max_new_tokens=12, do_sample=False)
    (note,) = {t.note for t in convert(model, SurgeryConfig(name)).targets}
    assert note == ""
    assert sum(p.numel() for p in model.parameters()) == size
    torch.testing.assert_close(model(ids).logits, before)
    assert torch.equal(model.generate(ids[:, :9], max_new_tokens=12, do_sample=False), written)
    cache = transformers.DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    keys = cache.layers[0].state.tensors[0]
    assert keys.shape[1] == groups
