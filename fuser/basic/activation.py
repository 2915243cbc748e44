"""Element-wise activations and gated linear units as fusible operations.

The arithmetic is that of `fuser.functional`: float32 inside, one rounding of the output, and TE's kernel path where the
output is quantized. Source: TE behaviour, `ops/basic/activation.py`.
"""

from typing import Any, ClassVar

import torch

from fuser import dispatch, functional
from fuser.common import SUPPORTED_DTYPES, maybe_autocast_dtype, maybe_dequantize
from fuser.dtypes import DType
from fuser.op import BasicOperation, OperationContext
from fuser.quantization.quantizers import Float8CurrentScalingQuantizer


def activation_dtype(input_: Any) -> torch.dtype:
    """The dtype in which an activation of `input_` is stored: autocast's for the tensor's own device, else its own.

    Raises:
        RuntimeError: anything but float32, float16 and bfloat16 (and float64 under `fuser.backend("float64")`).
    """
    dtype = maybe_autocast_dtype(device_type=input_.device.type, default_dtype=input_.dtype)
    if dtype not in SUPPORTED_DTYPES and not (dtype == torch.float64 and dispatch.current_backend() == "float64"):
        raise RuntimeError(f"Unsupported dtype ({dtype})")
    return dtype


class _ActivationOperation(BasicOperation):
    """y = f(x), element by element, or f(a) * g(b) for rows [a | b] of twice the width (the gate comes first).

    The dtype is the autocast dtype of the tensor's own device, else that of the input. The output is emitted with the
    next operation's input quantizer, the input's gradient with the previous operation's grad-output quantizer (which a
    fuser withholds under a recipe with `backward_override`; TE does not).

    Args:
        cache_quantized_input: keep the input for backward as FP8 E4M3 with current scaling: a byte an element. The
            output does not change, the input's gradient does. It applies outside autocast as well.

    Raises:
        RuntimeError: at forward, for a dtype that `activation_dtype` refuses.
    """

    #: Name of the activation in `fuser.functional`.
    activation: ClassVar[str]

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__()
        self.cache_quantized_input = cache_quantized_input

    def activation_parameters(self) -> dict:
        """Keyword arguments of the activation besides its input."""
        return {}

    def op_forward(
        self, ctx: OperationContext, input_: Any, *, prev_op_grad_output_quantizer: Any, next_op_input_quantizer: Any
    ) -> Any:
        dtype = activation_dtype(input_)
        x = maybe_dequantize(input_, dtype)
        y = self._activation_forward(x, next_op_input_quantizer)
        if ctx.requires_grad:
            ctx.save_for_backward(_quantized_cache(x) if self.cache_quantized_input else x)
            ctx.dtype = dtype
            ctx.prev_op_grad_output_quantizer = prev_op_grad_output_quantizer
        return y

    def op_backward(self, ctx: OperationContext, grad_output: Any) -> Any:
        (x,) = ctx.saved_tensors
        x = maybe_dequantize(x, ctx.dtype)
        dy = maybe_dequantize(grad_output, ctx.dtype)
        return self._activation_backward(dy, x, ctx.prev_op_grad_output_quantizer), ()

    def _activation_forward(self, x, quantizer):
        return functional.activation(self.activation, x, quantizer, **self.activation_parameters())

    def _activation_backward(self, dy, x, quantizer):
        return functional.activation_grad(self.activation, dy, x, quantizer, **self.activation_parameters())


def _quantized_cache(x: torch.Tensor) -> Any:
    quantizer = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, device=x.device, rowwise=True, columnwise=False)
    quantizer.internal = True
    return quantizer(x)


class GELU(_ActivationOperation):
    """x * (0.5 + 0.5 tanh(x (0.79788456 + 0.03567741 x^2))): the tanh approximation."""

    activation = "gelu"


class GLU(_ActivationOperation):
    """sigmoid(a) * b. PyTorch's GLU has the gate last."""

    activation = "glu"


class GEGLU(_ActivationOperation):
    """gelu(a) * b, with the tanh approximation."""

    activation = "geglu"


class QGELU(_ActivationOperation):
    """x * sigmoid(1.702 x): quick GELU."""

    activation = "qgelu"


class QGEGLU(_ActivationOperation):
    """qgelu(a) * b."""

    activation = "qgeglu"


class ReLU(_ActivationOperation):
    """max(x, 0)."""

    activation = "relu"


class ReGLU(_ActivationOperation):
    """relu(a) * b."""

    activation = "reglu"


class SReLU(_ActivationOperation):
    """max(x, 0)^2: squared ReLU."""

    activation = "srelu"


class SReGLU(_ActivationOperation):
    """srelu(a) * b."""

    activation = "sreglu"


class SiLU(_ActivationOperation):
    """x * sigmoid(x)."""

    activation = "silu"
