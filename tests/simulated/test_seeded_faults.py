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

from tiers import sampled

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
    "delayed rows": "check_quantize(heavy_tailed((35, 200)), SCALINGS['delayed-e5m2'])",
    "delayed empty": "check_quantize(heavy_tailed((0, 16)), SCALINGS['delayed-e5m2'])",
    "delayed halves": "check_fused('swiglu', (5, 48), SCALINGS['delayed-e5m2'], True, False, dbias=False)",
    "history": "check_update((3, 30))",
    "reordered": "check_reordered(heavy_tailed((130, 136)), SCALINGS['mxfp8'])",
    "delayed sums": "check_fused('gelu', (130, 24), SCALINGS['delayed-e5m2'], True, True)",
    "current": "check_quantize(heavy_tailed((35, 70)), SCALINGS['current'])",
    "nvfp4 rows": "check_quantize(heavy_tailed((32, 80)), SCALINGS['nvfp4-1x16'])",
    "current both": "check_quantize(heavy_tailed((35, 70)), SCALINGS['current'], True, True)",
    "nvfp4 block": "check_quantize(heavy_tailed((32, 80)), SCALINGS['nvfp4-1x16'])",
    "nvfp4 two blocks": "check_quantize(heavy_tailed((32, 96)), SCALINGS['nvfp4-1x16'])",
    "nvfp4": "check_quantize(heavy_tailed((32, 64)), SCALINGS['nvfp4-1x16'], True, True)",
    "stochastic": "check_quantize(heavy_tailed((16, 64)), SCALINGS['nvfp4-stochastic'], True, True)",
    "stochastic rows": "check_quantize(heavy_tailed((16, 64)), SCALINGS['nvfp4-stochastic'])",
    "row-scaled": "check_quantize(heavy_tailed((32, 64)), SCALINGS['nvfp4-row-scaled'])",
    "hadamard": "assert_same_bits(*(one.hadamard_transform(integers((3, 48))) for one in (cuda_kernels, refops)))",
    "wide square": "check_quantize(heavy_tailed((131, 140), FP32), SCALINGS['block-128x128'], True, True)",
    "stochastic square": "check_quantize(heavy_tailed((32, 32)), SCALINGS['nvfp4-sr-2d'], True, True)",
    "4over6": "check_quantize(heavy_tailed((32, 48)), SCALINGS['nvfp4-mse'])",
    "4over6 both": "check_quantize(heavy_tailed((32, 48)), SCALINGS['nvfp4-mse'], True, True)",
    "4over6 2d": "check_quantize(heavy_tailed((48, 64), seed=3), SCALINGS['nvfp4-mae-2d'])",
    "rht": "check_quantize(integers((32, 32)), RHT['nvfp4-rht'], False, True)",
    "rows back": "check_dequantize(heavy_tailed((33, 112)), SCALINGS['mxfp8'])",
    "ragged rows back": "check_dequantize(heavy_tailed((33, 107)), SCALINGS['block-1x128'])",
    "square back": "check_dequantize(heavy_tailed((130, 112)), SCALINGS['block-128x128'])",
    "columns back": "check_dequantize(heavy_tailed((33, 112)), SCALINGS['mxfp8'], True)",
    "ragged columns back": "check_dequantize(heavy_tailed((33, 107)), SCALINGS['mxfp8'], True)",
    "turned back": "check_dequantize(heavy_tailed((35, 70)), SCALINGS['block-1x128'], True)",
    "ragged": "check_activation('relu', (5, 27))",
    "sums": "check_activation('relu', (130, 24))",
    "ragged sums": "check_activation('relu', (40, 27))",
    "no rows": "check_quantize(heavy_tailed((0, 16)), SCALINGS['delayed-e5m2'], dbias=True)",
    "halves": "check_activation('swiglu', (5, 32), dbias=False)",
    "codes back": "check_codes((3, 32), refops.E2M1)",
    "ragged codes back": "check_codes((3, 27), refops.E4M3)",
    "gated": "check_activation('swiglu', (5, 27))",
    "gated whole": "check_activation('swiglu', (5, 32))",
    "scaled": "check_scaled('swiglu', (3, 64), interleave=32)",
    "fused current": "check_fused('silu', (9, 40), SCALINGS['current'], True, False)",
    "current halves": "check_fused('swiglu', (5, 3), SCALINGS['current'], True, False)",
    "outside": "check_outside(8, 1, alpha=F('inf'))",
    "ragged outside": "check_outside(3, 1, alpha=F('inf'))",
    "fused mxfp8": "check_fused('silu', (9, 64), SCALINGS['mxfp8'], True, False)",
    "fused halves": "check_fused('swiglu', (5, 64), SCALINGS['mxfp8'], True, False, dbias=False)",
    "square backward": BACKWARD + "check_quantize(heavy_tailed((35, 70)), SCALINGS['block-128x128'], True, True)",
}
#: Lines that occur more than once are named by the function (or maker) before them.
FAULTS = (
    # file, in, text, what it becomes, the probe that finds it
    ("vectors.py", "def make_group_max", "shfl_xor_sync(WARP, x, 1)", "shfl_xor_sync(WARP, x, 2)", "mxfp8"),
    ("vectors.py", "def make_group_max", "if lanes > 4:", "if lanes > 8:", "block"),
    ("vectors.py", "def make_store(", "if k < valid:", "if k <= valid:", "ragged"),
    ("families/per_tensor.py", "def amax_of_tensor", "column, left)), out", "column, I32(1))), out", "current"),
    ("families/per_tensor.py", "def scale_of_tensor", "other_scale_inv[0]", "scale_inv[0]", "current both"),
    ("families/per_tensor.py", "def at_least_one", "0 in grid", "False", "delayed empty"),
    ("families/per_tensor.py", "def known_rows", "record_scale(out, row, column)", "pass", "delayed rows"),
    ("stores.py", "def record_largest", "warp_max(x)", "x", "delayed rows"),
    ("families/per_tensor.py", "def known_gradient_rows", "I32(column + source.width)", "column", "delayed halves"),
    ("families/per_tensor.py", "def both_per_tensor", "cuda.syncthreads()", "pass", "delayed"),
    ("families/scales.py", "def largest_of", "range(1, length)", "range(2, length)", "history"),
    ("families/scales.py", "def swizzle_naive", "major(rows", "major(columns", "reordered"),
    ("families/scales.py", "def pairs_of_tensor_scales", "I64(i) * 2 + 1", "I64(i) * 2", "row-scaled"),
    ("tiles.py", "def make_sum_columns", "total + value", "value", "delayed sums"),
    ("reads.py", "def make_read_sixteen_of_halves", "target, VECTOR)", "target)", "delayed halves"),
    ("families/mxfp8.py", "def make_cast", "direction.block[1])", "direction.block[1] // 2)", "mxfp8 wide"),
    ("families/mxfp8.py", "def mxfp8_gradient_rows", "rounded(gate)", "rounded(act)", "fused halves"),
    ("families/mxfp8.py", "def over_warps", "range(1, WARPS)", "range(2, WARPS)", "mxfp8 both"),
    ("families/mxfp8.py", "def mxfp8_columns", "cuda.syncthreads()", "pass", "mxfp8 both"),
    ("families/mxfp8.py", "def mxfp8_columns", "row0 // rows", "row0", "mxfp8 sums"),
    ("families/mxfp8.py", "def quantize_rows", "gpu.whole(front, 16,", "gpu.whole(front, 8,", "mxfp8"),
    ("vectors.py", "def make_fold", "kept[half:]", "kept[:half]", "mxfp8 both"),
    ("vectors.py", "def make_each(", "half * apart", "apart", "mxfp8 both"),
    ("vectors.py", "def amax_of_sixteen", "both[1])", "both[0])", "mxfp8 wide"),
    ("reads.py", "def make_read_sixteen(", "second(source, row", "first(source, row", "mxfp8 wide"),
    ("families/squares.py", "def squares(", "cuda.syncthreads()\n            fill", "fill", "square backward"),
    ("families/squares.py", "def squares(", "cuda.syncthreads()\n            if", "if", "square"),
    ("families/squares.py", "def squares(", "if transposes:", "if not transposes:", "square"),
    ("families/squares.py", "def make_index_of_square", "row >> log2_edge", "row >> 1", "wide square"),
    ("families/squares.py", "def square_maxima", "index(out, row", "index(out, column", "wide square"),
    ("families/squares.py", "def make_given", "index(maxima, row", "index(maxima, column", "wide square"),
    ("families/squares.py", "def given_squares", "cuda.syncthreads()", "pass", "wide square"),
    ("stores.py", "def philox_words", "select(first, a, c)", "select(first, c, a)", "stochastic square"),
    ("families/sums.py", "def finish_sums", "range(count)", "range(1, count)", "sums"),
    ("families/sums.py", "def band", ", column), I32(out.inner - column)", ", column), I32(8)", "ragged sums"),
    ("families/sums.py", "def grid", "max(1, y)", "y", "no rows"),
    ("reads.py", "def alternating", "I32(first + g)", "I32(first + source.width)", "scaled"),
    ("families/row_scaled.py", "def gated(inputs, scale", "multiply(dy, scale)", "dy", "scaled"),
    ("families/row_scaled.py", "def scaled_gradient(source", "if row < out.outer", "if True", "scaled"),
    ("families/row_scaled.py", "def gated(vectors", "out.inner, gate)", "out.inner, act)", "scaled"),
    ("vectors.py", "def warp_sum", "shfl_xor_sync(WARP, x, 2)", "shfl_xor_sync(WARP, x, 4)", "scaled"),
    ("families/four_over_six.py", "def second_errs_less", ") < tree_sum", ") > tree_sum", "4over6 2d"),
    ("families/four_over_six.py", "def chosen_squares", "cuda.syncthreads()  # all threads' sums", "#", "4over6 2d"),
    ("families/four_over_six.py", "def choose(", "both[0], amax)", "both[1], amax)", "4over6"),
    (
        "families/four_over_six.py",
        "def make_errors_of_two",
        "select(upper, continued, ",
        "select(upper, partner, ",
        "4over6 both",
    ),
    ("families/nvfp4.py", "def nvfp4_rows", "block_max(v)", "block_max((v[0], v[0]))", "nvfp4 rows"),
    ("families/nvfp4.py", "def transform_first", "== 8", "== 0", "rht"),
    ("families/nvfp4.py", "def both_nvfp4", "cuda.syncthreads()", "pass", "nvfp4"),
    ("families/nvfp4.py", "def column_amaxes", "cuda.syncthreads()", "pass", "rht"),
    ("families/hadamard_transform.py", "def hadamard_rows", "== 8", "== 0", "hadamard"),
    ("vectors.py", "def store_packed(both", "words(both[1])", "words(both[0])", "nvfp4 rows"),
    ("stores.py", "def store_block", "both[1], c, d", "both[1], a, b", "stochastic rows"),
    ("stores.py", "def make_record_amax", "outer if by_outer else 0", "0", "row-scaled"),
    ("families/dequantize.py", "def dequantize_rows", "multiply(second, ", "multiply(first, ", "rows back"),
    ("families/dequantize.py", "def guarded", "column + VECTOR", "column", "ragged columns back"),
    ("families/dequantize.py", "def in_one_load", "of_codes(s[2], s[3])", "of_codes(s[0], s[1])", "columns back"),
    ("families/dequantize.py", "def dequantize_turned", "cuda.syncthreads()", "pass", "turned back"),
    ("families/elementwise.py", "def elementwise_gradient", "source.width + column", "column", "halves"),
    ("families/elementwise.py", "def elementwise(", "record(amax(v), out, left)", "pass", "fused current"),
    ("families/elementwise.py", "def decode(", "out.data, at, left)", "out.data, at, I32(16))", "ragged codes back"),
    (
        "families/elementwise.py",
        "def elementwise_gradient",
        "amax_with(amax(act), gate)",
        "amax(act)",
        "current halves",
    ),
    ("reads.py", "def make_zeros_outside", "join(v, ZEROS, left)", "v", "ragged outside"),
    ("reads.py", "def make_zeros_outside", "all_or_none(v, left > 0)", "v", "outside"),
    ("families/row_scaled.py", "def make_dot", "if zeros_stay(values.activation)", "if True", "outside"),
    ("vectors.py", "def make_load_sixteen_codes", 'fmt == "e2m1" and not packed', "False", "codes back"),
    ("vectors.py", "def load_whole", "decode(w[2], w[3])", "decode(w[0], w[1])", "rows back"),
    ("vectors.py", "def load_guarded", "i + VECTOR, I32(", "i, I32(", "ragged rows back"),
    ("vectors.py", "def store_guarded", "left - VECTOR", "left", "ragged rows back"),
    ("directions.py", "def of_block", "outer >> row_bits", "outer", "square back"),
    ("directions.py", "def put_of_row", "(columns - 1)) == 0", "(columns - 1)) == 16", "mxfp8"),
    ("directions.py", "def two(out, outer", "offset(outer, I32(2)", "offset(outer, I32(1)", "row-scaled"),
    ("directions.py", "def put_each", "(edge - 1)) == 0", "(edge - 1)) == 8", "mxfp8 square"),
    ("directions.py", "def scale_swizzled", "block & 3", "block & 1", "mxfp8 swizzled"),
    ("scale_rules.py", "def by_difference", "bits_for_one - bits", "bits_for_one - bits - U32(0x400000)", "block"),
    ("stores.py", "def philox_words", "select(first, a, c)", "select(first, c, a)", "stochastic"),
    ("reads.py", "def _guarded_gated_gradient", "width - column)", "width - column + 1)", "gated"),
    ("hadamard.py", "def across", "other - x", "x - other", "rht"),
    ("gpu.py", "def stored_first", "not job.path.amax_rounded", "False", "fused current"),
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
    """A copy of the package in `folder`, with its bytecode, which serves for every file that stays as it is."""
    written_just_now = shutil.ignore_patterns("*.pyc.*")
    shutil.copytree(ROOT / "cuda_kernels", folder / "cuda_kernels", ignore=written_just_now)
    return folder / "cuda_kernels"


@pytest.mark.full
def test_a_copy_without_a_fault_passes(tmp_path):
    copied(tmp_path)
    passed, said = run(tmp_path, "; ".join(PROBES.values()))
    assert passed, said


@pytest.mark.full
@sampled(("file", "after", "text", "becomes", "probe"), FAULTS, 4, in_all=4, ids=[f"{f[1]}: {f[2]}" for f in FAULTS])
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
