"""`Quantized`: what every quantizing operation returns."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from refops.arguments import as_codes_hint, require_flag, require_high_precision_dtype, require_integer, shown
from refops.hints import Array
from refops.quantization.layout import one_order, swizzle, unswizzle
from refops.scalings import Scaling, require_scaling

DIRECTIONS = ("rowwise", "columnwise")


def matrix_shape(shape):
    """Return (M, K) of a tensor of `shape`: leading dimensions flattened; a scalar is one row of one element."""
    *leading, k = shape or (1,)
    return math.prod(leading), k


def stored_layout(scaling, shape):
    """Return field name -> (shape, dtype) of every array that a `Quantized` of a tensor of `shape` can hold.

    Data and scales as in the table of `Quantized`; amax_* only where the scaling keeps one. Of a scalar, data are too.
    """
    return dict(_stored_layout(scaling.layout, tuple(shape)))


@lru_cache(maxsize=1024)
def _stored_layout(layout, shape):
    matrix, arrays = matrix_shape(shape), {}
    for direction in DIRECTIONS:
        columnwise = direction == "columnwise"
        arrays[f"{direction}_data"] = layout.data_shape(shape, columnwise), np.dtype(np.uint8)
        arrays[f"{direction}_scale_inv"] = layout.scale_shape(matrix, columnwise), layout.scale_dtype
        if layout.amax is not None:
            arrays[f"amax_{direction}"] = layout.amax_shape(matrix, columnwise), np.dtype(np.float32)
    return arrays


@dataclass(frozen=True, eq=False, kw_only=True)
class Quantized:
    """A quantized tensor with TE's attribute names, and TE's layout where TE has the scaling.

    M x K is the tensor with leading dimensions flattened; block counts round up; upN rounds up to a multiple of N; B is
    the `block_size` of the settings.

    | scaling                | rowwise_data    | rowwise_scale_inv           | columnwise_data | columnwise_scale_inv  |
    |------------------------|-----------------|-----------------------------|-----------------|-----------------------|
    | delayed, current       | x.shape         | float32 (1,)                | (K, *leading)   | (1,)                  |
    | block 1x128, 1x64      | x.shape         | float32 (K/B, up4(M))       | (K, *leading)   | (M/B, up4(K))         |
    | block 128x128          | x.shape         | float32 (M/B, up4(K/B))     | (K, *leading)   | (K/B, up4(M/B))       |
    | E8M0 block 1x128, 1x64 | x.shape         | E8M0 (M, K/B)               | (K, *leading)   | (K, M/B)              |
    | E8M0 block BxB         | x.shape         | E8M0 (M/B, K/B)             | (K, *leading)   | (K/B, M/B)            |
    | MXFP8                  | x.shape         | E8M0 (up128(M), up4(K/B))   | x.shape         | (up4(M/B), up128(K))  |
    | MXFP4                  | (*leading, K/2) | E8M0 (up128(M), up4(K/B))   | (K, M/2)        | (up128(K), up4(M/B))  |
    | MXINT8                 | x.shape         | E8M0 (M, K/B)               | x.shape         | (M/B, K)              |
    | NVFP4                  | (*leading, K/2) | E4M3 (up128(M), up4(K/B))   | (K, M/2)        | (up128(K), up4(M/B))  |

    Columnwise data are transposed except for MXFP8 and MXINT8. MXFP4 and NVFP4 data are packed two codes per byte.
    NVFP4's scales may be UE5M3 instead. A scaling that is not in this table has the shapes that its `layout` tells.

    Arrays are checked against the layout: a kernel's dump can be put in, `Quantized(rowwise_data=..., ...)`, and
    dequantized. Data and all scales that are not float32 are uint8 codes. Padding is zero.

    Attributes:
        rowwise_data, rowwise_scale_inv: codes and decode scales with blocks along K, or None.
        columnwise_data, columnwise_scale_inv: the same with blocks along M, or None.
        amax_rowwise, amax_columnwise: float32 amax that the scales came from, (1,), or (M,) and (K,) for row-scaled
            NVFP4. None where the scaling keeps none (blocks and microscaling, NVFP4 without `tensor_level`) and for a
            direction that was not made.
        scaling: the settings used.
        shape: shape of the unquantized tensor.
        dtype: nominal dtype, that of the unquantized tensor.
        with_gemm_swizzled_scales: whether the scales are in GEMM order.
    """

    rowwise_data: Array | None = None
    rowwise_scale_inv: Array | None = None
    columnwise_data: Array | None = None
    columnwise_scale_inv: Array | None = None
    amax_rowwise: Array | None = None
    amax_columnwise: Array | None = None
    scaling: Scaling
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    with_gemm_swizzled_scales: bool = False

    def __post_init__(self):
        require_scaling(self.scaling)
        if not isinstance(self.shape, tuple) or not self.shape:
            raise ValueError(f"shape must be a tuple of at least one size; got {shown(self.shape)}")
        for size in self.shape:
            require_integer(size, "shape", low=0, high=1 << 62)
        layout, (m, k) = self.scaling.layout, self.matrix_shape
        multiple = layout.shape_multiple
        if m % multiple or k % multiple:
            raise ValueError(
                f"shape must have M % {multiple} == 0 and K % {multiple} == 0 with {type(self.scaling).__name__} "
                f"(K the last dimension, M the product of the others); got {self.shape}"
            )
        swizzled = require_flag(self.with_gemm_swizzled_scales, "with_gemm_swizzled_scales")
        if swizzled and layout.scale_order == "fixed":
            raise ValueError(
                f"with_gemm_swizzled_scales must be False with {type(self.scaling).__name__}, whose scales have one "
                f"order; got True"
            )
        object.__setattr__(self, "dtype", require_high_precision_dtype(self.dtype, "dtype"))
        for name, (shape, dtype) in stored_layout(self.scaling, self.shape).items():
            array = getattr(self, name)
            if array is None:
                continue
            if not isinstance(array, np.ndarray) or array.shape != shape or array.dtype != dtype:
                is_code = isinstance(array, np.ndarray) and dtype == np.uint8
                hint = as_codes_hint(array.dtype, name) if is_code else ""
                raise ValueError(
                    f"{name} must be {dtype} of shape {shape} for a tensor of shape {self.shape} with {self.scaling}; "
                    f"got {shown(array)}{hint}"
                )
        for direction in DIRECTIONS:
            needed = [f"{direction}_scale_inv"] + [f"amax_{direction}"] * layout.two_level
            missing = [name for name in needed if getattr(self, name) is None]
            if getattr(self, f"{direction}_data") is not None and missing:
                raise ValueError(f"{direction}_data needs {missing[0]} with {self.scaling}; got None")

    @classmethod
    def allocate(cls, source: Any, scaling: Scaling, rowwise: bool, columnwise: bool) -> "Quantized":
        """Return a tensor for the result of `source` with arrays to be filled: data unset, the rest zero."""
        arrays: dict[str, Any] = {}
        for name, (shape, dtype) in stored_layout(scaling, source.tensor_shape).items():
            if columnwise if "columnwise" in name else rowwise:
                arrays[name] = (np.empty if name.endswith("_data") else np.zeros)(shape, dtype)
        return cls(**arrays, scaling=scaling, shape=source.tensor_shape, dtype=source.dtype)

    def __repr__(self):
        directions = [d for d in DIRECTIONS if getattr(self, f"{d}_data") is not None]
        swizzled = ", swizzled scales" if self.with_gemm_swizzled_scales else ""
        return f"Quantized(shape={self.shape}, dtype={self.dtype}, {' + '.join(directions)}{swizzled}, {self.scaling})"

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """(M, K): the shape with leading dimensions flattened."""
        return matrix_shape(self.shape)

    @property
    def row_matrix(self) -> Array | None:
        """`rowwise_data` as a 2-D view, (M, K) or packed (M, K/2); None without it."""
        data = self.rowwise_data
        return None if data is None else data.reshape(self.matrix_shape[0], data.shape[-1])

    @property
    def column_matrix(self) -> Array | None:
        """`columnwise_data` as a 2-D view, (K, M), packed (K, M/2), or (M, K) where it is not transposed; or None."""
        data, layout = self.columnwise_data, self.scaling.layout
        if data is None:
            return None
        outer, inner = self.matrix_shape[:: -1 if layout.columnwise_transposed else 1]
        return data.reshape(outer, inner // layout.packed)

    def swizzled(self) -> "Quantized":
        """Return the same tensor with its scales in the order that GEMMs read (`refops.swizzle`).

        Shapes stay, bytes move. MXFP8's columnwise scales, stored [block, column], are swizzled along their transpose:
        a GEMM's outer dimension is the column there. Per-tensor scales have no order: the tensor itself comes back.
        Raises ValueError for scales that have one order: those of blocks, whose GEMM scales are another format
        (`refops.block_scales_as_mxfp8`), and MXINT8's.
        """
        return self._reorder_scales(True)

    def unswizzled(self) -> "Quantized":
        """Undo `swizzled`."""
        return self._reorder_scales(False)

    def _reorder_scales(self, target):
        layout = self.scaling.layout
        if layout.scale_order == "fixed":
            raise ValueError(one_order(self.scaling))
        if layout.scale_order == "none" or self.with_gemm_swizzled_scales == target:
            return self
        fields: dict[str, Any] = {"with_gemm_swizzled_scales": target}
        for name in (f"{direction}_scale_inv" for direction in DIRECTIONS):
            if getattr(self, name) is not None:
                fields[name] = reorder_scales(layout, name, getattr(self, name), target)
        return replace(self, **fields)


def reorder_scales(layout, name, scales, to_swizzled):
    """The scales `name` of a `Quantized` in the order that GEMMs read, or from it in plain order; the shape stays.

    A GEMM's outer dimension comes first, whatever is stored first.
    """
    reorder = swizzle if to_swizzled else unswizzle
    if layout.scales_inner_first[name.startswith("columnwise")]:
        return reorder_transposed(reorder, scales, to_swizzled)
    return reorder(scales)


def reorder_transposed(reorder, scales, to_swizzled):
    """Reorder (blocks, columns) scales along their transpose, keeping the stored shape."""
    blocks, columns = scales.shape
    if to_swizzled:
        return reorder(np.ascontiguousarray(scales.T)).reshape(blocks, columns)
    return np.ascontiguousarray(reorder(scales.reshape(columns, blocks)).T)
