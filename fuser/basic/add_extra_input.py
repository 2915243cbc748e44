"""The end of a residual branch: adds a second input."""

from typing import Any

import torch

from fuser.common import maybe_dequantize, reject_forward_kwargs
from fuser.op import ExtraTensorOperation, OperationContext


class AddExtraInput(ExtraTensorOperation):
    """`extra + x` for an extra input of the shape of `x`; both get the output's gradient.

    `in_place`: adds into the extra input's memory and returns a view of it, so that a preceding linear can accumulate
    there. The extra input has changed afterwards; a fuser hands over a copy instead if the caller gave the same memory
    as another input of the pipeline as well.
    """

    num_extra_inputs = 1
    extra_input_names = ("summand",)

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self._in_place = in_place

    @property
    def in_place(self) -> bool:
        return self._in_place

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Any,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[torch.Tensor, list[tuple[()]]]:
        reject_forward_kwargs(self, basic_op_kwargs[0])
        extra_input = basic_op_extra_inputs[0][0]
        if self._in_place:
            output = extra_input.detach()
            output += maybe_dequantize(input_)
        else:
            output = maybe_dequantize(extra_input) + maybe_dequantize(input_)
        return output, [()]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> tuple[torch.Tensor, list[tuple[()]], list[tuple[torch.Tensor]]]:
        return grad_output, [()], [(grad_output,)]
