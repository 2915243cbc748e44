"""Recipe states: what quantizers a recipe gives each slot, and the bookkeeping of delayed scaling."""

import copy
import gc
import weakref

import numpy as np
import pytest
import torch

import refops
from fuser import quantization as q
from fuser.dtypes import DType
from fuser.quantization.state import (
    CustomRecipeState,
    DelayedScalingRecipeState,
    DelayedScalingRequest,
    QuantizerRole,
    RecipeState,
)
from fuser.quantization.state import FP8GlobalStateManager as Manager
from fuser.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
)

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2


def quantizers(recipe, mode="forward", count=3, roles=None):
    return RecipeState.create(recipe, mode=mode, num_quantizers=count, roles=roles).make_quantizers()


class FakeLinear:
    """An operation as far as recipe state goes: forward slots input and weight, a backward slot for the gradient."""

    def __init__(self, recipe, group=None):
        self.metas = {}
        for mode, count in (("forward", 2), ("backward", 1)):
            state = RecipeState.create(recipe, mode=mode, num_quantizers=count)
            key = Manager.get_meta_tensor_key(forward=mode == "forward")
            self.metas[mode] = {key: state, "recipe": recipe, "fp8_group": group}
        self.quantizers = {mode: self.state(mode).make_quantizers() for mode in self.metas}

    def state(self, mode):
        return self.metas[mode][Manager.get_meta_tensor_key(forward=mode == "forward")]

    def forward(self, x, w):
        for meta in self.metas.values():
            Manager.add_fp8_tensors_to_global_buffer(meta)
        self.is_first = Manager.is_first_fp8_module()
        for quantizer, tensor in zip(self.quantizers["forward"], (x, w), strict=True):
            quantizer(tensor)

    def backward(self, dy):
        self.quantizers["backward"][0](dy)
        if self.is_first:
            Manager.reduce_and_update_fp8_tensors(forward=False)


# --- slots ------------------------------------------------------------------------------------------


def test_positions_decide_without_roles():
    forward = RecipeState.create(MXFP8BlockScaling(), mode="forward", num_quantizers=6)
    assert [forward._slot_tensor_type(i) for i in range(6)] == ["input", "weight", "output"] * 2
    backward = RecipeState.create(MXFP8BlockScaling(), mode="backward", num_quantizers=4)
    assert [backward._slot_tensor_type(i) for i in range(4)] == ["grad_output", "grad_input"] * 2


def test_roles_decide_where_they_say_something():
    roles = [QuantizerRole("linear", "weight"), QuantizerRole("linear", ""), QuantizerRole("linear", "softmax"), None]
    state = RecipeState.create(MXFP8BlockScaling(), mode="forward", num_quantizers=4, roles=roles)
    assert [state._slot_tensor_type(i) for i in range(4)] == ["weight", "weight", "output", "input"]


def test_wrong_arguments():
    with pytest.raises(ValueError, match="roles must have one entry"):
        RecipeState.create(MXFP8BlockScaling(), mode="forward", num_quantizers=2, roles=[QuantizerRole()])
    with pytest.raises(ValueError, match="mode must be"):
        RecipeState.create(MXFP8BlockScaling(), mode="both")
    for recipe in (None, "mxfp8", object()):
        with pytest.raises(ValueError, match="not a recognized recipe"):
            RecipeState.create(recipe, mode="forward")


def test_roles_are_frozen_values():
    assert QuantizerRole() == QuantizerRole("", "", "") and len({QuantizerRole(), QuantizerRole(name="a")}) == 2


@pytest.mark.parametrize(
    ("fp8_format", "mode", "dtype"),
    [(Format.HYBRID, "forward", E4M3), (Format.HYBRID, "backward", E5M2), (Format.E4M3, "backward", E4M3)],
)
def test_element_type(fp8_format, mode, dtype):
    for recipe in (DelayedScaling(fp8_format=fp8_format), Float8CurrentScaling(fp8_format=fp8_format)):
        assert [quantizer.dtype for quantizer in quantizers(recipe, mode)] == [dtype] * 3


def test_quantizers_have_both_usages_and_are_not_internal():
    for recipe in (
        DelayedScaling(),
        Float8CurrentScaling(),
        MXFP8BlockScaling(),
        Float8BlockScaling(),
        NVFP4BlockScaling(),
    ):
        for quantizer in quantizers(recipe):
            assert quantizer.get_usages() == {"rowwise": True, "columnwise": True} and not quantizer.internal


