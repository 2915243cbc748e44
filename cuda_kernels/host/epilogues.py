"""Epilogues: scale a tile, cast it, store codes and scales. One compiled stage for each direction of a scaling.

A tile is cut into groups of `height` rows, and those into blocks of `width` columns that share a scale:

    rowwise            1 x B        columnwise         B x 1        square         B x B
    per tensor         1 x 1 with the scale that is given

For each group of rows, in this order: the blocks' maxima, what is stored for each block and what its elements are
multiplied with (the scaling's own rule, `scale_rules`), the products, their codes.
"""

import hashlib
from collections import namedtuple
from functools import cache

import numpy as np

from cuda_kernels import casts
from cuda_kernels.host.compile import address_of, compiled, fill_sixteen, routine
from cuda_kernels.host.stages import magnitude_bits
from cuda_kernels.host.tiles import LOOP, STAGE, outputs_at
from cuda_kernels.simt import U16, U32, U64, F, as_f32, device, select
from refops.rounding import PHILOX_BYTES

ZERO = F(0)


#: Where a stage stores. Field, meaning:
#:   height, width  edges of a block
#:   scale_index    index(stride, outer, block) of a scale
#:   by_column      scales are numbered by (column, block of rows), else by (row, block of columns)
#:   repeat         a square's scale is stored for every row (or column), not once
Place = namedtuple("Place", "height width scale_index by_column repeat")


def place_of(direction):
    """The `Place` of a `Direction` of blocks."""
    outer, inner = direction.block
    height, width = (inner, outer) if direction.columnwise else (outer, inner)
    return Place(height, width, direction.scale_index, direction.columnwise, direction.layout.repeated)


def make_tensor_scale(direction):
    """Return `tensor(out, outer)`: what all blocks share, from the amax of the tensor or of an outer index."""
    rule, by_outer = direction.rules().tensor_scale, direction.by_outer

    @device
    def unused(out, outer):
        return ZERO

    @device
    def tensor(out, outer):
        return rule(out.given[outer if by_outer else 0])

    return unused if rule is None else tensor


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


def make_choose(direction, place):
    """Return `choose(tile, first, last, columns, row, column, maxima, out, stored, multipliers)`."""
    find_scales = make_find_scales(direction, place, direction.rules().block_scale)

    @routine
    def choose(tile, first, last, columns, row, column, maxima, out, stored, multipliers):
        find_scales(columns, row, column, maxima, out, stored, multipliers)

    return choose


def make_find_scales(direction, place, rule):
    """Return `find(columns, row, column, maxima, out, stored, multipliers)`: what a rule gives for each block."""
    tensor, kind, width = make_tensor_scale(direction), direction.scale_type, place.width
    of_each_column = has_amax_of_each_column(direction, place)

    @routine
    def find(columns, row, column, maxima, out, stored, multipliers):
        blocks = (columns + width - 1) // width
        if of_each_column:
            for b in range(blocks):
                scale, multipliers[b] = rule(as_f32(maxima[b]), tensor(out, column + b), out)
                stored[b] = kind(scale)
        else:
            shared = tensor(out, row)
            for b in range(blocks):
                scale, multipliers[b] = rule(as_f32(maxima[b]), shared, out)
                stored[b] = kind(scale)

    return find


def has_amax_of_each_column(direction, place):
    """Whether blocks beside each other have amaxes of their own."""
    return place.by_column and place.width == 1 and direction.by_outer


