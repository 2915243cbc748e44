"""Quantization as a separate operation, mostly to see or test what other operations fuse."""

from typing import Any

from fuser.op import BasicOperation, OperationContext
from fuser.overflow import warn_of_hidden_overflow
from fuser.quantization.state import FP8GlobalStateManager
from fuser.quantization.storage import QuantizedTensorStorage


class Quantize(BasicOperation):
    """Quantizes its input (`forward`) and its output gradient (`backward`) under `autocast`; else the identity.

    Data that is quantized already stays as it is. Neighbours see its quantizers, so they may emit quantized data
    themselves. Backward is not quantized under a recipe with `backward_override`.
    """

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__()
        self._quantize_forward = forward
        self._quantize_backward = backward
        self.returns_quantized = forward

    def num_quantizers(self, mode: str) -> int:
        return int(self._quantize_forward if mode == "forward" else self._quantize_backward)

    def op_forward(
        self, ctx: OperationContext, input_: Any, *, prev_op_grad_output_quantizer: Any, next_op_input_quantizer: Any
    ) -> Any:
        state = FP8GlobalStateManager.quantization_state
        enabled = state.fp8_enabled
        override = state.fp8_recipe.backward_override if enabled else None
        # Not asked for in backward: by then the operation may have run under another recipe, or none
        quantizes_backward = enabled and self._quantize_backward and override is None
        ctx.grad_output_quantizer = self.get_quantizer("backward", 0) if quantizes_backward else None
        if enabled and self._quantize_forward and not isinstance(input_, QuantizedTensorStorage):
            return self.get_quantizer("forward", 0)(input_)
        return input_

    def passed_through(self, input_: Any) -> Any:
        """The input, if the operation passes it through unchanged; else None."""
        return None if FP8GlobalStateManager.is_fp8_enabled() else input_

    def op_backward(self, ctx: OperationContext, grad_output: Any) -> tuple[Any, tuple[()]]:
        if ctx.grad_output_quantizer is not None and not isinstance(grad_output, QuantizedTensorStorage):
            warn_of_hidden_overflow(grad_output, ctx.grad_output_quantizer)
            grad_output = ctx.grad_output_quantizer(grad_output)
        return grad_output, ()
