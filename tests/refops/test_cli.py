"""The `refops` command as a user meets it: what it prints, exit codes, one-line errors, JSON; and a report can fail."""

import contextlib
import functools
import io
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
import warnings
import zipfile
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from itertools import product
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import refops
from refops import cli, conformance, files, report, survey
from refops.display.console import PIPE_WIDTH
from refops.display.plot import MOST_TENSORS_DRAWN
from refops.quantization import hadamard, quantize
from refops.replacing import replacing
from refops.scalings import arithmetic
from refops.selfcheck import Tally
from refops.survey import SCALINGS
from tiers import sampled

F = np.float32
ROOT = Path(refops.__file__).parent.parent
REAL = ROOT / "tests" / "data" / "minilm_ffn.safetensors"
MATRIX = np.random.default_rng(0).standard_normal((32, 64)).astype(F)


@pytest.fixture(scope="module")
def printed():
    """Call printed(*arguments) -> (exit code, stdout, stderr) of a command, which runs once for all that ask for it."""

    @functools.cache
    def call(*arguments):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main(list(map(str, arguments)))
        return code, out.getvalue(), err.getvalue()

    return call


#: A command that measures every tensor under every scaling.
SURVEY = ("report", "--section", "survey", "--data", REAL)


def shell(*arguments, **environment):
    """`python -m refops` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "refops", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        timeout=120,
    )


# --- bad use: exit code 2, one line, no traceback --------------------------------------------------------------------


@pytest.fixture
def bad_files(tmp_path):
    """A folder with one file of each kind of damage."""
    np.save(tmp_path / "good.npy", MATRIX)
    whole = (tmp_path / "good.npy").read_bytes()
    (tmp_path / "cut.npy").write_bytes(whole[:1000])
    (tmp_path / "empty.npy").write_bytes(b"")
    (tmp_path / "noise.npy").write_bytes(b"\x93NUMPY noise and more noise")
    (tmp_path / "pickle.npy").write_bytes(pickle.dumps({"a": 1}))
    np.save(tmp_path / "object.npy", np.array([{}], object))
    np.savez(tmp_path / "good.npz", a=MATRIX)
    archive = bytearray((tmp_path / "good.npz").read_bytes())
    (tmp_path / "cut.npz").write_bytes(archive[:1000])
    archive[1000] ^= 0xFF
    (tmp_path / "bits.npz").write_bytes(archive)
    np.savez(tmp_path / "object.npz", a=np.array([None]))
    save_file({"a": MATRIX}, tmp_path / "good.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "good.safetensors").read_bytes()[:1000])
    (tmp_path / "empty.safetensors").write_bytes(b"")
    (tmp_path / "noise.safetensors").write_bytes(b"x" * 100)
    for suffix in files.SUFFIXES:
        (tmp_path / f"words{suffix}").write_text("version https://git-lfs.github.com/spec/v1")
    (tmp_path / "words.txt").write_text("words")
    (tmp_path / "folder.npy").mkdir()
    return tmp_path


def test_an_unknown_option_leads_to_the_help_of_its_command(run):
    code, out, err = run("check", "--op", "quantize", "--columnwise_scale", "c.bin")
    said = "unrecognized arguments: --columnwise_scale c.bin (see refops check --help)"
    assert (code, out, err) == (2, "", f"refops: error: {said}\n")


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("missing.npy", "must be an existing file"),
        ("folder.npy", "must be a file"),
        ("words.txt", "must end in one of .safetensors, .npy, .npz, .pt"),
        ("cut.npy", "must be a readable .npy file"),
        ("empty.npy", "must be a readable .npy file; got {}: it is empty"),
        *((f"words{suffix}", f"got {{}}: it is not a {suffix} file") for suffix in files.SUFFIXES),
        ("noise.npy", "must be a readable .npy file"),
        ("pickle.npy", "pickled Python objects, and those are never loaded"),
        ("object.npy", "pickled Python objects, and those are never loaded"),
        ("cut.npz", "must be a readable .npz file"),
        ("bits.npz", "must be a readable .npz file"),
        ("object.npz", "pickled Python objects, and those are never loaded"),
        ("cut.safetensors", "must be a readable .safetensors file"),
        ("empty.safetensors", "must be a readable .safetensors file; got {}: it is empty"),
        ("noise.safetensors", "must be a readable .safetensors file"),
    ],
)
@pytest.mark.parametrize("command", ["inspect", "explain"])
def test_unreadable_file(run, bad_files, command, name, rule):
    options = ["--scaling", "mxfp8"]
    code, out, err = run(command, bad_files / name, *options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    path = bad_files / name
    assert err.startswith("refops: error: FILE ") and str(path) in err and rule.format(repr(str(path))) in err


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["COMMAND", "required"]),
        (["dance"], ["COMMAND", "'dance'", "report"]),
        (["inspect"], ["FILE", "required"]),
        (["inspect", REAL, "--tensor", "no.*"], ["--tensor", "'no.*'", "layer0.ffn.input"]),
        (["inspect", REAL, "--scaling", "fp7"], ["--scaling", "'fp7'", ", ".join(SCALINGS)]),
        (["inspect", REAL, "--json", "--summary"], ["--json", "--summary", "both"]),
        (["inspect", REAL, "--dtype", "float16"], ["--dtype", "'float16'", "bfloat16"]),
        (["inspect", REAL, "--frobnicate"], ["--frobnicate"]),
        (["inspect", REAL, "--tens", "x"], ["--tens"]),
        (["inspect", REAL, "--set", "two_d=true"], ["--set", "names one scaling", f"with {len(SCALINGS)}"]),
        (["inspect", REAL, "--scaling", "mxfp8*", "--set", "two_d=true"], ["--set", "names one scaling", "with 3"]),
        (["inspect", REAL, "--scaling", "mxfp8", "--set", "two=true"], ["--set", "MXFP8Scaling: fmt, two_d", "'two="]),
        (["explain", "--values", "1"], ["--scaling", "required"]),
        (
            ["explain", "--scaling", "mxfp8", "--values", "1", "--set", "scale_rounding=down"],
            ["--set scale_rounding must be one of 'up', 'floor'", "'down'"],
        ),
        (["explain", "--scaling", "fp7", "--values", "1"], ["--scaling", "'fp7'", "mxfp8"]),
        (["explain", "--scaling", "mxfp8"], ["FILE", "--values", "neither"]),
        (["explain", REAL, "--scaling", "mxfp8", "--values", "1"], ["FILE", "--values", "both"]),
        (["explain", "", "--scaling", "mxfp8", "--values", "1"], ["FILE", "--values", "both"]),
        (["explain", "--scaling", "mxfp8", "--values", "1,x"], ["--values", "'x'", "numbers"]),
        (["explain", "--scaling", "mxfp8", "--values", ","], ["--values", "','", "at least one"]),
        (["explain", "--scaling", "mxfp8", "--values", "1", "--row", "-1"], ["--row", "'-1'", ">= 0"]),
        (["explain", "--scaling", "mxfp8", "--values", "1", "--block", "x"], ["--block", "'x'", ">= 0"]),
        (["explain", "--scaling", "mxfp8", "--values", "1", "--row", "1"], ["--row", "got 1", "0..0"]),
        (["explain", "--scaling", "mxfp8", "--values", "1", "--block", "1"], ["--block", "got 1", "0..0"]),
        (["explain", "--scaling", "mxfp8", "--values", "1", "--dtype", "int8"], ["--dtype", "'int8'", "float32"]),
        (["explain", "--scaling", "mxfp8", "--values", "1", "--tensor", "a"], ["--tensor", "'a'", "FILE"]),
        (["explain", REAL, "--scaling", "mxfp8"], ["--tensor", "none", "layer0.ffn.input"]),
        (["explain", REAL, "--scaling", "mxfp8", "--tensor", ""], ["--tensor", "''", "layer0.ffn.input"]),
        (["explain", REAL, "--scaling", "mxfp8", "--dtype", "float16"], ["--dtype", "'float16'", "FILE", "bfloat16"]),
        (["explain", REAL, "--scaling", "mxfp8", "--tensor", "a"], ["--tensor", "'a'", "layer0.ffn.input"]),
        (
            ["explain", REAL, "--scaling", "nvfp4-1x16", "--tensor", "layer3.ffn.up.bias"],
            ["--scaling", "nvfp4-1x16", "M % 16 == 0", "(1536,)"],
        ),
        (["formats", "e9m9"], ["FORMAT", "'e9m9'", "e4m3"]),
        (["report", "--section", "x"], ["--section", "'x'", "vectors"]),
    ],
    ids=lambda value: " ".join(map(str, value))[-60:] if isinstance(value, list) else None,
)
def test_bad_use(run, arguments, parts):
    code, out, err = run(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("refops: error: ")
    assert all(part in err for part in parts), err


@pytest.mark.parametrize("command", ["inspect", "explain"])
@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("nvfp4", "did you mean nvfp4-1x16 (the default), nvfp4-16x16, nvfp4-rht and 5 more?"),
        ("e8m0", "did you mean e8m0-128x128 (the default), e8m0-1x128, e8m0-1x64?"),
        ("block", "did you mean block-1x128, block-128x128, block-1x64?"),  # of two classes, each with its default
        ("Stochastic", "did you mean nvfp4-stochastic?"),
        ("delayed", "did you mean delayed-scale-1?"),
        ("mxpf8", "did you mean mxfp8, mxfp4?"),
    ],
)
def test_unknown_scaling_is_answered_with_similar_names(run, command, name, hint):
    code, out, err = run(command, REAL, "--tensor", "layer0.ffn.input", "--scaling", name)
    assert (code, out) == (2, "") and "--scaling" in err
    assert err.endswith(f"got {name.lower()!r}: {hint}\n")


def test_errors_list_few_tensors(run, tmp_path):
    np.savez(tmp_path / "many.npz", **{f"layer.{i}": np.ones(4, F) for i in range(30)})
    ten = ", ".join(f"layer.{i}" for i in range(10))
    explain = ["explain", tmp_path / "many.npz", "--scaling", "mxfp8"]
    assert run(*explain)[2].endswith(f"--tensor must be one of {ten} and 20 more; got none\n")
    assert run(*explain, "--tensor", "zzz")[2].endswith(f"--tensor must match one of {ten} and 20 more; got 'zzz'\n")
    assert run(*explain, "--tensor", "lay*")[2].endswith(f"got 'lay*', which matches {ten} and 20 more\n")
    assert "did you mean layer.0, layer.1, layer.2 and 27 more?" in run(*explain, "--tensor", "layer")[2]


@pytest.mark.parametrize(
    ("option", "name", "rule"),
    [
        ("--vectors", "missing", "must be a directory of golden vectors"),
        ("--vectors", "folder.npy", "must be a directory of golden vectors"),
        ("--vectors", "good.npz", "must be a directory of golden vectors"),
        ("--data", "missing.npy", "must be an existing file"),
        ("--data", "folder.npy", "must be a file"),
        ("--data", "words.txt", "must end in one of"),
        ("--data", "cut.safetensors", "must be a readable .safetensors file"),
        ("--data", "bits.npz", "must be a readable .npz file"),
        ("--data", "integers.npy", "must hold at least one tensor that refops quantizes"),
    ],
)
def test_report_on_named_paths_that_cannot_be_read(run, bad_files, option, name, rule):
    np.save(bad_files / "integers.npy", np.arange(4))
    code, out, err = run("report", option, bad_files / name)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"refops: error: {option} {rule}") and name in err and "FILE" not in err


def test_torch_missing(run, tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("a/data.pkl", b"")
    monkeypatch.setitem(sys.modules, "torch", None)
    code, out, err = run("inspect", tmp_path / "a.pt")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("refops: error: FILE ") and "install torch" in err and "a.pt" in err


def test_matplotlib_missing(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    code, out, err = run("inspect", REAL, "--plot", tmp_path / "a.png")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "--plot" in err and err.endswith("pip install matplotlib\n")


@pytest.mark.parametrize(
    ("target", "rule"),
    [("a.xyz", "must end in one of"), ("a", "must end in one of"), ("no/a.png", "existing directory")],
)
def test_plot_that_cannot_be_written(run, tmp_path, target, rule):
    pytest.importorskip("matplotlib")
    code, out, err = run("inspect", REAL, "--plot", tmp_path / target)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "--plot" in err and target in err and rule in err


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), RuntimeError("'xelatex' not found")])
def test_plot_that_fails_at_the_end(run, tmp_path, monkeypatch, error):
    pytest.importorskip("matplotlib")

    def savefig(*arguments, **options):
        raise error

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", savefig)
    options = ["--tensor", "*bias", "--scaling", "mxfp8", "--plot", tmp_path / "a.png"]
    code, out, err = run("inspect", REAL, *options)
    assert (code, err.count("\n")) == (2, 1) and "drawn in" not in out
    assert "--plot" in err and "a.png" in err and ("Permission denied" in err or "xelatex" in err)


def test_plot_on_a_full_disk_keeps_the_old_one(tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("resource")  # ulimit
    (tmp_path / "a.png").write_bytes(b"the old one")
    limited = ["sh", "-c", 'ulimit -f 8; exec "$@"', "sh"]
    words = [*limited, sys.executable, "-m", "refops", "inspect", REAL, "--tensor", "*bias", "--scaling", "mxfp8"]
    done = subprocess.run(
        [*map(str, words), "--plot", str(tmp_path / "a.png")],
        capture_output=True,
        text=True,
        # No bytecode: written under the limit it would be cut short, and nobody would notice.
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        timeout=120,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "--plot" in done.stderr
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("a.png", b"the old one")]


def test_ctrl_c_while_the_plot_is_written_keeps_the_old_one(run, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")

    def savefig(self, path, **options):
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    (tmp_path / "a.png").write_bytes(b"the old one")
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", savefig)
    code, _, _ = run("inspect", REAL, "--tensor", "*bias", "--scaling", "mxfp8", "--plot", tmp_path / "a.png")
    assert code == 130
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("a.png", b"the old one")]


def test_a_replaced_file_keeps_its_mode_and_its_link(tmp_path):
    path, link = tmp_path / "a.txt", tmp_path / "link.txt"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    with replacing(link) as new:
        new.write_text("new")
        (new.parent / "a-img0.png").write_text("an image of it")
    assert link.is_symlink() and path.read_text() == "new" and path.stat().st_mode & 0o777 == 0o640
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a-img0.png", "a.txt", "link.txt"]


def test_plot_of_too_many_tensors_is_refused_before_the_work(run, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(survey, "measure", None)
    np.savez(tmp_path / "many.npz", **{f"t{i}": np.ones(4, F) for i in range(MOST_TENSORS_DRAWN + 1)})
    code, out, err = run("inspect", tmp_path / "many.npz", "--scaling", "mxfp8", "--plot", tmp_path / "a.png")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "--plot" in err and str(MOST_TENSORS_DRAWN + 1) in err


# --- inspect ---------------------------------------------------------------------------------------------------------


def test_inspect_shows_every_scaling_of_every_tensor(run):
    code, out, err = run("inspect", REAL)
    assert (code, err) == (0, "")
    assert out.count("SQNR dB") == 10
    assert all(out.count(f"\n{n} ") == (8 if "fp4" in n else 10) for n in SCALINGS)  # biases have one row
    assert "needs M % 16 == 0 and K % 16 == 0 for NVFP4: nvfp4-1x16, nvfp4-16x16" in out
    assert max(map(len, out.splitlines())) <= PIPE_WIDTH


def test_inspect_json_agrees_with_the_survey(run_json):
    document = run_json("inspect", REAL, "--tensor", "layer3.ffn.up*", "--scaling", "mxfp8*", "--scaling", "nvfp4-rht")
    assert [t["tensor"] for t in document["tensors"]] == ["layer3.ffn.up.bias", "layer3.ffn.up.weight"]
    bias, weight = document["tensors"]
    assert (weight["shape"], weight["dtype"], weight["elements"]) == ([1536, 384], "bfloat16", 1536 * 384)
    assert [s["scaling"] for s in weight["scalings"]] == ["mxfp8", "mxfp8-e5m2", "mxfp8-floor", "nvfp4-rht"]
    assert 31 < weight["scalings"][0]["sqnr_db"] < 32
    assert bias["scalings"][3]["sqnr_db"] is None and "M % 16" in bias["scalings"][3]["reason"]


def test_inspect_takes_a_convolution_as_the_matrix_of_its_product(run, run_json, tmp_path):
    """Along the last dimension blocks would hold the 3 elements of a kernel's row: 10.667 bits for each of them."""
    weight = np.random.default_rng(0).standard_normal((32, 16, 3, 3), dtype=np.float32)
    np.savez(tmp_path / "x.npz", conv=weight, matrix=weight.reshape(32, 144), experts=weight.reshape(3, 48, 32))
    document = run_json("inspect", tmp_path / "x.npz", "--scaling", "mxfp8", "--scaling", "nvfp4-1x16")
    conv, experts, matrix = document["tensors"]
    assert conv["note"] == "a convolution, as the matrix (first dimension, all others) of its product"
    assert (conv["shape"], conv["scalings"]) == ([32, 144], matrix["scalings"])
    assert conv["scalings"][0]["bits_per_element"] == 8 + 8 * 5 / 144
    assert (experts["shape"], experts["note"], matrix["note"]) == ([3, 48, 32], "", "")
    assert "32x144" in run("inspect", tmp_path / "x.npz", "--scaling", "mxfp8")[1]


