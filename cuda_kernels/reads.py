"""What a thread loads and computes before anything is cast: eight or sixteen float32 in its registers.

    read = make_read(values, whole, target)             read(source, row, column, left) -> eight neighbours of a row
    read = make_read_sixteen(values, whole, target)     the same -> sixteen, as two vectors
    read = make_read_halves(values, whole, target)      of a gated gradient: (eight of the act half, eight of the gate)

`values` is an `operands.Values`, `source` an `operands.Inputs`. What `left` and `whole` mean, `vectors` says: outside
the matrix nothing is loaded, and from the `left`-th element on the results are zeros, so that they count in no maximum
and in no sum. Nothing is rounded here; `vectors.make_round` does where TE rounds before it casts.

    identity            x
    activation          f(x)
    gated               f(act) * h(gate)                                    x is [act | gate], 2 * width wide
    gradient            f'(x) * dy
    gated gradient      (f'(act) * dy) * h(gate)                            columns 0 to width of the gradient
                        (h'(gate) * dy) * f(act)                            columns width to 2 * width

h is the gate function of the activation, in most of them the identity. The order of operations is that of
TransformerEngine's (TE's) `vectorized_pointwise.h`; with row scales that of `scaled_activation.cu`. In functions of one
element `p` is `source`, which holds the activation's parameters; `skip` is how many elements after `column` the eight
begin (8 for the second vector of a thread that has two).
"""

from functools import cache

import numpy as np

from cuda_kernels import casts
from cuda_kernels.formulas import fast_forms, fast_gradients, fast_product, functions_of
from cuda_kernels.operands import FAST, Inputs, Kind, described
from cuda_kernels.pairs import fast_words, has_pairs
from cuda_kernels.simt import I32, I64, F, device, select
from cuda_kernels.vectors import (
    VECTOR,
    ZEROS,
    by_element,
    make_load,
    make_map,
    make_map2,
    make_map3,
    make_map3_to_two,
    make_map_of_pairs,
    map2_for,
    map3_to_two_for,
    multiply_for,
    product_for,
    products,
)
from refops.activations import ACTIVATIONS, bind_activation

ONE, ZERO = F(1), F(0)


def described_source(values):
    """The description of the `Inputs` that `values` are read from."""
    x = casts.carrier(values.storage)
    return described(Inputs, x=x, dy=x)


# --- reads ------------------------------------------------------------------------------------------


@cache
def make_read(values, whole, target, skip=0):
    """Return `read(source, row, column, left)`: eight values of a row, from `skip` after `column` on.

    Whole rows alone can skip, and of those not the gradient of a gated activation.
    """
    computed = _make_computed(values, whole, target, skip)
    if zeros_stay(values.activation):
        return computed
    zeros_outside = make_zeros_outside(whole)
    return device(lambda source, row, column, left: zeros_outside(computed(source, row, column, left), left))


def _make_computed(values, whole, target, skip):
    """`make_read`, but from the `left`-th on the results are what the activation makes of zeros."""
    if values.kind is Kind.IDENTITY:
        return _identity(values.storage, whole, skip)
    if values.kind is Kind.FORWARD:
        read = (_gated if values.gated else _unary)(values, whole, target, skip)
        return _scaled(read, target) if values.row_scaled else read
    if not values.gated:
        return _gradient(values, whole, target, skip)
    return _gated_gradient(values, target) if whole else _guarded_gated_gradient(values, target)


@cache
def make_read_sixteen(values, whole, target):
    """Return `read(source, row, column, left)`: sixteen values of a row, as two vectors."""
    first = make_read(values, whole, target)
    in_two_places = not whole or (values.kind is Kind.BACKWARD and values.gated)

    @device
    def two_places(source, row, column, left):
        return first(source, row, column, left), first(source, row, I32(column + VECTOR), I32(left - VECTOR))

    if in_two_places:
        return two_places
    second = make_read(values, whole, target, VECTOR)
    return device(
        lambda source, row, column, left: (first(source, row, column, left), second(source, row, column, left))
    )


