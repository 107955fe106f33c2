"""``primal repro causal-text``: does a causal graph find smaller explanations than attention does?

MiniLM, fine-tuned on IMDb, classifies short sentences of held-out reviews. Every method looks for
tokens whose replacement by the mask token changes the class. The methods share the model, the
removal and the budget; methods that choose the best of twelve heads are compared with each other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primal_attention.support.command import UserError
from primal_attention.support.output import page
from primal_attention.support.settings import at_least_one
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.causes.compare import ATTENTION, Explanations, estimate_picture, size_verdict

if TYPE_CHECKING:
    from torch import nn

__all__ = ["TextOptions", "TextStudy", "choose_sentences"]

FEWEST, MOST = 6, 16
"""Word pieces of a sentence; 16 have 696 sets of up to three."""
CERTAIN = 0.75
"""Least probability of the right class."""
BUDGET, MAX_SIZE, CHUNK = 700, 3, 20


@dataclass(frozen=True)
class TextOptions:
    """Sizes of explanations of a sentiment classifier, by method."""

    sentences: int = 400
    """Held-out sentences to explain."""
    num_passages: int = 9000
    """Training reviews that give a passage of at most 80 words."""
    num_sentences: int = 9000
    """Training reviews that give a sentence."""
    num_test: int = 1000
    """Held-out texts of each kind that measure the accuracy."""
    certain: float = CERTAIN
    """Least probability of the right class, so that no sentence is just barely right."""
    model: Path | None = None
    """Folder that keeps the fine-tuned model; by default runs/model in the result folder."""
    data: Path | None = None
    """Folder with text/imdb; by default that of PRIMAL_DATA."""

    def __post_init__(self) -> None:
        at_least_one(self, "sentences", "num_passages", "num_sentences", "num_test")


class TextStudy(Study[TextOptions]):
    """One cell for the fine-tuned model, and one for every twenty sentences."""

    name = "causal-text"
    Options = TextOptions

    def cells(self, options: TextOptions) -> Sequence[Cell]:
        """Return the cell of the model, then those of the sentences."""
        trained = {"passages": options.num_passages, "sentences": options.num_sentences}
        other = {} if options.certain == CERTAIN else {"certain": options.certain}
        starts = range(0, options.sentences, CHUNK)
        return [
            {"part": "model", **trained, "test": options.num_test},
            *(
                {"part": "explain", **trained, **other, "budget": BUDGET, "first": i, "stop": stop}
                for i, stop in zip(starts, [*starts[1:], options.sentences], strict=True)
            ),
        ]

    def run(self, cell: Cell, options: TextOptions, scratch: Path) -> Row | Sequence[Row]:
        """Fine-tune and measure the model, or explain some sentences."""
        from primal_studies.causes.sentiment import accuracy, texts

        folder = options.model or scratch.parent / "model"
        sizes = cell["passages"], cell["sentences"]
        model = _model(folder, *sizes, options.data)
        if cell["part"] == "explain":
            # the first sentences of many are those of few, so cells can share the choice
            chosen = _chosen(folder, *sizes, options.data, options.sentences, options.certain)
            return [
                _explain(model, *chosen[number], number)
                for number in range(cell["first"], cell["stop"])
            ]
        kinds = ("review", "passage", "sentence")
        return {
            f"{kind}s right": round(
                accuracy(model, texts("test", cell["test"], kind, options.data)), 4
            )
            for kind in kinds
        }

    def tables(self, rows: Sequence[Row], options: TextOptions) -> Mapping[str, str | bytes]:
        """Return the table with its verdict, and the picture."""
        explained = [row for row in rows if row["part"] == "explain"]
        if not explained:
            return {}
        return summary(explained, [row for row in rows if row["part"] == "model"])


@cache
def _model(folder: Path, passages: int, sentences: int, data: Path | None) -> Any:
    from primal_studies.causes.sentiment import fine_tune

    return fine_tune(folder, num_passages=passages, num_sentences=sentences, data=data)


@cache
def _chosen(
    folder: Path, passages: int, sentences: int, data: Path | None, count: int, certain: float
) -> list[tuple[str, int]]:
    model = _model(folder, passages, sentences, data)
    return choose_sentences(model, count, data, certain=certain)


def choose_sentences(
    model: "nn.Module", count: int, data: Path | None = None, *, certain: float = CERTAIN
) -> list[tuple[str, int]]:
    """Return sentences that the model classifies as their review, and the class.

    The first of each test review that has 6 to 16 word pieces and a probability of at least
    ``certain``; no method of explanation has a part in the choice.
    """
    from primal_studies.causes.sentiment import held_out_sentences, label_scores
    from primal_studies.kit.pretrained import minilm

    tokenizer, found = minilm()[1], list[tuple[str, int]]()
    for review in held_out_sentences(data):
        fitting = [
            text
            for text in review.sentences
            if FEWEST <= len(tokenizer(text, add_special_tokens=False).input_ids) <= MOST
        ]
        scores = label_scores(model, fitting)[:, review.label].tolist() if fitting else []
        right = [t for t, score in zip(fitting, scores, strict=True) if score >= certain]
        found += [(text, review.label) for text in right[:1]]
        if len(found) == count:
            return found
    raise UserError(
        f"only {len(found)} of {count} sentences have their class with a probability of {certain}; "
        "ask for fewer sentences, or train on more text."
    )


def _explain(model: "nn.Module", text: str, label: int, number: int) -> Row:
    """Return what every method finds for one sentence; its words are not stored."""
    from primal_attention.analysis.causes.text import text_subject
    from primal_studies.causes.measure import SearchSettings, explain_by_all
    from primal_studies.kit.pretrained import minilm

    subject = text_subject(model, minilm()[1], text, removal="mask")
    settings = SearchSettings(BUDGET, MAX_SIZE, is_exhaustive=True, nodes=MOST)
    return {
        "sentence": number,
        "class": label,
        "score": round(subject.score, 4),
        "tokens": len(subject.candidates),
        "found": explain_by_all(subject, settings, seed=number),
    }


def summary(explained: Sequence[Row], models: Sequence[Row]) -> dict[str, str | bytes]:
    """Return the table and the picture of explained sentences."""
    easy = [row for row in explained if row["found"]["exhaustive"][0] is not None]
    if not easy:
        return {"table.md": page(f"None of {len(explained)} sentences changes its class.")}
    methods, certain = Explanations(explained, easy), explained[0].get("certain", CERTAIN)
    caption = (
        f"{len(explained)} held-out sentences of {FEWEST} to {MOST} word pieces, classified as "
        f"their review with a probability of at least {certain}; the mask token replaces what is "
        f"removed. *Tokens*: mean and median size of the first set that changes the class, over "
        f"the {len(easy)} sentences that at most {MAX_SIZE} tokens change; where a method finds no "
        f"set, all tokens count. *Difference*: from *{ATTENTION}* on the same sentences. *Found*: "
        f"share of all sentences. *Calls*: median of the sets that the model ran, at most "
        f"{BUDGET}. Intervals: bootstrap over sentences."
    )
    accuracies = [
        "Fine-tuned on {passages} passages and {sentences} sentences of training reviews, every "
        "second one with masked pieces. Right on held-out text: {reviews right:.1%} of reviews, "
        "{passages right:.1%} of passages, {sentences right:.1%} of sentences.".format(**row)
        for row in models[:1]
    ]
    panels = {"size": methods.estimates("sizes"), "cost": methods.estimates("calls")}
    return {
        "table.md": page(
            size_verdict(methods, "tokens"), caption, *accuracies, methods.table("tokens")
        ),
        "picture.png": estimate_picture(panels, xlabels=["tokens", "calls of the model"]),
    }
