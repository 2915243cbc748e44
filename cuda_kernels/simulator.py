"""A CUDA simulator for tests and notebooks: kernels run as plain Python, one greenlet for each thread.

Set NUMBA_ENABLE_CUDASIM=1 before `cuda_kernels` is imported; no GPU, no numba-cuda and none of its private parts are
needed. A barrier is a switch back to the loop over the block's threads, so a block of 256 threads costs milliseconds
where one operating-system thread for each would cost seconds. Every access to memory is checked: an index outside an
array, a misaligned vector access and a thread that misses a barrier raise. `launch(..., order="backward")` runs the
threads of a block from the last to the first: results that change show a missing barrier.

What it is not: a model of timing, of caches or of the order of concurrent warps.
"""

import inspect
import sys
import threading

import numpy as np

from refops.arguments import say_who

try:
    from greenlet import greenlet
except ImportError:  # said when a kernel is launched: importing must not fail
    greenlet = None


#: Threads of a warp.
WARP = 32


#: What Python calls for operators on an object as a whole, without their underscores.
WHOLE = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift"),
    *("radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rpow", "rmatmul", "rand", "ror", "rxor", "rlshift"),
    *("rrshift", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert", "bool", "float", "int", "index", "array"),
)


class WholeArrayError(TypeError):
    """A kernel computes with an array where it has only elements."""


class Elements:
    """What a kernel sees of memory: elements, which it computes with, and nothing of the whole.

    Attributes:
        name: the array's, for messages. example: how one element is named, such as "x[i]".
    """

    name, example = "an array", "x[i]"

    def __repr__(self):
        return self.name

    def _refuse_whole(self, *_, **__):
        raise WholeArrayError(f"{self.name} is a whole array; a thread computes with single elements: {self.example}")

    def __len__(self):
        raise TypeError(f"{self.name} has no len() in a kernel: how many elements there are is an argument of its own")

    def __iter__(self):
        raise TypeError(f"{self.name} cannot be looped over: loop over indices and read {self.example}")

    def __getattr__(self, attribute):
        raise AttributeError(f"{self.name} has no .{attribute} in a kernel, only elements: {self.example}")


for _operator in WHOLE:
    setattr(Elements, f"__{_operator}__", Elements._refuse_whole)


class Pointer(Elements):
    """A flat array as a kernel sees it: no shape, no bounds; here out-of-bounds raises.

    Attributes:
        array: the 1-D array.
        name: "an array" until `launch` gives it that of the kernel's argument.
    """

    def __init__(self, array):
        self.array = array.reshape(-1) if array is not None else np.empty(0, np.uint8)
        if array is not None and not array.flags.c_contiguous:
            raise ValueError(f"a kernel's array must be contiguous; got strides {array.strides}")
        self._address = self.array.ctypes.data

    def _check(self, kind, i, count):
        if not isinstance(i, int | np.integer):
            raise TypeError(f"{self.name} is flat, its index one integer: row * columns + column; got {i!r}")
        if not 0 <= i <= len(self.array) - count:
            place = f"{self.name}[{i}]" if count == 1 else f"{self.name}[{i}] to [{i + count - 1}]"
            raise IndexError(f"out of bounds: {kind} of {place}, which has {len(self.array)} elements")

    def __getitem__(self, i):
        self._check("load", i, 1)
        return self.array[i]

    def __setitem__(self, i, value):
        self._check("store", i, 1)
        self.array[i] = value

    def read(self, i, size):
        """The `size` bytes at element `i`."""
        return self.array[self._vector("load", i, size)]

    def write(self, i, words):
        """Store words at element `i`."""
        self.array[self._vector("store", i, words.nbytes)] = words.view(self.array.dtype)

    def _vector(self, kind, i, size):
        count = size // self.array.itemsize
        self._check(kind, i, count)
        if (self._address + int(i) * self.array.itemsize) % size:
            raise ValueError(f"a {size}-byte {kind} of {self.name}[{i}] is not aligned")
        return slice(i, i + count)


