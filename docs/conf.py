"""How `make docs` builds the site: guide, notebooks, measured specifications, and the reference from the docstrings.

The sources are the documents of the whole repository, where they lie, so that links lead from page to page as they do
from file to file.

Sphinx with autodoc imports the packages as they are installed. Nothing is fetched: the theme brings its files, fonts
are the reader's, formulas are plain text.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import signatures  # noqa: E402

signatures.keep_short_hints()
import refops  # noqa: E402

project = "refops"
copyright = "the authors of refops, Apache-2.0"
release = refops.__version__
html_title = f"refops {release}"

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "myst_nb",
    "markdown_docstrings",
    "signatures",
    "linked_sources",
    "code_widths",
]
html_theme = "furo"
pygments_dark_style = "github-dark"
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_favicon = "static/icon.svg"
html_extra_path = ["front"]  # index.html, which leads to root_doc
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "notebooks/*.ipynb",
    "notebooks/README.md",
    "refops/**/README.md",
    "cuda_kernels/**README.md",
    "fuser/README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "tests/*/README.md",
]
exclude_patterns = [".*", "build", "**/__pycache__"]

#: `name` in a docstring is code, and a link where it names something of the reference.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
maximum_signature_line_length = 100
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
smartquotes = False  # "max" is a string of the code

myst_heading_anchors = 4
myst_enable_extensions = ["html_image"]

#: Notebooks are shown as they are committed; `make notebooks` runs them.
nb_execution_mode = "off"
