"""Conventions of the 8-bit block formats: FP8 with 1x128 and 128x128 blocks, MXFP8."""

import numpy as np

from mutants.kernels import (
    BF16,
    F,
    Kernel,
    cast,
    decode,
    exponent_byte,
    gemm_order,
    limit_of,
    mx_byte_ocp,
    mx_byte_up,
    read_in_gemm_order,
    spread,
    tiles,
)
from mutants.per_tensor import cast_by_bits
from mutants.registry import convention
from mutants.values import erf_gelu, swapped_split, truncated
from refops import E2M3, E4M3, E5M2, BlockScaling, MXFP8Scaling

SIZE, PAIR = (512, 1024), (512, 2048)
ROWS = BlockScaling(E4M3, 1)
TILES = BlockScaling(E4M3, 2)
MX = MXFP8Scaling(E4M3)
MX_E5M2 = MXFP8Scaling(E5M2)
MX_2D = MXFP8Scaling(E4M3, two_d=True)
MX_FLOOR = MXFP8Scaling(E4M3, scale_rounding="floor")


# --- float32 block scales ---------------------------------------------------------------------------------------------


@convention("tensor-scale-for-blocks", "quantize", ROWS, shape=SIZE, data="heavy")
def one_scale_for_all_blocks(k):
    """Every block gets the tensor's scale."""

    def block_amax(v, rows, columns):
        return np.full_like(Kernel.block_amax(k, v, rows, columns), k.tensor_amax(v))

    return k.outputs(block_amax=block_amax)


@convention("neighbour-block-scale", "quantize", ROWS, shape=SIZE)
def scale_of_the_block_before(k):
    """The scale index is one too small: block j uses and stores the scale of block j - 1 (block 0 its own)."""
    return k.outputs(block_amax=lambda v, r, c: before(Kernel.block_amax(k, v, r, c)))


def before(a):
    """Each column's left neighbour; the first stays."""
    return a[:, np.maximum(np.arange(a.shape[1]) - 1, 0)]


@convention("scales-transposed", "quantize", ROWS, shape=(512, 2048))
def row_scales_row_major(k):
    """Scales stored [row, block]; 1x128 blocks want [block, row]."""
    out = k.outputs()
    scales = out["rowwise_scale_inv"]
    return out | {"rowwise_scale_inv": np.ascontiguousarray(scales.T).reshape(scales.shape)}


@convention("power-of-two-missing", "quantize", ROWS, shape=SIZE)
def block_scale_not_rounded(k):
    """power_2_scale, the default, is ignored."""
    return k.outputs(power_of_two=lambda scale: scale)


@convention("power-of-two-extra", "quantize", BlockScaling(E4M3, 2, power_2_scale=False), shape=SIZE)
def tile_scale_rounded(k):
    """Scales are powers of two though power_2_scale=False."""
    return k.outputs(power_of_two=lambda s: (np.asarray(s, F).view(np.uint32) & np.uint32(0x7F800000)).view(F))


@convention("epsilon-extra", "quantize", BlockScaling(E4M3, 1, power_2_scale=False), shape=SIZE, data="tiny_blocks")
def amax_at_least_1e_4(k):
    """Block amaxes are clamped to 1e-4, as some inference kernels do."""
    return k.outputs(floor_amax=lambda amax: np.fmax(amax, F(1e-4)))


@convention("inverted-scale", "quantize", TILES, shape=SIZE, columnwise=True)
def tile_encode_scale_stored(k):
    """scale stored for 1 / scale."""
    return k.outputs(stored_scale=lambda scale: scale.astype(F))


@convention("zero-block-scale", "quantize", ROWS, shape=SIZE, data="zero_blocks")
def zero_block_gets_zero(k):
    """A block of zeros stores amax / max = 0 instead of 1."""

    def block_scales(v, rows, columns):
        amax = k.block_amax(v, rows, columns)
        return np.where(amax == 0, F(np.inf), k.scale_of(amax)).astype(F)

    return k.outputs(block_scales=block_scales, cast=lambda v: cast(np.where(np.isnan(v), F(0), v), "e4m3"))


