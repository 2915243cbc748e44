"""The functions of TE's PyTorch extension: which values are rounded, summed and quantized, and what is refused."""

import inspect
from itertools import product

import numpy as np
import pytest
import torch
from one_rounding import assert_one_rounding

import refops
from fuser import functional as F  # noqa: N812
from fuser.dispatch import TENSOR_FIELDS, Buffers, as_numpy, as_torch, backend
from fuser.dtypes import DType
from fuser.quantization.quantizer import Quantizer
from fuser.quantization.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from tiers import sampled

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2
#: Without transcendental functions: the same bits on every backend.
EXACT = ("relu", "srelu", "reglu", "sreglu")


def delayed():
    return Float8Quantizer(scale=torch.full((1,), 3.5), amax=torch.zeros(1), fp8_dtype=E4M3)


#: Name -> (makes a quantizer, its refops settings, TE's path).
QUANTIZERS = {
    "delayed": (delayed, refops.DelayedScaling(refops.E4M3, 3.5), "FULLY_FUSED"),
    "current": (
        lambda: Float8CurrentScalingQuantizer(fp8_dtype=E5M2),
        refops.CurrentScaling(refops.E5M2),
        "FUSED_ACTIVATION_AMAX_FP8",
    ),
    "mxfp8": (lambda: MXFP8Quantizer(fp8_dtype=E4M3), refops.MXFP8Scaling(refops.E4M3), "FULLY_FUSED"),
    "block1": (
        lambda: Float8BlockQuantizer(fp8_dtype=E4M3, rowwise=True, columnwise=True, block_scaling_dim=1),
        refops.BlockScaling(refops.E4M3, 1),
        "UNFUSED",
    ),
    "block2": (
        lambda: Float8BlockQuantizer(fp8_dtype=E4M3, rowwise=True, columnwise=True, block_scaling_dim=2),
        refops.BlockScaling(refops.E4M3, 2),
        "UNFUSED",
    ),
    "nvfp4": (lambda: NVFP4Quantizer(), refops.NVFP4Scaling(), "FUSED_ACTIVATION_AMAX_NVFP4"),
    "nvfp4-rows": (lambda: NVFP4Quantizer(row_scaled_nvfp4=True), refops.NVFP4Scaling(row_scaled=True), "UNFUSED"),
    "nvfp4-rht": (
        lambda: NVFP4Quantizer(with_rht=True, with_post_rht_amax=True),
        refops.NVFP4Scaling(rht=True),
        "UNFUSED",
    ),
}


def sample(shape, dtype, seed=0, spread=3.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread).to(dtype)


def inputs(name, dtype, rows=64, width=128):
    """x and dy of an activation whose output is (rows, width)."""
    gated = refops.ACTIVATIONS[name].gated
    return sample((rows, 2 * width if gated else width), dtype), sample((rows, width), dtype, 1)


def both_copies(quantizer):
    quantizer.set_usage(rowwise=True, columnwise=True)
    return quantizer


def gradient_of(name):
    return {"clamped_swiglu": "clamped_dswiglu"}.get(name, f"d{name}")


def assert_holds(result, expected):
    """`result` (quantized tensor or storage) holds the bits of a refops.Quantized."""
    buffers = result.buffers
    assert buffers.scaling == expected.scaling and buffers.shape == expected.shape
    for name in TENSOR_FIELDS:
        actual, wanted = getattr(buffers, name), getattr(expected, name)
        assert (actual is None) == (wanted is None), name
        assert actual is None or torch.equal(actual, as_torch(wanted)), name


# --- the paths ------------------------------------------------------------------------------------


@sampled(("name", "key"), product(refops.ACTIVATIONS, QUANTIZERS), 3, in_all=1)
def test_every_path_bit_for_bit(name, key):
    make, scaling, path = QUANTIZERS[key]
    assert refops.ops.path_of(scaling).name == path
    copies = {"rowwise": True, "columnwise": True}
    for dtype in DTYPES:
        x, dy = inputs(name, dtype)
        expected_y = refops.activation_quantize(name, as_numpy(x), scaling, **copies)
        expected_dx, expected_dbias = refops.activation_grad_quantize(
            name, as_numpy(dy), as_numpy(x), scaling, **copies, dbias=True
        )
        exact = name in EXACT and key != "nvfp4-rht"
        for which in ("reference", "auto") if exact else ("reference",):
            with backend(which):
                quantizer = both_copies(make())
                assert_holds(getattr(F, name)(x, quantizer), expected_y)
                assert_holds(getattr(F, gradient_of(name))(dy, x, quantizer), expected_dx)
                dbias, dx = getattr(F, f"dbias_{gradient_of(name)}")(dy, x, quantizer)
                assert_holds(dx, expected_dx)
                assert torch.equal(dbias, as_torch(expected_dbias)) and dbias.dtype is dtype


