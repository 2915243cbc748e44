"""The arithmetic of tensor cores: bits derived by hand, rational arithmetic, and faults in each number of each unit.

Powers of two are written as numbers of the formats: E4M3 has 2^-9 (subnormal) to 2^8, E5M2 2^-16 to 2^15.
"""

import tracemalloc
from fractions import Fraction
from functools import partial
from math import inf, nan

import numpy as np
import product_definition as definition
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import refops
from arrays import assert_same_bits, same_bits
from product_cases import (
    BF16,
    FP16,
    MXFP4,
    MXFP8,
    NVFP4,
    UNSEEN,
    F,
    faulty,
    operand_formats,
    random_case,
    small_cases,
    values_of,
)
from refops import E2M1, E2M3, E3M2, E4M3, E5M2, E8M0
from refops.products import UNITS, matmul, product_of, smallest_exponent, unit
from refops.rounding import multiply_add

profile = settings(
    derandomize=True, deadline=None, max_examples=25, database=None, suppress_health_check=[HealthCheck.too_slow]
)
every_unit = pytest.mark.parametrize("row", UNITS, ids=lambda row: f"{row.card} {row.name}")


def dot(row, a, b=None, a_scale=None, b_scale=None, a_format=None, b_format=None, promotion=None):
    """The product of two vectors, float32; b is all ones without one, formats are the unit's first."""
    a = np.array([a], F)
    b = np.ones_like(a) if b is None else np.array([b], F)
    scales = [None if scale is None else np.array([scale], F) for scale in (a_scale, b_scale)]
    a_format = row.formats[0] if a_format is None else a_format
    b_format = a_format if b_format is None else b_format
    result = matmul(
        a, b, row, a_format=a_format, b_format=b_format, a_scale=scales[0], b_scale=scales[1], promotion=promotion
    )
    assert result.shape == (1, 1) and result.dtype == F
    return result[0, 0]


HOPPER_FP8, BLACKWELL_FP8 = unit("hopper", E4M3), unit("blackwell", E4M3)


# --- bits derived by hand -------------------------------------------------------------------------


def test_what_lies_below_the_last_bit_is_cut_off_toward_zero():
    # Hopper aligns FP8 to 13 bits below the largest exponent, here that of 1 * 1: 0. The lowest bit is 2^-13.
    assert dot(HOPPER_FP8, [1, 2**-7], [1, 2**-6]) == 1 + 2**-13
    # 2^-14 is cut off, each on its own: two of them make no 2^-13.
    assert dot(HOPPER_FP8, [1, 2**-7, 2**-7], [1, 2**-7, 2**-7]) == 1
    # Toward zero, not down: -2^-14 becomes 0 and not -2^-13; and -1.5 * 2^-13 becomes -2^-13.
    assert dot(HOPPER_FP8, [1, -(2**-7)], [1, 2**-7]) == 1
    assert dot(HOPPER_FP8, [-1, -(2**-7)], [1, 1.5 * 2**-6]) == -(1 + 2**-13)
    # Blackwell keeps 25 bits: all of that is there.
    assert dot(BLACKWELL_FP8, [1, 2**-7, 2**-7], [1, 2**-7, 2**-7]) == 1 + 2**-13


def test_products_are_not_normalised_before_they_are_aligned():
    # 1.5 * 1.5 = 2.25 has the exponent 0 of its factors, not 1. So the lowest bit is 2^-13, and 2^-13 is left when
    # 2.25 has cancelled; normalised, the lowest bit would be 2^-12 and nothing would be left.
    assert dot(HOPPER_FP8, [1.5, -1.5, 2**-7], [1.5, 1.5, 2**-6]) == 2**-13
    # 2 * 1 has the exponent 1.
    assert dot(HOPPER_FP8, [2, -2, 2**-7], [1, 1, 2**-6]) == 0


def test_subnormal_elements_have_the_smallest_exponent():
    # E4M3's 2^-9 is 2^-3 * 2^-6: 256 * 2^-9 has the exponent 8 - 6 = 2, though its value is 2^-1. The lowest bit is
    # 2^-11 then: 2^-12 is lost. Beside 2^-1 * 1 it is not, whose lowest bit is 2^-14.
    assert dot(HOPPER_FP8, [256, 2**-6], [2**-9, 2**-6]) == 2**-1
    assert dot(HOPPER_FP8, [256, 2**-6], [2**-9, 2**-5]) == 2**-1 + 2**-11
    assert dot(HOPPER_FP8, [2**-1, 2**-6], [1, 2**-6]) == 2**-1 + 2**-12


