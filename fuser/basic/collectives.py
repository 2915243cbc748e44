"""Collectives as operations: all-reduce, and along dimension 0 all-gather and reduce-scatter, gradients of each other.

`process_group=None` is the default group. What ranks exchange is dequantized first, since their scales may differ. In
a group of one input and gradient pass as they are, quantized or not, as TE's do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from fuser.common import maybe_dequantize
from fuser.distributed import (
    all_reduce,
    gather_along_first_dim,
    get_distributed_world_size,
    reduce_scatter_along_first_dim,
)
from fuser.op import BasicOperation, OperationContext


def _exchangeable(tensor: Any, process_group: torch.distributed.ProcessGroup | None) -> Any:
    """`tensor` as ranks exchange it: dequantized, if there are several."""
    return tensor if get_distributed_world_size(process_group) == 1 else maybe_dequantize(tensor)


class _Collective(BasicOperation):
    """Exchanges its input, and perhaps the output's gradient, between the ranks of a group."""

    #: Functions of (tensor, process group): of the input, and of the output's gradient; None: the gradient passes
    #: unchanged.
    move: ClassVar[Callable[..., torch.Tensor]]
    move_gradient: ClassVar[Callable[..., torch.Tensor] | None] = None

    def __init__(self, process_group: torch.distributed.ProcessGroup | None = None) -> None:
        super().__init__()
        self.process_group = process_group

    def graph_obstacle(self) -> str:
        return "exchanges tensors with other processes"

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Any,
        *,
        prev_op_grad_output_quantizer: Any = None,
        next_op_input_quantizer: Any = None,
    ) -> torch.Tensor:
        return self.move(_exchangeable(input_, self.process_group), self.process_group)

    def op_backward(self, ctx: OperationContext, grad_output: Any) -> tuple[torch.Tensor, tuple[()]]:
        if self.move_gradient is None:
            return grad_output, ()
        return self.move_gradient(_exchangeable(grad_output, self.process_group), self.process_group), ()


class _RowCollective(_Collective):
    """Moves rows between the ranks of a group, which must be initialised (`ValueError`)."""

    def __init__(self, process_group: torch.distributed.ProcessGroup | None = None) -> None:
        super().__init__(process_group)
        torch.distributed.get_world_size(process_group)  # raises without a group


class AllGather(_RowCollective):
    """`(n, ...)` on each of `p` ranks becomes their concatenation `(p * n, ...)` on all of them."""

    move, move_gradient = staticmethod(gather_along_first_dim), staticmethod(reduce_scatter_along_first_dim)


class ReduceScatter(_RowCollective):
    """The sum of `(p * n, ...)` over `p` ranks, of which each rank keeps its `(n, ...)` slice of dimension 0.

    `RuntimeError` when dimension 0 isn't divisible by the number of ranks.
    """

    move, move_gradient = staticmethod(reduce_scatter_along_first_dim), staticmethod(gather_along_first_dim)


class AllReduce(_Collective):
    """Sum of the input over the ranks of `process_group`, as after a row-parallel linear layer.

    The backward pass returns the gradient without communication, as TE's does whatever `reduce_in_backward` says:
    every rank already holds the gradient of the sum. The input keeps its values (TE may reduce in place into it).
    """

    move = staticmethod(all_reduce)

    def __init__(
        self, process_group: torch.distributed.ProcessGroup | None = None, reduce_in_backward: bool = True
    ) -> None:
        super().__init__(process_group)
