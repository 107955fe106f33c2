"""Damaged folders of transformers: one sentence that names the folder, no code, little memory."""

import copy
import json
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from primal_attention.hosts import ConversionError
from primal_attention.models import EncoderClassifier, EncoderConfig
from primal_attention.support.command import UserError
from primal_attention.support.files import UnsealedWarning
from primal_attention.surgery import (
    SurgeryConfig,
    convert,
    layer_r2,
    load_converted,
    load_pretrained,
    save_converted,
)
from primal_attention.surgery.folders import check_weights
from primal_attention.surgery.loading import check_answer, load_any

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c"]
SIZES = {
    "vocab_size": len(WORDS),
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "max_position_embeddings": 16,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A tiny BERT with its tokenizer."""
    transformers.utils.logging.set_verbosity_error()
    folder = tmp_path_factory.mktemp("bert") / "whole"
    transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)).save_pretrained(folder)
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]"}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **names)
    fast.save_pretrained(folder)
    return folder


@contextmanager
def limited() -> Iterator[None]:
    """Allow no more memory than is used now and 2 GB."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2 * 2**30, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def outcome(folder: Path) -> str:
    """Return "loaded", or the message of an error that a user may meet; others are raised."""
    try:
        with limited():
            load_any(folder)
        return "loaded"
    except (ConversionError, UserError) as error:
        assert str(folder) in str(error)  # noqa: PT017 an error of another kind ends the test
        assert "\n" not in str(error)  # noqa: PT017
        return str(error)


@pytest.mark.parametrize("names", [3, True, {"a": 1}, "BertModel", [3], [None]])
def test_names_of_classes_that_are_none_are_told(names, whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "bert")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "architectures": names}))
    with pytest.raises(
        ConversionError, match=r"config\.json has architectures = .* must be a list"
    ):
        load_any(folder)


def edit(folder: Path, name: str, **changes: Any) -> None:
    content = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(content | changes))


@pytest.fixture
def copied(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "model")
    return tmp_path / "model"


def test_the_whole_folder_is_read(copied):
    assert outcome(copied) == "loaded"


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("config.json", {"num_hidden_layers": 10**9}, "num_hidden_layers = 1,000,000,000"),
        ("config.json", {"hidden_size": 10**9}, "numbers, but the files of weights hold"),
        ("config.json", {"vocab_size": 10**12}, "model in|numbers, but"),
        ("config.json", {"hidden_size": 16}, "cannot be loaded|lack"),
        ("config.json", {"hidden_size": "8"}, "cannot be loaded"),
        ("config.json", {"hidden_act": ["gelu"]}, "cannot be loaded"),
        ("config.json", {"model_type": ["bert"]}, "cannot be loaded"),
        ("config.json", {"model_type": "nothing"}, "cannot be loaded"),
        ("config.json", {"attn_implementation": "somebody/kernel"}, "never run"),
        ("config.json", {"num_labels": 10**10}, "num_labels"),
        ("tokenizer_config.json", {"tokenizer_class": ["a"]}, "The tokenizer in"),
        ("tokenizer.json", {"model": {"type": "BPE"}}, "The tokenizer in"),
        ("tokenizer.json", {"added_tokens": 3}, "The tokenizer in"),
    ],
)
def test_wrong_values_are_refused_before_memory_is_taken(name, changes, message, copied):
    edit(copied, name, **changes)
    assert re.search(message, outcome(copied))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_lost_file_is_named(name, copied):
    (copied / name).unlink()
    assert name in outcome(copied)


def test_truncated_weights_are_refused(copied):
    path = copied / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    assert "cannot be loaded" in outcome(copied)
    path.write_bytes(path.read_bytes()[:5])
    assert "truncated" in outcome(copied)


def test_no_damage_ends_in_a_foreign_error(whole, tmp_path):
    rng = np.random.default_rng(0)
    values = [None, -1, 2.5, "8", [], {}, [[1]], 10**9, 2**63, True, ""]
    loaded = 0
    files = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    for case in range(60):
        folder = tmp_path / str(case)
        shutil.copytree(whole, folder)
        path = folder / files[case % 4]
        data = bytearray(path.read_bytes())
        kind = case // 4 % 4
        if kind == 0:
            path.write_bytes(data[: int(rng.integers(len(data)))])
        elif kind == 1 or path.suffix == ".safetensors":
            for place in rng.integers(min(len(data), 3000), size=3):
                data[place] ^= 1 << int(rng.integers(8))
            path.write_bytes(data)
        else:
            content = json.loads(data)
            key = sorted(content)[int(rng.integers(len(content)))]
            content[key] = values[int(rng.integers(len(values)))]
            path.write_text(json.dumps(content))
        loaded += outcome(folder) == "loaded"
        shutil.rmtree(folder)
    assert loaded < 40  # some settings have no effect


