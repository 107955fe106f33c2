"""What is captured equals what the model computes, whichever library the model comes from."""

import pytest
import torch
from torch import nn

from primal_attention.attention import create_attention
from primal_attention.attention.softmax import SoftmaxAttention
from primal_attention.hosts import capture
from primal_attention.models import EncoderClassifier, EncoderConfig


def close(got, want, tolerance=1e-5):
    torch.testing.assert_close(got.double(), want.double(), atol=tolerance, rtol=0)


def hugging_face(kind, implementation):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "bert":
        config = transformers.BertConfig(
            vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=40,
        )  # fmt: skip
    else:
        config = transformers.LlamaConfig(
            vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, intermediate_size=40, pad_token_id=0,
        )  # fmt: skip
    config._attn_implementation = implementation
    return transformers.AutoModel.from_config(config).eval()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_hugging_face_weights_equal_eager_ones(kind, implementation):  # T15
    model = hugging_face(kind, implementation)
    ids = torch.randint(1, 50, (2, 7))
    keep = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    batch = {"input_ids": ids, "attention_mask": keep}
    layers = capture(model, batch)
    assert len(layers) == 2
    model.set_attn_implementation("eager")
    want = model(**batch, output_attentions=True).attentions
    for layer, attention in zip(layers, want, strict=True):
        assert layer.is_causal == (kind == "llama")
        assert layer.weights(1).shape == (4, 4, 4)
        assert layer.weights().dtype == torch.float64
        close(layer.weights(0), attention[0])
        close(layer.weights(1), attention[1, :, :4, :4])
        close(layer.weights(0).sum(-1), torch.ones(4, 7))
        close(layer.weights(1, rows=slice(1, 3), heads=[2]), attention[1, 2:3, 1:3, :4])
        blocks = [part for _, part in layer.row_blocks(0, size=3)]
        torch.testing.assert_close(torch.cat(blocks, 1), layer.weights(0))
        # heads of the output are weights times values, in front of the output map
        assert layer.values(1).shape == (4, 4, 8)


def test_values_and_weights_give_the_heads_of_the_output():
    model = hugging_face("bert", "sdpa")
    ids = torch.randint(1, 50, (1, 7))
    layer = capture(model, {"input_ids": ids}, layers="last")[0]
    heads = layer.weights() @ layer.values()
    close(heads.transpose(0, 1).flatten(1), layer.output[0])
    assert layer.name == "encoder.layer.1.attention.self"


@pytest.mark.parametrize("is_causal", [False, True])
def test_torch_transformer(is_causal):
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(16, 2, 20, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(block, 2, enable_nested_tensor=False).eval()
    x = torch.randn(2, 6, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(6) if is_causal else None
    first = capture(model, {"src": x, "mask": mask}, layers=0)[0]
    assert (first.name, first.is_causal) == ("layers.0.self_attn", is_causal)
    want = model.layers[0].self_attn(
        x, x, x, attn_mask=mask, need_weights=True, average_attn_weights=False
    )[1]
    close(first.weights(1), want[1])


def test_timm_vision_model():
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=3).eval()
    layer = capture(model, torch.randn(1, 3, 32, 32), layers="last")[0]
    assert (layer.name, layer.num_heads) == ("blocks.1.attn", 3)
    model.blocks[1].attn.fused_attn = False
    explicit = capture(model, torch.randn(1, 3, 32, 32), layers="blocks.1.attn")[0]
    assert explicit.weights().shape == layer.weights().shape == (3, 5, 5)
    assert explicit.values().shape == layer.values().shape == (3, 5, 64)


def test_explicit_and_fused_forms_agree():
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=3).eval()
    x = torch.randn(2, 3, 32, 32)
    fused = capture(model, x)[0]
    model.blocks[0].attn.fused_attn = False
    explicit = capture(model, x)[0]
    close(fused.weights(1), explicit.weights(1))
    close(fused.values(1), explicit.values(1))


