"""How to quantize: TE's quantizers for JAX. Pytrees, so that they pass through jit, scan and checkpoints.

    quantizer = QuantizerFactory.create(
        scaling_mode=ScalingMode.MXFP8_1D_SCALING, q_dtype=jnp.float8_e4m3fn, q_layout=QuantizeLayout.ROWWISE)
    y = act_lu(x, ("silu", "linear"), quantizer)

Delayed scaling is the one with a state, its scale and the history of amaxes. `update` replaces them in the object.
Pass the quantizer to a jitted function as an argument, and return it: the function works on a copy. One that a function
finds outside of itself is refused, for it would be left with values of the trace.
Source: TE's `jax/quantize/quantizer.py`.
"""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from fuser.xla.calls import execute
from fuser.xla.compute import GROUPED, HIGH_PRECISION, QUANTIZE, Call
from fuser.xla.helper import (
    TensorSource,
    get_global_quantize_recipe,
    get_quantize_config_with_recipe,
    remove_padding_from_scale_inv,
)
from fuser.xla.settings import AmaxComputeAlgo, QuantizeLayout, ScalingMode, matrix_shape, normalized_axis, scaling_of
from fuser.xla.tensors import NoScaleTensor, Pytree, ScaledTensorFactory
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
class Quantizer(Pytree):
    """What all quantizers have.

    Attributes:
        q_dtype: scalar type of the data.
        scaling_mode: a `ScalingMode`.
        q_layout: a `QuantizeLayout`: which copies.
        checkpoint_name: what `jax.checkpoint` knows results by, after their `checkpoint(quantizer)`; or None.
    """

    q_dtype: Any = jnp.float8_e4m3fn
    scaling_mode: ScalingMode = ScalingMode.CURRENT_TENSOR_SCALING
    q_layout: QuantizeLayout = QuantizeLayout.ROWWISE_COLWISE
    checkpoint_name: str | None = None

    #: Modes that a class takes.
    modes: ClassVar[tuple[ScalingMode, ...]] = ()

    def __post_init__(self):
        dtype, self.q_layout = np.dtype(self.q_dtype), QuantizeLayout(self.q_layout)
        self.q_dtype, self.scaling_mode = dtype.type, ScalingMode(self.scaling_mode)
        dtypes = self.modes[0].data_dtypes if self.modes else ()
        if self.scaling_mode not in self.modes or dtype.name not in dtypes:
            modes, dtypes = ", ".join(mode.name for mode in self.modes), ", ".join(dtypes)
            raise ValueError(
                f"{type(self).__name__} needs scaling_mode {modes} and q_dtype {dtypes}; got {self.scaling_mode.name} "
                f"and {dtype.name}"
            )

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

    def get_scale_shapes(self, data_shape: Any, is_padded: bool = True, flatten_axis: int = -1) -> Any:
        """(rowwise, columnwise) shapes of the scales of a tensor."""
        return self.scaling_mode.get_scale_shape_2x(data_shape, is_padded, flatten_axis)

    def is_2x2x(self) -> bool:
        """Whether both copies are made."""
        return self.q_layout.is_rowwise_colwise

    def check_scale(self) -> None:
        """Raise ValueError if the traced function may not use it; always passes but for delayed scaling."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Take note of an amax; only delayed scaling does."""

    def quantize(
        self, x: Any, is_rowwise: Any = None, is_colwise: Any = None, dq_dtype: Any = None, flatten_axis: int = -1
    ) -> Any:
        """Quantize a tensor.

        Args:
            x: float32, float16 or bfloat16; or a `NoScaleTensor`, whose amax current scaling takes for the tensor's.
            is_rowwise, is_colwise: which copies; None is what `q_layout` says.
            dq_dtype: dtype of the dequantized tensor, None for that of `x`.
            flatten_axis: the axes before it make the rows of the matrix that is scaled, the others its columns.

        Returns:
            `ScaledTensor1x` or `ScaledTensor2x`.
        """
        return self.quantize_dbias(x, False, self._layout_of(is_rowwise, is_colwise), dq_dtype, flatten_axis)[0]

    def quantize_dbias(
        self, x: Any, is_dbias: bool = True, layout: Any = None, dq_dtype: Any = None, flatten_axis: int = -1
    ) -> Any:
        """Return (scaled tensor, float32 sums of `x` over the axes before `flatten_axis` in its dtype, or None).

        Args:
            layout: a `QuantizeLayout`, None for `q_layout`. The others: as for `quantize`.
        """
        require_quantizer(self)
        amax = x.amax if isinstance(x, NoScaleTensor) else None
        if amax is not None and self.scaling_mode.is_nvfp4_scaling:
            raise ValueError(
                f"x must have no amax for {self.scaling_mode.name}, whose kernel takes that of what it quantizes (an "
                f"activation's before it is rounded: act_lu with the quantizer); got amax={shown(amax)}"
            )
        x = x.dequantize() if isinstance(x, NoScaleTensor) else x
        require_high_precision(x)
        axis = normalized_axis(flatten_axis, x.shape)
        tensor, dbias = self.run_call(
            Call(QUANTIZE, is_dbias=bool(is_dbias)),
            (x.reshape(matrix_shape(x.shape, axis)),),
            x.shape,
            axis,
            x.dtype if dq_dtype is None else dq_dtype,
            self.q_layout if layout is None else layout,
            amax,
        )
        return tensor, dbias.reshape(x.shape[axis:]) if is_dbias else None

    def run_call(
        self, call: Any, tensors: Any, shape: Any, axis: int, dq_dtype: Any, layout: QuantizeLayout, amax: Any = None
    ) -> Any:
        """Run a custom call whose result is quantized, and take note of its amax.

        Args:
            call: a `fuser.xla.compute.Call` without the fields that a quantizer sets. tensors: its first operands.
            shape: shape of the quantized tensor. axis: where its columns begin.
            amax: what is known of the amax before the call, or None; current scaling takes it.

        Returns:
            (scaled tensor, the call's sums or None).
        """
        self.check_shape(shape, axis, layout)
        mode, (scale, amaxes) = self.scaling_mode, self.call_operands(layout)
        is_known = amax is not None and mode is ScalingMode.CURRENT_TENSOR_SCALING
        if is_known:
            scale = jnp.minimum(compute_scale_from_amax(amax, self.q_dtype), jnp.finfo(tensors[-1].dtype).max)
            mode = ScalingMode.DELAYED_TENSOR_SCALING
        call = call._replace(scaling_mode=int(mode), quantize_layout=int(layout), **self.call_flags(layout))
        results = execute(call, self.q_dtype, *tensors, scale, amaxes)
        self.update(results[4])
        if is_known:
            results[4] = amax
        return self.tensor(results, shape, axis, dq_dtype, layout), results[5] if call.is_dbias else None

    def _layout_of(self, is_rowwise, is_colwise):
        rowwise = self.q_layout.has_rowwise if is_rowwise is None else is_rowwise
        colwise = self.q_layout.has_colwise if is_colwise is None else is_colwise
        if not (rowwise or colwise):
            raise ValueError("is_rowwise or is_colwise must be True; got False for both")
        return QuantizeLayout(2 if rowwise and colwise else int(colwise))

    def check_shape(self, shape: Any, axis: Any, layout: QuantizeLayout) -> None:
        """Raise ValueError where blocks do not divide a tensor whose columns begin at `axis`, for NVFP4 both ways."""
        normalized_axis(axis, shape)
        for colwise, wanted in ((False, layout.has_rowwise), (True, layout.has_colwise)):
            if wanted or self.scaling_mode.layout.shape_multiple > 1:
                self.scaling_mode.get_scale_shape(shape, is_colwise=colwise, is_padded=False, flatten_axis=axis)

    def call_operands(self, layout: QuantizeLayout) -> Any:
        """What a call takes besides tensors: (scale, amax), as `fuser.xla.compute` lists them."""
        return jnp.ones((1,), jnp.float32), jnp.zeros((1,), jnp.float32)

    def call_flags(self, layout: QuantizeLayout) -> dict[str, bool]:
        """Fields of a `fuser.xla.compute.Call` that are set."""
        return {}

    def tensor(self, results: Any, shape: Any, axis: Any, dq_dtype: Any, layout: QuantizeLayout) -> Any:
        """Make the scaled tensor of a custom call's results, padded matrices.

        Args:
            results: output, colwise_output, scale_inv, colwise_scale_inv, amax.
            shape: shape of the tensor. axis: where its columns begin.
        """
        rowwise, colwise, scale_inv, colwise_scale_inv, updated_amax = results[:5]
        mode, transformed = self.scaling_mode, self.call_flags(layout).get("use_rht", False)
        amax: Any = None if mode.layout.amax is None else updated_amax
        amaxes = (amax[:1], amax[1:]) if transformed else (amax, amax)
        row = column = (None, None)
        if layout.has_rowwise:
            row = rowwise.reshape(shape), remove_padding_from_scale_inv(scale_inv, mode, shape, False, axis)
        if layout.has_colwise:
            stored = shape[axis:] + shape[:axis] if mode.is_colwise_transposed else shape
            column = colwise.reshape(stored), remove_padding_from_scale_inv(colwise_scale_inv, mode, shape, True, axis)
        kind = mode, dq_dtype, self.data_layout, layout, axis
        return ScaledTensorFactory.create(*row, *column, *amaxes, *kind, colwise_has_rht_applied=transformed)


