"""Every 16-bit input, every code, every tie: the casts against ml_dtypes and against exact rational arithmetic.

"Spec" and its sections are those of docs/spec/quantization.md.
"""

import importlib
import math
import os
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from independent import BF16, FP16, ML_DTYPES, NAN_CODE, F, all_values, from_bits, ml_cast, ml_decode, with_sign

from arrays import assert_same_bits
from refops import (
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    E8M0,
    FORMATS,
    INT8,
    FloatFormat,
    IntegerFormat,
    decode,
    encode,
    formats,
    pack_fp4,
    unpack_fp4,
)
from refops.formats import encode_by_definition
from refops.rounding import floor_in

SIGNED = [fmt for fmt in FORMATS.values() if fmt.signed]
MODES = ["nearest_even", "nearest_away", "toward_zero", "up", "down"]
INF = math.inf

each_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=repr)
each_signed = pytest.mark.parametrize("fmt", SIGNED, ids=repr)
each_mode = pytest.mark.parametrize("rounding", MODES)
each_dtype = pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
saturate_or_not = pytest.mark.parametrize("saturate", [True, False], ids=["saturate", "overflow"])


# --- codes ------------------------------------------------------------------------------------------


@each_signed
def test_every_code_decodes_as_elsewhere(fmt):
    codes = np.arange(2**fmt.bits, dtype=np.uint8)
    ours, theirs = decode(codes, fmt), ml_decode(codes, fmt)
    nan = np.isnan(theirs)
    assert np.array_equal(np.isnan(ours), nan)
    assert_same_bits(ours[~nan], theirs[~nan])


def test_every_e8m0_code():
    codes = np.arange(256, dtype=np.uint8)
    assert_same_bits(decode(codes, E8M0)[:255], np.ldexp(1.0, np.arange(255) - 127).astype(F))
    assert np.isnan(decode(codes, E8M0)[255])
    assert_same_bits(decode(codes, E8M0)[:255], codes[:255].view(ml_dtypes.float8_e8m0fnu).astype(F))


@each_format
@each_mode
@saturate_or_not
def test_every_code_survives_the_round_trip(fmt, rounding, saturate):
    """Finite values and NaN under every mode; an infinity only where it may stay one, and no integer's -2."""
    codes = np.arange(2**fmt.bits, dtype=np.uint8)
    values = decode(codes, fmt)
    back = encode(values, fmt, rounding=rounding, saturate=saturate)
    nan, infinite = np.isnan(values), np.isinf(values)
    kept = np.where((codes == 0x80) & (fmt == INT8), 0x81, codes)
    assert np.array_equal(back[~nan & ~infinite], kept[~nan & ~infinite])
    assert (back[nan] == fmt.nan_code).all()
    largest = np.where(codes[infinite] >> 7, 0x80, 0) | fmt.largest_code
    assert np.array_equal(back[infinite], largest if saturate else codes[infinite])


@pytest.mark.parametrize("dtype", [BF16, FP16, np.dtype(F)], ids=str)
@each_signed
def test_codes_survive_through_every_input_dtype(fmt, dtype):
    """All values of these formats are exact in bfloat16 and float32, and in float16 too."""
    codes = np.arange(2**fmt.bits, dtype=np.uint8)
    values = decode(codes, fmt)
    usable = np.isfinite(values) & (np.abs(values) <= fmt.max)
    assert_same_bits(values.astype(dtype).astype(F)[usable], values[usable])
    assert np.array_equal(encode(values.astype(dtype), fmt)[usable], codes[usable])


def test_all_pairs_of_fp4_codes_pack_and_unpack():
    low, high = np.meshgrid(np.arange(16, dtype=np.uint8), np.arange(16, dtype=np.uint8))
    codes = np.stack([low, high], axis=-1)
    packed = pack_fp4(codes)
    assert packed.shape == (16, 16, 1)
    assert np.array_equal(packed[..., 0], low + 16 * high)
    assert_same_bits(unpack_fp4(packed), codes)
    assert sorted(packed.reshape(-1).tolist()) == list(range(256))


# --- all 16-bit inputs ------------------------------------------------------------------------------


