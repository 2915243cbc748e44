"""Conventions of arrays times a constant, of sums with a part too much or too little, and of amaxes of a part."""

import numpy as np

from mutants.kernels import BF16, F, Kernel, cast, decode, limit_of, tiles
from mutants.registry import convention
from refops import E4M3, E5M2, BlockScaling, CurrentScaling, DelayedScaling, MXFP8Scaling, NVFP4Scaling

SIZE, PAIR = (256, 512), (256, 1024)
CURRENT, DELAYED = CurrentScaling(E4M3), DelayedScaling(E4M3, 3.7)
BLOCKS = BlockScaling(E4M3, 1, power_2_scale=False)
TILES = BlockScaling(E4M3, 2, power_2_scale=False)
MX, NV = MXFP8Scaling(E4M3), NVFP4Scaling()


# --- times a constant -------------------------------------------------------------------------------------------------


@convention("constant-factor", "silu", shape=SIZE)
def values_twice(k):
    """2 silu(x)."""
    return k.outputs(store=lambda f: (F(2) * f).astype(BF16))


@convention("constant-factor", "dgelu", shape=SIZE)
def gradient_divided_by_the_rows(k):
    """dx / M: the mean of a loss is taken once more."""
    return k.outputs(store=lambda f: (f / F(256)).astype(BF16))


@convention("constant-factor", "gelu", shape=SIZE, dtype=np.float32)
def values_times_an_unknown_number(k):
    """A dropout's 1 / 0.9 that nobody asked for."""
    return k.outputs(store=lambda f: f * F(1 / 0.9))


@convention("constant-factor", "dgelu", shape=SIZE, dbias=True)
def dbias_is_a_mean(k):
    """dbias divided by the number of rows."""
    return k.outputs(column_sum=lambda v: v.sum(axis=0, dtype=F) / F(256))


@convention("constant-factor", "dsilu", DELAYED, shape=SIZE, dbias=True)
def dbias_of_scaled_values(k):
    """dbias sums what is cast: it is the encode scale times too large."""
    return k.outputs(column_sum=lambda v: v.sum(axis=0, dtype=F) * F(3.7))


@convention("constant-factor", "quantize", CURRENT, shape=SIZE)
def current_scale_inv_is_the_amax(k):
    """scale_inv = amax: the division by 448 is missing; the data are right."""
    return k.outputs(stored_scale=lambda scale: np.asarray(F(448) / scale, F))


@convention("constant-factor", "quantize", BLOCKS, shape=SIZE)
def block_scale_inv_twice(k):
    """Each stored scale is doubled."""
    return k.outputs(stored_scale=lambda scale: (F(2) / scale).astype(F))


@convention("constant-factor", "quantize", TILES, shape=SIZE)
def tile_multiplier_three_quarters(k):
    """Scale and codes keep a headroom of 3/4."""
    right = k.scale_of
    return k.outputs(scale_of=lambda amax: right(amax) * F(0.75))


@convention("constant-factor", "quantize", NV, shape=SIZE)
def nv_scales_lack_a_sixth(k):
    """The stored block scales are 1/6 of the right ones; the codes are right."""
    return k.outputs(nv_stored=lambda byte, s_enc: cast(decode(byte, "e4m3") * F(1 / 6), "e4m3"))


@convention("constant-factor", "quantize", MX, shape=SIZE)
def mx_bias_124(k):
    """The exponents are stored with bias 124."""
    return k.outputs(mx_stored=lambda byte: byte - np.uint8(3))


@convention(
    # A scale times 0.9 is also another scale.
    ("constant-factor", "stale-scale"),
    "quantize",
    DELAYED,
    shape=SIZE,
)
def delayed_product_with_a_margin(k):
    """The data are multiplied by 0.9 scale; scale_inv is right."""
    return k.outputs(product=lambda v, scale: v * scale * F(0.9))


@convention("constant-factor", "quantize", DELAYED, shape=SIZE)
def amax_of_scaled_values(k):
    """The amax is taken behind the multiplication with the scale."""
    out = k.outputs()
    return out | {"amax_rowwise": out["amax_rowwise"] * F(3.7)}


@convention("amax-slot-holds-scale", "quantize", CURRENT, shape=SIZE)
def scale_in_the_amax_slot(k):
    """The slot of the amax holds 448 / amax."""
    out = k.outputs()
    return out | {"amax_rowwise": limit_of("e4m3") / out["amax_rowwise"]}


@convention("amax-slot-holds-scale", "quantize", NV, shape=SIZE)
def nv_scale_in_the_amax_slot(k):
    """The slot of the amax holds 2688 / amax."""
    out = k.outputs()
    return out | {"amax_rowwise": F(2688) / out["amax_rowwise"]}


