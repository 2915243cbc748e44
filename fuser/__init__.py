"""fuser: TransformerEngine's operation and fuser hierarchy in PyTorch, on `cuda_kernels` and `refops`.

The public names of `transformer_engine.pytorch` that the operations need: `ops`, `autocast`, recipes, quantizers,
quantized tensors; and this package's own: `backend` (where the work goes), `products` (the card that multiplies) and
`current_products` (which one that is now), `explain` (which fusions fired and why), `fusions` (fusions for a scope).
Every name is imported when it is first used, so `import fuser` costs nothing.
"""

import contextlib
import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from fuser import torch_load as _torch_load

if TYPE_CHECKING:  # the same names, for type checkers
    from fuser import compat as compat
    from fuser import dispatch as dispatch
    from fuser import distributed as distributed
    from fuser import functional as functional
    from fuser import gemm as gemm
    from fuser import jit as jit
    from fuser import ops as ops
    from fuser import quantization as quantization
    from fuser import recipe as recipe
    from fuser import xla as xla
    from fuser.cards import current_products as current_products
    from fuser.cards import products as products
    from fuser.comparison import compare as compare
    from fuser.conversion import convert as convert
    from fuser.conversion import load_scaling_state as load_scaling_state
    from fuser.conversion import scaling_state as scaling_state
    from fuser.dispatch import backend as backend
    from fuser.dtypes import DType as DType
    from fuser.explanation import explain as explain
    from fuser.fuser import OperationFuser as OperationFuser
    from fuser.fuser import fusions as fusions
    from fuser.fuser import register_backward_fusion as register_backward_fusion
    from fuser.fuser import register_forward_backward_fusion as register_forward_backward_fusion
    from fuser.fuser import register_forward_fusion as register_forward_fusion
    from fuser.quantization import BlockScaledQuantizer as BlockScaledQuantizer
    from fuser.quantization import BlockScaledTensor as BlockScaledTensor
    from fuser.quantization import DelayedScalingRequest as DelayedScalingRequest
    from fuser.quantization import Float8BlockQuantizer as Float8BlockQuantizer
    from fuser.quantization import Float8BlockwiseQTensor as Float8BlockwiseQTensor
    from fuser.quantization import Float8BlockwiseQTensorStorage as Float8BlockwiseQTensorStorage
    from fuser.quantization import Float8CurrentScalingQuantizer as Float8CurrentScalingQuantizer
    from fuser.quantization import Float8Quantizer as Float8Quantizer
    from fuser.quantization import Float8Tensor as Float8Tensor
    from fuser.quantization import Float8TensorStorage as Float8TensorStorage
    from fuser.quantization import GroupedTensor as GroupedTensor
    from fuser.quantization import HybridQuantizedTensor as HybridQuantizedTensor
    from fuser.quantization import HybridQuantizedTensorStorage as HybridQuantizedTensorStorage
    from fuser.quantization import HybridQuantizer as HybridQuantizer
    from fuser.quantization import IdentityQuantizer as IdentityQuantizer
    from fuser.quantization import IdentityTensor as IdentityTensor
    from fuser.quantization import IdentityTensorStorage as IdentityTensorStorage
    from fuser.quantization import MXFP8Quantizer as MXFP8Quantizer
    from fuser.quantization import MXFP8Tensor as MXFP8Tensor
    from fuser.quantization import MXFP8TensorStorage as MXFP8TensorStorage
    from fuser.quantization import NVFP4Quantizer as NVFP4Quantizer
    from fuser.quantization import NVFP4Tensor as NVFP4Tensor
    from fuser.quantization import NVFP4TensorStorage as NVFP4TensorStorage
    from fuser.quantization import QuantizedTensor as QuantizedTensor
    from fuser.quantization import QuantizedTensorStorage as QuantizedTensorStorage
    from fuser.quantization import Quantizer as Quantizer
    from fuser.quantization import QuantizerRequest as QuantizerRequest
    from fuser.quantization import QuantizerRole as QuantizerRole
    from fuser.quantization import autocast as autocast
    from fuser.quantization import fp8_autocast as fp8_autocast
    from fuser.quantization import fp8_model_init as fp8_model_init
    from fuser.quantization import get_align_size_for_quantization as get_align_size_for_quantization
    from fuser.quantization import get_default_recipe as get_default_recipe
    from fuser.quantization import is_bf16_available as is_bf16_available
    from fuser.quantization import is_fp8_available as is_fp8_available
    from fuser.quantization import is_fp8_block_scaling_available as is_fp8_block_scaling_available
    from fuser.quantization import is_mxfp8_available as is_mxfp8_available
    from fuser.quantization import is_nvfp4_available as is_nvfp4_available
    from fuser.quantization import post_all_gather_processing as post_all_gather_processing
    from fuser.quantization import prepare_for_saving as prepare_for_saving
    from fuser.quantization import quantize_master_weights as quantize_master_weights
    from fuser.quantization import quantized_model_init as quantized_model_init
    from fuser.quantization import restore_from_func_ctx as restore_from_func_ctx
    from fuser.quantization import restore_from_saved as restore_from_saved
    from fuser.recompute import checkpoint as checkpoint
    from fuser.recording import statistics as statistics
    from fuser.utils import deinterleave_glu_tensor as deinterleave_glu_tensor
    from fuser.utils import get_device_compute_capability as get_device_compute_capability
    from fuser.utils import interleave_glu_tensor as interleave_glu_tensor

