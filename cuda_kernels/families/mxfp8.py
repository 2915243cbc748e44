"""Casts by blocks of a row whose columnwise copy lies along the rows as well: MXFP8, MXINT8.

    scale      the declared rule of the block's largest magnitude: (what is stored, what elements are multiplied with)
    code       the element format's code of value * multiplier, to nearest, ties to even, saturated
    place      both copies lie as the values do; blocks of the columnwise one run down a column that has its own scales

Activations and their gradients are computed on the way and rounded to their dtype, in which TE stores them first.
Arguments, results and errors are those of `refops.quantize`, `activation_quantize` and `activation_grad_quantize`.
"""

# --- 1. what it computes: above ---------------------------------------------------------------------

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cuda_kernels import casts
from cuda_kernels.directions import Direction, direction_of
from cuda_kernels.launch import COLUMNS, column_grid, row_shape
from cuda_kernels.operands import Cost, Kind, Spec, Values, as_it_is, pointer
from cuda_kernels.reads import described_source, make_read, make_read_sixteen, make_read_sixteen_of_halves
from cuda_kernels.simt import (
    I32,
    THREADS,
    F,
    cuda,
    device,
    first_column,
    first_row,
    kernel,
    larger_magnitude,
    maximum,
    offset,
    select,
    thread_number,
)
from cuda_kernels.stores import described_blocks, make_cast_blocks, put_nothing
from cuda_kernels.vectors import (
    VECTOR,
    ZEROS,
    add,
    make_block_max,
    make_each,
    make_each_with,
    make_fold,
    make_group_max,
    make_map2,
    make_round,
    make_round_sixteen,
    make_store_codes,
    make_store_sixteen_codes,
    multiply_sixteen_for,
    place,
    products,
)
from refops.activations import ACTIVATIONS
from refops.formats import E4M3, E5M2
from refops.quantization.layout import ceil_div
from refops.scalings import MXFP8Scaling

ZERO, INVERSE_LIMIT = F(0), F(1) / F(448)
widen, max_of_32 = casts.widen_bf16, make_group_max(32)

# --- 2. naive ---------------------------------------------------------------------------------------


