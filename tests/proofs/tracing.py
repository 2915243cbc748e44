"""Runs the project's own functions on `Term`s: the same bytecode, with other meanings of the names that it looks up.

`Tracer.bind(function)` is a copy of a function in whose module and closure NumPy's types convert terms, `select` is a
choice, arrays are tables that a term may index, and the project's other functions are copies too. Nothing is written a
second time. `replaced` gives the meaning of what cannot be run: an instruction, or a call into C.
"""

import functools
import types

import numpy as np
from terms import Term, choose, constant, is_infinite, is_nan, is_negative, look_up, paired

import refops.formats
from cuda_kernels import simt

NUMBERS = (np.uint8, np.uint16, np.uint32, np.uint64, np.int32, np.int64, np.float32, np.float64)
PACKAGES = ("refops", "cuda_kernels")


class Cast:
    """A NumPy type that also converts terms."""

    def __init__(self, kind):
        self.kind, self.dtype = kind, np.dtype(kind)

    def __call__(self, value):
        return value.astype(self.dtype) if isinstance(value, Term) else self.kind(value)


class Table:
    """An array that a term may index; anything else of it is the array's."""

    def __init__(self, array):
        self.array = array

    def __getitem__(self, index):
        return look_up(self.array, index) if isinstance(index, Term) else self.array[index]

    def __len__(self):
        return len(self.array)

    def take(self, index, mode="raise"):
        """The entry at an index, or with "clip" the one nearest to it."""
        return self[clip(index, 0, len(self) - 1) if mode == "clip" else index]


class Bound:
    """An object whose attributes are bound as a module's names are."""

    def __init__(self, value, tracer):
        self._value, self._tracer = value, tracer

    def __getattr__(self, name):
        found = getattr(self._value, name)
        if isinstance(found, types.MethodType):
            return functools.partial(self._tracer.bind(found.__func__), self)
        return self._tracer.bind(found)


def as_unchecked(value, *_):
    """What a check of an argument gives: the argument."""
    return value


def count_up_to(table, x, side):
    """np.searchsorted in a sorted table, from the right: how many entries are no larger."""
    assert side == "right"
    total = constant(np.int64(0))
    for entry in getattr(table, "array", table):
        total = total + (x >= entry.astype(x.dtype)).astype(np.int64)
    return total


def smaller(a, b):
    """np.fmin: the smaller one, of a number and NaN the number."""
    a, b = paired(a, b)
    return choose(is_nan(a), b, choose(is_nan(b) | (a <= b), a, b))


def clip(x, low, high):
    """np.clip of integers."""
    x = choose(x < low, low, x)
    return choose(x > high, high, x)


def as_array(value, dtype=None):
    """np.asarray."""
    if isinstance(value, Term):
        return value if dtype is None else value.astype(dtype)
    return np.asarray(value, dtype and np.dtype(dtype))


def append(table, value):
    """np.append."""
    return Table(np.append(getattr(table, "array", table), value))


def diff(table):
    """np.diff."""
    return Table(np.diff(getattr(table, "array", table)))


#: What is not run but has its documented meaning: functions that are written in C, `select`, checks of arguments.
MEANINGS = {
    simt.select: choose,
    np.where: choose,
    np.fmin: smaller,
    np.abs: abs,
    np.isnan: is_nan,
    np.isinf: is_infinite,
    np.signbit: is_negative,
    np.searchsorted: count_up_to,
    np.clip: clip,
    np.asarray: as_array,
    np.append: append,
    np.diff: diff,
    refops.formats.require_codes: as_unchecked,
}


class Tracer:
    """Binds functions to terms.

    Args:
        replaced: function -> the function of terms that stands for it.
        fault: wrong constants: a name in a module or a closure, or a literal number in the code of a function -> f(it).
    """

    def __init__(self, replaced=None, fault=None):
        self._meanings = MEANINGS | (replaced or {})
        self._fault, self._made = fault or {}, {}
        #: How many constants are wrong.
        self.changed = 0

    def run(self, function, *given, **named):
        """What a function gives, of terms and of what it takes besides."""
        return self.bind(function)(*map(self.bind, given), **{name: self.bind(one) for name, one in named.items()})

    def bind(self, value):
        """A function, or what a name stands for, as a function of terms needs it."""
        value = getattr(value, "py_func", value)
        if isinstance(value, type) and value in NUMBERS:
            return Cast(value)
        if isinstance(value, types.ModuleType) and value.__name__.split(".")[0] in ("numpy", *PACKAGES):
            return Bound(value, self)
        if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype != object:
            return Table(value)
        if isinstance(value, refops.formats.ElementFormat):
            return Bound(value, self)
        if isinstance(value, tuple) and type(value) is tuple:
            return tuple(map(self.bind, value))
        if not callable(value):
            return value
        return self._function(value)

    def _function(self, value):
        try:
            if value in self._meanings:
                return self.bind_meaning(self._meanings[value])
        except TypeError:  # not hashable
            return value
        if isinstance(value, functools._lru_cache_wrapper):
            return lambda *given: self.bind(value(*(getattr(one, "_value", one) for one in given)))
        if isinstance(value, types.FunctionType) and value.__module__.split(".")[0] in PACKAGES:
            return self._made.get(value) or self._copy(value)
        return value

    def bind_meaning(self, meaning):
        """What stands for a function may itself be one of the project's."""
        own = isinstance(meaning, types.FunctionType) and meaning.__module__.split(".")[0] in PACKAGES
        return self._function(meaning) if own else meaning

    def _copy(self, function):
        scope = {"__builtins__": function.__globals__["__builtins__"]}
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        copy = types.FunctionType(self._code(function.__code__), scope, function.__name__, function.__defaults__, cells)
        copy.__kwdefaults__, self._made[function] = function.__kwdefaults__, copy  # it may call itself
        for name in names_in(function.__code__) & function.__globals__.keys():
            scope[name] = self._looked_up(name, function.__globals__[name])
        for name, cell, own in zip(function.__code__.co_freevars, cells, function.__closure__ or (), strict=True):
            cell.cell_contents = self._looked_up(name, own.cell_contents)
        return copy

    def _code(self, code):
        """A function's code, with wrong literals where there are any."""
        return code.replace(co_consts=tuple(map(self._literal, code.co_consts)))

    def _literal(self, value):
        for literal, change in self._fault.items():
            if type(value) is type(literal) and value == literal:
                self.changed += 1
                return change(value)
        return value

    def _looked_up(self, name, value):
        """What a name of a module or a closure stands for."""
        if name in self._fault:
            self.changed += 1
            return self._fault[name](value)
        return self.bind(value)


def names_in(code):
    """The names that a function and those defined in it look up."""
    inner = [names_in(one) for one in code.co_consts if isinstance(one, types.CodeType)]
    return set(code.co_names).union(*inner)
