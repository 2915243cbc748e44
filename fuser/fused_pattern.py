"""How a fusion says what it looks for: one description both fuses and explains.

A fusion function takes the operations of a pass and returns them with some windows replaced by fused operations.
Written as a bare loop it can't say why it left a window alone. `WindowFusion` is such a function built from a
description, so that the decision (`fusion(ops, recipe=recipe)`) and its explanation (`fusion.candidates(ops, recipe)`)
are the same code and can't diverge::

    class ForwardLinearBiasAdd(FusedOperation):
        def __init__(self, *, linear, bias, add): ...

    def _objection(*window, recipe):
        linear, *_, add = window
        if not add.in_place:
            return "AddExtraInput is not in place"
        if linear.tensor_parallel_mode == "row":
            return "the linear is row parallel"
        return None

    ForwardLinearBiasAdd.fuse_forward_ops = WindowFusion(
        ForwardLinearBiasAdd,
        patterns=[(BasicLinear, Bias, AddExtraInput), (BasicLinear, AddExtraInput)],
        objection=_objection,
        build=lambda *window: ForwardLinearBiasAdd(linear=window[0], bias=..., add=window[-1]),
    )
    register_forward_fusion(ForwardLinearBiasAdd.fuse_forward_ops)

Types go into `patterns`; everything else that must hold goes into `objection`, whose words the user reads in
`fuser.explain`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Pattern = Sequence[type | tuple[type, ...]]


@dataclass(frozen=True)
class Candidate:
    """A window of operations that a fusion looked at.

    `start`, `stop`: the half-open range in the list given. `operations`: what lies there (without the kept leading
    ones).
    `reason`: None if the window is fused, else why it is not.
    """

    fusion: str
    start: int
    stop: int
    operations: tuple[Any, ...]
    reason: str | None = None

    @property
    def fired(self) -> bool:
        return self.reason is None


class WindowFusion:
    """A fusion function that replaces windows of given types by a fused operation.

    `fused_class`: gives the name and, without `build`, the constructor, called with the window's operations in order.
    `patterns`: alternatives, each a tuple of types (or tuples of types); at each position the first one that fires
    wins.
    `objection(*window, recipe=)`: why this window can't be fused, or None. It gets the whole window, kept operations
    included.
    `keep`: how many leading operations of a window are context only: they stay and are not given to `build`.
    Instances are hashable, callable as `fusion(ops, *, recipe=None, **unused) -> list` and can be registered as they
    are.
    """

    def __init__(
        self,
        fused_class: type,
        *,
        patterns: Iterable[Pattern],
        objection: Callable[..., str | None] | None = None,
        build: Callable[..., Any] | None = None,
        keep: int = 0,
    ) -> None:
        self.fused_class = fused_class
        self.patterns = [tuple(pattern) for pattern in patterns]
        self.objection = objection
        self.build = fused_class if build is None else build
        self.keep = keep
        self.__name__ = fused_class.__name__

    def __repr__(self) -> str:
        return f"WindowFusion({self.__name__})"

    def candidates(self, ops: Sequence[Any], recipe: Any = None) -> Iterator[Candidate]:
        """Every window whose types match, in order; those that fire don't overlap."""
        position = 0
        while position < len(ops):
            step = 1
            for window in self._windows_at(ops, position):
                reason = self.objection(*window, recipe=recipe) if self.objection else None
                start, stop = position + self.keep, position + len(window)
                yield Candidate(self.__name__, start, stop, tuple(window[self.keep :]), reason)
                if reason is None:
                    step = len(window) - self.keep  # the last operations may be the context of the next window
                    break
            position += step

    def _windows_at(self, ops: Sequence[Any], position: int) -> Iterator[Sequence[Any]]:
        for pattern in self.patterns:
            window = ops[position : position + len(pattern)]
            if len(window) == len(pattern) and all(map(isinstance, window, pattern)):
                yield window

    def __call__(self, ops: Sequence[Any], *, recipe: Any = None, **unused: Any) -> list[Any]:
        """`ops` with every window that fires replaced by its fused operation. `ops` itself is not changed."""
        fused: list[Any] = []
        taken = 0
        for candidate in self.candidates(ops, recipe):
            if candidate.fired:
                fused.extend(ops[taken : candidate.start])
                fused.append(self.build(*candidate.operations))
                taken = candidate.stop
        fused.extend(ops[taken:])
        return fused
