"""The manager: fusing and fusing anew, routing of extra tensors, autograd, hooks."""

import copy
import dataclasses
import gc
import importlib.util
import itertools
import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import fuser
from fuser import fuser as fuser_module
from fuser import ops, recipe
from fuser.dispatch import VARIABLE, backend, current_backend
from fuser.fuser import OperationFuser, fusions, register_backward_fusion, register_forward_fusion
from fuser.op import BasicOperation, FusedOperation
from tiers import sampled


def plan(pairs):
    return [(type(op).__name__, indices) for op, indices in pairs]


def plans_of(module, *args, **kwargs):
    module(*args, **kwargs)
    (group,) = module._module_groups
    return plan(group._forward_ops), plan(group._backward_ops)


class Pair(FusedOperation):
    """Both passes of two `ConstantScale`s."""

    @property
    def factor(self):
        return self.basic_ops[0].scale * self.basic_ops[1].scale

    def fuser_forward(self, ctxs, input_, **kwargs):
        return input_ * self.factor, [(), ()]

    def fuser_backward(self, ctxs, grad_output, **kwargs):
        return grad_output * self.factor, [(), ()], [(), ()]


def fuse_scales(ops_, *, recipe=None):
    fused = []
    for op in ops_:
        if fused and isinstance(op, ops.ConstantScale) and isinstance(fused[-1], ops.ConstantScale):
            fused[-1] = Pair([fused[-1], op])
        else:
            fused.append(op)
    return fused


class TestObservedPlans:
    """Spec 5.8: plans that TE makes, without a recipe."""

    def linear(self, dtype=torch.bfloat16, **kwargs):
        return ops.Linear(8, 8, dtype=dtype, **kwargs)

    def x(self, dtype=torch.bfloat16):
        return torch.randn(4, 8, dtype=dtype, requires_grad=True)

    def test_linear_gelu(self):
        forward, backward = plans_of(ops.Sequential(self.linear(), ops.GELU()), self.x())
        assert forward == [("ForwardLinearBiasActivation", [0, 1]), ("GELU", [2])]
        assert backward == [("BasicLinear", [0]), ("Bias", [1]), ("GELU", [2])]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_linear_add_in_place(self, dtype):
        model = ops.Sequential(self.linear(dtype), ops.AddExtraInput(in_place=True))
        forward, _ = plans_of(model, self.x(dtype), torch.zeros(4, 8, dtype=dtype))
        assert forward == [("ForwardLinearBiasAdd", [0, 1, 2])]

    def test_linear_add(self):
        model = ops.Sequential(self.linear(), ops.AddExtraInput())
        forward, _ = plans_of(model, self.x(), self.x())
        assert forward == [("ForwardLinearBiasActivation", [0, 1]), ("AddExtraInput", [2])]

    def test_linear_scale_add(self):
        linear = self.linear(bias=False)
        model = ops.Sequential(linear, ops.ConstantScale(2.0), ops.AddExtraInput(in_place=True))
        forward, backward = plans_of(model, self.x(), torch.zeros(4, 8, dtype=torch.bfloat16))
        assert forward == [("ForwardLinearScaleAdd", [0, 1, 2])]
        assert backward == [("BackwardLinearScale", [0, 1]), ("AddExtraInput", [2])]

    def test_extra_rmsnorm_linear(self):
        model = ops.Sequential(ops.MakeExtraOutput(), ops.RMSNorm(8, dtype=torch.bfloat16), self.linear())
        _, backward = plans_of(model, self.x())
        assert backward == [("BackwardAddRMSNorm", [0, 1]), ("BasicLinear", [2]), ("Bias", [3])]

    def test_extra_in_place_linear_scale(self):
        model = ops.Sequential(ops.MakeExtraOutput(in_place=True), self.linear(bias=False), ops.ConstantScale(2.0))
        _, backward = plans_of(model, self.x())
        assert backward == [("BackwardLinearAdd", [0, 1]), ("ConstantScale", [2])]


class TestFusing:
    def test_joint_fusion_is_one_object_in_both_passes(self):
        fuser_ = OperationFuser([ops.ConstantScale(2.0), ops.ConstantScale(3.0)])
        x = torch.randn(5, requires_grad=True)
        with fusions(forward_backward=fuse_scales):
            fuser_(x).sum().backward()
            assert fuser_._forward_ops[0][0] is fuser_._backward_ops[0][0]
            assert plan(fuser_._forward_ops) == [("Pair", [0, 1])]
        assert torch.equal(x.grad, torch.full_like(x, 6.0))

    @pytest.mark.parametrize("kind", ["forward", "backward"])
    def test_fusions_of_one_pass(self, kind):
        fuser_ = OperationFuser([ops.Identity(), ops.ConstantScale(2.0), ops.ConstantScale(3.0)])
        x = torch.randn(5, requires_grad=True)
        with fusions(**{kind: fuse_scales}):
            y = fuser_(x)
            y.sum().backward()
        fused, plain = [("Identity", [0]), ("Pair", [1, 2])], [("Identity", [0])]
        plain += [("ConstantScale", [1]), ("ConstantScale", [2])]
        assert plan(fuser_._forward_ops) == (fused if kind == "forward" else plain)
        assert plan(fuser_._backward_ops) == (fused if kind == "backward" else plain)
        assert torch.equal(y, x * 6)
        assert torch.equal(x.grad, torch.full_like(x, 6.0))

    def test_functions_are_chained_and_get_the_recipe(self):
        seen = []

        def watch(ops_, *, recipe):
            seen.append(([type(op).__name__ for op in ops_], recipe))
            return ops_

        fuser_ = OperationFuser([ops.ConstantScale(2.0), ops.ConstantScale(3.0)])
        current = recipe.Float8CurrentScaling()
        with fusions(forward=[fuse_scales, watch], only=True), fuser.autocast(recipe=current):
            fuser_(torch.ones(2))
        assert seen == [(["Pair"], current)]

    def test_register_returns_the_function_and_orders(self):
        before = list(OperationFuser.forward_fusion_functions)
        try:

            @register_forward_fusion
            def last(ops_, *, recipe=None):
                return ops_

            def first(ops_, *, recipe=None):
                return ops_

            assert register_forward_fusion(first, prepend=True) is first
            assert [first, *before, last] == OperationFuser.forward_fusion_functions
        finally:
            OperationFuser.forward_fusion_functions[:] = before

        def backward(ops_, *, recipe=None):
            return ops_

        before = list(OperationFuser.backward_fusion_functions)
        try:
            assert register_backward_fusion(backward) is backward
            assert OperationFuser.backward_fusion_functions[-1] is backward
        finally:
            OperationFuser.backward_fusion_functions[:] = before

    def test_scope_ends(self):
        before = list(OperationFuser.forward_fusion_functions)
        with fusions(forward=fuse_scales, only=True):
            assert OperationFuser.forward_fusion_functions == [fuse_scales]
            assert OperationFuser.backward_fusion_functions == []
        assert before == OperationFuser.forward_fusion_functions
        handle = fusions(forward=[fuse_scales], prepend=True).register()
        assert [fuse_scales, *before] == OperationFuser.forward_fusion_functions
        with pytest.raises(RuntimeError, match="already"):
            handle.register()
        handle.remove()
        handle.remove()
        assert before == OperationFuser.forward_fusion_functions

    def test_new_fusions_reach_built_fusers(self):
        fuser_ = OperationFuser([ops.ConstantScale(2.0), ops.ConstantScale(3.0)])
        fuser_(torch.ones(2))
        with fusions(forward=fuse_scales):
            fuser_(torch.ones(2))
            assert plan(fuser_._forward_ops) == [("Pair", [0, 1])]
        fuser_(torch.ones(2))
        assert len(fuser_._forward_ops) == 2

    @pytest.mark.parametrize(
        "wrong", [lambda a: a[:1], lambda a: a[::-1], lambda a: [*a, a[0]], lambda a: [a[0], ops.ConstantScale(3.0)]]
    )
    def test_mismatch(self, wrong):
        fuser_ = OperationFuser([ops.Identity(), ops.ConstantScale(2.0)])
        with (
            fusions(forward=lambda ops_, *, recipe: wrong(ops_)),
            pytest.raises(
                RuntimeError, match=r"Found mismatch after fusing operations \(basic_ops=\['Identity', 'Cons"
            ),
        ):
            fuser_(torch.ones(2))


class TestOwnFuserForward:
    """A pipeline calls `op_forward` itself, unless an operation has a `fuser_forward` that does more."""

    @pytest.fixture
    def model(self):
        return ops.Sequential(ops.Bias(4), ops.ConstantScale(3.0))

    def test_of_a_class(self):
        class Twice(ops.Bias):
            def fuser_forward(self, ctxs, input_, **arguments):
                y, extra_outputs = super().fuser_forward(ctxs, input_, **arguments)
                return 2 * y, extra_outputs

        y = ops.Sequential(Twice(4), ops.ConstantScale(3.0))(torch.ones(2, 4))
        assert torch.equal(y, torch.full((2, 4), 6.0))

    def test_of_an_object(self, model):
        own = model[0].fuser_forward
        model[0].fuser_forward = lambda ctxs, input_, **arguments: own(ctxs, 2 * input_, **arguments)
        assert torch.equal(model(torch.ones(2, 4)), torch.full((2, 4), 6.0))

    def test_default_is_not_called(self, model, monkeypatch):
        y = model(torch.ones(2, 4))
        monkeypatch.setattr(BasicOperation, "fuser_forward", None)
        assert torch.equal(model(torch.ones(2, 4)), y)


