"""Callers' arrays as kernels see them, and new arrays of the caller's kind: torch, CuPy, Numba; NumPy simulated.

No library is imported for it: an array of a library means that the library is there.

    memory = memory_of(x)            which kind, on which device; results are of this kind
    with memory.scope():             the device is current here, whichever it was before
        memory.wrap(x, "x")          an `Array`: pointer, shape, dtype; contiguous
        memory.empty(shape, dtype)   an `Array` to be filled
        memory.returned(result)      what the caller gets: the `owner` of each `Array`
"""

import importlib
import math
import sys
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from cuda_kernels import simt
from cuda_kernels.contexts import (
    LEGACY_STREAM,
    NO_STREAM,
    NOTHING,
    cuda_core,
    device_of_pointer,
    device_scope,
    fill_with_zeros,
    is_current,
    wait_for_stream,
)
from cuda_kernels.errors import ALTERNATIVE, explain_missing
from refops.arguments import BFLOAT16, as_array, describe_array

HIGH_PRECISION = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Array:
    """A contiguous array on a device.

    Attributes:
        owner: the library's own array, which keeps the memory alive.
        pointer: the address, or in the simulator the NumPy array itself.
        shape: its shape.
        dtype: name of the dtype.
    """

    owner: Any
    pointer: Any
    shape: tuple
    dtype: str

    @property
    def size(self):
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def aligned(self):
        """Whether 16-byte accesses may start at the base."""
        address = self.pointer if isinstance(self.pointer, int) else self.pointer.ctypes.data
        return address % 16 == 0


class Memory:
    """Arrays of one library on one device.

    `seen(value)` is what a call that is made again (`plans`) asks of an array: (address, description, device, stream).
    The description is hashable: shape, dtype and alignment. The stream is the handle that the array names, None where
    it names none. The answer is None for an array that is not contiguous or on no GPU; one with an interface must also
    have elements.

    Attributes:
        device: the device's number.
    """

    def __init__(self, device, stream=None, first=None):
        self.device = device

    @classmethod
    def of(cls, value, name):
        """The memory that an array of this library lies in."""
        return cls(cls.device_of(value, name))

    def wrap(self, value, name):
        """Return `value` as a contiguous `Array`; it must be of this library and on this device.

        Raises:
            TypeError: another library. ValueError: another device.
        """
        if not self.holds(value):
            raise TypeError(f"{name} must be {self.description}, as the first argument is; got {describe(value)}")
        device = self.device_of(value, name)
        if device not in (None, self.device):
            raise ValueError(f"{name} must be on device {self.device}, where the first argument is; got {device}")
        return self._array(value, name)

    def empty(self, shape, dtype):
        """Return an `Array` to be filled."""
        return self._array(self._new("empty", shape, dtype), "result")

    def zeros(self, shape, dtype):
        """Return an `Array` of zeros."""
        return self._array(self._new("zeros", shape, dtype), "result")

    def made(self, how, shape, dtype):
        """Return (owner, address) of a new array; `how` is "empty" or "zeros"."""
        owner = self._new(how, shape, dtype)
        return owner, self.address_of(owner)

    def stream(self):
        """Handle of the stream that the library uses now."""
        return NO_STREAM

    def wait_for(self, stream):
        """Let the work of this memory's stream wait for all work given so far to an array's stream."""

    def scope(self):
        """Context in which the device is current."""
        return NOTHING if is_current(self.device) else self._made_current()

    @contextmanager
    def _made_current(self):
        """Make the context current by the driver: the library's way leaves a new thread without one."""
        with self._library_scope(), device_scope(self.device):
            yield

    def _library_scope(self):
        return NOTHING

    def returned(self, result):
        """What the caller gets: arrays of the caller's library in place of `Array`, in tuples and dictionaries too."""
        if isinstance(result, tuple):
            return tuple(self.returned(one) for one in result)
        if isinstance(result, dict):
            return {name: self.returned(one) for name, one in result.items()}
        return result.owner if isinstance(result, Array) else result


