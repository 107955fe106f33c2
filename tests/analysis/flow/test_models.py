"""Models of transformers in known shapes: modalities are found, and numbers are those of eager."""

import pytest
import torch
from tests.analysis.flow import models
from torch import nn
from torch.overrides import TorchFunctionMode

from primal_attention.analysis import FlowOptions, analysis_entry
from primal_attention.analysis.flow import (
    FlowDetails,
    blind_scores,
    modality_flow,
    replace_modality,
)
from primal_attention.models import EncoderClassifier, EncoderConfig

transformers = pytest.importorskip("transformers")


def close(found, want, tolerance=1e-5):
    torch.testing.assert_close(found.double(), want.double(), atol=tolerance, rtol=0)


def eager(model, batch):
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found = model(**batch, output_attentions=True)
    model.set_attn_implementation(before)
    return found


def joint_ids(batch, image_mask):
    """Return the modality of words and image tokens, padding -1."""
    words = torch.where(batch["attention_mask"].bool(), 0, -1)
    return torch.cat([words, torch.where(image_mask.bool(), 1, -1)], 1)


@pytest.mark.parametrize("special", ["separate", "text", "drop"])
def test_vilt_equals_its_returned_attentions(special):  # M9
    model, batch = models.vilt()
    found = modality_flow(model, batch, special=special)
    image = torch.ones(2, 17)
    image[1, 9:] = 0  # half of the second image is padding, behind a [CLS] and eight patches
    ids = joint_ids(batch, image)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    mask[:, models.WORDS] = True
    want = modality_flow(eager(model, batch).attentions, ids, special_ids=mask, special=special)
    for name in ("imf", "flow", "lift", "chance", "by_head"):
        close(getattr(found, name), getattr(want, name))
    assert found.names[:2] == ("text", "image")
    assert len(found.layers) == 2
    # weights are large enough that this is no comparison of uniform with uniform
    assert float((found.lift[:, 0, 1] - 1).abs().max()) > 0.05


def test_vilt_imf_is_that_of_the_formula():  # M9
    model, batch = models.vilt()
    batch["pixel_mask"][:] = 1
    batch["attention_mask"][:] = 1
    found = modality_flow(model, batch, special="text")
    for imf, weights in zip(found.imf, eager(model, batch).attentions, strict=True):
        n, n_t = weights.shape[-1], models.WORDS
        crossing = weights[:, :, :n_t, n_t:].sum() + weights[:, :, n_t:, :n_t].sum()
        assert float(imf) == pytest.approx(float(crossing / (2 * 2 * n)), abs=1e-5)


def test_visual_bert_equals_its_returned_attentions():  # M9
    model, batch = models.visual_bert()
    found = modality_flow(model, batch)
    ids = joint_ids(batch, batch["visual_attention_mask"])
    want = modality_flow(eager(model, batch).attentions, ids)
    for name in ("imf", "flow", "lift", "by_head"):
        close(getattr(found, name), getattr(want, name))


def test_a_decoder_with_an_image_prefix_equals_its_returned_attentions():  # M9
    model, batch = models.llava()
    assert model.config._attn_implementation == "sdpa"
    found = modality_flow(model, batch, special="text")
    ids = torch.where(batch["input_ids"] == models.IMAGE_TOKEN, 1, 0)
    ids = torch.where(batch["attention_mask"].bool(), ids, -1)
    want = modality_flow(eager(model, batch).attentions, ids)
    for name in ("imf", "flow", "chance", "lift", "by_head"):
        close(getattr(found, name), getattr(want, name))
    assert len(found.layers) == 2  # the layers of the vision tower are left out
    # image tokens at 2 to 5 see two words before them
    first = torch.tensor([2 / 3, 2 / 4, 2 / 5, 2 / 6]).mean()
    assert float(found.chance[0, 1, 0]) == pytest.approx(float(first), abs=1e-6)
    # the first token is a start token, and special by default
    apart = modality_flow(model, batch)
    assert apart.names == ("text", "image", "special")


def test_images_laid_end_to_end_and_tokens_around_them():  # M9
    model, batch = models.qwen2_vl()
    found = modality_flow(model, batch)
    ids = torch.tensor([0, 2, 1, 1, 1, 1, 2, 0, 0, 0])
    want = modality_flow(eager(model, batch).attentions, ids, names=["text", "image", "rest"])
    for name in ("imf", "flow", "chance", "lift"):
        close(getattr(found, name), getattr(want, name))
    assert found.names == ("text", "image", "special")
    entry = analysis_entry("flow")  # images of all samples in one tensor: the batch stays whole
    assert entry.run(model, [batch], FlowOptions(sequences=1)).samples == 2


