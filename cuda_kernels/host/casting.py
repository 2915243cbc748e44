"""Stages that scale a tile, cast it and store codes and scales: one compiled for each direction of a scaling.

A tile is cut into groups of `height` rows, and those into blocks of `width` columns that share a scale:

    rowwise            1 x B        columnwise         B x 1        square         B x B

For each group of rows, in this order: the blocks' maxima, what is stored for each block and what its elements are
multiplied by, the products, their codes. The rule of a scale, its place and a choice of scales are those of kernels,
device functions of `directions.Direction`. Here are the loops: LLVM vectorises them, where a kernel has registers.
"""

import hashlib
from functools import cache

import numpy as np

from cuda_kernels import casts
from cuda_kernels.host.compile import address_of, fill_sixteen, inlined, routine
from cuda_kernels.host.stages import magnitude_bits
from cuda_kernels.host.tiles import STAGE, float_at, make_array_at, reader, size
from cuda_kernels.operands import Blocks, Chosen, InMemory, Random, TwoLevel
from cuda_kernels.simt import U16, U32, U64, F, as_f32, device, select
from refops.rounding import PHILOX_BYTES
from refops.scalings.declaration import Numbers

ZERO = F(0)
#: Columns up to which short rows are taken together.
LINE_COLUMNS = 1024


def edges(direction):
    """(height, width): rows and columns of the matrix that a block covers."""
    outer, inner = direction.block
    return (inner, outer) if direction.columnwise else (outer, inner)


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


def make_halve(width):
    """Return `halve(lanes, n)`: the maxima of blocks, of those of `n` / 2 pairs of neighbours in lanes[0].

    Neighbours meet until one value a block is left, from one row of `lanes` to the other: LLVM vectorises that, but not
    short loops with a maximum. The result is one of these rows.
    """
    halvings = width.bit_length() - 1

    @routine
    def halve(lanes, n):
        for step in range(1, halvings):
            pairwise_maxima(lanes[(step + 1) % 2], n >> (step + 1), lanes[step % 2])
        return lanes[(halvings + 1) % 2]

    return halve