class CurrentScaleQuantizer(Quantizer):
    """FP8 with the scale taken from the tensor's own amax."""

    modes = (ScalingMode.CURRENT_TENSOR_SCALING,)


_FROM_OUTER_TRACE = (
    "a DelayedScaleQuantizer changes its scale and its history: a function under jit, vmap or another transformation "
    "must take it as an argument and return it; got one from outside of the function"
)


@dataclass(eq=False)
class DelayedScaleQuantizer(Quantizer):
    """FP8 with a scale from the amaxes of earlier calls.

    Attributes:
        margin: scales are divided by 2^margin.
        amax_compute_algo: "max" of the history, or "most_recent".
        scale: float32 (1,), what tensors are multiplied by.
        amax_history: float32 (1024,), the most recent first while a scale is computed.
    """

    scaling_mode: ScalingMode = ScalingMode.DELAYED_TENSOR_SCALING
    margin: float = 0.0
    amax_compute_algo: Any = AmaxComputeAlgo.MAX
    scale: Any = field(default_factory=lambda: jnp.ones((1,), jnp.float32))
    amax_history: Any = field(default_factory=lambda: jnp.zeros((1024,), jnp.float32))

    modes, children = (ScalingMode.DELAYED_TENSOR_SCALING,), ("scale", "amax_history")

    def __post_init__(self):
        super().__post_init__()
        names = {algorithm.value: algorithm for algorithm in AmaxComputeAlgo}
        self.amax_compute_algo = names.get(self.amax_compute_algo, self.amax_compute_algo)
        if not isinstance(self.amax_compute_algo, AmaxComputeAlgo):
            raise ValueError(f"amax_compute_algo must be 'max' or 'most_recent'; got {shown(self.amax_compute_algo)}")
        self._trace = get_opaque_trace_state()

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "_trace"}

    def __setstate__(self, state):
        super().__setstate__(state)
        self._trace = get_opaque_trace_state()

    def call_operands(self, layout: QuantizeLayout) -> Any:
        """(scale, amax), as `fuser.xla.compute` lists them."""
        return jnp.asarray(self.scale, jnp.float32).reshape(1), super().call_operands(layout)[1]

    def check_scale(self) -> None:
        """Raise ValueError where a function under jit would keep the scale of now as a constant."""
        is_staged = isinstance(jnp.zeros(()), jax.core.Tracer)
        if is_staged and not isinstance(self.scale, jax.core.Tracer) and self._trace != get_opaque_trace_state():
            raise ValueError(_FROM_OUTER_TRACE)

    def update(self, new_amax: Any) -> None:
        """Put an amax in the history, and take the next scale from it.

        Raises:
            ValueError: the quantizer was made outside of the function that is traced.
        """
        if self._trace != get_opaque_trace_state():
            raise ValueError(_FROM_OUTER_TRACE)
        history = self.amax_history.at[0].set(jnp.asarray(new_amax, jnp.float32).reshape(-1)[0])
        is_max = self.amax_compute_algo is AmaxComputeAlgo.MAX
        amax = jnp.max(history, keepdims=True) if is_max else history[:1]
        self.scale = compute_scale_from_amax(amax, self.q_dtype, self.margin, self.scale)
        self.amax_history = jnp.roll(history, -1).at[0].set(0)


