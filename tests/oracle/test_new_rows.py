"""MXFP4, FP8 blocks with E8M0 scales, blocks of 64 and UE5M3 scales: right outputs accepted, wrong ones named."""

import re
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from stored_wrongly import on_scales, reciprocal, swapped, transposed

import refops
from refops import E4M3, E8M0, UE5M3, Block64Scaling, E8M0BlockScaling, MXFP4Scaling, NVFP4Scaling, oracle
from refops.oracle.operation import arrays_of
from refops.quantization.layout import one_order
from refops.scalings import NAMED
from refops.scalings.rules import E8M0_ROUNDINGS
from tiers import sampled

F, BF16 = np.float32, np.dtype(ml_dtypes.bfloat16)
UE, ALONE = NVFP4Scaling(scale_format=UE5M3), NVFP4Scaling(scale_format=UE5M3, tensor_level=False)
ROWS = {
    "mxfp4": MXFP4Scaling(),
    "mxfp4-16": MXFP4Scaling(block_size=16, scale_rounding="floor"),
    "mxfp4-2d": MXFP4Scaling(two_d=True),
    "e8m0-1x128": E8M0BlockScaling(E4M3, 1),
    "e8m0-128x128": E8M0BlockScaling(E4M3, amax_epsilon=1e-4),
    "e8m0-1x64": E8M0BlockScaling(E4M3, 1, block_size=64),
    "block-1x64": Block64Scaling(E4M3),
    "nvfp4-ue5m3": UE,
    "nvfp4-ue5m3-alone": ALONE,
    "nvfp4-ue5m3-4over6": NVFP4Scaling(scale_format=UE5M3, four_over_six="mse"),
    "nvfp4-ue5m3-row": NVFP4Scaling(scale_format=UE5M3, row_scaled=True),
}


def matrix(spread=0):
    """Blocks of all sizes of numbers; without a spread maxima are all over one power of two and the next."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((128, 512), F) * 2.0 ** rng.integers(-spread, spread + 1, (128, 512))
    return (x * np.repeat([1, 1.25, 1.5, 1.75], 128)).astype(BF16)


def dump(x, scaling, columnwise=False):
    """The arrays of the reference's result."""
    return arrays_of(refops.quantize(x, scaling, columnwise=columnwise))


@pytest.mark.parametrize("spread", [0, 12])
@pytest.mark.parametrize("name", ROWS)
def test_right_outputs_are_accepted(name, spread):
    scaling, x = ROWS[name], matrix(spread)
    assert oracle.check("quantize", x, dump(x, scaling, not scaling.only_rowwise), scaling=scaling).ok
    swiglu = refops.activation_quantize("swiglu", x, scaling)
    assert oracle.check("swiglu", x, arrays_of(swiglu), scaling=scaling).ok
    q = refops.quantize(x, scaling)
    assert oracle.check("dequantize", q, refops.dequantize(q)).ok


def name_of(x, outputs, scaling):
    """The name of what is wrong with outputs that must be."""
    report = oracle.check("quantize", x, outputs, scaling=scaling)
    assert not report.ok
    return report.diagnosis[0].names


@sampled(
    ("other", "own", "size"),
    [case for case in product(E8M0_ROUNDINGS, E8M0_ROUNDINGS, (32, 16)) if case[0] != case[1]],
    3,
    in_all=1,
)
def test_another_rule_of_mxfp4_is_named(own, other, size):
    x = matrix()
    outputs = dump(x, MXFP4Scaling(scale_rounding=other, block_size=size))
    expected = f"scale-{other.replace('_', '-')}"
    assert name_of(x, outputs, MXFP4Scaling(scale_rounding=own, block_size=size)) == (expected,)


