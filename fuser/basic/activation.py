"""Element-wise activations and gated linear units as fusible operations.

The arithmetic is that of `fuser.functional`: float32 inside, one rounding of the output, and TE's kernel path where the
output is quantized. Source: TE behaviour, `ops/basic/activation.py`.
"""

import inspect
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fuser import dispatch, functional
from fuser.common import SUPPORTED_DTYPES, maybe_autocast_dtype, maybe_dequantize, publish
from fuser.dtypes import DType
from fuser.op import BasicOperation, OperationContext
from fuser.quantization.quantizers import Float8CurrentScalingQuantizer
from refops.activations import ACTIVATIONS, Activation
from refops.arguments import say_who


def activation_dtype(input_: Any) -> torch.dtype:
    """The dtype in which an activation of `input_` is stored: autocast's for the tensor's own device, else its own.

    Raises:
        RuntimeError: anything but float32, float16 and bfloat16 (and float64 under `fuser.backend("float64")`).
    """
    dtype = maybe_autocast_dtype(device_type=input_.device.type, default_dtype=input_.dtype)
    if dtype not in SUPPORTED_DTYPES and not (dtype == torch.float64 and dispatch.current_backend() == "float64"):
        raise RuntimeError(
            f"Unsupported dtype ({dtype}): activations take float32, float16 and bfloat16 "
            "(float64 only under fuser.backend('float64'))"
        )
    return dtype


class ActivationParameters:
    """The parameters of an activation as attributes of an operation, with the declaration's defaults and checks."""

    #: Name of the activation in `refops.ACTIVATIONS`.
    activation: ClassVar[str]

    def set_parameters(self, given: dict[str, float]) -> None:
        """Set an attribute for each parameter.

        Raises:
            TypeError: a parameter that the activation does not take.
            ValueError: one that must be positive and finite and is not.
        """
        declared = {p.name: p for p in ACTIVATIONS[self.activation].declared}
        unknown = [name for name in given if name not in declared]
        if unknown:
            raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {unknown[0]!r}")
        for name, parameter in declared.items():
            value = given.get(name, parameter.default)
            if parameter.positive and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be positive and finite; got {value}")
            setattr(self, name, value)

    def activation_parameters(self) -> dict[str, Any]:
        """Keyword arguments of the activation besides its inputs."""
        return {name: getattr(self, name) for name in ACTIVATIONS[self.activation].parameters}


def operation_of(row: Activation, base: type, name: str, text: str) -> type:
    """Return the class `name` of an activation: `base` with the activation's parameters in its signature.

    Raises:
        ValueError: a parameter that an operation has as an attribute already.
    """
    attributes = {"activation": row.name, "__doc__": text, "__module__": base.__module__, "__qualname__": name}
    made = type(name, (base,), attributes)
    for parameter in row.parameters:
        if hasattr(made, parameter) or parameter == "training":
            raise ValueError(
                f"name of a parameter of {row.name} must be no attribute of an operation, {name}; got {parameter!r}"
            )
    made.__signature__ = signature_of(row, base)  # type: ignore[attr-defined]
    return made


def signature_of(row: Activation, base: type) -> inspect.Signature:
    """The signature of `base` with the parameters of an activation in it."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    own = [inspect.Parameter(p.name, keyword, default=p.default, annotation=float) for p in row.declared]
    settings = [p for p in inspect.signature(base).parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    return inspect.Signature(settings + own)


def operations_of(base: type, chosen: Callable[[Activation], bool]) -> dict[str, type]:
    """Name -> class of the chosen activations."""
    rows = [row for row in ACTIVATIONS.values() if chosen(row)]
    return {row.op: operation_of(row, base, row.op, f"{row.formula}.") for row in rows}


class _ActivationOperation(ActivationParameters, BasicOperation):
    """y = f(x), element by element, or f(a) * g(b) for rows [a | b] of twice the width (the gate comes first).

    The dtype is the autocast dtype of the tensor's own device, else that of the input. The output is emitted with the
    next operation's input quantizer, the input's gradient with the previous operation's grad-output quantizer (which a
    fuser withholds under a recipe with `backward_override`; TE does not).

    Args:
        **parameters: those of the activation.
        cache_quantized_input: keep the input for backward as FP8 E4M3 with current scaling: a byte an element. The
            output does not change, the input's gradient does. It applies outside autocast as well.

    Raises:
        RuntimeError: at forward, for a dtype that `activation_dtype` refuses.
        TypeError, ValueError: a parameter that the activation does not take, or that is out of range.
    """

    def __init__(self, *, cache_quantized_input: bool = False, **parameters: float) -> None:
        super().__init__()
        self.cache_quantized_input = cache_quantized_input
        self.set_parameters(parameters)

    def op_forward(
        self, ctx: OperationContext, input_: Any, *, prev_op_grad_output_quantizer: Any, next_op_input_quantizer: Any
    ) -> Any:
        dtype = activation_dtype(input_)
        x = maybe_dequantize(input_, dtype)
        try:
            y = self._activation_forward(x, next_op_input_quantizer)
        except (TypeError, ValueError) as error:
            say_who(error, type(self).__name__)
            raise
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


#: Name -> class of every activation whose rows cannot be interleaved; those that can are in `fuser.basic.swiglu`.
PLAIN = operations_of(_ActivationOperation, lambda row: not (row.gated and row.row_scaled))
publish(PLAIN, globals())

if TYPE_CHECKING:  # the classes of `PLAIN`

    def __getattr__(name: str) -> type[_ActivationOperation]: ...
