"""Sphinx configuration: MyST pages, autodoc with Google docstrings, furo.

Pages need no network: formulas are MathML, which browsers draw without help. Tables of results are
the Markdown files that ``run_study`` writes to ``docs/results``.
"""

import json
import pkgutil
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from docutils.nodes import Node, SkipNode, section
from docutils.statemachine import StringList
from latex2mathml.converter import convert
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import nested_parse_with_titles

from primal_attention import __version__

project = "primal-attention"
author = "The primal-attention developers"
copyright = author
release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "results"]
html_theme = "furo"
html_title = f"primal-attention {release}"
html_math_renderer = "mathml"
html_static_path = ["static"]
html_css_files = ["wide.css"]

autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True
RESULTS = Path(__file__).parent / "results"
# scikit-learn adds these methods to estimators
_ADDED = ("fit", "predict", "predict_proba", "score")
autodoc_default_options = {"exclude-members": ", ".join(f"set_{m}_request" for m in _ADDED)}
napoleon_numpy_docstring = True
napoleon_preprocess_types = True


class Package(SphinxDirective):
    """The public names of every module of a package, or of one module.

    .. package:: primal_attention.kernels
    """

    required_arguments = 1

    def run(self) -> list[Node]:
        """Return the documentation of the modules."""
        name = self.arguments[0]
        folder = getattr(import_module(name), "__path__", None)
        names = [name]
        if folder is not None:
            names = [f"{name}.{m.name}" for m in pkgutil.iter_modules(folder) if not m.ispkg]
        lines = []
        for module in names:
            if not module.endswith("__main__") and hasattr(import_module(module), "__all__"):
                lines += [f".. automodule:: {module}", "   :members:", "   :show-inheritance:", ""]
        parent = section()
        parent.document = self.state.document
        nested_parse_with_titles(self.state, StringList(lines, name), parent)
        return parent.children


def _formula(display: str) -> Any:
    """Return a visitor that writes a formula as MathML."""

    def visit(writer: Any, node: Any) -> None:
        writer.body.append(convert(node.astext(), display=display))
        raise SkipNode

    return visit, None


def _provenance(app: Any, name: str, source: list[str]) -> None:
    """End every page that shows results with the commits and commands that measured them."""
    folders = dict.fromkeys(re.findall(r"\.\./results/([\w-]+)/", source[0]))
    rows = []
    for folder in folders:
        about = json.loads((RESULTS / folder / "about.json").read_text("utf-8"))
        commits = ", ".join(f"`{commit}`" for commit in about["code"]["commits"])
        # the oldest results do not know their machine
        known = about["machine"] or {}
        parts = [known.get("cpu"), known.get("torch") and f"torch {known['torch']}"]
        machine = ", ".join(filter(None, parts)) or "not recorded"
        rows.append(f"| {folder} | {commits} | `{about['command']}` | {machine} |")
    if rows:
        head = ["", "## Measured at", "", "| results | commit | command | machine |"]
        tail = ["", "`primal repro status` lists what has changed in the code since."]
        source[0] += "\n".join([*head, "|---|---|---|---|", *rows, *tail, ""])


def setup(app: Any) -> None:
    """Add the directive, the formulas and the origin of results."""
    app.connect("source-read", _provenance)
    app.add_directive("package", Package)
    app.add_html_math_renderer("mathml", _formula("inline"), _formula("block"))
