"""`fuser.checkpoint`: gradients, scales and histories of a run that keeps everything, bit for bit."""

import contextlib
import functools

import pytest
import torch
import torch.utils.checkpoint

import fuser
import refops
from fuser import ops
from fuser.quantization.state import FP8GlobalStateManager as Manager
from fuser.recipe import (
    BlockScaledRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

SIZE = 32
RECIPES = {
    "delayed": lambda: DelayedScaling(amax_history_len=3),
    # Counts the updates: those of the default leave alone what they have not seen.
    "rolling": lambda: DelayedScaling(amax_history_len=3, amax_compute_algo=lambda history: history.amax(dim=0)),
    "current": Float8CurrentScaling,
    "mxfp8": MXFP8BlockScaling,
    "block": Float8BlockScaling,
    "nvfp4": NVFP4BlockScaling,
    "none": lambda: None,
}


def blocks():
    return torch.nn.ModuleList(
        ops.Sequential(ops.Linear(SIZE, SIZE), ops.GELU(), ops.Dropout(0.25), ops.BasicLinear(SIZE, SIZE))
        for _ in range(2)
    )


def train(recipe, call, *, backward_inside=False, steps=3):
    """Gradients and outputs of every step, then the delayed-scaling states; `call(block, x)` runs a block."""
    Manager.reset()
    torch.manual_seed(0)
    model = blocks()
    seen = []
    for step in range(steps):
        x = (torch.randn(SIZE, SIZE) * 10.0**step).requires_grad_()
        dy = torch.randn(SIZE, SIZE) * 10.0**step
        with contextlib.ExitStack() as stack:
            context = fuser.autocast(enabled=recipe is not None, recipe=recipe)
            stack.enter_context(context)
            y = x
            for block in model:
                y = call(block, y)
            if not backward_inside:
                stack.close()
            y.backward(dy)
        seen += [y.detach(), x.grad, *(parameter.grad.clone() for parameter in model.parameters())]
        model.zero_grad()
    for forward in (True, False):
        for state in Manager.registered_states(forward):
            seen += [state.scale.clone(), state.amax_history.clone()]
    return seen


def plain(block, x):
    return block(x)


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_as_without_checkpoint(name, use_reentrant):
    def call(block, x):
        return fuser.checkpoint(block, x, use_reentrant=use_reentrant)

    for backward_inside in (False, True):
        kept = train(RECIPES[name](), plain, backward_inside=backward_inside)
        assert same(train(RECIPES[name](), call, backward_inside=backward_inside), kept)
    assert not Manager.is_fp8_enabled() and Manager.quantization_state.autocast_depth == 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_part_of_a_model(use_reentrant):
    """Which module is the first of its context, and so updates the scales of gradients, does not change."""
    for checkpointed in (0, 1):
        calls = iter(range(100))

        def call(block, x, checkpointed=checkpointed, calls=calls):
            if next(calls) % 2 == checkpointed:
                return fuser.checkpoint(block, x, use_reentrant=use_reentrant)
            return block(x)

        assert same(train(RECIPES["rolling"](), call), train(RECIPES["rolling"](), plain))


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("outer", [False, True])
def test_nested(outer, inner):
    def call(block, x):
        def half(x):
            return fuser.checkpoint(block, x, use_reentrant=inner)

        return fuser.checkpoint(half, x, use_reentrant=outer)

    assert same(train(RECIPES["rolling"](), call), train(RECIPES["rolling"](), plain))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_autocast_inside_of_the_function(use_reentrant):
    recipe = RECIPES["rolling"]()

    def quantized(block, x):
        with fuser.autocast(recipe=recipe):
            return block(x)

    def train_one(call):
        Manager.reset()
        torch.manual_seed(0)
        block, seen = blocks()[0], []
        for step in range(3):
            x = (torch.randn(SIZE, SIZE) * 10.0**step).requires_grad_()
            call(block, x).sum().backward()
            seen += [x.grad, *(parameter.grad.clone() for parameter in block.parameters())]
        for forward in (True, False):
            for state in Manager.registered_states(forward):
                seen += [state.scale.clone(), state.amax_history.clone()]
        return seen

    def checkpointed(block, x):
        return fuser.checkpoint(quantized, block, x, use_reentrant=use_reentrant)

    assert same(train_one(checkpointed), train_one(quantized))


def test_scales_that_change_in_between_are_an_error():
    block, recipe = ops.BasicLinear(SIZE, SIZE), RECIPES["delayed"]()

    def twice(x):
        for _ in range(2):
            with fuser.autocast(recipe=recipe):
                x = block(x)
        return x

    with pytest.raises(RuntimeError, match="enter autocast around checkpoint"):
        fuser.checkpoint(twice, torch.randn(SIZE, SIZE, requires_grad=True))


def test_backward_twice_and_the_backend():
    torch.manual_seed(0)
    block = ops.Sequential(ops.Linear(SIZE, SIZE), ops.GELU())
    x = torch.randn(SIZE, SIZE, requires_grad=True)
    with fuser.backend("reference"), fuser.autocast(recipe=RECIPES["current"]()):
        y = fuser.checkpoint(block, x)
    used = []

    def note(*_):
        used.append((fuser.dispatch.current_backend(), Manager.is_fp8_enabled()))

    block.register_forward_pre_hook(note)
    y.sum().backward(retain_graph=True)
    first, x.grad = x.grad, None
    y.sum().backward()
    assert used == [("reference", True)] * 2 and torch.equal(x.grad, first)


#: Random bits of forward and backward besides those of dropout.
STOCHASTIC = {
    **RECIPES,
    "stochastic": lambda: BlockScaledRecipe(refops.NVFP4Scaling(stochastic_rounding=True)),
}


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", STOCHASTIC)
def test_torchs_own_checkpoint_with_backward_in_autocast(name, use_reentrant):
    """The bits of a run that keeps everything: amaxes of a step count once, random bits are those of forward."""

    def call(block, x):
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=use_reentrant)

    kept = train(STOCHASTIC[name](), plain, backward_inside=True)
    assert same(train(STOCHASTIC[name](), call, backward_inside=True), kept)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_torchs_own_checkpoint_with_autocast_inside_updates_scales_of_gradients_once(use_reentrant):
    """Autocast is entered in backward again, and has a first module of its own."""
    recipe, x, histories = RECIPES["rolling"](), torch.randn(SIZE, SIZE, requires_grad=True), []
    for checkpointed in (False, True):
        Manager.reset()
        block = ops.BasicLinear(SIZE, SIZE)

        def quantized(x, block=block):
            with fuser.autocast(recipe=recipe):
                return block(x)

        call = functools.partial(torch.utils.checkpoint.checkpoint, quantized, use_reentrant=use_reentrant)
        (call if checkpointed else quantized)(x).backward(torch.ones(SIZE, SIZE))
        (state,) = Manager.registered_states(forward=False)
        histories.append(state.amax_history.flatten().tolist())
    assert histories == [[0.0, 0.0, 1.0]] * 2


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_torchs_own_checkpoint_with_backward_outside_of_autocast_is_an_error(recipe, use_reentrant):
    recipe = RECIPES[recipe]()
    model, x = blocks()[0], torch.randn(SIZE, SIZE, requires_grad=True)
    with fuser.autocast(enabled=recipe is not None, recipe=recipe):
        y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=use_reentrant)
    if recipe is None:
        y.sum().backward()
        return
    with pytest.raises(RuntimeError, match=r"^BasicLinear is computed again .* use fuser\.checkpoint instead of"):
        y.sum().backward()
    assert x.grad is None and all(parameter.grad is None for parameter in model.parameters())
    model(x).sum().backward()  # no error: nothing is computed again
    assert x.grad is not None


