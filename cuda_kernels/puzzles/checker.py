"""Runs a puzzle's kernel in the simulator and says whether it is right: which element is wrong, and why.

A kernel runs on every input of its puzzle, with the threads in both orders. Errors are reported with thread and line,
and a kernel that does not end is stopped (`stopping` says what cannot be).
"""

import inspect
import linecache
import traceback
from dataclasses import dataclass, replace

import numpy as np

from cuda_kernels import simt, simulator
from cuda_kernels.accesses import Recorder
from cuda_kernels.puzzles import evidence, source
from cuda_kernels.puzzles.evidence import Run, differs
from cuda_kernels.puzzles.stopping import Interrupt, TooLongError, call_within
from cuda_kernels.puzzles.table import PUZZLES, carried
from cuda_kernels.simulator import named

#: Seconds that a kernel may take on all of its inputs; the solutions take less than one.
SECONDS = 20
#: Bytes that outputs and shared memory hold before a kernel runs; float32 holds NaN.
FILL = 0xA5
SOLVED, NOT_YET, WRONG = "solved", "not yet", "wrong"

#: What to think of where a kernel raises.
INDEX = "On this input every thread has an element, so no guard is missing: the index is wrong."
GUARD = "A thread that has no element must not touch memory: is a guard missing? If there is one, the index is wrong."
SHARED = "One index for each number of the shape, in the right order, each below it; or is the shape too small?"
TILE_GUARD = "Right where every thread has an element: is the guard missing, or does it let too many through?"
CONSTANT_SHAPE = "Numba compiles the shape into the kernel, before any argument is known: write a number."
BARRIER = "A barrier stands outside every `if` that only some threads of the block enter."
ALL_LANES = (
    "A shuffle stands outside every `if`: threads without an element take part too, with a value that changes nothing."
)


@dataclass(frozen=True)
class Verdict:
    """What a check found.

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
        self.thread, self.error = (thread.thread_index, thread.block_index), error


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
    holes = list(source.holes(kernel))
    if holes:
        return Verdict(puzzle.name, NOT_YET, f"hole in {holes[0]}", tuple(f"hole in {hole}" for hole in holes[1:]))
    for reason, line in source.shapes_known_at_launch(kernel):
        return Verdict(puzzle.name, WRONG, reason, (line, CONSTANT_SHAPE))
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


# --- running ----------------------------------------------------------------------------------------


def _check_all(puzzle, kernel, recorder):
    """Run a kernel on every input; return how many there are. The first run's accesses go to `recorder`."""
    cases = list(puzzle.cases())
    for number, case in enumerate(cases):
        for order in ("forward", "backward"):
            mine = recorder if number == 0 and order == "forward" else Recorder()
            try:
                run = _run(puzzle, kernel, case, order, mine, tuple(cases[:number]))
                _compare(run)
            except _WrongError as failure:
                raise _WrongError(
                    failure.reason, *failure.details, _what_differs(cases[:number], case, order)
                ) from None
            _judge_stores(kernel, run)
            _judge_loads(run)
            _judge_order(run)
    _judge_accesses(puzzle, recorder)
    return len(cases)


def _what_differs(passed, case, order):
    """How the run that failed differs from the earlier runs, which passed; or ""."""
    if order == "backward":
        return "Right when the threads run from the first to the last, wrong in the other order."
    if passed and all(one.square for one in passed) and not case.square and not case.ragged:
        return "Right where there are as many rows as columns: one of them stands where the other belongs."
    return ""


