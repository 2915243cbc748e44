"""What a thread does with eight neighbours in its registers, where a kernel walks over a tile or a band of rows.

    put(v, out, outer, inner, left)     `v` are the elements of row `outer` from `inner` on, `left` to the row's end

`out` is the tuple of `operands` that a function's docstring names. All lanes of a warp call these together, also those
that are outside the matrix (left <= 0): some find a maximum by shuffles. A copy that is stored transposed goes through
the same functions with rows and columns exchanged. Kernels in which a thread owns sixteen write these lines out.
"""

from functools import cache

from cuda_kernels import casts
from cuda_kernels.operands import Blocks, InMemory, KnownScale, Stored, TwoLevel, described
from cuda_kernels.simt import as_i32, atomic_max, cuda, device, offset
from cuda_kernels.vectors import (
    VECTOR,
    amax,
    make_group_max,
    make_store,
    make_store_codes,
    multiply,
)


def described_output(stored):
    """The description of the tuple that `make_put` of the same argument fills."""
    if isinstance(stored, str):
        return described(Stored, data=casts.carrier(stored))
    if stored.block is not None:
        return described_blocks(stored)
    return described(KnownScale if stored.known else InMemory)


def described_blocks(direction):
    """The description of the `Blocks`, or `TwoLevel`, that blocks of a direction are cast to."""
    return described(TwoLevel if direction.rules().parts else Blocks, scales=direction.scale_type)


@cache
def make_put(stored, whole, target):
    """Return `put`: store values of a dtype, given by name, or cast as a `Direction` says."""
    if isinstance(stored, str):
        return make_put_values(stored, whole, target)
    if stored.block is not None:
        return make_cast_blocks(stored, whole, target)
    return (make_cast_known if stored.known else make_cast_in_memory)(stored, whole, target)


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


def make_cast_known(direction, whole, target):
    """Return `put`: cast with a scale that is known, in a `KnownScale`, and record the amax of a warp's values."""
    store_codes, warp_max = make_store_codes(direction.fmt, direction.packed, whole, target), make_group_max(32)

    @device
    def cast_known(v, out, outer, inner, left):
        largest = warp_max(amax(v))
        if (cuda.threadIdx.x & 31) == 0 and left > 0:
            atomic_max(out.amax, 0, as_i32(largest))
        if outer == 0 and inner == 0:
            out.scale_inv[0] = out.stored
        store_codes(multiply(v, out.multiplier), out.data, (outer, out.inner, inner), left)

    return cast_known


def make_cast_in_memory(direction, whole, target):
    """Return `put`: cast with a scale that lies in memory, in an `InMemory`."""
    store_codes = make_store_codes(direction.fmt, direction.packed, whole, target)

    @device
    def cast_in_memory(v, out, outer, inner, left):
        store_codes(multiply(v, out.scale[0]), out.data, (outer, out.inner, inner), left)

    return cast_in_memory


def make_cast_blocks(direction, whole, target):
    """Return `put`: cast by blocks of a row, in a `Blocks` or `TwoLevel`; B / 8 threads share a block."""
    group_max, cast = make_group_max(direction.block[1] // VECTOR), make_cast_under(direction, whole, target)

    @device
    def cast_blocks(v, out, outer, inner, left):
        cast(v, group_max(amax(v)), out, outer, inner, left)

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

    return cast_under
