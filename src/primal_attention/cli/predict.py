"""``primal predict``: a file in, a file with the predictions out."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from primal_attention.command import UserError, user_errors
from primal_attention.settings import parse, to_yaml

__all__ = ["main"]


@dataclass(frozen=True)
class Predict:
    """Read a file, write a line for every item, such as its class and all probabilities.

    Labels in the file are ignored.
    """

    model: Annotated[Path, tyro.conf.Positional]
    """Folder of a trained model, such as outputs/japanese-vowels/primal."""
    file: Annotated[Path, tyro.conf.Positional]
    """File to read, of the kind the model was trained on."""
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
    if options.out.resolve() == options.file.resolve():
        raise UserError(f"--out would replace {options.file}, the file to read; choose another.")
    if options.batch_size < 1 or options.threads < 1:
        raise UserError("--batch-size and --threads must be at least 1.")
    import torch

    from primal_attention.output import to_csv, write_atomically
    from primal_attention.tasks.experiment import check_finite, check_lengths, load_trained

    print(to_yaml(options), flush=True)
    torch.set_num_threads(options.threads)
    task, model = load_trained(options.model)
    data = task.read(options.file, labelled=False, part=options.part)
    check_lengths(data, model, str(options.file))
    answers = task.measure(model, data, batch_size=options.batch_size).answers
    check_finite(answers)
    rows = task.records(answers)
    if options.out.suffix == ".csv":
        text = to_csv(rows)
    else:
        text = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
    with user_errors(""):
        write_atomically(options.out, text)
        write_atomically(Path(f"{options.out}.config.yaml"), to_yaml(options))
    print(f"Wrote {len(rows)} predictions to {options.out}")
    return 0
