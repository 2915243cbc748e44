"""transformers: weights as `integrations/finegrained_fp8.py` quantizes them in tiles with E8M0 scales.

Its activations are quantized by a Triton kernel. A tile of one row shows the 1x128 and 1x64 blocks of those.
"""

from types import SimpleNamespace

import numpy as np

import refops
from peers import rules
from peers.registry import Divergence, Offer, as_numpy, as_torch
from refops.formats import encode

NAME, PACKAGES = "transformers", ("transformers", "torch")
F = np.float32


def offers():
    import torch
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    def quantize(block):
        settings = SimpleNamespace(weight_block_size=block, scale_fmt="ue8m0")
        convert = Fp8Quantize(SimpleNamespace(quantization_config=settings)).convert
        return lambda x: convert({"x.weight": x})

    def read(y):
        return {
            "rowwise codes": as_numpy(y["x.weight"]),
            "rowwise scales": as_numpy(y["x.weight_scale_inv"].view(torch.uint8)),
        }

    return [
        Offer(
            f"FP8 {block[0]}x{block[1]} E4M3, E8M0 scales",
            quantize(block),
            read,
            as_torch,
            divergences=(
                Divergence(
                    "log2",
                    "The scale is ceil(log2(1 / (1 / amax * 448))) in float32: one off near a power of two.",
                    _account(block, False, False),
                ),
                Divergence(
                    "lower end",
                    "A block of zeros has byte 127; no scale is below 2^-126.",
                    _account(block, True, False),
                ),
                Divergence(
                    "NaN and inf",
                    "A tile with infinity has scale NaN, and NaN counts as an amax of 0.",
                    _account(block, True, True),
                ),
            ),
        )
        for block in ((1, 128), (128, 128), (1, 64))
    ]


def _account(block, ends, special):
    @rules.quiet
    def arrays(x):
        amax = rules.tile_amax(x, block)
        if not special:
            amax = np.where(np.isnan(amax), F(0), amax)
        reciprocal = F(1) / np.where(amax > 0, amax, F(1))
        scale_inv = F(1) / (reciprocal * F(448))  # so torch divides a number by a tensor
        exponent = np.ceil(rules.log2_float32(np.maximum(scale_inv, rules.SMALLEST_NORMAL) if ends else scale_inv))
        exponent = np.where(amax > 0, exponent, 0 if ends else -127)
        byte = np.where(np.isinf(amax), 255 if special else 254, np.clip(exponent + 127, 0, 254)).astype(np.uint8)
        scaled = x.astype(F) * rules.spread(F(1) / refops.E8M0.values[byte], block, x.shape)
        return {"rowwise codes": encode(scaled, refops.E4M3), "rowwise scales": byte}

    return arrays