def _run(puzzle, kernel, case, order, recorder, passed):
    """Launch a kernel; return its `Run`."""
    got, values = {}, dict(case.sizes)
    for name, array in case.arrays.items():
        values[name] = recorder.array(name, carried(array).copy())
    for name, array in puzzle.expected(case).items():
        got[name] = np.empty(array.shape, array.dtype)
        _spoil(got[name])
        values[name] = recorder.array(name, carried(got[name]), writable=True)
    run = Run(puzzle, case, got, recorder, passed)

    def attributed(*arguments):
        try:
            kernel(*arguments)
        except Exception as error:
            raise _ThreadError(simulator.current_thread(), simulator.shown_error(error)) from error

    def watched(array):
        _spoil(array)
        return recorder.shared(array)

    grid, block = puzzle.threads.shape(case.sizes)
    arguments = [values[name] for name in puzzle.arguments]
    try:
        simulator.launch(attributed, grid, block, arguments, order=order, watch=watched)
    except _ThreadError as raised:
        kind = "" if isinstance(raised.error, IndexError) else f"{type(raised.error).__name__}: "
        where = f"{named(raised.thread)}, input {case.what}"
        hints = _out_of_bounds(run, kernel, raised) if isinstance(raised.error, IndexError) else ()
        raise _WrongError(f"{kind}{raised.error}", _place(kernel, raised.error), where, *hints) from None
    except RuntimeError as error:  # a missed barrier
        hint = ALL_LANES if "shuffle" in str(error) else BARRIER
        raise _WrongError(str(error), f"input {case.what}", hint) from None
    except Interrupt:
        raise
    except SystemExit as error:
        raise _WrongError("SystemExit: a kernel cannot end the program", _place(kernel, error)) from None
    return run


def _spoil(array):
    """Fill an array with what shows in a result: NaN in float32, so that no addition can hide it."""
    if array.dtype == np.float32:
        array[...] = np.nan
    else:
        array.reshape(-1).view(np.uint8)[...] = FILL


def _out_of_bounds(run, kernel, raised):
    """A hint about an index that is out of bounds."""
    if "in shared memory" in str(raised.error):
        return (SHARED,)
    element, count = run.puzzle.threads.element, run.puzzle.threads.elements(run.case.sizes)
    if element is None:
        return (TILE_GUARD if run.case.ragged else INDEX,)
    i = element(*raised.thread)
    if i >= count:
        return (evidence.guard_of(run, _elements_out_of_bounds(run, kernel)) or GUARD,)
    return (
        INDEX if not run.case.ragged else "",
        evidence.needs_of_thread(run, i),
        evidence.known_reads(run, stopped=i),
    )


def _elements_out_of_bounds(run, kernel):
    """Numbers of the elements whose threads go out of bounds, on the input of a run."""
    found, recorder, values = set(), Recorder(), dict(run.case.sizes)
    values.update((name, recorder.array(name, carried(array).copy())) for name, array in run.case.arrays.items())
    for name, array in run.got.items():
        values[name] = recorder.array(name, carried(np.copy(array)), writable=True)

    def counted(*arguments):
        try:
            kernel(*arguments)
        except IndexError:
            thread = simulator.current_thread()
            found.add(run.puzzle.threads.element(thread.thread_index, thread.block_index))

    grid, block = run.puzzle.threads.shape(run.case.sizes)
    try:
        simulator.launch(counted, grid, block, [values[name] for name in run.puzzle.arguments], watch=recorder.shared)
    except Interrupt:
        raise
    except (Exception, SystemExit):  # a barrier misses the threads that ended, or these fail in another way
        return set()
    return found


def _place(kernel, error):
    """The last line of the kernel's file that an error came through, or ""."""
    file = kernel.__code__.co_filename
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == file]
    return f"line {lines[-1]}: {linecache.getline(file, lines[-1]).strip()}" if lines else ""


# --- judging ----------------------------------------------------------------------------------------


