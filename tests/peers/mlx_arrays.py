"""MLX on the CPU: `mx.quantize` in the modes mxfp4 and mxfp8."""

import ml_dtypes
import numpy as np

import refops
from peers import rules
from peers.registry import Divergence, Offer
from refops.formats import encode

NAME, PACKAGES = "MLX", ("mlx", "mlx-cpu")
F = np.float32


def offers():
    import mlx.core as mx

    def array(x):
        """An array of MLX; bfloat16 through its bits."""
        if x.dtype == ml_dtypes.bfloat16:
            return mx.array(x.view(np.uint16)).view(mx.bfloat16)
        return mx.array(x)

    def quantize(mode):
        def run(x):
            y = mx.quantize(x, mode=mode)
            mx.eval(*y)
            return y

        return run

    def read(y):
        """Codes are packed into uint32, the first element in the lowest bits."""
        codes, scales = (np.array(part) for part in y)
        codes = codes.view(np.uint8)
        return {
            "rowwise codes": codes if y[0].shape[1] * 32 == y[1].shape[1] * 256 else refops.unpack_fp4(codes),
            "rowwise scales": scales,
        }

    found = []
    for subject, mode, fmt in (
        ("MXFP4, TE's rule", "mxfp4", refops.E2M1),
        ("MXFP8 E4M3, TE's rule", "mxfp8", refops.E4M3),
    ):
        found.append(Offer(subject, quantize(mode), read, array, divergences=_mx(fmt)))
    return found


def _mx(fmt):
    """The power of two that is not below amax / max: refops' rule, in the dtype of the input and with no lower end."""

    def account(nearest, ends, special):
        @rules.quiet
        def arrays(x):
            amax = rules.block_amax(x, 32)
            relative = rules.rounded(amax / fmt.max, x.dtype)
            fraction, exponent = np.frexp(np.where((relative > 0) & np.isfinite(relative), relative, F(1)))
            exponent -= fraction == 0.5
            exponent = exponent if ends else np.maximum(exponent, -127)
            byte = ((exponent + 127) & 0xFF).astype(np.uint8)
            if not ends:
                byte = np.where(relative == 0, np.uint8(0), byte)
                exponent = np.where(relative == 0, -127, exponent)
            scaled = rules.rounded(rules.blocks(x, 32) / np.exp2(exponent.astype(np.float64))[..., None], x.dtype)
            codes = encode(scaled, fmt)
            if nearest and fmt is refops.E2M1:
                codes = _nearest(scaled)
            if special:
                strange = ~np.isfinite(relative)
                byte = np.where(strange, np.uint8(0 if x.dtype.itemsize == 2 else 128), byte)
                largest = encode(np.copysign(F(np.inf), rules.blocks(x, 32)), fmt)
                codes = np.where(strange[..., None], np.uint8(0) if fmt is refops.E2M1 else largest, codes)
            return {"rowwise codes": codes.reshape(x.shape), "rowwise scales": byte}

        return arrays

    first = {
        refops.E2M1: Divergence(
            "ties and zeros",
            "Ties go to the smaller magnitude, and a negative number that becomes zero loses its sign.",
            account(True, False, False),
        ),
        refops.E4M3: Divergence(
            "arithmetic in the input's dtype",
            "amax / 448 and the quotient are rounded to the dtype of the input (float16).",
            account(False, False, False),
        ),
    }
    return (
        first[fmt],
        Divergence(
            "no lower end",
            "A block of zeros has byte 127; below 2^-127 the exponent wraps around to huge scales.",
            account(True, True, False),
        ),
        Divergence(
            "NaN and inf",
            "A block with NaN or infinity has codes 0."
            if fmt is refops.E2M1
            else "NaN or infinity makes a block +-448.",
            account(True, True, True),
        ),
    )


def _nearest(scaled):
    """E2M1 codes; a negative number that becomes zero loses its sign."""
    magnitude = rules.e2m1_ties_down(scaled)
    return np.where(magnitude == 0, magnitude, magnitude | (np.signbit(scaled).astype(np.uint8) << 3))
