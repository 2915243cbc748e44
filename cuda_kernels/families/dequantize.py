"""Dequantization: a quantized tensor's values in float32, float16 or bfloat16.

    value      the code's value * the factor of its block: one float32 product, rounded once to the dtype
    factor     of the block's stored scale, and of the amax where the scaling has a scale of the tensor too: the rule
               `decode_factor` that the scaling declares (`refops.scalings`); MXFP8: 2^(stored - 127)
    codes      lie as the values do, or transposed; two in a byte if they have four bits. Transposed ones may be of a
               random Hadamard transform (RHT) of each 16 neighbours, which is undone

Arguments, results and errors are those of `refops.dequantize`.
"""

# --- 1. what it computes: above ---------------------------------------------------------------------

import math
from dataclasses import dataclass

import numpy as np

from cuda_kernels import casts
from cuda_kernels.directions import Direction, direction_of
from cuda_kernels.hadamard import make_hadamard
from cuda_kernels.launch import row_shape, tile_grid
from cuda_kernels.operands import Coded, Cost, Spec, Stored, described
from cuda_kernels.simt import (
    I32,
    F,
    cuda,
    device,
    first_column,
    first_row,
    kernel,
    load_words,
    offset,
    thread_number,
)
from cuda_kernels.tiles import TILE_ROWS, TILE_WORDS, make_stage, make_tile_walk, tile_columns
from cuda_kernels.vectors import (
    VECTOR,
    by_element,
    left_in_row,
    make_decode_bytes,
    make_load_codes,
    make_load_sixteen_codes,
    make_store,
    make_store_sixteen,
    multiply,
    place,
    products,
)
from refops.formats import E4M3
from refops.scalings import BlockScaling, DelayedScaling, MXFP8Scaling, NVFP4Scaling

ZERO, ONE = F(0), F(1)

# --- 2. naive ---------------------------------------------------------------------------------------

value_of_e4m3 = casts.DECODERS["e4m3"]


