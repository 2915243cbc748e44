"""torch's tensors as NumPy arrays of the same bits. torch itself is never imported: its dtypes are matched by name."""

import sys

import ml_dtypes
import numpy as np

#: torch's dtypes that NumPy lacks: name -> (dtype of the same size that both have, what its bits mean).
_TORCH_ONLY = {
    "bfloat16": ("int16", np.dtype(ml_dtypes.bfloat16)),
    "float8_e4m3fn": ("uint8", np.dtype(ml_dtypes.float8_e4m3fn)),
    "float8_e5m2": ("uint8", np.dtype(ml_dtypes.float8_e5m2)),
    "float8_e4m3fnuz": ("uint8", np.dtype(ml_dtypes.float8_e4m3fnuz)),
    "float8_e5m2fnuz": ("uint8", np.dtype(ml_dtypes.float8_e5m2fnuz)),
    "float8_e8m0fnu": ("uint8", np.dtype(ml_dtypes.float8_e8m0fnu)),
    "float4_e2m1fn_x2": ("uint8", np.dtype(np.uint8)),
}


def is_torch_tensor(value):
    """Whether a value is a torch tensor, or of a class that is derived from it."""
    modules = (cls.__module__.split(".")[0] for cls in type(value).__mro__)
    return "torch" in modules and hasattr(value, "detach")


def from_torch(tensor):
    """A tensor on the CPU as an array of its bits, without its gradient; their memory is shared where torch can."""
    tensor = tensor.detach().resolve_neg()
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _TORCH_ONLY:
        return tensor.numpy()
    carrier, dtype = _TORCH_ONLY[name]
    return tensor.view(getattr(sys.modules["torch"], carrier)).numpy().view(dtype)
