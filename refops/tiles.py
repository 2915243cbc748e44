"""Work in tiles: how one rectangle of a tensor is computed, and how the rectangles are walked.

A `Source` is the front half of an operation: it computes any rectangle of a (M, K) matrix in float32 (the input
itself, an activation, a gradient). The quantizers are the back half. Only tiles live in memory besides inputs and
outputs, so extra memory does not grow with the tensor. Every number depends on its own block alone, so no choice of
tiles changes a bit; sums, which could, are defined over fixed chunks (`column_sum`, `row_sum`).
"""

import math
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from refops.arguments import require_high_precision_dtype
from refops.rounding import stored

#: Edges of tiles are multiples of this. So blocks are whole in a tile: `Layout` takes none that does not divide it.
ALIGNMENT = 128
#: Rows that a partial column sum covers, as in TE's kernels; also the columns of a partial row sum.
SUM_CHUNK = 128
_tile_elements = 1 << 17
_SMALLEST, _ONE = np.float32(2.0**-149), np.float32(1)


def ceil_div(n, d):
    """Smallest integer >= n / d."""
    return -(-n // d)


def round_up(n, multiple):
    """Smallest multiple of `multiple` that is >= n."""
    return ceil_div(n, multiple) * multiple


@contextmanager
def tile_elements(count):
    """Use tiles of about `count` elements inside a `with` block (the least is one 128 x 128 tile)."""
    global _tile_elements
    previous, _tile_elements = _tile_elements, count
    try:
        yield
    finally:
        _tile_elements = previous


class Matrix:
    """A tensor seen as (M, K), M the product of all leading dimensions; never copied as a whole.

    Attributes:
        shape: (M, K).
        dtype: dtype of the tensor.
    """

    def __init__(self, tensor):
        self.tensor = tensor
        columns = tensor.shape[-1]
        self.shape = (math.prod(tensor.shape[:-1]), columns)
        self.dtype = tensor.dtype
        try:
            self._flat = np.reshape(tensor, self.shape, copy=False)
        except ValueError:  # strides that no 2-D view has
            self._flat = None

    def read(self, rows, columns):
        """The rectangle (two slices, or a slice and an index array) as a new float32 array, NaNs quiet.

        `np.fmax` passes a signalling NaN on, or not, by its place in the array; any arithmetic makes it a quiet one.
        """
        values = self.raw(rows, columns).astype(np.float32)
        with np.errstate(invalid="ignore"):
            values *= np.float32(1)
        return values

    def raw(self, rows, columns):
        """The rectangle in the tensor's own dtype, possibly a view."""
        if self._flat is not None:
            return self._flat[rows, columns]
        leading = np.unravel_index(np.arange(rows.start, rows.stop), self.tensor.shape[:-1])
        if not isinstance(columns, slice):
            leading = tuple(index[:, None] for index in leading)
        index = (*leading, columns)
        return self.tensor[index]


@dataclass(frozen=True)
class RowLayout:
    """Where the activated half and the gate of output column h lie in a row: alternating runs of `run` columns.

    `run` is H for [act | gate]; `gate_first` swaps the two.
    """

    run: int
    gate_first: bool = False

    def columns(self, h, gate):
        """Columns of the activated values (or gates) of output columns `h`."""
        second = gate != self.gate_first
        return (h // self.run) * (2 * self.run) + h % self.run + second * self.run

    def locate(self, column):
        """Return (is gate, h) of row columns: the inverse of `columns`."""
        second = column // self.run % 2 == 1
        return second != self.gate_first, column // (2 * self.run) * self.run + column % self.run


class Source:
    """The front half of an operation: float32 rectangles of a (M, K) matrix.

    Attributes:
        shape: (M, K) of the result.
        tensor_shape: the result's shape before flattening.
        dtype: the nominal dtype of the result; `rounded` rounds to it.
    """

    def __init__(self, tensor_shape, matrix_shape, dtype):
        self.tensor_shape, self.shape, self.dtype = tensor_shape, matrix_shape, dtype

    def read(self, rows, columns):
        """Unrounded float32 values of a rectangle, an array of its own."""
        raise NotImplementedError

    def rounded(self):
        """The same source with every value rounded to `dtype` (as if stored and read back)."""
        return RoundedSource(self)


class RoundedSource(Source):
    """A source whose values passed through the nominal dtype."""

    def __init__(self, source):
        super().__init__(source.tensor_shape, source.shape, source.dtype)
        self._source = source

    def read(self, rows, columns):
        values = self._source.read(rows, columns)
        if self.dtype == np.float32:
            return values
        return values.astype(self.dtype).astype(np.float32)


class InputSource(Source):
    """A given tensor."""

    def __init__(self, tensor):
        self._matrix = Matrix(tensor)
        super().__init__(tensor.shape, self._matrix.shape, tensor.dtype)

    def read(self, rows, columns):
        return self._matrix.read(rows, columns)

    def rounded(self):
        return self


def tile_slices(shape):
    """Return the (rows, columns) slices of the tiles that cover a (M, K) matrix, edges aligned to `ALIGNMENT`."""
    m, k = shape
    width = min(_tile_width(m), max(ALIGNMENT, round_up(k, ALIGNMENT)))
    height = max(ALIGNMENT, _tile_elements // width // ALIGNMENT * ALIGNMENT)
    return [(rows, columns) for rows in cut(m, height) for columns in cut(k, width)]


def for_each(items, work):
    """Return `work(*item)` for every item, in order and in one thread: `cuda_kernels` is the fast one."""
    require_subnormals()
    with np.errstate(all="ignore"):  # inf and NaN are ordinary inputs here
        return [work(*item) for item in items]


def require_subnormals():
    """Raise RuntimeError if this thread flushes float32 subnormals to zero."""
    if _SMALLEST * _ONE == 0:
        raise RuntimeError(
            "float32 subnormals are flushed to zero in this thread (torch.set_flush_denormal(True), or a library "
            "built with -ffast-math); results would not be exact: turn that off"
        )


def row_slices(shape):
    """Slices of rows whose `column_chunks` make tiles of the usual size."""
    return cut(shape[0], max(ALIGNMENT, _tile_elements // SUM_CHUNK))


def column_chunks(length):
    """Slices of `SUM_CHUNK` columns: the fixed chunks of `row_sum`."""
    return cut(length, SUM_CHUNK)


def row_sum(values):
    """Sum of each row of at most `SUM_CHUNK` columns, from left to right in float32."""
    return sum_in_order(values.T)


def materialize(source, dtype=None):
    """Return the whole result as a tensor of `dtype` (default the source's nominal dtype), rounded once.

    Raises:
        TypeError: dtype is not float32, float16 or bfloat16.
    """
    dtype = source.dtype if dtype is None else require_high_precision_dtype(dtype, "out_dtype")
    out = np.empty(source.shape, dtype)

    def work(rows, columns):
        out[rows, columns] = stored(source.read(rows, columns), dtype)

    for_each(tile_slices(source.shape), work)
    return out.reshape(source.tensor_shape)


def tensor_amax(source):
    """Largest magnitude, float32 (1,); NaN is ignored, an empty tensor gives 0."""
    maxima = for_each(tile_slices(source.shape), lambda rows, columns: magnitude_max(source.read(rows, columns)))
    return np.fmax.reduce(np.array(maxima, np.float32), initial=np.float32(0)).reshape(1)


def row_amax(source):
    """Largest magnitude of each row, float32 (M,)."""
    m, k = source.shape
    out = np.zeros(m, np.float32)

    def work(rows):
        for columns in cut(k, _tile_width(m)):
            tile = magnitude_max(source.read(rows, columns), axis=1)
            out[rows] = np.fmax(out[rows], tile)

    for_each([(rows,) for rows in cut(m, ALIGNMENT)], work)
    return out


def column_amax(source):
    """Largest magnitude of each column, float32 (K,)."""
    m, k = source.shape
    out = np.zeros(k, np.float32)

    def work(columns):
        for rows in cut(m, ALIGNMENT):
            tile = magnitude_max(source.read(rows, columns), axis=0)
            out[columns] = np.fmax(out[columns], tile)

    for_each([(columns,) for columns in cut(k, _tile_width(m))], work)
    return out


def column_sum(source):
    """Sum of each column, float32 (K,), in the order of TE's bias-gradient kernels.

    Rows are added one after the other within a chunk of 128 rows, the chunks' sums one after the other from the first
    (`common/cast/core/grouped_layout.cuh`). Any other order is as good; this one is fixed so that the result is.
    """
    m, k = source.shape
    total = np.zeros(k, np.float32)

    def work(columns):
        for start in range(0, m, SUM_CHUNK):
            values = source.read(slice(start, min(start + SUM_CHUNK, m)), columns)
            total[columns] += sum_in_order(values)

    for_each([(columns,) for columns in cut(k, _tile_width(m))], work)
    return total


def sum_in_order(terms):
    """Sum float32 `terms` along axis 0, one after the other from zero (NumPy's own sum picks an order by layout)."""
    total = np.zeros(terms.shape[1:], np.float32)
    for term in terms:
        total += term
    return total


def magnitude_max(values, axis=None):
    """max |values| along `axis` that ignores NaN (as `fmaxf` does); 0 where nothing is left."""
    return np.fmax.reduce(np.abs(values), axis=axis, initial=np.float32(0))


def cut(length, width):
    """Slices of `width` that cover `length`; the last may be shorter."""
    return [slice(start, min(start + width, length)) for start in range(0, length, width)]


def _tile_width(m):
    """Columns of a tile that has 128 rows, or all `m` if they are fewer."""
    rows = min(max(m, 1), ALIGNMENT)
    return max(ALIGNMENT, _tile_elements // rows // ALIGNMENT * ALIGNMENT)
