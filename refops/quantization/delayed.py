"""The scale of delayed scaling from the amax history. Source: TE `common/recipe/delayed_scaling.cu`."""

from collections.abc import Callable
from typing import Any, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from refops.arguments import (
    HIGH_PRECISION,
    as_array,
    describe_array,
    require_choice,
    require_flag,
    require_integer,
    require_number,
    shown,
)
from refops.formats import FloatFormat, require_format
from refops.hints import Array, ArrayLike, Number
from refops.scalings import FP8_FORMATS
from refops.scalings.arithmetic import FLT_MAX, F

#: How the amax comes from the history: by name, or a callable.
Algorithm: TypeAlias = str | Callable[[Any], Any]


@overload
def update_delayed_scale(
    amax_history: ArrayLike,
    scale: Number,
    fmt: FloatFormat,
    *,
    margin: int = ...,
    algorithm: Algorithm = ...,
    keep_unused: bool = ...,
) -> tuple[NDArray[np.float32], np.float32]: ...
@overload
def update_delayed_scale(
    amax_history: ArrayLike,
    scale: Array,
    fmt: FloatFormat,
    *,
    margin: int = ...,
    algorithm: Algorithm = ...,
    keep_unused: bool = ...,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]: ...
def update_delayed_scale(
    amax_history: ArrayLike,
    scale: Number | Array,
    fmt: FloatFormat,
    *,
    margin: int = 0,
    algorithm: Algorithm = "max",
    keep_unused: bool = True,
) -> tuple[NDArray[np.float32], Any]:
    """Roll the amax history and compute the next delayed scale.

    Row 0 of the history holds the newest amax. Per column: the scale becomes fmt.max * 2^-margin / amax, where
    amax is the history's maximum (NaN entries ignored) or its newest entry; it stays as it is where amax is 0, inf or
    NaN, and overflow gives FLT_MAX. The history rolls by one towards row 0, whose entry goes to the end, and row 0 is
    cleared for the next step: [8, 1, 7, 2] becomes [0, 7, 2, 8].

    Args:
        amax_history: float32 (L,) or (L, n).
        scale: a number for (L,), float32 (n,) for (L, n).
        fmt: E4M3 or E5M2.
        margin: the scale is divided by 2^margin.
        algorithm: "max", "most_recent", or a callable from the history to the amax (shape of `scale`).
        keep_unused: leave a column whose newest amax is 0 (a tensor that this step did not see) as it is: TE's fused
            update, its default. False rolls always, as TE's single-tensor kernel and its Python path do. A callable
            always rolls: it runs on the Python path in TE.

    Returns:
        (new_history, new_scale): float32 arrays of the given shapes, np.float32 for a scalar scale.

    Example, one training step:
        q = quantize(x, DelayedScaling(E4M3, scale))
        history[0] = max(history[0], q.amax_rowwise[0])
        history, scale = update_delayed_scale(history, scale, E4M3)

    Raises:
        TypeError: dtype other than float32, or algorithm neither string nor callable.
        ValueError: shapes that do not belong together, empty history, unknown algorithm or format.
    """
    history, scales, shape = check_history(amax_history, scale)
    require_format(fmt, FP8_FORMATS)
    margin = require_integer(margin, "margin", low=-126, high=127)
    require_flag(keep_unused, "keep_unused")
    if not callable(algorithm):
        algorithm = require_choice(algorithm, "algorithm", ("max", "most_recent"))
    newest = history[0]
    if callable(algorithm):
        amax = call_algorithm(algorithm, np.asarray(amax_history), scales.size)
    else:
        amax = np.fmax.reduce(quieted(history), axis=0) if algorithm == "max" else newest
    rolled = np.concatenate([np.zeros_like(history[:1]), history[2:], history[:1]])[: len(history)]
    unused = (newest == 0) & keep_unused & (not callable(algorithm))
    with np.errstate(all="ignore"):
        fresh = (fmt.max * F(2.0**-margin)) / amax
    fresh = np.where(np.isinf(fresh), FLT_MAX, fresh)
    usable = np.isfinite(amax) & (amax > 0) & ~unused
    new_scale = np.where(usable, fresh, scales).astype(np.float32)
    return np.where(unused, history, rolled).reshape(np.shape(amax_history)), new_scale.reshape(shape)[()]


def quieted(history):
    """The history with quiet NaNs: whether `np.fmax` passes a signalling one on depends on its place in the array."""
    with np.errstate(invalid="ignore"):
        return history + F(0)


def check_history(amax_history, scale):
    """Return history as (L, n), scale as (n,), and the scale's own shape."""
    history = as_array(amax_history, "amax_history")
    if isinstance(scale, int | float) and not isinstance(scale, bool):
        scale = require_number(scale, "scale")
    scale = as_array(scale, "scale")
    for name, array in (("amax_history", history), ("scale", scale)):
        if array.dtype != np.float32:
            raise TypeError(f"{name} must be float32; got {describe_array(array)}")
    if history.ndim not in (1, 2) or len(history) == 0:
        raise ValueError(f"amax_history must be (L,) or (L, n) with L >= 1; got shape {history.shape}")
    if scale.size != history[0].size or scale.ndim > 1 or (history.ndim == 2 and scale.shape != history.shape[1:]):
        raise ValueError(
            f"scale must have one entry for each column of amax_history {history.shape}; got shape {scale.shape}"
        )
    return history.reshape(len(history), -1), scale.reshape(-1), scale.shape


def call_algorithm(algorithm, amax_history, columns):
    """Return what a callable computes from the history, as float32 (n,)."""
    returned = algorithm(amax_history)
    amax = as_array(returned, "the result of algorithm")
    if amax.dtype.kind not in "fiu" and amax.dtype not in HIGH_PRECISION:
        raise TypeError(f"algorithm must return numbers; got {shown(returned)}")
    if amax.size != columns:
        raise ValueError(f"algorithm must return one amax a column ({columns}); got shape {amax.shape}")
    with np.errstate(over="ignore"):  # beyond float32 is inf, which keeps the scale
        return amax.reshape(columns).astype(np.float32)
