"""The manager that plans and runs a list of operations: it fuses them and splits the list where operations have hooks.

`OperationFuser(ops)` is called like a function of the input. `register_*_fusion` adds a fusion for all fusers,
`fusions` for a scope. Behaviour: TE's ops/fuser.py, except: parameters are read at every call and operations are fused
again when anything changes that can change a fusion or a quantizer (`OperationFuser.maybe_fuse_ops`); hooks of
operations run; no mark stays on a caller's tensor; a second backward works with `retain_graph=True`; under a recipe
with `backward_override` no operation is asked for a quantized gradient (TE's activations emit one); memory that an
operation works on in place is copied first if it is that of another tensor that the caller gave; outputs in memory of
their own are no views, so the caller may change them in place.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from fuser.aliasing import copy_of_gradient, works_in_place, writable
from fuser.channels import ChanneledOperation, Routes, Slot
from fuser.fusible import FusibleOperation
from fuser.pipeline import Pipeline
from fuser.tracing import refuse_proxy

FusionFunction = Callable[..., list[FusibleOperation]]


def fusion_steps(
    functions: Iterable[FusionFunction], ops: list[FusibleOperation], recipe: Any
) -> Iterator[tuple[FusionFunction, list[FusibleOperation], list[FusibleOperation]]]:
    """Apply fusion functions in order; yields each function with the operations before and after it.

    `RuntimeError` for a function that returns anything but a list of operations.
    """
    for function in functions:
        before, ops = ops, function(ops, recipe=recipe)
        returned = ops if isinstance(ops, (list, tuple)) else [ops]
        wrong = [type(op).__name__ for op in returned if not isinstance(op, FusibleOperation)]
        if wrong or returned is not ops:
            name = getattr(function, "__name__", repr(function))
            got = f"{wrong[0]} in it" if returned is ops else type(ops).__name__
            raise RuntimeError(f"Expected fusion function {name} to return a list of operations, but got {got}")
        yield function, before, ops


def _fuse(functions: Iterable[FusionFunction], ops: list[FusibleOperation], recipe: Any) -> list[FusibleOperation]:
    fused = ops
    for _, _, after in fusion_steps(functions, ops, recipe):
        fused = after
    return fused


class OperationFuser(Pipeline):
    """Runs a list of operations, fused as the registered fusion functions decide.

    `ops`: basic or fused operations; fused ones are expanded to their basic operations and fused anew. Building a fuser
    locks the channels of its operations. Not a module: `fuser.ops.Sequential` is the module that uses it.
    """

    forward_backward_fusion_functions: list[FusionFunction] = []  # noqa: RUF012 (global registry, as in TE)
    forward_fusion_functions: list[FusionFunction] = []  # noqa: RUF012
    backward_fusion_functions: list[FusionFunction] = []  # noqa: RUF012

    def __init__(self, ops: Sequence[FusibleOperation]) -> None:
        self._build(ops)

    def _build(self, ops: Sequence[FusibleOperation]) -> None:
        basic_ops: list[Any] = []
        for op in ops:
            basic_ops.extend(op.basic_ops if op.is_fused_op else [op])
        self._setup(list(ops), basic_ops, Routes.of(basic_ops))
        for op in basic_ops:
            op._extra_tensor_channels_locked = True

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies are fused anew: plans and keys refer to the original's operations."""
        return (type(self), (self._ops,))

    # ------------------------------------------------------------------ hooks

    def _run_in_parts(
        self,
        hooked: list[FusibleOperation],
        input_: torch.Tensor,
        extra_inputs: Sequence[torch.Tensor],
        basic_op_kwargs: list[dict[str, Any]],
    ) -> Any:
        """Call operations that have hooks as modules, for torch to run the hooks, and fuse what lies between them.

        Data that crosses from one part to the next is in high precision.
        """
        tensors: dict[Slot, Any] = {}
        external = dict(zip(self._routes.external_inputs, extra_inputs, strict=True))
        x = input_
        for part in self._parts_around(hooked):
            part_inputs = []
            for i, slot in part.fuser._routes.external_inputs:
                index = part.start + i
                source = self._routes.input_sources[index][slot]
                outside = source is None
                part_inputs.append(
                    external[index, slot] if outside else writable(tensors[source], self._basic_ops[index])
                )
            kwargs = basic_op_kwargs[part.start : part.start + part.fuser._num_basic_ops]
            result = part.run(x, part_inputs, kwargs)
            public = part.fuser._routes.public_outputs
            if public:
                x, *outputs = result
                for (i, slot), y in zip(public, outputs, strict=True):
                    tensors[part.start + i, slot] = y
                    if y.requires_grad and works_in_place(self._basic_ops[part.start + i]):
                        y.register_hook(copy_of_gradient)  # its backward adds to a gradient that others may hold
            else:
                x = result
        outputs = [tensors[slot] for slot in self._routes.public_outputs]
        return (x, *outputs) if outputs else x

    def parts(self) -> list[OperationFuser]:
        """The fusers that a call uses: this one, or with hooks those of its parts."""
        hooked = self._hooked_ops()
        if hooked:
            return [sub_fuser for part in self._parts_around(hooked) for sub_fuser in part.fuser.parts()]
        return [self]

    def _parts_around(self, hooked: list[FusibleOperation]) -> list[_Part]:
        key = tuple(hooked)
        if key not in self._parts:
            self._parts[key] = self._make_parts(set(hooked))
        return self._parts[key]

    def _make_parts(self, hooked: set[FusibleOperation]) -> list[_Part]:
        parts: list[_Part] = []
        plain_start = start = 0

        def end_plain(stop: int) -> None:
            if stop > plain_start:
                parts.append(_Part(self._sub_fuser(self._basic_ops[plain_start:stop], plain_start), plain_start))

        for op in self._ops:
            members = list(op.basic_ops) if op.is_fused_op else [op]
            for callee in [op] if op in hooked else members:
                count = len(members) if callee is op else 1
                if callee in hooked:
                    end_plain(start)
                    sub_fuser = self._sub_fuser(self._basic_ops[start : start + count], start)
                    if callee is op and op.is_fused_op:
                        sub_fuser._hook_owners = members
                    parts.append(_Part(sub_fuser, start, callee))
                    plain_start = start + count
                start += count
        end_plain(start)
        return parts

    def _sub_fuser(self, basic_ops: list[ChanneledOperation], start: int) -> OperationFuser:
        fuser = OperationFuser.__new__(OperationFuser)
        fuser._setup(list(basic_ops), list(basic_ops), self._routes.part(start, start + len(basic_ops)))
        fuser._hook_owners = []
        fuser._start = start
        return fuser

    # ------------------------------------------------------------------ fusing

    def fuse_ops(self, recipe: Any) -> None:
        """Apply the registered fusions: joint ones first, then those of each pass on their result."""
        joint = _fuse(self.forward_backward_fusion_functions, list(self._basic_ops), recipe)
        forward = _fuse(self.forward_fusion_functions, list(joint), recipe)
        backward = _fuse(self.backward_fusion_functions, list(joint), recipe)
        self._forward_ops = self._map_to_basic_ops(forward)
        self._backward_ops = self._map_to_basic_ops(backward)

    def _map_to_basic_ops(self, ops: Sequence[FusibleOperation]) -> list[tuple[FusibleOperation, list[int]]]:
        """Each operation with the indices of its basic operations. `RuntimeError` unless all are there, in order."""
        mapped: list[tuple[FusibleOperation, list[int]]] = []
        basic_ops: list[FusibleOperation] = []
        for op in ops:
            members = list(op.basic_ops) if op.is_fused_op else [op]
            mapped.append((op, list(range(len(basic_ops), len(basic_ops) + len(members)))))
            basic_ops.extend(members)
        if len(basic_ops) != self._num_basic_ops or not all(map(operator.is_, basic_ops, self._basic_ops)):
            raise RuntimeError(
                "Found mismatch after fusing operations "
                f"(basic_ops={[op.__class__.__name__ for op in self._basic_ops]}, "
                f"fused_ops={[op.__class__.__name__ for op in ops]})"
            )
        return mapped


