"""Base classes of operations: contexts, channels, quantizers and their recipe state, the interface to the fuser."""

import copy
import sys

import pytest
import torch

import fuser
from fuser import ops, recipe
from fuser.op import BasicOperation, FusedOperation, FusibleOperation, OperationContext
from fuser.quantization.state import FP8GlobalStateManager

pytestmark = pytest.mark.check


class Double(BasicOperation):
    def op_forward(self, ctx, input_, **kwargs):
        ctx.save_for_backward(input_)
        return input_ * 2

    def op_backward(self, ctx, grad_output):
        (input_,) = ctx.saved_tensors
        assert input_.shape == grad_output.shape
        return grad_output * 2


class TwoInTwoOut(BasicOperation):
    num_extra_inputs = 2
    num_extra_outputs = 2

    def op_forward(self, ctx, input_, **kwargs):
        raise NotImplementedError

    def op_backward(self, ctx, grad_output):
        raise NotImplementedError


class TestContext:
    def test_defaults(self):
        ctx = OperationContext()
        assert (ctx.saved_tensors, ctx.to_save, ctx._saved_tensors_range, ctx.requires_grad) == (None, None, None, True)

    def test_second_save_replaces_the_first(self):
        ctx = OperationContext()
        a, b = torch.ones(1), torch.zeros(1)
        ctx.save_for_backward(a)
        ctx.save_for_backward(None, b)
        assert ctx.to_save == (None, b)

    def test_takes_any_attribute(self):
        ctx = OperationContext()
        ctx.dtype = torch.float16
        assert ctx.dtype is torch.float16


class TestFusibleOperation:
    def test_is_abstract(self):
        with pytest.raises(TypeError):
            FusibleOperation()
        with pytest.raises(TypeError):
            BasicOperation()

    @pytest.mark.parametrize("method", ["fuser_forward", "fuser_backward"])
    def test_missing_pass_names_the_class(self, method):
        class Lazy(FusedOperation):
            pass

        op = Lazy([ops.Identity()])
        kwargs = {
            "fuser_forward": {
                "basic_op_extra_inputs": [()],
                "prev_op_grad_output_quantizer": None,
                "next_op_input_quantizer": None,
                "basic_op_kwargs": [{}],
            },
            "fuser_backward": {"basic_op_grad_extra_outputs": [()]},
        }[method]
        with pytest.raises(NotImplementedError, match="Lazy"):
            getattr(op, method)([OperationContext()], torch.ones(1), **kwargs)

    def test_defaults(self):
        op = ops.Identity()
        assert op.is_fused_op is False
        assert op.get_input_quantizer() is None
        assert op.get_grad_output_quantizer() is None
        assert op.pre_first_fuser_forward() is None
        assert op.pre_fuser_forward(requires_grad=True) is None
        assert op.num_quantizers("forward") == op.num_quantizers("backward") == 0
        assert op.get_quantizer_roles("forward") is None
        assert op.get_quantizer("forward", 0) is None


class TestChannels:
    def test_chainable(self):
        op = TwoInTwoOut()
        assert op.set_extra_input_channel(0, "a").set_extra_output_channel(1, "b") is op
        assert op._extra_input_channels == ["a", None]
        assert op._extra_output_channels == [None, "b"]
        assert op._extra_output_to_caller == [True, True]

    def test_rebinding_and_unbinding(self):
        op = TwoInTwoOut().set_extra_input_channel(0, "a").set_extra_input_channel(0, "b")
        assert op._extra_input_channels[0] == "b"
        op.set_extra_input_channel(0, None)
        assert op._extra_input_channels[0] is None
        op.set_extra_output_channel(0, "c", output_to_caller=False)
        assert op._extra_output_to_caller == [False, True]
        op.set_extra_output_channel(0, None, output_to_caller=False)
        assert op._extra_output_to_caller == [True, True]

    @pytest.mark.parametrize("setter", ["set_extra_input_channel", "set_extra_output_channel"])
    @pytest.mark.parametrize("index", [-1, 2])
    def test_index_out_of_range(self, setter, index):
        with pytest.raises(IndexError, match="out of range"):
            getattr(TwoInTwoOut(), setter)(index, 3)  # the index is checked before the channel

    @pytest.mark.parametrize("setter", ["set_extra_input_channel", "set_extra_output_channel"])
    @pytest.mark.parametrize("channel", ["", 3, b"x"])
    def test_channel_must_be_a_name(self, setter, channel):
        op = TwoInTwoOut()
        op._extra_tensor_channels_locked = True  # the channel is checked before the lock
        with pytest.raises(ValueError, match="non-empty string"):
            getattr(op, setter)(0, channel)

    @pytest.mark.parametrize("value", [0, 1, None, "yes"])
    def test_output_to_caller_must_be_a_bool(self, value):
        with pytest.raises(TypeError, match="output_to_caller must be a bool"):
            TwoInTwoOut().set_extra_output_channel(0, "a", output_to_caller=value)

    @pytest.mark.parametrize("setter", ["set_extra_input_channel", "set_extra_output_channel"])
    def test_locked_for_good_once_a_fuser_was_built(self, setter):
        op = TwoInTwoOut()
        fuser.OperationFuser([op])
        assert op._extra_tensor_channels_locked
        for channel in ("a", None):
            with pytest.raises(RuntimeError, match="already captured its channel routing"):
                getattr(op, setter)(0, channel)

    def test_locked_by_calling_the_operation_alone(self):
        op = ops.MakeExtraOutput()
        op(torch.ones(2))
        with pytest.raises(RuntimeError, match="already captured"):
            op.set_extra_output_channel(0, "a")

    def test_count_may_be_set_per_instance(self):
        class Variable(TwoInTwoOut):
            def __init__(self, count):
                self.num_extra_inputs = count
                super().__init__()

        assert len(Variable(5)._extra_input_channels) == 5


