"""What a custom call computes, on whatever memory its operands and results are: no JAX in here.

    run(call, place, operands, results)

`Call` says what. A place says where: NumPy views (`HostPlace`), or memory of a GPU (`fuser.xla.cuda.CudaPlace`, which
has the same methods). Kernels write to the results that they are given. The amax of a tensor without a scale is copied
there, and so is all that the reference returns.

Operands and results are those of TE's FFI handlers:

    activation   x (..., 1 or 2, n), scale (1,), amax (1,)
                 -> output (..., n), colwise_output, scale_inv, colwise_scale_inv, updated_amax
    gradient     dz (..., n), x (..., 1 or 2, n), scale, amax
                 -> output like x, colwise_output, scale_inv, colwise_scale_inv, updated_amax, dbias (1 or 2, n)
    quantize     x (M, K), scale, amax
                 -> as activation, dbias (K,)
    grouped      rows of each group int32 (G,), x (M, K), scale (G,), amax (G,)
                 -> flat: output (M K,), colwise_output, scale_inv, colwise_scale_inv, updated_amax (G,)

scale is what a scaling is told at run time: that of delayed scaling, float32, or the seed and the offset of stochastic
rounding, uint32 (4,), low halves first. Scales are padded, as matrices of the shapes in `refops.Quantized`'s table or
any other shape with as many elements; those of groups lie one after the other, zeros after the last, and those of
blocks in the order that GEMMs read, as TE's. updated_amax is the memory of amax; it gets the amax of this call, or
stays as it is where the mode takes none. With use_rht both are (2,), for the rowwise and the columnwise copy. dbias is
a result where it is asked for. Other results that are not asked for have one element, and what they hold means nothing.
"""

import ctypes
import functools
import math
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

import refops
from cuda_kernels.interface import Job, Operand, front_of
from cuda_kernels.operands import ACCURATE, EXACT
from fuser.xla.settings import (
    ACTIVATION_NAMES,
    FORMATS,
    HIGH_PRECISION,
    ClampedSwigluParams,
    QuantizeLayout,
    ScalingMode,
    scaling_of,
)
from refops.activations import bind_activation
from refops.ops import check_fusable, path_of
from refops.quantization.quantize import check_shape
from refops.quantization.result import stored_layout
from refops.scalings import UNFUSED

ACTIVATION, GRADIENT, QUANTIZE, GROUPED = "activation", "gradient", "quantize", "grouped"
_CLAMPED = ACTIVATION_NAMES.index("clamped_swiglu")
#: Fields of a `Call` that are False unless told otherwise.
FLAGS = ("output_amax_when_no_scaling", "is_dbias", "use_rht", "stochastic_rounding", "exact")


class Call(NamedTuple):
    """What is computed; hashable.

    Attributes:
        kind: "activation", "gradient", "quantize" or "grouped".
        act_enum: number of the activation, 0 without one.
        scaling_mode, quantize_layout: numbers of a `ScalingMode` and a `QuantizeLayout`.
        output_amax_when_no_scaling: whether NO_SCALING stores the amax of the unrounded result.
        is_dbias: whether column sums are wanted.
        parameters: those of clamped_swiglu.
        use_rht, stochastic_rounding: NVFP4's Hadamard transform of the columnwise copy, and rounding of elements.
        exact: activations have the bits of `refops`.
    """

    kind: str
    act_enum: int = 0
    scaling_mode: int = 0
    quantize_layout: int = 0
    output_amax_when_no_scaling: bool = False
    is_dbias: bool = False
    parameters: ClampedSwigluParams = ClampedSwigluParams()
    use_rht: bool = False
    stochastic_rounding: bool = False
    exact: bool = False


class Buffer(NamedTuple):
    """An operand or result.

    Attributes:
        memory: what a place makes arrays of: an address, or a NumPy array.
        shape: its shape.
        dtype: name of its dtype; two elements of float4_e2m1fn share a byte, the first in the low bits.
    """

    memory: Any
    shape: tuple
    dtype: str


class Plan(NamedTuple):
    """A `Call` with everything that its tensors do not change."""

    bound: Any
    mode: ScalingMode
    rowwise: bool
    columnwise: bool
    swizzled: bool


