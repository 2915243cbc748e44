"""The checks of `test_distributed.py`, which processes of `processes.py` run together."""

import itertools

import torch
import torch.distributed as dist
from linear_cases import RECIPES, assert_product, exact_linear, linear_quantizers, plan, seeded
from master_weight_cases import WEIGHTS, values
from one_rounding import DTYPES, assert_same_quantized, same_bits
from processes import check, main

import fuser
import fuser.ops as te_ops
from fuser import distributed
from fuser.dtypes import DType
from fuser.fuser import OperationFuser
from fuser.quantization.contexts import autocast
from fuser.quantization.master_weights import post_all_gather_processing, quantize_master_weights
from fuser.quantization.quantizers import Float8CurrentScalingQuantizer, MXFP8Quantizer
from fuser.quantization.state import FP8GlobalStateManager
from fuser.recipe import DelayedScaling, Float8CurrentScaling


def expect_error(error, message, function, *args):
    try:
        function(*args)
    except error as raised:
        assert message in str(raised), raised
    else:
        raise AssertionError(f"{error.__name__} was not raised")


def part(tensor, rank, size, dim=0):
    """The shard of `tensor` that `rank` holds."""
    return tensor.chunk(size, dim)[rank].contiguous()


def assert_same_on_all_ranks(tensor):
    everywhere = distributed.gather_along_first_dim(tensor.reshape(1, -1))
    assert all(torch.equal(row, everywhere[0]) for row in everywhere), everywhere


# --- collectives ------------------------------------------------------------------------------------


@check
def collectives(rank, size):
    assert (distributed.get_distributed_rank(), distributed.get_distributed_world_size()) == (rank, size)
    for dtype in (*DTYPES, torch.uint8, torch.float64):
        whole = torch.arange(size * 6).reshape(size * 2, 3).to(dtype)
        mine = part(whole, rank, size)
        assert same_bits(distributed.gather_along_first_dim(mine), whole)
        assert same_bits(distributed.gather_along_first_dim(mine.t().contiguous().t()), whole)
        assert same_bits(distributed.reduce_scatter_along_first_dim(whole), mine * size)
        assert same_bits(distributed.reduce_scatter_by_all_reduce(whole, None), mine * size)
        kept = whole.clone()
        assert same_bits(distributed.all_reduce(whole), whole * size)
        assert same_bits(whole, kept)
    assert distributed.gather_along_first_dim(torch.empty(0, 3)).shape == (0, 3)
    codes = torch.arange(8, dtype=torch.uint8).view(torch.float8_e4m3fn)
    gathered = distributed.gather_along_first_dim(codes)
    assert gathered.dtype == torch.float8_e4m3fn
    assert torch.equal(gathered.view(torch.uint8), torch.arange(8, dtype=torch.uint8).repeat(size))
    amax = torch.tensor([float(rank), -float(rank)])
    assert distributed.reduce_amax(amax) is amax
    assert amax.tolist() == [size - 1, 0]
    expect_error(RuntimeError, "not divisible", distributed.reduce_scatter_along_first_dim, torch.ones(size + 1, 2))


@check
def reduce_scatter_falls_back_where_the_backend_lacks_it(rank, size):
    def unsupported(*args):
        raise RuntimeError("ProcessGroupGloo does not support reduce_scatter")

    def broken(*args):
        raise RuntimeError("connection lost")

    native = distributed._reduce_scatter
    try:
        distributed._reduce_scatter = unsupported
        whole = torch.arange(size * 2.0)
        assert torch.equal(distributed.reduce_scatter_along_first_dim(whole), part(whole, rank, size) * size)
        distributed._reduce_scatter = broken
        expect_error(RuntimeError, "connection lost", distributed.reduce_scatter_along_first_dim, whole)
    finally:
        distributed._reduce_scatter = native


