"""Who owns a tensor's memory: what may be written to or marked, and copies where two would share memory.

A caller's tensor carries no mark after a call, and an operation that works in place changes nothing that another holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fuser.fusible import FusibleOperation
from fuser.quantization.storage import QuantizedTensorStorage
from fuser.tracing import exporting, rehearsing


def is_one_of(tensor: Any, others: Sequence[Any]) -> bool:
    """Whether `tensor` is one of `others`, the same object."""
    return any(tensor is other for other in others)


def works_in_place(op: FusibleOperation) -> bool:
    """Whether `op` writes into its extra input, or into the gradient of its extra output."""
    return getattr(op, "in_place", False)


def overlap(tensor: Any, others: Iterable[Any]) -> bool:
    """Whether `tensor` is one of `others` or shares memory with one."""
    span = _memory_span(tensor)
    for other in others:
        if tensor is other:
            return True
        other_span = _memory_span(other)
        if span and other_span and span[0] < other_span[1] and other_span[0] < span[1]:
            return True
    return False


def _memory_span(tensor: Any) -> tuple[int, int] | None:
    """First address and end of a plain tensor's elements; None if there are none."""
    if (
        not isinstance(tensor, torch.Tensor)
        or isinstance(tensor, QuantizedTensorStorage)
        or tensor.is_meta
        or not tensor.numel()
    ):
        return None
    if exporting() or rehearsing():  # there is no memory
        return None
    start = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in contiguous memory of its own."""
    return tensor.clone(memory_format=torch.contiguous_format)


def copy_of_gradient(grad: torch.Tensor | None) -> torch.Tensor | None:
    """Gradient hook: a copy, None for an unused output."""
    return None if grad is None else own_copy(grad)


def tensors_in(basic_op_kwargs: Iterable[dict[str, Any]]) -> list[torch.Tensor]:
    """The tensors among the keyword arguments of operations."""
    return [value for kwargs in basic_op_kwargs for value in kwargs.values() if isinstance(value, torch.Tensor)]


def without_view(output: Any, given: Sequence[Any]) -> Any:
    """`output` in a form that autograd lets the caller change in place: no view, unless of memory that the caller gave.

    The alias shares the version counter, so that a change of what an operation saved is still an error in backward.
    """
    if type(output) is not torch.Tensor or not output._is_view() or overlap(output, given):
        return output
    return output.detach().requires_grad_(output.requires_grad)


def requiring_grad(extra_output: Any, unmarked: Sequence[Any]) -> Any:
    """Let consumers of an extra output see that it takes part in backward. One that is `unmarked` stays as it is."""
    if extra_output is None or not extra_output.is_floating_point():
        return extra_output
    if is_one_of(extra_output, unmarked):
        extra_output = extra_output.detach()
    return extra_output.requires_grad_(True)


def writable(tensor: torch.Tensor, op: FusibleOperation) -> torch.Tensor:
    """What a channel carries, as `op` may use it: a copy if it works in place, because others use the same memory.

    TE hands over the memory itself; an in-place residual then changes what the operations in between saved.
    """
    return own_copy(tensor).requires_grad_(tensor.requires_grad) if works_in_place(op) else tensor
