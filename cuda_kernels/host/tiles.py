"""How a tensor is walked: a prologue fills a tile of float32 in the cache, then a few stages work on it.

    prologue(inputs, tile, rows, columns, row, column)         fills tile[:rows, :columns]
    stage(tile, rows, columns, row, column, out)               rounds it, transforms it, sums it, or casts and stores it

(row, column) is where the tile lies in the (M, K) matrix. Prologues and stages are compiled apart and meet through
function pointers, which costs some 10 ns a tile: n + m functions are compiled, not n * m. `inputs` and `out` are
`operands.Inputs` and `operands.Outputs`; tensors are flat uint8 views there, which a function views as its own dtype.

Compiled loops are called with one array of 64-bit words that has all of it, an array as its address and size: NumPy
arrays and tuples of them are slow to take apart.

The matrix is cut into pieces of 128 rows x `SPAN` columns: what a thread takes at once. Nothing that is computed
depends on how pieces are shared out.
"""

from functools import cache

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from cuda_kernels.host.compile import call_address, compiled, routine
from cuda_kernels.operands import PARAMETERS, Inputs, Outputs
from cuda_kernels.simt import U32, as_f32

#: Rows and columns of a piece. Column sums add 128 rows in order, then the sums of all pieces in order.
PIECE_ROWS, SPAN = 128, 8192

BYTES, FLOATS = types.Array(types.uint8, 1, "C"), types.Array(types.float32, 1, "C")
WORDS = types.Array(types.uint32, 1, "C")
TILE = types.Array(types.float32, 2, "C")
_INT, _FLOAT = types.int64, types.float32
INPUTS = types.NamedTuple((BYTES, BYTES, FLOATS, *[_FLOAT] * len(PARAMETERS), _INT, _INT, _INT), Inputs)
OUTPUTS = types.NamedTuple(
    (BYTES, BYTES, WORDS, FLOATS, BYTES, types.uint64, types.uint64, _INT, _FLOAT, _FLOAT, _INT, _INT, _INT), Outputs
)
PROLOGUE = types.void(INPUTS, TILE, _INT, _INT, _INT, _INT)
STAGE = types.void(TILE, _INT, _INT, _INT, _INT, OUTPUTS)
#: A loop over pieces or rows: words, the first, the one behind the last.
LOOP = types.void(types.Array(types.uint64, 1, "C"), _INT, _INT)


def spans(columns):
    """Pieces in a row of the matrix."""
    return -(-columns // SPAN)


def pieces(rows, columns):
    """Pieces of the matrix."""
    return -(-rows // PIECE_ROWS) * spans(columns)


# --- words ------------------------------------------------------------------------------------------

#: Words of an `Inputs` and an `Outputs`: two of an array, its address and its bytes, one of a number.
INPUT_WORDS, OUTPUT_WORDS = (sum(1 + isinstance(field, types.Array) for field in kind) for kind in (INPUTS, OUTPUTS))
#: Words of a walk before those of its `Inputs`: prologue, number of stages, shape of the matrix and of a tile. After
#: them, for each stage, its address and its `Outputs`.
FIRST = 6


def append_words(values, words, arrays):
    """Append the words of an `Inputs` or `Outputs` to a list, and (place, array) of each of its arrays to another."""
    for value in values:
        if isinstance(value, np.ndarray):
            if value.size:
                arrays.append((len(words), value))
            words += 0, value.nbytes
        else:
            words.append(int(value.view(np.uint32)) if isinstance(value, np.float32) else int(value))


@intrinsic
def pointer_to(typingctx, address):
    """An address as a pointer to bytes."""

    def emit(context, builder, signature, values):
        return builder.inttoptr(values[0], ir.IntType(8).as_pointer())

    return types.CPointer(types.uint8)(types.uint64), emit


@routine
def bytes_at(words, i):
    """The array of bytes whose address and size are words `i` and `i` + 1."""
    return carray(pointer_to(words[i]), (np.int64(words[i + 1]),), np.uint8)


@routine
def number_at(words, i):
    """The float32 whose bits are word `i`."""
    return as_f32(U32(words[i]))


def make_numbers_at(count):
    """Return `numbers(words, i)`: a tuple of as many `number_at`, from word `i` on."""
    if not count:
        return routine(lambda words, i: ())
    others = make_numbers_at(count - 1)

    @routine
    def numbers(words, i):
        return (number_at(words, i), *others(words, i + 1))

    return numbers


parameters_at = make_numbers_at(len(PARAMETERS))


@routine
def inputs_at(words, i):
    """The `Inputs` whose words begin at `i`."""
    after = i + 6 + len(PARAMETERS)
    return Inputs(
        bytes_at(words, i),
        bytes_at(words, i + 2),
        bytes_at(words, i + 4).view(np.float32),
        *parameters_at(words, i + 6),
        np.int64(words[after]),
        np.int64(words[after + 1]),
        np.int64(words[after + 2]),
    )


@routine
def outputs_at(words, i):
    """The `Outputs` whose words begin at `i`."""
    return Outputs(
        bytes_at(words, i),
        bytes_at(words, i + 2),
        bytes_at(words, i + 4).view(np.uint32),
        bytes_at(words, i + 6).view(np.float32),
        bytes_at(words, i + 8),
        words[i + 10],
        words[i + 11],
        np.int64(words[i + 12]),
        number_at(words, i + 13),
        number_at(words, i + 14),
        np.int64(words[i + 15]),
        np.int64(words[i + 16]),
        np.int64(words[i + 17]),
    )


# --- the walk ---------------------------------------------------------------------------------------


def walk(words, first, last):
    """Run a prologue and stages over pieces `first` to `last` of a matrix."""
    prologue, count = np.int64(words[0]), np.int64(words[1])
    rows, columns, tile_rows, tile_columns = (
        np.int64(words[2]),
        np.int64(words[3]),
        np.int64(words[4]),
        np.int64(words[5]),
    )
    inputs = inputs_at(words, FIRST)
    whole_blocks = (columns + 127) // 128 * 128
    tile = np.empty((tile_rows, min(tile_columns, whole_blocks)), np.float32)
    spans_in_row = (columns + SPAN - 1) // SPAN
    for piece in range(first, last):
        top, left = piece // spans_in_row * PIECE_ROWS, piece % spans_in_row * SPAN
        bottom, right = min(rows, top + PIECE_ROWS), min(columns, left + SPAN)
        for row in range(top, bottom, tile_rows):
            for column in range(left, right, tile_columns):
                height, width = min(tile_rows, bottom - row), min(tile_columns, right - column)
                call_address(prologue, (inputs, tile, height, width, row, column))
                for i in range(count):
                    at = FIRST + INPUT_WORDS + i * (1 + OUTPUT_WORDS)
                    stage, out = np.int64(words[at]), outputs_at(words, at + 1)
                    call_address(stage, (tile, height, width, row, column, out))


@cache
def compiled_walk():
    """`walk`, compiled: the one loop that all operations share."""
    return compiled("walk", walk, LOOP)
