"""How to quantize: TE's quantizers for JAX. Pytrees, so that they pass through jit, scan and checkpoints.

    quantizer = QuantizerFactory.create(
        scaling_mode=ScalingMode.MXFP8_1D_SCALING, q_dtype=jnp.float8_e4m3fn, q_layout=QuantizeLayout.ROWWISE)
    y = act_lu(x, ("silu", "linear"), quantizer)

Delayed scaling is the one with a state, its scale and the history of amaxes. `update` replaces them in the object.
Pass the quantizer to a jitted function as an argument, and return it: the function works on a copy. One that a function
finds outside of itself is refused, for it would be left with values of the trace.
Source: TE's `jax/quantize/quantizer.py`.
"""

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from fuser.xla.calls import execute
from fuser.xla.compute import QUANTIZE, Call
from fuser.xla.settings import QuantizeLayout, ScalingMode, normalized_axis
from fuser.xla.tensors import ScaledTensorFactory
from refops.arguments import shown

try:
    from jax.extend.core import get_opaque_trace_state
except ImportError:  # JAX before 0.7
    from jax.core import get_opaque_trace_state


def compute_scale_from_amax(amax: Any, q_dtype: Any, margin: float = 0.0, scale: Any = None) -> Any:
    """Return (largest value / amax) / 2^margin, float32 like `amax`; where amax is 0 or not finite, `scale` or 1."""
    largest = jnp.astype(jnp.finfo(q_dtype).max, jnp.float32)
    previous = jnp.ones((1,), jnp.float32) if scale is None else scale
    computed = (largest / amax) / np.float32(2.0**margin)
    return jnp.where((amax > 0) & jnp.isfinite(amax), computed, previous)


