"""Right outputs with wrong entries: what races, tails, indices and stale buffers leave behind."""

import numpy as np

from mutants.kernels import BF16, F, Kernel
from mutants.registry import corruption
from refops import E4M3, E5M2, BlockScaling, CurrentScaling, DelayedScaling, MXFP8Scaling, NVFP4Scaling

MILLION = (1024, 1024)
SIZE, PAIR = (512, 1024), (512, 2048)
DELAYED, CURRENT = DelayedScaling(E4M3, 3.7), CurrentScaling(E4M3)
ROWS, TILES = BlockScaling(E4M3, 1), BlockScaling(E4M3, 2)
MX, MX_E5M2, MX_2D = MXFP8Scaling(E4M3), MXFP8Scaling(E5M2), MXFP8Scaling(E4M3, two_d=True)
NV = NVFP4Scaling()
POISON = np.uint8(0xCD)


def place(k, shape):
    """A random index."""
    return tuple(int(k.rng.integers(size)) for size in shape)


def raw(array):
    """The array's bytes, writable: (..., itemsize)."""
    return array.view(np.uint8).reshape(*array.shape, array.itemsize)


# --- one element ------------------------------------------------------------------------------------------------------


@corruption("swiglu", shape=(1024, 2048))
def one_bit_of_a_million_values(k):
    """The lowest bit of one bfloat16 value flipped."""
    out = k.outputs()
    out["y"].view(np.uint16)[place(k, out["y"].shape)] ^= 1
    return out


@corruption("gelu", shape=MILLION, dtype=np.float32)
def one_float32_value_64_ulp_off(k):
    """One float32 value off by 64 ulp. (An ulp or two is within what exp and tanh may differ.)"""
    out = k.outputs()
    out["y"].view(np.uint32)[np.unravel_index(np.argmax(out["y"]), out["y"].shape)] += 64
    return out


@corruption("quantize", MX, shape=MILLION)
def one_code_of_a_million(k):
    """The lowest bit of one E4M3 code flipped."""
    out = k.outputs()
    out["rowwise_data"][place(k, MILLION)] ^= 1
    return out


@corruption("swiglu", MX, shape=(1024, 2048))
def one_code_of_a_million_behind_an_activation(k):
    """The same behind an activation."""
    out = k.outputs()
    out["rowwise_data"][place(k, MILLION)] ^= 1
    return out


@corruption("quantize", NV, shape=MILLION)
def one_nibble_of_a_million(k):
    """The lowest bit of one E2M1 code flipped, in the high nibble."""
    out = k.outputs()
    out["rowwise_data"][place(k, out["rowwise_data"].shape)] ^= 0x10
    return out


@corruption("quantize", MX, shape=MILLION)
def one_scale_byte_off(k):
    """One scale byte one too large, its codes right for the scale before."""
    out = k.outputs()
    out["rowwise_scale_inv"][place(k, (1024, 32))] += 1
    return out


@corruption("quantize", DELAYED, shape=MILLION)
def one_element_unwritten(k):
    """One code left at the allocator's 0xCD."""
    out = k.outputs()
    out["rowwise_data"][place(k, MILLION)] = POISON
    return out


