"""What peers do where they differ from refops, re-derived from refops' own parts, for `Divergence.predict`.

Each function takes the NumPy input and returns arrays named as refops names them.
"""

from dataclasses import replace

import numpy as np

import refops
from peers import e8m0
from peers.registry import Divergence
from peers.subjects import SUBJECTS
from refops.formats import encode

F = np.float32
SMALLEST_NORMAL = np.finfo(F).tiny


def quiet(function):
    """`function` without NumPy's warnings: overflow and NaN are the subject here."""

    def wrapped(*arguments):
        with np.errstate(all="ignore"):
            return function(*arguments)

    return wrapped


def with_special_apart(subject, block, divergences, sentence):
    """The divergences for tiles with a finite amax alone, and one more for tiles with NaN or infinity in them.

    Without the last, such tiles are taken to be as refops has them. The last prediction in `divergences` is the full
    account.

    Args:
        subject: name of the subject.
        block: (rows, columns) that an amax is taken of, None for the whole tensor.
        divergences: from the widest to the full account.
        sentence: what the peer does with NaN and infinity, and what refops does.
    """

    def finite_alone(predict):
        @quiet
        def arrays(x):
            theirs, ours = predict(x), SUBJECTS[subject].arrays(refops, x)
            tile = block or x.shape
            strange = ~np.isfinite(tile_amax(x, tile))
            found = {}
            for name, array in theirs.items():
                whole = spread(strange, tile, x.shape) if array.shape == x.shape else strange
                where = whole.reshape(array.shape) if whole.size == array.size else whole.any()
                found[name] = np.where(where, ours[name], array)
            return found

        return arrays

    finite = [replace(divergence, predict=finite_alone(divergence.predict)) for divergence in divergences]
    return (*finite, Divergence("NaN and inf", sentence, divergences[-1].predict))


#: Of FP8 scalings that put a NaN or infinite amax into the scale.
FP8_SPECIAL = (
    "NaN or inf in the amax is in the scale too: codes are 0 or NaN; refops ignores NaN, and takes scale 1 for inf."
)


# --- casts ---------------------------------------------------------------------------------------


def not_saturating(fmt):
    """Overflow gives inf, or NaN where the format has no inf."""
    return quiet(lambda x: {"codes": encode(x, fmt, saturate=False)})


def nan_as_zero(fmt, opposite_sign):
    """NaN gives a zero: of the opposite sign, or -0 always."""

    def predict(x):
        codes, minus = encode(x, fmt), np.uint8(1 << (fmt.bits - 1))
        zero = np.where(np.signbit(x) & opposite_sign, np.uint8(0), minus)
        return {"codes": np.where(np.isnan(x.astype(F)), zero, codes)}

    return quiet(predict)


def e8m0_nearest_up_at_the_bottom(zero_code):
    """Between 2^-127 and 1.5 * 2^-127 the code is 1; zero has a code of its own."""

    def predict(x):
        codes, values = encode(x, refops.E8M0, rounding="nearest_away", saturate=False), x.astype(np.float64)
        codes = np.where((values > 2.0**-127) & (values < 1.5 * 2.0**-127), np.uint8(1), codes)
        return {"codes": np.where(values == 0, np.uint8(zero_code), codes)}

    return quiet(predict)


def e8m0_ties_to_even(x):
    """Nearest, ties to the even exponent."""
    return {"codes": encode(x, refops.E8M0, rounding="nearest_even", saturate=False)}


@quiet
def e8m0_wrapping(x):
    """The exponent's low eight bits, below 2^-127 too."""
    codes, values = e8m0_ties_to_even(x)["codes"], x.astype(np.float64)
    small = (values > 0) & (values < 2.0**-127)
    fraction, exponent = np.frexp(np.where(small, values, 1.0))  # fraction in [0.5, 1)
    lower = exponent - 1
    up = (fraction > 0.75) | ((fraction == 0.75) & ((lower + 127) % 2 == 1))
    return {"codes": np.where(small, (lower + up + 127) & 0xFF, codes).astype(np.uint8)}


# --- MX ------------------------------------------------------------------------------------------


def blocks(x, size):
    """(M, K / size, size) in float32."""
    return x.astype(F).reshape(len(x), -1, size)


def block_amax(x, size, keep_nan=True):
    """Largest magnitude of each block; NaN where one is in it, unless they are to be ignored."""
    magnitude = np.abs(blocks(x, size))
    return (np.maximum if keep_nan else np.fmax).reduce(magnitude, axis=2)


def log2_float32(values):
    """log2 rounded to float32, as math libraries give it for most arguments."""
    return np.log2(values.astype(np.float64)).astype(F)


def mx(x, fmt, scale, multiplier):
    """Codes of x times one multiplier a block."""
    codes = encode((blocks(x, 32) * multiplier[..., None]).astype(F), fmt)
    return {"rowwise codes": codes.reshape(x.shape), "rowwise scales": scale}


def scale_bytes(amax, fmt, rule):
    """refops' byte for each amax, NaN counting as zero."""
    return e8m0.scale_byte(np.where(np.isnan(amax), F(0), amax), fmt, rule)


def ceil_log2_byte(amax, largest):
    """ceil of a float32 log2 of amax / largest, as byte."""
    exponent = np.ceil(log2_float32(amax / F(largest)))
    exponent = np.clip(np.where(np.isnan(exponent), F(-127), exponent), -127, 127)
    return (exponent + 127).astype(np.uint8)


def e2m1_ties_down(scaled):
    """The codes of the magnitudes: the nearest, and of two the smaller; 7 for NaN."""
    between = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
    return np.searchsorted(between, np.abs(scaled)).astype(np.uint8)


# --- FP8 -----------------------------------------------------------------------------------------


def rounded(values, dtype):
    """float32 values after a rounding to `dtype`."""
    return values.astype(dtype).astype(F)


def tensor_amax(x):
    """Largest magnitude, NaN if there is one."""
    return np.max(np.abs(x.astype(F)), initial=F(0))


def spread(scales, block, shape):
    """Repeat scales over their blocks."""
    return np.repeat(np.repeat(scales, block[0], axis=0), block[1], axis=1)[: shape[0], : shape[1]]


def tile_amax(x, block):
    """Largest magnitude of each tile, NaN if there is one in it."""
    (m, k), (rows, columns) = x.shape, block
    return np.abs(x.astype(F)).reshape(m // rows, rows, k // columns, columns).max(axis=(1, 3))
