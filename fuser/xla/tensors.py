"""Results: tensors with or without scales, as pytrees. TE's `jax/quantize/tensor.py`."""

import dataclasses
import functools
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from fuser.xla.settings import QuantizeLayout, ScalingMode, matrix_shape, normalized_axis, scaling_of
from refops.quantization.hadamard import GROUP, transform_exactly
from refops.quantization.result import reorder_scales
from refops.scalings import TE_SIGN_MASK


class _Words:
    """The words of `refops.scalings.arithmetic` that decoding needs, for JAX arrays."""

    @staticmethod
    def function(f):
        return f

    @staticmethod
    def decode(fmt):
        return lambda code: code.astype(jnp.float32)


@functools.cache
def _static_fields(cls):
    """The names of a dataclass's fields that JAX does not take for arrays."""
    return tuple(f.name for f in dataclasses.fields(cls) if f.name not in cls.children)


class Pytree:
    """Base of dataclasses that JAX takes apart: `children` are the fields with arrays, the others are static.

    What JAX puts together is not checked: in place of arrays there may be anything.
    """

    children: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls):
        jax.tree_util.register_pytree_node(cls, lambda node: node._flatten(), cls._unflatten)

    def _flatten(self):
        return [getattr(self, c) for c in self.children], tuple(
            (s, getattr(self, s)) for s in _static_fields(type(self))
        )

    @classmethod
    def _unflatten(cls, static, arrays):
        node = object.__new__(cls)
        node.__setstate__(dict((*static, *zip(cls.children, arrays, strict=True))))
        return node

    def __setstate__(self, state):
        vars(self).update(state)


class AbstractBaseTensor(Pytree):
    """What all results have: `ndim`, `dequantize()`, and `get_tensor(usage)`, itself where there are no copies."""

    data: Any

    @property
    def shape(self) -> Any:
        """Shape of the data, as they lie."""
        return self.data.shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.data.ndim

    def get_tensor(self, usage: Any) -> Any:
        """Return the copy that a matrix product takes for a `TensorUsage`."""
        return self

    def checkpoint(self, quantizer: Any) -> Any:
        """Return the tensor under the quantizer's `checkpoint_name`, for policies of `jax.checkpoint`."""
        name = getattr(quantizer, "checkpoint_name", None)
        return self if name is None else checkpoint_name(self, name)

    def apply_sharding_constraint_by_logical_axes(self, logical_axis_names: Any) -> Any:
        """Return the tensor itself for no names; NotImplementedError for any: here are no rules from names to axes."""
        if logical_axis_names:
            raise NotImplementedError(
                "fuser.xla has no rules from logical axis names to a mesh: constrain the arrays by "
                f"jax.lax.with_sharding_constraint; got logical_axis_names={logical_axis_names!r}"
            )
        return self


@dataclass(frozen=True, eq=False)
class NoScaleTensor(AbstractBaseTensor):
    """A tensor in high precision, and its amax, float32 (1,), if that was asked for."""

    data: Any
    amax: Any = None

    children = ("data", "amax")

    @property
    def dtype(self) -> Any:
        """dtype of the data."""
        return self.data.dtype

    def dequantize(self) -> Any:
        """Return the data."""
        return self.data


class ScaledTensor(AbstractBaseTensor):
    """A quantized tensor."""


