"""torch.compile: pipelines as one call in its graphs, with the bits, gradients and state of eager calls."""

import contextlib
import copy
import dataclasses
import gc
import pickle
import threading
import weakref

import pytest
import torch
import torch.utils.checkpoint
from torch._dynamo.testing import CompileCounterWithBackend

import fuser
import refops
from fuser import functional, operators, ops, recipe, tracing
from fuser.custom_recipes.quantizer_factory_zoo import nvfp4_row_scaled_fwd_high_precision_bwd_factory
from fuser.quantization import FP8GlobalStateManager as Manager
from fuser.quantization.quantizer import Quantizer
from tiers import sampled

if tracing.OLD_TORCH:
    pytest.skip(tracing.OLD_TORCH, allow_module_level=True)

# torch.compile hides this warning of its own, which the test settings turn into an error first.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]

FLOOR = refops.MXFP8Scaling(refops.E4M3, scale_rounding="floor")
RECIPES = {
    "delayed": recipe.DelayedScaling,
    "none": lambda: None,
    "current": recipe.Float8CurrentScaling,
    "block": recipe.Float8BlockScaling,
    "nvfp4": recipe.NVFP4BlockScaling,
    "mxfp8": recipe.MXFP8BlockScaling,
    "own scaling": lambda: recipe.BlockScaledRecipe(FLOOR),
    "custom": lambda: recipe.CustomRecipe(qfactory=nvfp4_row_scaled_fwd_high_precision_bwd_factory),
    "high precision backward": lambda: recipe.MXFP8BlockScaling(backward_override="high_precision"),
}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def pipeline():
    torch.manual_seed(0)
    return ops.Sequential(ops.RMSNorm(128), ops.Linear(128, 256), ops.SwiGLU(), ops.Linear(128, 128), ops.Bias(128))


def compiled(function, backend="aot_eager"):
    return torch.compile(function, fullgraph=True, backend=backend)


def under(own, model):
    """The model with its autocast, as one function."""

    def run(x, *extra):
        with fuser.autocast(enabled=own is not None, recipe=own):
            return model(x * 1.0, *extra)

    return run


def leaf(*shape, seed=1, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def results(function, model, *inputs, steps=1):
    """Outputs and gradients of some steps, and the delayed state after them."""
    torch.manual_seed(2)
    made = []
    for _ in range(steps):
        outputs = function(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        loss = sum(y.float().square().sum() for y in outputs)
        made += [*outputs, *torch.autograd.grad(loss, [*inputs, *model.parameters()])]
    return [*made, *state_of(model)]


def state_of(model):
    metas = [meta for op in model.modules() for meta in (getattr(op, "_fp8_metas", None) or {}).values() if meta]
    states = [value for meta in metas for name, value in meta.items() if name.startswith("scaling_")]
    delayed = [state.delayed_state for state in states if state.delayed_state is not None]
    return [tensor.clone() for state in delayed for tensor in (state.scale, state.amax_history)]


def same(ours, theirs):
    return len(ours) == len(theirs) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)
    )


# --- bits ---------------------------------------------------------------------------------------------


def assert_like_eager(own, backend, *, inside, dtype=torch.float32):
    expected, model = pipeline().to(dtype), pipeline().to(dtype)
    function = compiled(under(own, model), backend) if inside else under(own, compiled(model, backend))
    wanted = results(under(own, expected), expected, leaf(128, 128, dtype=dtype), steps=3)
    assert same(results(function, model, leaf(128, 128, dtype=dtype), steps=3), wanted)
    assert len(state_of(model)) == (8 if own is not None and own.delayed() else 0)


@sampled("name", RECIPES, 5, in_all=1)
def test_bits_gradients_and_state_after_three_steps(name):
    assert_like_eager(RECIPES[name](), "aot_eager", inside=True)


