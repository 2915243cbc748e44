"""torchao: MX and NVFP4 of `prototype.mx_formats`, FP8 of `float8` (training) and of `Float8Tensor` (inference)."""

import numpy as np

import refops
from peers import e8m0, rules
from peers.registry import Divergence, Offer, as_numpy, as_torch
from refops.formats import encode

NAME, PACKAGES = "torchao", ("torchao", "torch")
F = np.float32

#: torchao's scale modes -> refops' rule.
MODES = {"rceil": "up", "floor": "floor", "even": "even", "ceil": "ceil_ocp"}


def offers():
    import torch
    from torchao.prototype.mx_formats import mx_tensor
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    from peers.subjects import RULES

    def codes(y):
        return {"rowwise codes": as_numpy(y[1]), "rowwise scales": as_numpy(y[0])}

    def packed_codes(y):
        packed = as_numpy(y[1].view(torch.uint8))
        return {"rowwise codes": refops.unpack_fp4(packed), "rowwise scales": as_numpy(y[0])}

    found = []
    for kind, fmt, dtype, size, read in (
        ("MXFP8 E4M3", refops.E4M3, torch.float8_e4m3fn, 32, codes),
        ("MXFP8 E5M2", refops.E5M2, torch.float8_e5m2, 32, codes),
        ("MXFP6 E3M2", refops.E3M2, mx_tensor.DTYPE_FP6_E3M2, 32, codes),
        ("MXFP6 E2M3", refops.E2M3, mx_tensor.DTYPE_FP6_E2M3, 32, codes),
        ("MXFP4", refops.E2M1, torch.float4_e2m1fn_x2, 32, packed_codes),
        ("MXFP4 1x16", refops.E2M1, torch.float4_e2m1fn_x2, 16, packed_codes),
    ):
        for mode, rule in MODES.items():
            if fmt.bits == 6 and mode != "floor":
                continue  # the element format adds nothing to what the rules show
            found.append(
                Offer(
                    f"{kind}, {RULES[rule]}",
                    _mx(mx_tensor.to_mx, dtype, size, ScaleCalculationMode(mode)),
                    read,
                    as_torch,
                    dtypes=("bfloat16", "float32"),
                    divergences=_rceil(fmt, size) if mode == "rceil" else by_exponent(fmt, rule, size),
                )
            )

    def one_level(x):
        return nvfp4_quantize(x)

    def two_levels(x):
        return nvfp4_quantize(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().amax()))

    for variant, run, predict, block, sentence, special in (
        (
            "two levels",
            two_levels,
            _nvfp4_two_levels,
            None,
            "Block scales below 2^-6 are raised to it; the tensor's scale is 1 / (amax / 2688).",
            "One NaN makes every block scale NaN (0x7F), one inf the scale of its block, and all others 2^-6; "
            "refops ignores NaN, and inf counts as the largest float32.",
        ),
        (
            "one level",
            one_level,
            _nvfp4_one_level,
            (1, 16),
            "No scale for the tensor: block scales are E4M3(amax / 6), at least 2^-6.",
            "A block with NaN gets scale NaN (0x7F); refops ignores NaN.",
        ),
    ):
        found.append(
            Offer(
                "NVFP4 1x16",
                run,
                lambda y: {
                    "rowwise codes": refops.unpack_fp4(as_numpy(y[1])),
                    "rowwise scales": as_numpy(y[0]).reshape(len(y[1]), -1),
                },
                as_torch,
                variant=variant,
                dtypes=("bfloat16", "float32"),
                divergences=rules.with_special_apart(
                    "NVFP4 1x16", block, (Divergence(variant, sentence, predict),), special
                ),
            )
        )
    return [*found, *_fp8(torch), *_dequantize(torch, mx_tensor)]


def _mx(to_mx, dtype, size, mode):
    return lambda x: to_mx(x, dtype, size, mode)


# --- MX ------------------------------------------------------------------------------------------


def _nan_as_numbers(fmt):
    """NaN goes through the arithmetic for normal values: exponent and mantissa as they come, low eight bits."""
    shift = 23 - fmt.mantissa_bits
    bits = np.int64(0x7FC00000) + ((fmt.bias - 127) << 23) + (1 << (shift - 1)) - 1
    return np.uint8(((bits + ((0x7FC00000 >> shift) & 1)) >> shift) & 0xFF)


