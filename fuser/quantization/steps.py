"""An optimizer's step on quantized parameters: their values are rounded once, and a step that does nothing raises.

An optimizer writes a parameter several times in one step, e.g. `mul_` for weight decay and then `add_`. Each write
makes codes anew. If the next one began with their values, each would round. So a running step keeps the values that it
wrote, and goes on from there; the codes are those of the last ones, rounded once. When the step ends, the values go:
there are no master weights between steps (`fuser.quantize_master_weights` is for those). Until then they take as much
memory as the parameters in their nominal dtype.

Steps are those of a `torch.optim.Optimizer`, through torch's hooks. In compiled code, and where an optimizer is another
class, every write rounds.
"""

import functools
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.sgd import sgd


@dataclass
class _Written:
    """Values that a step wrote, and the memory of their codes with its version then."""

    codes: torch.Tensor
    version: int
    values: torch.Tensor

    def overlaps(self, codes: torch.Tensor) -> bool:
        start, other = self.codes.data_ptr(), codes.data_ptr()
        return start < other + codes.nbytes and other < start + self.codes.nbytes


class _Step(threading.local):
    """The step that runs in this thread: what it wrote, by the storage of the codes. None: no step runs."""

    written: dict[int, list[_Written]] | None = None


_step = _Step()


def _codes_of(tensor: Any) -> torch.Tensor | None:
    """The first buffer of a quantized tensor: it tells which memory it is."""
    codes = next((array for array in tensor.get_data_tensors() if array is not None), None)
    return None if codes is None or codes.is_inference() or codes.is_meta else codes


def keep_values(tensor: Any, values: torch.Tensor, *, copy: bool = False) -> None:
    """Note the values that were just quantized into `tensor`, which a caller gives away unless `copy`."""
    if _step.written is None:
        return
    forget_values(tensor)
    codes = _codes_of(tensor)
    if codes is not None and values.data_ptr() != codes.data_ptr():  # not the memory of an unquantized one
        written = _Written(codes, codes._version, values.to(tensor.dtype, copy=copy))
        _step.written.setdefault(codes.untyped_storage().data_ptr(), []).append(written)


def kept_values(tensor: Any) -> torch.Tensor | None:
    """A copy of the values that the running step last wrote to `tensor`; None if its codes are all that there is."""
    if not _step.written:
        return None
    codes = _codes_of(tensor)
    for one in () if codes is None else _step.written.get(codes.untyped_storage().data_ptr(), ()):
        same_memory = (one.codes.data_ptr(), one.codes.nbytes) == (codes.data_ptr(), codes.nbytes)
        if same_memory and (one.version, one.values.dtype) == (codes._version, tensor.dtype):
            return one.values.clone().view(tensor.shape)
    return None


def forget_values(tensor: Any) -> None:
    """Note that the codes of `tensor` were written, or a part of them, from something else."""
    if not _step.written:
        return
    codes = _codes_of(tensor)
    if codes is not None:
        key = codes.untyped_storage().data_ptr()
        _step.written[key] = [one for one in _step.written.get(key, ()) if not one.overlaps(codes)]


def _begin(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_compiling():
        _require_moving(optimizer)
        _step.written = {}


def _end(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_compiling():
        _step.written = None


def _require_moving(optimizer: torch.optim.Optimizer) -> None:
    """Raise `RuntimeError` for a step that leaves parameters as they are: fused SGD in 16 bits on a CPU."""
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        if not group.get("fused"):
            continue
        for param in group["params"]:
            if param.grad is not None and param.device.type == "cpu" and not _fused_sgd_moves(param.dtype):
                raise RuntimeError(
                    f"torch.optim.SGD(fused=True) leaves parameters of {param.dtype} on a CPU as they are (torch "
                    f"{torch.__version__} does not store the new values); got one of shape {tuple(param.shape)}. "
                    "Use fused=False, or float32 parameters"
                )


@functools.cache
def _fused_sgd_moves(dtype: torch.dtype) -> bool:
    """Whether torch's kernel on a CPU stores what it computes: of 16 bits torch 2.13's stores a vector's remainder."""
    if dtype.itemsize != 2:
        return True
    param, grad = torch.zeros(64, dtype=dtype), torch.ones(64, dtype=dtype)
    with torch.no_grad():
        sgd(
            [param],
            [grad],
            [None],
            fused=True,
            weight_decay=0.0,
            momentum=0.0,
            lr=1.0,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
    return bool((param == -1).all())


register_optimizer_step_pre_hook(_begin)
register_optimizer_step_post_hook(_end)
