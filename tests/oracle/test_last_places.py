"""Multipliers that are off in the last place: named where the codes show it, and nothing else gets the name."""

import ml_dtypes
import numpy as np
import pytest

import refops
from refops import oracle
from refops.oracle.operation import arrays_of
from tiers import sampled

F = np.float32
BF16, FP16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
NAME = ("multiplier-slightly-off",)
NV, NV_2D = refops.NVFP4Scaling(), refops.NVFP4Scaling(two_d=True)
ROWS = refops.BlockScaling(refops.E4M3, 1, power_2_scale=False)
SQUARES = refops.BlockScaling(refops.E5M2, 2, power_2_scale=False)
GIVEN = refops.DelayedScaling(refops.E4M3, scale=100.3)
CURRENT = refops.CurrentScaling(refops.E4M3)


def normal(shape, seed=3, dtype=BF16):
    return np.random.default_rng(seed).standard_normal(shape, F).astype(dtype)


def many_near_ties(shape, multiplier, fmt):
    """float32 numbers; the product of one in ten with a multiplier is next to a tie of a format, or one."""
    rng, grid = np.random.default_rng(2), fmt.grid
    middle = rng.choice((grid[8:60] + grid[9:61]) / 2, shape)
    near = ((middle / multiplier).astype(F).view(np.int32) + rng.integers(-3, 4, shape, np.int32)).view(F)
    return np.where(rng.random(shape) < 0.1, near, rng.standard_normal(shape, F) * F(0.1)).astype(F)


