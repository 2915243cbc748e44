"""BasicLinear: plain products against float64, quantized ones bit for bit against explicit casts, every option."""

import copy

import pytest
import torch
from linear_cases import (
    RECIPES,
    QuantizerNeighbour,
    assert_product,
    exact_linear,
    linear_quantizers,
    seeded,
)
from one_rounding import DTYPES, same_bits

import fuser.basic.basic_linear as module
from fuser import ops
from fuser.basic.basic_linear import BasicLinear
from fuser.basic.bias import Bias
from fuser.dispatch import backend
from fuser.dtypes import DType
from fuser.fuser import OperationFuser
from fuser.gemm import linear_dgrad, linear_forward, linear_wgrad
from fuser.op import OperationContext
from fuser.quantization.contexts import autocast, quantized_model_init
from fuser.quantization.quantizers import Float8Quantizer, MXFP8Quantizer
from fuser.quantization.state import FP8GlobalStateManager
from fuser.quantization.tensor import QuantizedTensor
from fuser.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, QParams
from fuser.sequential import Sequential

pytestmark = pytest.mark.check


def _linear(in_features=64, out_features=96, **options):
    torch.manual_seed(1)
    return BasicLinear(in_features, out_features, **options)


# --- plain products ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("leading", [(24,), (3, 5), (), (0,)], ids=str)
def test_forward_and_backward_are_one_rounding_of_the_products(dtype, leading):
    op = _linear(dtype=dtype)
    x = seeded(*leading, 64, dtype=dtype, requires_grad=True)
    dy = seeded(*leading, 96, dtype=dtype, seed=2)
    y = op(x)
    y.backward(dy)
    expected = exact_linear(x, op.weight, dy)
    assert y.shape == (*leading, 96)
    assert y.dtype == x.grad.dtype == op.weight.grad.dtype == dtype
    for name, actual in (("y", y), ("dx", x.grad), ("dw", op.weight.grad)):
        assert_product(actual, expected[name])


def test_input_is_cast_to_the_weight_s_dtype_and_its_gradient_back():
    op = _linear(dtype=torch.bfloat16)
    x = seeded(8, 64, requires_grad=True)
    y = op(x)
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert x.grad.dtype == torch.float32
    assert_product(y, exact_linear(x.bfloat16(), op.weight)["y"])


