"""Quantized tensors as plain Python objects: buffers, the settings they were made with, and what can be made of them.

A storage is what an operation keeps for its own use (`quantizer.internal`); `fuser.quantization.tensor` makes the same
data a `torch.Tensor`. Everything is generic over `fuser.dispatch.Buffers` and the layout that the scaling declares
(`refops.scalings.declaration.Layout`); a format adds TE's attribute names. The arithmetic of casts is elsewhere
(`fuser.dispatch`).

Behaviour: TE's quantized_tensor.py and tensor/storage/*.py.
"""

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any, ClassVar

import torch

from fuser import dispatch
from fuser.dispatch import TENSOR_FIELDS, Buffers
from fuser.dtypes import HIGH_PRECISION, DType
from fuser.quantization.steps import forget_values
from refops.arguments import shown
from refops.quantization.result import matrix_shape, stored_layout
from refops.scalings import BlockScaling, CurrentScaling, MXFP8Scaling, NVFP4Scaling

__all__ = [
    "BlockScaledTensorStorage",
    "BufferStorage",
    "Float8BlockwiseQTensorStorage",
    "Float8TensorStorage",
    "MXFP8TensorStorage",
    "NVFP4TensorStorage",
    "QuantizedTensorStorage",
]

DIRECTIONS = ("rowwise", "columnwise")
#: Name -> class of this package's quantizers, which enter themselves: what is stored names the one that it needs.
QUANTIZERS: dict[str, Any] = {}


def fields_of(direction: str) -> tuple[str, ...]:
    """The names of the buffers of one copy, "rowwise" or "columnwise"."""
    return tuple(name for name in TENSOR_FIELDS if direction in name)


def resolve_shape(shape: tuple, numel: int) -> tuple[int, ...]:
    """`shape` (a sequence, or a call's arguments) with -1 filled in; `ValueError` unless it has `numel` elements."""
    if len(shape) == 1 and not isinstance(shape[0], int):
        shape = tuple(shape[0])
    known = 1
    for size in shape:
        known *= size if size != -1 else 1
    if -1 in shape:
        missing = numel // known if known else 0
        shape = tuple(missing if size == -1 else size for size in shape)
        known *= missing
    if known != numel:
        raise ValueError(f"shape must have {numel} elements; got {tuple(shape)}")
    return tuple(int(size) for size in shape)


def shallow_copy(original: Any) -> Any:
    """Another object of the same class with the same attributes, whatever the constructor takes."""
    duplicate = object.__new__(type(original))
    duplicate.__dict__.update(original.__dict__)
    return duplicate


def deep_copy(original: Any, memo: dict[int, Any], *, shared: tuple[str, ...]) -> Any:
    """Another object of the same class with copies of the attributes, except for those that are `shared`."""
    duplicate = memo[id(original)] = object.__new__(type(original))
    for name, value in original.__dict__.items():
        duplicate.__dict__[name] = value if name in shared else copy.deepcopy(value, memo)
    return duplicate


def _buffers_and_quantizer(buffers, *, quantizer=None):
    return buffers, quantizer


def _require_quantizer(quantizer):
    """Raise TypeError unless it is a `Quantizer`, whose module imports this one, or None."""
    if quantizer is not None and (isinstance(quantizer, type) or not hasattr(quantizer, "storage_class")):
        raise TypeError(f"quantizer must be a Quantizer or None; got {shown(quantizer)}")


def _shape_of(layout, rowwise, columnwise):
    """Shape of the tensor whose codes these are; of transposed packed ones two dimensions, as they are stored."""
    if rowwise is not None:
        return (*rowwise.shape[:-1], rowwise.shape[-1] * layout.packed) if rowwise.dim() else ()
    if columnwise is None:
        raise ValueError("rowwise or columnwise data must be given, which the shape follows from; got neither")
    if not columnwise.dim():
        return ()
    if not layout.columnwise_transposed:
        return tuple(columnwise.shape)
    k, *leading = columnwise.shape
    return (*leading[:-1], leading[-1] * layout.packed, k) if leading else (k,)


