"""Send work to a backend: torch tensors in, torch tensors out.

| backend     | CPU tensors                    | CUDA tensors                  |
|-------------|--------------------------------|-------------------------------|
| "auto"      | `cuda_kernels.host`, no copies | `cuda_kernels`, no copies     |
| "reference" | `refops`, no copies            | `refops`, through host memory |
| "exact"     | as "auto"                      | as "auto"                     |
| "float64"   | as "auto"                      | as "auto"                     |

Under "exact" activations and gradients have the bits of `refops`: `arithmetic="exact"` of `cuda_kernels`, without which
exp and tanh are within 2 ulp, as TE's. Under "float64" activations also take float64 tensors, and compute the true
formulas of `refops`: for gradcheck.

The backend is that of the innermost `with backend(name)` around the call, else of the environment variable
FUSER_BACKEND, else "auto". Every function is that of `refops` with the same name; its docstring has the details.
Memory is shared between torch and NumPy in both directions, bfloat16 as 16-bit integers. No autograd in here.

A call on CPU tensors that is like an earlier one, in its settings and in what its tensors are, is neither checked nor
planned again: `_find_plan` finds what was done, which reads the tensors and fills new ones where they lie.
"""

import functools
import inspect
import os
import sys
from collections import namedtuple
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import torch

import refops
from fuser.dtypes import HIGH_PRECISION, require_torch_tensor
from fuser.recipe import constant_of_graph
from fuser.scopes import Scope, scope
from fuser.torch_words import TORCH
from fuser.tracing import define_operator, refuse_trace, register_opaque, rehearsal, untraced
from refops.activations import bind_activation
from refops.arguments import require_choice, require_integer, require_tensor, shown
from refops.quantization.result import Quantized, matrix_shape, stored_layout
from refops.tiles import InputSource, tensor_amax

BACKENDS = ("auto", "reference", "exact", "float64")
VARIABLE = "FUSER_BACKEND"

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_NUMPY = {torch.bfloat16: _BFLOAT16, torch.float16: np.dtype(np.float16), torch.float32: np.dtype(np.float32)}
_selected: ContextVar[str | None] = ContextVar("fuser_backend", default=None)
_Function = TypeVar("_Function", bound=Callable[..., Any])


# --- which backend --------------------------------------------------------------------------------


def backend(name: str) -> Scope[str]:
    """Return a context manager (and decorator) that sends the work of its block to a backend.

    It nests, can be entered again, and holds for the current thread or task alone (a `contextvars.ContextVar`).

    Args:
        name: "auto", "reference", "exact" or "float64"; the module's table says what each does.

    Raises:
        ValueError: another name.
    """
    return _scope(_require_backend(name, "name"))


@scope
def _scope(name):
    with one_backend(name):
        yield name


class one_backend:  # noqa: N801 (used like a function)
    """A context manager that holds one backend for its block; it is entered once.

    Args:
        name: as of `backend`, which checks it. None: the one in force; FUSER_BACKEND is read once, as the block begins.

    Entering it returns the name.
    """

    __slots__ = ("_name", "_token")

    def __init__(self, name: str | None = None) -> None:
        self._name = name

    def __enter__(self) -> str:
        name = self._name or current_backend()
        self._token = _selected.set(name)
        return name

    def __exit__(self, *exc_info: Any) -> None:
        _selected.reset(self._token)


def _require_backend(name, argument):
    return require_choice(name, argument, BACKENDS)


def current_backend():
    """Return the name of the backend that a call would use now; ValueError if FUSER_BACKEND holds another name."""
    selected = _selected.get()
    if selected is not None:
        return selected
    given = os.environ.get(VARIABLE)
    return _require_backend(given, VARIABLE) if given else "auto"


def computes_in(dtype):
    """Return whether activations and products take a dtype: float32, float16, bfloat16; float64 under "float64"."""
    if not isinstance(dtype, torch.dtype):  # an array compares its elements
        return False
    return dtype in HIGH_PRECISION or (dtype is torch.float64 and current_backend() == "float64")


# --- torch and NumPy ------------------------------------------------------------------------------


