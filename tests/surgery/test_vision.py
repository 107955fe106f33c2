"""timm: ``attn_layer=``, replacement, and the models of the paper by name."""

import pytest
import torch
from tests.surgery.conftest import sharpen
from torch import nn

from primal_attention.attention import PrimalAttention, ksvd_loss
from primal_attention.hosts import (
    ConversionError,
    converted_layers,
    register_timm_models,
    timm_attention,
)
from primal_attention.surgery import SurgeryConfig, convert, inspect_targets, revert

timm = pytest.importorskip("timm")
SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 4}
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def vit(**options):
    torch.manual_seed(0)
    model = timm.models.VisionTransformer(**SMALL, num_classes=5, **options)
    return sharpen(model).eval()


@pytest.mark.parametrize("options", [{}, {"qkv_bias": False}, {"proj_bias": False}], ids=str)
@torch.no_grad()
def test_softmax_in_a_vit_changes_nothing(options):
    model = vit(**options)
    before = model(IMAGES)
    conversion = convert(model, SurgeryConfig("softmax"))
    assert conversion.names == [f"blocks.{i}.attn" for i in range(3)]
    torch.testing.assert_close(model(IMAGES), before, atol=1e-5, rtol=1e-5)
    revert(model, conversion)
    assert torch.equal(model(IMAGES), before)


@pytest.mark.parametrize("name", ["primal", "primal-dual", "skyformer", "linear"])
def test_other_mechanisms_train_in_a_vit(name):
    model = vit().train()
    convert(model, SurgeryConfig(name, layers="last:1"))
    loss = model(IMAGES).logsumexp(-1).mean()
    if name.startswith("primal"):
        loss = loss + 0.1 * ksvd_loss(model)
    loss.backward()
    assert all(
        p.grad is None or p.grad.isfinite().all()
        for p in converted_layers(model)["blocks.2.attn"].parameters()
    )


def test_dropout_after_the_output_map_carries_over():
    model = vit(proj_drop_rate=0.3)
    convert(model, SurgeryConfig("linear"))
    assert {m.attention.dropout.p for m in converted_layers(model).values()} == {0.3}
    other = vit(proj_drop_rate=0.3)
    convert(other, SurgeryConfig("linear", {"dropout": 0.1}))
    assert {m.attention.dropout.p for m in converted_layers(other).values()} == {0.1}


def test_a_constructor_takes_any_attention_as_its_layer():
    for name, options in (("primal", {"rank": 4}), ("favor", {}), ("softmax", {})):
        model = timm.models.VisionTransformer(
            **SMALL, num_classes=5, qkv_bias=False, attn_layer=timm_attention(name, **options)
        )
        assert model(IMAGES).shape == (2, 5)
        assert model.blocks[0].attn.attention.q_proj.bias is None
        assert model.blocks[0].attn.attention.out_proj.bias is not None
    with pytest.raises(ValueError, match="does not normalise queries"):
        timm.models.VisionTransformer(**SMALL, qk_norm=True, attn_layer=timm_attention("linear"))
    with pytest.raises(ValueError, match="no attention named"):
        timm_attention("nonsense")


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: vit(qk_norm=True), "q_norm, k_norm"),
        (
            lambda: timm.create_model(
                "swin_tiny_patch4_window7_224",
                img_size=56,
                window_size=7,
                embed_dim=24,
                depths=(1, 1, 1, 1),
                num_heads=(2, 2, 2, 2),
            ),
            "relative_position_bias_table",
        ),
        (lambda: vit(attn_layer="diff"), "parts that our layers do not have"),
    ],
    ids=["norms", "relative-bias", "differential"],
)
def test_what_is_more_than_softmax_is_refused(build, reason, same_as_before):
    model = build()
    unchanged = same_as_before(model)
    with pytest.raises(ConversionError, match=reason):
        convert(model, SurgeryConfig("linear"))
    unchanged()


def test_arithmetic_nobody_declared_is_found_by_the_trial_call(same_as_before):
    class Capped(timm.layers.Attention):
        def forward(self, x, attn_mask=None, is_causal=False):
            b, n, c = x.shape
            q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
            scores = (q @ k.mT * self.scale).tanh()
            return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, c))

    class Strange(timm.layers.Attention):
        def forward(self, x, rope):
            return super().forward(x)

    for kind, reason in ((Capped, "not compute plain softmax"), (Strange, "trial call failed")):
        model = nn.Sequential(kind(32, 4, qkv_bias=True)).eval()
        unchanged = same_as_before(model)
        (target,) = inspect_targets(model, SurgeryConfig("linear"))
        assert reason in target.reason
        with pytest.raises(ConversionError, match=reason):
            convert(model, SurgeryConfig("linear"))
        unchanged()


def test_the_models_of_the_paper_have_names():
    names = register_timm_models()
    assert register_timm_models() == names
    assert set(names) <= set(timm.list_models("primal*"))
    model = timm.create_model("primal_deit_small_patch16_224", num_classes=100)
    published = model.blocks[-1].attn.attention
    # d = 384, s = 96, 197 sampled tokens: the layer of the paper
    assert sum(p.numel() for p in published.parameters()) == 683_392
    assert [isinstance(m, PrimalAttention) for m in model.modules()].count(True) == 1
    small = {"img_size": 32, "depth": 2, "num_classes": 5}
    every = timm.create_model("primalformer_deit_tiny_patch16_224", rank=8, **small)
    assert [m.rank for m in every.modules() if isinstance(m, PrimalAttention)] == [8, 8]
    assert every(IMAGES).shape == (2, 5)
    tiny = timm.create_model("primal_deit_tiny_patch16_224", **small).train()
    (tiny(IMAGES).sum() + ksvd_loss(tiny)).backward()
    with pytest.raises(ValueError, match="no pretrained weights"):
        timm.create_model("primalformer_deit_tiny_patch16_224", pretrained=True)


@torch.no_grad()
def test_vision_models_of_transformers_pass_their_mask_by_position():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.ViTConfig(image_size=16, patch_size=4, intermediate_size=48, **sizes)
    model = transformers.ViTModel(config).eval()
    pictures = torch.randn(2, 3, 16, 16)
    before = model(pictures).last_hidden_state
    convert(model, SurgeryConfig("softmax"))
    torch.testing.assert_close(model(pictures).last_hidden_state, before, atol=1e-5, rtol=1e-4)
    layer = model.get_submodule(next(iter(converted_layers(model))))
    with pytest.raises(TypeError, match="takes 2 positional arguments, got 3"):
        layer(torch.randn(1, 4, 32), None, None)
