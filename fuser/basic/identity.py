"""The operation that does nothing."""

from typing import Any

from fuser.op import BasicOperation, OperationContext


class Identity(BasicOperation):
    """Returns its input, quantized or not."""

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Any,
        *,
        prev_op_grad_output_quantizer: Any = None,
        next_op_input_quantizer: Any = None,
    ) -> Any:
        return input_

    def passed_through(self, input_: Any) -> Any:
        """The output as a view of the input, in torch's sense."""
        return input_

    def op_backward(self, ctx: OperationContext, grad_output: Any) -> tuple[Any, tuple[()]]:
        return grad_output, ()