@dataclass
class _Part:
    """A stretch of operations that runs by itself; `callee`: the operation with hooks that it is, if it is one."""

    fuser: OperationFuser
    start: int
    callee: FusibleOperation | None = None

    def run(self, x: torch.Tensor, extra_inputs: list[Any], basic_op_kwargs: list[dict[str, Any]]) -> Any:
        if self.callee is None:
            return self.fuser._run(x, extra_inputs, basic_op_kwargs)
        outer = _called.set((self.callee, self.fuser))
        try:
            if self.callee.is_fused_op:
                return self.callee(x, *extra_inputs, basic_op_kwargs=basic_op_kwargs)
            return self.callee(x, *extra_inputs, **basic_op_kwargs[0])
        finally:
            _called.reset(outer)


#: The operation that a pipeline of this thread calls as a module, and its fuser. A hook may call the same one again.
_called: ContextVar[tuple[FusibleOperation, OperationFuser] | None] = ContextVar("fuser_called", default=None)


def run_alone(
    op: FusibleOperation,
    input_: torch.Tensor,
    extra_inputs: Sequence[Any],
    basic_op_kwargs: list[dict[str, Any]] | None,
) -> Any:
    """Forward of an operation called as a module: by a fuser of its own, or that of the pipeline that calls it."""
    refuse_proxy(input_, op)
    called = _called.get()
    if called is not None and called[0] is op:
        fuser = called[1]
    else:
        fuser = OperationFuser([op])
        fuser._hook_owners = list(op.basic_ops) if op.is_fused_op else []
        fuser._ops = list(op.basic_ops) if op.is_fused_op else [op]
    return fuser(input_, *extra_inputs, basic_op_kwargs=basic_op_kwargs)


