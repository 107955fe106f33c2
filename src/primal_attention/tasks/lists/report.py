"""What a re-ranking changed: numbers, and a page with the lists that changed most."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from primal_attention.support.command import UserError
from primal_attention.support.files.images import ImageError, read_image
from primal_attention.tasks.lists.gallery import Gallery
from primal_attention.tasks.lists.metrics import average_precision
from primal_attention.tasks.lists.showing import plot_gains, plot_list_spectrum

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from primal_attention.report import Report

__all__ = ["Change", "compare_lists", "list_spectrum", "precisions", "report_page"]

_TOP = 10
_LISTS = 10
"""Lists that are shown."""
_SPECTRA = 100
"""Lists whose spectra are computed, at most, and results of each."""
_RESULTS = 200


class Change(NamedTuple):
    """Lists before and after a re-ranking."""

    before: NDArray[np.int64]
    after: NDArray[np.int64]
    moved: NDArray[np.float64]
    """How much the first ten results of each list changed, from 0 to 1."""
    precision_before: NDArray[np.float64] | None = None
    """Average precision of each list if the relevant items are known; NaN without any."""
    precision_after: NDArray[np.float64] | None = None

    @property
    def words(self) -> str:
        """The change in a sentence."""
        if self.precision_before is None or self.precision_after is None:
            return (
                f"{int((self.moved > 0).sum())} of {len(self.moved)} lists changed among their "
                f"first {_TOP} results."
            )
        known = ~np.isnan(self.precision_before)
        before, after = self.precision_before[known], self.precision_after[known]
        if not len(before):
            return "No query has a relevant item, so nothing can be scored."
        gain = after - before
        error = gain.std() / len(gain) ** 0.5
        better, worse = int((gain > 1e-9).sum()), int((gain < -1e-9).sum())
        return (
            f"mAP {100 * before.mean():.1f} before, {100 * after.mean():.1f} after "
            f"({100 * gain.mean():+.1f} ± {100 * error:.1f}); {better} lists became better, "
            f"{worse} worse, {len(gain) - better - worse} stayed as good."
        )


def compare_lists(
    before: NDArray[np.int64],
    after: NDArray[np.int64],
    relevant: Sequence[ArrayLike] | None = None,
) -> Change:
    """Return how much lists changed, and their average precision.

    The change of a list is one minus the overlap of its first 1, 2, … 10 results, in the mean.

    Args:
        before: Lists of the first search [queries, results].
        after: The same ids in another order.
        relevant: The relevant ids of each query.

    Example:
        >>> change = compare_lists(np.array([[3, 1, 2]]), np.array([[1, 3, 2]]), [[1]])
        >>> print(change.words.partition(";")[0])
        mAP 50.0 before, 100.0 after (+50.0 ± 0.0)
    """
    depth = min(_TOP, before.shape[1])
    overlap = [
        [len(np.intersect1d(old[:d], new[:d])) / d for d in range(1, depth + 1)]
        for old, new in zip(before, after, strict=True)
    ]
    moved = 1 - np.asarray(overlap).reshape(len(before), -1).mean(1) if depth else np.zeros(0)
    if relevant is None:
        return Change(before, after, moved)
    return Change(before, after, moved, *(precisions(ids, relevant) for ids in (before, after)))


def precisions(ids: NDArray[np.int64], relevant: Sequence[ArrayLike]) -> NDArray[np.float64]:
    """Return the average precision of each list; NaN for a query without relevant items.

    Example:
        >>> precisions(np.array([[5, 1, 2]]), [[1]])
        array([0.5])
    """
    rows = zip(ids, relevant, strict=True)
    found = [
        average_precision(np.flatnonzero(np.isin(row[row >= 0], good)), len(np.unique(good)))
        for row, good in rows
    ]
    return np.asarray(found)


def list_spectrum(x: NDArray[np.float32]) -> tuple[NDArray[np.float64], float]:
    """Return the spectrum of the cosines of a list, of sum one, and the number of directions.

    The number is the exponential of the entropy: 1 if all results are alike, ``n`` if no two are.

    Example:
        >>> values, count = list_spectrum(np.eye(3, dtype="float32")[[0, 0, 1, 1]])
        >>> round(count, 3)
        2.0
    """
    values = np.linalg.svd(x.astype(np.float64), compute_uv=False) ** 2
    values = values / max(values.sum(), 1e-300)
    used = values[values > 1e-12]
    return used, float(np.exp(-(used * np.log(used)).sum()))


def report_page(
    change: Change,
    xb: object,
    *,
    title: str,
    method: str,
    images: str | None = None,
    query_images: str | None = None,
) -> "Report":
    """Return a page about a re-ranking.

    Args:
        change: From :func:`compare_lists`.
        xb: Vectors of the gallery.
        title: Heading.
        method: Name of the method.
        images: Path of the picture of an item, with ``{id}``, such as ``"pictures/{id}.png"``.
        query_images: The same for queries.
    """
    from primal_attention.report import Report

    report = Report(title, f"{len(change.before)} lists, ordered anew by {method}.")
    report.verdict(change.words)
    if change.precision_before is not None and change.precision_after is not None:
        known = ~np.isnan(change.precision_before)
        if known.any():
            pair = (change.precision_before[known], change.precision_after[known])
            report.tiles(
                {
                    "mAP before": f"{100 * pair[0].mean():.1f}",
                    "mAP after": f"{100 * pair[1].mean():.1f}",
                    "lists that became better": f"{100 * (pair[1] > pair[0]).mean():.0f} %",
                }
            )
            report.section("Every list").figure(
                plot_gains({method: pair}),
                "Average precision of each list before and after; above the line it became better.",
            )
    _show_spectra(report, change, xb)
    _show_lists(report, change, images, query_images)
    return report


def _show_spectra(report: "Report", change: Change, xb: object) -> None:
    """Add the spectra of the cosines of some lists."""
    gallery = Gallery(xb, normalize=True)
    step = max(1, -(-len(change.before) // _SPECTRA))
    found = []
    for row in change.before[::step, :_RESULTS]:
        if (row >= 0).sum() > 1:
            found.append(list_spectrum(gallery.take(row[row >= 0]).numpy()))
    if not found:
        return
    spectra, counts = zip(*found, strict=True)
    report.section("How many kinds of results a list holds").figure(
        plot_list_spectrum(spectra, counts),
        f"Left: spectrum of the cosines among the first {_RESULTS} results, median and 80 % of "
        "the lists. Right: effective number of directions, the exponential of the entropy. A list "
        "of one kind has one direction.",
    )


def _show_lists(
    report: "Report", change: Change, images: str | None, query_images: str | None
) -> None:
    """Add the lists that changed most."""
    chosen = np.argsort(-change.moved, kind="stable")[:_LISTS]
    if not len(chosen):
        return
    report.section("The lists that changed most")
    report.table(
        ["query", "change", "first results before", "after"],
        [
            [
                int(i),
                f"{change.moved[i]:.2f}",
                " ".join(str(j) for j in change.before[i, :_TOP]),
                " ".join(str(j) for j in change.after[i, :_TOP]),
            ]
            for i in chosen
        ],
    )
    for i in chosen if images else ():
        report.figure(
            _sheet(change, int(i), str(images), query_images),
            f"Query {i}: the first {_TOP} results before (above) and after (below).",
        )


def _sheet(change: Change, i: int, images: str, query_images: str | None) -> "Figure":
    """Return the pictures of the first results of a list, before and after."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 2.3), layout="constrained")
    axes = figure.subplots(2, _TOP + 1)
    for axis in axes.flat:
        axis.axis("off")
    if query_images is not None:
        axes[0, 0].imshow(_picture(query_images, i), cmap="gray")
        axes[0, 0].set_title("query", fontsize=8)
    for line, ids in zip(axes, (change.before[i], change.after[i]), strict=True):
        for axis, item in zip(line[1:], ids[:_TOP], strict=False):
            if item >= 0:
                axis.imshow(_picture(images, int(item)), cmap="gray")
                axis.set_title(str(item), fontsize=7)
    return figure


def _picture(template: str, item: int) -> NDArray[np.uint8]:
    try:
        return read_image(Path(template.replace("{id}", str(item))), (96, 96))
    except ImageError as error:
        raise UserError(
            f"{error} --images is a path with {{id}} in the place of the number of an item."
        ) from error
