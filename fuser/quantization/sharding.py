"""Rows of quantized matrices: how FSDP2 (`torch.distributed.fsdp.fully_shard`) shards weights that are kept quantized.

A matrix (M, K) is cut along M between blocks. Codes and scales of a shard, stored rows first and without padding,
travel as they are; concatenated they are those of the whole, bit for bit.

| format                | rows of a shard | what travels                                                       |
|-----------------------|-----------------|--------------------------------------------------------------------|
| FP8 per tensor        | any number      | rowwise codes, and the scale, which shards must share              |
| FP8 blocks            | multiples of 128| rowwise codes and scales of 128x128 tiles; both copies of 1x128    |
| MXFP8                 | multiples of 32 | both copies; of 32x32 tiles the rowwise one                        |
| NVFP4                 | multiples of 16 | both copies and the amax, shared too; of 16x16 tiles the rowwise one|

A copy that follows from the other is made after the all-gather. Shards share scales because their quantizer takes the
amax over the shards' process group from the first all-gather on, and delayed scaling's is the model's.

Behaviour: TE's `fsdp_pre_all_gather` and `fsdp_post_all_gather`, except that TE sends one copy of MXFP8 in forward and
the other in backward where parameters are resharded in between; here what backward computes again (`fuser.checkpoint`,
`backward_override`) finds the codes of forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fuser.dispatch import TENSOR_FIELDS, Buffers
from fuser.distributed import reduce_amax
from fuser.quantization.storage import DIRECTIONS, fields_of
from refops.quantization.result import stored_layout
from refops.scaling import BlockScaling, CurrentScaling, DelayedScaling, MXFP8Scaling, NVFP4Scaling

# For each array: the axis along which rows of the matrix lie, rows per entry. An array without is of all rows together.
_PER_TENSOR = {"rowwise_data": (0, 1), "columnwise_data": (1, 1)}
_BLOCKS = {
    1: _PER_TENSOR | {"rowwise_scale_inv": (1, 1), "columnwise_scale_inv": (0, 128)},
    2: _PER_TENSOR | {"rowwise_scale_inv": (0, 128), "columnwise_scale_inv": (1, 128)},
}
_MXFP8 = {
    "rowwise_data": (0, 1),
    "rowwise_scale_inv": (0, 1),
    "columnwise_data": (0, 1),
    "columnwise_scale_inv": (0, 32),
}
_NVFP4 = {
    "rowwise_data": (0, 1),
    "rowwise_scale_inv": (0, 1),
    "columnwise_data": (1, 2),
    "columnwise_scale_inv": (1, 16),
}


def _rows_of(scaling: Any) -> dict[str, tuple[int, int]] | None:
    """`{array: (axis, rows per entry)}`; None for a format whose rows can't be told apart."""
    if isinstance(scaling, DelayedScaling | CurrentScaling):
        return _PER_TENSOR
    if isinstance(scaling, BlockScaling):
        return _BLOCKS[scaling.block_dim]
    if isinstance(scaling, MXFP8Scaling):
        return _MXFP8
    return _NVFP4 if isinstance(scaling, NVFP4Scaling) and not scaling.row_scaled else None


def cut_obstacle(buffers: Buffers, sizes: Sequence[int], dim: int = 0) -> str | None:
    """Why a tensor can't be cut along `dim` into quantized parts of `sizes`, in words; None if it can."""
    multiple = getattr(buffers.scaling, "block_size", 1)
    if len(buffers.shape) != 2 or dim not in (0, -2):
        return f"only matrices are cut, along dimension 0; this is dimension {dim} of {len(buffers.shape)}"
    if _rows_of(buffers.scaling) is None:
        return f"rows can't be cut apart with {buffers.scaling}"
    if buffers.with_gemm_swizzled_scales:
        return "its scales are in GEMM order"
    if any(size % multiple for size in sizes):
        return f"rows of a part must be a multiple of {multiple}; they are {', '.join(map(str, sorted(set(sizes))))}"
    return None


