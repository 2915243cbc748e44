"""The GPU's approximate units as their documentation bounds them: results as far off as they may be, for the tests.

PTX ISA: `ex2.approx.ftz.f32` is within 2 ulp, `rcp.approx.ftz.f32` within 1; subnormal results are 0. No exactness at
powers of two is promised, so none is assumed.
"""

from contextlib import contextmanager
from functools import cache

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from scalars import TINY, F, exact_fma, with_instructions

from cuda_kernels import fast, pairs

#: (ex2's, rcp's) error in ulp: nearest results, and the four corners.
ERRORS = [(0, 0), (2, 1), (2, -1), (-2, 1), (-2, -1)]


@numba.njit(error_model="numpy")
def off(true, ulps):
    """The float32 as far from float64 `true` >= 0 as `ulps` ulp allow on that side; subnormal results are 0."""
    if not true >= TINY:
        return F(true) if true != true else F(0)
    if not true < 3.4028235677973366e38:
        return F(np.inf)
    ulp = 2.0 ** (((np.float64(true).view(np.int64) >> 52) & 0x7FF) - 1023 - 23)
    y = F(true + ulps * ulp)
    if ulps != 0 and abs(np.float64(y) - true) > abs(ulps) * ulp:
        y = np.uint32(y.view(np.uint32) + np.uint32(1 if ulps < 0 else 0xFFFFFFFF)).view(F)
    return y if y >= TINY else F(0)


@numba.njit(error_model="numpy")
def less_one(d, s):
    """`fast.less_one` with one rounding."""
    total = exact_fma(d, s, -s)
    return min(max(total, F(0)), F(1)) if total == total else F(0)


#: (ex2's, rcp's) error in ulp of the functions below: they read it each time, so compiled once they serve all `ERRORS`.
ERRORS_NOW = np.zeros(2)
EXP2_NOW, RECIPROCAL_NOW = (ERRORS_NOW[i:].ctypes.data for i in range(2))


@contextmanager
def errors(exp2_ulps, reciprocal_ulps):
    """Units with these errors, and afterwards without."""
    ERRORS_NOW[:] = exp2_ulps, reciprocal_ulps
    try:
        yield
    finally:
        ERRORS_NOW[:] = 0


@intrinsic
def float64_at(typingctx, address):
    """The float64 at an address."""

    def emit(context, builder, signature, values):
        return builder.load(builder.inttoptr(values[0], ir.PointerType(ir.DoubleType())))

    return types.float64(types.int64), emit


@cache
def varying_numbers():
    """The `fast.Arithmetic` of numbers on units with the errors of the moment.

    `exp2` is ex2.approx.ftz.f32, `reciprocal` rcp.approx.ftz.f32 of x >= 1, `inverse` div.full.f32 of 1 and a
    parameter.
    """
    return fast.NUMBERS._replace(
        exp2=_varying(lambda x: off(np.exp2(np.float64(x)), float64_at(EXP2_NOW))),
        reciprocal=_varying(lambda x: off(1.0 / np.float64(x), float64_at(RECIPROCAL_NOW))),
        inverse=_varying(lambda x: off(1.0 / np.float64(x), 2 * float64_at(RECIPROCAL_NOW))),
        fma=exact_fma,
        less_one=less_one,
    )


def _varying(function):
    return numba.njit(function, inline="always", error_model="numpy")


@cache
def varying_words():
    """What `fast.make_fast_words` makes of `varying_numbers`."""
    return fast.make_fast_words(varying_numbers())


@cache
def varying_pairs():
    """What `fast.make_fast_words` makes of pairs of `varying_numbers`."""
    return fast.make_fast_words(pairs.make_pairs(varying_numbers(), with_instructions(pairs.fma2, fma=exact_fma)))