@check
def collective_ops(rank, size):
    whole, dy = seeded(4 * size, 8), seeded(4 * size, 8, seed=1)
    x = part(whole, rank, size).requires_grad_()
    y = te_ops.AllGather()(x)
    assert same_bits(y.detach(), whole)
    y.backward(dy)
    torch.testing.assert_close(x.grad, part(dy, rank, size) * size)

    x = whole.clone().requires_grad_()
    y = te_ops.ReduceScatter()(x)
    torch.testing.assert_close(y.detach(), part(whole, rank, size) * size)
    y.backward(part(dy, rank, size))
    assert same_bits(x.grad, dy)

    x = whole.clone().requires_grad_()
    y = te_ops.AllReduce()(x)
    torch.testing.assert_close(y.detach(), whole * size)
    assert same_bits(x.detach(), whole)
    y.backward(dy)
    assert same_bits(x.grad, dy)

    alone = dist.new_group([rank], use_local_synchronization=True)
    for op_class in (te_ops.AllGather, te_ops.ReduceScatter, te_ops.AllReduce):
        y = op_class(alone)(x.detach())
        assert y.data_ptr() == x.data_ptr()
        quantized = MXFP8Quantizer(DType.kFloat8E4M3)(seeded(32 * size, 64))
        assert_same_quantized(op_class(alone)(quantized), quantized)
        assert same_bits(op_class()(quantized), op_class()(quantized.dequantize()))
    expect_error(RuntimeError, "not divisible", te_ops.ReduceScatter(), torch.ones(size + 1, 2))
    expect_error(ValueError, "divisible", lambda: te_ops.BasicLinear(4, 4 * size + 1, tensor_parallel_mode="column"))
    expect_error(ValueError, "Supported modes", lambda: te_ops.BasicLinear(4, 4, tensor_parallel_mode="both"))


# --- tensor-parallel linears ------------------------------------------------------------------------


def _set_shard(parameter, whole, rank, size, dim):
    with torch.no_grad():
        parameter.copy_(whole if dim is None else part(whole, rank, size, dim))


@check
def column_parallel_linear(rank, size):
    for dtype in (torch.float32, torch.bfloat16):
        w, b = seeded(8 * size, 16, dtype=dtype), seeded(8 * size, dtype=dtype, seed=1)
        whole_x, whole_dy = seeded(4 * size, 16, dtype=dtype, seed=2), seeded(4 * size, 8 * size, dtype=dtype, seed=3)
        exact = exact_linear(whole_x, w, whole_dy)
        for sequence_parallel in (False, True):
            op = te_ops.Linear(
                16, 8 * size, dtype=dtype, tensor_parallel_mode="column", sequence_parallel=sequence_parallel
            )
            assert op.weight.shape == (8, 16)
            _set_shard(op.weight, w, rank, size, 0)
            _set_shard(op.bias, b, rank, size, 0)
            x = (part(whole_x, rank, size) if sequence_parallel else whole_x.clone()).requires_grad_()
            y = op(x)
            y.backward(part(whole_dy, rank, size, 1))

            value, magnitude = (part(t, rank, size, 1) for t in exact["y"])
            bias = part(b, rank, size).double()
            if dtype == torch.float32:
                # the bias is a rounding of its own
                torch.testing.assert_close(y.detach().double(), value + bias, rtol=1e-6, atol=1e-5)
            else:
                assert_product(y, (value + bias, magnitude + bias.abs()))
            assert_product(op.weight.grad, tuple(part(t, rank, size) for t in exact["dw"]))
            dx, magnitude = (part(t, rank, size) if sequence_parallel else t for t in exact["dx"])
            # each rank's share is rounded, and each step of the sum over ranks
            roundings = {torch.float32: 2e-6, torch.bfloat16: size * 2**-8}[dtype]
            assert ((x.grad.double() - dx).abs() <= roundings * magnitude).all()


