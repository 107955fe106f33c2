"""Compare low-rank forms of attention on the queries and keys of trained models.

    python examples/skyformer_trained.py                      # about five minutes on one core
    python examples/skyformer_trained.py --runs outputs/longrange

Queries and keys are those of all-MiniLM-L6-v2 (6 layers, 12 heads of 32) on the first 512 tokens
of WikiText-2; or, with the folder of ``primal repro longrange --variants softmax gaussian``, those
of its models of seed 0 on the four longest sequences of the test data. Skyformer stands for the
Gaussian kernel of these, Nyströmformer and random features for their softmax matrix. Errors are
spectral norms relative to the matrix that each stands for. Writes a table and a picture to
``outputs/``.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
from pretrained import Rows, chunks, minilm, wikitext
from torch import Tensor

from primal_attention.analysis.report import to_png
from primal_attention.functional.gaussian import gaussian_gram
from primal_attention.functional.landmarks import kmeans_landmarks, segment_means, strided_landmarks
from primal_attention.functional.nystrom import nystrom_error
from primal_attention.functional.nystromformer import nystromformer_attention
from primal_attention.kernels import PositiveFeatures
from primal_attention.models import EncoderClassifier
from primal_attention.output import markdown_table, to_csv, write_atomically
from primal_attention.tasks.longrange.compare import Comparison, load_splits

SIZES = (16, 32, 64, 128, 256)


class Trained(NamedTuple):
    """A model, the maps to its queries and keys, layer by layer, and what to show it."""

    name: str
    model: torch.nn.Module
    maps: list[torch.nn.Module]
    num_heads: int
    ids: Tensor

    def heads(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the queries and keys of every layer, ``[b h n d]``."""
        found: list[Tensor] = []

        def keep(_module: Any, _args: Any, output: Tensor) -> None:
            found.append(output.unflatten(-1, (self.num_heads, -1)).transpose(1, 2))

        for linear in self.maps:
            linear.register_forward_hook(keep)
        with torch.no_grad():
            self.model(self.ids)
        return zip(found[::2], found[1::2], strict=True)


def pretrained() -> Iterator[Trained]:
    model, tokenizer = minilm()
    ids = tokenizer(wikitext("test")[:20_000], return_tensors="pt").input_ids[0]
    layers = [layer.attention.self for layer in model.encoder.layer]
    maps = [linear for layer in layers for linear in (layer.query, layer.key)]
    yield Trained("MiniLM", model, maps, 12, torch.cat(list(chunks(ids, 512, 1))))


def from_runs(folder: Path) -> Iterator[Trained]:
    """Yield the models with exact softmax and exact Gaussian attention of a finished study."""
    for task in ("listops", "text", "image"):
        test = load_splits(task, Comparison()).test
        longest = sorted(range(len(test)), key=lambda i: -test.lengths[i])[:4]
        length = min(int(test.lengths[i]) for i in longest)
        ids = torch.stack([test[i]["x"][:length] for i in longest])
        for variant in ("softmax", "gaussian"):
            path = folder / "runs" / f"{task}-{variant}-0" / "fit" / "model"
            model = EncoderClassifier.from_pretrained(path).eval()
            layers = [block.attention for block in model.blocks]
            maps = [linear for layer in layers for linear in (layer.q_proj, layer.k_proj)]
            yield Trained(f"{task}, trained with {variant}", model, maps, 2, ids)


