"""``primal rerank``: the results of a search in a better order, and a page about what changed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from primal_attention.support.command import UserError, did_you_mean, user_errors
from primal_attention.support.files import list_arrays, read_array, read_arrays, read_json
from primal_attention.support.output import write_atomically
from primal_attention.support.settings import parse

if TYPE_CHECKING:
    import numpy as np

    from primal_attention.tasks.lists.base import Reranked
    from primal_attention.tasks.lists.report import Change

__all__ = ["main"]

_ARRAYS = ("queries", "gallery", "ids", "query_groups", "gallery_groups")


@dataclass(frozen=True)
class RerankCommand:
    """Order the results of a search anew, from the vectors alone.

    The arrays come in one .npz file or in several .npy files. Without queries every item of the
    gallery is searched among the others; without ids the search is exact.
    """

    file: Annotated[Path | None, tyro.conf.Positional] = None
    """File .npz with gallery, and queries, ids, query_groups, gallery_groups if they are there."""
    queries: Path | None = None
    """Vectors of the queries (.npy) [queries, width]."""
    gallery: Path | None = None
    """Vectors of the gallery (.npy) [items, width]; read where they are needed."""
    ids: Path | None = None
    """Results of the search (.npy) [queries, results], best first; -1 is an empty slot."""
    method: str = "context"
    """context (the model of the package), diffusion, expansion, augmentation, refine, reciprocal,
    or the folder of a model of your own."""
    results: int = 200
    """Results of the search if there are no ids."""
    candidates: int | None = None
    """Results to order anew; by default all. The others stay behind them."""
    blend: float = 0.0
    """Share of the first search in the new order, from 0 to 1."""
    normalize: bool = False
    """Scale all vectors to norm one; otherwise other norms are refused."""
    groups: Path | None = None
    """Groups to score by: .npz with query_groups and gallery_groups, or .npy for both at once if
    the gallery is searched in itself."""
    gnd: Path | None = None
    """Ground truth of the revisited Oxford or Paris protocol (.json, .json.gz) to score by."""
    out: Path | None = None
    """File for ids and scores (.npz)."""
    report: Path | None = None
    """Page to write (.html): scores before and after, spectra, the lists that changed most."""
    images: str | None = None
    """Path of the picture of an item with {id}, such as pictures/{id}.png, for the page."""
    query_images: str | None = None
    """The same for queries; by default that of items if the gallery is searched in itself."""

    def __post_init__(self) -> None:
        if self.out is not None and self.out.suffix != ".npz":
            raise ValueError(f"--out must end in .npz, got {self.out}.")
        if self.report is not None and self.report.suffix != ".html":
            raise ValueError(f"--report must end in .html, got {self.report}.")
        if self.results < 1:
            raise ValueError(f"--results must be at least 1, got {self.results}.")
        for name in ("images", "query_images"):
            template = getattr(self, name)
            if template is not None and "{id}" not in template:
                raise ValueError(
                    f"--{name.replace('_', '-')} must hold {{id}} in the place of the number of an "
                    f"item, got {template}."
                )


def main(argv: list[str]) -> int:
    """Re-rank, print what changed, write what is asked for."""
    options = parse(RerankCommand, argv, prog="primal rerank")
    with user_errors(""):
        _run(options)
    return 0


def _run(options: RerankCommand) -> None:
    import numpy as np

    from primal_attention.tasks.lists.methods import make_reranker
    from primal_attention.tasks.lists.report import compare_lists

    arrays = _read(options)
    is_self = "queries" not in arrays
    gallery = arrays["gallery"]
    queries = gallery if is_self else arrays["queries"]
    ids = arrays.get("ids")
    if ids is None:
        ids = _search(queries, gallery, options.results, is_self, options.normalize)
    elif is_self:  # the item itself is no result
        ids = np.where(ids == np.arange(len(ids))[:, None], -1, ids)
    found = make_reranker(options.method).rerank(
        queries,
        gallery,
        ids,
        candidates=options.candidates,
        blend=options.blend,
        normalize=options.normalize,
    )
    change = compare_lists(ids, found.ids, _relevant(arrays, is_self))
    print(f"{len(ids)} lists of {ids.shape[1]} results, ordered anew by {options.method}.")
    print(change.words)
    if options.gnd is not None:
        _print_revisited(options.gnd, ids, found.ids, len(gallery))
    if options.out is not None:
        _write(options.out, found)
        print(f"Wrote {options.out}")
    if options.report is not None:
        _write_page(options, change, gallery, is_self)
        print(f"Wrote {options.report}")


def _read(options: RerankCommand) -> "dict[str, np.ndarray]":
    """Return the arrays by name; those of single files replace those of the one file."""
    arrays: "dict[str, np.ndarray]" = {}
    for path in filter(None, (options.file, options.groups)):
        is_one = path.suffix == ".npz"
        arrays |= _load(path) if is_one else {"gallery_groups": read_array(path)}
    for name in ("queries", "gallery", "ids"):
        path = getattr(options, name)
        if path is not None:
            arrays[name] = read_array(path, mmap=True)
    if "gallery" not in arrays:
        raise UserError(
            "which vectors? Give a file .npz with an array gallery, or --gallery with a file .npy."
        )
    for name, array in arrays.items():
        _check(name, array)
    widths = [arrays[name].shape[1] for name in ("queries", "gallery") if name in arrays]
    if len(set(widths)) > 1:
        raise UserError(
            f"queries have the width {widths[0]} and the gallery {widths[1]}; both must come from "
            "the same model."
        )
    return arrays


def _load(path: Path) -> "dict[str, np.ndarray]":
    unknown = [name for name in list_arrays(path) if name not in _ARRAYS]
    if unknown:
        raise UserError(
            f"{path} holds an array {unknown[0][:80]!r}.{did_you_mean(unknown[0], _ARRAYS)} "
            f"Arrays: {', '.join(_ARRAYS)}."
        )
    return read_arrays(path)


_ALLOWED = {
    "queries": ("real numbers", "biuf", "[queries, width]", "there are no queries"),
    "gallery": ("real numbers", "biuf", "[items, width]", "the gallery has no items"),
    "ids": ("integers", "iu", "[queries, results]", "ids holds no results"),
    "query_groups": ("whole numbers or words", "iuU", "[queries]", "there are no queries"),
    "gallery_groups": ("whole numbers or words", "iuU", "[items]", "the gallery has no items"),
}
"""What every array holds, the kinds of numpy types, its shape, and what it means to be empty."""


def _check(name: str, array: "np.ndarray") -> None:
    import numpy as np

    words, kinds, shape, empty = _ALLOWED[name]
    if array.ndim != shape.count(",") + 1:
        raise UserError(f"{name} must have the shape {shape}, got {array.shape}.")
    if array.dtype.kind not in kinds:
        hint = "; give the second array of index.search, not the scores" if name == "ids" else ""
        raise UserError(f"{name} must hold {words}, got {array.dtype}{hint}.")
    if not array.size:
        raise UserError(f"{empty}: {name} has the shape {array.shape}.")
    if name == "ids":
        ordered = np.sort(array, axis=1)
        twice = np.argwhere((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0))
        if len(twice):
            row, place = twice[0]
            raise UserError(
                f"ids holds the item {ordered[row, place]} twice in list {row}, counted from 0; a "
                "search finds an item once."
            )


def _search(
    queries: object, gallery: object, results: int, is_self: bool, normalize: bool
) -> "np.ndarray":
    """Return the exact search by cosine; an item does not find itself."""
    import numpy as np

    from primal_attention.tasks.lists.gallery import as_vectors

    xq, xb = (as_vectors(x, n, normalize) for x, n in ((queries, "queries"), (gallery, "gallery")))
    found = []
    for start in range(0, len(xq), 256):
        cosines = xq[start : start + 256] @ xb.T
        if is_self:
            rows = np.arange(len(cosines))
            cosines[rows, start + rows] = -np.inf
        count = min(results, len(xb) - is_self)
        order = cosines.sort(dim=1, descending=True, stable=True).indices[:, :count]
        found.append(order.numpy())
    return np.concatenate(found) if found else np.zeros((0, 0), dtype=np.int64)


def _relevant(arrays: "dict[str, np.ndarray]", is_self: bool) -> "Sequence[np.ndarray] | None":
    """Return the relevant items of each query, if groups are known."""
    import numpy as np

    if "gallery_groups" not in arrays:
        return None
    theirs = np.asarray(arrays["gallery_groups"])
    mine = theirs if is_self else arrays.get("query_groups")
    if mine is None:
        raise UserError("the groups of the queries are missing; give query_groups in the .npz.")
    items, queries = len(arrays["gallery"]), len(arrays.get("queries", theirs))
    if theirs.shape != (items,) or np.shape(mine) != (queries,):
        raise UserError(
            f"groups must hold one value for each of {queries} queries and {items} items, got the "
            f"shapes {np.shape(mine)} and {theirs.shape}."
        )
    found = [np.flatnonzero(theirs == group) for group in np.asarray(mine)]
    return [row[row != i] for i, row in enumerate(found)] if is_self else found


def _print_revisited(path: Path, before: "np.ndarray", after: "np.ndarray", items: int) -> None:
    from primal_attention.tasks.lists import evaluate_revisited

    content = read_json(path, object)
    truth = content.get("gnd") if isinstance(content, dict) else content
    if not isinstance(truth, list):
        raise UserError(
            f"{path} holds no ground truth; it must be a list with one object for each query, or "
            "an object with such a list under 'gnd'."
        )
    with user_errors(str(path), ValueError):
        old, new = (evaluate_revisited(ids, truth) for ids in (before, after))
    largest = max((i for one in truth for k in ("easy", "hard", "junk") for i in one[k]), default=0)
    if largest >= items:
        raise UserError(
            f"{path} names the item {largest}, but the gallery has {items} items; give the gallery "
            "that the ground truth belongs to."
        )
    for setting, scores in new.items():
        print(f"{setting}: mAP {old[setting].map:.2f} before, {scores.map:.2f} after")


def _write(path: Path, found: "Reranked") -> None:
    import io

    import numpy as np

    content = io.BytesIO()
    np.savez_compressed(content, ids=found.ids, scores=found.scores)
    write_atomically(path, content.getvalue())


def _write_page(options: RerankCommand, change: "Change", gallery: object, is_self: bool) -> None:
    from primal_attention.tasks.lists.report import report_page

    if options.report is None:
        return
    source = options.file or options.gallery
    page = report_page(
        change,
        gallery,
        title=f"Re-ranking of {source.name if source else 'a search'}",
        method=options.method,
        images=options.images,
        query_images=options.query_images or (options.images if is_self else None),
    )
    page.write(options.report)
