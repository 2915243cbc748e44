"""Exact arithmetic has the reference's bits: what the tests of every backend and front end share."""

import ml_dtypes
import numpy as np

import refops
from arrays import assert_same_bits, assert_same_quantized, assert_same_values

F = np.float32
DTYPES = [np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(F)]
MXFP8 = refops.MXFP8Scaling(refops.E4M3)
EXACT, COLUMNS = {"arithmetic": "exact"}, 256


def numbers(dtype, count=1 << 16):
    """Every number of 16 bits; of float32 `count`: half of them bit patterns over the whole range, half within 20."""
    if dtype.itemsize == 2:
        return np.arange(1 << 16, dtype=np.uint16).view(dtype)
    patterns = (np.arange(count // 2, dtype=np.uint64) * (2**33 // count) + 77).astype(np.uint32)
    return np.concatenate([patterns.view(F), np.linspace(-20, 20, count - count // 2).astype(F)])


def tensors(name, dtype, count=1 << 16):
    """(dy, x) of an activation, in whose halves the `numbers` are, in another order in the gates."""
    x, rng = numbers(dtype, count), np.random.default_rng(5)
    dy = (rng.standard_normal(x.size) * 3).astype(dtype).reshape(-1, COLUMNS)
    if not refops.ACTIVATIONS[name].gated:
        return dy, x.reshape(-1, COLUMNS)
    return dy, np.concatenate([half.reshape(-1, COLUMNS) for half in (x, rng.permutation(x))], axis=1)


def assert_exact(module, name, dtype, *, count=1 << 16, sums=True):
    """An activation and its gradient have the bits of `refops`; all NaN count as equal.

    Args:
        module: `cuda_kernels.host`, or `cuda_kernels`. sums: whether its sums have the reference's order.
    """
    dy, x = tensors(name, dtype, count)
    with np.errstate(all="ignore"):
        compare(module.activation(name, x, **EXACT), refops.activation(name, x), name)
        got = module.activation_grad(name, dy, x, dbias=sums, **EXACT)
        compare(got, refops.activation_grad(name, dy, x, dbias=sums), f"d{name}")


def assert_exact_fused(module, name, dtype, *, count=1 << 16, sums=True):
    """The same, quantized and with row scales."""
    dy, x = tensors(name, dtype, count)
    x = np.where(np.isfinite(x.astype(F)), x, dtype.type(1))
    scales, parts = np.linspace(-2, 2, len(x)).astype(F), slice(None) if sums else slice(1)
    with np.errstate(all="ignore"):
        got = module.activation_quantize(name, x, MXFP8, columnwise=True, **EXACT)
        assert_same_quantized(got, refops.activation_quantize(name, x, MXFP8, columnwise=True), name)
        got = module.activation_grad_quantize(name, dy, x, MXFP8, columnwise=True, **EXACT)
        assert_same_quantized(got, refops.activation_grad_quantize(name, dy, x, MXFP8, columnwise=True), f"d{name}")
        if name in refops.activations.ROW_SCALED:
            got = module.scaled_activation(name, x, scales, **EXACT)
            compare(got, refops.scaled_activation(name, x, scales), f"scaled_{name}")
            got = module.scaled_activation_grad(name, dy, x, scales, **EXACT)
            compare(got[parts], refops.scaled_activation_grad(name, dy, x, scales)[parts], f"scaled_d{name}")


def compare(got, expected, what):
    """Raise unless arrays, or tuples of them, have the same values."""
    if isinstance(expected, tuple):
        for one, other in zip(got, expected, strict=True):
            compare(one, other, what)
    elif np.isnan(expected.astype(F)).any():
        assert_same_values(got, expected, what)
    else:
        assert_same_bits(got, expected, what)
