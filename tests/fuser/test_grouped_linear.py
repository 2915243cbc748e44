"""GroupedLinear: every group is a linear of its own; buffers, row scales, delayed weight gradients."""

import copy

import pytest
import torch
from linear_cases import RECIPES, assert_product, exact_linear, linear_quantizers, seeded
from one_rounding import DTYPES, same_bits

import fuser.ops as te_ops
from fuser.basic.grouped_linear import (
    GRAD_INPUT_BUFFER_KEY,
    OUTPUT_BUFFER_KEY,
    GroupedLinear,
    is_op_fuser_grouped_tensor_path_supported,
)
from fuser.dispatch import backend
from fuser.gemm import linear_dgrad, linear_forward, linear_wgrad
from fuser.quantization.contexts import autocast, quantized_model_init
from fuser.quantization.state import FP8GlobalStateManager
from fuser.quantization.tensor import QuantizedTensor
from fuser.recipe import MXFP8BlockScaling

SPLITS = [32, 0, 64, 32]
GROUPS, ROWS, IN, OUT = len(SPLITS), sum(SPLITS), 64, 96
HALF_PRECISION_ERROR = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def _grouped(num_groups=GROUPS, in_features=IN, out_features=OUT, **options):
    torch.manual_seed(1)
    op = GroupedLinear(num_groups, in_features, out_features, **options)
    with torch.no_grad():
        for bias in op.biases:
            if bias is not None:
                bias.normal_()
    return op


def _tensors(dtype=torch.float32, out_features=OUT):
    x = seeded(ROWS, IN, dtype=dtype, requires_grad=True)
    return x, seeded(ROWS, out_features, dtype=dtype, seed=2), torch.tensor(SPLITS, dtype=torch.int32)


