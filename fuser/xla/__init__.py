"""Activations and quantization as XLA custom calls in JAX: TE's JAX interface on `cuda_kernels` and `refops`.

Needs `jax`.

    from fuser import xla
    y = xla.activation(x, ("silu", "linear"))                   # x (..., 2, n) -> (..., n); jit, grad, vmap, ...
    q = xla.act_lu(x, ("gelu",), xla.QuantizerFactory.create(scaling_mode=xla.ScalingMode.MXFP8_1D_SCALING))

| module        | TE's module                          | what                                                  |
|---------------|--------------------------------------|-------------------------------------------------------|
| activations   | jax.cpp_extensions.activation, jax.activation | act_lu, dact_lu, quantize_dact_dbias, activation |
| quantization  | jax.cpp_extensions.quantization      | quantize, quantize_dbias, grouped_quantize            |
| helper        | jax.quantize.helper, .metadata       | what is supported, recipes, padding                   |
| settings      | csrc/extensions/misc.h, jax.quantize | activation types, parameters, scaling modes, layouts  |
| quantizers    | jax.quantize.quantizer               | quantizers                                            |
| tensors       | jax.quantize.tensor                  | results                                               |
| calls         |                                      | the routes: XLA's FFI, or a callback                  |
| ffi, cuda     | csrc/extensions                      | FFI handlers in ctypes, for the CPU and for CUDA      |
| compute       |                                      | what a call computes                                  |
"""

try:
    import jax as _jax
except ImportError as error:
    raise ImportError("fuser.xla needs JAX: pip install jax") from error

from fuser.xla import helper
from fuser.xla.activations import act_lu, activation, dact_lu, quantize_dact_dbias
from fuser.xla.calls import current_route, route
from fuser.xla.helper import (
    NVTE_FP8_COLLECTION_NAME,
    QuantizeConfig,
    QuantizeMeta,
    QuantizeMetaSet,
    TensorSource,
    apply_padding_to_scale_inv,
    autocast,
    fp8_autocast,
    get_global_quantize_recipe,
    get_quantize_config_with_recipe,
    get_supported_quantization_recipes,
    get_supported_scaling_modes,
    is_fp8_available,
    is_scaling_mode_supported,
    remove_padding_from_scale_inv,
    update_collections,
)
from fuser.xla.quantization import grouped_dbias, grouped_quantize, quantize, quantize_dbias
from fuser.xla.quantizers import (
    BlockScaleQuantizer,
    CurrentScaleQuantizer,
    DelayedScaleQuantizer,
    GroupedQuantizer,
    NVFP4Quantizer,
    Quantizer,
    QuantizerFactory,
    QuantizerSet,
    compute_scale_from_amax,
    noop_quantizer_set,
)
from fuser.xla.settings import (
    ActivationConfig,
    ActivationEnum,
    ActivationParams,
    AmaxComputeAlgo,
    AmaxScope,
    ClampedSwigluConfig,
    ClampedSwigluParams,
    QuantizeLayout,
    ScalingMode,
    TensorUsage,
)
from fuser.xla.tensors import (
    AbstractBaseTensor,
    GroupedNoScaleTensor,
    GroupedScaledTensor1x,
    NoScaleTensor,
    ScaledTensor,
    ScaledTensor1x,
    ScaledTensor2x,
    ScaledTensorFactory,
)

del _jax

__all__ = [
    "NVTE_FP8_COLLECTION_NAME",
    "AbstractBaseTensor",
    "ActivationConfig",
    "ActivationEnum",
    "ActivationParams",
    "AmaxComputeAlgo",
    "AmaxScope",
    "BlockScaleQuantizer",
    "ClampedSwigluConfig",
    "ClampedSwigluParams",
    "CurrentScaleQuantizer",
    "DelayedScaleQuantizer",
    "GroupedNoScaleTensor",
    "GroupedQuantizer",
    "GroupedScaledTensor1x",
    "NVFP4Quantizer",
    "NoScaleTensor",
    "QuantizeConfig",
    "QuantizeLayout",
    "QuantizeMeta",
    "QuantizeMetaSet",
    "Quantizer",
    "QuantizerFactory",
    "QuantizerSet",
    "ScaledTensor",
    "ScaledTensor1x",
    "ScaledTensor2x",
    "ScaledTensorFactory",
    "ScalingMode",
    "TensorSource",
    "TensorUsage",
    "act_lu",
    "activation",
    "apply_padding_to_scale_inv",
    "autocast",
    "compute_scale_from_amax",
    "current_route",
    "dact_lu",
    "fp8_autocast",
    "get_global_quantize_recipe",
    "get_quantize_config_with_recipe",
    "get_supported_quantization_recipes",
    "get_supported_scaling_modes",
    "grouped_dbias",
    "grouped_quantize",
    "helper",
    "is_fp8_available",
    "is_scaling_mode_supported",
    "noop_quantizer_set",
    "quantize",
    "quantize_dact_dbias",
    "quantize_dbias",
    "remove_padding_from_scale_inv",
    "route",
    "update_collections",
]
