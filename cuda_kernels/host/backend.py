"""The CPU backend: which prologue and which stages make an operation, and the memory that they work on."""

from dataclasses import dataclass, field

import numpy as np

from cuda_kernels.directions import direction_of
from cuda_kernels.host import arrays, dequantize, epilogues, pointwise, rows, stages, tiles
from cuda_kernels.host.arrays import DTYPES, NO_BYTES, NO_FLOATS, NO_WORDS, as_bytes
from cuda_kernels.host.prologues import prologue_for
from cuda_kernels.host.threads import share
from cuda_kernels.interface import Backend, front_of
from cuda_kernels.operands import Inputs, Outputs
from cuda_kernels.scale_rules import of_tensor
from refops import Quantized
from refops.quantization.dequantize import DequantizedSource
from refops.rounding import PHILOX_BYTES

F = np.float32
#: Up to this many elements a call runs in the caller's thread.
SMALL = 1 << 15
#: Rows and columns of a tile where nothing is stored columnwise, and elements of one that is tall enough for blocks of
#: columns: at most 512 KiB, and wide: memory is read and written in long runs, and what a row costs besides its
#: elements counts less.
WIDE, LARGEST_TILE = (8, 4096), 1 << 17
#: Rows of a tile whose codes are stored transposed, in runs of so many, and of others.
TALL, BOTH = 64, 32