def test_a_prefix_that_sees_itself_counts_as_visible():
    model, batch = models.pali_gemma()
    found = modality_flow(model, batch, special="text")
    close(found.chance[:, 1, 1], torch.full((2,), 4 / 7))  # 4 image tokens of a prefix of 7
    later = sum(4 / n for n in (8, 9, 10))
    close(found.chance[:, 0, 1], torch.full((2,), (3 * 4 / 7 + later) / 6))
    ids = torch.where(batch["input_ids"] == models.IMAGE_TOKEN, 1, 0)
    close(found.flow, modality_flow(eager(model, batch).attentions, ids).flow)


def test_a_decoder_after_a_cache():
    model, batch = models.llava()
    batch = {key: value[:1] for key, value in batch.items()}
    whole = modality_flow(model, batch, special="text")
    with torch.no_grad():
        cache = model(
            input_ids=batch["input_ids"][:, :8], pixel_values=batch["pixel_values"]
        ).past_key_values
    ids = torch.where(batch["input_ids"] == models.IMAGE_TOKEN, 1, 0)
    rest = {"input_ids": batch["input_ids"][:, 8:], "past_key_values": cache}
    found = modality_flow(model, rest, ids)
    attentions = eager(model, batch).attentions
    want = modality_flow([a[:, :, 8:] for a in attentions], ids)
    close(found.flow, want.flow)
    assert float(found.chance[0, 0, 1]) == pytest.approx((4 / 9 + 4 / 10 + 4 / 11) / 3, abs=1e-6)
    assert not torch.allclose(found.flow, whole.flow)


def test_lxmert_weighs_self_and_cross_attention_by_the_norms_of_their_outputs():  # M9
    model, batch = models.lxmert()
    found = modality_flow(model, batch)
    block, outputs = model.encoder.x_layers[0], {}
    names = ("visual_attention", "lang_self_att")

    def record(name):
        def hook(_, args):
            outputs.setdefault(name, args[0])  # the first call: words attend

        return hook

    hooks = [getattr(block, name).output.register_forward_pre_hook(record(name)) for name in names]
    with torch.no_grad():
        model(**batch)
    for hook in hooks:
        hook.remove()
    cross, own = (
        (outputs[name] @ getattr(block, name).output.dense.weight.T).norm(dim=-1) for name in names
    )
    share = [(cross / (cross + own))[i][batch["attention_mask"][i].bool()].mean() for i in range(2)]
    close(found.direction("text", "image")[0], torch.stack(share).mean())
    torch.testing.assert_close(found.flow.sum(-1), torch.ones(2, 2).double())
    apart = modality_flow(model, batch, special_ids=[int(batch["input_ids"][0, 2])])
    assert apart.names[-1] == "special"
    torch.testing.assert_close(apart.flow[:, :2].sum(-1), torch.ones(2, 2).double())


def test_lxmert_rows_are_the_returned_cross_attention():  # M9
    from primal_attention.analysis.flow import find_layout

    model, batch = models.lxmert()
    layout = find_layout(model, batch, list)
    with torch.no_grad():
        cross = model(**batch, output_attentions=True).cross_encoder_attentions
    for layer, weights in zip(layout.layers, cross, strict=True):
        rows = layer.weights(1)[:, :5, 5:]  # five words, three visual tokens
        close(rows / rows.sum(-1, keepdim=True), weights[1, :, :5, :3])
        torch.testing.assert_close(layer.weights(1).sum(-1), torch.ones(2, 8).double())


def test_norms_of_a_block_are_those_of_each_attention():
    model, batch = models.lxmert()
    found = modality_flow(model, batch, weighting="norm")
    block, calls = model.encoder.x_layers[0], {}
    names = ("visual_attention.att", "lang_self_att.self")

    def record(name):
        def hook(_, args):
            calls.setdefault(name, args)  # the first call: words attend

        return hook

    hooks = [block.get_submodule(n).register_forward_pre_hook(record(n)) for n in names]
    with torch.no_grad():
        model(**batch)
        for hook in hooks:
            hook.remove()
        received = []
        for name in names:
            module, (queries, context, mask) = block.get_submodule(name), calls[name]
            weights = module(queries, context, mask, output_attentions=True)[1]
            values = module.value(context).unflatten(-1, (2, 8))
            out = block.get_submodule(name.split(".")[0]).output.dense.weight.unflatten(-1, (2, 8))
            norms = torch.einsum("bmhv,chv->bhmc", values, out).norm(dim=-1)
            received.append((weights * norms[:, :, None]).sum(-1).mean(1))  # [b words]
    keep = batch["attention_mask"]
    cross, own = ((t * keep).sum(1) for t in received)
    close(found.direction("text", "image")[0], (cross / (cross + own)).mean())


