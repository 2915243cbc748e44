"""`explain`: what fired, what did not and why, who quantizes, what is saved; and that it changes nothing."""

import json
import re
import warnings

import pytest
import torch

import fuser
from fuser import ops, recipe
from fuser.fused_pattern import WindowFusion
from fuser.fuser import OperationFuser, fusions
from fuser.op import FusedOperation
from fuser.quantization.state import FP8GlobalStateManager

pytestmark = pytest.mark.check


def names(steps):
    return [(step.name, step.basic_ops) for step in steps]


def verdicts(explanation):
    return {(f.direction, f.fusion, tuple(f.basic_ops)): f.reason for p in explanation.pipelines for f in p.fusions}


class Fused(FusedOperation):
    def __init__(self, *members):
        super().__init__(members)


class TestWindowFusion:
    def scales(self, *values):
        return [ops.ConstantScale(value) for value in values]

    def test_windows_do_not_overlap(self):
        fusion = WindowFusion(Fused, patterns=[(ops.ConstantScale, ops.ConstantScale)])
        members = self.scales(1, 2, 3, 4, 5)
        fused = fusion(members, recipe=None, unused=1)
        assert [type(op) for op in fused] == [Fused, Fused, ops.ConstantScale]
        assert [op for f in fused[:2] for op in f.basic_ops] == members[:4]
        assert [(c.start, c.stop, c.fired) for c in fusion.candidates(members)] == [(0, 2, True), (2, 4, True)]

    def test_first_pattern_that_fires_wins(self):
        def objection(*window, recipe):
            return "too long" if len(window) == 3 else None

        patterns = [(ops.ConstantScale,) * 3, (ops.ConstantScale,) * 2]
        fusion = WindowFusion(Fused, patterns=patterns, objection=objection)
        members = self.scales(1, 2, 3)
        assert [(c.start, c.stop, c.reason) for c in fusion.candidates(members)] == [(0, 3, "too long"), (0, 2, None)]
        assert [len(getattr(op, "basic_ops", [op])) for op in fusion(members)] == [2, 1]

    def test_kept_operation_may_belong_to_the_window_before(self):
        fusion = WindowFusion(Fused, patterns=[(ops.ConstantScale, ops.Identity)], keep=1)
        members = [ops.ConstantScale(1), ops.Identity(), ops.ConstantScale(2), ops.Identity(), ops.Identity()]
        fused = fusion(members)
        assert [type(op).__name__ for op in fused] == ["ConstantScale", "Fused", "ConstantScale", "Fused", "Identity"]
        chain = WindowFusion(Fused, patterns=[(ops.Identity, ops.Identity, ops.Identity)], keep=1)
        assert [(c.start, c.stop) for c in chain.candidates([ops.Identity() for _ in range(5)])] == [(1, 3), (3, 5)]

    def test_alternative_types_and_recipe(self):
        seen = []
        fusion = WindowFusion(
            Fused,
            patterns=[((ops.Identity, ops.ConstantScale), ops.Bias)],
            objection=lambda first, bias, *, recipe: seen.append(recipe) or "never",
        )
        members = [ops.Identity(), ops.Bias(2), ops.ConstantScale(2), ops.Bias(2)]
        assert fusion(members, recipe="r") == members
        assert seen == ["r", "r"]
        assert repr(fusion) == "WindowFusion(Fused)"