@convention("zero-block-nan", "quantize", ROWS, shape=SIZE, data="zero_blocks")
def zero_block_of_rows_times_inf(k):
    """448 / 0 for a block of zeros, whose stored scale is guarded."""

    def block_scales(v, rows, columns):
        amax = k.block_amax(v, rows, columns)
        return np.where(amax == 0, F(np.inf), k.scale_of(amax)).astype(F)

    stored = k.stored_scale
    return k.outputs(
        block_scales=block_scales, stored_scale=lambda scale: np.where(np.isinf(scale), F(1), stored(scale)).astype(F)
    )


@convention("swapped-directions", "quantize", ROWS, shape=(512, 512), columnwise=True)
def rowwise_and_columnwise_exchanged(k):
    """The two output pointers are exchanged."""
    out = k.outputs()
    other = {"rowwise": "columnwise", "columnwise": "rowwise"}
    return {f"{d}_{what}": out[f"{other[d]}_{what}"] for d in other for what in ("data", "scale_inv")}


@convention("data-transposed", "quantize", TILES, shape=(512, 768), columnwise=True)
def tile_columnwise_not_transposed(k):
    """columnwise_data in rowwise order, the scales right."""
    out = k.outputs()
    return out | {"columnwise_data": out["rowwise_data"].reshape(out["columnwise_data"].shape)}


@convention("e4m3-max-240", "quantize", BlockScaling(E4M3, 2, power_2_scale=False), shape=SIZE)
def tile_numerator_240(k):
    """240 / amax."""
    return k.outputs(largest=lambda: F(240))


@convention("missing-rounding", "swiglu", BlockScaling(E4M3, 1, power_2_scale=False), shape=PAIR)
def swiglu_block_unrounded(k):
    """Amax and cast see the float32 activation; block scaling is unfused in TE and sees bfloat16."""
    return k.outputs(before_cast=lambda f: f)


@convention(("stale-amax", "constant-factor"), "quantize", BlockScaling(E4M3, 1, power_2_scale=False), shape=SIZE)
def block_amaxes_of_the_step_before(k):
    """All block amaxes are 1.25 times the right ones: those of a tensor with another loss scale."""
    return k.outputs(block_amax=lambda v, r, c: Kernel.block_amax(k, v, r, c) * F(1.25))


@convention("scale-rounded-to-bf16", "quantize", BlockScaling(E5M2, 1, power_2_scale=False), shape=SIZE)
def block_scale_in_bfloat16(k):
    """Scales kept in bfloat16."""
    right = k.scale_of
    return k.outputs(scale_of=lambda amax: right(amax).astype(BF16).astype(F))


@convention("signed-amax", "quantize", TILES, shape=SIZE, data="negative_tail")
def tile_maximum_without_magnitude(k):
    """max(x) for max |x|."""
    return k.outputs(magnitude=lambda v: v)


# --- MXFP8 ------------------------------------------------------------------------------------------------------------


@convention("scale-floor", "quantize", MX, shape=SIZE)
def mx_floor(k):
    """The OCP specification's example: 2^(floor(log2 amax) - 8)."""
    return k.outputs(mx_byte=lambda amax: mx_byte_ocp(amax, "e4m3", "floor"))


@convention("scale-floor", "swiglu", MX, shape=PAIR, columnwise=True)
def swiglu_mx_floor(k):
    """The same behind an activation, in both directions."""
    return k.outputs(mx_byte=lambda amax: mx_byte_ocp(amax, "e4m3", "floor"))


@convention("scale-even", "quantize", MX, shape=SIZE)
def mx_even(k):
    """amax rounded half up to 3 mantissa bits, then its exponent - 8."""
    return k.outputs(mx_byte=lambda amax: mx_byte_ocp(amax, "e4m3", "even"))


@convention("scale-ceil-ocp", "quantize", MX_E5M2, shape=SIZE)
def mx_ceil(k):
    """2^(ceil(log2 amax) - 15)."""
    return k.outputs(mx_byte=lambda amax: mx_byte_ocp(amax, "e5m2", "ceil_ocp"))


@convention("scale-nearest", "quantize", MX, shape=SIZE)
def mx_nearest(k):
    """2^round(log2(amax / 448))."""
    return k.outputs(mx_byte=lambda amax: exponent_byte(np.rint(np.log2(amax / F(448))), amax))


