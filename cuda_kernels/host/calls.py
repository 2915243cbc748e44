"""Repeat calls that were made before: only what they allocated and ran is done again.

As on a GPU (`cuda_kernels.plans`) what a call does follows from the description of its arguments, so the first call of
a description is recorded while it runs and a later one replayed: results are allocated, addresses put in their places,
compiled loops called. That takes some fifteen microseconds, where checking and planning take five times as long.

    call = seen(method, args, options)     None: of no plan
    doing = Recording(call)                what the backend allocates and runs its steps with
    doing.keep(result)                     the plan, from here on

A library in front of this one, `fuser`, describes its own calls in this way, with its own kinds of arrays: of one that
is seen again nothing is checked, converted or described twice (`seen` with `kinds`, `repeated`'s `recorded`).

A call whose settings may be others in every step is recorded when it comes again (`Plans.wanted`). Nothing is recorded
of one that looks at numbers (codes that a format may not have), copies an argument, or is given anything but arrays and
plain settings; it takes the long way every time.
"""

import functools
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np

from cuda_kernels.described import Plans, describe, which_are_one
from cuda_kernels.host.arrays import KINDS, address_of_array
from cuda_kernels.host.threads import share
from refops import Quantized
from refops.tiles import require_subnormals

PLANS = Plans()
#: Fields of `refops.Quantized` that are arrays.
FIELDS = (
    "rowwise_data",
    "rowwise_scale_inv",
    "columnwise_data",
    "columnwise_scale_inv",
    "amax_rowwise",
    "amax_columnwise",
)


class Allocation(NamedTuple):
    """How a new array is made.

    Attributes:
        new: makes it, called without arguments.
        kind: type of what it makes. address: function of one: where it begins.
    """

    new: Any
    kind: type
    address: Any


class Made(NamedTuple):
    """How a library in front of this one makes its results without wrapping NumPy arrays.

    Attributes:
        kind: type of its arrays.
        empty, zeros: functions of a shape and a dtype: what makes such an array, called without arguments.
        dtype: function of a NumPy dtype: what it is called there.
        address: function of an array: where it begins.
        front: function of what a method returned, arrays or `Quantized`: what that library returns in its place. A
            quantized tensor has the attributes of `Quantized` there too.
    """

    kind: type
    empty: Any
    zeros: Any
    dtype: Any
    address: Any
    front: Any

    def allocation(self, function, shape, dtype):
        """The `Allocation` in this way of what a function of NumPy, np.empty or np.zeros, makes."""
        making = self.zeros if function is np.zeros else self.empty
        return Allocation(making(shape, self.dtype(dtype)), self.kind, self.address)


#: The results of this library itself.
NUMPY = Made(
    kind=np.ndarray,
    empty=functools.partial(functools.partial, np.empty),
    zeros=functools.partial(functools.partial, np.zeros),
    dtype=lambda dtype: dtype,
    address=address_of_array,
    front=lambda result: result,
)


# --- what a call is ---------------------------------------------------------------------------------


class Call(NamedTuple):
    """A call, described.

    Attributes:
        key: everything that decides what it does.
        arrays: its arrays; those of a `Quantized` one by one. addresses: where they lie.
    """

    key: tuple
    arrays: list
    addresses: list


def seen(method, args, options, kinds=KINDS, quantized=Quantized, fields_of=None):
    """Return the `Call` of a method with arguments; None if it cannot have a plan.

    Args:
        kinds: as `arrays.KINDS`. quantized, fields_of: class of quantized tensors, function of one that returns
            name -> array.
    """
    fields_of = fields_of or arrays_of
    key, arrays = [method, len(args), *options], []
    values = (*args, *options.values()) if options else args
    if not describe(values, key, arrays, kinds, quantized, fields_of) or not arrays:
        return None
    addresses = []
    for array in arrays:
        found = kinds[type(array)](array)
        if found is None:
            return None
        address, dtype, shape = found
        key += dtype, shape
        addresses.append(address)
    if len(arrays) > 1:
        key += which_are_one(arrays)
    return Call(tuple(key), arrays, addresses)


def arrays_of(q):
    """Name -> array of a `Quantized`, those that it has."""
    fields = vars(q)
    return {name: fields[name] for name in FIELDS if fields[name] is not None}


# --- what is done, once and again -------------------------------------------------------------------


