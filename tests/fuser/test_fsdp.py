"""FSDP2: how quantized weights are cut, gathered and put together; with 2 and 4 gloo processes, how models train.

The checks with processes are in `fsdp_worker.py`, which `processes.py` runs.
"""

import functools
import inspect
import warnings
from dataclasses import replace
from pathlib import Path

import processes
import pytest
import torch

from fuser import dispatch
from fuser import quantization as q
from fuser.dtypes import DType
from refops import E3M2, MXFP8Scaling, NVFP4Scaling
from tiers import SWEEP

WORKER = Path(__file__).with_name("fsdp_worker.py")
F8 = DType.kFloat8E4M3

QUANTIZERS = {
    "delayed": functools.partial(q.Float8Quantizer, torch.tensor([3.7]), torch.zeros(1), F8),
    "current": functools.partial(q.Float8CurrentScalingQuantizer, F8),
    "block 1x128": functools.partial(q.Float8BlockQuantizer, F8, block_scaling_dim=1),
    "block 128x128": functools.partial(q.Float8BlockQuantizer, F8),
    "mxfp8": functools.partial(q.MXFP8Quantizer, F8),
    "mxfp8 32x32": functools.partial(q.MXFP8Quantizer, F8, with_2d_quantization=True),
    "nvfp4": q.NVFP4Quantizer,
    "nvfp4 16x16": functools.partial(q.NVFP4Quantizer, with_2d_quantization=True),
    "mxfp6": functools.partial(q.BlockScaledQuantizer, MXFP8Scaling(E3M2)),
    "nvfp4 declared": functools.partial(q.BlockScaledQuantizer, NVFP4Scaling(two_d=True)),
    "nvfp4 transformed": functools.partial(q.NVFP4Quantizer, with_rht=True, with_post_rht_amax=True),
}
USAGES = {"rowwise": (True, False), "columnwise": (False, True), "both": (True, True)}


@pytest.fixture(params=QUANTIZERS)
def make(request):
    return QUANTIZERS[request.param]


def block(make):
    """Rows that can't be cut apart."""
    return make().layout_scaling().block_size or 1


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3


def matrix(make, *, parts=4, usage="both", blocks=3, seed=0):
    """A matrix of `parts` times `blocks` blocks of rows: 12 columns of blocks of 16 are padded, as most are."""
    rowwise, columnwise = USAGES[usage]
    return make(rowwise=rowwise, columnwise=columnwise)(normal(parts * blocks * block(make), 96, seed=seed))


def assert_same_data(a, b):
    assert type(a) is type(b) and a.shape == b.shape and a.dtype == b.dtype and a.get_usages() == b.get_usages()
    for name, tensor in a.buffers.tensors.items():
        assert torch.equal(tensor, b.buffers.tensors[name]), name


def gather(shards, shape):
    """What each process gets, and has to remember, when `shards` of a tensor are gathered."""
    handed = [shard.fsdp_pre_all_gather(None, shape, (shape[1], 1), None, None) for shard in shards]
    inputs, metadata = zip(*handed, strict=True)
    return [torch.cat(arrays) for arrays in zip(*inputs, strict=True)], metadata[0]


def without_fp8_amax(tensor):
    """`tensor` without the record of its amax, which does not travel."""
    if isinstance(tensor, q.Float8Tensor):
        tensor.buffers = replace(tensor.buffers, amax_rowwise=None, amax_columnwise=None)
    return tensor


# --- hooks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("usage", USAGES)
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_gathered_shards_are_the_whole_bit_for_bit(make, parts, usage):
    whole = matrix(make, parts=parts, usage=usage)
    gathered, metadata = gather(whole.chunk(parts), whole.shape)
    result, made = whole.chunk(parts)[0].fsdp_post_all_gather(gathered, metadata, torch.float32)
    assert_same_data(result, without_fp8_amax(whole))
    # What is no view of the gathered arrays is reported, for FSDP to free it.
    owners = {t.untyped_storage().data_ptr() for t in (*gathered, *made)}
    assert {t.untyped_storage().data_ptr() for t in result.buffers.tensors.values()} <= owners


