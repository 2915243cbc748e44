"""Small kernels for test_compile_report.py, some bad on purpose: prints what `compile_report` finds as JSON.

It runs in a process of its own, so that what a process compiled for the CPU before does not matter.
"""

import json
from collections import namedtuple
from dataclasses import asdict

import numba
import numpy as np
from numba import cuda, types

from cuda_kernels.compile_report import measure, problems, to_ptx
from cuda_kernels.simt import U32, F, load_words, store_words

TARGET = (9, 0)
FLOATS, WORDS = types.CPointer(numba.float32), types.CPointer(numba.uint32)
Pointers = namedtuple("Pointers", "a b")


def two_wide_loads_and_a_store(p):
    i = cuda.threadIdx.x * 4
    a, b = load_words(p.a, i), load_words(p.b, i)
    store_words(p.a, i, (a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]))


def narrow_store_and_byte_load(x, y):
    i = cuda.threadIdx.x
    v = U32(x[i])
    store_words(y, 2 * i, (v, v))


def python_float(x):
    x[0] = x[0] * 0.1


def dynamic_local_index(x, k):
    table = cuda.local.array(64, np.float32)
    for i in range(k):
        table[i] = x[i]
    x[0] = table[k // 2]


def many_values(x):
    values = cuda.local.array(96, np.float32)
    for i in range(96):
        values[i] = x[i]
    cuda.syncthreads()
    for i in range(96):
        x[i * 7 % 96] = values[i] * values[95 - i]


def divides(x):
    x[0] = x[0] / x[1]


def counts_to(x, n):
    total = F(0)
    for i in range(n):
        total = total * x[i] + x[i + 1]
    x[0] = total


#: name -> (kernel, signature, options of `measure`).
KERNELS = {
    "wide": (two_wide_loads_and_a_store, (types.NamedTuple((WORDS, WORDS), Pointers),), {"bytes_per_thread": 48.0}),
    "narrow": (narrow_store_and_byte_load, (types.CPointer(numba.uint8), WORDS), {}),
    "float64": (python_float, (FLOATS,), {}),
    "local": (dynamic_local_index, (FLOATS, numba.int32), {}),
    "many": (many_values, (FLOATS,), {}),
    "spill": (many_values, (FLOATS,), {"max_registers": 32}),
    "division": (divides, (FLOATS,), {}),
    "loop": (counts_to, (FLOATS, numba.int32), {}),
}


def main():
    """Compile and judge all of them."""
    found = {}
    for name, (kernel, signature, options) in KERNELS.items():
        measured = measure(to_ptx(kernel, signature, TARGET), TARGET, name=name, **options)
        found[name] = {"measured": asdict(measured), "problems": problems(measured)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