def test_one_backend_for_a_call(monkeypatch):
    """A call reads the environment as it begins: what an operation changes is in force at the next."""
    seen = []

    class Changes(ops.Identity):
        def op_forward(self, ctx, input_, **quantizers):
            monkeypatch.setenv(VARIABLE, "reference")
            seen.append(current_backend())
            return super().op_forward(ctx, input_, **quantizers)

    model = ops.Sequential(ops.Bias(4), Changes())
    for _ in range(2):
        model(torch.ones(2, 4))
    assert seen == ["auto", "reference"]


class TestFusingAnew:
    """Exactly when something changed that can change a fusion or a quantizer."""

    @pytest.fixture
    def count(self):
        calls = []

        def counting(ops_, *, recipe=None):
            calls.append(recipe)
            return ops_

        with fusions(forward=counting):
            yield calls

    def test_not_without_a_change(self, count):
        model = ops.Sequential(ops.Linear(32, 32), ops.GELU())
        for _ in range(3):
            model(torch.randn(32, 32))
        assert len(count) == 1
        for _ in range(3):
            with fuser.autocast(recipe=recipe.DelayedScaling()):  # an equal recipe, not the same
                model(torch.randn(32, 32)).sum().backward()
        assert len(count) == 2

    def test_module_dtype(self):
        """TE keeps the plan of the first call."""
        model = ops.Sequential(ops.Linear(8, 8))
        assert plans_of(model, torch.ones(2, 8))[0] == [("BasicLinear", [0]), ("Bias", [1])]
        model.bfloat16()
        assert plans_of(model, torch.ones(2, 8).bfloat16())[0] == [("ForwardLinearBiasActivation", [0, 1])]

    def test_replaced_parameter(self, count):
        """TE gives the gradient to the old parameter."""
        model = ops.Sequential(ops.Bias(4))
        model(torch.ones(2, 4))
        old = model[0].bias
        model[0].bias = torch.nn.Parameter(torch.ones(4))
        y = model(torch.ones(2, 4))
        y.sum().backward()
        assert len(count) == 2
        assert old.grad is None
        assert torch.equal(model[0].bias.grad, torch.full((4,), 2.0))

    def test_after_a_fusion_that_raised(self):
        """The parameters that it was to fuse are no part of the next plan."""
        model = ops.Sequential(ops.Bias(4))
        model(torch.ones(2, 4))
        bias = model[0].bias
        model[0].bias = torch.nn.Parameter(torch.ones(4), requires_grad=False)

        def raising(ops_, *, recipe=None):
            raise RuntimeError("no fusion")

        with fusions(forward=raising), pytest.raises(RuntimeError, match="no fusion"):
            model(torch.ones(2, 4))
        model[0].bias = bias
        model(torch.ones(2, 4)).sum().backward()
        assert torch.equal(bias.grad, torch.full((4,), 2.0))

    def test_frozen_and_thawed(self, count):
        model = ops.Sequential(ops.Bias(4), ops.Bias(4))
        x = torch.ones(2, 4)
        model(x)
        model[0].bias.requires_grad_(False)
        model(x).sum().backward()
        assert len(count) == 2
        assert model._module_groups[0].first_op_requiring_backward == 1
        model[0].bias.requires_grad_(True)
        model(x).sum().backward()
        assert len(count) == 3
        assert model[0].bias.grad is not None

    def test_mode_and_grad(self, count):
        model = ops.Sequential(ops.Bias(4))
        model(torch.ones(2, 4))
        model.eval()
        model(torch.ones(2, 4))
        assert len(count) == 2
        with torch.no_grad():
            model(torch.ones(2, 4))
        assert len(count) == 3

    def test_recipe_values(self, count):
        model = ops.Sequential(ops.Quantize())
        x = torch.ones(32, 32)
        current = recipe.Float8CurrentScaling()
        for _ in range(2):
            with fuser.autocast(recipe=current):
                model(x)
        assert len(count) == 1
        current.use_power_2_scales = True
        with fuser.autocast(recipe=current):
            model(x)
        assert len(count) == 2
        assert model[0].get_quantizer("forward", 0).force_pow_2_scales

    def test_values_of_a_recipe_of_ones_own(self, count):
        """Whatever a field holds, and whether or not `==` of two recipes reads it."""

        @dataclasses.dataclass(repr=False, eq=False)
        class Recipe(recipe.MXFP8BlockScaling):
            lines: list = dataclasses.field(default_factory=list)
            hidden: int = dataclasses.field(default=0, compare=False)
            array: Any = None

        model, x, lines = ops.Sequential(ops.Quantize()), torch.ones(32, 32), [1]

        def calls(**settings):
            with fuser.autocast(recipe=Recipe(**settings)):
                model(x)
            return len(count)

        assert calls(lines=lines) == calls(lines=lines) == 1
        lines.append(2)
        assert calls(lines=lines) == calls(lines=[1, 2]) == 2
        assert calls(lines=lines, hidden=1) == 3
        assert calls(array=torch.ones(2)) == calls(array=torch.ones(2)) == 4
        assert calls(array=torch.zeros(2)) == 5

    def test_a_derived_field_of_a_kept_recipe(self, count):
        model, x, nvfp4 = ops.Sequential(ops.Quantize()), torch.ones(32, 32), recipe.NVFP4BlockScaling()
        for disable, fusings in ((False, 1), (True, 2), (True, 2)):
            nvfp4.disable_rht = disable
            with fuser.autocast(recipe=nvfp4):
                model(x)
            assert len(count) == fusings
            assert model[0].get_quantizer("forward", 0).with_rht != disable

    def test_quantizer_that_an_operation_chooses(self):
        """What an operation returns from `get_quantizer` is what its neighbours ask for."""

        class Chosen(ops.Quantize):
            def get_quantizer(self, mode, index):
                return fuser.Float8BlockQuantizer(fuser.DType.kFloat8E4M3)

        op = Chosen()
        model = ops.Sequential(ops.GELU(), op)
        with fuser.autocast(recipe=recipe.MXFP8BlockScaling()):
            assert type(model(torch.ones(32, 32))) is fuser.Float8BlockwiseQTensor
        assert model[0].get_input_quantizer() is None and type(op.get_input_quantizer()) is fuser.Float8BlockQuantizer

    def test_history_length_keeps_scales_updating(self):
        model = ops.Sequential(ops.Quantize())
        for length, value in ((4, 1.0), (2, 2.0), (8, 3.0)):
            with fuser.autocast(recipe=recipe.DelayedScaling(amax_history_len=length)):
                model(torch.full((16, 16), value))
            quantizer = model[0].get_quantizer("forward", 0)
            assert quantizer.scale.item() == pytest.approx(448 / value)

    def test_state_changed_by_another_fuser(self):
        """Operations may be shared: a call alone, outside autocast, must not leave the pipeline without quantizers."""
        op = ops.Quantize()
        model = ops.Sequential(op)
        x = torch.ones(32, 32)
        with fuser.autocast(recipe=recipe.MXFP8BlockScaling()):
            assert isinstance(model(x), fuser.QuantizedTensor)
        assert not isinstance(op(x), fuser.QuantizedTensor)
        with fuser.autocast(recipe=recipe.MXFP8BlockScaling()):
            assert isinstance(model(x), fuser.QuantizedTensor)


