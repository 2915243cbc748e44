"""What torch's tracers make of this package: who may record a call, who leaves it as it is, who is refused.

| tracer                            | operations and functions                                                         |
|-----------------------------------|----------------------------------------------------------------------------------|
| torch.compile                     | called as they are, between the compiled parts                                   |
| torch.export                      | without a recipe recorded as operators of torch, forward alone; `RuntimeError`   |
|                                   | under a recipe, for casts and for GroupedLinear                                  |
| torch.jit.trace, torch.jit.script | `RuntimeError`: a trace would keep the results of kernels as constants           |
| torch.fx.symbolic_trace           | `TypeError`, unless the tracer takes them as leaves                              |
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.fx

_Function = TypeVar("_Function", bound=Callable[..., Any])
_INSTEAD = "use torch.export.export, or for ONNX torch.onnx.export(dynamo=True), outside of fuser.autocast"
_is_tracing = torch._C._is_tracing  # a third of the time of torch.jit.is_tracing
_is_exporting = getattr(torch.compiler, "is_exporting", bool)  # not before torch 2.7


def exporting() -> bool:
    """Whether torch.export records this call. It has to see operators of torch, with no memory behind the tensors."""
    return torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()


def refuse_trace(what: str) -> None:
    """Raise `RuntimeError` while torch.jit.trace records, for `what` is done by kernels."""
    if _is_tracing():
        raise RuntimeError(f"torch.jit.trace would keep the results of {what} as constants: {_INSTEAD}")


def refuse_proxy(value: Any, what: Any) -> None:
    """Raise `TypeError` if torch.fx.symbolic_trace gives a value to the operation `what`."""
    if isinstance(value, torch.fx.Proxy):
        raise TypeError(
            f"torch.fx.symbolic_trace can't trace {type(what).__name__}: make it a leaf "
            f"(torch.fx.Tracer.is_leaf_module), or {_INSTEAD}"
        )


class NotScriptable:
    """Mixin of modules that torch.jit.script can't compile: it says so."""

    def __prepare_scriptable__(self) -> None:
        raise RuntimeError(f"torch.jit.script can't compile {type(self).__name__}, whose work kernels do: {_INSTEAD}")


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


_call_uncompiled: Callable[..., Any] | None = None


def outside_compile(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function`; if torch.compile is tracing, it leaves the call as it is: kernels need no compiling."""
    global _call_uncompiled
    # Once there is something compiled: this frame may run as it is, past dynamo's limit of variants, in a compiled call
    if exporting() or (_call_uncompiled is None and not torch.compiler.is_compiling()):
        return function(*args, **kwargs)
    if _is_exporting():
        raise RuntimeError("torch.export can't record operations of fuser with strict=True; use strict=False")
    if _call_uncompiled is None:  # one object for all calls: torch.compile would compile anew for another
        from torch import _dynamo  # slow to import, and needed by those who compile alone

        _call_uncompiled = _dynamo.disable(_call)
    return _call_uncompiled(function, *args, **kwargs)


def untraced(function: _Function, *, recorded: Callable[..., Any] | None = None) -> _Function:
    """Decorate a function that torch.compile shall call as it is: it can't trace memory shared with NumPy.

    `recorded`: what torch.export records in its place; by default what the function itself calls.
    """

    @functools.wraps(function)
    def call(*args, **kwargs):
        if torch.compiler.is_compiling():
            return outside_compile(recorded if recorded and exporting() else function, *args, **kwargs)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]