def _compare(run):
    """Raise _WrongError unless the outputs are right."""
    where = f"input {run.case.what}"
    if run.recorder.race is not None:
        name, i = run.recorder.race
        raise _WrongError(
            f"two threads store different values in {name}[{i}]",
            where,
            evidence.two_stores(run),
            "Which of the values remains is chance.",
            evidence.known_reads(run),
        )
    expected = run.puzzle.expected(run.case)
    for name in run.puzzle.outputs:
        left = run.recorder.untouched(name).reshape(expected[name].shape)
        if left.any():
            first = ", ".join(map(str, np.argwhere(left)[0]))
            reason = f"never written: {left.sum()} of {left.size} elements of {name}, the first {name}[{first}]"
            why = evidence.read_unwritten(run) or evidence.too_few_stores(run, name)
            raise _WrongError(reason, where, why, evidence.known_reads(run))
    if run.puzzle.judge is not None:
        _ask_oracle(run)
        return
    for name in run.puzzle.outputs:
        wrong = differs(run.got[name], expected[name])
        if wrong.any():
            first = np.argwhere(wrong)[0]
            reason = _first_wrong(name, run.got[name], expected[name], first)
            counts = f"{wrong.sum()} of {wrong.size} elements of {name} wrong, {where}"
            raise _WrongError(reason, counts, _why(run) or evidence.reads_of_first_wrong(run, name, first))


def _why(run, report=None):
    """The cause of wrong numbers, or "". report: what the oracle says, whose explanation holds for every element."""
    why = evidence.read_unwritten(run) or evidence.read_output(run)
    why = why or evidence.known_answer(run) or evidence.known_reads(run)
    why = why or evidence.race(run)
    if not why and report is not None and report.diagnosis and report.diagnosis[0].exact:
        why = f"Why: {report.diagnosis[0].names[0]}: {report.diagnosis[0].sentence}"
    return why or evidence.one_value(run)


def _ask_oracle(run):
    """Raise _WrongError unless the oracle accepts the outputs."""
    report = run.puzzle.judge(run.case.arrays, run.got)
    if report.ok:
        return
    ours = dict(zip((array.name for array in report.arrays), run.puzzle.outputs, strict=False))  # by the oracle's names
    first = replace(report.mismatches[0], array=ours[report.mismatches[0].array])
    counts = [f"{a.wrong} of {a.entries} entries of {ours[a.name]} wrong" for a in report.arrays if a.wrong]
    why = _why(run, report) or evidence.reads_of_first_wrong(run, first.array, first.index)
    raise _WrongError(str(first), f"{', '.join(counts)}, input {run.case.what}", why)


def _first_wrong(name, got, expected, index):
    """A wrong element in words."""
    at = tuple(index)
    values = [evidence.shown(a[at]) for a in (got, expected)]
    if values[0] == values[1]:  # apart in bits that the decimals do not show
        values = [f"{text} ({a[at].tobytes()[::-1].hex()})" for text, a in zip(values, (got, expected), strict=True)]
    return f"{name}[{', '.join(map(str, index))}]: got {values[0]}, expected {values[1]}"


def _judge_stores(kernel, run):
    """Raise _WrongError where an element is stored by two threads, or a thread stores more than its part."""
    if run.recorder.twice is not None:
        name, i, first, second, line = run.recorder.twice
        raise _WrongError(
            f"the result is right, but two threads store {name}[{i}]: {named(first)} and {named(second)}",
            f"line {line}: {linecache.getline(kernel.__code__.co_filename, line).strip()}",
            f"input {run.case.what}",
            "Each element is stored by one thread.",
        )
    for name in run.puzzle.outputs:
        for thread, count in run.recorder.stores_of_each(name).items():
            if count > run.puzzle.stores:
                reason = f"the result is right, but {named(thread)} stores {count} elements of {name}"
                raise _WrongError(reason, f"input {run.case.what}", f"The part of one thread is {run.puzzle.stores}.")


def _judge_loads(run):
    """Raise _WrongError where two threads load an element that only one needs to load."""
    found = evidence.two_readers(run)
    if found is not None:
        name, i, readers = found
        raise _WrongError(
            f"the result is right, but two threads load {name}[{i}]: {' and '.join(named(who) for who, _ in readers)}",
            *dict.fromkeys(f"line {request.line}: {request.code}" for _, request in readers),
            f"input {run.case.what}",
            "One thread loads an element; what it knows reaches others by a shuffle or through shared memory.",
        )


def _judge_order(run):
    """Raise _WrongError where two threads use one element of shared memory in no order."""
    found = evidence.race(run)
    if found:
        raise _WrongError("the result is right, but by chance: a barrier is missing", f"input {run.case.what}", found)


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
