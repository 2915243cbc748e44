"""`GroupedLinear`, an activation with a scale for each row, `GroupedLinear`: a mixture of experts, expert by expert.

Source: TE behaviour, `ops/fused/grouped_mlp.py`, whose kernels are cuDNN's for SM 10.x. Here it runs anywhere.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from fuser.basic.activation import ScaledActivation, ScaledGLU
from fuser.basic.grouped_linear import (
    GRAD_INPUT_BUFFER_KEY,
    OUTPUT_BUFFER_KEY,
    GroupedBackward,
    GroupedForward,
    GroupedLinear,
)
from fuser.common import maybe_dequantize, reject_forward_kwargs
from fuser.fused_pattern import WindowFusion
from fuser.op import FusedOperation
from fuser.recipe import Format


class GroupedMLP(FusedOperation):
    """Forward and backward of the three operations, with their bits, in the order of experts instead of operations.

    Intermediates exist in high precision for one expert at a time. Saved are the first linear's output and the
    quantized inputs; of `ScaledSReLU` with `activation_recompute_in_mlp` the second linear's input is computed again.

    Args:
        fc1, activation, fc2: the operations that it stands for.

    Raises:
        ValueError: at forward, for a number of rows that is no multiple of 128, as in TE; for a buffer of the output
            that goes to `fc1`, or one of the input's gradient that goes to `fc2`.
        RuntimeError: at forward, if the linears split their rows differently.
    """

    def __init__(self, fc1: GroupedLinear, activation: ScaledActivation, fc2: GroupedLinear) -> None:
        super().__init__((fc1, activation, fc2))
        self._recomputes = getattr(activation, "activation_recompute_in_mlp", False)

    def fuser_forward(
        self, basic_op_ctxs: Any, input_: Any, *, basic_op_extra_inputs: Any, basic_op_kwargs: Any, **unused: Any
    ) -> Any:
        fc1, activation, fc2 = self.basic_ops
        fc1_ctx, activation_ctx, fc2_ctx = basic_op_ctxs
        fc1_extra, (scales, *_), fc2_extra = basic_op_extra_inputs
        fc1_kwargs, activation_kwargs, fc2_kwargs = basic_op_kwargs
        reject_forward_kwargs(activation, activation_kwargs)
        for name, kwargs, number, other in (
            (OUTPUT_BUFFER_KEY, fc1_kwargs, "first", "last"),
            (GRAD_INPUT_BUFFER_KEY, fc2_kwargs, "last", "first"),
        ):
            if name in kwargs:
                raise ValueError(
                    f"{name!r} must be given to the {other} linear of a grouped MLP; got it for the {number}"
                )
        if input_.shape[:-1].numel() % 128:
            raise ValueError(f"Rows of a fused grouped MLP must be a multiple of 128; got shape {tuple(input_.shape)}")
        for ctx in basic_op_ctxs:  # its backward runs as a whole
            ctx.requires_grad = fc2_ctx.requires_grad

        first = GroupedForward(fc1, fc1_ctx, input_.shape, fc1_extra, fc1_kwargs)
        hidden, scales = activation.begin_forward(activation_ctx, first.output, scales)
        middle_shape = torch.Size((*input_.shape[:-1], fc2.in_features))
        second = GroupedForward(fc2, fc2_ctx, middle_shape, fc2_extra, fc2_kwargs)
        if fc1_ctx.split_sizes != fc2_ctx.split_sizes:
            raise RuntimeError(
                f"{type(self).__name__} got different split sizes for its linears: {fc1_ctx.split_sizes} and "
                f"{fc2_ctx.split_sizes}"
            )
        inputs = first.rows_of_groups(maybe_dequantize(input_, first.dtype))
        for i, (x, h, scale) in enumerate(zip(inputs, *_by_expert(first, hidden, scales), strict=True)):
            first.group(i, x)  # writes h
            a = activation.rows_forward(h, scale)
            second.group(i, maybe_dequantize(a, second.dtype), keep_input=not self._recomputes)
        first.finish()
        second.finish()
        return second.output, [(), (), ()]

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, *, basic_op_grad_extra_outputs: Any) -> Any:
        fc1, activation, fc2 = self.basic_ops
        fc1_ctx, activation_ctx, fc2_ctx = basic_op_ctxs
        first, second = GroupedBackward(fc1, fc1_ctx), GroupedBackward(fc2, fc2_ctx)
        hidden, scales = activation_ctx.saved_tensors
        grad_output = maybe_dequantize(grad_output, fc2_ctx.dtype)
        first.allocate(grad_output.shape, grad_output.device)
        # All of one linear before the other: in this order stochastic rounding draws where each runs alone.
        for i, dy in enumerate(second.rows_of_groups(grad_output)):
            second.quantize_grad(i, dy)
        grad_scales = []
        for i, (h, scale) in enumerate(zip(*_by_expert(first, hidden, scales), strict=True)):
            if self._recomputes:
                second.inputs[i] = maybe_dequantize(activation.rows_forward(h, scale), fc2_ctx.dtype)
            da = maybe_dequantize(second.multiply(i), activation_ctx.dtype)
            dh, grad_scale = activation.rows_backward(da, h, scale)
            first.quantize_grad(i, maybe_dequantize(dh, fc1_ctx.dtype))
            first.multiply(i)
            grad_scales.append(grad_scale)
        fc1_grads, fc1_extra = first.finish()
        fc2_grads, fc2_extra = second.finish()
        with_scales = activation_ctx.extra_input_requires_grad
        activation_extra = (torch.cat(grad_scales).view(scales.shape) if with_scales else None,)
        return first.grad_input, [fc1_grads, (), fc2_grads], [fc1_extra, activation_extra, fc2_extra]


def _by_expert(run, hidden, scales):
    """The rows of each expert, of the activation's input and of its scales."""
    return run.rows_of_groups(hidden), scales.reshape(-1).split(run.ctx.split_sizes)