class TestFusions:
    def model(self, dtype=torch.bfloat16):
        return ops.Sequential(ops.Linear(32, 32, dtype=dtype), ops.GELU(), ops.Linear(32, 32, dtype=dtype))

    def test_fired(self):
        explanation = fuser.explain(self.model())
        (pipeline,) = explanation.pipelines
        assert pipeline.basic_ops == ["BasicLinear", "Bias", "GELU", "BasicLinear", "Bias"]
        assert names(pipeline.forward)[0] == ("ForwardLinearBiasActivation", [0, 1])
        assert [f.basic_ops for f in explanation.fired] == [[0, 1], [3, 4]]
        assert verdicts(explanation)["backward", "BackwardActivationBias", (1, 2)].startswith("there is no recipe")

    def test_not_fired_and_why(self):
        reasons = verdicts(fuser.explain(self.model(torch.float32)))
        assert "float32" in reasons["forward", "ForwardLinearBiasActivation", (0, 1)]

    def test_recipe(self):
        explanation = fuser.explain(self.model(), recipe=recipe.DelayedScaling())
        assert explanation.pipelines[0].recipe == "DelayedScaling"
        assert ("BackwardActivationBias", [1, 2]) in names(explanation.pipelines[0].backward)
        with fuser.autocast(recipe=recipe.DelayedScaling()):
            assert fuser.explain(self.model()).pipelines[0].recipe == "DelayedScaling"
        assert fuser.explain(self.model()).pipelines[0].recipe is None

    def test_taken_by_an_earlier_fusion(self):
        model = ops.Sequential(
            ops.Linear(32, 32, dtype=torch.bfloat16),
            ops.AddExtraInput(in_place=True),
        )
        reasons = verdicts(fuser.explain(model))
        assert reasons["forward", "ForwardLinearBiasAdd", (0, 1, 2)] is None
        assert "ForwardLinearBiasAdd" in reasons["forward", "ForwardLinearBiasActivation", (0, 1)]

    def test_plan_is_what_runs(self):
        """For pipelines and recipes of all kinds, the explanation and the fuser agree."""
        pipelines = [
            self.model(),
            ops.Sequential(ops.MakeExtraOutput(), ops.RMSNorm(32), ops.Linear(32, 32)),
            ops.Sequential(ops.Linear(32, 32), ops.ReLU(), ops.Quantize()),
            ops.Sequential(ops.Linear(32, 32, bias=False), ops.ConstantScale(2.0)),
        ]
        for model in pipelines:
            for one in (None, recipe.Float8CurrentScaling(), recipe.MXFP8BlockScaling()):
                dtype = next(model.parameters()).dtype
                x = torch.randn(32, 32, dtype=dtype, requires_grad=True)
                planned = fuser.explain(model, recipe=one).pipelines[0]
                measured = fuser.explain(model, x, recipe=one).pipelines[0]
                with fuser.autocast(enabled=one is not None, recipe=one):
                    model(x)
                (group,) = model._module_groups
                for direction in ("forward", "backward"):
                    ran = [(type(op).__name__, indices) for op, indices in getattr(group, f"_{direction}_ops")]
                    assert names(getattr(planned, direction)) == names(getattr(measured, direction)) == ran

    def test_functions_that_explain_nothing(self):
        def opaque(ops_, *, recipe):
            return [Fused(*ops_)]

        with fusions(forward=opaque, only=True):
            explanation = fuser.explain(ops.Sequential(ops.Identity(), ops.Identity()))
        assert [(f.fusion, f.basic_ops) for f in explanation.fired] == [("Fused", [0, 1])]

    def test_joint_fusions(self):
        with fusions(forward_backward=WindowFusion(Fused, patterns=[(ops.Identity, ops.Identity)]), only=True):
            explanation = fuser.explain(ops.Sequential(ops.Identity(), ops.Identity()))
        assert [(f.fusion, f.direction) for f in explanation.fired] == [("Fused", "both")]

    def test_targets(self):
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = ops.Sequential(ops.Bias(4), torch.nn.ReLU(), ops.Bias(4))
                self.alone = ops.GELU()

            def forward(self, x):
                return self.alone(self.inner(x))

        model, x = Model(), torch.randn(2, 4)
        assert [p.basic_ops for p in fuser.explain(model).pipelines] == [["Bias"], ["Bias"], ["GELU"]]
        assert [p.basic_ops for p in fuser.explain(model, x).pipelines] == [["Bias"], ["Bias"], ["GELU"]]
        assert fuser.explain(ops.Linear(4, 4)).pipelines[0].basic_ops == ["BasicLinear", "Bias"]
        assert fuser.explain(OperationFuser([ops.Bias(4)]), x).pipelines[0].basic_ops == ["Bias"]
        with pytest.raises(ValueError, match="nothing to explain: ReLU"):
            fuser.explain(torch.nn.ReLU())
        for target, got in ((x, "Tensor"), (None, "None"), (ops.Linear, "<class")):
            with pytest.raises(TypeError, match=rf"target must be a module .*explain\(model, input\); got {got}"):
                fuser.explain(target)

    def test_hooks_split_pipelines(self):
        model = self.model()
        model[1].register_forward_hook(lambda *args: None)
        x = torch.randn(32, 32, dtype=torch.bfloat16)
        for explanation in (fuser.explain(model), fuser.explain(model, x)):
            assert [p.basic_ops for p in explanation.pipelines] == [
                ["BasicLinear", "Bias"],
                ["GELU"],
                ["BasicLinear", "Bias"],
            ]

    def test_first_op_requiring_backward(self):
        model = self.model()
        model[0].requires_grad_(False)
        x = torch.randn(32, 32, dtype=torch.bfloat16)
        explanation = fuser.explain(model, x)
        assert explanation.pipelines[0].first_op_requiring_backward == 3
        assert explanation.text.count("not run") == 3
        assert explanation.pipelines[0].saved[0] == []


