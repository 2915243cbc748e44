"""The formulas of `refops.activations`, compiled: scalar float32 functions for GPU, CPU and simulator.

The text of a formula is in its declaration; here its words are bound to device functions. In which arithmetic
(`operands.ARITHMETICS`) decides what the words are:

    accurate    CUDA's expf and tanhf and the correctly rounded reciprocal, as in TE's default build.
    exact       exp, tanh and division correctly rounded, and no product and sum contracted into a multiply-add: every
                function has the bits of `refops`, on every machine.
    fast        a function has the form that its declaration has for approximate units (see `fast`), which stays within
                8 ulp of float32 (`oracle.check(..., ulp=8)`), except that a sigmoid below 2^-126 (of x < -87.3) is 0;
                one without such a form stays accurate.

But for exact ones a compiler may contract a product and a sum on a GPU; off the GPU none is.

Every function is of (x, p): a number, and a tuple that has the activation's parameters as fields.
"""

from collections import namedtuple
from functools import cache
from types import FunctionType

import refops.activations
from cuda_kernels import elementary, operands
from cuda_kernels.declared import device_of
from cuda_kernels.elementary import exp, reciprocal, tanh
from cuda_kernels.fast import FAST_NUMBERS
from cuda_kernels.simt import F, at_least, at_most, device, maximum, select
from refops.activations import ACTIVATIONS
from refops.activations.declaration import IDENTITY, Forms, forms

ONE = F(1)
exact_exp, exact_tanh = elementary.EXACT

#: The words of `refops.activations.arithmetic`.
FormulaWords = namedtuple(
    "FormulaWords",
    "number exp tanh sigmoid sigmoid_pair tanh_pair quotient where maximum at_most at_least is_nan one_like",
)


@device
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return reciprocal(ONE + exp(-x))


def make_formula_words(exp, tanh, sigmoid):
    """Return the `FormulaWords` with these elementary functions."""

    @device
    def sigmoid_pair(x):
        s = sigmoid(x)
        return s, ONE - s

    @device
    def tanh_pair(x):
        t = tanh(x)
        return t, ONE - t * t

    return FormulaWords(
        number=F,
        exp=exp,
        tanh=tanh,
        sigmoid=sigmoid,
        sigmoid_pair=sigmoid_pair,
        tanh_pair=tanh_pair,
        quotient=device(lambda x, y: x / y),
        where=select,
        maximum=maximum,
        at_most=at_most,
        at_least=at_least,
        is_nan=device(lambda x: x != x),
        one_like=device(lambda x: ONE),
    )


@device
def exact_sigmoid(x):
    """1 / (1 + e^-x), by the division that a GPU rounds correctly."""
    return ONE / (ONE + exact_exp(-x))


ACCURATE = make_formula_words(exp, tanh, sigmoid)
EXACT = make_formula_words(exact_exp, exact_tanh, exact_sigmoid)
#: The files that list the words: those of any formula, those of fast forms.
VOCABULARY, FAST_VOCABULARY = "refops/activations/arithmetic.py", "cuda_kernels/fast.py"


def compiled(function, name, vocabulary=VOCABULARY):
    """Make a device function of a formula of `name`, and of the functions of its declaration that it calls."""
    if not hasattr(function, "is_compiled"):
        function.is_compiled = True
        for cell in function.__closure__ or ():
            part = cell.cell_contents
            if isinstance(part, FunctionType) and part.__module__.startswith(refops.activations.__name__):
                compiled(part, name, vocabulary)
        device_of(f"the formula of {name}", vocabulary, function)
    return function


@cache
def accurate_forms(function, words=ACCURATE):
    """Return the `Forms` (value, slope, both or None) of a `refops.activations.Function`, in words of formulas."""
    return Forms(*(form and compiled(form, function.name) for form in forms(function.body, words)))


@cache
def fast_forms(function, words=FAST_NUMBERS):
    """Return the `Forms` of a function as its declaration has them for approximate units; None where it has none.

    Args:
        words: `fast.FastWords`, of numbers or of pairs.
    """
    if function.fast is None:
        return None
    made = function.fast(words)
    made = made._replace(slope=made.slope or _second_of(made.both))
    return Forms(*(compiled(form, function.name, FAST_VOCABULARY) for form in made))