def _codes(x, fmt, scaled):
    """Codes of scaled values as torchao casts them."""
    codes = encode(scaled, fmt)
    if fmt.bits < 8:
        sign = np.signbit(scaled).astype(np.uint8) << (fmt.bits - 1)
        codes = np.where(np.isnan(scaled), _nan_as_numbers(fmt) | sign, codes)
    return codes.reshape(x.shape)


def by_exponent(fmt, rule, size):
    """Floor, even and ceil: three things of its own, at the range's ends."""
    emax = int(np.log2(fmt.max))

    def scales(x, special):
        amax = rules.block_amax(x, size)
        byte = rules.scale_bytes(amax, fmt, rule)
        if special:
            byte = np.where(np.isinf(amax), np.uint8(255 - emax), byte)
            byte = np.where(np.isnan(amax), np.uint8(255), byte)
        return byte

    def predict(special):
        @rules.quiet
        def arrays(x):
            byte = scales(x, special)
            divisor = np.maximum(np.where(byte == 255, F(np.inf), refops.E8M0.values[byte]), rules.SMALLEST_NORMAL)
            scaled = rules.blocks(x, size) / divisor[..., None]
            return {"rowwise codes": _codes(x, fmt, scaled), "rowwise scales": byte}

        return arrays

    return (
        Divergence(
            "scale 0 divides by 2^-126",
            f"Blocks with scale byte 0 (amax below 2^{emax - 126}) are divided by 2^-126, not by 2^-127.",
            predict(False),
        ),
        Divergence(
            "NaN and inf",
            f"A block with NaN gets scale 0xFF (NaN), one with inf 0x{255 - emax:02X}; refops: ignored, and 0xFE.",
            predict(True),
        ),
    )


def _rceil(fmt, size):
    """TE's rule by a float32 log2."""

    def predict(unscaled, special):
        @rules.quiet
        def arrays(x):
            amax = rules.block_amax(x, size)
            byte = rules.ceil_log2_byte(amax, fmt.max)
            if special:
                byte = np.where(np.isinf(amax), np.uint8(254), np.where(np.isnan(amax), np.uint8(255), byte))
            multiplier = e8m0.MULTIPLIER[byte]
            if unscaled:
                multiplier = np.where(byte == 0, F(1), multiplier)
            scaled = rules.blocks(x, size) * multiplier[..., None]
            return {"rowwise codes": _codes(x, fmt, scaled), "rowwise scales": byte}

        return arrays

    return (
        Divergence(
            "log2",
            "The scale is ceil(log2(amax / max)) with a float32 log2: one too small just above a power of two.",
            predict(False, False),
        ),
        Divergence(
            "scale 0 is not applied",
            "Elements of blocks with scale byte 0 are multiplied by 1, not by 2^127: tiny blocks are flushed to zero.",
            predict(True, False),
        ),
        Divergence("NaN", "A block with NaN gets scale NaN (0xFF); refops ignores NaN.", predict(True, True)),
    )


# --- NVFP4 ---------------------------------------------------------------------------------------


def _nvfp4(x, relative, tensor_scale):
    """Scales are `relative` within [2^-6, 448]; NaN goes through the arithmetic for normal values, as its bits say.

    The NaN that an E4M3 scale becomes has all bits from 2^20 on set, which gives 4; any other NaN gives 3.
    """
    byte = encode(np.clip(relative, F(2.0**-6), F(448)), refops.E4M3)
    reciprocal = (F(1) / tensor_scale) / refops.E4M3.values[byte]
    scaled = rules.blocks(x, 16) * reciprocal[..., None]
    codes = encode(np.clip(scaled, F(-6), F(6)), refops.E2M1)
    of_scale = np.where(np.isnan(tensor_scale), np.uint8(3), 4 | np.signbit(relative).astype(np.uint8) << 3)
    of_product = 3 | np.signbit(scaled).astype(np.uint8) << 3
    of_nan = np.where(np.isnan(reciprocal)[..., None], of_scale[..., None], of_product)
    codes = np.where(np.isnan(scaled), of_nan, codes).astype(np.uint8)
    return {"rowwise codes": codes.reshape(x.shape), "rowwise scales": byte}


@rules.quiet
def _nvfp4_one_level(x):
    return _nvfp4(x, rules.block_amax(x, 16) / F(6), F(1))


