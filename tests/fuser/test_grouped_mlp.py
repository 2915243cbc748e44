"""The fused grouped MLP: the bits of its three operations, when it fires, what it saves."""

import weakref
from itertools import product

import pytest
import torch
from linear_cases import plan, seeded
from one_rounding import same_bits

import fuser
import fuser.ops as te_ops
from fuser.basic.activation import SCALED, ScaledGLU
from fuser.basic.grouped_linear import GRAD_INPUT_BUFFER_KEY, OUTPUT_BUFFER_KEY
from fuser.fused import GroupedMLP, GroupedMLP_CuTeGEMMGLU, GroupedMLP_CuTeGEMMUnary
from fuser.quantization import FP8GlobalStateManager, autocast, quantized_model_init
from fuser.recipe import DelayedScaling, Format, MXFP8BlockScaling, NVFP4BlockScaling
from tiers import sampled

SPLITS = [32, 0, 64, 32]
GROUPS, ROWS, WIDTH, HIDDEN = len(SPLITS), sum(SPLITS), 64, 128
RECIPES = {"mxfp8": MXFP8BlockScaling, "nvfp4": NVFP4BlockScaling}


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    monkeypatch.setenv("NVTE_CUTEDSL_FUSED_GROUPED_MLP", "1")
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")


def mlp(name="ScaledSwiGLU", *, interleave=32, recompute=False, widths=(WIDTH, HIDDEN), **options):
    """A model, and its activation."""
    torch.manual_seed(1)
    cls = SCALED[name]
    gated = issubclass(cls, ScaledGLU)
    arguments = {"glu_interleave_size": interleave} if gated else {}
    if recompute:
        arguments["activation_recompute_in_mlp"] = True
    width, hidden = widths
    fc1 = te_ops.GroupedLinear(GROUPS, width, hidden * (2 if gated else 1), **options)
    fc2 = te_ops.GroupedLinear(GROUPS, hidden, width, **options)
    for i, linear in enumerate((fc1, fc2)):
        with torch.no_grad():
            for j, bias in enumerate(linear.biases):
                if bias is not None:
                    bias.copy_(seeded(*bias.shape, seed=7 * i + j, dtype=bias.dtype))
    return te_ops.Sequential(fc1, cls(**arguments), fc2)


def run(model, recipe, monkeypatch, *, fused, dtype=torch.float32, kwargs=None, grad=True):
    """Everything that comes out of a step."""
    monkeypatch.setenv("NVTE_CUTEDSL_FUSED_GROUPED_MLP", str(int(fused)))
    FP8GlobalStateManager.reset()
    model._module_groups = None
    model.zero_grad()
    torch.manual_seed(3)  # of stochastic rounding
    x = seeded(ROWS, WIDTH, dtype=dtype, requires_grad=grad)
    scales = [seeded(ROWS, seed=n, dtype=dtype, requires_grad=True) for n in (4, 5, 6)]
    splits = torch.tensor(SPLITS)
    fc1, _, fc2 = model
    extra = [splits, *scales[: fc1.num_extra_inputs - 1], scales[1], splits, *scales[2 : fc2.num_extra_inputs + 1]]
    with autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x, *extra, op_kwargs=kwargs)
    y.backward(seeded(ROWS, WIDTH, dtype=dtype, seed=8))
    for linear in (fc1, fc2):
        linear.backward_dw()
    used = [tensor for tensor in extra if tensor.is_floating_point()]
    (group,) = [group for group in model._module_groups if isinstance(group, fuser.OperationFuser)]
    assert plan(group._forward_ops) == plan(group._backward_ops)
    assert (plan(group._forward_ops) == [("GroupedMLP", [0, 1, 2])]) == fused
    return [y.detach(), x.grad, *(s.grad for s in used), *(p.grad for p in model.parameters())]


def assert_same(one, other):
    assert len(one) == len(other) and any(tensor is not None for tensor in one)
    for left, right in zip(one, other, strict=True):
        assert (left is None) == (right is None)
        assert left is None or same_bits(left, right)


@sampled(("name", "recipe", "dtype"), product(SCALED, RECIPES, [torch.float32, torch.bfloat16]), 3, in_all=1, ids=str)
def test_bits_are_those_of_the_parts(name, recipe, dtype, monkeypatch):
    model = mlp(name, dtype=dtype)
    results = [run(model, RECIPES[recipe](), monkeypatch, fused=fused, dtype=dtype) for fused in (False, True)]
    assert_same(*results)


