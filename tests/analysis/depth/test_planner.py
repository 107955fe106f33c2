"""The rule, the planner, the fit and the notice of the model builders."""

import json
import math
import warnings

import numpy as np
import pytest

from primal_attention.analysis.depth import (
    DepthNotice,
    depth_error,
    depth_of_width,
    fit_transition,
    optimal_depth,
    optimal_params,
    optimal_width,
    plan,
    plot_depth,
    relative_error,
)
from primal_attention.analysis.depth.blocks import Block, parse_params, show_params
from primal_attention.models import (
    CausalDecoder,
    DecoderConfig,
    EncoderClassifier,
    EncoderConfig,
    PretrainedModel,
)
from primal_attention.models.depth_rule import depth_notice


# T9
def test_depth_inverts_size():
    for params in np.geomspace(1e6, 1e13, 57):
        assert optimal_params(optimal_depth(params)) == pytest.approx(params, rel=1e-10)


def test_depth_of_very_small_and_large_sizes():
    for params in (1e-3, 1.0, 1e3, 1e30):
        assert optimal_params(optimal_depth(params)) == pytest.approx(params, rel=1e-9)


# T10
def test_constants_of_the_rule():
    assert optimal_width(70) == pytest.approx(7510.07, abs=1e-2)
    assert optimal_width(4) == pytest.approx(192.67, abs=1e-2)
    assert optimal_width(0) == pytest.approx(154.316, abs=1e-2)
    assert depth_of_width(2 * 154.316) == pytest.approx(12.489, abs=1e-2)
    assert depth_of_width(768) == pytest.approx(28.9, abs=0.05)


# T11
@pytest.mark.parametrize(
    ("params", "layers", "width"),
    [
        (1e6, 2.6, 178),
        (3.3e6, 6.0, 215),
        (1e7, 10.7, 279),
        (3e7, 16.6, 388),
        (1e8, 24.1, 588),
        (3e8, 31.6, 890),
        (1e9, 40.2, 1439),
        (1e10, 57.7, 3800),
        (1e11, 76.0, 10472),
        (1e12, 94.7, 29657),
    ],
)
def test_published_table(params, layers, width):
    depth = optimal_depth(params)
    assert depth == pytest.approx(layers, abs=0.1)
    assert optimal_width(depth) == pytest.approx(width, abs=0.6)


# T11
def test_shapes_of_known_models():
    gpt3 = [(12, 768), (24, 1024), (24, 1536), (24, 2048), (32, 2560), (32, 4096), (40, 5140)]
    gpt3 += [(96, 12288)]
    expected = [23.0, 31.6, 37.4, 41.6, 47.1, 54.3, 59.6, 80.5]
    found = [optimal_depth(12 * layers * width**2) for layers, width in gpt3]
    assert found == pytest.approx(expected, abs=0.06)
    for layers, width, depth in [(30, 576, 25.3), (12, 768, 23.0), (48, 1600, 43.1)]:
        assert optimal_depth(12 * layers * width**2) == pytest.approx(depth, abs=0.06)
    # the primal backbones of 2 layers
    assert optimal_depth(12 * 2 * 512**2) == pytest.approx(8.5, abs=0.05)
    assert optimal_depth(12 * 2 * 128**2) == pytest.approx(1.2, abs=0.05)


def test_relative_error_is_smallest_in_the_middle_of_the_data():
    found = [100 * relative_error(layers) for layers in (6, 12, 24, 48, 80, 95)]
    assert found == pytest.approx([4.7, 3.4, 2.2, 7.1, 15.3, 19.2], abs=0.06)
    assert min(range(100), key=relative_error) == 22
    # an error of N* moves L* along the curve
    params = 1e9
    shifted = optimal_depth(params * (1 + 1e-4 * relative_error(optimal_depth(params))))
    slope = (shifted - optimal_depth(params)) / 1e-4
    assert depth_error(params) == pytest.approx(slope, rel=1e-3)


def test_depth_by_bisection_equals_the_closed_form():
    for params in (1e6, 3e8, 1e12):
        by_hand = optimal_depth(params, size=lambda layers, d: 12 * layers * d**2)
        assert by_hand == pytest.approx(optimal_depth(params), rel=1e-9)


