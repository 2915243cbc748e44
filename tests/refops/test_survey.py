"""What `refops.survey` measures and `refops.explain` shows, against hand-made tensors and direct formulas."""

import math
import re
import tracemalloc
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest

import refops
from refops import explain, survey
from refops.display import plot
from refops.scalings import NamedScaling
from refops.survey import SCALINGS, Measurement
from refops.tiles import tile_elements

F = np.float32
BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = (np.dtype(np.float32), np.dtype(np.float16), BF16)


def heavy_tails(shape, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp(rng.standard_normal(shape))).astype(dtype)


def delayed(fmt=refops.E4M3, scale=1.0):
    return NamedScaling("scale", refops.DelayedScaling(fmt, scale), "test")


# --- what saturates, by hand -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fmt", "largest", "edge"), [(refops.E4M3, 448, 464), (refops.E5M2, 57344, 61440)], ids=["e4m3", "e5m2"]
)
def test_saturated_counts_only_what_lies_beyond_half_a_step(fmt, largest, edge):
    beyond = float(np.nextafter(F(edge), F(np.inf)))
    x = np.array([largest, edge, -edge, beyond, -beyond, 2 * largest, np.inf, -np.inf, np.nan, 1.0], F)
    q = refops.quantize(x, refops.DelayedScaling(fmt))
    got = survey.saturates(x, refops.dequantize(q), q.rowwise_data, fmt)
    assert got.tolist() == [False, False, False, True, True, True, False, False, False, False]
    # Three of the seven finite elements.
    assert survey.measure(x, delayed(fmt)).saturated == 3 / 7


def test_nothing_saturates_where_the_scale_comes_from_the_amax():
    x = heavy_tails((64, 256))
    for name in ("current", "current-e5m2", "current-pow2", "block-1x128", "block-128x128", "mxfp8", "mxfp8-e5m2"):
        assert survey.measure(x, SCALINGS[name]).saturated == 0


def test_floor_rounded_scales_saturate_the_top_of_the_block():
    x = np.ones((1, 32), F)
    x[0, :3] = [465, 500, 460]  # scale 1 under the floor rule; 460 rounds to 448 like any value there
    assert survey.measure(x, SCALINGS["mxfp8-floor"]).saturated == 2 / 32
    assert survey.measure(x, SCALINGS["mxfp8"]).saturated == 0


def test_a_block_with_scale_zero_is_flushed_not_saturated():
    x = np.zeros((16, 16), F)
    x[0, 0], x[1, :] = 1e6, 1e-6
    m = survey.measure(x, SCALINGS["nvfp4-1x16"])
    assert (m.saturated, m.flushed) == (0, 16 / 17)


# --- the other numbers, by hand --------------------------------------------------------------------------------------


def test_measurement_by_hand():
    # 0.0005 is below half of E4M3's smallest value: flushed. 17 becomes 16; 1 is exact; NaN and inf do not count.
    x = np.array([1.0, 17.0, 0.0005, 0.0, -0.0, np.nan, np.inf], F)
    m = survey.measure(x, delayed())
    small = float(F(0.0005))
    assert m.sqnr_db == pytest.approx(10 * math.log10((1 + 289 + small**2) / (1 + small**2)), rel=1e-12)
    assert m.flushed == 1 / 3
    assert m.worst_relative_error == 1 / 17
    assert m.saturated == 0
    assert m.bits_per_element == 8 + 32 / 7
    assert not m.exact


def test_exact_tensor_and_zero_tensor():
    for x in (np.array([[1, -2, 0.5, 0]], F), np.zeros((2, 8), F)):
        m = survey.measure(x, delayed())
        assert m.exact and m.sqnr_db == math.inf
        assert (m.flushed, m.saturated, m.worst_relative_error) == (0, 0, 0)


def test_tensor_without_a_finite_element():
    m = survey.measure(np.array([np.nan, np.inf, -np.inf], F), delayed())
    assert (m.sqnr_db, m.flushed, m.saturated, m.worst_relative_error, m.exact) == (None, None, None, None, False)


