"""Compare low-rank forms of attention on the queries and keys of a pretrained encoder.

    python examples/skyformer_trained.py --out docs/results   # about five minutes on one core

Queries and keys are those of all-MiniLM-L6-v2 (6 layers, 12 heads of 32) on the first 512 tokens
of WikiText-2. Skyformer stands for the Gaussian kernel of these, Nyströmformer and random features
for their softmax matrix. Errors are spectral norms relative to the matrix that each stands for.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib.pyplot as plt
import torch
from pretrained import Rows, chunks, minilm, wikitext
from torch import Tensor

from primal_attention.analysis.report import to_png
from primal_attention.functional.nystrom import (
    gaussian_gram,
    kmeans_landmarks,
    nystrom_error,
    nystromformer_attention,
    segment_means,
    strided_landmarks,
)
from primal_attention.kernels import PositiveFeatures
from primal_attention.output import markdown_table, to_csv, write_atomically

SIZES = (16, 32, 64, 128, 256)
TEXTS = 1


def heads(texts: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Return the queries and keys of every layer, ``[b h n d]``."""
    model, tokenizer = minilm()
    ids = tokenizer(wikitext("test")[:20_000], return_tensors="pt").input_ids[0]
    found: list[Tensor] = []

    def keep(_module: Any, _args: Any, output: Tensor) -> None:
        found.append(output.unflatten(-1, (12, -1)).transpose(1, 2))

    for layer in model.encoder.layer:
        for linear in (layer.attention.self.query, layer.attention.self.key):
            linear.register_forward_hook(keep)
    with torch.no_grad():
        model(torch.cat(list(chunks(ids, 512, texts))))
    return zip(found[::2], found[1::2], strict=True)


def relative(exact: Tensor, low: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(exact - low, 2) / torch.linalg.matrix_norm(exact, 2)


def errors(q: Tensor, k: Tensor, size: int) -> dict[str, float]:
    """Return the error of each form with that many landmarks or features, averaged over heads."""
    d = q.shape[-1]
    soft, weights = (q @ k.mT * d**-0.5).softmax(-1), torch.eye(k.shape[2], dtype=k.dtype)
    a, b, half = q * d**-0.25, k * d**-0.25, size // 2
    sigma, singular = torch.linalg.svdvals(soft), torch.linalg.svdvals(gaussian_gram(a, b))

    def landmarks(choose: Callable[[Tensor, int], Tensor]) -> Tensor:
        return torch.cat([choose(a, half), choose(b, half)], dim=2)

    strided = landmarks(strided_landmarks)
    kmeans = kmeans_landmarks(torch.cat([a, b], dim=2), strided)
    phi = PositiveFeatures(
        d, size, scale=d**-0.5, dtype=q.dtype, generator=torch.Generator().manual_seed(0)
    )
    # a factor of a row cancels in softmax; without it nothing overflows
    logs_q, logs_k = phi.log_features(q, up_to_rows=True), phi.log_features(k)
    left = (logs_q - logs_q.amax(-1, keepdim=True)).exp()
    product = left @ (logs_k - logs_k.amax((-2, -1), keepdim=True)).exp().mT
    found = {
        "softmax, best": sigma[..., size] / sigma[..., 0],
        "Nyströmformer": relative(
            soft,
            nystromformer_attention(
                q,
                k,
                weights.expand(*k.shape[:3], -1),
                segment_means(q, size),
                segment_means(k, size),
            ),
        ),
        "random features": relative(soft, product / product.sum(-1, keepdim=True)),
        "Gaussian, best": singular[..., size] / singular[..., 0],
        "Skyformer, strided": nystrom_error(a, b, strided),
        "Skyformer, segments": nystrom_error(a, b, landmarks(segment_means)),
        "Skyformer, kmeans": nystrom_error(a, b, kmeans),
    }
    return {name: float(error.mean()) for name, error in found.items()}


def plot(rows: Rows) -> bytes:
    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for name in list(rows[0])[1:]:
        style = "--" if "best" in name else "-"
        axis.loglog(SIZES, [row[name] for row in rows], style, marker=".", label=name)
    axis.set_xticks(SIZES, [str(s) for s in SIZES])
    axis.minorticks_off()
    axis.set(xlabel="landmarks or features", ylabel="relative spectral error")
    axis.legend(fontsize=7, ncols=2)
    return to_png(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("outputs/skyformer_trained"))
    out = parser.parse_args().out
    pairs, rows = list(heads(TEXTS)), []
    for size in SIZES:
        layers = [errors(q, k, size) for q, k in pairs]
        rows.append(
            {"landmarks": size} | {name: mean(row[name] for row in layers) for name in layers[0]}
        )
        print(size, flush=True)
    shown = [{a: f"{b:.3g}" for a, b in row.items()} for row in rows]
    print(markdown_table(list(shown[0]), [list(row.values()) for row in shown]))
    facts = f"mean over 6 layers and 12 heads, {TEXTS * 512} tokens; made by {Path(__file__).name}"
    write_atomically(out / "skyformer_trained.csv", to_csv(shown, facts))
    write_atomically(out / "skyformer_trained.png", plot(rows))


if __name__ == "__main__":
    main()
