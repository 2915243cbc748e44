"""Worked examples of the specification, special values, ragged and empty shapes, under every scaling.

Sections are those of docs/spec/quantization.md.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from independent import (
    BF16,
    DIRECTIONS,
    DTYPES,
    FLT_MAX,
    FP16,
    FP32,
    SCALINGS,
    F,
    all_values,
    bits,
    expect,
    expect_dequantized,
    from_bits,
    hadamard_columns,
    philox_block,
    random_tensor,
    round_float64,
    special_tensor,
)
from rule_calls import inverse_power, nvfp4, scale_byte, scale_from_amax

import refops
from arrays import assert_same_bits, assert_same_quantized, coarse
from refops import E2M1, E4M3, E5M2, E8M0, decode, dequantize, encode, quantize
from refops.quantization.layout import swizzled_offset
from refops.rounding import philox, philox_bytes, round_once
from refops.scalings.declaration import LARGEST_FINITE
from tiers import sampled

INF, NAN = np.inf, np.nan


def f32(*values):
    """A float32 array of these values."""
    return np.array(values, F)


def above(value):
    """The next float32."""
    return np.nextafter(F(value), F(INF))


def below(value):
    """The previous float32."""
    return np.nextafter(F(value), F(-INF))


def codes_of(fmt, *values, **options):
    """Codes of float32 values, as a list."""
    return encode(f32(*values), fmt, **options).tolist()


# --- sections 1.1 and 1.2: casts ------------------------------------------------------------------

E4M3_EXAMPLES = {
    0: 0x00, 1.0: 0x38, -1.5: 0xBC, 2**-6: 0x08, 2**-9: 0x01, 2**-10: 0x00, above(2**-10): 0x01,
    3 * 2**-10: 0x02, 1.0625: 0x38, 1.1875: 0x3A, 17: 0x58, 18: 0x59, 19: 0x5A, 20: 0x5A, 21: 0x5A, 22: 0x5B, 232: 0x76,
    240: 0x77, 248: 0x78, 448: 0x7E, 449: 0x7E, 464: 0x7E, 1e9: 0x7E, INF: 0x7E, -INF: 0xFE, -0.0000001: 0x80,
}  # fmt: skip
E5M2_EXAMPLES = {
    1.0: 0x3C, 2**-14: 0x04, 2**-16: 0x01, 2**-17: 0x00, above(2**-17): 0x01, 57344: 0x7B, 61440: 0x7B,
    INF: 0x7B, -INF: 0xFB,
}  # fmt: skip
E2M1_EXAMPLES = {
    0.25: 0, above(0.25): 1, below(0.75): 1, 0.75: 2, 1.25: 2, above(1.25): 3, below(1.75): 3, 1.75: 4, 2.5: 4,
    above(2.5): 5, below(3.5): 5, 3.5: 6, 5: 6, above(5): 7, 1e30: 7, INF: 7,
    -0.1: 8, -0.25: 8, -0.75: 10, -INF: 15, NAN: 7,
}  # fmt: skip
E8M0_EXAMPLES = {
    0: 0, 2**-149: 0, 2**-127: 0, above(2**-127): 1, 2**-126: 1, 1.5 * 2**-126: 2, 1: 127,
    above(1): 128, 2.0**127: 254, 1.5 * 2.0**127: 254, INF: 254, NAN: 255,
}  # fmt: skip


@pytest.mark.parametrize(
    ("fmt", "examples", "rounding"),
    [
        (E4M3, E4M3_EXAMPLES, "nearest_even"),
        (E5M2, E5M2_EXAMPLES, "nearest_even"),
        (E2M1, E2M1_EXAMPLES, "nearest_even"),
        (E8M0, E8M0_EXAMPLES, "up"),
    ],
    ids=["e4m3", "e5m2", "e2m1", "e8m0-up"],
)
def test_cast_examples(fmt, examples, rounding):
    assert codes_of(fmt, *examples, rounding=rounding) == list(examples.values())


def test_negative_zero_and_nan_codes():
    """-0.0 keeps its sign; NaN of either sign gives the canonical code."""
    nans = from_bits(0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF)
    for fmt, zero, nan in ((E4M3, 0x80, 0x7F), (E5M2, 0x80, 0x7F), (E2M1, 8, 7), (refops.E3M2, 32, 31)):
        assert codes_of(fmt, -0.0, 0.0) == [zero, 0]
        assert encode(nans, fmt).tolist() == [nan] * 4
    assert encode(nans, E8M0, rounding="up").tolist() == [255] * 4


def test_overflow_without_saturation():
    """IEEE 754: what rounds beyond the largest value becomes inf, or NaN where the format has no inf."""
    assert codes_of(E4M3, 448, 463.99997, 464, 465, INF, -INF, saturate=False) == [0x7E, 0x7E, 0x7E, 0x7F, 0x7F, 0xFF]
    assert codes_of(E5M2, 57344, 61439, 61440, -1e9, INF, saturate=False) == [0x7B, 0x7B, 0x7C, 0xFC, 0x7C]
    assert codes_of(E2M1, 6, 7, 1e9, -INF, saturate=False) == [7, 7, 7, 15]


def test_decode_examples():
    table = {(E4M3, 1): 2**-9, (E4M3, 8): 2**-6, (E4M3, 0x7E): 448, (E5M2, 1): 2**-16, (E5M2, 4): 2**-14}
    for (fmt, code), value in table.items():
        assert decode(np.array([code], np.uint8), fmt)[0] == value
    assert decode(np.array([0x7B, 0x7C, 0xFC], np.uint8), E5M2).tolist() == [57344, INF, -INF]
    assert np.isnan(decode(np.array([0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF], np.uint8), E5M2)).all()
    assert np.isnan(decode(np.array([0x7F, 0xFF], np.uint8), E4M3)).all()
    assert decode(np.arange(8, dtype=np.uint8), E2M1).tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def test_pack_order():
    assert refops.pack_fp4(np.array([[1, 2, 15, 0]], np.uint8)).tolist() == [[0x21, 0x0F]]
    assert refops.unpack_fp4(np.array([[0x21, 0x0F]], np.uint8)).tolist() == [[1, 2, 15, 0]]


# --- section 0.9: constants -----------------------------------------------------------------------


def test_constants():
    assert (E4M3.max, E5M2.max, E2M1.max, E8M0.max) == (448, 57344, 6, 2.0**127)
    for value, pattern in {
        F(1) / E4M3.max: 0x3B124925,
        F(1) / E5M2.max: 0x37924925,
        F(1) / F(6): 0x3E2AAAAB,
        F(1) / F(2688): 0x39C30C31,
        F(1) / F(1536): 0x3A2AAAAB,
    }.items():
        assert bits(value) == pattern


# --- sections 3.1, 3.2, 4.1: scale from amax ------------------------------------------------------

#: (amax, format, epsilon, power of two, value for inf) -> bits of scale, bits of its reciprocal.
SCALES = [
    ((3, E4M3, 0, False, FLT_MAX), 0x43155555, 0x3BDB6DB7),
    ((3, E4M3, 0, True, FLT_MAX), bits(128), bits(2**-7)),
    ((3, E5M2, 0, False, FLT_MAX), 0x46955555, 0x385B6DB7),
    ((448, E4M3, 0, True, FLT_MAX), bits(1), bits(1)),
    ((449, E4M3, 0, True, FLT_MAX), bits(0.5), bits(2)),
    ((0, E4M3, 0, False, FLT_MAX), bits(1), bits(1)),
    ((0, E4M3, 0, True, FLT_MAX), bits(1), bits(1)),
    ((INF, E4M3, 0, False, FLT_MAX), bits(1), bits(1)),
    ((INF, E4M3, 0, True, FLT_MAX), bits(1), bits(1)),
    ((NAN, E4M3, 0, False, FLT_MAX), bits(1), bits(1)),
    ((1e-38, E4M3, 0, False, FLT_MAX), 0x7F7FFFFF, 0x00200000),
    ((1e-38, E4M3, 0, True, FLT_MAX), 0x7F000000, 0x00400000),
    ((FLT_MAX, E4M3, 0, False, FLT_MAX), 0x03E00001, 0x7B124924),
    ((0, E4M3, 1e-12, True, FLT_MAX), 0x57800000, bits(2**-48)),
    ((from_bits(0x03E00001)[0], E4M3, 0, False, FLT_MAX), 0x7F7FFFFF, 0x00200000),
    ((from_bits(0x03E00000)[0], E4M3, 0, False, F(7)), bits(7), bits(F(1) / F(7))),
    ((from_bits(0x07600001)[0], E5M2, 0, False, F(7)), 0x7F7FFFFF, 0x00200000),
    ((from_bits(0x07600000)[0], E5M2, 0, False, F(7)), bits(7), bits(F(1) / F(7))),
    ((1e-37, E4M3, 0, False, F(65504)), bits(65504), 0x37801002),
    ((1e-37, E4M3, 0, True, F(65504)), bits(32768), bits(2**-15)),
    ((1e-6, E4M3, 1e-4, True, FLT_MAX), bits(2**22), bits(2**-22)),
]


@pytest.mark.parametrize(("arguments", "scale_bits", "inverse_bits"), SCALES)
def test_scale_from_amax_table(arguments, scale_bits, inverse_bits):
    amax, fmt, epsilon, power_2, value_for_inf = arguments
    scale = scale_from_amax(f32(amax), fmt, epsilon=epsilon, power_2=power_2, value_for_inf=value_for_inf)
    assert bits(scale) == scale_bits
    assert bits(F(1) / scale[0]) == inverse_bits


@pytest.mark.parametrize(
    ("fmt", "power_2", "data", "values"),
    [
        (E4M3, False, [0x57, 0xE1, 0x71, 0x7E], [0.10044643, -0.24107143, 0.96428573, 3]),
        (E4M3, True, [0x55, 0xE0, 0x70, 0x7C], [0.1015625, -0.25, 1, 3]),
        (E5M2, False, [0x67, 0xED, 0x75, 0x7B], [0.09375, -0.26785713, 1.0714285, 3]),
    ],
)
def test_current_scaling_example(fmt, power_2, data, values):
    """Section 3.2: the whole-tensor example, 1-D."""
    q = quantize(f32(0.1, -0.25, 1, 3), refops.CurrentScaling(fmt, power_2_scale=power_2))
    assert q.rowwise_data.tolist() == data
    assert_same_bits(dequantize(q), f32(*values))
    assert q.amax_rowwise.tolist() == [3.0]


BLOCK_SCALES = [
    (BF16, E4M3, 3, True, 0, bits(2**-7)),
    (BF16, E4M3, 3, False, 0, 0x3BDB6DB7),
    (BF16, E5M2, 3, True, 0, bits(2**-14)),
    (BF16, E4M3, 450, True, 0, bits(2)),
    (BF16, E4M3, 1e-37, True, 0, 0x00400000),
    (BF16, E4M3, 1e-37, False, 0, 0x00202020),
    (FP32, E4M3, 1e-37, False, 0, 0x00200000),
    (FP32, E4M3, 1e-37, True, 0, 0x00400000),
    (FP32, E4M3, 1e-6, True, 1e-4, bits(2**-22)),
    (FP16, E4M3, 0, True, 0, bits(1)),
    (FP16, E4M3, INF, False, 0, bits(1)),
]


@pytest.mark.parametrize("block_dim", [1, 2])
@pytest.mark.parametrize(("dtype", "fmt", "amax", "power_2", "epsilon", "inverse_bits"), BLOCK_SCALES)
def test_block_scale_table(dtype, fmt, amax, power_2, epsilon, inverse_bits, block_dim):
    """Section 4.1, through whole tensors: the limit of an overflowing scale is the input dtype's."""
    x = np.zeros((2, 130), dtype)
    x[0, 3] = -amax
    scaling = refops.BlockScaling(fmt, block_dim, power_2_scale=power_2, amax_epsilon=epsilon)
    q = quantize(x, scaling, columnwise=True)
    assert bits(q.rowwise_scale_inv[0, 0]) == inverse_bits
    assert bits(q.columnwise_scale_inv[0, 3 if block_dim == 1 else 0]) == inverse_bits
    assert_same_quantized(q, expect(x.astype(F), scaling, dtype))