def _exact(op, x, dy, splits=SPLITS):
    """`{name: [(value, magnitude) of each group]}`."""
    groups = [
        exact_linear(x_i, w, dy_i)
        for x_i, w, dy_i in zip(x.detach().split(splits), op.weights, dy.split(splits), strict=True)
    ]
    return {name: [group[name] for group in groups] for name in ("y", "dx", "dw")}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_every_group_is_a_linear(dtype, bias):
    op = _grouped(dtype=dtype, bias=bias)
    x, dy, splits = _tensors(dtype)
    y = op(x, splits)
    y.backward(dy)
    exact = _exact(op, x, dy)
    assert y.dtype == dtype
    for i, (y_i, dx_i, dy_i) in enumerate(zip(*(t.split(SPLITS) for t in (y, x.grad, dy)), strict=True)):
        value, magnitude = exact["y"][i]
        if bias:
            value, magnitude = value + op.biases[i].double(), magnitude + op.biases[i].double().abs()
            assert_product(op.biases[i].grad, (dy_i.double().sum(0), dy_i.double().abs().sum(0)))
        assert_product(y_i, (value.detach(), magnitude.detach()))
        assert_product(dx_i, exact["dx"][i])
        assert_product(op.weights[i].grad, exact["dw"][i])
    assert torch.equal(op.weight1.grad, torch.zeros(OUT, IN, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.full)], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_quantized_products_are_those_of_explicit_casts(recipe, dtype):
    op = _grouped(out_features=128, dtype=dtype, bias=False)
    x, dy, splits = _tensors(dtype, out_features=128)
    recipe = RECIPES[recipe]()
    with autocast(recipe=recipe):
        y = op(x, splits)
    torch.manual_seed(3)
    y.backward(dy)
    torch.manual_seed(3)
    # Gradients are quantized a group at a time, in the order of the groups
    for x_i, w, dy_i, y_i, dx_i in zip(
        x.detach().split(SPLITS),
        op.weights,
        dy.split(SPLITS),
        y.detach().split(SPLITS),
        x.grad.split(SPLITS),
        strict=True,
    ):
        x_quantizer, w_quantizer, dy_quantizer = linear_quantizers(recipe)
        xq, wq, dyq = x_quantizer(x_i), w_quantizer(w.detach()), dy_quantizer(dy_i)
        assert same_bits(y_i, linear_forward(xq, wq))
        assert same_bits(dx_i, linear_dgrad(dyq, wq))
        assert same_bits(w.grad, linear_wgrad(dyq, xq))


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_backward_override(override):
    op = _grouped(bias=False)
    x, dy, splits = _tensors()
    recipe = MXFP8BlockScaling(backward_override=override)
    with autocast(recipe=recipe):
        y = op(x, splits)
    y.backward(dy)
    x_quantizer, w_quantizer, _ = linear_quantizers(MXFP8BlockScaling())
    for i, (x_i, dy_i, dx_i) in enumerate(zip(*(t.split(SPLITS) for t in (x.detach(), dy, x.grad)), strict=True)):
        w = op.weights[i].detach()
        if override == "dequantized":
            x_i, w = x_quantizer(x_i).dequantize(), w_quantizer(w).dequantize()
        exact = exact_linear(x_i, w, dy_i)
        assert_product(dx_i, exact["dx"])
        assert_product(op.weights[i].grad, exact["dw"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scaled_biases(dtype):
    op = _grouped(dtype=dtype, scale_bias=True)
    assert op.num_extra_inputs == 2
    x, dy, splits = _tensors(dtype)
    scales = seeded(ROWS, seed=4, requires_grad=True)
    y = op(x, splits, scales)
    y.backward(dy)
    exact = _exact(op, x, dy)
    scale = scales.detach().double()
    per_row = torch.cat([b.detach().double().expand(n, OUT) for b, n in zip(op.biases, SPLITS, strict=True)])
    expected = torch.cat([value for value, _ in exact["y"]]) + scale[:, None] * per_row
    magnitude = torch.cat([m for _, m in exact["y"]]) + (scale[:, None] * per_row).abs()
    # The product is rounded before the bias is added
    assert ((y.detach().double() - expected).abs() <= HALF_PRECISION_ERROR[dtype] * magnitude).all()
    weighted = scale[:, None] * dy.double()
    for i, part in enumerate(weighted.split(SPLITS)):
        assert_product(op.biases[i].grad, (part.sum(0), part.abs().sum(0)))
    products = dy.double() * per_row
    assert_product(scales.grad, (products.sum(1), products.abs().sum(1)))


def test_scales_without_gradient_and_scale_bias_without_bias():
    op = _grouped(scale_bias=True)
    x, dy, splits = _tensors()
    op(x, splits, torch.ones(ROWS)).backward(dy)
    plain = _grouped()
    plain(x.detach(), splits).backward(dy)
    torch.testing.assert_close(op.bias0.grad, plain.bias0.grad)
    assert _grouped(scale_bias=True, bias=False).num_extra_inputs == 1


def test_results_go_to_the_caller_s_buffers():
    op = _grouped()
    x, dy, splits = _tensors()
    reference = op(x, splits)
    reference.backward(dy)
    grads, x.grad = (x.grad, op.weight0.grad), None
    op.zero_grad()
    output, grad_input = torch.full((ROWS, OUT), torch.nan), torch.full((ROWS, IN), torch.nan)
    y = te_ops.Sequential(op)(x, splits, op_kwargs={op: {OUTPUT_BUFFER_KEY: output, GRAD_INPUT_BUFFER_KEY: grad_input}})
    y.backward(dy)
    assert y.data_ptr() == output.data_ptr()
    assert same_bits(output, reference.detach())
    assert same_bits(grad_input, grads[0])
    assert same_bits(x.grad, grads[0])
    assert same_bits(op.weight0.grad, grads[1])


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (torch.zeros(ROWS, OUT + 1), "shape"),
        (torch.zeros(ROWS, OUT, dtype=torch.bfloat16), "dtype"),
        (torch.zeros(ROWS, OUT, device="meta"), "device"),
        (torch.zeros(OUT, ROWS).t(), "contiguous"),
        (torch.zeros(ROWS, OUT, requires_grad=True), "requires_grad"),
    ],
)
def test_buffers_are_validated(buffer, message):
    x, _, splits = _tensors()
    with pytest.raises(ValueError, match=message):
        _grouped()(x, splits, output=buffer)


