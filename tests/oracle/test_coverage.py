"""The report of a right dump says what its input covered: exact by count, and in what words."""

import json
import re
import timeit

import ml_dtypes
import numpy as np
import pytest

import refops
from refops import oracle
from refops.golden import Recipe, build_golden
from refops.oracle import coverage
from refops.oracle.coverage import is_tie
from refops.survey import SCALINGS

F, BF16 = np.float32, ml_dtypes.bfloat16
ONE = refops.DelayedScaling(refops.E4M3)


def check(x, scaling=ONE, *, columnwise=False):
    q = refops.quantize(x, scaling, rowwise=not columnwise, columnwise=columnwise)
    return oracle.check("quantize", x, q, scaling=scaling)


def test_each_count_by_hand():
    """Under scale 1 an element of E4M3 is what it is: 8 for an octave from 2^-6 on, steps of 2^-9 below."""
    x = np.ones((130, 200), F)
    x[0, :4] = 17, -19, 2**-10, 3 * 2**-10  # halfway: between 16, 18 and 20, 0 and 2^-9, 2^-9 and 2^-8
    x[1, :3] = 2**-9, -7 * 2**-9, 2**-8 * 1.1  # subnormal codes; so is that of 3 * 2^-10
    x[2, :2] = 1e-5, -(2.0**-130)  # flushed, as is 2^-10; the last is a float32 subnormal
    x[3, :4] = 464, 465, -1000, 448  # 465 and 1000 are beyond what rounds to 448
    x[4, :2] = np.nan, 0
    x[129, 7] = -5000
    found = check(x).coverage
    counts = found.ties, found.subnormals, found.flushed, found.saturated, found.small, found.special
    assert counts == (4, 4, 3, 3, 1, 1)
    assert (found.elements, found.of, found.copies, found.blocks) == (26000, 26000, 1, 0)
    assert (found.amax, found.row, found.column, found.tile, found.tiles) == (-5000, 129, 7, (1, 0), (2, 2))


def test_the_words():
    x = np.full((130, 64), 1, F)
    x[129, 7], x[:, 33] = -5.5, 0
    lines = str(check(x, refops.MXFP8Scaling(refops.E4M3))).split("\n")
    start = next(i for i, line in enumerate(lines) if line.startswith("covered"))
    assert lines[start : start + 2] == [
        "covered: 0 ties, 0 subnormal codes, 0 flushed to 0, 0 saturated, 0 float32 subnormals, 0 NaN or infinite",
        "         amax -5.5 in row 129, column 7 (last tile); of 260 blocks 0 zero, 1 with a negative amax",
    ]
    assert "(tile 0, 0)" in str(check(np.ones((130, 64), F))) and "(the only tile)" in str(check(np.ones((4, 64), F)))


def test_scales_that_show_a_wrong_rule_are_counted():
    """448 times a power of two under MXFP8; under NVFP4 codes below 2^-6 of E4M3, whose largest block has code 448."""
    x = np.full((64, 64), 1e-20, F)
    x[:4, 0] = 448, -224, 448 * 2.0**20, np.nextafter(F(448), F(500))
    assert check(x, refops.MXFP8Scaling(refops.E4M3)).coverage.full_blocks == 3
    x[:] = 0
    x[:4, 0] = 2688, 6 * 2.0**-7, 6 * 2.0**-9, 6 * 2.0**-11
    found = check(x, refops.NVFP4Scaling()).coverage
    assert (found.small_scales, found.zero_scales, found.full_blocks) == (2, 1, 0)
    assert "blocks: 2 with a subnormal scale, 1 with scale 0 that are not zero" in str(found)


