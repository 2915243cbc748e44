"""Conventions of NVFP4: nibbles, two levels of scales, tiles, Hadamard transform, stochastic rounding, 4over6."""

import numpy as np

from mutants.blocks import before, pairwise
from mutants.kernels import (
    F,
    Kernel,
    cast,
    decode,
    gemm_order,
    hadamard_matrix,
    pack,
    read_in_gemm_order,
    spread,
    unpack,
)
from mutants.registry import convention
from mutants.values import swapped_split
from refops import NVFP4Scaling

SIZE, PAIR = (512, 1024), (512, 2048)
NV = NVFP4Scaling()
NV_2D = NVFP4Scaling(two_d=True)
NV_RHT = NVFP4Scaling(rht=True)
NV_SR = NVFP4Scaling(stochastic_rounding=True, seed=1234, offset=8)
NV_MAE = NVFP4Scaling(four_over_six="mae", e4m3_max=256)
NV_MSE = NVFP4Scaling(four_over_six="mse", e4m3_max=448)
NV_ROW = NVFP4Scaling(row_scaled=True)


# --- nibbles and layout -----------------------------------------------------------------------------------------------


def swapped(data):
    """The two codes of each byte exchanged."""
    return (data >> 4 | data << 4).astype(np.uint8)


@convention("swapped-nibbles", "quantize", NV, shape=SIZE)
def first_code_in_the_high_nibble(k):
    """The first element sits in the high nibble."""
    out = k.outputs()
    return out | {"rowwise_data": swapped(out["rowwise_data"])}


@convention("swapped-nibbles", "swiglu", NV, shape=PAIR, columnwise=True)
def swiglu_first_code_in_the_high_nibble(k):
    """The same behind an activation, in both directions."""
    out = k.outputs()
    return out | {name: swapped(out[name]) for name in ("rowwise_data", "columnwise_data")}


@convention("scales-swizzled", "quantize", NV, shape=SIZE)
def nv_gemm_order(k):
    """Scales in GEMM order where row-major is asked for."""
    out = k.outputs()
    return out | {"rowwise_scale_inv": gemm_order(out["rowwise_scale_inv"])}


@convention("scales-unpadded", "quantize", NV, shape=(496, 1040))
def nv_scales_packed(k):
    """Scales packed with 65 bytes a row into the buffer whose rows have 68."""
    out = k.outputs()
    scales = out["rowwise_scale_inv"]
    packed = scales[:496, :65].reshape(-1)
    return out | {"rowwise_scale_inv": np.pad(packed, (0, scales.size - packed.size)).reshape(scales.shape)}


@convention("scales-transposed", "quantize", NV, shape=(512, 1024))
def nv_scales_block_major(k):
    """Scales stored [block, row]."""
    out = k.outputs()
    scales = out["rowwise_scale_inv"]
    return out | {"rowwise_scale_inv": np.ascontiguousarray(scales.T).reshape(scales.shape)}


@convention("swapped-directions", "quantize", NV, shape=(512, 512), columnwise=True)
def nv_directions_exchanged(k):
    """The two output pointers are exchanged."""
    out = k.outputs()
    other = {"rowwise": "columnwise", "columnwise": "rowwise"}
    swapped_out = {f"{d}_{what}": out[f"{other[d]}_{what}"] for d in other for what in ("data", "scale_inv")}
    return out | swapped_out


# --- scales -----------------------------------------------------------------------------------------------------------


def one_level(k, least):
    """Pieces of a kernel whose block scale is E4M3(amax / 6), at least `least`, without the tensor's scale."""
    return {
        "nv_byte": lambda amax, s_enc: cast(np.fmax(amax / F(6), F(least)), "e4m3"),
        "nv_multiplier": lambda byte, s_enc: np.fmin(F(1) / decode(byte, "e4m3"), np.finfo(F).max),
    }


@convention("missing-global-scale", "quantize", NV, shape=SIZE)
def nv_without_global_scale(k):
    """The block scale is amax / 6 in E4M3."""
    return k.outputs(**one_level(k, 0))


@convention("one-level-nvfp4", "quantize", NV, shape=SIZE, data="tiny_blocks")
def nv_one_level_clamped(k):
    """The same, at least 2^-6: the one-level mode of a public library."""
    return k.outputs(**one_level(k, 2.0**-6))