# T13
@pytest.mark.parametrize("attention", ["softmax", "linear", "primal"])
@pytest.mark.parametrize("options", [{}, {"gated": True, "ffn_ratio": 8 / 3}, {"head_width": 32}])
def test_plans_meet_the_budget_in_whole_heads(attention, options):
    layers = 0
    for params in np.geomspace(1e6, 1e12, 60):
        found = plan(params, attention=attention, **options)
        for shape in found.shapes:
            head_width = options.get("head_width", 64)
            assert shape.width % 64 == 0
            assert shape.width == shape.heads * head_width
            assert shape.params == pytest.approx(params, rel=0.03)
        best = found.recommended
        assert best in found.shapes
        assert abs(best.layers - found.depth) <= 0.5
        assert found.low <= best.layers <= math.ceil(found.high)
        assert best.layers >= layers, "deeper models for larger budgets"
        layers = best.layers


# T13
def test_plan_of_thirty_million():
    found = plan("30M", vocab=32000, head_width=64)
    best = found.recommended
    assert (best.layers, best.width, best.heads) == (17, 384, 6)
    assert best.embedding == 32000 * 384
    assert [s.layers for s in found.shapes] == sorted(s.layers for s in found.shapes)
    assert len(found.shapes) == 3
    assert (round(found.low, 1), round(found.high, 1)) == (8.3, 24.9)
    header, rows = found.table()
    assert {len(row) for row in rows} == {len(header)}
    assert [row[-1] for row in rows] == ["", "recommended", ""]
    words = " ".join(found.reasons)
    for work in ("Levine", "Kaplan", "Tay", "MobileLLM", "Fahim", "as reported"):
        assert work in words
    assert "17 layers of width 384" in found.verdict()
    content = json.loads(found.to_json())
    assert content["recommended"]["layers"] == 17
    assert len(content["shapes"]) == 3


def test_planned_model_has_the_planned_parameters():
    for attention in ("softmax", "primal"):
        shape = plan("3M", attention=attention).recommended
        config = DecoderConfig(
            vocab_size=300,
            dim=shape.width,
            num_heads=shape.heads,
            num_layers=shape.layers,
            hidden_dim=shape.hidden,
            attention=attention,
        )
        model = CausalDecoder(config, device="meta")
        assert sum(p.numel() for p in model.blocks.parameters()) == shape.params


def test_embedding_can_be_part_of_the_budget():
    whole = plan("135M", vocab=49152, includes_embedding=True)
    for shape in whole.shapes:
        assert shape.params + shape.embedding == pytest.approx(135e6, rel=0.03)
    assert whole.params == pytest.approx(135e6 - 49152 * whole.width)
    assert whole.depth < plan("135M").depth
    with pytest.raises(ValueError, match="embedding alone"):
        plan("5M", vocab=49152, includes_embedding=True)


def test_range_extends_for_small_vocabularies_and_primal_layers():
    usual = plan("30M", vocab=32000)
    small = plan("30M", vocab=256)
    assert usual.high < small.high <= 2 * small.depth
    assert small.low >= depth_of_width(256)
    assert any("vocabulary of 256" in reason for reason in small.reasons)
    primal = plan("30M", attention="primal")
    assert primal.high == pytest.approx(math.log2(3) * primal.depth)
    low = plan("30M", attention="nystromformer", rank=32)
    assert any("effective width" in reason for reason in low.reasons)


@pytest.mark.parametrize(
    "params", ["30M", "30m", "3e7", "30_000_000", 30_000_000, "0.03B", "30000k"]
)
def test_sizes_can_be_written_in_many_ways(params):
    assert parse_params(params) == 3e7


