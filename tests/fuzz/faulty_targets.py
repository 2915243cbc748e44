"""Targets with faults, for the tests: each must be reported as a failure. `run.py` does not load this module."""

import ctypes
import os
import pickle
import sys
import time
import warnings

import hostile
import numpy as np
from harness import require, target

import refops


@target("fine", cases=3, seconds=20)
def fine(case):
    """A result."""
    case.call("refops.encode", np.ones(3, np.float32), refops.E4M3)


@target("refuses", cases=1, seconds=20)
def refuses(case):
    """A documented error."""
    case.call("refops.encode", np.ones(3), refops.E4M3)


@target("crashes", cases=3, seconds=20)
def crashes(case):
    """A segmentation fault in the second of three cases."""
    if case.number == 1:
        ctypes.string_at(0)


@target("exits", cases=1, seconds=20)
def exits(case):
    """The process ends."""
    os._exit(0)


@target("hangs", cases=1, seconds=1)
def hangs(case):
    """No end."""
    time.sleep(600)


@target("eats_memory", cases=1, seconds=30)
def eats_memory(case):
    """More than any case may take."""
    np.ones(1 << 34, np.uint8).sum()


@target("raises", cases=1, seconds=20)
def raises(case):
    """An error of no documented type."""
    case.call("refops.encode", np.ones(3, np.float32), refops.E4M3)
    raise KeyError("undocumented")


@target("undocumented", cases=1, seconds=20)
def undocumented(case):
    """A TypeError from the depths of NumPy."""
    case.call("numpy.reshape", np.ones(3), (2, 2))


@target("warns", cases=1, seconds=20)
def warns(case):
    """A warning."""
    warnings.warn("look out", stacklevel=1)


@target("writes_to_its_input", cases=1, seconds=20)
def writes_to_its_input(case):
    """An argument is changed."""
    case.call("numpy.copyto", np.zeros(3), np.ones(3))


@target("wrong_result", cases=1, seconds=20)
def wrong_result(case):
    """A check that does not hold."""
    require(refops.decode(np.zeros(1, np.uint8), refops.E4M3)[0] == 1, "zero is not one")


@target("unpickles", cases=1, seconds=20)
def unpickles(case):
    """A pickle is executed."""
    pickle.loads(pickle.dumps(hostile.Payload(case.canary, 1)))


@target("leaves_a_partial_file", cases=1, seconds=20, needs=("refops.cli",))
def leaves_a_partial_file(case):
    """A golden file of which only the manifest is whole."""
    from targets.command_line import whole_outputs

    path = refops.golden.write_golden(case.folder / "out", "gelu", shape=(4, 4))
    path.write_bytes(path.read_bytes()[:-7])
    whole_outputs(case)


@target("leaves_half_a_picture", cases=1, seconds=20, needs=("refops.cli",))
def leaves_half_a_picture(case):
    """The first bytes of a PNG file."""
    from targets.command_line import whole_outputs

    (case.folder / "p.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    whole_outputs(case)


@target("leaves_a_temporary_file", cases=1, seconds=20, needs=("refops.cli",))
def leaves_a_temporary_file(case):
    """A hidden folder beside the output."""
    from targets.command_line import whole_outputs

    (case.folder / ".refops-abc").mkdir()
    whole_outputs(case)


@target("prints_a_traceback", cases=1, seconds=20, needs=("refops.cli",))
def prints_a_traceback(case):
    """What the interpreter prints when a program dies."""
    from targets.command_line import judge

    judge(1, "", "Traceback (most recent call last):\n  ...", ["formats"])


@target("prints_control_characters", cases=1, seconds=20, needs=("refops.cli",))
def prints_control_characters(case):
    """An escape sequence from a file's name."""
    from targets.command_line import judge

    judge(0, "\x1b[2Jname\n", "", ["formats"])


@target("never_calls", ["refops.swizzle"], cases=1, seconds=20)
def never_calls(case):
    """A target that does not call what it promises."""
    print("only this", file=sys.stdout)
