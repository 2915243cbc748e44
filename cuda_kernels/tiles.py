"""A tile of a matrix in shared memory, where rows become columns: its layout, and who reads and writes what.

256 threads own 128 rows x 128 columns (x 64 where a word holds one float32). Along the rows a thread puts in, or takes
out, eight neighbours of a row; down the columns it takes eight neighbours of a column. No two threads of a warp want
different words of one bank.
"""

from collections import namedtuple
from functools import cache

import numpy as np

from cuda_kernels.simt import (
    I32,
    I64,
    THREADS,
    as_f32,
    as_i32,
    as_u32,
    cuda,
    device,
    first_column,
    first_row,
    select,
)
from cuda_kernels.vectors import HALVES, VECTOR, ZERO, amax, left_in_row, make_group_max, make_map, make_words, pair_of

#: Rows of a tile.
TILE_ROWS = 128


def tile_columns(stage):
    """Columns of a tile: what fits 48 KiB of shared memory with 128 rows."""
    return 64 if stage == "float32" else 128


#: A row of a staged tile has 64 words. They lie in two panels of 32, one round through the banks of shared memory.
PANEL_WORDS = 32
#: In a panel, two words that nobody uses follow every eight rows; one such word lies between the panels.
GROUP_ROWS, GROUP_GAP = 8, 2
PANEL_PITCH = TILE_ROWS * PANEL_WORDS + TILE_ROWS // GROUP_ROWS * GROUP_GAP + 1
TILE_WORDS = 2 * PANEL_PITCH


@device
def place_in_tile(row, word):
    """Where a word of a row of the tile lies in shared memory.

    Its bank is word + word // 32 + 2 (row // 8), modulo 32. So no two threads of a warp that `make_tile_walk` leads
    want different words of one bank. Along the rows, threads are 4 words apart (float32: 8); in the second panel they
    lie one bank further, and in each next row of the warp, 8 below, two banks: in the banks that the others leave free.
    Down the columns, 16 rows, 8 apart, take every second bank, and the neighbouring word of each the other ones.
    """
    return (word >> 5) * PANEL_PITCH + row * PANEL_WORDS + (row >> 3) * GROUP_GAP + (word & 31)


@device
def unsigned(place):
    """A non-negative index as an unsigned number: Numba would wrap a signed one around at 0."""
    return np.uint64(place)


@device
def neighbours(tile, place):
    """Four words of a row."""
    return (
        tile[unsigned(place)],
        tile[unsigned(place + 1)],
        tile[unsigned(place + 2)],
        tile[unsigned(place + 3)],
    )


@device
def words_below(tile, place):
    """The words of eight rows from a multiple of 8 on, one below the other."""
    return (
        tile[unsigned(place)],
        tile[unsigned(place + PANEL_WORDS)],
        tile[unsigned(place + 2 * PANEL_WORDS)],
        tile[unsigned(place + 3 * PANEL_WORDS)],
        tile[unsigned(place + 4 * PANEL_WORDS)],
        tile[unsigned(place + 5 * PANEL_WORDS)],
        tile[unsigned(place + 6 * PANEL_WORDS)],
        tile[unsigned(place + 7 * PANEL_WORDS)],
    )


#: How values lie in a tile: put(tile, r, c, v) stores eight neighbours of a row, along(tile, r, c) reads them, c a
#: multiple of 8; down(tile, r, c) reads eight of a column, r a multiple of 8; value(tile, r, c) reads one.
Stage = namedtuple("Stage", "put along down value")