def test_largest_block_scales():
    """The limits of an overflowing scale; fp16's cannot be reached with an fp16 input (section 4.1)."""
    assert {str(dtype): bits(limit) for dtype, limit in LARGEST_FINITE.items()} == {
        "float32": 0x7F7FFFFF,
        "float16": bits(65504),
        "bfloat16": 0x7F7F0000,
    }


# --- section 5: MXFP8 -----------------------------------------------------------------------------

MX_SCALES = [
    (E4M3, 0, 0, 2.0**127), (E4M3, 1e-45, 0, 2.0**127), (E4M3, 448 * 2.0**-127, 0, 2.0**127),
    (E4M3, above(448 * 2.0**-127), 0, 2.0**127), (E4M3, above(above(448 * 2.0**-127)), 1, 2.0**126),
    (E4M3, 1e-30, 19, 2.0**108), (E4M3, 2.0**-120, 0, 2.0**127),
    (E4M3, 0.5, 118, 2.0**9), (E4M3, 1, 119, 256), (E4M3, 3, 120, 128), (E4M3, 10, 122, 32), (E4M3, 100, 125, 4),
    (E4M3, 447, 127, 1), (E4M3, 448, 127, 1), (E4M3, above(448), 128, 0.5), (E4M3, 449, 128, 0.5),
    (E4M3, 450, 128, 0.5), (E4M3, 896, 128, 0.5), (E4M3, 10000, 132, 2**-5), (E4M3, 65504, 135, 2**-8),
    (E4M3, from_bits(0x7F7F0000)[0], 247, 2.0**-120), (E4M3, FLT_MAX, 247, 2.0**-120), (E4M3, INF, 254, 2.0**-127),
    (E5M2, 1, 112, 2.0**15), (E5M2, 3, 113, 2.0**14), (E5M2, 57344, 127, 1), (E5M2, 61440, 128, 0.5),
    (E5M2, 65504, 128, 0.5), (E5M2, from_bits(0x7F7F0000)[0], 240, 2.0**-113),
]  # fmt: skip