@pytest.mark.parametrize("dtype", [F, BF16])
def test_roundings_that_change_scales_are_counted(dtype):
    """silu(8) is 7.997, which bfloat16 rounds to 8."""
    x = np.zeros((64, 64), dtype)
    x[0, 0] = 8
    for scaling in (refops.MXFP8Scaling(refops.E2M3), refops.CurrentScaling(refops.E4M3)):
        q = refops.activation_quantize("silu", x, scaling)
        found = oracle.check("silu", x, q, scaling=scaling).coverage
        assert found.amax_rounds == (dtype == BF16 and scaling.layout.amax is not None)
        assert ("another one before rounding" in str(found)) == found.amax_rounds
    golden = build_golden(Recipe("silu", "mxfp8", (64, 128), dtype))
    found = oracle.check("silu", golden.inputs, golden.outputs, scaling=golden.scaling).coverage
    assert (found.rounded_blocks > 0) == (dtype == BF16) and not found.amax_rounds


@pytest.mark.parametrize(("shape", "tested"), [((96, 160), False), ((128, 512), False), ((160, 160), True)])
def test_swizzled_scales_of_few_tiles_do_not_show_their_order(shape, tested):
    golden = build_golden(Recipe("quantize", "mxfp8", shape, swizzled_scales=True))
    arrays = {name: a for name, a in golden.outputs.items() if "rowwise" in name}
    report = oracle.check("quantize", golden.inputs, arrays, scaling=golden.scaling, swizzled_scales=True)
    assert report.coverage.one_order != tested and ("their order is not tested" in str(report)) != tested
    plain = build_golden(Recipe("quantize", "mxfp8", shape))
    assert not oracle.check("quantize", plain.inputs, plain.outputs, scaling=plain.scaling).coverage.one_order


def test_a_wrong_dump_and_operations_without_a_cast_have_none():
    x = np.ones((4, 64), F)
    q = refops.quantize(x, ONE)
    wrong = oracle.check("quantize", x, {"data": q.rowwise_data ^ 1}, scaling=ONE)
    assert wrong.coverage is None and "covered" not in str(wrong) and wrong.as_dict()["coverage"] is None
    assert oracle.check("dequantize", q, refops.dequantize(q)).coverage is None
    assert oracle.check("quantize", x, {"scale": q.rowwise_scale_inv}, scaling=ONE).coverage is None
    assert oracle.check("relu", np.ones((0, 64), F), np.ones((0, 64), F)).coverage is None


@pytest.mark.parametrize("dtype", [BF16, np.float16])
def test_values_in_16_bits(dtype):
    info = ml_dtypes.finfo(dtype)
    ulp = float(info.eps)
    x = np.zeros((1, 64), F)
    x[0, :3] = 1 + ulp / 2, -(1 + 1.5 * ulp), 1 + ulp / 2 * (1 + 2.0**-12)  # two ties, and nearly one
    x[0, 3:5] = float(info.smallest_subnormal), float(info.smallest_subnormal) * 1e-3
    x[0, 5] = 3e38 if dtype == BF16 else 1e5
    y = refops.activation("relu", x, out_dtype=dtype)
    found = oracle.check("relu", x, y).coverage
    assert (found.ties, found.subnormals, found.flushed) == (1, 1, 1)  # relu leaves no negative one
    assert (found.saturated, found.copies) == (int(dtype == np.float16), 0)
    assert "subnormal values" in str(found)


@pytest.mark.parametrize("name", SCALINGS)
def test_ties_of_every_scaling_are_those_of_the_products(name):
    """Counted a second time from the encode scales of a golden file, rowwise."""
    golden = build_golden(Recipe("quantize", name, (64, 128), "float32"))
    scaling, layout = golden.scaling, golden.scaling.layout
    factor = golden.intermediates["rowwise_encode_scale"]
    if layout.block is not None:
        factor = layout.scales_by_outer(factor, columnwise=False)
        factor = factor.repeat(layout.run[0], 0).repeat(layout.run[1], 1)[:64, :128]
    scaled = np.abs(golden.inputs["x"] * factor)
    middle = (scaling.fmt.grid[1:] + scaling.fmt.grid[:-1]) / 2
    rowwise = {key: a for key, a in golden.outputs.items() if "rowwise" in key}
    found = oracle.check("quantize", golden.inputs, rowwise, scaling=scaling).coverage
    expected = 0 if scaling.random is not None else np.isin(scaled, middle.astype(F)).sum()
    assert found.ties == expected and (scaling.random is not None or found.ties > 50)
    assert found.amax < 0 and found.negative_blocks <= found.blocks


