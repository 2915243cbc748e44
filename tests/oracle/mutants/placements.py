"""Conventions of where blocks begin, whose scales they are cast with, and where scales are written."""

import numpy as np

from mutants.kernels import F, cast, decode, gemm_order, pack, spread
from mutants.registry import convention
from refops import E4M3, BlockScaling, MXFP8Scaling, NVFP4Scaling

MX, NV = MXFP8Scaling(E4M3), NVFP4Scaling()
SIZE, RAGGED = (512, 1024), (448, 1184)


# --- where blocks begin -----------------------------------------------------------------------------------------------


def with_columns_of(k, codes, scales):
    """The outputs with another columnwise copy: codes (M, K), scale bytes [block, column]."""
    out = k.outputs()
    padded = out["columnwise_scale_inv"].copy()
    padded[: len(scales), : scales.shape[1]] = scales
    return out | {"columnwise_data": codes, "columnwise_scale_inv": padded}


@convention("displaced-blocks", "quantize", MX, shape=SIZE, columnwise=True)
def mx_columns_begin_in_row_16(k):
    """Block n of a column has the rows 32 n + 16 to 32 n + 47, the last one also the first rows."""
    v = np.roll(k.computed(), -16, axis=0)
    scales = k.mx_bytes(v, 32, 1)
    codes = cast(v * spread(k.mx_multiplier(scales), 32, 1, v.shape), "e4m3")
    return with_columns_of(k, np.roll(codes, 16, axis=0), scales)


