"""A software GPU: the compiled kernels and the whole launch path, run and checked on any machine.

    from cuda_kernels.emulator import Settings, load
    load(Settings(targets=("sm_90",)))          # before numba.cuda, cuda.core and cuda.bindings look for a driver

    from cuda_kernels.emulator import emulated
    with emulated(target="sm_90"):              # the calls of cuda_kernels take NumPy arrays here
        q = cuda_kernels.quantize(x, scaling)

    from cuda_kernels.emulator import run
    ran = run(source, "kernel", grid, block, [x, out, np.int32(n)])       # somebody's PTX or CUDA C++

README.md beside this file says which file has what, and how far it goes.
"""

from cuda_kernels.emulator.build import CompilerMissingError
from cuda_kernels.emulator.counting import KernelCounters, counters
from cuda_kernels.emulator.driver_calls import DeviceError
from cuda_kernels.emulator.loading import (
    Unordered,
    behaviour,
    device_for,
    fault,
    forget,
    load,
    pending,
    reset,
    unordered,
)
from cuda_kernels.emulator.numpy_calls import emulated
from cuda_kernels.emulator.programs import Ran, Unwritten, run
from cuda_kernels.emulator.settings import Settings

__all__ = [
    "CompilerMissingError",
    "DeviceError",
    "KernelCounters",
    "Ran",
    "Settings",
    "Unordered",
    "Unwritten",
    "behaviour",
    "counters",
    "device_for",
    "emulated",
    "fault",
    "forget",
    "load",
    "pending",
    "reset",
    "run",
    "unordered",
]
