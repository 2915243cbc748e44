"""Repeat calls that were made before: only what they allocated and launched is done again.

What a call does on a GPU follows from the description of its arguments (settings, shapes, dtypes, alignment, device),
never from the numbers in its arrays. So the first call of a description is recorded while it runs, and a later one is
replayed: its results are allocated, the pointers put in their places, its kernels started. That takes about
ten microseconds, where checking and planning take a hundred.

    call = seen(method, args, options, fast_math)      None: of no plan
    plan = plan_of(call)                               None: it is to be recorded, if `PLANS.wanted(call.key)`
    recording = Recording(call, memory, launcher)      a `Memory` and a launcher that write down what they do
    recording.keep(result)                             the plan, from here on

A call whose settings may be others in every step is recorded when it comes again (`Plans.wanted`). Nothing is recorded
of one that reads numbers on the host, copies an argument, or is given anything but arrays and plain settings; it takes
the long way every time.
"""

from dataclasses import replace
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from cuda_kernels.arrays import KINDS, Array, Memory
from cuda_kernels.described import Plans, describe, which_are_one
from cuda_kernels.launch import kinds_of, stream_of
from cuda_kernels.result import Quantized

PLANS = Plans()
_arrays_of = attrgetter("arrays")


# --- what a call is ---------------------------------------------------------------------------------


class Call(NamedTuple):
    """A call, described.

    Attributes:
        key: everything that decides what it does.
        kind: class of its `Memory`.
        device: number of the device that all of its arrays are on.
        arrays: its arrays; those of a `Quantized` one by one. addresses: where they lie.
        streams: handles that the arrays name, or None, each.
    """

    key: tuple
    kind: Any
    device: int
    arrays: list
    addresses: list
    streams: list

    def memory(self):
        """The `Memory` of its first array."""
        return self.kind(self.device, self.streams[0], self.arrays[0])


def seen(method, args, options, fast_math):
    """Return the `Call` of a method with arguments; None if it cannot have a plan."""
    if type(fast_math) is not bool:
        return None
    key, arrays = [method, fast_math, len(args), *options], []
    values = (*args, *options.values()) if options else args
    if not describe(values, key, arrays, KINDS, Quantized, _arrays_of) or not arrays:
        return None
    kind, addresses, streams = KINDS[type(arrays[0])], [], []
    device = None
    for array in arrays:
        found = kind.seen(array) if KINDS[type(array)] is kind else None
        if found is None:
            return None
        address, description, on, stream = found
        if device is None:
            device = on
        elif device != on:
            return None
        key.append(description)
        addresses.append(address)
        streams.append(stream)
    key.append(device)
    if len(arrays) > 1:
        key += which_are_one(arrays)
    return Call(tuple(key), kind, device, arrays, addresses, streams)


def plan_of(call):
    """Return the `Plan` of a call that was recorded before, None for any other."""
    return PLANS.get(call.key)


# --- what is done again -----------------------------------------------------------------------------


class Launch(NamedTuple):
    """A launch of a plan.

    Attributes:
        kernel, config, values: as of `launch.Prepared`, with the addresses of the call that was recorded.
        pointers: (place among the values, number of the array) of each pointer.
    """

    kernel: Any
    config: Any
    values: list
    pointers: tuple


class Plan(NamedTuple):
    """What a call does.

    Attributes:
        allocations: (how, shape, dtype) of each new array. Arrays are numbered: first the call's, then these.
        launches: `Launch` of each kernel.
        launcher: what starts them.
        result: function of the list of new arrays that returns the call's result.
    """

    allocations: tuple
    launches: tuple
    launcher: Any
    result: Any

    def run(self, call):
        """Do it, for a call of the same description, and return the result."""
        memory = call.memory()
        with memory.scope():
            for stream in call.streams[1:]:
                if stream is not None:
                    memory.wait_for(stream)
            owners, addresses = [], call.addresses
            for how, shape, dtype in self.allocations:
                owner, address = memory.made(how, shape, dtype)
                owners.append(owner)
                addresses.append(address)
            stream = stream_of(memory.stream())
            for kernel, config, values, pointers in self.launches:
                values = values.copy()
                for place, number in pointers:
                    values[place] = addresses[number]
                self.launcher.start(stream, kernel, config, values)
            return self.result(owners)


# --- recording --------------------------------------------------------------------------------------


