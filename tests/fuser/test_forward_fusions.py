"""Forward fusions around a linear: when they fire, and that the fused pass is the unfused one with fewer roundings."""

from itertools import product

import pytest
import torch
from linear_cases import RECIPES, assert_product, exact_linear, plan, seeded
from one_rounding import DTYPES, same_bits

import fuser.ops as te_ops
from fuser.fused import ForwardLinearBiasActivation, ForwardLinearBiasAdd, ForwardLinearScaleAdd
from fuser.fuser import OperationFuser, fusions
from fuser.quantization.contexts import autocast
from fuser.quantization.state import FP8GlobalStateManager
from fuser.recipe import DelayedScaling
from tiers import sampled

HALVES = [torch.bfloat16, torch.float16]


def _linear(in_features=64, out_features=64, **options):
    torch.manual_seed(1)
    linear = te_ops.Linear(in_features, out_features, **options)
    if linear.bias is not None:
        with torch.no_grad():
            linear.bias.normal_()
    return linear


def _forward_plan(*ops, dtype=torch.float32, extra=None, recipe=None):
    pipeline = OperationFuser(list(ops))
    extra_inputs = () if extra is None else (torch.zeros(32, 64, dtype=extra),)
    with autocast(enabled=recipe is not None, recipe=recipe):
        pipeline(torch.zeros(32, 64, dtype=dtype), *extra_inputs)
    return plan(pipeline._forward_ops)


# --- plans ------------------------------------------------------------------------------------------


def test_observed_plans():
    """Section 5.8 of the specification: what TE's own fuser was seen to do."""
    bf16, fp32 = torch.bfloat16, torch.float32
    assert _forward_plan(_linear(dtype=bf16), te_ops.GELU()) == [
        ("ForwardLinearBiasActivation", [0, 1]),
        ("GELU", [2]),
    ]
    for dtype in (bf16, fp32):
        assert _forward_plan(_linear(dtype=dtype), te_ops.AddExtraInput(in_place=True), extra=dtype) == [
            ("ForwardLinearBiasAdd", [0, 1, 2])
        ]
    assert _forward_plan(_linear(dtype=bf16), te_ops.AddExtraInput(), extra=bf16) == [
        ("ForwardLinearBiasActivation", [0, 1]),
        ("AddExtraInput", [2]),
    ]
    assert _forward_plan(
        _linear(bias=False), te_ops.ConstantScale(2.0), te_ops.AddExtraInput(in_place=True), extra=fp32
    ) == [("ForwardLinearScaleAdd", [0, 1, 2])]


def test_plans_where_nothing_or_less_is_fused():
    fp32 = torch.float32
    unfused = [("BasicLinear", [0]), ("Bias", [1])]
    assert _forward_plan(_linear()) == unfused
    assert _forward_plan(_linear(bias=False), te_ops.AddExtraInput(in_place=True), extra=fp32) == [
        ("ForwardLinearBiasAdd", [0, 1])
    ]
    assert _forward_plan(_linear(), te_ops.ConstantScale(2.0), te_ops.AddExtraInput(in_place=True), extra=fp32) == [
        *unfused,
        ("ConstantScale", [2]),
        ("AddExtraInput", [3]),
    ]
    assert _forward_plan(_linear(bias=False), te_ops.ConstantScale(2.0), te_ops.AddExtraInput(), extra=fp32) == [
        ("BasicLinear", [0]),
        ("ConstantScale", [1]),
        ("AddExtraInput", [2]),
    ]


def test_row_parallel_linears_stay_unfused():
    linear = te_ops.BasicLinear(8, 8, dtype=torch.bfloat16)
    ops = {
        ForwardLinearBiasActivation: [linear, te_ops.Bias(8)],
        ForwardLinearBiasAdd: [linear, te_ops.Bias(8), te_ops.AddExtraInput(in_place=True)],
        ForwardLinearScaleAdd: [linear, te_ops.ConstantScale(1.0), te_ops.AddExtraInput(in_place=True)],
    }
    for fused_class, window in ops.items():
        linear.tensor_parallel_mode = "column"
        (fused,) = fused_class.fuse_forward_ops(window, recipe=None)
        assert isinstance(fused, fused_class)
        assert list(fused.basic_ops) == window
        linear.tensor_parallel_mode = "row"
        assert fused_class.fuse_forward_ops(window, recipe=None) == window
        (candidate,) = fused_class.fuse_forward_ops.candidates(window)
        assert "row parallel" in candidate.reason


def test_a_refused_window_says_why():
    candidates = ForwardLinearBiasActivation.fuse_forward_ops.candidates([te_ops.BasicLinear(8, 8), te_ops.Bias(8)])
    assert "float32" in next(iter(candidates)).reason
    window = [te_ops.BasicLinear(8, 8), te_ops.AddExtraInput()]
    assert "not in place" in next(iter(ForwardLinearBiasAdd.fuse_forward_ops.candidates(window))).reason


