"""``primal bench rerank-pretrained``: the re-ranker of the package on data that it never saw."""

import gzip
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primal_attention.datasets.public import data_folder
from primal_attention.support.command import needs
from primal_attention.support.files import read_arrays
from primal_attention.support.files.images import open_image
from primal_attention.support.output import page
from primal_attention.support.settings import at_least_one
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.kit.tables import GREY, Column, Picture, columns_table
from primal_studies.kit.texts import imdb_reviews

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from primal_attention.tasks.lists.parts import VectorSet

__all__ = ["RerankPretrainedOptions", "RerankPretrainedStudy", "review_sentences"]

_ITEMS, _RESULTS = 1200, 200
_OURS, _RIVAL, _FIRST = "model of the package", "list diffusion", "first search"


@dataclass(frozen=True)
class RerankPretrainedOptions:
    """Mean average precision of the re-ranker in the package on held-out and on other sets."""

    sets: tuple[str, ...] = (
        "coil20",
        "palm",
        "emoji",
        "curves",
        "mnist",
        "digits",
        "cifar10",
        "imdb",
    )
    """Sets to test."""
    queries: int = 500
    """Queries of a set."""
    data: Path | None = None
    """Folder of the data; by default that of PRIMAL_DATA."""

    def __post_init__(self) -> None:
        at_least_one(self, "queries")
        unknown = [name for name in self.sets if name not in _SETS]
        if unknown:
            raise ValueError(f"there is no set {unknown[0]!r}; sets: {', '.join(_SETS)}.")


class RerankPretrainedStudy(Study[RerankPretrainedOptions]):
    """One cell a set."""

    name = "rerank-pretrained"
    Options = RerankPretrainedOptions

    def cells(self, options: RerankPretrainedOptions) -> Sequence[Cell]:
        """Return the cells: groups of known sets first, then unknown sets."""
        return [{"set": name, "queries": options.queries} for name in options.sets]

    def run(self, cell: Cell, options: RerankPretrainedOptions, scratch: Path) -> Sequence[Row]:
        """Return the scores of all methods on a set."""
        import numpy as np

        from primal_attention.datasets.lists import search_all
        from primal_attention.tasks.lists import (
            AlphaQE,
            DiffusionReranker,
            Reranker,
            recall_at,
        )
        from primal_attention.tasks.lists.report import precisions

        found = _SETS[cell["set"]][1](options.data)
        search = search_all(*found, results=len(found.x))
        rows = np.unique(np.linspace(0, len(found.x) - 1, cell["queries"]).astype(int))
        relevant = [search.relevant[i] for i in rows]
        methods: dict[str, Any] = {
            _FIRST: None,
            "query expansion": AlphaQE(),
            _RIVAL: DiffusionReranker(),
            _OURS: Reranker.pretrained(),
        }
        scores = {}
        for name, method in methods.items():
            ids = search.ids[rows]
            if method is not None:
                ids = method.rerank(search.xq[rows], search.xb, ids, candidates=_RESULTS).ids
            scores[name] = 100 * precisions(ids, relevant)
        return [
            {
                "method": name,
                "map": round(float(values.mean()), 2),
                "gap": round(float((values - scores[_RIVAL]).mean()), 2),
                "gap_error": round(_error(values - scores[_RIVAL]), 2),
                "gain": round(float((values - scores[_FIRST]).mean()), 2),
                "gain_error": round(_error(values - scores[_FIRST]), 2),
                "items": len(found.x),
                "width": found.x.shape[1],
                "groups": len(np.unique(found.groups)),
                "ceiling": round(100 * recall_at(search.ids[rows], relevant, _RESULTS), 1),
            }
            for name, values in scores.items()
        ]

    def describe(self, row: Row) -> str:
        """Return a row in one line."""
        return f"{row['set']}, {row['method']}: {row['map']}"

    def tables(
        self, rows: Sequence[Row], options: RerankPretrainedOptions
    ) -> Mapping[str, str | bytes]:
        """Return the table, a verdict in words, and a picture."""
        found = {(row["set"], row["method"]): row for row in rows}
        sets = list(dict.fromkeys(row["set"] for row in rows))
        methods = list(dict.fromkeys(row["method"] for row in rows))
        ours = [found[name, _OURS] for name in sets]
        columns: dict[str, Column] = {"set": lambda row: _SETS[row["set"]][0]}
        columns |= {method: _precision(found, method) for method in methods}
        columns["model − diffusion"] = lambda r: f"{r['gap']:+.1f} ± {2 * r['gap_error']:.1f}"
        columns[f"in the first {_RESULTS}"] = "{ceiling:.0f}"
        caption = (
            f"Mean average precision in percent over the whole gallery, {rows[0]['queries']} "
            f"queries a set; the first {_RESULTS} results are ordered anew. The difference is that "
            "of equal queries, with two standard errors over queries. The last column is the share "
            "of relevant items that a re-ranker can move. The first four rows are groups or curves "
            "that the model did not see of sets that it learned from; the others are sets that it "
            "never saw."
        )
        return {
            "table.md": page(caption, columns_table(ours, columns)),
            "verdict.md": _verdict(ours),
            "picture.png": _picture(found, sets, methods),
        }