@convention("clamped-block-scale", "quantize", NV, shape=SIZE, data="tiny_blocks")
def nv_scale_at_least_2_to_minus_6(k):
    """Two levels, but block scales are clamped to E4M3's least normal number."""

    def nv_byte(amax, s_enc):
        return cast(np.clip(amax * (s_enc * (F(1) / F(6))), F(2.0**-6), F(448)), "e4m3")

    return k.outputs(nv_byte=nv_byte)


@convention("zero-block-scale", "quantize", NV, shape=SIZE, data="zero_blocks")
def nv_zero_block_gets_one(k):
    """A block of zeros stores the scale 1 instead of 0."""
    right = k.nv_byte
    return k.outputs(nv_byte=lambda amax, s_enc: np.where(amax == 0, np.uint8(0x38), right(amax, s_enc)))


@convention("zero-block-nan", "quantize", NV, shape=SIZE, data="zero_blocks")
def nv_zero_block_times_inf(k):
    """S_enc / 0 for a block whose scale is 0."""
    right = k.nv_multiplier
    return k.outputs(nv_multiplier=lambda byte, s_enc: np.where(byte == 0, F(np.inf), right(byte, s_enc)))


@convention("zero-block-guard", "quantize", NV, shape=SIZE, data="tiny_blocks")
def nv_scale_0_stands_for_zeros(k):
    """scale == 0 ? 0 : S_enc / scale, though a block whose scale rounds to 0 need not be zero."""
    right = k.nv_multiplier
    return k.outputs(nv_multiplier=lambda byte, s_enc: np.where(byte == 0, F(0), right(byte, s_enc)))


@convention("missing-global-scale", "quantize", NV, shape=SIZE, columnwise=True)
def nv_amax_buffer_still_0(k):
    """The kernel that finds the amax did not run: the cast reads 0 and takes S_enc = 1."""
    return k.outputs(tensor_amax=lambda v: F(0))


@convention("amax-slot-holds-scale", "quantize", NV, shape=SIZE, columnwise=True)
def nv_encode_scale_in_the_amax_of_columns(k):
    """S_enc in place of the columnwise amax."""
    out = k.outputs()
    return out | {"amax_columnwise": k.global_scale(out["amax_columnwise"])}


@convention("stale-amax", "quantize", NV, shape=SIZE)
def nv_global_amax_of_the_step_before(k):
    """The tensor's amax is last step's, 1.31 times this one's."""
    amax = F(k.tensor_amax(k.load(k.inputs["x"])) * F(1.31))
    return k.outputs(tensor_amax=lambda v: amax)


@convention("neighbour-block-scale", "quantize", NV, shape=SIZE)
def nv_scale_of_the_block_before(k):
    """Block j uses and stores the scale of block j - 1."""
    return k.outputs(block_amax=lambda v, r, c: before(Kernel.block_amax(k, v, r, c)))


@convention("tensor-scale-for-blocks", "quantize", NV, shape=SIZE)
def nv_one_scale_for_all(k):
    """Every block gets the byte of the tensor's amax."""

    def block_amax(v, rows, columns):
        return np.full_like(Kernel.block_amax(k, v, rows, columns), k.tensor_amax(v))

    return k.outputs(block_amax=block_amax)


@convention("two-d-ignored", "quantize", NV_2D, shape=SIZE)
def nv_1x16_for_16x16(k):
    """Each row of a 16x16 tile has a scale of its own."""
    return k.outputs(nv_edge=lambda: 1)


@convention("two-d-scales", "quantize", NV, shape=SIZE, columnwise=True)
def nv_16x16_for_1x16(k):
    """One scale for 16x16 elements."""
    return k.outputs(nv_edge=lambda: 16)


@convention("wrong-block-size", "quantize", NV, shape=SIZE)
def nv_32_for_16(k):
    """The amax runs over 32 elements, as in MX formats: two blocks share a scale."""
    return k.outputs(block_amax=lambda v, r, c: pairwise(Kernel.block_amax(k, v, r, c)))


@convention("other-format-max", "quantize", NV_MAE, shape=SIZE)
def nv_448_for_256(k):
    """e4m3_max=256 is ignored: scales reach 448."""
    return k.outputs(scaling=NVFP4Scaling(four_over_six="mae"))


