"""Parts of linear ops: operands of their products, checks of their buffers, setup of their quantizers.

`BasicLinear` and `GroupedLinear` are made of these; nothing here keeps state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from fuser.common import (
    canonicalize_device,
    devices_match,
    is_quantized_tensor,
    maybe_dequantize,
)
from fuser.dispatch import computes_in
from fuser.distributed import gather_along_first_dim
from fuser.quantization.quantizer import Quantizer
from fuser.quantization.quantizers import Float8CurrentScalingQuantizer, Float8Quantizer
from fuser.quantization.state import QuantizerRole
from fuser.quantization.storage import DIRECTIONS, BufferStorage, Float8TensorStorage
from fuser.quantization.tensor import QuantizedTensor
from fuser.recipe import Recipe

PER_TENSOR_QUANTIZERS = (Float8Quantizer, Float8CurrentScalingQuantizer)

# Setup: dtypes, quantizers, parameters


def check_linear_dtype(dtype: torch.dtype) -> torch.dtype:
    """`dtype`, if matrix products are offered in it (float64 under `backend("float64")` alone); else `ValueError`."""
    if not computes_in(dtype):
        raise ValueError(
            f"Supported dtypes are float32, float16, bfloat16, and float64 under fuser.backend('float64') (got {dtype})"
        )
    return dtype


def linear_quantizer_roles(op: torch.nn.Module, mode: str, num_groups: int = 1) -> list[QuantizerRole] | None:
    """Roles of a linear op's quantizers: (input, weight) for each group, or grad_output for each group."""
    tensors = {"forward": ("input", "weight"), "backward": ("grad_output",)}.get(mode)
    if tensors is None:
        return None
    name = getattr(op, "name", None) or ""
    return [QuantizerRole(module_type="linear", tensor_type=tensor, name=name) for tensor in tensors] * num_groups


def set_current_scaling_params(
    recipe: Any, inputs: Iterable[Any], weights: Iterable[Any], grad_outputs: Iterable[Any]
) -> None:
    """Copy each tensor's `power_2_scale` and `amax_epsilon` from a current-scaling recipe to its quantizers."""
    for quantizers, params in (
        (inputs, recipe.fp8_quant_fwd_inp),
        (weights, recipe.fp8_quant_fwd_weight),
        (grad_outputs, recipe.fp8_quant_bwd_grad),
    ):
        for quantizer in quantizers:
            quantizer.force_pow_2_scales = params.power_2_scale
            quantizer.amax_epsilon = params.amax_epsilon


def adopt_weight_quantizer(weight: Any, quantizer: Quantizer) -> None:
    """Make a quantized weight requantize as `quantizer` does, in the copies that it holds.

    A weight whose quantizer means something else gets a copy of this one, with a `UserWarning`. A weight of another
    format than the recipe's keeps its own.
    """
    quantizer.set_usage(**weight.get_usages())
    present = weight._quantizer
    if present is None:  # a weight from a file
        weight._quantizer = quantizer.copy()
    elif isinstance(weight, quantizer.storage_class or ()) and not mean_the_same(present, quantizer):
        weight.update_quantizer(quantizer.copy())


def mean_the_same(one: Quantizer, other: Quantizer) -> bool:
    """Whether both give a tensor the same codes, whichever copies they make."""
    same_tensors = all(getattr(one, name, None) is getattr(other, name, None) for name in ("scale", "amax"))
    settings = [quantizer.settings() | dict.fromkeys(DIRECTIONS) for quantizer in (one, other)]
    return type(one) is type(other) and settings[0] == settings[1] and same_tensors


def quantize_new_weight(weight: torch.Tensor, quantizer: Quantizer | None) -> QuantizedTensor:
    """A freshly initialised weight in the format that `quantized_model_init` asked for."""
    if quantizer is None:
        raise RuntimeError(
            "Tried to quantize weight with deferred initialization due to meta device, but no quantizer was "
            "available. This is most likely because the weight was initialized within `quantized_model_init`, but the "
            "forward pass was not performed within `autocast`."
        )
    quantizer.set_usage(rowwise=True, columnwise=torch.is_grad_enabled())
    quantizer.internal = False
    with torch.no_grad():
        return quantizer(weight)


def replace_parameter(old: Any, value: torch.Tensor) -> torch.nn.Parameter:
    """`value` as a parameter that keeps the flags and attributes (`main_grad`, ...) of the one it replaces.

    One that FSDP has sharded stays the same object, and takes the values of rank 0.
    """
    if hasattr(old, "placements"):
        with torch.no_grad():
            value = torch.distributed.tensor.distribute_tensor(maybe_dequantize(value), old.device_mesh, old.placements)
            old.copy_(value)
        return old
    new = torch.nn.Parameter(value, requires_grad=old.requires_grad)
    for name, attribute in vars(old).items():
        if name not in vars(new):
            setattr(new, name, attribute)
    return new


