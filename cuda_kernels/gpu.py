"""The GPU backend of `interface.Interface`: which kernels an operation runs, in which order, on which arrays.

Per layout, with an activation in front (without one the first step falls away):

    one scale, known          one kernel: activation, amax, cast (, transpose) (, sums)
    amax of the tensor first  activation + amax -> rounded temporary; cast of the temporary
    blocks, transposed columns, other amaxes first    activation -> rounded temporary; amax where needed; cast
    blocks, nothing transposed     one kernel for one or both directions (, sums)

Which kernel casts is a question of the layout and of the hooks (`_blocks`), never of the scaling's class.
"""

import math
from functools import lru_cache

import numpy as np

from cuda_kernels import plans, simt
from cuda_kernels.arrays import HIGH_PRECISION, Array, memory_of, numpy_dtype
from cuda_kernels.copies import BlockJob, Copy, shared_amax
from cuda_kernels.directions import direction_of
from cuda_kernels.families import (
    blocks,
    dequantize,
    elementwise,
    four_over_six,
    hadamard_transform,
    mxfp8,
    nvfp4,
    per_tensor,
    row_scaled,
    scales,
    squares,
    sums,
)
from cuda_kernels.interface import Backend, Interface, Operand
from cuda_kernels.launch import LARGEST_DIMENSION, launcher_for
from cuda_kernels.operands import ARITHMETICS, EXACT, FAST, NO_PARAMETERS, Front, Random, Stored
from cuda_kernels.result import Quantized
from refops.arguments import (
    as_codes_hint,
    require_choice,
    require_flag,
    require_high_precision_dtype,
    require_integer,
    require_tensor,
)
from refops.formats import E8M0, FORMATS, require_format
from refops.rounding import PHILOX_BYTES
from refops.scalings import FP8_FORMATS
from refops.scalings.arithmetic import REFERENCE


def family_of(scaling):
    """The module of `families` that casts by blocks of a scaling; its layout and hooks decide."""
    layout = scaling.layout
    if direction_of(scaling, False).rules().choice is not None:
        return four_over_six
    if layout.block[0] > 1:
        return squares
    if not layout.columnwise_transposed:
        return mxfp8
    if layout.packed == 2 or layout.amax is not None or scaling.hadamard is not None:
        return nvfp4
    return blocks


def call(method, signature, args, options, fast_math):
    """Call a method of `Interface` on the device and in the library of its first array.

    Args:
        method, signature: the method and its signature, `self` first.
        args, options: its arguments without `self`. fast_math: bool.

    Returns:
        Its result, arrays as those of the caller's library.
    """
    known = plans.seen(method, args, options, fast_math)
    plan = known and plans.plan_of(known)
    if plan:
        return plan.run(known)
    require_flag(fast_math, "fast_math")
    given = signature.bind(None, *args, **options).arguments  # a missing argument is no question of devices
    name = next(name for name in signature.parameters if name not in ("self", "name"))
    arrays = getattr(given[name], "arrays", None)
    memory = memory_of(next(iter(arrays.values())) if arrays else given[name], name)
    with memory.scope():
        known = plans.seen(method, args, options, fast_math)  # the memory may be the first of its kind
        if known is None or simt.SIMULATED or not plans.PLANS.wanted(known.key):
            return memory.returned(method(Interface(GPU(memory, fast_math)), *args, **options))
        recording = plans.Recording(known, memory, launcher_for(memory.device))
        backend = GPU(recording.memory, fast_math, recording.launcher)
        result = method(Interface(backend), *args, **options)
        recording.keep(result)
        return memory.returned(result)