class TestCompute:
    def test_bare_gradient_is_enough_without_parameters(self):
        x = torch.randn(3, 4, requires_grad=True)
        Double()(x).sum().backward()
        torch.testing.assert_close(x.grad, torch.full_like(x, 2.0), rtol=0, atol=0)

    @pytest.mark.parametrize("make", [tuple, list, iter], ids=["tuple", "list", "iterator"])
    @pytest.mark.parametrize("grads", [(), [], iter(())], ids=["tuple", "list", "iterator"])
    def test_gradients_come_in_any_pair(self, make, grads):
        class Pair(Double):
            def op_backward(self, ctx, grad_output):
                return make((grad_output * 2, grads))

        x = torch.randn(3, 4, requires_grad=True)
        Pair()(x).sum().backward()
        torch.testing.assert_close(x.grad, torch.full_like(x, 2.0), rtol=0, atol=0)

    def test_no_gradient_at_all(self):
        class Nothing(Double):
            def op_backward(self, ctx, grad_output):
                return None

        x = torch.randn(3, 4, requires_grad=True)
        Nothing()(x).sum().backward()
        assert x.grad is None

    def test_operation_with_extra_tensors_must_override_the_fuser_methods(self):
        class Wrong(Double):
            num_extra_inputs = 1

        with pytest.raises(RuntimeError, match="should override `fuser_forward`"):
            Wrong()(torch.ones(2), torch.ones(2))
        with pytest.raises(RuntimeError, match="should override `fuser_backward`"):
            Wrong().fuser_backward([OperationContext()], torch.ones(2), basic_op_grad_extra_outputs=[()])

    @pytest.mark.parametrize("op_class", [ops.AddExtraInput, ops.MakeExtraOutput])
    @pytest.mark.parametrize("pass_", ["forward", "backward"])
    def test_operations_with_extra_tensors_refuse_the_simple_methods(self, op_class, pass_):
        with pytest.raises(RuntimeError, match=f"overrides `fuser_{pass_}`"):
            getattr(op_class(), f"op_{pass_}")(OperationContext(), torch.ones(2))

    def test_an_error_says_in_which_operation_it_arose(self):
        """Rows of 16 are too few for MXFP8's columnwise copy; the shape alone does not say whose."""
        model = ops.Sequential(ops.ReLU(), ops.Reshape((-1, 64)), ops.Linear(64, 64, bias=False))
        with fuser.autocast(recipe=recipe.MXFP8BlockScaling()), pytest.raises(ValueError, match="M % 32") as caught:
            model(torch.ones(16, 64))
        assert str(caught.value).startswith(
            "In forward, operation 2 BasicLinear(in_features=64, out_features=64): MXFP8 needs M % 32"
        )

        class Fails(Double):
            def op_backward(self, ctx, grad_output):
                raise ArithmeticError("no")

        y = ops.Sequential(Double(), Fails())(torch.ones(2, requires_grad=True)).sum()
        for _ in range(2):  # said once
            with pytest.raises(ArithmeticError, match=r"^In backward, operation 1 Fails\(\): no$"):
                y.backward(retain_graph=True)

    def test_an_error_of_a_fusion_names_its_operations(self):
        """Those of a part around a hook count from the start of the whole pipeline."""
        model = ops.Sequential(ops.Identity(), ops.Linear(64, 32), ops.GELU()).bfloat16()
        model[1].name = model[1].basic_ops[0].name = "gate"
        fusion = r"In forward, ForwardLinearBiasActivation of operation 1 BasicLinear\(in.*\) 'gate', 2 Bias\(\): "
        with pytest.raises(ValueError, match=f"^{fusion}.*must be in_features"):
            model(torch.ones(2, 32, dtype=torch.bfloat16))
        model[0].register_forward_hook(lambda *_: None)
        with pytest.raises(ValueError, match=f"^{fusion}"):
            model(torch.ones(2, 32, dtype=torch.bfloat16))

    @pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
    def test_an_error_without_a_plain_text_has_a_note(self):
        class Fails(Double):
            def op_forward(self, ctx, input_, **options):
                raise OSError(5, "no disk")

        with pytest.raises(OSError) as caught:
            Fails()(torch.ones(2))
        assert caught.value.args == (5, "no disk")
        assert caught.value.__notes__ == ["In forward, operation 0 Fails()"]

    def test_unknown_keyword(self):
        with pytest.raises(TypeError, match="color"):
            ops.ConstantScale(2.0)(torch.ones(2), color="red")

    @pytest.mark.parametrize("grads", [(), (None, None)])
    def test_wrong_number_of_parameter_gradients(self, grads):
        class Wrong(ops.Bias):
            def op_backward(self, ctx, grad_output):
                return grad_output, grads

        with pytest.raises(RuntimeError, match=f"Expected op 0 to generate 1 param grads, but got {len(grads)}"):
            Wrong(4)(torch.ones(2, 4)).sum().backward()