class TestEdges:
    def test_who_quantizes_for_whom(self):
        model = ops.Sequential(ops.Linear(32, 32, bias=False), ops.GELU(), ops.Linear(32, 32, bias=False))
        x = torch.randn(32, 32, requires_grad=True)
        planned = fuser.explain(model, recipe=recipe.MXFP8BlockScaling()).pipelines[0].edges
        assert [(e.direction, e.source, e.target, e.quantizer, e.quantized) for e in planned] == [
            ("forward", 0, 1, None, None),
            ("forward", 1, 2, "MXFP8Quantizer", None),
            ("backward", 2, 1, None, None),
            ("backward", 1, 0, "MXFP8Quantizer", None),
        ]
        measured = fuser.explain(model, x, recipe=recipe.MXFP8BlockScaling()).pipelines[0].edges
        assert [e.quantized for e in measured if e.direction == "forward"] == [False, True]

    def test_linear_to_linear_is_left_to_the_receiver(self):
        model = ops.Sequential(ops.Linear(32, 32, bias=False), ops.Linear(32, 32, bias=False))
        x = torch.randn(32, 32)
        explanation = fuser.explain(model, x, recipe=recipe.MXFP8BlockScaling())
        assert "MXFP8Quantizer, left to the receiver" in explanation.text
        explanation = fuser.explain(model, x, recipe=recipe.DelayedScaling())
        assert "Float8Quantizer, emitted by the source" in explanation.text

    def test_no_backward_edges_with_an_override(self):
        model = ops.Sequential(ops.Linear(32, 32), ops.Linear(32, 32))
        one = recipe.Float8CurrentScaling(backward_override="high_precision")
        edges = fuser.explain(model, recipe=one).pipelines[0].edges
        assert not any(e.quantizer for e in edges if e.direction == "backward")


class TestSaved:
    def bytes_of(self, model, x, **kwargs):
        (pipeline,) = fuser.explain(model, x, **kwargs).pipelines
        return {i: [(t.bytes, t.theory, t.shared) for t in tensors] for i, tensors in pipeline.saved.items()}

    def test_high_precision(self):
        model = ops.Sequential(ops.Linear(32, 64), ops.GELU())
        x = torch.randn(16, 32, requires_grad=True)
        saved = self.bytes_of(model, x)
        assert saved[0] == [(16 * 32 * 4, 16 * 32 * 4, False), (0, 64 * 32 * 4, True)]
        assert saved[1] == []
        assert saved[2] == [(16 * 64 * 4, 16 * 64 * 4, False)]

    # bits an element of the input that the weight gradient needs, by layout: data and scales of its column-wise copy
    CASES = (
        (recipe.DelayedScaling, 8, 4 + 4),  # scale and amax
        (recipe.Float8CurrentScaling, 8, 4 + 4),
        (recipe.MXFP8BlockScaling, 8 + 8 / 32, 0),
        (recipe.Float8BlockScaling, 8 + 32 / 128, 0),
    )

    @pytest.mark.parametrize(("kind", "bits", "extra"), CASES, ids=[case[0].__name__ for case in CASES])
    def test_eight_bits_are_eight_bits(self, kind, bits, extra):
        model = ops.Sequential(ops.Linear(256, 256, bias=False))
        x = torch.randn(256, 256, requires_grad=True)
        (pipeline,) = fuser.explain(model, x, recipe=kind()).pipelines
        activation, weight = pipeline.saved[0]
        for tensor in (activation, weight):
            assert tensor.bytes == tensor.theory
            assert not tensor.shared
        assert activation.bytes == 256 * 256 * bits / 8 + extra

    def test_four_bits_are_four_bits(self):
        model = ops.Sequential(ops.Linear(256, 256, bias=False)).bfloat16()
        x = torch.randn(256, 256, dtype=torch.bfloat16, requires_grad=True)
        (pipeline,) = fuser.explain(model, x, recipe=recipe.NVFP4BlockScaling()).pipelines
        activation = pipeline.saved[0][0]
        assert activation.bytes == activation.theory
        assert 256 * 256 * (4 + 8 / 16) / 8 <= activation.bytes <= 256 * 256 * (4 + 8 / 16) / 8 + 8

    def test_cached_quantized_input(self):
        x = torch.randn(64, 64, requires_grad=True)
        plain = self.bytes_of(ops.GELU(), x)[0]
        cached = self.bytes_of(ops.GELU(cache_quantized_input=True), x)[0]
        assert plain == [(64 * 64 * 4, 64 * 64 * 4, False)]
        assert cached[0][0] == cached[0][1]
        assert 64 * 64 <= cached[0][0] <= 64 * 64 + 8

    def test_one_memory_saved_twice_counts_once(self):
        model = ops.Sequential(ops.GELU(), ops.Reshape((-1,)), ops.Identity(), ops.ReLU(), ops.SiLU())
        saved = self.bytes_of(ops.Sequential(ops.MakeExtraOutput(), ops.GELU()), torch.randn(8, 8, requires_grad=True))
        assert saved == {0: [], 1: [(256, 256, False)]}
        (pipeline,) = fuser.explain(model, torch.randn(8, 8, requires_grad=True)).pipelines
        assert pipeline.saved_bytes == 3 * 256

    def test_a_view_keeps_its_whole_storage(self):
        x = torch.randn(64, 8)[:8].requires_grad_()
        ((measured, theory, _),) = self.bytes_of(ops.GELU(), x)[0]
        assert (measured, theory) == (64 * 8 * 4, 8 * 8 * 4)


