"""Prologues that fill a tile from codes and scales: the front half of `dequantize`.

`operands.Inputs` of these: `x` the codes, `dy` the scales as stored (bytes), `row_scales` the float32 amax that
decoding needs, `rows` and `width` the matrix, `interleave` the stored scales in a row of `dy`.
"""

from functools import cache

import numpy as np

from cuda_kernels import casts
from cuda_kernels.directions import direction_of
from cuda_kernels.host.arrays import NO_BYTES, NO_FLOATS, as_bytes
from cuda_kernels.host.compile import address_of
from cuda_kernels.host.epilogues import name_of
from cuda_kernels.host.tiles import PROLOGUE
from cuda_kernels.operands import PARAMETERS, Inputs
from cuda_kernels.simt import U32, F, device

ZERO, ONE = F(0), F(1)


def source_of(q):
    """Return (prologue, inputs, mask) of a `refops.Quantized`: mask is the Hadamard transform's to undo, or None."""
    columnwise, scaling = q.rowwise_data is None, q.scaling
    prefix = "columnwise" if columnwise else "rowwise"
    data, scales = getattr(q, f"{prefix}_data"), getattr(q, f"{prefix}_scale_inv")
    amax, (m, k) = getattr(q, f"amax_{prefix}"), q.matrix_shape
    inputs = Inputs(
        x=_flat(data),
        dy=_flat(scales),
        row_scales=_flat(amax).view(np.float32) if scaling.layout.two_level else NO_FLOATS,
        rows=m,
        width=k,
        interleave=scales.shape[-1],
        **dict.fromkeys(PARAMETERS, ZERO),
    )
    return prologue(direction_of(scaling, columnwise)), inputs, scaling.hadamard if columnwise else None


def _flat(array):
    return NO_BYTES if array.size == 0 else as_bytes(np.ascontiguousarray(array))


def _make_factor(direction):
    """Return `factor(scales, inputs, outer, block)`: what the codes of a block are multiplied with."""
    rule, widened, index = direction.rules().decode_factor, direction.register_type, direction.scale_index
    layout, by_outer = direction.layout, direction.by_outer
    two_level, rows = layout.two_level, 1 if layout.block is None else layout.run[0]

    @device
    def factor(scales, inputs, outer, block):
        amax = inputs.row_scales[outer if by_outer else 0] if two_level else ZERO
        return rule(widened(scales[index(inputs.interleave, outer // rows, block)]), amax)

    @device
    def of_tensor(scales, inputs, outer, block):
        return rule(widened(scales[0]), ZERO)

    return of_tensor if layout.block is None else factor


def _make_run(fmt, packed):
    """Return `run(data, start, count, scale, out)`: elements `start` on of codes, times a scale, to out[:count]."""
    decode = casts.DECODERS[fmt]

    @device
    def whole(data, start, count, scale, out):
        codes = data[start : start + count]
        for i in range(count):
            out[i] = decode(np.uint32(codes[i])) * scale

    @device
    def halves(data, start, count, scale, out):
        pairs = data[start // 2 : (start + count) // 2]
        for i in range(count // 2):
            pair = np.uint32(pairs[i])
            out[2 * i] = decode(np.uint32(pair & U32(15))) * scale
            out[2 * i + 1] = decode(np.uint32(pair >> U32(4))) * scale

    return halves if packed else whole


@cache
def prologue(direction):
    """Return the address of the prologue that decodes one direction of a scaling."""
    run, factor, kind = _make_run(direction.fmt, direction.packed), _make_factor(direction), direction.scale_type
    block = 128 if direction.block is None else direction.block[1]

    def along_rows(inputs, tile, rows, columns, row, column):
        scales = inputs.dy.view(kind)
        for r in range(rows):
            start, line = (row + r) * inputs.width + column, tile[r]
            for first in range(0, columns, block):
                scale, count = factor(scales, inputs, row + r, (column + first) // block), min(block, columns - first)
                run(inputs.x, start + first, count, scale, line[first : first + count])

    def along_columns(inputs, tile, rows, columns, row, column):
        scales = inputs.dy.view(kind)
        for r in range(rows):
            line = tile[r]
            run(inputs.x, (row + r) * inputs.width + column, columns, ONE, line)
            for c in range(columns):
                line[c] *= factor(scales, inputs, column + c, (row + r) // block)

    def transposed(inputs, tile, rows, columns, row, column):
        scales, part = inputs.dy.view(kind), np.empty(block, np.float32)
        for c in range(columns):
            start = (column + c) * inputs.rows + row
            for first in range(0, rows, block):
                scale, count = factor(scales, inputs, column + c, (row + first) // block), min(block, rows - first)
                run(inputs.x, start + first, count, scale, part)
                for r in range(count):
                    tile[first + r, c] = part[r]

    function = transposed if direction.transposed else along_columns if direction.columnwise else along_rows
    return address_of(name_of("dequantize", direction), function, PROLOGUE)
