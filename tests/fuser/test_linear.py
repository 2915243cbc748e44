"""`Linear`: basic operations, aliases of their parameters, state dict. Tensor parallelism is in test_distributed.py."""

import copy
import itertools

import pytest
import torch

import fuser
from fuser import ops, recipe
from tiers import sampled


def expected(x, linear):
    bias = None if linear.bias is None else linear.bias.double()
    return torch.nn.functional.linear(x.double(), linear.weight.double(), bias)


@pytest.mark.check
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(16,), (3, 16), (2, 3, 16), (0, 16)])
def test_forward_and_backward(bias, shape):
    linear = ops.Linear(16, 24, bias=bias)
    x = torch.randn(shape, requires_grad=True)
    y = linear(x)
    assert y.shape == (*shape[:-1], 24)
    reference = expected(x, linear)
    torch.testing.assert_close(y.double(), reference, rtol=0, atol=2e-6 * 16)
    dy = torch.randn_like(y)
    tested = torch.autograd.grad(y, [x, *linear.parameters()], dy)
    wanted = torch.autograd.grad(reference, [x, *linear.parameters()], dy.double())
    for a, b in zip(tested, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-5)


def in_place(y, extra):
    extra += y
    return extra


# Operations behind a linear that are fused with it or not, and what they are in torch.
AUTOCAST = {
    "linear": ((), lambda y: y),
    "scale": ((lambda: ops.ConstantScale(2.0),), lambda y: y * 2.0),
    "add": ((ops.AddExtraInput,), lambda y, extra: extra + y),
    "add in place": ((lambda: ops.AddExtraInput(in_place=True),), in_place),
    "scale, add in place": (
        (lambda: ops.ConstantScale(2.0), lambda: ops.AddExtraInput(in_place=True)),
        lambda y, extra: in_place(y * 2.0, extra),
    ),
}


@sampled(
    ("form", "bias", "of_weight", "dtype"),
    itertools.product(
        [*AUTOCAST, "grouped", "grouped, scaled bias"],
        [True, False],
        [torch.float32, torch.bfloat16, torch.float16],
        [torch.bfloat16, torch.float16],
    ),
    5,
    in_all=1,
    ids=str,
)
def test_torch_autocast_gives_the_dtype_that_torch_gives(dtype, of_weight, bias, form):
    torch.manual_seed(0)
    reference = torch.nn.Linear(32, 32, bias=bias, dtype=of_weight)
    x = torch.randn(64, 32, requires_grad=True)
    if form in AUTOCAST:
        after, in_torch = AUTOCAST[form]
        model = ops.Sequential(ops.Linear(32, 32, bias=bias, dtype=of_weight), *(make() for make in after))
        extras = (
            [[torch.ones(64, 32, dtype=of_extra)] for of_extra in (torch.float32, dtype)] if "add" in form else [[]]
        )
    else:
        in_torch = AUTOCAST["linear"][1]
        model = ops.GroupedLinear(2, 32, 32, bias=bias, dtype=of_weight, scale_bias="scaled" in form)
        extras = [[torch.tensor([32, 32]), *[torch.ones(64)] * (model.num_extra_inputs - 1)]]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(reference.weight if parameter.dim() == 2 else reference.bias)
    for extra, own in itertools.product(extras, (None, recipe.MXFP8BlockScaling(), recipe.DelayedScaling())):
        with torch.autocast("cpu", dtype=dtype):
            wanted = in_torch(reference(x), *(tensor.clone() for tensor in extra if form in AUTOCAST))
        with torch.autocast("cpu", dtype=dtype), fuser.autocast(enabled=own is not None, recipe=own):
            y = model(x, *(tensor.clone() for tensor in extra))
        assert y.dtype is wanted.dtype
        torch.testing.assert_close(y.float(), wanted.float(), rtol=0, atol=0.1 if own is None else 0.5)
        y.float().sum().backward()
        assert all(parameter.grad.dtype is of_weight for parameter in model.parameters())


