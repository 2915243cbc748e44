"""Backward fusions around a linear: when they fire, and what they compute."""

import pytest
import torch
from linear_cases import RECIPES, assert_product, exact_linear, linear_quantizers, plan, seeded
from one_rounding import DTYPES, same_bits

import fuser.ops as te_ops
from fuser.fused import BackwardLinearAdd, BackwardLinearScale
from fuser.fuser import OperationFuser, fusions
from fuser.quantization.contexts import autocast
from fuser.quantization.state import FP8GlobalStateManager

pytestmark = pytest.mark.check


def _linear(in_features=64, out_features=64, **options):
    torch.manual_seed(1)
    return te_ops.Linear(in_features, out_features, **options)


def _backward_plan(*ops):
    pipeline = OperationFuser(list(ops))
    extra_inputs = [torch.zeros(4, 64) for _ in range(pipeline.num_extra_inputs)]
    pipeline(torch.zeros(4, 64, requires_grad=True), *extra_inputs)
    return plan(pipeline._backward_ops)


# --- plans ------------------------------------------------------------------------------------------


def test_observed_plans():
    """Section 5.8 of the specification: what TE's own fuser was seen to do."""
    assert _backward_plan(_linear(dtype=torch.bfloat16), te_ops.GELU()) == [
        ("BasicLinear", [0]),
        ("Bias", [1]),
        ("GELU", [2]),
    ]
    assert _backward_plan(_linear(bias=False), te_ops.ConstantScale(2.0), te_ops.AddExtraInput(in_place=True)) == [
        ("BackwardLinearScale", [0, 1]),
        ("AddExtraInput", [2]),
    ]
    assert _backward_plan(te_ops.MakeExtraOutput(), te_ops.RMSNorm(64), _linear()) == [
        ("BackwardAddRMSNorm", [0, 1]),
        ("BasicLinear", [2]),
        ("Bias", [3]),
    ]
    assert _backward_plan(te_ops.MakeExtraOutput(in_place=True), _linear(bias=False), te_ops.ConstantScale(2.0)) == [
        ("BackwardLinearAdd", [0, 1]),
        ("ConstantScale", [2]),
    ]


def test_plans_where_nothing_is_fused():
    assert _backward_plan(te_ops.MakeExtraOutput(), _linear(bias=False)) == [
        ("MakeExtraOutput", [0]),
        ("BasicLinear", [1]),
    ]
    assert _backward_plan(_linear(), te_ops.ConstantScale(2.0)) == [
        ("BasicLinear", [0]),
        ("Bias", [1]),
        ("ConstantScale", [2]),
    ]


def test_column_parallel_linears_stay_unfused():
    linear = te_ops.BasicLinear(8, 8)
    windows = {
        BackwardLinearAdd: [te_ops.MakeExtraOutput(in_place=True), linear],
        BackwardLinearScale: [linear, te_ops.ConstantScale(2.0)],
    }
    for fused_class, window in windows.items():
        linear.tensor_parallel_mode = "row"
        (fused,) = fused_class.fuse_backward_ops(window, recipe=None)
        assert isinstance(fused, fused_class)
        assert list(fused.basic_ops) == window
        linear.tensor_parallel_mode = "column"
        assert fused_class.fuse_backward_ops(window, recipe=None) == window
        (candidate,) = fused_class.fuse_backward_ops.candidates(window)
        assert "column parallel" in candidate.reason
    (candidate,) = BackwardLinearAdd.fuse_backward_ops.candidates([te_ops.MakeExtraOutput(), linear])
    assert "not in place" in candidate.reason


# --- BackwardLinearAdd ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_input_gradient_accumulates_into_the_extra_output_s(dtype):
    linear = _linear(bias=False, dtype=dtype)
    x = seeded(32, 64, dtype=dtype, requires_grad=True)
    dy, dextra = seeded(32, 64, dtype=dtype, seed=2), seeded(32, 64, dtype=dtype, seed=3)
    start = dextra.double()
    y, extra = te_ops.Sequential(te_ops.MakeExtraOutput(in_place=True), linear)(x)
    torch.autograd.backward([y, extra], [dy, dextra])
    exact = exact_linear(x, linear.weight, dy)
    assert_product(x.grad, (exact["dx"][0] + start, exact["dx"][1] + start.abs()))
    assert_product(linear.weight.grad, exact["dw"])
    # The gradient was added where the caller's was
    assert same_bits(dextra, x.grad)


def test_the_extra_gradient_decides_the_compute_dtype():
    linear = _linear(bias=False, dtype=torch.bfloat16)
    x = seeded(32, 64, requires_grad=True)
    dy, dextra = seeded(32, 64, dtype=torch.bfloat16, seed=2), seeded(32, 64, seed=3)
    start = dextra.double()
    y, extra = te_ops.Sequential(te_ops.MakeExtraOutput(in_place=True), linear)(x)
    assert extra.dtype == torch.float32
    torch.autograd.backward([y, extra], [dy, dextra])
    exact = exact_linear(x.bfloat16(), linear.weight, dy)
    assert x.grad.dtype == torch.float32
    assert_product(x.grad, (exact["dx"][0] + start, exact["dx"][1] + start.abs()))


