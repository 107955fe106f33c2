"""A sentiment classifier of sentences and short passages: MiniLM, fine-tuned on IMDb reviews."""

import functools
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from primal_attention.support.files import SealedFolder, parse_tensors
from primal_attention.training import TrainingConfig, fit
from primal_studies.kit.pretrained import minilm
from primal_studies.kit.texts import Labelled, imdb_reviews

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "Review",
    "accuracy",
    "classifier",
    "fine_tune",
    "held_out_sentences",
    "label_scores",
    "split_sentences",
    "texts",
]

LABELS = ("negative", "positive")
PASSAGE_WORDS, PASSAGE_PIECES = 80, 96
SENTENCE_WORDS = 6, 40


def split_sentences(review: str) -> list[str]:
    """Return the sentences of a review.

    Example:
        >>> split_sentences("A gem.<br /><br />I would watch it again! Would you?")
        ['A gem.', 'I would watch it again!', 'Would you?']
    """
    return re.split(r"(?<=[.!?])\s+", re.sub(r"(\s*<br ?/?>)+", " ", review).strip())


@functools.cache
def _reviews(split: str, data: Path | None) -> list[Labelled]:
    """Return the reviews of a split in a random order that is always the same."""
    rows = list(imdb_reviews(split, data))
    random.Random(0).shuffle(rows)
    return rows


def texts(split: str, count: int, kind: str, data: Path | None = None) -> list[Labelled]:
    """Return texts of IMDb with the class of their review, one a review.

    Args:
        split: ``"train"`` or ``"test"``.
        count: How many reviews to take; a review without such a text gives none.
        kind: ``"review"`` for the whole text, ``"passage"`` for whole sentences of at most 80 words
            together, ``"sentence"`` for one sentence of 6 to 40 words. Passages come from the
            first reviews, sentences from the last ones, at a random place.
        data: Folder with ``text/imdb``; by default that of ``PRIMAL_DATA``.
    """
    reviews, generator = _reviews(split, data), random.Random(1)
    chosen = reviews[-count:] if kind == "sentence" else reviews[:count]
    if kind == "review":
        return [Labelled(" ".join(split_sentences(text)), label) for text, label in chosen]
    cut = _passage if kind == "passage" else _sentence
    found = ((cut(split_sentences(text), generator), label) for text, label in chosen)
    return [Labelled(text, label) for text, label in found if text]


def _passage(sentences: Sequence[str], generator: random.Random) -> str:
    start = generator.randrange(len(sentences))
    words = 0
    for stop in range(start, len(sentences)):
        words += len(sentences[stop].split())
        if words > PASSAGE_WORDS:
            return " ".join(sentences[start : max(stop, start + 1)])
    return " ".join(sentences[start:])


def _sentence(sentences: Sequence[str], generator: random.Random) -> str:
    low, high = SENTENCE_WORDS
    fitting = [s for s in sentences if low <= len(s.split()) <= high]
    return generator.choice(fitting) if fitting else ""


class Review(NamedTuple):
    """The sentences of a review, and its class."""

    sentences: list[str]
    label: int


def held_out_sentences(data: Path | None = None) -> Iterator[Review]:
    """Yield the test reviews in a random order that is always the same."""
    for text, label in _reviews("test", data):
        yield Review(split_sentences(text), label)


class _Texts(Dataset[dict[str, Tensor]]):
    """Word pieces and classes; items of similar length share a batch.

    Every second text has up to half of its pieces masked. So the classifier knows the inputs that
    explanations show it, and the mask token alone is no sign of a class.
    """

    def __init__(self, rows: Sequence[Labelled]) -> None:
        tokenizer = minilm()[1]
        options = {"truncation": True, "max_length": PASSAGE_PIECES}
        self.ids = [
            _masked(tokenizer(row.text, **options).input_ids, i, tokenizer.mask_token_id)
            for i, row in enumerate(rows)
        ]
        self.labels = [row.label for row in rows]
        self.group_by = torch.tensor([len(ids) for ids in self.ids])

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "input_ids": torch.tensor(self.ids[index]),
            "labels": torch.tensor(self.labels[index]),
        }


def _masked(ids: list[int], index: int, mask: int) -> list[int]:
    """Return the pieces of every second text with some of them masked, never the special ones."""
    generator = random.Random(index)
    share = generator.random() / 2 if index % 2 else 0.0
    inner = [mask if generator.random() < share else piece for piece in ids[1:-1]]
    return [ids[0], *inner, ids[-1]]


def _collate(items: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    ids = [item["input_ids"] for item in items]
    lengths = torch.tensor([len(row) for row in ids])
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)  # [PAD] is piece 0
    keep = torch.arange(padded.shape[1]) < lengths[:, None]
    labels = torch.stack([item["labels"] for item in items])
    return {"input_ids": padded, "attention_mask": keep.long(), "labels": labels}


def classifier() -> Any:
    """Return MiniLM with a new head on ``[CLS]`` for two classes."""
    from transformers import BertForSequenceClassification

    encoder, _ = minilm()
    settings = encoder.config.to_dict() | {
        "id2label": dict(enumerate(LABELS)),
        "label2id": {name: i for i, name in enumerate(LABELS)},
        "num_labels": len(LABELS),
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kind: Any = BertForSequenceClassification
        model = kind(type(encoder.config)(**settings))
    model.bert.load_state_dict(encoder.state_dict())
    return model.eval()


def fine_tune(
    folder: Path, *, num_passages: int, num_sentences: int, seed: int = 0, data: Path | None = None
) -> Any:
    """Return the fine-tuned classifier; train it first, or continue, if the folder has none.

    One pass over passages and sentences of the training reviews; the last weights are kept, so
    nothing is chosen by held-out text.

    Args:
        folder: Checkpoints while it trains, then ``model/model.safetensors``.
        num_passages: Training reviews that give a passage.
        num_sentences: Training reviews that give a sentence.
        seed: Seed of the order of the batches and of dropout.
        data: Folder with ``text/imdb``; by default that of ``PRIMAL_DATA``.
    """
    model, weights = classifier(), folder / "model" / "model.safetensors"
    if weights.exists():
        content = SealedFolder(weights.parent).read(weights.name)
        model.load_state_dict(parse_tensors(content, weights))
        return model
    rows = [
        *texts("train", num_passages, "passage", data),
        *texts("train", num_sentences, "sentence", data),
    ]
    config = TrainingConfig(
        epochs=1, batch_size=32, lr=5e-5, schedule="linear", warmup=0.1, save_steps=100, seed=seed
    )
    fit(model, _Texts(rows), config=config, collate=_collate, out=folder, resume=True)
    return model


@torch.no_grad()
def label_scores(model: "nn.Module", sentences: Sequence[str], *, max_length: int = 256) -> Tensor:
    """Return the probability of each class for every text, ``[texts, classes]``."""
    tokenizer = minilm()[1]
    order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
    found = torch.zeros(len(sentences), len(LABELS))
    options = {"padding": True, "truncation": True, "return_tensors": "pt"}
    for start in range(0, len(order), 32):
        chosen = order[start : start + 32]
        batch = tokenizer([sentences[i] for i in chosen], max_length=max_length, **options)
        found[chosen] = model.eval()(**batch).logits.softmax(-1)
    return found


def accuracy(model: "nn.Module", rows: Sequence[Labelled]) -> float:
    """Return the share of texts whose class is that of their review."""
    guesses = label_scores(model, [row.text for row in rows]).argmax(-1)
    return float((guesses == torch.tensor([row.label for row in rows])).double().mean())
