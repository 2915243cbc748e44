"""A wrong index: rows, columns, blocks or tiles that are shifted, swapped, repeated or read from another place."""

import numpy as np

from .held_common import (
    BF16,
    CURRENT,
    MX,
    NV,
    ONE,
    F,
    amax_of,
    e4m3,
    encode_scale,
    gelu,
    halves,
    launch,
    load,
    mx_columns,
    mx_rows,
    nv_rows,
    silu,
    tensor_scale,
)
from .registry import Where, normal, planted


@planted("quantize", normal((224, 352)), Where(("rowwise",)), scaling=MX)
def fragment_rows_stored_in_swapped_pairs(x):
    """Codes of rows r and r ^ 1 are exchanged by the fragment's store, while the scale bytes lie in their own rows."""
    x = load(x)
    data, scales = np.empty(x.shape, np.uint8), np.empty((224, 11), np.uint8)
    for _, rows, columns in launch(224, 352, 16, 32):
        fragment, byte = mx_rows(x[rows, columns])
        for lane_row in range(16):
            data[rows.start + (lane_row ^ 1), columns] = fragment[lane_row]
        scales[rows, columns.start // 32] = byte[:, 0]
    return {"rowwise_data": data, "rowwise_scale_inv": scales}


@planted("quantize", normal((256, 512)), Where(("rowwise",), columns=(128, 511)), scaling=MX)
def later_tiles_read_one_block_to_the_left(x):
    """Tiles of 128 columns after the first are loaded from 32 columns further left than where codes and scales are
    stored."""
    x = load(x)
    data, scales = np.empty(x.shape, np.uint8), np.empty((256, 16), np.uint8)
    for _, rows, columns in launch(256, 512, 64, 128):
        halo = 32 if columns.start > 0 else 0
        source = slice(columns.start - halo, columns.stop - halo)
        codes, byte = mx_rows(x[rows, source])
        data[rows, columns] = codes
        scales[rows, columns.start // 32 : columns.stop // 32] = byte
    return {"rowwise_data": data, "rowwise_scale_inv": scales}


@planted("gelu", normal((224, 352)), Where(("values",), columns=(256, 351)))
def last_tile_load_is_pulled_inside(x):
    """The last partial tile of 128 columns is loaded from K - 128 so as to stay inside, but stored at its own start
    without the same shift: its values are those of 32 columns to the left."""
    k = x.shape[1]
    y = np.empty_like(x)
    for _, rows, columns in launch(*x.shape, 32, 128):
        start = min(columns.start, k - 128)
        registers = gelu(load(x[rows, start : start + 128]))
        y[rows, columns] = registers[:, : columns.stop - columns.start].astype(BF16)
    return {"y": y}


@planted("quantize", normal((256, 256)), Where(("columnwise",)), scaling=CURRENT)
def transposed_tiles_keep_their_grid_place(x):
    """The columnwise copy transposes each 64x64 tile in shared memory but stores it at [row tile, column tile]
    instead of [column tile, row tile]."""
    x = load(x)
    amax = amax_of(x)
    scale = tensor_scale(amax)
    rowwise, columnwise = np.empty(x.shape, np.uint8), np.empty(x.shape[::-1], np.uint8)
    for _, rows, columns in launch(256, 256, 64, 64):
        shared = e4m3(x[rows, columns] * scale)
        rowwise[rows, columns] = shared
        columnwise[rows, columns] = shared.T
    inverse = np.array([ONE / scale], F)
    return {
        "rowwise_data": rowwise,
        "rowwise_scale_inv": inverse,
        "amax_rowwise": np.array([amax], F),
        "columnwise_data": columnwise,
        "columnwise_scale_inv": inverse,
    }


@planted("swiglu", normal((224, 704)), Where(("values",)))
def gate_pointer_one_row_ahead(x):
    """The gate of row r is read from row r + 1 (the last row from itself), because the gate's pointer starts at width
    + H instead of H."""
    m, width = x.shape
    h, memory = width // 2, np.concatenate([x.ravel(), x[-1]])
    y = np.empty((m, h), BF16)
    for row in range(m):
        act = load(memory[row * width : row * width + h])
        base = row * width + width + h
        gate = load(memory[base : base + h])
        y[row] = (silu(act) * gate).astype(BF16)
    return {"y": y}


@planted("quantize", normal((256, 512)), Where(("rowwise",)), scaling=NV)
def nibbles_reversed_in_each_word(x):
    """The eight 4-bit codes of each 32-bit word are packed from the highest nibble down, where element 0 belongs in the
    lowest; the scales are right."""
    x = load(x)
    amax = amax_of(x)
    codes, scales = nv_rows(x, encode_scale(amax))
    words = np.zeros((256, 64), np.uint32)
    for i in range(8):
        words |= codes[:, i::8].astype(np.uint32) << np.uint32(28 - 4 * i)
    return {"rowwise_data": words.view(np.uint8), "rowwise_scale_inv": scales, "amax_rowwise": np.array([amax], F)}


@planted("quantize", normal((224, 352)), Where(("columnwise",)), scaling=MX)
def columnwise_blocks_start_sixteen_rows_late(x):
    """Columnwise blocks begin 16 rows too late (rows 16 to 47, ..., the last one wraps to rows 0 to 15), since the
    warp's row offset is counted twice; codes of a row are cast under the block that holds it so."""
    x = load(x)
    moved = np.roll(x, -16, axis=0)
    codes, bytes_ = mx_columns(moved)
    data = np.empty(x.shape, np.uint8)
    for row in range(224):
        data[(row + 16) % 224] = codes[row]
    rows, scales = mx_rows(x)
    return {
        "rowwise_data": rows,
        "rowwise_scale_inv": scales,
        "columnwise_data": data,
        "columnwise_scale_inv": bytes_,
    }


@planted("geglu", normal((200, 512)), Where(("values",), columns=(128, 255)))
def second_gate_tile_repeats_the_first(x):
    """For output columns 128 to 255 the gate is that of columns 0 to 127: its tile index is not advanced in the second
    step of the loop, while act's is."""
    act, gate = halves(x)
    y = np.empty(act.shape, BF16)
    gate_tile = load(gate[:, :128])
    for c in range(0, 256, 128):
        value = gelu(load(act[:, c : c + 128]))
        y[:, c : c + 128] = (value * gate_tile).astype(BF16)
    return {"y": y}
