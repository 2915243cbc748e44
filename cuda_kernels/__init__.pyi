"""The types of the calls on a GPU, which `__init__.py` makes from `Interface` while it is imported.

Arrays are those of the caller's library, so they are `Any` here. A test compares this file with the package.
"""

from typing import Any, Literal, overload

from cuda_kernels import host as host
from cuda_kernels.emulator import emulated as emulated
from cuda_kernels.result import Quantized
from refops.formats import ElementFormat, FloatFormat
from refops.hints import DTypeLike, Number
from refops.quantization.delayed import Algorithm
from refops.scalings import Scaling

__all__ = [
    "activation",
    "activation_grad",
    "activation_grad_quantize",
    "activation_quantize",
    "amax",
    "decode",
    "dequantize",
    "emulated",
    "encode",
    "hadamard_transform",
    "host",
    "quantize",
    "scaled_activation",
    "scaled_activation_grad",
    "update_delayed_scale",
]

def activation(
    name: str,
    x: Any,
    *,
    out_dtype: DTypeLike | None = ...,
    arithmetic: str = ...,
    fast_math: bool = ...,
    **params: Number,
) -> Any: ...
@overload
def activation_grad(
    name: str,
    dy: Any,
    x: Any,
    *,
    out_dtype: DTypeLike | None = ...,
    dbias: Literal[False] = ...,
    arithmetic: str = ...,
    fast_math: bool = ...,
    **params: Number,
) -> Any: ...
@overload
def activation_grad(
    name: str,
    dy: Any,
    x: Any,
    *,
    out_dtype: DTypeLike | None = ...,
    dbias: Literal[True],
    arithmetic: str = ...,
    fast_math: bool = ...,
    **params: Number,
) -> tuple[Any, Any]: ...
@overload
def activation_grad(
    name: str,
    dy: Any,
    x: Any,
    *,
    out_dtype: DTypeLike | None = ...,
    dbias: bool,
    arithmetic: str = ...,
    fast_math: bool = ...,
    **params: Number,
) -> Any: ...
@overload
def activation_grad_quantize(
    name: str,
    dy: Any,
    x: Any,
    scaling: Scaling,
    *,
    rowwise: bool = ...,
    columnwise: bool = ...,
    dbias: Literal[False] = ...,
    swizzled_scales: bool = ...,
    arithmetic: str = ...,
    fast_math: bool = ...,
    **params: Number,
) -> Quantized: ...
@overload
def activation_grad_quantize(
    name: str,
    dy: Any,
    x: Any,
    scaling: Scaling,
    *,
    rowwise: bool = ...,
    columnwise: bool = ...,
    dbias: Literal[True],
    swizzled_scales: bool = ...,
    arithmetic: str = ...,
    fast_math: bool = ...,
    **params: Number,
) -> tuple[Quantized, Any]: ...
@overload
def activation_grad_quantize(
    name: str,
    dy: Any,
    x: Any,
    scaling: Scaling,
    *,
    rowwise: bool = ...,
    columnwise: bool = ...,
    dbias: bool,
    swizzled_scales: bool = ...,
    arithmetic: str = ...,
    fast_math: bool = ...,
    **params: Number,
) -> Quantized | tuple[Quantized, Any]: ...
def activation_quantize(
    name: str,
    x: Any,
    scaling: Scaling,
    *,
    rowwise: bool = ...,
    columnwise: bool = ...,
    swizzled_scales: bool = ...,
    arithmetic: str = ...,
    fast_math: bool = ...,
    **params: Number,
) -> Quantized: ...
def amax(x: Any, *, fast_math: bool = ...) -> Any: ...
def decode(codes: Any, fmt: ElementFormat, *, fast_math: bool = ...) -> Any: ...
def dequantize(q: Any, *, dtype: DTypeLike = ..., fast_math: bool = ...) -> Any: ...
def encode(
    x: Any,
    fmt: ElementFormat,
    *,
    saturate: bool = ...,
    rounding: str = ...,
    random_bits: Any = ...,
    fast_math: bool = ...,
) -> Any: ...
def hadamard_transform(x: Any, sign_mask: int = ..., *, inverse: bool = ..., fast_math: bool = ...) -> Any: ...
@overload
def quantize(
    x: Any,
    scaling: Scaling,
    *,
    rowwise: bool = ...,
    columnwise: bool = ...,
    dbias: Literal[False] = ...,
    swizzled_scales: bool = ...,
    fast_math: bool = ...,
) -> Quantized: ...
@overload
def quantize(
    x: Any,
    scaling: Scaling,
    *,
    rowwise: bool = ...,
    columnwise: bool = ...,
    dbias: Literal[True],
    swizzled_scales: bool = ...,
    fast_math: bool = ...,
) -> tuple[Quantized, Any]: ...
@overload
def quantize(
    x: Any,
    scaling: Scaling,
    *,
    rowwise: bool = ...,
    columnwise: bool = ...,
    dbias: bool,
    swizzled_scales: bool = ...,
    fast_math: bool = ...,
) -> Quantized | tuple[Quantized, Any]: ...
def scaled_activation(
    name: str,
    x: Any,
    row_scales: Any,
    *,
    glu_interleave_size: int = ...,
    out_dtype: DTypeLike | None = ...,
    arithmetic: str = ...,
    fast_math: bool = ...,
    **params: Number,
) -> Any: ...
def scaled_activation_grad(
    name: str,
    dy: Any,
    x: Any,
    row_scales: Any,
    *,
    glu_interleave_size: int = ...,
    out_dtype: DTypeLike | None = ...,
    arithmetic: str = ...,
    fast_math: bool = ...,
    **params: Number,
) -> tuple[Any, Any]: ...
def update_delayed_scale(
    amax_history: Any,
    scale: Any,
    fmt: FloatFormat,
    *,
    margin: int = ...,
    algorithm: Algorithm = ...,
    keep_unused: bool = ...,
    fast_math: bool = ...,
) -> tuple[Any, Any]: ...
