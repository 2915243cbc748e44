"""Recipe state over time: copies and pickles of models, recipes edited in place, threads, states nobody uses."""

import copy
import gc
import io
import multiprocessing.reduction
import pickle
import threading

import pytest
import torch

import fuser
from fuser import ops
from fuser.quantization.state import DelayedScalingRequest, RecipeState
from fuser.quantization.state import FP8GlobalStateManager as Manager
from fuser.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
)

SIZE = 16


def delayed(**values):
    return DelayedScaling(amax_history_len=4, **values)


def step(model, recipe, x=1.0, dy=1.0):
    with fuser.autocast(recipe=recipe):
        y = model(torch.full((SIZE, SIZE), float(x)))
    y.backward(torch.full((SIZE, SIZE), float(dy)))


def state_of(model, mode="forward"):
    return model[0]._fp8_metas[mode][{"forward": "scaling_fwd", "backward": "scaling_bwd"}[mode]].delayed_state


def request(role):
    return DelayedScalingRequest(amax_history_len=4)


# --- copies and pickles -------------------------------------------------------------------------------


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved_and_loaded,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("recipe", [delayed(), CustomRecipe(qfactory=request)], ids=["delayed", "custom"])
@pytest.mark.parametrize("suspended", [False, True])
@pytest.mark.parametrize("way", COPIES)
def test_a_copied_model_goes_on_as_the_original(way, suspended, recipe):
    model = ops.Sequential(ops.BasicLinear(SIZE, SIZE))
    step(model, recipe)
    if suspended:
        model(torch.ones(SIZE, SIZE))
    twin = COPIES[way](model)
    for x in (10, 100, 1000):
        for one in (model, twin):
            step(one, recipe, x, x)
    for mode in ("forward", "backward"):
        one, other = state_of(model, mode), state_of(twin, mode)
        assert one is not other and other.amax_history.data_ptr() != one.amax_history.data_ptr()
        assert torch.equal(one.scale, other.scale) and torch.equal(one.amax_history, other.amax_history)
        quantizers = [twin[0].get_quantizer(mode, i) for i in range(other.num_quantizers)]
        assert [q.scale.item() for q in quantizers] == other.scale.tolist()
    assert state_of(twin).amax_history[:, 0].tolist() == [0.0, 10.0, 100.0, 1000.0]


@pytest.mark.parametrize("way", COPIES)
def test_a_write_to_the_scales_of_a_copy_is_seen(way):
    """A GPU's quantizer reads its scale again when the version changes, which a view shares with its base."""
    model = ops.Sequential(ops.BasicLinear(SIZE, SIZE))
    step(model, delayed())
    twin = COPIES[way](model)
    version = twin[0].get_quantizer("forward", 0).scale._version
    state_of(twin).update_scales()
    assert twin[0].get_quantizer("forward", 0).scale._version > version


def test_a_model_sent_to_another_process_is_connected():
    """It shares its memory with the sender's, as in torch."""
    model = ops.Sequential(ops.BasicLinear(SIZE, SIZE))
    step(model, delayed())
    twin = pickle.loads(multiprocessing.reduction.ForkingPickler.dumps(model))
    twin[0].get_quantizer("forward", 0).amax.fill_(9.0)
    assert state_of(twin).amax_history[0, 0].item() == 9.0


@pytest.mark.filterwarnings("error")
def test_a_pickled_quantized_weight_follows_its_operation():
    recipe = delayed()
    with fuser.quantized_model_init(recipe=recipe):
        model = ops.Sequential(ops.BasicLinear(SIZE, SIZE))
    step(model, recipe)
    twin = pickle.loads(pickle.dumps(model))
    step(twin, recipe, 10)
    assert twin[0].weight._quantizer.scale is twin[0].get_quantizer("forward", 1).scale


def test_a_process_group_stays_out_of_a_pickle():
    class Group:
        def __reduce__(self):
            raise TypeError("cannot pickle process groups")

    model = ops.Sequential(ops.BasicLinear(SIZE, SIZE))
    with fuser.autocast(recipe=delayed(), amax_reduction_group=Group()):
        model(torch.ones(SIZE, SIZE))
    assert state_of(pickle.loads(pickle.dumps(model))).group is None


