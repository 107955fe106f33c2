"""``primal eval``: the scores of a trained model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from primal_attention.support.command import UserError, user_errors
from primal_attention.support.files import read_yaml
from primal_attention.support.settings import build, parse, to_yaml

__all__ = ["main"]


@dataclass(frozen=True)
class Eval:
    """Score a trained model on the test part of its recipe, or on a labelled file."""

    model: Annotated[Path, tyro.conf.Positional]
    """Folder of a trained model, such as outputs/japanese-vowels/primal, or of a run with one."""
    data: Path | None = None
    """Labelled file; by default the test part of the model's recipe."""
    part: Literal["train", "test"] = "test"
    """Which part of an .npz file that holds several."""
    out: Path | None = None
    """JSON file for the scores."""
    batch_size: int = 64
    """Sequences to run at once."""
    threads: int = 1
    """Threads of torch."""


def main(argv: list[str]) -> int:
    """Print the scores, and write them if asked to."""
    options = parse(Eval, argv, prog="primal eval")
    if options.batch_size < 1 or options.threads < 1:
        raise UserError("--batch-size and --threads must be at least 1.")
    if options.out is not None and options.out.suffix != ".json":
        raise UserError(f"--out must end in .json, got {options.out.name!r}.")
    if options.data is None and options.part != "test":
        raise UserError("--part chooses a part of the file --data; give that too.")
    import torch

    from primal_attention.support.output import markdown_table, to_json, write_atomically
    from primal_attention.tasks.experiment import recipe_type
    from primal_attention.tasks.trained import check_finite, check_lengths, load_trained

    torch.set_num_threads(options.threads)
    task, model = load_trained(options.model)
    if options.data is None:
        tree = read_yaml(_recipe_of(options.model))
        data = task.load(build(recipe_type(tree["task"]), tree).data)[1].test
        source = "the test part of its recipe"
    else:
        data = task.read(options.data, labelled=True, part=options.part)
        source = str(options.data)
    check_lengths(data, model, source)
    found = task.measure(model, data, batch_size=options.batch_size)
    with user_errors(source, UserError):
        check_finite(found.answers)
    count = len(data)  # type: ignore[arg-type]
    print(f"{options.model} on {source}: {count} items\n")
    header, rows = task.details(found.answers)
    if rows:
        print(markdown_table(header, rows), end="\n\n")
    print("\n".join(f"{name} {score}" for name, score in found.scores.items()))
    if options.out is not None:
        numbers = {
            "model": str(options.model),
            "data": source,
            "items": count,
            **{name: score.value for name, score in found.scores.items()},
            **{
                f"{name}, standard error": score.error
                for name, score in found.scores.items()
                if score.error is not None
            },
            "details": [dict(zip(header, row, strict=True)) for row in rows],
        }
        with user_errors(""):
            write_atomically(options.out, to_json(numbers))
            write_atomically(Path(f"{options.out}.config.yaml"), to_yaml(options))
        print(f"Saved {options.out}")
    return 0


def _recipe_of(folder: Path) -> Path:
    """Return the file of the recipe a model was trained with."""
    path = folder / "config.yaml"
    if not path.is_file():
        raise UserError(f"{folder} has no recipe, so no test part; give a labelled file: --data.")
    return path
