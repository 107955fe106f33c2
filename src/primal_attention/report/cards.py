"""Cards: small pictures side by side, each with words below it and perhaps a coloured frame."""

import base64
from collections.abc import Sequence
from html import escape
from typing import Literal, NamedTuple

from primal_attention.report.page import Report

__all__ = ["Card", "add_cards"]

_STYLE = """
.gallery{display:flex;flex-wrap:wrap;gap:.6rem;margin:.4rem 0 1.2rem}
.card{width:6.6rem;font-size:.78rem;line-height:1.25;margin:0}
.card img{width:6rem;height:6rem;object-fit:contain;border:3px solid var(--line);
  border-radius:.4rem;background:#fff}.card.right img{border-color:#15803d}
.card.wrong img{border-color:var(--accent)}.card figcaption{overflow-wrap:anywhere}
.ask{margin:.9rem 0 .1rem}
"""


class Card(NamedTuple):
    """One picture of a gallery."""

    image: bytes | None
    """The picture as PNG; ``None`` if it cannot be read."""
    words: str
    """What stands below it."""
    kind: Literal["right", "wrong", ""] = ""
    """Colour of the frame: green for right, orange for wrong."""


def add_cards(page: Report, cards: Sequence[Card], *, heading: str = "") -> None:
    """Add pictures side by side to a page.

    Args:
        page: The page.
        cards: The pictures.
        heading: A line above them.

    Example:
        >>> page = Report("Search")
        >>> add_cards(page, [Card(None, "a <b>")])
        >>> "(cannot be read)<figcaption>a &lt;b&gt;</figcaption>" in page.html()
        True
    """
    parts = []
    for card in cards:
        words = escape(card.words)
        picture = "(cannot be read)"
        if card.image is not None:
            data = base64.b64encode(card.image).decode()
            picture = f'<img alt="{words}" src="data:image/png;base64,{data}">'
        parts.append(
            f'<figure class="card {escape(card.kind)}">{picture}'
            f"<figcaption>{words}</figcaption></figure>"
        )
    above = f'<p class="ask">{escape(heading)}</p>' if heading else ""
    page.assets(style=_STYLE).fragment(f'{above}<div class="gallery">{"".join(parts)}</div>')