@pytest.mark.parametrize(
    "options",
    [
        {"scale_bias": True},
        {"bias": False},
        {"single_grouped_weight": True, "single_grouped_bias": True},
        {"delay_wgrad_compute": True},
    ],
    ids=str,
)
def test_bits_with_options_of_the_linears(options, monkeypatch):
    model = mlp(**options)
    assert_same(*(run(model, MXFP8BlockScaling(), monkeypatch, fused=fused) for fused in (False, True)))


def test_bits_of_weights_that_are_kept_quantized(monkeypatch):
    with quantized_model_init(recipe=MXFP8BlockScaling()):
        model = mlp()
    assert_same(*(run(model, MXFP8BlockScaling(), monkeypatch, fused=fused) for fused in (False, True)))


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_bits_with_a_backward_override(override, monkeypatch):
    recipe = MXFP8BlockScaling(backward_override=override)
    assert_same(*(run(mlp(), recipe, monkeypatch, fused=fused) for fused in (False, True)))


@pytest.mark.parametrize("frozen", ["0.", "2.", ""])
def test_bits_where_not_all_needs_a_gradient(frozen, monkeypatch):
    model = mlp()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen) if frozen else False)
    assert_same(*(run(model, MXFP8BlockScaling(), monkeypatch, fused=f, grad=frozen != "0.") for f in (False, True)))


def test_without_gradients(monkeypatch):
    model, splits, scales = mlp(), torch.tensor(SPLITS), seeded(ROWS, seed=5)
    outputs = []
    for fused in "01":
        monkeypatch.setenv("NVTE_CUTEDSL_FUSED_GROUPED_MLP", fused)
        model._module_groups = None
        with torch.no_grad(), autocast(recipe=MXFP8BlockScaling()):
            outputs.append(model(seeded(ROWS, WIDTH), splits, scales, splits))
    assert_same(outputs[:1], outputs[1:])


def test_a_second_backward():
    model, splits = mlp(), torch.tensor(SPLITS)
    x = seeded(ROWS, WIDTH, requires_grad=True)
    with autocast(recipe=MXFP8BlockScaling()):
        y = model(x, splits, seeded(ROWS, seed=5), splits)
    y.sum().backward(retain_graph=True)
    first, x.grad = x.grad, None
    y.sum().backward()
    assert same_bits(x.grad, first)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recomputed_activation_is_not_saved(recipe, monkeypatch):
    made = RECIPES[recipe]()
    plain, recomputed = (
        run(mlp("ScaledSReLU", recompute=recompute), made, monkeypatch, fused=True) for recompute in (False, True)
    )
    assert_same(plain, recomputed)
    saved = []
    for recompute in (False, True):
        model, splits = mlp("ScaledSReLU", recompute=recompute), torch.tensor(SPLITS)
        x = seeded(ROWS, WIDTH, requires_grad=True)
        report = fuser.explain(model, x, splits, seeded(ROWS, seed=5), splits, recipe=made, quiet=True)
        saved.append(report.pipelines[0].saved_bytes)
    assert saved[0] - saved[1] > ROWS * HIDDEN // 2  # codes of four or eight bits, and their scales


def test_results_go_to_the_caller_s_buffers(monkeypatch):
    model = mlp()
    expected = run(model, MXFP8BlockScaling(), monkeypatch, fused=False)
    output, grad_input = torch.empty(ROWS, WIDTH), torch.empty(ROWS, WIDTH)
    kwargs = {model[2]: {OUTPUT_BUFFER_KEY: output}, model[0]: {GRAD_INPUT_BUFFER_KEY: grad_input}}
    actual = run(model, MXFP8BlockScaling(), monkeypatch, fused=True, kwargs=kwargs)
    assert_same(expected, actual)
    assert same_bits(output, expected[0]) and same_bits(grad_input, expected[1])
    for op, key, other in ((0, OUTPUT_BUFFER_KEY, "last"), (2, GRAD_INPUT_BUFFER_KEY, "first")):
        with pytest.raises(ValueError, match=f"to the {other} linear"):
            run(model, MXFP8BlockScaling(), monkeypatch, fused=True, kwargs={model[op]: {key: output}})


