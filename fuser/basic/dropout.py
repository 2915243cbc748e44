"""Dropout as a fusible operation. Source: TE behaviour, `ops/basic/dropout.py` and `common/dropout/dropout.cu`."""

import math
from typing import Any

import torch

from fuser.common import autocast_dtype_of, is_quantized_tensor, maybe_dequantize
from fuser.op import BasicOperation, OperationContext
from fuser.tracing import exporting

# A word of eight bytes, 0 or 1, and a byte of eight bits. word * _GATHER has the bits in its highest byte, where no two
# products meet and none carries; byte * _SPREAD has the byte eight times, of which _PICK takes bit i from byte i.
_GATHER = 0x0102040810204080
_SPREAD = 0x0101010101010101
_PICK = 0x8040201008040201 - (1 << 64)


class Dropout(BasicOperation):
    """In training, zero elements with probability p and divide the rest by 1 - p; in evaluation, the identity.

    16-bit tensors whose number of elements is a multiple of 16 take TE's fused path: an element is dropped if a random
    byte is below floor(p * 256), so that the effective probability is a multiple of 1/256; the others are multiplied in
    float32 and rounded once; a bit an element is kept for backward. Other tensors are multiplied by a mask of their
    own dtype, which is kept. Random numbers come from torch's generator of the tensor's device, so that
    `torch.manual_seed` repeats them. The path taken is remembered: `train()` and `eval()` may come before backward.

    p = 1 drops everything (TE divides by zero).

    Args:
        p: probability, 0 to 1.

    Raises:
        ValueError: p outside [0, 1].
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(f"p must be a probability, from 0 to 1; got {p}")
        self.dropout_probability = p

    def op_forward(
        self, ctx: OperationContext, input_: Any, *, prev_op_grad_output_quantizer: Any, next_op_input_quantizer: Any
    ) -> Any:
        dtype = autocast_dtype_of(input_)
        mask = None
        if not self.training:
            ctx.impl, y = "evaluation", input_
        elif dtype in (torch.float16, torch.bfloat16) and not exporting() and input_.numel() % 16 == 0:
            # Quantized data is read directly: no rounding between its dequantization and the product.
            x = maybe_dequantize(input_, torch.float32 if is_quantized_tensor(input_) else dtype)
            keep = _random_keep(x, self.dropout_probability)
            mask = _packed(keep) if ctx.requires_grad else None
            ctx.impl, y = "fused", _scaled(x, keep, self._scale()).to(dtype)
        else:
            x = maybe_dequantize(input_, dtype)
            mask = torch.empty_like(x).bernoulli_(1 - self.dropout_probability).mul_(self._scale())
            ctx.impl, y = "unfused", x * mask
        if ctx.requires_grad:
            ctx.save_for_backward(mask)
            ctx.dtype = dtype
            ctx.scale = self._scale()
        return y

    def passed_through(self, input_: torch.Tensor) -> Any:
        """The input, if the operation passes it through unchanged; else None."""
        return None if self.training else input_

    def op_backward(self, ctx: OperationContext, grad_output: Any) -> Any:
        (mask,) = ctx.saved_tensors
        if ctx.impl == "evaluation":
            return grad_output, ()
        dy = maybe_dequantize(grad_output, ctx.dtype)
        return (_scaled(dy, _unpacked(mask), ctx.scale) if ctx.impl == "fused" else dy * mask), ()

    def _scale(self):
        return 0.0 if self.dropout_probability == 1 else 1 / (1 - self.dropout_probability)


def _random_keep(x, p):
    """A flat bool tensor: which elements of `x`, a multiple of 8, to keep."""
    threshold = math.floor(p * 256)
    if threshold > 255:
        return torch.zeros(x.numel(), dtype=torch.bool, device=x.device)
    # Eight bytes a draw, over all values of an integer: drawing takes most of the time.
    words = torch.empty(x.numel() // 8, dtype=torch.int64, device=x.device).random_(-(2**63), None)
    return words.view(torch.uint8) >= threshold


def _packed(keep):
    """Eight bools a byte, the first in the lowest bit."""
    return ((keep.view(torch.int64) * _GATHER) >> 56).to(torch.uint8)


def _unpacked(bits):
    """The inverse of `_packed`."""
    return ((bits.to(torch.int64) * _SPREAD) & _PICK).view(torch.uint8) != 0


def _scaled(x, keep, scale):
    """`x * scale`, computed in float32 and rounded once, where `keep`, else 0 (for NaN and infinity as well)."""
    return torch.where(keep.view(x.shape), x * scale, 0)