def make_place_scales(place):
    """Return `put(stored, scales, row, column, rows, columns, out)`: store a group's scales where they belong.

    Unsigned, an index is never counted from the end, and neighbours are stored together.
    """
    height, width, index = place.height, place.width, place.scale_index
    by_column, repeat = place.by_column, place.repeat

    @routine
    def by_rows(stored, scales, row, column, rows, columns, out):
        first = column // width
        blocks = (columns + width - 1) // width
        outer = row if repeat or height == 1 else row // height
        for r in range(rows if repeat else 1):
            for b in range(blocks):
                scales[U64(index(out.scale_stride, outer + r, first + b))] = stored[b]

    @routine
    def by_columns(stored, scales, row, column, rows, columns, out):
        block = row // height
        if repeat or width == 1:
            for c in range(columns):
                scales[U64(index(out.scale_stride, column + c, block))] = stored[c // width]
        else:
            for b in range((columns + width - 1) // width):
                scales[U64(index(out.scale_stride, column // width + b, block))] = stored[b]

    return by_columns if by_column else by_rows


def make_spread(width):
    """Return `spread(values, columns, out)`: give each column its block's value; blocks are multiples of 16, or 1."""

    @routine
    def of_columns(values, columns, out):
        out[:columns] = values[:columns]

    @routine
    def of_blocks(values, columns, out):
        whole = columns // width
        for b in range(whole):
            for left in range(b * width, (b + 1) * width, 16):
                fill_sixteen(out, left, values[b])
        for c in range(whole * width, columns):
            out[c] = values[whole]

    return of_columns if width == 1 else of_blocks


def make_cast(fmt, width, stochastic):
    """Return `cast(line, multipliers, random, columns, codes)`: the codes of a row times its multipliers."""
    encode, with_random_byte = casts.ENCODERS[fmt], casts.STOCHASTIC.get(fmt)

    @device
    def code(x, random, c):
        return np.uint8(with_random_byte(x, np.uint32(random[c])) if stochastic else encode(x))

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


@routine
def turn_back(data, rows, columns, row, column, outer, codes):
    """Read codes that lie [column, row] as codes[row, column]: what `transpose_words` and `transpose_bytes` stored."""
    if (rows | row | columns | outer) % 8 == 0:
        words, source = codes.view(np.uint64), data.view(np.uint64)
        for c in range(columns):
            start = ((column + c) * outer + row) // 8
            for i in range(rows // 8):
                words[8 * i + c % 8, c // 8] = source[start + i]
        transpose_eights(codes, rows, columns)
    else:
        for c in range(columns):
            start = (column + c) * outer + row
            for r in range(rows):
                codes[r, c] = data[start + r]


def make_transpose(packed):
    """Return `transpose(codes, rows, columns, row, column, out)`: store a tile's codes [column, row], FP4 two a byte.

    `codes` is overwritten.
    """

    @routine
    def transpose(codes, rows, columns, row, column, out):
        outer = out.outer
        if packed:
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
            first = out.first_block + (row + r) * (out.inner // PHILOX_BYTES) + column // PHILOX_BYTES
            for b in range(columns // PHILOX_BYTES):
                words = casts.philox(out.seed, out.offset, U64(first + b))
                for k in range(PHILOX_BYTES):
                    random[r, b * PHILOX_BYTES + k] = np.uint8(words[k // 4] >> U32(8 * (k % 4)))

    @routine
    def philox_columns(random, rows, columns, row, column, out):
        for c in range(columns):
            first = out.first_block + (column + c) * (out.outer // PHILOX_BYTES) + row // PHILOX_BYTES
            for b in range(rows // PHILOX_BYTES):
                words = casts.philox(out.seed, out.offset, U64(first + b))
                for k in range(PHILOX_BYTES):
                    random[b * PHILOX_BYTES + k, c] = np.uint8(words[k // 4] >> U32(8 * (k % 4)))

    if source is None:
        return none
    rows, columns = (philox_rows, philox_columns) if source == "philox" else (given_rows, given_columns)
    return columns if by_column else rows


# --- stages -----------------------------------------------------------------------------------------


@cache
def blocks(direction):
    """The stage that scales and casts by blocks."""
    place, fmt, stored_type = place_of(direction), direction.fmt, direction.scale_type
    transposed, height, width = direction.transposed, place.height, place.width
    find_maxima = make_find_maxima(height, width)
    choose = (make_choose if direction.rules().choice is None else make_choose_best)(direction, place)
    place_scales, cast = make_place_scales(place), make_cast(fmt, width, direction.random is not None)
    transpose, fill_random = make_transpose(direction.packed), make_random(direction.random, place.by_column)
    packed, random_rows = direction.packed and not transposed, 1 << 20 if direction.random else 1

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

    return address_of(name_of("quantize", direction), stage, STAGE)


@cache
def per_tensor(direction):
    """The stage that casts x * given[0], one code a byte."""
    encode, transpose, transposed = casts.ENCODERS[direction.fmt], make_transpose(False), direction.transposed

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

    return address_of(f"cast-{direction.fmt}{'-transposed' * transposed}", stage, STAGE)


@cache
def scale_of_tensor(direction):
    """Return the loop that makes a tensor's scale of the maxima in `amax`: what is stored in `data`, the multiplier in
    `given`."""
    rule = direction.rules().block_scale

    def loop(words, first, last):
        out, largest = outputs_at(words, 0), U32(0)
        for i in range(len(out.amax)):
            largest = larger(largest, out.amax[i])
        stored, multiplier = rule(as_f32(largest), ZERO, out)
        out.data.view(np.float32)[0], out.given[0] = stored, multiplier

    return compiled(name_of("scale-of-tensor", direction), loop, LOOP)


def name_of(what, direction):
    """What the code of a direction is compiled as: a name that no other settings or rules have."""
    way = "columnwise" if direction.columnwise else "rowwise"
    return f"{what}-{direction.name}-{direction.fmt}-{way}-{hashlib.sha256(f'{direction}'.encode()).hexdigest()[:12]}"


# --- a choice of scales -----------------------------------------------------------------------------


def make_choose_best(direction, place):
    """Return the `choose` that gives each block the candidate whose codes err least; the first of equal ones.

    Errors of elements along the block are added one after another, those of a square's rows as a tree: row i and
    i + B/2, then B/4, ... 1. Candidates are tried for all blocks of the group, the last one first.
    """
    *others, last_one = (make_try(direction, place, one) for one in direction.rules().choice.candidates)
    better = make_try_better(others, place.width)
    stored_type, width, height = direction.scale_type, place.width, place.height
    rows_of_sums = height if width > 1 else 1

    @routine
    def choose(tile, first, last, columns, row, column, maxima, out, stored, multipliers):
        blocks = (columns + width - 1) // width
        errors, found = np.empty((2, rows_of_sums, blocks), np.float32), np.empty(blocks, stored_type)
        factors, terms = np.empty((5, columns), np.float32), np.empty(blocks * width, np.float32)
        last_one(tile, first, last, columns, row, column, maxima, out, stored, multipliers, factors, terms, errors[0])
        better(tile, first, last, columns, row, column, maxima, out, stored, multipliers, found, factors, terms, errors)

    return choose


def make_try_better(tries, width):
    """Return a function that tries each of some candidates, the last one first, and keeps what errs less.

    What is kept is in `stored`, `multipliers` and errors[0, 0]; what is tried in `found`, factors[4] and errors[1, 0].
    """

    @routine
    def none(tile, first, last, columns, row, column, maxima, out, stored, multipliers, found, factors, terms, errors):
        pass

    if not tries:
        return none
    this, after = tries[0], make_try_better(tries[1:], width)

    @routine
    def better(
        tile, first, last, columns, row, column, maxima, out, stored, multipliers, found, factors, terms, errors
    ):
        after(tile, first, last, columns, row, column, maxima, out, stored, multipliers, found, factors, terms, errors)
        tried, kept_error, error = factors[4], errors[0, 0], errors[1, 0]
        this(tile, first, last, columns, row, column, maxima, out, found, tried, factors, terms, errors[1])
        for b in range((columns + width - 1) // width):
            keeps = kept_error[b] < error[b]
            stored[b] = select(keeps, stored[b], found[b])
            multipliers[b] = select(keeps, multipliers[b], tried[b])
            kept_error[b] = select(keeps, kept_error[b], error[b])

    return better


def make_try(direction, place, candidate):
    """Return a function that finds a candidate's scales of all blocks, and their errors in errors[0]."""
    find_scales, value_of = make_find_scales(direction, place, candidate), direction.value_of_scale()
    find_errors, width = make_find_errors(direction, place), place.width
    of_each_column, by_outer = has_amax_of_each_column(direction, place), direction.by_outer
    code_type, spread = direction.register_type, make_spread(width)

    @routine
    def tried(tile, first, last, columns, row, column, maxima, out, stored, multipliers, factors, terms, errors):
        find_scales(columns, row, column, maxima, out, stored, multipliers)
        scales, of_columns, scales_of_columns, amaxes = factors[0], factors[1], factors[2], factors[3]
        for b in range((columns + width - 1) // width):
            scales[b] = value_of(code_type(stored[b]))
        spread(multipliers, columns, of_columns)
        spread(scales, columns, scales_of_columns)
        shared = out.given[row if by_outer and not of_each_column else 0]
        for c in range(columns):
            amaxes[c] = out.given[column + c] if of_each_column else shared
        find_errors(tile, first, last, columns, of_columns, scales_of_columns, amaxes, terms, errors)

    return tried


def make_find_errors(direction, place):
    """Return `find(tile, first, last, columns, multipliers, scales, amaxes, terms, errors)`: into errors[0].

    What elements are multiplied with and compared by has an entry for each column.
    """
    error, width, height = direction.rules().choice.error, place.width, place.height
    encode, decode = casts.ENCODERS[direction.fmt], casts.CPU_DECODERS[direction.fmt]

    @routine
    def of_row(line, columns, multipliers, scales, amaxes, terms):
        for c in range(columns):
            terms[c] = error(decode(encode(line[c] * multipliers[c])), scales[c], amaxes[c], line[c])

    @routine
    def of_columns(tile, first, last, columns, multipliers, scales, amaxes, terms, errors):
        sums = errors[0]
        sums[:columns] = ZERO
        for r in range(first, last):
            of_row(tile[r], columns, multipliers, scales, amaxes, terms)
            for c in range(columns):
                sums[c] += terms[c]

    @routine
    def of_blocks(tile, first, last, columns, multipliers, scales, amaxes, terms, errors):
        blocks = (columns + width - 1) // width
        errors[:] = ZERO
        terms[columns:] = ZERO
        for r in range(first, last):
            of_row(tile[r], columns, multipliers, scales, amaxes, terms)
            sums = errors[r - first]
            for b in range(blocks):
                total = ZERO
                for k in range(width):
                    total += terms[b * width + k]
                sums[b] = total
        half = height // 2
        while half > 0:
            for i in range(half):
                for b in range(blocks):
                    errors[i, b] += errors[i + half, b]
            half //= 2

    return of_columns if width == 1 else of_blocks
