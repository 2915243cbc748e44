"""Rectangles of a tensor in the arrays that a quantized one is stored in: `Layout`, seen from the tensor.

A `Layout` speaks of outer and inner dimensions; here everything is rows and columns of the (M, K) tensor: slices whose
edges are multiples of a block, or the edges of the tensor. Padding is left out: what is read or stored holds data.
"""

from dataclasses import dataclass

import numpy as np

from refops.formats import pack_fp4
from refops.quantization.layout import blocks_of, ceil_div, codes_of_tile, padded_blocks

#: Edge of the tiles that a diagnosis looks at: a region has as many rows and columns where the tensor has.
TILE = 128
#: Outputs that are the (M, K) result itself.
VALUES = ("y", "dx")


@dataclass(frozen=True)
class Region:
    """A rectangle of the result matrix (M, K)."""

    rows: slice
    columns: slice

    @property
    def shape(self):
        """(rows, columns)."""
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start


def whole(shape):
    """The region of a whole (M, K) matrix; an empty one for no shape."""
    m, k = shape or (0, 0)
    return Region(slice(0, m), slice(0, k))


class Geometry:
    """How the codes and scales of one direction lie in the tensor.

    Attributes:
        layout, columnwise: whose, and which direction.
        block: (rows, columns) of a block, in the orientation of the tensor; None per tensor.
        run: (rows, columns) that one stored scale covers: less than a block where 2-D block scales are repeated.
        packed: codes that share a byte.
        transposed: whether data are stored transposed.
        scales_transposed: whether stored scales run along the tensor's columns first.
    """

    def __init__(self, scaling, columnwise):
        layout = scaling.layout
        self.layout, self.columnwise = layout, columnwise
        self.block = self.run = None
        if layout.block is not None:
            self.block = layout.oriented(layout.block, columnwise)
            self.run = layout.oriented(layout.run, columnwise)
        self.packed, self.transposed = layout.packed, layout.data_transposed(columnwise)
        self.scales_transposed = layout.scales_inner_first[columnwise] != columnwise

    @classmethod
    def of(cls, scaling, direction):
        """Of a direction by name, or of an array of a `Quantized` by its name."""
        return cls(scaling, "columnwise" in direction)

    # --- data -------------------------------------------------------------------------------------

    def matrix(self, data, shape):
        """Stored data of a tensor of (M, K) `shape` as a 2-D view."""
        outer, inner = reversed(shape) if self.transposed else shape
        return data.reshape(outer, inner // self.packed)

    def data_index(self, rows, columns):
        """Index of a rectangle into that view."""
        outer, inner = (columns, rows) if self.transposed else (rows, columns)
        return outer, inner if self.packed == 1 else blocks_of(inner, self.packed)

    def codes(self, data, shape, rows, columns):
        """uint8 codes (R, C) of a rectangle, in the tensor's orientation, one per byte."""
        return codes_of_tile(self.layout, self.matrix(data, shape), rows, columns, self.columnwise)

    def store_codes(self, codes):
        """Codes (R, C) as they are stored."""
        codes = np.ascontiguousarray(codes.T) if self.transposed else codes
        return codes if self.packed == 1 else pack_fp4(codes)

    def stored_element(self, row, column, shape):
        """Index into the stored data, of `shape`, of an element."""
        outer, inner = (column, row) if self.transposed else (row, column)
        return stored_index((outer, inner // self.packed), shape, first_is_outer=self.transposed)

    # --- scales -----------------------------------------------------------------------------------

    def scale_index(self, rows, columns):
        """Index of a rectangle into the stored scales; all of them per tensor."""
        if self.run is None:
            return (...,)
        parts = zip((rows, columns), self.run, strict=True)
        index = tuple(part if edge == 1 else blocks_of(part, edge) for part, edge in parts)
        return index[::-1] if self.scales_transposed else index

    def scales(self, stored, rows, columns):
        """Scales of a rectangle, (row runs, column runs) in the tensor's orientation; (1,) per tensor."""
        scales = stored[self.scale_index(rows, columns)]
        return scales.T if self.scales_transposed else scales

    def store_scales(self, scales, block, shape):
        """One scale for each `block` of a tile of `shape` (None: one in all), as they are stored.

        A run takes the scale of the block that it begins in: repeated where blocks are larger, the first where smaller.
        """
        if block is None:
            return scales.reshape(-1)
        for axis in (0, 1):
            run = np.arange(ceil_div(shape[axis], self.run[axis]))
            begin = np.minimum(run * self.run[axis] // block[axis], max(scales.shape[axis] - 1, 0))
            scales = np.take(scales, begin, axis=axis) if len(run) else scales[:0]
        return scales.T if self.scales_transposed else scales

    def stored_scale(self, rows, columns, at):
        """Index into the stored scales of entry `at` of what `scales` gives for a rectangle."""
        first, second = self.scale_index(rows, columns)
        i, j = at[::-1] if self.scales_transposed else at
        return int(first.start + i), int(second.start + j)

    def valid_scale_shape(self, shape):
        """Shape of the stored scales of a tensor of (M, K) `shape` without the padding of `Layout.scale_shape`."""
        if self.run is None:
            return (1,)
        outer, blocks = self.layout.scale_counts(shape, self.columnwise)
        return (blocks, outer) if self.layout.scales_inner_first[self.columnwise] else (outer, blocks)

    def expand(self, runs, shape):
        """Repeat an array over runs to the elements of a tile of `shape`; (1, 1) per tensor."""
        return runs.reshape(1, 1) if self.run is None else repeat(runs, self.run, shape)

    def blocks_to_runs(self, blocks, shape):
        """Repeat an array over blocks to the runs of a tile of `shape`."""
        factors = self._runs_of_block()
        runs = tuple(ceil_div(size, edge) for size, edge in zip(shape, self.run, strict=True))
        return blocks if factors == (1, 1) else repeat(blocks, factors, runs)

    def agree_within_blocks(self, written, right):
        """Which scales, (row runs, column runs), equal the least right one of their block: it has one scale."""
        factors = self._runs_of_block()
        least = np.where(right, written, np.iinfo(written.dtype).max)
        for axis, factor in enumerate(factors):
            least = np.minimum.reduceat(least, np.arange(0, least.shape[axis], factor), axis=axis)
        return written == repeat(least, factors, written.shape)

    def _runs_of_block(self):
        return self.block[0] // self.run[0], self.block[1] // self.run[1]

    # --- blocks and entries -----------------------------------------------------------------------

    def count_blocks(self, marked, covered):
        """How many blocks of a tile hold a marked entry; an entry covers `covered` (rows, columns) elements."""
        edges = (max(edge // size, 1) for edge, size in zip(self.block, covered, strict=True))
        return int(np.count_nonzero(padded_blocks(marked, *edges).any(axis=(1, 3))))

    def entry(self, name):
        """(transposed, rows, columns): how the stored array `name` is turned, and the elements of one entry."""
        if name.endswith("_scale_inv"):
            return self.scales_transposed, *self.run
        return self.transposed, *((self.packed, 1) if self.transposed else (1, self.packed))


# --- arrays by name -----------------------------------------------------------------------------------


def crop(case, name, array, region):
    """The part of a stored array (or of a mask of its shape) that belongs to `region`, without padding."""
    if name == "dbias":
        return array[region.columns]
    if name in VALUES or name.endswith("_data"):
        shape = case.matrix_shape
        array = array.reshape(shape) if name in VALUES else Geometry.of(case.scaling, name).matrix(array, shape)
    return part_of(case.scaling, name, array, region)


def part_of(scaling, name, array, region):
    """The part of a stored matrix that belongs to a rectangle of the tensor; `array` begins at the tensor's (0, 0)."""
    if name in VALUES:
        return array[region.rows, region.columns]
    if name in ("amax_rowwise", "amax_columnwise"):
        if scaling.layout.amax != "rows":
            return array
        return array[region.columns if name == "amax_columnwise" else region.rows]
    if name.endswith("_data"):
        return array[Geometry.of(scaling, name).data_index(region.rows, region.columns)]
    if name.endswith("_scale_inv"):
        return array[Geometry.of(scaling, name).scale_index(region.rows, region.columns)]
    return array


def as_slice(index):
    """An ascending run of indices as a slice, others as they are."""
    if len(index) and index[-1] - index[0] == len(index) - 1 and (np.diff(index) == 1).all():
        return slice(int(index[0]), int(index[-1]) + 1)
    return index


def repeat(values, factors, shape):
    """Each entry of a matrix `factors` (rows, columns) times, cut to `shape`."""
    for axis, factor in enumerate(factors):
        if factor > 1:
            values = np.repeat(values, factor, axis=axis)
    return values[: shape[0], : shape[1]]


def stored_index(element, shape, first_is_outer=False):
    """Index into an array of `shape` of an entry of its matrix view."""
    if len(shape) == 2:
        return tuple(int(i) for i in element)
    if first_is_outer:  # (K, *leading)
        return (int(element[0]), *(int(i) for i in np.unravel_index(element[1], shape[1:])))
    return (*(int(i) for i in np.unravel_index(element[0], shape[:-1])), int(element[1]))
