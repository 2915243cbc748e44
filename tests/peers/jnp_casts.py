"""XLA's casts, jax.numpy's `astype` under jit."""

import numpy as np

import refops
from peers import rules
from peers.ml_dtypes_casts import NO_SATURATION
from peers.registry import Divergence, Offer

NAME, PACKAGES = "jnp", ("jax", "jaxlib")


def offers():
    import jax
    import jax.numpy as jnp

    def offer(subject, dtype, *divergences):
        cast = jax.jit(lambda x: x.astype(dtype))
        return Offer(
            subject,
            lambda x: cast(x).block_until_ready(),
            lambda y: {"codes": np.asarray(y).view(np.uint8)},
            jnp.asarray,
            divergences=divergences,
        )

    found = []
    for fmt, dtype in ((refops.E4M3, jnp.float8_e4m3fn), (refops.E5M2, jnp.float8_e5m2)):
        sentence = NO_SATURATION.format("inf" if fmt.infinity_code else "NaN")
        divergence = Divergence("no saturation", sentence, rules.not_saturating(fmt))
        found.append(offer(f"{fmt!r} cast, saturating", dtype, divergence))
        found.append(offer(f"{fmt!r} cast, not saturating", dtype))
    nan = Divergence("NaN as zero", "NaN becomes -0.", rules.nan_as_zero(refops.E2M1, False))
    found.append(offer("E2M1 cast", jnp.float4_e2m1fn, nan))
    bottom = Divergence(
        "rounds up at the bottom",
        "2^-127 < x < 1.5 * 2^-127 gives 2^-126, not the nearer 2^-127; zero gives NaN.",
        rules.e8m0_nearest_up_at_the_bottom(0xFF),
    )
    found.append(offer("E8M0 cast, to nearest", jnp.float8_e8m0fnu, bottom))
    return found
