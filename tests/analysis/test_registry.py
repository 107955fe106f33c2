"""Analyses are listed without torch, found by name, and run with options of their own class."""

import json
import subprocess
import sys

import pytest
import torch

from primal_attention.analysis import analysis_entry, list_analyses, register_analysis
from primal_attention.models import EncoderClassifier, EncoderConfig


def test_names_and_help_need_no_torch():
    code = (
        "import sys; from primal_attention.analysis.registry import list_analyses, analysis_entry;"
        "print(list_analyses(), analysis_entry('spectrum').load_options()().first);"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "spectrum" in done.stdout


@pytest.mark.parametrize("name", list_analyses())
def test_every_entry_has_a_sentence_and_default_options(name):
    entry = analysis_entry(name)
    assert entry.summary.endswith(".")
    assert entry.load_options()() == entry.load_options()()


@pytest.mark.raw
def test_wrong_names_and_options_are_refused():
    with pytest.raises(ValueError, match="Did you mean 'spectrum'"):
        analysis_entry("spectrm")
    with pytest.raises(ValueError, match="already registered"):
        register_analysis("spectrum", summary="", options="", function="")
    with pytest.raises(TypeError, match="must be of type SpectrumOptions, got dict"):
        analysis_entry("spectrum").run(torch.nn.Identity(), [torch.ones(1)], {})
    with pytest.raises(ValueError, match="first must be at least 1, got 0"):
        analysis_entry("spectrum").load_options()(first=0)


def test_a_result_has_picture_json_and_page(tmp_path):
    pytest.importorskip("matplotlib")
    config = EncoderConfig(num_classes=2, num_features=3, dim=16, num_heads=2)
    batches = [{"x": torch.randn(5, 9, 3)}]
    entry = analysis_entry("spectrum")
    options = entry.load_options()(sequences=2)
    result = entry.run(EncoderClassifier(config), batches, options)
    assert [len(layer.singular_values) for layer in result.layers] == [2, 2]
    assert result.plot().startswith(b"\x89PNG")
    numbers = json.loads(result.to_json())
    want = result.layers[0].singular_values.mean(0)
    torch.testing.assert_close(torch.tensor(numbers["layers"][0]["singular_values"]), want)
    assert numbers["layers"][0]["squared KKT residual"] >= 0
    result.to_html(tmp_path / "spectrum.html")
    page = (tmp_path / "spectrum.html").read_text()
    assert "blocks.1.attention" in page
    assert "data:image/png" in page


@pytest.mark.raw
def test_a_model_without_attention_and_no_batch_are_refused():
    entry = analysis_entry("spectrum")
    with pytest.raises(ValueError, match="Identity has no attention layer"):
        entry.run(torch.nn.Identity(), [torch.ones(1)])
    with pytest.raises(ValueError, match="batches is empty"):
        entry.run(torch.nn.Identity(), [])