def _error(values: "NDArray[np.float64]") -> float:
    return float(values.std() / len(values) ** 0.5)


def _precision(found: Mapping[tuple[str, str], Row], method: str) -> Column:
    return lambda row: f"{found[row['set'], method]['map']:.1f}"


def _verdict(ours: Sequence[Row]) -> str:
    """Return against which sets the model wins, ties or loses."""

    def names(key: str, kind: int) -> str:
        signs = [(r[key] > 2 * r[f"{key}_error"]) - (r[key] < -2 * r[f"{key}_error"]) for r in ours]
        return (
            ", ".join(r["set"] for r, sign in zip(ours, signs, strict=True) if sign == kind)
            or "none"
        )

    return (
        f"Beside list diffusion the model of the package is ahead on {names('gap', 1)}; level on "
        f"{names('gap', 0)}; behind on {names('gap', -1)}. Beside the first search it is ahead on "
        f"{names('gain', 1)}; level on {names('gain', 0)}; behind on {names('gain', -1)}. Level "
        "means a difference below two standard errors over queries.\n"
    )


def _picture(
    found: Mapping[tuple[str, str], Row], sets: Sequence[str], methods: Sequence[str]
) -> bytes:
    """Return the gain of each method over the first search, by set."""
    picture = Picture(size=(8.5, 0.5 * len(sets) + 1.6), is_spaced=False)
    (axis,) = picture.axes
    colors = {"query expansion": GREY, _RIVAL: picture.colors[0], _OURS: picture.colors[1]}
    for shift, method in enumerate(m for m in methods if m != _FIRST):
        rows = [found[name, method] for name in sets]
        axis.errorbar(
            [row["gain"] for row in rows],
            [i + 0.2 * (shift - 1) for i in range(len(sets))],
            xerr=[2 * row["gain_error"] for row in rows],
            fmt="o",
            ms=5,
            color=colors[method],
            label=method,
        )
    axis.axvline(0, color="#1c2330", lw=0.8)
    picture.name_lines([_SETS[name][0] for name in sets])
    axis.set_xlabel("points of mAP gained over the first search, two standard errors")
    axis.legend(frameon=False, loc="best")
    return picture.png(grid=0.25, along="x", is_open=False)


def _held_out(name: str) -> "Callable[[Path | None], VectorSet]":
    def load(data: Path | None) -> "VectorSet":
        from primal_attention.tasks.lists.parts import picture_search_part

        return picture_search_part(name, 0, data)

    return load


def _curves(data: Path | None) -> "VectorSet":
    from primal_attention.datasets.lists import make_curves
    from primal_attention.tasks.lists.parts import VectorSet

    return VectorSet(*make_curves(30, 40, 40, 0.12, seed=7000))