def test_autocast_decides_the_compute_dtype():
    op = _linear()
    x = seeded(8, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = op(x)
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert op.weight.grad.dtype == torch.float32
    assert_product(y, exact_linear(x.bfloat16(), op.weight.bfloat16())["y"])


def test_non_contiguous_and_permuted_inputs():
    op = _linear()
    x = seeded(64, 7).t().requires_grad_()
    y = op(x)
    y.backward(torch.ones(1, 1).expand(7, 96))
    expected = exact_linear(x, op.weight, torch.ones(7, 96))
    assert_product(y, expected["y"])
    assert_product(x.grad, expected["dx"])
    assert_product(op.weight.grad, expected["dw"])


def test_frozen_weight_and_input_without_gradient():
    op = _linear()
    op.weight.requires_grad_(False)
    x = seeded(4, 64, requires_grad=True)
    op(x).sum().backward()
    assert op.weight.grad is None
    assert x.grad is not None
    op.weight.requires_grad_(True)
    op(seeded(4, 64)).sum().backward()
    assert op.weight.grad is not None


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_a_second_backward_gives_the_same_gradients(recipe):
    op = _linear(64, 128)
    x = seeded(128, 64, requires_grad=True)
    with autocast(enabled=recipe is not None, recipe=RECIPES[recipe]() if recipe else None):
        y = op(x)
    dy = seeded(128, 128, seed=3)
    grads = []
    for _ in range(2):
        torch.manual_seed(5)
        y.backward(dy, retain_graph=True)
        grads.append((x.grad, op.weight.grad))
        x.grad = op.weight.grad = None
        FP8GlobalStateManager.reset()
    if recipe == "delayed":  # the first backward may have moved the gradient's scale: that is the recipe
        return
    for first, second in zip(*grads, strict=True):
        assert same_bits(first, second)


# --- quantized products -----------------------------------------------------------------------------


def _explicit(recipe, x, w, dy, dtype):
    """y, dx, dw from explicit casts, multiplied by `fuser.gemm`, whose own tests say of what."""
    x_quantizer, w_quantizer, dy_quantizer = linear_quantizers(recipe)
    xq, wq, dyq = (q(t) for q, t in ((x_quantizer, x), (w_quantizer, w), (dy_quantizer, dy)))
    y = linear_forward(xq, wq, out_dtype=dtype)
    dx = linear_dgrad(dyq, wq, out_dtype=dtype)
    dw = linear_wgrad(dyq, xq, out_dtype=dtype)
    return y, dx, dw


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_quantized_products_are_those_of_explicit_casts(recipe, dtype):
    op = _linear(128, 256, dtype=dtype)
    x = seeded(64, 128, dtype=dtype, requires_grad=True)
    dy = seeded(64, 256, dtype=dtype, seed=2)
    recipe = RECIPES[recipe]()
    with autocast(recipe=recipe):
        y = op(x)
    torch.manual_seed(7)  # stochastic rounding of the gradient
    y.backward(dy)
    torch.manual_seed(7)
    expected = _explicit(recipe, x.detach(), op.weight.detach(), dy, dtype)
    for name, actual, explicit in zip(("y", "dx", "dw"), (y.detach(), x.grad, op.weight.grad), expected, strict=True):
        assert same_bits(actual, explicit), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_without_gradients_the_output_is_the_same(recipe):
    op = _linear(128, 256)
    x = seeded(64, 128)
    with autocast(recipe=RECIPES[recipe]()):
        trained = op(x)
        with torch.no_grad():
            evaluated = op(x)
    assert same_bits(trained.detach(), evaluated)


@pytest.mark.parametrize("recipe", ["current", "mxfp8", "block", "nvfp4"])
@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_backward_override(recipe, override):
    op = _linear(128, 256, dtype=torch.bfloat16)
    x = seeded(64, 128, dtype=torch.bfloat16, requires_grad=True)
    dy = seeded(64, 256, dtype=torch.bfloat16, seed=2)
    plain = RECIPES[recipe]()
    with autocast(recipe=RECIPES[recipe](backward_override=override)):
        y = op(x)
    y.backward(dy)
    x_used, w_used = x.detach(), op.weight.detach()
    if override == "dequantized":
        x_quantizer, w_quantizer, _ = linear_quantizers(plain)
        x_used, w_used = x_quantizer(x_used).dequantize(), w_quantizer(w_used).dequantize()
    assert same_bits(y.detach(), _explicit(plain, x.detach(), op.weight.detach(), dy, torch.bfloat16)[0])
    expected = exact_linear(x_used, w_used, dy)
    assert_product(x.grad, expected["dx"])
    assert_product(op.weight.grad, expected["dw"])


def test_operands_are_quantized_from_their_own_dtype():
    """TE casts nothing before it quantizes: a float32 weight under bfloat16 autocast keeps its bits until then."""
    op = _linear(64, 64)
    x = seeded(32, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16), autocast(recipe=MXFP8BlockScaling()):
        y = op(x)
    expected = _explicit(MXFP8BlockScaling(), x, op.weight.detach(), seeded(32, 64), torch.bfloat16)[0]
    assert same_bits(y.detach(), expected)


def test_delayed_scaling_trace():
    """Scales follow the largest values so far: test_fp8_scale_update of TE."""
    op = _linear(64, 64)
    optimizer = torch.optim.SGD(op.parameters(), lr=0.5)
    recipe = DelayedScaling(margin=1)
    largest = {"x": 0.0, "w": 0.0, "dy": 0.0}
    for step in range(3):
        x, dy = seeded(16, 64, seed=step) * (step + 1), seeded(16, 64, seed=9 + step) * (step + 1)
        for name, tensor in (("x", x), ("w", op.weight), ("dy", dy)):
            largest[name] = max(largest[name], tensor.detach().abs().max().item())
        with autocast(recipe=recipe):
            y = op(x)
        y.backward(dy)
        optimizer.step()
        optimizer.zero_grad()
        for mode, index, name, maximum in (
            ("forward", 0, "x", 448),
            ("forward", 1, "w", 448),
            ("backward", 0, "dy", 57344),
        ):
            expected = torch.tensor(maximum / largest[name] / 2)
            torch.testing.assert_close(op.get_quantizer(mode, index).scale.reshape(()), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("recipe", RECIPES)
def test_linear_to_linear_works_under_every_recipe(recipe):
    first, second = _linear(128, 256), _linear(256, 128)
    x = seeded(128, 128, requires_grad=True)
    dy = seeded(128, 128, seed=2)
    with autocast(recipe=RECIPES[recipe]()):
        y = Sequential(first, second)(x)
    y.backward(dy)
    exact = exact_linear(exact_linear(x, first.weight)["y"][0], second.weight, dy)
    for actual, expected in ((y, exact["y"][0]), (second.weight.grad, exact["dw"][0])):
        error = (actual.detach().double() - expected).norm() / expected.norm()
        assert 1e-4 < error < (0.3 if recipe == "nvfp4" else 0.1)


def test_a_delayed_scaling_neighbour_gets_the_float32_sums_quantized():
    before, op, after = QuantizerNeighbour(), _linear(64, 96, dtype=torch.bfloat16), QuantizerNeighbour()
    pipeline = OperationFuser([before, op, after])
    x = seeded(16, 64, dtype=torch.bfloat16, requires_grad=True)
    dy = seeded(16, 96, dtype=torch.bfloat16, seed=2)
    with autocast(recipe=DelayedScaling()):
        y = pipeline(x)
    y.backward(dy)

    # Both neighbours hand over quantized data: what the op multiplied is known
    x_quantizer, w_quantizer, dy_quantizer = linear_quantizers(DelayedScaling())
    x32, w32, dy32 = (
        q(t.detach()).dequantize(dtype=torch.float32)
        for q, t in ((x_quantizer, x), (w_quantizer, op.weight), (dy_quantizer, dy))
    )
    for given, sums, quantizer in (
        (after.input, x32 @ w32.t(), after.forward_quantizer),
        (before.grad_output, dy32 @ w32, before.backward_quantizer),
    ):
        assert given.dtype == torch.bfloat16
        assert torch.equal(given.buffers.rowwise_data, quantizer(sums).buffers.rowwise_data)
    assert quantizer.amax.item() == (dy32 @ w32).abs().max().item()


def test_a_quantized_input_is_used_as_it_is_and_keeps_both_copies():
    op = _linear(64, 64)
    x = seeded(32, 64)
    quantizer = MXFP8Quantizer(fp8_dtype=DType.kFloat8E4M3)
    xq = quantizer(x)
    with autocast(recipe=MXFP8BlockScaling()):
        from_quantized = op(xq)
        from_plain = op(x)
    from_quantized.sum().backward()
    assert same_bits(from_quantized.detach(), from_plain.detach())
    assert xq.get_usages() == {"rowwise": True, "columnwise": True}
    assert_product(op(xq), exact_linear(xq.dequantize(), op.weight)["y"])


@pytest.mark.parametrize("recipe", ["current", "mxfp8", "nvfp4"])
def test_a_quantized_input_without_columns_gets_them_for_the_backward_pass(recipe):
    """TE raises; here the weight's gradient is that of the values that the forward pass saw, cast along columns."""
    op = _linear(64, 64)
    x, dy = seeded(32, 64), seeded(32, 64, seed=2)
    recipe = RECIPES[recipe]()
    x_quantizer, _, dy_quantizer = linear_quantizers(recipe)
    x_quantizer.set_usage(columnwise=False)
    xq = x_quantizer(x)
    with autocast(recipe=recipe):
        y = op(xq)
    torch.manual_seed(3)
    y.backward(dy)
    torch.manual_seed(3)
    x_quantizer.set_usage(columnwise=True)
    dyq, columns = dy_quantizer(dy), x_quantizer(xq.dequantize())
    assert same_bits(op.weight.grad, dyq.dequantize_columnwise().t() @ columns.dequantize_columnwise())


def test_a_weight_keeps_its_format_under_another_recipe():
    with quantized_model_init(recipe=Float8CurrentScaling()):
        op = _linear(64, 64)
    x = seeded(32, 64)
    with autocast(recipe=MXFP8BlockScaling()):
        y = op(x)
    y.sum().backward()
    x_quantizer = linear_quantizers(MXFP8BlockScaling())[0]
    assert same_bits(y.detach(), x_quantizer(x).dequantize() @ op.weight.dequantize().t())
    torch.optim.SGD(op.parameters(), lr=0.1).step()
    with pytest.warns(UserWarning, match="quantizer"), autocast(recipe=DelayedScaling()):
        op(x)
    torch.optim.SGD(op.parameters(), lr=0.1).step()
    assert op.weight._quantizer.amax.item() > 0  # requantized with delayed scaling's scale, recording its amax


def test_saved_operands_are_eight_bits_and_one_copy():
    op = _linear(64, 64)
    ctx = OperationContext()
    x = seeded(32, 64)
    with autocast(recipe=MXFP8BlockScaling()), torch.no_grad():
        op.reset_recipe_state(recipe=MXFP8BlockScaling())
        op.pre_fuser_forward(requires_grad=True)
        op.op_forward(ctx, x)
    for saved in ctx.to_save:
        assert not isinstance(saved, torch.Tensor)
        assert saved.get_usages() == {"rowwise": False, "columnwise": True}
        assert saved.buffers.columnwise_data.dtype == torch.uint8


def test_context_has_the_fields_that_fusions_leave():
    op = _linear()
    ctx = OperationContext()
    with torch.no_grad():
        op.op_forward(ctx, seeded(4, 64))
    fields = {
        "with_quantized_compute": False,
        "backward_override": None,
        "input_quantizer": None,
        "weight_quantizer": None,
        "grad_output_quantizer": None,
        "grad_input_quantizer": None,
        "dtype": torch.float32,
        "input_requires_grad": True,
        "weight_requires_grad": True,
    }
    assert {name: getattr(ctx, name) for name in fields} == fields
    assert len(ctx.to_save) == 2


def test_usages_are_set_before_the_pipeline_runs():
    op = _linear()
    recipe = MXFP8BlockScaling()
    with autocast(recipe=recipe):
        op.reset_recipe_state(recipe=recipe)
        for requires_grad, frozen, columns in (
            (True, False, (True, True, True)),
            (True, True, (False, True, False)),
            (False, False, (False, False, False)),
        ):
            op.weight.requires_grad_(not frozen)
            op.pre_fuser_forward(requires_grad=requires_grad)
            quantizers = (
                op.get_quantizer("forward", 0),
                op.get_quantizer("forward", 1),
                op.get_quantizer("backward", 0),
            )
            assert tuple(q.columnwise_usage for q in quantizers) == columns
            assert all(q.rowwise_usage for q in quantizers)
    recipe = MXFP8BlockScaling(backward_override="high_precision")
    op.weight.requires_grad_(True)
    with autocast(recipe=recipe):
        op.reset_recipe_state(recipe=recipe)
        op.pre_fuser_forward(requires_grad=True)
    assert not op.get_quantizer("forward", 0).columnwise_usage
    assert not op.get_quantizer("backward", 0).columnwise_usage


def test_quantizers_are_configured_from_the_recipe():
    recipe = Float8CurrentScaling(use_power_2_scales=True)
    recipe.fp8_quant_fwd_inp = QParams(power_2_scale=True, amax_epsilon=0.5)
    op = _linear()
    op.reset_recipe_state(recipe=recipe)
    assert op.num_quantizers("forward") == 2
    assert op.num_quantizers("backward") == 1
    x, w, dy = op.get_quantizer("forward", 0), op.get_quantizer("forward", 1), op.get_quantizer("backward", 0)
    assert x.internal
    assert w.internal
    assert dy.internal
    assert x.force_pow_2_scales
    assert x.amax_epsilon == 0.5
    assert [role.tensor_type for role in op.get_quantizer_roles("forward")] == ["input", "weight"]
    assert [role.tensor_type for role in op.get_quantizer_roles("backward")] == ["grad_output"]
    op.reset_recipe_state(recipe=None)
    assert op.get_quantizer("forward", 0) is None


# --- quantized weights, deferred weights ------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_quantized_model_init(recipe):
    recipe = RECIPES[recipe]()
    plain = _linear(128, 128)
    with quantized_model_init(recipe=recipe):
        op = _linear(128, 128)
    assert isinstance(op.weight, QuantizedTensor)
    assert isinstance(op.weight, torch.nn.Parameter)
    _, w_quantizer, _ = linear_quantizers(recipe)
    assert same_bits(op.weight.dequantize(), w_quantizer(plain.weight.detach()).dequantize())

    x, dy = seeded(32, 128, requires_grad=True), seeded(32, 128, seed=2)
    with autocast(recipe=recipe):
        y = op(x)
    torch.manual_seed(3)
    y.backward(dy)
    torch.manual_seed(3)
    expected = _explicit(recipe, x.detach(), plain.weight.detach(), dy, torch.float32)
    for actual, explicit in zip((y.detach(), x.grad, op.weight.grad), expected, strict=True):
        assert same_bits(actual, explicit)
    assert not isinstance(op.weight.grad, QuantizedTensor)
    # An optimizer step requantizes in place, and the next forward pass reads the new values
    before = op.weight.dequantize().clone()
    torch.optim.SGD(op.parameters(), lr=0.1).step()
    assert isinstance(op.weight, QuantizedTensor)
    assert not torch.equal(op.weight.dequantize(), before)
    # Outside autocast the product is one of dequantized weights
    assert_product(op(x), exact_linear(x, op.weight.dequantize())["y"])


def test_quantized_weights_made_without_grad_have_rows_alone():
    with torch.no_grad(), quantized_model_init(recipe=MXFP8BlockScaling()):
        op = _linear()
    assert op.weight.get_usages() == {"rowwise": True, "columnwise": False}


def test_deferred_weight_is_initialised_by_the_first_forward_pass():
    op = BasicLinear(64, 96, device="meta")
    op.weight.tag = "kept"
    assert op.weight.device.type == "meta"
    x = seeded(8, 64, requires_grad=True)
    torch.manual_seed(1)
    pipeline = Sequential(op)
    y = pipeline(x)
    assert same_bits(op.weight.detach(), _linear().weight.detach())
    assert op.weight.tag == "kept"
    y.backward(torch.ones(8, 96))
    assert_product(op.weight.grad, exact_linear(x, op.weight, torch.ones(8, 96))["dw"])


def test_deferred_quantized_weight():
    with quantized_model_init(recipe=MXFP8BlockScaling()):
        op = BasicLinear(64, 64, device="meta")
    with pytest.raises(RuntimeError, match="quantized_model_init"):
        op(seeded(32, 64))
    with autocast(recipe=MXFP8BlockScaling()):
        op(seeded(32, 64)).sum().backward()
    assert isinstance(op.weight, QuantizedTensor)
    assert op.weight.grad.shape == (64, 64)


def test_initialisation_is_kaiming_uniform_inside_the_tracker_s_fork():
    events = []

    class Tracker:
        def fork(self):
            events.append("fork")
            return torch.random.fork_rng()

    torch.manual_seed(4)
    state = torch.get_rng_state()
    op = BasicLinear(16, 8, rng_state_tracker_function=Tracker)
    assert events == ["fork"]
    assert torch.equal(torch.get_rng_state(), state)
    reference = torch.nn.Linear(16, 8, bias=False)
    assert same_bits(op.weight.detach(), reference.weight.detach())


def test_deepcopy_and_state_dict():
    op = _linear()
    twin = copy.deepcopy(op)
    assert twin.weight is not op.weight
    other = BasicLinear(64, 96)
    other.load_state_dict(op.state_dict())
    x = seeded(3, 64)
    assert same_bits(op(x).detach(), twin(x).detach())
    assert same_bits(op(x).detach(), other(x).detach())
    assert set(op.state_dict()) == {"weight", "_extra_state"}


# --- main gradients ---------------------------------------------------------------------------------


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("dummy", [False, True])
def test_accumulate_into_main_grad(overwrite, dummy):
    op = _linear(dtype=torch.bfloat16, accumulate_into_main_grad=True)
    op.weight.main_grad = torch.full((96, 64), 0.5)
    op.weight.overwrite_main_grad = overwrite
    if dummy:
        op.weight.grad_added_to_main_grad = False
        op.weight.zero_out_wgrad = True
    x, dy = seeded(8, 64, dtype=torch.bfloat16), seeded(8, 96, dtype=torch.bfloat16, seed=2)
    op(x).backward(dy)
    value, magnitude = exact_linear(x, op.weight, dy)["dw"]
    assert op.weight.main_grad.dtype == torch.float32
    assert_product(op.weight.main_grad, (value + (0 if overwrite else 0.5), magnitude + 0.5))
    if dummy:
        assert op.weight.grad_added_to_main_grad is True
        assert torch.equal(op.weight.grad, torch.zeros_like(op.weight))
    else:
        assert op.weight.grad is None


@pytest.mark.parametrize(
    "make",
    [
        lambda linear: linear,
        lambda linear: ops.Sequential(ops.MakeExtraOutput(in_place=True), linear),
        lambda linear: ops.Sequential(linear, ops.ConstantScale(2.0)),
    ],
    ids=["alone", "BackwardLinearAdd", "BackwardLinearScale"],
)
def test_stand_ins_reach_the_weights_without_a_copy(make):
    """Autograd takes a gradient that nobody else holds as it is: those of two weights are in the same memory."""
    weights = []
    for kind in (ops.Linear, BasicLinear):
        op = kind(64, 96, accumulate_into_main_grad=True)
        op.weight.main_grad, op.weight.grad_added_to_main_grad = torch.zeros(96, 64), False
        y = make(op)(seeded(8, 64))
        y = y if isinstance(y, torch.Tensor) else y[0]
        y.sum().backward()
        weights.append(op.weight)
    assert weights[0].grad.data_ptr() == weights[1].grad.data_ptr()
    assert weights[0].main_grad.abs().sum() > 0


def test_missing_main_grad_is_an_error():
    op = _linear(accumulate_into_main_grad=True)
    with pytest.raises(RuntimeError, match="main_grad"):
        op(seeded(2, 64)).sum().backward()


# --- functional forms -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_functional_forward_options(dtype):
    x, w, b = seeded(6, 64, dtype=dtype), seeded(32, 64, dtype=dtype, seed=1), seeded(32, dtype=dtype, seed=2)
    out = seeded(6, 32, dtype=dtype, seed=3)
    value, magnitude = exact_linear(x, w)["y"]
    start = out.double()
    y, x_saved, w_saved = BasicLinear._functional_forward(
        x, w, alpha=-2.5, bias=b, out=out, beta=0.5, accumulate_into_out=True, weight_requires_grad=False
    )
    assert y is out
    assert x_saved is None
    assert w_saved is w
    expected = -2.5 * value + b.double() + 0.5 * start
    assert_product(y, (expected, 2.5 * magnitude + b.double().abs() + start.abs()))
    overwritten, _, _ = BasicLinear._functional_forward(x, w, out=torch.full_like(out, torch.nan))
    assert_product(overwritten, (value, magnitude))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_functional_backward_options(dtype):
    x, w, dy = seeded(6, 64, dtype=dtype), seeded(32, 64, dtype=dtype, seed=1), seeded(6, 32, dtype=dtype, seed=2)
    grad_input, grad_weight = seeded(6, 64, dtype=dtype, seed=3), seeded(32, 64, seed=4)
    starts = grad_input.double(), grad_weight.double()
    exact = exact_linear(x, w, dy)
    dx, dw = BasicLinear._functional_backward(
        dy,
        x,
        w,
        grad_input_alpha=3.0,
        grad_weight_alpha=-1.5,
        grad_input=grad_input,
        accumulate_into_grad_input=True,
        grad_weight=grad_weight,
        grad_weight_beta=2.0,
        accumulate_into_grad_weight=True,
    )
    assert dx is grad_input
    assert dw is grad_weight
    assert_product(dx, (3 * exact["dx"][0] + starts[0], 3 * exact["dx"][1] + starts[0].abs()))
    assert_product(dw, (-1.5 * exact["dw"][0] + 2 * starts[1], 1.5 * exact["dw"][1] + 2 * starts[1].abs()))
    assert BasicLinear._functional_backward(dy, x, w, input_requires_grad=False)[0] is None
    assert BasicLinear._functional_backward(dy, x, w, weight_requires_grad=False)[1] is None


def test_functional_forward_into_a_quantized_buffer():
    x, w = seeded(32, 64), seeded(32, 64, seed=1)
    x_quantizer, w_quantizer, _ = linear_quantizers(Float8CurrentScaling())
    output_quantizer = Float8Quantizer(torch.full((1,), 4.0), torch.zeros(1), DType.kFloat8E4M3)
    out = output_quantizer.make_empty((32, 32), dtype=torch.float32, device="cpu")
    y, _, _ = BasicLinear._functional_forward(
        x,
        w,
        out=out,
        with_quantized_compute=True,
        input_quantizer=x_quantizer,
        weight_quantizer=w_quantizer,
        output_quantizer=output_quantizer,
    )
    assert y is out
    sums = x_quantizer(x).dequantize() @ w_quantizer(w).dequantize().t()
    assert same_bits(y.dequantize(), output_quantizer(sums).dequantize())


def test_functional_forms_build_no_graph():
    x, w = seeded(2, 4, requires_grad=True), seeded(4, 4, requires_grad=True)
    y, _, _ = BasicLinear._functional_forward(x, w)
    dx, dw = BasicLinear._functional_backward(y, x, w)
    assert not (y.requires_grad or dx.requires_grad or dw.requires_grad)


def test_gradcheck_in_float64():
    with backend("float64"):
        op = BasicLinear(5, 3, dtype=torch.float64)
        pipeline = Sequential(op, Bias(3, dtype=torch.float64))
        x = seeded(4, 5, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda x, *_: pipeline(x), (x, *op.parameters()))


# --- errors -----------------------------------------------------------------------------------------


def test_unsupported_dtype():
    with pytest.raises(ValueError, match="Supported dtypes are float32, float16, bfloat16"):
        BasicLinear(4, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"BasicLinear\(.*Supported dtypes .*float64 under fuser.backend"):
        BasicLinear(4, 4).double()(seeded(2, 4).double())
    for make in (BasicLinear, ops.Linear, lambda *sizes, dtype: ops.GroupedLinear(1, *sizes, dtype=dtype)):
        with pytest.raises(TypeError, match=r"dtype must be a torch.dtype, as torch.bfloat16, or None; got 'bfloat16'"):
            make(4, 4, dtype="bfloat16")
    with pytest.raises(ValueError, match="Supported dtypes"):
        BasicLinear._functional_forward(seeded(2, 4), seeded(4, 4), dtype=torch.float64)
    with pytest.raises(ValueError, match="Supported dtypes"):
        BasicLinear._functional_backward(seeded(2, 4), seeded(2, 4), seeded(4, 4), dtype=torch.int32)


def _quantized(shape=(2, 4)):
    return Float8Quantizer(torch.ones(1), torch.zeros(1), DType.kFloat8E4M3)(torch.ones(shape))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"with_quantized_compute": True}, "Missing quantizer for input tensor"),
        ({"with_quantized_compute": True, "input_quantizer": _quantized()._quantizer}, "Missing quantizer for weight"),
        ({"accumulate_into_out": True}, "without providing output tensor"),
        (
            {"accumulate_into_out": True, "out": torch.zeros(2, 4), "tensor_parallel_mode": "row"},
            "not supported with row tensor parallelism",
        ),
        ({"out": torch.zeros(2, 4, dtype=torch.bfloat16), "dtype": torch.float32}, "invalid dtype"),
        ({"out": torch.zeros(2, 4, device="meta")}, "invalid device"),
        ({"out": _quantized()}, "quantized compute is not enabled"),
        (
            {"out": _quantized(), "with_quantized_compute": True, "tensor_parallel_mode": "row"},
            "row tensor parallelism does not support",
        ),
        ({"out": _quantized(), "with_quantized_compute": True}, "quantizer was not provided"),
    ],
)
def test_functional_forward_errors(options, message):
    with pytest.raises(ValueError, match=message):
        BasicLinear._functional_forward(torch.ones(2, 4), torch.ones(4, 4), **options)


