"""Matrix products: against float64, one rounding for everything, quantized operands exactly as what they stand for."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from one_rounding import assert_one_rounding

import refops
from fuser import dispatch, gemm
from fuser.dispatch import as_numpy, as_torch, backend

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = ("TN", "NN", "NT")
SCALINGS = (
    refops.DelayedScaling(refops.E4M3, 20.0),
    refops.CurrentScaling(refops.E5M2),
    refops.BlockScaling(refops.E4M3, 1),
    refops.BlockScaling(refops.E4M3, 2),
    refops.MXFP8Scaling(refops.E4M3),
    refops.NVFP4Scaling(),
    refops.NVFP4Scaling(rht=True),
)


def ids(value):
    return repr(value) if not isinstance(value, torch.dtype) else str(value).removeprefix("torch.")


def sample(shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(layout, dtype, m=48, k=64, n=32):
    """a and b whose product is (m, n) with k terms."""
    a = sample((n, k) if layout[0] == "T" else (k, n), dtype)
    b = sample((m, k) if layout[1] == "N" else (k, m), dtype, 1)
    return a, b


def exact_product(a, b, layout):
    """float64 op(b) op(a), and the same of magnitudes."""
    a, b = a.double(), b.double()
    a, b = (a.t() if layout[0] == "T" else a), (b.t() if layout[1] == "T" else b)
    return b @ a, b.abs() @ a.abs()


@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_plain_product(layout, dtype):
    a, b = operands(layout, dtype)
    exact, magnitude = exact_product(a, b, layout)
    assert_one_rounding(gemm.gemm(a, b, layout=layout), exact, magnitude)
    for out_dtype in DTYPES:
        y = gemm.gemm(a, b, layout=layout, out_dtype=out_dtype)
        assert y.dtype is out_dtype
        assert_one_rounding(y, exact, magnitude)


@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_alpha_bias_and_accumulation_are_rounded_together(layout, dtype):
    a, b = operands(layout, dtype)
    product, magnitude = exact_product(a, b, layout)
    bias, start = sample(product.shape[-1:], dtype, 2), sample(product.shape, dtype, 3) * 8
    for alpha in (1.0, -0.7):
        y = gemm.gemm(a, b, layout=layout, bias=bias, alpha=alpha)
        assert_one_rounding(y, alpha * product + bias.double(), magnitude + bias.abs().double())
    for beta in (None, 1.0, 0.25):
        out = start.clone()
        y = gemm.gemm(a, b, layout=layout, alpha=0.5, bias=bias, beta=beta, out=out, accumulate=True)
        exact = 0.5 * product + bias.double() + (1.0 if beta is None else beta) * start.double()
        assert y is out
        assert_one_rounding(out, exact, magnitude + bias.abs().double() + start.abs().double())
    out = torch.full_like(start, float("nan"))
    assert gemm.gemm(a, b, layout=layout, out=out) is out
    assert torch.equal(out, gemm.gemm(a, b, layout=layout))


def test_rounding_twice_would_be_noticed():
    a, b = operands("TN", torch.bfloat16, k=512)
    bias = sample((32,), torch.bfloat16, 2) * 20
    exact, magnitude = exact_product(a, b, "TN")
    twice = gemm.gemm(a, b) + bias
    with pytest.raises(AssertionError):
        assert_one_rounding(twice, exact + bias.double(), magnitude + bias.abs().double())


@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
def test_linear(dtype):
    x, w, dy = sample((2, 3, 16), dtype), sample((8, 16), dtype, 1), sample((2, 3, 8), dtype, 2)
    flat = [t.reshape(6, -1) for t in (x, dy)]
    y, dx, dw = gemm.linear_forward(x, w), gemm.linear_dgrad(dy, w), gemm.linear_wgrad(dy, x)
    assert y.shape == dy.shape and dx.shape == x.shape and dw.shape == w.shape
    assert_one_rounding(y.reshape(6, 8), *exact_product(w, flat[0], "TN"))
    assert_one_rounding(dx.reshape(6, 16), *exact_product(w, flat[1], "NN"))
    assert_one_rounding(dw, *exact_product(*flat, "NT"))
    main_grad = torch.ones(8, 16)
    gemm.linear_wgrad(dy, x, out=main_grad, accumulate=True)
    torch.testing.assert_close(main_grad.double(), 1 + exact_product(*flat, "NT")[0], rtol=2e-6, atol=1e-5)


def test_one_dimension_empty_and_strided():
    w = sample((8, 16), torch.bfloat16)
    x = sample((16,), torch.bfloat16, 1)
    assert torch.equal(gemm.linear_forward(x, w), gemm.linear_forward(x[None], w)[0])
    assert gemm.linear_wgrad(gemm.linear_forward(x, w), x).shape == (8, 16)
    empty = torch.zeros(0, 16)
    assert gemm.linear_forward(empty, w.float()).shape == (0, 8)
    assert not gemm.linear_wgrad(torch.zeros(0, 8), empty).any()
    bias = torch.arange(8.0)
    assert torch.equal(gemm.linear_forward(torch.zeros(3, 0), torch.zeros(8, 0), bias=bias), bias.expand(3, 8))
    wide = sample((16, 24), torch.float32).t()[::2]
    assert torch.equal(gemm.linear_forward(wide, w.float()), gemm.linear_forward(wide.contiguous(), w.float()))
    out = torch.zeros(24, 8).t()
    result = gemm.linear_wgrad(sample((5, 8), torch.float32), sample((5, 24), torch.float32, 1), out=out)
    assert result is out and out.any()


# --- quantized operands ---------------------------------------------------------------------------


def quantized(tensor, scaling, *, rowwise=True, columnwise=True):
    return dispatch.quantize(tensor, scaling, rowwise=rowwise, columnwise=columnwise)


@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
@pytest.mark.parametrize("scaling", SCALINGS, ids=ids)
def test_quantized_product_is_that_of_the_dequantized_operands(scaling, dtype):
    for layout in LAYOUTS:
        a, b = operands(layout, dtype)
        qa, qb = quantized(a, scaling), quantized(b, scaling)
        read_a, read_b = layout[0] == "N", layout[1] == "T"  # the columnwise copies
        values_a = dispatch.dequantize(qa, columnwise=read_a)
        values_b = dispatch.dequantize(qb, columnwise=read_b)
        exact, magnitude = exact_product(values_a, values_b, layout)
        # backend("reference") dequantizes with refops; the Hadamard transform's last bits may differ
        for which in ("auto", "reference"):
            with backend(which):
                y = gemm.gemm(qa, qb, layout=layout)
                assert y.dtype is dtype
                assert_one_rounding(y, exact, magnitude)
                if not getattr(scaling, "rht", False):
                    assert torch.equal(y, gemm.gemm(values_a, values_b, layout=layout, out_dtype=dtype))
                # one operand alone, a bias
                mixed = gemm.gemm(a, qb, layout=layout, bias=torch.ones(32))
                exact_mixed, magnitude_mixed = exact_product(a, values_b, layout)
                assert_one_rounding(mixed, exact_mixed + 1, magnitude_mixed + 1)


def test_each_product_reads_its_copies():
    scaling = refops.MXFP8Scaling(refops.E4M3)
    x, w, dy = sample((32, 64), torch.float32), sample((96, 64), torch.float32, 1), sample((32, 96), torch.float32, 2)
    rows = [quantized(t, scaling, columnwise=False) for t in (x, w, dy)]
    columns = [quantized(t, scaling, rowwise=False) for t in (x, w, dy)]
    values = [dispatch.dequantize(q, columnwise=True) for q in columns]
    assert torch.equal(gemm.linear_forward(rows[0], rows[1]), gemm.linear_forward(*map(dispatch.dequantize, rows[:2])))
    assert torch.equal(
        gemm.linear_dgrad(rows[2], columns[1]), gemm.linear_dgrad(dispatch.dequantize(rows[2]), values[1])
    )
    assert torch.equal(gemm.linear_wgrad(columns[2], columns[0]), gemm.linear_wgrad(values[2], values[0]))
    for wrong, text in (
        (lambda: gemm.linear_forward(columns[0], rows[1]), "b must hold a rowwise copy .* MXFP8Scaling"),
        (lambda: gemm.linear_forward(rows[0], columns[1]), "a must hold a rowwise copy"),
        (lambda: gemm.linear_dgrad(rows[2], rows[1]), "a must hold a columnwise copy"),
        (lambda: gemm.linear_wgrad(rows[2], columns[0]), "b must hold a columnwise copy"),
    ):
        with pytest.raises(ValueError, match=text):
            wrong()


@pytest.mark.parametrize("scaling", SCALINGS[:2], ids=ids)
def test_per_tensor_fp8_reads_either_copy(scaling):
    x, w = sample((16, 32), torch.bfloat16), sample((48, 32), torch.bfloat16, 1)
    both = quantized(x, scaling), quantized(w, scaling)
    expected = gemm.linear_forward(*both)
    for options in ({"columnwise": False}, {"rowwise": False}):
        one = quantized(x, scaling, **options), quantized(w, scaling, **options)
        assert torch.equal(gemm.linear_forward(*one), expected)
        assert torch.equal(gemm.linear_wgrad(*one[:1], one[0]), gemm.linear_wgrad(both[0], both[0]))


def test_storages_and_quantized_tensors():
    x, w = sample((16, 32), torch.bfloat16), sample((48, 32), torch.bfloat16, 1)
    scaling = refops.CurrentScaling(refops.E4M3)
    qx, qw = quantized(x, scaling), quantized(w, scaling)
    expected = gemm.linear_forward(qx, qw)
    assert torch.equal(gemm.linear_forward(SimpleNamespace(buffers=qx), SimpleNamespace(buffers=qw)), expected)
    quantizers = pytest.importorskip("fuser.quantization.quantizers")
    quantizer = quantizers.Float8CurrentScalingQuantizer(fp8_dtype=refops.E4M3)
    tensors = quantizer(x), quantizer(w)
    assert torch.equal(gemm.linear_forward(*tensors), expected)
    quantizer.internal = True
    assert torch.equal(gemm.linear_forward(quantizer(x), tensors[1]), expected)


# --- native products ------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scaled_mm_of_fp8_is_the_dequantized_product(layout):
    """torch._scaled_mm on the CPU: the codes, scales and transposes that a GPU would get."""
    a, b = operands(layout, torch.bfloat16)
    for options in ({}, {"columnwise": False}, {"rowwise": False}):
        qa = quantized(a, refops.CurrentScaling(refops.E4M3), **options)
        qb = quantized(b, refops.DelayedScaling(refops.E4M3, 30.0), **options)
        exact, magnitude = exact_product(dispatch.dequantize(qa), dispatch.dequantize(qb), layout)
        for bias, alpha in ((None, 1.0), (torch.ones(32), 0.5)):
            y = gemm._native_product(qa, qb, layout, torch.float32, bias, alpha)
            expected = alpha * exact + (0 if bias is None else 1)
            assert_one_rounding(y, expected, magnitude + 1)


@pytest.mark.parametrize("transposed", [False, True])
def test_mxfp8_codes_and_scales_for_tensor_cores(transposed):
    x = sample((160, 96), torch.bfloat16)
    buffers = quantized(x, refops.MXFP8Scaling(refops.E4M3))
    codes, scales = gemm._k_major_codes(buffers, transposed)
    source = x.t().contiguous() if transposed else x
    expected = refops.quantize(as_numpy(source), refops.MXFP8Scaling(refops.E4M3)).swizzled()
    assert codes.is_contiguous() and scales.is_contiguous() and scales.dtype is torch.float8_e8m0fnu
    assert torch.equal(codes.view(torch.uint8), as_torch(expected.rowwise_data))
    assert np.array_equal(scales.view(torch.uint8).numpy(), expected.rowwise_scale_inv.reshape(-1))


def test_what_keeps_a_product_from_running_natively():
    x = sample((32, 64), torch.float32)
    per_tensor = {fmt: quantized(x, refops.CurrentScaling(fmt)) for fmt in (refops.E4M3, refops.E5M2)}
    mx, block = quantized(x, refops.MXFP8Scaling(refops.E4M3)), quantized(x, refops.BlockScaling(refops.E4M3))
    e4m3, e5m2 = per_tensor.values()
    assert gemm.native_obstacle(x, e4m3) == "an operand is not quantized"
    assert gemm.native_obstacle(e4m3, e4m3) == "an operand is on a CPU"
    hopper, blackwell, ampere = (9, 0), (10, 0), (8, 0)
    assert gemm._format_obstacle(e4m3, e4m3, hopper) is None
    assert gemm._format_obstacle(e4m3, e5m2, (8, 9)) is None
    assert gemm._format_obstacle(mx, mx, blackwell) is None
    assert "capability 8.9; the GPU has 8.0" in gemm._format_obstacle(e4m3, e4m3, ampere)
    assert "capability 10.0; the GPU has 9.0" in gemm._format_obstacle(mx, mx, hopper)
    assert "E5M2 and E5M2" in gemm._format_obstacle(e5m2, e5m2, hopper)
    assert "CurrentScaling and MXFP8Scaling" in gemm._format_obstacle(e4m3, mx, blackwell)
    assert "BlockScaling" in gemm._format_obstacle(block, block, blackwell)
    assert gemm._size_obstacle(e4m3, e4m3, "TN") is None
    odd = quantized(sample((32, 24), torch.float32), refops.CurrentScaling(refops.E4M3))
    assert "multiple of 16" in gemm._size_obstacle(odd, odd, "TN")
    empty = dataclasses.replace(e4m3, shape=(0, 64))
    assert gemm._size_obstacle(e4m3, empty, "TN") == "an operand is empty"


# --- arguments ------------------------------------------------------------------------------------


def test_wrong_arguments():
    w, x = torch.zeros(8, 16), torch.zeros(4, 16)
    cases = {
        "layout must be one of 'TN', 'NN', 'NT'; got 'TT'": (ValueError, {"layout": "TT"}),
        "do not fit with layout 'NN': contracted sizes 8 and 16": (ValueError, {"layout": "NN"}),
        r"bias must have shape \(8,\); got \(4,\)": (ValueError, {"bias": torch.zeros(4)}),
        "accumulate needs out": (ValueError, {"accumulate": True}),
        "beta needs accumulate=True; got beta=0.5": (ValueError, {"beta": 0.5}),
        r"out must have shape \(4, 8\); got \(8, 4\)": (ValueError, {"out": torch.zeros(8, 4)}),
        "out_dtype must be the dtype of out, torch.float32": (
            ValueError,
            {"out": torch.zeros(4, 8), "out_dtype": torch.bfloat16},
        ),
        "out_dtype must be float32, float16 or bfloat16": (TypeError, {"out_dtype": torch.int32}),
        "alpha must be a number; got 'two'": (TypeError, {"alpha": "two"}),
        "beta must be a number; got 'two'": (TypeError, {"beta": "two", "accumulate": True, "out": torch.zeros(4, 8)}),
    }
    for text, (error, options) in cases.items():
        with pytest.raises(error, match=text):
            gemm.gemm(w, x, **options)
    with pytest.raises(TypeError, match="a must be a tensor, a quantized tensor or its storage; got list"):
        gemm.gemm([1.0], x)
    with pytest.raises(TypeError, match="b must be float32"):
        gemm.gemm(w, x.int(), out_dtype=torch.float32)
    with pytest.raises(ValueError, match="b must have at least one dimension"):
        gemm.gemm(w, torch.tensor(1.0))


def test_float64_needs_its_backend():
    w, x = sample((8, 16), torch.float64), sample((4, 16), torch.float64, 1)
    with pytest.raises(TypeError, match=r"float64 only under backend\('float64'\)"):
        gemm.linear_forward(x, w)
    with backend("float64"):
        y = gemm.linear_forward(x, w, bias=torch.ones(8, dtype=torch.float64))
        assert y.dtype is torch.float64
        torch.testing.assert_close(y, x @ w.t() + 1, rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(gemm.linear_wgrad(y, x), y.t() @ x, rtol=1e-14, atol=1e-14)
        assert torch.equal(gemm.linear_forward(x, w, out_dtype=torch.float32), (x @ w.t()).float())


def test_torch_autocast_does_not_narrow_the_products():
    x, w = torch.randn(8, 32), torch.randn(16, 32)
    want = gemm.linear_forward(x, w)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(gemm.linear_forward(x, w), want)
        assert torch.is_autocast_enabled("cpu")
