"""The task of re-ranking: lists of vectors whose groups are known."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from primal_attention.support.command import UserError
from primal_attention.tasks.lists.settings import ContextConfig, VectorSettings
from primal_attention.tasks.sources import Recognition, Source
from primal_attention.tasks.task import Parts, Task

if TYPE_CHECKING:
    from torch import Tensor

    from primal_attention.report import Report
    from primal_attention.tasks.lists.base import BaseReranker
    from primal_attention.tasks.lists.context_model import ContextEncoder, ContextOutput
    from primal_attention.tasks.lists.lists import TrainingLists
    from primal_attention.tasks.results import Result
    from primal_attention.training.data import Item
    from primal_attention.training.scores import Answers, Scores

__all__ = ["RerankTask"]

_REST: Mapping[str, Mapping[str, object]] = {
    "training": {
        "epochs": 6,
        "epoch_steps": 100,
        "batch_size": 8,
        "eta": 0.05,
        "monitor": "mAP",
    }
}
"""Settings for vectors of which nothing is known."""


@dataclass(frozen=True)
class RerankTask(Task):
    """Order the results of a search anew: the members of a group are relevant to each other."""

    Settings: ClassVar[type[VectorSettings]] = VectorSettings
    Model: ClassVar[type[ContextConfig]] = ContextConfig
    endings: ClassVar[tuple[str, ...]] = (".npz",)
    starter: ClassVar[Mapping[str, object]] = {"data": {"name": "curves"}, **_REST}
    usage: ClassVar[str] = (
        "primal rerank --queries Q.npy --gallery X.npy --method {model}, or "
        'Reranker.load("{model}") in Python'
    )

    candidates: int
    """Results in a list."""

    @classmethod
    def recognize(cls, source: Source, given: Mapping[str, str]) -> Recognition | None:
        """Return how to read arrays ``x`` and ``groups``."""
        if "x" not in source.arrays or "groups" not in source.arrays:
            return None
        shape = source.arrays["x"]
        if len(shape) != 2:
            raise UserError(f"x must have the shape [items, width], got {shape}.")
        return Recognition(f"{shape[0]} vectors of width {shape[1]} with groups", _REST)

    @classmethod
    def load(cls, settings: VectorSettings) -> tuple[Self, Parts]:
        """Return the task, and the lists of all items of each part."""
        from primal_attention.tasks.lists.lists import TrainingLists
        from primal_attention.tasks.lists.parts import load_parts

        note = (
            "An item is a list: the search of one vector among the others of its part. No group is "
            "in two parts. Relevant items that the search did not find do not count."
        )
        train, valid, test = (
            TrainingLists(part, settings.candidates + 1) for part in load_parts(settings)
        )
        return cls(settings.candidates), Parts(train, valid, test, note=note)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Nothing: the model serves vectors of any width and lists of any length."""
        return {}

    @property
    def summary(self) -> str:
        """The length of the lists."""
        return f"lists of {self.candidates} results"

    def build(self, options: ContextConfig) -> "ContextEncoder":
        """Return an untrained encoder of lists."""
        from primal_attention.tasks.lists.context_model import ContextEncoder

        return ContextEncoder(options)

    def read(self, path: Path, *, labelled: bool, part: str = "test") -> "TrainingLists":
        """Return the lists of all items of a file with ``x`` and ``groups``."""
        from primal_attention.tasks.lists.lists import TrainingLists
        from primal_attention.tasks.lists.parts import read_vectors

        if not labelled:
            raise UserError(
                "a re-ranker orders the results of a search; use primal rerank --method with the "
                "folder of this model."
            )
        return TrainingLists([read_vectors(path)], self.candidates + 1)

    def collate(self, items: "Sequence[Item]") -> "Mapping[str, Tensor]":
        """Return a batch of lists; short ones are filled with empty slots."""
        from primal_attention.tasks.lists.lists import collate_lists

        return collate_lists(items)

    def objective(self, output: "ContextOutput", labels: "Tensor") -> "Tensor":
        """Return the contrastive loss and that of the reconstruction."""
        from primal_attention.tasks.lists.context_model import list_loss

        return list_loss(output, labels)

    def answer(self, output: "ContextOutput", labels: "Tensor") -> "Answers":
        """Return the average precision of each list before and after."""
        from primal_attention.tasks.lists.metrics import list_precision

        first = -_places(labels)
        return {
            "before": list_precision(first[:, 1:], labels[:, 1:]),
            "after": list_precision(output.scores[:, 1:].float(), labels[:, 1:]),
            "positives": (labels[:, 1:] == 1).sum(1),
        }

    def score(self, answers: "Answers") -> "Scores":
        """Return the mean average precision of lists with a relevant result."""
        return _mean(answers["after"], answers["positives"])

    def records(self, answers: "Answers") -> list[dict[str, object]]:
        """Return the average precision of each list before and after."""
        columns = zip(*(answers[k].tolist() for k in ("after", "before", "positives")), strict=True)
        return [
            {"index": i, "AP": round(after, 6), "AP before": round(before, 6), "relevant": count}
            for i, (after, before, count) in enumerate(columns)
        ]

    def baselines(self, data: Parts) -> "Mapping[str, Scores]":
        """Return the scores of the first search and of methods without training."""
        from primal_attention.tasks.lists import AlphaQE, DiffusionReranker

        methods = {"first search": None, "query expansion": AlphaQE()}
        return {
            name: self._untrained(method, data.test)
            for name, method in {**methods, "diffusion": DiffusionReranker()}.items()
        }

    def _untrained(self, method: "BaseReranker | None", data: Any) -> "Scores":
        import torch

        from primal_attention.tasks.lists.base import Lists
        from primal_attention.tasks.lists.metrics import list_precision

        found = []
        for start in range(0, len(data), 64):
            batch = self.collate([data[i] for i in range(start, min(start + 64, len(data)))])
            tokens, labels = batch["tokens"], batch["labels"][:, 1:]
            scores = -_places(labels)
            if method is not None:
                ids = torch.where(labels >= 0, _places(labels).long(), -1)
                scores = method.score_lists(Lists(tokens[:, 0], tokens[:, 1:], ids))[0]
            found.append((list_precision(scores.float(), labels), (labels == 1).sum(1)))
        return _mean(*(torch.cat(part) for part in zip(*found, strict=True)))

    def show(self, report: "Report", results: "Sequence[Result]") -> None:
        """Add a picture of every list before and after."""
        from primal_attention.tasks.lists.showing import plot_gains

        report.section("Every list").figure(
            plot_gains(
                {
                    r.name: (r.test.answers["before"].numpy(), r.test.answers["after"].numpy())
                    for r in results
                }
            ),
            "Average precision of each test list before and after; better above the line.",
        )


def _places(labels: "Tensor") -> "Tensor":
    import torch

    return torch.arange(labels.shape[1], device=labels.device).expand(labels.shape).float()


def _mean(precision: "Tensor", positives: "Tensor") -> "Scores":
    from primal_attention.training.scores import Score

    counted = precision[positives > 0].double()
    if not len(counted):
        return {"mAP": Score(float("nan"), None, is_share=True)}
    error = float(counted.std(correction=0)) / len(counted) ** 0.5
    return {"mAP": Score(float(counted.mean()), error, is_share=True)}
