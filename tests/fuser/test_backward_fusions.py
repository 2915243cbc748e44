"""BackwardActivationBias and BackwardAddRMSNorm: when they fire, why not, and what they compute."""

import copy

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

from fuser import functional, ops
from fuser.fused import BackwardActivationBias, BackwardAddRMSNorm
from fuser.fuser import OperationFuser, fusions
from fuser.op import OperationContext
from fuser.quantization.contexts import autocast
from fuser.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

pytestmark = pytest.mark.check

ACTIVATIONS = {
    "dgelu": ops.GELU,
    "dqgelu": ops.QGELU,
    "drelu": ops.ReLU,
    "dsrelu": ops.SReLU,
    "dsilu": ops.SiLU,
    "dglu": ops.GLU,
    "dgeglu": ops.GEGLU,
    "dqgeglu": ops.QGEGLU,
    "dreglu": ops.ReGLU,
    "dsreglu": ops.SReGLU,
    "dswiglu": ops.SwiGLU,
    "dsituglu": ops.SiTUGLU,
    "clamped_dswiglu": ops.ClampedSwiGLU,
}
RECIPES = {
    "delayed": DelayedScaling,
    "current": Float8CurrentScaling,
    "mxfp8": MXFP8BlockScaling,
    "block": Float8BlockScaling,
    "nvfp4": NVFP4BlockScaling,
}


# --- activation and bias ----------------------------------------------------------------------------


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_bias_and_activation_gradients_are_those_of_the_fused_function(name, quantizer):
    torch.manual_seed(1)
    x = torch.randn(64, 256).bfloat16()
    activation = ACTIVATIONS[name]()
    y, activation_ctx = call_forward(activation, x)
    dy = torch.randn(y.shape).bfloat16()
    used, expected = new_quantizer(quantizer), new_quantizer(quantizer)
    bias_ctx = OperationContext()
    bias_ctx.grad_input_quantizer = used

    fused = BackwardActivationBias(bias=ops.Bias(256), activation=activation)
    torch.manual_seed(2)
    dx, gradients, extra_gradients = fused.fuser_backward(
        [bias_ctx, activation_ctx], dy, basic_op_grad_extra_outputs=[(), ()]
    )
    torch.manual_seed(2)
    dbias, reference = getattr(functional, f"dbias_{name}")(dy, x, expected)
    assert_same_quantized(dx, reference)
    (bias_gradient,), activation_gradients = gradients
    assert same_bits(bias_gradient, dbias)
    assert tuple(activation_gradients) == ()
    assert [tuple(g) for g in extra_gradients] == [(), ()]
    if quantizer == "delayed":
        assert same_bits(used.amax, expected.amax)


def test_parameters_and_cached_inputs_reach_the_fused_function():
    x = torch.randn(32, 128).bfloat16() * 3
    activation = ops.ClampedSwiGLU(limit=0.75, alpha=1.3, glu_linear_offset=0.25, cache_quantized_input=True)
    y, activation_ctx = call_forward(activation, x)
    dy = torch.randn(y.shape).bfloat16()
    bias_ctx = OperationContext()
    bias_ctx.grad_input_quantizer = new_quantizer("mxfp8")
    (saved,) = activation_ctx.saved_tensors
    dbias, reference = functional.dbias_clamped_dswiglu(
        dy, saved.dequantize(), new_quantizer("mxfp8"), limit=0.75, alpha=1.3, glu_linear_offset=0.25
    )
    fused = BackwardActivationBias(bias=ops.Bias(128), activation=activation)
    dx, gradients, _ = fused.fuser_backward([bias_ctx, activation_ctx], dy, basic_op_grad_extra_outputs=[(), ()])
    assert_same_quantized(dx, reference)
    assert same_bits(gradients[0][0], dbias)


def test_missing_quantizer_at_run_time():
    activation = ops.GELU()
    _, activation_ctx = call_forward(activation, torch.randn(2, 4))
    bias_ctx = OperationContext()
    bias_ctx.grad_input_quantizer = None
    fused = BackwardActivationBias(bias=ops.Bias(4), activation=activation)
    with pytest.raises(RuntimeError, match="quantizer"):
        fused.fuser_backward([bias_ctx, activation_ctx], torch.ones(2, 4), basic_op_grad_extra_outputs=[(), ()])


