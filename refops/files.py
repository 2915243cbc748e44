"""Reading tensors from files for the command line: safetensors, npy, npz, and PyTorch's pt.

Tensors are read one at a time, memory-mapped where the format allows. Nothing is ever unpickled: NumPy files are read
with `allow_pickle=False`, PyTorch files with `weights_only=True`. It does not write, and it does not know model
formats: a checkpoint, in one file or in shards, is a flat list of named arrays here (`refops.checkpoints` knows which
belong together).
"""

import json
import os
import re
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path

import ml_dtypes
import numpy as np

from refops.arguments import BFLOAT16, HIGH_PRECISION, dimensions
from refops.oracle.dumps import as_numpy
from refops.torch_tensors import from_torch

_NUMPY, _TORCH = rb"\x93NUMPY|PK[\x03\x05]|\x80", rb"PK[\x03\x05]|\x80"
#: Suffix -> what the bytes of such a file start with; 0x80 starts a pickle.
STARTS = {".safetensors": rb".{8}\{", ".npy": _NUMPY, ".npz": _NUMPY, ".pt": _TORCH, ".pth": _TORCH}
SUFFIXES = tuple(STARTS)
#: How the index of a checkpoint in shards ends, and what its shards are called where there is none.
INDEX, SHARD = ".safetensors.index.json", re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")
#: A .pt file that names more is refused, and so is one that holds more objects of any kind.
MOST_TENSORS, MOST_ENTRIES = 1_000_000, 3_000_000
#: The tensors of a .pt file may take this many times the file's bytes: tied weights do, some name one storage often.
MOST_SHARING = 64
#: Characters of a parser's own words that an error repeats.
MOST_OF_A_REASON = 400


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
        read_any: the same for dtypes that refops does not quantize (FP8 codes), where that needs another way.
        dtype, shape: as a safetensors file names them, F4 by elements; "" and None of others, which need to be read.
        note: what `read` does besides reading, or "".
        map_any: as `read_any`, without a copy: the array's memory is the file's.
    """

    name: str
    read: Callable[[], np.ndarray]
    read_any: Callable[[], np.ndarray] | None = None
    dtype: str = ""
    shape: tuple[int, ...] | None = None
    note: str = ""
    map_any: Callable[[], np.ndarray] | None = None

    def map_bits(self):
        """As `read_bits`, where the format allows it without a copy."""
        return (self.map_any or self.read_bits)()

    def read_bits(self):
        """The array as stored, in any dtype; raw bytes, as `np.save` keeps ml_dtypes' elements, as uint8 or uint16."""
        array = (self.read_any or self.read)()
        if array.dtype.type is np.void and array.dtype.names is None and array.dtype.itemsize in (1, 2):
            return array.view(f"u{array.dtype.itemsize}")
        return array

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
            raise UnsupportedTensorError(f"{stored.dtype} scalar; quantization needs at least one dimension")
        if array.size == 0:
            raise UnsupportedTensorError(f"no elements ({stored.dtype} of shape {array.shape})")
        return array, "; ".join(filter(None, (self.note, note)))


def described(dtype, shape):
    """A dtype and a shape in words: "F32 2x3"."""
    return f"{dtype} {dimensions(shape)}"


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
        with np.errstate(over="ignore", invalid="ignore"):  # a signalling NaN is invalid, and becomes a quiet one
            rounded = array.astype(np.float32)
        overflowed = int(np.count_nonzero(np.isinf(rounded) & np.isfinite(array)))
        return rounded, "float64 rounded to float32" + (f" ({overflowed} overflowed to inf)" if overflowed else "")
    raise UnsupportedTensorError(
        f"{described(dtype, array.shape)}; refops quantizes float32, float16, bfloat16 (and float64 rounded to float32)"
    )


def require_file(path):
    """Return `path` as a Path.

    Raises:
        FileError: there is no such file, or it is a directory or device.
    """
    path = Path(path)
    with _one_line_errors(path):  # a name too long for the file system
        exists = path.exists()
    if not exists:
        raise FileError(f"must be an existing file; got {str(path)!r}")
    if not path.is_file():
        raise FileError(f"must be a file, not a directory or device; got {str(path)!r}")
    return path