class TestShowing:
    def explanation(self):
        model = ops.Sequential(ops.Linear(32, 32), ops.GELU(), ops.Linear(32, 32)).bfloat16()
        x = torch.randn(32, 32, dtype=torch.bfloat16, requires_grad=True)
        return fuser.explain(model, x, recipe=recipe.MXFP8BlockScaling())

    def test_text(self):
        explanation = self.explanation()
        assert str(explanation) == explanation.text
        for part in (
            "ForwardLinearBiasActivation [0 BasicLinear, 1 Bias]",
            "backward BackwardActivationBias [1 Bias, 2 GELU] fired",
            "forward 2 GELU -> 3 BasicLinear: MXFP8Quantizer, emitted by the source",
            "saved for backward:",
        ):
            assert part in explanation.text

    def test_dict_is_json(self):
        data = self.explanation().to_dict()
        again = json.loads(json.dumps(data))
        assert again["pipelines"][0]["fusions"][0]["fired"] is True
        assert again["pipelines"][0]["saved"]["0"][0]["bytes"] > 0

    def test_mermaid(self):
        graph = self.explanation().mermaid().splitlines()
        assert graph[0] == "flowchart TB"
        assert sum(line.strip() == "end" for line in graph) == sum("subgraph" in line for line in graph) == 2
        nodes = {match[1] for line in graph if (match := re.match(r"\s+(p0[fb]\d+)\[", line))}
        edges = [re.match(r'\s+(p0[fb]\d+) (-->|-- "\w+" -->) (p0[fb]\d+)$', line) for line in graph if "-->" in line]
        assert all(edges)
        assert {end for edge in edges for end in (edge[1], edge[3])} <= nodes
        assert any("saves" in line for line in graph)


