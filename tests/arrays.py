"""What the tests of all packages share: a heavy-tailed tensor, and whether two arrays or results have the same bits."""

import ml_dtypes
import numpy as np

#: The arrays of a quantized result.
ARRAYS = (
    "rowwise_data",
    "rowwise_scale_inv",
    "columnwise_data",
    "columnwise_scale_inv",
    "amax_rowwise",
    "amax_columnwise",
)


def heavy_tailed(shape, dtype=ml_dtypes.bfloat16, seed=0):
    """Values that differ by orders of magnitude (Student's t with two degrees of freedom), with zeros of both signs."""
    x = np.random.default_rng(seed).standard_t(2, shape).astype(np.float32)
    x.reshape(-1)[::97] = 0
    x.reshape(-1)[5::211] = -0.0
    return x.astype(dtype)


def coarse(shape, dtype=ml_dtypes.bfloat16, seed=1):
    """Multiples of 1/4: blocks of 16 whose errors under two scales are nearly, or exactly, the same are not rare."""
    return (np.round(np.random.default_rng(seed).standard_normal(shape) * 4) / 4).astype(dtype)


def raw(array):
    """The array's elements as unsigned integers of their size."""
    array = np.ascontiguousarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def same_bits(one, other):
    """Whether two arrays have the same dtype, shape and bits (signs of zero and NaN payloads included)."""
    one, other = np.asarray(one), np.asarray(other)
    return one.dtype == other.dtype and one.shape == other.shape and np.array_equal(raw(one), raw(other))


def assert_same_bits(actual, expected, what="array"):
    """Assert `same_bits` of two NumPy arrays, or that both are None; a failure names the first element that differs."""
    if expected is None or actual is None:
        assert actual is None and expected is None, f"{what}: {type(actual)} versus {type(expected)}"
        return
    assert isinstance(actual, np.ndarray), f"{what}: {type(actual)}"
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} versus {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: {actual.shape} versus {expected.shape}"
    different = np.flatnonzero(raw(actual).ravel() != raw(expected).ravel())
    if different.size:
        first = tuple(map(int, np.unravel_index(different[0], actual.shape)))
        raise AssertionError(
            f"{what}: {different.size} of {actual.size} differ, first at {first}: "
            f"{actual[first]!r} versus {expected[first]!r}"
        )


def assert_same_values(actual, expected, what="array"):
    """Like `assert_same_bits`, but all NaN count as equal."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, what
    a, e = np.isnan(actual.astype(np.float32)), np.isnan(expected.astype(np.float32))
    assert_same_bits(np.where(a, actual.dtype.type(0), actual), np.where(e, actual.dtype.type(0), expected), what)
    assert np.array_equal(a, e), f"{what}: NaN in other places"


def assert_same_quantized(actual, expected, what=""):
    """Every array of two results has the same bits, padding included."""
    for name in ARRAYS:
        assert_same_bits(getattr(actual, name), getattr(expected, name), f"{what} {name}")
