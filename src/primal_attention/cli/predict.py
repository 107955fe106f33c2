"""``primal predict``: a file in, a file with the predictions out."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from primal_attention.support.command import UserError, user_errors
from primal_attention.support.output import is_same_place
from primal_attention.support.settings import parse, to_yaml

__all__ = ["main"]


@dataclass(frozen=True)
class Predict:
    """Read a file, write a line for every item, such as its class and all probabilities.

    The file needs no labels; labels in it are not read.
    """

    model: Annotated[Path, tyro.conf.Positional]
    """Folder of a trained model, such as outputs/japanese-vowels/primal, or of a run with one."""
    file: Annotated[Path, tyro.conf.Positional]
    """File or folder to read, of the kind the model was trained on."""
    out: Path = Path("predictions.csv")
    """File to write: .csv, or .jsonl for one JSON object a line."""
    part: Literal["train", "test"] = "test"
    """Which part of an .npz file that holds several."""
    batch_size: int = 64
    """Sequences to run at once."""
    threads: int = 1
    """Threads of torch."""


def main(argv: list[str]) -> int:
    """Predict, and write the file at once or not at all."""
    options = parse(Predict, argv, prog="primal predict")
    if options.out.suffix not in (".csv", ".jsonl"):
        raise UserError(f"--out must end in .csv or .jsonl, got {options.out.name!r}.")
    if is_same_place(options.out, options.file):
        raise UserError(f"--out would replace {options.file}, the file to read; choose another.")
    if options.batch_size < 1 or options.threads < 1:
        raise UserError("--batch-size and --threads must be at least 1.")
    import torch

    from primal_attention.support.output import to_csv, write_atomically
    from primal_attention.tasks.trained import load_trained

    torch.set_num_threads(options.threads)
    trained = load_trained(options.model)
    rows = trained.records(options.file, part=options.part, batch_size=options.batch_size)
    if options.out.suffix == ".csv":
        text = to_csv(rows)
    else:
        text = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
    with user_errors(""):
        write_atomically(options.out, text)
        write_atomically(Path(f"{options.out}.config.yaml"), to_yaml(options))
    print(f"Wrote {len(rows)} predictions to {options.out}")
    return 0
