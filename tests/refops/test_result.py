"""`Quantized`: what it accepts from another kernel's dump, what it refuses, and how its scales are reordered."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import refops
from refops import E4M3, Quantized, dequantize, quantize

X = np.random.default_rng(0).standard_normal((4, 48, 96)).astype(ml_dtypes.bfloat16)
SCALINGS = {
    "delayed": refops.DelayedScaling(E4M3),
    "current": refops.CurrentScaling(E4M3),
    "block-1d": refops.BlockScaling(E4M3, 1),
    "block-2d": refops.BlockScaling(E4M3, 2),
    "mxfp8": refops.MXFP8Scaling(E4M3),
    "nvfp4": refops.NVFP4Scaling(),
    "nvfp4-row-scaled": refops.NVFP4Scaling(row_scaled=True),
}


@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
@pytest.mark.parametrize("name", SCALINGS)
def test_a_dump_dequantizes_like_the_original(name, direction):
    q = quantize(X, SCALINGS[name], columnwise=True)
    fields = (f"{direction}_data", f"{direction}_scale_inv", f"amax_{direction}")
    dump = {field: getattr(q, field) for field in fields}
    mine = Quantized(**dump, scaling=q.scaling, shape=X.shape, dtype=X.dtype)
    only = quantize(X, SCALINGS[name], rowwise=direction == "rowwise", columnwise=direction == "columnwise")
    np.testing.assert_array_equal(dequantize(mine), dequantize(only))


@pytest.mark.parametrize("field", ["data", "scale_inv"])
@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
@pytest.mark.parametrize("name", SCALINGS)
def test_wrong_arrays_are_refused(name, direction, field):
    q = quantize(X, SCALINGS[name], columnwise=True)
    field = f"{direction}_{field}"
    right = getattr(q, field)
    for wrong in (right[:-1], right.astype(np.int16), right.tolist(), right[..., None]):
        with pytest.raises(ValueError, match=f"{field} must be {right.dtype} of shape .*; got "):
            replace(q, **{field: wrong})


@pytest.mark.parametrize(("name", "field"), [("mxfp8", "rowwise_scale_inv"), ("nvfp4", "amax_rowwise")])
def test_data_without_what_they_need_are_refused(name, field):
    with pytest.raises(ValueError, match=f"rowwise_data needs {field} with .*; got None"):
        replace(quantize(X, SCALINGS[name]), **{field: None})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"scaling": "mxfp8"}, TypeError, "scaling must be one of .*; got 'mxfp8'"),
        ({"shape": ()}, ValueError, r"shape must be a tuple of at least one size; got \(\)"),
        ({"shape": [4, 48, 96]}, ValueError, r"shape must be a tuple of at least one size; got \[4, 48, 96\]"),
        ({"shape": (4, 48, -96)}, ValueError, "shape must be an integer in .*; got -96"),
        ({"dtype": np.int8}, TypeError, "dtype must be float32, float16 or bfloat16; got .*int8"),
    ],
)
def test_wrong_descriptions_are_refused(change, error, message):
    with pytest.raises(error, match=message):
        replace(quantize(X, SCALINGS["mxfp8"]), **change)


def test_dtype_is_normalised():
    q = replace(quantize(X, SCALINGS["mxfp8"]), dtype=np.float16)
    assert q.dtype == np.dtype(np.float16) and isinstance(q.dtype, np.dtype)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "nvfp4-row-scaled"])
def test_swizzled_scales_come_back_and_dequantize_the_same(name):
    q = quantize(X, SCALINGS[name], columnwise=True)
    swizzled = q.swizzled()
    assert swizzled.with_gemm_swizzled_scales and "swizzled scales" in repr(swizzled)
    assert swizzled.swizzled() is swizzled and q.unswizzled() is q
    back = swizzled.unswizzled()
    for field in ("rowwise_scale_inv", "columnwise_scale_inv"):
        assert getattr(swizzled, field).tobytes() != getattr(q, field).tobytes()
        np.testing.assert_array_equal(getattr(back, field), getattr(q, field))
    np.testing.assert_array_equal(dequantize(swizzled), dequantize(q))


def test_repr_names_directions_and_settings():
    q = quantize(X, SCALINGS["mxfp8"], columnwise=True)
    assert repr(q) == f"Quantized(shape=(4, 48, 96), dtype=bfloat16, rowwise + columnwise, {q.scaling})"