@rules.quiet
def _nvfp4_two_levels(x):
    tensor_scale = rules.tensor_amax(x) / F(2688)
    return _nvfp4(x, (rules.block_amax(x, 16) / F(6)) / tensor_scale, tensor_scale)


# --- FP8 -----------------------------------------------------------------------------------------


def _fp8(torch):
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig
    from torchao.quantization import Float8Tensor, PerBlock, PerTensor

    def arrays(data, scale_inv):
        return {"rowwise codes": as_numpy(data), "rowwise scales": as_numpy(scale_inv)}

    yield Offer(
        "FP8 current E4M3",
        lambda x: hp_tensor_to_float8_dynamic(x, torch.float8_e4m3fn, LinearMMConfig()),
        lambda y: arrays(y._data, (1 / y._scale).reshape(1)),
        as_torch,
        variant="training",
        divergences=rules.with_special_apart(
            "FP8 current E4M3",
            None,
            (
                Divergence(
                    "scale in float64",
                    "The scale is 448 / amax in float64, rounded once more.",
                    _current_training(0.0),
                ),
                Divergence(
                    "amax at least 1e-12",
                    "An amax below 1e-12, zero too, counts as 1e-12; refops takes scale 1 for zero.",
                    _current_training(1e-12),
                ),
            ),
            rules.FP8_SPECIAL,
        ),
    )
    for subject, granularity, block in (
        ("FP8 current E4M3", PerTensor(), None),
        ("FP8 1x128 E4M3, any scale", PerBlock((1, 128)), (1, 128)),
        ("FP8 128x128 E4M3, any scale", PerBlock((128, 128)), (128, 128)),
    ):

        def run(x, granularity=granularity):
            return Float8Tensor.from_hp(x, torch.float8_e4m3fn, granularity)

        def read(y, block=block):
            return arrays(y.qdata, y.scale.reshape(1) if block is None else y.scale)

        yield Offer(
            subject,
            run,
            read,
            as_torch,
            variant="inference",
            divergences=rules.with_special_apart(
                subject,
                block,
                (
                    Divergence(
                        "divides by amax / 448",
                        "scale_inv is amax / 448 and elements are divided by it; TE multiplies by 448 / amax.",
                        _inference(block, np.float32),
                    ),
                    Divergence(
                        "scale in the input's dtype",
                        "amax / 448 is rounded to the dtype of the input (bfloat16, float16).",
                        _inference(block, None),
                    ),
                ),
                rules.FP8_SPECIAL,
            ),
        )


def _current_training(least):
    """`least` is what the amax is raised to; without one the scale is that of TE where the quotient overflows."""

    @rules.quiet
    def arrays(x):
        amax = rules.tensor_amax(x).astype(np.float64)
        if not least and amax == 0:
            scale = F(1)
        else:
            scale = (448.0 / np.maximum(amax, least)).astype(F)
            scale = scale if least else np.minimum(scale, np.finfo(F).max)
        codes = encode(x.astype(F) * scale, refops.E4M3)
        return {"rowwise codes": codes, "rowwise scales": (F(1) / scale).reshape(1)}

    return arrays


def _inference(block, dtype):
    @rules.quiet
    def arrays(x):
        amax = rules.tensor_amax(x).reshape(1, 1) if block is None else rules.tile_amax(x, block)
        scale = rules.rounded(amax / F(448), dtype or x.dtype)
        codes = encode(x.astype(F) / rules.spread(scale, block or x.shape, x.shape), refops.E4M3)
        return {"rowwise codes": codes, "rowwise scales": scale.reshape(1) if block is None else scale}

    return arrays


# --- back to floats (timed only) -----------------------------------------------------------------


def _dequantize(torch, mx_tensor):
    def prepare(q):
        m, k = q.matrix_shape
        codes = torch.from_numpy(q.rowwise_data).view(torch.float8_e4m3fn)
        scales = torch.from_numpy(np.ascontiguousarray(q.rowwise_scale_inv[:m, : k // 32]))
        return codes, scales.view(torch.float8_e8m0fnu)

    yield Offer(
        "dequantize MXFP8",
        lambda q: mx_tensor.to_dtype(*q, torch.float8_e4m3fn, 32, torch.bfloat16),
        lambda y: {"values": as_numpy(y)},
        prepare,
    )
