"""Gradients whose inf or NaN a cast makes finite, so that `torch.amp.GradScaler`, which looks for them, misses them.

Casts saturate, as TransformerEngine's do. What becomes of an inf or a NaN is the format's: one with E8M0 scales has inf
again where its products are computed, one with a float32 scale has the largest number; of NaN formats of 4 and 6 bits
make a number.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch

from fuser.quantization.quantizer import Quantizer
from fuser.quantization.state import FP8GlobalStateManager
from fuser.quantization.storage import DIRECTIONS, BufferStorage


def warn_of_hidden_overflow(
    gradient: Any, quantizer: Quantizer | None, *, before_cast: Callable[[], torch.Tensor] | None = None
) -> None:
    """Warn if `gradient`, about to be cast, has inf or NaN where what `quantizer` makes of it has none.

    `before_cast`: returns what is cast, where that is computed from `gradient` by the kernel that casts. It is called
    for gradients with inf or NaN alone.

    On a GPU of float16 gradients alone, the dtype that GradScaler is for, since one waits for the answer; and not while
    a CUDA graph is captured, which can't wait.
    """
    if quantizer is None or type(gradient) is not torch.Tensor or gradient.is_meta:
        return
    half = gradient.dtype == torch.float16
    if gradient.device.type != "cpu" and (not half or FP8GlobalStateManager.fp8_graph_capturing()):
        return
    if math.isfinite(gradient.sum(dtype=torch.float32 if half else None).item()):  # a fraction of the cast's time
        return
    gradient = gradient if before_cast is None else before_cast()
    for value, name, there in ((math.inf, "inf", gradient.isinf()), (math.nan, "NaN", gradient.isnan())):
        if there.any() and _hides(quantizer, value):
            warnings.warn(
                f"{type(quantizer).__name__} casts a gradient with {name} to finite values, so that "
                "torch.amp.GradScaler may not see that this step has to be skipped. Use MXFP8 for gradients, which "
                "keeps inf and NaN, or a recipe with backward_override='high_precision'",
                UserWarning,
                stacklevel=2,
            )


def _hides(quantizer, value):
    """Whether a copy that `quantizer` makes of a tensor with `value` in it is finite."""
    if quantizer.storage_class is None or not issubclass(quantizer.storage_class, BufferStorage):
        return False  # a caller's own: what it makes is not known
    probe = torch.ones(128, 128)
    probe[0, 0] = value
    quantizer = quantizer.copy_for_result()
    with torch.no_grad(), torch.random.fork_rng(devices=()):  # stochastic rounding draws a seed
        for direction in DIRECTIONS:
            if quantizer.get_usages()[direction]:
                buffers = quantizer.quantize_buffers(probe, **{d: d == direction for d in DIRECTIONS})
                if quantizer.storage_class(buffers, quantizer=quantizer).dequantize().isfinite().all():
                    return True
    return False