# --- values -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_bias_in_the_product_is_one_rounding(dtype):
    linear = _linear(dtype=dtype)
    x = seeded(32, 64, dtype=dtype, requires_grad=True)
    y = linear(x)
    value, magnitude = exact_linear(x, linear.weight)["y"]
    bias = linear.bias.detach().double()
    assert_product(y, (value + bias, magnitude + bias.abs()))
    # The test can tell: two roundings are somewhere outside of what one may give
    with fusions(only=True):
        unfused = linear(x)
    with pytest.raises(AssertionError):
        assert_product(unfused, (value + bias, magnitude + bias.abs()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_product_accumulates_into_the_extra_input(dtype, bias):
    linear = _linear(bias=bias, dtype=dtype)
    x = seeded(32, 64, dtype=dtype, requires_grad=True)
    extra = seeded(32, 64, dtype=dtype, seed=2, requires_grad=True)
    start, memory = extra.detach().clone(), extra.detach()
    dy = seeded(32, 64, dtype=dtype, seed=3)
    y = te_ops.Sequential(linear, te_ops.AddExtraInput(in_place=True))(x, extra)
    y.backward(dy)

    value, magnitude = exact_linear(x, linear.weight)["y"]
    b = linear.bias.detach().double() if bias else torch.zeros(64, dtype=torch.float64)
    assert_product(y, (value + b + start.double(), magnitude + b.abs() + start.double().abs()))
    assert y.data_ptr() == memory.data_ptr()
    assert torch.equal(extra.grad, dy)
    exact = exact_linear(x, linear.weight, dy)
    assert_product(x.grad, exact["dx"])
    assert_product(linear.weight.grad, exact["dw"])
    if bias:
        assert_product(linear.bias.grad, (dy.double().sum(0), dy.double().abs().sum(0)))


@pytest.mark.parametrize("scale", [None, -0.7])
def test_compute_dtype_is_that_of_the_extra_input(scale):
    linear = _linear(bias=scale is None, dtype=torch.bfloat16)
    x, extra = seeded(32, 64), seeded(32, 64, seed=2)
    start = extra.double()
    between = [] if scale is None else [te_ops.ConstantScale(scale)]
    y = te_ops.Sequential(linear, *between, te_ops.AddExtraInput(in_place=True))(x, extra)
    value, magnitude = (part * abs(scale or 1) for part in exact_linear(x, linear.weight)["y"])
    bias = linear.bias.detach().double() if scale is None else torch.zeros(64, dtype=torch.float64)
    assert y.dtype == torch.float32
    value = value if scale is None else -value
    assert_product(y, (value + bias + start, magnitude + bias.abs() + start.abs()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scaled_product_accumulates_into_the_extra_input(dtype):
    linear = _linear(bias=False, dtype=dtype)
    x = seeded(32, 64, dtype=dtype, requires_grad=True)
    extra = seeded(32, 64, dtype=dtype, seed=2)
    start = extra.double()
    y = te_ops.Sequential(linear, te_ops.ConstantScale(-0.7), te_ops.AddExtraInput(in_place=True))(x, extra)
    value, magnitude = exact_linear(x, linear.weight)["y"]
    assert_product(y, (-0.7 * value + start, 0.7 * magnitude + start.abs()))
    assert y.data_ptr() == extra.data_ptr()
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    assert linear.weight.grad is not None


# --- fused and unfused ------------------------------------------------------------------------------


def _pipelines():
    return {
        "bias": lambda dtype: (te_ops.Sequential(_linear(dtype=dtype)), False),
        "bias, gelu": lambda dtype: (te_ops.Sequential(_linear(dtype=dtype), te_ops.GELU()), False),
        "two linears": lambda dtype: (te_ops.Sequential(_linear(dtype=dtype), _linear(dtype=dtype)), False),
        "add": lambda dtype: (te_ops.Sequential(_linear(dtype=dtype), te_ops.AddExtraInput(in_place=True)), True),
        "scale, add": lambda dtype: (
            te_ops.Sequential(
                _linear(bias=False, dtype=dtype), te_ops.ConstantScale(0.5), te_ops.AddExtraInput(in_place=True)
            ),
            True,
        ),
    }


def _run(pipeline, dtype, with_extra, recipe):
    x = seeded(64, 64, dtype=dtype, requires_grad=True)
    extra = seeded(64, 64, dtype=dtype, seed=2)
    with autocast(enabled=recipe is not None, recipe=recipe):
        y = pipeline(x, *([extra] if with_extra else []))
    torch.manual_seed(5)
    y.backward(seeded(64, 64, dtype=dtype, seed=3))
    results = [y.detach(), x.grad, *(p.grad for p in pipeline.parameters())]
    pipeline.zero_grad()
    return results


@sampled(
    ("name", "dtype", "recipe"),
    product(_pipelines(), [torch.float32, torch.bfloat16], [None, *RECIPES]),
    5,
    in_all=1,
    ids=str,
)
def test_fused_is_unfused_within_the_roundings_saved(name, dtype, recipe):
    pipeline, with_extra = _pipelines()[name](dtype)
    recipe_instance = RECIPES[recipe]() if recipe else None
    fused = _run(pipeline, dtype, with_extra, recipe_instance)
    FP8GlobalStateManager.reset()
    pipeline, with_extra = _pipelines()[name](dtype)
    with fusions(only=True):
        unfused = _run(pipeline, dtype, with_extra, recipe_instance)
    # Where a rounding that fusion saves lies before a cast, a code may move to its neighbour
    casts_after = name in ("two linears", "bias, gelu") and recipe is not None
    tolerance = 0.1 if casts_after else {torch.float32: 2e-6, torch.bfloat16: 2**-7}[dtype]
    for one, other in zip(fused, unfused, strict=True):
        assert (one.float() - other.float()).abs().max() <= tolerance * other.float().abs().max()


@pytest.mark.parametrize("recipe", RECIPES)
def test_fused_bias_emits_into_the_next_linear_and_takes_quantized_gradients(recipe):
    first, second = _linear(dtype=torch.bfloat16), _linear(dtype=torch.bfloat16)
    pipeline = OperationFuser([first, second])
    x = seeded(64, 64, dtype=torch.bfloat16, requires_grad=True)
    with autocast(recipe=RECIPES[recipe]()):
        y = pipeline(x)
    y.sum().backward()
    assert plan(pipeline._forward_ops) == [
        ("ForwardLinearBiasActivation", [0, 1]),
        ("ForwardLinearBiasActivation", [2, 3]),
    ]
    assert first.bias.grad is not None
    assert torch.isfinite(x.grad).all()


def test_outputs_that_share_the_extra_input_are_never_quantized():
    add = te_ops.AddExtraInput(in_place=True)
    with autocast(recipe=DelayedScaling()):
        y = te_ops.Sequential(_linear(), add, te_ops.Quantize())(seeded(32, 64), seeded(32, 64, seed=1))
    assert y.dequantize().shape == (32, 64)


def test_backward_override_leaves_the_bias_without_quantizer():
    linear = _linear(dtype=torch.bfloat16)
    x = seeded(64, 64, dtype=torch.bfloat16, requires_grad=True)
    dy = seeded(64, 64, dtype=torch.bfloat16, seed=2)
    with autocast(recipe=RECIPES["current"](backward_override="high_precision")):
        y = linear(x)
    y.backward(dy)
    exact = exact_linear(x, linear.weight, dy)
    assert_product(x.grad, exact["dx"])
    assert_product(linear.weight.grad, exact["dw"])


# --- errors -----------------------------------------------------------------------------------------


def _fused_forward(fused, kwargs):
    return fused.fuser_forward(
        [None] * len(fused.basic_ops),
        torch.zeros(2, 8),
        basic_op_extra_inputs=[()] * len(fused.basic_ops),
        prev_op_grad_output_quantizer=None,
        next_op_input_quantizer=None,
        basic_op_kwargs=kwargs,
    )


def test_activation_is_not_supported():
    fused = ForwardLinearBiasActivation(te_ops.BasicLinear(8, 8), te_ops.Bias(8), te_ops.GELU())
    with pytest.raises(NotImplementedError, match="ctivation"):
        _fused_forward(fused, [{}, {}, {}])


def test_keyword_arguments_are_an_error():
    fused = ForwardLinearBiasActivation(te_ops.BasicLinear(8, 8), te_ops.Bias(8))
    with pytest.raises(ValueError, match="Bias operation forward does not expect keyword arguments"):
        _fused_forward(fused, [{}, {"scale": 2}])


@pytest.mark.parametrize("only", [False, True])
def test_extra_inputs_of_any_layout(only):
    """Strided ones are written through; expanded ones have no memory of their own to write to."""
    linear, add = _linear(), te_ops.AddExtraInput(in_place=True)
    x, extra = seeded(32, 64), seeded(64, 32, seed=2).t()
    start = extra.double()
    with fusions(only=only):
        y = te_ops.Sequential(linear, add)(x, extra)
        with pytest.raises(RuntimeError, match="single memory location"):
            te_ops.Sequential(linear, te_ops.AddExtraInput(in_place=True))(x, torch.zeros(64).expand(32, 64))
    value = exact_linear(x, linear.weight)["y"][0]
    torch.testing.assert_close(y.double(), value + linear.bias.detach().double() + start, rtol=1e-5, atol=1e-5)
    assert y.data_ptr() == extra.data_ptr()
    assert same_bits(extra.contiguous(), y.detach().contiguous())


def test_extra_input_keeps_its_gradient_hooks_and_no_marks():
    extra = seeded(32, 64, seed=2)
    before = set(vars(extra))
    te_ops.Sequential(_linear(), te_ops.AddExtraInput(in_place=True))(seeded(32, 64), extra)
    assert set(vars(extra)) == before


def test_without_grad_mode():
    linear = _linear(dtype=torch.bfloat16)
    x = seeded(32, 64, dtype=torch.bfloat16)
    trained = linear(x).detach()
    with torch.inference_mode():
        assert same_bits(linear(x).clone(), trained)
