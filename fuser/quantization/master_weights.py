"""Weights that are kept quantized, and an optimizer whose ranks each hold a part of them in high precision.

Every rank has the whole quantized weight, and the master weights of a contiguous range of its elements, or none. After
a step `quantize_master_weights` casts each range into the rank's own copy of the weight; amaxes travel, so that scales
are those of the whole. Then the caller gathers the codes (`_data`, `_rowwise_data`, of MXFP8 both copies), and
`post_all_gather_processing` makes the columnwise copies that follow from them. The result has the bits of the whole
weight quantized at once.

A range may begin and end anywhere in a block. What a rank does not hold of one is filled with the block's amax: then a
cast of the whole weight has the right scales everywhere, and the right codes where the rank's elements are.

Behaviour: TE's tensor/utils.py.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

import torch

from fuser.distributed import reduce_amax
from fuser.dtypes import require_torch_tensor
from fuser.quantization.hybrid import HybridQuantizedTensorStorage
from fuser.quantization.identity import IdentityTensorStorage
from fuser.quantization.storage import DIRECTIONS, BufferStorage, fields_of, pack_codes, unpack_codes
from refops.arguments import require_flag, shown
from refops.quantization.result import matrix_shape
from refops.scalings.arithmetic import REFERENCE

__all__ = [
    "cast_master_weights_to_fp8",
    "clear_columnwise_cache",
    "is_custom",
    "post_all_gather_processing",
    "quantize_master_weights",
    "replace_raw_data",
]


@dataclass
class _Shard:
    """A quantized weight, and what this rank knows of it.

    `owned`: its elements from `start` on, in the weight's dtype, or None; `target`: where their codes go instead of the
    weight's own, or None.
    """

    weight: Any
    owned: torch.Tensor | None
    start: int
    target: Any

    @property
    def scaling(self) -> Any:
        return self.weight.buffers.scaling

    @property
    def stop(self) -> int:
        return self.start + (0 if self.owned is None else self.owned.numel())

    @property
    def matrix_shape(self) -> tuple[int, int]:
        return matrix_shape(self.weight.shape)

    def directions(self) -> list[str]:
        """The copies that travel: the rowwise one if the other follows from it, else those that there are."""
        usages = self.weight.get_usages()
        if usages["rowwise"] and self.weight._copies_hold_the_same_codes():
            return ["rowwise"]
        return [direction for direction in DIRECTIONS if usages[direction]]

    def matrix(self) -> torch.Tensor:
        """The weight as a matrix, zeros where this rank holds nothing."""
        whole = torch.zeros(self.weight.numel(), dtype=self.weight.dtype, device=self.weight.device)
        if self.owned is not None:
            whole[self.start : self.stop] = self.owned
        return whole.view(self.matrix_shape)

    def is_owned(self) -> torch.Tensor:
        """Which elements of the matrix this rank holds."""
        index = torch.arange(self.weight.numel(), device=self.weight.device)
        return ((index >= self.start) & (index < self.stop)).view(self.matrix_shape)


def quantize_master_weights(
    model_weights: Sequence[Any],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    group: Any,
    fsdp_shard_model_weights: Sequence[Any] | None = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """Cast this rank's part of each master weight into the quantized weight; a collective over `group`.

    Args:
        model_weights: quantized tensors, the same list on every rank: FP8 (delayed, current, 128x128 tiles), MXFP8 or
            NVFP4 in 16x16 tiles, or not quantized (`IdentityTensor`). A hybrid weight must have one direction, or
            `columnwise_source="original"` and the whole master weight on every rank.
        master_weights: for each the elements that this rank holds, any shape and float dtype, cast to the weight's
            dtype first; None for none.
        start_offsets: where they begin in the flattened weight.
        group: the ranks over which amaxes are taken; None is the default group.
        fsdp_shard_model_weights: for each a uint8 tensor, or an FP8 tensor, with room for this rank's codes alone, of
            MXFP8 a pair (rowwise, columnwise), all contiguous; codes go there and not into the weight.
        manual_post_all_gather_processing: leave the columnwise copy, out of date, in place: the caller must call
            `post_all_gather_processing`. Else it is dropped where it follows from the rowwise one, and made anew when
            it is read.

    Raises:
        ValueError: an offset outside of the weight, lists of different lengths, a shard that is not contiguous, or a
            format that can't be written in ranges: one whose columnwise codes are stored transposed, or whose scales
            depend on more of a block than its amax. TypeError: no lists, a weight that is not quantized, a master
            weight that is no tensor of floats, or an offset that is no integer.
    """
    given = {"model_weights": model_weights, "master_weights": master_weights, "start_offsets": start_offsets}
    if fsdp_shard_model_weights is not None:
        given["fsdp_shard_model_weights"] = fsdp_shard_model_weights
    for name, value in given.items():
        if isinstance(value, torch.Tensor) or not isinstance(value, Sized):
            got = type(value).__name__ if isinstance(value, torch.Tensor) else shown(value)
            raise TypeError(f"{name} must be a list with an entry for each weight; got {got}")
    targets = [None] * len(model_weights) if fsdp_shard_model_weights is None else fsdp_shard_model_weights
    lengths = [len(model_weights), len(master_weights), len(start_offsets), len(targets)]
    if len(set(lengths)) > 1:
        raise ValueError(f"model_weights, master_weights, start_offsets and shards must be equally long; got {lengths}")
    require_flag(manual_post_all_gather_processing, "manual_post_all_gather_processing")
    shards = []
    with torch.no_grad():
        for weight, master, start, target in zip(model_weights, master_weights, start_offsets, targets, strict=True):
            shards += _shards_of(weight, master, start, target)
        casts = [(shard, direction) for shard in shards for direction in shard.directions()]
        for (shard, direction), amaxes in zip(casts, _amaxes_over_ranks(casts, group), strict=True):
            _cast_part(shard, direction, amaxes)
        for shard in shards:
            copies = sum(shard.weight.get_usages().values())
            if not manual_post_all_gather_processing and len(shard.directions()) < copies:
                shard.weight.update_usage(columnwise_usage=False)
    for weight in model_weights:
        if hasattr(weight, "clear_high_precision_init_val"):
            weight.clear_high_precision_init_val()
        if isinstance(weight, torch.Tensor) and not weight.is_inference():
            torch.autograd.graph.increment_version(weight)


#: Its former name.
cast_master_weights_to_fp8 = quantize_master_weights


def _shards_of(weight, master, start, target):
    """What is cast of a weight: itself, the parts of a hybrid one, nothing where a copy is enough."""
    if not isinstance(weight, BufferStorage):
        raise TypeError(f"model_weights must be quantized tensors; got {type(weight).__name__}")
    start = _checked_start(weight, master, start)
    if isinstance(weight, HybridQuantizedTensorStorage):
        parts = list(weight.buffers.parts.values())
        whole = master is not None and master.numel() == weight.numel()
        if len(parts) > 1 and (weight._quantizer.columnwise_source != "original" or not whole):
            raise ValueError(
                f"{type(weight).__name__} with both directions can't be written in ranges: one direction's codes "
                "travel. Drop one (update_usage), or give every rank the whole master weight and "
                "columnwise_source='original'"
            )
        return [shard for part in parts for shard in _shards_of(part, master, start, target)]
    if isinstance(weight, IdentityTensorStorage):
        if master is not None:
            if target is None:
                memory = _flat(weight._hp_data)[start : start + master.numel()]
            else:
                memory = _flat(target._hp_data if isinstance(target, IdentityTensorStorage) else target)
            memory.copy_(master.reshape(-1))
        return []
    owned = None if master is None or master.numel() == 0 else master.detach().reshape(-1).to(weight.dtype)
    shard = _Shard(weight, owned, start, target)
    _check_format(shard)
    return [shard]


def _flat(target):
    """A view of what is written to, in one dimension."""
    if not target.is_contiguous():
        raise ValueError(f"shards must be contiguous; got strides {target.stride()} for shape {tuple(target.shape)}")
    return target.view(-1)


def _checked_start(weight, master, start):
    """Where a master weight begins; an error unless it is one, and lies within its weight."""
    if master is None:
        return 0
    if not isinstance(master, torch.Tensor) or not master.is_floating_point():
        got = f"{master.dtype} of shape {tuple(master.shape)}" if isinstance(master, torch.Tensor) else shown(master)
        raise TypeError(f"master_weights must be tensors of a float dtype, or None; got {got}")
    if start is not None and (isinstance(start, bool) or not isinstance(start, numbers.Integral)):
        raise TypeError(f"start_offsets must be integers, or None beside a master weight None; got {shown(start)}")
    if start is None or start < 0 or start + master.numel() > weight.numel():
        raise ValueError(
            f"start_offsets must be such that the {master.numel()} elements of a master weight lie within its weight "
            f"of {weight.numel()}; got {shown(start)}"
        )
    return start


def _check_format(shard):
    layout, weight, quantizer = shard.scaling.layout, shard.weight, shard.weight._get_quantizer()
    if weight.buffers.with_gemm_swizzled_scales:
        raise ValueError(f"{type(weight).__name__} with scales in GEMM order can't be written in ranges")
    # Not the weight's own scaling: the quantizer may choose scales in another way
    cast_with = quantizer.make_empty(tuple(weight.shape), dtype=weight.dtype, device="meta").buffers.scaling
    if cast_with.choice(REFERENCE) is not None:
        raise ValueError(
            f"{type(weight).__name__} with {cast_with} can't be written in ranges: it chooses scales by all elements "
            "of a block"
        )
    if "columnwise" in shard.directions() and layout.block is not None and layout.columnwise_transposed:
        raise ValueError(
            f"{type(weight).__name__} with {shard.scaling} can't be written in ranges: its columnwise codes are "
            "stored transposed, and don't follow from the rowwise ones. Give weights square blocks, or one copy"
        )


# --- amaxes -------------------------------------------------------------------------------------------


def _amaxes_over_ranks(casts, group):
    """The amaxes of the blocks of every copy to cast, the largest over the ranks: one collective."""
    amaxes = [_amaxes(shard, direction) for shard, direction in casts]
    if not amaxes:
        return []
    packed = reduce_amax(torch.cat([amax.flatten() for amax in amaxes]), group)
    parts = packed.split([amax.numel() for amax in amaxes])
    return [part.view(amax.shape) for part, amax in zip(parts, amaxes, strict=True)]


def _amaxes(shard, direction):
    """float32 [outer, inner] amaxes of the blocks of a copy, as far as this rank holds them. NaN does not count."""
    magnitudes = torch.nan_to_num(shard.matrix().abs().float(), nan=0.0, posinf=math.inf)
    magnitudes = magnitudes.t() if direction == "columnwise" else magnitudes
    if shard.scaling.layout.block is None:
        return (magnitudes.amax() if magnitudes.numel() else magnitudes.sum()).view(1, 1)
    outer, inner = shard.scaling.layout.block
    rows, columns = magnitudes.shape
    padded = torch.nn.functional.pad(magnitudes, (0, -columns % inner, 0, -rows % outer))
    return padded.unflatten(1, (-1, inner)).unflatten(0, (-1, outer)).amax(dim=(1, 3))


def _spread(amaxes, shard, direction):
    """The amax of its block for every element of the matrix."""
    m, k = shard.matrix_shape
    if shard.scaling.layout.block is None:
        return amaxes.expand(m, k)
    outer, inner = shard.scaling.layout.block
    spread = amaxes.repeat_interleave(outer, 0).repeat_interleave(inner, 1)
    return spread[:k, :m].t() if direction == "columnwise" else spread[:m, :k]


# --- casts --------------------------------------------------------------------------------------------


def _cast_part(shard, direction, amaxes):
    """Write one copy: all scales and amaxes, the codes of what this rank holds."""
    weight, owned = shard.weight, shard.is_owned()
    filled = torch.where(owned, shard.matrix(), _spread(amaxes, shard, direction).to(weight.dtype))
    quantizer = weight._get_quantizer().copy_for_result()
    chosen = {d: d == direction for d in DIRECTIONS}
    made = quantizer.quantize_buffers(filled.view(weight.shape), **chosen)
    quantizer._record(made)  # of delayed scaling: its amax is the operation's
    layout = made.scaling.layout
    transposed = layout.data_transposed(direction == "columnwise")
    rows = owned.t() if transposed else owned
    new = unpack_codes(getattr(made, f"{direction}_data").reshape(rows.shape[0], -1), layout.packed)
    if shard.target is None:
        present = getattr(weight.buffers, f"{direction}_data")
        old = unpack_codes(present.reshape(rows.shape[0], -1), layout.packed)
        present.copy_(pack_codes(torch.where(rows, new, old), layout.packed).reshape(present.shape))
    elif shard.owned is not None:
        codes = new.flatten()[shard.start : shard.stop].view(1, -1)
        memory = _flat(_codes_of(shard.target, direction))
        memory.copy_(pack_codes(codes, layout.packed).view(-1))
    taken = {}
    for name in fields_of(direction):
        if not name.endswith("_data") and getattr(made, name) is not None:
            present, source = getattr(weight.buffers, name), getattr(made, name)
            taken[name] = source if present is None else present.copy_(source)
    weight.buffers = replace(weight.buffers, **taken, scaling=made.scaling)


def _codes_of(target, direction):
    """The codes of a target: of a tensor, of one of a pair, or a plain tensor that is them."""
    if isinstance(target, tuple | list):
        return target[DIRECTIONS.index(direction)]
    return getattr(target.buffers, f"{direction}_data") if isinstance(target, BufferStorage) else target


# --- afterwards ---------------------------------------------------------------------------------------


def post_all_gather_processing(model_weights: Any) -> None:
    """Make the columnwise copies anew that follow from gathered rowwise codes, in their memory if there is any.

    Args:
        model_weights: a weight, or a list. Nothing happens to plain tensors, to MXFP8, whose copies both were gathered,
            and to hybrid tensors, whose parts hold one direction each.
    """
    for weight in model_weights if isinstance(model_weights, list | tuple) else [model_weights]:
        follows = isinstance(weight, BufferStorage) and weight._copies_hold_the_same_codes()
        if not follows or not weight.get_usages()["rowwise"]:
            continue
        fresh = type(weight)(
            replace(weight.buffers, **dict.fromkeys(fields_of("columnwise"))), quantizer=weight._quantizer
        )
        fresh.update_usage(columnwise_usage=True)
        weight.set_buffers(fresh.buffers)


def replace_raw_data(tensor: Any, new_raw_data: torch.Tensor) -> None:
    """Move a quantized tensor's rowwise codes (of an `IdentityTensor`: the tensor) to memory of the caller's.

    Args:
        new_raw_data: contiguous, of the codes' shape and dtype; gets their values.

    Raises:
        ValueError: another shape, dtype or layout. NotImplementedError: a format with two copies that travel.
    """
    if isinstance(tensor, HybridQuantizedTensorStorage) and tensor._rowwise_storage is not None:
        replace_raw_data(tensor._rowwise_storage, new_raw_data)
        return
    require_torch_tensor(new_raw_data, "new_raw_data")
    identity = isinstance(tensor, IdentityTensorStorage)
    if not identity and not (isinstance(tensor, BufferStorage) and tensor._copies_hold_the_same_codes()):
        raise NotImplementedError(
            f"replace_raw_data is for a tensor with one copy that travels; got {type(tensor).__name__}"
        )
    field = "hp_data" if identity else "rowwise_data"
    old = getattr(tensor.buffers, field)
    if (new_raw_data.dtype, new_raw_data.shape, new_raw_data.is_contiguous()) != (old.dtype, old.shape, True):
        raise ValueError(
            f"new_raw_data must be contiguous {old.dtype} of shape {tuple(old.shape)}; "
            f"got {new_raw_data.dtype} of shape {tuple(new_raw_data.shape)} with strides {new_raw_data.stride()}"
        )
    new_raw_data.detach().copy_(old)
    tensor.buffers = replace(tensor.buffers, **{field: new_raw_data})


def clear_columnwise_cache(tensor: Any) -> None:
    """Drop a quantized tensor's columnwise copy."""
    tensor.update_usage(columnwise_usage=False)


def is_custom(x: Any = None) -> bool:
    """Whether a quantizer, or what it makes, is one in Python: TE's reference quantizers, or a user's with `custom`."""
    return bool(getattr(x, "custom", False))