@sampled("name", ["delayed", "mxfp8"], 2, in_all=1)
def test_autocast_around_the_compiled_model(name):
    assert_like_eager(RECIPES[name](), "aot_eager", inside=False, dtype=torch.bfloat16)


@pytest.mark.full
@pytest.mark.parametrize("name", ["delayed", "nvfp4"])
def test_dynamo_alone(name):
    assert_like_eager(RECIPES[name](), "eager", inside=True)


@pytest.mark.full
@pytest.mark.parametrize("name", ["none", "delayed", "nvfp4"])
def test_inductor(name):
    assert_like_eager(RECIPES[name](), "inductor", inside=True)


class Mixed(torch.nn.Module):
    """Operations between plain modules, and called by themselves."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(64, 64)
        self.ops = ops.Sequential(ops.LayerNorm(64), ops.Linear(64, 64), torch.nn.Tanh(), ops.GELU(), ops.Dropout(0.3))
        self.alone, self.norm = ops.Linear(64, 64), ops.RMSNorm(64)

    def forward(self, x):
        return self.norm(self.alone(torch.relu(self.ops(self.first(x))))) + self.ops(x)


def residual(in_place):
    make = ops.MakeExtraOutput().set_extra_output_channel(0, "skip", output_to_caller=False)
    add = ops.AddExtraInput(in_place=in_place).set_extra_input_channel(0, "skip")
    return ops.Sequential(ops.Linear(64, 64), make, ops.RMSNorm(64), ops.Linear(64, 64), add)


def extra_tensors(in_place):
    return ops.Sequential(ops.MakeExtraOutput(), ops.SiLU(), ops.AddExtraInput(in_place=in_place), ops.Linear(64, 32))


MODELS = {
    "plain modules": (Mixed, 1),
    "residual": (lambda: residual(False), 1),
    "residual in place": (lambda: residual(True), 1),
    "extra tensors": (lambda: extra_tensors(False), 2),
    "extra tensors in place": (lambda: extra_tensors(True), 2),
    "views": (lambda: ops.Sequential(ops.Identity(), ops.Reshape((-1, 32)), ops.Bias(32)), 1),
    "nothing": (lambda: ops.Sequential(ops.Identity(), ops.Dropout(0.5)).eval(), 1),
    "scaled": (lambda: ops.Sequential(ops.ScaledSwiGLU(), ops.Linear(32, 32)), (64,)),
    "cached input": (lambda: ops.Sequential(ops.Linear(64, 64), ops.GELU(cache_quantized_input=True)), 1),
    "quantize": (lambda: ops.Sequential(ops.Quantize(), ops.Linear(64, 64), ops.SReLU(), ops.Bias(64)), 1),
}


@sampled("own", [recipe.MXFP8BlockScaling(), None], 2, in_all=1, ids=["mxfp8", "none"])
@sampled("name", MODELS, 4, in_all=1)
def test_models(name, own):
    make, count = MODELS[name]
    torch.manual_seed(0)
    expected = make()
    model = copy.deepcopy(expected)
    inputs = [leaf(64, 64)]
    inputs += [leaf(*count, seed=3)] if isinstance(count, tuple) else [leaf(64, 64, seed=3)] * (count - 1)

    def run(module):
        return under(own, lambda x, *extra: module(x, *(tensor * 1.0 for tensor in extra)))

    assert same(results(compiled(run(model)), model, *inputs), results(run(expected), expected, *inputs))


def test_random_numbers_are_drawn_at_every_call():
    """Two equal calls in one graph are two calls, as their random numbers are."""
    model = ops.Sequential(ops.Linear(64, 64), ops.Dropout(0.3), ops.Linear(64, 64)).bfloat16()
    twice = under(recipe.NVFP4BlockScaling(), lambda x: model(x) - model(x))
    wanted = results(twice, model, leaf(64, 64, dtype=torch.bfloat16))
    assert wanted[0].abs().sum() > 0
    assert same(results(compiled(twice), model, leaf(64, 64, dtype=torch.bfloat16)), wanted)


def test_torch_autocast():
    model = pipeline()
    seen = []
    for function in (model, compiled(model)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            seen.append(results(function, model, leaf(64, 128)))
    assert seen[0][0].dtype is torch.bfloat16 and same(*seen)


@pytest.mark.parametrize("fires_hooks", [False, True])
def test_main_grad(fires_hooks):
    seen = []
    for compile_it in (False, True):
        torch.manual_seed(0)
        model = ops.Sequential(ops.Linear(64, 64, accumulate_into_main_grad=True), ops.GELU())
        weight = model[0].weight
        weight.main_grad = torch.ones(64, 64)
        if fires_hooks:
            weight.grad_added_to_main_grad = False
        function = compiled(model) if compile_it else model
        x = leaf(32, 64)
        for _ in range(2):
            function(x).square().sum().backward()
        assert (weight.grad is None) != fires_hooks
        seen.append([weight.main_grad, x.grad, model[0].bias.grad])
        assert not fires_hooks or weight.grad_added_to_main_grad
    assert same(*seen)


@pytest.mark.parametrize("way", ["scope", "recipe"])
def test_products_of_the_card_that_is_in_force(way):
    """One compiled function under several cards; its backward pass, outside of the scope, has that of its forward."""
    expected, model = pipeline(), pipeline()
    seen = []
    for card in ("hopper", "float32", "hopper"):
        own, made = recipe.Float8CurrentScaling(products=card if way == "recipe" else None), []
        for of, function in ((expected, expected), (model, compiled(model))):
            x = leaf(128, 128)
            with contextlib.ExitStack() as stack:
                if way == "scope":
                    stack.enter_context(fuser.products(card))
                y = under(own, function)(x)
            made.append([y, *torch.autograd.grad(y.square().sum(), [x, *of.parameters()])])
        assert same(*made)
        seen.append(made[0])
    assert same(seen[0], seen[2]) and not any(map(torch.equal, seen[0], seen[1]))


@pytest.mark.full
def test_products_of_a_scope_inside():
    """As under a scope of a backend: the graph ends before it."""
    model = pipeline()

    def run(x):
        with fuser.products("hopper"):
            return under(recipe.Float8CurrentScaling(), model)(x)

    x = leaf(128, 128)
    assert torch.equal(torch.compile(run, backend="eager")(x), run(x))


# --- what is kept for backward ------------------------------------------------------------------------


@sampled("name", ["delayed", "mxfp8"], 2, in_all=1)
def test_several_forwards_before_a_backward_and_a_retained_graph(name):
    own, seen = RECIPES[name](), []
    for compile_it in (False, True):
        model = pipeline()
        function = under(own, compiled(model) if compile_it else model)
        xs = [(leaf(32, 128) * i).detach().requires_grad_() for i in (1, 2, 3)]
        ys = [function(x) for x in xs]
        made = list(ys)
        for x, y in ((xs[2], ys[2]), (xs[0], ys[0])):  # of the second one no backward is run
            for retain in (True, False):
                made += torch.autograd.grad(y.square().sum(), [x, *model.parameters()], retain_graph=retain)
        seen.append([*made, *state_of(model)])
    assert same(*seen)


def saved_bytes(function, x):
    """Bytes of the tensors that autograd keeps for a call, other than `x` and parameters."""
    kept = {}

    def pack(tensor):
        if tensor is not x and not isinstance(tensor, torch.nn.Parameter):
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = function(x)
    return sum(kept.values()), y


@sampled("name", ["mxfp8", "none", "nvfp4"], 3, in_all=1)
def test_autograd_sees_what_is_kept(name):
    """So it can be offloaded, and is freed with the graph's other tensors: as many bytes as eager calls keep."""
    model, x = pipeline(), leaf(64, 128)
    (ours, y), (theirs, _) = (saved_bytes(under(RECIPES[name](), f), x) for f in (compiled(model), model))
    assert ours == theirs > 64 * 128
    y.sum().backward()


