"""Addition of a bias."""

from typing import Any

import torch

from fuser import functional
from fuser.common import (
    autocast_dtype_of,
    canonicalize_device,
    canonicalize_dtype,
    maybe_dequantize,
    with_memory,
)
from fuser.op import BasicOperation, OperationContext
from fuser.overflow import warn_of_hidden_overflow


class Bias(BasicOperation):
    """`x + bias` over the last dimension.

    `size`: of the bias over all ranks. `bias`: parameter of shape (local size,), zeros at first. `device="meta"`: the
    parameter is allocated in the first forward. `tensor_parallel`: each rank of the group holds a part; `ValueError` if
    `size` is not divisible. The output has the dtype that torch gives the sum; under `torch.autocast` an input in its
    dtype keeps that, as in `torch.nn.Linear`. In backward the gradient may leave quantized, for a preceding linear.
    """

    def __init__(
        self,
        size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel: bool = False,
        tensor_parallel_group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.tensor_parallel_size = torch.distributed.get_world_size(tensor_parallel_group) if tensor_parallel else 1
        self.tensor_parallel = self.tensor_parallel_size > 1
        self.tensor_parallel_group = tensor_parallel_group if self.tensor_parallel else None
        if size % self.tensor_parallel_size != 0:
            raise ValueError(
                "Invalid configuration for tensor parallelism: "
                f"size={size} is not divisible by tensor_parallel_size={self.tensor_parallel_size}"
            )
        self.local_size = size // self.tensor_parallel_size

        device = canonicalize_device(device)
        self.bias = torch.nn.Parameter(torch.empty(self.local_size, device=device, dtype=canonicalize_dtype(dtype)))
        if device.type != "meta":
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the bias to zero, allocating it on torch's default device if it is on the meta device."""
        self.bias = with_memory(self.bias)
        with torch.no_grad():
            self.bias.zero_()

    def op_forward(
        self, ctx: OperationContext, input_: Any, *, prev_op_grad_output_quantizer: Any, next_op_input_quantizer: Any
    ) -> torch.Tensor:
        if ctx.requires_grad:
            ctx.grad_input_quantizer = prev_op_grad_output_quantizer
        x = maybe_dequantize(input_)
        bias: torch.Tensor = self.bias
        if x.dtype is not bias.dtype and x.dtype is autocast_dtype_of(bias):
            bias = bias.to(x.dtype)
        return x + bias

    def op_backward(self, ctx: OperationContext, grad_output: Any) -> tuple[Any, tuple[torch.Tensor]]:
        grad_output = maybe_dequantize(grad_output)
        if grad_output.dim() <= 1:
            return grad_output, (grad_output,)
        if ctx.grad_input_quantizer is None:
            return grad_output, (grad_output.sum(tuple(range(grad_output.dim() - 1))),)
        warn_of_hidden_overflow(grad_output, ctx.grad_input_quantizer)
        grad_bias, grad_input = functional.bgrad_quantize(grad_output, ctx.grad_input_quantizer)
        return grad_input, (grad_bias,)
