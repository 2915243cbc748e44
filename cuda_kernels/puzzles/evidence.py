"""What a run of a wrong kernel shows: which cause's effect (`causes`), who read and stored what, who did nothing.

Each function returns a sentence that holds for the run, or "" where it has nothing to say.
"""

import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from cuda_kernels.accesses import WARP, Recorder
from cuda_kernels.puzzles.causes import ANSWERS, READS, listed
from cuda_kernels.puzzles.table import Case, Puzzle, carried
from cuda_kernels.simulator import named

#: Elements that one sentence names, at most.
FEW = 3


@dataclass(frozen=True)
class Run:
    """One launch of a kernel.

    Attributes:
        puzzle, case: what ran on what.
        got: name of an output -> what the kernel left in it.
        recorder: the launch's accesses.
        passed: the cases on which the kernel was right before.
    """

    puzzle: Puzzle
    case: Case
    got: dict
    recorder: Recorder
    passed: tuple

    def threads(self):
        """(thread_index, block_index) of every thread, in the order in which they start."""
        grid, block = ((*shape, 1, 1)[:3] for shape in self.puzzle.threads.shape(self.case.sizes))
        for bz, by, bx in np.ndindex(grid[::-1]):
            for tz, ty, tx in np.ndindex(block[::-1]):
                yield (tx, ty, tz), (bx, by, bz)

    def thread(self, block, number):
        """(thread_index, block_index) of the thread that has this number in a block."""
        _, shape = self.puzzle.threads.shape(self.case.sizes)
        return tuple(map(int, np.unravel_index(number, (*shape, 1, 1)[:3], order="F"))), block

    def requests_of_warps(self):
        """(block_index, number of the warp in its block, request), warp by warp."""
        size = math.prod(self.puzzle.threads.shape(self.case.sizes)[1])
        for block in dict.fromkeys(block for _, block in self.threads()):
            for warp in range(size // WARP):
                for request in self.recorder.requests((block, warp)):
                    yield block, warp, request

    def reads_of_elements(self):
        """Number of an element -> {(array, index), ...} that the thread of this element loaded; one thread for each."""
        found = defaultdict(set)
        for block, warp, request in self.requests_of_warps():
            if request.kind == "load" and request.array in self.case.arrays:
                size = carried(self.case.arrays[request.array]).itemsize
                for lane, offset, _ in request.lanes:
                    thread = warp * WARP + lane, 0, 0
                    found[self.puzzle.threads.element(thread, block)].add((request.array, offset // size))
        return found


def differs(got, expected):
    """Where two arrays have other bits; NaN counts as one class."""
    with np.errstate(all="ignore"):
        both_nan = (got != got) & (expected != expected)
    bits = [np.ascontiguousarray(a).view(np.dtype(f"u{a.itemsize}")) for a in (got, expected)]
    return (bits[0] != bits[1]) & ~both_nan


# --- whose effect it has ----------------------------------------------------------------------------


def known_answer(run):
    """The meaning of the known wrong answer that equals this one."""
    for sentence, answer in ANSWERS.get(run.puzzle.name, {}).items():
        right_before = all(_gives(answer, case, run.puzzle.expected(case)) for case in run.passed)
        if right_before and _gives(answer, run.case, run.got):
            return f"Why: {sentence}"
    return ""


def _gives(answer, case, outputs):
    """Whether a known wrong answer is this one on a case, bit for bit."""
    with np.errstate(all="ignore"):
        found = answer(**case.arrays)
    found = found if isinstance(found, tuple) else (found,)
    pairs = zip(outputs.values(), found, strict=True)
    return not any(differs(mine, np.broadcast_to(other, mine.shape)).any() for mine, other in pairs)


def known_reads(run, stopped=None):
    """The meaning of the known wrong indices at which every thread has read.

    stopped: number of the element whose thread, and no earlier one, asked for what is out of bounds; None: none did.
    """
    rows = READS.get(run.puzzle.name, {})
    read = run.reads_of_elements() if rows else {}
    count = run.puzzle.threads.elements(run.case.sizes)
    for sentence, indices in rows.items():
        wanted, first_outside = [set() for _ in range(count)], None
        for array, places in indices(np.arange(count), **run.case.sizes).items():
            for place in places:
                outside = np.flatnonzero((place < 0) | (place >= run.case.arrays[array].size))
                first_outside = min([i for i in (first_outside, *outside[:1]) if i is not None], default=None)
                for i, index in enumerate(place):
                    wanted[i].add((array, int(index)))
        through = count if stopped is None else stopped
        begun = stopped is None or read[stopped] < wanted[stopped]
        if first_outside == stopped and begun and all(read[i] == wanted[i] for i in range(through)):
            return f"Why: {sentence}" if sentence else ""
    return ""


def one_value(run):
    """Which output has the same value everywhere, and must not."""
    expected = run.puzzle.expected(run.case)
    for name, got in run.got.items():
        first = got.reshape(-1)[0]
        if (got == first).all() and differs(got, expected[name]).any():
            return f"Every element of {name} is {shown(first)}."
    return ""


def shown(value):
    """A number as the checker writes it: codes in hexadecimal."""
    return hex(value) if value.dtype.kind == "u" else f"{float(value):.9g}"


# --- what the rule needs ----------------------------------------------------------------------------


def needed(run, output, index):
    """[(array, flat index), ...]: the elements of the inputs that one element of an output depends on."""
    found, ones = [], {name: np.ones_like(array) for name, array in run.case.arrays.items()}
    before = run.puzzle.expected(Case("ones", ones, run.case.sizes))[output][index]
    for name, array in ones.items():
        for i in range(array.size):
            changed = array.copy()
            changed.reshape(-1)[i] = 2
            after = run.puzzle.expected(Case("a two", {**ones, name: changed}, run.case.sizes))
            if after[output][index] != before:
                found.append((name, i))
    return found


def in_words(places):
    """{("x", 3), ("bias", 0)} -> "x[3] and bias[0]"."""
    return listed([f"{array}[{i}]" for array, i in sorted(places, key=lambda place: (place[0] != "x", place))])


def reads_of_first_wrong(run, output, index):
    """What a wrong element needs, and what the thread that stores it reads, where that lacks something of it."""
    if run.puzzle.name not in READS:
        return ""
    needs = set(needed(run, output, tuple(index)))
    i = int(np.ravel_multi_index(tuple(index), run.got[output].shape))
    read = run.reads_of_elements()[i]
    if needs <= read or not read or len(read) > FEW:
        return ""
    element = f"{output}[{', '.join(map(str, index))}]"
    thread = named(list(run.threads())[i])
    return f"{element} needs {in_words(needs)}; {thread} reads {in_words(read)}."


def needs_of_thread(run, i):
    """What the element of a thread needs, or what it belongs to."""
    puzzle = run.puzzle
    outputs = puzzle.expected(run.case)
    if puzzle.name in READS:
        output = puzzle.outputs[0]
        index = tuple(map(int, np.unravel_index(i, outputs[output].shape)))
        needs = in_words(needed(run, output, index))
        return f"The element of this thread is {output}[{', '.join(map(str, index))}], which needs {needs}."
    ones = {name: np.ones_like(array) for name, array in run.case.arrays.items()}
    before = puzzle.expected(Case("ones", ones, run.case.sizes))
    first = next(iter(ones))
    if ones[first].size != puzzle.threads.elements(run.case.sizes):
        return ""
    ones[first].reshape(-1)[i] = 2
    after = puzzle.expected(Case("a two", ones, run.case.sizes))
    for name in puzzle.outputs:
        (places,) = np.nonzero(before[name].reshape(-1) != after[name].reshape(-1))
        if len(places) == 1 and outputs[name].size < ones[first].size:
            return f"{first}[{i}], the element of this thread, belongs to {name}[{places[0]}]."
    return ""


# --- who did what -----------------------------------------------------------------------------------


def read_unwritten(run):
    """What was read from shared memory before anybody had written it."""
    if run.recorder.unwritten is None:
        return ""
    shared, index, line = run.recorder.unwritten
    threads = {"load": defaultdict(set), "store": defaultdict(set)}
    for block, warp, request in run.requests_of_warps():
        if (request.array, request.memory) == (shared, "shared") and (request.kind == "store" or request.line == line):
            for lane, offset, _ in request.lanes:
                threads[request.kind][block, offset].add(warp * WARP + lane)
    read, stored = threads["load"], threads["store"]
    found = f"Line {line} reads {shared}{list(index)} before any thread has written it"
    if not read.keys() <= stored.keys():
        return f"{found}; part of what this line reads is never written."
    if all(stored[place] == read[place] for place in read):
        return f"{found}; each thread reads there what it writes itself, but later."
    return f"{found}: is a barrier missing?"


def race(run):
    """Which two threads use one element of shared memory with no barrier between them, one of them to store."""
    if run.recorder.unordered is None:
        return ""
    first, second = run.recorder.unordered
    does = {"load": "reads", "store": "stores"}
    place = f"{second.array}{list(second.index)}"
    later = f"{named(second.thread)} {does[second.kind]} it in line {second.line}"
    return (
        f"{named(first.thread).capitalize()} {does[first.kind]} {place} in line {first.line} and {later}, in no order: "
        "is a barrier missing?"
    )


def read_output(run):
    """Which output was read before anybody had stored in it."""
    touched = set()
    for request in run.recorder.requests():
        if request.array in run.got:
            size = carried(run.got[request.array]).itemsize
            _, offset, _ = request.lanes[0]
            if request.kind == "load" and (request.array, offset) not in touched:
                place = f"{request.array}[{offset // size}]"
                return f"Line {request.line} reads {place}, an output, before any thread has stored it: it is not zero."
            touched.update((request.array, offset) for _, offset, _ in request.lanes)
    return ""


def two_readers(run):
    """(array, index, [(thread, request), ...]): an element that one thread alone may load, and the first two that do.

    None if there is none. A thread is (thread_index, block_index).
    """
    readers = {}
    for block, warp, request in run.requests_of_warps():
        if request.kind == "load" and request.array in run.puzzle.one_reader:
            size = carried(run.case.arrays[request.array]).itemsize
            for lane, offset, _ in request.lanes:
                place, reader = (request.array, offset // size), (run.thread(block, warp * WARP + lane), request)
                first = readers.setdefault(place, reader)
                if first[0] != reader[0]:
                    return *place, [first, reader]
    return None


def two_stores(run):
    """Which threads store the same element."""
    if run.recorder.twice is None:
        return ""
    name, i, first, second, _ = run.recorder.twice
    return f"{name}[{i}] is stored by two threads: {named(first)} and {named(second)}."


def too_few_stores(run, name):
    """Who does not store in an output that has elements which nobody wrote."""
    count, stores = run.got[name].size, run.recorder.stores_of_each(name)
    if not stores:
        return f"No thread stores in {name}."
    if len(stores) == 1:
        return f"Only {named(*stores)} stores in {name}."
    left = run.recorder.untouched(name)
    for size, number in run.case.sizes.items():
        if number < count and not left[:number].any() and left[number:].all():
            return f"Just the first {number} are written, as many as `{size}`; the guard must let {count} through."
    if left.sum() == 1 and left[-1]:
        return "Just the last element is not written: one thread too few gets through the guard."
    threads, part = list(run.threads()), run.puzzle.stores
    if len(threads) * part != count:
        return two_stores(run)
    idle = [thread for thread in threads if thread not in stores]
    if idle:
        return f"{len(idle)} of {len(threads)} threads store nothing, the first of them {named(idle[0])}."
    thread, least = min(stores.items(), key=lambda item: item[1])
    if least < part:
        return f"{named(thread).capitalize()} stores {least} of the {part} elements that are its part."
    return two_stores(run)


def guard_of(run, failed):
    """What the numbers of the elements whose threads go out of bounds suggest; failed: a set of them."""
    count = run.puzzle.threads.elements(run.case.sizes)
    beyond = {run.puzzle.threads.element(*thread) for thread in run.threads()} - set(range(count))
    if failed == beyond:
        return "Each thread that has no element does this: the guard is missing."
    if failed == {count}:
        return (
            f"Only the thread behind the last element does this, number {count}: the guard lets one too many through."
        )
    return ""
