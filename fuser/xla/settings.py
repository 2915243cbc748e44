"""The vocabulary of TE's JAX interface: activation types and parameters, scaling modes, layouts; and scale shapes.

Numbers are those that cross TE's FFI (`csrc/extensions/misc.h`, `activation.h`). No JAX in here.
"""

import functools
import math
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any

import ml_dtypes  # noqa: F401  # gives NumPy the names of the dtypes
import numpy as np

from refops.activations import ACTIVATIONS, DEFAULT_PARAMETERS
from refops.arguments import did_you_mean, require_number, shown
from refops.formats import E2M1, E4M3, E5M2, E8M0
from refops.quantization.layout import round_up
from refops.scalings import FP8_FORMATS, CurrentScaling, DelayedScaling, MXFP8Scaling, NVFP4Scaling, Scaling

#: dtype of JAX -> what its codes mean.
FORMATS = {"float8_e4m3fn": E4M3, "float8_e5m2": E5M2, "float4_e2m1fn": E2M1, "float8_e8m0fnu": E8M0}
_DTYPES = {fmt: dtype for dtype, fmt in FORMATS.items()}

_ROWS = sorted(
    (row for row in ACTIVATIONS.values() if row.jax is not None), key=lambda row: (row.number is None, row.number)
)
#: Activation type, as TE spells it -> number in TE's FFI; activations that TE lacks have the numbers after TE's.
#: SiTU-GLU has none: TE's JAX interface does not offer it.
ActivationEnum = {row.jax: number for number, row in enumerate(_ROWS)}
#: Number in TE's FFI -> name in `refops.ACTIVATIONS`.
ACTIVATION_NAMES = tuple(row.name for row in _ROWS)
HIGH_PRECISION = ("float32", "float16", "bfloat16")


def activation_key(activation_type):
    """Return an activation type, a tuple (or list) of names, or one name, as a tuple."""
    return (activation_type,) if isinstance(activation_type, str) else tuple(activation_type)


def activation_enum(activation_type):
    """Return the number of an activation type.

    Raises:
        KeyError: no such combination; order matters, ("gelu", "linear") is (activation, gate).
    """
    key = activation_key(activation_type)
    if key not in ActivationEnum:
        similar = did_you_mean(", ".join(map(str, key)), {", ".join(known): known for known in ActivationEnum})
        raise KeyError(
            f"activation_type must be one of {', '.join(map(str, ActivationEnum))}; "
            f"got {shown(activation_type)}{similar}"
        )
    return ActivationEnum[key]


@dataclass(frozen=True)
class ClampedSwigluParams:
    """Parameters of ("clamped_silu", "clamped_linear"): c sigmoid(alpha c) (clamp(gate) + glu_linear_offset).

    Attributes:
        limit: upper bound of the activated half, c = min(act, limit); the gate is clamped to [-limit, limit].
        alpha: factor inside the sigmoid.
        glu_linear_offset: added to the clamped gate.
    """

    limit: float = DEFAULT_PARAMETERS["limit"]
    alpha: float = DEFAULT_PARAMETERS["alpha"]
    glu_linear_offset: float = DEFAULT_PARAMETERS["glu_linear_offset"]

    def __post_init__(self):
        for name, value in list(vars(self).items()):
            require_number(value, name)
            object.__setattr__(self, name, float(value))


@dataclass(frozen=True)
class ActivationParams:
    """Parameters of the activations that have some; hashable, so that it may be a static argument."""

    clamped_swiglu: ClampedSwigluParams = field(default_factory=ClampedSwigluParams)

    @classmethod
    def create(cls, activation_type: Any = ("clamped_silu", "clamped_linear"), **params: float) -> Any:
        """Return the parameters of an activation type.

        Args:
            **params: limit, alpha, glu_linear_offset; only ("clamped_silu", "clamped_linear") takes any.

        Raises:
            TypeError: parameters of an activation that takes none, or of other names.
        """
        clamped = ACTIVATION_NAMES[activation_enum(activation_type)] == "clamped_swiglu"
        if params and not clamped:
            raise TypeError(f"{activation_type} takes no parameters; got {', '.join(params)}")
        return cls(ClampedSwigluParams(**params))