def test_nothing_is_left_of_calls(quick_collections):
    def alive():
        gc.collect()
        return sum(type(one) is operators.Saved for one in gc.get_objects())

    function = compiled(pipeline())
    function(leaf(64, 128)).sum().backward()
    before = alive()
    for _ in range(3):
        function(leaf(64, 128))
        function(leaf(64, 128)).sum().backward()
    assert alive() == before


def test_a_parameter_that_changes_before_backward_is_an_error():
    model = ops.Sequential(ops.RMSNorm(64), ops.Linear(64, 64))
    y = compiled(model)(leaf(32, 64))
    with torch.no_grad():
        model[1].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_parameter_that_changes_in_the_compiled_function_is_an_error():
    model = ops.Sequential(ops.Bias(8))

    def function(x):
        with torch.no_grad():
            model[0].bias.add_(1)
        return model(x)

    with pytest.raises(RuntimeError, match=r"a parameter of shape .* was changed in the compiled function"):
        compiled(function)(leaf(4, 8))


@sampled("reentrant", [False, True], 2, in_all=1)
def test_checkpoint_around_the_compiled_model(reentrant):
    own, expected, model = recipe.MXFP8BlockScaling(), pipeline(), pipeline()

    def recomputed(function):
        return lambda x: torch.utils.checkpoint.checkpoint(function, x, use_reentrant=reentrant)

    wanted = results(under(own, expected), expected, leaf(64, 128)) if not reentrant else None
    function = recomputed(compiled(under(own, model)))
    if reentrant:  # takes no torch.autograd.grad
        seen = []
        for one in (under(own, expected), function):
            x = leaf(64, 128)
            one(x).square().sum().backward()
            seen.append([x.grad])
        assert same(*seen)
    else:
        assert same(results(function, model, leaf(64, 128)), wanted)


