"""Fused operations. Importing this package registers them, in TransformerEngine's order.

Order matters: the first fusion that claims an operation keeps it. TE's Userbuffers fusions (communication overlapped
with products) have no counterpart here.
"""

from fuser.fused.backward_activation_bias import BackwardActivationBias
from fuser.fused.backward_add_rmsnorm import BackwardAddRMSNorm
from fuser.fused.backward_linear_add import BackwardLinearAdd
from fuser.fused.backward_linear_scale import BackwardLinearScale
from fuser.fused.forward_linear_bias_activation import ForwardLinearBiasActivation
from fuser.fused.forward_linear_bias_add import ForwardLinearBiasAdd
from fuser.fused.forward_linear_scale_add import ForwardLinearScaleAdd
from fuser.fused.grouped_mlp import GroupedMLP, GroupedMLP_CuTeGEMMGLU, GroupedMLP_CuTeGEMMUnary
from fuser.fuser import register_backward_fusion, register_forward_backward_fusion, register_forward_fusion
from fuser.op import FusedOperation

__all__ = [
    "BackwardActivationBias",
    "BackwardAddRMSNorm",
    "BackwardLinearAdd",
    "BackwardLinearScale",
    "ForwardLinearBiasActivation",
    "ForwardLinearBiasAdd",
    "ForwardLinearScaleAdd",
    "GroupedMLP",
    "GroupedMLP_CuTeGEMMGLU",
    "GroupedMLP_CuTeGEMMUnary",
]

_FORWARD: tuple[type[FusedOperation], ...] = (ForwardLinearBiasAdd, ForwardLinearBiasActivation, ForwardLinearScaleAdd)
_BACKWARD: tuple[type[FusedOperation], ...] = (
    BackwardLinearAdd,
    BackwardLinearScale,
    BackwardActivationBias,
    BackwardAddRMSNorm,
)
for _fused_op in _FORWARD:
    register_forward_fusion(_fused_op.fuse_forward_ops)
for _fused_op in _BACKWARD:
    register_backward_fusion(_fused_op.fuse_backward_ops)
register_forward_backward_fusion(GroupedMLP.fuse_forward_backward_ops)
