"""Amaxes of blocks at which a wrong rule of scales shows: a neighbour has another scale, or the scale is small."""

from itertools import chain, zip_longest

import ml_dtypes
import numpy as np

from refops.golden.preimages import preimage_of

F = np.float32
#: Steps of the search for the amax at which a code changes, and how many amaxes near one are taken.
SEARCHED, CLOSE = 24, 8
#: Relative change by a rounding from which an amax is another one, whatever the last places of exp and tanh are.
LEAST_LOSS = 2.0**-14
#: Binades down to which an activation's results are looked for that are amaxes on an edge, and how many amaxes that
#: rounding changes are taken.
REACHED, LOSSY = 14, 6


def binade(x):
    """The exponent e of a number: 2^e <= x < 2^(e + 1)."""
    return int(np.frexp(float(x))[1]) - 1


def amaxes_of_binade(dtype, exponent):
    """float32, ascending: the numbers of a 16-bit dtype in [2^e, 2^(e + 1)); of float32 bfloat16's and what is next."""
    bits = ml_dtypes.finfo(dtype).nmant if dtype.itemsize == 2 else ml_dtypes.finfo(ml_dtypes.bfloat16).nmant
    with np.errstate(all="ignore"):
        amaxes = np.ldexp(1 + np.arange(1 << bits) / (1 << bits), exponent).astype(F)
        if dtype == F:
            amaxes = np.stack([np.nextafter(amaxes, F(0)), amaxes, np.nextafter(amaxes, F(np.inf))], axis=1).ravel()[1:]
        stored = amaxes.astype(dtype)
    return np.unique(amaxes[(stored == amaxes) & (amaxes > 0) & np.isfinite(stored)])


def power_of_two_edges(fmt, scales_of, amaxes):
    """Amaxes of a binade at which one rule of scales that are powers of two goes on to the next one, and neighbours.

    The largest value of the format times a power of two, where scales are rounded up; a power of two, where they are
    rounded down; where the scaling's own rule goes on. [] where the scales are 0, or no powers of two.

    Args:
        fmt: of the elements.
        scales_of: float32 (N,) amaxes -> (N,) scales as stored.
        amaxes: float32, ascending.
    """
    scales = scales_of(amaxes)
    changes = np.flatnonzero(scales[1:] != scales[:-1])
    if len(amaxes) < 2 or len(changes) > 1 or not scales[-1]:
        return []
    exact = np.ldexp(float(fmt.max), binade(amaxes[0]) - binade(fmt.max))
    largest = int(np.searchsorted(amaxes, exact))
    index = [*(largest + by for by in (0, 1, -1)), 0, 1, -1, *(i + by for i in changes for by in (0, 1))]
    return [float(amaxes[i]) for i in dict.fromkeys(index) if -1 <= i < len(amaxes)]


def close_edges(scales_of, amaxes, is_dense):
    """The amaxes nearest to where their scale code changes, so near that a rounding to bfloat16 may reach it.

    Those with an odd code come first: such a rounding ends at a tie, and the tie at the even code beside it.
    [] where scales have no mantissa: they change too seldom, or everywhere.

    Args:
        scales_of: as above.
        amaxes: float32, ascending.
        is_dense: whether an amax may be any float32 number between these.
    """
    scales = scales_of(amaxes)
    changes = np.flatnonzero(scales[1:] != scales[:-1])
    if len(changes) <= 1 or len(changes) > len(amaxes) // 2:
        return []
    low, high = amaxes[changes].astype(np.float64), amaxes[changes + 1].astype(np.float64)
    for _ in range(SEARCHED):
        middle = (low + high) / 2
        is_below = scales_of(middle.astype(F)) == scales[changes]
        low, high = np.where(is_below, middle, low), np.where(is_below, high, middle)
    index, edges = np.concatenate([changes, changes + 1]), np.concatenate([low, high]).astype(F)
    near = edges if is_dense else amaxes[index]
    distance = np.abs(near / np.concatenate([low, low]) - 1)
    return near[np.lexsort((distance, scales[index] % 2 == 0))[:CLOSE]].astype(float).tolist()


def small_code_amaxes(scale_format, scales_of, amaxes):
    """Amaxes whose scale code is 0, or subnormal in its format: one in the middle of each, and the largest of code 0.

    Args:
        scale_format: None, or one without a mantissa: [].
        scales_of, amaxes: as above.
    """
    if scale_format is None or not scale_format.mantissa_bits:
        return []
    codes, found = scales_of(amaxes), []
    for code in range(1 << scale_format.mantissa_bits):
        alike = amaxes[codes == code]
        found += [float(alike[len(alike) // 2 if code else -1])] if alike.size else []
    return found


def lossy_amaxes(preimage, scales_of, most):
    """Unrounded results of an activation, signed, whose scale is not that of the rounded one; large ones first.

    Args:
        scales_of: as above.
        most: what their magnitudes are below.
    """
    unrounded, rounded = np.abs(preimage.unrounded), np.abs(preimage.results)
    near = (unrounded < most) & (rounded < most) & (rounded > most * 2.0**-12) & (unrounded != rounded)
    index = np.flatnonzero(near & (np.abs(unrounded - rounded) > LEAST_LOSS * rounded))
    index = index[scales_of(unrounded[index]) != scales_of(rounded[index])]
    index = index[np.argsort(-rounded[index], kind="stable")]
    return preimage.unrounded[index].astype(float).tolist()


def edges_of(case, scales_of, usual):
    """Signed amaxes on an edge below 2^(usual + 1) that a `Case` reaches, those that show the most first.

    Of an activation they are its results: those of the first binade in which it reaches most of them.

    Args:
        scales_of: as above.
        usual: the binade of the amaxes of neighbours.
    """
    layout, dtype = case.scaling.layout, case.inputs["x"].dtype
    info = ml_dtypes.finfo(dtype)
    least = int(info.minexp) - int(info.nmant)  # the exponent of the dtype's smallest number
    highest, lossy = usual, []
    every = np.concatenate([amaxes_of_binade(dtype, exponent) for exponent in range(least, usual)])
    if case.operation.kind != "quantize":
        preimage = preimage_of(case)
        results = np.unique(np.abs(preimage.results))
        highest, every = min(usual, binade(results[-1])), results[(results > 0) & (results < 2.0**usual)]
        if dtype != F and case.scaling.path.casts_rounded:
            lossy = lossy_amaxes(preimage, scales_of, 2.0 ** (usual + 1))[:LOSSY]
    small = _reached(case, small_code_amaxes(layout.scale_format, scales_of, every))
    close = _reached(case, close_edges(scales_of, every[every >= 2.0 ** (usual - 1)], dtype == F))
    steps = []
    for exponent in range(highest, highest - REACHED, -1):
        wanted = power_of_two_edges(case.scaling.fmt, scales_of, amaxes_of_binade(dtype, exponent))
        reached = _reached(case, wanted)
        steps = max(steps, reached, key=len)
        if wanted and len(reached) == len(wanted):
            break
    return _in_turn(steps, close, small, lossy)


def _reached(case, amaxes):
    """-amax where the operation has such a result, else amax; those that it never reaches are left out."""
    if case.operation.kind == "quantize" or not amaxes:
        return [-amax for amax in amaxes]
    preimage, positive = preimage_of(case), np.array(amaxes)
    with_sign = np.where(preimage.reaches(-positive), -positive, positive)
    return with_sign[preimage.reaches(with_sign)].tolist()


def _in_turn(*lists):
    """The first of each list, then the second of each, to the end of the longest."""
    return [one for one in chain.from_iterable(zip_longest(*lists)) if one is not None]
