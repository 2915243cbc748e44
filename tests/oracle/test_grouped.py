"""Grouped (mixture-of-experts) dumps: each expert is judged by itself, and rows are those of the tensor."""

import json
from itertools import pairwise

import numpy as np
import pytest

import refops
from refops import cli, oracle
from refops.oracle.operation import QUANTIZED_ARRAYS
from refops.oracle.testing import assert_matches

F = np.float32
SPLITS = [64, 0, 160, 32]
EDGES = np.cumsum([0, *SPLITS])
ROWS = [slice(start, stop) for start, stop in pairwise(EDGES)]
X = np.random.default_rng(0).standard_normal((256, 128)).astype(F)
X[:64] *= 3  # experts have amaxes of their own
SCALINGS = ("mxfp8", "current", "delayed-scale-1", "nvfp4", "nvfp4-row-scaled", "block-1x128", "e8m0-128x128", "mxfp4")


def each(scaling):
    """What a right kernel writes for each expert."""
    return [refops.quantize(X[rows], refops.scalings.named(scaling), columnwise=True) for rows in ROWS]


def together(tensors):
    """The arrays of all experts one behind the other."""
    names = [name for name in QUANTIZED_ARRAYS if getattr(tensors[0], name) is not None]
    return {name: np.concatenate([getattr(q, name).reshape(-1) for q in tensors]) for name in names}


def check(outputs, scaling="mxfp8", splits=SPLITS, **options):
    return oracle.check("quantize", X, outputs, scaling=scaling, m_splits=splits, **options)


# --- right ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ulp", [0, 2])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_right_dumps_one_for_each_and_one_behind_the_other(scaling, ulp):
    tensors = each(scaling)
    for outputs in (tensors, together(tensors)):
        report = check(outputs, scaling, ulp=ulp)
        assert report.ok and report.wrong_experts == () and len(report.experts) == len(SPLITS)
        assert report.experts[1].report is None, "an expert without rows wrote nothing"
        assert sum(a.entries for a in report.arrays if a.name == "rowwise_data") == X.size


@pytest.mark.parametrize("scaling", ["mxfp8", "nvfp4", "block-1x128"])
def test_scales_without_padding_and_arrays_side_by_side(scaling):
    tensors = each(scaling)
    case = oracle.operation.Case("quantize", X, refops.scalings.named(scaling))
    dump = {}
    for name, array in together(tensors).items():
        parts = [getattr(q, name) for q in tensors]
        if name.endswith("_scale_inv"):
            parts = [
                part[oracle.operation.quantized_slots(case.scaling, q.shape)[name].valid_slices]
                for part, q in zip(parts, tensors, strict=True)
            ]
        last = name.endswith(("_data", "_scale_inv")) and len({part.shape[0] for part in parts}) == 1
        dump[name] = np.concatenate(parts, axis=1) if last else np.concatenate([p.reshape(-1) for p in parts])
        assert last == (array.size > 4 and name in TRANSPOSED[scaling]), name
    assert check(dump, scaling).ok


#: Name of the scaling -> arrays that are stored with the rows of the tensor last.
TRANSPOSED = {
    "mxfp8": (),
    "nvfp4": ("columnwise_data", "columnwise_scale_inv"),
    "block-1x128": ("columnwise_data", "rowwise_scale_inv"),
}


def test_swizzled_scales():
    tensors = [q.swizzled() for q in each("mxfp8")]
    assert check(tensors).ok, "tensors say themselves that they are swizzled"
    assert check(together(tensors), swizzled_scales=True).ok
    assert not check(together(tensors), diagnose=False).ok


def test_scalings_and_splits_of_each_expert():
    scalings = [refops.DelayedScaling(refops.E4M3, scale=2.0**n) for n in range(4)]
    tensors = [refops.quantize(X[rows], scaling) for rows, scaling in zip(ROWS, scalings, strict=True)]
    assert check(tensors, scalings).ok and not check(tensors, scalings[0], diagnose=False).ok
    assert check(each("mxfp8"), splits=np.array(SPLITS, np.int32)).ok


