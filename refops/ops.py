"""The operations: activations, gradients and quantization, alone and composed as TE's kernels compose them.

What a composed operation quantizes depends on the kernel path that TE takes for the scaling (`Path`). The difference
is where the float32 activation is rounded to the input's dtype: before the amax, between amax and cast, or not at all.
Sources: TE `pytorch/csrc/extensions/activation.cpp` and `bias.cpp` (which path), `common/util/vectorized_pointwise.h`,
`common/cast/mxfp8/quantize_mxfp8.cuh`, `common/activation/scaled_activation.cu` (the order of operations).

Tensors are NumPy arrays of float32, float16 or ml_dtypes.bfloat16 with at least one dimension. Leading dimensions are
flattened to M; the last one is K. Gated activations read rows [act | gate] of width 2H and write rows of width H.
"""

from typing import Literal, overload

import numpy as np

from refops.activations import ROW_SCALED, bind_activation
from refops.arguments import (
    require_flag,
    require_high_precision_dtype,
    require_integer,
    require_name,
    require_tensor,
)
from refops.hints import Array, ArrayLike, DTypeLike, Number
from refops.quantization.dequantize import DequantizedSource
from refops.quantization.quantize import quantize_source
from refops.quantization.result import Quantized
from refops.rounding import stored
from refops.scalings import UNFUSED, Path, Scaling, require_scaling
from refops.tiles import (
    InputSource,
    Matrix,
    RowLayout,
    Source,
    column_chunks,
    column_sum,
    for_each,
    materialize,
    row_slices,
    row_sum,
    tile_slices,
)


def path_of(scaling: Scaling) -> Path:
    """Return the `Path` that TE takes to fuse an activation with `scaling`."""
    return require_scaling(scaling).path


# --- the front halves -----------------------------------------------------------------------------


class ActivationSource(Source):
    """f(x), or f(act) * gate for rows [act | gate]; `width` is that of the output."""

    def __init__(self, bound, x):
        self._bound, self._input, self.gated = bound, Matrix(x), bound.gated
        self.width = _output_width(bound, x)
        super().__init__((*x.shape[:-1], self.width), (self._input.shape[0], self.width), x.dtype)

    def read(self, rows, columns):
        act = self._input.read(rows, columns)
        if not self._bound.gated:
            return self._bound.forward(act)
        return self._bound.forward(act, self._input.read(rows, _shift(columns, self.width)))


class ActivationGradSource(Source):
    """dy * f'(x), or [d_act | d_gate]; `width` is that of dy."""

    def __init__(self, bound, dy, x):
        self._bound, self._dy, self._input, self.gated = bound, Matrix(dy), Matrix(x), bound.gated
        self.width = _output_width(bound, x)
        expected = (*x.shape[:-1], self.width)
        if dy.shape != expected:
            raise ValueError(f"dy must have the shape of the activation's output, {expected}; got {dy.shape}")
        if dy.dtype != x.dtype:
            raise TypeError(f"dy and x must have the same dtype; got {dy.dtype} and {x.dtype}")
        super().__init__(x.shape, self._input.shape, x.dtype)

    def read(self, rows, columns):
        if not self._bound.gated:
            return self._bound.backward(self._dy.read(rows, columns), self._input.read(rows, columns))
        out = np.empty((rows.stop - rows.start, columns.stop - columns.start), np.float32)
        for first, gradient in ((0, self._bound.backward_act), (self.width, self._bound.backward_gate)):
            start, stop = max(columns.start, first), min(columns.stop, first + self.width)
            if start < stop:
                part = slice(start - first, stop - first)
                act, gate = self._input.read(rows, part), self._input.read(rows, _shift(part, self.width))
                out[:, start - columns.start : stop - columns.start] = gradient(self._dy.read(rows, part), act, gate)
        return out


def _shift(columns, offset):
    return slice(columns.start + offset, columns.stop + offset)


