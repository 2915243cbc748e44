"""Grouped tensors and TE's functions for them: each member is what `refops` makes of it alone, to the bit."""

import copy
import io

import numpy as np
import pytest
import torch

import refops
from fuser import dispatch, functional, ops
from fuser.dispatch import TENSOR_FIELDS, as_numpy
from fuser.dtypes import DType
from fuser.quantization import (
    BlockScaledQuantizer,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    GroupedTensor,
    GroupedTensorStorage,
    MXFP8Quantizer,
    MXFP8Tensor,
    NVFP4Quantizer,
    QuantizedTensorStorage,
    Quantizer,
    prepare_for_saving,
    restore_from_saved,
)
from refops.scalings import NAMED

E4M3 = DType.kFloat8E4M3
TE = refops.DelayedScaling, refops.CurrentScaling, refops.BlockScaling, refops.MXFP8Scaling, refops.NVFP4Scaling
#: name -> makes a quantizer: TE's, and one of every scaling that TE does not have.
QUANTIZERS = {
    "delayed": lambda: Float8Quantizer(torch.full((1,), 3.5), torch.zeros(1), E4M3),
    "current": lambda: Float8CurrentScalingQuantizer(E4M3),
    "block1": lambda: Float8BlockQuantizer(E4M3, block_scaling_dim=1),
    "block2": lambda: Float8BlockQuantizer(E4M3, block_scaling_dim=2),
    "mxfp8": lambda: MXFP8Quantizer(E4M3),
    "nvfp4": lambda: NVFP4Quantizer(),
    "nvfp4 rht": lambda: NVFP4Quantizer(with_rht=True, with_post_rht_amax=True),
    "nvfp4 rows": lambda: NVFP4Quantizer(row_scaled_nvfp4=True),
} | {
    name: lambda scaling=row.scaling: BlockScaledQuantizer(scaling)
    for name, row in NAMED.items()
    if not isinstance(row.scaling, TE)
}
ROWS, K = [64, 0, 128, 32], 128