def test_what_is_rounded_before_the_cast():
    """Each path against its definition, built from an activation in float32, its rounding and a plain cast."""
    name, (x, dy) = "gelu", inputs("gelu", torch.bfloat16)
    with backend("reference"):
        unrounded = F.activation_grad(name, dy.float(), x.float())
        rounded = unrounded.bfloat16()
        distinguished = []
        for key, (make, _, path) in QUANTIZERS.items():
            dbias, result = F.dbias_dgelu(dy, x, make())
            codes, of_unrounded, of_rounded = (
                q.buffers.rowwise_data for q in (result, make()(unrounded), make()(rounded))
            )
            if key == "delayed":
                assert torch.equal(codes, of_unrounded)
            elif path == "UNFUSED" or key == "mxfp8":
                assert torch.equal(codes, of_rounded)
            else:  # the amax of the unrounded values, elements of the rounded ones
                assert result.buffers.amax_rowwise.item() == unrounded.abs().max().item()
                assert rounded.abs().max().item() != unrounded.abs().max().item()
            distinguished.append(not torch.equal(of_unrounded, of_rounded))
            summed = unrounded if key in ("delayed", "mxfp8") else rounded
            exact, magnitude = summed.double().sum(0), summed.double().abs().sum(0)
            assert_one_rounding(dbias, exact, magnitude, error=1e-6)
        assert any(distinguished)


def test_bias_gradients_of_the_two_kinds_differ():
    x, dy = inputs("gelu", torch.bfloat16)
    fused, _ = F.dbias_dgelu(dy, x, delayed())
    unfused, _ = F.dbias_dgelu(dy, x, QUANTIZERS["current"][0]())
    assert not torch.equal(fused, unfused)


def test_delayed_scaling_collects_the_amax():
    x, dy = inputs("srelu", torch.bfloat16)
    quantizer = delayed()
    F.srelu(x, quantizer)
    first = quantizer.amax.item()
    assert first == (x.float().clamp(min=0) ** 2).max().item()  # of the unrounded value
    F.srelu(x * 0.5, quantizer)
    assert quantizer.amax.item() == first
    F.dsrelu(dy * 100, x, quantizer)
    assert quantizer.amax.item() > first


@pytest.mark.parametrize("internal", [False, True])
def test_results_are_tensors_or_storages(internal):
    x, _ = inputs("gelu", torch.bfloat16)
    for make, _, _ in QUANTIZERS.values():
        quantizer = make()
        quantizer.internal = internal
        result = F.gelu(x, quantizer)
        assert isinstance(result, torch.Tensor) is not internal
        assert isinstance(result.buffers, Buffers)
        torch.testing.assert_close(result.dequantize().float(), F.gelu(x).float(), rtol=0.3, atol=2.0)


def test_copies_follow_the_usage():
    x, _ = inputs("gelu", torch.bfloat16)
    for make, _, _ in QUANTIZERS.values():
        for rowwise, columnwise in ((True, False), (False, True), (True, True)):
            quantizer = make()
            quantizer.set_usage(rowwise=rowwise, columnwise=columnwise)
            buffers = F.gelu(x, quantizer).buffers
            assert (buffers.rowwise_data is not None, buffers.columnwise_data is not None) == (rowwise, columnwise)


class Halves(Quantizer):
    """A quantizer of another making: keeps what it was given, halved."""

    def __init__(self):
        super().__init__(rowwise=True, columnwise=False)
        self.internal, self.seen = True, []

    def quantize_impl(self, tensor):
        self.seen.append(tensor)
        return tensor / 2


