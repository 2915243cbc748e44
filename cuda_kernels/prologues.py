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
    decoded             codes times their scale, for dequantization

`storage` is the dtype of what is read, `whole` says that rows are whole aligned vectors (see `vectors`), `skip` how
many elements after `column` the eight begin (8 for the second vector of a thread that has two); `p` in the functions of
one element is `inputs`, which holds the activation's parameters.

The order of operations is that of TE's `vectorized_pointwise.h`; with row scales that of `scaled_activation.cu`.
"""

from functools import cache

import numpy as np

from cuda_kernels import casts
from cuda_kernels.activations import ACCURATE, ACTIVATIONS, FAST, functions_of, with_parameters
from cuda_kernels.pairs import fast_formulas, has_pairs
from cuda_kernels.simt import I32, I64, U32, F, at_most, device, load_two_words, load_words, offset, select
from cuda_kernels.vectors import (
    by_element,
    make_decode,
    make_decode_bytes,
    make_load,
    make_map,
    make_map2,
    make_map3,
    make_map3_to_two,
    make_map_of_pairs,
    map2_for,
    map3_to_two_for,
    multiply,
    multiply_for,
    product_for,
    products_for,
)

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
    row = ACTIVATIONS[name]
    formula, parameters = (row.value, row.parameters) if part == "value" else (row.gate, row.gate_parameters)
    if fast_math and has_pairs(target) and formula in fast_formulas(target):
        return make_map_of_pairs(with_parameters(fast_formulas(target)[formula], parameters))
    return make_map(getattr(functions_of(name, fast_math=fast_math), part))


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
    fused = fast_formulas(target).get(f"{name}_product") if fast_math else None
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
    fast, product = fast_formulas(target).get(f"{name}_derivative") if fast_math else None, product_for(target)
    if fast is not None:
        return map2_for(target)(device(lambda x, dy, p: product(fast(x), dy)))
    derivative = functions_of(name, fast_math=fast_math).derivative
    return make_map2(device(lambda x, dy, p: derivative(x, p) * dy))


def gradients_map(name, fast_math, target):
    """Return `mapped(act, gate, dy, p)`: both parts of a gated gradient of eight, in TE's order unless fast."""
    fused = fast_formulas(target).get(f"{name}_gradients") if fast_math else None
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

    It is not that of the plain kernels: dy * (f' * gate) and dy * (f * gate'), f' factored otherwise, and the mask of
    clamped_swiglu lets a NaN gate pass.
    """
    f = functions_of(name, fast_math=fast_math)
    derivative, value, gate, slope = _scaled_derivative(name, f, fast_math), f.value, f.gate, f.gate_slope
    if gate is None:
        return device(lambda act, g, dy, p: dy * derivative(act, p)), None
    if name == "clamped_swiglu":
        plain_slope = f.gate_slope
        slope = device(lambda g, p: select(g != g, ONE, plain_slope(g, p)))
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


def _scaled_derivative(name, functions, fast_math):
    sigmoid = (FAST if fast_math else ACCURATE)["sigmoid"]

    @device
    def silu_slope(x, p):
        s = sigmoid(x)
        return s + (x * s) * (ONE - s)

    @device
    def clamped_slope(x, p):
        z = p.alpha * at_most(x, p.limit)
        s = sigmoid(z)
        return select(x <= p.limit, s + (z * s) * (ONE - s), F(0))

    return {"swiglu": silu_slope, "clamped_swiglu": clamped_slope}.get(name, functions.derivative)


# --- dequantization: x holds codes, dy the scales as stored, row_scales the amax ---------------------


@cache
def make_load_codes(fmt, packed):
    """Return `load(pointer, i, valid)`: the float32 values of eight codes from element `i` on; `packed` two a byte."""
    decode = casts.e8m0_value if fmt == "e8m0" else casts.DECODERS[fmt]

    @device
    def byte(pointer, i, k, valid):
        return decode(np.uint32(pointer[i + k])) if k < valid else ZERO

    @device
    def nibble(pointer, i, k, valid):
        return decode(np.uint32(np.uint32(pointer[(i + k) // 2]) >> U32(4 * (k % 2))) & U32(15)) if k < valid else ZERO

    return by_element(nibble if packed else byte)


def decoded(fmt, scale_of):
    """Return the prologue of dequantization: codes times `scale_of(inputs, row, column)`; without, codes one a byte."""
    load = make_load_codes(fmt, packed=fmt == "e2m1" and scale_of is not no_scale)

    @device
    def prologue(inputs, row, column, valid):
        scale = scale_of(inputs, row, column) if valid > 0 else ONE
        return multiply(load(inputs.x, offset(row, inputs.width, column), valid), scale)

    return prologue


@device
def no_scale(inputs, row, column):
    """1: codes as they are."""
    return ONE


@device
def tensor_scale(inputs, row, column):
    """The decode scale of the whole tensor."""
    return inputs.dy[0]


@device
def row_block_scale(inputs, row, column):
    """Block scaling 1x128: [block, row]."""
    return inputs.dy[offset(column >> 7, inputs.interleave, row)]


@device
def square_block_scale(inputs, row, column):
    """Block scaling 128x128: [row block, column block]."""
    return inputs.dy[offset(row >> 7, inputs.interleave, column >> 7)]


@device
def mx_row_scale(inputs, row, column):
    """MXFP8 rowwise: [row, block]."""
    return casts.e8m0_value(np.uint32(inputs.dy[offset(row, inputs.interleave, column >> 5)]))


@cache
def make_nvfp4_scale(top, row_scaled, target=None):
    """Return NVFP4's factor: (E4M3 scale * amax) * (1 / top), `top` = 6 e4m3_max."""
    inverse, (_, decode) = ONE / F(top), casts.e4m3_for(target)

    @device
    def nvfp4_scale(inputs, row, column):
        amax = inputs.row_scales[row if row_scaled else 0]
        scale = decode(np.uint32(inputs.dy[offset(row, inputs.interleave, column >> 4)]))
        return (scale * amax) * inverse

    return nvfp4_scale


