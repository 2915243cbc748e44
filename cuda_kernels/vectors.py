"""Eight neighbouring values in a thread's registers: how they are loaded, stored and reduced.

A vector is a tuple of eight float32; sixteen neighbours are two. Tuples are written out, not looped over: registers
have no index. Two words that all kernels use:

    whole    rows are a multiple of 16 elements (or 8: what a thread owns) and every array is aligned to 16 bytes: a
             thread has all of its elements or none, in wide accesses. Else each element is an access of its own, behind
             a guard: of any address, and of fewer elements at a row's end.
    left     elements from here to the row's end: more than the thread owns, or not positive outside the matrix; there a
             load gives zeros and nothing is stored, but the thread goes on, if it takes part in warp shuffles. `valid`
             is the same of the elements of one load or store.
"""

from functools import cache

import numpy as np

from cuda_kernels import casts
from cuda_kernels.pairs import first, has_pairs, mul2, pair, second
from cuda_kernels.simt import (
    I32,
    U32,
    F,
    as_f32,
    as_u32,
    cuda,
    device,
    first_column,
    first_row,
    larger_magnitude,
    load_two_words,
    load_words,
    load_words_if,
    maximum,
    offset,
    select,
    store_words,
    store_words_if,
)

#: Elements in a vector, and what stands for all lanes of a warp.
VECTOR, WARP = 8, 0xFFFFFFFF
ZERO = F(0)
HALF_WORD = U32(16)
ZEROS = (ZERO,) * VECTOR


@cache
def make_map(function):
    """Return `mapped(v, p)`: function(x, p) of each of the eight."""

    @device
    def mapped(v, p):
        return (
            function(v[0], p),
            function(v[1], p),
            function(v[2], p),
            function(v[3], p),
            function(v[4], p),
            function(v[5], p),
            function(v[6], p),
            function(v[7], p),
        )

    return mapped


@cache
def make_map2(function):
    """Return `mapped(a, b, p)`: function(x, y, p) of each of the eight pairs."""

    @device
    def mapped(a, b, p):
        return (
            function(a[0], b[0], p),
            function(a[1], b[1], p),
            function(a[2], b[2], p),
            function(a[3], b[3], p),
            function(a[4], b[4], p),
            function(a[5], b[5], p),
            function(a[6], b[6], p),
            function(a[7], b[7], p),
        )

    return mapped


@cache
def make_map3(function):
    """Return `mapped(a, b, c, p)`: function(x, y, z, p) of each of the eight triples."""

    @device
    def mapped(a, b, c, p):
        return (
            function(a[0], b[0], c[0], p),
            function(a[1], b[1], c[1], p),
            function(a[2], b[2], c[2], p),
            function(a[3], b[3], c[3], p),
            function(a[4], b[4], c[4], p),
            function(a[5], b[5], c[5], p),
            function(a[6], b[6], c[6], p),
            function(a[7], b[7], c[7], p),
        )

    return mapped


@cache
def make_map3_to_two(function):
    """Return `mapped(a, b, c, p)`: function(x, y, z, p) gives two numbers for each triple, `mapped` two vectors."""

    @device
    def halves(a, b, c, p):
        (d, e), (f, g) = function(a[0], b[0], c[0], p), function(a[1], b[1], c[1], p)
        (h, i), (j, k) = function(a[2], b[2], c[2], p), function(a[3], b[3], c[3], p)
        return (d, f, h, j), (e, g, i, k)

    @device
    def mapped(a, b, c, p):
        low, high = halves(a[:4], b[:4], c[:4], p), halves(a[4:], b[4:], c[4:], p)
        return low[0] + high[0], low[1] + high[1]

    return mapped


def by_element(element):
    """Return `gather(source, place, valid)`: element(source, place, k, valid) for k from 0 to 7."""

    @device
    def gather(s, i, n):
        return (
            element(s, i, 0, n),
            element(s, i, 1, n),
            element(s, i, 2, n),
            element(s, i, 3, n),
            element(s, i, 4, n),
            element(s, i, 5, n),
            element(s, i, 6, n),
            element(s, i, 7, n),
        )

    return gather


