"""How a real number becomes one of a format's values: the rounding modes by definition, and Philox random bits.

Everything here works on a *grid*: the finite magnitudes of a format in ascending order, where the position in the
grid is the code. The definitions are slow and obvious; `refops.formats.encode` turns them into a table for speed.
"""

import numpy as np

#: Deterministic rounding modes: name -> "does a magnitude between two neighbours move to the upper one?".
#: `position` is -1, 0 or 1 for below, at or above the midpoint of the neighbours (inexact values only).
ROUNDING_MODES = {
    # IEEE 754 roundTiesToEven; what every NVIDIA cast instruction and TE kernel does.
    "nearest_even": lambda position, lower_is_odd, negative: (position > 0) | ((position == 0) & lower_is_odd),
    # roundTiesToAway: microxcaling's "nearest", torch's E8M0 cast.
    "nearest_away": lambda position, lower_is_odd, negative: position >= 0,
    # Truncation, `cvt.rz`.
    "toward_zero": lambda position, lower_is_odd, negative: np.zeros_like(lower_is_odd),
    # Toward +infinity, `cvt.rp`: the rounding of MX scale bytes.
    "up": lambda position, lower_is_odd, negative: ~negative,
    # Toward -infinity.
    "down": lambda position, lower_is_odd, negative: negative,
}

STOCHASTIC = "stochastic"


def round_to_grid(x, grid, after_largest, rounding):
    """Return the grid index of each |x| under a deterministic mode; `len(grid)` stands for overflow.

    Args:
        x: float64 array without NaN, any shape; infinities count as beyond the grid.
        grid: ascending float64 magnitudes; the index is the code.
        after_largest: the value that the format would hold next.
        rounding: a key of `ROUNDING_MODES`.

    A magnitude below `grid[0]` gets index 0 (only E8M0, which has no zero, can meet one). The neighbour above
    `grid[-1]` is `after_largest`, so that overflow follows IEEE 754: round as if the exponent range were unlimited,
    then look whether the result fits.
    """
    magnitude = np.abs(x)
    lower = np.clip(np.searchsorted(grid, magnitude, side="right") - 1, 0, len(grid) - 1)
    extended = np.append(grid, after_largest)
    below, above = extended[lower], extended[lower + 1]
    position = np.sign(magnitude - (below + above) / 2)  # exact: both sums fit float64
    goes_up = ROUNDING_MODES[rounding](position, lower % 2 == 1, np.signbit(x))
    return lower + (goes_up & (magnitude > below))


def floor_in(grid):
    """Return the function that gives the index in `grid` of the largest value at or below each number of an array."""
    return lambda numbers: np.searchsorted(grid, numbers, side="right") - 1


def round_to_grid_stochastic(x, grid, random_bits, floor):
    """Return the grid index of each |x|, rounded to a neighbour by chance.

    The upper neighbour's chance is the part of the step that |x| has gone, in 256ths: so many of the 256 values of a
    random byte lead to it. This is TE's software meaning of `cvt.rs.satfinite.e2m1x4.f32`, for any grid: add
    `random_bits / 256` of the step at |x| (one rounding to float32, as an FMA does), then drop to the grid value at or
    below the sum. A value on the grid never moves.

    Args:
        x: float32 array without NaN.
        grid: ascending float64 magnitudes starting at 0, then the value that the format would hold next; the index is
            the code.
        random_bits: uint8 array of the shape of `x`, a random byte for each element.
        floor: `floor_in(grid)`, or a faster function with its results for float32 numbers.
    """
    magnitude = np.abs(x)
    step = np.diff(grid).take(floor(magnitude), mode="clip")
    return floor((magnitude + step * (random_bits / 256.0)).astype(np.float32))


#: The NaN that CUDA's arithmetic and conversions give: all bits of exponent and mantissa.
_CANONICAL_NAN = {2: np.uint16(0x7FFF), 4: np.uint32(0x7FFFFFFF)}


