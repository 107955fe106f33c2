"""Train with four kernels of the dot product, and see whether the kernel or the temperature counts.

    PRIMAL_DATA=path/to/data python examples/schoenbat_kernels.py         # seven hours on one core
    PRIMAL_DATA=path/to/data python examples/schoenbat_kernels.py --quick  # to see that it runs

The two-layer models of Long Range Arena with SchoenbAt (Guo et al. 2025, arXiv 2505.12252), on
ListOps expressions of 128 to 512 tokens and on the first 1,024 bytes of film reviews. Every kernel
once with the published temperature, 1/√d, where its weights hardly differ from an average, and once
with a learned one; softmax stands beside them. All of them once with every token seeing all tokens,
and once seeing only those before it. Runs in the table are not done again. Prints the accuracy on
the test data and the temperatures that were learned, and writes ``schoenbat_kernels.csv`` to
``outputs/``.
"""

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from primal_attention.models import EncoderClassifier
from primal_attention.output import markdown_table, to_csv, write_atomically
from primal_attention.tasks.longrange.compare import Comparison, load_splits
from primal_attention.tasks.longrange.settings import model_config
from primal_attention.training import TrainingConfig, evaluate, fit

KERNELS = ("exp", "inverse", "logi", "sqrt")
HEAD_DIM = 32


class Contestant(NamedTuple):
    """A model, and how the table names it."""

    kernel: str
    temperature: str
    sees: str
    changes: dict[str, Any]
    """What makes it of the task's Transformer."""


def contestants() -> Iterator[Contestant]:
    """Yield all kernels and temperatures and softmax, each seeing all tokens and those before."""
    for sees, changes in (("all", {}), ("before", {"is_causal": True})):
        for kernel in KERNELS:
            for name, temperature in (("1/√d", HEAD_DIM**-0.5), ("learned", None)):
                options = {"kernel": kernel, "temperature": temperature}
                schoenbat = {"attention": "schoenbat", "attention_options": options}
                yield Contestant(kernel, name, sees, {**schoenbat, **changes})
        yield Contestant("softmax", "1/√d", sees, changes)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of an earlier start; the first line tells how they were made."""
    if not path.exists():
        return []
    return list(csv.DictReader(path.read_text().splitlines()[1:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it runs")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--tasks", nargs="+", default=["listops", "text"])
    parser.add_argument("--out", type=Path, default=Path("outputs"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    steps, data = options.steps, Comparison()
    if options.quick:
        steps, data = 4, Comparison(num_train=64, num_valid=8, num_test=16, max_length=64)
    facts = f"{steps} steps of {data.batch_size} sequences, {data.num_test} test sequences, seed 0"
    path = options.out / "schoenbat_kernels.csv"
    rows = read(path)
    done = {tuple(row[key] for key in ("task", "kernel", "temperature", "sees")) for row in rows}
    for task in options.tasks:
        splits = load_splits(task, data)
        longest = max(int(part.lengths.max()) for part in splits)
        for kernel, temperature, sees, changes in contestants():
            if (task, kernel, temperature, sees) in done:
                continue
            torch.manual_seed(0)
            model = EncoderClassifier(model_config(task, "softmax", max_length=longest, **changes))
            config = TrainingConfig(
                epochs=1,
                epoch_steps=steps,
                batch_size=data.batch_size,
                lr=data.lr,
                weight_decay=0.0,
                clip=1.0,
            )
            fit(model, splits.train, config=config)
            cores = [block.attention.core for block in model.blocks if kernel != "softmax"]
            learned = [value for core in cores for value in core.temperature.tolist()]
            row = {
                "task": task,
                "kernel": kernel,
                "temperature": temperature,
                "sees": sees,
                "test_accuracy": round(evaluate(model, splits.test).accuracy, 4),
                "temperatures": " ".join(f"{value:.2f}" for value in learned),
            }
            rows.append(row)
            write_atomically(path, to_csv(rows, facts))
            name = f"{task}, {kernel}, {temperature}, sees {sees}"
            print(f"  {name}: {row['test_accuracy']:.3f}", flush=True)
    print(markdown_table(list(rows[0]), [list(row.values()) for row in rows]))
    print(f"written to {path}")


if __name__ == "__main__":
    main()
