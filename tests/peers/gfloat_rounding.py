"""gfloat: rounding by the definition of any format, and MX blocks by the OCP specification."""

import numpy as np

import refops
from peers import rules
from peers.registry import Divergence, Offer

NAME, PACKAGES = "gfloat", ("gfloat",)
F = np.float32


def offers():
    import gfloat
    import gfloat.formats

    def rounding(info, saturate):
        even = gfloat.RoundMode.TiesToEven
        return lambda x: gfloat.encode_ndarray(info, gfloat.round_ndarray(info, x, even, saturate))

    def cast(subject, fmt, saturate, *divergences, refuses=()):
        info = getattr(gfloat.formats, f"format_info_ocp_{fmt.name}")
        return Offer(
            subject,
            rounding(info, saturate),
            lambda y: {"codes": y.astype(np.uint8)},
            lambda x: x.astype(np.float64),
            divergences=divergences,
            refuses=dict(refuses),
        )

    found = []
    for fmt in (refops.E4M3, refops.E5M2):
        found.append(cast(f"{fmt!r} cast, saturating", fmt, True))
        found.append(cast(f"{fmt!r} cast, not saturating", fmt, False))
    for fmt in (refops.E2M1, refops.E3M2, refops.E2M3):
        found.append(cast(f"{fmt!r} cast", fmt, True, refuses={"NaN": AssertionError}))
    found.append(
        cast(
            "E8M0 cast, to nearest",
            refops.E8M0,
            False,
            Divergence(
                "ties to even", "Ties go to the even exponent; refops' nearest goes up.", rules.e8m0_ties_to_even
            ),
            Divergence("wraps", "Below 2^-127 the exponent wraps around to huge scales.", rules.e8m0_wrapping),
        )
    )
    for fmt in (refops.E4M3, refops.E5M2, refops.E3M2, refops.E2M3):
        found.append(_blocks(gfloat, fmt))
    return found


def _blocks(gfloat, fmt):
    """MX with the floor rule, block after block: returns values."""
    kind = "mxfp8" if fmt.bits == 8 else "mxfp6"
    info = getattr(gfloat.formats, f"format_info_{kind}_{fmt.name}")

    @rules.quiet
    def run(x):
        quantized = [gfloat.quantize_block(info, block, gfloat.compute_scale_amax) for block in x.reshape(-1, 32)]
        return np.array(quantized).reshape(x.shape)

    return Offer(
        f"{kind.upper()} {fmt!r}, floor rule",
        run,
        lambda y: {"values": y.astype(F)},
        lambda x: x.astype(np.float64),
        divergences=(Divergence("NaN", "NaN makes its whole block NaN; refops ignores NaN.", _nan_blocks(fmt)),),
        rows=8,
        refuses={"NaN": ValueError} if fmt.bits < 8 else {},
    )


def _nan_blocks(fmt):
    @rules.quiet
    def arrays(x):
        scaling = refops.MXFP8Scaling(fmt, scale_rounding="floor")
        values = rules.blocks(refops.dequantize(refops.quantize(x, scaling)), 32)
        has_nan = np.isnan(rules.block_amax(x, 32))[..., None]
        return {"values": np.where(has_nan, F(np.nan), values).reshape(x.shape)}

    return arrays