@corruption("quantize", CURRENT, shape=MILLION, data="with_nan")
def one_nan_not_written(k):
    """One of the NaN elements is 0."""
    out = k.outputs()
    nan = np.argwhere(np.isnan(k.inputs["x"].astype(F)))
    out["rowwise_data"][tuple(nan[len(nan) // 2])] = 0
    return out


@corruption("quantize", DELAYED, shape=MILLION, data="nonfinite")
def one_infinity_not_saturated(k):
    """One infinity becomes NaN."""
    out = k.outputs()
    where = np.argwhere(np.isinf(k.inputs["x"].astype(F)))
    out["rowwise_data"][tuple(where[0])] |= 0x7F
    return out


@corruption("quantize", NV, shape=SIZE)
def stored_amax_one_ulp_low(k):
    """The amax that is stored beside the data is one ulp below the one that was used."""
    out = k.outputs()
    out["amax_rowwise"].view(np.uint32)[0] -= 1
    return out


@corruption("dequantize", NV, shape=MILLION)
def one_value_read_wrongly(k):
    """One decoded value has the wrong sign."""
    out = k.outputs()
    where = np.argwhere(out["y"].astype(F) != 0)
    out["y"].view(np.uint16)[tuple(where[len(where) // 3])] ^= 0x8000
    return out


@corruption("update_delayed_scale", params={"fmt": E4M3}, shape=(1024, 1024), dtype=np.float32, data="history")
def one_history_entry_lost_a_bit(k):
    """The lowest bit of one of a million history entries."""
    out = k.outputs()
    out["amax_history"].view(np.uint32)[700, 123] ^= 1
    return out


@corruption("update_delayed_scale", params={"fmt": E4M3}, shape=(1024, 256), dtype=np.float32, data="history")
def one_scale_not_updated(k):
    """One column's scale is still the old one."""
    out = k.outputs()
    column = np.flatnonzero(k.inputs["amax_history"][0])[100]
    out["scale"][column] = k.inputs["scale"][column]
    return out


# --- rows, columns and tiles ------------------------------------------------------------------------------------------


@corruption("swiglu", shape=PAIR, also=("not-written",))
def one_row_unwritten(k):
    """A row of zeros."""
    out = k.outputs()
    out["y"][int(k.rng.integers(512))] = 0
    return out


@corruption("quantize", MX, shape=MILLION, also=("not-written",))
def one_tile_unwritten(k):
    """A 128x128 tile of codes and its scales left at 0xCD."""
    out = k.outputs()
    out["rowwise_data"][256:384, 512:640] = POISON
    out["rowwise_scale_inv"][256:384, 16:20] = POISON
    return out


@corruption("quantize", ROWS, shape=SIZE, columnwise=True, also=("not-written",))
def columnwise_scales_unwritten(k):
    """The columnwise scales are still zero."""
    out = k.outputs()
    out["columnwise_scale_inv"][:] = 0
    return out


@corruption("quantize", DELAYED, shape=SIZE, also=("swapped-rows",))
def two_rows_swapped(k):
    """Rows 128 and 129 exchanged."""
    out = k.outputs()
    out["rowwise_data"][[128, 129]] = out["rowwise_data"][[129, 128]]
    return out


@corruption("geglu", shape=PAIR, also=("input-shifted",))
def one_row_twice(k):
    """A row holds the row before."""
    out = k.outputs()
    out["y"][301] = out["y"][300]
    return out


@corruption("quantize", MX, shape=SIZE, also=("sign-lost",))
def one_column_without_signs(k):
    """One column lost its signs."""
    out = k.outputs()
    out["rowwise_data"][:, 77] &= 0x7F
    return out


@corruption("quantize", MX, shape=(512, 512), columnwise=True, also=("transposed-tiles",))
def one_columnwise_tile_transposed(k):
    """A 32x32 tile of the columnwise codes was read from shared memory with row and column exchanged."""
    out = k.outputs()
    tile = out["columnwise_data"][64:96, 128:160]
    out["columnwise_data"][64:96, 128:160] = tile.T.copy()
    return out


@corruption("quantize", MX, shape=SIZE, columnwise=True, also=("multiplier-of-other-copy",))
def columnwise_tile_from_row_blocks(k):
    """In one 32x32 tile the columnwise codes are the rowwise ones: wrong direction."""
    out = k.outputs()
    out["columnwise_data"][32:64, 96:128] = out["rowwise_data"][32:64, 96:128]
    return out


@corruption("quantize", NV, shape=(512, 512), columnwise=True, also=("shifted-rows",))
def last_columnwise_group_not_transposed(k):
    """The last 16 rows of the packed columnwise copy repeat the group before."""
    out = k.outputs()
    out["columnwise_data"][:, -8:] = out["columnwise_data"][:, -16:-8]
    return out


@corruption("quantize", NVFP4Scaling(rht=True), shape=SIZE, data="coarse", columnwise=True)
def one_group_without_hadamard(k):
    """One group of 16 rows is not transformed."""

    def column_values(v):
        transformed = k.hadamard(v)
        transformed[48:64, 100:200] = v[48:64, 100:200]
        return transformed

    return k.outputs(column_values=column_values)


@corruption("quantize", NVFP4Scaling(stochastic_rounding=True, seed=3), shape=(256, 1024))
def one_row_reuses_random_bits(k):
    """A row's blocks use the random bits of the row before."""
    right = k.random_bytes

    def random_bytes(rows, columns, first):
        random = right(rows, columns, first)
        random[100] = random[99]
        return random

    return k.outputs(random_bytes=random_bytes)


@corruption("quantize", NVFP4Scaling(four_over_six="mse"), shape=SIZE)
def one_block_chose_the_worse(k):
    """One block in a thousand takes the candidate with the larger error, codes and scale consistent."""

    def choose_four(error6, error4):
        flip = (k.rng.random(error6.shape) < 1e-3) & (error6 > error4 * F(1.5))
        return (error4 < error6) ^ flip

    return k.outputs(choose_four=choose_four)


@corruption("dgelu", shape=SIZE)
def one_warp_broadcasts_lane_0(k):
    """32 neighbours hold the first one's gradient."""
    out = k.outputs()
    out["dx"][200, 64:96] = out["dx"][200, 64]
    return out


@corruption("dswiglu", shape=PAIR, also=("not-written",))
def last_gate_column_unwritten(k):
    """The last column of d_gate is zero."""
    out = k.outputs()
    out["dx"][:, -1] = 0
    return out


# --- blocks and scales ------------------------------------------------------------------------------------------------


@corruption("quantize", MX, shape=SIZE)
def one_row_one_block_late(k):
    """In one row the codes are one block late, the scales in place."""
    out = k.outputs()
    out["rowwise_data"][333] = np.roll(out["rowwise_data"][333], 32)
    return out


@corruption("quantize", ROWS, shape=SIZE)
def one_stale_block_scale(k):
    """One stored scale is last step's, twice the right one; the codes are right."""
    out = k.outputs()
    out["rowwise_scale_inv"][3, 250] *= 2
    return out


@corruption("quantize", NV, shape=SIZE, also=("neighbour-tile-amax",))
def one_row_with_its_neighbours_scales(k):
    """A row's codes were made with the scales of the row below; the stored scales are right."""

    def nv_candidate(v, byte, s_enc, edge):
        byte = byte.copy()
        byte[40] = byte[41]
        return Kernel.nv_candidate(k, v, byte, s_enc, edge)

    return k.outputs(nv_candidate=nv_candidate)


@corruption("quantize", MX_2D, shape=SIZE)
def one_row_of_a_tile_has_its_own_scale(k):
    """The scale byte of one row of a 32x32 tile is not the tile's."""
    out = k.outputs()
    out["rowwise_scale_inv"][70, 5] -= 2
    return out


@corruption("quantize", TILES, shape=(1000, 1000))
def edge_tile_reads_garbage(k):
    """The amax of one partial tile at the edge includes what lies beyond the tensor."""

    def block_amax(v, rows, columns):
        amax = Kernel.block_amax(k, v, rows, columns)
        amax[-1, 3] *= 37
        return amax

    return k.outputs(block_amax=block_amax)


@corruption("quantize", MX, shape=(1000, 1000))
def padding_read_as_data(k):
    """K = 1000: the last block's amax includes 24 elements of the next row, its first ones."""

    def block_amax(v, rows, columns):
        amax = Kernel.block_amax(k, v, rows, columns)
        amax[:-1, -1] = np.fmax(amax[:-1, -1], np.abs(v[1:, :24]).max(axis=1))
        return amax

    return k.outputs(block_amax=block_amax)


@corruption("quantize", MX, shape=(1000, 1000), also=("not-written",))
def last_partial_block_skipped(k):
    """K = 1000: the last, partial block has no codes and no scales."""
    out = k.outputs()
    out["rowwise_data"][:, 992:] = 0
    out["rowwise_scale_inv"][:, 31] = 0
    return out


@corruption("gelu", shape=(512, 1021), also=("not-written",))
def vector_tail_skipped(k):
    """K = 1021: loads of 8 elements leave the last 5 of a row unwritten."""
    out = k.outputs()
    raw(out["y"])[:, 1016:] = POISON
    return out


@corruption("quantize", MX, shape=MILLION)
def one_block_amax_without_a_lane(k):
    """A race: the block's amax misses the thread that held it. Scale and codes are consistent."""

    def block_amax(v, rows, columns):
        amax = Kernel.block_amax(k, v, rows, columns)
        amax[511, 7] *= F(0.2)
        return amax

    return k.outputs(block_amax=block_amax)


@corruption(
    # One amax for the whole tensor that is too small: nothing in the dump tells a race from last step's value.
    "quantize",
    CURRENT,
    also=("amax-of-a-part", "stale-amax"),
    shape=MILLION,
    data="negative_tail",
)
def amax_without_one_warp(k):
    """A race: the tensor's amax misses the 32 elements of the warp that held it."""
    x = np.abs(k.load(k.inputs["x"])).reshape(-1, 32)
    x = np.delete(x, np.argmax(x.max(axis=1)), axis=0)
    return k.outputs(tensor_amax=lambda v: x.max())


@corruption("quantize", DELAYED, shape=SIZE)
def amax_not_reset(k):
    """The amax is the maximum of this step's and last step's; the data are right."""
    out = k.outputs()
    out["amax_rowwise"] *= F(1.5)
    return out


@corruption("dequantize", MX, shape=SIZE)
def one_block_read_with_the_next_scale(k):
    """One block is decoded with its right neighbour's scale."""

    def scales_read(scales):
        scales = scales.copy()
        scales[400, 20] = scales[400, 20] + 3
        return scales

    return k.outputs(scales_read=scales_read)


# --- loops and indices ------------------------------------------------------------------------------------------------


@corruption("quantize", CURRENT, shape=MILLION, also=("shifted-rows",))
def index_wraps_at_2_to_19(k):
    """A 19-bit index: the second half of the codes repeats the first."""
    out = k.outputs()
    flat = out["rowwise_data"].reshape(-1)
    flat[1 << 19 :] = flat[: 1 << 19]
    return out


@corruption("silu", shape=MILLION, also=("not-written",))
def grid_stride_loop_without_tail(k):
    """The last 1024 of a million elements are never reached: zeros."""
    out = k.outputs()
    out["y"].reshape(-1)[-1024:] = 0
    return out


@corruption("quantize", NV, shape=SIZE, also=("not-written",))
def every_eighth_byte_unwritten(k):
    """One lane of eight writes nothing in the last 16 rows."""
    out = k.outputs()
    out["rowwise_data"][-16:, 7::8] = 0
    return out


@corruption("quantize", MX_E5M2, shape=SIZE)
def first_elements_overwritten(k):
    """A write out of bounds: the first 16 codes belong to another tensor."""
    out = k.outputs()
    out["rowwise_data"][0, :16] = k.rng.integers(0, 120, 16)
    return out


@corruption("swiglu", shape=PAIR, dtype=np.float16, data="large")
def overflow_saturates_instead_of_inf(k):
    """float16 overflow written as 65504; a conversion gives infinity."""
    return k.outputs(store=lambda f: np.clip(f, F(-65504), F(65504)).astype(np.float16))


@corruption("drelu", also=("relu-passes-at-zero",), shape=SIZE)  # zeros are rare: the name is true of it
def slope_one_at_zero(k):
    """x >= 0 for x > 0."""
    return k.outputs(slope=lambda x: np.where(x >= 0, F(1), F(0)))


# --- sums -------------------------------------------------------------------------------------------------------------


@corruption(
    # The last row is a last chunk of one row: the convention's name is true of it.
    "dgelu",
    DelayedScaling(E5M2, 1.0),
    also=("dbias-last-chunk-missing",),
    shape=(96, 1024),
    dtype=np.float32,
    dbias=True,
)
def dbias_without_the_last_row(k):
    """The last of 96 rows is missing. Float32 sums of 96 terms are known to about 1e-5 in any order."""
    return k.outputs(column_sum=lambda v: v[:-1].sum(axis=0, dtype=F))


@corruption("dsilu", shape=(512, 1024), dbias=True)
def one_dbias_column_added_twice(k):
    """An atomic add ran twice for the last 128 rows of one column."""
    out = k.outputs()
    dx = out["dx"].astype(F)
    out["dbias"][17] = BF16.type(dx[:, 17].sum() + dx[-128:, 17].sum())
    return out


@corruption("scaled_dswiglu", shape=PAIR)
def one_row_gradient_without_its_last_chunk(k):
    """One row scale's gradient misses the last 128 columns."""
    out = k.outputs()
    dy, f = k.load(k.inputs["dy"]), k.forward(k.load(k.inputs["x"]))
    out["drow_scales"][250] = (dy * f)[250, :-128].sum(dtype=F)
    return out
