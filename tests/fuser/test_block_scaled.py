"""A declaration alone gives a quantizer, a tensor and a recipe: `fuser` on a scaling that it has never heard of."""

import io
import math

import numpy as np
import pytest
import torch

import fuser
import refops
from declared_scalings import CHECKED, WITHOUT_KERNELS, declared
from fuser import functional, ops, recipe
from fuser import quantization as q
from fuser.dispatch import TENSOR_FIELDS, as_numpy
from fuser.quantization import sharding
from refops import E3M2, E4M3
from refops.scalings import NAMED

LINES, SQUARES = (refops.MXFP4Scaling(two_d, scale_rounding="even") for two_d in (False, True))
#: Settings of scalings that TE has, but not its quantizers.
FLOOR, SIX_BITS = refops.MXFP8Scaling(E4M3, scale_rounding="floor"), refops.MXFP8Scaling(E3M2, two_d=True)
SCALINGS = {**CHECKED, "floor": FLOOR, "six bits": SIX_BITS}
#: The scalings of `refops` that TE does not have, and settings of NVFP4 that its quantizer does not take.
TE = refops.DelayedScaling, refops.CurrentScaling, refops.BlockScaling, refops.MXFP8Scaling, refops.NVFP4Scaling
OTHERS = {name: row.scaling for name, row in NAMED.items() if not isinstance(row.scaling, TE) or "ue5m3" in name}
SCALINGS |= OTHERS


@pytest.fixture(autouse=True)
def declaration():
    with declared(), fuser.backend("reference"):  # tests of `cuda_kernels` have its kernels of these
        yield