def test_sizes_are_shown_short():
    assert [show_params(n) for n in (0, 999, 999_900, 1.23e7, 1e12)] == [
        "0",
        "999",
        "1M",
        "12.3M",
        "1T",
    ]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ("30X", {}, "params must be a positive number"),
        ("-3M", {}, "params must be a positive number"),
        (0, {}, "params must be a positive number"),
        (math.nan, {}, "params must be a positive number"),
        ("1.2.3M", {}, "params must be a positive number"),
        ("30M", {"attention": "primal-static"}, "mixes no tokens"),
        ("30M", {"attention": "sofmax"}, "Did you mean 'softmax'"),
        ("30M", {"includes_embedding": True}, "needs vocab"),
        ("30M", {"vocab": 0}, "vocab must be at least 1"),
        ("30M", {"head_width": 0}, "head_width must be positive"),
        ("1000", {}, "do not make 1 layers"),
    ],
)
def test_impossible_budgets_are_refused(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        plan(arguments, **options)


def test_blocks_count_parameters():
    assert Block().params(512) == 12 * 512**2 + 13 * 512
    assert Block(gated=True, ffn_ratio=8 / 3).params(576) == pytest.approx(12 * 576**2, rel=0.01)
    block = Block("primal", ffn_ratio=2)
    assert block.hidden_for(256, block.params(256, 700)) == pytest.approx(700)


# D5
def test_fit_returns_the_constants_of_points_on_the_line():
    depths = (6, 12, 18, 24, 36, 48)
    fit = fit_transition([(n, optimal_width(n)) for n in depths])
    assert (fit.a, fit.b) == pytest.approx((5.039, 0.0555), rel=1e-10)
    assert np.abs(fit.covariance).max() < 1e-20
    rng = np.random.default_rng(0)
    noisy = [(n, optimal_width(n) * math.exp(0.05 * rng.standard_normal())) for n in depths]
    fit = fit_transition(noisy)
    target = np.log([d for _, d in noisy])
    _, expected = np.polyfit(depths, target, 1, cov=True)  # slope first
    np.testing.assert_allclose(fit.covariance, expected[::-1, ::-1], rtol=1e-8)
    with pytest.raises(ValueError, match="two different depths"):
        fit_transition([(6, 200), (6, 210)])
    assert fit_transition([(6, 200), (12, 300)]).covariance[0][0] == math.inf


def test_figure_shows_the_curve_and_the_models():
    figure = plot_depth({"mine": (3e7, 17), "other": (1e8, 12)}, chosen="mine")
    axis = figure.axes[0]
    assert {text.get_text() for text in axis.texts} >= {"mine", "other"}
    x, y = axis.lines[0].get_data()
    np.testing.assert_allclose(y, [optimal_depth(n) for n in x])
    assert plan("30M").plot().startswith(b"\x89PNG")
    assert "recommended" in plan("30M").report().html()


def decoder(layers, width, vocab=30000, **options):
    settings = {"dim": width, "num_layers": layers, "attention": "softmax", **options}
    return CausalDecoder(DecoderConfig(vocab_size=vocab, **settings), device="meta")


@pytest.mark.parametrize(("layers", "width", "side"), [(2, 1024, "shallow"), (36, 256, "deep")])
def test_builders_give_a_notice_at_the_line_of_the_user(layers, width, side):
    with pytest.warns(DepthNotice, match=f"{side} for its size") as found:
        decoder(layers, width)
    assert found[0].filename == __file__


def test_notice_can_be_silenced():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DepthNotice)
        decoder(2, 1024)


def test_no_notice_where_the_rule_has_nothing_to_say():
    decoder(12, 512)  # in the range
    decoder(2, 128)  # too small
    decoder(24, 256, vocab=200)  # a small vocabulary calls for depth
    # channels: not the data of the rule
    config = EncoderConfig(num_classes=2, num_features=3, dim=1024, attention="softmax")
    EncoderClassifier(config, device="meta")
    assert depth_notice(2, 1024, None) is None


def test_layers_that_mix_no_tokens_do_not_count():
    options = {"num_classes": 2, "vocab_size": 30000, "dim": 512, "num_layers": 12}
    mixed = EncoderConfig(**options, attention="primal-static", primal_layers=(0, 1, 2, 3, 4, 5, 6))
    with pytest.warns(DepthNotice, match="With 5 layers"):
        EncoderClassifier(mixed, device="meta")
    causal = EncoderConfig(**options, attention="primal-static", is_causal=True)
    EncoderClassifier(causal, device="meta")


def test_loading_a_trained_model_gives_no_notice(tmp_path):
    config = DecoderConfig(vocab_size=700, dim=640, num_layers=1, attention="softmax")
    with pytest.warns(DepthNotice):
        model = CausalDecoder(config)
    model.save_pretrained(tmp_path)
    assert PretrainedModel.from_pretrained(tmp_path).config == config