class _Part:
    """A part of `numba.cuda`, under its name there: what the simulator lacks is refused by name."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, missing):
        there = ", ".join(name for name in dir(self) if not name.startswith("_"))
        raise AttributeError(f"the simulator has no {self._name}.{missing}; {self._name} has {there} here")


class _Current(_Part):
    """x, y, z of the running thread."""

    def __init__(self, name, attribute):
        super().__init__(name)
        self._attribute = attribute

    @property
    def x(self):
        return getattr(_thread(), self._attribute)[0]

    @property
    def y(self):
        return getattr(_thread(), self._attribute)[1]

    @property
    def z(self):
        return getattr(_thread(), self._attribute)[2]


def _thread():
    return greenlet.getcurrent()


class _Shared(_Part):
    """Shared memory: one array a block for each place in the source that asks for one."""

    @staticmethod
    def array(shape, dtype):
        frame = sys._getframe(1)
        block = _thread().block
        place = (frame.f_code, frame.f_lineno)
        if place not in block.shared:
            array = np.empty(shape, _as_dtype(dtype))
            array.view(np.uint8)[...] = 0xA5  # what nobody wrote shows
            block.shared[place] = block.watch(array)
        return block.shared[place]


class _Local(_Part):
    @staticmethod
    def array(shape, dtype):
        return np.empty(shape, _as_dtype(dtype))


class _Atomic(_Part):
    @staticmethod
    def max(pointer, i, value):
        old = pointer[i]
        pointer[i] = max(old, value)
        return old

    @staticmethod
    def add(pointer, i, value):
        old = pointer[i]
        pointer[i] = old + value
        return old


def _as_dtype(dtype):
    return np.dtype(getattr(dtype, "name", dtype))


class _Cuda(_Part):
    """The part of `numba.cuda` that the kernels use."""

    threadIdx, blockIdx = _Current("cuda.threadIdx", "thread_index"), _Current("cuda.blockIdx", "block_index")
    blockDim, gridDim = _Current("cuda.blockDim", "block_shape"), _Current("cuda.gridDim", "grid_shape")
    shared, local, atomic = _Shared("cuda.shared"), _Local("cuda.local"), _Atomic("cuda.atomic")

    @staticmethod
    def syncthreads():
        """Wait for all threads of the block."""
        thread = _thread()
        thread.waiting_at, thread.barriers = "syncthreads", thread.barriers + 1
        thread.parent.switch()

    @staticmethod
    def shfl_xor_sync(mask, value, lane_mask):
        """The value of the lane whose number differs in the bits of `lane_mask`; all lanes of the warp take part."""
        if not 0 <= lane_mask < WARP:
            raise ValueError(f"a shuffle's distance must be below {WARP}, the threads of a warp; got {lane_mask}")
        if isinstance(value, Elements):
            value._refuse_whole()
        thread = _thread()
        thread.offered, thread.waiting_at = value, "shuffle"
        thread.parent.switch()
        return thread.block.threads[thread.number ^ lane_mask].offered_before


cuda = _Cuda("cuda")


class _Register(threading.local):
    """32 bits, one such register for each thread of the operating system: written as one type and read as another.

    A view of a NumPy scalar gives the same bits but takes five times as long, and a kernel needs millions.
    """

    def __init__(self):
        self.u32 = np.zeros((), np.uint32)
        self.f32, self.i32 = self.u32.view(np.float32), self.u32.view(np.int32)


_register = _Register()


def as_f32(bits):
    """The float32 with these bits."""
    register = _register
    register.u32[()] = bits
    return register.f32[()]


def as_u32(x):
    """The bits of a float32."""
    register = _register
    register.f32[()] = x
    return register.u32[()]


def as_i32(x):
    """The bits of a float32 as a signed integer: the order of non-negative floats."""
    register = _register
    register.f32[()] = x
    return register.i32[()]


def shown_error(error):
    """The error that a kernel should show: a refusal of `Elements`, where NumPy put one of its own before it.

    NumPy asks for the number that it is to store, and says "setting an array element with a sequence" if it gets none.
    """
    refusal = error.__cause__
    is_hidden = isinstance(error, ValueError) and isinstance(refusal, WholeArrayError)
    return refusal.with_traceback(error.__traceback__) if is_hidden else error


def _run_quietly(kernel, arguments):
    with np.errstate(all="ignore"):  # inf, NaN and wrapping integers are ordinary; each greenlet has its own state
        try:
            kernel(*arguments)
        except (IndexError, TypeError, ValueError, AttributeError) as error:
            thread, shown = _thread(), shown_error(error)
            say_who(shown, named((thread.thread_index, thread.block_index)))
            if shown is error:
                raise
            raise shown from None


class _Block:
    def __init__(self, kernel, arguments, block_index, block_shape, grid_shape, watch):
        self.shared, self.threads, self.watch = {}, [], watch
        for number in range(block_shape[0] * block_shape[1] * block_shape[2]):
            thread = _Thread(lambda: _run_quietly(kernel, arguments))
            thread.block, thread.number = self, number
            thread.thread_index = (
                number % block_shape[0],
                number // block_shape[0] % block_shape[1],
                number // (block_shape[0] * block_shape[1]),
            )
            thread.block_index, thread.block_shape, thread.grid_shape = block_index, block_shape, grid_shape
            self.threads.append(thread)

    def run(self, backward):
        """Run warp after warp to the next block-wide barrier, again and again, until all threads have ended.

        A shuffle holds up its own warp only: what one warp has not done yet when another goes on needs a barrier.
        """
        warps = [self.threads[i : i + WARP] for i in range(0, len(self.threads), WARP)]
        if backward:
            warps = [warp[::-1] for warp in reversed(warps)]
        while warps:
            still = [warp for warp in warps if self._run_warp(warp)]
            waiting = sum(not thread.dead for thread in self.threads)
            if waiting not in (0, len(self.threads)):
                raise RuntimeError(
                    f"{waiting} of {len(self.threads)} threads of block {self.threads[0].block_index} wait at "
                    "syncthreads: every thread of a block must reach every barrier"
                )
            warps = still

    def _run_warp(self, warp):
        """Run a warp's threads until some wait at a block-wide barrier (True) or all have ended (False)."""
        while True:
            for thread in warp:
                thread.switch()
            still = [thread for thread in warp if not thread.dead]
            places = {thread.waiting_at for thread in still}
            if "shuffle" in places and (len(still) != len(warp) or len(places) != 1):
                raise RuntimeError(
                    f"{len(still)} of the {len(warp)} threads of warp {warp[0].number // WARP} of block "
                    f"{warp[0].block_index} wait at {' and '.join(sorted(places))}: every thread of a warp must reach "
                    "every shuffle"
                )
            for thread in still:
                thread.offered_before = thread.offered
            if "shuffle" not in places:
                return bool(still)


