"""Classify pictures with and without weights for rows and columns: what does a 2-D position buy?

    PRIMAL_DATA=path/to/data python examples/relative_grid.py            # a quarter of an hour
    PRIMAL_DATA=path/to/data python examples/relative_grid.py --quick    # to see that it runs

Grey CIFAR-10 in patches of 4 × 4, so 64 tokens on a grid of 8 × 8; two blocks of width 64 with
four heads and learned absolute positions. Kernelized attention with ``position="grid"`` has a
learned weight for every row and column lag (Luo et al. 2021, arXiv 2106.12566); the same layer with
that table held at zero has none; softmax stands beside them. Prints the accuracy on the test data
over three seeds, and writes ``relative_grid.csv`` and ``relative_grid.png`` to ``outputs/``.
"""

import argparse
import os
from pathlib import Path
from statistics import mean, stdev

import matplotlib
import numpy as np
import torch

from primal_attention.analysis.report import to_png
from primal_attention.models import EncoderClassifier, EncoderConfig
from primal_attention.output import markdown_table, to_csv, write_atomically
from primal_attention.tasks.longrange import read_cifar10
from primal_attention.training import Columns, TrainingConfig, fit

matplotlib.use("Agg")
from matplotlib import pyplot as plt

SIDE, PATCH = 32, 4
GRID = SIDE // PATCH
NAMES = ("grid", "no relative positions", "softmax")


def read(part: str, count: int) -> Columns:
    """Return pictures as sequences of patches, grey values from -1 to 1."""
    folder = Path(os.environ["PRIMAL_DATA"]) / "vision/cifar-10"
    found = read_cifar10(folder / f"{part}_jpeg.npz", limit=count)
    pixels = torch.from_numpy(np.stack([found.row(i) for i in range(count)])).float() / 127.5 - 1
    patches = pixels.reshape(count, GRID, PATCH, GRID, PATCH).transpose(2, 3)
    return Columns(x=patches.reshape(count, GRID**2, PATCH**2), labels=torch.tensor(found.labels))


def build(name: str) -> EncoderClassifier:
    """Return the model; without relative positions the table of lags stays at zero."""
    grid = {"position": "grid", "width": GRID, "window": GRID - 1}
    model = EncoderClassifier(
        EncoderConfig(
            num_classes=10,
            num_features=PATCH**2,
            dim=64,
            num_heads=4,
            num_layers=2,
            hidden_dim=128,
            attention="softmax" if name == "softmax" else "kernelized",
            attention_options={} if name == "softmax" else grid,
            positions="learned",
            max_length=GRID**2,
        )
    )
    if name == "no relative positions":
        for block in model.blocks:
            block.attention.core.position.table.requires_grad_(False)
    return model


def picture(curves: list[tuple[str, list[int], list[float]]]) -> plt.Figure:
    figure, axis = plt.subplots(figsize=(5.4, 3.8))
    for name, steps, values in curves:
        color = f"C{NAMES.index(name)}"
        known = axis.get_legend_handles_labels()[1]
        axis.plot(steps, values, ".-", color=color, label=None if name in known else name)
    axis.set(xlabel="steps", ylabel="test accuracy")
    axis.legend(frameon=False)
    axis.grid(alpha=0.3)
    return figure


def save(
    out: Path,
    records: dict[str, dict[str, object]],
    curves: list[tuple[str, list[int], list[float]]],
    facts: str,
) -> None:
    rows = []
    for record in records.values():
        found = [value for key, value in record.items() if key != "positions"]
        spread = stdev(found) if len(found) > 1 else 0.0
        rows.append({**record, "mean": round(mean(found), 4), "spread": round(spread, 4)})
    print(markdown_table(list(rows[0]), [list(row.values()) for row in rows]), flush=True)
    write_atomically(out / "relative_grid.csv", to_csv(rows, facts))
    write_atomically(out / "relative_grid.png", to_png(picture(curves)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it runs")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("outputs"))
    options = parser.parse_args()
    counts, steps, seeds, epochs = (20_000, 4_000), options.steps, options.seeds, 4
    if options.quick:
        counts, steps, seeds, epochs = (256, 100), 4, 1, 2
    torch.set_num_threads(1)
    train, test = read("train", counts[0]), read("test", counts[1])
    facts = f"{counts[0]} training and {counts[1]} test pictures, {steps} steps of 32"
    records: dict[str, dict[str, object]] = {}
    curves = []
    for seed in range(seeds):
        for name in NAMES:
            torch.manual_seed(seed)
            model = build(name)
            config = TrainingConfig(
                epochs=epochs,
                epoch_steps=steps // epochs,
                batch_size=32,
                lr=2e-3,
                weight_decay=0.0,
                seed=seed,
            )
            # no epoch is chosen by the test data: it only draws the curve, the last one counts
            history = fit(model, train, config=config, valid=test)
            values = [record.valid_accuracy for record in history.records]
            curves.append((name, [record.step for record in history.records], values))
            records.setdefault(name, {"positions": name})[f"seed {seed}"] = round(values[-1], 4)
            print(f"  seed {seed}, {name}: {values[-1]:.3f}", flush=True)
        # a run that is stopped keeps the seeds it has done
        save(options.out, records, curves, f"{facts}, {seed + 1} seeds")
    print(f"written to {options.out}/")


if __name__ == "__main__":
    main()
