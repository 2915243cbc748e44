"""What else torch does with a model: rows of docs/guide/torch_features.md that no other file tests."""

import copy
import io
import pickle
import subprocess
import sys
from itertools import product

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fuser
from fuser import ops
from fuser.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling
from tiers import sampled

#: torch.compile and forward derivatives use what torch itself deprecates.
DEPRECATED = pytest.mark.filterwarnings("ignore::DeprecationWarning")
SIZE = 64
RECIPES = {
    "none": lambda: None,
    "mxfp8": MXFP8BlockScaling,
    "nvfp4": NVFP4BlockScaling,
    "current": Float8CurrentScaling,
    "delayed": DelayedScaling,
}


def build(recipe=None, *, quantized=True):
    torch.manual_seed(0)
    with fuser.quantized_model_init(enabled=quantized and recipe is not None, recipe=recipe):
        return ops.Sequential(ops.RMSNorm(SIZE), ops.Linear(SIZE, SIZE), ops.GELU(), ops.Linear(SIZE, SIZE))


def run(model, recipe, x):
    with fuser.autocast(enabled=recipe is not None, recipe=recipe):
        return model(x)


def test_refops_says_how_quantized_weights_can_be_inspected(tmp_path):
    """In a process of its own: refops does not import fuser, without which torch loads none of its tensors."""
    torch.save(build(MXFP8BlockScaling()).state_dict(), tmp_path / "q.pt")
    command = [sys.executable, "-m", "refops", "inspect", tmp_path / "q.pt"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.endswith(
        "pickled Python objects, and those are never loaded; quantized tensors of fuser are such: "
        "save tensor.dequantize() of each\n"
    )


@pytest.fixture(params=RECIPES)
def recipe(request):
    return RECIPES[request.param]()


@pytest.fixture
def x():
    return torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(1))


def flat(model):
    """The values of all parameters."""
    with torch.no_grad():
        return torch.cat([(parameter + 0).flatten() for parameter in model.parameters()])


# --- averages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: get_ema_multi_avg_fn(0.9), lambda: None], ids=["moving", "equal"])
def test_averages_in_high_precision(recipe, x, make):
    """Of a model with quantized weights too: the averaged model is one without, which takes its values."""
    model = build(recipe)
    averaged = AveragedModel(build(quantized=False), multi_avg_fn=make())
    optimizer, expected = torch.optim.SGD(model.parameters(), lr=1.0), None
    for i in range(4):
        run(model, recipe, x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(model)
        weight = 0.1 if averaged.multi_avg_fn else 1 / (i + 1)
        expected = flat(model) if i == 0 else torch.lerp(expected, flat(model), weight)
    torch.testing.assert_close(flat(averaged.module), expected, rtol=1e-5, atol=1e-6)
    assert not torch.equal(expected, flat(model))


def test_an_average_of_quantized_weights_is_rounded():
    """Why the average above is not a copy of the model: here it stands still."""
    quantized = build(MXFP8BlockScaling())
    averaged = AveragedModel(quantized, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    for _ in range(2):
        averaged.update_parameters(quantized)
    before = [layer.weight.dequantize() for layer in (averaged.module[1], averaged.module[3])]
    with torch.no_grad():
        for layer in (quantized[1], quantized[3]):
            layer.weight.mul_(1.25)
    averaged.update_parameters(quantized)
    for layer, values in zip((averaged.module[1], averaged.module[3]), before, strict=True):
        assert torch.equal(layer.weight.dequantize(), values)


# --- copies, files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_a_model_are_independent(recipe, x, duplicate):
    model = build(recipe)
    run(model, recipe, x).sum().backward()
    twin = duplicate(model)
    expected = run(model, recipe, x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    again = run(twin, recipe, x)
    assert torch.equal(again, expected) and not torch.equal(run(model, recipe, x), expected)


def test_model_and_optimizer_through_a_file_loaded_safely(recipe, x):
    """Training goes on bit for bit. Gradients are rounded to nearest: a file has no random state."""

    def train(model, optimizer, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            run(model, recipe, x).square().mean().backward()
            optimizer.step()

    if recipe is not None and recipe.nvfp4():
        recipe.disable_stochastic_rounding = True
    model, other = build(recipe), build(recipe)
    optimizer, again = (torch.optim.AdamW(one.parameters(), lr=0.05) for one in (model, other))
    train(model, optimizer, 2)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    other.load_state_dict(loaded["model"])
    again.load_state_dict(loaded["optimizer"])
    train(model, optimizer, 2)
    train(other, again, 2)
    assert torch.equal(flat(model), flat(other))


# --- modes, transforms, gradients ---------------------------------------------------------------------------


def test_inference_mode(recipe, x):
    model = build(recipe)
    with torch.inference_mode():
        y = run(model, recipe, x)
    with torch.no_grad():
        assert torch.equal(y, run(model, recipe, x))
    run(model, recipe, x).sum().backward()  # it trains afterwards


TRANSFORMS = {
    "grad": lambda model, x: torch.func.grad(lambda x: model(x).sum())(x),
    "vmap": lambda model, x: torch.func.vmap(model)(x.view(2, -1, SIZE)),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x,)),
    "jacrev": lambda model, x: torch.func.jacrev(model)(x[:1]),
}


@DEPRECATED
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_pipelines_are_refused(name, x):
    with pytest.raises(RuntimeError, match=r"torch\.func can't transform RMSNorm"):
        TRANSFORMS[name](build(), x)


def test_clipping_of_gradients(recipe, x):
    model = build(recipe)
    run(model, recipe, x).sum().backward()
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.testing.assert_close(norm, torch.cat([grad.flatten() for grad in grads]).norm())
    for grad, parameter in zip(grads, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, grad / (norm + 1e-6))


# --- torch.compile ------------------------------------------------------------------------------------------


@DEPRECATED
@sampled(("name", "optimizer"), product(["none", "mxfp8"], [torch.optim.SGD, torch.optim.AdamW]), 3, in_all=1)
def test_compiled_steps_of_optimizers(name, optimizer, x):
    """Of quantized parameters each write of compiled code rounds: AdamW's are at most E4M3's neighbours of eager's."""
    torch._dynamo.reset()
    models = [build(RECIPES[name]()) for _ in range(2)]
    for model in models:
        model(x).sum().backward()
    before, (eager, compiled) = flat(models[0]), (optimizer(model.parameters(), lr=0.5) for model in models)
    eager.step()
    torch.compile(compiled.step, backend="eager")()
    rtol = 2.0**-3 if name != "none" and optimizer is torch.optim.AdamW else 1e-5
    torch.testing.assert_close(flat(models[1]), flat(models[0]), rtol=rtol, atol=1e-6)
    assert not torch.equal(flat(models[1]), before)
