"""Activations and gradients in the simulator, alone, row-scaled and quantized: `refops.oracle` judges every element."""

import numpy as np
import pytest
from simulated_cases import (
    BF16,
    DTYPES,
    FP16,
    FP32,
    RHT,
    SCALINGS,
    assert_same_result,
    check_activation,
    check_fused,
    check_outside,
    check_scaled,
    directions_of,
    granularity,
    integers,
    judge,
    misaligned,
    transposed,
)

import cuda_kernels
import refops
from arrays import assert_same_bits, heavy_tailed
from tiers import sampled

pytestmark = pytest.mark.sweep

ACTIVATIONS = tuple(refops.ACTIVATIONS)
PARAMETERS = {
    "clamped_swiglu": {"limit": 1.5, "alpha": 0.5, "glu_linear_offset": -0.25},
    "situglu": {"beta1": 0.5, "beta2": 3.0},
}
WITH_ROW_SCALES = ("swiglu", "situglu", "clamped_swiglu", "srelu")


@pytest.mark.parametrize("fast", [False, True], ids=["", "fast_math"])
@sampled("name", ACTIVATIONS, 3)
def test_activations_and_gradients(name, fast):
    """Rows of whole vectors, and ragged ones, whose middle lies within a vector."""
    number = ACTIVATIONS.index(name) + fast
    check_activation(name, (5, 32), DTYPES[number % 3], fast=fast)
    check_activation(name, (3, 2, 27), DTYPES[(number + 1) % 3], fast=fast, dbias=False, **PARAMETERS.get(name, {}))


@pytest.mark.parametrize("name", ["gelu", "swiglu", "clamped_swiglu"])
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_output_dtypes(name, dtype, out_dtype):
    check_activation(name, (2, 16), dtype, out_dtype=out_dtype, dbias=False)


@pytest.mark.parametrize("name", ["relu", "reglu"])
@pytest.mark.parametrize("shape", [(9,), (1, 1), (40, 3), (3, 264), (0, 8), (4, 0), (2, 1040)], ids=str)
def test_shapes(name, shape):
    check_activation(name, shape)


@pytest.mark.parametrize("change", [misaligned, transposed])
@pytest.mark.parametrize("name", ["silu", "geglu"])
def test_layouts(name, change):
    check_activation(name, (6, 24), change=change)


@pytest.mark.parametrize("name", ["relu", "reglu"])
def test_column_sums_of_exact_gradients(name):
    """130 rows, more than a band; each sum of integers is exact in any order."""
    dy, x = integers((130, 12)), integers((130, 24 if name == "reglu" else 12), seed=1)
    got = cuda_kernels.activation_grad(name, dy, x, dbias=True)
    for one, expected in zip(got, refops.activation_grad(name, dy, x, dbias=True), strict=True):
        assert_same_bits(one, expected)


