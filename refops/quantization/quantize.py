"""Quantization: walk a `Source` in tiles, scale and cast each block as its scaling declares, fill a `Quantized`.

No scaling is known by name here: layout, rules and hooks are read from the declaration (`refops.scalings`).
"""

import numpy as np

from refops.formats import encode_tile, pack_fp4
from refops.quantization.hadamard import HadamardSource
from refops.quantization.layout import block_amax, blocks_of, padded_blocks
from refops.quantization.result import Quantized
from refops.rounding import PHILOX_BYTES, STOCHASTIC, philox_bytes
from refops.scalings.arithmetic import REFERENCE
from refops.tiles import (
    ceil_div,
    column_amax,
    for_each,
    magnitude_max,
    row_amax,
    sum_in_order,
    tensor_amax,
    tile_slices,
)

ZERO = np.float32(0)


def quantize_source(values, amax_values, scaling, rowwise, columnwise):
    """Quantize the source `values` under `scaling`; blocks at the edge may be partial.

    Args:
        values: source of what is cast; block amaxes come from it.
        amax_values: source of the amax of the tensor (or of its rows) that its scale comes from. Not read where the
            scale is given: the amax is for later steps then, and that of `values`, as TE's kernels take it.
        scaling: a declared scaling.
        rowwise, columnwise: which copies to make.

    Raises:
        ValueError: a shape that the scaling does not take, random bits of the wrong shape, no columnwise copy.
    """
    check_shape(scaling, values.tensor_shape, values.shape, columnwise)
    given_bits(scaling, values.shape, rowwise, columnwise)  # raises unless the copies can read them
    q = Quantized.allocate(values, scaling, rowwise, columnwise)
    column_values = values if scaling.hadamard is None else HadamardSource(values, scaling.hadamard)
    if scaling.given is None:
        _fill_amax(q, amax_values, column_values)
    copies = [Copy(q, c) for c, made in ((False, rowwise), (True, columnwise)) if made]
    one_cast = scaling.copies_share_codes

    def work(rows, columns):
        tile, done = values.read(rows, columns), None
        for copy in copies:
            if done is None or not one_cast:
                own = copy.columnwise and scaling.hadamard is not None
                done = copy.cast(column_values.read(rows, columns) if own else tile, rows, columns)
            copy.store(*done, rows, columns)
        return ZERO if scaling.given is None else magnitude_max(tile)

    maxima = for_each(tile_slices(values.shape), work)
    for copy in copies:
        if scaling.given is not None:  # the amax is for later steps, and needs no pass of its own
            copy.amax[:] = np.fmax.reduce(np.array(maxima, np.float32), initial=ZERO)
        copy.finish()
    return q


def check_shape(scaling, tensor_shape, shape, columnwise):
    """Raise ValueError unless a tensor of (M, K) `shape` can be quantized under `scaling`."""
    layout, (m, k) = scaling.layout, shape
    multiple = layout.columnwise_multiple if columnwise else layout.shape_multiple
    if m % multiple or k % multiple:
        copy = f"a columnwise copy in {scaling}" if multiple > layout.shape_multiple else scaling.title
        raise ValueError(
            f"x must have M % {multiple} == 0 and K % {multiple} == 0 for {copy} "
            f"(K the last dimension, M the product of the others); got shape {tensor_shape}, M={m}, K={k}"
        )
    if columnwise and scaling.only_rowwise:
        raise ValueError(f"columnwise must be False with {scaling.only_rowwise}; got columnwise=True")


def _fill_amax(q, amax_values, column_values):
    """Compute the amaxes that `q` has room for: of the tensor or of rows and columns; columnwise after a transform."""
    row, column, scaling = q.amax_rowwise, q.amax_columnwise, q.scaling
    if scaling.layout.amax == "rows":
        if row is not None:
            row[:] = row_amax(amax_values)
        if column is not None:
            column[:] = column_amax(amax_values)
    elif scaling.layout.amax == "tensor":
        shared = tensor_amax(amax_values) if row is not None or scaling.hadamard is None else None
        if row is not None:
            row[:] = shared
        if column is not None:
            column[:] = shared if scaling.hadamard is None else tensor_amax(column_values)