def normal(*shape, dtype=torch.bfloat16, seed=0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def assert_is(member, expected):
    """A member has the buffers of a `refops.Quantized`."""
    for name in TENSOR_FIELDS:
        made, wanted = getattr(member.buffers, name), getattr(expected, name)
        assert (made is None) == (wanted is None), name
        if wanted is not None:
            np.testing.assert_array_equal(made.numpy().view(np.uint8), wanted.view(np.uint8), err_msg=name)


def alone(quantizer, part, **options):
    usages = quantizer.get_usages()
    return refops.quantize(as_numpy(part), quantizer.scaling(), **usages, **options)


@pytest.mark.parametrize("usage", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_each_split_is_what_refops_makes_of_it(name, usage):
    x, quantizer = normal(sum(ROWS), K), QUANTIZERS[name]()
    quantizer.set_usage(rowwise=usage[0], columnwise=usage[1])
    expected = [alone(quantizer, part) for part in x.split(ROWS)]
    with dispatch.backend("reference"):
        grouped = functional.group_quantize(x, quantizer, len(ROWS), torch.tensor(ROWS))
        split = functional.split_quantize(x, ROWS, [quantizer] * len(ROWS))
        summed, dbias = functional.bgrad_group_quantize(x, quantizer, len(ROWS), torch.tensor(ROWS))
        sums = [alone(quantizer, part, dbias=True)[1] for part in x.split(ROWS)]
    assert type(grouped) is GroupedTensor and grouped.shape == x.shape and grouped.dtype == x.dtype
    for group in (grouped.split_into_quantized_tensors(), split, summed.split_into_quantized_tensors()):
        assert len(group) == len(ROWS)
        for member, wanted in zip(group, expected, strict=True):
            assert_is(member, wanted)
    assert (dbias.shape, dbias.dtype) == ((len(ROWS), K), x.dtype)
    for sum_, wanted in zip(dbias, sums, strict=True):
        np.testing.assert_array_equal(as_numpy(sum_).view(np.uint16), np.asarray(wanted).view(np.uint16))
    values = functional.group_dequantize(grouped, DType.kFloat16)
    assert values.dtype is torch.float16 and torch.equal(values.first_dims, grouped.first_dims)
    for part, member in zip(values.split_into_quantized_tensors(), split, strict=True):
        assert torch.equal(part, member.dequantize(dtype=torch.float16))


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "block1", "current"])
def test_compiled_kernels_give_the_same_bits(name):
    x, quantizer = normal(sum(ROWS), K), QUANTIZERS[name]()
    grouped = functional.group_quantize(x, quantizer, len(ROWS), torch.tensor(ROWS))
    for member, part in zip(grouped.split_into_quantized_tensors(), x.split(ROWS), strict=True):
        assert_is(member, alone(quantizer, part))


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "block2"])
def test_scales_in_gemm_order(name):
    x, quantizer = normal(sum(ROWS), K), QUANTIZERS[name]()
    quantizer.optimize_for_gemm = True
    grouped = functional.group_quantize(x, quantizer, len(ROWS), torch.tensor(ROWS))
    assert grouped._with_gemm_swizzled_scales is (name != "block2")
    again, _ = functional.bgrad_group_quantize(x, quantizer, len(ROWS), torch.tensor(ROWS))
    for group in (grouped, again, copy.deepcopy(grouped), GroupedTensor.pack(grouped.split_into_quantized_tensors())):
        for member, part in zip(group.split_into_quantized_tensors(), x.split(ROWS), strict=True):
            expected = quantizer(part)
            assert member._with_gemm_swizzled_scales is grouped._with_gemm_swizzled_scales
            assert torch.equal(member._rowwise_scale_inv, expected._rowwise_scale_inv)
            assert torch.equal(member.dequantize(), expected.dequantize())


def test_stochastic_rounding_draws_for_each_split_in_order():
    x, quantizer = normal(sum(ROWS), K), NVFP4Quantizer(stochastic_rounding=True)
    torch.manual_seed(3)
    expected = [quantizer(part) for part in x.split(ROWS)]
    for function in (
        lambda: functional.split_quantize(x, ROWS, [quantizer] * len(ROWS)),
        lambda: functional.group_quantize(x, quantizer, len(ROWS), torch.tensor(ROWS)).split_into_quantized_tensors(),
    ):
        torch.manual_seed(3)
        for member, wanted in zip(function(), expected, strict=True):
            assert torch.equal(member._rowwise_data, wanted._rowwise_data)


def test_delayed_scaling_collects_the_largest_amax_and_keeps_each():
    x, quantizer = normal(sum(ROWS), K), QUANTIZERS["delayed"]()
    grouped = functional.group_quantize(x, quantizer, len(ROWS), torch.tensor(ROWS))
    assert quantizer.amax.item() == x.abs().max().item() and grouped.scale is None
    for amax, part in zip(grouped.amax, x.split(ROWS), strict=True):
        assert amax.item() == (part.abs().max().item() if part.numel() else 0)


@pytest.mark.parametrize("columnwise", [False, True])
def test_current_scaling_keeps_what_it_multiplied_with(columnwise):
    x, quantizer = normal(sum(ROWS), K), QUANTIZERS["current"]()
    quantizer.set_usage(rowwise=not columnwise, columnwise=columnwise)
    grouped = functional.group_quantize(x, quantizer, len(ROWS), torch.tensor(ROWS))
    scale_inv = grouped.columnwise_scale_inv if columnwise else grouped.scale_inv
    torch.testing.assert_close(scale_inv, 1 / grouped.scale, rtol=1e-6, atol=0)
    assert torch.equal(grouped.amax, torch.stack([p.abs().max() if p.numel() else p.sum() for p in x.split(ROWS)]))


