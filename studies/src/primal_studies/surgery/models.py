"""``primal bench surgery-minilm`` and ``surgery-smollm2``: real models after conversion.

all-MiniLM-L6-v2 (six layers, 384 wide, 12 heads) embeds sentences of IMDb reviews. Measured on
held-out sentences, against the embeddings of the original: the mean cosine, the share of sentences
whose nearest neighbour among the others is the same, and the overlap of their ten nearest.

SmolLM2-135M-Instruct (30 layers, 576 wide, 9 heads, rotary positions) reads WikiText-2. Measured on
the first tokens of the test split: perplexity.

Both without training, and after distillation without labels: output maps in closed form, then
layer by layer, then end to end. Also time and memory of the model with all layers converted.
"""

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar

from primal_attention.support.output import page
from primal_attention.support.settings import at_least_one, one_of
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.kit.tables import Column, Files, columns_table, dots_picture

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["MinilmOptions", "MinilmStudy", "Smollm2Options", "Smollm2Study"]


_PLAIN: dict[str, dict[str, Any]] = {
    name: {}
    for name in (
        "gaussian",
        "favor",
        "kernelized",
        "kernelized-log",
        "schoenbat",
        "linear",
        "cosformer",
        "flow",
    )
}
"""Attentions with their default options."""


@dataclass(frozen=True)
class SurgeryOptions:
    """What is left of a pretrained model after conversion."""

    names: tuple[str, ...] = ()
    """Attentions; by default all that fit the model."""
    layers: tuple[str, ...] = ()
    """Layers to convert, such as last:2; by default several choices."""
    lengths: tuple[int, ...] = (512, 4096, 16384)
    """Lengths at which time and memory are measured."""
    layer_steps: int = 100
    """Steps of distillation layer by layer."""
    end_steps: int = 50
    """Steps of distillation end to end."""
    num_train: int = 3200
    """Training sentences of IMDb, or sequences of 256 tokens of WikiText-2."""
    num_test: int = 384
    """Held-out sentences of IMDb, or sequences of 512 tokens of WikiText-2."""
    data: Path | None = None
    """Folder with text/imdb and text/wikitext-2; by default that of PRIMAL_DATA."""

    def __post_init__(self) -> None:
        at_least_one(self, "lengths", "num_train", "num_test")


@dataclass(frozen=True)
class MinilmOptions(SurgeryOptions):
    """What is left of the embeddings of all-MiniLM-L6-v2 after conversion."""


@dataclass(frozen=True)
class Smollm2Options(SurgeryOptions):
    """What is left of the perplexity of SmolLM2-135M-Instruct after conversion."""

    layer_steps: int = 24
    """Steps of distillation layer by layer."""
    end_steps: int = 12
    """Steps of distillation end to end."""
    num_train: int = 256
    """Training sequences of 256 tokens."""
    num_test: int = 2
    """Held-out sequences of 512 tokens."""