def take_rows(buffers: Buffers, start: int, stop: int) -> Buffers:
    """A copy of rows `start` to `stop`, which `cut_obstacle` found no fault with."""
    rows = _rows_of(buffers.scaling)
    parts = {}
    for name, tensor in _rows_first(buffers).items():
        per_entry = rows[name][1] if name in rows else None
        parts[name] = (tensor[start // per_entry : -(-stop // per_entry)] if per_entry else tensor).clone()
    return _put_together(buffers, (stop - start, buffers.shape[1]), parts)


def put_rows(buffers: Buffers, start: int, part: Buffers) -> None:
    """Write the rows of `part` over those of `buffers` from `start` on; `RuntimeError` if scales of all rows differ."""
    rows, targets, sources = _rows_of(buffers.scaling), _rows_first(buffers), _rows_first(part)
    for name in _shared(part):
        if not torch.equal(targets[name], sources[name]):
            raise RuntimeError(
                f"{part.shape[0]} of {buffers.shape[0]} rows can't be written alone: {name} is of all rows together, "
                f"and would have to change from {targets[name].tolist()} to {sources[name].tolist()}"
            )
    for name in rows.keys() & sources.keys():
        first = start // rows[name][1]
        targets[name][first : first + len(sources[name])].copy_(sources[name])


def _shared(buffers: Buffers) -> list[str]:
    """The arrays of all rows together that codes mean something with. (FP8's amax is a record.)"""
    kept = "amax" if isinstance(buffers.scaling, NVFP4Scaling) else "scale_inv"
    return [name for name in buffers.tensors if name not in _rows_of(buffers.scaling) and kept in name]


def _rows_first(buffers: Buffers) -> dict[str, torch.Tensor]:
    """Views of the arrays with rows along dimension 0, without padding there."""
    views = dict(buffers.tensors)
    for name, (axis, per_entry) in _rows_of(buffers.scaling).items():
        if name in views:
            views[name] = views[name].narrow(axis, 0, -(-buffers.shape[0] // per_entry)).movedim(axis, 0)
    return views


def _put_together(
    settings: Buffers, shape: tuple[int, ...], parts: dict[str, torch.Tensor], memory: Buffers | None = None
) -> Buffers:
    """Buffers of a matrix of `shape` from what `_rows_first` gives of one, without a copy where nothing is to be moved.

    What is moved goes to the arrays of `memory`, if they are given.
    """
    rows, layout = _rows_of(settings.scaling), stored_layout(settings.scaling, shape)
    stored = dict.fromkeys(TENSOR_FIELDS)
    for name, part in parts.items():
        axis = rows[name][0] if name in rows else 0
        part, stored_shape = part.movedim(0, axis), layout[name][0]
        if part.shape != stored_shape or not part.is_contiguous():
            target = part.new_empty(stored_shape) if memory is None else getattr(memory, name)
            length = part.size(axis)
            target.narrow(axis, length, target.size(axis) - length).zero_()
            target.narrow(axis, 0, length).copy_(part)
            part = target
        stored[name] = part
    return replace(settings, **stored, shape=shape)


# --- hooks of FSDP ----------------------------------------------------------------------------------


def pre_all_gather(shard: Any, mesh: Any, outer_size: torch.Size, module: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
    """(what to gather along dimension 0, what `post_all_gather` needs); see `QuantizedTensor.fsdp_pre_all_gather`."""
    label = f"{_name_in(module, shard)} ({type(shard).__name__} of shape {tuple(outer_size)})"
    ranks = 1 if mesh is None else mesh.size()
    obstacle = cut_obstacle(shard.buffers, [outer_size[0] // ranks])
    if outer_size[0] % ranks:
        obstacle = f"its {outer_size[0]} rows don't divide among {ranks} ranks"
    if obstacle is not None:
        raise ValueError(f"{label} can't be gathered quantized: {obstacle}. Shard a weight in high precision instead")
    names, group = _travelling(shard), mesh.get_group() if ranks > 1 else None
    if group is not None:
        _share_scales(shard, group)
    parts = _rows_first(shard.buffers)
    return tuple(parts[name].contiguous() for name in names), (label, names, tuple(outer_size), group)


def post_all_gather(shard: Any, gathered: Sequence[torch.Tensor], metadata: Any, dtype: torch.dtype, out: Any) -> Any:
    """The whole tensor, or None with `out`; and its arrays that are no views of `gathered`."""
    label, names, shape, group = metadata
    memory = None if out is None else out.buffers
    if len(gathered) < len(names):  # of one process alone torch hands over the first array
        buffers = replace(shard.buffers, dtype=dtype)
    else:
        parts = dict(zip(names, gathered, strict=True))
        for name in parts.keys() & _shared(shard.buffers):
            shared = (parts[name].view(torch.int32) == parts[name][:1].view(torch.int32)).all()
            torch._assert_async(shared, f"shards of {label} differ in {name}: they were quantized with other scales")
            parts[name] = parts[name][:1]
        buffers = _put_together(replace(shard.buffers, dtype=dtype), shape, parts, memory)
    whole = type(shard)(buffers, quantizer=shard._quantizer)
    for direction in DIRECTIONS:
        if shard.get_usages()[direction] and not whole.get_usages()[direction]:
            whole.update_usage(**{f"{direction}_usage": True})
            if memory is not None:
                made = {name: getattr(whole.buffers, name) for name in fields_of(direction)}
                kept = {name: getattr(memory, name).copy_(array) for name, array in made.items() if array is not None}
                whole.buffers = replace(whole.buffers, **kept)
    if out is not None:
        out.buffers = whole.buffers
        if out._quantizer is not shard._quantizer:  # the operation follows another recipe now
            _require_same_blocks(label, shard, out._quantizer)
            shard._quantizer = out._quantizer
            if group is not None:
                _share_scales(shard, group)
        return None
    arrays = whole.buffers.tensors.values()
    views = {tensor.untyped_storage().data_ptr() for tensor in (*gathered, *shard.buffers.tensors.values())}
    return whole, tuple(array for array in arrays if array.untyped_storage().data_ptr() not in views)


def _travelling(shard: Any) -> list[str]:
    """The arrays that have to be gathered: all that the others follow from."""
    usages = shard.get_usages()
    if all(usages.values()) and shard._copies_hold_the_same_codes():
        usages["columnwise"] = False
    travelling = {*_rows_of(shard.buffers.scaling), *_shared(shard.buffers)} & shard.buffers.tensors.keys()
    return [name for d in DIRECTIONS if usages[d] for name in fields_of(d) if name in travelling]


def _share_scales(shard: Any, group: Any) -> None:
    """Have the shards' quantizer reduce amaxes from now on; quantize anew if the shards differ by now."""
    quantizer = shard._quantizer
    if getattr(quantizer, "with_amax_reduction", True):  # it does, or scales aren't its own to choose
        return
    quantizer.with_amax_reduction, quantizer.amax_reduction_group = True, group
    names = _shared(shard.buffers)
    if names:
        common = torch.cat([getattr(shard.buffers, name) for name in names])
        largest, smallest = reduce_amax(torch.stack((common, -common)), group)
        if not torch.equal(largest, -smallest):
            shard.quantize_(shard.dequantize())


def _require_same_blocks(label: str, shard: Any, quantizer: Any) -> None:
    made = quantizer.make_empty(tuple(shard.shape), dtype=shard.dtype, device="meta")
    if made.stored_format() != shard.stored_format():
        raise ValueError(
            f"{label} is kept in {shard.buffers.scaling}, and autocast's recipe would write {made.buffers.scaling}: "
            "give quantized_model_init and autocast recipes with the same blocks"
        )


def _name_in(module: Any, shard: Any) -> str:
    parameters = () if module is None else module.named_parameters(recurse=False)
    names = (name for name, parameter in parameters if getattr(parameter, "_local_tensor", None) is shard)
    return f"{type(module).__name__}.{next(names, 'parameter')}" if module is not None else "parameter"