@convention("wrong-axis-amax", "quantize", NV_ROW, shape=(512, 512))
def nv_amax_of_columns_for_rows(k):
    """Row scaling by the amaxes of the columns."""
    return k.outputs(nv_amax=lambda wide: k.maximum(k.magnitude(wide), axis=0))


@convention("row-amax-missing", "quantize", NV_ROW, shape=SIZE)
def nv_tensor_amax_for_rows(k):
    """Row scaling asked for, every row gets the tensor's amax."""
    return k.outputs(nv_amax=lambda wide: np.full(len(wide), k.tensor_amax(wide), F))


@convention("signed-amax", "quantize", NV, shape=SIZE, data="negative_tail")
def nv_maximum_without_magnitude(k):
    """max(x) for max |x|, for blocks and tensor."""
    return k.outputs(magnitude=lambda v: v)


@convention("divided-by-scale", "quantize", NV, shape=SIZE, data="amax_10_5")
def nv_divides(k):
    """x / (scale * 1/S_enc) for x * (1 / ...)."""

    def candidate(v, byte, s_enc, edge):
        divisor = spread(decode(byte, "e4m3") * (F(1) / s_enc), edge, 16, v.shape)
        return cast(np.where(divisor == 0, np.copysign(F(0), v), v / divisor), "e2m1")

    return k.outputs(nv_candidate=candidate)


# --- casts ------------------------------------------------------------------------------------------------------------


def e2m1_cut(v):
    """E2M1 by truncation."""
    a = np.fmin(np.abs(v), F(6))
    step = np.where(a < 2, F(0.5), np.where(a < 4, F(1), F(2)))
    return cast(np.copysign(np.floor(a / step) * step, v), "e2m1")


def e2m1_ties_away(v):
    """E2M1 with ties away from zero: the thresholds belong to the upper value."""
    a = np.abs(v)
    code = sum((a >= F(t)).astype(np.uint8) for t in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5))
    return code | (np.signbit(v).astype(np.uint8) << 3)


@convention("ties-away", "quantize", NV, shape=SIZE, data="amax_10_5")
def nv_ties_away(k):
    """Comparisons with >= throughout."""
    return k.outputs(cast=e2m1_ties_away)


@convention("truncation", "quantize", NV_2D, shape=SIZE)
def nv_truncated(k):
    """The cast drops the low bits."""
    return k.outputs(cast=e2m1_cut)


@convention("sign-lost", "quantize", NV, shape=SIZE)
def nv_magnitudes(k):
    """The sign bit is dropped."""
    return k.outputs(cast=lambda v: cast(np.abs(v), "e2m1"))


@convention("sign-inverted", "quantize", NV, shape=SIZE, columnwise=True)
def nv_negated(k):
    """-x is quantized: scales and amaxes are right."""
    load = k.load
    return k.outputs(load=lambda array: -load(array))


@convention("zero-sign-lost", "quantize", NV, shape=SIZE)
def nv_negative_zero_lost(k):
    """What rounds to -0 is written as +0."""

    def without(v):
        codes = cast(v, "e2m1")
        return np.where(codes == 8, np.uint8(0), codes)

    return k.outputs(cast=without)


@convention("nan-as-a-number", "quantize", NV, shape=SIZE, data="with_nan")
def nv_nan_written_as_zero(k):
    """NaN gives 0; the hardware gives 6."""
    return k.outputs(cast=lambda v: np.where(np.isnan(v), np.uint8(0), cast(v, "e2m1")))


# --- behind an activation ---------------------------------------------------------------------------------------------


@convention("missing-rounding", "swiglu", NV, shape=PAIR)
def swiglu_nv_unrounded(k):
    """Blocks come from float32 values; TE's from bfloat16 ones."""
    return k.outputs(before_cast=lambda f: f)


@convention("amax-rounded", "geglu", NV, shape=PAIR)
def geglu_nv_amax_rounded(k):
    """The tensor's amax is that of the bfloat16 tensor, not of float32 values."""
    return k.outputs(before_amax=k.rounded)


@convention("amax-unrounded", "swiglu", NV_RHT, shape=PAIR, data="coarse")
def swiglu_rht_amax_unrounded(k):
    """With RHT the kernel is unfused and the rowwise amax is of rounded values; here of float32 ones."""
    return k.outputs(before_amax=lambda f: f)