# --- recipes edited in place --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        (Float8CurrentScaling, "use_power_2_scales"),
        (NVFP4BlockScaling, "disable_rht"),
        (NVFP4BlockScaling, "disable_2d_quantization"),
        (NVFP4BlockScaling, "disable_stochastic_rounding"),
    ],
)
def test_quantizers_follow_an_edited_recipe(cls, name):
    def quantizers(model):
        return [repr(model[0].get_quantizer(*slot)) for slot in (("forward", 0), ("forward", 1), ("backward", 0))]

    model, fresh_model = (ops.Sequential(ops.BasicLinear(SIZE, SIZE)) for _ in range(2))
    recipe = cls()
    step(model, recipe)
    before = quantizers(model)
    setattr(recipe, name, True)
    step(model, recipe)
    step(fresh_model, cls(**{name: True}))
    assert quantizers(model) == quantizers(fresh_model) != before


def test_assigned_qparams_count():
    recipe, model = Float8CurrentScaling(), ops.Sequential(ops.BasicLinear(SIZE, SIZE))
    step(model, recipe)
    recipe.fp8_quant_fwd_inp = QParams(amax_epsilon=0.5)
    step(model, recipe)
    assert [model[0].get_quantizer("forward", i).amax_epsilon for i in (0, 1)] == [0.5, 0.0]


EDITS = {
    "margin": lambda recipe: setattr(recipe, "margin", 1),
    "format": lambda recipe: setattr(recipe, "fp8_format", Format.E4M3),
    "longer": lambda recipe: setattr(recipe, "amax_history_len", 7),
    "shorter": lambda recipe: setattr(recipe, "amax_history_len", 2),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("custom", [False, True])
def test_amaxes_of_a_pending_backward_pass_count_after_an_edit(edit, custom):
    model, recipe = ops.Sequential(ops.BasicLinear(SIZE, SIZE)), delayed()

    def factory(role):
        return DelayedScalingRequest(recipe.margin, recipe.fp8_format, recipe.amax_history_len)

    def present():
        return CustomRecipe(qfactory=lambda role: factory(role)) if custom else recipe

    step(model, present(), dy=3.0)
    with fuser.autocast(recipe=present()):
        y = model(torch.ones(SIZE, SIZE))
    EDITS[edit](recipe)
    with torch.no_grad(), fuser.autocast(recipe=present()):
        model(torch.full((SIZE, SIZE), 5.0))
    y.backward(torch.full((SIZE, SIZE), 7.0))
    backward, forward = state_of(model, "backward"), state_of(model)
    assert len(backward.amax_history) == recipe.amax_history_len
    assert backward.amax_history[-1, 0].item() == 7.0
    assert backward.scale.item() == backward.dtype.format.max / 2**recipe.margin / 7.0
    assert forward.amax_history[0, 0].item() == 5.0


def test_a_pending_backward_pass_casts_as_its_forward_pass_meant_to():
    """A scale for another format would clip, or waste, its gradients."""
    x = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    dy = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(2))
    gradients = []
    for edited in (False, True):
        torch.manual_seed(0)
        model, recipe = ops.Sequential(ops.BasicLinear(SIZE, SIZE)), delayed(fp8_format=Format.E4M3)
        for last in (False, True):
            with fuser.autocast(recipe=recipe):
                y = model(x)
            if last and edited:
                recipe.fp8_format = Format.HYBRID
                with torch.no_grad(), fuser.autocast(recipe=recipe):
                    model(x)
            model.zero_grad()
            y.backward(dy)
        gradients.append(model[0].weight.grad)
    assert torch.equal(*gradients)


def test_a_history_that_grows_again_is_padded_with_zeros():
    state = RecipeState.create(delayed(), mode="forward", num_quantizers=2)
    state.amax_history[:] = 3.0
    for length, total in ((2, 12.0), (5, 12.0)):
        state.follow(DelayedScaling(amax_history_len=length))
        assert state.amax_history.shape == (length, 2) and state.amax_history.sum().item() == total


# --- states nobody uses -------------------------------------------------------------------------------


def test_changing_values_register_nothing_new():
    model, recipe = ops.Sequential(ops.BasicLinear(SIZE, SIZE)), delayed()
    for i in range(50):
        recipe.margin = i % 2
        step(model, recipe)
        step(model, CustomRecipe(qfactory=lambda role: DelayedScalingRequest(amax_history_len=4)))
    gc.collect()
    assert len(Manager.registered_states()) <= 2 and len(Manager.quantization_state.registered) <= 4


