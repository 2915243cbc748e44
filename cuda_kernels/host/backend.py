"""The CPU backend: which stages make an operation, and the memory that they work on."""

import math
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from cuda_kernels.directions import direction_of
from cuda_kernels.host import arrays, casting, dequantize, pointwise, rows, stages, tiles
from cuda_kernels.host.arrays import DTYPES
from cuda_kernels.host.calls import Doing, arrays_of
from cuda_kernels.host.values import filling_for
from cuda_kernels.interface import Backend, Operand, front_of
from cuda_kernels.operands import Blocks, InMemory, Maxima, Random, Stored, TwoLevel
from cuda_kernels.scale_rules import of_tensor
from refops import Quantized
from refops.quantization.dequantize import DequantizedSource
from refops.rounding import PHILOX_BYTES

F = np.float32
#: Up to this many elements a call runs in the caller's thread.
SMALL = 1 << 15
#: Least rows and elements of a tile where nothing is stored columnwise; where codes are stored transposed, in runs of
#: so many; where they are stored both ways. At most 512 KiB, and wide: memory is read and written in long runs, and
#: what a row costs besides its elements counts less.
WIDE, TALL, BOTH = (8, 1 << 15), (64, 1 << 17), (32, 1 << 17)


@dataclass
class Pipeline:
    """The stages that work on one matrix, after the one that fills its tiles.

    Attributes:
        doing: what runs it (`calls.Doing`).
        front: what is computed.
        tile: least rows and elements of a tile.
        steps: (stage, numbers and arrays) in order.
        finds_first: whether stages of the same walk find the maxima that its casts need: the matrix is one tile.
    """

    doing: Any
    front: object
    tile: tuple = WIDE
    steps: list = field(default_factory=list)
    finds_first: bool = False

    @property
    def is_one_tile(self):
        """Whether each stage is called once, for the whole matrix."""
        (m, k), (rows, columns) = self.front.matrix_shape, self._shape_of_tile()
        return m <= rows and k <= columns and tiles.pieces(m, k) == 1

    def _shape_of_tile(self):
        return _shape_of_tile(*self.tile, self.front.matrix_shape[1])

    def add(self, stage, *operands):
        """Append a stage and the tuples of `operands` that it reads and fills."""
        self.steps.append((stage, list(chain(*operands))))

    def store(self, out, storage):
        """Append the storing of values in an array (M, K) of a dtype."""
        self.add(stages.storing(storage), Stored(out, *self.front.matrix_shape))

    def round(self):
        """Append the rounding to the nominal dtype, if it changes anything."""
        if self.front.kind != "identity" and self.front.storage != "float32":
            self.add(stages.rounding(self.front.storage))

    def run(self):
        """Walk over the matrix with the front half's own values."""
        stage, operands, tables = filling_for(self.front)
        for table in tables:
            self.doing.constant(table)
        self.walk(stage, operands)

    def walk(self, filling, operand):
        """Walk over the matrix with a stage that fills its tiles."""
        m, k = self.front.matrix_shape
        steps = [(filling, operand), *self.steps]
        _walk(self.doing, steps, (m, k), self._shape_of_tile())

    def follow(self, stage, n, *operands):
        """Do what follows from maxima, for `n` numbers: in the walk that finds them, else at once."""
        if self.finds_first:
            self.add(stage, *operands)
        else:
            _walk(self.doing, [(stage, list(chain(*operands)))], (1, n), (1, tiles.SPAN))


def _walk(doing, steps, shape, tile):
    """Walk over a matrix: `tiles.words_of_walk` of the steps."""
    words, arrays_in = tiles.words_of_walk(steps, shape, tile)
    doing.loop(tiles.compiled_walk(), words, arrays_in, tiles.pieces(*shape), math.prod(shape) <= SMALL)


def _shape_of_tile(rows, elements, columns):
    """Rows and columns of a tile, powers of two: of a narrow matrix it has more rows."""
    while rows < tiles.PIECE_ROWS and 2 * rows * columns <= elements:
        rows *= 2
    return rows, elements // rows


