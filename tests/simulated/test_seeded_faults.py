"""Seeded faults: a copy of the package with one realistic mistake fails the checks that these tests are made of.

Each fault is one change of text in one file. A copy without a change must pass every probe, so a probe that fails finds
the fault and not the copy.
"""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]

BACKWARD = "from cuda_kernels.launch import Simulated; Simulated.order = 'backward'; "
#: name -> a check of `simulated_cases`, run on the copy.
PROBES = {
    "mxfp8": "check_quantize(heavy_tailed((33, 72)), SCALINGS['mxfp8'])",
    "mxfp8 wide": "check_quantize(heavy_tailed((33, 112)), SCALINGS['mxfp8'])",
    "mxfp8 both": "check_quantize(heavy_tailed((33, 72)), SCALINGS['mxfp8'], True, True)",
    "mxfp8 swizzled": "check_quantize(heavy_tailed((130, 136)), SCALINGS['mxfp8'], swizzled_scales=True)",
    "mxfp8 sums": "check_quantize(integers((33, 72)), SCALINGS['mxfp8'], True, True, dbias=True)",
    "mxfp8 square": "check_quantize(heavy_tailed((35, 70)), SCALINGS['mxfp8-2d'], True, True)",
    "block": "check_quantize(heavy_tailed((35, 200)), SCALINGS['block-1x128'])",
    "square": "check_quantize(heavy_tailed((35, 70)), SCALINGS['block-128x128'], True, True)",
    "delayed": "check_quantize(heavy_tailed((35, 70)), SCALINGS['delayed-e5m2'], True, True)",
    "current": "check_quantize(heavy_tailed((35, 70)), SCALINGS['current'])",
    "nvfp4 block": "check_quantize(heavy_tailed((32, 80)), SCALINGS['nvfp4-1x16'])",
    "nvfp4 two blocks": "check_quantize(heavy_tailed((32, 96)), SCALINGS['nvfp4-1x16'])",
    "nvfp4": "check_quantize(heavy_tailed((32, 64)), SCALINGS['nvfp4-1x16'], True, True)",
    "stochastic": "check_quantize(heavy_tailed((16, 64)), SCALINGS['nvfp4-stochastic'], True, True)",
    "row-scaled": "check_quantize(heavy_tailed((32, 64)), SCALINGS['nvfp4-row-scaled'])",
    "4over6 2d": "check_quantize(heavy_tailed((32, 32)), SCALINGS['nvfp4-mae-2d'])",
    "rht": "check_quantize(integers((32, 32)), RHT['nvfp4-rht'], False, True)",
    "rows back": "check_dequantize(heavy_tailed((33, 112)), SCALINGS['mxfp8'])",
    "ragged rows back": "check_dequantize(heavy_tailed((33, 107)), SCALINGS['block-1x128'])",
    "square back": "check_dequantize(heavy_tailed((130, 112)), SCALINGS['block-128x128'])",
    "columns back": "check_dequantize(heavy_tailed((33, 112)), SCALINGS['mxfp8'], True)",
    "ragged columns back": "check_dequantize(heavy_tailed((33, 107)), SCALINGS['mxfp8'], True)",
    "turned back": "check_dequantize(heavy_tailed((35, 70)), SCALINGS['block-1x128'], True)",
    "ragged": "check_activation('relu', (5, 27))",
    "sums": "check_activation('relu', (130, 24))",
    "gated": "check_activation('swiglu', (5, 27))",
    "gated whole": "check_activation('swiglu', (5, 32))",
    "scaled": "check_scaled('swiglu', (3, 64), interleave=32)",
    "fused current": "check_fused('silu', (9, 40), SCALINGS['current'], True, False)",
    "fused mxfp8": "check_fused('silu', (9, 64), SCALINGS['mxfp8'], True, False)",
    "square backward": BACKWARD + "check_quantize(heavy_tailed((35, 70)), SCALINGS['block-128x128'], True, True)",
}
#: Lines that occur more than once are named by the function (or maker) before them.
FAULTS = (
    # file, in, text, what it becomes, the probe that finds it
    ("vectors.py", "def make_group_max", "shfl_xor_sync(WARP, x, 2)", "shfl_xor_sync(WARP, x, 4)", "mxfp8"),
    ("vectors.py", "def make_group_max", "if lanes > 8:", "if lanes > 16:", "block"),
    ("vectors.py", "def make_store(", "if k < valid:", "if k <= valid:", "ragged"),
    ("kernels.py", "def tile_kernel", "cuda.syncthreads()", "pass", "delayed"),
    ("kernels.py", "def square_kernel", "cuda.syncthreads()\n        for", "pass\n        for", "square backward"),
    ("kernels.py", "def square_kernel", "_amax))\n        cuda.syncthreads()", "_amax))", "square"),
    ("kernels.py", "def column_kernel", "cuda.syncthreads()", "pass", "mxfp8 both"),
    ("kernels.py", "def of_column", "range(1, WARPS)", "range(2, WARPS)", "mxfp8 both"),
    ("kernels.py", "def make_finish_sums", "range(count)", "range(1, count)", "sums"),
    ("kernels.py", "def gate_distance", "inputs.interleave == 0", "True", "scaled"),
    ("kernels.py", "def second_errs_less", ") < tree_sum", ") > tree_sum", "4over6 2d"),
    ("kernels.py", "def wide_row_kernel", "amax_of(first, second)", "amax_of(first, first)", "mxfp8 wide"),
    ("kernels.py", "def wide_row_kernel", "second_prologue(", "first_prologue(", "mxfp8 wide"),
    ("kernels.py", "def block_row_kernel", "second_prologue(", "first_prologue(", "nvfp4 block"),
    ("kernels.py", "def block_row_kernel", "fourth_prologue(", "third_prologue(", "nvfp4 two blocks"),
    ("epilogues.py", "def wide_blocks(", "// (2 * VECTOR)", "// VECTOR", "mxfp8 wide"),
    ("epilogues.py", "def store_one", ", (a, b))", ", (b, a))", "nvfp4 block"),
    ("epilogues.py", "def store_two", "out.scales[i + 1]", "out.scales[i + 2]", "nvfp4 two blocks"),
    ("epilogues.py", "def store_two", "codes(v[2], v[3]", "codes(v[0], v[3]", "nvfp4 two blocks"),
    ("families/dequantize.py", "def dequantize_rows", "multiply(second, ", "multiply(first, ", "rows back"),
    ("families/dequantize.py", "def guarded", "column + VECTOR", "column", "ragged columns back"),
    ("families/dequantize.py", "def in_one_load", "of_codes(s[2], s[3])", "of_codes(s[0], s[1])", "columns back"),
    ("families/dequantize.py", "def dequantize_turned", "cuda.syncthreads()", "pass", "turned back"),
    ("vectors.py", "def load_whole", "decode(w[2], w[3])", "decode(w[0], w[1])", "rows back"),
    ("vectors.py", "def load_guarded", "i + VECTOR, I32(", "i, I32(", "ragged rows back"),
    ("vectors.py", "def store_guarded", "left - VECTOR", "left", "ragged rows back"),
    ("directions.py", "def of_block", "outer >> row_bits", "outer", "square back"),
    ("recipes.py", "def widest", "% (2 * VECTOR)", "% VECTOR", "mxfp8"),
    ("recipes.py", "def widest", "% (4 * VECTOR)", "% (2 * VECTOR)", "nvfp4 block"),
    ("epilogues.py", "def put_of_row", "(columns - 1)) == 0", "(columns - 1)) == 8", "mxfp8"),
    ("epilogues.py", "def put_each", "(edge - 1)) == 0", "(edge - 1)) == 8", "mxfp8 square"),
    ("epilogues.py", "def under_two", "offset(outer, I32(2)", "offset(outer, I32(1)", "row-scaled"),
    ("directions.py", "def scale_swizzled", "block & 3", "block & 1", "mxfp8 swizzled"),
    ("scale_rules.py", "def by_difference", "bits_for_one - bits", "bits_for_one - bits - U32(0x400000)", "block"),
    ("epilogues.py", "def make_store_random", "select(first, a, c)", "select(first, c, a)", "stochastic"),
    ("prologues.py", "def guarded_gradients", "width - column)", "width - column + 1)", "gated"),
    ("hadamard.py", "def across", "other - x", "x - other", "rht"),
    ("gpu.py", "def _stored_first", "not job.path.amax_rounded", "False", "fused current"),
    ("gpu.py", "def _blocks", "job.path.casts_rounded", "False", "fused mxfp8"),
)


