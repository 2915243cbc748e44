"""Casts with one scale for the whole tensor: known beforehand (delayed scaling), or of the tensor's amax (current).

    amax       the largest magnitude of the tensor; NaN is ignored
    scale      the rule that the scaling declares (`refops.scalings`) gives what elements are multiplied by, and what
               is stored, scale_inv of either copy. Delayed (`refops.DelayedScaling`): multiplier = the given scale;
               current (`refops.CurrentScaling`): multiplier = fmt.max / amax, 1 where amax is 0 or infinite; both store
               1 / multiplier
    code       the element format's code of value * multiplier, to nearest, ties to even, saturated
    place      rowwise codes lie as the values do, columnwise ones transposed

With a known scale one kernel makes everything of one read: activation, amax (for the scales of later steps), codes,
transposed codes, sums of columns. But for an unknown scale, or if the scaling declares that rounded values are cast,
another kernel stores an activation's result first. Arguments, results and errors are those of `refops.quantize`.
"""

# --- 1. what it computes: above ---------------------------------------------------------------------

from dataclasses import dataclass, replace

import numpy as np

from cuda_kernels import casts
from cuda_kernels.copies import shared_amax
from cuda_kernels.directions import Direction, direction_of
from cuda_kernels.launch import row_shape, tile_grid
from cuda_kernels.operands import (
    Cost,
    InMemory,
    Kind,
    KnownScale,
    Maxima,
    Spec,
    Values,
    as_it_is,
    described,
    pointer,
    scalar,
)
from cuda_kernels.reads import described_source, make_read, make_read_sixteen, make_read_sixteen_of_halves
from cuda_kernels.scale_rules import of_tensor
from cuda_kernels.simt import I32, F, cuda, kernel, larger_magnitude, offset, thread_number
from cuda_kernels.stores import described_output, make_put, put_nothing, record_largest, record_scale
from cuda_kernels.tiles import TILE_ROWS, TILE_WORDS, make_fill, make_sum_columns, make_turn, tile_columns
from cuda_kernels.vectors import VECTOR, amax_of_sixteen, make_cast_sixteen, place
from refops.formats import E4M3
from refops.quantization.layout import ceil_div
from refops.scalings import CurrentScaling, DelayedScaling
from refops.scalings.declaration import Numbers

ZERO = F(0)
widen = casts.widen_bf16

# --- 2. naive ---------------------------------------------------------------------------------------


@kernel
def transpose_naive(x, scale, rowwise, columnwise, rows, columns):
    """x (rows, columns), bfloat16, scale (1,) -> codes (rows, columns) and (columns, rows): one thread one element.

    Reads and rowwise stores are coalesced; a warp's columnwise store writes 32 bytes to 32 different lines.
    """
    i = thread_number()
    row, column = i // columns, i % columns
    if row < rows:
        code = np.uint8(casts.e4m3(widen(x[offset(row, columns, column)]) * scale[0]))
        rowwise[offset(row, columns, column)] = code
        columnwise[offset(column, rows, row)] = code


# --- 3. coalesced -----------------------------------------------------------------------------------


