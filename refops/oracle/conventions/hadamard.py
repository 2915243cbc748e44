"""Conventions of NVFP4's Hadamard transform and of 4over6."""

import numpy as np

from refops.formats import E2M1, E4M3
from refops.oracle.conventions.registry import computing
from refops.oracle.conventions.scales import require_scaling
from refops.oracle.geometry import Geometry
from refops.oracle.replay import DequantizeKernel
from refops.quantization.hadamard import sign_vector, transform_exactly, transform_groups
from refops.scaling import TE_SIGN_MASK, NVFP4Scaling

F = np.float32


def require_transform(kernel):
    """NotApplicable unless the columnwise copy goes through the Hadamard transform."""
    if isinstance(kernel, DequantizeKernel):
        kernel.require(kernel.hadamard)
        return
    require_scaling(kernel, NVFP4Scaling)
    kernel.require(kernel.scaling.rht)


@computing("hadamard-missing", "The Hadamard transform of the columnwise copy is missing{how}.", stage="hadamard")
def hadamard_missing(kernel):
    require_transform(kernel)
    if isinstance(kernel, DequantizeKernel):
        kernel.facts["how"] = ": it is not undone"
        kernel.hadamard = False
    else:
        kernel.facts["how"] = ""
        kernel.hadamard = {"rowwise": False, "columnwise": False}


def _set_transform(kernel, inverse_of, groups_of):
    """Replace the transform: functions of (n, 16, C) groups for dequantization and for quantization."""
    if isinstance(kernel, DequantizeKernel):
        kernel.inverse_hadamard = lambda values: inverse_of(
            np.ascontiguousarray(values).reshape(-1, 16, values.shape[1])
        ).reshape(values.shape)
    else:
        kernel.hadamard_groups = groups_of


def _with_mask(kernel, mask):
    kernel.require(mask != kernel.scaling.sign_mask)
    dtype = kernel.dtype
    _set_transform(
        kernel,
        lambda groups: transform_groups(groups, mask, F, inverse=True),
        lambda groups: transform_groups(groups, mask, dtype).astype(F),
    )


@computing("hadamard-signs-missing", "The random signs of the Hadamard transform are missing.", stage="hadamard")
def hadamard_signs_missing(kernel):
    require_transform(kernel)
    _with_mask(kernel, 0)


@computing(
    "hadamard-other-signs",
    "The signs of the Hadamard transform are {what}.",
    stage="hadamard",
    choices=("reversed", "inverted", "TE's", "after", "dumped"),
)
def hadamard_other_signs(kernel, choice):
    require_transform(kernel)
    mask = kernel.scaling.sign_mask
    changed = {"reversed": int(f"{mask:016b}"[::-1], 2), "inverted": mask ^ 0xFFFF, "TE's": TE_SIGN_MASK}
    if choice == "dumped":
        found = _dumped_mask(kernel)
        kernel.require(found not in (0, *changed.values()))  # those have names of their own
        changed["dumped"] = found
    kernel.facts["what"] = {
        "reversed": "taken from the mask's bits in the opposite order",
        "inverted": "inverted: a set bit means +1 instead of -1",
        "TE's": f"TE's 0x{TE_SIGN_MASK:04X}, not the mask of the settings",
        "after": "applied after the transform, not before",
        "dumped": f"those of the mask 0x{changed.get(choice, mask):04X}, where 0x{mask:04X} was asked for",
    }[choice]
    if choice == "after":
        signs, dtype = sign_vector(mask)[:, None].astype(F), kernel.dtype
        kernel.require(mask)
        _set_transform(
            kernel,
            lambda groups: transform_groups(groups * signs, 0, F),
            lambda groups: transform_groups(groups, 0, dtype).astype(F) * signs,
        )
        return
    _with_mask(kernel, changed[choice])


def _dumped_mask(kernel):
    """The mask whose signs the dump has: where the plain transform, which is its own inverse, gives -x back for x.

    Each sign is that of a sum over the probe, so neither rounding nor the scales of the codes matter.
    """
    setting = kernel.setting
    region = setting.probe
    kernel.require(region is not None)
    if isinstance(kernel, DequantizeKernel):
        after = setting.outputs["y"].reshape(setting.shape)[region.rows, region.columns]
        undo, kernel.inverse_hadamard = kernel.inverse_hadamard, lambda values: values
        before = kernel.run(region, ("y",))["y"]
        kernel.inverse_hadamard = undo
    else:
        kernel.require("columnwise_data" in setting.outputs)
        codes = Geometry.of(kernel.scaling, "columnwise").codes(
            setting.outputs["columnwise_data"], setting.shape, region.rows, region.columns
        )
        before, after = E2M1.values[codes], kernel.values(region.rows, region.columns)
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
def hadamard_unnormalised(kernel):
    require_transform(kernel)
    mask, dtype = kernel.scaling.sign_mask, kernel.dtype if not isinstance(kernel, DequantizeKernel) else F
    _set_transform(
        kernel,
        lambda groups: transform_groups(groups, mask, F, inverse=True) * F(4),
        lambda groups: (transform_groups(groups, mask, F) * F(4)).astype(dtype).astype(F),
    )


