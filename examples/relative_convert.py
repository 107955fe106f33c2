"""Put random features into trained softmax attention with relative positions: what is left of it?

    python examples/relative_convert.py            # about ten minutes on a quiet core
    python examples/relative_convert.py --quick    # ten steps, to see that it runs

Luo et al. 2021 (arXiv 2106.12566) report that softmax attention with relative positions survives
the exchange of its kernel for random features if queries and keys have length one, and collapses
otherwise. Here the models of ``relative_copy.py`` learn two tasks with the exact kernel: copy the
token five back, where positions decide, and sort, where content does. Their kernels are then
replaced, without training, by each feature map of the library; and models with those maps learn
to sort from the start.

Writes ``relative_convert.csv``, ``relative_scratch.csv`` and ``relative_convert.png`` to
``outputs/``.
"""

import argparse
from functools import partial
from pathlib import Path
from statistics import mean

import matplotlib
import torch
from relative_copy import HEADS, SYMBOLS, TOKENS, WIDTH, copy, share_right, train
from torch import Tensor

from primal_attention.analysis.report import to_png
from primal_attention.attention import Core, MultiHeadAttention
from primal_attention.attention.positions import RelativePosition
from primal_attention.kernels import FeatureMap, PositiveFeatures, TrigonometricFeatures
from primal_attention.output import markdown_table, to_csv, write_atomically

matplotlib.use("Agg")
from matplotlib import pyplot as plt

HEAD = WIDTH // HEADS
MAPS = {
    "positive": partial(PositiveFeatures, directions="iid"),
    "positive, on the sphere": partial(PositiveFeatures, directions="sphere"),
    "positive, orthogonal": PositiveFeatures,
    "positive, orthogonal ±, tilted": partial(PositiveFeatures, antithetic=True, spread=2.0),
    "trigonometric": partial(TrigonometricFeatures, kernel="exponential", directions="iid"),
}


def sort(tokens: Tensor) -> Tensor:
    """Return the tokens in ascending order."""
    return tokens.sort(dim=-1).values


TASKS = {"copy": copy, "sort": sort}


