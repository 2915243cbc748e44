"""Quantized checkpoints: which tensors of a file are codes, which are their scales, and what they stand for.

    weight                  F8_E4M3, F8_E5M2 or I8 codes    weight_scale or weight_scale_inv
    weight                  F8 or F4 codes                  weight_scale, E8M0 (MXFP8, MXFP4)
    weight_packed           U8, two E2M1 codes each         weight_scale, weight_global_scale (NVFP4)
    weight                  U8, two E2M1 codes each         weight_scale, weight_scale_2 (NVFP4 of ModelOpt)
    NAME_blocks             U8, two E2M1 codes each         NAME_scales, E8M0 (MXFP4 of gpt-oss)

`weight` stands for any name. A code is multiplied by its scale, even if the scale is called an inverse: it is the
inverse of what was multiplied by before the cast. compressed-tensors divides a block's scale by the tensor's, ModelOpt
multiplies the two. A tensor that fits none of these is left as it is, with a reason: no scale is ever guessed.

Sources: `decompress` of compressed_tensors' compressors, `dequantize` of ModelOpt's NVFP4QTensor and MXFP8QTensor,
DeepSeek-V3's README of its weights, OCP MX 1.0 for E8M0.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from refops.files import UnsupportedTensorError, described
from refops.formats import E2M1, E4M3, E5M2, E8M0, unpack_fp4
from refops.survey import AT_ONCE
from refops.tiles import ceil_div, cut

#: dtype of codes in a safetensors file -> value of each code. U8 are two E2M1 codes a byte where the names say so.
VALUES = {
    "F8_E4M3": E4M3.values,
    "F8_E5M2": E5M2.values,
    "F4": E2M1.values,
    "U8": E2M1.values,
    "I8": np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32),
}
#: dtypes of scales that are numbers. E8M0 is also kept as U8.
FLOATS = ("F32", "F16", "BF16")
#: Kind of scales -> the blocks that share one, (rows, columns), None where it is all of them. Which of them a file has
#: follows from the shapes; where two fit they are the same.
BLOCKS = {
    "float": ((None, None), (1, None), (128, 128), (1, 128)),
    "E8M0": ((1, 32), (128, 128)),
    "E4M3": ((1, 16),),
}
#: Rows that are decoded at once hold about so many elements.
DECODED_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class _Naming:
    """How the parts of one quantized tensor are called.

    Attributes:
        codes: suffix of the codes behind the tensor's name. packed: whether they are two E2M1 codes in a byte.
        parts: suffixes of the scales and, where there is one, of the tensor's own scale.
        combine: function of block scales and the tensor's to what codes are multiplied by.
    """

    codes: str
    packed: bool
    parts: tuple[str, ...]
    combine: Callable = np.multiply


#: The most specific first; all its parts must be present.
NAMINGS = (
    _Naming("_packed", True, ("_scale", "_global_scale"), np.divide),
    _Naming("", True, ("_scale", "_scale_2")),
    _Naming("_packed", True, ("_scale",)),
    _Naming("_blocks", True, ("_scales",)),
    _Naming("", False, ("_scale_inv",)),
    _Naming("", False, ("_scale",)),
)
#: A part that makes codes of integers stand for something else.
ZERO_POINT = "_zero_point"


class _UnknownLayoutError(Exception):
    """Codes and scales that fit no layout; the message says what there is."""


def decoded(tensors):
    """Return the tensors of a file with those that are codes dequantized when they are read, and without their scales.

    Args:
        tensors: list of `StoredTensor`, as of `refops.files.open_tensors`.

    Returns:
        list of `StoredTensor`: float32 ones in the place of codes, with a note on what the file holds. Codes whose
        scales are not there or fit no layout raise `UnsupportedTensorError` when they are read, with the same words
        for the scales that fit none.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    found, taken, refused = {}, set(), {}
    for tensor in tensors:
        for name, naming in _namings_of(tensor, by_name):
            parts = [by_name[name + suffix] for suffix in naming.parts]
            try:
                found[tensor.name] = _decoded(name, naming, tensor, parts, by_name)
                taken.update(part.name for part in parts)
            except _UnknownLayoutError as error:
                refused |= {one.name: replace(one, read=_refusing(str(error))) for one in (tensor, *parts)}
            break
        else:
            if tensor.dtype.startswith(("F8_E4", "F8_E5", "F4")):
                reason = f"codes without scales; looked for {tensor.name}_scale and {tensor.name}_scale_inv"
                found[tensor.name] = replace(tensor, read=_refusing(f"{_described(tensor)} {reason}"))
    found |= refused
    return [found.get(tensor.name, tensor) for tensor in tensors if tensor.name not in taken]


def _namings_of(tensor, by_name):
    """Yield (name of the quantized tensor, `_Naming`) of those whose codes a tensor can be, with all parts there."""
    for naming in NAMINGS:
        name = tensor.name.removesuffix(naming.codes)
        if tensor.name != name + naming.codes or (naming.codes and name in by_name):
            continue
        if not all(name + suffix in by_name for suffix in naming.parts):
            continue
        if (tensor.dtype in ("U8", "F4")) if naming.packed else (tensor.dtype in VALUES and tensor.dtype != "U8"):
            yield name, naming


