"""How codes and scales are stored: padding to what GEMMs read, block views, and the swizzled scale order.

Padding holds zeros. (TE leaves it uninitialised: compare the valid part only.)
"""

import numpy as np

from refops.arguments import as_array
from refops.formats import unpack_fp4
from refops.hints import Array, ArrayLike
from refops.scalings.declaration import SCALE_TILE
from refops.tiles import ceil_div as ceil_div
from refops.tiles import round_up as round_up


def blocks_of(elements, block_size):
    """The slice of blocks that a slice of elements covers; the last block may be partial."""
    return slice(elements.start // block_size, ceil_div(elements.stop, block_size))


def codes_of_tile(layout, matrix, rows, columns, columnwise):
    """uint8 codes (R, C) of a rectangle of stored data (a 2-D view), one per byte, in the orientation of the tensor."""
    transposed, per_byte = layout.data_transposed(columnwise), layout.packed
    outer, inner = (columns, rows) if transposed else (rows, columns)
    if per_byte == 1:
        codes = matrix[outer, inner]
    else:
        codes = unpack_fp4(matrix[outer, blocks_of(inner, per_byte)])
        codes = codes[:, inner.start % per_byte :][:, : inner.stop - inner.start]
    return codes.T if transposed else codes


def pad_to_blocks(values, block_rows, block_columns):
    """Return (R, C) `values` with zeros added so that blocks are whole; the array itself if they are."""
    rows, columns = values.shape
    padded_rows, padded_columns = round_up(rows, block_rows), round_up(columns, block_columns)
    if (padded_rows, padded_columns) == (rows, columns):
        return values
    padded = np.zeros((padded_rows, padded_columns), values.dtype)
    padded[:rows, :columns] = values
    return padded


def block_view(values, block_rows, block_columns):
    """View (R, C) as (R / block_rows, block_rows, C / block_columns, block_columns)."""
    rows, columns = values.shape
    return values.reshape(rows // block_rows, block_rows, columns // block_columns, block_columns)


def padded_blocks(values, block_rows, block_columns):
    """`block_view` of (R, C) values whose blocks may be partial: missing elements count as 0."""
    return block_view(pad_to_blocks(values, block_rows, block_columns), block_rows, block_columns)


def block_amax(blocks):
    """max |x| of each block of a `block_view`, NaN ignored: float32 (R / block_rows, C / block_columns)."""
    magnitude = np.abs(blocks)
    by_column = np.fmax.reduce(magnitude, axis=1) if magnitude.shape[1] > 1 else magnitude[:, 0]
    # Halving with strided views is several times faster in NumPy than reducing a short last axis.
    while by_column.shape[-1] > 1:
        by_column = np.fmax(by_column[..., 0::2], by_column[..., 1::2])
    return np.fmax(by_column[..., 0], np.float32(0))


def swizzled_offset(row, column, tiles):
    """The flat position at which `swizzle` puts (row, column) of scales with `tiles` tiles of 128 x 4 in a row of them.

    Source: cuBLAS "1D block scaling factors layout"; TE `common/cast/mxfp8/swizzle.cuh`.
    """
    rows, columns = SCALE_TILE
    quarter = rows // 4
    tile = row // rows * tiles + column // columns
    return tile * rows * columns + row % quarter * 4 * columns + row % rows // quarter * columns + column % columns


def swizzle(scales: ArrayLike) -> Array:
    """Reorder padded (R, C) scales into the order that tensor-core GEMMs read: 512-byte tiles of 128 x 4.

    Element (i, j) moves to the flat position (cuBLAS "1D block scaling factors layout"; TE
    `common/cast/mxfp8/swizzle.cuh`)

        ((i // 128) * (C / 4) + j // 4) * 512 + (i % 32) * 16 + ((i % 128) // 32) * 4 + j % 4

    Args:
        scales: (R, C) array with R % 128 == 0 and C % 4 == 0; i runs over the outer dimension, j over blocks. MXFP8's
            columnwise scales are stored [block, column]: pass their transpose, or use `Quantized.swizzled`.

    Returns:
        An array of the same shape in swizzled order.

    Raises:
        ValueError: shape not 2-D or not padded.
    """
    scales = _require_padded(scales)
    rows, columns = scales.shape
    tiles = scales.reshape(rows // 128, 4, 32, columns // 4, 4)
    return np.ascontiguousarray(tiles.transpose(0, 3, 2, 1, 4)).reshape(rows, columns)


def unswizzle(scales: ArrayLike) -> Array:
    """Undo `swizzle`."""
    scales = _require_padded(scales)
    rows, columns = scales.shape
    tiles = scales.reshape(rows // 128, columns // 4, 32, 4, 4)
    return np.ascontiguousarray(tiles.transpose(0, 3, 2, 1, 4)).reshape(rows, columns)


def _require_padded(scales: ArrayLike) -> Array:
    scales = as_array(scales, "scales")
    if scales.ndim != 2 or scales.shape[0] % SCALE_TILE[0] or scales.shape[1] % SCALE_TILE[1]:
        raise ValueError(f"scales must be 2-D with rows % 128 == 0 and columns % 4 == 0; got shape {scales.shape}")
    return scales


def one_order(scaling):
    """What an error says about scales that have no GEMM order of their own."""
    if scaling.layout.scale_format is not None:
        return f"{scaling.layout.scale_format!r} scales of {type(scaling).__name__} have one order, that of their array"
    return (
        "block scaling stores float32 scales in GEMM order already; "
        "use refops.block_scales_as_mxfp8 for the E8M0 scales of Blackwell GEMMs"
    )
