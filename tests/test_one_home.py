"""One idea, one home: nobody asks which scaling it is, for the declarations in `refops/scalings` say what differs.

A site is a statement that decides by the class of a scaling: `isinstance`, `issubclass`, a class pattern, a comparison
with a class, a table keyed by settings. fuser's recipes, which are classes of the same names, are none.
"""

import ast
import re
from pathlib import Path

import numpy as np
import pytest

import refops
from refops import scalings

pytestmark = pytest.mark.check

ROOT = Path(__file__).resolve().parent.parent
CLASSES = {cls.__name__ for cls in scalings.SCALINGS}
#: file -> (sites, why the declarations cannot answer there).
ALLOWED = {
    "docs/capabilities.py": (2, "TE's own quantizers and scaling modes have the settings as arguments of other names"),
    "refops/golden/matrix.py": (1, "the settings beside a named row: those of the same class"),
    "refops/oracle/conventions/scales.py": (1, "other settings of the same class are what a kernel may have taken"),
}
MOST_SITES = 5


def _named(node):
    """Names of scaling classes in an expression, `refops.NVFP4Scaling` too."""
    names = {
        one.id if isinstance(one, ast.Name) else one.attr
        for one in ast.walk(node)
        if hasattr(one, "ctx") and isinstance(one, ast.Name | ast.Attribute)
    }
    return names & CLASSES


def _decides(node):
    """Whether a node decides by a scaling's class."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass"):
        return bool(_named(node.args[1]))
    if isinstance(node, ast.Match):
        return any(_named(case.pattern.cls) for case in node.cases if isinstance(case.pattern, ast.MatchClass))
    if isinstance(node, ast.Dict):
        return any(key is not None and _named(key) for key in node.keys)
    if isinstance(node, ast.Compare) and any(isinstance(op, ast.Is | ast.Eq | ast.In) for op in node.ops):
        sides = [node.left, *node.comparators]
        types = [side for side in sides if isinstance(side, ast.Call) and getattr(side.func, "id", "") == "type"]
        of_scalings = [side for side in types if re.search(r"scaling", ast.unparse(side))]
        return bool(of_scalings) and (len(types) > 1 or any(_named(side) for side in sides))
    return False


def sites(text):
    """Line numbers of the sites in a file's text."""
    tree = ast.parse(text)
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}  # of the same name, but no scaling
    return [node.lineno for node in ast.walk(tree) if _decides(node) and not own & CLASSES]


def test_nobody_asks_which_scaling_it_is():
    found = {}
    for folder in ("refops", "cuda_kernels", "fuser", "docs"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith("refops/scalings/") and (lines := sites(path.read_text())):
                found[name] = lines
    assert {name: len(lines) for name, lines in found.items()} == {name: count for name, (count, _) in ALLOWED.items()}
    assert sum(count for count, _ in ALLOWED.values()) <= MOST_SITES


@pytest.mark.parametrize(
    "text",
    [
        "if isinstance(scaling, refops.MXFP8Scaling): pass",
        "x = isinstance(q.scaling, DelayedScaling | CurrentScaling)",
        "match scaling:\n    case refops.NVFP4Scaling(): pass",
        "table = {MXFP8Scaling: 1}",
        "same = type(q.scaling) is BlockScaling",
    ],
)
def test_each_kind_of_site_is_seen(text):
    assert len(sites(text)) == 1


def test_an_unknown_scaling_is_refused():
    """Also one that looks like a scaling, but is not declared."""

    class Undeclared(scalings.Scaling):
        fmt = refops.E4M3

    x = np.ones((32, 32), np.float32)
    for scaling in (Undeclared(), object(), None, "mxfp8", refops.MXFP8Scaling):
        with pytest.raises(TypeError, match="scaling must be"):
            refops.quantize(x, scaling)