@pytest.mark.parametrize("fmt", [refops.E4M3, refops.E5M2, refops.E2M1, refops.E3M2, refops.E2M3, refops.INT8], ids=str)
def test_is_tie_on_every_midpoint_and_beside_it(fmt):
    middle = ((fmt.grid[1:] + fmt.grid[:-1]) / 2).astype(F)
    form = fmt.mantissa_bits, 1 - fmt.bias, float(fmt.max)
    assert is_tie(middle, *form).all() and is_tie(-middle, *form).all()
    for other in (np.nextafter(middle, F(0)), np.nextafter(middle, F(np.inf)), fmt.grid.astype(F)):
        assert not is_tie(other, *form).any()
    assert not is_tie(F([np.nan, np.inf, 0, 2 * fmt.max]), *form).any()


def test_both_copies_are_counted_and_the_columnwise_one_under_its_own_scales():
    golden = build_golden(Recipe("quantize", "nvfp4-rht", (64, 128), "bfloat16"))

    def found(copy):
        arrays = {name: a for name, a in golden.outputs.items() if copy in name}
        return oracle.check("quantize", golden.inputs, arrays, scaling=golden.scaling).coverage

    both, rowwise, columnwise = (found(copy) for copy in ("wise", "rowwise", "columnwise"))
    assert (both.copies, both.blocks) == (2, rowwise.blocks + columnwise.blocks)
    assert both.ties == rowwise.ties + columnwise.ties and rowwise.ties != columnwise.ties


def test_a_large_tensor_is_sampled_and_says_so(monkeypatch):
    monkeypatch.setattr(coverage, "MOST_ELEMENTS", 1 << 16)
    monkeypatch.setattr(coverage, "SAMPLE", 1 << 15)
    x = np.ones((300, 512), F)
    x[-1, -1] = -2
    found = check(x).coverage
    assert found.of == x.size and found.elements < x.size and found.amax == -2  # the last tile is among them
    assert re.match(r"covered in [\d,]+ of 153,600 elements, the only ones looked at: 0 ties", str(found))


def test_json():
    x = np.ones((4, 64), F)
    x[0, 0] = -np.inf
    report = check(x, refops.MXFP8Scaling(refops.E4M3))
    found = json.loads(json.dumps(report.as_dict(), allow_nan=False))["coverage"]
    assert (found["amax"], found["special"], found["tile"], found["tiles"]) == ("-inf", 1, [0, 0], [1, 1])


@pytest.mark.parametrize("op", ["quantize", "swiglu"])
def test_it_takes_a_tenth_of_the_time_of_a_large_check(op):
    """2048 x 2048 stands for larger ones: the sample is the same."""
    scaling = refops.MXFP8Scaling(refops.E4M3)
    width = 2048 * (1 + (op == "swiglu"))
    x = np.random.default_rng(0).standard_normal((2048, width), F).astype(BF16)
    q = refops.quantize(x, scaling) if op == "quantize" else refops.activation_quantize(op, x, scaling)
    case = oracle.verdict.Case(op, x, scaling)
    arrays = {"rowwise_data": q.rowwise_data, "rowwise_scale_inv": q.rowwise_scale_inv}
    whole = min(timeit.repeat(lambda: oracle.check(op, x, arrays, scaling=scaling), number=1, repeat=3))
    with np.errstate(all="ignore"):
        counted = min(timeit.repeat(lambda: coverage.coverage_of(case, arrays, arrays), number=1, repeat=5))
    assert counted < 0.1 * 4 * whole  # 4096 x 4096 has four times the elements