class TestChannels:
    def test_several_producers(self):
        made = [ops.MakeExtraOutput().set_extra_output_channel(0, "a") for _ in range(2)]
        with pytest.raises(ValueError, match=r"Extra tensor channel 'a' has multiple producers \(ops 0 and 1\)"):
            OperationFuser(made)

    def test_no_producer(self):
        with pytest.raises(ValueError, match=r"'a'.*has no producer"):
            OperationFuser([ops.AddExtraInput().set_extra_input_channel(0, "a")])

    def test_producer_comes_later(self):
        add = ops.AddExtraInput().set_extra_input_channel(0, "a")
        make = ops.MakeExtraOutput().set_extra_output_channel(0, "a")
        with pytest.raises(ValueError, match=r"'a'.*has no earlier producer"):
            OperationFuser([add, make])

    @pytest.mark.parametrize("to_caller", [True, False])
    def test_residual_inside(self, to_caller):
        make = ops.MakeExtraOutput().set_extra_output_channel(0, "skip", output_to_caller=to_caller)
        add = ops.AddExtraInput().set_extra_input_channel(0, "skip")
        fuser_ = OperationFuser([ops.ConstantScale(2.0), make, ops.ConstantScale(3.0), add])
        assert fuser_.num_extra_inputs == 0
        assert fuser_._basic_op_extra_input_sources == [[], [], [], [(1, 0)]]
        assert fuser_._routes.consumers((1, 0)) == [3]
        assert fuser_._routes.public_outputs == ([(1, 0)] if to_caller else [])
        x = torch.randn(3, 4, requires_grad=True)
        result = fuser_(x)
        y = result[0] if to_caller else result
        torch.testing.assert_close(y, x * 8)
        loss = y.sum() + (result[1] * 5).sum() if to_caller else y.sum()
        loss.backward()
        torch.testing.assert_close(x.grad, torch.full_like(x, 18.0 if to_caller else 8.0))

    @pytest.mark.parametrize("add_in_place", [True, False])
    @pytest.mark.parametrize("make_in_place", [True, False])
    @pytest.mark.parametrize("hooked", [True, False])
    def test_residual_in_place_leaves_saved_and_callers_tensors_alone(self, make_in_place, add_in_place, hooked):
        """TE adds to the input that the linear saved, and to the caller's input and gradient."""
        make = ops.MakeExtraOutput(in_place=make_in_place).set_extra_output_channel(0, "a", output_to_caller=False)
        add = ops.AddExtraInput(in_place=add_in_place).set_extra_input_channel(0, "a")
        linear = ops.Linear(8, 8)
        model = ops.Sequential(make, linear, ops.GELU(), add)
        for module in model if hooked else ():
            module.register_forward_hook(lambda *args: None)
        x = torch.randn(4, 8, requires_grad=True)
        dy = torch.randn(4, 8)
        kept = x.detach().clone(), dy.clone()
        wanted = gelu(torch.nn.functional.linear(x, linear.weight, linear.bias)) + x
        tested = model(x)
        torch.testing.assert_close(tested, wanted)
        params = [x, linear.weight, linear.bias]
        grads = torch.autograd.grad(tested, params, dy)
        for a, b in zip(grads, torch.autograd.grad(wanted, params, dy), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        assert torch.equal(x, kept[0])
        assert torch.equal(dy, kept[1])

    def test_fan_out(self):
        make = ops.MakeExtraOutput().set_extra_output_channel(0, "a", output_to_caller=False)
        adds = [ops.AddExtraInput().set_extra_input_channel(0, "a") for _ in range(3)]
        fuser_ = OperationFuser([make, *adds])
        assert fuser_._routes.consumers((0, 0)) == [1, 2, 3]
        x = torch.randn(3, requires_grad=True)
        y = fuser_(x)
        y.sum().backward()
        torch.testing.assert_close(y, 4 * x)
        assert torch.equal(x.grad, torch.full_like(x, 4.0))

    def test_consumer_sees_whether_its_input_requires_grad(self):
        seen = []

        class Watch(ops.AddExtraInput):
            def fuser_forward(self, ctxs, input_, *, basic_op_extra_inputs, **kwargs):
                seen.append(basic_op_extra_inputs[0][0].requires_grad)
                return super().fuser_forward(ctxs, input_, basic_op_extra_inputs=basic_op_extra_inputs, **kwargs)

        make = ops.MakeExtraOutput().set_extra_output_channel(0, "a", output_to_caller=False)
        fuser_ = OperationFuser([ops.Bias(3), make, Watch().set_extra_input_channel(0, "a")])
        fuser_(torch.ones(3))
        fuser_._basic_ops[0].bias.requires_grad_(False)
        fuser_(torch.ones(3))
        with torch.no_grad():
            fuser_(torch.ones(3, requires_grad=True))
        assert seen == [True, False, False]

    @pytest.mark.parametrize("given_", [0, 2, 3])
    def test_number_of_extra_inputs(self, given_):
        fuser_ = OperationFuser([ops.AddExtraInput()])
        with pytest.raises(ValueError, match=f"Expected 1 extra inputs but got {given_}" if given_ != 1 else ""):
            fuser_(torch.ones(2), *[torch.ones(2)] * given_)


class Extra(BasicOperation):
    """Returns whatever it is told to."""

    num_extra_outputs = 1

    def __init__(self, forward_extra=None, backward_extra=()):
        super().__init__()
        self.forward_extra = forward_extra
        self.backward_extra = backward_extra

    def op_forward(self, *args, **kwargs):
        raise NotImplementedError

    op_backward = op_forward

    def fuser_forward(self, ctxs, input_, **kwargs):
        extra = [(input_,)] if self.forward_extra is None else self.forward_extra
        return input_ * 1, extra

    def fuser_backward(self, ctxs, grad_output, *, basic_op_grad_extra_outputs):
        return grad_output, [()], [self.backward_extra]


class TestResultChecks:
    def test_number_of_sequences(self):
        message = "Expected Extra to generate extra outputs for 1 basic operations, but got 2"
        with pytest.raises(RuntimeError, match=message):
            Extra([(torch.ones(1),), ()])(torch.ones(2))

    def test_number_of_outputs(self):
        with pytest.raises(RuntimeError, match="Expected op 0 to generate 1 extra outputs, but got 0"):
            Extra([()])(torch.ones(2))

    def test_public_none(self):
        with pytest.raises(RuntimeError, match="is public, but Extra returned None"):
            Extra([(None,)])(torch.ones(2))

    def test_consumed_none(self):
        extra = Extra([(None,)]).set_extra_output_channel(0, "a", output_to_caller=False)
        fuser_ = OperationFuser([extra, ops.AddExtraInput().set_extra_input_channel(0, "a")])
        with pytest.raises(RuntimeError, match="is required by an operation outside its forward fusion"):
            fuser_(torch.ones(2))

    def test_hidden_and_unused_none(self):
        extra = Extra([(None,)]).set_extra_output_channel(0, "a", output_to_caller=False)
        assert torch.equal(OperationFuser([extra])(torch.ones(2)), torch.ones(2))

    def test_number_of_extra_input_gradients(self):
        x = torch.ones(2, requires_grad=True)
        y, _ = Extra(backward_extra=(None,))(x)
        with pytest.raises(RuntimeError, match="Expected op 0 to generate grads for 0 extra inputs, but got 1"):
            y.sum().backward()

    def test_number_of_keyword_dicts(self):
        with pytest.raises(ValueError, match="2 dicts for 3 basic operations"):
            OperationFuser([ops.Identity()] * 3)(torch.ones(2), basic_op_kwargs=[{}, {}])


class TestAutograd:
    def model(self):
        return ops.Sequential(ops.Linear(8, 8), ops.GELU(), ops.Linear(8, 8))

    def test_retain_graph(self):
        """TE fails: it empties its saved tensors."""
        model = self.model()
        x = torch.randn(4, 8, requires_grad=True)
        y = model(x)
        grads = [torch.autograd.grad(y.sum(), [x, *model.parameters()], retain_graph=True) for _ in range(3)]
        for other in grads[1:]:
            for a, b in zip(grads[0], other, strict=True):
                assert torch.equal(a, b)

    @pytest.mark.parametrize(
        "recipe_class", [recipe.DelayedScaling, recipe.Float8CurrentScaling, recipe.MXFP8BlockScaling]
    )
    def test_retain_graph_quantized(self, recipe_class):
        model = ops.Sequential(ops.Linear(32, 32), ops.GELU(), ops.Linear(32, 32))
        x = torch.randn(32, 32, requires_grad=True)
        with fuser.autocast(recipe=recipe_class()):
            y = model(x)
        first = torch.autograd.grad(y.sum(), [x, *model.parameters()], retain_graph=True)
        if recipe_class is recipe.DelayedScaling:  # its backward scales are those of the amaxes of the first
            second = torch.autograd.grad(y.sum(), [x, *model.parameters()], retain_graph=True)
            assert all(torch.isfinite(grad).all() for grad in second)
        else:
            second = torch.autograd.grad(y.sum(), [x, *model.parameters()])
            assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))

    def test_second_backward_without_retain_graph(self):
        y = self.model()(torch.randn(4, 8, requires_grad=True))
        y.sum().backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            y.sum().backward()

    def test_double_backward_is_an_error(self):
        x, model = torch.randn(4, 8, requires_grad=True), self.model()
        with pytest.raises(RuntimeError, match="Double backward"):
            torch.autograd.grad(model(x).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="Double backward"):
            torch.autograd.functional.hvp(lambda x: model(x).square().sum(), x, x)

    def test_weight_changed_in_between(self):
        model = self.model()
        y = model(torch.randn(4, 8, requires_grad=True))
        with torch.no_grad():
            model[0].weight.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    @pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
    def test_without_grad(self, context):
        model = self.model()
        x = torch.randn(4, 8)
        expected = model(x)
        leaf = torch.randn(4, 8, requires_grad=True)
        middle = leaf * 1  # not a leaf
        with context():
            y = model(x)
            model(middle)
        assert torch.equal(y, expected)
        assert not y.requires_grad
        assert y.grad_fn is None
        assert middle.requires_grad

    def test_nothing_requires_grad(self):
        model = self.model().requires_grad_(False)
        y = model(torch.ones(4, 8))
        assert not y.requires_grad
        assert y.grad_fn is None

    def test_frozen_prefix_is_not_run_backward(self):
        ran = []

        class Watch(ops.Identity):
            def __init__(self, name):
                super().__init__()
                self.name = name

            def op_backward(self, ctx, grad_output):
                ran.append(self.name)
                return grad_output

        fuser_ = OperationFuser([Watch("a"), ops.Bias(2), Watch("b"), ops.Bias(2), Watch("c")])
        fuser_._basic_ops[1].bias.requires_grad_(False)
        x = torch.ones(2)
        fuser_(x).sum().backward()
        assert ran == ["c", "b"] or ran == ["c"]
        assert fuser_.first_op_requiring_backward == 3
        assert fuser_._basic_ops[3].bias.grad is not None
        assert x.grad is None

    def test_extra_output_before_the_first_op_that_requires_backward(self):
        fuser_ = OperationFuser([ops.MakeExtraOutput(), ops.Bias(2)])
        x = torch.ones(2)
        y, extra = fuser_(x)
        assert y.requires_grad
        assert not extra.requires_grad
        assert not x.requires_grad

    def test_shared_operation(self):
        bias = ops.Bias(3)
        fuser_ = OperationFuser([bias, ops.ConstantScale(2.0), bias])
        fuser_(torch.ones(4, 3)).sum().backward()
        assert torch.equal(bias.bias.grad, torch.full((3,), 4.0 * 2 + 4.0))

    def test_shared_parameter(self):
        a, b = ops.Bias(3), ops.Bias(3)
        b.bias = a.bias
        ops.Sequential(a, ops.ConstantScale(2.0), b)(torch.ones(4, 3)).sum().backward()
        assert torch.equal(a.bias.grad, torch.full((3,), 12.0))

    def test_extra_output_used_alone(self):
        fuser_ = OperationFuser([ops.ConstantScale(2.0), ops.MakeExtraOutput(), ops.ConstantScale(5.0)])
        x = torch.ones(3, requires_grad=True)
        _, extra = fuser_(x)
        extra.sum().backward()
        assert torch.equal(x.grad, torch.full((3,), 2.0))

    def test_extra_output_of_the_last_op(self):
        """The output and the extra output are one tensor for the operation, two for the caller."""
        fuser_ = OperationFuser([ops.ConstantScale(2.0), ops.MakeExtraOutput()])
        x = torch.ones(3, requires_grad=True)
        y, extra = fuser_(x)
        assert y is not extra
        (3 * y + 4 * extra).sum().backward()
        assert torch.equal(x.grad, torch.full((3,), 14.0))

    def test_no_marks_on_the_callers_tensors(self):
        """TE leaves `_do_not_clear` on them for good."""
        model = ops.Sequential(ops.MakeExtraOutput(), ops.Linear(8, 8), ops.AddExtraInput())
        x, extra = torch.randn(4, 8), torch.randn(4, 8)
        tensors = [x, extra, *model.parameters()]
        flags = [tensor.requires_grad for tensor in tensors]
        y, out = model(x, extra)
        (y.sum() + out.sum()).backward()
        assert [tensor.requires_grad for tensor in tensors] == flags
        assert not any(vars(tensor) for tensor in (x, extra, y, out, *model.parameters()))

    def test_identity_returns_a_new_object_with_the_same_data(self):
        x = torch.randn(4, requires_grad=True)
        y = OperationFuser([ops.Identity(), ops.Identity()])(x)
        assert y is not x
        assert y.data_ptr() == x.data_ptr()
        assert not y.is_leaf

    def test_gradient_takes_the_dtype_of_the_input(self):
        model = ops.Sequential(ops.Linear(8, 8, dtype=torch.bfloat16))
        x = torch.randn(4, 8, requires_grad=True)
        y = model(x)
        assert y.dtype is torch.bfloat16
        y.sum().backward()
        assert x.grad.dtype is torch.float32

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_torch_autocast(self, dtype):
        model = self.model()
        x = torch.randn(4, 8)
        with torch.autocast("cpu", dtype=dtype):
            y = model(x)
        assert y.dtype is dtype
        low = copy.deepcopy(model).to(dtype)
        torch.testing.assert_close(y.float(), low(x.to(dtype)).float(), rtol=3e-2, atol=3e-2)
        y.float().sum().backward()
        assert all(param.grad.dtype is torch.float32 for param in model.parameters())
        with torch.autocast("cuda", dtype=dtype, enabled=torch.cuda.is_available()):
            assert model(x).dtype is torch.float32  # another device type's autocast

    def test_torch_autocast_around_backward(self):
        model = ops.Sequential(ops.Linear(8, 8), ops.GELU(), ops.Linear(8, 8))
        x = torch.randn(4, 8, requires_grad=True)
        y = model(x)
        wanted = torch.autograd.grad(y.square().sum(), [x, *model.parameters()], retain_graph=True)
        loss = y.square().sum()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            tested = torch.autograd.grad(loss, [x, *model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(wanted, tested, strict=True))

    def test_gradcheck(self):
        double = torch.float64
        make = ops.MakeExtraOutput().set_extra_output_channel(0, "skip", output_to_caller=False)
        add = ops.AddExtraInput().set_extra_input_channel(0, "skip")
        model = ops.Sequential(
            ops.Bias(6, dtype=double), ops.GELU(), ops.ConstantScale(0.3), make, ops.SiLU(), add, ops.SwiGLU()
        )
        model += [ops.MakeExtraOutput(), ops.SiLU(), ops.AddExtraInput(), ops.Reshape((-1,))]
        x = torch.randn(4, 6, dtype=double, requires_grad=True)
        extra = torch.randn(4, 3, dtype=double, requires_grad=True)
        with fuser.backend("float64"):
            assert torch.autograd.gradcheck(lambda *args: model(*args[:2]), (x, extra, *model.parameters()))

    def test_meta_device(self):
        """TE's gradients go to the meta parameters that the first forward replaces."""
        model = ops.Sequential(
            ops.Linear(8, 8, device="meta"), ops.RMSNorm(8, device="meta"), ops.Bias(8, device="meta")
        )
        for _ in range(2):
            model(torch.randn(4, 8)).sum().backward()
        for param in model.parameters():
            assert param.device.type == "cpu"
            assert param.grad is not None

    def test_meta_device_to_empty(self):
        model = ops.Sequential(ops.Linear(8, 8, device="meta"), ops.LayerNorm(8, device="meta"))
        model.to_empty(device="cpu")
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        x = torch.randn(4, 8)
        y = model(x)
        y.sum().backward()
        linear = torch.nn.functional.linear(x, model[0].weight, model[0].bias)
        torch.testing.assert_close(y, torch.nn.functional.layer_norm(linear, (8,)))
        assert model[0].weight.grad is not None

    def test_aliases_of_linear_follow_materialization(self):
        linear = ops.Linear(8, 8, device="meta")
        ops.Sequential(linear)(torch.randn(4, 8)).sum().backward()
        assert linear.weight is linear.basic_ops[0].weight
        assert linear.bias is linear.basic_ops[1].bias


class TestWithTorch:
    """Other parts of torch around a pipeline."""

    def model(self):
        return ops.Sequential(ops.Linear(32, 32), ops.GELU(), ops.Linear(32, 32))

    @pytest.mark.parametrize("kind", [None, recipe.MXFP8BlockScaling])
    @pytest.mark.parametrize("reentrant", [True, False])
    def test_activation_checkpointing(self, kind, reentrant):
        model = self.model()
        x = torch.randn(32, 32, requires_grad=True)

        def run(x):
            with fuser.autocast(enabled=kind is not None, recipe=None if kind is None else kind()):
                return model(x)

        wanted = torch.autograd.grad(run(x).square().sum(), [x, *model.parameters()])
        checkpoint(run, x, use_reentrant=reentrant).square().sum().backward()
        tested = [x.grad, *(param.grad for param in model.parameters())]
        assert all(torch.equal(a, b) for a, b in zip(wanted, tested, strict=True))

    def test_functional_call(self):
        model = self.model()
        x = torch.randn(32, 32)
        before = model(x)
        new = {name: torch.randn_like(param).requires_grad_() for name, param in model.named_parameters()}
        y = torch.func.functional_call(model, new, (x,))
        grads = torch.autograd.grad(y.sum(), list(new.values()))
        other = self.model()
        for (name, param), key in zip(other.named_parameters(), new, strict=True):
            assert name == key
            with torch.no_grad():
                param.copy_(new[key])
        z = other(x)
        assert torch.equal(y, z)
        for a, b in zip(grads, torch.autograd.grad(z.sum(), list(other.parameters())), strict=True):
            assert torch.equal(a, b)
        assert torch.equal(model(x), before)

    def test_saved_tensor_hooks(self):
        model = self.model()
        x = torch.randn(32, 32, requires_grad=True)
        with fuser.autocast(recipe=recipe.MXFP8BlockScaling()):
            wanted = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
            with torch.autograd.graph.save_on_cpu():
                y = model(x)
        tested = torch.autograd.grad(y.square().sum(), [x, *model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(wanted, tested, strict=True))

    def test_optimizer_sees_each_parameter_once(self):
        assert len(torch.optim.SGD(self.model().parameters(), lr=0.1).param_groups[0]["params"]) == 4

    def test_parametrized_parameters_are_refused(self):
        """Their gradients would silently lack the parametrization's derivative."""

        class Twice(torch.nn.Module):
            def forward(self, tensor):
                return 2 * tensor

        op = ops.Bias(4)
        torch.nn.utils.parametrize.register_parametrization(op, "bias", Twice())
        with pytest.raises(RuntimeError, match="Bias has parametrized parameters"):
            op(torch.ones(2, 4))


class TestMemory:
    def test_saved_tensors_go_with_backward(self, quick_collections):
        """The loss stays, what was saved for backward goes: also the buffers of quantized tensors."""
        saved = []

        class Watch(ops.Identity):
            def op_forward(self, ctx, input_, **kwargs):
                plain = input_ * 1
                quantizer = fuser.MXFP8Quantizer(fuser.DType.kFloat8E4M3)
                quantizer.internal = True
                storage = quantizer(input_)
                ctx.save_for_backward(plain, storage)
                data = storage.buffers.rowwise_data
                saved.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in (plain, data))
                return input_ * 1

            def op_backward(self, ctx, grad_output):
                plain, storage = ctx.saved_tensors
                assert storage.dequantize().shape == plain.shape
                return grad_output

        x = torch.randn(32, 32, requires_grad=True)
        loss = ops.Sequential(Watch(), Watch())(x).sum()
        for retain_graph in (True, True, False):
            loss.backward(retain_graph=retain_graph)
            gc.collect()
            assert [ref.expired() for ref in saved] == [not retain_graph] * 4

    def test_no_growth(self, quick_collections):
        model = ops.Sequential(ops.Linear(16, 16), ops.GELU(), ops.MakeExtraOutput(), ops.Linear(16, 16))
        x = torch.randn(16, 16, requires_grad=True)

        def step():
            with fuser.autocast(recipe=recipe.DelayedScaling()):
                y, extra = model(x)
            (y.sum() + extra.sum()).backward()
            model.zero_grad()
            x.grad = None

        for _ in range(5):
            step()
        gc.collect()
        before = len(gc.get_objects())
        for _ in range(100):
            step()
        gc.collect()
        assert len(gc.get_objects()) - before < 50


class TestHooks:
    """TE's fuser passes hooks of contained operations by."""

    def model(self):
        return ops.Sequential(
            ops.Linear(8, 8, dtype=torch.bfloat16), ops.GELU(), ops.Linear(8, 8, dtype=torch.bfloat16)
        )

    def test_forward_hooks_see_and_change(self):
        model = self.model()
        x = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
        seen = []
        model[1].register_forward_pre_hook(lambda module, args: seen.append(args[0].detach().clone()))
        handle = model[1].register_forward_hook(lambda module, args, output: output * 2)
        y = model(x)
        linear = torch.nn.functional.linear(x, model[0].weight, model[0].bias)
        torch.testing.assert_close(seen[0], linear)
        y.sum().backward()
        doubled = x.grad
        handle.remove()
        x.grad = None
        plain = model(x)
        plain.sum().backward()
        torch.testing.assert_close(y - model[2].bias, (plain - model[2].bias) * 2, rtol=5e-2, atol=5e-2)
        torch.testing.assert_close(doubled, x.grad * 2, rtol=5e-2, atol=1e-2)

    def test_hooks_of_a_contained_fused_op_and_of_its_members(self):
        model = self.model()
        calls = []
        for name, module in model.named_modules():
            if name and not name.endswith("basic_ops"):
                module.register_forward_pre_hook(lambda module, args, name=name: calls.append(f"+{name}"))
                module.register_forward_hook(lambda module, args, output, name=name: calls.append(f"-{name}"))
        y = model(torch.randn(4, 8, dtype=torch.bfloat16))
        expected = "+0 +0.basic_ops.0 -0.basic_ops.0 +0.basic_ops.1 -0.basic_ops.1 -0 +1 -1 "
        expected += "+2 +2.basic_ops.0 -2.basic_ops.0 +2.basic_ops.1 -2.basic_ops.1 -2"
        assert " ".join(calls) == expected
        y.sum().backward()

    def test_operations_without_hooks_are_still_fused(self):
        model = self.model()
        model[1].register_forward_hook(lambda module, args, output: None)
        forward = [
            step
            for pipeline in fuser.explain(model, torch.ones(4, 8).bfloat16()).pipelines
            for step in pipeline.forward
        ]
        names = [step.name for step in forward]
        assert names == ["ForwardLinearBiasActivation", "GELU", "ForwardLinearBiasActivation"]

    def test_results_do_not_depend_on_hooks(self):
        torch.manual_seed(0)
        model = ops.Sequential(ops.Linear(8, 8), ops.GELU(), ops.Linear(8, 8))
        hooked = copy.deepcopy(model)
        for module in hooked.modules():
            module.register_forward_hook(lambda module, args, output: None)
        x = torch.randn(4, 8, requires_grad=True)
        grads = []
        for one in (model, hooked):
            y = one(x)
            grads.append([y, *torch.autograd.grad(y.square().sum(), [x, *one.parameters()])])
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))

    def test_a_hook_may_call_its_operation(self):
        """Alone, while the pipeline calls it: its extra input comes from a channel there, from the hook here."""
        skip, add = ops.MakeExtraOutput(), ops.AddExtraInput()
        skip.set_extra_output_channel(0, "skip", output_to_caller=False)
        add.set_extra_input_channel(0, "skip")
        model, x, inner = ops.Sequential(skip, ops.GELU(), add), torch.randn(4, 8), []

        def hook(module, args):
            if not inner:
                inner.append(None)
                inner.append(module(torch.ones(2, 8), torch.ones(2, 8)))

        expected = model(x)
        add.register_forward_pre_hook(hook)
        assert torch.equal(model(x), expected)
        assert torch.equal(inner[1], torch.full((2, 8), 2.0))

    def test_full_backward_hooks(self):
        model = self.model()
        seen = {}
        model[1].register_full_backward_hook(
            lambda module, grad_input, grad_output: seen.update(i=grad_input, o=grad_output)
        )
        model[2].register_full_backward_pre_hook(lambda module, grad_output: seen.update(p=grad_output))
        x = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
        model(x).sum().backward()
        assert seen["i"][0].shape == seen["o"][0].shape == seen["p"][0].shape == (4, 8)
        assert torch.equal(seen["p"][0], torch.ones_like(seen["p"][0]))

    def test_hooks_and_channels(self):
        make = ops.MakeExtraOutput().set_extra_output_channel(0, "skip", output_to_caller=False)
        add = ops.AddExtraInput().set_extra_input_channel(0, "skip")
        external = ops.AddExtraInput()
        middle = ops.ConstantScale(3.0)
        model = ops.Sequential(make, middle, external, add, ops.MakeExtraOutput())
        x = torch.randn(4, 8, requires_grad=True)
        extra = torch.randn(4, 8, requires_grad=True)
        expected = model(x, extra)
        calls = []
        for op in (make, middle, add):
            op.register_forward_hook(lambda module, args, output: calls.append(len(args)))
        y, out = model(x, extra)
        assert calls == [1, 1, 2]
        assert torch.equal(y, expected[0])
        (y.sum() + 2 * out.sum()).backward()
        assert torch.equal(x.grad, torch.full_like(x, 12.0))
        assert torch.equal(extra.grad, torch.full_like(x, 3.0))

    def test_global_hooks(self):
        names = []
        hook = lambda module, args, output: names.append(type(module).__name__)  # noqa: E731
        handle = torch.nn.modules.module.register_module_forward_hook(hook)
        try:
            ops.Sequential(ops.Bias(2), ops.Identity())(torch.ones(2))
        finally:
            handle.remove()
        assert names == ["Bias", "Identity", "Sequential"]

    def test_hooks_of_an_operation_called_alone_run_once(self):
        linear = ops.Linear(4, 4)
        calls = []
        linear.register_forward_hook(lambda *args: calls.append("linear"))
        linear.basic_ops[1].register_forward_hook(lambda *args: calls.append("bias"))
        linear(torch.ones(2, 4))
        assert calls == ["bias", "linear"]

    def test_hooks_under_a_recipe(self):
        model = ops.Sequential(ops.Linear(32, 32), ops.GELU(), ops.Linear(32, 32))
        model[1].register_forward_hook(lambda *args: None)
        x = torch.randn(32, 32, requires_grad=True)
        with fuser.autocast(recipe=recipe.MXFP8BlockScaling()):
            y = model(x)
        y.sum().backward()
        assert x.grad.abs().sum() > 0


