"""Change of shape."""

from collections.abc import Iterable
from typing import Any

import torch

from fuser.op import BasicOperation, OperationContext


class Reshape(BasicOperation):
    """`x.reshape(*shape)`; one entry of `shape` may be -1."""

    def __init__(self, shape: Iterable[int]) -> None:
        super().__init__()
        self._shape = tuple(shape)

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        *,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
    ) -> torch.Tensor:
        ctx.input_shape = input_.shape
        return input_.reshape(*self._shape)

    def passed_through(self, input_: torch.Tensor) -> torch.Tensor:
        """The output, in autograd's eyes."""
        return input_.reshape(*self._shape)

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> tuple[torch.Tensor, tuple[()]]:
        return grad_output.reshape(*ctx.input_shape), ()