@convention("gate-order", "swiglu", NV, shape=PAIR)
def swiglu_nv_gate_first(k):
    """[gate | act], quantized."""
    return k.outputs(split=swapped_split)


# --- Hadamard transform -----------------------------------------------------------------------------------------------

RHT = {"shape": (512, 1024), "data": "coarse", "columnwise": True}


@convention("hadamard-missing", "quantize", NV_RHT, **RHT)
def rht_left_out(k):
    """The columnwise copy is quantized as it is."""
    return k.outputs(hadamard=lambda v: v)


@convention("hadamard-signs-missing", "quantize", NV_RHT, **RHT)
def rht_without_signs(k):
    """The plain Hadamard transform."""
    signs = np.where(k.scaling.sign_mask >> np.arange(16) & 1, -1.0, 1.0)[:, None]
    matrix = k.hadamard_matrix() * signs
    return k.outputs(hadamard_matrix=lambda: matrix)


@convention("hadamard-other-signs", "quantize", NV_RHT, **RHT)
def rht_with_a_mask_of_its_own(k):
    """Signs drawn by the kernel's author instead of the mask of the settings."""
    matrix = hadamard_matrix(0x1B7C)
    return k.outputs(hadamard_matrix=lambda: matrix)


@convention("hadamard-other-signs", "quantize", NVFP4Scaling(rht=True, sign_mask=0x2A5F), **RHT)
def rht_with_one_sign_wrong(k):
    """Bit 9 of the mask flipped."""
    matrix = hadamard_matrix(0x2A5F ^ 1 << 9)
    return k.outputs(hadamard_matrix=lambda: matrix)


@convention("hadamard-unnormalised", "quantize", NV_RHT, **RHT)
def rht_without_the_quarter(k):
    """Sums without the factor 1/4: amax and data 4 times too large."""
    matrix = k.hadamard_matrix() * 4
    return k.outputs(hadamard_matrix=lambda: matrix)


@convention("hadamard-rowwise-too", "quantize", NV_RHT, **RHT)
def rht_of_rows(k):
    """The rowwise copy is transformed too, along its rows."""

    def row_values(v):
        return np.ascontiguousarray(k.hadamard(np.ascontiguousarray(v.T)).T)

    return k.outputs(row_values=row_values)


@convention("hadamard-amax-before", "quantize", NV_RHT, **RHT)
def rht_amax_before(k):
    """The columnwise amax is the untransformed tensor's."""
    return k.outputs(column_amax=lambda wide, transformed: k.nv_amax(wide.T))


# --- stochastic rounding ----------------------------------------------------------------------------------------------


@convention("nearest-for-stochastic", "quantize", NV_SR, shape=(256, 1024))
def sr_to_nearest(k):
    """Nearest even where stochastic rounding is asked for."""
    return k.outputs(stochastic=lambda v, random: cast(v, "e2m1"))


@convention("other-random-bits", "quantize", NV_SR, shape=(256, 1024))
def sr_with_its_own_generator(k):
    """Random bits from another generator."""
    return k.outputs(random_bytes=lambda rows, columns, first: k.rng.integers(0, 256, (rows, columns), np.uint8))


@convention("random-number-shared", "quantize", NV_SR, shape=(256, 1024), columnwise=True)
def sr_with_one_number_a_thread(k):
    """Each thread draws once for the row that it casts."""

    def random_bytes(rows, columns, first):
        return np.repeat(k.rng.integers(0, 256, (rows, 1), np.uint8), columns, axis=1)

    return k.outputs(random_bytes=random_bytes)


@convention("random-number-shared", "swiglu", NV_SR, shape=(256, 1024))
def swiglu_sr_with_one_byte_a_word(k):
    """The low byte of each word of Philox serves all four elements of the word."""
    right = k.random_bytes
    return k.outputs(
        random_bytes=lambda rows, columns, first: np.repeat(right(rows, columns, first)[:, ::4], 4, axis=1)
    )


@convention("random-number-shared", "quantize", NV_SR, shape=(256, 512))
def sr_with_one_number_a_call(k):
    """The random byte is an argument of the kernel."""
    return k.outputs(random_bytes=lambda rows, columns, first: np.full((rows, columns), 75, np.uint8))


# --- 4over6 -----------------------------------------------------------------------------------------------------------


