"""Both ends of a residual branch: `MakeExtraOutput` starts it, `AddExtraInput` adds it."""

from typing import Any

from fuser.common import maybe_dequantize, reject_forward_kwargs
from fuser.op import ExtraTensorOperation


class _BranchEnd(ExtraTensorOperation):
    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self._in_place = in_place

    @property
    def in_place(self) -> bool:
        return self._in_place


class MakeExtraOutput(_BranchEnd):
    """Returns `(x, x)`: the input for the next operation, and again as an extra output. Their gradients add up.

    `in_place`: adds into the memory of the extra output's gradient, so that a following linear can accumulate there.
    Whoever made that gradient must not use it afterwards; a fuser hands over a copy if the same memory is the gradient
    of another output as well.
    """

    num_extra_outputs = 1

    def fuser_forward(self, basic_op_ctxs: Any, input_: Any, *, basic_op_kwargs: Any, **unused: Any) -> Any:
        reject_forward_kwargs(self, basic_op_kwargs[0])
        return input_, [(input_,)]

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, *, basic_op_grad_extra_outputs: Any) -> Any:
        grad_extra = basic_op_grad_extra_outputs[0][0]
        if grad_extra is None:
            grad_input = grad_output
        elif self._in_place:
            # An expanded gradient (that of a sum) has no memory of its own to add to.
            grad_input = grad_extra.contiguous()
            grad_input += grad_output
        else:
            grad_input = grad_extra + grad_output
        return grad_input, [()], [()]


class AddExtraInput(_BranchEnd):
    """`extra + x` for an extra input of the shape of `x`; both get the output's gradient.

    `in_place`: adds into the extra input's memory and returns a view of it, so that a preceding linear can accumulate
    there. The extra input has changed afterwards; a fuser hands over a copy instead if the caller gave the same memory
    as another input of the pipeline as well.
    """

    num_extra_inputs = 1
    extra_input_names = ("summand",)

    def fuser_forward(
        self, basic_op_ctxs: Any, input_: Any, *, basic_op_extra_inputs: Any, basic_op_kwargs: Any, **unused: Any
    ) -> Any:
        reject_forward_kwargs(self, basic_op_kwargs[0])
        extra_input = basic_op_extra_inputs[0][0]
        if self._in_place:
            output = extra_input.detach()
            output += maybe_dequantize(input_)
        else:
            output = maybe_dequantize(extra_input) + maybe_dequantize(input_)
        return output, [()]

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, *, basic_op_grad_extra_outputs: Any) -> Any:
        return grad_output, [()], [(grad_output,)]
