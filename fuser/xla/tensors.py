"""Results: tensors with or without scales, as pytrees. TE's `jax/quantize/tensor.py`."""

import dataclasses
from dataclasses import dataclass
from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fuser.xla.settings import QuantizeLayout, ScalingMode, normalized_axis, scaling_of


class TensorUsage(Enum):
    """What a matrix product uses a tensor for; `get_tensor` has the copy for it."""

    LHS = 0
    LHS_TRANS = 1
    RHS = 2
    RHS_TRANS = 3


class _Words:
    """Of the vocabulary of `refops.scalings.arithmetic`, what decoding takes, for arrays of JAX."""

    @staticmethod
    def function(f):
        return f

    @staticmethod
    def decode(fmt):
        return lambda code: code.astype(jnp.float32)


_ROWWISE_USAGES = (TensorUsage.LHS, TensorUsage.RHS_TRANS)


def _pytree(*children):
    """Decorate a dataclass: `children` are its arrays, the other fields static. Unflattening checks nothing."""

    def register(cls):
        static = [f.name for f in dataclasses.fields(cls) if f.name not in children]

        def flatten(tensor):
            return [getattr(tensor, c) for c in children], tuple(getattr(tensor, s) for s in static)

        def unflatten(values, arrays):
            tensor = object.__new__(cls)
            for name, value in zip((*children, *static), (*arrays, *values), strict=True):
                object.__setattr__(tensor, name, value)
            return tensor

        jax.tree_util.register_pytree_node(cls, flatten, unflatten)
        return cls

    return register


class AbstractBaseTensor:
    """What all results have: `dequantize()`, and `get_tensor(usage)`, itself unless there are two copies."""

    def get_tensor(self, usage: Any) -> Any:
        """Return the copy that a matrix product takes for a `TensorUsage`."""
        return self


@_pytree("data", "amax")
@dataclass(frozen=True, eq=False)
class NoScaleTensor(AbstractBaseTensor):
    """A tensor in high precision, and its amax, float32 (1,), if that was asked for."""

    data: Any
    amax: Any = None

    @property
    def shape(self) -> Any:
        """Shape of the data."""
        return self.data.shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.data.ndim

    @property
    def dtype(self) -> Any:
        """dtype of the data."""
        return self.data.dtype

    def dequantize(self) -> Any:
        """Return the data."""
        return self.data


class ScaledTensor(AbstractBaseTensor):
    """A quantized tensor."""


@_pytree("data", "amax", "scale_inv")
@dataclass(frozen=True, eq=False)
class ScaledTensor1x(ScaledTensor):
    """One copy of a quantized tensor.

    Attributes:
        data: codes, of a float8 or float4 dtype.
        amax: float32 (1,): the tensor's largest magnitude where the mode knows it, else None.
        scale_inv: what codes are multiplied with, of the shape `ScalingMode.get_scale_shape(..., is_padded=False)`.
        scaling_mode: a `ScalingMode`.
        dq_dtype: dtype of the dequantized tensor.
        is_colwise: whether blocks run along rows.
        data_layout: "N", or "T" where `data` (and scales) are transposed.
        flatten_axis: where the columns of the matrix that was scaled begin, in the axes of `data`.
        has_rht_applied: whether values went through a Hadamard transform; not here.
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

    def __post_init__(self):
        axis = normalized_axis(self.flatten_axis, self.data.shape)
        object.__setattr__(self, "flatten_axis", axis)
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

    @property
    def shape(self) -> Any:
        """Shape of the data, as they lie."""
        return self.data.shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.data.ndim

    def dequantize(self) -> Any:
        """Return the values in `dq_dtype`, in the layout of `data`: float32 arithmetic, one rounding."""
        values = self.data.astype(jnp.float32)
        if self.scaling_mode is not ScalingMode.NO_SCALING and self.data.size:
            values = values * self._factors()
        return values.astype(self.dq_dtype)

    def _factors(self):
        """float32 factor of each element, or of all."""
        amax = self.amax[0] if self.scaling_mode.layout.two_level else None
        factors = scaling_of(self.scaling_mode).decode_factor(_Words)(self.scale_inv, amax)
        if self.scaling_mode.is_tensor_scaling:
            return factors[0]
        for axis, (size, blocks) in enumerate(zip(self.data.shape, factors.shape, strict=True)):
            if size != blocks:
                factors = jnp.repeat(factors, size // blocks, axis=axis)
        return factors


@_pytree("rowwise_tensor", "colwise_tensor")
@dataclass(frozen=True, eq=False)
class ScaledTensor2x(ScaledTensor):
    """Both copies of a quantized tensor, each a `ScaledTensor1x`."""

    rowwise_tensor: ScaledTensor1x
    colwise_tensor: ScaledTensor1x

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
        return self.rowwise_tensor if TensorUsage(usage) in _ROWWISE_USAGES else self.colwise_tensor


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
        has_rht_applied: bool = False,
    ) -> Any:
        """Return a `ScaledTensor1x`; `flatten_axis` is that of the tensor, also where `data` are transposed."""
        axis = normalized_axis(flatten_axis, data.shape)
        axis = data.ndim - axis if data_layout == "T" else axis
        return ScaledTensor1x(
            data, amax, scale_inv, scaling_mode, dq_dtype, is_colwise, data_layout, axis, has_rht_applied
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
    ) -> Any:
        """Return a `ScaledTensor1x` or `ScaledTensor2x` of the copies that `q_layout` names.

        `data_layout` has a letter for each copy, as a quantizer's `get_data_layout` gives them: the rowwise one first.
        """
        create, tensors = ScaledTensorFactory.create_1x, []
        q_layout = QuantizeLayout(q_layout)
        if q_layout.has_rowwise:
            tensors.append(create(data, scale_inv, amax, scaling_mode, dq_dtype, False, data_layout[0], flatten_axis))
        if q_layout.has_colwise:
            tensors.append(
                create(
                    colwise_data,
                    colwise_scale_inv,
                    amax if colwise_amax is None else colwise_amax,
                    scaling_mode,
                    dq_dtype,
                    True,
                    data_layout[-1],
                    flatten_axis,
                )
            )
        return ScaledTensor2x(*tensors) if len(tensors) == 2 else tensors[0]
