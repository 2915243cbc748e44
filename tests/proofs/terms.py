"""Numbers that are formulas of an SMT solver: what the project's own functions compute with when they are proved.

A `Term` has a NumPy type and stands for every value of it at once. It has the operators of a NumPy scalar, so that
functions of numbers run on it as they are. Three rules say what an operator gives:

    NUMPY       uint32 + uint32 is uint32, as in `refops` and in the simulator
    COMPILED    uint32 + uint32 is uint64, as in Numba on the CPU
    CONTRACTED  the same, and a product that is added to something is a multiply-add, as a GPU's compiler may make it

A float is held as its bits, as a term of the solver's theory of floats, or both. The bits of a computed float are a
variable of their own with the equation that its float is the computed one: a NaN's sign and payload are then any, as
IEEE 754 leaves them.
"""

import itertools
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
import z3

NUMPY, COMPILED, CONTRACTED = "NumPy", "compiled", "contracted"
RULE: ContextVar[str] = ContextVar("rule", default=NUMPY)
UNINTERPRETED: ContextVar[tuple[str, ...]] = ContextVar("uninterpreted", default=())
SORTS = {"float32": z3.Float32(), "float64": z3.Float64()}
PASSED: ContextVar[list | None] = ContextVar("passed", default=None)
NEAREST, TRUNCATED = z3.RNE(), z3.RTZ()
BOOL = np.dtype(bool)

#: Variables that stand for the bits of a computed float, or for what an instruction may give -> what holds of them.
EQUATIONS: dict[z3.ExprRef, z3.BoolRef] = {}
#: Variables that stand for products and quotients which are not interpreted -> (which of both, its two operands).
UNKNOWN: dict[z3.ExprRef, tuple[str, z3.ExprRef, z3.ExprRef]] = {}
_numbers = itertools.count()


@contextmanager
def arithmetic(rule, uninterpreted=()):
    """Operators give what a rule says; an `uninterpreted` product, quotient or difference is any function of two."""
    tokens = RULE.set(rule), UNINTERPRETED.set(uninterpreted)
    try:
        yield
    finally:
        RULE.reset(tokens[0])
        UNINTERPRETED.reset(tokens[1])


@contextmanager
def checks_pass():
    """Branches, which are checks of arguments, are not taken. The value is a list of what then holds."""
    token = PASSED.set([])
    try:
        yield PASSED.get()
    finally:
        PASSED.reset(token)


def fresh(name, bits):
    """A bit vector that nothing has used yet."""
    return z3.BitVec(f"{name}!{next(_numbers)}", bits)


def variable(name, dtype):
    """The `Term` that is any value of a type."""
    dtype = np.dtype(dtype)
    bits = z3.BitVec(name, 8 * dtype.itemsize)
    return Term(dtype, bits=bits) if dtype.kind == "f" else Term(dtype, bits)