def stored(values, dtype):
    """Round float32 to a dtype as a kernel stores it: nearest even, every NaN as CUDA's canonical one.

    NumPy's own NaN can have either sign, depending on where in the array it stands (vector body or scalar tail).
    """
    return _with_canonical_nan(values.astype(dtype))


def _with_canonical_nan(values):
    nan = np.isnan(values)
    if nan.any():
        canonical = _CANONICAL_NAN[values.itemsize]
        values.view(canonical.dtype)[nan] = canonical
    return values


def round_once(x, dtype):
    """Round float64 to float32, float16 or bfloat16 with one rounding to nearest even.

    A plain float64 -> float32 -> bfloat16 cast rounds twice and is wrong near ties. Rounding to odd in between (the
    inexact float32 gets a last bit of 1) keeps every comparison with a bfloat16 tie, so that the second rounding alone
    decides (Boldo and Melquiond, "When double rounding is odd", 2005).
    """
    if dtype in (np.float32, np.float16):
        return _with_canonical_nan(x.astype(dtype))
    nearest = x.astype(np.float32)
    bits = nearest.view(np.uint32)
    inexact = np.isfinite(nearest) & (nearest != x)
    too_large = inexact & (np.abs(nearest) > np.abs(x))
    odd = ((bits - too_large) | inexact).astype(np.uint32).view(np.float32)
    return _with_canonical_nan(odd.astype(dtype))


def multiply_add(x, y, addend):
    """x y + addend of float32 arrays in one rounding, as an FMA gives it: float32, every NaN as CUDA's canonical one.

    The product is exact in float64. The sum there is rounded to odd, as `round_once` does on its way to bfloat16: what
    it lost (Knuth's two-sum, exact) says whether, and to which side.
    """
    product, addend = x.astype(np.float64) * y, addend.astype(np.float64)
    total = product + addend
    back = total - product
    lost = (product - (total - back)) + (addend - back)
    even = (total.view(np.uint64) & np.uint64(1)) == 0
    inexact = np.isfinite(total) & (lost != 0)
    odd = np.where(inexact & even, np.nextafter(total, np.copysign(np.inf, lost)), total)
    return stored(odd, np.float32)


# Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
_PHILOX_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_PHILOX_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_PHILOX_ROUNDS = 10
#: Random bytes that one subsequence gives.
PHILOX_BYTES = 16
_LOW_WORD = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)


def philox(seed, offset, subsequence):
    """Return the first Philox 4x32-10 block of each subsequence: four random words.

    Args:
        seed: 64-bit integer, the key.
        offset: 64-bit integer, the low half of the counter, taken as it is (TE's convention; cuRAND's own
            `curand_init` would count in words and divide by four).
        subsequence: uint64 array (n,), the high half of the counter.

    Returns:
        uint32 array (n, 4).
    """
    subsequence = np.asarray(subsequence, np.uint64)
    counter = [
        np.full_like(subsequence, offset & 0xFFFFFFFF),
        np.full_like(subsequence, offset >> 32),
        subsequence & _LOW_WORD,
        subsequence >> _WORD,
    ]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(_PHILOX_ROUNDS):
        product0 = counter[0] * _PHILOX_MULTIPLIERS[0]
        product1 = counter[2] * _PHILOX_MULTIPLIERS[1]
        counter = [
            (product1 >> _WORD) ^ counter[1] ^ np.uint64(key[0]),
            product1 & _LOW_WORD,
            (product0 >> _WORD) ^ counter[3] ^ np.uint64(key[1]),
            product0 & _LOW_WORD,
        ]
        key = [(word + increment) & 0xFFFFFFFF for word, increment in zip(key, _PHILOX_KEY_INCREMENTS, strict=True)]
    return np.stack(counter, axis=-1).astype(np.uint32)


def philox_bytes(seed, offset, subsequence):
    """Return 16 random bytes per subsequence, uint8 (n, 16): byte i is bits 8(i % 4) .. 8(i % 4)+7 of word i // 4.

    One subsequence serves one block of 16 elements, so an element's byte depends on (seed, offset, block, position)
    alone, never on how the work was split.
    """
    return philox(seed, offset, subsequence).astype("<u4").view(np.uint8)
