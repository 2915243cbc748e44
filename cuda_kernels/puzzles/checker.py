"""Runs a puzzle's kernel in the simulator and says whether it is right: which element is wrong, and why.

A kernel runs on every input of its puzzle, with the threads in both orders. Errors are reported with thread and line,
and a kernel that does not end is stopped (`stopping` says what cannot be).
"""

import ast
import inspect
import linecache
import textwrap
import traceback
from dataclasses import dataclass

import numpy as np

from cuda_kernels import simt, simulator
from cuda_kernels.accesses import Recorder
from cuda_kernels.puzzles.stopping import Interrupt, TooLongError, call_within
from cuda_kernels.puzzles.table import PUZZLES

#: Seconds that a kernel may take on all of its inputs; the solutions take less than one.
SECONDS = 20
#: Outputs hold this before a kernel runs.
FILL = 0xA5
SOLVED, NOT_YET, WRONG = "solved", "not yet", "wrong"

#: What to think of where a kernel raises.
INDEX = "On this input every thread has an element, so no guard is missing: the index is wrong."
GUARD = "A thread that has no element must not touch memory: is a guard missing? If there is one, the index is wrong."
SHARED = "Each index must be below the number in its place in the shape: are the indices in the right order?"
BARRIER = "A barrier stands outside every `if` that only some threads of the block enter."
ALL_LANES = (
    "A shuffle stands outside every `if`: threads without an element take part too, with a value that changes nothing."
)


@dataclass(frozen=True)
class Verdict:
    """What was found.

    Attributes:
        name: the kernel's. status: "solved", "not yet" or "wrong".
        reason: one line. details: more of them: where, and why.
        accesses: what the first warp asked memory for (`cuda_kernels.accesses.Request`); empty if it did not run.
    """

    name: str
    status: str
    reason: str
    details: tuple = ()
    accesses: tuple = ()

    @property
    def solved(self):
        """Whether the puzzle is solved."""
        return self.status == SOLVED

    def __str__(self):
        return "\n  ".join([f"{self.name}: {self.status}: {self.reason}", *self.details])


class _WrongError(Exception):
    """What is wrong with a kernel: reason, details."""

    def __init__(self, reason, *details):
        super().__init__(reason)
        self.reason, self.details = reason, tuple(detail for detail in details if detail)


class _ThreadError(Exception):
    """An error that a thread of the kernel raised, with the thread."""

    def __init__(self, thread, error):
        super().__init__(str(error))
        self.thread, self.block, self.error = thread.thread_index, thread.block_index, error


def check(kernel):
    """Check a kernel against the puzzle of its name.

    Args:
        kernel: the function, defined in a file or a notebook cell so that its source can be read.

    Returns:
        `Verdict`.

    Raises:
        RuntimeError: `cuda_kernels` was imported unsimulated. ImportError: greenlet is missing.
        ValueError, TypeError: no puzzle has this name; not a function.
    """
    require_simulator()
    if not inspect.isfunction(kernel):
        raise TypeError(f"a kernel is a function; got {type(kernel).__name__}")
    if kernel.__name__ not in PUZZLES:
        names = ", ".join(PUZZLES)
        raise ValueError(
            f"no puzzle has the name {kernel.__name__!r}: a kernel is known by its puzzle's name, "
            f"so do not change it; names: {names}"
        )
    puzzle, recorder = PUZZLES[kernel.__name__], Recorder()
    holes = list(_holes(kernel))
    if holes:
        return Verdict(puzzle.name, NOT_YET, f"hole in {holes[0]}", tuple(f"hole in {hole}" for hole in holes[1:]))
    try:
        inputs = call_within(SECONDS, lambda: _check_all(puzzle, kernel, recorder))
    except _WrongError as failure:
        return Verdict(puzzle.name, WRONG, failure.reason, failure.details, tuple(recorder.first_of_each()))
    except TooLongError as error:
        reason = f"{error}: does a loop never end?"
        return Verdict(puzzle.name, WRONG, reason, tuple(filter(None, [_place(kernel, error)])))
    right = f"right on {inputs} inputs, with the threads in both orders"
    return Verdict(puzzle.name, SOLVED, right, (), tuple(recorder.first_of_each()))


def require_simulator():
    """Raise RuntimeError unless kernels are simulated in this process, ImportError if the simulator lacks greenlet."""
    if not simt.SIMULATED:
        raise RuntimeError(
            "cuda_kernels was imported unsimulated in this process: import cuda_kernels.puzzles first in a new one, "
            "or set NUMBA_ENABLE_CUDASIM=1 before"
        )
    if simulator.greenlet is None:
        raise ImportError("the simulator needs greenlet: pip install greenlet")