# torch.compile hides this warning of its own, which the test settings turn into an error first.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
class TestCompile:
    @pytest.mark.parametrize("warm", [False, True])
    def test_around_a_sequential(self, warm):
        torch._dynamo.reset()

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.first = torch.nn.Linear(8, 8)
                self.ops = ops.Sequential(ops.Linear(8, 8), ops.GELU(), torch.nn.Identity(), ops.Bias(8))

            def forward(self, x):
                return torch.relu(self.ops(torch.sin(self.first(x)))) * 2

        model = Model()
        x = torch.randn(4, 8, requires_grad=True)
        expected = copy.deepcopy(model)
        if warm:
            model(x)
        compiled = torch.compile(model, backend="aot_eager")
        results = []
        for one in (expected, compiled, compiled):
            y = one(x)
            results.append([y, *torch.autograd.grad(y.sum(), [x, *one.parameters()])])
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
        with torch.no_grad():
            assert torch.equal(compiled(x), results[0][0])

    def test_compiles_once(self):
        from torch._dynamo.utils import counters

        torch._dynamo.reset()
        compiled = torch.compile(ops.Sequential(ops.Bias(8), torch.nn.ReLU()), backend="eager")
        for _ in range(3):
            compiled(torch.ones(8))
        counters.clear()
        for _ in range(3):
            compiled(torch.ones(8))
        assert counters["stats"]["unique_graphs"] == 0