class ColumnSum:
    """The bias gradient of a pipeline: float32 sums of pieces of 128 rows, then of all pieces, in order."""

    def __init__(self, pipeline, out):
        m, k = pipeline.front.matrix_shape
        self._doing, self._out = pipeline.doing, out
        self._partial = self._doing.new(np.zeros, (-(-m // tiles.PIECE_ROWS), k), F)
        pipeline.add(stages.summing(), Stored(self._partial, *self._partial.shape))

    def finish(self, storage):
        """Store the sums, rounded to a dtype."""
        self._doing.run(partial(_store_sums, storage), self._partial, self._out)


def _store_sums(storage, partial_sums, out):
    total = np.zeros(len(out), F)
    with np.errstate(all="ignore"):
        for one in partial_sums:
            total += one
    pointwise.narrow(total, storage, out)


class Found:
    """The maxima that a pipeline finds: of the tensor, of its rows or of its columns.

    Attributes:
        partial: those of its pieces, as uint32 bits.
    """

    def __init__(self, pipeline, axis):
        m, k = pipeline.front.matrix_shape
        spans, bands = tiles.spans(k), -(-m // tiles.PIECE_ROWS)
        shape = {"tensor": (bands * spans, 1), "rows": (spans, m), "columns": (bands, k)}[axis]
        self._pipeline = pipeline
        self.partial = pipeline.doing.new(np.zeros, shape, np.uint32)
        pipeline.add(stages.maxima(axis), Maxima(self.partial, spans, m, k))

    def store(self, target, other=None):
        """Fill a float32 array (1,), (M,) or (K,), and another one alike; 0 where there is nothing."""
        self._pipeline.follow(stages.largest(), target.size, (self.partial, target, other))


class HostBackend(Backend):
    """Compiled loops over NumPy arrays, shared among threads."""

    storage = staticmethod(arrays.storage_of)
    update_delayed_scale = staticmethod(pointwise.update_delayed_scale)

    def __init__(self, doing=None):
        self._doing = doing or Doing()

    def _noted(self, value, operand):
        self._doing.given(value, operand.array)
        return operand

    def tensor(self, value, name):
        """A NumPy view of a tensor."""
        return self._noted(value, arrays.tensor_operand(value, name))

    def elements(self, value, name):
        """A NumPy view of elements."""
        return self._noted(value, arrays.elements_operand(value, name))

    def codes(self, value, name):
        """A NumPy view of codes."""
        return self._noted(value, arrays.codes_operand(value, name))

    def empty(self, shape, dtype):
        """A NumPy array to be filled."""
        return self._doing.new(np.empty, shape, DTYPES[dtype])

    def zeros(self, shape, dtype):
        """A NumPy array of zeros."""
        return self._doing.new(np.zeros, shape, DTYPES[dtype])

    def widened(self, operand):
        """The operand in float32, exact."""
        if operand.storage == "float32":
            return operand
        with np.errstate(all="ignore"):
            return arrays.operand(operand.array.astype(F))

    def encode(self, operand, fmt, saturate, rounding, random_bits, out):
        """Fill `out` with codes."""
        self._doing.depends_on_numbers()
        pointwise.encode(operand, fmt, saturate, rounding, random_bits, out)

    def decode(self, codes, fmt, out):
        """Fill `out` with values."""
        self._doing.depends_on_numbers()
        pointwise.decode(codes, fmt, out)

    def largest_code(self, codes):
        """The largest code."""
        return pointwise.largest_code(codes)

    # --- values ---------------------------------------------------------------------------------------

    def materialize(self, front, out, storage, dbias):
        """Fill `out` with the result of `front`, `dbias` with the column sums of what is stored."""
        pipeline = Pipeline(self._doing, front)
        if dbias is not None:
            if storage != "float32":
                pipeline.add(stages.rounding(storage))
            sums = ColumnSum(pipeline, dbias)
        pipeline.store(out, storage)
        pipeline.run()
        if dbias is not None:
            sums.finish(front.storage)

    def scaled_gradient(self, front, out, storage, scales_gradient, scales_storage):
        """Fill the gradients of a row-scaled activation."""
        m, sums = front.matrix_shape[0], self._doing.new(np.empty, (scales_gradient.size,), F)
        words, arrays_in = [], []
        tiles.append_words((*front.source(), *Stored(out, m, out.shape[-1]), sums), words, arrays_in)
        kind = front.name, front.storage, storage, front.gated, front.interleave > 0, front.arithmetic
        loop = rows.scaled_gradient(*kind)
        self._doing.loop(loop, words, arrays_in, m, m * front.width <= SMALL)
        self._doing.run(partial(_narrow, scales_storage), sums, scales_gradient)

    def amax(self, front):
        """Largest magnitude, float32 (1,)."""
        pipeline, out = Pipeline(self._doing, front), self._doing.new(np.empty, (1,), F)
        found = Found(pipeline, "tensor")
        pipeline.run()
        found.store(out)
        return out

    def hadamard(self, operand, sign_mask, inverse, out):
        """Transform groups of 16 along the last dimension."""
        pipeline = Pipeline(self._doing, identity_front(operand))
        pipeline.add(stages.hadamard_along(inverse), (sign_mask,))
        pipeline.store(out, operand.storage)
        pipeline.run()

    def dequantize(self, q, out, storage):
        """Fill `out` with the values that `q` stands for."""
        decoding, coded, undo_mask = dequantize.source_of(q)
        tile = WIDE if q.rowwise_data is not None else TALL if q.scaling.layout.columnwise_transposed else BOTH
        pipeline = Pipeline(self._doing, q, tile)
        if undo_mask is not None:
            pipeline.add(stages.hadamard_down(inverse=True), (undo_mask,))
        pipeline.store(out, storage)
        pipeline.walk(decoding, coded)

    # --- quantization ---------------------------------------------------------------------------------

    def require_quantized(self, q):
        """Return `q` with its scales in order; refops makes the checks."""
        DequantizedSource(q)
        if q.scaling.layout.packed == 1 and q.scaling.fmt.bits < 8:  # a byte may hold what is no code
            self._doing.depends_on_numbers()
        for array in arrays_of(q).values():
            self._doing.given(array, array)
        return q.unswizzled() if q.with_gemm_swizzled_scales else q

    def quantized(self, fields, scaling, shape, storage, swizzled):
        """Return a `refops.Quantized`."""
        return Quantized(
            **fields, scaling=scaling, shape=shape, dtype=DTYPES[storage], with_gemm_swizzled_scales=swizzled
        )

    def quantize(self, job):
        """Fill the arrays of a `Job`."""
        pipeline, found, sums = Pipeline(self._doing, job.front, _tile_of(job)), None, None
        pipeline.finds_first = pipeline.is_one_tile and _can_find_first(job)
        if not pipeline.finds_first and _is_computed_twice(job):
            job, found = _stored_first(self._doing, job)
            pipeline.front = job.front
        if job.dbias is not None and not job.path.dbias_rounded:
            sums = ColumnSum(pipeline, job.dbias)
        if pipeline.finds_first and not job.path.amax_rounded:
            found = Found(pipeline, "tensor")
        if job.path.casts_rounded:
            pipeline.round()
        if pipeline.finds_first and job.path.amax_rounded:
            found = Found(pipeline, "tensor")
        if job.dbias is not None and job.path.dbias_rounded:
            sums = ColumnSum(pipeline, job.dbias)
        self._add_casts(pipeline, job, found)
        if sums is not None:
            sums.finish(job.front.storage)

    def _add_casts(self, pipeline, job, found):
        """Append the stages of the scaling, run the pipeline and store what is known only then.

        `found` are the tensor's `Found` where they were found before, else None.
        """
        if job.scaling.layout.block is None:
            _quantize_per_tensor(pipeline, job, found)
        else:
            _quantize_blocks(pipeline, job, found)


def _needs_maxima(job):
    """Whether maxima must be known before the cast."""
    layout = job.scaling.layout
    return job.scaling.given is None and (layout.amax is not None or layout.block is None)


def _needs_amax_alone(job):
    """Whether the amax of the values themselves, of the whole tensor, is all that the cast needs."""
    return _needs_maxima(job) and job.scaling.layout.amax != "rows" and job.scaling.hadamard is None


def _can_find_first(job):
    """Whether maxima can be found in the walk that casts, if all values are in its tile at once."""
    return _needs_amax_alone(job) and (job.path.casts_rounded or not job.path.amax_rounded)


def _is_computed_twice(job):
    """Whether an activation would be computed twice, for a maximum and for the cast, from the values that are stored.

    The amax of the tensor may be that of values before they are rounded; other maxima are found from stored ones.
    """
    return (
        job.front.kind != "identity"
        and _needs_maxima(job)
        and job.path.casts_rounded
        and (job.path.dbias_rounded or job.dbias is None)
        and (job.path.amax_rounded or _needs_amax_alone(job))
    )


def _stored_first(doing, job):
    """Store the values of a job; return the job of what is stored, and the tensor's `Found`."""
    front = job.front
    values = doing.new(np.empty, front.matrix_shape, DTYPES[front.storage])
    pipeline = Pipeline(doing, front)
    if job.path.amax_rounded:
        pipeline.round()
    found = Found(pipeline, "tensor")
    pipeline.store(values, front.storage)
    pipeline.run()
    return replace(job, front=identity_front(Operand(values, front.tensor_shape, front.storage))), found


def _narrow(storage, values, out):
    pointwise.narrow(values, storage, out)


def identity_front(operand):
    """Return the front half that is a tensor itself."""
    return front_of("identity", None, {}, operand, operand.shape[-1], operand.shape)


def _tile_of(job):
    """The least rows and the elements of a tile that suit a scaling."""
    layout = job.scaling.layout
    outer, inner = layout.block or (1, 1)
    if not job.columnwise and outer == 1:
        return WIDE
    rows, elements = TALL if layout.columnwise_transposed else BOTH
    return max(inner, rows), elements


def _directions(job):
    """The directions to make: (columnwise, prefix of the field names)."""
    return [
        (c, name) for c, name, made in ((False, "rowwise", job.rowwise), (True, "columnwise", job.columnwise)) if made
    ]


def _maxima_of(doing, job, axis):
    """Find the maxima of the values that the path takes the amax of, in a pass of their own."""
    pipeline = Pipeline(doing, job.front)
    if job.path.amax_rounded:
        pipeline.round()
    found = Found(pipeline, axis)
    pipeline.run()
    return found


def _quantize_per_tensor(pipeline, job, found):
    doing, scaling, (m, k) = pipeline.doing, job.scaling, job.front.matrix_shape
    amaxes = [job.fields.get("amax_rowwise"), job.fields.get("amax_columnwise")]
    inverses = [job.fields.get("rowwise_scale_inv"), job.fields.get("columnwise_scale_inv")]
    known = scaling.given is not None
    if known:
        stored, multiplier = of_tensor(scaling, np.zeros(1, F), DTYPES[job.front.storage])
        scale = doing.constant(np.concatenate([multiplier, stored]))
        found = Found(pipeline, "tensor")
    else:
        scale = _scale_of_tensor(pipeline, job, found or _maxima_of(doing, job, "tensor"), amaxes + inverses)
    for columnwise, prefix in _directions(job):
        direction = direction_of(scaling, columnwise)
        outer, inner = (k, m) if direction.transposed else (m, k)
        pipeline.add(casting.per_tensor(direction), InMemory(job.fields[f"{prefix}_data"], scale, outer, inner))
    pipeline.run()
    if known:
        doing.run(_store_scale, scale, *(inverse for inverse in inverses if inverse is not None))
        found.store(*(amax for amax in amaxes if amax is not None))


def _scale_of_tensor(pipeline, job, found, targets):
    """Return the scale of an `InMemory`, made of the maxima that were found.

    `targets` are two arrays for the amax and two for the scale's inverse, or None.
    """
    scale, numbers = pipeline.doing.new(np.empty, (2,), F), job.scaling.numbers(DTYPES[job.front.storage])
    stage = casting.scale_of_tensor(direction_of(job.scaling, False))
    pipeline.follow(stage, 1, (found.partial, scale, *targets), numbers)
    return scale


def _store_scale(scale, *targets):
    for target in targets:
        target[:] = scale[1]


def _quantize_blocks(pipeline, job, found):
    doing, scaling, tensor_scales = pipeline.doing, job.scaling, {}
    if scaling.layout.amax is not None:
        _fill_amax(doing, job, found)
    differ = scaling.layout.amax == "rows" or scaling.hadamard is not None  # amaxes of the two directions
    for columnwise, prefix in _directions(job):
        if columnwise and scaling.hadamard is not None:
            _add_hadamard(pipeline, job)
        direction = direction_of(scaling, columnwise, job.swizzled)
        random = () if scaling.random is None else _random_of(job, columnwise)
        amax, kind = job.fields.get(f"amax_{prefix}"), casting.operand_of(direction)
        more = () if kind is Blocks else (amax,)
        if kind is TwoLevel:
            whose = columnwise and differ
            if whose not in tensor_scales:
                tensor_scales[whose] = _tensor_scales(pipeline, direction_of(scaling, False), amax)
            more = (tensor_scales[whose],)
        pipeline.add(casting.blocks(direction), kind(*_fields_of(job, direction, prefix), *more), random)
    pipeline.run()


def _fields_of(job, direction, prefix):
    """The fields of the `Blocks` that the stage of one direction fills."""
    scales, (m, k) = job.fields[f"{prefix}_scale_inv"], job.front.matrix_shape
    outer, inner = (k, m) if direction.transposed else (m, k)
    numbers, stride = job.scaling.numbers(DTYPES[job.front.storage]), direction.scale_stride(scales.shape)
    return Blocks(job.fields[f"{prefix}_data"], scales, stride, *numbers, outer, inner)


def _tensor_scales(pipeline, direction, amax):
    """Return what blocks share, float32 (amaxes, numbers)."""
    scales = pipeline.doing.new(np.empty, (amax.size, direction.rules().parts), F)
    pipeline.follow(casting.tensor_scales(direction), amax.size, (amax, scales))
    return scales


def _random_of(job, columnwise):
    """The `Random` of a direction: blocks of a columnwise copy are counted after all rowwise ones."""
    (m, k), random, bits = job.front.matrix_shape, job.scaling.random, job.random_bits[columnwise]
    first = m * (k // PHILOX_BYTES) if columnwise else 0
    return Random(None if bits is None else np.ascontiguousarray(bits), random.seed, random.offset, first)


def _add_hadamard(pipeline, job):
    pipeline.add(stages.hadamard_down(), (job.scaling.hadamard,))
    if job.front.storage != "float32":
        pipeline.add(stages.rounding(job.front.storage))


def _fill_amax(doing, job, found):
    """Fill the amaxes that there are: of the tensor, of rows and of columns; columnwise after a Hadamard transform."""
    row, column = job.fields.get("amax_rowwise"), job.fields.get("amax_columnwise")
    if job.scaling.layout.amax == "rows":
        for target, axis in ((row, "rows"), (column, "columns")):
            if target is not None:
                _maxima_of(doing, job, axis).store(target)
        return
    if job.scaling.hadamard is None or column is None:
        found = found or _maxima_of(doing, job, "tensor")
        found.store(*(target for target in (row, column) if target is not None))
        return
    pipeline = Pipeline(doing, job.front, TALL)
    if job.path.amax_rounded:
        pipeline.round()
    plain = Found(pipeline, "tensor") if row is not None else None
    if not job.path.amax_rounded:
        pipeline.round()
    _add_hadamard(pipeline, job)
    transformed = Found(pipeline, "tensor")
    pipeline.run()
    if plain is not None:
        plain.store(row)
    transformed.store(column)