def test_hooks_take_transformer_engines_names(make):
    whole = matrix(make, parts=1)
    shape, stride = whole.shape, whole.stride()
    named = {"mesh": None, "orig_size": shape, "contiguous_orig_stride": stride, "module": None, "mp_policy": None}
    arrays, metadata = whole.fsdp_pre_all_gather(**named)
    named = {"all_gather_outputs": arrays, "metadata": metadata, "param_dtype": torch.float32}
    result, _ = whole.fsdp_post_all_gather(out=None, **named)
    assert torch.equal(result.dequantize(), whole.dequantize())
    assert whole.fsdp_post_all_gather(**named, out=result) is None
    given = inspect.signature(q.QuantizedTensor.fsdp_pre_all_gather).parameters
    assert len(given) == 6  # which torch counts before it calls


def test_later_calls_write_into_the_same_memory(make):
    whole, other = matrix(make), matrix(make, seed=1)
    gathered, metadata = gather(whole.chunk(4), whole.shape)
    out, made = whole.chunk(4)[0].fsdp_post_all_gather(gathered, metadata, torch.float32)
    addresses = {name: tensor.data_ptr() for name, tensor in out.buffers.tensors.items()}
    for tensor in (*gathered, *made):  # as FSDP does in between
        size = tensor.untyped_storage().size()
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(size)
        tensor.view(torch.uint8).fill_(255)
    again, metadata = gather(other.chunk(4), other.shape)
    for tensor, new in zip(gathered, again, strict=True):
        tensor.copy_(new)
    assert other.chunk(4)[0].fsdp_post_all_gather(gathered, metadata, torch.float32, out=out) is None
    assert_same_data(out, without_fp8_amax(other))
    moved = {name for name, tensor in out.buffers.tensors.items() if tensor.data_ptr() != addresses[name]}
    allowed = {t.data_ptr() for t in (*gathered, *made)}
    assert all(getattr(out.buffers, name).data_ptr() in allowed for name in moved), moved


@pytest.mark.parametrize(
    ("name", "usage", "bits"),
    [
        ("delayed", "both", 8),
        ("current", "both", 8),
        ("block 128x128", "both", 8),
        ("block 1x128", "rowwise", 8 + 32 / 128),
        ("block 1x128", "both", 16 + 64 / 128),
        ("mxfp8", "rowwise", 8 + 8 / 32),
        ("mxfp8", "both", 16 + 16 / 32),
        ("nvfp4", "rowwise", 4 + 8 / 16),
        ("nvfp4 16x16", "both", 4 + 8 / 16),
    ],
)
def test_bits_that_travel_for_an_element(name, usage, bits):
    rowwise, columnwise = USAGES[usage]
    whole = QUANTIZERS[name](rowwise=rowwise, columnwise=columnwise)(normal(512, 512))
    gathered, _ = gather(whole.chunk(4), whole.shape)
    assert all(len(array) % 4 == 0 for array in gathered)
    # beside a scale of the tensor, and of its 128x128 tiles
    assert 0 <= 8 * sum(t.nbytes for t in gathered) / whole.numel() - bits < 0.01


def test_dtype_of_the_gathered_tensor_is_the_policys(make):
    whole = matrix(make)
    gathered, metadata = gather(whole.chunk(4), whole.shape)
    result, _ = whole.chunk(4)[0].fsdp_post_all_gather(gathered, metadata, torch.bfloat16)
    assert result.dtype == result.buffers.dtype == torch.bfloat16


def test_shards_of_different_scales_are_an_error():
    quantizer = QUANTIZERS["current"]()
    shards = [quantizer(normal(32, 64, seed=seed)) for seed in range(2)]
    gathered, metadata = gather(shards, torch.Size((64, 64)))
    with pytest.raises(RuntimeError, match=r"parameter \(Float8Tensor of shape \(64, 64\)\) differ in rowwise_scale"):
        shards[0].fsdp_post_all_gather(gathered, metadata, torch.float32)