def _output_width(bound, x):
    """Width of an activation's output: H for rows [act | gate], which have 2H."""
    if not bound.gated:
        return x.shape[-1]
    if x.shape[-1] % 2:
        raise ValueError(f"x must have an even last dimension, [act | gate]; got shape {x.shape}")
    return x.shape[-1] // 2


# --- activations without quantization -------------------------------------------------------------


def activation(name: str, x: ArrayLike, *, out_dtype: DTypeLike | None = None, **params: Number) -> Array:
    """Apply an activation: float32 arithmetic, one rounding to the output dtype.

    Args:
        name: a key of `refops.ACTIVATIONS`, which holds the formulas.
        x: (..., K), or (..., 2H) for gated activations: the first half goes through the activation.
        out_dtype: float32, float16 or bfloat16; default the dtype of `x`.
        **params: the activation's parameters, `refops.ACTIVATIONS[name].parameters`, such as limit of clamped_swiglu;
            TE's default for each that is not given.

    Returns:
        (..., K) or (..., H).

    Raises:
        TypeError: dtype of `x` or `out_dtype`; a parameter that `name` does not take.
        ValueError: unknown name, scalar `x`, odd gated width, a parameter that is declared positive (the betas of
            situglu) and is not positive and finite. The others may be any number but NaN, as in TE: with a limit below
            0 the formula is computed as written, every gate becomes limit.
    """
    source = ActivationSource(bind_activation(name, params), require_tensor(x, "x"))
    return materialize(source, out_dtype)


@overload
def activation_grad(
    name: str,
    dy: ArrayLike,
    x: ArrayLike,
    *,
    out_dtype: DTypeLike | None = ...,
    dbias: Literal[False] = ...,
    **params: Number,
) -> Array: ...
@overload
def activation_grad(
    name: str, dy: ArrayLike, x: ArrayLike, *, out_dtype: DTypeLike | None = ..., dbias: Literal[True], **params: Number
) -> tuple[Array, Array]: ...
@overload
def activation_grad(
    name: str, dy: ArrayLike, x: ArrayLike, *, out_dtype: DTypeLike | None = ..., dbias: bool, **params: Number
) -> Array | tuple[Array, Array]: ...
def activation_grad(
    name: str,
    dy: ArrayLike,
    x: ArrayLike,
    *,
    out_dtype: DTypeLike | None = None,
    dbias: bool = False,
    **params: Number,
) -> Array | tuple[Array, Array]:
    """Gradient of `activation` with respect to x.

    Args:
        name, out_dtype, **params: as for `activation`.
        dy: gradient of the output, its shape and the dtype of `x`.
        x: the activation's input.
        dbias: also return the sum of the gradient over all but the last dimension. Unfused: it adds the gradient as
            stored, rounded to the output dtype, in float32.

    Returns:
        dx of the shape of `x`, or (dx, dbias) with dbias (K,) in the dtype of `dy`.

    Raises:
        TypeError, ValueError: as `activation`; the shape or dtype of `dy` does not fit.
    """
    require_flag(dbias, "dbias")
    source = _grad_source(name, dy, x, params)
    dx = materialize(source, out_dtype)
    return (dx, _dbias(InputSource(dx), source.dtype)) if dbias else dx


def _grad_source(name, dy, x, params):
    return ActivationGradSource(bind_activation(name, params), require_tensor(dy, "dy"), require_tensor(x, "x"))


def _dbias(source, dtype):
    with np.errstate(all="ignore"):
        return stored(column_sum(source), dtype)


# --- activations scaled by row --------------------------------------------------------------------

#: Activations that TE offers with a scale for each row (token probabilities in mixtures of experts).
SCALED_ACTIVATIONS = ROW_SCALED


