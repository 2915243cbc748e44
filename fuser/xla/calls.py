"""One custom call in JAX, by either of two routes.

| route      | how                                          | where           | a call costs                        |
|------------|----------------------------------------------|-----------------|-------------------------------------|
| "ffi"      | XLA's typed FFI, `fuser.xla.ffi`; no copies  | CPU, CUDA       | some 30 microseconds                |
| "callback" | `jax.pure_callback`, through host memory     | every platform  | some 200 microseconds, and copies   |

The route is that of the innermost `with route(name)` around the trace, else of the environment variable
FUSER_XLA_ROUTE, else "ffi" on CPUs and NVIDIA GPUs and "callback" elsewhere. `fuser.backend("reference")`, or
FUSER_BACKEND=reference, computes with `refops`, by the callback; "exact" has the bits of `refops` by any route. All are
read when a function is traced: what jit has compiled stays as it is.
"""

import functools
import math
import os
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import asdict

import jax
import jax.numpy as jnp
import numpy as np

from fuser.scopes import scope
from fuser.xla import ffi
from fuser.xla.compute import ACTIVATION, FLAGS, GRADIENT, GROUPED, Buffer, HostPlace, plan_of, run
from fuser.xla.settings import ScalingMode, scaling_of
from refops.arguments import require_choice
from refops.quantization.result import stored_layout

ROUTES = ("ffi", "callback")
VARIABLE = "FUSER_XLA_ROUTE"
FP4 = "float4_e2m1fn"
#: Kind of call -> flags that are sent where they are False, too, as TE sends them. Others are sent where they are True.
SENT_AS_FALSE = {kind: ("output_amax_when_no_scaling",) for kind in (ACTIVATION, GRADIENT)}
_selected = ContextVar("fuser_xla_route", default=None)


@scope
def route(name: str) -> Iterator[str]:
    """Trace the functions of the block for a route, "ffi" or "callback"; ValueError for other names."""
    token = _selected.set(require_choice(name, "name", ROUTES))
    try:
        yield name
    finally:
        _selected.reset(token)


def current_route() -> str:
    """Return the route of a call that is traced now."""
    selected = _selected.get()
    if selected is not None:
        return selected
    named = os.environ.get(VARIABLE)
    if named:
        return require_choice(named, VARIABLE, ROUTES)
    return "ffi" if jax.default_backend() in ("cpu", "gpu", "cuda") else "callback"


def _backend():
    """The backend of `fuser.backend` or its environment variable; None without one.

    `fuser.dispatch` loads torch, which JAX programs need not have: nobody has selected a backend before it was loaded.
    """
    dispatch = sys.modules.get("fuser.dispatch")
    return os.environ.get("FUSER_BACKEND") if dispatch is None else dispatch.current_backend()


# --- results ------------------------------------------------------------------------------------------


def _result_shapes(call, operands, dtype):
    """(shape, dtype) of every result, for operands as they are, batch axes included."""
    x, scale = operands[-3], operands[-2]
    plan = plan_of(call)
    out = (*x.shape[:-2], x.shape[-1]) if call.kind == ACTIVATION else x.shape
    unused, f32 = (*scale.shape[:-1], 1), jnp.float32
    results = [(out, dtype), (unused, dtype), (unused, f32), (unused, f32)]
    if plan.mode is not ScalingMode.NO_SCALING:
        results = _scaled_shapes(call, plan, operands, out, dtype)
    results.append((operands[-1].shape, f32))
    if call.is_dbias:
        results.append((x.shape[-2:] if call.kind == GRADIENT else x.shape[-1:], x.dtype))
    elif call.kind == GRADIENT:
        results.append((unused, x.dtype))
    return [(tuple(shape), np.dtype(dtype)) for shape, dtype in results]