class TestFusedOperation:
    def test_needs_basic_operations(self):
        with pytest.raises(ValueError, match="without specifying its corresponding basic operations"):
            FusedOperation([])

    def test_quantizers_are_those_of_the_ends(self):
        linear = ops.Linear(32, 32, bias=False)
        fused = FusedOperation([linear.basic_ops[0], ops.Quantize(backward=True)])
        assert fused.is_fused_op
        for op in fused.basic_ops:
            op.reset_recipe_state(recipe=recipe.DelayedScaling())
        assert fused.get_input_quantizer() is fused.basic_ops[0].get_quantizer("forward", 0)
        assert fused.get_grad_output_quantizer() is fused.basic_ops[1].get_quantizer("backward", 0)

    def test_preparation_reaches_all(self):
        calls = []

        class Watch(ops.Identity):
            def pre_first_fuser_forward(self):
                calls.append("first")

            def pre_fuser_forward(self, *, requires_grad):
                calls.append(requires_grad)

        fused = FusedOperation([Watch(), Watch()])
        fused.pre_first_fuser_forward()
        fused.pre_fuser_forward(requires_grad=False)
        assert calls == ["first", "first", False, False]
        calls.clear()
        fused(torch.ones(2))
        fused(torch.ones(2))  # a new fuser at every call
        assert calls == ["first", "first", False, False] * 2


def delayed(**kwargs):
    return recipe.DelayedScaling(amax_history_len=4, **kwargs)