@functools.lru_cache(maxsize=1024)
def plan_of(call):
    """Return the `Plan` of a call; ValueError for numbers that mean nothing."""
    bound = None
    if call.kind in (ACTIVATION, GRADIENT):
        if not 0 <= call.act_enum < len(ACTIVATION_NAMES):
            raise ValueError(f"Unsupported ActivationEnum {call.act_enum}")
        parameters = asdict(call.parameters) if call.act_enum == _CLAMPED else {}
        bound = bind_activation(ACTIVATION_NAMES[call.act_enum], parameters)
    mode, layout = ScalingMode(call.scaling_mode), QuantizeLayout(call.quantize_layout)
    swizzled = call.kind == GROUPED and mode.is_block_scaling  # scales are in the order that GEMMs read
    return Plan(bound, mode, layout.has_rowwise, layout.has_colwise, swizzled)


def _scaling(call, plan, place, dtype, scale):
    """The `refops` settings of a call, of the dtype of the data and what the buffer `scale` tells."""
    options = {}
    if dtype not in plan.mode.data_dtypes:
        raise TypeError(f"{plan.mode.name} needs data of {' or '.join(plan.mode.data_dtypes)}; got {dtype}")
    if plan.mode is ScalingMode.DELAYED_TENSOR_SCALING:
        options["scale"] = float(place.read(_array(place, scale, (1,), "float32", "scale"))[0])
    if call.stochastic_rounding:
        state = place.read(_array(place, scale, (4,), "uint32", "scale"))
        seed, seed_high, offset, offset_high = state.tolist()
        options |= {"stochastic_rounding": True, "seed": seed | seed_high << 32, "offset": offset | offset_high << 32}
    if call.use_rht:
        options["rht"] = True
    return scaling_of(plan.mode, FORMATS[dtype], **options)


# --- memory ---------------------------------------------------------------------------------------------


class _Memory:
    """Memory that NumPy can view."""

    def __init__(self, address, size):
        self.__array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


@functools.cache
def _host_backend():
    from cuda_kernels.host.backend import HostBackend

    return HostBackend()


class HostPlace:
    """Memory of the CPU: a buffer's memory is an address, or a NumPy array of its bytes.

    Attributes:
        backend: the `cuda_kernels.interface.Backend` that fills arrays.
    """

    def __init__(self):
        self.backend = _host_backend()

    def view(self, buffer, shape, dtype):
        """Return the backend's array of a buffer's memory, seen with a shape and dtype of as many bytes."""
        memory, dtype = buffer.memory, np.dtype(dtype)
        size = math.prod(shape) * dtype.itemsize
        if isinstance(memory, int):
            memory = np.asarray(_Memory(memory, size)) if size else np.empty(0, np.uint8)
        return memory[:size].view(dtype).reshape(shape)

    def clear(self, array):
        """Fill an array with zero bytes."""
        array[...] = 0

    def copy(self, source, target):
        """Copy an array to one of the same size."""
        target[...] = source

    def read(self, array):
        """Return an array of float32, int32 or uint32 as one of NumPy."""
        return array


# --- the computation ------------------------------------------------------------------------------------


def run(call, place, operands, results, reference=False):
    """Compute a `Call`; with `reference` by `refops`, where `place` is a `HostPlace`.

    Raises:
        ValueError, TypeError: operands or results that do not fit each other or the call.
    """
    plan, compute = plan_of(call), _run_reference if reference else _run
    with exact_subnormals():
        for one in _parts(call, plan, place, operands, results):
            compute(call, plan, place, *one)


def _parts(call, plan, place, operands, results):
    """Yield (operands, results) of a call; of a grouped one those of each group, as of a call without groups."""
    if call.kind != GROUPED:
        yield operands, results
        return
    sizes, x, scales, amaxes = operands
    m, k = x.shape
    rows = place.read(_array(place, sizes, sizes.shape, "int32", "group_sizes")).tolist()
    multiple = plan.mode.block_size if plan.columnwise and plan.mode.is_block_scaling else 1
    if sum(rows) != m or any(size < 0 or size % multiple for size in rows):
        of_blocks = f", each a multiple of {multiple} for columnwise blocks" if multiple > 1 else ""
        raise ValueError(f"group_sizes must add up to the {m} rows of x{of_blocks}; got {rows} rows in groups")
    _sized(scales, len(rows), "scale"), _sized(results[4], len(rows), "updated_amax")
    results, start, taken = list(results), 0, [0, 0]
    if plan.mode.is_block_scaling:
        for result in results[2:4]:  # what no group fills
            place.clear(place.view(result, result.shape, "uint8"))
    for number, size in enumerate(rows):
        layout = stored_layout(scaling_of(plan.mode), (size, k))
        parts = [*results[:4], _part(results[4], number, (1,))]
        for copy, name in enumerate(("rowwise", "columnwise")):
            if plan.columnwise if copy else plan.rowwise:
                shape = layout[f"{name}_scale_inv"][0]
                parts[copy] = _part(_sized(results[copy], m * k, f"{name}_data"), start * k, (size, k))
                parts[2 + copy] = _part(results[2 + copy], taken[copy], shape)
                taken[copy] += math.prod(shape)
                if taken[copy] > math.prod(results[2 + copy].shape):
                    raise ValueError(
                        f"{name}_scale_inv must have room for those of {rows}; got {results[2 + copy].shape}"
                    )
        given = [_part(buffer, number, (1,)) for buffer in (scales, amaxes)]
        yield [_part(x, start * k, (size, k)), *given], parts
        start += size


