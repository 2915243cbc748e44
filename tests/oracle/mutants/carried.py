"""Conventions of what a tile takes from another one, and of operands that are exchanged."""

import numpy as np

from mutants.kernels import BF16, F, Kernel, spread, tiles
from mutants.registry import convention
from refops import E4M3, BlockScaling, MXFP8Scaling, NVFP4Scaling

SIZE, PAIR = (512, 1024), (512, 2048)
ROWS, MX, NV = BlockScaling(E4M3, 1), MXFP8Scaling(E4M3), NVFP4Scaling()


# --- amaxes -----------------------------------------------------------------------------------------------------------


def with_rows_before(amax, by):
    """Each row with the one `by` above."""
    return np.concatenate([amax[:by], np.fmax(amax[by:], amax[:-by])])


@convention("amax-carried", "quantize", MX, shape=SIZE)
def mx_amax_of_stage_before(k):
    """The amax registers of two stages of 32 rows are not cleared."""
    return k.outputs(block_amax=lambda v, r, c: with_rows_before(Kernel.block_amax(k, v, r, c), 32))


@convention("amax-carried", "quantize", ROWS, shape=SIZE)
def block_amax_with_block_before(k):
    """The amax of block j is the larger one of blocks j - 1 and j."""
    return k.outputs(block_amax=lambda v, r, c: with_rows_before(Kernel.block_amax(k, v, r, c).T, 1).T)


@convention("amax-of-lines-together", "quantize", MX, shape=SIZE)
def mx_amax_of_row_pairs(k):
    """The shuffle goes over 32 lanes, where 16 share a row."""
    return k.outputs(block_amax=lambda v, r, c: pairs(Kernel.block_amax(k, v, r, c), 2))


def pairs(amax, count):
    """The maximum of `count` rows at a time."""
    return np.repeat(amax.reshape(-1, count, amax.shape[1]).max(axis=1), count, axis=0)


@convention("amax-of-lines-together", "quantize", NV, shape=SIZE)
def nv_amax_of_four_rows(k):
    """Four rows share a warp."""
    return k.outputs(block_amax=lambda v, r, c: pairs(Kernel.block_amax(k, v, r, c), 4))


@convention("rest-of-tile-kept", "quantize", MX, shape=(512, 1008))
def mx_stale_half_block(k):
    """The last block of a row is 16 wide; the rest of the tile holds the block before."""

    def block_amax(v, rows, columns):
        blocks = tiles(v, rows, columns)
        blocks[:, :, -1, 16:] = blocks[:, :, -2, 16:]
        return np.abs(blocks).max(axis=(1, 3))

    return k.outputs(block_amax=block_amax)


@convention("short-block-amax-scaled", "quantize", MX, shape=(512, 1008))
def mx_short_block_doubled(k):
    """The maximum is made like a mean: times 32 / 16."""

    def block_amax(v, rows, columns):
        amax = Kernel.block_amax(k, v, rows, columns)
        amax[:, -1] *= F(2)
        return amax

    return k.outputs(block_amax=block_amax)


@convention("neighbour-line-scale", "quantize", MX, shape=SIZE)
def mx_cast_with_scale_of_row_above(k):
    """The index of the scale in shared memory is one row off."""

    def mx_spread(scales, rows, columns, shape):
        above = np.maximum(np.arange(len(scales)) - 1, 0)
        return spread(scales[above], rows, columns, shape)

    return k.outputs(mx_spread=mx_spread)


@convention("neighbour-line-scale", "dequantize", MX, shape=SIZE)
def mx_read_with_scale_of_row_below(k):
    """The scale's row is i + 1."""
    return k.outputs(scales_read=lambda scales: scales[np.minimum(np.arange(len(scales)) + 1, SIZE[0] - 1)])


# --- operands ---------------------------------------------------------------------------------------------------------


@convention("half-read-twice", "reglu", shape=PAIR)
def reglu_of_act_and_act(k):
    """The gate's address lacks the offset H."""
    return k.outputs(split=lambda x: (Kernel.split(k, x)[0],) * 2)


@convention("input-shifted", "geglu", shape=PAIR)
def geglu_gate_of_row_above(k):
    """The gate comes from the row above."""

    def split(x):
        act, gate = Kernel.split(k, x)
        return act, gate[np.maximum(np.arange(len(gate)) - 1, 0)]

    return k.outputs(split=split)


@convention(("other-half-missing", "factor-missing"), "swiglu", MX, shape=PAIR)
def swiglu_without_gate(k):
    """silu(act) is written."""
    return k.outputs(gate=np.ones_like)


@convention("other-half-missing", "dgeglu", shape=PAIR)
def dgeglu_of_halves_alone(k):
    """Neither half is multiplied by the other."""
    return k.outputs(gate=np.ones_like, between=np.ones_like)


@convention("activation-missing", "silu", MX, shape=SIZE, columnwise=True)
def silu_not_applied(k):
    """x is quantized."""
    return k.outputs(value=lambda x: x)


@convention(("activation-missing", "factor-missing"), "dgelu", shape=SIZE)
def dgelu_writes_dy(k):
    """dx = dy."""
    return k.outputs(slope=np.ones_like)


@convention(("gradient-of-other-half", "swapped-halves"), "dswiglu", MX, shape=PAIR, columnwise=True)
def dswiglu_halves_exchanged(k):
    """[d_gate | d_act]."""
    return k.outputs(join=lambda d_act, d_gate: np.concatenate([d_gate, d_act], axis=1))


@convention("input-shifted", "scaled_swiglu", shape=PAIR)
def scaled_swiglu_by_row_below(k):
    """The token's probability is read one too far."""

    def row_scale(f):
        scales = k.inputs["row_scales"].reshape(-1, 1)
        return f * scales[np.minimum(np.arange(len(f)) + 1, len(f) - 1)].astype(F)

    return k.outputs(row_scale=row_scale)


@convention("row-scale-twice", "scaled_swiglu", shape=PAIR, dtype=BF16)
def scaled_swiglu_scaled_twice(k):
    """Both the kernel and its epilogue multiply."""
    return k.outputs(row_scale=lambda f: Kernel.row_scale(k, Kernel.row_scale(k, f)))
