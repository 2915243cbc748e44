"""Tensors that the mutants' kernels read: what training produces, and what makes a rare fault visible.

Each function is (shape, dtype, rng) -> array; `history` is the scale update's: (shape, rng) -> inputs.
"""

import numpy as np

F = np.float32


def normal(shape, dtype, rng):
    """Normal values, each row with a size of its own, some zeros of both signs."""
    x = rng.standard_normal(shape, F) * np.exp2(rng.uniform(-1.5, 1.5, (*shape[:-1], 1))).astype(F)
    x[rng.random(shape, F) < 0.002] = 0.0
    x[rng.random(shape, F) < 0.002] = -0.0
    return x.astype(dtype)


def large(shape, dtype, rng):
    """Values up to several hundred: they saturate FP8 without a scale, and clamp where an activation clamps."""
    return (rng.standard_normal(shape, F) * F(150)).astype(dtype)


def peak_at_the_end(shape, dtype, rng):
    """`normal` whose largest magnitude is its last element, positive, in an odd column of the last row."""
    x = normal(shape, np.float32, rng)
    x[-1, -1] = F(1.7) * np.abs(x).max()
    return x.astype(dtype)


def wide(shape, dtype, rng):
    """Gate and activation inputs of size 6: beyond the limits of clamped activations, and where sigmoid saturates."""
    return (rng.standard_normal(shape, F) * F(6)).astype(dtype)


def heavy(shape, dtype, rng):
    """Student's t with two degrees of freedom: heavy tails, amaxes hundreds of times the median."""
    return np.clip(rng.standard_t(2, shape), -3e4, 3e4).astype(F).astype(dtype)


def negative_tail(shape, dtype, rng):
    """As `normal`, shifted down: the largest magnitude of most blocks is negative."""
    return (rng.standard_normal(shape, F) - F(0.7)).astype(dtype)


def with_nan(shape, dtype, rng):
    """`normal` with a few NaN."""
    return _planted(normal(shape, dtype, rng), rng, [np.nan, -np.nan], 2e-4)


def nonfinite(shape, dtype, rng):
    """`normal` with NaN and infinities."""
    return _planted(normal(shape, dtype, rng), rng, [np.nan, np.inf, -np.inf], 2e-4)


def zero_blocks(shape, dtype, rng):
    """`normal` with a tenth of the groups of 128 columns all zero."""
    x = normal(shape, dtype, rng)
    groups = x.reshape(-1, shape[-1] // 128, 128)
    groups[rng.random(groups.shape[:2]) < 0.1] = 0
    return x


def tiny_blocks(shape, dtype, rng):
    """`normal` with a third of the groups of 128 columns below 1e-5, as gradients of frozen tokens are."""
    x = normal(shape, np.float32, rng)
    groups = x.reshape(-1, shape[-1] // 128, 128)
    groups[rng.random(groups.shape[:2]) < 0.33] *= F(1e-6)
    return x.astype(dtype)


def tiny(shape, dtype, rng):
    """All values near 1e-6, below the usual epsilons."""
    return (rng.standard_normal(shape, F) * F(1e-6)).astype(dtype)


def vanishing_rows(shape, dtype, rng):
    """float32 rows from 1 down to 2^-125, and beyond: scales leave E8M0 at its lower end."""
    exponents = -np.minimum(np.arange(shape[0]), 125).astype(F)
    return (rng.standard_normal(shape, F) * np.exp2(exponents)[:, None]).astype(dtype)


def with_bytes_above_127(shape, dtype, rng):
    """A quarter of the rows a thousand times as large: their E8M0 scales are above 1."""
    x = normal(shape, np.float32, rng)
    x[rng.random(shape[:-1]) < 0.25] *= F(1024)
    return x.astype(dtype)


def subnormal(shape, dtype, rng):
    """float32 with a quarter of its values subnormal."""
    x = normal(shape, np.float32, rng)
    small = rng.random(shape) < 0.25
    x[small] *= F(1e-39)
    return x.astype(dtype)


def coarse(shape, dtype, rng):
    """Multiples of 2^-12 below 8: sums of 16 are exact in float32, so a Hadamard transform has one right result."""
    x = np.clip(rng.standard_normal(shape, F), -7, 7).astype(dtype).astype(F)
    return (np.rint(x * F(4096)) / F(4096)).astype(dtype)


def amax_10_5(shape, dtype, rng):
    """Magnitudes up to 10.5 = 448 * 6 / 256: NVFP4's global scale is a power of two and scaled values meet ties."""
    x = np.clip(normal(shape, np.float32, rng), -10, 10)
    x.reshape(-1)[rng.integers(x.size)] = F(10.5)
    return x.astype(dtype)


def above_powers_of_two(shape, dtype, rng):
    """float32 where a tenth of the 32-element blocks has amax / 448 just above a power of two."""
    x = normal(shape, np.float32, rng)
    blocks = x.reshape(-1, 32)
    hit = np.flatnonzero(rng.random(len(blocks)) < 0.1)
    exponents = rng.integers(-24, -16, len(hit))
    blocks[hit] *= np.exp2(exponents - 8).astype(F)[:, None]
    blocks[hit, rng.integers(0, 32, len(hit))] = np.ldexp(F(448) * (F(1) + F(2.0**-21)), exponents)
    return x.astype(dtype)


def history(shape, rng):
    """An amax history (L, n), newest first, columns of different sizes, a few unused, and scales."""
    amax = np.exp2(rng.uniform(-6, 6, shape[1])).astype(F)
    values = (amax * rng.uniform(0.5, 1, shape)).astype(F)
    values[0, rng.random(shape[1]) < 0.05] = 0
    return {"amax_history": values, "scale": np.exp2(rng.uniform(-3, 8, shape[1])).astype(F)}


def history_with_nan(shape, rng):
    """`history` with NaN in a few columns' past."""
    inputs = history(shape, rng)
    inputs["amax_history"][shape[0] // 2, rng.random(shape[1]) < 0.05] = np.nan
    return inputs


def _planted(x, rng, values, share):
    flat = x.reshape(-1)
    where = rng.choice(flat.size, max(3, int(share * flat.size)), replace=False)
    flat[where] = rng.choice(np.array(values, F), len(where)).astype(x.dtype)
    return x