class TestShapes:
    """Members lie one after the other, also where it is their width that differs."""

    def check(self, x, shapes, grouped):
        starts = np.cumsum([0, *(rows * columns for rows, columns in shapes)])
        flat = x.reshape(-1)
        for member, shape, start in zip(grouped.split_into_quantized_tensors(), shapes, starts, strict=False):
            assert tuple(member.shape) == shape
            part = flat[start : start + shape[0] * shape[1]].view(shape)
            assert_is(member, alone(grouped.quantizer, part))

    @pytest.mark.parametrize("name", ["mxfp8", "block2", "current", "nvfp4"])
    def test_widths(self, name):
        x, widths = normal(64, 384), [128, 32, 224]
        grouped = functional.group_quantize(x, QUANTIZERS[name](), 3, None, torch.tensor(widths))
        assert grouped.first_dims is None and grouped.get_common_first_dim() == 64
        assert grouped.tensor_offsets.tolist() == [0, 64 * 128, 64 * 160, 64 * 384]
        with pytest.raises(RuntimeError, match="Last dim varies"):
            grouped.get_common_last_dim()
        self.check(x, [(64, width) for width in widths], grouped)

    def test_both(self):
        shapes = [(32, 64), (64, 32), (32, 128)]
        x = normal(1, sum(rows * columns for rows, columns in shapes))
        first, last = (torch.tensor([shape[axis] for shape in shapes]) for axis in (0, 1))
        grouped = functional.group_quantize(x, QUANTIZERS["mxfp8"](), 3, first, last)
        assert grouped.varying_both_dims()
        self.check(x, shapes, grouped)

    def test_alike(self):
        x = normal(96, K)
        grouped = functional.group_quantize(x, QUANTIZERS["mxfp8"](), 3, None)
        assert grouped.all_same_shape() and grouped.tensor_offsets is None and grouped.get_common_first_dim() == 32
        self.check(x, [(32, K)] * 3, grouped)

    def test_rows_behind_the_last_member_are_not_read(self):
        x = normal(sum(ROWS) + 32, K)
        x[sum(ROWS) :] = 1e4
        grouped = functional.group_quantize(x, QUANTIZERS["current"](), len(ROWS), torch.tensor(ROWS))
        assert grouped.amax.max() < 100
        self.check(x, [(rows, K) for rows in ROWS], grouped)

    def test_no_rows_at_all(self):
        grouped, dbias = functional.bgrad_group_quantize(
            normal(0, K), QUANTIZERS["mxfp8"](), 3, torch.zeros(3, dtype=torch.int64)
        )
        assert (dbias == 0).all() and dbias.shape == (3, K) and grouped.rowwise_data.numel() == 0

    def test_offsets_may_leave_gaps(self):
        x = normal(96, K)
        offsets = torch.tensor([0, 64 * K, 96 * K])
        grouped = functional.group_quantize(x, QUANTIZERS["mxfp8"](), 2, torch.tensor([32, 32]), tensor_offsets=offsets)
        first, second = grouped.split_into_quantized_tensors()
        assert_is(first, alone(grouped.quantizer, x[:32]))
        assert_is(second, alone(grouped.quantizer, x[64:]))


def test_an_output_is_overwritten_in_place():
    quantizer = QUANTIZERS["mxfp8"]()
    grouped = functional.group_quantize(normal(64, K), quantizer, 2, None)
    before, codes = grouped.rowwise_data.data_ptr(), grouped.rowwise_data.clone()
    x = normal(64, K, seed=1)
    skipped = functional.group_quantize(x, quantizer, 2, None, noop_flag=torch.ones(1), output=grouped)
    assert skipped is grouped and torch.equal(grouped.rowwise_data, codes)
    assert functional.group_quantize(x, quantizer, 2, None, noop_flag=torch.zeros(1), output=grouped) is grouped
    assert grouped.rowwise_data.data_ptr() == before and not torch.equal(grouped.rowwise_data, codes)
    for member, part in zip(grouped.split_into_quantized_tensors(), x.split(32), strict=True):
        assert_is(member, alone(quantizer, part))


