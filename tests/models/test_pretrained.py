"""Folders that hold a model: exact round trips, and one clear error for everything else."""

import json
import subprocess
import sys

import pytest
import torch

from primal_attention.models import (
    CausalDecoder,
    DecoderConfig,
    DualTowerClassifier,
    EncoderClassifier,
    EncoderConfig,
    ModelFileError,
    PretrainedModel,
)
from primal_attention.support.files import write_sealed

ENCODER = EncoderConfig(
    num_classes=3,
    num_features=4,
    dim=16,
    num_heads=2,
    num_layers=3,
    primal_layers=(0, -1),
    attention_options={"rank": 4},
)
DECODER = DecoderConfig(vocab_size=7, dim=16, num_heads=2, attention="favor", max_length=9,
                        positions="learned")  # fmt: skip
MODELS = [(EncoderClassifier, ENCODER), (DualTowerClassifier, ENCODER), (CausalDecoder, DECODER)]


@pytest.fixture
def folder(tmp_path):
    EncoderClassifier(ENCODER).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(("kind", "config"), MODELS)
def test_round_trip_is_exact(kind, config, tmp_path):
    model = kind(config)
    model.save_pretrained(tmp_path)
    before = torch.get_rng_state()
    for other in (kind.from_pretrained(tmp_path), PretrainedModel.from_pretrained(tmp_path)):
        assert type(other) is kind
        assert other.config == config
        assert not other.training
        for name, weight in model.state_dict().items():
            assert other.state_dict()[name].equal(weight), name
    assert torch.get_rng_state().equal(before)


def test_dtype_follows_the_file_unless_told(tmp_path):
    model = EncoderClassifier(ENCODER, dtype=torch.float64)
    model.save_pretrained(tmp_path)
    assert EncoderClassifier.from_pretrained(tmp_path).head.weight.dtype == torch.float64
    half = EncoderClassifier.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.head.weight.dtype == torch.bfloat16


def test_saving_again_replaces_the_model(folder):
    model = EncoderClassifier(ENCODER)
    model.save_pretrained(folder)
    assert EncoderClassifier.from_pretrained(folder).head.weight.equal(model.head.weight)
    names = ["SHA256SUMS", "config.json", "model.safetensors"]
    assert sorted(p.name for p in folder.iterdir()) == names


def reseal(path, content):
    """Write a file with its checksum, as somebody who edits a folder may."""
    write_sealed(path.parent, {path.name: content})


def edit(path, **changes):
    reseal(path, json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "holds no model"),
        (lambda f: reseal(f / "config.json", "{"), "not readable as JSON"),
        (lambda f: reseal(f / "config.json", "[1, 2]"), "must hold an object"),
        (lambda f: reseal(f / "config.json", '{"model_type": "bert"}'), "not written by save_pre"),
        (lambda f: edit(f / "config.json", config=[1]), "no valid 'config'"),
        (lambda f: edit(f / "config.json", **{"class": ["a"]}), "no valid 'class'"),
        (lambda f: edit(f / "config.json", format=99), "format 99, this version reads 1"),
        (lambda f: edit(f / "config.json", **{"class": "Bert"}), "holds a 'Bert', not a Encoder"),
        (
            lambda f: edit(f / "config.json", **{"class": "CausalDecoder"}),
            "holds a 'CausalDecoder'",
        ),
        (lambda f: edit(f / "config.json", config={"size": 3}), "no setting size"),
        (lambda f: edit(f / "config.json", config={"num_classes": 0}), "describes no valid"),
        (lambda f: (f / "model.safetensors").unlink(), "holds no model: it has no model.saf"),
        (lambda f: reseal(f / "model.safetensors", b""), "is damaged, or no safetensors"),
        (lambda f: reseal(f / "model.safetensors", b"\x80\x04pickle..."), "no safetensors"),
    ],
)
def test_damaged_and_foreign_folders_get_one_clear_error(folder, damage, message):
    damage(folder)
    with pytest.raises(ModelFileError, match=message):
        EncoderClassifier.from_pretrained(folder)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_truncated_weights_are_refused(folder, share):
    data = (folder / "model.safetensors").read_bytes()
    reseal(folder / "model.safetensors", data[: int(share * len(data))])
    with pytest.raises(ModelFileError, match="is damaged, or no safetensors file"):
        EncoderClassifier.from_pretrained(folder)


def test_weights_of_another_model_are_refused(folder, tmp_path):
    EncoderClassifier(
        EncoderConfig(num_classes=5, num_features=4, dim=16, num_heads=2)
    ).save_pretrained(tmp_path / "other")
    other = (tmp_path / "other" / "model.safetensors").read_bytes()
    reseal(folder / "model.safetensors", other)
    with pytest.raises(ModelFileError, match=r"does not belong.*is missing.*more"):
        EncoderClassifier.from_pretrained(folder)


def test_options_that_an_attention_does_not_have_are_named():
    with pytest.raises(ValueError, match=r"the attention primal has no option 'dtype'"):
        EncoderConfig(num_classes=2, num_features=3, attention_options={"dtype": torch.float32})


def test_a_model_of_a_task_loads_in_a_new_process(tmp_path):
    from primal_attention.tasks.series import SeriesConfig, SeriesNetwork

    config = SeriesConfig(num_classes=2, num_channels=1, dim=16)
    SeriesNetwork(config).save_pretrained(tmp_path)
    code = (
        "import sys; from primal_attention.models import PretrainedModel; "
        "print(type(PretrainedModel.from_pretrained(sys.argv[1])).__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "SeriesNetwork"


def test_a_file_cannot_name_a_foreign_module(folder):
    path = folder / "config.json"
    content = json.loads(path.read_text())
    for module in ("antigravity", "primal_attention.cli.main", "primal_attention.tasks.none"):
        reseal(path, json.dumps(content | {"class": "Unknown", "module": module}))
        with pytest.raises(ModelFileError, match="Unknown"):
            EncoderClassifier.from_pretrained(folder)
    assert "antigravity" not in sys.modules