def _decoded(name, naming, tensor, parts, by_name):
    """The `StoredTensor` of what codes and scales stand for.

    Raises:
        _UnknownLayoutError: they fit no layout.
    """
    what = f"{_described(tensor)} codes with {', '.join(f'{part.name} {_described(part)}' for part in parts)}"
    if name + ZERO_POINT in by_name:
        raise _UnknownLayoutError(f"{what} and a zero point, which refops does not know")
    shape, kind = _shape_of(naming, tensor), _kind_of(parts[0])
    block = _block_of(shape, parts[0].shape, kind)
    if block is None or not all(_is_of_tensors(part, shape) for part in parts[1:]):
        raise _UnknownLayoutError(f"{what}: a layout that refops does not know")

    def read():
        scales, *of_tensors = (_numbers(part, "float" if i else kind) for i, part in enumerate(parts))
        for numbers in of_tensors:
            with np.errstate(all="ignore"):
                scales = naming.combine(scales, numbers.reshape(-1, *[1] * (scales.ndim - 1)))
        coded = Coded(tensor.map_bits().view(np.uint8), VALUES[tensor.dtype], scales, block, shape)
        return coded if coded.size > AT_ONCE else np.asarray(coded)

    size = {(None, None): "tensor", (1, None): "row"}.get(block) or f"{block[0]}x{block[1]} block"
    holds = "U8 of two E2M1 codes each" if tensor.dtype == "U8" else f"{tensor.dtype} codes"
    note = f"{holds}, one {parts[0].dtype if kind == 'float' else kind} scale per {size}"
    note += "".join(f", one {part.dtype} per tensor" for part in parts[1:])
    return replace(tensor, name=name, read=read, read_any=None, dtype="F32", shape=shape, note=note)


def _shape_of(naming, tensor):
    """The shape of what a tensor's codes stand for."""
    shape = tensor.shape
    if naming.codes == "_blocks" and len(shape) > 2:
        shape = (*shape[:-2], shape[-2] * shape[-1])  # a block's bytes have a dimension of their own
    return (*shape[:-1], 2 * shape[-1]) if tensor.dtype == "U8" and shape else shape


def _is_of_tensors(part, shape):
    """Whether a part is one number, or one for each matrix of a (matrices, M, K) tensor."""
    count = math.prod(part.shape)
    return part.dtype in FLOATS and (count == 1 or (len(shape) == 3 and count == shape[0]))


def _kind_of(scales):
    """Key of `BLOCKS` for a tensor of scales, or "" for a dtype that holds none."""
    if scales.dtype in FLOATS:
        return "float"
    return {"F8_E8M0": "E8M0", "U8": "E8M0", "F8_E4M3": "E4M3"}.get(scales.dtype, "")


def _block_of(shape, of_scales, kind):
    """The elements that share a scale, (rows, columns) of `BLOCKS`, or None where the shapes fit none."""
    if not shape:
        return None
    if kind == "float" and math.prod(of_scales) == 1:
        return None, None
    if len(shape) < 2:
        return None
    *leading, rows, columns = shape
    if kind == "float" and of_scales == (rows,):
        return 1, None
    for block in BLOCKS.get(kind, ()):
        counts = [ceil_div(n, edge or max(n, 1)) for n, edge in zip((rows, columns), block, strict=True)]
        if of_scales == (*leading, *counts):
            return block
    return None


@dataclass(frozen=True)
class Coded:
    """Codes and their scales as the float32 tensor that they stand for, made some rows at a time.

    Attributes:
        codes: uint8 array, one code a byte or two of 4 bits. values: float32, that of each code.
        scales: float32 array of what the codes of each block are multiplied by.
        block: (rows, columns) of a block, None where it is all of them.
        shape: of the tensor.
    """

    codes: np.ndarray
    values: np.ndarray
    scales: np.ndarray
    block: tuple[int | None, int | None]
    shape: tuple[int, ...]
    dtype = np.dtype(np.float32)

    @property
    def size(self):
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def ndim(self):
        """Number of dimensions."""
        return len(self.shape)

    def rows(self, part):
        """float32 (R, K): a slice of the rows of the tensor as a matrix (M, K)."""
        k, rows = self.shape[-1], self.shape[-2] if self.ndim > 1 else 1
        height, width = self.block[0] or rows, self.block[1] or k
        factors = self.scales.reshape(-1, ceil_div(k, width))
        row = np.arange(part.start, part.stop)
        line = row // rows * ceil_div(rows, height) + row % rows // height
        of_elements = np.repeat(factors[line % len(factors)], width, axis=1)[:, :k]  # one scale of all is that of each
        stored = self.codes.reshape(math.prod(self.shape[:-1]), -1)[part]
        codes = unpack_fp4(stored) if len(self.values) == 16 else stored
        with np.errstate(all="ignore"):
            return self.values[codes] * of_elements

    def __array__(self, dtype=None, copy=None):
        """The whole tensor."""
        out = np.empty(self.shape, self.dtype)
        if self.size:
            m, k = math.prod(self.shape[:-1]), self.shape[-1]
            for part in cut(m, max(1, DECODED_AT_ONCE // k)):
                out.reshape(m, k)[part] = self.rows(part)
        return out if dtype is None else out.astype(dtype, copy=False)


def _numbers(part, kind):
    """float32 array of a part's scales, which are numbers or codes."""
    stored = part.read_bits()
    if kind == "float":
        return stored.astype(np.float32)
    return (E8M0 if kind == "E8M0" else E4M3).values[stored.view(np.uint8)]


def _refusing(reason):
    def read():
        raise UnsupportedTensorError(reason)

    return read


def _described(tensor):
    return described(tensor.dtype, tensor.shape)
