"""``primal analyze``: pages and numbers about a saved model."""

import json

import numpy as np
import pytest
import torch
from tests.cli.test_convert import fails, save_bert

from primal_attention.analysis import list_analyses
from primal_attention.cli.main import main
from primal_attention.models import EncoderClassifier, EncoderConfig
from primal_attention.support.files import write_sealed
from primal_attention.surgery import SurgeryConfig, convert, save_converted
from primal_attention.surgery.loading import load_any

pytest.importorskip("transformers")
__all__ = ["fails"]  # the fixture for commands that print their progress


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return save_bert(tmp_path_factory.mktemp("models") / "bert")


def test_the_page_has_a_section_for_every_analysis_that_suits(bert, tmp_path, capsys):
    options = ["--samples", "6", "--advice.attentions", "linear", "flow", "--spectrum.first", "4"]
    assert main(["analyze", str(bert), "--out", "new", *options]) == 0
    printed = capsys.readouterr().out
    record = json.loads((tmp_path / "new" / "analyze.json").read_text("utf-8"))
    names = list(record["verdicts"])
    assert names[:2] == ["spectrum", "advice"]
    assert set(names) | set(record["skipped"]) == set(list_analyses())
    files = ["analyze.json", "report.html", *(f"{name}.json" for name in names)]
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == sorted(files)
    page = (tmp_path / "new" / "report.html").read_text("utf-8")
    assert page.count("What this does not show.") == len(names)
    for name in names:
        assert f"{name}: {record['verdicts'][name]}" in printed
        assert f">{name.capitalize()}</h2>" in page
    advice = json.loads((tmp_path / "new" / "advice.json").read_text("utf-8"))
    assert {fit["attention"] for fit in advice["fits"]} == {"linear", "flow"}
    spectrum = json.loads((tmp_path / "new" / "spectrum.json").read_text("utf-8"))
    assert [len(layer["effective_rank"]) for layer in spectrum["layers"]] == [4, 4, 4]


def test_a_converted_model_has_spectra_and_no_advice(bert, tmp_path, capsys, fails):
    model = load_any(bert).model
    convert(model, SurgeryConfig("primal-dual", layers="last:1"))
    save_converted(model, "new")
    assert main(["analyze", "new", "--out", "pages", "--samples", "4"]) == 0
    printed = capsys.readouterr().out
    assert "advice: does not suit this model: The model is converted already" in printed
    assert "encoder.layer.2.attention.self.attention" in printed
    assert not (tmp_path / "pages" / "advice.json").exists()
    assert "converted already" in fails("analyze", "new", "advice", "--out", "other")
    # a moved original is named by the user
    content = json.loads((tmp_path / "new" / "conversion.json").read_text("utf-8"))
    content["source"] = "elsewhere"
    write_sealed(tmp_path / "new", {"conversion.json": json.dumps(content)})
    assert "not in elsewhere; give its folder with --original" in fails(
        "analyze", "new", "--out", "other"
    )
    again = ["analyze", "new", "--out", "other", "--original", str(bert), "--samples", "4"]
    assert main(again) == 0
    # the folder of the command needs no original
    assert main(["convert", str(bert), "--out", "whole", "--samples", "4"]) == 0
    capsys.readouterr()
    assert main(["analyze", "whole", "--out", "more", "--samples", "4"]) == 0
    assert "The model is converted already" in capsys.readouterr().out


def test_a_model_of_this_library_is_measured_on_arrays(tmp_path, capsys, fails):
    config = EncoderConfig(num_classes=2, num_features=3, dim=16, num_heads=2)
    EncoderClassifier(config).save_pretrained(tmp_path / "run" / "model")
    np.savez("series.npz", x=np.random.default_rng(0).standard_normal((9, 7, 3)).astype("f4"))
    arguments = ["run", "spectrum", "--data", "series.npz", "--out", "pages"]
    assert main(["analyze", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "blocks.1.attention" in printed
    assert "squared KKT residual" in printed
    assert "no tokenizer" in fails("analyze", "run", "--out", "other")
    assert "not empty" in fails("analyze", *arguments)
    # --NAME is the same as NAME
    assert main(["analyze", "run", "--spectrum", "--data", "series.npz", "--out", "again"]) == 0
    assert (tmp_path / "again" / "spectrum.json").exists()
    assert main(["analyze", *arguments, "--overwrite"]) == 0


def test_whole_converted_models_of_transformers_are_loaded_with_their_layers(bert, tmp_path):
    model = load_any(bert).model
    convert(model, SurgeryConfig("linear"))
    model.save_pretrained(tmp_path / "whole")
    again = load_any(tmp_path / "whole").model
    ids = torch.randint(5, 25, (2, 9))
    assert torch.equal(again(ids).last_hidden_state, model(ids).last_hidden_state)


def test_mistakes_are_told_in_one_sentence(bert, tmp_path, fails):
    assert "Did you mean 'spectrum'" in fails("analyze", bert, "spectrm", "--out", "x")
    assert "first must be at least 1" in fails(
        "analyze", bert, "--out", "x", "--spectrum.first", "0"
    )
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text("{")
    assert "is not readable as JSON" in fails("analyze", "bad", "--out", "x")
    (tmp_path / "bad" / "config.json").write_text("[]")
    assert "must hold an object" in fails("analyze", "bad", "--out", "x")
    (tmp_path / "bad" / "config.json").write_text("{}")
    assert "it has no model.safetensors" in fails("analyze", "bad", "--out", "x")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad"]


def test_a_model_whose_answer_overflows_is_not_measured(bert, tmp_path, fails):
    model = load_any(bert).model
    model.encoder.layer[0].output.dense.weight.data.fill_(3e38)  # finite itself
    model.save_pretrained(tmp_path / "large")
    for file in bert.glob("*token*"):
        (tmp_path / "large" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "a.txt").write_text("a b c a b c\n" * 40)
    given = ("--data", tmp_path / "a.txt", "--out", tmp_path / "page")
    assert "holds NaN or infinity on the first inputs" in fails("analyze", "large", *given)
    assert not (tmp_path / "page").exists()
