"""The numbers in golden files: Philox integers times powers of two, the same on every machine.

Each element has its own Philox block, so it depends on seed, stream and position alone. Every value is exact in float32
(24 bits or fewer) and then rounded once to the tensor's dtype. No library's distribution takes part. Rows take turns
through the classes of a kind (`INPUT_KINDS`), so that small tensors see all of them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from refops.formats import E2M1
from refops.rounding import philox

#: Midpoints of E2M1's neighbours, and its largest value.
_E2M1_TIES = np.append((E2M1.grid[1:] + E2M1.grid[:-1]) / 2, E2M1.max)
#: Bits of the quiet NaN, by size of the element.
_NAN_BITS = {np.dtype(np.float32): 0x7FC00000, np.dtype(np.float16): 0x7E00, np.dtype(ml_dtypes.bfloat16): 0x7FC0}


def make_tensor(kind, shape, dtype, *, seed, stream=0):
    """Return a tensor of `shape` and `dtype`.

    Args:
        kind: a key of `INPUT_KINDS`.
        seed: 64-bit integer.
        stream: number of the tensor among an operation's inputs: others get other numbers, and their rows other
            classes.
    """
    m, k = math.prod(shape[:-1]), shape[-1]
    words = philox(seed, stream, np.arange(m * k)).reshape(m, k, 4)
    classes = INPUT_KINDS[kind].classes
    values = np.zeros((m, k))
    for i, fill in enumerate(classes):
        rows = slice((i - stream) % len(classes), None, len(classes))
        values[rows] = fill(words[rows], dtype)
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
        tensor = np.ascontiguousarray(single.astype(dtype))
    bits = tensor.view(f"u{tensor.itemsize}")
    bits[np.isnan(values)] = _NAN_BITS[tensor.dtype]
    return tensor.reshape(shape)


def make_row_scales(count, *, seed, stream):
    """Return `count` float32 scales in [0, 1], multiples of 2^-10, both ends among them."""
    scales = (philox(seed, stream, np.arange(count))[:, 0] & 1023).astype(np.float32) / np.float32(1024)
    scales[1::7], scales[2::7] = 1, 0
    return scales


def make_amaxes(kind, shape, *, seed, stream):
    """Return float32 amaxes >= 0 of `shape`, some 0; of kind "special" some inf or NaN, of "extreme" huge and tiny.

    Those of "tiny" are around the least normal float32.
    """
    words = philox(seed, stream, np.arange(math.prod(shape)))
    count, least = {"extreme": (250, -124), "tiny": (20, -145)}.get(kind, (24, -12))
    exponents = (words[:, 1] % count).astype(np.int64) + least
    amaxes = np.ldexp(1 + (words[:, 0] & 1023) / 1024, exponents).astype(np.float32)
    amaxes[words[:, 2] % 8 == 0] = 0
    if kind == "special":
        amaxes[words[:, 3] % 16 == 0] = np.inf
        amaxes.view(np.uint32)[words[:, 3] % 16 == 1] = _NAN_BITS[amaxes.dtype]
    return amaxes.reshape(shape)


# --- classes of rows: Philox words (rows, columns, 4) and a dtype -> float64 values that float32 holds exactly --------


def _normal(words, dtype):
    """Sums of eight uniform numbers: a bell with standard deviation 1.6."""
    halves = (words & 0xFFFF).astype(np.int64) + (words >> 16)
    return (halves.sum(axis=-1) - 4 * 0xFFFF) / 2.0**15


def _signs(words):
    return 1.0 - 2.0 * (words[..., 0] & 1)


def _mantissas(words, bits):
    """1.xxx with `bits` random bits."""
    return 1 + ((words[..., 0] >> 1) % (1 << bits)) / 2.0**bits


def _heavy(words, dtype):
    """Random mantissas with exponents whose probability halves with each step, up to 7 away from 0."""
    exponents = np.minimum(_trailing_zeros(words[..., 1]), 7) - np.minimum(_trailing_zeros(words[..., 2]), 7)
    return np.ldexp(_signs(words) * _mantissas(words, 10), exponents)


def _trailing_zeros(words):
    lowest = (words | np.uint32(1 << 31)) & (~(words | np.uint32(1 << 31)) + np.uint32(1))
    return np.frexp(lowest.astype(np.float64))[1] - 1


def _fp8_ties(words, dtype):
    """Midpoints between neighbours of E4M3 (1.xxx1) and E5M2 (1.xx1), and E4M3 values themselves."""
    which = words[..., 1] % 3
    e4m3, e5m2 = _mantissas(words, 3), _mantissas(words, 2)
    mantissas = np.select([which == 0, which == 1], [e4m3 + 2.0**-4, e5m2 + 2.0**-3], e4m3)
    return np.ldexp(_signs(words) * mantissas, (words[..., 2] % 9).astype(np.int64) - 4)


def _fp4_ties(words, dtype):
    """Midpoints between neighbours of E2M1; every 16th element is 6, its largest value."""
    values = _signs(words) * _E2M1_TIES[words[..., 1] % 8]
    values[:, ::16] = E2M1.max
    return values


def _zero_blocks(words, dtype):
    """Zeros, a third of them negative, in three of four stretches of 32 elements; normal numbers in the others."""
    columns = np.arange(words.shape[1])
    values = np.where(columns % 3 == 1, -0.0, 0.0)
    return np.where(columns // 32 % 4 == 1, _normal(words, dtype), values)


def _all(value):
    """The value everywhere."""
    return lambda words, dtype: np.full(words.shape[:2], value)


def _all_infinite(words, dtype):
    return _signs(words) * np.inf


def _some(fill):
    """Normal numbers, and what `fill` gives in place of one in 16."""
    return lambda words, dtype: np.where(words[..., 3] % 16 == 0, fill(words, dtype), _normal(words, dtype))


def _subnormal(words, dtype):
    """Multiples of the dtype's smallest subnormal, below 128 of it."""
    steps = (words[..., 1] & 127).astype(np.float64)
    return _signs(words) * steps * float(ml_dtypes.finfo(dtype).smallest_subnormal)