# ---------------------------------------------------------------------- random pipelines


def gelu(x):
    return torch.nn.functional.gelu(x, approximate="tanh")


def rms_norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


# Operation, and its reference: a function of the input, the operation's parameters and its extra input.
STEPS = {
    "linear": (lambda: ops.Linear(8, 8), lambda x, w, b: torch.nn.functional.linear(x, w, b)),
    "basic_linear": (lambda: ops.BasicLinear(8, 8), lambda x, w: torch.nn.functional.linear(x, w)),
    "bias": (lambda: ops.Bias(8), lambda x, b: x + b),
    "identity": (ops.Identity, lambda x: x),
    "scale": (lambda: ops.ConstantScale(0.75), lambda x: x * 0.75),
    "reshape": (lambda: ops.Reshape((-1, 8)), lambda x: x.reshape(-1, 8)),
    "gelu": (ops.GELU, gelu),
    "relu": (ops.ReLU, torch.relu),
    "silu": (ops.SiLU, torch.nn.functional.silu),
    "layer_norm": (lambda: ops.LayerNorm(8), lambda x, w, b: torch.nn.functional.layer_norm(x, (8,), w, b)),
    "rms_norm": (lambda: ops.RMSNorm(8), rms_norm),
    "extra_output": (ops.MakeExtraOutput, None),
    "extra_output_in_place": (lambda: ops.MakeExtraOutput(in_place=True), None),
    "extra_input": (ops.AddExtraInput, None),
    "extra_input_in_place": (lambda: ops.AddExtraInput(in_place=True), None),
}


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=7),
    st.integers(0, 2**31 - 1),
    st.booleans(),
)
def test_random_pipelines(names, seed, input_requires_grad):
    """Outputs and all gradients of random float32 pipelines against float64, relative to each tensor's magnitude."""
    generator = torch.Generator().manual_seed(seed)
    made = [STEPS[name][0]() for name in names]
    for param in itertools.chain.from_iterable(op.parameters() for op in made):
        with torch.no_grad():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.5)
    x = torch.randn(6, 8, generator=generator)
    extras = [torch.randn(6, 8, generator=generator) for name in names if name.startswith("extra_input")]

    def forward_reference():
        leaves = [x.double().requires_grad_(input_requires_grad), *(e.double().requires_grad_() for e in extras)]
        y, rest, outputs, params = leaves[0], iter(leaves[1:]), [], []
        for name, op in zip(names, made, strict=True):
            own = [param.detach().double().requires_grad_() for param in op.parameters()]
            params += own
            if name.startswith("extra_output"):
                outputs.append(y)
            elif name.startswith("extra_input"):
                y = next(rest) + y
            else:
                y = STEPS[name][1](y, *own)
        return [y, *outputs], leaves, params

    def forward_tested():
        leaves = [x.clone().requires_grad_(input_requires_grad), *(e.clone().requires_grad_() for e in extras)]
        # In-place operations write to the memory of extra inputs, which must not be leaves' own in the loss.
        result = ops.Sequential(*made)(*leaves)
        params = [param for op in made for param in op.parameters()]
        return list(result) if isinstance(result, tuple) else [result], leaves, params

    weights = [torch.randn(6, 8, generator=generator) for _ in range(1 + len(names))]
    collected = []
    for forward in (forward_reference, forward_tested):
        outputs, leaves, params = forward()
        loss = sum((y * w.to(y.dtype)).sum() for y, w in zip(outputs, weights, strict=False) if y.requires_grad)
        wanted = [tensor for tensor in leaves + params if tensor.requires_grad]
        grads = torch.autograd.grad(loss, wanted, allow_unused=True) if isinstance(loss, torch.Tensor) else []
        collected.append((outputs, grads))
    (outputs64, grads64), (outputs32, grads32) = collected
    # Norms divide by the size of a row, which may be as small as the square root of epsilon.
    tolerance = 1e-4 if any("norm" in name for name in names) else 2e-6
    for tested, expected in zip([*outputs32, *grads32], [*outputs64, *grads64], strict=True):
        if expected is None:
            assert tested is None or not tested.abs().any()
            continue
        scale = max(expected.abs().max().item(), 1.0)
        torch.testing.assert_close(tested.double(), expected, rtol=0, atol=tolerance * scale)