def _candidates(recipe, *operations):
    return [
        (c.start, c.stop, c.reason) for c in BackwardActivationBias.fuse_backward_ops.candidates(operations, recipe)
    ]


def _linear_with_quantizers(recipe):
    linear = ops.BasicLinear(64, 64)
    linear.reset_recipe_state(recipe=recipe)
    return linear


def test_when_it_fires_and_why_not():
    recipe = MXFP8BlockScaling()
    linear = _linear_with_quantizers(recipe)
    bias, gelu = ops.Bias(64), ops.GELU()
    assert _candidates(recipe, linear, bias, gelu) == [(1, 3, None)]
    ((_, _, reason),) = _candidates(None, linear, bias, gelu)
    assert "no recipe" in reason
    ((_, _, reason),) = _candidates(MXFP8BlockScaling(backward_override="high_precision"), linear, bias, gelu)
    assert "backward_override is 'high_precision'" in reason
    ((_, _, reason),) = _candidates(recipe, ops.Identity(), bias, gelu)
    assert "Identity before the bias takes no quantized gradient" in reason
    ((_, _, reason),) = _candidates(recipe, linear, bias, ops.SwiGLU(glu_interleave_size=32))
    assert "glu_interleave_size is set" in reason
    assert _candidates(recipe, linear, gelu, bias) == []
    assert _candidates(recipe, bias, gelu) == []  # TE wants an operation before the bias
    fused = BackwardActivationBias.fuse_backward_ops([linear, bias, gelu, ops.Identity()], recipe=recipe)
    assert [type(op) for op in fused] == [ops.BasicLinear, BackwardActivationBias, ops.Identity]
    assert list(fused[1].basic_ops) == [bias, gelu]


def _gradients(model, x, recipe, *, fuse):
    """Gradients of input, weight and bias, and the names of the operations that made them."""
    model = copy.deepcopy(model)  # with amax histories of its own
    leaf = x.clone().requires_grad_()
    with fusions(backward=BackwardActivationBias.fuse_backward_ops if fuse else (), only=True):
        pipeline = OperationFuser(list(model))
        with autocast(enabled=True, recipe=recipe):
            y = pipeline(leaf)
        y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape).bfloat16())
    names = [type(op).__name__ for op, _ in pipeline._backward_ops]
    return [leaf.grad, *(p.grad for p in model.parameters())], names


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("activation", [ops.GELU, ops.SReLU, ops.SwiGLU, ops.ClampedSwiGLU])
def test_a_pipeline_with_and_without_the_fusion(activation, name):
    """The fusion changes what TE's path changes: the cast's input or amax (delayed, current, NVFP4), the bias' terms.

    MXFP8 and block scaling quantize the rounded gradient in either case: bit-equal. The others get a 2-bit mantissa
    from slightly other numbers.
    """
    torch.manual_seed(3)
    x = torch.randn(32, 64).bfloat16()
    linear = ops.BasicLinear(64, 128, dtype=torch.bfloat16)
    model = torch.nn.ModuleList([linear, ops.Bias(128, dtype=torch.bfloat16), activation()])
    # Stochastic rounding would draw other numbers in each run.
    recipe = RECIPES[name](**({"disable_stochastic_rounding": True} if name == "nvfp4" else {}))
    fused, fused_names = _gradients(model, x, recipe, fuse=True)
    separate, separate_names = _gradients(model, x, recipe, fuse=False)
    assert fused_names == ["BasicLinear", "BackwardActivationBias"]
    assert separate_names == ["BasicLinear", "Bias", activation.__name__]
    for left, right in zip(fused[:2], separate[:2], strict=True):
        if name in ("mxfp8", "block"):
            assert same_bits(left, right)
        else:
            assert (left - right).norm() <= 0.1 * right.norm()
    if name in ("delayed", "mxfp8"):  # sums of unrounded and of rounded terms
        assert (fused[2] - separate[2]).abs().max() <= 2**-6 * separate[2].abs().max()
    else:
        assert same_bits(fused[2], separate[2])


# --- addition and RMSNorm ---------------------------------------------------------------------------


def _residual_pipeline(dtype, width=48, **kwargs):
    op = ops.RMSNorm(width, dtype=dtype, **kwargs)
    with torch.no_grad():
        op.weight.copy_(torch.randn(width))
    return OperationFuser([ops.MakeExtraOutput(), op]), op