@convention("amax-slot-holds-scale", "quantize", CURRENT, shape=SIZE)
def scale_inv_in_the_amax_slot(k):
    """The slot of the amax holds scale_inv."""
    out = k.outputs()
    return out | {"amax_rowwise": out["rowwise_scale_inv"].copy()}


# --- sums -------------------------------------------------------------------------------------------------------------


@convention("dbias-part", "dgelu", shape=SIZE, dbias=True)
def dbias_counts_a_chunk_twice(k):
    """Rows 64 to 127 are added by two CTAs."""
    return k.outputs(column_sum=lambda v: v.sum(axis=0, dtype=F) + v[64:128].sum(axis=0, dtype=F))


@convention("dbias-part", "dsilu", MXFP8Scaling(E5M2), shape=SIZE, dbias=True)
def dbias_drops_a_chunk(k):
    """Rows 32 to 63 are never added."""
    return k.outputs(column_sum=lambda v: np.delete(v, slice(32, 64), axis=0).sum(axis=0, dtype=F))


@convention("dbias-part", "dgelu", shape=SIZE, dbias=True)
def dbias_stored_by_the_last_cta(k):
    """Each CTA of 64 rows stores its sum where it should add it: the last one's remains."""
    return k.outputs(column_sum=lambda v: v[-64:].sum(axis=0, dtype=F))


@convention("dbias-part", "dswiglu", shape=PAIR, dbias=True)
def dbias_of_one_warp(k):
    """Warp w adds rows w, w + 8 ...; only warp 0 writes."""
    return k.outputs(column_sum=lambda v: v[0::8].sum(axis=0, dtype=F))


@convention("dbias-low-precision", "dgelu", shape=SIZE, dbias=True)
def dbias_atomics_in_bfloat16(k):
    """Sums of 64 rows are added up by bfloat16 atomics."""

    def column_sum(v):
        total = np.zeros(v.shape[1], F)
        for start in range(0, len(v), 64):
            total = (total + v[start : start + 64].sum(axis=0, dtype=F).astype(BF16).astype(F)).astype(BF16).astype(F)
        return total

    return k.outputs(column_sum=column_sum)


# --- amaxes of a part -------------------------------------------------------------------------------------------------


def partial_amax(k, part):
    """tensor_amax of a part of the values."""
    return lambda v: F(k.maximum(k.magnitude(part(v))))


@convention("amax-of-a-part", "quantize", CURRENT, shape=SIZE, data="peak_at_the_end")
def amax_of_the_first_half(k):
    """A grid of half the size: the rows of the second half are not looked at."""
    return k.outputs(tensor_amax=partial_amax(k, lambda v: v[:128]))


@convention("amax-of-a-part", "quantize", NV, shape=(240, 512), data="peak_at_the_end")
def amax_without_the_tail(k):
    """The last, partial tile of 128 rows has no part in the amax."""
    return k.outputs(tensor_amax=partial_amax(k, lambda v: v[:128]))


@convention("amax-of-a-part", "quantize", DELAYED, shape=SIZE, data="peak_at_the_end")
def amax_of_even_columns(k):
    """Of each packed pair of bfloat16 only the low one is looked at."""
    return k.outputs(tensor_amax=partial_amax(k, lambda v: v[:, 0::2]))


@convention("amax-of-a-part", "quantize", CURRENT, shape=SIZE)
def amax_of_one_shard(k):
    """The amax is not reduced over the four ranks: that of the third quarter of the columns."""
    return k.outputs(tensor_amax=partial_amax(k, lambda v: v[:, 256:384]))


@convention("amax-of-the-input", "gelu", CURRENT, shape=SIZE)
def amax_of_x(k):
    """max |x|, where max |gelu(x)| scales."""
    amax = F(np.abs(k.inputs["x"].astype(F)).max())
    return k.outputs(tensor_amax=lambda v: amax)


@convention("amax-of-the-input", "dgelu", DelayedScaling(E5M2, 1.5), shape=SIZE)
def amax_of_dy(k):
    """max |dy| is written for the history."""
    amax = F(np.abs(k.inputs["dy"].astype(F)).max())
    return k.outputs(tensor_amax=lambda v: amax)


@convention("amax-of-the-input", "swiglu", MX, shape=PAIR)
def block_amaxes_of_act(k):
    """The block's amax is that of act."""
    act = k.inputs["x"][:, :512].astype(F)
    return k.outputs(block_amax=lambda v, rows, columns: Kernel.block_amax(k, act, rows, columns))


@convention("signed-tensor-amax", "quantize", NV, shape=SIZE, data="negative_tail")
def nv_tensor_maximum_without_magnitude(k):
    """max(x) for the tensor, max |x| for the blocks."""
    return k.outputs(tensor_amax=lambda v: F(v.max()))


