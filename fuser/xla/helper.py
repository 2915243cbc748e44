"""Which scalings there are, and what a recipe makes of them. TE's `jax/quantize/helper.py` and `metadata.py`.

Everything is emulated, so that every mode is supported on every machine. TE's modules, which take their quantizers from
`autocast` and keep state in Flax's collections, are not here: `QuantizerFactory.create_set` reads the same recipes.
"""

import functools
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Any

import jax.numpy as jnp

from fuser import recipe as recipes
from fuser.scopes import Scope, scope
from fuser.xla.settings import AmaxComputeAlgo, ScalingMode, matrix_shape, normalized_axis
from refops.arguments import require_flag, shown

NVTE_FP8_COLLECTION_NAME = "fp8_metas"
_recipe: ContextVar[Any] = ContextVar("fuser_xla_recipe", default=None)


class TensorSource(Enum):
    """What a tensor is to a matrix product: its input, its weights, or the gradient of its result."""

    X = 0
    KERNEL = 1
    DGRAD = 2


# --- what is supported --------------------------------------------------------------------------------


def is_scaling_mode_supported(scaling_mode: Any = ScalingMode.NO_SCALING, gpu_id: Any = None) -> Any:
    """Return (True, ""): each `ScalingMode` is, on every device. ValueError unless it is a `ScalingMode`."""
    ScalingMode(scaling_mode)
    return True, ""


def is_fp8_available(scaling_mode: Any = ScalingMode.DELAYED_TENSOR_SCALING, gpu_id: Any = None) -> Any:
    """Deprecated name of `is_scaling_mode_supported`."""
    warnings.warn("is_fp8_available is deprecated: use is_scaling_mode_supported", DeprecationWarning, stacklevel=2)
    return is_scaling_mode_supported(scaling_mode, gpu_id)


def get_supported_scaling_modes() -> list[ScalingMode]:
    """Return all modes but NO_SCALING."""
    return [mode for mode in ScalingMode if mode is not ScalingMode.NO_SCALING]


def get_supported_quantization_recipes() -> list[Any]:
    """Return new recipes, one of each kind that has modes here."""
    return [
        recipes.DelayedScaling(),
        recipes.Float8CurrentScaling(),
        recipes.MXFP8BlockScaling(),
        recipes.NVFP4BlockScaling(),
    ]


# --- recipes ------------------------------------------------------------------------------------------


def _format2dtypes(format_: recipes.Format) -> Any:
    """(forward, backward) scalar types of a recipe's format."""
    e4m3, e5m2, e2m1 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float4_e2m1fn
    forms = recipes.Format
    dtypes = {forms.E4M3: (e4m3, e4m3), forms.E5M2: (e5m2, e5m2), forms.HYBRID: (e4m3, e5m2), forms.E2M1: (e2m1, e2m1)}
    return dtypes.get(format_, (jnp.bfloat16, jnp.bfloat16))


@dataclass
class QuantizeConfig:
    """What a recipe says of quantizers, by TE's names; without a recipe nothing is scaled."""

    INITIALIZED: bool = False
    MARGIN: float = 0.0
    FWD_DTYPE: Any = None
    BWD_DTYPE: Any = None
    AMAX_HISTORY_LEN: int = 0
    AMAX_COMPUTE_ALGO: AmaxComputeAlgo = AmaxComputeAlgo.MAX
    DISABLE_STOCHASTIC_ROUNDING: bool = False
    DISABLE_RHT: bool = False
    DISABLE_2D_QUANTIZATION: bool = False
    COLLECTION_NAME: str = NVTE_FP8_COLLECTION_NAME
    INFERENCE_MODE: bool = False
    mode: ScalingMode = ScalingMode.NO_SCALING

    def is_fp8_enabled(self) -> bool:
        """Whether there is a recipe."""
        return self.INITIALIZED

    def get_scaling_mode(self, tensor_source: TensorSource) -> ScalingMode:
        """Return the mode of a tensor: NVFP4's weights have square blocks."""
        squares = self.mode.is_nvfp4_scaling and not self.DISABLE_2D_QUANTIZATION
        return ScalingMode.NVFP4_2D_SCALING if squares and tensor_source is TensorSource.KERNEL else self.mode

    def is_supported(self) -> Any:
        """Return (True, None)."""
        return True, None


def get_quantize_config_with_recipe(fp8_recipe: Any) -> QuantizeConfig:
    """Return the `QuantizeConfig` of a recipe, or of None.

    Raises:
        ValueError: a recipe without a mode here; delayed scaling with functions of its own, or amaxes that are not
            reduced.
    """
    if fp8_recipe is None:
        return QuantizeConfig()
    if not isinstance(fp8_recipe, recipes.Recipe):
        raise TypeError(f"fp8_recipe must be a recipe or None; got {shown(fp8_recipe)}")
    recipe: Any = fp8_recipe
    config = QuantizeConfig(INITIALIZED=True)
    if recipe.delayed():
        own = callable(recipe.amax_compute_algo) or recipe.scaling_factor_compute_algo is not None
        if own or not recipe.reduce_amax:
            raise ValueError(
                "fp8_recipe must have amax_compute_algo 'max' or 'most_recent', no scaling_factor_compute_algo and "
                f"reduce_amax=True, as in TE's JAX interface; got {recipe}"
            )
        config.mode = ScalingMode.DELAYED_TENSOR_SCALING
        config.MARGIN, config.AMAX_HISTORY_LEN = recipe.margin, recipe.amax_history_len
        config.AMAX_COMPUTE_ALGO = AmaxComputeAlgo(recipe.amax_compute_algo)
    elif recipe.float8_current_scaling():
        config.mode = ScalingMode.CURRENT_TENSOR_SCALING
    elif recipe.mxfp8():
        config.mode = ScalingMode.MXFP8_1D_SCALING
    elif recipe.nvfp4():
        config.mode = ScalingMode.NVFP4_1D_SCALING
        config.DISABLE_STOCHASTIC_ROUNDING, config.DISABLE_RHT = recipe.disable_stochastic_rounding, recipe.disable_rht
        config.DISABLE_2D_QUANTIZATION = recipe.disable_2d_quantization
    else:
        raise ValueError(f"fp8_recipe must be of a kind of get_supported_quantization_recipes(); got {shown(recipe)}")
    format_ = recipe.fp4_format if config.mode.is_nvfp4_scaling else recipe.fp8_format
    config.FWD_DTYPE, config.BWD_DTYPE = _format2dtypes(format_)
    return config