def test_inspect_of_changed_settings_is_that_of_the_row_that_has_them(run_json):
    arguments = ["inspect", REAL, "--tensor", "layer3.ffn.up.weight", "--scaling"]
    (changed,) = run_json(*arguments, "mxfp8", "--set", "scale_rounding=floor")["tensors"][0]["scalings"]
    (named,) = run_json(*arguments, "mxfp8-floor")["tensors"][0]["scalings"]
    assert changed == {**named, "scaling": "mxfp8 scale_rounding=floor"}


@pytest.mark.parametrize("suffix", ["npy", "npz", "safetensors"])
@pytest.mark.parametrize("dtype", [F, np.float16, np.float64, ">f4"], ids=str)
def test_inspect_reads_each_format(run_json, tmp_path, suffix, dtype):
    x = MATRIX.astype(dtype)
    path = tmp_path / f"x.{suffix}"
    if suffix == "npy":
        np.save(path, x)
    elif suffix == "npz":
        np.savez(path, x=x)
    else:
        save_file({"x": np.ascontiguousarray(x.astype(x.dtype.newbyteorder("=")))}, path)
    (tensor,) = run_json("inspect", path, "--scaling", "mxfp8")["tensors"]
    assert tensor["tensor"] == "x" and tensor["shape"] == [32, 64]
    assert tensor["dtype"] == ("float16" if dtype == np.float16 else "float32")
    assert ("float64 rounded to float32" in tensor["note"]) == (dtype == np.float64)