class Term:
    """All values of one NumPy type at once.

    Attributes:
        dtype: the NumPy type.
        product: of a float, the factors whose product it is, or None.
    """

    __array_ufunc__ = None  # operators of NumPy's scalars leave the work to those below
    __slots__ = ("_bits", "_node", "dtype", "product")

    def __init__(self, dtype, node=None, *, bits=None, product=None):
        self.dtype, self._node, self._bits, self.product = np.dtype(dtype), node, bits, product

    def __repr__(self):
        return f"<{self.dtype} {self._node if self._node is not None else self._bits}>"

    def __bool__(self):
        passed = PASSED.get()
        if passed is None:
            raise TypeError(f"a branch on a number that is not known yet: {self!r}")
        passed.append(z3.Not(self.node))
        return False

    __hash__ = None

    @property
    def node(self):
        """The solver's term: a bit vector, a float or a truth value."""
        if self._node is None:
            self._node = z3.fpBVToFP(self._bits, SORTS[self.dtype.name])
        return self._node

    @property
    def bits(self):
        """A bit vector: of a float its bits."""
        if self.dtype.kind != "f":
            return self.node
        if self._bits is None:
            self._bits = fresh("bits", 8 * self.dtype.itemsize)
            EQUATIONS[self._bits] = z3.fpBVToFP(self._bits, self._node.sort()) == self._node
        return self._bits

    @property
    def has_bits(self):
        """Whether the bits of a float are known without a variable of their own."""
        return self._bits is not None

    def simplified(self):
        """The same without what cannot matter: a field of a word need not know of the others."""
        return Term(self.dtype, z3.simplify(self.node))

    # --- types ------------------------------------------------------------------------------------

    def astype(self, dtype):
        """The number as another type: floats to nearest even, a float as an integer truncated."""
        to = np.dtype(dtype)
        if to == self.dtype:
            return self
        if self.dtype == BOOL:
            one, zero = constant(to.type(1)), constant(to.type(0))
            return choose(self, one, zero)
        width = 8 * to.itemsize
        if self.dtype.kind == "f":
            if to.kind == "f":
                return Term(to, z3.fpFPToFP(NEAREST, self.node, SORTS[to.name]))
            convert = z3.fpToUBV if to.kind == "u" else z3.fpToSBV
            return Term(to, convert(TRUNCATED, self.node, z3.BitVecSort(width)))
        if to.kind == "f":
            convert = z3.fpUnsignedToFP if self.dtype.kind == "u" else z3.fpSignedToFP
            return Term(to, convert(NEAREST, self.node, SORTS[to.name]))
        return Term(to, self._widened(width))

    def _widened(self, width):
        own = self.node.size()
        if width <= own:
            return z3.Extract(width - 1, 0, self.node) if width < own else self.node
        return (z3.ZeroExt if self.dtype.kind == "u" else z3.SignExt)(width - own, self.node)

    def view(self, dtype):
        """The same bits as another type of the same width."""
        to = np.dtype(dtype)
        if to.itemsize != self.dtype.itemsize:
            raise TypeError(f"a view must keep the width; got {self.dtype} as {to}")
        return Term(to, bits=self.bits) if to.kind == "f" else Term(to, self.bits)

    # --- operators --------------------------------------------------------------------------------

    def _with(self, other, operation, *, swapped=False):
        a, b = paired(self, other)
        return operation(b, a) if swapped else operation(a, b)

    def __add__(self, other):
        return self._with(other, add)

    __radd__ = __add__

    def __sub__(self, other):
        return self._with(other, subtract)

    def __rsub__(self, other):
        return self._with(other, subtract, swapped=True)

    def __mul__(self, other):
        return self._with(other, multiply)

    __rmul__ = __mul__

    def __truediv__(self, other):
        return self._with(other, divide)

    def __rtruediv__(self, other):
        return self._with(other, divide, swapped=True)

    def __floordiv__(self, other):
        return self._with(other, lambda a, b: Term(a.dtype, z3.UDiv(a.node, b.node)))

    def __mod__(self, other):
        return self._with(other, lambda a, b: Term(a.dtype, z3.URem(a.node, b.node)))

    def __and__(self, other):
        return self._with(other, lambda a, b: bitwise(a, b, z3.And, lambda x, y: x & y))

    __rand__ = __and__

    def __or__(self, other):
        return self._with(other, lambda a, b: bitwise(a, b, z3.Or, lambda x, y: x | y))

    __ror__ = __or__

    def __xor__(self, other):
        return self._with(other, lambda a, b: bitwise(a, b, z3.Xor, lambda x, y: x ^ y))

    __rxor__ = __xor__

    def __lshift__(self, other):
        return self._with(other, lambda a, b: Term(a.dtype, a.node << b.node))

    def __rshift__(self, other):
        return self._with(other, shifted_right)

    def __neg__(self):
        if self.dtype.kind != "f":
            return Term(self.dtype, -self.node)
        if self.has_bits:  # a NaN changes its sign too
            return Term(self.dtype, bits=self.bits ^ z3.BitVecVal(1 << (self.bits.size() - 1), self.bits.size()))
        return Term(self.dtype, z3.fpNeg(self.node))

    def __abs__(self):
        if self.has_bits:
            return Term(self.dtype, bits=self.bits & z3.BitVecVal((1 << (self.bits.size() - 1)) - 1, self.bits.size()))
        return Term(self.dtype, z3.fpAbs(self.node))

    def _compared(self, other, of_floats, of_unsigned, of_signed):
        a, b = paired(self, other)
        operation = of_floats if a.dtype.kind == "f" else of_unsigned if a.dtype.kind in "ub" else of_signed
        return Term(BOOL, operation(a.node, b.node))

    def __lt__(self, other):
        return self._compared(other, z3.fpLT, z3.ULT, lambda a, b: a < b)

    def __le__(self, other):
        return self._compared(other, z3.fpLEQ, z3.ULE, lambda a, b: a <= b)

    def __gt__(self, other):
        return self._compared(other, z3.fpGT, z3.UGT, lambda a, b: a > b)

    def __ge__(self, other):
        return self._compared(other, z3.fpGEQ, z3.UGE, lambda a, b: a >= b)

    def __eq__(self, other):
        return self._compared(other, z3.fpEQ, lambda a, b: a == b, lambda a, b: a == b)

    def __ne__(self, other):
        return self._compared(other, z3.fpNEQ, lambda a, b: a != b, lambda a, b: a != b)


