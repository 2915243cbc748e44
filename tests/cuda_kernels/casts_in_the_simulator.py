"""Casts as the simulator runs them, plain Python on NumPy scalars, against `refops`: run by test_casts.py.

It is a process of its own, because NUMBA_ENABLE_CUDASIM is read when `cuda_kernels` is imported.
"""

from itertools import pairwise

import ml_dtypes
import numpy as np

import refops
from cuda_kernels import casts, simt
from refops import rounding

F = np.float32


def inputs():
    """352 values: special ones, all kinds of random ones."""
    rng = np.random.default_rng(5)
    special = F(
        [0, -0.0, np.inf, -np.inf, np.nan, 2.0**-149, 2.0**-126, 3.4028235e38, 448, 464, 465, 57344, 6, 5, 0.25, 7]
    )
    patterns = rng.integers(0, 1 << 32, 168, dtype=np.uint32).view(F)
    normal = (rng.standard_normal(168) * np.exp2(rng.uniform(-9, 9, 168))).astype(F)
    return np.concatenate([special, patterns, normal])


def same(function, x, expected, what):
    """Raise where a function of each element differs from what is expected."""
    got = np.array([function(value) for value in x])
    wrong = np.flatnonzero(got != expected)
    assert not len(wrong), f"{what}({x[wrong[0]]!r}) is {got[wrong[0]]}, not {expected[wrong[0]]}"


def main():
    """Compare everything; raise at the first difference."""
    assert simt.SIMULATED and type(casts.e4m3).__name__ == "function"
    x, rng = inputs(), np.random.default_rng(6)
    for name in casts.ENCODERS:
        fmt = refops.FORMATS[name]
        codes = refops.encode(x, fmt)
        same(casts.ENCODERS[name], x, codes, name)
        width = 4 if name == "e2m1" else 8
        for target in (None, (10, 0, "a")):
            pair = casts.pairs_for(name, target)
            got = [pair(low, high) for low, high in pairwise(x)]
            np.testing.assert_array_equal(got, codes[:-1].astype(np.uint16) | codes[1:].astype(np.uint16) << width)
        every = np.arange(len(fmt.values), dtype=np.uint32)
        for decode in (casts.DECODERS[name], casts.CPU_DECODERS[name]):
            np.testing.assert_array_equal([decode(code) for code in every], fmt.values)
    for name, dtype in (("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)):
        stored = rounding.stored(x, np.dtype(dtype))
        same(casts.STORAGES[name].narrow, x, stored.view(np.uint16), f"narrow {name}")
        got = [casts.STORAGES[name].widen(bits) for bits in stored.view(np.uint16)]
        np.testing.assert_array_equal(got, stored.astype(F))
    scales = np.abs(x[~np.isnan(x)])
    same(casts.e8m0_up, scales, refops.encode(scales, refops.E8M0, rounding="up"), "e8m0_up")
    np.testing.assert_array_equal(
        [casts.e8m0_value(code) for code in np.arange(256, dtype=np.uint32)], refops.E8M0.values
    )
    random_bytes = rng.integers(0, 256, len(x), dtype=np.uint8)
    expected = refops.encode(x, refops.E2M1, rounding="stochastic", random_bits=random_bytes)
    got = [casts.e2m1_stochastic(value, byte) for value, byte in zip(x, random_bytes, strict=True)]
    np.testing.assert_array_equal(got, expected)
    seed, offset = np.uint64(0x123456789ABCDEF1), np.uint64(0xFEDCBA9876543210)
    subsequences = rng.integers(0, 1 << 63, 20, dtype=np.uint64)
    got = [casts.philox(seed, offset, subsequence) for subsequence in subsequences]
    np.testing.assert_array_equal(got, rounding.philox(int(seed), int(offset), subsequences))
    print(len(x), "values agree")


if __name__ == "__main__":
    with np.errstate(all="ignore"):
        main()