@each_format
@each_mode
@saturate_or_not
@each_dtype
def test_table_equals_definition(fmt, rounding, saturate, dtype):
    """The fast path equals the search on the format's grid."""
    x = all_values(dtype)
    with np.errstate(invalid="ignore"):  # signalling NaN
        expected = encode_by_definition(x.astype(np.float64), fmt, saturate, rounding)
    assert_same_bits(encode(x, fmt, rounding=rounding, saturate=saturate), expected)


@each_signed
@each_dtype
def test_nearest_even_equals_others_clipped(fmt, dtype):
    """ml_dtypes, and for integers `rint`."""
    x = all_values(dtype)
    assert_same_bits(encode(x, fmt), ml_cast(x.astype(F), fmt))


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=repr)
@each_dtype
def test_overflow_equals_ml_dtypes(fmt, dtype):
    """Without saturation ml_dtypes follows IEEE 754: inf (E5M2) or NaN (E4M3). NaN is one class."""
    x = all_values(dtype).astype(F)
    with np.errstate(all="ignore"):
        theirs = x.astype(ML_DTYPES[fmt.name]).view(np.uint8)
    ours = encode(x, fmt, saturate=False)
    nan = np.isnan(decode(theirs, fmt))
    assert np.array_equal(np.isnan(decode(ours, fmt)), nan)
    assert np.array_equal(ours[~nan], theirs[~nan])
    # A NaN that was not in the input has the sign of the number that overflowed.
    created = nan & ~np.isnan(x)
    assert np.array_equal(ours[created] >> 7, np.signbit(x[created]).astype(np.uint8))


@pytest.mark.parametrize("fmt", [E2M1, E3M2, E2M3], ids=repr)
@each_dtype
def test_formats_without_inf_and_nan_saturate_always(fmt, dtype):
    x = all_values(dtype)
    for rounding in MODES[:2]:
        saturated = encode(x, fmt, rounding=rounding)
        assert_same_bits(encode(x, fmt, rounding=rounding, saturate=False), saturated)
    assert (encode(x, fmt)[np.isnan(x.astype(F))] == NAN_CODE[fmt.name]).all()


@each_dtype
def test_e8m0_against_ml_dtypes(dtype):
    """ml_dtypes is "nearest_away" without saturation, except that 0 is NaN and 2^-127 < x < 1.5 * 2^-127 goes up.

    Exactly those must differ.
    """
    x = all_values(dtype).astype(F)
    x = x[~np.signbit(x)]
    with np.errstate(all="ignore"):
        theirs = x.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)
    ours = encode(x, E8M0, rounding="nearest_away", saturate=False)
    different = (x == 0) | ((x > 2.0**-127) & (x < 1.5 * 2.0**-127))
    assert np.array_equal(ours != theirs, different)
    assert (ours[x == 0] == 0).all() and (ours[(x > 0) & different] == 0).all()


@each_mode
@each_dtype
def test_e8m0_encodes_magnitudes(rounding, dtype):
    """E8M0 has no sign: x and -x have one code under every mode, the directed ones too."""
    x = all_values(dtype)
    assert_same_bits(encode(-x, E8M0, rounding=rounding), encode(x, E8M0, rounding=rounding))


@each_dtype
@each_format
def test_modes_bracket_the_value(fmt, dtype):
    """down <= x <= up, toward_zero between them and 0, the nearest modes one of the two neighbours; within range."""
    x = all_values(dtype)
    v = x.astype(F)
    v = v[np.abs(v) <= fmt.max]
    v = v if fmt.signed else v[v >= 2.0**-127]
    x = v.astype(dtype)
    by_mode = {mode: decode(encode(x, fmt, rounding=mode), fmt) for mode in MODES}
    assert (by_mode["down"] <= v).all() and (v <= by_mode["up"]).all()
    exact = by_mode["down"] == by_mode["up"]
    assert np.array_equal(exact, by_mode["down"] == v)
    expected = np.where(v < 0, by_mode["up"], by_mode["down"])
    assert np.array_equal(by_mode["toward_zero"], expected)
    middle = (by_mode["down"].astype(np.float64) + by_mode["up"].astype(np.float64)) / 2
    for mode in ("nearest_even", "nearest_away"):
        assert np.array_equal(by_mode[mode][v < middle], by_mode["down"][v < middle])
        assert np.array_equal(by_mode[mode][v > middle], by_mode["up"][v > middle])
    tie = (v == middle) & ~exact
    assert tie.any()
    assert (
        np.abs(by_mode["nearest_away"][tie]) == np.maximum(np.abs(by_mode["down"]), np.abs(by_mode["up"]))[tie]
    ).all()
    assert (encode(x, fmt)[tie] % 2 == 0).all()