def test_the_accumulator_is_one_more_summand():
    # After 256 * 256 = 2^16 in the first group the lowest bit of the second is 2^3: 4, 8 and 12 become 0, 8 and 8.
    first = [256] + [0] * 31
    assert dot(HOPPER_FP8, [*first, 4], [*first, 1]) == 2**16
    assert dot(HOPPER_FP8, [*first, 8], [*first, 1]) == 2**16 + 8
    assert dot(HOPPER_FP8, [*first, 12], [*first, 1]) == 2**16 + 8
    # The accumulator is aligned like a product: 32 * 2^-9 * 2^-9 = 2^-13 is kept when 1 comes; one by one, after it,
    # each 2^-18 is lost.
    small, one = [2**-9] * 32, [1] + [0] * 31
    assert dot(HOPPER_FP8, [*small, 1], [*small, 1]) == 1 + 2**-13
    assert dot(HOPPER_FP8, [*one, *small], [*one, *small]) == 1


def test_hopper_keeps_13_bits_of_fp8_sums():
    # Beside 8 the lowest bit is 2^(3-13) = 2^-10, of the summands and of the accumulator.
    assert dot(HOPPER_FP8, [8, 2**-9], [1, 1]) == 8 + 2**-9
    # 15 * 15 * 2^4 * 2^4 (exponent 14) thrice is 172800 = 1.318 * 2^17. Plus 2 = 2^(14-12): the sum is 172802, whose
    # lowest kept bit is 2^(17-13) = 16: 172800 is a multiple of 16, and 2 is lost.
    assert dot(HOPPER_FP8, [240, 240, 240, 2], [240, 240, 240, 1]) == 172800
    assert dot(BLACKWELL_FP8, [240, 240, 240, 2], [240, 240, 240, 1]) == 172802


def test_promotion_adds_and_empties_the_accumulator():
    # 1 in the first 128, 2^-14 in each group of the second 128: alone they come to 4 * 2^-14 = 2^-12.
    a = [1] + [0] * 127 + ([2**-7] + [0] * 31) * 4
    assert dot(HOPPER_FP8, a, a) == 1
    assert dot(HOPPER_FP8, a, a, promotion=128) == 1 + 2**-12
    assert dot(HOPPER_FP8, a, a, promotion=256) == 1
    # The float32 sum rounds to nearest even. Partial sums 2^16 and 2^-8 + 2^-9: an ulp of 2^16 is 2^-7, and 0.75 of it
    # goes up; 2^-8 alone is a tie, and goes to even.
    top = [256] + [0] * 127
    assert dot(HOPPER_FP8, [*top, 2**-4, 2**-5], [*top, 2**-4, 2**-4], promotion=128) == 2**16 + 2**-7
    assert dot(HOPPER_FP8, [*top, 2**-4], [*top, 2**-4], promotion=128) == 2**16


def test_scales_of_partial_sums_are_multiplied_first_and_added_in_one_fma():
    # (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24 is a tie, and goes to even, 1 + 2^-11. Times 3, that is 3 + 3 * 2^-11. One scale
    # after the other would give 3 * 2^-24 more, three quarters of an ulp.
    scale = [1 + 2**-12]
    assert dot(HOPPER_FP8, [3], None, scale, scale, promotion=128) == 3 + 3 * 2**-11
    # 3 * 11184811 = 2^25 + 1. So 3 times this scale is 2^-24 + 2^-49, more than half an ulp of 1, to which the FMA adds
    # it. Rounded to float32 before, it would be 2^-24, a tie.
    scale = F(11184811 * 2.0**-49)
    a = [1] + [0] * 127 + [3]
    assert dot(HOPPER_FP8, a, None, [1, scale], [1, 1], promotion=128) == 1 + 2**-23