@check
def row_parallel_linear(rank, size):
    for dtype in (torch.float32, torch.bfloat16):
        w, b = seeded(16, 8 * size, dtype=dtype), seeded(16 * size, dtype=dtype, seed=1)
        whole_x, whole_dy = seeded(4 * size, 8 * size, dtype=dtype, seed=2), seeded(4 * size, 16, dtype=dtype, seed=3)
        exact = exact_linear(whole_x, w, whole_dy)
        bias = b.double().reshape(size, 16).sum(0)
        roundings = {torch.float32: 2e-6, torch.bfloat16: 2 * size * 2**-8}[dtype]
        for sequence_parallel in (False, True):
            op = te_ops.Linear(
                8 * size, 16, dtype=dtype, tensor_parallel_mode="row", sequence_parallel=sequence_parallel
            )
            names = [type(basic).__name__ for basic in op.basic_ops]
            assert names == ["BasicLinear", "Bias", "ReduceScatter" if sequence_parallel else "AllReduce"]
            assert op.basic_ops[0].tensor_parallel_mode is None
            _set_shard(op.weight, w, rank, size, 1)
            _set_shard(op.bias, b, rank, size, 0)
            x = part(whole_x, rank, size, 1).requires_grad_()
            y = op(x)
            y.backward(part(whole_dy, rank, size) if sequence_parallel else whole_dy)

            value, magnitude = exact["y"]
            value, magnitude = value + bias, magnitude + b.double().abs().reshape(size, 16).sum(0)
            if sequence_parallel:
                value, magnitude = part(value, rank, size), part(magnitude, rank, size)
            assert ((y.detach().double() - value).abs() <= roundings * magnitude).all()
            assert_product(op.weight.grad, tuple(part(t, rank, size, 1) for t in exact["dw"]))
            assert_product(x.grad, tuple(part(t, rank, size, 1) for t in exact["dx"]))
            torch.testing.assert_close(
                op.bias.grad.double(),
                whole_dy.double().sum(0),
                rtol=2e-2 if dtype == torch.bfloat16 else 1e-6,
                atol=1e-5,
            )


@check
def row_parallel_basic_linear(rank, size):
    """The op by itself reduces too, and gathers its output gradient under sequence parallelism."""
    w = seeded(16, 8 * size)
    whole_x, whole_dy = seeded(4 * size, 8 * size, seed=2), seeded(4 * size, 16, seed=3)
    exact = exact_linear(whole_x, w, whole_dy)
    for sequence_parallel in (False, True):
        op = te_ops.BasicLinear(8 * size, 16, tensor_parallel_mode="row", sequence_parallel=sequence_parallel)
        _set_shard(op.weight, w, rank, size, 1)
        x = part(whole_x, rank, size, 1).requires_grad_()
        pipeline = OperationFuser([op, te_ops.AddExtraInput(in_place=True)])
        extra = torch.zeros(4 if sequence_parallel else 4 * size, 16)
        y = pipeline(x, extra)
        assert plan(pipeline._forward_ops) == [("BasicLinear", [0]), ("AddExtraInput", [1])]
        y.backward(part(whole_dy, rank, size) if sequence_parallel else whole_dy)
        expected = tuple(part(t, rank, size) if sequence_parallel else t for t in exact["y"])
        assert_product(y, expected)
        assert_product(x.grad, tuple(part(t, rank, size, 1) for t in exact["dx"]))
        assert_product(op.weight.grad, tuple(part(t, rank, size, 1) for t in exact["dw"]))


def _reference_products(recipe, x, w, dy):
    x_quantizer, w_quantizer, dy_quantizer = linear_quantizers(recipe)
    xq, wq, dyq = x_quantizer(x), w_quantizer(w), dy_quantizer(dy)
    float32 = torch.float32
    return (
        xq.dequantize(dtype=float32) @ wq.dequantize(dtype=float32).t(),
        dyq.dequantize(dtype=float32) @ wq.dequantize_columnwise(float32),
        dyq.dequantize_columnwise(float32).t() @ xq.dequantize_columnwise(float32),
    )


@check
def quantized_sequence_parallel_linears(rank, size):
    """What the ranks gather is the quantized whole: outputs and weight gradients bit for bit, every recipe."""
    features = 128
    w_column, w_row = seeded(features * size, features), seeded(features, features * size, seed=1)
    whole_x, whole_dy = seeded(128 * size, features, seed=2), seeded(128 * size, features, seed=3)
    for make_recipe in RECIPES.values():
        recipe = make_recipe()
        column = te_ops.BasicLinear(features, features * size, tensor_parallel_mode="column", sequence_parallel=True)
        row = te_ops.BasicLinear(features * size, features, tensor_parallel_mode="row", sequence_parallel=True)
        _set_shard(column.weight, w_column, rank, size, 0)
        _set_shard(row.weight, w_row, rank, size, 1)

        x, dy = part(whole_x, rank, size), seeded(128 * size, features, seed=4 + rank)
        with autocast(recipe=recipe):
            y = column(x)
        torch.manual_seed(6)
        y.backward(dy)
        torch.manual_seed(6)
        expected = _reference_products(recipe, whole_x, column.weight.detach(), dy)
        assert same_bits(y.detach(), expected[0])
        assert same_bits(column.weight.grad, expected[2])

        x = seeded(128 * size, features, seed=5 + rank).requires_grad_()
        with autocast(recipe=recipe):
            y = row(x)
        torch.manual_seed(6)
        y.backward(part(whole_dy, rank, size))
        torch.manual_seed(6)
        expected = _reference_products(recipe, x.detach(), row.weight.detach(), whole_dy)
        assert same_bits(y.detach(), distributed.reduce_scatter_along_first_dim(expected[0]))
        assert same_bits(x.grad, expected[1])
        assert same_bits(row.weight.grad, expected[2])
        FP8GlobalStateManager.reset()


