"""Prints PTX for compute capability 9.0 of every formula and elementary function as JSON: run by test_formulas.py.

A process of its own, which compiles formulas for the CPU first: that must not change what a GPU gets.
"""

import inspect
import json
from types import SimpleNamespace
from unittest import mock

import numba
from numba import cuda

from cuda_kernels import elementary
from cuda_kernels.activations import ACCURATE, FAST


def ptx_of(function):
    """PTX of a kernel that applies a scalar function to numbers in memory."""
    count = len(inspect.signature(getattr(function, "py_func", function)).parameters)
    scope = {"function": function}
    exec(f"def kernel(a):\n    a[0] = function({', '.join(f'a[{i + 1}]' for i in range(count))})", scope)
    return cuda.compile_ptx(scope["kernel"], numba.void(numba.types.CPointer(numba.float32)), cc=(9, 0))[0]


def compile_for_cpu(function):
    """Compile a formula of one argument for this machine."""
    numba.njit("float32(float32)", error_model="numpy")(lambda x: function(x))


def main():
    """Compile everything."""
    for name in ("silu", "gelu", "relu"):
        compile_for_cpu(ACCURATE[name])
    functions = {
        "accurate": dict(ACCURATE),
        "fast": dict(FAST),
        "elementary": {name: getattr(elementary, name) for name in ("exp", "tanh", "reciprocal")},
    }
    for formulas in functions.values():
        for name in [name for name in formulas if name.endswith(("_pair", "_both"))]:
            del formulas[name]  # gives two numbers
    capability = SimpleNamespace(compute_capability=(9, 0))
    with mock.patch("numba.cuda.dispatcher.get_current_device", lambda: capability):
        texts = {kind: {name: ptx_of(f) for name, f in formulas.items()} for kind, formulas in functions.items()}
    print(json.dumps(texts))


if __name__ == "__main__":
    main()
