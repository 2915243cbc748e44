"""Reading tensors from files for the command line: safetensors, npy, npz, and PyTorch's pt.

Tensors are read one at a time, memory-mapped where the format allows. Nothing is ever unpickled: NumPy files are read
with `allow_pickle=False`, PyTorch files with `weights_only=True`. Not for writing, and not for model formats as such: a
checkpoint is a flat list of named arrays here.
"""

import re
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from refops.arguments import BFLOAT16, HIGH_PRECISION

_NUMPY, _TORCH = rb"\x93NUMPY|PK[\x03\x05]|\x80", rb"PK[\x03\x05]|\x80"
#: Suffix -> what the bytes of such a file start with; 0x80 starts a pickle.
STARTS = {".safetensors": rb".{8}\{", ".npy": _NUMPY, ".npz": _NUMPY, ".pt": _TORCH, ".pth": _TORCH}
SUFFIXES = tuple(STARTS)
#: A .pt file that names more is refused.
MOST_TENSORS = 1_000_000


class FileError(Exception):
    """A file that cannot be read; the message goes after the argument's name: the rule and the value, in one line."""


class UnsupportedTensorError(Exception):
    """A tensor that is there but that refops does not quantize; the message is a short reason."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in an open file.

    Attributes:
        name: its name in the file; the file's stem for npy.
        read: function that returns the array as stored.
    """

    name: str
    read: Callable[[], np.ndarray]

    def load(self, *, raw_bfloat16=False):
        """Return (array, note): float32, float16 or bfloat16 of at least one dimension, and what was done to get it.

        Args:
            raw_bfloat16: elements of two raw bytes (void, uint16) are bfloat16. `np.save` stores ml_dtypes' bfloat16 as
                void, so an npy file alone cannot tell. The note says so of tensors that this does not apply to.

        Raises:
            UnsupportedTensorError: other dtypes, scalars, no elements. FileError: the bytes cannot be read.
        """
        stored = self.read()
        array, note = as_high_precision(stored, raw_bfloat16=raw_bfloat16)
        if raw_bfloat16 and array.dtype != BFLOAT16:
            unused = f"--dtype bfloat16 unused: {stored.dtype} is not raw 2-byte"
            note = f"{note}; {unused}" if note else unused
        if array.ndim == 0:
            raise UnsupportedTensorError("a scalar; quantization needs at least one dimension")
        if array.size == 0:
            raise UnsupportedTensorError(f"no elements (shape {array.shape})")
        return array, note


def as_high_precision(array, *, raw_bfloat16=False):
    """Return (array, note) in float32, float16 or bfloat16, native byte order; float64 is rounded to float32.

    Raises:
        UnsupportedTensorError: any other dtype.
    """
    dtype = array.dtype
    if dtype.kind in "Vu" and dtype.itemsize == 2 and dtype.names is None and dtype != BFLOAT16:
        if raw_bfloat16:
            return array.astype(dtype.newbyteorder("="), copy=False).view(BFLOAT16), f"{dtype} read as bfloat16"
        raise UnsupportedTensorError(f"raw 2-byte elements ({dtype}); if they are bfloat16, add --dtype bfloat16")
    if not dtype.isnative:
        array = array.astype(dtype.newbyteorder("="))
        dtype = array.dtype
    if dtype in HIGH_PRECISION:
        return array, ""
    if dtype == np.float64:
        with np.errstate(over="ignore"):
            rounded = array.astype(np.float32)
        overflowed = int(np.count_nonzero(np.isinf(rounded) & np.isfinite(array)))
        return rounded, "float64 rounded to float32" + (f" ({overflowed} overflowed to inf)" if overflowed else "")
    raise UnsupportedTensorError(
        f"{dtype}; refops quantizes float32, float16, bfloat16 (and float64 rounded to float32)"
    )


@contextmanager
def open_tensors(path):
    """Yield the list of `StoredTensor` in a file, in natural order: layers.2 before layers.10.

    Raises:
        FileError: no such file, unknown suffix, empty, truncated or corrupt file, object arrays, torch missing for pt.
    """
    path = Path(path)
    with _one_line_errors(path):  # a name too long for the file system
        exists = path.exists()
    if not exists:
        raise FileError(f"must be an existing file; got {str(path)!r}")
    if not path.is_file():
        raise FileError(f"must be a file, not a directory or device; got {str(path)!r}")
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise FileError(f"must end in one of {', '.join(SUFFIXES)}; got {str(path)!r}")
    with ExitStack() as stack:
        with _one_line_errors(path):
            _require_start(path, suffix)
            if suffix == ".safetensors":
                tensors = _open_safetensors(path, stack)
            elif suffix in (".npy", ".npz"):
                tensors = _open_numpy(path, stack)
            else:
                tensors = _open_torch(path)
        tensors = _with_distinct_names(tensors)
        yield sorted(tensors, key=lambda tensor: re.sub(r"\d+", lambda digits: digits[0].zfill(20), tensor.name))


