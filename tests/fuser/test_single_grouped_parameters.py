"""`GroupedLinear` with one parameter for all groups: the bits of separate ones, whatever happens to the parameter."""

import copy
import io
from itertools import product

import pytest
import torch
from linear_cases import RECIPES, seeded
from one_rounding import same_bits

import fuser
import fuser.ops as te_ops
import refops
from fuser.basic.grouped_linear import GroupedLinear
from fuser.quantization import FP8GlobalStateManager, GroupedTensor, QuantizedTensor, autocast, quantized_model_init
from fuser.recipe import BlockScaledRecipe, MXFP8BlockScaling
from tiers import sampled

SPLITS = torch.tensor([32, 0, 64, 32])
GROUPS, ROWS, IN, OUT = 4, 128, 64, 128
SINGLE = {"single_grouped_weight": True, "single_grouped_bias": True}
ALL_RECIPES = {
    "none": lambda: None,
    **RECIPES,
    "own": lambda: BlockScaledRecipe(refops.MXFP8Scaling(refops.E4M3, scale_rounding="floor")),
}


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")


def layer(seed=1, **options):
    torch.manual_seed(seed)
    op = GroupedLinear(GROUPS, IN, OUT, **options)
    with torch.no_grad():
        for i, bias in enumerate(op.biases):
            if bias is not None:
                bias.copy_(seeded(OUT, seed=10 + i, dtype=bias.dtype))
    return op


def gradients(op, of="weight"):
    """The gradient of each group's weight (or bias)."""
    parameter = getattr(op, of, None)
    if parameter is not None:
        return list(parameter.grad)
    return [getattr(op, f"{of}{i}").grad for i in range(GROUPS)]


def run(op, recipe, *, steps=2, dtype=torch.float32):
    """Everything that comes out of some steps of training, in order."""
    FP8GlobalStateManager.reset()
    torch.manual_seed(7)  # of stochastic rounding
    x = seeded(ROWS, IN, dtype=dtype, requires_grad=True)
    scales = [seeded(ROWS, seed=4, dtype=dtype, requires_grad=True)] if op.num_extra_inputs == 2 else []
    optimizer = torch.optim.AdamW(op.parameters(), lr=0.05, foreach=False)
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        x.grad = None
        with autocast(enabled=recipe is not None, recipe=recipe):
            y = op(x, SPLITS, *scales)
        y.backward(seeded(ROWS, OUT, seed=20 + step, dtype=dtype))
        seen += [y.detach(), x.grad, *(scale.grad.clone() for scale in scales), *gradients(op)]
        seen += gradients(op, "bias") if op.has_bias else []
        optimizer.step()
    return [*seen, *(w.dequantize() if isinstance(w, QuantizedTensor) else w.detach() for w in op.weights)]


def assert_same(one, other):
    assert len(one) == len(other)
    for left, right in zip(one, other, strict=True):
        assert same_bits(left.contiguous(), right.contiguous())


@sampled(
    ("recipe", "quantized_init"),
    [(name, init) for name in ALL_RECIPES for init in (False, True) if name != "none" or not init],
    3,
    in_all=1,
)
def test_bits_are_those_of_separate_parameters(recipe, quantized_init):
    results = []
    for options in ({}, SINGLE):
        made = ALL_RECIPES[recipe]()
        with quantized_model_init(enabled=quantized_init, recipe=made):
            op = layer(**options)
        assert isinstance(op.weights[0], QuantizedTensor) is quantized_init
        results.append(run(op, made, steps=3))
    assert_same(*results)
    assert isinstance(op.weight, GroupedTensor) and op.weight.shape == (GROUPS, OUT, IN) and op.weight.is_leaf
    assert isinstance(op.bias, GroupedTensor) and op.bias.shape == (GROUPS, OUT)


@sampled(
    ("others", "options"),
    product(
        [{}, {"scale_bias": True}, {"bias": False}],
        [{"single_grouped_weight": True}, {"single_grouped_bias": True}, SINGLE],
    ),
    2,
    in_all=1,
    ids=str,
)
def test_bits_of_one_of_both_and_of_scaled_biases(options, others):
    dtype = torch.bfloat16
    assert_same(
        *(run(layer(**others, **kind, dtype=dtype), MXFP8BlockScaling(), dtype=dtype) for kind in ({}, options))
    )


def test_each_group_has_its_own_delayed_scale():
    recipe = RECIPES["delayed"]()
    with quantized_model_init(recipe=recipe):
        op = layer(**SINGLE)
    with torch.no_grad():
        op.weight.copy_(op.weight.detach() * torch.tensor([1.0, 4, 16, 64]).view(4, 1, 1))
    for _ in range(2):
        with autocast(recipe=recipe):
            op(seeded(ROWS, IN), SPLITS)
    scales = [quantizer.scale.item() for _, quantizer, _ in op._group_quantizers()]
    assert len(set(scales)) == GROUPS
    assert [weight._quantizer.scale.item() for weight in op.weights] == scales


