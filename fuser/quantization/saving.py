"""Quantized tensors and autograd's `save_for_backward`, which takes tensors alone.

Behaviour: TE's quantized_tensor.py (`prepare_for_saving`, `restore_from_saved`, `restore_from_func_ctx`).
"""

from typing import Any

import torch

from fuser.quantization.grouped import GroupedTensorStorage
from fuser.quantization.storage import QuantizedTensorStorage, shallow_copy

__all__ = ["prepare_for_saving", "restore_from_func_ctx", "restore_from_saved"]

_PLAIN = {torch.Tensor, torch.nn.Parameter, type(None)}


def prepare_for_saving(*tensors: Any) -> tuple[list[torch.Tensor | None], list[Any]]:
    """Split tensors into what autograd can save and the rest.

    Args:
        *tensors: `torch.Tensor` (quantized ones too) and None pass through; of a storage the buffers are listed.

    Returns:
        (flat list of tensors, one object for each argument: None, or a storage without data. It is a new one, where TE
        empties the storage itself: the caller's stays whole, and the same storage can be saved twice).

    Raises:
        TypeError: an argument of another type.
    """
    if _PLAIN.issuperset(map(type, tensors)):
        return list(tensors), [None] * len(tensors)
    flat: list[Any] = []
    objects: list[Any] = []
    for tensor in tensors:
        if tensor is None or isinstance(tensor, torch.Tensor):
            flat.append(tensor)
            objects.append(None)
            continue
        if not isinstance(tensor, QuantizedTensorStorage | GroupedTensorStorage):
            raise TypeError(
                f"tensors must be tensors, quantized or grouped storages, or None; got {type(tensor).__name__}"
            )
        buffers, shell = shallow_copy(tensor).prepare_for_saving()
        flat.extend(buffers)
        objects.append(shell)
    return flat, objects


def restore_from_saved(objects: list[Any], saved: list[torch.Tensor | None], return_saved_tensors: bool = False) -> Any:
    """Undo `prepare_for_saving`.

    Args:
        objects, saved: what it returned. More tensors in `saved` are left alone.
        return_saved_tensors: also return those.

    Returns:
        One tensor or storage for each object; with `return_saved_tensors` (that, the tensors that are left).
    """
    rest, restored = list(saved), []
    for shell in objects:
        if shell is None:
            restored.append(rest.pop(0))
        else:
            rest = shell.restore_from_saved(rest)
            restored.append(shell)
    return (restored, rest) if return_saved_tensors else restored


def restore_from_func_ctx(ctx: Any, return_saved_tensors: bool = False) -> Any:
    """`restore_from_saved(ctx.tensor_objects, ctx.saved_tensors)`, then `ctx.tensor_objects = None` to free memory.

    Raises:
        AttributeError: `ctx` has no `tensor_objects`, or they were restored before.
    """
    if getattr(ctx, "tensor_objects", None) is None:
        raise AttributeError("ctx must have .tensor_objects to restore saved tensors")
    restored = restore_from_saved(ctx.tensor_objects, ctx.saved_tensors, return_saved_tensors)
    ctx.tensor_objects = None
    return restored