@check
def quantized_neighbours_of_sequence_parallel_linears(rank, size):
    """An op that emits into the gathered input's quantizer: ranks share its scale."""
    features = 128
    whole_x = seeded(128 * size, features, seed=2)
    for make_recipe in RECIPES.values():
        torch.manual_seed(0)
        column = te_ops.BasicLinear(features, features * size, tensor_parallel_mode="column", sequence_parallel=True)
        alone = te_ops.BasicLinear(features, features)
        with torch.no_grad():
            alone.weight.copy_(column.weight)
        with autocast(recipe=make_recipe()):
            y = te_ops.Sequential(te_ops.GELU(), column)(part(whole_x, rank, size))
            expected = te_ops.Sequential(te_ops.GELU(), alone)(whole_x)
        error = (y - expected).norm() / expected.norm()
        # A gathered input is rounded before it is quantized, another one perhaps not: the last code may differ
        assert error < 1e-2, (make_recipe.__name__, error)
        y.sum().backward()
        FP8GlobalStateManager.reset()

    w, whole_dy = seeded(features, features * size, seed=1), seeded(128 * size, features, seed=3)
    for make_recipe in RECIPES.values():
        row = te_ops.BasicLinear(features * size, features, tensor_parallel_mode="row", sequence_parallel=True)
        _set_shard(row.weight, w, rank, size, 1)
        bias = te_ops.Bias(features)
        x = seeded(128 * size, features, seed=5 + rank).requires_grad_()
        with autocast(recipe=make_recipe()):
            y = te_ops.Sequential(row, bias)(x)
        y.backward(part(whole_dy, rank, size))
        expected = whole_dy @ row.weight
        error = (x.grad - expected).norm() / expected.norm()
        assert 1e-3 < error < (0.3 if make_recipe is RECIPES["nvfp4"] else 0.1), (make_recipe.__name__, error)
        torch.testing.assert_close(bias.bias.grad, part(whole_dy, rank, size).sum(0), rtol=1e-5, atol=1e-4)
        FP8GlobalStateManager.reset()


# --- amax reduction ---------------------------------------------------------------------------------


def _scales(op):
    slots = (("forward", 0), ("forward", 1), ("backward", 0))
    return torch.stack([op.get_quantizer(mode, i).scale.reshape(()) for mode, i in slots])


@check
def delayed_scaling_reduces_amaxes(rank, size):
    """Data parallel: every rank has the scales of one process that saw all the data."""
    recipe = DelayedScaling(amax_history_len=4)
    scales = []
    for parallel in (True, False):
        torch.manual_seed(0)
        op = te_ops.BasicLinear(64, 64)
        for step in range(3):
            x, dy = seeded(16 * size, 64, seed=step) * (step + 1), seeded(16 * size, 64, seed=9 + step)
            if parallel:
                x, dy = part(x, rank, size), part(dy, rank, size)
            with autocast(recipe=recipe):
                y = op(x)
            y.backward(dy)
        scales.append(_scales(op))
        FP8GlobalStateManager.reset()
    assert_same_on_all_ranks(scales[0])
    assert same_bits(*scales)
    assert (scales[0] != 1).all()


@check
def delayed_scaling_without_reduction(rank, size):
    op = te_ops.BasicLinear(64, 64)
    with autocast(recipe=DelayedScaling(reduce_amax=False)):
        op(seeded(16, 64) * (rank + 1))
    scale = op.get_quantizer("forward", 0).scale
    torch.testing.assert_close(scale.reshape(()), 448 / (seeded(16, 64) * (rank + 1)).abs().max())


@check
def current_scaling_reduces_amaxes(rank, size):
    whole = seeded(8 * size, 32)
    x = part(whole, rank, size)
    quantizer = Float8CurrentScalingQuantizer(
        DType.kFloat8E4M3, device="cpu", with_amax_reduction=True, amax_reduction_group=dist.group.WORLD
    )
    q = quantizer(x)
    expected = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, device="cpu")(whole)
    assert_same_on_all_ranks(q._scale_inv)
    assert same_bits(q._scale_inv, expected._scale_inv)
    assert same_bits(q._data, part(expected._data, rank, size))


