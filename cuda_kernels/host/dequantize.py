"""Prologues that fill a tile from codes and scales: the front half of `dequantize`.

`operands.Inputs` of these: `x` the codes, `dy` the scales as stored (bytes), `row_scales` the float32 amax of NVFP4,
`rows` and `width` the matrix, `interleave` the stored scales in a row of `dy`.
"""

from functools import cache

import numpy as np

from cuda_kernels import casts
from cuda_kernels.host.arrays import NO_BYTES, NO_FLOATS, as_bytes
from cuda_kernels.host.compile import address_of
from cuda_kernels.host.tiles import PROLOGUE
from cuda_kernels.operands import Inputs
from cuda_kernels.simt import U32, F, device
from refops.scaling import BlockScaling, MXFP8Scaling, NVFP4Scaling

ONE = F(1)


def source_of(q):
    """Return (prologue, inputs, mask) of a `refops.Quantized`: mask is the Hadamard transform's to undo, or None."""
    columnwise, scaling = q.rowwise_data is None, q.scaling
    prefix = "columnwise" if columnwise else "rowwise"
    data, scales = getattr(q, f"{prefix}_data"), getattr(q, f"{prefix}_scale_inv")
    amax, (m, k) = getattr(q, f"amax_{prefix}"), q.matrix_shape
    nvfp4 = isinstance(scaling, NVFP4Scaling)
    inputs = Inputs(
        x=_flat(data),
        dy=_flat(scales),
        row_scales=_flat(amax).view(np.float32) if nvfp4 else NO_FLOATS,
        limit=ONE / F(6 * scaling.e4m3_max) if nvfp4 else ONE,
        alpha=ONE,
        glu_linear_offset=ONE,
        beta1=ONE,
        beta2=ONE,
        rows=m,
        width=k,
        interleave=scales.shape[-1],
    )
    mask = scaling.sign_mask if columnwise and nvfp4 and scaling.rht else None
    return _prologue_of(scaling, columnwise), inputs, mask


def _flat(array):
    return NO_BYTES if array.size == 0 else as_bytes(np.ascontiguousarray(array))


def _prologue_of(scaling, columnwise):
    if isinstance(scaling, MXFP8Scaling):
        return prologue("mx", scaling.fmt.name, columnwise, False)
    if isinstance(scaling, BlockScaling):
        return prologue("square" if scaling.block_dim == 2 else "block", scaling.fmt.name, columnwise, False)
    if isinstance(scaling, NVFP4Scaling):
        return prologue("nvfp4", "e2m1", columnwise, scaling.row_scaled)
    return prologue("tensor", scaling.fmt.name, columnwise, False)


def _factor_of(kind, columnwise, row_scaled):
    """Return `factor(inputs, outer, block)`: what the codes of a block are multiplied with."""

    @device
    def tensor(inputs, outer, block):
        return inputs.dy.view(np.float32)[0]

    @device
    def square(inputs, outer, block):
        return inputs.dy.view(np.float32)[outer // 128 * inputs.interleave + block]

    @device
    def block_major(inputs, outer, block):
        return inputs.dy.view(np.float32)[block * inputs.interleave + outer]

    @device
    def mx(inputs, outer, block):
        i = block * inputs.interleave + outer if columnwise else outer * inputs.interleave + block
        return casts.e8m0_value(np.uint32(inputs.dy[i]))

    @device
    def nvfp4(inputs, outer, block):
        scale = casts.decode_e4m3(np.uint32(inputs.dy[outer * inputs.interleave + block]))
        return (scale * inputs.row_scales[outer if row_scaled else 0]) * inputs.limit

    return {"tensor": tensor, "square": square, "block": block_major, "mx": mx, "nvfp4": nvfp4}[kind]


def _run_of(fmt):
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

    return halves if fmt == "e2m1" else whole


@cache
def prologue(kind, fmt, columnwise, row_scaled):
    """Return the address of the prologue that decodes one direction of one scaling."""
    run, factor, decode = _run_of(fmt), _factor_of(kind, columnwise, row_scaled), casts.DECODERS[fmt]
    block = {"mx": 32, "nvfp4": 16}.get(kind, 128)

    def along_rows(inputs, tile, rows, columns, row, column):
        for r in range(rows):
            start, line = (row + r) * inputs.width + column, tile[r]
            for first in range(0, columns, block):
                scale, count = factor(inputs, row + r, (column + first) // block), min(block, columns - first)
                run(inputs.x, start + first, count, scale, line[first : first + count])

    def mx_columns(inputs, tile, rows, columns, row, column):
        for r in range(rows):
            start, line = (row + r) * inputs.width + column, tile[r]
            codes = inputs.x[start : start + columns]
            for c in range(columns):
                line[c] = decode(np.uint32(codes[c])) * factor(inputs, column + c, (row + r) // block)

    def transposed(inputs, tile, rows, columns, row, column):
        part = np.empty(block, np.float32)
        for c in range(columns):
            start = (column + c) * inputs.rows + row
            for first in range(0, rows, block):
                scale, count = factor(inputs, column + c, (row + first) // block), min(block, rows - first)
                run(inputs.x, start + first, count, scale, part)
                for r in range(count):
                    tile[first + r, c] = part[r]

    function = along_rows if not columnwise else mx_columns if kind == "mx" else transposed
    words = ["dequantize", kind, fmt, "columnwise" if columnwise else "rowwise", "row_scaled" * row_scaled]
    return address_of("-".join(filter(None, words)), function, PROLOGUE)
