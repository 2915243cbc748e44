"""Tensors of callers as flat bytes: NumPy arrays and CPU tensors of PyTorch, viewed without a copy."""

import ctypes
from typing import Any

import ml_dtypes
import numpy as np

from cuda_kernels.interface import Operand
from refops.arguments import require_high_precision, require_high_precision_dtype, require_tensor
from refops.formats import require_codes

#: Name -> the NumPy dtype that results have.
DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16)} | {
    name: np.dtype(name) for name in ("float32", "float16", "uint8", "uint32")
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
#: An array where there is none.
NOTHING = np.empty(0, np.uint8)
_word_at = ctypes.c_size_t.from_address


def address_of_array(array):
    """Where a NumPy array begins: the word behind what each object of Python begins with.

    C code reads it there too (`PyArray_DATA`); to ask for `__array_interface__` takes ten times as long.
    """
    return _word_at(id(array) + object.__basicsize__).value


def _seen_numpy(array):
    flags = array.flags
    if not (flags.c_contiguous and flags.aligned):
        return None
    return address_of_array(array), array.dtype, array.shape


def _seen_torch(tensor):
    try:
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_neg():
            return None
        return tensor.data_ptr(), tensor.dtype, tensor.shape
    except RuntimeError:  # one without strides, or without memory of its own
        return None


#: Type of a caller's arrays, of all that were seen so far -> what a call that is made again (`calls`) asks of one:
#: (address, dtype, shape), None where it is not taken as it lies.
KINDS: dict[type, Any] = {np.ndarray: _seen_numpy}


class _Memory:
    """Memory that NumPy can view as writable bytes, whatever its owner says; compiled loops take no other arrays."""

    def __init__(self, address, size, owner):
        self.owner = owner
        self.__array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


def as_bytes(array):
    """The elements of a C-contiguous array as flat uint8, sharing its memory."""
    if array.size == 0:
        return NOTHING
    if array.flags.writeable:
        return array.reshape(-1).view(np.uint8)
    return np.asarray(_Memory(array.ctypes.data, array.nbytes, array))


def memory_of(array):
    """Return an array's memory, flat uint8 from its lowest address on, and where in that the array begins."""
    low, high = np.lib.array_utils.byte_bounds(array)
    return np.asarray(_Memory(low, high - low, array)), array.ctypes.data - low


def _is_torch(value):
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "data_ptr")


def _from_torch(tensor, name):
    """View a tensor of PyTorch as a NumPy array: strides as they are, no gradient."""
    if tensor.device.type != "cpu":
        raise TypeError(f"{name} must be a CPU tensor here; got one on {tensor.device}")
    tensor = tensor.detach().resolve_neg()
    kind = str(tensor.dtype).removeprefix("torch.")
    if kind != "bfloat16":
        return tensor.numpy()
    strides = tuple(2 * stride for stride in tensor.stride())
    if tensor.numel() == 0:
        return np.empty(tuple(tensor.shape), DTYPES["bfloat16"])
    owner = _Memory(tensor.data_ptr(), 0, tensor)
    owner.__array_interface__ |= {"shape": tuple(tensor.shape), "strides": strides, "typestr": "<u2"}
    return np.asarray(owner).view(DTYPES["bfloat16"])


def as_array(value, name):
    """Return a caller's argument as something that refops' checks take: a tensor of PyTorch as a NumPy view."""
    if not _is_torch(value):
        return value
    array = _from_torch(value, name)
    KINDS[type(value)] = _seen_torch
    return array


def operand(array):
    """Return an array as a contiguous, aligned `Operand`."""
    flags = array.flags
    if not (flags.c_contiguous and flags.aligned):
        array = np.require(array, requirements=["C", "A"])
    return Operand(array, array.shape, _NAMES.get(array.dtype) or array.dtype.name)


def tensor_operand(value, name):
    """Return an argument with at least one dimension as an `Operand`."""
    return operand(require_tensor(as_array(value, name), name))


def elements_operand(value, name):
    """Return an argument of any shape as an `Operand`."""
    return operand(require_high_precision(as_array(value, name), name))


def codes_operand(value, name):
    """Return uint8 codes of any shape as an `Operand`."""
    return operand(require_codes(as_array(value, name), name))


def storage_of(dtype, name):
    """Return the name of a high-precision dtype, NumPy's or PyTorch's."""
    if type(dtype).__module__ == "torch":
        dtype = DTYPES.get(str(dtype).removeprefix("torch."), dtype)
    return require_high_precision_dtype(dtype, name).name