@convention("block-amax-of-a-part", "quantize", MX, shape=SIZE)
def mx_amax_of_half_a_block(k):
    """The shuffle stops at 16 lanes: the second half of a block has no part in its amax."""
    return k.outputs(block_amax=lambda v, r, c: np.abs(tiles(v, r, c)[..., :16]).max(axis=(1, 3)))


@convention("block-amax-of-a-part", "quantize", NV, shape=SIZE)
def nv_amax_of_even_elements(k):
    """The amax of the low half of each pair."""
    return k.outputs(block_amax=lambda v, r, c: np.abs(tiles(v, r, c)[..., 0::2]).max(axis=(1, 3)))


@convention("block-amax-of-a-part", "quantize", TILES, shape=SIZE)
def tile_amax_of_its_first_rows(k):
    """64 of 128 rows of a tile are looked at."""
    return k.outputs(block_amax=lambda v, r, c: np.abs(tiles(v, r, c)[:, :64]).max(axis=(1, 3)))


@convention("block-amax-of-a-part", "quantize", MX, shape=SIZE, columnwise=True)
def mx_amax_of_three_quarters(k):
    """24 of 32 elements."""

    def block_amax(v, rows, columns):
        blocks = np.abs(tiles(v, rows, columns))
        return (blocks[..., :24] if columns > 1 else blocks[:, :24]).max(axis=(1, 3))

    return k.outputs(block_amax=block_amax)


@convention("block-amax-of-a-part", "swiglu", MX, shape=PAIR)
def swiglu_mx_amax_without_every_fourth(k):
    """A vector of four of which three are looked at."""

    def block_amax(v, rows, columns):
        fours = np.abs(tiles(v, rows, columns)).reshape(len(v) // rows, v.shape[1] // columns, -1, 4)
        return fours[..., :3].max(axis=(2, 3))

    return k.outputs(block_amax=block_amax)


@convention("block-amax-of-a-part", "quantize", BLOCKS, shape=SIZE)
def blocks_amax_of_the_middle(k):
    """Elements 32 to 95 of 128."""
    return k.outputs(block_amax=lambda v, r, c: np.abs(tiles(v, r, c)[..., 32:96]).max(axis=(1, 3)))


@convention("neighbour-tile-amax", "quantize", TILES, shape=(512, 512))
def tile_of_the_row_above(k):
    """Tile (i, j) takes the amax of tile (i - 1, j)."""
    return k.outputs(block_amax=lambda v, r, c: np.roll(Kernel.block_amax(k, v, r, c), 1, axis=0))


@convention(
    "scale-from-one-row",
    "update_delayed_scale",
    params={"fmt": E4M3},
    shape=(16, 512),
    dtype=np.float32,
    data="history",
)
def scale_of_an_older_step(k):
    """The scale follows row 5 of the history."""
    return k.outputs(scale_amax=lambda history: history[5])


# --- one number in all wrong scales -----------------------------------------------------------------------------------


def _from(start):
    """A block's amax that begins with a number."""
    return lambda k: lambda v, r, c: np.maximum(Kernel.block_amax(k, v, r, c), F(start))


@convention("amax-starts-from", "quantize", MX, shape=SIZE, columnwise=True)
def mx_amax_starts_from_one(k):
    """The maximum of a block is taken from 1 on, not from 0."""
    return k.outputs(block_amax=_from(1)(k))


@convention("amax-starts-from", "quantize", BLOCKS, shape=SIZE)
def block_amax_starts_from_a_number(k):
    """The maximum of a block is taken from 3.3 on."""
    return k.outputs(block_amax=_from(3.3)(k))


@convention("amax-starts-from", "quantize", MX, shape=SIZE)
def mx_amax_of_every_fourth_block_starts_from_one(k):
    """The register of every fourth block is initialised with 1."""

    def block_amax(v, r, c):
        amax = Kernel.block_amax(k, v, r, c)
        amax[:, 3::4] = np.maximum(amax[:, 3::4], F(1))
        return amax

    return k.outputs(block_amax=block_amax)


@convention("stale-scale", "quantize", BLOCKS, shape=SIZE)
def block_scale_of_last_rows_stays_one(k):
    """The amax of the last row of each 128 is never reduced: its scales keep their first value, 1."""

    def block_scales(v, r, c):
        scales = Kernel.block_scales(k, v, r, c)
        scales[127::128] = 1
        return scales

    return k.outputs(block_scales=block_scales)


@convention("stale-scale", "quantize", MX, shape=SIZE)
def mx_stored_scales_of_some_rows_stay_one(k):
    """Row 31 of each 32 stores no scale byte: it holds 2^0, which memory was filled with."""
    return k.outputs(mx_stored=lambda byte: np.where(np.arange(len(byte))[:, None] % 32 == 31, np.uint8(127), byte))
