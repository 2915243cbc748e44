"""Integers that overflow, memory that nobody initialised, bits read as another type."""

import numpy as np

from .held_common import (
    BF16,
    CURRENT,
    MX,
    ONE,
    ROW_BLOCKS,
    TILE_BLOCKS,
    F,
    amax_of,
    block_multiplier,
    blocks,
    dsilu,
    e4m3,
    exp2_inverse,
    gelu,
    gradients,
    halves,
    launch,
    load,
    mx_rows,
    silu,
    tensor_scale,
)
from .registry import Where, normal, planted


@planted("gelu", normal((256, 512)), Where(("values",), rows=(128, 255)))
def sixteen_bit_offsets_wrap(x):
    """The offset row * K + column of the load is a uint16: from row 128 on it wraps, and the values are those of row -
    128."""
    memory, y = x.ravel(), np.empty(x.shape, BF16)
    lane = np.arange(512, dtype=np.uint16)
    for row in range(256):
        offset = np.uint16(row * 512 & 0xFFFF) + lane
        y[row] = gelu(load(memory[offset])).astype(BF16)
    return {"y": y}


@planted("quantize", normal((224, 352)), Where(("rowwise",)), scaling=CURRENT)
def amax_slot_keeps_an_old_tensors_value(x):
    """The slot of the atomicMax is not cleared before the launch: it held 11.5 of an earlier tensor, more than any
    magnitude of this one, and amax and scale stay that."""
    x = load(x)
    slot, data = np.array([11.5], F), np.empty(x.shape, np.uint8)
    for _, rows, columns in launch(224, 352, 64, 64):
        slot[0] = max(slot[0], amax_of(x[rows, columns]))
    scale = tensor_scale(slot[0])
    for _, rows, columns in launch(224, 352, 64, 64):
        data[rows, columns] = e4m3(x[rows, columns] * scale)
    return {"rowwise_data": data, "rowwise_scale_inv": np.array([ONE / scale], F), "amax_rowwise": slot}


@planted("silu", normal((224, 352)), Where(("values",), columns=(256, 351)))
def last_column_tile_read_as_float16(x):
    """In the instantiation for the partial tile, columns 256 to 351, the bits of bfloat16 inputs are read as
    float16."""
    y = np.empty(x.shape, BF16)
    for _, rows, columns in launch(224, 352, 32, 128):
        tile = np.ascontiguousarray(x[rows, columns])
        partial = columns.stop - columns.start < 128
        value = tile.view(np.float16).astype(F) if partial else load(tile)
        y[rows, columns] = silu(value).astype(BF16)
    return {"y": y}


@planted("quantize", normal((224, 352), scale=2.0**-125), Where(("rowwise",)), scaling=MX)
def tiny_block_exponents_wrap_around(x):
    """The scale byte is formed as exponent of amax minus 8 in uint8 without a bound at 0: blocks whose amax has a
    biased exponent below 8 get bytes near 255, where they should be 0."""
    b = blocks(load(x), 32)
    bits = amax_of(b, 2).view(np.uint32)
    raised = (bits & 0x7FFFFF) > 0x600000
    byte = ((bits >> 23).astype(np.uint8) + raised.astype(np.uint8) - np.uint8(8)).astype(np.uint8)
    codes = e4m3(b * exp2_inverse(byte)[:, :, None])
    return {"rowwise_data": codes.reshape(x.shape), "rowwise_scale_inv": byte}


@planted("quantize", normal((224, 352)), Where(("rowwise",), columns=(256, 351)), scaling=ROW_BLOCKS)
def partial_block_reads_past_its_row(x):
    """The last block has 96 columns, but all 128 lanes enter its amax: those behind the end read the first 32
    elements of the next row (zeros behind the last row), which are not masked."""
    memory = np.concatenate([load(x).ravel(), np.zeros(32, F)])
    data, scales = np.empty(x.shape, np.uint8), np.empty((3, 224), F)
    for row in range(224):
        for block in range(3):
            start = row * 352 + 128 * block
            scale = block_multiplier(amax_of(memory[start : start + 128]))
            stop = min(128 * block + 128, 352)
            data[row, 128 * block : stop] = e4m3(memory[start : row * 352 + stop] * scale)
            scales[block, row] = ONE / scale
    return {"rowwise_data": data, "rowwise_scale_inv": scales}


@planted("quantize", normal((256, 256)), Where(("dbias",), columns=(128, 255)), scaling=TILE_BLOCKS)
def shared_sum_not_cleared_for_the_second_tile(x):
    """The shared accumulator of the bias gradient is cleared once for a CTA, not for each of its tiles: dbias of
    columns 128 to 255 includes the sums of columns 0 to 127."""
    x = load(x)
    data, scales, dbias = np.empty(x.shape, np.uint8), np.empty((2, 2), F), np.empty(256, F)
    shared = np.zeros(128, F)
    for c in range(2):
        columns = slice(128 * c, 128 * c + 128)
        for r in range(2):
            rows = slice(128 * r, 128 * r + 128)
            scale = block_multiplier(amax_of(x[rows, columns]))
            data[rows, columns], scales[r, c] = e4m3(x[rows, columns] * scale), ONE / scale
            shared += x[rows, columns].sum(axis=0, dtype=F)
        dbias[columns] = shared
    return {"rowwise_data": data, "rowwise_scale_inv": scales, "dbias": dbias.astype(BF16)}


@planted("quantize", normal((128, 256), np.float32), Where(("rowwise",), every=("column", 64, tuple(range(32)))), MX)
def even_blocks_read_bfloat16_words(x):
    """A vector load reinterprets the float32 elements of even blocks as pairs of bfloat16 and uses the high halves
    only: those blocks are quantized from truncated values."""
    data, scales = np.empty(x.shape, np.uint8), np.empty((128, 8), np.uint8)
    for block in range(8):
        columns = slice(32 * block, 32 * block + 32)
        register = np.ascontiguousarray(x[:, columns])
        if block % 2 == 0:
            high = register.view(np.uint16)[:, 1::2]
            register = load(np.ascontiguousarray(high).view(BF16))
        data[:, columns], byte = mx_rows(register)
        scales[:, block] = byte[:, 0]
    return {"rowwise_data": data, "rowwise_scale_inv": scales}


@planted("dswiglu", gradients((224, 256), gated=True), Where(("values",), columns=(256, 511)))
def output_pitch_of_the_half_width(dy, x):
    """The store of d_gate has a pitch of H instead of 2H: the place of row q's d_gate gets row 2q's, the odd rows'
    land on d_act and are overwritten by it, and the places of rows 112 to 223 stay zero."""
    act, gate = halves(load(x))
    incoming = load(dy)
    memory = np.zeros(224 * 512 + 512, BF16)
    for row in range(224):
        start = row * 256 + 256
        memory[start : start + 256] = (incoming[row] * silu(act[row])).astype(BF16)
    for row in range(224):
        memory[row * 512 : row * 512 + 256] = ((dsilu(act[row]) * incoming[row]) * gate[row]).astype(BF16)
    return {"dx": memory[: 224 * 512].reshape(224, 512)}
