"""Stages without scales: round a tile, sum it, find its maxima, transform it, store it.

`casting` holds the stages that cast.
"""

from functools import cache, lru_cache

import numpy as np

from cuda_kernels.casts import INFINITE, MAGNITUDE, STORAGES
from cuda_kernels.hadamard import signed
from cuda_kernels.host.compile import address_of, routine
from cuda_kernels.host.tiles import PIECE_ROWS, SPAN, STAGE, make_array_at, reader
from cuda_kernels.operands import Maxima, Stored
from cuda_kernels.simt import U32, F, as_u32, device, select

HADAMARD = 16
#: Columns of 16 rows that lie in the nearest cache together: 32 KiB.
NEAR = 512
QUARTER, ZERO = F(0.25), F(0)


@device
def magnitude_bits(x):
    """The bits of |x|, 0 for NaN: their order as integers is that of the magnitudes."""
    bits = np.uint32(as_u32(x) & MAGNITUDE)
    return select(bits > INFINITE, U32(0), bits)


@cache
def rounding(storage):
    """The stage that rounds a tile to a dtype."""
    round_value = STORAGES[storage].round

    def stage(words, at, tile, rows, columns, row, column):
        for r in range(rows):
            line = tile[r]
            for c in range(columns):
                line[c] = round_value(line[c])

    return address_of(f"round-{storage}", stage, STAGE)


@cache
def storing(storage):
    """The stage that stores values in a dtype: a `Stored`."""
    read, narrow = reader(Stored, data=STORAGES[storage].carrier.type), STORAGES[storage].narrow

    def stage(words, at, tile, rows, columns, row, column):
        out = read(words, at)
        for r in range(rows):
            start = (row + r) * out.inner + column
            target, line = out.data[start : start + columns], tile[r]
            for c in range(columns):
                target[c] = narrow(line[c])

    return address_of(f"store-{storage}", stage, STAGE)


@lru_cache(maxsize=1)
def summing():
    """The stage that adds rows to the sums of their piece: a `Stored` of float32, (pieces of 128 rows, K)."""
    read = reader(Stored, data=np.float32)

    def stage(words, at, tile, rows, columns, row, column):
        out = read(words, at)
        start = row // PIECE_ROWS * out.inner + column
        sums = out.data[start : start + columns]
        for r in range(rows):
            line = tile[r]
            for c in range(columns):
                sums[c] += line[c]

    return address_of("column-sum", stage, STAGE)


@cache
def maxima(axis):
    """The stage that keeps maxima in a `Maxima`, as bits: of each piece ("tensor": amax[piece of rows, span]), of each
    row of a piece ("rows": amax[span, row]) or of each column of a piece ("columns": amax[piece of rows, column])."""
    read = reader(Maxima)

    def tensor(words, at, tile, rows, columns, row, column):
        out, found = read(words, at), U32(0)
        for r in range(rows):
            line = tile[r]
            for c in range(columns):
                found = max(found, magnitude_bits(line[c]))
        slot = row // PIECE_ROWS * out.stride + column // SPAN
        maxima = out.amax.view(np.uint32)
        maxima[slot] = max(maxima[slot], found)

    def of_rows(words, at, tile, rows, columns, row, column):
        out = read(words, at)
        start, maxima = column // SPAN * out.outer + row, out.amax.view(np.uint32)
        for r in range(rows):
            line, found = tile[r], maxima[start + r]
            for c in range(columns):
                found = max(found, magnitude_bits(line[c]))
            maxima[start + r] = found

    def of_columns(words, at, tile, rows, columns, row, column):
        out = read(words, at)
        start = row // PIECE_ROWS * out.inner + column
        found = out.amax.view(np.uint32)[start : start + columns]
        for r in range(rows):
            line = tile[r]
            for c in range(columns):
                found[c] = max(found[c], magnitude_bits(line[c]))

    function = {"tensor": tensor, "rows": of_rows, "columns": of_columns}[axis]
    return address_of(f"amax-{axis}", function, STAGE)


