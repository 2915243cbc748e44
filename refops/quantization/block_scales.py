"""Float32 block scales as Blackwell's GEMMs read them. Source: TE `common/swizzle/swizzle_block_scaling.cu`."""

import numpy as np

from refops.arguments import shown
from refops.formats import E8M0, encode
from refops.hints import Array
from refops.quantization.layout import pad_to_blocks, swizzle
from refops.quantization.result import Quantized
from refops.scalings.declaration import SCALE_TILE

#: Elements of an E8M0 scale.
MX_BLOCK = 32


def block_scales_as_mxfp8(q: Quantized) -> tuple[Array | None, Array | None]:
    """Return a block-scaled tensor's scales as the swizzled E8M0 scales that Blackwell's GEMM emulation reads.

    Each power of two becomes its exponent byte, repeated for the 32-element blocks (four in 128 elements, two in
    64; in 128x128 also the 128 rows) that it covers, padded and swizzled as MXFP8 scales are.

    Returns:
        (rowwise, columnwise): uint8 (up128(M), 4 ceil(K/128)) and uint8 (up128(K), 4 ceil(M/128)), or None for a
        direction that `q` lacks.

    Raises:
        TypeError: `q` has no float32 scales of blocks. ValueError: they are not powers of two, or of blocks that are no
            multiple of 32.
    """
    block = q.scaling.layout.block if isinstance(q, Quantized) and q.scaling.layout.scale_format is None else None
    if block is None:
        raise TypeError(f"q must be a Quantized with float32 scales of blocks, as BlockScaling's; got {shown(q)}")
    if not q.scaling.power_2_scale:
        raise ValueError(f"q must have power_2_scale=True: E8M0 holds powers of two; got {q.scaling}")
    if block[1] % MX_BLOCK:
        raise ValueError(f"q must have blocks of a multiple of {MX_BLOCK}, which E8M0 scales serve; got {block[1]}")
    rowwise = None if q.rowwise_data is None else _swizzled_bytes(q, False)
    return rowwise, None if q.columnwise_data is None else _swizzled_bytes(q, True)


def _swizzled_bytes(q, columnwise):
    layout = q.scaling.layout
    stored = layout.scales_by_outer(q.columnwise_scale_inv if columnwise else q.rowwise_scale_inv, columnwise)
    outer, blocks = layout.scale_counts(q.matrix_shape, columnwise)
    exponents = encode(np.ascontiguousarray(stored[:outer, :blocks]), E8M0)
    rows = np.repeat(exponents, layout.run[0], axis=0)[: layout.oriented(q.matrix_shape, columnwise)[0]]
    return swizzle(pad_to_blocks(np.repeat(rows, layout.run[1] // MX_BLOCK, axis=1), *SCALE_TILE))
