"""Sum over ranks, as after a row-parallel linear layer."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fuser.common import maybe_dequantize
from fuser.distributed import all_reduce, get_distributed_world_size
from fuser.op import BasicOperation, OperationContext
from fuser.quantization.quantizer import Quantizer


class AllReduce(BasicOperation):
    """Sum of the input over the ranks of `process_group` (`None`: the default group).

    The backward pass returns the gradient without communication, as TE's does whatever `reduce_in_backward` says:
    every rank already holds the gradient of the sum. The input keeps its values (TE may reduce in place into it).
    """

    def __init__(
        self,
        process_group: torch.distributed.ProcessGroup | None = None,
        reduce_in_backward: bool = True,
    ) -> None:
        super().__init__()
        self.process_group = process_group
        self._reduce_in_backward = reduce_in_backward

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        *,
        prev_op_grad_output_quantizer: Quantizer | None = None,
        next_op_input_quantizer: Quantizer | None = None,
    ) -> torch.Tensor:
        if get_distributed_world_size(self.process_group) == 1:
            return input_
        return all_reduce(maybe_dequantize(input_), self.process_group)

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, Iterable[torch.Tensor | None]]:
        return grad_output, ()
