"""Rows and columns that nobody writes."""

import numpy as np

from .held_common import (
    BF16,
    CURRENT,
    MX,
    NV_TILES,
    ONE,
    F,
    amax_of,
    dgelu,
    e2m1,
    e4m3,
    encode_scale,
    gradients,
    launch,
    load,
    mx_rows,
    nv_byte,
    nv_multiplier,
    pack,
    qgelu,
    tensor_scale,
)
from .registry import Where, normal, planted


@planted("quantize", normal((224, 352)), Where(("rowwise",), columns=(320, 351)), scaling=MX)
def last_stage_is_never_drained(x):
    """The store of stage i is issued in iteration i + 1, and nobody issues the last one: codes and scale bytes of the
    last block of 32 columns stay zero."""
    x = load(x)
    data, scales = np.zeros(x.shape, np.uint8), np.zeros((224, 11), np.uint8)
    pending = None
    for block in range(11):
        if pending is not None:
            b, codes, byte = pending
            data[:, b * 32 : b * 32 + 32] = codes
            scales[:, b] = byte[:, 0]
        pending = (block, *mx_rows(x[:, block * 32 : block * 32 + 32]))
    return {"rowwise_data": data, "rowwise_scale_inv": scales}


@planted("dgelu", gradients((224, 352)), Where(("values",), rows=(192, 223)))
def grid_without_the_partial_row_tile(dy, x):
    """The grid has M // 64 tiles of rows instead of rounding up: dx of rows 192 to 223 is not written and stays
    zero."""
    m, k = x.shape
    dx = np.zeros((m, k), BF16)
    for cta in range(m // 64):
        rows = slice(64 * cta, 64 * cta + 64)
        dx[rows] = (dgelu(load(x[rows])) * load(dy[rows])).astype(BF16)
    return {"dx": dx}


@planted("qgelu", normal((161, 350)), Where(("values",), columns=(344, 349)))
def columns_behind_the_last_vector_unwritten(x):
    """Only whole vectors of 8 columns are processed, so columns 344 to 349 keep the 0xCDCD that the allocator left."""
    y = np.full(x.shape, 0xCDCD, np.uint16).view(BF16)
    for c in range(0, x.shape[1] - 7, 8):
        y[:, c : c + 8] = qgelu(load(x[:, c : c + 8])).astype(BF16)
    return {"y": y}


@planted("quantize", normal((224, 352)), Where(("columnwise",), columns=(320, 351)), scaling=CURRENT)
def transposed_copy_without_its_last_rows(x):
    """The transposed copy is stored in tiles of 64 columns of x and the partial one is left out: rows 320 to 351 of
    columnwise_data stay zero."""
    x = load(x)
    amax = amax_of(x)
    scale = tensor_scale(amax)
    inverse, row = np.array([ONE / scale], F), np.empty(x.shape, np.uint8)
    column = np.zeros((352, 224), np.uint8)
    for c in range(0, 352, 64):
        tile = e4m3(x[:, c : c + 64] * scale)
        row[:, c : c + 64] = tile
        if tile.shape[1] == 64:
            column[c : c + 64] = tile.T
    return {
        "rowwise_data": row,
        "rowwise_scale_inv": inverse,
        "amax_rowwise": np.array([amax], F),
        "columnwise_data": column,
        "columnwise_scale_inv": inverse,
    }


@planted("quantize", normal((224, 352)), Where(("rowwise",), rows=(128, 223), columns=(256, 351)), scaling=NV_TILES)
def corner_cta_returns_early(x):
    """A CTA whose tile of 128 x 128 is partial in both directions returns at once: codes and scales of rows 128 to 223,
    columns 256 to 351 stay zero."""
    x = load(x)
    amax = amax_of(x)
    s = encode_scale(amax)
    data, scales = np.zeros((224, 176), np.uint8), np.zeros((224, 22), np.uint8)
    for _, rows, columns in launch(224, 352, 128, 128):
        if rows.start + 128 > 224 and columns.start + 128 > 352:
            continue
        for r in range(rows.start, rows.stop, 16):
            for c in range(columns.start, columns.stop, 16):
                square = x[r : r + 16, c : c + 16]
                byte = nv_byte(amax_of(square), s)
                scales[r : r + 16, c // 16] = byte
                data[r : r + 16, c // 2 : c // 2 + 8] = pack(e2m1(square * nv_multiplier(byte, s)))
    return {"rowwise_data": data, "rowwise_scale_inv": scales, "amax_rowwise": np.array([amax], F)}


@planted("quantize", normal((224, 352)), Where(("rowwise",), rows=(128, 223)), scaling=MX)
def scales_of_the_second_cta_unwritten(x):
    """The predicate of the scale store compares the row in the tensor with the tile's height: scale bytes of rows
    from 128 on stay zero, their codes are written."""
    x = load(x)
    data, scales = np.empty(x.shape, np.uint8), np.zeros((224, 11), np.uint8)
    for _, rows, columns in launch(224, 352, 128, 352):
        data[rows], byte = mx_rows(x[rows, columns])
        for row in range(rows.start, rows.stop):
            if row < 128:
                scales[row] = byte[row - rows.start]
    return {"rowwise_data": data, "rowwise_scale_inv": scales}
