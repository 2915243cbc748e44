"""How `make docs` builds the site: guide, measured specifications, and the reference from the docstrings.

Sphinx with autodoc imports the packages as they are installed. Nothing is fetched: the theme brings its files, fonts
are the reader's, formulas are plain text.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import refops  # noqa: E402

project = "refops"
copyright = "the authors of refops, Apache-2.0"
release = refops.__version__
html_title = f"refops {release}"

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_parser", "markdown_docstrings"]
html_theme = "furo"
html_copy_source = False
source_suffix = {".md": "markdown"}

#: `name` in a docstring is code, and a link where it names something of the reference.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_default_options = {"show-inheritance": True}
maximum_signature_line_length = 100
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
smartquotes = False  # "max" is a string of the code

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
