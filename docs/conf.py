"""Sphinx configuration; the build needs no network."""

import sys
from pathlib import Path

from wellposed import __version__

sys.path.insert(0, str(Path(__file__).parent))

project = "wellposed"
author = "The wellposed authors"
copyright = "2026, The wellposed authors"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "mathml",
    "generated",
    "docstrings",
]
html_math_renderer = "mathml"
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"wellposed {__version__}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]

myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_numpy_docstring = False