def _part(buffer, start, shape):
    """Elements of a buffer as one of `shape`, from the element `start` on; all of its elements are whole bytes."""
    offset = start * np.dtype(buffer.dtype).itemsize
    memory = buffer.memory + offset if isinstance(buffer.memory, int) else buffer.memory[offset:]
    return Buffer(memory, shape, buffer.dtype)


def _run(call, plan, place, operands, results):
    front = _front(call, plan, place, operands)
    dbias = None
    if call.is_dbias:
        dbias = place.view(_sized(results[5], front.tensor_shape[1], "dbias"), front.tensor_shape[1:], front.storage)
    if plan.mode is ScalingMode.NO_SCALING:
        out = _typed(_sized(results[0], math.prod(front.tensor_shape), "output"), HIGH_PRECISION, "output")
        array = place.view(out, front.tensor_shape, out.dtype)
        if array.size or dbias is not None:
            place.backend.materialize(front, array, out.dtype, dbias)
        if call.output_amax_when_no_scaling:
            place.copy(place.backend.amax(front), _array(place, results[4], (1,), "float32", "updated_amax"))
        return
    scaling = _scaling(call, plan, place, results[0].dtype, operands[-2])
    check_fusable(front, scaling)
    check_shape(scaling, front.tensor_shape, front.matrix_shape, plan.columnwise)
    path = UNFUSED if front.kind == "identity" else path_of(scaling)
    fields = _fields(plan, place, scaling, front.tensor_shape, results)
    copies = plan.rowwise, plan.columnwise
    place.backend.quantize(Job(front, path, scaling, *copies, fields, (None, None), dbias, plan.swizzled))


def _front(call, plan, place, operands):
    """The front half: identity, an activation or its gradient, of matrices."""
    x = _typed(operands[-3], HIGH_PRECISION, "x")
    if plan.bound is None:
        m, k = x.shape
        return front_of("identity", None, {}, Operand(place.view(x, x.shape, x.dtype), x.shape, x.dtype), k, (m, k))
    *leading, act_len, n = x.shape
    if act_len != 1 + plan.bound.gated:
        name = plan.bound.activation.name
        raise ValueError(f"{name} needs {1 + plan.bound.gated} along the second last axis of x; got shape {x.shape}")
    m, arithmetic = math.prod(leading), EXACT if call.exact else ACCURATE
    operand = Operand(place.view(x, (m, act_len * n), x.dtype), (m, act_len * n), x.dtype)
    if call.kind == ACTIVATION:
        return front_of("forward", plan.bound, plan.bound.parameters, operand, n, (m, n), arithmetic=arithmetic)
    dz = operands[0]
    if tuple(dz.shape) != (*leading, n) or dz.dtype != x.dtype:
        raise ValueError(
            f"dz must be {x.dtype} of shape {(*leading, n)} for x of shape {tuple(x.shape)}; got {dz.dtype} of shape "
            f"{tuple(dz.shape)}"
        )
    dy = Operand(place.view(dz, (m, n), dz.dtype), (m, n), dz.dtype)
    options = {"dy": dy, "arithmetic": arithmetic}
    return front_of("backward", plan.bound, plan.bound.parameters, operand, n, operand.shape, **options)