class TorchMemory(Memory):
    """CUDA tensors of torch; work goes to torch's current stream."""

    description = "a torch tensor on a GPU"

    def __init__(self, device, stream=None, first=None):
        self.torch, self.device = sys.modules["torch"], device

    @staticmethod
    def holds(value):
        """Whether a value is a CUDA tensor."""
        torch = sys.modules.get("torch")
        return torch is not None and isinstance(value, torch.Tensor) and value.is_cuda

    @staticmethod
    def device_of(value, name):
        """Number of its device."""
        return value.device.index

    @staticmethod
    def seen(value):
        """(address, description, device, stream), see `Memory`."""
        if not value.is_cuda or not value.is_contiguous():
            return None
        address, device = value.data_ptr(), value.device.index
        return address, (value.shape, value.dtype, address % 16), device, None

    @staticmethod
    def address_of(tensor):
        """Where it lies."""
        return tensor.data_ptr()

    def _array(self, tensor, name):
        tensor = tensor.detach().contiguous()
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Array(tensor, tensor.data_ptr(), tuple(tensor.shape), dtype)

    def _new(self, how, shape, dtype):
        return getattr(self.torch, how)(shape, dtype=getattr(self.torch, dtype), device=f"cuda:{self.device}")

    def stream(self):
        """Handle of torch's current stream, asked for at every launch."""
        return self.torch.cuda.current_stream(self.device).cuda_stream

    def _library_scope(self):
        return self.torch.cuda.device(self.device)

    def from_numpy(self, array):
        """A copy on the device."""
        return self._array(self.torch.from_numpy(np.ascontiguousarray(array)).to(f"cuda:{self.device}"), "array")

    def to_numpy(self, array):
        """A copy on the host."""
        raw = array.owner.view(self.torch.uint8) if array.dtype == "bfloat16" else array.owner
        return _as_dtype(raw.cpu().numpy(), array)


class CupyMemory(Memory):
    """CuPy arrays; bfloat16 is ml_dtypes', as in CuPy. Work goes to CuPy's current stream."""

    description = "a CuPy array"

    def __init__(self, device, stream=None, first=None):
        self.cupy, self.device = sys.modules["cupy"], device

    @staticmethod
    def holds(value):
        """Whether a value is a CuPy array."""
        return type(value).__module__.split(".")[0] == "cupy"

    @staticmethod
    def device_of(value, name):
        """Number of its device."""
        return value.device.id

    @staticmethod
    def seen(value):
        """(address, description, device, stream), see `Memory`."""
        if not value.flags.c_contiguous:
            return None
        address = value.data.ptr
        return address, (value.shape, value.dtype, address % 16), value.device.id, None

    @staticmethod
    def address_of(array):
        """Where it lies."""
        return array.data.ptr

    def _array(self, array, name):
        array = self.cupy.ascontiguousarray(array)
        return Array(array, array.data.ptr, array.shape, np.dtype(array.dtype).name)

    def _new(self, how, shape, dtype):
        return getattr(self.cupy, how)(shape, dtype=numpy_dtype(dtype))

    def stream(self):
        """Handle of CuPy's current stream."""
        return self.cupy.cuda.get_current_stream().ptr

    def _library_scope(self):
        return self.cupy.cuda.Device(self.device)

    def from_numpy(self, array):
        """A copy on the device."""
        return self._array(self.cupy.asarray(array), "array")

    def to_numpy(self, array):
        """A copy on the host."""
        return _as_dtype(self.cupy.asnumpy(array.owner), array)


