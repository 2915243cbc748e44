"""Stages that fill a tile from codes and scales: the front half of `dequantize`.

Their operand is an `operands.Coded`. What an element is multiplied by is, as in kernels, the rule `decode_factor` of
the stored scale and the amax.
"""

from functools import cache

import numpy as np

from cuda_kernels import casts
from cuda_kernels.directions import direction_of
from cuda_kernels.host.casting import code_columns, make_spread, name_of, turn_back
from cuda_kernels.host.compile import address_of, routine
from cuda_kernels.host.tiles import STAGE, reader
from cuda_kernels.operands import Coded
from cuda_kernels.simt import U32, U64, F

ZERO = F(0)


def source_of(q):
    """Return (stage, coded, mask) of a `refops.Quantized`: mask is the Hadamard transform's to undo, or None."""
    columnwise, scaling = q.rowwise_data is None, q.scaling
    prefix = "columnwise" if columnwise else "rowwise"
    direction, (m, k) = direction_of(scaling, columnwise), q.matrix_shape
    codes, scales = (np.ascontiguousarray(getattr(q, f"{prefix}_{name}")) for name in ("data", "scale_inv"))
    amax = np.ascontiguousarray(getattr(q, f"amax_{prefix}")) if scaling.layout.two_level else None
    outer, inner = (k, m) if direction.transposed else (m, k)
    coded = Coded(codes, scales, scales.shape[-1], amax, outer, inner)
    return decoding(direction), coded, scaling.hadamard if columnwise else None


# --- the steps of a tile ----------------------------------------------------------------------------


def _make_find_factors(direction):
    """Return `find(coded, outer, block, outers, blocks, found)`: what codes are multiplied by, found[outer, block].

    `outers` indices from `outer` on have a row each, of `blocks` factors from `block` on. It is `Direction.factor` in
    two steps: scales are copied before the rule sees them, for where they lie keeps a loop from being vectorised, the
    rule alone does not.
    """
    rule, widened, kind = direction.rules().decode_factor, direction.register_type, direction.scale_type
    layout, load_scale, amax_of, factor = direction.layout, direction.load_scale(), direction.amax(), direction.factor()
    two_level, run = layout.two_level, 1 if layout.block is None else layout.run[0]

    @routine
    def find(coded, outer, block, outers, blocks, found):
        stored = np.empty(blocks, kind)
        for i in range(outers):
            amax = amax_of(coded, outer + i) if two_level else ZERO
            for b in range(blocks):
                stored[b] = load_scale(coded, (outer + i) // run, block + b)
            for b in range(blocks):
                found[i, b] = rule(widened(stored[b]), amax)

    @routine
    def of_tensor(coded, outer, block, outers, blocks, found):
        found[:outers, :blocks] = factor(coded, outer, block)

    return of_tensor if layout.block is None else find


def _make_decode(fmt, packed):
    """Return `decode(codes, factors, line)`: values of codes that lie as the values do, one or two per byte, times
    factors."""
    value = casts.CPU_DECODERS[fmt]

    @routine
    def whole(codes, factors, line):
        for i in range(len(codes)):
            line[i] = value(np.uint32(codes[i])) * factors[i]

    @routine
    def halves(codes, factors, line):
        for i in range(len(codes)):
            pair, first = np.uint32(codes[i]), U64(2) * U64(i)
            line[first] = value(np.uint32(pair & U32(15))) * factors[first]
            line[first + U64(1)] = value(np.uint32(pair >> U32(4))) * factors[first + U64(1)]

    return halves if packed else whole


def _make_decode_rows(fmt, packed):
    """Return `decode(codes, factors, upper, lower)`: values of a row of codes, or of two rows whose codes share bytes
    and factors."""
    value = casts.CPU_DECODERS[fmt]

    @routine
    def whole(codes, factors, upper, lower):
        for c in range(len(upper)):
            upper[c] = value(np.uint32(codes[c])) * factors[c]

    @routine
    def halves(codes, factors, upper, lower):
        for c in range(len(upper)):
            pair = np.uint32(codes[c])
            upper[c] = value(np.uint32(pair & U32(15))) * factors[c]
            lower[c] = value(np.uint32(pair >> U32(4))) * factors[c]

    return halves if packed else whole


@cache
def decoding(direction):
    """Return the address of the stage that decodes one direction of a scaling."""
    read = reader(Coded, scales=direction.scale_type)
    block = 128 if direction.block is None else direction.block[1]
    per_byte = 2 if direction.packed else 1
    find_factors, spread = _make_find_factors(direction), make_spread(block)
    decode, decode_rows = (make(direction.fmt, direction.packed) for make in (_make_decode, _make_decode_rows))

    def along_rows(words, at, tile, rows, columns, row, column):
        coded = read(words, at)
        blocks = (columns + block - 1) // block
        factors, of_columns = np.empty((rows, blocks), np.float32), np.empty(columns, np.float32)
        find_factors(coded, row, column // block, rows, blocks, factors)
        for r in range(rows):
            start = ((row + r) * coded.inner + column) // per_byte
            spread(factors[r], columns, of_columns)
            decode(coded.codes[start : start + columns // per_byte], of_columns, tile[r])

    def along_columns(words, at, tile, rows, columns, row, column):
        coded = read(words, at)
        blocks = (row + rows - 1) // block - row // block + 1
        factors = np.empty((columns, blocks), np.float32)
        find_factors(coded, column, row // block, columns, blocks, factors)
        turned = factors.T.copy()
        for r in range(rows):
            start, of_row = ((row + r) * coded.inner + column) // per_byte, turned[(row + r) // block - row // block]
            decode(coded.codes[start : start + columns // per_byte], of_row, tile[r])

    def transposed(words, at, tile, rows, columns, row, column):
        coded = read(words, at)
        blocks = (rows + block - 1) // block
        factors = np.empty((columns, blocks), np.float32)
        find_factors(coded, column, row // block, columns, blocks, factors)
        turned = factors.T.copy()
        height = rows // per_byte
        codes = np.empty((height, code_columns(columns)), np.uint8)
        turn_back(coded.codes, height, columns, row // per_byte, column, coded.inner // per_byte, codes)
        for r in range(height):
            upper, lower = tile[per_byte * r, :columns], tile[per_byte * r + per_byte - 1, :columns]
            decode_rows(codes[r], turned[per_byte * r // block], upper, lower)

    function = transposed if direction.transposed else along_columns if direction.columnwise else along_rows
    return address_of(name_of("dequantize", direction), function, STAGE)
