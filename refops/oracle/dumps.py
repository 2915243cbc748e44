"""Outputs of any origin as NumPy arrays with the dtype and shape that an operation writes.

A dump may be a NumPy array, a torch, CuPy, Numba or JAX array (on any device), or anything with DLPack or an array
interface; its elements may have their own dtype (bfloat16, float8_e4m3fn, float4_e2m1fn ...) or be raw bits. Whatever
contradicts the operation raises an error that says what was expected. Nothing is converted: bits stay bits.
"""

import math
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from refops.arguments import HIGH_PRECISION, converted, describe_array, with_article
from refops.formats import E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, INT8, ElementFormat, pack_fp4
from refops.oracle.quantized_tensors import is_quantized
from refops.scalings.declaration import ALIGNMENT, Layout
from refops.torch_tensors import from_torch, is_torch_tensor

FLOAT32 = np.dtype(np.float32)
#: Dtypes that hold one code of a format in each byte.
CODE_DTYPES = {
    np.dtype(ml_dtypes.float8_e4m3fn): E4M3,
    np.dtype(ml_dtypes.float8_e5m2): E5M2,
    np.dtype(ml_dtypes.float8_e8m0fnu): E8M0,
    np.dtype(ml_dtypes.float6_e3m2fn): E3M2,
    np.dtype(ml_dtypes.float6_e2m3fn): E2M3,
    np.dtype(ml_dtypes.float4_e2m1fn): E2M1,
    np.dtype(np.int8): INT8,
}


@dataclass(frozen=True)
class Slot:
    """One array that an operation writes.

    Attributes:
        name: its name among the outputs.
        kind: "values" (float32, float16 or bfloat16 numbers), "codes", "scales" (codes or float32) or "amax".
        shape: its shape as TE stores it.
        valid: the shape of the part that holds data; the rest, beyond it in each dimension, is padding.
        dtype: dtype of the stored array; for values the one to assume of raw 16-bit elements.
        fmt: format of codes and of 8-bit scales, else None.
        packed: codes in a byte, along the last dimension.
        layout, tensor: of scales, the layout that they are stored in and the (M, K) of their tensor.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    valid: tuple[int, ...]
    dtype: np.dtype
    fmt: ElementFormat | None = None
    packed: int = 1
    layout: Layout | None = None
    tensor: tuple[int, int] = (0, 0)

    @property
    def padded(self):
        """Whether the array has room beyond its data."""
        return self.shape != self.valid

    @property
    def valid_slices(self):
        """Index of the part that holds data."""
        return tuple(slice(size) for size in self.valid)


def as_numpy(value, name):
    """Return `value` as a NumPy array with the same bits; a dtype that NumPy lacks becomes ml_dtypes' or raw bits.

    Raises:
        TypeError: nothing that is an array, or one that cannot be copied here, such as a torch tensor on "meta".
    """
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name} must be a plain array; got a masked array of shape {value.shape}")
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    if is_quantized(value):
        raise TypeError(f"{name} must be an array; got a quantized tensor, {type(value).__name__}")
    if is_torch_tensor(value):
        return converted(lambda tensor: from_torch(tensor.cpu()), value, name)
    if hasattr(value, "copy_to_host"):  # Numba's device arrays
        return value.copy_to_host()
    if hasattr(value, "__cuda_array_interface__") and hasattr(value, "get"):  # CuPy
        return value.get()
    if hasattr(value, "__array__") or hasattr(value, "__array_interface__"):  # JAX among them
        array = converted(np.asarray, value, name)
    elif hasattr(value, "__dlpack__"):
        array = converted(np.from_dlpack, value, name)
    elif isinstance(value, bool | int | float | list | tuple):
        array = converted(np.asarray, value, name)
    else:
        raise TypeError(
            f"{name} must be an array (NumPy, torch, JAX, DLPack or an array interface); got {type(value).__name__}"
        )
    if array.dtype == object:
        raise TypeError(f"{name} must be an array of numbers; got {with_article(type(value).__name__)}")
    return array


def fit(value, slot):
    """Return (array, padding_given): `value` as an array of the slot's shape, contiguous; bits unchanged.

    Accepted shapes: the stored one; the same elements flat, or with leading dimensions flattened; for scales also the
    valid part alone, in two dimensions or flat (then padding_given is False and padding is filled with zeros).

    Raises:
        TypeError: a dtype that contradicts the slot. ValueError: a shape that does.
    """
    array = fit_dtype(as_numpy(value, slot.name), slot)
    for shape, complete in ((slot.shape, True), (slot.valid, not slot.padded)):
        if _reshapes(array.shape, shape):
            array = np.ascontiguousarray(array).reshape(shape)
            if complete:
                return array, True
            padded = np.zeros(slot.shape, array.dtype)
            padded[slot.valid_slices] = array
            return padded, False
    valid = f" (or its valid part, {slot.valid})" if slot.padded else ""
    packed = ", two FP4 codes per byte" if slot.packed == 2 else ""
    other = other_scales(slot, array.shape)
    as_other = other and f", the {'shape' if array.ndim > 1 else 'size'} of {other}"
    if not as_other and array.ndim == 2 and _reshapes(array.shape[::-1], slot.shape):
        as_other = f", which is transposed: give {slot.name}.T"
    raise ValueError(f"{slot.name} must have shape {slot.shape}{valid}{packed}; got {array.shape}{as_other}")


def other_scales(slot, got):
    """Say which scales, other than a slot's, have the shape `got`, or as many entries flat; "" if none do."""
    layout = slot.layout
    if layout is None or 0 in slot.tensor:
        return ""
    one = "one scale of the tensor" if math.prod(got) == 1 and layout.block is not None else ""
    if one and not layout.repeated:
        return one
    return _first_of_shape(_other_orders, slot, got) or one or _first_of_shape(_other_blocks, slot, got)


