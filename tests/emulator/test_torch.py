"""torch's CUDA tensors and `fuser` on the software GPU: what `tests/gpu` does with launches, modules, autograd."""

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba_cuda")
torch = pytest.importorskip("torch")
for folder in ("simulated", "gpu"):
    sys.path.append(str(Path(__file__).parents[1] / folder))

import gpu_cases  # noqa: E402
import gpu_launches  # noqa: E402
import torch_on_emulator  # noqa: E402

import fuser  # noqa: E402
from cuda_kernels.emulator import loading  # noqa: E402
from fuser import ops, recipe  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*given buffer is not writable")
#: Cases of `tests/gpu` that need what is not here: more memory than the software GPU has.
ELSEWHERE = ("large tensors",)


@pytest.fixture(autouse=True)
def on_emulator():
    with torch_on_emulator.installed():
        yield


class Device(gpu_cases.Torch):
    """CUDA tensors of the software GPU, whose new memory is full of 0xA5 anyway."""

    def poison(self, megabytes=64):
        """Nothing."""


LAUNCHES = [(name, case) for name, case in gpu_launches.cases() if name not in ELSEWHERE]


@pytest.mark.parametrize(("name", "case"), LAUNCHES, ids=[name for name, _ in LAUNCHES])
def test_launches(order, name, case):
    note = case(Device(), np.random.default_rng(7))
    assert note is None or note == "skipped: no CuPy"
    assert loading.unordered() == []


@pytest.mark.parametrize("number", [0, 2], ids=["sm_90", "sm_100a"])
@pytest.mark.parametrize("name", ["swiglu", "srelu"])
def test_function_and_gradient(order, number, name):
    """`fuser.functional` on a tensor of a device gives what it gives on the CPU."""
    torch.manual_seed(0)
    x, dy = (torch.randn(64, width).to(torch.bfloat16) for width in (512, 256 if name == "swiglu" else 512))
    expected = getattr(fuser.functional, name)(x, None), getattr(fuser.functional, f"d{name}")(dy, x, None)
    device = torch.device("cuda", number)
    x, dy = x.to(device), dy.to(device)
    made = getattr(fuser.functional, name)(x, None), getattr(fuser.functional, f"d{name}")(dy, x, None)
    for one, other in zip(made, expected, strict=True):
        assert one.device == device
        same(one, other)


def same(on_device, on_cpu):
    """Assert that a tensor of a device holds what one of the CPU holds."""
    assert on_device.is_cuda
    assert not on_cpu.is_cuda
    torch.testing.assert_close(on_device.detach().cpu(), on_cpu.detach(), rtol=0, atol=0)


RECIPES = {
    "mxfp8": recipe.MXFP8BlockScaling,
    "current": recipe.Float8CurrentScaling,
    "delayed": recipe.DelayedScaling,
    "nvfp4": recipe.NVFP4BlockScaling,
}


def values_of(tensor):
    """What a tensor stands for, dequantized where it is quantized."""
    return tensor.dequantize() if isinstance(tensor, fuser.QuantizedTensor) else tensor


def passes(make, x, dy, scaling, device):
    """[output, gradient of x, gradients of parameters] of a sequence, forward and backward under a recipe."""
    torch.manual_seed(0)
    given = x.to(device).clone().requires_grad_()
    module = make(device)
    with fuser.autocast(enabled=scaling is not None, recipe=RECIPES[scaling]() if scaling else None):
        y = module(given)
    y.backward(dy.to(device))
    return [values_of(one) for one in (y, given.grad, *(parameter.grad for parameter in module.parameters()))]


def biased(device):
    """A bias of 256 that is not zero."""
    made = ops.Bias(256, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        made.bias.copy_((torch.arange(256) % 8 - 4).to(torch.bfloat16).to(device))
    return made


SEQUENCES = {
    "swiglu": lambda device: ops.Sequential(ops.SwiGLU()),
    "swiglu, quantize": lambda device: ops.Sequential(ops.SwiGLU(), ops.Quantize(forward=True, backward=False)),
    "quantize, srelu": lambda device: ops.Sequential(ops.Quantize(forward=False, backward=True), ops.SReLU()),
    "quantize, bias, srelu": lambda device: ops.Sequential(
        ops.Quantize(forward=False, backward=True), biased(device), ops.SReLU()
    ),
}


@pytest.mark.parametrize("scaling", [None, *RECIPES])
@pytest.mark.parametrize("name", SEQUENCES)
def test_sequence_forward_and_backward(order, name, scaling):
    rng = np.random.default_rng(0)
    width = 128 if "swiglu" in name else 256
    x, dy = (torch.from_numpy(rng.integers(-16, 17, (64, columns)) / 4).to(torch.bfloat16) for columns in (256, width))
    expected = passes(SEQUENCES[name], x, dy, scaling, "cpu")
    made = passes(SEQUENCES[name], x, dy, scaling, "cuda:0")
    assert len(made) == (3 if "bias" in name else 2)
    for one, other in zip(made, expected, strict=True):
        same(one, other)
    assert loading.unordered() == []