@pytest.mark.parametrize(("fmt", "amax", "byte", "multiplier"), MX_SCALES)
def test_mxfp8_scale_table(fmt, amax, byte, multiplier):
    """Section 5.3, except that the float above 448 * 2^-127 still gives 0: times f32(1/448) it is exactly 2^-127."""
    assert scale_byte(f32(amax), fmt).tolist() == [byte]
    assert inverse_power(byte) == F(multiplier)


def test_mxfp8_multiplier_bits():
    """Section 5.2: 254 is subnormal, 255 NaN, all others exact powers of two."""
    assert [bits(inverse_power(b)) for b in (0, 127, 253, 254)] == [0x7F000000, 0x3F800000, 0x00800000, 0x00400000]
    assert np.isnan(inverse_power(255))


def test_mxfp8_block_examples():
    """Section 5.3: the worked block; a block with inf; one whose scale byte is 0."""
    scaling = refops.MXFP8Scaling(E4M3)
    x = np.zeros((3, 32), F)
    x[0, :4], x[1, :2], x[2, 0] = (0.1, -0.25, 1, 3), (INF, 1.0), 2.0**-120
    q = quantize(x, scaling)
    assert q.rowwise_scale_inv[:3, 0].tolist() == [120, 254, 0]
    assert q.rowwise_data[0].tolist() == [0x55, 0xE0, 0x70, 0x7C] + [0] * 28
    assert q.rowwise_data[1].tolist() == [0x7E] + [0] * 31
    assert q.rowwise_data[2].tolist() == [0x70] + [0] * 31
    values = dequantize(q)
    assert values[0, :5].tolist() == [0.1015625, -0.25, 1, 3, 0]
    assert values[1, :2].tolist() == [INF, 0] and values[2, 0] == 2.0**-120


@pytest.mark.parametrize("fmt", [E4M3, E5M2, refops.E3M2, refops.E2M3])
def test_mx_scale_byte_up_never_saturates(fmt):
    """For every bf16 amax the scaled maximum is at most the format's largest value, and more than half of it."""
    amax = np.arange(1, 0x7F80, dtype=np.uint16).view(BF16).astype(F)
    byte = scale_byte(amax, fmt)
    scaled = np.ldexp(amax.astype(np.float64), 127 - byte.astype(np.int64))
    assert (scaled <= float(fmt.max)).all()
    tight = (byte > 0) & (amax >= 2.0**-126)
    assert (scaled[tight] * 2 > float(fmt.max)).all()


@pytest.mark.parametrize("fmt", [E4M3, E5M2, refops.E3M2, refops.E2M3])
def test_mx_scale_byte_turns_at_the_format_maximum(fmt):
    """amax = max gives byte 127, the next float above 128 (section 5.1 says so for 448), at any power of two."""
    for shift in range(-100, 100, 7):
        at = np.ldexp(fmt.max, shift).astype(F)
        above = np.nextafter(at, F(INF))
        assert scale_byte(f32(at, above), fmt).tolist() == [127 + shift, 128 + shift]


