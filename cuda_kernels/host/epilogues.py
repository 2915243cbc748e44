"""Epilogues: scale a tile, cast it, store codes and scales. One compiled stage for each format and rule.

A tile is cut into groups of `height` rows, and those into blocks of `width` columns that share a scale:

    rowwise            1 x B        columnwise         B x 1        square         B x B
    per tensor         1 x 1 with the scale that is given

For each group of rows, in this order: the blocks' maxima, what is stored for each block and what its elements are
multiplied with (`Scales`), the products, their codes. The scalar functions are those of the GPU's epilogues.
"""

from collections import namedtuple
from functools import cache

import numba
import numpy as np

from cuda_kernels import casts
from cuda_kernels.epilogues import (
    block_byte,
    encode_multiplier,
    four_over_six_byte,
    fp8_scale,
    global_encode_scale,
    make_e8m0_byte,
    scale_block_major,
    scale_mask,
    scale_row_major,
    scale_swizzled,
)
from cuda_kernels.host.compile import address_of
from cuda_kernels.host.stages import magnitude_bits
from cuda_kernels.host.tiles import STAGE
from cuda_kernels.simt import U16, U32, U64, F, as_f32, as_u32, device, named_by_content, select

ZERO, ONE = F(0), F(1)
FP4_BLOCK = 16


def routine(function):
    """A part of a stage that is compiled as a function of its own and inlined by LLVM if it likes."""
    return numba.njit(error_model="numpy", nogil=True)(named_by_content(function))


#: How a scaling finds its scales. Field, meaning:
#:   tensor(out, outer)                     what all blocks share: the tensor's scale, of `outer` if row-scaled
#:   block(amax, shared, out)               (stored, multiplier) of a block
#:   stored                                 dtype of stored scales
Scales = namedtuple("Scales", "tensor block stored")

#: Where a stage stores. Field, meaning:
#:   name           part of the stage's name
#:   height, width  edges of a block
#:   transposed     codes are stored [column, row]
#:   scale_index    index(out, outer, block) of a scale
#:   by_column      scales are numbered by (column, block of rows), else by (row, block of columns)
#:   repeat         a square's scale is stored for every row (or column), not once
Place = namedtuple("Place", "name height width transposed scale_index by_column repeat")


# --- scales -----------------------------------------------------------------------------------------


@device
def unused(out, outer):
    """No scale is shared."""
    return ZERO


def mx_scales(fmt, limit, mantissa_bits, rounding):
    """E8M0 bytes."""
    byte_of = make_e8m0_byte(limit, mantissa_bits, rounding)

    @device
    def block(amax, shared, out):
        byte = byte_of(amax)
        return np.uint8(byte), casts.e8m0_multiplier(byte)

    return Scales(unused, block, np.uint8)


def block_scales(limit, power_2):
    """Float32 scales of 128 elements."""
    largest_code, mask = F(limit), scale_mask(power_2)

    @device
    def block(amax, shared, out):
        scale = fp8_scale(amax, largest_code, out.epsilon, out.largest_scale, mask)
        return ONE / scale, scale

    return Scales(unused, block, np.float32)


def nvfp4_tensor(top, row_scaled):
    """Return `tensor(out, outer)`: S_enc, from the amax of the tensor or of an outer index."""
    top = F(top)

    @device
    def tensor(out, outer):
        return global_encode_scale(out.given[outer if row_scaled else 0], top)

    return tensor


def nvfp4_scales(top, row_scaled):
    """E4M3 bytes under a scale of the tensor, or of an outer index."""

    @device
    def block(amax, shared, out):
        byte = block_byte(amax, shared)
        return np.uint8(byte), encode_multiplier(byte, F(1) / shared)

    return Scales(nvfp4_tensor(top, row_scaled), block, np.uint8)


@device
def larger(a, b):
    """The larger of two uint32."""
    return select(a > b, a, b)


# --- the steps of a group of rows -------------------------------------------------------------------


@routine
def column_maxima(tile, first, last, columns, maxima):
    """The maximum of each column of rows `first` to `last`."""
    line = tile[first]
    for c in range(columns):
        maxima[c] = magnitude_bits(line[c])
    for r in range(first + 1, last):
        line = tile[r]
        for c in range(columns):
            maxima[c] = larger(maxima[c], magnitude_bits(line[c]))