class InterfaceMemory(Memory):
    """Anything with a CUDA array interface (Numba, JAX), or with DLPack alone; results are Numba device arrays.

    bfloat16 results are uint16 there: Numba has no such array. Work goes to the stream that the first array names, else
    to the legacy default stream; what other arrays name is waited for there. Results name that stream in turn.
    """

    description = "an array with a CUDA array interface or DLPack"

    def __init__(self, device, stream=None, first=None):
        self.cuda, self.device, self._handle = _numba_cuda(), device, stream or LEGACY_STREAM
        self._first = first

    @classmethod
    def of(cls, value, name):
        """The memory that an array lies in, with the stream that it names."""
        number, described = cls.device_of(value, name), getattr(value, "__cuda_array_interface__", {})
        if number is None:  # it has no elements, and lies nowhere
            number = _numba_cuda().get_current_device().id
        return cls(number, stream_named(described, name), value)

    @staticmethod
    def holds(value):
        """Whether a value has the interface, or DLPack of a GPU."""
        return hasattr(value, "__cuda_array_interface__") or _has_dlpack(value)

    @staticmethod
    def device_of(value, name):
        """Number of the device that it lies on; None where it has no elements."""
        if not hasattr(value, "__cuda_array_interface__"):
            return value.__dlpack_device__()[1]
        address = value.__cuda_array_interface__["data"][0]
        return device_of_pointer(address, name) if address else None

    @staticmethod
    def seen(value):
        """(address, description, device, stream), see `Memory`."""
        described = getattr(value, "__cuda_array_interface__", None)  # a library's arrays on the CPU have none
        if described is None:
            return None
        address, stream = described["data"][0], described.get("stream")
        if described.get("strides") is not None or not address or stream == NO_STREAM:
            return None
        description = (described["shape"], described["typestr"], getattr(value, "dtype", None), address % 16)
        try:
            device = device_of_pointer(address, "x")
        except ValueError:  # the long way says so, under the argument's name
            return None
        return address, description, device, stream

    @staticmethod
    def address_of(array):
        """Where it lies."""
        return int(array.gpu_data.device_pointer)

    def stream(self):
        """Handle of the stream that the first array names."""
        return self._handle

    def wait_for(self, stream):
        """Let this memory's stream wait for another one."""
        wait_for_stream(self._handle, stream)

    @cached_property
    def _stream(self):
        """Numba's stream object: that of a Numba array itself, which stays alive with the results."""
        legacy = _legacy_stream()
        if self._handle == LEGACY_STREAM:
            return legacy
        given = getattr(self._first, "stream", None)
        is_it = isinstance(given, type(legacy)) and int(given) == self._handle
        return given if is_it else self.cuda.external_stream(self._handle)

    def _array(self, value, name):
        if not hasattr(value, "__cuda_array_interface__"):
            value = OfDlpack(value, self._handle)
        described = value.__cuda_array_interface__
        if not np.dtype(described["typestr"]).isnative:
            raise TypeError(f"{name} must have its bytes in the order of the machine; got {described['typestr']!r}")
        stream = stream_named(described, name)
        if stream is not None:
            self.wait_for(stream)
        if not _is_contiguous(described):
            host = self.cuda.as_cuda_array(value).copy_to_host()
            value = self.cuda.to_device(np.ascontiguousarray(host), stream=self._stream)
            described = value.__cuda_array_interface__
        dtype = getattr(getattr(value, "dtype", None), "name", None) or np.dtype(described["typestr"]).name
        return Array(value, described["data"][0], tuple(described["shape"]), dtype)

    def _new(self, how, shape, dtype):
        dtype = np.dtype(np.uint16) if dtype == "bfloat16" else np.dtype(dtype)
        array = self.cuda.device_array(shape, dtype, stream=self._stream)
        if how == "zeros":
            fill_with_zeros(self.address_of(array), array.alloc_size, self._handle)
        return array

    def from_numpy(self, array):
        """A copy on the device."""
        return self._array(self.cuda.to_device(np.ascontiguousarray(array), stream=self._stream), "array")

    def to_numpy(self, array):
        """A copy on the host, once the stream is done."""
        host = self.cuda.as_cuda_array(array.owner).copy_to_host(stream=self._stream)
        self._stream.synchronize()
        return _as_dtype(host, array)


#: DLPack's number for memory of a CUDA device.
DLPACK_CUDA = 2


def _has_dlpack(value):
    return hasattr(value, "__dlpack_device__") and value.__dlpack_device__()[0] == DLPACK_CUDA