# --- when code is traced again ------------------------------------------------------------------------


@sampled("inside", [True, False], 2, in_all=1)
def test_recompiles(inside):
    counter = CompileCounterWithBackend("aot_eager")
    model = pipeline()

    def run(x, own):
        with fuser.autocast(recipe=own):
            return model(x)

    function = torch.compile(run if inside else model, fullgraph=True, backend=counter)

    def compiles(rows=64, own=None, grad=True):
        before, own = counter.frame_count, own or recipe.MXFP8BlockScaling()
        with torch.set_grad_enabled(grad):
            if inside:
                y = function(leaf(rows, 128), own)
            else:
                with fuser.autocast(recipe=own):
                    y = function(leaf(rows, 128))
        if grad:
            y.sum().backward()
        return counter.frame_count - before

    assert compiles() == 1
    assert compiles() == 0
    assert [compiles(rows) for rows in (32, 96, 512)] == [1, 0, 0]
    assert compiles(own=recipe.MXFP8BlockScaling()) == 0  # another object of the same values
    assert compiles(own=recipe.Float8CurrentScaling()) == 1
    assert compiles(own=recipe.Float8CurrentScaling(use_power_2_scales=True)) == 1
    assert compiles() == 0
    model.eval()
    assert compiles() == 1
    model.train()
    assert compiles() == 0
    assert compiles(grad=False) == 1
    model[2].cache_quantized_input = True
    assert compiles() == 1
    model[2] = ops.SwiGLU()
    assert compiles() == 0


def test_settings_and_fusions_are_looked_at():
    model, x = ops.Sequential(ops.Linear(64, 64), ops.Reshape((-1, 32))), leaf(8, 64)
    function = compiled(model)
    assert function(x).shape == (16, 32)
    model[1]._shape = (4, -1)
    assert same(results(function, model, x), results(model, model, x)) and function(x).shape == (4, 128)
    with fuser.fusions(only=True):
        assert same(results(function, model, x), results(model, model, x))