multiply = make_map(device(lambda x, factor: x * factor))
products = make_map2(device(lambda x, y, p: x * y))
add = make_map2(device(lambda x, y, p: x + y))


# --- several rows of a thread -----------------------------------------------------------------------

# What a thread keeps of `count` rows, `apart` from one another, is a tuple: registers have no index, so these write out
# what a loop over rows would do, half of them after the other half. `p` is whatever `one` needs beside.


@cache
def make_each(count, apart, one):
    """Return `each(p, row)`: the tuple of one(p, row), one(p, row + apart) and so on, of `count` rows."""
    if count == 1:
        return device(lambda p, row: (one(p, row),))
    half = count // 2
    upper, lower = make_each(half, apart, one), make_each(count - half, apart, one)
    return device(lambda p, row: upper(p, row) + lower(p, I32(row + half * apart)))


@cache
def make_each_with(count, apart, one):
    """Return `each(p, row, kept)`: call one(p, row, kept[0]), one(p, row + apart, kept[1]) and so on."""
    if count == 1:
        return device(lambda p, row, kept: one(p, row, kept[0]))
    half = count // 2
    upper, lower = make_each_with(half, apart, one), make_each_with(count - half, apart, one)

    @device
    def each(p, row, kept):
        upper(p, row, kept[:half])
        lower(p, I32(row + half * apart), kept[half:])

    return each


@cache
def make_fold(count, function):
    """Return `fold(first, kept)`: function(...function(function(first, kept[0]), kept[1])..., kept[count - 1])."""
    if count == 1:
        return device(lambda first, kept: function(first, kept[0]))
    half = count // 2
    upper, lower = make_fold(half, function), make_fold(count - half, function)
    return device(lambda first, kept: lower(upper(first, kept[:half]), kept[half:]))


# --- in pairs ---------------------------------------------------------------------------------------


@device
def paired(v):
    """Eight numbers as four pairs."""
    return pair(v[0], v[1]), pair(v[2], v[3]), pair(v[4], v[5]), pair(v[6], v[7])


@device
def unpaired(a, b, c, d):
    """Four pairs as eight numbers."""
    return first(a), second(a), first(b), second(b), first(c), second(c), first(d), second(d)


@cache
def make_map_of_pairs(function):
    """Return `mapped(v, p)`: function(pair, p) of each of the four pairs."""

    @device
    def mapped(v, p):
        a, b, c, d = paired(v)
        return unpaired(function(a, p), function(b, p), function(c, p), function(d, p))

    return mapped


@cache
def make_map2_of_pairs(function):
    """Return `mapped(x, y, p)`: function(pair, pair, p) of the four pairs of both vectors."""

    @device
    def mapped(x, y, p):
        (a, b, c, d), (e, f, g, h) = paired(x), paired(y)
        return unpaired(function(a, e, p), function(b, f, p), function(c, g, p), function(d, h, p))

    return mapped


@cache
def make_map3_of_pairs_to_two(function):
    """Return `mapped(x, y, z, p)`: function(pair, pair, pair, p) gives two pairs, `mapped` two vectors."""

    @device
    def mapped(x, y, z, p):
        x, y, z = paired(x), paired(y), paired(z)
        a, b = function(x[0], y[0], z[0], p), function(x[1], y[1], z[1], p)
        c, d = function(x[2], y[2], z[2], p), function(x[3], y[3], z[3], p)
        return unpaired(a[0], b[0], c[0], d[0]), unpaired(a[1], b[1], c[1], d[1])

    return mapped


multiply_pairs_with = make_map_of_pairs(mul2)


@device
def multiply_pairs(v, factor):
    """`multiply` in four instructions."""
    return multiply_pairs_with(v, pair(factor, factor))


def multiply_for(target):
    """Return `multiply(v, factor)`: each of the eight times a number."""
    return multiply_pairs if has_pairs(target) else multiply