def test_zeros_take_part_with_an_exponent_of_their_own():
    # bfloat16 on Hopper: 2^-133 is the largest exponent where all products are smaller and the accumulator is 0. The
    # lowest bit is 2^(-133 - 25) = 2^-158. 7 * 73 = 2^9 - 1, and (2^9 - 1) 2^-158 + 2^-158 = 2^-149, float32's least.
    row = unit("hopper", BF16)
    assert dot(row, [7 * 2**-80, 2**-80], [73 * 2**-78, 2**-78], a_format=BF16) == F(2.0**-149)
    # 31 * 33 = 2^10 - 1: with 2^-159 it would be 2^-149 again, but that is below the lowest bit, and float32 has
    # nothing between 0 and 2^-149.
    assert dot(row, [31 * 2**-80, 2**-80], [33 * 2**-79, 2**-79], a_format=BF16) == 0
    # Ampere: 2^(-132 - 24) = 2^-156, and 127 = 2^7 - 1.
    row = unit("ampere", BF16)
    assert dot(row, [127 * 2**-78, 2**-78], [2**-78, 2**-78], a_format=BF16) == F(2.0**-149)
    assert dot(row, [5 * 2**-78, 2**-78], [51 * 2**-79, 2**-79], a_format=BF16) == 0


def test_sums_of_16_bits_may_be_rounded_to_float16_after_each_group():
    # To nearest even: 2048 + 1 is a tie and goes to 2048, 2048 + 3 to 2052.
    row = unit("hopper", FP16, accumulator=np.float16)
    assert dot(row, [2048, 1]) == 2048
    assert dot(row, [2048, 3]) == 2052
    # After each group: 17 ones, of which 16 come in the first, then 1: 2048 + 15 -> 2064 (a tie of 2062 and 2064 is
    # 2063); + 1 -> 2065, nearest even 2064.
    assert dot(row, [2048] + [1] * 16) == 2064
    # 65504 + 16 is the tie between the largest value and 2^16: infinity. Below it the largest value stays.
    assert dot(row, [65504, 15]) == 65504
    assert dot(row, [65504, 16]) == inf
    assert dot(row, [-65504, -16]) == -inf
    # Beside zeros the lowest bit is 2^(-21 - 25). 2^-25 is half of the least value: 2^-46 more decides, 2^-47 is lost.
    assert dot(row, [2**-12, 2**-23], [2**-13, 2**-23]) == 2**-24
    assert dot(row, [2**-12, 2**-23], [2**-13, 2**-24]) == 0


def test_scales_of_microscaling_are_exponents():
    # 2^10 * 2^-20 on both sides: 2 * 2^-20 is the sum, with the bits of one group without scales.
    assert dot(MXFP8, [1, 1], None, [2**10], [2**-30]) == 2**-19
    # Two groups: 1, then 2^-30 * 2^4 * 2^2 = 2^-24: lowest bit 2^-25 while added; the accumulator keeps 2^-23 alone.
    two = [1] + [0] * 31 + [1]
    assert dot(MXFP8, two, None, [1, 2**-12], [1, 2**-11]) == 1 + 2**-23
    assert dot(MXFP8, two, None, [1, 2**-12], [1, 2**-12]) == 1
    # Bytes 0 and 254, 2^-127 and 2^127: 448 * 448 * 2^254 overflows, toward infinity.
    assert dot(MXFP8, [1], None, [2.0**-127], [2.0**127]) == 1
    assert dot(MXFP8, [448], [448], [2.0**127], [2.0**127]) == inf
    assert dot(MXFP8, [448], [448], [2.0**-127], [2.0**-127]) == 0
    # (2^-1 + ... + 2^-9) 2^-149 + 2^-9 2^-149 = 2^-149: the lowest bit beside zeros is 2^-158.
    halves = [2.0**-i for i in range(1, 10)]
    assert dot(MXFP8, [*halves, 2**-9], None, [2.0**-75], [2.0**-74]) == F(2.0**-149)
    # Half as large: 2^-159 is cut off, twice, and 2^-149 less a little is 0.
    assert dot(MXFP8, [1, *halves, 2**-9], None, [2.0**-75], [2.0**-75]) == 0


