"""Wrong values anywhere in a saved configuration: a sentence, without memory and without a wait."""

import json
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest

from primal_attention.models import (
    CausalDecoder,
    DecoderConfig,
    EncoderClassifier,
    EncoderConfig,
    ModelFileError,
    PretrainedModel,
)
from primal_attention.support.files import write_sealed
from primal_attention.tasks.events import EventSequenceConfig, EventSequenceNetwork
from primal_attention.tasks.events.interpolation import InterpolationConfig, InterpolationModel
from primal_attention.tasks.events.model import NextEventConfig, NextEventModel
from primal_attention.tasks.lists.context_model import ContextConfig, ContextEncoder
from primal_attention.tasks.pairs import MultimodalConfig, VisualParser
from primal_attention.tasks.series import SeriesConfig, SeriesNetwork
from primal_attention.tasks.series.blend.model import BlendConfig, SeriesBlend
from primal_attention.tasks.tables import NPTConfig, NPTModel
from primal_attention.tasks.tables.aligned_model import AlignedConfig, AlignedMap

SMALL = {"dim": 8, "num_heads": 2, "num_layers": 1}
MODELS = [
    EncoderClassifier(EncoderConfig(num_classes=2, num_features=3, **SMALL)),
    CausalDecoder(DecoderConfig(vocab_size=5, positions="learned", max_length=9, **SMALL)),
    SeriesNetwork(SeriesConfig(num_classes=2, num_channels=1, **SMALL)),
    SeriesBlend(BlendConfig(num_classes=2, num_channels=1, length=16, num_attentions=2, **SMALL)),
    NextEventModel(NextEventConfig(num_types=3, mark_levels=(2,), **SMALL)),
    EventSequenceNetwork(EventSequenceConfig(num_types=3, num_classes=2, **SMALL)),
    InterpolationModel(InterpolationConfig(num_channels=2, **SMALL)),
    NPTModel(NPTConfig(categories=(0, 3, 2), context_rows=4, row_dim=8, **SMALL)),
    AlignedMap(AlignedConfig(num_inputs=3, num_outputs=2, num_centres=2, hidden=(4,))),
    VisualParser(MultimodalConfig(vocab_size=9, image_size=16, parser_layers=1, **SMALL)),
    ContextEncoder(ContextConfig(anchors=4, input="linear", **SMALL)),
]
HUGE = 10**9
FREE = {
    "EventSequenceNetwork.components",
    "SeriesBlend.max_tokens",
    "SeriesNetwork.max_tokens",
    "VisualParser.mfr_group",
}
"""Numbers that take no memory."""


@contextmanager
def limited(extra: int = 3 * 2**30):
    """Allow no more memory than is used now and a little more."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + extra, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def replace(folder, path, value, good=None):
    content = json.loads(good or (folder / "config.json").read_text())
    part = content["config"]
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    write_sealed(folder, {"config.json": json.dumps(content)})


@pytest.mark.parametrize("model", MODELS, ids=lambda m: type(m).__name__)
def test_a_huge_number_is_refused_before_memory_is_taken(model, tmp_path):
    model.save_pretrained(tmp_path)
    good = (tmp_path / "config.json").read_text()
    whole = json.loads(good)["config"]
    kind = type(model).__name__
    numbers = [(k,) for k, v in whole.items() if type(v) is int and f"{kind}.{k}" not in FREE]
    numbers += [(k, 0) for k, v in whole.items() if isinstance(v, list) and v and type(v[0]) is int]
    accepted = []
    with limited():
        for path in numbers:
            for value in (HUGE, -1, 2.5, "8", None, [1]):
                replace(tmp_path, path, value, good)
                try:
                    PretrainedModel.from_pretrained(tmp_path)
                    accepted.append((path, value))
                except ModelFileError as error:
                    if str(tmp_path) not in str(error):
                        accepted.append((path, value, str(error)))
    assert not [a for a in accepted if a[1] is not None], accepted


@pytest.mark.filterwarnings("ignore:rank=")
@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["num_layers"], HUGE, r"num_layers = 1,000,000,000, but model.safetensors .* only"),
        (["dim"], 2.5, "dim must be a whole number, got 2.5"),
        (["dim"], "8", "dim must be a whole number, got '8'"),
        (["dim"], True, "dim must be a whole number, got True"),
        (["dropout"], "0.1", "dropout must be a number"),
        (["attention"], ["primal"], "attention must be a word"),
        (["attention_options"], [1], "attention_options must be"),
        (["attention_options"], {"rank": 10**9}, "does not belong to|describes no valid"),
        (["attention_options"], {"rank": -1}, "describes no valid EncoderClassifier"),
        (["attention_options"], {"rank": [4]}, "the option rank .* must be a whole number"),
        (["primal_layers"], {"a": 1}, "primal_layers must be"),
        (["hidden_dim"], 10**12, "does not belong to|describes no valid"),
    ],
)
def test_wrong_values_are_named(path, value, message, tmp_path):
    MODELS[0].save_pretrained(tmp_path)
    replace(tmp_path, path, value)
    with limited(), pytest.raises(ModelFileError, match=message):
        EncoderClassifier.from_pretrained(tmp_path)
