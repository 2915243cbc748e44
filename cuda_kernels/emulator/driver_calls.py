"""Memory and launches through the driver's own calls, in a few functions, for NumPy arrays.

The memory of the software GPU is the host's: an array "on the device" is a NumPy array whose bytes the driver gave out.
Reading one is right once its work is done, which `synchronize` waits for.
"""

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from cuda_kernels.emulator import loading

#: Kinds of handles and addresses in ctypes.
HANDLE = ctypes.c_void_p
ADDRESS = ctypes.c_uint64

_contexts: dict[int, HANDLE] = {}


class DeviceError(RuntimeError):
    """The software GPU refused a call, or found a fault in a kernel; the message says which."""


def checked(code: int) -> None:
    """Raise DeviceError for a code that is not 0.

    After a fault the device is reset: the next call works again.
    """
    if code == 0:
        return
    said = ctypes.c_char_p()
    loading.driver().cuGetErrorString(code, ctypes.byref(said))
    if loading.fault():
        loading.reset()
    raise DeviceError((said.value or b"").decode() or f"CUDA error {code}")


# --- contexts ---------------------------------------------------------------------------------------


def context(device: int = 0) -> HANDLE:
    """Return the primary context of a device, retained once for as long as the process runs."""
    if device not in _contexts:
        made = HANDLE()
        checked(loading.driver().cuInit(0))
        checked(loading.driver().cuDevicePrimaryCtxRetain(ctypes.byref(made), device))
        _contexts[device] = made
    return _contexts[device]


@contextmanager
def current(device: int = 0) -> Iterator[None]:
    """A context manager in which a device is current; afterwards the previous one is current again."""
    checked(loading.driver().cuCtxPushCurrent_v2(context(device)))
    try:
        yield
    finally:
        loading.driver().cuCtxPopCurrent_v2(None)


def synchronize(device: int = 0) -> None:
    """Wait for all work of a device.

    Raises:
        DeviceError: a kernel failed.
    """
    with current(device):
        checked(loading.driver().cuCtxSynchronize())


# --- memory -----------------------------------------------------------------------------------------


def empty(shape: Any, dtype: Any, device: int = 0) -> np.ndarray:
    """Return an uninitialised array in the device's memory; freed with its last view."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if not size:
        return np.empty(shape, dtype)
    address = ADDRESS()
    with current(device):
        checked(loading.driver().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)))
    memory = (ctypes.c_uint8 * size).from_address(address.value)
    weakref.finalize(memory, _free, address.value, device).atexit = False
    return np.frombuffer(memory, np.uint8).view(dtype).reshape(shape)


def _free(address, device):
    """In the order of the default stream: what runs there may still use it."""
    with current(device):
        loading.driver().cuMemFreeAsync(ADDRESS(address), HANDLE(0))


def zeros(shape: Any, dtype: Any, device: int = 0) -> np.ndarray:
    """Return an array of zero bytes in the device's memory."""
    made = empty(shape, dtype, device)
    if made.nbytes:
        with current(device):
            size = ctypes.c_size_t(made.nbytes)
            checked(loading.driver().cuMemsetD8_v2(ADDRESS(made.ctypes.data), ctypes.c_uint8(0), size))
    return made


def to_device(array: np.ndarray, device: int = 0) -> np.ndarray:
    """Return a contiguous copy in the device's memory."""
    source = np.ascontiguousarray(array)
    made = empty(array.shape, array.dtype, device)
    if made.nbytes:
        with current(device):
            size = ctypes.c_size_t(made.nbytes)
            checked(loading.driver().cuMemcpyHtoD_v2(ADDRESS(made.ctypes.data), HANDLE(source.ctypes.data), size))
    return made


def to_host(array: np.ndarray, device: int = 0) -> np.ndarray:
    """Return a copy in host memory, after all work that the default stream waits for."""
    made = np.empty(array.shape, array.dtype)
    if not made.nbytes:
        return made
    with current(device):
        if array.flags.c_contiguous:
            size = ctypes.c_size_t(made.nbytes)
            checked(loading.driver().cuMemcpyDtoH_v2(HANDLE(made.ctypes.data), ADDRESS(array.ctypes.data), size))
        else:  # no single copy reads a strided view: NumPy does, once the work is done
            checked(loading.driver().cuStreamSynchronize(HANDLE(0)))
            made[...] = array
    return made


def label(array: np.ndarray, text: str) -> None:
    """Let faults call the memory of an array by a name."""
    if array.nbytes:
        loading.driver().emulator_label(ADDRESS(array.ctypes.data), text.encode())


def is_on_device(array: np.ndarray) -> bool:
    """Whether an array's bytes lie in memory that the driver gave out."""
    found = loading.driver().cuMemGetAddressRange_v2(None, None, ADDRESS(array.ctypes.data))
    return array.nbytes > 0 and found == 0


# --- code -------------------------------------------------------------------------------------------


class Kernel:
    """A kernel of PTX text, loaded; unloaded with its last reference.

    Attributes:
        parameter_sizes: bytes of each parameter.
    """

    def __init__(self, ptx: str, entry: str, device: int = 0):
        self._device, self._library, self._function = device, HANDLE(), HANDLE()
        load, get = loading.driver().cuLibraryLoadData, loading.driver().cuLibraryGetKernel
        text = ptx.encode()
        with current(device):
            checked(load(ctypes.byref(self._library), text, None, None, 0, None, None, 0))
            weakref.finalize(self, loading.driver().cuLibraryUnload, self._library).atexit = False
            checked(get(ctypes.byref(self._function), self._library, entry.encode()))
            self.parameter_sizes = self._sizes()

    def _sizes(self):
        sizes = []
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        ask = loading.driver().cuKernelGetParamInfo
        while not ask(self._function, ctypes.c_size_t(len(sizes)), ctypes.byref(offset), ctypes.byref(size)):
            sizes.append(size.value)
        return tuple(sizes)

    def launch(self, grid: Any, block: Any, shared: int, arguments: Any, stream: int = 0) -> None:
        """Start the kernel.

        Args:
            grid, block: three sizes each. shared: bytes of dynamic shared memory. arguments: ctypes values.
            stream: its handle; 0 is the default stream.

        Raises:
            DeviceError: the launch was refused, or the kernel failed (deferred: a later call says so).
        """
        pointers = (HANDLE * len(arguments))(*(ctypes.addressof(one) for one in arguments))
        with current(self._device):
            checked(
                loading.driver().cuLaunchKernel(self._function, *grid, *block, shared, HANDLE(stream), pointers, None)
            )
