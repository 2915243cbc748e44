"""The CPU backend: which prologue and which stages make an operation, and the memory that they work on."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from cuda_kernels.directions import direction_of
from cuda_kernels.host import arrays, dequantize, epilogues, pointwise, rows, stages, tiles
from cuda_kernels.host.arrays import DTYPES, NOTHING
from cuda_kernels.host.calls import Doing, arrays_of
from cuda_kernels.host.prologues import prologue_for
from cuda_kernels.interface import Backend, Operand, front_of
from cuda_kernels.operands import Inputs, Outputs
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

_NONE = Outputs(
    data=NOTHING,
    scales=NOTHING,
    amax=NOTHING,
    given=NOTHING,
    random_bits=NOTHING,
    seed=np.uint64(0),
    offset=np.uint64(0),
    first_block=0,
    epsilon=F(0),
    largest_scale=F(0),
    outer=0,
    inner=0,
    scale_stride=0,
)


@dataclass
class Pipeline:
    """A prologue and the stages that follow it over one matrix.

    Attributes:
        doing: what runs it (`calls.Doing`).
        front: what is computed.
        tile: least rows and elements of a tile.
        steps: (stage, Outputs) in order.
    """

    doing: Any
    front: object
    tile: tuple = WIDE
    steps: list = field(default_factory=list)

    def add(self, stage, **outputs):
        """Append a stage; fields of `Outputs` that it uses by name, the matrix's shape is added."""
        m, k = self.front.matrix_shape
        self.steps.append((stage, _NONE._replace(outer=m, inner=k, **outputs)))

    def round(self):
        """Append the rounding to the nominal dtype, if it changes anything."""
        if self.front.kind != "identity" and self.front.storage != "float32":
            self.add(stages.rounding(self.front.storage))

    def run(self):
        """Walk over the matrix with the front half's own prologue."""
        self.walk(prologue_for(self.front), inputs_of(self.front))

    def walk(self, prologue, inputs):
        """Walk over the matrix."""
        m, k = self.front.matrix_shape
        words, arrays_in = [prologue, len(self.steps), m, k, *_shape_of_tile(*self.tile, k)], []
        tiles.append_words(inputs, words, arrays_in)
        for stage, out in self.steps:
            words.append(stage)
            tiles.append_words(out, words, arrays_in)
        self.doing.loop(tiles.compiled_walk(), words, arrays_in, tiles.pieces(m, k), m * k <= SMALL)


def _shape_of_tile(rows, elements, columns):
    """Rows and columns of a tile, powers of two: of a narrow matrix it has more rows."""
    while rows < tiles.PIECE_ROWS and 2 * rows * columns <= elements:
        rows *= 2
    return rows, elements // rows


def inputs_of(front):
    """Return the `Inputs` of a front half."""
    return Inputs(
        front.x,
        NOTHING if front.dy is None else front.dy,
        NOTHING if front.row_scales is None else front.row_scales,
        *front.parameters,
        front.matrix_shape[0],
        front.width,
        front.interleave,
    )


