"""Reports: one self-contained HTML file with tables, pictures and text.

Pictures are embedded. A report loads nothing, so it can be mailed and archived. A
Content-Security-Policy holds browsers to this: they apply the styles and run the scripts that
:meth:`Report.assets` added, known by their hashes, and nothing else. So a label of a user that
reached a page unescaped by mistake could neither run nor load anything.
"""

import base64
import hashlib
import io
import re
import warnings
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Self

from primal_attention.support.output import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Report", "to_png"]

_STYLE = """
:root{--ink:#1c2330;--soft:#5b6472;--line:#e3e7ee;--wash:#f6f8fb;--accent:#c2410c}
*{box-sizing:border-box}
body{font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;color:var(--ink);
  background:#fff;max-width:66rem;margin:0 auto;padding:2.5rem 1.25rem 4rem}
header{border-bottom:3px solid var(--accent);padding-bottom:1rem;margin-bottom:1.5rem}
h1{font-size:1.9rem;line-height:1.2;letter-spacing:-.01em;margin:0}
.lead{color:var(--soft);font-size:1.05rem;margin:.5rem 0 0;max-width:52rem}
nav{margin:1rem 0 0;font-size:.92rem}nav a{color:var(--accent);text-decoration:none;
  margin-right:1.1rem;white-space:nowrap}nav a:hover{text-decoration:underline}
h2{font-size:1.3rem;letter-spacing:-.01em;margin:2.6rem 0 .6rem}
h3{font-size:1.05rem;margin:1.8rem 0 .4rem}
.tiles{display:grid;grid-template-columns:repeat(var(--columns),1fr);gap:.8rem;
  margin:1.2rem 0}
.tile{background:var(--wash);border:1px solid var(--line);border-radius:.6rem;padding:.8rem 1rem}
.tile b{display:block;font-size:1.55rem;line-height:1.25;font-variant-numeric:tabular-nums}
.tile span{color:var(--soft);font-size:.88rem}
.verdict{font-size:1.25rem;line-height:1.45;max-width:52rem;margin:1rem 0 1.4rem}
.caution{max-width:52rem;border-left:3px solid var(--accent);padding:.2rem 0 .2rem .9rem;
  font-size:.95rem}
.note{max-width:52rem}figure{margin:1.2rem 0}figcaption,.note{color:var(--soft);font-size:.92rem}
figcaption{max-width:52rem;margin-top:.3rem}img{max-width:100%;height:auto;display:block}
.scroll{overflow-x:auto;margin:1rem 0}table{border-collapse:collapse;min-width:24rem;
  font-variant-numeric:tabular-nums}
th,td{padding:.42rem .6rem;border-bottom:1px solid var(--line);text-align:right;
  vertical-align:top}
th:first-child,td:first-child,.words{text-align:left;padding-left:.3rem}
summary{cursor:pointer;color:var(--accent);margin:.8rem 0}
th{border-bottom:2px solid var(--ink);font-weight:600}tbody tr:hover{background:var(--wash)}
pre{background:var(--wash);border:1px solid var(--line);border-radius:.6rem;padding:1rem 1.2rem;
  overflow-x:auto;font:.86rem/1.5 ui-monospace,SFMono-Regular,Menlo,monospace}
@media (max-width:40rem){.tiles{grid-template-columns:1fr}}
@media print{nav{display:none}body{padding:0}h2{break-after:avoid}
  figure,.scroll{break-inside:avoid}}
"""


_LONG, _FOLDED = 30, 40
"""Letters of a table cell beyond which it is a sentence; rows beyond which a table is folded."""


