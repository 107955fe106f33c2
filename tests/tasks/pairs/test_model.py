"""The vision-language model: parsers, joint encoder, losses, heads and files."""

import copy
import warnings

import pytest
import torch
from torch import nn

import primal_attention as pa
from primal_attention.analysis.flow import modality_flow
from primal_attention.attention import create_attention, list_attentions
from primal_attention.models import ModelFileError, PretrainedModel
from primal_attention.tasks.pairs import (
    ImageParser,
    MultimodalConfig,
    PairClassifier,
    PairSearch,
    Parsed,
    SimilarityNotice,
    VisualParser,
)
from primal_attention.tasks.pairs.objectives import (
    contrastive_pair_loss,
    draw_negatives,
    mask_words,
)
from primal_attention.tasks.pairs.parser import create_parser
from primal_attention.tasks.pairs.pretraining import hide_tokens
from primal_attention.tasks.pairs.rows import attention_rows, cosine_rows

ALL = ("mlm", "itm", "mfr", "itc")


def tiny(**changes):
    torch.manual_seed(0)
    return VisualParser.from_config("tiny", **{"vocab_size": 40, "image_size": 24, **changes})


def pairs(b=6, n=7, size=24):
    """Images and texts of two lengths."""
    ids = torch.randint(5, 40, (b, n))
    ids[:, 0], ids[:, n - 1] = 1, 2
    ids[::2, n - 2], ids[::2, n - 1] = 2, 0
    return torch.randn(b, 3, size, size), ids


def seeded(model, *args, **kwargs):
    """Return the output of a forward whose masks are always the same."""
    torch.manual_seed(7)
    return model(*args, **kwargs)


def test_parsers_have_equal_sizes_and_one_token_for_each_patch():
    sizes = []
    for parser in ("vit", "linear", "cnn"):
        config = MultimodalConfig.from_config("tiny", parser=parser, image_size=(16, 24))
        found = create_parser(config)
        parsed = found(torch.randn(2, 3, 16, 24))
        assert parsed.features.shape == (2, 6, 64)
        assert found.has_attention == (parsed.rows is not None) == (parser == "vit")
        sizes.append(sum(p.numel() for p in found.parameters()))
    assert max(sizes) < 1.03 * min(sizes)


@pytest.mark.parametrize("parser", ["vit", "linear", "cnn"])
def test_a_visual_token_belongs_to_its_patch(parser):
    model = create_parser(MultimodalConfig.from_config("tiny", parser=parser, image_size=40))
    image = torch.randn(1, 3, 40, 40)
    changed = image.clone()
    changed[:, :, 8:16, 16:24] += 1  # row 1, column 2 of 5
    moved = (model(image).features - model(changed).features).abs().amax(-1)[0].view(5, 5) > 1e-6
    if parser == "linear":
        assert moved.nonzero().tolist() == [[1, 2]]
    elif parser == "cnn":  # 15 pixels see a patch and its neighbours
        assert moved[1, 2]
        assert not moved[3:].any()
        assert not moved[:, 4:].any()
    else:
        assert moved.all()


def test_positions_start_at_unit_scale():
    model = tiny(image_size=64)
    for table in (model.parser.positions, model.visual_positions):
        assert table.shape == (64, 64)
        assert 0.95 < table.std() < 1.05
    seen = []
    model.parser.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model.parse(torch.zeros(1, 3, 64, 64))
    torch.testing.assert_close(seen[0][0], model.parser.embed.bias + model.parser.positions)


