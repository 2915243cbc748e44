"""Tracers: what torch.export records, and what torch.jit and torch.fx are told. torch.compile is in test_compile.py."""

import copy
import io
import operator

import pytest
import torch

import fuser
from fuser import ops, recipe, tracing
from refops.activations import ACTIVATIONS

pytestmark = [
    pytest.mark.check,
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),  # torch.export uses what it deprecates
]


def skip():
    """A residual branch whose sum is made in place."""
    make = ops.MakeExtraOutput().set_extra_output_channel(0, "skip", output_to_caller=False)
    return make, ops.AddExtraInput(in_place=True).set_extra_input_channel(0, "skip")


def residual():
    make, add = skip()
    return ops.Sequential(make, ops.RMSNorm(8), ops.Linear(8, 8), add)


def with_hook():
    model = ops.Sequential(ops.Linear(8, 8), ops.SiLU())
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    return model


def quantized_weight():
    with fuser.quantized_model_init(recipe=recipe.MXFP8BlockScaling()):
        return ops.Sequential(ops.Linear(32, 32))


class Recomputed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = ops.Sequential(ops.Linear(8, 8), ops.GELU())

    def forward(self, x):
        return fuser.checkpoint(self.model, x) + fuser.functional.gelu(x)


X = torch.linspace(-3, 3, 32).reshape(4, 8)
MODELS = {
    "pipeline": (lambda: ops.Sequential(ops.LayerNorm(8), ops.Linear(8, 16), ops.SwiGLU(), ops.Linear(8, 8)), (X,)),
    "bfloat16": (lambda: ops.Sequential(ops.Linear(8, 8), ops.GELU()).bfloat16(), (X.bfloat16(),)),
    "Linear": (lambda: ops.Linear(8, 8), (X,)),
    "no bias": (lambda: ops.Linear(8, 8, bias=False), (X,)),
    "other modules": (
        lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), ops.Sequential(ops.ReLU(), ops.Bias(8))),
        (X,),
    ),
    "residual": (residual, (X,)),
    "extra tensors": (lambda: ops.Sequential(ops.MakeExtraOutput(), ops.SiLU(), ops.AddExtraInput()), (X, X + 1)),
    "in place": (lambda: ops.Sequential(ops.Linear(8, 8), ops.AddExtraInput(in_place=True)), (X, X + 1)),
    "hooks": (with_hook, (X,)),
    "interleaved": (lambda: ops.SwiGLU(glu_interleave_size=2), (X,)),
    "scaled, interleaved": (lambda: ops.ScaledSwiGLU(32), (torch.linspace(-3, 3, 256).reshape(2, 128), X[:2, 0])),
    "structure": (lambda: ops.Sequential(ops.Reshape((2, 16)), ops.ConstantScale(0.5), ops.L2Normalization()), (X,)),
    "nothing": (lambda: ops.Sequential(ops.Identity(), ops.Dropout(0.5), ops.Quantize()).eval(), (X,)),
    "quantized weight": (quantized_weight, (torch.linspace(-3, 3, 64).reshape(2, 32),)),
    "recomputed": (Recomputed, (X,)),
}
MODELS |= {row.op: (getattr(ops, row.op), (X,)) for row in ACTIVATIONS.values()}


def tensors(result):
    return result if isinstance(result, tuple) else (result,)


def fresh(inputs):
    return tuple(tensor.clone() for tensor in inputs)


@pytest.mark.parametrize("name", MODELS)
def test_export(name):
    """Also of a model that has not run yet, which then runs; also through a file and of a copy."""
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model = make()
    program = torch.export.export(model, fresh(inputs))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    expected = tensors(model(*fresh(inputs)))
    assert any(y.requires_grad for y in expected) == any(p.requires_grad for p in model.parameters())
    for exported in (program, torch.export.load(file), copy.deepcopy(program)):
        for wanted, y in zip(expected, tensors(exported.module()(*fresh(inputs))), strict=True):
            assert y.dtype is wanted.dtype and not y.requires_grad
            torch.testing.assert_close(y, wanted, rtol=1e-6 if y.dtype is torch.float32 else 1e-2, atol=1e-6)
    called = {node.target for node in program.graph.nodes if node.op == "call_function"} - {operator.getitem}
    assert all(str(target).startswith("aten.") for target in called), called