class ReducingQuantizer(Float8CurrentScalingQuantizer):
    """One whose amax comes from other processes too: here another process saw 1000."""

    def __init__(self):
        super().__init__(fp8_dtype=E4M3)
        self.with_amax_reduction = True

    def _cast(self, tensor, rowwise, columnwise):
        self.seen = tensor
        scaling = refops.DelayedScaling(refops.E4M3, 448 / 1000)
        from fuser import dispatch

        return dispatch.quantize(tensor, scaling, rowwise=rowwise, columnwise=columnwise)


def test_custom_and_reducing_quantizers_see_the_rounded_tensor():
    x, dy = inputs("gelu", torch.bfloat16)
    y, dx = F.gelu(x), F.dgelu(dy, x)
    for quantizer in (Halves(), ReducingQuantizer()):
        custom = isinstance(quantizer, Halves)
        seen = (lambda q=quantizer: q.seen[-1]) if custom else (lambda q=quantizer: q.seen)
        result = F.gelu(x, quantizer)
        assert torch.equal(seen(), y)
        assert torch.equal(result, y / 2) if custom else result.buffers.scaling.scale == pytest.approx(0.448)
        F.dgelu(dy, x, quantizer)
        assert torch.equal(seen(), dx)
        dbias, _ = F.dbias_dgelu(dy, x, quantizer)
        assert torch.equal(seen(), dx)
        assert torch.equal(dbias, F.dbias_dgelu(dy, x)[0])
        dbias, _ = F.bgrad_quantize(x, quantizer)
        assert torch.equal(seen(), x) and dbias.shape == (128,)


# --- without a quantizer --------------------------------------------------------------------------


@pytest.mark.parametrize("name", refops.ACTIVATIONS)
def test_plain(name):
    for dtype in DTYPES:
        x, dy = inputs(name, dtype, rows=8, width=16)
        with backend("reference"):
            y, dx = getattr(F, name)(x, None), getattr(F, gradient_of(name))(dy, x)
            dbias, again = getattr(F, f"dbias_{gradient_of(name)}")(dy, x)
        assert torch.equal(y, as_torch(refops.activation(name, as_numpy(x))))
        wanted, wanted_dbias = refops.activation_grad(name, as_numpy(dy), as_numpy(x), dbias=True)
        assert torch.equal(dx, as_torch(wanted)) and torch.equal(again, dx)
        assert torch.equal(dbias, as_torch(wanted_dbias)) and dbias.shape == x.shape[-1:]


def test_gradients_of_output_in_another_shape():
    """TE compares flattened shapes."""
    x, dy = inputs("swiglu", torch.float32, rows=8, width=16)
    assert torch.equal(F.dswiglu(dy, x.reshape(2, 4, 32)), F.dswiglu(dy, x).reshape(2, 4, 32))


@pytest.mark.parametrize("shape", [(64,), (0, 64), (2, 0, 64), (2, 3, 64)], ids=str)
def test_any_rank_and_no_rows(shape):
    x = sample(shape, torch.bfloat16)
    quantizer = QUANTIZERS["current"][0]()
    for name in ("gelu", "swiglu"):
        y = getattr(F, name)(x)
        q = getattr(F, name)(x, quantizer)
        assert q.shape == y.shape == (*shape[:-1], 64 // (2 if name == "swiglu" else 1))
        for given in (None, quantizer):
            dbias, dx = getattr(F, f"dbias_d{name}")(y, x, given)
            assert dx.shape == shape and dbias.shape == (64,)
            assert x.numel() or not dbias.any()
    for given in (None, quantizer):
        dbias, _ = F.bgrad_quantize(x, given)
        assert dbias.shape == (64,) and (x.numel() or not dbias.any())


def test_non_contiguous():
    x = sample((64, 96), torch.bfloat16).t()
    quantizer = QUANTIZERS["mxfp8"][0]()
    assert torch.equal(F.gelu(x), F.gelu(x.contiguous()))
    one, other = (F.gelu(t, quantizer).buffers for t in (x, x.contiguous()))
    assert torch.equal(one.rowwise_data, other.rowwise_data)
    assert F.bgrad_quantize(x)[1].is_contiguous()


# --- scaled ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (name, {"glu_interleave_size": g} if refops.ACTIVATIONS[name].gated else {})
        for name in refops.SCALED_ACTIVATIONS
        for g in ([0, 32] if refops.ACTIVATIONS[name].gated else [0])
    ],
)
def test_scaled(name, options):
    forward = getattr(F, f"scaled_{name}")
    backward = getattr(F, f"scaled_{gradient_of(name)}")
    for dtype in DTYPES:
        x, dy = inputs(name, dtype, rows=32)
        scales = sample((32,), torch.float32, 2)
        arrays = [as_numpy(t) for t in (dy, x, scales)]
        with backend("reference"):
            y = forward(x, scales, None, **options)
            dx, dscales = backward(dy, x, scales, None, **options)
            none = backward(dy, x, scales, None, **options, compute_scale_grad=False)
        assert torch.equal(y, as_torch(refops.scaled_activation(name, *arrays[1:], **options)))
        wanted = refops.scaled_activation_grad(name, *arrays, **options)
        assert torch.equal(dx, as_torch(wanted[0])) and torch.equal(dscales, as_torch(wanted[1]))
        assert none[1] is None and torch.equal(none[0], dx)
        assert dscales.dtype is scales.dtype and y.dtype is dtype
        quantizer = QUANTIZERS["current"][0]()
        with backend("reference"):
            for result, rounded in (
                (forward(x, scales, quantizer, **options), y),
                (backward(dy, x, scales, quantizer, **options)[0], dx),
            ):
                assert torch.equal(result.buffers.rowwise_data, quantizer(rounded).buffers.rowwise_data)
                assert result.buffers.amax_rowwise.item() == rounded.abs().max().item()  # of rounded values: unfused


