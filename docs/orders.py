"""Figures of two orders, made of the code: of scale bytes in the swizzle, of operations in each derivative.

A derivative is written by its own declaration (`refops.activations`): its factory gets a vocabulary whose numbers are
text, so that what it returns is the formula with every association that it computes with.
"""

import itertools
from collections import namedtuple

import numpy as np

import refops
from refops import ACTIVATIONS
from refops.activations import BoundActivation
from refops.activations.arithmetic import Arithmetic
from refops.activations.declaration import IDENTITY, forms
from refops.quantization.result import reorder_scales

#: Rows and blocks of a tile of the swizzle.
OUTER, BLOCKS = 128, 4
#: How closely an operation binds: sums, products, what needs no parentheses.
SUM, PRODUCT, ATOM = range(3)

# --- operations -------------------------------------------------------------------------------------------------------


class Term:
    """A number as text; its operators give the text of the operation, every association in parentheses."""

    def __init__(self, text, binding=ATOM):
        self.text, self.binding = text, binding

    def __str__(self):
        return self.text

    def within(self, binding):
        """The text as an operand of an operation: in parentheses unless it binds more closely."""
        return self.text if self.binding > binding else f"({self.text})"

    def _with(self, sign, other, binding, swapped=False):
        first, second = (other, self) if swapped else (self, other)
        return Term(f"{_term(first).within(binding)} {sign} {_term(second).within(binding)}", binding)

    def __add__(self, other):
        return self._with("+", other, SUM)

    def __sub__(self, other):
        return self._with("-", other, SUM)

    def __mul__(self, other):
        return self._with("*", other, PRODUCT)

    def __neg__(self):
        return Term(f"-{self.within(PRODUCT)}", PRODUCT)

    def __gt__(self, other):
        return self._with(">", other, SUM)

    def __le__(self, other):
        return self._with("<=", other, SUM)

    def __ge__(self, other):
        return self._with(">=", other, SUM)

    def __and__(self, other):
        return self._with("&", other, SUM)


def _term(value):
    return value if isinstance(value, Term) else Term(str(value))


class TextArithmetic(Arithmetic):
    """The vocabulary over `Term`: exp, sigmoid and tanh get the names e, s and t, whose meanings are kept.

    Attributes:
        named: name -> the text that it stands for.
    """

    _one = Term("1")

    def __init__(self):
        self.named = {}

    def number(self, c):
        """A float32 constant with as many digits as tell it from others."""
        return Term(f"{np.float32(c):.9g}" if float(c) == int(c) else str(np.float32(c)))

    def exp(self, x):
        """The name e."""
        return self._name("e", f"exp({x})")

    def sigmoid(self, x):
        """The name s."""
        return self._name("s", f"sigmoid({x})")

    def tanh(self, x):
        """The name t."""
        return self._name("t", f"tanh({x})")

    def _name(self, letter, text):
        """The letter, with a number behind it where others of its kind have it already."""
        names = itertools.chain([letter], (f"{letter}{i}" for i in itertools.count(2)))
        return Term(next(name for name in names if self.named.setdefault(name, text) == text))

    def quotient(self, x, y):
        """x / y."""
        return x._with("/", y, PRODUCT)

    def where(self, condition, a, b):
        """A call."""
        return Term(f"where({condition}, {a}, {b})")

    def maximum(self, a, x):
        """A call."""
        return Term(f"max({a}, {x})")

    def at_most(self, x, limit):
        """A call."""
        return Term(f"min({x}, {limit})")

    def at_least(self, x, limit):
        """A call."""
        return Term(f"max({x}, {limit})")

    def is_nan(self, x):
        """A call."""
        return Term(f"isnan({x})")

    def one_like(self, x):
        """1."""
        return Term("1")


def slope_text(function, *, row_scaled=False):
    """The slope of a `Function` at x, and what the names in it stand for: (text, name -> text)."""
    words = TextArithmetic()
    parameters = namedtuple("Parameters", [p.name for p in function.parameters])(
        *(Term(p.name) for p in function.parameters)
    )
    slope = function.row_scaled(words) if row_scaled else forms(function.body, words).slope
    return str(slope(Term("x"), parameters)), words.named


def _called(name):
    """A method that gives the text of a call."""
    return lambda self, x: Term(f"{name}({x})")


class _Products(BoundActivation):
    """An activation of which only the products are of interest: its functions are names."""

    value, gate = _called("f"), _called("g")
    derivative = scaled_derivative = _called("f'")
    gate_slope = scaled_gate_slope = _called("g'")