def _scaled_shapes(call, plan, operands, out, dtype):
    columns = out[-2] * out[-1] if call.kind == GRADIENT else out[-1]
    matrix = (math.prod(out) // columns if columns else 0, columns)
    layout = stored_layout(scaling_of(plan.mode), matrix)  # the same for every format and scale
    data, scales = [], []
    for copy, wanted in (("rowwise", plan.rowwise), ("columnwise", plan.columnwise)):
        *leading, last = layout[f"{copy}_data"][0]
        data_shape, scale_shape = (*leading, last * plan.mode.layout.packed), layout[f"{copy}_scale_inv"][0]
        if call.kind == GROUPED:
            data_shape = (math.prod(data_shape),)
            scale_shape = plan.mode.get_grouped_scale_shape(matrix, operands[0].size, copy == "columnwise")
        data.append((data_shape if wanted else (1,), dtype))
        scales.append((scale_shape if wanted else (1,), plan.mode.get_scale_dtype()))
    return data + scales


# --- routes -------------------------------------------------------------------------------------------


def execute(call, dtype, *operands):
    """Run a `Call`.

    Args:
        call: a `Call`.
        dtype: dtype of the output.
        *operands: as the table of `fuser.xla.compute` lists them.

    Returns:
        The results of that table; data and scales of quantized tensors as padded matrices.
    """
    selected = _backend()
    reference = selected == "reference"
    if selected == "exact" and call.kind in (ACTIVATION, GRADIENT):
        call = call._replace(exact=True)
    return _execute(call, np.dtype(dtype).name, "callback" if reference else current_route(), reference, *operands)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _execute(call, dtype, name, reference, *operands):
    shapes = _result_shapes(call, operands, dtype)
    structs = [jax.ShapeDtypeStruct(*one) for one in shapes]
    elementwise = call.scaling_mode == 0 and not call.output_amax_when_no_scaling and not call.is_dbias
    vmap_method = "broadcast_all" if elementwise else "sequential"
    if name == "callback":
        results = jax.pure_callback(_callback(call, dtype, reference), structs, *operands, vmap_method=vmap_method)
        return _varying_with(operands[-3], results)
    ffi.register()
    attributes = {"scaling_mode": np.int64(call.scaling_mode), "quantize_layout": np.int64(call.quantize_layout)}
    if call.kind in (ACTIVATION, GRADIENT):
        attributes["act_enum"] = np.int64(call.act_enum)
        if plan_of(call).bound.parameters:  # each attribute costs a microsecond a call
            attributes["act_params"] = {name: np.float32(value) for name, value in asdict(call.parameters).items()}
    always = SENT_AS_FALSE.get(call.kind, ())
    attributes |= {name: np.bool_(getattr(call, name)) for name in FLAGS if getattr(call, name) or name in always}
    function = jax.ffi.ffi_call(
        ffi.TARGET_OF[call.kind], structs, vmap_method=vmap_method, input_output_aliases={len(operands) - 1: 4}
    )
    return _varying_with(operands[-3], function(*operands, **attributes))


def _varying_with(x, results):
    """Tell shard_map that results vary over the same axes of its mesh as x; else gradients would be summed over them.

    JAX says where a value varies by its type, since 0.10 as `manual_axis_type`, before as `vma`.
    """

    def axes_of(value):
        kind = jax.typeof(value)
        return kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma

    def cast(result):
        axes = tuple(axes_of(x) - axes_of(result))
        if not axes:
            return result
        return jax.lax.pcast(result, axes, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(result, axes)

    return [cast(result) for result in results]


@functools.lru_cache(maxsize=1024)
def _callback(call, dtype, reference):
    """The host function of a call: arrays to a list of new NumPy arrays."""

    def compute(*operands):
        operands = [np.asarray(o) for o in operands]
        buffers = [Buffer(np.ascontiguousarray(o).reshape(-1).view(np.uint8), o.shape, o.dtype.name) for o in operands]
        results = []
        for shape, result_dtype in _result_shapes(call, operands, dtype):
            size = math.prod(shape) * result_dtype.itemsize
            size = (size + 1) // 2 if result_dtype.name == FP4 else size
            results.append(Buffer(np.zeros(size, np.uint8), shape, result_dtype.name))
        results[4].memory[:] = buffers[-1].memory
        run(call, HostPlace(), buffers, results, reference)
        return [_as_array(*result) for result in results]

    return compute


def _as_array(memory, shape, dtype):
    """A buffer as an array; FP4 with one element per byte, as in NumPy."""
    if dtype == FP4:
        memory = np.stack([memory & 15, memory >> 4], axis=-1).reshape(-1)[: math.prod(shape)]
    return memory.view(dtype).reshape(shape)