def _first_of_shape(others, slot, got):
    """What `others` yields first whose scales have the shape `got`, padded or not, or ""."""
    for what, other, columnwise in others(slot.layout, "columnwise" in slot.name):
        unpadded = replace(other, padding=(1, 1))
        if any(_reshapes(got, stored.scale_shape(slot.tensor, columnwise)) for stored in (unpadded, other)):
            return what
    return ""


def _other_orders(layout, columnwise):
    """Yield (what its scales are, layout, direction) of the same blocks, as a kernel may have stored their scales.

    "Transposed" means the other one of the orders [outer, block] and [block, outer] than `layout` stores. A layout with
    one scale for the tensor stores neither, so no scales are transposed there.
    """
    if layout.run is not None:
        yield "transposed scales", _scales(layout, layout.run, transposed=True), columnwise
        yield f"{'rowwise' if columnwise else 'columnwise'} scales", _scales(layout, layout.run), not columnwise
    if layout.repeated:
        yield "scales that are not repeated", _scales(layout, layout.block), columnwise


def _other_blocks(layout, columnwise):
    """Yield the same of blocks of other sizes, those of the layout's kind first, small ones before large ones."""
    sizes = [size for size in range(1, ALIGNMENT + 1) if ALIGNMENT % size == 0]
    lines = [((1, size), f"blocks of {size}") for size in sizes]
    squares = [((size, size), f"blocks of {size}x{size}") for size in sizes]
    stores_squares = layout.run is not None and layout.run[0] > 1
    transposed = "scales" if layout.run is None else "transposed scales"
    for block, name in (*squares, *lines) if stores_squares else (*lines, *squares):
        yield f"scales of {name}", _scales(layout, block), columnwise
        yield f"{transposed} of {name}", _scales(layout, block, transposed=True), columnwise


def _scales(layout, block, transposed=False):
    """Where scales of such blocks lie, and nothing else of the layout."""
    first = layout.scales_inner_first
    if transposed:
        first = tuple(not inner_first for inner_first in first)
    return Layout(block, scales_inner_first=first, padding=layout.padding, scale_order="fixed")


def _reshapes(got, wanted):
    """Whether `got` stands for the shape `wanted`: the same, flat, or with leading dimensions merged."""
    if math.prod(got) != math.prod(wanted):
        return False
    flat = len(got) <= 1
    merged = len(got) == 2 and len(wanted) > 1 and got[-1] == wanted[-1]
    return got == wanted or flat or merged


def native(array):
    """The array in the machine's byte order."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def fit_dtype(array, slot):
    """Return `array` with the slot's dtype; raw bits are viewed."""
    array = native(array)
    fit_kind = {"values": _fit_values, "codes": _fit_codes, "scales": _fit_scales, "amax": _fit_amax}[slot.kind]
    fitted = fit_kind(array, slot)
    if fitted is None:
        raise TypeError(f"{slot.name} must be {_expected_dtype(slot)}; got {describe_array(array)}")
    return fitted


def _fit_values(array, slot):
    if array.dtype in HIGH_PRECISION:
        return array
    # Raw bits may be signed in 16 bits, where torch had no other integers; in 32, such integers are sums of a product.
    is_raw = array.dtype.kind in "uV" or array.dtype == np.int16
    if is_raw and array.dtype.itemsize in (2, 4):
        dtype = FLOAT32 if array.dtype.itemsize == 4 else slot.dtype
        return array.view(dtype) if dtype.itemsize == array.dtype.itemsize else None
    return None


def _fit_codes(array, slot):
    if array.dtype in (np.uint8, np.int8):
        return array.view(np.uint8)
    if CODE_DTYPES.get(array.dtype) != slot.fmt:
        return None
    codes = np.ascontiguousarray(array).view(np.uint8)
    return pack_fp4(codes & np.uint8(15)) if slot.packed == 2 else codes


def _fit_scales(array, slot):
    return _fit_amax(array, slot) if slot.fmt is None else _fit_codes(array, slot)


def _fit_amax(array, slot):
    if array.dtype == slot.dtype:
        return array
    if array.dtype in (np.uint32, np.int32):
        return array.view(np.float32)
    return None


def _expected_dtype(slot):
    if slot.kind == "values":
        return "float32, float16 or bfloat16, or raw bits (uint32, uint16)"
    if slot.fmt is None:
        return "float32, or its raw bits (uint32)"
    own = [f" or {dtype}" for dtype, fmt in CODE_DTYPES.items() if fmt == slot.fmt]  # no other library has UE5M3
    return f"uint8 codes{''.join(own)}"