def test_finite_element_that_comes_back_infinite():
    x = np.full((16, 16), 1e38, F)  # 448 * amax overflows in TE's dequantization
    m = survey.measure(x, SCALINGS["nvfp4-1x16"])
    assert m.sqnr_db == -math.inf and m.worst_relative_error == math.inf


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("named", SCALINGS.values(), ids=SCALINGS)
def test_measurements_are_those_of_the_dequantized_tensor(named, dtype):
    x = heavy_tails((64, 160), dtype)
    x[3, 5], x[4, 6] = np.nan, 0
    q = refops.quantize(x, named.scaling, rowwise=not named.columnwise, columnwise=named.columnwise)
    a, b = x.astype(np.float64), refops.dequantize(q).astype(np.float64)
    a, b = a[np.isfinite(a)], b[np.isfinite(x.astype(F))]
    flushed = (a != 0) & (b == 0)
    m = survey.measure(x, named)
    assert m.sqnr_db == pytest.approx(10 * np.log10(np.sum(a**2) / np.sum((a - b) ** 2)), rel=1e-9)
    assert m.flushed == flushed.sum() / np.count_nonzero(a)
    assert m.worst_relative_error == np.max((np.abs(a - b) / np.where(a == 0, 1, np.abs(a)))[(a != 0) & ~flushed])


@pytest.mark.parametrize("named", SCALINGS.values(), ids=SCALINGS)
def test_tiles_change_nothing(named):
    x = heavy_tails((288, 416))
    whole = survey.measure(x, named)
    with tile_elements(1):
        assert survey.measure(x, named) == whole


def test_sums_of_squares_run_down_bands_of_128_rows():
    """In order: 2^30 and then 127 numbers whose squares it swallows, where their sum would show."""
    x = np.full((129, 2), 2.0**-3, F)
    x[0], x[128] = 2.0**30, 3.0
    errors = survey.ARRAYS.errors(x, refops.quantize(x, refops.DelayedScaling(refops.E4M3)))
    assert errors.signal.tolist() == [[2.0**60] * 2, [9.0] * 2]
    assert (errors.finite, errors.non_zero, errors.flushed) == (258, 258, 0)
    assert (errors.saturated, errors.cast) == (2, 258) and errors.worst == (2.0**30 - 448) / 2.0**30


@pytest.mark.parametrize("named", SCALINGS.values(), ids=SCALINGS)
def test_a_large_tensor_is_measured_some_rows_at_a_time(named, monkeypatch):
    """With the numbers of the whole: under the tensor's amax, which lies in the last part."""
    x = heavy_tails((2, 336, 96), np.float16)
    x[1, 300, 5], x[0, 3, 4] = 3e4, np.nan
    whole, facts = survey.measure(x, named), survey.tensor_facts(x)
    monkeypatch.setattr(survey, "AT_ONCE", 256 * 96 + 5)
    assert [part.shape for part in survey._parts_of(x)] == [(256, 96), (256, 96), (160, 96)]
    assert survey.measure(x, named) == whole and survey.tensor_facts(x) == facts


def test_a_large_tensor_of_a_shape_that_is_not_taken_says_so(monkeypatch):
    """Also where each part but the last would be taken."""
    x, named = np.ones((258, 96), F), SCALINGS["nvfp4-1x16"]
    whole = survey.measure(x, named)
    monkeypatch.setattr(survey, "AT_ONCE", 96)
    assert survey.measure(x, named) == whole and whole.reason.startswith("needs M % 16 == 0")


# --- who measures -----------------------------------------------------------------------------------------------------


class Faster(survey.ArraySurveyor):
    """A surveyor that says that it was there."""

    asked = 0

    def magnitudes(self, x):
        self.asked += 1
        return super().magnitudes(x)


class EntryPoint:
    """As of importlib.metadata: what it loads, or the error."""

    def __init__(self, found):
        self.found = found

    def load(self):
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


def test_an_installed_surveyor_is_loaded_once_there_is_enough_to_measure(monkeypatch):
    faster, asked = Faster(), []

    def entry_points(group):
        asked.append(group)
        return [EntryPoint(ImportError("no numba")), EntryPoint(faster)]

    monkeypatch.setattr(survey, "entry_points", entry_points)
    monkeypatch.setattr(survey, "WORTH_COMPILING", 100)
    x, meter = heavy_tails((4, 12)), survey.Meter()
    facts = [meter.facts(x) for _ in range(2)]
    assert not asked and meter.surveyor is survey.ARRAYS
    assert [meter.facts(x), meter.facts(x)] == facts
    assert asked == ["refops.surveyors"] and faster.asked == 2
    assert survey.Meter(100).surveyor is survey.ARRAYS and survey.Meter(101).surveyor is faster