class SurgeryStudy(Study[SurgeryOptions]):
    """One cell a conversion, and one a speed; a subclass names a model and its text."""

    attentions: ClassVar[dict[str, dict[str, Any]]]
    """Attentions that fit the model, and their options."""
    choices: ClassVar[tuple[str, ...]]
    """Layers to convert."""
    distilled: ClassVar[tuple[str, ...]]
    """Attentions that are also distilled."""
    distill_settings: ClassVar[dict[str, Any]]
    """Settings of the distillation besides its steps."""
    timed: ClassVar[tuple[str, ...]]
    """Attentions whose speed is measured."""
    scores: ClassVar[tuple[str, ...]]
    """Columns of the table of quality."""
    facts: ClassVar[str]
    """What is measured, for the caption."""

    @abstractmethod
    def _model(self) -> Any:
        """Return the original."""

    @abstractmethod
    def _timed_model(self, longest: int) -> Any:
        """Return the original as it is timed."""

    @abstractmethod
    def _batches(self, options: SurgeryOptions) -> "list[dict[str, Tensor]]":
        """Return batches of the training text."""

    @abstractmethod
    def _score(self, student: "nn.Module", options: SurgeryOptions) -> dict[str, float]:
        """Return what is left, on held-out text."""

    def _forward(self, student: "nn.Module", ids: "Tensor") -> dict[str, Any]:
        """Run the model once; return what else the speed table shows."""
        student(ids)
        return {}

    def cells(self, options: SurgeryOptions) -> Sequence[Cell]:
        """Return the conversions, layer choice by layer choice, then the speeds."""
        one_of(options, "names", self.attentions)
        names = options.names or tuple(self.attentions)
        trained = [a for a in self.distilled if a in names]
        sizes = {"num_test": options.num_test}
        budget = {
            **sizes,
            "num_train": options.num_train,
            "layer_steps": options.layer_steps,
            "end_steps": options.end_steps,
        }
        cells: list[Cell] = []
        for layers in options.layers or self.choices:
            cells += [{"attention": name, "layers": layers, **sizes} for name in names]
            cells += [{"attention": name, "layers": layers, **budget} for name in trained]
        timed = [a for a in self.timed if a == "softmax" or a in names]
        return [*cells, *({"attention": a, "tokens": n} for a in timed for n in options.lengths)]

    def run(self, cell: Cell, options: SurgeryOptions, scratch: Path) -> Row:
        """Convert and score, or convert and time."""
        import torch

        torch.manual_seed(0)
        return self._speed(cell) if "tokens" in cell else self._quality(cell, options, scratch)

    def _quality(self, cell: Cell, options: SurgeryOptions, scratch: Path) -> Row:
        from primal_attention.surgery import DistillConfig, SurgeryConfig, convert, distill

        original, seconds = self._model(), 0.0
        student = copy.deepcopy(original)
        if cell["attention"] != "original":
            settings = self.attentions[cell["attention"]]
            convert(student, SurgeryConfig(cell["attention"], settings, layers=cell["layers"]))
        if "layer_steps" in cell:
            steps = {key: cell[key] for key in ("layer_steps", "end_steps")}
            config = DistillConfig(**steps, **self.distill_settings)
            batches = self._batches(options)
            seconds = distill(student, original, batches, config, folder=scratch).seconds
        return {**self._score(student, options), "cpu seconds": round(seconds)}

    def _speed(self, cell: Cell) -> Row:
        import torch

        from primal_attention.surgery import SurgeryConfig, convert
        from primal_studies.kit.timing import machine, peak_mb, take_turns

        name = cell["attention"]
        student = copy.deepcopy(self._timed_model(cell["tokens"]))
        if name != "softmax":
            # long sequences need more landmarks than sentences
            more = {"num_landmarks": 64} if "num_landmarks" in self.attentions[name] else {}
            convert(student, SurgeryConfig(name, self.attentions[name] | more))
        with torch.no_grad():
            ids = torch.randint(1000, 20_000, (1, cell["tokens"]))
            found: dict[str, Any] = {}
            peak = peak_mb(lambda: found.update(self._forward(student, ids)))
            times = take_turns({name: partial(student, ids)}, 3, seconds=20)
        seconds = round(median(times[name]), 3)
        return {"seconds": seconds, "MB": round(peak, 1), **found, "machine": machine()}

    def tables(self, rows: Sequence[Row], options: SurgeryOptions) -> Mapping[str, str | bytes]:
        """Return the table of quality and that of time and memory."""
        quality = [row for row in rows if "layers" in row]
        speed = [row for row in rows if "tokens" in row]
        parts = []
        if quality:
            header = ["attention", "layers", "training", *self.scores, "cpu seconds"]
            budgets = [row for row in quality if "layer_steps" in row]
            shown = [
                {**row, "training": "distilled" if "layer_steps" in row else "none"}
                for row in quality
            ]
            words = self.facts.format(**quality[0])
            if budgets:
                words += (
                    " Distilled without labels: output maps in closed form, then "
                    f"{budgets[0]['layer_steps']} steps layer by layer and "
                    f"{budgets[0]['end_steps']} end to end; one seed, one thread."
                )
            parts += [words, _table(shown, header)]
        if speed:
            header = [
                key
                for key in ("attention", "tokens", "seconds", "MB", "numbers in cache")
                if key in speed[0]
            ]
            parts.append(
                "Time and memory of one forward with all layers converted; processor time of one "
                f"thread, 64 landmarks. {speed[0]['machine']}."
            )
            parts.append(_table(speed, header))
        files: Files = {"table.md": page(*parts)}
        if quality:
            files["picture.png"] = self._picture(quality)
        return files

    def _picture(self, quality: Sequence[Row]) -> bytes:
        """Return the first score of every mechanism, by converted layers, without training."""
        score = self.scores[0]
        points = [
            (row["attention"], row["layers"], row[score])
            for row in quality
            if "layer_steps" not in row and row["layers"] != "none"
        ]
        label = f"{score}, by converted layers, without training"
        return dots_picture(points, label, is_log=score == "perplexity")


