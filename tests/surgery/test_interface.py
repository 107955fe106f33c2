import pytest
import torch

from primal_attention.attention import create_attention, list_attentions
from primal_attention.surgery.interface import (
    register_implementation,
    register_implementations,
    run_core,
)

transformers = pytest.importorskip("transformers")

NAMES = [name.removeprefix("primal:") for name in register_implementations()]
CAUSAL = [name for name in NAMES if name in list_attentions(causal=True)]
KEEP = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 1]])


def bert(**changes: object) -> torch.nn.Module:
    config = transformers.BertConfig(
        vocab_size=30,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=20,
        max_position_embeddings=32,
        initializer_range=0.4,  # far from the uniform weights of a fresh model
        **changes,
    )
    return transformers.BertModel(config).eval()


def llama(**changes: object) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=30,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=20,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        initializer_range=0.4,
        **changes,
    )
    return transformers.LlamaForCausalLM(config).eval()


def test_the_names_are_the_mechanisms_without_weights():
    own = {"kernelized", "linformer", "primal", "schoenbat", "skyformer-learned"}
    assert {"cosformer", "favor", "flow", "gaussian", "linear", "skyformer", "softmax"} <= {*NAMES}
    assert not own & {*NAMES}


@pytest.mark.parametrize("own", ["sdpa", "eager"])
@pytest.mark.parametrize("keep", [KEEP, KEEP.flip(1), None], ids=["left", "right", "none"])
@torch.no_grad()
def test_softmax_by_name_is_the_encoders_own_attention(own, keep):
    model, ids = bert(), torch.randint(1, 30, (3, 7))
    model.set_attn_implementation(own)
    want = model(ids, attention_mask=keep).last_hidden_state
    model.set_attn_implementation("primal:softmax")
    got = model(ids, attention_mask=keep).last_hidden_state
    real = torch.ones(3, 7, dtype=torch.bool) if keep is None else keep.bool()
    torch.testing.assert_close(got[real], want[real])


@pytest.mark.parametrize("keep", [KEEP, None], ids=["left", "none"])
@torch.no_grad()
def test_softmax_by_name_is_the_decoders_own_attention(keep):
    for model in (llama(), llama(head_dim=6)):
        ids = torch.randint(2, 30, (3, 7))
        want = model(ids, attention_mask=keep).logits
        model.set_attn_implementation("primal:softmax")
        got = model(ids, attention_mask=keep).logits
        real = torch.ones(3, 7, dtype=torch.bool) if keep is None else keep.bool()
        torch.testing.assert_close(got[real], want[real])