@routine
def pairwise_maxima(values, n, maxima):
    """The larger of each of `n` pairs of neighbours."""
    for i in range(n):
        maxima[i] = larger(values[2 * i], values[2 * i + 1])


def make_find_maxima(height, width):
    """Return `find(tile, first, last, columns, lanes)`: the maximum of each block of rows `first` to `last`.

    Neighbours meet until one value a block is left, from one row of `lanes` to the other: LLVM vectorises that, but not
    short loops with a maximum. The result is one of these rows.
    """
    halvings = width.bit_length() - 1

    @routine
    def of_columns(tile, first, last, columns, lanes):
        column_maxima(tile, first, last, columns, lanes[0])
        return lanes[0]

    @routine
    def of_blocks(tile, first, last, columns, lanes):
        n = (columns + width - 1) // width * width
        if height > 1:
            column_maxima(tile, first, last, columns, lanes[1])
            lanes[1, columns:n] = U32(0)
            pairwise_maxima(lanes[1], n // 2, lanes[0])
        else:
            line, halves, pairs = tile[first], lanes[0], columns // 2
            for i in range(pairs):
                halves[i] = larger(magnitude_bits(line[2 * i]), magnitude_bits(line[2 * i + 1]))
            halves[pairs : n // 2] = U32(0)
            if columns % 2:
                halves[pairs] = magnitude_bits(line[columns - 1])
        for step in range(1, halvings):
            pairwise_maxima(lanes[(step + 1) % 2], n >> (step + 1), lanes[step % 2])
        return lanes[(halvings + 1) % 2]

    return of_columns if width == 1 else of_blocks


def make_choose(scales, place):
    """Return `choose(tile, first, last, columns, row, column, maxima, out, stored, multipliers)`."""
    tensor, block, width, by_column = scales.tensor, scales.block, place.width, place.by_column

    @routine
    def choose(tile, first, last, columns, row, column, maxima, out, stored, multipliers):
        blocks = (columns + width - 1) // width
        if by_column and width == 1:
            for b in range(blocks):
                stored[b], multipliers[b] = block(as_f32(maxima[b]), tensor(out, column + b), out)
        else:
            shared = tensor(out, row)
            for b in range(blocks):
                stored[b], multipliers[b] = block(as_f32(maxima[b]), shared, out)

    return choose


def make_place_scales(place):
    """Return `put(stored, scales, row, column, rows, columns, out)`: store a group's scales where they belong."""
    height, width, index = place.height, place.width, place.scale_index
    by_column, repeat = place.by_column, place.repeat

    @routine
    def by_rows(stored, scales, row, column, rows, columns, out):
        first = column // width
        blocks = (columns + width - 1) // width
        outer = row if repeat or height == 1 else row // height
        for r in range(rows if repeat else 1):
            for b in range(blocks):
                scales[index(out, outer + r, first + b)] = stored[b]

    @routine
    def by_columns(stored, scales, row, column, rows, columns, out):
        block = row // height
        if repeat or width == 1:
            for c in range(columns):
                scales[index(out, column + c, block)] = stored[c // width]
        else:
            for b in range((columns + width - 1) // width):
                scales[index(out, column // width + b, block)] = stored[b]

    return by_columns if by_column else by_rows


def make_cast(fmt, width, stochastic):
    """Return `cast(line, multipliers, random, columns, codes)`: the codes of a row times its multipliers."""
    encode = casts.ENCODERS[fmt]

    @device
    def code(x, random, c):
        return np.uint8(casts.e2m1_stochastic(x, np.uint32(random[c])) if stochastic else encode(x))

    @routine
    def by_blocks(line, multipliers, random, columns, codes):
        whole = columns // width
        for b in range(whole):
            factor, left = multipliers[b], b * width
            for k in range(width):
                codes[left + k] = code(line[left + k] * factor, random, left + k)
        for c in range(whole * width, columns):
            codes[c] = code(line[c] * multipliers[whole], random, c)

    @routine
    def by_columns(line, multipliers, random, columns, codes):
        for c in range(columns):
            codes[c] = code(line[c] * multipliers[c], random, c)

    return by_columns if width == 1 else by_blocks


@routine
def pack(codes, columns, target):
    """Store the FP4 codes of a row two a byte."""
    pairs = codes.view(np.uint16)
    for i in range(columns // 2):
        target[i] = np.uint8(pairs[i] | (pairs[i] >> U16(4)))


@device
def exchange(low, high, shift, mask):
    """Swap the upper parts of fields of `low` with the lower parts of those of `high`; `mask` selects lower parts."""
    moved = np.uint64(np.uint64(low >> shift) ^ high) & mask
    return np.uint64(low ^ np.uint64(moved << shift)), np.uint64(high ^ moved)


@device
def transpose_8x8(a, b, c, d, e, f, g, h):
    """Eight words of eight bytes as their columns."""
    a, e = exchange(a, e, U64(32), U64(0x00000000FFFFFFFF))
    b, f = exchange(b, f, U64(32), U64(0x00000000FFFFFFFF))
    c, g = exchange(c, g, U64(32), U64(0x00000000FFFFFFFF))
    d, h = exchange(d, h, U64(32), U64(0x00000000FFFFFFFF))
    a, c = exchange(a, c, U64(16), U64(0x0000FFFF0000FFFF))
    b, d = exchange(b, d, U64(16), U64(0x0000FFFF0000FFFF))
    e, g = exchange(e, g, U64(16), U64(0x0000FFFF0000FFFF))
    f, h = exchange(f, h, U64(16), U64(0x0000FFFF0000FFFF))
    a, b = exchange(a, b, U64(8), U64(0x00FF00FF00FF00FF))
    c, d = exchange(c, d, U64(8), U64(0x00FF00FF00FF00FF))
    e, f = exchange(e, f, U64(8), U64(0x00FF00FF00FF00FF))
    g, h = exchange(g, h, U64(8), U64(0x00FF00FF00FF00FF))
    return a, b, c, d, e, f, g, h


@routine
def transpose_eights(codes, rows, columns):
    """Replace 8 x 8 bytes of `codes` by their transposes: eight rows at a time, vectorised along them."""
    words = codes.view(np.uint64)
    for r in range(0, rows, 8):
        a, b, c, d = words[r], words[r + 1], words[r + 2], words[r + 3]
        e, f, g, h = words[r + 4], words[r + 5], words[r + 6], words[r + 7]
        for i in range(columns // 8):
            a[i], b[i], c[i], d[i], e[i], f[i], g[i], h[i] = transpose_8x8(
                a[i], b[i], c[i], d[i], e[i], f[i], g[i], h[i]
            )


@routine
def transpose_words(codes, rows, columns, row, column, outer, data):
    """Store codes [column, row]; rows, columns, row and outer are multiples of 8."""
    transpose_eights(codes, rows, columns)
    words, target = codes.view(np.uint64), data.view(np.uint64)
    for c in range(columns):
        start = ((column + c) * outer + row) // 8
        for i in range(rows // 8):
            target[start + i] = words[8 * i + c % 8, c // 8]


@routine
def transpose_bytes(codes, rows, columns, row, column, outer, data):
    """Store codes [column, row]."""
    for c in range(columns):
        start = (column + c) * outer + row
        for r in range(rows):
            data[start + r] = codes[r, c]


def make_transpose(fp4):
    """Return `transpose(codes, rows, columns, row, column, out)`: store a tile's codes [column, row], FP4 two a byte.

    `codes` is overwritten.
    """

    @routine
    def transpose(codes, rows, columns, row, column, out):
        outer = out.outer
        if fp4:
            rows, row, outer = rows // 2, row // 2, outer // 2
            for r in range(rows):
                low, high, target = codes[2 * r], codes[2 * r + 1], codes[r]
                for c in range(columns):
                    target[c] = low[c] | (high[c] << np.uint8(4))
        if (rows | row | columns | outer) % 8 == 0:
            transpose_words(codes, rows, columns, row, column, outer, out.data)
        else:
            transpose_bytes(codes, rows, columns, row, column, outer, out.data)

    return transpose


@device
def code_columns(columns):
    """Columns to allocate for codes that are transposed: whole words, and rows that do not share a set of the cache."""
    return (columns + 7) // 8 * 8 + 64


def make_random(source, by_column):
    """Return `fill(tile, rows, columns, row, column, out)`: the random bytes of a tile's elements.

    Args:
        source: "philox", "given" or None.
        by_column: the 16 elements of a block, and `random_bits`, run down the columns.
    """

    @routine
    def none(random, rows, columns, row, column, out):
        pass

    @routine
    def given_rows(random, rows, columns, row, column, out):
        for r in range(rows):
            for c in range(columns):
                random[r, c] = out.random_bits[(row + r) * out.inner + column + c]

    @routine
    def given_columns(random, rows, columns, row, column, out):
        for c in range(columns):
            for r in range(rows):
                random[r, c] = out.random_bits[(column + c) * out.outer + row + r]

    @routine
    def philox_rows(random, rows, columns, row, column, out):
        for r in range(rows):
            first = out.first_block + (row + r) * (out.inner // FP4_BLOCK) + column // FP4_BLOCK
            for b in range(columns // FP4_BLOCK):
                words = casts.philox(out.seed, out.offset, U64(first + b))
                for k in range(FP4_BLOCK):
                    random[r, b * FP4_BLOCK + k] = np.uint8(words[k // 4] >> U32(8 * (k % 4)))

    @routine
    def philox_columns(random, rows, columns, row, column, out):
        for c in range(columns):
            first = out.first_block + (column + c) * (out.outer // FP4_BLOCK) + row // FP4_BLOCK
            for b in range(rows // FP4_BLOCK):
                words = casts.philox(out.seed, out.offset, U64(first + b))
                for k in range(FP4_BLOCK):
                    random[b * FP4_BLOCK + k, c] = np.uint8(words[k // 4] >> U32(8 * (k % 4)))

    if source is None:
        return none
    rows, columns = (philox_rows, philox_columns) if source == "philox" else (given_rows, given_columns)
    return columns if by_column else rows


# --- stages -----------------------------------------------------------------------------------------


def block_stage(fmt, scales, place, random_source=None, choose=None):
    """Return the stage (a Python function) that scales and casts by blocks."""
    transposed, height, width = place.transposed, place.height, place.width
    find_maxima, choose = make_find_maxima(height, width), choose or make_choose(scales, place)
    place_scales, cast = make_place_scales(place), make_cast(fmt, width, random_source is not None)
    transpose, fill_random = make_transpose(fmt == "e2m1"), make_random(random_source, place.by_column)
    packed, stored_type, random_rows = fmt == "e2m1" and not transposed, scales.stored, 1 << 20 if random_source else 1

    def stage(tile, rows, columns, row, column, out):
        stored, multipliers = np.empty(columns, stored_type), np.empty(columns, np.float32)
        lanes = np.empty((2, columns + width), np.uint32)
        random = np.empty((min(rows, random_rows), code_columns(columns)), np.uint8)
        codes = np.empty((rows if transposed else 1, code_columns(columns)), np.uint8)
        stored_scales = out.scales.view(stored_type)
        fill_random(random, rows, columns, row, column, out)
        for first in range(0, rows, height):
            last = min(first + height, rows)
            maxima = find_maxima(tile, first, last, columns, lanes)
            choose(tile, first, last, columns, row + first, column, maxima, out, stored, multipliers)
            place_scales(stored, stored_scales, row + first, column, last - first, columns, out)
            for r in range(first, last):
                start = (row + r) * out.inner + column
                target = out.data[start : start + columns]
                if transposed:
                    target = codes[r, :columns]
                elif packed:
                    target = codes[0, :columns]
                cast(tile[r], multipliers, random[min(r, random_rows - 1)], columns, target)
                if packed:
                    pack(target, columns, out.data[start // 2 : (start + columns) // 2])
        if transposed:
            transpose(codes, rows, columns, row, column, out)

    return stage


@cache
def per_tensor(fmt, transposed):
    """The stage that casts x * given[0] to FP8."""
    encode, transpose = casts.ENCODERS[fmt], make_transpose(False)

    def stage(tile, rows, columns, row, column, out):
        codes = np.empty((rows if transposed else 1, code_columns(columns)), np.uint8)
        scale = out.given[0]
        for r in range(rows):
            start, line = (row + r) * out.inner + column, tile[r]
            target = codes[r, :columns] if transposed else out.data[start : start + columns]
            for c in range(columns):
                target[c] = np.uint8(encode(line[c] * scale))
        if transposed:
            transpose(codes, rows, columns, row, column, out)

    return address_of(f"cast-{fmt}{'-transposed' * transposed}", stage, STAGE)


def _place(block, square, columnwise, transposed, layout, repeat):
    height, width = (block, block) if square else ((block, 1) if columnwise else (1, block))
    index = {"row": scale_row_major, "block": scale_block_major, "swizzled": scale_swizzled}[layout]
    words = ["square" * square, "columnwise" if columnwise else "rowwise", "swizzled" * (layout == "swizzled")]
    return Place("-".join(filter(None, words)), height, width, transposed, index, columnwise, repeat)


@cache
def mx(fmt, limit, mantissa_bits, rounding, square, columnwise, swizzled):
    """The stage of an MX format: E8M0 scales of 32 elements or squares."""
    layout = "swizzled" if swizzled else "block" if columnwise else "row"
    place = _place(32, square, columnwise, False, layout, True)
    stage = block_stage(fmt, mx_scales(fmt, limit, mantissa_bits, rounding), place)
    return address_of(f"mx-{fmt}-{rounding}-{place.name}", stage, STAGE)


@cache
def fp8_blocks(fmt, limit, power_2, square, columnwise):
    """The stage of FP8 block scaling: float32 scales of 128 elements or squares."""
    place = _place(128, square, columnwise, columnwise, "row" if square else "block", False)
    stage = block_stage(fmt, block_scales(limit, power_2), place)
    return address_of(f"block-{fmt}-{place.name}{'-power2' * power_2}", stage, STAGE)


@cache
def nvfp4(e4m3_max, square, columnwise, row_scaled, random_source, four_over_six, swizzled):
    """The stage of NVFP4: E4M3 scales of 16 elements or squares, under a scale of the tensor or of an outer index."""
    place = _place(FP4_BLOCK, square, columnwise, columnwise, "swizzled" if swizzled else "row", True)
    scales, choose = nvfp4_scales(6 * e4m3_max, row_scaled), None
    if four_over_six:
        choose = make_choose_four_or_six(e4m3_max, row_scaled, four_over_six, place)
    stage = block_stage("e2m1", scales, place, random_source, choose)
    words = ["nvfp4", str(e4m3_max), place.name, "row_scaled" * row_scaled, random_source, four_over_six]
    return address_of("-".join(filter(None, words)), stage, STAGE)


# --- 4over6 -----------------------------------------------------------------------------------------


def make_choose_four_or_six(e4m3_max, row_scaled, metric, place):
    """Return the `choose` that maps each block's maximum to 6 or to 4, whichever errs less (6 if equal).

    An element's error is (code * scale * amax) / (6 e4m3_max) - x, its magnitude or its square. Errors of 16 elements
    along the block are added one after another, those of a square's rows as a tree: row i and i + 8, then 4, 2, 1.
    """
    top, by_column, width = F(6 * e4m3_max), place.by_column, place.width
    tensor = nvfp4_tensor(top, row_scaled)

    @device
    def error(x, byte, shared, amax):
        code = casts.e2m1(x * encode_multiplier(byte, F(1) / shared))
        difference = ((casts.decode_e2m1(code) * casts.decode_e4m3(byte)) * amax) / top - x
        if metric == "mse":
            return difference * difference
        return as_f32(np.uint32(as_u32(difference) & casts.MAGNITUDE))

    @routine
    def block_error(tile, first, last, left, byte, shared, amax, sums):
        sums[:] = ZERO
        for r in range(first, last):
            at = r - first if width > 1 else 0
            for k in range(width):
                sums[at] += error(tile[r, left + k], byte, shared, amax)
        half = FP4_BLOCK // 2 if last - first > 1 and width > 1 else 0
        while half > 0:
            for i in range(half):
                sums[i] += sums[i + half]
            half //= 2
        return sums[0]

    @routine
    def choose(tile, first, last, columns, row, column, maxima, out, stored, multipliers):
        sums = np.empty(FP4_BLOCK, np.float32)
        for b in range(columns // width):
            outer = column + b if by_column and width == 1 else row
            shared, amax = tensor(out, outer), out.given[outer if row_scaled else 0]
            largest, left = as_f32(maxima[b]), b * width
            six, four = four_over_six_byte(largest, shared, ONE), four_over_six_byte(largest, shared, F(1.5))
            error6 = block_error(tile, first, last, left, six, shared, amax, sums)
            error4 = block_error(tile, first, last, left, four, shared, amax, sums)
            byte = four if error4 < error6 else six
            stored[b], multipliers[b] = np.uint8(byte), encode_multiplier(byte, F(1) / shared)

    return choose