# Smooth ones: at ReLU's kink a rounding decides whether a gradient passes.
PLAIN_STEPS = ("linear", "basic_linear", "bias", "scale", "gelu", "silu", "rms_norm", "extra_output")
PLAIN_STEPS += ("extra_output_in_place", "extra_input", "extra_input_in_place")
WIDE = {
    "linear": lambda: ops.Linear(32, 32),
    "basic_linear": lambda: ops.BasicLinear(32, 32),
    "bias": lambda: ops.Bias(32),
    "rms_norm": lambda: ops.RMSNorm(32),
}


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from(PLAIN_STEPS), min_size=2, max_size=6),
    st.integers(0, 2**31 - 1),
    st.sampled_from([None, recipe.DelayedScaling, recipe.Float8CurrentScaling, recipe.MXFP8BlockScaling]),
)
def test_fused_and_unfused_agree(names, seed, kind):
    """bfloat16 pipelines with all fusions and with none: the same up to roundings (and steps of E5M2, in backward)."""
    generator = torch.Generator().manual_seed(seed)
    made = [WIDE.get(name, STEPS[name][0])() for name in names]
    for param in itertools.chain.from_iterable(op.parameters() for op in made):
        with torch.no_grad():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.3)
    model = ops.Sequential(*made).bfloat16()
    x = torch.randn(32, 32, generator=generator).bfloat16()
    extras = [torch.randn(32, 32, generator=generator).bfloat16() for name in names if name.startswith("extra_input")]
    weights = [torch.randn(32, 32, generator=generator).bfloat16() for _ in range(1 + len(names))]

    def run():
        leaves = [tensor.clone().requires_grad_() for tensor in (x, *extras)]
        with fuser.autocast(enabled=kind is not None, recipe=None if kind is None else kind()):
            result = model(*leaves)
        outputs = list(result) if isinstance(result, tuple) else [result]
        grad_outputs = [weight.clone() for weight in weights[: len(outputs)]]  # in-place operations add to them
        params = list(model.parameters())
        return outputs + list(torch.autograd.grad(outputs, leaves + params, grad_outputs, allow_unused=True))

    fused = run()
    for op in model.modules():
        if isinstance(op, BasicOperation):
            op.__dict__.update(_fp8_metas=None, _quantizers=None, _suspended_recipe_state=None, _recipe_key=None)
    with fusions(only=True):
        unfused = run()
    for a, b in zip(fused, unfused, strict=True):
        if a is None or b is None:
            assert a is b
            continue
        error = (a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-3)
        # With a recipe each product rounds its gradient to E5M2, fused before the scale, unfused after it: 5 % rms each
        # time, 7 % between both, independently in each product. A tensor may be dominated by one number: three times.
        products = sum("linear" in name for name in names)
        assert error < (0.02 if kind is None else 0.21 * max(1, products) ** 0.5)


def test_public_names():
    has_jax = importlib.util.find_spec("jax") is not None
    for name in fuser.__all__:
        assert (name == "xla" and not has_jax) or getattr(fuser, name) is not None
    for name in ops.__all__:
        assert getattr(ops, name) is not None
    assert set(fuser.__all__) <= set(dir(fuser))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = fuser.no_such_name


def test_backward_uses_the_backend_of_its_forward():
    """Also where it runs in another thread, as autograd's threads of a GPU do."""
    seen = []

    class Spy(BasicOperation):
        def op_forward(self, ctx, input_, **kwargs):
            return input_ * 1

        def op_backward(self, ctx, grad_output):
            seen.append(current_backend())
            return grad_output

    x = torch.randn(4, 16, requires_grad=True)
    with backend("reference"):
        y = OperationFuser([Spy()])(x)
    thread = threading.Thread(target=y.sum().backward)
    thread.start()
    thread.join()
    assert seen == ["reference"]
    assert current_backend() == "auto"


class TestForwardBetweenForwardAndBackward:
    """A backward pass that is still to come is not affected by what later calls of the same operations choose."""

    RECIPES = (
        recipe.DelayedScaling(),
        recipe.Float8CurrentScaling(),
        recipe.MXFP8BlockScaling(),
        recipe.Float8BlockScaling(),
        recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
    )

    @staticmethod
    def models():
        yield "linear", ops.Sequential(ops.Linear(128, 128), ops.GELU(), ops.Linear(128, 128)), []
        yield "norm", ops.Sequential(ops.Linear(128, 128), ops.RMSNorm(128), ops.Linear(128, 128), ops.SwiGLU()), []
        grouped = ops.GroupedLinear(2, 128, 128)
        yield "grouped", ops.Sequential(ops.Linear(128, 128), grouped, ops.GELU()), [torch.tensor([64, 64])]
        yield "quantize", ops.Sequential(ops.Linear(128, 128), ops.Quantize(forward=False, backward=True)), []

    @staticmethod
    def without_grad(model, x, extra, own):
        with torch.no_grad(), fuser.autocast(recipe=own):
            model(x, *extra)

    @staticmethod
    def without_recipe(model, x, extra, own):
        with torch.no_grad():
            model(x, *extra)

    @staticmethod
    def under_another_recipe(model, x, extra, own):
        other = (
            recipe.Float8CurrentScaling() if isinstance(own, recipe.MXFP8BlockScaling) else recipe.MXFP8BlockScaling()
        )
        with fuser.autocast(recipe=other):
            model(x, *extra)

    @staticmethod
    def with_frozen_weights(model, x, extra, own):
        model.requires_grad_(False)
        with fuser.autocast(recipe=own):
            model(x, *extra)
        model.requires_grad_(True)

    @staticmethod
    def another_backward(model, x, extra, own):
        model.requires_grad_(False)
        with fuser.autocast(recipe=own):
            y = model(x, *extra)
        y.sum().backward()
        model.requires_grad_(True)

    @sampled("own", RECIPES, 5, ids=lambda own: type(own).__name__)
    @pytest.mark.parametrize(
        "between", ["without_grad", "without_recipe", "under_another_recipe", "with_frozen_weights", "another_backward"]
    )
    def test_gradients_stay_the_same(self, own, between):
        torch.manual_seed(0)
        for name, model, extra in self.models():
            twin = copy.deepcopy(model)
            x, other = torch.randn(128, 128, requires_grad=True), torch.randn(128, 128, requires_grad=True)
            with fuser.autocast(recipe=own):
                y, twins_y = model(x, *extra), twin(x, *extra)
            dy = torch.randn_like(y)
            expected = torch.autograd.grad(twins_y, [x, *twin.parameters()], dy)
            if between == "another_backward" and isinstance(own, recipe.DelayedScaling):
                continue  # its scales rightly move on
            getattr(self, between)(model, other, extra, own)
            actual = torch.autograd.grad(y, [x, *model.parameters()], dy)
            for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
                assert torch.equal(a, b), (name, i)