def _second_of(both):
    return lambda x, p: both(x, p)[1]


def forms_of(function, arithmetic):
    """Return the `Forms` of single numbers. Without an exponential the exact ones are the accurate ones."""
    if arithmetic == operands.EXACT and function.elementary:
        return accurate_forms(function, EXACT)
    return (arithmetic == operands.FAST and fast_forms(function)) or accurate_forms(function)


#: The functions of one activation, each of (x, p): value and derivative of x, both (or None), gate and its slope (None
#: for unary).
Functions = namedtuple("Functions", "value derivative both gate gate_slope")


@cache
def functions_of(name, arithmetic=operands.ACCURATE):
    """Return the `Functions` of an activation of `refops.ACTIVATIONS`."""
    row = ACTIVATIONS[name]
    gate = forms_of(row.gate, arithmetic) if row.gated else Forms(None, None, None)
    return Functions(*forms_of(row.act, arithmetic), gate.value, gate.slope)


@cache
def scaled_functions_of(name, arithmetic=operands.ACCURATE):
    """Return the `Functions` whose slopes have the order of the kernels with a scale for each row; `both` is None."""
    row, plain = ACTIVATIONS[name], functions_of(name, arithmetic)
    words = {operands.FAST: ACCURATE._replace(sigmoid=FAST_NUMBERS.sigmoid), operands.EXACT: EXACT}.get(
        arithmetic, ACCURATE
    )
    slopes = [f.row_scaled and compiled(f.row_scaled(words), f.name) for f in row.functions] + [None]
    return plain._replace(derivative=slopes[0] or plain.derivative, both=None, gate_slope=slopes[1] or plain.gate_slope)


@cache
def scaled_gradients_of(name, arithmetic=operands.ACCURATE):
    """Return (d_act, d_gate) of an activation with a scale for each row: functions of (act, gate, scaled dy, p).

    The order is that of TE's scaled kernels, not that of the plain ones: dy * (f' * gate) and dy * (f * gate'). A unary
    activation has no gate: both are its gradient, of which `gate` is no argument that matters.
    """
    value, derivative, _, gate, slope = scaled_functions_of(name, arithmetic)
    if gate is None:
        gradient = device(lambda act, g, dy, p: dy * derivative(act, p))
        return gradient, gradient
    return (
        device(lambda act, g, dy, p: dy * (derivative(act, p) * gate(g, p))),
        device(lambda act, g, dy, p: dy * (value(act, p) * slope(g, p))),
    )


@cache
def scale_gradient_of(name, arithmetic=operands.ACCURATE):
    """Return the function of (act, gate, dy, p) whose sum over a row is the gradient of its scale: dy * f."""
    functions = functions_of(name, arithmetic)
    value, gate = functions.value, functions.gate
    if gate is None:
        return device(lambda act, g, dy, p: dy * value(act, p))
    return device(lambda act, g, dy, p: dy * (value(act, p) * gate(g, p)))


@cache
def fast_product(name, words):
    """Return the fast value of (act, gate, p) in one piece, of numbers or of pairs; None where none is declared."""
    product = ACTIVATIONS[name].product
    return product and compiled(product(words), name, FAST_VOCABULARY)


@cache
def fast_gradients(name, words):
    """Return both halves of a gated gradient of (act, gate, dy, p), of numbers or of pairs; None without fast forms."""
    row, mul = ACTIVATIONS[name], words.mul
    act = fast_forms(row.act, words)
    if act is None:
        return None
    act_both = act.both
    if row.gate is IDENTITY:

        @device
        def plain_gradients(act, g, dy, p):
            value, slope = act_both(act, p)
            return mul(mul(slope, dy), g), mul(value, dy)

        return plain_gradients
    gate = fast_forms(row.gate, words)
    if gate is None:
        return None
    gate_both = gate.both

    @device
    def gradients(act, g, dy, p):
        value, slope = act_both(act, p)
        gate_value, gate_slope = gate_both(g, p)
        return mul(mul(slope, dy), gate_value), mul(mul(gate_slope, dy), value)

    return gradients