def test_scaled_by_position():
    x, dy, scales = sample((4, 128), torch.float32), sample((4, 64), torch.float32, 1), sample((4, 1), torch.float32, 2)
    named = F.scaled_clamped_swiglu(x, scales, limit=1.0, alpha=1.5, glu_linear_offset=0.5, glu_interleave_size=32)
    assert torch.equal(F.scaled_clamped_swiglu(x, scales, None, 1.0, 1.5, 0.5, 32), named)
    _, dscales = F.scaled_clamped_dswiglu(dy, x, scales, None, 1.0, 1.5, 0.5, 32, True)
    assert dscales.shape == (4, 1)
    assert F.scaled_dsrelu(dy, dy, scales, None, False)[1] is None
    assert torch.equal(F.scaled_dsituglu(dy, x, scales, None, 4.0, 25.0, 0)[0], F.scaled_dsituglu(dy, x, scales)[0])
    mixed, _ = F.scaled_dswiglu(dy.bfloat16(), x, scales)  # each in its own dtype
    assert mixed.dtype is torch.float32


# --- casts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", QUANTIZERS)
def test_quantize_and_dequantize(key):
    make, scaling, _ = QUANTIZERS[key]
    x = sample((64, 128), torch.bfloat16)
    with backend("reference"):
        q = F.quantize(x, both_copies(make()))
        expected = refops.quantize(as_numpy(x), scaling, rowwise=True, columnwise=True)
        assert_holds(q, expected)
        dbias, again = F.bgrad_quantize(x, both_copies(make()))
        assert_holds(again, expected)
        wanted = refops.quantize(as_numpy(x), scaling, dbias=True)[1]
        assert torch.equal(dbias, as_torch(wanted))
        for otype in (DType.kFloat32, DType.kBFloat16, torch.float16):
            values = F.dequantize(q, otype)
            assert values.dtype is (otype.torch if isinstance(otype, DType) else otype)
            dtype = {torch.float32: np.float32, torch.float16: np.float16}.get(values.dtype, as_numpy(x).dtype)
            assert torch.equal(values, as_torch(refops.dequantize(expected, dtype=dtype)))


def test_quantize_into_an_output():
    quantizer = QUANTIZERS["current"][0]()
    x, other = sample((32, 64), torch.float32), sample((32, 64), torch.float32, 5)
    output = quantizer(x)
    before = output.buffers.rowwise_data.clone()
    assert F.quantize(other, quantizer, output, torch.ones(1)) is output
    assert torch.equal(output.buffers.rowwise_data, before)
    assert F.quantize(other, quantizer, output=output, noop=torch.zeros(1)) is output
    assert torch.equal(output.buffers.rowwise_data, quantizer(other).buffers.rowwise_data)
    with pytest.raises(ValueError, match="noop needs output"):
        F.quantize(x, quantizer, noop=torch.zeros(1))


