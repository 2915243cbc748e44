"""An amax of a part, of something else, of another time."""

import numpy as np

from .held_common import (
    BF16,
    CURRENT,
    DELAYED,
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
    e2m1,
    e4m3,
    encode_scale,
    exp2_inverse,
    gelu,
    launch,
    load,
    mx_byte,
    nv_byte,
    nv_multiplier,
    nv_rows,
    pack,
    rows_of_many_sizes,
    tensor_scale,
)
from .registry import Where, normal, planted


@planted("quantize", normal((224, 352)), Where(("rowwise",)), scaling=CURRENT)
def amax_of_the_first_warp_only(x):
    """The block reduction lacks its second stage: amax and scale come from warp 0's rows, 0 to 31, of the tensor."""
    x = load(x)
    per_warp = np.array([amax_of(x[32 * warp : 32 * warp + 32]) for warp in range(7)], F)
    amax = per_warp[0]
    scale = tensor_scale(amax)
    return {
        "rowwise_data": e4m3(x * scale),
        "rowwise_scale_inv": np.array([ONE / scale], F),
        "amax_rowwise": np.array([amax], F),
    }


@planted("quantize", normal((224, 352)), Where(("rowwise",)), scaling=MX)
def shuffle_reduction_lacks_the_offset_16(x):
    """The butterfly over 32 lanes has the offsets 8, 4, 2, 1 and not 16: the scale byte comes from the first 16
    elements of each block."""
    x = load(x)
    lanes = np.abs(blocks(x, 32))
    number = np.arange(32)
    for offset in (8, 4, 2, 1):
        lanes = np.maximum(lanes, lanes[:, :, number ^ offset])
    byte = mx_byte(lanes[:, :, 0])
    codes = e4m3(blocks(x, 32) * exp2_inverse(byte)[:, :, None])
    return {"rowwise_data": codes.reshape(x.shape), "rowwise_scale_inv": byte}


@planted("quantize", normal((256, 512)), Where(("rowwise",)), scaling=NV)
def block_amax_of_the_low_halves(x):
    """Elements are loaded as pairs of bfloat16 and only the first of each pair enters the block's amax: the scale is
    that of the even elements."""
    x = load(x)
    amax = amax_of(x)
    s = encode_scale(amax)
    pairs = x.reshape(256, 32, 8, 2)
    block_amax = np.zeros((256, 32), F)
    for i in range(8):
        block_amax = np.maximum(block_amax, np.abs(pairs[:, :, i, 0]))
    byte = nv_byte(block_amax, s)
    codes = e2m1(x.reshape(256, 32, 16) * nv_multiplier(byte, s)[:, :, None]).reshape(x.shape)
    return {"rowwise_data": pack(codes), "rowwise_scale_inv": byte, "amax_rowwise": np.array([amax], F)}


def _second_half_larger(rng):
    """The second half of the columns has larger magnitudes."""
    x = rng.standard_normal((224, 512))
    x[:, 256:] *= 1.5
    return {"x": x.astype(BF16)}


@planted("quantize", _second_half_larger, Where(("rowwise",)), scaling=NV)
def amax_of_one_shard_without_all_reduce(x):
    """The tensor's amax is that of the first of two shards of 256 columns; the reduction over shards is missing, and
    both shards are scaled with it."""
    shards = [load(x[:, :256]), load(x[:, 256:])]
    amax = np.array([amax_of(shards[0])], F)
    results = [nv_rows(shard, encode_scale(amax[0])) for shard in shards]
    return {
        "rowwise_data": np.concatenate([pack(codes) for codes, _ in results], axis=1),
        "rowwise_scale_inv": np.concatenate([byte for _, byte in results], axis=1),
        "amax_rowwise": amax,
    }


@planted("gelu", normal((224, 352), scale=0.7), Where(("rowwise",)), scaling=CURRENT)
def amax_of_the_preactivation(x):
    """amax is max |x| of the activation's input, where it should be that of gelu(x)."""
    amax, y = F(0), np.empty(x.shape, F)
    for row in range(224):
        register = load(x[row])
        amax = max(amax, amax_of(register))
        y[row] = bf16(gelu(register))
    scale = tensor_scale(amax)
    return {
        "rowwise_data": e4m3(y * scale),
        "rowwise_scale_inv": np.array([ONE / scale], F),
        "amax_rowwise": np.array([amax], F),
    }


def _mostly_negative(rng):
    return {"x": (rng.standard_normal((224, 352)) - 1).astype(BF16)}


@planted("quantize", _mostly_negative, Where(("amax",)), scaling=DELAYED)
def recorded_maximum_is_signed(x):
    """The amax that is recorded for the history is max x, not max |x|, from a float atomicMax on signed values."""
    x = load(x)
    slot, data = F(0), np.empty(x.shape, np.uint8)
    for _, rows, columns in launch(224, 352, 32, 352):
        slot = max(slot, x[rows, columns].max())
        data[rows] = e4m3(x[rows, columns] * F(24))
    return {
        "rowwise_data": data,
        "rowwise_scale_inv": np.array([ONE / F(24)], F),
        "amax_rowwise": np.array([slot], F),
    }


@planted("quantize", rows_of_many_sizes((256, 384)), Where(("rowwise",)), scaling=ROW_BLOCKS)
def scale_from_the_row_before(x):
    """Each row's blocks are scaled by the amaxes of the row before, read before the barrier; row 0 by those of the last
    row."""
    x = load(x)
    data, scales = np.empty(x.shape, np.uint8), np.empty((3, 256), F)
    shared = amax_of(x[-1].reshape(3, 128), 1)
    for row in range(256):
        line = x[row].reshape(3, 128)
        scale = block_multiplier(shared)
        shared = amax_of(line, 1)
        data[row] = e4m3(line * scale[:, None]).ravel()
        scales[:, row] = ONE / scale
    return {"rowwise_data": data, "rowwise_scale_inv": scales}


def _growing_tiles(rng):
    size = 2.0 ** np.array([[0, 2, 1, 4], [3, 1, 2, 0]]).repeat(128, 0).repeat(128, 1)
    return {"x": (size * rng.standard_normal((256, 512))).astype(BF16)}


@planted("quantize", _growing_tiles, Where(("rowwise",), columns=(128, 511)), scaling=TILE_BLOCKS)
def tile_scaled_by_its_left_neighbour(x):
    """The amax of a tile is ready one iteration late: all but the first tile of a row of tiles are scaled with that of
    their left neighbour."""
    x = load(x)
    data, scales = np.empty(x.shape, np.uint8), np.empty((2, 4), F)
    for r in range(2):
        rows, ready = slice(128 * r, 128 * r + 128), None
        for c in range(4):
            columns = slice(128 * c, 128 * c + 128)
            arriving = amax_of(x[rows, columns])
            scale = block_multiplier(arriving if ready is None else ready)
            ready = arriving
            data[rows, columns] = e4m3(x[rows, columns] * scale)
            scales[r, c] = ONE / scale
    return {"rowwise_data": data, "rowwise_scale_inv": scales}
