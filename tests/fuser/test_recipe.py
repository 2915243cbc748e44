"""Recipes: defaults, what they refuse, predicates, fingerprints."""

import copy
import pickle

import pytest

from fuser import recipe as r
from fuser.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    Recipe,
)

pytestmark = pytest.mark.check

PREDICATES = {
    DelayedScaling: {"delayed", "float8_per_tensor_scaling"},
    Float8CurrentScaling: {"float8_current_scaling", "float8_per_tensor_scaling"},
    MXFP8BlockScaling: {"mxfp8"},
    Float8BlockScaling: {"float8_block_scaling"},
    NVFP4BlockScaling: {"nvfp4"},
    CustomRecipe: {"custom"},
}
ALL = set().union(*PREDICATES.values())


def make(cls, **values):
    return cls(qfactory=lambda role: None, **values) if cls is CustomRecipe else cls(**values)


@pytest.mark.parametrize("cls", PREDICATES)
def test_predicates_answer_for_class_and_instance(cls):
    subclass = type("Mine", (cls,), {})
    for target in (cls, make(cls), subclass):
        assert {name for name in ALL if getattr(target, name)()} == PREDICATES[cls]


def test_formats_have_their_maxima():
    values = {f.name: tuple(f.value) for f in Format}
    assert values == {"E2M1": (6, 6), "E4M3": (448, 448), "E5M2": (57344, 57344), "HYBRID": (448, 57344)}
    assert (Format.HYBRID.value.max_fwd, Format.HYBRID.value.max_bwd) == (448, 57344)


def test_defaults():
    delayed = DelayedScaling()
    assert (delayed.margin, delayed.fp8_format, delayed.amax_history_len) == (0, Format.HYBRID, 1024)
    assert (delayed.amax_compute_algo, delayed.scaling_factor_compute_algo, delayed.reduce_amax) == ("max", None, True)
    current = Float8CurrentScaling()
    assert (current.use_power_2_scales, current.fp8_format) == (False, Format.HYBRID)
    assert (current.fp8_gemm_fprop, current.fp8_gemm_dgrad) == (MMParams(False), MMParams(True))
    block = Float8BlockScaling()
    assert (block.x_block_scaling_dim, block.w_block_scaling_dim, block.grad_block_scaling_dim) == (1, 2, 1)
    assert block.fp8_quant_fwd_inp == QParams(power_2_scale=True)
    nvfp4 = NVFP4BlockScaling()
    assert nvfp4.fp4_quant_fwd_inp == QParams(random_hadamard_transform=True)
    assert nvfp4.fp4_quant_fwd_weight == QParams(fp4_2d_quantization=True)
    assert nvfp4.fp4_quant_bwd_grad == QParams(random_hadamard_transform=True, stochastic_rounding=True)
    assert (nvfp4.nvfp4_4over6, nvfp4.nvfp4_4over6_e4m3_use_256, nvfp4.nvfp4_4over6_err_mode) == ("none", "all", "MAE")
    assert all(make(cls).backward_override is None for cls in PREDICATES)


@pytest.mark.parametrize(
    ("cls", "values", "words"),
    [
        (DelayedScaling, {"fp8_format": Format.E5M2}, "E5M2"),
        (DelayedScaling, {"backward_override": "dequantized"}, "backward_override"),
        (DelayedScaling, {"amax_compute_algo": "mean"}, "amax_compute_algo"),
        (DelayedScaling, {"amax_history_len": 0}, "amax_history_len must be a positive integer; got 0"),
        (DelayedScaling, {"amax_history_len": 1.5}, "amax_history_len must be a positive integer; got 1.5"),
        (CustomRecipe, {"qfactory": print, "quantization_alignment": 0}, "quantization_alignment must be a positive"),
        (CustomRecipe, {"qfactory": print, "quantization_alignment": -16}, "quantization_alignment .* got -16"),
        (CustomRecipe, {"qfactory": print, "quantization_alignment": True}, "quantization_alignment .* got True"),
        (CustomRecipe, {"qfactory": print, "quantization_alignment": 8.5}, "quantization_alignment .* got 8.5"),
        (Float8CurrentScaling, {"fp8_format": Format.E5M2}, "E5M2"),
        (MXFP8BlockScaling, {"backward_override": "fp32"}, "backward_override"),
        (Float8BlockScaling, {"x_block_scaling_dim": 3}, "x_block_scaling_dim"),
        (Float8BlockScaling, {"x_block_scaling_dim": 2}, "2D by 2D"),
        (Float8BlockScaling, {"grad_block_scaling_dim": 2}, "2D by 2D"),
        (Float8BlockScaling, {"fp8_dpa": True}, "attention"),
        (NVFP4BlockScaling, {"fp4_format": Format.E4M3}, "E2M1"),
        (NVFP4BlockScaling, {"nvfp4_4over6": "some"}, "nvfp4_4over6"),
        (NVFP4BlockScaling, {"nvfp4_4over6": "all"}, "disable_rht=True"),
        (NVFP4BlockScaling, {"nvfp4_4over6_err_mode": "MAX"}, "err_mode"),
    ],
)
def test_wrong_values_are_refused_by_name(cls, values, words):
    with pytest.raises(AssertionError, match=words):
        cls(**values)


