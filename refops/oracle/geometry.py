"""Where the codes and scales of a quantized tensor lie, seen from the tensor: rectangles in its own orientation."""

import numpy as np

from refops.formats import unpack_fp4
from refops.quantization.blocks import blocks_of
from refops.quantization.layout import ceil_div
from refops.scaling import BlockScaling, CurrentScaling, DelayedScaling, MXFP8Scaling, NVFP4Scaling


class Geometry:
    """Where the codes and scales of one direction lie.

    Attributes:
        block: (rows, columns) of a block, in the orientation of the tensor.
        run: (rows, columns) that one stored scale covers: less than a block where 2-D block scales are repeated.
        columnwise: which direction.
    """

    def __init__(self, scaling, columnwise, block, run):
        self.scaling, self.columnwise, self.block, self.run = scaling, columnwise, block, run

    @classmethod
    def of(cls, scaling, columnwise):
        """Of a scaling; per-tensor ones have no block."""
        if isinstance(scaling, DelayedScaling | CurrentScaling):
            return cls(scaling, columnwise, None, None)
        size = scaling.block_size
        line = (size, 1) if columnwise else (1, size)
        if isinstance(scaling, BlockScaling):
            block = (size, size) if scaling.block_dim == 2 else line
            return cls(scaling, columnwise, block, block)
        return cls(scaling, columnwise, (size, size) if scaling.two_d else line, line)

    @property
    def transposed(self):
        """Whether data are stored transposed."""
        return self.columnwise and not isinstance(self.scaling, MXFP8Scaling)

    def codes(self, q, rows, columns):
        """uint8 codes of a rectangle in the tensor's orientation; `q` has the arrays of a Quantized as attributes."""
        data = q.column_matrix if self.columnwise else q.row_matrix
        outer, inner = (columns, rows) if self.transposed else (rows, columns)
        if isinstance(self.scaling, NVFP4Scaling):
            codes = unpack_fp4(data[outer, slice(inner.start // 2, ceil_div(inner.stop, 2))])
        else:
            codes = data[outer, inner]
        return codes.T if self.transposed else codes

    def stored_element(self, row, column, shape):
        """Index into the stored data of an element; `shape` is the stored shape."""
        outer, inner = (column, row) if self.transposed else (row, column)
        if isinstance(self.scaling, NVFP4Scaling):
            inner //= 2
        return stored_index((outer, inner), shape, first_is_outer=self.transposed)

    def scales(self, q, rows, columns):
        """Stored scales of a rectangle, (row runs, column runs); a (1,) array per tensor."""
        scales = q.columnwise_scale_inv if self.columnwise else q.rowwise_scale_inv
        index, flipped = self.scale_index(rows, columns)
        return scales if index is None else scales[index].T if flipped else scales[index]

    def scale_index(self, rows, columns):
        """(index into the stored scales, whether what it gives is transposed)."""
        if self.block is None:
            return None, False
        size = self.scaling.block_size
        row_blocks, column_blocks = blocks_of(rows, size), blocks_of(columns, size)
        if isinstance(self.scaling, BlockScaling):
            if self.scaling.block_dim == 2:
                return ((column_blocks, row_blocks), True) if self.columnwise else ((row_blocks, column_blocks), False)
            return ((row_blocks, columns), False) if self.columnwise else ((column_blocks, rows), True)
        if isinstance(self.scaling, MXFP8Scaling):
            return ((row_blocks, columns), False) if self.columnwise else ((rows, column_blocks), False)
        return ((columns, row_blocks), True) if self.columnwise else ((rows, column_blocks), False)

    def stored_scale(self, rows, columns, at):
        """Index into the stored scales of entry `at` of what `scales` gives for a rectangle."""
        (first, second), flipped = self.scale_index(rows, columns)
        i, j = at[::-1] if flipped else at
        return int(first.start + i), int(second.start + j)

    def expand(self, runs, shape):
        """Repeat an array over runs to the elements of a tile of `shape`."""
        if self.run is None:
            return runs
        return repeat(runs, self.run, shape)

    def count_blocks(self, marked, covered):
        """How many blocks of a tile hold a marked entry; an entry covers `covered` (rows, columns) elements."""
        row, column = np.nonzero(marked)
        block_row, block_column = (
            at * size // edge for at, size, edge in zip((row, column), covered, self.block, strict=True)
        )
        return np.unique(block_row * marked.shape[1] + block_column).size

    def blocks_to_runs(self, blocks, shape):
        """Repeat an array over blocks to the runs of a tile of `shape`."""
        factors = (self.block[0] // self.run[0], self.block[1] // self.run[1])
        runs = (ceil_div(shape[0], self.run[0]), ceil_div(shape[1], self.run[1]))
        return blocks if factors == (1, 1) else repeat(blocks, factors, runs)


def repeat(values, factors, shape):
    for axis, factor in enumerate(factors):
        if factor > 1:
            values = np.repeat(values, factor, axis=axis)
    return values[: shape[0], : shape[1]]


def agree_within_blocks(written, right, geometry):
    """Which stored scales equal the least right one of their block: 2-D blocks store one scale several times."""
    factors = (geometry.block[0] // geometry.run[0], geometry.block[1] // geometry.run[1])
    least = np.where(right, written, np.iinfo(written.dtype).max)
    for axis, factor in enumerate(factors):
        least = np.minimum.reduceat(least, np.arange(0, least.shape[axis], factor), axis=axis)
    return written == repeat(least, factors, written.shape)


class DumpArrays:
    """The arrays of a dump under the names of a Quantized, any of them missing; with the same 2-D views."""

    def __init__(self, arrays, case):
        m, k = int(np.prod(case.result_shape[:-1], dtype=np.int64)), case.result_shape[-1]
        for name in case.slots:
            setattr(self, name, arrays.get(name))
        row, column = self.rowwise_data, self.columnwise_data
        self.row_matrix = None if row is None else row.reshape(m, row.shape[-1])
        if column is None or isinstance(case.scaling, NVFP4Scaling):
            self.column_matrix = column
        else:
            self.column_matrix = column.reshape((m, k) if isinstance(case.scaling, MXFP8Scaling) else (k, m))


def stored_index(element, shape, first_is_outer=False):
    """Index into an array of `shape` of an entry of its matrix view."""
    if len(shape) == 2:
        return tuple(int(i) for i in element)
    if first_is_outer:  # (K, *leading)
        return (int(element[0]), *(int(i) for i in np.unravel_index(element[1], shape[1:])))
    return (*(int(i) for i in np.unravel_index(element[0], shape[:-1])), int(element[1]))