@torch.no_grad()
def test_another_scale_of_the_scores_is_honoured():
    config = transformers.GPT2Config(
        vocab_size=30, n_embd=16, n_layer=3, n_head=2, scale_attn_by_inverse_layer_idx=True
    )
    model, ids = transformers.GPT2Model(config).eval(), torch.randint(0, 30, (2, 7))
    want = model(ids).last_hidden_state
    model.set_attn_implementation("primal:softmax")
    torch.testing.assert_close(model(ids).last_hidden_state, want)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_name_is_our_layer_with_the_same_weights(name):
    options = {"kernel_size": None} if name == "nystromformer" else {}
    model, seen = bert(), {}
    module = model.encoder.layer[0].attention.self
    module.register_forward_hook(
        lambda m, args, kwargs, out: seen.update(x=args[0], y=out[0]), with_kwargs=True
    )
    model.set_attn_implementation(f"primal:{name}")
    model(torch.randint(1, 30, (3, 7)), attention_mask=KEEP)
    torch.manual_seed(0)  # of random features
    ours = create_attention(name, 16, 4, **options)
    for mine, theirs in (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value")):
        getattr(ours, mine).load_state_dict(getattr(module, theirs).state_dict())
    torch.nn.init.eye_(ours.out_proj.weight)
    torch.nn.init.zeros_(ours.out_proj.bias)
    keep = KEEP.bool()
    want = ours(seen["x"], key_mask=keep)
    torch.testing.assert_close(seen["y"][keep], want[keep], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CAUSAL)
@torch.no_grad()
def test_order_and_padding_hold_in_a_decoder(name):
    model, ids = llama(), torch.randint(2, 30, (3, 7))
    model.set_attn_implementation(f"primal:{name}")
    position = (KEEP.cumsum(1) - 1).clamp_min(0)
    whole = model(ids, attention_mask=KEEP, position_ids=position).logits
    changed = ids.clone()
    changed[:, -1] = 1
    again = model(changed, attention_mask=KEEP, position_ids=position).logits
    real = KEEP[:, :-1].bool()
    torch.testing.assert_close(again[:, :-1][real], whole[:, :-1][real])
    for i, n in enumerate(KEEP.sum(1).tolist()):
        alone = model(ids[i : i + 1, 7 - n :]).logits
        torch.testing.assert_close(alone[0], whole[i, 7 - n :], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [n for n in CAUSAL if n != "flow"])
@torch.no_grad()
def test_greedy_decoding_with_the_default_cache_is_the_full_forward(name):
    model, ids = llama(), torch.randint(2, 30, (3, 7))
    model.set_attn_implementation(f"primal:{name}")
    cached, full = (
        model.generate(
            ids, attention_mask=KEEP, max_new_tokens=6, do_sample=False, use_cache=use_cache
        )
        for use_cache in (True, False)
    )
    assert torch.equal(cached, full)


@torch.no_grad()
def test_what_cannot_be_honoured_is_refused():
    model, ids = llama(), torch.randint(2, 30, (2, 7))
    model.set_attn_implementation("primal:skyformer")
    with pytest.raises(ValueError, match="has no causal form; use one of: ") as caught:
        model(ids)
    offered = str(caught.value).partition("use one of: ")[2].rstrip(".").split(", ")
    assert offered == [f"primal:{name}" for name in CAUSAL]
    model.set_attn_implementation("primal:flow")
    with pytest.raises(ValueError, match="use_cache=False"):
        model.generate(ids, max_new_tokens=3, do_sample=False)
    model.set_attn_implementation("primal:linear")
    with pytest.raises(ValueError, match="default cache"):
        model.generate(ids, max_new_tokens=3, do_sample=False, cache_implementation="static")
    with pytest.raises(ValueError, match="packed sequences"):
        model(ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3]] * 2), use_cache=False)
    with pytest.raises(ValueError, match="over pairs of tokens"):
        model(ids, attention_mask=torch.ones(2, 1, 7, 7, dtype=torch.bool))
    mistral = transformers.MistralConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=20, sliding_window=4,
    )  # fmt: skip
    windowed = transformers.MistralForCausalLM(mistral).eval()
    windowed.set_attn_implementation("primal:linear")
    with pytest.raises(ValueError, match="windows"):
        windowed(ids)


def test_mechanisms_with_weights_are_refused():
    with pytest.raises(ValueError, match=r"has weights \(theta, gamma\)"):
        register_implementation("schoenbat")
    with pytest.raises(ValueError, match="not a function of queries, keys and values"):
        register_implementation("primal")
    with pytest.raises(ValueError, match="has weights"):
        register_implementation("gaussian", qk_norm=True)


def test_options_get_a_name_of_their_own():
    assert register_implementation("skyformer", alias="primal:few", num_landmarks=2) == "primal:few"
    model, ids = bert(), torch.randint(1, 30, (1, 20))
    outputs = {}
    for name in ("primal:few", "primal:skyformer", "primal:gaussian"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            outputs[name] = model(ids).last_hidden_state
    exact = outputs.pop("primal:gaussian")
    few, many = ((exact - y).norm() for y in outputs.values())
    assert many < few / 5


def test_gradients_flow_and_dropout_drops():
    model = bert(attention_probs_dropout_prob=0.5, hidden_dropout_prob=0.0).train()
    model.set_attn_implementation("primal:linear")
    ids = torch.randint(1, 30, (2, 5))
    first, second = model(ids).last_hidden_state, model(ids).last_hidden_state
    assert not torch.equal(first, second)
    first.square().sum().backward()
    assert model.encoder.layer[0].attention.self.query.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("name", [n for n in CAUSAL if n != "flow"])
def test_the_last_queries_alone_are_the_last_rows(name):
    core, keep = create_attention(name, 16, 4).core, KEEP.bool()
    q, k, v = (torch.randn(3, 4, 7, 4) for _ in range(3))
    whole = run_core(core, q, k, v, key_mask=keep, is_causal=True)
    last = run_core(core, q[:, :, -2:], k, v, key_mask=keep, is_causal=True)
    torch.testing.assert_close(last, whole[:, :, -2:])


def test_nan_in_padding_reaches_nothing():
    core = create_attention("cosformer", 16, 4).core
    q, k, v = (torch.randn(3, 4, 7, 4) for _ in range(3))
    keep = KEEP.bool()
    bad = [t.masked_fill(~keep[:, None, :, None], float("nan")) for t in (q, k, v)]
    want, got = (run_core(core, *t, key_mask=keep, is_causal=True) for t in ((q, k, v), bad))
    torch.testing.assert_close(got[:, :, -2:], want[:, :, -2:])
    assert got.isfinite().all()
