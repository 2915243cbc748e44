"""A diagnosis says where: the copy, the rows and columns, the law of what was moved; and no more than it knows."""

import ml_dtypes
import numpy as np
import pytest

import refops
from refops import oracle
from refops.oracle.diagnosis.inference import find_lines
from refops.oracle.places import Lines, Place

F = np.float32
BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = refops.E4M3
MXFP8, FLOOR = refops.MXFP8Scaling(E4M3), refops.MXFP8Scaling(E4M3, scale_rounding="floor")
NVFP4 = refops.NVFP4Scaling()
M, K = 224, 352


def normal(shape=(M, K), seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(BF16)


def arrays_of(q):
    return {name: array.copy() for name, array in vars(q).items() if isinstance(array, np.ndarray)}


def quantized(scaling, shape=(M, K), **options):
    """(x, arrays of both copies)."""
    x = normal(shape)
    return x, arrays_of(refops.quantize(x, scaling, columnwise=True, **options))


def first(x, outputs, scaling, op="quantize", **options):
    report = oracle.check(op, x, outputs, scaling=scaling, **options)
    assert not report.ok
    assert report.diagnosis, str(report)
    return report.diagnosis[0]


# --- places ---------------------------------------------------------------------------------------------------------


def test_lines_are_a_range_of_some_phases():
    lines = Lines(12, 2, 9, 4, (1, 2))
    assert np.flatnonzero(lines.mask()).tolist() == [2, 5, 6, 9]
    assert np.flatnonzero(Lines(8, 0, 7, 4, (3, 0)).mask()).tolist() == [0, 3, 4, 7]
    assert Lines.all_of(5).is_all and Lines.all_of(5).mask().all() and not lines.is_all
    assert Lines(8, 3, 3).words("row") == "row 3" and Lines(8, 3, 5).words("column") == "columns 3..5"
    assert Lines(8, 0, 7, 2, (1, 1)).words("row") == "odd rows"
    assert Lines(64, 0, 63, 16, (4, 7)).words("column") == "columns 4..7 of every 16"


def test_a_place_is_rows_times_columns():
    place = Place(("rowwise_data", "rowwise_scale_inv"), Lines(4, 1, 2), None)
    assert place.mask((4, 3)).sum() == 6 and not place.is_everywhere and Place().is_everywhere
    assert str(place) == "the rowwise copy, rows 1..2"
    assert str(Place(("dbias",), None, Lines(8, 4, 7))) == "dbias, columns 4..7"
    moved = Place((), Lines(8, 1, 2)).from_row(16, 8, 64)
    assert (moved.rows.first, moved.rows.last, moved.rows.size) == (17, 18, 64)
    assert place.as_dict()["rows"] == {"first": 1, "last": 2, "period": 1, "phases": [0, 0]}


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (Lines(M, 128, M - 1), Lines.all_of(K)),
        (Lines(M, 0, 127), Lines.all_of(K)),
        (Lines(M, 64, 127), Lines(K, 128, 255)),
        (Lines.all_of(M), Lines(K, 0, K - 1, 64, (32, 63))),
        (Lines(M, 0, M - 1, 8, (7, 7)), Lines.all_of(K)),
        (Lines(M, 0, M - 1, 2, (1, 1)), Lines(K, 320, K - 1)),
    ],
)
@pytest.mark.parametrize("share", [1.0, 0.2])
def test_the_place_of_a_fault_is_found(rows, columns, share):
    """Also where it shows in a fifth of the entries alone."""
    inside = rows.mask()[:, None] & columns.mask()[None, :]
    changed = np.random.default_rng(0).random((M, K)) < share
    assert find_lines(changed & inside, changed & ~inside) == (rows, columns)


def test_what_has_no_place_gets_none():
    rng = np.random.default_rng(1)
    shown = rng.random((M, K)) < 0.3
    assert find_lines(shown, ~shown) is None
    assert find_lines(np.zeros((M, K), bool), shown) is None


