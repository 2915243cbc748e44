"""Launching: grids, argument types, compiled kernels and the way they are started.

A kernel takes raw pointers, so a launch costs no typing or viewing of arrays. Compiled kernels are cached in memory by
`Spec` and compute capability, and as PTX on disk under a digest of the sources and of the compiler. In the simulator
the same calls run the kernels as Python.

    launcher_for(device).launch(spec, values, grid, block, stream)
"""

import math
import re
import threading
import warnings
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np

from cuda_kernels import ptx_cache, simt
from cuda_kernels.contexts import LEGACY_STREAM, NO_STREAM, PER_THREAD_STREAM, cuda_core, device_scope
from cuda_kernels.declared import explain_declared
from cuda_kernels.errors import explain_linking, explain_missing
from cuda_kernels.messages import announced
from cuda_kernels.simt import THREADS
from cuda_kernels.tiles import TILE_ROWS
from cuda_kernels.vectors import VECTOR

#: Rows and columns must stay below this: the last block of a folded grid may reach past the end.
LARGEST_DIMENSION = 2**31 - 2**20
LARGEST_GRID_Y = 65535
#: Rows of a band.
BAND = 32
#: Columns of a block of the column kernel: a warp reads eight a lane.
COLUMNS = 256


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


def column_grid(rows, columns, block_rows):
    """(grid, block) of the column kernel for blocks of so many rows."""
    return (math.ceil(columns / COLUMNS), *fold(math.ceil(rows / block_rows))), (THREADS, 1, 1)


def thread_shape(count):
    """(grid, block) of one thread for each of `count` results."""
    return (math.ceil(count / THREADS), 1, 1), (THREADS, 1, 1)


# --- types of arguments -----------------------------------------------------------------------------


def numba_type(described):
    """The Numba type of an argument as `Spec.operands` describes it."""
    import numba
    from numba import types

    first, second = described
    if isinstance(first, str):
        element = numba.from_dtype(np.dtype(second))
        return types.CPointer(element) if first == "pointer" else element
    return types.NamedTuple(tuple(numba_type(one) for one in second.values()), first)


def signature_of(spec):
    """The Numba types of a kernel's arguments."""
    return tuple(numba_type(one) for one in spec.operands())


# --- compiling --------------------------------------------------------------------------------------


#: Arithmetic of PTX whose rounding is left open: a multiplication and an addition, either of which says nothing.
_OPEN_ROUNDING = re.compile(r"(?<![\w.])(add|sub|mul)((?:\.ftz)?(?:\.sat)?\.(?:f16|f16x2|bf16|bf16x2|f32|f32x2|f64)\s)")


def compile_ptx(function, signature, target, *, contracted=True):
    """Return the PTX of a kernel function for a tuple of Numba types and a compute capability.

    NVVM makes one operation of some multiplications and additions, which rounds otherwise than the reference, unless
    `contracted` is False; of the others it leaves that to ptxas. Here every one says that it rounds to nearest, which
    forbids it to any linker.
    """
    from numba import cuda
    from numba.core.errors import NumbaIRAssumptionWarning

    rounding = nullcontext() if contracted else simt.each_rounded()
    with explain_declared(function), rounding, warnings.catch_warnings():
        warnings.simplefilter("error", NumbaIRAssumptionWarning)  # code that Numba lost, not a matter of style
        text, _ = cuda.compile_ptx(function, signature, cc=target, debug=False, opt=True)
    return _OPEN_ROUNDING.sub(r"\1.rn\2", text)


def ptx_of(spec, target):
    """Return the PTX of a `Spec` for a compute capability."""
    return compile_ptx(spec.function(target), signature_of(spec), target, contracted=spec.contracted)


def architecture(target):
    """(10, 0, "a") -> "sm_100a"."""
    return "sm_" + "".join(str(part) for part in target)


def stream_of(handle):
    """The stream of a handle; 0 and 1 are the legacy default stream, 2 is that of the thread.

    The default ones are those of whichever context is current. Others are made at every call: the driver gives the
    handle of a stream that was destroyed to another one, of any device.
    """
    name = _DEFAULT_STREAMS.get(handle)
    found = getattr(cuda_core(), name, None) if name else None
    return cuda_core().Stream.from_handle(handle) if found is None else found


