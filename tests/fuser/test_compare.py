"""`fuser.compare` and `fuser.statistics`: right numbers, and a model that is as it was."""

import copy
import functools
import gc
import logging
import math
import warnings
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn.utils import prune

import fuser
import refops
from cuda_kernels import messages
from fuser import comparison, ops, recording
from fuser.pipeline import forward_observers, rows_before_padding
from fuser.quantization.quantizer import quantization_observers
from fuser.quantization.state import DelayedScalingRequest, FP8GlobalStateManager
from fuser.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from refops.display.plot import PlotError
from refops.survey import SCALINGS, Measurement, measure, measure_quantized


def feed_forward():
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(approximate="tanh"), nn.Linear(128, 64))


def inputs(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def compared(model, batch, recipes=None, **options):
    return fuser.compare(model, batch, MXFP8BlockScaling() if recipes is None else recipes, quiet=True, **options)


@pytest.fixture(scope="module")
def two_recipes():
    return compared(feed_forward(), inputs(32, 64), [MXFP8BlockScaling(), NVFP4BlockScaling()])


class Twice(nn.Module):
    """A layer that is called two times in a step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)))


class Stack(nn.Module):
    """Its forward reads the weights of its layers, which are called only where `calls` says so."""

    def __init__(self, calls=()):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.calls = nn.ModuleList(nn.Linear(64, 64) for _ in range(3)), calls

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = (layer(x) if number in self.calls else nn.functional.linear(x, layer.weight, layer.bias)).relu()
        return x


class Routed(nn.Module):
    """A layer whose first number chooses, otherwise under MXFP8 than without it, what `route` gives to two others."""

    def __init__(self, x, route):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.route = nn.Linear(64, 64), route
        self.expert = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64))
        plain = self.layer(x)[0, 0].item()
        quantized = fuser.convert(self.layer, MXFP8BlockScaling(), pad=True, inplace=False)(x)[0, 0].item()
        assert plain != quantized
        self.chosen = lambda x: (x[0, 0].item() > (plain + quantized) / 2) == (plain > quantized)

    def forward(self, x):
        x = self.layer(x)
        return x + self.route(self.expert, x, self.chosen(x))


class Recomputed(nn.Module):
    """Layers with a mean over all rows before the last one, which `pad` appends to; `checkpoint` calls them."""

    def __init__(self, checkpoint):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.n, self.b, self.checkpoint = nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32), checkpoint

    def forward(self, x):
        return self.checkpoint(lambda x: self.b(self.n(self.a(x).relu()).mean((0, 1))), x)


CHECKPOINTS = [
    functools.partial(checkpoint, use_reentrant=False)
    for checkpoint in (fuser.checkpoint, torch.utils.checkpoint.checkpoint)
]


def fewer_rows(expert, x, chosen):
    rows = 20 if chosen else 17
    return nn.functional.pad(expert(x[:rows]), (0, 0, 0, len(x) - rows))


def others(expert, x, chosen):
    return expert(x.roll(0 if chosen else 5, 0))


def two_others(expert, x, chosen):
    """An error of 0.6 of the input: a row of 17 leaves, one comes, and those between them move up."""
    rows = [*range(16), 16] if chosen else [*range(14), 15, 16, 17]
    return nn.functional.pad(expert(x[rows]), (0, 0, 0, len(x) - len(rows)))


def none(expert, x, chosen):
    return expert(x) if chosen else 0 * x


class TestNumbers:
    def test_errors_are_those_of_a_step_by_hand(self):
        model, x = feed_forward(), inputs(32, 64)
        (found,) = compared(model, x, loss=lambda y: y.square().mean()).recipes
        results = []
        for recipe in (None, MXFP8BlockScaling()):
            duplicate, kept = copy.deepcopy(model), []
            duplicate[1].register_forward_hook(lambda *args, kept=kept: kept.append(args[2].detach()))
            if recipe is not None:
                fuser.convert(duplicate, recipe)
            y = duplicate(x)
            loss = y.square().mean()
            loss.backward()
            results.append((loss.item(), y.detach(), kept[0], *(p.grad for p in duplicate.parameters())))
        plain, quantized = results

        def error(*indices):
            a, b = (torch.cat([one[i].flatten() for i in indices]).double() for one in (quantized, plain))
            return ((a - b).norm() / b.norm()).item()

        assert found.recipe == "MXFP8BlockScaling"
        assert found.loss == quantized[0]
        assert found.loss_error == pytest.approx(abs(quantized[0] - plain[0]) / plain[0])
        assert found.output == pytest.approx(error(1))
        assert found.gradient == pytest.approx(error(*range(3, 9)))
        layers = {layer.layer: layer for layer in found.layers}
        assert list(layers) == ["0", "1", "2", "3", ""]
        assert layers["1"].output == pytest.approx(error(2))
        assert layers["0"].output == pytest.approx(0.027, abs=0.005)  # as it leaves: quantized for the linear layer
        assert layers["1"].gradient == pytest.approx(error(5, 6))
        assert layers["3"].gradient == pytest.approx(error(7, 8))
        assert layers["2"].gradient is None
        assert layers[""].output == layers["3"].output == found.output

    def test_statistics_are_those_of_refops(self):
        """MXFP8, rowwise: of the input as the norm emits it, of the weight, and of the gradient that reached it."""
        model, x = feed_forward(), inputs(32, 64)
        (found,) = compared(model, x).recipes
        named = next(one for one in SCALINGS.values() if one.scaling == refops.MXFP8Scaling(refops.E4M3))
        records = {(record.layer, record.tensor): record for record in found.records}
        assert len(records) == 6
        norm = ops.LayerNorm(64)
        wanted = {("1", "weight"): model[1].weight, ("3", "weight"): model[3].weight, ("1", "input"): norm(x)}
        for key, tensor in wanted.items():
            measured = measure(tensor.detach().numpy(), named)
            assert records[key].measurement.sqnr_db == measured.sqnr_db
            assert records[key].measurement.flushed == measured.flushed
            assert records[key].measurement.saturated == measured.saturated
            assert records[key].amax == tensor.abs().max().item()
            assert records[key].shape == tensor.shape

    def test_more_bits_are_better(self, two_recipes):
        found = two_recipes
        assert found["MXFP8BlockScaling"].output < found["NVFP4BlockScaling"].output / 2
        assert found["MXFP8BlockScaling"].gradient < found["NVFP4BlockScaling"].gradient / 2
        with pytest.raises(KeyError, match="must be one of MXFP8BlockScaling, NVFP4BlockScaling; got 'x'"):
            found["x"]

    def test_delayed_scaling_has_learnt_its_scales(self):
        found = compared(feed_forward(), inputs(32, 64) * 1e-4, [DelayedScaling()])
        assert found.recipes[0].output < 0.1

    def test_gradients_that_vanish_have_an_error_of_one(self):
        """Scales of 1 flush the last layer's gradients, so the first's are zero; a layer that is not used has none."""

        def one(amax, scale, fp8_max, recipe):
            return torch.ones_like(scale)

        class WithUnused(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.last, self.gated = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)

            def forward(self, x):
                return self.last(self.first(x)) + 0 * self.gated(x)

        recipes = [DelayedScaling(scaling_factor_compute_algo=one), Float8CurrentScaling()]
        found = compared(WithUnused(), inputs(32, 64), recipes, loss=lambda y: (y * 1e-6).sum())
        tensors = {record.name: record for record in found["DelayedScaling"].records}
        sqnr = {name: tensors[f"{name} grad_output"].measurement.sqnr_db for name in ("first", "last", "gated")}
        assert sqnr == {"first": 0.0, "last": 0.0, "gated": None}
        assert [tensors[f"{name} grad_output"].all_zero for name in ("first", "last", "gated")] == [True, False, True]
        assert {row["layer"]: row.get("grad_output_sqnr_db", 0) for row in found.rows()[:3]} == sqnr
        totals = {line.split()[0]: line for line in str(found).splitlines() if line}
        assert "all zero" in totals["DelayedScaling"]
        assert "all zero" not in totals["Float8CurrentScaling"]
        cells = {line[:17].strip(): line.split()[2:] for line in str(found).splitlines() if "grad_output" in line}
        assert cells["first grad_output"][:2] == ["all", "zero"]
        assert cells["gated grad_output"] == ["all", "zero", "all", "zero"]

    def test_delayed_scaling_warms_up_until_its_scales_settle(self):
        """Each pass uncovers the gradients of one more layer: after it, the errors are those of current scaling."""
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(5)))
        recipes = [DelayedScaling(), Float8CurrentScaling()]
        delayed, current = compared(model, inputs(32, 64), recipes, loss=lambda y: (y * 1e-6).sum())
        assert delayed.warmed_up
        assert current.warmed_up
        assert delayed.gradient == pytest.approx(current.gradient, rel=0.3)
        assert all(record.measurement.flushed < 0.1 for record in delayed.records)

    def test_scales_that_never_settle(self):
        calls = []

        def doubled(amax, scale, fp8_max, recipe):
            calls.append(1)
            return scale * 2

        model, recipe = nn.Sequential(nn.Linear(64, 64)), DelayedScaling(scaling_factor_compute_algo=doubled)
        found = compared(model, inputs(32, 64), {"doubles": recipe, "settles": DelayedScaling()})
        assert [one.warmed_up for one in found] == [False, True]
        assert len(calls) == 2 * (
            1 + 4
        )  # forward and backward; the first pass, and as many as there are states, and two
        assert "Under doubles the scales were still changing after the last pass." in str(found)
        assert "\ndoubles, not warmed up  " in str(found)

    def test_delayed_scaling_of_rules_and_of_custom_quantizers(self):
        """As with the recipe itself, the step that counts has the scales that the step before it made."""
        model, x = nn.Sequential(nn.Linear(64, 64)), inputs(32, 64) * 1e-4
        delayed = DelayedScaling()
        rules = {"recipe": delayed, "mapping": {"0": delayed}, "function": lambda name, module: delayed}
        results = compared(model, x, rules).recipes
        assert results[0].output < 0.1
        assert [one.output for one in results] == [results[0].output] * 3
        custom = CustomRecipe(qfactory=lambda role: DelayedScalingRequest())
        assert compared(model, x, custom).recipes[0].output < 0.1

    @pytest.mark.parametrize("rows", [32, 5])
    def test_a_padded_layer_that_is_called_twice(self, rows):
        """Each call's own rows are compared: 0.4 was found for 5 rows, those of the second call against the first's."""
        (found,) = compared(Twice(), inputs(rows, 64)).recipes
        assert [layer.layer for layer in found.layers] == ["layer", ""]
        assert 0.02 < found.layers[0].output < 0.06

    def test_a_tensor_that_is_quantized_twice_shows_the_worst(self):
        x = inputs(32, 64)
        x[0, 0] = 1e6  # the first call loses the small elements beside it, the second one's inputs are below 1
        found = compared(Twice(), x, Float8CurrentScaling())
        (layer, _), (row, _) = found.recipes[0].layers, found.rows()
        both = [record.measurement for record in layer.records if record.tensor == "input"]
        assert len(both) == 2
        assert both[0].flushed > 0.9 > both[1].flushed
        lowest = both[1].sqnr_db
        assert lowest < both[0].sqnr_db
        assert row["input_sqnr_db"] == lowest
        assert row["input_flushed"] == both[0].flushed
        (line,) = (line for line in str(found).splitlines() if line.startswith("layer input"))
        assert line.endswith(f" {lowest:.1f}")

    def test_all_recipes_by_default_and_ragged_batches(self):
        found = fuser.compare(nn.Linear(64, 32), inputs(3, 64), quiet=True)
        assert [one.recipe for one in found.recipes] == [type(one).__name__ for one in comparison.default_recipes()]
        assert all(0.005 < one.output < 0.3 for one in found.recipes)
        with pytest.raises(ValueError, match="M % 32"):
            compared(nn.Linear(64, 32), inputs(3, 64), pad=False)

    def test_names_and_rules(self):
        rule = {"1": None, "*": MXFP8BlockScaling()}
        found = compared(feed_forward(), inputs(32, 64), {"all": MXFP8BlockScaling(), "but the first": rule})
        assert {record.layer for record in found["but the first"].records} == {"3"}
        assert found["but the first"].output < found["all"].output
        one, other = Float8CurrentScaling(), Float8CurrentScaling(use_power_2_scales=True)
        names = [found.recipe for found in compared(nn.Linear(16, 16), inputs(16, 16), [one, other]).recipes]
        assert names == ["Float8CurrentScaling", "Float8CurrentScaling use_power_2_scales=True"]

    def test_what_stays_in_high_precision_is_said(self):
        model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 10))
        found = compared(model, inputs(32, 64), [MXFP8BlockScaling(), Float8CurrentScaling()])
        assert [len(one.left) for one in found.recipes] == [1, 0]
        assert "left in high precision under MXFP8BlockScaling: 1 (Linear): MXFP8 needs" in str(found)

    def test_operations_of_fuser(self):
        model = ops.Sequential(ops.RMSNorm(64), ops.Linear(64, 128), ops.SwiGLU(), ops.Linear(64, 32))
        (found,) = compared(model, inputs(32, 64)).recipes
        assert [layer.layer for layer in found.layers] == ["0", "1", "2", "3", ""]
        assert {record.name for record in found.records} == {
            f"{layer} {tensor}" for layer in "13" for tensor in ("input", "weight", "grad_output")
        }
        assert 0.005 < found.output < 0.1
        assert found.layers[1].gradient > 0
        assert found.coverage.quantized == found.coverage.in_autocast == found.coverage.layers == 2

    def test_layers_of_one_name_in_all_columns(self):
        """An operation that is the model; a layer whose weight is computed from other parameters."""
        (found,) = compared(ops.Linear(64, 64), inputs(32, 64)).recipes
        (layer,) = found.layers
        assert layer.layer == ""
        assert layer.output == found.output
        assert layer.gradient == found.gradient
        assert len(layer.records) == 3
        model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)), nn.Tanh())
        (found,) = compared(model, inputs(32, 64)).recipes
        assert [layer.layer for layer in found.layers] == ["0", ""]
        assert found.layers[0].gradient > 0
        assert len(found.layers[0].records) == 3

    def test_a_converted_model_is_compared_with_torchs(self):
        model = feed_forward()
        wanted = compared(model, inputs(32, 64))
        fuser.convert(model, NVFP4BlockScaling())
        assert compared(model, inputs(32, 64)) == wanted
        assert isinstance(model[1].recipe, NVFP4BlockScaling)

    def test_a_custom_recipe_without_quantization(self):
        recipe = CustomRecipe(qfactory=lambda role: fuser.IdentityQuantizer())
        (found,) = compared(nn.Linear(32, 32), inputs(32, 32), recipe).recipes
        assert found.output < 1e-6
        assert {record.measurement.sqnr_db for record in found.records} == {math.inf}


class TestWhatIsCompared:
    @pytest.mark.parametrize("calls", [(), (1,)])
    def test_layers_whose_weight_a_parent_reads_are_not_quantized(self, calls):
        found = compared(Stack(calls), inputs(32, 64))
        (one,) = found.recipes
        idle = [f"layers.{number}" for number in range(3) if number not in calls]
        assert one.idle == idle
        assert (one.coverage.quantized, one.coverage.layers) == (len(calls), 3)
        assert one.coverage.parameters == pytest.approx(len(calls) * 64 / (3 * 65))
        assert f"In this run no product of {', '.join(idle)} was quantized: " in " ".join(str(found).split())
        model = fuser.convert(Stack(calls), MXFP8BlockScaling())
        with fuser.statistics(model) as s:
            model(inputs(32, 64)).sum().backward()
        assert s.idle == idle
        assert f"In this run no product of {', '.join(idle)} was quantized: " in " ".join(str(s).split())

    def test_all_that_ran_are_quantized(self):
        rules = {"all": MXFP8BlockScaling(), "one": {"1": MXFP8BlockScaling()}}
        found = compared(feed_forward(), inputs(32, 64), rules)
        assert [one.idle for one in found] == [[], []]
        assert "In this run" not in str(found)
        model = ops.Sequential(ops.Linear(64, 64))
        for enabled in (True, False):
            with fuser.statistics(model) as s, fuser.autocast(enabled=enabled, recipe=MXFP8BlockScaling()):
                model(inputs(32, 64))
            assert s.idle == ([] if enabled else ["0"])

    @pytest.mark.parametrize("route", [fewer_rows, others, two_others, none])
    def test_layers_that_get_other_rows_have_no_error(self, route, tmp_path, figure):
        x = inputs(32, 64)
        found = compared(Routed(x, route), x, plot=tmp_path / "picture.png")
        layers = {layer.layer: layer for layer in found.recipes[0].layers}
        moved = ["expert.0", "expert.1", "expert.2"]
        assert [name for name, layer in layers.items() if layer.moved] == moved
        assert {layers[name].output for name in moved} == {None}
        assert 0.01 < layers["layer"].output < 0.05 < layers[""].output
        assert [row["layer"] for row in found.rows() if row["moved"]] == moved
        lines = str(found).splitlines()
        assert [line.split() for line in lines if "expert.1" in line] == [["expert.1", "moved"]]
        assert any(line.startswith("moved: its input holds other rows") for line in lines)
        title = figure[0].axes[0].get_title("left")
        assert title.startswith("Output of each layer, n/a or left out where it got other rows:")
        assert [label.get_text() for label in figure[0].axes[0].get_yticklabels()] == ["layer", "(model)"]

    def test_layers_that_one_of_the_steps_calls(self):
        """Another expert has the rows under a recipe than without one: of both, legends say what is not a number."""
        x = inputs(32, 64)
        model = Routed(x, lambda experts, x, chosen: experts[0 if chosen else 2](x))
        found = compared(model, x, {"mx": MXFP8BlockScaling(), "none": None})
        quantized, plain = ({layer.layer: layer for layer in one.layers} for one in found.recipes)
        assert [name for name, layer in quantized.items() if layer.moved] == ["expert.0", "expert.2"]
        assert not any(layer.moved for layer in plain.values())
        outputs, gradients = str(found).split("Error of each layer's gradients:")
        (row,) = (line.split() for line in outputs.splitlines() if line.startswith("expert.2"))
        assert row == ["expert.2", "moved", "-"]
        assert "or only one of the two steps called it" in " ".join(outputs.split())
        assert [line for line in outputs.splitlines() if line.startswith("-:")] == [
            "-: it was not seen: not called, or inside of one kernel with its neighbours."
        ]
        assert [line for line in gradients.splitlines() if line.startswith("-:")] == [
            "-: neither this step nor the one that is compared with has a gradient of it."
        ]

    def test_rows_in_other_places_are_told_from_errors(self):
        rows = inputs(64, 32) + 10
        noisy = rows + 0.3 * inputs(64, 32, seed=2)
        swapped, lost, new = (noisy.clone() for _ in range(3))
        swapped[[3, 40]] = noisy[[40, 3]]
        exchanged = comparison.errors._exchanged
        assert exchanged([swapped], [rows]) and exchanged(swapped.split(16), rows.split(16))
        rows_alike = torch.where(torch.arange(64)[:, None] % 2 == 0, rows, rows.roll(1, 0))  # pairs of the same row
        lost[1::2] = lost[::2]  # what told pairs of rows apart is gone
        new[3] = inputs(32, seed=3) + 10
        ray = torch.linspace(0.1, 1, 64)[:, None] * rows[0]  # dense: an error of 5% reaches a neighbour
        for found, wanted in ((noisy, rows), (noisy, rows_alike), (lost, rows), (new, rows), (1.05 * ray, ray)):
            assert not exchanged([found], [wanted])
        assert not exchanged([torch.ones(2, 0)], [torch.ones(2, 0)])
        assert not exchanged([swapped.view(32, 64)], [rows])  # as many numbers, in rows of another length
        assert not exchanged([torch.ones(2, 1), torch.ones(2, 3)], [torch.ones(2, 1), torch.ones(2, 3)])

    def test_layers_that_get_the_same_rows_have_errors(self):
        """Also where they are few, which `pad` appends to."""
        x = inputs(20, 64)
        found = compared(Routed(x, lambda expert, x, chosen: expert(x[:5]).sum(0)), x)
        layers = {layer.layer: layer for layer in found.recipes[0].layers}
        assert list(layers) == ["layer", "expert.0", "expert.1", "expert.2", ""]
        assert not any(layer.moved for layer in layers.values())
        assert all(0.01 < layer.output < 0.1 for layer in layers.values())
        assert "moved" not in str(found)

    @pytest.mark.parametrize("checkpoint", CHECKPOINTS)
    def test_what_is_computed_again_in_backward_is_not_compared(self, checkpoint):
        x = inputs(3, 32, 32).requires_grad_()
        found, plain = (compared(Recomputed(call), x) for call in (checkpoint, lambda layers, x: layers(x)))
        assert [layer.layer for layer in found.recipes[0].layers] == ["a", "n", "b", ""]
        for one, other in zip(found.recipes[0].layers, plain.recipes[0].layers, strict=True):
            assert (one.output, one.gradient, one.moved) == (other.output, other.gradient, False)
            assert one.output > 0

    def test_a_gradient_that_a_recipe_takes_away_is_zero(self):
        x = inputs(32, 64)
        model = Routed(x, none)
        (found,) = compared(model, x, loss=lambda y: y.square().mean()).recipes
        layers = {layer.layer: layer for layer in found.layers}
        assert layers["expert.0"].gradient == layers["expert.2"].gradient == 1.0
        twins = model, fuser.convert(model, MXFP8BlockScaling(), inplace=False)
        for twin in twins:
            twin(x).square().mean().backward()
        wanted, got = (
            torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in twin.parameters()])
            for twin in twins
        )
        assert found.gradient == pytest.approx(((got - wanted).norm() / wanted.norm()).item())


class TestCalls:
    class Model(nn.Module):
        def __init__(self, result):
            super().__init__()
            self.linear, self.result = nn.Linear(32, 32), result

        def forward(self, x, target=None):
            y = self.linear(x)
            return self.result(y, None if target is None else (y - target).square().mean())

    def test_losses(self):
        x, target = inputs(32, 32), inputs(32, 32, seed=2)
        wanted = compared(self.Model(lambda y, loss: loss), (x, target))
        for result in (
            lambda y, loss: {"loss": loss, "logits": y},
            lambda y, loss: SimpleNamespace(loss=loss, logits=y),
        ):
            model = self.Model(result)
            model.linear.load_state_dict({"weight": torch.eye(32), "bias": torch.zeros(32)})
            found = compared(model, {"x": x, "target": target})
            assert found.loss == pytest.approx((x - target).square().mean().item())
            assert found.recipes[0].loss != found.loss
        assert wanted.recipes[0].gradient > 0
        with pytest.raises(ValueError, match="loss must return a scalar tensor; got tensor"):
            compared(nn.Linear(32, 32), x, loss=lambda y: y)
        with pytest.raises(ValueError, match=r"loss must be given for an output whose own loss is no .*; got 3\.0"):
            compared(self.Model(lambda y, loss: {"loss": 3.0}), x)

    def test_outputs_that_are_dataclasses(self):
        @dataclass
        class Inner:
            state: torch.Tensor

        @dataclass
        class Output:
            logits: torch.Tensor
            inner: Inner
            loss: torch.Tensor | None = None

        model = self.Model(lambda y, loss: {"a": Output(y, Inner(y * 2))})
        in_tuple = self.Model(lambda y, loss: (y, y * 2))
        in_tuple.load_state_dict(model.state_dict())
        x = inputs(32, 32)
        assert compared(model, x) == compared(in_tuple, x)
        in_dataclass = self.Model(lambda y, loss: Output(y, Inner(y), loss))
        (found,) = compared(in_dataclass, (x, x)).recipes
        assert found.output > 0
        assert found.loss == pytest.approx(compared(in_dataclass, (x, x)).loss, rel=0.1)

    def test_random_weights_give_every_layer_a_gradient(self):
        """The mean square of a norm's output has none."""
        found = compared(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)), inputs(32, 64))
        assert found.recipes[0].layers[0].gradient < 0.1

    def test_dropout_is_the_same_in_all_steps(self):
        model = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 64))
        (found,) = compared(model, inputs(32, 64)).recipes
        assert found.output < 0.1

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ((torch.zeros(1), torch.zeros(1)), TypeError, "model must be a torch.nn.Module"),
            ((nn.Linear(1, 1, device="meta"), torch.zeros(1)), ValueError, "model must have values to compare"),
            ((nn.Threshold(0, 0), torch.ones(1, dtype=torch.int64)), ValueError, "loss must be given for an output"),
            ((nn.SiLU(), torch.zeros(1), "mxfp8"), TypeError, "recipes must be a recipe, a list .* got 'mxfp8'"),
            ((nn.SiLU(), torch.zeros(1), 3), TypeError, "recipes must be a recipe, a list .* got 3"),
            ((nn.SiLU(), torch.zeros(1), []), ValueError, "recipes must hold at least one"),
            ((nn.SiLU(), torch.zeros(1), [MXFP8BlockScaling()] * 2), ValueError, "recipes must differ"),
            ((nn.SiLU(), torch.zeros(1), ["mxfp8"]), TypeError, "recipes must hold recipes .* got 'mxfp8' as item 0"),
            ((nn.SiLU(), torch.zeros(1), {"a": "mxfp8"}), TypeError, "recipes must map names to .* got 'a': 'mxfp8'"),
            ((nn.SiLU(), torch.zeros(1), {1: None}), TypeError, "recipes must map names to .* got 1: None"),
            ((nn.SiLU(), torch.zeros(1), MXFP8BlockScaling), TypeError, r"one of the class: MXFP8BlockScaling\(\)"),
            ((nn.SiLU(), torch.zeros(1), {"a": MXFP8BlockScaling}), TypeError, "got 'a': .*; make one of the class"),
            (
                (nn.SiLU(), torch.zeros(1), [torch.float8_e4m3fn]),
                TypeError,
                "item 0; make one, such as fuser.recipe",
            ),
            ((nn.SiLU(), torch.zeros(1).numpy()), TypeError, "batch must be one batch of tensors; got an ndarray"),
            (
                (nn.SiLU(), MXFP8BlockScaling()),
                TypeError,
                r"batch must be .*, compare\(model, batch, recipes\); got MXFP8",
            ),
            (
                (nn.SiLU(), [NVFP4BlockScaling]),
                TypeError,
                "batch must be what to call the model with, and recipes come",
            ),
            ((nn.SiLU(), {"a": DelayedScaling()}), TypeError, r"batch must be .*; got {'a': DelayedScaling"),
            ((nn.SiLU(), torch.utils.data.DataLoader([1])), TypeError, "batch must be one .*; got a DataLoader"),
            ((nn.SiLU(), (torch.zeros(1),) * 2), TypeError, "what only the loss needs goes into loss; too many"),
            ((nn.SiLU(), {"x": torch.zeros(1)}), TypeError, "its names are those of arguments; missing .* 'input'"),
        ],
    )
    def test_errors(self, arguments, error, message):
        with pytest.raises(error, match=message):
            fuser.compare(*arguments, quiet=True)

    def test_losses_that_are_none(self):
        with pytest.raises(TypeError, match="loss must be a function of the model's output; got 'mse'"):
            compared(nn.Linear(32, 32), inputs(32, 32), loss="mse")
        opaque = self.Model(lambda y, loss: object())
        with pytest.raises(ValueError, match=r"loss must be given .*; got one of type object$"):
            compared(opaque, inputs(32, 32))

    def test_outputs_beside_a_loss(self):
        """The model's own row says what the summary says: not the error of the loss, its first tensor."""
        x = inputs(32, 32)
        in_tuple = self.Model(lambda y, loss: (loss, y))
        namespace = self.Model(lambda y, loss: SimpleNamespace(loss=loss, logits=y))
        namespace.load_state_dict(in_tuple.state_dict())
        own = compared(namespace, (x, x))
        for found in (own, compared(in_tuple, (x, x), loss=lambda result: result[0])):
            (one,) = found
            assert one.output == one.layers[-1].output == own.recipes[0].output > 0.001
            assert one.layers[-1].layer == ""

    def test_inference_mode(self):
        with torch.inference_mode(), pytest.raises(RuntimeError, match=r"outside of torch.inference_mode"):
            compared(nn.Linear(32, 32), inputs(32, 32))

    def test_how_much_is_quantized(self):
        model = nn.Sequential(nn.Embedding(8, 32), nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 10))
        with_ops = nn.Sequential(ops.Linear(64, 64), nn.Linear(64, 64))
        rules = {"a": {"2": DelayedScaling()}, "b": DelayedScaling(), "c": {"1": None, "*": DelayedScaling()}}
        found = compared(model, torch.arange(8), rules)
        every = sum(p.numel() for p in model.parameters())
        share = [32 * 32 / every, 74 * 32 / every, 42 * 32 / every]
        assert [(one.coverage.quantized, one.coverage.layers) for one in found] == [(1, 3), (3, 3), (2, 3)]
        assert [one.coverage.parameters for one in found] == pytest.approx(share)
        assert f"Quantized under b: 3 of 3 layers with matrices, {share[1]:.1%} of the parameters.\n" in str(found)
        found = compared(
            with_ops, inputs(32, 64), {"in autocast": DelayedScaling(), "by name": {"*": DelayedScaling()}}
        )
        assert [(one.coverage.quantized, one.coverage.in_autocast) for one in found] == [(2, 1), (1, 0)]
        text = " ".join(str(found).split())
        assert (
            "; 1 is an operation of fuser.ops, which needs a fuser.autocast around the step, as here, beside convert."
            in text
        )
        assert "left in high precision under by name: 0 (Linear): an operation of fuser.ops, which takes its" in text
        assert "no product of" not in text  # a recipe was not to quantize it
        assert {record.layer for record in found["by name"].records} == {"1"}

    def test_sizes_that_a_gpu_refuses_are_said(self):
        model = nn.Sequential(nn.Linear(64, 24), nn.Linear(24, 32), nn.Linear(32, 64))
        recipes = [DelayedScaling(), Float8CurrentScaling(), Float8BlockScaling(), MXFP8BlockScaling()]
        found = compared(model, inputs(20, 64), recipes)
        layers = ["0 weight 24x64", "1 weight 32x24"]
        assert [one.refused_on_gpus for one in found] == [layers] * 3 + [[]]
        under = "under DelayedScaling, Float8CurrentScaling, Float8BlockScaling"
        said = f"On a GPU TE refuses FP8 products {under} with a size that is no multiple of 16: {', '.join(layers)}."
        assert said in " ".join(str(found).split())
        assert "On a GPU" not in str(compared(model[2:], inputs(20, 32), DelayedScaling()))  # 20 rows are padded
        unpadded = compared(model, inputs(20, 64), DelayedScaling(), pad=False)
        assert unpadded.recipes[0].refused_on_gpus == [*layers, "2 input 20x32"]
        assert "On a GPU TE refuses FP8 products with a size" in " ".join(str(unpadded).split())

    def test_rules_are_checked_before_a_step_runs(self):
        model = self.Model(lambda y, loss: pytest.fail("a step ran"))
        with pytest.raises(ValueError, match=r"patterns that match names of linear layers, .*; got 'x\*'"):
            compared(model, inputs(32, 32), {"good": MXFP8BlockScaling(), "bad": {"x*": None}})

    def test_warnings_of_the_models_own_are_shown(self):
        class Warns(nn.Linear):
            def __deepcopy__(self, memo):
                warnings.warn("copied", UserWarning, stacklevel=2)
                return Warns(32, 32)

        with pytest.warns(UserWarning, match="^copied$"):
            compared(nn.Sequential(Warns(32, 32)), inputs(32, 32))

    def test_a_weight_that_is_computed_before_each_call(self):
        """Autograd's tensor in the weight's place, which torch does not copy."""
        model, x = feed_forward(), inputs(32, 64)
        prune.l1_unstructured(model[1], "weight", 0.5)
        found = compared(model, x)["MXFP8BlockScaling"]
        assert model[1].weight.grad_fn is not None
        prune.remove(model[1], "weight")
        wanted = compared(model, x)["MXFP8BlockScaling"]
        assert (found.loss, found.output, found.records) == (wanted.loss, wanted.output, wanted.records)