# --- conventions in a place -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
def test_a_rule_in_one_copy(direction):
    x, outputs = quantized(MXFP8)
    _, wrong = quantized(FLOOR)
    names = [f"{direction}_data", f"{direction}_scale_inv"]
    answer = first(x, outputs | {name: wrong[name] for name in names}, MXFP8)
    assert answer.names == ("scale-floor",) and answer.exact and set(answer.place.arrays) == set(names)
    assert answer.place.rows is None and answer.place.columns is None
    assert f"scale-floor, in the {direction} copy only: " in str(answer)


@pytest.mark.parametrize(
    ("rows", "blocks", "words"),
    [
        (slice(128, None), slice(None), "rows 128..223"),
        (slice(None), slice(1, None, 2), "columns 32..63 of every 64"),
        (slice(96, 128), slice(None), "rows 96..127"),
        (slice(64, 128), slice(4, 8), "rows 64..127, columns 128..255"),
    ],
)
def test_a_rule_in_a_part(rows, blocks, words):
    x, outputs = quantized(MXFP8)
    _, wrong = quantized(FLOOR)
    scales = outputs["rowwise_scale_inv"][:M, : K // 32]
    scales[rows, blocks] = wrong["rowwise_scale_inv"][:M, : K // 32][rows, blocks]
    codes, others = (a["rowwise_data"].reshape(M, K // 32, 32) for a in (outputs, wrong))
    codes[rows, blocks] = others[rows, blocks]
    answer = first(x, outputs, MXFP8)
    assert answer.names == ("scale-floor",) and str(answer.place) == f"the rowwise copy, {words}"


def test_a_rule_in_a_part_of_a_large_tensor():
    x, outputs = quantized(MXFP8, (2048, 1024))
    _, wrong = quantized(FLOOR, (2048, 1024))
    for name in ("rowwise_data", "rowwise_scale_inv"):
        outputs[name][1500:2048] = wrong[name][1500:2048]
    answer = first(x, outputs, MXFP8)
    assert answer.names == ("scale-floor",) and answer.sampled
    assert str(answer.place) == "the rowwise copy, rows 1500..2047"


def test_a_layout_in_a_part():
    x, outputs = quantized(NVFP4)
    data = outputs["rowwise_data"]
    data[128:] = (data[128:] >> 4) | (data[128:] << 4)
    answer = first(x, outputs, NVFP4)
    assert answer.names == ("swapped-nibbles",) and str(answer.place) == "the rowwise copy, rows 128..223"


def test_a_formula_in_a_part_of_the_values():
    x = normal()
    y, other = refops.activation("gelu", x), refops.activation("qgelu", x)
    y[:, 1::2] = other[:, 1::2]
    answer = first(x, {"y": y}, None, "gelu")
    assert answer.names == ("other-activation",) and str(answer.place) == "odd columns"


def test_dbias_of_a_place():
    """A sum whose terms are wrong in some rows follows from the place that the gradient shows."""
    x, dy = normal(), normal(seed=1)
    late = dy.copy()
    late[64:96] = dy[32:64]
    scaling = refops.DelayedScaling(E4M3, scale=16)
    q, dbias = refops.activation_grad_quantize("gelu", late, x, scaling, dbias=True)
    outputs = {"data": q.rowwise_data, "scale": q.rowwise_scale_inv, "amax": q.amax_rowwise, "dbias": dbias}
    answer = first({"dy": dy, "x": x}, outputs, scaling, "dgelu")
    assert answer.names == ("input-shifted",) and str(answer.place) == "rows 64..95" and answer.explained == 1


# --- right entries elsewhere ----------------------------------------------------------------------------------------


def moved_rows(data):
    data[64:96] = data[63:95].copy()


def swapped_rows(data):
    data[0::2], data[1::2] = data[1::2].copy(), data[0::2].copy()


def repeated_rows(data):
    data[32:64] = data[32]


def reversed_columns(data):
    data[:] = data.reshape(len(data), -1, 16)[:, :, ::-1].reshape(data.shape)


def transposed_tiles(data):
    tiles = data.reshape(7, 32, 11, 32)
    data[:] = tiles.transpose(0, 3, 2, 1).reshape(data.shape)


def unwritten(data):
    data[96:112] = 0


@pytest.mark.parametrize(
    ("fault", "name", "words"),
    [
        (moved_rows, "shifted-rows", "the rowwise copy, rows 64..95"),
        (swapped_rows, "swapped-rows", "the rowwise copy"),
        (repeated_rows, "repeated-rows", "the rowwise copy, rows 32..63"),
        (reversed_columns, "swapped-columns", "the rowwise copy"),  # n and n ^ 15
        (transposed_tiles, "transposed-tiles", "the rowwise copy"),
        (unwritten, "not-written", "the rowwise copy, rows 96..111"),
    ],
)
def test_codes_elsewhere(fault, name, words):
    x, outputs = quantized(MXFP8)
    fault(outputs["rowwise_data"])
    answer = first(x, outputs, MXFP8)
    assert answer.names == (name,), str(answer)
    assert str(answer.place) == words and answer.explained == 1


def test_scales_elsewhere_say_that_the_codes_are_right():
    x, outputs = quantized(MXFP8)
    scales = outputs["columnwise_scale_inv"]
    scales[:6] = scales[[1, 0, 3, 2, 5, 4]]
    answer = first(x, outputs, MXFP8)
    assert answer.names == ("swapped-blocks",) and "codes are right under the right scales" in answer.sentence
    assert str(answer.place).startswith("the columnwise copy")


def test_slots_of_amaxes_that_are_exchanged():
    scaling = refops.NVFP4Scaling(row_scaled=True)
    x = normal((64, 128))
    outputs = arrays_of(refops.quantize(x, scaling))
    outputs["amax_rowwise"] = outputs["amax_rowwise"].reshape(-1, 2)[:, ::-1].reshape(-1).copy()
    assert first(x, outputs, scaling).names == ("swapped-rows",)


def test_two_tiles_in_one_place():
    x, outputs = quantized(MXFP8, (256, 512))
    data = outputs["rowwise_data"]
    data[:128], data[128:] = data[128:].copy(), 0
    answer = first(x, outputs, MXFP8)
    assert answer.names == ("not-written", "shifted-rows")


# --- no false name --------------------------------------------------------------------------------------------------


def test_an_infinite_amax_is_near_to_itself_alone():
    x = normal((32, 64))
    x[3, 5] = np.inf
    outputs = arrays_of(refops.quantize(x, NVFP4))
    outputs["amax_rowwise"] = np.zeros(1, F)
    report = oracle.check("quantize", x, outputs, scaling=NVFP4)
    assert [e.names for e in report.diagnosis] == [("not-written",)], str(report)


def test_codes_that_follow_a_wrong_scale_are_part_of_what_is_explained():
    """A name whose codes are those of the right scale is not said of codes that follow the wrong one."""
    x = normal()
    amax = np.abs(x.astype(F)).reshape(M, K // 32, 32).max(axis=2)
    byte = (np.floor(np.log2(amax / F(448))) + 127).astype(np.uint8)
    multiplier = np.repeat(np.ldexp(F(1), 127 - byte.astype(int)), 32, axis=1)
    codes = np.clip(x.astype(F) * multiplier, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    report = oracle.check("quantize", x, {"data": codes, "scale": byte}, scaling=MXFP8)
    assert report.diagnosis[0].names == ("scale-quotient-floor",)
    assert not any("right one" in explanation.sentence for explanation in report.diagnosis)


def test_random_codes_have_no_explanation():
    x, outputs = quantized(MXFP8)
    outputs["rowwise_data"][64:128] = np.random.default_rng(0).integers(0, 256, (64, K))
    assert oracle.check("quantize", x, outputs, scaling=MXFP8).diagnosis == ()


# --- the budget -----------------------------------------------------------------------------------------------------


def test_a_budget_ends_the_search_and_says_so():
    x, outputs = quantized(NVFP4)
    outputs["rowwise_data"] ^= 1
    told = []
    spent = oracle.check("quantize", x, outputs, scaling=NVFP4, budget=1e-3, progress=lambda *at: told.append(at))
    assert not spent.ok and spent.diagnosis == () and any("budget" in note for note in spent.notes)
    whole = oracle.check("quantize", x, outputs, scaling=NVFP4, budget=None, progress=lambda *at: told.append(at))
    assert not any("budget" in note for note in whole.notes)
    assert told and all(seconds > 0 for seconds, _ in told) and told[-1][1] is None


@pytest.mark.parametrize("budget", [0, -1, "soon"])
def test_a_budget_is_seconds(budget):
    x = normal((32, 32))
    with pytest.raises((TypeError, ValueError), match="budget"):
        oracle.check("quantize", x, {"data": np.zeros((32, 32), np.uint8)}, scaling=MXFP8, budget=budget)


# --- what comes first ------------------------------------------------------------------------------------------------


def test_the_report_begins_with_whose_fault_it_is():
    x, outputs = quantized(MXFP8)
    floor = arrays_of(refops.quantize(x, FLOOR))
    codes, scales = "rowwise_data", "rowwise_scale_inv"
    swapped = outputs[scales].copy()
    swapped[:, :10] = swapped[:, [1, 0, 3, 2, 5, 4, 7, 6, 9, 8]]
    alone = oracle.check("quantize", x, {codes: outputs[codes], scales: swapped}, scaling=MXFP8)
    followed = oracle.check("quantize", x, {codes: floor[codes], scales: floor[scales]}, scaling=MXFP8)
    assert str(alone).split("\n")[1] == f"  {codes}: right under the right scales; {scales} alone is wrong"
    assert (
        str(followed).split("\n")[1]
        == f"  {codes}: right under the scales that were written; what makes {scales} is wrong"
    )
    assert oracle.check("quantize", x, outputs, scaling=MXFP8).leads == () and alone.as_dict()["leads"] == [
        *alone.leads
    ]


# --- what an attack found --------------------------------------------------------------------------------------------


def test_an_exchange_of_copies_is_none_where_the_other_copy_is_right():
    scaling = refops.MXFP8Scaling(E4M3, two_d=True)
    x, outputs = quantized(scaling)
    outputs["rowwise_data"][10, 20:24] ^= 1
    assert oracle.check("quantize", x, outputs, scaling=scaling).diagnosis == ()
    outputs["rowwise_data"][:] = np.random.default_rng(0).integers(0, 126, (M, K))
    assert oracle.check("quantize", x, outputs, scaling=scaling).diagnosis == ()


@pytest.mark.parametrize("scale", [1e-5, 1e-9])
def test_what_is_tiny_is_not_near_to_everything_tiny(scale):
    x = normal()
    y = refops.activation("gelu", x)
    y[96:128] = scale * np.random.default_rng(1).random((32, K))
    assert oracle.check("gelu", x, y).diagnosis == ()


@pytest.mark.parametrize("filler", [0xCD, 0xA5])
def test_bytes_that_are_no_codes_may_be_unwritten(filler):
    scaling = refops.MXFP8Scaling(refops.E3M2)
    x, outputs = quantized(scaling)
    outputs["rowwise_data"][64:96] = filler
    answer = first(x, outputs, scaling)
    assert answer.names == ("not-written",) and str(answer.place) == "the rowwise copy, rows 64..95"


def test_nan_may_have_been_computed():
    """It is what tests fill memory with, and what overflow and other NaN make: the sentence says either."""
    x = normal().astype(F)
    y = refops.activation("gelu", x)
    y[32:64] = np.nan
    answer = first(x, y, None, "gelu")
    assert answer.names == ("not-written",) and str(answer.place) == "rows 32..63"
    assert "or all of them overflowed or met a NaN" in answer.sentence
    scattered = refops.activation("gelu", x)
    scattered[np.abs(x) > 1] = np.nan
    assert all("not-written" not in e.names for e in oracle.check("gelu", x, scattered).diagnosis)


def test_a_law_says_nothing_of_lines_without_a_source():
    x, outputs = quantized(MXFP8, (256, 512))
    scales = outputs["rowwise_scale_inv"]
    scales[:128, 4:8] = scales[:128, :4]
    answer = first(x, outputs, MXFP8)
    assert (
        answer.names == ("shifted-blocks",) and str(answer.place) == "the rowwise copy, rows 0..127, columns 128..255"
    )


def test_each_expert_has_a_place_of_its_own():
    x = normal((256, 352))
    parts = [x[:128], x[128:]]
    right, floor = ([arrays_of(refops.quantize(part, s)) for part in parts] for s in (MXFP8, FLOOR))
    for name in right[0]:
        right[0][name][:32], right[1][name][96:] = floor[0][name][:32], floor[1][name][96:]
    report = oracle.check("quantize", x, right, scaling=MXFP8, m_splits=[128, 128])
    assert [str(e.place) for e in report.diagnosis if e.names == ("scale-floor",)] == ["rows 0..31", "rows 224..255"]


def test_the_budget_holds_for_a_large_tensor():
    x, outputs = quantized(MXFP8, (2048, 2048))
    outputs["rowwise_data"][np.random.default_rng(0).random((2048, 2048)) < 0.3] ^= 1
    spent = []
    report = oracle.check(
        "quantize", x, outputs, scaling=MXFP8, budget=1, progress=lambda seconds, _: spent.append(seconds)
    )
    assert not report.ok and report.diagnosis == () and max(spent) < 4


def one_power_of_two():
    """float32 (64, 128) whose block amaxes are no power of two over 448, but for one: 3.5 in row 15, columns 64..95."""
    x = normal((64, 128)).astype(F)
    x[15, 64:96] = np.linspace(-3, 3, 32)
    x[15, 70] = 3.5
    return x


@pytest.mark.parametrize("zero", [0, 1])
def test_one_wrong_scale_has_the_name_of_what_is_done_everywhere(zero):
    """The exponent of amax / 448 plus one is TE's byte but in one block: rules that give it need a place, this none."""
    x = one_power_of_two()
    x[20:24] = 0
    amax = np.abs(x).reshape(64, 4, 32).max(axis=2)
    byte = np.where(amax == 0, zero, ((amax * F(1 / 448)).view(np.uint32) >> 23) + 1).astype(np.uint8)
    scaled = x.reshape(64, 4, 32) * np.exp2(127 - byte.astype(np.float64))[:, :, None]
    outputs = {"data": refops.encode(scaled.astype(F).reshape(64, 128), E4M3), "scale": byte}
    report = oracle.check("quantize", x, outputs, scaling=MXFP8)
    best = report.diagnosis[0]
    assert report.arrays[1].wrong == 1 + 16 * zero
    assert best.names == ("scale-above-quotient",) and best.place is None and best.exact


def test_one_wrong_byte_by_itself_has_no_name():
    """A byte that is one too large is what many rules give there, each with a place around it."""
    x = one_power_of_two()
    q = refops.quantize(x, MXFP8)
    outputs = {"data": q.rowwise_data.copy(), "scale": q.rowwise_scale_inv.copy()}
    outputs["scale"][10, 1] += 1
    scaled = x[10, 32:64] * np.exp2(127 - float(outputs["scale"][10, 1]))
    outputs["data"][10, 32:64] = refops.encode(scaled.astype(F), E4M3)
    assert oracle.check("quantize", x, outputs, scaling=MXFP8).diagnosis == ()


@pytest.mark.parametrize(
    ("scaling", "name"),
    [(MXFP8, "zero-block-scale"), (refops.NVFP4Scaling(), "clamped-block-scale")],
    ids=["mxfp8", "nvfp4"],
)
def test_what_zero_blocks_alone_show_is_said_of_them(scaling, name):
    """But a scale code of 1 is a clamp of NVFP4's scales, whose least it is."""
    x = normal((64, 128))
    x[8:16] = 0
    q = refops.quantize(x, scaling)
    outputs = dict(arrays_of(q)) | {"rowwise_scale_inv": np.maximum(q.rowwise_scale_inv, 1)}
    best = oracle.check("quantize", x, outputs, scaling=scaling).diagnosis[0]
    assert best.names == (name,) and best.exact
    outputs = dict(arrays_of(q)) | {"rowwise_data": q.rowwise_data.copy()}
    outputs["rowwise_data"][8:16] = 0x7F if scaling == MXFP8 else 0x77
    best = oracle.check("quantize", x, outputs, scaling=scaling).diagnosis[0]
    assert best.names == ("zero-block-nan",) and best.place is None and best.exact


def test_what_each_copy_does_is_said_of_that_copy():
    """Codes i and i + 8 of 16 share a byte: along columns in the rowwise copy, along rows in the columnwise one."""
    x = normal((96, 160))
    q = refops.quantize(x, NVFP4, columnwise=True)

    def halves_together(data):
        codes = refops.formats.unpack_fp4(data).reshape(len(data), -1, 2, 8)
        return (codes[:, :, 1] << 4 | codes[:, :, 0]).reshape(data.shape).astype(np.uint8)

    outputs = dict(arrays_of(q))
    outputs |= {name: halves_together(outputs[name]) for name in ("rowwise_data", "columnwise_data")}
    best = first(x, outputs, NVFP4)
    assert best.names == ("permuted-columns", "permuted-rows")
    assert best.sentence == (
        "The rowwise codes are in the wrong columns: each 16 columns are dealt out by 2; "
        "the columnwise codes are in the wrong rows: each 16 rows are dealt out by 2."
    )


# --- kernels whose exp rounds another way -----------------------------------------------------------------------------


def silu_of_other_bits(x):
    """silu by NumPy's exp: right, with other bits than the reference's in many places."""
    y = (x / (F(1) + np.exp(-x))).astype(F)
    assert oracle.check("silu", x, y).ok and (y != refops.activation("silu", x)).mean() > 0.1
    return y


@pytest.mark.parametrize(
    ("fault", "name", "place"),
    [
        (lambda y: np.concatenate([y[:192], y[:64]]), "shifted-rows", "rows 192..255"),
        (lambda y: y[::-1], "reversed-rows", ""),
        (lambda y: y[np.arange(256) ^ 32], "swapped-rows", ""),
        (lambda y: np.concatenate([y[:100], 2 * y[100:]]), "constant-factor", "rows 100..255"),
        (lambda y: np.concatenate([y[:192], np.full_like(y[192:], np.nan)]), "not-written", "rows 192..255"),
    ],
)
def test_values_of_other_bits_stand_elsewhere(fault, name, place):
    x = np.random.default_rng(1).standard_normal((256, 256), F)
    answer = first(x, fault(silu_of_other_bits(x)), None, "silu")
    assert answer.names == (name,) and str(answer.place or "") == place and answer.explained > 0.999


def dgelu_of_other_bits(dy, x):
    """The gradient of gelu with NumPy's tanh, its terms in another order than the reference's."""
    dy, x = dy.astype(F), x.astype(F)
    t = np.tanh(F(0.79788456) * x * (1 + F(0.044715) * x * x))
    slope = F(0.5) * x * ((1 - t * t) * (F(0.79788456) + F(0.1070322243) * x * x)) + F(0.5) * (1 + t)
    return (slope * dy).astype(F)


@pytest.mark.parametrize(
    ("fault", "name", "place"),
    [
        (lambda c: np.where(np.arange(300)[:, None] < 256, c, 0), "not-written", "rows 256..299"),
        (lambda c: np.where(np.arange(300)[:, None] % 8 > 0, c, 0), "not-written", "row 0 of every 8"),
        (lambda c: np.concatenate([c[:256], c[:44]]), "shifted-rows", "rows 256..299"),
    ],
)
def test_codes_of_which_a_few_are_other_accepted_ones_stand_elsewhere(fault, name, place):
    """A result that becomes zero may have either sign: a right zero is no sign that zero was there before."""
    rng = np.random.default_rng(5)
    x = (rng.standard_normal((300, 200)) * 1.5).astype(F).astype(BF16)
    dy = (rng.standard_normal((300, 200)) * 0.2).astype(F).astype(BF16)
    scaling = refops.DelayedScaling(E4M3, scale=100.3)
    codes = refops.quantize(dgelu_of_other_bits(dy, x), scaling).rowwise_data
    own = refops.activation_grad_quantize("gelu", dy, x, scaling).rowwise_data
    assert ((codes == 0) & (own == 0x80)).any()
    assert oracle.check("dgelu", {"dy": dy, "x": x}, {"data": codes}, scaling=scaling).ok
    answer = first({"dy": dy, "x": x}, {"data": fault(codes).astype(np.uint8)}, scaling, "dgelu")
    assert answer.names == (name,) and str(answer.place) == place


@pytest.mark.parametrize("held", [0x7F, 0x80, 0x01, 0x7E])
def test_any_number_that_stands_for_results_of_either_sign_was_not_computed(held):
    x, outputs = quantized(MXFP8)
    outputs["rowwise_data"][192:] = held
    answer = first(x, outputs, MXFP8)
    assert answer.names == ("not-written",) and "rows 192..223" in str(answer.place) and f"0x{held:02x}" in str(answer)


@pytest.mark.parametrize("lane", [0, 13, 31])
@pytest.mark.parametrize("lines", [slice(64, 65), slice(64, 80)])
@pytest.mark.parametrize("along", [0, 1])
def test_results_of_a_lane_that_its_neighbours_have_too_were_computed(lane, lines, along):
    x, dy = normal((512, 512)), normal((512, 512), 2)
    dx = refops.activation_grad("gelu", dy, x)
    part = dx[lines, 96:128] if along else dx[96:128, lines]
    part[...] = part[:, lane : lane + 1] if along else part[lane : lane + 1]
    report = oracle.check("dgelu", {"dy": dy, "x": x}, {"dx": dx})
    assert not report.ok and all("not-written" not in answer.names for answer in report.diagnosis), str(report)
    part[...] = BF16.type(0.123)  # a number that no entry beside it has
    (answer,) = oracle.check("dgelu", {"dy": dy, "x": x}, {"dx": dx}).diagnosis
    assert answer.names == ("not-written",), str(answer)


def test_a_saturated_result_was_computed():
    """Results of one sign, in a place, that a scale too large makes the largest number."""
    x = np.abs(normal()) + BF16.type(1)
    scaling = refops.DelayedScaling(E4M3, scale=8)
    codes = refops.quantize(x, scaling).rowwise_data
    codes[128:] = refops.quantize(x, refops.DelayedScaling(E4M3, scale=2.0**20)).rowwise_data[128:]
    assert (codes[128:] == 0x7E).all()
    report = oracle.check("quantize", x, {"data": codes}, scaling=scaling)
    assert not report.ok and all(answer.names != ("not-written",) for answer in report.diagnosis)


@pytest.mark.parametrize("size", [64, 96, 128, 224])
@pytest.mark.parametrize("by", [1, 2])
def test_lines_that_are_exchanged_in_pairs(size, by):
    """The lines whose source is sought must not be the even ones alone, of which another law holds."""
    x, outputs = quantized(MXFP8, (size, 160))
    answer = first(x, {"data": outputs["rowwise_data"][np.arange(size) ^ by]}, MXFP8)
    assert answer.names == ("swapped-rows",) and f"n ^ {by} " in answer.sentence
