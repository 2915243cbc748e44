"""Dequantization: the float32 values of a `Quantized`, code times decode factor, as its scaling declares."""

import numpy as np

from refops.quantization.hadamard import GROUP, transform_groups
from refops.quantization.layout import blocks_of, codes_of_tile
from refops.quantization.quantize import amax_by_outer
from refops.quantization.result import Quantized
from refops.scalings.arithmetic import REFERENCE
from refops.tiles import Source


class DequantizedSource(Source):
    """The float32 values that a `Quantized` stands for, before rounding to an output dtype.

    As in TE, a factor of two levels may overflow (NVFP4: amax above FLT_MAX / 448): such a block comes back as inf, its
    zeros as NaN. Columnwise data come back in (M, K) orientation, a Hadamard transform undone in float64 unless
    `undo_transform` is False.
    """

    def __init__(self, q, undo_transform=True):
        if not isinstance(q, Quantized):
            raise TypeError(f"q must be a Quantized; got {type(q).__name__}")
        if q.rowwise_data is None and q.columnwise_data is None:
            raise ValueError("q must hold rowwise_data or columnwise_data; got neither")
        require_element_codes(q)
        self._q = q.unswizzled() if q.with_gemm_swizzled_scales else q
        self._columnwise = q.rowwise_data is None
        self._undone = q.scaling.hadamard if undo_transform and self._columnwise else None
        self._decode_factor = q.scaling.decode_factor(REFERENCE)
        super().__init__(q.shape, q.matrix_shape, q.dtype)

    def read(self, rows, columns):
        codes = code_tile(self._q, rows, columns, self._columnwise)
        values = self._q.scaling.fmt.values[codes] * self._factors(rows, columns)
        return values if self._undone is None else _untransformed(values, self._undone)

    def _factors(self, rows, columns):
        """The factors of the codes of a rectangle, of its shape or (1, 1)."""
        q, layout, columnwise = self._q, self._q.scaling.layout, self._columnwise
        name = "columnwise" if columnwise else "rowwise"
        scales = layout.scales_by_outer(getattr(q, f"{name}_scale_inv"), columnwise)
        amax = getattr(q, f"amax_{name}") if layout.two_level else None  # else no factor reads it
        if layout.block is None:
            return self._decode_factor(scales, amax)
        outer, inner = layout.oriented((rows, columns), columnwise)
        parts = blocks_of(outer, layout.run[0]), blocks_of(inner, layout.run[1])
        factors = self._decode_factor(scales[parts], None if amax is None else amax_by_outer(layout, amax, outer))
        for axis, (elements, edge) in enumerate(zip((outer, inner), layout.run, strict=True)):
            if edge > 1:
                skipped, count = elements.start % edge, elements.stop - elements.start
                factors = np.repeat(factors, edge, axis=axis)
                factors = factors[skipped:][:count] if axis == 0 else factors[:, skipped:][:, :count]
        return factors.T if columnwise else factors


def code_tile(q, rows, columns, columnwise):
    """uint8 codes (R, C) of a rectangle in the tensor's orientation, one per byte."""
    matrix = q.column_matrix if columnwise else q.row_matrix
    return codes_of_tile(q.scaling.layout, matrix, rows, columns, columnwise)


def _untransformed(values, sign_mask):
    """`values` with groups of 16 rows transformed back; tile edges are multiples of 16."""
    values = np.ascontiguousarray(values)
    groups = values.reshape(-1, GROUP, values.shape[1])
    return transform_groups(groups, sign_mask, np.float32, inverse=True).reshape(values.shape)


def require_element_codes(q):
    """Raise ValueError if a byte holds no code of the element format."""
    fmt = q.scaling.fmt
    if q.scaling.layout.packed > 1 or fmt.bits == 8:
        return  # every byte holds codes
    for name in ("rowwise_data", "columnwise_data"):
        codes, limit = getattr(q, name), 1 << fmt.bits
        if codes is not None and codes.size and codes.max() >= limit:
            raise ValueError(f"q must hold codes below {limit} in {fmt!r}; got {codes.max()} in {name}")