def test_what_lies_between_lives_of_one_expert_at_a_time(monkeypatch):
    model, made = mlp(), []
    rows_forward, rows_backward = model[1].rows_forward, model[1].rows_backward

    def watch(tensor):
        assert sum(earlier() is not None for earlier in made) <= 1  # the variable of the loop
        made.append(weakref.ref(tensor))
        return tensor

    def forward(x, scales):
        return watch(rows_forward(x, scales))

    def backward(dy, x, scales):
        dx, grad_scales = rows_backward(dy, x, scales)
        return watch(dx), grad_scales

    monkeypatch.setattr(model[1], "rows_forward", forward)
    monkeypatch.setattr(model[1], "rows_backward", backward)
    run(model, MXFP8BlockScaling(), monkeypatch, fused=True)
    assert len(made) == 2 * GROUPS


# --- when it fires ----------------------------------------------------------------------------------


def considered(model, recipe):
    report = fuser.explain(model, recipe=recipe, quiet=True)
    (candidate,) = [one for one in report.pipelines[0].fusions if one.fusion == "GroupedMLP"]
    assert candidate.direction == "both" and list(candidate.basic_ops) == [0, 1, 2]
    return candidate


def test_explain_lists_it():
    candidate = considered(mlp(), MXFP8BlockScaling())
    assert candidate.fired
    report = fuser.explain(mlp(), recipe=MXFP8BlockScaling(), quiet=True)
    assert [step.name for step in report.pipelines[0].forward] == ["GroupedMLP"]
    assert [step.name for step in report.pipelines[0].backward] == ["GroupedMLP"]
    assert "both GroupedMLP [0 GroupedLinear, 1 ScaledSwiGLU, 2 GroupedLinear] fired" in str(report)


@pytest.mark.parametrize(
    ("options", "recipe", "reason"),
    [
        ({}, None, "neither MXFP8 nor NVFP4"),
        ({}, DelayedScaling(), "neither MXFP8 nor NVFP4"),
        ({}, MXFP8BlockScaling(fp8_format=Format.HYBRID), "gradients must be E4M3"),
        ({}, NVFP4BlockScaling(disable_rht=True), "disable_rht is True"),
        ({"interleave": None}, MXFP8BlockScaling(), "glu_interleave_size must be 32; it is None"),
        ({"interleave": 64}, MXFP8BlockScaling(), "glu_interleave_size must be 32; it is 64"),
        ({"widths": (96, 128)}, MXFP8BlockScaling(), "in_features must be a multiple of 64; a linear has 96"),
    ],
)
def test_what_keeps_it_from_firing(options, recipe, reason):
    candidate = considered(mlp(**options), recipe)
    assert not candidate.fired and reason in candidate.reason


def test_linears_that_do_not_match_stay_apart():
    for fc2 in (te_ops.GroupedLinear(GROUPS, 64, WIDTH), te_ops.GroupedLinear(2, HIDDEN, WIDTH)):
        fc1, activation, _ = mlp()
        candidate = considered(te_ops.Sequential(fc1, activation, fc2), MXFP8BlockScaling())
        assert "the linears do not match" in candidate.reason


def test_without_te_s_switch_it_stays_away(monkeypatch):
    monkeypatch.delenv("NVTE_CUTEDSL_FUSED_GROUPED_MLP")
    candidate = considered(mlp(), MXFP8BlockScaling())
    assert not candidate.fired and "NVTE_CUTEDSL_FUSED_GROUPED_MLP" in candidate.reason


def test_te_s_names():
    assert GroupedMLP is GroupedMLP_CuTeGEMMGLU is GroupedMLP_CuTeGEMMUnary


def test_what_is_refused():
    model, splits = mlp(), torch.tensor(SPLITS)
    with autocast(recipe=MXFP8BlockScaling()):
        with pytest.raises(ValueError, match="must be a multiple of 128"):
            model(seeded(64, WIDTH), torch.tensor([32, 0, 32, 0]), seeded(64), torch.tensor([32, 0, 32, 0]))
        with pytest.raises(RuntimeError, match="different split sizes"):
            model(seeded(ROWS, WIDTH), splits, seeded(ROWS), torch.tensor([64, 0, 32, 32]))
        with pytest.raises(ValueError, match="scales must have one entry"):
            model(seeded(ROWS, WIDTH), splits, seeded(3), splits)