@contextmanager
def open_tensors(path):
    """Yield the list of `StoredTensor` in a file, in natural order: layers.2 before layers.10.

    Args:
        path: a file, the index of a checkpoint in shards (*.safetensors.index.json), or the folder that holds one.

    Raises:
        FileError: no such file, unknown suffix, empty, truncated or corrupt file, object arrays, torch missing for pt;
            a shard, or a tensor in it, that the index names and that is not there.
    """
    with ExitStack() as stack:
        if os.path.isdir(path) or str(path).endswith(".json"):
            tensors = _open_shards(Path(path), stack)
        else:
            tensors = _open_file(require_file(path), stack)
        tensors = _with_distinct_names(tensors)
        yield sorted(tensors, key=lambda tensor: re.sub(r"\d+", lambda digits: digits[0].zfill(20), tensor.name))


def _open_file(path, stack):
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise FileError(f"must end in one of {', '.join(SUFFIXES)}; got {str(path)!r}")
    with _one_line_errors(path):
        _require_start(path, suffix)
        if suffix == ".safetensors":
            return _open_safetensors(path)
        return _open_numpy(path, stack) if suffix in (".npy", ".npz") else _open_torch(path)


# --- checkpoints in shards --------------------------------------------------------------------------------------------


def _open_shards(path, stack):
    """The tensors of a checkpoint's shards, given its index or its folder."""
    if path.is_dir():
        indices = sorted(path.glob(f"*{INDEX}"))
        if len(indices) > 1:
            names = ", ".join(index.name for index in indices)
            raise FileError(f"must be a folder with one index; got {str(path)!r}, which has {names}: give one of them")
        if not indices:
            return _all_tensors(path, {shard: _open_file(shard, stack) for shard in _shards_in(path)})
        (path,) = indices
    weight_map = _weight_map(require_file(path))
    opened = {}
    for shard in sorted(set(weight_map.values())):
        if not (path.parent / shard).is_file():
            raise FileError(f"must have every shard of its index beside it; got {str(path)!r}: {shard!r} is missing")
        opened[shard] = {tensor.name: tensor for tensor in _open_file(path.parent / shard, stack)}
    for name, shard in weight_map.items():
        if name not in opened[shard]:
            raise FileError(f"must name tensors that are there; got {str(path)!r}: {shard!r} has no {name!r}")
    return [opened[shard][name] for name, shard in weight_map.items()]


def _all_tensors(folder, tensors_of):
    """The tensors of all files of a folder, given those of each; scales of one file would be taken for another's."""
    holders = {}
    for path, tensors in tensors_of.items():
        for tensor in tensors:
            other = holders.setdefault(tensor.name, path)
            if other != path:
                raise FileError(
                    f"must be a folder whose files hold each tensor once; got {str(folder)!r}, where two files hold "
                    f"{tensor.name!r}, {other.name!r} and {path.name!r}: give one of them"
                )
    return [tensor for tensors in tensors_of.values() for tensor in tensors]


def _weight_map(path):
    """name -> shard of a checkpoint's index."""
    with _one_line_errors(path):
        index = json.loads(path.read_bytes())
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise FileError(f"must hold weight_map, an object of tensor names and their shards; got {str(path)!r}")
    for shard in weight_map.values():
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise FileError(f"must name .safetensors files in its own folder; got {str(path)!r}, which names {shard!r}")
    return weight_map


def _shards_in(folder):
    """The safetensors files of a folder without an index; those that say how many there are must all be there."""
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise FileError(f"must be a file, or a folder that holds .safetensors files; got {str(folder)!r}")
    names = {shard.name for shard in shards}
    for stem, number, total in (found.groups() for found in map(SHARD.fullmatch, names) if found):
        for other in range(1, int(total) + 1):
            name = f"{stem}-{other:0{len(number)}}-of-{total}.safetensors"
            if name not in names:
                raise FileError(f"must be a folder that holds every shard; got {str(folder)!r}: {name!r} is missing")
    return shards


# --- arrays of any dtype, for the oracle ------------------------------------------------------------------------------

