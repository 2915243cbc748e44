"""Memory of a GPU as an XLA custom call sees it: XLA's buffers in and out, XLA's stream, XLA's allocator.

`cuda_kernels` is launched on the stream of the call frame and writes into XLA's results; nothing is copied, and only
what the host must know, such as the scale of delayed scaling, makes it wait for the stream.
"""

import math
from contextlib import nullcontext

import numpy as np

from cuda_kernels.arrays import Array, Memory
from fuser.xla.compute import Place

_ITEM_SIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1, "uint16": 2, "uint32": 4}


class XlaMemory(Memory):
    """Device memory for one call: temporaries from XLA's allocator, launches on XLA's stream.

    `frame` is a `fuser.xla.ffi.Frame`, or anything with its stream(), device_ordinal(), allocate() and free().
    """

    description = "a buffer of XLA"

    def __init__(self, frame, driver):
        self._frame, self._driver, self._temporaries = frame, driver, []
        self.device, self._stream = frame.device_ordinal(), frame.stream()

    def stream(self):
        """Handle of XLA's stream."""
        return self._stream

    def scope(self):
        """XLA has made its device current in this thread."""
        return nullcontext()

    def wrap(self, value, name):
        """Arrays of this call are wrapped already."""
        if not isinstance(value, Array):
            raise TypeError(f"{name} must be {self.description}; got {type(value).__name__}")
        return value

    def empty(self, shape, dtype):
        """A temporary; XLA gets it back when the call ends, and reuses it in the order of the stream."""
        size = max(1, math.prod(shape) * _ITEM_SIZE[dtype])
        address = self._frame.allocate(size)
        self._temporaries.append((address, size))
        return Array(None, address, tuple(shape), dtype)

    def zeros(self, shape, dtype):
        """A temporary of zeros."""
        array = self.empty(shape, dtype)
        self.clear(array)
        return array

    def clear(self, array):
        """Fill an array with zero bytes, in the order of the stream."""
        size = array.size * _ITEM_SIZE[array.dtype]
        if size:
            self._driver.fill(array.pointer, size, self._stream)

    def release(self):
        """Give all temporaries back."""
        while self._temporaries:
            self._frame.free(*self._temporaries.pop())


class Driver:
    """The CUDA driver's calls that are needed, by `cuda.bindings`."""

    def __init__(self):
        from cuda.bindings import driver

        self._driver = driver

    def _check(self, result):
        if result[0] != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"the CUDA driver failed: {result[0]!r}")

    def fill(self, address, size, stream):
        """Write zero bytes."""
        self._check(self._driver.cuMemsetD8Async(address, 0, size, stream))

    def copy(self, source, target, size, stream):
        """Copy device memory."""
        self._check(self._driver.cuMemcpyDtoDAsync(target, source, size, stream))

    def fetch(self, source, host, stream):
        """Copy device memory to a NumPy array, and wait for it."""
        self._check(self._driver.cuMemcpyDtoHAsync(host.ctypes.data, source, host.nbytes, stream))
        self._check(self._driver.cuStreamSynchronize(stream))


class CudaPlace(Place):
    """A GPU during one call: a context manager that gives temporaries back at the end."""

    def __init__(self, frame, driver=None):
        from cuda_kernels.gpu import GPU

        self._driver = driver or Driver()
        self.memory = XlaMemory(frame, self._driver)
        self.backend = GPU(self.memory)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.memory.release()

    def view(self, buffer, shape, dtype):
        """An `Array` at the buffer's address."""
        return Array(None, buffer.memory, tuple(shape), dtype)

    def clear(self, array):
        self.memory.clear(array)

    def copy(self, source, target):
        self._driver.copy(source.pointer, target.pointer, source.size * _ITEM_SIZE[source.dtype], self.memory.stream())

    def read(self, array):
        value = np.empty(array.shape, array.dtype)
        self._driver.fetch(array.pointer, value, self.memory.stream())
        return value
