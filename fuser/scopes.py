"""`scope`: `contextlib.contextmanager` for contexts that can be entered any number of times, even while active.

What `contextmanager` makes works once. `s = fuser.products("hopper")` is one setting, which several `with s:` share.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Yielded = TypeVar("_Yielded", covariant=True)

#: The scopes that the current thread or task has entered, each with the context that it left to be closed.
_entered: ContextVar[tuple[tuple["Scope[Any]", AbstractContextManager[Any]], ...]] = ContextVar(
    "fuser_scopes", default=()
)


class Scope(ContextDecorator, Generic[_Yielded]):
    """A context manager and decorator that makes a context each time it is entered, and closes the latest of its own.

    Threads and tasks may share one.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[_Yielded]]):
        self._make = make

    def __enter__(self) -> _Yielded:
        context = self._make()
        value = context.__enter__()
        _entered.set((*_entered.get(), (self, context)))
        return value

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        entered = _entered.get()
        latest = max(i for i, (scope, _) in enumerate(entered) if scope is self)
        _entered.set(entered[:latest] + entered[latest + 1 :])
        return entered[latest][1].__exit__(kind, error, traceback)


def scope(function: Callable[_Arguments, Iterator[_Yielded]]) -> Callable[_Arguments, Scope[_Yielded]]:
    """Make a generator function of one `yield` return a `Scope`. Arguments that do not fit are an error of the call."""
    once = contextmanager(function)

    @functools.wraps(function)
    def make_scope(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Scope[_Yielded]:
        once(*args, **kwargs)  # binds the arguments; nothing runs before it is entered
        return Scope(functools.partial(once, *args, **kwargs))

    return make_scope