# --- float32 around every tie -------------------------------------------------------------------------


def scalar_encode(x, fmt, rounding, saturate):
    """The code of one float, from the definition of the format in rational arithmetic: no grid, no table."""
    negative = math.copysign(1, x) < 0 and fmt.signed
    if math.isnan(x):
        return NAN_CODE[fmt.name]
    overflow_code = fmt.largest_code
    if not saturate:
        overflow_code = next(c for c in (fmt.infinity_code, fmt.nan_code, fmt.largest_code) if c is not None)
    if math.isinf(x):
        return with_sign(overflow_code, negative, fmt)
    a = abs(Fraction(x))
    exponent = field_exponent(x, fmt)
    quantum = Fraction(2) ** (exponent - fmt.mantissa_bits)
    steps = a // quantum
    rest = a / quantum - steps
    if not fmt.has_subnormals and a < quantum:  # E8M0 has nothing below 2^-127
        return 0
    away = {
        "nearest_even": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and is_odd(steps, exponent, fmt)),
        "nearest_away": rest >= Fraction(1, 2),
        "toward_zero": False,
        "up": rest > 0 and not negative,
        "down": rest > 0 and negative,
    }[rounding]
    rounded = (steps + away) * quantum
    if rounded > Fraction(float(fmt.max)):  # IEEE 754, 7.4: directed modes overflow in their own direction only
        stays = rounding == "toward_zero" or rounding == ("up" if negative else "down")
        return with_sign(fmt.largest_code if stays else overflow_code, negative, fmt)
    return with_sign(code_of(rounded, fmt), negative, fmt)


def field_exponent(value, fmt):
    """Exponent of the binade of a finite value; subnormals share the least one."""
    return max(math.frexp(value)[1] - 1, 1 - fmt.bias if fmt.has_subnormals else -fmt.bias)


def is_odd(steps, exponent, fmt):
    """Whether the lower neighbour's code is odd: its last mantissa bit, or for E8M0 its exponent's."""
    return bool(steps % 2) if fmt.mantissa_bits else (exponent + fmt.bias) % 2 == 1


def code_of(value, fmt):
    """Code of an exact non-negative value, by fields."""
    if value == 0 or fmt == INT8:
        return int(64 * value)
    exponent = field_exponent(float(value), fmt)
    scaled = value / Fraction(2) ** exponent  # 1.m, or 0.m for subnormals
    subnormal = scaled < 1
    mantissa = (scaled - (not subnormal)) * 2**fmt.mantissa_bits
    assert mantissa.denominator == 1
    return ((0 if subnormal else exponent + fmt.bias) << fmt.mantissa_bits) + int(mantissa)


def around_every_boundary(fmt):
    """Every value, every midpoint and the overflow threshold, each with its two float32 neighbours, both signs."""
    grid = np.unique(np.abs(fmt.values[np.isfinite(fmt.values)])).astype(np.float64)
    step = grid[-1] - grid[-2] if fmt.signed else grid[-1]
    points = np.concatenate([grid, (grid[:-1] + grid[1:]) / 2, grid[-1] + step * np.array([0.5, 1.0, 1.5])])
    points = points[points <= np.finfo(F).max].astype(F)
    with np.errstate(all="ignore"):
        near = np.concatenate([points, np.nextafter(points, F(0)), np.nextafter(points, F(INF))])
    extra = [0.0, 2.0**-149, 2.0**-126, 1e-30, np.finfo(F).max, INF, math.nan]
    near = np.concatenate([near, np.array(extra, F)])
    return np.concatenate([near, -near])