@pytest.mark.parametrize("recipe", [None, *RECIPES])
@pytest.mark.parametrize("main_grad", [False, True])
def test_delayed_weight_gradients(recipe, main_grad):
    x, dy, splits = _tensors(out_features=128)
    results = []
    for delayed in (False, True):
        FP8GlobalStateManager.reset()
        op = _grouped(out_features=128, delay_wgrad_compute=delayed, accumulate_into_main_grad=main_grad)
        assert op.need_backward_dw() is delayed
        for weight in op.weights:
            weight.main_grad = torch.ones(128, IN)
            weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, True
        calls = []
        op.register_wgrad_accumulation_and_reduce_hooks(lambda calls=calls: calls.append(1))
        with autocast(enabled=recipe is not None, recipe=RECIPES[recipe]() if recipe else None):
            y = op(x.detach(), splits)
        torch.manual_seed(3)
        y.backward(dy)
        assert op.bias0.grad is not None
        if main_grad:  # the stand-in of the gradient comes at once
            assert all(w.grad_added_to_main_grad and torch.equal(w.grad, torch.zeros(128, IN)) for w in op.weights)
        if delayed:
            assert main_grad or op.weight0.grad is None
            assert torch.equal(op.weight0.main_grad, torch.ones(128, IN))
        op.backward_dw()
        assert len(calls) == delayed
        results.append([weight.main_grad if main_grad else weight.grad for weight in op.weights])
        op.backward_dw()  # nothing waits any more
        assert len(calls) == delayed
    for direct, delayed in zip(*results, strict=True):
        assert same_bits(direct, delayed)


@pytest.mark.parametrize("rows", [[32, 5], [5, 32]])
def test_errors_name_the_group(rows):
    op, splits = _grouped(2), torch.tensor(rows)
    with autocast(recipe=MXFP8BlockScaling()):
        message = (
            rf"operation 0 GroupedLinear\(.*\): group {rows.index(5)} of 5 rows: MXFP8 needs M % 32 == 0 .* \(5, {IN}\)"
        )
        with pytest.raises(ValueError, match=message):
            op(seeded(37, IN), splits)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (
            (seeded(ROWS, IN + 1), torch.tensor(SPLITS), torch.ones(ROWS)),
            rf"in_features={IN}; got shape \({ROWS}, 65\)",
        ),
        ((seeded(ROWS, IN), torch.tensor(SPLITS), torch.ones(3)), rf"one entry for each of {ROWS} rows; .*\(3,\)"),
        ((seeded(ROWS, IN), torch.tensor(SPLITS[:3]), torch.ones(ROWS)), "Expected 4 splits, but got 3"),
        ((seeded(ROWS, IN), torch.tensor([1] * 4), torch.ones(ROWS)), rf"sum to the {ROWS} rows"),
        ((seeded(ROWS, IN), torch.ones(4), torch.ones(ROWS)), "must be integers"),
    ],
)
def test_errors_of_all_groups_name_the_operation(inputs, words):
    with pytest.raises(ValueError, match=rf"operation 0 GroupedLinear\(.*\): .*{words}"):
        _grouped(scale_bias=True)(*inputs)


def test_delayed_weight_gradients_go_to_the_main_gradients_of_their_backward_pass():
    op = _grouped(delay_wgrad_compute=True, accumulate_into_main_grad=True)
    x, dy, splits = _tensors()
    with pytest.raises(RuntimeError, match="main_grad"):
        op(x, splits).backward(dy)
    buffers = [torch.zeros(OUT, IN) for _ in op.weights]
    for weight, buffer in zip(op.weights, buffers, strict=True):
        weight.main_grad = buffer
    op(x, splits).backward(dy)
    for weight in op.weights:
        weight.main_grad = None
    op.backward_dw()
    for buffer, expected in zip(buffers, _exact(op, x, dy)["dw"], strict=True):
        assert_product(buffer, expected)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_weights_with_delayed_gradients_skip_hooks_after_backward(device):
    op = _grouped(delay_wgrad_compute=True, device=device)
    x, _, splits = _tensors()
    op(x, splits)
    op.weight1 = torch.nn.Parameter(torch.zeros(OUT, IN))
    for one in (op, copy.deepcopy(op)):
        assert all(weight.skip_backward_post_hook for weight in one.weights)
        assert not any(hasattr(bias, "skip_backward_post_hook") for bias in one.biases)
    assert not hasattr(_grouped().weight0, "skip_backward_post_hook")


def test_copies_have_no_backward_pass_that_waits():
    op = _grouped(delay_wgrad_compute=True)
    x, dy, splits = _tensors()
    op(x, splits).backward(dy)
    twin = copy.deepcopy(op)
    twin.backward_dw()
    assert op.weight0.grad is None and twin.weight0.grad is None
    op.backward_dw()
    assert op.weight0.grad is not None


def test_delayed_weight_gradients_add_up_in_order():
    op = _grouped(delay_wgrad_compute=True)
    x, dy, splits = _tensors()
    op(x, splits).backward(dy)
    op(2 * x.detach(), splits).backward(dy)
    op.backward_dw()
    first = op.weight0.grad.clone()
    op.backward_dw()
    torch.testing.assert_close(op.weight0.grad, 3 * first)