@cache
def make_read_halves(values, whole, target, skip=0):
    """Return `read(source, row, column, left)`: both halves of a gated gradient at `column` of each, from one read."""
    computed = _make_computed_halves(values, whole, target, skip)
    if zeros_stay(values.activation):
        return computed
    zeros_outside = make_zeros_outside(whole)

    @device
    def read(source, row, column, left):
        act, gate = computed(source, row, column, left)
        return zeros_outside(act, left), zeros_outside(gate, left)

    return read


def _make_computed_halves(values, whole, target, skip):
    """`make_read_halves`, but from the `left`-th on the results are what the gradient makes of zeros."""
    load, halves = make_load(values.storage, whole, skip), make_halves(values.storage, whole, False, skip)
    gradients = gradients_map(values.activation, values.arithmetic, target)

    @device
    def read(source, row, column, left):
        act, gates = halves(source, row, column, left)
        dy = load(source.dy, (row, source.width, column), left)
        return gradients(act, gates, dy, source)

    return read


@cache
def make_read_sixteen_of_halves(values, target):
    """Return `read(source, row, column, left)`: (sixteen of the act half, sixteen of the gate), of whole rows."""
    first, second = make_read_halves(values, True, target), make_read_halves(values, True, target, VECTOR)

    @device
    def read(source, row, column, left):
        act, gate = first(source, row, column, left)
        act_further, gate_further = second(source, row, column, left)
        return (act, act_further), (gate, gate_further)

    return read


def _identity(storage, whole, skip):
    load = make_load(storage, whole, skip)
    return device(lambda source, row, column, left: load(source.x, (row, source.width, column), left))


def _unary(values, whole, target, skip):
    load, function = make_load(values.storage, whole, skip), value_map(values.activation, values.arithmetic, target)

    @device
    def read(source, row, column, left):
        return function(load(source.x, (row, source.width, column), left), source)

    return read


def _gated(values, whole, target, skip):
    function = gated_map(values.activation, values.arithmetic, target)
    halves = make_halves(values.storage, whole, values.interleaved, skip)

    @device
    def read(source, row, column, left):
        act, gates = halves(source, row, column, left)
        return function(act, gates, source)

    return read


def _scaled(read, target):
    """`read` with each row multiplied by its scale.

    Outside the matrix a zero becomes NaN where the scale is not finite: no maximum counts it, and nobody sums these.

    It multiplies in pairs: scaled swiglu in bfloat16 on sm_100a then has 4.66 instructions per byte, and 4.74 without
    pairs. The limit is 4.7.
    """
    multiply = multiply_for(target)

    @device
    def scaled(source, row, column, left):
        factor = source.row_scales[row] if left > 0 else ONE
        return multiply(read(source, row, column, left), factor)

    return scaled


def _gradient(values, whole, target, skip):
    load, function = make_load(values.storage, whole, skip), gradient_map(values.activation, values.arithmetic, target)

    @device
    def read(source, row, column, left):
        place = row, source.width, column
        return function(load(source.x, place, left), load(source.dy, place, left), source)

    return read


def _gated_gradient(values, target):
    """Of rows whose halves are whole vectors: each is of one half."""
    halves = _make_computed_halves(values, True, target, 0)

    @device
    def read(source, row, column, left):
        in_act = column < source.width
        column = select(in_act, column, I32(column - source.width))
        if in_act:
            return halves(source, row, column, left)[0]
        return halves(source, row, column, left)[1]

    return read


def _guarded_gated_gradient(values, target):
    """Of any width: a vector may reach across the middle, so each element finds its place."""
    gradients = gradients_map(values.activation, values.arithmetic, target)
    widen = casts.STORAGES[values.storage].widen

    @device
    def wrapped(pointer, place, k, left):
        first, column, width = place
        c = column + k
        return widen(pointer[first + (c if c < width else c - width)]) if k < left else ZERO

    load = by_element(wrapped)

    @device
    def read(source, row, column, left):
        width = source.width
        act = load(source.x, (I64(row) * (2 * width), column, width), left)
        gate = load(source.x, (I64(row) * (2 * width) + width, column, width), left)
        dy = load(source.dy, (I64(row) * width, column, width), left)
        act_part, gate_part = gradients(act, gate, dy, source)
        return join(act_part, gate_part, width - column)

    return read


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


# --- outside the matrix -----------------------------------------------------------------------------