class TestSharedMemory:
    """In-place operations on memory that the caller gave, or gets, as something else too: results as out of place."""

    @staticmethod
    def gradients(model, x, extra_of, dy=None):
        """Output and gradients of a residual around `model`; `extra_of(h)`: the extra inputs, made from the input."""
        x = x.clone().requires_grad_()
        h = x * 1
        y = model(h, *extra_of(h))
        dy = torch.linspace(-1, 1, y.numel()).view(y.shape) if dy is None else dy
        return [y.detach().clone(), *torch.autograd.grad(y, [x, *model.parameters()], dy)]

    @pytest.mark.parametrize(
        "inner",
        [
            lambda: [ops.BasicLinear(8, 8)],
            lambda: [ops.Linear(8, 8)],
            lambda: [ops.BasicLinear(8, 8), ops.ConstantScale(2.0)],
            lambda: [ops.GELU()],
            lambda: [ops.RMSNorm(8), ops.Linear(8, 8)],
        ],
    )
    @pytest.mark.parametrize("extra_of", [lambda h: h, lambda h: h.view_as(h), lambda h: h.detach()])
    @pytest.mark.parametrize("hooked", [False, True])
    def test_residual_of_the_input(self, inner, extra_of, hooked):
        inner = inner()
        in_place = ops.Sequential(*inner, ops.AddExtraInput(in_place=True))
        plain = ops.Sequential(*inner, ops.AddExtraInput())
        wanted = self.gradients(plain, torch.ones(4, 8) / 3, lambda h: (extra_of(h),))
        if hooked:
            in_place[0].register_forward_hook(lambda *args: None)
        tested = self.gradients(in_place, torch.ones(4, 8) / 3, lambda h: (extra_of(h),))
        for a, b in zip(tested, wanted, strict=True):
            torch.testing.assert_close(a, b)

    def test_one_extra_input_twice(self):
        model = ops.Sequential(*[ops.AddExtraInput(in_place=True) for _ in range(2)])
        x, e = torch.ones(3), torch.full((3,), 10.0)
        with torch.no_grad():
            assert torch.equal(model(x, e, e), torch.full((3,), 21.0))

    def test_parameter_of_a_submodule(self):
        class Scaled(BasicOperation):
            def __init__(self):
                super().__init__()
                self.inner = torch.nn.Linear(8, 1, bias=False)

            def op_forward(self, ctx, input_, **kwargs):
                ctx.save_for_backward(self.inner.weight)
                return input_ * self.inner.weight

            def op_backward(self, ctx, grad_output):
                (weight,) = ctx.saved_tensors
                return grad_output * weight, [None]

        op = Scaled()
        weight = op.inner.weight.detach().clone()
        model = ops.Sequential(op, ops.AddExtraInput(in_place=True))
        x = torch.ones(1, 8, requires_grad=True)
        y = model(x, op.inner.weight.detach())
        assert torch.equal(op.inner.weight, weight)
        y.sum().backward()
        assert torch.equal(x.grad, weight)

    def test_memory_beside_it_is_no_reason_to_copy(self):
        x, extra = torch.randn(8, 8).split(4)
        y = ops.Sequential(ops.GELU(), ops.AddExtraInput(in_place=True))(x, extra)
        assert y.data_ptr() == extra.data_ptr()

    @pytest.mark.parametrize("inner", [lambda: ops.GELU(), lambda: ops.BasicLinear(8, 8)])
    def test_one_gradient_of_two_outputs(self, inner):
        """`y + extra` sends one tensor back to both."""
        inner = inner()
        results = []
        for in_place in (False, True):
            model = ops.Sequential(ops.MakeExtraOutput(in_place=in_place), inner, ops.AddExtraInput())
            x, residual = torch.ones(4, 8).requires_grad_(), torch.ones(4, 8).requires_grad_()
            y, extra = model(x, residual)
            results.append(torch.autograd.grad(y + extra, [x, residual], torch.linspace(-1, 1, 32).view(4, 8)))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)

    def test_hooks_and_an_extra_output_that_nobody_uses(self):
        last = ops.Linear(8, 8)
        last.register_forward_hook(lambda *args: None)
        y, _ = ops.Sequential(ops.Linear(8, 8), ops.MakeExtraOutput(in_place=True), last)(torch.randn(4, 8))
        y.sum().backward()
        assert last.basic_ops[0].weight.grad is not None


CHANGED_IN_PLACE = {
    "linear": lambda: [ops.BasicLinear(8, 8)],
    "rms_norm": lambda: [ops.RMSNorm(8)],
    "layer_norm": lambda: [ops.LayerNorm(8)],
    "reshape": lambda: [ops.GELU(), ops.Reshape((6, 8))],
    "dropout": lambda: [ops.BasicLinear(8, 8), ops.Dropout(0.5).eval()],
    "identity": lambda: [ops.BasicLinear(8, 8), ops.Identity()],
    "quantize": lambda: [ops.BasicLinear(8, 8), ops.Quantize()],
    "only_reshape": lambda: [ops.Reshape((6, 8))],
    "only_dropout": lambda: [ops.Dropout(0.5).eval()],
    "only_identity": lambda: [ops.Identity(), ops.Identity()],
    "only_quantize": lambda: [ops.Quantize()],
}


class TestOutputsChangedInPlace:
    """What `y += x` and `nn.ReLU(inplace=True)` do to an output."""

    @pytest.mark.parametrize("case", CHANGED_IN_PLACE)
    def test_gradients(self, case):
        model = ops.Sequential(*CHANGED_IN_PLACE[case]())
        collected = []
        for in_place in (False, True):
            x, z = torch.linspace(-1, 1, 48).view(2, 3, 8).requires_grad_(), torch.ones(8, requires_grad=True)
            y = model(x * 1)
            y = y.add_(z).mul_(2) if in_place else (y + z) * 2
            collected.append(torch.autograd.grad(y, [x, z, *model.parameters()], torch.full_like(y, 0.5)))
        for a, b in zip(*collected, strict=True):
            assert torch.equal(a, b)

    @pytest.mark.parametrize("case", ["linear", "rms_norm", "reshape"])
    def test_features_of_a_frozen_model(self, case):
        model = ops.Sequential(*CHANGED_IN_PLACE[case]())
        with torch.no_grad():
            features = model(torch.ones(2, 3, 8))
        z = torch.zeros(8, requires_grad=True)
        features += z
        features.sum().backward()
        assert torch.equal(z.grad, torch.full((8,), 6.0))

    def test_extra_output(self):
        linear = ops.BasicLinear(8, 8)
        x = torch.ones(2, 3, 8)
        y, extra = ops.Sequential(linear, ops.MakeExtraOutput(), ops.BasicLinear(8, 8))(x)
        y += 1
        extra += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()  # the second linear saved the extra output
        y, extra = ops.Sequential(linear, ops.MakeExtraOutput())(x)
        extra += 1
        extra.sum().backward()
        assert torch.equal(linear.weight.grad, torch.full((8, 8), 6.0))

    def test_no_copy(self):
        """The output has the memory that the linear wrote."""
        written = []

        class Spy(ops.GELU):
            def op_forward(self, ctx, input_, **kwargs):
                y = super().op_forward(ctx, input_, **kwargs)
                written.append(y.data_ptr())
                return y

        y = ops.Sequential(Spy(), ops.Reshape((6, 8)))(torch.ones(2, 3, 8, requires_grad=True))
        assert [y.data_ptr()] == written

    def test_a_leaf_stays_protected(self):
        x = torch.ones(4, requires_grad=True)
        for model in (ops.Identity(), ops.Sequential(ops.MakeExtraOutput())):
            y = model(x)
            y = y[0] if isinstance(y, tuple) else y
            with pytest.raises(RuntimeError, match="is being"):
                y += 1

    def test_subclasses_of_identity_are_not_skipped(self):
        class Reversed(ops.Identity):
            def op_backward(self, ctx, grad_output):
                return -grad_output

        x = torch.ones(4, requires_grad=True)
        ops.Sequential(Reversed())(x).sum().backward()
        assert torch.equal(x.grad, -torch.ones(4))

    def test_fusions_of_identities_are_not_skipped(self):
        class Negated(FusedOperation):
            def fuser_forward(self, ctxs, input_, **kwargs):
                return -input_, [()]

        with fusions(forward=lambda ops_, *, recipe: [Negated(ops_)]):
            assert torch.equal(ops.Sequential(ops.Identity())(torch.ones(2)), -torch.ones(2))

    def test_keywords_of_an_identity_are_an_error(self):
        identity = ops.Identity()
        with pytest.raises(TypeError):
            ops.Sequential(identity)(torch.ones(2), op_kwargs={identity: {"scale": 2}})


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_backward_override_holds_behind_a_linear_without_bias(override):
    """The activation's gradient goes to the products as it is; TE's activation quantizes it."""
    linear = ops.BasicLinear(64, 64)
    x, dy = torch.randn(64, 64), torch.randn(64, 64)
    settings_ = {"backward_override": override, "disable_stochastic_rounding": True}
    with fuser.autocast(recipe=recipe.NVFP4BlockScaling(**settings_)):
        ops.Sequential(linear, ops.GELU())(x).backward(dy)
        with torch.no_grad():
            h = linear(x)
    dh = fuser.functional.dgelu(dy, h)
    saved = x
    if override == "dequantized":
        quantizer = fuser.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True)
        saved = quantizer(x).dequantize(dtype=torch.float32)
    torch.testing.assert_close(linear.weight.grad, dh.t() @ saved, rtol=0, atol=2e-5)


