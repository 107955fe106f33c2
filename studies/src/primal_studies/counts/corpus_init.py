"""``primal repro corpus-init``: do primal layers learn faster if they start at counts of a corpus?

Small models of words, with the same batches for every start: everything random; projections of the
first layer from the corpus; token embeddings from the corpus; both. The corpus is the training
text of the task, nothing else.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from primal_attention.support.settings import at_least_one
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.counts.corpus_init_tables import corpus_init_tables

if TYPE_CHECKING:
    from torch import Tensor, nn

    from primal_attention.analysis.counts import CountFactors

__all__ = ["CorpusInitOptions", "CorpusInitStudy"]

STARTS = ("random", "projections", "embeddings", "both")
"""What starts at the corpus, besides nothing."""
_DIM, _HEADS, _LAYERS = 64, 4, 2
_ATTENTIONS = {"imdb": ("primal", "softmax"), "wikitext-2": ("primal-dual", "softmax")}
"""The primal attention of each task, and the other."""
_ETA = 0.1
"""Weight of the regulariser of primal layers."""


@dataclass(frozen=True)
class CorpusInitOptions:
    """Learning curves of small models that start at the counts of their training text."""

    steps: tuple[int, ...] = (25, 50, 100, 200, 400)
    """Steps after which held-out text is scored; training ends with the last."""
    seeds: int = 3
    """Seeds: of the random weights and of the batches."""
    words: int = 4000
    """Words of the vocabulary, without the token for all others."""
    data: Path | None = None
    """Folder with text/imdb and text/wikitext-2; by default that of PRIMAL_DATA."""

    def __post_init__(self) -> None:
        at_least_one(self, "steps", "seeds", "words")


class CorpusInitStudy(Study[CorpusInitOptions]):
    """One cell a task, attention, start and seed."""

    name = "corpus-init"
    Options = CorpusInitOptions

    def cells(self, options: CorpusInitOptions) -> Sequence[Cell]:
        """Return the cells, primal layers first, seed by seed."""
        shared = {"words": options.words, "steps": list(options.steps)}
        return [
            {"task": task, "attention": attentions[kind], "start": start, "seed": seed, **shared}
            for kind in (0, 1)
            for seed in range(options.seeds)
            for task, attentions in _ATTENTIONS.items()
            for start in STARTS
        ]

    def run(self, cell: Cell, options: CorpusInitOptions, scratch: Path) -> Row:
        """Train one model and return its curve."""
        import time

        import torch

        from primal_attention.analysis.counts import initialize_from_corpus

        task = _task(cell["task"], cell["words"], options.data)
        torch.manual_seed(cell["seed"])
        model = task.build(cell["attention"])
        row: dict[str, Any] = {}
        if cell["start"] != "random":
            row = _start(model, cell["start"], task.factors, initialize_from_corpus)
        started = time.process_time()
        curve = _train(model, task, cell["seed"], cell["steps"])
        return {**row, "curve": curve, "seconds": round(time.process_time() - started, 1)}

    def tables(self, rows: Sequence[Row], options: CorpusInitOptions) -> Mapping[str, str | bytes]:
        """Return the table of scores by steps, a picture of the curves and a verdict."""
        return corpus_init_tables(rows)

    def describe(self, row: Row) -> str:
        """Return the cell and its last score."""
        name = f"{row['task']}, {row['attention']}, {row['start']}, seed {row['seed']}"
        return f"{name}: {row['curve'][-1]:.3f} in {row['seconds']:.0f} s"


def _start(
    model: Any, start: str, factors: "CountFactors", initialize: Callable[..., Any]
) -> dict[str, Any]:
    """Change a model; return how much of the factors its projections explain."""
    layer = model.blocks[0].attention
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    fit = initialize(model, factors, embeddings=start != "projections")
    if start == "embeddings":
        layer.load_state_dict(before)
        return {}
    return {"fit": [round(share, 3) for share in fit]}


class _Task(NamedTuple):
    """Texts as numbers, and how a model of them is built, trained and scored."""

    build: Callable[[str], Any]
    inputs: "Tensor"
    targets: "Tensor"
    batch_size: int
    loss: "Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor | None]]"
    score: "Callable[[nn.Module], float]"
    factors: "CountFactors"


def _train(model: Any, task: _Task, seed: int, steps: Sequence[int]) -> list[float]:
    """Train with Adam; return the scores after the wanted steps, the first of them before any."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    curve = [task.score(model)]
    for step in range(1, max(steps) + 1):
        chosen = torch.randint(len(task.inputs), (task.batch_size,), generator=generator)
        model.train()
        loss, aux = task.loss(model, task.inputs[chosen], task.targets[chosen])
        optimizer.zero_grad()
        (loss if aux is None else loss + _ETA * aux).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step in steps:
            curve.append(task.score(model))
    return [round(value, 4) for value in curve]