# --- training ---------------------------------------------------------------------------------------


@check
def distributed_data_parallel(rank, size):
    whole_x, whole_dy = seeded(8 * size, 32), seeded(8 * size, 32, seed=1)

    def build():
        torch.manual_seed(0)
        return te_ops.Sequential(te_ops.LayerNorm(32), te_ops.Linear(32, 64), te_ops.GELU(), te_ops.Linear(64, 32))

    alone, parallel = build(), torch.nn.parallel.DistributedDataParallel(build())
    alone(whole_x).backward(whole_dy)
    for _ in range(2):  # DDP sets itself up anew after its first iteration
        parallel.zero_grad()
        parallel(part(whole_x, rank, size)).backward(part(whole_dy, rank, size))
    for mean, total in zip(parallel.parameters(), alone.parameters(), strict=True):
        assert_same_on_all_ranks(mean.grad)
        torch.testing.assert_close(mean.grad * size, total.grad, rtol=1e-4, atol=1e-5)


@check
def converted_experts_that_each_rank_chooses(rank, size):
    """Ranks call other modules: each reduction of amaxes meets that of another module, unless there are none."""
    x, of_the_last = (seeded(32, 32) * 10.0**i for i in (rank, size - 1))
    for reduce_amax in (True, False):
        FP8GlobalStateManager.reset()
        recipe = DelayedScaling(reduce_amax=reduce_amax)
        experts = fuser.convert(torch.nn.ModuleList(torch.nn.Linear(32, 32, bias=False) for _ in range(size)), recipe)
        for _ in range(2):
            experts[rank](x).sum().backward()
        scale = experts[rank].pipeline()._basic_ops[0].get_quantizer("forward", 0).scale
        amax = (of_the_last if reduce_amax else x).abs().max()
        assert scale == torch.tensor(448.0) / amax
    FP8GlobalStateManager.reset()


STEPS, ROWS, WIDTH, HIDDEN = 8, 64, 32, 64


def _train(recipe, tensor_group, data_group, sequence_parallel):
    """Losses of a two-layer network that ranks share, and its delayed or last current scales."""
    tensor_size, tensor_rank = distributed.get_distributed_world_size(tensor_group), dist.get_rank(tensor_group)
    data_size, data_rank = dist.get_world_size(data_group), dist.get_rank(data_group)
    up = te_ops.Linear(
        WIDTH,
        HIDDEN,
        tensor_parallel_mode="column",
        tensor_parallel_group=tensor_group,
        sequence_parallel=sequence_parallel,
    )
    down = te_ops.Linear(
        HIDDEN,
        WIDTH,
        tensor_parallel_mode="row",
        tensor_parallel_group=tensor_group,
        sequence_parallel=sequence_parallel,
    )
    _set_shard(up.weight, seeded(HIDDEN, WIDTH) / WIDTH**0.5, tensor_rank, tensor_size, 0)
    _set_shard(down.weight, seeded(WIDTH, HIDDEN, seed=1) / HIDDEN**0.5, tensor_rank, tensor_size, 1)
    network = te_ops.Sequential(up, te_ops.GELU(), down)
    model = network
    if data_size > 1:
        model = torch.nn.parallel.DistributedDataParallel(network, process_group=data_group)
    rate = 0.03 * data_size  # DDP takes the mean of what the losses below need the sum of
    optimizer = torch.optim.SGD(
        [
            {"params": [up.weight, up.bias, down.weight], "lr": rate},
            # each rank's bias moves by the whole gradient, and the layer adds them all up
            {"params": [down.bias], "lr": rate / tensor_size},
        ]
    )
    losses = []
    for step in range(STEPS):
        x, target = seeded(ROWS, WIDTH, seed=10 + step % 2), seeded(ROWS, WIDTH, seed=20 + step % 2)
        x, target = part(x, data_rank, data_size), part(target, data_rank, data_size)
        if sequence_parallel:
            x, target = part(x, tensor_rank, tensor_size), part(target, tensor_rank, tensor_size)
        optimizer.zero_grad()
        with autocast(enabled=recipe is not None, recipe=recipe):
            y = model(x)
        loss = (y - target).square().sum() / ROWS
        loss.backward()
        optimizer.step()
        total = distributed.all_reduce(loss.detach(), data_group)
        losses.append(distributed.all_reduce(total, tensor_group).item() if sequence_parallel else total.item())
    delayed = recipe is not None and recipe.delayed()
    scales = torch.cat([_scales(linear.basic_ops[0]) for linear in (up, down)]) if delayed else None
    FP8GlobalStateManager.reset()
    return torch.tensor(losses), scales


