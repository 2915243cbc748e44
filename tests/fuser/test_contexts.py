"""`autocast`, `quantized_model_init`, the deprecated names, and the probes."""

import sys
import threading
import warnings

import pytest
import torch

import fuser
from fuser import jit
from fuser import quantization as q
from fuser.cards import current_products
from fuser.dispatch import current_backend
from fuser.quantization.state import FP8GlobalStateManager as Manager
from fuser.quantization.state import RecipeState
from fuser.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

pytestmark = pytest.mark.check

#: `q.autocast` is the class of the same name.
module = sys.modules["fuser.quantization.contexts"]


def registered(recipe, mode="forward"):
    state = RecipeState.create(recipe, mode=mode, num_quantizers=1)
    key = Manager.get_meta_tensor_key(forward=mode == "forward")
    meta = {key: state, "recipe": recipe, "fp8_group": None}
    Manager.add_fp8_tensors_to_global_buffer(meta)
    return state


def test_modules_of_torch_that_were_not_converted_compute_as_without_it():
    x, model = torch.randn(32, 64), torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
    y = model(x)
    with q.autocast(recipe=MXFP8BlockScaling()):
        assert torch.equal(model(x), y)
        assert not torch.equal(fuser.convert(model, NVFP4BlockScaling())(x), y)


def test_enter_sets_and_exit_restores():
    recipe, group = MXFP8BlockScaling(), object()
    assert not Manager.is_fp8_enabled()
    with q.autocast(recipe=recipe, calibrating=True, amax_reduction_group=group):
        assert Manager.is_fp8_enabled() and Manager.is_fp8_calibration()
        assert Manager.get_fp8_recipe() is recipe and Manager.get_fp8_group() is group
    assert not Manager.is_fp8_enabled() and not Manager.is_fp8_calibration()
    assert Manager.get_fp8_group() is None and Manager.quantization_state.fp8_recipe is None


def test_restored_after_an_error():
    with pytest.raises(KeyError), q.autocast():
        raise KeyError
    assert not Manager.is_fp8_enabled() and Manager.quantization_state.autocast_depth == 0


def test_the_innermost_context_decides():
    outer, inner = MXFP8BlockScaling(), Float8CurrentScaling()
    with q.autocast(recipe=outer):
        with q.autocast(enabled=False):
            assert not Manager.is_fp8_enabled()
            with q.autocast(recipe=inner):
                assert Manager.is_fp8_enabled() and Manager.get_fp8_recipe() is inner
        assert Manager.is_fp8_enabled() and Manager.get_fp8_recipe() is outer


def test_an_instance_can_be_entered_again_but_not_while_active():
    context = q.autocast(recipe=MXFP8BlockScaling())
    for _ in range(2):
        with context:
            assert Manager.is_fp8_enabled()
            with pytest.raises(RuntimeError, match="cannot be entered more than once concurrently"), context:
                pass
            assert Manager.is_fp8_enabled()
    assert Manager.quantization_state.autocast_depth == 0


def test_first_module_is_the_first_to_ask_in_the_outermost_context():
    assert not Manager.is_first_fp8_module()
    with q.autocast():
        with q.autocast():
            assert Manager.is_first_fp8_module()
            assert not Manager.is_first_fp8_module()
        # The snapshot puts the flag back that nested entry had found.
        assert Manager.is_first_fp8_module()
        assert not Manager.is_first_fp8_module()
        with q.autocast():
            assert not Manager.is_first_fp8_module()


def test_only_the_outermost_enabled_exit_updates_forward_scales():
    forward, backward = registered(DelayedScaling()), registered(DelayedScaling(), mode="backward")
    backward.amax_history[0] = 7.0
    with q.autocast():
        with q.autocast():
            forward.amax_history[0] = 7.0
        assert forward.scale.item() == 1.0
    assert forward.scale.item() == 448 / 7 and backward.scale.item() == 1.0
    assert forward.amax_history[0].item() == 0.0 and forward.amax_history[-1].item() == 7.0


@pytest.mark.parametrize("context", ["disabled", "disabled outermost", "graph", "no_grad", "inference_mode"])
def test_what_never_updates(context):
    state = registered(DelayedScaling())
    state.amax_history[0] = 7.0
    if context == "disabled":
        with q.autocast(enabled=False):
            pass
    elif context == "disabled outermost":
        with q.autocast(enabled=False), q.autocast():
            pass
    elif context == "graph":
        with q.autocast(_graph=True):
            assert Manager.fp8_graph_capturing()
    else:
        with getattr(torch, context)(), q.autocast():
            pass
    assert state.scale.item() == 1.0 and state.amax_history[0].item() == 7.0


def test_disabled_context_needs_no_recipe_and_no_gpu():
    with q.autocast(enabled=False):
        assert isinstance(Manager.get_fp8_recipe(), (DelayedScaling, MXFP8BlockScaling, Float8CurrentScaling))


@pytest.mark.parametrize(
    ("capability", "cls"),
    [
        ((0, 0), DelayedScaling),
        ((9, 0), DelayedScaling),
        ((10, 0), MXFP8BlockScaling),
        ((10, 3), MXFP8BlockScaling),
        ((12, 0), Float8CurrentScaling),
    ],
)
def test_default_recipe_by_hardware(monkeypatch, capability, cls):
    monkeypatch.setattr("fuser.quantization.state._compute_capability", lambda: capability)
    assert type(q.get_default_recipe()) is cls


def test_unknown_recipe_is_refused_on_entry():
    context = q.autocast(recipe="mxfp8")
    with pytest.raises(RuntimeError, match=r"fuser\.recipe"), context:
        pass
    assert Manager.quantization_state.autocast_depth == 0


