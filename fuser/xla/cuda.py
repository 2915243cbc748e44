"""Memory of a GPU as an XLA custom call sees it: XLA's buffers in and out, XLA's stream, XLA's allocator.

`cuda_kernels` is launched on the stream of the call frame and writes into XLA's results; nothing is copied, and only
what the host must know, such as the scale of delayed scaling, makes it wait for the stream.
"""

import math

import numpy as np

from cuda_kernels import contexts
from cuda_kernels.arrays import Array, Memory


def _bytes(shape, dtype):
    return math.prod(shape) * np.dtype(dtype).itemsize


class XlaMemory(Memory):
    """Device memory for one call: temporaries from XLA's allocator, launches on XLA's stream.

    Args:
        frame: a `fuser.xla.ffi.Frame`, or anything with its stream(), device_ordinal(), allocate() and free().
        driver: `cuda_kernels.contexts`, or anything with its fill_with_zeros(), copy_memory() and fetch_memory().
    """

    def __init__(self, frame, driver):
        super().__init__(frame.device_ordinal())
        self._frame, self._driver, self._stream, self._temporaries = frame, driver, frame.stream(), []

    def stream(self):
        """Handle of XLA's stream."""
        return self._stream

    def scope(self):
        """XLA has made its device current in this thread."""
        return contexts.NOTHING

    def empty(self, shape, dtype):
        """A temporary; XLA gets it back when the call ends, and reuses it in the order of the stream."""
        size = max(1, _bytes(shape, dtype))
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
        self._driver.fill_with_zeros(array.pointer, _bytes(array.shape, array.dtype), self._stream)

    def release(self):
        """Give all temporaries back."""
        while self._temporaries:
            self._frame.free(*self._temporaries.pop())


class CudaPlace:
    """A GPU during one call, as `HostPlace` is a CPU: a context manager that gives temporaries back at the end."""

    def __init__(self, frame, driver=contexts):
        from cuda_kernels.gpu import GPU

        self._driver, self.memory = driver, XlaMemory(frame, driver)
        self.backend = GPU(self.memory)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.memory.release()

    def view(self, buffer, shape, dtype):
        """An `Array` at the buffer's address."""
        return Array(None, buffer.memory, tuple(shape), dtype)

    def clear(self, array):
        """Fill an array with zero bytes."""
        self.memory.clear(array)

    def copy(self, source, target):
        """Copy an array to one of the same size."""
        size = _bytes(source.shape, source.dtype)
        self._driver.copy_memory(source.pointer, target.pointer, size, self.memory.stream())

    def read(self, array):
        """Return an array as one of NumPy, once the stream is done."""
        value = np.empty(array.shape, array.dtype)
        self._driver.fetch_memory(array.pointer, value, self.memory.stream())
        return value