@cache
def zeros_stay(name):
    """Whether an activation and its gradients are 0 where x and dy are, whatever its parameters; None: the identity.

    Where a parameter may be any number, they may be something else: an infinite `alpha` makes NaN of zeros, a negative
    `limit` another number.
    """
    if name is None:
        return True
    bound, zero = bind_activation(name, {}), np.zeros(1, np.float32)
    x = (zero, zero) if bound.gated else (zero,)
    results = np.append(bound.forward(*x), bound.backward(zero, *x))
    return all(p.positive for p in ACTIVATIONS[name].declared) and not results.any()


@cache
def make_zeros_outside(whole):
    """Return `zeros_outside(v, left)`: eight numbers, but zeros from the `left`-th on."""
    if not whole:
        return device(lambda v, left: join(v, ZEROS, left))
    all_or_none = make_map(device(lambda x, inside: select(inside, x, ZERO)))
    return device(lambda v, left: all_or_none(v, left > 0))


# --- the halves of a gated row ----------------------------------------------------------------------


@cache
def make_halves(storage, whole, interleaved, skip=0):
    """Return `halves(source, row, column, left)`: the activated values and the gates at output `column`."""
    load, columns = make_load(storage, whole, skip), make_columns(interleaved)

    @device
    def halves(source, row, column, left):
        stride, (act, gate) = I32(2 * source.width), columns(source, column)
        return load(source.x, (row, stride, act), left), load(source.x, (row, stride, gate), left)

    return halves


@cache
def make_columns(interleaved):
    """Return `columns(source, column)`: where a row of x has the activated value, and the gate, of output `column`."""

    @device
    def contiguous(source, column):
        return column, I32(column + source.width)

    @device
    def alternating(source, column):
        g = source.interleave
        first = I32(column // g * (2 * g) + column % g)
        return first, I32(first + g)

    return alternating if interleaved else contiguous


# --- formulas of eight ------------------------------------------------------------------------------

# Accurate ones map a function of one element. Fast ones are on pairs of float32, one instruction for two, where a card
# has them (`pairs`); but for row scales that is the one place where pairs are: instructions a byte of activation ->
# MXFP8 on sm_100a without and with them, for a limit of 4.7: gelu 4.97 and 3.98, silu 5.28 and 4.29, situglu 9.40 and
# 6.37.


def part_map(function, part, name, arithmetic, target):
    """Return `mapped(v, source)`: a function of an activation, the "value" or the "gate", of eight."""
    fast = fast_forms(function, fast_words(target)) if arithmetic == FAST and has_pairs(target) else None
    return make_map_of_pairs(fast.value) if fast else make_map(getattr(functions_of(name, arithmetic), part))


def value_map(name, arithmetic, target):
    """Return `mapped(act, source)`: eight f(act)."""
    return part_map(ACTIVATIONS[name].act, "value", name, arithmetic, target)


def gated_map(name, arithmetic, target):
    """Return `mapped(act, gates, source)`: eight f(act) * gate(gate)."""
    fused = fast_product(name, fast_words(target)) if arithmetic == FAST else None
    if fused is not None:
        return map2_for(target)(fused)
    values = value_map(name, arithmetic, target)
    gates_of = part_map(ACTIVATIONS[name].gate, "gate", name, arithmetic, target)
    return device(lambda act, gates, p: products(values(act, p), gates_of(gates, p), p))


def gradient_map(name, arithmetic, target):
    """Return `mapped(x, dy, source)`: eight f'(x) * dy."""
    fast, product = arithmetic == FAST and fast_forms(ACTIVATIONS[name].act, fast_words(target)), product_for(target)
    if fast:
        slope = fast.slope
        return map2_for(target)(device(lambda x, dy, p: product(slope(x, p), dy)))
    derivative = functions_of(name, arithmetic).derivative
    return make_map2(device(lambda x, dy, p: derivative(x, p) * dy))


def gradients_map(name, arithmetic, target):
    """Return `mapped(act, gate, dy, p)`: both parts of a gated gradient of eight, in TE's order unless fast."""
    fused = fast_gradients(name, fast_words(target)) if arithmetic == FAST else None
    if fused is not None:
        return map3_to_two_for(target)(fused)
    f = functions_of(name, arithmetic)
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