def test_constructor_flags_reach_the_qparams():
    """TE's follow the environment at import time only."""
    assert Float8CurrentScaling(use_power_2_scales=True).fp8_quant_fwd_weight.power_2_scale
    assert not Float8BlockScaling(use_f32_scales=True).fp8_quant_bwd_grad.power_2_scale


def test_environment_is_read_when_a_recipe_is_made(monkeypatch):
    monkeypatch.setenv("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "1")
    monkeypatch.setenv("NVTE_BACKWARD_OVERRIDE", "dequantized")
    monkeypatch.setenv("NVTE_NVFP4_DISABLE_RHT", "1")
    assert Float8CurrentScaling().use_power_2_scales
    assert MXFP8BlockScaling().backward_override == "dequantized"
    assert not NVFP4BlockScaling().fp4_quant_fwd_inp.random_hadamard_transform
    with pytest.raises(AssertionError, match="backward_override"):
        DelayedScaling()


@pytest.mark.parametrize("margin", ["1", True, None, float("inf")])
def test_margin_must_be_a_number(margin):
    with pytest.raises(AssertionError, match=f"margin must be a finite number; got {margin!r}"):
        DelayedScaling(margin=margin)


def test_fingerprint_follows_every_value():
    for cls in (DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, Float8BlockScaling, NVFP4BlockScaling):
        recipe = cls()
        before = recipe.fingerprint()
        assert before == cls().fingerprint() == repr(recipe)
        recipe.fp8_dpa = not recipe.fp8_dpa
        assert recipe.fingerprint() != before
        recipe.fp8_dpa = not recipe.fp8_dpa
        assert recipe.fingerprint() == before
    block = Float8BlockScaling()
    before = block.fingerprint()
    block.fp8_quant_fwd_inp = QParams(amax_epsilon=1e-3)
    assert block.fingerprint() != before


def test_fingerprints_of_classes_differ():
    assert len({make(cls).fingerprint().partition("(")[0] for cls in PREDICATES}) == len(PREDICATES)


def test_equality_copies_and_pickles():
    recipe = DelayedScaling(margin=2)
    for duplicate in (copy.copy(recipe), copy.deepcopy(recipe), pickle.loads(pickle.dumps(recipe))):
        assert duplicate == recipe and duplicate.fingerprint() == recipe.fingerprint()
        duplicate.margin = 3
        assert duplicate.fingerprint() != recipe.fingerprint()
    assert recipe != DelayedScaling()


def test_custom_recipe_needs_a_function():
    with pytest.raises(AssertionError, match="qfactory"):
        CustomRecipe(qfactory=None)
    assert CustomRecipe(qfactory=print).quantization_alignment == 128


def test_names_of_transformer_engine():
    assert issubclass(r.DelayedScaling, Recipe)
    assert all(hasattr(r, name) for name in ("Format", "MMParams", "QParams"))


@pytest.mark.parametrize(
    ("cls", "name", "value"),
    [
        (Float8CurrentScaling, "use_power_2_scales", True),
        (Float8BlockScaling, "use_f32_scales", True),
        (NVFP4BlockScaling, "disable_rht", True),
        (NVFP4BlockScaling, "disable_2d_quantization", True),
        (NVFP4BlockScaling, "disable_stochastic_rounding", True),
    ],
)
def test_an_edited_field_is_as_good_as_a_constructor_argument(cls, name, value):
    edited, made = cls(), cls(**{name: value})
    unedited = edited.fingerprint()
    for duplicate in (edited, copy.deepcopy(edited), pickle.loads(pickle.dumps(edited))):
        setattr(duplicate, name, value)
        assert duplicate == made and duplicate.fingerprint() == made.fingerprint() != unedited


def test_an_edited_field_leaves_assigned_qparams_alone():
    recipe = NVFP4BlockScaling()
    recipe.fp4_quant_fwd_inp = mine = QParams(amax_epsilon=0.5)
    recipe.disable_rht = True
    assert recipe.fp4_quant_fwd_inp is mine and not recipe.fp4_quant_bwd_grad.random_hadamard_transform


@pytest.mark.parametrize("kind", ["DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling"])
@pytest.mark.parametrize("value", ["E4M3", "HYBRID", None, 3])
def test_a_format_is_a_format(kind, value):
    """A string would compare unequal to every format and quantize in some other."""
    with pytest.raises(AssertionError, match=f"fp8_format must be a Format, as Format.E4M3; got {value!r}"):
        getattr(r, kind)(fp8_format=value)
