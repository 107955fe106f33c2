"""``primal repro skyformer-trained``: low-rank forms on the queries and keys of trained models.

Queries and keys are those of all-MiniLM-L6-v2 (6 layers, 12 heads of 32) on the first 512 tokens of
WikiText-2, and of small models that learn ListOps, Text and Image with exact softmax and with the
exact Gaussian kernel, on their four longest test sequences. Skyformer stands for the Gaussian
kernel of these, Nyströmformer and random features for their softmax matrix. Errors are spectral
norms relative to the matrix that each stands for.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from primal_attention.support.output import page
from primal_attention.support.settings import at_least_one, one_of
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.kit.tables import Files, group_lines, plot_lines, rows_table

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["TrainedOptions", "TrainedStudy", "low_rank_errors"]

SIZES = (16, 32, 64, 128, 256)
_MODELS = ("minilm", "listops", "text", "image")
_METHODS = (
    "softmax, best",
    "Nyströmformer",
    "random features",
    "Gaussian, best",
    "Skyformer, strided",
    "Skyformer, segments",
    "Skyformer, kmeans",
)


@dataclass(frozen=True)
class TrainedOptions:
    """Errors of low-rank attention on the queries and keys of trained models."""

    models: tuple[str, ...] = _MODELS
    """Models: minilm, listops, text, image."""
    sizes: tuple[int, ...] = SIZES
    """Landmarks, or features."""
    steps: int = 3000
    """Steps of 8 sequences that the small models learn."""
    num_train: int = 20_000
    """Their training sequences."""
    data: Path | None = None
    """Folder with text and vision/cifar-10; by default that of PRIMAL_DATA."""

    def __post_init__(self) -> None:
        one_of(self, "models", _MODELS)
        at_least_one(self, "sizes", "steps", "num_train")


class TrainedStudy(Study[TrainedOptions]):
    """One cell a model."""

    name = "skyformer-trained"
    Options = TrainedOptions

    def cells(self, options: TrainedOptions) -> Sequence[Cell]:
        """Return the cells; a small model has a task, an attention and steps."""
        cells: list[Cell] = []
        budget = {"steps": options.steps, "num_train": options.num_train}
        for model in options.models:
            cell = {"model": model, "sizes": list(options.sizes)}
            small = [{"attention": a, **budget} for a in ("softmax", "gaussian")]
            cells += [cell | part for part in ([{}] if model == "minilm" else small)]
        return cells

    def run(self, cell: Cell, options: TrainedOptions, scratch: Path) -> Sequence[Row]:
        """Return the errors for each number of landmarks, mean over sequences, layers and heads."""
        if cell["model"] == "minilm":
            layers = _minilm_heads(options.data)
        else:
            layers = _small_heads(cell, options.data, scratch)
        rows = []
        for size in cell["sizes"]:
            found = [low_rank_errors(q, k, size) for q, k in layers]
            errors = {name: float(f"{mean(e[name] for e in found):.3g}") for name in _METHODS}
            rows.append({"landmarks": size, **errors})
        return rows

    def tables(self, rows: Sequence[Row], options: TrainedOptions) -> Mapping[str, str | bytes]:
        """Return one table, a picture of MiniLM and one of the small models."""
        caption = "Relative spectral errors, mean over sequences, layers and heads."
        shown = [{**row, "model": _title(row)} for row in rows]
        table = rows_table(shown, ["model", "landmarks", *_METHODS])
        files: Files = {"table.md": page(caption, table)}
        for name, is_mine in (("minilm", True), ("longrange", False)):
            panels = group_lines(
                (_title(row), method, row["landmarks"], row[method])
                for row in rows
                if (row["model"] == "minilm") == is_mine
                for method in _METHODS
            )
            if panels:
                files[f"{name}.png"] = plot_lines(
                    panels,
                    xlabel="landmarks or features",
                    ylabels=["relative spectral error"],
                    columns=min(2, len(panels)),
                    dashed=["best"],
                )
        return files


def _title(row: Row) -> str:
    if row["model"] == "minilm":
        return "MiniLM"
    return f"{row['model']}, trained with {row['attention']}"


def _heads(
    model: "nn.Module", maps: "Sequence[nn.Module]", num_heads: int, ids: "Tensor"
) -> "list[tuple[Tensor, Tensor]]":
    """Return the queries and keys of every layer, ``[b h n d]``."""
    import torch

    found: list[Tensor] = []

    def keep(_module: Any, _args: Any, output: "Tensor") -> None:
        found.append(output.unflatten(-1, (num_heads, -1)).transpose(1, 2))

    handles = [linear.register_forward_hook(keep) for linear in maps]
    with torch.no_grad():
        model.eval()(ids)
    for handle in handles:
        handle.remove()
    return list(zip(found[::2], found[1::2], strict=True))


def _minilm_heads(data: Path | None) -> "list[tuple[Tensor, Tensor]]":
    from primal_studies.kit.pretrained import minilm, wikitext

    model, tokenizer = minilm()
    ids = tokenizer(wikitext("test", data)[:20_000], return_tensors="pt").input_ids[:, :512]
    layers = [layer.attention.self for layer in model.encoder.layer]
    return _heads(model, [m for a in layers for m in (a.query, a.key)], 12, ids)


def _small_heads(cell: Cell, data: Path | None, scratch: Path) -> "list[tuple[Tensor, Tensor]]":
    """Train a model of Long Range Arena and show it its four longest test sequences."""
    import torch

    from primal_attention.attention import MultiHeadAttention
    from primal_attention.tasks.longrange import published_model
    from primal_studies.core.sequences import longrange_parts, train_classifier

    task = cell["model"]
    parts = longrange_parts(task, data, num_train=cell["num_train"])
    torch.manual_seed(0)
    longest = max(int(part.lengths.max()) for part in parts)
    model = published_model(task, cell["attention"], max_length=longest)
    train_classifier(
        model,
        parts.train,
        scratch,
        steps=cell["steps"],
        valid=parts.valid,
        epochs=max(1, cell["steps"] // 100),
        schedule="one-cycle",
        warmup=0.1,
        clip=1.0,
        monitor="accuracy",
    )
    test = parts.test
    chosen = sorted(range(len(test)), key=lambda i: -test.lengths[i])[:4]
    length = min(int(test.lengths[i]) for i in chosen)
    ids = torch.stack([test[i]["x"][:length] for i in chosen])
    layers = [m for m in model.modules() if isinstance(m, MultiHeadAttention)]
    return _heads(model, [m for a in layers for m in (a.q_proj, a.k_proj)], 2, ids)


def low_rank_errors(q: "Tensor", k: "Tensor", size: int) -> dict[str, float]:
    """Return the error of each form with that many landmarks or features, mean over heads.

    Args:
        q: Queries, ``[b h n d]``.
        k: Keys.
        size: Landmarks, half of the queries and half of the keys, or features.
    """
    import torch

    from primal_attention.functional.gaussian import gaussian_gram
    from primal_attention.functional.landmarks import (
        kmeans_landmarks,
        segment_means,
        strided_landmarks,
    )
    from primal_attention.functional.nystrom import nystrom_error
    from primal_attention.functional.nystromformer import nystromformer_attention

    d = q.shape[-1]
    a, b = q * d**-0.25, k * d**-0.25
    soft = (q @ k.mT * d**-0.5).softmax(-1)
    sigma_soft = torch.linalg.svdvals(soft)
    sigma_gauss = torch.linalg.svdvals(gaussian_gram(a, b))

    def landmarks(choose: "Callable[[Tensor, int], Tensor]") -> "Tensor":
        return torch.cat([choose(a, size // 2), choose(b, size // 2)], dim=2)

    def from_softmax(low: "Tensor") -> "Tensor":
        return torch.linalg.matrix_norm(soft - low, 2) / sigma_soft[..., 0]

    unit = torch.eye(k.shape[2]).expand(*k.shape[:3], -1)
    marks = segment_means(q, size), segment_means(k, size)
    strided = landmarks(strided_landmarks)
    kmeans = kmeans_landmarks(torch.cat([a, b], dim=2), strided)
    errors = (
        sigma_soft[..., size] / sigma_soft[..., 0],
        from_softmax(nystromformer_attention(q, k, unit, *marks)),
        from_softmax(_random_features(q, k, size)),
        sigma_gauss[..., size] / sigma_gauss[..., 0],
        nystrom_error(a, b, strided),
        nystrom_error(a, b, landmarks(segment_means)),
        nystrom_error(a, b, kmeans),
    )
    return {name: float(e.mean()) for name, e in zip(_METHODS, errors, strict=True)}


def _random_features(q: "Tensor", k: "Tensor", size: int) -> "Tensor":
    """Return softmax weights by positive random features."""
    import torch

    from primal_attention.kernels import PositiveFeatures

    d = q.shape[-1]
    phi = PositiveFeatures(d, size, scale=d**-0.5, generator=torch.Generator().manual_seed(0))
    # a factor of a row cancels in softmax; without it nothing overflows
    logs_q, logs_k = phi.log_features(q, up_to_rows=True), phi.log_features(k)
    left = (logs_q - logs_q.amax(-1, keepdim=True)).exp()
    product = left @ (logs_k - logs_k.amax((-2, -1), keepdim=True)).exp().mT
    return product / product.sum(-1, keepdim=True)
