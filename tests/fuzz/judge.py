"""Checks of results: shapes, dtypes and codes as documented, finite where inputs are, equal where two must be."""

import numpy as np
from harness import CheckError, DocumentedError, require

import refops
from arrays import ARRAYS, same_bits
from refops import oracle
from refops.quantization.result import stored_layout


def same_values(one, other):
    """As `same_bits`, but any NaN equals any NaN."""
    one, other = np.asarray(one), np.asarray(other)
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    wide, wide_other = one.astype(np.float64), other.astype(np.float64)
    nan = np.isnan(wide)
    return bool(
        np.array_equal(nan, np.isnan(wide_other)) and same_bits(np.where(nan, 0, wide), np.where(nan, 0, wide_other))
    )


def require_array(array, sizes, dtype, what):
    """An array of this shape and dtype."""
    require(isinstance(array, np.ndarray), f"{what} is no array", type(array))
    require(array.shape == tuple(sizes), f"{what} has another shape than", tuple(sizes), array.shape)
    require(array.dtype == np.dtype(dtype), f"{what} has another dtype than", np.dtype(dtype), array.dtype)


def require_quantized(q, x_shape, x_dtype, scaling, *, rowwise=True, columnwise=False):
    """A `Quantized` of documented layout: arrays, codes in range, padding zero, and it can be dequantized."""
    require(q.scaling == scaling and q.shape == tuple(x_shape), "the result is of other settings or shape", q)
    require(np.dtype(q.dtype) == np.dtype(x_dtype), "the result has another dtype", q.dtype)
    for name, (sizes, dtype) in stored_layout(scaling, q.shape).items():
        array = getattr(q, name)
        wanted = columnwise if "columnwise" in name else rowwise
        require((array is not None) == wanted, f"{name} is there, or not, against what was asked", rowwise, columnwise)
        if array is not None:
            require_array(array, sizes, dtype, name)
    limit = 1 << scaling.fmt.bits
    for name in ("rowwise_data", "columnwise_data"):
        data = getattr(q, name)
        if data is not None and data.size and scaling.fmt.bits in (6,):
            require(int(data.max()) < limit, f"{name} holds a code that the format lacks", int(data.max()))


def require_finite_dequantized(q, x):
    """Finite in, finite out; within what the scaling documents (README's limits)."""
    wide = np.asarray(x).astype(np.float32)
    if not np.isfinite(wide).all():
        return
    largest = float(np.abs(wide).max(initial=0))
    smallest = float(np.abs(wide[wide != 0]).min(initial=1))
    if largest > 1e34 or (isinstance(q.scaling, refops.NVFP4Scaling) and smallest < 1e-34):
        return
    require(np.isfinite(refops.dequantize(q)).all(), "finite values come back as others under", q.scaling)


def require_same_quantized(one, other, names=ARRAYS):
    """Two results of the same bits."""
    for name in names:
        left, right = getattr(one, name), getattr(other, name)
        require((left is None) == (right is None), f"{name} is in one result alone")
        require(left is None or same_bits(left, right), f"{name} differs")


def judged_by_the_oracle(op, inputs, outputs, **options):
    """The oracle's verdict on a result of a backend."""
    report = oracle.check(op, inputs, outputs, diagnose=False, **options)
    require(report.ok, f"the oracle rejects {op}: {report}")


def agree(case, name, other, args, kwargs, *, same_errors=True):
    """Call two backends alike: both return, or both refuse, with the same type of error.

    A kernel that says that it serves fewer settings is right to refuse them.
    """
    worked, one = case.attempt(name, *args, **kwargs)
    worked_other, two = case.attempt(other, *args, **kwargs)
    if worked != worked_other:
        if not worked_other and "on a GPU must" in str(two):
            raise DocumentedError(f"{other}: {two}")
        raise CheckError(f"{name} gives {one!r:.300}, {other} gives {two!r:.300}")
    if not worked:
        require(not same_errors or type(one) is type(two), f"{name} and {other} refuse with other errors", one, two)
        raise DocumentedError(f"{name} and {other}: {one}")
    return one, two
