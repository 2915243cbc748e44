"""Quantization without an activation, by TE's functions. TE's `jax/cpp_extensions/quantization.py`."""

from typing import Any

import jax
import jax.numpy as jnp

from fuser.xla.quantizers import GroupedQuantizer, require_quantizer
from fuser.xla.settings import AmaxScope, normalized_axis, require_local
from fuser.xla.tensors import GroupedNoScaleTensor, NoScaleTensor


def quantize(
    x: Any,
    quantizer: Any,
    flatten_axis: int = -1,
    amax_scope: Any = AmaxScope.LOCAL,
    transpose_batch_sequence: bool = False,
) -> Any:
    """Quantize a tensor.

    It has no derivative in JAX ("The FFI call to ... cannot be differentiated"): `activation` takes a quantizer and has
    one. A function of your own needs `jax.custom_vjp` around the call.

    Args:
        x: float32, float16 or bfloat16; or a `NoScaleTensor`, whose amax current scaling takes for the tensor's.
        quantizer: a `Quantizer`, or None.
        flatten_axis: the axes before it make the rows of the matrix that is scaled, the others its columns.
        amax_scope, transpose_batch_sequence: as for `act_lu`.

    Returns:
        `ScaledTensor1x` or `ScaledTensor2x`; without a quantizer a `NoScaleTensor`.

    Raises:
        TypeError: kind of quantizer. ValueError: a shape that blocks do not divide, an amax for NVFP4.
    """
    return quantize_dbias(x, quantizer, False, flatten_axis, amax_scope, transpose_batch_sequence)[0]


def quantize_dbias(
    dz: Any,
    quantizer: Any,
    is_dbias: bool = True,
    flatten_axis: int = -1,
    amax_scope: Any = AmaxScope.LOCAL,
    transpose_batch_sequence: bool = False,
) -> Any:
    """Quantize a gradient, and sum it over its rows.

    Args:
        dz: as x of `quantize`, as the others are.
        is_dbias: whether to sum.

    Returns:
        (as `quantize`, float32 sums over the axes before `flatten_axis` in the dtype of dz, or None).
    """
    require_quantizer(quantizer)
    require_local(amax_scope)
    if quantizer is not None:
        return quantizer.quantize_dbias(dz, is_dbias, flatten_axis=flatten_axis)
    tensor = dz if isinstance(dz, NoScaleTensor) else NoScaleTensor(dz)
    if not is_dbias:
        return tensor, None
    axis = normalized_axis(flatten_axis, tensor.shape)
    return tensor, tensor.data.astype(jnp.float32).sum(range(axis)).astype(tensor.dtype)


def grouped_quantize(x: Any, quantizer: Any, group_sizes: Any = None, flatten_axis: int = -1) -> Any:
    """Quantize tensors that lie one after the other, each by itself.

    Args:
        x: (sum of group_sizes, ...), or (groups, ...): float32, float16 or bfloat16.
        quantizer: a `GroupedQuantizer`, or None.
        group_sizes: integers (groups,), known when the call is computed; None where the first axis counts groups.
        flatten_axis: as for `quantize`.

    Returns:
        `GroupedScaledTensor1x`, or a `ScaledTensor2x` of two; without a quantizer a `GroupedNoScaleTensor`. Scales of
        blocks are in the order that GEMMs read, as TE's. (TE puts the scales of groups after an empty one in the places
        before their own; here each has its own.)

    Raises:
        TypeError: kind of quantizer. ValueError: as `GroupedQuantizer.quantize`.
    """
    if quantizer is None:
        whole = isinstance(x, GroupedNoScaleTensor)
        return x if whole else GroupedNoScaleTensor(x, None, group_sizes, None, x.shape)
    if not isinstance(quantizer, GroupedQuantizer):
        raise TypeError(f"quantizer must be a GroupedQuantizer or None; got {type(quantizer).__name__}")
    return quantizer.quantize(x, flatten_axis=flatten_axis, group_sizes=group_sizes)


def grouped_dbias(grad: Any, group_sizes: Any) -> Any:
    """Return the float32 sums (groups, N) of the rows of each group of a gradient (M, N), in its dtype."""
    if grad.ndim != 2 or group_sizes.ndim != 1:
        raise ValueError(f"grad must be (M, N) and group_sizes (groups,); got {grad.shape} and {group_sizes.shape}")
    groups = group_sizes.size
    rows = jnp.repeat(jnp.arange(groups), group_sizes, total_repeat_length=grad.shape[0])
    return jax.ops.segment_sum(grad.astype(jnp.float32), rows, groups).astype(grad.dtype)
