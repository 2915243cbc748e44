"""An amax of a part, of another tensor, without abs, of another step or tile."""

import numpy as np

import refops
from planted import open_common as c
from planted.open_common import BF16, SHAPE, F
from planted.registry import Where, normal, planted

MX = refops.MXFP8Scaling(refops.E4M3)
NV = refops.NVFP4Scaling()
CURRENT = refops.CurrentScaling(refops.E4M3)
ROW, COLUMN = ("rowwise",), ("columnwise",)
X = normal(SHAPE)


def second_kernel(v, amax):
    """The kernel that casts with the amax that the first one found: right."""
    scale = c.tensor_scale(amax)
    data = np.zeros(v.shape, np.uint8)
    for r, t in c.tiles(v.shape, 32, 128):
        data[r, t] = c.e4m3(v[r, t] * scale)
    return c.rowwise(data, c.one(F(1) / scale), amax_rowwise=c.one(amax))


def peak_at(row, column, shape=SHAPE, value=9.0):
    """Normal numbers with the largest magnitude at one place."""

    def make(rng):
        x = np.clip(rng.standard_normal(shape), -3, 3)
        x[row, column] = value
        return {"x": x.astype(BF16)}

    return make


@planted("quantize", peak_at(45, 200), Where(ROW), CURRENT)
def amax_of_first_warps_rows(x):
    """A block of 128 rows has four warps of 32 and the result of warp 0 alone is passed on: the tensor's amax is
    that of rows whose number modulo 128 is below 32."""
    v = c.f32(x)
    amax = F(0)
    for block in range(0, len(v), 128):
        warps = [np.abs(v[block + 32 * w : block + 32 * w + 32]).max(initial=0) for w in range(4)]
        amax = max(amax, warps[0])
    return second_kernel(v, amax)


@planted("quantize", peak_at(100, 300), Where(ROW), CURRENT)
def amax_of_one_shard(x):
    """The tensor is sharded by columns over two ranks and the all-reduce of the amax is missing: the amax is that of
    columns 0 to 175."""
    v = c.f32(x)
    shards = [v[:, :176], v[:, 176:]]
    partial = [max(np.abs(shard[r]).max() for _, r in c.blocks(len(shard), 32)) for shard in shards]
    return second_kernel(v, partial[0])


@planted("quantize", peak_at(64, 33), Where(ROW), CURRENT)
def amax_of_even_elements(x):
    """bfloat16x2 vectors are reduced by their .x alone: the tensor's amax is that of even columns."""
    v = c.f32(x)
    amax = F(0)
    for r, t in c.tiles(v.shape, 32, 64):
        pairs = v[r, t].reshape(-1, 2)
        amax = max(amax, np.abs(pairs[:, 0]).max())
    return second_kernel(v, amax)


@planted("quantize", peak_at(17, 90, value=-9.0), Where(ROW), CURRENT)
def tensor_amax_without_abs(x):
    """The reduction is max(x) without the absolute value, so the most negative element does not count."""
    v = c.f32(x)
    amax = F(0)
    for r, t in c.tiles(v.shape, 32, 64):
        amax = max(amax, v[r, t].max())
    return second_kernel(v, amax)


@planted("gelu", X, Where(ROW), CURRENT)
def amax_of_input_of_gelu(x):
    """The first kernel reduces |x|, the activation's input; the amax should be that of gelu(x)."""
    y, amax = np.zeros(x.shape, F), F(0)
    for r, t in c.tiles(x.shape, 32, 64):
        v = c.f32(x[r, t])
        amax = max(amax, np.abs(v).max())
        y[r, t] = c.bf16(c.gelu(v))
    return second_kernel(y, amax)


@planted("quantize", X, Where(ROW), CURRENT)
def amax_not_cleared_since_step_before(x):
    """The amax in global memory is not cleared before the atomic maximum: 16, the amax of the step before, stays where
    this step's is smaller."""
    v = c.f32(x)
    workspace = F(16)
    for r, t in c.tiles(v.shape, 32, 64):
        workspace = max(workspace, np.abs(v[r, t]).max())
    return second_kernel(v, workspace)


