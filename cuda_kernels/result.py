"""`Quantized` on a GPU: the result type of `refops` with arrays of the caller's library."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cuda_kernels.arrays import memory_of, numpy_dtype
from refops.quantization import result
from refops.quantization.layout import one_order
from refops.scalings import Scaling

ARRAYS = (
    "rowwise_data",
    "rowwise_scale_inv",
    "columnwise_data",
    "columnwise_scale_inv",
    "amax_rowwise",
    "amax_columnwise",
)


@dataclass(frozen=True, eq=False, kw_only=True)
class Quantized:
    """A quantized tensor with the attributes and layouts of `refops.Quantized`; see its table.

    Attributes:
        rowwise_data ... amax_columnwise: arrays of the caller's library, or None: uint8 codes and scales, float32.
        scaling, shape, dtype, with_gemm_swizzled_scales: dtype is a name; else as in `refops.Quantized`.
    """

    rowwise_data: Any = None
    rowwise_scale_inv: Any = None
    columnwise_data: Any = None
    columnwise_scale_inv: Any = None
    amax_rowwise: Any = None
    amax_columnwise: Any = None
    scaling: Scaling
    shape: tuple[int, ...]
    dtype: str
    with_gemm_swizzled_scales: bool = False

    def __repr__(self):
        made = [d for d in ("rowwise", "columnwise") if getattr(self, f"{d}_data") is not None]
        swizzled = ", swizzled scales" if self.with_gemm_swizzled_scales else ""
        return f"Quantized(shape={self.shape}, dtype={self.dtype}, {' + '.join(made)}{swizzled}, {self.scaling})"

    @property
    def arrays(self) -> dict[str, Any]:
        """name -> array, of those that are there."""
        return {name: getattr(self, name) for name in ARRAYS if getattr(self, name) is not None}

    def with_arrays(self, arrays: dict[str, Any]) -> "Quantized":
        """Return a tensor of the same settings, shape and dtype with other arrays, by the names of `arrays`."""
        made = object.__new__(Quantized)  # every field is there and checked
        vars(made).update(vars(self), **arrays)
        return made

    def swizzled(self) -> "Quantized":
        """Return the same tensor with its scales in the order that GEMMs read; as `refops.Quantized.swizzled`."""
        return self._with_order(True)

    def unswizzled(self) -> "Quantized":
        """Undo `swizzled`."""
        return self._with_order(False)

    def _with_order(self, swizzled):
        order = self.scaling.layout.scale_order
        if order == "fixed":
            raise ValueError(one_order(self.scaling))
        if order == "none" or self.with_gemm_swizzled_scales == swizzled:
            return self
        from cuda_kernels.gpu import reordered_scales

        return replace(self, **reordered_scales(self, swizzled), with_gemm_swizzled_scales=swizzled)

    def to_host(self) -> result.Quantized:
        """Return a copy as `refops.Quantized`, NumPy arrays."""
        host = self.arrays
        first = next(iter(host.values()))
        if not isinstance(first, np.ndarray):
            memory = memory_of(first)
            with memory.scope():
                host = {name: memory.to_numpy(memory.wrap(array, name)) for name, array in host.items()}
        return result.Quantized(
            **host,
            scaling=self.scaling,
            shape=self.shape,
            dtype=numpy_dtype(self.dtype),
            with_gemm_swizzled_scales=self.with_gemm_swizzled_scales,
        )