@pytest.mark.check
def test_parameters():
    linear = ops.Linear(4, 8, dtype=torch.bfloat16)
    assert [name for name, _ in linear.named_parameters()] == ["weight", "bias"]
    assert linear.weight is linear.basic_ops[0].weight
    assert linear.bias is linear.basic_ops[1].bias
    assert linear.weight.shape == (8, 4)
    assert linear.weight.dtype is linear.bias.dtype is torch.bfloat16
    assert linear.weight.abs().max() <= (1 / 4**0.5) * 1.01
    assert not linear.bias.any()
    assert [type(op).__name__ for op in linear.basic_ops] == ["BasicLinear", "Bias"]


@pytest.mark.check
def test_without_bias():
    linear = ops.Linear(4, 8, bias=False)
    assert linear.bias is None
    assert [name for name, _ in linear.named_parameters()] == ["weight"]
    linear.bias = None
    with pytest.raises(ValueError, match="does not have bias enabled"):
        linear.bias = torch.nn.Parameter(torch.zeros(8))
    with pytest.raises(ValueError, match="does not have bias enabled"):
        linear.register_parameter("bias", torch.nn.Parameter(torch.zeros(8)))


@pytest.mark.check
@pytest.mark.parametrize("register", [True, False])
def test_assignment_reaches_the_basic_operation(register):
    linear = ops.Linear(4, 8)
    x = torch.ones(2, 4)
    linear(x)
    weight, bias = torch.nn.Parameter(torch.ones(8, 4)), torch.nn.Parameter(torch.full((8,), 5.0))
    if register:
        linear.register_parameter("weight", weight)
        linear.register_parameter("bias", bias)
    else:
        linear.weight, linear.bias = weight, bias
    assert linear.basic_ops[0].weight is weight
    assert linear.basic_ops[1].bias is bias
    linear(x).sum().backward()
    assert torch.equal(linear(x), torch.full((2, 8), 9.0))
    assert weight.grad is not None


@pytest.mark.check
def test_assignment_to_the_basic_operation_is_seen():
    linear = ops.Linear(4, 8)
    linear.basic_ops[0].weight = torch.nn.Parameter(torch.ones(8, 4))
    assert linear.weight is linear.basic_ops[0].weight


@pytest.mark.check
def test_other_parameters_are_the_modules_own():
    linear = ops.Linear(4, 8)
    linear.extra = torch.nn.Parameter(torch.zeros(3))
    assert [name for name, _ in linear.named_parameters()] == ["weight", "bias", "extra"]
    assert "extra" in linear.state_dict()


@pytest.mark.check
def test_state_dict_keys():
    model = ops.Sequential(ops.Linear(4, 8), ops.GELU())
    keys = ["0.basic_ops.0.weight", "0.basic_ops.0._extra_state", "0.basic_ops.1.bias", "0.basic_ops.1._extra_state"]
    assert list(model.state_dict()) == [*keys, "1._extra_state"]
    assert all(model.state_dict()[key].dtype is torch.uint8 for key in model.state_dict() if "_extra" in key)


@pytest.mark.check
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("assign", [True, False])
def test_state_dict_round_trip(bias, assign):
    source, target = ops.Linear(4, 8, bias=bias), ops.Linear(4, 8, bias=bias)
    state = {key: value.clone() for key, value in source.state_dict().items()}
    before = dict(state)
    assert not target.load_state_dict(state, strict=True, assign=assign).missing_keys
    assert list(state) == list(before)
    assert torch.equal(target.weight, source.weight)
    assert target.weight is target.basic_ops[0].weight
    x = torch.randn(3, 4)
    assert torch.equal(target(x), source(x))


