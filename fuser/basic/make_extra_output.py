"""The start of a residual branch: hands its input to the caller as well."""

from typing import Any

import torch

from fuser.common import reject_forward_kwargs
from fuser.op import ExtraTensorOperation, OperationContext


class MakeExtraOutput(ExtraTensorOperation):
    """Returns `(x, x)`: the input for the next operation, and again as an extra output. Their gradients add up.

    `in_place`: adds into the memory of the extra output's gradient, so that a following linear can accumulate there.
    Whoever made that gradient must not use it afterwards; a fuser hands over a copy if the same memory is the gradient
    of another output as well.
    """

    num_extra_outputs = 1

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self._in_place = in_place

    @property
    def in_place(self) -> bool:
        return self._in_place

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor]]]:
        reject_forward_kwargs(self, basic_op_kwargs[0])
        return input_, [(input_,)]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor | None, ...]],
    ) -> tuple[torch.Tensor, list[tuple[()]], list[tuple[()]]]:
        grad_extra = basic_op_grad_extra_outputs[0][0]
        if grad_extra is None:
            grad_input = grad_output
        elif self._in_place:
            # An expanded gradient (that of a sum) has no memory of its own to add to.
            grad_input = grad_extra.contiguous()
            grad_input += grad_output
        else:
            grad_input = grad_extra + grad_output
        return grad_input, [()], [()]