def run(folder, probe):
    """Whether a probe passes on the package copied to `folder`, and what it says."""
    code = f"from simulated_cases import *; assert {str(folder)!r} in cuda_kernels.__file__; {probe}"
    path = os.pathsep.join(map(str, (folder, ROOT / "tests" / "simulated", ROOT / "tests", ROOT)))
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=folder)
    return done.returncode == 0, done.stderr


def copied(folder):
    """A copy of the package in `folder`."""
    shutil.copytree(ROOT / "cuda_kernels", folder / "cuda_kernels", ignore=shutil.ignore_patterns("__pycache__"))
    return folder / "cuda_kernels"


@pytest.mark.full
def test_a_copy_without_a_fault_passes(tmp_path):
    copied(tmp_path)
    passed, said = run(tmp_path, "; ".join(PROBES.values()))
    assert passed, said


@pytest.mark.full
@pytest.mark.parametrize(("file", "after", "text", "becomes", "probe"), FAULTS, ids=[f"{f[1]}: {f[2]}" for f in FAULTS])
def test_a_fault_is_found(tmp_path, file, after, text, becomes, probe):
    path = copied(tmp_path) / file
    source = path.read_text()
    start = source.index(after)
    at = source.index(text, start)
    assert at - start < 4000, "the text lies in another function by now"
    path.write_text(source[:at] + becomes + source[at + len(text) :])
    passed, said = run(tmp_path, PROBES[probe])
    assert not passed, f"{becomes!r} in {after} was not found"
    found = ("AssertionError", "MismatchError", "IndexError", "RuntimeError", "is not aligned")
    assert any(e in said for e in found), said
