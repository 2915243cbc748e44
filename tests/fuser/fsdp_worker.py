"""The checks of `test_fsdp.py` that need peers, which processes of `processes.py` run together."""

import contextlib
import itertools
import os
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from linear_cases import seeded
from processes import check, main
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor

import fuser
import fuser.ops as te_ops
from fuser import recipe as r
from fuser.quantization import FP8GlobalStateManager, QuantizedTensor

RECIPES = {
    "delayed": r.DelayedScaling(),
    "current": r.Float8CurrentScaling(),
    "block": r.Float8BlockScaling(),
    "mxfp8": r.MXFP8BlockScaling(),
    "nvfp4": r.NVFP4BlockScaling(disable_stochastic_rounding=True),  # else gradients differ by the processes' seeds
}
WIDTH, HIDDEN, OUT, ROWS, STEPS = 128, 256, 512, 128, 4


def build(recipe, *, quantized=True, seed=0):
    """Two linears whose weights (512, 128) and (512, 256) four ranks can share in every format."""
    torch.manual_seed(seed)
    with fuser.quantized_model_init(enabled=quantized, recipe=recipe):
        up, down = te_ops.Linear(WIDTH, 2 * HIDDEN), te_ops.Linear(HIDDEN, OUT)
    return te_ops.Sequential(te_ops.RMSNorm(WIDTH), up, te_ops.SwiGLU(), down)


def shard_parts(model, **options):
    for linear in (model[1], model[3]):
        fully_shard(linear, **options)
    return model


def shard(model, **options):
    return fully_shard(shard_parts(model, **options), **options)


def weights(model):
    """What this process holds of the linears' weights."""
    return [getattr(linear.weight, "_local_tensor", linear.weight) for linear in (model[1], model[3])]


def assert_same_data(ours, theirs):
    assert type(ours) is type(theirs) and ours.shape == theirs.shape, (ours, theirs)
    if not isinstance(ours, QuantizedTensor):
        assert torch.equal(ours, theirs)
        return
    for name, tensor in ours.buffers.tensors.items():
        if "amax" not in name or "NVFP4" in type(ours).__name__:  # FP8's is a record, that of a shard another
            assert torch.equal(tensor, theirs.buffers.tensors[name]), name


def step(
    model, optimizer, recipe, index=0, rank=0, size=1, reduce=lambda parameters: None, run=lambda model, x: model(x)
):
    """One step of `size` processes on as many parts of a batch; the mean loss."""
    x, target = (seeded(ROWS, width, seed=10 * i + index % 2) for i, width in ((1, WIDTH), (2, OUT)))
    x, target = (tensor.chunk(size)[rank] for tensor in (x, target))
    optimizer.zero_grad()
    with fuser.autocast(recipe=recipe):
        y = run(model, x)
    loss = (y - target).square().sum(1).mean()
    loss.backward()
    reduce(model.parameters())
    optimizer.step()
    return loss.detach()


def train(model, recipe, rank=0, size=1, reduce=lambda parameters: None):
    """The loss of every step, the mean over processes."""
    FP8GlobalStateManager.reset()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = torch.stack([step(model, optimizer, recipe, i, rank, size, reduce) for i in range(STEPS)])
    if size > 1:
        dist.all_reduce(losses)
    return losses / size


def average(parameters):
    """What DDP does, with weights that it would not take."""
    for parameter in parameters:
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)


@contextlib.contextmanager
def expected(error, *words):
    try:
        yield
    except error as raised:
        assert all(word in str(raised) for word in words), raised
    else:
        raise AssertionError(f"{error.__name__} was not raised")


# --- training ---------------------------------------------------------------------------------------


