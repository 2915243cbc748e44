"""Callers' arrays as kernels see them, and new arrays of the caller's kind: torch, CuPy, Numba; NumPy simulated.

No library is imported for it: an array of a library means that the library is there.

    memory = memory_of(x)            which kind, on which device; results are of this kind
    memory.wrap(x, "x")              an `Array`: pointer, shape, dtype; contiguous
    memory.empty(shape, dtype)       an `Array` to be filled; its `owner` is what the caller gets
"""

import math
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuda_kernels import simt
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
    """Arrays of one library on one device."""

    def wrap(self, value, name):
        """Return `value` as a contiguous `Array`; it must be of this library and on this device.

        Raises:
            TypeError: another library. ValueError: another device.
        """
        if not self.holds(value):
            raise TypeError(f"{name} must be {self.description}, as the first argument is; got {describe(value)}")
        if self.device_of(value) != self.device:
            raise ValueError(
                f"{name} must be on device {self.device}, where the first argument is; got {self.device_of(value)}"
            )
        return self._array(value, name)

    def empty(self, shape, dtype):
        """Return an `Array` to be filled."""
        return self._array(self._new("empty", shape, dtype), "result")

    def zeros(self, shape, dtype):
        """Return an `Array` of zeros."""
        return self._array(self._new("zeros", shape, dtype), "result")

    def stream(self):
        """Handle of the stream that the library uses now."""
        return 0

    def scope(self):
        """Context in which the device is current."""
        return nullcontext()


class TorchMemory(Memory):
    """CUDA tensors of torch; work goes to torch's current stream."""

    description = "a torch tensor on a GPU"

    def __init__(self, tensor):
        self.torch, self.device = sys.modules["torch"], tensor.device.index

    @staticmethod
    def holds(value):
        """Whether a value is a CUDA tensor."""
        torch = sys.modules.get("torch")
        return torch is not None and isinstance(value, torch.Tensor) and value.is_cuda

    @staticmethod
    def device_of(value):
        """Number of its device."""
        return value.device.index

    def _array(self, tensor, name):
        tensor = tensor.detach().contiguous()
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Array(tensor, tensor.data_ptr(), tuple(tensor.shape), dtype)

    def _new(self, how, shape, dtype):
        return getattr(self.torch, how)(shape, dtype=getattr(self.torch, dtype), device=f"cuda:{self.device}")

    def stream(self):
        """Handle of torch's current stream, asked for at every launch."""
        return self.torch.cuda.current_stream(self.device).cuda_stream

    def scope(self):
        """Context in which the device is torch's current one."""
        return self.torch.cuda.device(self.device)

    def from_numpy(self, array):
        """A copy on the device."""
        return self._array(self.torch.from_numpy(np.ascontiguousarray(array)).to(f"cuda:{self.device}"), "array")

    def to_numpy(self, array):
        """A copy on the host."""
        raw = array.owner.view(self.torch.uint8) if array.dtype == "bfloat16" else array.owner
        return _as_dtype(raw.cpu().numpy(), array)


class CupyMemory(Memory):
    """CuPy arrays; bfloat16 as CuPy has it (ml_dtypes). Work goes to CuPy's current stream."""

    description = "a CuPy array"

    def __init__(self, array):
        self.cupy, self.device = sys.modules["cupy"], array.device.id

    @staticmethod
    def holds(value):
        """Whether a value is a CuPy array."""
        return type(value).__module__.split(".")[0] == "cupy"

    @staticmethod
    def device_of(value):
        """Number of its device."""
        return value.device.id

    def _array(self, array, name):
        with self.scope():
            array = self.cupy.ascontiguousarray(array)
        return Array(array, array.data.ptr, array.shape, np.dtype(array.dtype).name)

    def _new(self, how, shape, dtype):
        with self.scope():
            return getattr(self.cupy, how)(shape, dtype=numpy_dtype(dtype))

    def stream(self):
        """Handle of CuPy's current stream."""
        return self.cupy.cuda.get_current_stream().ptr

    def scope(self):
        """Context in which the device is CuPy's current one."""
        return self.cupy.cuda.Device(self.device)

    def from_numpy(self, array):
        """A copy on the device."""
        with self.scope():
            return self._array(self.cupy.asarray(array), "array")

    def to_numpy(self, array):
        """A copy on the host."""
        return _as_dtype(self.cupy.asnumpy(array.owner), array)


class InterfaceMemory(Memory):
    """Anything with a CUDA array interface or DLPack (Numba, JAX); results are Numba device arrays.

    bfloat16 results are uint16 there: Numba has no such array. Work goes to the default stream.
    """

    description = "an array with a CUDA array interface"

    def __init__(self, value):
        with explain_missing():
            from numba import cuda

            self.cuda, self.device = cuda, cuda.get_current_device().id

    @staticmethod
    def holds(value):
        """Whether a value has the interface."""
        return hasattr(value, "__cuda_array_interface__")

    def device_of(self, value):
        """Numba's current device: the interface does not say."""
        return self.device

    def _array(self, value, name):
        described = value.__cuda_array_interface__
        if described.get("strides") is not None:
            value = self.cuda.as_cuda_array(value)
            value = self.cuda.to_device(np.ascontiguousarray(value.copy_to_host()))
            described = value.__cuda_array_interface__
        dtype = getattr(getattr(value, "dtype", None), "name", None) or np.dtype(described["typestr"]).name
        return Array(value, described["data"][0], tuple(described["shape"]), dtype)

    def _new(self, how, shape, dtype):
        dtype = np.dtype(np.uint16) if dtype == "bfloat16" else np.dtype(dtype)
        array = self.cuda.device_array(shape, dtype)
        if how == "zeros":
            array.copy_to_device(np.zeros(shape, dtype))
        return array

    def from_numpy(self, array):
        """A copy on the device."""
        return self._array(self.cuda.to_device(np.ascontiguousarray(array)), "array")

    def to_numpy(self, array):
        """A copy on the host."""
        return _as_dtype(self.cuda.as_cuda_array(array.owner).copy_to_host(), array)


class SimulatedMemory(Memory):
    """NumPy arrays, for the simulator."""

    description, device = "a NumPy array", 0

    def __init__(self, value=None):
        pass

    @staticmethod
    def holds(value):
        """True: NumPy says what it cannot read."""
        return True

    @staticmethod
    def device_of(value):
        """The simulated device."""
        return 0

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
    """What an error says of an argument."""
    if isinstance(value, np.ndarray):
        return f"a NumPy array, {describe_array(value)}"
    device = getattr(value, "device", None)
    return f"{type(value).__module__}.{type(value).__name__}" + (f" on {device}" if device is not None else "")


def memory_of(value, name="x"):
    """Return the `Memory` for a caller's first array.

    Raises:
        TypeError: an array that no GPU can read.
    """
    if simt.SIMULATED:
        return SimulatedMemory()
    for kind in (TorchMemory, CupyMemory, InterfaceMemory):
        if kind.holds(value):
            return kind(value)
    if hasattr(value, "__dlpack_device__") and value.__dlpack_device__()[0] == 2:
        raise TypeError(
            f"{name} offers DLPack without a CUDA array interface: pass torch.from_dlpack({name}), which copies nothing"
        )
    raise TypeError(f"{name} must be an array on a GPU; got {describe(value)}. {ALTERNATIVE}.")