def multiplier_of(x, scaling):
    """What each element of the rowwise copy is multiplied by, from float32 x, of whole blocks."""
    if isinstance(scaling, refops.DelayedScaling):
        return np.full(x.shape, scaling.scale, F)
    if isinstance(scaling, refops.CurrentScaling):
        return np.full(x.shape, F(scaling.fmt.max) / np.abs(x).max(), F)
    edges = scaling.layout.block
    rows, columns = (size // edge for size, edge in zip(x.shape, edges, strict=True))
    amax = np.abs(x).reshape(rows, edges[0], columns, edges[1]).max(axis=(1, 3))
    if isinstance(scaling, refops.BlockScaling):
        own = (F(scaling.fmt.max) / amax).astype(F)
    else:
        encode = F(448 * 6) / amax.max()
        scales = refops.decode(refops.encode(amax * (encode * (F(1) / F(6))), refops.E4M3), refops.E4M3)
        own = np.minimum(F(1) / (scales * (F(1) / encode)), np.finfo(F).max).astype(F)
    return own.repeat(edges[0], axis=0).repeat(edges[1], axis=1)


def moved(multiplier, units):
    return (multiplier.view(np.int32) + np.asarray(units, np.int32)).view(F)


def approximate(multiplier):
    """A fast reciprocal: a third of the numbers is one unit high, another third one low, by their bits."""
    units = (multiplier.view(np.uint32) * np.uint32(2654435761) >> np.uint32(16)) % np.uint32(3)
    return moved(multiplier, units.astype(np.int32) - 1)


def with_codes(x, scaling, scaled):
    """The rowwise copy with the codes of scaled values in place of its own."""
    codes = refops.encode(scaled.astype(F), scaling.fmt)
    if scaling.layout.packed == 2 and codes.shape == x.shape:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    return arrays_of(refops.quantize(x, scaling)) | {"rowwise_data": codes}


def judged(x, scaling, outputs):
    report = oracle.check("quantize", x, outputs, scaling=scaling)
    assert not any("failed" in note for note in report.notes), report.notes
    return report


CASES = [
    (ROWS, BF16, (512, 1024), 1, "too high by 1 unit"),
    (ROWS, BF16, (256, 512), -1, "too low by 1 to 1,302 units"),
    (ROWS, FP16, (512, 1024), -1, "too low by 1 unit"),
    (ROWS, FP16, (512, 1024), 2, "too high by 2 to 157 units"),
    (SQUARES, FP16, (1024, 2048), -1, "too low by 1 unit"),
    (NV, BF16, (512, 1024), -1, "too low by 1 unit"),
    (NV, FP16, (256, 512), -1, "too low by 1 unit"),
    (NV, FP16, (1024, 2048), 1, "too high by 1 to 1,146 units"),
    (NV_2D, BF16, (256, 512), -1, "too low by 1 unit"),
    (NV_2D, FP16, (1024, 2048), 2, "too high by 1 to 1,146 units"),
]


@sampled(("scaling", "dtype", "shape", "units", "said"), CASES, 3)
def test_a_multiplier_that_is_off_has_its_name(scaling, dtype, shape, units, said):
    """Numbers of 16 bits may not tell by how much: the answer has the least and the greatest number of units."""
    x = normal(shape, dtype=dtype)
    own = multiplier_of(x.astype(F), scaling)
    right = with_codes(x, scaling, x.astype(F) * own)
    assert np.array_equal(right["rowwise_data"], arrays_of(refops.quantize(x, scaling))["rowwise_data"])
    report = judged(x, scaling, with_codes(x, scaling, x.astype(F) * moved(own, units)))
    assert not report.ok and report.diagnosis[0].names == NAME, str(report)
    answer = report.diagnosis[0]
    assert answer.explained == 1 and f"multiplied by is {said} in the last place:" in answer.sentence


@sampled(("scaling", "units"), [(scaling, units) for scaling in (GIVEN, CURRENT) for units in (1, -1, 2, -2)], 3)
def test_one_multiplier_of_a_tensor(scaling, units):
    """Its float32 values lie around ties: else an element in a million shows it."""
    x = many_near_ties((128, 256), F(100.3), scaling.fmt)
    if scaling is CURRENT:
        x[0, 0] = F(448) / F(100.3)
    own = multiplier_of(x, scaling)
    report = judged(x, scaling, with_codes(x, scaling, x * moved(own, units)))
    assert not report.ok and report.diagnosis[0].names == NAME and report.diagnosis[0].exact, str(report)
    assert f"too {'high' if units > 0 else 'low'} by {abs(units)} unit{'s' * (abs(units) > 1)} in" in str(report)


FITTED = [(ROWS, BF16, (512, 1024)), (SQUARES, FP16, (512, 1024)), (NV, BF16, (256, 512)), (NV, FP16, (1024, 2048))]


@sampled(("scaling", "dtype", "shape"), FITTED, 2)
def test_multipliers_of_an_approximate_reciprocal(scaling, dtype, shape):
    x = normal(shape, dtype=dtype)
    report = judged(x, scaling, with_codes(x, scaling, x.astype(F) * approximate(multiplier_of(x.astype(F), scaling))))
    assert not report.ok and report.diagnosis[0].names == NAME, str(report)
    assert "off by up to 2 units, by other numbers for other scales, in the last place" in report.diagnosis[0].sentence


def test_both_copies():
    x, shape = normal((512, 512), dtype=BF16), (512, 512)
    q = arrays_of(refops.quantize(x, ROWS, columnwise=True))
    for name, values in (("rowwise", x.astype(F)), ("columnwise", np.ascontiguousarray(x.T).astype(F))):
        q[f"{name}_data"] = refops.encode((values * moved(multiplier_of(values, ROWS), 1)).astype(F), ROWS.fmt)
    assert q["columnwise_data"].shape == shape
    report = judged(x, ROWS, q)
    assert report.diagnosis[0].names == NAME and report.diagnosis[0].explained == 1, str(report)


# --- what else moves codes beside ties --------------------------------------------------------------------------------


def product(x, own):
    return x.astype(np.float64) * own


def cut(x, own):
    """The product is rounded towards zero."""
    nearest = product(x, own).astype(F)
    return np.where(np.abs(nearest.astype(np.float64)) > np.abs(product(x, own)), np.nextafter(nearest, F(0)), nearest)


def away(x, own):
    nearest = product(x, own).astype(F)
    beyond = np.nextafter(nearest, np.copysign(F(np.inf), nearest))
    return np.where(np.abs(nearest.astype(np.float64)) < np.abs(product(x, own)), beyond, nearest)


def unrounded(x, own):
    """The exact product is cast; a number that is no tie rounds as any other on its side of the tie."""
    low = cut(x, own)
    return np.where((low.astype(np.float64) != product(x, own)) & (low.view(np.uint32) & 1 == 0), away(x, own), low)


def below_ties(x, own):
    """Ties towards zero."""
    return np.nextafter((x * own).astype(F), F(0))


def divided(x, own):
    return x / (F(1) / own)


def too_large(x, own):
    return x * (own * F(1 + 2.0**-9))


def in_bfloat16(x, own):
    return (x * own).astype(BF16).astype(F)


def few_wrong(x, own):
    """Three codes that are one step off."""
    scaled = (x * own).astype(F)
    scaled[5, 6:9] *= F(1.3)
    return scaled


OTHERS = [cut, away, unrounded, below_ties, divided, too_large, in_bfloat16, few_wrong]
SETTINGS = [(ROWS, BF16), (NV, BF16), (NV_2D, FP16), (SQUARES, FP16), (GIVEN, F)]


@sampled(("fault", "scaling", "dtype"), [(fault, *setting) for fault in OTHERS for setting in SETTINGS], 3)
def test_other_roundings_do_not_get_the_name(fault, scaling, dtype):
    shape = (256, 512)
    x = many_near_ties(shape, F(100.3), refops.E4M3) if scaling is GIVEN else normal(shape, dtype=dtype)
    report = judged(x, scaling, with_codes(x, scaling, fault(x.astype(F), multiplier_of(x.astype(F), scaling))))
    assert not any(NAME[0] in answer.names for answer in report.diagnosis), str(report)


@sampled(("scaling", "dtype"), SETTINGS, 2)
def test_ties_away_from_zero_keep_their_name(scaling, dtype):
    """Where all ties move and nothing else, both may be meant: the sentence says so."""
    shape = (256, 512)
    x = many_near_ties(shape, F(100.3), refops.E4M3) if scaling is GIVEN else normal(shape, dtype=dtype)
    scaled = (x.astype(F) * multiplier_of(x.astype(F), scaling)).astype(F)
    codes = refops.encode(scaled, scaling.fmt, rounding="nearest_away")
    if scaling.layout.packed == 2 and codes.shape == shape:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    outputs = arrays_of(refops.quantize(x, scaling)) | {"rowwise_data": codes}
    if np.array_equal(codes, arrays_of(refops.quantize(x, scaling))["rowwise_data"]):
        pytest.skip("no tie")
    report = judged(x, scaling, outputs)
    assert not any(NAME[0] in answer.names for answer in report.diagnosis), str(report)
    [answer] = [answer for answer in report.diagnosis if answer.names == ("ties-away",)]
    assert answer.sentence.endswith("(or after a multiplier one unit in the last place too high).")


def test_ties_under_powers_of_two_are_ties():
    """MXFP8: no reciprocal is inexact, and the sentence says nothing of one."""
    x, scaling = normal((128, 512)), refops.MXFP8Scaling(refops.E4M3)
    own = refops.quantize(x, scaling)
    factor = np.exp2(F(127) - own.rowwise_scale_inv[:128, :16].astype(F)).repeat(32, axis=1)
    codes = refops.encode(x.astype(F) * factor, refops.E4M3, rounding="nearest_away")
    answer = judged(x, scaling, {"data": codes, "scale": own.rowwise_scale_inv}).diagnosis[0]
    assert answer.names == ("ties-away",) and answer.sentence.endswith("where TE rounds them to even.")


def test_three_codes_are_no_evidence():
    x = many_near_ties((16, 16), F(100.3), refops.E4M3)
    own = multiplier_of(x, GIVEN)
    wrong = np.argwhere(refops.encode(x * moved(own, 1), refops.E4M3) != refops.encode(x * own, refops.E4M3))
    x[tuple(wrong[3:].T)] = 1
    report = judged(x, GIVEN, with_codes(x, GIVEN, x * moved(multiplier_of(x, GIVEN), 1)))
    assert report.arrays[0].wrong == 3 and not any(NAME[0] in answer.names for answer in report.diagnosis)
