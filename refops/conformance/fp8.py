"""FP8 with one scale a tensor or a block: scales, casts, delayed updates, dequantization."""

import numpy as np

from refops import ops
from refops.conformance.vectors import DTYPES
from refops.formats import E4M3, E5M2, FORMATS, encode
from refops.quantization import block, per_tensor
from refops.quantization.result import Quantized
from refops.scaling import BlockScaling, CurrentScaling


def compare_scale_from_amax(v):
    """Scale and reciprocal for every amax, epsilon, power-of-two setting and input dtype."""
    amax = v.arrays["amax_bits"].view(np.float32)
    for variant in v.variants:
        scale = per_tensor.scale_from_amax(
            amax,
            FORMATS[variant["fp8"]],
            epsilon=variant["eps"],
            power_2=variant["pow_2_scales"],
            value_for_inf=np.float32(variant["value_for_inf"]),
        )
        name = f"FP8 scale from amax, {_settings(variant)}, {variant['x_dtype']}"
        v.compare_floats(name, scale, v.arrays[f"{variant['id']}_scale_bits"])
        v.compare_floats(name + ", inverse", np.float32(1) / scale, v.arrays[f"{variant['id']}_scale_inv_bits"])


def compare_fp8_current(v):
    """Per-tensor current scaling. TE's Python reference caps an overflowing scale at the input dtype's maximum."""
    for variant in v.variants:
        x = v.tensor(variant["input"])
        fmt = FORMATS[variant["fp8"]]
        q = ops.quantize(x, CurrentScaling(fmt, variant["pow_2_scales"], variant["eps"]), columnwise=True)
        # What that reference computes, from the same pieces with its own cap.
        scale = per_tensor.scale_from_amax(
            q.amax_rowwise,
            fmt,
            epsilon=variant["eps"],
            power_2=variant["pow_2_scales"],
            value_for_inf=block.LARGEST_SCALE[x.dtype],
        )
        documented = {"divergence": "TE's Python reference caps an overflowing scale at the input dtype's maximum"}
        name = f"FP8 current, {_settings(variant)}"
        theirs = v.arrays[f"{variant['id']}_q"]
        expected = encode(x.astype(np.float32) * scale, fmt)
        v.compare_codes(name + ", codes", q.rowwise_data, theirs, fmt, expected=expected, **documented)
        v.compare_codes(
            name + ", transposed codes", q.columnwise_data, theirs.T, fmt, expected=expected.T, **documented
        )
        inverse = (np.float32(1) / scale).view(np.uint32)
        v.compare_floats(
            name + ", scale_inv",
            q.rowwise_scale_inv,
            v.arrays[f"{variant['id']}_scale_inv_bits"],
            expected=inverse,
            **documented,
        )


def compare_fp8_delayed_update(v):
    """24 steps of history and scale. TE's Python path differs from its kernel in two ways, re-derived here."""
    steps = v.arrays["step_amax"]
    for variant in v.variants:
        history = np.zeros((variant["history_len"], steps.shape[1]), np.float32)
        scale = their_scale = np.ones(steps.shape[1], np.float32)
        fmt = E4M3 if variant["fp8_max"] == 448 else E5M2
        histories, scales, their_scales = [], [], []
        for amax in steps:
            history = np.concatenate([amax[None], history[1:]])
            their_scale = te_python_delayed_scale(history, their_scale, fmt, variant["margin"], variant["algo"])
            history, scale = per_tensor.update_delayed_scale(
                history, scale, fmt, margin=variant["margin"], algorithm=variant["algo"], keep_unused=False
            )
            histories.append(history)
            scales.append(scale)
            their_scales.append(their_scale)
        rule = f"{variant['algo']}, length {variant['history_len']}, margin {variant['margin']}"
        name = f"delayed update, {rule}, {fmt!r}"
        v.compare_floats(f"{name}, history", np.stack(histories), v.arrays[f"{variant['id']}_history_bits"])
        v.compare_floats(
            f"{name}, scale",
            np.stack(scales),
            v.arrays[f"{variant['id']}_scale_bits"],
            divergence="TE's Python path multiplies by 1 / amax and keeps the scale while a NaN is in the history",
            expected=np.stack(their_scales).view(np.uint32),
        )


def te_python_delayed_scale(history, scale, fmt, margin, algorithm):
    """The next scale as TE's Python path computes it: torch turns `number / tensor` into `reciprocal * number`."""
    amax = np.max(history, axis=0) if algorithm == "max" else history[0]
    fresh = (np.float32(1) / amax * fmt.max) / np.float32(2.0**margin)
    fresh = np.where((amax > 0) & np.isfinite(amax), fresh, scale)
    return np.where(np.isinf(fresh), np.finfo(np.float32).max, fresh).astype(np.float32)


def compare_fp8_block(v):
    """1x128 and 128x128 blocks, rowwise and transposed."""
    for variant in v.variants:
        x = v.tensor(variant["input"])
        fmt = FORMATS[variant["fp8"]]
        two_d = variant["tile"] == [128, 128]
        scaling = BlockScaling(fmt, 2 if two_d else 1, variant["pow_2_scales"], variant["eps"])
        q = ops.quantize(x, scaling, columnwise=True)
        name = f"FP8 block {'128x128' if two_d else '1x128'}, {_settings(variant)}"
        prefix = variant["id"]
        codes = v.arrays[f"{prefix}_q"]
        v.compare_codes(name + ", codes", q.rowwise_data, codes, fmt)
        transposed = codes.T if two_d else v.arrays[f"{prefix}_q_t"]
        v.compare_codes(name + ", columnwise codes", q.columnwise_data, transposed, fmt)
        v.compare_floats(name + ", scale_inv", block.valid_scales(q), v.arrays[f"{prefix}_scale_inv_bits"])
        columnwise = block.valid_scales(q, columnwise=True)
        v.compare_floats(name + ", columnwise scale_inv", columnwise, v.arrays[f"{prefix}_scale_inv_t_bits"])
        shapes = (q.rowwise_scale_inv.shape, q.columnwise_scale_inv.shape)
        theirs = (variant["gemm_layout_scale_shape"], variant["gemm_layout_scale_t_shape"])
        v.compare(name + ", stored scale shapes", np.array(shapes), np.array(theirs))


def compare_dequant_fp8_block(v):
    """Dequantization from stored codes and scales."""
    for variant in v.variants:
        prefix, shape = variant["id"], tuple(variant["shape"])
        scaling = BlockScaling(E4M3, 2 if variant["tile"] == [128, 128] else 1)
        scales = v.arrays[f"{prefix}_scale_gemm_layout_bits"].view(np.float32)
        dtype = DTYPES[variant["out_dtype"]]
        codes = v.arrays[f"{prefix}_q"]
        q = Quantized(rowwise_data=codes, rowwise_scale_inv=scales, scaling=scaling, shape=shape, dtype=dtype)
        name = f"FP8 block dequantize, {variant['tile']} to {variant['out_dtype']}"
        v.compare_floats(name, ops.dequantize(q, dtype=dtype), v.arrays[f"{prefix}_out_bits"])


def _settings(variant):
    return f"{variant['fp8']}, eps {variant['eps']:g}{', power of 2' if variant['pow_2_scales'] else ''}"
