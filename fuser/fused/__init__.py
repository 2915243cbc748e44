"""Fused operations. Importing this package registers them, in TransformerEngine's order.

Order matters: the first fusion that claims an operation keeps it. TE's Userbuffers fusions (communication overlapped
with products) have no counterpart here.
"""

from fuser.fused.backward_activation_bias import BackwardActivationBias
from fuser.fused.backward_add_rmsnorm import BackwardAddRMSNorm
from fuser.fused.grouped_mlp import GroupedMLP, GroupedMLP_CuTeGEMMGLU, GroupedMLP_CuTeGEMMUnary
from fuser.fused.linear import (
    BackwardLinearAdd,
    BackwardLinearScale,
    ForwardLinearBiasActivation,
    ForwardLinearBiasAdd,
    ForwardLinearScaleAdd,
)
from fuser.fuser import register_backward_fusion, register_forward_backward_fusion, register_forward_fusion

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

register_forward_fusion(ForwardLinearBiasAdd.fuse_forward_ops)
register_forward_fusion(ForwardLinearBiasActivation.fuse_forward_ops)
register_forward_fusion(ForwardLinearScaleAdd.fuse_forward_ops)
register_backward_fusion(BackwardLinearAdd.fuse_backward_ops)
register_backward_fusion(BackwardLinearScale.fuse_backward_ops)
register_backward_fusion(BackwardActivationBias.fuse_backward_ops)
register_backward_fusion(BackwardAddRMSNorm.fuse_backward_ops)
register_forward_backward_fusion(GroupedMLP.fuse_forward_backward_ops)