def test_bfloat16_in_npy_needs_to_be_named(run, run_json, tmp_path):
    np.save(tmp_path / "x.npy", MATRIX.astype(ml_dtypes.bfloat16))
    code, out, _ = run("inspect", tmp_path / "x.npy")
    assert code == 2 and "skipped x: raw 2-byte elements" in out and "--dtype bfloat16" in out
    (tensor,) = run_json("inspect", tmp_path / "x.npy", "--dtype", "bfloat16", "--scaling", "mxfp8")["tensors"]
    save_file({"x": MATRIX.astype(ml_dtypes.bfloat16)}, tmp_path / "x.safetensors")
    (named,) = run_json("inspect", tmp_path / "x.safetensors", "--scaling", "mxfp8")["tensors"]
    assert (tensor["dtype"], tensor["scalings"]) == ("bfloat16", named["scalings"])


def test_what_cannot_be_quantized_is_skipped_with_its_reason(run, run_json, tmp_path):
    tensors = {
        "int": np.arange(4),
        "fp8": MATRIX.astype(ml_dtypes.float8_e4m3fn),
        "scalar": np.zeros((), F),
        "empty": np.zeros((0, 4), F),
        "good": MATRIX,
    }
    save_file(tensors, tmp_path / "x.safetensors")
    document = run_json("inspect", tmp_path / "x.safetensors", "--scaling", "mxfp8")
    assert [t["tensor"] for t in document["tensors"]] == ["good"]
    reasons = {s["tensor"]: s["reason"] for s in document["skipped"]}
    assert "int64" in reasons["int"] and "F8_E4M3" in reasons["fp8"]
    assert "scalar" in reasons["scalar"] and "no elements" in reasons["empty"]
    code, out, _ = run("inspect", tmp_path / "x.safetensors", "--scaling", "mxfp8")
    assert code == 0 and all(f"skipped {name}: " in out for name in reasons)


@pytest.mark.parametrize("name", ["x.npy", "x.safetensors"])
@pytest.mark.parametrize("dtype", [F, np.float64], ids=["float32", "float64"])
def test_dtype_that_changes_nothing_is_noted(run, run_json, tmp_path, name, dtype):
    if name == "x.npy":
        np.save(tmp_path / name, MATRIX.astype(dtype))
    else:
        save_file({"x": MATRIX.astype(dtype)}, tmp_path / name)
    path, options = tmp_path / name, ["--scaling", "mxfp8", "--dtype", "bfloat16"]
    note = f"--dtype bfloat16 unused: {np.dtype(dtype)} is not raw 2-byte"
    (tensor,) = run_json("inspect", path, *options)["tensors"]
    assert tensor["note"].endswith(note) and ("rounded" in tensor["note"]) == (dtype == np.float64)
    for arguments in (["inspect", path], ["inspect", path, "--summary"], ["explain", path]):
        assert note in " ".join(run(*arguments, *options)[1].split())
    save_file({"x": MATRIX.astype(ml_dtypes.bfloat16)}, tmp_path / "b.safetensors")
    assert run_json("inspect", tmp_path / "b.safetensors", *options)["tensors"][0]["note"] == ""