class Copy:
    """One direction's copy while it is made: what its blocks share, and where codes and scales go.

    Attributes:
        columnwise: which direction.
        amax: float32 amaxes of it, or None.
    """

    def __init__(self, q, columnwise):
        scaling, name = q.scaling, "columnwise" if columnwise else "rowwise"
        self.columnwise, self.amax = columnwise, getattr(q, f"amax_{name}")
        self._scaling, self._layout, self._shape = scaling, scaling.layout, q.matrix_shape
        self._data = q.column_matrix if columnwise else q.row_matrix
        self._scales = self._layout.scales_by_outer(getattr(q, f"{name}_scale_inv"), columnwise)
        self._numbers, self._block_scale = scaling.numbers(q.dtype), scaling.block_scale(REFERENCE)
        self._tensor_scale, self._choice = scaling.tensor_scale(REFERENCE), scaling.choice(REFERENCE)
        if self._layout.block is None:  # one scale for all tiles
            with np.errstate(all="ignore"):
                self._stored, multiplier = self._block_scale(self.amax, ZERO, self._numbers)
            self._multiplier = np.ravel(multiplier)[0]

    def cast(self, tile, rows, columns):
        """(codes, stored scales) of a tile, in the tensor's orientation."""
        bits, numbers = self._random_bytes(rows, columns), self._numbers

        def encode(scaled, bits):
            if bits is None:
                return encode_tile(scaled, self._scaling.fmt)
            return encode_tile(scaled, self._scaling.fmt, rounding=STOCHASTIC, random_bits=bits)

        if self._layout.block is None:
            return encode(tile * self._multiplier, bits), self._stored
        amax = amax_of_tile(self._layout, self.amax, rows, columns, self.columnwise)
        tensor_scale = ZERO if self._tensor_scale is None else self._tensor_scale(amax)
        block = self._layout.oriented(self._layout.block, self.columnwise)
        if self._choice is not None:
            rules = [lambda maxima, f=f: f(maxima, tensor_scale, numbers) for f in self._choice.candidates]
            values = self._scaling.fmt.values, self._layout.scale_format.values
            return choose_blocks(tile, *block, encode, rules, self._choice.error, values, amax)
        return quantize_blocks(
            tile, *block, encode, lambda maxima: self._block_scale(maxima, tensor_scale, numbers), bits
        )

    def store(self, codes, scales, rows, columns):
        """Put a tile's codes and scales where the layout wants them."""
        layout, (outer, inner) = self._layout, self._layout.oriented((rows, columns), self.columnwise)
        if layout.data_transposed(self.columnwise):
            self._data[outer, blocks_of(inner, layout.packed)] = packed(codes.T, layout)
        else:
            self._data[rows, blocks_of(columns, layout.packed)] = packed(codes, layout)
        if layout.block is not None:
            scales = scales.T if self.columnwise else scales
            if layout.repeated:
                scales = np.repeat(scales, layout.block[0], axis=0)[: outer.stop - outer.start]
            self._scales[blocks_of(outer, layout.run[0]), blocks_of(inner, layout.run[1])] = scales

    def finish(self):
        """Store the scale of a tensor that is one block, even of an empty one."""
        if self._layout.block is None:
            self._scales[:] = self._stored

    def _random_bytes(self, rows, columns):
        """Random bytes of a tile in the tensor's orientation, or None where nothing is random."""
        if self._scaling.random is None:
            return None
        outer, inner = self._layout.oriented((rows, columns), self.columnwise)
        found = random_bytes(self._scaling.random, outer, inner, self._shape, self.columnwise)
        return found.T if self.columnwise else found


# --- blocks ---------------------------------------------------------------------------------------


def quantize_blocks(tile, block_rows, block_columns, encode, scale_of, bits=None):
    """Scale and cast each block of a tile; missing elements of a block at the edge count as 0.

    Args:
        tile: float32 (R, C).
        block_rows, block_columns: a block's edges.
        encode: function of scaled elements and their random bytes (or None) to codes.
        scale_of: function of the blocks' amax, float32 (row blocks, column blocks), to what is stored for each block
            and what its elements are multiplied by, both of that shape.
        bits: uint8 (R, C) random bytes, or None.

    Returns:
        (codes, stored): uint8 (R, C), and what `scale_of` gave to store.
    """
    block_rows = min(block_rows, len(tile))  # fewer rows than a block: one short block, not padding
    blocks = padded_blocks(tile, block_rows, block_columns)
    to_store, multiplier = scale_of(block_amax(blocks))
    bits = None if bits is None else padded_blocks(bits, block_rows, block_columns)
    codes = encode(blocks * multiplier[:, None, :, None], bits)
    return _elements(codes, tile.shape), to_store


