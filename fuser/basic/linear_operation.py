"""What linear ops share: weights and quantizers, operands of their products, checks of their buffers."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from fuser.common import (
    autocast_dtype_of,
    canonicalize_device,
    canonicalize_dtype,
    devices_match,
    is_quantized_tensor,
    maybe_dequantize,
    parameter_in_place_of,
)
from fuser.dispatch import computes_in
from fuser.gemm import reads_swizzled_scales
from fuser.op import BasicOperation, OperationContext
from fuser.quantization.quantizer import Quantizer
from fuser.quantization.quantizers import Float8CurrentScalingQuantizer, Float8Quantizer
from fuser.quantization.state import FP8GlobalStateManager, QuantizerRole
from fuser.quantization.storage import DIRECTIONS, BufferStorage, Float8TensorStorage
from fuser.quantization.tensor import QuantizedTensor
from fuser.recipe import Recipe

PER_TENSOR_QUANTIZERS = (Float8Quantizer, Float8CurrentScalingQuantizer)


def check_linear_dtype(dtype: torch.dtype) -> torch.dtype:
    """`dtype`, if matrix products are offered in it (float64 under `backend("float64")` alone); else `ValueError`."""
    if not computes_in(dtype):
        raise ValueError(
            f"Supported dtypes are float32, float16, bfloat16, and float64 under fuser.backend('float64') (got {dtype})"
        )
    return dtype


class LinearOperation(BasicOperation):
    """What `BasicLinear`, a single group, and `GroupedLinear` share: weights, and quantizers of their products."""

    num_groups = 1

    def _keep_arguments(
        self,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        rng_state_tracker_function: Callable[[], Any] | None,
        accumulate_into_main_grad: bool,
    ) -> tuple[torch.device, torch.dtype]:
        """Keep what the constructors share. Returns where parameters go, in which dtype."""
        self._rng_state_tracker_function = rng_state_tracker_function
        self._accumulate_into_main_grad = accumulate_into_main_grad
        self._with_quantized_weight = FP8GlobalStateManager.with_fp8_parameters()
        if self._with_quantized_weight:
            self.reset_recipe_state(recipe=FP8GlobalStateManager.get_fp8_recipe())
        return canonicalize_device(device), check_linear_dtype(canonicalize_dtype(dtype))

    @property
    def _weight_parameters(self) -> list[torch.nn.Parameter]:
        raise NotImplementedError

    def _group_weights(self) -> list[Any]:
        """The weight of each group; `None`s before they are registered."""
        raise NotImplementedError

    def _initialized(self, weights: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """New weights of the groups as `torch.nn.Linear` initializes its own, quantized where that was asked for."""
        weights, tracker = list(weights), self._rng_state_tracker_function
        with contextlib.nullcontext() if tracker is None else tracker().fork():
            for weight in weights:
                torch.nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        if not self._with_quantized_weight:
            return weights
        groups = zip(weights, self._group_quantizers(), strict=True)
        return [quantize_new_weight(weight, quantizer) for weight, (_, quantizer, _) in groups]

    def num_quantizers(self, mode: str) -> int:
        return {"forward": 2 * self.num_groups, "backward": self.num_groups}.get(mode, 0)

    def get_quantizer_roles(self, mode: str) -> list[QuantizerRole] | None:
        """(input, weight) for each group, or grad_output for each group."""
        tensors = {"forward": ("input", "weight"), "backward": ("grad_output",)}.get(mode)
        if tensors is None:
            return None
        name = getattr(self, "name", None) or ""
        roles = [QuantizerRole(module_type="linear", tensor_type=tensor, name=name) for tensor in tensors]
        return roles * self.num_groups

    def _group_quantizers(self) -> list[tuple[Any, Any, Any]]:
        """`(input, weight, grad_output)` quantizers of each group."""
        return [
            (
                self.get_quantizer("forward", 2 * i),
                self.get_quantizer("forward", 2 * i + 1),
                self.get_quantizer("backward", i),
            )
            for i in range(self.num_groups)
        ]

    def reset_recipe_state(self, *, recipe: Recipe | None) -> None:
        """See `BasicOperation.reset_recipe_state`; sets what a matrix product's operands need on the new quantizers."""
        super().reset_recipe_state(recipe=recipe)
        if recipe is not None:
            self._set_up_quantizers(recipe, self._group_weights())

    def _set_up_quantizers(self, recipe: Any, weights: list[Any]) -> None:
        for weight, quantizers in zip(weights, self._group_quantizers(), strict=True):
            input_quantizer, weight_quantizer, grad_output_quantizer = quantizers
            for quantizer in (input_quantizer, grad_output_quantizer):
                quantizer.internal = True
                quantizer.optimize_for_gemm = weight is not None and reads_swizzled_scales(weight.device)
            weight_quantizer.internal = not is_quantized_tensor(weight) and not self._with_quantized_weight
            if recipe.float8_current_scaling():
                params = recipe.fp8_quant_fwd_inp, recipe.fp8_quant_fwd_weight, recipe.fp8_quant_bwd_grad
                for quantizer, of_tensor in zip(quantizers, params, strict=True):
                    quantizer.force_pow_2_scales = of_tensor.power_2_scale
                    quantizer.amax_epsilon = of_tensor.amax_epsilon
            if is_quantized_tensor(weight):
                adopt_weight_quantizer(weight, weight_quantizer)

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        """Sets quantizer usages before any op of the pipeline runs, since the op before may emit through them."""
        super().pre_fuser_forward(requires_grad=requires_grad)
        if not FP8GlobalStateManager.is_fp8_enabled():
            return
        quantized_backward = FP8GlobalStateManager.get_fp8_recipe().backward_override is None
        wgrad = requires_grad and self._weight_parameters[0].requires_grad and quantized_backward
        for input_quantizer, weight_quantizer, grad_output_quantizer in self._group_quantizers():
            input_quantizer.set_usage(rowwise=True, columnwise=wgrad)
            weight_quantizer.set_usage(rowwise=True, columnwise=requires_grad)
            grad_output_quantizer.set_usage(rowwise=True, columnwise=wgrad)

    def begin_forward(
        self, ctx: OperationContext, weight: torch.nn.Parameter, dtype: torch.dtype | None = None
    ) -> dict[str, Any]:
        """Settle in `ctx` how both passes multiply. Returns arguments of the functional form of forward.

        `weight`: the first parameter. `dtype`: of the output; by default autocast's, else the weight's.
        """
        recipe = FP8GlobalStateManager.get_fp8_recipe() if FP8GlobalStateManager.is_fp8_enabled() else None
        ctx.backward_override = None if recipe is None else recipe.backward_override
        ctx.with_quantized_compute = recipe is not None and ctx.backward_override is None
        ctx.quantizers = [(None, None, None)] * self.num_groups if recipe is None else self._group_quantizers()
        ctx.dtype = check_linear_dtype(dtype or autocast_dtype_of(weight))  # .double() may have changed it
        ctx.input_requires_grad = ctx.requires_grad
        ctx.weight_requires_grad = ctx.requires_grad and weight.requires_grad
        splits: list[Any] = [None] * 3
        if recipe is not None:
            splits = [recipe.product_params(name).use_split_accumulator for name in ("fprop", "dgrad", "wgrad")]
        split, ctx.grad_input_split, ctx.grad_weight_split = splits
        return {
            "dtype": ctx.dtype,
            "with_quantized_compute": recipe is not None,
            "backward_override": ctx.backward_override,
            "input_requires_grad": ctx.input_requires_grad,
            "weight_requires_grad": ctx.weight_requires_grad,
            "use_split_accumulator": split,
        }

    def backward_options(self, ctx: OperationContext) -> dict[str, Any]:
        """Arguments of the functional form of backward, as forward settled them in `ctx`."""
        return {
            "dtype": ctx.dtype,
            "with_quantized_compute": ctx.with_quantized_compute,
            "input_requires_grad": ctx.input_requires_grad,
            "weight_requires_grad": ctx.weight_requires_grad,
            "grad_input_use_split_accumulator": ctx.grad_input_split,
            "grad_weight_use_split_accumulator": ctx.grad_weight_split,
        }