@cache
def multiply_sixteen_for(target):
    """Return `multiply(both, factor)`: each of the sixteen times a number, two at a time where a card has pairs.

    Instructions a byte of dglu -> MXFP8 on sm_100a without and with pairs, for a limit of 4.7: 4.77 and 4.65.
    """
    multiply_eight = multiply_for(target)
    return device(lambda both, factor: (multiply_eight(both[0], factor), multiply_eight(both[1], factor)))


def map2_for(target):
    """Return what makes maps of two vectors from fast formulas."""
    return make_map2_of_pairs if has_pairs(target) else make_map2


def map3_to_two_for(target):
    """Return what makes maps of three vectors to two from fast formulas."""
    return make_map3_of_pairs_to_two if has_pairs(target) else make_map3_to_two


def product_for(target):
    """Return the product of what `map2_for` maps."""
    return mul2 if has_pairs(target) else device(lambda x, y: x * y)


# --- memory -----------------------------------------------------------------------------------------


@device
def left_in_row(row, column, rows, columns):
    """`left` at a place of a matrix: elements from `column` to the row's end, not positive outside the matrix."""
    return select(row < rows, I32(columns - column), I32(0))


@device
def place(n, rows, columns):
    """(row, column, left) of the first of n neighbours in a row that this thread owns, in a matrix of that size."""
    row = I32(first_row(cuda.blockDim.y) + cuda.threadIdx.y)
    column = I32((first_column(cuda.blockDim.x) + cuda.threadIdx.x) * n)
    return row, column, left_in_row(row, column, rows, columns)


@device
def low_bf16(word):
    """The float32 of a word's low bfloat16."""
    return as_f32(np.uint32(word << HALF_WORD))


@device
def high_bf16(word):
    """The float32 of a word's high bfloat16."""
    return as_f32(np.uint32(word & U32(0xFFFF0000)))


@device
def low_f16(word):
    """The float32 of a word's low float16."""
    return casts.widen_f16(np.uint16(word & U32(0xFFFF)))


@device
def high_f16(word):
    """The float32 of a word's high float16."""
    return casts.widen_f16(np.uint16(word >> HALF_WORD))


HALVES = {"bfloat16": (low_bf16, high_bf16), "float16": (low_f16, high_f16)}


def pair_of(storage, target):
    """Return the function that rounds two float32 to a 16-bit dtype in one register (0 for float32)."""
    if casts.STORAGES[storage].name == "float16":
        return casts.f16_pair
    native = target is not None and target[:2] >= (8, 0)
    return casts.bf16_pair_instruction if native else casts.bf16_pair


@cache
def make_load(storage, whole, skip=0):
    """Return `load(pointer, (row, stride, column), valid)`: eight elements of a dtype, zeros from the `valid`-th.

    Whole vectors can be read `skip` elements further on, at the same address plus a constant.
    """
    widen = casts.STORAGES[storage].widen
    if not whole:

        @device
        def element(pointer, place, k, valid):
            return widen(pointer[offset(place[0], place[1], place[2]) + k]) if k < valid else ZERO

        return by_element(element)
    if storage == "float32":

        @device
        def load_float32(pointer, place, valid):
            a = load_words_if(valid > 0, pointer, place[0], place[1], place[2], skip)
            b = load_words_if(valid > 0, pointer, place[0], place[1], place[2], skip + 4)
            return (
                as_f32(a[0]),
                as_f32(a[1]),
                as_f32(a[2]),
                as_f32(a[3]),
                as_f32(b[0]),
                as_f32(b[1]),
                as_f32(b[2]),
                as_f32(b[3]),
            )

        return load_float32
    low, high = HALVES[storage]

    @device
    def load_halves(pointer, place, valid):
        w = load_words_if(valid > 0, pointer, place[0], place[1], place[2], skip)
        return low(w[0]), high(w[0]), low(w[1]), high(w[1]), low(w[2]), high(w[2]), low(w[3]), high(w[3])

    return load_halves


