"""Hundreds of training steps leave no memory behind: neither Python objects nor tensors."""

import gc
import sys

import pytest
import torch

import fuser
from cuda_kernels.host.calls import PLANS
from fuser import ops
from fuser.recipe import DelayedScaling, NVFP4BlockScaling
from tiers import SWEEP

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 400
RECIPES = {
    "none": None,
    "delayed": DelayedScaling(amax_history_len=4),
    "nvfp4": NVFP4BlockScaling(),
}


def pipeline():
    return ops.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False),
        ops.RMSNorm(32),
        ops.Linear(32, 64),
        ops.SwiGLU(),
        ops.Linear(32, 32),
        ops.AddExtraInput().set_extra_input_channel(0, "residual"),
    )


@pytest.mark.parametrize("name", [pytest.param(name, marks=SWEEP if name != "nvfp4" else ()) for name in RECIPES])
@pytest.mark.full
def test_no_growth(name):
    model, recipe = pipeline(), RECIPES[name]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(32, 32)

    def step():
        with fuser.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(x)
        optimizer.zero_grad()
        y.square().mean().backward()
        optimizer.step()

    def alive():
        PLANS.forget()  # of calls with the scales of old steps: so many that their number goes up and down
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()), sys.getallocatedblocks()

    for _ in range(300):  # Python's and torch's own caches fill
        step()
    tensors, blocks = alive()
    for _ in range(STEPS):
        step()
    tensors_after, blocks_after = alive()
    assert tensors_after <= tensors
    assert blocks_after - blocks < STEPS / 2, f"{blocks_after - blocks} blocks of memory in {STEPS} steps"