def _holes(kernel):
    """A line for each `...` in a function's source."""
    try:
        source = textwrap.dedent(inspect.getsource(kernel))
    except OSError:
        return
    lines, first = source.splitlines(), kernel.__code__.co_firstlineno
    marks = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant) and node.value is ...]
    for number in sorted({node.lineno for node in marks}):
        yield f"line {first + number - 1}: {lines[number - 1].strip()}"


# --- running ----------------------------------------------------------------------------------------


def _check_all(puzzle, kernel, recorder):
    """Run a kernel on every input; return how many there are. The first run's accesses go to `recorder`."""
    cases = list(puzzle.cases())
    for case in cases:
        for order in ("forward", "backward"):
            mine = recorder if case is cases[0] and order == "forward" else Recorder()
            got = _run(puzzle, kernel, case, order, mine, exact=case is cases[0])
            try:
                _compare(puzzle, case, got, mine)
            except _WrongError as failure:
                if order == "forward":
                    raise
                note = "Right when the threads run from the first to the last, wrong in the other order."
                raise _WrongError(failure.reason, note, *failure.details) from None
            _judge_stores(puzzle, kernel, case, mine)
    _judge_accesses(puzzle, recorder)
    return len(cases)


def _run(puzzle, kernel, case, order, recorder, *, exact):
    """Launch a kernel; return name -> array of what it wrote. exact: every thread has an element."""
    got, values = {}, dict(case.sizes)
    for name, array in case.arrays.items():
        values[name] = recorder.array(name, _carried(array).copy())
    for name, array in puzzle.expected(case).items():
        got[name] = np.empty(array.shape, array.dtype)
        got[name].reshape(-1).view(np.uint8)[...] = FILL
        values[name] = recorder.array(name, _carried(got[name]), writable=True)

    def attributed(*arguments):
        try:
            kernel(*arguments)
        except Exception as error:
            raise _ThreadError(simulator.current_thread(), error) from error

    grid, block = puzzle.shape(case.sizes)
    arguments = [values[name] for name in puzzle.arguments]
    try:
        simulator.launch(attributed, grid, block, arguments, order=order, watch=recorder.shared)
    except _ThreadError as raised:
        kind = "" if isinstance(raised.error, IndexError) else f"{type(raised.error).__name__}: "
        where = f"{_named(raised.thread, raised.block)}, input {case.what}"
        hint = _hint(raised.error, exact)
        raise _WrongError(f"{kind}{raised.error}", _place(kernel, raised.error), where, hint) from None
    except RuntimeError as error:  # a missed barrier
        hint = ALL_LANES if "shuffle" in str(error) else BARRIER
        raise _WrongError(str(error), f"input {case.what}", hint) from None
    except Interrupt:
        raise
    except SystemExit as error:
        raise _WrongError("SystemExit: a kernel cannot end the program", _place(kernel, error)) from None
    return got


def _hint(error, exact):
    """What to think of where an index is out of bounds."""
    if not isinstance(error, IndexError):
        return ""
    if "in shared memory" in str(error):
        return SHARED
    return INDEX if exact else GUARD


def _carried(array):
    """A flat view with elements as kernels see them: bfloat16 as uint16."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint16) if array.dtype.name == "bfloat16" else flat


def _named(thread, block):
    """A thread in words."""
    return f"thread {_index(thread)} of block {_index(block)}"


def _index(index):
    """(3, 0, 0) -> "3", (3, 1, 0) -> "(3, 1)"."""
    return str(index[0]) if index[1:] == (0, 0) else f"({index[0]}, {index[1]})"


def _place(kernel, error):
    """The last line of the kernel's file that an error came through, or ""."""
    file = kernel.__code__.co_filename
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == file]
    return f"line {lines[-1]}: {linecache.getline(file, lines[-1]).strip()}" if lines else ""


# --- judging ----------------------------------------------------------------------------------------


def _compare(puzzle, case, got, recorder):
    """Raise _WrongError unless the outputs are right."""
    if recorder.race is not None:
        name, i = recorder.race
        raise _WrongError(
            f"two threads store different values in {name}[{i}]",
            f"input {case.what}",
            "Which of them remains is chance.",
        )
    expected = puzzle.expected(case)
    for name in puzzle.outputs:
        left = recorder.untouched(name).reshape(expected[name].shape)
        if left.any():
            first = ", ".join(map(str, np.argwhere(left)[0]))
            reason = f"never written: {left.sum()} of {left.size} elements of {name}, the first {name}[{first}]"
            raise _WrongError(reason, f"input {case.what}", _read_unwritten(recorder), _only_writer(name, recorder))
    if puzzle.judge is not None:
        _ask_oracle(puzzle, case, got, recorder)
        return
    for name in puzzle.outputs:
        wrong = _differs(got[name], expected[name])
        if wrong.any():
            reason = _first_wrong(name, got[name], expected[name], wrong)
            why = _read_unwritten(recorder) or _known(puzzle, case, got)
            raise _WrongError(reason, f"{wrong.sum()} of {wrong.size} elements of {name} wrong, input {case.what}", why)