class TestNothingIsTouched:
    def test_model_and_random_numbers(self):
        model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(), nn.Linear(64, 64))
        model[2].eval()
        x = inputs(32, 64).requires_grad_()
        model(x).sum().backward()
        gradient = x.grad
        before = copy.deepcopy(model)
        grads = [p.grad.clone() for p in model.parameters()]
        state, modules = torch.get_rng_state(), dict(model.named_modules())
        fuser.compare(model, x, [DelayedScaling(), NVFP4BlockScaling()], quiet=True)
        assert torch.equal(torch.get_rng_state(), state)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))
        assert all(torch.equal(a, b) for a, b in zip(model.buffers(), before.buffers(), strict=True))
        assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads, strict=True))
        assert [m.training for m in model.modules()] == [m.training for m in before.modules()]
        assert dict(model.named_modules()) == modules
        assert type(model[0]) is nn.Linear
        assert x.grad is gradient
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        assert not quantization_observers

    def test_models_that_copies_hold_on_to(self):
        class Closure(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(32, 32)
                self.run = lambda x: self.linear(x)

            def forward(self, x):
                return self.run(x)

        model = Closure()
        model(inputs(32, 32)).sum().backward()
        gradient, value = model.linear.weight.grad, model.linear.weight.grad.clone()
        with pytest.raises(ValueError, match=r"computed with its own parameters.*got gradients of .*linear.weight"):
            compared(model, inputs(32, 32))
        assert model.linear.weight.grad is gradient
        assert torch.equal(gradient, value)

    def test_scales_of_a_converted_model(self):
        model, x = fuser.convert(feed_forward(), DelayedScaling()), inputs(32, 64)
        model(x).sum().backward()
        twin = copy.deepcopy(model)
        compared(model, x * 100, [DelayedScaling()])
        assert torch.equal(model(x), twin(x))

    def test_inside_of_no_grad_and_autocast(self):
        with torch.no_grad(), fuser.autocast(recipe=NVFP4BlockScaling()):
            inside = compared(feed_forward(), inputs(32, 64))
        assert inside == compared(feed_forward(), inputs(32, 64))

    def test_rules_inside_of_autocast(self):
        """The caller's recipe is not in force for modules that a mapping or a function gives one."""
        rules = {"all": {"*": MXFP8BlockScaling()}, "delayed": lambda name, module: DelayedScaling()}
        wanted = compared(feed_forward(), inputs(32, 64), rules)
        with fuser.autocast(recipe=NVFP4BlockScaling()):
            assert compared(feed_forward(), inputs(32, 64), rules) == wanted
            assert isinstance(FP8GlobalStateManager.get_fp8_recipe(), NVFP4BlockScaling)

    def test_scales_that_wait_for_the_end_of_the_autocast_around(self):
        x, scales = inputs(32, 64), []
        for compares in (False, True):
            torch.manual_seed(0)
            model = ops.Linear(64, 64)
            with fuser.autocast(recipe=DelayedScaling()):
                model(x * 100)
                if compares:
                    compared(nn.Linear(64, 64), x, [DelayedScaling()])
                scales.append(model(x))
            scales.append(model.basic_ops[0].get_quantizer("forward", 0).scale.clone())
        assert torch.equal(scales[0], scales[2])
        assert torch.equal(scales[1], scales[3])

    def test_buffers_that_change_their_shape(self):
        class Collects(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(64, 64)
                self.register_buffer("seen", torch.zeros(1))
                self.register_buffer("grown", torch.zeros(1))

            def forward(self, x):
                assert (self.seen.shape, self.grown.shape, hasattr(self, "new")) == ((1,), (1,), False)
                self.seen = torch.cat([self.seen, torch.ones(1)])
                self.grown.resize_(2)
                self.register_buffer("new", torch.zeros(1))
                return self.layer(x)

        (found,) = compared(Collects(), inputs(32, 64), DelayedScaling()).recipes
        assert found.output < 0.1

    def test_after_an_error(self):
        class Breaks(nn.Linear):
            def forward(self, x):
                raise RuntimeError("broken")

        model, state = nn.Sequential(nn.Linear(32, 32), Breaks(32, 32)), torch.get_rng_state()
        with pytest.raises(RuntimeError, match="broken"):
            compared(model, inputs(32, 32))
        assert torch.equal(torch.get_rng_state(), state)
        assert not quantization_observers
        assert not forward_observers


class TestShowing:
    def test_printed(self, capsys):
        found = fuser.compare(feed_forward(), inputs(32, 64), MXFP8BlockScaling())
        printed = capsys.readouterr().out
        assert printed == f"{found}\n"
        for line in ("Loss without a recipe:", "Error of each layer's output:", "1 grad_output", "(model)"):
            assert line in printed
        assert all(len(line) <= 120 for line in printed.splitlines())

    def test_as_a_sequence(self, two_recipes):
        assert len(two_recipes) == len(list(two_recipes)) == 2
        assert len(repr(two_recipes)) < 1000

    def test_rows(self, two_recipes):
        found = two_recipes
        rows = found.rows()
        assert len(rows) == 10
        row = next(row for row in rows if (row["recipe"], row["layer"]) == ("NVFP4BlockScaling", "1"))
        assert row["gradient"] == found["NVFP4BlockScaling"].layers[1].gradient
        assert 15 < row["grad_output_sqnr_db"] < 25
        assert {"input_flushed", "weight_saturated"} <= set(row)

    def test_plots(self, tmp_path):
        """The backend that a notebook has chosen stays, and so do its figures."""
        matplotlib = pytest.importorskip("matplotlib")
        before = matplotlib.rcParams["backend"]
        try:
            matplotlib.use("svg")
            figure = matplotlib.pyplot.figure()
            compared(nn.Linear(32, 32), inputs(32, 32), plot=tmp_path / "errors.svg")
            assert matplotlib.rcParams["backend"] == "svg"
            assert matplotlib.pyplot.get_fignums() == [figure.number]
            matplotlib.pyplot.close(figure)
        finally:
            matplotlib.use(before)
        assert (tmp_path / "errors.svg").read_text().startswith("<?xml")

    def test_plots_that_cannot_be_written(self, tmp_path, monkeypatch, two_recipes):
        figures = pytest.importorskip("matplotlib.figure")
        model, x = nn.Linear(32, 32), inputs(32, 32)
        with pytest.raises(PlotError, match="plot must end in one of"):
            compared(model, x, plot=tmp_path / "errors.text")
        with pytest.raises(PlotError, match="path must name a file in an existing directory"):
            two_recipes.plot(tmp_path / "missing" / "errors.png")

        def savefig(*args, **options):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(figures.Figure, "savefig", savefig)
        with pytest.raises(PlotError, match=r"plot must name a file that can be written; .*No space left"):
            compared(model, x, plot=tmp_path / "errors.png")

    def test_nothing_to_plot(self, tmp_path):
        with pytest.raises(ValueError, match="comparison must hold errors of layers or tensors to be drawn; got none"):
            comparison.Comparison(0.0, []).plot(tmp_path / "errors.png")


class TestStatistics:
    def test_each_step_of_training(self, tmp_path):
        model = fuser.convert(feed_forward(), MXFP8BlockScaling())
        twin = copy.deepcopy(model)
        with fuser.statistics(model, every=2) as s:
            for step in range(4):
                for one in (model, twin):  # another model's casts do not count
                    one.zero_grad()
                    one(inputs(32, 64) * 2**step).sum().backward()
        assert not quantization_observers
        assert len(s.records) == 2 * 6
        assert [record.step for record in s.of("1", "input")] == [0, 2]
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
        model(inputs(32, 64))
        assert len(s.records) == 12
        assert s.step == 3
        row = s.rows()[0]
        assert (row["layer"], row["tensor"], row["step"], row["shape"]) == ("1", "input", 0, [32, 64])
        assert row["scaling"] == refops.MXFP8Scaling(refops.E4M3).title
        lines = str(s).splitlines()
        assert len(lines) == 2 + 6
        assert len(repr(s)) < 100
        with pytest.raises(
            KeyError, match=r"layer must be one of the 2 that have records; got 'no', which are \['1', '3'\]"
        ):
            s.of("no", "input")
        three = r"'input', 'weight', 'grad_output', of which '1' has records; got 'inputs' \(did you mean input\?\)"
        with pytest.raises(KeyError, match=f"tensor must be one of {three}"):
            s.of("1", "inputs")
        with pytest.raises(
            KeyError, match=r"layer must be one of the 2 that have records; got '11' \(did you mean 1\?\)"
        ):
            s.of("11", "input")
        pytest.importorskip("matplotlib")
        s.plot(tmp_path / "steps.png")
        assert (tmp_path / "steps.png").stat().st_size > 5000

    def test_what_is_flushed_and_saturated(self):
        """A scale that is a million too small or too large: one step after the data changed under delayed scaling."""
        model = fuser.convert(nn.Linear(64, 64), DelayedScaling(amax_history_len=1))
        with fuser.statistics(model) as s:
            for factor in (1, 1e6, 1e-6):
                model(inputs(32, 64) * factor)
        first, large, small = (record.measurement for record in s.of("", "input"))
        assert large.saturated > 0.9
        assert small.flushed > 0.9
        assert (first.saturated > 0, first.flushed > 0.9) == (False, False)

    @pytest.mark.parametrize("kind", [DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling])
    def test_casts_in_kernels_with_activations_and_bias_gradients(self, kind):
        """Forward GELU -> Linear; backward Linear -> GELU gradient and its bias's in one kernel, and Bias -> Linear."""
        model = fuser.convert(feed_forward(), kind())
        with fuser.statistics(model) as s:
            for _ in range(2):
                model(inputs(32, 64)).sum().backward()
        for layer in "13":
            for tensor in ("input", "weight", "grad_output"):
                records = s.of(layer, tensor)
                assert len(records) == 2, (layer, tensor)
                assert records[1].measurement.sqnr_db > 20

    @pytest.mark.parametrize(
        ("recipe", "quantizer", "padded"),
        [
            (MXFP8BlockScaling(), fuser.MXFP8Quantizer(fuser.DType.kFloat8E4M3), 32),
            (NVFP4BlockScaling(), fuser.NVFP4Quantizer(), 128),
        ],
    )
    def test_rows_that_pad_appends_change_no_measurement(self, recipe, quantizer, padded):
        """Zeros are neither signal nor noise, and the share that is flushed is of the elements that are not zero."""
        x = torch.exp2(inputs(16, 64) * 8)  # a wide range: small numbers are flushed
        model = fuser.convert(nn.Linear(64, 64), recipe, pad=True)
        with fuser.statistics(model) as s:
            model(x)
        (record,) = s.of("", "input")
        assert record.shape == (16, 64)
        back = quantizer(nn.functional.pad(x, (0, 0, 0, padded - 16))).dequantize()[:16].double()
        assert record.measurement.flushed == (back == 0).double().mean().item() > 0.01
        noise = ((back - x) ** 2).sum() / (x.double() ** 2).sum()
        assert record.measurement.sqnr_db == pytest.approx(-10 * math.log10(noise))

    def test_rows_that_pad_appends_do_not_count(self):
        """Shapes and shares are those of the same calls without rows to append, whatever backward comes first.

        All sums are exact, as every scale is a power of two: CPUs add in another order where there are more rows.
        """
        found = []
        for pad in (True, False):
            torch.manual_seed(0)
            linear = nn.Linear(64, 64)
            with torch.no_grad():
                for parameter in linear.parameters():
                    parameter.copy_((64 * parameter).round().clamp(-7, 7) / 64)
            model = fuser.convert(linear, DelayedScaling(), pad=pad)
            with fuser.statistics(model) as s:  # with scales of 1, so that much saturates
                batches = [(1000 * inputs(rows, 64)).round().clamp(-1792, 1792) for rows in (5, 16, 3)]
                losses = [model(batch).square().sum() for batch in batches]
                for loss in reversed(losses):
                    loss.backward()
            found.append(s.records)
        assert any(record.shape[0] < 16 and record.measurement.saturated > 0.1 for record in found[0])
        for padded, plain in zip(*found, strict=True):
            names = ("step", "layer", "tensor", "shape", "amax")
            assert [getattr(padded, name) for name in names] == [getattr(plain, name) for name in names]
            for name in ("sqnr_db", "flushed", "saturated"):
                value = getattr(plain.measurement, name)
                assert getattr(padded.measurement, name) == pytest.approx(value, rel=1e-12, abs=0), name

    @pytest.mark.parametrize("checkpoint", CHECKPOINTS)
    def test_rows_of_layers_that_are_computed_again_are_their_own(self, checkpoint, monkeypatch):
        """Backward of a padded layer has those before it computed again."""
        model = fuser.convert(Recomputed(checkpoint), MXFP8BlockScaling(), pad=True)
        sizes = []
        monkeypatch.setattr(
            "fuser.pipeline.forward_observers",
            [lambda _, step: sizes.append((step.input.shape[0], rows_before_padding.get()))],
        )
        with fuser.statistics(model) as s:
            model(inputs(3, 32, 32).requires_grad_()).sum().backward()
        assert len(sizes) > 6 and set(sizes) == {(3, None), (32, 1)}
        forward = [("a input", (3, 32, 32)), ("a weight", (32, 32)), ("b input", (1, 32)), ("b weight", (32, 32))]
        backward = [("b grad_output", (1, 32)), ("a grad_output", (3, 32, 32))]
        assert [(record.name, record.shape) for record in s.records] == [*forward, *backward]

    def test_steps_are_forward_passes(self):
        """Not casts, of which a layer that is called twice has two, nor what is computed again in backward."""
        model = fuser.convert(Twice(), MXFP8BlockScaling())
        with fuser.statistics(model) as s:
            model(inputs(32, 64)).sum().backward()
        assert len(s.of("layer", "input")) == 2
        (line,) = (line for line in str(s).splitlines() if line.startswith("layer input"))
        assert line.split()[4] == "1"

    @pytest.mark.parametrize("checkpoint", CHECKPOINTS)
    def test_what_is_computed_again_is_no_step(self, checkpoint):
        model, x = fuser.convert(Twice(), MXFP8BlockScaling()), inputs(32, 64).requires_grad_()
        with fuser.statistics(model) as s:
            checkpoint(model, x).sum().backward()
        assert s.step == 0
        assert {record.step for record in s.records} == {0}
        assert [len(s.of("layer", tensor)) for tensor in ("input", "weight", "grad_output")] == [2, 2, 2]

    def test_quantizers_of_others_are_looked_up_once(self, monkeypatch):
        model = fuser.convert(nn.Linear(64, 64), MXFP8BlockScaling())
        walks, walk = [], recording.quantizers_of
        monkeypatch.setattr(recording, "quantizers_of", lambda model: walks.append(1) or walk(model))
        other, x = fuser.MXFP8Quantizer(fuser.DType.kFloat8E4M3), inputs(32, 64)
        with fuser.statistics(model) as s:
            model(x)
            before, recorded = len(walks), len(s.records)
            for _ in range(3):
                other(x)
            assert len(walks) == before + 1
            assert len(s.records) == recorded == 2
            del other
            gc.collect()
            assert any(seen() is None for seen, _ in s._roles.values())  # not kept alive

    def test_tensors_that_are_cast_or_of_a_format_of_their_own(self):
        x = inputs(32, 64)
        cast = fuser.IdentityQuantizer(dtype=torch.bfloat16)(x)
        shape, amax, measurement, _ = recording._measured(x, cast)
        assert (shape, amax, measurement.scaling) == ((32, 64), x.abs().max().item(), "none")
        error = (x.bfloat16().double() - x).square().sum() / x.double().square().sum()
        assert measurement.sqnr_db == pytest.approx(-10 * math.log10(error))
        assert measurement.bits_per_element == 16
        assert recording._measured(x, fuser.IdentityQuantizer()(x))[2].sqnr_db == math.inf
        unknown = SimpleNamespace(buffers=SimpleNamespace(operand=lambda columnwise: object()))
        assert recording._measured(x, unknown) is None

    def test_the_worst_of_measurements(self):
        best, low = (
            Measurement("a", sqnr_db=30.0),
            Measurement("b", sqnr_db=20.0, flushed=0.5),
        )
        none = Measurement("a")
        best, low, none = (recording.QuantizationRecord(0, "0", "input", (1,), 1.0, one) for one in (best, low, none))
        assert recording.worst([best, none, low]) == Measurement("a, b", sqnr_db=20.0, flushed=0.5)
        assert recording.worst([none]) == none.measurement
        assert recording.worst_cells([]) == ["-", "-", "-"]

    def test_what_vanished_before_a_cast_is_not_exact(self):
        """The first scales flush the last layer's gradients; those of the layer before it are all zero then."""
        model = fuser.convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), DelayedScaling())
        with fuser.statistics(model) as s:
            for _ in range(3):
                (model(inputs(32, 64)) * 1e-6).sum().backward()
        gradients = s.of("0", "grad_output")
        assert [record.all_zero for record in gradients] == [True, False, False]
        assert [record.measurement.flushed for record in gradients] == [0.0, 1.0, pytest.approx(0, abs=0.1)]
        assert gradients[0].measurement.sqnr_db is None
        assert not gradients[0].as_dict()["exact"]
        (line,) = (line for line in str(s).splitlines() if line.startswith("0 grad_output"))
        assert "all zero" in line

    def test_not_a_finite_element_is_not_all_zero(self):
        model = fuser.convert(nn.Linear(64, 64), Float8CurrentScaling())
        with fuser.statistics(model) as s:
            model(torch.full((32, 64), math.nan))
            model(torch.zeros(32, 64))
        assert [record.all_zero for record in s.of("", "input")] == [False, True]

    def test_tensors_with_nan_are_counted(self):
        model, x = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64)), inputs(20, 64)
        x[3, 5], x[3, 6], x[4, 0] = math.nan, math.inf, -math.inf
        found = compared(model, x, [MXFP8BlockScaling(), DelayedScaling()])
        held = {record.name: record.non_finite for record in found["MXFP8BlockScaling"].records}
        assert held["0 input"] == 3 and held["2 input"] == 2 * 64 and held["0 weight"] == held["2 weight"] == 0
        count = sum(map(bool, held.values()))
        text = " ".join(str(found).split())
        assert f"{count} of 6 quantized tensors under MXFP8BlockScaling held NaN or inf, 0 input first." in text
        assert "quantized tensors under DelayedScaling held NaN or inf, 0 input first." in text
        fuser.convert(model, MXFP8BlockScaling(), pad=True)
        with fuser.statistics(model) as s:
            model(x)
        assert "2 of 4 quantized tensors held NaN or inf, 0 input first." in str(s)
        assert s.rows()[0]["non_finite"] == 3
        with fuser.statistics(model) as s:
            model(inputs(20, 64))
        assert "NaN" not in str(s)

    def test_hybrid_quantizers_and_groups(self):
        def qfactory(role):
            return fuser.HybridQuantizer(
                rowwise_quantizer=fuser.NVFP4Quantizer(),
                columnwise_quantizer=fuser.MXFP8Quantizer(fuser.DType.kFloat8E4M3),
            )

        model = ops.Sequential(ops.GroupedLinear(2, 64, 64))
        with fuser.statistics(model) as s, fuser.autocast(recipe=CustomRecipe(qfactory=qfactory)):
            model(inputs(64, 64), torch.tensor([32, 32])).sum().backward()
        assert {record.tensor for record in s.records} == {
            f"{tensor} {group}" for tensor in ("input", "weight", "grad_output") for group in (0, 1)
        }
        assert {record.measurement.scaling for record in s.records} == {refops.NVFP4Scaling().title}

    def test_quantizers_that_leave_no_record_are_named(self):
        class Sixteenths(fuser.Quantizer):
            def quantize_impl(self, tensor):
                return (tensor * 16).round() / 16

        class Overrides(Sixteenths):
            def quantize(self, tensor, *, out=None, dtype=None):
                return tensor

        kinds = {"input": Sixteenths, "weight": Overrides, "grad_output": fuser.IdentityQuantizer}

        def qfactory(role):
            return kinds[role.tensor_type](rowwise=True, columnwise=True)

        recipe = CustomRecipe(qfactory=qfactory)
        model = nn.Sequential(nn.Linear(64, 64))
        found = compared(model, inputs(32, 64), {"own": recipe, "mx": MXFP8BlockScaling()})
        assert [one.unmeasured for one in found] == [["0 input", "0 weight"], []]
        assert "No record under own of 0 input, 0 weight: " in str(found)
        assert "No record under mx" not in str(found)
        fuser.convert(model, recipe)
        with fuser.statistics(model) as s:
            for _ in range(2):
                model(inputs(32, 64)).sum().backward()
        assert {record.name for record in s.records} == {"0 grad_output"}
        assert s.unmeasured == ["0 input", "0 weight"]
        assert "No record of 0 input, 0 weight: " in str(s)

    def test_errors(self):
        with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module"):
            fuser.statistics(torch.zeros(1))
        with pytest.raises(ValueError, match="model must have operations that quantize"):
            fuser.statistics(nn.Linear(32, 32))
        model = fuser.convert(nn.Linear(32, 32), MXFP8BlockScaling())
        with pytest.raises(ValueError, match="every must be an integer"):
            fuser.statistics(model, every=0)
        s = fuser.statistics(nn.ModuleDict({"a": model, "b": nn.Linear(32, 32)}))
        assert s.of("a", "input") == []  # until the model is called
        with pytest.raises(KeyError, match=r"layer must be one of the 1 that quantize; got 'b', which are \['a'\]"):
            s.of("b", "input")
        with pytest.raises(ValueError, match="statistics must hold records to be drawn"):
            s.plot("picture.png")
        with s, pytest.raises(RuntimeError, match="cannot be entered again"):
            s.__enter__()