def _objection(fc1: GroupedLinear, activation: ScaledActivation, fc2: GroupedLinear, *, recipe: Any) -> str | None:
    """TE's conditions, except for those of its kernels' hardware and versions."""
    if int(os.environ.get("NVTE_CUTEDSL_FUSED_GROUPED_MLP", "0")) <= 0:
        return "NVTE_CUTEDSL_FUSED_GROUPED_MLP, TE's switch, is not 1"
    if recipe is None or not (recipe.mxfp8() or recipe.nvfp4()):
        return "the recipe is neither MXFP8 nor NVFP4"
    if recipe.nvfp4() and recipe.disable_rht:
        return "the recipe's disable_rht is True: TE quantizes groups with the Hadamard transform alone"
    if recipe.mxfp8() and recipe.fp8_format != Format.E4M3:
        return f"the recipe's fp8_format is {recipe.fp8_format}: gradients must be E4M3"
    return _shape_objection(fc1, activation, fc2)


def _shape_objection(fc1, activation, fc2):
    for linear in (fc1, fc2):
        for name in ("in_features", "out_features"):
            if getattr(linear, name) % 64:
                return f"{name} must be a multiple of 64; a linear has {getattr(linear, name)}"
    gated = isinstance(activation, ScaledGLU)
    if fc1.num_groups != fc2.num_groups or fc1.out_features != fc2.in_features * (2 if gated else 1):
        return (
            f"the linears do not match: {fc1.num_groups} groups with out_features={fc1.out_features}, then "
            f"{fc2.num_groups} with in_features={fc2.in_features}"
        )
    if gated and activation.glu_interleave_size != 32:
        return f"glu_interleave_size must be 32; it is {activation.glu_interleave_size}"
    return None


GroupedMLP.fuse_forward_backward_ops = WindowFusion(
    GroupedMLP, patterns=[(GroupedLinear, ScaledActivation, GroupedLinear)], objection=_objection
)

#: TE's names, one for gated activations and one for the others.
GroupedMLP_CuTeGEMMGLU = GroupedMLP_CuTeGEMMUnary = GroupedMLP