def scaled_activation(
    name: str,
    x: ArrayLike,
    row_scales: ArrayLike,
    *,
    glu_interleave_size: int = 0,
    out_dtype: DTypeLike | None = None,
    **params: Number,
) -> Array:
    """Apply an activation and multiply each row by its scale, all in float32, one rounding at the end.

    Args:
        name: one of `refops.SCALED_ACTIVATIONS`.
        x: (..., 2H), or (..., K) for srelu.
        row_scales: one scale a row, M entries in any shape; float32, float16 or bfloat16.
        glu_interleave_size: 0 for rows [act | gate]; g for rows [act 0:g | gate 0:g | act g:2g | ...], g a multiple
            of 32 that divides H.
        out_dtype, **params: as for `activation`.

    Returns:
        (..., H) or (..., K).

    Raises:
        TypeError, ValueError: as `activation`; `row_scales` or `glu_interleave_size` does not fit.
    """
    work = ScaledRows(name, x, row_scales, glu_interleave_size, params)
    out_dtype = _output_dtype(out_dtype, work.x.dtype)
    out = np.empty(work.shape, out_dtype)

    def fill(rows, columns):
        act, gate = work.read(rows, columns)
        out[rows, columns] = stored(work.bound.forward(act, gate) * work.scales[rows], out_dtype)

    for_each(tile_slices(work.shape), fill)
    return out.reshape(*work.x.shape[:-1], work.shape[1])


def scaled_activation_grad(
    name: str,
    dy: ArrayLike,
    x: ArrayLike,
    row_scales: ArrayLike,
    *,
    glu_interleave_size: int = 0,
    out_dtype: DTypeLike | None = None,
    **params: Number,
) -> tuple[Array, Array]:
    """Gradients of `scaled_activation` with respect to x and row_scales.

    Args:
        dy: gradient of the output, its shape; any high-precision dtype (TE's scaled kernels take each on its own).
        name, x, row_scales, glu_interleave_size, out_dtype, **params: as for `scaled_activation`.

    Returns:
        (dx, drow_scales): dx like `x` (in `out_dtype` if given), drow_scales like `row_scales`. A scale's gradient is
        the float32 sum over its row, in chunks of 128 columns, of dy times the unscaled activation.

    Raises:
        TypeError, ValueError: as `scaled_activation`; the shape of `dy` does not fit.
    """
    work = ScaledRows(name, x, row_scales, glu_interleave_size, params)
    dy = require_tensor(dy, "dy")
    expected = (*work.x.shape[:-1], work.shape[1])
    if dy.shape != expected:
        raise ValueError(f"dy must have the shape of the activation's output, {expected}; got {dy.shape}")
    gradient = Matrix(dy)
    out_dtype = _output_dtype(out_dtype, work.x.dtype)
    dx = np.empty(work.input.shape, out_dtype)
    drow_scales = np.zeros(work.shape[0], np.float32)

    def fill(rows):
        for columns in column_chunks(work.shape[1]):
            g = gradient.read(rows, columns)
            act, gate = work.read(rows, columns)
            d_act, d_gate = work.bound.scaled_backward(g * work.scales[rows], act, gate)
            dx[rows, work.columns_of(columns, gate=False)] = stored(d_act, out_dtype)
            if work.bound.gated:
                dx[rows, work.columns_of(columns, gate=True)] = stored(d_gate, out_dtype)
            drow_scales[rows] += row_sum(g * work.bound.forward(act, gate))

    for_each([(rows,) for rows in row_slices(work.shape)], fill)
    with np.errstate(all="ignore"):
        drow_scales = stored(drow_scales, work.row_scales.dtype)
    return dx.reshape(work.x.shape), drow_scales.reshape(work.row_scales.shape)


