"""What quantization does to a tensor, measured while codes are decoded: `refops.survey` at the speed of the CPU.

refops finds this module as an entry point of the group `refops.surveyors` (`refops.survey.Surveyor`). All numbers are
those of its own `ArraySurveyor`, bit for bit: an element's error and its square are single operations in float64, the
128 rows of a band are added in order, and everything else is a maximum or a count.
"""

from functools import cache, lru_cache

import numpy as np

from cuda_kernels import host
from cuda_kernels.casts import INFINITE, MAGNITUDE, STORAGES
from cuda_kernels.host import backend, tiles
from cuda_kernels.host.arrays import operand
from cuda_kernels.host.calls import Doing
from cuda_kernels.host.compile import address_of, routine
from cuda_kernels.host.dequantize import source_of
from cuda_kernels.host.tiles import PIECE_ROWS, SPAN, STAGE, integer_at, make_array_at
from cuda_kernels.simt import U32, as_u32
from refops.formats import FORMATS

FLT_MAX, INFINITY = np.float32(np.finfo(np.float32).max), np.float64(np.inf)


def takes(scaling):
    """Whether `quantize` and `errors` give refops' bits: not where a Hadamard transform is computed."""
    return scaling.hadamard is None


def quantize(x, scaling):
    """Return the rowwise `refops.Quantized` of a tensor; errors as `refops.quantize`."""
    return host.quantize(x, scaling)


# --- a tensor ---------------------------------------------------------------------------------------


def magnitudes(x):
    """Return (elements that are not finite, zeros, largest finite magnitude, smallest one that is not zero or 0).

    Args:
        x: float32, float16 or bfloat16 array of at least one dimension.
    """
    front = backend.identity_front(operand(x))
    pipeline, (m, k) = backend.Pipeline(Doing(), front), front.matrix_shape
    found = np.zeros((tiles.pieces(m, k), 4), np.uint32)
    found[:, 3] = INFINITE
    pipeline.add(_counting(), (found, k))
    pipeline.run()
    counts = found[:, :2].sum(axis=0, dtype=np.int64)
    largest, smallest = np.max(found[:, 2], initial=0), np.min(found[:, 3], initial=INFINITE)
    amax, least = np.array([largest, 0 if smallest == INFINITE else smallest], np.uint32).view(np.float32)
    return int(counts[0]), int(counts[1]), float(amax), float(least)


@lru_cache(maxsize=1)
def _counting():
    """The stage that counts a tile's elements. Words: uint32 (pieces, 4), [not finite, zeros, largest magnitude,
    smallest one above zero], the last two as bits; K."""
    found_at = make_array_at(np.uint32)

    def stage(words, at, tile, rows, columns, row, column):
        first = 4 * piece_of(row, column, integer_at(words, at + 2))
        found = found_at(words, at)[first : first + 4]
        stray, zeros, largest, smallest = U32(0), U32(0), found[2], found[3]
        for r in range(rows):
            line = tile[r]
            for c in range(columns):
                bits = np.uint32(as_u32(line[c]) & MAGNITUDE)
                stray += U32(bits >= INFINITE)
                zeros += U32(bits == U32(0))
                largest = max(largest, U32(0) if bits >= INFINITE else bits)
                smallest = min(smallest, INFINITE if bits == U32(0) else bits)
        found[0] += stray
        found[1] += zeros
        found[2], found[3] = largest, smallest

    return address_of("survey-magnitudes", stage, STAGE)


@routine
def piece_of(row, column, width):
    """Number of the piece that holds an element of a matrix of so many columns."""
    return row // PIECE_ROWS * ((width + SPAN - 1) // SPAN) + column // SPAN


# --- a tensor and what came of it -------------------------------------------------------------------


