"""Golden inputs of default seed show the conventions of the oracle: a kernel that follows one writes something else.

Each convention that can be applied to an operation under a scaling is replayed on the golden file of kind "mixed".
Those that change nothing there are named below with the reason, and are looked for in the other kinds.
"""

import numpy as np
import pytest

from refops.golden import INPUT_KINDS, Recipe, build_golden
from refops.oracle.conventions import CONVENTIONS
from refops.oracle.geometry import crop, whole
from refops.oracle.replay import NotApplicable, Setting
from tiers import sampled

#: Reason -> conventions of which a choice may change nothing in a mixed file, though some other kind shows it.
ELSEWHERE = {
    "a mixed tensor has neither NaN nor infinity; a special one has": (
        "inf-amax-not-handled",
        "infinity-kept",
        "nan-as-a-number",
        "nan-in-amax",
        "nan-scale-for-nonfinite",
        "no-saturation",
    ),
    "it shows in numbers that float32 calls subnormal, or whose scale overflows": (
        "epsilon-extra",
        "exponent-wraps",
        "scale-capped-at-input-dtype",
        "subnormals-flushed",
    ),
    "the largest result of a mixed tensor needs no rounding, that of a rounding one does": (
        "amax-of-the-input",
        "amax-rounded",
    ),
    "its zero blocks have no negative zeros, and no other block has a scale byte of 0": ("zero-block-guard",),
}
#: Reason -> conventions of which a choice may change nothing in a file of any kind.
NOWHERE = {
    "no NaN of a golden file has a sign": ("nan-sign-kept",),
    "it is about a slot of the amax that is wrong, and a right file has none": ("amax-slot-holds-scale",),
    "scales are powers of two, so that quotients, reciprocals and products of them are exact": (
        "block-scale-order",
        "divided-by-scale",
        "double-rounding-bf16",
        "double-rounding-fp16",
        "global-scale-by-division",
        "multiplier-low-precision",
        "product-rounded",
        "reciprocal-rounded",
        "scale-divided",
        "scale-inverse-separate",
        "scale-log2",
        "scale-rounded-to-bf16",
    ),
    "the scale that is given is 1": ("inverted-scale", "multiplier-missing", "power-of-two-extra"),
    "under current scaling the scale of a power of two is that of the settings with power_2_scale": ("other-setting",),
    "what is rounded is a number of 16 bits already": (
        "input-of-low-precision",
        "rounded-intermediate",
        "word-low-precision",
    ),
    "the formula has no such factor, or only an exact one": ("factor-missing", "formula-constant"),
    "a NaN reaches no result that swallows it": ("nan-propagated",),
    "no result is so near to the middle of two codes": ("sigmoid-through-tanh",),
    "blocks end with the tensor": ("rest-of-tile-kept",),
    "an amax lies in the last element of its block or anywhere, hardly ever in the first": ("block-amax-of-a-part",),
    "a GELU is hardly ever negative": ("signed-amax", "signed-tensor-amax"),
}
REASONS = {name: reason for reason, names in (NOWHERE | ELSEWHERE).items() for name in names}
OPERATIONS = ("quantize", "swiglu", "dgelu", "gelu", "dswiglu")
CASES = [(op, s) for s in ("mxfp8", "nvfp4-1x16", "current", "delayed-scale-1", "block-1x128") for op in OPERATIONS]


def hidden(op, scaling, kind):
    """(number of conventions tried, {(name, choice in words)} of those that change nothing in a golden file)."""
    golden = build_golden(Recipe(op, scaling, (96, 512), "bfloat16", inputs=kind))
    case, reference, tried, unseen = golden.case(), golden.outputs, set(), set()
    region = whole(case.matrix_shape)
    arrays = {name: crop(case, name, a, region) for name, a in reference.items() if name != "dbias"}
    with np.errstate(all="ignore"):
        for convention in CONVENTIONS.values():
            if convention.reads:
                continue
            setting = Setting(case, reference, reference)
            try:
                choices = convention.choices_for(setting.replay())
            except NotApplicable:
                continue
            for choice in choices:
                replay = setting.replay()
                try:
                    convention.apply(replay, choice)
                    made = replay.run(region, list(arrays))
                    if "dbias" in reference:
                        made["dbias"] = replay.dbias(region.columns)
                except NotApplicable:
                    continue
                tried.add(convention.name)
                expected = arrays | {name: a for name, a in reference.items() if name == "dbias"}
                if all(made[name].tobytes() == expected[name].tobytes() for name in made):
                    unseen.add((convention.name, repr(choice)))
    return tried, unseen


@sampled(("op", "scaling"), CASES, 11)
def test_conventions_show_in_a_mixed_file_or_have_a_reason(op, scaling):
    tried, unseen = hidden(op, scaling, "mixed")
    assert len(tried) > 20
    assert {name for name, _ in unseen} <= set(REASONS)


@pytest.mark.parametrize(
    ("op", "scaling"), [("quantize", "mxfp8"), pytest.param("swiglu", "current", marks=pytest.mark.full)]
)
def test_what_a_mixed_file_hides_another_kind_shows(op, scaling):
    """But for what no kind can show."""
    unseen = set.intersection(*(hidden(op, scaling, kind)[1] for kind in INPUT_KINDS))
    never = {name for names in NOWHERE.values() for name in names}
    # A lower bound of 2^-126 changes no scale that is not 0, a largest scale is that of the dtype, and a code that
    # wraps needs a value beyond the largest one.
    never |= {"epsilon-extra", "scale-capped-at-input-dtype", "no-saturation", "inf-amax-not-handled"}
    assert {name for name, _ in unseen} <= never


def test_reasons_are_of_conventions():
    assert set(REASONS) <= set(CONVENTIONS)
    assert len(REASONS) == sum(len(names) for names in (NOWHERE | ELSEWHERE).values())