class StrangeStorage(QuantizedTensorStorage):
    pass


class Strange(Quantizer):
    def __init__(self):
        super().__init__(rowwise=True, columnwise=False)

    def quantize_impl(self, tensor):
        return tensor


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((normal(2, 32, 32), 2, None), {}, ValueError, "tensor must be 2D"),
        ((normal(64, K), 3, None), {}, ValueError, "rows must divide by num_tensors"),
        ((normal(64, K), 2, torch.tensor([32])), {}, ValueError, r"first_dims must be int64 of shape \(2,\)"),
        ((normal(64, K), 2, torch.tensor([64, 32])), {}, ValueError, "must have room for all members"),
        ((normal(64, K), 2, torch.tensor([48, 16])), {}, ValueError, "M % 32 == 0"),
        ((normal(64, K), 2, None), {"noop_flag": torch.ones(1)}, ValueError, "noop_flag needs output"),
    ],
)
def test_wrong_arguments_of_group_quantize(arguments, options, error, words):
    tensor, *rest = arguments
    with pytest.raises(error, match=words):
        functional.group_quantize(tensor, MXFP8Quantizer(E4M3), *rest, **options)


def test_what_else_is_refused():
    quantizer = MXFP8Quantizer(E4M3)
    output = functional.group_quantize(normal(64, K), quantizer, 2, None)
    with pytest.raises(ValueError, match="output must have logical_shape"):
        functional.group_quantize(normal(32, K), quantizer, 2, None, output=output)
    with pytest.raises(ValueError, match="output must have quantizer"):
        functional.group_quantize(normal(64, K), MXFP8Quantizer(DType.kFloat8E5M2), 2, None, output=output)
    with pytest.raises(ValueError, match="without first_dims"):
        functional.group_quantize(normal(64, K), quantizer, 2, torch.tensor([32, 32]), output=output)
    with pytest.raises(ValueError, match="tensors of one width"):
        functional.bgrad_group_quantize(normal(64, K), quantizer, 2, None, torch.tensor([64, 64]))
    with pytest.raises(ValueError, match="Expected 2 quantizers, but got 1"):
        functional.split_quantize(normal(64, K), [32, 32], [quantizer])
    with pytest.raises(ValueError, match="Attempted to split tensor"):
        functional.split_quantize(normal(64, K), [32, 64], [quantizer] * 2)
    with pytest.raises(TypeError, match="must be a quantized GroupedTensor"):
        functional.group_dequantize(GroupedTensor.pack([normal(2, 2)]), torch.float32)
    with pytest.raises(NotImplementedError, match="got Strange"):
        functional.group_quantize(normal(64, K), Strange(), 2, None)
    with pytest.raises(NotImplementedError, match="got StrangeStorage"):
        GroupedTensor.pack([object.__new__(StrangeStorage)])


def test_split_quantize_leaves_rows_and_runs_without_quantizer():
    x = normal(96, K)
    one, other = functional.split_quantize(x, [32, 32], [None, MXFP8Quantizer(E4M3)], disable_bulk_allocation=True)
    assert torch.equal(one, x[:32])
    assert_is(other, alone(other._quantizer, x[32:64]))


def test_errors_name_the_run_and_the_member():
    x, quantizer = normal(96, K), MXFP8Quantizer(E4M3)
    with pytest.raises(ValueError, match=r"^split 1: MXFP8 needs .*\(5, "):
        functional.split_quantize(x, [32, 5], [quantizer, quantizer])
    with pytest.raises(ValueError, match=r"^member 1: MXFP8 needs .*\(5, "):
        functional.group_quantize(x, quantizer, 3, torch.tensor([32, 5, 59]))


