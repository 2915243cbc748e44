"""Scales of delayed scaling in converted models: a warning where a forward pass finds none, saving and loading them."""

import copy
import io
import re
import warnings

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fuser
from fuser.quantization.state import DelayedScalingRequest
from fuser.recipe import CustomRecipe, DelayedScaling, MXFP8BlockScaling

UNSET = "delayed scaling has seen no step, so its scales are still 1"
DROPPED = "the scales and amax histories of delayed scaling"


def small_weights():
    """Two linear layers with weights of about 1e-3, which E4M3 takes for zero without a scale, unconverted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.ReLU(), nn.Linear(128, 32, bias=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.01)
    return model


def inputs():
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(1))


def train(model, steps=3):
    for _ in range(steps):
        model(inputs()).square().sum().backward()


def error(model, wanted):
    """Relative error of a converted model's output without gradients."""
    with torch.no_grad():
        y = wanted(inputs())
        return ((model(inputs()) - y).norm() / y.norm()).item()


class TestWarning:
    def test_once_for_a_model_evaluated_before_any_step(self):
        plain = small_weights()
        model = fuser.convert(plain, DelayedScaling(), inplace=False)
        with pytest.warns(UserWarning, match=f"^0: {UNSET}") as caught:
            assert error(model, plain) > 0.5  # what it warns of
        assert len(caught) == 1  # though there are two linear layers
        error(model, plain)
        duplicate = copy.deepcopy(model)
        error(duplicate, plain)

    def test_each_model_has_its_own(self):
        for _ in range(2):
            with pytest.warns(UserWarning, match=UNSET):
                error(fuser.convert(small_weights(), DelayedScaling()), small_weights())

    def test_layers_that_are_called_apart(self):
        model = fuser.convert(nn.ModuleList(small_weights()), DelayedScaling())
        with torch.no_grad():
            with pytest.warns(UserWarning, match=f"^2: {UNSET}"):
                model[2](torch.ones(16, 128))
            model[0](inputs())

    def test_an_expert_that_no_step_has_called(self):
        experts = fuser.convert(nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)]), DelayedScaling())
        train(experts[0])
        with torch.no_grad():
            experts[0](inputs())
            with pytest.warns(UserWarning, match=f"^1: {UNSET}"):
                experts[1](inputs())

    def test_a_state_dict_has_no_scales_and_an_average_made_before_training_neither(self):
        plain = small_weights()
        model = fuser.convert(plain, DelayedScaling(), inplace=False)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        train(model)
        average.update_parameters(model)
        loaded = fuser.convert(small_weights(), DelayedScaling())
        loaded.load_state_dict(model.state_dict())
        for one in (average, loaded):
            with pytest.warns(UserWarning, match=UNSET):
                error(one, plain)

    def test_the_remedy_that_it_names(self):
        plain = small_weights()
        model = fuser.convert(plain, DelayedScaling(), inplace=False)
        for _ in range(2):  # linear layers in a row
            model(inputs())
        assert error(model, plain) < 0.06  # 4e-2 of each of two products

    @pytest.mark.parametrize("length", [1, 16])
    def test_none_after_a_step(self, length):
        model = fuser.convert(small_weights(), DelayedScaling(amax_history_len=length))
        train(model, steps=1)
        error(model, small_weights())

    def test_none_where_no_scale_is_kept(self):
        error(fuser.convert(small_weights(), MXFP8BlockScaling()), small_weights())
        error(fuser.convert(nn.Sequential(nn.ReLU(), nn.SiLU()), DelayedScaling()), nn.ReLU())
        model = fuser.convert(small_weights(), DelayedScaling())
        with fuser.autocast(enabled=False):
            assert error(model, small_weights()) < 1e-5

    def test_none_in_the_first_pass_of_a_checkpoint(self):
        model = fuser.convert(small_weights(), DelayedScaling())
        x = inputs().requires_grad_()
        fuser.checkpoint(model, x, use_reentrant=True).sum().backward()

    def test_of_a_compiled_model(self):
        model = fuser.convert(small_weights(), DelayedScaling())
        compiled = torch.compile(model, backend="eager")
        with torch.no_grad(), pytest.warns(UserWarning, match=UNSET):
            compiled(inputs())


