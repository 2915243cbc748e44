"""An operand of a product as the oracle sees it: rows along which sums run, however the operand was dumped."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from refops.formats import ElementFormat
from refops.quantization.dequantize import code_tile
from refops.quantization.result import Quantized
from refops.scalings.declaration import Layout

#: The largest float32.
LARGEST = float(np.finfo(np.float32).max)
#: The smallest normal number of each dtype of plain operands.
SMALLEST_NORMAL = {"float32": 2.0**-126, "bfloat16": 2.0**-126, "float16": 2.0**-14}


@dataclass(frozen=True)
class Operand:
    """The rows of one operand with the contracted dimension last: element times scale of its block times factor.

    Attributes:
        name: "a" or "b".
        elements: (rows, k), float32 values of codes, or a plain operand in its own dtype.
        fmt: format of the codes, None of a plain operand.
        scales: float32 (rows, blocks), one for `block` elements along k; None without.
        block: elements along k that share a scale.
        scale_format: format of the scales, None of float32 ones.
        factor: float32 or float64 (rows, 1) or (1, 1), the further factor of all elements of a row: the
            scale of the tensor, or the amax that stands above the scales of blocks.
        top: what that amax is divided by, 1 without.
        quantized: what it was read from, its scales in the order in which they were given; None of a plain operand.
        columnwise: which copy of that.
        turned: whether the other dimension of that copy is contracted: it has one scale for the tensor.
        stored_k_first: whether the contracted dimension is the first one of what is stored.
    """

    name: str
    elements: np.ndarray
    fmt: ElementFormat | None = None
    scales: np.ndarray | None = None
    block: int | None = None
    scale_format: ElementFormat | None = None
    factor: np.ndarray = field(default_factory=lambda: np.ones((1, 1), np.float32))
    top: float = 1.0
    quantized: Quantized | None = None
    columnwise: bool = False
    turned: bool = False
    stored_k_first: bool = False

    @classmethod
    def plain(cls, name, matrix, transposed):
        """Of a matrix in float32, float16 or bfloat16; `transposed`: its first dimension is the contracted one."""
        return cls(name, matrix.T if transposed else matrix, stored_k_first=transposed)

    @classmethod
    def read(cls, name, q, columnwise, turned=False):
        """Of one copy of a `Quantized`, its scales in either order.

        Columnwise copies are read as GEMMs read them: a Hadamard transform is not undone, since the other operand went
        through it too. `turned`: the other dimension is contracted, along which one scale for the tensor serves, too.
        """
        plain = cls.stored(name, q.unswizzled() if q.with_gemm_swizzled_scales else q, columnwise, turned)
        return replace(plain, quantized=q)

    @classmethod
    def stored(cls, name, q, columnwise, turned=False):
        """The same, for scales that lie in plain order or are to be read as if they did."""
        scaling, layout = q.scaling, q.scaling.layout
        elements = scaling.fmt.values[_codes(q, columnwise, turned)]
        common = {
            "quantized": q,
            "columnwise": columnwise,
            "turned": turned,
            "stored_k_first": turned != (columnwise and not layout.columnwise_transposed),
        }
        scales = layout.scales_by_outer(getattr(q, f"{direction_of(columnwise)}_scale_inv"), columnwise)
        if layout.block is None:
            return cls(name, elements, scaling.fmt, factor=scales, **common)
        if layout.two_level:
            amax = getattr(q, f"amax_{direction_of(columnwise)}")
            common |= {"factor": amax.reshape(-1, 1), "top": float(scaling.top)}
        outer, blocks = layout.scale_counts(q.matrix_shape, columnwise)
        decoded = scales if layout.scale_format is None else layout.scale_format.values[scales]
        rows = np.repeat(decoded[:outer, :blocks], layout.run[0], axis=0)[: len(elements)]
        rows = np.ascontiguousarray(rows, np.float32)
        return cls(name, elements, scaling.fmt, rows, layout.run[1], layout.scale_format, **common)

    @property
    def rows(self):
        """Rows, which become rows (of a) or columns (of b) of the result."""
        return self.elements.shape[0]

    @property
    def k(self):
        """Length of the sums."""
        return self.elements.shape[1]

    @property
    def layout(self) -> Layout | None:
        """How the quantized tensor is laid out; None of a plain operand."""
        return None if self.quantized is None else self.quantized.scaling.layout

    @property
    def scaling(self) -> Any:
        """The settings of the quantized tensor; None of a plain operand."""
        return None if self.quantized is None else self.quantized.scaling

    @cached_property
    def smallest_normal(self):
        """The format's smallest normal number: a unit looking for the largest product counts smaller ones as this."""
        return SMALLEST_NORMAL[self.elements.dtype.name] if self.fmt is None else float(self.fmt.smallest_normal)

    def unscaled(self, rows, places=slice(None)):
        """float64 (rows, places): elements alone."""
        return self.elements[rows, places].astype(np.float64)

    def scale_at(self, rows, place):
        """float64 (rows, 1) or (1, 1): the scales of the blocks that hold a place along k; 1 without."""
        if self.scales is None:
            return np.ones((1, 1))
        return self.scales[rows, place // self.block].astype(np.float64)[:, None]

    def values(self, rows, places=slice(None)):
        """float64 (rows, places): elements times scales, without the factor."""
        elements = self.unscaled(rows, places)
        if self.scales is not None:
            elements *= self._scales_of(self.scales[rows], places)
        return elements

    def magnitudes(self, rows, places=slice(None)):
        """float64, no less than |values| and than 2 to the exponent by which a unit aligns them; 0 for NaN and inf."""
        elements = np.abs(self.elements[rows, places].astype(np.float64))
        elements = np.where(elements == 0, 0, np.maximum(elements, self.smallest_normal))
        if self.scales is not None:
            least = 0 if self.scale_format is None else float(self.scale_format.smallest_normal)
            scales = np.abs(self.scales[rows])
            elements *= self._scales_of(np.where(scales == 0, 0, np.maximum(scales, np.float32(least))), places)
        return np.where(np.isfinite(elements), elements, 0)

    def factor_of(self, rows):
        """float64 (rows, 1) or (1, 1): the factor of some rows."""
        factor = self.factor if self.factor.shape[0] == 1 else self.factor[rows]
        return factor.astype(np.float64) / self.top

    def _scales_of(self, scales, places):
        start, stop, _ = places.indices(self.k)
        first = start // self.block
        repeated = np.repeat(scales[:, first : -(-stop // self.block)], self.block, axis=1)
        return repeated[:, start - first * self.block :][:, : stop - start]

    def overflows(self, rows):
        """bool (rows,): whether a finite element times its scale and factor, in any order, may be beyond float32."""
        most = np.maximum(self.magnitudes(rows).max(axis=1, initial=0), self.scale_at_most(rows))
        return (self.quantized is not None) & (most * self.factor_at_most(rows) > LARGEST)

    def scale_at_most(self, rows):
        """float64 (rows,): the largest finite block scale of each row, at least 1."""
        if self.scales is None:
            return np.ones(len(self.elements[rows]))
        scales = np.abs(self.scales[rows].astype(np.float64))
        return np.where(np.isfinite(scales), scales, 0).max(axis=1, initial=1)

    def scale_at_least(self, rows):
        """float64 (rows,): the smallest nonzero block scale of each row, at most 1."""
        if self.scales is None:
            return np.ones(len(self.elements[rows]))
        scales = np.abs(self.scales[rows].astype(np.float64))
        return np.where(scales > 0, scales, 1).min(axis=1, initial=1)

    def element_at_most(self, rows):
        """float64 (rows,): the magnitude of the largest finite element of a row, without its scale."""
        elements = np.abs(self.elements[rows].astype(np.float64))
        return np.where(np.isfinite(elements), elements, 0).max(axis=1, initial=0)

    def factor_at_most(self, rows):
        """float64 (rows,) or (1,): the magnitude of the factor, at least 1."""
        factor = self.factor if len(self.factor) == 1 else self.factor[rows]
        return np.maximum(np.abs(factor[:, 0].astype(np.float64)), 1)

    def reread(self, q):
        """The same operand of another `Quantized`, whose scales are read in plain order."""
        return self.stored(self.name, q, self.columnwise, self.turned)

    def codes(self):
        """uint8 (rows, k): the codes of the elements, one per byte."""
        return _codes(self.quantized, self.columnwise, self.turned)

    def taken(self, rows):
        """The operand whose rows are others of this one."""
        scales = None if self.scales is None else self.scales[rows]
        factor = self.factor if len(self.factor) == 1 else self.factor[rows]
        return replace(self, elements=self.elements[rows], scales=scales, factor=factor)

    def with_scales(self, scales):
        """The same elements under other scales of blocks."""
        return replace(self, scales=np.ascontiguousarray(scales, np.float32))


def direction_of(columnwise):
    """Name of a copy."""
    return "columnwise" if columnwise else "rowwise"


def _codes(q, columnwise, turned):
    """uint8 (rows, k), one per byte."""
    codes = code_tile(q, *(slice(0, size) for size in q.matrix_shape), columnwise)
    return codes.T if columnwise != turned else codes
