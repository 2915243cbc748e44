"""Element-wise activations and gated linear units, plain and with a scale for every row, as fusible operations.

The arithmetic is that of `fuser.functional`: float32 inside, one rounding of the output, and TE's kernel path where the
output is quantized. A gated unit reads rows [a | b] of width 2H: a goes through the activation, b is the linear part.
With `glu_interleave_size=k` a row is [a 0:k | b 0:k | a k:2k | b k:2k ...]. Source: TE behaviour,
`ops/basic/activation.py` and `ops/basic/swiglu.py`.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fuser import dispatch, functional
from fuser.common import autocast_dtype_of, maybe_dequantize, publish, reject_forward_kwargs
from fuser.dtypes import DType
from fuser.op import BasicOperation, ExtraTensorOperation, OperationContext
from fuser.overflow import warn_of_hidden_overflow
from fuser.quantization.quantizers import Float8CurrentScalingQuantizer
from refops.activations import ACTIVATIONS, Activation
from refops.arguments import say_who


def activation_dtype(input_: Any, keep: bool = False) -> torch.dtype:
    """The dtype in which an activation of `input_` is stored: autocast's for the tensor's device, else the tensor's.

    Args:
        keep: the tensor's also in autocast, as torch's activations do.

    Raises:
        RuntimeError: anything but float32, float16 and bfloat16 (and float64 under `fuser.backend("float64")`).
    """
    dtype = input_.dtype if keep else autocast_dtype_of(input_)
    if not dispatch.computes_in(dtype):
        raise RuntimeError(
            f"Unsupported dtype ({dtype}): activations take float32, float16 and bfloat16 "
            "(float64 only under fuser.backend('float64'))"
        )
    return dtype


@functools.cache
def _parameters_of(activation: str) -> tuple[str, ...]:
    return tuple(ACTIVATIONS[activation].parameters)


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
        return {name: getattr(self, name) for name in _parameters_of(self.activation)}


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
                f"name of a parameter of {row.name} must not be an attribute of an operation, {name}; got {parameter!r}"
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
        dtype = activation_dtype(input_, self._dtypes_of_torch)
        x = maybe_dequantize(input_, dtype)
        y = self._activation_forward(x, next_op_input_quantizer)
        if ctx.requires_grad:
            ctx.save_for_backward(_quantized_cache(x) if self.cache_quantized_input else x)
            ctx.dtype = dtype
            ctx.prev_op_grad_output_quantizer = prev_op_grad_output_quantizer
        return y

    def transformed(self, input_: torch.Tensor) -> torch.Tensor:
        if self.cache_quantized_input:
            raise RuntimeError(f"torch.func can't transform {type(self).__name__} with cache_quantized_input=True")
        dtype = activation_dtype(input_, self._dtypes_of_torch)
        return self._activation_forward(maybe_dequantize(input_, dtype), None)

    def op_backward(self, ctx: OperationContext, grad_output: Any) -> Any:
        (x,) = ctx.saved_tensors
        x = maybe_dequantize(x, ctx.dtype)
        dy = maybe_dequantize(grad_output, ctx.dtype)
        return self._activation_backward(dy, x, ctx.prev_op_grad_output_quantizer), ()

    def _activation_forward(self, x, quantizer):
        return functional.activation(self.activation, x, quantizer, **self.activation_parameters())

    def _activation_backward(self, dy, x, quantizer):
        gradient = functools.partial(functional.activation_grad, self.activation, dy, x, **self.activation_parameters())
        warn_of_hidden_overflow(dy, quantizer, before_cast=gradient)
        return gradient(quantizer)


def _quantized_cache(x: torch.Tensor) -> Any:
    quantizer = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, device=x.device, rowwise=True, columnwise=False)
    quantizer.internal = True
    return quantizer(x)


class _InterleavedGLU(_ActivationOperation):
    """A gated linear unit whose input rows may be interleaved.

    Args:
        cache_quantized_input: as for the other activations; the interleaved input is what is kept.
        glu_interleave_size: width of the blocks of interleaved rows, None for [a | b]. The input's gradient is then
            not quantized, since it is permuted after it was computed.

    Raises:
        ValueError: at forward, for a row that isn't a whole number of pairs of blocks.
    """

    def __init__(
        self, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None, **parameters: float
    ) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input, **parameters)
        self.glu_interleave_size = glu_interleave_size

    def _activation_forward(self, x, quantizer):
        if self.glu_interleave_size is not None:
            x = dispatch.deinterleave(x, self.glu_interleave_size)
        return super()._activation_forward(x, quantizer)

    def _activation_backward(self, dy, x, quantizer):
        if self.glu_interleave_size is None:
            return super()._activation_backward(dy, x, quantizer)
        dx = super()._activation_backward(dy, dispatch.deinterleave(x, self.glu_interleave_size), None)
        return dispatch.interleave(dx, self.glu_interleave_size)


#: Name -> class of every activation whose rows cannot be interleaved.
PLAIN = operations_of(_ActivationOperation, lambda row: not (row.gated and row.row_scaled))
#: Name -> class of every gated activation that has kernels with a scale for each row: these take interleaved rows.
INTERLEAVED = operations_of(_InterleavedGLU, lambda row: row.gated and row.row_scaled)

# --- with a scale for every row -------------------------------------------------------------------


class ScaledActivation(ActivationParameters, ExtraTensorOperation):
    """y[row] = act(x[row]) * scales[row], float32 inside, one rounding: the middle of a grouped MLP.

    The extra input `scales` has the shape of the input without its last dimension. It is converted to the compute
    dtype (autocast's, else the input's), in which its gradient, sum(dy * act(x)) over a row, is rounded as well; it
    is returned only if the scales required one at forward. Neighbours' quantizers are ignored: output and
    input gradient are always in high precision.

    Raises:
        ValueError: at forward, for a number of scales other than the number of rows.
        RuntimeError: at forward, for a dtype that `activation_dtype` refuses.
    """

    num_extra_inputs = 1
    extra_input_names = ("scales",)

    def __init__(self, **parameters: float) -> None:
        super().__init__()
        self.set_parameters(parameters)

    def fuser_forward(
        self, basic_op_ctxs: Any, input_: Any, *, basic_op_extra_inputs: Any, basic_op_kwargs: Any, **unused: Any
    ) -> Any:
        reject_forward_kwargs(self, basic_op_kwargs[0])
        x, scales = self.begin_forward(basic_op_ctxs[0], input_, basic_op_extra_inputs[0][0])
        return self.rows_forward(x, scales), [()]

    def begin_forward(
        self, ctx: OperationContext, input_: torch.Tensor, scales: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Check and save the input and its scales, in the compute dtype, which are returned."""
        dtype = activation_dtype(input_)
        x = maybe_dequantize(input_, dtype)
        if scales.numel() != x.shape[:-1].numel():
            raise ValueError(
                f"scales must have one entry for each row of the input; got shape "
                f"{tuple(scales.shape)} for an input of shape {tuple(x.shape)}"
            )
        converted = maybe_dequantize(scales, dtype)
        if ctx.requires_grad:
            ctx.save_for_backward(x, converted)
            ctx.dtype = dtype
            ctx.extra_input_requires_grad = scales.requires_grad
        return x, converted

    def rows_forward(self, x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """The output for some rows."""
        try:
            return dispatch.scaled_activation(self.activation, x, scales, **self.activation_parameters())
        except (TypeError, ValueError) as error:
            say_who(error, f"input of shape {tuple(x.shape)}")
            raise

    def rows_backward(
        self, dy: torch.Tensor, x: torch.Tensor, scales: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of some rows and of their scales."""
        return dispatch.scaled_activation_grad(self.activation, dy, x, scales, **self.activation_parameters())

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, *, basic_op_grad_extra_outputs: Any) -> Any:
        ctx: OperationContext = basic_op_ctxs[0]
        x, scales = ctx.saved_tensors
        dx, dscales = self.rows_backward(maybe_dequantize(grad_output, ctx.dtype), x, scales)
        return dx, [()], [(dscales if ctx.extra_input_requires_grad else None,)]


class ScaledGLU(ScaledActivation):
    """A gated linear unit with a scale for every row.

    Args:
        glu_interleave_size: width of the blocks of interleaved rows, a multiple of 32 that divides the output's width;
            None for [a | b].
        activation_recompute_in_mlp: only False.

    Raises:
        ValueError: `activation_recompute_in_mlp` is True.
    """

    def __init__(
        self, glu_interleave_size: int | None = None, *, activation_recompute_in_mlp: bool = False, **parameters: float
    ) -> None:
        if activation_recompute_in_mlp:
            raise ValueError(
                f"{type(self).__name__} does not support activation recomputation; got activation_recompute_in_mlp=True"
            )
        super().__init__(**parameters)
        self.glu_interleave_size = glu_interleave_size
        self.activation_recompute_in_mlp = activation_recompute_in_mlp

    def activation_parameters(self) -> dict[str, Any]:
        return {**super().activation_parameters(), "glu_interleave_size": self.glu_interleave_size or 0}


class ScaledClampedQGeGLU(ScaledGLU):
    """`ClampedSwiGLU` times scales[row]; its settings are those of the contained `_clamped`, as in TE."""

    activation = "clamped_swiglu"

    def set_parameters(self, given: dict[str, float]) -> None:
        self._clamped = INTERLEAVED["ClampedSwiGLU"]()
        super().set_parameters(given)


def _of_clamped(name: str) -> property:
    """A parameter of `_clamped` as an attribute of the operation, which does not store it itself."""

    def read(self: Any) -> float:
        return getattr(self._clamped, name)

    def write(self: Any, value: float) -> None:
        setattr(self._clamped, name, value)

    return property(read, write)


for _name in _parameters_of("clamped_swiglu"):
    setattr(ScaledClampedQGeGLU, _name, _of_clamped(_name))
ScaledClampedQGeGLU.__signature__ = signature_of(  # type: ignore[attr-defined]
    ACTIVATIONS["clamped_swiglu"], ScaledGLU
)


class ScaledSReLU(ScaledActivation):
    """max(x, 0)^2 * scales[row].

    `activation_recompute_in_mlp=True` is for a fused grouped MLP (`fuser.fused.GroupedMLP`), which computes the output
    again in backward. Elsewhere such an operation raises RuntimeError when it runs.
    """

    activation = "srelu"

    def __init__(self, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__()
        self.activation_recompute_in_mlp = activation_recompute_in_mlp

    def fuser_forward(self, *args: Any, **kwargs: Any) -> Any:
        self._require_no_recompute()
        return super().fuser_forward(*args, **kwargs)

    def fuser_backward(self, *args: Any, **kwargs: Any) -> Any:
        self._require_no_recompute()
        return super().fuser_backward(*args, **kwargs)

    def _require_no_recompute(self):
        if self.activation_recompute_in_mlp:
            raise RuntimeError("ScaledSReLU with activation_recompute_in_mlp=True requires the fused grouped MLP path")


#: Name -> class of every activation with a scale for each row. TE has names and settings of its own for two.
SCALED: dict[str, Any] = {"ScaledClampedQGeGLU": ScaledClampedQGeGLU, "ScaledSReLU": ScaledSReLU}
SCALED |= {
    f"Scaled{row.op}": operation_of(row, ScaledGLU if row.gated else ScaledActivation, f"Scaled{row.op}", text)
    for row in ACTIVATIONS.values()
    for text in [f"`{row.op}` times scales[row]."]
    if row.row_scaled and row.name not in {cls.activation for cls in SCALED.values()}
}
for _classes in (PLAIN, INTERLEAVED, SCALED):
    publish(_classes, globals())

if TYPE_CHECKING:  # the classes of the three

    def __getattr__(name: str) -> type[Any]: ...