def decoded_wide(fmt, scale_of, target):
    """Return `prologue(inputs, row, column, at)`: 16 values in two vectors, from whole rows of 16; `at` is their place.

    The codes are one access, and all 16 have one scale.
    """
    decode, multiply = make_decode(fmt, target), multiply_for(target)

    @device
    def codes(x, at):
        w = load_words(x, at)
        return decode(w[0], w[1]), decode(w[2], w[3])

    @device
    def packed_codes(x, at):
        w = load_two_words(x, at >> 1)
        return decode(w[0], w[0]), decode(w[1], w[1])

    load = packed_codes if fmt == "e2m1" else codes

    @device
    def prologue(inputs, row, column, at):
        first, second = load(inputs.x, at)
        scale = scale_of(inputs, row, column)
        return multiply(first, scale), multiply(second, scale)

    return prologue


def transformed(prologue, transform):
    """Return `prologue` with a Hadamard transform of groups of 16 along the row."""

    @device
    def transformed_prologue(inputs, row, column, valid):
        return transform(prologue(inputs, row, column, valid), column % 16 == 8)

    return transformed_prologue


def decoded_mx_columns(fmt):
    """Return the prologue of MXFP8 columnwise data: [M, K] codes, scales [row block, column]."""
    load, scaled_values = make_load_codes(fmt, packed=False), make_map2(device(lambda code, scale, p: code * scale))

    @device
    def scale(inputs, place, k, valid):
        row, column = place
        i = offset(row >> 5, inputs.interleave, column + k)
        return casts.e8m0_value(np.uint32(inputs.dy[i])) if k < valid else ONE

    scales_of = by_element(scale)

    @device
    def prologue(inputs, row, column, valid):
        values = load(inputs.x, offset(row, inputs.width, column), valid)
        return scaled_values(values, scales_of(inputs, (row, column), valid), ZERO)

    return prologue


def decoded_mx_columns_wide(fmt, target):
    """Return `decoded_mx_columns` as `decoded_wide`; the scales of 16 columns are one access as well."""
    decode, decode_scales, products = (
        make_decode(fmt, target),
        make_decode_bytes(casts.e8m0_value),
        products_for(target),
    )

    @device
    def prologue(inputs, row, column, at):
        w, s = load_words(inputs.x, at), load_words(inputs.dy, offset(row >> 5, inputs.interleave, column))
        first = products(decode(w[0], w[1]), decode_scales(s[0], s[1]), ZERO)
        return first, products(decode(w[2], w[3]), decode_scales(s[2], s[3]), ZERO)

    return prologue
