"""Measure whether this CPU is faster with vectors of 512 bits.

LLVM keeps to 256 bits on most CPUs that have 512, because the first of them ran slower while such vectors were in use;
on Zen 5 it takes 512. The bits of results are the same. `wide_where_measured()` is a context in which loops are
compiled for what was found.
"""

import os
import timeit
import uuid
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from unittest import mock

import numba
import numpy as np
from llvmlite.binding import get_host_cpu_features, get_host_cpu_name
from numba.core.codegen import CPUCodeLibrary

from cuda_kernels import casts

#: Bits of a vector.
WIDE, NARROW = 512, 256
#: Wide vectors are used where they take at most this share of the time.
ENOUGH = 0.97
SIZE, ROUNDS, ATTEMPTS = 4096, 64, 15


@contextmanager
def wide_where_measured(folder):
    """A context in which Numba compiles for wide vectors if they are faster; `folder` is where that is kept."""
    with vectors(WIDE if are_faster(folder) else NARROW) if _has_wide() else nullcontext():
        yield


def _has_wide():
    return get_host_cpu_features().get("avx512f", False)


def vectors(bits):
    """A context in which Numba compiles for vectors of so many bits."""
    plain, preferred = CPUCodeLibrary.add_ir_module, f'"prefer-vector-width"="{bits}"'

    def add_ir_module(self, module):
        for function in module.functions:
            if not function.is_declaration:
                set.add(function.attributes, preferred)  # `add` of the set knows the attributes that have no value
        plain(self, module)

    return mock.patch.object(CPUCodeLibrary, "add_ir_module", add_ir_module)


@cache
def are_faster(folder):
    """Whether wide vectors are faster here: measured once for each kind of CPU, and kept on disk if possible."""
    if not _has_wide():
        return False
    path = folder / f"bits-of-vectors-{get_host_cpu_name()}"
    with suppress(OSError, UnicodeDecodeError):
        kept = path.read_text()
        if kept in (f"{NARROW}", f"{WIDE}"):
            return kept == f"{WIDE}"
    found = measured() <= ENOUGH
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        temporary.write_text(f"{WIDE if found else NARROW}")
        os.replace(temporary, path)
    except OSError:
        pass
    return found


def measured():
    """The time of a loop with wide vectors, over its time with narrow ones: the best runs of each."""
    x, codes = np.linspace(-500, 500, SIZE, dtype=np.float32), np.empty(SIZE, np.uint8)
    with vectors(NARROW):
        narrow = compiled_loop()
    with vectors(WIDE):
        wide = compiled_loop()
    times = [
        (timeit.timeit(lambda: narrow(x, codes), number=1), timeit.timeit(lambda: wide(x, codes), number=1))
        for _ in range(ATTEMPTS)
    ]
    return min(wide for _, wide in times) / min(narrow for narrow, _ in times)


def compiled_loop():
    """What casts do most: float32 to codes of E4M3, of a row in the nearest cache."""
    encode = casts.ENCODERS["e4m3"]

    @numba.njit("void(float32[::1], uint8[::1])", nogil=True, error_model="numpy")
    def loop(x, codes):
        for _ in range(ROUNDS):
            for i in range(x.size):
                codes[i] = np.uint8(encode(x[i]))

    return loop