class Forms:
    """The low-rank forms of one layer's softmax matrix and Gaussian kernel, and their errors."""

    def __init__(self, q: Tensor, k: Tensor) -> None:
        self.q, self.k, d = q, k, q.shape[-1]
        self.a, self.b = q * d**-0.25, k * d**-0.25
        self.soft = (q @ k.mT * d**-0.5).softmax(-1)
        self.sigma_soft = torch.linalg.svdvals(self.soft)
        self.sigma_gauss = torch.linalg.svdvals(gaussian_gram(self.a, self.b))

    def errors(self, size: int) -> dict[str, float]:
        """Return the error of each with that many landmarks or features, averaged over heads."""
        strided = self._landmarks(strided_landmarks, size)
        kmeans = kmeans_landmarks(torch.cat([self.a, self.b], dim=2), strided)
        found = {
            "softmax, best": self.sigma_soft[..., size] / self.sigma_soft[..., 0],
            "Nyströmformer": self._from_softmax(self._nystromformer(size)),
            "random features": self._from_softmax(self._random_features(size)),
            "Gaussian, best": self.sigma_gauss[..., size] / self.sigma_gauss[..., 0],
            "Skyformer, strided": nystrom_error(self.a, self.b, strided),
            "Skyformer, segments": nystrom_error(
                self.a, self.b, self._landmarks(segment_means, size)
            ),
            "Skyformer, kmeans": nystrom_error(self.a, self.b, kmeans),
        }
        return {name: float(error.mean()) for name, error in found.items()}

    def _from_softmax(self, low: Tensor) -> Tensor:
        return torch.linalg.matrix_norm(self.soft - low, 2) / self.sigma_soft[..., 0]

    def _nystromformer(self, size: int) -> Tensor:
        unit = torch.eye(self.k.shape[2]).expand(*self.k.shape[:3], -1)
        marks = segment_means(self.q, size), segment_means(self.k, size)
        return nystromformer_attention(self.q, self.k, unit, *marks)

    def _random_features(self, size: int) -> Tensor:
        d = self.q.shape[-1]
        generator = torch.Generator().manual_seed(0)
        phi = PositiveFeatures(d, size, scale=d**-0.5, generator=generator)
        # a factor of a row cancels in softmax; without it nothing overflows
        logs_q, logs_k = phi.log_features(self.q, up_to_rows=True), phi.log_features(self.k)
        left = (logs_q - logs_q.amax(-1, keepdim=True)).exp()
        product = left @ (logs_k - logs_k.amax((-2, -1), keepdim=True)).exp().mT
        return product / product.sum(-1, keepdim=True)

    def _landmarks(self, choose: Callable[[Tensor, int], Tensor], size: int) -> Tensor:
        return torch.cat([choose(self.a, size // 2), choose(self.b, size // 2)], dim=2)


def plot(rows: Rows) -> bytes:
    models = list(dict.fromkeys(row["model"] for row in rows))
    columns = min(len(models), 2)
    lines = -(-len(models) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(6 * columns, 3.6 * lines), layout="constrained", squeeze=False
    )
    for axis, model in zip(axes.flat, models, strict=True):
        chosen = [row for row in rows if row["model"] == model]
        for name in list(rows[0])[2:]:
            style = "--" if "best" in name else "-"
            errors = [row[name] for row in chosen]
            axis.loglog([row["landmarks"] for row in chosen], errors, style, marker=".", label=name)
        axis.set_xticks(SIZES, [str(s) for s in SIZES])
        axis.minorticks_off()
        axis.set(xlabel="landmarks or features", ylabel="relative spectral error", title=model)
    axes[0, 0].legend(fontsize=7, ncols=2)
    return to_png(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=Path, help="folder of a study; by default MiniLM is read")
    parser.add_argument("--out", type=Path, default=Path("outputs/skyformer_trained"))
    options = parser.parse_args()
    rows: Rows = []
    for trained in from_runs(options.runs) if options.runs else pretrained():
        forms = [Forms(q, k) for q, k in trained.heads()]
        for size in SIZES:
            layers = [form.errors(size) for form in forms]
            averages = {name: mean(row[name] for row in layers) for name in layers[0]}
            rows.append({"model": trained.name, "landmarks": size} | averages)
            print(f"{trained.name}, {size}", flush=True)
    shown = [{a: b if isinstance(b, str) else f"{b:.3g}" for a, b in row.items()} for row in rows]
    print(markdown_table(list(shown[0]), [list(row.values()) for row in shown]))
    facts = f"mean over sequences, layers and heads; made by {Path(__file__).name}"
    name = "skyformer_longrange" if options.runs else "skyformer_trained"
    write_atomically(options.out / f"{name}.csv", to_csv(shown, facts))
    write_atomically(options.out / f"{name}.png", plot(rows))


if __name__ == "__main__":
    main()