def test_products_of_fp4_are_added_exactly_in_sixteens():
    # 6 * 6 = 36; 15 of them and 0.5 * 0.5 are 540.25. Beside it, in other sixteens: -540 = -15 * 36. 0.25 is left.
    sixes, ones = [6] * 15, [1] * 4
    a, b = [*sixes, 0.5, *sixes, 0], [*sixes, 0.5, *(-6,) * 15, 0]
    assert dot(NVFP4, a, b, ones[:2], ones[:2]) == 0.25
    # The exponent of a sum is that of its scales, however large it is: 36 * 1 beside 0.25 * 2^-33 leaves 2^-35, the
    # lowest bit beside 2^0. 0.25 * 2^-34 = 2^-36 is lost. -36 in the third sixteen makes it visible.
    a, b = [6] + [0] * 15 + [0.5] + [0] * 15 + [6] + [0] * 15, [6] + [0] * 15 + [0.5] + [0] * 15 + [-6]
    b += [0] * 15
    assert dot(MXFP4, a, b, [1, 2.0**-33, 1], [1, 1, 1]) == 2.0**-35
    assert dot(MXFP4, a, b, [1, 2.0**-34, 1], [1, 1, 1]) == 0
    # A sum of products that cancel keeps the exponent of its scales (here 8 + 8 = 16: the lowest bit is 2^-19), and one
    # whose products are all 0 does not.
    cancelled, nothing, small = [6, 6] + [0] * 14, [0] * 16, [0.5] + [0] * 15
    for first, expected in ((cancelled, 0), (nothing, 2.0**-20)):
        b = [6, -6] + [1] * 14 + [0.5] * 16
        assert dot(NVFP4, first + small, b, [256, 2**-9], [256, 2**-9]) == expected


def test_signs_infinities_and_nan():
    row = unit("ampere", BF16)
    assert same_bits(dot(row, [0.0], [-1.0], a_format=BF16), F(0))
    assert same_bits(dot(row, [-(2.0**-100)], [2.0**-100], a_format=BF16), F(0))  # what is cut off has no sign
    assert same_bits(dot(row, [1, -1], a_format=BF16), F(0))
    assert dot(row, [inf, 1], a_format=BF16) == inf
    assert dot(row, [1, inf], [1, -2], a_format=BF16) == -inf
    assert dot(row, [2.0**127, 2.0**127], a_format=BF16) == inf
    # Beyond the largest value: infinity, though bits are cut off toward zero. 255 * 2^120 is below 2^128.
    assert dot(row, [255 * 2.0**119, 255 * 2.0**119], [2, 1], a_format=BF16) == inf
    assert dot(row, [255 * 2.0**119], [2], a_format=BF16) == F(255 * 2.0**120)
    quiet = np.uint32(0x7FFFFFFF).view(F)
    for a, b in (([nan, 1], [1, 1]), ([inf, 0], [0, 1]), ([inf, inf], [1, -1]), ([0.0], [-inf])):
        assert same_bits(dot(row, a, b, a_format=BF16), quiet)
    # In groups that follow each other, too; and an infinity that a sum has become stays one.
    assert same_bits(dot(row, [inf] + [0] * 7 + [-inf], a_format=BF16), quiet)
    assert dot(row, [2.0**127] * 8 + [-(2.0**127)] * 8, a_format=BF16) == inf
    # Scales: NaN makes even 0 NaN; of UE4M3 a zero makes its sixteen 0.
    assert same_bits(dot(MXFP8, [0], None, [nan], [1]), quiet)
    assert same_bits(dot(NVFP4, [0], None, [1], [nan]), quiet)
    assert same_bits(dot(NVFP4, [6], None, [0], [1]), F(0))
    # E5M2 has infinities; E4M3's NaN.
    assert dot(HOPPER_FP8, [inf], a_format=E5M2, b_format=E4M3) == inf
    assert same_bits(dot(HOPPER_FP8, [nan]), quiet)
    assert same_bits(dot(unit("hopper", E4M3, accumulator=np.float16), [nan]), quiet)


# --- against the definition -----------------------------------------------------------------------


def expected(row, formats, a, b, scales, block, promotion):
    """The definition's result of two vectors."""
    numbers, smallest = definition.NUMBERS[row.card, row.name], [definition.SMALLEST[fmt.name] for fmt in formats]
    a, b = a.tolist(), b.tolist()
    if promotion is not None:
        result = definition.promoted(a, b, numbers, smallest, promotion, scales)
    else:
        scale = None if row.scale_format is None else definition.SMALLEST[row.scale_format.name]
        result = definition.dot(a, b, numbers, smallest, scales, scale, block)
    return np.uint32(0x7FFFFFFF).view(F) if np.isnan(result) else F(result)


