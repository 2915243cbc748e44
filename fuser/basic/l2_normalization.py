"""L2 normalization as a fusible operation. Source: TE behaviour, `ops/basic/l2_normalization.py` and `jit.py`."""

from typing import Any

import torch

from fuser.common import maybe_dequantize
from fuser.op import BasicOperation, OperationContext


class L2Normalization(BasicOperation):
    """y = x / sqrt(sum(x^2) + eps) over the last dimension, without parameters: for queries and keys, a head at a time.

    float32 inside (float64 for float64 tensors), rounded once to the input's dtype. Autocast changes nothing, since no
    operation in here is one that it casts; neighbours' quantizers are ignored.

    Args:
        eps: added to the sum of squares.
        seq_length, micro_batch_size: sizes for which TE compiles its kernels in advance; nothing is compiled here.
    """

    def __init__(
        self, *, eps: float = 1e-6, seq_length: int | None = None, micro_batch_size: int | None = None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.seq_length = seq_length
        self.micro_batch_size = micro_batch_size

    def op_forward(
        self, ctx: OperationContext, input_: Any, *, prev_op_grad_output_quantizer: Any, next_op_input_quantizer: Any
    ) -> Any:
        x = maybe_dequantize(input_)
        wide = _wide(x)
        rsqrt_norm = wide.square().sum(-1, keepdim=True).add_(self.eps).rsqrt_()
        if ctx.requires_grad:
            ctx.save_for_backward(x, rsqrt_norm)
        return (wide * rsqrt_norm).to(x.dtype)

    def op_backward(self, ctx: OperationContext, grad_output: Any) -> Any:
        x, rsqrt_norm = ctx.saved_tensors
        wide, dy = _wide(x), _wide(maybe_dequantize(grad_output))
        squared_norm = wide.square().sum(-1, keepdim=True).add_(self.eps)
        slope = (wide * dy).sum(-1, keepdim=True).div_(squared_norm)
        return (dy - wide * slope).mul_(rsqrt_norm).to(x.dtype), ()


def _wide(tensor):
    return tensor if tensor.dtype == torch.float64 else tensor.float()
