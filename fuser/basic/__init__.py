"""Basic operations: one step each, with a hand-written backward. Families of activations share a file."""

from typing import TYPE_CHECKING

from fuser.basic.activation import INTERLEAVED, PLAIN, SCALED, _ActivationOperation
from fuser.basic.basic_linear import BasicLinear
from fuser.basic.bias import Bias
from fuser.basic.collectives import AllGather, AllReduce, ReduceScatter
from fuser.basic.constant_scale import ConstantScale
from fuser.basic.dropout import Dropout
from fuser.basic.grouped_linear import GroupedLinear, is_op_fuser_grouped_tensor_path_supported
from fuser.basic.l2_normalization import L2Normalization
from fuser.basic.normalization import LayerNorm, RMSNorm
from fuser.basic.quantize import Quantize
from fuser.basic.residual import AddExtraInput, MakeExtraOutput
from fuser.basic.structural import Identity, Reshape
from fuser.common import publish

#: Name -> class of every activation, plain and with a scale for each row: see `refops.activations`.
_ACTIVATIONS = {**PLAIN, **INTERLEAVED, **SCALED}
publish(_ACTIVATIONS, globals())

if TYPE_CHECKING:  # the classes of `_ACTIVATIONS`

    def __getattr__(name: str) -> type[_ActivationOperation]: ...


__all__ = [
    "AddExtraInput",
    "AllGather",
    "AllReduce",
    "BasicLinear",
    "Bias",
    "ConstantScale",
    "Dropout",
    "GroupedLinear",
    "Identity",
    "L2Normalization",
    "LayerNorm",
    "MakeExtraOutput",
    "Quantize",
    "RMSNorm",
    "ReduceScatter",
    "Reshape",
    *_ACTIVATIONS,
    "is_op_fuser_grouped_tensor_path_supported",
]
