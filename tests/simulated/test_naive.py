"""The teaching kernels: bits of `refops` in the simulator; PTX for a GPU; short enough for a slide."""

import inspect
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from simulated_cases import BF16, F, integers, judge

import refops
from arrays import assert_same_bits, heavy_tailed
from cuda_kernels import naive
from cuda_kernels.simulator import Pointer, launch
from refops import E4M3


def run(name, order="forward", **arrays):
    """Run a kernel of `NAIVE` on arrays by argument name; `rows` and `columns` by value."""
    row = naive.NAIVE[name]
    values = []
    for argument, (kind, scalar) in row.arguments.items():
        value = arrays[argument]
        values.append(scalar(value) if kind == "scalar" else Pointer(value.reshape(-1).view(scalar)))
    launch(row.kernel, *row.shape(arrays["rows"], arrays["columns"]), values, order=order)


def empty(shape, dtype=np.uint8):
    """What nobody writes shows."""
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[...] = 0xA5
    return array


@pytest.fixture(params=["forward", "backward"])
def order(request):
    """The order of the threads."""
    return request.param


def test_swiglu(order):
    x, y = heavy_tailed((5, 128)), empty((5, 64), BF16)
    run("swiglu naive", order, x=x, y=y, rows=5, columns=64)
    judge("swiglu", x, y)


def test_an_exact_activation():
    x, y = heavy_tailed((5, 128)), empty((5, 64), BF16)
    arguments = [Pointer(x.reshape(-1).view(np.uint16)), Pointer(y.reshape(-1).view(np.uint16)), 5, 64]
    launch(naive.make_gated("reglu"), (2,), (256,), arguments)
    assert_same_bits(y, refops.activation("reglu", x))


@pytest.mark.parametrize("name", ["mxfp8 naive", "mxfp8 coalesced"])
def test_mxfp8(name, order):
    x, expected = heavy_tailed((9, 128)), refops.quantize(heavy_tailed((9, 128)), refops.MXFP8Scaling(E4M3))
    codes, scales = empty(x.shape), empty((9, 4))
    run(name, order, x=x, codes=codes, scales=scales, rows=9, columns=128)
    assert_same_bits(codes, expected.rowwise_data)
    assert_same_bits(scales, np.ascontiguousarray(expected.rowwise_scale_inv[: len(scales)]).view(np.uint8))


@pytest.mark.parametrize("name", ["blocks naive", "blocks coalesced"])
def test_blocks(name, order):
    x = heavy_tailed((9, 256))
    expected = refops.quantize(x, refops.BlockScaling(E4M3, 1, power_2_scale=False))
    codes, scales = empty(x.shape), empty((2, 9), F)
    run(name, order, x=x, codes=codes, scales=scales, rows=9, columns=256)
    assert_same_bits(codes, expected.rowwise_data)
    assert_same_bits(scales, np.ascontiguousarray(expected.rowwise_scale_inv[:, :9]))


@pytest.mark.parametrize("name", ["squares naive", "squares coalesced"])
def test_squares(name, order):
    x = heavy_tailed((130, 256))
    expected = refops.quantize(x, refops.BlockScaling(E4M3, 2, power_2_scale=False), columnwise=True)
    rowwise, columnwise, scales = empty(x.shape), empty((256, 130)), empty((2, 2), F)
    run(name, order, x=x, rowwise=rowwise, columnwise=columnwise, scales=scales, rows=130, columns=256)
    assert_same_bits(rowwise, expected.rowwise_data)
    assert_same_bits(columnwise, expected.columnwise_data)
    assert_same_bits(scales, np.ascontiguousarray(expected.rowwise_scale_inv[:2, :2]))


def test_four_over_six(order):
    x = heavy_tailed((16, 64))
    expected = refops.quantize(x, refops.NVFP4Scaling(four_over_six="mae"))
    codes, scales = empty((16, 32)), empty((16, 4))
    run("nvfp4 4over6 naive", order, x=x, amax=expected.amax_rowwise, codes=codes, scales=scales, rows=16, columns=64)
    assert_same_bits(codes, expected.rowwise_data)
    assert_same_bits(scales, np.ascontiguousarray(expected.rowwise_scale_inv[: len(scales)]).view(np.uint8))


@pytest.mark.parametrize("name", ["fp8 transpose naive", "fp8 transpose coalesced"])
def test_fp8_transpose(name, order):
    x = heavy_tailed((40, 64))
    expected = refops.quantize(x, refops.DelayedScaling(E4M3, 3.0), columnwise=True)
    rowwise, columnwise = empty(x.shape), empty((64, 40))
    arrays = {"x": x, "scale": F([3]), "rowwise": rowwise, "columnwise": columnwise}
    run(name, order, **arrays, rows=40, columns=64)
    assert_same_bits(rowwise, expected.rowwise_data)
    assert_same_bits(columnwise, expected.columnwise_data)


