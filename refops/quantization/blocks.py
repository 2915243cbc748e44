"""Tiles cut into blocks that share one scale: scaling and casting them, and choosing between two scales of each."""

import numpy as np

from refops.quantization.layout import block_amax, block_view, ceil_div, pad_to_blocks
from refops.tiles import sum_in_order


def blocks_of(elements, block_size):
    """The slice of blocks that a slice of elements covers; the last block may be partial."""
    return slice(elements.start // block_size, ceil_div(elements.stop, block_size))


def quantize_blocks(tile, block_rows, block_columns, encode, scale_of, bits=None):
    """Scale and cast each block of a tile; missing elements of a block at the edge count as 0.

    Args:
        tile: float32 (R, C).
        block_rows, block_columns: a block's edges.
        encode: function of scaled elements and their random bytes (or None) to codes.
        scale_of: function of the blocks' amax, float32 (row blocks, column blocks), to what is stored for each block
            and what its elements are multiplied with, both of that shape.
        bits: uint8 (R, C) random bytes, or None.

    Returns:
        (codes, stored): uint8 (R, C), and what `scale_of` gave to store.
    """
    block_rows = min(block_rows, len(tile))  # fewer rows than a block: one short block, not padding
    blocks = _blocks(tile, block_rows, block_columns)
    to_store, multiplier = scale_of(block_amax(blocks))
    bits = None if bits is None else _blocks(bits, block_rows, block_columns)
    codes = encode(blocks * multiplier[:, None, :, None], bits)
    return _elements(codes, tile.shape), to_store


def choose_blocks(tile, block_rows, block_columns, encode, rules, error, values, amax):
    """`quantize_blocks` with several scales of each block, of which the one that errs least is kept (ties: the first).

    Args:
        rules: as `scale_of`, one for each scale.
        error: `refops.scalings.declaration.Choice.error`.
        values: (values of the element codes, values of the scale codes).
        amax: the tensor's amax or its rows', of a shape that meets the blocks.
    """
    block_rows = min(block_rows, len(tile))
    blocks = _blocks(tile, block_rows, block_columns)
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


def _blocks(values, block_rows, block_columns):
    return block_view(pad_to_blocks(values, block_rows, block_columns), block_rows, block_columns)


def _elements(codes, shape):
    """Codes of a `block_view` as those of the (R, C) tile that it was cut from."""
    padded = codes.shape[0] * codes.shape[1], codes.shape[2] * codes.shape[3]
    return codes.reshape(padded)[: shape[0], : shape[1]]
