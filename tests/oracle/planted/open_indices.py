"""Wrong indices: rows, columns, blocks, tiles, buffers and slots of scales: shifted, swapped, stale, unwritten."""

import numpy as np

import refops
from planted import open_common as c
from planted.open_common import BF16, SHAPE, F
from planted.registry import Where, normal, planted

MX = refops.MXFP8Scaling(refops.E4M3)
NV = refops.NVFP4Scaling()
ROW, COLUMN = ("rowwise",), ("columnwise",)
VALUES = ("values",)
X = normal(SHAPE)


@planted("quantize", X, Where(ROW), MX)
def byte_in_slot_of_next_block(x):
    """The scale byte of block j is written to the slot of block j + 1 of its row (the last one's to slot 0): an index
    that was incremented before the store. Data are right."""
    data, scale = c.mx_buffers(x.shape)
    count = scale.shape[1]
    for j, b in c.blocks(x.shape[1], 32):
        data[:, b], byte = c.mx_block(c.f32(x[:, b]))
        slot = j + 1
        scale[:, slot % count] = byte
    return c.rowwise(data, scale)


@planted("quantize", normal((256, 512)), Where(ROW), MX)
def neighbouring_lanes_exchange_bytes(x):
    """After the shuffle reduction lane pairs store each other's byte: scales of blocks j and j ^ 1 are exchanged. Data
    are right."""
    data, scale = c.mx_buffers(x.shape)
    for r, t in c.tiles(x.shape, 64, 512):
        for j, b in c.blocks(512, 32):
            data[r, b], byte = c.mx_block(c.f32(x[r, t][:, b]))
            scale[r, j ^ 1] = byte
    return c.rowwise(data, scale)


