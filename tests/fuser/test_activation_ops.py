"""Activations and gated linear units, plain and row-scaled: against float64, bit for bit on TE's quantizing paths."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from one_rounding import (
    DTYPES,
    QUANTIZERS,
    assert_one_rounding,
    assert_same_quantized,
    call_backward,
    call_forward,
    new_quantizer,
    same_bits,
)

import refops
from fuser import common, functional, ops
from fuser.basic import activation
from fuser.basic.quantize import Quantize
from fuser.common import publish
from fuser.dispatch import backend
from fuser.dtypes import DType
from fuser.quantization.contexts import autocast
from fuser.quantization.quantizers import Float8CurrentScalingQuantizer
from fuser.quantization.storage import QuantizedTensorStorage
from fuser.recipe import MXFP8BlockScaling
from fuser.sequential import Sequential
from refops.activations import ACTIVATIONS, bind_activation
from refops.activations.declaration import Parameter
from tiers import sampled

# --- the operations ---------------------------------------------------------------------------------

#: Name -> (makes the operation, name of its activation, its parameters).
ALL = {row.op: (getattr(ops, row.op), row.name, {}) for row in refops.ACTIVATIONS.values()}
ALL |= {
    "SiTUGLU(1.5, 2.5)": (
        lambda **kw: activation.SiTUGLU(beta1=1.5, beta2=2.5, **kw),
        "situglu",
        {"beta1": 1.5, "beta2": 2.5},
    ),
    "ClampedSwiGLU(0.75)": (
        lambda **kw: activation.ClampedSwiGLU(limit=0.75, alpha=1.3, glu_linear_offset=0.25, **kw),
        "clamped_swiglu",
        {"limit": 0.75, "alpha": 1.3, "glu_linear_offset": 0.25},
    ),
}


class _Truth(torch.autograd.Function):
    """An activation in float64, which `tests/refops` compares with mpmath."""

    @staticmethod
    def forward(ctx, x, bound):
        ctx.save_for_backward(x)
        ctx.bound = bound
        return torch.from_numpy(bound.truth(*_halves(bound, x)))

    @staticmethod
    def backward(ctx, dy):
        gradient = ctx.bound.truth_grad(dy.numpy(), *_halves(ctx.bound, ctx.saved_tensors[0]))
        return torch.from_numpy(np.concatenate(gradient, axis=-1) if ctx.bound.gated else gradient), None


def _halves(bound, x):
    return np.split(x.numpy(), 2, axis=-1) if bound.gated else (x.numpy(),)


def true_value(name, x):
    """float64 value of an entry of `ALL`, differentiable once."""
    _, activation_name, parameters = ALL[name]
    return _Truth.apply(x, bind_activation(activation_name, parameters))


GATED = [name for name, (_, activation_name, _) in ALL.items() if refops.ACTIVATIONS[activation_name].gated]
INTERLEAVED = [name for name in GATED if "Swi" in name or "SiTU" in name]


def _magnitude(x, gated):
    if not gated:
        return 1 + x.abs()
    a, b = x.chunk(2, dim=-1)
    return (1 + a.abs()) * (1 + b.abs())


def _check_against_float64(name, x, y, dy, dx):
    gated = name in GATED
    x64 = x.detach().double().requires_grad_()
    truth = true_value(name, x64)
    truth.backward(dy.double())
    truth = truth.detach()
    magnitude = _magnitude(x.detach().double(), gated)
    assert_one_rounding(y.detach(), truth, magnitude + truth.abs())
    magnitude = magnitude * dy.double().abs()
    if gated:
        magnitude = torch.cat([magnitude, magnitude], dim=-1)
    assert_one_rounding(dx, x64.grad, magnitude + x64.grad.abs())


def _random(shape, dtype, scale=2.0):
    return (torch.randn(shape) * scale).to(dtype)


# --- plain ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(48,), (7, 48), (2, 3, 48), (2, 2, 3, 16)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_forward_and_backward(name, dtype, shape):
    torch.manual_seed(len(name))
    x = _random(shape, dtype).requires_grad_()
    y = ALL[name][0]()(x)
    assert y.dtype == dtype
    dy = _random(y.shape, dtype)
    y.backward(dy)
    assert x.grad.dtype == dtype
    _check_against_float64(name, x, y, dy, x.grad)


@pytest.mark.parametrize("name", ["GELU", "SwiGLU"])
def test_non_contiguous_inputs_and_gradients(name):
    x = _random((64, 6), torch.bfloat16).t().requires_grad_()
    y = ALL[name][0]()(x)
    dy = _random(y.shape[::-1], torch.bfloat16).t()
    assert not x.is_contiguous()
    assert not dy.is_contiguous()
    y.backward(dy)
    _check_against_float64(name, x, y, dy, x.grad)


@pytest.mark.parametrize("shape", [(0, 16), (3, 0), (2, 0, 8)], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_empty_tensors(name, shape):
    x = torch.empty(shape, requires_grad=True)
    y = ALL[name][0]()(x)
    assert y.shape == (*shape[:-1], shape[-1] // 2 if name in GATED else shape[-1])
    y.sum().backward()
    assert x.grad.shape == shape


@pytest.mark.parametrize("name", ["GEGLU", "SwiGLU"])
def test_the_first_half_is_activated(name):
    x = torch.tensor([[-30.0, 30.0, 2.0, 2.0]])
    torch.testing.assert_close(ALL[name][0]()(x), torch.tensor([[0.0, 60.0]]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_gradcheck_in_float64(name):
    torch.manual_seed(3)
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    with backend("float64"):
        assert torch.autograd.gradcheck(ALL[name][0](), x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32], ids=str)
def test_unsupported_dtype(dtype):
    with pytest.raises(RuntimeError, match=rf"Unsupported dtype \({dtype}\): .* float32, float16 and bfloat16"):
        activation.GELU()(torch.ones(4, dtype=dtype))


@pytest.mark.parametrize("name", [row.op for row in ACTIVATIONS.values() if row.gated])
def test_errors_of_gated_activations_name_the_operation(name):
    make = getattr(ops, name)
    with pytest.raises(ValueError, match=rf"operation 0 {name}\(.*\): .*even.*\(2, 5\)"):
        make()(torch.ones(2, 5))
    with pytest.raises(ValueError, match=rf"operation 0 {name}\(.*\): input must have at least one dimension"):
        make()(torch.tensor(1.0))


@pytest.mark.parametrize("name", ["ScaledSwiGLU", "ScaledSiTUGLU", "ScaledClampedQGeGLU"])
def test_errors_of_scaled_activations_name_the_operation(name):
    make = getattr(ops, name)
    for op, width, rows, words in (
        (make(), 5, 2, "even"),
        (make(32), 96, 2, r"glu_interleave_size must be .* a multiple of 32 that divides H=48; got 32"),
        (make(16), 64, 2, r"glu_interleave_size must be .* a multiple of 32 that divides H=32; got 16"),
        (make(), 64, 3, r"one entry for each row of the input; got shape \(3,\)"),
    ):
        with pytest.raises(ValueError, match=rf"operation 0 {name}\(.*\): .*{words}"):
            op(torch.ones(2, width), torch.ones(rows))


@pytest.mark.parametrize("name", ["GELU", "SwiGLU"])
def test_autocast_of_the_tensors_own_device(name):
    x = torch.randn(4, 32, requires_grad=True)
    op = ALL[name][0]()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = op(x)
    assert y.dtype == torch.bfloat16
    assert same_bits(y.detach(), op(x.detach().bfloat16()))
    y.sum().backward()
    assert x.grad.dtype == torch.float32
    assert same_bits(x.grad, x.grad.bfloat16().float())


def test_autocast_of_another_device_changes_nothing():
    torch.set_autocast_enabled("cuda", True)
    try:
        assert torch.is_autocast_enabled()
        assert activation.GELU()(torch.randn(4)).dtype == torch.float32
    finally:
        torch.set_autocast_enabled("cuda", False)


def test_autocast_where_torch_says_it_of_each_device_alone(monkeypatch):
    monkeypatch.setattr(common, "_in_some_autocast", lambda: True)
    x = torch.randn(4)
    assert activation.GELU()(x).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert activation.GELU()(x).dtype == torch.bfloat16
        assert not common.in_autocast(torch.empty(4, device="meta"))


def test_second_backward_and_no_grad():
    x = torch.randn(4, 8, requires_grad=True)
    y = activation.SiLU()(x)
    y.sum().backward(retain_graph=True)
    first, x.grad = x.grad, None
    y.sum().backward()
    assert same_bits(first, x.grad)
    with torch.no_grad():
        assert not activation.SiLU()(x).requires_grad
    with torch.inference_mode():
        assert same_bits(activation.SiLU()(x), y.detach())


def test_nothing_is_saved_without_backward():
    _, ctx = call_forward(activation.GELU(), torch.randn(2, 4), requires_grad=False)
    assert ctx.to_save is None


# --- quantized --------------------------------------------------------------------------------------

_FUNCTIONS = {"ClampedSwiGLU": ("clamped_swiglu", "clamped_dswiglu")}


def _functions(name):
    forward, backward = _FUNCTIONS.get(name, (name.lower(), f"d{name.lower()}"))
    return getattr(functional, forward), getattr(functional, backward)


PLAIN_NAMES = [name for name in ALL if "(" not in name]


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("name", PLAIN_NAMES)
def test_quantized_output_and_gradient_follow_te(name, quantizer):
    torch.manual_seed(5)
    x = _random((64, 256), torch.bfloat16)
    forward, backward = _functions(name)
    op = ALL[name][0]()
    used, expected = new_quantizer(quantizer), new_quantizer(quantizer)

    torch.manual_seed(11)
    y, ctx = call_forward(op, x, next_quantizer=used, previous_quantizer=used)
    torch.manual_seed(11)
    assert_same_quantized(y, forward(x, expected))

    dy = _random(y.shape, torch.bfloat16)
    torch.manual_seed(12)
    dx, _, _ = call_backward(op, ctx, dy)
    torch.manual_seed(12)
    assert_same_quantized(dx, backward(dy, x, expected))
    assert dx.shape == x.shape
    if quantizer == "delayed":
        assert same_bits(used.amax, expected.amax)
        assert used.amax > 0


def test_parameters_reach_the_quantizing_kernel():
    x = _random((32, 128), torch.float32, 4)
    op = activation.ClampedSwiGLU(limit=0.75, alpha=1.3, glu_linear_offset=0.25)
    y, _ = call_forward(op, x, next_quantizer=new_quantizer("mxfp8"))
    parameters = {"limit": 0.75, "alpha": 1.3, "glu_linear_offset": 0.25}
    assert_same_quantized(y, functional.clamped_swiglu(x, new_quantizer("mxfp8"), **parameters))


def test_delayed_scaling_quantizes_the_unrounded_value():
    x = _random((64, 128), torch.bfloat16)
    quantizer = new_quantizer("delayed")
    y, _ = call_forward(activation.GELU(), x, next_quantizer=quantizer)
    rounded_first = new_quantizer("delayed")(functional.gelu(x))
    assert not torch.equal(y.buffers.rowwise_data, rounded_first.buffers.rowwise_data)
    unrounded = new_quantizer("delayed")(functional.gelu(x.float()))
    assert torch.equal(y.buffers.rowwise_data, unrounded.buffers.rowwise_data)


@pytest.mark.parametrize("quantizer", ["delayed", "mxfp8", "nvfp4"])
def test_quantized_inputs_and_gradients_are_dequantized(quantizer):
    x, dy = _random((64, 128), torch.bfloat16), _random((64, 128), torch.bfloat16)
    qx, qdy = new_quantizer(quantizer)(x), new_quantizer(quantizer)(dy)
    y, ctx = call_forward(activation.SiLU(), qx)
    assert same_bits(y, functional.silu(qx.dequantize()))
    dx, _, _ = call_backward(activation.SiLU(), ctx, qdy)
    assert same_bits(dx, functional.dsilu(qdy.dequantize(), qx.dequantize()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_cached_quantized_input_changes_only_the_gradient(name, dtype):
    torch.manual_seed(7)
    x = _random((16, 64), dtype).requires_grad_()
    op, cached = ALL[name][0](), ALL[name][0](cache_quantized_input=True)
    y = cached(x)
    assert same_bits(y.detach(), op(x).detach())

    dy = _random(y.shape, dtype)
    y.backward(dy)
    quantizer = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, device="cpu", rowwise=True, columnwise=False)
    _, ctx = call_forward(op, quantizer(x.detach()).dequantize())
    expected, _, _ = call_backward(op, ctx, dy)
    assert same_bits(x.grad, expected)
    if name != "ReLU":  # its gradient knows only the sign
        _, ctx = call_forward(op, x.detach())
        assert not torch.equal(x.grad, call_backward(op, ctx, dy)[0])


def test_the_cache_holds_one_byte_an_element():
    _, ctx = call_forward(activation.GELU(cache_quantized_input=True), _random((16, 64), torch.bfloat16))
    (saved,) = ctx.saved_tensors
    assert isinstance(saved, QuantizedTensorStorage)
    data = saved.buffers.tensors
    assert data["rowwise_data"].numel() == 16 * 64
    assert data["rowwise_data"].element_size() == 1
    assert saved.buffers.columnwise_data is None


def test_in_a_pipeline_the_neighbours_choose_the_formats():
    x = _random((32, 64), torch.bfloat16).requires_grad_()
    model = Sequential(Quantize(forward=False, backward=True), activation.GELU(), Quantize())
    with autocast(enabled=True, recipe=MXFP8BlockScaling()):
        y = model(x)
    expected = functional.gelu(x.detach(), new_quantizer("mxfp8"))
    assert same_bits(y.dequantize(), expected.dequantize())


# --- interleaved ------------------------------------------------------------------------------------


def _interleave_by_columns(x, size):
    """[a | b] with blocks of `size` columns alternating, by an index for each column."""
    half = x.shape[-1] // 2
    columns = [base + c for block in range(0, half, size) for base in (0, half) for c in range(block, block + size)]
    return x[..., columns]


@pytest.mark.parametrize("size", [1, 4, 8])
@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("name", INTERLEAVED)
def test_interleaved_rows(name, cache, size):
    torch.manual_seed(9)
    x = _random((2, 5, 48), torch.bfloat16)
    contiguous, interleaved = x.clone().requires_grad_(), _interleave_by_columns(x, size).requires_grad_()
    expected = ALL[name][0](cache_quantized_input=cache)(contiguous)
    y = ALL[name][0](cache_quantized_input=cache, glu_interleave_size=size)(interleaved)
    assert same_bits(y.detach(), expected.detach())
    dy = _random(y.shape, torch.bfloat16)
    expected.backward(dy)
    y.backward(dy)
    assert same_bits(interleaved.grad, _interleave_by_columns(contiguous.grad, size))


def test_interleaved_output_is_quantized_and_its_gradient_is_not():
    x = _random((32, 128), torch.bfloat16)
    op = activation.SwiGLU(glu_interleave_size=16)
    shuffled = _interleave_by_columns(x, 16)
    y, ctx = call_forward(
        op, shuffled, next_quantizer=new_quantizer("mxfp8"), previous_quantizer=new_quantizer("mxfp8")
    )
    assert_same_quantized(y, functional.swiglu(x, new_quantizer("mxfp8")))
    assert ctx.saved_tensors[0] is shuffled
    dy = _random((32, 64), torch.bfloat16)
    dx, _, _ = call_backward(op, ctx, dy)
    assert same_bits(dx, _interleave_by_columns(functional.dswiglu(dy, x), 16))


@pytest.mark.parametrize(("size", "width"), [(5, 48), (16, 48), (0, 48), (-4, 48), ("8", 48)])
def test_interleave_size_that_does_not_divide(size, width):
    with pytest.raises(
        ValueError, match=rf"SwiGLU\(\): glu_interleave_size .* got {size!r} and an input of shape \(2, {width}\)"
    ):
        activation.SwiGLU(glu_interleave_size=size)(torch.ones(2, width))


# --- parameters -------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [activation.SiTUGLU, activation.ScaledSiTUGLU])
@pytest.mark.parametrize("name", ["beta1", "beta2"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_invalid_betas(make, name, value):
    with pytest.raises(ValueError, match=name):
        make(**{name: value})


def test_clamp_edges_are_inclusive():
    limit = 0.75
    inside = limit
    outside = torch.nextafter(torch.tensor(limit), torch.tensor(1.0)).item()
    a = torch.tensor([inside, outside, -5.0, 0.5, 0.5, 0.5, 0.5])
    b = torch.tensor([0.5, 0.5, 0.5, inside, -inside, outside, -outside])
    x = torch.cat([a, b]).requires_grad_()
    activation.ClampedSwiGLU(limit=limit)(x).sum().backward()
    d_act, d_gate = x.grad.chunk(2)
    assert (d_act != 0).tolist() == [True, False, True, True, True, True, True]  # from above only
    assert (d_gate != 0).tolist() == [True, True, True, True, True, False, False]


# --- scaled by rows ---------------------------------------------------------------------------------

SCALED = {
    "ScaledSwiGLU": (activation.ScaledSwiGLU, "SwiGLU"),
    "ScaledSiTUGLU": (activation.ScaledSiTUGLU, "SiTUGLU"),
    "ScaledSiTUGLU(1.5, 2.5)": (
        lambda *a, **kw: activation.ScaledSiTUGLU(*a, beta1=1.5, beta2=2.5, **kw),
        "SiTUGLU(1.5, 2.5)",
    ),
    "ScaledClampedQGeGLU": (activation.ScaledClampedQGeGLU, "ClampedSwiGLU"),
    "ScaledClampedQGeGLU(0.75)": (
        lambda *a, **kw: activation.ScaledClampedQGeGLU(*a, limit=0.75, alpha=1.3, glu_linear_offset=0.25, **kw),
        "ClampedSwiGLU(0.75)",
    ),
    "ScaledSReLU": (activation.ScaledSReLU, "SReLU"),
}
SCALED_GLUS = [name for name in SCALED if name != "ScaledSReLU"]


@pytest.mark.parametrize("name", activation.SCALED)
def test_parameters_of_a_scaled_activation_can_be_set_later(name):
    """Each has one store: attribute, `_clamped` where TE has it, and result say the same."""
    cls = activation.SCALED[name]
    x, scales = _random((4, 64), torch.float32), torch.ones(4)
    op = cls()
    settings = {parameter: getattr(op, parameter) for parameter in ACTIVATIONS[cls.activation].parameters}
    for parameter in settings:
        for owner in (op, getattr(op, "_clamped", op)):
            before = op(x, scales)
            settings[parameter] /= 4
            setattr(owner, parameter, settings[parameter])
            assert getattr(op, parameter) == settings[parameter]
            assert same_bits(op(x, scales), cls(**settings)(x, scales))
            assert not torch.equal(op(x, scales), before)


def _check_scaled(name, x, scales, y, dy, dx, dscales):
    reference = partial(true_value, SCALED[name][1])
    x64, scales64 = x.detach().double().requires_grad_(), scales.detach().double().requires_grad_()
    truth = reference(x64) * scales64.unsqueeze(-1)
    truth.backward(dy.double())
    gated = name != "ScaledSReLU"
    magnitude = _magnitude(x64.detach(), gated)
    act = reference(x64.detach()).abs() + magnitude
    row = scales64.detach().abs().unsqueeze(-1)
    assert_one_rounding(y.detach(), truth.detach(), act * row)
    weight = magnitude * row * dy.double().abs()
    weight = torch.cat([weight, weight], dim=-1) if gated else weight
    assert_one_rounding(dx, x64.grad, weight + x64.grad.abs())
    assert_one_rounding(dscales, scales64.grad, (act * dy.double().abs()).sum(-1))


@pytest.mark.parametrize("shape", [(6, 64), (2, 3, 128), (128,)], ids=str)
@sampled("dtype", DTYPES, 2, ids=str)
@sampled("name", SCALED, 3)
def test_scaled_forward_and_backward(name, dtype, shape):
    torch.manual_seed(13)
    x, scales = _random(shape, dtype).requires_grad_(), _random(shape[:-1], dtype).requires_grad_()
    if not scales.dim():
        scales = scales.detach().reshape(1).requires_grad_()
    y = SCALED[name][0]()(x, scales)
    assert y.dtype == dtype
    dy = _random(y.shape, dtype)
    y.backward(dy)
    assert scales.grad.shape == scales.shape
    if len(shape) == 1:
        x, y, dy, gradient = x.detach()[None], y[None], dy[None], x.grad[None]
    else:
        gradient = x.grad
    _check_scaled(name, x, scales, y, dy, gradient, scales.grad)


@pytest.mark.parametrize("name", SCALED_GLUS)
def test_scaled_interleaved_rows(name):
    torch.manual_seed(15)
    x, scales = _random((6, 128), torch.bfloat16), _random((6,), torch.float32)
    plain, shuffled = x.clone().requires_grad_(), _interleave_by_columns(x, 32).requires_grad_()
    scales_plain, scales_shuffled = scales.clone().requires_grad_(), scales.clone().requires_grad_()
    expected = SCALED[name][0]()(plain, scales_plain)
    y = SCALED[name][0](32)(shuffled, scales_shuffled)
    assert same_bits(y.detach(), expected.detach())
    dy = _random(y.shape, torch.bfloat16)
    expected.backward(dy)
    y.backward(dy)
    assert same_bits(shuffled.grad, _interleave_by_columns(plain.grad, 32))
    assert same_bits(scales_shuffled.grad, scales_plain.grad)
    assert scales_plain.grad.dtype == torch.float32
    assert same_bits(scales_plain.grad, scales_plain.grad.bfloat16().float())  # rounded in the compute dtype


@pytest.mark.parametrize("name", SCALED)
def test_scales_without_gradient(name):
    x, scales = _random((4, 64), torch.bfloat16), torch.ones(4)
    y, ctx = call_forward(
        SCALED[name][0](),
        x,
        extra_inputs=(scales,),
        next_quantizer=new_quantizer("mxfp8"),
        previous_quantizer=new_quantizer("mxfp8"),
    )
    assert type(y) is torch.Tensor  # neighbours' quantizers are ignored
    dx, _, (dscales,) = call_backward(SCALED[name][0](), ctx, torch.ones_like(y))
    assert type(dx) is torch.Tensor
    assert dscales is None


@pytest.mark.parametrize("name", SCALED)
def test_scaled_gradcheck_in_float64(name):
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    scales = torch.randn(3, dtype=torch.float64, requires_grad=True)
    with backend("float64"):
        assert torch.autograd.gradcheck(SCALED[name][0](), (x, scales))


@pytest.mark.parametrize("name", SCALED)
def test_scaled_errors(name):
    make = SCALED[name][0]
    with pytest.raises(ValueError, match=r"got shape \(5,\) for an input of shape \(4, 64\)"):
        make()(torch.ones(4, 64), torch.ones(5))
    with pytest.raises(ValueError, match="Expected 1 extra inputs but got 0"):
        make()(torch.ones(4, 64))
    for method in ("op_forward", "op_backward"):
        with pytest.raises(RuntimeError, match="It overrides `fuser_"):
            getattr(make(), method)(None, None)


@pytest.mark.parametrize("name", SCALED_GLUS)
def test_scaled_glus_refuse_recomputation(name):
    with pytest.raises(ValueError, match="does not support activation recomputation"):
        SCALED[name][0](activation_recompute_in_mlp=True)


def test_scaled_srelu_with_recomputation_runs_only_fused():
    op = activation.ScaledSReLU(activation_recompute_in_mlp=True)
    with pytest.raises(RuntimeError, match="requires the fused grouped MLP path"):
        op(torch.ones(2, 8), torch.ones(2))
    with pytest.raises(RuntimeError, match="requires the fused grouped MLP path"):
        op.fuser_backward([], None, basic_op_grad_extra_outputs=[])


def test_scaled_empty_rows():
    x, scales = torch.empty(0, 64, requires_grad=True), torch.empty(0, requires_grad=True)
    y = activation.ScaledSwiGLU()(x, scales)
    assert y.shape == (0, 32)
    y.sum().backward()
    assert x.grad.shape == (0, 64)
    assert scales.grad.shape == (0,)


# --- names that a declaration would take away -----------------------------------------------------


@pytest.mark.parametrize("name", ["Linear", "BasicOperation", "Bias", "torch"])
def test_a_class_that_fuser_has_already_is_refused(name):
    """`fuser.ops.Linear` must be no activation, `fuser.ops.SiLU` may be published again."""
    publish({"SiLU": ops.SiLU}, vars(ops))
    made = activation.operation_of(refops.ACTIVATIONS["silu"], activation._ActivationOperation, name, "")
    with pytest.raises(ValueError, match=rf"^a name .* must be none that fuser.* has already; got '{name}', <"):
        publish({name: made}, vars(activation) if name == "torch" else vars(ops))


@pytest.mark.parametrize("name", ["forward", "activation", "training", "num_extra_inputs"])
def test_a_parameter_that_is_an_attribute_of_operations_is_refused(name):
    act = replace(refops.ACTIVATIONS["silu"].act, parameters=(Parameter(name, 1.0, other=2.0),))
    row = replace(refops.ACTIVATIONS["silu"], act=act)
    with pytest.raises(ValueError, match=rf"^name of a parameter of silu must not be an attribute .*; got '{name}'"):
        activation.operation_of(row, activation._ActivationOperation, "SiLU", "")
