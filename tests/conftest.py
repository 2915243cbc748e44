"""Fixtures of all tests. Each imports what it needs when it is used: tests that do not use it run without that."""

import faulthandler
import gc

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """A file that hangs when it is imported ends the process with a traceback: setup.cfg limits tests alone."""
    seconds = float(session.config.getini("faulthandler_timeout"))
    faulthandler.dump_traceback_later(seconds, exit=True, file=session.config.stash[fault_handler_stderr_fd_key])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_collection_modifyitems(items):
    """A test is in all tiers from the first that it names on, so it may not be marked for the first and the last."""
    for item in items:
        if item.get_closest_marker("check") and item.get_closest_marker("full"):
            raise pytest.UsageError(f"a test must be marked check or full, not both; got {item.nodeid}")


def leave_out_of_collections():
    """Objects that live as long as the process are left out of later garbage collections, which took a second each."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish():
    leave_out_of_collections()


@pytest.fixture
def quick_collections():
    """For tests that collect garbage: what is alive before them is left out."""
    leave_out_of_collections()


@pytest.fixture
def run(capsys):
    """Call run(*arguments) -> (exit code, stdout, stderr) of the `refops` command, in this process."""
    from refops import cli

    def call(*arguments):
        code = cli.main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def run_json(run):
    """Call run_json(*arguments) -> the one JSON document on stdout, NaN and Infinity refused."""
    import json

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    def call(*arguments, code=0):
        got, out, err = run(*arguments, "--json")
        assert (got, err) == (code, "")
        return json.loads(out, parse_constant=refuse)

    return call


@pytest.fixture
def one_thread():
    """torch with one thread: in small products more threads would only wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
