"""Launching: grids, argument types, compiled kernels and the way they are started.

A kernel takes raw pointers, so a launch costs no typing or viewing of arrays. Compiled kernels are cached in memory by
recipe and compute capability, and as PTX on disk under a digest of the sources and of the compilers' versions. In the
simulator the same calls run the kernels as Python.

    launch(function_key, build, types, values, grid, block, stream)
"""

import ctypes
import importlib
import math
import threading
import warnings
from functools import lru_cache
from typing import Any

import numpy as np

from cuda_kernels import ptx_cache, simt
from cuda_kernels.errors import explain_linking, explain_missing
from cuda_kernels.kernels import BAND, MX_COLUMNS, MX_ROWS, THREADS, TILE_ROWS
from cuda_kernels.messages import announce
from cuda_kernels.vectors import VECTOR

#: Rows and columns must stay below this: the last block of a folded grid may reach past the end.
LARGEST_DIMENSION = 2**31 - 2**20
LARGEST_GRID_Y = 65535


# --- grids ------------------------------------------------------------------------------------------


def fold(blocks):
    """Spread a number of blocks over the grid's y and z, whose sizes are limited to 65535."""
    z = max(1, math.ceil(blocks / LARGEST_GRID_Y))
    return math.ceil(blocks / z), z


def row_shape(outer, inner, lanes, owned=VECTOR):
    """(grid, block) of a row kernel: 256 threads, as many along a row as it needs, at least `lanes` and 4.

    A thread has `owned` columns.
    """
    along = 1 << max(0, math.ceil(inner / owned) - 1).bit_length()
    along = min(128, max(along, lanes, 4))
    down = THREADS // along
    return (math.ceil(inner / (along * owned)), *fold(math.ceil(outer / down))), (along, down, 1)


def band_shape(outer, inner):
    """(grid, block) of a band kernel: whole warps along the columns."""
    along = min(128, max(32, math.ceil(inner / (32 * VECTOR)) * 32))
    return (math.ceil(inner / (along * VECTOR)), *fold(math.ceil(outer / BAND))), (along, 1, 1)


def tile_grid(rows, columns, tile_columns):
    """(grid, block) of a tile or square kernel."""
    return (math.ceil(columns / tile_columns), *fold(math.ceil(rows / TILE_ROWS))), (THREADS, 1, 1)


def mxfp8_grid(rows, columns):
    """(grid, block) of the MXFP8 kernel."""
    return (math.ceil(columns / MX_COLUMNS), *fold(math.ceil(rows / MX_ROWS))), (THREADS, 1, 1)


# --- types of arguments -----------------------------------------------------------------------------


def numba_type(described):
    """The Numba type of an argument as `recipes.arguments_of` describes it."""
    import numba
    from numba import types

    first, second = described
    if isinstance(first, str):
        element = numba.from_dtype(np.dtype(second))
        return types.CPointer(element) if first == "pointer" else element
    return types.NamedTuple(tuple(numba_type(one) for one in second.values()), first)


# --- compiling --------------------------------------------------------------------------------------


def compile_ptx(function, described, target):
    """Return the PTX of a kernel function for argument descriptions and a compute capability."""
    from numba import cuda
    from numba.core.errors import NumbaIRAssumptionWarning

    signature = tuple(numba_type(one) for one in described)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NumbaIRAssumptionWarning)  # code that Numba lost, not a matter of style
        text, _ = cuda.compile_ptx(function, signature, cc=target)
    return text


def architecture(target):
    """(9, 0, "a") -> "sm_90a"."""
    return "sm_" + "".join(str(part) for part in target)


def cuda_core():
    """The module `cuda.core`, by its older name where it is older than 0.5."""
    core = importlib.import_module("cuda.core")
    return core if hasattr(core, "launch") else importlib.import_module("cuda.core.experimental")


@lru_cache(maxsize=256)
def stream_of(handle):
    """The stream of a handle, 0 for the default one; making one costs as much as a launch."""
    return cuda_core().Stream.from_handle(handle)


