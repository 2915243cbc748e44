"""Operations that change no value: the identity and a change of shape."""

from collections.abc import Iterable
from typing import Any

import torch

from fuser.op import BasicOperation, OperationContext


class Identity(BasicOperation):
    """Returns its input, quantized or not."""

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Any,
        *,
        prev_op_grad_output_quantizer: Any = None,
        next_op_input_quantizer: Any = None,
    ) -> Any:
        return input_

    def passed_through(self, input_: Any) -> Any:
        """The output as autograd sees it."""
        return input_

    def op_backward(self, ctx: OperationContext, grad_output: Any) -> Any:
        return grad_output, ()


class Reshape(BasicOperation):
    """`x.reshape(*shape)`; one entry of `shape` may be -1."""

    def __init__(self, shape: Iterable[int]) -> None:
        super().__init__()
        self._shape = tuple(shape)

    def op_forward(
        self, ctx: OperationContext, input_: Any, *, prev_op_grad_output_quantizer: Any, next_op_input_quantizer: Any
    ) -> torch.Tensor:
        ctx.input_shape = input_.shape
        return input_.reshape(*self._shape)

    def passed_through(self, input_: torch.Tensor) -> torch.Tensor:
        """The output as autograd sees it."""
        return input_.reshape(*self._shape)

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> Any:
        return grad_output.reshape(*ctx.input_shape), ()
