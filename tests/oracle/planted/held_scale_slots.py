"""Scales in the wrong slot: the neighbour's, another pitch, another order inside the GEMM tile."""

import numpy as np

from .held_common import (
    BF16,
    MX,
    NV,
    ONE,
    ROW_BLOCKS,
    TILE_BLOCKS,
    F,
    amax_of,
    bf16,
    block_multiplier,
    blocks,
    e4m3,
    encode_scale,
    gelu,
    launch,
    load,
    mx_columns,
    mx_rows,
    nv_rows,
    pack,
    rows_of_many_sizes,
)
from .registry import Where, normal, planted


def _column_sizes(rng):
    """Columns that differ in magnitude."""
    return {"x": bf16(rng.standard_normal((224, 352)) * 2.0 ** rng.integers(-6, 7, 352)).astype(BF16)}


@planted("quantize", _column_sizes, Where(("rowwise",)), scaling=MX)
def scale_byte_in_the_next_slot(x):
    """The byte of block b is stored in slot b + 1 of its row, the last one in slot 0; the codes are cast with their own
    scale."""
    x = load(x)
    data, scales = np.empty(x.shape, np.uint8), np.empty((224, 11), np.uint8)
    for block in range(11):
        columns = slice(32 * block, 32 * block + 32)
        data[:, columns], byte = mx_rows(x[:, columns])
        scales[:, (block + 1) % 11] = byte[:, 0]
    return {"rowwise_data": data, "rowwise_scale_inv": scales}


@planted("quantize", rows_of_many_sizes((256, 512)), Where(("rowwise",)), scaling=MX)
def scales_left_in_gemm_order(x):
    """The scale bytes are stored in the swizzled order of a GEMM, tiles of 128 x 4, where rows of a plain matrix are
    asked for."""
    data, byte = mx_rows(load(x))
    flat = np.empty(256 * 16, np.uint8)
    for i in range(256):
        for j in range(16):
            flat[(i // 128 * 4 + j // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4] = byte[i, j]
    return {"rowwise_data": data, "rowwise_scale_inv": flat.reshape(256, 16)}


@planted("gelu", rows_of_many_sizes((256, 256)), Where(("rowwise",)), scaling=MX)
def thread_row_split_4x32_instead_of_32x4(x):
    """In each 128 rows the scale of row i is stored at row (i % 4) * 32 + i // 4: the thread number is taken apart as
    4 x 32 where the tile is 32 x 4."""
    y = bf16(gelu(load(x)))
    data, scales = np.empty(y.shape, np.uint8), np.empty((256, 8), np.uint8)
    for _, rows, columns in launch(256, 256, 128, 256):
        data[rows], byte = mx_rows(y[rows, columns])
        for thread in range(128):
            scales[rows.start + thread % 4 * 32 + thread // 4] = byte[thread]
    return {"rowwise_data": data, "rowwise_scale_inv": scales}


@planted("quantize", _column_sizes, Where(("columnwise",)), scaling=MX)
def columnwise_bytes_stored_column_first(x):
    """Columnwise scale bytes are stored [column, block] in the memory that is read as [block, column]."""
    x = load(x)
    rows, scales = mx_rows(x)
    columns, down = mx_columns(x)
    memory = np.empty(down.size, np.uint8)
    for column in range(x.shape[1]):
        memory[column * 7 : column * 7 + 7] = down[:, column]
    return {
        "rowwise_data": rows,
        "rowwise_scale_inv": scales,
        "columnwise_data": columns,
        "columnwise_scale_inv": memory.reshape(7, 352),
    }


@planted("quantize", rows_of_many_sizes((224, 352)), Where(("rowwise",), rows=(192, 223)), scaling=MX)
def last_warp_broadcasts_lane_zero(x):
    """In the last warp's rows, 192 to 223, every row gets the scale bytes of row 192, since the shuffle broadcasts
    lane 0; the codes are cast with their own."""
    data, byte = mx_rows(load(x))
    scales = np.empty((224, 11), np.uint8)
    for warp in range(7):
        for lane in range(32):
            source = 0 if warp == 6 else lane
            scales[warp * 32 + lane] = byte[warp * 32 + source]
    return {"rowwise_data": data, "rowwise_scale_inv": scales}


@planted("quantize", normal((256, 512)), Where(("rowwise",)), scaling=NV)
def scale_bytes_swapped_in_half_words(x):
    """Two E4M3 scale bytes are joined to a 16-bit store with the first in the high byte: scales of blocks b and b ^ 1
    are exchanged."""
    x = load(x)
    amax = amax_of(x)
    codes, byte = nv_rows(x, encode_scale(amax))
    word = byte[:, 0::2].astype(np.uint16) << 8 | byte[:, 1::2]
    return {
        "rowwise_data": pack(codes),
        "rowwise_scale_inv": word.view(np.uint8),
        "amax_rowwise": np.array([amax], F),
    }


@planted("quantize", rows_of_many_sizes((222, 384)), Where(("rowwise",)), scaling=ROW_BLOCKS)
def scale_pitch_without_padding(x):
    """The scales [block, row] are stored with a pitch of M = 222 where a line of the array has 224: each line begins
    two slots too early for each block before it."""
    x = load(x)
    b = blocks(x, 128)
    scale = block_multiplier(amax_of(b, 2))
    memory = np.zeros(3 * 224, F)
    for block in range(3):
        for row in range(222):
            memory[block * 222 + row] = ONE / scale[row, block]
    return {
        "rowwise_data": e4m3(b * scale[:, :, None]).reshape(222, 384),
        "rowwise_scale_inv": memory.reshape(3, 224),
    }


def _tile_sizes(rng):
    """Tiles of 128 x 128 that differ in magnitude."""
    size = 2.0 ** rng.permutation(8).reshape(2, 4).repeat(128, 0).repeat(128, 1)
    return {"x": (size * rng.standard_normal((256, 512))).astype(BF16)}


@planted("quantize", _tile_sizes, Where(("columnwise",)), scaling=TILE_BLOCKS)
def transposed_scales_numbered_as_the_rowwise_ones(x):
    """The columnwise copy's tile scales are stored in the order of the rowwise tiles (number = row tile * 4 + column
    tile) instead of in that of the transpose."""
    x = load(x)
    rows_, columns_ = np.empty((256, 512), np.uint8), np.empty((512, 256), np.uint8)
    scales, down = np.zeros((2, 4), F), np.zeros((4, 2), F)
    for tile, rows, columns in launch(256, 512, 128, 128):
        scale = block_multiplier(amax_of(x[rows, columns]))
        codes = e4m3(x[rows, columns] * scale)
        rows_[rows, columns], columns_[columns, rows] = codes, codes.T
        scales.ravel()[tile] = ONE / scale
        down.ravel()[tile] = ONE / scale
    return {
        "rowwise_data": rows_,
        "rowwise_scale_inv": scales,
        "columnwise_data": columns_,
        "columnwise_scale_inv": down,
    }
