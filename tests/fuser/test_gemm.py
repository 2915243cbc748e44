"""Matrix products: against float64, one rounding for everything, quantized operands exactly as what they stand for."""

import dataclasses
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from one_rounding import assert_one_rounding

import refops
from fuser import dispatch, gemm
from fuser.dispatch import as_numpy, as_torch, backend
from fuser.narrow import SMALLEST, narrow, narrow_product, takes_bfloat16
from refops.scalings import NAMED
from tiers import sampled

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


@sampled(("scaling", "dtype"), product(SCALINGS, DTYPES), 2, in_all=1, ids=ids)
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
                in_float32 = which == "reference" or dtype is not torch.bfloat16 or not takes_bfloat16(y.device)
                if in_float32 and not getattr(scaling, "rht", False):
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


# --- products in bfloat16 -------------------------------------------------------------------------

needs_units = pytest.mark.skipif(
    not takes_bfloat16(torch.device("cpu")), reason="this CPU has no units for bfloat16: products are float32"
)


def float32_way(*operands, **options):
    """The product of dequantized operands in float32, rounded once to its dtype."""
    with backend("reference"):
        return gemm.gemm(*operands, **options)


def stored_values(buffers, columnwise):
    """What a copy's codes stand for, float32 (M, K), with the Hadamard transform that they were made of."""
    prefix = "columnwise" if columnwise else "rowwise"
    copy = dataclasses.replace(buffers, **{name: None for name in buffers.tensors if prefix not in name})
    values, mask = dispatch.dequantize(copy, columnwise=columnwise), buffers.scaling.hadamard
    if mask is None or not columnwise:
        return values
    return as_torch(refops.hadamard_transform(np.ascontiguousarray(as_numpy(values).T), mask)).t()


@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
@pytest.mark.parametrize("scaling", [row.scaling for row in NAMED.values()], ids=NAMED)
def test_narrow_operands_are_exactly_what_codes_stand_for(scaling, columnwise):
    if columnwise and scaling.only_rowwise:
        pytest.skip(scaling.only_rowwise)
    x = (sample((160, 96), torch.float32) * torch.logspace(-6, 6, 160)[:, None]).bfloat16()
    x[:, 32:64] = 0
    buffers = quantized(x, scaling, columnwise=columnwise)
    found, layout = narrow(buffers, columnwise), scaling.layout
    any_float32 = layout.block is not None and layout.scale_format is None and not scaling.power_2_scale
    assert (found is None) == (any_float32 or layout.amax == "rows")
    if found is None:
        return
    matrix, expected = found.matrix(), stored_values(buffers, columnwise)
    assert matrix.dtype is torch.bfloat16 and found.transform == (scaling.hadamard if columnwise else None)
    if found.factor == 1 and found.transform is None:
        assert torch.equal(matrix.float(), expected)
    else:
        error = 0 if found.transform is None else 1e-6 * expected.abs().max().item()
        torch.testing.assert_close(matrix.double() * found.factor, expected.double(), rtol=4e-7, atol=error)
    multiples = matrix.double() / found.multiple_of
    assert torch.equal(multiples, multiples.round()) and matrix.any()
    if layout.scale_order == "gemm":
        swizzled = narrow(dispatch.swizzled(buffers), columnwise).matrix()
        assert torch.equal(swizzled, matrix)


def within_any_order(y, a, b, *, layout, alpha=1.0, bias=None):
    """Every element is the rounding of a float32 sum in some order: gamma_n sum|a||b|, then once to bfloat16."""
    exact, magnitude = exact_product(a, b, layout)
    extra = torch.zeros(()) if bias is None else bias.double()
    n = (a.shape[1] if layout[0] == "T" else a.shape[0]) + 6  # scales, alpha, bias
    gamma = n * 2.0**-24 / (1 - n * 2.0**-24)
    assert_one_rounding(y, alpha * exact + extra, abs(alpha) * magnitude + extra.abs(), error=gamma)


