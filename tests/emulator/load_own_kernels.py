"""Compile the project's kernels for a target and load them on the software GPU: prints {name: what is unknown} as JSON.

    python tests/emulator/load_own_kernels.py sm_90 [part of a name]

PTX comes from the disk where sources and compilers are unchanged (`cuda_kernels.ptx_cache`). A process serves one
target, because Numba caches compiled helpers without it.
"""

import json
import sys
from functools import partial

from cuda_kernels import ptx_cache
from cuda_kernels.compile_report import MissingToolError, catalogue, parse_target, to_ptx
from cuda_kernels.emulator import Settings, driver_calls, load


def own_kernels(target):
    """(name, function that returns PTX) of the catalogue in both arithmetics, the naive kernels and the solutions."""
    from cuda_kernels.launch import numba_type
    from cuda_kernels.naive import NAIVE
    from cuda_kernels.operands import pointer, scalar
    from cuda_kernels.puzzles import solutions
    from cuda_kernels.puzzles.table import PUZZLES

    for entry in catalogue():
        for fast_math in (False, True):
            name = entry.name + (", fast" if fast_math else "")
            yield name, lambda e=entry, f=fast_math: to_ptx(e.build(target, f), e.signature, target)
    for name, row in NAIVE.items():
        signature = tuple(numba_type(one) for one in row.arguments.values())
        yield name, partial(to_ptx, row.kernel, signature, target)
    for name, puzzle in PUZZLES.items():
        case = next(iter(puzzle.cases()))
        arrays = {**case.arrays, **puzzle.expected(case)}
        described = [pointer(carried(arrays[one])) if one in arrays else scalar("int32") for one in puzzle.arguments]
        signature = tuple(numba_type(one) for one in described)
        yield f"puzzle {name}", partial(to_ptx, getattr(solutions, name), signature, target)


def carried(array):
    """The dtype of an array's elements as a kernel sees them: bfloat16 is uint16."""
    return "uint16" if array.dtype.name == "bfloat16" else array.dtype.name


def fault_of(ptx):
    """What the software GPU says of PTX, None where it takes it."""
    try:
        driver_calls.Kernel(ptx, ptx_cache.entry_name(ptx))
    except driver_calls.DeviceError as error:
        return str(error)
    return None


def main(name, part=""):
    load(Settings(targets=(name,)))
    target = parse_target(name)
    found = {}
    try:
        for kernel, make in own_kernels(target):
            if part in kernel:
                found[kernel] = fault_of(ptx_cache.get(("emulator", kernel), target, make))
    except MissingToolError as error:
        found = {"missing": str(error)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
