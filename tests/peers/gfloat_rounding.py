"""gfloat: rounding by the definition of any format, and MX blocks by the OCP specification."""

import numpy as np

import refops
from peers import rules
from peers.registry import Divergence, Offer
from peers.subjects import SUBJECTS

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
    for subject, info, refuses in (
        ("MXFP8 E4M3, floor rule", gfloat.formats.format_info_mxfp8_e4m3, {}),
        ("MXFP8 E5M2, floor rule", gfloat.formats.format_info_mxfp8_e5m2, {}),
        ("MXFP6 E3M2, floor rule", gfloat.formats.format_info_mxfp6_e3m2, {"NaN": ValueError}),
        ("MXFP6 E2M3, floor rule", gfloat.formats.format_info_mxfp6_e2m3, {"NaN": ValueError}),
        ("MXFP4, floor rule", gfloat.formats.format_info_mxfp4_e2m1, {"NaN": ValueError}),
        ("MXINT8, floor rule", gfloat.formats.format_info_mxint8, {"NaN": ValueError}),
    ):
        found.append(_blocks(gfloat, subject, info, refuses))
    return found


def _blocks(gfloat, subject, info, refuses):
    """MX with the floor rule, block after block: returns values."""

    @rules.quiet
    def run(x):
        quantized = [gfloat.quantize_block(info, block, gfloat.compute_scale_amax) for block in x.reshape(-1, 32)]
        return np.array(quantized).reshape(x.shape)

    return Offer(
        subject,
        run,
        lambda y: {"values": y.astype(F)},
        lambda x: x.astype(np.float64),
        divergences=(
            Divergence("-128", "-128 is used: -2 times the scale; refops stops at -127.", _minus_128)
            if subject.startswith("MXINT8")
            else Divergence("NaN", "NaN makes its whole block NaN; refops ignores NaN.", _nan_blocks(subject)),
        ),
        rows=16,
        refuses=refuses,
    )


@rules.quiet
def _minus_128(x):
    q = refops.quantize(x, refops.MXINT8Scaling())
    scale = np.repeat(refops.E8M0.values[q.rowwise_scale_inv], 32, axis=1)
    return {"values": np.where(x.astype(F) <= F(-127.5 / 64) * scale, F(-2) * scale, refops.dequantize(q))}


def _nan_blocks(subject):
    @rules.quiet
    def arrays(x):
        values = rules.blocks(SUBJECTS[subject].values(refops, x), 32)
        has_nan = np.isnan(rules.block_amax(x, 32))[..., None]
        return {"values": np.where(has_nan, F(np.nan), values).reshape(x.shape)}

    return arrays
