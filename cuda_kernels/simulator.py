"""A CUDA simulator for tests and notebooks: kernels run as plain Python, one greenlet for each thread.

Set NUMBA_ENABLE_CUDASIM=1 before `cuda_kernels` is imported; no GPU, no numba-cuda and none of its private parts are
needed. A barrier is a switch back to the loop over the block's threads, so a block of 256 threads costs milliseconds
where one operating-system thread for each would cost seconds. Every access to memory is checked: an index outside an
array, a misaligned vector access and a thread that misses a barrier raise. `launch(..., order="backward")` runs the
threads of a block from the last to the first: results that change show a missing barrier.

What it is not: a model of timing, of caches or of the order of concurrent warps.
"""

import sys
import threading

import numpy as np

try:
    from greenlet import greenlet
except ImportError:  # said when a kernel is launched: importing must not fail
    greenlet = None


#: Threads of a warp.
WARP = 32


class Pointer:
    """A flat array as a kernel sees it: no shape, no bounds; here out-of-bounds raises.

    Attributes:
        array: the 1-D array.
    """

    def __init__(self, array):
        self.array = array.reshape(-1) if array is not None else np.empty(0, np.uint8)
        if array is not None and not array.flags.c_contiguous:
            raise ValueError(f"a kernel's array must be contiguous; got strides {array.strides}")
        self._address = self.array.ctypes.data

    def _check(self, i, count):
        if not 0 <= i <= len(self.array) - count:
            raise IndexError(f"access to elements {i} to {i + count - 1} of an array of {len(self.array)}")

    def __getitem__(self, i):
        self._check(i, 1)
        return self.array[i]

    def __setitem__(self, i, value):
        self._check(i, 1)
        self.array[i] = value

    def read(self, i, size):
        """The `size` bytes at element `i`."""
        return self.array[self._vector(i, size)]

    def write(self, i, words):
        """Store words at element `i`."""
        self.array[self._vector(i, words.nbytes)] = words.view(self.array.dtype)

    def _vector(self, i, size):
        count = size // self.array.itemsize
        self._check(i, count)
        if (self._address + int(i) * self.array.itemsize) % size:
            raise ValueError(f"a {size}-byte access at element {i} is not aligned")
        return slice(i, i + count)


class _Current:
    """x, y, z of the running thread."""

    def __init__(self, name):
        self._name = name

    @property
    def x(self):
        return getattr(_thread(), self._name)[0]

    @property
    def y(self):
        return getattr(_thread(), self._name)[1]

    @property
    def z(self):
        return getattr(_thread(), self._name)[2]


def _thread():
    return greenlet.getcurrent()


class _Shared:
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


class _Local:
    @staticmethod
    def array(shape, dtype):
        return np.empty(shape, _as_dtype(dtype))


class _Atomic:
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


class _Cuda:
    """The part of `numba.cuda` that the kernels use."""

    threadIdx, blockIdx = _Current("thread_index"), _Current("block_index")
    blockDim, gridDim = _Current("block_shape"), _Current("grid_shape")
    shared, local, atomic = _Shared, _Local, _Atomic

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
        thread = _thread()
        thread.offered, thread.waiting_at = value, "shuffle"
        thread.parent.switch()
        return thread.block.threads[thread.number ^ lane_mask].offered_before


cuda = _Cuda()


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


def _run_quietly(kernel, arguments):
    with np.errstate(all="ignore"):  # inf, NaN and wrapping integers are ordinary; each greenlet has its own state
        kernel(*arguments)


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
        ImportError: greenlet is missing. IndexError, ValueError: a wrong access. RuntimeError: a missed barrier.
    """
    if greenlet is None:
        raise ImportError("the simulator needs greenlet: pip install greenlet")
    grid, block = ((*shape, 1, 1)[:3] for shape in (grid, block))
    backward = order == "backward"
    points = [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]
    for point in reversed(points) if backward else points:
        _Block(kernel, arguments, point, block, grid, watch).run(backward)