def _table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    def text(name: str) -> Column:
        return lambda row: f"{row[name]:g}" if isinstance(row[name], float) else row[name]

    return columns_table(rows, {name: text(name) for name in columns})


class MinilmStudy(SurgeryStudy):
    """A converted sentence encoder."""

    name = "surgery-minilm"
    Options = MinilmOptions
    attentions: ClassVar = {
        "nystromformer": {"num_landmarks": 16, "kernel_size": None},
        "skyformer": {"num_landmarks": 16},
        "skyformer-learned": {"num_landmarks": 16},
        **_PLAIN,
        "linformer": {"num_projections": 16},
        "primal-dual": {"rank": 32},
        "primal-relative": {"rank": 32},
        "primal": {"rank": 16},
    }
    choices = ("last:2", "all", "last:3", "last:1")
    distilled = ("nystromformer", "primal-dual")
    distill_settings: ClassVar = {"fit_batches": 8, "objective": "hidden"}
    timed = ("softmax", "nystromformer", "skyformer", "favor", "linear", "primal-dual", "primal")
    scores = ("cosine", "same nearest", "ten nearest")
    facts = (
        "all-MiniLM-L6-v2 on {num_test} held-out sentences of IMDb (6 to 40 words, about 30 "
        "tokens), against the embeddings of the original. *Same nearest*: sentences whose nearest "
        "neighbour among the others is that of the original; *ten nearest*: overlap of the ten "
        "nearest. Landmark methods have 16 landmarks or projections."
    )

    def _model(self) -> Any:
        from primal_studies.kit.pretrained import minilm

        return minilm()[0]

    def _timed_model(self, longest: int) -> Any:
        # the encoder has 512 positions; its time does not depend on its weights
        config = self._model().config.to_dict() | {"max_position_embeddings": max(512, longest)}
        return type(self._model())(type(self._model().config)(**config)).eval()

    def _batches(self, options: SurgeryOptions) -> "list[dict[str, Tensor]]":
        from primal_studies.kit.pretrained import sentence_batches

        return sentence_batches("train", options.num_train, options.data)

    def _score(self, student: "nn.Module", options: SurgeryOptions) -> dict[str, float]:
        from primal_studies.kit.pretrained import compare_embeddings, embed, sentence_batches

        held = sentence_batches("test", options.num_test, options.data)
        return compare_embeddings(embed(student, held), embed(self._model(), held))


class Smollm2Study(SurgeryStudy):
    """A converted language model."""

    name = "surgery-smollm2"
    Options = Smollm2Options
    attentions: ClassVar = {
        "skyformer-learned": {"num_landmarks": 64, "window": 64},
        **_PLAIN,
        "primal-dual": {"rank": 64},
        "primal": {"rank": 32},
        "primal-static": {"rank": 32},
    }
    choices = ("last:1", "last:15", "all")
    distilled = ("flow", "primal-dual")
    distill_settings: ClassVar = {"fit_batches": 4}
    timed = ("softmax", "skyformer-learned", "favor", "linear", "primal-dual", "primal")
    scores = ("perplexity",)
    facts = (
        "SmolLM2-135M-Instruct on WikiText-2: perplexity of the first {num_test} sequences of 512 "
        "tokens of the test split, without its marks of tokenization."
    )

    def cells(self, options: SurgeryOptions) -> Sequence[Cell]:
        """Return the original too: its perplexity is the one to compare with."""
        original = {"attention": "original", "layers": "none", "num_test": options.num_test}
        return [original, *super().cells(options)]

    def _model(self) -> Any:
        from primal_studies.kit.pretrained import smollm2

        return smollm2()[0]

    def _timed_model(self, longest: int) -> Any:
        return self._model().model  # without the head, which takes more memory than all layers

    def _batches(self, options: SurgeryOptions) -> "list[dict[str, Tensor]]":
        from primal_studies.kit.pretrained import token_sequences

        found = token_sequences("train", 256, options.num_train, options.data)
        return [{"input_ids": ids} for ids in found]

    def _score(self, student: "nn.Module", options: SurgeryOptions) -> dict[str, float]:
        from primal_studies.kit.pretrained import perplexity, token_sequences

        held = token_sequences("test", 512, options.num_test, options.data)
        return {"perplexity": float(f"{perplexity(student, held):.4g}")}

    def _forward(self, student: "nn.Module", ids: "Tensor") -> dict[str, Any]:
        from primal_attention.hosts.state_cache import cache_numel

        return {"numbers in cache": cache_numel(student(ids).past_key_values)}
