"""``primal predict``: a file in, a file with the predictions out."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from primal_attention.cli.recipes import to_yaml
from primal_attention.command import UserError, user_errors
from primal_attention.settings import parse

__all__ = ["main"]


@dataclass(frozen=True)
class Predict:
    """Read a file, write a line for every sequence: its class and the probabilities of all.

    Time series are read from .ts or .npz, texts one a line; labels in the file are left alone.
    """

    model: Annotated[Path, tyro.conf.Positional]
    """Folder of a trained model, such as outputs/japanese-vowels/primal."""
    file: Annotated[Path, tyro.conf.Positional]
    """What to read."""
    out: Path = Path("predictions.csv")
    """What to write: .csv, or .jsonl for one JSON object a line."""
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

    from primal_attention.cli.lengths import check_length
    from primal_attention.cli.trained import answers, load_trained
    from primal_attention.output import to_csv, write_atomically

    print(to_yaml(options), flush=True)
    torch.set_num_threads(options.threads)
    model, reader = load_trained(options.model)
    data = reader.read(options.file, labelled=False, part=options.part)
    check_length(data, model.config.max_length, str(options.file))
    logits = answers(model, data, reader, options.batch_size).logits
    rows = [] if logits is None else _rows(logits.softmax(-1).tolist(), reader.classes)
    if options.out.suffix == ".csv":
        text = to_csv(rows)
    else:
        text = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
    with user_errors(""):
        write_atomically(options.out, text)
        write_atomically(Path(f"{options.out}.config.yaml"), to_yaml(options))
    print(f"Wrote {len(rows)} predictions to {options.out}")
    return 0


def _rows(found: Sequence[Sequence[float]], classes: Sequence[str]) -> list[dict[str, object]]:
    """Return one record a sequence: its number, class, and the probability of every class."""
    return [
        {
            "index": i,
            "class": classes[max(range(len(row)), key=row.__getitem__)],
            **{f"p({name})": round(p, 6) for name, p in zip(classes, row, strict=True)},
        }
        for i, row in enumerate(found)
    ]