def get_global_quantize_recipe() -> Any:
    """Return the recipe of the innermost `autocast`, or None."""
    return _recipe.get()


@scope
def autocast(enabled: bool = False, recipe: Any = None, mesh_resource: Any = None) -> Iterator[None]:
    """Give `QuantizerFactory.create_set` a recipe in a block.

    Args:
        enabled: False: no recipe in the block.
        recipe: None is `DelayedScaling()`.
        mesh_resource: None; tensors are divided by `jax.shard_map`.

    Raises:
        TypeError: `enabled` is no bool, as a recipe given by position. ValueError: a recipe of another kind, or a mesh.
    """
    require_flag(enabled, "enabled", ". A recipe is given as autocast(enabled=True, recipe=...)")
    if mesh_resource is not None:
        raise ValueError(f"mesh_resource must be None: fuser.xla has no mesh axes; got {shown(mesh_resource)}")
    chosen = (recipes.DelayedScaling() if recipe is None else recipe) if enabled else None
    get_quantize_config_with_recipe(chosen)
    token = _recipe.set(chosen)
    try:
        yield
    finally:
        _recipe.reset(token)


def fp8_autocast(enabled: bool = False, fp8_recipe: Any = None, mesh_resource: Any = None) -> Scope[None]:
    """Deprecated name of `autocast`."""
    warnings.warn("fp8_autocast is deprecated: use autocast", DeprecationWarning, stacklevel=2)
    return autocast(enabled, fp8_recipe, mesh_resource)


# --- what quantizers are made of ----------------------------------------------------------------------


class QuantizeMeta:
    """Fields of a quantizer that a recipe does not tell: scale, amax_history, stochastic_rounding_rng_state, ..."""

    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def get_kwargs_dictionary(self) -> dict[str, Any]:
        """Return name -> value."""
        return self._fields

    @staticmethod
    def merge(a: "QuantizeMeta", b: "QuantizeMeta") -> "QuantizeMeta":
        """Return the fields of both; ValueError where they differ."""
        first, second = a.get_kwargs_dictionary(), b.get_kwargs_dictionary()
        differing = [name for name in first if name in second and first[name] is not second[name]]
        if differing:
            raise ValueError(f"a and b must agree where both have a field; they differ in {', '.join(differing)}")
        return QuantizeMeta(**{**first, **second})


@dataclass
class QuantizeMetaSet:
    """The `QuantizeMeta` of each quantizer of a `QuantizerSet`."""

    x: QuantizeMeta
    kernel: QuantizeMeta
    grad: QuantizeMeta


def update_collections(new: Any, original: Any) -> Any:
    """Return `original`, a mapping such as Flax's FrozenDict, with the values of `new`."""
    return type(original)({**original, **new})


# --- padding ------------------------------------------------------------------------------------------


def remove_padding_from_scale_inv(
    scale_inv: Any, scaling_mode: Any, data_shape: Any, is_colwise: bool = False, flatten_axis: int = -1
) -> Any:
    """Return padded scales without padding.

    Args:
        scale_inv: as many scales as `ScalingMode.get_scale_shape` counts with padding, in any shape.
        data_shape: shape of the data in layout "N".
        is_colwise, flatten_axis: as for `get_scale_shape`.
    """
    matrix, padded, shape = _scale_shapes(scaling_mode, tuple(data_shape), is_colwise, flatten_axis)
    if matrix is None:
        return scale_inv[: shape[0]]
    return scale_inv.reshape(padded)[: matrix[0], : matrix[1]].reshape(shape)


def apply_padding_to_scale_inv(
    scale_inv: Any, scaling_mode: Any, data_shape: Any, is_colwise: bool = False, flatten_axis: int = -1
) -> Any:
    """Return scales without padding with zeros around them, in the shape that `get_scale_shape` has for padded ones."""
    if not scaling_mode.is_block_scaling:
        return scale_inv
    bare, padded = (
        scaling_mode.get_scale_shape(data_shape, "N", is_colwise, is_padded, flatten_axis, True)
        for is_padded in (False, True)
    )
    return jnp.pad(scale_inv.reshape(bare), [(0, large - small) for small, large in zip(bare, padded, strict=True)])


@functools.lru_cache(maxsize=1024)
def _scale_shapes(mode, data_shape, is_colwise, flatten_axis):
    """Shapes of scales: (as a matrix, as a padded one, with the axes of the data); no matrices without blocks."""

    def shape(data_shape, is_padded, axis):
        return mode.get_scale_shape(data_shape, "N", is_colwise, is_padded, axis, broadcast_2d_scale_shape_to_1d=True)

    if not mode.is_block_scaling:
        return None, None, shape(data_shape, False, flatten_axis)
    axis = normalized_axis(flatten_axis, data_shape)
    matrix = matrix_shape(data_shape, axis)
    return shape(matrix, False, 1), shape(matrix, True, 1), shape(data_shape, False, axis)
