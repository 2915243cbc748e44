"""auto-round: the types of `auto_round/data_type`, which return values and scales; codes are read from the values."""

import numpy as np

import refops
from peers import rules
from peers.alone import load_alone
from peers.registry import Divergence, Offer, as_numpy, as_torch
from refops.formats import encode

NAME, PACKAGES = "auto-round", ("auto-round", "torch")
F = np.float32


def offers():
    def load(name):
        packages = ("auto_round", "auto_round.data_type")
        return load_alone(f"auto_round.data_type.{name}", packages=packages, stand_ins=("datasets",))

    nvfp4, mx = load("nvfp"), load("mxfp")

    def read_mx(fmt):
        def read(y):
            values, exponent, _ = y
            byte = (as_numpy(exponent).astype(F).reshape(len(values), -1) + F(127)).astype(np.uint8)
            relative = rules.blocks(as_numpy(values), 32) / refops.E8M0.values[byte][..., None]
            codes = encode(relative, fmt) if fmt is refops.E2M1 else _integers(relative)
            return {"rowwise codes": codes.reshape(values.shape), "rowwise scales": byte}

        return read

    def read_nvfp4(y):
        values, scale, tensor_scale = y
        byte = encode(as_numpy(scale).astype(F).reshape(len(values), -1), refops.UE5M3)
        scale = refops.UE5M3.values[byte][..., None] * (F(1) / tensor_scale if tensor_scale else F(0))
        relative = rules.blocks(as_numpy(values), 16) / np.where(scale == 0, F(1), scale)
        return {"rowwise codes": encode(relative, refops.E2M1).reshape(values.shape), "rowwise scales": byte}

    found = [
        Offer("UE5M3 cast", nvfp4.float_to_e5m3_frexp, lambda y: {"codes": as_numpy(y)}, as_torch),
    ]
    for tensor_level, function in ((False, nvfp4.nvfp4_v2), (True, nvfp4.nvfp4_v2_with_global_scale)):

        def run(x, function=function, tensor_level=tensor_level):
            values, scales, _ = function(x, group_size=16)
            return values, scales, _tensor_scale(as_numpy(x)) if tensor_level else F(1)

        found.append(
            Offer(
                f"NVFP4 1x16 UE5M3, {'two levels' if tensor_level else 'one level'}",
                run,
                rules.quiet(read_nvfp4),
                as_torch,
                dtypes=("float32",),  # values are rounded to the dtype of the input
                divergences=(
                    Divergence(
                        "divides",
                        "Elements are divided by the scale, the tensor's scale is 1 / amax * 688128; TE multiplies by "
                        "a reciprocal, and divides by the amax.",
                        _ue5m3(tensor_level, 0),
                    ),
                    Divergence(
                        "zeros",
                        "-0 loses its sign, and where the scale is 0 every element is 0.",
                        _ue5m3(tensor_level, 1),
                    ),
                    Divergence("NaN and inf", "NaN or infinity is in the scales too.", _ue5m3(tensor_level, 2)),
                ),
            )
        )
    for subject, fmt, function, name in (
        ("MXFP4, floor rule", refops.E2M1, mx.quant_mx, "mx_fp4"),
        ("MXFP4, TE's rule", refops.E2M1, mx.quant_mx_rceil, "mx_fp4"),
        ("MXINT8, floor rule", refops.INT8, mx.quant_mx, "mx_int8"),
        ("MXINT8, TE's rule", refops.INT8, mx.quant_mx_rceil, "mx_int8"),
    ):
        found.append(
            Offer(
                subject,
                lambda x, function=function, name=name: function(x, group_size=32, data_type=name),
                rules.quiet(read_mx(fmt)),
                as_torch,
                dtypes=("bfloat16", "float32"),
                divergences=_mx(fmt, function is mx.quant_mx_rceil),
            )
        )
    return found


def _integers(relative):
    """MXINT8's codes of values; NaN as 0x80, which no value has."""
    codes = np.where(np.isnan(relative), F(0), relative * F(64)).astype(np.int8).view(np.uint8)
    return np.where(np.isnan(relative), np.uint8(0x80), codes)


def _mx(fmt, up):
    largest, emax = (F(6), 2) if fmt is refops.E2M1 else (F(127 / 64), 0)

    def account(zeros, special, overflow=True):
        @rules.quiet
        def arrays(x):
            amax = rules.block_amax(x, 32, keep_nan=special)
            log2 = rules.log2_float32(amax / largest) if up else rules.log2_float32(amax)
            exponent = np.ceil(log2) if up else np.floor(log2) - emax
            if zeros:
                exponent = np.where(amax == 0, 1 if up else 1 - emax, exponent)
            exponent = np.clip(exponent, -127, 127)
            byte = (np.where(np.isnan(exponent), F(-127), exponent) + 127).astype(np.uint8)
            scaled = np.clip(rules.blocks(x, 32) / refops.E8M0.values[byte][..., None], -largest, largest)
            if fmt is refops.E2M1:
                codes = encode(scaled, fmt)
                if overflow:
                    infinite = np.isinf(fmt.values[codes] * refops.E8M0.values[byte][..., None])
                    codes = np.where(infinite, codes | 7, codes)
            else:
                codes = np.rint(np.where(np.isnan(scaled), F(0), scaled * F(64))).astype(np.int8).view(np.uint8)
            if zeros and fmt is refops.E2M1:
                codes = np.where(rules.blocks(x, 32) == 0, np.uint8(0), codes)
            if special:
                strange = ~np.isfinite(amax)[..., None]
                byte = np.where(strange[..., 0], np.uint8(0), byte)
                codes = np.where(strange, np.uint8(7 if fmt is refops.E2M1 else 0x80), codes)
            return {"rowwise codes": codes.reshape(x.shape), "rowwise scales": byte}

        return arrays

    return (
        Divergence(
            "log2",
            "The exponent comes from a float32 log2: one too small just above a power of two (up), one too large "
            "just below (floor).",
            account(False, False, overflow=False),
        ),
        Divergence("overflow", "A value above the float32 range is infinite, which reads as 6.", account(False, False)),
        Divergence("zeros", "A block of zeros has the scale of an amax of 2; -0 loses its sign.", account(True, False)),
        Divergence("NaN and inf", "NaN or infinity makes its block NaN.", account(True, True)),
    )


def _tensor_scale(x):
    """688128 times a reciprocal, and 0 for a tensor of zeros."""
    amax = rules.tensor_amax(x)
    return F(0) if amax == 0 else F(1) / amax * F(114688 * 6)


def _ue5m3(tensor_level, level):
    @rules.quiet
    def arrays(x):
        amax = rules.block_amax(x, 16, keep_nan=level == 2)
        tensor_scale = _tensor_scale(np.where(np.isnan(x) & (level < 2), F(0), x)) if tensor_level else F(1)
        byte = encode(np.clip(tensor_scale * (amax * (F(1) / F(6))), F(0), refops.UE5M3.max), refops.UE5M3)
        scale = (refops.UE5M3.values[byte] * (F(1) / tensor_scale if tensor_scale else F(0)))[..., None]
        values = rules.blocks(x, 16)
        scaled = values / scale
        codes = np.where(np.isnan(scaled), np.uint8(7), encode(scaled, refops.E2M1))
        if level:
            codes = np.where((scale == 0) | (values == 0), np.uint8(0), codes)
        return {"rowwise codes": codes.reshape(x.shape), "rowwise scales": byte}

    return arrays