@pytest.mark.parametrize("summary", [[], ["--summary"]], ids=["tables", "summary"])
def test_nothing_measured_is_bad_use(run, run_json, tmp_path, summary):
    np.savez(tmp_path / "none.npz")
    code, out, err = run("inspect", tmp_path / "none.npz", *summary)
    assert (code, out, err) == (2, "", "refops: error: nothing was measured: the file holds no tensors\n")
    np.savez(tmp_path / "skipped.npz", a=np.arange(4), b=np.zeros((0, 4), F))
    code, out, err = run("inspect", tmp_path / "skipped.npz", *summary)
    assert (code, err) == (2, "refops: error: nothing was measured\n")
    assert "skipped a: int64" in out and "skipped b: no elements" in out and "10 log10" not in out
    np.save(tmp_path / "small.npy", np.ones((3, 5), F))
    arguments = ["inspect", tmp_path / "small.npy", "--scaling", "nvfp4*", *summary, "--plot", tmp_path / "a.png"]
    code, out, err = run(*arguments)
    assert (code, err) == (2, "refops: error: nothing was measured\n")
    assert "needs M % 16 == 0 and K % 16 == 0 for NVFP4: nvfp4-1x16" in out and not (tmp_path / "a.png").exists()
    code, out, err = run("inspect", tmp_path / "skipped.npz", "--json")
    assert (code, err) == (2, "refops: error: nothing was measured\n") and len(json.loads(out)["skipped"]) == 2


def test_tensors_come_in_natural_order(run_json, tmp_path):
    names = [f"layers.{i}.w" for i in (0, 2, 10, 11)] + ["norm"]
    save_file({name: MATRIX for name in names}, tmp_path / "x.safetensors")
    np.savez(tmp_path / "x.npz", **dict.fromkeys(reversed(names), MATRIX))
    for file in ("x.safetensors", "x.npz"):
        assert [t["tensor"] for t in run_json("inspect", tmp_path / file, "--scaling", "mxfp8")["tensors"]] == names


def test_tensors_are_printed_as_soon_as_they_are_measured(run, tmp_path, monkeypatch):
    np.savez(tmp_path / "x.npz", **{f"t{i}": MATRIX for i in range(12)})

    def interrupted(x, named, surveyor):
        measured.append(named)
        if len(measured) > 10:
            raise KeyboardInterrupt
        return measure(x, named, surveyor)

    measure = survey.measure
    monkeypatch.setattr(survey, "measure", interrupted)
    for option, shown in (("--tables", "t9\n"), ("--json", None)):
        measured = []
        code, out, _ = run("inspect", tmp_path / "x.npz", "--scaling", "MXFP8", option)
        assert code == cli.EXIT_INTERRUPTED
        assert shown in out if shown else out == ""


@pytest.mark.full
def test_summary_is_the_survey_of_the_report(printed):
    _, of_report, _ = printed(*SURVEY)
    code, out, err = printed("inspect", REAL, "--summary")
    assert (code, err) == (0, "")
    (table,) = re.findall(r"  a  .*?nvfp4-row-scaled [^\n]*\n", of_report, re.DOTALL)
    assert out.startswith(table) and "needs M % 16 == 0" in out


@pytest.mark.parametrize("option", [[], ["--summary"]], ids=["tables", "summary"])
def test_legend_explains_the_ends_of_sqnr(run, tmp_path, option):
    x = MATRIX.copy()
    x[0, 0] = np.inf
    np.savez(tmp_path / "x.npz", inf=x, large=np.full((16, 16), 8e35, F), fine=np.full((16, 16), 7e35, F))
    code, out, _ = run("inspect", tmp_path / "x.npz", "--scaling", "nvfp4-1x16", *option)
    assert code == 0 and len(re.findall(r"-inf\b", out)) == 3  # two tensors and the legend
    text = " ".join(out.split())
    assert (
        "-inf a finite element came back infinite or NaN" in text and "holds inf, or its amax is above 7.6e35" in text
    )
    assert "exact every finite element came back as it was" in text
    assert "under MXFP8, both dimensions of its weight must be multiples of 32" in text


def test_float64_that_overflows_is_counted(run_json, tmp_path):
    np.save(tmp_path / "x.npy", np.array([1e300, 1.0, np.inf]))
    (tensor,) = run_json("inspect", tmp_path / "x.npy")["tensors"]
    assert "1 overflowed to inf" in tensor["note"] and tensor["non_finite"] == 2


def test_infinities_become_null_in_json(run_json, tmp_path):
    np.save(tmp_path / "x.npy", np.array([[1.0, np.nan, np.inf]], F))
    (tensor,) = run_json("inspect", tmp_path / "x.npy", "--scaling", "delayed-scale-1")["tensors"]
    (delayed,) = tensor["scalings"]
    assert delayed["sqnr_db"] is None and delayed["exact"] is True


def test_control_characters_in_names_are_not_printed(run, tmp_path):
    name = "a\x1b[31m[bold]\nb"
    save_file({name: MATRIX}, tmp_path / "x.safetensors")
    code, out, _ = run("inspect", tmp_path / "x.safetensors", "--scaling", "mxfp8")
    assert code == 0 and "\x1b" not in out and "a\\x1b[31m[bold]\\nb" in out


def test_plot(run, tmp_path):
    pytest.importorskip("matplotlib")
    code, out, _ = run("inspect", REAL, "--tensor", "*bias", "--plot", tmp_path / "a.png")
    assert code == 0 and "drawn in" in out
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_pytorch_file(run_json, tmp_path):
    torch = pytest.importorskip("torch")
    t = torch.from_numpy(MATRIX)
    content = {"model": {"w": t.bfloat16(), "b": [t[0], t.t()]}, "step": 3, "d": t.double(), "s": t.to_sparse()}
    torch.save(content, tmp_path / "x.pt")
    document = run_json("inspect", tmp_path / "x.pt", "--scaling", "mxfp8")
    found = {t["tensor"]: (t["dtype"], t["shape"]) for t in document["tensors"]}
    assert found == {
        "model.w": ("bfloat16", [32, 64]),
        "model.b.0": ("float32", [64]),
        "model.b.1": ("float32", [64, 32]),
        "d": ("float32", [32, 64]),
    }
    assert [s["tensor"] for s in document["skipped"]] == ["s"]


def test_pytorch_file_with_code_is_refused(run, tmp_path):
    torch = pytest.importorskip("torch")

    class Code:
        def __reduce__(self):
            return (exec, ("raise SystemExit(77)",))

    torch.save({"x": Code()}, tmp_path / "x.pt")
    code, out, err = run("inspect", tmp_path / "x.pt")
    assert (code, out, err.count("\n")) == (2, "", 1)


@pytest.mark.filterwarnings("error")
def test_float64_with_a_signalling_nan_is_read(run_json, tmp_path):
    x = MATRIX.astype(np.float64)
    x.view(np.uint64)[0, 0] = 0x7FF0000000000001
    np.save(tmp_path / "x.npy", x)
    assert run_json("inspect", tmp_path / "x.npy", "--scaling", "mxfp8")["tensors"]


