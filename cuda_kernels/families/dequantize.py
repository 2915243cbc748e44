"""Dequantization: a quantized tensor's values in float32, float16 or bfloat16.

    value      the code's value * the factor of its scale: one float32 product, rounded once to the dtype
    factor     the declared rule `decode_factor` of the block's stored scale, and of the amax if there is a tensor level
    codes      lie as the values do, or transposed (and, with RHT, transformed); two in a byte, if they have four bits

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
    select,
    thread_number,
)
from cuda_kernels.tiles import TILE_ROWS, TILE_WORDS, make_stage, make_tile_walk, tile_columns
from cuda_kernels.vectors import (
    VECTOR,
    by_element,
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

# The naive kernel is: the threads of a warp touch neighbouring addresses. Each of its accesses is a byte or two.

# --- 4. fused ---------------------------------------------------------------------------------------

# A thread owns 16 neighbours of a row, in registers as two vectors of eight float32. Five words:
#
#   place(16)                         their (row, column)
#   load(codes, at, left)             their values, from element `at` on; `left` elements to the end of the row
#   factor(coded, row, column)        what they are multiplied with: the scaling's declared rule and place
#   multiply(vector, number)          (products(vector, vector): each with its own)
#   store(values, data, at, left)     rounds and stores them


@dataclass(frozen=True)
class Dequantize(Spec):
    """What the kernels below have in common.

    Attributes:
        direction: of what is decoded.
        storage: dtype of the values.
        whole: rows consist of whole 16-byte accesses at aligned addresses. Else every element is an access of its own.
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

    They are one load of 16 bytes (FP4: 8) and two stores.
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
            row, column = place(16)
            if row < out.outer and column < out.inner:
                at, left = offset(row, out.inner, column), I32(out.inner - column)
                first, second = load(coded.codes, at, left)
                scale = factor(coded, row, column)
                store((multiply(first, scale), multiply(second, scale)), out.data, at, left)

        return dequantize_rows


def make_factors(direction, whole, target):
    """Return `factors(coded, row, column, left)`: the factors of 16 columns, as two vectors."""
    factor = direction.factor(target)

    @device
    def of_column(coded, at, k, left):
        return factor(coded, at[1] + k, at[0]) if k < left else ONE

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
    """Blocks down the columns of data that lie along the rows: every column has a scale of its own.

    A thread owns 16 neighbours as above. The scales of 16 columns are a load of 16 bytes as well: `whole` only where
    `side_by_side` says so.
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
            row, column = place(16)
            if row < out.outer and column < out.inner:
                at, left = offset(row, out.inner, column), I32(out.inner - column)
                first, second = load(coded.codes, at, left)
                scales, further = factors(coded, row, column, left)
                store((products(first, scales, ZERO), products(second, further, ZERO)), out.data, at, left)

        return dequantize_columns


def side_by_side(direction):
    """Whether the scales of neighbouring columns are neighbouring bytes, and need no amax."""
    layout = direction.layout
    return (
        layout.scales_inner_first[True]
        and layout.run[0] == 1
        and layout.scale_format is not None
        and not layout.two_level
    )


@dataclass(frozen=True)
class DequantizeTurned(Dequantize):
    """Data that are stored transposed: 256 threads turn a tile of 128 x 64 round in shared memory (see `tiles`).

    Along the stored rows a thread decodes eight neighbours and, with the one beside it, undoes the Hadamard transform
    of 16; down the columns it stores eight, which are neighbours in the result. `whole` is about these.

    Attributes:
        sign_mask: of the Hadamard transform, None without one. `direction` does not say it: code of the CPU takes the
            mask as an argument, so the settings that it is compiled for leave it out.
    """

    sign_mask: int | None

    title = "dequantize turned"

    def grid(self, outer, inner):
        return tile_grid(outer, inner, tile_columns("float32"))

    def build(self, target):
        direction, columns, mask = self.direction, tile_columns("float32"), self.sign_mask
        load, factor = make_load_codes(direction.fmt, direction.packed), direction.factor(target)
        undo = device(lambda v, upper: v) if mask is None else make_hadamard(mask, inverse=True)
        put, _, down, _ = make_stage("float32")
        place_along, row_steps, place_down, column_steps = make_tile_walk(columns)
        store = make_store(self.storage, self.whole, target)

        @kernel
        def dequantize_turned(coded, out):
            tile = cuda.shared.array(TILE_WORDS, np.uint32)
            row0, column0 = first_row(TILE_ROWS), first_column(columns)
            for i in range(row_steps):
                r, c = place_along(cuda.threadIdx.x, i)
                row, column = I32(row0 + r), I32(column0 + c)
                left = select(row < coded.outer, I32(coded.inner - column), I32(0))
                scale = factor(coded, row, column) if left > 0 else ONE
                values = multiply(load(coded.codes, offset(row, coded.inner, column), left), scale)
                put(tile, r, c, undo(values, column % 16 == 8))
            cuda.syncthreads()
            for i in range(column_steps):
                r, c = place_down(cuda.threadIdx.x, i)
                row, column = I32(column0 + c), I32(row0 + r)
                left = select(row < out.outer, I32(out.inner - column), I32(0))
                store(down(tile, r, c), out.data, offset(row, out.inner, column), left)

        return dequantize_turned


# --- 5. its launch ----------------------------------------------------------------------------------


def dequantize(gpu, q, out, storage):
    """Fill `out`, an array of a dtype, with the values of the rowwise copy of `q`, or of the columnwise one alone."""
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
    """The `operands.Cost` of each kernel, to bfloat16: bytes are codes, scales and 16 values of two bytes."""
    mxfp8, nvfp4 = MXFP8Scaling(E4M3), NVFP4Scaling()
    columns = direction_of(mxfp8, True)
    for name, direction, size, budget in (
        ("FP8", direction_of(DelayedScaling(E4M3), False), 48, (1.7, 1.7)),
        ("1x128 blocks", direction_of(BlockScaling(E4M3, 1), False), 48.5, (1.85, 1.8)),
        ("MXFP8", direction_of(mxfp8, False), 48.5, (1.9, 1.9)),
        ("NVFP4", direction_of(nvfp4, False), 41, (3.05, 2.3)),
    ):
        yield Cost(f"{name} -> bf16", DequantizeRows(direction, "bfloat16", True), size, budget, wide_stores=2)
    yield Cost("MXFP8 -> bf16, any K", DequantizeRows(direction_of(mxfp8, False), "bfloat16", False), 48.5)
    yield Cost("MXFP8 columnwise -> bf16", DequantizeColumns(columns, "bfloat16", True), 64, (3.2, 3.2), 2, 2)
    turned = DequantizeTurned(direction_of(NVFP4Scaling(rht=True), True), "bfloat16", True, 0xD7E8)
    yield Cost("NVFP4 columnwise + RHT -> bf16", turned, 128 * 64 / 256 * 2.6)
