"""What files of quantized tensors name: `torch.load(..., weights_only=True)` calls it if it was registered.

It is when `fuser` is imported after torch, and with the first name of `fuser` that needs torch. `import fuser` alone
does not import torch: `fuser.xla` works without.
"""

import importlib
import sys
from typing import Any


def rebuild_quantized_tensor(*args: Any) -> Any:
    """Make the tensor of a file; the rest of the package is imported when the first one is loaded."""
    return importlib.import_module("fuser.quantization.tensor").rebuild(*args)


def rebuild_grouped_tensor(*args: Any) -> Any:
    """As `rebuild_quantized_tensor`, of a `GroupedTensor`."""
    return importlib.import_module("fuser.quantization.grouped").rebuild(*args)


def register() -> None:
    """Allow quantized tensors in `torch.load`, if torch is there."""
    if "torch" in sys.modules:
        import torch

        torch.serialization.add_safe_globals([rebuild_quantized_tensor, rebuild_grouped_tensor])