def as_numpy(tensor):
    """View a CPU tensor as a NumPy array: the same memory, strides as they are; bfloat16 as ml_dtypes.bfloat16."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    is_bfloat16 = tensor.dtype is torch.bfloat16
    if is_bfloat16:
        tensor = tensor.view(torch.int16)
    # numpy() locks the storage, which FSDP frees by resizing it
    if "torch.distributed.fsdp" in sys.modules and torch.distributed.is_initialized():
        array = np.from_dlpack(tensor)
    else:
        array = tensor.numpy()
    return array.view(_BFLOAT16) if is_bfloat16 else array


def as_torch(array):
    """View a NumPy array (bfloat16 as ml_dtypes.bfloat16) as a CPU tensor of the same memory."""
    if array.dtype == _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


#: The fields of `Buffers` that hold tensors: those of `refops.Quantized` that hold arrays, or None.
TENSOR_FIELDS = tuple(field.name for field in fields(Quantized) if field.default is None)


@dataclass(frozen=True, eq=False, kw_only=True)
class Buffers:
    """A quantized tensor as plain torch tensors, with the attributes and layouts of `refops.Quantized`.

    Attributes:
        rowwise_data, rowwise_scale_inv: uint8 codes and decode scales with blocks along the last dimension, or None.
        columnwise_data, columnwise_scale_inv: the same with blocks along the rows, or None.
        amax_rowwise, amax_columnwise: float32, where the scaling keeps one.
        scaling: the `refops` settings used.
        shape: shape of the unquantized tensor.
        dtype: its torch dtype.
        with_gemm_swizzled_scales: whether the scales are in GEMM order.

    Raises:
        TypeError: values can't be dequantized to `dtype`.
    """

    rowwise_data: torch.Tensor | None = None
    rowwise_scale_inv: torch.Tensor | None = None
    columnwise_data: torch.Tensor | None = None
    columnwise_scale_inv: torch.Tensor | None = None
    amax_rowwise: torch.Tensor | None = None
    amax_columnwise: torch.Tensor | None = None
    scaling: Any
    shape: tuple
    dtype: torch.dtype
    with_gemm_swizzled_scales: bool = False

    def __post_init__(self):
        if self.dtype not in HIGH_PRECISION:
            raise TypeError(
                f"dtype of a quantized tensor must be float32, float16 or bfloat16; got {shown(self.dtype)}. "
                "Dequantize it for others"
            )

    @property
    def tensors(self):
        """name -> tensor, of those that are there."""
        return {name: getattr(self, name) for name in TENSOR_FIELDS if getattr(self, name) is not None}

    def viewed(self, shape):
        """The same memory, as a tensor of another shape with the same matrix (M, K)."""
        layout = stored_layout(self.scaling, shape)
        return replace(self, **{name: t.view(layout[name][0]) for name, t in self.tensors.items()}, shape=shape)

    def operand(self, columnwise):
        """What a product that wants the columnwise, or rowwise, copy reads: these buffers; it takes what it needs."""
        return self

    @property
    def device(self):
        """Where the tensors are; None without any."""
        for name in TENSOR_FIELDS:
            tensor = getattr(self, name)
            if tensor is not None:
                return tensor.device
        return None


# --- tracers --------------------------------------------------------------------------------------


def _dispatched(function: _Function) -> _Function:
    """Decorate a call of this module: `untraced`, and an error for missing kernels names the backend that has it."""

    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args, **kwargs):
        refuse_trace(function.__name__)
        if torch._C._are_functorch_transforms_active():
            bound = signature.bind(*args, **kwargs)  # tensors by keyword, too, are arguments by position
            return _transformed(function.__name__, bound.args, bound.kwargs)
        try:
            return function(*args, **kwargs)
        except NotImplementedError as error:
            from cuda_kernels.errors import NoKernelsError

            if not isinstance(error, NoKernelsError):  # torch's own, of a tensor that has no such operation
                raise
            way = "; refops computes it, slowly: `with fuser.backend('reference'):`"
            raise NoKernelsError(f"{error}{way}") from error.__cause__

    def recorded(*args, **kwargs):
        if function.__name__ not in ("activation", "scaled_activation"):
            raise RuntimeError(
                f"torch.export can't record {function.__name__}: casts and gradients are kernels, not operators of "
                "torch. It can record operations outside of fuser.autocast, and activations without a quantizer"
            )
        return _activation_in_operators(*args, **kwargs)

    def rehearsed(*args, **kwargs):
        return _WITHOUT_ELEMENTS[function.__name__](*args, **kwargs)

    name = function.__name__
    in_graph = functools.partial(_in_graph, name) if name in _IN_GRAPHS else None
    return untraced(call, recorded=recorded, rehearsed=rehearsed, in_graph=in_graph)  # type: ignore[return-value]


def _activation_in_operators(name, x, scales=None, *, glu_interleave_size=0, out_dtype=None, **params):
    bound, wide = bind_activation(name, params).using(TORCH), x.to(torch.promote_types(x.dtype, torch.float32))
    wide = _in_halves(wide, glu_interleave_size)
    y = bound.forward(*wide.chunk(2, -1)) if bound.gated else bound.forward(wide)
    y = y if scales is None else y * scales.to(wide.dtype).reshape(*x.shape[:-1], 1)
    return y.to(out_dtype or x.dtype)


# --- graphs of torch.compile ----------------------------------------------------------------------

#: Calls of this module that are operators of graphs: their results are tensors.
_IN_GRAPHS = ("activation", "activation_grad", "scaled_activation", "scaled_activation_grad", "amax")


@dataclass(frozen=True)
class _KernelCall:
    """A call of this module apart from its tensors and numbers, which may be others in the next call of the graph.

    `kinds`: of its arguments, those by position and then those by keyword, whose names are `options`; `constants`: the
    values of those that are no tensors and no numbers, in order.
    """

    method: str
    kinds: tuple
    constants: tuple
    options: tuple

    def __fx_repr__(self):
        return constant_of_graph(self)

    def run(self, tensors, floats, integers):
        """The results, as a list."""
        given = {
            "tensor": iter(tensors),
            "float": iter(floats),
            "integer": iter(integers),
            "constant": iter(self.constants),
        }
        values = [next(given[kind]) for kind in self.kinds]
        by_position = len(values) - len(self.options)
        options = dict(zip(self.options, values[by_position:], strict=True))
        made = globals()[self.method](*values[:by_position], **options)
        return list(made) if isinstance(made, tuple) else [made]


def _kind_of(value):
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, float):
        return "float"
    return "integer" if isinstance(value, int) and not isinstance(value, bool) else "constant"


def _in_graph(method, /, *args, **options):
    values = [*args, *options.values()]
    kinds = tuple([_kind_of(one) for one in values])
    tensors, floats, integers, constants = [
        [one for one, kind in zip(values, kinds, strict=True) if kind == wanted]
        for wanted in ("tensor", "float", "integer", "constant")
    ]
    call = _KernelCall(method, kinds, tuple(constants), tuple(options))
    results = torch.ops.fuser.kernel(tensors, floats, integers, call)
    return results[0] if len(results) == 1 else tuple(results)


def _run_kernel(tensors, floats, integers, call):
    return call.run(tensors, floats, integers)


def _rehearsed_kernel(tensors, floats, integers, call):
    with rehearsal():
        return call.run(tensors, floats, integers)


register_opaque(_KernelCall, "value")
define_operator(
    "kernel",
    "(Tensor[] tensors, float[] floats, int[] integers, {} call) -> Tensor[]",
    _run_kernel,
    _rehearsed_kernel,
    _KernelCall,
    effects=False,
)


# --- torch.func -------------------------------------------------------------------------------------

#: Call whose rows are independent -> that of its gradient, which takes the output's gradient first.
_GRADIENTS = {
    "activation": "activation_grad",
    "scaled_activation": "scaled_activation_grad",
    "activation_grad": None,
    "scaled_activation_grad": None,
}


def _transformed(method, args, options):
    """A call on tensors of torch.func's transforms (grad, vmap ...)."""
    if method not in _GRADIENTS or options.get("dbias"):
        raise RuntimeError(
            f"torch.func can't transform {method}: it can transform activations without a quantizer, and their first "
            "gradients"
        )
    name, *tensors = args
    return _OfRows.apply(method, name, options, *tensors)


