"""``primal repro hybrid``: a language model with a memory of constant size in all of its layers.

SmolLM2-135M-Instruct reads WikiText-2 with ``window-linear`` in all 30 layers. The rows go from no
training to attention transfer and low-rank changes of the projections (Zhang et al. 2024, arXiv
2410.10254). Every row is measured a second time with the linear part off.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from primal_attention.support.output import page
from primal_attention.support.settings import at_least_one
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.kit.tables import columns_table, dots_picture

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Hybrid", "HybridOptions"]

_STARTS = {
    "original": "original",
    "window": "window and first tokens alone",
    "favor": "with random features (favor)",
    "random": "with learned features, random start",
    "clusters": "with learned features at clusters of keys",
}
_STAGES = {"transfer": "after attention transfer", "lora": "after low-rank training"}
_CLUSTERED = 4
"""Training sequences whose keys are clustered."""


@dataclass(frozen=True)
class HybridOptions:
    """A language model with a memory of constant size: what training brings back."""

    window: int = 64
    """Last tokens that are read exactly."""
    features: int = 64
    """Features of all earlier tokens, for each head."""
    tokens: int = 1024
    """Length of the sequences that are scored."""
    part: Literal["test", "valid"] = "test"
    """Part of WikiText-2 that is scored; settings are chosen on valid."""
    num_sequences: int = 4
    """Sequences that are scored."""
    transfer_steps: int = 40
    """Steps of attention transfer, one sequence each; with 0 nothing is trained."""
    lora_steps: int = 40
    """Steps of low-rank training after it, one sequence each."""
    lora_rank: int = 8
    """Rank of the changes of queries, keys, values and outputs."""
    transfer_lr: float = 1e-2
    """Largest learning rate of the transfer."""
    lora_lr: float = 1e-3
    """Largest learning rate of low-rank training."""
    num_train: int = 160
    """Training sequences."""
    train_tokens: int = 512
    """Length of the training sequences."""
    data: Path | None = None
    """Folder with text/wikitext-2; by default that of PRIMAL_DATA."""

    def __post_init__(self) -> None:
        at_least_one(self, "num_sequences", "num_train", "lora_rank")


class Hybrid(Study[HybridOptions]):
    """One cell a start without training, and one for both stages of the training."""

    name = "hybrid"
    Options = HybridOptions

    def cells(self, options: HybridOptions) -> Sequence[Cell]:
        """Return the rows to compare with, then the training."""
        scored = {
            "part": options.part,
            "tokens": options.tokens,
            "sequences": options.num_sequences,
        }
        window = {**scored, "window": options.window}
        sizes = {**window, "features": options.features}
        cells: list[Cell] = [
            {"way": "original", **scored},
            {"way": "window", **window},
            {"way": "clusters", **sizes},
        ]
        if options.transfer_steps:
            training = {
                name: getattr(options, name)
                for name in (
                    *("transfer_steps", "lora_steps", "lora_rank"),
                    *("transfer_lr", "lora_lr", "num_train", "train_tokens"),
                )
            }
            cells.append({"way": "trained", **sizes, **training})
        # last, because other starts only show what the clusters are worth
        return [*cells, *({"way": way, **sizes} for way in ("favor", "random"))]

    def run(self, cell: Cell, options: HybridOptions, scratch: Path) -> Row | Sequence[Row]:
        """Score one model, or train it and score it after each stage."""
        from primal_studies.kit.pretrained import smollm2

        original = smollm2()[0]
        way = cell["way"]
        if way == "original":
            return {"perplexity": self._perplexity(original, cell, options)}
        student = self._convert(original, cell, options)
        if way != "trained":
            return {"perplexity": self._perplexity(student, cell, options)}
        return self._train(student, original, cell, options, scratch)

    def _convert(self, original: "nn.Module", cell: Cell, options: HybridOptions) -> Any:
        import torch

        from primal_attention.surgery import SurgeryConfig, convert, start_at_clusters

        torch.manual_seed(0)
        far = {"window": "none", "favor": "favor"}.get(cell["way"], "learned")
        settings = {"window": cell["window"], "far": far}
        if far != "none":
            settings["num_features"] = cell["features"]
        student: Any = copy.deepcopy(original)
        convert(student, SurgeryConfig("window-linear", settings))
        if cell["way"] in ("clusters", "trained"):
            start_at_clusters(student.model, self._batches(cell["tokens"], _CLUSTERED, options))
        return student

    def _train(
        self,
        student: Any,
        original: Any,
        cell: Cell,
        options: HybridOptions,
        scratch: Path,
    ) -> list[Row]:
        from primal_attention.surgery import DistillConfig, distill, linear_part_off

        batches = self._batches(cell["train_tokens"], cell["num_train"], options)
        rows: list[Row] = []
        for stage in ("transfer", "lora") if cell["lora_steps"] else ("transfer",):
            is_first = stage == "transfer"
            config = DistillConfig(
                closed_form=False,
                layer_steps=cell["transfer_steps"] if is_first else 0,
                layer_lr=cell["transfer_lr"],
                end_steps=0 if is_first else cell["lora_steps"],
                end_lr=cell["lora_lr"],
                lora_rank=cell["lora_rank"],
                objective="logits",
                # other texts than those of the first stage come first
                seed=0 if is_first else 1,
            )
            # layer by layer nothing needs the logits, which cost a quarter of a forward
            models = (student.model, original.model) if is_first else (student, original)
            seconds = distill(*models, batches, config, folder=scratch / stage).seconds
            whole = self._perplexity(student, cell, options)
            with linear_part_off(student):
                off = self._perplexity(student, cell, options)
            row = {"perplexity": whole, "linear part off": off, "cpu seconds": round(seconds)}
            rows.append({"stage": stage, **row})
        return rows

    def _batches(
        self, tokens: int, count: int, options: HybridOptions
    ) -> "list[dict[str, Tensor]]":
        from primal_studies.kit.pretrained import token_sequences

        found = token_sequences("train", tokens, count, options.data)
        return [{"input_ids": ids} for ids in found]

    def _perplexity(self, model: "nn.Module", cell: Cell, options: HybridOptions) -> float:
        from primal_studies.kit.pretrained import perplexity, token_sequences

        held = token_sequences(cell["part"], cell["tokens"], cell["sequences"], options.data)
        return float(f"{perplexity(model, held):.4g}")

    def tables(self, rows: Sequence[Row], options: HybridOptions) -> Mapping[str, str | bytes]:
        """Return the perplexity of every row with and without its linear part, and a picture."""
        parts: list[str] = []
        points: list[tuple[str, str, float]] = []
        for group in _comparable(rows):
            shown = [_complete(row, group) for row in group]
            parts += [_caption(group), _table(shown)]
            if not points:
                points = [
                    (row["model"], name, row[name])
                    for row in shown
                    for name in ("perplexity", "linear part off")
                    if row[name] is not None
                ]
        files: dict[str, str | bytes] = {"table.md": page(*parts)}
        if points:
            files["picture.png"] = dots_picture(points, "perplexity", is_log=True)
        return files


def _comparable(rows: Sequence[Row]) -> list[list[Row]]:
    """Return rows that are scored on the same text with the same window, those asked for first."""
    windows: dict[tuple[Any, ...], dict[int, list[Row]]] = {}
    originals: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        text = tuple(row[key] for key in ("part", "tokens", "sequences"))
        if row["way"] == "original":
            originals[text] = row
            windows.setdefault(text, {})
        else:
            windows.setdefault(text, {}).setdefault(row["window"], []).append(row)
    order = [*_STARTS, "trained"]
    return [
        sorted(
            [*([originals[text]] if text in originals else []), *group],
            key=lambda row: order.index(row["way"]),
        )
        for text, groups in windows.items()
        for group in (groups.values() or [[]])
    ]


def _complete(row: Row, group: Sequence[Row]) -> dict[str, Any]:
    """Return a row with its name, the linear part off, and its share of the gap."""
    scores = {other["way"]: other["perplexity"] for other in group}
    original, window = scores.get("original"), scores.get("window")
    off = row.get("linear part off")
    if off is None and row["way"] not in ("original", "window"):
        off = window  # the weights are those of the original
    share = None
    if original is not None and window is not None and row["way"] not in ("original", "window"):
        share = (window - row["perplexity"]) / (window - original)
    name = _STARTS.get(row["way"]) or _STAGES[row["stage"]]
    if row["way"] == "trained":
        name += f", {row['transfer_steps']}"
        name += f" + {row['lora_steps']} steps" if row["stage"] == "lora" else " steps"
    return {**row, "model": name, "linear part off": off, "share": share}


def _caption(group: Sequence[Row]) -> str:
    row = group[-1]
    words = (
        f"SmolLM2-135M-Instruct, all 30 layers: perplexity of the first {row['sequences']} "
        f"sequences of {row['tokens']:,} tokens of WikiText-2, part *{row['part']}*. "
    )
    if "window" not in row:
        return words + "Nothing but the original is measured yet."
    words += (
        f"The window has {row['window']} tokens and 4 first ones. *Linear part off*: the same "
        "weights read their window alone; untrained, that is the row of the window. *Gap closed*: "
        "share of the way in perplexity from the window alone to the original."
    )
    trained = next((row for row in group if row["way"] == "trained"), None)
    if trained is not None:
        words += (
            f" Training reads {trained['num_train']} other sequences of {trained['train_tokens']} "
            "tokens, one a step, without labels: first the features learn the layers' outputs, "
            f"then changes of rank {trained['lora_rank']} learn the predictions. One seed."
        )
    return words


def _table(rows: Sequence[dict[str, Any]]) -> str:
    def score(name: str, form: str) -> Any:
        return lambda row: "—" if row.get(name) is None else form.format(row[name])

    return columns_table(
        rows,
        {
            "model": "{model}",
            "features": score("features", "{}"),
            "perplexity": "{perplexity:.2f}",
            "linear part off": score("linear part off", "{:.2f}"),
            "gap closed": score("share", "{:.0%}"),
            "loss above the original": lambda row: _excess(row, rows),
            "cpu seconds of training": score("cpu seconds", "{:,}"),
        },
    )


def _excess(row: Row, rows: Sequence[Row]) -> str:
    """Return how many nats a token a model is worse than the original."""
    original = next((r["perplexity"] for r in rows if r["way"] == "original"), None)
    return "—" if original is None else f"{math.log(row['perplexity'] / original):.3f}"
