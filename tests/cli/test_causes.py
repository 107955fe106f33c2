"""``primal analyze MODEL causes`` and ``primal analyze causes``: graphs and explanations."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from tests.analysis.causes import models
from tests.cli.test_convert import fails

from primal_attention.analysis.causes.analyze import analyze_causes
from primal_attention.analysis.options import CausesOptions
from primal_attention.cli.main import main
from primal_attention.models import EncoderClassifier, EncoderConfig

__all__ = ["fails"]  # the fixture for commands that print their progress
TEXT = "the plot was dull and the cast poor but it was fun"


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return models.tokenizer(tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="module")
def critic(words, tmp_path_factory):
    names = {0: "negative", 1: "positive"}
    config = models.bert(id2label=names, label2id={v: k for k, v in names.items()}).config
    torch.manual_seed(0)
    model = models.transformers.BertForSequenceClassification(config)
    folder = tmp_path_factory.mktemp("critic") / "model"
    models.trained(model, words, steps=60).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def encoder(words, tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder") / "model"
    models.bert("BertModel").save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def test_a_text_is_explained_with_baselines_and_one_page(critic, tmp_path, capsys):
    arguments = ["analyze", str(critic), "causes", "--causes.text", TEXT, "--causes.m", "384"]
    assert main([*arguments, "--causes.compare", "--out", "why.html"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("causes: Without ")
    assert "| attention, best head" in printed
    assert "Wrote why.html" in printed
    text = (tmp_path / "why.html").read_text("utf-8")
    assert text.count('class="causes-panel"') == 5
    assert "What this does not show." in text
    options = ["--causes.heads", "0", "2", "--causes.removal", "drop"]
    assert main([*arguments, *options, "--out", "why.json"]) == 0
    record = json.loads((tmp_path / "why.json").read_text("utf-8"))
    assert sorted(head["head"] for head in record["heads"]) == [0, 2]
    assert record["settings"]["removal"] == "drop"
    assert record["settings"]["m"] == 384


def test_a_target_shows_a_token_of_any_model(encoder, critic, tmp_path, capsys):
    arguments = ["causes", "--causes.text", TEXT, "--causes.tau", "0.1", "--causes.target", "plot"]
    where = ["--causes.layer", "0", "--out", "graph.html"]
    assert main(["analyze", str(encoder), *arguments, *where]) == 0
    printed = capsys.readouterr().out
    assert "Graphs around 'plot', one for each of 4 heads" in printed
    assert "nothing is explained" in printed
    text = (tmp_path / "graph.html").read_text("utf-8")
    assert "encoder.layer.0.attention.self" in text
    # without --out the finding is printed with its limits, and nothing is written
    where = ["--causes.layer", "bert.encoder.layer.1.attention.self", "--causes.heads", "1"]
    assert main(["analyze", str(critic), *arguments, *where]) == 0
    printed = capsys.readouterr().out
    assert "one for each of 1 heads" in printed
    assert "not causes in the world" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["graph.html"]


def test_graphs_of_matrices_need_no_model(tmp_path, capsys, fails):
    effects = np.zeros((4, 4))
    effects[2, 0] = effects[2, 1] = effects[3, 2] = 0.6
    np.save("attention.npy", np.linalg.inv(np.eye(4) - effects))
    arguments = ["analyze", "causes", "graph", "attention.npy", "--tokens", *"abcd"]
    assert main([*arguments, "--tau", "1e-6", "--algorithm", "icd", "--out", "graph.json"]) == 0
    printed = capsys.readouterr().out
    assert "a o→ c  100 % of heads" in printed
    record = json.loads((tmp_path / "graph.json").read_text("utf-8"))
    assert record["heads"][0]["edges"] == ["a o→ c", "b o→ c", "c → d"]
    assert "give m (the width of a head" in fails(*arguments)
    assert "must end in .html" in fails(*arguments, "--out", "graph.txt")


def test_mistakes_are_told_in_one_sentence(encoder, critic, fails):
    def told(*options):
        return fails("analyze", encoder, "causes", "--causes.text", TEXT, *options)

    assert "Did you mean 'graph'" in fails("analyze", "causes", "grph")
    assert "which model? Write primal analyze MODEL spectrum" in fails("analyze", "spectrum")
    assert "one file, which holds one analysis" in fails("analyze", encoder, "--out", "why.html")
    assert "no attention layer 7" in told("--causes.layer", "7")
    assert "heads must be between 0 and 3" in told("--causes.heads", "9")
    assert "--causes.m" in told("--causes.m", "big")
    assert "is no word" in told("--causes.target", "whale")


def test_help_needs_no_torch():
    code = (
        "import sys\nfrom primal_attention.cli.main import main\n"
        "for words in (['causes'], ['causes', 'graph', '--help'], ['--help']):\n"
        "    try:\n        main(['analyze', *words])\n"
        "    except SystemExit:\n        pass\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")
    assert "--causes.max-evals" in done.stdout
    assert "--algorithm" in done.stdout


def test_analyze_explains_the_first_inputs(critic, tmp_path, capsys):
    (tmp_path / "lines.txt").write_text("\n".join(models.reviews(6, seed=1)[0]), "utf-8")
    options = ["--data", "lines.txt", "--causes.inputs", "2", "--causes.alpha", "0.4"]
    assert main(["analyze", str(critic), "causes", "--out", "new", *options]) == 0
    printed = capsys.readouterr().out
    assert "decisions change" in printed
    record = json.loads((tmp_path / "new" / "causes.json").read_text("utf-8"))
    assert len(record["inputs"]) == 2
    text = (tmp_path / "new" / "report.html").read_text("utf-8")
    assert text.count('<div class="causes">') == 2
    assert text.count("<script") == 1
    again = [*options[2:], "--causes.text", "a dull plot", "--overwrite"]
    assert main(["analyze", str(critic), "causes", "--out", "new", *again]) == 0
    one = json.loads((tmp_path / "new" / "causes.json").read_text("utf-8"))
    assert one["tokens"] == ["[CLS]", "a", "dull", "plot", "[SEP]"]


def test_a_model_without_a_decision_gets_graphs(words):
    batches = [dict(words([TEXT, "a fun film"], padding=True, return_tensors="pt"))]
    model = models.bert("BertModel")
    result = analyze_causes(model, batches, CausesOptions(alpha=0.3), tokenizer=words)
    assert "No decision is explained" in result.verdict()
    assert [one.target for one in result.inputs] == [0, 0]
    # padding is cut
    assert result.inputs[1].tokens == ("[CLS]", "a", "fun", "film", "[SEP]")
    assert [len(row) for row in result.table()[1]] == [5, 5]
    assert result.plot()[:4] == b"\x89PNG"
    assert "nothing is explained" in result.report().html()
    # inputs of numbers have no tokenizer and no words
    config = EncoderConfig(num_classes=2, num_features=3, dim=16, num_heads=2, attention="softmax")
    series = analyze_causes(
        EncoderClassifier(config), [torch.randn(2, 7, 3)], CausesOptions(inputs=1)
    )
    assert series.inputs[0].tokens == tuple("0123456")
    with pytest.raises(ValueError, match="has no tokenizer"):
        analyze_causes(model, batches, CausesOptions(text="a"))
    with pytest.raises(ValueError, match="alpha must be between 0 and 1"):
        CausesOptions(alpha=2.0)