def test_blip_words_attend_to_words_and_image():
    model, batch = models.blip()
    found = modality_flow(model, batch)
    assert found.layers == ("text_encoder.encoder.layer.0", "text_encoder.encoder.layer.1")
    assert 0 < float(found.direction("text", "image").mean()) < 1
    assert not found.has_lift[:, 1].any()
    assert "image tokens cannot see text tokens" in found.verdict()
    with pytest.raises(ValueError, match="use mode='layer'"):
        modality_flow(model, batch, mode="rollout")


def test_two_towers_are_zero_by_construction():
    model, batch = models.clip()
    for weighting in ("attention", "norm", "gradient"):
        found = modality_flow(model, batch, weighting=weighting)
        assert not found.imf.any()
        assert "0 by construction" in found.verdict()
    assert float(found.chance[0, 0, 1]) > 0


def test_norms_use_values_and_output_map():
    model, batch = models.visual_bert()
    batch["attention_mask"][:] = 1
    batch["visual_attention_mask"][:] = 1
    found = modality_flow(model, batch, weighting="norm")
    layer = model.encoder.layer[0].attention
    values = []
    hook = layer.self.value.register_forward_hook(lambda *args: values.append(args[2]))
    weights = eager(model, batch).attentions[0]
    hook.remove()
    vectors = torch.einsum(
        "bmhv,chv->bhmc",
        values[0].unflatten(-1, (2, 8)),
        layer.output.dense.weight.unflatten(-1, (2, 8)),
    )
    want = modality_flow(
        [(weights * vectors.norm(dim=-1)[:, :, None]).detach()],
        torch.tensor([0] * 7 + [1] * 4),
        weighting="gradient",
        details=FlowDetails(gradients=[torch.ones(2, 2, 11, 11)]),
    )
    close(found.flow[:1], want.flow)


def test_gradients_of_a_model_are_those_of_autograd():
    model, batch = models.llava()
    found = modality_flow(model, batch, weighting="gradient", special="text")
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    output = model(**batch, output_attentions=True)
    weights = output.attentions
    slopes = torch.autograd.grad(output.logits.flatten(1).amax(1).sum(), weights)
    ids = torch.where(batch["input_ids"] == models.IMAGE_TOKEN, 1, 0)
    ids = torch.where(batch["attention_mask"].bool(), ids, -1)
    weights, slopes = ([t.detach() for t in group] for group in (weights, slopes))
    want = modality_flow(weights, ids, weighting="gradient", details=FlowDetails(gradients=slopes))
    close(found.flow, want.flow)