def choose_blocks(tile, block_rows, block_columns, encode, rules, error, values, amax):
    """`quantize_blocks` with several scales for each block; the one with the smallest error is kept (ties: the first).

    Args:
        rules: as `scale_of`, one for each scale.
        error: `refops.scalings.declaration.Choice.error`.
        values: (values of the element codes, values of the scale codes).
        amax: the tensor's amax or its rows', of a shape that meets the blocks.
    """
    block_rows = min(block_rows, len(tile))
    blocks = padded_blocks(tile, block_rows, block_columns)
    maxima, best = block_amax(blocks), None
    for scale_of in rules:
        stored, multiplier = scale_of(maxima)
        codes = encode(blocks * multiplier[:, None, :, None], None)
        scale = values[1][stored][:, None, :, None]
        total = block_error(error(values[0][codes], scale, amax[:, None, :, None], blocks))
        if best is None:
            best = codes, stored, total
            continue
        better = total < best[2]
        by_element = better[:, None, :, None]
        best = np.where(by_element, codes, best[0]), np.where(better, stored, best[1]), np.where(better, total, best[2])
    return _elements(best[0], tile.shape), best[1]


def block_error(errors):
    """Sum the float32 errors of each block of a `block_view` in TE's order.

    Along a line of elements: one after the other. Over the rows of a square: as a tree, row i with i + B/2, then B/4...
    """
    if errors.shape[3] == 1:  # the line runs down the column
        return sum_in_order(np.moveaxis(errors, 1, 0))[..., 0]
    rows = sum_in_order(np.moveaxis(errors, 3, 0))  # (block rows, rows of a block, block columns)
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows[:, 0]


def _elements(codes, shape):
    """Codes of a `block_view` as those of the (R, C) tile that it was cut from."""
    padded = codes.shape[0] * codes.shape[1], codes.shape[2] * codes.shape[3]
    return codes.reshape(padded)[: shape[0], : shape[1]]


# --- codes, amaxes and random bytes of a tile ------------------------------------------------------


def packed(codes, layout):
    """Codes as they are stored: one per byte, or two 4-bit ones."""
    return codes if layout.packed == 1 else pack_fp4(codes)


def amax_of_tile(layout, amax, rows, columns, columnwise):
    """The amaxes of a tile's outer indices in the tensor's orientation, to meet its blocks; of the tensor: (1, 1)."""
    if amax is None:
        return None
    by_outer = amax_by_outer(layout, amax, columns if columnwise else rows)
    return by_outer.T if columnwise else by_outer


def amax_by_outer(layout, amax, outer):
    """The amaxes of outer indices, to meet [outer, block] scales: (outer, 1); of the tensor: (1, 1)."""
    return amax[outer if layout.amax == "rows" else slice(None), None]


def given_bits(scaling, shape, rowwise, columnwise):
    """Return the caller's random bits as (rowwise (M, K), columnwise (K, M)); None where Philox makes them.

    Raises:
        ValueError: one array for both copies, or bits of another shape than a copy that is made.
    """
    random = scaling.random
    if random is None or random.bits is None:
        return None, None
    if rowwise and columnwise and not isinstance(random.bits, tuple):
        raise ValueError("random_bits must be a (rowwise, columnwise) pair for both directions; got one array")
    for columnwise_copy, made in ((False, rowwise), (True, columnwise)):
        bits, wanted = random.of_copy(columnwise_copy), scaling.layout.oriented(shape, columnwise_copy)
        if made and bits.shape != wanted:
            direction = "columnwise" if columnwise_copy else "rowwise"
            raise ValueError(f"random_bits for {direction} output must have shape {wanted}; got {bits.shape}")
    return random.of_copy(False), random.of_copy(True)


def random_bytes(random, outer, inner, shape, columnwise):
    """Random bytes of a rectangle, (outer, inner): the caller's or Philox's.

    Args:
        random: `RandomBits`.
        outer, inner: slices; `inner` starts at a multiple of the 16 that Philox gives at once.
        shape: (M, K) of the tensor.
        columnwise: which copy they are for.
    """
    bits = random.of_copy(columnwise)
    if bits is not None:
        return bits[outer, inner]
    number = philox_groups(outer, inner, shape, columnwise)
    found = philox_bytes(random.seed, random.offset, number.ravel())
    lines, groups = number.shape  # either may be 0
    return found.reshape(lines, groups * PHILOX_BYTES)[:, : inner.stop - inner.start]


def philox_groups(outer, inner, shape, columnwise):
    """Philox subsequence of each 16 elements of a rectangle, (outer, inner / 16); columnwise ones after all rowwise."""
    m, k = shape
    groups = ceil_div(m if columnwise else k, PHILOX_BYTES)
    first = m * ceil_div(k, PHILOX_BYTES) if columnwise else 0
    along = blocks_of(inner, PHILOX_BYTES)
    return first + np.arange(outer.start, outer.stop)[:, None] * groups + np.arange(along.start, along.stop)