@sampled("make", [pipeline, lambda: ops.Linear(128, 128)], 2, in_all=1, ids=["Sequential", "Linear"])
@sampled("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], 2, in_all=1, ids=["copy", "pickle"])
def test_copies_are_compiled_for_themselves(make, again):
    model = make()
    compiled(model)(leaf(32, 128))
    other = again(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    assert same(results(compiled(other), other, leaf(32, 128)), results(other, other, leaf(32, 128)))
    assert not torch.equal(compiled(other)(leaf(32, 128)), compiled(model)(leaf(32, 128)))


def test_explain_of_a_compiled_model():
    explained = fuser.explain(compiled(pipeline()), leaf(32, 128), recipe=recipe.MXFP8BlockScaling(), quiet=True)
    assert "saved for backward" in str(explained)


@pytest.mark.full
def test_layers_that_are_alike_share_code():
    counter = CompileCounterWithBackend("aot_eager")
    layers = [pipeline() for _ in range(4)]
    expected, x = [copy.deepcopy(layer) for layer in layers], leaf(32, 128)
    with torch.no_grad():
        for layer in expected[1:]:
            layer[1].weight.mul_(2)
        for layer, other in zip(layers, expected, strict=True):
            layer.load_state_dict(other.state_dict())
    for layer in layers:
        layer.compile(fullgraph=True, backend=counter)
    y = wanted = x * 1.0
    for layer, other in zip(layers, expected, strict=True):
        y, wanted = layer(y), other(wanted)
    assert torch.equal(y, wanted) and counter.frame_count == 1


def test_a_recipe_of_compiled_code_keeps_its_values():
    own, model = recipe.MXFP8BlockScaling(), pipeline()
    under(own, compiled(model))(leaf(32, 128))
    with pytest.raises(RuntimeError, match=r"margin can't be changed: .* dataclasses.replace\(recipe, margin="):
        own.margin = 3
    other = dataclasses.replace(own, margin=3)
    other.margin = 4
    copied = copy.deepcopy(own)
    copied.margin = 5
    assert own == recipe.MXFP8BlockScaling() != other


# --- autocast in compiled code ------------------------------------------------------------------------


def settings():
    state = Manager.quantization_state
    return state.fp8_enabled, state.fp8_recipe, state.autocast_depth, state.is_first_fp8_module


@pytest.mark.full
def test_nested_autocast():
    def function(model, other, x):
        with fuser.autocast(recipe=recipe.MXFP8BlockScaling()):
            x = model(x)
            with fuser.autocast(enabled=False):
                x = other(x)
            with fuser.autocast(recipe=recipe.DelayedScaling()):
                x = model(x)
        return other(x)

    seen, before = [], settings()
    for compile_it in (False, True):
        one, other = pipeline(), pipeline()
        step = lambda x, one=one, other=other: function(one, other, x)  # noqa: E731
        seen.append(results(compiled(step) if compile_it else step, torch.nn.ModuleList([one, other]), leaf(64, 128)))
    assert same(*seen) and settings()[:3] == before[:3]


def test_an_error_leaves_the_settings():
    model, before = pipeline(), settings()

    def fails_after(x):
        with fuser.autocast(recipe=recipe.MXFP8BlockScaling()):
            model(x)
            raise ValueError("own")

    with pytest.raises(ValueError, match="own"):
        torch.compile(fails_after, backend="aot_eager")(leaf(32, 128))
    assert settings()[:3] == before[:3]
    with pytest.raises(Exception, match="MXFP8 needs M % 32 == 0"):
        compiled(under(recipe.MXFP8BlockScaling(), model))(leaf(31, 128))
    assert settings()[:3] == before[:3]
    assert torch.isfinite(under(recipe.MXFP8BlockScaling(), model)(leaf(32, 128))).all()


# --- what no graph has --------------------------------------------------------------------------------


class Doubled(ops.BasicOperation):
    def op_forward(self, ctx, input_, **quantizers):
        return input_ * 2

    def op_backward(self, ctx, grad_output):
        return grad_output * 2


class InGraphs(Doubled):
    def graph_obstacle(self):
        return ""


def with_hook():
    model = ops.Sequential(ops.Linear(64, 64), ops.SiLU())
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    return model


def quantized():
    with fuser.quantized_model_init(recipe=recipe.MXFP8BlockScaling()):
        return ops.Sequential(ops.Linear(64, 64))


class Recomputed(torch.nn.Module):
    def __init__(self, checkpoint):
        super().__init__()
        self.ops, self.checkpoint = ops.Sequential(ops.Linear(64, 64), ops.GELU()), checkpoint

    def forward(self, x):
        return self.checkpoint(self.ops, x * 1.0, use_reentrant=False)


SPLITS = torch.tensor([32, 32])
REFUSED = {
    "has hooks": (with_hook, ()),
    "BasicLinear has a quantized parameter": (quantized, ()),
    "BasicLinear makes its deferred parameters": (lambda: ops.Sequential(ops.Linear(64, 64, device="meta")), ()),
    "GroupedLinear reads the sizes": (lambda: ops.Sequential(ops.GroupedLinear(2, 64, 64)), (SPLITS,)),
    "Doubled is not an operation of fuser": (lambda: ops.Sequential(Doubled(), ops.GELU()), ()),
    "torch.utils.checkpoint would": (lambda: Recomputed(torch.utils.checkpoint.checkpoint), ()),
    "fuser.checkpoint calls its function": (lambda: Recomputed(fuser.checkpoint), ()),
}


@pytest.mark.filterwarnings("ignore")  # what torch says of side effects in what it checkpoints
@sampled("reason", REFUSED, 3, in_all=1)
def test_an_error_names_the_reason_and_without_fullgraph_the_call_stays_outside(reason):
    make, extra = REFUSED[reason]
    torch.manual_seed(0)
    expected = make()
    model, inputs = copy.deepcopy(expected), (leaf(64, 64), *extra)
    if reason != "BasicLinear makes its deferred parameters":
        with fuser.autocast(recipe=recipe.MXFP8BlockScaling()):
            wanted = expected(*inputs)
    with fuser.autocast(recipe=recipe.MXFP8BlockScaling()), pytest.raises(torch._dynamo.exc.Unsupported, match=reason):
        compiled(model)(*inputs)
    torch._dynamo.reset()
    with fuser.autocast(recipe=recipe.MXFP8BlockScaling()):
        y = torch.compile(model, backend="aot_eager")(*inputs)
        wanted = model(*inputs) if reason == "BasicLinear makes its deferred parameters" else wanted
    assert torch.equal(y, wanted)


@pytest.mark.parametrize(
    ("reason", "function"),
    [
        ("activation is done by kernels", lambda x: functional.gelu(x, fuser.MXFP8Quantizer(fuser.DType.kFloat8E4M3))),
        ("quantize is done by kernels", lambda x: fuser.MXFP8Quantizer(fuser.DType.kFloat8E4M3)(x)),
        ("returns a quantized tensor", under(recipe.MXFP8BlockScaling(), ops.Sequential(ops.Quantize()))),
    ],
)
def test_casts_are_in_no_graph(reason, function):
    with pytest.raises(torch._dynamo.exc.Unsupported, match=reason):
        compiled(function)(torch.ones(32, 32))


def test_keyword_arguments_are_in_no_graph():
    model = ops.Sequential(ops.GELU())
    with pytest.raises(torch._dynamo.exc.Unsupported, match="no keyword arguments of operations"):
        compiled(lambda x: model(x, op_kwargs={0: {"unknown": 1}}))(leaf(8, 64))


def test_an_operation_of_the_users():
    model = ops.Sequential(InGraphs(), ops.Linear(64, 64))
    assert same(results(compiled(model), model, leaf(8, 64)), results(model, model, leaf(8, 64)))


class OwnQuantizer(fuser.MXFP8Quantizer):
    pass


def own_quantizer(role):
    return OwnQuantizer(fuser.DType.kFloat8E4M3)


def test_quantizers_of_the_users():
    own, model = recipe.CustomRecipe(qfactory=own_quantizer), pipeline()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="quantizers of other classes than fuser's, OwnQuantizer"):
        compiled(under(own, model))(leaf(32, 128))


@pytest.mark.full
def test_an_older_torch_leaves_all_calls_outside(monkeypatch):
    for module in (operators, fuser.sequential):
        monkeypatch.setattr(module, "OLD_TORCH", "torch 2.8 lacks what it takes")
    own, expected, model = recipe.MXFP8BlockScaling(), pipeline(), pipeline()
    function = torch.compile(under(own, model), backend="aot_eager")
    wanted = results(under(own, expected), expected, leaf(32, 128), steps=2)
    assert same(results(function, model, leaf(32, 128), steps=2), wanted)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"torch 2\.8 lacks"):
        compiled(model)(leaf(32, 128))