@pytest.mark.parametrize("name", ["softmax", "linear", "primal", "primal-dual", "nystromformer"])
def test_seed_rows_are_rows_of_the_whole_matrix(name):
    x, rows = torch.randn(2, 9, 16), torch.tensor([[3, 8], [0, 0]])
    layer = create_attention(name, 16, 2).eval()
    whole, some = attention_rows(layer, x), attention_rows(layer, x, rows)
    for b in range(2):
        torch.testing.assert_close(some[b], whole[b, rows[b]])
    if name == "softmax":
        q, k = (p(x).view(2, 9, 2, 8).transpose(1, 2) for p in (layer.q_proj, layer.k_proj))
        wanted = (q @ k.transpose(-1, -2) / 8**0.5).softmax(-1).mean(1)
        torch.testing.assert_close(whole, wanted)
    if name == "primal-dual":  # scores of the analyses, in float64
        scores = pa.hosts.capture(layer, x)[0].scores(1)
        wanted = (scores.e * scores.lam[:, None] @ scores.r.mT).mean(0)
        torch.testing.assert_close(whole[1].double(), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("attention", ["softmax", "primal-dual"])
def test_groups_come_from_the_last_block_of_the_parser(attention):
    model = tiny(parser_attention=attention, image_size=48).eval()
    images = torch.randn(3, 3, 48, 48)
    seen = []
    last = model.parser.blocks[-1].attention
    hook = last.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    parsed = model.parse(images)
    hook.remove()
    seeds = torch.tensor([[0], [17], [35]])
    torch.testing.assert_close(parsed.rows(seeds), attention_rows(last, seen[0], seeds))
    hidden = hide_tokens(model, parsed)
    assert hidden.sum(1).tolist() == [5, 5, 5]
    order = attention_rows(last, seen[0]).argsort(dim=2, descending=True, stable=True)
    for b in range(3):  # the hidden five are one token and the top of its row
        tokens = set(hidden[b].nonzero()[:, 0].tolist())
        assert any({i, *[j for j in order[b, i].tolist() if j != i][:4]} == tokens for i in tokens)


def test_groups_may_come_from_all_blocks_of_the_parser():
    model = tiny(mfr_attention="rollout", parser_layers=3).eval()
    images, seeds = torch.randn(2, 3, 24, 24), torch.tensor([[2, 5], [0, 8]])
    seen = []
    layers = [block.attention for block in model.parser.blocks]
    hooks = [a.register_forward_pre_hook(lambda _, args: seen.append(args[0])) for a in layers]
    rows = model.parse(images).rows(seeds)
    for hook in hooks:
        hook.remove()
    whole = torch.eye(9).expand(2, 9, 9)
    for layer, x in zip(layers, seen[:3], strict=True):
        whole = (attention_rows(layer, x) + torch.eye(9)) / 2 @ whole
    for b in range(2):
        torch.testing.assert_close(rows[b], whole[b, seeds[b]])
    with pytest.raises(ValueError, match="'primal-dual' has none"):
        tiny(mfr_attention="rollout", parser_attention="primal-dual")


def test_the_scale_of_a_parser_cannot_shrink_the_target():
    model = tiny().eval()
    images = torch.randn(2, 3, 24, 24)
    with torch.no_grad():
        for p in model.parser.blocks[-1].mlp[-2].parameters():
            p.mul_(100)
    visual = model.parse(images).features
    torch.testing.assert_close(visual.var(-1, correction=0), torch.ones(2, 9), rtol=1e-4, atol=1e-4)
    assert not list(model.visual_norm.parameters())  # nor can a gain


def test_random_masks_hide_as_many_tokens():
    model = tiny(mfr_masks="random", image_size=48, mfr_share=0.5, mfr_group=4)
    hidden = hide_tokens(model, model.parse(torch.randn(3, 3, 48, 48)))
    assert hidden.sum(1).tolist() == [16, 16, 16]  # round(0.5 · 36 / 5) = 4 groups of 4


def test_what_is_hidden_does_not_reach_the_joint_output():  # M2
    model = tiny().eval()
    images, ids = pairs()
    visual = model.parse(images).features
    hidden = torch.rand(visual.shape[:2]) < 0.4
    hidden[:, 0] = True
    text = model.check_text(ids, None)

    def run(v):
        return model.join(*model.together(text, model.embed_image(v, hidden)))[0]

    noise = torch.where(hidden[:, :, None], 9 * torch.randn_like(visual), 0.0)
    torch.testing.assert_close(run(visual + noise), run(visual), rtol=0, atol=0)
    seen = torch.where(hidden[:, :, None], 0.0, 9 * torch.randn_like(visual))
    assert (run(visual + seen) - run(visual)).abs().max() > 0.1
    # position and type stay: two hidden tokens are not alike
    embedded = model.embed_image(visual, torch.ones_like(hidden))
    wanted = model.visual_positions + model.types.weight[1]
    torch.testing.assert_close(embedded, wanted.expand_as(embedded))


def test_no_gradient_into_the_target_of_masked_features():  # M3
    model = tiny()
    images, ids = pairs()
    visual = model.parse(images).features.detach().requires_grad_()
    parsed = Parsed(visual)
    hidden = torch.zeros(visual.shape[:2], dtype=torch.bool)
    hidden[:, :4] = True
    model.parse = lambda _: parsed  # the parser is out of the way
    with pytest.MonkeyPatch.context() as patch:
        name = "primal_attention.tasks.pairs.pretraining.hide_tokens"
        patch.setattr(name, lambda *_: hidden)
        model(images, ids, objectives=("mfr",)).loss.backward()
    assert visual.grad[:, :4].abs().max() == 0  # as target and as input
    assert visual.grad[:, 4:].abs().max() > 0


def test_mismatched_pairs_count_in_matching_only():  # M4
    model = tiny()
    images, ids = pairs()
    matched = torch.tensor([True, False, True, True, False, True])
    first = seeded(model, images, ids, matched=matched, objectives=ALL)
    assert torch.equal(first.matched, matched)
    other, words = images.clone(), ids.clone()
    other[~matched] += 1
    words[1, 2] = words[1, 2] % 30 + 6
    second = seeded(model, other, words, matched=matched, objectives=ALL)
    for name in ("mlm", "mfr", "itc"):
        torch.testing.assert_close(first.losses[name], second.losses[name], rtol=0, atol=0)
    assert first.losses["itm"] != second.losses["itm"]
    none = seeded(model, images, ids, matched=torch.zeros(6).bool(), objectives=ALL)
    for name in ("mlm", "mfr", "itc"):
        assert none.losses[name] == 0
        assert none.losses[name].requires_grad
    none.loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_losses_are_weighted_and_named():
    images, ids = pairs()
    model = tiny(loss_weights={"mfr": 0.5, "itc": 0.0})
    output = seeded(model, images, ids, objectives=ALL)
    assert tuple(output.losses) == ALL
    assert set(output.scores) == {"itm", "mlm"}
    part = output.losses
    wanted = part["mlm"] + part["itm"] + 0.5 * part["mfr"]
    torch.testing.assert_close(output.loss, wanted)
    assert tuple(seeded(model, images, ids).losses) == ("mlm", "itm", "mfr")
    # one by one they are the same functions: words are hidden without hidden image parts
    alone = seeded(model, images, ids, objectives=("mlm",))
    text = model.check_text(ids, None)
    torch.manual_seed(7)
    masked = mask_words(*text, vocab_size=40, mask_id=3, special_ids=(0, 1, 2, 3, 4))
    again = model(images, masked.input_ids, attention_mask=text.keep, labels=masked.labels)
    torch.testing.assert_close(alone.loss, again.losses["mlm"])


def test_matching_is_read_from_given_pairs_and_negatives():
    model = tiny().eval()
    images, ids = pairs()
    matched = torch.tensor([1, 0, 1, 0, 1, 0]).bool()
    plain = model(images, ids, matched=matched)
    wanted = nn.functional.binary_cross_entropy_with_logits(plain.logits, matched.float())
    torch.testing.assert_close(plain.losses["itm"], wanted)
    given = model(images, ids, matched=matched, objectives=("itm",))
    torch.testing.assert_close(given.logits, plain.logits)
    # texts of the caller, longer than the others, among the mismatched ones
    hard = torch.full((6, 9), 39)
    hard[:, 0] = 1
    drawn = seeded(model, images, ids, objectives=("itm",), negative_input_ids=hard)
    longer = nn.functional.pad(ids, (0, 2))
    right, wrong = model(images, longer).logits, model(images, hard).logits
    torch.testing.assert_close(drawn.logits[drawn.matched], right[drawn.matched])
    is_hard = torch.isclose(drawn.logits, wrong, atol=1e-5)
    assert is_hard.any()
    assert not (is_hard & drawn.matched).any()


def test_texts_and_images_alone():  # M6
    model = tiny().eval()
    images, ids = pairs()
    text, image, both = model(input_ids=ids), model(images), model(images, ids)
    assert text.hidden.shape == (6, 7, 64)
    assert image.hidden.shape == (6, 9, 64)
    assert text.logits is None
    assert image.logits is None
    assert both.logits.shape == (6,)
    torch.testing.assert_close(text.text_features, both.text_features)
    torch.testing.assert_close(image.image_features, both.image_features)
    torch.testing.assert_close(model.encode_text(ids), both.text_features)
    torch.testing.assert_close(model.encode_image(images), both.image_features)
    torch.testing.assert_close(both.text_features.norm(dim=1), torch.ones(6))
    torch.testing.assert_close(model.match(both.visual, ids), both.logits)
    assert model(input_ids=ids, output_words=True).word_logits.shape == (6, 7, 40)


@pytest.mark.parametrize("attention", ["softmax", "linear", "primal-dual"])
def test_attentions_leave_the_logits_as_they_are(attention):  # M7
    model = tiny(attention=attention).eval()
    images, ids = pairs()
    plain, found = model(images, ids), model(images, ids, output_attentions=True)
    torch.testing.assert_close(found.logits, plain.logits, rtol=0, atol=0)
    assert plain.attentions is None
    assert len(found.attentions) == 3
    keep = model.modality_ids({"input_ids": ids}) >= 0
    for weights in found.attentions:
        assert weights.shape == (6, 4, 16, 16)
        assert not weights[~keep[:, None, :, None].expand_as(weights)].any()
        assert not weights[~keep[:, None, None].expand_as(weights)].any()
        if attention != "primal-dual":
            wanted = keep[:, None].expand(6, 4, 16).float()
            torch.testing.assert_close(weights.sum(-1), wanted)


def test_fused_and_explicit_attention_agree():  # M7
    fused = tiny().eval()
    explicit = tiny(attention="softmax-explicit", parser_attention="softmax-explicit").eval()
    explicit.load_state_dict(fused.state_dict())
    batch = pairs()
    torch.testing.assert_close(fused(*batch).logits, explicit(*batch).logits, rtol=1e-5, atol=1e-5)


def test_padding_changes_nothing():
    model = tiny().eval()
    images, ids = pairs()
    short, long = model(images, ids), model(images, nn.functional.pad(ids, (0, 5)))
    torch.testing.assert_close(short.logits, long.logits)
    torch.testing.assert_close(short.text_features, long.text_features)
    # content behind the mask is ignored, also ids that do not exist
    mask = (ids != 0).long()
    wild = torch.where(mask.bool(), ids, 10**6)
    torch.testing.assert_close(model(images, wild, mask).logits, short.logits)


def test_flow_is_read_from_the_joint_layers():
    images, ids = pairs()
    batch = {"pixel_values": images, "input_ids": ids}
    model = tiny().eval()
    modality = model.modality_ids(batch)
    assert modality[0].tolist() == [0] * 6 + [-1] + [1] * 9
    flow = modality_flow(model, batch, modality)
    assert flow.layers == tuple(f"blocks.{i}.attention" for i in range(3))
    weights = torch.stack(model(**batch, output_attentions=True).attentions)  # [l b h n n]
    given = modality_flow(list(weights), modality)
    torch.testing.assert_close(flow.flow, given.flow, rtol=1e-5, atol=1e-6)
    one = weights[0, 1].mean(0)  # a text without padding: 7 words, 9 parts
    torch.testing.assert_close(
        modality_flow(list(weights[:1, 1:2]), modality[1:2]).direction("text", "image").float(),
        one[:7, 7:].sum()[None] / 7,
        check_dtype=False,
    )
    apart = modality_flow(model, batch, modality, special_ids=model.special_mask(batch))
    found = modality_flow(model, batch)  # the model tells modalities and special tokens
    torch.testing.assert_close(found.flow, apart.flow)
    assert apart.names == ("text", "image", "special")
    primal = tiny(attention="primal-dual").eval()
    assert modality_flow(primal, batch, modality).primal[0] is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"objectives": ["mlm", "itm"], "image_size": [24, 24], "dropout": 0.1},
        {"parser": "cnn", "attention": "primal", "attention_options": {"rank": 4}},
    ],
)
def test_a_saved_model_is_the_same(changes, tmp_path):
    model = tiny(**changes).eval()
    model.save_pretrained(tmp_path)
    batch = pairs()
    for cls in (VisualParser, PretrainedModel):
        again = cls.from_pretrained(tmp_path)
        assert type(again) is VisualParser
        assert again.config == model.config
        assert torch.equal(again(*batch).logits, model(*batch).logits)
    with pytest.raises(ModelFileError, match="holds a 'VisualParser'"):
        PairClassifier.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", list_attentions(padding=True))