def _compare_training(rank, size, quantized):
    """Loss curves of shards, of replicas and of one process with the whole batch."""
    for name, recipe in RECIPES.items():
        sharded = shard(build(recipe, quantized=quantized))
        losses = train(sharded, recipe, rank, size)
        assert all(isinstance(w, QuantizedTensor) is quantized for w in weights(sharded)), name
        replicas = train(build(recipe, quantized=quantized), recipe, rank, size, average)
        alone = train(build(recipe, quantized=quantized), recipe)
        assert alone[-2:].sum() < 0.97 * alone[:2].sum(), (name, alone)
        # The same casts; gradients are summed in another order, and what that moves over a rounding boundary differs.
        torch.testing.assert_close(losses, replicas, rtol=0 if size == 2 else 3e-4, atol=0)
        # Blocks of 32 rows are those of the whole batch. An amax of it is not that of a part.
        rtol = {"mxfp8": 3e-4, "block": 3e-4 if size == 2 else 3e-3}.get(name, 3e-3)
        torch.testing.assert_close(losses, alone, rtol=rtol, atol=0)


@check
def training_with_weights_in_high_precision(rank, size):
    _compare_training(rank, size, quantized=False)


@check
def training_with_quantized_weights(rank, size):
    _compare_training(rank, size, quantized=True)


class Recomputed(torch.nn.Module):
    """`last(first(x))`, where backward computes `last` again."""

    def __init__(self, first, last):
        super().__init__()
        self.first, self.last = first, last

    def forward(self, x):
        return fuser.checkpoint(self.last, self.first(x))


@check
def ways_to_shard(rank, size):
    """Options of `fully_shard`, and recomputation, don't change the first two losses."""
    recipe = RECIPES["mxfp8"]

    def losses(model, run=lambda model, x: model(x)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        return [step(model, optimizer, recipe, i, run=run).item() for i in range(2)]

    reference = losses(build(recipe))
    assert losses(shard(build(recipe), reshard_after_forward=False)) == reference
    assert losses(shard(build(recipe), offload_policy=CPUOffloadPolicy(pin_memory=False))) == reference
    assert losses(shard(build(recipe)), fuser.checkpoint) == reference
    *parts, last = shard_parts(build(recipe))
    assert losses(fully_shard(Recomputed(torch.nn.Sequential(*parts), last))) == reference
    assert losses(shard(build(recipe), mesh=alone(rank, size))) == reference
    if size == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        assert losses(shard(build(recipe), mesh=mesh)) == reference
    mixed = shard(build(recipe), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    assert abs(losses(mixed)[1] / reference[1] - 1) < 2**-8
    mixed[1].unshard()
    assert mixed[1].weight.dtype == torch.bfloat16 and isinstance(mixed[1].weight, QuantizedTensor)


@check
def parameters_of_all_groups(rank, size):
    """One parameter for all groups' weights is sharded group by group, in high precision, and trains as replicas do."""
    splits, x, target = torch.tensor([32, 0, 64, 32]), seeded(ROWS, WIDTH, seed=rank), seeded(ROWS, HIDDEN, seed=9)

    def build_groups(recipe, quantized):
        torch.manual_seed(0)
        with fuser.quantized_model_init(enabled=quantized, recipe=recipe):
            return te_ops.GroupedLinear(4, WIDTH, HIDDEN, bias=False, single_grouped_weight=True)

    def losses(model, recipe, reduce=lambda parameters: None):
        FP8GlobalStateManager.reset()
        optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.3), []
        for _ in range(2):
            optimizer.zero_grad()
            with fuser.autocast(recipe=recipe):
                loss = (model(x, splits) - target).square().sum(1).mean()
            loss.backward()
            reduce(model.parameters())
            optimizer.step()
            seen.append(loss.detach())
        return torch.stack(seen)

    os.environ["NVTE_GROUPED_LINEAR_SINGLE_PARAM"] = "1"
    try:
        for recipe, quantized in itertools.product((RECIPES["current"], RECIPES["mxfp8"]), (False, True)):
            replica, sharded = build_groups(recipe, False), build_groups(recipe, quantized)
            with torch.no_grad():
                replica.weight.copy_(sharded.weight)
            fully_shard(sharded)
            assert type(sharded.weight.to_local()) is torch.Tensor and len(sharded.weight.to_local()) == 4 // size
            curves = losses(sharded, recipe), losses(replica, recipe, average)
            torch.testing.assert_close(*curves, rtol=0 if size == 2 else 3e-4, atol=0)
    finally:
        del os.environ["NVTE_GROUPED_LINEAR_SINGLE_PARAM"]


@check
def models_built_on_the_meta_device(rank, size):
    model = te_ops.Sequential(te_ops.RMSNorm(64, device="meta"), te_ops.Linear(64, 8 * size, device="meta"))
    fully_shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(rank)
    for module in model.modules():
        getattr(module, "reset_parameters", lambda: None)()
    model(torch.ones(3, 64)).sum().backward()
    torch.manual_seed(0)
    weight, bias = model[1].weight.full_tensor(), model[1].bias.full_tensor()
    assert torch.equal(weight, te_ops.Linear(64, 8 * size).weight) and not bias.any()


@check
def data_parallel_with_quantized_weights(rank, size):
    """DistributedDataParallel sends rank 0's values, which each rank quantizes; then ranks train as replicas do."""
    recipe = RECIPES["mxfp8"]
    model = torch.nn.parallel.DistributedDataParallel(build(recipe, seed=rank))
    replica = build(recipe)
    for ours, theirs in zip(weights(model.module), weights(replica), strict=True):
        assert torch.equal(ours.dequantize(), theirs.dequantize())
    curves = []
    for one, reduce in ((model, lambda parameters: None), (replica, average)):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.3)
        curves.append([step(one, optimizer, recipe, i, rank, size, reduce).item() for i in range(2)])
    assert curves[0][0] == curves[1][0] and abs(curves[0][1] / curves[1][1] - 1) < 3e-4