def run_shared(function, words, arrays, count, inline):
    """Let threads share `function(words, first, last)`, where `words` holds the addresses of `arrays`.

    A caller that is interrupted while it waits leaves a thread behind, which keeps the arrays until its range is done.
    One that is not waits for all ranges: what a thread still gets to see of its work after that keeps nothing.
    """
    kept = [arrays]

    def work(first, last, kept=kept):
        function(words, first, last)

    share(work, count, inline=inline)
    kept.clear()


class Loop(NamedTuple):
    """A compiled loop `function(words, first, last)` over range(size).

    Attributes:
        function, words: with the addresses of the call that was recorded.
        places: (place among the words, number of the array) of each address.
        size, inline: as `count` and `inline` of `threads.share`.
    """

    function: Any
    words: np.ndarray
    places: tuple
    size: int
    inline: bool

    def run(self, arrays, addresses):
        """Do it with these arrays."""
        function, words = self.function, self.words.copy()
        for place, number in self.places:
            words[place] = addresses[number]
        if self.inline:
            function(words, 0, self.size)
        else:
            run_shared(function, words, arrays, self.size, False)


class Step(NamedTuple):
    """A function of some arrays that the call made.

    Attributes:
        numbers: those of the arrays, or a constant itself.
    """

    function: Any
    numbers: tuple

    def run(self, arrays, addresses):
        """Do it with these arrays."""
        self.function(*[arrays[number] if type(number) is int else number for number in self.numbers])


class Plan(NamedTuple):
    """What a call does.

    Attributes:
        allocations: an `Allocation` of each new array. Arrays are numbered: first the call's, then these.
        steps: `Loop` or `Step`, in order.
        constants: arrays that loops have the addresses of, without a number: they are kept as the others are.
        result: function of the list of all arrays that returns the call's result.
    """

    allocations: tuple
    steps: tuple
    constants: tuple
    result: Any

    def run(self, call):
        """Do it, for a call of the same description, and return the result."""
        require_subnormals()
        arrays, addresses = call.arrays, call.addresses
        for new, kind, address in self.allocations:
            array = new()
            if type(array) is not kind:
                got = type(array).__name__
                raise TypeError(f"results must be tensors with memory of their own; a mode made a {got}")
            arrays.append(array)
            addresses.append(address(array))
        arrays.extend(self.constants)
        for step in self.steps:
            step.run(arrays, addresses)
        return self.result(arrays)


class Doing:
    """Does what a call does, without recording it."""

    def given(self, value, array):
        """Note a caller's argument and the NumPy array that it is."""

    def new(self, function, shape, dtype):
        """Return a new array: `function` is np.empty or np.zeros."""
        return function(shape, dtype)

    def constant(self, array):
        """Note an array that is the same whenever the call is made; return it."""
        return array

    def run(self, function, *arrays):
        """Call a function of constants and arrays that the call made, which reads or fills them."""
        function(*arrays)

    def loop(self, function, words, arrays, count, inline):
        """Run a compiled loop; `words` lacks the addresses of `arrays`, a list of (place, array)."""
        words = np.array(words, np.uint64)
        for place, array in arrays:
            words[place] = address_of_array(array)
        run_shared(function, words, arrays, count, inline)

    def depends_on_numbers(self):
        """Note that the numbers in an array decide what the call does."""


