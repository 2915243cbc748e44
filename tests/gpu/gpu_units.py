"""The scalar functions on a GPU, element by element: reciprocals on every mantissa, exp and tanh on every bfloat16."""

import numpy as np

from cuda_kernels import elementary
from cuda_kernels.fast import FAST_NUMBERS
from cuda_kernels.operands import pointer, scalar
from cuda_kernels.simt import THREADS, kernel, thread_number

F = np.float32
SMALLEST = 2.0**-149


def make_table(function):
    """Return the kernel y[i] = function(x[i])."""

    @kernel
    def table(x, y, count):
        i = thread_number()
        if i < count:
            y[i] = function(x[i])

    return table


#: Name -> kernel. Each closes over one function of `cuda_kernels.elementary`.
TABLES = {
    "newton_reciprocal": make_table(elementary.newton_reciprocal),
    "reciprocal": make_table(elementary.reciprocal),
    "fast_reciprocal": make_table(elementary.reciprocal_seed),
    "exp": make_table(elementary.exp),
    "fast_sigmoid": make_table(FAST_NUMBERS.sigmoid),
    "tanh": make_table(elementary.tanh),
    "fast_tanh": make_table(FAST_NUMBERS.tanh),
}
ARGUMENTS = [pointer(np.float32), pointer(np.float32), scalar(np.int32)]


def evaluate(device, name, x):
    """float32 results of one function for float32 x, on the device."""
    given, y = device.put(x), device.put(np.full(x.shape, np.nan, F))
    grid = (-(-x.size // THREADS), 1, 1)
    device.run(("unit", name), TABLES[name], ARGUMENTS, [given, y, x.size], grid, (THREADS, 1, 1))
    return device.get(y)


def mantissas(device, exponent):
    """Every float32 of a binade; without a GPU some, and the last 200."""
    every = np.arange(1 << 23, dtype=np.uint32)
    some = np.concatenate([every[:: device.sized(small=1 << 15, medium=1 << 8, large=1)], every[-200:]])
    return (some + np.uint32(127 + exponent << 23)).view(F)


def every_bfloat16(device):
    """All bfloat16 values as float32."""
    return (np.arange(1 << 16, dtype=np.uint32)[:: device.sized(small=61, medium=1, large=1)] << np.uint32(16)).view(F)


def ulps(got, true):
    """Largest error of float32 results against float64 truths, in float32 spacings at the truth; NaN must be NaN."""
    with np.errstate(all="ignore"):
        rounded = true.astype(F)
        assert np.array_equal(np.isnan(got), np.isnan(true)), "NaN in other places"
        finite = np.isfinite(rounded) & np.isfinite(got)
        other = ~finite & ~np.isnan(true) & (got != rounded)
        edge = other & (np.minimum(np.abs(got), np.abs(rounded)) < 3.4e38)
        assert not edge.any(), f"{got[edge][0]} for {true[edge][0]}"
        spacing = np.maximum(np.spacing(np.abs(rounded[finite])).astype(np.float64), SMALLEST)
        error = np.abs(got[finite].astype(np.float64) - true[finite]) / spacing
    return float(error.max(initial=0))


def exact_reciprocals(device, rng):
    """1 / x is correctly rounded in six binades and where it is subnormal; infinity gives 0."""
    for name in ("newton_reciprocal", "reciprocal"):
        for exponent in (0, 1, int(rng.integers(2, 125)), 125, 126, 127):
            x = mantissas(device, exponent)
            got, expected = evaluate(device, name, x), F(1) / x
            wrong = np.flatnonzero(got.view(np.uint32) != expected.view(np.uint32))
            first = f", first 1/{x[wrong[0]]!r}: {got[wrong[0]]!r}" if wrong.size else ""
            assert not wrong.size, f"{name}, 2^{exponent}: {wrong.size} of {x.size} wrong{first}"
        assert evaluate(device, name, F([np.inf, 1, np.nan]))[0] == 0


def bounded(name, truth, bound, low=-np.inf, high=np.inf):
    """A case: a function on every bfloat16 of a range, within `bound` ulp; returns the largest error."""

    def run(device, rng):
        x = every_bfloat16(device)
        x = x[(x >= low) & (x <= high)] if np.isfinite(low) else x
        with np.errstate(all="ignore"):
            error = ulps(evaluate(device, name, x), truth(x.astype(np.float64)))
        assert error <= bound, f"{name} errs by {error:.2f} ulp, more than {bound}"
        return f"largest error {error:.2f} ulp"

    return f"{name} within {bound} ulp", run


def fast_reciprocals(device, rng):
    """Within 1 ulp where 1 / x is normal."""
    worst = 0.0
    for exponent in (0, 1, int(rng.integers(2, 125))):
        x = mantissas(device, exponent)
        worst = max(worst, ulps(evaluate(device, "fast_reciprocal", x), 1 / x.astype(np.float64)))
    assert worst <= 1.01, f"{worst:.3f} ulp"
    return f"largest error {worst:.3f} ulp"


def cases():
    """Every check."""
    yield "exact reciprocals", exact_reciprocals
    yield "fast reciprocals", fast_reciprocals
    yield bounded("exp", np.exp, 2)
    yield bounded("tanh", np.tanh, 2)
    yield bounded("fast_sigmoid", lambda x: 1 / (1 + np.exp(-x)), 8, low=-87.0, high=88.0)
    yield bounded("fast_tanh", np.tanh, 8)
