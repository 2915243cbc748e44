"""What a custom call computes, on whatever memory its operands and results are: no JAX in here.

    run(call, place, operands, results)

`Call` says what. A `Place` says where: NumPy views (`HostPlace`), or memory of a GPU (`fuser.xla.cuda`). Both fill the
results that they are given: nothing is copied. `run_reference` is the same with `refops`.

Operands and results are those of TE's FFI handlers:

    activation   x (..., 1 or 2, n), scale (1,), amax (1,)
                 -> output (..., n), colwise_output, scale_inv, colwise_scale_inv, updated_amax
    gradient     dz (..., n), x (..., 1 or 2, n), scale, amax
                 -> output like x, colwise_output, scale_inv, colwise_scale_inv, updated_amax, dbias (1 or 2, n)
    quantize     x (M, K), scale, amax
                 -> as activation

Scales are padded, as matrices of the shapes in `refops.Quantized`'s table or any other shape with as many elements.
updated_amax is the memory of amax; it gets the amax of this call, or stays as it is where the mode takes none. Results
that are not asked for have one element, and what they hold means nothing.
"""

import ctypes
import functools
import math
from contextlib import contextmanager
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import refops
from cuda_kernels.interface import Job, Operand, front_of
from fuser.xla.settings import ACTIVATION_NAMES, FORMATS, QuantizeLayout, ScalingMode, scaling_of
from refops.activations import bind_activation
from refops.ops import check_fusable, path_of
from refops.quantization.quantize import check_shape
from refops.quantization.result import stored_layout
from refops.scalings import UNFUSED

ACTIVATION, GRADIENT, QUANTIZE = "activation", "gradient", "quantize"
HIGH_PRECISION = ("float32", "float16", "bfloat16")
_CLAMPED = ACTIVATION_NAMES.index("clamped_swiglu")
CLAMPED_PARAMETERS = ("limit", "alpha", "glu_linear_offset")


class Call(NamedTuple):
    """What is computed; hashable.

    Attributes:
        kind: "activation", "gradient" or "quantize".
        act_enum: number of the activation, 0 for "quantize".
        scaling_mode, quantize_layout: numbers of a `ScalingMode` and a `QuantizeLayout`.
        amax_when_no_scaling: whether NO_SCALING stores the amax of the unrounded result.
        is_dbias: whether a gradient's column sums are wanted.
        limit, alpha, glu_linear_offset: parameters of clamped_swiglu.
    """

    kind: str
    act_enum: int = 0
    scaling_mode: int = 0
    quantize_layout: int = 0
    amax_when_no_scaling: bool = False
    is_dbias: bool = False
    limit: float = refops.DEFAULT_PARAMETERS["limit"]
    alpha: float = refops.DEFAULT_PARAMETERS["alpha"]
    glu_linear_offset: float = refops.DEFAULT_PARAMETERS["glu_linear_offset"]


class Buffer(NamedTuple):
    """An operand or result.

    Attributes:
        memory: what the `Place` makes arrays of: an address, or a NumPy array.
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


@functools.lru_cache(maxsize=1024)
def plan_of(call):
    """Return the `Plan` of a call; ValueError for numbers that mean nothing."""
    bound = None
    if call.kind != QUANTIZE:
        if not 0 <= call.act_enum < len(ACTIVATION_NAMES):
            raise ValueError(f"Unsupported ActivationEnum {call.act_enum}")
        names = CLAMPED_PARAMETERS if call.act_enum == _CLAMPED else ()
        bound = bind_activation(ACTIVATION_NAMES[call.act_enum], {name: getattr(call, name) for name in names})
    mode, layout = ScalingMode(call.scaling_mode), QuantizeLayout(call.quantize_layout)
    return Plan(bound, mode, layout.has_rowwise, layout.has_colwise)


def _scaling(mode, dtype, scale):
    """The `refops` settings of a scaling mode, the dtype of the data and, for delayed scaling, the scale."""
    if dtype not in mode.data_dtypes:
        raise TypeError(f"{mode.name} needs data of {' or '.join(mode.data_dtypes)}; got {dtype}")
    options = {"scale": scale} if mode is ScalingMode.DELAYED_TENSOR_SCALING else {}
    return scaling_of(mode, FORMATS[dtype], **options)


# --- memory ---------------------------------------------------------------------------------------------


class Place:
    """Where arrays are, and the `cuda_kernels` backend that fills them."""

    backend: Any

    def view(self, buffer, shape, dtype):
        """Return the backend's array of a buffer's memory, seen with a shape and dtype of as many bytes."""
        raise NotImplementedError

    def clear(self, array):
        """Fill an array with zero bytes."""
        raise NotImplementedError

    def copy(self, source, target):
        """Copy an array to one of the same size."""
        raise NotImplementedError

    def read(self, array):
        """Return the first element of a float32 array as a Python float."""
        raise NotImplementedError


class _Memory:
    """Memory that NumPy can view."""

    def __init__(self, address, size):
        self.__array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


@functools.cache
def _host_backend():
    from cuda_kernels.host.backend import HostBackend

    return HostBackend()


class HostPlace(Place):
    """Memory of the CPU: a buffer's memory is an address, or a NumPy array of its bytes."""

    def __init__(self):
        self.backend = _host_backend()

    def view(self, buffer, shape, dtype):
        """A NumPy array."""
        memory, dtype = buffer.memory, _numpy_dtype(dtype)
        size = math.prod(shape) * dtype.itemsize
        if isinstance(memory, int):
            memory = np.asarray(_Memory(memory, size)) if size else np.empty(0, np.uint8)
        return memory[:size].view(dtype).reshape(shape)

    def clear(self, array):
        array[...] = 0

    def copy(self, source, target):
        target[...] = source

    def read(self, array):
        return float(array[0])