# --- functions ----------------------------------------------------------------------------------------


def functions(x, scales):
    y, z = functional.gelu(x), functional.scaled_swiglu(x, scales)
    limited = functional.clamped_swiglu(x, None, limit=2.0)
    return (
        *(y, z, limited, functional.dswiglu(z, x), *functional.dbias_dgelu(y, x)),
        *functional.scaled_dswiglu(z, x, scales),
    )


@sampled("backend", ["aot_eager", "eager", "inductor"], 3, in_all=1)
def test_functions_without_a_quantizer_are_in_graphs(backend):
    x, scales = leaf(6, 64, dtype=torch.bfloat16), leaf(6, seed=3, dtype=torch.bfloat16)
    function = compiled(functions, backend)
    for rows in (6, 4, 3):
        made = function(x[:rows], scales[:rows])
        assert same(made, functions(x[:rows], scales[:rows])) and not any(y.requires_grad for y in made)


def test_numbers_that_change_between_calls():
    """torch.compile makes a number an argument of the graph where the second call has another."""

    def with_numbers(x, scales, limit, size):
        return functional.clamped_swiglu(x, limit=limit), functional.scaled_swiglu(x, scales, glu_interleave_size=size)

    x, scales, function = leaf(4, 128), leaf(4, seed=3), compiled(with_numbers)
    for limit, size in ((7.0, 64), (6.0, 32), (0.1, 0), (7.0, 32)):
        assert same(function(x, scales, limit, size), with_numbers(x, scales, limit, size))
    assert not torch.equal(function(x, scales, 0.1, 0)[0], function(x, scales, 7.0, 0)[0])


