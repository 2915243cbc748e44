"""Inputs, settings and comparisons that the tests of the simulated kernels share; also the probes of seeded faults."""

import ml_dtypes
import numpy as np

import cuda_kernels
import refops
from arrays import assert_same_bits, assert_same_quantized, heavy_tailed
from refops import E2M3, E3M2, E4M3, E5M2, oracle
from refops.survey import SCALINGS as NAMED

F = np.float32
FP32, FP16, BF16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
DTYPES = (FP32, FP16, BF16)
#: (rowwise, columnwise)
DIRECTIONS = ((True, False), (False, True), (True, True))

#: Every branch of every scaling; RHT is apart, because its sums are exact for some inputs only.
SCALINGS = {name: row.scaling for name, row in NAMED.items() if "rht" not in name} | {
    "delayed-e5m2": refops.DelayedScaling(E5M2, 12.5),
    "current-epsilon": refops.CurrentScaling(E5M2, power_2_scale=True, amax_epsilon=3.0),
    "block-1x128-f32": refops.BlockScaling(E4M3, 1, power_2_scale=False, amax_epsilon=1e-3),
    "block-1x128-e5m2": refops.BlockScaling(E5M2, 1, amax_epsilon=2.0),
    "block-128x128-f32-e5m2": refops.BlockScaling(E5M2, 2, power_2_scale=False, amax_epsilon=1e-3),
    "mxfp8-2d": refops.MXFP8Scaling(E4M3, two_d=True),
    "mxfp8-even": refops.MXFP8Scaling(E4M3, scale_rounding="even"),
    "mxfp8-ceil": refops.MXFP8Scaling(E5M2, scale_rounding="ceil_ocp"),
    "mxfp6-e3m2": refops.MXFP8Scaling(E3M2),
    "mxfp6-e2m3-2d": refops.MXFP8Scaling(E2M3, two_d=True, scale_rounding="floor"),
    "nvfp4-mse": refops.NVFP4Scaling(four_over_six="mse"),
    "nvfp4-mae-2d": refops.NVFP4Scaling(four_over_six="mae", two_d=True),
    "nvfp4-mse-2d": refops.NVFP4Scaling(four_over_six="mse", e4m3_max=256, two_d=True),
    "nvfp4-mae-fast": refops.NVFP4Scaling(four_over_six="mae", fast_error=True),
    "nvfp4-mse-fast-2d": refops.NVFP4Scaling(four_over_six="mse", e4m3_max=256, two_d=True, fast_error=True),
    "nvfp4-sr-2d": refops.NVFP4Scaling(stochastic_rounding=True, two_d=True, seed=7, offset=2**40 + 1),
    "nvfp4-row-4over6": refops.NVFP4Scaling(row_scaled=True, four_over_six="mae"),
}
RHT = {
    "nvfp4-rht": refops.NVFP4Scaling(rht=True),
    "nvfp4-rht-signs": refops.NVFP4Scaling(rht=True, sign_mask=0x8001),
    "nvfp4-rht-sr": refops.NVFP4Scaling(rht=True, stochastic_rounding=True, seed=2**63 + 7),
}


def directions_of(scaling):
    """The directions that a scaling allows."""
    return DIRECTIONS[:1] if scaling.only_rowwise else DIRECTIONS


def granularity(scaling):
    """The numbers that must divide M and K, with both directions."""
    return scaling.layout.columnwise_multiple


def integers(shape, dtype=BF16, seed=0):
    """Small multiples of 1/4: every sum of them is exact."""
    return (np.random.default_rng(seed).integers(-16, 17, shape) / 4).astype(dtype)


def misaligned(x):
    """The same values from an address that no 16-byte access may use; contiguous."""
    buffer = np.zeros(x.size + 1 + 16, x.dtype)
    start = -buffer.ctypes.data // x.itemsize % (16 // x.itemsize) + 1
    buffer[start : start + x.size] = x.reshape(-1)
    return buffer[start : start + x.size].reshape(x.shape)


def strided(x):
    """The same values at every second element of a row."""
    return np.repeat(x, 2, axis=-1)[..., ::2]


def transposed(x):
    """The same values, columns contiguous."""
    return np.asfortranarray(x)


def assert_same_result(q, expected):
    """Every array of two quantized tensors has the same bits, padding included."""
    assert_same_quantized(q, expected)
    assert (q.shape, q.scaling, np.dtype(q.to_host().dtype)) == (expected.shape, expected.scaling, expected.dtype)


def check_quantize(x, scaling, rowwise=True, columnwise=False, **options):
    """`quantize` in the simulator has the reference's bits."""
    flags = {"rowwise": rowwise, "columnwise": columnwise, **options}
    got = cuda_kernels.quantize(x, scaling, **flags)
    swizzled = flags.pop("swizzled_scales", False)
    expected = refops.quantize(x, scaling, **flags)
    expected = expected.swizzled() if swizzled else expected
    if flags.get("dbias"):
        assert_same_bits(got[1], expected[1], "dbias")
        got, expected = got[0], expected[0]
    assert_same_result(got, expected)


def check_dequantize(x, scaling, columnwise=False):
    """`dequantize` of one direction in the simulator has the reference's bits."""
    flags = {"rowwise": not columnwise, "columnwise": columnwise}
    got = cuda_kernels.dequantize(cuda_kernels.quantize(x, scaling, **flags))
    assert_same_bits(got, refops.dequantize(refops.quantize(x, scaling, **flags)))