def adopt_weight_quantizer(weight: Any, quantizer: Quantizer) -> None:
    """Make a quantized weight requantize as `quantizer` does, in the copies that it holds.

    A weight whose quantizer means something else gets a copy of this one, with a `UserWarning`. A weight of another
    format than the recipe's keeps its own.
    """
    quantizer.set_usage(**weight.get_usages())
    present = weight._quantizer
    if present is None:  # a weight from a file
        weight._quantizer = quantizer.copy()
    elif isinstance(weight, quantizer.storage_class or ()) and not _mean_the_same(present, quantizer):
        weight.update_quantizer(quantizer.copy())


def _mean_the_same(one: Quantizer, other: Quantizer) -> bool:
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
    return parameter_in_place_of(old, value)


@dataclasses.dataclass
class Destination:
    """Where the result of a product goes.

    Attributes:
        name: of the result, in errors.
        buffer: tensor to write to, plain or quantized, or None.
        accumulate, beta: whether to add `beta` times what the buffer holds (None: 1).
        quantizer: quantizes the result into a quantized buffer; without a buffer only one of delayed scaling is used.
        reduced_by: the mode of tensor parallelism whose ranks sum their results by `reduce`, or None.
    """

    name: str
    buffer: Any
    accumulate: bool
    beta: float | None
    quantizer: Quantizer | None = None
    reduced_by: str | None = None
    reduce: Callable[[torch.Tensor], torch.Tensor] | None = None

    def check_quantized(self, quantized: bool) -> None:
        """`ValueError` if the buffer can't take a reduced or quantized result. `quantized`: whether operands are."""
        name, reduced_by = self.name, self.reduced_by
        if self.accumulate and reduced_by:
            raise ValueError(f"Accumulating into {name} tensor is not supported with {reduced_by} tensor parallelism")
        if not is_quantized_tensor(self.buffer):
            return
        name = name.capitalize()
        if not quantized:
            raise ValueError(f"{name} tensor is quantized, but quantized compute is not enabled")
        if reduced_by:
            raise ValueError(f"{name} tensor is quantized, but {reduced_by} tensor parallelism does not support it")
        if self.quantizer is None:
            raise ValueError(f"{name} tensor is quantized, but quantizer was not provided")

    def check(self, dtype: torch.dtype | None, device: torch.device | str) -> None:
        """`ValueError` unless a buffer has the dtype, where one is given, and the device of the result."""
        name, buffer = self.name, self.buffer
        if buffer is None:
            if self.accumulate:
                raise ValueError(f"Attempted to accumulate into {name} tensor without providing {name} tensor")
            return
        if dtype is not None and buffer.dtype != dtype:
            raise ValueError(f"{name.capitalize()} tensor has invalid dtype (expected {dtype}, got {buffer.dtype})")
        if not devices_match(buffer.device, canonicalize_device(device)):
            raise ValueError(f"{name.capitalize()} tensor has invalid device (expected {device}, got {buffer.device})")

    def receive(
        self, product: Callable[..., torch.Tensor], left: Any, right: Any, *, dtype: torch.dtype, **options: Any
    ) -> torch.Tensor:
        """Return `product(left, right)` in `dtype`, in the buffer if there is one. `options`: others of the product."""
        out, quantizer = self.buffer, self.quantizer
        options |= {"accumulate": self.accumulate, "beta": self.beta if self.accumulate else None}
        if self.reduce is not None:
            value = self.reduce(product(left, right, out_dtype=dtype, **options))
            return value if out is None else out.copy_(value)
        emits = isinstance(quantizer, Float8Quantizer) if out is None else is_quantized_tensor(out)
        if quantizer is None or not emits:
            return product(left, right, out_dtype=dtype, out=out, **options)
        sums = product(left, right, out_dtype=torch.float32, **options)
        if out is None:
            quantizer.set_usage(rowwise=True, columnwise=False)
            return quantizer.quantize(sums, dtype=dtype)
        quantizer.update_quantized(sums, out)
        return out