def _ask_oracle(puzzle, case, got, recorder):
    """Raise _WrongError unless the oracle accepts the outputs."""
    report = puzzle.judge(case.arrays, got)
    if report.ok:
        return
    why = _read_unwritten(recorder) or _known(puzzle, case, got)
    why = why or "".join(f"Why: {found.names[0]}: {found.sentence}" for found in report.diagnosis[:1])
    counts = [
        f"{array.wrong} of {array.entries} entries of {array.name} wrong" for array in report.arrays if array.wrong
    ]
    lines = [str(report.mismatches[0]), f"{', '.join(counts)}, input {case.what}"]
    for theirs, mine in zip(("rowwise_data", "rowwise_scale_inv"), ("codes", puzzle.outputs[-1]), strict=True):
        lines = [line.replace(theirs, mine) for line in lines]
    raise _WrongError(*lines, why)


def _differs(got, expected):
    """Where two arrays have other bits; NaN counts as one class."""
    with np.errstate(all="ignore"):
        both_nan = (got != got) & (expected != expected)
    bits = [np.ascontiguousarray(a).view(np.dtype(f"u{a.itemsize}")) for a in (got, expected)]
    return (bits[0] != bits[1]) & ~both_nan


def _first_wrong(name, got, expected, wrong):
    """The first wrong element in words."""
    index = np.argwhere(wrong)[0]
    at = tuple(index)
    shown = [hex(v) if v.dtype.kind == "u" else f"{float(v):.9g}" for v in (got[at], expected[at])]
    if shown[0] == shown[1]:  # apart in bits that the decimals do not show
        shown = [f"{text} ({a[at].tobytes()[::-1].hex()})" for text, a in zip(shown, (got, expected), strict=True)]
    return f"{name}[{', '.join(map(str, index))}]: got {shown[0]}, expected {shown[1]}"


def _read_unwritten(recorder):
    """What was read from shared memory before anybody had written it, in words, or ""."""
    if recorder.unwritten is None:
        return ""
    shared, index, line = recorder.unwritten
    return f"Line {line} reads {shared}{list(index)} before any thread has written it: is a barrier missing?"


def _only_writer(name, recorder):
    """Which thread stores into an output, if it is one only, or ""."""
    threads = list(recorder.stores_of_each(name))
    return f"Only {_named(*threads[0])} stores in {name}." if len(threads) == 1 else ""


def _known(puzzle, case, got):
    """What the known wrong answer means that equals this one, or ""."""
    for sentence, answer in puzzle.wrong.items():
        with np.errstate(all="ignore"):
            found = answer(**case.arrays)
        found = found if isinstance(found, tuple) else (found,)
        pairs = [(mine, np.broadcast_to(other, mine.shape)) for mine, other in zip(got.values(), found, strict=True)]
        if not any(_differs(mine, other).any() for mine, other in pairs):
            return f"Why: {sentence}"
    return ""


def _judge_stores(puzzle, kernel, case, recorder):
    """Raise _WrongError where an element is stored by two threads, or a thread stores more than its part."""
    if recorder.twice is not None:
        name, i, first, second, line = recorder.twice
        raise _WrongError(
            f"the result is right, but two threads store {name}[{i}]: {_named(*first)} and {_named(*second)}",
            f"line {line}: {linecache.getline(kernel.__code__.co_filename, line).strip()}",
            f"input {case.what}",
            "Each element is stored by one thread.",
        )
    for name in puzzle.outputs:
        for thread, count in recorder.stores_of_each(name).items():
            if count > puzzle.stores:
                reason = f"the result is right, but {_named(*thread)} stores {count} elements of {name}"
                raise _WrongError(reason, f"input {case.what}", f"The part of one thread is {puzzle.stores}.")


def _judge_accesses(puzzle, recorder):
    """Raise _WrongError where a step touches more sectors or banks than it needs, if the puzzle is about that."""
    if puzzle.sectors is None:
        return
    for request in recorder.requests():
        line = f"line {request.line}: {request.code}"
        most = puzzle.sectors.get(request.array, len(request.sectors))
        if request.memory == "shared" and request.ways > 1:
            raise _WrongError(f"the result is right, but {request.ways} threads of a warp meet in one bank", line)
        if request.memory == "global" and len(request.sectors) > most:
            touched = f"{request.kind} of {request.array} touches {len(request.sectors)} sectors"
            raise _WrongError(f"the result is right, but one {touched} where {most} would do", line)
