"""Master weights in parts, cast into weights that are kept quantized: what one process shows.

`distributed_worker.py` has the parts of several processes.
"""

import pytest
import torch
from master_weight_cases import E4M3, WEIGHTS, values
from one_rounding import assert_same_quantized, same_bits

import fuser
import refops
from fuser import ops, recipe
from fuser import quantization as q
from fuser.custom_recipes.reference import CurrentScalingQuantizerRef, NVFP4QuantizerRef
from fuser.quantization import master_weights as mw

BF16 = torch.bfloat16
#: What is cast, and where it goes, is no matter of who casts it.
pytestmark = pytest.mark.usefixtures("the_reference_quantizes")

WEIGHT = WEIGHTS["mxfp8"]()(values(32, 32))


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_rank_alone_casts_the_whole(name):
    weight, new = WEIGHTS[name]()(values(96, 64, dtype=BF16)), values(96, 64, seed=1)
    new[3, 5], new[40, 7], new[70] = float("nan"), float("inf"), 0.0
    mw.quantize_master_weights([weight], [new.flatten()], [0], None)
    assert weight.get_usages() == {"rowwise": True, "columnwise": name == "mxfp8"}
    mw.post_all_gather_processing([weight, new])
    assert_same_quantized(weight, WEIGHTS[name]()(new.to(BF16)))