@pytest.mark.parametrize("build", [lambda: ops.Linear(SIZE, SIZE), lambda: torch.nn.Linear(SIZE, SIZE)])
@pytest.mark.parametrize(
    ("scope", "message"),
    [
        (fuser.products("hopper", promotion=None), r"other products \(float32\) than .* \(hopper, never promoted\)"),
        (fuser.backend("reference"), r"other backend \(auto\) than .* \(reference\)"),
    ],
)
def test_torchs_own_checkpoint_does_not_compute_otherwise_than_forward_did(build, scope, message):
    """With the products that are in force in backward, gradients were 8e-2 off for long sums.

    torch's kind that is not reentrant computes again in the backward pass of an operation, which has its scope.
    """
    recipe, x = Float8CurrentScaling(), torch.randn(SIZE, SIZE, requires_grad=True)
    model = build()
    if isinstance(model, torch.nn.Linear):
        fuser.convert(model, recipe)

    def run(checkpoint, **options):
        with scope, fuser.autocast(recipe=recipe):
            return checkpoint(model, x, **options)

    def gradients(y):
        x.grad = None
        model.zero_grad()
        with fuser.autocast(recipe=recipe):
            y.square().sum().backward()
        return [x.grad, *(parameter.grad for parameter in model.parameters())]

    torchs = torch.utils.checkpoint.checkpoint
    wanted = gradients(run(plain))
    for checkpoint, use_reentrant in ((fuser.checkpoint, True), (fuser.checkpoint, False), (torchs, False)):
        assert same(gradients(run(checkpoint, use_reentrant=use_reentrant)), wanted)
    y = run(torchs, use_reentrant=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"^BasicLinear is computed again .*{message}.* use fuser\.checkpoint"):
            gradients(y)
    y = run(torchs, use_reentrant=True)
    with scope:
        assert same(gradients(y), wanted)
    gradients(model(x))  # no error: nothing is computed again