def prepare_operand(
    name: str,
    tensor: Any,
    quantizer: Quantizer | None,
    *,
    dtype: torch.dtype,
    quantized: bool,
    rowwise: bool,
    columnwise: bool,
    reads: str | None = None,
    gather: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(operand of the product, this rank's part of it)`; both are the same unless ranks gather the operand.

    Not `quantized`: in high precision. Else a quantized tensor is used as it is where possible, and `ValueError` if
    there is no quantizer for one that isn't: neither the caller's, nor that which a quantized tensor was made with.

    Per-tensor FP8 is quantized before it is gathered: 8 bits travel and are saved. That needs the same scale on every
    rank, which amax reduction gives. Other formats scale blocks, so they are gathered first.
    """
    if not quantized:
        local = maybe_dequantize(tensor, dtype)
        return local if gather is None else gather(local), local
    if quantizer is None and is_quantized_tensor(tensor) and tensor._quantizer is not None:
        quantizer = tensor._quantizer.copy()
        quantizer.internal = True
    if gather is None:
        operand = quantize_operand(tensor, quantizer, rowwise=rowwise, columnwise=columnwise, reads=reads, name=name)
        return operand, operand
    if quantizer is None:
        raise ValueError(f"Missing quantizer for {name}")
    if isinstance(quantizer, PER_TENSOR_QUANTIZERS):
        if isinstance(tensor, QuantizedTensor) or not isinstance(tensor, Float8TensorStorage):
            tensor = maybe_dequantize(tensor)  # a caller's scale may be this rank's alone
        local = quantize_operand(tensor, quantizer, rowwise=True, columnwise=False)
        return _gather_per_tensor(local, quantizer, gather), local
    local = maybe_dequantize(tensor)
    return quantize_operand(gather(local), quantizer, rowwise=rowwise, columnwise=columnwise), local


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


def _gather_per_tensor(local: Any, quantizer: Quantizer, gather: Callable[..., torch.Tensor]) -> torch.Tensor:
    """The FP8 codes of all ranks as one tensor, with the scale that they share."""
    buffers = local.buffers
    codes = gather(buffers.rowwise_data.view(buffers.shape))
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
