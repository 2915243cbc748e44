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
import sys
import threading
from dataclasses import dataclass
from types import FrameType
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
    """The step that runs in this thread, the outermost one: steps that it makes of other optimizers are parts of it.

    `frame`: of torch's function that calls the hooks and the step; None: no step runs. `written`: what it wrote, by the
    storage of the codes.
    """

    def __init__(self) -> None:
        self.frame: FrameType | None = None
        self.written: dict[int, list[_Written]] = {}

    def runs(self) -> bool:
        """Whether a step runs. One that raised an error is over without torch's hook at its end."""
        if self.frame is None:
            return False
        caller: FrameType | None = sys._getframe(1)
        while caller is not None and caller is not self.frame:
            caller = caller.f_back
        if caller is None:
            self.end()
        return caller is not None

    def end(self) -> None:
        """Let go what was written."""
        self.frame, self.written = None, {}


_step = _Step()


def _codes_of(tensor: Any) -> torch.Tensor | None:
    """The first buffer of a quantized tensor: it tells which memory it is."""
    codes = next((array for array in tensor.get_data_tensors() if array is not None), None)
    return None if codes is None or codes.is_inference() or codes.is_meta else codes


def keep_values(tensor: Any, values: torch.Tensor, *, copy: bool = False) -> None:
    """Note the values that were just quantized into `tensor`, which a caller gives away unless `copy`."""
    if not _step.runs():
        return
    forget_values(tensor)
    codes = _codes_of(tensor)
    if codes is not None and values.data_ptr() != codes.data_ptr():  # not the memory of an unquantized one
        written = _Written(codes, codes._version, values.to(tensor.dtype, copy=copy))
        _step.written.setdefault(codes.untyped_storage().data_ptr(), []).append(written)


def kept_values(tensor: Any) -> torch.Tensor | None:
    """A copy of the values that the running step last wrote to `tensor`; None if its codes are all that there is."""
    if not _step.written or not _step.runs():
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
    if torch.compiler.is_dynamo_compiling():
        return
    _require_moving(optimizer)
    if not _step.runs():
        _step.frame = sys._getframe(1)


def _end(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_dynamo_compiling() and _step.frame is sys._getframe(1):
        _step.end()


def _require_moving(optimizer: torch.optim.Optimizer) -> None:
    """Raise `RuntimeError` for a step that leaves parameters as they are: fused SGD in 16 bits on a CPU."""
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        if not group.get("fused"):
            continue
        for param in group["params"]:
            if param.grad is None or param.device.type != "cpu":
                continue
            if not _fused_sgd_moves(param.dtype, min(param.numel(), _PROBE)):
                raise RuntimeError(
                    f"torch.optim.SGD(fused=True) leaves elements of {param.dtype} parameters on a CPU as they are "
                    f"(torch {torch.__version__} does not store the new values); got one of shape "
                    f"{tuple(param.shape)}. Use fused=False, or float32 parameters"
                )


#: Elements of several vectors: with more elements fused SGD does not store a larger part of them.
_PROBE = 64


@functools.cache
def _fused_sgd_moves(dtype: torch.dtype, elements: int) -> bool:
    """Whether torch's kernel on a CPU stores all that it computes: in 16 bits torch 2.13's does the remainder alone
    that fills no vector."""
    if dtype.itemsize != 2:
        return True
    param, grad = (make(elements, dtype=dtype, device="cpu") for make in (torch.zeros, torch.ones))
    plain: Any = {"weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "maximize": False}
    with torch.no_grad():
        sgd([param], [grad], [None], fused=True, lr=1.0, **plain)
    return bool((param == -1).all())


register_optimizer_step_pre_hook(_begin)
register_optimizer_step_post_hook(_end)