def test_activations_refuse_groups_by_name():
    group = functional.group_quantize(normal(96, K), MXFP8Quantizer(E4M3), 2, torch.tensor([32, 64]))
    with pytest.raises(TypeError, match="x must be a plain torch tensor; got GroupedTensor"):
        functional.glu(group)
    with pytest.raises(TypeError, match=r"operation 0 GLU\(\): x must be a plain torch tensor; got GroupedTensor"):
        ops.GLU()(group)


def test_offsets_of_splits():
    sizes = torch.tensor([3, 0, 5])
    assert functional.splits_to_offsets(sizes, 4).tolist() == [0, 12, 12, 32]
    converted, (ends, starts, scaled) = functional.splits_to_offsets_multi(
        sizes.int(),
        "cpu",
        strides=[1, 1, 64],
        include_leading_zero=[False, True, True],
        dtypes=[torch.int32, torch.int64, torch.int64],
        bulk_allocate=True,
    )
    assert converted.dtype is torch.int64 and torch.equal(converted, sizes)
    assert ends.tolist() == [3, 3, 8] and ends.dtype is torch.int32
    assert starts.tolist() == [0, 3, 3, 8] and starts.dtype is torch.int64
    assert scaled.tolist() == [0, 192, 192, 512]
    with pytest.raises(ValueError, match="logical_last_dim must be an integer in"):
        functional.splits_to_offsets(sizes, 0)
    with pytest.raises(ValueError, match="must be 1D and int64"):
        functional.splits_to_offsets(sizes.int(), 4)
    with pytest.raises(ValueError, match="matching lengths"):
        functional.splits_to_offsets_multi(sizes, "cpu", strides=[1], include_leading_zero=[], dtypes=[torch.int64])
    with pytest.raises(ValueError, match=r"int32 or torch\.int64"):
        functional.splits_to_offsets_multi(
            sizes, "cpu", strides=[1], include_leading_zero=[True], dtypes=[torch.float32]
        )


# --- the tensor itself ------------------------------------------------------------------------------


@pytest.mark.parametrize("shapes", [[(64, K)] * 3, [(32, K), (64, K), (96, K)]], ids=["alike", "rows"])
@pytest.mark.parametrize("name", [None, *QUANTIZERS])
def test_members_are_views_that_quantize_in_place(name, shapes):
    quantizer = None if name is None else QUANTIZERS[name]()
    if name is not None:
        quantizer.set_usage(rowwise=True, columnwise=name != "nvfp4 rows")
    grouped = GroupedTensor.make_grouped_tensor_with_shapes(3, shapes, quantizer, "cpu", torch.float32)
    rows = [shape[0] for shape in shapes]
    assert grouped.logical_shape == (sum(rows), K) and grouped.all_same_last_dim()
    assert grouped.all_same_shape() == (len(set(rows)) == 1)
    assert tuple(grouped.shape) == ((3, 64, K) if grouped.all_same_shape() else (sum(rows), K))
    assert grouped.offsets == [0, *(np.cumsum(rows) * K).tolist()]
    start = grouped.rowwise_data.data_ptr()
    values = [normal(*shape, dtype=torch.float32, seed=i) for i, shape in enumerate(shapes)]
    if name is None:
        for member, value in zip(grouped.split_into_quantized_tensors(), values, strict=True):
            member.copy_(value)
        assert torch.equal(grouped.rowwise_data, torch.cat([value.view(-1) for value in values]))
        return
    with dispatch.backend("reference"):
        members = grouped.quantize(values)
    packed = grouped.quantizer.scaling().layout.packed
    for member, value, offset in zip(members, values, grouped.offsets, strict=False):
        assert_is(member, alone(quantizer, value))
        assert member.buffers.rowwise_data.data_ptr() == start + offset // packed
    assert len(grouped.scale_inv_offsets) == 4 and grouped.scale_inv_offsets[-1] == grouped.scale_inv.numel()


