"""Activations in JAX with TE's names: forward, gradient, fused with a quantizer, and differentiable.

Inputs have the shape (..., 1, n), or (..., 2, n) for gated activations, whose first half is activated and whose second
is the gate: byte for byte the rows [act | gate] of the other front ends. float32, float16 or bfloat16; float32
arithmetic, one rounding. Values are those of `cuda_kernels.host`, or of `cuda_kernels` on a GPU.

All functions work under jit, vmap, scan, checkpoint and shard_map, `activation` under grad too. Under vmap each example
is quantized for itself. Errors in arguments are raised when a function is traced; what only the computation finds, such
as a scale that is not positive, is an XLA error with the same message.

Differences from TE: gated gradients may be quantized together with bias sums, which follow the rule of unary ones; the
second axis from the end is checked instead of the last one; with NVFP4's Hadamard transform the rowwise amax is that of
rounded values too, as in TE's other front end.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from fuser.xla.calls import execute
from fuser.xla.compute import ACTIVATION, GRADIENT, Call
from fuser.xla.quantizers import Quantizer, require_high_precision, require_quantizer
from fuser.xla.settings import ActivationParams, AmaxScope, activation_enum, activation_key, require_local
from fuser.xla.tensors import NoScaleTensor


def act_lu(
    x: Any,
    activation_type: Any,
    quantizer: Any = None,
    act_params: Any = None,
    amax_scope: Any = AmaxScope.LOCAL,
    transpose_batch_sequence: bool = False,
    output_amax_when_no_scaling: bool = False,
) -> Any:
    """Apply an activation, and quantize the result if asked.

    It has no derivative in JAX ("The FFI call to ... cannot be differentiated"): `activation` has.

    Args:
        x: (..., 1 or 2, n).
        activation_type: a key of `ActivationEnum`, ("gelu",) or ("silu", "linear").
        quantizer: a `Quantizer`, or None.
        act_params: `ActivationParams` for ("clamped_silu", "clamped_linear").
        amax_scope: LOCAL: the amax is that of this device.
        transpose_batch_sequence: which axis is which, for TE's reductions of the amax among devices; no effect.
        output_amax_when_no_scaling: without a quantizer also the amax of the unrounded result.

    Returns:
        `NoScaleTensor`, or `ScaledTensor1x` or `ScaledTensor2x`, of shape (..., n).

    Raises:
        KeyError: activation_type. TypeError: dtype of x, kind of quantizer. ValueError: shape of x.
    """
    enum = _check(x, activation_type, quantizer, amax_scope)
    call = Call(ACTIVATION, enum, parameters=_parameters(act_params))
    return _run(call, (x,), (*x.shape[:-2], x.shape[-1]), quantizer, output_amax_when_no_scaling)[0]


def quantize_dact_dbias(
    dz: Any,
    x: Any,
    activation_type: Any = ("gelu",),
    is_dbias: bool = True,
    quantizer: Any = None,
    act_params: Any = None,
    amax_scope: Any = AmaxScope.LOCAL,
    transpose_batch_sequence: bool = False,
    output_amax_when_no_scaling: bool = False,
) -> Any:
    """Return the gradient of an activation, quantized if asked, and the gradient of a bias added before it.

    Args:
        dz: gradient of the output, (..., n), in the dtype of x.
        is_dbias: whether to sum the gradient over the leading axes. The sums add unrounded float32 values with delayed
            scaling and MXFP8, and values as stored elsewhere.
        x, activation_type, quantizer and the others: as for `act_lu`.

    Returns:
        (`NoScaleTensor` or scaled tensor of the shape of x, sums (1 or 2, n) in the dtype of dz or None).
    """
    enum = _check(x, activation_type, quantizer, amax_scope)
    shape = (*x.shape[:-2], x.shape[-1])
    if dz.shape != shape or dz.dtype != x.dtype:
        raise ValueError(
            f"dz must be {x.dtype} of shape {shape} for x of shape {x.shape}; got {dz.dtype} of shape {dz.shape}"
        )
    call = Call(GRADIENT, enum, is_dbias=bool(is_dbias), parameters=_parameters(act_params))
    return _run(call, (dz, x), x.shape, quantizer, output_amax_when_no_scaling)


def dact_lu(
    dz: Any,
    x: Any,
    activation_type: Any,
    quantizer: Any = None,
    act_params: Any = None,
    amax_scope: Any = AmaxScope.LOCAL,
    transpose_batch_sequence: bool = False,
    output_amax_when_no_scaling: bool = False,
) -> Any:
    """Return the gradient of an activation, quantized if asked: `quantize_dact_dbias` without sums."""
    options = quantizer, act_params, amax_scope, transpose_batch_sequence, output_amax_when_no_scaling
    return quantize_dact_dbias(dz, x, activation_type, False, *options)[0]


def activation(x: Any, activation_type: Any, quantizer: Any = None, act_params: Any = None) -> Any:
    """Apply an activation, differentiable.

    Args:
        x: (..., 1 or 2, n).
        activation_type: a key of `ActivationEnum`.
        quantizer: the result goes through it and back, so that it has its noise; the gradient doesn't. Delayed scaling
            takes no note of the amax, as in TE.
        act_params: `ActivationParams`.

    Returns:
        (..., n) in the dtype of x.
    """
    if isinstance(quantizer, Quantizer):
        quantizer.check_scale()
    return _activation(x, activation_key(activation_type), quantizer, act_params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 3))
def _activation(x, activation_type, quantizer, act_params):
    return _activation_forward(x, activation_type, quantizer, act_params)[0]


def _activation_forward(x, activation_type, quantizer, act_params):
    return _values(act_lu(x, activation_type, quantizer, act_params)), x


def _values(tensor):
    """The values of a result, laid out as the unquantized one: a columnwise copy may be transposed."""
    values = tensor.dequantize()
    if getattr(tensor, "data_layout", "N") == "N":
        return values
    axis = tensor.flatten_axis
    return values.transpose(*range(axis, values.ndim), *range(axis))


def _activation_backward(activation_type, act_params, x, g):
    return dact_lu(g, x, activation_type, act_params=act_params).dequantize(), None


_activation.defvjp(_activation_forward, _activation_backward)


# --- calls ----------------------------------------------------------------------------------------------


def _check(x, activation_type, quantizer, amax_scope):
    """Return the activation's number."""
    enum = activation_enum(activation_type)
    halves = len(activation_key(activation_type))
    require_high_precision(x)
    if x.ndim < 2 or x.shape[-2] != halves:
        raise ValueError(f"x must have the shape (..., {halves}, n) for {activation_type}; got {x.shape}")
    require_quantizer(quantizer)
    require_local(amax_scope)
    return enum


def _parameters(act_params):
    return (ActivationParams() if act_params is None else act_params).clamped_swiglu


def _run(call, tensors, shape, quantizer, output_amax):
    """Run a call; return (tensor of `shape`, sums or None)."""
    x = tensors[-1]
    if quantizer is not None:
        return quantizer.run_call(call, tensors, shape, x.ndim - 2, x.dtype, quantizer.q_layout)
    zero = jnp.zeros((1,), jnp.float32)
    results = execute(call._replace(output_amax_when_no_scaling=bool(output_amax)), x.dtype, *tensors, zero, zero)
    return NoScaleTensor(results[0], results[4] if output_amax else None), results[5] if call.is_dbias else None
