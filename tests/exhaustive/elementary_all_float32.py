"""exp and tanh of `cuda_kernels.elementary`, compiled for the CPU, at every float32: the largest error in ulp.

    python tests/exhaustive/elementary_all_float32.py                     # all 2^32 patterns, a few minutes
    python tests/exhaustive/elementary_all_float32.py --fraction 1/256    # one in 256

The truth is the C library's float64 function, whose own error (below 1 ulp of float64) does not show here. Results that
fall while x rises are counted too: there are none. The exit code is 1 where a bound fails or a result falls.
"""

import argparse
import math
import sys
import time
from fractions import Fraction

import numba
import numpy as np

from cuda_kernels import elementary

F = np.float32
#: Function -> (ours, truth, bound in ulp).
CASES = {"exp": (elementary.exp, math.exp, 1.0), "tanh": (elementary.tanh, math.tanh, 1.5)}
OVERFLOW = float(2.0**128 - 2.0**103)


def make_scan(ours, truth):
    """Return `scan(start, stop, stride)`: (largest error in ulp, its bit pattern, wrong specials, falls)."""

    @numba.njit(error_model="numpy", nogil=True)
    def scan(start, stop, stride):
        worst, where, special, falls = 0.0, np.uint32(0), 0, 0
        before = F(np.nan)
        for pattern in range(start, stop, stride):
            x = np.uint32(pattern).view(F)
            got = ours(x)
            if x != x:
                special += got == got
                continue
            true = truth(min(np.float64(x), 700.0))
            falls += (got < before) if pattern < 1 << 31 else (got > before)
            before = got
            if true >= OVERFLOW:
                special += got != np.inf
                continue
            error = abs(np.float64(got) - true) / math.ldexp(1.0, max(math.frexp(abs(true))[1] - 24, -149))
            if not error <= worst:
                worst, where = error, np.uint32(pattern)
        return worst, where, special, falls

    return scan


def main(arguments=None):
    """Run the scan; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fraction", type=Fraction, default=Fraction(1), metavar="1/N", help="how many of the values")
    stride = int(1 / parser.parse_args(arguments).fraction)
    failed = False
    for name, (ours, truth, bound) in CASES.items():
        began = time.perf_counter()
        # the two signs apart, so that x rises or falls throughout
        halves = [make_scan(ours, truth)(low, low + (1 << 31), stride) for low in (0, 1 << 31)]
        worst, where, *_ = max(halves, key=lambda half: half[0])
        special, falls = (sum(half[k] for half in halves) for k in (2, 3))
        failed |= not worst <= bound or special > 0 or falls > 0
        print(
            f"{name}: {2**32 // stride:,} values, at most {worst:.4f} ulp (bound {bound}) at bits 0x{where:08X}, "
            f"{special} wrong NaN or infinity, {falls:,} falls, {time.perf_counter() - began:.0f} s"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
