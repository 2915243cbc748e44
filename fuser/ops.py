"""The operations, under the names of `transformer_engine.pytorch.ops`.

Importing this module registers the fusions of `fuser.fused`.
"""

from fuser import basic, fused, fuser, linear, op, sequential
from fuser.basic import *  # noqa: F403 (this module is the namespace of all operations)
from fuser.common import publish
from fuser.fuser import register_backward_fusion, register_forward_backward_fusion, register_forward_fusion
from fuser.linear import Linear
from fuser.op import BasicOperation, FusedOperation, FusibleOperation
from fuser.sequential import Sequential

publish(basic._ACTIVATIONS, globals())

__all__ = [
    *basic.__all__,
    "BasicOperation",
    "FusedOperation",
    "FusibleOperation",
    "Linear",
    "Sequential",
    "basic",
    "fused",
    "fuser",
    "linear",
    "op",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
    "sequential",
]
