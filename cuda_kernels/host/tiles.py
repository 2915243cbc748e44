"""How a tensor is walked: a prologue fills a tile of float32 in the cache, then a few stages work on it.

    prologue(inputs, tile, rows, columns, row, column)         fills tile[:rows, :columns]
    stage(tile, rows, columns, row, column, out)               rounds it, transforms it, sums it, or casts and stores it

(row, column) is where the tile lies in the (M, K) matrix. Prologues and stages are compiled apart and meet through
function pointers, which costs some 10 ns a tile: n + m functions are compiled, not n * m. `inputs` and `out` are
`operands.Inputs` and `operands.Outputs`; tensors are flat uint8 views there, which a function views as its own dtype.

The matrix is cut into pieces of 128 rows x `SPAN` columns: what a thread takes at once. Nothing that is computed
depends on how pieces are shared out.
"""

from functools import cache

import numpy as np
from numba import types

from cuda_kernels.host.compile import call_address, compiled
from cuda_kernels.operands import Inputs, Outputs

#: Rows and columns of a piece. Column sums add 128 rows in order, then the sums of all pieces in order.
PIECE_ROWS, SPAN = 128, 8192
#: Stages that a walk has room for.
ROOM = (1, 3, 6)

BYTES, FLOATS = types.Array(types.uint8, 1, "C"), types.Array(types.float32, 1, "C")
WORDS = types.Array(types.uint32, 1, "C")
TILE = types.Array(types.float32, 2, "C")
_INT, _FLOAT = types.int64, types.float32
INPUTS = types.NamedTuple((BYTES, BYTES, FLOATS, *[_FLOAT] * 5, _INT, _INT, _INT), Inputs)
OUTPUTS = types.NamedTuple(
    (BYTES, BYTES, WORDS, FLOATS, BYTES, types.uint64, types.uint64, _INT, _FLOAT, _FLOAT, _INT, _INT, _INT), Outputs
)
PROLOGUE = types.void(INPUTS, TILE, _INT, _INT, _INT, _INT)
STAGE = types.void(TILE, _INT, _INT, _INT, _INT, OUTPUTS)


def spans(columns):
    """Pieces in a row of the matrix."""
    return -(-columns // SPAN)


def pieces(rows, columns):
    """Pieces of the matrix."""
    return -(-rows // PIECE_ROWS) * spans(columns)


def walk(prologue, stages, count, inputs, outs, rows, columns, tile_rows, tile_columns, first, last):
    """Run a prologue and the first `count` of `stages` over pieces `first` to `last` of a (rows, columns) matrix."""
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
                    call_address(stages[i], (tile, height, width, row, column, outs[i]))


@cache
def compiled_walk(room):
    """`walk`, compiled for tuples of `room` stages: the one loop that all operations share."""
    signature = types.void(_INT, types.UniTuple(_INT, room), _INT, INPUTS, types.UniTuple(OUTPUTS, room), *[_INT] * 6)
    return compiled(f"walk-{room}", walk, signature)
