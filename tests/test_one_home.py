"""One idea, one home: nobody asks which scaling it is, and nobody writes an activation's formula a second time.

*Scalings.* The declarations in `refops/scalings` say what differs. A site is a statement that decides by the class of a
scaling: `isinstance`, `issubclass`, a class pattern, a comparison of a type with a class or its name, a table keyed by
classes or settings, a tuple of classes. fuser's recipes, one of which has a scaling's name, do not count. A decision by
other means, such as a field that only one class has, is not found.

*Formulas.* Those of activations stand in `refops/activations`. A second text is a number times an elementary function
of itself, such as x sigmoid(x), or a constant of the formulas. A maximum with 0, which is relu, is not found.
"""

import ast
import re
from pathlib import Path

import numpy as np
import pytest

import refops
from refops import scalings
from refops.activations import ACTIVATIONS, DEFAULT_PARAMETERS, Arithmetic

pytestmark = pytest.mark.check

ROOT = Path(__file__).resolve().parent.parent
CLASSES = {cls.__name__ for cls in scalings.SCALINGS}
#: file -> (sites, why the declarations cannot answer there).
ALLOWED = {
    "refops/golden/matrix.py": (1, "the settings beside a named row: those of the same class"),
    "refops/oracle/conventions/scales.py": (1, "other settings of the same class are what a kernel may have taken"),
}
MOST_SITES = 5


# --- scalings ---------------------------------------------------------------------------------------------------------


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


# --- formulas ---------------------------------------------------------------------------------------------------------

#: file -> (second texts, why they may stand there).
FORMULAS_ALLOWED = {
    "cuda_kernels/fast.py": (
        1,
        "beta tanh(x / beta) is a word, `scaled_tanh`, which situglu's fast form does not repeat",
    ),
    "cuda_kernels/puzzles/holes.py": (1, "an exercise shows the whole of what the reader's kernel has to compute"),
}
#: Functions of the vocabulary and of the libraries.
ELEMENTARY = {"exp", "exp2", "expf", "tanh", "tanhf", "tanh_pair", "sigmoid", "sigmoid_pair", "expit", "erf", "erfc"}
CALL = re.compile(rf"\b({'|'.join(ELEMENTARY)})\(")
SQRT_2_OVER_PI = re.compile(r"[\w.]*sqrt\(2(\.0)? / [\w.]*pi\)")


def _constants():
    """The numbers of all formulas but halves and integers, which are everybody's, and TE's defaults of parameters."""
    seen = set(DEFAULT_PARAMETERS.values())

    class Numbers(Arithmetic):
        def number(self, c):
            seen.add(float(c))
            return super().number(c)

    for function in {f for row in ACTIVATIONS.values() for f in row.functions}:
        function.body(Numbers())
    return [c for c in seen if c * 2 != round(c * 2)]


CONSTANTS = _constants()
BITS = {int(np.float32(c).view(np.uint32)) for c in CONSTANTS}


def _is_constant(node):
    """Whether an expression is a constant of the formulas: its digits, its float32 bits, or the root of 2 / pi."""
    if isinstance(node, ast.Call):
        return bool(SQRT_2_OVER_PI.fullmatch(ast.unparse(node)))
    value = getattr(node, "value", None) if isinstance(node, ast.Constant) else None
    if isinstance(value, float):
        return any(abs(value - c) <= 1e-5 * c for c in CONSTANTS)
    return type(value) is int and value in BITS


def _names(node):
    """Variables in an expression; those in capitals are constants."""
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and not one.id.isupper()}


def _arguments(node, behind, made_of):
    """Variables that elementary functions in an expression are of.

    Args:
        behind: name -> those of the value that it was given.
        made_of: name -> all variables in that value.
    """
    found = set().union(*(behind.get(name, ()) for name in _names(node)))
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and _name(call.func) in ELEMENTARY:
            found = found.union(*map(_names, call.args or [call.func]))  # `x.exp()` is of x
    return found.union(*(made_of.get(name, ()) for name in found))


