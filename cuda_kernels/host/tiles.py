"""How a tensor is walked: stages work on one tile of float32 in the cache after the other.

    stage(words, at, tile, rows, columns, row, column)

The first stage fills tile[:rows, :columns] with values; those after it round them, transform them, sum them, or cast
and store them. (row, column) is where the tile lies in the (M, K) matrix. Stages are compiled apart and meet through
function pointers, which costs some 10 ns a tile: n + m functions are compiled, not n * m.

Compiled loops are called with one array of 64-bit words that has all of it, an array as its address and size: NumPy
arrays and tuples of them are slow to take apart. What a stage reads and fills are tuples of `operands`, whose words
begin at `at`; a `reader` makes a tuple of them.

The matrix is cut into pieces of 128 rows x `SPAN` columns: what a thread takes at once. Nothing that is computed
depends on how pieces are shared out.
"""

from functools import cache

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from cuda_kernels.host.compile import call_address, compiled, routine
from cuda_kernels.operands import described
from cuda_kernels.simt import U32, as_f32

#: Rows and columns of a piece. Column sums add 128 rows in order, then the sums of all pieces in order.
PIECE_ROWS, SPAN = 128, 8192

BYTES, WORDS = types.Array(types.uint8, 1, "C"), types.Array(types.uint64, 1, "C")
TILE, _INT = types.Array(types.float32, 2, "C"), types.int64
STAGE = types.void(WORDS, _INT, TILE, _INT, _INT, _INT, _INT)
#: A loop over pieces or rows: words, the first, the one behind the last.
LOOP = types.void(WORDS, _INT, _INT)


def spans(columns):
    """Pieces in a row of the matrix."""
    return -(-columns // SPAN)


def pieces(rows, columns):
    """Pieces of the matrix."""
    return -(-rows // PIECE_ROWS) * spans(columns)


# --- words ------------------------------------------------------------------------------------------


def append_words(values, words, arrays):
    """Append the words of numbers and arrays to a list, and (place, array) of each array to another.

    An array has two, its address and its bytes, both 0 where it is None; a number has one, a negative one as it is in
    two's complement.
    """
    for value in values:
        if value is None:
            words += 0, 0
        elif isinstance(value, np.ndarray):
            if value.size:
                arrays.append((len(words), value))
            words += 0, value.nbytes
        elif isinstance(value, float | np.float32):
            words.append(int(np.float32(value).view(np.uint32)))
        else:
            words.append(int(value) % (1 << 64))


def size(kind):
    """Words of a tuple of `operands`."""
    _, fields = described(kind, **dict.fromkeys(kind._fields, np.uint8))
    return sum(1 + (what == "pointer") for what, _ in fields.values())


@intrinsic
def pointer_to(typingctx, address):
    """An address as a pointer to bytes."""

    def emit(context, builder, signature, values):
        return builder.inttoptr(values[0], ir.IntType(8).as_pointer())

    return types.CPointer(types.uint8)(types.uint64), emit


@cache
def make_array_at(dtype):
    """Return `array(words, i)`: the array of a dtype whose address and bytes are words `i` and `i` + 1."""

    @routine
    def array_at(words, i):
        return carray(pointer_to(words[i]), (np.int64(words[i + 1]),), np.uint8).view(dtype)

    return array_at


@routine
def float_at(words, i):
    """The float32 whose bits are word `i`."""
    return as_f32(U32(words[i]))


@routine
def integer_at(words, i):
    """Word `i` as a signed number: sizes and strides are of 64 bits here."""
    return np.int64(words[i])


@routine
def word_at(words, i):
    """Word `i`."""
    return words[i]


@cache
def _fields_at(fields):
    """Return `values(words, i)`: the tuple of fields, described as `operands` does, whose words begin at `i`."""
    if not fields:
        return routine(lambda words, i: ())
    (what, dtype), others = fields[0], _fields_at(fields[1:])
    if what == "pointer":
        first, words_of_first = make_array_at(dtype), 2
    else:
        first, words_of_first = {np.float32: float_at, np.uint64: word_at}.get(dtype, integer_at), 1

    @routine
    def values(words, i):
        return (first(words, i), *others(words, i + words_of_first))

    return values


@cache
def reader(kind, **pointers):
    """Return `read(words, i)`: the tuple of `operands` whose words begin at `i`.

    Args:
        kind, pointers: as of `operands.described`. Pointers are arrays here.
    """
    values = _fields_at(tuple(described(kind, **pointers)[1].values()))

    @routine
    def read(words, i):
        return kind(*values(words, i))

    return read


# --- the walk ---------------------------------------------------------------------------------------


#: float32 in a line of the cache.
LINE = 16
#: Words of a walk before those of its stages: the number of stages, shape of the matrix and of a tile. Each stage has
#: two, its address and where the words of its operands begin.
FIRST = 5


@routine
def aligned_tile(rows, columns):
    """An array for float32 whose rows begin where lines of the cache do, if columns are a multiple of 16."""
    array = np.empty(rows * columns + LINE, np.float32)
    start = (-array.ctypes.data % (4 * LINE)) // 4
    return array[start : start + rows * columns].reshape(rows, columns)


def walk(words, first, last):
    """Run stages over pieces `first` to `last` of a matrix."""
    count, rows, columns = np.int64(words[0]), np.int64(words[1]), np.int64(words[2])
    tile_rows, tile_columns = np.int64(words[3]), np.int64(words[4])
    whole_lines = (columns + LINE - 1) // LINE * LINE
    tile = aligned_tile(tile_rows, min(tile_columns, whole_lines))
    spans_in_row = (columns + SPAN - 1) // SPAN
    for piece in range(first, last):
        top, left = piece // spans_in_row * PIECE_ROWS, piece % spans_in_row * SPAN
        bottom, right = min(rows, top + PIECE_ROWS), min(columns, left + SPAN)
        for row in range(top, bottom, tile_rows):
            for column in range(left, right, tile_columns):
                height, width = min(tile_rows, bottom - row), min(tile_columns, right - column)
                for i in range(FIRST, FIRST + 2 * count, 2):
                    stage, at = np.int64(words[i]), np.int64(words[i + 1])
                    call_address(stage, (words, at, tile, height, width, row, column))


def words_of_walk(stages, shape, tile):
    """Return (words, arrays) of a walk, as `append_words` makes them.

    Args:
        stages: (address, numbers and arrays) of each, in order. shape, tile: (rows, columns) of the matrix and a tile.
    """
    words: list[int] = [len(stages), *shape, *tile, *[0] * (2 * len(stages))]
    arrays: list[tuple] = []
    for place, (address, values) in zip(range(FIRST, FIRST + 2 * len(stages), 2), stages, strict=True):
        words[place : place + 2] = address, len(words)
        append_words(values, words, arrays)
    return words, arrays


@cache
def compiled_walk():
    """`walk`, compiled: the one loop that all operations share."""
    return compiled("walk", walk, LOOP)
