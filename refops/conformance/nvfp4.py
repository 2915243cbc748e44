"""NVFP4: scales, every variant in both directions, the Hadamard transform, what torchao and modelopt do otherwise."""

from dataclasses import replace

import numpy as np

from refops import ops
from refops.conformance.casts import te_python_e2m1
from refops.conformance.vectors import DTYPES, bits_of, leading
from refops.formats import E2M1, E4M3, encode, unpack_fp4
from refops.quantization import nvfp4
from refops.quantization.hadamard import hadamard_transform
from refops.quantization.layout import pad_to_blocks
from refops.quantization.result import Quantized
from refops.scaling import NVFP4Scaling


def compare_nvfp4_scales(v):
    """Global and block scales for every pair of amaxes."""
    s_enc = nvfp4.global_encode_scale(v.arrays["global_amax_bits"].view(np.float32))
    v.compare_floats("NVFP4 global encode scale", s_enc, v.arrays["S_enc_bits"])
    scales = nvfp4.block_scale_byte(v.arrays["block_amax_bits"].view(np.float32), s_enc[:, None])
    v.compare("NVFP4 block scale", scales, v.arrays["block_scale"])


def compare_nvfp4(v):
    """1x16, 16x16, 4over6 and row-scaled, both directions."""
    for variant in v.variants:
        scaling = NVFP4Scaling(
            two_d=variant["tile"] == [16, 16],
            four_over_six=variant["four_over_six"].lower() if "four_over_six" in variant else None,
            e4m3_max=variant.get("e4m3_max", 448),
            row_scaled=variant.get("row_scaled", False),
        )
        x = v.tensor(variant["input"])
        _compare_nvfp4_tensor(v, variant, _nvfp4_name(scaling), x, x.T, ops.quantize(x, scaling, columnwise=True))


def compare_nvfp4_rht(v):
    """Random Hadamard transform of the columnwise copy, then NVFP4."""
    signs = {"te_signs": v.arrays["te_signs"], "custom_signs": v.arrays["custom_signs"], "none": np.ones(16)}
    for variant in v.variants:
        x = v.tensor(variant["input"])
        mask = sum(1 << i for i, sign in enumerate(signs[variant["signs"]]) if sign < 0)
        their_rht = v.tensor(f"{variant['id']}_rht_bits")
        ours = hadamard_transform(np.ascontiguousarray(x.T), mask)
        name = f"NVFP4 RHT, signs {variant['signs']}"
        if variant["exact"]:
            v.compare_floats(name + ", transform", ours, their_rht.view(bits_of(x.dtype)))
            q = ops.quantize(x, NVFP4Scaling(rht=True, sign_mask=mask), columnwise=True)
            _compare_nvfp4_tensor(v, variant, name, x, ours, q)
        else:  # their float32 sum rounds in another order: judge the quantizer from their transform
            magnitude = np.abs(x.T.astype(np.float64)).reshape(x.shape[1], -1, 16).sum(axis=2)
            bound = np.repeat(16 * 2.0**-24 * magnitude / 4, 16, axis=1)  # any order of a float32 sum of 16 terms
            v.compare_floats(
                name + ", transform",
                ours,
                their_rht.view(bits_of(x.dtype)),
                divergence="the reference rounds partial sums to float32",
                expected=np.abs(ours.astype(np.float64) - their_rht.astype(np.float64)) <= bound,
            )
            q = ops.quantize(x, NVFP4Scaling())
            column = ops.quantize(their_rht, NVFP4Scaling())
            q = replace(
                q,
                columnwise_data=column.rowwise_data,
                columnwise_scale_inv=column.rowwise_scale_inv,
                amax_columnwise=column.amax_rowwise,
            )
            _compare_nvfp4_tensor(v, variant, name + " (from their transform)", x, their_rht, q)


def _compare_nvfp4_tensor(v, variant, name, row_values, column_values, q):
    """Codes, scales and amaxes of both directions; `*_values` are what was cast, for the -0 divergence."""
    prefix = variant["id"]
    documented = {"divergence": "TE's Python reference encodes -0 and NaN as 0"}
    for direction, values, suffix in (("rowwise", row_values, ""), ("columnwise", column_values, "_t")):
        data, scales = getattr(q, f"{direction}_data"), getattr(q, f"{direction}_scale_inv")
        codes = unpack_fp4(data)
        their_scales = v.arrays[f"{prefix}_scale{suffix}"]
        s_enc = nvfp4.global_encode_scale(getattr(q, f"amax_{direction}"), q.scaling.e4m3_max)[:, None]
        multiplier = np.repeat(nvfp4.encode_multiplier(leading(scales, their_scales), s_enc), 16, axis=1)
        expected = te_python_e2m1(values.astype(np.float32) * multiplier, codes)
        theirs = unpack_fp4(v.arrays[f"{prefix}_q{suffix}"])
        v.compare(f"{name}, {direction} codes", codes, theirs, expected=expected, **documented)
        v.compare(f"{name}, {direction} scales", leading(scales, their_scales), their_scales)
        amax_bits = v.arrays[f"{prefix}_amax_{'col' if suffix else 'row'}_bits"]
        v.compare_floats(f"{name}, {direction} amax", getattr(q, f"amax_{direction}"), amax_bits)


