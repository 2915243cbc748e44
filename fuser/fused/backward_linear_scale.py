"""Backward `BasicLinear, ConstantScale`: the scale multiplies both gradient products, not the gradient."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fuser.basic.basic_linear import BasicLinear
from fuser.basic.constant_scale import ConstantScale
from fuser.fused.backward_linear_add import column_parallel_objection
from fuser.fused_pattern import WindowFusion
from fuser.op import FusedOperation, OperationContext


class BackwardLinearScale(FusedOperation):
    """`dx = scale * dy W` and `dW = scale * dy^T x`. Quantized compute quantizes the unscaled `dy`."""

    def __init__(self, linear: BasicLinear, scale: ConstantScale) -> None:
        super().__init__([linear, scale])

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor | None, ...]],
    ) -> tuple[torch.Tensor, list[Iterable[torch.Tensor | None]], list[tuple[()]]]:
        linear, scale = self.basic_ops
        grad_input, grad_weight = linear.fused_backward(
            basic_op_ctxs[0], grad_output, grad_input_alpha=scale.scale, grad_weight_alpha=scale.scale
        )
        return grad_input, [(grad_weight,), ()], [(), ()]


def _objection(linear: BasicLinear, scale: ConstantScale, recipe: Any = None) -> str | None:
    return column_parallel_objection(linear)


BackwardLinearScale.fuse_backward_ops = WindowFusion(
    BackwardLinearScale, patterns=[(BasicLinear, ConstantScale)], objection=_objection
)