# --- names, files, copies ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (SINGLE, ["weight", "bias"]),
        ({"single_grouped_weight": True}, ["bias0", "bias1", "bias2", "bias3", "weight"]),
        ({"single_grouped_bias": True}, ["weight0", "weight1", "weight2", "weight3", "bias"]),
        ({**SINGLE, "bias": False}, ["weight"]),
    ],
)
def test_names_are_te_s(options, names):
    op = layer(**options)
    assert [name for name, _ in op.named_parameters()] == names
    assert [name for name in op.state_dict() if name != "_extra_state"] == names


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_a_file_restores_the_bits(recipe):
    made = ALL_RECIPES[recipe]()
    ops = []
    for seed in (1, 2):
        with quantized_model_init(enabled=made is not None, recipe=made):
            ops.append(layer(seed, **SINGLE))
    op, other = ops
    run(op, made, steps=1)
    file = io.BytesIO()
    torch.save(op.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert isinstance(saved["weight"], GroupedTensor)
    other.load_state_dict(saved)
    for one, restored in zip(op.weight.get_data_tensors(), other.weight.get_data_tensors(), strict=True):
        assert (one is None) == (restored is None)
        assert one is None or same_bits(one, restored)
    assert_same(run(op, made, steps=1), run(other, made, steps=1))


@pytest.mark.filterwarnings("error::UserWarning")
@sampled("recipe", ALL_RECIPES, 3, in_all=1)
def test_a_file_of_the_module_trains_on(recipe):
    made = ALL_RECIPES[recipe]()
    with quantized_model_init(enabled=made is not None, recipe=made):
        op = layer(**SINGLE)
    run(op, made, steps=1)
    file = io.BytesIO()
    torch.save(op, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    assert_same(run(op, made), run(other, made))


@sampled("recipe", ALL_RECIPES, 3, in_all=1)
def test_copies_and_casts_keep_one_parameter(recipe):
    made = ALL_RECIPES[recipe]()
    with quantized_model_init(enabled=made is not None, recipe=made):
        op, separate = layer(**SINGLE), layer()
    parameter = op.weight
    parameter.main_grad = "kept"
    half, separate_half = copy.deepcopy(op).half(), copy.deepcopy(separate).half()
    assert half.weight.dtype is torch.float16 and half.weight.main_grad == "kept"
    assert isinstance(half.weight, GroupedTensor) and isinstance(half.weight, torch.nn.Parameter)
    assert_same(*(run(one, made, dtype=torch.float16) for one in (separate_half, half)))
    assert op.weight is parameter and parameter.dtype is torch.float32
    assert_same(run(separate, made), run(op, made))


@pytest.mark.parametrize("empty", [False, True])
def test_deferred_parameters(empty):
    op = GroupedLinear(GROUPS, IN, OUT, device="meta", **SINGLE)
    assert {name: p.device.type for name, p in op.named_parameters()} == {"weight": "meta", "bias": "meta"}
    if empty:
        op.to_empty(device="cpu")
        torch.manual_seed(1)
        op.reset_parameters()
    torch.manual_seed(1)
    te_ops.Sequential(op)(seeded(ROWS, IN), SPLITS)
    torch.manual_seed(1)
    for deferred, direct in zip(op.weights, GroupedLinear(GROUPS, IN, OUT).weights, strict=True):
        assert same_bits(deferred.detach(), direct.detach())
    assert isinstance(op.weight, GroupedTensor) and not op.bias.detach().any()


def test_a_plain_parameter_in_its_place_works():
    """What FSDP makes of it."""
    results = [run(layer(), MXFP8BlockScaling(), steps=1)]
    op = layer(**SINGLE)
    for name in ("weight", "bias"):
        setattr(op, name, torch.nn.Parameter(getattr(op, name).detach() + 0))
    results.append(run(op, MXFP8BlockScaling(), steps=1))
    assert_same(*results)


# --- gradients elsewhere ----------------------------------------------------------------------------


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("main_grad", [False, True])
def test_delayed_gradients_and_those_that_go_to_main_grad(main_grad, delayed):
    results = []
    for options in ({}, SINGLE):
        FP8GlobalStateManager.reset()
        op = layer(delay_wgrad_compute=delayed, accumulate_into_main_grad=main_grad, **options)
        buffer = torch.ones(GROUPS, OUT, IN)
        parameters = [op.weight] if options else op.weights
        assert all(getattr(parameter, "skip_backward_post_hook", False) is delayed for parameter in parameters)
        for i, parameter in enumerate(parameters):
            parameter.main_grad = buffer.view(-1) if options else buffer[i]
            parameter.grad_added_to_main_grad = False
        for step in range(2):
            with autocast(recipe=MXFP8BlockScaling()):
                y = op(seeded(ROWS, IN, seed=step), SPLITS)
            y.backward(seeded(ROWS, OUT, seed=2))
            op.backward_dw()
        if main_grad:
            assert all(parameter.grad_added_to_main_grad for parameter in parameters)
        results.append([buffer] if main_grad else gradients(op))
    assert_same(*results)


def test_a_main_grad_of_another_size_is_an_error():
    op = layer(accumulate_into_main_grad=True, **SINGLE)
    op.weight.main_grad = torch.zeros(3)
    with pytest.raises(RuntimeError, match=r"GroupedLinear: main_grad must be viewable as \(4, 128, 64\)"):
        op(seeded(ROWS, IN), SPLITS).sum().backward()


def test_explain_counts_the_parameter_once():
    op = layer(**SINGLE)
    report = fuser.explain(op, seeded(ROWS, IN, requires_grad=True), SPLITS, quiet=True)
    saved = report.pipelines[0].saved[0]
    assert sum(tensor.bytes for tensor in saved if tensor.shape == (OUT, IN)) == 0


@pytest.mark.parametrize("option", SINGLE)
def test_without_te_s_switch_parameters_are_separate(option, monkeypatch):
    monkeypatch.delenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM")
    with pytest.warns(UserWarning, match=f"{option}.*NVTE_GROUPED_LINEAR_SINGLE_PARAM is not set"):
        op = GroupedLinear(2, IN, OUT, **{option: True})
    assert getattr(op, option) is False and next(name for name, _ in op.named_parameters()) == "weight0"
