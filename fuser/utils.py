"""TE's helper functions that scripts and tests import from `transformer_engine.pytorch.utils`.

They work on a CPU as on a GPU: where TE asks the current GPU, a machine without one answers as compute capability 0.0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from fuser.common import canonicalize_device, canonicalize_dtype, devices_match
from fuser.dispatch import deinterleave, interleave
from fuser.quantization.contexts import is_bf16_available
from fuser.quantization.state import _compute_capability

__all__ = [
    "all_close",
    "assert_dim_for_fp8_exec",
    "canonicalize_device",
    "canonicalize_dtype",
    "canonicalize_process_group",
    "cast_if_needed",
    "ceil_div",
    "check_dim_for_fp8_exec",
    "clear_tensor_data",
    "deinterleave_glu_tensor",
    "devices_match",
    "divide",
    "ensure_divisibility",
    "get_default_init_method",
    "get_device_compute_capability",
    "init_method_constant",
    "init_method_normal",
    "interleave_glu_tensor",
    "is_bf16_available",
    "is_bf16_compatible",
    "is_non_tn_fp8_gemm_supported",
    "needs_quantized_gemm",
    "requires_grad",
    "round_up_to_nearest_multiple",
    "scaled_init_method_normal",
    "split_tensor_along_dim",
]

# --- the machine --------------------------------------------------------------------------------------


def get_device_compute_capability() -> tuple[int, int]:
    """Compute capability of the current GPU; (0, 0) without one."""
    return _compute_capability()


def is_bf16_compatible() -> bool:
    """Whether the current GPU multiplies bfloat16 natively. Here bfloat16 works everywhere: `is_bf16_available`."""
    return _compute_capability() >= (8, 0)


def is_non_tn_fp8_gemm_supported() -> bool:
    """Whether the current GPU multiplies FP8 matrices whose contracted dimension is not the last one."""
    capability = _compute_capability()
    return (10, 0) <= capability < (12, 0) or capability >= (13, 0)


def canonicalize_process_group(group: Any) -> Any:
    """`group`, or the default process group."""
    return torch.distributed.group.WORLD if group is None else group


# --- numbers and shapes -------------------------------------------------------------------------------


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """`ValueError` unless `denominator` divides `numerator`."""
    if numerator % denominator:
        raise ValueError(f"numerator must be divisible by denominator; got {numerator} and {denominator}")


def divide(numerator: int, denominator: int) -> int:
    """The quotient; `ValueError` if there is a remainder."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def ceil_div(numerator: int, denominator: int) -> int:
    """The quotient, rounded up."""
    return -(-numerator // denominator)


def round_up_to_nearest_multiple(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `value`."""
    return ceil_div(value, multiple) * multiple


def check_dim_for_fp8_exec(tensor: torch.Tensor) -> bool:
    """Whether TE's FP8 products take a tensor: 2-D, sizes divisible by 8 and 16. Products here take any."""
    return tensor.dim() == 2 and tensor.size(0) % 8 == 0 and tensor.size(1) % 16 == 0


def assert_dim_for_fp8_exec(*tensors: torch.Tensor) -> None:
    """`ValueError` for a tensor whose rows are no multiple of 8 or whose last dimension is no multiple of 16."""
    for tensor in tensors:
        rows, columns = math.prod(tensor.shape[:-1]), tensor.shape[-1]
        if rows % 8 or columns % 16:
            raise ValueError(
                "tensors must have a last dimension divisible by 16, and a product of the others divisible by 8; "
                f"got one of shape {tuple(tensor.shape)}"
            )


# --- tensors ------------------------------------------------------------------------------------------


def requires_grad(*tensors: torch.Tensor | None) -> bool:
    """Whether any of the tensors requires a gradient."""
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def cast_if_needed(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """`tensor` in `dtype`, itself if it is; None stays None."""
    if tensor is None or tensor.dtype == dtype:
        return tensor
    with torch.enable_grad():
        return tensor.to(dtype=dtype)


def clear_tensor_data(*tensors: Any) -> None:
    """Free the memory of tensors, whoever else holds them; those marked `_do_not_clear` are left alone."""
    for tensor in tensors:
        if tensor is None or hasattr(tensor, "_do_not_clear"):
            continue
        if hasattr(tensor, "clear"):
            tensor.clear()
        else:
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)


def needs_quantized_gemm(obj: Any, rowwise: bool = True) -> bool:
    """Whether a product of `obj` is one of quantized operands: it is no plain tensor."""
    return type(obj) not in (torch.Tensor, torch.nn.Parameter)


def split_tensor_along_dim(
    tensor: torch.Tensor, dim: int, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[torch.Tensor, ...]:
    """Equal parts along `dim`, views unless `contiguous_split_chunks`; `ValueError` if there is a remainder."""
    parts: Iterable[torch.Tensor] = torch.split(tensor, divide(tensor.size(dim), num_partitions), dim=dim)
    return tuple(part.contiguous() if contiguous_split_chunks else part for part in parts)


def all_close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """`torch.allclose`, on the CPU."""
    return torch.allclose(a.cpu(), b.cpu())


def interleave_glu_tensor(tensor: torch.Tensor, interleave_size: int) -> torch.Tensor:
    """Rows [a | b] as [a 0:size | b 0:size | a size:2*size | ...], as `glu_interleave_size` wants a linear's weight.

    Args:
        tensor: (2n, ...): a weight or a bias.
        interleave_size: rows of a block, a divisor of n (`ValueError`).
    """
    return interleave(tensor, interleave_size, dim=0)


def deinterleave_glu_tensor(tensor: torch.Tensor, interleave_size: int) -> torch.Tensor:
    """The inverse of `interleave_glu_tensor`."""
    return deinterleave(tensor, interleave_size, dim=0)


# --- initialization -----------------------------------------------------------------------------------


def init_method_constant(val: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that fills a tensor with `val`."""
    return lambda tensor: torch.nn.init.constant_(tensor, val)


def init_method_normal(sigma: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that fills a tensor with N(0, sigma)."""
    return lambda tensor: torch.nn.init.normal_(tensor, mean=0.0, std=sigma)


def scaled_init_method_normal(sigma: float, num_layers: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that fills a tensor with N(0, sigma / sqrt(2 num_layers))."""
    return init_method_normal(sigma / math.sqrt(2.0 * num_layers))


def get_default_init_method() -> Callable[[torch.Tensor], torch.Tensor]:
    """TE's default of its modules: N(0, 0.023). Operations here are initialized as `torch.nn` does."""
    return init_method_normal(0.023)
