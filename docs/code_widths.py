"""A Sphinx extension: blocks of code say how wide they are, so that `static/site.css` can make them fit the page.

A block has the class `columns-N`, N being its longest line, rounded up to tens. A table or figure in text has the class
`whole` besides: it is made smaller rather than broken into lines, which would leave nothing of it.
"""

import re

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform

#: Languages of what programs print, the outputs of notebooks among them.
PRINTED = ("text", "none", "myst-ansi")
#: The widest line that is made to fit; longer ones are sentences, which are broken.
WIDEST = 130
#: Signs that words are aligned in columns: frames, or spaces within a line.
ALIGNED = re.compile(r"[\u2500-\u257f|]|\S  +\S")


def classes(text, language):
    """The classes of a block of code."""
    lines = [line for line in text.splitlines() if len(line) <= WIDEST]
    widest = max(map(len, lines), default=0)
    whole = ["whole"] if language in PRINTED and sum(map(bool, map(ALIGNED.search, lines))) > 1 else []
    return [f"columns-{-(-widest // 10) * 10}", *whole]


class MeasureCode(SphinxPostTransform):
    default_priority = 900
    formats = ("html",)

    def run(self):
        for node in self.document.findall(nodes.literal_block):
            node["classes"] += classes(node.astext(), node.get("language", "text"))


def setup(app):
    app.add_post_transform(MeasureCode)
    return {"parallel_read_safe": True}