def test_stand_ins_reach_the_weights_without_a_copy():
    op = _grouped(accumulate_into_main_grad=True)
    x, dy, splits = _tensors()
    for weight in op.weights:
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(OUT, IN), False
    op(x, splits).backward(dy)
    assert len({weight.grad.data_ptr() for weight in op.weights}) == 1
    assert len({weight.main_grad.data_ptr() for weight in op.weights}) == len(op.weights)


@pytest.mark.parametrize("overwrite", [False, True])
def test_accumulate_into_main_grad(overwrite):
    op = _grouped(accumulate_into_main_grad=True, dtype=torch.bfloat16)
    x, dy, splits = _tensors(torch.bfloat16)
    for weight in op.weights:
        weight.main_grad = torch.full((OUT, IN), 0.5)
        weight.overwrite_main_grad = overwrite
        weight.grad_added_to_main_grad = False
        weight.zero_out_wgrad = True
    op(x, splits).backward(dy)
    for weight, (value, magnitude) in zip(op.weights, _exact(op, x, dy)["dw"], strict=True):
        assert_product(weight.main_grad, (value + (0 if overwrite else 0.5), magnitude + 0.5))
        assert weight.grad_added_to_main_grad is True
        assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("recipe", RECIPES)
def test_quantized_model_init(recipe):
    recipe = RECIPES[recipe]()
    plain = _grouped(out_features=128, bias=False)
    with quantized_model_init(recipe=recipe):
        op = _grouped(out_features=128, bias=False)
    assert all(isinstance(weight, QuantizedTensor) for weight in op.weights)
    x, dy, splits = _tensors(out_features=128)
    results = []
    for layer in (op, plain):
        FP8GlobalStateManager.reset()
        with autocast(recipe=recipe):
            y = layer(x, splits)
        torch.manual_seed(3)
        y.backward(dy)
        results.append((y.detach(), x.grad, *(weight.grad for weight in layer.weights)))
        x.grad = None
    for quantized, requantized in zip(*results, strict=True):
        assert same_bits(quantized, requantized)


def test_deferred_parameters():
    op = GroupedLinear(4, IN, OUT, device="meta")
    assert all(p.device.type == "meta" for p in op.parameters())
    x, dy, splits = _tensors()
    torch.manual_seed(1)
    y = te_ops.Sequential(op)(x, splits)
    y.backward(dy)
    torch.manual_seed(1)
    for deferred, direct in zip(op.weights, GroupedLinear(4, IN, OUT).weights, strict=True):
        assert same_bits(deferred.detach(), direct.detach())
        assert deferred.grad is not None
    assert torch.equal(op.bias0, torch.zeros(OUT))


def test_parameters_and_their_order():
    op = _grouped(num_groups=2)
    assert [name for name, _ in op.named_parameters()] == ["weight0", "weight1", "bias0", "bias1"]
    assert op.has_bias
    assert op.weight1.data_ptr() - op.weight0.data_ptr() == op.weight0.numel() * op.weight0.element_size()
    assert not _grouped(bias=False).has_bias
    assert _grouped(bias=False).bias0 is None
    assert "num_groups=2" in repr(op)
    other = GroupedLinear(2, IN, OUT)
    other.load_state_dict(op.state_dict())
    assert same_bits(other.weight1.detach(), op.weight1.detach())


def test_quantizers_and_roles():
    op = _grouped()
    assert (op.num_quantizers("forward"), op.num_quantizers("backward")) == (8, 4)
    roles = op.get_quantizer_roles("forward")
    assert [role.tensor_type for role in roles] == ["input", "weight"] * 4
    assert {role.module_type for role in roles} == {"linear"}
    # Neighbours hand over high precision: each group has a scale of its own
    op.reset_recipe_state(recipe=MXFP8BlockScaling())
    assert op.get_input_quantizer() is None
    assert op.get_grad_output_quantizer() is None


@pytest.mark.usefixtures("the_reference_quantizes")
@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_in_a_pipeline(recipe):
    """The middle of a mixture of experts: two grouped layers around a row-scaled activation, each with its splits."""
    fc1, fc2 = _grouped(out_features=128), _grouped(in_features=64, out_features=64)
    x, _, splits = _tensors()
    with autocast(recipe=RECIPES[recipe]()):
        y = te_ops.Sequential(fc1, te_ops.ScaledSwiGLU(), fc2)(x, splits, seeded(ROWS, seed=5).abs(), splits)
    y.sum().backward()
    assert y.shape == (ROWS, 64)
    assert all(torch.isfinite(p.grad).all() for layer in (fc1, fc2) for p in layer.parameters())
    assert torch.isfinite(x.grad).all()


