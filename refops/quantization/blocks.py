"""Tiles cut into blocks that share one scale: what FP8 block scaling and MXFP8 have in common."""

from refops.formats import encode_tile
from refops.quantization.layout import block_amax, block_view, ceil_div, pad_to_blocks


def blocks_of(elements, block_size):
    """The slice of blocks that a slice of elements covers; the last block may be partial."""
    return slice(elements.start // block_size, ceil_div(elements.stop, block_size))


def quantize_blocks(tile, block_rows, block_columns, fmt, scale_of):
    """Scale and cast each block of a tile; missing elements of a block at the edge count as 0.

    Args:
        tile: float32 (R, C).
        block_rows, block_columns: a block's edges.
        fmt: the element format.
        scale_of: function of the blocks' amax, float32 (row blocks, column blocks), to what is stored for each block
            and what its elements are multiplied with, both of that shape.

    Returns:
        (codes, stored): uint8 (R, C), and what `scale_of` gave to store.
    """
    block_rows = min(block_rows, len(tile))  # fewer rows than a block: one short block, not padding
    blocks = block_view(pad_to_blocks(tile, block_rows, block_columns), block_rows, block_columns)
    to_store, multiplier = scale_of(block_amax(blocks))
    codes = encode_tile(blocks * multiplier[:, None, :, None], fmt)
    padded_shape = (codes.shape[0] * block_rows, codes.shape[2] * block_columns)
    return codes.reshape(padded_shape)[: tile.shape[0], : tile.shape[1]], to_store