@kernel
def dequantize_naive(codes, scales, y, rows, columns):
    """MXFP8 codes (M, columns), scales (M, columns / 32) -> y (M, columns): one thread one element.

    A warp reads 32 neighbouring codes, which share a scale, and stores 64 neighbouring bytes.
    """
    i = thread_number()
    row, column = i // columns, i % columns
    if row < rows:
        at = offset(row, columns, column)
        factor = casts.e8m0_value(np.uint32(scales[offset(row, columns // 32, column // 32)]))
        y[at] = casts.narrow_bf16(value_of_e4m3(np.uint32(codes[at])) * factor)


# --- 3. coalesced -----------------------------------------------------------------------------------

# The naive kernel is coalesced already: a warp's threads touch neighbouring addresses. Each access is a byte or two.

# --- 4. fused ---------------------------------------------------------------------------------------

# A thread owns 16 neighbours of a row, in registers as two vectors of eight float32. Six functions:
#
#   place(16, rows, columns)          (row, column, left) of the first
#   load(codes, at, left)             the values of their codes, without scale, from element `at` on
#   factor(coded, outer, inner)       what the value of a code is multiplied by. Blocks run along `inner`: the two are
#                                     (row, column), but (column, row) for blocks down the columns
#   multiply(vector, number)          where all have one factor
#   products(vector, vector, ZERO)    where each has its own; the last argument is ignored
#   store(values, data, at, left)     rounds and stores them
#
# left: the number of elements from here to the end of the row. It may exceed the elements of the thread; outside the
# matrix, where the thread has nothing to do, it is 0 or negative.


@dataclass(frozen=True)
class Dequantize(Spec):
    """What the kernels below have in common.

    Attributes:
        direction: of what is decoded.
        storage: dtype of the values.
        whole: rows are a multiple of 16 elements (what a thread owns) and every array is aligned to 16 bytes: a thread
            has all of its elements or none, in wide accesses. Else each element is an access of its own.
    """

    direction: Direction
    storage: str
    whole: bool

    def __str__(self):
        return f"{self.title}: {self.direction.name} -> {self.storage}"

    def operands(self):
        coded = described(Coded, scales=self.direction.scale_type)
        return coded, described(Stored, data=casts.carrier(self.storage))

    def must_read(self, field):
        return field != "amax" or self.direction.layout.two_level


@dataclass(frozen=True)
class DequantizeRows(Dequantize):
    """Blocks along the rows, or one scale for all: a thread owns 16 neighbours, which share a scale.

    Their codes are one load of 16 bytes (FP4: 8), their values two stores of 16 bytes (float32: four).
    """

    title = "dequantize rows"

    def grid(self, outer, inner):
        return row_shape(outer, inner, lanes=1, owned=16)

    def build(self, target):
        load = make_load_sixteen_codes(self.direction.fmt, self.direction.packed, self.whole, target)
        store = make_store_sixteen(self.storage, self.whole, target)
        factor = self.direction.factor(target)

        @kernel
        def dequantize_rows(coded, out):
            row, column, left = place(16, out.outer, out.inner)
            if left > 0:
                at = offset(row, out.inner, column)
                first, second = load(coded.codes, at, left)
                scale = factor(coded, row, column)
                store((multiply(first, scale), multiply(second, scale)), out.data, at, left)

        return dequantize_rows


def make_factors(direction, whole, target):
    """Return `factors(coded, row, column, left)`: the factors of 16 columns, as two vectors."""
    factor = direction.factor(target)

    @device
    def of_column(coded, row_and_column, k, left):
        row, column = row_and_column
        return factor(coded, column + k, row) if k < left else ONE

    eight = by_element(of_column)

    @device
    def guarded(coded, row, column, left):
        second = I32(column + VECTOR)
        return eight(coded, (row, column), left), eight(coded, (row, second), I32(left - VECTOR))

    if not whole:
        return guarded
    rule, row_bits = direction.rules(target).decode_factor, direction.block[1].bit_length() - 1
    of_codes = make_decode_bytes(device(lambda stored: rule(stored, ZERO)))

    @device
    def in_one_load(coded, row, column, left):
        s = load_words(coded.scales, offset(row >> row_bits, coded.scale_stride, column))
        return of_codes(s[0], s[1]), of_codes(s[2], s[3])

    return in_one_load


@dataclass(frozen=True)
class DequantizeColumns(Dequantize):
    """Blocks down the columns, of codes that lie along the rows: each of the 16 neighbours has a scale of its own.

    These scales are a load of 16 bytes too. Only where `side_by_side` says that they are neighbouring bytes can `whole`
    be True.
    """

    title = "dequantize columns"

    def grid(self, outer, inner):
        return row_shape(outer, inner, lanes=1, owned=16)

    def build(self, target):
        load = make_load_sixteen_codes(self.direction.fmt, self.direction.packed, self.whole, target)
        store = make_store_sixteen(self.storage, self.whole, target)
        factors = make_factors(self.direction, self.whole, target)

        @kernel
        def dequantize_columns(coded, out):
            row, column, left = place(16, out.outer, out.inner)
            if left > 0:
                at = offset(row, out.inner, column)
                first, second = load(coded.codes, at, left)
                first_factors, second_factors = factors(coded, row, column, left)
                values = products(first, first_factors, ZERO), products(second, second_factors, ZERO)
                store(values, out.data, at, left)

        return dequantize_columns


def side_by_side(direction):
    """Whether neighbouring columns have scales in neighbouring bytes, of which alone their factors are made."""
    layout = direction.layout
    return (
        layout.scales_inner_first[True]
        and layout.run[0] == 1
        and layout.scale_format is not None
        and not layout.two_level
    )


@dataclass(frozen=True)
class DequantizeTurned(Dequantize):
    """Codes that are stored transposed: a tile turns round in shared memory (see `tiles`).

    256 threads own 128 rows x 64 columns of what is stored. In each step of the first loop a thread decodes eight
    neighbours of a stored row and, with the thread beside it, undoes the Hadamard transform of 16. In each step of the
    second it takes eight of a stored column, which are neighbours in a row of the result, and stores them.

    Attributes:
        whole: rows of the result are a multiple of 8 elements and it is aligned to 16 bytes: a thread stores all of its
            eight or none, in wide accesses. Codes are read one by one in any case.
        sign_mask: of the Hadamard transform, None without one. It is no part of `direction`: code for the CPU is
            compiled once for a direction and takes the mask as an argument.
    """

    sign_mask: int | None

    title = "dequantize turned"

    def grid(self, outer, inner):
        return tile_grid(outer, inner, tile_columns("float32"))

    def build(self, target):
        direction, columns, mask = self.direction, tile_columns("float32"), self.sign_mask
        load, factor = make_load_codes(direction.fmt, direction.packed), direction.factor(target)
        undo = device(lambda v, upper: v) if mask is None else make_hadamard(mask, inverse=True)
        stage, walk = make_stage("float32"), make_tile_walk(columns)
        put_along, take_down, row_steps, column_steps = stage.put, stage.down, walk.row_steps, walk.column_steps
        place_along, place_down = walk.along, walk.down
        store = make_store(self.storage, self.whole, target)

        @kernel
        def dequantize_turned(coded, out):
            tile = cuda.shared.array(TILE_WORDS, np.uint32)
            row0, column0 = first_row(TILE_ROWS), first_column(columns)
            for i in range(row_steps):
                r, c = place_along(cuda.threadIdx.x, i)
                row, column = I32(row0 + r), I32(column0 + c)
                left = left_in_row(row, column, coded.outer, coded.inner)
                # Outside the matrix `load` gives zeros, and the thread goes on, for the shuffles in `undo`.
                scale = factor(coded, row, column) if left > 0 else ONE
                values = multiply(load(coded.codes, offset(row, coded.inner, column), left), scale)
                put_along(tile, r, c, undo(values, column % 16 == 8))
            cuda.syncthreads()  # the whole tile is there: a column has values of many threads
            for i in range(column_steps):
                r, c = place_down(cuda.threadIdx.x, i)
                row, column = I32(column0 + c), I32(row0 + r)  # in `out`, the transpose of what is stored
                left = left_in_row(row, column, out.outer, out.inner)
                store(take_down(tile, r, c), out.data, offset(row, out.inner, column), left)

        return dequantize_turned


# --- 5. its launch ----------------------------------------------------------------------------------

# `gpu` is the backend (`gpu.GPU`): `gpu.launch(spec, (rows, columns), *operands)` starts a kernel.


def dequantize(gpu, q, out, storage):
    """Fill `out`, an array of a dtype, with the values of `q`: of its rowwise copy, or of the other if that is all."""
    if not out.size:
        return
    columnwise = q.rowwise_data is None
    direction, name = direction_of(q.scaling, columnwise), "columnwise" if columnwise else "rowwise"

    def wrapped(field):
        array = getattr(q, field)
        return None if array is None else gpu.memory.wrap(array, field)

    codes, scales, amax = wrapped(f"{name}_data"), wrapped(f"{name}_scale_inv"), wrapped(f"amax_{name}")
    m, k = math.prod(q.shape[:-1]), q.shape[-1]
    outer, inner = (k, m) if direction.transposed else (m, k)
    coded, stored = Coded(codes, scales, scales.shape[-1], amax, outer, inner), Stored(out, m, k)
    spec = spec_of(direction, storage, coded, stored, q.scaling.hadamard if columnwise else None)
    gpu.launch(spec, (outer, inner), coded, stored)


def spec_of(direction, storage, coded, stored, sign_mask):
    """The kernel for what is decoded and stored; `sign_mask` of a Hadamard transform to undo, or None."""
    if direction.transposed:
        return DequantizeTurned(direction, storage, stored.inner % VECTOR == 0 and stored.data.aligned, sign_mask)
    whole = stored.inner % 16 == 0 and coded.codes.aligned and stored.data.aligned
    if direction.along_columns:
        scales_too = side_by_side(direction) and coded.scales.aligned and coded.scale_stride % 16 == 0
        return DequantizeColumns(direction, storage, whole and scales_too)
    return DequantizeRows(direction, storage, whole)


# --- 6. its cost ------------------------------------------------------------------------------------


def costs():
    """The `operands.Cost` of each kernel, to bfloat16.

    Bytes are those that a thread with all of its elements reads and writes: 16 codes, 16 values, and of a scale
    that threads share its part. Budgets are instructions for each of them, compiled for (H100, B200); then 16-byte
    loads and stores.
    """
    fp8, mxfp8, nvfp4 = DelayedScaling(E4M3), MXFP8Scaling(E4M3), NVFP4Scaling()
    for name, scaling, size, budget in (
        ("FP8", fp8, 16 * (1 + 2), (1.75, 1.75)),
        ("1x128 blocks", BlockScaling(E4M3, 1), 16 * (1 + 4 / 128 + 2), (1.85, 1.85)),
        ("MXFP8", mxfp8, 16 * (1 + 1 / 32 + 2), (1.9, 1.9)),
        ("NVFP4", nvfp4, 16 * (1 / 2 + 1 / 16 + 2), (3.05, 2.3)),
    ):
        spec = DequantizeRows(direction_of(scaling, False), "bfloat16", True)
        yield Cost(f"{name} -> bf16", spec, size, budget=budget, wide_stores=2)
    size = 16 * (1 + 1 / 32 + 2)
    yield Cost("MXFP8 -> bf16, any K", DequantizeRows(direction_of(mxfp8, False), "bfloat16", False), size)
    spec = DequantizeColumns(direction_of(mxfp8, True), "bfloat16", True)
    yield Cost("MXFP8 columnwise -> bf16", spec, size, budget=(4.25, 4.2), wide_loads=2, wide_stores=2)
    spec = DequantizeTurned(direction_of(NVFP4Scaling(rht=True), True), "bfloat16", True, sign_mask=0xD7E8)
    yield Cost("NVFP4 columnwise + RHT -> bf16", spec, 128 * 64 / 256 * (1 / 2 + 1 / 16 + 2))