def test_a_second_backward_and_frozen_weights():
    op = _grouped()
    x, dy, splits = _tensors()
    y = op(x, splits)
    y.backward(dy, retain_graph=True)
    first, x.grad = x.grad, None
    y.backward(dy)
    assert same_bits(x.grad, first)
    for weight in op.weights:
        weight.requires_grad_(False)
    op.zero_grad()
    op(x, splits).backward(dy)
    assert op.weight0.grad is None
    assert op.bias0.grad is not None


def test_higher_dimensional_inputs_and_split_dtypes():
    op = _grouped()
    x, _, splits = _tensors()
    flat = op(x, splits)
    for split in (splits.long(), splits.to(torch.uint8), splits.reshape(2, 2)):
        assert same_bits(op(x.reshape(4, ROWS // 4, IN), split).detach().reshape(ROWS, OUT), flat.detach())


def test_gradcheck_in_float64():
    with backend("float64"):
        op = GroupedLinear(3, 5, 4, dtype=torch.float64, scale_bias=True)
        x = seeded(6, 5, dtype=torch.float64, requires_grad=True)
        scales = seeded(6, dtype=torch.float64, seed=1, requires_grad=True)
        splits = torch.tensor([2, 0, 4])
        assert torch.autograd.gradcheck(lambda x, s, *_: op(x, splits, s), (x, scales, *op.parameters()))


# --- errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(0, 4, 4), (2, 0, 4), (2, 4, -1)])
def test_sizes_must_be_positive(sizes):
    with pytest.raises(ValueError, match="must be positive"):
        GroupedLinear(*sizes)


def test_dtype_must_be_supported():
    with pytest.raises(ValueError, match="Supported dtypes are float32, float16, bfloat16"):
        GroupedLinear(2, 4, 4, dtype=torch.float64)


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ([ROWS], "Expected 4 splits, but got 1"),
        ([ROWS, 0, 0, 1], "sum to the 128 rows"),
        ([ROWS + 1, -1, 0, 0], "non-negative"),
        ([float(ROWS), 0.0, 0.0, 0.0], "integers"),
    ],
)
def test_split_sizes_are_checked(splits, message):
    with pytest.raises(ValueError, match=message):
        _grouped()(seeded(ROWS, IN), torch.tensor(splits))


def test_groups_must_agree():
    x, _, splits = _tensors()
    for spoil in (
        lambda op: op.weight1.requires_grad_(False),
        lambda op: setattr(op, "weight2", torch.nn.Parameter(op.weight2.detach().bfloat16())),
        lambda op: op.bias3.requires_grad_(False),
    ):
        op = _grouped()
        spoil(op)
        with pytest.raises(RuntimeError, match=r"(weight|bias)\d has invalid (dtype|requires_grad)"):
            op(x, splits)


def test_keyword_arguments_and_single_passes_are_errors():
    x, _, splits = _tensors()
    with pytest.raises(TypeError, match="outptu"):
        _grouped()(x, splits, outptu=None)
    for method in ("op_forward", "op_backward"):
        with pytest.raises(RuntimeError, match="It overrides `fuser_"):
            getattr(_grouped(), method)(None, x)


def test_groups_are_multiplied_singly():
    assert not is_op_fuser_grouped_tensor_path_supported(None, torch.bfloat16)


@pytest.mark.parametrize("name", ["weight0", "weight1", "bias0"])
def test_groups_must_agree_at_every_call(name):
    x, _, splits = _tensors()
    op = _grouped()
    model = te_ops.Sequential(op)
    model(x, splits)
    getattr(op, name).requires_grad_(False)
    with pytest.raises(RuntimeError, match=f"{name[:-1]}1 has invalid requires_grad"):
        model(x, splits)
    for parameter in op.parameters():
        parameter.requires_grad_(False)
    model(x, splits)


def test_a_bias_overwritten_before_the_gradient_of_its_scales_is_an_error():
    x, _, splits = _tensors()
    op = _grouped(scale_bias=True)
    y = op(x, splits, torch.ones(len(x), requires_grad=True))
    with torch.no_grad():
        op.bias1.mul_(10)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
