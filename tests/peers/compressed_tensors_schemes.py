"""compressed-tensors, vLLM's checkpoint formats: scales as its observers compute them, then `quantize`."""

import numpy as np

import refops
from peers import rules
from peers.registry import Divergence, Offer, as_numpy, as_torch
from refops.formats import encode

NAME, PACKAGES = "compressed-tensors", ("compressed-tensors", "torch")
F = np.float32


def offers():
    import torch
    from compressed_tensors.compressors.mx_utils import compress_mx_scale
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, quantize_and_pack_fp4
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import (
        calculate_qparams,
        compute_dynamic_scales_and_zp,
        generate_gparam,
    )

    fp8 = torch.float8_e4m3fn

    def settings(bits=8, **options):
        return QuantizationArgs(num_bits=bits, type="float", symmetric=True, **options)

    def dynamic(args):
        def run(x):
            scale, _ = compute_dynamic_scales_and_zp(x, args, module=None)
            return quantize(x, scale, None, args, dtype=fp8), scale

        return run

    mx = settings(strategy="group", group_size=32, dynamic=True, scale_dtype=torch.uint8)
    mx4 = settings(4, strategy="group", group_size=32, dynamic=True, scale_dtype=torch.uint8)
    tiles = settings(strategy="block", block_structure=[128, 128])
    nv = settings(4, strategy="tensor_group", group_size=16, dynamic="local", scale_dtype=fp8)

    def run_tiles(x):
        m, k = x.shape
        low, high = (f(x.view(m // 128, 128, k // 128, 128), (1, 3)) for f in (torch.amin, torch.amax))
        scale, _ = calculate_qparams(low, high, tiles)
        return quantize(x, scale, None, tiles, dtype=fp8), scale

    def run_mxfp4(x):
        scale, _ = compute_dynamic_scales_and_zp(x, mx4, module=None)
        return pack_fp4_to_uint8(quantize(x, scale, None, mx4)), scale

    def run_nvfp4(x):
        tensor_scale = generate_gparam(*torch.aminmax(x))
        scale, _ = compute_dynamic_scales_and_zp(x, nv, module=None, global_scale=tensor_scale)
        return quantize_and_pack_fp4(x, scale, tensor_scale, None, 16), scale

    def read(shape_one=False):
        def arrays(y):
            scale = as_numpy(y[1].float())
            return {"rowwise codes": as_numpy(y[0]), "rowwise scales": scale.reshape(1) if shape_one else scale}

        return arrays

    def offer(subject, run, arrays, *divergences):
        return Offer(subject, run, arrays, as_torch, dtypes=("bfloat16", "float32"), divergences=divergences)

    found = [
        offer(
            "MXFP8 E4M3, TE's rule",
            dynamic(mx),
            lambda y: {
                "rowwise codes": as_numpy(y[0]),
                "rowwise scales": as_numpy(compress_mx_scale(y[1].float(), torch.uint8)),
            },
            Divergence(
                "448 itself rounds up",
                "An amax of exactly 448 times a power of two gets twice the scale.",
                _mx(refops.E4M3, False),
            ),
            Divergence(
                "overflowing scales",
                "From an amax of 1.75 * 2^127 on the scale is infinite: codes 0, stored byte 127. NaN gives byte 0.",
                _mx(refops.E4M3, True),
            ),
        ),
        offer(
            "MXFP4, even rule",
            run_mxfp4,
            lambda y: {
                "rowwise codes": refops.unpack_fp4(as_numpy(y[0])),
                "rowwise scales": as_numpy(compress_mx_scale(y[1].float(), torch.uint8)),
            },
            Divergence(
                "overflowing scales",
                "From an amax of 1.75 * 2^127 on the scale is infinite: codes 0, stored byte 127. NaN gives byte 0.",
                _mx(refops.E2M1, True),
            ),
            Divergence("-0 and NaN", "-0 loses its sign, NaN becomes a zero.", _mx(refops.E2M1, True, True)),
        ),
        offer(
            "NVFP4 1x16",
            run_nvfp4,
            lambda y: {
                "rowwise codes": refops.unpack_fp4(as_numpy(y[0])),
                "rowwise scales": as_numpy(y[1].to(fp8)),
            },
            Divergence(
                "scales in the input's dtype",
                "The tensor's scale and amax / 6 are rounded to the input's dtype; elements are divided by scales.",
                _nvfp4(False, False),
            ),
            Divergence(
                "zero scales and -0",
                "A block scale of 0 becomes 0.125, and -0 loses its sign.",
                _nvfp4(True, False),
            ),
            Divergence("NaN", "NaN becomes a zero.", _nvfp4(True, True)),
        ),
    ]
    for subject, run, block in (
        ("FP8 current E4M3", dynamic(settings(strategy="tensor", dynamic=True)), None),
        (
            "FP8 1x128 E4M3, any scale",
            dynamic(settings(strategy="group", group_size=128, dynamic=True)),
            (1, 128),
        ),
        ("FP8 128x128 E4M3, any scale", run_tiles, (128, 128)),
    ):
        found.append(
            offer(
                subject,
                run,
                read(shape_one=block is None),
                *rules.with_special_apart(
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
                            "Scale and quotient are rounded to the dtype of the input (bfloat16) before the cast.",
                            _fp8(block, None),
                        ),
                        Divergence(
                            "zero scales",
                            "A scale of 0 becomes the epsilon of the input's dtype.",
                            _fp8(block, None, epsilon=True),
                        ),
                    ),
                    rules.FP8_SPECIAL,
                ),
            )
        )
    return found


def _mx(fmt, ends, zeros=False):
    """The bytes of refops' even rule for E2M1, whatever the elements are."""
    emax = int(np.log2(fmt.max))

    @rules.quiet
    def arrays(x):
        amax = rules.block_amax(x, 32)
        exponent = ((amax.view(np.uint32) + np.uint32(1 << 21)) >> np.uint32(23)).astype(np.int32)
        byte = np.clip(exponent - emax, 0, 255).astype(np.uint8)
        scale = refops.E8M0.values[byte]
        if ends:
            infinite, nan = (exponent == 255) & ~np.isnan(amax), np.isnan(amax)
            scale = np.where(infinite, F(np.inf), np.where(nan, refops.E8M0.values[0], scale))
            byte = np.where(infinite, np.uint8(127), np.where(nan, np.uint8(0), byte))
        scaled = rules.blocks(x, 32) / scale[..., None]
        codes = encode(scaled, fmt)
        if zeros:  # NaN of the sign that the processor's 16-bit conversion gives it
            codes = np.where(scaled == 0, np.uint8(0), codes)
            codes = np.where(np.isnan(scaled), np.uint8(8 if x.dtype.itemsize == 2 else 0), codes)
        return {"rowwise codes": codes.reshape(x.shape), "rowwise scales": byte}

    return arrays


def _nvfp4(zeros, nan):
    @rules.quiet
    def arrays(x):
        amax = np.maximum(rules.tensor_amax(x), rules.SMALLEST_NORMAL)
        tensor_scale = rules.rounded(rules.rounded(F(1) / amax, x.dtype) * F(2688), x.dtype)
        tensor_scale = np.where(np.isfinite(tensor_scale), tensor_scale, F(1))
        local = rules.rounded(rules.block_amax(x, 16) / F(6), x.dtype) * tensor_scale
        byte = encode(np.minimum(local, F(448)), refops.E4M3)
        if zeros:
            byte = np.where(byte == 0, encode(np.array([0.125], F), refops.E4M3)[0], byte)
        scaled = rules.blocks(x, 16) / (refops.E4M3.values[byte] / tensor_scale)[..., None]
        codes = encode(scaled.astype(F), refops.E2M1)
        if zeros:
            codes = np.where(scaled == 0, codes & 7, codes)
        if nan:  # of the sign that the processor's 16-bit conversion gives NaN
            codes = np.where(np.isnan(scaled), np.uint8(8 if x.dtype.itemsize == 2 else 0), codes)
        return {"rowwise codes": codes.reshape(x.shape), "rowwise scales": byte}

    return arrays


def _fp8(block, dtype, epsilon=False):
    @rules.quiet
    def arrays(x):
        kind = dtype or x.dtype
        amax = rules.tensor_amax(x).reshape(1, 1) if block is None else rules.tile_amax(x, block)
        scale = rules.rounded(amax / F(448), kind)
        if epsilon:
            smallest = F(2.0**-7 if x.dtype.itemsize == 2 else 2.0**-23)
            scale = np.where(scale == 0, smallest, scale)
        quotient = rules.rounded(x.astype(F) / rules.spread(scale, block or x.shape, x.shape), kind)
        codes = encode(quotient, refops.E4M3)
        return {"rowwise codes": codes, "rowwise scales": scale.reshape(1) if block is None else scale}

    return arrays