# --- data -------------------------------------------------------------------------------------------


@check
def shards_are_gathered_as_they_are(rank, size):
    """Gathered weights are the whole ones bit for bit: at first, and after a step on the shards' gradients."""
    for name, recipe in RECIPES.items():
        for mesh in (init_device_mesh("cpu", (size,)), alone(rank, size)):
            whole, sharded = build(recipe), shard(build(recipe), mesh=mesh)
            optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (whole, sharded)]
            for _ in range(3):
                sharded.unshard()
                for linear in (1, 3):
                    sharded[linear].unshard()
                    assert_same_data(sharded[linear].weight, whole[linear].weight)
                    sharded[linear].reshard()
                sharded.reshard()
                for i, (a, b) in enumerate(zip(whole.parameters(), sharded.parameters(), strict=True)):
                    a.grad = seeded(*a.shape, seed=i)
                    b.grad = distribute_tensor(a.grad, mesh, b.placements)
                for optimizer in optimizers:
                    optimizer.step()
            assert len(weights(sharded)[0]) == 2 * HIDDEN // mesh.size(), name
            FP8GlobalStateManager.reset()


@check
def checkpoints(rank, size):
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    everyone, one = init_device_mesh("cpu", (size,)), alone(rank, size)
    for name, recipe in RECIPES.items():
        saved = shard(build(recipe))
        step(saved, torch.optim.AdamW(saved.parameters(), lr=0.01), recipe, rank=rank, size=size)
        state = saved.state_dict()

        loaded = shard(build(recipe, seed=1))
        loaded.load_state_dict(state)
        assert_same_state(loaded, saved)

        path = Path(folder[0]) / name
        dcp.save(state, checkpoint_id=path)
        loaded = shard(build(recipe, seed=1))
        read_into(loaded, path)
        assert_same_state(loaded, saved)

        values = {key: getattr(value, "full_tensor", lambda v=value: v)() for key, value in state.items()}
        assert all(type(value) is torch.Tensor for value in values.values())
        if name in ("block", "mxfp8"):  # fewer processes: each writes several parts into its own
            fewer = shard(build(recipe, seed=1), mesh=one)
            read_into(fewer, path)
            for key, value in fewer.state_dict().items():
                assert torch.equal(getattr(value, "full_tensor", lambda v=value: v)(), values[key]), key
            dcp.save(fewer.state_dict(), checkpoint_id=path.with_suffix(".one"))
            more = shard(build(recipe, seed=2), mesh=everyone)
            read_into(more, path.with_suffix(".one"))
            assert_same_state(more, saved)
        else:
            with expected(CheckpointException, "rows can't be written alone"):
                read_into(shard(build(recipe, seed=1), mesh=one), path)
        FP8GlobalStateManager.reset()