def _huge(words, dtype):
    """The dtype's last four binades; every 11th element is its largest value."""
    info = ml_dtypes.finfo(dtype)
    top = int(info.maxexp) - 1
    values = np.ldexp(_signs(words) * _mantissas(words, 6), top - (words[..., 1] % 4).astype(np.int64))
    values[:, ::11] = float(info.max)
    return values


def _wide(words, dtype):
    """Every exponent of the dtype, equally often."""
    info = ml_dtypes.finfo(dtype)
    low, high = int(info.minexp), int(info.maxexp)
    exponents = low + (words[..., 1] % (high - low)).astype(np.int64)
    return np.ldexp(_signs(words) * _mantissas(words, 6), exponents)


def _small(words, dtype):
    """The dtype's first four binades of normal numbers."""
    exponents = int(ml_dtypes.finfo(dtype).minexp) + (words[..., 1] % 4).astype(np.int64)
    return np.ldexp(_signs(words) * _mantissas(words, 6), exponents)


# --- kinds ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """Numbers of a golden file, and the amaxes of its result (`refops.golden.amaxes`).

    Attributes:
        classes: what rows take in turn.
        magnitudes: what the amaxes of blocks take in turn: "usual"; "tiny", their scales are subnormal; "subnormal", as
            elements of the dtype; "huge", as large as the dtype goes; "zero" and "infinite".
        largest: the largest element of the tensor: "above" the random ones, "finite", the largest that the dtype has or
            an activation reaches, "infinite" or "tiny".
        largest_is_rounded: whether it is a result that rounding to 16 bits changes, where there is one. No product with
            the scale that follows from it is a tie then.
    """

    classes: tuple[Callable[..., Any], ...]
    magnitudes: tuple[str, ...]
    largest: str
    largest_is_rounded: bool = False


_MIXED = Kind((_normal, _heavy, _fp8_ties, _fp4_ties, _zero_blocks), ("usual", "tiny", "zero"), "above")
#: Name of a kind -> its `Kind`.
INPUT_KINDS = {
    "mixed": _MIXED,
    "rounding": replace(_MIXED, largest_is_rounded=True),
    "extreme": Kind(
        (_normal, _subnormal, _huge, _all(0.0), _wide, _all(-0.0), _heavy), ("tiny", "huge", "zero"), "finite"
    ),
    "special": Kind(
        (_normal, _some(_all(np.nan)), _some(_all_infinite), _heavy, _all(np.nan), _zero_blocks, _all_infinite),
        ("usual", "tiny", "infinite"),
        "infinite",
    ),
    "tiny": Kind((_small, _subnormal, _all(0.0), _small, _all(-0.0)), ("tiny", "subnormal", "zero"), "tiny"),
}
