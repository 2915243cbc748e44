"""Backward `MakeExtraOutput(in_place=True), BasicLinear`: the input gradient accumulates into the extra output's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fuser.basic.basic_linear import BasicLinear
from fuser.basic.make_extra_output import MakeExtraOutput
from fuser.fused_pattern import WindowFusion
from fuser.op import FusedOperation, OperationContext


class BackwardLinearAdd(FusedOperation):
    """`dextra += dy W`, in the dtype of the extra output's gradient. Without such a gradient a plain `dy W`."""

    def __init__(self, backward_add: MakeExtraOutput, linear: BasicLinear) -> None:
        super().__init__([backward_add, linear])

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor | None, ...]],
    ) -> tuple[torch.Tensor, list[Iterable[torch.Tensor | None]], list[tuple[()]]]:
        grad_extra = basic_op_grad_extra_outputs[0][0]
        accumulation = {}
        if grad_extra is not None:
            # An expanded gradient (that of a sum) has no memory of its own to accumulate into
            grad_extra = grad_extra.contiguous()
            accumulation = {"dtype": grad_extra.dtype, "grad_input": grad_extra, "accumulate_into_grad_input": True}
        grad_input, grad_weight = self.basic_ops[1].fused_backward(basic_op_ctxs[1], grad_output, **accumulation)
        return grad_input, [(), (grad_weight,)], [(), ()]


def _objection(backward_add: MakeExtraOutput, linear: BasicLinear, recipe: Any = None) -> str | None:
    if not backward_add._in_place:
        return "MakeExtraOutput is not in place"
    return column_parallel_objection(linear)


def column_parallel_objection(linear: BasicLinear) -> str | None:
    """Why the input gradient of `linear` can't be finished inside its product."""
    if linear.tensor_parallel_mode == "column":
        return "the linear is column parallel: the partial sums of its input gradient must be reduced first"
    return None


BackwardLinearAdd.fuse_backward_ops = WindowFusion(
    BackwardLinearAdd, patterns=[(MakeExtraOutput, BasicLinear)], objection=_objection
)