@pytest.mark.parametrize("name", ["softmax", "linear", "gaussian", "linformer"])
def test_our_layers_give_the_matrix_that_makes_their_output(name):
    torch.manual_seed(0)
    layer = create_attention(name, 16, 2).eval()
    x = torch.randn(2, 9, 16)
    keep = torch.arange(9) < torch.tensor([[9], [5]])
    found = capture(layer, {"x": x, "key_mask": keep})[0]
    assert found.name == ""
    for i, length in enumerate((9, 5)):
        heads = (found.weights(i) @ found.values(i)).transpose(0, 1).flatten(1)
        close(layer.out_proj(heads.float()), layer(x, key_mask=keep)[i, :length], 2e-5)


@pytest.mark.parametrize("weights", ["data", "dual"])
def test_scores_of_a_primal_layer_make_its_output(weights):
    torch.manual_seed(0)
    layer = create_attention("primal", 16, 2, rank=4)
    layer = type(layer)(16, 2, rank=4, weights=weights).eval()
    x = torch.randn(2, 9, 16)
    keep = torch.arange(9) < torch.tensor([[9], [5]])
    found = capture(layer, {"x": x, "key_mask": keep})[0]
    assert not found.has_weights
    scores = found.scores(1)
    assert scores.e.shape == scores.r.shape == (2, 5, 4)
    both = torch.cat([scores.e, scores.r]).transpose(0, 1).flatten(1)[None].float()
    close(layer.project_out(both)[0], layer(x, key_mask=keep)[1, :5], 2e-5)
    assert bool((scores.lam > 0).all())


class Cross(nn.Module):
    """Words that attend to as many patches; the mask is that of the words."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, words, patches, attention_mask):
        return self.attention(words, patches, patches, need_weights=False)[0]


def test_a_mask_of_words_is_no_mask_of_patches():
    keep = torch.tensor([[1, 1, 1, 0, 0]])
    words, patches = torch.randn(2, 1, 5, 8)
    layer = capture(Cross(), {"words": words, "patches": patches, "attention_mask": keep})[0]
    assert layer.weights().shape == (2, 5, 5)
    close(layer.weights().sum(-1), torch.ones(2, 5))


def test_a_model_of_ours_lists_its_layers_once():
    config = EncoderConfig(num_classes=2, num_features=3, dim=16, num_heads=2, num_layers=3)
    model = EncoderClassifier(config)
    layers = capture(model, torch.randn(1, 4, 3))
    assert [layer.name for layer in layers] == [f"blocks.{i}.attention" for i in range(3)]
    assert capture(model, torch.randn(1, 4, 3), layers=[0, -1])[1].name == "blocks.2.attention"
    assert model.training


@pytest.mark.raw
def test_wrong_layers_are_refused():
    layer = SoftmaxAttention(8, 2)
    x = torch.randn(1, 3, 8)
    with pytest.raises(ValueError, match="Identity has no attention layer"):
        capture(nn.Identity(), x)
    with pytest.raises(ValueError, match="no attention layer named 'blocks'"):
        capture(layer, x, layers="blocks")
    with pytest.raises(ValueError, match="no attention layer 3; the model has 1"):
        capture(layer, x, layers=3)
    with pytest.raises(ValueError, match="is not a primal layer"):
        capture(layer, x)[0].scores()
    with pytest.raises(ValueError, match="has no matrix of weights"):
        capture(create_attention("primal", 8, 2), x)[0].weights()


def test_rows_with_several_documents_are_refused():
    batch = {"x": torch.randn(1, 4, 8), "document_ids": torch.tensor([[0, 0, 1, 1]])}
    for name in ("softmax", "primal"):
        layer = capture(create_attention(name, 8, 2).eval(), batch)[0]
        with pytest.raises(ValueError, match="pass a batch without document_ids"):
            layer.weights() if name == "softmax" else layer.scores()
