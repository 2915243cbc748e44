"""What a thread does with eight neighbours in its registers, where a kernel walks over a tile or a band of rows.

    put(v, out, outer, inner, left)     `v` are the elements of row `outer` from `inner` on, `left` to the row's end

`out` is the tuple of `operands` that a function's docstring names. All lanes of a warp call these together, also those
that are outside the matrix (left <= 0): some find a maximum by shuffles. A copy that is stored transposed goes through
the same functions with rows and columns exchanged. Kernels in which a thread owns sixteen write these lines out.
"""

from functools import cache

import numpy as np

from cuda_kernels import casts
from cuda_kernels.operands import Bits, Blocks, InMemory, KnownScale, Stochastic, Stored, TwoLevel, described
from cuda_kernels.simt import I32, U32, as_i32, atomic_max, cuda, device, offset, select, store_words
from cuda_kernels.vectors import (
    VECTOR,
    amax,
    make_block_max,
    make_cast_sixteen,
    make_group_max,
    make_store,
    make_store_codes,
    multiply,
    multiply_sixteen_for,
)

warp_max = make_group_max(32)


def described_output(stored):
    """The description of the tuple that `make_put` of the same argument fills."""
    if stored is None:
        return described(Stored, data=np.uint8)  # no array: what is left are the sizes of the matrix
    if isinstance(stored, str):
        return described(Stored, data=casts.carrier(stored))
    if stored.block is not None:
        return described_blocks(stored)
    return described(KnownScale if stored.known else InMemory)


def described_blocks(direction):
    """The description of the `Blocks`, `TwoLevel` or `Stochastic` that blocks of a direction are cast to."""
    kind = TwoLevel if direction.rules().parts else Blocks
    return described(kind if direction.random is None else Stochastic, scales=direction.scale_type)


@cache
def make_put(stored, whole, target, records_amax=True):
    """Return `put`: store values of a dtype, given by name, or cast as a `Direction` says; None: nothing.

    `records_amax` is of a scale that is known; without, another `put` records the amax of the same values.
    """
    if stored is None:
        return put_nothing
    if isinstance(stored, str):
        return make_put_values(stored, whole, target)
    if stored.block is not None:
        return make_cast_blocks(stored, whole, target)
    if stored.known:
        return make_cast_known(stored, whole, target, records_amax)
    return make_cast_in_memory(stored, whole, target)


@device
def put_nothing(v, out, outer, inner, left):
    """Store nothing, in a kernel that makes something else of the values."""


def make_put_values(storage, whole, target):
    """Return `put`: store values in a dtype, unscaled, in a `Stored`."""
    store = make_store(storage, whole, target)

    @device
    def put_values(v, out, outer, inner, left):
        store(v, out.data, offset(outer, out.inner, inner), left)

    return put_values


@device
def record_largest(x, out, left):
    """Raise `out.amax`, a whole tensor's, to the largest x of a warp: found by shuffles, which all 32 lanes must call.

    Lane 0 raises it, by one atomic operation. Its elements are in the matrix if any of the warp's are: `left` spares
    the operation of a warp that is outside.
    """
    largest = warp_max(x)
    if (cuda.threadIdx.x & 31) == 0 and left > 0:
        atomic_max(out.amax, 0, as_i32(largest))


@device
def record_amax(v, out, left):
    """`record_largest` of the magnitudes of eight values; outside the matrix these are zeros, which raise nothing."""
    record_largest(amax(v), out, left)


@device
def record_scale(out, outer, inner):
    """Store what is stored of a known scale, by the thread that owns the first element of the matrix."""
    if outer == 0 and inner == 0:
        out.scale_inv[0] = out.stored


def make_cast_known(direction, whole, target, records_amax=True):
    """Return `put`: cast with a scale that is known, in a `KnownScale`, and unless told not to record the amax."""
    store_codes = make_store_codes(direction.fmt, direction.packed, whole, target)

    @device
    def cast_known(v, out, outer, inner, left):
        record_scale(out, outer, inner)
        store_codes(multiply(v, out.multiplier), out.data, (outer, out.inner, inner), left)

    @device
    def cast_and_record(v, out, outer, inner, left):
        record_amax(v, out, left)
        cast_known(v, out, outer, inner, left)

    return cast_and_record if records_amax else cast_known


def make_cast_in_memory(direction, whole, target):
    """Return `put`: cast with a scale that lies in memory, in an `InMemory`."""
    store_codes = make_store_codes(direction.fmt, direction.packed, whole, target)

    @device
    def cast_in_memory(v, out, outer, inner, left):
        store_codes(multiply(v, out.scale[0]), out.data, (outer, out.inner, inner), left)

    return cast_in_memory


def make_cast_blocks(direction, whole, target):
    """Return `put`: cast by blocks of a row, in a `Blocks` or `TwoLevel`; B / 8 threads share a block."""
    block_max, cast = make_block_max(VECTOR, direction.block[1]), make_cast_under(direction, whole, target)

    @device
    def cast_blocks(v, out, outer, inner, left):
        cast(v, block_max(v), out, outer, inner, left)

    return cast_blocks