@dataclass(eq=False)
class BlockScaleQuantizer(Quantizer):
    """MXFP8: a power of two for 32 elements."""

    scaling_mode: ScalingMode = ScalingMode.MXFP8_1D_SCALING

    modes = (ScalingMode.MXFP8_1D_SCALING,)


@dataclass(eq=False)
class NVFP4Quantizer(Quantizer):
    """NVFP4: an E4M3 scale for 16 (or 16 x 16) elements and the tensor's amax.

    Attributes:
        use_rht: the columnwise copy goes through TE's Hadamard transform, and has an amax of its own. Not with squares.
        stochastic_rounding_rng_state: uint32 (4,) or (devices, 4), of which the first row counts, as TE's: the seed and
            the offset of Philox, low halves first. The same state rounds alike. None rounds to nearest.
    """

    q_dtype: Any = jnp.float4_e2m1fn
    scaling_mode: ScalingMode = ScalingMode.NVFP4_1D_SCALING
    use_rht: bool = False
    stochastic_rounding_rng_state: Any = None

    modes = (ScalingMode.NVFP4_1D_SCALING, ScalingMode.NVFP4_2D_SCALING)
    children = ("stochastic_rounding_rng_state",)

    def __post_init__(self):
        super().__post_init__()
        scaling_of(self.scaling_mode, rht=self.use_rht)  # raises where the two exclude each other
        state = self.stochastic_rounding_rng_state
        if state is not None and (state.dtype != jnp.uint32 or state.ndim not in (1, 2) or state.shape[-1] != 4):
            raise ValueError(
                "stochastic_rounding_rng_state must be uint32 of shape (4,) or (devices, 4), or None; got "
                f"{state.dtype} of shape {state.shape}"
            )

    def call_operands(self, layout: QuantizeLayout) -> Any:
        """(random state or 1, amax or both amaxes), as `fuser.xla.compute` lists them."""
        state, (scale, amax) = self.stochastic_rounding_rng_state, super().call_operands(layout)
        scale = scale if state is None else state.reshape(-1)[:4]
        return scale, jnp.zeros((2,), jnp.float32) if self.call_flags(layout).get("use_rht") else amax

    def call_flags(self, layout: QuantizeLayout) -> dict[str, bool]:
        """use_rht where there is a columnwise copy, and stochastic_rounding."""
        use_rht = self.use_rht and layout.has_colwise
        return {"use_rht": use_rht, "stochastic_rounding": self.stochastic_rounding_rng_state is not None}