def constant(value):
    """A NumPy scalar as a `Term`."""
    if isinstance(value, Term):
        return value
    value = np.asarray(value)[()]
    if value.dtype == BOOL:
        return Term(BOOL, z3.BoolVal(bool(value)))
    width = 8 * value.dtype.itemsize
    if value.dtype.kind == "f":
        return Term(value.dtype, bits=z3.BitVecVal(int(value.view(f"u{value.dtype.itemsize}")), width))
    return Term(value.dtype, z3.BitVecVal(int(value), width))


def paired(a, b):
    """Two operands of one type, that of the result: a bare Python number takes the type of the other."""
    for given, other in ((a, b), (b, a)):
        if isinstance(given, int | float) and not isinstance(given, bool | np.generic):
            value = constant(_weak(given, other.dtype).type(given))
            a, b = (value, other) if given is a else (other, value)
    a, b = constant(a), constant(b)
    if a.dtype == b.dtype and (a.dtype.kind in "fb" or RULE.get() == NUMPY):
        return a, b
    to = _common(a.dtype, b.dtype)
    return a.astype(to), b.astype(to)


def _weak(given, other):
    """The type of a bare Python number beside one of a type."""
    if other.kind == "f":
        return other
    if isinstance(given, float):
        return np.dtype(np.float64)
    return other if RULE.get() == NUMPY else np.dtype(np.int64)


def _common(a, b):
    if a.kind == "b" or b.kind == "b":
        return b if a.kind == "b" else a
    if RULE.get() == NUMPY or "f" in (a.kind, b.kind):
        return np.result_type(a, b)
    unsigned = a.kind == b.kind == "u"
    if not unsigned and np.dtype(np.uint64) in (a, b):
        raise TypeError(f"Numba makes float64 of {a} and {b}")
    return np.dtype(np.uint64 if unsigned else np.int64)


def fused(a, b, c, rounding=NEAREST):
    """a * b + c, rounded once."""
    return Term(c.dtype, z3.fpFMA(rounding, a.node, b.node, c.node))


def add(a, b):
    if a.dtype.kind != "f":
        return Term(a.dtype, a.node + b.node)
    if RULE.get() == CONTRACTED and (a.product or b.product):
        return fused(*a.product, b) if a.product else fused(*b.product, a)
    return Term(a.dtype, z3.fpAdd(NEAREST, a.node, b.node))


def subtract(a, b):
    if a.dtype.kind != "f":
        return Term(a.dtype, a.node - b.node)
    if "difference" in UNINTERPRETED.get():
        return unknown("difference", a, b)
    if RULE.get() == CONTRACTED and (a.product or b.product):
        return fused(*a.product, -b) if a.product else fused(-b.product[0], b.product[1], a)
    return Term(a.dtype, z3.fpSub(NEAREST, a.node, b.node))