@every_unit
@profile
@given(data=st.data())
def test_rational_arithmetic_agrees(row, data):
    formats = data.draw(st.sampled_from(operand_formats(row)))
    k = data.draw(st.integers(0, 2 * row.products + 3))
    code = st.integers(0, 0xFFFF) if data.draw(st.booleans()) else st.integers(0x2E00, 0x4A4A)  # any; moderate ones
    m, n = data.draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    rows = st.lists(code, min_size=k, max_size=k)
    a, b = (
        np.array([values_of(fmt, data.draw(rows)) for _ in range(count)], F).reshape(count, k)
        for fmt, count in zip(formats, (m, n), strict=True)
    )
    block = data.draw(st.sampled_from(row.scale_blocks or (None,)))
    promotion = data.draw(st.sampled_from((None, row.products, 4 * row.products))) if block is None else None
    scales, scale_block = (None, None), block or promotion
    if block is not None or (promotion is not None and data.draw(st.booleans())):
        fmt = row.scale_format or refops.FORMATS["e4m3"]
        count = -(-k // scale_block)
        scale = st.integers(0x70, 0x8A) if fmt is E8M0 and data.draw(st.booleans()) else st.integers(0, 0xFF)
        scales = [
            np.abs(values_of(fmt, data.draw(st.lists(scale, min_size=count * size, max_size=count * size))))
            for size in (m, n)
        ]
        scales = [one.reshape(size, count) for one, size in zip(scales, (m, n), strict=True)]
    options = {"a_format": formats[0], "b_format": formats[1], "a_scale": scales[0], "b_scale": scales[1]}
    result = matmul(a, b, row, promotion=promotion, **options)
    wanted = np.empty((m, n), F)
    for i in range(m):
        for j in range(n):
            pair = None if scales[0] is None else (scales[0][i].tolist(), scales[1][j].tolist())
            wanted[i, j] = expected(row, formats, a[i], b[j], pair, block, promotion)
    assert_same_bits(result, wanted)


@every_unit
def test_rows_of_the_table_are_those_of_the_definition(row):
    numbers, accumulator = definition.NUMBERS[row.card, row.name], row.accumulator
    assert numbers == (
        row.products,
        row.fraction_bits,
        row.zero_exponent,
        accumulator.fraction_bits,
        accumulator.smallest_exponent,
        accumulator.rounding == "nearest_even",
        row.added_exactly,
    )
    for fmt in (*row.formats, *filter(None, [row.scale_format])):
        assert smallest_exponent(fmt) == definition.SMALLEST[fmt.name]


# --- faults ---------------------------------------------------------------------------------------


@every_unit
def test_a_wrong_number_changes_results(row):
    """Each number of each unit, but for those that no product can show."""
    cases = [random_case(row, seed) for seed in range(25)] + small_cases(row)
    right = [matmul(unit=row, **case) for case in cases]
    unseen = {
        name
        for name, wrong in faulty(row).items()
        if all(same_bits(matmul(unit=wrong, **case), result) for case, result in zip(cases, right, strict=True))
    }
    assert unseen == UNSEEN.get(row.name, set())


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("fmt", [E4M3, E5M2, E3M2, E2M3, E2M1, FP16, BF16], ids=str)
def test_a_wrong_smallest_exponent_changes_results(fmt, sign, monkeypatch):
    """Of subnormal elements; where 25 bits hold all products, beside sums of blocks with other scales."""
    rng = np.random.default_rng(0)
    row = MXFP8 if fmt in (E3M2, E2M3, E2M1) else unit("hopper", fmt)
    k = 8 * row.products
    case = {
        "a_format": fmt,
        "b_format": fmt,
        "b": values_of(fmt, rng.integers(0, 0x7B, (40, k)) << (8 * (fmt in (FP16, BF16)))),
    }
    case["a"] = values_of(fmt, rng.integers(0, 4, (40, k))) * rng.choice(F([-1, 1]), (40, k))
    if row is MXFP8:
        case |= {name: E8M0.values[rng.integers(113, 141, (40, 8))] for name in ("a_scale", "b_scale")}
        case["b"] = np.where(rng.random((40, k)) < 0.9, 0, values_of(fmt, rng.integers(0, 4, (40, k))))
    right = matmul(unit=row, **case)

    def wrong(of):
        return smallest_exponent(of) + sign * (of is not E8M0)

    monkeypatch.setattr("refops.products.arithmetic.smallest_exponent", wrong)
    assert not same_bits(matmul(unit=row, **case), right)


# --- shapes, memory, errors -----------------------------------------------------------------------


def test_no_tile_and_no_stride_changes_a_bit():
    rng = np.random.default_rng(0)
    a, b = (values_of(E4M3, rng.integers(0, 0x7F, (size, 100))) for size in (130, 67))
    options = {"a_format": E4M3, "b_format": E4M3, "promotion": 64}
    whole = matmul(a, b, HOPPER_FP8, **options)
    rows = [matmul(a[i : i + 1], b, HOPPER_FP8, **options) for i in range(len(a))]
    assert_same_bits(whole, np.concatenate(rows))
    assert_same_bits(matmul(b, a, HOPPER_FP8, **options), np.ascontiguousarray(whole.T))
    strided = np.zeros((100, 260), F)[:, ::2].T
    strided[...] = a
    assert_same_bits(matmul(strided, b[:, ::-1][:, ::-1], HOPPER_FP8, **options), whole)


@every_unit
def test_empty_products(row):
    fmt = row.formats[0]
    for m, n, k in ((0, 3, 5), (3, 0, 5), (2, 3, 0)):
        options = {"a_format": fmt, "b_format": fmt}
        if row.scale_format is not None:
            count = -(-k // row.scale_blocks[0])
            options |= {"a_scale": np.ones((m, count), F), "b_scale": np.ones((n, count), F)}
        assert_same_bits(matmul(np.ones((m, k), F), np.ones((n, k), F), row, **options), np.zeros((m, n), F))


def test_memory_is_that_of_the_results():
    """And of two panels: 20 MB for the products of a group in a tile, 32 bytes for each element of 64 rows of both."""
    a, b = np.ones((128, 1024), F), np.ones((64, 1024), F)
    matmul(a[:1], b[:1], BLACKWELL_FP8, a_format=E4M3, b_format=E4M3)
    tracemalloc.start()
    try:
        matmul(a[:, :64], b[:, :64], BLACKWELL_FP8, a_format=E4M3, b_format=E4M3)
        _, short = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        matmul(a, b, BLACKWELL_FP8, a_format=E4M3, b_format=E4M3)
        _, long = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert short < 20 << 20
    assert long - short < 128 * 1024 * 32


ONE, BLOCKED = np.ones((2, 64), F), np.ones((2, 1), F)
FORMATS = {"a_format": E4M3, "b_format": E4M3}
#: A wrong call, its error, and what the message must contain.
WRONG = [
    (lambda: unit("volta", E4M3), ValueError, "card must be one of 'ampere', 'hopper', 'blackwell'; got 'volta'"),
    (lambda: unit("hopper", F), TypeError, "a_format must be a FloatFormat.*float16 or bfloat16; got .*float32"),
    (lambda: unit("hopper", E4M3, "x"), TypeError, "b_format must be a FloatFormat.*; got 'x'"),
    (lambda: unit("ampere", E4M3), ValueError, "unit that multiplies E4M3.*: hopper and blackwell can; got 'ampere'"),
    (lambda: unit("hopper", E4M3, scale_format=E8M0), ValueError, "E4M3 with E8M0 scales.*: blackwell can; got 'hop"),
    (lambda: unit("hopper", FP16, BF16), ValueError, "float16 and bfloat16.*none of ampere, hopper, blackwell can"),
    (lambda: unit("hopper", BF16, accumulator=FP16), ValueError, "bfloat16, accumulated in float16: none"),
    (lambda: unit("hopper", FP16, accumulator="int8"), TypeError, "accumulator must be float32 or float16; got 'int8'"),
    (lambda: matmul(ONE, ONE, "hopper", **FORMATS), TypeError, "unit must be a Unit.*; got 'hopper'"),
    (
        lambda: matmul(ONE, ONE, HOPPER_FP8, a_format=E4M3, b_format=E2M1),
        ValueError,
        "of E4M3, E5M2; got E4M3 and E2M1",
    ),
    (
        lambda: matmul(ONE.astype(FP16), ONE, HOPPER_FP8, **FORMATS),
        TypeError,
        "a must be float32; got float16 of shape",
    ),
    (lambda: matmul(ONE, ONE[0], HOPPER_FP8, **FORMATS), ValueError, r"b must have two dimensions; got shape \(64,\)"),
    (lambda: matmul(ONE, ONE[:, 1:], HOPPER_FP8, **FORMATS), ValueError, r"a and b .*; got \(2, 64\) and \(2, 63\)"),
    (
        lambda: matmul(ONE, ONE + F(0.01), HOPPER_FP8, **FORMATS),
        ValueError,
        r"b must hold values of E4M3; got .*1.01.* at \[0, 0\]",
    ),
    (lambda: matmul(ONE * F(inf), ONE, HOPPER_FP8, **FORMATS), ValueError, "a must hold values of E4M3; got .*inf"),
    (
        lambda: matmul(ONE, ONE, HOPPER_FP8, promotion=48, **FORMATS),
        ValueError,
        "promotion must be a multiple of 32.*got 48",
    ),
    (
        lambda: matmul(ONE, ONE, HOPPER_FP8, promotion=1.0, **FORMATS),
        TypeError,
        "promotion must be an integer; got 1.0",
    ),
    (
        lambda: matmul(ONE, ONE, HOPPER_FP8, a_scale=BLOCKED, b_scale=BLOCKED, **FORMATS),
        ValueError,
        "a_scale and b_scale must be None.*got promotion=None",
    ),
    (
        lambda: matmul(ONE, ONE, MXFP8, **FORMATS),
        ValueError,
        "a_scale and b_scale must be given for the unit blackwell mxf8f6f4",
    ),
    (lambda: matmul(ONE, ONE, MXFP8, a_scale=BLOCKED, **FORMATS), ValueError, "must both be given or None"),
    (
        lambda: matmul(ONE, ONE, MXFP8, promotion=32, **FORMATS),
        ValueError,
        "promotion must be None with a unit that reads scales, mxf8f6f4; got 32",
    ),
    (
        lambda: matmul(ONE, ONE, MXFP8, a_scale=BLOCKED, b_scale=BLOCKED, **FORMATS),
        ValueError,
        r"of shape \(2, 2\) and \(2, 2\), one for 32 elements along k; got \(2, 1\)",
    ),
    (
        lambda: matmul(ONE, ONE, MXFP8, a_scale=ONE[:, :2] * 3, b_scale=ONE[:, :2], **FORMATS),
        ValueError,
        "a_scale must hold values of E8M0; got .*3.0",
    ),
    *(
        (partial(product_of, card, *[kind] * 2, split_interval=48), ValueError, "split_interval must .* 32.*got 48")
        for card, kind in (
            ("hopper", refops.CurrentScaling(E4M3)),
            ("blackwell", refops.MXFP8Scaling(E4M3)),
        )  # where nothing is split
    ),
    (
        lambda: product_of("ampere", np.float16, np.float16, split_interval=True),
        TypeError,
        "split_interval must be an integer; got True",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), WRONG)
def test_wrong_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


# --- the FMA --------------------------------------------------------------------------------------


def test_multiply_add_rounds_once():
    """Products near half an ulp of the addend, ties and what float64 loses among them, against fractions."""
    rng = np.random.default_rng(0)
    x, y = (rng.integers(1 << 23, 1 << 24, 3000).astype(F) * F(2.0**-23) for _ in range(2))
    y[::3] = F(2.0**-26) * rng.integers(1, 64, 1000)
    addend = (x.astype(np.float64) * y * 2.0 ** rng.integers(0, 60, 3000)).astype(F) * rng.choice([-1, 1], 3000)
    x[::5] *= F(2.0**-100)  # subnormal sums
    addend[::5] = np.where(rng.random(600) < 0.5, F(2.0**-140), F(0))
    y[::5] *= F(2.0**-45)
    for one, other, third, result in zip(x, y, addend.astype(F), multiply_add(x, y, addend.astype(F)), strict=True):
        exact = Fraction(float(one)) * Fraction(float(other)) + Fraction(float(third))
        assert result == F(definition.rounded(exact, definition.FLOAT32_SUM))
