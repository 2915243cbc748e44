"""Sums of columns, the gradient of a bias: computed in the same read that stores or casts the values.

    partial    the sum of 32 rows of a column, a band, from the first row on, as float32
    sum        of a column's partial sums, from the first band on, rounded to the dtype of the result
    summed     the values as they are computed, or rounded to a dtype
    stored     these values, in a dtype, or cast as a scaling says; or nothing

The order is fixed, so a sum has the same bits every time. `refops` adds in another order.
"""

# --- 1. what it computes: above ---------------------------------------------------------------------

import math
from dataclasses import dataclass

import numpy as np

from cuda_kernels import casts
from cuda_kernels.directions import Direction, direction_of
from cuda_kernels.launch import BAND, band_shape, thread_shape
from cuda_kernels.operands import Cost, Kind, Spec, Stored, Values, pointer, scalar
from cuda_kernels.reads import described_source, make_read
from cuda_kernels.simt import (
    I32,
    I64,
    F,
    cuda,
    first_column,
    first_row,
    kernel,
    offset,
    select,
    thread_number,
)
from cuda_kernels.stores import described_output, make_put
from cuda_kernels.vectors import VECTOR, ZEROS, add, make_round, make_store
from refops.formats import E4M3
from refops.scalings import DelayedScaling, MXFP8Scaling

ZERO = F(0)
widen = casts.widen_bf16

# --- 2. naive ---------------------------------------------------------------------------------------


@kernel
def dbias_naive(x, sums, rows, columns):
    """x (rows, columns), bfloat16 -> sums (columns,): one thread one column, from the first row to the last.

    A warp reads 64 neighbouring bytes at once, but there are only as many threads as columns: far too few to keep a
    GPU's memory busy.
    """
    column = thread_number()
    if column < columns:
        total = ZERO
        for row in range(rows):
            total = total + widen(x[offset(row, columns, column)])
        sums[column] = casts.narrow_bf16(total)


# --- 3. coalesced -----------------------------------------------------------------------------------


