"""Fusions of a linear with its neighbours: a bias, a factor or a residual branch joins the product's float32 sums.

One rounding instead of several. Source: TE behaviour, `ops/fused/forward_linear_*.py` and `backward_linear_*.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from fuser.basic.basic_linear import BasicLinear
from fuser.basic.bias import Bias
from fuser.basic.constant_scale import ConstantScale
from fuser.basic.residual import AddExtraInput, MakeExtraOutput
from fuser.fused_pattern import WindowFusion
from fuser.op import FusedOperation, FusibleOperation


class _ForwardLinear(FusedOperation):
    """A product that also does what the operations behind it do: `Bias`, `ConstantScale`, `AddExtraInput`."""

    def fuser_forward(
        self,
        basic_op_ctxs: Any,
        input_: Any,
        *,
        basic_op_extra_inputs: Any,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        basic_op_kwargs: Any,
    ) -> Any:
        for op, kwargs in zip(self.basic_ops, basic_op_kwargs, strict=True):
            if kwargs:
                raise ValueError(
                    f"{type(op).__name__} operation forward does not expect keyword arguments (got {sorted(kwargs)})"
                )
        linear, linear_ctx = self.basic_ops[0], basic_op_ctxs[0]
        product: dict[str, Any] = {"output_quantizer": next_op_input_quantizer}
        for op, extra_inputs in zip(self.basic_ops, basic_op_extra_inputs, strict=True):
            if isinstance(op, Bias):
                product["bias"] = op.bias
            elif isinstance(op, ConstantScale):
                product["alpha"] = op.scale
            elif isinstance(op, AddExtraInput):
                out = extra_inputs[0].detach()
                product |= {"out": out, "dtype": out.dtype, "accumulate_into_out": True, "output_quantizer": None}
        output = linear.fused_forward(
            linear_ctx, input_, prev_op_grad_output_quantizer=prev_op_grad_output_quantizer, **product
        )
        for op, ctx in zip(self.basic_ops, basic_op_ctxs, strict=True):
            if isinstance(op, Bias):  # what its unfused backward pass reads
                quantized = linear_ctx.with_quantized_compute
                ctx.grad_input_quantizer = linear.get_grad_output_quantizer() if quantized else None
        return output, [()] * len(self.basic_ops)


class ForwardLinearBiasActivation(_ForwardLinear):
    """`x W^T + b` in one step. Activations aren't supported (`NotImplementedError`), as in TE."""

    def __init__(
        self, linear: BasicLinear, bias: Bias | None = None, activation: FusibleOperation | None = None
    ) -> None:
        super().__init__([op for op in (linear, bias, activation) if op is not None])
        self._has_activation = activation is not None

    def fuser_forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._has_activation:
            raise NotImplementedError("Activations are not supported in ForwardLinearBiasActivation")
        return super().fuser_forward(*args, **kwargs)


class ForwardLinearBiasAdd(_ForwardLinear):
    """`extra += x W^T (+ b)` in the extra input's dtype; the result is the extra input's memory, never quantized."""

    def __init__(self, linear: BasicLinear, bias: Bias | None, add: AddExtraInput) -> None:
        super().__init__([op for op in (linear, bias, add) if op is not None])


class ForwardLinearScaleAdd(_ForwardLinear):
    """`extra += scale * x W^T` in the extra input's dtype; the result is the extra input's memory, never quantized.

    TE refuses an extra input of another dtype than the linear's. The operations one by one take it.
    """

    def __init__(self, linear: BasicLinear, scale: ConstantScale, add: AddExtraInput) -> None:
        super().__init__([linear, scale, add])


class BackwardLinearAdd(FusedOperation):
    """`dextra += dy W`, in the dtype of the extra output's gradient. Without such a gradient a plain `dy W`."""

    def __init__(self, backward_add: MakeExtraOutput, linear: BasicLinear) -> None:
        super().__init__([backward_add, linear])

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, *, basic_op_grad_extra_outputs: Any) -> Any:
        grad_extra = basic_op_grad_extra_outputs[0][0]
        accumulation = {}
        if grad_extra is not None:
            # An expanded gradient (that of a sum) has no memory of its own to accumulate into
            grad_extra = grad_extra.contiguous()
            accumulation = {"dtype": grad_extra.dtype, "grad_input": grad_extra, "accumulate_into_grad_input": True}
        grad_input, grad_weight = self.basic_ops[1].fused_backward(basic_op_ctxs[1], grad_output, **accumulation)
        return grad_input, [(), (grad_weight,)], [(), ()]


class BackwardLinearScale(FusedOperation):
    """`dx = scale * dy W` and `dW = scale * dy^T x`. Quantized compute quantizes the unscaled `dy`."""

    def __init__(self, linear: BasicLinear, scale: ConstantScale) -> None:
        super().__init__([linear, scale])

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, *, basic_op_grad_extra_outputs: Any) -> Any:
        linear, scale = self.basic_ops
        grad_input, grad_weight = linear.fused_backward(
            basic_op_ctxs[0], grad_output, grad_input_alpha=scale.scale, grad_weight_alpha=scale.scale
        )
        return grad_input, [(grad_weight,), ()], [(), ()]


def _bias_objection(linear: BasicLinear, bias: Bias, recipe: Any = None) -> str | None:
    if linear.tensor_parallel_mode == "row":
        return "the linear is row parallel: its partial sums are reduced before the bias is added"
    if linear.weight.dtype not in (torch.float16, torch.bfloat16):
        return f"the weight is {linear.weight.dtype}: TE fuses the bias for float16 and bfloat16 alone"
    return None


def _add_objection(linear: BasicLinear, *others: Any, recipe: Any = None) -> str | None:
    if linear.tensor_parallel_mode == "row":
        return "the linear is row parallel: its partial sums are reduced before the extra input is added"
    if not others[-1].in_place:
        return "AddExtraInput is not in place"
    return None


def _backward_add_objection(backward_add: MakeExtraOutput, linear: BasicLinear, recipe: Any = None) -> str | None:
    if not backward_add.in_place:
        return "MakeExtraOutput is not in place"
    return _column_objection(linear)


def _column_objection(linear: BasicLinear, *others: Any, recipe: Any = None) -> str | None:
    """Why the input gradient of `linear` can't be finished inside its product."""
    if linear.tensor_parallel_mode == "column":
        return "the linear is column parallel: the partial sums of its input gradient must be reduced first"
    return None


ForwardLinearBiasActivation.fuse_forward_ops = WindowFusion(
    ForwardLinearBiasActivation, patterns=[(BasicLinear, Bias)], objection=_bias_objection
)
ForwardLinearBiasAdd.fuse_forward_ops = WindowFusion(
    ForwardLinearBiasAdd,
    patterns=[(BasicLinear, Bias, AddExtraInput), (BasicLinear, AddExtraInput)],
    objection=_add_objection,
    build=lambda linear, *others: ForwardLinearBiasAdd(linear, others[0] if len(others) == 2 else None, others[-1]),
)
ForwardLinearScaleAdd.fuse_forward_ops = WindowFusion(
    ForwardLinearScaleAdd, patterns=[(BasicLinear, ConstantScale, AddExtraInput)], objection=_add_objection
)
BackwardLinearAdd.fuse_backward_ops = WindowFusion(
    BackwardLinearAdd, patterns=[(MakeExtraOutput, BasicLinear)], objection=_backward_add_objection
)
BackwardLinearScale.fuse_backward_ops = WindowFusion(
    BackwardLinearScale, patterns=[(BasicLinear, ConstantScale)], objection=_column_objection
)