@dataclass(frozen=True, eq=False)
class ScaledTensor1x(ScaledTensor):
    """One copy of a quantized tensor.

    Attributes:
        data: codes, of a float8 or float4 dtype.
        amax: float32 (1,): the tensor's largest magnitude where the mode knows it, else None.
        scale_inv: what codes are multiplied by, of the shape `ScalingMode.get_scale_shape(..., is_padded=False)`.
        scaling_mode: a `ScalingMode`.
        dq_dtype: dtype of the dequantized tensor.
        is_colwise: whether blocks run along rows.
        data_layout: "N", or "T" where `data` (and scales) are transposed.
        flatten_axis: where the columns of the matrix that was scaled begin, in the axes of `data`.
        has_rht_applied: whether values went through NVFP4's Hadamard transform, which `dequantize` undoes.
    """

    data: Any
    amax: Any
    scale_inv: Any
    scaling_mode: ScalingMode
    dq_dtype: Any
    is_colwise: bool = False
    data_layout: str = "N"
    flatten_axis: int = -1
    has_rht_applied: bool = False

    children: ClassVar[tuple[str, ...]] = ("data", "amax", "scale_inv")

    def __post_init__(self):
        axis = normalized_axis(self.flatten_axis, self.data.shape)
        object.__setattr__(self, "flatten_axis", axis)
        axis = self.data.ndim - axis if self.data_layout == "T" else axis
        object.__setattr__(self, "dq_dtype", np.dtype(self.dq_dtype))
        if self.scaling_mode is ScalingMode.NO_SCALING:
            object.__setattr__(self, "scale_inv", jnp.empty((0,), jnp.float32))
            return
        allowed = {
            self.scaling_mode.get_scale_shape(
                self.data.shape, self.data_layout, self.is_colwise, False, axis, broadcast
            )
            for broadcast in (True, False)
        }
        if self.scale_inv.shape not in allowed:
            raise ValueError(
                f"scale_inv must have shape {' or '.join(map(str, allowed))} for data of shape {self.data.shape} in "
                f"{self.scaling_mode.name}, layout {self.data_layout!r}; got {self.scale_inv.shape}"
            )
        if self.scale_inv.dtype != self.scaling_mode.get_scale_dtype():
            raise TypeError(
                f"scale_inv must be {self.scaling_mode.get_scale_dtype()} in {self.scaling_mode.name}; got "
                f"{self.scale_inv.dtype}"
            )

    def get_tensor(self, usage: Any) -> Any:
        """Return the tensor; ValueError where a matrix product takes the other copy for a `TensorUsage`."""
        if self.scaling_mode.get_quantize_layout(usage).is_colwise_only != self.is_colwise:
            raise ValueError(
                f"usage {usage} needs the {'rowwise' if self.is_colwise else 'columnwise'} copy of a tensor in "
                f"{self.scaling_mode.name}; got is_colwise={self.is_colwise}"
            )
        return self

    def dequantize(self) -> Any:
        """Return the values in `dq_dtype`, in the layout of `data`: float32 arithmetic, one rounding."""
        values = self.data.astype(jnp.float32)
        if self.scaling_mode is not ScalingMode.NO_SCALING and self.data.size:
            values = values * self._factors()
        if self.has_rht_applied:
            groups = values.reshape(*values.shape[:-1], -1, GROUP)
            values = jnp.matmul(groups, _transform(), precision="highest").reshape(values.shape)
        return values.astype(self.dq_dtype)

    def _factors(self):
        """float32 factor of each element, or of all."""
        amax = self.amax[0] if self.scaling_mode.layout.two_level else None
        factors = scaling_of(self.scaling_mode).decode_factor(_Words)(self.scale_inv, amax)
        if self.scaling_mode.is_tensor_scaling():
            return factors[0]
        for axis, (size, blocks) in enumerate(zip(self.data.shape, factors.shape, strict=True)):
            if size != blocks:
                factors = jnp.repeat(factors, size // blocks, axis=axis)
        return factors


def _transform():
    """The 16 x 16 matrix that rows are multiplied by to undo the Hadamard transform: the transform's transpose."""
    return jnp.asarray(transform_exactly(np.eye(GROUP)[None], TE_SIGN_MASK)[0], jnp.float32)


class _Grouped(AbstractBaseTensor):
    """Tensors one after the other, of which the first axis of `original_shape` counts the rows or the groups."""

    original_shape: Any
    first_dims: Any
    last_dims: Any

    @property
    def shape(self) -> Any:
        """Shape of all groups together, of the data as they lie."""
        return self.original_shape

    @property
    def n_groups(self) -> int:
        """Number of groups."""
        sizes = self.last_dims if self.first_dims is None else self.first_dims
        return self.original_shape[0] if sizes is None else sizes.size

    @property
    def group_sizes(self) -> Any:
        """int32: how many of the first axis belong to each group; ones where they are all alike."""
        return jnp.ones((self.original_shape[0],), jnp.int32) if self.first_dims is None else self.first_dims


@dataclass(frozen=True, eq=False)
class GroupedNoScaleTensor(_Grouped):
    """A grouped tensor in high precision: `data` (sum of the groups, ...) or (groups, ...), and `group_sizes`."""

    data: Any
    amax: Any
    first_dims: Any
    last_dims: Any
    original_shape: Any

    children = ("data", "amax", "first_dims", "last_dims")

    def dequantize(self) -> Any:
        """Return the data."""
        return self.data


@dataclass(frozen=True, eq=False)
class GroupedScaledTensor1x(_Grouped, ScaledTensor1x):
    """One copy of a grouped quantized tensor.

    Attributes:
        data: flat codes, one group after the other, each transposed by itself in layout "T".
        scale_inv: flat scales of the shape `ScalingMode.get_grouped_scale_shape(...)`: of blocks each group's own,
            padded, one after the other, and zeros.
        amax: float32, one for each group, or None.
        first_dims: int32: how many rows each group has; None where the first axis counts the groups.
        last_dims: how many columns; None here.
        scaling_mode, dq_dtype, is_colwise, data_layout, has_rht_applied: as those of `ScaledTensor1x`.
        flatten_axis: where the columns begin, in the axes of `original_shape`.
        original_shape: shape of all groups together; in layout "T" transposed as `data` are.
        pre_swizzled: whether the scales of blocks are in the order that GEMMs read.
    """

    first_dims: Any = field(kw_only=True)
    last_dims: Any = field(kw_only=True)
    original_shape: Any = field(kw_only=True)
    pre_swizzled: bool = field(default=False, kw_only=True)

    children = ("data", "scale_inv", "amax", "first_dims", "last_dims")

    def __post_init__(self):
        axis = normalized_axis(self.flatten_axis, self.original_shape)
        object.__setattr__(self, "flatten_axis", axis)
        object.__setattr__(self, "dq_dtype", np.dtype(self.dq_dtype))
        size = math.prod(self.original_shape)
        scales = self.scaling_mode.get_grouped_scale_shape(
            self.original_shape, self.n_groups, self.is_colwise, flatten_axis=axis
        )
        for name, shape in (("data", (size,)), ("scale_inv", scales)):
            if getattr(self, name).shape != shape:
                raise ValueError(
                    f"{name} must have shape {shape} for groups of shape {self.original_shape} in "
                    f"{self.scaling_mode.name}; got {getattr(self, name).shape}"
                )

    def dequantize(self) -> Any:
        """Return a list of the groups' values in `dq_dtype`, each in the layout of `data`.

        Raises:
            jax.errors.ConcretizationTypeError: group sizes that are not known while a function is traced.
        """
        groups, start, scales_start = [], 0, 0
        sizes = [1] * self.n_groups if self.first_dims is None else np.asarray(self.first_dims).tolist()
        for size in sizes:
            shape = (size, *self.original_shape[1:])
            if self.data_layout == "T" and self.first_dims is not None:
                shape = (*self.original_shape[:-1], size)
            rows, columns = matrix_shape(shape, self.flatten_axis)
            data = self.data[start : start + rows * columns].reshape(rows, columns)
            scales, room = self._scales(rows, columns, scales_start)
            kind = self.scaling_mode, self.dq_dtype, self.is_colwise, self.data_layout
            groups.append(ScaledTensor1x(data, None, scales, *kind).dequantize().reshape(shape))
            start += rows * columns
            scales_start += room
        return groups

    def _scales(self, rows, columns, start):
        """(scales of a group, those of blocks a matrix in order without padding; entries that they take)."""
        mode, name = self.scaling_mode, "columnwise" if self.is_colwise else "rowwise"
        if not mode.is_block_scaling:
            return self.scale_inv[start : start + bool(rows * columns)], 1
        padded, wanted = (
            mode.get_scale_shape((rows, columns), self.data_layout, self.is_colwise, is_padded, 1)
            for is_padded in (True, False)
        )
        room = math.prod(padded)
        order = np.arange(room, dtype=np.int64).reshape(padded)
        if self.pre_swizzled:
            order = reorder_scales(mode.layout, name, order, False)
        return self.scale_inv[start : start + room][order[: wanted[0], : wanted[1]]], room


@dataclass(frozen=True, eq=False)
class ScaledTensor2x(ScaledTensor):
    """Both copies of a quantized tensor, each a `ScaledTensor1x`."""

    rowwise_tensor: ScaledTensor1x
    colwise_tensor: ScaledTensor1x

    children = ("rowwise_tensor", "colwise_tensor")

    @property
    def shape(self) -> Any:
        """Shape of the tensor."""
        return self.rowwise_tensor.shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.rowwise_tensor.ndim

    def dequantize(self) -> Any:
        """Return the values of the rowwise copy."""
        return self.rowwise_tensor.dequantize()

    def get_tensor(self, usage: Any) -> Any:
        """Return the rowwise copy for LHS and RHS_TRANS, the columnwise one for RHS and LHS_TRANS."""
        rowwise = self.rowwise_tensor.scaling_mode.get_quantize_layout(usage).is_rowwise_only
        return self.rowwise_tensor if rowwise else self.colwise_tensor


class ScaledTensorFactory:
    """Makes quantized tensors of arrays."""

    @staticmethod
    def create_1x(
        data: Any,
        scale_inv: Any,
        amax: Any = None,
        scaling_mode: Any = ScalingMode.NO_SCALING,
        dq_dtype: Any = jnp.bfloat16,
        is_colwise: bool = False,
        data_layout: str = "N",
        flatten_axis: int = -1,
        first_dims: Any = None,
        last_dims: Any = None,
        original_shape: Any = None,
        has_rht_applied: bool = False,
        pre_swizzled: bool = False,
    ) -> Any:
        """Return a `ScaledTensor1x`, or with `original_shape` a `GroupedScaledTensor1x`.

        `flatten_axis` and `original_shape` are those of the tensor, also where `data` are transposed.
        """
        kind = scaling_mode, dq_dtype, is_colwise, data_layout
        if original_shape is None:
            if first_dims is not None or last_dims is not None:
                raise ValueError("original_shape must be given with first_dims or last_dims; got None")
            axis = normalized_axis(flatten_axis, data.shape)
            axis = data.ndim - axis if data_layout == "T" else axis
            return ScaledTensor1x(data, amax, scale_inv, *kind, axis, has_rht_applied)
        shape, axis = tuple(original_shape), normalized_axis(flatten_axis, original_shape)
        if data_layout == "T":
            each = first_dims is None and last_dims is None  # the first axis counts the groups, and stays the first
            shape = (*shape[:each], *shape[axis:], *shape[each:axis])
            axis = len(shape) - axis + each
        grouped = {"first_dims": first_dims, "last_dims": last_dims, "original_shape": shape}
        return GroupedScaledTensor1x(
            data, amax, scale_inv, *kind, axis, has_rht_applied, **grouped, pre_swizzled=pre_swizzled
        )

    @staticmethod
    def create_2x(
        data: Any,
        scale_inv: Any,
        colwise_data: Any,
        colwise_scale_inv: Any,
        amax: Any = None,
        colwise_amax: Any = None,
        scaling_mode: Any = ScalingMode.NO_SCALING,
        dq_dtype: Any = jnp.bfloat16,
        data_layout: str = "NN",
        flatten_axis: int = -1,
        first_dims: Any = None,
        last_dims: Any = None,
        original_shape: Any = None,
        rowwise_has_rht_applied: bool = False,
        colwise_has_rht_applied: bool = False,
        pre_swizzled: bool = False,
    ) -> Any:
        """Return a `ScaledTensor2x`; `data_layout` has a letter for each copy, the rowwise one first."""
        colwise_amax = amax if colwise_amax is None else colwise_amax
        arrays = (data, scale_inv, amax), (colwise_data, colwise_scale_inv, colwise_amax)
        copies = zip(arrays, data_layout, (rowwise_has_rht_applied, colwise_has_rht_applied), strict=True)
        grouped = flatten_axis, first_dims, last_dims, original_shape
        return ScaledTensor2x(
            *(
                ScaledTensorFactory.create_1x(
                    *one, scaling_mode, dq_dtype, is_colwise, letter, *grouped, transformed, pre_swizzled
                )
                for is_colwise, (one, letter, transformed) in zip((False, True), copies, strict=True)
            )
        )

    @staticmethod
    def create(
        data: Any,
        scale_inv: Any,
        colwise_data: Any = None,
        colwise_scale_inv: Any = None,
        amax: Any = None,
        colwise_amax: Any = None,
        scaling_mode: Any = ScalingMode.NO_SCALING,
        dq_dtype: Any = jnp.bfloat16,
        data_layout: str = "NN",
        q_layout: Any = QuantizeLayout.ROWWISE,
        flatten_axis: int = -1,
        **options: Any,
    ) -> Any:
        """Return a tensor of the copies that `q_layout` names.

        Args:
            data_layout: a letter for each copy, as a quantizer's `get_data_layout` gives them: the rowwise one first.
            **options: those of `create_2x` besides: first_dims, last_dims, original_shape, rowwise_has_rht_applied,
                colwise_has_rht_applied, pre_swizzled.
        """
        q_layout = QuantizeLayout(q_layout)
        if q_layout.is_rowwise_colwise:
            both = data, scale_inv, colwise_data, colwise_scale_inv, amax, colwise_amax
            return ScaledTensorFactory.create_2x(*both, scaling_mode, dq_dtype, data_layout, flatten_axis, **options)
        transformed = [options.pop(f"{name}_has_rht_applied", False) for name in ("rowwise", "colwise")]
        one = data, scale_inv, amax, scaling_mode, dq_dtype, False, data_layout[0]
        if q_layout.is_colwise_only:
            amax = amax if colwise_amax is None else colwise_amax
            one = colwise_data, colwise_scale_inv, amax, scaling_mode, dq_dtype, True, data_layout[-1]
        options["has_rht_applied"] = transformed[q_layout.is_colwise_only]
        return ScaledTensorFactory.create_1x(*one, flatten_axis, **options)