@convention("scale-log2", "quantize", MX, shape=SIZE, dtype=np.float32, data="above_powers_of_two")
def mx_ceil_of_float_log2(k):
    """ceil(log2f(amax / 448)): log2f rounds what is just above a power of two to the integer below."""
    return k.outputs(mx_byte=lambda amax: exponent_byte(np.ceil(np.log2(amax / F(448))), amax))


@convention("scale-off-by-one", "quantize", MX, shape=SIZE)
def mx_bias_128(k):
    """The exponent is stored with bias 128; the data are right."""
    return k.outputs(mx_stored=lambda byte: byte + np.uint8(1))


@convention("inverted-scale", "quantize", MX, shape=SIZE)
def mx_encode_scale_stored(k):
    """2^-e stored for 2^e: byte 254 - b."""
    return k.outputs(mx_stored=lambda byte: np.uint8(254) - byte)


@convention("zero-block-scale", "quantize", MX, shape=SIZE, data="zero_blocks")
def mx_zero_block_gets_one(k):
    """A block of zeros gets the scale 1, byte 127, for 2^-127."""
    right = k.mx_byte
    return k.outputs(mx_byte=lambda amax: np.where(amax == 0, np.uint8(127), right(amax)))


@convention("zero-block-nan", "quantize", MX, shape=SIZE, data="zero_blocks", columnwise=True)
def mx_zero_block_times_inf(k):
    """1 / bits(byte << 23): of byte 0 that is 1 / 0."""
    right = k.mx_multiplier
    return k.outputs(mx_multiplier=lambda byte: np.where(byte == 0, F(np.inf), right(byte)))


@convention("zero-block-guard", "quantize", MX, dtype=F, shape=SIZE, data="vanishing_rows")
def mx_byte_0_stands_for_zeros(k):
    """byte ? x * 2^(127 - byte) : 0, though a block of byte 0 need not be zero."""
    right = k.mx_multiplier
    return k.outputs(mx_multiplier=lambda byte: np.where(byte == 0, F(0), right(byte)))


@convention("scales-swizzled", "quantize", MX, shape=SIZE)
def mx_gemm_order(k):
    """Scales in GEMM order where row-major is asked for."""
    out = k.outputs()
    return out | {"rowwise_scale_inv": gemm_order(out["rowwise_scale_inv"])}