def test_legacy_pytorch_file_with_code_is_refused_in_our_words(run, tmp_path):
    torch = pytest.importorskip("torch")
    content = {"x": torch.ones(2), "code": Unknown()}
    torch.save(content, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    code, out, err = run("inspect", tmp_path / "x.pt")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "pickled Python objects, and those are never loaded" in err and "weights_only" not in err


def test_pytorch_file_of_a_whole_model_names_the_state_dict(run, tmp_path):
    torch = pytest.importorskip("torch")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "whole.pt")
    code, out, err = run("inspect", tmp_path / "whole.pt")
    assert (code, out) == (2, "")
    assert err.endswith("never loaded; if it is a model, save model.state_dict()\n")


class Unknown:
    """An object that no weights-only load makes."""


@pytest.mark.parametrize("shape", [(1 << 17, 1 << 17), (1 << 30, 1 << 30), (2, 1)])
def test_pytorch_tensor_of_more_elements_than_are_stored_is_refused(run, tmp_path, shape):
    """A file of a kilobyte would keep the command busy for ever."""
    torch = pytest.importorskip("torch")
    torch.save({"fine": torch.ones(32, 64), "w": torch.ones(1).expand(shape)}, tmp_path / "x.pt")
    code, out, err = run("inspect", tmp_path / "x.pt", "--scaling", "mxfp8", "--json")
    document = json.loads(out)
    assert (code, err, [t["tensor"] for t in document["tensors"]]) == (0, "", ["fine"])
    (skipped,) = document["skipped"]
    assert skipped["tensor"] == "w" and "of which the file stores 1; a tensor must be stored whole" in str(skipped)
    for words in (
        ["explain", "--scaling", "mxfp8", "--tensor", "w"],
        ["check", "--op", "gelu", "--output", "y=x.npy", "--input"],
    ):
        code, out, err = run(*words, tmp_path / "x.pt")
        assert (code, out, err.count("\n")) == (2, "", 1) and "'w'" in err and "stored whole" in err


def test_pytorch_file_that_names_one_large_tensor_often_is_refused(run, tmp_path):
    torch = pytest.importorskip("torch")
    torch.save([torch.ones(1 << 14)] * 20000, tmp_path / "x.pt")
    code, out, err = run("inspect", tmp_path / "x.pt", "--scaling", "mxfp8")
    assert (code, out, err.count("\n")) == (2, "", 1) and f"more than {files.MOST_SHARING} times" in err
    tied = torch.ones(32, 64)
    torch.save({"embedding": tied, "head": tied}, tmp_path / "tied.pt")
    assert run("inspect", tmp_path / "tied.pt", "--scaling", "mxfp8")[0] == 0


def test_nested_pytorch_tensor_is_skipped_without_a_warning(tmp_path):
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested_tensor = torch.nested.nested_tensor([torch.ones(3), torch.ones(4)])
    torch.save({"fine": torch.ones(32, 64), "x": nested_tensor}, tmp_path / "x.pt")
    done = shell("inspect", tmp_path / "x.pt", "--scaling", "mxfp8")
    assert (done.returncode, done.stderr) == (0, "")
    assert "skipped x: nested torch.float32" in done.stdout


def test_damaged_pytorch_files(run, tmp_path, bad_files):
    torch = pytest.importorskip("torch")
    torch.save({"x": torch.ones(32, 64)}, tmp_path / "x.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "x.pt").read_bytes()[:2000])
    (tmp_path / "other.pt").write_bytes((bad_files / "good.npz").read_bytes())
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps({"a": 1}))
    for name, reason in (("cut", "damaged"), ("other", "damaged"), ("pickle", "pickled Python objects")):
        code, out, err = run("inspect", tmp_path / f"{name}.pt")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert reason in err and len(err) < 180 + len(str(tmp_path))


def test_npy_is_memory_mapped(tmp_path):
    np.save(tmp_path / "x.npy", MATRIX)
    with files.open_tensors(tmp_path / "x.npy") as (tensor,):
        assert isinstance(tensor.load()[0], np.memmap)


# --- explain ---------------------------------------------------------------------------------------------------------


def test_explain_values(run):
    code, out, err = run("explain", "--scaling", "mxfp8", "--values", "0.1,-0.25,1,3")
    assert (code, err) == (0, "")
    assert re.search(r"scale byte +120 \(E8M0\) +0x78 ", out)
    assert re.search(r"1 +-0.25 +-32 +0xE0 +1 1100 000 +-32 +-0.25 +0\n", out)


def test_explain_of_changed_settings_is_that_of_the_row_that_has_them(run, run_json):
    arguments = ["explain", "--values", "0.1,-0.25,1,450", "--scaling"]
    changed = run_json(*arguments, "mxfp8", "--set", "scale_rounding=floor")
    names = {"scaling": "mxfp8 scale_rounding=floor", "description": str(SCALINGS["mxfp8-floor"].scaling)}
    assert changed == run_json(*arguments, "mxfp8-floor") | names
    assert run(*arguments, "mxfp8", "--set", "scale_rounding=floor")[1].startswith(": ".join(names.values()))


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("columnwise", [[], ["--columnwise"]], ids=["rowwise", "columnwise"])
def test_explain_every_scaling(run, run_json, name, columnwise):
    arguments = [
        "explain",
        "--scaling",
        name,
        "--values",
        "-1.5,nan,inf,-0.0,3,1e-40",
        "--dtype",
        "bfloat16",
        *columnwise,
    ]
    document = run_json(*arguments)
    code, out, _ = run(*arguments)
    assert code == 0 and "How the scale comes out" in out
    assert document["direction"] == ("columnwise" if columnwise or name == "nvfp4-rht" else "rowwise")
    assert [e["original_bits"] for e in document["elements"][:2]] == ["0xBFC00000", "0x7FC00000"]
    assert document["elements"][1]["original"] is None


def test_explain_dequantized_column_is_that_of_the_library(run_json):
    with files.open_tensors(REAL) as tensors:
        x = next(t for t in tensors if t.name == "layer0.ffn.input").load()[0]
    for name, columnwise in (("nvfp4-1x16", False), ("nvfp4-4over6", True), ("block-128x128", False)):
        document = run_json(
            *["explain", REAL, "--tensor", "layer0.ffn.input", "--scaling", name, "--row", 70, "--block", 1],
            *(["--columnwise"] if columnwise else []),
        )
        scaling = SCALINGS[name].scaling
        values = refops.dequantize(refops.quantize(x, scaling, rowwise=not columnwise, columnwise=columnwise))
        got = [(tuple(e["index"]), e["dequantized"]) for e in document["elements"]]
        assert got == [(index, float(values[index])) for index, _ in got]
        assert {index[columnwise] for index, _ in got} == {70}


def test_explain_takes_the_only_tensor_of_a_file(run, tmp_path):
    np.save(tmp_path / "x.npy", MATRIX)
    code, out, _ = run("explain", tmp_path / "x.npy", "--scaling", "current", "--row", "3", "--block", "1")
    assert code == 0 and "row 3, columns 16..31" in out


