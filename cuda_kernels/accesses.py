"""Which memory the threads of a warp touch: recorded in the simulator, counted, and drawn.

    recorder = Recorder()
    launch(kernel, grid, block, [recorder.array("x", x), recorder.array("y", y, writable=True)], watch=recorder.shared)
    print(draw(recorder.first_of_each()))

A request is what one instruction of one warp asks for at once. Global memory answers in sectors of 32 bytes: the fewer
sectors hold what 32 threads ask for, the fewer bytes move. Shared memory has 32 banks of 4 bytes; words of one bank
are served one after another. Arrays are taken to start at a sector, as those of CUDA allocators do. Caches are not
modelled: a sector that two requests touch counts twice.
"""

import json
import linecache
import os
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import islice

import numpy as np

from cuda_kernels.simulator import Elements, Pointer, current_thread, launch

SECTOR, BANKS, BANK, WARP = 32, 32, 4, 32
BF16_ONE = 0x3F80
#: Modules whose functions act for a kernel.
NO_KERNELS = (__name__, "cuda_kernels.simt", "cuda_kernels.simulator")
#: Sectors that a drawing in text shows of one request.
SHOWN = 8


@dataclass(frozen=True)
class Request:
    """What one instruction of one warp asks for.

    Attributes:
        array: the array's name. memory: "global" or "shared". kind: "load" or "store".
        line, code: of the source.
        lanes: (number of the thread in its warp, offset in bytes, size in bytes) of each thread that takes part.
        repeats: how often the warp runs the instruction.
    """

    array: str
    memory: str
    kind: str
    line: int
    code: str
    lanes: tuple
    repeats: int = 1

    @property
    def sectors(self):
        """Numbers of the 32-byte sectors that are touched, ascending."""
        return sorted({byte // SECTOR for _, offset, size in self.lanes for byte in (offset, offset + size - 1)})

    @property
    def asked(self):
        """Bytes that are asked for, each once."""
        return len({byte for _, offset, size in self.lanes for byte in range(offset, offset + size)})

    @property
    def ways(self):
        """Different words in the busiest bank, and so passes through shared memory. 1: no conflict."""
        words = {offset // BANK for _, offset, _ in self.lanes}
        return max(Counter(word % BANKS for word in words).values())

    @property
    def places(self):
        """(lane, place) for each thread: the sector that its first byte lies in, or the bank."""
        if self.memory == "shared":
            return [(lane, offset // BANK % BANKS) for lane, offset, _ in self.lanes]
        return [(lane, offset // SECTOR) for lane, offset, _ in self.lanes]

    def __str__(self):
        if self.memory == "shared":
            found = "no two threads in one bank" if self.ways == 1 else f"{self.ways} words in one bank"
        else:
            moved = len(self.sectors) * SECTOR
            found = f"{_count(self.asked, 'byte')} in {_count(len(self.sectors), 'sector')}, {moved} bytes move"
        times = f", {self.repeats} times" if self.repeats > 1 else ""
        return f"{self.kind} {self.array}, line {self.line}{times}: {_count(len(self.lanes), 'thread')}, {found}"


def _count(number, thing):
    return f"{number} {thing}{'s' * (number != 1)}"


# --- recording --------------------------------------------------------------------------------------


class Recorder:
    """Collects the accesses of a launch.

    Attributes:
        unwritten: (name, index, line) of the first read of shared memory that no thread had written, or None.
        race: (name, index) of the first element that two threads wrote with different values, neither by an atomic
            operation nor with a barrier between them, or None.
        unordered: the first two `Access`es to one element of shared memory by two threads with no barrier between
            them, at least one of which stores, and not both by atomic operations; or None.
        twice: (name, index, first thread, second thread, line) of the first element that two threads wrote, neither by
            an atomic operation, or None; a thread is (thread_index, block_index).
    """

    def __init__(self):
        self.unwritten = self.race = self.unordered = self.twice = None
        self._requests, self._visits, self._arrays = {}, Counter(), {}

    def array(self, name, array, *, writable=False):
        """An array as a kernel's argument."""
        self._arrays[name] = _Global(self, name, array, writable)
        return self._arrays[name]

    def untouched(self, name):
        """Bool for each element of an array: whether no thread has stored there."""
        return self._arrays[name].untouched

    def stores_of_each(self, name):
        """(thread_index, block_index) of each thread that stored into an array -> how many of its elements."""
        return {_who(thread): len(elements) for thread, elements in self._arrays[name].stored.items()}

    def shared(self, array):
        """Shared memory as a kernel sees it; for `launch`'s `watch`."""
        return _Shared(self, array)

    def note(self, array, memory, kind, offset, size, frame):
        """One access of the running thread."""
        thread, place = current_thread(), (frame.f_code, _instruction(frame.f_code, frame.f_lasti))
        visit = self._visits[thread, place, kind] = self._visits[thread, place, kind] + 1
        key = (thread.block_index, thread.number // WARP, place, kind, visit)
        request = self._requests.setdefault(key, (array, memory, frame.f_lineno, []))
        request[3].append((thread.number % WARP, int(offset), size))

    def requests(self, warp=None):
        """Every `Request`, or those of one warp: (block_index, number of the warp)."""
        found = []
        for (block, number, (code, _), kind, _), (array, memory, line, lanes) in self._requests.items():
            if warp in (None, (block, number)):
                text = linecache.getline(code.co_filename, line).strip()
                found.append(Request(array, memory, kind, line, text, tuple(sorted(lanes))))
        return found

    def first_of_each(self):
        """What the first warp's instructions ask for when they first run, and how often they run."""
        first, count = {}, Counter()
        for (block, number, place, kind, visit), _ in self._requests.items():
            if (block, number) == ((0, 0, 0), 0):
                first.setdefault((place, kind), visit)
                count[place, kind] += 1
        chosen = []
        for (place, kind), visit in first.items():
            array, memory, line, lanes = self._requests[(0, 0, 0), 0, place, kind, visit]
            text = linecache.getline(place[0].co_filename, line).strip()
            lanes = tuple(sorted(lanes))
            chosen.append(Request(array, memory, kind, line, text, lanes, count[place, kind]))
        return chosen


@dataclass(frozen=True)
class Access:
    """One access of a thread to an element of shared memory.

    Attributes:
        array: the array's name. index: the element's, a tuple. kind: "load" or "store".
        thread: (thread_index, block_index). line: of the source.
        barriers: how many barriers the thread had reached.
        atomic: whether it belongs to an atomic operation.
    """

    array: str
    index: tuple
    kind: str
    thread: tuple
    line: int
    barriers: int
    atomic: bool

    def unordered_with(self, later):
        """Whether a later access to the same element may as well come first, and a store is among the two."""
        apart = self.thread != later.thread and self.barriers == later.barriers
        return apart and "store" in (self.kind, later.kind) and not (self.atomic and later.atomic)


def _who(thread):
    return thread.thread_index, thread.block_index


@lru_cache(maxsize=4096)
def _instruction(code, offset):
    """Which expression of the source an offset in the bytecode belongs to: CPython moves within it in warm code."""
    positions = getattr(code, "co_positions", None)  # from Python 3.11 on
    return offset if positions is None else next(islice(positions(), offset // 2, None))


def _kernel_frame():
    """The frame of the kernel, or of its helper, that makes an access: above this module and the vocabulary's."""
    frame = sys._getframe(2)
    while frame.f_globals.get("__name__") in NO_KERNELS:
        frame = frame.f_back
    return frame


class _Global(Pointer):
    """An array that says who touches it."""

    def __init__(self, recorder, name, array, writable):
        super().__init__(array)
        self.name, self.example = name, f"{name}[i]"
        self._recorder, self._writable, self._writer = recorder, writable, {}
        self.untouched, self.stored = np.ones(len(self.array), bool), defaultdict(set)

    def _note(self, kind, i, count):
        self._check(kind, i, count)
        if kind == "store" and not self._writable:
            raise TypeError(f"{self.name} is an input and must stay as it is")
        if kind == "store":
            self.untouched[i : i + count] = False
        size = self.array.itemsize
        self._recorder.note(self.name, "global", kind, i * size, count * size, _kernel_frame())

    def __getitem__(self, i):
        self._note("load", i, 1)
        return self.array[i]

    def __setitem__(self, i, value):
        self._note("store", i, 1)
        self.array[i] = value
        if sys._getframe(1).f_globals.get("__name__") not in NO_KERNELS:  # no atomic operation
            self._look_for_race(int(i), current_thread(), self.array[i].tobytes())

    def _look_for_race(self, i, thread, bits):
        place = thread.block_index, thread.barriers
        writer, block, barriers, before = self._writer.get(i, (thread, *place, bits))
        apart = block == place[0] and barriers < place[1]
        if writer is not thread and not apart and before != bits and self._recorder.race is None:
            self._recorder.race = (self.name, i)
        if writer is not thread and self._recorder.twice is None:
            self._recorder.twice = (self.name, i, _who(writer), _who(thread), _kernel_frame().f_lineno)
        self.stored[thread].add(i)
        self._writer[i] = (thread, *place, bits)

    def read(self, i, size):
        """The `size` bytes at element `i`."""
        self._note("load", i, size // self.array.itemsize)
        return super().read(i, size)

    def write(self, i, words):
        """Store words at element `i`."""
        self._note("store", i, words.nbytes // self.array.itemsize)
        super().write(i, words)


class _Shared(Elements):
    """Shared memory that says who touches it, what is read before it was written, and what in no order."""

    name = "shared memory"

    def __init__(self, recorder, array):
        self._recorder, self._array, self._written = recorder, array, np.zeros(array.shape, bool)
        self._since_barrier = defaultdict(list)
        self.example = f"one index for each of its {array.ndim} dimensions"

    def _note(self, kind, key):
        frame, key = _kernel_frame(), key if isinstance(key, tuple) else (key,)
        shape = self._array.shape
        name = next((name for name, value in frame.f_locals.items() if value is self), self.name)
        if not all(isinstance(i, int | np.integer) for i in key):
            what = "whole rows or columns" if any(isinstance(i, slice) for i in key) else ", ".join(map(repr, key))
            raise TypeError(f"{name} is read and written by single elements, its indices integers; got {what}")
        if len(key) != len(shape) or not all(0 <= i < n for i, n in zip(key, shape, strict=True)):
            raise IndexError(f"out of bounds: {kind} of {list(map(int, key))} in shared memory of shape {list(shape)}")
        key = tuple(map(int, key))
        if kind == "load" and not self._written[key] and self._recorder.unwritten is None:
            self._recorder.unwritten = (name, key, frame.f_lineno)
        thread, atomic = current_thread(), sys._getframe(2).f_globals.get("__name__") in NO_KERNELS
        self._look_for_race(Access(name, key, kind, _who(thread), frame.f_lineno, thread.barriers, atomic))
        offset = np.ravel_multi_index(key, shape) * self._array.itemsize
        self._recorder.note(name, "shared", kind, offset, self._array.itemsize, frame)

    def _look_for_race(self, access):
        others = [one for one in self._since_barrier[access.index] if one.barriers == access.barriers]
        if self._recorder.unordered is None:
            racing = (one for one in others if one.unordered_with(access))
            self._recorder.unordered = next(((one, access) for one in racing), None)
        same = (one.thread == access.thread and one.kind == access.kind for one in others)
        self._since_barrier[access.index] = others if any(same) else [*others, access]

    def __getitem__(self, key):
        self._note("load", key)
        return self._array[key]

    def __setitem__(self, key, value):
        self._note("store", key)
        self._array[key] = value
        self._written[key] = True


# --- drawing ----------------------------------------------------------------------------------------


def draw(requests):
    """The requests as text: for each a line, and below it threads from left to right, sectors or banks downwards."""
    return "\n".join(line for request in requests for line in (str(request), *_rows(request)))


def _rows(request):
    if request.memory == "shared" and request.ways == 1:
        return
    kind, places = ("bank" if request.memory == "shared" else "sector"), request.places
    rows = sorted({place for _, place in places})
    yield "               thread 0       8       16      24"
    for row in rows[:SHOWN]:
        there = {lane for lane, place in places if place == row}
        yield f"  {kind:>6} {row:5}        " + "".join("#" if lane in there else "." for lane in range(WARP))
    if len(rows) > SHOWN:
        yield f"  ... and {len(rows) - SHOWN} more {kind}s"


def plot(requests, title=""):
    """The requests as a figure, one panel each: threads from left to right, sectors or banks upwards.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, axes = plt.subplots(1, len(requests), figsize=(7.5, 2.4), squeeze=False)
    for axis, request in zip(axes[0], requests, strict=True):
        lanes, places = np.array(request.places).T
        shared = request.memory == "shared"
        first = 0 if shared else places.min()
        axis.plot(lanes, places - first, "s", color="#0072B2", markersize=3)
        found = f"{request.ways} in one bank" if shared else _count(len(request.sectors), "sector")
        axis.set_title(f"{request.kind} {request.array}: {found}", fontsize=9)
        axis.set(xlim=(-1, WARP), xlabel="thread", ylabel="bank of 4 bytes" if shared else "sector of 32 bytes")
        axis.set(ylim=(-0.5, max(places.max() - first, 3) + 0.5), xticks=range(0, WARP + 1, 8))
        axis.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    figure.suptitle(title, fontsize=10)
    return figure


# --- the teaching kernels ---------------------------------------------------------------------------

#: What another process runs where kernels are not simulated in this one.
_CHILD = "import json, sys; from cuda_kernels import accesses; print(json.dumps(accesses._as_dicts(*sys.argv[1:])))"


def of_naive(name, rows, columns):
    """What the first warp of a kernel of `naive.NAIVE` asks for, as `Recorder.first_of_each`.

    x holds ones. Where kernels are not simulated in this process, another one runs it.
    """
    if not _simulated():
        command = [sys.executable, "-c", _CHILD, name, str(rows), str(columns)]
        environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise RuntimeError(f"{name!r} could not be simulated:\n{done.stderr}")
        return [Request(**fields) for fields in json.loads(done.stdout)]
    from cuda_kernels.naive import NAIVE

    row, recorder = NAIVE[name], Recorder()
    values = {"rows": rows, "columns": columns}
    for argument, (kind, dtype) in row.arguments.items():
        if kind == "pointer":  # long enough for gated x; a one is right wherever a scale is read
            array = np.full(2 * rows * columns, BF16_ONE if argument == "x" else 1, dtype)
            values[argument] = recorder.array(argument, array, writable=argument != "x")
    arguments = [values[argument] for argument in row.arguments]
    launch(row.kernel, *row.shape(rows, columns), arguments, watch=recorder.shared)
    return recorder.first_of_each()


def _simulated():
    """Whether kernels are simulated here, without deciding it: that is what importing `simt` does."""
    decided = sys.modules.get("cuda_kernels.simt")
    return os.environ.get("NUMBA_ENABLE_CUDASIM") == "1" if decided is None else decided.SIMULATED


def _as_dicts(name, rows, columns):
    return [asdict(request) for request in of_naive(name, int(rows), int(columns))]