@cache
def make_cast_under(direction, whole, target):
    """Return `cast(v, block_amax, out, outer, inner, left)`: by blocks whose largest magnitude is known."""
    scale_block = direction.scale_block(target)
    store_codes = make_store_codes(direction.fmt, direction.packed, whole, target)

    @device
    def cast_under(v, block_amax, out, outer, inner, left):
        multiplier = scale_block(block_amax, out, outer, inner, left)
        store_codes(multiply(v, multiplier), out.data, (outer, out.inner, inner), left)

    if direction.random is None:
        return cast_under
    store_at_random = make_store_at_random(direction.random, whole, target)

    @device
    def cast_at_random(v, block_amax, out, outer, inner, left):
        multiplier = scale_block(block_amax, out, outer, inner, left)
        store_at_random(multiply(v, multiplier), out, outer, inner, left)

    return cast_at_random


@device
def cast_nothing(v, block_amax, out, outer, inner, left):
    """What `make_cast_under` is for a copy that is not made."""


# --- stochastic rounding ----------------------------------------------------------------------------


@device
def philox_of_block(out, outer, inner):
    """The 16 random bytes of the block of 16 that an element lies in, four in a word."""
    block = out.first_block + offset(outer, out.inner >> 4, inner >> 4)
    return casts.philox(np.uint64(out.seed), np.uint64(out.offset), np.uint64(block))


@device
def philox_words(out, outer, inner):
    """The random bytes of eight elements, four in a word: a half of those of their block of 16."""
    a, b, c, d = philox_of_block(out, outer, inner)
    first = (inner & 15) == 0
    return select(first, a, c), select(first, b, d)


@device
def word_of_bytes(pointer, i):
    """Four bytes from any address."""
    low = np.uint32(np.uint32(pointer[i]) | np.uint32(np.uint32(pointer[i + 1]) << U32(8)))
    high = np.uint32(np.uint32(pointer[i + 2]) | np.uint32(np.uint32(pointer[i + 3]) << U32(8)))
    return np.uint32(low | np.uint32(high << U32(16)))


@device
def given_words(out, outer, inner):
    """As `philox_words`, of the caller's bits."""
    i = offset(outer, out.inner, inner)
    return word_of_bytes(out.bits, i), word_of_bytes(out.bits, i + 4)


@cache
def make_store_at_random(source, whole, target):
    """Return `store(v, out, outer, inner, left)`: eight E2M1 codes, two per byte, stochastically.

    `out` is a `Stochastic`, `source` the `Direction.random`.
    """
    words, codes_of = given_words if source is Bits.GIVEN else philox_words, casts.stochastic_eights_for(target)

    @device
    def store_at_random(v, out, outer, inner, left):
        if left > 0:
            low, high = words(out, outer, inner)
            codes, i = codes_of(v, low, high), offset(outer, out.inner, inner) >> 1
            if whole:
                store_words(out.data, i, (codes,))
            else:
                for k in range(VECTOR // 2):
                    out.data[i + k] = np.uint8(np.uint32(codes >> U32(8 * k)) & U32(0xFF))

    return store_at_random


@cache
def make_store_sixteen_at_random(source, whole, target):
    """Return `store(both, out, outer, inner, left)`: a block of 16, as `make_store_at_random` stores eight."""
    codes_of, store = casts.stochastic_eights_for(target), make_store_at_random(source, whole, target)

    @device
    def store_block(both, out, outer, inner, left):
        if left > 0:
            a, b, c, d = philox_of_block(out, outer, inner)
            codes = codes_of(both[0], a, b), codes_of(both[1], c, d)
            store_words(out.data, offset(outer, out.inner, inner) >> 1, codes)

    @device
    def store_halves(both, out, outer, inner, left):
        store(both[0], out, outer, inner, left)
        store(both[1], out, outer, I32(inner + VECTOR), I32(left - VECTOR))

    return store_block if whole and source is Bits.PHILOX else store_halves


@cache
def make_cast_sixteen_by(direction, whole, target):
    """Return `cast(both, multiplier, out, outer, inner, left)`: store codes of both * multiplier, sixteen elements.

    To nearest, or stochastically, as `direction.random` says.
    """
    cast = make_cast_sixteen(direction.fmt, direction.packed, whole, target)

    @device
    def cast_to_nearest(both, multiplier, out, outer, inner, left):
        cast(both, multiplier, out.data, (outer, out.inner, inner), left)

    if direction.random is None:
        return cast_to_nearest
    store, multiply_both = make_store_sixteen_at_random(direction.random, whole, target), multiply_sixteen_for(target)

    @device
    def cast_at_random(both, multiplier, out, outer, inner, left):
        store(multiply_both(both, multiplier), out, outer, inner, left)

    return cast_at_random


# --- maxima -----------------------------------------------------------------------------------------


@cache
def make_record_amax(lanes, by_outer):
    """Return `put`: raise a `Maxima` to the largest magnitude, the tensor's or, if `by_outer`, that of row `outer`.

    Args:
        lanes: threads that find their largest magnitude by shuffles, which all lanes of a warp must call; the first of
            them raises the `Maxima`, by one atomic operation. If any of them has elements in the matrix, it must. With
            `by_outer` they are of one row.
    """
    group_max = make_group_max(lanes)

    @device
    def record_amax(v, out, outer, inner, left):
        largest = group_max(amax(v))
        if (cuda.threadIdx.x & (lanes - 1)) == 0 and left > 0:
            atomic_max(out.amax, outer if by_outer else 0, as_i32(largest))

    return record_amax
