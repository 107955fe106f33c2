import copy

import pytest
import torch
from tests.surgery.conftest import text
from torch import nn

from primal_attention.attention import attention_entry, create_attention, list_attentions
from primal_attention.hosts import LayerInputs
from primal_attention.hosts.state_cache import CROPPABLE, StateLayer, cache_numel, state_layer
from primal_attention.surgery import SurgeryConfig, convert

transformers = pytest.importorskip("transformers")


def filled(tokens: int = 3) -> tuple[StateLayer, nn.Module]:
    attention = create_attention("linear", 8, 2).eval()
    layer = StateLayer()
    layer.step(attention, LayerInputs(torch.randn(4, tokens, 8)))
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


def test_the_size_is_bounded_and_masks_see_all_slots():
    layer, attention = filled()
    state = layer.state.numel
    sizes = []
    for n in [1] * 200 + [300] + [1] * 200:
        layer.step(attention, LayerInputs(torch.randn(4, n, 8)))
        sizes.append(layer.numel)
    # the state, two earlier ones, and inputs of width 8 of four sequences
    assert max(sizes) <= 3 * state + 4 * 8 * 2 * CROPPABLE
    assert layer.get_seq_length() == 703
    assert layer.get_mask_sizes(2) == (705, 0)
    layer.reset()
    assert (layer.numel, layer.get_seq_length(), layer.state) == (0, 0, None)


@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_removed_tokens_were_never_there(masked):
    attention = create_attention("linear", 8, 2).eval()
    generator = torch.Generator().manual_seed(1)
    layer, x, keep = StateLayer(), torch.zeros(4, 0, 8), torch.ones(4, 0, dtype=torch.bool)
    first = 0  # tokens that can no longer be removed
    for kind in torch.randint(0, 4, (120,), generator=generator).tolist():
        if kind == 0:
            layer.crop(-int(torch.randint(0, layer.seen - first + 1, (1,), generator=generator)))
            x, keep = x[:, : layer.seen], keep[:, : layer.seen]
            continue
        if kind == 1 and layer.seen:
            index = torch.randint(0, 4, (4,), generator=generator)
            layer.reorder_cache(index)
            x, keep = x[index], keep[index]
        n = (1, 5, 90)[kind - 1]
        new, real = torch.randn(4, n, 8), torch.rand(4, n) < 0.8
        y = layer.step(attention, LayerInputs(new, key_mask=real if masked else None))
        x = torch.cat([x, new], 1)
        keep = torch.cat([keep, real if masked else torch.ones_like(real)], 1)
        want = attention(x, key_mask=keep, is_causal=True)[:, -n:]
        torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-4)
        assert layer.seen == x.shape[1]
        first = max(first, layer.seen - CROPPABLE)


def test_more_tokens_than_are_kept_cannot_be_removed():
    layer, attention = filled(300)
    with pytest.raises(RuntimeError, match="go back to its first 235 tokens: only the last 64"):
        layer.crop(-65)
    layer.crop(0)
    before = layer.state
    layer.crop(-64)
    with pytest.raises(RuntimeError, match="the next step computes the state"):
        _ = layer.state
    layer.step(attention, LayerInputs(torch.randn(4, 1, 8)))
    assert layer.state.seen.tolist() == [237] * 4
    assert before.seen.tolist() == [300] * 4
    for wrong in (1, -238):
        with pytest.raises(ValueError, match="at most 237, got"):
            layer.crop(wrong)
    layer.crop(-1)
    layer.reset()
    assert layer.state is None


def test_a_cache_filled_in_training_says_so():
    layer = StateLayer()
    layer.skip(7)
    with pytest.raises(RuntimeError, match=r"its 7 tokens; call model.eval"):
        _ = layer.state


LEFT = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]])
STATEFUL = [n for n in list_attentions(stateful=True) if attention_entry(n).cost == "n"]


def decoder(
    kind: str,
    attention: str | None,
    layers: object = "all",
    *,
    seed: int = 0,
    options: dict[str, object] | None = None,
) -> nn.Module:
    torch.manual_seed(seed)
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
        convert(model, SurgeryConfig(attention, options or {}, layers=layers))
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


NAMES = ["linear", "primal-dual", "favor", "skyformer-learned", "softmax", "adaptive"]


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_beams_take_their_state_with_them(name):
    model, ids = decoder("llama", name), torch.randint(2, 40, (3, 6))
    options = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 6, "do_sample": False}
    cached, full = (
        model.generate(ids, attention_mask=LEFT, use_cache=use_cache, **options)
        for use_cache in (True, False)
    )
    assert torch.equal(cached, full)


@pytest.mark.parametrize("layers", ["all", "last:1"])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_assisted_decoding_writes_what_greedy_decoding_does(name, layers):
    model, ids = decoder("llama", name, layers), torch.randint(2, 40, (1, 9))
    want = model.generate(ids, max_new_tokens=30, do_sample=False, use_cache=False)
    # a helper that is often wrong, and is itself converted; one that is always right
    other = decoder("llama", "linear", layers, seed=1)
    for options in (
        {"assistant_model": other},
        {"assistant_model": copy.deepcopy(model)},
        {"prompt_lookup_num_tokens": 4},
    ):
        got = model.generate(ids, max_new_tokens=30, do_sample=False, **options)
        assert torch.equal(got, want), options.keys()


@pytest.mark.parametrize("name", [*NAMES, "adaptive of few blocks"])
@torch.no_grad()
def test_a_cropped_cache_continues_as_one_that_never_saw_the_tokens(name):
    few = {"block": 4, "window": 1, "top": 1, "sinks": 2, "exact": 0} if "few" in name else {}
    # in double precision: rounding may choose another block, which is no small change
    model = decoder("llama", name.split()[0], options=few).double()
    ids = torch.randint(2, 40, (2, 150))
    cache, fresh = (transformers.DynamicCache(config=model.config) for _ in range(2))
    model(ids[:, :140], past_key_values=cache)
    for i in range(140, 150):
        model(ids[:, i : i + 1], past_key_values=cache)
    assert cache.is_croppable
    cache.crop(-37)
    assert cache.get_seq_length() == 113
    model(ids[:, :113], past_key_values=fresh)
    copied = copy.deepcopy(cache)
    for part in (ids[:, 120:128], ids[:, 3:4]):
        got, want = (model(part, past_key_values=one).logits for one in (cache, fresh))
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    copied.batch_select_indices(torch.tensor([1]))
    copied.batch_repeat_interleave(2)
    got = model(ids[1:, 120:128].repeat(2, 1), past_key_values=copied).logits
    fresh.crop(-9)
    want = model(ids[:, 120:128], past_key_values=fresh).logits[1:].repeat(2, 1, 1)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_the_cache_of_a_converted_model_does_not_grow():
    model = decoder("llama", "linear")
    sizes, times = [], []
    cache = transformers.DynamicCache(config=model.config)
    for length in (300, 1, 1, 3000):
        model(torch.randint(2, 40, (2, length)), past_key_values=cache)
        sizes.append(cache_numel(cache))
        times.append(cache.get_seq_length())
    assert sizes[0] == sizes[-1]
    assert max(sizes) < 1.1 * sizes[0]
    assert times == [300, 301, 302, 3302]
    plain = transformers.DynamicCache(config=model.config)
    decoder("llama", None)(torch.randint(2, 40, (2, 3000)), past_key_values=plain)
    assert cache_numel(plain) > 5 * sizes[0]


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
