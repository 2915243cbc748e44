"""A Sphinx extension: signatures of the reference as the source has them, short enough to read.

Python expands the names of type hints when it reads them: `ArrayLike` becomes a union of 200 characters. Here the names
stay, one signature stands for all overloads, and a default is shown as it would be written.
"""

import inspect
import re
import sys
import types

from sphinx import addnodes
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.inspect import stringify_signature

#: What autodoc has in a signature -> what is shown. `...` is a default that is made at each call.
SHORTER = (
    (re.compile(r"<class '([\w.]+)'>"), r"\1"),
    (re.compile(r"<function ([\w.]+)>"), r"\1"),
    (re.compile(r"<factory>"), "..."),
    (re.compile(r"~?refops\.scalings\.declaration\."), ""),
    (
        re.compile(r"~?(?:numpy\.)?ndarray\[tuple\[(?:~?typing\.)?Any, \.\.\.\], (?:~?numpy\.)?dtype\[(.*?)\]\]"),
        r"NDArray[\1]",
    ),
)
#: A value of a constant that is longer is left out.
LONGEST_VALUE = 120


def keep_short_hints():
    """Put classes of the same names in place of `refops.hints`' unions; before the packages are imported."""
    hints = types.ModuleType("refops.hints")
    hints.__all__ = ["Array", "ArrayLike", "DTypeLike", "Number"]
    for name in hints.__all__:
        setattr(hints, name, type(name, (), {"__module__": "refops.hints"}))
    sys.modules[hints.__name__] = hints


def setup(app):
    app.connect("autodoc-process-signature", shorten)
    app.connect("object-description-transform", drop_long_values)
    analyze = ModuleAnalyzer.analyze

    def analyze_without_overloads(self):
        analyze(self)
        self.overloads = {}

    ModuleAnalyzer.analyze = analyze_without_overloads
    return {"parallel_read_safe": True}


def shorten(app, what, name, obj, options, signature, returned):
    """The signature with short names; of a class whose `__new__` passes all on, that of its `__init__`."""
    if what == "class" and signature == "(*args, **kwargs)" and obj.__init__ is not object.__init__:
        full = inspect.signature(obj.__init__)
        full = full.replace(parameters=list(full.parameters.values())[1:], return_annotation=full.empty)
        signature = stringify_signature(full, unqualified_typehints=True)
    return signature and shorter(signature), returned and shorter(returned)


def shorter(text):
    for pattern, replacement in SHORTER:
        text = re.sub(pattern, replacement, text)
    return text


def drop_long_values(app, domain, objtype, content):
    """Constants keep their type and their words."""
    for node in list(content.parent[0].findall(addnodes.desc_annotation)):
        if node.astext().lstrip().startswith("=") and len(node.astext()) > LONGEST_VALUE:
            node.parent.remove(node)
