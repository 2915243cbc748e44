"""TE's reference quantizers, by its names and arguments, with the results of `refops`, whatever backend is in force.

They are custom quantizers: operations hand them tensors in high precision, and no fused kernel takes their place. What
they make holds the same bits as the quantizers of `fuser.quantization`, also where TE's own references differ from its
kernels (an exact -0.0, NaN and infinities); scales and codes are shown as TE's references show them, without padding.

Behaviour: TE's custom_recipes/reference_nvfp4.py, reference_current_scaling.py and reference_utils.py, without `qgemm`:
products dequantize (`fuser.gemm`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Any

import torch

import refops
from fuser import dispatch
from fuser import recipe as recipes
from fuser.custom_recipes.quantizer_factories import tensor_of, tensor_of_linear
from fuser.dtypes import HIGH_PRECISION as HIGH_PRECISION_FLOAT_DTYPES
from fuser.dtypes import DType, require_torch_tensor, torch_dtype
from fuser.quantization import (
    Float8CurrentScalingQuantizer,
    Float8Tensor,
    Float8TensorStorage,
    NVFP4Quantizer,
    NVFP4Tensor,
    NVFP4TensorStorage,
    Quantizer,
    QuantizerRole,
)
from fuser.quantization.quantizer import ValueQuantizer
from fuser.quantization.storage import BufferStorage, buffer_property
from refops.arguments import require_flag, require_integer, shown
from refops.quantization.result import matrix_shape

__all__ = [
    "HIGH_PRECISION_FLOAT_DTYPES",
    "CurrentScalingQuantizerRef",
    "CurrentScalingTensorRef",
    "Fp4Formats",
    "NVFP4QuantizerRef",
    "NVFP4TensorRef",
    "cast_from_fp4x2",
    "cast_to_fp4x2",
    "current_scaling_ref_factory",
    "get_wgrad_sign_vector",
    "nvfp4_ref_rht_2d_factory",
    "roundup_div",
]


class Fp4Formats(enum.Enum):
    """4-bit formats."""

    E2M1 = "e2m1"


def roundup_div(x: int, y: int) -> int:
    """The quotient of an integer >= 0 and a positive one (else `TypeError`, `ValueError`), rounded up."""
    x, y = require_integer(x, "x", low=0, high=2**63), require_integer(y, "y", low=1, high=2**63)
    return -(-x // y)


def cast_to_fp4x2(x: torch.Tensor) -> torch.Tensor:
    """(M, K) values as E2M1, two codes per byte: uint8 (M, K/2). Saturates; ties to even.

    Raises:
        TypeError: `x` is not float32, float16 or bfloat16. ValueError: an odd K.
    """
    require_torch_tensor(x, "x")
    if x.dtype not in HIGH_PRECISION_FLOAT_DTYPES or x.is_meta:
        raise TypeError(f"x must be float32, float16 or bfloat16, with data; got {x.dtype} on {x.device}")
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(f"x must have an even number of columns; got shape {tuple(x.shape)}")
    codes = refops.encode(x.detach().float().cpu().numpy(), refops.E2M1)
    return torch.from_numpy(refops.pack_fp4(codes)).to(x.device)


def cast_from_fp4x2(x: torch.Tensor, dq_dtype: torch.dtype) -> torch.Tensor:
    """Undo `cast_to_fp4x2`: uint8 (M, K/2) to (M, K) values of `dq_dtype`. `TypeError`: other codes, or no dtype."""
    require_torch_tensor(x, "x")
    if x.dtype is not torch.uint8 or x.dim() == 0 or x.is_meta:
        raise TypeError(f"x must be uint8, two codes per byte; got {x.dtype} of shape {tuple(x.shape)}")
    dq_dtype = torch_dtype(dq_dtype, "dq_dtype")
    values = refops.decode(refops.unpack_fp4(x.cpu().numpy()), refops.E2M1)
    return torch.from_numpy(values).to(device=x.device, dtype=dq_dtype)


def get_wgrad_sign_vector() -> torch.Tensor:
    """The 16 signs of the Hadamard transform, float32."""
    return NVFP4Quantizer(with_rht=True, with_post_rht_amax=True).rht_signs()


class _ReferenceTensor(BufferStorage):
    """What TE's reference tensors have in common."""

    #: What TE calls a tensor that its extension does not know.
    custom = True
    #: Codes or scales as TE's references show them, given the rows and columns that they are of.
    _codes: Callable[..., torch.Tensor]
    _scales: Callable[..., torch.Tensor]

    @property
    def original_shape(self) -> tuple[int, ...]:
        """Shape of what was quantized."""
        return tuple(self.buffers.shape)

    @property
    def data(self) -> torch.Tensor | None:
        """Rowwise codes, or None."""
        return None if self._rowwise_data is None else self._codes(self._rowwise_data, *self._matrix)

    @property
    def data_t(self) -> torch.Tensor | None:
        """Columnwise codes, or None."""
        return None if self._columnwise_data is None else self._codes(self._columnwise_data, *self._matrix[::-1])

    @property
    def scale(self) -> torch.Tensor | None:
        """Decode scales of `data`, or None."""
        return None if self._rowwise_data is None else self._scales(self._rowwise_scale_inv, *self._matrix)

    @property
    def scale_t(self) -> torch.Tensor | None:
        """Decode scales of `data_t`, or None."""
        return None if self._columnwise_data is None else self._scales(self._columnwise_scale_inv, *self._matrix[::-1])

    @property
    def _matrix(self) -> tuple[int, int]:
        return matrix_shape(self.buffers.shape)