@planted("quantize", X, Where(ROW), MX)
def byte_in_slot_of_next_row(x):
    """Inside a tile of 32 rows the byte of row i is stored for row i + 1 (modulo 32); data are right."""
    data, scale = c.mx_buffers(x.shape)
    for r, b in c.tiles(x.shape, 32, 32):
        codes, byte = c.mx_block(c.f32(x[r, b]))
        data[r, b] = codes
        for thread in range(32):
            scale[r.start + (thread + 1) % 32, b.start // 32] = byte[thread]
    return c.rowwise(data, scale)


@planted("quantize", X, Where(ROW, rows=(128, 223)), MX)
def persistent_loop_keeps_amax_of_tile_before(x):
    """A persistent CTA handles tiles n and n + 4 of 32 rows; the registers with the block amax are not cleared in
    between, so from row 128 on a block's amax is the larger one of its own and that of the block 128 rows above."""
    data, scale = c.mx_buffers(x.shape)
    count = x.shape[0] // 32
    for cta in range(4):
        amax = np.zeros((32, x.shape[1] // 32), F)
        for tile in range(cta, count, 4):
            r = slice(32 * tile, 32 * tile + 32)
            for j, b in c.blocks(x.shape[1], 32):
                block = c.f32(x[r, b])
                amax[:, j] = np.maximum(amax[:, j], c.amax_of(block))
                scale[r, j] = c.byte_up(amax[:, j])
                data[r, b] = c.e4m3(block * c.inverse(scale[r, j])[:, None])
    return c.rowwise(data, scale)


@planted("quantize", X, Where(ROW), NV)
def pipeline_read_one_stage_early(x):
    """Tiles of 32 columns come through a buffer of two stages; the kernel waits for the wrong barrier and reads each
    stage before its load has arrived: what it quantizes as tile t is tile t - 2 (zeros in the first two)."""
    v = c.f32(x)
    amax = np.abs(v).max()
    s = c.s_enc(amax)
    stages = np.zeros((2, len(v), 32), F)
    codes, scale = c.nv_buffers(v.shape)
    for tile in range(v.shape[1] // 32):
        seen = stages[tile % 2].copy()
        stages[tile % 2] = v[:, 32 * tile : 32 * tile + 32]
        for half, b in c.blocks(32, 16):
            out = slice(32 * tile + b.start, 32 * tile + b.stop)
            codes[:, out], scale[:, 2 * tile + half] = c.nv_block(seen[:, b], s)
    return c.rowwise(c.pack(codes), scale, amax_rowwise=c.one(amax))


@planted("quantize", normal((256, 512)), Where(ROW), MX)
def bytes_in_gemm_order_unasked(x):
    """Scale bytes are written in the swizzled order of GEMMs (tiles of 128x4 as 32x4x4), where the plain row-major
    order was asked for. Data are right."""
    data, scale = c.mx_buffers(x.shape)
    flat = scale.reshape(-1)
    for j, b in c.blocks(x.shape[1], 32):
        data[:, b], byte = c.mx_block(c.f32(x[:, b]))
        i = np.arange(len(x))
        tile = i // 128 * (scale.shape[1] // 4) + j // 4
        flat[tile * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4] = byte
    return c.rowwise(data, scale)


@planted("quantize", normal((256, 512)), Where(ROW, every=("row", 128, tuple(range(32, 96)))), MX)
def groups_of_32_rows_of_scales_exchanged(x):
    """Of each 128 rows the second and the third 32 have their scale bytes exchanged (the 2-bit group index is stored
    with its bits reversed); data are right."""
    data, scale = c.mx_buffers(x.shape)
    for r, b in c.tiles(x.shape, 32, 32):
        data[r, b], byte = c.mx_block(c.f32(x[r, b]))
        group = r.start // 32 % 4
        turned = (group & 1) << 1 | group >> 1
        first = r.start // 128 * 128 + 32 * turned
        scale[first : first + 32, b.start // 32] = byte
    return c.rowwise(data, scale)


@planted("quantize", normal((256, 512)), Where(ROW), NV)
def scales_of_four_by_four_transposed(x):
    """A thread stores the scales of 4 rows and 4 blocks from registers with row and block exchanged: each 4x4 group of
    scale bytes is transposed. Data are right."""
    v = c.f32(x)
    amax = np.abs(v).max()
    data, scale = c.nv_lines(v, c.s_enc(amax))
    stored = np.zeros_like(scale)
    for r, j in c.tiles(scale.shape, 4, 4):
        registers = scale[r, j]
        for lane in range(4):
            stored[r.start + lane, j] = registers[:, lane]
    return c.rowwise(data, stored, amax_rowwise=c.one(amax))


@planted("quantize", X, Where(ROW, every=("row", 32, (28, 29, 30, 31))), MX)
def last_rows_of_warp_tile_not_written(x):
    """The loop over the 32 rows of a tile has steps of 8 but stops at row 28: rows 28 to 31 of each 32 keep the zeros
    of the allocation, data and scales."""
    data, scale = c.mx_buffers(x.shape)
    for r, b in c.tiles(x.shape, 32, 32):
        for first in range(0, 28, 4):
            rows = slice(r.start + first, r.start + first + 4)
            data[rows, b], scale[rows, b.start // 32] = c.mx_block(c.f32(x[rows, b]))
    return c.rowwise(data, scale)


@planted("quantize", normal((224, 344)), Where(ROW, columns=(336, 343)), MX)
def last_half_vector_not_stored(x):
    """Codes are stored in vectors of 16 bytes and only whole vectors are: the last 8 columns of 344 are never written
    and stay zero."""
    data, scale = c.mx_buffers(x.shape)
    for j, b in c.blocks(x.shape[1], 32):
        codes, scale[:, j] = c.mx_block(c.f32(x[:, b]))
        for vector in range(codes.shape[1] // 16):
            data[:, b.start + 16 * vector : b.start + 16 * vector + 16] = codes[:, 16 * vector : 16 * vector + 16]
    return c.rowwise(data, scale)


@planted("quantize", normal((256, 256)), Where(COLUMN), MX)
def columnwise_data_transposed(x):
    """The columnwise data are stored transposed, [column, row]; MXFP8 stores them as the tensor lies, [row, column].
    Scales are right."""
    v = c.f32(x)
    data, scale = c.mx_buffers(v.shape, True)
    for r, t in c.tiles(v.shape, 32, 32):
        codes, scale[r.start // 32, t] = c.mx_block(v[r, t].T)
        data[t, r] = codes
    return {**c.mx_rowwise(v), **c.columnwise(data, scale)}


@planted("quantize", normal((256, 256)), Where(COLUMN), refops.CurrentScaling(refops.E4M3))
def transpose_in_tiles_only(x):
    """Each 32x32 tile is transposed in shared memory but written back to its own place: the columnwise data are
    transposed inside tiles and the tiles are not, tile (i, j) should go to (j, i)."""
    v = c.f32(x)
    amax = np.abs(v).max()
    scale = c.tensor_scale(amax)
    out = np.zeros(v.shape[::-1], np.uint8)
    for r, t in c.tiles(v.shape, 32, 32):
        out[r, t] = c.e4m3(v[r, t] * scale).T
    right = c.fp8_rowwise(v, scale, amax)
    return {**right, **c.columnwise(out, c.one(F(1) / scale), amax_columnwise=c.one(amax))}


@planted("quantize", normal((256, 512)), Where(ROW), refops.BlockScaling(refops.E4M3, 1))
def vector_scales_row_major(x):
    """Scales of 1x128 blocks are stored at row * blocks + block; they should be at block * rows + row, [block, row].
    Data are right."""
    v = c.f32(x)
    m, count = len(v), v.shape[1] // 128
    data, flat = np.zeros(v.shape, np.uint8), np.zeros(m * count, F)
    for j, b in c.blocks(v.shape[1], 128):
        scale = c.power_2_scale(c.amax_of(v[:, b]))
        data[:, b] = c.e4m3(v[:, b] * scale[:, None])
        flat[np.arange(m) * count + j] = F(1) / scale
    return c.rowwise(data, flat.reshape(count, m))


@planted("quantize", X, Where(ROW), NV)
def even_element_in_high_nibble(x):
    """The even element of a pair goes to the high nibble and the odd one to the low nibble; it should be the other way
    round."""
    v = c.f32(x)
    amax = np.abs(v).max()
    data, scale = np.zeros((len(v), v.shape[1] // 2), np.uint8), np.zeros((len(v), v.shape[1] // 16), np.uint8)
    for j, b in c.blocks(v.shape[1], 16):
        codes, scale[:, j] = c.nv_block(v[:, b], c.s_enc(amax))
        for pair in range(8):
            data[:, 8 * j + pair] = codes[:, 2 * pair] << np.uint8(4) | codes[:, 2 * pair + 1]
    return c.rowwise(data, scale, amax_rowwise=c.one(amax))


@planted("swiglu", normal((224, 704)), Where(VALUES))
def gate_one_column_early(x):
    """The gate of output column j is read at H + j - 1, one column too early (column 0 reads the last activated value);
    it should be H + j."""
    h = x.shape[1] // 2
    y = np.zeros((len(x), h), BF16)
    for r, t in c.tiles(y.shape, 16, 32):
        act = c.f32(x[r, t])
        gate = c.f32(x[r, h + t.start - 1 : h + t.stop - 1])
        y[r, t] = (c.silu(act) * gate).astype(BF16)
    return {"y": y}


@planted("geglu", normal((224, 704)), Where(VALUES))
def act_and_gate_read_as_pairs(x):
    """A thread reads act and gate as neighbours, columns 2 j and 2 j + 1, as if rows were interleaved; they are
    [act | gate], columns j and H + j."""
    h = x.shape[1] // 2
    y = np.zeros((len(x), h), BF16)
    for r, t in c.tiles(y.shape, 32, 32):
        pairs = c.f32(x[r, 2 * t.start : 2 * t.stop]).reshape(len(x[r]), -1, 2)
        y[r, t] = (c.gelu(pairs[:, :, 0]) * pairs[:, :, 1]).astype(BF16)
    return {"y": y}


@planted("silu", normal((256, 512)), Where(VALUES))
def tiles_of_columns_exchanged_in_pairs(x):
    """Output tiles of 64 columns are written at tile index t ^ 1 (a swizzle of the grid that is undone for the load and
    not for the store): neighbouring tiles are exchanged."""
    y = np.zeros(x.shape, BF16)
    for r in range(0, 256, 64):
        for block in range(8):
            tile = block ^ 1
            v = c.f32(x[r : r + 64, 64 * tile : 64 * tile + 64])
            y[r : r + 64, 64 * block : 64 * block + 64] = c.silu(v).astype(BF16)
    return {"y": y}


@planted("dgelu", c.with_dy(SHAPE), Where(VALUES))
def gradient_of_row_before(dy, x):
    """dy is prefetched one row ahead into a register that is used after it was meant to be replaced: row i multiplies
    with dy of row i - 1 (row 0 with its own)."""
    dx = np.zeros(x.shape, BF16)
    prefetched = c.f32(dy[0])
    for row in range(len(x)):
        current, prefetched = prefetched, c.f32(dy[row])
        dx[row] = (c.dgelu(c.f32(x[row])) * current).astype(BF16)
    return {"dx": dx}


@planted("dswiglu", c.with_dy(SHAPE, gated=True), Where(VALUES))
def gradients_of_act_and_gate_exchanged(dy, x):
    """The gradient of gate is stored in the first half of dx and that of act in the second; rows should be
    [d_act | d_gate]."""
    h = dy.shape[1]
    dx = np.zeros(x.shape, BF16)
    for r, t in c.tiles(dy.shape, 32, 32):
        g, act, gate = c.f32(dy[r, t]), c.f32(x[r, t]), c.f32(x[r, h + t.start : h + t.stop])
        dx[r, h + t.start : h + t.stop] = (c.dsilu(act) * g * gate).astype(BF16)
        dx[r, t] = (g * c.silu(act)).astype(BF16)
    return {"dx": dx}


@planted("dgeglu", c.with_dy(SHAPE, gated=True), Where(VALUES, columns=(672, 703)))
def gate_gradient_of_last_tile_not_written(dy, x):
    """The store of d_gate is guarded by column + 32 < H instead of <=: the last 32 columns of d_gate, 672 to 703 of dx,
    are never written and stay zero."""
    h = dy.shape[1]
    dx = np.zeros(x.shape, BF16)
    for r, t in c.tiles(dy.shape, 56, 32):
        g, act, gate = c.f32(dy[r, t]), c.f32(x[r, t]), c.f32(x[r, h + t.start : h + t.stop])
        dx[r, t] = (c.dgelu(act) * g * gate).astype(BF16)
        if t.start + 32 < h:
            dx[r, h + t.start : h + t.stop] = (g * c.gelu(act)).astype(BF16)
    return {"dx": dx}


@planted("quantize", X, Where(COLUMN), MX)
def both_blocks_of_cta_store_to_one_slot(x):
    """A CTA has 64 rows, two blocks of a column; both store their byte in the slot of the first one (the stage is not
    in the index), so the second one's byte stands in the first slot and the second slot stays zero."""
    v = c.f32(x)
    data, scale = c.mx_buffers(v.shape, True)
    for cta, r in c.blocks(len(v), 64):
        for stage in range((r.stop - r.start) // 32):
            rows = slice(r.start + 32 * stage, r.start + 32 * stage + 32)
            codes, byte = c.mx_block(v[rows].T)
            data[rows] = codes.T
            scale[2 * cta] = byte
    return c.columnwise(data, scale)


def blocks_that_differ(shape, size):
    """Normal numbers, each square tile with a magnitude of its own."""

    def make(rng):
        grid = 2.0 ** rng.integers(-6, 7, (-(-shape[0] // size), -(-shape[1] // size)))
        factors = np.kron(grid, np.ones((size, size)))[: shape[0], : shape[1]]
        return {"x": (factors * rng.standard_normal(shape)).astype(BF16)}

    return make


@planted("quantize", blocks_that_differ((512, 512), 128), Where(ROW), refops.BlockScaling(refops.E4M3, 2))
def scale_of_transposed_tile(x):
    """The scale of tile (i, j) of 128x128 is stored at [j, i]; it should be at [i, j]. Data are right."""
    v = c.f32(x)
    data, scale_inv = np.zeros(v.shape, np.uint8), np.zeros((4, 4), F)
    for block in range(16):
        i, j = block // 4, block % 4
        r, t = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
        scale = c.power_2_scale(np.abs(v[r, t]).max())
        data[r, t], scale_inv[j, i] = c.e4m3(v[r, t] * scale), F(1) / scale
    return c.rowwise(data, scale_inv)


@planted("quantize", X, Where(COLUMN), NV)
def byte_of_column_to_the_left(x):
    """Lane i of 16 stores the byte that it received by shuffle from lane i - 1: column n gets the scale byte of column
    n - 1 (modulo 16). Columnwise data are right."""
    v = c.f32(x)
    amax = np.abs(v).max()
    s = c.s_enc(amax)
    codes, scale = c.nv_buffers(v.T.shape)
    for r, t in c.tiles(v.shape, 16, 16):
        codes[t, r], byte = c.nv_block(v[r, t].T, s)
        lane = np.arange(16)
        scale[t, r.start // 16] = byte[(lane - 1) % 16]
    return {**c.nv_rowwise(v, amax), **c.columnwise(c.pack(codes), scale, amax_columnwise=c.one(amax))}


@planted("quantize", normal((512, 512)), Where(ROW), MX)
def tile_number_in_eight_bits(x):
    """The number of a 16x32 tile is kept in eight bits: of 512 tiles numbers from 256 on wrap around and overwrite the
    first 256; rows 256 to 511 are never written."""
    data, scale = c.mx_buffers(x.shape)
    for number in range(512):
        tile = int(np.array(number).astype(np.uint8))
        source = slice(16 * (number // 16), 16 * (number // 16) + 16)
        r, t = slice(16 * (tile // 16), 16 * (tile // 16) + 16), slice(32 * (tile % 16), 32 * (tile % 16) + 32)
        data[r, t], scale[r, tile % 16] = c.mx_block(c.f32(x[source, t]))
    return c.rowwise(data, scale)


@planted("scaled_swiglu", c.with_row_scales(SHAPE), Where(VALUES))
def row_scale_of_next_row(x, row_scales):
    """Row i is multiplied by row_scales[i + 1] (the last row by its own); the pointer was advanced before the load."""
    y = np.zeros((len(x), x.shape[1] // 2), BF16)
    pointer = 0
    for row in range(len(x)):
        act, gate = c.halves(x[row : row + 1])
        pointer = min(pointer + 1, len(x) - 1)
        y[row] = (c.silu(act) * gate * row_scales[pointer])[0].astype(BF16)
    return {"y": y}


@planted("quantize", X, Where(COLUMN), refops.NVFP4Scaling(rht=True))
def hadamard_groups_start_one_row_late(x):
    """The 16 rows that the Hadamard transform takes start at row 16 g + 1 (the last group repeats row M - 1); they
    should start at 16 g."""
    v = c.f32(x)
    y = np.zeros(v.shape, F)
    for _, r in c.blocks(len(v), 16):
        rows = np.minimum(np.arange(r.start + 1, r.stop + 1), len(v) - 1)
        y[r] = c.transform(v[rows])
    return {**c.nv_rowwise(v, np.abs(v).max()), **c.nv_columnwise(y, np.abs(y).max())}


def stored_mx(rng):
    """A right MXFP8 tensor whose blocks differ."""
    return c.mx_rowwise(c.f32(blocks_that_differ(SHAPE, 32)(rng)["x"]))


@planted("dequantize", stored_mx, Where(VALUES), MX)
def decodes_with_byte_of_block_before(rowwise_data, rowwise_scale_inv):
    """The scale byte is prefetched and used one iteration late: block j of a row is decoded with the byte of block
    j - 1, block 0 with its own."""
    y = np.zeros(rowwise_data.shape, BF16)
    register = rowwise_scale_inv[:, 0]
    for j, b in c.blocks(rowwise_data.shape[1], 32):
        factor, register = F(1) / c.inverse(register), rowwise_scale_inv[:, j]
        y[:, b] = (c.e4m3_value(rowwise_data[:, b]) * factor[:, None]).astype(BF16)
    return {"y": y}


def stored_nv(rng):
    """A right NVFP4 tensor."""
    v = c.f32(c.draw(rng, SHAPE))
    return c.nv_rowwise(v, np.abs(v).max())


@planted("dequantize", stored_nv, Where(VALUES), NV)
def decodes_high_nibble_first(rowwise_data, rowwise_scale_inv, amax_rowwise):
    """The high nibble of a byte is decoded as the even element and the low one as the odd element; the even element is
    in the low nibble."""
    m, half = rowwise_data.shape
    y = np.zeros((m, 2 * half), BF16)
    for j in range(half // 8):
        factor = (c.e4m3_value(rowwise_scale_inv[:, j]) * amax_rowwise[0]) * (F(1) / F(2688))
        word = rowwise_data[:, 8 * j : 8 * j + 8]
        y[:, 16 * j : 16 * j + 16 : 2] = (c.e2m1_value(word >> np.uint8(4)) * factor[:, None]).astype(BF16)
        y[:, 16 * j + 1 : 16 * j + 16 : 2] = (c.e2m1_value(word & np.uint8(15)) * factor[:, None]).astype(BF16)
    return {"y": y}


@planted("update_delayed_scale", c.histories, Where(("history",)), params={"fmt": refops.E4M3})
def history_rolls_the_other_way(amax_history, scale):
    """The history is rolled toward higher rows (row i to row i + 1); it should roll toward lower ones, row i + 1 to row
    i, the newest to the end, row 0 cleared."""
    length, count = amax_history.shape
    history, new_scale = np.zeros_like(amax_history), np.zeros_like(scale)
    for tensor in range(count):
        column = amax_history[:, tensor]
        new_scale[tensor] = F(448) / column.max()
        for row in range(1, length):
            history[row, tensor] = column[row - 1]
    return {"amax_history": history, "scale": new_scale}


@planted("quantize", normal((128, 256)), Where(("amax",)), refops.NVFP4Scaling(row_scaled=True))
def amax_slots_of_row_pairs_exchanged(x):
    """Two rows share a warp and store each other's amax: slots of rows i and i ^ 1 are exchanged. Data and block scales
    come from the right amax."""
    v = c.f32(x)
    codes, scale = c.nv_buffers(v.shape)
    slots = np.zeros(len(v), F)
    for row in range(len(v)):
        amax = np.abs(v[row]).max()
        line = slice(row, row + 1)
        for j, b in c.blocks(v.shape[1], 16):
            codes[line, b], scale[line, j] = c.nv_block(v[line, b], c.s_enc(amax))
        slots[row ^ 1] = amax
    return c.rowwise(c.pack(codes), scale, amax_rowwise=slots)


@planted("qgelu", X, Where(VALUES, every=("column", 2, (1,))))
def second_of_a_pair_repeats_the_first(x):
    """Elements are loaded as bfloat16x2 and the odd element takes .x instead of .y: each odd column is the activation
    of the even column before it."""
    y = np.zeros(x.shape, BF16)
    for r, t in c.tiles(x.shape, 32, 64):
        pairs = c.f32(x[r, t]).reshape(r.stop - r.start, -1, 2)
        low = c.qgelu(pairs[:, :, 0])
        high = c.qgelu(pairs[:, :, 0])
        y[r, t] = np.stack([low, high], axis=2).reshape(r.stop - r.start, -1).astype(BF16)
    return {"y": y}


@planted("relu", normal((256, 512)), Where(VALUES, rows=(128, 255)))
def offset_in_sixteen_bits(x):
    """The element offset row * K + column is computed in 16 bits and wraps at 65536: from row 128 on the kernel reads
    the input of the row 128 above."""
    y = np.zeros(x.shape, BF16)
    flat = x.reshape(-1)
    for row in range(len(x)):
        offset = (np.uint32(row * x.shape[1]) + np.arange(x.shape[1], dtype=np.uint32)).astype(np.uint16)
        y[row] = np.maximum(c.f32(flat[offset]), F(0)).astype(BF16)
    return {"y": y}


@planted("scaled_swiglu", c.with_row_scales(SHAPE), Where(VALUES), params={"glu_interleave_size": 32})
def interleaved_rows_read_as_halves(x, row_scales):
    """x has runs of 32 columns, act and gate in turn; the kernel reads act from the first half of the row and gate from
    the second."""
    h = x.shape[1] // 2
    y = np.zeros((len(x), h), BF16)
    for r, t in c.tiles(y.shape, 32, 32):
        act, gate = c.f32(x[r, t]), c.f32(x[r, h + t.start : h + t.stop])
        y[r, t] = (c.silu(act) * gate * row_scales[r, None]).astype(BF16)
    return {"y": y}


@planted("scaled_dswiglu", c.with_row_scales(SHAPE, dy=True), Where(("drow_scales",)))
def last_rows_of_drow_scales_in_wrong_slots(dy, x, row_scales):
    """Each warp reduces 8 rows and stores the sum of row i in slot 7 - i of its 8: drow_scales are reversed in groups
    of 8. dx is right."""
    act, gate = c.halves(x)
    g, p = c.f32(dy), row_scales[:, None]
    s = c.sigmoid(act)
    d_act = (g * p) * ((s + (act * s) * (F(1) - s)) * gate)
    dx = np.concatenate([d_act, (g * p) * c.silu(act)], axis=1).astype(BF16)
    out = np.zeros(len(x), F)
    for warp in range(0, len(x), 8):
        for lane in range(8):
            row = warp + lane
            out[warp + 7 - lane] = (g[row] * (c.silu(act[row]) * gate[row])).sum(dtype=F)
    return {"dx": dx, "drow_scales": out}
