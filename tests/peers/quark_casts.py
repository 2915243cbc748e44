"""AMD Quark: the cast to UE5M3, `quark/torch/kernel/float8_e5m3/reference.py`. Its MX casts are a C++ extension."""

import numpy as np

from peers import rules
from peers.alone import load_alone
from peers.registry import Divergence, Offer, as_numpy, as_torch
from refops import UE5M3
from refops.formats import encode

NAME, PACKAGES = "Quark", ("amd-quark", "torch")
F = np.float32


def offers():
    folder = "quark.torch.kernel.float8_e5m3"
    packages = ("quark", "quark.torch", "quark.torch.kernel", folder)
    quark = load_alone(f"{folder}.reference", packages=packages)
    return [
        Offer(
            "UE5M3 cast",
            lambda x: quark.reference_convert_fp32_to_e5m3_bits(x.float()),
            lambda y: {"codes": as_numpy(y)},
            as_torch,
            divergences=(
                Divergence(
                    "no saturation",
                    "Above 118784 the exponent stops at 31 and the mantissa goes on: 122880 gives NaN, 2^17 and inf "
                    "65536, NaN 98304.",
                    _not_saturating,
                ),
            ),
        )
    ]


@rules.quiet
def _not_saturating(x):
    values = x.astype(F)
    bits = values.view(np.uint32)
    if x.dtype == np.float16:
        bits = np.where(np.isnan(values), bits | np.uint32(0x400000), bits)  # torch makes a signalling NaN quiet
    exponent, mantissa = bits >> np.uint32(23), bits & np.uint32(0x7FFFFF)
    kept = mantissa >> np.uint32(20)
    rest = mantissa & np.uint32(0xFFFFF)
    kept += (rest > 0x80000) | ((rest == 0x80000) & (kept & 1 == 1))
    large = (np.minimum(exponent - 112 + (kept >> 3), 31) << 3) | (kept & 7)
    return {"codes": np.where(~(np.abs(values) <= F(118784)), large, encode(values, UE5M3)).astype(np.uint8)}
