"""What a user may call things: scalings by name, arrays by the names of kernels' authors, and what is said of slips."""

import re

import numpy as np
import pytest

import refops
from refops import oracle, scalings
from refops.arguments import did_you_mean
from refops.golden import Recipe
from refops.oracle.quantized_tensors import ALIASES
from refops.oracle.testing import assert_matches

X = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)
MX = refops.MXFP8Scaling(refops.E4M3)
Q = refops.quantize(X, MX, columnwise=True)


@pytest.mark.parametrize("name", [*scalings.NAMED, "MXFP8", "nvfp4"])
def test_a_name_is_the_settings_of_its_row(name):
    wanted = scalings.NAMED[{"MXFP8": "mxfp8", "nvfp4": "nvfp4-1x16"}.get(name, name)].scaling
    assert scalings.named(name) == wanted
    q = refops.quantize(X, wanted)
    assert assert_matches("quantize", X, q, scaling=name, ulp=0).ok
    assert Recipe("quantize", name).scaling == wanted


def test_a_short_name_has_the_defaults_of_its_class():
    assert scalings.SHORT_NAMES == {"nvfp4": "nvfp4-1x16"} and scalings.named("nvfp4") == refops.NVFP4Scaling()


def test_a_name_reaches_the_choice_of_random_bits():
    q = refops.quantize(X, refops.NVFP4Scaling(stochastic_rounding=True, seed=7))
    assert oracle.check("quantize", X, q, scaling="nvfp4-stochastic", random_bits="any").ok


def test_dequantize_with_a_name():
    y = refops.dequantize(Q)
    arrays = {"codes": Q.rowwise_data, "scales": Q.rowwise_scale_inv}
    assert oracle.check("dequantize", arrays, y, scaling="mxfp8").ok
    assert oracle.acceptable("dequantize", Q).lower.shape == X.shape


@pytest.mark.parametrize("alias", ALIASES)
def test_every_other_name_is_the_array(alias):
    """One changed byte of it is found, so that it was judged."""
    full, scaling = ALIASES[alias], refops.CurrentScaling(refops.E4M3)
    array = getattr(refops.quantize(X, scaling, columnwise=True), full)
    assert oracle.check("quantize", X, {alias: array}, scaling=scaling).ok
    changed = array.copy()
    changed.view(np.uint8).flat[3] ^= 0x40
    report = oracle.check("quantize", X, {alias: changed}, scaling=scaling, diagnose=False)
    assert [one.name for one in report.arrays if not one.ok] == [full]


def test_names_of_the_columnwise_copy():
    columnwise = {"columnwise_codes": Q.columnwise_data, "columnwise_scales": Q.columnwise_scale_inv}
    report = oracle.check(
        "quantize", X, {"codes": Q.rowwise_data, "scales": Q.rowwise_scale_inv, **columnwise}, scaling=MX
    )
    assert report.ok and len(report.arrays) == 4


def test_scale_stays_that_of_the_scale_update():
    history, scale = np.ones((4, 1), np.float32), np.ones(1, np.float32)
    new = refops.update_delayed_scale(history, scale, refops.E4M3)
    inputs = {"amax_history": history, "scale": scale}
    outputs = dict(zip(inputs, new, strict=True))
    assert oracle.check("update_delayed_scale", inputs, outputs, params={"fmt": refops.E4M3}).ok


#: A slip -> (call, what is said).
SLIPS = {
    "operation": (lambda: oracle.check("swigul", X, X), r"got 'swigul' \(did you mean .*swiglu"),
    "operation in capitals": (lambda: oracle.check("GELUU", X, X), r"\(did you mean .*gelu"),
    "scaling": (
        lambda: oracle.check("quantize", X, Q, scaling="mxpf8"),
        r"got 'mxpf8' \(did you mean mxfp8 or mxfp4\?\)",
    ),
    "family of scalings": (lambda: Recipe("quantize", "block"), r"got 'block' \(did you mean block-1x128"),
    "output": (
        lambda: oracle.check("quantize", X, {"columnwise_dta": X}, scaling="mxfp8"),
        r"got 'columnwise_dta' \(did you mean columnwise_data",
    ),
    "short output that is like private names, too": (
        lambda: oracle.check("quantize", X, {"dta": X}, scaling="mxfp8"),
        r"got 'dta' \(did you mean data\?\)$",
    ),
    "short output": (
        lambda: oracle.check("quantize", X, {"codess": X}, scaling="mxfp8"),
        r"got 'codess' \(did you mean codes",
    ),
    "input": (
        lambda: oracle.check("dgelu", {"dy": X, "x": X, "row_scale": X}, X),
        r"dy, x alone for dgelu; got 'row_scale' too$",
    ),
    "input that is like one": (
        lambda: oracle.check("scaled_srelu", {"x": X, "row_scales": X[:, 0], "row_scale": X}, X),
        r"got 'row_scale' too \(did you mean row_scales\?\)",
    ),
    "parameter": (
        lambda: oracle.check("clamped_swiglu", X, X, params={"limits": 7.0}),
        r"got 'limits' \(did you mean limit\?\)",
    ),
    "nothing is like it": (lambda: oracle.check("quantize", X, Q, scaling="zzz"), r"got 'zzz'$"),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_is_answered_with_what_is_like_it(slip):
    call, said = SLIPS[slip]
    with pytest.raises(ValueError, match=said) as error:
        call()
    assert "\n" not in str(error.value)


def test_what_is_like_a_word():
    assert did_you_mean("swiglu", ["dswiglu", "swiglu_x", "gelu"]) == " (did you mean dswiglu or swiglu_x?)"
    assert did_you_mean("glu", ["glu", "geglu", "reglu", "x"]) == " (did you mean glu, geglu or reglu?)"
    assert did_you_mean("MXFP9", ["mxfp8"]) == " (did you mean mxfp8?)"
    assert did_you_mean(7, ["7"]) == did_you_mean("q", []) == ""


def test_a_scaling_of_another_kind_is_no_name():
    with pytest.raises(TypeError, match=re.escape("scaling must be one of")):
        oracle.check("quantize", X, Q, scaling=7)