def test_a_measurement_of_what_was_quantized_already():
    x = inputs(32, 64).numpy()
    for named in SCALINGS.values():
        q = refops.quantize(x, named.scaling, rowwise=not named.columnwise, columnwise=named.columnwise)
        assert measure_quantized(x, q, named.name) == measure(x, named)


@pytest.fixture
def figure(monkeypatch):
    """The figure that is drawn last, in a list."""
    figures, drawn = pytest.importorskip("matplotlib.figure"), []
    save = figures.Figure.savefig
    monkeypatch.setattr(
        figures.Figure, "savefig", lambda self, *args, **options: (drawn.append(self), save(self, *args, **options))
    )
    return drawn


def test_pictures_of_many_tensors_have_the_worst(tmp_path, figure):
    model = fuser.convert(nn.Sequential(*(nn.Linear(32, 32) for _ in range(9))), MXFP8BlockScaling())
    with fuser.statistics(model) as s:
        model(inputs(32, 32)).sum().backward()
    s.plot(tmp_path / "picture.png")
    axes, (legend,) = figure[0].axes, figure[0].legends
    sqnr = sorted(s.records, key=lambda record: record.measurement.sqnr_db)
    assert [text.get_text() for text in legend.get_texts()] == [record.name for record in sqnr[:20]]
    assert axes[0].get_title("left") == "The 20 of 27 quantized tensors whose SQNR is lowest, the lowest first"
    lines = axes[2].get_lines()
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 20
    assert {line.get_marker() for line in lines} == {"."}, "a line of one step is nothing"
    assert axes[2].get_ylim()[0] < 0 < 0.1 <= axes[2].get_ylim()[1], "a line at 0 is above the frame"


