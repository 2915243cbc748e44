"""Messages on stderr about what is compiled once and kept on disk: loops, kernels, the software GPU.

A terminal shows one line, which is taken off when the code is made. Anything else, a log, gets a line for the first
of a kind, and then at most one in `SECONDS_APART`, with the number of those so far.

`silent()` silences a block, `logging.getLogger("cuda_kernels").setLevel("WARNING")` the program; one that has set the
logger up itself gets a record for each in its own way.
"""

import logging
import os
import shutil
import sys
import time
from contextlib import contextmanager, suppress

logger = logging.getLogger("cuda_kernels")

#: Seconds between two lines of a log about the same kind.
SECONDS_APART = 10
#: Goes to the first column of a terminal's line and empties it.
EMPTY_LINE = "\r\x1b[K"

#: One entry for each block of `silent` that runs, in any thread.
_silent_blocks: list[None] = []


class _StandardError(logging.Handler):
    """Writes to whatever sys.stderr is at that moment."""

    def __init__(self):
        super().__init__()
        self._counts, self._written_at = {}, {}
        self._shows_line = False

    def emit(self, record):
        kind = record.msg, record.args[1:]
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        line = f"cuda_kernels: {record.getMessage()}" + (f" (number {count})" if count > 1 else "")
        if _rewrites_lines(sys.stderr):
            columns = shutil.get_terminal_size().columns - 1  # in the last one a terminal begins another line
            _write(EMPTY_LINE + line[:columns])
            self._shows_line = True
        elif time.monotonic() - self._written_at.get(kind, -SECONDS_APART) >= SECONDS_APART:
            _write(f"{line}\n")
            self._written_at[kind] = time.monotonic()

    def take_off(self):
        """Empty the terminal's line if it shows a message."""
        if self._shows_line:
            _write(EMPTY_LINE)
            self._shows_line = False


def _write(text):
    """Write to stderr, which may be closed."""
    with suppress(OSError, ValueError):
        if sys.stderr is not None:
            sys.stderr.write(text)
            sys.stderr.flush()


def _rewrites_lines(stream):
    """Whether a stream is the terminal itself; one that wraps it, such as rich's beside a bar, takes whole lines."""
    is_terminal = stream is not None and stream is sys.__stderr__ and not stream.closed and stream.isatty()
    return is_terminal and os.environ.get("TERM") != "dumb"


_standard_error = _StandardError()


@contextmanager
def announced(what, target):
    """Say that something is being compiled for a target while the block compiles it."""
    if not logger.handlers and logger.level == logging.NOTSET:
        logger.addHandler(_standard_error)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    if not _silent_blocks:
        logger.info("compiling %s for %s, once", what, target)
    try:
        yield
    finally:
        _standard_error.take_off()


@contextmanager
def silent():
    """Say nothing while the block runs."""
    _silent_blocks.append(None)
    try:
        yield
    finally:
        _silent_blocks.pop()