def test_current_scaling_quantizers():
    assert [x.force_pow_2_scales for x in quantizers(Float8CurrentScaling(use_power_2_scales=True))] == [True] * 3


def test_mxfp8_2d_is_for_the_forward_weights_of_linears():
    recipe = MXFP8BlockScaling(enable_2d_quantization=True)
    kinds = [("linear", "input"), ("linear", "weight"), ("grouped_linear", "weight"), ("attention", "weight")]
    roles = [QuantizerRole(*kind) for kind in kinds]
    expected = [False, True, True, False]
    assert [x.with_2d_quantization for x in quantizers(recipe, count=4, roles=roles)] == expected
    assert not any(x.with_2d_quantization for x in quantizers(recipe, "backward", count=4, roles=roles))
    assert not any(x.with_2d_quantization for x in quantizers(MXFP8BlockScaling(), count=4, roles=roles))


def test_block_scaling_quantizers():
    recipe = Float8BlockScaling()
    recipe.fp8_quant_fwd_weight = QParams(power_2_scale=False, amax_epsilon=0.5)
    made = quantizers(recipe)
    assert [x.block_scaling_dim for x in made] == [1, 2, 1]
    assert [(x.force_pow_2_scales, x.amax_epsilon) for x in made] == [(True, 0.0), (False, 0.5), (True, 0.0)]
    swapped = Float8BlockScaling(x_block_scaling_dim=1, w_block_scaling_dim=1, grad_block_scaling_dim=2)
    assert [x.block_scaling_dim for x in quantizers(swapped, "backward", 2)] == [2, 2]


def test_nvfp4_quantizers():
    inp, weight, out = quantizers(NVFP4BlockScaling())
    assert inp == out and inp.with_rht and inp.with_post_rht_amax
    assert not (inp.stochastic_rounding or inp.with_2d_quantization)
    assert weight.with_2d_quantization and not (weight.with_rht or weight.stochastic_rounding)
    for grad in quantizers(NVFP4BlockScaling(), "backward", 2):
        assert grad.with_rht and grad.stochastic_rounding and not grad.with_2d_quantization


@pytest.mark.parametrize(
    ("scope", "use_256", "expected"),
    [
        ("none", "all", [448, 448, 448]),
        ("weights", "all", [448, 256, 448]),
        ("activations", "none", [448, 448, 448]),
        ("all", "activations", [256, 448, 256]),
    ],
)
def test_nvfp4_four_over_six_scopes(scope, use_256, expected):
    recipe = NVFP4BlockScaling(
        disable_rht=True, nvfp4_4over6=scope, nvfp4_4over6_e4m3_use_256=use_256, nvfp4_4over6_err_mode="MSE"
    )
    made = quantizers(recipe)
    kinds = ("activations", "weights", "activations")
    assert [x.nvfp4_use_4over6 for x in made] == [scope in (kind, "all") for kind in kinds]
    assert [x.nvfp4_e4m3_max for x in made] == expected
    assert not any(x.nvfp4_use_4over6 for x in quantizers(recipe, "backward", 2))


def test_nvfp4_row_scaling_is_for_forward_tensors_other_than_weights():
    recipe = NVFP4BlockScaling(disable_rht=True, row_scaled_activation=True)
    assert [x.row_scaled_nvfp4 for x in quantizers(recipe)] == [True, False, True]
    assert not any(x.row_scaled_nvfp4 for x in quantizers(recipe, "backward", 2))


# --- custom recipes -----------------------------------------------------------------------------------


def test_custom_recipe_gets_the_roles():
    seen = []

    def factory(role):
        seen.append(role)
        return q.MXFP8Quantizer(E4M3)

    roles = [QuantizerRole("linear", "input", "a"), QuantizerRole("linear", "weight", "a")]
    assert len(quantizers(CustomRecipe(factory), count=2, roles=roles)) == 2 and seen == roles
    with pytest.warns(UserWarning, match="without quantizer roles"):
        quantizers(CustomRecipe(factory), count=2)
    assert [role.tensor_type for role in seen[2:]] == ["input", "weight"]


