"""nvidia-modelopt: the quantized tensors of `modelopt.torch.quantization.qtensor`."""

import numpy as np

import refops
from peers import e8m0, rules
from peers.registry import Divergence, Offer, as_numpy, as_torch
from refops.formats import encode

NAME, PACKAGES = "modelopt", ("nvidia-modelopt", "torch")
F = np.float32


def offers():
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP4QTensor, MXFP8QTensor, NVFP4QTensor

    found = [
        Offer(
            "MXFP8 E4M3, TE's rule",
            MXFP8QTensor.quantize,
            lambda y: {"rowwise codes": as_numpy(y[0]._quantized_data), "rowwise scales": as_numpy(y[1])},
            as_torch,
            divergences=(
                Divergence(
                    "log2",
                    "The scale is ceil(log2(amax / 448)) with a float32 log2: one too small just above a power of two.",
                    _mxfp8(False),
                ),
                Divergence("NaN", "A block with NaN gets scale byte 0; refops ignores NaN.", _mxfp8(True)),
            ),
        ),
        *(_mxfp4(MXFP4QTensor, size) for size in (32, 16)),
        Offer(
            "NVFP4 1x16",
            lambda x: NVFP4QTensor.quantize(x, 16),
            lambda y: {
                "rowwise codes": refops.unpack_fp4(as_numpy(y[0]._quantized_data)),
                "rowwise scales": as_numpy(y[1]),
            },
            as_torch,
            divergences=(
                Divergence(
                    "divides by scales",
                    "Scales are amax / (6 amax_tensor / 2688), at least 2^-9; elements are divided by the product.",
                    _nvfp4(False, False),
                ),
                Divergence("zero blocks", "A block of zeros gets scale 1.", _nvfp4(True, False)),
                Divergence("-0 and NaN", "-0 loses its sign, NaN becomes 6.", _nvfp4(True, True)),
            ),
        ),
    ]
    for subject, block in (
        ("FP8 current E4M3", None),
        ("FP8 1x128 E4M3, any scale", (1, 128)),
        ("FP8 128x128 E4M3, any scale", (128, 128)),
    ):
        sizes = {
            None: None,
            (1, 128): {-1: 128},
            (128, 128): {-1: 128, -2: 128},
        }[block]

        def run(x, sizes=sizes):
            return FP8QTensor.quantize(x, block_sizes=sizes)

        def read(y, block=block):
            scales = as_numpy(y[1].float())
            return {
                "rowwise codes": as_numpy(y[0]._quantized_data),
                "rowwise scales": scales.reshape(1) if block is None else scales,
            }

        found.append(
            Offer(
                subject,
                run,
                read,
                as_torch,
                divergences=rules.with_special_apart(
                    subject,
                    block,
                    (
                        Divergence(
                            "divides by amax / 448",
                            "scale_inv is amax / 448 and elements are divided by it; TE multiplies by 448 / amax.",
                            _fp8(block, np.float32),
                        ),
                        Divergence(
                            "arithmetic in the input's dtype",
                            "Scale and quotient are rounded to the dtype of the input (bfloat16, float16) before the "
                            "cast.",
                            _fp8(block, None),
                        ),
                    ),
                    rules.FP8_SPECIAL,
                ),
            )
        )
    return found


def _mxfp8(special):
    @rules.quiet
    def arrays(x):
        byte = rules.ceil_log2_byte(rules.block_amax(x, 32, keep_nan=special), 448)
        return rules.mx(x, refops.E4M3, byte, e8m0.MULTIPLIER[byte])

    return arrays


def _mxfp4(tensors, size):
    """MXFP4 in blocks of `size`."""

    def account(ties, zeros, special):
        @rules.quiet
        def arrays(x):
            byte = rules.ceil_log2_byte(rules.block_amax(x, size), 6)
            scale = refops.E8M0.values[byte]
            if special:  # neither a code of the scale's nor of the elements' own
                strange = ~np.isfinite(rules.block_amax(x, size))
                byte, scale = np.where(strange, np.uint8(0), byte), np.where(strange, F(np.nan), scale)
            scaled = (rules.blocks(x, size) / scale[..., None]).astype(F)
            codes = encode(scaled, refops.E2M1)
            if ties:
                sign = np.signbit(scaled).astype(np.uint8) << 3
                codes = np.where(np.isnan(scaled), codes, sign | rules.e2m1_ties_down(scaled))
            if zeros:
                codes = np.where(rules.blocks(x, size) == 0, np.uint8(8), codes)
            if special:
                codes = np.where(np.isnan(scaled), np.uint8(8), codes)
            return {"rowwise codes": codes.reshape(x.shape), "rowwise scales": byte}

        return arrays

    return Offer(
        "MXFP4, TE's rule" if size == 32 else "MXFP4 1x16, TE's rule",
        lambda x: tensors.quantize(x, size),
        lambda y: {
            "rowwise codes": refops.unpack_fp4(as_numpy(y[0]._quantized_data)),
            "rowwise scales": as_numpy(y[1]).reshape(y[0].metadata["shape"][0], -1),
        },
        as_torch,
        divergences=(
            Divergence(
                "log2",
                "The scale is ceil(log2(amax / 6)) with a float32 log2: one too small just above a power of two.",
                account(False, False, False),
            ),
            Divergence("ties", "Ties go to the smaller magnitude.", account(True, False, False)),
            Divergence("zeros", "Zeros are stored as -0.", account(True, True, False)),
            Divergence(
                "NaN and inf", "A block with NaN or infinity has byte 0 and codes -0.", account(True, True, True)
            ),
        ),
    )


def _nvfp4(zero_blocks, signs):
    @rules.quiet
    def arrays(x):
        tensor_scale = rules.tensor_amax(x) / F(2688)
        amax = rules.block_amax(x, 16)
        relative = amax / (F(6) * tensor_scale)
        if zero_blocks:
            relative = np.where(relative == 0, F(1), relative)
        byte = encode(np.clip(relative, F(2.0**-9), F(448)), refops.E4M3)
        scaled = rules.blocks(x, 16) / (refops.E4M3.values[byte] * tensor_scale)[..., None]
        codes = encode(scaled, refops.E2M1)
        if signs:
            codes = np.where((scaled == 0) | np.isnan(scaled), codes & 7, codes)
        return {"rowwise codes": codes.reshape(x.shape), "rowwise scales": byte}

    return arrays


def _fp8(block, dtype):
    @rules.quiet
    def arrays(x):
        kind = dtype or x.dtype
        amax = rules.tensor_amax(x).reshape(1, 1) if block is None else rules.tile_amax(x, block)
        scale = rules.rounded(amax / F(448), kind)
        quotient = rules.rounded(x.astype(F) / rules.spread(scale, block or x.shape, x.shape), kind)
        codes = encode(quotient, refops.E4M3)
        return {"rowwise codes": codes, "rowwise scales": scale.reshape(1) if block is None else scale}

    return arrays