class RelativeCore(Core):
    """Weights ``c_{j-i} κ(q_i, k_j)``, divided by their sum: exact, or by features of ``κ``."""

    def __init__(self, features: FeatureMap, *, is_exact: bool) -> None:
        super().__init__()
        self.features, self.is_exact = features, is_exact
        self.position = RelativePosition(HEADS, window=TOKENS)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        key_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Return the weighted average of the values; all tokens are real and see each other."""
        kernel = self.features.gram if self.is_exact else self.features.approximate
        index = torch.arange(q.shape[2])
        weights = self.position.weight(index - index[:, None]) * kernel(q, k)
        total = weights.sum(-1, keepdim=True)
        # features of both signs can sum to nothing
        safe = torch.where(total.abs() < 1e-6, 1e-6, total)
        return weights @ v / safe


def draw(kind: str, size: int, normalized: bool, seed: int) -> FeatureMap:
    """Return a map of ``exp(q̂·k̂)``, or of ``exp(q·k / √d)`` as in softmax attention."""
    return MAPS[kind](
        HEAD,
        size,
        scale=1.0 if normalized else HEAD**-0.5,
        normalize=normalized,
        num_heads=HEADS,
        generator=torch.Generator().manual_seed(seed),
    )


def attention(kind: str, size: int, normalized: bool, *, is_exact: bool) -> MultiHeadAttention:
    """Return attention with relative positions over a kernel or its features."""
    features = draw(kind, size, normalized, torch.randint(2**31, ()).item())
    return MultiHeadAttention(WIDTH, HEADS, RelativeCore(features, is_exact=is_exact))


def convert(steps: int, seeds: int, sizes: list[int], draws: int) -> list[dict[str, object]]:
    """Return the accuracy of trained models after their kernels were replaced by features."""
    tokens = torch.randint(SYMBOLS, (300, TOKENS), generator=torch.Generator().manual_seed(0))
    records = []
    for task, normalized in ((t, n) for t in TASKS for n in (True, False)):
        exact, found = [], {}
        for seed in range(seeds):
            make = partial(attention, "positive", 2, normalized, is_exact=True)
            model = train(make, TASKS[task], steps, seed)
            exact.append(share_right(model, TASKS[task], tokens))
            cores = [block.attention.core for block in model.blocks]
            for kind, size in ((k, s) for k in MAPS for s in sizes):
                for number in range(draws):
                    for i, core in enumerate(cores):
                        core.features = draw(kind, size, normalized, 100 * number + i)
                        core.is_exact = False
                    right = share_right(model, TASKS[task], tokens)
                    found.setdefault((kind, size), []).append(right)
        for (kind, size), values in found.items():
            records.append(
                {
                    "task": task,
                    "queries and keys": "unit" if normalized else "free",
                    "features": kind,
                    "size": size,
                    "accuracy": round(mean(values), 3),
                    "worst": round(min(values), 3),
                    "exact": round(mean(exact), 3),
                }
            )
        print(f"  {task}, {'unit' if normalized else 'free'}: exact {mean(exact):.3f}", flush=True)
    return records


def scratch(steps: int, seeds: int, sizes: list[int]) -> list[dict[str, object]]:
    """Return the accuracy of models that learned to sort with features from the start."""
    tokens = torch.randint(SYMBOLS, (300, TOKENS), generator=torch.Generator().manual_seed(0))
    cases = [(kind, 32, True) for kind in MAPS]
    cases += [("positive", size, True) for size in (sizes[0], sizes[-1])]
    cases.append(("positive", 32, False))
    records = []
    for kind, size, normalized in cases:
        make = partial(attention, kind, size, normalized, is_exact=False)
        found = [share_right(train(make, sort, steps, seed), sort, tokens) for seed in range(seeds)]
        records.append(
            {
                "features": kind,
                "size": size,
                "queries and keys": "unit" if normalized else "free",
                **{f"seed {i}": round(value, 3) for i, value in enumerate(found)},
                "mean": round(mean(found), 3),
            }
        )
        print("  " + ", ".join(str(value) for value in records[-1].values()), flush=True)
    return records


def picture(records: list[dict[str, object]]) -> plt.Figure:
    figure, axes = plt.subplots(1, 4, figsize=(14, 3.6), sharey=True)
    panels = dict.fromkeys((r["task"], r["queries and keys"]) for r in records)
    for axis, panel in zip(axes, panels, strict=True):
        rows = [r for r in records if (r["task"], r["queries and keys"]) == panel]
        for kind in MAPS:
            mine = [r for r in rows if r["features"] == kind]
            found = [r["accuracy"] for r in mine]
            axis.semilogx([r["size"] for r in mine], found, ".-", label=kind)
        axis.axhline(rows[0]["exact"], color="black", linestyle="--", label="exact kernel")
        axis.set(title=f"{panel[0]}, {panel[1]} queries and keys", xlabel="features")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("accuracy after conversion")
    axes[0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="ten steps, to see that it runs")
    parser.add_argument("--only", choices=("convert", "scratch"), help="one of the two parts")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("outputs"))
    options = parser.parse_args()
    steps, seeds, sizes, draws = 600, options.seeds, [8, 16, 32, 64, 128], 3
    if options.quick:
        steps, seeds, sizes, draws = 10, 1, [8], 1
    torch.set_num_threads(1)
    facts = f"{steps} steps of 64 sequences of {TOKENS} tokens, {seeds} seeds"
    if options.only != "scratch":
        print("conversion:")
        converted = convert(steps, seeds, sizes, draws)
        print(markdown_table(list(converted[0]), [list(r.values()) for r in converted]), flush=True)
        note = f"{facts}, {draws} draws"
        write_atomically(options.out / "relative_convert.csv", to_csv(converted, note))
        write_atomically(options.out / "relative_convert.png", to_png(picture(converted)))
    if options.only != "convert":
        print("from the start:")
        trained = scratch(steps, seeds, sizes)
        write_atomically(options.out / "relative_scratch.csv", to_csv(trained, f"sort, {facts}"))
    print(f"written to {options.out}/")


if __name__ == "__main__":
    main()
