"""`Quantized`: what it accepts from another kernel's dump, what it refuses, and how its scales are reordered."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import refops
from refops import E4M3, Quantized, dequantize, quantize

pytestmark = pytest.mark.check

X = np.random.default_rng(0).standard_normal((4, 48, 96)).astype(ml_dtypes.bfloat16)
SCALINGS = {
    "delayed": refops.DelayedScaling(E4M3),
    "current": refops.CurrentScaling(E4M3),
    "block-1d": refops.BlockScaling(E4M3, 1),
    "block-2d": refops.BlockScaling(E4M3, 2),
    "mxfp8": refops.MXFP8Scaling(E4M3),
    "nvfp4": refops.NVFP4Scaling(),
    "nvfp4-row-scaled": refops.NVFP4Scaling(row_scaled=True),
    "nvfp4-ue5m3-alone": refops.NVFP4Scaling(scale_format=refops.UE5M3, tensor_level=False),
    "mxfp4": refops.MXFP4Scaling(),
    "mxint8": refops.MXINT8Scaling(),
    "block-64": refops.Block64Scaling(E4M3),
    "block-e8m0": refops.E8M0BlockScaling(E4M3),
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


@pytest.mark.parametrize("block_dim", [1, 2])
def test_padding_of_block_scales_as_mxfp8_is_zero(block_dim):
    """130 x 200: 126 rows and 56 columns of padding, in the order before the swizzle."""
    x = np.random.default_rng(1).standard_normal((130, 200)).astype(np.float32)
    rowwise, columnwise = refops.block_scales_as_mxfp8(
        quantize(x, refops.BlockScaling(E4M3, block_dim), columnwise=True)
    )
    for scales, outer, blocks in ((rowwise, 130, 8), (columnwise, 200, 8)):
        plain = refops.unswizzle(scales)
        assert plain.shape == (256, blocks)
        assert (plain[:outer] > 0).all() and (plain[outer:] == 0).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_every_nan_is_stored_as_cudas_canonical_one(dtype):
    x = np.array([np.nan, -np.nan, 1.0] * 7, np.float32).astype(dtype)
    dx, dbias = refops.activation_grad("gelu", x, x, dbias=True)
    q = quantize(x, refops.CurrentScaling(E4M3))
    bits = np.uint32 if x.itemsize == 4 else np.uint16
    canonical = 0x7FFFFFFF if x.itemsize == 4 else 0x7FFF
    for result in (refops.activation("silu", x), dx, dbias, dequantize(q, dtype=dtype)):
        nan = np.isnan(result.astype(np.float32))
        assert nan.sum() == 14 and (result.view(bits)[nan] == canonical).all()
    transformed = refops.hadamard_transform(np.resize(x, (2, 16)))
    assert (transformed.view(bits) == canonical).all()


@pytest.mark.parametrize("shape", [(32, 8), (8, 32), (2, 4, 32), (17,)])
def test_nvfp4_of_a_shape_that_blocks_do_not_divide_is_refused(shape):
    with pytest.raises(ValueError, match=r"shape must have M % 16 == 0 and K % 16 == 0 .*; got \("):
        Quantized(scaling=refops.NVFP4Scaling(), shape=shape, dtype=np.dtype(np.float32))


def test_block_scales_have_one_order():
    with pytest.raises(ValueError, match=r"with_gemm_swizzled_scales must be False with BlockScaling, .*; got True"):
        replace(quantize(X, refops.BlockScaling(refops.E4M3)), with_gemm_swizzled_scales=True)


@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
@pytest.mark.parametrize("fmt", [refops.E3M2, refops.E2M3])
def test_codes_beyond_the_format_are_refused(fmt, direction):
    """A byte holds more than a six-bit code."""
    only = {"rowwise": direction == "rowwise", "columnwise": direction == "columnwise"}
    q = quantize(X, refops.MXFP8Scaling(fmt), **only)
    codes = getattr(q, f"{direction}_data").copy()
    codes[0, 0, 0] = 64
    with pytest.raises(ValueError, match=f"q must hold codes below 64 in {fmt!r}; got 64 in {direction}_data"):
        dequantize(replace(q, **{f"{direction}_data": codes}))
