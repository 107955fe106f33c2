"""``primal bench depth-sweep``: validation loss by depth at equal size, beside the rule.

Small causal decoders learn the characters or subwords of WikiText-2, or of a text of one's own.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from primal_attention.models.depth_rule import optimal_depth
from primal_attention.support.command import UserError, needs
from primal_attention.support.files import read_json, read_text
from primal_attention.support.output import markdown_table, page, write_atomically
from primal_attention.support.settings import at_least_one
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.kit.tables import Column, Files, Picture, columns_table

if TYPE_CHECKING:
    from primal_studies.depth.models import SweepText

__all__ = ["DepthSweepOptions", "DepthSweepStudy"]

_SETTINGS = ("depths", "steps", "pieces", "text", "context", "batch")
"""What all rows of a table share."""
_PRESETS: dict[str, dict[str, Any]] = {
    "smoke": {"budgets": (0.4, 1.0), "depths": (1, 2, 6), "seeds": 1, "steps": 300},
    "small": {
        "budgets": (0.4, 1.0, 3.3, 10.0),
        "depths": (1, 2, 4, 6, 8, 12),
        "seeds": 3,
        "steps": 3000,
    },
}


@dataclass(frozen=True)
class DepthSweepOptions:
    """Validation loss of small decoders by depth, at equal numbers of parameters."""

    preset: Literal["smoke", "small"] = "smoke"
    """smoke: two sizes, three depths, one seed, 300 steps, some minutes; small: four sizes, six
    depths, three seeds, 3000 steps, days on two cores."""
    budgets: tuple[float, ...] = ()
    """Parameters in the blocks, in millions; by default those of the preset."""
    depths: tuple[int, ...] = ()
    """Depths; by default those of the preset."""
    seeds: int = 0
    """Number of seeds; 0 takes that of the preset."""
    steps: int = 0
    """Optimizer steps; 0 takes those of the preset."""
    pieces: int = 0
    """Subwords to learn from the text; 0 takes characters."""
    text: Path | None = None
    """Text file of your own; by default WikiText-2. Its last tenth validates."""
    context: int = 128
    """Tokens of a sequence."""
    batch: int = 8
    """Sequences of a step."""
    data: Path | None = None
    """Folder of the public data; by default that of PRIMAL_DATA."""

    def __post_init__(self) -> None:
        at_least_one(self, "context", "batch")
        if self.pieces and self.pieces < 64:
            raise ValueError(f"pieces must be 0 or at least 64, got {self.pieces}.")

    def setting(self, name: str) -> Any:
        """Return a setting of the user, or that of the preset."""
        return getattr(self, name) or _PRESETS[self.preset][name]


class DepthSweepStudy(Study[DepthSweepOptions]):
    """One cell a size and seed, one row a depth."""

    name = "depth-sweep"
    Options = DepthSweepOptions

    def cells(self, options: DepthSweepOptions) -> Sequence[Cell]:
        """Return the cells, smallest size first."""
        depths = options.setting("depths")
        if len(depths) < 3:
            raise UserError(f"the sweep needs three depths or more, got {len(depths)}.")
        return [
            {
                "budget": budget,
                "seed": seed,
                "depths": list(depths),
                "steps": options.setting("steps"),
                "pieces": options.pieces,
                "text": "WikiText-2" if options.text is None else options.text.name,
                "context": options.context,
                "batch": options.batch,
            }
            for budget in options.setting("budgets")
            for seed in range(options.setting("seeds"))
        ]

    def run(self, cell: Cell, options: DepthSweepOptions, scratch: Path) -> Sequence[Row]:
        """Return one row a depth."""
        from primal_studies.depth.models import SweepRun, SweepShape, sweep

        path = scratch / "done.json"
        rows: list[dict[str, Any]] = read_json(path, list) if path.exists() else []

        def keep(run: SweepRun) -> None:
            shape = run.shape
            row: dict[str, Any] = {
                "layers": shape.layers,
                "width": shape.width,
                "hidden": shape.hidden,
            }
            row |= {"params": shape.params, "rate": run.rate, "loss": round(run.loss, 4)}
            rows.append(row)
            write_atomically(path, json.dumps(rows))

        def again(row: Mapping[str, Any]) -> SweepRun:
            shape = SweepShape(row["layers"], row["width"], row["hidden"], row["params"])
            return SweepRun(1e6 * cell["budget"], shape, cell["seed"], row["rate"], row["loss"])

        text = load_text(options.text, options.pieces, options.data)
        sweep(
            text,
            budget=1e6 * cell["budget"],
            depths=cell["depths"],
            seed=cell["seed"],
            steps=cell["steps"],
            context=cell["context"],
            batch=cell["batch"],
            done={row["layers"]: again(row) for row in rows},
            report=keep,
        )
        pairs = round(pair_loss(text, cell["context"]), 4)
        return [{**row, "pairs": pairs} for row in rows]

    def tables(self, rows: Sequence[Row], options: DepthSweepOptions) -> Mapping[str, str | bytes]:
        """Return the losses, the best depths beside the rule, and a picture."""
        first = rows[0]
        # rows of other settings in the folder cannot be compared with these
        same = [key for key in first if key in _SETTINGS]
        rows = [row for row in rows if all(row[key] == first[key] for key in same)]
        losses = _losses(rows)
        tokens = "characters" if not first["pieces"] else f"{first['pieces']} subwords"
        seeds = len({row["seed"] for row in rows})
        caption = (
            f"Validation loss in nats a token by depth, equal parameters in the blocks; "
            f"{first['text']}, {tokens}, {first['steps']} steps of {first['batch']} × "
            f"{first['context']} tokens, mean over {seeds} seed{'s' if seeds > 1 else ''}. A table "
            f"of pairs of tokens, which knows the last token only, has {first['pairs']:.3f}."
        )
        files: Files = {"table.md": page(caption, _loss_table(rows, losses))}
        files["optimum.md"] = page(
            "Best depth by a parabola in the logarithm of the depth, with an interval of 90 % over "
            "seeds, beside the rule. Below 6 layers the rule is an extrapolation.",
            _optimum_table(losses),
        )
        files["picture.png"] = _picture(losses)
        return files


def _picture(losses: Mapping[float, Mapping[int, list[float]]]) -> bytes:
    """Return the losses by depth as PNG; dotted lines are at the depths of the rule."""
    picture = Picture(size=(6.5, 4))
    (axis,) = picture.axes
    for (budget, of), color in zip(losses.items(), picture.colors, strict=False):
        means = [sum(values) / len(values) for values in of.values()]
        axis.plot(list(of), means, "o-", color=color, label=f"{budget:g} M parameters")
        for depth, values in of.items():
            axis.plot([depth] * len(values), values, "_", color=color, alpha=0.6)
        axis.axvline(optimal_depth(1e6 * budget), color=color, ls=":", lw=1.2)
    axis.set(xscale="log", xlabel="layers (dotted: L*(N) of the rule)", ylabel="validation loss")
    picture.ticks(0, sorted({depth for of in losses.values() for depth in of}))
    axis.legend(frameon=False)
    return picture.png(grid=0.25, is_open=False)


def _losses(rows: Sequence[Row]) -> dict[float, dict[int, list[float]]]:
    """Return the losses by size and depth, in the order of the seeds."""
    found: dict[float, dict[int, list[float]]] = {}
    for row in sorted(rows, key=lambda r: (r["budget"], r["layers"], r["seed"])):
        found.setdefault(row["budget"], {}).setdefault(row["layers"], []).append(row["loss"])
    return found


def _loss_table(rows: Sequence[Row], losses: Mapping[float, Mapping[int, list[float]]]) -> str:
    widths = {(row["budget"], row["layers"]): row["width"] for row in rows}

    def at(depth: int) -> Column:
        def cell(budget: float) -> str:
            means = {d: sum(values) / len(values) for d, values in losses[budget].items()}
            if depth not in means:
                return "—"
            mean = f"{means[depth]:.3f}"
            mean = f"**{mean}**" if depth == min(means, key=lambda d: means[d]) else mean
            return f"{mean} ({widths[budget, depth]})"

        return cell

    depths = sorted({depth for of in losses.values() for depth in of})
    columns: dict[str, Column] = {"size": lambda budget: f"{budget:g} M"}
    return columns_table(losses, columns | {f"{depth} (width)": at(depth) for depth in depths})


def _optimum_table(losses: Mapping[float, Mapping[int, list[float]]]) -> str:
    from primal_studies.depth.models import fit_best_depth

    table = []
    for budget, of in losses.items():
        complete = min(len(values) for values in of.values())
        best = fit_best_depth({depth: values[:complete] for depth, values in of.items()})
        spread = max(map(min, of.values())) - min(map(min, of.values()))
        table.append(
            [
                f"{budget:g} M",
                f"{best.depth:.1f}" if best.is_inside else f"{best.depth:.0f}, an end",
                f"{best.low:.1f} to {best.high:.1f}" if complete > 1 else "one seed",
                f"{optimal_depth(1e6 * budget):.1f}",
                f"{spread:.3f}",
            ]
        )
    header = ["size", "best depth", "interval", "L*(N)", "loss, worst minus best depth"]
    return markdown_table(header, table)


def load_text(path: Path | None, pieces: int, data: Path | None) -> "SweepText":
    """Return a text as token ids: characters, or subwords learned from it.

    Args:
        path: Text file; by default WikiText-2.
        pieces: Subwords to learn; 0 takes characters, rare ones as one token.
        data: Folder of the public data.
    """
    import torch

    from primal_studies.depth.models import SweepText
    from primal_studies.kit.pretrained import wikitext

    if path is None:
        train, valid = wikitext("train", data), wikitext("valid", data)
    else:
        text = read_text(path)
        train, valid = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    encode, vocab = _subwords(train, pieces) if pieces else _characters(train)
    ids = [torch.tensor(encode(part), dtype=torch.int32) for part in (train, valid)]
    return SweepText(ids[0], ids[1], vocab)


def pair_loss(text: "SweepText", context: int) -> float:
    """Return the validation loss of counts of pairs of tokens: a model of the last token only.

    Args:
        text: Training and validation tokens.
        context: Tokens of a sequence; the loss is on the same sequences as that of the decoders.
    """
    import torch

    from primal_studies.depth.models import validation_rows

    train, vocab = text.train.long(), text.vocab
    valid = validation_rows(text.valid, context)
    counts = torch.bincount(train[:-1] * vocab + train[1:], minlength=vocab**2).double()
    share = (counts.reshape(vocab, vocab) + 0.01) / (
        counts.reshape(vocab, vocab).sum(1, keepdim=True) + 0.01 * vocab
    )
    return -float(share[valid[:, :-1], valid[:, 1:]].log().mean())


def _characters(train: str) -> tuple[Any, int]:
    from collections import Counter

    kept = [letter for letter, _ in Counter(train).most_common(255)]
    number = {letter: i + 1 for i, letter in enumerate(kept)}
    return (lambda text: [number.get(letter, 0) for letter in text]), len(kept) + 1


def _subwords(train: str, pieces: int) -> tuple[Any, int]:
    with needs("hf", "learning subwords"):
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=max(pieces, len(letters)), initial_alphabet=letters, show_progress=False
    )
    tokenizer.train_from_iterator(train.split("\n"), trainer)
    return (lambda text: tokenizer.encode(text).ids), tokenizer.get_vocab_size()