@each_format
@each_mode
@saturate_or_not
def test_float32_around_every_tie_against_rationals(fmt, rounding, saturate):
    x = around_every_boundary(fmt)
    expected = [scalar_encode(float(v), fmt, rounding, saturate) for v in x]
    actual = encode(x, fmt, rounding=rounding, saturate=saturate).tolist()
    wrong = [(float(v).hex(), a, e) for v, a, e in zip(x, actual, expected, strict=True) if a != e]
    assert not wrong, wrong[:5]


@each_signed
def test_random_float32_against_others(fmt):
    """A million bit patterns, most near the format's range."""
    rng = np.random.default_rng(fmt.bits)
    anything = rng.integers(0, 1 << 32, 300_000, dtype=np.uint32).view(F)
    exponents = rng.integers(100, 146, 700_000, dtype=np.uint32) << 23
    near = (rng.integers(0, 1 << 32, 700_000, dtype=np.uint32) & np.uint32(0x807FFFFF) | exponents).view(F)
    x = np.concatenate([anything, near])
    assert_same_bits(encode(x, fmt), ml_cast(x, fmt))


def test_nan_payloads_that_a_truncation_would_turn_into_inf():
    """NaN whose payload stands in the low 16 bits only."""
    x = from_bits(0x7F800001, 0xFF800001, 0x7F80FFFF, 0x7F808000)
    for fmt in FORMATS.values():
        assert encode(x, fmt).tolist() == [NAN_CODE[fmt.name]] * 4


@each_dtype
@pytest.mark.parametrize(
    ("fmt", "peer"),
    [
        (
            FloatFormat("e3m4", 3, 4, bias=3, largest_code=0x6F, infinity_code=0x70, nan_code=0x78),
            ml_dtypes.float8_e3m4,
        ),
        (
            FloatFormat("e4m3", 4, 3, bias=7, largest_code=0x77, infinity_code=0x78, nan_code=0x7C),
            ml_dtypes.float8_e4m3,
        ),
    ],
    ids=["e3m4", "ieee-e4m3"],
)
def test_formats_of_the_users_own(fmt, peer, dtype):
    """`FloatFormat` is public: the IEEE-like 8-bit formats of ml_dtypes, infinities included."""
    x = all_values(dtype).astype(F)
    x = x[~np.isnan(x)]
    with np.errstate(over="ignore"):
        assert_same_bits(encode(x, fmt, saturate=False), x.astype(peer).view(np.uint8))
    assert_same_bits(decode(np.arange(0x70, dtype=np.uint8), fmt), np.arange(0x70, dtype=np.uint8).view(peer).astype(F))


def test_formats_that_encode_cannot_serve_are_refused():
    """More than 8 bits do not fit a uint8 code; 6 mantissa bits put midpoints between bfloat16 values."""
    for fields in ((4, 5, 7, 0x1FE), (1, 6, 0, 0x7F)):
        with pytest.raises(ValueError, match="bits"):
            encode(np.ones(1, F), FloatFormat("own", fields[0], fields[1], bias=fields[2], largest_code=fields[3]))


@pytest.mark.parametrize("fields", [(8, 6), (8, 0), (4, 0), (3, 3), (5, 1)], ids=str)
@pytest.mark.parametrize("rounding", MODES[:3])
def test_integers_of_the_users_own(fields, rounding):
    """Any width from 3 bits: against `rint`, `trunc` and half away from zero in float64."""
    bits, fraction = fields
    fmt, largest = IntegerFormat("own", bits, fraction), 2 ** (bits - 1) - 1
    x = np.arange(-(2**bits) * 8, 2**bits * 8 + 1) / 2.0 ** (fraction + 3)
    scaled = x * 2.0**fraction
    away = np.copysign(np.floor(np.abs(scaled) + 0.5), scaled)
    integers = {"nearest_even": np.rint(scaled), "nearest_away": away, "toward_zero": np.trunc(scaled)}[rounding]
    integers = np.clip(integers, -largest, largest).astype(int)
    assert np.array_equal(encode(x.astype(F), fmt, rounding=rounding), integers & (2**bits - 1))
    codes = np.arange(2**bits)
    values = np.where(codes > largest, codes - 2**bits, codes) / 2.0**fraction
    assert np.array_equal(decode(codes.astype(np.uint8), fmt), values.astype(F))
    magnitudes, negative = fmt.magnitude_code(codes), values < 0
    assert np.array_equal(magnitudes, np.abs(values) * 2**fraction)
    assert np.array_equal(fmt.signed_code(magnitudes, negative), codes)