def split_accumulators(recipe: Recipe | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of the forward and of the backward form that follow a recipe's `MMParams`, none without a recipe."""
    if recipe is None:
        return {}, {}
    fprop, dgrad, wgrad = [recipe.product_params(name).use_split_accumulator for name in ("fprop", "dgrad", "wgrad")]
    backward = {"grad_input_use_split_accumulator": dgrad, "grad_weight_use_split_accumulator": wgrad}
    return {"use_split_accumulator": fprop}, backward


# Steps of the functional forms


def compute_dtype(dtype: torch.dtype | None, out: torch.Tensor | None, weight: torch.Tensor | None) -> torch.dtype:
    """`dtype`, else that of `out`, else that of `weight`; checked."""
    source = out if out is not None else weight
    if dtype is None:
        if source is None:
            raise ValueError("Could not infer dtype from weight nor out")
        dtype = source.dtype
    return check_linear_dtype(dtype)


def check_buffer(name: str, buffer: torch.Tensor | None, dtype: torch.dtype | None, device: torch.device | str) -> None:
    """`ValueError` unless the buffer (or `None`) has the dtype, where one is given, and the device of the result."""
    if buffer is None:
        return
    if dtype is not None and buffer.dtype != dtype:
        raise ValueError(f"{name.capitalize()} tensor has invalid dtype (expected {dtype}, got {buffer.dtype})")
    if not devices_match(buffer.device, canonicalize_device(device)):
        raise ValueError(f"{name.capitalize()} tensor has invalid device (expected {device}, got {buffer.device})")


def check_out(
    out: torch.Tensor | None,
    accumulate: bool,
    row_parallel: bool,
    with_quantized_compute: bool,
    quantizer: Quantizer | None,
) -> None:
    """`ValueError` unless a forward product can go to, or accumulate into, `out`."""
    if accumulate and out is None:
        raise ValueError("Attempted to accumulate into output tensor without providing output tensor")
    if accumulate and row_parallel:
        raise ValueError("Accumulating into output tensor is not supported with row tensor parallelism")
    check_quantized_buffer("output", out, with_quantized_compute, row_parallel, "row", quantizer)


def check_quantized_buffer(
    name: str,
    buffer: torch.Tensor | None,
    with_quantized_compute: bool,
    reduced: bool,
    mode: str,
    quantizer: Quantizer | None,
) -> None:
    """`ValueError` for a quantized buffer with an unquantized result; `reduced`: over ranks, because of `mode`."""
    if not is_quantized_tensor(buffer):
        return
    if not with_quantized_compute:
        raise ValueError(f"{name.capitalize()} tensor is quantized, but quantized compute is not enabled")
    if reduced:
        raise ValueError(f"{name.capitalize()} tensor is quantized, but {mode} tensor parallelism does not support it")
    if quantizer is None:
        raise ValueError(f"{name.capitalize()} tensor is quantized, but quantizer was not provided")


def check_gradients(input: torch.Tensor | None, weight: torch.Tensor | None, grad_input: Any, grad_weight: Any) -> None:
    """`ValueError` for a tensor that the backward products need and don't have (`None`)."""
    if input is None:
        raise ValueError("Attempted to compute gradient w.r.t. weight, but did not provide input tensor")
    if weight is None:
        raise ValueError("Attempted to compute gradient w.r.t. input, but did not provide weight tensor")
    if grad_input is None:
        raise ValueError("Attempted to accumulate into grad input tensor without providing grad input tensor")
    if grad_weight is None:
        raise ValueError("Attempted to accumulate into grad weight tensor without providing grad weight tensor")


def prepare_operand(
    name: str,
    tensor: Any,
    dtype: torch.dtype,
    quantizer: Quantizer | None,
    *,
    quantized: bool,
    rowwise: bool,
    columnwise: bool,
    reads: str | None = None,
    gather_group: tuple[torch.distributed.ProcessGroup | None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(operand of the product, this rank's part of it)`; both are the same unless ranks gather the operand.

    Not `quantized`: in high precision. Else a quantized tensor is used as it is where possible, and `ValueError` if
    there is no quantizer for one that isn't: neither the caller's, nor that which a quantized tensor was made with.

    Per-tensor FP8 is quantized before it is gathered: 8 bits travel and are saved. That needs the same scale on every
    rank, which amax reduction gives. Other formats scale blocks, so they are gathered first.
    """
    if not quantized:
        local = maybe_dequantize(tensor, dtype)
        return local if gather_group is None else gather_along_first_dim(local, *gather_group), local
    if quantizer is None and is_quantized_tensor(tensor) and tensor._quantizer is not None:
        quantizer = tensor._quantizer.copy()
        quantizer.internal = True
    if gather_group is None:
        operand = quantize_operand(tensor, quantizer, rowwise=rowwise, columnwise=columnwise, reads=reads, name=name)
        return operand, operand
    if quantizer is None:
        raise ValueError(f"Missing quantizer for {name}")
    if isinstance(quantizer, PER_TENSOR_QUANTIZERS):
        if isinstance(tensor, QuantizedTensor) or not isinstance(tensor, Float8TensorStorage):
            tensor = maybe_dequantize(tensor)  # a caller's scale may be this rank's alone
        local = quantize_operand(tensor, quantizer, rowwise=True, columnwise=False)
        return gather_per_tensor(local, quantizer, gather_group), local
    local = maybe_dequantize(tensor)
    whole = gather_along_first_dim(local, *gather_group)
    return quantize_operand(whole, quantizer, rowwise=rowwise, columnwise=columnwise), local


def quantize_operand(
    tensor: Any,
    quantizer: Quantizer | None,
    *,
    rowwise: bool,
    columnwise: bool,
    reads: str | None = None,
    name: str = "operand",
) -> torch.Tensor:
    """`tensor` quantized with the copies asked for; a quantized tensor that has those a product reads is used as it is,
    one whose missing copy follows from the other makes it.

    `reads`: the one copy ("rowwise" or "columnwise") that the product at hand reads; by default all that are asked for.
    """
    if is_quantized_tensor(tensor) and not isinstance(tensor, BufferStorage):
        return tensor  # a format of the caller's own: its product knows what it reads
    if is_quantized_tensor(tensor):
        asked = {"rowwise": rowwise, "columnwise": columnwise}
        needed = [reads] if reads else [copy for copy, wanted in asked.items() if wanted]
        usages = tensor.get_usages()
        # A per-tensor scale serves both directions: either copy is enough
        if isinstance(tensor, Float8TensorStorage) or all(usages[copy] for copy in needed):
            return tensor
        if any(usages.values()) and tensor._copies_hold_the_same_codes():  # as after a distributed optimizer's step
            tensor.update_usage(**{f"{copy}_usage": True for copy in needed})
            return tensor
        tensor = tensor.dequantize()
    if quantizer is None:
        raise ValueError(f"Missing quantizer for {name}")
    quantizer.set_usage(rowwise=rowwise, columnwise=columnwise)
    return quantizer(tensor)


def gather_per_tensor(
    local: Any, quantizer: Quantizer, group: tuple[torch.distributed.ProcessGroup | None]
) -> torch.Tensor:
    """The FP8 codes of all ranks as one tensor, with the scale that they share."""
    buffers = local.buffers
    codes = gather_along_first_dim(buffers.rowwise_data.view(buffers.shape), *group)
    gathered = dataclasses.replace(
        buffers,
        rowwise_data=codes,
        columnwise_data=None,
        columnwise_scale_inv=None,
        amax_rowwise=None,
        amax_columnwise=None,
        shape=tuple(codes.shape),
    )
    return quantizer.wrap(gathered)


def keep_columnwise(tensor: Any) -> None:
    """Drop the row-wise copy that the backward pass won't read, from storages made inside the pipeline."""
    if not is_quantized_tensor(tensor) or isinstance(tensor, QuantizedTensor):
        return
    makes_copies = isinstance(tensor, Float8TensorStorage) or not isinstance(tensor, BufferStorage)
    if makes_copies or tensor.get_usages()["columnwise"]:
        tensor.update_usage(rowwise_usage=False, columnwise_usage=True)


def emitting_quantizer(
    quantizer: Quantizer | None, buffer: torch.Tensor | None, with_quantized_output: bool
) -> Quantizer | None:
    """The quantizer of a product's result; `None` for a result in high precision."""
    if quantizer is None or not with_quantized_output or (buffer is not None and not is_quantized_tensor(buffer)):
        return None
    if buffer is None:
        if not isinstance(quantizer, Float8Quantizer):
            return None
        quantizer.set_usage(rowwise=True, columnwise=False)
    return quantizer


def deliver(
    value: torch.Tensor, buffer: torch.Tensor | None, quantizer: Quantizer | None, dtype: torch.dtype
) -> torch.Tensor:
    """A product's quantized float32 sums, or a reduced product, in the caller's buffer if there is one."""
    if buffer is not None:
        if quantizer is not None:
            quantizer.update_quantized(value, buffer)
        else:
            buffer.copy_(value)
        return buffer
    return value if quantizer is None else quantizer.quantize(value, dtype=dtype)