class Softmax(TorchFunctionMode):
    """Keeps what every softmax returns."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == "softmax":
            self.found.append(result)
        return result


def test_gradients_of_our_layers_are_those_of_the_weights():
    config = EncoderConfig(num_classes=3, num_features=4, dim=16, attention="softmax-explicit")
    torch.manual_seed(1)
    model = models.randomize(EncoderClassifier(config)).double()
    x, ids = torch.randn(2, 7, 4).double(), torch.tensor([0, 0, 0, 1, 1, 1, 1])
    found = modality_flow(model, {"x": x}, ids, weighting="gradient")
    with Softmax() as watch:
        output = model(x)
    weights = watch.found
    slopes = torch.autograd.grad(output.logits.amax(1).sum(), weights)
    weights, slopes = ([t.detach() for t in group] for group in (weights, slopes))
    want = modality_flow(weights, ids, weighting="gradient", details=FlowDetails(gradients=slopes))
    close(found.flow, want.flow, 1e-8)


class Pair(nn.Module):
    """Answers with the sum of the image tokens, or of the words."""

    def __init__(self, listens_to):
        super().__init__()
        self.attention = nn.MultiheadAttention(2, 1, batch_first=True)
        self.listens_to = listens_to

    def forward(self, x, labels=None):
        self.attention(x, x, x, need_weights=False)
        return x[:, self.listens_to].sum(1)


@pytest.mark.parametrize("how", ["zeros", "shuffle"])
def test_a_model_that_ignores_the_image_loses_nothing_without_it(how):
    labels = torch.tensor([0, 1])
    x = torch.zeros(2, 5, 2)
    x[torch.arange(2), :, labels] = 1.0
    x[:, :, 0] += 0.1
    ids = torch.tensor([0, 0, 1, 1, 1])
    deaf = modality_flow(
        Pair(slice(0, 2)), [x], ids, details=FlowDetails(labels=labels, ablate=how)
    )
    text, image = deaf.blind
    assert (text.modality, image.modality) == ("text", "image")
    assert (text.measure, text.full, image.harm) == ("accuracy", 1.0, 0.0)
    assert text.harm >= 0.5
    keen = modality_flow(
        Pair(slice(2, 5)), [x], ids, details=FlowDetails(labels=labels, ablate=how)
    )
    assert keen.blind[0].harm == 0
    assert keen.blind[1].harm >= 0.5
    assert "Without image" in keen.verdict()
    # attention is the same in both, which is why the score is needed
    assert modality_flow(Pair(slice(0, 2)), [x], ids).blind == ()


def test_images_of_a_model_are_replaced_as_a_whole_and_words_by_positions():
    model, batch = models.llava()
    ids = torch.where(batch["input_ids"] == models.IMAGE_TOKEN, 1, 0)
    ids[:, 0] = -1
    blind = replace_modality(batch, ids, 1, "zeros", ("pixel_values",))
    assert not blind["pixel_values"].any()
    assert torch.equal(blind["input_ids"], batch["input_ids"])
    other = replace_modality(batch, ids, 1, "shuffle", ("pixel_values",))
    assert torch.equal(other["pixel_values"], batch["pixel_values"].flip(0))
    silent = replace_modality(batch, ids, 0, "zeros", fill=5)
    assert torch.equal(silent["input_ids"][:, 2:6], batch["input_ids"][:, 2:6])
    assert bool((silent["input_ids"][:, 6:] == 5).all())
    assert torch.equal(silent["input_ids"][:, 0], batch["input_ids"][:, 0])
    labels = batch["input_ids"].clone()
    found = modality_flow(model, {**batch, "labels": labels})
    assert [one.modality for one in found.blind] == ["text", "image"]
    assert found.blind[0].measure == "accuracy"


def test_a_loss_serves_where_labels_do_not_fit_the_logits():
    class Output:
        loss = torch.tensor(0.25)

    class Model(nn.Module):
        def forward(self, x):
            found = Output()
            found.loss = x.mean()
            return found

    x, ids = torch.ones(2, 4, 1), torch.tensor([[0, 0, 1, 1]] * 2)
    found = blind_scores(Model(), [x], ids, ["a", "b"])
    assert [(one.measure, one.full, one.blind, one.harm) for one in found] == [
        ("loss", 1.0, 0.5, -0.5)
    ] * 2
    with pytest.raises(ValueError, match="give two or"):
        blind_scores(Model(), [x[:1]], ids[:1], ["a"], how="shuffle")
    with pytest.raises(ValueError, match="needs labels"):
        blind_scores(nn.Identity(), [x], ids, ["a"])


def test_tokens_are_exchanged_only_where_both_samples_have_the_modality():
    x = torch.arange(8.0).reshape(2, 4, 1)
    ids = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]])
    found = replace_modality([x], ids, 0, "shuffle")[0]
    assert found.flatten().tolist() == [4, 1, 2, 3, 0, 5, 6, 7]


def test_logits_of_a_decoder_predict_the_next_label():
    class Next(nn.Module):
        def forward(self, input_ids):
            return nn.functional.one_hot(input_ids + 1, 9).float()

    words, ids = torch.arange(5)[None], torch.tensor([[0, 0, 0, 1, 1]])
    found = blind_scores(Next(), {"input_ids": words}, ids, ["a"], labels=words, is_causal=True)
    assert found[0].full == 1.0
    plain = blind_scores(Next(), {"input_ids": words}, ids, ["a"], labels=words + 1)
    assert plain[0].full == 1.0
    ignored = torch.tensor([[-100, -100, 3, 0, -100]])
    (half,) = blind_scores(Next(), {"input_ids": words}, ids, ["a"], labels=ignored)
    assert half.full == 0.5


def test_special_tokens_stay_in_blind_scores():
    model, batch = models.llava()
    seen = []

    def score(output, given):
        seen.append(given["input_ids"])
        return 0.0

    modality_flow(model, batch, details=FlowDetails(score=score))
    whole, without_text, without_image = seen
    assert bool((without_text[:, 0] == 1).all())
    assert bool((without_text[:, 6:] == 0).all())
    assert torch.equal(without_image, whole)