@check
def weights_that_can_not_be_sharded(rank, size):
    def linear(recipe, rows, columns=128):
        torch.manual_seed(0)
        with fuser.quantized_model_init(recipe=recipe):
            return te_ops.BasicLinear(columns, rows)

    for name, rows, rule in (("mxfp8", 16 * size, "multiple of 32; they are 16"), ("current", size + 1, "same number")):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = fully_shard(linear(RECIPES[name], rows))
        (message,) = {str(w.message) for w in caught}
        assert rule in message and str((rows, 128)) in message and "high precision" in message, message
        assert type(model.weight._local_tensor) is torch.Tensor
        torch.testing.assert_close(model.weight.full_tensor(), linear(RECIPES[name], rows).weight.dequantize())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with fuser.autocast(recipe=RECIPES[name], enabled=name == "mxfp8"):
            model(torch.ones(32, 128)).sum().backward()
        optimizer.step()

    if size == 4:  # three parts of two rows, and a process without
        model = fully_shard(linear(RECIPES["current"], 6))
        with expected(ValueError, "BasicLinear.weight", "(6, 128)", "6 rows", "4 ranks"):
            model(torch.ones(32, 128))

    x = torch.ones(32, 128)
    for name, repaired in (("current", True), ("nvfp4", True), ("delayed", False)):
        model = fully_shard(linear(RECIPES[name], 32 * size))
        local = model.weight._local_tensor
        local.copy_(torch.full(local.shape, 1.0 + rank))  # before processes know that they share a scale
        if not repaired:
            local.buffers.rowwise_scale_inv.fill_(1.0 + rank)
            with expected(RuntimeError, "BasicLinear.weight", f"({32 * size}, 128)", "other scales"):
                model(x)
            continue
        y = model(x)
        torch.testing.assert_close(y[0], 128 * (1.0 + torch.arange(size)).repeat_interleave(32), rtol=0.1, atol=0)


@check
def shards_follow_the_recipe_of_autocast(rank, size):
    model = shard(build(r.Float8CurrentScaling()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recipe = r.Float8CurrentScaling(use_power_2_scales=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that the quantizers are replaced
        for i in range(2):
            step(model, optimizer, recipe, i, rank, size)
    for weight in weights(model):
        scale = weight.buffers.rowwise_scale_inv
        assert torch.frexp(scale)[0] == 0.5 and weight._quantizer.with_amax_reduction
        scales = [torch.empty_like(scale) for _ in range(size)]
        dist.all_gather(scales, scale)
        assert all(torch.equal(s, scale) for s in scales)


@check
def blocks_of_another_recipe_are_refused(rank, size):
    model = shard(build(r.NVFP4BlockScaling()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with expected(ValueError, ".weight", "two_d=True", "two_d=False", "the same blocks"):
            for i in range(2):
                step(model, optimizer, r.NVFP4BlockScaling(disable_2d_quantization=True), i, rank, size)


@check
def casts_after_sharding_are_refused(rank, size):
    model = shard(build(r.MXFP8BlockScaling()))
    with expected(RuntimeError, ".weight", "sharded and quantized", "before fully_shard"):
        model.half()


@check
def collectives_of_quantized_tensors(rank, size):
    for recipe in RECIPES.values():
        others = [build(recipe, seed=i)[1].weight.detach() for i in range(size)]
        mine = others[rank]
        gathered = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(gathered, mine)
        for ours, theirs in zip(gathered, others, strict=True):
            torch.testing.assert_close(ours.dequantize(), theirs.dequantize(), rtol=1e-6, atol=1e-6)
        received = mine.clone()
        dist.broadcast(received, size - 1)
        assert type(received) is type(mine)
        torch.testing.assert_close(received.dequantize(), others[-1].dequantize(), rtol=1e-6, atol=1e-6)
        FP8GlobalStateManager.reset()


def read_into(model, path):
    state = model.state_dict()
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state)


def assert_same_state(ours, theirs):
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert_same_data(a._local_tensor, b._local_tensor)


def alone(rank, size):
    """A mesh of this process."""
    groups = [dist.new_group([i]) for i in range(size)]
    return DeviceMesh.from_group(groups[rank], "cpu")


if __name__ == "__main__":
    main()