@dataclass(eq=False)
class GroupedQuantizer(Quantizer):
    """A quantizer for each of several tensors that lie one after the other. TE groups FP8, not NVFP4.

    Attributes:
        n_groups: how many tensors.
        quantizers: theirs; by default new ones of the same settings.
    """

    n_groups: int = 1
    quantizers: Any = ()

    modes = (ScalingMode.DELAYED_TENSOR_SCALING, ScalingMode.CURRENT_TENSOR_SCALING, ScalingMode.MXFP8_1D_SCALING)
    children = ("quantizers",)

    def __post_init__(self):
        super().__post_init__()
        if not any(self.quantizers):
            kind = QuantizerFactory.quantizer_type_map[self.scaling_mode]
            settings = self.q_dtype, self.scaling_mode, self.q_layout
            self.quantizers = tuple(kind(*settings) for _ in range(self.n_groups))

    def quantize(
        self,
        x: Any,
        is_rowwise: Any = None,
        is_colwise: Any = None,
        dq_dtype: Any = None,
        flatten_axis: int = -1,
        group_sizes: Any = None,
        group_axis: int = 0,
    ) -> Any:
        """Quantize groups, each as a tensor of its own.

        Args:
            x: (sum of group_sizes, ...), or (groups, ...): float32, float16 or bfloat16.
            group_sizes: integers (groups,), known when the call is computed; None where the first axis counts groups.
            group_axis: 0.
            The others: as for `Quantizer.quantize`.

        Returns:
            `GroupedScaledTensor1x`, or a `ScaledTensor2x` of two.

        Raises:
            ValueError: another number of groups than quantizers. In the computation: sizes that do not add up to the
                rows of `x`, or for a columnwise copy of MXFP8 are no multiples of 32.
        """
        require_high_precision(x)
        layout, axis = self._layout_of(is_rowwise, is_colwise), normalized_axis(flatten_axis, x.shape)
        sizes = jnp.ones((x.shape[0],), jnp.int32) if group_sizes is None else jnp.asarray(group_sizes, jnp.int32)
        if group_axis != 0:
            raise ValueError(f"group_axis must be 0; got {shown(group_axis)}")
        if sizes.shape != (len(self.quantizers),):
            raise ValueError(f"x must have one group for each of {len(self.quantizers)} quantizers; got {sizes.shape}")
        self.check_shape(x.shape, axis, layout)
        operands = zip(*(quantizer.call_operands(layout) for quantizer in self.quantizers), strict=True)
        call = Call(GROUPED, scaling_mode=int(self.scaling_mode), quantize_layout=int(layout))
        rows = sizes * math.prod(x.shape[1:axis])
        results = execute(
            call, self.q_dtype, rows, x.reshape(matrix_shape(x.shape, axis)), *map(jnp.concatenate, operands)
        )
        for quantizer, one in zip(self.quantizers, results[4], strict=True):
            quantizer.update(one)
        rowwise, colwise, scale_inv, colwise_scale_inv, amax = results[:5]
        mode, dq_dtype = self.scaling_mode, x.dtype if dq_dtype is None else dq_dtype
        amax = None if mode.layout.amax is None else amax
        copies = rowwise, scale_inv, colwise, colwise_scale_inv, amax, amax
        first_dims = None if group_sizes is None else sizes
        groups = {"first_dims": first_dims, "original_shape": x.shape, "pre_swizzled": mode.is_block_scaling}
        return ScaledTensorFactory.create(*copies, mode, dq_dtype, self.data_layout, layout, axis, **groups)

    def get_scale_shapes(
        self, data_shape: Any, is_padded: bool = True, flatten_axis: int = -1, group_sizes: Any = None
    ) -> Any:
        """(rowwise, columnwise) shapes of the scales of groups."""
        groups = len(self.quantizers) if group_sizes is None else len(group_sizes)
        return self.scaling_mode.get_grouped_scale_shape_2x(data_shape, groups, is_padded, flatten_axis)