def test_custom_recipe_must_return_quantizers():
    with pytest.raises(ValueError, match="qfactory must return"):
        quantizers(CustomRecipe(lambda role: None), count=1, roles=[QuantizerRole("linear", "input")])


def test_delayed_scaling_requests_share_a_state():
    roles = [QuantizerRole("linear", kind) for kind in ("input", "weight", "output")]

    def factory(role):
        return q.MXFP8Quantizer(E4M3) if role.tensor_type == "weight" else DelayedScalingRequest(amax_history_len=4)

    state = RecipeState.create(CustomRecipe(factory), mode="forward", num_quantizers=3, roles=roles)
    first, second, third = state.make_quantizers()
    assert isinstance(second, q.MXFP8Quantizer)
    assert state.delayed_state.amax_history.shape == (4, 2)
    Manager.add_fp8_tensors_to_global_buffer({"scaling_fwd": state, "recipe": state.recipe, "fp8_group": None})
    with q.autocast():
        first(torch.full((2, 4), 7.0))
        third(torch.full((2, 4), -14.0))
    assert first.scale.item() == 64 and third.scale.item() == 32


def test_different_delayed_scaling_requests_are_refused():
    requests = {"input": DelayedScalingRequest(), "weight": DelayedScalingRequest(margin=1)}
    roles = [QuantizerRole("linear", kind) for kind in requests]
    with pytest.raises(ValueError, match="must be equal"):
        quantizers(CustomRecipe(lambda role: requests[role.tensor_type]), count=2, roles=roles)


def test_custom_state_without_requests_has_nothing_to_register():
    state = RecipeState.create(
        CustomRecipe(lambda role: q.MXFP8Quantizer(E4M3)), mode="forward", roles=[QuantizerRole()]
    )
    assert isinstance(state, CustomRecipeState) and state.delayed_state is None
    meta = {"scaling_fwd": state, "recipe": state.recipe, "fp8_group": None}
    Manager.add_fp8_tensors_to_global_buffer(meta)
    assert Manager.registered_states() == [] and Manager.get_buffer_info() not in meta


# --- delayed scaling ----------------------------------------------------------------------------------


def test_initial_state_and_views():
    state = RecipeState.create(DelayedScaling(amax_history_len=5), mode="forward", num_quantizers=3)
    assert isinstance(state, DelayedScalingRecipeState)
    assert torch.equal(state.scale, torch.ones(3)) and torch.equal(state.amax_history, torch.zeros(5, 3))
    made = state.make_quantizers()
    made[1](torch.tensor([[1.0, -3.0]]))
    made[1](torch.tensor([[2.0, 0.5]]))
    assert state.amax_history[0].tolist() == [0.0, 3.0, 0.0], "row 0 keeps the largest amax of the step"
    state.scale[1] = 2.0
    assert made[1].scaling().scale == 2.0


@pytest.mark.parametrize("margin", [0, 1, -1])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_fp8_scale_update_trace(margin, algorithm):
    """TE's test_fp8_scale_update: after step k, scale = fp8_max / amax / 2^margin of input, weight and gradient."""
    xs, ws, dys = [1.0, 2.0, 0.5, 4.0], [3.0, 1.5, 6.0, 0.75], [0.25, 8.0, 2.0, 1.0]
    op = FakeLinear(DelayedScaling(margin=margin, amax_history_len=1024, amax_compute_algo=algorithm))
    scales = []
    for x, w, dy in zip(xs, ws, dys, strict=True):
        with q.autocast(recipe=op.metas["forward"]["recipe"]):
            op.forward(torch.full((2, 4), x), torch.full((2, 4), -w))
        op.backward(torch.full((2, 4), dy))
        scales.append([*op.state("forward").scale.tolist(), op.state("backward").scale.item()])
    seen = [[max(v[: k + 1]) if algorithm == "max" else v[k] for v in (xs, ws, dys)] for k in range(4)]
    expected = [[448 / x / 2**margin, 448 / w / 2**margin, 57344 / dy / 2**margin] for x, w, dy in seen]
    np.testing.assert_array_equal(np.float32(scales), np.float32(expected))
    if (margin, algorithm) == (0, "max"):
        hand = [[448, 448 / 3, 229376], [224, 448 / 3, 7168], [224, 448 / 6, 7168], [112, 448 / 6, 7168]]
        np.testing.assert_array_equal(np.float32(scales), np.float32(hand))