@pytest.mark.parametrize(
    ("operands", "options", "message"),
    [
        ("-w", {}, "did not provide input tensor"),
        ("x-", {}, "did not provide weight tensor"),
        ("xw", {"accumulate_into_grad_input": True}, "without providing grad input"),
        ("xw", {"accumulate_into_grad_weight": True}, "without providing grad weight"),
        (
            "xw",
            {"accumulate_into_grad_input": True, "grad_input": torch.ones(2, 4), "tensor_parallel_mode": "column"},
            "not supported with column tensor parallelism",
        ),
        ("xw", {"with_quantized_compute": True}, "Missing quantizer for grad output tensor"),
        (
            "xw",
            {"with_quantized_compute": True, "grad_output_quantizer": _quantized()._quantizer},
            "Missing quantizer for weight tensor",
        ),
        ("xw", {"grad_input": _quantized()}, "quantized compute is not enabled"),
        ("xw", {"grad_input": torch.ones(2, 4, dtype=torch.float16)}, "invalid dtype"),
    ],
)
def test_functional_backward_errors(operands, options, message):
    x = torch.ones(2, 4) if operands[0] == "x" else None
    w = torch.ones(4, 4) if operands[1] == "w" else None
    with pytest.raises(ValueError, match=message):
        BasicLinear._functional_backward(torch.ones(2, 4), x, w, **options)