def test_tensors_by_keyword():
    def by_keyword(x):
        y = fuser.dispatch.activation(name="silu", x=x)
        return y, fuser.dispatch.activation_grad("silu", x=x, dy=y)

    x = leaf(4, 64).detach()
    y = fuser.dispatch.activation("silu", x)
    wanted = y, fuser.dispatch.activation_grad("silu", y, x)
    assert same(compiled(by_keyword)(x), wanted) and same(by_keyword(x), wanted)


SCALINGS = {
    "delayed": refops.DelayedScaling(refops.E4M3, 2.0),
    "current": refops.CurrentScaling(refops.E5M2),
    "block": refops.BlockScaling(refops.E4M3, block_dim=2),
    "mxfp8": refops.MXFP8Scaling(refops.E4M3),
    "nvfp4": refops.NVFP4Scaling(rht=True),
    "rows": refops.NVFP4Scaling(row_scaled=True),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_shapes_without_elements_are_those_of_kernels(name):
    x, scaling = leaf(3, 32, 96, dtype=torch.bfloat16).detach(), SCALINGS[name]
    for rowwise, columnwise in ((True, True), (True, False), (False, True)):
        if name == "rows" and columnwise:
            continue
        calls = {
            "quantize": (x, scaling),
            "activation_quantize": ("gelu", x, scaling),
        }
        for function, args in calls.items():
            call = getattr(fuser.dispatch, function)
            made = call(*args, rowwise=rowwise, columnwise=columnwise)
            with tracing.rehearsal():
                empty = call(*args, rowwise=rowwise, columnwise=columnwise)
                values = fuser.dispatch.dequantize(empty, dtype=torch.float16)
            assert {n: (t.shape, t.dtype, t.stride()) for n, t in made.tensors.items()} == {
                n: (t.shape, t.dtype, t.stride()) for n, t in empty.tensors.items()
            }
            assert (empty.shape, empty.dtype) == (made.shape, made.dtype)
            assert values.shape == x.shape and values.dtype is torch.float16


def test_quantizers_rehearse_without_a_trace():
    """No amax is recorded, no random number drawn."""
    amax = torch.zeros(1)
    quantizers = [
        fuser.Float8Quantizer(torch.ones(1), amax, fuser.DType.kFloat8E4M3),
        fuser.NVFP4Quantizer(stochastic_rounding=True),
    ]
    before = torch.get_rng_state()
    with tracing.rehearsal():
        for quantizer in quantizers:
            assert isinstance(quantizer, Quantizer) and quantizer(torch.ones(32, 32)).shape == (32, 32)
    assert amax.item() == 0 and torch.equal(torch.get_rng_state(), before)
    quantizers[0](torch.ones(32, 32))
    assert amax.item() == 1


# --- what is left, and others meanwhile ---------------------------------------------------------------

OWNERS = {
    "operation": lambda: ops.Bias(32),
    "linear": lambda: ops.Linear(32, 32),
    "sequential": lambda: ops.Sequential(ops.Linear(32, 32), ops.GELU()),
    "converted": lambda: fuser.convert(
        torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)), recipe.MXFP8BlockScaling()
    ),
}


