"""The task of image-text pairs: find images for texts, texts for images, and tell pairs apart."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from primal_attention.support.command import UserError, user_errors
from primal_attention.support.files.tables import FILE_ERRORS, TABLE_SUFFIXES, list_some
from primal_attention.tasks.pairs.settings import PairOptions, PairSettings
from primal_attention.tasks.pairs.tokenizer import TextTokenizer
from primal_attention.tasks.sources import Recognition, Source
from primal_attention.tasks.task import Parts, Task

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.data import Dataset

    from primal_attention.models import PretrainedModel
    from primal_attention.report import Report
    from primal_attention.tasks.pairs.model import VisualParser
    from primal_attention.tasks.pairs.pairs import PairData
    from primal_attention.tasks.results import Result
    from primal_attention.tasks.trained import TrainedModel
    from primal_attention.training.data import Item
    from primal_attention.training.evaluation import Evaluation
    from primal_attention.training.scores import Answers, Scores

__all__ = ["PairTask"]

TRAINING: Mapping[str, Mapping[str, Any]] = {
    "training": {
        "epochs": 10,
        "min_steps": 2000,
        "batch_size": 64,
        "lr": 1e-3,
        "monitor": "R@5",
    }
}
"""Settings for pairs of which nothing is known; those of the estimator."""
QUICK, _MOST = 300, 1000
"""Searches in each direction that choose the epoch, and that are scored."""
_LEAST_VARIANCE = 5e-3


@dataclass(frozen=True)
class PairTask(Task):
    """Which images belong to which texts: what a model must know of its training pairs."""

    Settings: ClassVar[type[PairSettings]] = PairSettings
    Model: ClassVar[type[PairOptions]] = PairOptions
    endings: ClassVar[tuple[str, ...]] = TABLE_SUFFIXES
    starter: ClassVar[Mapping[str, object]] = {"data": {"name": "scenes"}, **TRAINING}
    usage: ClassVar[str] = (
        'primal search {model} "a text" --images FOLDER, primal predict {model} PAIRS.csv, or '
        'ImageTextMatcher.load("{model}") in Python'
    )

    tokenizer: TextTokenizer
    """Words of the training texts."""
    image: str = "image"
    """Column of the image files."""
    caption: str = "caption"
    """Column of the captions."""
    folder: str = ""
    """Folder of the image files in training; a table of new pairs may use it, too."""
    size: int = 32
    """Pixels of a side to which images are stretched."""
    length: int = 16
    """Longest text in tokens."""
    slope: float = 1.0
    """From the score of a pair to the log-odds that it matches."""
    offset: float = 0.0
    """From the score of a pair to the log-odds that it matches."""

    @classmethod
    def recognize(cls, source: Source, given: Mapping[str, str]) -> Recognition | None:
        """Return how to read a table with columns of image files and captions."""
        if source.suffix not in TABLE_SUFFIXES or "target" in given:
            return None
        image, caption = given.get("image", "image"), given.get("caption", "caption")
        if not {image, caption} <= source.columns.keys():
            if given.get("task") == "pairs":
                columns = list_some(list(source.columns))
                raise UserError(
                    f"which columns hold image files and captions? There are no {image!r} and "
                    f"{caption!r}; give --image and --caption, of {columns}."
                )
            return None
        return Recognition(
            f"image-text pairs: files in {image!r}, texts in {caption!r}",
            {"data": {"image": image, "caption": caption}, **TRAINING},
        )

    @classmethod
    def load(cls, settings: PairSettings) -> tuple[Self, Parts]:
        """Return the task and three parts of the pairs; an image is in one part only."""
        from primal_attention.tasks.pairs.parts import load_tables

        tables, note = load_tables(settings)
        task = cls(
            TextTokenizer.learn(tables["train"].texts),
            settings.image,
            settings.caption,
            str(settings.images or (settings.train.parent if settings.train else "")),
            settings.size,
            settings.length or 16,
        )
        parts = {}
        for name, table in tables.items():
            with user_errors(str(settings.train or f"the {name} part"), *FILE_ERRORS):
                most = QUICK if name == "valid" else _MOST
                parts[name] = task.pairs(table.images, table.texts, most=most)
        rows = tables["train"].rows
        return task, Parts(parts["train"], parts["valid"], parts["test"], rows, note)

    def pairs(self, images: Any, texts: Any, *, most: int = _MOST) -> "PairData":
        """Return images and texts, ready for the model.

        Args:
            images: Paths, images of Pillow, or arrays, one for each text.
            texts: The texts.
            most: Searches that a measurement makes in each direction.
        """
        from primal_attention.tasks.pairs.pairs import PairData

        size = self.size, self.size
        return PairData(images, texts, self.tokenizer, size, self.length, most=most)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Size of images, length of texts, the vocabulary and its special tokens."""
        from primal_attention.tasks.pairs.config import MultimodalConfig

        names = MultimodalConfig.special_names
        return {
            "image_size": self.size,
            "max_words": self.length,
            "vocab_size": self.tokenizer.vocab_size,
            **dict(zip(names, self.tokenizer.special, strict=True)),
        }

    @property
    def summary(self) -> str:
        """The number of words."""
        return f"image-text pairs with a vocabulary of {self.tokenizer.vocab_size:,}"

    def build(self, options: PairOptions) -> "VisualParser":
        """Return an untrained model."""
        from primal_attention.tasks.pairs.config import MultimodalConfig
        from primal_attention.tasks.pairs.model import VisualParser

        usual = PairOptions()
        for name, setting in (("image_size", "size"), ("max_words", "length")):
            given = getattr(options, name)
            if given not in (getattr(usual, name), self.sizes[name]):
                raise ValueError(f"model.{name} is {given}; set data.{setting} instead.")
        return VisualParser(MultimodalConfig(**{**asdict(options), **self.sizes}))

    def read(self, path: Path, *, labelled: bool, part: str = "test") -> "PairData":
        """Return the pairs of a table; images are beside it, or in the folder of the training."""
        from primal_attention.tasks.pairs.pairs import read_pair_table

        with user_errors(str(path), *FILE_ERRORS):
            if not path.is_file():
                raise UserError(f"there is no file {path}.")
            folders = [path.parent, *([Path(self.folder)] if self.folder else [])]
            table = read_pair_table(path, images=folders, image=self.image, caption=self.caption)
            return self.pairs(table.images, table.texts)

    def from_arrays(self, data: object) -> "PairData":
        """Return pairs in memory, given as a tuple of images and texts."""
        if not isinstance(data, tuple) or len(data) != 2:
            raise TypeError(f"Give a tuple (images, texts), got {type(data).__name__}.")
        return self.pairs(*data)

    def collate(self, items: "Sequence[Item]") -> "Mapping[str, Tensor]":
        """Return a batch of pairs."""
        from primal_attention.tasks.pairs.pairs import collate_pairs

        return collate_pairs(items)

    def objective(self, output: Any, labels: "Tensor") -> "Tensor":
        """Return the sum of the losses that the model has computed.

        Raises:
            CollapseError: If all visual tokens have become alike.
        """
        from primal_attention.tasks.pairs.objectives import CollapseError

        if output.loss is None:
            raise ValueError("The model computes its losses in training only; use measure.")
        # features are normalised, so their variance over tokens starts near one
        if "mfr" in output.losses and float(output.variance) < _LEAST_VARIANCE:
            raise CollapseError(
                f"The variance of visual features fell to {float(output.variance):.2g}: the "
                "parser sees the same everywhere. Use a smaller learning rate, leave out the "
                "objective 'mfr', or check that the images differ."
            )
        loss: Tensor = output.loss
        return loss

    def measure(
        self, model: "nn.Module", data: "Dataset[Item]", *, batch_size: int = 64
    ) -> "Evaluation":
        """Return the scores of searches and of matching, and the answers to all pairs."""
        from primal_attention.tasks.pairs.scoring import measure_pairs

        return measure_pairs(model, data, slope=self.slope, offset=self.offset)  # type: ignore[arg-type]

    def finish(self, model: "PretrainedModel", data: Parts) -> "TrainedModel":
        """Return the task with probabilities fitted on the validation part."""
        from primal_attention.tasks.pairs.scoring import fit_probability, measure_pairs
        from primal_attention.tasks.trained import TrainedModel

        found = measure_pairs(model, data.valid).answers  # type: ignore[arg-type]
        slope, offset = fit_probability(found["logits"], found["random"])
        return TrainedModel(replace(self, slope=slope, offset=offset), model)

    def answer(self, output: Any, labels: "Tensor") -> "Answers":
        """Return the matching logits of a batch; :meth:`measure` gives the rest."""
        return {"logits": output.logits}

    def score(self, answers: "Answers") -> "Scores":
        """Return R@1 and R@5 in both directions, and shares of pairs that are judged right."""
        from primal_attention.tasks.pairs.scoring import score_pairs

        return score_pairs(answers)

    def records(self, answers: "Answers") -> list[dict[str, object]]:
        """Return the probability that each pair matches."""
        shares = answers["logits"].double().sigmoid().tolist()
        return [{"index": i, "match": round(p, 6)} for i, p in enumerate(shares)]

    def baselines(self, data: Parts) -> "Mapping[str, Scores]":
        """Return the scores of chance, and of a linear map from pixels to words."""
        from primal_attention.tasks.pairs.baseline import chance_scores, linear_scores

        return {
            "linear map of pixels to words": linear_scores(data.train, data.valid, data.test),  # type: ignore[arg-type]
            "chance": chance_scores(data.test),  # type: ignore[arg-type]
        }

    def show(self, report: "Report", results: "Sequence[Result]") -> None:
        """Add how far down the right results are."""
        from primal_attention.tasks.pairs.showing import plot_ranks

        ranks = {
            result.name: {
                words: result.test.answers[key].numpy()
                for key, words in (
                    ("image_rank", "image for a text"),
                    ("text_rank", "text for an image"),
                )
            }
            for result in results
        }
        report.section("Searches").figure(
            plot_ranks(ranks),
            "Share of test searches whose first right result is at this place or before; places "
            "beyond the candidates of the first stage are not known.",
        )

    def explain(self, report: "Report", results: "Sequence[Result]", data: Parts) -> None:
        """Add a gallery of hits and misses of the first model."""
        from primal_attention.tasks.pairs.showing import show_hits_and_misses

        show_hits_and_misses(report, results[0].test.answers, data.test)  # type: ignore[arg-type]