class _Thread(greenlet or object):
    """One CUDA thread."""

    offered = offered_before = waiting_at = None
    barriers = 0


def named(thread):
    """(thread_index, block_index) in words: "thread 3 of block (0, 1)"."""
    return "thread {} of block {}".format(*map(_index, thread))


def _index(index):
    """(3, 0, 0) -> "3", (3, 1, 0) -> "(3, 1)", (3, 1, 2) -> "(3, 1, 2)"."""
    used = index if index[2] else index[:2] if index[1] else index[:1]
    return str(used) if len(used) > 1 else str(index[0])


def current_thread():
    """The running thread: its number in the block, thread_index, block_index, and how many barriers it has reached."""
    return _thread()


def launch(kernel, grid, block, arguments, *, order="forward", watch=lambda shared: shared):
    """Run `kernel` for every thread of a grid.

    Args:
        kernel: a function decorated with `simt.kernel`.
        grid, block: (x, y, z) or shorter.
        arguments: its arguments; arrays as `Pointer`.
        order: "forward" or "backward", the order of the threads within a block and of the blocks.
        watch: function(array of shared memory) -> what the threads of a block get for it; for recording accesses.

    Raises:
        ImportError: greenlet is missing. IndexError, ValueError: a wrong access, with thread, block and the argument's
            name. RuntimeError: a missed barrier.
    """
    if greenlet is None:
        raise ImportError("the simulator needs greenlet: pip install greenlet")
    _name_pointers(kernel, arguments)
    grid, block = ((*shape, 1, 1)[:3] for shape in (grid, block))
    backward = order == "backward"
    points = [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]
    for point in reversed(points) if backward else points:
        _Block(kernel, arguments, point, block, grid, watch).run(backward)


def _name_pointers(kernel, arguments):
    """Give each `Pointer` the name of the kernel's argument, "x", or of the field of it that it is, "x.data"."""
    for name, value in zip(inspect.signature(kernel).parameters, arguments, strict=False):
        fields = getattr(value, "_asdict", dict)()
        for field, one in {name: value, **{f"{name}.{key}": one for key, one in fields.items()}}.items():
            if isinstance(one, Pointer) and one.name == Pointer.name:
                one.name, one.example = field, f"{field}[i]"