@pytest.mark.filterwarnings("ignore:rank=")
def test_a_converted_folder_is_as_well_guarded(whole, tmp_path):
    model = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)).eval()
    convert(model, SurgeryConfig("linear"))
    model.save_pretrained(tmp_path)
    load_pretrained(transformers.BertForMaskedLM, tmp_path)
    good = (tmp_path / "config.json").read_text()
    record = json.loads(good)["quantization_config"]
    settings = {**record["config"], "attention": "primal"}
    for changes in (
        {"quantization_config": [1]},
        {"quantization_config": {**record, "config": {"attention": 3}}},
        {"quantization_config": {**record, "config": {**settings, "options": {"rank": 10**9}}}},
        {"hidden_size": 10**9},
        {"num_hidden_layers": 10**9},
    ):
        edit(tmp_path, "config.json", **changes)
        with limited(), pytest.raises(ConversionError, match=str(tmp_path)):
            load_pretrained(transformers.BertForMaskedLM, tmp_path)
        (tmp_path / "config.json").write_text(good)


def spoil(path: Path, value: float) -> None:
    """Put a value that is not finite into the last tensor of a file."""
    tensors = load_file(path)
    list(tensors.values())[-1].view(-1)[0] = value
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(value, copied, tmp_path):
    original = load_any(copied).model
    spoil(copied / "model.safetensors", value)
    assert "not finite" in outcome(copied)
    model = copy.deepcopy(original)
    convert(model, SurgeryConfig("linear"))
    model.save_pretrained(tmp_path / "converted")
    spoil(tmp_path / "converted" / "model.safetensors", value)
    assert "not finite" in outcome(tmp_path / "converted")
    save_converted(model, tmp_path / "layers")
    (tmp_path / "layers" / "SHA256SUMS").unlink()
    spoil(tmp_path / "layers" / "conversion.safetensors", value)
    before = {name: tensor.clone() for name, tensor in original.state_dict().items()}
    with pytest.warns(UnsealedWarning), pytest.raises(ConversionError, match="not finite"):
        load_converted(original, tmp_path / "layers")
    assert all(torch.equal(before[name], t) for name, t in original.state_dict().items())


def test_own_models_and_buffers_that_are_not_finite_are_refused(tmp_path):
    config = EncoderConfig(num_classes=2, num_features=3, dim=16, num_heads=2, num_layers=1)
    EncoderClassifier(config).save_pretrained(tmp_path)
    (tmp_path / "SHA256SUMS").unlink()
    with pytest.warns(UnsealedWarning):
        model = load_any(tmp_path).model
    spoil(tmp_path / "model.safetensors", float("nan"))
    with pytest.warns(UnsealedWarning), pytest.raises(ConversionError, match="not finite"):
        load_any(tmp_path)
    # a mask holds infinity on purpose
    model.register_buffer("mask", torch.tensor([0.0, -float("inf")]))
    check_weights(model, "The weights")
    model.mask[0] = float("nan")
    with pytest.raises(ConversionError, match="The weights are damaged: 'mask' holds"):
        check_weights(model, "The weights")


def test_outputs_that_are_not_finite_are_refused(copied):
    model, data = load_any(copied).model, [{"input_ids": torch.tensor([[2, 5, 6, 3]])}]
    check_answer(model, data[0])
    copy_ = copy.deepcopy(model)
    convert(copy_, SurgeryConfig("linear"))
    for layer in (model, copy_):
        layer.bert.encoder.layer[0].output.dense.weight.data.fill_(3e38)
    with pytest.raises(ConversionError, match="output of BertForMaskedLM holds NaN"):
        check_answer(model, data[0])
    with pytest.raises(ConversionError, match="R² cannot be measured"):
        layer_r2(copy_, model, data)


def test_code_of_a_folder_is_never_run(copied):
    marker = copied / "marker"
    code = f"open({str(marker)!r}, 'w').close()\nclass Own: pass\n"
    (copied / "own.py").write_text(code)
    names = ("AutoConfig", "AutoModel", "AutoModelForMaskedLM", "AutoTokenizer")
    refers = {"auto_map": dict.fromkeys(names, "own.Own"), "model_type": "own"}
    edit(copied, "config.json", **refers)
    edit(copied, "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.Own", None]})
    program = (
        "import sys\n"
        "from primal_attention.hosts import ConversionError\n"
        "from primal_attention.surgery import load_pretrained\n"
        "from primal_attention.surgery.folders import load_tokenizer\n"
        "from primal_attention.surgery.loading import load_any\n"
        "from pathlib import Path\n"
        "import transformers\n"
        "for load in (load_any, lambda f: load_pretrained(transformers.AutoModel, f)):\n"
        "    try: load(Path(sys.argv[1])); print('loaded')\n"
        "    except ConversionError as error: print(error)\n"
        "load_tokenizer(Path(sys.argv[1]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(copied)], input="y\ny\n", capture_output=True, text=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all(str(copied) in line for line in lines)
    assert not marker.exists()