def test_export_with_a_dynamic_size():
    model = ops.Sequential(ops.LayerNorm(8), ops.Linear(8, 16), ops.SwiGLU())
    program = torch.export.export(model, (X,), dynamic_shapes=({0: torch.export.Dim("rows")},))
    x = torch.randn(7, 8)
    torch.testing.assert_close(program.module()(x), model(x).detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_export_of_dropout_in_training(dtype):
    x = torch.ones(64, 64, dtype=dtype)
    y = torch.export.export(ops.Dropout(0.5), (x,)).module()(x)
    assert set(y.unique().tolist()) == {0, 2} and 0.4 < (y == 0).double().mean() < 0.6


@pytest.mark.parametrize("own", [recipe.DelayedScaling(), recipe.MXFP8BlockScaling()], ids=["delayed", "mxfp8"])
def test_export_under_a_recipe_is_refused_and_leaves_nothing(own):
    torch.manual_seed(0)
    model = ops.Sequential(ops.Linear(32, 32), ops.GELU())
    untouched, x = copy.deepcopy(model), torch.randn(32, 32)
    with fuser.autocast(recipe=own):
        with pytest.raises(RuntimeError, match=rf"under a recipe, {type(own).__name__}.* outside of fuser.autocast"):
            torch.export.export(model, (x,))
        assert torch.equal(model(x), untouched(x))


class Function(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("activation_grad", lambda x: fuser.functional.dgelu(x, x)),
        ("quantize", lambda x: fuser.MXFP8Quantizer(fuser.DType.kFloat8E4M3)(x).dequantize()),
        ("activation_quantize", lambda x: fuser.functional.gelu(x, fuser.MXFP8Quantizer(fuser.DType.kFloat8E4M3))),
    ],
)
def test_export_of_casts_and_gradients_is_refused(name, function):
    with pytest.raises(RuntimeError, match=rf"torch.export can't record {name}: .* without a quantizer"):
        torch.export.export(Function(function), (torch.ones(32, 32),))


def test_export_of_groups_is_refused():
    model = ops.Sequential(ops.GroupedLinear(2, 8, 8))
    with pytest.raises(RuntimeError, match=r"can't record GroupedLinear: .* as ops\.Linear"):
        torch.export.export(model, (X, torch.tensor([1, 3])))


def test_export_of_deferred_parameters_is_refused():
    model = ops.Sequential(ops.Linear(8, 8, device="meta"))
    with pytest.raises(RuntimeError, match=r"initialization of BasicLinear, .* meta device: call the model"):
        torch.export.export(model, (X,))
    expected = model(X)
    assert torch.equal(torch.export.export(model, (X,)).module()(X), expected)


def test_strict_export_names_the_way():
    model = ops.Sequential(ops.Linear(8, 8))
    for _ in range(2):  # the first time, and after a call
        with pytest.raises(Exception, match="use strict=False"):
            torch.export.export(model, (X,), strict=True)
        model(X)


REFUSED = {
    "Sequential": lambda: ops.Sequential(ops.Linear(8, 8), ops.GELU()),
    "Linear": lambda: ops.Linear(8, 8),
    "GELU": ops.GELU,
    "torch.nn": lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), ops.GELU()),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_torch_jit_names_the_way(name):
    with pytest.raises(RuntimeError, match=r"torch\.jit\.script can't compile .*torch\.export\.export"):
        torch.jit.script(REFUSED[name]())
    with pytest.raises(RuntimeError, match=r"torch\.jit\.trace .* as constants: use torch\.export\.export"):
        torch.jit.trace(REFUSED[name](), (X,))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torch_jit_refuses_functions():
    with pytest.raises(RuntimeError, match=r"torch\.jit\.trace would keep the results of activation as constants"):
        torch.jit.trace(fuser.functional.gelu, (X,))


class Leaves(torch.fx.Tracer):
    def is_leaf_module(self, module, name):
        return isinstance(module, ops.Sequential | ops.FusibleOperation) or super().is_leaf_module(module, name)


@pytest.mark.parametrize("name", REFUSED)
def test_torch_fx_names_the_way(name):
    model = REFUSED[name]()
    with pytest.raises(TypeError, match=r"torch\.fx\.symbolic_trace can't trace \w+: make it a leaf"):
        torch.fx.symbolic_trace(model)
    outer = torch.nn.Sequential(model, torch.nn.ReLU())
    traced = torch.fx.GraphModule(outer, Leaves().trace(outer))
    assert torch.equal(traced(X), outer(X))


def test_a_compiled_call_runs_outside_also_from_a_frame_that_dynamo_left_alone(monkeypatch):
    """Past its limit of variants dynamo runs a frame as it is, in which nothing is being compiled."""
    called = []
    left_alone = lambda function, *args: called.append(function(*args))  # noqa: E731
    monkeypatch.setattr(tracing, "_uncompiled", {"kernels": left_alone})
    tracing.outside_compile(len, "abc", reason="kernels")
    assert called == [3]