def test_activations_gradients_and_row_scales():
    """Values are the same as without splits; sums are those of each expert."""
    dy = np.ascontiguousarray(X[:, :64][::-1])
    assert oracle.check("swiglu", X, refops.activation("swiglu", X), m_splits=SPLITS).ok
    made = [refops.activation_grad("swiglu", dy[rows], X[rows], dbias=True) for rows in ROWS]
    dx, dbias = (np.concatenate([pair[i].reshape(-1, 128) for pair in made]) for i in (0, 1))
    inputs = {"dy": dy, "x": X}
    assert oracle.check("dswiglu", inputs, {"dx": dx, "dbias": dbias}, m_splits=SPLITS).ok
    dbias[1] = 1  # of the expert without rows
    report = oracle.check("dswiglu", inputs, {"dx": dx, "dbias": dbias}, m_splits=SPLITS)
    assert report.wrong_experts == (1,)
    scales = np.linspace(-2, 2, 256, dtype=F)
    y = refops.scaled_activation("swiglu", X, scales)
    inputs = {"x": X.reshape(2, 128, 128), "row_scales": scales.reshape(2, 128)}
    assert oracle.check("scaled_swiglu", inputs, y, m_splits=SPLITS).ok
    assert not oracle.check(
        "scaled_swiglu", inputs | {"row_scales": scales[::-1]}, y, m_splits=SPLITS, diagnose=False
    ).ok


# --- wrong ------------------------------------------------------------------------------------------------------------


def test_the_report_names_the_expert_and_the_rows_of_the_tensor():
    dump = together(each("mxfp8"))
    dump["rowwise_data"].reshape(256, 128)[100:110, 3] ^= 8
    report = check(dump, diagnose=False)
    assert report.wrong_experts == (2,)
    text = str(report)
    assert text.startswith("WRONG: quantize -> MXFP8") and "expert 2 of 4 is wrong" in text.split("\n")[0]
    assert "  rowwise_data: 10 of 32,768 wrong" in text and "  expert 2 (rows 64..223): wrong" in text
    assert "all in rows 100..109, column 3 of 160 x 128 from row 64 on" in text
    assert "first: rowwise_data[100, 3]: got" in text and "expert 0" not in text
    (wrong,) = [array for array in report.arrays if not array.ok]
    assert wrong.first[0].index == wrong.first[0].element == (100, 3)
    assert wrong.first[0].inputs["x"] == X[100, 3]
    with pytest.raises(oracle.MismatchError, match="expert 2 of 4 is wrong"):
        assert_matches("quantize", X, dump, scaling="mxfp8", m_splits=SPLITS, diagnose=False)
    experts = report.as_dict()["experts"]
    assert [one["ok"] for one in experts] == [True, True, False, True] and experts[2]["rows"] == [64, 224]


def test_entries_of_scales_name_the_row_of_their_element():
    tensors = each("mxfp8")
    tensors[3].columnwise_scale_inv[0, 7] ^= 1
    tensors[3].rowwise_scale_inv[5, 1] ^= 1
    found = {a.name: a.first[0] for a in check(tensors, diagnose=False).arrays if a.first}
    assert found["columnwise_scale_inv"].element == (224, 7) and found["columnwise_scale_inv"].index == (0, 7)
    assert found["rowwise_scale_inv"].element == (229, 32) and found["rowwise_scale_inv"].index == (229, 1)


@pytest.mark.parametrize("scaling", ["current", "nvfp4"])
def test_an_expert_under_the_amax_of_all_is_told_so(scaling):
    tensors, whole = each(scaling), refops.quantize(X, refops.scalings.named(scaling))
    scales = whole.rowwise_scale_inv if scaling == "current" else whole.rowwise_scale_inv[ROWS[3]]
    part = {"data": whole.rowwise_data[ROWS[3]], "scale": scales, "amax": whole.amax_rowwise}
    report = check([*tensors[:3], part], scaling)
    assert report.wrong_experts == (3,)
    assert [e.names for e in report.diagnosis] == [("amax-of-all-experts",)]
    assert check([*tensors[:3], part | {"data": tensors[3].rowwise_data ^ 8}], scaling).diagnosis != report.diagnosis


def test_a_convention_of_one_expert_is_named_there():
    tensors = each("mxfp8")
    tensors[0] = refops.quantize(X[ROWS[0]], refops.scalings.named("mxfp8-floor"))
    report = check(tensors)
    assert report.wrong_experts == (0,) and report.diagnosis[0].names == ("scale-floor",)
    assert "  expert 0 (rows 0..63): wrong" in str(report) and "1. scale-floor" in str(report)