class OfDlpack:
    """An array that offers only DLPack, as one with a CUDA array interface; its library lets a stream wait for it.

    Attributes:
        dtype: its NumPy dtype.
    """

    def __init__(self, value, stream):
        make = importlib.import_module(f"{cuda_core().__name__}.utils").StridedMemoryView
        view = getattr(make, "from_dlpack", make)(value, stream_ptr=stream)
        self._view, self.dtype = view, np.dtype(view.dtype)  # the view keeps the memory alive
        strides = None if view.strides is None else tuple(self.dtype.itemsize * one for one in view.strides)
        described = {"shape": tuple(view.shape), "typestr": self.dtype.str, "data": (view.ptr, False), "version": 3}
        self.__cuda_array_interface__ = {**described, "strides": strides}


@lru_cache(maxsize=1)
def _numba_cuda():
    with explain_missing():
        from numba import cuda
    return cuda


@lru_cache(maxsize=1)
def _legacy_stream():
    """Numba's legacy default stream, of whichever context is current."""
    return _numba_cuda().legacy_default_stream()


def stream_named(described, name):
    """The stream of a CUDA array interface: 1 the legacy default one, 2 that of the thread, a handle; None for none.

    Raises:
        ValueError: 0, which could be either of the default ones, and which the interface forbids.
    """
    stream = described.get("stream")
    if stream == NO_STREAM:
        raise ValueError(
            f"{name}.__cuda_array_interface__ must name a stream by a handle, 1 for the legacy default stream, 2 for "
            "the thread's, or None; got stream 0"
        )
    return stream


def _is_contiguous(described):
    """Whether the elements that an interface describes lie one after the other, the last dimension's first."""
    strides = described.get("strides")
    if strides is None:
        return True
    expected = np.dtype(described["typestr"]).itemsize
    for size, stride in zip(reversed(described["shape"]), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


class SimulatedMemory(Memory):
    """NumPy arrays, for the simulator."""

    description = "a NumPy array"

    @staticmethod
    def holds(value):
        """True: NumPy says what it cannot read."""
        return True

    @staticmethod
    def device_of(value, name):
        """The simulated device."""
        return 0

    def scope(self):
        """Nothing: there is one device."""
        return NOTHING

    def _array(self, value, name):
        array = np.ascontiguousarray(as_array(value, name)).reshape(np.shape(value))
        return Array(array, array, array.shape, array.dtype.name)

    def _new(self, how, shape, dtype):
        array = np.zeros(shape, numpy_dtype(dtype))
        if how == "empty":
            array.view(np.uint8)[...] = 0xA5  # what a kernel leaves out shows
        return array

    def from_numpy(self, array):
        """The array itself."""
        return self._array(array, "array")

    def to_numpy(self, array):
        """The array."""
        return array.owner


def numpy_dtype(name):
    """The NumPy (or ml_dtypes) dtype of a name."""
    return BFLOAT16 if name == "bfloat16" else np.dtype(name)


def _as_dtype(host, array):
    """Host bytes as the array's dtype and shape."""
    return np.ascontiguousarray(host).view(numpy_dtype(array.dtype)).reshape(array.shape)


def describe(value):
    """What an error says about an argument."""
    if isinstance(value, np.ndarray):
        return f"a NumPy array, {describe_array(value)}"
    device = getattr(value, "device", None)
    return f"{type(value).__module__}.{type(value).__name__}" + (f" on {device}" if device is not None else "")


#: Type of a caller's arrays -> their class of `Memory`, of all that were seen so far.
KINDS: dict[type, Any] = {}
#: What makes the `Memory` of NumPy arrays, where a context gives them one (`emulator.emulated`): function without
#: arguments, or None.
numpy_memory: ContextVar[Any] = ContextVar("numpy_memory", default=None)


def memory_of(value, name="x"):
    """Return the `Memory` for a caller's first array.

    Raises:
        TypeError: an array that no GPU can read.
    """
    if simt.SIMULATED:
        return SimulatedMemory(0)
    if isinstance(value, np.ndarray | np.generic):
        make = numpy_memory.get()
        made = make and make()
        if made:
            return made
    for kind in (TorchMemory, CupyMemory, InterfaceMemory):
        if kind.holds(value):
            memory = kind.of(value, name)
            KINDS[type(value)] = kind
            return memory
    raise TypeError(f"{name} must be an array on a GPU; got {describe(value)}. {ALTERNATIVE}.")