SIZES = ((32, 32, 32), (32, 2048, 64), (64, 96, 160), (32, 64, 512))


@needs_units
@sampled(("scaling", "m", "k", "n"), [(scaling, *size) for scaling in SCALINGS for size in SIZES], 3, in_all=1, ids=ids)
def test_sums_are_float32_in_some_order(scaling, m, k, n):
    for layout in LAYOUTS:
        a, b = operands(layout, torch.bfloat16, m, k, n)
        qa, qb = quantized(a, scaling), quantized(b, scaling)
        a, b = (
            dispatch.dequantize(qa, columnwise=layout[0] == "N"),
            dispatch.dequantize(qb, columnwise=layout[1] == "T"),
        )
        if getattr(scaling, "rht", False) and layout == "NT":  # what is multiplied is what is stored, transformed
            a, b = ((found := narrow(q, True)).matrix().double() * found.factor for q in (qa, qb))
        bias = sample((n,), torch.bfloat16, 2) * 20
        for options in ({}, {"alpha": -0.7313}, {"bias": bias}, {"alpha": 0.7313, "bias": bias}):
            y = gemm.gemm(qa, qb, layout=layout, **options)
            within_any_order(y, a, b, layout=layout, **options)


@needs_units
@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_in_bfloat16_are_torchs(layout):
    """The same call of torch of plain operands, and of one quantized and one plain one."""
    a, b = operands(layout, torch.bfloat16)
    left, right = (b.t() if layout[1] == "T" else b), (a.t() if layout[0] == "T" else a)
    assert torch.equal(gemm.gemm(a, b, layout=layout), left @ right)
    qa = quantized(a, refops.MXFP8Scaling(refops.E4M3))
    values = dispatch.dequantize(qa, columnwise=layout[0] == "N", dtype=torch.bfloat16)
    assert torch.equal(gemm.gemm(qa, b, layout=layout), left @ (values.t() if layout[0] == "T" else values))


def test_a_product_asks_once_whether_its_device_takes_bfloat16(monkeypatch):
    asked = []
    monkeypatch.setattr(gemm, "takes_bfloat16", lambda device: asked.append(device) or takes_bfloat16(device))
    a, b = sample((64, 64), torch.bfloat16), sample((64, 64), torch.bfloat16, 1)
    scaling = refops.MXFP8Scaling(refops.E4M3)
    for pair in ((a, b), (quantized(a, scaling), quantized(b, scaling)), (quantized(a, scaling), b)):
        asked.clear()
        gemm.gemm(*pair)
        assert len(asked) == 1


@pytest.mark.parametrize("bias", [None, torch.bfloat16, torch.float32])
def test_which_products_are_rounded_once(bias):
    bias = None if bias is None else torch.zeros(4, dtype=bias)
    once = bias is None or bias.dtype is torch.bfloat16
    assert gemm._is_rounded_once(torch.bfloat16, torch.bfloat16, bias, torch.device("cpu")) == once
    for device, of_float32 in (("cpu", False), ("cuda", gemm._MM_STORES_FLOAT32)):
        device = torch.device(device)
        assert gemm._is_rounded_once(torch.bfloat16, torch.float32, bias, device) == of_float32
        assert not gemm._is_rounded_once(torch.bfloat16, torch.float16, bias, device)


