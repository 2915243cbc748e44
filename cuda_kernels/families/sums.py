"""Sums of columns, the gradient of a bias: added in one read beside what is stored, cast or not.

    partial    a thread adds 32 rows of its columns, from the first on, as float32
    sum        these are added, from the first 32 rows on, and rounded to the dtype of the result
    stored     the values that are summed, or rounded ones; in a dtype, or cast as a scaling says; or nothing

The order is fixed, so a sum has the same bits every time. `refops` adds in another one.
"""

# --- 1. what it computes: above ---------------------------------------------------------------------

import math
from dataclasses import dataclass

import numpy as np

from cuda_kernels import casts
from cuda_kernels.directions import Direction, direction_of
from cuda_kernels.launch import BAND, band_shape
from cuda_kernels.operands import Cost, Kind, Spec, Stored, Values, pointer, scalar
from cuda_kernels.reads import described_source, make_read
from cuda_kernels.simt import (
    I32,
    I64,
    THREADS,
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
    """x (M, columns) -> sums (columns,): one thread one column, from the first row to the last.

    Coalesced, but there are only as many threads as columns: far too few to keep a GPU's memory busy.
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
    """As `dbias_naive`: 32 x 32 threads share 32 columns; each adds every 32nd row, one warp adds the 32 sums."""
    partial = cuda.shared.array((32, 32), np.float32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    column, total = I32(cuda.blockIdx.x * 32 + tx), ZERO
    if column < columns:
        for row in range(ty, rows, 32):
            total = total + widen(x[offset(row, columns, column)])
    partial[ty, tx] = total
    cuda.syncthreads()
    if ty == 0 and column < columns:
        for k in range(1, 32):
            total = total + partial[k, tx]
        sums[column] = casts.narrow_bf16(total)


# --- 4. fused ---------------------------------------------------------------------------------------

# A thread walks down eight columns of 32 rows, a band, and holds their eight sums in registers. Five words:
#
#   read(source, row, column, left)       eight values of a row; `left` elements to the end of the row
#   rounded(v)                            these as a dtype holds them, or as they are
#   add(sums, v, ZERO)                    the eight sums with a row more
#   put(v, out, row, column, left)        stores eight values, or their codes, or nothing: see `stores`
#   store(sums, partial, at, left)        the eight sums, as float32 from element `at` on


@dataclass(frozen=True)
class Band(Spec):
    """Store and sum in one read; `partial` is (bands, K).

    Attributes:
        values: what is computed.
        stored: what is stored of it: a dtype, a `Direction`, or None, nothing.
        rounded: dtype that values are rounded to before they are stored; "float32": they stay as they are.
        sums_rounded: whether the rounded values are summed, else those that `read` gives.
        whole: rows consist of whole 16-byte accesses at aligned addresses. Else every element is an access of its own.
    """

    values: Values
    stored: str | Direction | None
    rounded: str
    sums_rounded: bool
    whole: bool

    title = "band"

    def __str__(self):
        stored = getattr(self.stored, "name", self.stored)
        return f"{self.title}: {self.values} -> {'sums' if stored is None else f'{stored} + sums'}"

    def operands(self):
        return described_source(self.values), described_output(self.stored), pointer(np.float32)

    def must_read(self, field):
        return self.values.must_read(field) and (field != "data" or self.stored is not None)

    def grid(self, outer, inner):
        (x, y, z), block = band_shape(outer, inner)
        return (max(1, x), max(1, y), z), block  # `put` stores a known scale even of an empty tensor

    def build(self, target):
        read, put = make_read(self.values, self.whole, target), make_put(self.stored, self.whole, target)
        rounded, sums_rounded = make_round(self.rounded, target), self.sums_rounded
        store = make_store("float32", self.whole, target)

        @kernel
        def band(source, out, partial):
            number = first_row(1)
            column = I32((first_column(cuda.blockDim.x) + cuda.threadIdx.x) * VECTOR)
            sums = ZEROS
            for i in range(BAND):
                row = I32(number * BAND + i)
                left = select(row < out.outer, I32(out.inner - column), I32(0))
                exact = read(source, row, column, left)
                v = rounded(exact)
                sums = add(sums, v if sums_rounded else exact, ZERO)
                put(v, out, row, column, left)
            if number * BAND < out.outer:
                store(sums, partial, offset(number, out.inner, column), I32(out.inner - column))

        return band


@dataclass(frozen=True)
class FinishSums(Spec):
    """Add the rows of `partial` (count, columns), from the first on: one thread one column.

    Attributes:
        storage: dtype of the sums.
    """

    storage: str

    title = "finish sums"

    def operands(self):
        return pointer(np.float32), pointer(casts.carrier(self.storage)), scalar(np.int32), scalar(np.int32)

    def grid(self, outer, inner):
        return (math.ceil(inner / THREADS), 1, 1), (THREADS, 1, 1)

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

    Args:
        stored, out: dtype or `Direction` and the tuple to fill, as `stores.described_output` says; None: nothing.
        rounded: values are rounded before they are stored, to a stored dtype, else to that of the front.
        sums_rounded: they are, and the rounded ones are summed.
    """
    m, k = front.matrix_shape
    partial = gpu.empty((math.ceil(m / BAND), k), "float32")
    out = Stored(None, m, k) if out is None else out
    dtype = stored if isinstance(stored, str) else front.storage
    spec = Band(
        front.values(gpu.fast_math),
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
    """The `operands.Cost` of each kernel: a band reads x and dy, bfloat16, and stores codes, and a float32 a column.

    Loops are counted once, so instructions for each byte are no budget.
    """
    mxfp8, delayed = direction_of(MXFP8Scaling(E4M3), False), direction_of(DelayedScaling(E4M3), False)
    for name in ("gelu", "silu"):
        spec = Band(Values(Kind.BACKWARD, name, "bfloat16"), mxfp8, "bfloat16", False, True)
        yield Cost(f"d{name} + dbias bf16 -> MXFP8", spec, BAND * 40.25 + 32, None, 2, 2)
    spec = Band(Values(Kind.BACKWARD, "gelu", "bfloat16"), delayed, "float32", False, True)
    yield Cost("dgelu + dbias bf16 -> delayed FP8", spec, BAND * 40 + 32, None, 2, 2)
    yield Cost("sums of 32 bands -> bf16", FinishSums("bfloat16"), 32 * 4 + 2)
