"""Pictures of searches: how far down the right results are, and galleries with thumbnails."""

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from primal_attention.report.cards import Card, add_cards
from primal_attention.support.command import needs
from primal_attention.tasks.pairs.images import ImageError, read_image
from primal_attention.tasks.pairs.scoring import CANDIDATES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from primal_attention.report import Report
    from primal_attention.support.files.images import Picture
    from primal_attention.tasks.pairs.pairs import PairData
    from primal_attention.training.scores import Answers

__all__ = ["plot_ranks", "show_hits_and_misses", "thumbnail"]

_SIDE = 96
"""Pixels of a side of a thumbnail."""
_EXAMPLES = 6
"""Hits and misses that are shown."""


def thumbnail(image: "Picture") -> bytes | None:
    """Return an image as a small PNG, ``None`` if it cannot be read.

    Args:
        image: A path, an image of Pillow, or an array.

    Example:
        >>> thumbnail(np.zeros((2, 2)))[1:4]
        b'PNG'
    """
    with needs("vision", "Pictures in a report"):
        from PIL import Image
    try:
        pixels = read_image(image, (_SIDE, _SIDE))
    except ImageError:
        return None
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def plot_ranks(ranks: Mapping[str, Mapping[str, NDArray[np.int64]]]) -> "Figure":
    """Return a picture of the share of searches that succeed within the first k results.

    Args:
        ranks: By model and direction: the place of the first right result, 0 beyond the
            candidates, -1 where nothing was searched for.

    Example:
        >>> plot_ranks({"softmax": {"image for a text": np.array([1, 2, 0])}}).axes[0].get_xlabel()
        'results that are looked at'
    """
    from matplotlib.figure import Figure as NewFigure

    figure = NewFigure(figsize=(6.4, 3.6), layout="constrained")
    axis = figure.subplots()
    places = np.arange(1, CANDIDATES + 1)
    styles = ("-", "--")
    for i, (name, directions) in enumerate(ranks.items()):
        for style, (words, values) in zip(styles, directions.items(), strict=False):
            known = values[values >= 0]
            share = [((known > 0) & (known <= k)).mean() if len(known) else 0 for k in places]
            axis.plot(places, share, style, color=f"C{i}", label=f"{name}, {words}")
    axis.set(xlabel="results that are looked at", ylabel="share of searches", ylim=(0, 1.02))
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, fontsize=8)
    return figure


def show_hits_and_misses(report: "Report", answers: "Answers", data: "PairData") -> None:
    """Add a gallery of searches that succeeded, and of some that failed.

    Args:
        report: The page.
        answers: Of ``measure_pairs``.
        data: The pairs.
    """
    ranks = answers["image_rank"].numpy()
    report.section("Hits and misses")
    report.text(
        "Best images of a text, from left to right. A green frame is right, an orange one wrong. "
        "Searches are chosen evenly over the test part, not by hand."
    )
    for words, chosen in (
        ("Hits: the first image is right", ranks == 1),
        ("Misses: the first image is wrong", (ranks == 0) | (ranks > 1)),
    ):
        rows = np.flatnonzero(chosen)
        share = len(rows) / max(int((ranks >= 0).sum()), 1)
        report.subsection(f"{words} ({100 * share:.0f} % of searches)")
        if not len(rows):
            report.text("None.")
        for row in rows[:: max(1, -(-len(rows) // _EXAMPLES))]:
            _show_search(report, int(row), answers, data)


def _show_search(report: "Report", row: int, answers: "Answers", data: "PairData") -> None:
    """Add a text with its best images; after a miss also with the right image."""
    text = int(data.text_of[row])
    found = [i for i in answers["images"][row].tolist() if i >= 0]
    right = data.is_relevant(np.array(text), np.array(found))
    cards = []
    for i, is_right in zip(found, right, strict=True):
        of = data.texts[int(data.text_of[int(np.flatnonzero(data.image_of == i)[0])])]
        cards.append(Card(thumbnail(data.sources[i]), of, "right" if is_right else "wrong"))
    if not right[:1].any():
        place = int(answers["image_rank"][row])
        words = f"right, at place {place}" if place else "right, not among the candidates"
        cards.append(Card(thumbnail(data.sources[int(data.image_of[row])]), words, "right"))
    add_cards(report, cards, heading=f"“{data.texts[text]}”")