def _fields(plan, place, scaling, shape, results):
    """name -> array in a result's memory, by the names of `refops.Quantized`."""
    names = "rowwise_data", "columnwise_data", "rowwise_scale_inv", "columnwise_scale_inv"
    sources, amax = dict(zip(names, results, strict=False)), _typed(results[4], ("float32",), "updated_amax")
    sources |= {"amax_rowwise": amax, "amax_columnwise": amax}
    if scaling.hadamard is not None:
        _sized(amax, 2, "updated_amax")
        sources |= {"amax_rowwise": _part(amax, 0, (1,)), "amax_columnwise": _part(amax, 1, (1,))}
    fields = {}
    for name, (layout, dtype) in stored_layout(scaling, shape).items():
        if not (plan.columnwise if "columnwise" in name else plan.rowwise):
            continue
        buffer = sources[name]
        per_byte = scaling.layout.packed if name.endswith("_data") else 1
        array = place.view(_sized(buffer, math.prod(layout) * per_byte, name), layout, dtype.name)
        if not name.endswith("_data"):
            place.clear(array)
        fields[name] = array
    return fields


def _sized(buffer, elements, name):
    """The buffer, if it has that many elements."""
    if math.prod(buffer.shape) != elements:
        raise ValueError(f"{name} must have {elements} elements; got shape {tuple(buffer.shape)}")
    return buffer


def _typed(buffer, dtypes, name):
    """The buffer, if its dtype is one of those."""
    if buffer.dtype not in dtypes:
        raise TypeError(f"{name} must be {' or '.join(dtypes)}; got {buffer.dtype}")
    return buffer


def _array(place, buffer, shape, dtype, name):
    """The array of a buffer that must have as many elements as `shape`, of a dtype."""
    return place.view(_typed(_sized(buffer, math.prod(shape), name), (dtype,), name), shape, dtype)


def _run_reference(call, plan, place, operands, results):
    """What `refops` returns, copied into the results."""
    front = _front(call, plan, place, operands)
    arguments = [front.x] if front.dy is None else [front.dy, front.x]
    options, sums = {}, {} if call.kind == ACTIVATION else {"dbias": call.is_dbias}
    if plan.bound is not None:
        arguments, options = [plan.bound.activation.name, *arguments], plan.bound.parameters

    def store_sums(output):
        if not call.is_dbias:
            return output
        output, dbias = output
        place.copy(dbias, place.view(results[5], dbias.shape, front.storage))
        return output

    dtype = results[0].dtype
    if plan.mode is ScalingMode.NO_SCALING:
        function = refops.activation if call.kind == ACTIVATION else refops.activation_grad
        values = store_sums(function(*arguments, out_dtype=np.dtype(dtype), **options, **sums))
        place.copy(values, place.view(results[0], front.tensor_shape, dtype))
        if call.output_amax_when_no_scaling:
            unrounded = function(*arguments, out_dtype=np.float32, **options)
            amax = np.fmax.reduce(np.abs(unrounded), axis=None, initial=np.float32(0))
            place.copy(amax, place.view(results[4], (1,), "float32"))
        return
    functions = {ACTIVATION: refops.activation_quantize, GRADIENT: refops.activation_grad_quantize}
    function = functions.get(call.kind, refops.quantize)
    scaling = _scaling(call, plan, place, dtype, operands[-2])
    copies = {"rowwise": plan.rowwise, "columnwise": plan.columnwise}
    output = store_sums(function(*arguments, scaling, **copies, **options, **sums))
    output = output.swizzled() if plan.swizzled else output
    for name, array in _fields(plan, place, scaling, front.tensor_shape, results).items():
        place.copy(getattr(output, name), array)


# --- subnormals -----------------------------------------------------------------------------------------


@functools.cache
def _floating_point_environment():
    """libm's (fegetenv, fesetenv), where resetting is known to turn flushing off: glibc; else None."""
    try:
        library = ctypes.CDLL("libm.so.6")
    except OSError:
        return None
    library.fegetenv.argtypes = library.fesetenv.argtypes = [ctypes.c_void_p]
    return library.fegetenv, library.fesetenv


@contextmanager
def exact_subnormals():
    """XLA's threads flush float32 subnormals to zero; in this block the thread does not.

    Elsewhere than on Linux nothing changes, and the kernels raise RuntimeError if subnormals are flushed.
    """
    environment = _floating_point_environment()
    if environment is None:
        yield
        return
    read, write = environment
    saved = ctypes.create_string_buffer(64)
    read(saved)
    write(ctypes.c_void_p(-1))  # FE_DFL_ENV
    try:
        yield
    finally:
        write(saved)