class Report:
    """A page: parts are added in reading order and written to one file.

    Args:
        title: Heading of the page.
        lead: One or two sentences below the heading.

    Example:
        >>> report = Report("JapaneseVowels")
        >>> report = report.section("Result").table(["model", "accuracy"], [["primal", "98.6"]])
        >>> "<td>98.6</td>" in report.html()
        True
    """

    def __init__(self, title: str, lead: str = "") -> None:
        self.title = title
        self.lead = lead
        self._parts: list[str] = []
        self._headings: list[str] = []
        self._styles: list[str] = []
        self._scripts: list[str] = []

    def section(self, heading: str) -> Self:
        """Start a section. A page with several sections begins with links to them."""
        self._headings.append(heading)
        self._parts.append(f'<h2 id="s{len(self._headings)}">{escape(heading)}</h2>')
        return self

    def subsection(self, heading: str) -> Self:
        """Start a part of a section, which has no link at the top."""
        self._parts.append(f"<h3>{escape(heading)}</h3>")
        return self

    def tiles(self, numbers: Mapping[str, object], columns: int = 3) -> Self:
        """Add the main numbers as large tiles, each above its name."""
        tiles = "".join(
            f'<div class="tile"><b>{escape(str(value))}</b><span>{escape(name)}</span></div>'
            for name, value in numbers.items()
        )
        self._parts.append(f'<div class="tiles of-{columns}">{tiles}</div>')
        # a class, since the policy of the page forbids style attributes
        return self.assets(style=f".of-{columns}{{--columns:{columns}}}")

    def verdict(self, words: str) -> Self:
        """Add the main finding, in large letters."""
        self._parts.append(f'<p class="verdict">{escape(words)}</p>')
        return self

    def text(self, text: str) -> Self:
        """Add a paragraph."""
        self._parts.append(f'<p class="note">{escape(text)}</p>')
        return self

    def caution(self, words: str) -> Self:
        """Add what the numbers above do not show."""
        self._parts.append(
            f'<p class="caution"><b>What this does not show.</b> {escape(words)}</p>'
        )
        return self

    def table(self, header: Sequence[object], rows: Sequence[Sequence[object]]) -> Self:
        """Add a table; the first column holds names. A table of more than 40 rows is folded."""
        # sentences are read from the left, numbers compared at the right
        kinds = [
            ' class="words"' if any(len(str(cell)) > _LONG for cell in column) else ""
            for column in zip(*rows, strict=True)
        ] or [""] * len(header)
        head = "".join(
            f"<th{kind}>{escape(str(cell))}</th>" for kind, cell in zip(kinds, header, strict=True)
        )
        body = "".join(
            "<tr>"
            + "".join(
                f"<td{kind}>{escape(str(cell))}</td>" for kind, cell in zip(kinds, row, strict=True)
            )
            + "</tr>"
            for row in rows
        )
        table = (
            f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>"
        )
        if len(rows) > _FOLDED:
            table = f"<details><summary>{len(rows)} rows</summary>{table}</details>"
        self._parts.append(table)
        return self

    def figure(self, image: "bytes | Figure", caption: str) -> Self:
        """Add a picture, given as PNG or matplotlib figure; the caption is also the alt text."""
        data = base64.b64encode(image if isinstance(image, bytes) else to_png(image)).decode()
        self._parts.append(
            f'<figure><img alt="{escape(caption)}" src="data:image/png;base64,{data}">'
            f"<figcaption>{escape(caption)}</figcaption></figure>"
        )
        return self

    def config(self, settings: Mapping[str, object] | str) -> Self:
        """Add the settings of the run as YAML."""
        if not isinstance(settings, str):
            import yaml

            settings = yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True)
        self._parts.append(f"<pre>{escape(settings)}</pre>")
        return self

    def fragment(self, html: str) -> Self:
        """Add HTML as it is; the caller escapes what comes from data and keeps ids unique.

        Styles and scripts inside it have no effect; they go through :meth:`assets`.
        """
        self._parts.append(html)
        return self

    def assets(self, *, style: str = "", script: str = "") -> Self:
        """Add a style or a script that parts of the page need; equal ones are added once."""
        for text, every in ((style, self._styles), (script, self._scripts)):
            if text and text not in every:
                every.append(text)
        return self

    def include(self, heading: str, page: "Report") -> Self:
        """Add another page as one section; its own sections become headings of third level."""
        self.section(heading)
        if page.lead:
            self.text(page.lead)
        for part in page._parts:
            self._parts.append(re.sub(r'^<h2 id="s\d+">(.*)</h2>$', r"<h3>\1</h3>", part))
        for style in page._styles:
            self.assets(style=style)
        for script in page._scripts:
            self.assets(script=script)
        return self

    def html(self) -> str:
        """Return the page as HTML."""
        links = " ".join(
            f'<a href="#s{i}">{escape(name)}</a>' for i, name in enumerate(self._headings, 1)
        )
        nav = f"<nav>{links}</nav>" if len(self._headings) > 1 else ""
        lead = f'<p class="lead">{escape(self.lead)}</p>' if self.lead else ""
        styles = [_STYLE, *self._styles]
        head = "".join(f"<style>{style}</style>" for style in styles)
        head += "".join(f"<script>{script}</script>" for script in self._scripts)
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            f"{_policy(styles, self._scripts)}"
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(self.title)}</title>{head}</head>\n"
            f"<body><header><h1>{escape(self.title)}</h1>{lead}{nav}</header>\n"
            + "\n".join(self._parts)
            + "\n</body></html>\n"
        )

    def write(self, path: Path) -> None:
        """Write the page; an existing file is replaced only when the page is complete."""
        write_atomically(path, self.html())


def _policy(styles: Sequence[str], scripts: Sequence[str]) -> str:
    """Return the tag that forbids everything except these styles and scripts and own pictures."""

    def hashes(texts: Sequence[str]) -> str:
        digests = [hashlib.sha256(text.encode()).digest() for text in texts]
        return " ".join(f"'sha256-{base64.b64encode(d).decode()}'" for d in digests) or "'none'"

    rules = (
        f"default-src 'none'; img-src data:; style-src {hashes(styles)}; "
        f"script-src {hashes(scripts)}; base-uri 'none'; form-action 'none'"
    )
    return f'<meta http-equiv="Content-Security-Policy" content="{rules}">'


def to_png(figure: "Figure") -> bytes:
    """Return a matplotlib figure as PNG and close it."""
    from matplotlib import pyplot as plt

    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # a box stands for a character of a user that the font lacks
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from")
        figure.savefig(buffer, format="png", dpi=150, bbox_inches="tight")
    plt.close(figure)
    return buffer.getvalue()