@dataclass(eq=False)
class Quantizer:
    """What all quantizers have.

    Attributes:
        q_dtype: dtype of the data.
        scaling_mode: a `ScalingMode`.
        q_layout: a `QuantizeLayout`: which copies.
    """

    q_dtype: Any = jnp.float8_e4m3fn
    scaling_mode: ScalingMode = ScalingMode.CURRENT_TENSOR_SCALING
    q_layout: QuantizeLayout = QuantizeLayout.ROWWISE_COLWISE

    #: Modes that a class takes; fields that are arrays.
    modes: ClassVar[tuple[ScalingMode, ...]] = ()
    children: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls):
        jax.tree_util.register_pytree_node(cls, lambda q: q._flatten(), cls._unflatten)

    def __post_init__(self):
        self.q_dtype, self.q_layout = np.dtype(self.q_dtype), QuantizeLayout(self.q_layout)
        self.scaling_mode = ScalingMode(self.scaling_mode)
        dtypes = self.modes[0].data_dtypes if self.modes else ()
        if self.scaling_mode not in self.modes or self.q_dtype.name not in dtypes:
            modes, dtypes = ", ".join(mode.name for mode in self.modes), ", ".join(dtypes)
            raise ValueError(
                f"{type(self).__name__} needs scaling_mode {modes} and q_dtype {dtypes}; got {self.scaling_mode.name} "
                f"and {self.q_dtype.name}"
            )

    def _flatten(self):
        static = [f.name for f in fields(self) if f.name not in self.children]
        return [getattr(self, c) for c in self.children], tuple((s, getattr(self, s)) for s in static)

    @classmethod
    def _unflatten(cls, static, arrays):
        quantizer = object.__new__(cls)
        for name, value in (*static, *zip(cls.children, arrays, strict=True)):
            setattr(quantizer, name, value)
        return quantizer

    @property
    def data_layout(self) -> str:
        """One letter for the rowwise and one for the columnwise copy: N, or T for transposed."""
        return "NT" if self.scaling_mode.is_colwise_transposed else "NN"

    def get_data_layout(self) -> str:
        """The letters of the copies that are made."""
        row, column = tuple(self.data_layout)
        return {0: row, 1: column, 2: row + column}[int(self.q_layout)]

    def get_scale_dtype(self) -> Any:
        """dtype of the scales."""
        return self.scaling_mode.get_scale_dtype()

    def is_2x2x(self) -> bool:
        """Whether both copies are made."""
        return self.q_layout.is_rowwise_colwise

    def check_scale(self) -> None:
        """Raise ValueError where a function that is traced must not use the quantizer; only delayed scaling does."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Take note of an amax; only delayed scaling does."""

    def quantize(
        self, x: Any, is_rowwise: Any = None, is_colwise: Any = None, dq_dtype: Any = None, flatten_axis: int = -1
    ) -> Any:
        """Quantize a tensor.

        Args:
            x: float32, float16 or bfloat16.
            is_rowwise, is_colwise: which copies; None is what `q_layout` says.
            dq_dtype: dtype of the dequantized tensor, None for that of `x`.
            flatten_axis: the axes before it make the rows of the matrix that is scaled, the others its columns.

        Returns:
            `ScaledTensor1x` or `ScaledTensor2x`.
        """
        rowwise = self.q_layout.has_rowwise if is_rowwise is None else is_rowwise
        colwise = self.q_layout.has_colwise if is_colwise is None else is_colwise
        if not (rowwise or colwise):
            raise ValueError("is_rowwise or is_colwise must be True; got False for both")
        layout = QuantizeLayout(2 if rowwise and colwise else int(colwise))
        axis = normalized_axis(flatten_axis, x.shape)
        self.check_shape(x.shape, axis, layout)
        matrix = x.reshape(int(np.prod(x.shape[:axis], dtype=np.int64)), int(np.prod(x.shape[axis:], dtype=np.int64)))
        call = Call(QUANTIZE, scaling_mode=int(self.scaling_mode), quantize_layout=int(layout))
        results = execute(call, self.q_dtype, matrix, self.call_scale(), jnp.zeros((1,), jnp.float32))
        self.update(results[4])
        return self.tensor(results, x.shape, axis, x.dtype if dq_dtype is None else dq_dtype, layout)

    def check_shape(self, shape: Any, axis: Any, layout: Any = None) -> None:
        """Raise ValueError where blocks do not divide a tensor whose columns begin at `axis`, for NVFP4 both ways."""
        layout = self.q_layout if layout is None else layout
        normalized_axis(axis, shape)
        for colwise, wanted in ((False, layout.has_rowwise), (True, layout.has_colwise)):
            if wanted or self.scaling_mode.layout.shape_multiple > 1:
                self.scaling_mode.get_scale_shape(shape, is_colwise=colwise, is_padded=False, flatten_axis=axis)

    def call_scale(self) -> Any:
        """The scale that a call takes, float32 (1,)."""
        return jnp.ones((1,), jnp.float32)

    def tensor(self, results: Any, shape: Any, axis: Any, dq_dtype: Any, layout: Any = None) -> Any:
        """Make the scaled tensor of a custom call's results, padded matrices.

        Args:
            results: output, colwise_output, scale_inv, colwise_scale_inv, amax.
            shape: shape of the tensor. axis: where its columns begin.
        """
        layout = self.q_layout if layout is None else layout
        rowwise, colwise, scale_inv, colwise_scale_inv, amax = results[:5]
        mode, transposed = self.scaling_mode, shape[axis:] + shape[:axis]
        scales = [None, None]
        for index, (given, wanted) in enumerate(
            ((scale_inv, layout.has_rowwise), (colwise_scale_inv, layout.has_colwise))
        ):
            if wanted:
                scales[index] = _unpadded(mode, given, shape, axis, colwise=index == 1)
        if layout.has_colwise:
            colwise = colwise.reshape(transposed if mode.is_colwise_transposed else shape)
        return ScaledTensorFactory.create(
            rowwise.reshape(shape) if layout.has_rowwise else None,
            scales[0],
            colwise,
            scales[1],
            amax=None if mode.layout.amax is None else amax,
            scaling_mode=mode,
            dq_dtype=dq_dtype,
            data_layout=self.data_layout,
            q_layout=layout,
            flatten_axis=axis,
        )


def _unpadded(mode, scales, shape, axis, colwise):
    """Scales without padding, with the axes of the data."""
    wanted = mode.get_scale_shape(shape, "N", colwise, False, axis, broadcast_2d_scale_shape_to_1d=True)
    if not mode.is_block_scaling:
        return scales[: wanted[0]]
    rows = shape[axis:] if colwise != mode.layout.scales_inner_first[colwise] else shape[:axis]
    count = int(np.prod(wanted[: len(rows)], dtype=np.int64))
    return scales[:count, : int(np.prod(wanted[len(rows) :], dtype=np.int64))].reshape(wanted)


class CurrentScaleQuantizer(Quantizer):
    """FP8 with the scale taken from the tensor's own amax."""

    modes = (ScalingMode.CURRENT_TENSOR_SCALING,)


_OUTSIDE = (
    "a DelayedScaleQuantizer changes its scale and its history: a function under jit, vmap or another transformation "
    "must take it as an argument and return it; got one from outside of the function"
)