def _described(images: Any, labels: Any) -> "VectorSet":
    """Return descriptors of one half of a sample, fitted on the other half."""
    import numpy as np

    from primal_attention.datasets.lists import describe
    from primal_attention.tasks.lists.parts import VectorSet

    order = np.random.default_rng(0).permutation(len(images))[: 2 * _ITEMS]
    images, labels = np.asarray(images)[order], np.asarray(labels)[order]
    fitted = np.arange(len(order)) < len(order) // 2
    x = describe(images.astype(np.float32), fitted)
    return VectorSet(x[~fitted], labels[~fitted].astype(np.int64))


def _mnist(data: Path | None) -> "VectorSet":
    import numpy as np

    folder = data_folder(data) / "vision" / "mnist"
    pixels, labels = (
        gzip.decompress((folder / f"t10k-{kind}-ubyte.gz").read_bytes())
        for kind in ("images-idx3", "labels-idx1")
    )
    images = np.frombuffer(pixels, np.uint8, offset=16).reshape(-1, 28, 28)
    return _described(images, np.frombuffer(labels, np.uint8, offset=8))


def _digits(data: Path | None) -> "VectorSet":
    with needs("sklearn", "The digits"):
        from sklearn.datasets import load_digits
    found = load_digits()
    return _described(found.images, found.target)


def _cifar10(data: Path | None) -> "VectorSet":
    import numpy as np

    path = data_folder(data) / "vision" / "cifar-10" / "test_jpeg.npz"
    found = read_arrays(path)
    bytes_, ends, labels = found["data"], found["offsets"], found["labels"]
    # sorted by class: a random sample has all of them
    chosen = np.random.default_rng(0).permutation(len(labels))[: 2 * _ITEMS]
    images = []
    for i in chosen:
        content = io.BytesIO(bytes_[ends[i] : ends[i + 1]].tobytes())
        with open_image(content, f"{path}, picture {i}") as picture:
            images.append(np.asarray(picture))
    return _described(np.stack(images), labels[chosen])


def review_sentences(
    reviews: int, sentences: int, data: Path | None = None
) -> tuple[list[str], list[int]]:
    """Return sentences of the first long reviews of IMDb's test part, and the review of each.

    Args:
        reviews: Number of reviews.
        sentences: Sentences of a review, of 6 to 40 words; reviews with fewer are skipped.
        data: Folder of the data; by default that of ``PRIMAL_DATA``.
    """
    texts: list[str] = []
    groups: list[int] = []
    for review in imdb_reviews("test", data):
        parts = re.split(r"(?<=[.!?])\s+", re.sub(r"<br ?/?>", " ", review.text))
        found = [s for s in parts if 6 <= len(s.split()) <= 40]
        if len(found) >= sentences:
            texts += found[:sentences]
            groups += [len(texts) // sentences] * sentences
        if len(texts) >= reviews * sentences:
            break
    return texts, groups


def _imdb(data: Path | None) -> "VectorSet":
    import numpy as np

    from primal_attention.tasks.lists.parts import VectorSet
    from primal_studies.kit.pretrained import embed, minilm

    texts, groups = review_sentences(_ITEMS // 6, 6, data)
    model, tokenizer = minilm()
    options = {"padding": True, "truncation": True, "max_length": 64, "return_tensors": "pt"}
    batches = [dict(tokenizer(texts[i : i + 32], **options)) for i in range(0, len(texts), 32)]
    return VectorSet(embed(model, batches).numpy(), np.asarray(groups))


_SETS: "dict[str, tuple[str, Callable[[Path | None], VectorSet]]]" = {
    "coil20": ("COIL-20, other objects", _held_out("coil20")),
    "palm": ("Palm, other palms", _held_out("palm")),
    "emoji": ("emoji, other concepts", _held_out("emoji")),
    "curves": ("other curves", _curves),
    "mnist": ("MNIST by digit", _mnist),
    "digits": ("digits of scikit-learn", _digits),
    "cifar10": ("CIFAR-10 by class", _cifar10),
    "imdb": ("sentences of IMDb by review", _imdb),
}
"""What a set is, and how to make it."""