def products():
    """What is multiplied by the slopes, and in which order: [(what, text)]."""
    gated, unary = (_Products(ACTIVATIONS[name], {}) for name in ("swiglu", "silu"))
    dy, x, act, gate = map(Term, ("dy", "x", "act", "gate"))
    scaled = dy * Term("row_scale")
    d_act, d_gate = gated.backward(dy, act, gate)
    scaled_act, scaled_gate = gated.scaled_backward(scaled, act, gate)
    return [
        ("unary", "dx", unary.backward(dy, x)),
        ("gated", "d_act", d_act),
        ("gated", "d_gate", d_gate),
        ("unary with a scale for each row", "dx", unary.scaled_backward(scaled, x)[0]),
        ("gated with a scale for each row", "d_act", scaled_act),
        ("gated with a scale for each row", "d_gate", scaled_gate),
    ]


def derivatives():
    """Markdown: the products of each kind of gradient, and the slope of each function."""
    lines = ["| gradient | of | float32 operations |", "|---|---|---|"]
    lines += [f"| `{name}` | {kind} | `{text}` |" for kind, name, text in products()]
    lines += ["", "| slope of | at x | where |", "|---|---|---|"]
    functions = dict.fromkeys(function for row in ACTIVATIONS.values() for function in row.functions)
    for function in functions:
        for row_scaled in (False, True):
            if function is IDENTITY or (row_scaled and function.row_scaled is None):
                continue
            text, names = slope_text(function, row_scaled=row_scaled)
            where = ", ".join(f"`{name} = {meaning}`" for name, meaning in names.items())
            lines.append(f"| {function.name}{', a scale for each row' * row_scaled} | `{text}` | {where} |")
    return "\n".join(lines)


# --- bytes ------------------------------------------------------------------------------------------------------------


def _swizzled(name, labels):
    """The labels of scales `name` of MXFP8, in the order that GEMMs read."""
    layout = refops.MXFP8Scaling(refops.E4M3).layout
    return reorder_scales(layout, name, labels, to_swizzled=True).reshape(-1)


def _tile(name, rows_first):
    """Lines of text: the 512 bytes of one tile, each with its index in the stored array."""
    shape = (OUTER, BLOCKS) if rows_first else (BLOCKS, OUTER)
    labels = np.array([[f"{i},{j}" for j in range(shape[1])] for i in range(shape[0])])
    lines = _swizzled(name, labels).reshape(32, 4, 4)
    made = []
    for number in (0, 1, None, 31):
        if number is None:
            made.append("     ...")
            continue
        groups = ["".join(f"{label:<6}" for label in group) for group in lines[number]]
        made.append(f"{16 * number:>8}  {'| '.join(groups)}".rstrip())
    return made


def _tiles(name, rows_first):
    """Lines of text: the number of each tile of 256 x 8 scales, where they are stored."""
    outer, blocks = 2 * OUTER, 2 * BLOCKS
    shape = (outer, blocks) if rows_first else (blocks, outer)
    place = np.arange(outer * blocks).reshape(shape)
    number = np.empty(place.size, int)
    number[_swizzled(name, place)] = np.arange(place.size) // (OUTER * BLOCKS)
    edges = (OUTER, BLOCKS) if rows_first else (BLOCKS, OUTER)
    first = number.reshape(shape)[:: edges[0], :: edges[1]]
    words = ("row", "block") if rows_first else ("block", "column")
    made = [
        " " * 18 + "".join(f"{f'{words[1]}s {n * edges[1]}..{(n + 1) * edges[1] - 1}':<18}" for n in (0, 1)).rstrip()
    ]
    for n in (0, 1):
        rows = f"{words[0]}s {n * edges[0]}..{(n + 1) * edges[0] - 1}"
        made.append(f"  {rows:<16}" + "".join(f"{f'tile {t}':<18}" for t in first[n]).rstrip())
    return made


def swizzle():
    """Markdown: where each scale byte of both copies goes."""
    lines = ["```text", "rowwise, stored [row, block along K]: the 512 bytes of the tile of rows 0..127, blocks 0..3"]
    lines += ["  byte    row,block", *_tile("rowwise_scale_inv", True), ""]
    lines += ["columnwise, stored [block along M, column]: the tile of blocks 0..3, columns 0..127"]
    lines += ["  byte    block,column", *_tile("columnwise_scale_inv", False), ""]
    lines += ["rowwise, which tile comes when", *_tiles("rowwise_scale_inv", True), ""]
    lines += ["columnwise, which tile comes when", *_tiles("columnwise_scale_inv", False), "```"]
    return "\n".join(lines)