#: Names of the structures that TE's FFI decodes the same parameters to.
ClampedSwigluConfig, ActivationConfig = ClampedSwigluParams, ActivationParams


class AmaxScope(Enum):
    """Over which devices an amax is taken. Here: the one that computes."""

    LOCAL = 1


def require_local(amax_scope):
    """Raise ValueError for another scope of an amax than the device, or None."""
    if amax_scope is not None and amax_scope is not AmaxScope.LOCAL:
        raise ValueError(f"amax_scope must be AmaxScope.LOCAL; got {shown(amax_scope)}")


class AmaxComputeAlgo(Enum):
    """Which amax of its history delayed scaling takes."""

    MAX = "max"
    MOST_RECENT = "most_recent"


class TensorUsage(Enum):
    """What a matrix product uses a tensor for; `get_tensor` has the copy for it."""

    LHS = 0
    LHS_TRANS = 1
    RHS = 2
    RHS_TRANS = 3


class QuantizeLayout(IntEnum):
    """Which copies of a quantized tensor to make."""

    ROWWISE = 0
    COLWISE = 1
    ROWWISE_COLWISE = 2

    @property
    def has_rowwise(self) -> bool:
        """Whether the rowwise copy is made."""
        return self is not QuantizeLayout.COLWISE

    @property
    def has_colwise(self) -> bool:
        """Whether the columnwise copy is made."""
        return self is not QuantizeLayout.ROWWISE

    @property
    def is_rowwise_colwise(self) -> bool:
        """Whether both are."""
        return self is QuantizeLayout.ROWWISE_COLWISE

    @property
    def is_rowwise_only(self) -> bool:
        """Whether the rowwise copy alone is."""
        return self is QuantizeLayout.ROWWISE

    @property
    def is_colwise_only(self) -> bool:
        """Whether the columnwise copy alone is."""
        return self is QuantizeLayout.COLWISE