def test_explain_takes_a_glob_that_matches_one_tensor(run):
    code, out, _ = run("explain", REAL, "--tensor", "*3*up.weight", "--scaling", "MXFP8")
    assert code == 0 and "layer3.ffn.up.weight" in out
    code, _, err = run("explain", REAL, "--tensor", "*up*", "--scaling", "MXFP8")
    assert code == 2 and err.endswith("got '*up*', which matches layer3.ffn.up.bias, layer3.ffn.up.weight\n")


# --- formats ---------------------------------------------------------------------------------------------------------


def test_formats_table(run, run_json):
    code, out, err = run("formats")
    assert (code, err) == (0, "")
    assert re.search(r"e5m2 +1 5 2 +15 +57344 +2\^-14 +2\^-16 +7D-7F FD-FF +7C FC +247", out)
    rows = {row["name"]: row for row in run_json("formats")["formats"]}
    assert list(rows) == list(refops.FORMATS)
    assert [rows[name]["finite_values"] for name in rows] == [253, 247, 15, 255, 63, 63, 255, 256]
    assert (rows["e4m3"]["nan_codes"], rows["e4m3"]["inf_codes"]) == (["0x7F", "0xFF"], [])


@pytest.mark.parametrize("name", refops.FORMATS)
def test_every_code_of_a_format(run, run_json, name):
    fmt = refops.FORMATS[name]
    document = run_json("formats", name.upper())
    values = [np.nan if c["value"] is None else c["value"] for c in document["codes"]]
    np.testing.assert_array_equal(np.where(np.isinf(fmt.values), np.nan, fmt.values), np.array(values, F))
    code, out, _ = run("formats", name)
    assert code == 0 and "code" in out


# --- report ----------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("largest", [100_000, pytest.param(None, id="any", marks=pytest.mark.sweep)])
def test_full_report_passes_in_time(run_json, tmp_path, largest):
    """Every section; in `make test-all` without the tensors of more than `largest` elements."""
    tensors = {name: x for name, x in load_file(REAL).items() if largest is None or x.size <= largest}
    save_file(tensors, tmp_path / "tensors.safetensors")
    start = time.process_time()
    document = run_json("report", "--data", tmp_path / "tensors.safetensors")
    assert time.process_time() - start < 60
    assert document["ok"] and document["missing"] == []
    assert {c["section"] for c in document["checks"]} == set(report.SECTIONS) - {"survey"}
    assert all(c["comparisons"] > 0 and c["values"] > 0 and c["unexplained"] == 0 for c in document["checks"])
    assert len(document["survey"]) == len(tensors) == (10 if largest is None else 4)
    assert re.fullmatch(
        r"PASS: \d{2,3} \d{3} \d{3} values checked in \d{1,2} \d{3} comparisons, 0 unexplained differences, "
        r"[\d ]+ documented \(\d+\.\d s\)",
        document["verdict"],
    )


@pytest.fixture
def one_real_tensor(monkeypatch):
    """The survey measures the first of a file's tensors alone; `refops inspect` is tested on all."""
    found = report.real_tensors
    monkeypatch.setattr(report, "real_tensors", lambda path: dict([next(iter(found(path).items()))]))


def test_report_text_ends_with_one_line_of_verdict(run, one_real_tensor):
    code, out, err = run("report", "--section", "vectors", "--section", "casts", "--section", "survey")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].startswith("PASS: ")
    assert max(map(len, out.splitlines())) <= PIPE_WIDTH
    assert "Golden vectors" in out and "Casts" in out and "Real tensors" in out and "Fused" not in out


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """As in an installed package outside of a clone: no golden vectors and no real tensors beside it."""
    package = tmp_path / "site-packages" / "refops"
    package.mkdir(parents=True)
    monkeypatch.setattr(refops, "__file__", str(package / "__init__.py"))
    monkeypatch.chdir(tmp_path)


def sections(*names):
    return [word for name in names for word in ("--section", name)]


def test_report_without_vectors_and_data_says_so_and_goes_on(run, installed, tmp_path):
    code, out, err = run("report", *sections("vectors", "helpers", "survey"))
    assert (code, err) == (0, "")
    assert "golden vectors not found: run from a clone, or pass --vectors DIR\n" in out
    assert "real tensors not found: run from a clone, or pass --data FILE\n" in out
    assert str(tmp_path) not in out
    verdict = out.splitlines()[-1]
    assert verdict.startswith("INCOMPLETE: ")
    assert "; NOT CHECKED, for they were not found: real tensors, golden vectors (" in verdict


@pytest.mark.parametrize("start", [".", "tests", "docs/guide"])
def test_an_installed_package_finds_the_clone(installed, monkeypatch, start):
    monkeypatch.chdir(ROOT / start)
    assert report.find_clone() == ROOT


def test_report_of_an_installed_package_finds_the_clone(run, installed, one_real_tensor, monkeypatch):
    """`pip install .` and then `refops report` in a folder of the clone."""
    monkeypatch.chdir(ROOT / "docs" / "guide")
    code, out, _ = run("report", *sections("vectors", "survey"))
    verdict = out.splitlines()[-1]
    assert code == 0 and verdict.startswith("PASS: ") and "NOT CHECKED" not in verdict


def test_no_folder_is_taken_for_the_clone(installed, tmp_path, monkeypatch):
    (tmp_path / "tests" / "vectors").mkdir(parents=True)
    (tmp_path / "tests" / "vectors" / "somebody.npz").touch()
    (tmp_path / "refops").mkdir()
    assert report.find_clone() is None
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert report.find_clone() is None


def test_the_clone_of_the_package_comes_first(tmp_path, monkeypatch):
    for part in (report.VECTORS / "x.npz", report.REAL_TENSORS, Path("refops", "__init__.py")):
        (tmp_path / part).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / part).touch()
    monkeypatch.chdir(tmp_path)
    assert report.find_clone() == ROOT


@pytest.mark.full
def test_a_process_that_was_killed_is_told_in_a_line(run, monkeypatch):
    def ended(number):
        raise BrokenProcessPool("A process in the process pool was terminated abruptly")

    monkeypatch.setattr(report.ProcessPoolExecutor, "map", lambda pool, *work: map(ended, work[1]))
    code, out, err = run("report", *sections("fused"), "--processes", 2)
    assert (code, out, err.count("\n")) == (2, "", 1) and "--processes 2: one of them was ended" in err


@pytest.mark.full
@pytest.mark.sweep
def test_processes_find_the_same(run_json, monkeypatch):
    """Two processes share the steps; order, counts and survey are those of one."""
    pools = []

    class Pool(report.ProcessPoolExecutor):
        def __init__(self, processes, *arguments):
            pools.append(processes)
            super().__init__(processes, *arguments)

    monkeypatch.setattr(report, "ProcessPoolExecutor", Pool)
    documents = [run_json("report", *sections("fused", "helpers"), "--processes", n) for n in (1, 2)]
    assert len(documents[0]["checks"]) > report._FEW_STEPS
    for document in documents:
        document["verdict"], document["seconds"] = document["verdict"].rpartition(" (")[0], 0
    assert documents[0] == documents[1] and pools == [2]


@pytest.mark.parametrize("names", [["vectors"], ["vectors", "survey"], ["survey"]], ids=" ".join)
def test_report_that_compared_nothing_does_not_pass(run, run_json, installed, names):
    code, out, err = run("report", *sections(*names))
    assert (code, err) == (2, "") and "PASS" not in out
    assert out.splitlines()[-1].startswith("NOTHING COMPARED; NOT CHECKED, for they were not found: ")
    assert run_json("report", *sections(*names), code=2)["ok"] is False