_NOTHING = Outputs(
    data=NO_BYTES,
    scales=NO_BYTES,
    amax=NO_WORDS,
    given=NO_FLOATS,
    random_bits=NO_BYTES,
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
        front: what is computed.
        tile: rows and columns of a tile.
        steps: (stage, Outputs) in order.
    """

    front: object
    tile: tuple = WIDE
    steps: list = field(default_factory=list)

    def add(self, stage, **outputs):
        """Append a stage; fields of `Outputs` that it uses by name, the matrix's shape is added."""
        m, k = self.front.matrix_shape
        self.steps.append((stage, _NOTHING._replace(outer=m, inner=k, **outputs)))

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
        count = len(self.steps)
        room = next(room for room in tiles.ROOM if room >= count)
        walk = tiles.compiled_walk(room)
        addresses, outs = zip(*self.steps, *[(0, _NOTHING)] * (room - count), strict=True)

        def work(first, last):
            walk(prologue, addresses, count, inputs, outs, m, k, *self.tile, first, last)

        share(work, tiles.pieces(m, k), inline=m * k <= SMALL)


def inputs_of(front):
    """Return the `Inputs` of a front half."""
    return Inputs(
        as_bytes(front.x),
        NO_BYTES if front.dy is None else as_bytes(front.dy),
        NO_FLOATS if front.row_scales is None else _floats(front.row_scales),
        *front.parameters,
        front.matrix_shape[0],
        front.width,
        front.interleave,
    )


def _floats(array):
    return as_bytes(array).view(np.float32)


class ColumnSum:
    """The bias gradient of a pipeline: float32 sums of pieces of 128 rows, then of all pieces, in order."""

    def __init__(self, pipeline, out):
        m, k = pipeline.front.matrix_shape
        self._out = out
        self._partial = np.zeros((-(-m // tiles.PIECE_ROWS), k), np.float32)
        pipeline.add(stages.summing(), data=as_bytes(self._partial))

    def finish(self, storage):
        """Store the sums, rounded to a dtype."""
        total = np.zeros(len(self._out), np.float32)
        with np.errstate(all="ignore"):
            for partial in self._partial:
                total += partial
        pointwise.narrow(total, storage, self._out)


class Maxima:
    """The maxima that a pipeline finds: of the tensor, of its rows or of its columns."""

    def __init__(self, pipeline, axis):
        m, k = pipeline.front.matrix_shape
        spans, bands = tiles.spans(k), -(-m // tiles.PIECE_ROWS)
        shape = {"tensor": (bands * spans, 1), "rows": (spans, m), "columns": (bands, k)}[axis]
        self._partial = np.zeros(shape, np.uint32)
        pipeline.add(stages.maxima(axis), amax=self._partial.reshape(-1), scale_stride=spans)

    def value(self):
        """float32 (1,), (M,) or (K,); 0 where there is nothing."""
        return np.maximum.reduce(self._partial, axis=0, initial=np.uint32(0)).view(np.float32)


class HostBackend(Backend):
    """Compiled loops over NumPy arrays, shared among threads."""

    tensor = staticmethod(arrays.tensor_operand)
    elements = staticmethod(arrays.elements_operand)
    codes = staticmethod(arrays.codes_operand)
    storage = staticmethod(arrays.storage_of)
    encode = staticmethod(pointwise.encode)
    decode = staticmethod(pointwise.decode)
    largest_code = staticmethod(pointwise.largest_code)
    update_delayed_scale = staticmethod(pointwise.update_delayed_scale)

    def empty(self, shape, dtype):
        """A NumPy array to be filled."""
        return np.empty(shape, DTYPES[dtype])

    def zeros(self, shape, dtype):
        """A NumPy array of zeros."""
        return np.zeros(shape, DTYPES[dtype])

    def widened(self, operand):
        """The operand in float32, exact."""
        if operand.storage == "float32":
            return operand
        with np.errstate(all="ignore"):
            return arrays.operand(operand.array.astype(np.float32))

    # --- values ---------------------------------------------------------------------------------------

    def materialize(self, front, out, storage, dbias):
        """Fill `out` with the result of `front`, `dbias` with the column sums of what is stored."""
        pipeline = Pipeline(front)
        if dbias is not None:
            if storage != "float32":
                pipeline.add(stages.rounding(storage))
            sums = ColumnSum(pipeline, dbias)
        pipeline.add(stages.storing(storage), data=as_bytes(out))
        pipeline.run()
        if dbias is not None:
            sums.finish(front.storage)

    def scaled_gradient(self, front, out, storage, scales_gradient, scales_storage):
        """Fill the gradients of a row-scaled activation."""
        sums = np.empty(scales_gradient.size, np.float32)
        rows.scaled_gradient(front, inputs_of(front), as_bytes(out), storage, sums)
        pointwise.narrow(sums, scales_storage, scales_gradient)

    def amax(self, front):
        """Largest magnitude, float32 (1,)."""
        pipeline = Pipeline(front)
        found = Maxima(pipeline, "tensor")
        pipeline.run()
        return found.value()

    def hadamard(self, operand, sign_mask, inverse, out):
        """Transform groups of 16 along the last dimension."""
        front = identity_front(operand)
        pipeline = Pipeline(front)
        pipeline.add(stages.hadamard_along(inverse), seed=np.uint64(sign_mask))
        pipeline.add(stages.storing(operand.storage), data=as_bytes(out))
        pipeline.run()

    def dequantize(self, q, out, storage):
        """Fill `out` with the values that `q` stands for."""
        prologue, inputs, undo_mask = dequantize.source_of(q)
        pipeline = Pipeline(q, _tall(TALL))
        if undo_mask is not None:
            pipeline.add(stages.hadamard_down(inverse=True), seed=np.uint64(undo_mask))
        pipeline.add(stages.storing(storage), data=as_bytes(out))
        pipeline.walk(prologue, inputs)

    # --- quantization ---------------------------------------------------------------------------------

    def require_quantized(self, q):
        """Return `q` with its scales in order; refops makes the checks."""
        DequantizedSource(q)
        return q.unswizzled() if q.with_gemm_swizzled_scales else q

    def quantized(self, fields, scaling, shape, storage, swizzled):
        """Return a `refops.Quantized`."""
        return Quantized(
            **fields, scaling=scaling, shape=shape, dtype=DTYPES[storage], with_gemm_swizzled_scales=swizzled
        )

    def quantize(self, job):
        """Fill the arrays of a `Job`."""
        pipeline = Pipeline(job.front, _tile_of(job))
        sums = None
        if job.dbias is not None and not job.path.dbias_rounded:
            sums = ColumnSum(pipeline, job.dbias)
        if job.path.casts_rounded:
            pipeline.round()
        if job.dbias is not None and job.path.dbias_rounded:
            sums = ColumnSum(pipeline, job.dbias)
        self._add_casts(pipeline, job)
        if sums is not None:
            sums.finish(job.front.storage)

    def _add_casts(self, pipeline, job):
        """Append the stages of the scaling, run the pipeline and store what is known only then."""
        if job.scaling.layout.block is None:
            _quantize_per_tensor(pipeline, job)
        else:
            _quantize_blocks(pipeline, job)


def identity_front(operand):
    """Return the front half that is a tensor itself."""
    return front_of("identity", None, {}, operand, operand.shape[-1], operand.shape)


def _tall(rows):
    return rows, LARGEST_TILE // rows


def _tile_of(job):
    """The rows and columns of a tile that suit a scaling."""
    layout = job.scaling.layout
    outer, inner = layout.block or (1, 1)
    if not job.columnwise and outer == 1:
        return WIDE
    return _tall(max(inner, TALL if layout.columnwise_transposed else BOTH))


def _directions(job):
    """The directions to make: (columnwise, prefix of the field names)."""
    return [
        (c, name) for c, name, made in ((False, "rowwise", job.rowwise), (True, "columnwise", job.columnwise)) if made
    ]


def _amax_of(job, axis, *, transformed=False):
    """Maxima of the values that the path takes the amax of, in a pass of its own."""
    pipeline = Pipeline(job.front, _tall(TALL) if transformed else WIDE)
    if transformed or job.path.amax_rounded:
        pipeline.round()
    if transformed:
        _add_hadamard(pipeline, job)
    found = Maxima(pipeline, axis)
    pipeline.run()
    return found.value()


def _quantize_per_tensor(pipeline, job):
    scaling, found = job.scaling, None
    if scaling.given is None:
        amax = _amax_of(job, "tensor")
    else:
        amax, found = np.zeros(1, F), Maxima(pipeline, "tensor")
    stored, multiplier = of_tensor(scaling, amax, DTYPES[job.front.storage])
    for columnwise, prefix in _directions(job):
        stage = epilogues.per_tensor(direction_of(scaling, columnwise))
        pipeline.add(stage, data=as_bytes(job.fields[f"{prefix}_data"]), given=multiplier)
    pipeline.run()
    amax = amax if found is None else found.value()
    for _, prefix in _directions(job):
        job.fields[f"{prefix}_scale_inv"][:] = stored
        if f"amax_{prefix}" in job.fields:
            job.fields[f"amax_{prefix}"][:] = amax


def _quantize_blocks(pipeline, job):
    scaling, (m, k) = job.scaling, job.front.matrix_shape
    numbers, random = scaling.numbers(DTYPES[job.front.storage]), scaling.random
    if scaling.layout.amax is not None:
        _fill_amax(job)
    for columnwise, prefix in _directions(job):
        if columnwise and scaling.hadamard is not None:
            _add_hadamard(pipeline, job)
        direction, scales = direction_of(scaling, columnwise, job.swizzled), job.fields[f"{prefix}_scale_inv"]
        outputs = {} if scaling.layout.amax is None else {"given": _floats(job.fields[f"amax_{prefix}"])}
        if random is not None:
            first = m * (k // PHILOX_BYTES) if columnwise else 0
            outputs |= {"seed": np.uint64(random.seed), "offset": np.uint64(random.offset), "first_block": first}
        if job.random_bits[columnwise] is not None:
            outputs["random_bits"] = as_bytes(np.ascontiguousarray(job.random_bits[columnwise]))
        pipeline.add(
            epilogues.blocks(direction),
            data=as_bytes(job.fields[f"{prefix}_data"]),
            scales=as_bytes(scales),
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


def _fill_amax(job):
    """Fill the amaxes that there are: of the tensor, of rows and of columns; columnwise after a Hadamard transform."""
    row, column = job.fields.get("amax_rowwise"), job.fields.get("amax_columnwise")
    transformed = job.scaling.hadamard is not None
    if job.scaling.layout.amax == "rows":
        for amax, axis in ((row, "rows"), (column, "columns")):
            if amax is not None:
                amax[:] = _amax_of(job, axis)
        return
    if row is not None or (column is not None and not transformed):
        shared = _amax_of(job, "tensor")
        for amax in (row, None if transformed else column):
            if amax is not None:
                amax[:] = shared
    if column is not None and transformed:
        column[:] = _amax_of(job, "tensor", transformed=True)
