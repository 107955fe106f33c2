import copy
import json

import pytest
import torch
from torch import nn

from primal_attention.hosts import ConversionError
from primal_attention.surgery import SurgeryConfig, convert
from primal_attention.surgery.advice import Advice, HeadStatistics, LayerCost, LayerFit
from primal_attention.surgery.advisor import advise
from primal_attention.surgery.options import AdviceConfig

transformers = pytest.importorskip("transformers")


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=32,
        initializer_range=0.1,
    )
    return transformers.BertModel(config).eval()


def texts(count: int = 8) -> list[dict[str, torch.Tensor]]:
    keep = torch.arange(14) < torch.tensor([[14], [11], [6]]).repeat(4, 1)
    return [
        {"input_ids": torch.randint(1, 40, (12, 14)), "attention_mask": keep.long()}
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def advice() -> Advice:
    torch.manual_seed(1)
    model = bert()
    before = copy.deepcopy(model.state_dict())
    found = advise(
        model,
        texts(),
        AdviceConfig(
            (
                "linear",
                "skyformer",
                "primal",
            ),
            length=64,
            rank=4,
        ),
    )
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    return found


def test_every_head_and_every_pair_of_layer_and_mechanism_has_a_row(advice):
    layers = [f"encoder.layer.{i}.attention.self" for i in range(2)]
    assert [(h.layer, h.head) for h in advice.heads] == [(n, i) for n in layers for i in range(4)]
    assert {(f.layer, f.attention) for f in advice.fits} == {
        (n, a) for n in layers for a in ("linear", "skyformer", "primal")
    }
    assert [c.attention for c in advice.costs] == ["softmax", "linear", "skyformer", "primal"]
    assert all(c.megabytes > 0 and c.milliseconds > 0 for c in advice.costs)
    for head in advice.heads:
        assert 1 <= head.rank <= 14
        assert 0 < head.mass <= 1
        assert head.rank_centred > head.rank  # the common part hides how many others there are
        assert 1 <= head.needed <= 14


def test_a_landmark_for_every_token_explains_the_layer_and_a_primal_layer_does_not(advice):
    r2 = {(f.layer[14], f.attention): f.r2 for f in advice.fits}
    for i in "01":
        assert r2[i, "skyformer"] > r2[i, "primal"]
        assert r2[i, "linear"] > 0


def test_the_page_and_the_table_say_the_same(advice, tmp_path):
    advice.to_html(tmp_path / "advice.html")
    page = (tmp_path / "advice.html").read_text("utf-8")
    printed = str(advice)
    for word in ("encoder.layer.1.attention.self", "skyformer", "mass@4", "64 tokens", "random"):
        assert word in page
        assert word in printed
    assert advice.verdict() in printed
    assert json.loads(advice.to_json())["verdict"] == advice.verdict()


def made(
    r2: dict[tuple[str, str], float],
    costs: dict[str, tuple[float, float]],
    threshold: float = 0.9,
) -> Advice:
    """Return an advice with given fits and, by mechanism, milliseconds and megabytes."""
    layers = dict.fromkeys(layer for layer, _ in r2)
    return Advice(
        [HeadStatistics(layer, 0, *[1.0] * 8, needed=7) for layer in layers],
        [LayerFit(layer, name, 0.0, value) for (layer, name), value in r2.items()],
        [LayerCost(name, *numbers) for name, numbers in costs.items()],
        length=64,
        data_length=14,
        rank=4,
        threshold=threshold,
    )


FITS = {("x", "linear"): 0.95, ("y", "linear"): 0.2, ("x", "flow"): 0.92, ("y", "flow"): 0.91}


def test_the_recommendation_saves_most_at_the_required_fidelity():
    # equal fidelity: the faster one, whatever its R²
    r2 = {("x", "sky"): 0.99, ("x", "linear"): 0.93}
    found = made(r2, {"softmax": (10, 4), "sky": (6.9, 3.5), "linear": (1, 1)})
    assert (found.attention, found.layers) == ("linear", ["x"])
    assert "2 mechanisms explain 90% of a layer's output or more" in found.verdict()
    assert "1.0 ms instead of 10.0 and 1.0 MB instead of 4.0" in found.verdict()
    # equal time: the smaller one, then the better fit
    assert made(r2, {"softmax": (10, 4), "sky": (1, 2), "linear": (1, 3)}).attention == "sky"
    assert made(r2, {"softmax": (10, 4), "sky": (1, 3), "linear": (1, 3)}).attention == "sky"
    # twice the layers at half the speed-up saves more
    costs = {"softmax": (10.0, 4.0), "linear": (1.0, 1.0), "flow": (5.0, 1.0)}
    found = made(FITS, costs)
    assert found.saved_time("linear") == pytest.approx(0.45)
    assert found.saved_time("flow") == pytest.approx(0.5)
    assert (found.attention, found.layers) == ("flow", ["x", "y"])
    assert found.layers_for("linear") == ["x"]
    assert found.verdict().startswith("Convert 2 of 2 layers to flow: x, y.")
    assert "on inputs of at most 14 tokens" in found.verdict()


def test_nothing_is_recommended_without_fidelity_or_without_a_saving():
    costs = {"softmax": (10.0, 4.0), "linear": (1.0, 1.0), "flow": (5.0, 1.0)}
    unlike = made(FITS, costs, threshold=0.99)
    assert (unlike.attention, unlike.layers) == (None, [])
    assert unlike.verdict().startswith("Convert nothing: no mechanism explains 99%")
    with pytest.raises(ConversionError, match=r"best: linear with R² 0\.95 in x"):
        unlike.config()
    slow = made(FITS, {"softmax": (1.0, 4.0), "linear": (3.0, 1.0), "flow": (2.0, 1.0)})
    assert (slow.attention, slow.layers) == (None, [])
    with pytest.raises(
        ConversionError, match=r"no mechanism .* is faster .best: flow with 2\.0 ms"
    ):
        slow.config()
    assert made(FITS, costs).config() == SurgeryConfig("flow", {}, layers=["x", "y"])


def test_a_decoder_is_advised_on_causal_mechanisms_alone():
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=32,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    data = [{"input_ids": torch.randint(1, 40, (2, 12))} for _ in range(4)]
    found = advise(model, data, AdviceConfig(length=32))
    names = {f.attention for f in found.fits}
    assert "linear" in names
    assert not names & {"softmax", "skyformer", "nystromformer"}
    direct = advise(
        model,
        data,
        AdviceConfig(
            (
                "skyformer",
                "linear",
            ),
            length=32,
        ),
    )
    assert "skyformer" in direct.skipped
    assert {f.attention for f in direct.fits} == {"linear"}


def test_a_few_steps_help_further():
    model, data = bert(), texts()
    short = advise(model, data, AdviceConfig(("linear",), length=16))
    longer = advise(model, data, AdviceConfig(("linear",), length=16, steps=30))
    assert sum(f.r2 for f in longer.fits) > sum(f.r2 for f in short.fits)


def test_convert_follows_the_advice():
    model, data = bert(), texts()
    with pytest.raises(ConversionError, match="data="):
        convert(model, SurgeryConfig("skyformer", layers="auto"))
    chosen = advise(model, data, AdviceConfig(("skyformer",), length=16)).layers_for("skyformer")
    assert chosen
    done = convert(model, SurgeryConfig("skyformer", layers="auto"), data=data)
    assert done.names == chosen


def test_images_and_plain_encoders_are_advised_too():
    layer = nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
    found = advise(layer, [torch.randn(4, 9, 16) for _ in range(4)], AdviceConfig(("linear",)))
    assert found.length == 9
    assert [f.layer for f in found.fits] == ["self_attn"]


@pytest.mark.raw
def test_bad_requests_are_refused():
    with pytest.raises(ValueError, match=r"at least two batches, .* got 1"):
        advise(bert(), texts(1))
    with pytest.raises(ValueError, match="threshold must be between 0 and 1, got -1"):
        AdviceConfig(threshold=-1)
    with pytest.raises(ConversionError, match="no attention module"):
        advise(nn.Linear(2, 2), [torch.ones(1, 2), torch.ones(1, 2)])
