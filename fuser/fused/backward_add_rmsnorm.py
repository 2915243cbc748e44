"""Backward of an extra output and the RMSNorm behind it. Source: TE behaviour, `ops/fused/backward_add_rmsnorm.py`."""

from typing import Any

from fuser.basic.normalization import RMSNorm
from fuser.basic.residual import MakeExtraOutput
from fuser.fused_pattern import WindowFusion
from fuser.op import FusedOperation


class BackwardAddRMSNorm(FusedOperation):
    """RMSNorm's input gradient plus that of the extra output before it, added in float32: one rounding instead of two.

    A missing gradient of the extra output counts as zero.

    Args:
        add: the residual branch's `MakeExtraOutput`.
        rmsnorm: what follows it.
    """

    def __init__(self, add: MakeExtraOutput, rmsnorm: RMSNorm) -> None:
        super().__init__((add, rmsnorm))

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, *, basic_op_grad_extra_outputs: Any) -> Any:
        (extra_gradient,) = basic_op_grad_extra_outputs[0]
        dx, gradients = self.basic_ops[1].op_backward(basic_op_ctxs[1], grad_output, extra_gradient=extra_gradient)
        return dx, [(), gradients], [(), ()]


def _objection(add: MakeExtraOutput, rmsnorm: RMSNorm, *, recipe: Any) -> str | None:
    if add.in_place:
        return "the MakeExtraOutput is in place"
    return None


BackwardAddRMSNorm.fuse_backward_ops = WindowFusion(
    BackwardAddRMSNorm, patterns=[(MakeExtraOutput, RMSNorm)], objection=_objection
)