def test_survey_alone_compares_nothing_and_is_fine(printed):
    code, out, err = printed(*SURVEY)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].startswith("SURVEY: 10 tensors measured, nothing compared (")


def wrong_code(encode):
    """`encode` with one bit of one code flipped."""

    def faulty(*arguments, **options):
        codes = encode(*arguments, **options).copy()
        codes.flat[codes.size // 2] ^= 1
        return codes

    return faulty


def scaled(function, factor):
    """`function` with float32 results off by a factor. What the oracle computes on intervals stays right."""

    def faulty(*arguments, **options):
        result = function(*arguments, **options)
        return (result * F(factor)).astype(F) if isinstance(result, np.ndarray | np.generic) else result

    return faulty


def of_rule(change):
    """What replaces a rule of a scaling: the same with its result changed."""
    return lambda rule: lambda self, words: lambda *arguments: change(rule(self, words)(*arguments))


#: name -> (section that must notice, module, attribute, what replaces it given the original). Scales and paths that are
#: wrong alike wherever they are used show in others' arrays, and in the second implementation (`test_composed.py`).
FAULTS = {
    "element code": ("scalings", quantize, "encode_tile", wrong_code),
    "scale code": ("vectors", arithmetic, "encode_tile", wrong_code),
    "float32 scale": (
        "scalings",
        refops.CurrentScaling,
        "block_scale",
        of_rule(lambda pair: (pair[0], pair[1] * F(1.01))),
    ),
    "mxfp8 scale byte": (
        "vectors",
        refops.MXFP8Scaling,
        "scale_code",
        of_rule(lambda code: np.minimum(code + 1, 254).astype(np.uint8)),
    ),
    "nvfp4 multiplier": (
        "scalings",
        refops.NVFP4Scaling,
        "multiplier",
        of_rule(lambda multiplier: multiplier * F(0.99)),
    ),
    "4over6 choice": ("vectors", quantize, "block_error", lambda f: lambda *a: np.zeros_like(f(*a))),
    "hadamard signs": ("vectors", hadamard, "sign_vector", lambda f: lambda mask: f(mask ^ 1)),
    "tanh": ("activations", refops.activations.arithmetic, "tanh", lambda f: scaled(f, 1 + 2.0**-20)),
    "exp": ("activations", refops.activations.arithmetic, "exp", lambda f: scaled(f, 1 + 2.0**-19)),
    "bias gradient": ("activations", refops.ops, "column_sum", lambda f: scaled(f, 1.0001)),
    "rounding key": (
        "casts",
        refops.formats,
        "_odd_rounded_key",
        lambda f: lambda values, key_bits: values.view(np.uint32) >> np.uint32(32 - key_bits),
    ),
    "stochastic bits": (
        "vectors",
        refops.formats,
        "round_to_grid_stochastic",
        lambda f: lambda x, grid, bits, floor: f(x, grid, np.maximum(bits, 1) - np.uint8(1), floor),
    ),
}


@sampled("fault", FAULTS, 12)
def test_report_notices_a_seeded_fault(run, installed, monkeypatch, fault):
    section, module, attribute, make_fault = FAULTS[fault]
    monkeypatch.setattr(module, attribute, make_fault(getattr(module, attribute)))
    vectors = ROOT / report.VECTORS
    # One process: others would not have the fault.
    code, out, err = run("report", "--section", section, "--vectors", vectors, "--processes", 1)
    assert (code, err) == (1, "")
    assert "Unexplained differences" in out and " raised " not in out
    assert re.match(r"FAIL: .* [1-9]\d* .*unexplained difference", out.splitlines()[-1])


def test_report_counts_an_exception_as_a_difference(run, run_json, monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("no such\nkernel")

    monkeypatch.setattr(refops, "swizzle", broken)
    code, out, _ = run("report", "--section", "helpers")
    assert code == 1 and "raised RuntimeError: no such kernel" in out
    document = run_json("report", "--section", "helpers", code=1)
    assert not document["ok"] and document["verdict"].startswith("FAIL: ")
    assert [c["subject"] for c in document["checks"] if c["unexplained"]] == ["swizzle, unswizzle"]


@pytest.mark.parametrize(
    ("explained", "code", "verdict"),
    [(3, 0, "PASS: 10 values checked in 1 comparisons, 0 unexplained differences, 3 documented"), (2, 1, "FAIL: 10 ")],
)
def test_report_on_vectors(run, run_json, tmp_path, monkeypatch, explained, code, verdict):
    found = conformance.Comparison("casts__x.npz", "somebody; else", "codes", 10, 3, explained, "keeps no -0")
    (tmp_path / "casts__x.npz").touch()
    monkeypatch.setattr(conformance, "compare_vectors", lambda directory: [found])
    got, out, _ = run("report", "--section", "vectors", "--vectors", tmp_path)
    assert got == code and out.splitlines()[-1].startswith(verdict)
    assert re.search(rf"casts +\[1\]\[2\] +10 +7 +{explained} \(1\) +{3 - explained}", out)
    assert "[1] somebody" in out and "[2] else" in out and "(1) keeps no -0" in out
    document = run_json("report", "--section", "vectors", "--vectors", tmp_path, code=code)
    assert document["checks"][0]["divergence"] == "keeps no -0"


def test_report_survives_broken_vectors(run, tmp_path, monkeypatch):
    (tmp_path / "cast_e4m3__x.npz").write_bytes(b"not a zip")
    code, out, _ = run("report", "--section", "vectors", "--vectors", tmp_path)
    assert code == 1 and out.splitlines()[-1].startswith("FAIL: ") and "raised" in out


def test_tally_compares_bits():
    tally = Tally()
    tally.equal("x", np.array([0.0, np.nan, 1.0], F), np.array([-0.0, np.nan, 1.0], F))
    assert (tally.comparisons, tally.values, tally.differing) == (1, 3, 1) and "x [0]: got 0.0" in tally.first
    tally.equal("y", np.zeros(2, np.uint8), None)
    tally.equal("z", None, None)
    tally.equal("w", np.zeros(2, np.uint8), np.zeros(3, np.uint8))
    assert tally.differing == 3


def test_progress_reaches_the_end(tmp_path):
    seen = []
    report.make_report(
        sections=["casts"], vectors=tmp_path, data=tmp_path / "none", progress=lambda *step: seen.append(step)
    )
    assert [done for done, _, _ in seen] == list(range(len(seen)))
    assert seen[-1][:2] == (len(seen) - 1, len(seen) - 1)


@pytest.mark.full
@pytest.mark.parametrize("seconds", [0.7, 1.1, pytest.param(1.5, marks=pytest.mark.sweep), 3])
def test_ctrl_c_ends_a_report_that_others_share(seconds):
    """To the whole group, as a terminal sends it, also while the other processes start: no traceback of theirs."""
    words = ["env", "--default-signal=INT", sys.executable, "-m", "refops", "report", "--processes", "3"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    importing = "refops/cli.py" in err and not any(f"in {name}\n" in err for name in ("main", "spawn_main"))
    if importing:  # this process, not one of the others: Python's own answer
        return
    assert (process.returncode, out, err) == (130, "", "")


def test_verdict_names_what_was_missing():
    made = replace(report.make_report(sections=["helpers"]), missing=["golden vectors"])
    assert made.ok and made.result == "INCOMPLETE"
    assert "; NOT CHECKED, for they were not found: golden vectors (" in made.verdict


# --- the process -----------------------------------------------------------------------------------------------------


def test_python_m_refops():
    done = shell("formats", "e2m1", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert [c["value"] for c in json.loads(done.stdout)["codes"][:8]] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    done = shell("formats", "e9")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["inspect", "--help"]])
def test_help_and_version(run, arguments):
    code, out, err = run(*arguments)
    assert (code, err) == (0, "") and "refops" in out


def test_every_scaling_is_described_in_the_help(run):
    for command in ("inspect", "explain", "check", "golden"):
        out = " ".join(run(command, "--help")[1].split())
        assert all(f"{s.name} {s.description}" in out for s in SCALINGS.values())
    assert "before any amax is known" in SCALINGS["delayed-scale-1"].description and "delayed" not in SCALINGS


COMMANDS = ("report", "inspect", "explain", "check", "golden", "formats")


@pytest.mark.parametrize("command", [[], *([c] for c in COMMANDS)], ids=" ".join)
def test_help_fits_a_terminal(run, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "200")
    lines = run(*command, "--help")[1].splitlines()
    assert max(map(len, lines)) <= 80
    if command == ["inspect"]:
        assert any("million elements a second and scaling" in line for line in lines)


@pytest.mark.full
@pytest.mark.parametrize(
    "arguments",
    [
        SURVEY,
        ["report", "--section", "vectors"],
        ["inspect", REAL],
        ["inspect", REAL, "--summary"],
        ["explain", "--scaling", "nvfp4-1x16", "--values", "1"],
        ["formats"],
        ["formats", "e4m3"],
    ],
    ids=lambda arguments: " ".join(map(str, arguments))[:20],
)
def test_no_trailing_spaces_where_stdout_is_no_terminal(printed, arguments):
    lines = printed(*arguments)[1].split("\n")
    assert len(lines) > 5 and [line for line in lines if line != line.rstrip()] == []


def test_progress_bar_is_erased_before_a_tensor_is_printed():
    done = subprocess.run(
        [sys.executable, "-m", "refops", "inspect", str(REAL), "--tensor", "*bias", "--scaling", "mxfp8"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "FORCE_COLOR": "1", "TERM": "xterm"},  # as on one terminal
        timeout=120,
    )
    erase, bold = "\x1b[2K", "\x1b[1m"
    assert done.returncode == 0 and done.stdout.count(f"{erase}{bold}layer3.ffn.") == 2


def test_output_survives_an_ascii_terminal(tmp_path):
    save_file({"größe": MATRIX}, tmp_path / "x.safetensors")
    done = shell("inspect", tmp_path / "x.safetensors", "--scaling", "mxfp8", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (done.returncode, done.stderr) == (0, "") and "gr\\xf6\\xdfe" in done.stdout


@pytest.mark.parametrize("arguments", [["formats", "e8m0"], ["inspect", "--help"]])
def test_closed_pipe_is_no_traceback(arguments):
    process = subprocess.Popen(
        [sys.executable, "-m", "refops", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""},
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(60) == cli.EXIT_PIPE_CLOSED


@sampled(("arguments", "redirection"), product(["formats", "formats --json"], [">/dev/full", ">&-"]), 3, in_all=1)
def test_stdout_that_cannot_be_written_is_bad_use(arguments, redirection):
    done = subprocess.run(
        f"{sys.executable} -m refops {arguments} {redirection}",
        shell=True,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == cli.EXIT_BAD_USE
    assert re.fullmatch(r"refops: error: stdout must be .*; got .*\n", done.stderr)


def test_name_too_long_for_the_file_system_is_bad_use(run):
    code, out, err = run("inspect", "a" * 300 + ".npy")
    assert (code, out) == (cli.EXIT_BAD_USE, "") and err.count("\n") == 1 and "File name too long" in err


def test_tensors_of_one_name_do_not_hide_each_other(tmp_path):
    """As nested dicts in a .pt file give them; a zip archive can hold a name twice as well."""
    same = [files.StoredTensor("a.b", lambda: MATRIX), files.StoredTensor("a.b", lambda: 2 * MATRIX)]
    first, second = files._with_distinct_names(same)
    assert (first.name, second.name) == ("a.b", "a.b (2)")
    np.testing.assert_array_equal(second.load()[0], 2 * MATRIX)


def test_pytorch_file_that_names_too_many_tensors_is_refused(run, tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(files, "MOST_TENSORS", 3)
    torch.save([torch.ones(2)] * 4, tmp_path / "x.pt")
    code, _, err = run("inspect", tmp_path / "x.pt")
    assert code == cli.EXIT_BAD_USE and "it names more than 3 tensors" in err


def test_core_imports_no_command_line_module():
    foreign = ["rich", "safetensors", "matplotlib", "torch"]
    own = ["refops.cli", "refops.display", "refops.report", "refops.selfcheck", "refops.survey", "refops.files"]
    code = f"import sys, refops; print([m for m in {foreign + own} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.stdout.strip() == "[]"


def test_an_error_does_not_repeat_a_long_header(run, tmp_path):
    """NumPy quotes the header that it cannot parse, whatever its length."""
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + b"9" * 5000 + b",)}\n"
    path = tmp_path / "long.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(64))
    code, out, err = run("inspect", path)
    assert (code, out, err.count("\n")) == (2, "", 1) and len(err) < 1000
    assert err.startswith(f"refops: error: FILE must be a readable .npy file; got {str(path)!r}")


@pytest.mark.parametrize("suffix", [".npz", ".pt"])
@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_an_archive_that_was_cut_off(run, tmp_path, suffix, share):
    path = tmp_path / f"cut{suffix}"
    if suffix == ".npz":
        np.savez(path, x=MATRIX)
    else:
        torch = pytest.importorskip("torch")
        torch.save({"x": torch.from_numpy(MATRIX)}, path)
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    code, _, err = run("inspect", path)
    assert code == 2 and err.endswith(f"must be a readable {suffix} file; got {str(path)!r}: it ends early\n")


def test_a_signalling_nan_is_no_warning(run, tmp_path):
    """Other programs write them; arithmetic on one raises a floating-point flag, which NumPy would warn of."""
    x = MATRIX.copy()
    x.view(np.uint32)[3, 5] = 0x7F800001
    np.save(tmp_path / "x.npy", x)
    code, out, err = run("inspect", tmp_path / "x.npy", "--scaling", "mxfp8")
    assert (code, err) == (0, "") and "NaN" in out


def nested(value, depth=10):
    """Ten lists of ten lists of ... of one value: a few bytes in a file."""
    for _ in range(depth):
        value = [value] * 10
    return value


@pytest.mark.full
@pytest.mark.parametrize("filled", [False, True])
def test_pytorch_lists_without_end_are_refused(run, tmp_path, filled):
    torch = pytest.importorskip("torch")
    path = tmp_path / "laughs.pt"
    torch.save(nested([torch.zeros(4)] if filled else []), path)
    code, out, err = run("inspect", path)
    assert (code, out, err.count("\n")) == (2, "", 1) and re.search("names|holds", err)
