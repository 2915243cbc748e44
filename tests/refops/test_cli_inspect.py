"""`refops inspect` of files with many tensors: lines, the worst ones, CSV, the HTML page, quantized checkpoints."""

import base64
import csv
import html.parser
import math
import re
import tracemalloc
from xml.etree import ElementTree

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from refops import cli, survey
from refops.survey import SCALINGS, measure

F = np.float32
RNG = np.random.default_rng(0)
SCALED = ("--scaling", "mxfp8", "--scaling", "nvfp4-1x16")
#: Shares of elements that mxfp8 flushes: the more, the lower the SQNR.
TENSORS = {
    f"layers.{i}.w": (RNG.standard_normal((16, 64)) * np.exp(0.1 * i * RNG.standard_normal((16, 64)))).astype(F)
    for i in range(23)
}
ODD = {"bias": np.array([1.0, 3.0, 448.5], F), "counts": np.arange(3), "step": np.array(3), "none": np.zeros((0, 4), F)}


@pytest.fixture
def many(tmp_path):
    """A file of 24 tensors that can be measured and three that cannot."""
    save_file({**TENSORS, **ODD}, tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


def expected(name):
    """name -> SQNR of each tensor under a scaling, None where it does not apply."""
    tensors = {**TENSORS, "bias": ODD["bias"]}
    return {tensor: measure(x, SCALINGS[name]).sqnr_db for tensor, x in tensors.items()}


def lines_of(out):
    """(tensor, SQNRs) of the lines in a text."""
    rows = re.findall(r"^(layers\.\d+\.w|bias) +float32 +(\S+) +\S+ +(\S+) +(\S+)$", out, re.MULTILINE)
    return [(name, sqnrs) for name, _, *sqnrs in rows]


def shown(value):
    return "-" if value is None else f"{value:.1f}"


# --- lines ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", [[], ["--summary"], ["--worst", 5]], ids=["default", "summary", "worst"])
def test_many_tensors_get_a_line_each_the_worst_first(run, many, option):
    code, out, err = run("inspect", many, *SCALED, *option)
    assert (code, err) == (0, "")
    mxfp8, nvfp4 = expected("mxfp8"), expected("nvfp4-1x16")
    order = sorted(mxfp8, key=lambda name: min(v for v in (mxfp8[name], nvfp4[name]) if v is not None))
    order = order[: 5 if "--worst" in option else None]
    assert lines_of(out) == [(name, [shown(mxfp8[name]), shown(nvfp4[name])]) for name in order]
    assert ("19 tensors with a higher SQNR are not shown" in out) == ("--worst" in option)
    assert out.startswith("27 tensors\n  24 float32\n  3 not measured\n")
    for scaling, values in (("mxfp8", mxfp8), ("nvfp4-1x16", nvfp4)):
        given = sorted((value, name) for name, value in values.items() if value is not None)
        low, middle, high = (given[i][0] for i in (0, (len(given) - 1) // 2, -1))
        assert re.search(rf"^{scaling} +{low:.1f} +{middle:.1f} +{high:.1f}  {given[0][1]}$", out, re.MULTILINE)


def test_a_line_says_what_is_not_measured(run, many):
    _, out, _ = run("inspect", many, "--scaling", "mxfp8")
    assert "skipped counts: int64 3; refops quantizes" in out
    assert "skipped step: int64 scalar; refops quantizes" in out
    assert "skipped none: no elements (float32 of shape (0, 4))" in out
    assert "needs M % 16 == 0" in run("inspect", many, *SCALED)[1]


def test_what_is_skipped_for_one_reason_is_one_line(run, tmp_path):
    save_file({"w": TENSORS["layers.0.w"], **{f"s{i}": np.array(F(i)) for i in range(5)}}, tmp_path / "x.safetensors")
    _, out, _ = run("inspect", tmp_path / "x.safetensors", "--scaling", "mxfp8")
    assert "skipped s0, s1 and 3 more: float32 scalar; quantization needs at least one dimension\n" in out


def test_many_scalings_leave_the_lowest_median_and_highest(run, many):
    _, out, _ = run("inspect", many, "--worst", 1, "--tensor", "layers.*", "--scaling", "mxfp8*", "--scaling", "block*")
    found = re.search(r"^(layers\.\S+) +float32 +16x64 +\S+ +(\S+) +(\S+) +(\S+) +(\S+) +(\S+)$", out, re.MULTILINE)
    names = [name for name in SCALINGS if name.startswith(("mxfp8", "block"))]
    of_one = sorted((measure(TENSORS[found[1]], SCALINGS[name]).sqnr_db, name) for name in names)
    assert found[2] == shown(of_one[0][0]) and found[5] == shown(of_one[-1][0])
    assert found[4] == shown(of_one[(len(of_one) - 1) // 2][0])
    by_name = {name: shown(value) for value, name in of_one}
    assert by_name[found[3]] == found[2] and by_name[found[6]] == found[5]


def test_tables_of_many_tensors_are_there_for_the_asking(run, many):
    _, out, _ = run("inspect", many, "--tables", "--scaling", "mxfp8")
    assert out.count("SQNR dB  flushed %") == 24 and lines_of(out) == []


def test_worst_of_few_tensors_and_in_json(run, run_json, many):
    code, out, _ = run("inspect", many, "--tensor", "layers.?.w", "--worst", 2, *SCALED)
    assert code == 0 and len(lines_of(out)) == 2
    names = [tensor["tensor"] for tensor in run_json("inspect", many, "--worst", 3, "--scaling", "mxfp8")["tensors"]]
    values = expected("mxfp8")
    assert names == sorted(values, key=values.get)[:3]


def test_infinite_and_missing_sqnrs_have_a_place(run, tmp_path):
    """-inf is the worst, exact the best, and what no scaling takes comes last."""
    x = TENSORS["layers.0.w"].copy()
    x[0, 0] = np.inf
    tensors = {"c": np.ones((16, 16), F), "d": np.ones((3, 5), F), "b": TENSORS["layers.1.w"], "a": x}
    save_file(tensors, tmp_path / "x.safetensors")
    _, out, _ = run("inspect", tmp_path / "x.safetensors", "--worst", 9, "--scaling", "nvfp4-1x16")
    rows = re.findall(r"^([abcd]) +float32 +\S+ +\S+ +(\S+)$", out, re.MULTILINE)
    assert [name for name, _ in rows] == ["a", "b", "c", "d"]
    assert (rows[0][1], rows[2][1], rows[3][1]) == ("-inf", "exact", "-")


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (["--worst", "0"], "must be an integer >= 1; got '0'"),
        (["--worst", "3", "--tables"], "not allowed with"),
        (["--json", "--tables"], "give either --json or --tables; got both"),
        (["--csv", "missing/a.csv"], "--csv must name a file in an existing directory; got 'missing/a.csv'"),
        (["--html", "missing/a.html"], "--html must name a file in an existing directory; got 'missing/a.html'"),
    ],
)
def test_bad_options_are_refused_before_the_work(run, many, monkeypatch, options, rule):
    monkeypatch.setattr(survey, "measure", None)
    code, out, err = run("inspect", many, *options)
    assert (code, out, err.count("\n")) == (2, "", 1) and rule in err


def test_files_that_cannot_be_written_are_named(run, many, tmp_path):
    (tmp_path / "folder").mkdir()
    code, _, err = run("inspect", many, "--scaling", "mxfp8", "--csv", tmp_path / "folder")
    assert code == 2 and re.search(r"--csv must name a file that can be written; got '.*folder'", err)


# --- files ------------------------------------------------------------------------------------------------------------


def test_csv_has_a_row_for_each_tensor_and_scaling(run, many, tmp_path):
    code, out, _ = run("inspect", many, "--worst", 1, *SCALED, "--csv", tmp_path / "a.csv")
    assert code == 0 and out.endswith(f"written to {tmp_path / 'a.csv'}\n")
    with open(tmp_path / "a.csv", newline="") as handle:
        rows = list(csv.DictReader(handle))
    assert len(rows) == 24 * 2 + 3
    by_key = {(row["tensor"], row["scaling"]): row for row in rows}
    for name in ("mxfp8", "nvfp4-1x16"):
        for tensor, x in TENSORS.items():
            row, m = by_key[tensor, name], measure(x, SCALINGS[name])
            assert (row["dtype"], row["shape"], row["elements"]) == ("float32", "16x64", "1024")
            assert float(row["amax"]) == np.abs(x).max()
            for field in ("sqnr_db", "flushed", "saturated", "worst_relative_error", "bits_per_element"):
                assert float(row[field]) == getattr(m, field)
    assert by_key["bias", "nvfp4-1x16"]["sqnr_db"] == "" and "M % 16" in by_key["bias", "nvfp4-1x16"]["reason"]
    assert by_key["step", ""]["reason"].startswith("int64 scalar")
    assert min(float(row["sqnr_db"]) for row in rows if row["sqnr_db"]) in (
        float(rows[0]["sqnr_db"]),
        float(rows[1]["sqnr_db"]),
    )


class Page(html.parser.HTMLParser):
    """Tags, their attributes, the words of cells, and whether every tag is closed in order."""

    def __init__(self):
        super().__init__()
        self.tags, self.links, self.images, self.rows, self.open = set(), [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        attributes = dict(attributes)
        self.links += [value for key, value in attributes.items() if key in ("src", "href")]
        if tag == "img":
            self.images.append(attributes)
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in ("img", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def test_html_is_one_file_with_plots_and_all_numbers(run, tmp_path):
    pytest.importorskip("matplotlib")
    name = "<b>bold</b>&amp;"
    save_file({**TENSORS, **ODD, name: np.ones((16, 16), F)}, tmp_path / "x.safetensors")
    code, _, err = run("inspect", tmp_path / "x.safetensors", *SCALED, "--html", tmp_path / "a.html")
    assert (code, err) == (0, "")
    text = (tmp_path / "a.html").read_text()
    page = Page()
    page.feed(text)
    assert page.open == [] and not page.tags & {"script", "link", "iframe", "b"}
    assert len(page.images) == 2 and all(link.startswith("data:image/svg+xml;base64,") for link in page.links)
    assert len({image["alt"] for image in page.images}) == 2
    pictures = [ElementTree.fromstring(base64.b64decode(link.split(",")[1])) for link in page.links]
    words = [" ".join(picture.itertext()) for picture in pictures]
    assert all("mxfp8" in one and "SQNR" in one for one in words) and "layers.22.w" in words[1]
    rows = {row[0]: row for row in page.rows}
    for tensor in [*TENSORS, "bias", name]:
        x = {**TENSORS, **ODD, name: np.ones((16, 16), F)}[tensor]
        sqnrs = [measure(x, SCALINGS[scaling]).sqnr_db for scaling in ("mxfp8", "nvfp4-1x16")]
        assert rows[tensor][-2:] == ["exact" if v == math.inf else shown(v) for v in sqnrs]
    assert rows["step"][1].startswith("int64 scalar")
    again = tmp_path / "b.html"
    run("inspect", tmp_path / "x.safetensors", *SCALED, "--html", again)
    assert again.read_text() == text


def test_html_needs_matplotlib(run, many, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    code, out, err = run("inspect", many, "--html", tmp_path / "a.html")
    assert (code, out) == (2, "") and "--html needs matplotlib" in err and not (tmp_path / "a.html").exists()


# --- what is read -----------------------------------------------------------------------------------------------------


def test_a_quantized_checkpoint_is_measured_dequantized(run_json, tmp_path):
    codes, scales = RNG.standard_normal((32, 64)).astype(ml_dtypes.float8_e4m3fn), np.full((1, 1), 0.25, F)
    save_file({"w.weight": codes, "w.weight_scale_inv": scales}, tmp_path / "x.safetensors")
    (tensor,) = run_json("inspect", tmp_path / "x.safetensors", "--scaling", "nvfp4-1x16")["tensors"]
    assert (tensor["tensor"], tensor["dtype"]) == ("w.weight", "float32")
    assert tensor["note"] == "F8_E4M3 codes, one F32 scale per tensor"
    m = measure(codes.astype(F) * F(0.25), SCALINGS["nvfp4-1x16"])
    assert tensor["scalings"] == [m.as_dict()]
    walk = run_json("explain", tmp_path / "x.safetensors", "--scaling", "mxfp8")
    assert walk["elements"][0]["original"] == float(codes[0, 0]) / 4


def test_a_folder_of_shards_is_measured(run_json, tmp_path):
    for number in (1, 2):
        save_file({f"w{number}": TENSORS["layers.0.w"]}, tmp_path / f"m-0000{number}-of-00002.safetensors")
    document = run_json("inspect", tmp_path, "--scaling", "mxfp8")
    assert [tensor["tensor"] for tensor in document["tensors"]] == ["w1", "w2"]


@pytest.mark.parametrize(("layers", "wraps"), [(1, False), (2, True)])
def test_a_name_has_the_room_that_is_there(run, tmp_path, layers, wraps):
    """120 columns hold a name of 50 beside two SQNRs, not one of 100."""
    name = "model.layers.17.mlp.experts.gate_up_proj.weight.12" * layers
    save_file({**TENSORS, name: TENSORS["layers.0.w"]}, tmp_path / "x.safetensors")
    _, out, _ = run("inspect", tmp_path / "x.safetensors", *SCALED)
    lines = [line for line in out.splitlines() if line.startswith("model.layers") and "float32" in line]
    assert len(lines) == 1 and all(len(line) <= 120 for line in out.splitlines())
    assert (name not in lines[0]) is wraps


def test_a_tensor_in_two_files_of_a_folder_is_refused(run, tmp_path):
    for name in ("one", "two"):
        save_file({"w": TENSORS["layers.0.w"], name: np.ones(4, F)}, tmp_path / f"{name}.safetensors")
    code, _, err = run("inspect", tmp_path, "--scaling", "mxfp8")
    assert code == 2 and "two files hold 'w', 'one.safetensors' and 'two.safetensors': give one of them" in err


def test_codes_of_an_unknown_layout_are_skipped_with_their_scales(run, tmp_path):
    parts = {
        "w_global_scale": np.ones(1, F),
        "w_packed": np.zeros((32, 32), np.uint8),
        "w_scale": np.zeros((32, 3), ml_dtypes.float8_e4m3fn),
    }
    save_file({**parts, "plain": TENSORS["layers.0.w"]}, tmp_path / "x.safetensors")
    code, out, _ = run("inspect", tmp_path / "x.safetensors", "--scaling", "mxfp8")
    assert code == 0 and "looked for" not in out
    [line] = [line for line in out.splitlines() if line.startswith("skipped")]
    assert line.startswith("skipped w_global_scale, w_packed and 1 more: U8 32x32 codes with w_scale F8_E4M3 32x3,")


def test_memory_is_that_of_one_tensor(tmp_path, run):
    """Twenty tensors of 512 KiB; beyond the file's own memory there are codes and tiles of one at a time."""
    save_file({f"w{i}": np.full((256, 512), i + 1, F) for i in range(20)}, tmp_path / "x.safetensors")
    run("inspect", tmp_path / "x.safetensors", "--scaling", "mxfp8", "--worst", 1)
    tracemalloc.start()
    try:
        code, _, _ = run("inspect", tmp_path / "x.safetensors", "--scaling", "mxfp8", "--worst", 1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert code == cli.EXIT_FINE and peak < 9 << 20