class Recording(Doing):
    """Writes down what a call does while it is done."""

    def __init__(self, call, arrays=None, made=NUMPY):
        """`arrays` are what the method gets for those of the call, `made` is how its results are made again."""
        self._key, self._given, self._made = call.key, len(call.arrays), made
        self._addresses = list(call.addresses)
        self._ids = {id(value): i for i, value in enumerate(call.arrays if arrays is None else arrays)}
        self._numbers, self._constants, self._alive = {}, {}, []
        self._allocations, self._steps = [], []
        self._whole = True  # until something happens that cannot be done again

    def _note(self, array, number):
        self._numbers[id(array)] = number
        self._alive.append(array)  # no other array gets its id

    def given(self, value, array):
        number = self._ids.get(id(value))
        if number is not None and (array.size == 0 or address_of_array(array) == self._addresses[number]):
            self._note(array, number)

    def new(self, function, shape, dtype):
        array = function(shape, dtype)
        self._note(array, self._given + len(self._allocations))
        self._allocations.append((function, tuple(shape), array.dtype))
        return array

    def constant(self, array):
        self._constants[id(array)] = array
        return array

    def _number(self, array):
        """Number of an array, or the constant itself; None for one that nobody noted."""
        number = self._constants.get(id(array))
        number = self._numbers.get(id(array)) if number is None else number
        self._whole &= number is not None
        return number

    def run(self, function, *arrays):
        numbers = tuple(self._number(array) for array in arrays)
        self._whole &= all(type(number) is not int or number >= self._given for number in numbers)
        self._steps.append(Step(function, numbers))
        function(*arrays)

    def loop(self, function, words, arrays, count, inline):
        words, places = np.array(words, np.uint64), []
        for place, array in arrays:
            words[place] = address_of_array(array)
            number = self._number(array)
            if type(number) is int:
                places.append((place, number))
        self._steps.append(Loop(function, words, tuple(places), count, inline))
        run_shared(function, words, arrays, count, inline)

    def depends_on_numbers(self):
        self._whole = False

    def keep(self, result):
        """Keep the plan of the call, whose method returned `result`."""
        # Functions of Python store into NumPy arrays; loops take any memory.
        steps = [step for step in self._steps if isinstance(step, Step)]
        stored = {number for step in steps for number in step.numbers if type(number) is int}
        rebuild = self._rebuilding(result, stored)
        if not self._whole or rebuild is None:
            return
        in_front = {self._numbers[id(array)] for array in _arrays_in(result)} - stored
        allocations = [
            (self._made if number in in_front else NUMPY).allocation(*made)
            for number, made in enumerate(self._allocations, self._given)
        ]
        constants = tuple(self._constants.values())
        PLANS.keep(self._key, Plan(tuple(allocations), tuple(self._steps), constants, rebuild))

    def _rebuilding(self, result, stored):
        """The function of all arrays that makes a result again; None where it holds something else.

        Args:
            stored: numbers of the arrays that are NumPy's also where a library in front has others.
        """
        front = self._made.front
        if isinstance(result, tuple):
            parts = [self._rebuilding(one, stored) for one in result]
            return None if None in parts else lambda arrays: tuple([part(arrays) for part in parts])
        numbers = [self._numbers.get(id(array)) for array in _arrays_in(result)]
        if not numbers or any(number is None or number < self._given for number in numbers):
            return None
        if isinstance(result, np.ndarray):
            (number,) = numbers
            return itemgetter(number) if number not in stored else lambda arrays: front(arrays[number])
        named = dict(zip(arrays_of(result), numbers, strict=True))
        recorded = front(result)
        kind, settings = type(recorded), {name: v for name, v in vars(recorded).items() if name not in named}
        boxed = [name for name, number in named.items() if number in stored]

        def rebuild(arrays):
            made = object.__new__(kind)  # what it checks was checked of the recorded one
            fields = vars(made)
            fields.update(settings)
            for name, number in named.items():
                fields[name] = arrays[number]
            for name in boxed:
                fields[name] = front(fields[name])
            return made

        return rebuild


def _arrays_in(result):
    """The arrays of what a method returned: one, a `Quantized`, or a tuple of such."""
    if isinstance(result, tuple):
        return [array for one in result for array in _arrays_in(one)]
    if isinstance(result, Quantized):
        return list(arrays_of(result).values())
    return [result] if isinstance(result, np.ndarray) else []


CallT = TypeVar("CallT", bound=Callable[..., Any])


def repeated(method: CallT, make: Callable[[Doing], Any]) -> CallT:
    """Return a method of an `Interface` that has plans; `make(doing)` is an interface whose backend does so."""
    name: Any = method.__name__

    @functools.wraps(method)
    def call(*args, **options):
        known = seen(name, args, options)
        if known is None:
            return method(*args, **options)
        plan = PLANS.get(known.key)
        if plan is not None:
            return plan.run(known)
        if not PLANS.wanted(known.key):
            return method(*args, **options)
        recording = Recording(known)
        result = getattr(make(recording), name)(*args, **options)
        recording.keep(result)
        return result

    def recorded(known, arrays, made, args, options):
        """Make a call that a library in front of this one has described, and keep the plan: `Recording`'s arguments."""
        if known is None or not PLANS.wanted(known.key):
            return method(*args, **options)
        recording = Recording(known, arrays, made)
        result = getattr(make(recording), name)(*args, **options)
        recording.keep(result)
        return result

    call.recorded = recorded  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]