class ColumnSum:
    """The bias gradient of a pipeline: float32 sums of pieces of 128 rows, then of all pieces, in order."""

    def __init__(self, pipeline, out):
        m, k = pipeline.front.matrix_shape
        self._doing, self._out = pipeline.doing, out
        self._partial = self._doing.new(np.zeros, (-(-m // tiles.PIECE_ROWS), k), F)
        pipeline.add(stages.summing(), data=self._partial)

    def finish(self, storage):
        """Store the sums, rounded to a dtype."""
        self._doing.run(partial(_store_sums, storage), self._partial, self._out)


def _store_sums(storage, partial_sums, out):
    total = np.zeros(len(out), F)
    with np.errstate(all="ignore"):
        for one in partial_sums:
            total += one
    pointwise.narrow(total, storage, out)


class Maxima:
    """The maxima that a pipeline finds: of the tensor, of its rows or of its columns.

    Attributes:
        partial: those of its pieces, as uint32 bits.
    """

    def __init__(self, pipeline, axis):
        m, k = pipeline.front.matrix_shape
        spans, bands = tiles.spans(k), -(-m // tiles.PIECE_ROWS)
        shape = {"tensor": (bands * spans, 1), "rows": (spans, m), "columns": (bands, k)}[axis]
        self._doing = pipeline.doing
        self.partial = self._doing.new(np.zeros, shape, np.uint32)
        pipeline.add(stages.maxima(axis), amax=self.partial, scale_stride=spans)

    def store(self, *targets):
        """Fill float32 arrays, (1,), (M,) or (K,); 0 where there is nothing."""
        self._doing.run(_store_maxima, self.partial, *targets)


def _store_maxima(partial_maxima, *targets):
    found = np.maximum.reduce(partial_maxima, axis=0, initial=np.uint32(0)).view(F)
    for target in targets:
        target[:] = found


def _copy(source, *targets):
    for target in targets:
        target[:] = source


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
        pipeline.add(stages.storing(storage), data=out)
        pipeline.run()
        if dbias is not None:
            sums.finish(front.storage)

    def scaled_gradient(self, front, out, storage, scales_gradient, scales_storage):
        """Fill the gradients of a row-scaled activation."""
        m, sums = front.matrix_shape[0], self._doing.new(np.empty, (scales_gradient.size,), F)
        words, arrays_in = [], []
        tiles.append_words(inputs_of(front), words, arrays_in)
        tiles.append_words(_NONE._replace(data=out, given=sums), words, arrays_in)
        loop = rows.scaled_gradient(front.name, front.storage, storage, front.gated, front.interleave > 0)
        self._doing.loop(loop, words, arrays_in, m, m * front.width <= SMALL)
        self._doing.run(partial(_narrow, scales_storage), sums, scales_gradient)

    def amax(self, front):
        """Largest magnitude, float32 (1,)."""
        pipeline, out = Pipeline(self._doing, front), self._doing.new(np.empty, (1,), F)
        found = Maxima(pipeline, "tensor")
        pipeline.run()
        found.store(out)
        return out

    def hadamard(self, operand, sign_mask, inverse, out):
        """Transform groups of 16 along the last dimension."""
        pipeline = Pipeline(self._doing, identity_front(operand))
        pipeline.add(stages.hadamard_along(inverse), seed=np.uint64(sign_mask))
        pipeline.add(stages.storing(operand.storage), data=out)
        pipeline.run()

    def dequantize(self, q, out, storage):
        """Fill `out` with the values that `q` stands for."""
        prologue, inputs, undo_mask = dequantize.source_of(q)
        tile = WIDE if q.rowwise_data is not None else TALL if q.scaling.layout.columnwise_transposed else BOTH
        pipeline = Pipeline(self._doing, q, tile)
        if undo_mask is not None:
            pipeline.add(stages.hadamard_down(inverse=True), seed=np.uint64(undo_mask))
        pipeline.add(stages.storing(storage), data=out)
        pipeline.walk(prologue, inputs)

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
        job, found = _stored_first(self._doing, job) if _is_computed_twice(job) else (job, None)
        pipeline = Pipeline(self._doing, job.front, _tile_of(job))
        sums = None
        if job.dbias is not None and not job.path.dbias_rounded:
            sums = ColumnSum(pipeline, job.dbias)
        if job.path.casts_rounded:
            pipeline.round()
        if job.dbias is not None and job.path.dbias_rounded:
            sums = ColumnSum(pipeline, job.dbias)
        self._add_casts(pipeline, job, found)
        if sums is not None:
            sums.finish(job.front.storage)

    def _add_casts(self, pipeline, job, found):
        """Append the stages of the scaling, run the pipeline and store what is known only then.

        `found` are the tensor's `Maxima` where they were found before, else None.
        """
        if job.scaling.layout.block is None:
            _quantize_per_tensor(pipeline, job, found)
        else:
            _quantize_blocks(pipeline, job, found)


def _is_computed_twice(job):
    """Whether an activation would be computed for a maximum and again for the cast, of the values that it is stored as.

    The amax of the tensor may be that of values before they are rounded; other maxima are found from stored ones.
    """
    layout, path = job.scaling.layout, job.path
    found_first = layout.amax is not None or (layout.block is None and job.scaling.given is None)
    of_tensor_alone = layout.amax != "rows" and job.scaling.hadamard is None
    return (
        job.front.kind != "identity"
        and found_first
        and path.casts_rounded
        and (path.dbias_rounded or job.dbias is None)
        and (path.amax_rounded or of_tensor_alone)
    )


def _stored_first(doing, job):
    """Store the values of a job; return the job of what is stored, and the tensor's `Maxima`."""
    front = job.front
    values = doing.new(np.empty, front.matrix_shape, DTYPES[front.storage])
    pipeline = Pipeline(doing, front)
    if job.path.amax_rounded:
        pipeline.round()
    found = Maxima(pipeline, "tensor")
    pipeline.add(stages.storing(front.storage), data=values)
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
    found = Maxima(pipeline, axis)
    pipeline.run()
    return found


def _quantize_per_tensor(pipeline, job, found):
    doing, scaling = pipeline.doing, job.scaling
    if scaling.given is not None:
        stored, multiplier = map(doing.constant, of_tensor(scaling, np.zeros(1, F), DTYPES[job.front.storage]))
        found = Maxima(pipeline, "tensor")
    else:
        found = found or _maxima_of(doing, job, "tensor")
        stored, multiplier = _scale_of_tensor(doing, job, found)
    for columnwise, prefix in _directions(job):
        stage = epilogues.per_tensor(direction_of(scaling, columnwise))
        pipeline.add(stage, data=job.fields[f"{prefix}_data"], given=multiplier)
    pipeline.run()
    doing.run(_copy, stored, *(job.fields[f"{prefix}_scale_inv"] for _, prefix in _directions(job)))
    found.store(*(array for name, array in job.fields.items() if name.startswith("amax")))


def _scale_of_tensor(doing, job, found):
    """Return (stored, multiplier), arrays (1,), of the maxima that were found."""
    stored, multiplier = (doing.new(np.empty, (1,), F) for _ in range(2))
    numbers = job.scaling.numbers(DTYPES[job.front.storage])
    outputs = _NONE._replace(
        data=stored, given=multiplier, amax=found.partial, epsilon=numbers.epsilon, largest_scale=numbers.largest_scale
    )
    words, arrays_in = [], []
    tiles.append_words(outputs, words, arrays_in)
    doing.loop(epilogues.scale_of_tensor(direction_of(job.scaling, False)), words, arrays_in, 1, True)
    return stored, multiplier


def _quantize_blocks(pipeline, job, found):
    scaling, (m, k) = job.scaling, job.front.matrix_shape
    numbers, random = scaling.numbers(DTYPES[job.front.storage]), scaling.random
    if scaling.layout.amax is not None:
        _fill_amax(pipeline.doing, job, found)
    for columnwise, prefix in _directions(job):
        if columnwise and scaling.hadamard is not None:
            _add_hadamard(pipeline, job)
        direction, scales = direction_of(scaling, columnwise, job.swizzled), job.fields[f"{prefix}_scale_inv"]
        outputs = {} if scaling.layout.amax is None else {"given": job.fields[f"amax_{prefix}"]}
        if random is not None:
            first = m * (k // PHILOX_BYTES) if columnwise else 0
            outputs |= {"seed": np.uint64(random.seed), "offset": np.uint64(random.offset), "first_block": first}
        if job.random_bits[columnwise] is not None:
            outputs["random_bits"] = np.ascontiguousarray(job.random_bits[columnwise])
        pipeline.add(
            epilogues.blocks(direction),
            data=job.fields[f"{prefix}_data"],
            scales=scales,
            scale_stride=direction.scale_stride(scales.shape),
            epsilon=numbers.epsilon,
            largest_scale=numbers.largest_scale,
            **outputs,
        )
    pipeline.run()


def _add_hadamard(pipeline, job):
    pipeline.add(stages.hadamard_down(), seed=np.uint64(job.scaling.hadamard))
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
    plain = Maxima(pipeline, "tensor") if row is not None else None
    if not job.path.amax_rounded:
        pipeline.round()
    _add_hadamard(pipeline, job)
    transformed = Maxima(pipeline, "tensor")
    pipeline.run()
    if plain is not None:
        plain.store(row)
    transformed.store(column)