class ScaledRows:
    """Checked arguments of a scaled activation, and where its columns lie in an interleaved row."""

    def __init__(self, name, x, row_scales, glu_interleave_size, params):
        require_name(name, "name", SCALED_ACTIVATIONS)
        self.bound = bind_activation(name, params)
        self.x, self.row_scales = require_tensor(x, "x"), require_tensor(row_scales, "row_scales")
        self.input = Matrix(self.x)
        m, width = self.input.shape[0], _output_width(self.bound, self.x)
        self.shape = (m, width)
        if self.row_scales.size != m:
            raise ValueError(f"row_scales must have one entry per row, {m}; got shape {self.row_scales.shape}")
        self.scales = self.row_scales.reshape(m, 1).astype(np.float32)
        g = require_integer(glu_interleave_size, "glu_interleave_size", low=0, high=1 << 62)
        if g and (not self.bound.gated or g % 32 or width % g):
            raise ValueError(
                "glu_interleave_size must be 0, or for gated activations a multiple of 32 that divides "
                f"H={width}; got {g}"
            )
        self._interleave = g

    def columns_of(self, columns, *, gate):
        """Input columns of the activated values, or of their gates, of output `columns`: indices, or a slice."""
        if self._interleave:
            return RowLayout(self._interleave).columns(np.arange(columns.start, columns.stop), gate)
        return _shift(columns, self.shape[1]) if gate else columns

    def read(self, rows, columns):
        """float32 activated values and gates (None for unary) of a rectangle of the output."""
        act = self.input.read(rows, self.columns_of(columns, gate=False))
        return act, self.input.read(rows, self.columns_of(columns, gate=True)) if self.bound.gated else None


def _output_dtype(out_dtype, default):
    return default if out_dtype is None else require_high_precision_dtype(out_dtype, "out_dtype")


# --- quantization ---------------------------------------------------------------------------------


@overload
def quantize(
    x: ArrayLike, scaling: Scaling, *, rowwise: bool = ..., columnwise: bool = ..., dbias: Literal[False] = ...
) -> Quantized: ...
@overload
def quantize(
    x: ArrayLike, scaling: Scaling, *, rowwise: bool = ..., columnwise: bool = ..., dbias: Literal[True]
) -> tuple[Quantized, Array]: ...
@overload
def quantize(
    x: ArrayLike, scaling: Scaling, *, rowwise: bool = ..., columnwise: bool = ..., dbias: bool
) -> Quantized | tuple[Quantized, Array]: ...
def quantize(
    x: ArrayLike, scaling: Scaling, *, rowwise: bool = True, columnwise: bool = False, dbias: bool = False
) -> Quantized | tuple[Quantized, Array]:
    """Quantize a tensor.

    Args:
        x: (..., K), float32, float16 or bfloat16.
        scaling: settings of any declared scaling, such as DelayedScaling, MXFP8Scaling or MXFP4Scaling.
        rowwise, columnwise: which copies to make: blocks along K, blocks along M. At least one.
        dbias: also return the float32 column sum of `x`, rounded to its dtype: (K,).

    Returns:
        `Quantized`, or (`Quantized`, dbias).

    Raises:
        TypeError: dtype of `x`, kind of `scaling`, flags that are not bool.
        ValueError: scalar `x`, neither direction, or a shape that the scaling does not allow: M and K must be multiples
            of 16 for NVFP4 and MXFP4, of 32 for a columnwise copy of row-scaled NVFP4.
    """
    source = InputSource(require_tensor(x, "x"))
    return _quantize_source(source, UNFUSED, scaling, rowwise, columnwise, dbias)


def activation_quantize(
    name: str, x: ArrayLike, scaling: Scaling, *, rowwise: bool = True, columnwise: bool = False, **params: Number
) -> Quantized:
    """Apply an activation and quantize the result, rounded where TE's kernels for `scaling` round.

    Delayed scaling casts the unrounded float32 result. MXFP8 rounds it to the dtype of `x` first. Current scaling and
    NVFP4 take the tensor's amax before that rounding and cast after it. NVFP4 with RHT or row scaling and every other
    scaling see only the rounded tensor.

    Args and errors: as `activation` (without out_dtype) and `quantize`; also ValueError for a gated activation in MXFP8
    with H % 32 != 0.

    Returns:
        `Quantized` of the activation's output shape.
    """
    source = ActivationSource(bind_activation(name, params), require_tensor(x, "x"))
    check_fusable(source, scaling)
    return _quantize_source(source, path_of(scaling), scaling, rowwise, columnwise, False)


