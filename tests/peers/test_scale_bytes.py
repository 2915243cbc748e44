"""Peers' E8M0 bytes for every amax: where a rule never falls, the largest amax of each byte says all of it.

Found by bisection over the bits of float32, so each comparison is of all magnitudes. What differs is counted in float32
steps above the amax at which refops' byte changes.
"""

import numpy as np
import pytest

import refops
from peers import e8m0, registry, rules
from peers.subjects import RULES

pytestmark = pytest.mark.filterwarnings("ignore")  # of the peers' own making
F = np.float32
LARGEST = int(np.finfo(F).max.view(np.uint32))
BYTES = np.arange(254)


def last_amaxes(byte_of, least=0):
    """Bits of the largest amax that has at most each byte, for bytes 0 to 253; from the bits `least` on."""
    low, high = np.full(BYTES.size, least, np.int64), np.full(BYTES.size, LARGEST, np.int64)
    for _ in range(32):
        middle = (low + high + 1) // 2
        fits = byte_of(middle.astype(np.uint32).view(F)) <= BYTES
        low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
    return low


def rule_of(fmt, rule):
    """refops' byte of an amax."""
    return lambda amax: e8m0.scale_byte(amax, fmt, rule)


def peer_of(offer, columns):
    """The peer's byte of a block that holds the amax once and zeros."""

    def byte_of(amax):
        x = np.zeros((amax.size, columns), F)
        x[:, 5] = amax
        return offer.compute(x)["rowwise scales"][:, 0].astype(np.int64)

    return byte_of


def of(module, subject):
    """The offer of a subject, or skip."""
    (peer,) = registry.load(module)
    if peer.absent:
        pytest.skip(f"{peer.name}: {peer.absent}")
    return peer.offer(subject)


@pytest.mark.parametrize("fmt", [refops.E2M1, refops.E4M3, refops.E5M2, refops.E3M2, refops.E2M3], ids=repr)
def test_the_product_with_a_reciprocal_is_the_quotient(fmt):
    """TE multiplies by float32(1 / max), DeepGEMM and torchao divide by max: one rule, for every amax."""

    def quotient(amax):
        return refops.encode(amax / fmt.max, refops.E8M0, rounding="up")

    np.testing.assert_array_equal(last_amaxes(rule_of(fmt, "up")), last_amaxes(quotient))


@pytest.mark.parametrize("fmt", [refops.E2M1, refops.E4M3, refops.E5M2], ids=repr)
def test_up_is_the_power_of_two_that_is_not_below(fmt):
    """The last amax of byte b is max * 2^(b - 127). Of byte 0 it is one step more: 2^-127 is subnormal, and rounds."""
    exact = np.minimum(float(fmt.max) * 2.0 ** (BYTES - 127), float(np.finfo(F).max)).astype(F).view(np.uint32)
    np.testing.assert_array_equal(last_amaxes(rule_of(fmt, "up")) - exact, np.where(BYTES == 0, 1, 0))


@pytest.mark.parametrize(
    ("module", "subject", "fmt", "rule"),
    [
        ("torchao_tensors", "MXFP4, floor rule", refops.E2M1, "floor"),
        ("torchao_tensors", "MXFP4, even rule", refops.E2M1, "even"),
        ("torchao_tensors", "MXFP4, ceil_ocp rule", refops.E2M1, "ceil_ocp"),
        ("quack_blocks", "MXFP4, floor rule", refops.E2M1, "floor"),
    ],
)
def test_rules_on_bits_agree_for_every_amax(module, subject, fmt, rule):
    assert subject.endswith(RULES[rule])
    np.testing.assert_array_equal(last_amaxes(rule_of(fmt, rule)), last_amaxes(peer_of(of(module, subject), 32)))