def test_deprecated_names_warn_and_work():
    recipe, group = MXFP8BlockScaling(), object()
    with pytest.warns(DeprecationWarning, match="fp8_autocast"):
        context = q.fp8_autocast(enabled=True, fp8_recipe=recipe, fp8_group=group)
    with context:
        assert Manager.get_fp8_recipe() is recipe and Manager.get_fp8_group() is group
    with pytest.warns(DeprecationWarning, match="fp8_model_init"):
        context = q.fp8_model_init(recipe=recipe)
    with context:
        assert Manager.with_fp8_parameters() and Manager.get_fp8_recipe() is recipe


def test_the_new_names_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with q.autocast(), q.quantized_model_init():
            pass


def test_quantized_model_init():
    recipe = MXFP8BlockScaling()
    with pytest.raises(KeyError), q.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        assert Manager.with_fp8_parameters() and Manager.with_high_precision_init_val()
        assert Manager.get_fp8_recipe() is recipe and not Manager.is_fp8_enabled()
        with q.quantized_model_init(enabled=False):
            assert not Manager.with_fp8_parameters()
        assert Manager.with_fp8_parameters()
        raise KeyError
    assert not Manager.with_fp8_parameters() and not Manager.with_high_precision_init_val()


#: Scopes, each with what shows that it is in force, and that value.
SCOPES = {
    "products": (lambda: fuser.products("hopper"), lambda: current_products().name, "hopper"),
    "backend": (lambda: fuser.backend("reference"), current_backend, "reference"),
    "quantized_model_init": (
        lambda: q.quantized_model_init(recipe=MXFP8BlockScaling()),
        Manager.with_fp8_parameters,
        True,
    ),
    "compilation": (lambda: jit.compilation(False), jit.compilation_enabled, False),
    "onnx_export": (lambda: jit.onnx_export(True), jit.is_in_onnx_export_mode, True),
}


@pytest.mark.parametrize("name", SCOPES)
def test_a_scope_can_be_entered_again_and_inside_of_itself(name):
    make, in_force, value = SCOPES[name]
    scope, outside = make(), in_force()
    assert outside != value
    for _ in range(2):
        with pytest.raises(KeyError), scope:
            with scope:
                assert in_force() == value
            assert in_force() == value
            raise KeyError
        assert in_force() == outside

    @scope
    def recursive(depth):
        assert in_force() == value
        return recursive(depth - 1) if depth else in_force()

    assert recursive(2) == value and in_force() == outside


def test_threads_share_a_scope():
    """Each leaves its own: the first to enter is the first to leave."""
    scope, entered, left, seen = fuser.products("hopper"), threading.Event(), threading.Event(), []

    def work():
        with scope:
            entered.set()
            left.wait(10)
            seen.append(current_products().name)
        seen.append(current_products().name)

    thread = threading.Thread(target=work)
    with scope:
        thread.start()
        assert entered.wait(10)
    assert current_products().name == "float32"
    left.set()
    thread.join()
    assert seen == ["hopper", "float32"]


def test_arguments_of_a_scope_are_checked_where_it_is_made():
    with pytest.raises(TypeError, match="unexpected keyword argument 'on'"):
        jit.compilation(on=True)


PROBES = (
    q.is_fp8_available,
    q.is_mxfp8_available,
    q.is_fp8_block_scaling_available,
    q.is_nvfp4_available,
    q.is_bf16_available,
)


@pytest.mark.parametrize("probe", PROBES)
def test_every_format_is_available_and_the_reason_says_how(probe, monkeypatch):
    assert probe() is True
    monkeypatch.setattr(module, "_compute_capability", lambda: (0, 0))
    available, reason = probe(return_reason=True)
    assert available is True and "emulated on the CPU" in reason


def test_native_where_the_gpu_has_it(monkeypatch):
    monkeypatch.setattr(module, "_compute_capability", lambda: (10, 0))
    assert "native on a GPU of compute capability 10.0" in q.is_mxfp8_available(return_reason=True)[1]
    assert "native" in q.is_fp8_available(return_reason=True)[1]
    monkeypatch.setattr(module, "_compute_capability", lambda: (9, 0))
    assert "emulated" in q.is_mxfp8_available(return_reason=True)[1]


def test_alignment():
    sizes = {DelayedScaling: 16, Float8CurrentScaling: 16, Float8BlockScaling: 16, MXFP8BlockScaling: 32}
    assert all(q.get_align_size_for_quantization(cls()) == size for cls, size in sizes.items())
    assert q.get_align_size_for_quantization(NVFP4BlockScaling()) == 128
    assert q.get_align_size_for_quantization(CustomRecipe(print, quantization_alignment=48)) == 48


@pytest.mark.parametrize(
    "context, arguments, flag",
    [
        (q.autocast, (MXFP8BlockScaling(),), "enabled"),
        (q.autocast, (True, MXFP8BlockScaling()), "calibrating"),
        (q.quantized_model_init, (MXFP8BlockScaling(),), "enabled"),
        (q.quantized_model_init, ("nonsense",), "enabled"),
        (q.quantized_model_init, (True, None, 1), "preserve_high_precision_init_val"),
    ],
)
def test_a_recipe_by_position_is_an_error(context, arguments, flag):
    """Flags come first: a recipe there would be true, and the default recipe would run."""
    rule = rf"{flag} must be True or False; got .*{context.__name__}\(recipe=\.\.\.\)"
    with pytest.raises(TypeError, match=rule):
        context(*arguments)


def test_a_class_for_a_recipe_is_named():
    with (
        pytest.raises(RuntimeError, match=r"instance of a recipe.*MXFP8BlockScaling\(\)"),
        q.autocast(recipe=MXFP8BlockScaling),
    ):
        pass