def _groups(rank, size):
    """`{name: (tensor group, data group)}` of the ways to share the work."""
    alone = dist.new_group([rank], use_local_synchronization=True)
    everyone = dist.group.WORLD
    layouts = {"alone": (alone, alone), "tensor": (everyone, alone), "data": (alone, everyone)}
    if size == 4:
        pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
        layouts["both"] = (pairs[rank // 2], pairs[2 + rank % 2])
    return layouts


def _compare_losses(rank, size, recipe, tolerance):
    layouts = _groups(rank, size)
    alone = layouts.pop("alone")
    reference, reference_scales = _train(recipe, *alone, False)
    assert reference[-2] < 0.8 * reference[0]
    if recipe is not None:  # a curve that casts move by more than the tolerance
        assert ((_train(None, *alone, False)[0] - reference) / reference).abs().max() > 10 * tolerance
    for name, groups in layouts.items():
        for sequence_parallel in (False, True) if name != "data" else (False,):
            losses, scales = _train(recipe, *groups, sequence_parallel)
            assert_same_on_all_ranks(losses)
            error = ((losses - reference) / reference).abs().max()
            assert error <= tolerance, (name, sequence_parallel, losses, reference)
            if scales is not None:
                assert_same_on_all_ranks(scales)
                torch.testing.assert_close(scales, reference_scales, rtol=1e-3, atol=0)


@check
def training_in_float32(rank, size):
    _compare_losses(rank, size, None, 2e-6)


@check
def training_under_delayed_scaling(rank, size):
    _compare_losses(rank, size, DelayedScaling(amax_history_len=4), 1e-4)


@check
def training_under_current_scaling(rank, size):
    # Shards have scales of their own; powers of 2 leave the codes' values the same but for underflow
    _compare_losses(rank, size, Float8CurrentScaling(use_power_2_scales=True), 1e-4)


# --- a distributed optimizer --------------------------------------------------------------------------


def _gather_ranges(arrays, cuts):
    """Give every rank the codes that each rank wrote: rank r those of `cuts[r]` on, as the caller of the cast does."""
    for array in arrays:
        per_byte = cuts[-1] // array.numel()
        for source, (start, stop) in enumerate(itertools.pairwise(cuts)):
            part = array.view(-1)[start // per_byte : stop // per_byte].clone()
            if len(part):
                dist.broadcast(part, source)
            array.view(-1)[start // per_byte : stop // per_byte] = part


@check
def master_weights_in_parts(rank, size):
    """Ranges that cut blocks anywhere, ranks without any: the bits of the whole weight quantized at once."""
    ranges = {
        "uneven": [0, 3002, *(3002 + 1000 * i for i in range(1, size - 1)), 96 * 160],
        "of the last rank alone": [*[0] * size, 96 * 160],
    }
    for dtype in (torch.bfloat16, torch.float32):
        for cuts in ranges.values():
            weights = [new_quantizer()(values(96, 160, dtype=dtype)) for new_quantizer in WEIGHTS.values()]
            weights[0]._quantizer.amax.zero_()
            new = [values(96, 160, seed=1 + i) for i in range(len(weights))]
            start, stop = cuts[rank : rank + 2]
            held = [None if start == stop else whole.flatten()[start:stop] for whole in new]
            quantize_master_weights(weights, held, [start] * len(weights), None)
            for weight in weights:
                _gather_ranges([data for data in weight.get_data_tensors() if data is not None], cuts)
            post_all_gather_processing(weights)
            for name, weight, whole in zip(WEIGHTS, weights, new, strict=True):
                at_once = WEIGHTS[name]()(whole.to(dtype))
                assert_same_quantized(weight, at_once)
                if name == "delayed":
                    assert weight._quantizer.amax.item() == at_once._quantizer.amax.item()


if __name__ == "__main__":
    main()