def test_no_more_than_some_experts_are_diagnosed(monkeypatch):
    monkeypatch.setattr(oracle.grouped, "MOST_DIAGNOSED", 1)
    tensors = [refops.quantize(X[rows], refops.scalings.named("mxfp8-floor")) for rows in ROWS]
    report = check(tensors)
    assert report.wrong_experts == (0, 2, 3)
    assert [one.report.diagnosed for one in report.experts if one.report] == [True, False, False]
    assert "a diagnosis was tried for 1 wrong experts, not for experts 2..3" in str(report)


# --- bad use ----------------------------------------------------------------------------------------------------------

BAD = {
    "sum": ({"splits": [64, 64]}, "m_splits must add up to the 256 rows of the inputs; got 128"),
    "negative": ({"splits": [-1, 257]}, "m_splits must be the rows of each expert, integers >= 0"),
    "empty": ({"splits": []}, "m_splits must be the rows of each expert"),
    "floats": ({"splits": [64.0, 192.0]}, "m_splits must be the rows of each expert"),
    "number of outputs": ({"outputs": [{"data": X}]}, "outputs must be a dict, or one for each of 4 experts; got 1"),
    "number of scalings": ({"scaling": ["mxfp8"] * 3}, "scaling must be one, or one for each of 4 experts; got 3"),
    "size": (
        {"outputs": {"codes": np.zeros((256, 100), np.uint8)}},
        r"rowwise_data must hold what 4 experts wrote, one after another, 32,768 entries; got shape \(256, 100\)",
    ),
    "scales": (
        {"outputs": {"scales": np.zeros(9, np.uint8)}},
        "rowwise_scale_inv must hold .* 2,048 entries, or 1,024 without padding",
    ),
    "name": ({"outputs": {"codez": X}}, "outputs must be among .*did you mean"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_use_says_what_was_expected(name):
    options, said = BAD[name]
    with pytest.raises(ValueError, match=said):
        check(**{"outputs": each("mxfp8")} | options)


def test_operations_without_rows_have_no_experts():
    with pytest.raises(ValueError, match="m_splits must be None for dequantize"):
        oracle.check("dequantize", refops.quantize(X, refops.MXFP8Scaling(refops.E4M3)), X, m_splits=SPLITS)


# --- the command line -------------------------------------------------------------------------------------------------


@pytest.fixture
def dumped(tmp_path, monkeypatch):
    """A folder of raw files: the input and each array of all experts."""
    monkeypatch.chdir(tmp_path)
    X.tofile("x.bin")
    for name, array in together(each("mxfp8")).items():
        array.tofile(f"{name}.bin")
    return ["check", "--op", "quantize", "--scaling", "mxfp8", "--input", "x.bin@float32:256x128"]


OUTPUTS = ["--data", "rowwise_data.bin", "--output", "columnwise_scales=columnwise_scale_inv.bin"]


def test_command_line(dumped, capsys):
    splits = ["--m-splits", "64,0,160,32"]
    assert cli.main([*dumped, *OUTPUTS, *splits]) == 0
    assert "all experts" in capsys.readouterr().out
    codes = np.fromfile("rowwise_data.bin", np.uint8)
    codes[-1] ^= 8
    codes.tofile("rowwise_data.bin")
    assert cli.main([*dumped, *OUTPUTS, *splits, "--json", "--no-diagnosis"]) == 1
    experts = json.loads(capsys.readouterr().out)["experts"]
    assert [one["ok"] for one in experts] == [True, True, True, False]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--m-splits", "64,192"], "--output columnwise_scales must hold"),
        (["--m-splits", "64,191"], "--m-splits must add up to the 256 rows of the inputs; got 255"),
        (["--m-splits", "64,x"], "--m-splits: must be rows of each expert, integers >= 0 joined by commas"),
        (["--m-splits", "256", "--ptx", "k.ptx"], "--m-splits must not be given with a kernel; got [256]"),
    ],
)
def test_bad_use_of_the_command_line(dumped, capsys, words, said):
    assert cli.main([*dumped, *OUTPUTS, *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