@each_format
def test_sign_and_magnitude_make_the_code(fmt):
    """`signed_code` undoes `magnitude_code`, for every code; `code_of_nan` is what NaN becomes."""
    codes = np.arange(2**fmt.bits, dtype=np.uint8)
    negative = np.signbit(fmt.values) if fmt.nan_code is None else codes >= 2 ** (fmt.bits - 1)
    magnitudes = fmt.magnitude_code(codes)
    assert np.array_equal(fmt.signed_code(magnitudes, negative & fmt.signed), codes)
    usable = magnitudes <= fmt.largest_code
    assert np.array_equal(fmt.grid[magnitudes[usable]], np.abs(fmt.values[usable]))
    assert fmt.code_of_nan == NAN_CODE[fmt.name] and sum(fmt.fields.values()) == fmt.bits


ROOT = Path(__file__).resolve().parent.parent.parent
EXHAUSTIVE = ROOT / "tests" / "exhaustive" / "encode_all_float32.py"


def test_part_of_the_exhaustive_comparison():
    """`make exhaustive` on one float32 in 512, as a user runs it."""
    command = [sys.executable, str(EXHAUSTIVE), "--fraction", "1/512"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    verdict = r"8,388,608 values x 5 formats: 0 differences in \d+ s"
    assert re.fullmatch(verdict, done.stdout.strip().splitlines()[-1])


def test_exhaustive_comparison_can_fail(monkeypatch, capsys):
    """Against another format it counts the differences and exits with 1."""
    monkeypatch.syspath_prepend(EXHAUSTIVE.parent)
    script = importlib.import_module("encode_all_float32")
    monkeypatch.setitem(script.PEERS, "e4m3", ml_dtypes.float8_e4m3)  # it has inf, and its largest value is 240
    assert script.main(["--fraction", "1/65536", "--formats", "e4m3", "--workers", "1"]) == 1
    verdict = capsys.readouterr().out.strip().splitlines()[-1]
    assert re.match(r"65,536 values x 1 formats: [1-9][\d,]* differences", verdict)
    assert script.compare("e2m1", np.array([1.0, 2.5, math.nan, -INF], F)) == ({"differences": 0}, None)
    assert script.compare("e4m3", np.array([1.0, 448.0, 300.0], F)) == ({"differences": 2}, 0x43E00000)


# --- stochastic -----------------------------------------------------------------------------------------


def every_byte(x, fmt, saturate=True):
    """Codes of each value under all 256 random bytes: (n, 256)."""
    repeated = np.repeat(np.asarray(x, F)[:, None], 256, axis=1)
    random_bits = np.broadcast_to(np.arange(256, dtype=np.uint8), repeated.shape)
    return encode(repeated, fmt, rounding="stochastic", random_bits=random_bits, saturate=saturate)


@each_signed
@pytest.mark.parametrize("sign", [1, -1], ids=["positive", "negative"])
def test_stochastic_probability_is_exact(fmt, sign):
    """A value k/256 of the way between two neighbours goes up for exactly k of the 256 bytes: the largest ones."""
    magnitudes = np.sort(fmt.values[np.isfinite(fmt.values) & ~np.signbit(fmt.values)])
    lower = np.arange(len(magnitudes) - 1)
    k = np.arange(256)
    step = np.diff(magnitudes.astype(np.float64))
    x = magnitudes[lower].astype(np.float64)[:, None] + step[:, None] * k / 256
    codes = every_byte(sign * x.astype(F).reshape(-1), fmt).reshape(len(lower), 256, 256)
    goes_up = np.arange(256) >= 256 - k[:, None]  # [k, byte]
    assert np.array_equal(codes, with_sign(lower[:, None, None] + goes_up, sign < 0, fmt))


@each_signed
@saturate_or_not
def test_stochastic_never_moves_a_value_of_the_format(fmt, saturate):
    codes = np.arange(2**fmt.bits, dtype=np.uint8)
    values = decode(codes, fmt)
    keep = np.isfinite(values) & (np.abs(values) <= fmt.max)
    assert (every_byte(values[keep], fmt, saturate) == codes[keep][:, None]).all()


@each_signed
def test_stochastic_floor_from_a_table(fmt):
    """The table by which a stochastic cast finds the value below, on both sides of every entry's ends, is a search."""
    keys = np.arange(1 << fmt.key_bits - 1, dtype=np.uint32) << np.uint32(32 - fmt.key_bits)
    magnitudes = np.concatenate([keys - np.uint32(1), keys, keys + np.uint32(1)]).view(F)
    magnitudes = magnitudes[magnitudes >= 0]
    grid = np.append(fmt.grid, fmt.after_largest)
    assert np.array_equal(formats._floor(fmt, magnitudes), floor_in(grid)(magnitudes))


@each_signed
def test_stochastic_specials(fmt):
    """NaN is canonical, zeros and small numbers keep their sign, overflow saturates, for every byte."""
    zero, largest = ([with_sign(code, negative, fmt) for negative in (False, True)] for code in (0, fmt.largest_code))
    x = [math.nan, -math.nan, INF, -INF, 3e38, -3e38, 0.0, -0.0, -(2.0**-149), 2.0**-149]
    expected = [NAN_CODE[fmt.name]] * 2 + largest * 2 + zero + zero[::-1]
    assert (every_byte(x, fmt) == np.array(expected, np.uint8)[:, None]).all()


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=repr)
def test_stochastic_overflow_without_saturation(fmt):
    """Between the largest value and the next step the probability is as inside the range; beyond, all overflow."""
    step = float(fmt.max) - float(fmt.grid[-2])
    over = fmt.nan_code if fmt.infinity_code is None else fmt.infinity_code
    x = [float(fmt.max) + step / 4, float(fmt.max) + step, INF, -INF]
    codes = every_byte(x, fmt, saturate=False)
    assert (codes[0] == np.where(np.arange(256) >= 192, over, fmt.largest_code)).all()
    assert (codes[1] == over).all() and (codes[2] == over).all() and (codes[3] == over | 0x80).all()