def compare_nvfp4_other(v):
    """torchao and modelopt on the same tensor: what differs is re-derived from their documented rules."""
    x = v.tensor().astype(np.float32)
    blocks = x.reshape(len(x), -1, 16)
    q = ops.quantize(v.tensor(), NVFP4Scaling())
    codes, scales = unpack_fp4(q.rowwise_data), leading(q.rowwise_scale_inv, v.arrays["ao2_scale"])
    block_maxima = np.abs(blocks).max(axis=2)

    one_level = encode(np.clip(block_maxima / np.float32(6), np.float32(2.0**-6), np.float32(448)), E4M3)
    _compare_with_rule(
        v,
        "torchao, one level",
        codes,
        scales,
        "ao1",
        one_level,
        blocks,
        np.float32(1) / E4M3.values[one_level],
        "torchao's one-level mode has no global scale",
    )

    global_scale = v.arrays["ao2_global_bits"].view(np.float32)
    relative = (block_maxima / np.float32(6)) / global_scale
    clamped = encode(np.clip(relative, np.float32(2.0**-6), np.float32(448)), E4M3)
    _compare_with_rule(
        v,
        "torchao, two levels",
        codes,
        scales,
        "ao2",
        clamped,
        blocks,
        (np.float32(1) / global_scale) / E4M3.values[clamped],
        "torchao clamps block scales to >= 2^-6",
    )

    global_scale = v.arrays["mo_global_bits"].view(np.float32)
    relative = (block_maxima / np.float32(6)) / global_scale
    of_zero = encode(np.where(block_maxima == 0, np.float32(1), relative), E4M3)
    _compare_with_rule(
        v,
        "modelopt",
        codes,
        scales,
        "mo",
        of_zero,
        blocks,
        np.float32(1) / (E4M3.values[of_zero] * global_scale),
        "modelopt divides by the scale and gives zero blocks scale 1",
    )


def _compare_with_rule(v, peer, codes, scales, prefix, rule_scales, blocks, multiplier, divergence):
    """Compare with a peer's arrays; differences are explained where the peer's own rule gives them."""
    their_scales, their_codes = v.arrays[f"{prefix}_scale"], unpack_fp4(v.arrays[f"{prefix}_q"])
    v.compare(f"NVFP4 scales ({peer})", scales, their_scales, divergence=divergence, expected=rule_scales)
    rule_codes = encode(blocks * multiplier[..., None], E2M1)
    if peer == "modelopt":  # its cast loses the sign of an exact -0 besides
        rule_codes = te_python_e2m1(blocks, rule_codes)
    v.compare(
        f"NVFP4 codes ({peer})", codes, their_codes, divergence=divergence, expected=rule_codes.reshape(codes.shape)
    )


def compare_dequant_nvfp4(v):
    """Dequantization from stored codes, scales and amax."""
    codes, scales, amax = v.arrays["q"], v.arrays["scale"], v.arrays["amax"]
    shape = (codes.shape[0], 2 * codes.shape[1])
    for name in ("fp32", "bf16"):
        q = Quantized(
            rowwise_data=codes,
            rowwise_scale_inv=pad_to_blocks(scales, 128, 4),
            amax_rowwise=amax,
            scaling=NVFP4Scaling(),
            shape=shape,
            dtype=DTYPES[name],
        )
        v.compare_floats(
            f"NVFP4 dequantize to {name}", ops.dequantize(q, dtype=DTYPES[name]), v.arrays[f"out_{name}_bits"]
        )


def _nvfp4_name(scaling):
    parts = ["NVFP4", "16x16" if scaling.two_d else "1x16"]
    if scaling.four_over_six:
        parts.append(f"4over6 {scaling.four_over_six} {scaling.e4m3_max}")
    if scaling.row_scaled:
        parts.append("row-scaled")
    return " ".join(parts)