def test_internal_quantizers_give_storages():
    quantizer = MXFP8Quantizer(E4M3)
    quantizer.internal = True
    made = functional.group_quantize(normal(64, K), quantizer, 2, None)
    assert type(made) is GroupedTensorStorage
    assert not isinstance(made.split_into_quantized_tensors()[0], torch.Tensor)
    copied = made.copy()
    tensors, shells = prepare_for_saving(made, torch.ones(1))
    assert made.has_data() and not shells[0].has_data()
    restored, one = restore_from_saved(shells, tensors)
    assert torch.equal(restored.rowwise_data, copied.rowwise_data) and one.item() == 1
    copied.clear()
    assert copied.num_tensors == 0 and copied.logical_shape == (0, 0) and not copied.has_data() and made.has_data()
    with pytest.raises(RuntimeError, match="no data"):
        copied.split_into_quantized_tensors()


def test_from_rowwise_data():
    data = normal(3, 4, 5)
    grouped = GroupedTensor.make_grouped_tensor_from_rowwise_data(num_tensors=3, tensor_shape=(4, 5), rowwise_data=data)
    assert grouped.shape == (3, 4, 5) and grouped.rowwise_data.data_ptr() == data.data_ptr()
    vectors = GroupedTensor.make_grouped_tensor_from_rowwise_data(
        num_tensors=6, tensor_shape=(10,), rowwise_data=data, internal=True
    )
    assert type(vectors) is GroupedTensorStorage and vectors.logical_shape == (60, 1)
    assert vectors.split_into_quantized_tensors()[1].tolist() == data.view(6, 10)[1].tolist()
    with pytest.raises(ValueError, match="must have 24 elements"):
        GroupedTensor.make_grouped_tensor_from_rowwise_data(num_tensors=2, tensor_shape=(3, 4), rowwise_data=data)
    with pytest.raises(ValueError, match="tensor_shape must be"):
        GroupedTensor.make_grouped_tensor_from_rowwise_data(num_tensors=1, tensor_shape=(3, 4, 5), rowwise_data=data)


def parameter(name, dtype=torch.float32):
    """A parameter of three matrices, and the values that it stands for."""
    values = [normal(32, 64, dtype=dtype, seed=i) for i in range(3)]
    if name is not None:
        values = [QUANTIZERS[name]()(value) for value in values]
    grouped = torch.nn.Parameter(GroupedTensor.pack(values))
    return grouped, torch.stack([value.dequantize() if name else value for value in values])


