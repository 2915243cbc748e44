"""Forward `BasicLinear, Bias`: the bias joins the product's float32 sums, one rounding instead of two."""

from __future__ import annotations

from typing import Any

import torch

from fuser.basic.basic_linear import BasicLinear
from fuser.basic.bias import Bias
from fuser.fused_pattern import WindowFusion
from fuser.op import FusedOperation, FusibleOperation, OperationContext


class ForwardLinearBiasActivation(FusedOperation):
    """`x W^T + b` in one step. Activations aren't supported (`NotImplementedError`), as in TE."""

    def __init__(
        self, linear: BasicLinear, bias: Bias | None = None, activation: FusibleOperation | None = None
    ) -> None:
        super().__init__([op for op in (linear, bias, activation) if op is not None])
        self._bias_index = None if bias is None else 1
        self._has_activation = activation is not None

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
        if self._has_activation:
            raise NotImplementedError("Activations are not supported in ForwardLinearBiasActivation")
        check_no_kwargs(self, basic_op_kwargs)
        linear_ctx = basic_op_ctxs[0]
        output = self.basic_ops[0].fused_forward(
            linear_ctx,
            input_,
            prev_op_grad_output_quantizer=prev_op_grad_output_quantizer,
            output_quantizer=next_op_input_quantizer,
            bias=self.basic_ops[self._bias_index].bias if self._bias_index is not None else None,
        )
        if self._bias_index is not None:
            prepare_bias_backward(self.basic_ops[0], linear_ctx, basic_op_ctxs[self._bias_index])
        return output, [()] * len(self.basic_ops)


def prepare_bias_backward(linear: BasicLinear, linear_ctx: OperationContext, bias_ctx: OperationContext) -> None:
    """Leave in the context of a `Bias` after `linear` what its unfused backward pass reads."""
    quantized_backward = linear_ctx.with_quantized_compute
    bias_ctx.grad_input_quantizer = linear.get_grad_output_quantizer() if quantized_backward else None


def check_no_kwargs(fused_op: FusedOperation, basic_op_kwargs: list[dict[str, Any]]) -> None:
    """None of these ops takes keyword arguments: `ValueError` as in TE."""
    for op, kwargs in zip(fused_op.basic_ops, basic_op_kwargs, strict=True):
        if kwargs:
            raise ValueError(
                f"{type(op).__name__} operation forward does not expect keyword arguments (got {sorted(kwargs)})"
            )


def _objection(linear: BasicLinear, bias: Bias, recipe: Any = None) -> str | None:
    if linear.tensor_parallel_mode == "row":
        return "the linear is row parallel: its partial sums are reduced before the bias is added"
    if linear.weight.dtype not in (torch.float16, torch.bfloat16):
        return f"the weight is {linear.weight.dtype}: TE fuses the bias for float16 and bfloat16 alone"
    return None


ForwardLinearBiasActivation.fuse_forward_ops = WindowFusion(
    ForwardLinearBiasActivation, patterns=[(BasicLinear, Bias)], objection=_objection
)