def _with_distinct_names(tensors):
    """Number the second and later tensors of one name, as {"a": {"b": x}, "a.b": y} gives: none hides another."""
    seen = Counter()
    distinct = []
    for tensor in tensors:
        seen[tensor.name] += 1
        count = seen[tensor.name]
        distinct.append(tensor if count == 1 else replace(tensor, name=f"{tensor.name} ({count})"))
    return distinct


def _require_start(path, suffix):
    """Fail where the first bytes are not those of the format: parsers would blame something else."""
    with open(path, "rb") as handle:
        start = handle.read(9)
    if not start:
        raise ValueError("it is empty")
    if not re.match(STARTS[suffix], start, re.DOTALL):
        raise ValueError(f"it is not a {suffix} file")


@contextmanager
def _one_line_errors(path):
    """Turn whatever a parser raises into a `FileError`."""
    try:
        yield
    except (FileError, UnsupportedTensorError):
        raise
    except Exception as error:  # parsers of bytes that nobody vouches for raise anything, SyntaxError included
        reason = " ".join(str(error).split())
        if "pickle" in reason or "Python objects" in reason:
            reason = "it holds pickled Python objects, and those are never loaded"
        elif " " not in reason:  # such as KeyError: 101
            reason = f"it is damaged ({type(error).__name__})"
        raise FileError(f"must be a readable {path.suffix} file; got {str(path)!r}: {reason}") from error


def _guarded(path, read):
    """`read` with its errors in one line."""

    def guarded():
        with _one_line_errors(path):
            return read()

    return guarded


def _open_safetensors(path, stack):
    import ml_dtypes  # noqa: F401  registers np.dtype("bfloat16"), which safetensors asks NumPy for
    from safetensors import safe_open

    handle = stack.enter_context(safe_open(path, framework="np"))

    def reader(name):
        def read():
            try:
                return handle.get_tensor(name)
            except (AttributeError, TypeError):  # a dtype that NumPy does not know, such as F8_E4M3
                stored = handle.get_slice(name).get_dtype()
                raise UnsupportedTensorError(f"{stored}; refops quantizes F32, F16, BF16 (and F64)") from None

        return read

    return [StoredTensor(name, _guarded(path, reader(name))) for name in handle.keys()]  # noqa: SIM118  not a mapping


def _open_numpy(path, stack):
    handle = stack.enter_context(open(path, "rb"))  # noqa: SIM115  the stack closes it
    if handle.read(2) != b"PK":
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        return [StoredTensor(path.stem, lambda: array)]
    handle.seek(0)
    archive = stack.enter_context(np.load(handle, allow_pickle=False))

    def reader(name):
        def read():
            array = archive[name]
            if not isinstance(array, np.ndarray):
                raise UnsupportedTensorError("not an array")
            return array

        return read

    return [StoredTensor(name, _guarded(path, reader(name))) for name in archive.files]


def _open_torch(path):
    try:
        import torch
    except ImportError:
        raise FileError(
            f"needs PyTorch to be read; got {str(path)!r}: install torch, or save the tensors as safetensors"
        ) from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the pickle protocol
            # Only the zip format (torch >= 1.6) can be mapped.
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except RuntimeError:  # pages of text about the inside of zip files
        raise ValueError("it is damaged, or a zip file of something else") from None

    def reader(tensor):
        def read():
            value = tensor.detach()
            if value.layout != torch.strided or value.is_quantized:
                raise UnsupportedTensorError(f"{value.layout} {value.dtype}; refops quantizes dense tensors")
            if value.dtype == torch.bfloat16:
                return value.contiguous().view(torch.int16).numpy().view(BFLOAT16)
            try:
                return value.numpy()
            except (TypeError, RuntimeError):  # a dtype that NumPy does not know
                raise UnsupportedTensorError(f"{value.dtype}; refops quantizes float32, float16, bfloat16") from None

        return read

    named = list(islice(_named_tensors(content, "", torch.Tensor), MOST_TENSORS + 1))
    if len(named) > MOST_TENSORS:  # a few kilobytes can name one tensor a hundred million times
        raise ValueError(f"it names more than {MOST_TENSORS} tensors")
    return [StoredTensor(name or path.stem, _guarded(path, reader(tensor))) for name, tensor in named]


def _named_tensors(content, name, tensor_type):
    """Yield (dotted name, tensor) for every tensor in nested dicts and lists."""
    if isinstance(content, tensor_type):
        yield name, content
    elif isinstance(content, dict | list | tuple):
        for key, value in content.items() if isinstance(content, dict) else enumerate(content):
            yield from _named_tensors(value, f"{name}.{key}" if name else str(key), tensor_type)