class TestUndisturbed:
    def test_nothing_changes(self):
        model = ops.Sequential(ops.Linear(32, 32), ops.GELU(), ops.Dropout(0.5), ops.Linear(32, 32))
        x = torch.randn(32, 32, requires_grad=True)

        def step():
            with fuser.autocast(recipe=recipe.DelayedScaling(amax_history_len=4)):
                return model(x)

        step().sum().backward()
        model.zero_grad()
        x.grad = None
        before = {key: value.clone() for key, value in model.state_dict().items()}
        group = model._module_groups[0]
        quantizers = [op.get_quantizer("forward", 0) for op in group._basic_ops if op.num_quantizers("forward")]
        random = torch.get_rng_state()
        registered = list(FP8GlobalStateManager.registered_states())
        for one in (None, recipe.DelayedScaling(), recipe.MXFP8BlockScaling()):
            fuser.explain(model, recipe=one)
            fuser.explain(model, x * 100, recipe=one)
        assert torch.equal(torch.get_rng_state(), random)
        assert FP8GlobalStateManager.registered_states() == registered
        assert not FP8GlobalStateManager.is_fp8_enabled()
        for (key, a), b in zip(before.items(), model.state_dict().values(), strict=True):
            assert torch.equal(a, b), key
        assert x.grad is None
        assert all(param.grad is None for param in model.parameters())
        assert model._module_groups[0] is group
        step()
        now = [op.get_quantizer("forward", 0) for op in group._basic_ops if op.num_quantizers("forward")]
        assert all(a is b for a, b in zip(quantizers, now, strict=True))

    def test_inside_autocast(self):
        model = ops.Sequential(ops.Quantize())
        x = torch.ones(16, 16)
        with fuser.autocast(recipe=recipe.DelayedScaling()):
            fuser.explain(model, x)
            assert FP8GlobalStateManager.is_fp8_enabled()
        assert model[0]._fp8_metas is None
        assert not FP8GlobalStateManager.registered_states()

    def test_extra_inputs_keep_their_values(self):
        extra = torch.zeros(4)
        fuser.explain(ops.Sequential(ops.AddExtraInput(in_place=True)), torch.ones(4), extra)
        assert not extra.any()

    def test_channels_stay_unlocked(self):
        op = ops.MakeExtraOutput()
        fuser.explain(ops.Sequential(op), torch.ones(2))
        op.set_extra_output_channel(0, "a")

    def test_errors_leave_no_observer(self):
        from fuser import pipeline as module

        with pytest.raises(ValueError, match="MXFP8"):
            fuser.explain(ops.Sequential(ops.Quantize()), torch.ones(3, 5), recipe=recipe.MXFP8BlockScaling())
        assert module.forward_observers == []


def test_it_prints_what_it_returns(capsys):
    model = ops.Sequential(ops.Linear(32, 32), ops.GELU())
    explanation = fuser.explain(model, torch.randn(4, 32))
    assert capsys.readouterr().out == f"{explanation}\n"
    fuser.explain(model, quiet=True)
    assert capsys.readouterr().out == ""


def test_a_plan_materializes_nothing_and_warns_of_nothing():
    model = ops.Sequential(ops.Linear(32, 32, device="meta"), ops.GELU())
    weight = model[0].basic_ops[0].weight
    fuser.explain(model, recipe=recipe.MXFP8BlockScaling())
    assert model[0].basic_ops[0].weight is weight and weight.device.type == "meta"
    with fuser.quantized_model_init(recipe=recipe.DelayedScaling()):
        model = ops.Sequential(ops.Linear(32, 32))
    with fuser.autocast(recipe=recipe.DelayedScaling()):
        model(torch.randn(16, 32))
    quantizer = model[0].weight._quantizer
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fuser.explain(model, recipe=recipe.DelayedScaling())
        fuser.explain(model, torch.randn(16, 32), recipe=recipe.DelayedScaling())
    assert model[0].weight._quantizer is quantizer


def test_explaining_a_fuser_leaves_its_plan():
    group = fuser.OperationFuser([ops.BasicLinear(32, 32, dtype=torch.bfloat16), ops.Bias(32, dtype=torch.bfloat16)])
    x = torch.randn(4, 32, dtype=torch.bfloat16)
    group(x)
    plan = group._forward_ops
    with fuser.fusions(only=True):
        assert [step.name for step in fuser.explain(group).pipelines[0].forward] == ["BasicLinear", "Bias"]
    assert group._forward_ops is plan


def test_operations_are_named_by_their_modules():
    block = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU(approximate="tanh"))
    model = torch.nn.Sequential(torch.nn.ModuleDict({"mlp": block})["mlp"], ops.Sequential(ops.Linear(32, 32)))
    fuser.convert(model, {"0": recipe.MXFP8BlockScaling()})
    for explanation in (fuser.explain(model, quiet=True), fuser.explain(model, torch.randn(32, 32), quiet=True)):
        assert [pipeline.modules for pipeline in explanation.pipelines] == [["0.0", "0.0", "0.1"], ["1.0", "1.0"]]
        heads = [line for line in explanation.text.splitlines() if line.startswith("Pipeline")]
        assert heads == [
            "Pipeline 0: 0.0 [0 BasicLinear, 1 Bias], 0.1 [2 GELU]",
            "Pipeline 1: 1.0 [0 BasicLinear, 1 Bias]",
        ]
    linear = ops.Linear(32, 32)
    assert fuser.explain(linear, quiet=True).text.startswith("Pipeline 0: 0 BasicLinear, 1 Bias\n")
    group = OperationFuser([linear.basic_ops[0]])
    assert fuser.explain(group, quiet=True).pipelines[0].modules == [""]