@pytest.mark.parametrize("name", WEIGHTS)
def test_what_a_rank_does_not_hold_is_left_alone(name):
    old = values(64, 64, dtype=BF16)
    weight, whole = WEIGHTS[name]()(old), WEIGHTS[name]()(old)
    mw.quantize_master_weights([weight], [values(2, 33, seed=1)], [1001], None)
    data, before = weight._rowwise_data.flatten(), whole._rowwise_data.flatten()
    per_byte = weight.buffers.scaling.layout.packed
    assert torch.equal(data[: 1000 // per_byte], before[: 1000 // per_byte])
    assert torch.equal(data[-(-1067 // per_byte) :], before[-(-1067 // per_byte) :])
    assert not torch.equal(data, before)
    if per_byte == 2:  # element 1000 shares a byte with the first one that is written
        assert data[500] & 15 == before[500] & 15
    unchanged = weight._rowwise_data.clone()
    mw.quantize_master_weights([weight], [None], [None], None)
    assert torch.equal(weight._rowwise_data, unchanged)


@pytest.mark.parametrize("name", WEIGHTS)
def test_codes_of_a_shard_go_where_it_is(name):
    """FSDP frees the whole weight's codes: a rank has memory for its own alone."""
    weight, new = WEIGHTS[name]()(values(64, 32, dtype=BF16)), values(64, 32, seed=1)
    before = weight._rowwise_data.clone()
    whole = WEIGHTS[name]()(new.to(BF16))
    size = 2048 // weight.buffers.scaling.layout.packed
    shard = torch.zeros(size, dtype=torch.uint8)
    pair = (shard, torch.zeros(size, dtype=torch.uint8))
    mw.quantize_master_weights([weight], [new.flatten()], [0], None, [pair if name == "mxfp8" else shard])
    assert torch.equal(shard, whole._rowwise_data.flatten()) and torch.equal(weight._rowwise_data, before)
    assert same_bits(weight.buffers.rowwise_scale_inv, whole.buffers.rowwise_scale_inv)
    if name == "mxfp8":
        assert torch.equal(pair[1], whole._columnwise_data.flatten())


def test_columnwise_copies_stay_where_they_are():
    """`manual_post_all_gather_processing`: out of date until the caller says so, then in the same memory."""
    weight, new = WEIGHTS["block"]()(values(128, 256)), values(128, 256, seed=1)
    memory, before = weight._columnwise_data.data_ptr(), weight._columnwise_data.clone()
    mw.quantize_master_weights([weight], [new], [0], None, manual_post_all_gather_processing=True)
    assert torch.equal(weight._columnwise_data, before)
    mw.post_all_gather_processing(weight)
    assert weight._columnwise_data.data_ptr() == memory
    assert_same_quantized(weight, WEIGHTS["block"]()(new))


@pytest.mark.parametrize(
    "of",
    [
        recipe.Float8BlockScaling(),
        recipe.MXFP8BlockScaling(),
        recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
        recipe.Float8CurrentScaling(),
    ],
    ids=lambda of: type(of).__name__,
)
def test_the_next_step_is_that_of_weights_quantized_at_once(of):
    """The columnwise copy that was dropped is made of the rowwise codes, not quantized once more."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        with fuser.quantized_model_init(recipe=of):
            models.append(ops.Linear(128, 128, bias=False))
    new = values(128, 128, seed=1)
    mw.cast_master_weights_to_fp8([models[0].weight], [new], [0], None)
    with torch.no_grad():
        models[1].weight.copy_(new)
    results = []
    for model in models:
        x = values(32, 128, seed=2).requires_grad_()
        with fuser.autocast(recipe=of):
            y = model(x)
        y.sum().backward()
        results.append((y, x.grad))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    if not isinstance(of, recipe.Float8CurrentScaling):  # whose products read either copy
        assert_same_quantized(models[0].weight, models[1].weight)


def test_delayed_scaling_records_the_amax():
    quantizer = q.Float8Quantizer(torch.ones(1), torch.full((1,), 2.0), E4M3)
    weight = quantizer(torch.zeros(4, 4))
    mw.quantize_master_weights([weight], [torch.full((3,), 5.0)], [1], None)
    assert quantizer.amax.item() == 5.0
    mw.quantize_master_weights([weight], [torch.full((3,), 1.0)], [1], None)
    assert quantizer.amax.item() == 5.0


def test_tensors_that_are_not_quantized_are_copied():
    weight, new = q.IdentityQuantizer()(values(8, 8, dtype=BF16)), values(8, 8, seed=1)
    before = weight.dequantize().clone()
    mw.quantize_master_weights([weight], [new.flatten()[10:20]], [10], None)
    after = weight.dequantize().flatten()
    assert torch.equal(after[10:20], new.flatten()[10:20].to(BF16))
    assert torch.equal(after[20:], before.flatten()[20:])


def test_a_transposed_tensor_is_written_too():
    weight = q.IdentityQuantizer()(torch.zeros(4, 8).t())
    mw.quantize_master_weights([weight], [torch.ones(32)], [0], None)
    assert weight.dequantize().sum() == 32


@pytest.mark.parametrize("quantizer", [q.IdentityQuantizer(), WEIGHTS["current"]()])
def test_memory_that_has_no_flat_view_is_refused(quantizer):
    """Written through a copy, it would stay as it is."""
    weight = quantizer(values(32, 16))
    shard = torch.zeros(32, 32, dtype=weight.get_data_tensors()[0].dtype)[:, ::2]
    with pytest.raises(ValueError, match="shards must be contiguous; got strides"):
        mw.quantize_master_weights([weight], [values(32, 16)], [0], None, [shard])
    with pytest.raises(ValueError, match="new_raw_data must be contiguous"):
        mw.replace_raw_data(weight, shard)


class TestHybrid:
    def make(self, source="original"):
        quantizer = q.HybridQuantizer(
            rowwise_quantizer=WEIGHTS["current"](),
            columnwise_quantizer=q.IdentityQuantizer(),
            columnwise_source=source,
        )
        return quantizer(values(32, 32, dtype=BF16))

    def test_one_direction(self):
        weight, new = self.make("rowwise_dequantized"), values(32, 32, seed=1)
        weight.update_usage(columnwise_usage=False)
        mw.quantize_master_weights([weight], [new], [0], None)
        expected = q.Float8CurrentScalingQuantizer(E4M3, columnwise=False)(new.to(BF16))
        assert_same_quantized(weight._rowwise_storage, expected)

    def test_both_of_the_whole(self):
        weight, new = self.make(), values(32, 32, seed=1)
        mw.quantize_master_weights([weight], [new], [0], None)
        assert torch.equal(weight.dequantize_columnwise(), new.to(BF16))
        assert torch.equal(weight.dequantize(), WEIGHTS["current"]()(new.to(BF16)).dequantize())

    @pytest.mark.parametrize(("source", "size"), [("original", 100), ("rowwise_dequantized", 1024)])
    def test_one_direction_s_codes_travel(self, source, size):
        with pytest.raises(ValueError, match="both directions can't be written in ranges"):
            mw.quantize_master_weights([self.make(source)], [values(size)], [0], None)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([values(4, 4)], [None], [0]), TypeError, "model_weights must be quantized tensors; got Tensor"),
        (
            ([WEIGHTS["current"]()(values(4, 4))], [values(4)], [13]),
            ValueError,
            "4 elements .* within .* of 16; got 13",
        ),
        (([WEIGHTS["current"]()(values(4, 4))], [values(4)], [None]), ValueError, "of 16; got None"),
        (([], [None], []), ValueError, r"must be equally long; got \[0, 1, 0, 0\]"),
        (
            ([q.Float8BlockQuantizer(E4M3, block_scaling_dim=1)(values(128, 128))], [values(4)], [0]),
            ValueError,
            "columnwise codes are stored transposed, .* Give weights square blocks",
        ),
        *(
            (
                ([quantizer(values(16, 16))], [values(4)], [0]),
                ValueError,
                r"four_over_six='mae'.* chooses scales by all elements of a block",
            )
            for quantizer in (
                q.NVFP4Quantizer(with_2d_quantization=True, nvfp4_use_4over6=True),
                q.BlockScaledQuantizer(refops.NVFP4Scaling(two_d=True, four_over_six="mae")),
                NVFP4QuantizerRef(quant_tile_shape=(16, 16), nvfp4_use_4over6=True),
            )
        ),
        (
            ([WEIGHT], [torch.ones(4, dtype=torch.int32)], [0]),
            TypeError,
            r"master_weights .* float .*int32 of shape \(4,",
        ),
        (([WEIGHT], [[1.0]], [0]), TypeError, r"master_weights must be tensors of a float dtype, or None; got \[1.0\]"),
        (([WEIGHT], [torch.ones(4)], [0.0]), TypeError, "start_offsets must be integers.*; got 0.0"),
        (([WEIGHT], [torch.ones(4)], [True]), TypeError, "start_offsets must be integers.*; got True"),
        (
            (WEIGHT, torch.ones(4), 0),
            TypeError,
            "model_weights must be a list with an entry for each weight; got MXFP8",
        ),
        (([WEIGHT], torch.ones(4), [0]), TypeError, "master_weights must be a list with an entry for each .*Tensor"),
        (
            ([WEIGHT], [torch.ones(4)], 0),
            TypeError,
            "start_offsets must be a list with an entry for each weight; got 0",
        ),
    ],
)
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        mw.quantize_master_weights(*arguments, None)


@pytest.mark.parametrize("quantizer", [*WEIGHTS.values(), q.IdentityQuantizer])
def test_codes_move_to_the_caller_s_memory(quantizer):
    tensor = quantizer()(values(32, 32))
    field = "hp_data" if isinstance(tensor, q.IdentityTensor) else "rowwise_data"
    old = getattr(tensor.buffers, field)
    memory = torch.zeros_like(old)
    if tensor._quantizer == q.MXFP8Quantizer(E4M3):
        with pytest.raises(NotImplementedError, match="one copy that travels; got MXFP8Tensor"):
            mw.replace_raw_data(tensor, memory)
        return
    mw.replace_raw_data(tensor, memory)
    assert getattr(tensor.buffers, field) is memory and torch.equal(memory, old)
    with pytest.raises(ValueError, match=r"new_raw_data must be .* got torch.int32"):
        mw.replace_raw_data(tensor, memory.to(torch.int32))


def test_the_columnwise_copy_is_cleared():
    tensor = WEIGHTS["nvfp4"]()(values(32, 32))
    mw.clear_columnwise_cache(tensor)
    assert tensor.get_usages() == {"rowwise": True, "columnwise": False}


def test_custom():
    custom = CurrentScalingQuantizerRef(torch.float8_e4m3fn)
    assert mw.is_custom(custom) and mw.is_custom(custom(values(4, 4)))
    assert not any(map(mw.is_custom, (None, torch.ones(1), WEIGHTS["mxfp8"]())))
