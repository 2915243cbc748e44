"""NumPy arrays as the kernels see them: copies in the memory of one device of the software GPU."""

from contextlib import contextmanager

import numpy as np

from cuda_kernels.arrays import Array, Memory, numpy_dtype
from cuda_kernels.emulator import driver_calls, loading
from cuda_kernels.result import Quantized
from refops.arguments import as_array


class NumpyMemory(Memory):
    """Arguments are copied to the device, results are copied back. Work goes to the default stream."""

    description = "a NumPy array"

    @staticmethod
    def holds(value):
        """Whether a value is a NumPy array, or a number of NumPy."""
        return isinstance(value, np.ndarray | np.generic)

    @staticmethod
    def device_of(value, name):
        """None: it is on every device, once it is copied there."""
        return None

    @contextmanager
    def scope(self):
        """The device is current, and everything that was started is done at the end.

        Raises:
            DeviceError: a kernel did something wrong. The device works again after that.
        """
        with driver_calls.current(self.device):
            try:
                yield
                driver_calls.synchronize(self.device)
            except Exception as error:
                said = loading.fault()
                if not said:
                    raise
                loading.reset()
                raise driver_calls.DeviceError(said) from error

    def returned(self, result):
        """What the caller gets: copies outside of the device's memory, as NumPy arrays."""
        if isinstance(result, Array):
            return driver_calls.to_host(result.owner, self.device)
        if isinstance(result, Quantized):
            once = {id(array): array for array in result.arrays.values()}  # both directions may have one amax
            copies = {number: driver_calls.to_host(array, self.device) for number, array in once.items()}
            return result.with_arrays({name: copies[id(array)] for name, array in result.arrays.items()})
        return super().returned(result)

    def _array(self, value, name):
        array = np.ascontiguousarray(as_array(value, name)).reshape(np.shape(value))
        if array.nbytes and not driver_calls.is_on_device(array):
            array = driver_calls.to_device(array, self.device)
        return Array(array, array.ctypes.data if array.nbytes else 0, array.shape, array.dtype.name)

    def _new(self, how, shape, dtype):
        make = {"empty": driver_calls.empty, "zeros": driver_calls.zeros}[how]
        return make(shape, numpy_dtype(dtype), self.device)

    def from_numpy(self, array):
        """A copy on the device."""
        return self._array(np.asarray(array), "array")

    def to_numpy(self, array):
        """A copy on the host."""
        return driver_calls.to_host(array.owner, self.device)