def swizzled_otherwise(k, write):
    """The outputs with `write` of the rowwise scales, a function of their tiles (rows, 4, 32, columns, 4)."""
    out = k.outputs()
    scales = out["rowwise_scale_inv"]
    tiled = write(scales.reshape(len(scales) // 128, 4, 32, scales.shape[1] // 4, 4))
    return out | {"rowwise_scale_inv": np.ascontiguousarray(tiled).reshape(scales.shape)}


@convention("scales-swizzled-otherwise", "quantize", MX, shape=SIZE)
def mx_tiles_down_the_columns(k):
    """The tile index is column * rows + row."""
    return swizzled_otherwise(k, lambda tiled: tiled.transpose(3, 0, 2, 1, 4))


@convention("scales-swizzled-otherwise", "quantize", MX, shape=SIZE)
def mx_tiles_without_interleave(k):
    """Tiles of 128 x 4, each row after row."""
    return swizzled_otherwise(k, lambda tiled: tiled.transpose(0, 3, 1, 2, 4))


@convention("scales-swizzled-otherwise", "quantize", MX, shape=(384, 640))
def mx_swizzled_twice(k):
    """The kernel writes GEMM order, and a swizzle kernel runs behind it."""
    out = k.outputs()
    return out | {"rowwise_scale_inv": gemm_order(gemm_order(out["rowwise_scale_inv"]))}


@convention("scales-swizzled-otherwise", "quantize", MX, shape=(384, 640))
def mx_swizzle_gathers(k):
    """out[n] = in[index of n] for out[index of n] = in[n]."""
    out = k.outputs()
    return out | {"rowwise_scale_inv": read_in_gemm_order(out["rowwise_scale_inv"])}


def multiplier_of(k, v, rows, columns):
    """What each element is multiplied by with blocks of (rows, columns)."""
    return spread(k.mx_multiplier(k.mx_bytes(v, rows, columns)), rows, columns, v.shape)


@convention("multiplier-of-other-copy", "quantize", MX, shape=SIZE, columnwise=True)
def mx_second_cast_with_the_first_multiplier(k):
    """The columnwise codes are cast with the register of the rowwise pass."""
    v = k.computed()
    return k.outputs() | {"columnwise_data": cast(v * multiplier_of(k, v, 1, 32), "e4m3")}


@convention("multiplier-of-other-copy", "swiglu", MX, shape=PAIR, columnwise=True)
def swiglu_mx_first_cast_with_the_second_multiplier(k):
    """The rowwise codes are cast with the columns' scales."""
    v = k.before_cast(k.computed())
    return k.outputs() | {"rowwise_data": cast(v * multiplier_of(k, v, 32, 1), "e4m3")}


@convention("multiplier-of-other-copy", "quantize", ROWS, shape=SIZE, rowwise=False, columnwise=True)
def columns_cast_with_scales_of_rows(k):
    """Scales of 1 x 128 for the transposed copy, whose own are right."""
    v = k.computed()
    scale = spread(k.block_scales(v, 1, 128), 1, 128, v.shape)
    return k.outputs() | {"columnwise_data": np.ascontiguousarray(cast(v * scale, "e4m3").T)}


@convention("multiplier-missing", "quantize", MX, shape=SIZE)
def mx_cast_without_multiplier(k):
    """x for x * 2^-e."""
    return k.outputs(product=lambda v, multiplier: v)


@convention("multiplier-missing", "silu", ROWS, shape=SIZE, columnwise=True)
def silu_blocks_cast_without_multiplier(k):
    """Scales are made and stored, and not used."""
    return k.outputs(product=lambda v, multiplier: v)


@convention(("scale-floor", "no-saturation"), "quantize", MX, both=True, shape=SIZE)
def mx_floor_with_a_cast_to_nan(k):
    """The floor rule, and a cast that makes NaN of what is beyond 448."""

    def overflowing(v):
        return np.where(np.abs(v) > 464, np.uint8(0x7F), cast(v, "e4m3"))

    return k.outputs(mx_byte=lambda amax: mx_byte_ocp(amax, "e4m3", "floor"), cast=overflowing)


@convention("nan-sign-kept", "quantize", MX, shape=SIZE, data="with_nan", ulp=0)
def mx_nan_with_its_sign(k):
    """sign | 0x7F, as the software cast of CUDA's header has it: by default right, but not TE's bits."""
    return k.outputs(cast=lambda v: cast(v, "e4m3") | ((np.isnan(v) & np.signbit(v)) * 128).astype(np.uint8))


@convention("nan-sign-kept", "quantize", MX_E5M2, shape=SIZE, data="with_nan", ulp=0)
def mx_e5m2_quiet_nan_with_its_sign(k):
    """sign | 0x7E."""
    nan = lambda v: np.where(np.signbit(v), np.uint8(0xFE), np.uint8(0x7E))  # noqa: E731
    return k.outputs(cast=lambda v: np.where(np.isnan(v), nan(v), cast(v, "e5m2")))


@convention("inf-amax-not-handled", "quantize", MX_FLOOR, shape=SIZE, data="nonfinite")
def mx_floor_of_the_bits_of_infinity(k):
    """The exponent field of inf is 255: the byte is 247, 2^120."""
    right = k.mx_byte
    return k.outputs(mx_byte=lambda amax: np.where(np.isinf(amax), np.uint8(255 - 8), right(amax)))


@convention("inf-amax-not-handled", "quantize", MX, shape=SIZE, data="nonfinite", columnwise=True)
def mx_amax_bounded_by_the_largest_float(k):
    """fminf(amax, FLT_MAX) before the byte is made."""
    right = k.mx_byte
    return k.outputs(mx_byte=lambda amax: right(np.fmin(amax, np.finfo(F).max)))


@convention("nan-scale-for-nonfinite", "quantize", MX_E5M2, shape=SIZE, data="nonfinite")
def mx_infinite_amax_gets_nan(k):
    """The byte of an infinite amax is not bounded: 0xFF, which is NaN, and the data are cast with 2^-128."""
    right = k.mx_byte
    return k.outputs(mx_byte=lambda amax: np.where(np.isinf(amax), np.uint8(255), right(amax)))


def compared(blocks):
    """amax = amax > |x| ? amax : |x| over the elements of (R, rows, C, columns), one after the other."""
    amax = np.zeros((blocks.shape[0], blocks.shape[2]), F)
    for row in range(blocks.shape[1]):
        for column in range(blocks.shape[3]):
            magnitude = np.abs(blocks[:, row, :, column])
            amax = np.where(amax > magnitude, amax, magnitude)
    return amax


@convention("nan-restarts-amax", "quantize", MX, shape=SIZE, data="with_nan", columnwise=True)
def mx_amax_by_comparison(k):
    """A thread runs over a block with a comparison."""
    return k.outputs(block_amax=lambda v, rows, columns: compared(tiles(v, rows, columns)))


@convention("nan-restarts-amax", "quantize", ROWS, shape=SIZE, data="with_nan")
def rows_amax_by_butterfly(k):
    """Lanes exchange with a comparison, the far ones first: lane 0 has the result."""

    def block_amax(v, rows, columns):
        lanes = np.moveaxis(np.abs(tiles(v, rows, columns)[:, 0]), 2, 0)
        while len(lanes) > 1:
            near, far = np.split(lanes, 2)
            lanes = np.where(near > far, near, far)
        return lanes[0]

    return k.outputs(block_amax=block_amax)


@convention("subnormals-flushed", "quantize", MX, shape=SIZE, dtype=np.float32, data="vanishing_rows")
def mx_with_ftz(k):
    """-ftz=true: inputs, amax / 448 and the product flush."""

    def flush(v):
        return np.where(np.abs(v) < F(2.0**-126), np.copysign(F(0), v), v)

    return k.outputs(
        load=lambda array: flush(array.reshape(-1, array.shape[-1])),
        mx_byte=lambda amax: mx_byte_up(flush(amax * (F(1) / F(448))), F(1)),
        product=lambda v, multiplier: flush(v * flush(multiplier)),
    )


@convention("scales-unpadded", "quantize", MX, shape=(500, 1056))
def mx_scales_packed(k):
    """Scales packed with 33 bytes a row into the buffer whose rows have 36."""
    out = k.outputs()
    scales = out["rowwise_scale_inv"]
    packed = scales[:500, :33].reshape(-1)
    return out | {"rowwise_scale_inv": np.pad(packed, (0, scales.size - packed.size)).reshape(scales.shape)}


@convention("scales-transposed", "quantize", MX, shape=(512, 1024), columnwise=True)
def mx_columnwise_scales_transposed(k):
    """Columnwise scales stored [column, block]; [block, column] is right."""
    out = k.outputs()
    scales = out["columnwise_scale_inv"]
    return out | {"columnwise_scale_inv": np.ascontiguousarray(scales.T).reshape(scales.shape)}


@convention("missing-rounding", "swiglu", MX, shape=PAIR)
def swiglu_mx_unrounded(k):
    """Amax and cast see float32 values; TE's kernel rounds to bfloat16 first."""
    return k.outputs(before_cast=lambda f: f)


@convention("no-saturation", "quantize", MX_FLOOR, shape=SIZE)
def mx_floor_overflows(k):
    """With the floor rule values pass 448: they become NaN instead of 448."""
    return k.outputs(cast=lambda v: np.where(np.abs(v) >= 464, np.uint8(0x7F) | cast(v, "e4m3"), cast(v, "e4m3")))


@convention("nan-scale-for-nonfinite", "quantize", MX, shape=SIZE, data="nonfinite")
def mx_nan_scale(k):
    """A block with NaN or an infinity gets the scale NaN, 0xFF, and NaN codes."""

    def mx_bytes(v, rows, columns):
        bad = ~np.isfinite(tiles(v, rows, columns)).all(axis=(1, 3))
        return np.where(bad, np.uint8(255), k.mx_byte(k.block_amax(v, rows, columns)))

    def mx_multiplier(byte):
        return np.where(byte == 255, F(np.nan), Kernel.mx_multiplier(k, byte))

    return k.outputs(mx_bytes=mx_bytes, mx_multiplier=mx_multiplier)


@convention("neighbour-block-scale", "quantize", MX, shape=SIZE)
def mx_scale_of_the_block_before(k):
    """Block j uses and stores the scale of block j - 1."""
    return k.outputs(block_amax=lambda v, r, c: before(Kernel.block_amax(k, v, r, c)))


@convention("other-format-max", "quantize", MX_E5M2, shape=SIZE)
def mx_e5m2_with_448(k):
    """The scale maps the amax to 448, the codes are E5M2."""
    return k.outputs(largest=lambda: limit_of("e4m3"))


@convention("signed-amax", "quantize", MX, shape=SIZE, data="negative_tail")
def mx_maximum_without_magnitude(k):
    """max(x) for max |x|."""
    return k.outputs(magnitude=lambda v: v)


@convention("ties-away", "dswiglu", MX_E5M2, shape=PAIR)
def dswiglu_mx_ties_away(k):
    """roundTiesToAway in the cast."""
    return k.outputs(cast=lambda v: cast_by_bits(v, "e5m2", ties_away=True))


@convention("truncation", "quantize", MX, shape=SIZE)
def mx_truncated(k):
    """The cast drops the low bits."""
    return k.outputs(cast=lambda v: cast_by_bits(v, "e4m3"))


@convention("tensor-scale-for-blocks", "quantize", MX, shape=SIZE)
def mx_one_scale_for_all(k):
    """Every block gets the tensor's scale."""

    def block_amax(v, rows, columns):
        return np.full_like(Kernel.block_amax(k, v, rows, columns), k.tensor_amax(v))

    return k.outputs(block_amax=block_amax)


@convention("gate-order", "swiglu", MX, shape=PAIR)
def swiglu_mx_gate_first(k):
    """[gate | act], quantized."""
    return k.outputs(split=swapped_split)


@convention("swapped-halves", "dswiglu", MX, shape=PAIR)
def dswiglu_mx_gate_half_first(k):
    """[d_gate | d_act], quantized."""
    return k.outputs(join=lambda a, g: np.concatenate([g, a], axis=1))


@convention("two-d-ignored", "quantize", MX_2D, shape=SIZE)
def mx_1x32_for_32x32(k):
    """Each row of a 32x32 tile gets a scale of its own."""
    return k.outputs(scaling=MX)


@convention("two-d-scales", "quantize", MX, shape=SIZE, columnwise=True)
def mx_32x32_for_1x32(k):
    """One scale for 32x32 elements."""
    return k.outputs(scaling=MX_2D)


@convention("wrong-block-size", "quantize", MX, shape=SIZE)
def mx_64_for_32(k):
    """The amax runs over 64 elements: two blocks share a scale."""
    return k.outputs(block_amax=lambda v, r, c: pairwise(Kernel.block_amax(k, v, r, c)))


def pairwise(a):
    """The larger of columns 2j and 2j + 1, for both."""
    return np.repeat(np.fmax(a[:, 0::2], a[:, 1::2]), 2, axis=1)


@convention("dbias-rounded", "dgelu", MX, shape=(128, 1024), dtype=np.float16, dbias=True)
def mx_dbias_sums_rounded(k):
    """The fused bias gradient adds float32 values; this one adds them rounded to float16."""
    return k.outputs(summed=k.rounded)


@convention("upstream-gradient-missing", "dgelu", MX, shape=SIZE)
def dgelu_mx_without_dy(k):
    """f'(x) quantized."""
    return k.outputs(backward=lambda dy, x: k.slope(x))


@convention("erf-gelu", "geglu", MX, shape=PAIR)
def geglu_mx_by_erf(k):
    """x Phi(x) gate, quantized."""
    return k.outputs(value=erf_gelu)


@convention("subnormal-codes-flushed", "quantize", MX, shape=SIZE, data="heavy")
def mx_subnormal_codes_are_zero(k):
    """Scaled values below 2^-6 become zero."""
    return k.outputs(cast=lambda v: cast(np.where(np.abs(v) < F(2.0**-6), np.copysign(F(0), v), v), "e4m3"))


@convention("nan-as-a-number", "quantize", MX_E5M2, shape=SIZE, data="with_nan")
def mx_nan_written_as_zero(k):
    """NaN inputs give code 0."""
    return k.outputs(cast=lambda v: np.where(np.isnan(v), np.uint8(0), cast(v, "e5m2")))


@convention("other-format", "quantize", MXFP8Scaling(E2M3), shape=SIZE)
def mxfp6_e3m2_written(k):
    """E3M2 codes where E2M3 is asked for, under E2M3's scales."""
    return k.outputs(cast=lambda v: cast(v, "e3m2"))


@convention("double-rounding-bf16", "quantize", MX, shape=SIZE, dtype=np.float32)
def mx_cast_through_bfloat16(k):
    """float32 -> bfloat16 -> E4M3, amax and scale from float32."""
    return k.outputs(cast=lambda v: cast(v.astype(BF16).astype(F), "e4m3"))


@convention("wrong-axis-amax", "quantize", MX, shape=(512, 512))
def mx_amax_of_columns(k):
    """Scales of the columnwise 32x1 blocks, transposed into the rowwise array of a square tensor."""

    def mx_bytes(v, rows, columns):
        return k.mx_byte(Kernel.block_amax(k, v.T, rows, columns))

    return k.outputs(mx_bytes=mx_bytes)


@convention("wrong-axis-amax", "quantize", MX, shape=SIZE)
def mx_amax_down_the_tile(k):
    """In each 32x32 tile thread t takes the amax of column t for row t: the indices of shared memory exchanged."""

    def block_amax(v, rows, columns):
        down = np.abs(tiles(v, 32, 32)).max(axis=1)  # (tile row, tile column, column of the tile)
        return down.transpose(0, 2, 1).reshape(len(v), -1)

    return k.outputs(block_amax=block_amax)


@convention(("gate-order", "scale-floor"), "swiglu", MX, both=True, shape=PAIR)
def swiglu_mx_gate_first_and_floor(k):
    """Two faults: [gate | act] and the floor rule."""
    return k.outputs(split=swapped_split, mx_byte=lambda amax: mx_byte_ocp(amax, "e4m3", "floor"))


@convention(("scales-swizzled", "truncation"), "quantize", MX, both=True, shape=SIZE)
def mx_gemm_order_and_truncation(k):
    """Two faults: scales in GEMM order and a truncating cast."""
    out = k.outputs(cast=lambda v: cast_by_bits(v, "e4m3"))
    return out | {"rowwise_scale_inv": gemm_order(out["rowwise_scale_inv"])}


# --- dequantize -------------------------------------------------------------------------------------------------------


@convention("scales-swizzled", "dequantize", MX, shape=SIZE)
def mx_gemm_order_read(k):
    """The scales are read as if they were in GEMM order."""
    return k.outputs(scales_read=read_in_gemm_order)


@convention("inverted-scale", "dequantize", MX_E5M2, shape=SIZE)
def mx_divided_by_scale(k):
    """code / 2^(byte - 127)."""
    return k.outputs(per_element=lambda factors: F(1) / factors)


@convention("scales-transposed", "dequantize", ROWS, shape=(512, 2048))
def block_scales_read_row_major(k):
    """[block, row] scales read as [row, block]."""
    return k.outputs(scales_read=lambda s: np.ascontiguousarray(s.reshape(s.shape[1], s.shape[0]).T))


@convention("sign-inverted", "dequantize", MX_E5M2, shape=SIZE)
def mx_read_with_inverted_signs(k):
    """A set sign bit is read as plus."""
    return k.outputs(codes_read=lambda data: -decode(data, "e5m2"))


@convention("other-format", "dequantize", MX_E5M2, shape=SIZE)
def mx_e5m2_read_as_e4m3(k):
    """The codes' table is E4M3's."""
    return k.outputs(codes_read=lambda data: decode(data, "e4m3"))


@convention("truncation", "dequantize", BlockScaling(E4M3, 2, power_2_scale=False), shape=SIZE)
def block_output_truncated(k):
    """The bfloat16 output drops the low half."""
    return k.outputs(store=truncated)


# --- the last place of the multiplier ---------------------------------------------------------------------------------

ROWS_OF_FLOAT = BlockScaling(E4M3, 1, power_2_scale=False)


@convention("multiplier-slightly-off", "quantize", ROWS_OF_FLOAT, shape=SIZE, columnwise=True)
def block_multiplier_one_step_high(k):
    """Each multiplier is the next float32 number; the stored scales are right."""
    return k.outputs(product=lambda v, scale: v * np.nextafter(scale, F(np.inf)))


@convention("multiplier-slightly-off", "quantize", ROWS_OF_FLOAT, shape=SIZE)
def block_multiplier_by_a_fast_division(k):
    """The quotient 448 / amax is off by one unit for a quarter of the amaxes, as a fast division is."""

    def product(v, scale):
        bits = np.ascontiguousarray(scale).view(np.int32)
        return v * (bits + (bits % 4 == 1)).astype(np.int32).view(F)

    return k.outputs(product=product)