def normal(*shape, dtype=torch.float32, seed=0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def assert_same(made, expected):
    """The buffers of a quantized tensor are those of a `refops.Quantized`."""
    for name in TENSOR_FIELDS:
        one, other = getattr(made.buffers, name), getattr(expected, name)
        assert (one is None) == (other is None), name
        if one is not None:
            np.testing.assert_array_equal(one.numpy(), other, err_msg=name)


def partial(scaling):
    """A shape whose last blocks are partial, where the layout takes one."""
    return tuple(math.lcm(scaling.layout.columnwise_multiple, 16) * n for n in (3, 5))


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
class TestTensor:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
    def test_is_what_refops_makes(self, scaling, dtype):
        m, k = partial(scaling)
        x = normal(2, m // 2, k, dtype=dtype)
        for usage in ({"columnwise": True}, {"columnwise": False}, {"rowwise": False, "columnwise": True}):
            made = q.BlockScaledQuantizer(scaling, **usage)(x)
            assert_same(made, refops.quantize(as_numpy(x), scaling, **usage))
        assert type(made) is q.BlockScaledTensor and made.shape == x.shape and made.dtype == dtype
        empty = q.BlockScaledQuantizer(scaling).make_empty(x.shape, dtype=dtype)
        full = q.BlockScaledQuantizer(scaling)(x)
        assert {n: t.shape for n, t in empty.buffers.tensors.items()} == {
            n: t.shape for n, t in full.buffers.tensors.items()
        }

    def test_the_other_copy_is_made_where_blocks_are_square(self, scaling):
        sizes = partial(scaling)
        made = q.BlockScaledQuantizer(scaling, columnwise=False)(normal(*sizes))
        if scaling.layout.is_square:
            made.update_usage(columnwise_usage=True)
            assert_same(made, refops.quantize(normal(*sizes).numpy(), scaling, columnwise=True))
            made.update_usage(rowwise_usage=False)
            made.update_usage(rowwise_usage=True)
            assert_same(made, refops.quantize(normal(*sizes).numpy(), scaling, columnwise=True))
        else:
            with pytest.raises(RuntimeError, match="missing column-wise data, and the other copy has other codes"):
                made.update_usage(columnwise_usage=True)

    def test_files(self, scaling):
        made = q.BlockScaledQuantizer(scaling)(normal(64, 64))
        file = io.BytesIO()
        torch.save({"weight": torch.nn.Parameter(made)}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)["weight"]
        assert isinstance(loaded, torch.nn.Parameter) and loaded.buffers.scaling == scaling
        assert loaded._quantizer == made._quantizer and torch.equal(loaded.dequantize(), made.dequantize())

    @pytest.mark.parametrize("name", ["gelu", "swiglu"])
    def test_an_activation_is_fused_with_the_cast(self, scaling, name):
        halves = 1 + refops.ACTIVATIONS[name].gated
        x, dy = normal(64, 256, dtype=torch.bfloat16), normal(64, 256 // halves, dtype=torch.bfloat16)
        quantizer = q.BlockScaledQuantizer(scaling)
        made = functional.activation(name, x, quantizer)
        dbias, gradient = functional.dbias_activation_grad(name, dy, x, quantizer)
        assert_same(made, refops.activation_quantize(name, as_numpy(x), scaling, columnwise=True))
        expected, sums = refops.activation_grad_quantize(
            name, as_numpy(dy), as_numpy(x), scaling, columnwise=True, dbias=True
        )
        assert_same(gradient, expected)
        np.testing.assert_array_equal(as_numpy(dbias), sums)

    def test_shards_put_together_are_the_whole(self, scaling):
        whole = q.BlockScaledQuantizer(scaling)(normal(4 * sharding.rows_together(scaling), 64))
        shards = whole.chunk(4)
        handed = [shard.fsdp_pre_all_gather(None, whole.shape, (64, 1), None, None) for shard in shards]
        gathered = [torch.cat(arrays) for arrays in zip(*(arrays for arrays, _ in handed), strict=True)]
        result, _ = shards[0].fsdp_post_all_gather(gathered, handed[0][1], torch.float32)
        for name, tensor in whole.buffers.tensors.items():
            assert torch.equal(getattr(result.buffers, name), tensor), name
        arrays = 3 if scaling.layout.two_level else 2  # codes, scales and perhaps the amax of a copy
        assert len(gathered) == (arrays if scaling.layout.is_square else 2 * arrays)


def test_kernels_take_it_without_being_told():
    x, quantizer = normal(48, 80, dtype=torch.bfloat16), q.BlockScaledQuantizer(LINES)
    with fuser.backend("auto"):
        made = functional.activation("gelu", x, quantizer)
        y = functional.activation("gelu", x)
        assert torch.equal(made.dequantize(), quantizer(y).dequantize())
    assert_same(quantizer(y), refops.quantize(as_numpy(y), LINES, columnwise=True))


def test_rows_that_end_in_a_block_are_not_sharded():
    shard = q.BlockScaledQuantizer(LINES)(normal(48, 64))
    with pytest.raises(ValueError, match=r"rows of a part must be a multiple of 32; they are 48"):
        shard.fsdp_pre_all_gather(None, shard.shape, shard.stride(), None, None)


def test_two_levels_are_shared_over_a_group(monkeypatch):
    scaling = refops.NVFP4Scaling(two_d=True)
    mine, other = normal(32, 64), normal(32, 64, seed=1) * 9
    monkeypatch.setattr(
        "fuser.quantization.quantizers.reduce_amax", lambda amax, group: torch.maximum(amax, other.abs().max())
    )
    made = q.BlockScaledQuantizer(scaling, with_amax_reduction=True)(mine)
    joint = q.BlockScaledQuantizer(scaling)(torch.cat((mine, other)))
    assert torch.equal(made.dequantize(), joint.dequantize()[:32])


def test_stochastic_rounding_draws_a_seed_for_every_call():
    quantizer, x = q.BlockScaledQuantizer(refops.NVFP4Scaling(stochastic_rounding=True)), normal(64, 64)
    torch.manual_seed(3)
    first, second = quantizer(x), quantizer(x)
    torch.manual_seed(3)
    assert torch.equal(quantizer(x).dequantize(), first.dequantize())
    assert not torch.equal(first.dequantize(), second.dequantize())


def test_what_it_refuses():
    with pytest.raises(TypeError, match=r"scaling must be one of .*Squares64, .*; got"):
        q.BlockScaledQuantizer("mxfp4")
    with pytest.raises(ValueError, match="scaling must have blocks"):
        q.BlockScaledQuantizer(refops.CurrentScaling(E4M3))
    with pytest.raises(ValueError, match="with_amax_reduction needs scales that depend on the tensor's amax"):
        q.BlockScaledQuantizer(LINES, with_amax_reduction=True)
    with pytest.raises(ValueError, match=r"M % 16 == 0 and K % 16 == 0 for MXFP4"):
        q.BlockScaledQuantizer(LINES)(normal(32, 33))
    with pytest.raises(ValueError, match=r"^scaling must have blocks"):
        recipe.BlockScaledRecipe(refops.CurrentScaling(E4M3))
    with pytest.raises(ValueError, match="gradient must have blocks"):
        recipe.BlockScaledRecipe(LINES, gradient=refops.CurrentScaling(E4M3))


def test_where_there_are_no_kernels_the_error_names_the_backend_that_has_it():
    """The backend is that of the call, not of the recipe: what the reference can do is not refused before."""
    layer, x = ops.Linear(64, 32), normal(32, 64)
    settings = recipe.BlockScaledRecipe(WITHOUT_KERNELS)
    with fuser.autocast(recipe=settings):
        layer(x).sum().backward()
        with fuser.backend("auto"), pytest.raises(TypeError, match="one that has kernels") as caught:
            layer(x)
    assert str(caught.value).endswith(
        "got Of8(scale_rounding='up'); refops computes it, slowly: `with fuser.backend('reference'):`"
    )


# --- training ---------------------------------------------------------------------------------------------


def dequantized(x, scaling, *, columnwise=False):
    made = refops.quantize(x.detach().numpy(), scaling, rowwise=not columnwise, columnwise=columnwise)
    return torch.from_numpy(refops.dequantize(made))


class Product(torch.autograd.Function):
    """x W^T of operands that refops quantizes, in forward and in backward."""

    @staticmethod
    def forward(ctx, x, w, scalings):
        ctx.save_for_backward(x, w)
        ctx.scalings = scalings
        return dequantized(x, scalings[0]) @ dequantized(w, scalings[1]).T

    @staticmethod
    def backward(ctx, dy):
        (x, w), (inputs, weights, gradients) = ctx.saved_tensors, ctx.scalings
        dx = dequantized(dy, gradients) @ dequantized(w, weights, columnwise=True)
        dw = dequantized(dy, gradients, columnwise=True).T @ dequantized(x, inputs, columnwise=True)
        return dx, dw, None


class Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.from_numpy(refops.activation("gelu", x.detach().numpy()))

    @staticmethod
    def backward(ctx, dy):
        return torch.from_numpy(refops.activation_grad("gelu", dy.numpy(), ctx.saved_tensors[0].detach().numpy()))


#: Scaling, weight's and gradient's as given and as used.
RECIPES = {
    **{name: ((scaling, None, None), (scaling, scaling, scaling)) for name, scaling in OTHERS.items()},
    "one scaling": ((LINES, None, None), (LINES, LINES, LINES)),
    "own scalings": ((LINES, SQUARES, FLOOR), (LINES, SQUARES, FLOOR)),
}


@pytest.mark.parametrize(("given", "scalings"), RECIPES.values(), ids=RECIPES)
def test_training_is_that_of_operands_quantized_by_refops(given, scalings):
    torch.manual_seed(0)
    model = ops.Sequential(ops.Linear(64, 96), ops.GELU(), ops.Linear(96, 32))
    plain = [p.detach().clone().requires_grad_() for p in model.parameters()]
    optimizers = [torch.optim.SGD(parameters, lr=0.1) for parameters in (model.parameters(), plain)]
    x, target = normal(32, 64, seed=1), normal(32, 32, seed=2)
    losses = [], []
    for _ in range(6):
        with fuser.autocast(recipe=recipe.BlockScaledRecipe(*given)):
            y = model(x)
        w1, b1, w2, b2 = plain
        expected = Product.apply(Gelu.apply(Product.apply(x, w1, scalings) + b1), w2, scalings) + b2
        for optimizer, output, kept in zip(optimizers, (y, expected), losses, strict=True):
            optimizer.zero_grad()
            loss = (output - target).square().mean()
            loss.backward()
            optimizer.step()
            kept.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and losses[0][-1] < 0.9 * losses[0][0]
    for made, wanted in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-6)


def test_quantized_parameters_train_and_are_saved():
    settings = recipe.BlockScaledRecipe(LINES, weight=SQUARES)
    with q.quantized_model_init(recipe=settings):
        model, other = ops.Sequential(ops.Linear(64, 32)), ops.Sequential(ops.Linear(64, 32))
    weight = model[0].weight
    assert isinstance(weight, q.BlockScaledTensor) and weight.buffers.scaling == SQUARES
    optimizer, before = torch.optim.SGD(model.parameters(), lr=10.0), weight.dequantize()
    with fuser.autocast(recipe=settings):
        model(normal(32, 64)).square().mean().backward()
    optimizer.step()
    assert model[0].weight is weight and not torch.equal(weight.dequantize(), before)
    other.load_state_dict(model.state_dict())
    assert isinstance(other[0].weight, q.BlockScaledTensor)
    assert torch.equal(other[0].weight.dequantize(), weight.dequantize())


def test_explain_says_what_is_quantized_with_what():
    model = ops.Sequential(ops.Linear(64, 64), ops.GELU(), ops.Linear(64, 64))
    with fuser.autocast(recipe=recipe.BlockScaledRecipe(LINES)):
        report = str(fuser.explain(model, normal(32, 64).requires_grad_()))
    assert "BlockScaledQuantizer (MXFP4)" in report and "MXFP4Scaling columnwise" in report
