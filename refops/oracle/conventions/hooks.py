"""Conventions of the Hadamard transform and of the choice of two scales, 4over6."""

import numpy as np

from refops.oracle.conventions.registry import computing
from refops.oracle.conventions.scales import require_scaling, require_two_levels
from refops.oracle.geometry import Geometry
from refops.quantization.hadamard import sign_vector, transform_exactly, transform_groups
from refops.scalings import TE_SIGN_MASK

F = np.float32


def require_transform(replay):
    """NotApplicable unless the columnwise copy goes through the Hadamard transform."""
    if replay.dequantizes:
        replay.require(replay.hadamard)
        return
    require_scaling(replay)
    replay.require(replay.scaling.hadamard is not None)


@computing(
    "hadamard-missing",
    "The Hadamard transform of the columnwise copy is missing{how}.",
    stage="hadamard",
    fields=("rht",),
)
def hadamard_missing(replay):
    require_transform(replay)
    if replay.dequantizes:
        replay.facts["how"] = ": it is not undone"
        replay.hadamard = False
    else:
        replay.facts["how"] = ""
        replay.hadamard = {"rowwise": False, "columnwise": False}


def _set_transform(replay, inverse_of, groups_of):
    """Replace the transform: functions of (n, 16, C) groups for dequantization and for quantization."""
    replay.hadamard_groups = inverse_of if replay.dequantizes else groups_of


def _with_mask(replay, mask):
    replay.require(mask != replay.scaling.hadamard)
    dtype = replay.dtype
    _set_transform(
        replay,
        lambda groups: transform_groups(groups, mask, F, inverse=True),
        lambda groups: transform_groups(groups, mask, dtype).astype(F),
    )


@computing("hadamard-signs-missing", "The random signs of the Hadamard transform are missing.", stage="hadamard")
def hadamard_signs_missing(replay):
    require_transform(replay)
    _with_mask(replay, 0)


@computing(
    "hadamard-other-signs",
    "The signs of the Hadamard transform are {what}.",
    stage="hadamard",
    choices=("reversed", "inverted", "TE's", "after", "dumped"),
)
def hadamard_other_signs(replay, choice):
    require_transform(replay)
    mask = replay.scaling.hadamard
    changed = {"reversed": int(f"{mask:016b}"[::-1], 2), "inverted": mask ^ 0xFFFF, "TE's": TE_SIGN_MASK}
    if choice == "dumped":
        found = _dumped_mask(replay)
        replay.require(found not in (0, *changed.values()))  # those have names of their own
        changed["dumped"] = found
    replay.facts["what"] = {
        "reversed": "taken from the mask's bits in the opposite order",
        "inverted": "inverted: a set bit means +1 instead of -1",
        "TE's": f"TE's 0x{TE_SIGN_MASK:04X}, not the mask of the settings",
        "after": "applied after the transform, not before",
        "dumped": f"those of the mask 0x{changed.get(choice, mask):04X}, where 0x{mask:04X} was asked for",
    }[choice]
    if choice == "after":
        signs, dtype = sign_vector(mask)[:, None].astype(F), replay.dtype
        replay.require(mask)
        _set_transform(
            replay,
            lambda groups: transform_groups(groups * signs, 0, F),
            lambda groups: transform_groups(groups, 0, dtype).astype(F) * signs,
        )
        return
    _with_mask(replay, changed[choice])


def _dumped_mask(replay):
    """The mask whose signs the dump has: where the plain transform, which is its own inverse, gives -x back for x.

    Each sign is that of a sum over the probe, so neither rounding nor the scales of the codes matter.
    """
    setting = replay.setting
    region = setting.probe
    replay.require(region is not None)
    if replay.dequantizes:
        after = setting.outputs["y"].reshape(setting.shape)[region.rows, region.columns]
        replay.hadamard = False
        before = replay.run(region, ("y",))["y"]
        replay.hadamard = True
    else:
        replay.require("columnwise_data" in setting.outputs)
        codes = Geometry.of(replay.scaling, "columnwise").codes(
            setting.outputs["columnwise_data"], setting.shape, region.rows, region.columns
        )
        before, after = replay.fmt.values[codes], replay.values(region.rows, region.columns)
    groups = []
    for values in (before, after):
        finite = np.where(np.isfinite(values), values, 0).astype(np.float64)
        groups.append(finite.reshape(-1, 16, values.shape[1]))
    products = transform_exactly(groups[0], 0) * groups[1]
    return int(((products.sum(axis=(0, 2)) < 0) << np.arange(16)).sum())