def test_every_attention_of_the_registry_serves_on_both_sides(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # static layers do not mix; some layers have no rows
        model = tiny(attention=name, parser_attention=name, num_layers=1, parser_layers=1)
        output = model(*pairs())
        output.loss.backward()
        assert output.loss.isfinite()
        term = pa.ksvd_loss(model)
    if output.aux_loss is not None:
        torch.testing.assert_close(term, output.aux_loss)


class Pooled(nn.Module):
    """A parser of one's own: mean colours of quarters, with a map."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(3, 10)

    def forward(self, x):
        return self.map(nn.functional.adaptive_avg_pool2d(x, 2).flatten(2).mT)


def test_a_module_of_ones_own_is_a_parser(tmp_path):
    model = VisualParser.from_config("tiny", vocab_size=40, parser=Pooled())
    batch = pairs(size=32)
    with pytest.warns(SimilarityNotice, match="cosine similarity"):
        assert model(*batch).visual.shape == (6, 4, 10)
    model(*batch)  # says so once
    model.eval().save_pretrained(tmp_path)
    again = VisualParser.from_pretrained(tmp_path, parser=Pooled())
    assert torch.equal(again(*batch).logits, model(*batch).logits)
    with pytest.raises(ValueError, match="also when you load a saved model"):
        VisualParser.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="set it to 'module'"):
        VisualParser(MultimodalConfig.from_config("tiny"), parser=Pooled())
    with pytest.raises(ValueError, match="must return visual tokens"):
        VisualParser.from_config("tiny", parser=nn.Flatten())


def test_without_attention_groups_follow_cosine_similarity():
    class Fixed(ImageParser):
        num_features = 8

        def forward(self, pixel_values):
            return Parsed(table.expand(len(pixel_values), -1, -1))

    table = torch.randn(9, 8)
    model = tiny(parser=Fixed(), mfr_group=3).eval()
    with pytest.warns(SimilarityNotice):
        hidden = hide_tokens(model, model.parse(torch.zeros(4, 3, 24, 24)))
    similarity = cosine_rows(model.visual_norm(table)[None])[0]
    nearest = [set(row.topk(3).indices.tolist()) for row in similarity]
    for row in hidden:
        assert set(row.nonzero()[:, 0].tolist()) in nearest


def test_backbones_of_timm(tmp_path):
    timm = pytest.importorskip("timm")
    from primal_attention.tasks.pairs.backbone import attention_weights

    images, ids = pairs(2, size=64)
    options = {"image_size": 64, "vocab_size": 40}
    for name, tokens in (("swin_tiny_patch4_window7_224", 4), ("test_vit", 16)):
        backbone = timm.create_model(
            name, img_size=64, **({"depths": (1, 1, 1, 1), "embed_dim": 24} if tokens == 4 else {})
        )
        config = MultimodalConfig.from_config("tiny", parser=f"timm:{name}", **options)
        model = VisualParser(config, parser=backbone).eval()
        calls = []
        layer = model.parser._attention
        hook = layer.register_forward_hook(lambda m, a, y, calls=calls: calls.append((a[0], y)))
        parsed = model.parse(images)
        hook.remove()
        # the weights that are read give the output of the layer
        x, y = calls[0]
        weights = attention_weights(layer, x)
        v = layer.qkv(x).reshape(*x.shape[:2], 3, layer.num_heads, -1).permute(2, 0, 3, 1, 4)[2]
        mixed = layer.proj((weights @ v).transpose(1, 2).flatten(2))
        torch.testing.assert_close(mixed, y, rtol=1e-4, atol=1e-5)
        prefix = weights.shape[-1] - tokens
        rows = parsed.rows(torch.tensor([[1], [0]]))
        torch.testing.assert_close(rows[0, 0], weights[0].mean(0)[prefix + 1, prefix:])
        assert model.train()(images, ids).loss.isfinite()
    model.eval().save_pretrained(tmp_path)  # the ViT, rebuilt by its name and without a download
    again = VisualParser.from_pretrained(tmp_path)
    assert torch.equal(again(images, ids).logits, model(images, ids).logits)
    plain = VisualParser.from_config("tiny", parser="timm:test_resnet", **options)
    assert not plain.parser.has_attention
    assert plain.eval()(images, ids).logits.shape == (2,)
    with pytest.raises(ValueError, match="timm has no backbone named 'nothing'"):
        VisualParser.from_config("tiny", parser="timm:nothing")


def test_search_reads_the_best_candidates_again():
    model = tiny().eval()
    images, ids = pairs(9)
    search = PairSearch(model, batch_size=4).add_images(images).add_texts(ids)
    with torch.no_grad():
        similarity = model.encode_text(ids) @ model.encode_image(images).mT
        visual = model.parse(images).features
        logits = torch.stack([model.match(visual, text.expand(9, -1)) for text in ids])
    first = search.images_for(ids, k=4, rerank=0)
    torch.testing.assert_close(first.scores, similarity.topk(4).values)
    every = search.images_for(ids, k=4, rerank=9)
    assert torch.equal(every.ids, logits.topk(4).indices)
    torch.testing.assert_close(every.scores, logits.topk(4).values)
    some = search.images_for(ids, k=6, rerank=2)
    assert torch.equal(some.ids[:, 2:], similarity.topk(6).indices[:, 2:])
    assert torch.equal(some.ids[:, :2].sort(1)[0], similarity.topk(2).indices.sort(1)[0])
    back = search.texts_for(images, k=20, rerank=9)
    assert back.ids.shape == (9, 9)
    assert torch.equal(back.ids, logits.T.topk(9).indices)
    with pytest.raises(RuntimeError, match="call add_texts first"):
        PairSearch(model).texts_for(images)


def test_classes_of_pairs(tmp_path):
    base = tiny().eval()
    images, ids = pairs()
    entail = PairClassifier.from_model(base, num_classes=3).eval()
    hidden = base(images, ids).hidden[:, 0]
    torch.testing.assert_close(entail(images, ids).logits, entail.head(hidden))
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    logits = entail(images, ids).logits
    wanted = -logits.log_softmax(1)[torch.arange(6), labels].mean()
    torch.testing.assert_close(entail.objective(entail(images, ids), labels), wanted)
    two = PairClassifier.from_model(base, num_classes=2, num_images=2).eval()
    other = torch.randn_like(images)
    both = torch.cat([hidden, base(other, ids).hidden[:, 0]], 1)
    found = two(torch.stack([images, other], 1), ids).logits
    torch.testing.assert_close(found, two.head(both))
    answers = PairClassifier.from_model(base, num_classes=9, targets="soft")
    output, soft = answers(images, ids), torch.rand(6, 9)
    p = output.logits.sigmoid()
    wanted = -(soft * p.log() + (1 - soft) * (1 - p).log()).sum(1).mean()
    torch.testing.assert_close(answers.objective(output, soft), wanted)
    two.save_pretrained(tmp_path)
    again = PretrainedModel.from_pretrained(tmp_path)
    assert again.config == two.config
    with pytest.raises(ValueError, match="must have 2 images for each text"):
        two(images, ids)


@pytest.mark.raw
def test_wrong_inputs_are_explained():
    model = tiny()
    images, ids = pairs()
    for match, call in (
        ("Give pixel_values, input_ids or both", lambda: model()),
        ("Objectives need pixel_values and input_ids", lambda: model(images)),
        (
            r"pixel_values must be floating point of shape \[batch, 3, 24, 24\]",
            lambda: model(images[:, :, :20], ids),
        ),
        ("input_ids must hold token ids", lambda: model(images, ids.float())),
        ("allowed are 1 to max_words=16", lambda: model(images, ids.repeat(1, 3))),
        ("attention_mask must have shape", lambda: model(images, ids, ids[:, :2])),
        ("same batch size, got 6 and 3", lambda: model(images, ids[:3])),
        ("objectives has 'mlp'", lambda: model(images, ids, objectives=("mlp",))),
        ("add 'itc' to the objectives", lambda: tiny(negatives="in-batch-hard")(images, ids)),
        ("no configuration named 'huge'", lambda: VisualParser.from_config("huge")),
        ("no field 'patchsize'.*patch_size", lambda: tiny(patchsize=4)),
        ("image_size must be one or two multiples of patch_size=8", lambda: tiny(image_size=30)),
        ("parser must be one of", lambda: tiny(parser="vitt")),
        ("Special tokens must have different ids", lambda: tiny(sep_token_id=1)),
        ("mask_token_id must be an id below vocab_size", lambda: tiny(mask_token_id=40)),
        ("negatives must be one of", lambda: tiny(negatives="hard")),
        ("mask_share must be between 0 and 1", lambda: tiny(mask_share=0.0)),
    ):
        with pytest.raises(ValueError, match=match):
            call()


def test_hard_negatives_follow_the_similarity_of_the_batch(monkeypatch):
    model = tiny(negatives="in-batch-hard", objectives=ALL)
    images, ids = pairs()
    seen = {}

    def record(*args, similarity, **kwargs):
        seen["similarity"] = similarity
        return draw_negatives(*args, similarity=similarity, **kwargs)

    name = "primal_attention.tasks.pairs.pretraining.draw_negatives"
    monkeypatch.setattr(name, record)
    output = model(images, ids)
    wanted = output.image_features @ output.text_features.T / 0.07
    torch.testing.assert_close(seen["similarity"], wanted.detach())
    tiny(objectives=ALL)(images, ids)
    assert seen["similarity"] is None


def test_contrast_is_that_of_the_features_and_equal_texts_share_it():
    model = tiny(objectives=("itc",))
    images, ids = pairs()
    ids[4] = ids[2]
    output = model(images, ids)
    torch.testing.assert_close(output.image_features, model.encode_image(images))
    torch.testing.assert_close(output.text_features, model.encode_text(ids))
    same = (ids[:, None] == ids[None]).all(-1)
    assert same.sum() == 8
    wanted = contrastive_pair_loss(output.image_features, output.text_features, 1 / 0.07, same=same)
    torch.testing.assert_close(output.loss, wanted)


def test_the_order_of_words_and_of_patches_matters():
    model = tiny().eval()
    images, ids = pairs()
    logits = model(images, ids).logits
    words = ids[:, [0, 2, 1, 3, 4, 5, 6]]
    assert (model(images, words).logits - logits).abs().min() > 1e-4
    visual = model.parse(images).features
    assert (model.match(visual.flip(1), ids) - logits).abs().min() > 1e-4


def test_copies_and_gradients_are_complete():
    model = tiny(objectives=ALL)
    twin = copy.deepcopy(model)
    images, ids = pairs()
    first, second = seeded(model, images, ids), seeded(twin, images, ids)
    torch.testing.assert_close(first.loss, second.loss)
    first.loss.backward()
    without = [name for name, p in model.named_parameters() if p.grad is None]
    assert not without
    assert first.variance > 0.5  # of features with unit variance in each token


@pytest.mark.slow
def test_a_tiny_model_overfits_sixteen_pairs():  # M8
    model = tiny(image_size=32)
    images, ids = pairs(16, size=32)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.01)
    steps = 290
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in range(steps):
        model(images, ids).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.eval()
    with torch.no_grad():
        hits = []
        for place in range(1, 6):  # every word is hidden once
            is_word = ids[:, place] > 4
            masked = ids.clone()
            masked[is_word, place] = 3
            found = model(images, masked, output_words=True).word_logits[:, place].argmax(-1)
            hits.append((found == ids[:, place])[is_word])
        assert torch.cat(hits).all()
        shift = [torch.roll(ids, k, 0) for k in range(1, 4)]
        assert (model(images, ids).logits > 0).all()
        assert all((model(images, other).logits < 0).all() for other in shift)
