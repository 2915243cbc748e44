"""What torch's tracers make of this package: who may record a call, who leaves it as it is, who is refused.

| tracer                            | operations and functions                                                         |
|-----------------------------------|----------------------------------------------------------------------------------|
| torch.compile, from torch 2.13 on | a pipeline, under any recipe, is one operator of the graph, forward and backward |
|                                   | (`fuser.operators`); so is a function of tensors without a quantizer. What       |
|                                   | `Pipeline.obstacle` names (hooks, quantized or deferred parameters, several      |
|                                   | processes, GroupedLinear, quantizers and operations of the user's ...), casts    |
|                                   | outside of operations, and `fuser.checkpoint` are called as they are, between    |
|                                   | the compiled parts; with fullgraph=True the error says why                       |
| torch.compile, older              | called as they are, between the compiled parts                                   |
| torch.func (grad, vmap ...)       | activations without a quantizer, and their first gradients; else `RuntimeError`  |
| torch.export                      | without a recipe recorded as operators of torch, forward alone; `RuntimeError`   |
|                                   | under a recipe, for casts and for GroupedLinear                                  |
| torch.jit.trace, torch.jit.script | `RuntimeError`: a trace would keep the results of kernels as constants           |
| torch.fx.symbolic_trace           | `TypeError`, unless the tracer takes them as leaves                              |
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.fx

_Function = TypeVar("_Function", bound=Callable[..., Any])
_INSTEAD = "use torch.export.export, or for ONNX torch.onnx.export(dynamo=True), outside of fuser.autocast"
_is_tracing = torch._C._is_tracing  # a third of the time of torch.jit.is_tracing
#: `is_exporting` is not in torch before 2.7.
_is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)


def exporting() -> bool:
    """Whether torch.export records this call. It has to see operators of torch, with no memory behind the tensors.

    torch's flag of a compilation holds in all threads, also in those that compute meanwhile: it is not asked.
    """
    if not _is_exporting() or torch.compiler.is_dynamo_compiling():
        return False
    return not _rehearsal.running


class _Rehearsal(threading.local):
    running: bool = False


_rehearsal = _Rehearsal()


def rehearsing() -> bool:
    """Whether operations run to tell torch.compile the shapes of their results: on tensors that have no elements.

    Kernels then make tensors of the right shapes; nothing is drawn, recorded or counted.
    """
    return _rehearsal.running


@contextlib.contextmanager
def rehearsal() -> Iterator[None]:
    """Make the calls of this block, in this thread, a rehearsal (`rehearsing`)."""
    outer, _rehearsal.running = _rehearsal.running, True
    try:
        yield
    finally:
        _rehearsal.running = outer


def refuse_trace(what: str) -> None:
    """Raise `RuntimeError` while torch.jit.trace records, for `what` is done by kernels."""
    if _is_tracing():
        raise RuntimeError(f"torch.jit.trace would keep the results of {what} as constants: {_INSTEAD}")


def refuse_strict_export() -> None:
    """Raise `RuntimeError` while torch.export traces by torch.compile's tracer."""
    if _is_exporting():
        raise RuntimeError("torch.export can't record operations of fuser with strict=True; use strict=False")


def refuse_proxy(value: Any, what: Any) -> None:
    """Raise `TypeError` if torch.fx.symbolic_trace gives a value to the operation `what`."""
    if isinstance(value, torch.fx.Proxy):
        raise TypeError(
            f"torch.fx.symbolic_trace can't trace {type(what).__name__}: make it a leaf "
            f"(torch.fx.Tracer.is_leaf_module), or {_INSTEAD}"
        )


#: The first torch whose compiler takes operators that return opaque objects, and saves these for backward.
_NEEDED = (2, 13)

try:
    from torch._library.effects import EffectType
    from torch._library.opaque_object import MemberType, get_opaque_type_name, register_opaque_type
    from torch._opaque_base import OpaqueBase

    _LACKS = ""
except ImportError:
    OpaqueBase, _LACKS = object, "opaque objects"  # type: ignore[assignment, misc]
if tuple(map(int, torch.__version__.split(".")[:2])) < _NEEDED:
    _LACKS = "opaque objects as results of operators"
#: Why torch.compile leaves all operations as they are; "" where it can put them into its graphs.
OLD_TORCH = (
    f"torch {torch.__version__} lacks {_LACKS}, which torch {'.'.join(map(str, _NEEDED))} has: operations of fuser "
    "can't be part of a graph of torch.compile"
    if _LACKS
    else ""
)


def define_operator(
    name: str,
    signature: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    *opaque: type,
    autograd: Any = None,
    effects: bool = True,
) -> None:
    """Define an operator of torch, `fuser::name`, where torch can have it in graphs.

    `signature`: of the operator; "{}" in it stands for the types `opaque`, in order. `kernel` computes, `fake` makes
    results without elements. `autograd`: (backward, setup_context) of `torch.library.register_autograd`; without it
    results require no gradient. `effects`: whether a graph must keep all calls, in their order.
    """
    if _library is None:
        return
    _library.define(name + signature.format(*map(get_opaque_type_name, opaque)))
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fuser::{name}", fake, lib=_library)
    operator = getattr(torch.ops.fuser, name).default
    if autograd is not None:
        backward, setup_context = autograd
        torch.library.register_autograd(f"fuser::{name}", backward, setup_context=setup_context, lib=_library)
    else:
        _library.impl(name, functools.partial(_without_autograd, operator), "Autograd")
    if effects:
        torch.library._register_effectful_op(operator, EffectType.ORDERED)