def test_no_gradient_needs_no_operand():
    assert BasicLinear._functional_backward(
        torch.ones(2, 4), None, None, input_requires_grad=False, weight_requires_grad=False
    ) == (None, None)


# --- tensor parallelism without processes -----------------------------------------------------------


def _canonical(monkeypatch, size, mode, sequence_parallel=True, in_features=8, out_features=12):
    monkeypatch.setattr(module, "get_distributed_world_size", lambda group: size)
    return BasicLinear._canonicalize_tensor_parallelism(
        mode=mode,
        process_group="group",
        sequence_parallel=sequence_parallel,
        in_features=in_features,
        out_features=out_features,
    )


def test_tensor_parallel_sizes(monkeypatch):
    assert _canonical(monkeypatch, 4, "column") == ("column", "group", 4, True, 8, 3)
    assert _canonical(monkeypatch, 4, "row", False) == ("row", "group", 4, False, 2, 12)
    assert _canonical(monkeypatch, 1, "row") == (None, None, 1, False, 8, 12)
    assert _canonical(monkeypatch, 1, "diagonal") == (None, None, 1, False, 8, 12)
    assert _canonical(monkeypatch, 4, None) == (None, None, 1, False, 8, 12)


@pytest.mark.parametrize(
    ("mode", "message"), [("column", "out_features"), ("row", "in_features"), ("diagonal", "Supported modes")]
)
def test_tensor_parallel_errors(monkeypatch, mode, message):
    with pytest.raises(ValueError, match=message):
        _canonical(monkeypatch, 5, mode)