@cache
def make_stage(storage):
    """Return the `Stage` of a dtype: a float32 a word, or two neighbours of a 16-bit dtype that holds them exactly."""
    if storage == "float32":
        floats = make_map(device(lambda word, p: as_f32(word)))

        @device
        def put(tile, r, c, v):
            place = place_in_tile(r, c)
            for k in range(VECTOR):
                tile[unsigned(place + k)] = as_u32(v[k])

        @device
        def along(tile, r, c):
            i = place_in_tile(r, c)
            return floats((*neighbours(tile, i), *neighbours(tile, i + 4)), ZERO)

        @device
        def down(tile, r, c):
            return floats(words_below(tile, place_in_tile(r, c)), ZERO)

        return Stage(put, along, down, device(lambda tile, r, c: as_f32(tile[unsigned(place_in_tile(r, c))])))

    low, high = HALVES[storage]
    words = make_words(pair_of(storage, None))
    half_of = device(lambda word, odd: select(odd, high(word), low(word)))
    halves = make_map(half_of)

    @device
    def put_pairs(tile, r, c, v):
        place, w = place_in_tile(r, c >> 1), words(v)
        for k in range(VECTOR // 2):
            tile[unsigned(place + k)] = w[k]

    @device
    def pairs_along(tile, r, c):
        w = neighbours(tile, place_in_tile(r, c >> 1))
        return low(w[0]), high(w[0]), low(w[1]), high(w[1]), low(w[2]), high(w[2]), low(w[3]), high(w[3])

    @device
    def pairs_down(tile, r, c):
        return halves(words_below(tile, place_in_tile(r, c >> 1)), (c & 1) == 1)

    @device
    def value_of_pair(tile, r, c):
        return half_of(tile[unsigned(place_in_tile(r, c >> 1))], (c & 1) == 1)

    return Stage(put_pairs, pairs_along, pairs_down, value_of_pair)


#: How 256 threads walk over a tile: along(thread, i), the first (row, column) of a thread's i-th eight values of a row,
#: in `row_steps` steps; down(thread, i), of eight values of a column, in `column_steps`.
Walk = namedtuple("Walk", "along row_steps down column_steps")


@cache
def make_tile_walk(columns):
    """Return the `Walk` over a tile of so many columns: the rows of a warp are 8 apart; 16 threads share a column."""
    across, down_threads = columns // VECTOR, TILE_ROWS // VECTOR
    across_bits, row_step, column_step = across.bit_length() - 1, THREADS // across, THREADS // down_threads

    @device
    def along(thread, i):
        r = i * row_step + ((thread & 31) >> across_bits) * GROUP_ROWS + (thread >> 5)
        return r, (thread & (across - 1)) * VECTOR

    @device
    def down(thread, i):
        return (thread & (down_threads - 1)) * VECTOR, i * column_step + (thread >> 4)

    return Walk(along, TILE_ROWS // row_step, down, columns // column_step)


# --- along the rows, and down the columns -----------------------------------------------------------


def make_fill(read, put, stage):
    """Return `fill(tile, source, out, rows, width)`: every thread's values of the tile, as rows.

    Args:
        read: read(source, row, column, left) -> eight, rounded as `stage`, a dtype, holds them exactly.
        put: of `stores`, what is done with them beside: put(v, out, row, column, left).
    """
    columns = tile_columns(stage)
    put_into, walk = make_stage(stage).put, make_tile_walk(columns)
    along, steps = walk.along, walk.row_steps

    @device
    def fill(tile, source, out, rows, width):
        for i in range(steps):
            r, c = along(cuda.threadIdx.x, i)
            row, column = I32(first_row(TILE_ROWS) + r), I32(first_column(columns) + c)
            left = left_in_row(row, column, rows, width)
            v = read(source, row, column, left)
            put_into(tile, r, c, v)
            put(v, out, row, column, left)

    return fill


def make_reread(put, stage):
    """Return `reread(tile, out, rows, width)`: every thread's values of the tile once more, as rows.

    Args:
        put: put(v, out, row, column, left), as of `make_fill`.
    """
    columns = tile_columns(stage)
    along_of, walk = make_stage(stage).along, make_tile_walk(columns)
    along, steps = walk.along, walk.row_steps

    @device
    def reread(tile, out, rows, width):
        for i in range(steps):
            r, c = along(cuda.threadIdx.x, i)
            row, column = I32(first_row(TILE_ROWS) + r), I32(first_column(columns) + c)
            left = left_in_row(row, column, rows, width)
            put(along_of(tile, r, c), out, row, column, left)

    return reread


def make_turn(put, stage):
    """Return `turn(tile, out, rows, width)`: every thread's values of the tile, as columns.

    Args:
        put: put(v, out, column, row, left): `v` are eight values of a column from `row` on, `left` to its end.
    """
    columns = tile_columns(stage)
    down_of, walk = make_stage(stage).down, make_tile_walk(columns)
    down, steps = walk.down, walk.column_steps

    @device
    def turn(tile, out, rows, width):
        for i in range(steps):
            r, c = down(cuda.threadIdx.x, i)
            row, column = I32(first_row(TILE_ROWS) + r), I32(first_column(columns) + c)
            left = left_in_row(column, row, width, rows)
            put(down_of(tile, r, c), out, column, row, left)

    return turn


def make_sum_columns(stage):
    """Return `sum_columns(tile, partial, rows, width)`: the sum of each column of the tile, from its first row on.

    `partial` is (tiles, width).
    """
    columns, value = tile_columns(stage), make_stage(stage).value

    @device
    def sum_columns(tile, partial, rows, width):
        c, row0 = cuda.threadIdx.x, first_row(TILE_ROWS)
        column = I32(first_column(columns) + c)
        if c < columns and column < width and row0 < rows:
            total = ZERO
            for r in range(TILE_ROWS):
                total = total + value(tile, r, c)
            partial[I64(row0 // TILE_ROWS) * width + column] = total

    return sum_columns


# --- squares ----------------------------------------------------------------------------------------

#: The largest magnitudes of the squares in a tile, float32 as int32 bits: `count` words of shared memory. clear(maxima)
#: before a barrier; put(v, maxima, row, column, left), of `make_fill`; after a barrier get(maxima, row, column, left),
#: of the square that an element of the matrix lies in.
TileMaxima = namedtuple("TileMaxima", "count clear put get")


@cache
def make_tile_maxima(edge, stage):
    """Return the `TileMaxima` of squares of an edge in a tile of a dtype.

    One number follows each row of squares unused. The squares of a column, up to 8 below each other, would otherwise
    lie in every eighth bank; 9 apart they lie in different ones.
    """
    columns, bits, lanes = tile_columns(stage), edge.bit_length() - 1, edge // VECTOR
    if edge > columns:
        raise ValueError(f"a tile staged as {stage} is {columns} columns wide: too narrow for blocks of {edge}")
    pitch, lane_max = columns // edge + 1, make_group_max(lanes)
    count = TILE_ROWS // edge * pitch

    @device
    def number(row, column):
        return unsigned(((row & (TILE_ROWS - 1)) >> bits) * pitch + ((column & (columns - 1)) >> bits))

    @device
    def clear(maxima):
        if cuda.threadIdx.x < count:
            maxima[cuda.threadIdx.x] = 0

    @device
    def put(v, maxima, row, column, left):
        largest = lane_max(amax(v))
        if (cuda.threadIdx.x & (lanes - 1)) == 0:
            cuda.atomic.max(maxima, number(row, column), as_i32(largest))

    return TileMaxima(count, clear, put, device(lambda maxima, row, column, left: as_f32(maxima[number(row, column)])))
