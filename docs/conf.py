"""Sphinx configuration: MyST pages, autodoc with Google docstrings, furo."""

from primal_attention import __version__

project = "primal-attention"
author = "The primal-attention developers"
copyright = author
release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "results"]
html_theme = "furo"
html_title = f"primal-attention {release}"

autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = True
napoleon_preprocess_types = True