class ScalingMode(IntEnum):
    """How a tensor is scaled: TE's modes and numbers, and no others. Shapes follow from the declared layouts.

    | mode                     | data dtypes      | scale dtype     | scales of (rowwise data)     | columnwise data |
    |--------------------------|------------------|-----------------|------------------------------|-----------------|
    | NO_SCALING               | float32, 16, bf16| float32         | none, shape (0,)             | as rowwise      |
    | DELAYED_, CURRENT_TENSOR | e4m3fn, e5m2     | float32         | the tensor, shape (1,)       | transposed      |
    | MXFP8_1D                 | e4m3fn, e5m2     | float8_e8m0fnu  | 32 elements of a row         | as rowwise      |
    | NVFP4_1D                 | float4_e2m1fn    | float8_e4m3fn   | 16 elements of a row         | transposed      |
    | NVFP4_2D                 | float4_e2m1fn    | float8_e4m3fn   | 16 x 16 elements             | transposed      |
    """

    NO_SCALING = 0
    DELAYED_TENSOR_SCALING = 1
    MXFP8_1D_SCALING = 2
    CURRENT_TENSOR_SCALING = 3
    NVFP4_1D_SCALING = 4
    NVFP4_2D_SCALING = 5

    @functools.cached_property
    def layout(self) -> Any:
        """The `refops.scalings.declaration.Layout` of data and scales; None for NO_SCALING."""
        return None if self is ScalingMode.NO_SCALING else scaling_of(self).layout

    @functools.cached_property
    def data_dtypes(self) -> tuple[str, ...]:
        """Names of the dtypes that data may have; none for NO_SCALING."""
        if self is ScalingMode.NO_SCALING:
            return ()
        takes_any = scaling_of(self, E5M2).fmt is E5M2
        return tuple(_DTYPES[fmt] for fmt in (FP8_FORMATS if takes_any else (scaling_of(self).fmt,)))

    def is_tensor_scaling(self) -> bool:
        """Whether one scale serves the tensor."""
        return self.layout is not None and self.layout.block is None

    def is_1d_block_scaling(self) -> bool:
        """Whether the stored scales are those of blocks in a line: square blocks' scales are repeated for each row."""
        return self.layout is not None and self.layout.block is not None

    @property
    def is_block_scaling(self) -> bool:
        """Whether blocks have scales of their own."""
        return self.is_1d_block_scaling()

    @property
    def is_nvfp4_scaling(self) -> bool:
        """Whether elements are E2M1."""
        return self in (ScalingMode.NVFP4_1D_SCALING, ScalingMode.NVFP4_2D_SCALING)

    @property
    def is_mxfp8_scaling(self) -> bool:
        """Whether the mode is MXFP8."""
        return self is ScalingMode.MXFP8_1D_SCALING

    @property
    def is_colwise_transposed(self) -> bool:
        """Whether columnwise data are transposed."""
        return self.layout is not None and self.layout.columnwise_transposed

    @property
    def block_size(self) -> int:
        """Elements along a block's edge; 0 without blocks."""
        return self.layout.block[1] if self.is_block_scaling else 0

    def get_compatible_q_dtypes(self) -> set[Any]:
        """Return the scalar types that data may have: those of the table, equal to `jax.numpy`'s."""
        return {np.dtype(name).type for name in self.data_dtypes or HIGH_PRECISION}

    def get_quantize_layout(self, usage: TensorUsage) -> QuantizeLayout:
        """Return the copy that a matrix product takes for a `TensorUsage`: ROWWISE, or COLWISE with scales.

        As on GPUs before Blackwell also of FP8 with a scale for the tensor, whose products want rows of both operands.
        """
        rowwise = self is ScalingMode.NO_SCALING or TensorUsage(usage) in (TensorUsage.LHS, TensorUsage.RHS_TRANS)
        return QuantizeLayout.ROWWISE if rowwise else QuantizeLayout.COLWISE

    def get_scale_dtype(self) -> Any:
        """NumPy (or ml_dtypes) dtype of the scales."""
        fmt = None if self.layout is None else self.layout.scale_format
        return np.dtype(np.float32 if fmt is None else _DTYPES[fmt])

    def get_scale_shape(
        self,
        data_shape: Any,
        data_layout: str = "N",
        is_colwise: bool = False,
        is_padded: bool = True,
        flatten_axis: int = -1,
        broadcast_2d_scale_shape_to_1d: bool = False,
    ) -> Any:
        """Return the shape of the scales of a tensor.

        Args:
            data_shape: shape of the data; with `data_layout` "T" that of transposed data.
            data_layout: "N", or "T" for transposed data.
            is_colwise: scales of blocks along the rows instead of along columns.
            is_padded: the shape in memory: (rows, blocks) rounded up to multiples of (128, 4), of (4, 128) for
                columnwise scales that are not transposed. What rounding adds goes to the first axis before, and the
                first at or after `flatten_axis`.
            flatten_axis: of the tensor that is not transposed: the axes before it make the rows of the matrix that is
                scaled, the others its columns.
            broadcast_2d_scale_shape_to_1d: repeat NVFP4_2D's scales, one for each row, as they are stored.

        Raises:
            ValueError: an axis that blocks do not divide, padding that has no N-dimensional shape.
        """
        data_shape = tuple(data_shape)
        if self is ScalingMode.NO_SCALING:
            return (0,)
        if self.is_tensor_scaling():
            return (1,) if math.prod(data_shape) else (0,)
        axis = normalized_axis(flatten_axis, data_shape)
        if data_layout == "T":
            data_shape = data_shape[-axis:] + data_shape[:-axis]
        both = self.layout.repeated and not broadcast_2d_scale_shape_to_1d
        rows, columns = self._block_counts(data_shape, axis, is_colwise, both)
        inner_first = self.layout.scales_inner_first[is_colwise]
        if is_colwise != inner_first:  # stored the other way round than data that are not transposed
            rows, columns = columns, rows
        if is_padded:
            alignments = self.layout.padding[::-1] if inner_first else self.layout.padding
            rows, columns = (_padded(part, n, data_shape) for part, n in zip((rows, columns), alignments, strict=True))
        return rows + columns

    def get_scale_shape_2x(
        self,
        data_shape: Any,
        is_padded: bool = True,
        flatten_axis: int = -1,
        broadcast_2d_scale_shape_to_1d: bool = False,
    ) -> Any:
        """Return (rowwise, columnwise) shapes, as `get_scale_shape` for data in layout "N"."""
        options = is_padded, flatten_axis, broadcast_2d_scale_shape_to_1d
        return tuple(self.get_scale_shape(data_shape, "N", colwise, *options) for colwise in (False, True))

    def get_grouped_scale_shape(
        self, data_shape: Any, n_groups: int, is_colwise: bool, is_padded: bool = True, flatten_axis: int = -1
    ) -> Any:
        """Return the shape of the flat scales of a grouped tensor: one for each group, or room for those of all blocks.

        Args:
            data_shape: shape of all groups together.
            is_padded: the scales of each group are padded. How long groups are is known when they are computed: the
                shape has room for the largest padding, of groups of one row or block and one with all others.

        Raises:
            ValueError: an axis that blocks do not divide.
        """
        if not self.is_block_scaling:
            return (n_groups,)
        axis = normalized_axis(flatten_axis, data_shape)
        rows, columns = map(math.prod, self._block_counts(tuple(data_shape), axis, is_colwise))
        if is_padded:
            outer, inner = self.layout.padding[::-1] if is_colwise else self.layout.padding
            rows = (n_groups - 1) * outer + round_up(rows - n_groups + 1, outer)
            columns = round_up(columns, inner)
        return (rows * columns,)

    def get_grouped_scale_shape_2x(
        self, data_shape: Any, n_groups: int, is_padded: bool = True, flatten_axis: int = -1
    ) -> Any:
        """Return (rowwise, columnwise) shapes, as `get_grouped_scale_shape`."""
        return tuple(
            self.get_grouped_scale_shape(data_shape, n_groups, colwise, is_padded, flatten_axis)
            for colwise in (False, True)
        )

    def get_shardy_sharding_rules(self, *args: Any, **options: Any) -> Any:
        """Raise NotImplementedError: custom calls here have no rules for the partitioner."""
        raise NotImplementedError("custom calls of fuser.xla have no sharding rules: divide tensors by jax.shard_map")

    def _block_counts(self, data_shape, axis, is_colwise, both=False):
        """(rows, columns), the axes of data in layout "N", with blocks counted along the one, the other or both."""
        counts, size = list(data_shape), self.block_size
        for i, wanted in ((axis - 1, is_colwise or both), (len(counts) - 1, not is_colwise or both)):
            if wanted and counts[i] % size:
                raise ValueError(f"{self.name} needs a multiple of {size} along axis {i}; got shape {data_shape}")
            counts[i] //= size if wanted else 1
        return tuple(counts[:axis]), tuple(counts[axis:])


