"""The page people look at: one self-contained HTML file with tables, pictures and words.

Pictures are embedded, nothing is loaded from elsewhere, no script runs: a report can be mailed and
still opens in ten years.
"""

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from primal_attention.output import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Report", "to_png"]

_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;
  color:#1f2937}
h1{font-size:1.7rem}h2{font-size:1.25rem;margin-top:2rem}
figure{margin:1rem 0}figcaption,.note{color:#4b5563;font-size:.92rem}img{max-width:100%}
.scroll{overflow-x:auto}table{border-collapse:collapse;margin:1rem 0}
th,td{padding:.35rem .9rem;border-bottom:1px solid #e5e7eb;text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left}th{border-bottom:2px solid #9ca3af}
pre{background:#f3f4f6;padding:1rem;overflow-x:auto;font-size:.88rem}
"""


class Report:
    """Collects the parts of a page in reading order and writes them as one file.

    Example:
        >>> report = Report("JapaneseVowels")
        >>> report = report.section("Result").table(["model", "accuracy"], [["primal", "98.6"]])
        >>> "<td>98.6</td>" in report.html()
        True
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self._parts: list[str] = []

    def section(self, heading: str) -> Self:
        """Start a section."""
        self._parts.append(f"<h2>{escape(heading)}</h2>")
        return self

    def text(self, words: str) -> Self:
        """Add a paragraph."""
        self._parts.append(f'<p class="note">{escape(words)}</p>')
        return self

    def table(self, header: Sequence[Any], rows: Sequence[Sequence[Any]]) -> Self:
        """Add a table; the first column is read as names, the others as numbers."""
        head = "".join(f"<th>{escape(str(cell))}</th>" for cell in header)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>"
            for row in rows
        )
        self._parts.append(
            f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>"
        )
        return self

    def figure(self, image: "bytes | Figure", caption: str) -> Self:
        """Add a picture, given as PNG or as a matplotlib figure; the caption also describes it to
        those who cannot see it."""
        data = base64.b64encode(image if isinstance(image, bytes) else to_png(image)).decode()
        self._parts.append(
            f'<figure><img alt="{escape(caption)}" src="data:image/png;base64,{data}">'
            f"<figcaption>{escape(caption)}</figcaption></figure>"
        )
        return self

    def config(self, settings: Mapping[str, Any] | str) -> Self:
        """Add the settings that made the result, as YAML."""
        if not isinstance(settings, str):
            import yaml

            settings = yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True)
        self._parts.append(f"<pre>{escape(settings)}</pre>")
        return self

    def html(self) -> str:
        """Return the page."""
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(self.title)}</title><style>{_STYLE}</style></head>\n"
            f"<body><h1>{escape(self.title)}</h1>\n" + "\n".join(self._parts) + "\n</body></html>\n"
        )

    def write(self, path: Path) -> None:
        """Write the page, under a temporary name first."""
        write_atomically(path, self.html())


def to_png(figure: "Figure") -> bytes:
    """Return a matplotlib figure as PNG and close it."""
    from matplotlib import pyplot as plt

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150, bbox_inches="tight")
    plt.close(figure)
    return buffer.getvalue()
