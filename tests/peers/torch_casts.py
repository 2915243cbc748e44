"""torch's own casts to 8-bit floats."""

import refops
from peers import rules
from peers.registry import Divergence, Offer, as_numpy, as_torch

NAME, PACKAGES = "torch", ("torch",)


def offers():
    import torch

    def offer(subject, dtype, *divergences):
        return Offer(
            subject, lambda x: x.to(dtype), lambda y: {"codes": as_numpy(y)}, as_torch, divergences=divergences
        )

    found = []
    for fmt, dtype in ((refops.E4M3, torch.float8_e4m3fn), (refops.E5M2, torch.float8_e5m2)):
        saturates = bool(torch.isfinite(torch.tensor([1e6]).to(dtype).float()).item())
        for wanted, subject in ((True, "saturating"), (False, "not saturating")):
            divergences = ()
            if saturates and not wanted:
                divergences = (
                    Divergence(
                        "saturates",
                        f"The cast to {fmt!r} always saturates, infinity included.",
                        rules.quiet(lambda x, fmt=fmt: {"codes": refops.encode(x, fmt)}),
                    ),
                )
            elif wanted and not saturates:
                divergences = (
                    Divergence(
                        "no saturation",
                        f"The cast to {fmt!r} cannot saturate: overflow gives {'inf' if fmt.infinity_code else 'NaN'}.",
                        rules.not_saturating(fmt),
                    ),
                )
            found.append(offer(f"{fmt!r} cast, {subject}", dtype, *divergences))
    if hasattr(torch, "float8_e8m0fnu"):
        rises = Divergence(
            "rounds up at the bottom",
            "2^-127 < x < 1.5 * 2^-127 gives 2^-126, not the nearer 2^-127.",
            rules.e8m0_nearest_up_at_the_bottom(0),
        )
        found.append(offer("E8M0 cast, to nearest", torch.float8_e8m0fnu, rises))
    return found