@needs_units
def test_what_stays_in_float32(monkeypatch):
    """The reference, results and biases that are float32, a CPU without units, oneDNN switched off."""
    a, b = sample((256, 512), torch.bfloat16), sample((256, 512), torch.bfloat16, 1)
    scaling = refops.CurrentScaling(refops.E4M3)
    for pair in ((a, b), (quantized(a, scaling), quantized(b, scaling))):
        values = [one if isinstance(one, torch.Tensor) else dispatch.dequantize(one) for one in pair]
        want = values[1].float() @ values[0].float().t()
        assert torch.equal(gemm.gemm(*pair, out_dtype=torch.float32), want)
        assert torch.equal(gemm.gemm(*pair, out_dtype=torch.float16), want.half())
        want = want.bfloat16()
        assert not torch.equal(gemm.gemm(*pair), want)
        assert torch.equal(float32_way(*pair), want)
        assert torch.equal(gemm.gemm(*pair, bias=torch.zeros(256)), want)
        with backend("float64"):
            assert torch.equal(gemm.gemm(*pair), want)
        for switch, off in (("fuser.narrow._CPU_HAS_UNITS", False), ("torch._C._get_mkldnn_enabled", lambda: False)):
            with monkeypatch.context() as patch:
                patch.setattr(switch, off)
                assert torch.equal(gemm.gemm(*pair), want)


def tiny_blocks(exponent):
    """(32, 64) bfloat16 whose second half of columns is 2^exponent times as large as the first."""
    x = sample((32, 64), torch.float32)
    x[:, 32:] *= 2.0**exponent
    return x.bfloat16()


@needs_units
@pytest.mark.parametrize("scaling", [refops.MXFP8Scaling(refops.E5M2), refops.BlockScaling(refops.E4M3, 1)], ids=ids)
def test_the_end_of_the_exponents_is_found(scaling):
    """Elements or products that bfloat16's units would count as zero are multiplied in float32."""
    w = quantized(tiny_blocks(0), scaling)
    for exponent, is_narrow in ((-60, True), (-122, False)):
        x = quantized(tiny_blocks(exponent) if scaling.block_size == 32 else tiny_blocks(0) * 2.0**exponent, scaling)
        y, reference = gemm.linear_wgrad(x, w), float32_way(w, x, layout="NT")
        exact, magnitude = exact_product(
            dispatch.dequantize(w, columnwise=True), dispatch.dequantize(x, columnwise=True), "NT"
        )
        assert_one_rounding(y, exact, magnitude)
        assert y.any() and (is_narrow or torch.equal(y, reference))
        found = [narrow(one, True) for one in (x, w)]
        assert (narrow_product(*found, 1.0) is not None) == is_narrow
    # each of them may be narrow, and their product not
    small = [quantized(tiny_blocks(0) * 2.0**-55, scaling) for _ in range(2)]
    assert all(narrow(one, False).multiple_of >= SMALLEST for one in small)
    assert torch.equal(gemm.gemm(*small), float32_way(*small)) and gemm.gemm(*small).any()


@needs_units
def test_blocks_of_zeros_are_no_end():
    """A scale byte of 0 is that of padding or zeros, or of a block below 2^-127 times the format's largest."""
    scaling = refops.MXFP8Scaling(refops.E4M3)
    x = sample((32, 64), torch.bfloat16)
    x[:, 32:], x[3], x[5] = 0, -0.0, 0
    q = quantized(x, scaling)
    assert not q.rowwise_scale_inv.all()
    matrix = narrow(q, False).matrix()
    assert torch.equal(matrix.view(torch.int16), dispatch.dequantize(q, dtype=torch.bfloat16).view(torch.int16))
    q.rowwise_data[5, 40] = 1  # 2^-136: no number of bfloat16
    assert narrow(q, False).matrix() is None
    w = quantized(torch.full((32, 64), 2.0**100), scaling)
    y = gemm.gemm(w, q)
    assert torch.equal(y, float32_way(w, q)) and y[5].eq(2.0**-36).all()
    assert narrow(quantized(torch.zeros(32, 64), scaling), True).matrix().eq(0).all()