@pytest.mark.parametrize("name", [None, "delayed", "current", "block2", "mxfp8", "nvfp4"])
class TestTensor:
    def test_operations_see_the_values(self, name):
        grouped, values = parameter(name)
        assert isinstance(grouped, torch.nn.Parameter) and isinstance(grouped, GroupedTensor) and grouped.is_leaf
        assert torch.equal(grouped + 1, values + 1) and type(grouped.detach() * 2) is torch.Tensor
        assert torch.equal(grouped[1], values[1]) and torch.equal(grouped.view(96, 64), values.view(96, 64))
        assert torch.equal(grouped.detach().view(-1), grouped.rowwise_data)
        assert type(torch.zeros_like(grouped)) is torch.Tensor and type(grouped.detach()) is GroupedTensor

    def test_writes_go_to_the_members(self, name):
        grouped, values = parameter(name)
        with torch.no_grad():
            grouped.mul_(2)
            expected = [m.dequantize() if name else m for m in grouped.split_into_quantized_tensors()]
            torch.testing.assert_close(torch.stack(expected), values * 2, rtol=0.25, atol=0.5)
            grouped.copy_(values)
        if name is not None:
            for member, value in zip(grouped.split_into_quantized_tensors(), values, strict=True):
                wanted = grouped.quantizer.copy()
                assert torch.equal(member.buffers.rowwise_data, wanted(value).buffers.rowwise_data)
        else:
            assert torch.equal(grouped.rowwise_data, values.view(-1))

    def test_an_optimizer_steps_as_on_plain_values(self, name):
        grouped, values = parameter(name)
        plain = torch.nn.Parameter(values.clone())
        for one in (grouped, plain):
            optimizer = torch.optim.AdamW([one], lr=0.1, foreach=False)
            (one * torch.arange(64.0)).sum().backward()
            assert type(one.grad) is torch.Tensor
            optimizer.step()
        if name is None:
            torch.testing.assert_close(grouped.detach() + 0, plain.detach(), rtol=0, atol=0)
        else:
            torch.testing.assert_close(grouped.detach() + 0, plain.detach(), rtol=0.5, atol=0.5)
            assert not torch.equal(grouped.detach() + 0, values)

    def test_copies_hold_the_same_bits_in_memory_of_their_own(self, name):
        grouped, _ = parameter(name)
        file = io.BytesIO()
        torch.save({"weight": grouped}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)["weight"]
        assert isinstance(loaded, torch.nn.Parameter)
        for made in (grouped.detach().clone(), copy.deepcopy(grouped), grouped.detach().to("cpu", copy=True), loaded):
            assert type(made) is GroupedTensor and made.num_tensors == 3 and made.shape == grouped.shape
            pairs = zip(made.get_data_tensors(), grouped.get_data_tensors(), strict=True)
            for one, other in pairs:
                assert (one is None) == (other is None)
                if one is not None:
                    assert torch.equal(one, other)
                    assert one.data_ptr() != other.data_ptr()

    def test_from_and_to_others(self, name):
        grouped, values = parameter(name)
        other, _ = parameter(name)
        with torch.no_grad():
            other.mul_(0)
            other.copy_(grouped)
        assert torch.equal(other.rowwise_data, grouped.rowwise_data)
        plain = torch.zeros(3, 32, 64)
        with torch.no_grad():
            plain.copy_(grouped)
        assert torch.equal(plain, values)
        other.data = torch.zeros(3, 32, 64)
        assert not (other.detach() + 0).any()
        other.data = grouped.data
        assert other.rowwise_data.data_ptr() == grouped.rowwise_data.data_ptr()


