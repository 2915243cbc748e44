"""The built-in recipes as functions of a role: starting points for your own `CustomRecipe`.

    recipe = CustomRecipe(qfactory=nvfp4_factory)

A function takes a `QuantizerRole`, or None, and returns a new quantizer for each call. It has the defaults of its
recipe; environment variables play no part.

Behaviour: TE's custom_recipes/quantizer_factories.py.
"""

from __future__ import annotations

from fuser.dtypes import DType
from fuser.quantization import (
    DelayedScalingRequest,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizerRole,
)
from refops.arguments import shown

__all__ = [
    "current_scaling_factory",
    "delayed_scaling_factory",
    "float8_block_scaling_factory",
    "high_precision_factory",
    "mxfp8_factory",
    "nvfp4_factory",
]


def tensor_of(role: QuantizerRole | None, *module_types: str) -> str:
    """Which tensor a role is, of an operation of these types (any, if none is given): "input", "weight", "grad_output"
    ..., "" for any other role. TypeError unless it is a role or None."""
    if role is not None and not isinstance(role, QuantizerRole):
        raise TypeError(f"role must be a QuantizerRole or None; got {shown(role)}")
    return role.tensor_type if role is not None and (not module_types or role.module_type in module_types) else ""


def tensor_of_linear(role: QuantizerRole | None) -> str:
    """Which tensor of a linear operation a role is, as `tensor_of`."""
    return tensor_of(role, "linear", "grouped_linear")


def high_precision_factory(role: QuantizerRole | None) -> IdentityQuantizer:
    """Nothing is quantized."""
    return IdentityQuantizer()


def delayed_scaling_factory(role: QuantizerRole | None) -> DelayedScalingRequest:
    """As `DelayedScaling`: the operation keeps scales and amax histories."""
    return DelayedScalingRequest()


def current_scaling_factory(role: QuantizerRole | None) -> Float8CurrentScalingQuantizer:
    """As `Float8CurrentScaling`: E5M2 for output gradients, E4M3 for the rest."""
    gradient = tensor_of(role) == "grad_output"
    return Float8CurrentScalingQuantizer(DType.kFloat8E5M2 if gradient else DType.kFloat8E4M3)


def float8_block_scaling_factory(role: QuantizerRole | None) -> Float8BlockQuantizer:
    """As `Float8BlockScaling`: 128x128 tiles for weights, 1x128 for the rest."""
    weight = tensor_of_linear(role) == "weight"
    return Float8BlockQuantizer(DType.kFloat8E4M3, block_scaling_dim=2 if weight else 1)


def mxfp8_factory(role: QuantizerRole | None) -> MXFP8Quantizer:
    """As `MXFP8BlockScaling`."""
    return MXFP8Quantizer(DType.kFloat8E4M3)


def nvfp4_factory(role: QuantizerRole | None) -> NVFP4Quantizer:
    """As `NVFP4BlockScaling`: 16x16 tiles for weights, the Hadamard transform for inputs and gradients, which are
    rounded stochastically."""
    tensor = tensor_of_linear(role)
    if tensor == "weight":
        return NVFP4Quantizer(with_2d_quantization=True)
    return NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, stochastic_rounding=tensor == "grad_output")
