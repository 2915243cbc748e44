"""Casts of single elements: the bits of `refops` and ml_dtypes, compiled for the CPU and in the simulator.

Inputs: every bfloat16 with five settings of the lower half, which puts values on, just below and just above every
16-bit tie; random bits; values where the small formats have their codes.
"""

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import ml_dtypes
import numba
import numpy as np
import pytest
from scalars import F, over_arrays

import refops
from cuda_kernels import casts, scale_rules, vectors
from cuda_kernels.simt import device
from refops import rounding
from refops.scalings.arithmetic import REFERENCE
from tiers import sampled

FORMATS = tuple(casts.ENCODERS)
PEERS = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
HALVES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
WIDTHS = {"e2m1": 4}


def inputs():
    """A million float32 values of every kind, NaN among them."""
    rng = np.random.default_rng(0)
    upper = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001], np.uint32)
    patterns = np.concatenate([(upper[:, None] | lower).ravel(), rng.integers(0, 1 << 32, 400_000, dtype=np.uint32)])
    scales = np.exp2(rng.uniform(-20, 17, 300_000))
    return np.concatenate([patterns.view(F), (rng.standard_normal(300_000) * scales).astype(F)])


X = inputs()
NUMBERS = X[~np.isnan(X)]
#: Compute capabilities, None for code that runs anywhere.
TARGETS = [None, (8, 0), (9, 0), (10, 0, "a")]


@pytest.mark.check
@pytest.mark.parametrize("name", FORMATS)
def test_encoders_give_the_reference_s_codes(name):
    np.testing.assert_array_equal(
        over_arrays(casts.ENCODERS[name], np.uint32)(X), refops.encode(X, refops.FORMATS[name])
    )


@pytest.mark.parametrize("name", PEERS)
def test_encoders_give_ml_dtypes_codes_within_the_range(name):
    limit = float(ml_dtypes.finfo(PEERS[name]).max)
    theirs = np.clip(NUMBERS, F(-limit), F(limit)).astype(PEERS[name]).view(np.uint8)
    np.testing.assert_array_equal(over_arrays(casts.ENCODERS[name], np.uint32)(NUMBERS), theirs)


@pytest.mark.check
@pytest.mark.parametrize("name", FORMATS)
def test_decoders_give_every_code_its_value(name):
    expected = refops.FORMATS[name].values
    for decode in (casts.DECODERS[name], casts.CPU_DECODERS[name]):
        got = over_arrays(decode)(np.arange(len(expected), dtype=np.uint32))
        np.testing.assert_array_equal(got, expected)
        np.testing.assert_array_equal(np.signbit(got)[~np.isnan(got)], np.signbit(expected)[~np.isnan(got)])


@sampled("name", FORMATS, 3)
def test_pairs_are_two_codes(name):
    """Also the versions for GPUs, which give the same elsewhere, for NaN with the sign that a GPU makes."""
    low, high = X[:-1], X[1:]
    fmt = refops.FORMATS[name]
    expected = refops.encode(low, fmt).astype(np.uint16) | refops.encode(high, fmt).astype(np.uint16) << WIDTHS.get(
        name, 8
    )
    functions = {casts.pairs_for(name, target) for target in (None, (8, 0), (9, 0), (10, 0, "a"))}
    assert len(functions) == {"e4m3": 2, "e5m2": 2, "e2m1": 4}.get(name, 1)
    negative_nan = np.isnan(X) & np.signbit(X)  # no arithmetic on a GPU makes one
    keep = ~(negative_nan[:-1] | negative_nan[1:])
    np.testing.assert_array_equal(over_arrays(casts.pairs_for(name, None), np.uint16)(low, high), expected)
    low, high, expected = low[keep], high[keep], expected[keep]
    for function in functions:
        np.testing.assert_array_equal(over_arrays(function, np.uint16)(low, high), expected)


@pytest.mark.parametrize(
    ("name", "target", "native"),
    [
        ("e4m3", (8, 0), False),
        ("e4m3", (8, 9), True),
        ("e5m2", (9, 0), True),
        ("e2m1", (9, 0), False),
        ("e2m1", (10, 0), False),
        ("e2m1", (10, 0, "a"), True),
        ("e2m1", (12, 0, "a"), True),
        ("e2m1", (12, 0, "f"), True),
        ("e3m2", (10, 0, "a"), False),
        ("e4m3", None, False),
    ],
)
def test_instructions_only_where_the_gpu_has_them(name, target, native):
    without = {casts.pairs_for(name, None), casts.pairs_for(name, (8, 0)), casts.e2m1_pair_by_signed_addition}
    assert (casts.pairs_for(name, target) not in without) == native


