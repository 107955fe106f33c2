"""Spectra and diagnostics of layers do not depend on padding."""

import pytest
import torch

from primal_attention.analysis.spectrum import layer_spectra, plot_spectra, spectrum_summary
from primal_attention.attention import list_attentions
from primal_attention.models import EncoderClassifier, EncoderConfig

MEASURABLE = [n for n in list_attentions() if n not in ("primal-relative", "primal-static")]


def build(attention: str, **options) -> EncoderClassifier:
    config = EncoderConfig(
        num_classes=2, num_features=3, dim=16, num_heads=2, attention=attention, **options
    )
    return EncoderClassifier(config).eval()


def ragged() -> tuple[torch.Tensor, torch.Tensor]:
    keep = torch.arange(11) < torch.tensor([[11], [7], [7], [1]])
    return torch.randn(4, 11, 3), keep


@pytest.mark.parametrize("name", MEASURABLE)
def test_padding_changes_no_spectrum(name):
    model, (x, keep) = build(name), ragged()
    together = layer_spectra(model, x, key_mask=keep)
    assert [layer.name for layer in together] == ["blocks.0.attention", "blocks.1.attention"]
    for i, length in enumerate(keep.sum(1).tolist()):
        alone = layer_spectra(model, x[i : i + 1, :length])
        for a, b in zip(together, alone, strict=True):
            k = min(length, b.singular_values.shape[-1])
            got, want = a.singular_values[i, :, :k], b.singular_values[0, :, :k]
            torch.testing.assert_close(got, want, atol=2e-4, rtol=2e-3)


def test_spectrum_of_a_softmax_layer_is_that_of_its_matrix():
    model, (x, _) = build("softmax"), ragged()
    seen = []
    layer = model.blocks[0].attention
    handle = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(x)
    handle.remove()
    q, k = (p(seen[0]).unflatten(-1, (2, 8)).transpose(1, 2) for p in (layer.q_proj, layer.k_proj))
    want = torch.linalg.svdvals((q @ k.mT / 8**0.5).softmax(-1))
    got = layer_spectra(model, x)[0]
    torch.testing.assert_close(got.singular_values, want, atol=1e-5, rtol=1e-4)
    assert got.diagnostics is None


def test_a_primal_layer_reports_its_own_diagnostics_and_the_model_keeps_its_mode():
    model, (x, keep) = build("primal", primal_layers="last:1"), ragged()
    model.train()
    first, last = layer_spectra(model, x, key_mask=keep)
    assert model.training
    assert not model.blocks[0].attention._forward_pre_hooks
    assert first.diagnostics is None
    numbers = spectrum_summary([first, last])
    assert numbers["squared KKT residual"] == pytest.approx(last.diagnostics.kkt.mean().item())
    assert set(numbers) == {"effective rank", "squared KKT residual", "balance", "off-diagonality"}
    assert set(spectrum_summary([first])) == {"effective rank"}
    assert spectrum_summary([]) == {}


@pytest.mark.parametrize(("name", "causal"), [("primal-relative", False), ("primal", True)])
def test_layers_without_one_matrix_are_left_out(name, causal):
    model, (x, _) = build(name, is_causal=causal), ragged()
    assert layer_spectra(model, x) == []


def test_causal_layers_are_measured_as_they_run():
    model = build("softmax", is_causal=True, num_layers=1)
    x = torch.randn(1, 6, 3)
    full = build("softmax", num_layers=1)
    full.load_state_dict(model.state_dict())
    a, b = (layer_spectra(m, x)[0].singular_values for m in (model, full))
    assert not torch.allclose(a, b)


def test_picture_has_one_panel_a_layer_and_dotted_controls():
    plt = pytest.importorskip("matplotlib.pyplot")
    x, keep = ragged()
    groups = {n: layer_spectra(build(n), x, key_mask=keep) for n in ("primal", "softmax")}
    figure = plot_spectra(groups, groups)
    assert [a.get_title() for a in figure.axes] == ["layer 1", "layer 2"]
    styles = [line.get_linestyle() for line in figure.axes[0].lines]
    assert styles == ["-", ":", "-", ":"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["primal", "softmax"]
    plt.close(figure)
    with pytest.raises(ValueError, match="holds no layer"):
        plot_spectra({"primal": []})