def buffer_property(*fields: str) -> property:
    """An attribute for a buffer: reads the first of `fields` that is there, writes those that are (or the first)."""

    def read(self: Any) -> Any:
        return next((b for b in (getattr(self.buffers, field) for field in fields) if b is not None), None)

    def write(self: Any, value: Any) -> None:
        present = [field for field in fields if getattr(self.buffers, field) is not None] or fields[:1]
        self.buffers = replace(self.buffers, **dict.fromkeys(present, value))

    return property(read, write, doc=f"`buffers.{fields[0]}`")


class QuantizedTensorStorage:
    """Base of everything quantized: the methods that operations call.

    The formats of this package are `BufferStorage`s. One of the caller's own has fields and a constructor of its own (a
    dataclass, say), and overrides as many of the methods that raise `NotImplementedError` here as are called: products
    need `dequantize`, or a quantizer with a product of its own (`fuser.gemm`); the backward pass the two of saving.
    """

    _quantizer: Any = None

    def _missing(self, method):
        name = type(self).__name__
        return NotImplementedError(f"{name} must override {method}: only a BufferStorage has a default for it")

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The plain tensor that is stood for, in its nominal dtype or `dtype`."""
        raise self._missing("dequantize")

    def get_usages(self) -> dict[str, bool]:
        """Which copies there are: {"rowwise": bool, "columnwise": bool}."""
        raise self._missing("get_usages")

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Keep, make or drop copies: None leaves one as it is, True makes it if it is missing, False drops it."""
        raise self._missing("update_usage")

    def copy_from_storage(self, src: Any) -> None:
        """Copy the data of `src`, of the same class, into this object's memory."""
        raise self._missing("copy_from_storage")

    def prepare_for_saving(self) -> tuple[list[torch.Tensor | None], Any]:
        """(its tensors, this object without them): autograd saves the former, the context keeps the latter."""
        raise self._missing("prepare_for_saving")

    def restore_from_saved(self, tensors: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Take back what `prepare_for_saving` listed from the front of `tensors`; returns the rest."""
        raise self._missing("restore_from_saved")

    def quantize_(self, tensor: torch.Tensor, *, noop_flag: torch.Tensor | None = None) -> Any:
        """Quantize `tensor` into this object, in place; nothing happens if `noop_flag` holds a value other than 0."""
        self._get_quantizer().update_quantized(tensor, self, noop_flag=noop_flag)
        return self

    def _get_quantizer(self):
        if self._quantizer is None:
            raise RuntimeError(f"{type(self).__name__} has no quantizer, so that no values can be quantized into it")
        return self._quantizer

    def update_quantizer(self, quantizer: Any) -> None:
        """Replace the quantizer. `RuntimeError` if there was none, `UserWarning` if it changes."""
        if self._quantizer is None:
            raise RuntimeError(f"Attempted to update the quantizer of {type(self).__name__}, which has none")
        if self._quantizer is not quantizer:
            message = f"The quantizer of {type(self).__name__} is being replaced: new values are quantized otherwise"
            warnings.warn(message, UserWarning, stacklevel=2)
            self._quantizer = quantizer


class BufferStorage(QuantizedTensorStorage):
    """A quantized tensor as `Buffers`, in any format that a scaling of `refops` declares.

    Attributes:
        buffers: `fuser.dispatch.Buffers`: codes, scales and amaxes, the settings, the shape, the nominal dtype.
        _quantizer: what quantizes new values into it, or None.
        _dtype: nominal dtype (torch), that of `dequantize()`.
        _rowwise_data ... _amax_columnwise: the buffers, by TE's names.
    """

    #: Class of `buffers`.
    buffers_class: ClassVar[Any] = Buffers
    #: Its fields that are data, in the order in which they are saved.
    data_fields: ClassVar[tuple[str, ...]] = TENSOR_FIELDS
    buffers: Any
    _default_scaling: ClassVar[Any] = None

    def __new__(cls, *args: Any, **fields: Any) -> Any:
        """Wrap `buffers` (with `quantizer`, or None) without a copy; or what TE's constructor takes, see `from_te`."""
        self = object.__new__(cls)
        self.buffers, self._quantizer = cls.constructor_arguments(args, fields)
        return self

    def __getnewargs__(self):
        return (self.buffers,)

    @classmethod
    def constructor_arguments(cls, args: tuple, fields: dict[str, Any]) -> tuple[Buffers, Any]:
        """(buffers, quantizer) of a constructor's arguments, those here or TE's."""
        if "buffers" in fields or (args and isinstance(args[0], cls.buffers_class)):
            return _buffers_and_quantizer(*args, **fields)
        quantizer, *made = cls.from_te(*args, **fields)
        _require_quantizer(quantizer)
        return cls._buffers_of(quantizer, *made), None if quantizer is None else quantizer.copy()

    @staticmethod
    def from_te(*args: Any, **fields: Any) -> tuple[Any, ...]:
        """TE's constructor arguments as those of this class's `_buffers_of`: the quantizer first, then the data."""
        raise TypeError("buffers must be given: TransformerEngine has no constructor for this format")

    @classmethod
    def _buffers_of(cls, quantizer, arrays, settings, dtype, swizzled=False):
        """`Buffers` of arrays by field, with `settings` of the scaling.

        How scales are chosen is as `quantizer` says, if it is of this format.
        """
        if quantizer is not None and quantizer.storage_class and issubclass(cls, quantizer.storage_class):
            scaling = replace(quantizer.layout_scaling(), **settings)
        else:
            scaling = cls._default_scaling(**settings)
        shape = _shape_of(scaling.layout, arrays["rowwise_data"], arrays["columnwise_data"])
        layout, stored = stored_layout(scaling, shape), {}
        for name, tensor in arrays.items():
            if tensor is None:
                continue
            wanted_shape, wanted_dtype = layout[name]
            if wanted_dtype.itemsize == tensor.element_size() == 1:
                tensor = tensor.view(torch.uint8)  # codes by the name of their format
            if tensor.numel() == 1 == math.prod(wanted_shape):
                tensor = tensor.view(wanted_shape)
            if tuple(tensor.shape) != wanted_shape or tensor.dtype != getattr(torch, wanted_dtype.name):
                raise ValueError(
                    f"{name} must be {wanted_dtype} of shape {wanted_shape} for a tensor of shape {shape} with "
                    f"{scaling}; got {tensor.dtype} of shape {tuple(tensor.shape)}"
                )
            stored[name] = tensor
        return Buffers(**stored, scaling=scaling, shape=shape, dtype=dtype, with_gemm_swizzled_scales=bool(swizzled))

    _rowwise_data = buffer_property("rowwise_data")
    _rowwise_scale_inv = buffer_property("rowwise_scale_inv")
    _columnwise_data = buffer_property("columnwise_data")
    _columnwise_scale_inv = buffer_property("columnwise_scale_inv")
    _amax_rowwise = buffer_property("amax_rowwise")
    _amax_columnwise = buffer_property("amax_columnwise")
    _dtype = buffer_property("dtype")
    _with_gemm_swizzled_scales = property(attrgetter("buffers.with_gemm_swizzled_scales"))

    # --- what it is -------------------------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        """Nominal dtype."""
        return self.buffers.dtype

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor that is stood for."""
        return torch.Size(self.buffers.shape)

    def size(self, dim: int | None = None) -> Any:
        """`shape`, or its entry `dim`."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Number of dimensions."""
        return len(self.buffers.shape)

    def numel(self) -> int:
        """Number of elements."""
        return self.shape.numel()

    @property
    def device(self) -> torch.device:
        """Where the buffers are; `RuntimeError` after `clear`."""
        if self.buffers.device is None:
            raise RuntimeError(f"{type(self).__name__} of shape {tuple(self.shape)} holds no data, hence has no device")
        return self.buffers.device

    def get_usages(self) -> dict[str, bool]:
        """Which copies there are: {"rowwise": bool, "columnwise": bool}."""
        return {d: getattr(self.buffers, f"{d}_data") is not None for d in DIRECTIONS}

    def get_data_tensors(self) -> tuple[torch.Tensor | None, ...]:
        """(rowwise codes, columnwise codes)."""
        return self.buffers.rowwise_data, self.buffers.columnwise_data

    def get_metadata(self) -> dict[str, Any]:
        """Constructor arguments of a storage or tensor with the same data."""
        return {"buffers": self.buffers, "quantizer": self._quantizer}

    def __repr__(self):
        copies = " + ".join(d for d, made in self.get_usages().items() if made) or "no data"
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self._dtype}, {copies}, {self._described()})"

    def _described(self) -> str:
        """The format, in words."""
        return str(self.buffers.scaling)

    # --- values -----------------------------------------------------------------------------------

    @dispatch.untraced
    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The plain tensor that is stood for, in the nominal dtype or `dtype`, from the rowwise copy if there is one.

        float32 arithmetic and one rounding. NVFP4's Hadamard transform of a columnwise copy is undone (TE raises).
        """
        return self._dequantized(dtype, columnwise=not self.get_usages()["rowwise"])

    @dispatch.untraced
    def dequantize_columnwise(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """As `dequantize`, from the columnwise copy: what a GEMM that reads that copy computes with."""
        return self._dequantized(dtype, columnwise=True)

    def _dequantized(self, dtype, *, columnwise):
        self._require_data()
        dtype = self._dtype if dtype is None else dtype
        supported = dtype if dtype in HIGH_PRECISION else torch.float32
        return dispatch.dequantize(self.buffers, dtype=supported, columnwise=columnwise).to(dtype)

    def _require_data(self):
        if self.buffers.device is None:
            raise RuntimeError(f"{type(self).__name__} of shape {tuple(self.shape)} holds no data to dequantize")

    # --- copies -----------------------------------------------------------------------------------

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Keep, make or drop copies: None leaves one as it is, True makes it if it is missing, False drops it.

        A copy can be made from the other where both hold the same codes: where one scale serves the tensor or a
        square block, without a transform of one copy and without stochastic rounding. TE makes fewer of them.

        Raises:
            RuntimeError: a copy is missing and cannot be made.
        """
        requests, present = {"rowwise": rowwise_usage, "columnwise": columnwise_usage}, self.get_usages()
        for direction in DIRECTIONS:
            if requests[direction] and not present[direction]:
                self._make_copy(direction)
        dropped = [d for d in DIRECTIONS if requests[d] is False and present[d]]
        if dropped:
            names = [name for name in self.data_fields for direction in dropped if direction in name]
            self.buffers = replace(self.buffers, **dict.fromkeys(names))

    def _make_copy(self, direction):
        word = {"rowwise": "row-wise", "columnwise": "column-wise"}[direction]
        other = "columnwise" if direction == "rowwise" else "rowwise"
        what = f"Requested {word} usage, but {type(self).__name__} of shape {tuple(self.shape)} is missing {word} data"
        if not self.get_usages()[other]:
            raise RuntimeError(f"{what}, and there is no other copy")
        if not self._copies_hold_the_same_codes():
            raise RuntimeError(f"{what}, and the other copy has other codes ({self.buffers.scaling})")
        swizzled = self.buffers.with_gemm_swizzled_scales
        self.buffers = dispatch.unswizzled(self.buffers) if swizzled else self.buffers
        data, scales = (getattr(self.buffers, f"{other}_{part}") for part in ("data", "scale_inv"))
        amax = getattr(self.buffers, f"amax_{other}")
        made = {
            f"{direction}_data": self._other_data(data, direction),
            f"{direction}_scale_inv": self._other_scales(scales, direction),
            f"amax_{direction}": None if amax is None else amax.clone(),
        }
        buffers = replace(self.buffers, **made)
        self.buffers = dispatch.swizzled(buffers) if swizzled else buffers

    def _copies_hold_the_same_codes(self) -> bool:
        """Whether one copy can be derived from the other."""
        return self.buffers.scaling.copies_share_codes

    def _other_data(self, data, direction):
        """The codes of copy `direction` from those of the other: transposed, where columnwise data are."""
        layout, (m, k) = self.buffers.scaling.layout, matrix_shape(self.buffers.shape)
        if not layout.columnwise_transposed:
            return data.clone()
        outer, inner = (m, k) if direction == "columnwise" else (k, m)
        codes = unpack_codes(data.reshape(outer, inner // layout.packed), layout.packed).t()
        return pack_codes(codes, layout.packed).contiguous().view(self._layout(f"{direction}_data"))

    def _other_scales(self, scales, direction):
        """The scales of copy `direction` from those of the other: one of each square block, as `direction` has them."""
        layout, columnwise = self.buffers.scaling.layout, direction == "columnwise"
        shape = matrix_shape(self.buffers.shape)
        if layout.block is None:
            return scales.clone()
        rows, columns = layout.scale_counts(shape, not columnwise)
        copies = layout.block[0] if layout.repeated else 1
        blocks = layout.scales_by_outer(scales, not columnwise)[:rows:copies, :columns].t()
        if layout.repeated:
            blocks = blocks.repeat_interleave(copies, dim=0)[: layout.scale_counts(shape, columnwise)[0]]
        made = blocks.t() if layout.scales_inner_first[columnwise] else blocks
        rows, columns = self._layout(f"{direction}_scale_inv")
        return torch.nn.functional.pad(made, (0, columns - made.shape[1], 0, rows - made.shape[0])).contiguous()

    def _layout(self, field):
        return stored_layout(self.buffers.scaling, tuple(self.buffers.shape))[field][0]

    # --- buffers ----------------------------------------------------------------------------------

    def map_buffers(self, function: Callable[[Any], Any], **changes: Any) -> Any:
        """`buffers` with every tensor replaced by `function(tensor)`, and fields in `changes` replaced."""
        mapped = {name: function(tensor) for name, tensor in self.buffers.tensors.items()}
        return replace(self.buffers, **mapped, **changes)

    def _saved_fields(self):
        """The tensors that a file has of this one, by the fields of `buffers`."""
        return dict(self.buffers.tensors)

    def viewed_buffers(self, shape: tuple) -> Any:
        """The buffers of a view: the same memory.

        With one scale for the tensor any shape will do, but only the rowwise copy survives a change of the last
        dimension. With blocks the last dimension stays.

        Raises:
            ValueError: a shape of other size, or a last dimension that has to stay.
        """
        shape = resolve_shape(shape, self.numel())
        source = self.buffers
        if matrix_shape(shape)[1] != matrix_shape(source.shape)[1]:
            source = self._without_blocks(shape)
        return source.viewed(shape)

    def _without_blocks(self, shape):
        if self.buffers.scaling.layout.block is None and self.buffers.rowwise_data is not None:
            return replace(self.buffers, **dict.fromkeys(fields_of("columnwise")))
        raise ValueError(
            f"shape of a view of {type(self).__name__} must keep the last dimension, along which blocks are scaled; "
            f"got {shape} for a tensor of shape {tuple(self.buffers.shape)}"
        )

    def view(self, *shape: Any) -> "BufferStorage":
        """The same data in another shape, without a copy; errors as `viewed_buffers`."""
        return type(self)(self.viewed_buffers(shape), quantizer=self._quantizer)

    def clear(self) -> None:
        """Drop all data: the memory is freed once nothing else holds the buffers."""
        self.buffers = self._without_data()

    def _without_data(self):
        return replace(self.buffers, **dict.fromkeys(self.data_fields))

    def copy_from_storage(self, src: "BufferStorage") -> None:
        """Copy the data of `src` into the buffers of this object, which keep their memory where sizes agree.

        Raises:
            TypeError: `src` is of another format. ValueError: its shape differs.
        """
        if self.stored_format() != src.stored_format():
            raise TypeError(
                f"src must be of the format of the destination, {self._described()}; got {src._described()}"
            )
        if tuple(src.shape) != tuple(self.shape):
            raise ValueError(f"src must have shape {tuple(self.shape)}; got {tuple(src.shape)}")
        self.set_buffers(src.buffers)

    def stored_format(self) -> tuple:
        """What tensors must agree on for one to take the buffers of the other. Not how scales are chosen."""
        scaling = self.buffers.scaling
        # A float32 scale means the same whoever chose it; what a coded one means is its scaling's.
        kind = type(scaling) if scaling.layout.scale_format else None
        return kind, scaling.fmt, scaling.layout, scaling.hadamard

    def set_buffers(self, new: Buffers) -> None:
        """Take the contents of `new`, into the present memory where shapes agree. Shape and nominal dtype stay."""
        self.buffers = self._with_contents_of(new)
        forget_values(self)

    def _with_contents_of(self, new):
        taken, device = {}, self.buffers.device
        for name in self.data_fields:
            source, present = getattr(new, name), getattr(self.buffers, name)
            if source is not None and present is not None and present.shape == source.shape:
                with torch.inference_mode():  # which may write what was made in it, and everything else
                    taken[name] = present.copy_(source)
            else:
                taken[name] = None if source is None else source.to(device or source.device, copy=True)
        return replace(new, **taken, shape=self.buffers.shape, dtype=self.buffers.dtype)

    def prepare_for_saving(self) -> tuple[list[torch.Tensor | None], "BufferStorage"]:
        """(the buffers, this object without them): autograd saves the former, the context keeps the latter."""
        tensors = [getattr(self.buffers, name) for name in self.data_fields]
        self.clear()
        return tensors, self

    def restore_from_saved(self, tensors: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Take back the buffers from the front of `tensors`; returns the rest."""
        count = len(self.data_fields)
        self.buffers = replace(self.buffers, **dict(zip(self.data_fields, tensors[:count], strict=True)))
        return tensors[count:]

    def __tensor_flatten__(self):
        """(attribute names of the buffers, the rest), as torch's wrapper subclasses do."""
        names = [f"_{name}" for name in self.buffers.tensors]
        return names, {"class": type(self), "buffers": self._without_data(), "quantizer": self._quantizer}

    @staticmethod
    def __tensor_unflatten__(inner_tensors, context, outer_size, outer_stride):
        """Undo `__tensor_flatten__`."""
        fields = {name.removeprefix("_"): tensor for name, tensor in inner_tensors.items()}
        buffers = replace(context["buffers"], **fields, shape=tuple(outer_size))
        return context["class"](buffers, quantizer=context["quantizer"])


def unpack_codes(data, count):
    """Codes, one per byte, of bytes (R, C) that hold `count` each, the first in the lowest bits: (R, C * count)."""
    if count == 1:
        return data
    bits = 8 // count
    return torch.stack([(data >> (bits * i)) & ((1 << bits) - 1) for i in range(count)], dim=-1).flatten(1)


def pack_codes(codes, count):
    """Undo `unpack_codes`."""
    packed, bits = codes[:, 0::count], 8 // count
    for i in range(1, count):
        packed = packed | (codes[:, i::count] << (bits * i))
    return packed


def _by_field(*tensors):
    """Field of `Buffers` -> tensor, of the first ones in their order."""
    return dict(zip(TENSOR_FIELDS, tensors, strict=False))


# --- by TE's names ----------------------------------------------------------------------------------


class _FP8Storage(BufferStorage):
    @property
    def _fp8_dtype(self) -> DType:
        return DType.of(self.buffers.scaling.fmt)


class Float8TensorStorage(_FP8Storage):
    """FP8 with one scale: `_data` (shape of the tensor), `_transpose` (last dimension first), `_scale_inv` (1,)."""

    @staticmethod
    def from_te(
        *,
        data: torch.Tensor | None,
        fp8_scale_inv: torch.Tensor,
        fp8_dtype: Any,
        fake_dtype: torch.dtype = torch.float32,
        data_transpose: torch.Tensor | None = None,
        quantizer: Any = None,
    ) -> Any:
        """The arguments of TE's constructor."""
        arrays = {"rowwise_data": data, "columnwise_data": data_transpose}
        scales = {f"{d}_scale_inv": fp8_scale_inv for d in DIRECTIONS if arrays[f"{d}_data"] is not None}
        return quantizer, arrays | scales, {"fmt": DType.of(fp8_dtype).format}, fake_dtype

    _default_scaling = CurrentScaling
    _data = buffer_property("rowwise_data")
    _transpose = buffer_property("columnwise_data")
    _scale_inv = buffer_property("rowwise_scale_inv", "columnwise_scale_inv")

    @property
    def _transpose_invalid(self) -> bool:
        """Whether there is no transpose to read."""
        return self.buffers.columnwise_data is None

    def _get_quantizer(self):
        """The quantizer, or one with the scale that the data have now (it isn't saved with delayed scaling)."""
        if self._quantizer is not None:
            return self._quantizer
        amax = torch.zeros(1, dtype=torch.float32, device=self.device)
        return QUANTIZERS["Float8Quantizer"](scale=1 / self._scale_inv, amax=amax, fp8_dtype=self._fp8_dtype)


class MXFP8TensorStorage(_FP8Storage):
    """MXFP8: codes in both copies in the tensor's orientation, E8M0 scale bytes for 32 elements."""

    _default_scaling = MXFP8Scaling

    @staticmethod
    def from_te(
        rowwise_data: torch.Tensor | None,
        rowwise_scale_inv: torch.Tensor | None,
        columnwise_data: torch.Tensor | None,
        columnwise_scale_inv: torch.Tensor | None,
        fp8_dtype: Any,
        quantizer: Any = None,
        with_gemm_swizzled_scales: bool = False,
        *,
        fake_dtype: torch.dtype = torch.float32,
    ) -> Any:
        """The arguments of TE's constructor, in its order."""
        arrays = _by_field(rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv)
        return quantizer, arrays, {"fmt": DType.of(fp8_dtype).format}, fake_dtype, with_gemm_swizzled_scales


class Float8BlockwiseQTensorStorage(_FP8Storage):
    """FP8 with float32 scales for 1x128 elements or 128x128 tiles; the columnwise copy is transposed."""

    _default_scaling = BlockScaling

    @staticmethod
    def from_te(
        rowwise_data: torch.Tensor | None,
        rowwise_scale_inv: torch.Tensor | None,
        columnwise_data: torch.Tensor | None,
        columnwise_scale_inv: torch.Tensor | None,
        fp8_dtype: Any,
        quantizer: Any,
        is_2D_scaled: bool,
        *,
        fake_dtype: torch.dtype = torch.float32,
    ) -> Any:
        """The arguments of TE's constructor, in its order."""
        arrays = _by_field(rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv)
        return quantizer, arrays, {"fmt": DType.of(fp8_dtype).format, "block_dim": 2 if is_2D_scaled else 1}, fake_dtype

    @property
    def _is_2D_scaled(self) -> bool:  # noqa: N802 (TE's name)
        return self.buffers.scaling.block_dim == 2


class NVFP4TensorStorage(BufferStorage):
    """NVFP4: two codes per byte, E4M3 scale bytes for 16 elements, float32 amaxes; a transposed columnwise copy."""

    _default_scaling = NVFP4Scaling
    _fp4_dtype = DType.kFloat4E2M1
    _row_scaled_nvfp4 = property(attrgetter("buffers.scaling.row_scaled"))
    _nvfp4_e4m3_max = property(attrgetter("buffers.scaling.e4m3_max"))

    @staticmethod
    def from_te(
        rowwise_data: torch.Tensor | None,
        rowwise_scale_inv: torch.Tensor | None,
        columnwise_data: torch.Tensor | None,
        columnwise_scale_inv: torch.Tensor | None,
        amax_rowwise: torch.Tensor | None,
        amax_columnwise: torch.Tensor | None,
        fp4_dtype: Any,
        quantizer: Any = None,
        with_gemm_swizzled_scales: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        *,
        fake_dtype: torch.dtype = torch.float32,
    ) -> Any:
        """The arguments of TE's constructor, in its order."""
        if DType.of(fp4_dtype) is not DType.kFloat4E2M1:
            raise ValueError(f"fp4_dtype must be DType.kFloat4E2M1; got {shown(fp4_dtype)}")
        arrays = _by_field(
            rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv, amax_rowwise, amax_columnwise
        )
        mode = getattr(quantizer, "nvfp4_4over6_err_mode", "MAE").lower() if nvfp4_use_4over6 else None
        settings = {"row_scaled": bool(row_scaled_nvfp4), "four_over_six": mode, "e4m3_max": nvfp4_e4m3_max}
        return quantizer, arrays, settings, fake_dtype, with_gemm_swizzled_scales

    @property
    def _nvfp4_use_4over6(self) -> bool:
        return self.buffers.scaling.four_over_six is not None


class BlockScaledTensorStorage(BufferStorage):
    """Blocks with scales of their own, by any scaling that `refops.scalings` declares: `buffers.scaling` says which."""