#: Numba registers overloads while a kernel is built: one thread at a time.
_compiling = threading.RLock()


class Launcher:
    """Compiles kernels for one device and starts them, from any thread."""

    def __init__(self, device_number):
        with explain_missing():
            self.core, self.number = cuda_core(), device_number
            major, minor = self.core.Device(device_number).compute_capability
        self.target = (major, minor, "a") if major >= 10 else (major, minor)
        self._kernels, self._thread = {}, threading.local()

    def _make_current(self):
        """Give a thread that has no CUDA context yet the device's: libraries do so at their first call only."""
        if not hasattr(self._thread, "ready"):
            self.core.Device(self.number).set_current()
            self._thread.ready = True

    def launch(self, key, build, described, values, grid, block, stream):
        """Start a kernel.

        Args:
            key: what it is cached by. build: function of the target that returns the Python function.
            described: argument descriptions. values: the flat arguments, pointers as int.
            grid, block: shapes; nothing runs where one is 0. stream: handle of the CUDA stream, int.
        """
        if 0 in grid:
            return
        self._make_current()
        found = self._kernels.get(key)
        kernel, converts = found or self._compiled(key, build, described)
        converted = [convert(one) for one, convert in zip(values, converts, strict=True)]
        self.core.launch(stream_of(stream), self.core.LaunchConfig(grid=grid, block=block), kernel, *converted)

    def _compiled(self, key, build, described):
        with _compiling:
            if key not in self._kernels:
                self._kernels[key] = self._compile(key, build, described), converters(described)
            return self._kernels[key]

    def _compile(self, key, build, described):
        def translate():
            announce(f"compiling a kernel for {architecture(self.target)}, once")
            return compile_ptx(build(self.target), described, self.target)

        core, text = self.core, ptx_cache.get(key, self.target, translate)
        options = core.LinkerOptions(arch=architecture(self.target))
        with explain_linking():
            cubin = core.Linker(core.ObjectCode.from_ptx(text.encode()), options=options).link("cubin")
        return cubin.get_kernel(ptx_cache.entry_name(text))


_CTYPES = {
    np.float32: ctypes.c_float,
    np.int32: ctypes.c_int32,
    np.int64: ctypes.c_int64,
    np.uint64: ctypes.c_uint64,
    np.uint32: ctypes.c_uint32,
}


def converters(described):
    """One function for each flat argument: what makes it the C value that the driver copies."""
    flat = []
    for first, second in described:
        kinds = [(first, second)] if isinstance(first, str) else second.values()
        flat += [int if kind == "pointer" else _CTYPES[scalar] for kind, scalar in kinds]
    return flat


# --- the simulator ----------------------------------------------------------------------------------


class Simulated:
    """Runs kernels in the simulator; the same calls as `Launcher`, with arrays in place of pointers."""

    target = None
    order = "forward"

    def launch(self, key, build, described, values, grid, block, stream):
        """Run a kernel as Python, for every thread of the grid."""
        from cuda_kernels import simulator

        values, arguments = iter(values), []
        for first, second in described:
            if isinstance(first, str):
                arguments.append(_as_argument(first, second, next(values)))
            else:
                fields = [_as_argument(*one, next(values)) for one in second.values()]
                arguments.append(first(*fields))
        simulator.launch(build(None), grid, block, arguments, order=self.order)


def _as_argument(kind, scalar, value):
    from cuda_kernels.simulator import Pointer

    if kind == "scalar":
        return scalar(value)
    array = None if isinstance(value, int) else value.reshape(-1).view(scalar)
    return Pointer(array)


_launchers: dict[int, Any] = {}


def launcher_for(device_number):
    """The launcher of a device; in the simulator there is one."""
    if device_number not in _launchers:
        with _compiling:
            if device_number not in _launchers:
                _launchers[device_number] = Simulated() if simt.SIMULATED else Launcher(device_number)
    return _launchers[device_number]