class TestOperationsUsedTwice:
    def test_fusions_have_their_own_places(self):
        linear = ops.Linear(32, 32, dtype=torch.bfloat16)
        explanation = fuser.explain(ops.Sequential(linear, ops.GELU(), linear), quiet=True)
        fired = [(fusion.fusion, fusion.basic_ops) for fusion in explanation.fired]
        assert fired == [("ForwardLinearBiasActivation", [0, 1]), ("ForwardLinearBiasActivation", [3, 4])]

    def test_windows_that_an_earlier_fusion_took(self):
        scale = ops.ConstantScale(2.0)
        first = WindowFusion(Fused, patterns=[(ops.ConstantScale, ops.GELU)])
        second = WindowFusion(Fused, patterns=[(ops.ReLU, ops.ConstantScale)])
        second.__name__ = "Second"
        model = ops.Sequential(scale, ops.ReLU(), scale, ops.GELU(), ops.ReLU(), scale)
        with fusions(forward=[first, second], only=True):
            explanation = fuser.explain(model, quiet=True)
        assert verdicts(explanation) == {
            ("forward", "Fused", (2, 3)): None,
            ("forward", "Second", (4, 5)): None,
            ("forward", "Second", (1, 2)): "Fused, registered before, took an operation of it",
        }

    def test_fusion_functions_without_candidates(self):
        scale = ops.ConstantScale(2.0)

        def last_two(ops_, *, recipe):
            return [*ops_[:-2], Fused(*ops_[-2:])]

        with fusions(forward=last_two, only=True):
            explanation = fuser.explain(ops.Sequential(scale, ops.GELU(), scale, scale), quiet=True)
        assert verdicts(explanation) == {("forward", "Fused", (2, 3)): None}


def test_buffers_of_the_caller_stay_as_they_are():
    grouped = ops.GroupedLinear(2, 4, 4, bias=False)
    model = ops.Sequential(grouped)
    splits, buffer = torch.tensor([1, 2]), torch.zeros(3, 4)
    fuser.explain(model, torch.ones(3, 4), splits, quiet=True, op_kwargs={grouped: {"output": buffer}})
    assert not buffer.any()
    group = OperationFuser([grouped])
    fuser.explain(group, torch.ones(3, 4), splits, quiet=True, basic_op_kwargs=[{"output": buffer}])
    assert not buffer.any()
    model(torch.ones(3, 4), splits, op_kwargs={grouped: {"output": buffer}})
    assert buffer.any()


class TestBoundRecipes:
    """Models that `fuser.convert` converted show the same recipes with and without an input."""

    def recipes(self, model, *args):
        return [pipeline.recipe for pipeline in fuser.explain(model, *args, quiet=True).pipelines]

    def test_of_each_module(self):
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
        fuser.convert(model, {"0": recipe.MXFP8BlockScaling(), "*": recipe.NVFP4BlockScaling()})
        planned = self.recipes(model)
        assert planned == ["MXFP8BlockScaling", "NVFP4BlockScaling"]
        assert self.recipes(model, torch.randn(32, 64)) == planned

    def test_beside_operations_without_one(self):
        model = torch.nn.Sequential(ops.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
        fuser.convert(model, {"2": recipe.MXFP8BlockScaling()})
        planned = self.recipes(model)
        assert planned == [None, "MXFP8BlockScaling"]
        assert self.recipes(model, torch.randn(32, 64)) == planned

    def test_an_autocast_around_decides(self):
        model = fuser.convert(torch.nn.Linear(64, 64), recipe.MXFP8BlockScaling())
        for enabled, wanted in ((True, "NVFP4BlockScaling"), (False, None)):
            with fuser.autocast(enabled=enabled, recipe=recipe.NVFP4BlockScaling()):
                assert self.recipes(model) == self.recipes(model, torch.randn(32, 64)) == [wanted]
