"""Elements that are integers (MXINT8): right kernels of another origin are accepted, wrong ones are named."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import refops
from refops import oracle

F = np.float32
BF16 = np.dtype(ml_dtypes.bfloat16)
MXINT8 = refops.MXINT8Scaling()


def spread(seed=0, shape=(64, 256), dtype=BF16):
    """Blocks of all sizes of numbers; in each direction many maxima just below a power of two."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape, F) * 2.0 ** rng.integers(-12, 12, shape)
    blocks = x.reshape(shape[0], -1, 32)
    amax = np.abs(blocks).max(axis=2)
    below = 2.0 ** (np.floor(np.log2(amax)) + 1)
    blocks[:, ::2, 3], blocks[:, 1::4, 3] = -F(0.998) * below[:, ::2], F(0.994) * below[:, 1::4]
    return x.astype(dtype)


def kernel(x, *, away=False, least=-127, byte_of=None, units=64, digits=0, byte_shift=0, code_of=None, nan=0):
    """A kernel of MXINT8 as others write one, rowwise: everything in float64 on blocks of 32, nothing of refops."""
    blocks = x.astype(np.float64).reshape(len(x), -1, 32)
    with np.errstate(all="ignore"):
        amax = np.fmax.reduce(np.abs(blocks), axis=2, initial=0)
        exponent = np.where((amax > 0) & np.isfinite(amax), np.frexp(amax)[1] - 1, np.where(amax == 0, -127, 127))
        exponent = np.maximum(exponent if byte_of is None else byte_of(amax, exponent), -127)
        scaled = blocks * np.exp2(-exponent)[:, :, None] * units
        rounded = np.copysign(np.floor(np.abs(scaled) + 0.5), scaled) if away else np.rint(scaled)
        codes = np.where(np.isnan(rounded), nan, np.clip(rounded, least, 127)).astype(int).reshape(x.shape)
    data = codes.astype(np.int8).view(np.uint8) if code_of is None else code_of(codes).astype(np.uint8)
    return {"rowwise_data": data, "rowwise_scale_inv": (exponent + 127 + byte_shift).astype(np.uint8)}


def names(x, outputs, op="quantize", scaling=MXINT8):
    """What the oracle calls it: () where it is right."""
    report = oracle.check(op, x, outputs, scaling=scaling)
    assert not any("diagnosis failed" in note for note in report.notes), report.notes
    assert report.ok or report.diagnosis, str(report)
    return () if report.ok else report.diagnosis[0].names


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float16), np.dtype(F)], ids=str)
def test_right_kernels_are_accepted(dtype):
    for seed in range(3):
        x = spread(seed, dtype=dtype)
        outputs = kernel(x)
        assert names(x, outputs) == ()
        signed = outputs["rowwise_data"].view(np.int8)
        assert names(x, {**outputs, "rowwise_data": signed}) == ()


def test_special_values_are_accepted():
    x = spread(dtype=np.dtype(F)).reshape(-1, 32)
    x[::7, 5], x[::11, 9], x[::13, 1] = np.nan, np.inf, -np.inf
    x[3], x[4] = 0, -0.0
    x[5] *= F(2.0**-140)
    x[6] = np.nan
    assert names(x, kernel(x)) == ()
    q = refops.quantize(x, MXINT8, columnwise=True)
    arrays = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
    assert names(x, {name: getattr(q, name) for name in arrays}) == ()


def up(amax, exponent):
    return exponent + (amax * 2.0**-exponent > 127 / 64)


#: What is done instead, what it is called.
WRONG = {
    "ties away from zero": ({"away": True}, "ties-away"),
    "-128": ({"least": -128}, "least-integer-used"),
    "scales rounded up": ({"byte_of": up}, "scale-up"),
    "a scale one too high": ({"byte_of": lambda amax, e: e + 1}, "scale-off-by-one"),
    "no 2^-6 in the scales": ({"byte_shift": -6}, "implied-scale-missing"),
    "no 2^-6 in the codes": ({"units": 1}, "implied-scale-missing"),
    "sign and magnitude": ({"code_of": lambda q: np.abs(q) | (q < 0) << 7}, "other-sign-code"),
    "offset binary": ({"code_of": lambda q: q + 128}, "other-sign-code"),
    "signs inverted": ({"code_of": lambda q: -q & 0xFF}, "sign-inverted"),
    "signs lost": ({"code_of": np.abs}, "sign-lost"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_kernels_are_named(what):
    changed, name = WRONG[what]
    x = spread(5, dtype=np.dtype(F) if changed.get("byte_of") is up else BF16)  # where "even" is another rule
    assert names(x, kernel(x, **changed)) == (name,)


def test_nan_that_is_not_zero_is_named():
    x = spread()
    x[::5, ::37] = np.nan
    assert names(x, kernel(x, nan=127)) == ("nan-as-a-number",)


def test_activations():
    x = spread(2)
    for op in ("gelu", "swiglu"):
        q = refops.activation_quantize(op, x, MXINT8)
        outputs = {"rowwise_data": q.rowwise_data, "rowwise_scale_inv": q.rowwise_scale_inv}
        assert names(x, outputs, op) == ()


def test_dequantization():
    q = refops.quantize(spread(), MXINT8)
    assert names(q, refops.dequantize(q), "dequantize", None) == ()
    with_least = replace(q, rowwise_data=np.where(q.rowwise_data == 0x81, 0x80, q.rowwise_data).astype(np.uint8))
    assert names(with_least, refops.dequantize(with_least), "dequantize", None) == ()
    assert names(q, refops.dequantize(q) * 64, "dequantize", None) == ("implied-scale-missing",)
    read = replace(q, rowwise_data=q.rowwise_data ^ np.uint8(0x80))
    assert names(q, refops.dequantize(read), "dequantize", None) == ("other-sign-code",)