@cache
def make_store(storage, whole, target):
    """Return `store(v, pointer, i, valid)`: eight values rounded to a dtype."""
    narrow, pair = casts.STORAGES[storage].narrow, pair_of(storage, target)
    if not whole:

        @device
        def store_elements(v, pointer, i, valid):
            for k in range(VECTOR):
                if k < valid:
                    pointer[i + k] = narrow(v[k])

        return store_elements
    if storage == "float32":

        @device
        def store_float32(v, pointer, i, valid):
            if valid > 0:
                w = canonical(v, ZERO)
                store_words(pointer, i, (as_u32(w[0]), as_u32(w[1]), as_u32(w[2]), as_u32(w[3])))
                store_words(pointer, i + 4, (as_u32(w[4]), as_u32(w[5]), as_u32(w[6]), as_u32(w[7])))

        return store_float32

    @device
    def store_halves(v, pointer, i, valid):
        if valid > 0:
            store_words(pointer, i, (pair(v[0], v[1]), pair(v[2], v[3]), pair(v[4], v[5]), pair(v[6], v[7])))

    return store_halves


canonical = make_map(device(lambda x, p: casts.narrow_f32(x)))


@cache
def make_store_sixteen(storage, whole, target):
    """Return `store(both, pointer, i, left)`: sixteen values, two vectors, rounded to a dtype; `left` is positive."""
    store = make_store(storage, whole, target)

    @device
    def store_whole(both, pointer, i, left):
        store(both[0], pointer, i, VECTOR)
        store(both[1], pointer, i + VECTOR, VECTOR)

    @device
    def store_guarded(both, pointer, i, left):
        store(both[0], pointer, i, left)
        store(both[1], pointer, i + VECTOR, I32(left - VECTOR))

    return store_whole if whole else store_guarded


@cache
def make_round(storage, target):
    """Return `rounded(v)`: eight float32 as if stored in a dtype and read back."""
    if storage == "float32":
        return device(lambda v: v)
    pair = pair_of(storage, target)
    low, high = HALVES[storage]

    @device
    def rounded(v):
        a, b, c, d = pair(v[0], v[1]), pair(v[2], v[3]), pair(v[4], v[5]), pair(v[6], v[7])
        return low(a), high(a), low(b), high(b), low(c), high(c), low(d), high(d)

    return rounded


# --- codes ------------------------------------------------------------------------------------------