def test_swizzle_offsets():
    """Section 5.5 with n = 2 tiles across, both halves of the formula."""
    marks = {(0, 0): 0, (1, 0): 16, (32, 0): 4, (0, 3): 3, (0, 4): 512, (127, 7): 1023, (128, 0): 1024, (200, 5): 1673}
    scales = np.arange(256 * 8, dtype=np.uint16).reshape(256, 8)
    swizzled = refops.swizzle(scales)
    for (i, j), offset in marks.items():
        assert swizzled.reshape(-1)[offset] == scales[i, j]
    for i in range(256):
        for j in range(8):
            offset = ((i // 128) * 2 + j // 4) * 512 + (i % 32) * 16 + ((i % 128) // 32) * 4 + j % 4
            assert swizzled.reshape(-1)[offset] == scales[i, j]
            assert swizzled_offset(i, j, 2) == offset
    assert_same_bits(refops.unswizzle(swizzled), scales)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8-2d", "nvfp4", "nvfp4-rht"])
def test_swizzled_result_follows_the_offset_formula(name):
    """Sections 5.5 and 6.4: i runs over rows (rowwise) or columns (columnwise), whatever the compact orientation."""
    scaling = SCALINGS[name]
    q = quantize(random_tensor((160, 272), BF16, 3), scaling, columnwise=True)
    gemm = q.swizzled()
    assert gemm.with_gemm_swizzled_scales and gemm.rowwise_data is q.rowwise_data
    outer_is_column = name.startswith("mxfp8")  # MXFP8's columnwise scales are [block, column]
    columnwise = q.columnwise_scale_inv.T if outer_is_column else q.columnwise_scale_inv
    pairs = ((q.rowwise_scale_inv, gemm.rowwise_scale_inv), (columnwise, gemm.columnwise_scale_inv))
    for compact, swizzled in pairs:
        i, j = np.indices(compact.shape)
        tiles = compact.shape[1] // 4
        offset = ((i // 128) * tiles + j // 4) * 512 + (i % 32) * 16 + ((i % 128) // 32) * 4 + j % 4
        assert sorted(offset.reshape(-1)) == list(range(compact.size))
        assert np.array_equal(swizzled.reshape(-1)[offset], compact)
    assert gemm.swizzled() is gemm and q.unswizzled() is q
    assert_same_quantized(gemm.unswizzled(), q)
    assert_same_bits(dequantize(gemm), dequantize(q))
    only = replace(gemm, rowwise_data=None, rowwise_scale_inv=None, amax_rowwise=None)
    assert_same_bits(dequantize(only), dequantize(replace(q, rowwise_data=None)))


@pytest.mark.check
def test_block_scales_as_e8m0():
    """Section 4.4: scale_inv 2^-7 is byte 120, repeated over the four MX blocks (and 128 rows) that it covers."""
    x = np.full((256, 384), 3.0, BF16)
    x[128:, 128:] = 450.0
    for block_dim in (1, 2):
        q = quantize(x, refops.BlockScaling(E4M3, block_dim), columnwise=True)
        rowwise, columnwise = refops.block_scales_as_mxfp8(q)
        expected = np.full((256, 12), 120, np.uint8)
        expected[128:, 4:] = 128
        assert_same_bits(refops.unswizzle(rowwise), expected)
        expected = np.full((384, 8), 120, np.uint8)
        expected[128:, 4:] = 128
        assert_same_bits(refops.unswizzle(columnwise), expected)
    assert refops.block_scales_as_mxfp8(quantize(x, refops.BlockScaling(E4M3)))[1] is None


def test_blocks_shorter_than_an_e8m0_scale_serves_are_refused():
    """There would be no scale for half of them."""

    class Of16(refops.Block64Scaling):
        layout = replace(refops.Block64Scaling.layout, block=(1, 16))

    q = quantize(np.ones((32, 64), F), Of16(E4M3))
    with pytest.raises(ValueError, match=r"q must have blocks of a multiple of 32, .*; got 16"):
        refops.block_scales_as_mxfp8(q)


# --- section 6: NVFP4 -----------------------------------------------------------------------------

NVFP4_BLOCK = f32(3, -2, 1.5, 1, 0.75, 0.5, 0.4, 0.3, 0.25, 0.2, 0.1, 0.05, -0.6, -1.2, 2.6, -3)

NVFP4_SCALES = [
    (10, 3, 0x43866666, 134.4, 0x70, 2.1),
    (10, 10, 0x43866666, 448, 0x7E, 0.59999996),
    (10, 0, 0x43866666, 0, 0, FLT_MAX),
    (10, 1e-4, 0x43866666, 0.00448, 0x02, None),
    (10, 0.002, 0x43866666, 0.0896, 0x1B, None),
    (0, 0, bits(1), 0, 0, FLT_MAX),
    (INF, 3, bits(1), 0.5, 0x30, 2),
    (1e-37, 1e-37, 0x7F7FFFFF, 5.67, 0x4B, None),
    (1e-38, 1e-38, 0x7F7FFFFF, 0.567, 0x31, FLT_MAX),
    (2688, 2688, bits(1), 448, 0x7E, None),
    (INF, INF, bits(1), INF, 0x7E, F(1) / F(448)),
    (NAN, 1, 0x7F7FFFFF, None, 0x7E, None),
]


@pytest.mark.parametrize(("amax", "block_amax", "s_enc_bits", "raw", "byte", "enc"), NVFP4_SCALES)
def test_nvfp4_scale_table(amax, block_amax, s_enc_bits, raw, byte, enc):
    """Sections 6.1 to 6.3; `raw` to three digits, as the table prints it."""
    with np.errstate(all="ignore"):
        rule = nvfp4()
        s_enc, _ = both = rule.tensor(f32(amax))
        assert bits(s_enc) == s_enc_bits
        if raw is not None and np.isfinite(raw):
            assert float(block_amax * (s_enc[0] * (F(1) / F(6)))) == pytest.approx(raw, rel=2e-3)
        scales = rule.byte(f32(block_amax), both)
        assert scales.tolist() == [byte]
        if enc is not None:
            assert bits(rule.multiplier(scales, both)) == bits(enc)


def test_nvfp4_block_example():
    """Section 6.3: amax 10, x in one block, through a whole tensor."""
    x = np.zeros((16, 32), F)
    x[0, :16], x[5, 16] = NVFP4_BLOCK, 10
    q = quantize(x, refops.NVFP4Scaling())
    assert q.rowwise_scale_inv[0, 0] == 0x70 and q.rowwise_scale_inv[5, 1] == 0x7E
    assert q.rowwise_data[0, :8].tobytes() == bytes.fromhex("E745231211 00DBF7")
    expected = [
        2.857143, -1.9047619, 1.4285715, 0.95238096, 0.71428573, 0.47619048, 0.47619048, 0.23809524, 0.23809524,
        0.23809524, 0, 0, -0.71428573, -1.4285715, 2.857143, -2.857143,
    ]  # fmt: skip
    assert_same_bits(dequantize(q)[0, :16], f32(*expected))
    assert bits(F(128) * F(10) * (F(1) / F(2688))) == 0x3EF3CF3D


def test_nvfp4_two_d_example():
    """Section 6.3: one 16x16 tile."""
    x = np.zeros((16, 16), F)
    x[0], x[5, 3] = NVFP4_BLOCK, 10
    q = quantize(x, refops.NVFP4Scaling(two_d=True), columnwise=True)
    assert q.rowwise_scale_inv[:16, 0].tolist() == q.columnwise_scale_inv[:16, 0].tolist() == [0x7E] * 16
    assert q.rowwise_data[0].tobytes() == bytes.fromhex("A4121100000099C3")
    assert q.rowwise_data[5].tobytes() == bytes.fromhex("0070000000000000")
    unpacked = refops.unpack_fp4(q.rowwise_data)
    assert_same_bits(refops.unpack_fp4(q.columnwise_data), np.ascontiguousarray(unpacked.T))


def test_nvfp4_underflowing_block():
    """Section 6.3: a block far below the amax gets byte 0, and its non-zero elements +-6 that dequantize to 0."""
    x = np.zeros((16, 32), F)
    x[0, 0], x[1, 16:19] = 1.0, (1e-7, -1e-7, -0.0)
    q = quantize(x, refops.NVFP4Scaling())
    assert q.rowwise_scale_inv[1, 1] == 0
    assert q.rowwise_data[1, 8:10].tolist() == [0xF7, 0x08]
    assert not dequantize(q)[1].any()
    tiny = np.zeros((16, 16), F)
    tiny[0, 0] = 1e-38
    assert quantize(tiny, refops.NVFP4Scaling()).rowwise_data[0, 0] == 5  # the table's last remark


def test_hadamard_examples():
    """Section 6.7."""
    unit = np.zeros(16, BF16)
    unit[3] = 1
    assert refops.hadamard_transform(unit).tolist() == [-0.25, 0.25, 0.25, -0.25] * 4
    ramp = np.arange(1, 17).astype(BF16)
    expected = [-15.5, -7.5, 7.5, -0.5, 7.5, -0.5, -15.5, 8.5, 8.5, 16.5, 1.5, 1.5, 1.5, -2.5, 10.5, -17.5]
    assert refops.hadamard_transform(ramp).tolist() == expected
    assert refops.hadamard_transform(refops.hadamard_transform(ramp), inverse=True).tolist() == ramp.tolist()
    assert refops.hadamard_transform(unit, 0)[:4].tolist() == [0.25, -0.25, -0.25, 0.25]


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_round_once_near_every_tie(dtype):
    """float64 values closer to a tie than float32 can tell: a plain cast through float32 rounds them twice."""
    values = np.sort(all_values(BF16 if dtype == FP32 else dtype).astype(F))
    values = values[np.isfinite(values)].astype(np.float64)
    ties = (values[:-1] + values[1:]) / 2
    if dtype == FP32:
        ties = ties * (1 + 2.0**-24)
    away = np.concatenate(
        [ties * (1 + e) for e in (0, 2.0**-50, -(2.0**-50), 2.0**-30, -(2.0**-30), 2.0**-25, -(2.0**-24))]
    )
    assert_same_bits(round_once(away, dtype).astype(F), round_float64(away, dtype))
    with np.errstate(all="ignore"):
        twice = (away.astype(F).astype(dtype).astype(F) != round_float64(away, dtype)).any()
    assert twice == (dtype != FP32)
    with np.errstate(over="ignore"):
        assert round_once(np.array([1e300, -1e300, INF, -INF, -0.0]), dtype).astype(F).tolist() == [
            INF,
            -INF,
            INF,
            -INF,
            0,
        ]


@pytest.mark.parametrize("mask", [0xD7E8, 0, 0x1234])
@pytest.mark.parametrize("content", [[0.0], [-0.0], [0.0, -0.0]])
def test_hadamard_of_zeros_is_positive_zero(content, mask):
    """Products of both signs of zero add up to +0, and so does a tensor core, whose accumulator starts at +0."""
    transformed = refops.hadamard_transform(np.resize(f32(*content), 16).astype(BF16), mask)
    assert_same_bits(transformed, np.zeros(16, BF16))


@pytest.mark.parametrize("seed", range(4))
def test_hadamard_of_sparse_tensors(seed):
    """What a ReLU leaves: many sums cancel. The signs of those zeros are in the columnwise codes."""
    rng = np.random.default_rng(seed)
    x = rng.choice(f32(0, 0, 0, 0, -0.0, 1, 2), (64, 64)).astype(BF16)
    q = quantize(x, refops.NVFP4Scaling(rht=True), columnwise=True)
    assert_same_quantized(q, expect(x.astype(F), q.scaling, BF16))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_hadamard_against_the_matrix(dtype):
    x = random_tensor((5, 7, 48), dtype, 4)
    expected = hadamard_columns(x.reshape(-1, 48).T.astype(F), 0x1234, dtype).T.reshape(x.shape).astype(dtype)
    assert_same_bits(refops.hadamard_transform(x, 0x1234), expected)


STOCHASTIC_EXAMPLES = [
    (0.3, 102, 0), (0.3, 103, 0.5), (2.5, 127, 2), (2.5, 128, 3), (5.0, 127, 4), (5.0, 128, 6), (6, 255, 6),
    (7.9, 0, 6), (7.9, 255, 6), (-1.25, 127, -1), (-1.25, 128, -1.5), (3.9, 255, 4), (1.9, 255, 2),
    (NAN, 0, 6), (-INF, 0, -6),
]  # fmt: skip


@pytest.mark.parametrize(("x", "byte", "value"), STOCHASTIC_EXAMPLES)
def test_stochastic_examples(x, byte, value):
    """Section 6.8."""
    code = encode(f32(x), E2M1, rounding="stochastic", random_bits=np.array([byte], np.uint8))
    assert decode(code, E2M1).tolist() == [value]


def test_philox_known_answers():
    """Section 6.8, and the whole chain from words through bytes to codes."""
    zero = [[0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]]
    assert philox(0, 0, [0]).tolist() == zero
    words = [0x78352B63, 0x8FB42772, 0x2160D7EA, 0x7F6082EA]
    assert philox(1234, 7, [5]).tolist() == [words]
    # The counter's next step is the next offset.
    assert philox(1234, 8, [5]).tolist() == [[0xB83798FD, 0x14CEFBF4, 0x7925659C, 0x91848967]]
    assert philox(0, 1, [0]).tolist() == [[0xF8E4CCA4, 0x5CB200DB, 0xB1A574EB, 0x097EFF67]]
    random_bytes = philox_bytes(1234, 7, [5])[0]
    assert random_bytes[:4].tolist() == [99, 43, 53, 120]
    codes = encode(f32(0.3, 2.5, 5, -1.25), E2M1, rounding="stochastic", random_bits=random_bytes[:4])
    assert decode(codes, E2M1).tolist() == [0, 2, 4, -1]


@pytest.mark.parametrize("subsequence", [0, 1, 2**32 - 1, 2**32, 2**63 + 12345, 2**64 - 1])
@pytest.mark.parametrize(("seed", "offset"), [(0, 0), (2**64 - 1, 2**64 - 1), (1 << 32, 0xFFFFFFFF), (99, 1 << 40)])
def test_philox_against_python_integers(seed, offset, subsequence):
    given = np.array([subsequence], np.uint64)
    assert philox(seed, offset, given).tolist() == [philox_block(seed, offset, subsequence)]


def test_four_over_six_example():
    """Section 6.9: with e4m3_max 256 the block maps to 4, with 448 it cannot."""
    x = np.zeros((16, 16), F)
    x[0] = [4, 3, 2, 1, 0.5, 0.25, 4, 3.9, 3.1, 2.9, 2.1, 1.9, 1.1, 0.9, 0.1, 0]
    for e4m3_max, s_enc, byte, data in ((256, 384, 0x7C, "5624016655442200"), (448, 672, 0x7E, "6735127766553300")):
        assert nvfp4(e4m3_max).tensor(f32(4))[0].tolist() == [s_enc]
        q = quantize(x, refops.NVFP4Scaling(four_over_six="mae", e4m3_max=e4m3_max))
        assert q.rowwise_scale_inv[0, 0] == byte
        assert q.rowwise_data[0].tobytes() == bytes.fromhex(data)


@pytest.mark.parametrize("name", ["nvfp4-mae-fast", "nvfp4-mse-fast-2d"])
def test_four_over_six_compares_otherwise_near_ties(name):
    scaling, x = SCALINGS[name], coarse((256, 256), F)
    q, expected = quantize(x, scaling, columnwise=True), expect(x, scaling, FP32)
    for field in ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv"):
        np.testing.assert_array_equal(getattr(q, field), getattr(expected, field))
    exact = quantize(x, replace(scaling, fast_error=False))
    different = (q.rowwise_scale_inv != exact.rowwise_scale_inv).sum()
    assert different < 100 and (different > 0 or scaling.two_d)  # sums of 256 errors are rarely so near


def test_four_over_six_tie_keeps_six():
    """A block that both candidates represent without error maps its maximum to 6."""
    x = np.zeros((16, 16), F)
    x[0, 0] = 384.0  # with amax 1536: S_enc 1, 6 * 64 = 384 = 4 * 96
    x[1, 0] = 1536.0
    q = quantize(x, refops.NVFP4Scaling(four_over_six="mse", e4m3_max=256))
    assert decode(q.rowwise_scale_inv[:1, :1], E4M3).tolist() == [[64.0]]
    assert q.rowwise_data[0, 0] == 7


@pytest.mark.parametrize("two_d", [False, True], ids=["1d", "2d"])
@pytest.mark.parametrize("mode", ["mae", "mse"])
def test_four_over_six_sums_errors_in_the_order_of_te(mode, two_d):
    """Multiples of 0.1 make candidates whose exact errors tie: the order of the float32 sums then decides.

    Along a row one after the other, over the rows of a tile as a tree 8, 4, 2, 1. Reversed sums, a tree of adjacent
    rows and a sequence of rows each choose otherwise somewhere in this data (2-D MSE excepted).
    """
    scaling = refops.NVFP4Scaling(four_over_six=mode, e4m3_max=256, two_d=two_d)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        x = (rng.integers(-15, 16, (256, 256)) * F(0.1)).astype(F).reshape(16, 16, 16, 16)
        x = (x * rng.integers(1, 9, (16, 1, 16, 1)).astype(F)).reshape(256, 256)
        assert_same_quantized(quantize(x, scaling, columnwise=True), expect(x, scaling, FP32))


# --- section 11: the edge-case matrix -------------------------------------------------------------


def filled(content, dtype):
    """A (32, 128) tensor whose blocks all hold `content` (repeated to 16 elements, the smallest block)."""
    pattern = np.resize(np.array(content, F).astype(dtype), 16)
    return np.broadcast_to(np.tile(pattern, 8), (32, 128)).copy()


SMALLEST = {FP32: 2.0**-149, FP16: 2.0**-24, BF16: 2.0**-133}
LARGEST = {FP32: FLT_MAX, FP16: 65504.0, BF16: from_bits(0x7F7F0000)[0]}
CONTENTS = {
    "all-zero": lambda dtype: [0.0, -0.0],
    "inf": lambda dtype: [INF, 1.0, -2.0, -INF, 0.0],
    "nan-and-finite": lambda dtype: [NAN, 1.0, -3.0],
    "only-nan": lambda dtype: [NAN, -NAN],
    "subnormal": lambda dtype: [SMALLEST[dtype], -3 * SMALLEST[dtype], 0.0],
    "1e-40": lambda dtype: [1e-40, -0.0],
    "largest": lambda dtype: [LARGEST[dtype], -LARGEST[dtype], 1.0],
    "largest-and-least": lambda dtype: [LARGEST[dtype], SMALLEST[dtype], -0.0],
    "everything": lambda dtype: [NAN, INF, LARGEST[dtype], SMALLEST[dtype], -0.0, -INF],
}


def is_nan_code(codes, fmt):
    """Where codes stand for NaN."""
    return np.isnan(decode(codes, fmt))


@sampled(("name", "dtype", "content"), product(SCALINGS, DTYPES.values(), CONTENTS), 5, in_all=3)
def test_matrix_of_edge_cases(name, dtype, content):
    """Each content under each scaling and dtype: bits as the second implementation, and no NaN that was not there."""
    scaling = SCALINGS[name]
    x = filled(CONTENTS[content](dtype), dtype)
    for rowwise, columnwise in DIRECTIONS:
        q = quantize(x, scaling, rowwise=rowwise, columnwise=columnwise)
        order_matters = "rht" in name and content in ("largest-and-least", "everything")
        if not order_matters:
            expected = expect(x.astype(F), scaling, dtype, rowwise=rowwise, columnwise=columnwise)
            assert_same_quantized(q, expected, f"{name} {content}")
        assert_no_new_nan(q, x)


def assert_no_new_nan(q, x):
    """NaN stands only where the input has one: never in a scale, an amax or another element."""
    nan = np.isnan(x.astype(F)).reshape(q.matrix_shape)
    fp4, transposed = q.scaling.layout.packed == 2, q.scaling.layout.columnwise_transposed
    for direction in ("rowwise", "columnwise"):
        data, scales, amax = (
            getattr(q, n) for n in (f"{direction}_data", f"{direction}_scale_inv", f"amax_{direction}")
        )
        if data is None:
            continue
        where = nan.T if direction == "columnwise" and transposed else nan
        if not fp4:
            codes = data.reshape(where.shape)
            if q.scaling.fmt.nan_code is not None:
                assert np.array_equal(is_nan_code(codes, q.scaling.fmt), where)
        if scales.dtype == np.uint8:
            assert not is_nan_code(scales, q.scaling.layout.scale_format).any()
        else:
            assert np.isfinite(scales).all() and (scales >= 0).all()
        assert amax is None or not np.isnan(amax).any()


@pytest.mark.parametrize("name", ["delayed", "delayed-e5m2"])
def test_delayed_amax_ignores_nan_and_reports_inf(name):
    """Section 2.1: amax before scaling; inf reaches it, NaN does not; an all-zero or all-NaN tensor gives 0."""
    for content, amax in (([1, -3], 3), ([NAN, -2], 2), ([NAN], 0), ([0.0, -0.0], 0), ([INF, 1], INF)):
        q = quantize(f32(*content), SCALINGS[name], columnwise=True)
        assert q.amax_rowwise.tolist() == q.amax_columnwise.tolist() == [amax]
        assert bits(q.amax_rowwise) == bits(F(amax))
    # The smallest and the largest permitted scale: the product over- or underflows, the code never is NaN.
    for scale in (from_bits(0x00200001)[0], FLT_MAX):
        q = quantize(f32(0, -0.0, FLT_MAX, -INF, 2.0**-149), refops.DelayedScaling(SCALINGS[name].fmt, scale))
        assert not is_nan_code(q.rowwise_data, q.scaling.fmt).any()
        assert q.rowwise_data[:2].tolist() == [0, 0x80]


@pytest.mark.parametrize("name", SCALINGS)
def test_zero_input_dequantizes_to_exact_zero(name):
    """Section 7."""
    x = np.zeros((32, 64), BF16)
    for rowwise in (True, False):
        q = quantize(x, SCALINGS[name], rowwise=rowwise, columnwise=not rowwise)
        assert not dequantize(q).any()


@pytest.mark.parametrize("name", SCALINGS)
def test_specials_scattered_over_many_blocks(name):
    """Specials among ordinary values; only the blocks (or the tensor) that hold them may change."""
    scaling = SCALINGS[name]
    for dtype in DTYPES.values():
        x = special_tensor((160, 256), dtype, 11, extremes="rht" not in name)
        q = quantize(x, scaling, columnwise=True)
        assert_same_quantized(q, expect(x.astype(F), scaling, dtype), name)
        assert_no_new_nan(q, x)


# --- shapes ---------------------------------------------------------------------------------------

RAGGED = [(1,), (33,), (300,), (0,), (0, 5), (5, 0), (0, 0), (1, 1), (3, 7), (127, 129), (130, 259), (2, 3, 4, 5, 37)]
SIXTEENS = [(0, 16), (16, 0), (0, 0), (16, 16), (48, 144), (144, 48), (2, 2, 1, 8, 272), (0, 4, 16)]
SHAPES = [
    (name, shape)
    for name, scaling in SCALINGS.items()
    for shape in (SIXTEENS if scaling.layout.shape_multiple == 16 else RAGGED)
    if not any(n % scaling.layout.columnwise_multiple for n in (int(np.prod(shape[:-1])), shape[-1]))
]


@sampled(("name", "shape"), SHAPES, 5, in_all=2, ids=str)
def test_shapes(name, shape):
    """1-D, ragged, empty and 5-D tensors: bits, shapes and zero padding as the second implementation."""
    scaling = SCALINGS[name]
    for dtype in (FP32, BF16):
        x = random_tensor(shape, dtype, 5)
        for rowwise, columnwise in DIRECTIONS:
            q, dbias = quantize(x, scaling, rowwise=rowwise, columnwise=columnwise, dbias=True)
            assert_same_quantized(q, expect(x.astype(F), scaling, dtype, rowwise=rowwise, columnwise=columnwise), name)
            assert q.shape == shape and q.dtype == dtype and q.scaling is scaling
            assert dbias.shape == shape[-1:] and dbias.dtype == dtype
            for out_dtype in (FP32, FP16, BF16):
                values = dequantize(q, dtype=out_dtype)
                assert values.shape == shape and values.dtype == out_dtype


@pytest.mark.parametrize("name", refops.ACTIVATIONS)
@pytest.mark.parametrize("shape", [(0,), (4,), (0, 6), (5, 0), (0, 0), (3, 2), (2, 0, 3, 4), (1, 2, 1, 3, 258)])
def test_activation_shapes(name, shape):
    """Empty, 1-D and 5-D tensors go through; gated ones halve the last dimension."""
    x = random_tensor(shape, BF16, 6)
    y = refops.activation(name, x)
    width = shape[-1] // 2 if refops.ACTIVATIONS[name].gated else shape[-1]
    assert y.shape == (*shape[:-1], width) and y.dtype == BF16
    dx, dbias = refops.activation_grad(name, y, x, dbias=True)
    assert dx.shape == shape and dbias.shape == shape[-1:]
    matrix = x.reshape(int(np.prod(shape[:-1])), shape[-1])
    assert_same_bits(refops.activation(name, matrix).reshape(y.shape), y)


def test_scalars_and_any_rank_go_through_the_casts():
    """`encode` and `decode` keep the shape, whatever it is."""
    for shape in ((), (0,), (3,), (2, 0, 4), (2, 3, 1, 1, 2)):
        x = np.full(shape, 1.5, F)
        codes = encode(x, E4M3)
        assert codes.shape == shape and codes.dtype == np.uint8
        values = decode(codes, E4M3)
        assert values.shape == shape and values.dtype == np.float32 and (values == 1.5).all()


# --- dequantization formulas, section 7 -----------------------------------------------------------


@sampled(("name", "out_dtype"), product(SCALINGS, DTYPES.values()), 2, in_all=1)
def test_dequantize_formula(name, out_dtype):
    """float32 arithmetic in the order of section 7 on hand-indexed scales, one rounding at the end."""
    q = quantize(random_tensor((160, 288), BF16, 8), SCALINGS[name], columnwise=True)
    rowwise, columnwise = expect_dequantized(q)
    assert_same_bits(dequantize(q, dtype=out_dtype), rowwise.astype(out_dtype))
    only_columnwise = replace(q, rowwise_data=None, rowwise_scale_inv=None, amax_rowwise=None)
    assert_same_bits(dequantize(only_columnwise, dtype=out_dtype), np.ascontiguousarray(columnwise.astype(out_dtype)))


def test_nvfp4_dequantize_overflows_as_te_does():
    """Section 6.11: scale * amax first. Above FLT_MAX / 448 that is inf, and 0 * inf NaN, although no code is NaN."""
    x = np.zeros((16, 16), F)
    x[0, 0], x[0, 1] = 1e36, 5e35
    q = quantize(x, refops.NVFP4Scaling())
    assert q.rowwise_data[0, 0] == 0x57 and q.rowwise_scale_inv[0, 0] == 0x7E
    back = dequantize(q)
    assert back[0, :2].tolist() == [INF, INF] and np.isnan(back[0, 2:]).all() and not back[1:].any()
    x[0, :2] = 7e35, 3e35  # just below: exact again
    back = dequantize(quantize(x, refops.NVFP4Scaling()))
    assert np.isfinite(back).all() and float(back[0, 0]) == pytest.approx(7e35, rel=2e-7)


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_dequantize_keeps_nan_and_reaches_inf(fmt):
    """NaN codes stay NaN; 0x7E under scale byte 254 overflows to inf (section 5.3)."""
    q = quantize(f32(NAN, INF, 1.0), refops.MXFP8Scaling(fmt))
    assert np.isnan(dequantize(q)[0]) and dequantize(q)[1] == INF
    nan_scale = replace(q, rowwise_scale_inv=np.full_like(q.rowwise_scale_inv, 255))
    assert np.isnan(dequantize(nan_scale)).all()
    zero_scale = replace(
        q, rowwise_scale_inv=np.zeros_like(q.rowwise_scale_inv), rowwise_data=np.full(3, 0x38, np.uint8)
    )
    assert dequantize(zero_scale)[0] == decode(np.array([0x38], np.uint8), fmt)[0] * F(2.0**-127)


@pytest.mark.parametrize("shape", [(1, 3), (3, 1), (64, 64), (65, 33)])
def test_a_signalling_nan_is_ignored_by_amax_like_a_quiet_one(shape):
    """`np.fmax` alone would pass it on, or drop what stands before it, by its place in the array."""
    for place in (0, 1, 2, -1):
        x = np.full(shape, 1, np.float32)
        x.flat[0], x.flat[-1] = 100, 50
        quiet = x.copy()
        x.view(np.uint32).flat[place], quiet.view(np.uint32).flat[place] = 0x7F800001, 0x7FC00000
        for scaling in (
            refops.CurrentScaling(refops.E4M3),
            refops.BlockScaling(refops.E4M3, 1),
            refops.MXFP8Scaling(refops.E4M3),
        ):
            assert_same_quantized(
                refops.quantize(x, scaling, columnwise=True), refops.quantize(quiet, scaling, columnwise=True)
            )
