"""torch.func's transforms (grad, vmap, vjp) of activations: the bits of eager calls."""

import pytest
import torch

import fuser
from fuser import functional, ops, recipe
from fuser.functional import gradient_name
from refops.activations import ACTIVATIONS
from refops.ops import SCALED_ACTIVATIONS

pytestmark = pytest.mark.check


def sample(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def loss_of(function):
    return lambda x: function(x).float().square().sum()


CALLS = {name: (getattr(functional, name), getattr(ops, row.op)()) for name, row in ACTIVATIONS.items()}
CALLS["interleaved"] = (ops.SwiGLU(glu_interleave_size=32), ops.SwiGLU(glu_interleave_size=32))
CALLS["with parameters"] = (
    lambda x: functional.clamped_swiglu(x, limit=0.5),
    ops.Sequential(ops.ClampedSwiGLU(limit=0.5)),
)


def test_tensors_by_keyword():
    x, scales = sample(4, 64), sample(4, seed=1)
    pairs = {
        lambda x: fuser.dispatch.activation("silu", x): lambda x: fuser.dispatch.activation(name="silu", x=x),
        lambda x: fuser.dispatch.scaled_activation("swiglu", x, scales): lambda x: fuser.dispatch.scaled_activation(
            "swiglu", scales=scales, x=x
        ),
    }
    for by_position, by_keyword in pairs.items():
        wanted = torch.func.grad(loss_of(by_position))(x)
        assert wanted.any() and torch.equal(torch.func.grad(loss_of(by_keyword))(x), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_activations(name, dtype):
    x = sample(3, 4, 64, dtype=dtype)
    leaf = x.clone().requires_grad_()
    y = CALLS[name][1](leaf)
    (dx,) = torch.autograd.grad(loss_of(lambda x: x)(y), leaf)
    for function in CALLS[name]:
        assert torch.equal(torch.func.grad(loss_of(function))(x), dx)
        assert torch.equal(torch.vmap(function)(x), y)
        assert torch.equal(torch.vmap(function, in_dims=1, out_dims=1)(x), y)
        assert torch.equal(torch.vmap(torch.vmap(function))(x), y)
        assert torch.equal(torch.vmap(torch.func.grad(loss_of(function)))(x), dx)
        output, pull = torch.func.vjp(function, x)
        assert torch.equal(output, y) and torch.equal(*pull(2 * y.float().to(dtype)), dx)


@pytest.mark.parametrize("name", SCALED_ACTIVATIONS)
def test_scaled_activations(name):
    forward, backward = getattr(functional, f"scaled_{name}"), getattr(functional, f"scaled_{gradient_name(name)}")
    x, scales = sample(3, 4, 64), sample(3, 4, seed=1)
    y = forward(x, scales)
    expected = backward(2 * y, x, scales)
    loss = lambda x, scales: forward(x, scales).float().square().sum()  # noqa: E731
    assert torch.equal(torch.vmap(forward)(x, scales), y)
    assert torch.equal(torch.vmap(forward, in_dims=(0, None))(x, scales[0])[1], forward(x[1], scales[0]))
    for gradients in (
        torch.func.grad(loss, argnums=(0, 1))(x, scales),
        torch.vmap(torch.func.grad(loss, argnums=(0, 1)))(x, scales),
    ):
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


def under_recipe(x):
    with fuser.autocast(recipe=recipe.MXFP8BlockScaling()):
        return ops.GELU()(x)


@pytest.mark.parametrize(
    ("reason", "function"),
    [
        ("can't transform BasicLinear: .* only activations", ops.Linear(64, 64)),
        ("can't transform operations that quantize: those in a fuser.autocast", under_recipe),
        (
            r"can't transform operations that quantize: .*; fuser.convert\(model, None\) makes these torch's again",
            fuser.convert(torch.nn.Linear(64, 64), recipe.MXFP8BlockScaling()),
        ),
        ("without extra inputs and keyword arguments", lambda x: ops.Sequential(ops.AddExtraInput())(x, x)),
        ("can't transform GELU with cache_quantized_input", ops.GELU(cache_quantized_input=True)),
        (
            "can't transform activation_quantize",
            lambda x: functional.gelu(x, fuser.MXFP8Quantizer(fuser.DType.kFloat8E4M3)),
        ),
        ("Double backward", torch.func.grad(loss_of(functional.gelu))),
    ],
)
def test_what_is_refused(reason, function):
    with pytest.raises(RuntimeError, match=reason):
        torch.func.grad(lambda x: function(x).sum())(sample(32, 64, dtype=torch.float32))
