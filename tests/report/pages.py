"""A reader of pages that knows every tag and attribute they may have."""

import base64
import hashlib
import re
from html.parser import HTMLParser

PAYLOADS = (
    "<img src=x onerror=alert(1)>",
    '"><script>alert(1)</script>',
    "' onfocus='alert(1)",
    "</style><svg onload=alert(1)>",
)
"""Names that run code in a page that does not escape them."""
_TAGS = frozenset(
    """html head meta title style script body header nav a h1 h2 h3 p div span b figure figcaption
    img table thead tbody tr th td details summary pre label input output button
    svg g circle line polygon text""".split()  # noqa: SIM905
)
_ATTRIBUTES = frozenset(
    """lang charset name http-equiv content href id class src alt type min max value role hidden
    aria-selected aria-label data-near data-d viewbox fill stroke stroke-width stroke-dasharray
    x y x1 x2 y1 y2 cx cy r points transform text-anchor dominant-baseline""".split()  # noqa: SIM905
)


class PageReader(HTMLParser):
    """Reads a page as a browser does, and raises at anything that could run or load something.

    Attributes:
        words: All text and all values of attributes, decoded.
        scripts: The scripts of the page.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.scripts: list[str] = []
        self._styles: list[str] = []
        self._policy: dict[str, list[str]] = {}
        self._open = ""
        self.feed(page)
        self.close()
        self._check_policy()

    def handle_starttag(self, tag, attrs):
        assert tag in _TAGS, f"unexpected tag {tag}"
        if tag in ("style", "script", "body"):
            assert self._policy, f"{tag} stands before the policy"
        found = dict(attrs)
        assert len(found) == len(attrs), f"attributes of {tag} stand twice"
        for name, value in attrs:
            assert name in _ATTRIBUTES, f"unexpected attribute {name} of {tag}"
            self.words.append(value or "")
        if "src" in found:
            assert re.fullmatch("data:image/png;base64,[A-Za-z0-9+/=]+", found["src"])
        if "href" in found:
            assert re.fullmatch(r"#s\d+", found["href"])
        if tag == "meta" and "http-equiv" in found:
            assert found["http-equiv"] == "Content-Security-Policy"
            rules = [rule.split() for rule in found["content"].split(";")]
            self._policy = {name: values for name, *values in rules}
        self._open = tag

    def handle_endtag(self, tag):
        self._open = ""

    def handle_data(self, data):
        self.words.append(data)
        if self._open == "style":
            self._styles.append(data)
        elif self._open == "script":
            self.scripts.append(data)

    def _check_policy(self) -> None:
        none = ["'none'"]
        assert self._policy == {
            "default-src": none,
            "img-src": ["data:"],
            "style-src": [_hash(text) for text in self._styles],
            "script-src": [_hash(text) for text in self.scripts] or none,
            "base-uri": none,
            "form-action": none,
        }


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def check_page(page: str, *shown: str) -> PageReader:
    """Raise unless a page is harmless and shows these words, decoded; return its reader."""
    reader = PageReader(page)
    words = "\n".join(reader.words)
    for text in shown:
        assert text in words, f"the page does not show {text}"
    return reader
