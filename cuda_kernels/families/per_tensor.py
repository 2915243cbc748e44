"""Casts with one scale for the whole tensor: delayed scaling, which knows it before, and current scaling.

    scale      the declared rule of the tensor's amax (or of what the scaling was given): (stored, multiplier)
    code       the element format's code of value * multiplier, to nearest, ties to even, saturated
    amax       the largest magnitude of the tensor: a known scale's kernel records it, the other scale is made of it
    place      rowwise codes lie as the values do, columnwise ones transposed; both copies have the scale stored

With a known scale everything is made of one read: activation, amax, codes, transposed codes, sums of columns.
Arguments, results and errors are those of `refops.quantize`.
"""

# --- 1. what it computes: above ---------------------------------------------------------------------

from dataclasses import dataclass

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
from cuda_kernels.simt import I32, F, cuda, kernel, larger_magnitude, offset, select, thread_number
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
    """x (M, columns), scale (1,) -> rowwise (M, columns), columnwise (columns, M): one thread one element.

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

    The tile's rows are 33 long: the 32 elements of a column lie in different banks.
    """
    tile = cuda.shared.array((32, 33), np.uint32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    row0, column0 = I32(cuda.blockIdx.y * 32), I32(cuda.blockIdx.x * 32)
    for k in range(0, 32, 8):
        row, column = I32(row0 + ty + k), I32(column0 + tx)
        if row < rows and column < columns:
            tile[ty + k, tx] = casts.e4m3(widen(x[offset(row, columns, column)]) * scale[0])
            rowwise[offset(row, columns, column)] = np.uint8(tile[ty + k, tx])
    cuda.syncthreads()
    for k in range(0, 32, 8):
        row, column = I32(row0 + tx), I32(column0 + ty + k)
        if row < rows and column < columns:
            columnwise[offset(column, rows, row)] = np.uint8(tile[tx, ty + k])


# --- 4. fused ---------------------------------------------------------------------------------------

# A thread owns 16 neighbours of a row, in registers as two vectors of eight float32. Five words:
#
#   place(16)                               their (row, column)
#   read(source, row, column, left)         their values, x or an activation or gradient of it; `left` elements to the
#                                           end of the row
#   amax_of_sixteen(v)                      their largest magnitude
#   record_largest(amax, out, left)         raises the tensor's amax to the largest of a warp's threads, once a warp
#   cast(v, multiplier, data, place, left)  the codes


@dataclass(frozen=True)
class Amax(Spec):
    """The largest magnitude of a tensor, or of an activation of it; NaN is ignored.

    Attributes:
        values: what is read.
        whole: rows consist of whole 16-byte accesses at aligned addresses. Else every element is an access of its own.
    """

    values: Values
    whole: bool

    title = "amax of a tensor"

    def __str__(self):
        return f"{self.title}: {self.values}"

    def operands(self):
        return described_source(self.values), described(Maxima)

    def grid(self, outer, inner):
        return row_shape(outer, inner, lanes=32, owned=16)

    def build(self, target):
        read = make_read_sixteen(self.values, self.whole, target)

        @kernel
        def amax_of_tensor(source, out):
            row, column = place(16)
            left = select(row < out.outer, I32(out.inner - column), I32(0))
            record_largest(amax_of_sixteen(read(source, row, column, left)), out, left)

        return amax_of_tensor


@dataclass(frozen=True)
class ScaleOfTensor(Spec):
    """The scale of a tensor whose amax was found, by the declared rule: what elements are multiplied with, and what is
    stored of it, for either copy. One thread.

    Attributes:
        direction: of either copy.
    """

    direction: Direction

    title = "scale of a tensor"

    def operands(self):
        amax, multiplier, stored, stored_too = (pointer(np.float32),) * 4
        return amax, multiplier, stored, stored_too, scalar(np.float32), scalar(np.float32)

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
class CastRows(Spec):
    """What the kernels along the rows have in common.

    Attributes:
        values: what is read. whole: as above.
        direction: how it is cast; the rowwise one.
    """

    values: Values
    direction: Direction
    whole: bool

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
class KnownRows(CastRows):
    """Along the rows, with a known scale: codes, the scale as stored, and the tensor's amax for later steps."""

    title = "known scale along rows"

    def grid(self, outer, inner):
        return at_least_one(*row_shape(outer, inner, lanes=32, owned=16))

    def build(self, target):
        read = make_read_sixteen(self.values, self.whole, target)
        cast = make_cast_sixteen(self.direction.fmt, self.direction.packed, self.whole, target)

        @kernel
        def known_rows(source, out):
            row, column = place(16)
            left = select(row < out.outer, I32(out.inner - column), I32(0))
            v = read(source, row, column, left)
            record_largest(amax_of_sixteen(v), out, left)
            record_scale(out, row, column)
            cast(v, out.multiplier, out.data, (row, out.inner, column), left)

        return known_rows


@dataclass(frozen=True)
class KnownGradientRows(CastRows):
    """`KnownRows` of a gated gradient in whole rows: a thread owns 16 columns of each half, which share what they read.

    read(source, row, column, left) -> 16 of the half of the activated values, 16 of that of the gates.
    """

    title = "known scale along rows, both halves"

    def grid(self, outer, inner):
        return at_least_one(*row_shape(outer, inner // 2, lanes=32, owned=16))

    def build(self, target):
        read = make_read_sixteen_of_halves(self.values, target)
        cast = make_cast_sixteen(self.direction.fmt, self.direction.packed, True, target)

        @kernel
        def known_gradient_rows(source, out):
            row, column = place(16)
            left = select(row < out.outer, I32(source.width - column), I32(0))
            act, gate = read(source, row, column, left)
            largest = larger_magnitude(amax_of_sixteen(act), amax_of_sixteen(gate))
            record_largest(largest, out, left)
            record_scale(out, row, column)
            cast(act, out.multiplier, out.data, (row, out.inner, column), left)
            cast(gate, out.multiplier, out.data, (row, out.inner, I32(column + source.width)), left)

        return known_gradient_rows


@dataclass(frozen=True)
class InMemoryRows(CastRows):
    """Along the rows, with the scale that `ScaleOfTensor` left in memory. Nothing else is recorded."""

    title = "scale in memory along rows"

    def grid(self, outer, inner):
        return row_shape(outer, inner, lanes=1, owned=16)

    def build(self, target):
        read = make_read_sixteen(self.values, self.whole, target)
        cast = make_cast_sixteen(self.direction.fmt, self.direction.packed, self.whole, target)

        @kernel
        def in_memory_rows(source, out):
            row, column = place(16)
            left = select(row < out.outer, I32(out.inner - column), I32(0))
            cast(read(source, row, column, left), out.scale[0], out.data, (row, out.inner, column), left)

        return in_memory_rows


@dataclass(frozen=True)
class BothPerTensor(Spec):
    """Both copies, or the columnwise one, from one read: 256 threads turn a tile of 128 x 128 round (see `tiles`).

    Along the rows a thread reads eight neighbours, casts them and puts them into the tile, of float32 if they were
    computed (then 64 columns wide); down the columns it takes eight neighbours of a column out of it and casts them in
    the same way.

    Attributes:
        values, direction: as above.
        rowwise: whether the rowwise copy is made.
        sums: whether the sums of the tile's columns are stored, of unrounded values.
        whole_rows, whole_columns: as `whole`, of either copy.
    """

    values: Values
    direction: Direction
    rowwise: bool
    sums: bool
    whole_rows: bool
    whole_columns: bool

    title = "per tensor in both directions"

    def __str__(self):
        return f"{self.title}: {self.values} -> {self.direction.name}{' + sums' if self.sums else ''}"

    @property
    def stage(self):
        """The dtype of values in the tile."""
        return self.values.storage if self.values.kind is Kind.IDENTITY else "float32"

    def operands(self):
        out = described_output(self.direction)
        return described_source(self.values), out, out, pointer(np.float32)

    def must_read(self, field):
        return self.values.must_read(field)

    def grid(self, outer, inner):
        shape = tile_grid(outer, inner, tile_columns(self.stage))
        return at_least_one(*shape) if self.direction.known else shape

    def build(self, target):
        read, stage = make_read(self.values, self.whole_rows, target), self.stage
        along = make_put(self.direction, self.whole_rows, target) if self.rowwise else put_nothing
        down = make_put(self.direction.other, self.whole_columns, target)
        fill, turn = make_fill(read, along, stage), make_turn(down, stage)
        sum_columns, sums = make_sum_columns(stage), self.sums

        @kernel
        def both_per_tensor(source, row_out, column_out, partial):
            tile = cuda.shared.array(TILE_WORDS, np.uint32)
            rows, width = column_out.inner, column_out.outer
            fill(tile, source, row_out, rows, width)
            cuda.syncthreads()
            turn(tile, column_out, rows, width)
            if sums:
                sum_columns(tile, partial, rows, width)

        return both_per_tensor


# --- 5. their launch --------------------------------------------------------------------------------


def quantize(gpu, job):
    """Fill the arrays of an `interface.Job` whose scaling has one scale."""
    if job.scaling.given is not None:
        quantize_known(gpu, job)
    else:
        quantize_current(gpu, job)


def quantize_known(gpu, job):
    """Activation, amax, codes and sums in one kernel; but a declared path that rounds first has its values stored."""
    front, dbias, fields = job.front, job.dbias, job.fields
    stored, multiplier = of_tensor(job.scaling, np.zeros(1, np.float32), gpu.dtype_of(front))
    numbers = float(multiplier[0]), float(stored[0])
    if front.kind != "identity" and job.path.casts_rounded:
        front, dbias = gpu.stored_first(job, None), None

    def copy_of(name, outer, inner):
        arrays = fields[f"{name}_data"], fields[f"{name}_scale_inv"], fields[f"amax_{name}"]
        return KnownScale(*arrays, *numbers, outer, inner)

    rowwise, columnwise = copies_of(job, copy_of)
    if dbias is not None and columnwise is None:
        direction, rounded = direction_of(job.scaling, False), job.path.dbias_rounded
        gpu.column_sums(front, dbias, stored=direction, out=rowwise, sums_rounded=rounded)
    else:
        cast(gpu, job, front, rowwise, columnwise, dbias)


def quantize_current(gpu, job):
    """The amax, of values that are stored first if there is anything to compute; the scale; the cast with it."""
    fields, amax, direction = job.fields, shared_amax(job.fields), direction_of(job.scaling, False)
    front = gpu.stored_first(job, amax)
    multiplier, numbers = gpu.empty((1,), "float32"), job.scaling.numbers(gpu.dtype_of(front))
    stored = [fields[name] for name in ("rowwise_scale_inv", "columnwise_scale_inv") if name in fields]
    arrays = amax, multiplier, stored[0], stored[-1]
    gpu.launch(ScaleOfTensor(direction), (1, 1), (*arrays, float(numbers.epsilon), float(numbers.largest_scale)))
    copies = copies_of(job, lambda name, outer, inner: InMemory(fields[f"{name}_data"], multiplier, outer, inner))
    cast(gpu, job, front, *copies)


def copies_of(job, copy_of):
    """copy_of(name, outer, inner) of the rowwise and of the columnwise copy, None of one that is not made."""
    m, k = job.front.matrix_shape
    rowwise = copy_of("rowwise", m, k) if job.rowwise else None
    return rowwise, copy_of("columnwise", k, m) if job.columnwise else None


def cast(gpu, job, front, rowwise, columnwise, dbias=None):
    """Fill copies of a front; with the columnwise one, also `dbias` with the sums of columns, if it is given."""
    values, direction, (m, k) = front.values(gpu.fast_math), direction_of(job.scaling, False), front.matrix_shape
    if columnwise is None:
        spec = rows_of(values, direction, gpu.whole(front, 16, rowwise.data))
        gpu.launch(spec, (m, k), front.source(), rowwise)
        return
    partial = None if dbias is None else gpu.empty((ceil_div(m, TILE_ROWS), k), "float32")
    whole_rows = gpu.whole(front, VECTOR, None if rowwise is None else rowwise.data)
    whole_columns = m % VECTOR == 0 and columnwise.data.aligned
    spec = BothPerTensor(values, direction, rowwise is not None, dbias is not None, whole_rows, whole_columns)
    gpu.launch(spec, (m, k), front.source(), rowwise or columnwise, columnwise, (partial,))
    if dbias is not None:
        gpu.finish_sums(partial, dbias)


def rows_of(values, direction, whole):
    """The kernel of the rowwise copy alone."""
    if not direction.known:
        return InMemoryRows(values, direction, whole)
    halves = whole and values.kind is Kind.BACKWARD and values.gated
    return (KnownGradientRows if halves else KnownRows)(values, direction, whole)


def tensor_amax(gpu, front, amax):
    """Raise `amax`, a float32 array (1,) that is not negative, to the largest magnitude of a front."""
    m, k = front.matrix_shape
    spec = Amax(front.values(gpu.fast_math), gpu.whole(front, 16))
    gpu.launch(spec, (m, k), front.source(), Maxima(amax, 0, m, k))


# --- 6. their cost ----------------------------------------------------------------------------------


def costs():
    """The `operands.Cost` of each kernel: bytes are values of two bytes, and codes."""
    bf16, known = "bfloat16", direction_of(DelayedScaling(E4M3), False)
    current = direction_of(CurrentScaling(E4M3), False)
    identity, gelu, swiglu = as_it_is(bf16), Values(Kind.FORWARD, "gelu", bf16), Values(Kind.FORWARD, "swiglu", bf16)
    dgelu, dswiglu = Values(Kind.BACKWARD, "gelu", bf16), Values(Kind.BACKWARD, "swiglu", bf16)
    yield Cost("amax of bf16", Amax(identity, True), 32, (2.7, 2.45), 2, 0)
    yield Cost("scale of a tensor", ScaleOfTensor(current), 16)
    yield Cost("bf16 -> delayed FP8", KnownRows(identity, known, True), 48, (2.65, 2.4), 2, 1)
    yield Cost("gelu bf16 -> delayed FP8", KnownRows(gelu, known, True), 48, (9.5, 9.15), 2, 1, (5.15, 3.95))
    yield Cost("swiglu bf16 -> delayed FP8", KnownRows(swiglu, known, True), 80, (5.85, 5.65), 4, 1, (3.8, 3.1))
    halves = KnownGradientRows(dswiglu, known, True)
    yield Cost("dswiglu bf16 -> delayed FP8", halves, 128, (4.9, 4.65), 6, 2, (3.5, 2.7))
    yield Cost("bf16 -> FP8, scale in memory", InMemoryRows(identity, current, True), 48, (1.7, 1.7), 2, 1)
    tile = 128 * 128 / 256
    yield Cost("bf16 -> delayed FP8 both", BothPerTensor(identity, known, True, False, True, True), tile * 4)
    yield Cost("gelu bf16 -> delayed FP8 both", BothPerTensor(gelu, known, True, False, True, True), tile / 2 * 4)
    both = BothPerTensor(dgelu, known, True, True, True, True)
    yield Cost("dgelu + dbias bf16 -> delayed FP8 both", both, tile / 2 * 6)
