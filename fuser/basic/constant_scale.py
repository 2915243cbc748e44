"""Multiplication by a constant."""

from typing import Any

import torch

from fuser.op import BasicOperation, OperationContext


class ConstantScale(BasicOperation):
    """`x * scale` for a Python number `scale`, in the dtype that torch gives that product."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def op_forward(
        self, ctx: OperationContext, input_: Any, *, prev_op_grad_output_quantizer: Any, next_op_input_quantizer: Any
    ) -> torch.Tensor:
        return input_ * self.scale

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> Any:
        return grad_output * self.scale, ()