def test_without_a_surveyor_that_can_be_imported_numpy_measures(monkeypatch):
    monkeypatch.setattr(survey, "entry_points", lambda group: [EntryPoint(ImportError("no numba"))])
    assert survey.installed_surveyor() is survey.ARRAYS


def test_spread_and_lowest():
    measurements = [Measurement(name, sqnr_db=value) for name, value in (("a", 3.0), ("b", None), ("c", -math.inf))]
    assert survey.lowest_sqnr(measurements).scaling == "c"
    assert survey.lowest_sqnr(measurements[1:2]) is None
    assert survey.spread([3.0, None, math.inf, -math.inf, 1.0]) == (-math.inf, 1.0, math.inf)
    assert survey.spread([None]) is None


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("delayed-scale-1", 8 + 32 / (48 * 320)),
        ("current", 8 + 32 / (48 * 320)),
        ("block-1x128", 8 + 32 * 48 * 3 / (48 * 320)),
        ("block-128x128", 8 + 32 * 3 / (48 * 320)),
        ("mxfp8", 8 + 8 / 32),
        ("nvfp4-1x16", 4 + 8 / 16 + 32 / (48 * 320)),
        ("nvfp4-16x16", 4 + 8 / 16 + 32 / (48 * 320)),  # TE stores the byte of a tile once for each of its rows
        ("nvfp4-rht", 4 + 8 / 16 + 32 / (48 * 320)),
        ("nvfp4-row-scaled", 4 + 8 / 16 + 32 / 320),
    ],
)
def test_bits_per_element(name, bits):
    assert survey.measure(heavy_tails((48, 320)), SCALINGS[name]).bits_per_element == pytest.approx(bits, rel=1e-15)


def test_bits_of_ragged_blocks_leave_padding_out():
    assert survey.measure(heavy_tails((3, 33)), SCALINGS["mxfp8"]).bits_per_element == 8 + 8 * 2 * 3 / 99


@pytest.mark.parametrize("shape", [(17,), (16, 24), (8, 16)], ids=str)
def test_scaling_that_does_not_apply_says_why(shape):
    m = survey.measure(heavy_tails(shape), SCALINGS["nvfp4-1x16"])
    assert m == Measurement("nvfp4-1x16", reason="needs M % 16 == 0 and K % 16 == 0 for NVFP4")


@pytest.mark.parametrize("shape", [(160,), (2, 32, 48), (3, 1, 7)], ids=str)
def test_any_number_of_dimensions(shape):
    for named in SCALINGS.values():
        assert survey.measure(heavy_tails(shape), named).scaling == named.name


def test_tensor_facts():
    facts = survey.tensor_facts(np.array([[0.0, -0.0, 3.0], [-0.25, np.nan, -np.inf]], F))
    assert (facts.shape, facts.dtype, facts.elements) == ((2, 3), "float32", 6)
    assert (facts.non_finite, facts.zeros, facts.amax, facts.smallest) == (2, 2, 3.0, 0.25)


def test_match_names_keeps_order_and_names_what_matches_nothing():
    names = ["b.w", "a.w", "a.b", "a[0]"]
    assert survey.match_names([], names) == names
    assert survey.match_names(["a.*", "b.w"], names) == ["b.w", "a.w", "a.b"]
    assert survey.match_names(["a[0]"], names) == ["a[0]"]
    with pytest.raises(LookupError, match="nothing"):
        survey.match_names(["a.*", "nothing"], names)


@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
@pytest.mark.parametrize("named", SCALINGS.values(), ids=SCALINGS)
def test_codes_times_decode_scales_are_the_dequantized_values(named, columnwise):
    x = heavy_tails((64, 96), BF16)
    q = refops.quantize(x, named.scaling, rowwise=not columnwise, columnwise=columnwise)
    product = named.scaling.fmt.values[survey.element_codes(q)] * survey.as_matrix(survey.decode_scale_source(q))
    np.testing.assert_array_equal(product, survey.as_matrix(survey.cast_dequantized_source(q)))
    if not survey.has_transform(q):
        np.testing.assert_array_equal(product, refops.dequantize(q))


def test_draw_writes_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    surveys = [
        (name, [survey.measure(x, s) for s in SCALINGS.values()])
        for name, x in {
            "plain": heavy_tails((32, 64)),
            "$bias_{": np.ones(7, F),
            "x" * 90: np.zeros((16, 16), F),
        }.items()
    ]
    plot.draw(tmp_path / "survey.png", surveys)
    assert (tmp_path / "survey.png").read_bytes().startswith(b"\x89PNG")