@jax.tree_util.register_dataclass
@dataclass
class QuantizerSet:
    """The quantizers of a matrix product: of its input, its weights and the gradient of its result; None for none."""

    x: Any
    kernel: Any
    dgrad: Any


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
        n_groups: Any = None,
        checkpoint_name: Any = None,
        **options: Any,
    ) -> Any:
        """Return `n_quantizers` quantizers of a mode: one alone, several as a tuple; None for NO_SCALING.

        Args:
            scaling_mode: a `ScalingMode`.
            q_dtype: dtype of the data; None is float8_e4m3fn, or float4_e2m1fn for NVFP4.
            q_layout: a `QuantizeLayout`.
            n_groups: how many tensors a `GroupedQuantizer` takes; None makes quantizers of one tensor.
            checkpoint_name: see `Quantizer`.
            **options: further fields of the quantizer's class.
        """
        mode = ScalingMode(scaling_mode)
        kind: Any = QuantizerFactory.quantizer_type_map.get(mode)
        if kind is None:
            return None if n_quantizers == 1 else (None,) * n_quantizers
        if n_groups:
            kind, options["n_groups"] = GroupedQuantizer, n_groups
        if q_dtype is not None:
            options["q_dtype"] = q_dtype
        options |= {"scaling_mode": mode, "q_layout": q_layout, "checkpoint_name": checkpoint_name}
        made = tuple(kind(**options) for _ in range(n_quantizers))
        return made[0] if n_quantizers == 1 else made

    @staticmethod
    def create_set(
        n_quantizer_sets: int = 1,
        scaling_mode: Any = None,
        fwd_dtype: Any = None,
        bwd_dtype: Any = None,
        is_2x2x: Any = None,
        n_groups: Any = None,
        checkpoint_name: Any = None,
        fp8_recipe: Any = None,
        quantize_meta_set: Any = None,
    ) -> Any:
        """Return `n_quantizer_sets` sets: one alone, several as a tuple.

        Args:
            scaling_mode: a `ScalingMode` of all three; None is that of the recipe, without one NO_SCALING.
            fwd_dtype, bwd_dtype: dtypes of input and weights, and of gradients; None are those of the recipe.
            is_2x2x: both copies; None is True with scales. Else rows alone, of weights in blocks columns alone.
            n_groups, checkpoint_name: as for `create`.
            fp8_recipe: a recipe; None is that of `autocast`.
            quantize_meta_set: a `QuantizeMetaSet`: further fields of each quantizer. `fp8_recipe` needs it, as in TE.

        Raises:
            ValueError: a recipe together with a scaling mode or dtypes, or without quantize_meta_set.
        """
        if fp8_recipe is not None and quantize_meta_set is None:
            raise ValueError("quantize_meta_set must be given with fp8_recipe; got None")
        fp8_recipe = get_global_quantize_recipe() if fp8_recipe is None else fp8_recipe
        if fp8_recipe is not None and (scaling_mode, fwd_dtype, bwd_dtype) != (None, None, None):
            raise ValueError(
                "scaling_mode, fwd_dtype and bwd_dtype must be None with a recipe, which has them; got "
                f"{scaling_mode}, {fwd_dtype} and {bwd_dtype}"
            )
        config = get_quantize_config_with_recipe(fp8_recipe)
        forward, backward = config.FWD_DTYPE or fwd_dtype, config.BWD_DTYPE or bwd_dtype
        settings: list[Any] = []
        for source, name in zip(TensorSource, ("x", "kernel", "grad"), strict=True):
            mode = config.get_scaling_mode(source) if scaling_mode is None else ScalingMode(scaling_mode)
            both = mode is not ScalingMode.NO_SCALING if is_2x2x is None else is_2x2x
            layout = QuantizeLayout.ROWWISE_COLWISE if both else QuantizeLayout.ROWWISE
            if source is TensorSource.KERNEL and not both and mode.is_1d_block_scaling():
                layout = QuantizeLayout.COLWISE
            dtype = backward if source is TensorSource.DGRAD else forward
            more = {} if quantize_meta_set is None else getattr(quantize_meta_set, name).get_kwargs_dictionary()
            settings.append(((1, mode, dtype, layout, n_groups, checkpoint_name), more))
        create = QuantizerFactory.create
        made = [QuantizerSet(*(create(*one, **more) for one, more in settings)) for _ in range(n_quantizer_sets)]
        return made[0] if n_quantizer_sets == 1 else tuple(made)


#: The set without any quantizer.
noop_quantizer_set = QuantizerFactory.create_set()


def require_high_precision(x: Any) -> None:
    """Raise TypeError unless an array is float32, float16 or bfloat16."""
    if np.dtype(x.dtype).name not in HIGH_PRECISION:
        raise TypeError(f"x must be float32, float16 or bfloat16; got {x.dtype} of shape {x.shape}")


def require_quantizer(quantizer: Any) -> None:
    """Raise TypeError unless a quantizer is None or one of a single tensor."""
    if quantizer is not None and (not isinstance(quantizer, Quantizer) or isinstance(quantizer, GroupedQuantizer)):
        grouped = ", which grouped_quantize takes" if isinstance(quantizer, GroupedQuantizer) else ""
        raise TypeError(f"quantizer must be a Quantizer or None; got {type(quantizer).__name__}{grouped}")