_DEFAULT_STREAMS = {
    NO_STREAM: "LEGACY_DEFAULT_STREAM",
    LEGACY_STREAM: "LEGACY_DEFAULT_STREAM",
    PER_THREAD_STREAM: "PER_THREAD_DEFAULT_STREAM",
}
#: Numba registers overloads while a kernel is built: one thread at a time.
_compiling = threading.RLock()


class Prepared(NamedTuple):
    """A launch without its stream.

    Attributes:
        kernel, config: as `cuda.core.launch` takes them.
        values: the arguments as NumPy numbers, pointers as int.
    """

    kernel: Any
    config: Any
    values: list


class Launcher:
    """Compiles kernels for one device and starts them, from any thread."""

    def __init__(self, device_number):
        with explain_missing():
            self.core, self.number = cuda_core(), device_number
            major, minor = self.core.Device(device_number).compute_capability
        self.target = (major, minor, "a") if major >= 10 else (major, minor)
        self._kernels = {}

    def launch(self, spec, values, grid, block, stream):
        """Start a kernel on this launcher's device, whichever is current.

        Args:
            spec: the kernel's `Spec`. values: its arguments, one after another, pointers as int.
            grid, block: shapes; nothing runs where one is 0. stream: handle of the CUDA stream, int.
        """
        with device_scope(self.number):
            prepared = self.prepared(spec, values, grid, block)
            if prepared is not None:
                self.start(stream_of(stream), *prepared)

    def prepared(self, spec, values, grid, block):
        """Return the `Prepared` launch, None where the grid is empty; arguments as those of `launch`."""
        if 0 in grid:
            return None
        kernel, converts = self._kernels.get(spec) or self._compiled(spec)
        with np.errstate(over="ignore"):  # a lower bound above every float32 is infinity
            converted = [convert(one) for one, convert in zip(values, converts, strict=True)]
        return Prepared(kernel, self.core.LaunchConfig(grid=grid, block=block), converted)

    def start(self, stream, kernel, config, values):
        """Start what is `Prepared` in a stream of `stream_of`; the device must be current."""
        self.core.launch(stream, config, kernel, *values)

    def _compiled(self, spec):
        with _compiling:
            if spec not in self._kernels:
                self._kernels[spec] = self._compile(spec), converters(spec.operands())
            return self._kernels[spec]

    def _compile(self, spec):
        def translate():
            with announced("a kernel", architecture(self.target)):
                return ptx_of(spec, self.target)

        core, text = self.core, ptx_cache.get(spec, self.target, translate)
        options = core.LinkerOptions(arch=architecture(self.target))
        with explain_linking(text, architecture(self.target)):  # a driver may also refuse what was linked
            cubin = core.Linker(core.ObjectCode.from_ptx(text.encode()), options=options).link("cubin")
            return cubin.get_kernel(ptx_cache.entry_name(text))


def kinds_of(described):
    """ "pointer" or "scalar" of each flat argument."""
    return [kind for kind, _ in _flat(described)]


def converters(described):
    """One function for each flat argument: what makes it the value that the driver copies.

    Numbers are NumPy's: `cuda.core` takes four times as long for those of ctypes.
    """
    return [int if kind == "pointer" else scalar for kind, scalar in _flat(described)]


def _flat(described):
    """(kind, NumPy scalar type) of each flat argument."""
    for first, second in described:
        yield from [(first, second)] if isinstance(first, str) else second.values()


# --- the simulator ----------------------------------------------------------------------------------


class Simulated:
    """Runs kernels in the simulator; the same calls as `Launcher`, with arrays in place of pointers."""

    target = None
    order = "forward"

    def launch(self, spec, values, grid, block, stream):
        """Run a kernel as Python, for every thread of the grid."""
        from cuda_kernels import simulator

        values, arguments = iter(values), []
        for first, second in spec.operands():
            if isinstance(first, str):
                arguments.append(_as_argument(first, second, next(values)))
            else:
                fields = [_as_argument(*one, next(values)) for one in second.values()]
                arguments.append(first(*fields))
        simulator.launch(spec.function(None), grid, block, arguments, order=self.order)


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
