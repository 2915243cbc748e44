"""Forward `BasicLinear [, Bias], AddExtraInput(in_place=True)`: the product accumulates into the extra input."""

from __future__ import annotations

from typing import Any

import torch

from fuser.basic.add_extra_input import AddExtraInput
from fuser.basic.basic_linear import BasicLinear
from fuser.basic.bias import Bias
from fuser.fused.forward_linear_bias_activation import check_no_kwargs, prepare_bias_backward
from fuser.fused_pattern import WindowFusion
from fuser.op import FusedOperation, OperationContext


class ForwardLinearBiasAdd(FusedOperation):
    """`extra += x W^T (+ b)` in the extra input's dtype; the result is the extra input's memory, never quantized."""

    def __init__(self, linear: BasicLinear, bias: Bias | None, add: AddExtraInput) -> None:
        super().__init__([op for op in (linear, bias, add) if op is not None])
        self._bias_index = None if bias is None else 1

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[torch.Tensor, list[tuple[()]]]:
        check_no_kwargs(self, basic_op_kwargs)
        extra_input = basic_op_extra_inputs[-1][0].detach()
        output = self.basic_ops[0].fused_forward(
            basic_op_ctxs[0],
            input_,
            prev_op_grad_output_quantizer=prev_op_grad_output_quantizer,
            dtype=extra_input.dtype,
            bias=self.basic_ops[self._bias_index].bias if self._bias_index is not None else None,
            out=extra_input,
            accumulate_into_out=True,
        )
        if self._bias_index is not None:
            prepare_bias_backward(self.basic_ops[0], basic_op_ctxs[0], basic_op_ctxs[self._bias_index])
        return output, [()] * len(self.basic_ops)


def add_objection(linear: BasicLinear, *others: Any, recipe: Any = None) -> str | None:
    """Why a product can't accumulate into the extra input of the `AddExtraInput` that ends the window."""
    if linear.tensor_parallel_mode == "row":
        return "the linear is row parallel: its partial sums are reduced before the extra input is added"
    if not others[-1]._in_place:
        return "AddExtraInput is not in place"
    return None


ForwardLinearBiasAdd.fuse_forward_ops = WindowFusion(
    ForwardLinearBiasAdd,
    patterns=[(BasicLinear, Bias, AddExtraInput), (BasicLinear, AddExtraInput)],
    objection=add_objection,
    build=lambda linear, *others: ForwardLinearBiasAdd(linear, others[0] if len(others) == 2 else None, others[-1]),
)
