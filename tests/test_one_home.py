"""One idea, one home: nobody asks which scaling it is, for the declarations in `refops/scalings` say what differs.

A site is a statement that decides by the class of a scaling: `isinstance`, `issubclass`, a class pattern, a comparison
of a type with a class or its name, a table keyed by classes or settings, a tuple of classes. fuser's recipes, of which
one has a scaling's name, are none. What asks by other means, such as a field that one class alone has, is not seen.
"""

import ast
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


def _name(node):
    """`x` of `x` and of `y.x`, else None."""
    return getattr(node, "id", getattr(node, "attr", None))


def _named(node, classes):
    """Names of scaling classes in an expression, `refops.NVFP4Scaling` too."""
    return {_name(one) for one in ast.walk(node)} & classes


def _is_type(node):
    """Whether an expression is `type(x)`, `x.__class__` or the name of one."""
    if isinstance(node, ast.Attribute):
        return node.attr == "__class__" or (node.attr == "__name__" and _is_type(node.value))
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") == "type"


def _decides(node, classes):
    """Whether a node decides by a scaling's class."""
    if isinstance(node, ast.Call):
        return _name(node.func) in ("isinstance", "issubclass") and bool(_named(node.args[1], classes))
    if isinstance(node, ast.Match):
        patterns = [pattern for case in node.cases for pattern in ast.walk(case.pattern)]
        return any(_named(pattern.cls, classes) for pattern in patterns if isinstance(pattern, ast.MatchClass))
    if isinstance(node, ast.Dict):
        return any(key is not None and _named(key, classes) for key in node.keys)
    if isinstance(node, ast.Subscript):
        return isinstance(node.ctx, ast.Store) and bool(_named(node.slice, classes))
    if isinstance(node, ast.Tuple | ast.List | ast.Set):  # what a later `isinstance` or `in` would be given
        return any(_name(one) in classes for one in node.elts)
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        types = [side for side in sides if _is_type(side)]
        words = {side.value for side in sides if isinstance(side, ast.Constant)}
        if words & classes or any(_named(side, classes) for side in sides):
            return bool(types)
        return len(types) > 1 and any("scaling" in ast.unparse(side) for side in types)
    return False


def sites(text):
    """Lines of the sites in a file's text."""
    nodes = list(ast.walk(ast.parse(text)))
    own = {node.name for node in nodes if isinstance(node, ast.ClassDef)}  # of the same name, but no scaling
    renamed = {node.asname for node in nodes if isinstance(node, ast.alias) and node.asname and node.name in CLASSES}
    classes = (CLASSES | renamed) - own
    return sorted({node.lineno for node in nodes if _decides(node, classes)})


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
        "table[MXFP8Scaling] = 1",
        "same = type(q.scaling) is BlockScaling",
        "other = type(s) is not BlockScaling",
        "other = s.__class__ not in (BlockScaling, CurrentScaling)",
        "same = type(a.scaling) == type(b.scaling)",
        "same = type(s).__name__ == 'BlockScaling'",
        "kinds = (DelayedScaling, refops.CurrentScaling)",
        "from refops import MXFP8Scaling as MX; x = isinstance(s, MX)",
        "match s:\n    case MXFP8Scaling() | NVFP4Scaling(): pass",
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
