"""Casts by blocks of B neighbours, one code in a byte, both copies stored as the values lie: MXFP8, MXINT8 (B = 32).

    block      B neighbours of a row in the rowwise copy, of a column in the columnwise one
    scale      (stored, multiplier) of the block's largest magnitude, amax, NaN ignored, by the rule that the scaling
               declares (`refops.scalings`): what is stored, and what elements are multiplied by. MXFP8 of E4M3, whose
               largest value is 448: stored byte = amax * float32(1 / 448) as E8M0, rounded up to a power of two;
               multiplier = 2^(127 - byte)
    code       the element format's code of value * multiplier, to nearest, ties to even, saturated
    place      codes of both copies lie as the values do, (M, K); rowwise scales are [row, block], columnwise ones
               [block, column], or both are in the order that GEMMs read ("swizzled")

Activations and their gradients are computed by the same kernel and rounded to the tensor's dtype before the cast, as TE
(Transformer Engine) does. Arguments, results and errors are those of `refops.quantize`, `activation_quantize` and
`activation_grad_quantize`.
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
    thread_number,
)
from cuda_kernels.stores import described_blocks, make_cast_blocks, put_nothing
from cuda_kernels.vectors import (
    VECTOR,
    ZEROS,
    add,
    by_element,
    left_in_row,
    make_block_max,
    make_cast_sixteen,
    make_each,
    make_each_with,
    make_fold,
    make_group_max,
    make_map2,
    make_round,
    make_round_sixteen,
    make_store_codes,
    place,
    products,
)
from refops.activations import ACTIVATIONS
from refops.formats import E4M3, E5M2
from refops.quantization.layout import ceil_div
from refops.scalings import MXFP8Scaling

#: 448 is the largest value of E4M3.
ZERO, INVERSE_OF_448 = F(0), F(1) / F(448)
widen, max_of_32 = casts.widen_bf16, make_group_max(32)

# --- 2. naive ---------------------------------------------------------------------------------------


@kernel
def mxfp8_naive(x, codes, scales, rows, columns):
    """x (rows, columns), bfloat16 -> codes (rows, columns), scales (rows, columns / 32): one thread one block.

    A thread reads its block twice. Neighbouring threads read 64 bytes apart: a warp's load spans 2 KiB, touches 32
    sectors of 32 bytes, and uses 2 bytes of each at once.
    """
    i = thread_number()
    row, block = i // (columns // 32), i % (columns // 32)
    if row < rows:
        first, amax = offset(row, columns, block * 32), ZERO
        for k in range(32):
            amax = larger_magnitude(amax, widen(x[first + k]))
        byte = casts.e8m0_up(amax * INVERSE_OF_448)
        scales[offset(row, columns // 32, block)] = np.uint8(byte)
        for k in range(32):
            codes[first + k] = np.uint8(casts.e4m3(widen(x[first + k]) * casts.e8m0_multiplier(byte)))


# --- 3. coalesced -----------------------------------------------------------------------------------


@kernel
def mxfp8_coalesced(x, codes, scales, rows, columns):
    """As `mxfp8_naive`: one thread per element, one warp per block, whose amax every lane gets by shuffles.

    A warp reads 64 neighbouring bytes at once, and each element once. Threads past the last row take part in the
    shuffles too.
    """
    i = thread_number()
    row, column = i // columns, i % columns
    inside = row < rows
    value = widen(x[offset(row, columns, column)]) if inside else ZERO
    byte = casts.e8m0_up(max_of_32(larger_magnitude(ZERO, value)) * INVERSE_OF_448)
    if inside:
        codes[offset(row, columns, column)] = np.uint8(casts.e4m3(value * casts.e8m0_multiplier(byte)))
        if column % 32 == 0:
            scales[offset(row, columns // 32, column // 32)] = np.uint8(byte)


# --- 4. fused ---------------------------------------------------------------------------------------

# A thread owns 16 neighbours of a row, in registers as two vectors of eight float32. B / 16 neighbouring threads share
# a block of B elements. Four functions:
#
#   place(16, rows, columns)            (row, column, left) of the first
#   read(source, row, column, left)     their values, or what an activation makes of them
#   rounded(v)                          the values as a dtype holds them
#   cast(v, out, row, column, left)     stores their codes; the first of the threads that share a block stores its scale
#
# left: the number of elements from here to the end of the row. It may exceed the elements of the thread; outside the
# matrix it is 0 or negative: a read gives zeros there and nothing is stored, but the thread goes on, for the warp
# shuffles in `block_max`.


def make_cast(direction, whole, target):
    """Return `cast(v, out, row, column, left)` of sixteen neighbours of a row."""
    block_max, scale_block = make_block_max(16, direction.block[1]), direction.scale_block(target)
    cast_sixteen = make_cast_sixteen(direction.fmt, direction.packed, whole, target)

    @device
    def cast(v, out, row, column, left):
        multiplier = scale_block(block_max(v), out, row, column, left)
        cast_sixteen(v, multiplier, out.data, (row, out.inner, column), left)

    return cast


@dataclass(frozen=True)
class Fused(Spec):
    """What the kernels below have in common.

    Attributes:
        values: what is cast: a tensor as it is, an activation, a gradient.
        direction: the scaling's rowwise direction, also where only columns are cast; theirs is `direction.other`.
        rounded_to: dtype that values are rounded to before the cast; "float32": they stay as they are.
    """

    values: Values
    direction: Direction
    rounded_to: str

    def __str__(self):
        return f"{self.title}: {self.values} -> {self.direction.name}"

    def operands(self):
        return described_source(self.values), described_blocks(self.direction)

    def must_read(self, field):
        """Every pointer, but `dy` only of a gradient and `row_scales` only where rows are scaled."""
        return self.values.must_read(field)


@dataclass(frozen=True)
class MXFP8Rows(Fused):
    """One copy along the rows.

    Attributes:
        whole: rows are a multiple of 16 elements (what a thread owns) and every array is aligned to 16 bytes: a thread
            has all of its elements or none, in wide accesses. Else each element is an access of its own.
    """

    whole: bool

    title = "fused rows"

    def grid(self, outer, inner):
        return row_shape(outer, inner, lanes=self.direction.block[1] // 16, owned=16)

    def build(self, target):
        read = make_read_sixteen(self.values, self.whole, target)
        rounded = make_round_sixteen(self.rounded_to, target)
        cast = make_cast(self.direction, self.whole, target)

        @kernel
        def mxfp8_rows(source, out):
            row, column, left = place(16, out.outer, out.inner)
            v = rounded(read(source, row, column, left))
            cast(v, out, row, column, left)

        return mxfp8_rows


@dataclass(frozen=True)
class MXFP8GradientRows(Fused):
    """`MXFP8Rows` of a gated gradient: a thread makes 16 columns of each half from one read of act, gate and dy.

    Only where no block reaches from one half into the other, and rows are whole.
    """

    title = "fused halves"

    def grid(self, outer, inner):
        return row_shape(outer, inner // 2, lanes=self.direction.block[1] // 16, owned=16)

    def build(self, target):
        read = make_read_sixteen_of_halves(self.values, target)
        rounded = make_round_sixteen(self.rounded_to, target)
        cast = make_cast(self.direction, True, target)

        @kernel
        def mxfp8_gradient_rows(source, out):
            row, column, left = place(16, out.outer, source.width)
            act, gate = read(source, row, column, left)
            cast(rounded(act), out, row, column, left)
            cast(rounded(gate), out, row, I32(column + source.width), left)

        return mxfp8_gradient_rows


# Down the columns, a thread block of 8 warps owns B rows x 256 columns. A thread owns eight neighbours of a row, from
# column 8 * lane on, in every eighth row from its warp's number on. They stay in its registers from the read to the
# cast. In between, each thread looks after one column, of which every warp has a part.
#
#   read_rows(p, row)             for each of the thread's rows (v, exact): values as they are cast, and before they
#                                 were rounded; on the way the rowwise copy is stored
#   larger_of_all(first, kept)    the largest magnitudes of the eight columns, over the thread's rows
#   sum_of_all(first, kept)       their sums, of exact values
#   put_columns(shared, v)        shows the other warps eight numbers, one per column
#   max_of_warps(shared)          the largest of what the warps put there for the thread's one column
#   sum_of_warps(shared)          their sum
#   scale_column(amax, out, column, row, left)
#                                 what elements of this column are multiplied by; its scale is stored. In this copy a
#                                 column is the outer index, and `left` counts rows to the matrix's end
#   take_columns(shared)          the multipliers of the thread's eight columns
#   cast_rows(p, row, kept)       stores the codes of the thread's rows
#
# `larger`, `add` and `products` map two vectors and take a third argument, one number for all elements. They ignore it:
# callers give ZERO.

WARPS = THREADS // 32
#: Where sums begin: -0 + x is x for every x, so no addition is compiled. (0 + x is 0 where x is -0.) A caller sees no
#: sum of -0, as from `refops`, for `finish_sums` begins at 0.
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


take_element = by_element(device(lambda shared, lane, k, left: shared[lane + 32 * k]))


@device
def take_columns(shared):
    """The numbers of a thread's eight columns, from where `put_columns` puts them; `shared` is one such row."""
    return take_element(shared, cuda.threadIdx.x & 31, VECTOR)


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


