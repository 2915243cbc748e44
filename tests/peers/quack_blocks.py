"""quack: MX blocks of `quack/blockscaled/quantize.py`, which is torchao's code with rules of its own for the scale.

The file needs torch alone; its package needs CUTLASS's Python, so the file is loaded by its place.
"""

import importlib.metadata
import importlib.util

import numpy as np

import refops
from peers import rules, torchao_tensors
from peers.registry import Divergence, Offer, as_numpy, as_torch
from refops.formats import encode

NAME, PACKAGES = "quack", ("quack-kernels", "torch")
F = np.float32


def offers():
    import torch

    try:
        place = importlib.metadata.distribution("quack-kernels").locate_file("quack/blockscaled/quantize.py")
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError("No package quack-kernels") from error
    spec = importlib.util.spec_from_file_location("quack_blockscaled_quantize", place)
    quack = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(quack)

    def packed_codes(y):
        packed = as_numpy(y[0].view(torch.uint8))
        return {"rowwise codes": refops.unpack_fp4(packed), "rowwise scales": as_numpy(y[1])}

    found = []
    for kind, size in (("MXFP4", 32), ("MXFP4 1x16", 16)):
        found.append(
            Offer(
                f"{kind}, floor rule",
                lambda x, size=size: quack.to_mxfp4(x, size),
                packed_codes,
                as_torch,
                divergences=torchao_tensors.by_exponent(refops.E2M1, "floor", size),
            )
        )
    found.append(
        Offer(
            "MXFP8 E4M3, TE's rule",
            quack.to_mx,
            lambda y: {"rowwise codes": as_numpy(y[0]), "rowwise scales": as_numpy(y[1])},
            as_torch,
            dtypes=("bfloat16", "float32"),
            divergences=(
                Divergence(
                    "subnormal scales",
                    "amax / 448 below 2^-126 gives byte 1, also at most 2^-127; a block of zeros is divided by 2^-126.",
                    _round_up(False),
                ),
                Divergence("NaN and inf", "A block with NaN or infinity gets scale 0xFF (NaN).", _round_up(True)),
            ),
        )
    )
    return found


def _round_up(special):
    @rules.quiet
    def arrays(x):
        amax = rules.block_amax(x, 32, keep_nan=special)
        bits = (amax / F(448)).view(np.uint32)
        byte = ((bits >> np.uint32(23)) + ((bits & np.uint32(0x7FFFFF)) != 0)).astype(np.uint8)
        if special:
            byte = np.where(np.isfinite(amax), byte, np.uint8(255))
        else:
            byte = np.where(np.isinf(amax), np.uint8(254), byte)
        divisor = np.where(byte == 255, F(np.inf), np.maximum(refops.E8M0.values[byte], rules.SMALLEST_NORMAL))
        codes = encode(rules.blocks(x, 32) / divisor[..., None], refops.E4M3)
        return {"rowwise codes": codes.reshape(x.shape), "rowwise scales": byte}

    return arrays