class TestJumps:
    """What the guide says of gradients whose size changes from one step to the next."""

    def shares(self, sizes, **options):
        """For each layer, the last first: what was saturated, and what flushed, of its gradient in each step."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        fuser.convert(model, DelayedScaling(**options))
        with fuser.statistics(model) as s:
            for size in sizes:
                (model(inputs()) * size).sum().backward()
        found = [[record.measurement for record in s.of(layer, "grad_output")] for layer in "20"]
        return [[(one.saturated, one.flushed) for one in of_layer] for of_layer in found]

    def test_growth_saturates_one_more_layer_with_each_step(self):
        with pytest.warns(UserWarning, match="the gradient of an output has changed") as caught:
            last, first = self.shares([1, 1, 1, 1e6, 1e6, 1e6])
        assert [str(one.message)[:2] for one in caught] == ["2:", "0:"]  # once each
        times = "is 1000000 times the largest number of its format: what is larger than that saturated"
        assert times in str(caught[0].message)
        assert [saturated > 0.4 for saturated, _ in last] == [False, False, False, True, False, False]
        assert [saturated > 0.4 for saturated, _ in first] == [False, False, False, False, True, False]

    @pytest.mark.parametrize(("factor", "warns"), [(255, False), (257, True)])
    def test_from_which_growth_on_it_is_said(self, factor, warns):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.shares([1, 1, 1, factor])
        assert [str(one.message)[:2] for one in caught] == ["2:"] * warns

    def test_what_vanishes_is_said(self):
        with pytest.warns(UserWarning, match="^2: .* below the smallest number of its format: all of it became zero"):
            self.shares([1, 1, 1, 1e-12])

    def test_the_first_steps_are_no_jump(self):
        self.shares([1e-9, 1e-9, 1e-9, 1e-7])
        self.shares([1e7, 1e7, 1e7, 2e8])

    def test_what_shrinks_is_flushed_for_as_long_as_the_history(self):
        _, first = self.shares([1, 1, 1, *[1e-9] * 6], amax_history_len=4)
        assert [flushed > 0 for _, flushed in first] == [False] * 3 + [True] * 4 + [False] * 2


class TestSavingAndLoading:
    def trained(self):
        model = fuser.convert(small_weights(), DelayedScaling())
        train(model)
        return model

    def test_a_model_goes_on_as_the_one_that_was_saved(self):
        model, file = self.trained(), io.BytesIO()
        torch.save({"model": model.state_dict(), "scaling": fuser.scaling_state(model)}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        fresh = fuser.convert(small_weights(), DelayedScaling())
        fresh.load_state_dict(loaded["model"])
        fuser.load_scaling_state(fresh, loaded["scaling"])
        with torch.no_grad():
            assert torch.equal(fresh(inputs()), model(inputs()))
        for one in (model, fresh):
            one.zero_grad()
            train(one, steps=2)
        for some, other in zip(model.parameters(), fresh.parameters(), strict=True):
            assert torch.equal(some.grad, other.grad)
        assert fuser.scaling_state(model).keys() == fuser.scaling_state(fresh).keys() == {"0", "2"}
        for name, state in fuser.scaling_state(model).items():
            assert torch.equal(fuser.scaling_state(fresh)[name], state)

    def test_into_a_model_that_was_called_and_into_an_average(self):
        model = self.trained()
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        called = fuser.convert(small_weights(), DelayedScaling())
        train(called, steps=1)
        for module in (called, average.module):
            fuser.load_scaling_state(module, fuser.scaling_state(model))
            with torch.no_grad():
                assert torch.equal(module(inputs()), model(inputs()))

    def test_empty_where_nothing_is_kept(self):
        assert fuser.scaling_state(small_weights()) == {}
        model = fuser.convert(small_weights(), MXFP8BlockScaling())
        train(model, steps=1)
        assert fuser.scaling_state(model) == {}

    def test_a_layer_that_no_step_has_called_is_saved_and_loaded_too(self):
        experts = fuser.convert(nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)]), DelayedScaling())
        train(experts[0])
        state = fuser.scaling_state(experts)
        assert {name: one.numel() > 0 for name, one in state.items()} == {"0": True, "1": False}
        fresh = fuser.convert(nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)]), DelayedScaling())
        fuser.load_scaling_state(fresh, state)
        assert all(torch.equal(one, state[name]) for name, one in fuser.scaling_state(fresh).items())

    def test_into_a_model_that_gets_its_weights_afterwards(self):
        """Scales stay where parameters go from one device to another, as to a GPU."""
        model = self.trained()
        with torch.device("meta"):
            fresh = fuser.convert(small_weights(), DelayedScaling())
        fuser.load_scaling_state(fresh, fuser.scaling_state(model))
        fresh.load_state_dict(model.state_dict(), assign=True)
        with torch.no_grad():
            assert torch.equal(fresh(inputs()), model(inputs()))

    def test_a_part_of_the_layers(self):
        model, trained = fuser.convert(small_weights(), DelayedScaling()), fuser.scaling_state(self.trained())
        train(model, steps=1)
        before = fuser.scaling_state(model)
        fuser.load_scaling_state(model, {**before, "2": trained["2"]})
        after = fuser.scaling_state(model)
        assert torch.equal(after["0"], before["0"]) and torch.equal(after["2"], trained["2"])
        assert not torch.equal(before["2"], trained["2"])

    def test_a_tied_layer_by_either_name(self):
        def tied():
            model = small_weights()
            model.again = model[2]
            return fuser.convert(model, DelayedScaling())

        model = tied()
        train(model[:3], steps=1)
        state = fuser.scaling_state(model)
        state["again"] = state.pop("2")
        fresh = tied()
        fuser.load_scaling_state(fresh, state)
        assert torch.equal(fuser.scaling_state(fresh)["2"], state["again"])

    @pytest.mark.parametrize("recipe", [None, MXFP8BlockScaling(), {"1": MXFP8BlockScaling()}])
    def test_what_drops_them_says_so_and_how_to_keep_them(self, recipe):
        model, wanted = self.trained(), self.trained()
        with pytest.warns(UserWarning, match=re.escape(f"{DROPPED} of ['0', '2'] are dropped. To keep")) as caught:
            state = fuser.scaling_state(model)
            fuser.convert(model, recipe)
        assert len(caught) == 1 and caught[0].filename == __file__
        with torch.no_grad():
            model(inputs())  # under a recipe of another class it is the call that drops them
        fuser.convert(model, DelayedScaling())
        assert not any(one.numel() for one in fuser.scaling_state(model).values())
        fuser.load_scaling_state(model, state)
        with torch.no_grad():
            assert torch.equal(model(inputs()), wanted(inputs()))

    def test_only_the_layers_that_lose_them_are_named(self):
        model = self.trained()
        with pytest.warns(UserWarning, match=re.escape(f"{DROPPED} of ['2'] are")):
            fuser.convert(model, {"0": DelayedScaling(margin=1), "2": None})
        with pytest.warns(UserWarning, match=re.escape(f"{DROPPED} of ['ConvertedLinear'] are")):
            fuser.convert(model[0], None)

    def test_nothing_is_dropped_where_the_warning_is_an_error(self):
        model, wanted = self.trained(), self.trained()
        with pytest.raises(UserWarning, match=DROPPED):  # every warning is an error in these tests
            fuser.convert(model, None)
        with torch.no_grad():
            assert torch.equal(model(inputs()), wanted(inputs()))

    def test_scales_of_custom_quantizers_are_named_too(self):
        recipe = CustomRecipe(qfactory=lambda role: DelayedScalingRequest())
        model = fuser.convert(small_weights(), recipe)
        train(model)
        with pytest.warns(UserWarning, match="Or convert a copy, inplace=False, also where a CustomRecipe keeps"):
            fuser.convert(model, None)

    def test_no_warning_where_no_scales_are_lost(self):
        """Every warning is an error here."""
        fuser.convert(self.trained(), None, inplace=False)
        fuser.convert(self.trained(), DelayedScaling(amax_history_len=4), pad=True)
        fuser.compare(self.trained(), inputs(), MXFP8BlockScaling(), quiet=True)
        others = fuser.convert(small_weights(), MXFP8BlockScaling())
        train(others)
        uncalled, evaluated = (fuser.convert(small_weights(), DelayedScaling()) for _ in range(2))
        with pytest.warns(UserWarning, match=UNSET):
            error(evaluated, small_weights())  # no step has set a scale
        for model in (uncalled, evaluated, others, small_weights()):
            fuser.convert(model, None)

    def test_what_is_suspended_by_a_call_without_a_recipe_is_saved(self):
        model = self.trained()
        before = fuser.scaling_state(model)
        with fuser.autocast(enabled=False):
            model(inputs())
        assert all(torch.equal(state, before[name]) for name, state in fuser.scaling_state(model).items())
        assert before.keys() == fuser.scaling_state(model).keys()

    def test_bad_input(self):
        state = fuser.scaling_state(self.trained())
        fresh = fuser.convert(small_weights(), DelayedScaling())
        with pytest.raises(ValueError, match=r"state must name linear layers .* got 'blocks.0'"):
            fuser.load_scaling_state(fresh, {"0": state["0"], "blocks.0": state["0"]})
        with pytest.raises(ValueError, match=r"the scales that they have, 1 if .* got none for \['2'\]"):
            fuser.load_scaling_state(fresh, {"0": state["0"]})
        with pytest.raises(ValueError, match=r"got none for \['0', '2'\]"):
            fuser.load_scaling_state(fresh, {})
        assert not any(state.numel() for state in fuser.scaling_state(fresh).values())  # nothing was loaded
        with pytest.raises(ValueError, match="got '1', which is ConvertedReLU"):
            fuser.load_scaling_state(fresh, {"1": state["0"]})
        with pytest.raises(ValueError, match=r"got '0', which is .*recipe=MXFP8BlockScaling"):
            fuser.load_scaling_state(fuser.convert(small_weights(), MXFP8BlockScaling()), state)
        with pytest.raises(ValueError, match=r"got '0', which is Linear.*; model has no such layer: convert it first"):
            fuser.load_scaling_state(small_weights(), state)
        with pytest.raises(TypeError, match="state must be a mapping from names to tensors; got"):
            fuser.load_scaling_state(fresh, [state])
        for function in (fuser.scaling_state, lambda model: fuser.load_scaling_state(model, state)):
            with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module; got"):
                function("model")