def test_what_can_not_be_gathered_is_an_error():
    module = torch.nn.Linear(1, 1)
    shard = QUANTIZERS["block 128x128"]()(normal(64, 64))
    module.kernel = torch.nn.Parameter(torch.empty(1))
    module.kernel._local_tensor = shard
    rule = r"Linear.kernel \(Float8BlockwiseQTensor of shape \(64, 64\)\).*multiple of 128; they are 64.*high precision"
    with pytest.raises(ValueError, match=rule):
        shard.fsdp_pre_all_gather(None, shard.shape, shard.stride(), module, None)
    swizzled = QUANTIZERS["mxfp8"]()(normal(64, 64))
    swizzled.buffers = dispatch.swizzled(swizzled.buffers)
    with pytest.raises(ValueError, match="GEMM order"):
        swizzled.fsdp_pre_all_gather(None, swizzled.shape, swizzled.stride(), None, None)
    rows = q.NVFP4Quantizer(row_scaled_nvfp4=True, columnwise=False)(normal(64, 64))
    with pytest.raises(ValueError, match="rows can't be cut apart with NVFP4Scaling"):
        rows.fsdp_pre_all_gather(None, rows.shape, rows.stride(), None, None)


# --- operations that FSDP uses ----------------------------------------------------------------------


@pytest.mark.parametrize("usage", USAGES)
def test_parts_are_those_of_the_values(make, usage):
    whole = matrix(make, usage=usage)
    rows = whole.shape[0] // 4
    slices = [whole[i * rows :][:rows] for i in range(4)]
    for parts in (whole.chunk(4), whole.split(rows), whole.split([rows] * 4), slices):
        assert [type(part) for part in parts] == [type(whole)] * 4
        assert all(part.get_usages() == whole.get_usages() for part in parts)
        assert torch.equal(torch.cat([part.dequantize() for part in parts]), whole.dequantize())


def test_a_part_is_what_its_values_are_quantized_to(make):
    values = normal(2 * block(make), 96)
    part = make()(torch.cat((values, values.flip(0)))).chunk(2)[0]
    assert_same_data(part, make()(values))


def test_parts_that_end_in_blocks_are_plain():
    weight = torch.nn.Parameter(QUANTIZERS["mxfp8"]()(normal(96, 64)))
    with pytest.warns(UserWarning, match=r"MXFP8Tensor of shape \(96, 64\).*multiple of 32; they are 48"):
        parts = weight.chunk(2)
    assert all(type(part) is torch.Tensor for part in parts)
    assert torch.equal(torch.cat(parts), weight.dequantize())
    with pytest.warns(UserWarning, match="same number of rows; they have 64, 32"):
        assert type(weight.split(64)[0]) is torch.Tensor
    with pytest.warns(UserWarning, match="dimension 1"):
        assert type(weight.chunk(2, dim=1)[0]) is torch.Tensor
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # only a parameter's split is worth a word
        assert type(weight.detach().chunk(2)[0]) is torch.Tensor
        assert type(weight[16:48]) is type(weight[::2]) is type(weight[:, :32]) is torch.Tensor


def test_writes_to_a_slice_reach_the_whole(make):
    whole, other = matrix(make), matrix(make, seed=1)
    rows = block(make)
    if isinstance(make(), q.Float8CurrentScalingQuantizer) or make().layout_scaling().layout.two_level:
        before = whole.clone()
        with pytest.raises(RuntimeError, match=f"{rows} of {len(whole)} rows can't be written alone"):
            whole[:rows].copy_(other[:rows])
        assert_same_data(whole, before)
        return
    whole[rows:][rows : 2 * rows].copy_(other[2 * rows : 3 * rows])
    whole[:rows].copy_(other[:rows].dequantize())
    whole[rows : 2 * rows].zero_()
    assert torch.equal(whole[2 * rows : 3 * rows].dequantize(), other[2 * rows : 3 * rows].dequantize())
    assert torch.equal(whole[:rows].dequantize(), other[:rows].dequantize())
    assert not whole[rows : 2 * rows].dequantize().any()