def test_pictures_of_few_tensors_have_all(tmp_path, figure):
    model = nn.Module()
    model._layer = nn.Linear(32, 32)
    model.forward = lambda x: model._layer(x)
    fuser.convert(model, MXFP8BlockScaling())
    with fuser.statistics(model) as s:
        for _ in range(2):
            model(inputs(32, 32)).sum().backward()
    s.plot(tmp_path / "picture.png")
    axes, (legend,) = figure[0].axes, figure[0].legends
    assert axes[0].get_title("left") == "Quantized tensors by their lowest SQNR, the lowest first"
    assert {text.get_text().strip() for text in legend.get_texts()} == {record.name for record in s.records}
    assert {line.get_marker() for line in axes[0].get_lines()} == {"None"}
    assert all(tick == round(tick) for tick in axes[2].get_xticks())


def test_a_picture_of_a_comparison_says_what_it_leaves_out(two_recipes, tmp_path, figure, monkeypatch):
    monkeypatch.setattr(comparison.findings, "MOST_TENSORS_DRAWN", 4)
    two_recipes.plot(tmp_path / "picture.png")
    titles = [axis.get_title("left").partition(":")[0] for axis in figure[0].axes]
    assert [title for title in titles if title] == [
        "Output of each layer, the 4 worst of 5",
        "Gradients of each layer",
        "Quantized tensors (SQNR), the 4 worst of 6",
    ]


class Compiling(nn.Module):
    """A layer whose forward compiles a loop."""

    def forward(self, x):
        with messages.announced("a loop", "this CPU"):
            return x


@pytest.mark.parametrize("call", [fuser.compare, fuser.explain])
def test_what_is_compiled_in_a_call_is_said_unless_it_is_quiet(call, monkeypatch, capsys):
    monkeypatch.setattr(messages, "logger", logging.Logger("cuda_kernels"))
    monkeypatch.setattr(messages, "_standard_error", messages._StandardError())
    model = ops.Sequential(ops.Linear(32, 32), Compiling())
    for quiet, said in ((True, ""), (False, "cuda_kernels: compiling a loop for this CPU, once\n")):
        call(model, inputs(32, 32), quiet=quiet)
        assert capsys.readouterr().err == said
