"""Another format for each direction: one quantizer makes the rowwise copy of a tensor, another the columnwise one.

Products read the copy that they need, whatever its format: y = x W^T the rowwise ones, dx = dy W the rowwise copy of dy
and the columnwise one of W, dW = dy^T x columnwise ones. Two operands of different formats are dequantized and
multiplied in float32 (`fuser.gemm`), where TE has no product.

Behaviour: TE's tensor/hybrid_tensor.py and tensor/storage/hybrid_tensor_storage.py, except that FSDP2 shards hybrid
weights in high precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from fuser import recipe as recipes
from fuser.dtypes import torch_dtype
from fuser.quantization.quantizer import Quantizer, ValueQuantizer
from fuser.quantization.saving import prepare_for_saving, restore_from_saved
from fuser.quantization.storage import DIRECTIONS, QUANTIZERS, BufferStorage, buffer_property, resolve_shape
from fuser.quantization.tensor import QuantizedTensor
from refops.arguments import require_choice, shown

__all__ = ["HybridQuantizedTensor", "HybridQuantizedTensorStorage", "HybridQuantizer"]

COLUMNWISE_SOURCES = ("original", "rowwise_dequantized")


@dataclass(frozen=True, kw_only=True)
class HybridBuffers:
    """What a hybrid tensor holds: a quantized tensor or storage for each direction, or None; the nominal dtype."""

    rowwise: Any = None
    columnwise: Any = None
    shape: tuple
    dtype: torch.dtype

    @property
    def parts(self) -> dict[str, Any]:
        """direction -> quantized tensor or storage, of those that are there."""
        return {d: getattr(self, d) for d in DIRECTIONS if getattr(self, d) is not None}

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """name -> plain tensor, of all that there are."""
        parts = self.parts.items()
        return {f"{d}.{name}": tensor for d, part in parts for name, tensor in part.buffers.tensors.items()}

    @property
    def device(self) -> torch.device | None:
        """Where the tensors are; None without any."""
        return next((tensor.device for tensor in self.tensors.values()), None)

    def operand(self, columnwise: bool) -> Any:
        """What a product reads that wants the columnwise, or rowwise, copy; None if that part is missing."""
        part = self.columnwise if columnwise else self.rowwise
        return None if part is None else part.buffers.operand(columnwise)


class HybridQuantizedTensorStorage(BufferStorage):
    """`rowwise_sub_storage`, `columnwise_sub_storage`: what each direction's quantizer made, or None."""

    buffers_class, data_fields = HybridBuffers, DIRECTIONS
    _rowwise_storage = rowwise_sub_storage = buffer_property("rowwise")
    _columnwise_storage = columnwise_sub_storage = buffer_property("columnwise")

    @classmethod
    def _buffers_of(cls, quantizer, parts, dtype):
        made = HybridBuffers(**parts, shape=(), dtype=torch_dtype(dtype, "fake_dtype"))
        if not made.parts:
            raise ValueError("rowwise_storage or columnwise_storage must be given; got neither")
        for direction, part in made.parts.items():
            if not isinstance(part, BufferStorage):
                raise TypeError(
                    f"{direction}_storage must be a tensor with `buffers` (a BufferStorage); got {type(part).__name__}"
                )
        return replace(made, shape=tuple(next(iter(made.parts.values())).size()))

    @staticmethod
    def from_te(
        *, rowwise_storage: Any, columnwise_storage: Any, quantizer: Any, fake_dtype: torch.dtype = torch.float32
    ) -> Any:
        """The arguments of TE's constructor."""
        return quantizer, dict(zip(DIRECTIONS, (rowwise_storage, columnwise_storage), strict=True)), fake_dtype

    def _described(self) -> str:
        parts = (f"{direction} {part._described()}" for direction, part in self.buffers.parts.items())
        return ", ".join(parts) or "without data"

    def _copies_hold_the_same_codes(self) -> bool:
        return False

    def get_usages(self) -> dict[str, bool]:
        """Which directions there are."""
        return {direction: direction in self.buffers.parts for direction in DIRECTIONS}

    def get_data_tensors(self) -> tuple[torch.Tensor | None, ...]:
        """(rowwise codes, columnwise codes) of each direction that there is, one after the other."""
        return tuple(tensor for part in self.buffers.parts.values() for tensor in part.get_data_tensors())

    def _dequantized(self, dtype, *, columnwise):
        self._require_data()
        part = self.buffers.columnwise if columnwise else self.buffers.rowwise
        if part is None:
            raise RuntimeError(f"{type(self).__name__} holds no {DIRECTIONS[columnwise]} copy to dequantize")
        with torch.no_grad():
            return part.dequantize(dtype=self._dtype if dtype is None else dtype)

    def _make_copy(self, direction):
        raise RuntimeError(
            f"Requested {direction} usage, but {type(self).__name__} of shape {tuple(self.shape)} has none, "
            "and it does not follow from the other direction"
        )

    def map_buffers(self, function: Callable[[Any], Any], **changes: Any) -> HybridBuffers:
        """`buffers` with every tensor of both parts replaced by `function(tensor)`, and fields as in `changes`."""
        parts = {d: _rebuilt(part, part.map_buffers(function)) for d, part in self.buffers.parts.items()}
        return replace(self.buffers, **parts, **changes)

    def _saved_fields(self):
        return dict(self.buffers.parts)

    def viewed_buffers(self, shape: tuple) -> HybridBuffers:
        """Of a view; errors as those of the parts."""
        shape = resolve_shape(shape, self.numel())
        parts = {d: _rebuilt(part, part.viewed_buffers(shape)) for d, part in self.buffers.parts.items()}
        return replace(self.buffers, **parts, shape=shape)

    def stored_format(self) -> tuple:
        """What tensors must agree on for one to take the data of the other: the formats of both directions."""
        return tuple((direction, part.stored_format()) for direction, part in self.buffers.parts.items())

    def _with_contents_of(self, new):
        device = self.buffers.device
        taken: dict[str, Any] = dict.fromkeys(DIRECTIONS)
        for direction, source in new.parts.items():
            part = self.buffers.parts.get(direction)
            if part is None:
                moved = source.map_buffers(lambda tensor: tensor.to(device or tensor.device, copy=True))
                part = _rebuilt(source, moved)
            else:
                part.set_buffers(source.buffers)
            taken[direction] = part
        return replace(self.buffers, **taken)

    def prepare_for_saving(self) -> tuple[list[torch.Tensor | None], HybridQuantizedTensorStorage]:
        """(the tensors of both parts, this object without them)."""
        tensors, shells = prepare_for_saving(self.buffers.rowwise, self.buffers.columnwise)
        self.buffers = replace(self.buffers, **dict(zip(DIRECTIONS, shells, strict=True)))
        return tensors, self

    def restore_from_saved(self, tensors: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Take back both parts from the front of `tensors`; returns the rest."""
        shells = (getattr(self.buffers, direction) for direction in DIRECTIONS)
        # Copies: the shells may be filled again
        own = [None if shell is None else _rebuilt(shell, shell.buffers) for shell in shells]
        parts, rest = restore_from_saved(own, tensors, return_saved_tensors=True)
        self.buffers = replace(self.buffers, **dict(zip(DIRECTIONS, parts, strict=True)))
        return rest


def _rebuilt(part, buffers):
    """A tensor or storage like `part`, of other buffers."""
    return type(part)(buffers, quantizer=part._quantizer)


class HybridQuantizedTensor(QuantizedTensor, HybridQuantizedTensorStorage):  # type: ignore[misc]
    """Another format for each direction."""


class HybridQuantizer(ValueQuantizer):
    """Quantizes rows with one quantizer and columns with another.

    Args:
        rowwise_quantizer, columnwise_quantizer: make the copies; two objects, of any classes whose tensors hold
            `buffers`. Their usage is changed: the first makes rowwise copies alone from now on, the second columnwise
            ones.
        columnwise_source: what the columnwise copy is made of: "original", the tensor; "rowwise_dequantized", the
            values of the rowwise copy (backward then sees the weight and the input that forward multiplied).

    Raises:
        TypeError: no quantizers, or one whose `storage_class` is no `BufferStorage`. ValueError: the same one twice, or
            another source.
    """

    tensor_class, storage_class = HybridQuantizedTensor, HybridQuantizedTensorStorage
    _recipe_class = recipes.CustomRecipe

    def __init__(
        self, *, rowwise_quantizer: Quantizer, columnwise_quantizer: Quantizer, columnwise_source: str = "original"
    ):
        super().__init__(rowwise=True, columnwise=True)
        given = {"rowwise_quantizer": rowwise_quantizer, "columnwise_quantizer": columnwise_quantizer}
        for name, quantizer in given.items():
            if not isinstance(quantizer, Quantizer):
                raise TypeError(
                    f"{name} must be a Quantizer (a request for delayed scaling is what a CustomRecipe's qfactory "
                    f"itself returns); got {shown(quantizer)}"
                )
            if quantizer.storage_class is None or not issubclass(quantizer.storage_class, BufferStorage):
                raise TypeError(
                    f"{name} must make tensors with `buffers` (its storage_class a BufferStorage); "
                    f"got {type(quantizer).__name__}"
                )
        if rowwise_quantizer is columnwise_quantizer:
            raise ValueError("rowwise_quantizer and columnwise_quantizer must be two objects; got the same one twice")
        self.rowwise_quantizer, self.columnwise_quantizer = rowwise_quantizer, columnwise_quantizer
        self.columnwise_source = require_choice(columnwise_source, "columnwise_source", COLUMNWISE_SOURCES)
        rowwise_quantizer.set_usage(rowwise=True, columnwise=False)
        columnwise_quantizer.set_usage(rowwise=False, columnwise=True)

    def settings(self) -> dict[str, Any]:
        """Constructor arguments."""
        names = ("rowwise_quantizer", "columnwise_quantizer", "columnwise_source")
        return {name: getattr(self, name) for name in names}

    def _value(self):
        return (*super()._value(), *self.get_usages().values())

    def _quantizer_of(self, direction: str) -> Quantizer:
        return getattr(self, f"{direction}_quantizer")

    def _used(self) -> list[Quantizer]:
        return [self._quantizer_of(direction) for direction, used in self.get_usages().items() if used]

    def _cast(self, tensor: torch.Tensor, rowwise: bool, columnwise: bool) -> Any:
        of_rows, of_columns, source = None, None, tensor
        with torch.no_grad():
            from_rows = columnwise and self.columnwise_source == "rowwise_dequantized"
            if rowwise or from_rows:
                of_rows = self.rowwise_quantizer(tensor)
            if from_rows:
                source = of_rows.dequantize(dtype=tensor.dtype)
            if columnwise:
                of_columns = self.columnwise_quantizer(source)
        return HybridBuffers(
            rowwise=of_rows if rowwise else None, columnwise=of_columns, shape=tuple(tensor.shape), dtype=tensor.dtype
        )

    def _empty_buffers(self, shape, *, dtype, **options):
        usages = self.get_usages()
        parts = {d: self._quantizer_of(d).make_empty(shape, dtype=dtype, **options) for d in DIRECTIONS if usages[d]}
        return HybridBuffers(**parts, shape=shape, dtype=dtype)

    def copy(self) -> Any:
        """A copy with copies of both quantizers."""
        return self._with_copies(Quantizer.copy)

    def copy_for_result(self) -> Any:
        """The copy that a tensor keeps: of quantizers without an amax reduction group."""
        return self._with_copies(lambda quantizer: quantizer.copy_for_result())

    def _with_copies(self, copied):
        duplicate = super().copy()
        for direction in DIRECTIONS:
            setattr(duplicate, f"{direction}_quantizer", copied(self._quantizer_of(direction)))
        return duplicate

    def check_shape(self, shape: Iterable[int]) -> None:
        """Raise `ValueError` unless both quantizers take a tensor of `shape`."""
        for quantizer in self._used():
            quantizer.check_shape(shape)

    def is_quantizable(self, tensor: Any) -> bool:
        """Whether both formats suit the shape of a tensor."""
        return all(quantizer.is_quantizable(tensor) for quantizer in self._used())

    def is_requantization_safe(self) -> bool:
        """Whether values that were quantized once stay as they are, in all that is read of them."""
        read = self._used()
        if self.columnwise_usage and self.columnwise_source == "rowwise_dequantized":
            read.append(self.rowwise_quantizer)
        return all(quantizer.is_requantization_safe() for quantizer in read)


QUANTIZERS["HybridQuantizer"] = HybridQuantizer