def multiply(a, b):
    if a.dtype.kind != "f":
        return Term(a.dtype, a.node * b.node)
    if "product" in UNINTERPRETED.get():
        return unknown("product", a, b)
    return Term(a.dtype, z3.fpMul(NEAREST, a.node, b.node), product=(a, b))


def divide(a, b):
    if "quotient" in UNINTERPRETED.get():
        return unknown("quotient", a, b)
    return Term(a.dtype, z3.fpDiv(NEAREST, a.node, b.node))


def unknown(operation, a, b):
    """Any number with the sign of a product or quotient, and NaN where that is: what holds for all such numbers holds.

    `congruent` adds that equal operands give equal results.
    """
    found = z3.FreshConst(a.node.sort(), operation)
    UNKNOWN[found] = operation, a.node, b.node
    if operation == "difference":
        return Term(a.dtype, found)
    zero, infinite = z3.fpIsZero, z3.fpIsInf
    kinds = [(zero, infinite), (infinite, zero)] if operation == "product" else [(zero, zero), (infinite, infinite)]
    undefined = [z3.And(of_a(a.node), of_b(b.node)) for of_a, of_b in kinds]
    nan = z3.Or(z3.fpIsNaN(a.node), z3.fpIsNaN(b.node), *undefined)
    sign = z3.Xor(z3.fpIsNegative(a.node), z3.fpIsNegative(b.node))
    EQUATIONS[found] = z3.And(z3.fpIsNaN(found) == nan, z3.Or(nan, z3.fpIsNegative(found) == sign))
    return Term(a.dtype, found)


def congruent(one, other):
    """That two unknown results are one where their operands are, or None of two operations."""
    (operation, *operands), (of_other, *others) = UNKNOWN[one], UNKNOWN[other]
    if operation != of_other:
        return None
    return z3.Implies(z3.And([a == b for a, b in zip(operands, others, strict=True)]), one == other)


def bitwise(a, b, of_truths, of_bits):
    return Term(a.dtype, (of_truths if a.dtype == BOOL else of_bits)(a.node, b.node))


def shifted_right(a, b):
    return Term(a.dtype, z3.LShR(a.node, b.node) if a.dtype.kind == "u" else a.node >> b.node)


def choose(condition, a, b):
    """`a` where the condition holds, else `b`: of one type, after what the rule says of two."""
    condition = constant(condition)
    a, b = _unified(a, b)
    if a.dtype.kind == "f" and a.has_bits and b.has_bits:
        return Term(a.dtype, bits=z3.If(condition.node, a.bits, b.bits))
    return Term(a.dtype, z3.If(condition.node, a.node, b.node))


def _unified(a, b):
    if not isinstance(a, int | float) and not isinstance(b, int | float):
        a, b = constant(a), constant(b)
        if a.dtype == b.dtype:
            return a, b
    return paired(a, b)


def is_nan(x):
    """Whether a float is NaN."""
    return Term(BOOL, z3.fpIsNaN(x.node))


def is_infinite(x):
    """Whether a float is infinite."""
    return Term(BOOL, z3.fpIsInf(x.node))


def is_negative(x):
    """The sign bit of a float."""
    top = x.bits.size() - 1
    return Term(BOOL, z3.Extract(top, top, x.bits) == 1)


def look_up(table, index):
    """The entry of an array at a `Term`: a tree of comparisons over the runs of equal bits.

    An index outside is what NumPy refuses; here it gives the last entry.
    """
    bits = table.view(f"u{table.dtype.itemsize}") if table.dtype.kind == "f" else table
    starts = [0, *(np.flatnonzero(bits[1:] != bits[:-1]) + 1)]

    def tree(low, high):
        if high - low == 1:
            value = constant(table[starts[low]])
            return value.bits
        middle = (low + high) // 2
        there = z3.ULT(index.node, z3.BitVecVal(int(starts[middle]), index.node.size()))
        return z3.If(there, tree(low, middle), tree(middle, high))

    found = tree(0, len(starts))
    return Term(table.dtype, bits=found) if table.dtype.kind == "f" else Term(table.dtype, found)