def errors(x, q):
    """Return what `refops.survey.Errors` holds, in its order.

    Args:
        x: float32, float16 or bfloat16 array (..., K).
        q: the rowwise `refops.Quantized` of it.
    """
    given, layout = operand(x), q.scaling.layout
    filling, coded, _ = source_of(q)
    pipeline, (m, k) = backend.Pipeline(Doing(), q), q.matrix_shape
    sums = np.zeros((2, -(-m // PIECE_ROWS), k))
    worst, counts = np.zeros(tiles.pieces(m, k)), np.zeros((tiles.pieces(m, k), 4), np.int64)
    stage = _comparing(given.storage, q.scaling.fmt.name, layout.packed)
    pipeline.add(stage, (given.array, coded.codes, *sums, worst, counts, k))
    pipeline.walk(filling, coded)
    finite, non_zero, flushed, saturated = (int(count) for count in counts.sum(axis=0))
    return *sums, float(np.max(worst, initial=0)), finite, non_zero, flushed, saturated, finite


@cache
def _comparing(storage, fmt, per_byte):
    """The stage that compares a tile of decoded values with the tensor.

    Words: the tensor; its codes, `per_byte` in a byte; float64 (bands of 128 rows, K) twice, the sums of squares of
    values and of errors; float64 (pieces,), the largest relative error; int64 (pieces, 4), counts of finite, non-zero,
    flushed and saturated elements; K.
    """
    form, widen = FORMATS[fmt], STORAGES[storage].widen
    values_at, bytes_at = make_array_at(STORAGES[storage].carrier.type), make_array_at(np.uint8)
    doubles_at, counts_at = make_array_at(np.float64), make_array_at(np.int64)
    is_largest = form.magnitude_code(np.arange(256 if per_byte == 1 else 16, dtype=np.uint8)) == form.largest_code
    high, low = (np.uint8(code) for code in (np.flatnonzero(is_largest)[-1], np.flatnonzero(is_largest)[0]))
    top, beyond = np.float64(form.grid[-1]), np.float64(form.grid[-1] + (form.after_largest - form.grid[-1]) / 2)

    @routine
    def spread(packed, codes):
        for i in range(len(packed)):
            codes[2 * i], codes[2 * i + 1] = packed[i] & np.uint8(15), packed[i] >> np.uint8(4)

    def stage(words, at, tile, rows, columns, row, column):
        width = integer_at(words, at + 12)
        piece, sums = piece_of(row, column, width), row // PIECE_ROWS * width + column
        signals = doubles_at(words, at + 4)[sums : sums + columns]
        noises = doubles_at(words, at + 6)[sums : sums + columns]
        ratios, codes = np.zeros(columns, np.float64), np.empty(columns, np.uint8)
        finite, non_zero, flushed, saturated = 0, 0, 0, 0
        for r in range(rows):
            start, line = (row + r) * width + column, tile[r]
            values = values_at(words, at)[start : start + columns]
            if per_byte == 1:
                codes = bytes_at(words, at + 2)[start : start + columns]
            else:
                spread(bytes_at(words, at + 2)[start // 2 : (start + columns) // 2], codes)
            for c in range(columns):
                value, back = np.float64(widen(values[c])), np.float64(line[c])
                is_finite, magnitude, decoded = abs(value) <= FLT_MAX, abs(value), abs(back)
                value = value if is_finite else 0.0
                error = abs(value - back) if decoded <= FLT_MAX else INFINITY
                error = error if is_finite else 0.0
                kept, lost = (
                    (magnitude > 0.0) & is_finite & (back != 0.0),
                    (magnitude > 0.0) & is_finite & (back == 0.0),
                )
                signals[c] += value * value
                noises[c] += error * error
                ratio = error / (magnitude if kept else 1.0)
                ratio = ratio if kept else 0.0
                ratios[c] = ratio if ratio > ratios[c] else ratios[c]
                cut = (codes[c] == low) | (codes[c] == high)
                finite += is_finite
                non_zero += kept | lost
                flushed += lost
                saturated += cut & is_finite & (back != 0.0) & (magnitude * top > decoded * beyond)
        of_piece, worst = counts_at(words, at + 10)[4 * piece : 4 * piece + 4], doubles_at(words, at + 8)
        of_piece[0] += finite
        of_piece[1] += non_zero
        of_piece[2] += flushed
        of_piece[3] += saturated
        worst[piece] = max(worst[piece], ratios.max())

    return address_of(f"survey-errors-{storage}-{fmt}", stage, STAGE)