@pytest.mark.check
def test_what_does_not_fit_is_reported_once_under_the_key_of_the_state_dict():
    linear = ops.Linear(4, 8)
    state = linear.state_dict()
    del state["basic_ops.0.weight"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "basic_ops\.0\.weight"\. $'):
        linear.load_state_dict(state)
    state["basic_ops.0.weight"] = torch.ones(8, 5)
    with pytest.raises(RuntimeError) as wrong:
        linear.load_state_dict(state)
    assert str(wrong.value).count("size mismatch") == str(wrong.value).count("for basic_ops.0.weight") == 1
    with pytest.raises(RuntimeError) as wrong:
        ops.Linear(4, 8, bias=False).load_state_dict(linear.state_dict())
    assert str(wrong.value).endswith('in state_dict: "basic_ops.1.bias", "basic_ops.1._extra_state". ')


@pytest.mark.check
def test_moving_keeps_the_aliases():
    linear = ops.Linear(4, 8)
    for moved in (linear.bfloat16(), linear.to(torch.float32), copy.deepcopy(linear), linear.to_empty(device="cpu")):
        assert moved.weight is moved.basic_ops[0].weight
        assert moved.bias is moved.basic_ops[1].bias
    meta = ops.Linear(4, 8, device="meta").to_empty(device="cpu")
    assert meta.weight is meta.basic_ops[0].weight
    assert meta.weight.device.type == "cpu"


@pytest.mark.check
def test_two_quantized_linears_under_every_recipe():
    """TE refuses Linear -> Linear except under delayed scaling: it can't emit the quantized output."""
    import fuser
    from fuser import recipe

    kinds = (
        recipe.DelayedScaling,
        recipe.Float8CurrentScaling,
        recipe.Float8BlockScaling,
        recipe.MXFP8BlockScaling,
        recipe.NVFP4BlockScaling,
    )
    for kind in kinds:
        torch.manual_seed(0)
        model = ops.Sequential(ops.Linear(128, 128), ops.Linear(128, 128)).bfloat16()
        x = torch.randn(128, 128, dtype=torch.bfloat16, requires_grad=True)
        with fuser.autocast(recipe=kind()):
            y = model(x)
        y.float().square().sum().backward()
        reference = copy.deepcopy(model).double()
        x64 = x.detach().double().requires_grad_()
        y64 = expected(expected(x64, reference[0]), reference[1])
        y64.square().sum().backward()
        tolerance = 0.35 if kind is recipe.NVFP4BlockScaling else 0.12
        for tested, wanted in ((y, y64), (x.grad, x64.grad), (model[0].weight.grad, reference[0].weight.grad)):
            error = (tested.double() - wanted).norm() / wanted.norm()
            assert error < tolerance, (kind.__name__, error)


CASTS = {
    "half": lambda module: module.half(),
    "bfloat16": lambda module: module.bfloat16(),
    "float": lambda module: module.float(),
    "to": lambda module: module.to(torch.bfloat16),
}


@pytest.mark.check
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("wrap", [lambda op: op, ops.Sequential, torch.nn.Sequential], ids=["alone", "ops", "torch"])
@pytest.mark.parametrize("kind", [recipe.DelayedScaling, recipe.Float8CurrentScaling, recipe.MXFP8BlockScaling])
def test_casts_keep_codes_and_scales_of_a_quantized_weight(kind, wrap, cast):
    """Although the weight has two names; also where the scale of a new cast would differ (delayed scaling)."""
    torch.manual_seed(0)
    with fuser.quantized_model_init(recipe=kind()):
        linear = ops.Linear(32, 32)
    with fuser.autocast(recipe=kind()):
        linear(torch.randn(32, 32))
    weight, before = linear.weight, linear.weight.detach().clone()
    for _ in range(2):
        CASTS[cast](wrap(linear))
        assert linear.weight is weight and linear.basic_ops[0].weight is weight
        assert weight.dtype == linear.bias.dtype == getattr(torch, {"to": "bfloat16"}.get(cast, cast))
        for name, tensor in before.buffers.tensors.items():
            assert torch.equal(weight.buffers.tensors[name], tensor), name


@pytest.mark.check
def test_each_parameter_is_converted_once():
    """The aliases are not parameters to convert, with `recurse=False` neither."""
    linear = ops.Linear(4, 4)
    linear.register_parameter("extra", torch.nn.Parameter(torch.ones(2)))
    for recurse in (True, False):
        seen = []
        linear._apply(lambda tensor, seen=seen: (seen.append(tensor.shape), tensor)[1], recurse=recurse)
        assert sorted(seen) == [(2,), (4,), (4, 4)]
        assert sorted(name for name, _ in linear.named_parameters(recurse=False)) == ["bias", "extra", "weight"]
    linear.to_empty(device="meta", recurse=False)
    assert {p.device.type for p in linear.parameters()} == {"meta"}
    assert linear.weight is linear.basic_ops[0].weight