@kernel
def transpose_coalesced(x, scale, rowwise, columnwise, rows, columns):
    """As `transpose_naive`: 32 x 8 threads own a tile of 32 x 32, which turns round in shared memory.

    Block (x, y) of the grid has the tile at rows 32 y, columns 32 x; each thread has four elements, 8 rows apart. The
    tile's rows are 33 long: the 32 elements of a column lie in different banks.
    """
    tile = cuda.shared.array((32, 33), np.uint32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    row0, column0 = I32(cuda.blockIdx.y * 32), I32(cuda.blockIdx.x * 32)
    for k in range(0, 32, 8):
        row, column = I32(row0 + ty + k), I32(column0 + tx)
        if row < rows and column < columns:
            code = casts.e4m3(widen(x[offset(row, columns, column)]) * scale[0])
            tile[ty + k, tx] = code
            rowwise[offset(row, columns, column)] = np.uint8(code)
    cuda.syncthreads()  # all codes are in the tile: each thread takes out those that others put there
    for k in range(0, 32, 8):
        row, column = I32(row0 + tx), I32(column0 + ty + k)
        if row < rows and column < columns:
            columnwise[offset(column, rows, row)] = np.uint8(tile[tx, ty + k])


# --- 4. fused ---------------------------------------------------------------------------------------

# A thread owns 16 neighbours of a row, in registers as two vectors of eight float32. Six functions:
#
#   place(16, rows, columns)         (row, column, left) of the first
#   read(source, row, column, left)  their values: x, or an activation or gradient, computed here
#   amax_of_sixteen(v)               their largest magnitude; NaN is ignored
#   record_largest(x, out, left)     raises the tensor's amax, `out.amax`, to the largest x of a warp: shuffles find it,
#                                    which all 32 lanes must call, and lane 0 raises the amax by one atomic operation
#   record_scale(out, row, column)   stores scale_inv, by the thread that owns the first element of the matrix
#   cast(v, multiplier, data, (row, stride, column), left)
#                                    stores the codes of v * multiplier; `stride` is the length of a row of `data`
#
# left: the number of elements from here to the end of the row. It may exceed the elements of the thread; outside the
# matrix it is 0 or negative: a read gives zeros there and nothing is stored, but the thread goes on, for its warp
# shuffles in `record_largest`. Kernels with these have lanes=32: a warp lies in one row, so its first lane is in the
# matrix if any of its lanes is.


@dataclass(frozen=True)
class Amax(Spec):
    """The largest magnitude of a tensor, or of an activation of it; NaN is ignored.

    Attributes:
        values: what is computed.
        whole: rows are a multiple of 16 elements (what a thread owns) and every array is aligned to 16 bytes: a thread
            has all of its elements or none, in wide accesses. Else each element is an access of its own.
    """

    values: Values
    whole: bool

    title = "amax of a tensor"

    def __str__(self):
        return f"{self.title}: {self.values}"

    def operands(self):
        return described_source(self.values), described(Maxima)

    def must_read(self, field):
        return self.values.must_read(field)

    def grid(self, outer, inner):
        return row_shape(outer, inner, lanes=32, owned=16)

    def build(self, target):
        read = make_read_sixteen(self.values, self.whole, target)

        @kernel
        def amax_of_tensor(source, out):
            row, column, left = place(16, out.outer, out.inner)
            record_largest(amax_of_sixteen(read(source, row, column, left)), out, left)

        return amax_of_tensor


@dataclass(frozen=True)
class ScaleOfTensor(Spec):
    """The scale of a tensor whose amax was found, by the declared rule, for both copies: one thread.

    It stores what elements are multiplied by, and scale_inv of each copy; of one copy both are the same array.

    Attributes:
        direction: that of either copy.
    """

    direction: Direction

    title = "scale of a tensor"

    def operands(self):
        amax, multiplier, scale_inv, other_scale_inv = (pointer(np.float32),) * 4
        epsilon, largest_scale = (scalar(np.float32),) * 2
        return amax, multiplier, scale_inv, other_scale_inv, epsilon, largest_scale

    def grid(self, outer, inner):
        return (1, 1, 1), (1, 1, 1)

    def build(self, target):
        block_scale = self.direction.rules(target).block_scale

        @kernel
        def scale_of_tensor(amax, multiplier, scale_inv, other_scale_inv, epsilon, largest_scale):
            stored, multiplier[0] = block_scale(amax[0], ZERO, Numbers(epsilon, largest_scale))
            scale_inv[0] = stored
            other_scale_inv[0] = stored

        return scale_of_tensor


@dataclass(frozen=True)
class CastTensor(Spec):
    """What the kernels that cast have in common.

    Attributes:
        values: what is computed.
        direction: how the rowwise copy is cast; `direction.other` is how the columnwise one is.
    """

    values: Values
    direction: Direction

    def __str__(self):
        return f"{self.title}: {self.values} -> {self.direction.name}"

    def operands(self):
        return described_source(self.values), described_output(self.direction)

    def must_read(self, field):
        return self.values.must_read(field)


def at_least_one(grid, block):
    """The shape, with one block of threads where it has none: a known scale is stored even of an empty tensor."""
    return ((1, 1, 1) if 0 in grid else grid), block


@dataclass(frozen=True)
class KnownRows(CastTensor):
    """Along the rows, with a known scale: codes, scale_inv, and the tensor's amax for later steps.

    Attributes:
        whole: as above.
    """

    whole: bool

    title = "known scale along rows"

    def grid(self, outer, inner):
        return at_least_one(*row_shape(outer, inner, lanes=32, owned=16))

    def build(self, target):
        read = make_read_sixteen(self.values, self.whole, target)
        cast = make_cast_sixteen(self.direction.fmt, self.direction.packed, self.whole, target)

        @kernel
        def known_rows(source, out):
            row, column, left = place(16, out.outer, out.inner)
            v = read(source, row, column, left)
            record_largest(amax_of_sixteen(v), out, left)
            record_scale(out, row, column)
            cast(v, out.multiplier, out.data, (row, out.inner, column), left)

        return known_rows


@dataclass(frozen=True)
class KnownGradientRows(CastTensor):
    """`KnownRows` of a gated gradient in whole rows: a thread owns 16 columns of each half, which share what they read.

    A row is [gradient of the activated values | gradient of the gates]; `read` gives 16 of each half.
    """

    title = "known scale along rows, both halves"

    def grid(self, outer, inner):
        return at_least_one(*row_shape(outer, inner // 2, lanes=32, owned=16))

    def build(self, target):
        read = make_read_sixteen_of_halves(self.values, target)
        cast = make_cast_sixteen(self.direction.fmt, self.direction.packed, True, target)

        @kernel
        def known_gradient_rows(source, out):
            row, column, left = place(16, out.outer, source.width)
            act, gate = read(source, row, column, left)
            largest = larger_magnitude(amax_of_sixteen(act), amax_of_sixteen(gate))
            record_largest(largest, out, left)
            record_scale(out, row, column)
            cast(act, out.multiplier, out.data, (row, out.inner, column), left)
            cast(gate, out.multiplier, out.data, (row, out.inner, I32(column + source.width)), left)

        return known_gradient_rows


@dataclass(frozen=True)
class InMemoryRows(CastTensor):
    """Along the rows, with the scale that `ScaleOfTensor` left in memory, which has stored scale_inv too.

    No thread shuffles, so a warp may lie in several rows: lanes=1.

    Attributes:
        whole: as above.
    """

    whole: bool

    title = "scale in memory along rows"

    def grid(self, outer, inner):
        return row_shape(outer, inner, lanes=1, owned=16)

    def build(self, target):
        read = make_read_sixteen(self.values, self.whole, target)
        cast = make_cast_sixteen(self.direction.fmt, self.direction.packed, self.whole, target)

        @kernel
        def in_memory_rows(source, out):
            row, column, left = place(16, out.outer, out.inner)
            cast(read(source, row, column, left), out.scale[0], out.data, (row, out.inner, column), left)

        return in_memory_rows


@dataclass(frozen=True)
class BothPerTensor(CastTensor):
    """Both copies, or the columnwise one, from one read: 256 threads own 128 rows x 128 columns (see `tiles`).

    In each step of `fill` a thread reads eight neighbours of a row, puts their values, not yet cast, into the tile and
    casts them for the rowwise copy. After the barrier, in each step of `turn`, it takes eight neighbours of a column
    out and casts those. The tile holds 16-bit input as it is; computed values and float32 input are float32, and it is
    then 128 x 64. The amax of a known scale is recorded once, for both copies.

    Attributes:
        rowwise: whether the rowwise copy is made.
        sums: whether the sums of the tile's columns are stored, of values as they are read, unrounded. If rounded ones
            are to be summed, `gpu.stored_first` does it; a scaling that rounds for sums alone is refused before.
        whole_rows, whole_columns: as `whole`, of the eight that a thread owns along rows, and of the columnwise copy.
    """

    rowwise: bool
    sums: bool
    whole_rows: bool
    whole_columns: bool

    title = "per tensor in both directions"

    def __str__(self):
        return super().__str__() + (" + sums" if self.sums else "")

    @property
    def tile_dtype(self):
        """The dtype of values in the tile."""
        return self.values.storage if self.values.kind is Kind.IDENTITY else "float32"

    def operands(self):
        source, out = super().operands()
        return source, out, out, pointer(np.float32)

    def must_read(self, field):
        return super().must_read(field) and not (field == "amax" and self.rowwise)  # one copy of two records it

    def grid(self, outer, inner):
        shape = tile_grid(outer, inner, tile_columns(self.tile_dtype))
        return at_least_one(*shape) if self.direction.known else shape

    def build(self, target):
        along = make_put(self.direction, self.whole_rows, target) if self.rowwise else put_nothing
        down = make_put(self.direction.other, self.whole_columns, target, records_amax=not self.rowwise)
        fill = make_fill(make_read(self.values, self.whole_rows, target), along, self.tile_dtype)
        turn = make_turn(down, self.tile_dtype)
        sum_columns, sums = make_sum_columns(self.tile_dtype), self.sums

        @kernel
        def both_per_tensor(source, row_out, column_out, partial):
            tile = cuda.shared.array(TILE_WORDS, np.uint32)
            rows, columns = column_out.inner, column_out.outer  # of the matrix: the columnwise copy is transposed
            fill(tile, source, row_out, rows, columns)
            # All values are in the tile: `turn` and `sum_columns` read those that other threads put there.
            cuda.syncthreads()
            turn(tile, column_out, rows, columns)
            if sums:
                sum_columns(tile, partial, rows, columns)

        return both_per_tensor


# --- 5. their launch --------------------------------------------------------------------------------


def quantize(gpu, job):
    """Fill the arrays of an `interface.Job` whose scaling has one scale.

    `gpu` is the backend (`gpu.GPU`): `gpu.launch(spec, (rows, columns), *operands)` starts a kernel,
    `gpu.whole(front, n, *stored)` says whether rows are whole accesses of n elements in what is read and stored.
    """
    if job.scaling.given is not None:
        quantize_known(gpu, job)
    else:
        quantize_current(gpu, job)


def quantize_known(gpu, job):
    """Run one kernel for everything. Only if the path casts rounded values, an activation is stored first."""
    front, dbias, fields, amax = job.front, job.dbias, job.fields, shared_amax(job.fields)
    scale_inv, multiplier = of_tensor(job.scaling, np.zeros(1, np.float32), gpu.dtype_of(front))
    if front.kind != Kind.IDENTITY and job.path.casts_rounded:
        front, dbias = gpu.stored_first(job, None), None  # which fills `dbias` too

    def copy_of(name, outer, inner):
        return KnownScale(
            data=fields[f"{name}_data"],
            scale_inv=fields[f"{name}_scale_inv"],
            amax=amax,
            multiplier=float(multiplier[0]),
            stored=float(scale_inv[0]),
            outer=outer,
            inner=inner,
        )

    rowwise, columnwise = copies_of(job, copy_of)
    if dbias is not None and columnwise is None:
        gpu.column_sums(front, dbias, stored=direction_of(job.scaling, False), out=rowwise)
    else:
        cast_copies(gpu, job, front, rowwise, columnwise, dbias)


def quantize_current(gpu, job):
    """Run a kernel for the amax, one for the scale, one for the cast. An activation is stored first, with its amax."""
    fields, amax, direction = job.fields, shared_amax(job.fields), direction_of(job.scaling, False)
    front = gpu.stored_first(job, amax)  # fills `amax`, and `job.dbias` if there is one
    multiplier, numbers = gpu.empty((1,), "float32"), job.scaling.numbers(gpu.dtype_of(front))
    scale_invs = [fields[name] for name in ("rowwise_scale_inv", "columnwise_scale_inv") if name in fields]
    arrays = amax, multiplier, scale_invs[0], scale_invs[-1]
    gpu.launch(ScaleOfTensor(direction), (1, 1), (*arrays, float(numbers.epsilon), float(numbers.largest_scale)))
    copies = copies_of(job, lambda name, outer, inner: InMemory(fields[f"{name}_data"], multiplier, outer, inner))
    cast_copies(gpu, job, front, *copies)


def copies_of(job, copy_of):
    """copy_of(name, outer, inner) of the rowwise and of the columnwise copy, None of one that is not made."""
    m, k = job.front.matrix_shape
    rowwise = copy_of("rowwise", m, k) if job.rowwise else None
    return rowwise, copy_of("columnwise", k, m) if job.columnwise else None


def cast_copies(gpu, job, front, rowwise, columnwise, dbias=None):
    """Fill copies of a front; with the columnwise one, also `dbias` with the sums of columns, if it is given."""
    values, direction, (m, k) = front.values(), direction_of(job.scaling, False), front.matrix_shape
    if columnwise is None:
        spec = rows_of(values, direction, gpu.whole(front, 16, rowwise.data))
        gpu.launch(spec, (m, k), front.source(), rowwise)
        return
    partial = None if dbias is None else gpu.empty((ceil_div(m, TILE_ROWS), k), "float32")
    spec = BothPerTensor(
        values,
        direction,
        rowwise=rowwise is not None,
        sums=dbias is not None,
        whole_rows=gpu.whole(front, VECTOR, None if rowwise is None else rowwise.data),
        whole_columns=m % VECTOR == 0 and columnwise.data.aligned,
    )
    row_out = rowwise or columnwise  # without a rowwise copy the kernel does not look at it
    gpu.launch(spec, (m, k), front.source(), row_out, columnwise, (partial,))
    if dbias is not None:
        gpu.finish_sums(partial, dbias)


def rows_of(values, direction, whole):
    """The kernel of the rowwise copy alone."""
    if not direction.known:
        return InMemoryRows(values, direction, whole)
    if whole and values.kind is Kind.BACKWARD and values.gated:
        return KnownGradientRows(values, direction)
    return KnownRows(values, direction, whole)


def tensor_amax(gpu, front, amax):
    """Raise `amax`, a float32 array (1,) that is not negative, to the largest magnitude of a front."""
    m, k = front.matrix_shape
    spec = Amax(front.values(), gpu.whole(front, 16))
    gpu.launch(spec, (m, k), front.source(), Maxima(amax, 0, m, k))


# --- 6. their cost ----------------------------------------------------------------------------------


def costs():
    """The `operands.Cost` of each kernel.

    Bytes are those that a thread with all of its elements reads and writes, sums of columns apart; budgets are
    instructions for each of them, compiled for (H100, B200), `fast_budget` under fast_math; then 16-byte loads and
    stores. Kernels of tiles have no budget, for they are loops, and instructions of a loop are counted once.
    """
    known, current = direction_of(DelayedScaling(E4M3), False), direction_of(CurrentScaling(E4M3), False)
    bf16 = as_it_is("bfloat16")
    gelu, swiglu = (Values(Kind.FORWARD, name, "bfloat16") for name in ("gelu", "swiglu"))
    dgelu, dswiglu = (Values(Kind.BACKWARD, name, "bfloat16") for name in ("gelu", "swiglu"))
    amax, in_memory = Amax(bf16, True), InMemoryRows(bf16, current, True)
    yield Cost("amax of bf16", amax, 16 * 2, budget=(2.7, 2.45), wide_loads=2, wide_stores=0)
    yield Cost("scale of a tensor", ScaleOfTensor(current), 4 + 4 + 4 + 4)
    for name, spec, read, stored, budget, fast_budget in (
        ("bf16", KnownRows(bf16, known, True), 2, 1, (2.65, 2.4), None),
        ("gelu bf16", KnownRows(gelu, known, True), 2, 1, (9.5, 9.15), (5.15, 3.95)),
        ("swiglu bf16", KnownRows(swiglu, known, True), 2 + 2, 1, (5.85, 5.65), (3.8, 3.1)),
        ("dswiglu bf16", KnownGradientRows(dswiglu, known), 2 + 2 + 2, 1 + 1, (4.9, 4.65), (3.5, 2.7)),
    ):
        yield Cost(
            f"{name} -> delayed FP8",
            spec,
            16 * (read + stored),
            budget=budget,
            wide_loads=read,
            wide_stores=stored,
            fast_budget=fast_budget,
        )
    size = 16 * (2 + 1)
    yield Cost("bf16 -> FP8, scale in memory", in_memory, size, budget=(1.7, 1.7), wide_loads=2, wide_stores=1)
    owned = 128 * 128 / 256
    both = BothPerTensor(bf16, known, rowwise=True, sums=False, whole_rows=True, whole_columns=True)
    yield Cost("bf16 -> delayed FP8 both", both, owned * (2 + 1 + 1))
    yield Cost("gelu bf16 -> delayed FP8 both", replace(both, values=gelu), owned / 2 * (2 + 1 + 1))
    of_gradient = replace(both, values=dgelu, sums=True)
    yield Cost("dgelu + dbias bf16 -> delayed FP8 both", of_gradient, owned / 2 * (2 + 2 + 1 + 1))