def _without_autograd(operator, *args):
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*args)


def register_opaque(kind: type, typ: str, *, guard: Any = None, constants: Iterable[str] = ()) -> None:
    """Let operators take and return objects of a class, where torch can: "value", equal ones are one constant of a
    graph, or "reference", each is an argument of it.

    `guard`: function of the object, whose result a graph holds for; `constants`: members that are read when a call is
    traced, and constants then.
    """
    if not OLD_TORCH:
        members = {name: MemberType.USE_REAL for name in constants}
        register_opaque_type(kind, typ=typ, guard_fn=guard, members=members)


def _itself(value: Any) -> Any:
    return value


class WhenTraced(OpaqueBase):
    """What torch.compile has done by Python itself: `value` is what `function()` returns.

    It is called where code is traced, and before each later call of the compiled code, which is traced again where
    another value is returned. A method's object, which has this one, is held weakly, or it would not be freed before a
    collection of cycles.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._find: Callable[[], Any] = (
            weakref.WeakMethod(function) if inspect.ismethod(function) else functools.partial(_itself, function)
        )

    @property
    def value(self) -> Any:
        return self._find()()

    def __reduce__(self) -> tuple[Any, ...]:
        return WhenTraced, (self._find(),)


_library = None if OLD_TORCH else torch.library.Library("fuser", "FRAGMENT")
register_opaque(WhenTraced, "reference", guard=lambda asked: [asked.value], constants=["value"])


def traces_checkpoint() -> bool:
    """Whether torch.compile traces a function given to `torch.utils.checkpoint`, which its graphs compute twice."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    tracer: Any = InstructionTranslator.current_tx().output.current_tracer
    while tracer is not None:
        if tracer.description == "torch.utils.checkpoint.checkpoint":
            return True
        tracer = tracer.parent
    return False


class NotScriptable:
    """Mixin of modules that torch.jit.script can't compile: it says so."""

    def __prepare_scriptable__(self) -> None:
        raise RuntimeError(f"torch.jit.script can't compile {type(self).__name__}, whose work kernels do: {_INSTEAD}")


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


_KERNELS = "kernels of fuser take no tensors of a trace"
#: Reason -> the function that torch.compile leaves alone for it, always the same: for a new one it would compile again.
_uncompiled: dict[str, Callable[..., Any]] = {}


def outside_compile(function: Callable[..., Any], *args: Any, reason: str = _KERNELS, **kwargs: Any) -> Any:
    """Call `function`; if torch.compile is tracing, it leaves the call as it is, and with fullgraph=True says why.

    It can say so if `leave_for(reason)` was called before, not in traced code (`WhenTraced`).
    """
    if _rehearsal.running or exporting():
        return function(*args, **kwargs)
    # Once there is something compiled: this frame may run as it is, past dynamo's limit of variants, in a compiled call
    if not torch.compiler.is_dynamo_compiling() and not _uncompiled:
        return function(*args, **kwargs)
    refuse_strict_export()
    if reason not in _uncompiled:
        leave_for(reason)
    return _uncompiled[reason](function, *args, **kwargs)


def leave_for(reason: str) -> str:
    """Make what `outside_compile` calls for a reason, which is returned; nothing for "", which is none."""
    if reason and reason not in _uncompiled:
        from torch import _dynamo  # slow to import, and needed by those who compile alone

        says_why = "reason" in inspect.signature(_dynamo.disable).parameters  # not before torch 2.8
        _uncompiled[reason] = _dynamo.disable(_call, **({"reason": reason} if says_why else {}))
    return reason


def untraced(
    function: _Function,
    *,
    recorded: Callable[..., Any] | None = None,
    rehearsed: Callable[..., Any] | None = None,
    in_graph: Callable[..., Any] | None = None,
) -> _Function:
    """Decorate a function that torch.compile shall call as it is: it can't trace memory shared with NumPy.

    `recorded`: what torch.export records in its place, `rehearsed`: what makes tensors of the right shapes in its place
    (`rehearsing`); by default what the function itself calls. `in_graph`: what torch.compile traces in its place, if
    all arguments are tensors and constants.
    """
    reason = f"fuser's {function.__qualname__} is done by kernels, which take no tensors of a trace"
    leave = WhenTraced(functools.partial(leave_for, reason))

    @functools.wraps(function)
    def call(*args, **kwargs):
        if _rehearsal.running:
            return (rehearsed or function)(*args, **kwargs)
        if torch.compiler.is_compiling():  # in some thread
            if exporting():
                return (recorded or function)(*args, **kwargs)
            if torch.compiler.is_dynamo_compiling():
                if in_graph is not None and not _is_exporting() and _all_of_graphs(args, kwargs):
                    return in_graph(*args, **kwargs)
                return outside_compile(function, *args, reason=leave.value, **kwargs)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def _all_of_graphs(args, kwargs):
    kinds = (torch.Tensor, str, bool, int, float, torch.dtype, type(None))
    return not OLD_TORCH and all([isinstance(value, kinds) for value in (*args, *kwargs.values())])


def traced_without_quantizer(function: _Function) -> _Function:
    """Decorate a function that torch.compile can trace, if all its arguments are tensors and constants."""
    return untraced(function, in_graph=function)
