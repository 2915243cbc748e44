"""Numbers that a dump implies: the factor between two arrays, the magnitude of its scaled values, a parameter.

A fit proposes; the replay with the number decides. Entries that equal the reference say nothing of a fault and are left
out, so that a fault of a few rows has the same number as one of all.
"""

import numpy as np

from refops.oracle.geometry import Geometry, crop
from refops.oracle.replay import NotApplicable
from refops.quantization.result import DIRECTIONS

F = np.float32
#: Relative errors of float32 arithmetic that ratios may have besides their roundings; the least that does is taken.
NOISES = (2.0**-20, 2.0**-17, 2.0**-14)


def roundoff(dtype):
    """Relative error of rounding to a float dtype, at most."""
    if dtype == F:
        return 2.0**-24
    one = np.ones(1, dtype)
    above = (one.view(np.uint16) + np.uint16(1)).view(dtype).astype(np.float64)[0]
    return float(above - 1) / 2


def common_ratio(got, expected, error):
    """(low, high): the factors c with got = c * expected where the two differ, each up to a relative `error`.

    NotApplicable where there is no such factor, where it may be 1, or where nothing can be said.
    """
    got, expected = (np.asarray(a, np.float64).ravel() for a in (got, expected))
    usable = np.isfinite(got) & np.isfinite(expected) & (got != 0) & (expected != 0) & (got != expected)
    if not usable.any():
        raise NotApplicable
    ratio = got[usable] / expected[usable]
    stray = 0.01 if len(ratio) > 200 else 0
    for noise in NOISES:  # where terms cancel, float32 arithmetic is less precise
        low = float(np.quantile(ratio * (1 - error - noise), 1 - stray))
        high = float(np.quantile(ratio * (1 + error + noise), stray))
        if 0 < low <= high:
            break
    else:
        raise NotApplicable
    if low <= 1 <= high:
        raise NotApplicable
    return low, high


def named_constant(low, high, known):
    """(value, words) of the first of `known` (words -> value) between two bounds.

    Else of a number of at most four digits or one by it; else of the middle.
    """
    for words, value in known.items():
        if low <= value <= high:
            return value, words
    middle = (low + high) / 2
    for digits in range(1, 5):
        short, below = float(f"{middle:.{digits}g}"), float(f"{1 / middle:.{digits}g}")
        if low <= short <= high:
            return short, f"{short:g}"
        if low <= 1 / below <= high:
            return 1 / below, f"1/{below:g}"
    return middle, f"{middle:.7g}"


def simplest_number(low, high):
    """The number in [low, high] with the fewest decimal digits, eight at most; None where the interval is empty."""
    if not (np.isfinite(low) and np.isfinite(high)) or low > high:
        return None
    middle = (low + high) / 2
    for digits in range(1, 9):
        number = float(f"{middle:.{digits}g}")
        if low <= number <= high:
            return number
    return middle


def powers_of_two():
    """words -> value: 4, 1/4 and further ones."""
    known = {}
    for exponent in range(2, 33):
        known |= {f"2^{exponent}": 2.0**exponent, f"2^-{exponent}": 2.0**-exponent}
    return known


def dumped_values(replay, region):
    """What the dump holds of a region, float32 (R, C): its values, or its codes times its scales.

    NotApplicable where it holds none. Scales of two levels are taken to be relative to the dumped amax.
    """
    setting, outputs = replay.setting, replay.setting.outputs
    for name in ("y", "dx"):
        if name in outputs:
            return crop(replay.case, name, outputs[name], region).astype(F)
    for direction in DIRECTIONS:
        data, scale_inv = f"{direction}_data", f"{direction}_scale_inv"
        if data in outputs and scale_inv in outputs and not replay.hadamard[direction]:
            break
    else:
        raise NotApplicable
    geometry = Geometry.of(replay.case.scaling, direction)
    codes = geometry.codes(outputs[data], setting.shape, region.rows, region.columns)
    scales = geometry.scales(outputs[scale_inv], region.rows, region.columns)
    amax = setting.dumped_amax(direction) if replay.layout.two_level else None
    if replay.layout.two_level and amax is None:
        raise NotApplicable
    with np.errstate(all="ignore"):
        factor = replay.rule.decode_factor(scales, amax)
        return (replay.fmt.values.take(codes, mode="clip") * geometry.expand(factor, region.shape)).astype(F)


def distance(made, dumped):
    """How far values lie from those of a dump: the mean relative difference, each at most 1; NaN if there is none."""
    with np.errstate(all="ignore"):
        size = np.maximum(np.abs(made), np.abs(dumped)).astype(np.float64)
        off = np.abs(made.astype(np.float64) - dumped) / np.where(size > 0, size, 1)
    return float(np.mean(np.where(np.isfinite(off), np.minimum(off, 1), 0))) if off.size else 0.0


def fitted_number(distance_of, start):
    """The positive number that makes `distance_of` least: a grid of factors around `start`, then ever finer ones.

    The best of the last step is said in as few digits as do no harm. NotApplicable where it lies at an end of the grid.
    """
    best, step, found = start, 2.0**0.5, {}
    candidates = [start * step**i for i in range(-10, 11)]
    ends = candidates[1], candidates[-2]
    for _ in range(14):
        for number in candidates:
            found[number] = distance_of(number) if number not in found else found[number]
        best = min(found, key=found.get)
        if not ends[0] < best < ends[1]:
            raise NotApplicable
        step = step**0.5
        candidates = [best / step, best * step]
    for digits in range(1, 8):
        short = float(f"{best:.{digits}g}")
        if distance_of(short) <= found[best] * 1.02:
            return short
    return best
