"""Forward `BasicLinear, ConstantScale, AddExtraInput(in_place=True)`: scale and sum inside the product."""

from __future__ import annotations

from typing import Any

import torch

from fuser.basic.add_extra_input import AddExtraInput
from fuser.basic.basic_linear import BasicLinear
from fuser.basic.constant_scale import ConstantScale
from fuser.fused.forward_linear_bias_activation import check_no_kwargs
from fuser.fused.forward_linear_bias_add import add_objection
from fuser.fused_pattern import WindowFusion
from fuser.op import FusedOperation, OperationContext


class ForwardLinearScaleAdd(FusedOperation):
    """`extra += scale * x W^T` in the extra input's dtype; the result is the extra input's memory, never quantized.

    TE refuses an extra input of another dtype than the linear's. The operations one by one take it.
    """

    def __init__(self, linear: BasicLinear, scale: ConstantScale, add: AddExtraInput) -> None:
        super().__init__([linear, scale, add])

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
        linear, scale, _ = self.basic_ops
        extra_input = basic_op_extra_inputs[2][0].detach()
        output = linear.fused_forward(
            basic_op_ctxs[0],
            input_,
            prev_op_grad_output_quantizer=prev_op_grad_output_quantizer,
            dtype=extra_input.dtype,
            alpha=scale.scale,
            out=extra_input,
            accumulate_into_out=True,
        )
        return output, [(), (), ()]


ForwardLinearScaleAdd.fuse_forward_ops = WindowFusion(
    ForwardLinearScaleAdd, patterns=[(BasicLinear, ConstantScale, AddExtraInput)], objection=add_objection
)