def make_read_row(read, rounded, put):
    """Return `read_row(p, row)`: eight values of a row, (v, exact); `put`, of `stores`, gets v."""

    @device
    def read_row(p, row):
        source, out, column = p
        left = left_in_row(row, column, out.outer, out.inner)
        exact = read(source, row, column, left)
        v = rounded(exact)
        put(v, out, row, column, left)
        return v, exact

    return read_row


def make_cast_row(direction, whole, target):
    """Return `cast_row(p, row, of_row)`: store the codes of a row's eight, each times the multiplier of its column."""
    store = make_store_codes(direction.fmt, direction.packed, whole, target)

    @device
    def cast_row(p, row, of_row):
        (out, multipliers, column), (v, _) = p, of_row
        left = left_in_row(row, column, out.outer, out.inner)
        store(products(v, multipliers, ZERO), out.data, (row, out.inner, column), left)

    return cast_row


@dataclass(frozen=True)
class MXFP8Columns(Fused):
    """Both copies, or the columnwise one, and sums of columns, from one read.

    Attributes:
        whole: as of `MXFP8Rows`, of eight elements.
        rowwise: whether the rowwise copy is made. Else of `row_out` only the sizes are read.
        sums: whether `partial` (row blocks, columns) gets each row block's sums, of values before they are rounded.
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

    def must_read(self, field):  # names are those of both copies: without a rowwise one no claim is made for either
        return super().must_read(field) and (self.rowwise or field not in ("data", "scales"))

    def grid(self, outer, inner):
        return column_grid(outer, inner, self.direction.block[1])

    def build(self, target):
        direction, rows, sums = self.direction, self.direction.block[1], self.sums
        read, rounded = make_read(self.values, self.whole, target), make_round(self.rounded_to, target)
        put = make_cast_blocks(direction, self.whole, target) if self.rowwise else put_nothing
        scale_column, count = direction.other.scale_block(target), rows // WARPS
        read_rows = make_each(count, WARPS, make_read_row(read, rounded, put))
        larger_of_all = make_fold(count, device(lambda so_far, of_row: larger(so_far, of_row[0], ZERO)))
        sum_of_all = make_fold(count, device(lambda so_far, of_row: add(so_far, of_row[1], ZERO)))
        cast_rows = make_each_with(count, WARPS, make_cast_row(direction.other, self.whole, target))

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
            cuda.syncthreads()  # every warp's maxima and sums are there
            own = I32(column0 + own_column(thread))
            left = left_in_row(own, row0, column_out.inner, column_out.outer)
            multipliers[thread] = scale_column(max_of_warps(maxima), column_out, own, row0, left)
            if sums and left > 0:
                partial[offset(row0 // rows, column_out.inner, own)] = sum_of_warps(totals)
            cuda.syncthreads()  # every thread's multiplier is there
            cast_rows((column_out, take_columns(multipliers), column), row, kept)

        return mxfp8_columns


# --- 5. their launch --------------------------------------------------------------------------------


def quantize(gpu, job):
    """Fill the copies, and the sums of columns, of a `copies.BlockJob`.

    `gpu` is the backend (`gpu.GPU`): `gpu.launch(spec, (rows, columns), *operands)` starts a kernel,
    `gpu.whole(front, n, *stored)` says whether rows are whole accesses of n elements in what is read and stored.
    """
    if job.columnwise is not None:
        quantize_columns(gpu, job)
    elif job.dbias is not None:
        out, direction, sums_rounded = job.rowwise.blocks(), job.rowwise.direction, job.dbias_rounded
        gpu.column_sums(job.front, job.dbias, stored=direction, out=out, rounded=job.rounded, sums_rounded=sums_rounded)
    else:
        quantize_rows(gpu, job)


def rounded_to(job):
    """The dtype that values are rounded to before the cast, as `Fused` has it."""
    return job.front.storage if job.rounded else "float32"


def quantize_rows(gpu, job):
    """The rowwise copy alone."""
    front, out, values = job.front, job.rowwise, job.front.values()
    spec = MXFP8Rows(values, out.direction, rounded_to(job), gpu.whole(front, 16, out.data))
    gated_gradient = values.gated and values.kind is Kind.BACKWARD
    if gated_gradient and spec.whole and front.width % out.direction.block[1] == 0:
        spec = MXFP8GradientRows(values, out.direction, rounded_to(job))
    gpu.launch(spec, front.matrix_shape, front.source(), out.blocks())


def quantize_columns(gpu, job):
    """The columnwise copy, and the rowwise one and sums of columns if they are wanted, from one read.

    The kernel sums values that are not rounded. `gpu.GPU` asks for sums of rounded ones (`job.dbias_rounded`) here only
    of a tensor as it is, whose values rounding does not change.
    """
    front, rowwise, columnwise, (m, k) = job.front, job.rowwise, job.columnwise, job.front.matrix_shape
    direction, partial = columnwise.direction.other, None
    if job.dbias is not None:
        partial = gpu.empty((ceil_div(m, direction.block[1]), k), "float32")
    spec = MXFP8Columns(
        front.values(),
        direction,
        rounded_to(job),
        whole=gpu.whole(front, VECTOR, columnwise.data, None if rowwise is None else rowwise.data),
        rowwise=rowwise is not None,
        sums=partial is not None,
    )
    row_out = columnwise if rowwise is None else rowwise  # of one that stands in, only the sizes are read
    gpu.launch(spec, (m, k), front.source(), row_out.blocks(), columnwise.blocks(), (partial,))
    if partial is not None:
        gpu.finish_sums(partial, job.dbias)


# --- 6. their cost ----------------------------------------------------------------------------------

#: Instructions for each byte of an activation, or its gradient, from bfloat16 to MXFP8 rowwise, rounded up to the next
#: twentieth: accurate for an H100 and a B200, then with fast math for both. They are counted in the code that ptxas
#: compiles for these cards, without a card; `tests/measured/measure_activations.py` counts and writes them.
ROW_BUDGETS = json.loads((Path(__file__).parent.parent / "row_budgets.json").read_text(encoding="utf-8"))
#: Bytes of a value; and what is stored for one: a code, and its part of a scale.
SIZES, STORED = {"bfloat16": 2, "float16": 2, "float32": 4}, 1 + 1 / 32


def costs():
    """The `operands.Cost` of each kernel.

    Bytes are those that a thread with all of its elements reads and writes; budgets are instructions for each of
    them, compiled for (H100, B200); then 16-byte loads and stores.
    """
    return [*_tensors(), *_activations(), *_columns()]


def _tensors():
    """Rows of a tensor as it is: 16 elements a thread."""
    direction, bf16, wide = direction_of(MXFP8Scaling(E4M3), False), as_it_is("bfloat16"), {"wide_stores": 1}
    for storage, size in SIZES.items():
        spec, read_and_stored = MXFP8Rows(as_it_is(storage), direction, "float32", True), 16 * (size + STORED)
        yield Cost(f"{storage} -> MXFP8", spec, read_and_stored, budget=(2.45, 2), wide_loads=size, **wide)
    bytes_of_bf16 = 16 * (2 + STORED)
    e5m2, swizzled = direction_of(MXFP8Scaling(E5M2), False), direction_of(MXFP8Scaling(E4M3), False, swizzled=True)
    spec = MXFP8Rows(bf16, e5m2, "float32", True)
    yield Cost("bf16 -> MXFP8 E5M2", spec, bytes_of_bf16, budget=(2.45, 2), wide_loads=2, **wide)
    spec = MXFP8Rows(bf16, swizzled, "float32", True)
    yield Cost("bf16 -> MXFP8, swizzled", spec, bytes_of_bf16, wide_loads=2, **wide)
    yield Cost("bf16 -> MXFP8, guarded", MXFP8Rows(bf16, direction, "float32", False), bytes_of_bf16)


def _activations():
    """Rows of activations and of their gradients: 16 results a thread, of a gated gradient 16 of each half."""
    direction = direction_of(MXFP8Scaling(E4M3), False)
    for name, activation in ACTIVATIONS.items():
        halves = 2 if activation.gated else 1
        spec = MXFP8Rows(Values(Kind.FORWARD, name, "bfloat16"), direction, "bfloat16", True)
        read_and_stored = 16 * (2 * halves + STORED)
        cost = Cost(f"{name} bf16 -> MXFP8", spec, read_and_stored, wide_loads=2 * halves, wide_stores=1)
        yield _with_row_budget(cost, name)
        gradient = Values(Kind.BACKWARD, name, "bfloat16")
        if activation.gated:
            spec = MXFP8GradientRows(gradient, direction, "bfloat16")
        else:
            spec = MXFP8Rows(gradient, direction, "bfloat16", True)
        read_and_stored, loads = 16 * (2 * (halves + 1) + halves * STORED), 2 * (halves + 1)
        cost = Cost(f"d{name} bf16 -> MXFP8", spec, read_and_stored, wide_loads=loads, wide_stores=halves)
        yield _with_row_budget(cost, f"d{name}")
    for storage in ("float16", "float32"):
        size, spec = SIZES[storage], MXFP8Rows(Values(Kind.FORWARD, "swiglu", storage), direction, storage, True)
        read_and_stored = 16 * (2 * size + STORED)
        yield Cost(f"swiglu {storage} -> MXFP8", spec, read_and_stored, wide_loads=2 * size, wide_stores=1)
    spec = MXFP8Rows(Values(Kind.BACKWARD, "swiglu", "bfloat16"), direction, "bfloat16", False)
    yield Cost("dswiglu bf16 -> MXFP8, guarded", spec, 16 * (2 * 3 + STORED))  # it reads act, gate and dy


def _with_row_budget(cost, name):
    """A `Cost` with the budget in `ROW_BUDGETS`, or without one if the activation has not been measured yet."""
    h100, b200, h100_fast, b200_fast = ROW_BUDGETS.get(name, (None,) * 4)
    if h100 is None:
        return cost
    return cost._replace(budget=(h100, b200), fast_budget=(h100_fast, b200_fast))


def _columns():
    """Both copies: four rows of eight elements a thread."""
    direction, elements = direction_of(MXFP8Scaling(E4M3), False), 4 * 8

    def columns(values, rounded_to, rowwise=True, sums=False):
        return MXFP8Columns(values, direction, rounded_to, whole=True, rowwise=rowwise, sums=sums)

    spec, read_and_stored = columns(as_it_is("bfloat16"), "float32"), elements * (2 + 2 * STORED)
    yield Cost("bf16 -> MXFP8 both", spec, read_and_stored, budget=(3.45, 3.1), wide_loads=4, wide_stores=0)
    spec, read_and_stored = columns(as_it_is("bfloat16"), "float32", rowwise=False), elements * (2 + STORED)
    yield Cost("bf16 -> MXFP8 columnwise", spec, read_and_stored, budget=(2.75, 2.5), wide_loads=4, wide_stores=0)
    yield Cost(
        "swiglu bf16 -> MXFP8 both",
        columns(Values(Kind.FORWARD, "swiglu", "bfloat16"), "bfloat16"),
        elements * (2 + 2 + 2 * STORED),
        budget=(6.1, 5.8),
        wide_loads=8,
        wide_stores=0,
        fast_budget=(4.4, 3.7),
    )
    yield Cost(
        "dgelu + dbias bf16 -> MXFP8 both",
        columns(Values(Kind.BACKWARD, "gelu", "bfloat16"), "bfloat16", sums=True),
        elements * (2 + 2 + 2 * STORED) + 4,  # and the sum of one column
        budget=(7.95, 7.55),
        fast_budget=(5.2, 4.1),
    )