def test_compressed_tensors_is_the_even_rule_below_infinity():
    """An amax of 1.75 * 2^127 or more has an infinite scale, stored as byte 127; refops' byte is 253."""
    theirs = peer_of(of("compressed_tensors_schemes", "MXFP4, even rule"), 32)
    ours = last_amaxes(rule_of(refops.E2M1, "even"))
    end = int(F(1.75 * 2.0**127).view(np.uint32)) - 1
    assert ours[252] == end
    np.testing.assert_array_equal(
        ours[:252], last_amaxes(lambda amax: theirs(np.minimum(amax, F(1.5 * 2.0**127))))[:252]
    )
    for bits in (end, end + 1, LARGEST):
        amax = np.array([bits], np.uint32).view(F)
        assert theirs(amax) == (252 if bits == end else 127)
        assert rule_of(refops.E2M1, "even")(amax) == (252 if bits == end else 253)


@pytest.mark.parametrize(
    ("module", "subject", "fmt", "most"),
    [
        ("torchao_tensors", "MXFP4, TE's rule", refops.E2M1, 33),
        ("torchao_tensors", "MXFP8 E4M3, TE's rule", refops.E4M3, 39),
        ("modelopt_tensors", "MXFP4, TE's rule", refops.E2M1, 33),
        ("modelopt_tensors", "MXFP8 E4M3, TE's rule", refops.E4M3, 39),
        ("auto_round_types", "MXFP4, TE's rule", refops.E2M1, 33),
    ],
)
def test_log2_is_one_too_small_just_above_a_power_of_two(module, subject, fmt, most):
    """A float32 log2 of max * 2^k and of what lies just above is the same k: up to `most` steps, none for small k."""
    theirs = last_amaxes(peer_of(of(module, subject), 32), 1)
    np.testing.assert_array_equal(theirs, last_amaxes(lambda amax: rules.ceil_log2_byte(amax, fmt.max), 1))
    late = theirs - last_amaxes(rule_of(fmt, "up"), 1)
    near = np.abs(BYTES - 127) < 4
    assert (late[near] == 0).all()
    assert (late >= 0).all()
    assert late.max() == late[0] == most


def test_mlx_wraps_around_below_the_range():
    """Exact down to 2^-127; below, the byte counts on from 255 downwards. Zero has byte 127."""
    theirs = peer_of(of("mlx_arrays", "MXFP4, TE's rule"), 32)
    least = int(F(6 * 2.0**-128).view(np.uint32)) + 1
    np.testing.assert_array_equal(last_amaxes(theirs, least), last_amaxes(rule_of(refops.E2M1, "up"), least))
    amax = np.array([0, 6 * 2.0**-140, 6 * 2.0**-129, 6 * 2.0**-128, 6 * 2.0**-127], F)
    assert theirs(amax).tolist() == [127, 243, 254, 255, 0]
    assert rule_of(refops.E2M1, "up")(amax).tolist() == [0, 0, 0, 0, 0]


@pytest.mark.parametrize("columns", [128, 64])
def test_transformers_is_late_by_log2_and_reciprocals(columns):
    """One step late by the reciprocals, and up to 40 steps by a float32 log2; no scale is below 2^-126."""
    theirs = peer_of(of("transformers_fp8", f"FP8 1x{columns} E4M3, E8M0 scales"), columns)
    least = int(F(448 * 2.0**-126).view(np.uint32))
    late = last_amaxes(theirs, least) - last_amaxes(rule_of(refops.E4M3, "up"), least)
    distance = np.abs(BYTES - 127)
    assert sorted(set(late.tolist())) == [0, 1, 4, 9, 20, 38, 39, 40]
    assert late[distance < 4].max() == 0
    assert late[distance < 8].max() == 1
    zero_and_tiny = np.array([0, 2.0**-149, 448 * 2.0**-126], F)
    assert theirs(zero_and_tiny).tolist() == [127, 1, 1]
    assert rule_of(refops.E4M3, "up")(zero_and_tiny).tolist() == [0, 0, 1]