class Address(int):
    """Where an array lies, with its number in the plan."""

    def __new__(cls, address, number):
        made = super().__new__(cls, address)
        made.number = number
        return made


class Recording:
    """Writes down what a call does while it is done.

    Attributes:
        memory, launcher: as those of the call, to be used in their place.
    """

    def __init__(self, call, memory, launcher):
        self.call, self.launches, self.allocations, self.owners = call, [], [], []
        self.whole = True  # until something happens that cannot be done again
        self.memory, self.launcher = RecordingMemory(self, memory), RecordingLauncher(self, launcher)
        self._numbers = {id(array): number for number, array in enumerate(call.arrays)}

    def given(self, value, array):
        """Note an array of the caller's, as the memory wrapped it."""
        number = self._numbers.get(id(value))
        if number is None or array.pointer != self.call.addresses[number]:  # not an argument, or a copy of one
            self.whole = False
            return array
        return replace(array, pointer=Address(array.pointer, number))

    def made(self, how, shape, dtype, array):
        """Note a new array."""
        self.whole &= array.aligned  # as every allocation must be that takes its place
        self.allocations.append((how, tuple(shape), dtype))
        self.owners.append(array.owner)
        return replace(array, pointer=Address(array.pointer, len(self.call.arrays) + len(self.owners) - 1))

    def launched(self, spec, values, prepared):
        """Note a launch."""
        pointers = []
        for place, (kind, value) in enumerate(zip(kinds_of(spec.operands()), values, strict=True)):
            if isinstance(value, Address):
                pointers.append((place, value.number))
            elif kind == "pointer" and value:  # of an array that nobody noted
                self.whole = False
        self.launches.append(Launch(*prepared, tuple(pointers)))

    def keep(self, result):
        """Keep the plan of the call, whose method returned `result`."""
        places = {id(owner): number for number, owner in enumerate(self.owners)}
        rebuild = _rebuilding(result, places)
        if not self.whole or rebuild is None:
            return
        plan = Plan(tuple(self.allocations), tuple(self.launches), self.launcher.launcher, rebuild)
        PLANS.keep(self.call.key, plan)


def _rebuilding(result, places):
    """The function of new arrays that makes a result again; None where it holds something else."""
    if isinstance(result, Array):
        number = places.get(id(result.owner))
        return None if number is None else itemgetter(number)
    if isinstance(result, tuple):
        parts = [_rebuilding(one, places) for one in result]
        return None if None in parts else lambda owners: tuple(part(owners) for part in parts)
    if not isinstance(result, Quantized) or not all(id(array) in places for array in result.arrays.values()):
        return None
    numbers = [(name, places[id(array)]) for name, array in result.arrays.items()]
    return lambda owners: result.with_arrays({name: owners[number] for name, number in numbers})


class RecordingMemory(Memory):
    """The `Memory` of a call, whose arrays a `Recording` notes."""

    def __init__(self, recording, memory):
        super().__init__(memory.device)
        self._recording, self._memory = recording, memory

    def wrap(self, value, name):
        """As `Memory.wrap`."""
        return self._recording.given(value, self._memory.wrap(value, name))

    def empty(self, shape, dtype):
        """As `Memory.empty`."""
        return self._recording.made("empty", shape, dtype, self._memory.empty(shape, dtype))

    def zeros(self, shape, dtype):
        """As `Memory.zeros`."""
        return self._recording.made("zeros", shape, dtype, self._memory.zeros(shape, dtype))

    def stream(self):
        """As `Memory.stream`."""
        return self._memory.stream()

    def from_numpy(self, array):
        """A copy on the device, of numbers that may differ in another call."""
        self._recording.whole = False
        return self._memory.from_numpy(array)

    def to_numpy(self, array):
        """A copy on the host, on whose numbers the call may depend."""
        self._recording.whole = False
        return self._memory.to_numpy(array)


class RecordingLauncher:
    """The launcher of a call, whose launches a `Recording` notes."""

    def __init__(self, recording, launcher):
        self._recording, self.launcher, self.target = recording, launcher, launcher.target

    def launch(self, spec, values, grid, block, stream):
        """As `Launcher.launch`; the device is current."""
        prepared = self.launcher.prepared(spec, values, grid, block)
        if prepared is not None:
            self._recording.launched(spec, values, prepared)
            self.launcher.start(stream_of(stream), *prepared)