def test_history_rolls_and_forgets():
    op = FakeLinear(DelayedScaling(amax_history_len=3))
    history, scales = op.state("forward").amax_history, []
    for value in (7.0, 1.0, 2.0, 1.0, 1.0):
        with q.autocast():
            op.forward(torch.full((1, 4), value), torch.ones(1, 4))
        scales.append(op.state("forward").scale[0].item())
    # A step's maximum counts once more while it falls out of the history, as in TE's kernel.
    assert scales == [64, 64, 64, 224, 224]
    assert history[:, 0].tolist() == [0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("history", "old", "algorithm", "margin", "mode", "new_history", "new_scale"),
    [
        ([3, 1, 7, 2], 1, "max", 0, "forward", [0, 7, 2, 3], 64),
        ([3, 1, 7, 2], 1, "most_recent", 0, "forward", [0, 7, 2, 3], 448 / 3),
        ([3, 9, 7, 2], 1, "max", 0, "forward", [0, 7, 2, 3], 448 / 9),
        ([0, 1, 7, 2], 5, "max", 0, "forward", [0, 1, 7, 2], 5),
        ([1e-37, 0, 0, 0], 1, "max", 0, "forward", [0, 0, 0, 1e-37], np.finfo(np.float32).max),
        ([np.inf, 1, 7, 2], 5, "max", 0, "forward", [0, 7, 2, np.inf], 5),
        ([7, 0, 0, 0], 1, "max", 1, "backward", [0, 0, 0, 7], 4096),
    ],
)
def test_update_examples_of_the_kernel(history, old, algorithm, margin, mode, new_history, new_scale):
    recipe = DelayedScaling(amax_history_len=4, amax_compute_algo=algorithm, margin=margin)
    state = RecipeState.create(recipe, mode=mode)
    state.amax_history[:, 0], state.scale[0] = torch.tensor(history, dtype=torch.float32), float(old)
    pointers = state.amax_history.data_ptr(), state.scale.data_ptr()
    state.update_scales()
    np.testing.assert_array_equal(state.amax_history[:, 0].numpy(), np.float32(new_history))
    np.testing.assert_array_equal(state.scale.numpy(), np.float32([new_scale]))
    assert (state.amax_history.data_ptr(), state.scale.data_ptr()) == pointers, "quantizers keep their views"


def test_update_equals_refops():
    rng = np.random.default_rng(0)
    state = RecipeState.create(DelayedScaling(amax_history_len=6), mode="forward", num_quantizers=5)
    state.amax_history.copy_(torch.from_numpy(rng.uniform(0, 9, (6, 5)).astype(np.float32)))
    state.amax_history[0, 2] = 0
    expected = refops.update_delayed_scale(state.amax_history.numpy().copy(), state.scale.numpy().copy(), refops.E4M3)
    state.update_scales()
    np.testing.assert_array_equal(state.amax_history.numpy(), expected[0])
    np.testing.assert_array_equal(state.scale.numpy(), expected[1])


def test_unfused_update_always_rolls(monkeypatch):
    monkeypatch.setenv("NVTE_UNFUSED_FP8_UPDATE", "1")
    state = RecipeState.create(DelayedScaling(amax_history_len=4), mode="forward")
    state.amax_history[:, 0], state.scale[0] = torch.tensor([0.0, 1, 7, 2]), 5.0
    state.update_scales()
    assert state.amax_history[:, 0].tolist() == [0, 7, 2, 0] and state.scale.item() == 64


def test_callables():
    calls = []

    def amax_algorithm(history):
        calls.append(("amax", type(history), tuple(history.shape)))
        return history.sum(dim=0)

    def scale_algorithm(amax, scale, fp8_max, recipe):
        calls.append(("scale", amax.tolist(), scale.tolist(), fp8_max.item(), recipe.margin))
        return fp8_max / amax / 4

    recipe = DelayedScaling(
        amax_history_len=3, amax_compute_algo=amax_algorithm, scaling_factor_compute_algo=scale_algorithm
    )
    state = RecipeState.create(recipe, mode="forward", num_quantizers=2)
    state.amax_history.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0], [0.0, 8.0]]))
    state.update_scales()
    assert calls == [("amax", torch.Tensor, (3, 2)), ("scale", [4.0, 14.0], [1.0, 1.0], 448.0, 0)]
    assert state.scale.tolist() == [28.0, 8.0]
    assert state.amax_history.tolist() == [[0.0, 0.0], [0.0, 8.0], [1.0, 2.0]]


