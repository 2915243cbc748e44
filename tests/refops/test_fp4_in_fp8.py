"""Up to which spread of E8M0 scales an MXFP4 tensor is exact in FP8 tiles with power-of-two scales.

An element is exact or not by itself once the tile's amax is given, so the pairs of a largest and another element decide
every tile: 7 magnitudes of E2M1 each, all differences of exponents, and exponents at both ends of float32.
"""

import numpy as np
import pytest

import refops

F = np.float32
#: Magnitudes of E2M1 but zero.
CODES = refops.E2M1.values[1:8]
TARGETS = {
    "E4M3 128x128": (refops.BlockScaling(refops.E4M3, 2), 17),
    "E5M2 128x128": (refops.BlockScaling(refops.E5M2, 2), 31),
    "E8M0 E4M3 128x128": (refops.E8M0BlockScaling(refops.E4M3, 2), 17),
    "MXFP8 E4M3 32x32": (refops.MXFP8Scaling(refops.E4M3, two_d=True), 17),
}


def octave(values):
    """floor(log2 |v|)."""
    return np.frexp(values.astype(np.float64))[1] - 1


def lowest_bit(values):
    """The exponent of the lowest bit that is set: 2 of 4, 1 of 2 and 6, 0 of 1 and 3, -1 of 0.5 and 1.5."""
    fraction, exponent = np.frexp(values.astype(np.float64))
    bits = (np.abs(fraction) * 2.0**53).astype(np.int64)
    return exponent - 53 + octave(bits & -bits)


def is_exact(values, fmt):
    """Whether `values` of MXFP4 survive a tile of `fmt` with a power-of-two scale from their amax.

    The scale takes the amax into the octave of the format's largest value. So an element is exact if its lowest bit
    does not fall below the smallest subnormal: if the octave of the amax and that bit are no further apart than the
    octave of the largest value and the smallest subnormal, 17 for E4M3 and 31 for E5M2.
    """
    values = values[values != 0]
    if not values.size:
        return True
    apart = octave(np.abs(values).max()) - lowest_bit(values)
    return bool((apart <= octave(fmt.max) - octave(fmt.smallest_subnormal)).all())


def tile(pairs, shape=(128, 128)):
    """A tile of zeros with values in its first places."""
    x = np.zeros(shape, F)
    x.reshape(-1)[: len(pairs)] = pairs
    return x


def survives(x, scaling):
    """Which elements come back."""
    return refops.dequantize(refops.quantize(x, scaling)) == x


@pytest.mark.parametrize("target", TARGETS)
def test_every_pair_of_elements_is_exact_where_the_rule_says(target):
    scaling, room = TARGETS[target]
    edge = scaling.block_size
    for base in (-127, -121, -120, -119, -118, -100, 0, 100, 124):
        for top in CODES:
            largest = F(top * 2.0**base)
            others = [float(code) * 2.0 ** (base - d) for d in range(-3, 41) for code in CODES if base - d >= -127]
            others = np.array([v for v in others if v <= float(largest)], F)
            signs = np.where(np.arange(others.size) % 2, F(-1), F(1))
            x = tile([largest, *(others * signs)], (edge, edge))
            expected = octave(largest) - lowest_bit(others) <= room
            np.testing.assert_array_equal(survives(x, scaling).reshape(-1)[1 : 1 + others.size], expected)
            for value, exact in zip(others, expected, strict=True):
                assert is_exact(np.array([largest, value], F), scaling.fmt) == exact


@pytest.mark.parametrize(("target", "spread"), [("E4M3 128x128", 14), ("E8M0 E4M3 128x128", 14), ("E5M2 128x128", 28)])
def test_witnesses(target, spread):
    """Every code under both scales: exact at this spread; one more loses 0.5 and 1.5 of the small scale alone."""
    scaling, _ = TARGETS[target]
    for top in (4, 6):
        for distance in (spread, spread + 1):
            large, small = CODES[top >= CODES], CODES * F(2.0**-distance)
            both = np.concatenate([large, small])
            lost = both[~survives(tile(both), scaling).reshape(-1)[: both.size]]
            assert lost.tolist() == [v * 2.0**-distance for v in ((0.5, 1.5) if distance > spread else ())]


@pytest.mark.parametrize(
    ("top", "low", "spread"),
    [(6, 0.5, 14), (3, 1.5, 15), (2, 0.5, 15), (1, 0.5, 16), (0.5, 0.5, 17), (6, 4, 17), (0.5, 4, 20)],
)
def test_smaller_largest_codes_and_coarser_small_ones_leave_more_room(top, low, spread):
    scaling, _ = TARGETS["E4M3 128x128"]
    assert survives(tile([top, low * 2.0**-spread]), scaling).all()
    assert not survives(tile([top, low * 2.0 ** -(spread + 1)]), scaling).all()


def test_every_block_is_exact_in_mxfp8():
    """The same 32 elements under one scale: the byte falls by 6, or more where the largest code is below 4."""
    for byte in range(255):
        for top in CODES[: 7 if byte < 253 else 5 if byte < 254 else 3]:
            values = CODES[top >= CODES] * refops.E8M0.values[byte]
            q = refops.quantize(tile(values, (1, 32)), refops.MXFP8Scaling(refops.E4M3))
            assert q.rowwise_scale_inv[0, 0] == max(byte - 8 + octave(top), 0)
            np.testing.assert_array_equal(refops.dequantize(q), tile(values, (1, 32)))


@pytest.mark.parametrize("block_size", [32, 16])
@pytest.mark.parametrize("rule", ["up", "floor", "even", "ceil_ocp"])
@pytest.mark.parametrize("target", TARGETS)
def test_tensors_of_mxfp4_are_exact_where_the_rule_says(target, rule, block_size):
    """Tiles of tensors whose blocks' sizes spread over 2^0 to 2^40: `is_exact` is what happens, and 2^14 is enough."""
    scaling, room = TARGETS[target]
    edge, rng, exact = scaling.block_size, np.random.default_rng(0), []
    for spread in range(0, 41, 2):
        blocks = np.exp2(rng.integers(0, spread + 1, (edge, edge // block_size))).repeat(block_size, axis=1)
        x = (rng.standard_normal((edge, edge)) * blocks).astype(F)
        q = refops.quantize(x, refops.MXFP4Scaling(scale_rounding=rule, block_size=block_size))
        values = refops.dequantize(q)
        exact.append(bool(survives(values, scaling).all()))
        assert exact[-1] == is_exact(values.ravel(), scaling.fmt)
        scales = q.rowwise_scale_inv[:edge, : edge // block_size][
            np.abs(values.reshape(edge, -1, block_size)).max(2) > 0
        ]
        assert exact[-1] or int(scales.max()) - int(scales.min()) > room - 3
    assert exact[0] and (not exact[-1] or room == 31)


def test_a_scale_that_is_no_power_of_two_is_not_exact():
    scaling = refops.BlockScaling(refops.E4M3, 2, power_2_scale=False)
    assert not survives(tile([6, 0.5]), scaling).all()
