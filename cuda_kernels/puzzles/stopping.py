"""Stop a call that does not end, in any thread, whatever the process does with signals.

A watching thread raises an exception in the thread that runs the call (CPython's `PyThreadState_SetAsyncExc`). No
signal is sent, so the limit also holds where SIGINT is ignored, as in a script's background job, in a thread and in a
notebook. Python code is stopped between two of its steps. Some code cannot be stopped like this: a single call into C
that never returns, a loop that catches every exception, a wait for a thread that was just born when the interrupt came.
A command uses `ended_within` against them.
"""

import _thread
import ctypes
import faulthandler
import os
import sys
import threading
from contextlib import contextmanager

#: Seconds after which the call is interrupted again: an exception that arrives in a finalizer is lost.
AGAIN = 0.1


class TooLongError(Exception):
    """A call was stopped."""


class Interrupt(SystemExit):
    """Raised in the call, a subclass for each limit; no Exception, so that `except Exception` does not catch it.

    It is a SystemExit, which ends a thread of `_thread` without a message: up to Python 3.11 a new thread has the
    identity of the thread that starts it until it runs, and may get the interrupt instead. The call then gets the next.
    """

    code = 1  # should one ever reach the interpreter


def call_within(seconds, function):
    """Return what `function()`, called in this thread, returns.

    Args:
        seconds: the limit, wall time.
        function: called without arguments.

    Raises:
        TooLongError: the call was stopped; the traceback leads to the place. Else what `function` raises.
    """
    watch = _Watch(seconds)
    try:
        try:
            watch.start()
            return function()
        finally:
            watch.end()
    except BaseException as error:
        try:
            watch.end()  # again: an interrupt on the way into the first may have kept it from its work
        finally:
            watch.end()
        if not isinstance(error, watch.interrupt):
            raise
        if pressed := _ctrl_c_before(error):
            raise pressed from None
        raise TooLongError(f"stopped after {seconds} s").with_traceback(error.__traceback__) from None


def _ctrl_c_before(error):
    """The KeyboardInterrupt that was on its way when `error` was raised, or None."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error


class _Watch:
    """Interrupts the thread that made it, from `seconds` after `start` until `end`.

    An interrupt may come between any two steps of Python. So only locks are used that are C's own: `with` one of them
    takes it and is bound to give it back in one step, which no lock that is written in Python does.
    """

    def __init__(self, seconds):
        self.seconds, self.watched = min(max(seconds, 0), threading.TIMEOUT_MAX), threading.get_ident()
        self.interrupt = type("Interrupt", (Interrupt,), {})
        self.turn, self.ended = _thread.allocate_lock(), False
        self.pause = _thread.allocate_lock()
        self.pause.acquire()  # the watching thread waits for it

    def start(self):
        # No `threading.Thread`: that waits for the new thread, which an outer limit's interrupt may hit at its birth.
        _thread.start_new_thread(self._run, ())

    def end(self):
        """Stop watching. No interrupt arrives afterwards.

        What arrives meanwhile is raised at the end, except an interrupt of this watch while another exception is on
        its way: Ctrl-C and an outer limit come first.
        """
        before, late, done = sys.exc_info()[1], None, False
        while not done:
            try:
                with self.turn:
                    self.ended = True
                    if self.pause.locked():  # else the watching thread was told in a round that an interrupt cut short
                        self.pause.release()
                    self._raise(None)
                done = True
            except RecursionError:  # too deep for `_raise`: it would be so each time
                raise
            except BaseException as error:
                if not isinstance(error, self.interrupt) or (late is None and before is None):
                    late = error
        if late is not None:
            raise late

    def _run(self):
        seconds = self.seconds
        while not self.pause.acquire(timeout=seconds):
            with self.turn:
                if not self.ended:
                    self._raise(self.interrupt)
            seconds = AGAIN

    def _raise(self, error):
        """Have an exception raised in the watched thread; None takes back one that has not been raised yet."""
        kind = None if error is None else ctypes.py_object(error)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.watched), kind)


@contextmanager
def ended_within(seconds, what):
    """End the process with a message on stdout and exit code 1 if the body takes too long. Only for commands.

    Where not even another thread of Python runs, a clock of C ends it two seconds later, with the tracebacks on stderr.

    Args:
        seconds: the limit, wall time.
        what: the name of what runs, for the message.
    """

    def end():
        print(
            f"{what} cannot be stopped: a call that never returns, or a loop that catches every exception", flush=True
        )
        os._exit(1)

    clock = threading.Timer(seconds, end)
    clock.daemon = True
    clock.start()
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback_later(seconds + 2, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        clock.cancel()
        faulthandler.cancel_dump_traceback_later()