def test_scale_callable_with_a_named_amax_algorithm():
    recipe = DelayedScaling(
        amax_history_len=2, amax_compute_algo="most_recent", scaling_factor_compute_algo=lambda amax, *_: amax * 2
    )
    state = RecipeState.create(recipe, mode="forward")
    state.amax_history[:, 0] = torch.tensor([3.0, 9.0])
    state.update_scales()
    assert state.scale.item() == 6.0


# --- registration -------------------------------------------------------------------------------------


def test_registration_happens_once():
    op = FakeLinear(DelayedScaling())
    for _ in range(3):
        for meta in op.metas.values():
            Manager.add_fp8_tensors_to_global_buffer(meta)
    assert Manager.registered_states(True) == [op.state("forward")]
    assert Manager.registered_states(False) == [op.state("backward")]
    position, key = op.metas["forward"][Manager.get_buffer_info()]
    assert position == 0 and key == Manager.get_key_in_buffer(True, op.metas["forward"]["recipe"], None)


def test_other_recipes_are_not_registered():
    op = FakeLinear(MXFP8BlockScaling())
    for meta in op.metas.values():
        Manager.add_fp8_tensors_to_global_buffer(meta)
    assert not Manager.quantization_state.registered


def test_ops_that_did_not_run_keep_their_scale():
    ran, idle = FakeLinear(DelayedScaling()), FakeLinear(DelayedScaling())
    for op in (ran, idle):
        with q.autocast():
            op.forward(torch.full((1, 4), 7.0), torch.ones(1, 4))
    before = idle.state("forward").amax_history.clone(), idle.state("forward").scale.clone()
    with q.autocast():
        ran.forward(torch.full((1, 4), 14.0), torch.ones(1, 4))
    assert ran.state("forward").scale[0].item() == 32
    assert torch.equal(idle.state("forward").amax_history, before[0])
    assert torch.equal(idle.state("forward").scale, before[1])


def test_changed_recipe_values_are_used_at_the_next_update():
    recipe = DelayedScaling()
    op = FakeLinear(recipe)
    with q.autocast():
        op.forward(torch.full((1, 4), 7.0), torch.ones(1, 4))
    recipe.margin = 3
    with q.autocast():
        op.forward(torch.full((1, 4), 7.0), torch.ones(1, 4))
    assert op.state("forward").scale.tolist() == [8.0, 56.0]


def test_another_recipe_object_is_used_at_the_next_update():
    op = FakeLinear(DelayedScaling())
    for margin, scale in ((0, 64), (3, 8)):
        op.metas["forward"]["recipe"] = DelayedScaling(margin=margin)
        with q.autocast():
            op.forward(torch.full((1, 4), 7.0), torch.ones(1, 4))
        assert op.state("forward").scale[0].item() == scale


def test_replaced_history_is_used_at_the_next_update():
    """TE kept pointing at the old buffer once (PR 2044)."""
    op = FakeLinear(DelayedScaling(amax_history_len=4))
    with q.autocast():
        op.forward(torch.full((1, 4), 7.0), torch.ones(1, 4))
    state = op.state("forward")
    state.amax_history = state.amax_history[:2].clone()
    op.quantizers["forward"] = state.make_quantizers()
    with q.autocast():
        op.forward(torch.full((1, 4), 3.5), torch.ones(1, 4))
    assert state.scale[0].item() == 128 and state.amax_history[:, 0].tolist() == [0.0, 3.5]


def test_dropped_states_leave_the_registry():
    op = FakeLinear(DelayedScaling())
    with q.autocast():
        op.forward(torch.ones(1, 4), torch.ones(1, 4))
    gone = weakref.ref(op.state("forward"))
    del op
    gc.collect()
    assert gone() is None and Manager.registered_states() == []
    kept = [FakeLinear(DelayedScaling())]
    for _ in range(100):
        with q.autocast():
            FakeLinear(DelayedScaling()).forward(torch.ones(1, 4), torch.ones(1, 4))
            kept[0].forward(torch.ones(1, 4), torch.ones(1, 4))
    assert len(Manager.quantization_state.registered) < 10