def test_short_labels_keep_what_differs():
    short = ["layer0.w", "layer0.b"]
    assert plot.short_labels(short) == short
    names = [f"model.language_model.layers.{i}.self_attention.{p}_proj.weight" for i in (2, 10) for p in "qk"]
    assert plot.short_labels(names) == [f"...{i}.self_attention.{p}_proj..." for i in (2, 10) for p in "qk"]
    ends = [f"{a}{'x' * 60}{b}" for a in "ab" for b in "cd"]
    labels = plot.short_labels(ends)
    assert max(map(len, labels)) <= plot.LONGEST_LABEL
    assert [(label[0], label[-1]) for label in labels] == [(name[0], name[-1]) for name in ends]
    middles = [f"{'x' * 60}{i}{'y' * 60}" for i in range(3)]
    assert plot.short_labels(middles) == middles  # longer than wanted rather than the same
    assert len(plot.short_labels(["x" * 90])[0]) <= plot.LONGEST_LABEL


@pytest.mark.parametrize("scalings", [1, 2, len(SCALINGS)])
@pytest.mark.parametrize("name", ["w", "model.layers.10.self_attention.query_projection"])
def test_titles_lie_within_the_picture(tmp_path, monkeypatch, name, scalings):
    text = pytest.importorskip("matplotlib.text")
    drawn = []

    def measure_titles(figure, path, **options):
        figure.canvas.draw()
        for axis in figure.axes[:2]:
            (title,) = (t for t in axis.findobj(text.Text) if t.get_text() == axis.get_title(loc="left"))
            drawn.append(title.get_window_extent().x1 / figure.bbox.width)

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", measure_titles)
    some = list(SCALINGS.values())[:scalings]
    plot.draw(tmp_path / "a.png", [(name, [survey.measure(np.ones((16, 16), F), s) for s in some])])
    assert len(drawn) == 2 and all(0.1 < right <= 1 for right in drawn)


# --- explain ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
@pytest.mark.parametrize("named", SCALINGS.values(), ids=SCALINGS)
def test_walk_shows_what_quantize_and_dequantize_give(named, columnwise, dtype):
    x = heavy_tails((160, 288), dtype)
    x[0, :5] = [np.nan, -0.0, 3.0, 0.0, 1e-40]
    scaling = named.scaling
    q = refops.quantize(x, scaling, rowwise=not columnwise, columnwise=columnwise)
    values, codes = refops.dequantize(q), survey.element_codes(q)
    for row, block in ((0, 0), (130, 1)):
        walk = explain.explain_block(x, scaling, columnwise=columnwise, row=row, block=block)
        steps = {s.name: s for s in walk.steps}
        assert len({e.index for e in walk.elements}) == len(walk.elements) > 0
        for e in walk.elements:
            assert e.index[columnwise] == row
            assert e.code == codes[e.index]
            np.testing.assert_array_equal(e.original, F(x[e.index]))
            np.testing.assert_array_equal(e.dequantized, values[e.index])
            np.testing.assert_array_equal(e.decoded * steps["decode scale"].value, e.restored)
            np.testing.assert_array_equal(e.cast * steps["encode multiplier"].value, e.scaled)
            random = {}
            if e.random_byte is not None:
                random = {"rounding": "stochastic", "random_bits": np.array([e.random_byte], np.uint8)}
            assert refops.encode(np.array([e.scaled]), scaling.fmt, **random)[0] == e.code


def steps_of(values, name, dtype=F, **where):
    x, _ = explain.as_tensor_of(np.array(values, dtype), SCALINGS[name].scaling, columnwise=SCALINGS[name].columnwise)
    walk = explain.explain_block(x, SCALINGS[name].scaling, columnwise=SCALINGS[name].columnwise, **where)
    return {s.name: s for s in walk.steps}, walk


def test_walk_of_the_specification_examples():
    steps, walk = steps_of([0.1, -0.25, 1, 3], "mxfp8")
    assert (steps["scale byte"].value, steps["scale byte"].bits) == (120, "0x78")
    assert [e.code for e in walk.elements] == [0x55, 0xE0, 0x70, 0x7C]
    assert [float(e.dequantized) for e in walk.elements] == [0.1015625, -0.25, 1, 3]
    assert walk.elements[0].error == 0.1015625 - float(F(0.1))

    steps, walk = steps_of([0.1, -0.25, 1, 3], "current")
    assert steps["encode multiplier"].bits == "0x43155555"
    assert steps["decode scale"].bits == "0x3BDB6DB7"
    assert [e.code for e in walk.elements] == [0x57, 0xE1, 0x71, 0x7E]


