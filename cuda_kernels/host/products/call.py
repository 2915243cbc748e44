"""`matmul`: what is checked, how the work is cut, what the loop gets."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from cuda_kernels.host import arrays
from cuda_kernels.host.calls import Doing
from cuda_kernels.host.products.panels import DEPTH, LANES
from cuda_kernels.host.products.walk import aligned, exact
from cuda_kernels.host.threads import RANGES, get_num_threads
from cuda_kernels.host.tiles import append_words
from cuda_kernels.operands import Stored, Strided, UnitNumbers
from refops.formats import FloatFormat
from refops.hints import Array, ArrayLike, DTypeLike
from refops.products import Operands, Unit, check_operands, smallest_exponent
from refops.tiles import ceil_div

F = np.float32
#: Squares of 64 results in a tile, down and across: the first that gives each thread some tiles is taken. To make a
#: panel of an operand takes as long as 20 rows of results between two panels.
TILES = (4, 4), (2, 4), (1, 4), (1, 2), (1, 1)
#: Products up to which a call runs in the caller's thread.
SMALL = 1 << 18
#: Most products whose integers are added before they become float64: two registers hold 16 broadcast elements twice.
CHUNK = 16
#: Fraction bits beside which a product's integer in int32, and all sums of FP4 of a group in float64, have room.
MOST_BITS, MOST_BITS_OF_SUMS = 29, 38
#: Accumulator's dtype -> the float32 from which on it is infinite.
INFINITY = {np.dtype(np.float32): F(np.inf), np.dtype(np.float16): F(2.0**16)}


def matmul(
    a: ArrayLike,
    b: ArrayLike,
    unit: Unit,
    *,
    a_format: FloatFormat | DTypeLike,
    b_format: FloatFormat | DTypeLike,
    a_scale: ArrayLike | None = None,
    b_scale: ArrayLike | None = None,
    promotion: int | None = None,
) -> Array:
    """Return a b^T as a unit of a tensor core computes it, float32 (m, n).

    Arguments, bits and errors are those of `refops.products.matmul`. Operands may be CPU tensors of PyTorch, and lie in
    memory in any order: they are not copied.

    Args:
        a: float32 (m, k), the values of codes, without their scales.
        b: float32 (n, k).
        unit: what `refops.products.unit` returns.
        a_format, b_format: the formats that the values are in: `FloatFormat`, float16 or bfloat16.
        a_scale, b_scale: float32 (m, ceil(k / block)) and (n, ceil(k / block)), of a unit that reads scales, or with
            `promotion` of partial sums.
        promotion: products after which the accumulator is added to a float32 sum and starts again at 0, or None.

    Raises:
        TypeError, ValueError: as `refops.products.matmul`; also ValueError for a unit of the caller's own that adds, or
            keeps, more than the loops can, or aligns products under several scales.
    """
    a, b = arrays.as_array(a, "a"), arrays.as_array(b, "b")
    a_scale, b_scale = arrays.as_array(a_scale, "a_scale"), arrays.as_array(b_scale, "b_scale")
    operands = check_operands(a, b, unit, a_format, b_format, a_scale, b_scale, promotion)
    loop = _loop_of(unit, operands.block)
    m, n, k = len(operands.a), len(operands.b), operands.a.shape[1]
    out = np.zeros((m, n), F)
    if out.size and k:
        tile, tiles = _tiles_of(m, n)
        matrices = operands.a, operands.b, operands.a_scale, operands.b_scale
        words: list[int] = []
        places: list[tuple] = []
        for one in (*map(_strided, matrices), Stored(out, m, n), _numbers_of(operands, tile)):
            append_words(one, words, places)
        Doing().loop(loop, words, places, tiles, out.size * k <= SMALL)
    return out


def _loop_of(unit: Unit, block: int | None) -> Callable[..., Any]:
    """The compiled loop of a unit, for scales of so many products; ValueError where none has the bits."""
    exactly = unit.added_exactly
    shared, most_bits = (unit.products, MOST_BITS) if exactly == 1 else (exactly, MOST_BITS_OF_SUMS)
    if unit.products > DEPTH or unit.fraction_bits > most_bits or exactly > CHUNK:
        raise ValueError(
            f"unit must add at most {DEPTH} products at once, at most {CHUNK} exactly, and keep at most {most_bits} "
            f"fraction bits; got {unit}"
        )
    if unit.scale_format is not None and block is not None and block % shared:
        raise ValueError(f"unit must align products under one scale, of blocks of {block}; got {unit}")
    if exactly > 1:
        return exact(exactly)
    return aligned(math.gcd(unit.products, CHUNK, 1 << (MOST_BITS - unit.fraction_bits)))


def _tiles_of(m: int, n: int) -> tuple[tuple[int, int], int]:
    """Return (squares down, squares across) of a tile of (m, n) results, and how many tiles there are."""
    for down, across in TILES:
        tiles = ceil_div(m, down * LANES) * ceil_div(n, across * LANES)
        if tiles >= RANGES * get_num_threads():
            break
    return (down, across), tiles


def _strided(matrix: Array | None) -> Strided:
    """Return a float32 matrix as a `Strided`; None, or one without elements, has no memory."""
    if matrix is None or not matrix.size:
        return Strided(None, 0, 0, 0, 0, 0)
    if not matrix.flags.aligned:
        matrix = matrix.copy()
    memory, start = arrays.memory_of(matrix)
    width = matrix.itemsize
    return Strided(memory.view(F), start // width, *(stride // width for stride in matrix.strides), *matrix.shape)


def _numbers_of(operands: Operands, tile: tuple[int, int]) -> UnitNumbers:
    """Return the `UnitNumbers` of checked operands and of a tile."""
    unit, accumulator = operands.unit, operands.unit.accumulator
    return UnitNumbers(
        group=unit.products,
        fraction_bits=unit.fraction_bits,
        zero_exponent=unit.zero_exponent,
        kept_bits=accumulator.fraction_bits,
        smallest_exponent=accumulator.smallest_exponent,
        nearest=accumulator.rounding == "nearest_even",
        infinity=INFINITY[accumulator.dtype],
        a_smallest=smallest_exponent(operands.a_format),
        b_smallest=smallest_exponent(operands.b_format),
        scale_smallest=0 if unit.scale_format is None else smallest_exponent(unit.scale_format),
        block=0 if unit.scale_format is None else operands.block,
        promotion=operands.promotion or 0,
        down=tile[0],
        across=tile[1],
    )
