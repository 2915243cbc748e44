"""Prologues: what a thread loads and computes before anything is cast. Eight output values in registers.

A prologue is `prologue(inputs, row, column, valid)`: the float32 values of the result in `row` from `column` on, zeros
from the `valid`-th (valid <= 0: nothing is loaded). `inputs` is an `operands.Inputs`. Nothing is rounded here;
`vectors.make_round` does where TE rounds before it casts.

    identity            x
    unary               f(x)
    gated               f(act) * gate(gate)                                 x is [act | gate], 2 * width wide
    unary_gradient      f'(x) * dy
    both_gradients      (f'(act) * dy) * gate(gate)                         columns 0 to width of the gradient
                        (gate'(gate) * dy) * f(act)                         columns width to 2 * width
    pair_of_gradients   both of these from one read
    codes               the values of codes as they are, one a byte

`storage` is the dtype of what is read, `whole` says that rows are whole aligned vectors (see `vectors`), `skip` how
many elements after `column` the eight begin (8 for the second vector of a thread that has two); `p` in the functions of
one element is `inputs`, which holds the activation's parameters.

The order of operations is that of TE's `vectorized_pointwise.h`; with row scales that of `scaled_activation.cu`.
"""

from functools import cache

from cuda_kernels import casts
from cuda_kernels.formulas import fast_forms, fast_gradients, fast_product, functions_of, scaled_functions_of
from cuda_kernels.pairs import fast_words, has_pairs
from cuda_kernels.simt import I32, I64, F, device, offset, select
from cuda_kernels.vectors import (
    by_element,
    make_load,
    make_load_codes,
    make_map,
    make_map2,
    make_map3,
    make_map3_to_two,
    make_map_of_pairs,
    map2_for,
    map3_to_two_for,
    multiply,
    product_for,
    products_for,
)
from refops.activations import ACTIVATIONS

ONE, ZERO = F(1), F(0)


def identity(storage, whole, skip=0):
    """Return the prologue that gives x itself."""
    load = make_load(storage, whole, skip)

    @device
    def prologue(inputs, row, column, valid):
        return load(inputs.x, (row, inputs.width, column), valid)

    return prologue


def map_of(part, name, fast_math, target):
    """Return `mapped(v, inputs)`: the "value" or "gate" of an activation of eight, on pairs where that is written."""
    function = ACTIVATIONS[name].act if part == "value" else ACTIVATIONS[name].gate
    fast = fast_forms(function, fast_words(target)) if fast_math and has_pairs(target) else None
    return make_map_of_pairs(fast.value) if fast else make_map(getattr(functions_of(name, fast_math=fast_math), part))


def unary(name, storage, whole, fast_math, skip=0, target=None):
    """Return the prologue f(x)."""
    load, values = make_load(storage, whole, skip), map_of("value", name, fast_math, target)

    @device
    def prologue(inputs, row, column, valid):
        return values(load(inputs.x, (row, inputs.width, column), valid), inputs)

    return prologue