def test_walk_of_the_nvfp4_specification_example():
    block = [3, -2, 1.5, 1, 0.75, 0.5, 0.4, 0.3, 0.25, 0.2, 0.1, 0.05, -0.6, -1.2, 2.6, -3]
    steps, walk = steps_of([*block, 10], "nvfp4-1x16")
    assert steps["S_enc"].bits == "0x43866666"
    assert steps["scale byte"].bits == "0x70" and steps["block scale"].value == 128
    assert steps["decode scale"].bits == "0x3EF3CF3D"
    assert [e.code for e in walk.elements] == [7, 14, 5, 4, 3, 2, 2, 1, 1, 1, 0, 0, 11, 13, 7, 15]


def test_random_bytes_handed_in_are_shown():
    bits = np.random.default_rng(4).integers(0, 256, (32, 48), dtype=np.uint8)
    for scaling_bits, columnwise, shape in ((bits, False, (32, 48)), ((bits.T, bits), True, (48, 32))):
        scaling = refops.NVFP4Scaling(stochastic_rounding=True, random_bits=scaling_bits)
        walk = explain.explain_block(heavy_tails(shape), scaling, columnwise=columnwise, row=5, block=1)
        assert [e.random_byte for e in walk.elements] == bits[5, 16:32].tolist()


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"row": 4}, r"row must be in 0\.\.3 \(the tensor has 4 rows\); got 4"),
        ({"row": -1}, r"row must be in 0\.\.3"),
        ({"block": 2}, r"block must be in 0\.\.1 \(the tensor has 2 blocks of 32\); got 2"),
        ({"columnwise": True, "block": 1}, r"block must be in 0\.\.0 \(the tensor has 1 block of 32\); got 1"),
        ({"columnwise": True, "row": 40}, r"row must be in 0\.\.39 \(the tensor has 40 columns\); got 40"),
    ],
)
def test_place_outside_the_tensor(where, message):
    with pytest.raises(explain.BlockError, match=message):
        explain.explain_block(np.ones((4, 40), F), refops.MXFP8Scaling(refops.E4M3), **where)


@pytest.mark.parametrize("where", [{"row": 1.0}, {"block": "0"}, {"row": True}, {"block": np.float32(0)}])
def test_a_place_is_an_integer(where):
    ((name, value),) = where.items()
    with pytest.raises(TypeError, match=re.escape(f"{name} must be an integer; got {value!r}")):
        explain.explain_block(np.ones((4, 40), F), refops.MXFP8Scaling(refops.E4M3), **where)


E4M3, FLT_MAX = refops.E4M3, np.finfo(F).max
BELOW_6, ZEROS, TINY = (1.0, 2, 3), (0.0, 0, 0), (1e-38, 1e-39, 0)
TINIEST = 2.0**-133, 0, 0


@dataclass(frozen=True)
class EpsilonScaling(refops.MXFP8Scaling):
    """Every rounding of a power of two, with an epsilon."""

    amax_epsilon: float = 0.0


@pytest.mark.parametrize(
    ("scaling", "values", "dtype", "multiplier", "formula"),
    [
        (refops.CurrentScaling(E4M3), BELOW_6, F, F(448) / F(3), "448 / amax (0 or inf: 1; overflow: FLT_MAX)"),
        (
            refops.CurrentScaling(E4M3, amax_epsilon=6),
            BELOW_6,
            F,
            F(448) / F(6),
            "448 / max(amax, 6) (inf: 1; overflow: FLT_MAX)",
        ),
        (
            refops.CurrentScaling(E4M3, amax_epsilon=0.5),
            ZEROS,
            F,
            F(896),
            "448 / max(amax, 0.5) (inf: 1; overflow: FLT_MAX)",
        ),
        (
            refops.CurrentScaling(E4M3, amax_epsilon=1e-60),  # 0 in float32
            ZEROS,
            F,
            F(1),
            "448 / amax (0 or inf: 1; overflow: FLT_MAX)",
        ),
        (refops.CurrentScaling(E4M3), TINY, F, FLT_MAX, "448 / amax (0 or inf: 1; overflow: FLT_MAX)"),
        (refops.CurrentScaling(E4M3), TINIEST, BF16, FLT_MAX, "448 / amax (0 or inf: 1; overflow: FLT_MAX)"),
        (
            refops.BlockScaling(E4M3, 1, amax_epsilon=6),
            BELOW_6,
            F,
            F(64),
            "448 / max(amax, 6) (inf: 1; overflow: FLT_MAX), mantissa cleared",
        ),
        (
            refops.BlockScaling(E4M3, 1),
            TINY,
            F,
            F(2.0**127),
            "448 / amax (0 or inf: 1; overflow: FLT_MAX), mantissa cleared",
        ),
        (
            refops.BlockScaling(E4M3, 1, power_2_scale=False),
            TINIEST,
            BF16,
            np.uint32(0x7F7F0000).view(F),
            "448 / amax (0 or inf: 1; overflow: 3.389531e+38)",
        ),
    ],
)
def test_formula_gives_the_encode_multiplier(scaling, values, dtype, multiplier, formula):
    """An amax_epsilon and an overflow act in the formula that stands beside the number they make."""
    walk = explain.explain_block(np.array([values], dtype), scaling)
    step = next(step for step in walk.steps if step.name == "encode multiplier")
    assert (step.value, step.formula) == (multiplier, formula)


