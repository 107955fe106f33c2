"""Draw how fast the features of each kernel converge to its exact Gram matrix.

Root mean square error over pairs of random unit rows, relative to the root mean square of the
matrix, against the number of features. Random features fall by a factor of two for four times as
many; exact low degrees start lower.

    python examples/kernel_convergence.py            # half a minute on one core
    python examples/kernel_convergence.py --quick    # two sizes, to see that it runs

Writes ``kernel_convergence.csv`` and ``kernel_convergence.png`` to ``outputs/``.
"""

import argparse
from pathlib import Path

import matplotlib
import torch

from primal_attention.kernels import MaclaurinFeatures, PositiveFeatures, TrigonometricFeatures
from primal_attention.output import markdown_table, to_csv, write_atomically

matplotlib.use("Agg")
from matplotlib import pyplot as plt

DIM, PAIRS, DRAWS = 16, 64, 16
PUBLISHED = {"exact_degree": 0, "law": "geometric", "stratified": False}
# rows have length √τ; series other than exp converge for τ < 1 only
PANELS = {
    "exponential, τ = 1": {
        "positive, iid": lambda p, **o: PositiveFeatures(DIM, p, directions="iid", **o),
        "positive, orthogonal": lambda p, **o: PositiveFeatures(DIM, p, **o),
        "positive, orthogonal ±": lambda p, **o: PositiveFeatures(DIM, p, antithetic=True, **o),
        "positive, tilted": lambda p, **o: PositiveFeatures(DIM, p, spread=2.0, **o),
        "Maclaurin": lambda p, **o: MaclaurinFeatures(DIM, p, exact_degree=1, **o),
    },
    "Gaussian, τ = 1": {
        "positive": lambda p, **o: PositiveFeatures(DIM, p, kernel="gaussian", **o),
        "Fourier, iid": lambda p, **o: TrigonometricFeatures(DIM, p, directions="iid", **o),
        "Fourier, orthogonal": lambda p, **o: TrigonometricFeatures(DIM, p, **o),
    },
    "dot-product series, τ = 0.5": {
        f"{name}, {kind}": lambda p, name=name, options=options, **o: MaclaurinFeatures(
            DIM, p, name, scale=0.5, **options, **o
        )
        for name in ("exp", "inverse", "logi", "sqrt")
        for kind, options in (("published", PUBLISHED), ("ours", {"exact_degree": 1}))
    },
}


def measure(sizes: list[int], draws: int) -> list[dict[str, object]]:
    rows = torch.randn(2, PAIRS, DIM, generator=torch.Generator().manual_seed(0)).double()
    rows = rows / rows.norm(dim=-1, keepdim=True)
    records = []
    for panel, maps in PANELS.items():
        x, y = rows * float(panel.split("= ")[1]) ** 0.5
        for name, build in maps.items():
            for p in sizes:
                squares = []
                for seed in range(draws):
                    generator = torch.Generator().manual_seed(seed)
                    phi = build(p, generator=generator, dtype=torch.float64)
                    squares.append((phi.approximate(x, y) - phi.gram(x, y)).square().mean())
                scale = phi.gram(x, y).square().mean()
                error = (torch.stack(squares).mean() / scale).sqrt().item()
                record = {"kernel": panel, "features": name, "p": p, "error": f"{error:.5f}"}
                records.append(record)
    return records


def draw(records: list[dict[str, object]], path: Path) -> None:
    figure, axes = plt.subplots(1, len(PANELS), figsize=(12, 3.8))
    for axis, panel in zip(axes, PANELS, strict=True):
        for name in PANELS[panel]:
            found = [r for r in records if (r["kernel"], r["features"]) == (panel, name)]
            style = "--" if "published" in name or "iid" in name else "-"
            errors = [float(r["error"]) for r in found]
            axis.loglog([r["p"] for r in found], errors, style, marker="o", ms=3, label=name)
        axis.set_title(panel)
        axis.set_xlabel("features")
        axis.grid(alpha=0.3)
        axis.set_ylim(bottom=axis.get_ylim()[0] / 5)
        axis.legend(frameon=False, fontsize=7, ncols=2, loc="lower left")
    axes[0].set_ylabel("relative error of the Gram matrix")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two sizes and two draws")
    parser.add_argument("--out", type=Path, default=Path("outputs"), help="where to write")
    options = parser.parse_args()
    sizes, draws = ([32, 128], 2) if options.quick else ([32, 64, 128, 256, 512, 1024], DRAWS)
    records = measure(sizes, draws)
    facts = f"d={DIM}, {PAIRS}x{PAIRS} pairs of rows of length √τ, {draws} draws, seed 0"
    write_atomically(options.out / "kernel_convergence.csv", to_csv(records, facts))
    draw(records, options.out / "kernel_convergence.png")
    table = [
        [
            panel,
            name,
            *(r["error"] for r in records if (r["kernel"], r["features"]) == (panel, name)),
        ]
        for panel, maps in PANELS.items()
        for name in maps
    ]
    print(markdown_table(["kernel", "features", *map(str, sizes)], table))
    print(f"\n{facts}")


if __name__ == "__main__":
    main()
