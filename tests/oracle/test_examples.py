"""What refops/oracle/README.md says about its C++ programs, golden files and the assertion is true."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import refops
from refops import cli, oracle
from refops.golden import read_golden, write_golden
from refops.oracle.testing import assert_matches

HERE = Path(oracle.__file__).parent
README = (HERE / "README.md").read_text()
#: The compilers that are installed; c++ is often another name of one of the others.
COMPILERS = sorted(
    {str(Path(shutil.which(name)).resolve()) for name in ("c++", "g++", "clang++") if shutil.which(name)}
)
FLAGS = ("-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror")
PROGRAMS = ("read_golden", "write_raw", "write_swizzled")


# --- golden files -----------------------------------------------------------------------------------------------------


def test_table_of_the_header_is_what_files_have(tmp_path):
    golden = read_golden(write_golden(tmp_path, "swiglu", "mxfp8", shape=(4, 64), swizzled_scales=True))
    rows = re.findall(r"^\| (`.*?`) \|", README, re.MULTILINE)
    assert sorted(golden.header) == sorted(re.findall(r"`(\w+)`", " ".join(rows)))


def test_digest_is_what_the_readme_says(tmp_path):
    """Computed from the file alone, with the standard library."""
    from hashlib import sha256

    data = write_golden(tmp_path, "dswiglu", "nvfp4-1x16", shape=(16, 64), dtype="float16").read_bytes()
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    header = json.loads(entries.pop("__metadata__")["refops"])
    expected = header.pop("digest")
    sha = sha256(json.dumps(header, sort_keys=True, separators=(",", ":")).encode())
    for name in sorted(entries):
        start, stop = (8 + length + offset for offset in entries[name]["data_offsets"])
        described = header["arrays"][name]
        sha.update(f"\n{name} {described['dtype']} {described['shape']}\n".encode())
        sha.update(data[start:stop])
    assert sha.hexdigest() == expected


# --- the assertion ----------------------------------------------------------------------------------------------------

X = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)
MX = refops.MXFP8Scaling(refops.E4M3)


def test_assertion_passes_and_returns_the_report():
    report = assert_matches("quantize", X, refops.quantize(X, MX, columnwise=True), scaling=MX, ulp=0)
    assert report.ok and {array.name for array in report.arrays} >= {"rowwise_data", "columnwise_data"}


def test_assertion_fails_with_the_report():
    codes = refops.quantize(X, MX).rowwise_data.copy()
    codes[3, 5] ^= 8
    with pytest.raises(AssertionError) as error:
        assert_matches("quantize", X, {"data": codes}, scaling=MX, diagnose=False)
    assert isinstance(error.value, oracle.MismatchError)
    report = oracle.check("quantize", X, {"data": codes}, scaling=MX, diagnose=False)
    assert str(report) in str(error.value) and "rowwise_data[3, 5]" in str(error.value)


def test_assertion_needs_no_test_framework():
    code = "import sys; import refops.oracle.testing; assert 'pytest' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=HERE.parent.parent)


def test_pytest_shows_the_report_without_the_helper(tmp_path):
    """What a user's failing test prints: the report, and no line of the helper's own code."""
    (tmp_path / "test_kernel.py").write_text(
        "import numpy as np, refops\n"
        "from refops.oracle.testing import assert_matches\n"
        "def test_kernel():\n"
        "    scaling = refops.MXFP8Scaling(refops.E4M3)\n"
        "    x = np.ones((2, 32), np.float32)\n"
        "    codes = refops.quantize(x, scaling).rowwise_data ^ np.uint8(128)\n"
        "    assert_matches('quantize', x, {'data': codes}, scaling=scaling, diagnose=False)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=HERE.parent.parent,
        timeout=120,
    )
    assert done.returncode == 1
    assert "WRONG: quantize" in done.stdout and "64 of 64 codes wrong" in done.stdout
    assert "report.raise_for_mismatch()" not in done.stdout


# --- C++ --------------------------------------------------------------------------------------------------------------


def build(source, folder, compiler):
    """Compile a C++ source, warnings being errors; returns the program."""
    program = folder / source.stem
    done = subprocess.run([compiler, *FLAGS, str(source), "-o", str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


@pytest.fixture(scope="module", params=COMPILERS or [None])
def programs(request, tmp_path_factory):
    """(compiler, name -> compiled example); skipped where no C++ compiler is installed."""
    if request.param is None:
        pytest.skip("no C++ compiler (c++, g++ or clang++) is installed")
    folder = tmp_path_factory.mktemp("programs")
    return request.param, {name: build(HERE / "examples" / f"{name}.cpp", folder, request.param) for name in PROGRAMS}


def call(*words, stdout=subprocess.PIPE):
    return subprocess.run([str(w) for w in words], stdout=stdout, stderr=subprocess.PIPE)


def extract(programs, golden, array, path):
    """Let read_golden write one array to a file."""
    with open(path, "wb") as file:
        assert call(programs["read_golden"], golden, array, stdout=file).returncode == 0
    return path


def judge(capsys, *arguments):
    """(exit code, JSON report) of `refops check`."""
    code = cli.main(["check", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_are_short_and_need_nothing(name):
    source = (HERE / "examples" / f"{name}.cpp").read_text()
    assert len(source.splitlines()) < 50
    headers = ("cmath", "cstdint", "cstdio", "cstdlib", "cstring", "fstream", "iterator", "string", "vector")
    assert set(re.findall(r"#include <(.*)>", source)) <= set(headers)
    assert source.count("#include") == source.count("#include <")


def test_read_golden_writes_the_arrays(programs, tmp_path):
    path = write_golden(tmp_path, "dswiglu", "nvfp4-1x16", shape=(32, 96), dtype="float16", seed=4)
    for name, array in read_golden(path).arrays.items():
        assert extract(programs[1], path, name, tmp_path / "array.bin").read_bytes() == array.tobytes()


def test_read_golden_compares_a_dump(programs, tmp_path):
    path = write_golden(tmp_path, "quantize", "mxfp8", shape=(32, 64))
    read, dump = programs[1]["read_golden"], tmp_path / "q.bin"
    codes = read_golden(path).outputs["rowwise_data"]
    codes.tofile(dump)
    done = call(read, path, "output.rowwise_data", dump)
    assert (done.returncode, done.stdout) == (0, b"output.rowwise_data: 0 of 2048 bytes differ\n")
    changed = codes.copy()
    changed[0, :3] ^= 1
    changed.tofile(dump)
    done = call(read, path, "output.rowwise_data", dump)
    assert (done.returncode, done.stdout) == (1, b"output.rowwise_data: 3 of 2048 bytes differ\n")
    codes[:-1].tofile(dump)
    assert call(read, path, "output.rowwise_data", dump).returncode == 2
    for words in ([path, "output.y"], [path], [tmp_path / "missing", "input.x"], [dump, "input.x"]):
        done = call(read, *words)
        assert done.returncode == 2 and done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(("inputs", "seed"), [("mixed", 0), ("mixed", 1), ("mixed", 2), ("extreme", 0), ("special", 0)])
def test_write_raw_is_right(programs, tmp_path, capsys, inputs, seed):
    golden = write_golden(tmp_path, "swiglu", "mxfp8", shape=(96, 512), inputs=inputs, seed=seed)
    x = extract(programs[1], golden, "input.x", tmp_path / "x.bin")
    q, s = tmp_path / "q.bin", tmp_path / "s.bin"
    assert call(programs[1]["write_raw"], x, 96, 256, q, s).returncode == 0
    settings = ("--op", "swiglu", "--scaling", "mxfp8", "--input", f"{x}@bfloat16:96x512")
    for arguments in (settings, ("--golden", golden)):
        code, report = judge(capsys, *arguments, "--data", q, "--scale", s)
        assert (code, report["ok"]) == (0, True)
        assert [array["entries"] for array in report["arrays"]] == [96 * 256, 96 * 8]


SWIZZLED = {"codes": "q", "scales": "s", "columnwise_codes": "cq", "columnwise_scales": "cs"}


def write_swizzled(program, programs, golden, shape, folder):
    """What the program writes for the input of a golden file, as options of `refops check`."""
    x = extract(programs, golden, "input.x", folder / "x.bin")
    assert call(program, x, *shape, *(folder / name for name in SWIZZLED.values())).returncode == 0
    return [word for name, file in SWIZZLED.items() for word in ("--output", f"{name}={folder / file}")]


@pytest.mark.parametrize(("inputs", "shape"), [("mixed", (160, 416)), ("special", (96, 100)), ("extreme", (33, 41))])
def test_write_swizzled_is_right(programs, tmp_path, capsys, inputs, shape):
    golden = write_golden(tmp_path, "quantize", "mxfp8", shape=shape, inputs=inputs, swizzled_scales=True)
    outputs = write_swizzled(programs[1]["write_swizzled"], programs[1], golden, shape, tmp_path)
    code, report = judge(capsys, "--golden", golden, *outputs, "--padding", "zero")
    assert (code, report["ok"]) == (0, True)
    assert {array["name"] for array in report["arrays"]} == {
        f"{copy}_{part}" for copy in ("rowwise", "columnwise") for part in ("data", "scale_inv")
    }
    for name, file in (("rowwise", "s"), ("columnwise", "cs")):
        done = call(programs[1]["read_golden"], golden, f"output.{name}_scale_inv", tmp_path / file)
        assert done.returncode == 0, done.stdout


#: Mistakes in the index of a scale byte -> the array that is wrong then.
MISPLACED = [
    ("(i / 128 * tiles + j / 128) * 512", "(j / 128 * ((outer + 127) / 128) + i / 128) * 512"),  # tiles in columns
    ("i % 32 * 16 + i % 128 / 32 * 4", "i % 128 * 4"),  # the plain order of a tile
]


@pytest.mark.parametrize(("old", "new"), MISPLACED)
def test_write_swizzled_made_wrong_is_wrong(programs, tmp_path, capsys, old, new):
    source = (HERE / "examples" / "write_swizzled.cpp").read_text()
    assert source.count(old) == 1
    (tmp_path / "wrong.cpp").write_text(source.replace(old, new))
    program, shape = build(tmp_path / "wrong.cpp", tmp_path, programs[0]), (160, 416)
    golden = write_golden(tmp_path, "quantize", "mxfp8", shape=shape, swizzled_scales=True)
    outputs = write_swizzled(program, programs[1], golden, shape, tmp_path)
    code, report = judge(capsys, "--golden", golden, *outputs, "--no-diagnosis")
    wrong = {array["name"] for array in report["arrays"] if array["wrong"]}
    assert code == 1 and {"rowwise_scale_inv", "columnwise_scale_inv"} <= wrong


#: Mistakes in write_raw.cpp: text of the program -> what it becomes, and the first name of the diagnosis.
MISTAKES = [
    ({"amax * (1 / 448.0f)": "amax / 256", "(b >> 23) + up": "(b >> 23) + 0 * up"}, "scale-floor"),
    ({"from_bits((bits_of(v) + 0x7FFF + (bits_of(v) >> 16 & 1)) & 0xFFFF0000u)": "v"}, "missing-rounding"),
    ({"&x[block": "h + &x[block", "* widen(act[h + i])": "* widen(act[i - long(h)])"}, "gate-order"),
    ({"std::fmin(std::fabs(v), 448.0f)": "std::fabs(v)", "std::nearbyint(": "std::trunc("}, "truncation"),
]


@pytest.mark.parametrize(("changes", "name"), MISTAKES, ids=[name for _, name in MISTAKES])
def test_write_raw_made_wrong_is_wrong(programs, tmp_path, capsys, changes, name):
    source = (HERE / "examples" / "write_raw.cpp").read_text()
    for old, new in changes.items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    (tmp_path / "wrong.cpp").write_text(source)
    program = build(tmp_path / "wrong.cpp", tmp_path, programs[0])
    golden = write_golden(tmp_path, "swiglu", "mxfp8", shape=(96, 512))
    x = extract(programs[1], golden, "input.x", tmp_path / "x.bin")
    q, s = tmp_path / "q.bin", tmp_path / "s.bin"
    assert call(program, x, 96, 256, q, s).returncode == 0
    code, report = judge(capsys, "--golden", golden, "--data", q, "--scale", s)
    assert (code, report["ok"]) == (1, False)
    assert report["diagnosis"][0]["names"] == [name]
