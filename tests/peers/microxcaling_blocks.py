"""microxcaling, the OCP specification's companion (package `mx`): values of MX blocks, no codes and no scales.

It is not on PyPI: clone it and put it on the path. It computes in the dtype that it is given; bfloat16 is given as
float32, as its users do, because its log2 would be rounded to bfloat16. Its default rounding is ties-away; asked for
"even" here.
"""

import numpy as np

import refops
from peers import rules
from peers.registry import Divergence, Offer, as_numpy, as_torch

NAME, PACKAGES = "microxcaling", ("mx", "torch")
F = np.float32
ELEMENTS = {refops.E4M3: "fp8_e4m3", refops.E5M2: "fp8_e5m2", refops.E3M2: "fp6_e3m2", refops.E2M3: "fp6_e2m3"}


def offers():
    from mx.mx_ops import quantize_mx_op
    from mx.specs import MxSpecs

    specs = MxSpecs({"scale_bits": 8, "block_size": 32, "shared_exp_method": "max"})
    found = []
    for fmt, name in ELEMENTS.items():
        kind = "MXFP8" if fmt.bits == 8 else "MXFP6"

        def run(x, name=name):
            return quantize_mx_op(x, specs, elem_format=name, block_size=32, axes=[-1], round="even")

        found.append(
            Offer(
                f"{kind} {fmt!r}, floor rule",
                run,
                lambda y: {"values": as_numpy(y)},
                lambda x: as_torch(np.asarray(x, F)),
                divergences=(
                    Divergence(
                        "log2",
                        "The exponents of scale and elements are floor(log2) in float32: one too large just below a "
                        "power of two.",
                        _values(fmt, False, False),
                    ),
                    Divergence("-0", "-0 loses its sign.", _values(fmt, True, False)),
                    Divergence(
                        "NaN and inf",
                        "NaN, or a scale above 2^127, makes the whole block NaN; infinity stays infinite.",
                        _values(fmt, True, True),
                    ),
                ),
            )
        )
    return found


def _floor_log2(values):
    return np.floor(rules.log2_float32(values))


def _values(fmt, zeros, special):
    emax = int(np.log2(fmt.max))

    @rules.quiet
    def arrays(x):
        values = rules.blocks(x, 32)
        amax = rules.block_amax(x, 32, keep_nan=special)
        exponent = _floor_log2(np.where(amax == 0, rules.SMALLEST_NORMAL, amax)) - F(emax)
        if special:
            exponent = np.where(exponent > 127, F(np.nan), exponent)
        scale = np.exp2(np.maximum(exponent, F(-127))).astype(F)[..., None]
        scaled = values / scale
        magnitude = np.abs(scaled)
        private = np.maximum(_floor_log2(np.where(magnitude == 0, F(1), magnitude)), F(1 - fmt.bias))
        step = np.exp2(private - F(fmt.mantissa_bits)).astype(F)
        rounded = np.clip(np.rint(scaled / step) * step, -fmt.max, fmt.max)
        if zeros:
            rounded = np.where(scaled == 0, F(0), rounded)
        if special:
            rounded = np.where(np.isinf(scaled), scaled, rounded)
        return {"values": (rounded * scale).astype(F).reshape(x.shape)}

    return arrays