class _OfRows(torch.autograd.Function):
    """A call whose rows are independent, as torch.func transforms it."""

    @staticmethod
    def forward(method, name, options, *tensors):
        return globals()[method](name, *tensors, **options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.method, ctx.name, ctx.options, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx, *grads):
        gradient = _GRADIENTS[ctx.method]
        if gradient is None:
            raise RuntimeError("Double backward: activations have kernels for their first gradients alone")
        options = {name: value for name, value in ctx.options.items() if name != "out_dtype"}
        made = _OfRows.apply(gradient, ctx.name, options, *grads, *ctx.saved_tensors)
        return None, None, None, *(made if isinstance(made, tuple) else (made,))

    @staticmethod
    def vmap(info, in_dims, method, name, options, *tensors):
        batched = []
        for tensor, dim in zip(tensors, in_dims[3:], strict=True):
            first = tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            batched.append(first.contiguous())
        made = _OfRows.apply(method, name, options, *batched)
        return made, (0,) * len(made) if isinstance(made, tuple) else 0


# --- without elements -----------------------------------------------------------------------------


def _empty_activation(name, x, scales=None, *, glu_interleave_size=0, out_dtype=None, **params):
    gated = bind_activation(name, params).gated
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2) if gated else x.shape, dtype=out_dtype or x.dtype)


def _empty_activation_grad(name, dy, x, *, out_dtype=None, dbias=False, **params):
    dx = x.new_empty(x.shape, dtype=out_dtype or x.dtype)
    return (dx, dx.new_empty(dx.shape[-1])) if dbias else dx


