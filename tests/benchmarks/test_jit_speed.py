"""Speed of bias + GELU on 4096 x 4096 bfloat16: PyTorch eager, compiled, and this project's kernel, in one run.

`fuser.jit.bias_gelu_fused_` eager and compiled by inductor, the unfused operations of PyTorch, and what the fuser runs
for Bias and GELU on a CPU: an addition, and `cuda_kernels.host`. Rounds alternate between the competitors, the best of
each counts; `extra_info` has wall and CPU milliseconds of each. Ratios of CPU time are asserted, with slack.
"""

import shutil
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fuser import functional, jit  # noqa: E402

N = 4096


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


def with_compilation(enabled, function, *arguments):
    with jit.compilation(enabled):
        return function(*arguments)


@pytest.mark.filterwarnings("ignore")  # PyTorch's compiler has some of its own
def test_bias_gelu(benchmark, allowance):
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    torch.manual_seed(0)
    x, bias = torch.randn(N, N).bfloat16(), torch.randn(N).bfloat16()
    shifted = x + bias
    operations = {
        "compiled": lambda: with_compilation(True, jit.bias_gelu_fused_, x, bias),
        "eager": lambda: with_compilation(False, jit.bias_gelu_fused_, x, bias),
        "torch operations": lambda: torch.nn.functional.gelu(x + bias, approximate="tanh"),
        "fuser, Bias + GELU": lambda: functional.gelu(x + bias),
        "kernel alone": lambda: functional.gelu(shifted),
        "compiled, no bias": lambda: with_compilation(True, jit.gelu_fused_, shifted),
    }
    results = {name: operation() for name, operation in operations.items()}
    # The last two, and the fuser, see x + bias rounded to bfloat16.
    for name, result in results.items():
        torch.testing.assert_close(result, results["eager"], rtol=2e-2, atol=2e-2, msg=name)
    benchmark.group, benchmark.name = "4096 x 4096 bfloat16, bias + GELU", "compiled"
    benchmark.pedantic(operations["compiled"], rounds=5, warmup_rounds=1)
    times = best_times(operations, rounds=5)
    benchmark.extra_info["wall and CPU, ms"] = {name: tuple(t) for name, t in times.items()}
    assert allowance * times["eager"][1] >= 3 * times["compiled"][1], times
    assert allowance * times["eager"][1] >= 3 * times["fuser, Bias + GELU"][1], times
    assert times["kernel alone"][1] <= allowance * 1.5 * times["compiled, no bias"][1], times