def test_a_mode_without_processes_is_switched_off():
    op = BasicLinear(8, 8, tensor_parallel_mode="column", sequence_parallel=True)
    assert op.tensor_parallel_mode is None
    assert not op.sequence_parallel


# --- operands that are quantized already ------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("with_quantizers", [True, False], ids=["quantizers in tensors", "bare"])
def test_quantized_operands_need_no_quantizer(name, with_quantizers):
    """They are multiplied as they are, in both passes."""
    quantizers = linear_quantizers(RECIPES[name]())
    x, w, dy = (quantizer(seeded(128, 128, seed=i)) for i, quantizer in enumerate(quantizers))
    given = {"input_quantizer": quantizers[0], "weight_quantizer": quantizers[1]}
    expected = BasicLinear._functional_forward(x, w, dtype=torch.float32, with_quantized_compute=True, **given)
    grads = BasicLinear._functional_backward(
        dy, x, w, dtype=torch.float32, with_quantized_compute=True, grad_output_quantizer=quantizers[2], **given
    )
    if not with_quantizers:
        x, w, dy = (type(tensor)(tensor.buffers) for tensor in (x, w, dy))
    y, saved_x, saved_w = BasicLinear._functional_forward(x, w, dtype=torch.float32, with_quantized_compute=True)
    assert same_bits(y, expected[0]) and saved_x is x and saved_w is w
    actual = BasicLinear._functional_backward(dy, x, w, dtype=torch.float32, with_quantized_compute=True)
    assert all(same_bits(a, b) for a, b in zip(actual, grads, strict=True))


