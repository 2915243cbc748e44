"""Epilogues: how eight values in registers are scaled, cast and stored.

An epilogue is `epilogue(values, block_amax, out, outer, inner, valid)`: `values` are the elements of row `outer` from
`inner` on, `valid` of them inside the matrix; `block_amax` is the largest magnitude of their block, the same in every
thread that shares it; `out` is an `operands.Outputs`. A columnwise copy that is stored transposed goes through the same
epilogue with rows and columns exchanged.

`Epilogue` names what a kernel must know: how many threads along the row share a block, whether the block is a square.
How a scale follows from an amax is the scaling's own rule (`scale_rules`); where it lies, its `directions.Direction`.
"""

from collections import namedtuple
from functools import cache

import numpy as np

from cuda_kernels import casts
from cuda_kernels.simt import (
    I32,
    I64,
    U32,
    F,
    as_f32,
    as_i32,
    atomic_max,
    cuda,
    device,
    load_two_words,
    offset,
    ptx,
    select,
    store_words,
    store_words_if,
)
from cuda_kernels.vectors import VECTOR, WARP, ZERO, amax, amax_with, make_map, make_store, multiply_for

#: store       the epilogue function
#: lanes       threads along a row whose vectors make one block; 0: no block amax is needed
#: block_rows  rows of a block, 1 unless it is a square
Epilogue = namedtuple("Epilogue", "store lanes block_rows")


# --- storing codes ----------------------------------------------------------------------------------


@cache
def make_store_codes(fmt, packed, whole, target):
    """Return `store(v, pointer, (row, stride, column), valid)`: eight codes, one a byte or (`packed`, FP4) two."""
    if packed:
        return _make_store_packed(casts.pairs_for(fmt, target), casts.eights_for(target), whole)
    if fmt == "e2m1":
        pair = casts.make_pair(casts.ENCODERS[fmt], 8)
        return _make_store_bytes(pair, casts.make_quad(pair, 16), whole)
    return _make_store_bytes(casts.pairs_for(fmt, target), casts.quads_for(fmt, target), whole)


def _make_store_bytes(pair, word, whole):
    @device
    def store_whole(v, pointer, place, valid):
        words = word(v[0], v[1], v[2], v[3]), word(v[4], v[5], v[6], v[7])
        store_words_if(valid > 0, pointer, place[0], place[1], place[2], words)

    @device
    def store_guarded(v, pointer, place, valid):
        i = offset(place[0], place[1], place[2])
        for k in range(VECTOR):
            if k < valid:
                pointer[i + k] = np.uint8(pair(v[k], ZERO) & np.uint16(0xFF))

    return store_whole if whole else store_guarded