@cache
def make_load_codes(fmt, packed):
    """Return `load(pointer, i, valid)`: the float32 values of eight codes from element `i`; `packed` two per byte."""
    decode = casts.DECODERS[fmt]

    @device
    def byte(pointer, i, k, valid):
        return decode(np.uint32(pointer[i + k])) if k < valid else ZERO

    @device
    def nibble(pointer, i, k, valid):
        return decode(np.uint32(np.uint32(pointer[(i + k) // 2]) >> U32(4 * (k % 2))) & U32(15)) if k < valid else ZERO

    return by_element(nibble if packed else byte)


@cache
def make_load_sixteen_codes(fmt, packed, whole, target):
    """Return `load(pointer, i, left)`: the float32 values of sixteen codes from element `i` on, as two vectors.

    `packed` ones lie two per byte. Whole ones are one access; `left` is positive.
    """
    in_bytes = fmt == "e2m1" and not packed  # `make_decode` takes two of E2M1 from a byte
    decode = make_decode_bytes(casts.DECODERS[fmt]) if in_bytes else make_decode(fmt, target)
    eight = make_load_codes(fmt, packed)

    @device
    def load_whole(pointer, i, left):
        w = load_words(pointer, i)
        return decode(w[0], w[1]), decode(w[2], w[3])

    @device
    def load_packed(pointer, i, left):
        w = load_two_words(pointer, i >> 1)
        return decode(w[0], w[0]), decode(w[1], w[1])

    @device
    def load_guarded(pointer, i, left):
        return eight(pointer, i, left), eight(pointer, i + VECTOR, I32(left - VECTOR))

    if not whole:
        return load_guarded
    return load_packed if packed else load_whole


@cache
def make_words_of_codes(fmt, packed, target):
    """Return `words(v)`: the codes of eight values, two words of four, or (`packed`, FP4) one word of eight."""
    if packed:
        eight = casts.eights_for(target)
        return device(lambda v: (eight(v),))
    four = casts.make_quad(_pair_of_codes(fmt, target), 16) if fmt == "e2m1" else casts.quads_for(fmt, target)
    return device(lambda v: (four(v[0], v[1], v[2], v[3]), four(v[4], v[5], v[6], v[7])))


def _pair_of_codes(fmt, target):
    """f(a, b) -> the codes of two values in a uint16; of E2M1 a byte each."""
    return casts.make_pair(casts.ENCODERS[fmt], 8) if fmt == "e2m1" else casts.pairs_for(fmt, target)


@cache
def make_store_codes(fmt, packed, whole, target):
    """Return `store(v, pointer, (row, stride, column), left)`: eight codes, one per byte or (`packed`, FP4) two.

    Rows of packed codes are whole vectors, so `left` is at least 8 or not positive; guarded means any address there.
    """
    words = make_words_of_codes(fmt, packed, target)
    pair = casts.pairs_for(fmt, target) if packed else _pair_of_codes(fmt, target)

    @device
    def store_whole(v, pointer, place, left):
        store_words_if(left > 0, pointer, place[0], place[1], place[2], words(v))

    @device
    def store_packed(v, pointer, place, left):
        if left > 0:
            store_words(pointer, offset(place[0], place[1], place[2]) >> 1, words(v))

    @device
    def store_bytes(v, pointer, place, left):
        i = offset(place[0], place[1], place[2])
        for k in range(VECTOR):
            if k < left:
                pointer[i + k] = np.uint8(pair(v[k], ZERO) & np.uint16(0xFF))

    @device
    def store_packed_bytes(v, pointer, place, left):
        if left > 0:
            i = offset(place[0], place[1], place[2]) >> 1
            for k in range(VECTOR // 2):
                pointer[i + k] = np.uint8(pair(v[2 * k], v[2 * k + 1]) & np.uint16(0xFF))

    if packed:
        return store_packed if whole else store_packed_bytes
    return store_whole if whole else store_bytes


@cache
def make_store_sixteen_codes(fmt, packed, whole, target):
    """Return `store(both, pointer, (row, stride, column), left)`: sixteen codes, as `make_store_codes` stores eight."""
    words, store = make_words_of_codes(fmt, packed, target), make_store_codes(fmt, packed, whole, target)

    @device
    def store_whole(both, pointer, place, left):
        codes = words(both[0]) + words(both[1])
        store_words_if(left > 0, pointer, place[0], place[1], place[2], codes)

    @device
    def store_packed(both, pointer, place, left):
        if left > 0:
            store_words(pointer, offset(place[0], place[1], place[2]) >> 1, words(both[0]) + words(both[1]))

    @device
    def store_guarded(both, pointer, place, left):
        store(both[0], pointer, place, left)
        store(both[1], pointer, (place[0], place[1], I32(place[2] + VECTOR)), I32(left - VECTOR))

    if not whole:
        return store_guarded
    return store_packed if packed else store_whole


@cache
def make_cast_sixteen(fmt, packed, whole, target):
    """Return `cast(both, multiplier, pointer, (row, stride, column), left)`: store codes of both * multiplier."""
    store, multiply_both = make_store_sixteen_codes(fmt, packed, whole, target), multiply_sixteen_for(target)

    @device
    def cast(both, multiplier, pointer, place, left):
        store(multiply_both(both, multiplier), pointer, place, left)

    return cast


@cache
def make_decode(fmt, target):
    """Return `decode(low, high)`: the values of eight codes, one per byte; E2M1's are in one word, which is both."""
    if not casts.has_halves(fmt, target):
        return make_decode_bytes(casts.DECODERS[fmt])
    first, second, third, fourth = casts.halves_of(fmt, target)

    @device
    def neighbours(low, high):
        a, b, c, d = first(low), second(low), third(high), fourth(high)
        return low_f16(a), high_f16(a), low_f16(b), high_f16(b), low_f16(c), high_f16(c), low_f16(d), high_f16(d)

    @device
    def four_apart(low, high):
        a, b, c, d = first(low), second(low), third(low), fourth(low)
        return low_f16(a), low_f16(b), low_f16(c), low_f16(d), high_f16(a), high_f16(b), high_f16(c), high_f16(d)

    return four_apart if fmt == "e2m1" and not casts.has_e2m1(target) else neighbours


@cache
def make_decode_bytes(one):
    """Return `decode(low, high)`: one(code) of each byte."""

    @device
    def byte(words, k):
        return one(np.uint32(np.uint32(words[k // 4] >> U32(8 * (k % 4))) & U32(0xFF)))

    @device
    def decode(low, high):
        w = low, high
        return byte(w, 0), byte(w, 1), byte(w, 2), byte(w, 3), byte(w, 4), byte(w, 5), byte(w, 6), byte(w, 7)

    return decode


# --- sums -------------------------------------------------------------------------------------------


@device
def sum_of(v):
    """Sum of the eight, from the first on."""
    return ((((((v[0] + v[1]) + v[2]) + v[3]) + v[4]) + v[5]) + v[6]) + v[7]


@device
def warp_sum(x):
    """Sum over a warp, the same in every lane; all lanes call it."""
    x = x + cuda.shfl_xor_sync(WARP, x, 16)
    x = x + cuda.shfl_xor_sync(WARP, x, 8)
    x = x + cuda.shfl_xor_sync(WARP, x, 4)
    x = x + cuda.shfl_xor_sync(WARP, x, 2)
    return x + cuda.shfl_xor_sync(WARP, x, 1)


# --- maxima -----------------------------------------------------------------------------------------


@device
def amax(v):
    """Largest magnitude of the eight; NaN is ignored."""
    return amax_with(ZERO, v)


@device
def amax_with(a, v):
    """Largest of `a` >= 0 and the magnitudes of the eight; NaN in them is ignored."""
    a = larger_magnitude(larger_magnitude(a, v[0]), v[1])
    a = larger_magnitude(larger_magnitude(a, v[2]), v[3])
    a = larger_magnitude(larger_magnitude(a, v[4]), v[5])
    return larger_magnitude(larger_magnitude(a, v[6]), v[7])


@cache
def make_round_sixteen(storage, target):
    """Return `rounded(both)`: sixteen float32, two vectors, as if stored in a dtype and read back."""
    rounded = make_round(storage, target)
    return device(lambda both: (rounded(both[0]), rounded(both[1])))


@device
def amax_of_sixteen(both):
    """Largest magnitude of the sixteen; NaN is ignored."""
    return amax_with(amax(both[0]), both[1])


@cache
def make_words(pair):
    """Return `words(v)`: eight values, rounded two at a time by `pair` of `pair_of`, as four words."""

    @device
    def words(v):
        return pair(v[0], v[1]), pair(v[2], v[3]), pair(v[4], v[5]), pair(v[6], v[7])

    return words


@cache
def make_group_max(lanes):
    """Return `group_max(x)`: the largest x in each aligned group of `lanes` threads; all lanes of a warp call it."""

    @device
    def group_max(x):
        if lanes > 16:
            x = maximum(x, cuda.shfl_xor_sync(WARP, x, 16))
        if lanes > 8:
            x = maximum(x, cuda.shfl_xor_sync(WARP, x, 8))
        if lanes > 4:
            x = maximum(x, cuda.shfl_xor_sync(WARP, x, 4))
        if lanes > 2:
            x = maximum(x, cuda.shfl_xor_sync(WARP, x, 2))
        if lanes > 1:
            x = maximum(x, cuda.shfl_xor_sync(WARP, x, 1))
        return x

    return group_max


@cache
def make_block_max(owned, columns):
    """Return `block_max(v)`: the largest magnitude of a block of so many columns of a row; NaN is ignored.

    Every thread has `owned` neighbours, 8 or 16 (or the whole block). All lanes of a warp call it.
    """
    group_max, largest = make_group_max(columns // owned), amax if owned == VECTOR else amax_of_sixteen
    return device(lambda v: group_max(largest(v)))