def _truth(op, x, dy, extra):
    x64 = x.detach().double().requires_grad_()
    weight = op.weight.detach().double().requires_grad_()
    gain = weight + 1 if op.zero_centered_gamma else weight
    (x64 * (x64.square().mean(-1, keepdim=True) + op.eps).rsqrt() * gain).backward(dy.double())
    return x64.grad + extra.double(), weight.grad


def _magnitudes(op, x, dy, extra):
    x, slope = x.detach().double(), dy.double().abs() * (op.weight.detach().double().abs() + op.zero_centered_gamma)
    rstd = (x.square().mean(-1, keepdim=True) + op.eps).rsqrt()
    normalized = x.abs() * rstd
    dx = rstd * (slope + normalized * (slope * normalized).mean(-1, keepdim=True)) + extra.double().abs()
    return dx, (dy.double().abs() * normalized).flatten(0, -2).sum(0)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_rounding_of_the_sum(dtype, zero_centered):
    torch.manual_seed(5)
    pipeline, op = _residual_pipeline(dtype, zero_centered_gamma=zero_centered)
    x = torch.randn(2, 40, 48).to(dtype).requires_grad_()
    y, branch = pipeline(x)
    assert [type(step).__name__ for step, _ in pipeline._backward_ops] == ["BackwardAddRMSNorm"]
    dy, extra = torch.randn(x.shape).to(dtype), torch.randn(x.shape).to(dtype)
    torch.autograd.backward([y, branch], [dy, extra])
    truth, weight_truth = _truth(op, x, dy, extra)
    magnitude, weight_magnitude = _magnitudes(op, x, dy, extra)
    assert_one_rounding(x.grad, truth, magnitude)
    assert_one_rounding(op.weight.grad, weight_truth, weight_magnitude)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_separate_addition_rounds_twice(dtype):
    """The same bound as above: it can tell one rounding from two."""
    torch.manual_seed(5)
    _, op = _residual_pipeline(dtype)
    x, dy, extra = (torch.randn(2, 40, 48).to(dtype) for _ in range(3))
    _, ctx = call_forward(op, x)
    separate = call_backward(op, ctx, dy)[0] + extra
    with pytest.raises(AssertionError, match="elements; first"):
        assert_one_rounding(separate, _truth(op, x, dy, extra)[0], _magnitudes(op, x, dy, extra)[0])


def test_a_missing_gradient_is_zero():
    pipeline, op = _residual_pipeline(torch.float32)
    x = torch.randn(4, 48, requires_grad=True)
    y, _ = pipeline(x)
    dy = torch.randn(4, 48)
    y.backward(dy)
    _, ctx = call_forward(op, x.detach())
    assert same_bits(x.grad, call_backward(op, ctx, dy)[0])

    fused = BackwardAddRMSNorm(add=ops.MakeExtraOutput(), rmsnorm=op)
    dx, gradients, _ = fused.fuser_backward([OperationContext(), ctx], dy, basic_op_grad_extra_outputs=[(None,), ()])
    assert same_bits(dx, x.grad)
    assert same_bits(gradients[1][0], op.weight.grad)


def test_non_contiguous_and_retained_graph():
    pipeline, op = _residual_pipeline(torch.bfloat16)
    x = torch.randn(48, 6).bfloat16().t().requires_grad_()
    y, branch = pipeline(x)
    dy, extra = torch.randn(48, 6).bfloat16().t(), torch.randn(48, 6).bfloat16().t()
    torch.autograd.backward([y, branch], [dy, extra], retain_graph=True)
    truth, _ = _truth(op, x, dy, extra)
    assert_one_rounding(x.grad, truth, _magnitudes(op, x, dy, extra)[0])
    first, x.grad = x.grad, None
    torch.autograd.backward([y, branch], [dy, extra])
    assert torch.equal(first, x.grad)


def test_it_does_not_fire_in_place():
    operations = [ops.MakeExtraOutput(in_place=True), ops.RMSNorm(8)]
    (candidate,) = BackwardAddRMSNorm.fuse_backward_ops.candidates(operations)
    assert "in place" in candidate.reason
    assert BackwardAddRMSNorm.fuse_backward_ops(operations, recipe=None) == operations
    assert list(BackwardAddRMSNorm.fuse_backward_ops.candidates([ops.MakeExtraOutput(), ops.LayerNorm(8)])) == []
