"""Sphinx configuration: MyST pages, autodoc with Google docstrings, furo.

Pages need no network: formulas are MathML, which browsers draw by themselves, and tables of results
are made from the CSV files that commands write.
"""

from pathlib import Path
from typing import Any

from docutils.nodes import SkipNode
from latex2mathml.converter import convert
from sphinx.directives.patches import CSVTable

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

autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = True
napoleon_preprocess_types = True


class Results(CSVTable):
    """A table from a CSV file; the comment in its first line becomes the caption.

    ```{results} ../results/uea.csv
    ```
    """

    required_arguments = 1

    def run(self) -> list[Any]:
        """Return the table."""
        self.options |= {"file": self.arguments.pop(), "header-rows": 1}
        path = Path(self.state.document.settings.env.relfn2path(self.options["file"])[1])
        first = path.read_text("utf-8").splitlines()[0]
        if first.startswith("#"):
            self.arguments.append(first.lstrip("# "))
        return super().run()

    def get_csv_data(self) -> tuple[list[str], str]:
        """Return the lines of the file without its comment, and where they come from."""
        lines, source = super().get_csv_data()
        return [line for line in lines if not line.startswith("#")], source


def _formula(display: str) -> Any:
    """Return a visitor that writes a formula as MathML."""

    def visit(writer: Any, node: Any) -> None:
        writer.body.append(convert(node.astext(), display=display))
        raise SkipNode

    return visit, None


def setup(app: Any) -> None:
    """Add the directive and the formulas."""
    app.add_directive("results", Results)
    app.add_html_math_renderer("mathml", _formula("inline"), _formula("block"))