@pytest.mark.parametrize(
    ("rounding", "byte", "formula"),
    [
        ("up", 121, "max(amax, 6) * f32(1/448), up to the next 2^(byte-127)"),
        ("floor", 121, "127 + floor(log2 max(amax, 6)) - 8"),
        ("even", 121, "127 + floor(log2 of max(amax, 6) rounded to the element's mantissa) - 8"),
        ("ceil_ocp", 122, "127 + ceil(log2 max(amax, 6)) - 8"),
    ],
)
def test_formula_gives_the_scale_byte(rounding, byte, formula):
    scaling = EpsilonScaling(E4M3, scale_rounding=rounding, amax_epsilon=6.0)
    walk = explain.explain_block(np.array([BELOW_6], F), scaling)
    step = next(step for step in walk.steps if step.name == "scale byte")
    assert (step.value, step.formula) == (byte, formula)


def test_formula_names_the_cap_of_s_enc():
    steps, _ = steps_of([1e-36, 2e-37], "nvfp4-1x16")
    assert (steps["S_enc"].value, steps["S_enc"].formula) == (
        FLT_MAX,
        "448 * 6 / tensor amax (0 or inf: 1), at most FLT_MAX",
    )


@pytest.mark.parametrize("four_over_six", ["mae", "mse"])
def test_which_of_two_scales_a_block_keeps_is_said(four_over_six):
    """Told from the elements: the largest of a block became 6 or 4."""
    x = np.random.default_rng(6).standard_normal((16, 1024)).astype(F)
    scaling, said = refops.NVFP4Scaling(four_over_six=four_over_six, e4m3_max=256), set()
    for block in range(64):
        walk = explain.explain_block(x, scaling, block=block)
        formula = next(step.formula for step in walk.steps if step.name == "scale byte")
        number = re.search(r"error; here number (1|2) of 0x\w\w, 0x\w\w$", formula)[1]
        largest = max(abs(float(element.decoded)) for element in walk.elements)
        assert largest == {"1": 6, "2": 4}[number]
        said.add(number)
    assert said == {"1", "2"}


def test_values_are_padded_only_where_the_scaling_needs_it():
    x, note = explain.as_tensor_of(np.ones(5, F), SCALINGS["mxfp8"].scaling)
    assert x.shape == (1, 5) and "zero" not in note
    x, note = explain.as_tensor_of(np.ones(17, F), SCALINGS["nvfp4-1x16"].scaling)
    assert x.shape == (16, 32) and x.sum() == 17 and "divisible by 16" in note
    x, note = explain.as_tensor_of(np.ones(5, F), SCALINGS["nvfp4-row-scaled"].scaling, columnwise=True)
    assert x.shape == (32, 32) and x[:5, 0].all() and "column" in note


@pytest.mark.parametrize("name", ["current", "block-128x128", "mxfp8", "nvfp4-1x16", "nvfp4-rht"])
def test_a_walk_computes_its_block_only(name):
    """Besides the codes (and FP4's unpacked): matrices of float32 would take 16 MiB each here."""
    x = np.ones((2048, 2048), np.float32)
    tracemalloc.start()
    try:
        explain.explain_block(x, SCALINGS[name].scaling, columnwise=SCALINGS[name].columnwise, row=5, block=1)
        extra = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert extra < 16 << 20
