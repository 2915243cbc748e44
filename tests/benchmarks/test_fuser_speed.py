"""What operations cost beside torch's own on the same math: Python alone, and training steps of a feed-forward block.

A `Sequential` of eight small operations has tensors so small that arithmetic costs next to nothing: Python, per forward
pass. A step is forward and backward of 512-2048-512 with GELU on 512 tokens.

One thread; rounds alternate between the competitors, the least CPU time of each counts: other work on the machine adds
to the wall clock, and little to that. `extra_info` has the times of all.
"""

import time

import pytest
import torch

import fuser
from cuda_kernels import host
from fuser import ops
from fuser.narrow import takes_bfloat16
from fuser.recipe import MXFP8BlockScaling, NVFP4BlockScaling

WIDTH, ROWS = 16, 4
ROUNDS = 4000
#: How many times torch's own time may come on top of it: 10 us for each of the eight operations where torch takes 29 us
#: for its modules. 2.4 were measured by the least of single calls; calls one after the other take 3.2 times torch's.
BOUND = 8 * 10 / 29

#: Recipe -> how many times torch.nn's own step in bfloat16 a step in bfloat16 may take.
STEPS = {None: 1.2, MXFP8BlockScaling: 2.2, NVFP4BlockScaling: 3.2}
TOKENS, HIDDEN, INNER, STEP_ROUNDS = 512, 512, 2048, 30


class Scale(torch.nn.Module):
    """torch has no module for it."""

    def forward(self, x):
        return x * 0.5


def feed_forward():
    """RMSNorm, two linears with their biases, two activations, a scale."""
    ours = ops.Sequential(
        ops.RMSNorm(WIDTH),
        ops.BasicLinear(WIDTH, WIDTH),
        ops.Bias(WIDTH),
        ops.GELU(),
        ops.BasicLinear(WIDTH, WIDTH),
        ops.Bias(WIDTH),
        ops.ConstantScale(0.5),
        ops.SiLU(),
    )
    torchs = torch.nn.Sequential(
        torch.nn.RMSNorm(WIDTH, eps=1e-5),
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.GELU(approximate="tanh"),
        torch.nn.Linear(WIDTH, WIDTH),
        Scale(),
        torch.nn.SiLU(),
    )
    with torch.no_grad():
        for theirs, weight, bias in ((torchs[1], ours[1], ours[2]), (torchs[3], ours[4], ours[5])):
            theirs.weight.copy_(weight.weight)
            theirs.bias.copy_(bias.bias)
    return ours, torchs


def structural():
    """Operations whose arithmetic is a single torch call."""
    ours = ops.Sequential(*[op for _ in range(4) for op in (ops.Bias(WIDTH), ops.ConstantScale(0.5))])
    return ours, torch.nn.Sequential(*[module for _ in range(4) for module in (AddBias(), Scale())])


class AddBias(torch.nn.Module):
    """torch has no module for it."""

    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        return x + self.bias


@pytest.mark.parametrize("pipeline", [feed_forward, structural])
def test_python_beyond_torch(benchmark, one_thread, pipeline):
    ours, torchs = pipeline()
    x = torch.randn(ROWS, WIDTH)
    torch.testing.assert_close(ours(x), torchs(x), rtol=2e-6, atol=2e-6)

    def once(model):
        start = time.thread_time()
        model(x)
        return 1e6 * (time.thread_time() - start)

    rounds = benchmark.pedantic(lambda: [(once(ours), once(torchs)) for _ in range(ROUNDS)], rounds=1)
    ours_us, torch_us = map(min, zip(*rounds, strict=True))
    benchmark.extra_info.update({"fuser us": round(ours_us, 1), "torch us": round(torch_us, 1)})
    assert ours_us - torch_us < BOUND * torch_us


def step_of(model, recipe=None):
    """A function that runs forward and backward and returns the milliseconds of CPU time that they took."""
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16)

    def step():
        x.grad = None
        model.zero_grad()
        start = time.thread_time()
        with fuser.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(x)
        y.backward(dy)
        return 1e3 * (time.thread_time() - start)

    return step


@pytest.mark.parametrize("recipe", STEPS, ids=lambda recipe: recipe.__name__ if recipe else "no recipe")
def test_step_beside_torch(benchmark, one_thread, recipe):
    if not takes_bfloat16(torch.device("cpu")):
        pytest.skip("this CPU has no units for bfloat16: products are float32")
    theirs = [torch.nn.Linear(HIDDEN, INNER), torch.nn.GELU(approximate="tanh"), torch.nn.Linear(INNER, HIDDEN)]
    ours = ops.Sequential(ops.Linear(HIDDEN, INNER), ops.GELU(), ops.Linear(INNER, HIDDEN)).bfloat16()
    steps = step_of(torch.nn.Sequential(*theirs).bfloat16()), step_of(ours, recipe and recipe())
    threads = host.get_num_threads()
    host.set_num_threads(1)
    try:
        rounds = benchmark.pedantic(lambda: [[step() for step in steps] for _ in range(STEP_ROUNDS)], rounds=1)
    finally:
        host.set_num_threads(threads)
    torch_ms, ours_ms = map(min, zip(*rounds, strict=True))
    benchmark.extra_info.update({"fuser ms": round(ours_ms, 1), "torch ms": round(torch_ms, 1)})
    assert ours_ms <= STEPS[recipe] * torch_ms