def test_high_precision_in_backward_is_no_error_where_it_was_asked_for():
    block, x = ops.Linear(SIZE, SIZE), torch.randn(SIZE, SIZE, requires_grad=True)

    def quantized():
        with fuser.autocast(recipe=MXFP8BlockScaling()):
            block(x)

    block(x).sum().backward()
    expected, x.grad = x.grad, None
    for checkpoint in (fuser.checkpoint, torch.utils.checkpoint.checkpoint):
        for use_reentrant in (False, True):
            y = checkpoint(block, x, use_reentrant=use_reentrant)
            quantized()
            said = contextlib.nullcontext() if checkpoint is fuser.checkpoint else fuser.autocast(enabled=False)
            with said:
                y.sum().backward()
            assert torch.equal(x.grad, expected)
            x.grad = None


def test_in_compiled_code():
    recipe = RECIPES["delayed"]()

    def quantized(block, x):
        with fuser.autocast(recipe=recipe):
            return fuser.checkpoint(block, x) + 1

    seen = []
    for function in (quantized, torch.compile(quantized, backend="eager")):
        torch.manual_seed(0)
        block, x = ops.Linear(SIZE, SIZE), torch.randn(SIZE, SIZE, requires_grad=True)
        for _ in range(2):
            function(block, x).square().sum().backward()
        seen.append([x.grad, *(parameter.grad for parameter in block.parameters())])
    assert same(*seen)


def test_keywords_reach_the_function_and_torch():
    x = torch.ones(2, requires_grad=True)
    y = fuser.checkpoint(lambda x, *, factor: x * factor, x, factor=3.0, preserve_rng_state=False)
    y.sum().backward()
    assert x.grad.tolist() == [3.0, 3.0]


def test_memory_is_what_torch_keeps():
    """Nothing of the block is kept but its input."""
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    block, x = blocks()[0], torch.randn(SIZE, SIZE, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), fuser.autocast():
        fuser.checkpoint(block, x)
    assert all(tensor.data_ptr() == x.data_ptr() for tensor in kept if tensor.numel())
