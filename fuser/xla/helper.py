"""Padding of scales. TE's `jax/quantize/helper.py`."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from fuser.xla.settings import normalized_axis


def remove_padding_from_scale_inv(
    scale_inv: Any, scaling_mode: Any, data_shape: Any, is_colwise: bool = False, flatten_axis: int = -1
) -> Any:
    """Return padded scales without padding.

    Args:
        scale_inv: as many scales as `ScalingMode.get_scale_shape` counts with padding, in any shape.
        data_shape: shape of the data in layout "N".
        is_colwise, flatten_axis: as for `get_scale_shape`.
    """
    matrix, padded, shape = _scale_shapes(scaling_mode, data_shape, is_colwise, flatten_axis)
    if matrix is None:
        return scale_inv[: shape[0]]
    return scale_inv.reshape(padded)[: matrix[0], : matrix[1]].reshape(shape)


def apply_padding_to_scale_inv(
    scale_inv: Any, scaling_mode: Any, data_shape: Any, is_colwise: bool = False, flatten_axis: int = -1
) -> Any:
    """Return scales without padding with zeros around them, in the shape that `get_scale_shape` has for padded ones."""
    matrix, padded, _ = _scale_shapes(scaling_mode, data_shape, is_colwise, flatten_axis)
    if matrix is None:
        return scale_inv
    wanted = scaling_mode.get_scale_shape(
        data_shape, is_colwise=is_colwise, flatten_axis=flatten_axis, broadcast_2d_scale_shape_to_1d=True
    )
    more = [(0, large - small) for small, large in zip(matrix, padded, strict=True)]
    return jnp.pad(scale_inv.reshape(matrix), more).reshape(wanted)


def _scale_shapes(mode, data_shape, is_colwise, flatten_axis):
    """Shapes of scales: (as a matrix, as a padded one, with the axes of the data); no matrices without blocks."""

    def shape(data_shape, is_padded, axis):
        return mode.get_scale_shape(data_shape, "N", is_colwise, is_padded, axis, broadcast_2d_scale_shape_to_1d=True)

    data_shape = tuple(data_shape)
    if not mode.is_block_scaling:
        return None, None, shape(data_shape, False, flatten_axis)
    axis = normalized_axis(flatten_axis, data_shape)
    matrix = tuple(int(np.prod(part, dtype=np.int64)) for part in (data_shape[:axis], data_shape[axis:]))
    return shape(matrix, False, 1), shape(matrix, True, 1), shape(data_shape, False, axis)
