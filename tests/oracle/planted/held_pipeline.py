"""Pipelines, persistent loops and work split between CTAs: registers and buffers of another iteration, lost parts."""

import numpy as np

import refops

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
    e2m1,
    e4m3,
    e5m2,
    encode_scale,
    gelu,
    halves,
    launch,
    load,
    mx_columns,
    mx_rows,
    nv_byte,
    nv_multiplier,
    nv_rows,
    pack,
    power_of_two,
    silu,
)
from .registry import Where, normal, planted


def _sizes(rng):
    """Tiles of 128 x 128 that differ in magnitude."""
    size = np.repeat(np.repeat(2.0 ** np.array([[0, 1, 2, 3], [5, 3, 0, -2]]), 128, axis=0), 128, axis=1)
    return {"x": (size * rng.standard_normal((256, 512))).astype(BF16)}


@planted("quantize", _sizes, Where(("rowwise",), rows=(128, 255)), scaling=TILE_BLOCKS)
def persistent_cta_casts_with_its_first_scale(x):
    """Each of four persistent CTAs keeps the multiplier of its first tile in a register and casts its second tile (rows
    128 to 255) with it; the scale that it stores is that of the second tile."""
    x = load(x)
    data, scales = np.empty(x.shape, np.uint8), np.empty((2, 4), F)
    tiles = list(launch(256, 512, 128, 128))
    for cta in range(4):
        register = None
        for tile, rows, columns in tiles[cta::4]:
            scale = block_multiplier(amax_of(x[rows, columns]))
            if register is None:
                register = scale
            data[rows, columns] = e4m3(x[rows, columns] * register)
            scales[tile // 4, tile % 4] = ONE / scale
    return {"rowwise_data": data, "rowwise_scale_inv": scales}


@planted("silu", normal((224, 352)), Where(("values",)))
def consumer_reads_before_the_copy_lands(x):
    """The consumer of a ring of two buffers does not wait for the copy: tile i of 32 columns is computed from what the
    buffer held before, tile i - 2, and the first two from zeros."""
    m, k = x.shape
    y = np.empty_like(x)
    ring = np.zeros((2, m, 32), BF16)
    for i, c in enumerate(range(0, k, 32)):
        value = silu(load(ring[i % 2]))
        ring[i % 2] = x[:, c : c + 32]
        y[:, c : c + 32] = value.astype(BF16)
    return {"y": y}


@planted("quantize", normal((256, 512)), Where(("rowwise",), columns=(128, 511)), scaling=ROW_BLOCKS)
def running_amax_of_the_row_is_not_reset(x):
    """A warp that walks along a row does not clear its amax between blocks of 128: each block's scale comes from the
    largest magnitude of the row so far."""
    x = load(x)
    data, scales = np.empty(x.shape, np.uint8), np.empty((4, 256), F)
    amax = np.zeros(256, F)
    for block in range(4):
        columns = slice(128 * block, 128 * block + 128)
        amax = np.maximum(amax, amax_of(x[:, columns], 1))
        scale = block_multiplier(amax)
        data[:, columns] = e4m3(x[:, columns] * scale[:, None])
        scales[block] = ONE / scale
    return {"rowwise_data": data, "rowwise_scale_inv": scales}


@planted("quantize", normal((256, 512)), Where(("columnwise",)), scaling=MX)
def columnwise_pass_reads_the_other_buffer(x):
    """The columnwise pass reads the other buffer of the pair: the columnwise copy of column tile t (64 columns) is
    that of tile t ^ 1, while the rowwise pass reads its own."""
    x = load(x)
    out = [np.empty(x.shape, np.uint8), np.empty((256, 16), np.uint8)]
    down = [np.empty(x.shape, np.uint8), np.empty((8, 512), np.uint8)]
    for pair in range(0, 512, 128):
        buffers = [x[:, pair : pair + 64], x[:, pair + 64 : pair + 128]]
        for stage in (0, 1):
            columns = slice(pair + 64 * stage, pair + 64 * stage + 64)
            out[0][:, columns], out[1][:, columns.start // 32 : columns.stop // 32] = mx_rows(buffers[stage])
            down[0][:, columns], down[1][:, columns] = mx_columns(buffers[stage ^ 1])
    return {
        "rowwise_data": out[0],
        "rowwise_scale_inv": out[1],
        "columnwise_data": down[0],
        "columnwise_scale_inv": down[1],
    }


@planted(
    "quantize", normal((256, 512)), Where(("rowwise",), rows=(0, 223), every=("row", 32, tuple(range(16, 32)))), NV
)
def shared_tile_overwritten_before_the_store(x):
    """No barrier stands between the store of a 32-row tile and the next load: codes of rows 16 to 31 of each tile are
    those of the next tile's rows, except in the last tile; scales were stored in time."""
    x = load(x)
    amax = amax_of(x)
    codes, scales = nv_rows(x, encode_scale(amax))
    data = np.empty((256, 256), np.uint8)
    for start in range(0, 256, 32):
        shared = pack(codes[start : start + 32])
        if start + 32 < 256:
            shared[16:] = pack(codes[start + 48 : start + 64])
        data[start : start + 32] = shared
    return {"rowwise_data": data, "rowwise_scale_inv": scales, "amax_rowwise": np.array([amax], F)}


def _scaled_gradient(rng):
    return {
        "dy": rng.standard_normal((160, 256), np.float32).astype(BF16),
        "x": rng.standard_normal((160, 512), np.float32).astype(BF16),
        "row_scales": rng.uniform(0.05, 1, 160).astype(np.float32),
    }


@planted("scaled_dswiglu", _scaled_gradient, Where(("drow_scales",), columns=(0, 127)))
def cluster_halves_store_their_row_sums(dy, x, row_scales):
    """Two CTAs share a row, 128 columns each, and each stores its sum to drow_scales instead of adding it: the second
    one's stays, that of columns 128 to 255, and columns 0 to 127 are lost."""
    act, gate = halves(load(x))
    drow_scales = np.zeros(160, F)
    for rank in range(2):
        columns = slice(128 * rank, 128 * rank + 128)
        product = load(dy[:, columns]) * (silu(act[:, columns]) * gate[:, columns])
        drow_scales[:] = product.sum(axis=1, dtype=F)
    return {"drow_scales": drow_scales}


def _small_first_rows(rng):
    x = rng.standard_normal((256, 384))
    x[:64] *= 0.2
    return {"x": x.astype(np.float16)}


POWER = refops.CurrentScaling(refops.E5M2, power_2_scale=True)


@planted("quantize", _small_first_rows, Where(("rowwise",), rows=(0, 63)), scaling=POWER)
def first_cta_does_not_wait_for_the_grid(x):
    """The CTA of rows 0 to 63 passes the grid barrier early and casts with the scale of the amax known so far, its
    own; the scale that is stored, and all other rows, have the tensor's."""
    x = load(x)
    amax, data = F(0), np.empty(x.shape, np.uint8)
    multipliers = []
    for cta in range(4):
        amax = max(amax, amax_of(x[64 * cta : 64 * cta + 64]))
        multipliers.append(power_of_two(F(57344) / amax))
    final = multipliers[-1]
    for cta in range(4):
        rows = slice(64 * cta, 64 * cta + 64)
        data[rows] = e5m2(x[rows] * (multipliers[0] if cta == 0 else final))
    return {
        "rowwise_data": data,
        "rowwise_scale_inv": np.array([ONE / final], F),
        "amax_rowwise": np.array([amax], F),
    }


@planted("gelu", normal((224, 352)), Where(("columnwise",), rows=(16, 223)), scaling=NV)
def columnwise_multiplier_one_group_behind(x):
    """In the columnwise pass the codes of each group of 16 rows are scaled with the multipliers of the group before,
    which the software pipeline still holds; the scale bytes are stored in the right place, and the first group is
    right."""
    y = gelu(load(x))
    amax = amax_of(y)
    s, turned = encode_scale(amax), np.ascontiguousarray(bf16(y).T)
    data, scales = np.empty((352, 112), np.uint8), np.empty((352, 14), np.uint8)
    held = None
    for group in range(14):
        tile = turned[:, 16 * group : 16 * group + 16]
        scales[:, group] = nv_byte(amax_of(tile, 1), s)
        fresh = nv_multiplier(scales[:, group], s)
        multiplier = fresh if held is None else held
        held = fresh
        data[:, 8 * group : 8 * group + 8] = pack(e2m1(tile * multiplier[:, None]))
    return {"columnwise_data": data, "columnwise_scale_inv": scales, "amax_columnwise": np.array([amax], F)}
