"""How `make docs` builds the site: guide, measured specifications, and the reference from the docstrings.

Sphinx with autodoc imports the packages as they are installed. Nothing is fetched: the theme brings its files, fonts
are the reader's, formulas are plain text.
"""

import re
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

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_parser", "markdown_docstrings", "signatures"]
html_theme = "furo"
html_copy_source = False
source_suffix = {".md": "markdown"}

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


def link_files(app, name, source):
    """Links to Markdown files outside of docs/, which are no pages of the site, lead to the files themselves."""
    folder = (HERE / name).parent

    def replacement(match):
        outside = not (folder / match[1]).resolve().is_relative_to(HERE)
        return f"](path:{match[1]})" if outside else match[0]

    source[0] = re.sub(r"\]\(((?:\.\./)+[\w/.]+\.md)(?:#[\w-]+)?\)", replacement, source[0])


def setup(app):
    app.connect("source-read", link_files)
