"""Casts of single values, tables of codes, and the GEMM order of scales."""

import numpy as np

from refops.formats import E2M1, E4M3, E5M2, E8M0, FORMATS, decode, encode
from refops.quantization import mxfp8
from refops.quantization.layout import pad_to_blocks, swizzle


def compare_cast_fp8(v):
    """Element casts to E4M3 and E5M2, saturating and not."""
    fmt = FORMATS[v.meta["op"].removeprefix("cast_")]
    x = v.tensor()
    v.compare_codes(f"{fmt!r} cast, saturating", encode(x, fmt), v.arrays["q_sat"], fmt)
    v.compare_codes(f"{fmt!r} cast, not saturating", encode(x, fmt, saturate=False), v.arrays["q_nosat"], fmt)


def compare_cast_e2m1(v):
    """Element casts to E2M1. TE's Python reference loses the sign of an exact -0 and maps NaN to 0."""
    x = v.tensor()
    codes = encode(x, E2M1)
    v.compare(
        "E2M1 cast",
        codes,
        v.arrays["q"],
        divergence="TE's Python reference encodes -0 and NaN as 0",
        expected=te_python_e2m1(x, codes) if "te_py" in v.name else None,
    )


def te_python_e2m1(x, codes):
    """E2M1 `codes` as TE's Python reference gives them: 0 where the value that is cast is -0 or NaN."""
    return np.where((x == 0) | np.isnan(x.astype(np.float32)), np.uint8(0), codes)


def compare_cast_e8m0(v):
    """Scale bytes under each rounding."""
    x = v.tensor()
    up = encode(x, E8M0, rounding="up")
    v.compare("E8M0 cast, up (TE)", up, v.arrays["rp_sat"])
    v.compare("E8M0 cast, up (CUDA)", up, v.arrays["rp_sat_cuda"])
    not_saturating = encode(x, E8M0, rounding="up", saturate=False)
    v.compare("E8M0 cast, up, not saturating", not_saturating, v.arrays["rp_nosat_cuda"])
    v.compare("E8M0 cast, toward zero", encode(x, E8M0, rounding="toward_zero"), v.arrays["rz_sat_cuda"])
    nearest = encode(x, E8M0, rounding="nearest_away", saturate=False)
    v.compare(
        "E8M0 cast, nearest",
        nearest,
        v.arrays["torch_nearest"],
        divergence="torch rounds 2^-127 < x < 1.5 * 2^-127 up, not to nearest",
        expected=(x > np.float32(2.0**-127)) & (x < np.float32(1.5 * 2.0**-127)) & (v.arrays["torch_nearest"] == 1),
    )


def compare_decode_tables(v):
    """The value of every code."""
    for fmt in (E4M3, E5M2, E2M1, E8M0):
        codes = np.arange(len(fmt.values), dtype=np.uint8)
        v.compare_floats(f"{fmt!r} decode", decode(codes, fmt), v.arrays[f"{fmt.name}_f32_bits"])


def compare_e8m0_tables(v):
    """Decode scale and encode multiplier of every scale byte."""
    v.compare_floats("E8M0 value", E8M0.values, v.arrays["value_f32_bits"])
    v.compare_floats("E8M0 encode multiplier", mxfp8.ENCODE_MULTIPLIER, v.arrays["recip_f32_bits"])


def compare_stochastic(v):
    """Stochastic E2M1 casts with given bits."""
    x = v.tensor(dtype="fp32")
    ours = decode(encode(x, E2M1, rounding="stochastic", random_bits=v.arrays["rbits"]), E2M1)
    v.compare_floats("E2M1 stochastic", ours, v.arrays["te_value"])
    every_byte = np.broadcast_to(np.arange(256, dtype=np.uint8), (64, 256))
    repeated = np.repeat(x[:64, None], 256, axis=1)
    ours = decode(encode(repeated, E2M1, rounding="stochastic", random_bits=every_byte), E2M1)
    v.compare_floats("E2M1 stochastic, all 256 bytes", ours, v.arrays["te_full"])
    finite = np.isfinite(x)  # gfloat's arrays hold 0 for the others
    ours = decode(encode(x[finite], E2M1, rounding="stochastic", random_bits=v.arrays["rbits"][finite]), E2M1)
    v.compare("E2M1 stochastic (gfloat StochasticFastest)", ours, v.arrays["gfloat_fastest"][finite])


def compare_swizzle(v):
    """The 128x4 GEMM order of scales."""
    for variant in v.variants:
        theirs = v.arrays[f"{variant['id']}_out"]
        ours = swizzle(pad_to_blocks(v.arrays[f"{variant['id']}_in"], 128, 4))
        v.compare(f"swizzle {tuple(variant['shape'])}", ours.reshape(theirs.shape), theirs)