@sampled(("name", "target"), product(["e4m3", "e5m2", "e3m2", "e2m1"], TARGETS), 5)
def test_four_codes_are_two_pairs(name, target):
    numbers = [np.roll(NUMBERS, k) for k in range(4)]
    pair = over_arrays(casts.pairs_for(name, None), np.uint16)
    width = np.uint32(8 if name == "e2m1" else 16)
    expected = pair(*numbers[:2]).astype(np.uint32) | pair(*numbers[2:]).astype(np.uint32) << width
    np.testing.assert_array_equal(over_arrays(casts.quads_for(name, target), np.uint32)(*numbers), expected)


@pytest.mark.parametrize("target", TARGETS)
def test_eight_codes_are_four_pairs(target):
    """Of E2M1, with the halfway points of its grid and their neighbours among the eight."""
    halfway = F([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    x = np.concatenate(
        [NUMBERS, np.nextafter(halfway, F(0)), halfway, np.nextafter(halfway, F(9)), -halfway, -F([6, 7])]
    )
    numbers = [np.roll(x, k) for k in range(8)]
    pair, eight = over_arrays(casts.pairs_for("e2m1", None), np.uint16), casts.eights_for(target)
    pairs = [pair(*numbers[k : k + 2]).astype(np.uint32) << np.uint32(4 * k) for k in range(0, 8, 2)]
    of_eight = device(lambda a, b, c, d, e, f, g, h: eight((a, b, c, d, e, f, g, h)))
    np.testing.assert_array_equal(over_arrays(of_eight, np.uint32)(*numbers), np.bitwise_or.reduce(pairs))


@sampled(("name", "target"), product(FORMATS, TARGETS), 9)
def test_eight_codes_of_words_have_their_values(name, target):
    """Every code in each of the eight places."""
    fmt, width = refops.FORMATS[name], WIDTHS.get(name, 8)
    codes = np.stack([np.roll(np.arange(len(fmt.values)), k) for k in range(8)]).astype(np.uint64)
    packed = np.bitwise_or.reduce(codes << (np.arange(8, dtype=np.uint64)[:, None] * np.uint64(width)))
    low = packed.astype(np.uint32)
    high = low if name == "e2m1" else (packed >> np.uint64(32)).astype(np.uint32)
    decode = vectors.make_decode(name, target)

    @numba.njit
    def decode_all(low, high, out):
        for i in range(low.size):
            values = decode(low[i], high[i])
            for k in range(8):
                out[k, i] = values[k]

    got, expected = np.empty(codes.shape, F), fmt.values[codes]
    decode_all(low, high, got)
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(np.signbit(got)[~np.isnan(got)], np.signbit(expected)[~np.isnan(got)])


@pytest.mark.parametrize("target", [(8, 0), (9, 0)])
def test_e4m3_of_one_number_and_back(target):
    encode, decode = casts.one_for(refops.E4M3, target)
    codes = np.arange(256, dtype=np.uint32)
    np.testing.assert_array_equal(over_arrays(encode, np.uint32)(NUMBERS), over_arrays(casts.e4m3, np.uint32)(NUMBERS))
    np.testing.assert_array_equal(over_arrays(decode)(codes), over_arrays(casts.decode_e4m3)(codes))


@pytest.mark.parametrize("limit", [448.0, 57344.0, 6.0, 4.0, 1.75])
def test_a_power_of_two_quotient_without_a_division_is_that_with_one(limit):
    """Every exponent with mantissas about the limit's, about 1 and 2, and random ones; subnormal numbers."""
    near = np.concatenate([np.arange(-9, 10) + at for at in (0, 0x400000, 0x600000, 0x800000)])
    mantissas = np.concatenate([near, np.random.default_rng(2).integers(0, 1 << 23, 1000)])
    bits = ((np.arange(256)[:, None] << 23) + mantissas).ravel()
    x = bits[(bits > 0) & (bits < 0x7F800000)].astype(np.uint32).view(F)
    for overflow in (F(np.finfo(F).max), F(65504)):
        with np.errstate(all="ignore"):
            expected = REFERENCE.quotient(F(limit), True)(x, overflow)
        np.testing.assert_array_equal(
            over_arrays(scale_rules.make_power_of_two_quotient(F(limit)))(x, overflow), expected
        )


@pytest.mark.parametrize("name", HALVES)
def test_narrow_gives_the_reference_s_bits(name):
    with np.errstate(all="ignore"):
        expected = rounding.stored(X, np.dtype(HALVES[name])).view(np.uint16)
    np.testing.assert_array_equal(over_arrays(casts.STORAGES[name].narrow, np.uint16)(X), expected)


@pytest.mark.parametrize("name", HALVES)
def test_narrow_gives_ml_dtypes_and_numpy_s_bits_of_numbers(name):
    with np.errstate(over="ignore"):
        expected = NUMBERS.astype(HALVES[name]).view(np.uint16)
    np.testing.assert_array_equal(over_arrays(casts.STORAGES[name].narrow, np.uint16)(NUMBERS), expected)


@pytest.mark.parametrize("name", HALVES)
def test_widen_is_exact_for_every_pattern(name):
    patterns = np.arange(1 << 16, dtype=np.uint16)
    expected = patterns.view(HALVES[name]).astype(F)
    got = over_arrays(casts.STORAGES[name].widen)(patterns)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(got[number].view(np.uint32), expected[number].view(np.uint32))
    assert np.all(np.isnan(got[~number]))


@pytest.mark.parametrize("name", HALVES)
def test_round_is_narrow_then_widen(name):
    row = casts.STORAGES[name]
    expected = over_arrays(row.widen)(over_arrays(row.narrow, np.uint16)(X))
    np.testing.assert_array_equal(over_arrays(row.round)(X).view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize(
    "pair, name", [("bf16_pair", "bfloat16"), ("bf16_pair_instruction", "bfloat16"), ("f16_pair", "float16")]
)
def test_halves_in_one_register(pair, name):
    narrow = over_arrays(casts.STORAGES[name].narrow, np.uint32)
    got = over_arrays(getattr(casts, pair), np.uint32)(X[:-1], X[1:])
    np.testing.assert_array_equal(got, narrow(X[:-1]) | narrow(X[1:]) << np.uint32(16))


def test_float32_is_stored_as_it_is_but_for_nan():
    got = over_arrays(casts.narrow_f32)(X).view(np.uint32)
    np.testing.assert_array_equal(got, np.where(np.isnan(X), np.uint32(0x7FFFFFFF), X.view(np.uint32)))


def test_float32_is_read_as_it_is():
    got = over_arrays(casts.widen_f32)(X)
    np.testing.assert_array_equal(got[~np.isnan(X)].view(np.uint32), NUMBERS.view(np.uint32))
    assert np.all(np.isnan(got[np.isnan(X)]))


def test_e8m0_rounds_up():
    x = np.abs(NUMBERS)
    expected = refops.encode(x, refops.E8M0, rounding="up")
    np.testing.assert_array_equal(over_arrays(casts.e8m0_up, np.uint32)(x), expected)


def test_e8m0_values_and_multipliers():
    codes = np.arange(256, dtype=np.uint32)
    np.testing.assert_array_equal(over_arrays(casts.e8m0_value)(codes), refops.E8M0.values)
    np.testing.assert_array_equal(over_arrays(casts.e8m0_multiplier)(codes[:255]), REFERENCE.inverse_power(codes[:255]))


@pytest.mark.parametrize("seed, offset", [(0, 0), (0x123456789ABCDEF1, 0xFEDCBA9876543210), (2**64 - 1, 2**64 - 1)])
def test_philox_gives_the_reference_s_words(seed, offset):
    subsequences = np.random.default_rng(1).integers(0, 1 << 63, 1000, dtype=np.uint64)
    subsequences[:3] = 0, 1, 2**64 - 1

    @numba.njit
    def words(seed, offset, subsequences, out):
        for i in range(len(subsequences)):
            out[i, 0], out[i, 1], out[i, 2], out[i, 3] = casts.philox(seed, offset, subsequences[i])

    got = np.empty((1000, 4), np.uint32)
    words(np.uint64(seed), np.uint64(offset), subsequences, got)
    np.testing.assert_array_equal(got, rounding.philox(seed, offset, subsequences))


def test_philox_gives_the_published_words():
    """Random123's known answers for philox4x32-10: all zero, and all ones."""
    for fill, expected in [
        (0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ]:
        assert numba.njit(lambda a: casts.philox(a, a, a))(np.uint64(fill)) == expected


def test_stochastic_rounding_gives_the_reference_s_codes():
    rng = np.random.default_rng(2)
    x = np.concatenate([X, (rng.standard_normal(500_000) * 3).astype(F)])
    random_bytes = rng.integers(0, 256, x.size, dtype=np.uint8)
    expected = refops.encode(x, refops.E2M1, rounding="stochastic", random_bits=random_bytes)
    np.testing.assert_array_equal(over_arrays(casts.e2m1_stochastic, np.uint32)(x, random_bytes), expected)


def test_stochastic_rounding_of_every_grid_value_and_byte():
    """All steps of 1/512 from -7 to 7 with all 256 bytes."""
    x = np.repeat(np.arange(-7 * 512, 7 * 512 + 1, dtype=F) / F(512), 256)
    random_bytes = np.tile(np.arange(256, dtype=np.uint8), 7 * 1024 + 1)
    expected = refops.encode(x, refops.E2M1, rounding="stochastic", random_bits=random_bytes)
    np.testing.assert_array_equal(over_arrays(casts.e2m1_stochastic, np.uint32)(x, random_bytes), expected)


@sampled("target", [None, (8, 0), (9, 0), (10, 0, "a")], 3)
def test_eight_codes_rounded_stochastically(target):
    """All steps of 1/512 from -7 to 7, their neighbours in float32, random numbers; many bytes in each place."""
    steps = np.arange(-7 * 512, 7 * 512 + 1, dtype=F) / F(512)
    x = np.concatenate([steps, np.nextafter(steps, F(0)), np.nextafter(steps, F(9)), X[:400_000:2], X[-100_000:]])
    x = np.repeat(x[~(np.isnan(x) & np.signbit(x))], 8)
    random_bytes = np.random.default_rng(3).integers(0, 256, x.size, dtype=np.uint8)
    eight = casts.stochastic_eights_for(target)

    @numba.njit
    def encode_all(x, words, out):
        for i in range(len(x)):
            v = x[i]
            out[i] = eight((v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7]), words[i, 0], words[i, 1])

    got = np.empty(x.size // 8, np.uint32)
    order = np.random.default_rng(4).permutation(x.size)
    encode_all(x[order].reshape(-1, 8), random_bytes[order].view(np.uint32).reshape(-1, 2), got)
    expected = refops.encode(x[order], refops.E2M1, rounding="stochastic", random_bits=random_bytes[order])
    codes = (got[:, None] >> (4 * np.arange(8, dtype=np.uint32))) & np.uint32(15)
    np.testing.assert_array_equal(codes.ravel(), expected)


def test_the_simulator_s_plain_python_gives_the_same_bits():
    run = subprocess.run(
        [sys.executable, Path(__file__).parent / "casts_in_the_simulator.py"],
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["352", "values", "agree"]


@pytest.mark.parametrize(
    "make",
    [
        lambda name: vectors.make_load(name, True),
        lambda name: vectors.make_load(name, False),
        lambda name: vectors.make_store(name, True, (9, 0)),
        lambda name: vectors.make_store_sixteen(name, False, None),
        lambda name: vectors.make_round(name, None),
        lambda name: vectors.make_round_sixteen(name, (9, 0)),
    ],
)
def test_a_dtype_that_no_table_has_is_refused_by_name(make):
    said = r"^storage must be one of float32, bfloat16, float16; got 'bf16' \(did you mean bfloat16\?\)$"
    with pytest.raises(ValueError, match=said):
        make("bf16")


@pytest.mark.parametrize("target", [None, (9, 0), (10, 0, "a")])
@pytest.mark.parametrize(
    "make",
    [
        lambda name, target: vectors.make_load_codes(name, False),
        lambda name, target: vectors.make_load_sixteen_codes(name, False, True, target),
        lambda name, target: vectors.make_store_codes(name, False, True, target),
        lambda name, target: vectors.make_cast_sixteen(name, False, True, target),
        lambda name, target: vectors.make_decode(name, target),
        lambda name, target: casts.pairs_for(name, target),
    ],
)
def test_a_format_that_no_table_has_is_refused_by_name(make, target):
    with pytest.raises(ValueError, match=r"^fmt must be one of e4m3, e5m2, .*; got 'E4M3' \(did you mean e4m3\?\)$"):
        make("E4M3", target)