class GPU(Backend):
    """Kernels on the device and in the library of one array; `fast_math` makes fast arithmetic of accurate."""

    def __init__(self, memory, fast_math=False, launcher=None):
        self.memory, self.fast_math = memory, fast_math
        self.launcher = launcher or launcher_for(memory.device)

    # --- arrays -----------------------------------------------------------------------------------

    def arithmetic(self, given):
        require_choice(given, "arithmetic", ARITHMETICS)
        if self.fast_math and given == EXACT:
            raise ValueError("fast_math must be False with arithmetic='exact'; got True")
        return FAST if self.fast_math else given

    def tensor(self, value, name):
        operand = self.elements(value, name)
        if not operand.shape:
            raise ValueError(f"{name} must have at least one dimension (the last one is K); got a scalar")
        m, k = math.prod(operand.shape[:-1]), operand.shape[-1]
        if max(m, k) >= LARGEST_DIMENSION:
            raise ValueError(f"{name} must have fewer than {LARGEST_DIMENSION} rows and columns; got {m} x {k}")
        return operand

    def elements(self, value, name):
        if isinstance(value, np.ndarray):
            require_tensor(np.atleast_1d(value), name)
        array = self.memory.wrap(value, name)
        if array.dtype not in HIGH_PRECISION:
            hint = "; round float64 to float32 first" if array.dtype == "float64" else ""
            raise TypeError(
                f"{name} must be float32, float16 or bfloat16{hint}; got {array.dtype} of shape {array.shape}"
            )
        return Operand(array, array.shape, array.dtype)

    def codes(self, value, name):
        array = self.memory.wrap(value, name)
        if array.dtype != "uint8":
            hint = as_codes_hint(array.dtype, name)
            raise TypeError(f"{name} must be a uint8 array; got {array.dtype} of shape {array.shape}{hint}")
        return Operand(array, array.shape, "uint8")

    def storage(self, dtype, name):
        text = str(dtype).removeprefix("torch.")
        return text if text in HIGH_PRECISION else require_high_precision_dtype(dtype, name).name

    def empty(self, shape, dtype):
        return self.memory.empty(shape, dtype)

    def zeros(self, shape, dtype):
        return self.memory.zeros(shape, dtype)

    def widened(self, operand):
        if operand.storage == "float32":
            return operand
        front = identity_of(operand.array, operand.storage)
        out = self.empty(operand.shape, "float32")
        self.materialize(front, out, "float32", None)
        return Operand(out, operand.shape, "float32")

    # --- launches ---------------------------------------------------------------------------------

    def launch(self, spec, shape, *operands):
        """Start the kernel of a `Spec` on tuples of arrays (or None) and numbers.

        Args:
            spec: a `Spec`. shape: (outer, inner) that its grid is for. operands: as its `operands` describe.
        """
        values, stream = [_value_of(one) for operand in operands for one in operand], self.memory.stream()
        self.launcher.launch(spec, values, *spec.grid(*shape), stream)

    def whole(self, front, owned, *stored):
        """Whether all that is read and `stored` has rows of whole, aligned accesses of a number of elements."""
        arrays = [a for a in (front.x, front.dy, *stored) if a is not None]
        return all(a.aligned for a in arrays) and front.width % owned == 0 and front.matrix_shape[1] % owned == 0

    def column_sums(self, front, dbias, *, stored=None, out=None, rounded=False, sums_rounded=False):
        """Fill `dbias` (K,) with the sums of columns and store the values, in one read.

        Args:
            front: what is computed. dbias: array, of any dtype.
            stored: dtype of values, or a `Direction`, as of `stores.make_put`; None: nothing is stored.
            out: the tuple to fill, as `stores.described_output` says.
            rounded: values are rounded to `front.storage` (a dtype: to it) before they are stored.
            sums_rounded: these are summed, not the exact ones.
        """
        sums.column_sums(self, front, dbias, stored=stored, out=out, rounded=rounded, sums_rounded=sums_rounded)

    def finish_sums(self, partial, out):
        """Fill `out` (K,), of any dtype, with the sums of the rows of `partial`, float32 (count, K), added in order."""
        sums.finish_sums(self, partial, out)

    # --- activations ------------------------------------------------------------------------------

    def materialize(self, front, out, storage, dbias):
        if dbias is not None:
            stored = Stored(out, *front.matrix_shape)
            self.column_sums(front, dbias, stored=storage, out=stored, sums_rounded=True)
        else:
            elementwise.store(self, front, out, storage)

    def scaled_gradient(self, front, out, storage, scales_gradient, scales_storage):
        row_scaled.scaled_gradient(self, front, out, scales_gradient)

    def amax(self, front):
        out = self.zeros((1,), "float32")
        per_tensor.tensor_amax(self, front, out)
        return out

    # --- quantization -----------------------------------------------------------------------------

    def without_kernels(self, scaling):
        return _without_kernels(scaling)

    def quantize(self, job):
        if job.scaling.layout.block is not None:
            self._blocks(job)
        else:
            per_tensor.quantize(self, job)

    def stored_first(self, job, amax):
        """Return the front of the rounded tensor, computed into a temporary if there is anything to compute.

        `amax`, unless None, gets the largest magnitude, of unrounded values where the path says so.
        """
        front = job.front
        if front.kind != "identity":
            temporary = self.empty(front.matrix_shape, front.storage)
            take_amax = amax is not None and not job.path.amax_rounded
            elementwise.store(self, front, temporary, front.storage, amax if take_amax else None)
            front = identity_of(temporary, front.storage)
            if amax is not None and not take_amax:
                per_tensor.tensor_amax(self, front, amax)
        elif amax is not None:
            per_tensor.tensor_amax(self, front, amax)
        if job.dbias is not None:
            self.column_sums(front if job.path.dbias_rounded else job.front, job.dbias)
        return front

    @staticmethod
    def dtype_of(front):
        """The NumPy (or ml_dtypes) dtype of a front's values."""
        return numpy_dtype(front.storage)

    def _blocks(self, job):
        """Cast by blocks: directly if nothing is transposed and no amax is needed first, else after storing the values.

        The kernels that cast at once sum what is not rounded.
        """
        scaling, layout, front, dbias = job.scaling, job.scaling.layout, job.front, job.dbias
        at_once = not layout.columnwise_transposed and layout.amax is None and scaling.hadamard is None
        at_once = at_once and (dbias is None or front.kind == "identity" or not job.path.dbias_rounded)
        if not at_once:
            separate = layout.amax == "rows" or scaling.hadamard is not None
            front = self.stored_first(job, None if separate or layout.amax is None else shared_amax(job.fields))
            dbias = None
            if separate:
                self._separate_amaxes(job, front)
        empty, (m, k) = 0 in front.matrix_shape, front.matrix_shape
        if dbias is not None and (empty or layout.block[0] > 1):
            self.column_sums(front, dbias, sums_rounded=job.path.dbias_rounded)
            dbias = None
        if empty:
            return
        rounded = job.path.casts_rounded and at_once and front.kind != "identity"
        rowwise, columnwise = self._copies(job, m, k)
        block_job = BlockJob(front, rounded, rowwise, columnwise, scaling.hadamard, dbias, job.path.dbias_rounded)
        family_of(scaling).quantize(self, block_job)

    def _copies(self, job, m, k):
        """The `Copy` of each direction that is made, or None."""
        copies, scales_of_amax = [], {}
        numbers, rules = job.scaling.numbers(numpy_dtype(job.front.storage)), direction_of(job.scaling, False).rules()
        for name in ("rowwise", "columnwise"):
            columnwise = name == "columnwise"
            if not getattr(job, name):
                copies.append(None)
                continue
            direction, amax = direction_of(job.scaling, columnwise, job.swizzled), job.fields.get(f"amax_{name}")
            if rules.parts and rules.choice is None and id(amax) not in scales_of_amax:
                scales_of_amax[id(amax)] = scales.tensor_scales(self, job.scaling, amax)
            copies.append(
                Copy(
                    direction,
                    job.fields[f"{name}_data"],
                    job.fields[f"{name}_scale_inv"],
                    *((k, m) if direction.transposed else (m, k)),
                    numbers,
                    amax,
                    scales_of_amax.get(id(amax)),
                    self._random(job, columnwise, m * (k // PHILOX_BYTES) if columnwise else 0),
                )
            )
        return copies

    def _random(self, job, columnwise, first_block):
        """The `Random` of a copy, None without stochastic rounding."""
        random, bits = job.scaling.random, job.random_bits[columnwise]
        if random is None:
            return None
        if bits is not None:
            bits = self.memory.from_numpy(np.ascontiguousarray(bits))
        return Random(bits, random.seed, random.offset, first_block)

    def _separate_amaxes(self, job, front):
        """Fill the amaxes that differ between the directions: of rows and columns, or after the Hadamard transform."""
        if 0 in front.matrix_shape:
            return
        mask, by_outer = job.scaling.hadamard, job.scaling.layout.amax == "rows"
        of_rows, of_columns = job.fields.get("amax_rowwise"), job.fields.get("amax_columnwise")
        if of_rows is not None and not by_outer:  # of the tensor as it is
            per_tensor.tensor_amax(self, front, of_rows)
            of_rows = None
        nvfp4.amaxes(self, front, mask, of_rows=of_rows, of_columns=of_columns, by_column=by_outer)

    def quantized(self, fields, scaling, shape, storage, swizzled):
        return Quantized(
            **{name: array.owner for name, array in fields.items()},
            scaling=scaling,
            shape=tuple(shape),
            dtype=storage,
            with_gemm_swizzled_scales=swizzled,
        )

    # --- back to high precision -------------------------------------------------------------------

    def require_quantized(self, q):
        if not isinstance(q, Quantized):
            raise TypeError(f"q must be a cuda_kernels Quantized; got {type(q).__name__}")
        if q.rowwise_data is None and q.columnwise_data is None:
            raise ValueError("q must hold rowwise_data or columnwise_data; got neither")
        return q.unswizzled() if q.with_gemm_swizzled_scales else q

    def dequantize(self, q, out, storage):
        dequantize.dequantize(self, q, out, storage)

    def hadamard(self, operand, sign_mask, inverse, out):
        if out.size:
            front = identity_of(operand.array, operand.storage)
            hadamard_transform.transform(self, front, sign_mask, inverse, out)

    def encode(self, operand, fmt, saturate, rounding, random_bits, out):
        _require_known_format(fmt)
        if not saturate or rounding != "nearest_even" or fmt == E8M0:
            raise ValueError(
                "encode on a GPU must be saturating, rounding='nearest_even', in another format than E8M0 "
                f"(refops.encode has the others); got saturate={saturate}, rounding={rounding!r}, fmt={fmt!r}"
            )
        elementwise.encode(self, identity_of(operand.array, operand.storage), out, fmt)

    def largest_code(self, codes):
        return 0 if not codes.array.size else int(self.memory.to_numpy(codes.array).max())

    def decode(self, codes, fmt, out):
        _require_known_format(fmt)
        elementwise.decode(self, codes.array, out, fmt)

    # --- delayed scaling's update -----------------------------------------------------------------

    def update_delayed_scale(self, amax_history, scale, fmt, *, margin, algorithm, keep_unused):
        require_format(fmt, FP8_FORMATS)
        margin = require_integer(margin, "margin", low=-126, high=127)
        keep_unused = require_flag(keep_unused, "keep_unused")
        if not callable(algorithm):
            algorithm = require_choice(algorithm, "algorithm", ("max", "most_recent"))
        history, scale = self._float32(amax_history, "amax_history"), self._float32(scale, "scale")
        _, columns = _history_shape(history, scale)
        amax, taken = scale, scales.NEWEST if algorithm == "most_recent" else scales.LARGEST
        if callable(algorithm):
            amax, taken = self._float32(algorithm(amax_history), "the result of algorithm"), scales.GIVEN
            if amax.size != columns:
                raise ValueError(f"algorithm must return one amax a column ({columns}); got shape {amax.shape}")
        with np.errstate(over="ignore"):  # a negative margin
            numerator = float(np.float32(fmt.max) * np.float32(2.0**-margin))
        return scales.next_delayed_scale(self, history, scale, amax, numerator, taken, keep_unused)

    def _float32(self, value, name):
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = self.memory.from_numpy(np.float32(value)).owner
        array = self.memory.wrap(value, name)
        if array.dtype != "float32":
            raise TypeError(f"{name} must be float32; got {array.dtype} of shape {array.shape}")
        return array

    def swizzle(self, stored, undo, transposed):
        """Return (R, C) scales in GEMM order, or back; `transposed` ones are [block, column], see `refops.swizzle`."""
        return scales.swizzle(self, stored, undo, transposed)


@lru_cache(maxsize=512)
def _without_kernels(scaling):
    """What keeps a scaling that runs on the CPU from having kernels; "" if it has them."""
    layout, path = scaling.layout, scaling.path
    hooks = scaling.random is not None or scaling.hadamard is not None or scaling.choice(REFERENCE) is not None
    if hooks and not layout.columnwise_transposed:
        return (
            "columnwise copies that are stored transposed, for stochastic rounding, a Hadamard transform or a choice "
            "of scales on a GPU (cuda_kernels.host takes them as they are)"
        )
    if layout.block is None and not path.casts_rounded and (scaling.given is None or path.dbias_rounded):
        return (
            "values that are rounded before they are cast, for a scale of the tensor's amax or sums of rounded values "
            "on a GPU (cuda_kernels.host takes them as they are)"
        )
    return ""


def reordered_scales(q, swizzled):
    """field -> array: the scales of a GPU `Quantized` in GEMM order, or back in rows."""
    memory, moved = memory_of(next(iter(q.arrays.values()))), {}
    with memory.scope():
        backend = GPU(memory)
        for name in ("rowwise_scale_inv", "columnwise_scale_inv"):
            if getattr(q, name) is not None:
                transposed = q.scaling.layout.scales_inner_first[name.startswith("column")]
                moved[name] = backend.swizzle(memory.wrap(getattr(q, name), name), not swizzled, transposed)
        return memory.returned(moved)


def _history_shape(history, scale):
    """(L, n) of a history, checked against its scale."""
    if len(history.shape) not in (1, 2) or history.shape[0] == 0:
        raise ValueError(f"amax_history must be (L,) or (L, n) with L >= 1; got shape {history.shape}")
    columns = history.size // history.shape[0]
    flat = len(scale.shape) > 1 or (len(history.shape) == 2 and scale.shape != history.shape[1:])
    if scale.size != columns or flat:
        raise ValueError(
            f"scale must have one entry for each column of amax_history {history.shape}; got shape {scale.shape}"
        )
    return history.shape[0], columns


def identity_of(array, storage):
    """The front that is a tensor itself."""
    shape = array.shape or (1,)
    return Front("identity", None, NO_PARAMETERS, array, None, None, 0, False, shape[-1], shape, storage)


def _value_of(field):
    """What a kernel gets for an array, None or a number."""
    if field is None:
        return 0
    return field.pointer if isinstance(field, Array) else field


def _require_known_format(fmt):
    """Raise ValueError for a format of the caller's own: kernels know `refops.FORMATS`, by name."""
    if FORMATS.get(fmt.name) != fmt:
        raise ValueError(f"fmt must be one of refops.FORMATS on a GPU (cuda_kernels.host takes any); got {fmt!r}")
