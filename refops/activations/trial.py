"""A trial of a formula when it is declared: it runs once on numbers that refuse what kernels cannot take.

NumPy runs more than the vocabulary has: a Python literal, which makes float64 of a kernel's float32 without a word, and
a Python `if`, which fails only on arrays. `require_formula` refuses both, with the line that has it.
"""

from collections import namedtuple
from numbers import Real
from traceback import walk_tb

import numpy as np
from numpy.lib import mixins

from refops.activations.arithmetic import REFERENCE, F
from refops.arguments import shown

#: Arguments of a trial; which numbers they are does not matter.
SAMPLE = np.array((-0.5, 0.5), F)


class _RefusedError(Exception):
    """What a formula did, as the end of a sentence."""


def _array_of(value):
    """The array of an operand."""
    if isinstance(value, _Number):
        return value.array
    if isinstance(value, np.floating) and value.dtype == F:
        return value
    if not isinstance(value, Real):
        raise _RefusedError(f"must compute with numbers of the vocabulary; got {shown(value)}")
    rule = f"must name its constants, such as c = words.number({value!r}) in the factory"
    raise _RefusedError(f"{rule}; got {value!r}, which a kernel takes for a float64 or an integer")


def _numbers(result):
    """What a word or an operator gave, as numbers."""
    return tuple(map(_Number, result)) if isinstance(result, tuple) else _Number(result)


class _Number(mixins.NDArrayOperatorsMixin):
    """A number or a condition with the operators of NumPy, whose other operand must be one too, or a float32."""

    def __init__(self, array):
        self.array = array

    def __array_ufunc__(self, ufunc, method, *operands, **options):
        return _numbers(getattr(ufunc, method)(*map(_array_of, operands), **options))

    def __bool__(self):
        rule = "must choose by where(condition, a, b), maximum, at_most or at_least, because x is an array"
        raise _RefusedError(f"{rule}; got a branch of Python: if, while, and, or, not, max or min")


class _Words:
    """The vocabulary of a trial: the reference's words, for numbers that refuse."""

    def __getattr__(self, word):
        meaning = getattr(REFERENCE, word)
        if word == "number":
            return lambda c: _Number(meaning(c))
        return lambda *arguments: _numbers(meaning(*map(_array_of, arguments)))


def require_formula(name, form, factory, parameters):
    """Raise unless what a factory makes can be compiled: it has no literal and no branch.

    Args:
        name, form: the function's name, and which of its factories this is, as an error names them.
        factory: returns, for a vocabulary, one function, (value, slope) or (shared, value, slope).
        parameters: name -> number of what it reads of `p`.

    Raises:
        ValueError: with the rule, the file and the line of the formula.
    """
    p = namedtuple("Parameters", parameters)(*(_Number(F(value)) for value in parameters.values()))
    function = factory
    try:
        with np.errstate(all="ignore"):
            made = factory(_Words())
            functions = made if isinstance(made, tuple) else (made,)
            shared = (functions[0](_Number(SAMPLE), p),) if len(functions) == 3 else ()
            for function in functions[len(shared) :]:
                _array_of(function(_Number(SAMPLE), p, *shared))
    except _RefusedError as error:
        raise ValueError(f"{form} of {name} {error} ({_place_of(error, function)})") from None


def _place_of(error, function):
    """File and line of the formula where it was refused, or of the function if that is its result."""
    place = function.__code__.co_filename, function.__code__.co_firstlineno
    for frame, line in list(walk_tb(error.__traceback__))[1:]:
        if frame.f_globals is globals() or frame.f_globals is vars(mixins):
            break
        place = frame.f_code.co_filename, line
    return "{}, line {}".format(*place)