@computing(
    "hadamard-unrounded",
    "The transformed values are not rounded to {dtype} before they are quantized.",
    stage="hadamard",
)
def hadamard_unrounded(kernel):
    require_transform(kernel)
    kernel.require(not isinstance(kernel, DequantizeKernel) and kernel.dtype != F)
    kernel.facts["dtype"], mask = kernel.dtype, kernel.scaling.sign_mask
    kernel.hadamard_groups = lambda groups: transform_groups(groups, mask, F)


@computing(
    "hadamard-rowwise-too",
    "The rowwise copy went through the Hadamard transform too{amax}.",
    stage="hadamard",
    choices=("amax after", "amax before"),
)
def hadamard_rowwise_too(kernel, choice):
    require_transform(kernel)
    kernel.require(not isinstance(kernel, DequantizeKernel))
    kernel.facts["amax"] = "" if choice == "amax after" else ", though its amax is that of the values before it"
    kernel.hadamard = {"rowwise": True, "columnwise": True}
    if choice == "amax before":
        own = kernel.tensor_amax

        def tensor_amax(direction, region):
            if direction == "columnwise":
                return own(direction, region)
            kernel.hadamard["rowwise"] = False
            amax = own(direction, region)
            kernel.hadamard["rowwise"] = True
            return amax

        kernel.tensor_amax = tensor_amax


@computing(
    "hadamard-amax-before",
    "The columnwise amax is that of the values before the Hadamard transform.",
    stage="hadamard-amax",
)
def hadamard_amax_before(kernel):
    require_transform(kernel)
    kernel.require(not isinstance(kernel, DequantizeKernel))
    kernel.hadamard_amax = False


# --- 4over6 ---------------------------------------------------------------------------------------


def require_four_over_six(kernel):
    """NotApplicable unless 4over6 was asked for."""
    require_scaling(kernel, NVFP4Scaling)
    kernel.require(kernel.four_over_six)


@computing(
    "four-over-six-missing",
    "4over6 is missing: block maxima are mapped to 6 always.",
    stage="four-over-six",
    choices=("its order", "plain order", "plain order, 448"),
)
def four_over_six_missing(kernel, choice):
    require_four_over_six(kernel)
    if choice == "its order":
        kernel.take_four = lambda error_of_four, error_of_six: np.zeros(error_of_four.shape, bool)
    else:
        kernel.four_over_six = None
        if choice.endswith("448"):
            kernel.require(kernel.e4m3_max != 448)
            kernel.e4m3_max = 448


@computing(
    "four-always",
    "Block maxima are mapped to 4 always, where 4over6 takes the better of 4 and 6.",
    stage="four-over-six",
)
def four_always(kernel):
    require_four_over_six(kernel)
    kernel.take_four = lambda error_of_four, error_of_six: np.ones(error_of_four.shape, bool)


@computing(
    "other-error-metric",
    "4over6 compares {found}, where {own} was asked for.",
    stage="four-over-six",
    choices=("mae", "mse", "max"),
)
def other_error_metric(kernel, choice):
    require_four_over_six(kernel)
    own = kernel.scaling.four_over_six
    kernel.require(choice != own)
    words = {"mae": "absolute errors", "mse": "squared errors", "max": "the largest error"}
    kernel.facts["found"], kernel.facts["own"] = words[choice], words[own]
    if choice != "max":
        kernel.four_over_six = choice
        return

    def block_error(codes, scales, blocks, tensor_amax):
        scale, amax = E4M3.values[scales][:, None, :, None], tensor_amax[:, None, :, None]
        difference = ((E2M1.values[codes] * scale) * amax) / F(6 * kernel.e4m3_max) - blocks
        return np.abs(difference).max(axis=(1, 3))

    kernel.block_error = block_error


@computing(
    "four-over-six-choice",
    "4over6 keeps {what}.",
    stage="four-over-six",
    choices=("worse", "ties"),
)
def four_over_six_choice(kernel, choice):
    require_four_over_six(kernel)
    kernel.facts["what"] = (
        "the candidate with the larger error"
        if choice == "worse"
        else "4 where both errors are equal, where TE keeps 6"
    )
    if choice == "worse":
        kernel.take_four = lambda error_of_four, error_of_six: error_of_four > error_of_six
    else:
        kernel.take_four = lambda error_of_four, error_of_six: error_of_four <= error_of_six


@computing(
    "four-over-six-extra",
    "Each block takes the better of 4 and 6 for its maximum (4over6, {what}), which was not asked for.",
    stage="four-over-six",
    choices=("mae", "mse"),
)
def four_over_six_extra(kernel, choice):
    require_scaling(kernel, NVFP4Scaling)
    kernel.require(not kernel.four_over_six and not kernel.scaling.stochastic_rounding)
    kernel.facts["what"] = choice
    kernel.four_over_six = choice