@convention("four-over-six-missing", "quantize", NV_MSE, shape=SIZE)
def maximum_always_six(k):
    """Only the map to 6."""
    return k.outputs(choose_four=lambda error6, error4: np.zeros(error6.shape, bool))


@convention("four-always", "quantize", NV_MAE, shape=SIZE)
def maximum_always_four(k):
    """Only the map to 4."""
    return k.outputs(choose_four=lambda error6, error4: np.ones(error6.shape, bool))


@convention("other-error-metric", "quantize", NV_MSE, shape=SIZE)
def choice_by_absolute_error(k):
    """Mean absolute error for mean squared error."""
    return k.outputs(error=np.abs)


@convention(("swapped-nibbles", "missing-global-scale"), "quantize", NV, both=True, shape=SIZE)
def nv_high_nibble_first_and_no_global_scale(k):
    """Two faults."""
    out = k.outputs(**one_level(k, 0))
    return out | {"rowwise_data": swapped(out["rowwise_data"])}


# --- dequantize -------------------------------------------------------------------------------------------------------


@convention("missing-global-scale", "dequantize", NV, shape=SIZE)
def nv_read_without_global_scale(k):
    """code * block scale."""
    return k.outputs(global_amax=lambda amax: np.ones_like(amax), tail_factor=lambda: F(1))


@convention("missing-factor", "dequantize", NV, shape=SIZE)
def nv_read_without_2688(k):
    """code * block scale * amax, the 1 / (6 * 448) left out."""
    return k.outputs(tail_factor=lambda: F(1))


@convention("swapped-nibbles", "dequantize", NV, shape=SIZE)
def nv_read_high_nibble_first(k):
    """The high nibble is taken as the first element."""
    return k.outputs(codes_read=lambda data: decode(unpack(swapped(data)), "e2m1"))


@convention("scales-swizzled", "dequantize", NV, shape=SIZE)
def nv_gemm_order_read(k):
    """The scales are read as if they were in GEMM order."""
    return k.outputs(scales_read=read_in_gemm_order)


@convention("hadamard-missing", "dequantize", NV_RHT, shape=SIZE, data="coarse", rowwise=False, columnwise=True)
def rht_not_undone(k):
    """Columnwise data come back without the inverse transform."""
    return k.outputs(inverse_hadamard=lambda v: v)


@convention("hadamard-other-signs", "dequantize", NV_RHT, shape=SIZE, data="coarse", rowwise=False, columnwise=True)
def rht_undone_with_another_mask(k):
    """The inverse transform takes another layer's mask."""
    matrix = hadamard_matrix(0x1B7C)
    return k.outputs(hadamard_matrix=lambda: matrix)


# --- what elements are multiplied by ----------------------------------------------------------------------------------


@convention("multiplier-of-other-copy", "quantize", NV, shape=SIZE, columnwise=True)
def nv_columns_cast_with_scales_of_rows(k):
    """The multiplier of 1 x 16 blocks is in the register when the columns are cast."""
    v = k.computed()
    s_enc = k.global_scale(k.nv_amax(v))[:, None]
    multiplier = k.nv_multiplier(k.nv_byte(k.block_amax(v, 1, 16), s_enc), s_enc)
    return k.outputs() | {"columnwise_data": pack(k.cast((v * spread(multiplier, 1, 16, v.shape)).T))}


@convention("multiplier-missing", "quantize", NV, shape=SIZE)
def nv_cast_with_the_tensor_scale_alone(k):
    """x S_enc: the block scale is stored, and not divided by."""
    return k.outputs(nv_multiplier=lambda byte, s_enc: np.broadcast_to(s_enc, byte.shape))


@convention("multiplier-slightly-off", "quantize", NV, shape=SIZE, data="heavy")
def nv_multiplier_rounded_down(k):
    """__frcp_rd in place of 1 / x: the reciprocal, and what it is made of, are one unit in the last place low."""
    right = k.nv_multiplier
    return k.outputs(nv_multiplier=lambda byte, s_enc: np.nextafter(right(byte, s_enc), F(0)))


@convention("multiplier-slightly-off", "quantize", NV_2D, shape=SIZE, dtype=np.float16, data="heavy")
def nv_multiplier_one_step_high(k):
    """Each multiplier is the next float32 number."""
    right = k.nv_multiplier
    return k.outputs(nv_multiplier=lambda byte, s_enc: np.nextafter(right(byte, s_enc), F(np.inf)))