@dataclass(eq=False)
class DelayedScaleQuantizer(Quantizer):
    """FP8 with a scale from the amaxes of earlier calls.

    Attributes:
        margin: scales are divided by 2^margin.
        amax_compute_algo: "max" of the history, or "most_recent".
        scale: float32 (1,), what tensors are multiplied with.
        amax_history: float32 (1024,), the most recent first while a scale is computed.
    """

    scaling_mode: ScalingMode = ScalingMode.DELAYED_TENSOR_SCALING
    margin: float = 0.0
    amax_compute_algo: str = "max"
    scale: Any = field(default_factory=lambda: jnp.ones((1,), jnp.float32))
    amax_history: Any = field(default_factory=lambda: jnp.zeros((1024,), jnp.float32))

    modes, children = (ScalingMode.DELAYED_TENSOR_SCALING,), ("scale", "amax_history")

    def __post_init__(self):
        super().__post_init__()
        if self.amax_compute_algo not in ("max", "most_recent"):
            raise ValueError(f"amax_compute_algo must be 'max' or 'most_recent'; got {shown(self.amax_compute_algo)}")
        self._trace = get_opaque_trace_state()

    @classmethod
    def _unflatten(cls, static, arrays):
        quantizer = super()._unflatten(static, arrays)
        quantizer._trace = get_opaque_trace_state()
        return quantizer

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "_trace"}

    def __setstate__(self, state):
        vars(self).update(state, _trace=get_opaque_trace_state())

    def call_scale(self) -> Any:
        """The scale, float32 (1,)."""
        return jnp.asarray(self.scale, jnp.float32).reshape(1)

    def check_scale(self) -> None:
        """Raise ValueError where a function under jit would keep the scale of now as a constant."""
        is_staged = isinstance(jnp.zeros(()), jax.core.Tracer)
        if is_staged and not isinstance(self.scale, jax.core.Tracer) and self._trace != get_opaque_trace_state():
            raise ValueError(_OUTSIDE)

    def update(self, new_amax: Any) -> None:
        """Put an amax in the history, and take the next scale from it.

        Raises:
            ValueError: the quantizer was made outside of the function that is traced.
        """
        if self._trace != get_opaque_trace_state():
            raise ValueError(_OUTSIDE)
        history = self.amax_history.at[0].set(jnp.asarray(new_amax, jnp.float32).reshape(-1)[0])
        amax = jnp.max(history, keepdims=True) if self.amax_compute_algo == "max" else history[:1]
        self.scale = compute_scale_from_amax(amax, self.q_dtype, self.margin, self.scale)
        self.amax_history = jnp.roll(history, -1).at[0].set(0)


@dataclass(eq=False)
class BlockScaleQuantizer(Quantizer):
    """MXFP8: a power of two for 32 elements."""

    scaling_mode: ScalingMode = ScalingMode.MXFP8_1D_SCALING

    modes = (ScalingMode.MXFP8_1D_SCALING,)


@dataclass(eq=False)
class NVFP4Quantizer(Quantizer):
    """NVFP4: an E4M3 scale for 16 (or 16 x 16) elements and the tensor's amax."""

    q_dtype: Any = jnp.float4_e2m1fn
    scaling_mode: ScalingMode = ScalingMode.NVFP4_1D_SCALING

    modes = (ScalingMode.NVFP4_1D_SCALING, ScalingMode.NVFP4_2D_SCALING)


class QuantizerFactory:
    """Makes quantizers by their scaling mode."""

    quantizer_type_map = {  # noqa: RUF012
        mode: kind
        for kind in (CurrentScaleQuantizer, DelayedScaleQuantizer, BlockScaleQuantizer, NVFP4Quantizer)
        for mode in kind.modes
    }

    @staticmethod
    def create(
        n_quantizers: int = 1,
        scaling_mode: Any = None,
        q_dtype: Any = None,
        q_layout: Any = QuantizeLayout.ROWWISE,
        **options: Any,
    ) -> Any:
        """Return `n_quantizers` quantizers of a mode: one alone, several as a tuple; None for NO_SCALING.

        Args:
            scaling_mode: a `ScalingMode`.
            q_dtype: dtype of the data; None is float8_e4m3fn, or float4_e2m1fn for NVFP4.
            q_layout: a `QuantizeLayout`.
            **options: further fields of the quantizer's class.
        """
        mode = ScalingMode(scaling_mode)
        kind = QuantizerFactory.quantizer_type_map.get(mode)
        if kind is None:
            return None if n_quantizers == 1 else (None,) * n_quantizers
        if q_dtype is not None:
            options["q_dtype"] = q_dtype
        made = tuple(kind(scaling_mode=mode, q_layout=q_layout, **options) for _ in range(n_quantizers))
        return made[0] if n_quantizers == 1 else made