@cache
def make_halves(storage, whole, interleaved, skip=0):
    """Return `halves(inputs, row, column, valid)`: the activated values and the gates at output `column`."""
    load = make_load(storage, whole, skip)

    @device
    def contiguous(inputs, row, column, valid):
        stride, second = I32(2 * inputs.width), I32(column + inputs.width)
        return load(inputs.x, (row, stride, column), valid), load(inputs.x, (row, stride, second), valid)

    @device
    def alternating(inputs, row, column, valid):
        g, stride = inputs.interleave, I32(2 * inputs.width)
        first = I32(column // g * (2 * g) + column % g)
        return load(inputs.x, (row, stride, first), valid), load(inputs.x, (row, stride, I32(first + g)), valid)

    return alternating if interleaved else contiguous


def gated(name, storage, whole, fast_math, interleaved=False, skip=0, target=None):
    """Return the prologue f(act) * gate(gate)."""
    gated_values, halves = gated_map(name, fast_math, target), make_halves(storage, whole, interleaved, skip)

    @device
    def prologue(inputs, row, column, valid):
        act, gates = halves(inputs, row, column, valid)
        return gated_values(act, gates, inputs)

    return prologue


def gated_map(name, fast_math, target):
    """Return `mapped(act, gates, inputs)`: eight f(act) * gate(gate)."""
    fused = fast_product(name, fast_words(target)) if fast_math else None
    if fused is not None:
        return map2_for(target)(fused)
    values, gates_of = map_of("value", name, fast_math, target), map_of("gate", name, fast_math, target)
    products = products_for(target)
    return device(lambda act, gates, p: products(values(act, p), gates_of(gates, p), p))


def unary_gradient(name, storage, whole, fast_math, skip=0, target=None):
    """Return the prologue f'(x) * dy."""
    load, products = make_load(storage, whole, skip), unary_gradient_map(name, fast_math, target)

    @device
    def prologue(inputs, row, column, valid):
        place = row, inputs.width, column
        return products(load(inputs.x, place, valid), load(inputs.dy, place, valid), inputs)

    return prologue


def unary_gradient_map(name, fast_math, target):
    """Return `mapped(x, dy, inputs)`: eight f'(x) * dy."""
    fast, product = fast_math and fast_forms(ACTIVATIONS[name].act, fast_words(target)), product_for(target)
    if fast:
        slope = fast.slope
        return map2_for(target)(device(lambda x, dy, p: product(slope(x, p), dy)))
    derivative = functions_of(name, fast_math=fast_math).derivative
    return make_map2(device(lambda x, dy, p: derivative(x, p) * dy))


def gradients_map(name, fast_math, target):
    """Return `mapped(act, gate, dy, p)`: both parts of a gated gradient of eight, in TE's order unless fast."""
    fused = fast_gradients(name, fast_words(target)) if fast_math else None
    if fused is not None:
        return map3_to_two_for(target)(fused)
    f = functions_of(name, fast_math=fast_math)
    value, derivative, both, gate, slope = f
    if both is None:
        act_parts = make_map3(device(lambda act, g, dy, p: (derivative(act, p) * dy) * gate(g, p)))
        gate_parts = make_map3(device(lambda act, g, dy, p: (slope(g, p) * dy) * value(act, p)))
        return device(lambda act, g, dy, p: (act_parts(act, g, dy, p), gate_parts(act, g, dy, p)))

    @device
    def parts(act, g, dy, p):
        value, derivative = both(act, p)
        return (derivative * dy) * gate(g, p), (slope(g, p) * dy) * value

    return make_map3_to_two(parts)


def pair_of_gradients(name, storage, whole, fast_math, skip=0, target=None):
    """Return the prologue that gives both halves of a gated gradient at `column`: (act part, gate part)."""
    load, halves = make_load(storage, whole, skip), make_halves(storage, whole, False, skip)
    gradients = gradients_map(name, fast_math, target)

    @device
    def prologue(inputs, row, column, valid):
        act, gates = halves(inputs, row, column, valid)
        dy = load(inputs.dy, (row, inputs.width, column), valid)
        return gradients(act, gates, dy, inputs)

    return prologue


def both_gradients(name, storage, whole, fast_math, target=None):
    """Return the prologue of the whole gated gradient, 2 * width wide."""
    if not whole:
        return guarded_gradients(name, storage, fast_math, target)
    load, halves = make_load(storage, whole), make_halves(storage, whole, False)
    gradients = gradients_map(name, fast_math, target)

    @device
    def prologue(inputs, row, column, valid):
        in_act = column < inputs.width
        column = select(in_act, column, I32(column - inputs.width))
        act, gates = halves(inputs, row, column, valid)
        dy = load(inputs.dy, (row, inputs.width, column), valid)
        if in_act:
            return gradients(act, gates, dy, inputs)[0]
        return gradients(act, gates, dy, inputs)[1]

    return prologue


def guarded_gradients(name, storage, fast_math, target=None):
    """Return `both_gradients` for any width: a vector may reach across the middle, so each element finds its place."""
    gradients = gradients_map(name, fast_math, target)
    widen = casts.STORAGES[storage].widen

    @device
    def wrapped(pointer, place, k, valid):
        first, column, width = place
        c = column + k
        return widen(pointer[first + (c if c < width else c - width)]) if k < valid else ZERO

    load = by_element(wrapped)

    @device
    def prologue(inputs, row, column, valid):
        width = inputs.width
        act = load(inputs.x, (I64(row) * (2 * width), column, width), valid)
        gate = load(inputs.x, (I64(row) * (2 * width) + width, column, width), valid)
        dy = load(inputs.dy, (I64(row) * width, column, width), valid)
        act_part, gate_part = gradients(act, gate, dy, inputs)
        return join(act_part, gate_part, width - column)

    return prologue


@device
def join(first, second, left):
    """The elements of `first` before the `left`-th, those of `second` from there."""
    return (
        select(left > 0, first[0], second[0]),
        select(left > 1, first[1], second[1]),
        select(left > 2, first[2], second[2]),
        select(left > 3, first[3], second[3]),
        select(left > 4, first[4], second[4]),
        select(left > 5, first[5], second[5]),
        select(left > 6, first[6], second[6]),
        select(left > 7, first[7], second[7]),
    )


def scaled(prologue):
    """Return `prologue` with each row multiplied by its scale."""

    @device
    def scaled_prologue(inputs, row, column, valid):
        factor = inputs.row_scales[row] if valid > 0 else ONE
        return multiply(prologue(inputs, row, column, valid), factor)

    return scaled_prologue


# --- gradients with row scales ----------------------------------------------------------------------


@cache
def make_scaled_gradient(name, fast_math):
    """Return (d_act, d_gate): functions of (act, gate, scaled dy, p) in the order of TE's scaled kernels.

    It is not that of the plain kernels: dy * (f' * gate) and dy * (f * gate'), and some slopes are factored otherwise.
    """
    value, derivative, _, gate, slope = scaled_functions_of(name, fast_math=fast_math)
    if gate is None:
        return device(lambda act, g, dy, p: dy * derivative(act, p)), None
    return (
        device(lambda act, g, dy, p: dy * (derivative(act, p) * gate(g, p))),
        device(lambda act, g, dy, p: dy * (value(act, p) * slope(g, p))),
    )


@cache
def make_forward_product(name, fast_math):
    """Return the function of (act, gate, dy, p): dy times the unscaled activation."""
    f = functions_of(name, fast_math=fast_math)
    value, gate = f.value, f.gate
    if gate is None:
        return device(lambda act, g, dy, p: dy * value(act, p))
    return device(lambda act, g, dy, p: dy * (value(act, p) * gate(g, p)))


@cache
def make_single(storage, whole):
    """As `make_halves` for unary activations: x twice."""
    load = make_load(storage, whole)

    @device
    def single(inputs, row, column, valid):
        v = load(inputs.x, (row, inputs.width, column), valid)
        return v, v

    return single


# --- codes as they are ------------------------------------------------------------------------------


def codes(fmt):
    """Return the prologue of codes as they are, one a byte."""
    load = make_load_codes(fmt, packed=False)

    @device
    def prologue(inputs, row, column, valid):
        return load(inputs.x, offset(row, inputs.width, column), valid)

    return prologue