def test_bgrad_quantize_without_quantizer():
    x = sample((3, 5, 64), torch.bfloat16)
    dbias, same = F.bgrad_quantize(x)
    assert same is x and dbias.dtype is torch.bfloat16
    assert torch.equal(dbias, x.float().sum((0, 1)).bfloat16())


# --- names and arguments --------------------------------------------------------------------------


def test_names_and_signatures_of_te():
    unary, gated = ("gelu", "qgelu", "relu", "srelu", "silu"), ("glu", "geglu", "qgeglu", "reglu", "sreglu", "swiglu")
    plain = (*unary, *gated, "situglu")
    names = {*plain, *(f"d{name}" for name in plain), "clamped_swiglu", "clamped_dswiglu"}
    names |= {f"dbias_d{name}" for name in unary} | {"bgrad_quantize", "quantize", "dequantize"}
    for name in ("swiglu", "situglu", "srelu"):
        names |= {f"scaled_{name}", f"scaled_d{name}"}
    names |= {"scaled_clamped_swiglu", "scaled_clamped_dswiglu", "DType"}
    wanted = {
        "gelu": "(input, quantizer=None)",
        "dgeglu": "(grad, fwd_input, quantizer=None)",
        "situglu": "(input, quantizer=None, beta1=4.0, beta2=25.0)",
        "clamped_dswiglu": "(grad, fwd_input, quantizer=None, limit=7.0, alpha=1.702, glu_linear_offset=1.0)",
        "scaled_swiglu": "(input, act_scales, quantizer=None, glu_interleave_size=0)",
        "scaled_srelu": "(input, act_scales, quantizer=None)",
        "scaled_dsituglu": "(grad, fwd_input, act_scales, quantizer=None, beta1=4.0, beta2=25.0, "
        "glu_interleave_size=0, compute_scale_grad=True)",
        "scaled_dsrelu": "(grad, fwd_input, act_scales, quantizer=None, compute_scale_grad=True)",
        "dbias_dgelu": "(grad, fwd_input, quantizer=None)",
        "quantize": "(tensor, quantizer, output=None, noop=None)",
        "dequantize": "(input, otype)",
        "split_quantize": "(tensor, split_sections, quantizer_list, disable_bulk_allocation=False)",
        "group_quantize": "(tensor, quantizer, num_tensors, first_dims, last_dims=None, tensor_offsets=None, "
        "noop_flag=None, output=None)",
        "bgrad_group_quantize": "(tensor, quantizer, num_tensors, first_dims, last_dims=None, tensor_offsets=None)",
        "group_dequantize": "(input, otype)",
        "splits_to_offsets": "(first_dims, logical_last_dim)",
        "splits_to_offsets_multi": "(split_sizes, device, *, strides, include_leading_zero, dtypes, "
        "bulk_allocate=False)",
    }
    for name, signature in wanted.items():
        parameters = inspect.signature(getattr(F, name)).parameters.values()
        assert str(inspect.Signature([p.replace(annotation=p.empty) for p in parameters])) == signature
    names |= wanted.keys()
    assert names <= set(F.__all__) and all(hasattr(F, name) for name in names)
    assert F.dgelu.__name__ == "dgelu" and "gelu" in F.dgelu.__doc__


def test_parameters_by_position_and_name():
    x, dy = sample((4, 64), torch.float32), sample((4, 32), torch.float32, 1)
    expected = F.activation("clamped_swiglu", x, limit=1.0, alpha=1.5, glu_linear_offset=0.0)
    assert torch.equal(F.clamped_swiglu(x, None, 1.0, 1.5, 0.0), expected)
    assert torch.equal(F.clamped_swiglu(input=x, glu_linear_offset=0.0, limit=1.0, alpha=1.5), expected)
    assert not torch.equal(F.clamped_swiglu(x), expected)
    assert torch.equal(F.dsituglu(dy, x, None, 2.0), F.dsituglu(grad=dy, fwd_input=x, beta1=2.0, beta2=25.0))
    for wrong in (
        lambda: F.gelu(),
        lambda: F.gelu(x, None, 1.0),
        lambda: F.gelu(x, limit=1.0),
        lambda: F.situglu(x, None, 4.0, beta1=4.0),
        lambda: F.dgelu(x),
    ):
        with pytest.raises(TypeError):
            wrong()