def _empty_scaled_activation_grad(name, dy, x, scales, *, glu_interleave_size=0, out_dtype=None, **params):
    return x.new_empty(x.shape, dtype=out_dtype or x.dtype), scales.new_empty(scales.shape)


def _empty_quantized(x, scaling, *, rowwise=True, columnwise=False, dbias=False):
    shape, layout, tensors = tuple(x.shape), scaling.layout, {}
    matrix = matrix_shape(shape)
    for direction, is_made in (("rowwise", rowwise), ("columnwise", columnwise)):
        if is_made:
            of_columns = direction == "columnwise"
            scale_dtype = getattr(torch, layout.scale_dtype.name)
            tensors[f"{direction}_data"] = x.new_empty(layout.data_shape(shape, of_columns), dtype=torch.uint8)
            tensors[f"{direction}_scale_inv"] = x.new_empty(layout.scale_shape(matrix, of_columns), dtype=scale_dtype)
            if layout.amax is not None:
                tensors[f"amax_{direction}"] = x.new_empty(layout.amax_shape(matrix, of_columns), dtype=torch.float32)
    buffers = Buffers(**tensors, scaling=scaling, shape=shape, dtype=x.dtype)
    return (buffers, x.new_empty(matrix[1], dtype=torch.float32)) if dbias else buffers


def _empty_activation_quantized(name, x, scaling, *, rowwise=True, columnwise=False, **params):
    return _empty_quantized(_empty_activation(name, x, **params), scaling, rowwise=rowwise, columnwise=columnwise)


def _empty_dequantized(buffers, *, dtype=torch.float32, columnwise=False):
    return next(iter(buffers.tensors.values())).new_empty(buffers.shape, dtype=dtype)


def _empty_reordered(swizzled):
    return lambda buffers: replace(
        buffers,
        **{name: torch.empty_like(tensor) for name, tensor in buffers.tensors.items()},
        with_gemm_swizzled_scales=swizzled,
    )


#: Call of this module -> the function that makes results of the same shapes, dtypes and strides, for tensors without
#: elements; sizes may be symbols.
_WITHOUT_ELEMENTS: dict[str, Callable[..., Any]] = {
    "activation": _empty_activation,
    "activation_grad": _empty_activation_grad,
    "scaled_activation_grad": _empty_scaled_activation_grad,
    "scaled_activation": _empty_activation,
    "quantize": _empty_quantized,
    "activation_quantize": _empty_activation_quantized,
    "dequantize": _empty_dequantized,
    "swizzled": _empty_reordered(True),
    "unswizzled": _empty_reordered(False),
    "amax": lambda x: x.new_empty(1, dtype=torch.float32),
}


# --- engines --------------------------------------------------------------------------------------


class Engine:
    """A library with the calls of `refops`, and how torch tensors become its arrays and back.

    `quantized_class`: that of its quantized tensors.
    """

    def __init__(self, library, quantized_class=Quantized):
        self.library = library
        self._quantized_class = quantized_class

    def array(self, tensor):
        """The library's view of a tensor."""
        return as_numpy(tensor)

    def tensor(self, array):
        """The tensor of an array that the library made."""
        return as_torch(array)

    def dtype(self, dtype):
        """The library's name of a torch dtype."""
        return _NUMPY.get(dtype, dtype)

    def quantized(self, buffers, tensors=None):
        """The library's quantized tensor, of all tensors of `buffers` or some of them."""
        tensors = buffers.tensors if tensors is None else tensors
        return self._quantized_class(
            **{name: self.array(tensor) for name, tensor in tensors.items()},
            scaling=buffers.scaling,
            shape=tuple(buffers.shape),
            dtype=str(buffers.dtype).removeprefix("torch."),
            with_gemm_swizzled_scales=buffers.with_gemm_swizzled_scales,
        )

    def result(self, made):
        """The result of a call of the library, with arrays as tensors and quantized tensors as `Buffers`."""
        if isinstance(made, tuple):
            return tuple([self.result(one) for one in made])
        if isinstance(made, np.ndarray | torch.Tensor):
            return self.tensor(made)
        arrays = {name: getattr(made, name) for name in TENSOR_FIELDS}
        return Buffers(
            **{name: None if array is None else self.tensor(array) for name, array in arrays.items()},
            scaling=made.scaling,
            shape=tuple(made.shape),
            dtype=getattr(torch, str(made.dtype)),
            with_gemm_swizzled_scales=made.with_gemm_swizzled_scales,
        )

    def call(self, name, args, options, described=None, arrays=None):
        """Call a function of the library.

        `described`: the description of the call; `arrays`: NumPy views of its tensors, where `args` holds none.
        """
        return getattr(self.library, name)(*args, **options)