@kernel
def dbias_coalesced(x, sums, rows, columns):
    """As `dbias_naive`, with more threads: 32 x 32 share 32 columns.

    A thread adds every 32nd row of a column; one warp adds the 32 sums of each column.
    """
    of_threads = cuda.shared.array((32, 32), np.float32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    column, total = I32(cuda.blockIdx.x * 32 + tx), ZERO
    if column < columns:
        for row in range(ty, rows, 32):
            total = total + widen(x[offset(row, columns, column)])
    of_threads[ty, tx] = total
    cuda.syncthreads()  # every thread's sum is there
    if ty == 0 and column < columns:
        for k in range(1, 32):
            total = total + of_threads[k, tx]
        sums[column] = casts.narrow_bf16(total)


# --- 4. fused ---------------------------------------------------------------------------------------

# A thread walks down eight columns of 32 rows, a band, and holds their eight sums in registers. Five functions:
#
#   read(source, row, column, left)       eight values of a row
#   rounded(v)                            these as a dtype holds them, or as they are
#   add(totals, v, ZERO)                  the eight sums with a row more; `add` ignores the last argument
#   put(v, out, row, column, left)        stores eight values, or their codes, or nothing: see `stores`
#   store(totals, partial, at, left)      stores the eight sums, as float32 from element `at` on
#
# left: the number of elements from here to the end of the row. It may exceed the elements of the thread; outside the
# matrix it is 0 or negative: a read gives zeros there and nothing is stored, but the thread goes on, for the warp
# shuffles in some `put`.


@dataclass(frozen=True)
class Band(Spec):
    """Store and sum in one read; `partial` is (bands, K).

    Attributes:
        values: what is computed.
        stored: what is stored of it: a dtype, a `Direction`, or None, nothing.
        rounded_to: dtype that values are rounded to before they are stored; "float32": they stay as they are.
        sums_rounded: whether the rounded values are summed, else those that `read` gives.
        whole: rows are a multiple of 8 elements (what a thread owns) and every array is aligned to 16 bytes: a thread
            has all of its elements or none, in wide accesses. Else each element is an access of its own.
    """

    values: Values
    stored: str | Direction | None
    rounded_to: str
    sums_rounded: bool
    whole: bool

    title = "band"

    def __str__(self):
        stored = getattr(self.stored, "name", self.stored)
        return f"{self.title}: {self.values} -> {'sums' if stored is None else f'{stored} + sums'}"

    def operands(self):
        return described_source(self.values), described_output(self.stored), pointer(np.float32)

    def must_read(self, field):
        """`data` only where something is stored: else it is a null pointer."""
        return self.values.must_read(field) and (field != "data" or self.stored is not None)

    def grid(self, outer, inner):
        (x, y, z), block = band_shape(outer, inner)
        return (max(1, x), max(1, y), z), block  # `put` stores a known scale even of an empty tensor

    def build(self, target):
        read, put = make_read(self.values, self.whole, target), make_put(self.stored, self.whole, target)
        rounded, sums_rounded = make_round(self.rounded_to, target), self.sums_rounded
        store = make_store("float32", self.whole, target)

        @kernel
        def band(source, out, partial):
            number = first_row(1)  # of the band: a thread block has one, and is one row of the grid
            column = I32((first_column(cuda.blockDim.x) + cuda.threadIdx.x) * VECTOR)
            totals = ZEROS
            for i in range(BAND):
                row = I32(number * BAND + i)
                left = select(row < out.outer, I32(out.inner - column), I32(0))
                exact = read(source, row, column, left)
                v = rounded(exact)
                totals = add(totals, v if sums_rounded else exact, ZERO)
                put(v, out, row, column, left)
            if number * BAND < out.outer:  # a folded grid, or that of no rows, has blocks beyond the last band
                store(totals, partial, offset(number, out.inner, column), I32(out.inner - column))

        return band


@dataclass(frozen=True)
class FinishSums(Spec):
    """Add the `count` rows of `partial` (count, columns), from the first on: one thread one column.

    Attributes:
        storage: dtype of the sums.
    """

    storage: str

    title = "finish sums"

    def operands(self):
        return pointer(np.float32), pointer(casts.carrier(self.storage)), scalar(np.int32), scalar(np.int32)

    def grid(self, outer, inner):
        return thread_shape(inner)

    def build(self, target):
        narrow = casts.STORAGES[self.storage].narrow

        @kernel
        def finish_sums(partial, out, count, columns):
            column = thread_number()
            if column < columns:
                total = ZERO
                for i in range(count):
                    total = total + partial[I64(i) * columns + column]
                out[column] = narrow(total)

        return finish_sums


# --- 5. their launch --------------------------------------------------------------------------------


def column_sums(gpu, front, dbias, *, stored=None, out=None, rounded=False, sums_rounded=False):
    """Fill `dbias`, an array (K,) of any dtype, and on the way `out`, both from one read of the front.

    `gpu` is the backend (`gpu.GPU`): `gpu.launch(spec, (rows, columns), *operands)` starts a kernel,
    `gpu.whole(front, n, *stored)` says whether rows are whole accesses of n elements in what is read and stored.

    Args:
        stored, out: dtype or `Direction` and the tuple to fill, as `stores.described_output` says; None: nothing.
        rounded: values are rounded to the front's dtype before they are cast. (Values stored in a dtype always are, to
            that one.)
        sums_rounded: the rounded values are summed; values are rounded, if they are stored in a dtype to that one.
    """
    m, k = front.matrix_shape
    partial = gpu.empty((math.ceil(m / BAND), k), "float32")
    out = Stored(None, m, k) if out is None else out  # the sizes alone
    dtype = stored if isinstance(stored, str) else front.storage
    spec = Band(
        front.values(),
        stored,
        dtype if rounded or sums_rounded else "float32",
        sums_rounded,
        gpu.whole(front, VECTOR, out.data, partial),
    )
    gpu.launch(spec, (m, k), front.source(), out, (partial,))
    finish_sums(gpu, partial, dbias)


def finish_sums(gpu, partial, out):
    """Fill `out`, an array (K,) of any dtype, with the sums of the rows of `partial`, float32 (count, K)."""
    count, k = partial.shape
    gpu.launch(FinishSums(out.dtype), (count, k), (partial,), (out,), (count,), (k,))


# --- 6. their cost ----------------------------------------------------------------------------------


def costs():
    """The `operands.Cost` of each kernel.

    Bytes are those that a thread with all of its elements reads and writes: of a band eight columns. There are no
    budgets, which are instructions for each byte: these kernels have loops, whose instructions a report counts once.
    """
    mxfp8, delayed = direction_of(MXFP8Scaling(E4M3), False), direction_of(DelayedScaling(E4M3), False)
    read, sums, wide = 2 + 2, 8 * 4, {"wide_loads": 2, "wide_stores": 2}  # x and dy
    for name in ("gelu", "silu"):
        spec = Band(Values(Kind.BACKWARD, name, "bfloat16"), mxfp8, "bfloat16", False, True)
        yield Cost(f"d{name} + dbias bf16 -> MXFP8", spec, BAND * 8 * (read + 1 + 1 / 32) + sums, **wide)
    spec = Band(Values(Kind.BACKWARD, "gelu", "bfloat16"), delayed, "float32", False, True)
    yield Cost("dgelu + dbias bf16 -> delayed FP8", spec, BAND * 8 * (read + 1) + sums, **wide)
    yield Cost("sums of 32 bands -> bf16", FinishSums("bfloat16"), 32 * 4 + 2)
