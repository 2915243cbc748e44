"""`Quantized`: what every quantizing operation returns."""

from dataclasses import dataclass, replace

import numpy as np

from refops.quantization.layout import swizzle, unswizzle
from refops.scaling import BlockScaling, MXFP8Scaling, NVFP4Scaling, Scaling


@dataclass(frozen=True, eq=False)
class Quantized:
    """A quantized tensor with TE's attribute names and layouts.

    M x K is the tensor with leading dimensions flattened; block counts round up; upN rounds up to a multiple of N.

    | scaling          | rowwise_data    | rowwise_scale_inv           | columnwise_data | columnwise_scale_inv  |
    |------------------|-----------------|-----------------------------|-----------------|-----------------------|
    | delayed, current | x.shape         | float32 (1,)                | (K, *leading)   | (1,)                  |
    | block 1x128      | x.shape         | float32 (K/128, up4(M))     | (K, *leading)   | (M/128, up4(K))       |
    | block 128x128    | x.shape         | float32 (M/128, up4(K/128)) | (K, *leading)   | (K/128, up4(M/128))   |
    | MXFP8            | x.shape         | E8M0 (up128(M), up4(K/32))  | x.shape         | (up4(M/32), up128(K)) |
    | NVFP4            | (*leading, K/2) | E4M3 (up128(M), up4(K/16))  | (K, M/2)        | (up128(K), up4(M/16)) |

    Columnwise data are transposed except for MXFP8. NVFP4 data are packed two codes a byte.
    Data are uint8 codes; E8M0 and E4M3 scales are uint8 codes too. Padding is zero.

    Attributes:
        rowwise_data, rowwise_scale_inv: codes and decode scales with blocks along K, or None.
        columnwise_data, columnwise_scale_inv: the same with blocks along M, or None.
        amax_rowwise, amax_columnwise: float32 amax that the scales came from, (1,), or (M,) and (K,) for row-scaled
            NVFP4. None where TE keeps none (block scaling, MXFP8) and for a direction that was not made.
        scaling: the settings used.
        shape: shape of the unquantized tensor.
        dtype: nominal dtype, that of the unquantized tensor.
        with_gemm_swizzled_scales: whether the scales are in GEMM order.
    """

    rowwise_data: np.ndarray | None
    rowwise_scale_inv: np.ndarray | None
    columnwise_data: np.ndarray | None
    columnwise_scale_inv: np.ndarray | None
    amax_rowwise: np.ndarray | None
    amax_columnwise: np.ndarray | None
    scaling: Scaling
    shape: tuple[int, ...]
    dtype: np.dtype
    with_gemm_swizzled_scales: bool = False

    def __repr__(self):
        directions = [d for d in ("rowwise", "columnwise") if getattr(self, f"{d}_data") is not None]
        swizzled = ", swizzled scales" if self.with_gemm_swizzled_scales else ""
        return f"Quantized(shape={self.shape}, dtype={self.dtype}, {' + '.join(directions)}{swizzled}, {self.scaling})"

    @property
    def matrix_shape(self):
        """(M, K): the shape with leading dimensions flattened."""
        return int(np.prod(self.shape[:-1], dtype=np.int64)), self.shape[-1]

    def swizzled(self):
        """Return the same tensor with its scales in the order that GEMMs read (`refops.swizzle`).

        Shapes stay, bytes move. MXFP8's columnwise scales, stored [block, column], are swizzled along their transpose:
        a GEMM's outer dimension is the column there. Per-tensor scales have no order: the tensor itself comes back.
        Raises ValueError for block scaling, whose GEMM scales are another format (`refops.block_scales_as_mxfp8`).
        """
        return self._reorder_scales(swizzle, True)

    def unswizzled(self):
        """Undo `swizzled`."""
        return self._reorder_scales(unswizzle, False)

    def _reorder_scales(self, reorder, target):
        if isinstance(self.scaling, BlockScaling):
            raise ValueError(
                "block scaling stores float32 scales in GEMM order already; "
                "use refops.block_scales_as_mxfp8 for the E8M0 scales of Blackwell GEMMs"
            )
        if not isinstance(self.scaling, MXFP8Scaling | NVFP4Scaling) or self.with_gemm_swizzled_scales == target:
            return self
        rowwise, columnwise = self.rowwise_scale_inv, self.columnwise_scale_inv
        if rowwise is not None:
            rowwise = reorder(rowwise)
        if columnwise is not None and isinstance(self.scaling, NVFP4Scaling):
            columnwise = reorder(columnwise)
        elif columnwise is not None:  # MXFP8 stores [block, column]; a GEMM's outer dimension is the column
            columnwise = _reorder_transposed(reorder, columnwise, target)
        return replace(
            self, rowwise_scale_inv=rowwise, columnwise_scale_inv=columnwise, with_gemm_swizzled_scales=target
        )


def _reorder_transposed(reorder, scales, to_swizzled):
    """Reorder (blocks, columns) scales along their transpose, keeping the stored shape."""
    blocks, columns = scales.shape
    if to_swizzled:
        return reorder(np.ascontiguousarray(scales.T)).reshape(blocks, columns)
    return np.ascontiguousarray(reorder(scales.reshape(columns, blocks)).T)