_SCALINGS: dict[Any, Any] = {
    ScalingMode.DELAYED_TENSOR_SCALING: DelayedScaling,
    ScalingMode.CURRENT_TENSOR_SCALING: CurrentScaling,
    ScalingMode.MXFP8_1D_SCALING: MXFP8Scaling,
    ScalingMode.NVFP4_1D_SCALING: lambda fmt, **options: NVFP4Scaling(**options),
    ScalingMode.NVFP4_2D_SCALING: lambda fmt, **options: NVFP4Scaling(two_d=True, **options),
}


def scaling_of(mode: ScalingMode, fmt: Any = E4M3, **options: Any) -> Scaling:
    """Return the `refops` settings of a mode, with elements of a format where it has a choice.

    Args:
        **options: further settings: scale of delayed scaling; rht, stochastic_rounding, seed and offset of NVFP4.
    """
    return _SCALINGS[mode](fmt, **options)


def normalized_axis(flatten_axis, shape):
    """Return `flatten_axis` counted from the front: at least one axis before it, one from it on."""
    axis = flatten_axis + len(shape) if flatten_axis < 0 else flatten_axis
    if not 0 < axis < len(shape):
        raise ValueError(f"flatten_axis must leave axes on both sides; got {flatten_axis} for shape {tuple(shape)}")
    return axis


def matrix_shape(shape, axis):
    """Return (rows, columns) of a tensor as a matrix whose columns begin at `axis`."""
    return math.prod(shape[:axis]), math.prod(shape[axis:])


def _padded(part, multiple, data_shape):
    """Round the product of some axes up to a multiple by enlarging the first of them."""
    trailing = math.prod(part[1:])
    total = round_up(math.prod(part), multiple)
    if trailing == 0 or total % trailing:
        raise ValueError(
            f"padded scales of a tensor of shape {data_shape} have no shape: {total} entries along {part} are not "
            f"divisible by {trailing}"
        )
    return (total // trailing, *part[1:])
