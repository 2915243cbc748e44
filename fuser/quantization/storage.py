"""Quantized tensors as plain Python objects: buffers, the settings they were made with, and what can be made of them.

A storage is what an operation keeps for its own use (`quantizer.internal`); `fuser.quantization.tensor` makes the same
data a `torch.Tensor`. Everything is generic over `fuser.dispatch.Buffers` and the layout that the scaling declares
(`refops.scalings.declaration.Layout`); a format adds TE's attribute names. The arithmetic of casts is elsewhere
(`fuser.dispatch`).

Behaviour: TE's quantized_tensor.py and tensor/storage/*.py.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from fuser import dispatch
from fuser.dispatch import TENSOR_FIELDS, Buffers
from fuser.dtypes import HIGH_PRECISION, DType
from refops.quantization.result import matrix_shape, stored_layout

DIRECTIONS = ("rowwise", "columnwise")


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


def _buffer_property(*fields: str) -> property:
    """An attribute for a buffer: reads the first of `fields` that is there, writes those that are (or the first)."""

    def read(self):
        return next((b for b in (getattr(self.buffers, field) for field in fields) if b is not None), None)

    def write(self, value):
        present = [field for field in fields if getattr(self.buffers, field) is not None] or fields[:1]
        self.buffers = replace(self.buffers, **dict.fromkeys(present, value))

    return property(read, write, doc=f"`buffers.{fields[0]}`")


class _NoBuffers:
    """`buffers` of a subclass that sets none: whoever reads them, which the methods here do, learns what is missing."""

    def __get__(self, instance, owner=None):
        if instance is None:
            return self
        raise NotImplementedError(
            f"{type(instance).__name__} has no buffers: it must set them, or override what is made of them here"
        )


class QuantizedTensorStorage:
    """A quantized tensor that is no `torch.Tensor`.

    Attributes:
        buffers: `fuser.dispatch.Buffers`: codes, scales and amaxes, the settings, the shape, the nominal dtype.
        _quantizer: what quantizes new values into it, or None.
        _dtype: nominal dtype (torch), that of `dequantize()`.
        _rowwise_data ... _amax_columnwise: the buffers, by TE's names.

    The methods work for every format that sets `buffers`; in a subclass that doesn't they raise `NotImplementedError`.
    """

    buffers: Any = _NoBuffers()
    _quantizer: Any = None

    def __new__(cls, buffers: Buffers, *, quantizer: Any = None) -> "QuantizedTensorStorage":
        """Wrap `buffers` without a copy."""
        self = object.__new__(cls)
        self.buffers, self._quantizer = buffers, quantizer
        return self

    _rowwise_data = _buffer_property("rowwise_data")
    _rowwise_scale_inv = _buffer_property("rowwise_scale_inv")
    _columnwise_data = _buffer_property("columnwise_data")
    _columnwise_scale_inv = _buffer_property("columnwise_scale_inv")
    _amax_rowwise = _buffer_property("amax_rowwise")
    _amax_columnwise = _buffer_property("amax_columnwise")

    # --- what it is -------------------------------------------------------------------------------

    @property
    def _dtype(self) -> torch.dtype:
        return self.buffers.dtype

    @_dtype.setter
    def _dtype(self, dtype: torch.dtype) -> None:
        self.buffers = replace(self.buffers, dtype=dtype)

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

    def get_data_tensors(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(rowwise codes, columnwise codes)."""
        return self.buffers.rowwise_data, self.buffers.columnwise_data

    def get_metadata(self) -> dict[str, Any]:
        """Constructor arguments of a storage or tensor with the same data."""
        return {"buffers": self.buffers, "quantizer": self._quantizer}

    def __repr__(self):
        copies = " + ".join(d for d, made in self.get_usages().items() if made) or "no data"
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self._dtype}, {copies}, {self.buffers.scaling})"
        )

    # --- values -----------------------------------------------------------------------------------

    @dispatch.untraced
    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The plain tensor that is stood for, in the nominal dtype or `dtype`, from the rowwise copy if there is one.

        float32 arithmetic and one rounding. NVFP4's Hadamard transform of a columnwise copy is undone (TE raises).
        """
        return self._dequantized(dtype, columnwise=self.buffers.rowwise_data is None)

    @dispatch.untraced
    def dequantize_columnwise(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """As `dequantize`, from the columnwise copy: what a GEMM that reads that copy computes with."""
        return self._dequantized(dtype, columnwise=True)

    def _dequantized(self, dtype, *, columnwise):
        if self.buffers.device is None:
            raise RuntimeError(f"{type(self).__name__} of shape {tuple(self.shape)} holds no data to dequantize")
        dtype = self._dtype if dtype is None else dtype
        supported = dtype if dtype in HIGH_PRECISION else torch.float32
        return dispatch.dequantize(self.buffers, dtype=supported, columnwise=columnwise).to(dtype)

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

    # --- copies -----------------------------------------------------------------------------------

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Keep, make or drop copies: None leaves one as it is, True makes it if it is missing, False drops it.

        A copy can be made from the other where both hold the same codes: where one scale serves the tensor or a
        square block, without a transform of one copy and without stochastic rounding. TE makes fewer of them.

        Raises:
            RuntimeError: a copy is missing and cannot be made.
        """
        requests = {"rowwise": rowwise_usage, "columnwise": columnwise_usage}
        present = self.get_usages()
        missing = [d for d in DIRECTIONS if requests[d] and not present[d]]
        for direction in missing:
            self._make_copy(direction)
        dropped = [d for d in DIRECTIONS if requests[d] is False and present[d]]
        if dropped:
            names = [name for direction in dropped for name in fields_of(direction)]
            self.buffers = replace(self.buffers, **dict.fromkeys(names))

    def _make_copy(self, direction):
        word = {"rowwise": "row-wise", "columnwise": "column-wise"}[direction]
        other = "columnwise" if direction == "rowwise" else "rowwise"
        what = f"Requested {word} usage, but {type(self).__name__} of shape {tuple(self.shape)} is missing {word} data"
        if not self.get_usages()[other]:
            raise RuntimeError(f"{what}, and there is no other copy")
        if not self._copies_hold_the_same_codes() or self.buffers.with_gemm_swizzled_scales:
            raise RuntimeError(f"{what}, and the other copy has other codes ({self.buffers.scaling})")
        data, scales = (getattr(self.buffers, f"{other}_{part}") for part in ("data", "scale_inv"))
        amax = getattr(self.buffers, f"amax_{other}")
        made = {
            f"{direction}_data": self._other_data(data, direction),
            f"{direction}_scale_inv": self._other_scales(scales, direction),
            f"amax_{direction}": None if amax is None else amax.clone(),
        }
        self.buffers = replace(self.buffers, **made)

    def _copies_hold_the_same_codes(self) -> bool:
        """Whether one copy can be derived from the other."""
        return self.buffers.scaling.copies_share_codes

    def _other_data(self, data, direction):
        """The codes of copy `direction` from those of the other: transposed, where columnwise data are."""
        layout, (m, k) = self.buffers.scaling.layout, matrix_shape(self.buffers.shape)
        if not layout.columnwise_transposed:
            return data.clone()
        outer, inner = (m, k) if direction == "columnwise" else (k, m)
        codes = _unpacked(data.reshape(outer, inner // layout.packed), layout.packed).t()
        return _packed(codes, layout.packed).contiguous().view(self._layout(f"{direction}_data"))

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

    def map_buffers(self, function: Callable[[Any], Any], **changes: Any) -> Buffers:
        """`buffers` with every tensor replaced by `function(tensor)`, and fields in `changes` replaced."""
        mapped = {name: function(tensor) for name, tensor in self.buffers.tensors.items()}
        return replace(self.buffers, **mapped, **changes)

    def viewed_buffers(self, shape: tuple) -> Buffers:
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

    def view(self, *shape: Any) -> "QuantizedTensorStorage":
        """The same data in another shape, without a copy; errors as `viewed_buffers`."""
        return type(self)(self.viewed_buffers(shape), quantizer=self._quantizer)

    def clear(self) -> None:
        """Drop all data: the memory is freed once nothing else holds the buffers."""
        self.buffers = replace(self.buffers, **dict.fromkeys(TENSOR_FIELDS))

    def copy_from_storage(self, src: "QuantizedTensorStorage") -> None:
        """Copy the data of `src` into the buffers of this object, which keep their memory where sizes agree.

        Raises:
            TypeError: `src` is of another format. ValueError: its shape differs.
        """
        if self.stored_format() != src.stored_format():
            raise TypeError(
                f"src must be of the format of the destination, {self.buffers.scaling}; got {src.buffers.scaling}"
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
        taken, device = {}, self.buffers.device
        for name in TENSOR_FIELDS:
            source, present = getattr(new, name), getattr(self.buffers, name)
            if source is not None and present is not None and present.shape == source.shape:
                with torch.inference_mode():  # which may write what was made in it, and everything else
                    taken[name] = present.copy_(source)
            else:
                taken[name] = None if source is None else source.to(device or source.device, copy=True)
        self.buffers = replace(
            self.buffers,
            **taken,
            scaling=new.scaling,
            with_gemm_swizzled_scales=new.with_gemm_swizzled_scales,
        )

    def prepare_for_saving(self) -> tuple[list[torch.Tensor | None], "QuantizedTensorStorage"]:
        """(the buffers, this object without them): autograd saves the former, the context keeps the latter."""
        tensors = [getattr(self.buffers, name) for name in TENSOR_FIELDS]
        self.clear()
        return tensors, self

    def restore_from_saved(self, tensors: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Take back the buffers from the front of `tensors`; returns the rest."""
        count = len(TENSOR_FIELDS)
        self.buffers = replace(self.buffers, **dict(zip(TENSOR_FIELDS, tensors[:count], strict=True)))
        return tensors[count:]

    def __tensor_flatten__(self):
        """(attribute names of the buffers, the rest), as torch's wrapper subclasses do."""
        names = list(self.buffers.tensors)
        empty = replace(self.buffers, **dict.fromkeys(TENSOR_FIELDS))
        return [f"_{name}" for name in names], {"class": type(self), "buffers": empty, "quantizer": self._quantizer}

    @staticmethod
    def __tensor_unflatten__(inner_tensors, context, outer_size, outer_stride):
        """Undo `__tensor_flatten__`."""
        fields = {name.removeprefix("_"): tensor for name, tensor in inner_tensors.items()}
        buffers = replace(context["buffers"], **fields, shape=tuple(outer_size))
        return context["class"](buffers, quantizer=context["quantizer"])


def _unpacked(data, count):
    """Codes, one a byte, of bytes (R, C) that hold `count` each, the first in the lowest bits: (R, C * count)."""
    if count == 1:
        return data
    bits = 8 // count
    return torch.stack([(data >> (bits * i)) & ((1 << bits) - 1) for i in range(count)], dim=-1).flatten(1)


def _packed(codes, count):
    """Undo `_unpacked`."""
    packed, bits = codes[:, 0::count], 8 // count
    for i in range(1, count):
        packed = packed | (codes[:, i::count] << (bits * i))
    return packed


# --- by TE's names ----------------------------------------------------------------------------------


class Float8TensorStorage(QuantizedTensorStorage):
    """FP8 with one scale: `_data` (shape of the tensor), `_transpose` (last dimension first), `_scale_inv` (1,)."""

    _data = _buffer_property("rowwise_data")
    _transpose = _buffer_property("columnwise_data")
    _scale_inv = _buffer_property("rowwise_scale_inv", "columnwise_scale_inv")

    @property
    def _fp8_dtype(self) -> DType:
        return DType.of(self.buffers.scaling.fmt)

    @property
    def _transpose_invalid(self) -> bool:
        """Whether there is no transpose to read."""
        return self.buffers.columnwise_data is None

    def _get_quantizer(self):
        """The quantizer, or one with the scale that the data have now (it isn't saved with delayed scaling)."""
        if self._quantizer is not None:
            return self._quantizer
        from fuser.quantization.quantizers import Float8Quantizer

        amax = torch.zeros(1, dtype=torch.float32, device=self.device)
        return Float8Quantizer(scale=1 / self._scale_inv, amax=amax, fp8_dtype=self._fp8_dtype)


class MXFP8TensorStorage(QuantizedTensorStorage):
    """MXFP8: codes in both copies in the tensor's orientation, E8M0 scale bytes for 32 elements."""

    @property
    def _fp8_dtype(self) -> DType:
        return DType.of(self.buffers.scaling.fmt)

    @property
    def _with_gemm_swizzled_scales(self) -> bool:
        return self.buffers.with_gemm_swizzled_scales


class Float8BlockwiseQTensorStorage(QuantizedTensorStorage):
    """FP8 with float32 scales for 1x128 elements or 128x128 tiles; the columnwise copy is transposed."""

    @property
    def _fp8_dtype(self) -> DType:
        return DType.of(self.buffers.scaling.fmt)

    @property
    def _is_2D_scaled(self) -> bool:  # noqa: N802 (TE's name)
        return self.buffers.scaling.block_dim == 2


class NVFP4TensorStorage(QuantizedTensorStorage):
    """NVFP4: two codes a byte, E4M3 scale bytes for 16 elements, float32 amaxes; the columnwise copy is transposed."""

    @property
    def _fp4_dtype(self) -> DType:
        return DType.kFloat4E2M1

    @property
    def _with_gemm_swizzled_scales(self) -> bool:
        return self.buffers.with_gemm_swizzled_scales

    @property
    def _row_scaled_nvfp4(self) -> bool:
        return self.buffers.scaling.row_scaled

    @property
    def _nvfp4_use_4over6(self) -> bool:
        return self.buffers.scaling.four_over_six is not None

    @property
    def _nvfp4_e4m3_max(self) -> int:
        return self.buffers.scaling.e4m3_max


class BlockScaledTensorStorage(QuantizedTensorStorage):
    """Blocks with scales of their own, by any scaling that `refops.scalings` declares: `buffers.scaling` says which."""