@convention("displaced-blocks", "swiglu", MX, shape=(448, 1024), columnwise=True)
def swiglu_mx_block_of_row_plus_16(k):
    """The block of a row is (row + 16) / 32, bounded by the last one, which has 48 rows."""
    v = k.before_cast(k.computed())
    block = np.minimum((np.arange(len(v)) + 16) // 32, len(v) // 32 - 1)
    amax = np.stack([np.abs(v[block == n]).max(axis=0) for n in range(len(v) // 32)])
    scales = k.mx_byte(amax)
    return with_columns_of(k, cast(v * k.mx_multiplier(scales)[block], "e4m3"), scales)


@convention("displaced-blocks", "quantize", MX, shape=SIZE)
def mx_amax_of_a_window_8_late(k):
    """The amax of block n is that of the elements 32 n + 8 to 32 n + 39; its own 32 are cast."""
    v = k.computed()
    late = np.zeros_like(v)
    late[:, :-8] = v[:, 8:]
    return k.outputs(mx_bytes=lambda v, rows, columns: k.mx_byte(k.block_amax(late, rows, columns)))


# --- whose scale a block is cast with ---------------------------------------------------------------------------------

SQUARE = {"shape": (512, 512), "data": "heavy"}


@convention("multiplier-of-transposed-block", "quantize", BlockScaling(E4M3, 2), columnwise=True, **SQUARE)
def square_blocks_with_indices_exchanged(k):
    """scale[j][i] for scale[i][j] in the cast of both copies; what is stored is right."""
    v = k.computed()
    codes = k.cast(v * spread(k.block_scales(v, 128, 128).T, 128, 128, v.shape))
    return k.outputs() | {"rowwise_data": codes, "columnwise_data": np.ascontiguousarray(codes.T)}


@convention("multiplier-of-transposed-block", "swiglu", MXFP8Scaling(E4M3, two_d=True), shape=(384, 1024), data="heavy")
def swiglu_mx_scales_of_a_tile_exchanged(k):
    """The 4 x 4 scales of a tile of 128 x 128 lie in shared memory as [j][i] and are read as [i][j]."""
    v = k.before_cast(k.computed())
    own = k.mx_multiplier(k.mx_bytes(v, 32, 32))
    read = own.reshape(3, 4, 4, 4).transpose(0, 3, 2, 1).reshape(12, 16)
    return k.outputs() | {"rowwise_data": cast(v * spread(read, 32, 32, v.shape), "e4m3")}


@convention("multiplier-of-transposed-block", "quantize", NVFP4Scaling(two_d=True), columnwise=True, **SQUARE)
def nv_columns_cast_as_if_scales_were_transposed(k):
    """The transposed copy is cast with scales that are transposed once more."""
    v = k.computed()
    s_enc = k.global_scale(k.tensor_amax(v))
    multiplier = k.nv_multiplier(k.nv_byte(k.block_amax(v, 16, 16), s_enc), s_enc)
    codes = k.cast((v * spread(multiplier.T, 16, 16, v.shape)).T)
    return k.outputs() | {"columnwise_data": pack(codes)}


@convention("multiplier-of-transposed-block", "quantize", BlockScaling(E4M3, 1, power_2_scale=False), shape=(256, 1024))
def scales_of_rows_read_as_stored(k):
    """The scales of 1 x 128 are stored [block, row], and the cast reads them as [row, block]."""
    v = k.computed()
    read = np.ascontiguousarray(k.block_scales(v, 1, 128).T).reshape(256, 8)
    return k.outputs() | {"rowwise_data": k.cast(v * spread(read, 1, 128, v.shape))}


# --- where scales are written -----------------------------------------------------------------------------------------


def scattered(array, scales, offset):
    """An array with scales at offsets of its memory, zeros elsewhere; what lies beyond its end is lost."""
    memory = np.zeros(array.size, np.uint8)
    held = offset < array.size
    memory[offset[held]] = scales[held]
    return memory.reshape(array.shape)


def tiles_counted(shape, tiles):
    """Offsets of scales in tiles of 128 x 4 of which `tiles` make a row."""
    i, j = np.indices(shape)
    return (i // 128 * tiles + j // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4


@convention("scale-offsets", "quantize", MX, shape=RAGGED)
def mx_tiles_of_a_row_floored(k):
    """K / 128 tiles make a row of tiles, where they are ceil(K / 128); the scales are in the order of GEMMs."""
    out = k.outputs()
    scales = out["rowwise_scale_inv"]
    offset = tiles_counted((448, 37), 1184 // 128)
    return out | {"rowwise_scale_inv": scattered(scales, scales[:448, :37], offset)}


@convention("scale-offsets", "quantize", MX, shape=RAGGED, columnwise=True)
def mx_columns_swizzled_as_stored(k):
    """Block and column of a columnwise scale are exchanged in the offset; what lies beyond the array is dropped."""
    out = k.outputs()
    scales = out["columnwise_scale_inv"]
    offset = tiles_counted((14, 1184), 1280 // 4)
    return out | {"columnwise_scale_inv": scattered(scales, scales[:14, :1184], offset)}


@convention("scales-swizzled-as-stored", "quantize", MX, shape=RAGGED, columnwise=True)
def mx_columns_swizzled_in_a_view(k):
    """[block, column] is handed to the swizzle as if it were [column, block]: the shape fits."""
    out = k.outputs()
    scales = out["columnwise_scale_inv"]
    return out | {"columnwise_scale_inv": gemm_order(scales.reshape(scales.shape[::-1])).reshape(scales.shape)}


@convention("scales-swizzled-otherwise", "quantize", MX, shape=RAGGED)
def mx_rows_of_a_tile_dealt_back(k):
    """Row 4 n + q of a tile lies behind n others of its q, 32 for each: the inverse of the order of GEMMs."""
    out = k.outputs()
    scales = out["rowwise_scale_inv"]
    tiles = scales.reshape(len(scales) // 128, 32, 4, scales.shape[1] // 4, 4)
    memory = np.ascontiguousarray(tiles.transpose(0, 3, 2, 1, 4))
    return out | {"rowwise_scale_inv": memory.reshape(scales.shape)}


@convention("other-scale-format", "quantize", NV, shape=SIZE)
def nv_scales_stored_as_exponents(k):
    """127 + ceil(log2 scale) is stored, as in MX formats; a scale of 0 is 1e-30 there."""
    out = k.outputs()
    scale = decode(out["rowwise_scale_inv"], "e4m3")
    exponent = np.ceil(np.log2(np.maximum(scale, F(1e-30))))
    return out | {"rowwise_scale_inv": (exponent + 127).astype(np.uint8)}


# --- which column -----------------------------------------------------------------------------------------------------


@convention("interleave-inverted", "scaled_swiglu", params={"glu_interleave_size": 32}, shape=(512, 2048))
def scaled_swiglu_interleaves_again(k):
    """Tiles of 256 columns are interleaved by runs of 32 where that should be undone."""

    def split(x):
        runs = x.reshape(len(x), -1, 2, 4, 32).swapaxes(2, 3).reshape(len(x), -1, 2, 128)  # of tiles of two halves
        return runs[:, :, 0].reshape(len(x), -1), runs[:, :, 1].reshape(len(x), -1)

    return k.outputs(split=split)
