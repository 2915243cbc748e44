"""What a conversion to a small float must give, by a search among the format's numbers; and values to convert."""

import ml_dtypes
import numpy as np


def doubles(values):
    """Values as float64, NaN among them without a warning."""
    with np.errstate(invalid="ignore"):
        return values.astype(np.float64)


def every_brain_and_more(seed):
    """All bfloat16 as float32, values between them, and special ones."""
    codes = np.arange(65536, dtype=np.uint32) << 16
    low = np.random.default_rng(seed).integers(0, 1 << 16, 65536, dtype=np.uint32)
    return np.concatenate([codes, codes | low, codes | 0x8000]).view(np.float32)


def magnitudes(dtype):
    """Ascending finite magnitudes of a small format; the index is the code."""
    codes = np.arange(1 << (ml_dtypes.finfo(dtype).bits - 1), dtype=np.uint8)
    values = codes.view(dtype).astype(np.float64)
    return values[np.isfinite(values)]


def nearest_codes(x, dtype):
    """Codes of the nearest, ties to even, saturating; NaN as the ISA says. By a search among the format's numbers."""
    grid = magnitudes(dtype)
    size = np.minimum(np.abs(doubles(x)), grid[-1])
    size = np.where(np.isnan(x), 0, size)
    upper = np.searchsorted(grid, size)
    lower = np.maximum(upper - (grid[upper] != size), 0)
    to_upper, to_lower = grid[upper] - size, size - grid[lower]
    code = np.where((to_upper < to_lower) | ((to_upper == to_lower) & (upper % 2 == 0)), upper, lower)
    sign = np.signbit(x).astype(np.int64) << (ml_dtypes.finfo(dtype).bits - 1)
    return np.where(np.isnan(x), nan_code(dtype), code | sign).astype(np.uint32)


def nan_code(dtype):
    """The code of NaN; of a format without NaN the largest number's."""
    return 0x7F if ml_dtypes.finfo(dtype).bits == 8 else len(magnitudes(dtype)) - 1