@lru_cache(maxsize=1)
def largest():
    """The stage that stores the largest of the maxima of all pieces, for those of N numbers that columns stand for.

    Its words are those of the maxima, uint32 bits (pieces, N); of the float32 array (N,) to fill; of another one, or of
    none.
    """
    maxima_at, floats_at = make_array_at(np.uint32), make_array_at(np.float32)

    def stage(words, at, tile, rows, columns, row, column):
        partial, target, other = maxima_at(words, at), floats_at(words, at + 2), floats_at(words, at + 4)
        n = len(target)
        first, last = column, min(column + columns, n)
        found = target.view(np.uint32)[first:last]
        found[:] = U32(0)
        for piece in range(len(partial) // n):
            maxima = partial[piece * n + first : piece * n + last]
            for i in range(last - first):
                found[i] = max(found[i], maxima[i])
        if len(other) > 0:
            for i in range(first, last):
                other[i] = target[i]

    return address_of("largest-maxima", stage, STAGE)


@device
def four_point(a, b, c, d):
    """Two butterfly stages of four values."""
    return (a + b) + (c + d), (a - b) + (c - d), (a + b) - (c + d), (a - b) - (c - d)


@cache
def hadamard_down(inverse=False):
    """The stage that transforms groups of 16 rows in place; the sign mask is its word.

    Four butterfly stages in float32, then a factor 1/4; adding 0 leaves no -0, like a matrix product. Two stages at a
    time, of four rows each, over `NEAR` columns: what is passed over twice lies in the nearest cache.
    """

    @routine
    def first_stages(a, b, c, d, mask, i):
        for k in range(len(a)):
            w, x, y, z = a[k], b[k], c[k], d[k]
            if not inverse:
                w, x = signed(w, mask, i), signed(x, mask, i + 1)
                y, z = signed(y, mask, i + 2), signed(z, mask, i + 3)
            a[k], b[k], c[k], d[k] = four_point(w, x, y, z)

    @routine
    def last_stages(a, b, c, d, mask, i):
        for k in range(len(a)):
            w, x, y, z = four_point(a[k], b[k], c[k], d[k])
            w, x, y, z = w * QUARTER, x * QUARTER, y * QUARTER, z * QUARTER
            if inverse:
                w, x = signed(w, mask, i), signed(x, mask, i + 4)
                y, z = signed(y, mask, i + 8), signed(z, mask, i + 12)
            a[k], b[k], c[k], d[k] = w + ZERO, x + ZERO, y + ZERO, z + ZERO

    def stage(words, at, tile, rows, columns, row, column):
        mask = np.uint32(words[at])
        for top in range(0, rows, HADAMARD):
            for left in range(0, columns, NEAR):
                right = min(left + NEAR, columns)
                for i in range(0, HADAMARD, 4):
                    a, b = tile[top + i, left:right], tile[top + i + 1, left:right]
                    first_stages(a, b, tile[top + i + 2, left:right], tile[top + i + 3, left:right], mask, i)
                for i in range(4):
                    a, b = tile[top + i, left:right], tile[top + i + 4, left:right]
                    last_stages(a, b, tile[top + i + 8, left:right], tile[top + i + 12, left:right], mask, i)

    return address_of("hadamard-inverse-down" if inverse else "hadamard-down", stage, STAGE)


@cache
def hadamard_along(inverse=False):
    """The stage that transforms groups of 16 columns in place, as `hadamard_down` does rows."""

    def stage(words, at, tile, rows, columns, row, column):
        mask = np.uint32(words[at])
        for r in range(rows):
            for left in range(0, columns, HADAMARD):
                group = tile[r, left : left + HADAMARD]
                if not inverse:
                    for i in range(HADAMARD):
                        group[i] = signed(group[i], mask, i)
                for level in range(4):
                    stride = 1 << level
                    for i in range(HADAMARD):
                        if i & stride == 0:
                            a, b = group[i], group[i + stride]
                            group[i], group[i + stride] = a + b, a - b
                for i in range(HADAMARD):
                    value = group[i] * QUARTER
                    group[i] = (signed(value, mask, i) if inverse else value) + ZERO

    return address_of("hadamard-inverse-along" if inverse else "hadamard-along", stage, STAGE)