def test_dead_states_between_live_ones_leave_the_registry_without_any_update():
    kept = []
    for _ in range(200):
        states = [RecipeState.create(delayed(), mode="forward") for _ in range(2)]
        for state in states:
            Manager.add_fp8_tensors_to_global_buffer({"scaling_fwd": state, "recipe": state.recipe, "fp8_group": None})
        if len(kept) < 20:
            kept.append(states[1])
        del states, state
    assert len(Manager.quantization_state.registered) <= 16 + 2 * len(kept) + 2
    assert Manager.registered_states() == kept
    for state in kept:  # once more changes nothing
        Manager.add_fp8_tensors_to_global_buffer({"scaling_fwd": state, "recipe": state.recipe, "fp8_group": None})
    assert Manager.registered_states() == kept


# --- threads ------------------------------------------------------------------------------------------


def run_in_threads(*functions):
    errors = []

    def guarded(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]


def test_threads_have_their_own_autocast():
    a_is_in, b_is_in, a_is_out = (threading.Event() for _ in range(3))

    def a():
        with fuser.autocast(recipe=Float8CurrentScaling()):
            a_is_in.set()
            assert b_is_in.wait(60)
            assert isinstance(Manager.get_fp8_recipe(), Float8CurrentScaling)
        a_is_out.set()

    def b():
        assert a_is_in.wait(60) and not Manager.is_fp8_enabled()
        with fuser.autocast(recipe=MXFP8BlockScaling()), fuser.quantized_model_init(recipe=MXFP8BlockScaling()):
            b_is_in.set()
            assert a_is_out.wait(60)
            assert Manager.is_fp8_enabled() and isinstance(Manager.get_fp8_recipe(), MXFP8BlockScaling)
            assert Manager.is_first_fp8_module() and Manager.with_fp8_parameters()

    with fuser.autocast(recipe=NVFP4BlockScaling()):
        run_in_threads(a, b)
        assert isinstance(Manager.get_fp8_recipe(), NVFP4BlockScaling) and not Manager.with_fp8_parameters()
    assert not Manager.is_fp8_enabled() and Manager.quantization_state.autocast_depth == 0


def test_threads_share_the_amax_histories():
    model, recipe = ops.Sequential(ops.BasicLinear(SIZE, SIZE)), delayed()
    run_in_threads(lambda: step(model, recipe, 7))
    assert state_of(model).scale[0].item() == 64
    assert Manager.registered_states() == [state_of(model)]


def test_backward_in_another_thread_needs_no_settings():
    results = []
    for elsewhere in (False, True):
        Manager.reset()
        torch.manual_seed(0)
        model, recipe = ops.Sequential(ops.Linear(SIZE, SIZE), ops.GELU(), ops.BasicLinear(SIZE, SIZE)), delayed()
        for _ in range(2):
            with fuser.autocast(recipe=recipe):
                y = model(torch.randn(SIZE, SIZE))
                backward = y.sum().backward
                run_in_threads(backward) if elsewhere else backward()
        states = Manager.registered_states(forward=False)
        results.append([*(p.grad for p in model.parameters()), *(s.scale for s in states)])
        assert any(s.scale.item() != 1.0 for s in states)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_captured_forward_pass_updates_no_scales_from_another_thread():
    model = ops.Sequential(ops.BasicLinear(SIZE, SIZE))
    step(model, delayed(), dy=7.0)
    scale = state_of(model, "backward").scale.clone()
    with fuser.autocast(recipe=delayed(), _graph=True):
        y = model(torch.ones(SIZE, SIZE))
        run_in_threads(lambda: y.backward(torch.full((SIZE, SIZE), 700.0)))
    assert torch.equal(state_of(model, "backward").scale, scale)


def test_registering_from_many_threads():
    states = [[RecipeState.create(delayed(), mode="forward") for _ in range(50)] for _ in range(8)]

    def register(mine):
        for state in mine:
            Manager.add_fp8_tensors_to_global_buffer({"scaling_fwd": state, "recipe": state.recipe, "fp8_group": None})
            Manager.registered_states()

    run_in_threads(*(lambda mine=mine: register(mine) for mine in states))
    assert len({id(state) for state in Manager.registered_states()}) == 400 == len(Manager.registered_states())


def test_compiled_code_leaves_the_settings_of_its_thread():
    model, recipe = ops.Sequential(ops.BasicLinear(2 * SIZE, 2 * SIZE)), MXFP8BlockScaling()

    @torch.compile(backend="eager")
    def compiled(x):
        with fuser.autocast(recipe=recipe):
            return model(x * 1.0) + 1

    def check():
        for _ in range(2):
            compiled(torch.ones(2 * SIZE, 2 * SIZE))
            assert not Manager.is_fp8_enabled() and Manager.quantization_state.autocast_depth == 0

    check()
    run_in_threads(check)
