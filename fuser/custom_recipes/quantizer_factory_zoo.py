"""Functions of a role for mixed `CustomRecipe`s: another format in backward than in forward.

| forward              | backward          | function                                          |
|----------------------|-------------------|---------------------------------------------------|
| high precision       | MXFP8             | `high_precision_fwd_mxfp8_bwd_factory`            |
| MXFP8                | NVFP4             | `mxfp8_fwd_nvfp4_bwd_factory`                     |
| NVFP4, 1x16          | NVFP4, 1x16       | `nvfp4_1d_weight_factory`                         |
| MXFP8                | high precision    | `mxfp8_fwd_high_precision_bwd_factory`            |
| row-scaled NVFP4 (1) | MXFP8             | `nvfp4_row_scaled_fwd_mxfp8_bwd_factory`          |
| row-scaled NVFP4     | high precision    | `nvfp4_row_scaled_fwd_high_precision_bwd_factory` |

(1) Of the module type "grouped_linear" alone. The operations' roles say "linear", as TE's do, also those of
`GroupedLinear`: they get MXFP8 in both directions, and a warning.

Behaviour: TE's custom_recipes/quantizer_factory_zoo.py, without the factory for attention.
"""

from __future__ import annotations

import warnings

from fuser.custom_recipes.quantizer_factories import mxfp8_factory, nvfp4_factory, tensor_of, tensor_of_linear
from fuser.quantization import HybridQuantizer, IdentityQuantizer, NVFP4Quantizer, Quantizer, QuantizerRole

__all__ = [
    "high_precision_fwd_mxfp8_bwd_factory",
    "mxfp8_fwd_high_precision_bwd_factory",
    "mxfp8_fwd_nvfp4_bwd_factory",
    "nvfp4_1d_weight_factory",
    "nvfp4_row_scaled_fwd_high_precision_bwd_factory",
    "nvfp4_row_scaled_fwd_mxfp8_bwd_factory",
]


def _requantized(rowwise: Quantizer, columnwise: Quantizer) -> HybridQuantizer:
    """Backward reads what forward multiplied, quantized once more."""
    return HybridQuantizer(
        rowwise_quantizer=rowwise, columnwise_quantizer=columnwise, columnwise_source="rowwise_dequantized"
    )


def high_precision_fwd_mxfp8_bwd_factory(role: QuantizerRole | None) -> Quantizer:
    """Forward in high precision; backward reads MXFP8."""
    if tensor_of_linear(role) == "grad_output":
        return mxfp8_factory(role)
    return HybridQuantizer(rowwise_quantizer=IdentityQuantizer(), columnwise_quantizer=mxfp8_factory(role))


def mxfp8_fwd_nvfp4_bwd_factory(role: QuantizerRole | None) -> Quantizer:
    """Forward in MXFP8; backward in NVFP4: the weight from its MXFP8 values, the input from the original ones."""
    tensor = tensor_of_linear(role)
    if tensor == "input":
        return HybridQuantizer(rowwise_quantizer=mxfp8_factory(role), columnwise_quantizer=nvfp4_factory(role))
    if tensor == "weight":
        return _requantized(mxfp8_factory(role), NVFP4Quantizer())
    return nvfp4_factory(role) if tensor == "grad_output" else mxfp8_factory(role)


def nvfp4_1d_weight_factory(role: QuantizerRole | None) -> Quantizer:
    """NVFP4 with weights in blocks along a line, quantized once more for backward, instead of in 16x16 tiles."""
    if tensor_of_linear(role) == "weight":
        return _requantized(NVFP4Quantizer(), NVFP4Quantizer())
    return nvfp4_factory(role)


def mxfp8_fwd_high_precision_bwd_factory(role: QuantizerRole | None) -> Quantizer:
    """Forward in MXFP8; backward in high precision, of what forward multiplied."""
    tensor = tensor_of_linear(role)
    if tensor in ("input", "weight"):
        return _requantized(mxfp8_factory(role), IdentityQuantizer())
    return IdentityQuantizer() if tensor == "grad_output" else mxfp8_factory(role)


def nvfp4_row_scaled_fwd_mxfp8_bwd_factory(role: QuantizerRole | None) -> Quantizer:
    """Of `module_type` "grouped_linear": forward in NVFP4, with an amax for each row of the input; backward in MXFP8,
    of what forward multiplied. Everything else in MXFP8.

    The roles of all operations say "linear", as TE's do, so they get MXFP8 in both directions: a `UserWarning` says so.
    A function of your own chooses the operations that get NVFP4, by name, say:

        def qfactory(role):
            experts = role.name.startswith("experts")
            return factory(dataclasses.replace(role, module_type="grouped_linear") if experts else role)
    """
    tensor = tensor_of(role, "grouped_linear")
    if tensor_of(role, "linear") in ("input", "weight"):
        warnings.warn(
            "nvfp4_row_scaled_fwd_mxfp8_bwd_factory makes row-scaled NVFP4 for the module_type 'grouped_linear' alone, "
            "and the roles of operations say 'linear': this one is MXFP8 in both directions. Give the factory roles "
            "with that module_type for the operations that should be NVFP4",
            UserWarning,
            stacklevel=2,
        )
    if tensor in ("input", "weight"):
        return _requantized(NVFP4Quantizer(row_scaled_nvfp4=tensor == "input"), mxfp8_factory(role))
    return mxfp8_factory(role)


def nvfp4_row_scaled_fwd_high_precision_bwd_factory(role: QuantizerRole | None) -> Quantizer:
    """Forward in NVFP4, with an amax for each row of the input; backward in high precision, of what forward
    multiplied."""
    tensor = tensor_of_linear(role)
    if tensor in ("input", "weight"):
        return _requantized(NVFP4Quantizer(row_scaled_nvfp4=tensor == "input"), IdentityQuantizer())
    return IdentityQuantizer() if tensor == "grad_output" else NVFP4Quantizer()