#: What is asked for, what is computed instead, the name.
FOLLOWED = {
    "16 for 32": (MXFP4Scaling(), MXFP4Scaling(block_size=16), "wrong-block-size"),
    "32 for 16": (MXFP4Scaling(block_size=16), MXFP4Scaling(), "wrong-block-size"),
    "squares": (MXFP4Scaling(), MXFP4Scaling(two_d=True), "two-d-scales"),
    "64 for 128": (ROWS["e8m0-1x128"], ROWS["e8m0-1x64"], "wrong-block-size"),
    "128 for 64": (ROWS["e8m0-1x64"], ROWS["e8m0-1x128"], "wrong-block-size"),
    "E5M2": (ROWS["e8m0-1x128"], E8M0BlockScaling(refops.E5M2, 1), "other-format"),
    "any scale": (ROWS["block-1x64"], Block64Scaling(E4M3, False), "power-of-two-missing"),
    "powers of two": (Block64Scaling(E4M3, False), ROWS["block-1x64"], "power-of-two-extra"),
    "E4M3 scales": (UE, NVFP4Scaling(), "other-scale-format"),
    "UE5M3 scales": (NVFP4Scaling(), UE, "other-scale-format"),
    "4over6": (UE, NVFP4Scaling(scale_format=UE5M3, four_over_six="mae"), "four-over-six-extra"),
    "tensor level": (ALONE, UE, "other-setting"),
}


@pytest.mark.parametrize("what", FOLLOWED)
def test_other_settings_are_named(what):
    own, other, name = FOLLOWED[what]
    x = matrix()
    outputs = dump(x, other)
    if name == "wrong-block-size":  # scales of another shape are no dump of these settings
        outputs = {"data": outputs["rowwise_data"]}
    if own.layout.amax is None:
        outputs.pop("amax_rowwise", None)
    assert name_of(x, outputs, own) == (name,)


def rows_that_lie_alike():
    """(asked for, computed) of NVFP4's named rows: the same shapes, whatever the scales' format."""
    rows = {name: row.scaling for name, row in NAMED.items() if type(row.scaling) is NVFP4Scaling}
    lie = {name: (row.layout.block, row.layout.packed) for name, row in rows.items()}
    return [(own, other) for own in rows for other in rows if own != other and lie[own] == lie[other]]


@sampled(("own", "other"), rows_that_lie_alike(), 9)
def test_one_named_row_for_another_is_named(own, other):
    """No row is taken for another fault, such as an amax of another step, nor is it left without a name."""
    asked, computed, x = NAMED[own].scaling, NAMED[other].scaling, matrix()
    outputs = {name: a for name, a in dump(x, computed, columnwise=True).items() if not name.startswith("amax")}
    (name,) = name_of(x, outputs, asked)
    assert not name.startswith("stale")


@pytest.mark.parametrize(("own", "other"), [("nvfp4-1x16", "nvfp4-ue5m3-alone"), ("nvfp4-ue5m3-alone", "nvfp4-1x16")])
def test_the_settings_of_a_named_row_are_called_so(own, other):
    """Two fields differ. An amax that nothing follows may be written beside the scales."""
    asked, computed, x = NAMED[own].scaling, NAMED[other].scaling, matrix()
    outputs = {"data": dump(x, computed)["rowwise_data"], "scale": dump(x, computed)["rowwise_scale_inv"]}
    if asked.layout.amax:
        outputs["amax"] = dump(x, asked)["amax_rowwise"]
    found = oracle.check("quantize", x, outputs, scaling=asked).diagnosis[0]
    assert found.names == ("other-setting",) and found.exact
    assert f"the settings of {other}, where" in found.sentence


#: What is stored instead of the right arrays.
STORED = {
    "swapped-nibbles": swapped,
    "scales-swizzled": on_scales(refops.swizzle),
    "scales-transposed": transposed,
    "inverted-scale": reciprocal(E8M0),
    "scale-off-by-one": on_scales(lambda scales: scales + np.uint8(1)),
}