def test_quantized_operand_without_the_copy_that_is_read():
    """Its own quantizer makes that copy; where there is none, there has to be a caller's."""
    quantizer = MXFP8Quantizer(DType.kFloat8E4M3, rowwise=True, columnwise=False)
    dy, x, w = (quantizer(seeded(32, 32, seed=i)) for i in range(3))
    options = {"dtype": torch.float32, "with_quantized_compute": True}
    dx, dw = BasicLinear._functional_backward(dy, x, w, **options)
    both = MXFP8Quantizer(DType.kFloat8E4M3)
    again = [both(tensor.dequantize()) for tensor in (dy, x, w)]
    assert same_bits(dx, BasicLinear._functional_backward(*again, **options)[0])
    assert same_bits(dw, BasicLinear._functional_backward(*again, **options)[1])
    assert dy._quantizer.get_usages() == {"rowwise": True, "columnwise": False}
    bare = [type(tensor)(tensor.buffers) for tensor in (dy, x, w)]
    with pytest.raises(ValueError, match="Missing quantizer for grad output tensor"):
        BasicLinear._functional_backward(*bare, **options)
    with pytest.raises(ValueError, match="Missing quantizer for weight tensor"):
        BasicLinear._functional_backward(dy, x, bare[2], **options)


@pytest.mark.parametrize("shape", [(4, 96), (64, 1), ()])
def test_an_input_of_another_width_is_named(shape):
    with pytest.raises(ValueError, match=r"Input tensor .* and weight tensor .* are not compatible.*in_features"):
        _linear()(torch.zeros(shape))