# --- the computation ------------------------------------------------------------------------------------


def run(call, place, operands, results):
    """Compute a `Call`.

    Raises:
        ValueError, TypeError: operands or results that do not fit each other or the call.
    """
    with exact_subnormals():
        _run(call, plan_of(call), place, operands, results)


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
        if call.amax_when_no_scaling:
            place.copy(place.backend.amax(front), _one_float(place, results[4], "updated_amax"))
        return
    place.backend.quantize(_job(plan, place, front, operands[-2], results, dbias))


def _front(call, plan, place, operands):
    """The front half: identity, an activation or its gradient, of matrices."""
    x = _typed(operands[-3], HIGH_PRECISION, "x")
    if call.kind == QUANTIZE:
        m, k = x.shape
        return front_of("identity", None, {}, Operand(place.view(x, x.shape, x.dtype), x.shape, x.dtype), k, (m, k))
    *leading, act_len, n = x.shape
    if act_len != 1 + plan.bound.gated:
        name = plan.bound.activation.name
        raise ValueError(f"{name} needs {1 + plan.bound.gated} along the second last axis of x; got shape {x.shape}")
    m = math.prod(leading)
    operand = Operand(place.view(x, (m, act_len * n), x.dtype), (m, act_len * n), x.dtype)
    if call.kind == ACTIVATION:
        return front_of("forward", plan.bound, plan.bound.parameters, operand, n, (m, n))
    dz = operands[0]
    if tuple(dz.shape) != (*leading, n) or dz.dtype != x.dtype:
        raise ValueError(
            f"dz must be {x.dtype} of shape {(*leading, n)} for x of shape {tuple(x.shape)}; got {dz.dtype} of shape "
            f"{tuple(dz.shape)}"
        )
    dy = Operand(place.view(dz, (m, n), dz.dtype), (m, n), dz.dtype)
    return front_of("backward", plan.bound, plan.bound.parameters, operand, n, operand.shape, dy=dy)


def _job(plan, place, front, scale, results, dbias):
    """The quantization into the results' memory."""
    number = 1.0
    if plan.mode is ScalingMode.DELAYED_TENSOR_SCALING:
        number = place.read(_one_float(place, scale, "scale"))
    scaling = _scaling(plan.mode, results[0].dtype, number)
    check_fusable(front, scaling)
    check_shape(scaling, front.tensor_shape, front.matrix_shape, plan.columnwise)
    path = UNFUSED if front.kind == "identity" else path_of(scaling)
    fields = _fields(plan, place, scaling, front.tensor_shape, results)
    return Job(front, path, scaling, plan.rowwise, plan.columnwise, fields, (None, None), dbias, False)


def _fields(plan, place, scaling, shape, results):
    """name -> array in a result's memory, by the names of `refops.Quantized`."""
    rowwise, columnwise, scale_inv, colwise_scale_inv, amax = results[:5]
    _typed(amax, ("float32",), "updated_amax")
    sources = {
        "rowwise_data": rowwise,
        "rowwise_scale_inv": scale_inv,
        "amax_rowwise": amax,
        "columnwise_data": columnwise,
        "columnwise_scale_inv": colwise_scale_inv,
        "amax_columnwise": amax,
    }
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


def _one_float(place, buffer, name):
    """The array of a buffer of one float32."""
    return place.view(_typed(_sized(buffer, 1, name), ("float32",), name), (1,), "float32")


def run_reference(call, operands, results):
    """As `run`, with `refops`, on buffers of NumPy bytes; what it returns is copied into the results."""
    with exact_subnormals():
        _run_reference(call, plan_of(call), HostPlace(), operands, results)


def _run_reference(call, plan, place, operands, results):
    front = _front(call, plan, place, operands)
    tensors = [front.x] if front.dy is None else [front.dy, front.x]
    shape, scale = front.tensor_shape, place.read(place.view(operands[-2], (1,), "float32"))
    output, dbias = _reference(call, plan, tensors, results, scale)
    if plan.mode is ScalingMode.NO_SCALING:
        values, amax = output
        place.copy(values, place.view(results[0], shape, results[0].dtype))
        if call.amax_when_no_scaling:
            place.copy(amax, place.view(results[4], (1,), "float32"))
    else:
        for name, array in _fields(plan, place, output.scaling, shape, results).items():
            place.copy(getattr(output, name), array)
    if dbias is not None:
        place.copy(dbias, place.view(results[5], dbias.shape, front.storage))


def _reference(call, plan, tensors, results, scale):
    """(the result of `refops`: quantized, or values and their amax; dbias or None)."""
    names = () if plan.bound is None else (plan.bound.activation.name,)
    parameters = {} if plan.bound is None else plan.bound.parameters
    options = {"dbias": call.is_dbias} if call.kind == GRADIENT else {}
    quantize, plain = {
        ACTIVATION: (refops.activation_quantize, refops.activation),
        GRADIENT: (refops.activation_grad_quantize, refops.activation_grad),
        QUANTIZE: (refops.quantize, None),
    }[call.kind]
    if plan.mode is ScalingMode.NO_SCALING:
        values = plain(*names, *tensors, out_dtype=_numpy_dtype(results[0].dtype), **options, **parameters)
        exact = plain(*names, *tensors, out_dtype=np.float32, **parameters)
        amax = np.fmax.reduce(np.abs(exact), axis=None, initial=np.float32(0))
        return ((values[0], amax), values[1]) if call.is_dbias else ((values, amax), None)
    options |= {"rowwise": plan.rowwise, "columnwise": plan.columnwise}
    output = quantize(*names, *tensors, _scaling(plan.mode, results[0].dtype, scale), **options, **parameters)
    return output if call.is_dbias else (output, None)


def _numpy_dtype(name):
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


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