@pytest.mark.parametrize("rows", [ROWS, [32, 32]], ids=["rows", "alike"])
def test_files_of_groups_that_are_no_parameters(rows):
    grouped = functional.group_quantize(normal(sum(rows), K), MXFP8Quantizer(E4M3), len(rows), torch.tensor(rows))
    for group in (grouped, functional.group_dequantize(grouped, torch.bfloat16)):
        file = io.BytesIO()
        torch.save(group, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert type(loaded) is GroupedTensor and loaded.shape == group.shape
        assert torch.equal(loaded.rowwise_data, group.rowwise_data) and loaded.tensor_shapes == group.tensor_shapes


def test_members_of_different_shapes_have_no_stacked_values():
    grouped = GroupedTensor.make_grouped_tensor_with_shapes(2, [(32, 64), (64, 64)], None, None, torch.float32)
    with pytest.raises(NotImplementedError, match="members of one shape"):
        grouped + 1


def test_a_quantizer_that_is_assigned_is_that_of_all_members():
    grouped, _ = parameter("delayed")
    assert len({id(member._quantizer.scale) for member in grouped.split_into_quantized_tensors()}) == 3
    grouped.quantizer = QUANTIZERS["delayed"]()
    for member in grouped.quantize([normal(32, 64)] * 3):
        assert member._quantizer.scale is grouped.quantizer.scale


def test_the_first_member_with_a_quantizer_gives_the_group_its_own():
    x, quantizer = normal(64, 64), MXFP8Quantizer(E4M3)
    first, second = (quantizer(part) for part in x.split(32))
    packed = GroupedTensor.pack([MXFP8Tensor(first.buffers), second])
    assert packed.quantizer == quantizer and packed.member_quantizers()[0] is None
    other = MXFP8Quantizer(E4M3, columnwise=False)
    packed.set_quantizers([None, other])
    assert packed.quantizer == other and packed.quantizer is not other


def test_copies_communicate_with_nobody():
    """Ranks may clone, and write, alone."""
    reducing = Float8CurrentScalingQuantizer(E4M3, with_amax_reduction=True)
    group = GroupedTensor.make_grouped_tensor(2, None, None, 64, 64, quantizer=reducing)
    copied = group.clone()
    assert group.quantizer is reducing and not copied.quantizer.with_amax_reduction
    assert not any(quantizer.with_amax_reduction for quantizer in copied.held_quantizers())
    grouped, _ = parameter("delayed")
    of_members = zip(grouped.detach().clone().member_quantizers(), grouped.member_quantizers(), strict=True)
    assert all(mine is not theirs and mine.scale is theirs.scale for mine, theirs in of_members)


def test_a_group_is_where_its_data_are():
    group = GroupedTensor(
        (96, 64),
        torch.float32,
        first_dims=torch.tensor([32, 64]),
        num_tensors=2,
        data=torch.empty(96 * 64, device="meta"),
    )
    assert group.device.type == "meta"


def test_an_empty_group_like_another_has_its_members_where_that_has_them():
    offsets = torch.tensor([0, 6, 12])
    group = GroupedTensor(
        (4, 3), torch.float32, num_tensors=2, shapes=[(2, 3)] * 2, data=torch.zeros(12), tensor_offsets=offsets
    )
    like = torch.empty_like(group)
    like.copy_(torch.arange(12.0).view(2, 2, 3))
    assert like.tensor_offsets.tolist() == [0, 6, 12]
    assert [member.tolist() for member in like.split_into_quantized_tensors()] == [
        [[0, 1, 2], [3, 4, 5]],
        [[6, 7, 8], [9, 10, 11]],
    ]


@pytest.mark.parametrize("name", ["delayed", "current", "mxfp8"])
def test_a_packed_group_is_an_output(name):
    """It keeps a copy of the quantizer that made its members."""
    quantizer, x = QUANTIZERS[name](), normal(64, K)
    packed = GroupedTensor.pack([quantizer(part) for part in normal(64, K, seed=1).split(32)])
    assert functional.group_quantize(x, quantizer, 2, None, output=packed) is packed
    for member, part in zip(packed.split_into_quantized_tensors(), x.split(32), strict=True):
        assert_is(member, alone(quantizer, part))


@pytest.mark.parametrize(
    ("name", "different"),
    [("scale", torch.ones(1)), ("amax", torch.zeros(1)), ("optimize_for_gemm", True), ("with_amax_reduction", True)],
)
def test_an_output_s_quantizer_differs_in_what_is_not_shown(name, different):
    quantizer = QUANTIZERS["current" if name == "with_amax_reduction" else "delayed"]()
    packed = GroupedTensor.pack([quantizer(part) for part in normal(64, K).split(32)])
    other = quantizer.copy()
    setattr(other, name, different)
    with pytest.raises(ValueError, match=f"output must have a quantizer with the {name} of Float8"):
        functional.group_quantize(normal(64, K), other, 2, None, output=packed)


def test_values_of_members_need_a_quantizer_and_one_tensor_each():
    grouped, _ = parameter(None)
    with pytest.raises(RuntimeError, match="no quantizer"):
        grouped.quantize([normal(32, 64)] * 3)
    grouped, _ = parameter("mxfp8")
    with pytest.raises(ValueError, match="tensors must be 3"):
        grouped.quantize([normal(32, 64)])
    with pytest.raises(ValueError, match="shapes must be 3"):
        GroupedTensor.make_grouped_tensor_with_shapes(3, [(32, 64)], None, None, torch.float32)
