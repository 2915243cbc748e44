"""Backward of a bias and the activation behind it, in one pass that also quantizes.

Source: TE behaviour, `ops/fused/backward_activation_bias.py`.
"""

from typing import Any

from fuser import functional
from fuser.basic.activation import _ActivationOperation
from fuser.basic.bias import Bias
from fuser.common import maybe_dequantize
from fuser.fused_pattern import WindowFusion
from fuser.op import FusedOperation, FusibleOperation
from fuser.overflow import warn_of_hidden_overflow


class BackwardActivationBias(FusedOperation):
    """Bias gradient and quantized input gradient of `Bias, activation`, by one kernel.

    TE fuses GELU and ReLU; here every activation is fused, gated ones included. The bias gradient follows TE's path for
    the quantizer: sums of unrounded float32 products for delayed scaling and MXFP8, of rounded ones for the rest.

    Args:
        bias, activation: the operations that it stands for.

    Raises:
        RuntimeError: in backward, if there is no quantizer for the input's gradient.
    """

    def __init__(self, bias: Bias, activation: _ActivationOperation) -> None:
        super().__init__((bias, activation))

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, *, basic_op_grad_extra_outputs: Any) -> Any:
        activation = self.basic_ops[1]
        bias_ctx, activation_ctx = basic_op_ctxs
        quantizer = bias_ctx.grad_input_quantizer
        if quantizer is None:
            raise RuntimeError(
                "BackwardActivationBias requires a quantizer for the gradient of its input, but there is none"
            )
        (x,) = activation_ctx.saved_tensors
        dy, x = (maybe_dequantize(tensor, activation_ctx.dtype) for tensor in (grad_output, x))
        name, parameters = activation.activation, activation.activation_parameters()
        warn_of_hidden_overflow(
            dy, quantizer, before_cast=lambda: functional.activation_grad(name, dy, x, **parameters)
        )
        dbias, dx = functional.dbias_activation_grad(name, dy, x, quantizer, **parameters)
        return dx, [(dbias,), ()], [(), ()]


def _objection(previous: FusibleOperation, bias: Bias, activation: FusibleOperation, *, recipe: Any) -> str | None:
    if recipe is None:
        return "there is no recipe: nothing to quantize"
    if recipe.backward_override is not None:
        return f"the recipe's backward_override is {recipe.backward_override!r}: gradients are not quantized"
    if previous.get_grad_output_quantizer() is None:
        return f"{type(previous).__name__} before the bias takes no quantized gradient"
    if getattr(activation, "glu_interleave_size", None) is not None:
        return "glu_interleave_size is set: the gradient is permuted before it is quantized"
    return None


BackwardActivationBias.fuse_backward_ops = WindowFusion(
    BackwardActivationBias, patterns=[(FusibleOperation, Bias, _ActivationOperation)], objection=_objection, keep=1
)
