"""What torch does around a model: optimizers, its own checkpoint, GradScaler. Each works, or says why it does not."""

import copy
import functools
import inspect
import warnings
from itertools import product

import pytest
import torch

import fuser
import refops
from fuser import ops
from fuser.quantization import steps
from fuser.recipe import (
    BlockScaledRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from tiers import sampled

SIZE = 64
QUANTIZED = {
    "mxfp8": MXFP8BlockScaling,
    "nvfp4": NVFP4BlockScaling,
    "delayed": DelayedScaling,
    "current": Float8CurrentScaling,
    "block": Float8BlockScaling,
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def seeded(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# --- optimizers ---------------------------------------------------------------------------------------------


def optimizers():
    """Name -> (class, arguments), of all of torch's: as they are, by each of their ways, with weight decay."""
    found = {}
    for name, cls in vars(torch.optim).items():
        if not inspect.isclass(cls) or not issubclass(cls, torch.optim.Optimizer) or cls is torch.optim.Optimizer:
            continue
        parameters = inspect.signature(cls).parameters
        settings = {"lr": 100.0 if name in ("Adadelta", "LBFGS") else 0.1}  # their first steps are tiny
        settings |= {"weight_decay": 0.1} if "weight_decay" in parameters else {}
        settings |= {"momentum": 0.9} if "momentum" in parameters and name != "Muon" else {}
        found[name] = cls, settings
        for way in ("foreach", "fused", "capturable"):
            if way in parameters:
                found[f"{name}-{way}"] = cls, settings | {way: True}
    return found


OPTIMIZERS = optimizers()
#: What torch refuses in a sentence of its own: on this machine, or without sparse gradients.
REFUSED = {"SparseAdam": "does not support dense gradients", "capturable": "capturable=True"}


def quantized_parameter(recipe, dtype=torch.float32):
    with fuser.quantized_model_init(recipe=recipe):
        parameter = ops.BasicLinear(SIZE, SIZE, dtype=dtype).weight
    with torch.no_grad():
        parameter.copy_(seeded(SIZE, SIZE, dtype=dtype))
    return parameter


def take_steps(name, parameter, *, after_step=None, count=3):
    """Run an optimizer on a parameter, with the gradients of every other."""
    cls, settings = OPTIMIZERS[name]
    optimizer = cls([parameter], **settings)
    for step in range(count):
        parameter.grad = seeded(SIZE, SIZE, seed=step + 1, dtype=parameter.dtype)
        optimizer.step((lambda: torch.zeros(())) if name == "LBFGS" else None)
        if after_step is not None:
            after_step(parameter)


def refusal(name, dtype=torch.float32):
    """What the error must say if an optimizer can't work, else None."""
    if name == "SGD-fused" and dtype != torch.float32:
        return "SGD.fused=True. leaves elements of"
    return next((message for part, message in REFUSED.items() if part in name), None)


@sampled(("name", "recipe", "dtype"), product(OPTIMIZERS, QUANTIZED, DTYPES), 3, in_all=1)
def test_quantized_parameters_are_rounded_once_a_step(name, recipe, dtype):
    """The bits of torch's step on a plain copy, quantized after it."""
    parameter = quantized_parameter(QUANTIZED[recipe](), DTYPES[dtype])
    quantizer = parameter._get_quantizer().copy()
    quantizer.set_usage(**parameter.get_usages())
    plain = torch.nn.Parameter(parameter.detach().dequantize())
    before = plain.detach().clone()

    def requantize(one):
        with torch.no_grad():
            one.copy_(quantizer(one.detach()).dequantize())

    message = refusal(name, DTYPES[dtype])
    if message is not None:
        with pytest.raises((RuntimeError, AssertionError), match=message):
            take_steps(name, parameter)
        return
    take_steps(name, parameter)
    take_steps(name, plain, after_step=requantize)
    assert isinstance(parameter, fuser.QuantizedTensor)
    assert torch.equal(parameter.dequantize(), plain) and not torch.equal(plain, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_plain_parameters_move_as_in_float32_or_the_step_raises(name, dtype):
    model, exact = (ops.BasicLinear(SIZE, SIZE, dtype=one) for one in (DTYPES[dtype], torch.float32))
    with torch.no_grad():
        exact.weight.copy_(model.weight)
    before = exact.weight.detach().clone()
    message = refusal(name, DTYPES[dtype])
    if message is not None:
        with pytest.raises((RuntimeError, AssertionError), match=message):
            take_steps(name, model.weight)
        return
    for parameter in (model.weight, exact.weight):
        take_steps(name, parameter)
    moved, expected = (parameter.detach().float() - before for parameter in (model.weight, exact.weight))
    assert expected.norm() > 0 and (moved - expected).norm() <= 0.05 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_sgd_in_16_bits_raises_where_torch_does_not_store(dtype):
    """What is shielded from: of 100 values torch's kernel stores the last 4."""
    parameter = torch.nn.Parameter(torch.ones(100, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    moves = steps._fused_sgd_moves(dtype, 64)
    if not moves:
        with pytest.raises(RuntimeError, match=r"SGD\(fused=True\) leaves elements of .* \(100,\)"):
            torch.optim.SGD([parameter], lr=0.5, fused=True).step()
    parameter.data.fill_(1.0)
    torch.optim.SGD([parameter], lr=0.5, fused=moves).step()
    assert (parameter == 0.5).all()


def test_fused_sgd_moves_what_fills_no_vector():
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=0.5, fused=True).step()
    assert (parameter == 0.5).all()


def test_values_are_kept_for_a_step_alone():
    """Outside of a step, and from one to the next, codes are all that there is."""
    parameter = quantized_parameter(MXFP8BlockScaling())
    twice = copy.deepcopy(parameter)
    with torch.no_grad():
        for _ in range(2):
            twice.mul_(0.9)

    class Twice(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self):
            (one,) = self.param_groups[0]["params"]
            self.seen = [one.mul_(0.9) is one, torch.equal(one + 0, one.dequantize())]
            one.data.mul_(0.9)  # another tensor of the same memory

    start, optimizer = parameter.detach().dequantize(), Twice([parameter], {})
    optimizer.step()
    assert optimizer.seen == [True, False]  # what is read in between is not rounded
    once = parameter._get_quantizer()(start.mul(0.9).mul(0.9)).dequantize()
    assert torch.equal(parameter.dequantize(), once) and not torch.equal(twice.dequantize(), once)
    assert not steps._step.written and torch.equal(parameter + 0, parameter.dequantize())


def ones_like(parameter):
    return parameter._get_quantizer()(torch.ones(SIZE, SIZE))


def write_buffers(parameter):
    for name, array in ones_like(parameter).buffers.tensors.items():
        getattr(parameter.buffers, name).copy_(array)


WRITES = {
    "copy": lambda p: p.copy_(torch.ones(SIZE, SIZE)),
    "quantized copy": lambda p: p.copy_(ones_like(p)),
    "storage": lambda p: p.copy_from_storage(ones_like(p)),
    "data": lambda p: setattr(p, "data", torch.ones(SIZE, SIZE)),
    "quantize_": lambda p: p.quantize_(torch.ones(SIZE, SIZE)),
    "rows": lambda p: (p[:32].fill_(1.0), p[32:].fill_(1.0)),
    "buffers": write_buffers,
}


@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_in_another_way_is_what_a_step_goes_on_from(write):
    parameter = quantized_parameter(MXFP8BlockScaling())

    class Writes(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self):
            (one,) = self.param_groups[0]["params"]
            one.mul_(0.9)
            WRITES[write](one)
            one.mul_(2.0)

    Writes([parameter], {}).step()
    assert (parameter.dequantize() == 2.0).all()


def test_a_parameter_of_all_groups_is_rounded_once_a_step(monkeypatch):
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    with fuser.quantized_model_init(recipe=MXFP8BlockScaling()):
        weight = ops.GroupedLinear(2, SIZE, SIZE, bias=False, single_grouped_weight=True).weight
    members = [torch.nn.Parameter(copy.deepcopy(w).detach()) for w in weight.split_into_quantized_tensors()]
    for parameters in ([weight], members):
        optimizer = torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5, foreach=False)
        for step in range(2):
            for i, one in enumerate(parameters):
                own = seeded(2, SIZE, SIZE, seed=step)
                one.grad = own if one is weight else own[i]
            optimizer.step()
    assert isinstance(weight, fuser.GroupedTensor)
    for member, alone in zip(weight.split_into_quantized_tensors(), members, strict=True):
        assert torch.equal(member.dequantize(), alone.dequantize())


def test_a_step_that_fails_leaves_right_codes():
    parameter, fails = quantized_parameter(MXFP8BlockScaling()), True

    class Fails(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self):
            (one,) = self.param_groups[0]["params"]
            one.fill_(1.0)
            if fails:
                raise ArithmeticError("no step")

    optimizer = Fails([parameter], {})
    with pytest.raises(ArithmeticError):
        optimizer.step()
    assert (parameter.dequantize() == 1.0).all()
    with torch.no_grad():  # outside of a step each write rounds
        for _ in range(2):
            parameter.add_(1e-3)
    assert (parameter.dequantize() == 1.0).all()
    fails = False
    optimizer.step()
    assert not steps._step.written


def test_steps_of_other_optimizers_are_parts_of_a_step():
    parameter = quantized_parameter(MXFP8BlockScaling())
    start = parameter.detach().dequantize()

    class Scales(torch.optim.Optimizer):
        inner = None

        @torch.no_grad()
        def step(self):
            (one,) = self.param_groups[0]["params"]
            one.mul_(0.9)
            if self.inner is not None:
                self.inner.step()
                one.mul_(0.9)

    outer = Scales([parameter], {})
    outer.inner = Scales([parameter], {})
    outer.step()
    once = parameter._get_quantizer()(start.mul(0.9).mul(0.9).mul(0.9)).dequantize()
    assert torch.equal(parameter.dequantize(), once) and not steps._step.written


# --- GradScaler ---------------------------------------------------------------------------------------------

SCALED = {**QUANTIZED, "mxfp4": lambda: BlockScaledRecipe(refops.MXFP4Scaling())}
#: What formats make finite: those with a float32 scale for tensors or blocks inf, those without a code for it NaN.
HIDDEN = {("delayed", "inf"), ("current", "inf"), ("block", "inf"), ("nvfp4", "nan"), ("mxfp4", "nan")}
MODELS = {
    "linear": lambda: ops.BasicLinear(SIZE, SIZE),
    "bias": lambda: ops.Sequential(ops.BasicLinear(SIZE, SIZE), ops.Bias(SIZE)),
    "activation": lambda: ops.Sequential(ops.BasicLinear(SIZE, SIZE), ops.SiLU()),
    "both": lambda: ops.Sequential(ops.BasicLinear(SIZE, SIZE), ops.Bias(SIZE), ops.GELU()),
    "quantize": lambda: ops.Sequential(ops.BasicLinear(SIZE, SIZE), ops.Quantize(forward=False, backward=True)),
}


def scaled_step(model, recipe, *, grad, dtype=torch.float32, extra=(), scale=1.0):
    """(whether GradScaler skipped the step, what was warned of), where only the linear's weight is trained."""
    x = seeded(SIZE, SIZE) * (2**-12 if dtype == torch.float16 else 1)  # or the weight's gradient overflows by itself
    parameters = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    half = torch.autocast("cpu", torch.float16, enabled=dtype == torch.float16)
    with half, fuser.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x, *extra)
    assert y.dtype == dtype
    before = [parameter.detach().clone() for parameter in parameters]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scaler.scale((y * grad.to(dtype)).sum().to(dtype)).backward()
    scaler.step(optimizer)
    scaler.update()
    moved = any(not torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
    skipped = scaler.get_scale() < scale
    assert skipped is not moved
    return skipped, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("value", ["inf", "nan"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", SCALED)
def test_gradscaler_skips_the_step_or_is_warned_for(name, model, value):
    grad = seeded(SIZE, SIZE, seed=1)
    grad[3, 5] = float(value)
    skipped, warned = scaled_step(MODELS[model](), SCALED[name](), grad=grad)
    hidden = (name, value) in HIDDEN
    assert skipped is not hidden and len(warned) == hidden
    assert all({"inf": "with inf to finite", "nan": "with NaN to finite"}[value] in message for message in warned)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("bias", [False, True])
def test_gradscaler_where_the_slope_makes_nan_of_inf(bias, name):
    model = ops.Sequential(ops.BasicLinear(SIZE, SIZE), *([ops.Bias(SIZE)] if bias else []), ops.ReLU())
    with torch.no_grad():
        model[0].weight.fill_(-1.0)
        model[0].weight[:, 0] = 8.0
    grad = seeded(SIZE, SIZE, seed=1)
    with fuser.autocast(recipe=SCALED[name]()):
        zeros = (model(seeded(SIZE, SIZE)) == 0).nonzero()
    grad[tuple(zeros[0])] = float("inf")
    skipped, warned = scaled_step(model, SCALED[name](), grad=grad)
    assert skipped is ((name, "nan") not in HIDDEN) and len(warned) == (not skipped)


@pytest.mark.parametrize("name", SCALED)
def test_gradscaler_with_groups(name):
    grad, splits = seeded(SIZE, SIZE, seed=1), torch.tensor([SIZE // 2, SIZE // 2])
    grad[3, 5] = float("inf")
    model = ops.GroupedLinear(2, SIZE, SIZE, bias=False)
    skipped, warned = scaled_step(model, SCALED[name](), grad=grad, extra=(splits,))
    assert skipped is ((name, "inf") not in HIDDEN) and len(warned) == (not skipped)


@pytest.mark.parametrize("name", SCALED)
def test_gradscaler_with_float16_that_overflows(name):
    """A scale that is too large, as GradScaler's first ones are meant to be."""
    skipped, warned = scaled_step(
        MODELS["linear"](), SCALED[name](), grad=seeded(SIZE, SIZE, seed=1), dtype=torch.float16, scale=2.0**15
    )
    assert skipped is ((name, "inf") not in HIDDEN) and len(warned) == (not skipped)


def test_the_remedies_for_gradscaler():
    grad = seeded(SIZE, SIZE, seed=1)
    grad[3, 5] = float("inf")
    assert scaled_step(MODELS["both"](), None, grad=grad) == (True, [])
    for recipe in (Float8CurrentScaling(backward_override="high_precision"), MXFP8BlockScaling()):
        assert scaled_step(MODELS["both"](), recipe, grad=grad) == (True, [])


def test_the_warning_changes_no_random_bits():
    """It asks what a quantizer makes of NaN, also of one that draws seeds."""
    draws = []
    for value in (0.0, float("nan")):
        torch.manual_seed(0)
        grad = seeded(SIZE, SIZE, seed=1)
        grad[3, 5] = value
        scaled_step(MODELS["linear"](), NVFP4BlockScaling(), grad=grad)
        draws.append(torch.rand(4))
    assert torch.equal(*draws)


def test_gradscaler_switched_on_later_finds_the_delayed_scales_of_smaller_gradients():
    """Gradients saturate until the amaxes have come through the linear layers in a row: two steps for two of them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.SiLU(), torch.nn.Linear(SIZE, SIZE))
    fuser.convert(model, DelayedScaling())
    scales = []
    with pytest.warns(UserWarning, match="times the largest number of its format: what is larger than that saturated"):
        for factor in (*[1.0] * 4, *[2.0**16] * 3):
            model.zero_grad()
            (model(seeded(SIZE, SIZE)).square().mean() * factor).backward()
            scales.append(model[0].weight.grad.norm().item() / factor)
    settled, *after = scales[3:]
    first, second, third = (scale / settled for scale in after)
    assert max(first, second) < 0.01 and 0.95 < third < 1.05


def test_a_converted_relu_hides_nan():
    model = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.ReLU(), torch.nn.Linear(SIZE, SIZE))
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    assert model(seeded(SIZE, SIZE)).isnan().all()
    fuser.convert(model, MXFP8BlockScaling())
    y = model(seeded(SIZE, SIZE))
    y.sum().backward()
    assert all(value.isfinite().all() for value in (y, *(parameter.grad for parameter in model.parameters())))


@pytest.mark.parametrize(("own_generator", "same"), [(False, False), (True, True)])
def test_nvfp4_draws_from_the_generator_that_shuffles_data(own_generator, same):
    orders = []
    for recipe in (None, NVFP4BlockScaling()):
        torch.manual_seed(0)
        linear = fuser.convert(torch.nn.Linear(SIZE, SIZE), recipe)
        generator = torch.Generator().manual_seed(0) if own_generator else None
        data = torch.utils.data.DataLoader(torch.arange(8), shuffle=True, generator=generator)
        linear(seeded(SIZE, SIZE)).sum().backward()
        orders.append([int(batch) for batch in data])
    assert (orders[0] == orders[1]) is same


def test_checkpoint_where_models_of_hugging_face_keep_theirs():
    """They call it with a function, perhaps a partial one, and positional arguments."""
    model = fuser.convert(torch.nn.Linear(SIZE, SIZE), DelayedScaling())
    x = seeded(SIZE, SIZE).requires_grad_()
    y = fuser.checkpoint(functools.partial(model.__call__), x)
    y.sum().backward()
    with pytest.raises(RuntimeError, match=r"use fuser\.checkpoint"):
        torch.utils.checkpoint.checkpoint(model.__call__, x, use_reentrant=False).sum().backward()
