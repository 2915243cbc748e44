"""Grouped tensors: several matrices of one format, one after the other in the same buffers.

The weights of a mixture of experts, or the rows that each expert gets. The members are views: what is written to one
is in the group, and the other way round. Everything follows from the layout that the quantizer's scaling declares, so
every scaling can be grouped.

Behaviour: TE's tensor/grouped_tensor.py and tensor/storage/grouped_tensor_storage.py. Besides, members may have
quantizers of their own (delayed scaling: a scale for each), and shape operations give plain values, where TE raises.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser.dispatch import Buffers
from fuser.dtypes import require_torch_tensor
from fuser.quantization.quantizer import Quantizer
from fuser.quantization.quantizers import encode_scale
from fuser.quantization.storage import BufferStorage, QuantizedTensorStorage
from fuser.quantization.tensor import WrapperTensor, new_wrapper
from fuser.torch_load import rebuild_grouped_tensor
from refops.arguments import require_integer, say_who, shown
from refops.quantization.result import stored_layout

__all__ = ["GroupedTensor", "GroupedTensorStorage"]

aten = torch.ops.aten

#: Field of a member's `Buffers` -> the attribute that holds it for all members.
_ATTRIBUTES = {
    "rowwise_data": "rowwise_data",
    "columnwise_data": "columnwise_data",
    "rowwise_scale_inv": "scale_inv",
    "columnwise_scale_inv": "columnwise_scale_inv",
    "amax_rowwise": "amax",
    "amax_columnwise": "columnwise_amax",
}
#: The attributes that are tensors, in the order in which they are saved.
_TENSORS = (*_ATTRIBUTES.values(), "scale", "first_dims", "last_dims", "tensor_offsets")


class GroupedTensorStorage:
    """Matrices in common buffers, as a plain Python object.

    | members differ in | logical_shape       | first_dims | last_dims |
    |-------------------|---------------------|------------|-----------|
    | nothing           | (num_tensors M, K)  | None       | None      |
    | the number of rows| (sum of M, K)       | int64      | None      |
    | their width       | (M, sum of K)       | None       | int64     |
    | both              | (1, elements)       | int64      | int64     |

    The buffers rule: `quantized_tensors`, the members when the group was made, are views of them. `quantizer` says in
    which format they are; new values are quantized by `member_quantizers()`, which are those of `set_quantizers` until
    another `quantizer` is assigned.

    Args:
        shape: `logical_shape`. It may have more rows than the members: they are not read.
        dtype: dtype of the values; with a quantizer the nominal one.
        num_tensors: how many members there are.
        shapes: of each member, (M, K), or (K,) in high precision; by default from `shape`, `first_dims`, `last_dims`.
        quantizer: of all members; None: they are in high precision.
        data, columnwise_data: flat, the members' values or codes (two per byte in 4-bit formats).
        scale_inv, columnwise_scale_inv, amax, columnwise_amax: flat, what the format keeps of each member. Where there
            is one scale for a member, `amax` is that of both copies.
        scale: float32, (num_tensors,): each member's encode scale, under current scaling.
        first_dims, last_dims: int64, (num_tensors,).
        tensor_offsets: int64, (num_tensors + 1,): where members start, in elements.
        offsets, scale_inv_offsets, columnwise_scale_inv_offsets: the same as lists, of values and of scales.
        requires_grad, stride: for `GroupedTensor` alone.
        with_gemm_swizzled_scales: whether scales are in the order that GEMMs read.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        num_tensors: int,
        shapes: list[tuple[int, ...]] | None = None,
        quantizer: Quantizer | None = None,
        data: torch.Tensor | None = None,
        columnwise_data: torch.Tensor | None = None,
        scale_inv: torch.Tensor | None = None,
        columnwise_scale_inv: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
        columnwise_amax: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
        first_dims: torch.Tensor | None = None,
        last_dims: torch.Tensor | None = None,
        tensor_offsets: torch.Tensor | None = None,
        offsets: list[int] | None = None,
        scale_inv_offsets: list[int] | None = None,
        columnwise_scale_inv_offsets: list[int] | None = None,
        requires_grad: bool = False,
        stride: Sequence[int] | None = None,
        with_gemm_swizzled_scales: bool = False,
    ) -> None:
        self.num_tensors, self.logical_shape, self.fake_dtype = num_tensors, tuple(shape), dtype
        self.tensor_shapes = None if shapes is None else [tuple(member) for member in shapes]
        self.quantizer = quantizer
        self._member_quantizers: tuple[Quantizer, list[Quantizer | None]] | None = None
        self.rowwise_data, self.columnwise_data = data, columnwise_data
        self.scale_inv, self.columnwise_scale_inv = scale_inv, columnwise_scale_inv
        self.amax, self.columnwise_amax, self.scale = amax, columnwise_amax, scale
        self.first_dims, self.last_dims = first_dims, last_dims
        self.tensor_offsets, self.offsets = tensor_offsets, offsets
        self.scale_inv_offsets = scale_inv_offsets
        self.columnwise_scale_inv_offsets = columnwise_scale_inv_offsets
        self.quantized_tensors: list[Any] | None = None
        self._with_gemm_swizzled_scales = with_gemm_swizzled_scales

    # --- what it is -------------------------------------------------------------------------------

    def has_data(self) -> bool:
        """Whether there is a rowwise copy, or one in high precision."""
        return self.rowwise_data is not None

    def has_columnwise_data(self) -> bool:
        """Whether there is a columnwise copy."""
        return self.columnwise_data is not None

    def all_same_first_dim(self) -> bool:
        """Whether all members have the same number of rows."""
        return self.first_dims is None

    def all_same_last_dim(self) -> bool:
        """Whether all members have the same width."""
        return self.last_dims is None

    def all_same_shape(self) -> bool:
        """Whether all members have the same shape."""
        return self.first_dims is None and self.last_dims is None

    def varying_both_dims(self) -> bool:
        """Whether members differ in rows and in width."""
        return self.first_dims is not None and self.last_dims is not None

    def get_common_first_dim(self) -> int:
        """The number of rows of each member; `RuntimeError` if it differs."""
        if self.first_dims is not None:
            raise RuntimeError("First dim varies across tensors")
        return self.logical_shape[0] // self.num_tensors if self.last_dims is None else self.logical_shape[0]

    def get_common_last_dim(self) -> int:
        """The width of each member; `RuntimeError` if it differs."""
        if self.last_dims is not None:
            raise RuntimeError("Last dim varies across tensors")
        return self.logical_shape[1]

    def get_dtype(self) -> torch.dtype:
        """Dtype of the values, the nominal one of quantized members."""
        return self.fake_dtype

    @property
    def row_scaled_nvfp4(self) -> bool:
        """Whether each row of a member has an amax of its own."""
        return getattr(self.quantizer, "row_scaled_nvfp4", False)

    @property
    def nvfp4_use_4over6(self) -> bool:
        """Whether blocks may map their maximum to 4."""
        return getattr(self.quantizer, "nvfp4_use_4over6", False)

    @property
    def nvfp4_e4m3_max(self) -> int:
        """Largest scale of a block."""
        return getattr(self.quantizer, "nvfp4_e4m3_max", 448)

    def __repr__(self):
        return (
            f"{type(self).__name__}(num_tensors={self.num_tensors}, shapes={self.tensor_shapes}, "
            f"logical_shape={self.logical_shape}, quantizer={self.quantizer}, dtype={self.fake_dtype})"
        )

    # --- making them ------------------------------------------------------------------------------

    @staticmethod
    def make_tensor_offsets(split_dims: torch.Tensor, common_dim: int) -> torch.Tensor:
        """Running sums of `split_dims * common_dim`, from 0 on: (n + 1,), where members start and the last one ends."""
        return torch.nn.functional.pad(torch.cumsum(split_dims * common_dim, 0, dtype=split_dims.dtype), (1, 0))

    @staticmethod
    def make_grouped_tensor_with_shapes(
        num_tensors: int,
        shapes: Sequence[tuple[int, int]],
        quantizer: Quantizer | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Any:
        """`make_grouped_tensor` of members with these shapes, (M, K) each."""
        if len(shapes) != num_tensors:
            raise ValueError(f"shapes must be {num_tensors}, one for each tensor; got {len(shapes)}")
        (rows, columns), dims = _dims_of(shapes, device)
        return GroupedTensorStorage.make_grouped_tensor(
            num_tensors, dims["first_dims"], dims["last_dims"], rows, columns, quantizer, device, dtype
        )

    @staticmethod
    def make_grouped_tensor(
        num_tensors: int,
        first_dims: torch.Tensor | None,
        last_dims: torch.Tensor | None,
        logical_first_dim: int,
        logical_last_dim: int,
        quantizer: Quantizer | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Any:
        """A `GroupedTensor` (a storage if `quantizer.internal`) whose values are unset and whose scales are 0.

        Args:
            num_tensors, first_dims, last_dims: as in the constructor.
            logical_first_dim, logical_last_dim: `logical_shape`.
            quantizer: its usages say which copies there are. None: high precision.
            device: by default torch's default device (TE: the current GPU).
            dtype: of the values; needed without a quantizer, else nominal, by default float32.

        Raises:
            ValueError: members that need more room than `logical_shape`, or a shape that the format does not take.
            NotImplementedError: a quantizer whose tensors are not made of a scaling's buffers.
        """
        shape = (logical_first_dim, logical_last_dim)
        made = allocate(
            num_tensors, shape, quantizer, device, dtype, first_dims=first_dims, last_dims=last_dims, stacked=True
        )
        made.quantized_tensors = made.split_into_quantized_tensors()
        return made

    @staticmethod
    def make_grouped_tensor_from_rowwise_data(
        *,
        num_tensors: int,
        tensor_shape: tuple[int, ...],
        rowwise_data: torch.Tensor,
        dtype: torch.dtype | None = None,
        internal: bool = False,
    ) -> Any:
        """Members in high precision, of shape (M, K) or (K,), in the memory of `rowwise_data` if it is contiguous.

        Raises:
            ValueError: not as many elements as the members have, or another number of dimensions.
        """
        num_tensors = require_integer(num_tensors, "num_tensors", low=1, high=2**31)
        if len(tensor_shape) not in (1, 2):
            raise ValueError(f"tensor_shape must be (n,) or (rows, columns); got {shown(tensor_shape)}")
        numel = num_tensors * math.prod(tensor_shape)
        if rowwise_data is None or rowwise_data.numel() != numel:
            got = "None" if rowwise_data is None else f"{rowwise_data.numel()} elements"
            raise ValueError(
                f"rowwise_data must have {numel} elements, of {num_tensors} tensors of shape {tuple(tensor_shape)}; "
                f"got {got}"
            )
        columns = tensor_shape[1] if len(tensor_shape) == 2 else 1
        made = GroupedTensorStorage if internal else GroupedTensor
        return made(
            (numel // columns if columns else 0, columns),
            rowwise_data.dtype if dtype is None else dtype,
            num_tensors=num_tensors,
            shapes=[tuple(tensor_shape)] * num_tensors,
            data=rowwise_data.contiguous().view(-1),
        )

    @staticmethod
    def pack(members: Sequence[Any], *, stacked: bool = True) -> Any:
        """A `GroupedTensor` with copies of `members`: tensors in high precision, or quantized ones of one format.

        It keeps the quantizer of each, if it has one. `stacked`: as in `allocate`. This package's own.

        Raises:
            NotImplementedError: tensors of a format of the caller's own.
        """
        first = members[0]
        if isinstance(first, QuantizedTensorStorage) and not isinstance(first, BufferStorage):
            raise _no_buffers("tensors that are", first)
        if first.dim() == 1:
            return GroupedTensorStorage.make_grouped_tensor_from_rowwise_data(
                num_tensors=len(members), tensor_shape=tuple(first.shape), rowwise_data=torch.stack(tuple(members))
            )
        shape, dims = _dims_of([tuple(member.shape) for member in members], first.device)
        quantizer = None
        if isinstance(first, BufferStorage):
            with_one = next((member for member in members if member._quantizer is not None), first)
            quantizer = with_one._get_quantizer().copy_for_result()
            quantizer.set_usage(**first.get_usages())
            quantizer.internal = False
        packed = allocate(len(members), shape, quantizer, first.device, first.dtype, **dims, stacked=stacked)
        if quantizer is not None:
            packed.set_quantizers([member._quantizer for member in members])
        packed.quantized_tensors = packed.copy_members(members)
        return packed

    def copy(self) -> GroupedTensorStorage:
        """A storage with the same buffers."""
        duplicate = object.__new__(GroupedTensorStorage)
        duplicate.__dict__.update(self._state())
        return duplicate

    def _state(self):
        return {name: getattr(self, name) for name in _STATE}

    # --- members ----------------------------------------------------------------------------------

    def split_into_quantized_tensors(self) -> list[Any]:
        """The members, in the memory of the group: plain tensors, or what the quantizer makes.

        Raises:
            RuntimeError: there are no data.
        """
        if self.rowwise_data is None and self.columnwise_data is None:
            raise RuntimeError("GroupedTensor has no data to split")
        if self.quantizer is None:
            return self.parts_of(self.columnwise_data if self.rowwise_data is None else self.rowwise_data)
        shapes = self._member_shapes()
        scaling, places = self.quantizer.layout_scaling(), self._places()
        made = self.quantizer.storage_class if self.quantizer.internal else self.quantizer.tensor_class
        members = []
        for i, shape in enumerate(shapes):
            layout = stored_layout(scaling, shape)
            arrays = {}
            for field, (buffer, starts) in places.items():
                array_shape = layout[field][0]
                arrays[field] = buffer[starts[i] : starts[i] + math.prod(array_shape)].view(array_shape)
            buffers = Buffers(
                **arrays,
                scaling=scaling,
                shape=shape,
                dtype=self.fake_dtype,
                with_gemm_swizzled_scales=self._with_gemm_swizzled_scales,
            )
            quantizer = self.member_quantizers()[i]
            members.append(made(buffers, quantizer=None if quantizer is None else quantizer.copy_for_result()))
        return members

    def member_quantizers(self) -> list[Quantizer | None]:
        """That of each member, for values that are written later. This package's own."""
        of_group, of_members = self._member_quantizers or (None, [])
        # Another was assigned since: it is that of all members
        return of_members if of_group is self.quantizer else [self.quantizer] * self.num_tensors

    def set_quantizers(self, quantizers: Sequence[Quantizer | None]) -> None:
        """Give each member a quantizer, or none, for values that are written later; the group's is like the first.

        This package's own.
        """
        first = next((quantizer for quantizer in quantizers if quantizer is not None), None)
        if first is not None:
            self.quantizer = first.copy_for_result()
            self.quantizer.internal = False
        self._member_quantizers = self.quantizer, list(quantizers)
        if self.quantized_tensors is not None:
            self.quantized_tensors = self.split_into_quantized_tensors()

    def copy_quantizers(self) -> None:
        """Keep copies of the quantizers, without amax reduction groups: ranks may clone, and write, alone."""
        of_group, of_members = self.quantizer, self.member_quantizers()
        self.quantizer = None if of_group is None else of_group.copy_for_result()
        copies = [None if quantizer is None else quantizer.copy_for_result() for quantizer in of_members]
        self._member_quantizers = self.quantizer, copies

    def _member_shapes(self):
        if self.tensor_shapes is None:
            firsts, lasts = (
                [common()] * self.num_tensors if dims is None else dims.tolist()
                for dims, common in (
                    (self.first_dims, self.get_common_first_dim),
                    (self.last_dims, self.get_common_last_dim),
                )
            )
            self.tensor_shapes = list(zip(firsts, lasts, strict=True))
        return self.tensor_shapes

    def _starts(self):
        """Where the values of members start, in elements."""
        if self.offsets is None:
            if self.tensor_offsets is not None:
                self.offsets = self.tensor_offsets.tolist()
            else:
                self.offsets = _running_sums(map(math.prod, self._member_shapes()))
        return self.offsets

    def _places(self):
        """Field of the members' buffers -> (the buffer of all, where the members' parts start)."""
        scaling = self.quantizer.layout_scaling()
        layouts = [stored_layout(scaling, shape) for shape in self._member_shapes()]
        places = {}
        for field in layouts[0]:
            buffer = getattr(self, _attribute(field, scaling))
            if buffer is None or getattr(self, f"{_direction(field)}_data") is None:
                continue
            if field.endswith("_data"):
                starts = [start // scaling.layout.packed for start in self._starts()]
            else:
                starts = _running_sums(math.prod(layout[field][0]) for layout in layouts)
            places[field] = buffer, starts
        self.scale_inv_offsets = places.get("rowwise_scale_inv", (None, None))[1]
        self.columnwise_scale_inv_offsets = places.get("columnwise_scale_inv", (None, None))[1]
        return places

    # --- values -----------------------------------------------------------------------------------

    def quantize(self, tensors: Sequence[torch.Tensor], noop_flag: torch.Tensor | None = None) -> list[Any]:
        """Quantize a tensor into each member, in place; nothing happens if `noop_flag` holds a value other than 0.

        Returns:
            The members.

        Raises:
            ValueError: not as many tensors as members, or other shapes.
            RuntimeError: the group is in high precision.
        """
        if self.quantizer is None:
            raise RuntimeError("GroupedTensor has no quantizer, so that no values can be quantized into it")
        if len(tensors) != self.num_tensors:
            raise ValueError(f"tensors must be {self.num_tensors}, one for each member; got {len(tensors)}")
        members = self.split_into_quantized_tensors()
        for quantizer, tensor, member in zip(self.member_quantizers(), tensors, members, strict=True):
            (quantizer or member._get_quantizer()).update_quantized(tensor, member, noop_flag=noop_flag)
        self._follow(members)
        return members

    def copy_members(self, sources: Sequence[Any]) -> list[Any]:
        """Copy tensors of the group's format into the members, which are returned. This package's own."""
        members = self.split_into_quantized_tensors()
        for member, source in zip(members, sources, strict=True):
            if self.quantizer is None:
                member.copy_(source)
            else:
                member.copy_from_storage(source)
        if self.quantizer is not None:
            self._follow(members)
        return members

    def _follow(self, members):
        """Update the group's flag and scales from members just written."""
        self._with_gemm_swizzled_scales = members[0].buffers.with_gemm_swizzled_scales
        if self.scale is not None:
            for i, member in enumerate(members):
                self.scale[i] = encode_scale(member.buffers.scaling, self.amax[i])

    def parts_of(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The parts of a contiguous tensor that lie in it as members lie in the group. This package's own."""
        flat = tensor.view(-1)
        places = zip(self._starts(), self._member_shapes(), strict=False)
        return [flat[start : start + math.prod(shape)].view(shape) for start, shape in places]

    # --- buffers ----------------------------------------------------------------------------------

    def get_data_tensors(self) -> tuple[torch.Tensor | None, ...]:
        """All buffers: data, scales, amaxes, then dims and offsets."""
        return tuple(getattr(self, name) for name in _TENSORS)

    def prepare_for_saving(self) -> tuple[list[torch.Tensor | None], Any]:
        """(the buffers, this object without them)."""
        tensors = list(self.get_data_tensors())
        for name in (*_TENSORS, "quantized_tensors"):
            setattr(self, name, None)
        return tensors, self

    def restore_from_saved(self, tensors: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Take back the buffers from the front of `tensors`; returns the rest."""
        for name, tensor in zip(_TENSORS, tensors, strict=False):
            setattr(self, name, tensor)
        return tensors[len(_TENSORS) :]

    def clear(self) -> None:
        """Drop everything: a group without members."""
        GroupedTensorStorage.__init__(self, (0, 0), torch.float32, num_tensors=0, shapes=[])


#: Attributes of a group; others on a `GroupedTensor` are the caller's.
_STATE = tuple(vars(GroupedTensorStorage((0, 0), torch.float32, num_tensors=0)))


def _direction(field):
    return "columnwise" if "columnwise" in field else "rowwise"


def _attribute(field, scaling):
    """The attribute that holds a field of the members. One scale for a member: both copies have the same amax."""
    if field == "amax_columnwise" and scaling.layout.block is None:
        return "amax"
    return _ATTRIBUTES[field]


def _no_buffers(wanted, got):
    return NotImplementedError(f"GroupedTensor needs {wanted} buffers of a scaling; got {type(got).__name__}")


def _running_sums(counts):
    return [0, *itertools.accumulate(counts)]


def _dims_of(shapes, device):
    """(logical shape, {"first_dims": ..., "last_dims": ...}) of matrices of these shapes."""
    firsts, lasts = ([shape[axis] for shape in shapes] for axis in (0, 1))
    first_dims, last_dims = (
        torch.tensor(sizes, dtype=torch.int64, device=device) if len(set(sizes)) > 1 else None
        for sizes in (firsts, lasts)
    )
    if last_dims is None:
        shape = sum(firsts), lasts[0]
    elif first_dims is None:
        shape = firsts[0], sum(lasts)
    else:
        shape = 1, sum(map(math.prod, shapes))
    return shape, {"first_dims": first_dims, "last_dims": last_dims}


def allocate(
    num_tensors: int,
    logical_shape: Sequence[int],
    quantizer: Quantizer | None,
    device: Any,
    dtype: torch.dtype | None,
    *,
    first_dims: torch.Tensor | None = None,
    last_dims: torch.Tensor | None = None,
    tensor_offsets: torch.Tensor | None = None,
    stacked: bool = False,
) -> Any:
    """`make_grouped_tensor`; only a `stacked` tensor of alike members has the shape (num_tensors, M, K)."""
    num_tensors = require_integer(num_tensors, "num_tensors", low=1, high=2**31)
    fields: dict[str, Any] = {"num_tensors": num_tensors, "first_dims": first_dims, "last_dims": last_dims}
    fields["tensor_offsets"] = _checked_offsets(logical_shape, tensor_offsets, **fields)
    group = GroupedTensorStorage(logical_shape, dtype, **fields)  # without data: shapes and offsets follow
    shapes, total = group._member_shapes(), math.prod(logical_shape)
    ends = [start + math.prod(shape) for start, shape in zip(group._starts(), shapes, strict=False)]
    if max(ends, default=0) > total:
        raise ValueError(
            f"logical_shape must have room for all members; got {tuple(logical_shape)} for {num_tensors} members of "
            f"shapes {', '.join(map(str, shapes))}"
        )
    fields |= {"shapes": shapes if stacked else None, "quantizer": quantizer, "offsets": group.offsets}
    if quantizer is None:
        if dtype is None:
            raise ValueError("dtype must be given without a quantizer; got None")
        data = torch.empty(total, dtype=dtype, device=device)
        return GroupedTensor(logical_shape, dtype, data=data, **fields)
    if type(quantizer).scaling is Quantizer.scaling:
        raise _no_buffers("a quantizer whose tensors are", quantizer)
    for i, shape in enumerate(shapes):
        try:
            quantizer.check_shape(shape)
        except ValueError as error:
            say_who(error, f"member {i}")
            raise
    arrays = _new_arrays(quantizer, shapes, total, device)
    made = GroupedTensorStorage if quantizer.internal else GroupedTensor
    dtype = torch.float32 if dtype is None else dtype
    return made(logical_shape, dtype, data=arrays.pop("rowwise_data", None), **arrays, **fields)


def _new_arrays(quantizer, shapes, total, device):
    """Attribute -> buffer, for the copies of the quantizer's usage."""
    scaling, usages = quantizer.layout_scaling(), quantizer.get_usages()
    layouts = [stored_layout(scaling, shape) for shape in shapes]
    arrays = {}
    for field, (_, dtype) in layouts[0].items():
        if not usages[_direction(field)]:
            continue
        if field.endswith("_data"):
            made = torch.empty(total // scaling.layout.packed, dtype=torch.uint8, device=device)
        else:
            count = sum(math.prod(layout[field][0]) for layout in layouts)
            made = torch.zeros(count, dtype=getattr(torch, dtype.name), device=device)
        arrays[_attribute(field, scaling)] = made
    if scaling.layout.block is None and scaling.given is None:
        arrays["scale"] = torch.ones(len(shapes), dtype=torch.float32, device=device)
    return arrays


def _checked_offsets(logical_shape, tensor_offsets, *, num_tensors, first_dims, last_dims):
    """`tensor_offsets`, or what dims say of them; an error for dims or offsets that are none of a group."""
    rows, columns = logical_shape
    for name, dims, count in (
        ("first_dims", first_dims, num_tensors),
        ("last_dims", last_dims, num_tensors),
        ("tensor_offsets", tensor_offsets, num_tensors + 1),
    ):
        if dims is None:
            continue
        require_torch_tensor(dims, name)
        if dims.dtype is not torch.int64 or tuple(dims.shape) != (count,):
            raise ValueError(f"{name} must be int64 of shape ({count},); got {dims.dtype} of shape {tuple(dims.shape)}")
        if count and int(dims.min()) < 0:
            raise ValueError(f"{name} must not be negative; got {dims.tolist()}")
    if first_dims is None and last_dims is None and rows % num_tensors:
        raise ValueError(f"rows must divide by num_tensors without first_dims; got {rows} rows and {num_tensors}")
    if tensor_offsets is None and (first_dims is not None or last_dims is not None):
        if first_dims is not None and last_dims is not None:
            sizes, common = first_dims * last_dims, 1
        else:
            sizes, common = (first_dims, columns) if last_dims is None else (last_dims, rows)
        tensor_offsets = GroupedTensorStorage.make_tensor_offsets(sizes, common)
    return tensor_offsets


class GroupedTensor(GroupedTensorStorage, WrapperTensor):  # type: ignore[misc]
    """Matrices in common buffers as a `torch.Tensor`, e.g. as one parameter.

    Where all members have one shape and it was given, the tensor's is (num_tensors, M, K); else it is `logical_shape`.
    Operations work on the members' values, stacked (`NotImplementedError` where shapes differ). One that writes
    quantizes them anew. `view(-1)` is the flat rowwise buffer, codes where members are quantized, as in TE.
    """

    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, **fields: Any) -> Any:
        """Wrap the buffers without a copy; arguments as in `GroupedTensorStorage`."""
        shapes, wrapper_shape = fields.get("shapes"), tuple(shape)
        if shapes and len(set(map(tuple, shapes))) == 1:
            if len(shapes[0]) not in (1, 2):
                raise ValueError(f"shapes must be those of vectors or matrices; got {shown(shapes[0])}")
            wrapper_shape = (fields["num_tensors"], *shapes[0])
        held = (fields.get("data"), fields.get("columnwise_data"), *fields.values())  # dims may be elsewhere
        device = next((value.device for value in held if isinstance(value, torch.Tensor)), None)
        options = {name: fields[name] for name in ("stride", "requires_grad") if name in fields}
        return new_wrapper(cls, wrapper_shape, dtype, device, **options)

    def plain_values(self) -> torch.Tensor:
        """(num_tensors, M, K) values: the memory itself in high precision, else dequantized."""
        if not self.all_same_shape():
            shapes = ", ".join(map(str, self._member_shapes()))
            raise NotImplementedError(f"operations on a GroupedTensor need members of one shape; got {shapes}")
        members = self.split_into_quantized_tensors()
        if self.quantizer is not None:
            return torch.stack([member.dequantize(dtype=self.dtype) for member in members]).view(self.shape)
        count = sum(member.numel() for member in members)
        return self.rowwise_data[:count].view(self.shape)

    def take_values(self, values: torch.Tensor) -> None:
        """Quantize values, or copy them, into the members."""
        values = values.reshape(self.num_tensors, *self._member_shapes()[0])
        if self.quantizer is not None:
            self.quantize(values.unbind())
        elif values.data_ptr() != self.rowwise_data.data_ptr():
            self.plain_values().copy_(values.view(self.shape))

    def held_quantizers(self) -> list[Quantizer]:
        """That of the group and those of the members."""
        return [one for one in (self.quantizer, *self.member_quantizers()) if one is not None]

    def to_dtype(self, dtype: torch.dtype) -> Any:
        """The same codes with another nominal dtype; values in high precision are converted."""
        converted = self.rowwise_data.to(dtype) if self.quantizer is None else self.rowwise_data
        return self.alias(fake_dtype=dtype, rowwise_data=converted)

    def alias(self, **changes: Any) -> Any:
        """A tensor of the same buffers, except for the attributes in `changes`."""
        state = self._state() | changes
        device = next((state[name].device for name in _TENSORS if state[name] is not None), self.device)
        dtype = changes.get("fake_dtype", self.dtype)
        made = new_wrapper(type(self), self.shape, dtype, device, stride=self.stride())
        made.__dict__.update(state)
        if changes:
            made.quantized_tensors = None
        return made

    def mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """A tensor of buffers that `function` makes of those of this one."""
        arrays = {name: getattr(self, name) for name in _TENSORS}
        return self.alias(**{name: None if array is None else function(array) for name, array in arrays.items()})

    @property
    def data(self) -> Any:
        """As `torch.Tensor.data`: detached, of the same buffers. Assigning a plain tensor writes its values."""
        return self.detach()

    @data.setter
    def data(self, value):
        with torch.no_grad():
            if not isinstance(value, GroupedTensor):
                self.take_values(value)
                return
            if (value.shape, value.dtype, value.device) != (self.shape, self.dtype, self.device):
                torch._C.TensorBase.data.__set__(self, value.detach())
            self.__dict__.update(value._state())

    def __repr__(self, *, tensor_contents=None):
        return GroupedTensorStorage.__repr__(self)

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            if not self.is_leaf:
                raise RuntimeError("Only Tensors created explicitly by the user (graph leaves) can be deep-copied")
            state = copy.deepcopy({**self.__dict__, "quantized_tensors": None}, memo)
            options = {"stride": self.stride(), "requires_grad": self.requires_grad}
            duplicate = new_wrapper(type(self), self.shape, self.dtype, self.device, **options)
            duplicate.__dict__.update(state)
            memo[id(self)] = duplicate
            if self.grad is not None:
                duplicate.grad = copy.deepcopy(self.grad, memo)
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        stacked = tuple(self.shape) != self.logical_shape
        is_parameter = getattr(self, "_is_param", False)
        return rebuild_grouped_tensor, (self.split_into_quantized_tensors(), stacked, self.requires_grad, is_parameter)


def rebuild(members: Sequence[Any], stacked: bool, requires_grad: bool, is_parameter: bool) -> Any:
    """The tensor that `__reduce_ex__` took apart, for `torch.load`."""
    packed = GroupedTensor.pack(members, stacked=stacked)
    if is_parameter:
        return torch.nn.Parameter(packed, requires_grad=requires_grad)
    return packed.requires_grad_(requires_grad)


# --- dispatch -------------------------------------------------------------------------------------


def _view(func, args, kwargs):
    tensor, shape = args
    if tuple(shape) == tuple(tensor.shape):
        return tensor.alias()
    if tuple(shape) in ((-1,), (tensor.numel(),)):
        return tensor.rowwise_data.view(-1)
    return tensor.plain_values().view(shape)


def _expand(func, args, kwargs):
    tensor, shape = args[:2]
    sizes = [present if size == -1 else size for size, present in zip(shape, tensor.shape, strict=False)]
    if len(shape) == tensor.dim() and sizes == list(tensor.shape):
        return tensor.alias()
    return tensor.plain_values().expand(shape)


def _empty_like(func, args, kwargs):
    """Grouped where the dtype stays."""
    (tensor,) = args
    if kwargs.get("dtype") not in (None, tensor.dtype) or not tensor.all_same_shape():
        return func(tensor.plain_values(), **kwargs)
    made = tensor.mapped(lambda t: torch.empty_like(t, device=kwargs.get("device") or tensor.device))
    made.tensor_offsets = tensor.tensor_offsets  # offsets are layout, not values
    return made


def _copy(func, args, kwargs):
    destination, source = args[:2]
    if not isinstance(destination, GroupedTensor):
        return destination.copy_(source.plain_values())
    if isinstance(source, GroupedTensor) and _same_format(destination, source):
        destination.copy_members(source.split_into_quantized_tensors())
    else:
        values = source.plain_values() if isinstance(source, WrapperTensor) else source
        destination.take_values(values.expand(destination.shape))
    return destination


def _same_format(one, other):
    """Whether one group can take the buffers of the other as they are."""
    if one.quantizer is None or other.quantizer is None or one._member_shapes() != other._member_shapes():
        return False
    (first, *_), (second, *_) = one.split_into_quantized_tensors(), other.split_into_quantized_tensors()
    return first.stored_format() == second.stored_format() and first.get_usages() == second.get_usages()


GroupedTensor._handlers = WrapperTensor._handlers | {
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.expand.default: _expand,
    aten.empty_like.default: _empty_like,
    aten.copy_.default: _copy,
}