@pytest.mark.parametrize(
    ("row", "name"),
    [
        *(("mxfp4", name) for name in STORED),
        *(("mxfp4-16", name) for name in STORED),
        *(("e8m0-1x128", name) for name in ("scales-transposed", "inverted-scale", "scale-off-by-one")),
        ("e8m0-128x128", "scale-off-by-one"),
        *(
            (row, name)
            for row in ("nvfp4-ue5m3", "nvfp4-ue5m3-alone")
            for name in ("swapped-nibbles", "scales-swizzled")
        ),
    ],
)
def test_what_is_stored_wrongly_is_named(row, name):
    x = matrix()
    assert name_of(x, STORED[name](dump(x, ROWS[row])), ROWS[row]) == (name,)


def test_a_missing_tensor_level_is_named():
    x = matrix()
    outputs = dump(x, ALONE) | {"amax_rowwise": dump(x, UE)["amax_rowwise"]}
    assert name_of(x, outputs, UE) == ("missing-global-scale",)


def small_rows():
    """Rows of all sizes: the amaxes of many blocks are below 1e-4."""
    rng = np.random.default_rng(0)
    return rng.standard_normal((128, 256), F) * np.exp2(rng.integers(-30, 6, (128, 1))).astype(F)


class Floor(E8M0BlockScaling):
    """E8M0 blocks whose bytes follow another rule."""

    scale_rounding = "floor"


@pytest.mark.parametrize(
    ("own", "other", "name"),
    [
        (E8M0BlockScaling(E4M3, 1, 1e-4), E8M0BlockScaling(E4M3, 1), "epsilon-missing"),
        (E8M0BlockScaling(E4M3, 1, 1e-4), Floor(E4M3, 1, 1e-4), "scale-floor"),
        (Block64Scaling(E4M3, False, 1e-4), Block64Scaling(E4M3, False), "epsilon-missing"),
    ],
)
def test_amax_epsilon_is_no_part_of_another_rule(own, other, name):
    x = small_rows()
    assert name_of(x, dump(x, other), own) == (name,)


def test_amax_epsilon_bounds_the_amax_of_a_quotient():
    """What is stored is amax / max, of amaxes that are 1e-4 at least."""
    x, scaling = small_rows(), Block64Scaling(E4M3, False, 1e-4)
    amax = np.maximum(np.abs(x).reshape(128, 4, 64).max(axis=2), F(1e-4))
    outputs = dump(x, scaling) | {"rowwise_scale_inv": (amax / F(448)).T}
    assert name_of(x, outputs, scaling) == ("scale-inverse-separate",)


@pytest.mark.parametrize("row", ["e8m0-1x128", "block-1x64"])
def test_scales_of_one_order_are_not_swizzled(row):
    x, scaling = matrix(), ROWS[row]
    outputs = dump(x, scaling)
    for call in (("quantize", x, outputs), ("dequantize", outputs, x)):
        with pytest.raises(ValueError, match=f"swizzled_scales must be False .*{re.escape(one_order(scaling))}"):
            oracle.check(*call, scaling=scaling, swizzled_scales=True)


def test_one_scale_may_be_called_swizzled():
    x, scaling = matrix(), refops.CurrentScaling(E4M3)
    assert oracle.check("quantize", x, dump(x, scaling), scaling=scaling, swizzled_scales=True).ok


@pytest.mark.parametrize("two_d", [False, True])
@pytest.mark.parametrize(("own", "other"), [(32, 16), (16, 32)])
def test_scales_of_another_block_size_in_an_array_of_the_same_shape(own, other, two_d):
    """Padded to 4, the scales of 64 columns have one shape for blocks of 16 and of 32."""
    x = matrix()[:, :64] * 2.0 ** np.arange(4).repeat(16).astype(BF16)
    outputs = dump(x, MXFP4Scaling(two_d, block_size=other))
    assert name_of(x, outputs, MXFP4Scaling(two_d, block_size=own)) == ("wrong-block-size",)
    columnwise = dump(x.T, MXFP4Scaling(two_d, block_size=other), columnwise=True)
    outputs = {name: array for name, array in columnwise.items() if name.startswith("columnwise")}
    assert name_of(x.T, outputs, MXFP4Scaling(two_d, block_size=own)) == ("wrong-block-size",)
