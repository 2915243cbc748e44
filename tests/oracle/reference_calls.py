"""A call of every operation under every scaling, and what the reference writes: outputs that the oracle must accept."""

import ml_dtypes
import numpy as np

import refops
from arrays import heavy_tailed
from refops.oracle.operation import OPERATIONS, Case
from refops.survey import SCALINGS

F = np.float32
FP32, FP16, BF16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
E4M3, E5M2 = refops.E4M3, refops.E5M2
MXFP8 = refops.MXFP8Scaling(E4M3)
#: Settings beyond the named ones: every branch of the enclosure.
MORE_SCALINGS = {
    "block-1x128-f32": refops.BlockScaling(E4M3, 1, power_2_scale=False, amax_epsilon=1e-3),
    "block-128x128-f32-e5m2": refops.BlockScaling(E5M2, 2, power_2_scale=False),
    "mxfp8-2d": refops.MXFP8Scaling(E4M3, two_d=True),
    "mxfp8-even": refops.MXFP8Scaling(E4M3, scale_rounding="even"),
    "mxfp8-ceil": refops.MXFP8Scaling(E5M2, scale_rounding="ceil_ocp"),
    "mxfp6-e3m2": refops.MXFP8Scaling(refops.E3M2),
    "mxfp6-e2m3-2d": refops.MXFP8Scaling(refops.E2M3, two_d=True),
    "nvfp4-mse": refops.NVFP4Scaling(four_over_six="mse"),
    "nvfp4-mse-2d": refops.NVFP4Scaling(four_over_six="mse", e4m3_max=256, two_d=True),
    "nvfp4-sr-2d": refops.NVFP4Scaling(stochastic_rounding=True, two_d=True, seed=7),
    "nvfp4-sr-rht": refops.NVFP4Scaling(stochastic_rounding=True, rht=True, seed=7),
}
ALL_SCALINGS = {name: row.scaling for name, row in SCALINGS.items()} | MORE_SCALINGS


def call(op, scaling=None, dtype=BF16, shape=(96, 160), params=None):
    """(inputs, everything the reference writes, keyword arguments of check) of a call."""
    operation = OPERATIONS[op]
    params = dict(params or {})
    m, k = shape
    gated = operation.activation is not None and refops.ACTIVATIONS[operation.activation].gated
    if operation.kind == "dequantize":
        inputs = refops.quantize(heavy_tailed(shape, dtype), scaling)
        outputs, scaling = {"y": refops.dequantize(inputs)}, None
    elif operation.kind == "update_delayed_scale":
        params.setdefault("fmt", E4M3)
        inputs = {"amax_history": np.abs(heavy_tailed((8, 5), FP32)), "scale": np.full(5, 2, F)}
        history, scale = refops.update_delayed_scale(*inputs.values(), **params)
        outputs = {"amax_history": history, "scale": scale}
    else:
        inputs = {"x": heavy_tailed((m, 2 * k if gated else k), dtype)}
        if "row_scales" in operation.inputs:
            inputs["row_scales"] = heavy_tailed((m,), FP32, seed=2)
        if "dy" in operation.inputs:
            inputs["dy"] = heavy_tailed(shape, dtype, seed=1)
        case = Case(op, inputs, scaling, params)
        outputs = {name: np.zeros(slot.shape, slot.dtype) for name, slot in case.slots.items()}
        outputs = case.reference(outputs)
    return inputs, {k: np.array(v) for k, v in outputs.items()}, {"scaling": scaling, "params": params}


def every_call():
    for op, operation in OPERATIONS.items():
        if operation.kind == "dequantize":
            yield from ((op, name) for name in ALL_SCALINGS)
            continue
        if operation.kind != "quantize":
            yield op, None
        if operation.takes_scaling and operation.activation in (None, "gelu", "swiglu", "srelu", "situglu"):
            yield from ((op, name) for name in ALL_SCALINGS)