def test_a_deep_copy_has_its_own_state():
    op = FakeLinear(DelayedScaling(), group=None)
    with q.autocast():
        op.forward(torch.full((1, 4), 7.0), torch.ones(1, 4))
    twin = copy.deepcopy(op)
    with q.autocast():
        twin.forward(torch.full((1, 4), 14.0), torch.ones(1, 4))
    assert twin.state("forward").scale[0].item() == 32 and op.state("forward").scale[0].item() == 64
    assert twin.quantizers["forward"][0].scale.item() == 32, "its quantizers view its own state"


def test_a_group_survives_a_deep_copy():
    class Group:
        def __deepcopy__(self, memo):
            raise TypeError("cannot pickle process groups")

    state = RecipeState.create(DelayedScaling(), mode="forward")
    state.group = Group()
    assert copy.deepcopy(state).group is state.group


def test_state_made_in_inference_mode_can_be_updated_outside():
    with torch.inference_mode():
        state = RecipeState.create(DelayedScaling(), mode="forward")
    state.make_quantizers()[0](torch.full((1, 4), 7.0))
    state.update_scales()
    assert state.scale.item() == 64


def test_backward_update_is_by_the_first_module():
    first, second = FakeLinear(DelayedScaling()), FakeLinear(DelayedScaling())
    with q.autocast():
        first.forward(torch.ones(1, 4), torch.ones(1, 4))
        second.forward(torch.ones(1, 4), torch.ones(1, 4))
    assert first.is_first and not second.is_first
    second.backward(torch.full((1, 4), 7.0))
    assert second.state("backward").scale.item() == 1.0
    first.backward(torch.full((1, 4), 14.0))
    assert [op.state("backward").scale.item() for op in (first, second)] == [4096, 8192]


# --- reduction over processes ---------------------------------------------------------------------------


def reduced_by(monkeypatch, other):
    """Pretend that another rank has the amaxes `other`; returns the list of what was reduced."""
    seen = []

    def reduce_amax(amax, group):
        seen.append((amax.tolist(), group))
        return torch.maximum(amax, torch.tensor(other), out=amax)

    monkeypatch.setattr("fuser.quantization.state.reduce_amax", reduce_amax)
    monkeypatch.setattr("fuser.quantization.state.get_distributed_world_size", lambda group: 2)
    return seen


def test_amaxes_of_a_group_are_reduced_together(monkeypatch):
    seen = reduced_by(monkeypatch, [0.0, 28.0, 3.5, 0.0])
    group = object()
    ops = [FakeLinear(DelayedScaling(), group) for _ in range(2)]
    with q.autocast():
        for op, value in zip(ops, (7.0, 14.0), strict=True):
            op.forward(torch.full((1, 4), value), torch.zeros(1, 4))
    assert seen == [([7.0, 0.0, 14.0, 0.0], group)]
    scales = [op.state("forward").scale.tolist() for op in ops]
    assert scales == [[64, 16], [32, 1]]


def test_groups_and_recipes_are_reduced_apart(monkeypatch):
    seen = reduced_by(monkeypatch, [0.0, 0.0])
    one, two = object(), object()
    ops = [
        FakeLinear(DelayedScaling(), one),
        FakeLinear(DelayedScaling(), two),
        FakeLinear(DelayedScaling(margin=1), two),
    ]
    with q.autocast():
        for i, op in enumerate(ops):
            op.forward(torch.full((1, 4), 7.0 * 2**i), torch.zeros(1, 4))
    assert seen == [([7.0, 0.0], one), ([14.0, 0.0], two), ([28.0, 0.0], two)]


def test_states_stay_registered_while_ranks_must_agree(monkeypatch):
    reduced_by(monkeypatch, [0.0, 0.0])
    op = FakeLinear(DelayedScaling())
    Manager.add_fp8_tensors_to_global_buffer(op.metas["forward"])
    del op
    gc.collect()
    assert len(Manager.registered_states()) == 1


def test_no_reduction_when_the_recipe_says_so(monkeypatch):
    seen = reduced_by(monkeypatch, [0.0, 0.0])
    op = FakeLinear(DelayedScaling(reduce_amax=False))
    with q.autocast():
        op.forward(torch.full((1, 4), 7.0), torch.ones(1, 4))
    assert not seen and op.state("forward").scale[0].item() == 64