def check_reordered(x, scaling):
    """Scales of both copies, moved into GEMM order in the simulator, have the reference's bits."""
    flags = {"rowwise": True, "columnwise": True}
    assert_same_result(
        cuda_kernels.quantize(x, scaling, **flags).swizzled(), refops.quantize(x, scaling, **flags).swizzled()
    )


def check_update(shape):
    """`update_delayed_scale` of a history of a shape has the reference's bits in the simulator."""
    history, scale = np.abs(heavy_tailed(shape, FP32)), np.ones(shape[1:], FP32)
    for algorithm in ("max", "most_recent"):
        got = cuda_kernels.update_delayed_scale(history, scale, refops.E4M3, algorithm=algorithm)
        expected = refops.update_delayed_scale(history, scale, refops.E4M3, algorithm=algorithm)
        for array, other in zip(got, expected, strict=True):
            assert_same_bits(array, other)


def check_codes(shape, fmt):
    """`decode` in the simulator has the reference's bits, of codes below 16, which are no NaN."""
    codes = (np.arange(np.prod(shape)) % 16).astype(np.uint8).reshape(shape)
    assert_same_bits(cuda_kernels.decode(codes, fmt), refops.decode(codes, fmt))


def judge(op, inputs, outputs, **options):
    """Raise unless the oracle accepts the outputs."""
    oracle.check(op, inputs, outputs, **options).raise_for_mismatch()


def gated(name):
    """Whether an activation has a gate."""
    return refops.ACTIVATIONS[name].gated


def front(name, shape, dtype=BF16, seed=0):
    """(dy, x) of an activation whose output has this shape."""
    *leading, h = shape
    return heavy_tailed(shape, dtype, seed + 1), heavy_tailed((*leading, 2 * h if gated(name) else h), dtype, seed)


def check_activation(name, shape, dtype=BF16, *, out_dtype=None, dbias=True, change=lambda x: x, fast=False, **params):
    """An activation and its gradient (with column sums) lie in the oracle's enclosure: fast ones in that of 8 ulp."""
    dy, x = (change(v) for v in front(name, shape, dtype))
    ulp = 8 if fast else 2
    y = cuda_kernels.activation(name, x, out_dtype=out_dtype, fast_math=fast, **params)
    judge(name, x, y, params=params, ulp=ulp)
    dx = cuda_kernels.activation_grad(name, dy, x, out_dtype=out_dtype, dbias=dbias, fast_math=fast, **params)
    outputs = dict(zip(("dx", "dbias"), dx, strict=True)) if dbias else {"dx": dx}
    judge(f"d{name}", {"dy": dy, "x": x}, outputs, params=params, ulp=ulp)
    expected = np.dtype(out_dtype or dtype)
    assert y.dtype == expected and outputs["dx"].dtype == expected


def check_outside(width, x, **params):
    """clamped_swiglu with parameters of which f(0) is not 0: gradients and their sums have the reference's bits."""
    name, x, dy = "clamped_swiglu", np.full((5, 2 * width), x, BF16), np.ones((5, width), BF16)
    scales = np.array([1, 2, 0, -1, np.inf], F)
    for call in (
        lambda module: module.activation_grad(name, dy, x, dbias=True, **params),
        lambda module: module.scaled_activation_grad(name, dy, x, scales, **params),
    ):
        for got, expected in zip(call(cuda_kernels), call(refops), strict=True):
            assert_same_bits(got, expected)


def check_fused(name, shape, scaling, rowwise, columnwise, dtype=BF16, *, dbias=True, change=lambda x: x, **params):
    """An activation and its gradient, quantized in the same call, lie in the oracle's enclosure."""
    dy, x = (change(v) for v in front(name, shape, dtype))
    flags = {"rowwise": rowwise, "columnwise": columnwise}
    q = cuda_kernels.activation_quantize(name, x, scaling, **flags, **params)
    judge(name, x, q.arrays, scaling=scaling, params=params)
    got = cuda_kernels.activation_grad_quantize(name, dy, x, scaling, dbias=dbias, **flags, **params)
    outputs = got[0].arrays | {"dbias": got[1]} if dbias else got.arrays
    judge(f"d{name}", {"dy": dy, "x": x}, outputs, scaling=scaling, params=params)


def check_scaled(name, shape, dtype=BF16, *, dy_dtype=None, scales_dtype=FP32, out_dtype=None, interleave=0, **params):
    """A row-scaled activation and its gradients lie in the oracle's enclosure."""
    dy, x = front(name, shape, dtype)
    dy = dy.astype(dy_dtype or dtype)
    scales = heavy_tailed(shape[:-1], scales_dtype, seed=5)
    options = {"glu_interleave_size": interleave, "out_dtype": out_dtype, **params}
    inputs = {"x": x, "row_scales": scales}
    told = {"glu_interleave_size": interleave, **params}
    judge(f"scaled_{name}", inputs, cuda_kernels.scaled_activation(name, x, scales, **options), params=told)
    dx, drow = cuda_kernels.scaled_activation_grad(name, dy, x, scales, **options)
    judge(f"scaled_d{name}", {**inputs, "dy": dy}, {"dx": dx, "drow_scales": drow}, params=told)
    assert drow.dtype == scales.dtype and drow.shape == scales.shape