@pytest.mark.parametrize("fast", [False, True], ids=["", "fast_math"])
@sampled("name", ACTIVATIONS, 3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values(name, dtype, fast):
    ulp = 8 if fast else 2
    special = np.float32([0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-42, 3e38, -3.4e38, 6e4, 88.8, -104, 0.5, -0.5])
    with np.errstate(over="ignore"):
        a, b = (v.reshape(14, 14).astype(dtype) for v in np.meshgrid(special, special))
    x = np.concatenate([a, b], axis=1) if refops.ACTIVATIONS[name].gated else a
    judge(name, x, cuda_kernels.activation(name, x, fast_math=fast), ulp=ulp)
    judge(f"d{name}", {"dy": b, "x": x}, cuda_kernels.activation_grad(name, b, x, fast_math=fast), ulp=ulp)


# --- outside the matrix -----------------------------------------------------------------------------

#: Parameters of which the function of 0 is another number, or NaN, and an x of which every result is exact.
ODD = (({"limit": -2.0}, -100), ({"alpha": np.inf}, 1), ({"alpha": -np.inf}, 1), ({"glu_linear_offset": np.inf}, 1))


@pytest.mark.parametrize("width", [3, 8, 40])
@pytest.mark.parametrize(("params", "x"), ODD, ids=str)
def test_results_outside_the_matrix_count_in_no_sum(params, x, width):
    """Threads beside the matrix compute on zeros: no sum of a row or of columns may notice what they get."""
    check_outside(width, x, **params)


@pytest.mark.parametrize(
    ("scaling", "shape"),
    [
        *((name, (5, width)) for name in ("current", "delayed-e5m2") for width in (3, 8, 40)),
        *((name, (33, 32)) for name in ("mxfp8", "mxfp8-2d")),
        ("block-1x128", (5, 40)),
        ("nvfp4-1x16", (16, 48)),
    ],
    ids=str,
)
@sampled(("params", "x"), ODD, 4, ids=str)
def test_results_outside_the_matrix_count_in_no_scale(params, x, scaling, shape):
    """Nor may an amax: of values that are quantized rowwise, transposed, both, with sums of columns."""
    name, scaling, (rows, width) = "clamped_swiglu", SCALINGS[scaling], shape
    x, dy = np.full((rows, 2 * width), x, BF16), np.ones(shape, BF16)
    for rowwise, columnwise in directions_of(scaling):
        flags = {"rowwise": rowwise, "columnwise": columnwise, **params}
        got, expected = (m.activation_quantize(name, x, scaling, **flags) for m in (cuda_kernels, refops))
        assert_same_result(got, expected)
        calls = [m.activation_grad_quantize(name, dy, x, scaling, dbias=True, **flags) for m in (cuda_kernels, refops)]
        assert_same_result(calls[0][0], calls[1][0])
        assert_same_bits(calls[0][1], calls[1][1], "dbias")


# --- row scales -------------------------------------------------------------------------------------


@sampled("name", WITH_ROW_SCALES, 2)
@pytest.mark.parametrize("number", range(9))
def test_scaled(name, number):
    """Dtypes of x, of dy, of the scales and of the result; contiguous and interleaved halves."""
    x, other, gated = DTYPES[number % 3], DTYPES[number // 3], name != "srelu"
    check_scaled(
        name,
        (3, 64) if number % 2 == 0 else (2, 2, 27),
        x,
        dy_dtype=other,
        scales_dtype=DTYPES[(number + 1) % 3],
        out_dtype=None if number < 3 else other,
        interleave=32 if gated and number % 2 == 0 else 0,
        **(PARAMETERS.get(name, {}) if number == 4 else {}),
    )


@pytest.mark.parametrize("name", WITH_ROW_SCALES)
def test_scaled_shapes(name):
    for shape in ((1, 264), (9, 1), (0, 8), (4, 0)):
        check_scaled(name, shape, FP32)


# --- fused with a quantization ----------------------------------------------------------------------


@sampled("name", SCALINGS | RHT, 16)
def test_fused_with_every_scaling(name):
    scaling, number = (SCALINGS | RHT)[name], list(SCALINGS | RHT).index(name)
    unit, directions = granularity(scaling), directions_of(scaling)
    shape = (33, 32) if unit == 1 else (32, 32)
    for i, activation in enumerate(("swiglu", "silu")):
        check_fused(activation, shape, scaling, *directions[-1 - i % len(directions)], DTYPES[(number + i) % 3])


@sampled("name", ACTIVATIONS, 4)
def test_every_activation_fused(name):
    check_fused(name, (4, 32), refops.MXFP8Scaling(refops.E4M3), True, False, **PARAMETERS.get(name, {}))
    check_fused(name, (5, 27), refops.DelayedScaling(refops.E5M2, 4.0), True, False, FP32, dbias=False)


@sampled("name", ["delayed-e5m2", "current", "block-1x128", "nvfp4-1x16", "mxfp8"], 3)
def test_fused_layouts(name):
    """Gated gradients of a misaligned tensor, and (where the rule allows) whose middle lies within a vector."""
    check_fused("swiglu", (16, 32), SCALINGS[name], True, True, FP16, change=misaligned)
    if granularity(SCALINGS[name]) == 1 and name != "mxfp8":
        check_fused("geglu", (7, 13), SCALINGS[name], True, True, BF16)


@pytest.mark.parametrize("columnwise", [False, True])
@sampled("name", ["delayed-scale-1", "mxfp8", "mxfp8-2d", "nvfp4-1x16", "nvfp4-mae-2d"], 5)
def test_exact_fused_results(name, columnwise):
    """relu and its gradient are exact, so every bit is known, sums too."""
    shape, scaling = ((130, 40) if granularity(SCALINGS[name]) == 1 else (32, 48)), SCALINGS[name]
    dy, x = integers(shape), integers(shape, seed=1)
    flags = {"columnwise": columnwise, "dbias": True}
    q, dbias = cuda_kernels.activation_grad_quantize("relu", dy, x, scaling, **flags)
    expected, sums = refops.activation_grad_quantize("relu", dy, x, scaling, **flags)
    assert_same_bits(dbias, sums)
    for array, values in q.arrays.items():
        assert_same_bits(values, getattr(expected, array), array)


@pytest.mark.full
def test_fused_threads_in_any_order(backward):
    check_fused("swiglu", (33, 32), refops.MXFP8Scaling(refops.E4M3), True, True)
    check_fused("geglu", (33, 27), refops.DelayedScaling(refops.E4M3), True, True)
    check_fused("silu", (16, 32), SCALINGS["nvfp4-1x16"], True, True)
    check_scaled("swiglu", (9, 64), interleave=32)
    check_activation("situglu", (9, 27))
    x = heavy_tailed((5, 40))
    assert_same_bits(cuda_kernels.amax(x), np.abs(x).max().astype(np.float32)[None])