@pytest.mark.parametrize("name", ["nvfp4 naive", "nvfp4 coalesced"])
def test_nvfp4(name, order):
    x = heavy_tailed((16, 64))
    expected = refops.quantize(x, refops.NVFP4Scaling())
    encode = F(448 * 6) / expected.amax_rowwise[0]
    codes, scales = empty((16, 32)), empty((16, 4))
    arrays = {"x": x, "tensor_scales": np.array([encode, F(1) / encode], F), "codes": codes, "scales": scales}
    run(name, order, **arrays, rows=16, columns=64)
    assert_same_bits(codes, expected.rowwise_data)
    assert_same_bits(scales, np.ascontiguousarray(expected.rowwise_scale_inv[: len(scales)]).view(np.uint8))


def test_hadamard(order):
    """Of integers, whose sums are exact in any order."""
    x, y = integers((9, 64)), empty((9, 64), BF16)
    run("hadamard naive", order, x=x, y=y, rows=9, columns=64)
    assert_same_bits(y, refops.hadamard_transform(x))


@pytest.mark.parametrize("name", ["dbias naive", "dbias coalesced"])
def test_dbias(name, order):
    x, sums = integers((70, 64)), empty((64,), BF16)
    run(name, order, x=x, sums=sums, rows=70, columns=64)
    assert_same_bits(sums, refops.quantize(x, refops.DelayedScaling(E4M3), dbias=True)[1])


@pytest.mark.parametrize("name", ["scaled gradient naive", "scaled gradient coalesced"])
def test_scaled_gradient(name, order):
    dy, x, scales = heavy_tailed((9, 64)), heavy_tailed((9, 128), seed=1), heavy_tailed((9,), F, seed=2)
    dx, drow_scales = empty(x.shape, BF16), empty((9,), F)
    arrays = {"dy": dy, "x": x, "row_scales": scales, "dx": dx, "drow_scales": drow_scales}
    run(name, order, **arrays, rows=9, columns=64)
    inputs = {"dy": dy, "x": x, "row_scales": scales}
    judge("scaled_dswiglu", inputs, {"dx": dx, "drow_scales": drow_scales})


def test_dequantize(order):
    """Every code and every scale but NaN."""
    q = refops.quantize(heavy_tailed((128, 128)), refops.MXFP8Scaling(E4M3))
    q.rowwise_data[...] = np.arange(128 * 128).reshape(128, 128) * 37 % 127 + np.arange(128)[:, None] % 2 * 128
    q.rowwise_scale_inv[...] = np.arange(q.rowwise_scale_inv.size).reshape(q.rowwise_scale_inv.shape) % 255
    y = empty((128, 128), BF16)
    scales = np.ascontiguousarray(q.rowwise_scale_inv).view(np.uint8)
    run("dequantize naive", order, codes=q.rowwise_data, scales=scales, y=y, rows=128, columns=128)
    assert_same_bits(y, refops.dequantize(q, dtype=BF16))


@pytest.mark.parametrize("name", naive.NAIVE)
def test_each_fits_on_a_slide(name):
    """Twenty lines of code, docstring apart; a coalesced kernel follows the naive one of its family."""
    lines = inspect.getsource(naive.NAIVE[name].kernel).splitlines()
    quotes = [i for i, line in enumerate(lines) if '"""' in line]
    docstring = quotes[-1] - quotes[0] + 1 if quotes else 0
    assert len(lines) - docstring <= 20
    family, kind = name.rsplit(" ", 1)
    names = list(naive.NAIVE)
    assert kind == "naive" or names.index(f"{family} naive") == names.index(name) - 1


COMPILE = """
import json
from cuda_kernels.compile_report import MissingToolError, measure, problems, to_ptx
from cuda_kernels.launch import numba_type
from cuda_kernels.naive import NAIVE
found = {}
try:
    for name, row in NAIVE.items():
        ptx = to_ptx(row.kernel, tuple(numba_type(one) for one in row.arguments.values()), (9, 0))
        found[name] = problems(measure(ptx, (9, 0)))
except MissingToolError as error:
    found = {"missing": str(error)}
print(json.dumps(found))
"""


@pytest.mark.full
def test_they_compile_without_spills_or_float64():
    environment = {k: v for k, v in os.environ.items() if k != "NUMBA_ENABLE_CUDASIM"}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    if "missing" in found:
        pytest.skip(found["missing"])
    assert found == {name: [] for name in naive.NAIVE}