def _describe(tensor):
    """(address, dtype, shape) of a tensor that can be read as it lies on the CPU, else None."""
    try:
        if not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_neg():
            return None
        address = tensor.data_ptr()
    except RuntimeError:  # one without strides, or without memory of its own
        return None
    return (address, tensor.dtype, tensor.shape) if address or not tensor.numel() else None


#: Type of tensors that calls with plans take -> what describes one.
_DESCRIBERS = {torch.Tensor: _describe, torch.nn.Parameter: _describe}
#: One direction of `Buffers` as calls are described by it; arrays: name -> tensor.
_Copy = namedtuple("_Copy", "arrays shape dtype with_gemm_swizzled_scales scaling")


def _making_empty(shape, dtype):
    """The function that makes an empty tensor on the CPU: with strides, in half of torch.empty's time."""
    strides = torch.empty(shape, device="meta").stride()
    return functools.partial(torch.empty_strided, shape, strides, dtype=dtype, device=torch.device("cpu"))


def _making_zeros(shape, dtype):
    return functools.partial(torch.zeros, shape, dtype=dtype, device=torch.device("cpu"))


class _Host(Engine):
    """`cuda_kernels.host`: calls that are made again (`cuda_kernels.host.calls`) fill tensors."""

    def __init__(self, library):
        from cuda_kernels.host import calls

        super().__init__(library)
        self._calls = calls
        self._made = calls.Made(
            kind=torch.Tensor,
            empty=_making_empty,
            zeros=_making_zeros,
            dtype=lambda dtype: getattr(torch, str(dtype)),
            address=torch.Tensor.data_ptr,
            front=self.result,
        )

    def tensor(self, array):
        return array if isinstance(array, torch.Tensor) else as_torch(array)

    def find_plan(self, name, args, options):
        """(description of the call, None if it can't be planned; its plan, None if there is none yet)."""
        described = self._calls.seen(name, args, options, _DESCRIBERS, _Copy, lambda copy: copy.arrays)
        return described, None if described is None else self._calls.PLANS.get(described.key)

    def call(self, name, args, options, described=None, arrays=None):
        recorded = getattr(getattr(self.library, name), "recorded", None)
        if described is None or recorded is None:
            return super().call(name, args, options)
        arrays = [one for one in args if isinstance(one, np.ndarray)] if arrays is None else arrays
        return recorded(described, arrays, self._made, args, options)


class Reference(Engine):
    """`refops`; tensors of other devices go through host memory."""

    def __init__(self, device):
        super().__init__(refops)
        self._device = device

    def array(self, tensor):
        return as_numpy(tensor.cpu())

    def tensor(self, array):
        return as_torch(array).to(self._device)

    def call(self, name, args, options, described=None, arrays=None):
        if name == "amax":  # refops has no public `amax`: the one that its quantize uses
            return tensor_amax(InputSource(require_tensor(args[0], "x")))
        return super().call(name, args, options)


class Kernels(Engine):
    """`cuda_kernels` on a GPU: it takes and returns torch tensors."""

    def __init__(self, library):
        from cuda_kernels.result import Quantized as DeviceQuantized

        super().__init__(library, DeviceQuantized)

    def array(self, tensor):
        return tensor.detach()

    def tensor(self, array):
        return array

    def dtype(self, dtype):
        return dtype


@functools.cache
def _automatic(device_type):
    """The engine of a device; the libraries load when they are first needed."""
    if device_type == "cpu":
        from cuda_kernels import host

        return _Host(host)
    import cuda_kernels

    return Kernels(cuda_kernels)


def _engine(tensor, name="x"):
    """Return the engine for the work on a tensor; TypeError as `_require_plain`."""
    _require_plain(tensor, name)
    return _engine_on(tensor.device)


def _require_plain(tensor, name):
    """Raise TypeError unless it is a tensor with elements of its own, float32, float16 or bfloat16, on a CPU or GPU."""
    if not _is_plain(tensor):
        raise TypeError(f"{name} must be a plain torch tensor; got {type(tensor).__name__}")
    if tensor.dtype not in HIGH_PRECISION:
        raise TypeError(
            f"{name} must be float32, float16 or bfloat16 (float64 only in activations under backend('float64')); "
            f"got {tensor.dtype} of shape {tuple(tensor.shape)}"
        )
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor; got {tensor.layout} of shape {tuple(tensor.shape)}")
    if tensor.device.type not in ("cpu", "cuda"):
        raise TypeError(f"{name} must be on a CPU or CUDA device; got one on {tensor.device}")


def _is_plain(tensor):
    """Whether it is a tensor with elements of its own; quantized and grouped ones offer `plain_values`."""
    if type(tensor) is torch.Tensor:
        return True
    return isinstance(tensor, torch.Tensor) and not hasattr(tensor, "plain_values")


