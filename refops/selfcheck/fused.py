"""Fused operations: activation_quantize and activation_grad_quantize, checked against separate calls of refops' own."""

from dataclasses import replace
from functools import partial

import numpy as np

import refops
from refops.activations import ACTIVATIONS
from refops.arguments import BFLOAT16
from refops.quantization.nvfp4 import quantize_nvfp4
from refops.quantization.per_tensor import scale_from_amax
from refops.scaling import CurrentScaling, DelayedScaling, MXFP8Scaling, NVFP4Scaling
from refops.selfcheck.inputs import DTYPES, activation_input, real_activation_inputs, wide_range
from refops.selfcheck.settings import CHECKED
from refops.selfcheck.tally import Task
from refops.tiles import InputSource


def fused_tasks(ops, real):
    """Return the tasks of every scaling, each over every activation and dtype."""
    tasks = []
    for named in CHECKED.values():
        task = partial(Task, "fused", named.name)
        tasks += [
            task(
                "activation, then quantize by the rounding rule of TE's path, bit for bit",
                partial(_check_fused_forward, ops, named, real),
            ),
            task("the same for activation_grad, with dbias", partial(_check_fused_gradient, ops, named, real)),
        ]
    return tasks


def _quantize_separately(rounded, unrounded, scaling):
    """What a fused operation must give, from the activation's output rounded to the input dtype and in float32.

    Delayed scaling quantizes the unrounded values. Current scaling and NVFP4 quantize the rounded ones with the amax of
    the unrounded ones. MXFP8, block scaling, NVFP4 with RHT or row scaling quantize the rounded tensor as it is.
    """
    if isinstance(scaling, DelayedScaling):
        return refops.quantize(unrounded, scaling, columnwise=True)
    if isinstance(scaling, CurrentScaling):
        amax = np.fmax.reduce(np.abs(unrounded), axis=None, initial=np.float32(0)).reshape(1)
        scale = scale_from_amax(amax, scaling.fmt, epsilon=scaling.amax_epsilon, power_2=scaling.power_2_scale)
        result = refops.quantize(rounded, DelayedScaling(scaling.fmt, float(scale[0])), columnwise=True)
        return replace(result, amax_rowwise=amax, amax_columnwise=amax)
    if isinstance(scaling, NVFP4Scaling) and not (scaling.rht or scaling.row_scaled):
        return quantize_nvfp4(InputSource(rounded), InputSource(unrounded), scaling, rowwise=True, columnwise=True)
    return refops.quantize(rounded, scaling, columnwise=True)


def _fused_inputs(named, real):
    """Yield (label, activation, x, dy): every activation in every dtype, specials included; GELU on real tensors."""
    rng = np.random.default_rng(11)
    act, gate, dy = (wide_range(rng, 32, 160) for _ in range(3))
    act[0, :7] = [np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-42, -0.0]
    dy[1, :3] = [np.nan, np.inf, -np.inf]
    finite_act, finite_gate, finite_dy = (wide_range(rng, 32, 64) for _ in range(3))
    for name in ACTIVATIONS:
        for dtype in DTYPES:
            x = activation_input(name, act, gate)
            yield f"{named.name} {name} {dtype.name}", name, x.astype(dtype), dy.astype(dtype)
        x = activation_input(name, finite_act, finite_gate)
        yield f"{named.name} {name} finite", name, x.astype(BFLOAT16), finite_dy.astype(BFLOAT16)
    for label, x, dy in real_activation_inputs("gelu", real):
        yield f"{named.name} {label}", "gelu", x, dy


def _check_fused_forward(ops, named, real, tally):
    for label, name, x, _ in _fused_inputs(named, real):
        got = ops.activation_quantize(name, x, named.scaling, columnwise=True)
        rounded, unrounded = refops.activation(name, x), refops.activation(name, x, out_dtype=np.float32)
        expected = _quantize_separately(rounded, unrounded, named.scaling)
        tally.quantized(label, got, expected)
        tally.amaxes(label, got, expected)


def _check_fused_gradient(ops, named, real, tally):
    for label, name, x, dy in _fused_inputs(named, real):
        got, dbias = ops.activation_grad_quantize(name, dy, x, named.scaling, columnwise=True, dbias=True)
        rounded, rounded_dbias = refops.activation_grad(name, dy, x, dbias=True)
        unrounded, unrounded_dbias = refops.activation_grad(
            name, dy.astype(np.float32), x.astype(np.float32), dbias=True
        )
        expected = _quantize_separately(rounded, unrounded, named.scaling)
        tally.quantized(label, got, expected)
        tally.amaxes(label, got, expected)
        fused_sum = isinstance(named.scaling, DelayedScaling | MXFP8Scaling)
        tally.equal(f"{label} dbias", dbias, unrounded_dbias.astype(x.dtype) if fused_sum else rounded_dbias)
