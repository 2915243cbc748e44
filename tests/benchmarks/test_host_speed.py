"""Speed of `cuda_kernels.host` at 4096 x 4096 bfloat16 beside `refops` and PyTorch: one run, the same bits.

Rounds alternate between the competitors, the best of each counts. In `extra_info`: wall and CPU milliseconds of each,
and both ratios to `host`. Asserted is the larger ratio (`BOUNDS`), with about a fifth of slack: other work on the
machine disturbs CPU time less, but what PyTorch's threads count as such depends on how long they spin. `refops` runs on
one thread, so its wall ratio is larger by the number of CPUs. PyTorch runs the same formulas, eager and compiled (left
out where it or g++ is missing).
"""

import shutil
import time

import ml_dtypes
import numpy as np
import pytest

import refops
from cuda_kernels import host

N = 4096
MXFP8, NVFP4 = refops.MXFP8Scaling(refops.E4M3), refops.NVFP4Scaling()
#: name -> operation of a module on (x, square).
OPERATIONS = {
    "swiglu -> MXFP8": lambda m, x, square: m.activation_quantize("swiglu", x, MXFP8),
    "MXFP8 both directions": lambda m, x, square: m.quantize(square, MXFP8, columnwise=True),
    "MXFP8 rowwise": lambda m, x, square: m.quantize(square, MXFP8),
    "NVFP4 1x16": lambda m, x, square: m.quantize(square, NVFP4),
}
#: name -> least ratio of CPU time to (refops, PyTorch eager, PyTorch compiled).
BOUNDS = {
    "swiglu -> MXFP8": (9, 10, 2.5),
    "MXFP8 both directions": (5, 25, 2.5),
    "MXFP8 rowwise": (5, 15, 1.2),
    "NVFP4 1x16": (4, 10, 1.5),
}
FIELDS = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")


# --- the formulas in PyTorch ------------------------------------------------------------------------


def torch_operations(torch):
    """Return name -> function of (x, square), tensors, to the `FIELDS` that the operation makes, as uint8."""
    f32, integer = torch.float32, torch.int32

    def mxfp8(values, dim):
        """Codes and scales of blocks along `dim` of values that are cut into blocks there."""
        amax = values.abs().amax(dim)
        scale = ((amax * float(np.float32(1 / 448))).view(integer) + 0x7FFFFF) >> 23
        factor = ((254 - scale) << 23).view(f32)
        codes = (values * factor.unsqueeze(dim)).clamp(-448, 448).to(torch.float8_e4m3fn)
        return codes.view(torch.uint8).view(N, N), scale.to(torch.uint8)

    def swiglu(x, square):
        """TE rounds the product to the input's dtype before the cast."""
        act, gate = x[:, :N].to(f32), x[:, N:].to(f32)
        product = (act * torch.sigmoid(act) * gate).to(x.dtype).to(f32)
        return mxfp8(product.view(N, N // 32, 32), 2)

    def rowwise(x, square):
        return mxfp8(square.to(f32).view(N, N // 32, 32), 2)

    def both(x, square):
        return *rowwise(x, square), *mxfp8(square.to(f32).view(N // 32, 32, N), 1)

    def nvfp4(x, square):
        """TE's formula (docs/spec/quantization.md, 6.1 to 6.3); the tensor is neither zero nor extreme."""
        values = square.to(f32).view(N, N // 16, 16)
        encode = 2688 / values.abs().amax()
        raw = values.abs().amax(2) * (encode * float(np.float32(1 / 6)))
        scale = raw.clamp(max=448).to(torch.float8_e4m3fn)
        factor = 1 / (scale.to(f32) * (1 / encode))
        scaled = values * factor.clamp(max=float(np.finfo(np.float32).max)).unsqueeze(2)
        m, codes = scaled.abs(), torch.signbit(scaled).to(torch.uint8) * 8
        for step in (m > 0.25, m >= 0.75, m > 1.25, m >= 1.75, m > 2.5, m >= 3.5, m > 5):
            codes = codes + step.to(torch.uint8)
        codes = codes.view(N, N)
        return codes[:, ::2] | (codes[:, 1::2] << 4), scale.view(torch.uint8)

    return dict(zip(OPERATIONS, (swiglu, both, rowwise, nvfp4), strict=True))


# --- measurements -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tensors():
    """(4096, 8192) for gated activations, and its left half, contiguous."""
    x = np.random.default_rng(0).standard_normal((N, 2 * N), np.float32).astype(ml_dtypes.bfloat16)
    return x, np.ascontiguousarray(x[:, :N])


def competitors(name, tensors):
    """Return competitor -> function without arguments that runs the operation."""
    operation = OPERATIONS[name]
    found = {"refops": lambda: operation(refops, *tensors), "copy": tensors["swiglu" not in name].copy}
    try:
        import torch
    except ImportError:
        return found
    arguments = [torch.from_numpy(t.view(np.int16)).view(torch.bfloat16) for t in tensors]
    formula = torch_operations(torch)[name]
    found["PyTorch eager"] = lambda: formula(*arguments)
    if shutil.which("g++"):
        torch.compiler.reset()
        exact = {"emulate_precision_casts": True}  # else a rounding to bfloat16 between float32 values is dropped
        compiled = torch.compile(formula, fullgraph=True, dynamic=False, options=exact)
        found["PyTorch compiled"] = lambda: compiled(*arguments)
    return found


def check_same_bits(name, mine, result):
    """The arrays of a competitor against those of `host`; where an activation is computed a few may differ."""
    if hasattr(result, "rowwise_data"):
        result = [getattr(result, field) for field in FIELDS if getattr(result, field) is not None]
    arrays = [getattr(mine, field) for field in FIELDS if getattr(mine, field) is not None]
    for a, b in zip(arrays, result, strict=True):
        differing = np.count_nonzero(a != np.asarray(b).view(np.uint8).reshape(a.shape))
        assert differing <= (a.size * 1e-4 if "swiglu" in name else 0)


def timed(operation):
    """Milliseconds of one call: wall, and CPU of all threads."""
    wall, cpu = time.perf_counter(), time.process_time()
    operation()
    return 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)


def best_times(operations, rounds):
    """Return name -> least (wall, CPU) milliseconds; rounds alternate between the operations."""
    times = {name: [] for name in operations}
    for _ in range(rounds):
        for name, operation in operations.items():
            times[name].append(timed(operation))
    return {name: np.min(samples, axis=0) for name, samples in times.items()}


@pytest.mark.filterwarnings("ignore")  # PyTorch's compiler has some of its own
@pytest.mark.parametrize("name", OPERATIONS)
def test_speed(benchmark, tensors, name):
    operation, others = OPERATIONS[name], competitors(name, tensors)
    mine = operation(host, *tensors)
    for other, run in others.items():
        if other != "copy":
            check_same_bits(name, mine, run())
    del mine
    benchmark.group, benchmark.name = "4096 x 4096 bfloat16, host", name
    benchmark.pedantic(operation, (host, *tensors), rounds=9, warmup_rounds=1)
    times = best_times({"host": lambda: operation(host, *tensors), **others}, rounds=7)
    ratios = {other: tuple(times[other] / times["host"]) for other in others}
    benchmark.extra_info |= {"wall and CPU, ms": {n: tuple(t) for n, t in times.items()}, "wall and CPU ratio": ratios}
    for other, bound in zip(("refops", "PyTorch eager", "PyTorch compiled"), BOUNDS[name], strict=True):
        assert other not in ratios or max(ratios[other]) >= bound, f"{other}: {ratios[other]}"