class TestRecipeState:
    def test_no_recipe_no_quantizers(self):
        op = ops.Quantize(backward=True)
        op.reset_recipe_state(recipe=None)
        assert op._fp8_metas is None
        assert op._quantizers is None

    def test_modes_without_quantizers(self):
        op = ops.Quantize()
        op.reset_recipe_state(recipe=delayed())
        assert op._fp8_metas["backward"] is None
        assert op._quantizers["backward"] == []
        assert set(op._fp8_metas["forward"]) >= {"scaling_fwd", "recipe", "fp8_group"}
        assert op.get_grad_output_quantizer() is None
        with pytest.raises(IndexError):
            op.get_quantizer("forward", 1)

    def test_roles_must_match(self):
        class Wrong(ops.Quantize):
            def get_quantizer_roles(self, mode):
                return [fuser.QuantizerRole(), fuser.QuantizerRole()]

        with pytest.raises(AssertionError, match="2 quantizer roles"):
            Wrong().reset_recipe_state(recipe=delayed())

    def test_equal_values_keep_the_quantizers(self):
        op = ops.Quantize()
        op.reset_recipe_state(recipe=delayed())
        quantizer = op.get_quantizer("forward", 0)
        new = delayed()
        op.reset_recipe_state(recipe=new)
        assert op.get_quantizer("forward", 0) is quantizer
        assert op._fp8_metas["forward"]["recipe"] is new

    def test_another_type_starts_anew(self):
        op = ops.Quantize()
        op.reset_recipe_state(recipe=delayed())
        op.reset_recipe_state(recipe=recipe.Float8CurrentScaling())
        assert isinstance(op.get_quantizer("forward", 0), fuser.Float8CurrentScalingQuantizer)

    @pytest.mark.parametrize("length", [2, 9])
    def test_history_length_changes(self, length):
        op = ops.Quantize()
        op.reset_recipe_state(recipe=delayed())
        state = op._fp8_metas["forward"]["scaling_fwd"]
        state.amax_history.copy_(torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
        state.scale.fill_(7.0)
        op.reset_recipe_state(recipe=recipe.DelayedScaling(amax_history_len=length))
        history = op._fp8_metas["forward"]["scaling_fwd"].amax_history
        expected = torch.zeros(length, 1)
        expected[: min(length, 4), 0] = torch.tensor([1.0, 2.0, 3.0, 4.0])[:length]
        assert torch.equal(history, expected)
        quantizer = op.get_quantizer("forward", 0)
        assert quantizer.scale.item() == 7.0
        assert quantizer.amax.data_ptr() == history.data_ptr()

    def test_new_values_reach_the_quantizers(self):
        """TE keeps quantizers of the old format for good."""
        op = ops.Quantize(forward=False, backward=True)
        op.reset_recipe_state(recipe=delayed(fp8_format=recipe.Format.HYBRID))
        state = op._fp8_metas["backward"]["scaling_bwd"]
        state.amax_history[1] = 2.0
        state.scale.fill_(57344 / 2.0)
        op.reset_recipe_state(recipe=delayed(fp8_format=recipe.Format.E4M3, margin=1))
        quantizer = op.get_quantizer("backward", 0)
        assert quantizer(torch.ones(16, 16))._fp8_dtype == fuser.DType.kFloat8E4M3
        assert quantizer.scale.item() == 448 / 2.0 / 2

    def test_delayed_slots_of_a_custom_recipe_keep_their_history(self):
        from fuser.quantization.state import DelayedScalingRequest

        def custom(margin):
            return recipe.CustomRecipe(qfactory=lambda role: DelayedScalingRequest(amax_history_len=4, margin=margin))

        op = ops.Quantize()
        with pytest.warns(UserWarning, match="without quantizer roles"):
            op.reset_recipe_state(recipe=custom(0))
            state = op._fp8_metas["forward"]["scaling_fwd"].delayed_state
            state.amax_history[1] = 2.0
            state.scale.fill_(448 / 2.0)
            op.reset_recipe_state(recipe=custom(3))
        quantizer = op.get_quantizer("forward", 0)
        assert quantizer.scale.item() == 448 / 2.0 / 8
        assert op._fp8_metas["forward"]["scaling_fwd"].delayed_state.amax_history[1].item() == 2.0
        assert op.get_extra_state().numel() == 0

    def test_recipe_changed_in_place(self):
        one = recipe.Float8CurrentScaling()
        op = ops.Quantize()
        op.reset_recipe_state(recipe=one)
        one.use_power_2_scales = True
        op.reset_recipe_state(recipe=one)
        assert op.get_quantizer("forward", 0).force_pow_2_scales

    def test_history_survives_calls_without_recipe(self):
        """TE drops the state at the first forward outside autocast, e.g. an evaluation."""
        op = ops.Sequential(ops.Quantize())
        x = torch.full((16, 16), 3.0)
        with fuser.autocast(recipe=delayed()):
            op(x)
        state = op[0]._fp8_metas["forward"]["scaling_fwd"]
        assert state.amax_history.max() == 3.0
        assert state.scale.item() == pytest.approx(448 / 3.0)
        op(x)
        assert op[0].get_quantizer("forward", 0) is None
        assert op.state_dict()["0._extra_state"].numel() > 0
        with fuser.autocast(recipe=delayed()):
            op(x)
            assert op[0]._fp8_metas["forward"]["scaling_fwd"] is state

    def test_registered_inside_autocast_only(self):
        op = ops.Quantize()
        op.reset_recipe_state(recipe=delayed())
        assert not FP8GlobalStateManager.registered_states()
        with fuser.autocast(recipe=delayed()):
            op(torch.ones(16, 16))
            op(torch.ones(16, 16))
        assert FP8GlobalStateManager.registered_states() == [op._fp8_metas["forward"]["scaling_fwd"]]

    def test_copy_has_its_own_registered_state(self):
        """TE's copies keep the original's place in the global buffers, so that their scales never update."""
        model = ops.Sequential(ops.Quantize())
        x = torch.full((16, 16), 3.0)
        with fuser.autocast(recipe=delayed()):
            model(x)
        twin = copy.deepcopy(model)
        with fuser.autocast(recipe=delayed()):
            twin(x * 2)
        original = model[0].get_quantizer("forward", 0)
        copied = twin[0].get_quantizer("forward", 0)
        assert original.scale.item() == pytest.approx(448 / 3.0)
        assert copied.scale.item() == pytest.approx(448 / 6.0)