@needs_units
@pytest.mark.parametrize("scaling", [refops.CurrentScaling(refops.E4M3), refops.NVFP4Scaling()], ids=ids)
def test_numbers_of_the_tensor_that_are_too_large_or_small(scaling):
    a, b = sample((32, 64), torch.float32), sample((48, 64), torch.float32, 1)
    for exponent in (-120, -60, 0, 60, 120):
        qa, qb = (quantized((one * 2.0**e).bfloat16(), scaling) for one, e in ((a, exponent), (b, 0)))
        found = narrow_product(narrow(qb, False), narrow(qa, False), 1.0)
        assert (found is None) == (abs(exponent) == 120)
        if found is None:
            torch.testing.assert_close(gemm.gemm(qa, qb), float32_way(qa, qb), rtol=0, atol=0, equal_nan=True)
        else:
            exact, magnitude = exact_product(dispatch.dequantize(qa), dispatch.dequantize(qb), "TN")
            assert_one_rounding(gemm.gemm(qa, qb), exact, magnitude)
    qa, qb = quantized(a.bfloat16(), scaling), quantized(b.bfloat16(), scaling)
    assert torch.equal(gemm.gemm(qa, qb, alpha=0.0), torch.zeros(48, 32, dtype=torch.bfloat16))


@needs_units
@pytest.mark.parametrize("scaling", SCALINGS[:-1], ids=ids)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 3e38])
def test_nan_and_inf_are_those_of_float32(scaling, value):
    a, b = operands("TN", torch.bfloat16)
    b[3, 5], b[7] = value, 0.0
    for pair in ((a, b), (quantized(a, scaling), quantized(b, scaling)), (a, quantized(b, scaling))):
        y, expected = gemm.gemm(*pair), float32_way(*pair)
        assert torch.equal(y.isnan(), expected.isnan()) and torch.equal(y.isinf(), expected.isinf())
        finite = expected.isfinite()
        torch.testing.assert_close(
            y[finite], expected[finite], rtol=2.0**-7, atol=1e-5 * b.abs().float().nan_to_num(0, 0, 0).max().item()
        )


@needs_units
@pytest.mark.parametrize("scaling", SCALINGS[2:5], ids=ids)
def test_sums_that_overflow_are_left_to_float32(scaling):
    """Each order of adding has infinities and NaN of its own."""
    a, b = (quantized((sample((128, 128), torch.float32, seed) * 2.0**64).bfloat16(), scaling) for seed in (0, 1))
    assert narrow_product(narrow(a, False), narrow(b, False), 1.0) is None
    assert torch.equal(gemm.gemm(a, b).isnan(), float32_way(a, b).isnan()) and not gemm.gemm(a, b).isfinite().all()
    scaled = narrow_product(narrow(a, False), narrow(quantized(torch.ones(128, 128), scaling), False), 2.0**60)
    assert scaled is None


class Doubled(refops.MXFP8Scaling):
    """A scaling with a rule of its own: codes stand for twice as much as their scale says."""

    def decode_factor(self, words):
        factor = super().decode_factor(words)
        return lambda stored, amax: 2 * factor(stored, amax)


def test_a_rule_of_its_own_is_not_taken_for_the_scale():
    buffers = quantized(sample((32, 64), torch.bfloat16), refops.MXFP8Scaling(refops.E4M3))
    assert narrow(buffers, False) is not None
    assert narrow(dataclasses.replace(buffers, scaling=Doubled(refops.E4M3)), False) is None


@needs_units
def test_two_transforms_cancel_and_one_does_not():
    rht, plain = refops.NVFP4Scaling(rht=True), refops.NVFP4Scaling()
    x, dy = sample((64, 32), torch.bfloat16), sample((64, 48), torch.bfloat16, 1)
    both = [narrow(quantized(one, rht), True) for one in (dy, x)]
    assert narrow_product(*both, 1.0) is not None
    other = narrow(quantized(dy, refops.NVFP4Scaling(rht=True, sign_mask=5)), True)
    for wrong in (other, narrow(quantized(dy, plain), True), dy):
        assert narrow_product(wrong, both[1], 1.0) is None
    mixed = gemm.linear_wgrad(quantized(dy, plain), quantized(x, rht))
    assert torch.equal(mixed, float32_way(quantized(x, rht), quantized(dy, plain), layout="NT"))