@overload
def activation_grad_quantize(
    name: str,
    dy: ArrayLike,
    x: ArrayLike,
    scaling: Scaling,
    *,
    rowwise: bool = ...,
    columnwise: bool = ...,
    dbias: Literal[False] = ...,
    **params: Number,
) -> Quantized: ...
@overload
def activation_grad_quantize(
    name: str,
    dy: ArrayLike,
    x: ArrayLike,
    scaling: Scaling,
    *,
    rowwise: bool = ...,
    columnwise: bool = ...,
    dbias: Literal[True],
    **params: Number,
) -> tuple[Quantized, Array]: ...
@overload
def activation_grad_quantize(
    name: str,
    dy: ArrayLike,
    x: ArrayLike,
    scaling: Scaling,
    *,
    rowwise: bool = ...,
    columnwise: bool = ...,
    dbias: bool,
    **params: Number,
) -> Quantized | tuple[Quantized, Array]: ...
def activation_grad_quantize(
    name: str,
    dy: ArrayLike,
    x: ArrayLike,
    scaling: Scaling,
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    dbias: bool = False,
    **params: Number,
) -> Quantized | tuple[Quantized, Array]:
    """Gradient of an activation, quantized; with `dbias` also the bias gradient.

    The bias gradient sums float32 values before they are rounded where TE fuses it with the cast (delayed scaling,
    MXFP8), and the gradient rounded to the dtype of `dy` elsewhere. TE fuses it for unary activations alone; here
    gated ones follow the same rule, with dbias of width 2H.

    Values are rounded before the cast as in `activation_quantize`.

    Args and errors: as `activation_grad` (without out_dtype) and `quantize`; also ValueError for a gated activation in
    MXFP8 with H % 32 != 0.

    Returns:
        `Quantized` of the shape of `x`, or (`Quantized`, dbias (K,) in the dtype of `dy`).
    """
    source = _grad_source(name, dy, x, params)
    check_fusable(source, scaling)
    return _quantize_source(source, path_of(scaling), scaling, rowwise, columnwise, dbias)


def check_fusable(source, scaling):
    """TE's MXFP8 kernel for gated activations works on whole blocks: a block never straddles act and gate."""
    multiple = require_scaling(scaling).gate_multiple
    if source.gated and source.width % multiple:
        raise ValueError(
            f"x must have a width 2H with H % {multiple} == 0 for a gated activation in {scaling.title}; "
            f"got H={source.width}"
        )


def _quantize_source(source, path, scaling, rowwise, columnwise, dbias):
    require_scaling(scaling)
    for name, flag in (("rowwise", rowwise), ("columnwise", columnwise), ("dbias", dbias)):
        require_flag(flag, name)
    if not (rowwise or columnwise):
        raise ValueError("rowwise or columnwise must be True; got rowwise=False, columnwise=False")
    rounded = source.rounded()
    values = rounded if path.casts_rounded else source
    amax_values = rounded if path.amax_rounded else source
    result = quantize_source(values, amax_values, scaling, rowwise, columnwise)
    if not dbias:
        return result
    return result, _dbias(rounded if path.dbias_rounded else source, source.dtype)


def dequantize(q: Quantized, *, dtype: DTypeLike = np.float32) -> Array:
    """Return the high-precision tensor that a `Quantized` stands for: float32 arithmetic, one rounding to `dtype`.

    Rowwise data are used if present. Columnwise data alone come back in the tensor's own orientation, with NVFP4's
    Hadamard transform undone (TE leaves the NVFP4 case unimplemented). Swizzled scales are put back in order first.

    Args:
        q: a `Quantized`.
        dtype: float32, float16 or bfloat16.

    Returns:
        Array of `q.shape`.

    Raises:
        TypeError: `q` is no Quantized, or another dtype. ValueError: `q` holds no data.
    """
    return materialize(DequantizedSource(q), require_high_precision_dtype(dtype, "dtype"))