def _find_plan(tensor, method, args, options):
    """(options as the backend wants them, description, plan) of a call that begins with a tensor: `_Host.find_plan`.

    A plan exists only if every setting, dtype and shape is the same.
    """
    selected = current_backend()
    if selected == "exact" and method in _ACTIVATIONS:
        options = {**options, "arithmetic": "exact"}
    if type(tensor) not in _DESCRIBERS or not tensor.is_cpu or selected == "reference":
        return options, None, None
    return options, *_automatic("cpu").find_plan(method, args, options)


def repeated(method, x, args, options):
    """The result of a call that is like an earlier, checked one; None for any other call."""
    refuse_trace(method)
    _, described, plan = _find_plan(x, method, args, options)
    return None if plan is None else plan.run(described)


def _engine_on(device):
    return Reference(device) if current_backend() == "reference" else _automatic(device.type)


def _is_scalar(tensor):
    """Whether it has no dimension: refops takes arrays with a last one."""
    return isinstance(tensor, torch.Tensor) and tensor.dim() == 0 and _is_plain(tensor)


def _in_float64(*tensors):
    """Whether the work is that of `backend("float64")` on float64 tensors."""
    return any(getattr(t, "dtype", None) is torch.float64 for t in tensors) and current_backend() == "float64"


def _run(method, x, args, options, **others):
    """Call a method of the library for the device of `x`; return tensors and `Buffers`.

    Args:
        args, options: the method's, with tensors and torch's dtypes.
        others: the other tensors among the arguments, by name.
    """
    options, described, plan = _find_plan(x, method, args, options)
    if plan is not None:
        return plan.run(described)
    if method in _FLOAT64 and _in_float64(x, *others.values()):
        return _FLOAT64[method](*args, **options)
    engine = _engine(x)
    for name, tensor in others.items():
        _require_plain(tensor, name)
    if "out_dtype" in options:
        options = {**options, "out_dtype": engine.dtype(options["out_dtype"])}
    given = [engine.array(one) if isinstance(one, torch.Tensor) else one for one in args]
    return engine.result(engine.call(method, given, options, described))


# --- activations ----------------------------------------------------------------------------------


@_dispatched
def activation(name, x, *, out_dtype=None, **params):
    """Apply an activation: float32 arithmetic, one rounding to `out_dtype`, by default the dtype of `x`.

    Args:
        name: a key of `refops.ACTIVATIONS`; gated ones read rows [act | gate].
        x: (..., K), or (..., 2H) for gated activations.
        **params: limit, alpha, glu_linear_offset, beta1, beta2.

    Returns:
        (..., K) or (..., H).
    """
    return _run("activation", x, (name, x), {"out_dtype": out_dtype, **params})


@_dispatched
def activation_grad(name, dy, x, *, out_dtype=None, dbias=False, **params):
    """Return the gradient of `activation` like `x`, with `dbias` also its column sums (K,), of the values as stored."""
    return _run("activation_grad", x, (name, dy, x), {"out_dtype": out_dtype, "dbias": dbias, **params}, dy=dy)


@_dispatched
def scaled_activation(name, x, scales, *, glu_interleave_size=0, out_dtype=None, **params):
    """Apply an activation and multiply each row by its scale (M entries in any shape), one rounding at the end."""
    options = {"glu_interleave_size": glu_interleave_size, "out_dtype": out_dtype, **params}
    return _run("scaled_activation", x, (name, x, scales), options, scales=scales)


@_dispatched
def scaled_activation_grad(name, dy, x, scales, *, glu_interleave_size=0, out_dtype=None, **params):
    """Return (dx like `x`, dscales like `scales`), the gradients of `scaled_activation`."""
    options = {"glu_interleave_size": glu_interleave_size, "out_dtype": out_dtype, **params}
    return _run("scaled_activation_grad", x, (name, dy, x, scales), options, dy=dy, scales=scales)


def deinterleave(tensor: torch.Tensor, size: int, dim: int = -1) -> torch.Tensor:
    """Along `dim`, [a 0:size | b 0:size | a size:2*size | ...] as [a | b]: a copy, of the same shape.

    Raises:
        ValueError: `size` is not positive, or twice it does not divide the dimension.
    """
    return _blocks_exchanged(tensor, size, dim, (-1, 2, size))


def interleave(tensor: torch.Tensor, size: int, dim: int = -1) -> torch.Tensor:
    """The inverse of `deinterleave`."""
    return _blocks_exchanged(tensor, size, dim, (2, -1, size))