_HOMES = {
    "fuser.quantization": (
        "autocast",
        "fp8_autocast",
        "quantized_model_init",
        "fp8_model_init",
        "is_bf16_available",
        "is_fp8_available",
        "is_fp8_block_scaling_available",
        "is_mxfp8_available",
        "is_nvfp4_available",
        "get_default_recipe",
        "get_align_size_for_quantization",
        "Quantizer",
        "QuantizerRole",
        "QuantizedTensor",
        "QuantizedTensorStorage",
        "Float8Quantizer",
        "Float8CurrentScalingQuantizer",
        "Float8BlockQuantizer",
        "MXFP8Quantizer",
        "NVFP4Quantizer",
        "BlockScaledQuantizer",
        "BlockScaledTensor",
        "Float8Tensor",
        "Float8BlockwiseQTensor",
        "MXFP8Tensor",
        "NVFP4Tensor",
        "prepare_for_saving",
        "restore_from_saved",
        "restore_from_func_ctx",
        "DelayedScalingRequest",
        "GroupedTensor",
        "post_all_gather_processing",
        "quantize_master_weights",
        "Float8BlockwiseQTensorStorage",
        "Float8TensorStorage",
        "HybridQuantizedTensor",
        "HybridQuantizedTensorStorage",
        "HybridQuantizer",
        "IdentityQuantizer",
        "IdentityTensor",
        "IdentityTensorStorage",
        "MXFP8TensorStorage",
        "NVFP4TensorStorage",
        "QuantizerRequest",
    ),
    "fuser.utils": ("deinterleave_glu_tensor", "get_device_compute_capability", "interleave_glu_tensor"),
    "fuser.dtypes": ("DType",),
    "fuser.cards": ("current_products", "products"),
    "fuser.dispatch": ("backend",),
    "fuser.comparison": ("compare",),
    "fuser.conversion": ("convert", "load_scaling_state", "scaling_state"),
    "fuser.explanation": ("explain",),
    "fuser.recompute": ("checkpoint",),
    "fuser.recording": ("statistics",),
    "fuser.fuser": (
        "OperationFuser",
        "fusions",
        "register_backward_fusion",
        "register_forward_backward_fusion",
        "register_forward_fusion",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
_SUBMODULES = ("ops", "recipe", "functional", "dispatch", "quantization", "distributed", "gemm", "compat", "jit", "xla")

__all__ = sorted([*_HOME_OF, *_SUBMODULES])

_torch_load.register()


def __getattr__(name: str) -> Any:
    try:
        if name in _SUBMODULES:
            return importlib.import_module(f"fuser.{name}")
        if name in _HOME_OF:
            value = getattr(importlib.import_module(_HOME_OF[name]), name)
            globals()[name] = value
            return value
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"fuser.{name} needs PyTorch: pip install '.[fuser]' (fuser.xla needs JAX alone)") from error
    raise AttributeError(f"module 'fuser' has no attribute {name!r}{_hint(name)}")


def _hint(name: str) -> str:
    """Where a missing name is, or which one is like it. `from fuser import module` asks for modules first."""
    if name.startswith("_") or importlib.util.find_spec(f"fuser.{name}") is not None:
        return ""
    did_you_mean = importlib.import_module("refops.arguments").did_you_mean
    hints = [did_you_mean(name, __all__)]
    with contextlib.suppress(ImportError):  # without torch
        for home in ("ops", "recipe", "quantization", "functional"):
            module = importlib.import_module(f"fuser.{home}")
            if hasattr(module, name):
                return f": it is in fuser.{home}"
            hints.append(did_you_mean(name, getattr(module, "__all__", ()), f"fuser.{home}."))
    return next(filter(None, hints), "")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
