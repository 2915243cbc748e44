"""fuser: TransformerEngine's operation and fuser hierarchy in PyTorch, on `cuda_kernels` and `refops`.

The public names of `transformer_engine.pytorch` that the operations need: `ops`, `autocast`, recipes, quantizers,
quantized tensors; and this package's own: `backend` (where the work goes), `explain` (which fusions fired and why),
`fusions` (fusions for a scope). Every name is imported when it is first used, so `import fuser` costs nothing.
"""

import importlib
from typing import Any

from fuser import torch_load as _torch_load

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
        "Float8Tensor",
        "Float8BlockwiseQTensor",
        "MXFP8Tensor",
        "NVFP4Tensor",
        "prepare_for_saving",
        "restore_from_saved",
        "restore_from_func_ctx",
    ),
    "fuser.dtypes": ("DType",),
    "fuser.dispatch": ("backend",),
    "fuser.explanation": ("explain",),
    "fuser.recompute": ("checkpoint",),
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
    if name in _SUBMODULES:
        return importlib.import_module(f"fuser.{name}")
    if name in _HOME_OF:
        value = getattr(importlib.import_module(_HOME_OF[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'fuser' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