def _blocks_exchanged(x, size, dim, blocks):
    require_torch_tensor(x, "tensor")
    if x.dim() == 0:
        raise ValueError("tensor must have at least one dimension; got a scalar")
    dim = require_integer(dim, "dim", low=-x.dim(), high=x.dim()) % x.dim()
    if not isinstance(size, int) or size <= 0 or x.shape[dim] % (2 * size):
        raise ValueError(
            f"glu_interleave_size must be positive and twice it must divide dimension {dim}; "
            f"got {shown(size)} and an input of shape {tuple(x.shape)}"
        )
    return x.unflatten(dim, blocks).transpose(dim, dim + 1).reshape(x.shape)


def _in_halves(x, size):
    """Rows as [act | gate]; for size 0 they are."""
    return deinterleave(x, size) if size else x


# --- activations in float64 -----------------------------------------------------------------------


def _float64_halves(bound, x):
    array = as_numpy(x.double().cpu())
    return np.split(array, 2, axis=-1) if bound.gated else (array, None)


def _float64_forward(bound, x):
    with np.errstate(all="ignore"):
        return as_torch(np.ascontiguousarray(bound.truth(*_float64_halves(bound, x)))).to(x.device)


def _float64_backward(bound, dy, x):
    with np.errstate(all="ignore"):
        gradient = bound.truth_grad(as_numpy(dy.double().cpu()), *_float64_halves(bound, x))
    if bound.gated:
        gradient = np.concatenate(gradient, axis=-1)
    return as_torch(np.ascontiguousarray(gradient)).to(x.device)


def _float64_activation(name, x, *, out_dtype, **params):
    return _float64_forward(bind_activation(name, params), x)


def _float64_activation_grad(name, dy, x, *, out_dtype, dbias, **params):
    dx = _float64_backward(bind_activation(name, params), dy, x)
    return (dx, dx.reshape(dx.shape[:-1].numel(), dx.shape[-1]).sum(0)) if dbias else dx


def _float64_scaled(name, x, scales, *, glu_interleave_size, out_dtype, **params):
    y = _float64_activation(name, _in_halves(x, glu_interleave_size), out_dtype=out_dtype, **params)
    return y * scales.reshape(*x.shape[:-1], 1)


def _float64_scaled_grad(name, dy, x, scales, *, glu_interleave_size, out_dtype, **params):
    bound, halves = bind_activation(name, params), _in_halves(x, glu_interleave_size)
    dx = _float64_backward(bound, dy * scales.reshape(*x.shape[:-1], 1), halves)
    dscales = (dy * _float64_forward(bound, halves)).sum(-1).reshape(scales.shape)
    return interleave(dx, glu_interleave_size) if glu_interleave_size else dx, dscales


#: Method -> the function of the same arguments for `backend("float64")` on float64 tensors.
_FLOAT64 = {
    "activation": _float64_activation,
    "activation_grad": _float64_activation_grad,
    "scaled_activation": _float64_scaled,
    "scaled_activation_grad": _float64_scaled_grad,
}


#: Methods with an activation in them.
_ACTIVATIONS = {*_FLOAT64, "activation_quantize", "activation_grad_quantize"}


# --- quantization ---------------------------------------------------------------------------------


@_dispatched
def quantize(x, scaling, *, rowwise=True, columnwise=False, dbias=False):
    """Quantize a tensor: `Buffers`, with `dbias` also the float32 column sums of `x` rounded to its dtype, (K,)."""
    if not dbias and _is_scalar(x):
        return quantize(x.reshape(1), scaling, rowwise=rowwise, columnwise=columnwise).viewed(())
    return _run("quantize", x, (x, scaling), {"rowwise": rowwise, "columnwise": columnwise, "dbias": dbias})


@_dispatched
def activation_quantize(name, x, scaling, *, rowwise=True, columnwise=False, **params):
    """Apply an activation and quantize the result along TE's path for it (`refops.scalings.Path`): `Buffers`."""
    options = {"rowwise": rowwise, "columnwise": columnwise, **params}
    return _run("activation_quantize", x, (name, x, scaling), options)


@_dispatched
def activation_grad_quantize(name, dy, x, scaling, *, rowwise=True, columnwise=False, dbias=False, **params):
    """Quantize the gradient of an activation along TE's path: `Buffers`, with `dbias` also the bias gradient (K,)."""
    options = {"rowwise": rowwise, "columnwise": columnwise, "dbias": dbias, **params}
    return _run("activation_grad_quantize", x, (name, dy, x, scaling), options, dy=dy)


