"""ml_dtypes' casts, NumPy's `astype`."""

import numpy as np

import refops
from peers import rules
from peers.registry import Divergence, Offer

NAME, PACKAGES = "ml_dtypes", ("ml_dtypes",)

NAN_AS_ZERO = "NaN becomes a zero of the opposite sign; refops gives the largest value, as NVIDIA's casts do."
NO_SATURATION = "No saturation: overflow gives {}."


def offers():
    import ml_dtypes

    def offer(subject, dtype, *divergences):
        @rules.quiet
        def run(x):
            return x.astype(dtype)

        return Offer(subject, run, lambda y: {"codes": y.view(np.uint8)}, lambda x: x, divergences=divergences)

    found = []
    for fmt, dtype in ((refops.E4M3, ml_dtypes.float8_e4m3fn), (refops.E5M2, ml_dtypes.float8_e5m2)):
        sentence = NO_SATURATION.format("inf" if fmt.infinity_code else "NaN")
        divergence = Divergence("no saturation", sentence, rules.not_saturating(fmt))
        found.append(offer(f"{fmt!r} cast, saturating", dtype, divergence))
        found.append(offer(f"{fmt!r} cast, not saturating", dtype))
    for fmt, dtype in (
        (refops.E2M1, ml_dtypes.float4_e2m1fn),
        (refops.E3M2, ml_dtypes.float6_e3m2fn),
        (refops.E2M3, ml_dtypes.float6_e2m3fn),
    ):
        found.append(
            offer(f"{fmt!r} cast", dtype, Divergence("NaN as zero", NAN_AS_ZERO, rules.nan_as_zero(fmt, True)))
        )
    bottom = Divergence(
        "rounds up at the bottom",
        "2^-127 < x < 1.5 * 2^-127 gives 2^-126, not the nearer 2^-127; zero gives NaN.",
        rules.e8m0_nearest_up_at_the_bottom(0xFF),
    )
    found.append(offer("E8M0 cast, to nearest", ml_dtypes.float8_e8m0fnu, bottom))
    return found