class CurrentScalingTensorRef(_ReferenceTensor, Float8TensorStorage):
    """`data` (M, K) and `data_t` (K, M) in a torch FP8 dtype, `scale` and `scale_t` (1,): decode scales."""

    @property
    def quant_dtype(self) -> torch.dtype:
        """torch's FP8 dtype."""
        return DType.of(self.buffers.scaling.fmt).torch

    def _codes(self, data, rows, columns):
        return data.view(self.quant_dtype).view(rows, columns)

    def _scales(self, scales, rows, columns):
        return scales


class NVFP4TensorRef(_ReferenceTensor, NVFP4TensorStorage):
    """`data` uint8 (M, K/2), `data_t` (K, M/2); `scale` E4M3 (M, K/16), `scale_t` (K, M/16); the float32 amaxes."""

    quant_dtype = Fp4Formats.E2M1
    #: Amax of the tensor, or of each row; that which the columnwise copy is scaled by.
    global_amax_row, global_amax_col = buffer_property("amax_rowwise"), buffer_property("amax_columnwise")
    #: Whether blocks tried a maximum of 4, and their largest scale.
    nvfp4_use_4over6, nvfp4_e4m3_max = NVFP4TensorStorage._nvfp4_use_4over6, NVFP4TensorStorage._nvfp4_e4m3_max

    def _codes(self, data, rows, columns):
        return data.view(rows, columns // 2)

    def _scales(self, scales, rows, columns):
        return scales[:rows, : columns // 16].view(torch.float8_e4m3fn)


class _ReferenceQuantizer(ValueQuantizer):
    """A quantizer that casts as another one does, by `refops`."""

    custom = True
    _recipe_class = recipes.CustomRecipe

    def __init__(self, rowwise: bool, columnwise: bool):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.internal = True
        self._casting()  # settings that exclude each other raise here

    def _casting(self) -> Quantizer:
        """The quantizer with the same settings."""
        raise NotImplementedError

    def _cast(self, tensor: torch.Tensor, rowwise: bool, columnwise: bool) -> Any:
        with dispatch.backend("reference"):
            return self._casting()._cast(tensor, rowwise, columnwise)

    def _empty_buffers(self, shape, **options):
        casting = self._casting()
        casting.set_usage(**self.get_usages())
        return casting._empty_buffers(shape, **options)

    def _in_gemm_order(self, buffers):
        return buffers

    def check_shape(self, shape: Iterable[int]) -> None:
        """Raise `ValueError` unless a tensor of `shape` can be quantized."""
        self._casting().check_shape(shape)


class CurrentScalingQuantizerRef(_ReferenceQuantizer):
    """FP8 with one scale from the tensor's own amax.

    Args:
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        rowwise, columnwise: which copies results have.
        pow_2_scales: round the scale down to a power of two.
        eps: lower bound of the amax.

    Attributes:
        with_amax_reduction, amax_reduction_group: take the largest amax of the ranks of a process group.
    """

    tensor_class, storage_class = Float8Tensor, CurrentScalingTensorRef

    def __init__(
        self,
        dtype: torch.dtype,
        rowwise: bool = True,
        columnwise: bool = True,
        pow_2_scales: bool = False,
        eps: float = 0.0,
    ):
        self.dtype, self.pow_2_scales, self.eps = dtype, pow_2_scales, eps
        self.with_amax_reduction, self.amax_reduction_group = False, None
        super().__init__(rowwise, columnwise)

    def settings(self) -> dict[str, Any]:
        """Constructor arguments."""
        own = {"dtype": self.dtype, "pow_2_scales": self.pow_2_scales, "eps": self.eps}
        return {**own, **super().settings()}

    def _casting(self) -> Quantizer:
        return Float8CurrentScalingQuantizer(
            DType.of(self.dtype),
            force_pow_2_scales=self.pow_2_scales,
            amax_epsilon=self.eps,
            with_amax_reduction=self.with_amax_reduction,
            amax_reduction_group=self.amax_reduction_group,
        )


class NVFP4QuantizerRef(_ReferenceQuantizer):
    """NVFP4.

    Args:
        dtype: `Fp4Formats.E2M1`.
        rowwise, columnwise: which copies results have.
        quant_tile_shape: (1, 16) or (16, 16).
        with_rht, with_random_sign_mask: the Hadamard transform of the columnwise copy, and its signs.
        row_scaled_nvfp4, nvfp4_use_4over6, nvfp4_e4m3_max, nvfp4_4over6_err_mode: as `NVFP4Quantizer`'s.
        eps: has no effect, as in TE.
        pow_2_scales, nvfp4_4over6_err_use_fast_math: False.

    Raises:
        ValueError: other settings, or settings that exclude each other.
    """

    tensor_class, storage_class = NVFP4Tensor, NVFP4TensorRef

    def __init__(
        self,
        dtype: Fp4Formats = Fp4Formats.E2M1,
        rowwise: bool = True,
        columnwise: bool = True,
        pow_2_scales: bool = False,
        eps: float = 0.0,
        quant_tile_shape: tuple[int, int] = (1, 16),
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        nvfp4_4over6_err_mode: str = "MAE",
        nvfp4_4over6_err_use_fast_math: bool = False,
        with_rht: bool = False,
        with_random_sign_mask: bool = True,
    ):
        if dtype is not Fp4Formats.E2M1:
            raise ValueError(f"dtype must be Fp4Formats.E2M1; got {shown(dtype)}")
        tile = tuple(quant_tile_shape) if isinstance(quant_tile_shape, tuple | list) else ()
        if tile not in ((1, 16), (16, 16)):
            raise ValueError(f"quant_tile_shape must be (1, 16) or (16, 16); got {shown(quant_tile_shape)}")
        off = {"pow_2_scales": pow_2_scales, "nvfp4_4over6_err_use_fast_math": nvfp4_4over6_err_use_fast_math}
        for name, given in off.items():
            if require_flag(given, name):
                raise ValueError(f"{name} must be False: refops has no such NVFP4; got {given}")
        self.dtype, self.eps, self.quant_tile_shape = dtype, eps, tile
        self.with_rht, self.with_random_sign_mask = with_rht, with_random_sign_mask
        self.row_scaled_nvfp4, self.nvfp4_use_4over6 = row_scaled_nvfp4, nvfp4_use_4over6
        self.nvfp4_e4m3_max, self.nvfp4_4over6_err_mode = nvfp4_e4m3_max, str(nvfp4_4over6_err_mode).upper()
        super().__init__(rowwise, columnwise)

    def settings(self) -> dict[str, Any]:
        """Constructor arguments."""
        names = ("quant_tile_shape", "row_scaled_nvfp4", "nvfp4_use_4over6", "nvfp4_e4m3_max", "nvfp4_4over6_err_mode")
        own = {name: getattr(self, name) for name in (*names, "with_rht", "with_random_sign_mask")}
        return {**super().settings(), **own}

    def _casting(self) -> Quantizer:
        return NVFP4Quantizer(
            with_rht=self.with_rht,
            with_post_rht_amax=self.with_rht,
            with_2d_quantization=self.quant_tile_shape == (16, 16),
            row_scaled_nvfp4=self.row_scaled_nvfp4,
            nvfp4_use_4over6=self.nvfp4_use_4over6,
            nvfp4_e4m3_max=self.nvfp4_e4m3_max,
            nvfp4_4over6_err_mode=self.nvfp4_4over6_err_mode,
            with_random_sign_mask=self.with_random_sign_mask,
        )


def current_scaling_ref_factory(role: QuantizerRole | None) -> CurrentScalingQuantizerRef:
    """For a `CustomRecipe`: E5M2 for output gradients, E4M3 for the rest."""
    gradient = tensor_of(role) == "grad_output"
    return CurrentScalingQuantizerRef(torch.float8_e5m2 if gradient else torch.float8_e4m3fn)


def nvfp4_ref_rht_2d_factory(role: QuantizerRole | None) -> NVFP4QuantizerRef:
    """For a `CustomRecipe`: 16x16 tiles for weights, the Hadamard transform for the rest."""
    if tensor_of_linear(role) == "weight":
        return NVFP4QuantizerRef(quant_tile_shape=(16, 16))
    return NVFP4QuantizerRef(with_rht=True)