#: dtype in a safetensors file -> NumPy's or ml_dtypes'. FP4 comes as bytes, two codes each.
SAFETENSORS_DTYPES = {
    "BOOL": np.dtype(bool),
    **{f"{kind}{8 * size}": np.dtype(f"<{kind.lower()}{size}") for kind in "UI" for size in (1, 2, 4, 8)},
    **{f"F{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
    "BF16": BFLOAT16,
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F4": np.dtype(np.uint8),
}


def read_safetensors(path):
    """Return (name -> array, metadata) of a safetensors file, each array in its own dtype; FP4 as bytes.

    Raises:
        FileError: no such file, truncated, corrupt, or an array of a dtype that is none of the above.
    """
    path = require_file(path)
    with _one_line_errors(path):
        _require_start(path, ".safetensors")
        tensors = _open_safetensors(path)
        return {tensor.name: tensor.read_bits() for tensor in tensors}, _safetensors_header(path)[0]


def _safetensors_header(path):
    """Return (metadata, name -> (dtype, shape, start, end)) of a file that the library has accepted."""
    with open(path, "rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        entries = json.loads(handle.read(length))
    metadata = entries.pop("__metadata__", None) or {}
    begin = 8 + length
    return metadata, {
        name: (e["dtype"], tuple(e["shape"]), *(begin + offset for offset in e["data_offsets"]))
        for name, e in entries.items()
    }


def _read_safetensors_bits(path, name, entry):
    """A copy of an array: the file may be replaced while it lives."""
    return np.array(_map_safetensors_bits(path, name, entry))


def _map_safetensors_bits(path, name, entry):
    """An array of a file as it lies there, F4 as bytes; its memory is the file's."""
    dtype, shape, start, end = entry
    if dtype not in SAFETENSORS_DTYPES:
        known = ", ".join(SAFETENSORS_DTYPES)
        raise FileError(f"must hold arrays of {known}; got {str(path)!r}, where {name!r} is {dtype}")
    if dtype == "F4":
        shape = (*shape[:-1], shape[-1] // 2)
    if start == end:
        return np.empty(shape, SAFETENSORS_DTYPES[dtype])
    return np.memmap(path, np.uint8, "r", start, (end - start,)).view(SAFETENSORS_DTYPES[dtype]).reshape(shape)


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
        if Path(path).suffix.lower() != suffix:
            raise FileError(f"must be a {suffix} file; got {str(path)!r}")
        raise ValueError(f"it is not a {suffix} file")
    if start.startswith(b"PK") and not zipfile.is_zipfile(path):  # whose directory is at its end
        raise ValueError("it ends early")


@contextmanager
def _one_line_errors(path):
    """Turn whatever a parser raises into a `FileError`."""
    try:
        yield
    except (FileError, UnsupportedTensorError):
        raise
    except Exception as error:  # parsers of bytes that nobody vouches for raise anything, SyntaxError included
        reason = " ".join(str(error).split())
        if any(words in reason for words in ("pickle", "Python objects", "Weights only load failed")):
            of_fuser = "GLOBAL fuser.torch_load." in reason
            reason = "it holds pickled Python objects, and those are never loaded"
            if of_fuser:
                reason += "; quantized tensors of fuser are such: save tensor.dequantize() of each"
            elif STARTS.get(path.suffix.lower()) == _TORCH:
                reason += "; if it is a model, save model.state_dict()"
        elif len(reason) > MOST_OF_A_REASON:  # some quote the file
            reason = f"{reason[:MOST_OF_A_REASON]} ..."
        elif " " not in reason:  # such as KeyError: 101
            reason = f"it is damaged ({type(error).__name__})"
        raise FileError(f"must be a readable {path.suffix} file; got {str(path)!r}: {reason}") from error


@contextmanager
def _silent():
    """Drop warnings: of old pickle protocols, of torch's prototypes; what a reader has to say is in its errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _guarded(path, read):
    """`read` with its errors in one line, and a library's warnings about what a file holds dropped."""

    def guarded():
        with _one_line_errors(path), _silent():
            return read()

    return guarded


def _open_safetensors(path):
    from safetensors import safe_open  # its checks of the header; elements are mapped here

    with safe_open(path, framework="np") as handle:
        names = list(handle.keys())
    entries = _safetensors_header(path)[1]

    def reader(name):
        def read():
            dtype, shape, *_ = entries[name]
            if dtype not in SAFETENSORS_DTYPES or dtype.startswith(("F8", "F4")):
                raise UnsupportedTensorError(f"{described(dtype, shape)}; refops quantizes F32, F16, BF16 (and F64)")
            return _map_safetensors_bits(path, name, entries[name])

        return read

    return [
        StoredTensor(
            name,
            _guarded(path, reader(name)),
            _guarded(path, lambda name=name: _read_safetensors_bits(path, name, entries[name])),
            *entries[name][:2],
            map_any=_guarded(path, lambda name=name: _map_safetensors_bits(path, name, entries[name])),
        )
        for name in names
    ]


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
        with _silent():
            # Only the zip format (torch >= 1.6) can be mapped.
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except RuntimeError:  # pages of text about the inside of zip files
        raise ValueError("it is damaged, or a zip file of something else") from None

    def reader(tensor):
        def read():
            value = _dense(tensor)
            if value.dtype == torch.bfloat16:
                return from_torch(value)
            try:
                return value.numpy()
            except (TypeError, RuntimeError):  # a dtype that NumPy does not know
                raise UnsupportedTensorError(f"{value.dtype}; refops quantizes float32, float16, bfloat16") from None

        return read

    with _silent():  # asking a tensor of a prototype for its size warns
        named = list(islice(_named_tensors(content, "", torch.Tensor, count()), MOST_TENSORS + 1))
        if len(named) > MOST_TENSORS:  # a few kilobytes can name one tensor a hundred million times
            raise ValueError(f"it names more than {MOST_TENSORS} tensors")
        held = sum(tensor.nbytes for _, tensor in named if _is_dense(tensor) and not _lacks_elements(tensor))
    if held > MOST_SHARING * path.stat().st_size:  # or one large tensor some thousand times
        raise ValueError(f"its tensors take {held} bytes in all, more than {MOST_SHARING} times those of the file")
    return [
        StoredTensor(
            name or path.stem,
            _guarded(path, reader(tensor)),
            _guarded(path, lambda tensor=tensor, name=name: as_numpy(_dense(tensor), name)),
        )
        for name, tensor in named
    ]


def _is_dense(tensor):
    """Whether a torch tensor's elements lie in memory by strides, as NumPy's do."""
    strided = str(tensor.layout) == "torch.strided" and not tensor.is_nested
    return strided and not tensor.is_quantized and tensor.device.type == "cpu"


def _lacks_elements(tensor):
    """Whether a tensor has more elements than its storage, as `expand` makes them: one float can stand for 1e15."""
    return tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes()


def _dense(tensor):
    """A torch tensor without its history.

    Raises:
        UnsupportedTensorError: sparse, nested, quantized by torch, without data, or more elements than are stored.
    """
    value = tensor.detach()
    if not _is_dense(value):
        kind = "nested" if value.is_nested else "meta" if value.device.type == "meta" else value.layout
        raise UnsupportedTensorError(f"{kind} {value.dtype}; refops quantizes dense tensors")
    if _lacks_elements(value):
        stored = value.untyped_storage().nbytes() // value.element_size()
        raise UnsupportedTensorError(
            f"{value.numel()} elements, of which the file stores {stored}; a tensor must be stored whole: "
            "save its .contiguous()"
        )
    return value


def _named_tensors(content, name, tensor_type, visited):
    """Yield (dotted name, tensor) for every tensor in nested dicts and lists; `visited` counts what is in them."""
    if next(visited) > MOST_ENTRIES:  # or one empty list
        raise ValueError(f"it holds more than {MOST_ENTRIES} entries")
    if isinstance(content, tensor_type):
        yield name, content
    elif isinstance(content, dict | list | tuple):
        for key, value in content.items() if isinstance(content, dict) else enumerate(content):
            yield from _named_tensors(value, f"{name}.{key}" if name else str(key), tensor_type, visited)