@planted("quantize", X, Where(ROW), MX)
def block_amax_of_sixteen_lanes(x):
    """A block of 32 elements lies over 32 lanes; the butterfly reduction has no step of 16, so each half of a block has
    an amax of its own, and both use and store that of lanes 0 to 15."""
    data, scale = c.mx_buffers(x.shape)
    for r, b in c.tiles(x.shape, 32, 32):
        lanes = c.f32(x[r, b])
        magnitude = np.abs(lanes)
        for offset in (8, 4, 2, 1):
            magnitude = np.maximum(magnitude, magnitude[:, np.arange(32) ^ offset])
        scale[r, b.start // 32] = c.byte_up(magnitude[:, 0])
        data[r, b] = c.e4m3(lanes * c.inverse(scale[r, b.start // 32])[:, None])
    return c.rowwise(data, scale)


@planted("quantize", X, Where(ROW), MX)
def block_amax_of_even_elements(x):
    """The block amax is reduced over packed bfloat16 pairs but only the low halves are looked at: the amax of even
    columns of a block of 32."""
    data, scale = c.mx_buffers(x.shape)
    for j, b in c.blocks(x.shape[1], 32):
        word = np.ascontiguousarray(x[:, b]).view(np.uint32)
        low = ((word & np.uint32(0x7FFF)) << np.uint32(16)).view(F)
        scale[:, j] = c.byte_up(low.max(axis=1))
        data[:, b] = c.e4m3(c.f32(x[:, b]) * c.inverse(scale[:, j])[:, None])
    return c.rowwise(data, scale)


@planted("quantize", X, Where(COLUMN), MX)
def columnwise_amax_without_abs(x):
    """The columnwise copy's block amax is max(x) from 0 without the absolute value; rowwise is right."""
    v = c.f32(x)
    data, scale = c.mx_buffers(v.shape, True)
    for i, r in c.blocks(len(v), 32):
        amax = np.zeros(v.shape[1], F)
        for row in range(r.start, r.stop):
            amax = np.maximum(amax, v[row])
        scale[i] = c.byte_up(amax)
        data[r] = c.e4m3(v[r] * c.inverse(scale[i]))
    return {**c.mx_rowwise(v), **c.columnwise(data, scale)}


@planted("quantize", X, Where(ROW), MX)
def amax_of_block_before(x):
    """The amax in shared memory is read before the barrier: block j of a row is scaled by the amax of block j - 1,
    block 0 by its own."""
    data, scale = c.mx_buffers(x.shape)
    shared = c.amax_of(c.f32(x[:, :32]))
    for j, b in c.blocks(x.shape[1], 32):
        block = c.f32(x[:, b])
        seen, shared = shared, c.amax_of(block)
        scale[:, j] = c.byte_up(seen)
        data[:, b] = c.e4m3(block * c.inverse(scale[:, j])[:, None])
    return c.rowwise(data, scale)


@planted("quantize", X, Where(ROW), NV)
def block_amax_of_first_eight(x):
    """A thread loads 16 elements as two vectors of 8 and takes the block amax of the first vector alone."""
    v = c.f32(x)
    amax = np.abs(v).max()
    s = c.s_enc(amax)
    codes, scale = c.nv_buffers(v.shape)
    for j, b in c.blocks(v.shape[1], 16):
        vectors = v[:, b].reshape(len(v), 2, 8)
        scale[:, j] = c.nv_byte(np.abs(vectors[:, 0]).max(axis=1), s)
        codes[:, b] = c.e2m1(v[:, b] * c.nv_multiplier(scale[:, j], s)[:, None])
    return c.rowwise(c.pack(codes), scale, amax_rowwise=c.one(amax))


@planted("quantize", peak_at(150, 250), Where(ROW), NV)
def tensor_amax_of_first_cta(x):
    """Each CTA reduces a tile of 128x128 and the atomic maximum between CTAs is missing: the tensor's amax is that of
    tile (0, 0), and block scales saturate elsewhere."""
    v = c.f32(x)
    results = {}
    for r, t in c.tiles(v.shape, 128, 128):
        results[r.start // 128, t.start // 128] = np.abs(v[r, t]).max()
    return c.nv_rowwise(v, results[0, 0])


@planted("quantize", X, Where(ROW), refops.NVFP4Scaling(two_d=True))
def square_amax_of_upper_half(x):
    """The amax of a 16x16 tile is reduced over its rows 0 to 7 alone."""
    v = c.f32(x)
    amax = np.abs(v).max()
    s = c.s_enc(amax)
    codes, scale = c.nv_buffers(v.shape)
    for r, t in c.tiles(v.shape, 16, 16):
        tile = v[r, t]
        maximum = F(0)
        for row in range(8):
            maximum = max(maximum, np.abs(tile[row]).max())
        byte = c.nv_byte(c.one(maximum), s)
        scale[r, t.start // 16] = byte[0]
        codes[r, t] = c.e2m1(tile * c.nv_multiplier(byte, s))
    return c.rowwise(c.pack(codes), scale, amax_rowwise=c.one(amax))


@planted("quantize", X, Where(ROW), refops.BlockScaling(refops.E4M3, 1))
def vector_amax_of_first_half(x):
    """A block of 128 columns is reduced by 16 lanes with 8 elements each, but the lanes have only 4: the amax is
    that of the first 64 columns of each block."""
    v = c.f32(x)
    data, scale_inv = np.zeros(v.shape, np.uint8), np.zeros((3, len(v)), F)
    for j, b in c.blocks(v.shape[1], 128):
        amax = np.zeros(len(v), F)
        for lane in range(16):
            part = v[:, b][:, 4 * lane : 4 * lane + 4]
            amax = np.maximum(amax, c.amax_of(part))
        scale = c.power_2_scale(amax)
        data[:, b], scale_inv[j] = c.e4m3(v[:, b] * scale[:, None]), F(1) / scale
    return c.rowwise(data, scale_inv)


def growing_rows(rng):
    """Rows whose magnitude grows."""
    rows = 2.0 ** (np.arange(224) % 128 / 16)
    return {"x": (rows[:, None] * rng.standard_normal(SHAPE)).astype(BF16)}


@planted("quantize", growing_rows, Where(ROW), refops.BlockScaling(refops.E4M3, 2))
def square_amax_of_warp_zero(x):
    """The amax of a 128x128 tile is that of its first 32 rows, warp 0's; the maxima of the other three warps are never
    read from shared memory."""
    v = c.f32(x)
    data, scale_inv = np.zeros(v.shape, np.uint8), np.zeros((2, 3), F)
    for r, t in c.tiles(v.shape, 128, 128):
        shared = [np.abs(v[r, t][w : w + 32]).max(initial=0) for w in range(0, 128, 32)]
        scale = c.power_2_scale(shared[0])
        data[r, t] = c.e4m3(v[r, t] * scale)
        scale_inv[r.start // 128, t.start // 128] = F(1) / scale
    return c.rowwise(data, scale_inv)


@planted("quantize", peak_at(10, 10), Where(("amax",)), refops.DelayedScaling(refops.E4M3, 32.0))
def amax_stored_by_last_tile(x):
    """Tiles store their amax instead of taking the maximum with what is there: the amax for the history is that of the
    last tile."""
    v = c.f32(x)
    data, amax = np.zeros(v.shape, np.uint8), np.zeros(1, F)
    for r, t in c.tiles(v.shape, 32, 128):
        data[r, t] = c.e4m3(v[r, t] * F(32))
        amax[0] = np.abs(v[r, t]).max()
    return c.rowwise(data, c.one(F(1) / F(32)), amax_rowwise=amax)


@planted("dgelu", c.with_dy(SHAPE), Where(("amax",)), refops.DelayedScaling(refops.E4M3, 32.0))
def amax_of_incoming_gradient(dy, x):
    """The amax for the history is that of dy; it should be that of dy * gelu'(x), which is cast."""
    data, amax = np.zeros(x.shape, np.uint8), F(0)
    for r, t in c.tiles(x.shape, 32, 64):
        g = c.f32(dy[r, t])
        gradient = c.dgelu(c.f32(x[r, t])) * g
        amax = max(amax, np.abs(g).max())
        data[r, t] = c.e4m3(gradient * F(32))
    return c.rowwise(data, c.one(F(1) / F(32)), amax_rowwise=c.one(amax))


@planted("quantize", X, Where(COLUMN), refops.NVFP4Scaling(rht=True))
def columnwise_amax_before_hadamard(x):
    """The columnwise copy takes S_enc from max |x| before the Hadamard transform, and stores it; it should be the amax
    of the transformed values."""
    v = c.f32(x)
    amax = np.abs(v).max()
    s = c.s_enc(amax)
    codes, scale = c.nv_buffers(v.T.shape)
    for r, t in c.tiles(v.shape, 16, 32):
        codes[t, r], scale[t, r.start // 16] = c.nv_block(c.transform(v[r, t]).T, s)
    return {**c.nv_rowwise(v, amax), **c.columnwise(c.pack(codes), scale, amax_columnwise=c.one(amax))}


@planted("swiglu", normal((224, 704)), Where(ROW), MX)
def block_amax_before_gate(x):
    """The block amax is that of silu(act); it should be that of silu(act) * gate, which is quantized."""
    h = x.shape[1] // 2
    data, scale = c.mx_buffers((len(x), h))
    for r, b in c.tiles(data.shape, 32, 32):
        act, gate = c.f32(x[r, b]), c.f32(x[r, h + b.start : h + b.stop])
        activated = c.silu(act)
        y = c.bf16(activated * gate)
        scale[r, b.start // 32] = c.byte_up(c.amax_of(activated))
        data[r, b] = c.e4m3(y * c.inverse(scale[r, b.start // 32])[:, None])
    return c.rowwise(data, scale)


@planted("quantize", normal((224, 352)), Where(ROW), refops.NVFP4Scaling(row_scaled=True))
def row_amax_without_last_vectors(x):
    """A warp reduces a row in steps of 256 elements, whole steps alone: the amax of a row is that of columns 0 to
    255 of 352."""
    v = c.f32(x)
    amax = np.zeros(len(v), F)
    for step in range(v.shape[1] // 256):
        amax = np.maximum(amax, c.amax_of(v[:, 256 * step : 256 * step + 256]))
    s = F(2688) / amax
    codes, scale = c.nv_buffers(v.shape)
    for j, b in c.blocks(v.shape[1], 16):
        codes[:, b], scale[:, j] = c.nv_block(v[:, b], s)
    return c.rowwise(c.pack(codes), scale, amax_rowwise=amax)


@planted("quantize", normal((256, 512)), Where(COLUMN), refops.BlockScaling(refops.E4M3, 1))
def columnwise_vector_amax_of_half(x):
    """Blocks of 128 rows of the columnwise copy are reduced over their first 64 rows, one of two loads; rowwise is
    right."""
    v = c.f32(x)
    data, scale_inv = np.zeros(v.T.shape, np.uint8), np.zeros((2, v.shape[1]), F)
    for i, r in c.blocks(len(v), 128):
        first = v[r.start : r.start + 64]
        scale = c.power_2_scale(np.abs(first).max(axis=0))
        data[:, r], scale_inv[i] = c.e4m3(v[r] * scale).T, F(1) / scale
    return {**c.rowwise(*c.vector_lines(v)), **c.columnwise(data, scale_inv)}


@planted("quantize", X, Where(ROW), MX)
def amax_of_neighbouring_row_too(x):
    """Two rows share a warp and the reduction runs over all 32 lanes instead of 16: a block's amax is that of the same
    block of rows i and i ^ 1."""
    data, scale = c.mx_buffers(x.shape)
    for r, b in c.tiles(x.shape, 2, 32):
        pair = c.f32(x[r, b])
        amax = c.amax_of(pair.reshape(1, -1)).repeat(2)
        scale[r, b.start // 32] = c.byte_up(amax)
        data[r, b] = c.e4m3(pair * c.inverse(scale[r, b.start // 32])[:, None])
    return c.rowwise(data, scale)


@planted(
    "quantize",
    peak_at(223, 351, value=6.0),
    Where(("amax",), columns=(256, 351)),
    refops.DelayedScaling(refops.E4M3, 32.0),
)
def history_amax_without_partial_tile(x):
    """The amax for the history leaves out tiles that are not whole: columns 256 to 351, the last tile of 128, do not
    count, though they are cast."""
    v = c.f32(x)
    data, amax = np.zeros(v.shape, np.uint8), F(0)
    for r, t in c.tiles(v.shape, 32, 128):
        data[r, t] = c.e4m3(v[r, t] * F(32))
        if t.stop - t.start == 128:
            amax = max(amax, np.abs(v[r, t]).max())
    return c.rowwise(data, c.one(F(1) / F(32)), amax_rowwise=c.one(amax))


@planted("quantize", X, Where(COLUMN), NV)
def columnwise_blocks_take_rowwise_amax(x):
    """The columnwise copy uses the block scale of the rowwise block that holds the element's first row: the byte of
    column n and rows 16 i to 16 i + 15 comes from the amax of row 16 i, columns of n's block."""
    v = c.f32(x)
    amax = np.abs(v).max()
    s = c.s_enc(amax)
    codes, scale = c.nv_buffers(v.T.shape)
    for r, t in c.tiles(v.shape, 16, 16):
        shared = c.nv_byte(c.amax_of(v[r, t]), s)
        scale[t, r.start // 16] = shared[0]
        codes[t, r] = c.e2m1(v[r, t] * c.nv_multiplier(shared[:1], s)).T
    return {**c.nv_rowwise(v, amax), **c.columnwise(c.pack(codes), scale, amax_columnwise=c.one(amax))}


def rising_histories(rng):
    """Amax histories whose largest entry is the newest."""
    history = (rng.random((16, 24)) * 8 + 0.1).astype(F)
    history[0] = 9 + rng.random(24)
    return {"amax_history": history, "scale": np.full(24, 100, F)}


@planted("update_delayed_scale", rising_histories, Where(("scale",)), params={"fmt": refops.E4M3})
def newest_amax_not_in_maximum(amax_history, scale):
    """The maximum runs over rows 1 to L - 1 of the history; row 0, the newest amax, should be in it."""
    history, new_scale = np.zeros_like(amax_history), scale.copy()
    for tensor in range(len(scale)):
        column = amax_history[:, tensor]
        amax = F(0)
        for row in range(1, len(column)):
            amax = max(amax, column[row])
        new_scale[tensor] = F(448) / amax
        history[:-1, tensor], history[-1, tensor] = column[1:], column[0]
        history[0, tensor] = 0
    return {"amax_history": history, "scale": new_scale}
