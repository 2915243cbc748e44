"""Cost of a call of `fuser.xla` by either route beside jnp's own gelu, which XLA fuses: small and large, in one run.

On 32 elements a call is all overhead: XLA's dispatch, the route, the kernel's Python. `extra_info` has the wall and CPU
microseconds of each competitor, and the cost of the FFI route alone: a jitted call less the kernel called directly.
What is asserted is CPU time of all threads of this process, the least of many batches that alternate between the
competitors: other work on the machine slows the wall clock, and adds little to the least CPU time.
"""

import time

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jax.config.update("jax_platforms", "cpu")

from cuda_kernels import host  # noqa: E402
from fuser import xla  # noqa: E402

CALLS, BATCHES = 200, 15
#: Part of the CPU time of a small `pure_callback` that the FFI route may add to that of the kernel: 0.27 was measured.
FIXED_COST = 0.35


def jitted(route):
    with xla.route(route):
        function = jax.jit(lambda x: xla.act_lu(x, ("gelu",)).data)
        function(jax.numpy.ones((4, 1, 8)))
        function(jax.numpy.ones((1024, 1, 4096)))
    return function


def competitors(x):
    """name -> function without arguments."""
    rows, ffi, callback = np.asarray(x)[:, 0], jitted("ffi"), jitted("callback")
    gelu = jax.jit(lambda v: jax.nn.gelu(v))
    return {
        "FFI": lambda: ffi(x).block_until_ready(),
        "pure_callback": lambda: callback(x).block_until_ready(),
        "jnp gelu": lambda: gelu(x).block_until_ready(),
        "kernel alone": lambda: host.activation("gelu", rows),
    }


def timed(operation, calls):
    """Microseconds of a call: wall, and CPU of all threads."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(calls):
        operation()
    return 1e6 * (time.perf_counter() - wall) / calls, 1e6 * (time.process_time() - cpu) / calls


def best_times(operations, calls, batches):
    times = {name: [] for name in operations}
    for operation in operations.values():
        operation()
    for _ in range(batches):
        for name, operation in operations.items():
            times[name].append(timed(operation, calls))
    return {name: np.min(samples, axis=0) for name, samples in times.items()}


@pytest.mark.parametrize(("shape", "calls", "batches"), [((4, 1, 8), CALLS, BATCHES), ((1024, 1, 4096), 1, 7)], ids=str)
def test_cost_of_a_call(benchmark, allowance, shape, calls, batches):
    x = jax.numpy.asarray(np.random.default_rng(0).standard_normal(shape, np.float32))
    operations = competitors(x)
    wanted = host.activation("gelu", np.asarray(x)[:, 0])
    for name in ("FFI", "pure_callback"):
        np.testing.assert_array_equal(np.asarray(operations[name]()), wanted)
    benchmark.group, benchmark.name = f"gelu of {shape} float32", "FFI"
    benchmark.pedantic(operations["FFI"], rounds=20, warmup_rounds=2)
    times = best_times(operations, calls, batches)
    fixed = times["FFI"] - times["kernel alone"]
    benchmark.extra_info |= {
        "wall and CPU, us": {name: tuple(t) for name, t in times.items()},
        "FFI route alone, wall and CPU, us": tuple(fixed),
    }
    assert times["FFI"][1] < times["pure_callback"][1], times
    if calls > 1:
        assert fixed[1] <= allowance * FIXED_COST * times["pure_callback"][1], times