def test_expanded_and_unused_extra_gradients():
    linear = _linear(bias=False)
    dy = seeded(8, 64, seed=2)
    exact = exact_linear(torch.ones(8, 64), linear.weight, dy)["dx"]
    pipeline = te_ops.Sequential(te_ops.MakeExtraOutput(in_place=True), linear)
    x = torch.ones(8, 64, requires_grad=True)
    y, extra = pipeline(x)
    ((y * dy).sum() + extra.sum()).backward()  # the gradient of a sum is one number seen many times
    assert_product(x.grad, (exact[0] + 1, exact[1] + 1))
    x.grad = None
    y, _ = pipeline(x)
    y.backward(dy)
    assert_product(x.grad, exact)


def test_an_extra_output_that_nobody_takes_has_no_gradient():
    linear = _linear(bias=False)
    make = te_ops.MakeExtraOutput(in_place=True)
    make.set_extra_output_channel(0, "unused", output_to_caller=False)
    dy = seeded(8, 64, seed=2)
    x = seeded(8, 64, requires_grad=True)
    y = te_ops.Sequential(make, linear)(x)
    y.backward(dy)
    assert_product(x.grad, exact_linear(x, linear.weight, dy)["dx"])


# --- BackwardLinearScale ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scale_multiplies_the_products(dtype):
    linear = _linear(bias=False, dtype=dtype)
    x = seeded(32, 64, dtype=dtype, requires_grad=True)
    dy = seeded(32, 64, dtype=dtype, seed=2)
    y = te_ops.Sequential(linear, te_ops.ConstantScale(-0.3))(x)
    y.backward(dy)
    exact = exact_linear(x, linear.weight, dy)
    assert_product(x.grad, (-0.3 * exact["dx"][0], 0.3 * exact["dx"][1]))
    assert_product(linear.weight.grad, (-0.3 * exact["dw"][0], 0.3 * exact["dw"][1]))


def test_the_unscaled_gradient_is_quantized():
    """So that a scale that would make it underflow does no harm."""
    scale = 2.0**-40
    linear = _linear(bias=False)
    x, dy = seeded(32, 64, requires_grad=True), seeded(32, 64, seed=2)
    recipe = RECIPES["delayed"]()
    with autocast(recipe=recipe):
        y = te_ops.Sequential(linear, te_ops.ConstantScale(scale))(x)
    y.backward(dy)
    _, w_quantizer, dy_quantizer = linear_quantizers(recipe)
    dy_used = dy_quantizer(dy).dequantize()
    w_used = w_quantizer(linear.weight.detach()).dequantize()
    assert torch.equal(x.grad, dy_used @ w_used * scale)
    assert x.grad.abs().max() > 0


def test_main_gradients_with_a_scale():
    linear = _linear(bias=False, accumulate_into_main_grad=True)
    linear.weight.main_grad = torch.full((64, 64), 0.25)
    x, dy = seeded(8, 64), seeded(8, 64, seed=2)
    te_ops.Sequential(linear, te_ops.ConstantScale(3.0))(x).backward(dy)
    value, magnitude = exact_linear(x, linear.weight, dy)["dw"]
    assert_product(linear.weight.main_grad, (3 * value + 0.25, 3 * magnitude + 0.25))
    assert linear.weight.grad is None


# --- fused and unfused ------------------------------------------------------------------------------


def _gradients(kind, dtype, recipe):
    linear = _linear(bias=False, dtype=dtype)
    ops = {
        "add": [te_ops.MakeExtraOutput(in_place=True), linear],
        "scale": [linear, te_ops.ConstantScale(0.5)],
        "both": [te_ops.MakeExtraOutput(in_place=True), linear, te_ops.ConstantScale(0.5)],
    }[kind]
    x = seeded(64, 64, dtype=dtype, requires_grad=True)
    with autocast(enabled=recipe is not None, recipe=recipe):
        outputs = te_ops.Sequential(*ops)(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.manual_seed(5)
    torch.autograd.backward(outputs, [seeded(64, 64, dtype=dtype, seed=3 + i) for i in range(len(outputs))])
    FP8GlobalStateManager.reset()
    return x.grad, linear.weight.grad


@pytest.mark.parametrize("recipe", [None, *RECIPES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["add", "scale", "both"])
def test_fused_is_unfused_within_the_roundings_saved(kind, dtype, recipe):
    """A scale of one half commutes with every cast but the clipped or underflowing ones of delayed scaling."""
    recipe = RECIPES[recipe]() if recipe else None
    fused = _gradients(kind, dtype, recipe)
    with fusions(only=True):
        unfused = _gradients(kind, dtype, recipe)
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2**-7}[dtype]
    if recipe is not None and kind != "add":
        tolerance = 5e-3
    for one, other in zip(fused, unfused, strict=True):
        assert (one.float() - other.float()).abs().max() <= tolerance * other.float().abs().max()


def test_a_second_backward_of_a_retained_graph():
    linear = _linear(bias=False)
    x = seeded(8, 64, requires_grad=True)
    dy = seeded(8, 64, seed=2)
    y, extra = te_ops.Sequential(te_ops.MakeExtraOutput(in_place=True), linear)(x)
    grads = []
    for _ in range(2):
        torch.autograd.backward([y, extra], [dy, seeded(8, 64, seed=3)], retain_graph=True)
        grads.append(x.grad)
        x.grad = None
    assert same_bits(*grads)