def test_stochastic_e2m1_against_rationals():
    """The software meaning of `cvt.rs` (spec 6.8) on values around every boundary: exact sum, one rounding."""
    x = around_every_boundary(E2M1)
    x = x[np.isfinite(x)]
    codes = every_byte(x, E2M1)
    grid = [Fraction(v) for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
    for value, row in zip(x.tolist(), codes.tolist(), strict=True):
        a = abs(Fraction(value))
        step = Fraction(1, 2) if a < 2 else 1 if a < 4 else 2
        for byte in range(0, 256, 5):
            t = Fraction(float(F(float(a + step * Fraction(byte, 256)))))  # float64 first: exact for these values
            code = max(i for i, v in enumerate(grid) if v <= t)
            assert row[byte] == code + (8 if math.copysign(1, value) < 0 else 0), (value, byte)


@each_dtype
def test_stochastic_is_one_of_the_two_neighbours(dtype):
    """Every 16-bit input with random bytes: between "down" and "up", and the mean is unbiased within 5 sigma."""
    x = all_values(dtype)
    x = x[np.isfinite(x.astype(F))]
    rng = np.random.default_rng(3)
    for fmt in SIGNED:
        codes = encode(x, fmt, rounding="stochastic", random_bits=rng.integers(0, 256, x.shape, dtype=np.uint8))
        down, up = (encode(x, fmt, rounding=mode) for mode in ("down", "up"))
        assert ((codes == down) | (codes == up)).all()
        values, v = decode(codes, fmt).astype(np.float64), x.astype(np.float64)
        inside = np.abs(v) < float(fmt.max)
        step = (decode(up, fmt).astype(np.float64) - decode(down, fmt))[inside]
        # A byte's probability is floor(256 f) / 256: at most 1/256 of a step below f, 1/512 on average.
        error = (np.abs(values) - np.abs(v))[inside].sum()
        assert -step.sum() / 256 - 5 * np.sqrt((step**2).sum() / 4) <= error <= 5 * np.sqrt((step**2).sum() / 4)
