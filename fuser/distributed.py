"""Collectives that the ops need, over `torch.distributed`: the same code with gloo on CPU and NCCL on GPUs.

A process group of `None` is the default group, as in `torch.distributed`. Every function is free for a group of one
process, so that a model runs unchanged on one device. Nothing here knows about ops; quantizers and
`FP8GlobalStateManager` use `reduce_amax` alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from refops.arguments import shown


def get_distributed_world_size(group: dist.ProcessGroup | None = None) -> int:
    """Number of processes in `group`: 1 while `torch.distributed` isn't initialised."""
    return dist.get_world_size(_checked_group(group)) if is_initialized() else 1


def get_distributed_rank(group: dist.ProcessGroup | None = None) -> int:
    """Rank of this process in `group`: 0 while `torch.distributed` isn't initialised."""
    return dist.get_rank(_checked_group(group)) if is_initialized() else 0


def _checked_group(group):
    """The group; TypeError unless it is a process group, None, or torch's marker for a group of other processes."""
    if group is None or group is dist.GroupMember.NON_GROUP_MEMBER or isinstance(group, dist.ProcessGroup):
        return group
    raise TypeError(f"group must be a process group or None; got {shown(group)}")


def is_initialized() -> bool:
    """Whether `torch.distributed` is part of this build of torch and has its default process group."""
    return dist.is_available() and dist.is_initialized()


def gather_along_first_dim(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Concatenation over ranks along dimension 0: `(n, ...)` on each of `p` ranks becomes `(p * n, ...)` on all.

    Every rank must hold the same shape. The result is a new tensor; a group of one gets `tensor.detach()`.
    """
    size = get_distributed_world_size(group)
    if size == 1:
        return tensor.detach()
    source = tensor.detach().contiguous()
    gathered = source.new_empty((size * source.size(0), *source.shape[1:]))
    # NCCL moves bytes only in types it knows: FP8 and other codes travel as bytes
    if source.element_size() == 1:
        _all_gather(gathered.view(torch.uint8), source.view(torch.uint8), group)
    else:
        _all_gather(gathered, source, group)
    return gathered


def reduce_scatter_along_first_dim(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Sum over ranks; each rank keeps its slice of dimension 0: `(p * n, ...)` becomes `(n, ...)`.

    The sum runs in the dtype of `tensor`, as TE's does. `RuntimeError` when dimension 0 isn't divisible by the number
    of ranks.
    """
    size = get_distributed_world_size(group)
    if size == 1:
        return tensor.detach()
    if tensor.dim() == 0 or tensor.size(0) % size:
        raise RuntimeError(
            f"Attempted to reduce-scatter a tensor with shape={tuple(tensor.shape)} over {size} processes, "
            "but dimension 0 is not divisible by their number"
        )
    source = tensor.detach().contiguous()
    scattered = source.new_empty((source.size(0) // size, *source.shape[1:]))
    try:
        _reduce_scatter(scattered, source, group)
    except (RuntimeError, NotImplementedError) as error:
        if not _says_unsupported(error):
            raise
        scattered = reduce_scatter_by_all_reduce(source, group)
    return scattered


def reduce_scatter_by_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """`reduce_scatter_along_first_dim` by an all-reduce and a slice, for backends without it (older gloo)."""
    rows = tensor.size(0) // get_distributed_world_size(group)
    return all_reduce(tensor, group).narrow(0, get_distributed_rank(group) * rows, rows).clone()


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Sum over ranks in the dtype of `tensor`. The argument keeps its values; a group of one gets `tensor` itself."""
    if get_distributed_world_size(group) == 1:
        return tensor
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def reduce_amax(amax: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """In-place maximum over ranks of float32 `amax` (any shape): every rank then derives the same scale."""
    if get_distributed_world_size(group) > 1:
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    return amax


def _says_unsupported(error: Exception) -> bool:
    message = str(error).lower()
    return isinstance(error, NotImplementedError) or "support" in message or "not implemented" in message


def _renamed(new: str, old: str) -> Callable[..., object]:
    """torch 2.13 renamed the single-tensor collectives and warns about the old names."""
    return getattr(dist, new, None) or getattr(dist, old)


def _all_gather(output: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    _renamed("all_gather_single", "all_gather_into_tensor")(output, source, group=group)


def _reduce_scatter(output: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    _renamed("reduce_scatter_single", "reduce_scatter_tensor")(output, source, group=group)
