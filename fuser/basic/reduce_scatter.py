"""Reduce-scatter along dimension 0; its gradient is an all-gather."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fuser.common import maybe_dequantize
from fuser.distributed import gather_along_first_dim, reduce_scatter_along_first_dim
from fuser.op import BasicOperation, OperationContext
from fuser.quantization.quantizer import Quantizer


class ReduceScatter(BasicOperation):
    """The sum of `(p * n, ...)` over `p` ranks, of which each rank keeps its `(n, ...)` slice of dimension 0.

    `process_group=None` is the default group, which must be initialised. `RuntimeError` when dimension 0 isn't
    divisible by the number of ranks. In a group of one the op passes its input through.
    """

    def __init__(self, process_group: torch.distributed.ProcessGroup | None = None) -> None:
        super().__init__()
        self.process_group = process_group
        self.process_group_size = torch.distributed.get_world_size(process_group)

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        *,
        prev_op_grad_output_quantizer: Quantizer | None = None,
        next_op_input_quantizer: Quantizer | None = None,
    ) -> torch.Tensor:
        if self.process_group_size == 1:
            return input_.detach()
        return reduce_scatter_along_first_dim(maybe_dequantize(input_), self.process_group)

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, Iterable[torch.Tensor | None]]:
        if self.process_group_size == 1:
            return grad_output, ()
        return gather_along_first_dim(maybe_dequantize(grad_output), self.process_group), ()
