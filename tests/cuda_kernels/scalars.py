"""What the tests of scalar functions share: functions over arrays, other instructions in a function, ulps."""

import types
import warnings
from functools import cache

import ml_dtypes
import numba
import numpy as np
from numba.core.errors import NumbaWarning

F = np.float32
TINY, SMALLEST = F(2.0**-126), 2.0**-149
SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, SMALLEST, -SMALLEST, 3.4028235e38, -3.4028235e38], F)


def body_of(function):
    """The Python function of a device function, or of one that `on_gpu` or `ptx` decorates."""
    return getattr(function, "py_func", function)


@cache
def over_arrays(function, dtype=F):
    """Return `run(*arrays)`: a device function of each element, on the CPU. Scalars are passed as they are."""
    names = [f"a{i}" for i in range(body_of(function).__code__.co_argcount)]
    return _OverArrays(function, names, dtype)


class _OverArrays:
    def __init__(self, function, names, dtype):
        self._function, self._names, self._dtype, self._loops = function, names, dtype, {}

    def __call__(self, *arguments):
        arrays = tuple(np.ndim(a) > 0 for a in arguments)
        if arrays not in self._loops:
            given = ", ".join(n + "[i]" * is_array for n, is_array in zip(self._names, arrays, strict=True))
            scope = {"function": self._function}
            exec(
                f"def loop(out, {', '.join(self._names)}):\n    for i in range(out.size):\n"
                f"        out[i] = function({given})",
                scope,
            )
            self._loops[arrays] = numba.njit(error_model="numpy")(scope["loop"])
        shape = next(np.shape(a) for a in arguments if np.ndim(a))
        out = np.empty(shape, self._dtype)
        flat = [np.ascontiguousarray(a).ravel() if np.ndim(a) else a for a in arguments]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NumbaWarning)
            self._loops[arrays](out.ravel(), *flat)
        return out


def with_instructions(function, **instructions):
    """Return a copy of a device function in which some of the functions that it calls are others."""
    body = body_of(function)
    copy = types.FunctionType(
        body.__code__, {**body.__globals__, **instructions}, body.__name__, body.__defaults__, body.__closure__
    )
    return numba.njit(inline="always", error_model="numpy")(copy)


@numba.njit(error_model="numpy")
def exact_fma(a, b, c):
    """a * b + c of float32, rounded once: in float64 to odd, then to float32 (Boldo, Melquiond 2008)."""
    product = np.float64(a) * np.float64(b)  # exact: 48 bits
    addend = np.float64(c)
    total = product + addend
    part = total - product
    lost = (product - (total - part)) + (addend - part)
    if lost != 0.0 and np.isfinite(total):
        bits = np.float64(total).view(np.int64)
        if bits & 1 == 0:
            bits += 1 if (lost > 0.0) == (total > 0.0) else -1
            total = np.int64(bits).view(np.float64)
    return np.float32(total)


@numba.njit(error_model="numpy")
def moved(x, steps):
    """The float32 `steps` places from a positive normal x in the order of values; 0, infinity and NaN stay."""
    if not (x > F(0) and x < F(np.inf)):
        return x
    return np.uint32(np.float32(x).view(np.uint32) + np.uint32(steps)).view(np.float32)


def ulp_of(true):
    """Spacing of float32 at float64 values, down to 2^-149 and up to 2^104."""
    exponent = np.frexp(np.abs(true))[1] - 24
    return np.ldexp(1.0, np.clip(exponent, -149, 104))


def error_in_ulp(got, true):
    """|got - true| in `ulp_of(true)`; `true` is float64 and finite in float32."""
    return np.abs(got.astype(np.float64) - true) / ulp_of(true)


def all_16_bit_values():
    """Every bfloat16 and every float16 as float32, NaN and infinities among them."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    return np.concatenate([patterns.view(ml_dtypes.bfloat16).astype(F), patterns.view(np.float16).astype(F)])


def ordered(x):
    """float32 bit patterns as integers in the order of the values; the zeros are the same."""
    pattern = x.view(np.int32).astype(np.int64)
    return np.where(pattern < 0, -(pattern & 0x7FFFFFFF), pattern)
