"""What is said while something is compiled: one line on a terminal, a few in a log, nothing where it is unwanted."""

import io
import logging
import sys

import pytest

from cuda_kernels import messages


class Terminal(io.StringIO):
    """A stderr that says that it is a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def logger(monkeypatch):
    """The logger and the handler as a program has them that was just started."""
    monkeypatch.setattr(messages, "logger", logging.Logger("cuda_kernels"))
    monkeypatch.setattr(messages, "_standard_error", messages._StandardError())
    return messages.logger


@pytest.fixture
def clock(monkeypatch):
    """A list with the time in seconds."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def compile_each(*names, target="this CPU"):
    for name in names:
        with messages.announced(name, target):
            pass


def test_a_log_gets_a_line_at_first_and_then_one_in_ten_seconds(logger, clock, capsys):
    compile_each("a", "b")
    clock[0] = 9.9
    compile_each("c")
    clock[0] = 10
    compile_each("d", "e")
    compile_each("a kernel", target="sm_90")  # another kind
    assert capsys.readouterr().err == (
        "cuda_kernels: compiling a for this CPU, once\n"
        "cuda_kernels: compiling d for this CPU, once (number 4)\n"
        "cuda_kernels: compiling a kernel for sm_90, once\n"
    )


def test_a_terminal_shows_one_line_and_then_none(logger, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "__stderr__", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "50")
    with messages.announced("a", "this CPU"):
        assert terminal.getvalue() == "\r\x1b[Kcuda_kernels: compiling a for this CPU, once"
    assert terminal.getvalue().endswith("once\r\x1b[K")
    compile_each("b" * 99)
    *_, shown, after = terminal.getvalue().split("\r\x1b[K")
    assert len(shown) == 49 and after == "" and "\n" not in terminal.getvalue()


@pytest.mark.parametrize("hidden", ["dumb", "wrapped"])
def test_whole_lines_where_a_line_cannot_be_rewritten(hidden, logger, clock, monkeypatch):
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    if hidden == "dumb":
        monkeypatch.setattr(sys, "__stderr__", stderr)
        monkeypatch.setenv("TERM", "dumb")
    compile_each("a")
    assert stderr.getvalue() == "cuda_kernels: compiling a for this CPU, once\n"


def test_who_wants_none_gets_none(logger, capsys):
    with messages.silent(), messages.silent():
        compile_each("a")
    logger.setLevel("WARNING")
    compile_each("b")
    assert capsys.readouterr().err == ""


def test_a_program_s_own_handler_gets_a_record_for_each(logger, capsys):
    seen = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    logger.addHandler(handler)
    compile_each("a", "b")
    assert seen == ["compiling a for this CPU, once", "compiling b for this CPU, once"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("stderr", [None, io.StringIO()])
def test_a_closed_stderr_is_no_error(stderr, logger, monkeypatch):
    if stderr is not None:
        stderr.close()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(sys, "__stderr__", stderr)
    compile_each("a")