def test_errors_name_the_argument():
    x, dy = inputs("swiglu", torch.bfloat16, rows=4, width=32)
    scales = torch.ones(4)
    cases = [
        (lambda: F.swiglu(x[:, :3]), ValueError, r"last dimension to be even: input has shape \(4, 3\)"),
        (lambda: F.dswiglu(dy.half(), x), TypeError, "Types of both inputs must match. grad is torch.float16, fwd_inp"),
        (lambda: F.dswiglu(dy[:3], x), ValueError, r"Wrong Grad shape\. .*\(4, 32\).* grad has shape \(3, 32\)"),
        (lambda: F.dswiglu(dy[:, :8], x), ValueError, "Wrong Grad shape"),
        (lambda: F.dswiglu(dy.t(), x), ValueError, "Wrong Grad shape"),
        (lambda: F.dgelu(dy, x), ValueError, "Wrong Grad shape"),
        (lambda: F.dbias_dgelu(dy, x), ValueError, "Wrong Grad shape"),
        (
            lambda: F.gelu([1.0]),
            TypeError,
            "input must be a torch",
        ),
        (lambda: F.gelu(torch.tensor(1.0)), ValueError, "input must have at least one dimension; got a scalar"),
        (lambda: F.gelu(x.double()), TypeError, "x must be float32, float16 or bfloat16"),
        (lambda: F.gelu(x, "quantizer"), TypeError, "Unexpected type for quantizer.*got str"),
        (lambda: F.bgrad_quantize(x, 3), TypeError, "Unexpected type for quantizer.*got int"),
        (lambda: F.quantize(x, None), TypeError, "Unexpected type for quantizer.*got NoneType"),
        (lambda: F.dequantize(x, DType.kFloat32), TypeError, "input must be a quantized tensor or its storage; got T"),
        (lambda: F.situglu(x, None, -1.0), ValueError, "beta1 must be"),
        (lambda: F.activation("tanh", x), ValueError, "name must be one of gelu.*got 'tanh'"),
        (
            lambda: F.scaled_swiglu(x[:, :3], scales),
            ValueError,
            r"width is not compatible with activation: input has shape \(4, 3\)",
        ),
        (
            lambda: F.scaled_dswiglu(dy, x[:, :3], scales),
            ValueError,
            r"width is not compatible with activation: fwd_input has shape \(4, 3\)",
        ),
        (
            lambda: F.scaled_swiglu(x, scales[:3]),
            ValueError,
            r"expects one scale per input row: input has 4 rows, act_scales has shape \(3,\)",
        ),
        (lambda: F.scaled_swiglu(x, scales, None, 7), ValueError, "glu_interleave_size must be 0, or .* got 7"),
        (lambda: F.scaled_activation("gelu", x, scales), ValueError, "name must be one of srelu, swiglu.*got 'gelu'"),
        (lambda: F.gelu(F.gelu(x, QUANTIZERS["current"][0]())), TypeError, "plain torch tensor; got Float8Tensor"),
    ]
    for call, error, text in cases:
        with pytest.raises(error, match=text):
            call()


def test_torch_compile():
    x = sample((32, 64), torch.bfloat16)
    quantizer = QUANTIZERS["current"][0]()
    quantizer.internal = True

    def step(x):
        y = F.dequantize(F.gelu(x, quantizer=quantizer), x.dtype)
        dbias, dx = F.dbias_dgelu(y, x)
        return dx + dbias * F.scaled_srelu(x, x[:, 0], None)

    assert torch.equal(torch.compile(step, backend="eager")(x), step(x))


def test_float64():
    x = sample((4, 8), torch.float64)
    with backend("float64"):
        y, dx = F.silu(x), F.dsilu(x, x)
        assert y.dtype is dx.dtype is torch.float64
        torch.testing.assert_close(y, torch.nn.functional.silu(x), rtol=1e-14, atol=1e-14)
        dbias, _ = F.bgrad_quantize(x)
        assert dbias.dtype is torch.float64
        torch.testing.assert_close(F.dbias_dsilu(x, x)[0], dx.sum(0), rtol=1e-14, atol=1e-14)