@computing(
    "hadamard-unnormalised",
    "The Hadamard transform lacks its factor 1/4.",
    stage="hadamard",
)
def hadamard_unnormalised(replay):
    require_transform(replay)
    mask, dtype = replay.scaling.hadamard, replay.dtype if not replay.dequantizes else F
    _set_transform(
        replay,
        lambda groups: transform_groups(groups, mask, F, inverse=True) * F(4),
        lambda groups: (transform_groups(groups, mask, F) * F(4)).astype(dtype).astype(F),
    )


@computing(
    "hadamard-unrounded",
    "The transformed values are not rounded to {dtype} before they are quantized.",
    stage="hadamard",
)
def hadamard_unrounded(replay):
    require_transform(replay)
    replay.require(not replay.dequantizes and replay.dtype != F)
    replay.facts["dtype"], mask = replay.dtype, replay.scaling.hadamard
    replay.hadamard_groups = lambda groups: transform_groups(groups, mask, F)


@computing(
    "hadamard-rowwise-too",
    "The rowwise copy went through the Hadamard transform too{amax}.",
    stage="hadamard",
    choices=("amax after", "amax before", "groups of rows"),
)
def hadamard_rowwise_too(replay, choice):
    require_transform(replay)
    replay.require(not replay.dequantizes)
    replay.facts["amax"] = {
        "amax after": "",
        "amax before": ", though its amax is that of the values before it",
        "groups of rows": ", along columns as the columnwise one does",
    }[choice]
    if choice == "groups of rows":
        replay.wrap("transform", lambda inner, values, direction: inner(values, "columnwise"))
    replay.hadamard = {"rowwise": True, "columnwise": True}
    if choice == "amax before":
        own = replay.tensor_amax

        def tensor_amax(direction, region):
            if direction == "columnwise":
                return own(direction, region)
            replay.hadamard["rowwise"] = False
            amax = own(direction, region)
            replay.hadamard["rowwise"] = True
            return amax

        replay.tensor_amax = tensor_amax


@computing(
    "hadamard-amax-before",
    "The columnwise amax is that of the values before the Hadamard transform.",
    stage="hadamard-amax",
)
def hadamard_amax_before(replay):
    require_transform(replay)
    replay.require(not replay.dequantizes)
    replay.hadamard_amax = False


# --- 4over6 ---------------------------------------------------------------------------------------


def require_four_over_six(replay):
    """NotApplicable unless NVFP4's settings ask for the better of two scales, mapped to 6 or to 4."""
    require_scaling(replay)
    replay.require(getattr(replay.scaling, "four_over_six", None) is not None)


@computing(
    "four-over-six-missing",
    "4over6 is missing: block maxima are always mapped to 6.",
    stage="four-over-six",
    fields=("four_over_six",),
    choices=("its order", "plain order", "plain order, 448"),
)
def four_over_six_missing(replay, choice):
    require_four_over_six(replay)
    if choice == "its order":
        replay.is_better = lambda error, best: np.zeros(error.shape, bool)
    else:
        replay.vary(four_over_six=None)
        if choice.endswith("448"):
            replay.require(replay.scaling.e4m3_max != 448)
            replay.vary(e4m3_max=448)


@computing(
    "four-always",
    "Block maxima are always mapped to 4, where 4over6 takes the better of 4 and 6.",
    stage="four-over-six",
)
def four_always(replay):
    require_four_over_six(replay)
    replay.is_better = lambda error, best: np.ones(error.shape, bool)


@computing(
    "other-error-metric",
    "4over6 compares {found}, where {own} was asked for.",
    stage="four-over-six",
    choices=("mae", "mse", "max"),
)
def other_error_metric(replay, choice):
    require_four_over_six(replay)
    own = replay.scaling.four_over_six
    replay.require(choice != own)
    words = {"mae": "absolute errors", "mse": "squared errors", "max": "the largest error"}
    replay.facts["found"], replay.facts["own"] = words[choice], words[own]
    replay.vary(four_over_six="mae" if choice == "max" else choice)
    if choice == "max":
        replay.sum_errors = lambda error: error.max(axis=(1, 3))


@computing(
    "four-over-six-choice",
    "4over6 keeps {what}.",
    stage="four-over-six",
    choices=("worse", "ties"),
)
def four_over_six_choice(replay, choice):
    require_four_over_six(replay)
    replay.facts["what"] = (
        "the candidate with the larger error"
        if choice == "worse"
        else "4 where both errors are equal, where TE keeps 6"
    )
    replay.is_better = np.greater if choice == "worse" else np.less_equal


@computing(
    "four-over-six-extra",
    "Each block takes the better of 4 and 6 for its maximum (4over6, {what}), which was not asked for.",
    stage="four-over-six",
    choices=("mae", "mse"),
)
def four_over_six_extra(replay, choice):
    require_two_levels(replay)
    replay.require(replay.rule.choice is None and replay.scaling.random is None)
    replay.facts["what"] = choice
    replay.vary(four_over_six=choice)