@kernel
def mxfp8_naive(x, codes, scales, rows, columns):
    """x (M, columns) -> codes, scales (M, columns / 32): one thread one block, read twice.

    Neighbouring threads read 64 bytes apart: a warp's load touches 32 different lines of memory.
    """
    i = thread_number()
    row, block = i // (columns // 32), i % (columns // 32)
    if row < rows:
        first, amax = offset(row, columns, block * 32), ZERO
        for k in range(32):
            amax = larger_magnitude(amax, widen(x[first + k]))
        byte = casts.e8m0_up(amax * INVERSE_LIMIT)
        scales[offset(row, columns // 32, block)] = np.uint8(byte)
        for k in range(32):
            codes[first + k] = np.uint8(casts.e4m3(widen(x[first + k]) * casts.e8m0_multiplier(byte)))


# --- 3. coalesced -----------------------------------------------------------------------------------


@kernel
def mxfp8_coalesced(x, codes, scales, rows, columns):
    """As `mxfp8_naive`: one thread one element, a warp one block, whose amax goes round by shuffles.

    A warp reads 64 neighbouring bytes at once, and each element once. Every thread takes part in the shuffles.
    """
    i = thread_number()
    row, column = i // columns, i % columns
    inside = row < rows
    value = widen(x[offset(row, columns, column)]) if inside else ZERO
    byte = casts.e8m0_up(max_of_32(larger_magnitude(ZERO, value)) * INVERSE_LIMIT)
    if inside:
        codes[offset(row, columns, column)] = np.uint8(casts.e4m3(value * casts.e8m0_multiplier(byte)))
        if column % 32 == 0:
            scales[offset(row, columns // 32, column // 32)] = np.uint8(byte)


# --- 4. fused ---------------------------------------------------------------------------------------

# A thread owns 16 neighbours of a row, in registers as two vectors of eight float32. Four words:
#
#   place(16)                           their (row, column)
#   read(source, row, column, left)     their values, or what an activation makes of them; `left` elements to the end of
#                                       the row, not positive outside the matrix
#   rounded(v)                          the values as their dtype holds them
#   cast(v, out, row, column, left)     stores their codes and, in the first thread of a block, its scale


def make_cast(direction, whole, target):
    """Return `cast(v, out, row, column, left)`: sixteen neighbours of a row; B / 16 threads share a block."""
    block_max, scale_block = make_block_max(16, direction.block[1]), direction.scale_block(target)
    multiply = multiply_sixteen_for(target)
    store = make_store_sixteen_codes(direction.fmt, direction.packed, whole, target)

    @device
    def cast(v, out, row, column, left):
        multiplier = scale_block(block_max(v), out, row, column, left)
        store(multiply(v, multiplier), out.data, (row, out.inner, column), left)

    return cast


@dataclass(frozen=True)
class Fused(Spec):
    """What the kernels below have in common.

    Attributes:
        values: what is cast: a tensor as it is, an activation, a gradient.
        direction: how it is cast, the rowwise direction.
        rounded: whether values are rounded to their dtype before.
    """

    values: Values
    direction: Direction
    rounded: bool

    def __str__(self):
        return f"{self.title}: {self.values} -> {self.direction.name}"

    def operands(self):
        return described_source(self.values), described_blocks(self.direction)

    def must_read(self, field):
        return self.values.must_read(field)

    @property
    def precision(self):
        """The dtype that values are rounded to; float32 is to none."""
        return self.values.storage if self.rounded else "float32"


@dataclass(frozen=True)
class MXFP8Rows(Fused):
    """One copy along the rows.

    Attributes:
        whole: rows consist of whole 16-byte accesses at aligned addresses. Else every element is an access of its own.
    """

    whole: bool

    title = "fused rows"

    def grid(self, outer, inner):
        return row_shape(outer, inner, lanes=self.direction.block[1] // 16, owned=16)

    def build(self, target):
        read = make_read_sixteen(self.values, self.whole, target)
        rounded = make_round_sixteen(self.precision, target)
        cast = make_cast(self.direction, self.whole, target)

        @kernel
        def mxfp8_rows(source, out):
            row, column = place(16)
            left = select(row < out.outer, I32(out.inner - column), I32(0))
            v = rounded(read(source, row, column, left))
            cast(v, out, row, column, left)

        return mxfp8_rows


@dataclass(frozen=True)
class MXFP8GradientRows(Fused):
    """`MXFP8Rows` of a gated gradient: a thread makes 16 columns of each half from one read of dy, act and gate.

    Blocks do not reach across the middle, and rows are whole.
    """

    title = "fused halves"

    def grid(self, outer, inner):
        return row_shape(outer, inner // 2, lanes=self.direction.block[1] // 16, owned=16)

    def build(self, target):
        read = make_read_sixteen_of_halves(self.values, target)
        rounded = make_round_sixteen(self.precision, target)
        cast = make_cast(self.direction, True, target)

        @kernel
        def mxfp8_gradient_rows(source, out):
            row, column = place(16)
            left = select(row < out.outer, I32(source.width - column), I32(0))
            act, gate = read(source, row, column, left)
            cast(rounded(act), out, row, column, left)
            cast(rounded(gate), out, row, I32(column + source.width), left)

        return mxfp8_gradient_rows


# Down the columns, 256 threads own 256 columns of as many rows as a block of the scaling has. Lane `lane` of each of
# their 8 warps has eight neighbours, from column 8 * lane on, of every eighth row from its warp's number on. These stay
# in its registers from the read to the cast. In between, each thread looks after one column.
#
#   read_rows(p, row)             the thread's rows, (rounded, exact) vectors; the rowwise copy is stored on the way
#   larger_of_all, sum_of_all     of the thread's rows, column by column
#   put_columns(shared, v)        shows the other warps eight numbers, one a column
#   scale_column                  what elements of the thread's one column are multiplied with; its scale is stored
#   cast_rows(p, row, kept)       stores the codes of the thread's rows

WARPS = THREADS // 32
#: -0 + x is x, also where x is -0.
NEGATIVE_ZEROS = (F(-0.0),) * VECTOR
larger = make_map2(device(lambda a, x, p: larger_magnitude(a, x)))


@device
def put_columns(shared, v):
    """Put a thread's eight numbers into its warp's row, that of column 8 * lane + k at lane + 32 * k.

    So the lanes of a warp are in different banks each time.
    """
    warp, lane = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
    for k in range(VECTOR):
        shared[warp, lane + 32 * k] = v[k]


@device
def take_columns(shared):
    """The numbers of a thread's eight columns, where `put_columns` puts them."""
    lane = cuda.threadIdx.x & 31
    return (
        shared[lane],
        shared[lane + 32],
        shared[lane + 64],
        shared[lane + 96],
        shared[lane + 128],
        shared[lane + 160],
        shared[lane + 192],
        shared[lane + 224],
    )


@device
def own_column(thread):
    """The column, of 256, whose numbers `put_columns` puts at [..., thread]."""
    return (thread & 31) * VECTOR + (thread >> 5)


def make_over_warps(function):
    """Return `over_warps(shared)`: function(function(a, b), c)... of what the warps put there for a thread's column."""

    @device
    def over_warps(shared):
        result = shared[0, cuda.threadIdx.x]
        for warp in range(1, WARPS):
            result = function(result, shared[warp, cuda.threadIdx.x])
        return result

    return over_warps


max_of_warps, sum_of_warps = make_over_warps(maximum), make_over_warps(device(lambda a, b: a + b))


def make_row_of_columns(read, rounded, put):
    """Return `read_row(p, row)`: a row's eight values, (rounded, exact); `put`, of `stores`, gets the rounded ones."""

    @device
    def read_row(p, row):
        source, out, column = p
        left = select(row < out.outer, I32(out.inner - column), I32(0))
        exact = read(source, row, column, left)
        v = rounded(exact)
        put(v, out, row, column, left)
        return v, exact

    return read_row


def make_cast_of_columns(direction, whole, target):
    """Return `cast_row(p, row, kept)`: store the codes of a row's eight, each column times its own multiplier."""
    store = make_store_codes(direction.fmt, direction.packed, whole, target)

    @device
    def cast_row(p, row, kept):
        out, multipliers, column = p
        left = select(row < out.outer, I32(out.inner - column), I32(0))
        store(products(kept[0], multipliers, ZERO), out.data, (row, out.inner, column), left)

    return cast_row


@dataclass(frozen=True)
class MXFP8Columns(Fused):
    """Both copies, or the columnwise one, and sums of columns, from one read.

    Attributes:
        whole: as of `MXFP8Rows`.
        rowwise: whether the rowwise copy is made.
        sums: whether exact values are summed: `partial` (blocks of rows, columns) gets a sum for each block.
    """

    whole: bool
    rowwise: bool
    sums: bool

    title = "fused columns"

    def __str__(self):
        stored = [self.direction.name] * self.rowwise + ["columns"] + ["sums"] * self.sums
        return f"{self.title}: {self.values} -> {' + '.join(stored)}"

    def operands(self):
        out = described_blocks(self.direction)
        return described_source(self.values), out, out, pointer(np.float32)

    def must_read(self, field):
        return super().must_read(field) and (self.rowwise or field not in ("data", "scales"))

    def grid(self, outer, inner):
        return column_grid(outer, inner, self.direction.block[1])

    def build(self, target):
        direction, rows, sums = self.direction, self.direction.block[1], self.sums
        read, rounded = make_read(self.values, self.whole, target), make_round(self.precision, target)
        put = make_cast_blocks(direction, self.whole, target) if self.rowwise else put_nothing
        scale_column, count = direction.other.scale_block(target), rows // WARPS
        read_rows = make_each(count, WARPS, make_row_of_columns(read, rounded, put))
        larger_of_all = make_fold(count, device(lambda so_far, kept: larger(so_far, kept[0], ZERO)))
        sum_of_all = make_fold(count, device(lambda so_far, kept: add(so_far, kept[1], ZERO)))
        cast_rows = make_each_with(count, WARPS, make_cast_of_columns(direction.other, self.whole, target))

        @kernel
        def mxfp8_columns(source, row_out, column_out, partial):
            maxima = cuda.shared.array((WARPS, COLUMNS), np.float32)
            totals = cuda.shared.array((WARPS, COLUMNS), np.float32)
            multipliers = cuda.shared.array(COLUMNS, np.float32)
            row0, column0, thread = first_row(rows), first_column(COLUMNS), cuda.threadIdx.x
            row, column = I32(row0 + (thread >> 5)), I32(column0 + (thread & 31) * VECTOR)
            kept = read_rows((source, row_out, column), row)
            put_columns(maxima, larger_of_all(ZEROS, kept))
            if sums:
                put_columns(totals, sum_of_all(NEGATIVE_ZEROS, kept))
            cuda.syncthreads()
            own = I32(column0 + own_column(thread))
            left = select(own < column_out.inner, I32(column_out.outer - row0), I32(0))
            multipliers[thread] = scale_column(max_of_warps(maxima), column_out, own, row0, left)
            if sums and left > 0:
                partial[offset(row0 // rows, column_out.inner, own)] = sum_of_warps(totals)
            cuda.syncthreads()
            cast_rows((column_out, take_columns(multipliers), column), row, kept)

        return mxfp8_columns


# --- 5. their launch --------------------------------------------------------------------------------


def quantize(gpu, job):
    """Fill the copies, and the sums of columns, of a `copies.BlockJob`."""
    if job.columnwise is not None:
        quantize_columns(gpu, job)
    elif job.dbias is not None:
        out, direction, sums_rounded = job.rowwise.blocks(), job.rowwise.direction, job.dbias_rounded
        gpu.column_sums(job.front, job.dbias, stored=direction, out=out, rounded=job.rounded, sums_rounded=sums_rounded)
    else:
        quantize_rows(gpu, job)


def quantize_rows(gpu, job):
    """The rowwise copy alone."""
    front, out, values = job.front, job.rowwise, job.front.values(gpu.fast_math)
    spec = MXFP8Rows(values, out.direction, job.rounded, gpu.whole(front, 16, out.data))
    halves = values.gated and values.kind is Kind.BACKWARD
    if halves and spec.whole and front.width % out.direction.block[1] == 0:
        spec = MXFP8GradientRows(values, out.direction, job.rounded)
    gpu.launch(spec, front.matrix_shape, front.source(), out.blocks())


def quantize_columns(gpu, job):
    """The columnwise copy, and what else is wanted, from one read."""
    front, rowwise, columnwise, (m, k) = job.front, job.rowwise, job.columnwise, job.front.matrix_shape
    direction, partial = columnwise.direction.other, None
    if job.dbias is not None:
        partial = gpu.empty((ceil_div(m, direction.block[1]), k), "float32")
    whole = gpu.whole(front, VECTOR, columnwise.data, None if rowwise is None else rowwise.data)
    values, wanted = front.values(gpu.fast_math), (rowwise is not None, partial is not None)
    spec = MXFP8Columns(values, direction, job.rounded, whole, *wanted)
    outs = (rowwise or columnwise).blocks(), columnwise.blocks()
    gpu.launch(spec, (m, k), front.source(), *outs, (partial,))
    if partial is not None:
        gpu.finish_sums(partial, job.dbias)


# --- 6. their cost ----------------------------------------------------------------------------------

#: Instructions for each byte of an activation, or its gradient, from bfloat16 to MXFP8 rowwise, rounded up to the next
#: twentieth: accurate on an H100 and a B200, with fast math on both. `tests/measured/measure_activations.py` measures
#: and writes them.
ROW_BUDGETS = json.loads((Path(__file__).parent.parent / "row_budgets.json").read_text(encoding="utf-8"))
SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}


def costs():
    """The `operands.Cost` of each kernel: bytes are values, codes and scales."""
    return [*_tensors(), *_activations(), *_columns()]


def _tensors():
    """Rows of a tensor as it is."""
    direction, bf16 = direction_of(MXFP8Scaling(E4M3), False), as_it_is("bfloat16")
    for storage, size in SIZES.items():
        spec = MXFP8Rows(as_it_is(storage), direction, False, True)
        yield Cost(f"{storage} -> MXFP8", spec, 16 * size + 16.5, (2.45, 2), size, 1)
    e5m2, swizzled = direction_of(MXFP8Scaling(E5M2), False), direction_of(MXFP8Scaling(E4M3), False, swizzled=True)
    yield Cost("bf16 -> MXFP8 E5M2", MXFP8Rows(bf16, e5m2, False, True), 48.5, (2.45, 2), 2, 1)
    yield Cost("bf16 -> MXFP8, swizzled", MXFP8Rows(bf16, swizzled, False, True), 48.5, None, 2, 1)
    yield Cost("bf16 -> MXFP8, guarded", MXFP8Rows(bf16, direction, False, False), 48.5)


def _activations():
    """Rows of activations and of their gradients."""
    direction = direction_of(MXFP8Scaling(E4M3), False)
    for name, activation in ACTIVATIONS.items():
        parts = 2 if activation.gated else 1
        spec = MXFP8Rows(Values(Kind.FORWARD, name, "bfloat16"), direction, True, True)
        yield _with_row_budget(Cost(f"{name} bf16 -> MXFP8", spec, 32 * parts + 16.5, None, 2 * parts, 1), name)
        gradient = Values(Kind.BACKWARD, name, "bfloat16")
        if activation.gated:
            spec = MXFP8GradientRows(gradient, direction, True)
        else:
            spec = MXFP8Rows(gradient, direction, True, True)
        size = 32 * (parts + 1) + 16.5 * parts
        cost = Cost(f"d{name} bf16 -> MXFP8", spec, size, None, 2 * (parts + 1), parts)
        yield _with_row_budget(cost, f"d{name}")
    for storage in ("float16", "float32"):
        spec = MXFP8Rows(Values(Kind.FORWARD, "swiglu", storage), direction, True, True)
        yield Cost(f"swiglu {storage} -> MXFP8", spec, 32 * SIZES[storage] + 16.5, None, 2 * SIZES[storage], 1)
    spec = MXFP8Rows(Values(Kind.BACKWARD, "swiglu", "bfloat16"), direction, True, False)
    yield Cost("dswiglu bf16 -> MXFP8, guarded", spec, 80.5)


def _with_row_budget(cost, name):
    """A `Cost` with the budget in `ROW_BUDGETS`; none yet for an activation that is only about to be measured."""
    h100, b200, h100_fast, b200_fast = ROW_BUDGETS.get(name, (None,) * 4)
    if h100 is None:
        return cost
    return cost._replace(budget=(h100, b200), fast_budget=(h100_fast, b200_fast))


def _columns():
    """Both copies; four rows of eight a thread."""
    direction, bf16 = direction_of(MXFP8Scaling(E4M3), False), as_it_is("bfloat16")
    both = MXFP8Columns(bf16, direction, False, True, True, False)
    yield Cost("bf16 -> MXFP8 both", both, 32 * 4.0625, (3.45, 3.1), 4, 0)
    columnwise = MXFP8Columns(bf16, direction, False, True, False, False)
    yield Cost("bf16 -> MXFP8 columnwise", columnwise, 32 * 3.03125, (2.75, 2.5), 4, 0)
    swiglu, dgelu = Values(Kind.FORWARD, "swiglu", "bfloat16"), Values(Kind.BACKWARD, "gelu", "bfloat16")
    spec = MXFP8Columns(swiglu, direction, True, True, True, False)
    yield Cost("swiglu bf16 -> MXFP8 both", spec, 32 * 6.0625, (6.1, 5.8), 8, 0, (4.4, 3.7))
    spec = MXFP8Columns(dgelu, direction, True, True, True, True)
    yield Cost("dgelu + dbias bf16 -> MXFP8 both", spec, 32 * 6.06 + 4, (7.95, 7.55), None, None, (5.2, 4.1))