class TestComputedParameters:
    """torch.nn.utils' hooks put a computed tensor in a parameter's place: its gradient would be lost."""

    @pytest.mark.parametrize("inside", [False, True])
    @pytest.mark.parametrize(
        "reparametrize",
        [
            lambda op: prune.l1_unstructured(op, "weight", 0.5),
            torch.nn.utils.spectral_norm,
            pytest.param(torch.nn.utils.weight_norm, marks=pytest.mark.filterwarnings("ignore::FutureWarning")),
        ],
    )
    def test_is_an_error(self, reparametrize, inside):
        linear = ops.BasicLinear(8, 8)
        model = ops.Sequential(linear, ops.GELU()) if inside else linear
        x = torch.randn(4, 8)
        model(x)
        reparametrize(linear)
        with pytest.raises(RuntimeError, match=r"BasicLinear\.weight is a tensor that requires a gradient"):
            model(x)

    def test_one_look_at_each_call(self, monkeypatch):
        linear = ops.BasicLinear(8, 8)
        linear.mask = torch.ones(8)
        model, looked = ops.Sequential(linear), []
        monkeypatch.setattr(fuser_module, "_reject_computed_parameters", looked.append)
        for training in (True, True, False):  # fused, not, anew
            looked.clear()
            model.train(training)(torch.ones(2, 8))
            assert looked == [linear]

    def test_without_gradient_it_runs(self):
        linear = ops.BasicLinear(8, 8)
        prune.l1_unstructured(linear, "weight", 0.5)
        linear.weight_orig.requires_grad_(False)
        x = torch.randn(4, 8)
        torch.testing.assert_close(linear(x), x @ linear.weight.t())

    def test_constants_are_no_parameters(self):
        class Masked(BasicOperation):
            def __init__(self):
                super().__init__()
                self.mask = torch.tensor([1.0, 0.0])

            def op_forward(self, ctx, input_, **kwargs):
                return input_ * self.mask

            def op_backward(self, ctx, grad_output):
                return grad_output * self.mask

        x = torch.ones(2, requires_grad=True)
        Masked()(x).sum().backward()
        assert torch.equal(x.grad, torch.tensor([1.0, 0.0]))


class TestWrongReturns:
    """Fusions and operations that return something else are named, with what was expected."""

    @staticmethod
    def run(forward=None, backward=None):
        class Odd(FusedOperation):
            def fuser_forward(self, ctxs, input_, **kwargs):
                return (input_ * 1, [()] * 2) if forward is None else forward(input_)

            def fuser_backward(self, ctxs, grad_output, **kwargs):
                return (grad_output, [()] * 2, [()] * 2) if backward is None else backward(grad_output)

        with fusions(forward_backward=lambda ops_, *, recipe: [ops_[0], Odd(ops_[1:])], only=True):
            model = ops.Sequential(*[ops.ConstantScale(1.0) for _ in range(3)])
            model(torch.ones(2, requires_grad=True)).sum().backward()

    def test_right_ones(self):
        self.run()

    @pytest.mark.parametrize(
        "result",
        [None, [], (None, [(), ()]), (1.0, [(), ()]), ("x",), ("y", None), ("y", 3), ("y", [()]), ("y", [None, (1,)])],
    )
    def test_forward(self, result):
        def forward(x):
            return tuple(x if part == "y" else part for part in result) if isinstance(result, tuple) else result

        with pytest.raises(RuntimeError, match=r"Expected (Odd|op 2)"):
            self.run(forward=forward)

    @pytest.mark.parametrize(
        "result",
        [
            None,
            ("y", [(), ()]),
            (None, [(), ()], [(), ()]),
            (2.0, [(), ()], [(), ()]),
            ("y", [()], [(), ()]),
            ("y", [(), ()], [()]),
            ("y", None, [(), ()]),
            ("y", [None, ()], [(), ()]),
            ("y", [(), ()], [(), 3]),
        ],
    )
    def test_backward(self, result):
        def backward(dy):
            return tuple(dy if part == "y" else part for part in result) if isinstance(result, tuple) else result

        with pytest.raises(RuntimeError, match="Expected Odd"):
            self.run(backward=backward)

    @pytest.mark.parametrize("result", [None, 3, [None], [torch.nn.Identity()], torch.ones(2)])
    def test_fusion_function(self, result):
        def odd_fusion(ops_, *, recipe):
            return result

        with (
            fusions(forward=odd_fusion),
            pytest.raises(RuntimeError, match="Expected fusion function odd_fusion to return a list of operations"),
        ):
            ops.Sequential(ops.ConstantScale(1.0))(torch.ones(2))

    def test_basic_operation_that_returns_nothing(self):
        class Nothing(BasicOperation):
            def op_forward(self, ctx, input_, **kwargs):
                return None

            def op_backward(self, ctx, grad_output):
                return grad_output

        with pytest.raises(RuntimeError, match="Expected Nothing to return a tensor as its output, but got NoneType"):
            ops.Sequential(Nothing(), ops.GELU())(torch.ones(2))

    def test_extra_output_that_is_no_tensor(self):
        class Odd(BasicOperation):
            num_extra_outputs = 1

            def op_forward(self, *args, **kwargs):
                raise NotImplementedError

            op_backward = op_forward

            def fuser_forward(self, ctxs, input_, **kwargs):
                return input_ * 1, [(3.0,)]

        with pytest.raises(
            RuntimeError, match="Expected Odd to return a tensor as extra output 0 of op 0, but got float"
        ):
            Odd()(torch.ones(2))


class TestScopesInAnyOrder:
    """`fusions(only=True)` hides others; those may go while they are hidden."""

    @pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
    def test_nothing_is_left(self, order):
        before = list(OperationFuser.forward_fusion_functions)

        def make():
            return lambda ops_, *, recipe: ops_

        functions = [make() for _ in range(4)]
        scopes = [
            fusions(forward=function, only=only).register()
            for function, only in zip(functions, (False, True, False, True), strict=True)
        ]
        present = set(range(4))
        for i in order:
            scopes[i].remove()
            present.discard(i)
            start = max((j for j in present if j in (1, 3)), default=-1)
            wanted = [functions[j] for j in sorted(present) if j >= start]
            assert ([] if start >= 0 else before) + wanted == OperationFuser.forward_fusion_functions
        assert before == OperationFuser.forward_fusion_functions


@pytest.mark.parametrize("hooked", [False, True])
def test_threads_share_a_model(hooked, monkeypatch):
    """Each call runs as it was planned, whatever another thread plans of the same operations meanwhile."""
    model, x = ops.Sequential(ops.LayerNorm(8), ops.Linear(8, 8), ops.GELU(), ops.Linear(8, 8)), torch.randn(4, 8)
    if hooked:
        model[2].register_forward_hook(lambda module, args, output: None)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(model(x).sum(), parameters)
    done, planned = threading.Event(), OperationFuser.maybe_fuse_ops

    def maybe_fuse_ops(self, *args):
        planned(self, *args)
        time.sleep(0.001)  # the other thread's turn

    def evaluate():
        while not done.is_set():
            with torch.no_grad(), fuser.autocast(recipe=recipe.Float8CurrentScaling()):
                model(x)

    monkeypatch.setattr(OperationFuser, "maybe_fuse_ops", maybe_fuse_ops)
    thread = threading.Thread(target=evaluate)
    thread.start()
    try:
        for _ in range(20):
            grads = torch.autograd.grad(model(x).sum(), parameters)
            assert all(torch.equal(one, other) for one, other in zip(grads, expected, strict=True))
    finally:
        done.set()
        thread.join()