@functools.cache
def _task(name: str, words: int, data: Path | None) -> _Task:
    return (_imdb if name == "imdb" else _wikitext)(words, data)


def _imdb(words: int, data: Path | None, length: int = 128, held_out: int = 2000) -> _Task:
    """Sentiment of film reviews: their first words, a token for all unknown ones, padding."""
    import numpy as np
    import torch
    from torch.nn.functional import cross_entropy

    from primal_attention.models import EncoderClassifier, EncoderConfig
    from primal_studies.counts.corpus import imdb_counts, imdb_labels, imdb_words

    encode = imdb_counts(words, data=data).encode

    def rows(split: str, reviews: int | None = None) -> "Tensor":
        table = np.full((len(imdb_words(split, reviews, data)), length), words + 1)
        for row, text in zip(table, imdb_words(split, reviews, data), strict=True):
            ids = encode(text[:length])
            row[: len(ids)] = np.where(ids < 0, words, ids)
        return torch.from_numpy(table)

    train, test = rows("train"), rows("test", held_out)
    labels = torch.tensor(imdb_labels("train", None, data))
    expected = torch.tensor(imdb_labels("test", held_out, data))

    def build(attention: str) -> Any:
        return EncoderClassifier(
            EncoderConfig(
                num_classes=2,
                vocab_size=words + 2,
                dim=_DIM,
                num_heads=_HEADS,
                num_layers=_LAYERS,
                attention=attention,
            )
        )

    def loss(model: "nn.Module", x: "Tensor", y: "Tensor") -> "tuple[Tensor, Tensor | None]":
        output = model(x, key_mask=x <= words)
        return cross_entropy(output.logits, y), output.aux_loss

    @torch.no_grad()
    def score(model: "nn.Module") -> float:
        model.eval()
        parts = [model(x, key_mask=x <= words).logits.argmax(-1) for x in test.split(250)]
        return float((torch.cat(parts) == expected).float().mean())

    # padding is not part of the text
    factors = _factors(torch.where(train <= words, train, -1).numpy(), words + 2)
    return _Task(build, train, labels, 32, loss, score, factors)


def _wikitext(words: int, data: Path | None, length: int = 64, held_out: int = 200) -> _Task:
    """Language model of WikiText-2: the loss of the next word, in nats."""
    import torch
    from torch.nn.functional import cross_entropy

    from primal_attention.models import CausalDecoder, DecoderConfig
    from primal_studies.counts.corpus import wikitext_ids

    def rows(split: str) -> "Tensor":
        ids = torch.from_numpy(wikitext_ids(split, words, data))
        return ids[: len(ids) // (length + 1) * (length + 1)].view(-1, length + 1)

    train, test = rows("train"), rows("valid")[:held_out]

    def build(attention: str) -> Any:
        return CausalDecoder(
            DecoderConfig(
                vocab_size=words + 1,
                dim=_DIM,
                num_heads=_HEADS,
                num_layers=_LAYERS,
                attention=attention,
                positions="rotary",
            )
        )

    def loss(model: "nn.Module", x: "Tensor", y: "Tensor") -> "tuple[Tensor, Tensor | None]":
        output = model(x)
        return cross_entropy(output.logits.flatten(0, 1), y.flatten()), output.aux_loss

    @torch.no_grad()
    def score(model: "nn.Module") -> float:
        model.eval()
        parts = [loss(model, x[:, :-1], x[:, 1:])[0] for x in test.split(50)]
        return float(torch.stack(parts).mean())

    factors = _factors(train.numpy(), words + 1)
    return _Task(build, train[:, :-1], train[:, 1:], 16, loss, score, factors)


def _factors(documents: Any, tokens: int) -> "CountFactors":
    """Return the factors of directional PPMI of the training text, of the width of the models."""
    from primal_attention.analysis.counts import Cooccurrence, count_factors

    return count_factors(Cooccurrence(tokens).fit(list(documents)), _DIM, transform="ppmi")