@sampled("name", OWNERS, 3, in_all=1)
def test_a_model_is_freed_without_a_collection_and_after_it_was_compiled(name, quick_collections):
    gc.disable()
    try:
        model = OWNERS[name]()
        parameter = weakref.ref(next(model.parameters()))
        del model
        assert parameter() is None
    finally:
        gc.enable()
    model = OWNERS[name]()
    parameter = weakref.ref(next(model.parameters()))
    compiled(model, "eager")(leaf(32, 32)).sum().backward()
    del model
    torch._dynamo.reset()
    gc.collect()
    assert parameter() is None


def test_threads_compute_while_another_one_compiles():
    model, found = ops.Linear(32, 32), []

    def slow(graph, inputs):
        thread = threading.Thread(target=lambda: found.append(model(leaf(32, 32)).requires_grad))
        thread.start()
        thread.join()
        return graph.forward

    torch.compile(lambda x: x + 1, backend=slow)(torch.ones(3))
    assert found == [True]


def test_double_backward_is_an_error():
    x = leaf(32, 32)
    y = compiled(ops.GELU(), "eager")(x)
    with pytest.raises(RuntimeError, match="Double backward"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_a_quantized_input_is_in_no_graph():
    q = fuser.MXFP8Quantizer(fuser.DType.kFloat8E4M3)(leaf(32, 32).detach())
    model = ops.BasicLinear(32, 32)
    with fuser.autocast(recipe=recipe.MXFP8BlockScaling()):
        assert torch.equal(torch.compile(model, backend="eager")(q), model(q))


def test_statistics_of_a_model_that_is_compiled_meanwhile():
    model = torch.nn.Sequential(ops.Linear(32, 32))
    model[0].compile(backend="aot_eager")
    with fuser.autocast(recipe=recipe.MXFP8BlockScaling()), fuser.statistics(model) as statistics:
        model(leaf(32, 32)).sum().backward()
    assert len(statistics.records) == 3
