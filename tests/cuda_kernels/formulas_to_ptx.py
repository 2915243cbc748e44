"""Prints PTX for compute capability 9.0 of every formula and elementary function as JSON: run by `instructions.py`.

It is a process of its own, which compiles formulas for the CPU first: that must not change what a GPU gets.
"""

import json
import sys
from collections import namedtuple
from types import SimpleNamespace
from unittest import mock

import numba
from numba import cuda

from cuda_kernels import elementary
from cuda_kernels.formulas import forms_of
from cuda_kernels.operands import PARAMETERS
from refops.activations import ACTIVATIONS

Parameters = namedtuple("Parameters", PARAMETERS)


def ptx_of(function, parameters):
    """PTX of a kernel that applies a scalar function of (x, p) or of x to numbers in memory."""
    scope = {"function": function, "Parameters": Parameters}
    given = ", Parameters(" + ", ".join(f"a[{i + 2}]" for i in range(len(PARAMETERS))) + ")" if parameters else ""
    exec(f"def kernel(a):\n    a[0] = function(a[1]{given})", scope)
    return cuda.compile_ptx(scope["kernel"], numba.void(numba.types.CPointer(numba.float32)), cc=(9, 0))[0]


def main(names):
    """Compile the functions of the activations called `names` (or of all), which are called "FUNCTION.value" and so on.

    Each is in "accurate" and "exact"; in "fast" where its declaration has a form for approximate units.
    """
    rows = [row for name, row in ACTIVATIONS.items() if not names or name in names]
    functions = list(dict.fromkeys(function for row in rows for function in row.functions))
    silu = forms_of(ACTIVATIONS["silu"].act, "accurate").value
    numba.njit("float32(float32)", error_model="numpy")(lambda x: silu(x, 0))
    texts = {"accurate": {}, "exact": {}, "fast": {}, "elementary": {}}
    capability = SimpleNamespace(compute_capability=(9, 0))
    with mock.patch("numba.cuda.dispatcher.get_current_device", lambda: capability):
        for function in functions:
            for kind in ("accurate", "exact", "fast") if function.fast else ("accurate", "exact"):
                made = forms_of(function, kind)
                texts[kind][f"{function.name}.value"] = ptx_of(made.value, True)
                texts[kind][f"{function.name}.slope"] = ptx_of(made.slope, True)
        for name in ("exp", "tanh", "reciprocal"):
            texts["elementary"][name] = ptx_of(getattr(elementary, name), False)
    print(json.dumps(texts))


if __name__ == "__main__":
    main(sys.argv[1:])
