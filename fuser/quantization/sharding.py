"""Rows of quantized matrices: how FSDP2 (`torch.distributed.fsdp.fully_shard`) shards weights that are kept quantized.

A matrix (M, K) is cut along M between blocks. Codes and scales of a shard, stored rows first and without padding,
travel as they are; concatenated they are those of the whole, bit for bit. Where rows lie in an array, and how many of
them an entry stands for, follows from the layout that the scaling declares.

| scaling              | rows of a shard       | what travels                                                  |
|----------------------|-----------------------|---------------------------------------------------------------|
| one for the tensor   | any number            | rowwise codes, and the scale, which shards must share         |
| blocks along a line  | multiples of the block| the codes and scales of both copies                           |
| square blocks        | multiples of the block| rowwise codes and scales                                      |
| two levels           | as their blocks       | the amax of the tensor besides, which shards must share too   |

Rows that have an amax each (NVFP4's row scaling) are not cut.

A copy that follows from the other is made after the all-gather. Shards share scales because their quantizer takes the
amax over the shards' process group from the first all-gather on, and delayed scaling's is the model's.

Behaviour: TE's `fsdp_pre_all_gather` and `fsdp_post_all_gather`, except that TE sends one copy of MXFP8 in forward and
the other in backward where parameters are resharded in between; here what backward computes again (`fuser.checkpoint`,
`backward_override`) finds the codes of forward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fuser.dispatch import TENSOR_FIELDS, Buffers
from fuser.distributed import reduce_amax
from fuser.quantization.storage import DIRECTIONS, fields_of
from refops.quantization.result import stored_layout


def _rows_of(scaling: Any) -> dict[str, tuple[int, int]] | None:
    """`{array: (axis, rows per entry)}`: where the rows of the matrix lie. An array without is of all rows together.

    None for a layout whose rows can't be told apart.
    """
    layout = scaling.layout
    if layout.amax == "rows":
        return None
    rows = {}
    for columnwise, direction in enumerate(DIRECTIONS):
        transposed = layout.data_transposed(bool(columnwise))
        rows[f"{direction}_data"] = (1, layout.packed) if transposed else (0, 1)
        if layout.run is not None:
            # Stored [outer, block]; rows are the outer dimension of rowwise scales, the blocked one of columnwise ones
            axis = columnwise != layout.scales_inner_first[columnwise]
            rows[f"{direction}_scale_inv"] = (int(axis), layout.run[columnwise])
    return rows


def rows_together(scaling: Any) -> int:
    """How many rows are cut apart from others only together."""
    layout = scaling.layout
    return math.lcm(layout.shape_multiple, 1 if layout.block is None else layout.block[1])


def cut_obstacle(buffers: Buffers, sizes: Sequence[int], dim: int = 0) -> str | None:
    """Why a tensor can't be cut along `dim` into quantized parts of `sizes`, in words; None if it can."""
    if not isinstance(buffers, Buffers):
        return "only tensors in one quantized format are cut"
    multiple = rows_together(buffers.scaling)
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
    if buffers.with_gemm_swizzled_scales:
        raise RuntimeError("rows can't be written alone into a tensor whose scales are in GEMM order")
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
    """The arrays of all rows together that codes mean something with: not an amax that is a record."""
    rows, read = _rows_of(buffers.scaling), buffers.scaling.layout.two_level
    return [name for name in buffers.tensors if name not in rows and (read or "amax" not in name)]


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


def pre_all_gather(shard: Any, mesh: Any, orig_size: torch.Size, module: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
    """(what to gather along dimension 0, what `post_all_gather` needs); see `QuantizedTensor.fsdp_pre_all_gather`."""
    label = f"{_name_in(module, shard)} ({type(shard).__name__} of shape {tuple(orig_size)})"
    ranks = 1 if mesh is None else mesh.size()
    obstacle = cut_obstacle(shard.buffers, [orig_size[0] // ranks])
    if orig_size[0] % ranks:
        obstacle = f"its {orig_size[0]} rows don't divide among {ranks} ranks"
    if obstacle is not None:
        raise ValueError(f"{label} can't be gathered quantized: {obstacle}. Shard a weight in high precision instead")
    names, group = _travelling(shard), mesh.get_group() if ranks > 1 else None
    if group is not None:
        _share_scales(shard, group)
    parts = _rows_first(shard.buffers)
    return tuple(parts[name].contiguous() for name in names), (label, names, tuple(orig_size), group)


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
    quantizer, names = shard._quantizer, _shared(shard.buffers)
    if not names or getattr(quantizer, "with_amax_reduction", True):  # it does, or scales aren't its own to choose
        return
    quantizer.with_amax_reduction, quantizer.amax_reduction_group = True, group
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