def make_line_maxima(width):
    """Return `find(line, columns, lanes)`: the maximum of each block of a row, one of the rows of `lanes`."""
    halve = make_halve(width)

    @routine
    def find(line, columns, lanes):
        n, halves, pairs = (columns + width - 1) // width * width, lanes[0], columns // 2
        for i in range(pairs):
            halves[i] = larger(magnitude_bits(line[2 * i]), magnitude_bits(line[2 * i + 1]))
        halves[pairs : n // 2] = U32(0)
        if columns % 2:
            halves[pairs] = magnitude_bits(line[columns - 1])
        return halve(lanes, n)

    return find


def make_group_maxima(height, width):
    """Return `find(tile, first, last, columns, lanes)`: the maximum of each block of rows `first` to `last`, one of the
    rows of `lanes`."""
    halve, of_line = make_halve(width), make_line_maxima(width)

    @routine
    def of_columns(tile, first, last, columns, lanes):
        column_maxima(tile, first, last, columns, lanes[0])
        return lanes[0]

    @routine
    def of_row(tile, first, last, columns, lanes):
        return of_line(tile[first], columns, lanes)

    @routine
    def of_squares(tile, first, last, columns, lanes):
        n = (columns + width - 1) // width * width
        column_maxima(tile, first, last, columns, lanes[1])
        lanes[1, columns:n] = U32(0)
        pairwise_maxima(lanes[1], n // 2, lanes[0])
        return halve(lanes, n)

    return of_columns if width == 1 else of_row if height == 1 else of_squares


def differ_by_column(direction):
    """Whether neighbouring blocks have scales, and amaxes, of their own."""
    return direction.columnwise and direction.by_outer


def make_choose(direction):
    """Return `choose(tile, first, last, columns, row, column, maxima, out, stored, multipliers)`: what the rule gives
    for each block of a group."""
    shared_scale = direction.shared_scale()

    @device
    def shared(out, outer):
        return shared_scale(out, outer, 1)

    find_scales = make_find_scales(direction, direction.rules().block_scale, shared)

    @inlined
    def choose(tile, first, last, columns, row, column, maxima, out, stored, multipliers):
        find_scales(columns, row, column, maxima, out, stored, multipliers)

    return choose


def make_find_scales(direction, rule, shared):
    """Return `find(columns, row, column, maxima, out, stored, multipliers)`: what a rule gives for each block.

    It is `Direction.block_scale` in two steps: what blocks share, shared(out, outer), is found once where it can be.
    """
    kind, (_, width), each_column = direction.scale_type, edges(direction), differ_by_column(direction)

    @inlined
    def find(columns, row, column, maxima, out, stored, multipliers):
        if each_column:
            for c in range(columns):
                scale, multipliers[c] = rule(as_f32(maxima[c]), shared(out, column + c), out)
                stored[c] = kind(scale)
        else:
            of_all = shared(out, row)
            for b in range((columns + width - 1) // width):
                scale, multipliers[b] = rule(as_f32(maxima[b]), of_all, out)
                stored[b] = kind(scale)

    return find


def make_store_scales(direction):
    """Return `store(stored, row, column, rows, columns, out)`: store a group's scales where they belong, neighbours
    together. A square's scale is stored once, or for each of its outer indices: what `Layout.run` covers."""
    store_scale, (outers, inners), (_, width) = direction.store_scale(), direction.layout.run, edges(direction)
    runs_of_block = width // outers

    @inlined
    def of_rows(stored, row, column, rows, columns, out):
        first = column // inners
        for r in range(row, row + rows, outers):
            for b in range((columns + inners - 1) // inners):
                store_scale(stored[b], out, r // outers, first + b)

    @inlined
    def of_columns(stored, row, column, rows, columns, out):
        first, block = column // outers, row // inners
        for i in range((columns + outers - 1) // outers):
            store_scale(stored[i // runs_of_block], out, first + i, block)

    return of_columns if direction.columnwise else of_rows


def make_spread(width):
    """Return `spread(values, columns, out)`: give each column its block's value; blocks are multiples of 16, or 1."""

    @routine
    def of_columns(values, columns, out):
        for c in range(columns):  # a slice would compile the text of an error for shapes that differ, for seconds
            out[c] = values[c]

    @routine
    def of_blocks(values, columns, out):
        whole = columns // width
        for b in range(whole):
            for left in range(b * width, (b + 1) * width, 16):
                fill_sixteen(out, left, values[b])
        for c in range(whole * width, columns):
            out[c] = values[whole]

    return of_columns if width == 1 else of_blocks


def make_cast(fmt, width, stochastic, rows=1):
    """Return `cast(lines, multipliers, random, columns, codes)`: the codes of a row times its multipliers.

    `lines` and `random` are tuples of one row, or of two, whose FP4 codes share bytes: those of the first are low.
    """
    encode, with_random_byte = casts.ENCODERS[fmt], casts.STOCHASTIC.get(fmt)

    @device
    def code(line, random, factor, c):
        x = line[c] * factor
        return np.uint32(with_random_byte(x, np.uint32(random[c])) if stochastic else encode(x))

    @device
    def of_one(lines, random, factor, c):
        return np.uint8(code(lines[0], random[0], factor, c))

    @device
    def of_two(lines, random, factor, c):
        low, high = code(lines[0], random[0], factor, c), code(lines[1], random[1], factor, c)
        return np.uint8(low | np.uint32(high << U32(4)))

    stored = of_two if rows == 2 else of_one

    @inlined
    def by_blocks(lines, multipliers, random, columns, codes):
        whole = columns // width
        for b in range(whole):
            factor, left = multipliers[b], b * width
            for k in range(width):
                codes[left + k] = stored(lines, random, factor, left + k)
        for c in range(whole * width, columns):
            codes[c] = stored(lines, random, multipliers[whole], c)

    @inlined
    def by_columns(lines, multipliers, random, columns, codes):
        for c in range(columns):
            codes[c] = stored(lines, random, multipliers[c], c)

    return by_columns if width == 1 else by_blocks


@device
def one_row(array, r):
    """Row `r`, alone in its tuple."""
    return (array[r],)


@device
def two_rows(array, r):
    """Row `r` and the one after it."""
    return array[r], array[r + 1]


@routine
def pack(codes, columns, target):
    """Store the FP4 codes of a row two per byte."""
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
    """Return `transpose(codes, rows, columns, row, column, out)`: store a tile's codes [column, row].

    `codes` is overwritten. FP4 codes of two rows share a row of it already, as `make_cast` stores them.
    """

    @routine
    def transpose(codes, rows, columns, row, column, out):
        outer = out.inner
        if packed:
            rows, row, outer = rows // 2, row // 2, outer // 2
        if (rows | row | columns | outer) % 8 == 0:
            transpose_words(codes, rows, columns, row, column, outer, out.data)
        else:
            transpose_bytes(codes, rows, columns, row, column, outer, out.data)

    return transpose


@device
def code_columns(columns):
    """Columns to allocate for codes that are transposed: whole words, and rows that do not share a set of the cache."""
    return (columns + 7) // 8 * 8 + 64


def make_fill_random(direction):
    """Return `fill(tile, rows, columns, row, column, out, random)`: the random bytes of a tile's elements.

    `random` is an `operands.Random`; its bits, and the 16 elements of a block, run as the direction sees the matrix:
    down the columns of a columnwise copy.
    """
    along_columns = direction.along_columns

    @device
    def inner(out):
        return out.outer if along_columns else out.inner

    @routine
    def given_rows(tile, rows, columns, row, column, out, random):
        for r in range(rows):
            for c in range(columns):
                tile[r, c] = random.bits[(row + r) * inner(out) + column + c]

    @routine
    def given_columns(tile, rows, columns, row, column, out, random):
        for c in range(columns):
            for r in range(rows):
                tile[r, c] = random.bits[(column + c) * inner(out) + row + r]

    @routine
    def philox_rows(tile, rows, columns, row, column, out, random):
        for r in range(rows):
            first = random.first_block + (row + r) * (inner(out) // PHILOX_BYTES) + column // PHILOX_BYTES
            for b in range(columns // PHILOX_BYTES):
                words = casts.philox(random.seed, random.offset, U64(first + b))
                for k in range(PHILOX_BYTES):
                    tile[r, b * PHILOX_BYTES + k] = np.uint8(words[k // 4] >> U32(8 * (k % 4)))

    @routine
    def philox_columns(tile, rows, columns, row, column, out, random):
        for c in range(columns):
            first = random.first_block + (column + c) * (inner(out) // PHILOX_BYTES) + row // PHILOX_BYTES
            for b in range(rows // PHILOX_BYTES):
                words = casts.philox(random.seed, random.offset, U64(first + b))
                for k in range(PHILOX_BYTES):
                    tile[b * PHILOX_BYTES + k, c] = np.uint8(words[k // 4] >> U32(8 * (k % 4)))

    philox = direction.random == "philox"
    in_rows, in_columns = (philox_rows, philox_columns) if philox else (given_rows, given_columns)
    return in_columns if direction.columnwise else in_rows


# --- stages -----------------------------------------------------------------------------------------


def operand_of(direction):
    """The tuple of `operands` that the stage of a direction fills; stochastic rounding has a `Random` after it."""
    rules = direction.rules()
    return Blocks if not rules.parts else TwoLevel if rules.choice is None else Chosen


@cache
def blocks(direction):
    """The stage that scales and casts by blocks."""
    height, width = edges(direction)
    as_they_lie = height == 1 and width > 1 and not direction.transposed
    in_lines = as_they_lie and direction.random is None and operand_of(direction) is not Chosen
    stage = make_line_stage(direction) if in_lines else make_group_stage(direction)
    return address_of(name_of("quantize", direction), stage, STAGE)


@routine
def rows_in_line(tile, rows, columns, inner, width):
    """How many rows of a tile are cast as one: up to `LINE_COLUMNS` columns, where blocks lie next to each other."""
    together = columns == inner and columns == tile.shape[1] and columns % width == 0
    return min(rows, max(1, LINE_COLUMNS // columns)) if together else 1


def make_line_stage(direction):
    """The stage for blocks that lie in rows, and codes that are stored so.

    A row costs some 100 ns besides its elements: short ones are taken together, except their scales.
    """
    stored_type, (_, width) = direction.scale_type, edges(direction)
    read = reader(operand_of(direction), scales=stored_type)
    find_maxima, choose, store_scales = make_line_maxima(width), make_choose(direction), make_store_scales(direction)
    cast, packed, each_row = make_cast(direction.fmt, width, False), direction.packed, direction.by_outer

    def stage(words, at, tile, rows, columns, row, column):
        out = read(words, at)
        together, blocks_of_row = rows_in_line(tile, rows, columns, out.inner, width), (columns + width - 1) // width
        length = together * columns
        stored, multipliers = np.empty(length, stored_type), np.empty(length, np.float32)
        lanes, codes = np.empty((2, length + width), np.uint32), np.empty(code_columns(length), np.uint8)
        values = tile.reshape(tile.size)
        for first in range(0, rows, together):
            n, left = min(together, rows - first) * columns, first * tile.shape[1]
            line = values[left : left + n]
            maxima, row_length = find_maxima(line, n, lanes), columns if each_row else n
            for i in range(n // row_length):
                b = i * blocks_of_row
                choose(tile, 0, 1, row_length, row + first + i, column, maxima[b:], out, stored[b:], multipliers[b:])
            for i in range(n // columns):
                store_scales(stored[i * blocks_of_row :], row + first + i, column, 1, columns, out)
            start = (row + first) * out.inner + column
            target = codes[:n] if packed else out.data[start : start + n]
            cast((line,), multipliers, (codes,), n, target)
            if packed:
                pack(target, n, out.data[start // 2 : (start + n) // 2])

    return stage


def make_group_stage(direction):
    """The stage for all other blocks: groups of `height` rows, one after the other."""
    fmt, stored_type, kind = direction.fmt, direction.scale_type, operand_of(direction)
    read, read_random, at_random = reader(kind, scales=stored_type), reader(Random), size(kind)
    transposed, (height, width) = direction.transposed, edges(direction)
    find_maxima, store_scales = make_group_maxima(height, width), make_store_scales(direction)
    choose = (make_choose if kind is not Chosen else make_choose_best)(direction)
    dithers, transpose = direction.random is not None, make_transpose(direction.packed)
    fill_random = make_fill_random(direction)
    packed, paired = direction.packed and not transposed, direction.packed and transposed
    together, rows_at = (2, two_rows) if paired else (1, one_row)
    cast = make_cast(fmt, width, dithers, together)

    def stage(words, at, tile, rows, columns, row, column):
        out = read(words, at)
        stored, multipliers = np.empty(columns, stored_type), np.empty(columns, np.float32)
        lanes = np.empty((2, columns + width), np.uint32)
        random = np.empty((rows if dithers else together, code_columns(columns)), np.uint8)
        codes = np.empty((rows // together if transposed else 1, code_columns(columns)), np.uint8)
        if dithers:
            fill_random(random, rows, columns, row, column, out, read_random(words, at + at_random))
        for first in range(0, rows, height):
            last = min(first + height, rows)
            maxima = find_maxima(tile, first, last, columns, lanes)
            choose(tile, first, last, columns, row + first, column, maxima, out, stored, multipliers)
            store_scales(stored, row + first, column, last - first, columns, out)
            for r in range(first, last, together):
                start = (row + r) * out.inner + column
                target = out.data[start : start + columns]
                if transposed:
                    target = codes[r // together, :columns]
                elif packed:
                    target = codes[0, :columns]
                cast(rows_at(tile, r), multipliers, rows_at(random, r if dithers else 0), columns, target)
                if packed:
                    pack(target, columns, out.data[start // 2 : (start + columns) // 2])
        if transposed:
            transpose(codes, rows, columns, row, column, out)

    return stage


@cache
def per_tensor(direction):
    """The stage that casts under a scale that is in memory: an `InMemory`, one code a byte."""
    encode, transpose, transposed = casts.ENCODERS[direction.fmt], make_transpose(False), direction.transposed
    read = reader(InMemory)

    def stage(words, at, tile, rows, columns, row, column):
        out = read(words, at)
        codes = np.empty((rows if transposed else 1, code_columns(columns)), np.uint8)
        multiplier = out.scale[0]
        for r in range(rows):
            start, line = (row + r) * out.inner + column, tile[r]
            target = codes[r, :columns] if transposed else out.data[start : start + columns]
            for c in range(columns):
                target[c] = np.uint8(encode(line[c] * multiplier))
        if transposed:
            transpose(codes, rows, columns, row, column, out)

    return address_of(f"cast-{direction.fmt}{'-transposed' * transposed}", stage, STAGE)


@cache
def scale_of_tensor(direction):
    """The stage that makes a tensor's scale of its maxima.

    Its words are those of the maxima, uint32 bits; of float32 (2,), which gets the multiplier and what is stored, as an
    `InMemory` has them; of two arrays for the amax and two for what is stored, float32 (1,) or none; of the scaling's
    `Numbers`.
    """
    rule, maxima_at, floats_at = direction.rules().block_scale, make_array_at(np.uint32), make_array_at(np.float32)

    def stage(words, at, tile, rows, columns, row, column):
        maxima, scale, found = maxima_at(words, at), floats_at(words, at + 2), U32(0)
        for i in range(len(maxima)):
            found = larger(found, maxima[i])
        amax = as_f32(found)
        scale[1], scale[0] = rule(amax, ZERO, Numbers(float_at(words, at + 12), float_at(words, at + 13)))
        floats_at(words, at + 4)[:], floats_at(words, at + 6)[:] = amax, amax
        floats_at(words, at + 8)[:], floats_at(words, at + 10)[:] = scale[1], scale[1]

    return address_of(name_of("scale-of-tensor", direction), stage, STAGE)


@cache
def tensor_scales(direction):
    """The stage that makes what blocks share of the amaxes of a tensor or its rows, for those that columns stand for.

    Its words are those of the amaxes, float32; of float32 (amaxes, numbers), which it fills.
    """
    rules, floats_at = direction.rules(), make_array_at(np.float32)
    rule, parts = rules.tensor_scale, rules.parts

    def stage(words, at, tile, rows, columns, row, column):
        amaxes, scales = floats_at(words, at), floats_at(words, at + 2)
        for i in range(column, min(column + columns, len(amaxes))):
            if parts == 1:
                scales[i] = rule(amaxes[i])
            else:
                scales[2 * i], scales[2 * i + 1] = rule(amaxes[i])

    return address_of(name_of("tensor-scales", direction), stage, STAGE)


def name_of(what, direction):
    """The name under which the code of a direction is compiled: no other settings or rules have it."""
    way = "columnwise" if direction.columnwise else "rowwise"
    return f"{what}-{direction.name}-{direction.fmt}-{way}-{hashlib.sha256(f'{direction}'.encode()).hexdigest()[:12]}"


# --- a choice of scales -----------------------------------------------------------------------------


def make_choose_best(direction):
    """Return the `choose` that gives each block the candidate whose codes err least; the first of equal ones.

    Errors of elements along the block are added one after another, those of a square's rows as a tree: row i and
    i + B/2, then B/4, ... 1. Candidates are tried for all blocks of the group, the last one first.
    """
    (height, width), stored_type = edges(direction), direction.scale_type
    *others, last_one = (make_try(direction, candidate) for candidate in direction.rules().choice.candidates)
    better, rows_of_sums = make_try_better(others, width), height if width > 1 else 1

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


def make_try(direction, candidate):
    """Return a function that finds a candidate's scales of all blocks, and their errors in errors[0]."""
    tensor_scale, value_of, amax_of = direction.rules().tensor_scale, direction.value_of_scale(), direction.amax()
    (_, width), code_type, find_errors = edges(direction), direction.register_type, make_find_errors(direction)
    each_column, spread = differ_by_column(direction), make_spread(width)

    @device
    def shared(out, outer):
        return tensor_scale(amax_of(out, outer))

    find_scales = make_find_scales(direction, candidate, shared)

    @routine
    def tried(tile, first, last, columns, row, column, maxima, out, stored, multipliers, factors, terms, errors):
        find_scales(columns, row, column, maxima, out, stored, multipliers)
        scales, of_columns, scales_of_columns, amaxes = factors[0], factors[1], factors[2], factors[3]
        for b in range((columns + width - 1) // width):
            scales[b] = value_of(code_type(stored[b]))
        spread(multipliers, columns, of_columns)
        spread(scales, columns, scales_of_columns)
        amax = amax_of(out, row)
        for c in range(columns):
            amaxes[c] = amax_of(out, column + c) if each_column else amax
        find_errors(tile, first, last, columns, of_columns, scales_of_columns, amaxes, terms, errors)

    return tried


def make_find_errors(direction):
    """Return `find(tile, first, last, columns, multipliers, scales, amaxes, terms, errors)`: into errors[0].

    What elements are multiplied by and compared by has an entry for each column.
    """
    error, (height, width) = direction.error_of_value(casts.CPU_DECODERS[direction.fmt]), edges(direction)

    @routine
    def of_row(line, columns, multipliers, scales, amaxes, terms):
        for c in range(columns):
            terms[c] = error(line[c], multipliers[c], scales[c], amaxes[c])

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