# ---------------------------------------------------------------------- registering fusions


def _register(kind: str, func: FusionFunction, prepend: bool) -> FusionFunction:
    functions = getattr(OperationFuser, f"{kind}_fusion_functions")
    functions.insert(0 if prepend else len(functions), func)
    return func


def register_forward_backward_fusion(func: FusionFunction, prepend: bool = False) -> FusionFunction:
    """Register `func(ops, *, recipe) -> ops` for both passes; its fused operations run in both. Returns `func`."""
    return _register("forward_backward", func, prepend)


def register_forward_fusion(func: FusionFunction, prepend: bool = False) -> FusionFunction:
    """Register `func(ops, *, recipe) -> ops` for forward (`prepend`: before all others). Returns `func`."""
    return _register("forward", func, prepend)


def register_backward_fusion(func: FusionFunction, prepend: bool = False) -> FusionFunction:
    """Register `func(ops, *, recipe) -> ops` for the backward pass of every fuser. Returns `func`."""
    return _register("backward", func, prepend)


class fusions:  # noqa: N801 (used like a function)
    """Fusions for a scope: `with fusions(forward=f): ...`, or `handle = fusions(...).register()`, `handle.remove()`.

    `forward`, `backward`, `forward_backward`: fusion functions (one or several). `prepend`: before those registered
    already.
    `only`: without those registered already. Fusers follow at their next call.
    """

    _KINDS = ("forward_backward", "forward", "backward")
    _numbers = itertools.count()
    _hiding: list[fusions] = []  # noqa: RUF012 (scopes with `only` in force, in order of registration)

    def __init__(
        self,
        *,
        forward: FusionFunction | Iterable[FusionFunction] = (),
        backward: FusionFunction | Iterable[FusionFunction] = (),
        forward_backward: FusionFunction | Iterable[FusionFunction] = (),
        prepend: bool = False,
        only: bool = False,
    ) -> None:
        given = {"forward_backward": forward_backward, "forward": forward, "backward": backward}
        self._functions = {kind: [value] if callable(value) else list(value) for kind, value in given.items()}
        self._prepend = prepend
        self._only = only
        self._hidden: dict[str, list[FusionFunction]] = {}
        self._registered = False
        self._number = 0

    def register(self) -> fusions:
        """Put the fusions in force until `remove`. Returns self. `RuntimeError` if they are already."""
        if self._registered:
            raise RuntimeError("These fusions are registered already")
        self._registered = True
        self._number = next(self._numbers)
        if self._only:
            self._hiding.append(self)
        for kind in self._KINDS:
            functions = getattr(OperationFuser, f"{kind}_fusion_functions")
            if self._only:
                self._hidden[kind] = list(functions)
                functions.clear()
            position = 0 if self._prepend else len(functions)
            functions[position:position] = self._functions[kind]
        return self

    def remove(self) -> None:
        """Take the fusions out again (and bring back those that `only` hid), in any order. Once more does nothing."""
        if not self._registered:
            return
        self._registered = False
        if self._only:
            self._hiding.remove(self)
        for kind in self._KINDS:
            functions = self._functions_beside(kind)
            for function in self._functions[kind]:
                # by identity, and the latest one: the same function may be registered outside this scope too
                position = max((i for i, other in enumerate(functions) if other is function), default=None)
                if position is not None:
                    del functions[position]
            functions[:0] = self._hidden.pop(kind, [])

    def _functions_beside(self, kind: str) -> list[FusionFunction]:
        """The list that this scope's functions are in: that of a later scope that hides them, else the registry."""
        for scope in self._hiding:
            if scope._number > self._number:
                return scope._hidden[kind]
        return getattr(OperationFuser, f"{kind}_fusion_functions")

    def __enter__(self) -> fusions:
        return self.register()

    def __exit__(self, *exc_info: Any) -> None:
        self.remove()