@_dispatched
def dequantize(buffers, *, dtype=torch.float32, columnwise=False):
    """Return the tensor that `Buffers` stand for, in its own shape: float32 arithmetic, one rounding to `dtype`.

    Args:
        buffers: `Buffers` with at least one copy.
        dtype: float32, float16 or bfloat16.
        columnwise: read the columnwise copy; otherwise the rowwise one, or the columnwise where there is no other.
            NVFP4's Hadamard transform of columnwise copies is undone.

    Raises:
        TypeError: no `Buffers`, or another dtype. ValueError: the copy is not there.
    """
    if not isinstance(buffers, Buffers):
        raise TypeError(f"buffers must be Buffers; got {type(buffers).__name__}")
    direction = "columnwise" if columnwise or buffers.rowwise_data is None else "rowwise"
    names = (f"{direction}_data", f"{direction}_scale_inv", f"amax_{direction}")
    tensors = {name: getattr(buffers, name) for name in names if getattr(buffers, name) is not None}
    copy = _Copy(tensors, tuple(buffers.shape), buffers.dtype, buffers.with_gemm_swizzled_scales, buffers.scaling)
    _, described, plan = _find_plan(tensors.get(names[0]), "dequantize", (copy,), {"dtype": dtype})
    if plan is not None:
        return plan.run(described)
    if dtype not in HIGH_PRECISION:
        raise TypeError(f"dtype must be torch.float32, torch.float16 or torch.bfloat16; got {shown(dtype)}")
    if columnwise and buffers.columnwise_data is None:
        raise ValueError("columnwise needs columnwise_data; got buffers without it")
    if buffers.device is None:
        raise ValueError("buffers must hold rowwise_data or columnwise_data; got neither")
    if not buffers.shape:
        return dequantize(buffers.viewed((1,)), dtype=dtype, columnwise=columnwise).reshape(())
    engine = _engine_on(buffers.device)
    q, options = engine.quantized(buffers, tensors), {"dtype": engine.dtype(dtype)}
    arrays = [getattr(q, name) for name in tensors]
    return engine.result(engine.call("dequantize", (q,), options, described, arrays))


@_dispatched
def swizzled(buffers):
    """Return `Buffers` with scales in the order that GEMMs read, if they have one; see `refops.Quantized.swizzled`."""
    return _reordered(buffers, "swizzled")


@_dispatched
def unswizzled(buffers):
    """Undo `swizzled`."""
    return _reordered(buffers, "unswizzled")


def _reordered(buffers, method):
    if not buffers.shape:
        return _reordered(buffers.viewed((1,)), method).viewed(())
    engine = _engine_on(buffers.device)
    return engine.result(getattr(engine.quantized(buffers), method)())


@_dispatched
def gemm(a, b, card, *, out_dtype=torch.float32, bias=None, **options):
    """Return alpha op(b) op(a) + bias as a card computes it; see `refops.products.gemm`. CPUs do the work.

    Args:
        a, b: `Buffers`; or plain tensors, both float16 or both bfloat16.
        out_dtype, bias: torch's.
        options: layout, alpha, use_split_accumulator, split_interval.
    """
    engine, matmul = Reference(a.device), refops.products.matmul
    if current_backend() != "reference":
        from cuda_kernels.host.products import matmul
    operands = [engine.quantized(one) if isinstance(one, Buffers) else engine.array(one) for one in (a, b)]
    options |= {"out_dtype": engine.dtype(out_dtype), "bias": None if bias is None else engine.array(bias)}
    return engine.tensor(refops.products.gemm(*operands, card, matmul=matmul, **options))


@_dispatched
def amax(x):
    """Return the largest magnitude of `x`, float32 (1,) on its device; NaN is ignored, an empty tensor gives 0."""
    if _is_scalar(x):
        x = x.reshape(1)
    return _run("amax", x, (x,), {})


@_dispatched
def update_delayed_scale(history, scale, fmt, *, margin=0, algorithm="max", keep_unused=True):
    """Roll an amax history and compute the next delayed scale; see `refops.update_delayed_scale`.

    Args:
        history: float32 (L,) or (L, n); row 0 holds the newest amax.
        scale: float32, one entry a column.
        fmt: a `refops` format.
        algorithm: "max", "most_recent", or a callable from the history (a tensor) to the amaxes, one per column.

    Returns:
        (new history, new scale), new tensors of the same shapes.
    """
    engine = _engine(history, "history")
    _require_plain(scale, "scale")
    if callable(algorithm):
        function = algorithm
        algorithm = lambda array: engine.array(function(engine.tensor(array)))  # noqa: E731
    new_history, new_scale = engine.library.update_delayed_scale(
        engine.array(history), engine.array(scale), fmt, margin=margin, algorithm=algorithm, keep_unused=keep_unused
    )
    if not isinstance(new_scale, torch.Tensor):
        new_scale = engine.tensor(np.asarray(new_scale))
    return engine.tensor(new_history), new_scale.reshape(scale.shape)