def _make_store_packed(pair, word, whole):
    """Rows are whole vectors, so `valid` is 0 or 8; guarded means an address that may be unaligned."""

    @device
    def store_whole(v, pointer, place, valid):
        if valid > 0:
            store_words(pointer, offset(place[0], place[1], place[2]) >> 1, (word(v),))

    @device
    def store_guarded(v, pointer, place, valid):
        if valid > 0:
            i = offset(place[0], place[1], place[2]) >> 1
            for k in range(VECTOR // 2):
                pointer[i + k] = np.uint8(pair(v[2 * k], v[2 * k + 1]) & np.uint16(0xFF))

    return store_whole if whole else store_guarded


# --- scales -----------------------------------------------------------------------------------------


@cache
def make_scales(direction, target):
    """Return `scales(block_amax, out, outer, valid)`: what is stored for a block, and the multiplier of its elements.

    `given` holds what the tensor's blocks share, or those of an outer index.
    """
    rules = direction.rules(target)
    rule, parts, by_outer = rules.block_scale, rules.parts, direction.by_outer

    @device
    def alone(block_amax, out, outer, valid):
        return rule(block_amax, ZERO, out)

    @device
    def under_one(block_amax, out, outer, valid):
        i = I64(outer) if by_outer and valid > 0 else I64(0)
        return rule(block_amax, out.given[i], out)

    @device
    def under_two(block_amax, out, outer, valid):
        i = offset(outer, I32(2), I32(0)) if by_outer and valid > 0 else I64(0)
        first, second = load_two_words(out.given, i)
        return rule(block_amax, (as_f32(first), as_f32(second)), out)

    return {0: alone, 1: under_one, 2: under_two}[parts]


@cache
def make_put_scale(direction):
    """Return `put(stored, out, outer, inner, valid)`: store a scale where (outer, inner) begins a block."""
    (rows, columns), index, kind = direction.layout.run, direction.scale_index, direction.scale_type
    row_bits, column_bits = rows.bit_length() - 1, columns.bit_length() - 1

    @device
    def put(stored, out, outer, inner, valid):
        if valid > 0 and (inner & (columns - 1)) == 0 and (outer & (rows - 1)) == 0:
            out.scales[index(out.scale_stride, outer >> row_bits, inner >> column_bits)] = kind(stored)

    @device
    def put_of_row(stored, out, outer, inner, valid):
        if valid > 0 and (inner & (columns - 1)) == 0:
            out.scales[index(out.scale_stride, outer, inner >> column_bits)] = kind(stored)

    return put if rows > 1 else put_of_row


@cache
def make_put_block(direction):
    """Return `put(stored, out, outer, inner)`: store the scale of the block of a row that (outer, inner) begins."""
    index, kind, bits = direction.scale_index, direction.scale_type, direction.block[1].bit_length() - 1

    @device
    def put(stored, out, outer, inner):
        out.scales[index(out.scale_stride, outer, inner >> bits)] = kind(stored)

    return put


@cache
def make_put_column_scales(direction):
    """Return `put(stored, out, row, column, valid)`: the scale of a square, of data that are stored along the rows.

    It is stored for each of the eight columns, if the layout repeats it, else once for the square.
    """
    (repeated, _), (_, edge) = direction.layout.run, direction.block
    index, kind, bits = direction.scale_index, direction.scale_type, edge.bit_length() - 1

    @device
    def put_each(stored, out, row, column, valid):
        if (row & (edge - 1)) == 0:
            for k in range(VECTOR):
                if k < valid:
                    out.scales[index(out.scale_stride, column + k, row >> bits)] = kind(stored)

    @device
    def put_once(stored, out, row, column, valid):
        if valid > 0 and (row & (edge - 1)) == 0 and (column & (edge - 1)) == 0:
            out.scales[index(out.scale_stride, column >> bits, row >> bits)] = kind(stored)

    return put_each if repeated == 1 else put_once


# --- epilogues --------------------------------------------------------------------------------------


def plain(storage, whole, target):
    """Store values in a dtype, unscaled."""
    store_values = make_store(storage, whole, target)

    @device
    def store(values, block_amax, out, outer, inner, valid):
        store_values(values, out.data, offset(outer, out.inner, inner), valid)

    return Epilogue(store, 0, 1)


def nothing():
    """Store nothing: for kernels that only sum."""

    @device
    def store(values, block_amax, out, outer, inner, valid):
        pass

    return Epilogue(store, 0, 1)


def record_amax(lanes, by_outer=False):
    """Raise `amax` to the largest magnitude: the tensor's, or (`by_outer`) the row's.

    Args:
        lanes: threads that share one atomic operation; with `by_outer` they must be of one row.
    """

    @device
    def store(values, block_amax, out, outer, inner, valid):
        if (cuda.threadIdx.x & (lanes - 1)) == 0 and valid > 0:
            atomic_max(out.amax, outer if by_outer else 0, as_i32(block_amax))

    return Epilogue(store, lanes, 1)


def recording(epilogue, lanes):
    """Return `epilogue`, which needs no block amax, with the tensor's amax recorded beside it."""
    store_values, record = epilogue.store, record_amax(lanes).store

    @device
    def store(values, block_amax, out, outer, inner, valid):
        record(values, block_amax, out, outer, inner, valid)
        store_values(values, block_amax, out, outer, inner, valid)

    return Epilogue(store, lanes, 1)


def codes(fmt, whole, target):
    """Store codes of the values as they are, one a byte."""
    store_codes = make_store_codes(fmt, False, whole, target)

    @device
    def store(values, block_amax, out, outer, inner, valid):
        store_codes(values, out.data, (outer, out.inner, inner), valid)

    return Epilogue(store, 0, 1)


def per_tensor(direction, whole, target):
    """Cast with one scale: in memory (`given`), or known when the kernel starts.

    A known scale is in `epsilon`, its reciprocal, which is stored as scale_inv, in `largest_scale`.
    """
    store_codes, known = make_store_codes(direction.fmt, False, whole, target), direction.known
    multiply = multiply_for(target)

    @device
    def store(values, block_amax, out, outer, inner, valid):
        scale = out.epsilon if known else out.given[0]
        if known and outer == 0 and inner == 0:
            out.scales[0] = out.largest_scale
        store_codes(multiply(values, scale), out.data, (outer, out.inner, inner), valid)

    return Epilogue(store, 0, 1)


def record_block_amax(edge):
    """Raise `amax` [row block, column block] to the largest magnitude of its square."""
    lanes, bits = edge // VECTOR, edge.bit_length() - 1

    @device
    def store(values, block_amax, out, outer, inner, valid):
        if (cuda.threadIdx.x & (lanes - 1)) == 0 and valid > 0:
            atomic_max(out.amax, offset(outer >> bits, out.scale_stride, inner >> bits), as_i32(block_amax))

    return Epilogue(store, lanes, 1)


def with_given_amax(epilogue, by_column):
    """Return an epilogue for squares whose maxima are `given` [row block, column block]."""
    store_with, bits = epilogue.store, epilogue.block_rows.bit_length() - 1

    @device
    def store(values, block_amax, out, outer, inner, valid):
        row, column = (inner, outer) if by_column else (outer, inner)
        index = offset(row >> bits, I32(out.first_block), column >> bits)
        store_with(values, out.given[index] if valid > 0 else ZERO, out, outer, inner, valid)

    return Epilogue(store, 0, 1)


def blocks(direction, whole, target):
    """Scale and cast by blocks of a row, or by squares."""
    if direction.rules(target).choice is not None:
        return chosen_blocks(direction, whole, target)
    scales, put, multiply = make_scales(direction, target), make_put_scale(direction), multiply_for(target)
    if direction.random is None:
        store_codes = make_store_codes(direction.fmt, direction.packed, whole, target)
    else:
        store_codes = make_store_random(direction.random)

    @device
    def store(values, block_amax, out, outer, inner, valid):
        stored, multiplier = scales(block_amax, out, outer, valid)
        put(stored, out, outer, inner, valid)
        store_codes(multiply(values, multiplier), out.data, (outer, out.inner, inner), valid)

    @device
    def store_at_random(values, block_amax, out, outer, inner, valid):
        stored, multiplier = scales(block_amax, out, outer, valid)
        put(stored, out, outer, inner, valid)
        v = multiply(values, multiplier)
        if valid > 0:
            store_codes(v, out, outer, inner)

    rows, columns = direction.block
    return Epilogue(store if direction.random is None else store_at_random, columns // VECTOR, rows)


def wide_blocks(direction, target, cast):
    """`blocks` of a row for threads that hold 16 neighbours as `vectors.Kept` says: `store(first, second, ...)`.

    Args:
        cast: `Kept.cast`, one code a byte.
    """
    scales, put = make_scales(direction, target), make_put_scale(direction)

    @device
    def store(first, second, block_amax, out, outer, inner, valid):
        stored, multiplier = scales(block_amax, out, outer, valid)
        a, b = cast(first, multiplier), cast(second, multiplier)
        put(stored, out, outer, inner, valid)
        store_words_if(valid > 0, out.data, outer, out.inner, inner, (a[0], a[1], b[0], b[1]))

    return Epilogue(store, direction.block[1] // (2 * VECTOR), 1)


def squares_along_rows(direction, whole, target):
    """The columnwise copy under squares, stored along the rows: the rowwise codes, and the scales by column."""
    scales, put, multiply = make_scales(direction, target), make_put_column_scales(direction), multiply_for(target)
    store_codes = make_store_codes(direction.fmt, direction.packed, whole, target)

    @device
    def store(values, block_amax, out, outer, inner, valid):
        stored, multiplier = scales(block_amax, out, outer, valid)
        store_codes(multiply(values, multiplier), out.data, (outer, out.inner, inner), valid)
        put(stored, out, outer, inner, valid)

    rows, columns = direction.block
    return Epilogue(store, columns // VECTOR, rows)


# --- whole blocks of 16 in a thread -----------------------------------------------------------------


@cache
def make_block_codes(direction, target):
    """Return `codes(first, second, out, outer, inner)`: a block's scale, and its 16 FP4 codes in two words."""
    scales, multiply, kind = make_scales(direction, target), multiply_for(target), direction.scale_type
    nearest, stochastic = casts.eights_for(target), casts.stochastic_eights_for(target)
    at_random = direction.random is not None

    @device
    def codes(first, second, out, outer, inner):
        stored, multiplier = scales(amax_with(amax(first), second), out, outer, 1)
        a, b = multiply(first, multiplier), multiply(second, multiplier)
        if at_random:
            w = random_words(out, outer, inner)
            return kind(stored), stochastic(a, w[0], w[1]), stochastic(b, w[2], w[3])
        return kind(stored), nearest(a), nearest(b)

    return codes


def whole_blocks(direction, target):
    """`blocks` for threads that hold whole blocks, but for given random bits: (`store` of one, `store` of two)."""
    codes, index = make_block_codes(direction, target), direction.scale_index

    @device
    def store_one(v, out, outer, inner):
        scale, a, b = codes(v[0], v[1], out, outer, inner)
        out.scales[index(out.scale_stride, outer, inner >> 4)] = scale
        store_words(out.data, offset(outer, out.inner >> 1, inner >> 1), (a, b))

    @device
    def store_two(v, out, outer, inner):
        scale, a, b = codes(v[0], v[1], out, outer, inner)
        next_scale, c, d = codes(v[2], v[3], out, outer, I32(inner + 16))
        # The block's number is even: in the order of rows and in that of GEMMs the next one follows it.
        i = index(out.scale_stride, outer, inner >> 4)
        out.scales[i], out.scales[i + 1] = scale, next_scale
        store_words(out.data, offset(outer, out.inner >> 1, inner >> 1), (a, b, c, d))

    return store_one, store_two


# --- a choice of two scales -------------------------------------------------------------------------


@ptx("mov.b32 $0, $1;", "=f,f", F, F)
def settled(x):
    """x, whose product no addition is contracted with."""
    return x


@cache
def make_errors_of_eight(direction, target):
    """Return `errors(v, scale, amax)`: of eight elements under a scale, (stored, multiplier)."""
    error_of, value_of = direction.rules(target).choice.error, direction.value_of_scale(target)
    encode, decode = casts.ENCODERS[direction.fmt], casts.DECODERS[direction.fmt]

    @device
    def of_one(x, p):
        multiplier, scale, amax = p
        return settled(error_of(decode(encode(x * multiplier)), scale, amax, x))

    of_eight = make_map(of_one)

    @device
    def errors(v, scale, amax):
        stored, multiplier = scale
        return of_eight(v, (multiplier, value_of(stored), amax))

    return errors


@device
def added(start, e):
    """`start` plus eight numbers, one after another."""
    return (((((((start + e[0]) + e[1]) + e[2]) + e[3]) + e[4]) + e[5]) + e[6]) + e[7]


@cache
def make_candidates(direction, target):
    """Return `candidates(block_amax, amax, out)`: two (stored, multiplier) of a block."""
    rules = direction.rules(target)
    tensor_scale, (first, second) = rules.tensor_scale, rules.choice.candidates

    @device
    def candidates(block_amax, amax, out):
        shared = tensor_scale(amax)
        return first(block_amax, shared, out), second(block_amax, shared, out)

    return candidates


@cache
def make_row_errors(direction, target):
    """Return `errors(v, candidates, amax, upper)`: of 16 elements that two threads hold, with either scale.

    A sum runs through the first thread's elements, then through those of the second (`upper`); both get it.
    """
    errors_of_eight = make_errors_of_eight(direction, target)

    @device
    def sixteen(v, scale, amax, upper):
        e = errors_of_eight(v, scale, amax)
        both = added(cuda.shfl_xor_sync(WARP, added(ZERO, e), 1), e)
        return select(upper, both, cuda.shfl_xor_sync(WARP, both, 1))

    @device
    def errors(v, candidates, amax, upper):
        error_of_first = sixteen(v, candidates[0], amax, upper)
        return error_of_first, sixteen(v, candidates[1], amax, upper)

    return errors


@cache
def make_store_choice(direction, whole, target):
    """Return `store(v, candidates, second_errs_less, out, outer, inner, valid)`: `blocks` with one of the scales."""
    put, multiply = make_put_scale(direction), multiply_for(target)
    store_codes = make_store_codes(direction.fmt, direction.packed, whole, target)

    @device
    def store(v, candidates, second_errs_less, out, outer, inner, valid):
        first, second = candidates
        put(select(second_errs_less, second[0], first[0]), out, outer, inner, valid)
        values = multiply(v, select(second_errs_less, second[1], first[1]))
        store_codes(values, out.data, (outer, out.inner, inner), valid)

    return store


def chosen_blocks(direction, whole, target):
    """`blocks` of 1 x 16 elements, each with that of two scales which errs less, the first if equal."""
    errors, by_outer = make_row_errors(direction, target), direction.by_outer
    candidates, store_choice = make_candidates(direction, target), make_store_choice(direction, whole, target)

    @device
    def store(values, block_amax, out, outer, inner, valid):
        amax = out.given[outer] if by_outer and valid > 0 else out.given[0]
        both = candidates(block_amax, amax, out)
        first, second = errors(values, both, amax, (inner & 15) == 8)
        store_choice(values, both, second < first, out, outer, inner, valid)

    return Epilogue(store, 16 // VECTOR, 1)


# --- stochastic rounding ----------------------------------------------------------------------------


@device
def random_words(out, outer, inner):
    """The random bytes of the block of 16 that holds an element, four in a word."""
    block = out.first_block + offset(outer, out.inner >> 4, inner >> 4)
    return casts.philox(np.uint64(out.seed), np.uint64(out.offset), np.uint64(block))


@cache
def make_store_random(rounding):
    """Return `store(v, out, outer, inner)`: eight E2M1 codes rounded stochastically, from Philox or with given bits."""

    @device
    def philox_word(out, outer, inner, k):
        a, b, c, d = random_words(out, outer, inner)
        first = (inner & 15) == 0
        low, high = select(first, a, c), select(first, b, d)
        return low if k == 0 else high

    @device
    def given_word(out, outer, inner, k):
        i = offset(outer, out.inner, inner) + 4 * k
        low = np.uint32(np.uint32(out.random_bits[i]) | np.uint32(np.uint32(out.random_bits[i + 1]) << U32(8)))
        high = np.uint32(np.uint32(out.random_bits[i + 2]) | np.uint32(np.uint32(out.random_bits[i + 3]) << U32(8)))
        return np.uint32(low | np.uint32(high << U32(16)))

    word_of = given_word if rounding == "given" else philox_word

    @device
    def code(v, word, k):
        return casts.e2m1_stochastic(v, np.uint32(np.uint32(word >> U32(8 * k)) & U32(0xFF)))

    @device
    def store(v, out, outer, inner):
        byte = offset(outer, out.inner, inner) >> 1
        for half in range(2):
            w = word_of(out, outer, inner, half)
            first = np.uint32(code(v[4 * half], w, 0) | np.uint32(code(v[4 * half + 1], w, 1) << U32(4)))
            second = np.uint32(code(v[4 * half + 2], w, 2) | np.uint32(code(v[4 * half + 3], w, 3) << U32(4)))
            out.data[byte + 2 * half] = np.uint8(first)
            out.data[byte + 2 * half + 1] = np.uint8(second)

    return store