def test_a_slice_writes_all_copies_of_the_whole_or_nothing(make):
    whole, rows = matrix(make), block(make)
    part = whole[:rows]
    assert all(whole.get_usages().values())
    part.update_usage(columnwise_usage=False)
    before, part_before = whole.clone(), part.clone()
    try:
        part.copy_(torch.zeros(part.shape))
    except RuntimeError:  # the whole's other copy can't be made, or its scale would change
        assert_same_data(whole, before)
        assert_same_data(part, part_before)
    else:
        assert not whole[:rows].dequantize().any()
        torch.testing.assert_close(whole.dequantize(), whole.dequantize_columnwise())


def test_a_slice_with_other_data_is_no_slice(make):
    whole, rows = matrix(make), block(make)
    before = whole.clone()
    part = whole[:rows]
    part.data = matrix(make, seed=1)[: 2 * rows]
    part.zero_()
    assert_same_data(whole, before)


def test_collectives_without_a_handler_are_refused(make):
    whole = matrix(make)
    with pytest.raises(NotImplementedError, match="alltoall_base"):
        type(whole).__torch_dispatch__(torch.ops.c10d.alltoall_base_.default, (), (whole, whole))


def test_a_whole_slice_and_the_same_strides_are_the_tensor(make):
    whole = matrix(make)
    shape = whole.shape
    for same in (whole[:], whole.narrow(0, 0, shape[0]), torch.as_strided(whole, shape, whole.stride(), 0)):
        assert type(same) is type(whole) and same.buffers is whole.buffers
    assert type(torch.as_strided(whole, (4, 2), (2, 1))) is torch.Tensor


def test_new_zeros_are_quantized_in_the_shape_of_a_part(make):
    whole = matrix(make)
    rows, columns = whole.shape[0] // 4, whole.shape[1]
    zeros = whole.new_zeros(rows, columns)
    assert type(zeros) is type(whole) and zeros.get_usages() == whole.get_usages() and not zeros.dequantize().any()
    part = whole.chunk(4)[1]
    zeros.narrow(0, 0, rows).copy_(part)
    assert_same_data(zeros, part)
    for shape in ((rows, columns // 2), (5 * rows, columns), (0, columns), (0,), (3,)):
        plain = whole.new_zeros(shape)
        assert type(plain) is torch.Tensor and plain.shape == shape and plain.dtype == whole.dtype and not plain.any()
    assert whole.new_zeros((2, 2), dtype=torch.int64).dtype == torch.int64


def test_clones_quantize_without_other_processes():
    shard = QUANTIZERS["current"]()(normal(32, 64))
    shard._quantizer.with_amax_reduction = True
    assert not any(t._quantizer.with_amax_reduction for t in (shard.clone(), shard[:16], shard.new_zeros(16, 64)))
    assert shard.detach()._quantizer.with_amax_reduction


def test_numpy_does_not_lock_what_fsdp_resizes():
    import torch.distributed.fsdp

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for dtype in (torch.float32, torch.bfloat16):
            tensor = torch.ones(4, 32, dtype=dtype)
            array = dispatch.as_numpy(tensor)
            array[0] = 2
            assert tensor[0, 0] == 2 and array.ctypes.data == tensor.data_ptr()
            tensor.untyped_storage().resize_(0)
    finally:
        torch.distributed.destroy_process_group()


# --- with processes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=SWEEP)])
@pytest.mark.full
def test_with_processes(tmp_path, size):
    """One test for all checks: with pytest-xdist, each worker that gets one starts the processes anew."""
    reports = processes.run(WORKER, size, tmp_path)
    for name in processes.checks_in(WORKER):
        processes.assert_no_errors(reports, name)
