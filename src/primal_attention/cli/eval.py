"""``primal eval``: how good a trained model is."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from primal_attention.cli.recipes import build, read_recipe, to_yaml
from primal_attention.command import UserError, user_errors
from primal_attention.settings import parse

__all__ = ["main"]


@dataclass(frozen=True)
class Evaluate:
    """Score a trained model on the test part of its recipe, or on a labelled file."""

    model: Annotated[Path, tyro.conf.Positional]
    """Folder of a trained model, such as outputs/japanese-vowels/primal."""
    data: Path | None = None
    """Labelled file to score instead."""
    part: Literal["train", "test"] = "test"
    """Which part of an .npz file that holds several."""
    out: Path | None = None
    """Also write the numbers to this .json file."""
    batch_size: int = 64
    """Sequences to run at once."""
    threads: int = 1
    """Threads of torch."""


def main(argv: list[str]) -> int:
    """Print loss, accuracy, and the recall of every class."""
    options = parse(Evaluate, argv, prog="primal eval")
    if options.batch_size < 1 or options.threads < 1:
        raise UserError("--batch-size and --threads must be at least 1.")
    if options.out is not None and options.out.suffix != ".json":
        raise UserError(f"--out must end in .json, got {options.out.name!r}.")
    if options.data is None and options.part != "test":
        raise UserError("--part chooses a part of the file in --data, which is not given.")
    import torch

    from primal_attention.cli.experiment import confusion, standard_error
    from primal_attention.cli.lengths import check_length
    from primal_attention.cli.problems import load_problem
    from primal_attention.cli.settings import Recipe
    from primal_attention.cli.trained import answers, load_trained
    from primal_attention.output import markdown_table, to_json, write_atomically

    print(to_yaml(options), flush=True)
    torch.set_num_threads(options.threads)
    model, reader = load_trained(options.model)
    if options.data is None:
        recipe = build(Recipe, read_recipe(options.model / "config.yaml"))
        data = load_problem(recipe.data).test
        source = f"the test part of {recipe.data.name or recipe.data.task}"
    else:
        data = reader.read(options.data, labelled=True, part=options.part)
        source = str(options.data)
    check_length(data, model.config.max_length, source)
    found = answers(model, data, reader, options.batch_size)
    matrix = confusion(found.logits, found.labels, len(reader.classes))
    count = int(matrix.sum())
    error = standard_error(found.accuracy, count)
    totals = matrix.sum(1)
    recall = (matrix.diagonal() / totals.clamp_min(1)).tolist()
    rows = [
        [name, f"{100 * r:.1f}" if n else "–", n]
        for name, r, n in zip(reader.classes, recall, totals.tolist(), strict=True)
    ]
    print(f"{options.model} on {source}: {count} sequences\n")
    print(markdown_table(["class", "recall (%)", "cases"], rows))
    print(f"\naccuracy {100 * found.accuracy:.1f} ± {100 * error:.1f} %, loss {found.loss:.4f}")
    if options.out is not None:
        numbers = {
            "model": str(options.model),
            "data": source,
            "cases": count,
            "accuracy": found.accuracy,
            "standard error": error,
            "loss": found.loss,
            "classes": list(reader.classes),
            "confusion": matrix.tolist(),
        }
        with user_errors(""):
            write_atomically(options.out, to_json(numbers))
            write_atomically(Path(f"{options.out}.config.yaml"), to_yaml(options))
        print(f"Saved {options.out}")
    return 0