def _products(node):
    """The pairs of factors of a product or quotient, as operator, assignment or function."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div):
        return [(node.left, node.right), (node.right, node.left)]
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult | ast.Div):
        return [(node.target, node.value), (node.value, node.target)]
    if isinstance(node, ast.Call) and _name(node.func) in ("mul", "multiply", "div", "divide", "fma") and node.args:
        one, other = node.args[:2] if len(node.args) > 1 else (node.func, *node.args)  # `x.mul(y)` is of x and y
        return [(one, other), (other, one)]
    return []


def _second_texts_in(nodes):
    """Lines of a scope where a variable meets an elementary function of itself."""
    behind, made_of = {}, {}
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            arguments, names = _arguments(node.value, behind, made_of), _names(node.value)
            names = names.union(*(made_of.get(name, ()) for name in names))
            for name in set().union(*map(_names, getattr(node, "targets", None) or [node.target])):
                made_of[name] = made_of.get(name, set()) | names
                if arguments:
                    behind[name] = behind.get(name, set()) | arguments
    for node in nodes:
        if any((_names(one) - set(behind)) & _arguments(other, behind, made_of) for one, other in _products(node)):
            yield node.lineno


def second_texts(text):
    """Lines of a file's text that repeat a formula, or a constant of one."""
    tree = ast.parse(text)
    lines = {node.lineno for node in ast.walk(tree) if _is_constant(node)}
    if CALL.search(text):
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.Lambda)]
        inside = {id(node) for function in functions for node in ast.walk(function)}
        scopes = [[*ast.walk(function)] for function in functions]
        scopes.append([node for node in ast.walk(tree) if id(node) not in inside])
        lines |= {line for scope in scopes for line in _second_texts_in(scope)}
    return sorted(lines)


def test_formulas_stand_in_their_declarations_alone():
    found = {}
    for folder in ("refops", "cuda_kernels", "fuser", "docs", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith("refops/activations/") and (lines := second_texts(path.read_text())):
                found[name] = lines
    allowed = {name: count for name, (count, _) in FORMULAS_ALLOWED.items()}
    assert {name: len(lines) for name, lines in found.items()} == allowed, found


@pytest.mark.parametrize(
    "text",
    [
        "def silu(x):\n    return x * torch.sigmoid(x)",
        "silu = lambda x: x / (1 + np.exp(-x))",
        "y = act / (1.0 + math.exp(-act)) * gate",
        "def slope(x):\n    s = sigmoid(a * x)\n    return a * x * (s * (1 - s)) + s",
        "def slope(x):\n    t, steepness = tanh_pair(x / b)\n    return x * steepness",
        "def gelu(x):\n    return 0.5 * x * (1 + erf(x * ROOT))",
        "def f(x):\n    return mul(x, sigmoid(x))",
        "def f(x):\n    return fma(x, sigmoid(x), x)",
        "def f(x):\n    return x * x.sigmoid()",
        "def f(x):\n    return x.mul(torch.sigmoid(x))",
        "def f(x):\n    if (s := sigmoid(x)) > 0:\n        return s * x",
        "def gelu(x):\n    u = x * (A + B * x * x)\n    return x * (HALF + HALF * tanh(u))",
        "y = x\ny *= sigmoid(x) * x",
        "z = 1.702 * x",
        "u = x + F(0.044715) * x**3",
        "C = 0.7978845608",
        "u = np.sqrt(2 / np.pi) * x",
        "u = math.sqrt(2.0 / math.pi) * x",
        "alpha = from_bits(0x3FD9DB23)",
    ],
)
def test_each_kind_of_second_text_is_seen(text):
    assert len(second_texts(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "def sigmoid(x):\n    return ONE / (ONE + exp(-x))",
        "def sigmoid(x):\n    return HALF + HALF * tanh(HALF * x)",
        "def softmax(x):\n    e = np.exp(x)\n    return e / e.sum()",
        "def a(x):\n    s = exp(x)\n    return s\ndef b(x, s):\n    return x * s",
        "y = 0.5 * x + 1.7",
    ],
)
def test_what_is_no_second_text(text):
    assert second_texts(text) == []
