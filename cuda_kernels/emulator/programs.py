"""Run your own kernel, PTX or CUDA C++, on NumPy arrays: `run` compiles it, copies, launches and copies back.

    source = '''extern "C" __global__ void twice(const float* x, float* y, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) y[i] = 2 * x[i];
    }'''
    ran = run(source, "twice", (1,), (128,), [x, Unwritten(x.shape, x.dtype), np.int32(x.size)])
    ran.arrays[1]

Every access is checked on the way: what a kernel does wrong is a `DeviceError` with the instruction, the thread and the
line. `refops.oracle` judges what comes out; `refops check --ptx FILE` and `--cuda FILE` do both in one command.
"""

import ctypes
import os
import re
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuda_kernels import ptx_cache
from cuda_kernels.emulator import build, driver_calls, loading
from cuda_kernels.emulator.counting import KernelCounters, counters
from cuda_kernels.emulator.driver_calls import DeviceError
from cuda_kernels.emulator.settings import TARGETS
from cuda_kernels.errors import explain_missing_nvrtc

__all__ = ["TARGETS", "DeviceError", "Ran", "Unwritten", "compile_cuda", "is_ptx", "run"]

#: Instructions of a warp in a block, after which `run` takes its loop to be endless: half a minute at most.
LONGEST = 1 << 24
#: C++ standard that CUDA C++ is compiled with.
STANDARD = "c++17"
#: Headers of the C++ library that NVRTC lacks and libcu++ has.
LIBRARY_HEADERS = (
    *("array", "bit", "cfloat", "climits", "cmath", "cstddef", "cstdint", "cstring", "limits"),
    *("type_traits", "utility"),
)
#: Some of libcu++'s headers, such as cfloat, define macros alone and no namespace.
NAMESPACES = "namespace cuda { namespace std {} }\nnamespace std { using namespace cuda::std; }\n"
#: Name -> text of headers that kernels' files include and NVRTC does not find.
HEADERS = {name: f"#include <cuda/std/{name}>\n{NAMESPACES}" for name in LIBRARY_HEADERS}
HEADERS["cstdint"] += "using namespace cuda::std;\n"  # uint8_t without std::, as everywhere
HEADERS["stdint.h"] = "#include <cstdint>\n"
HEADERS["cuda_runtime.h"] = "\n"  # NVRTC knows what kernels need of it
#: The file that NVRTC says an error is in where a name that it was asked for is none.
NAME_EXPRESSIONS = "__nv_name_map"
#: Sizes of a launch: a larger one would lose its upper bits on the way to the driver.
LARGEST_SIZE = 2**31 - 1
#: `run` changes how the software GPU behaves, and counts what it does: one thread at a time.
_running = threading.RLock()
_FLOATS = {2: np.float16, 4: np.float32, 8: np.float64}
_INTEGERS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


@dataclass(frozen=True)
class Unwritten:
    """An argument of `run`: an array that the kernel is to write. A kernel that reads it first fails.

    Attributes:
        shape, dtype: those of the array. Bytes that nobody writes come back as 0xA5.
    """

    shape: tuple[int, ...]
    dtype: Any


@dataclass(frozen=True)
class Ran:
    """What a launch returned.

    Attributes:
        arrays: the array arguments and the `Unwritten` ones in their order, as the kernel left them; the caller's own
            are unchanged.
        counters: what the kernel did.
        entry: the kernel's name, as it was given.
        ptx: the text that ran.
    """

    arrays: tuple[np.ndarray, ...]
    counters: KernelCounters
    entry: str
    ptx: str

    def described(self) -> str:
        """One line: instructions, and which accesses are not ideal."""
        c = self.counters
        parts = [f"{self.entry}: {c.blocks:,} blocks, {c.warp_instructions:,} warp instructions"]
        for verb, sectors, used in (
            ("loads", c.load_sectors_per_request, c.used_load_share),
            ("stores", c.store_sectors_per_request, c.used_store_share),
        ):
            if sectors:
                parts.append(f"{verb} {sectors:.1f} sectors a request ({min(used, 1):.0%} of their bytes used)")
        if c.shared_accesses:
            parts.append(f"shared memory {c.wavefronts_over_ideal:.2f} times the ideal wavefronts")
        return ", ".join(parts)


def run(
    source: str,
    entry: str,
    grid: Any,
    block: Any,
    arguments: Any,
    *,
    shared: int = 0,
    target: str = "sm_90",
    options: tuple[str, ...] = (),
    name: str = "kernel.cu",
    uninitialised: bool = True,
    longest: int = LONGEST,
) -> Ran:
    """Run a kernel once and wait for it. One kernel runs at a time, whichever thread starts it.

    Args:
        source: PTX, or CUDA C++, which NVRTC compiles.
        entry: the kernel's name: in PTX as it stands there, in C++ as C++ has it: "quantize", "quantize<float, 32>".
        grid, block: one to three sizes each, or an int.
        arguments: one for each parameter: for a pointer a NumPy array, `Unwritten` or None (a null pointer); a NumPy
            scalar, or a Python int or float, which becomes as wide as the parameter is; an int becomes a float where
            the PTX says that the parameter is one.
        shared: bytes of dynamic shared memory of a block.
        target: a name of `settings.TARGETS`.
        options: more options for NVRTC, such as "-DROWS=32".
        name: the file's name, for the lines that faults and NVRTC name.
        uninitialised: whether a read of bytes that nobody wrote is a fault.
        longest: instructions of a warp in a block; one that executes more is taken to be in an endless loop: a fault.

    Returns:
        `Ran`.

    Raises:
        TypeError, ValueError: an argument that the kernel cannot take.
        DeviceError: the kernel did something wrong, or the launch was refused.
        RuntimeError: CUDA was used before the software GPU was loaded.
    """
    grid, block = _three(grid, "grid"), _three(block, "block")
    if not 0 <= shared <= LARGEST_SIZE:
        raise ValueError(f"shared must be a number of bytes from 0 to {LARGEST_SIZE}; got {shared!r}")
    device = loading.device_for(target)
    if is_ptx(source):
        require_entry(source, entry)
        ptx, mangled = source, entry
    else:
        ptx, mangled = compile_cuda(source, entry, target, options, name)
    with _running:
        return _run(ptx, entry, mangled, grid, block, arguments, shared, device, uninitialised, longest)


def _run(ptx, entry, mangled, grid, block, arguments, shared, device, uninitialised, longest):
    before = loading.behaviour(uninitialised=uninitialised, longest=longest)
    try:
        kernel = driver_calls.Kernel(ptx, mangled, device)
        arrays = [
            _on_device(one, f"arguments[{place}]", device)
            for place, one in enumerate(arguments)
            if isinstance(one, np.ndarray | Unwritten)
        ]
        values = _values(arguments, arrays, kernel.parameter_sizes, _parameter_types(ptx, mangled))
        known = len(counters())
        kernel.launch(grid, block, shared, values)
        driver_calls.synchronize(device)
        done = tuple(driver_calls.to_host(one, device) for one in arrays)
    finally:
        loading.load(before)
    return Ran(done, counters()[known], entry, ptx)


def _on_device(argument, name, device):
    """The argument's memory; a fault calls it by its name."""
    if isinstance(argument, Unwritten):
        array = driver_calls.empty(argument.shape, argument.dtype, device)
    else:
        array = driver_calls.to_device(argument, device)
    driver_calls.label(array, name)
    return array


# --- code -------------------------------------------------------------------------------------------


def is_ptx(source: str) -> bool:
    """Whether a text is PTX: it says which version of PTX it has."""
    return ptx_cache.version_of(source) != ""


def compile_cuda(
    source: str, entry: str, target: str, options: tuple[str, ...] = (), name: str = "kernel.cu"
) -> tuple[str, str]:
    """Compile CUDA C++ with NVRTC, with the lines of the source in the PTX.

    Args:
        source: the text. entry: a kernel as C++ names it: "quantize", "ns::quantize<float, 32>".
        target: a name of `settings.TARGETS`. options: more options. name: the file's name.

    Returns:
        (PTX, the kernel's name in it).

    Raises:
        ValueError: NVRTC refuses the source, or finds no such kernel in it; the message has its log.
        ImportError: NVRTC is missing; the message says what to install.
    """
    with explain_missing_nvrtc():
        from cuda.bindings import nvrtc

    folders = [f"-I{folder}" for folder in _include_folders()]
    architecture = target.replace("sm_", "compute_")
    given = [f"--gpu-architecture={architecture}", f"--std={STANDARD}", "-lineinfo", *folders, *options]
    program = _checked(nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), len(HEADERS), *_header_texts()))
    try:
        _checked(nvrtc.nvrtcAddNameExpression(program, entry.encode()))
        (code,) = nvrtc.nvrtcCompileProgram(program, len(given), [one.encode() for one in given])
        if int(code):
            log = _log(nvrtc, program)
            if set(re.findall(r"^(.*)\(\d+\): (?:catastrophic )?error", log, re.MULTILINE)) == {NAME_EXPRESSIONS}:
                _refuse_entry(_kernels_of(source), entry)
            raise ValueError(f"source must be CUDA C++ that NVRTC compiles, with a kernel {entry}; got {name}:\n{log}")
        text = b" " * _checked(nvrtc.nvrtcGetPTXSize(program))
        _checked(nvrtc.nvrtcGetPTX(program, text))
        mangled = _checked(nvrtc.nvrtcGetLoweredName(program, entry.encode()))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    # NVRTC puts the current folder before the file's name.
    ptx = text.rstrip(b"\0 ").decode().replace(f'"{os.path.join(os.getcwd(), name)}"', f'"{name}"')
    return ptx, mangled.decode()


def _include_folders():
    """Folders of cuda_bf16.h, cuda_fp8.h ... and of cub and libcu++, in the wheels of CUDA 13 and of CUDA 12."""
    packages = {"nvidia.cu13": ("include", "include/cccl"), "nvidia.cuda_runtime": ("include",)}
    packages["nvidia.cuda_cccl"] = ("include",)
    found = [(build.wheel_folder(package), names) for package, names in packages.items()]
    return [folder / name for folder, names in found if folder for name in names if (folder / name).is_dir()]


def _header_texts():
    return [text.encode() for text in HEADERS.values()], [name.encode() for name in HEADERS]


def _log(nvrtc, program):
    text = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
    _checked(nvrtc.nvrtcGetProgramLog(program, text))
    return text.rstrip(b"\0 ").decode(errors="replace")


def _checked(answer):
    """What a call of NVRTC returned beside its code."""
    code, *rest = answer
    if int(code):
        raise RuntimeError(f"a call of NVRTC failed: {code!r}")
    return rest[0] if rest else None


def require_entry(ptx: str, entry: str) -> None:
    """Raise ValueError where PTX has no kernel of that name."""
    names = re.findall(r"\.entry\s+([\w$]+)", ptx)
    if entry not in names:
        _refuse_entry(names, entry)


def _refuse_entry(names, entry):
    raise ValueError(f"entry must be a kernel of the source, {', '.join(names) or 'which has none'}; got {entry!r}")


def _kernels_of(source):
    """Names of the kernels in the text of CUDA C++, a template's as NAME<...>; without namespaces."""
    code = re.sub(r"//[^\n]*|/\*.*?\*/", " ", source, flags=re.DOTALL)
    code = re.sub(r"__launch_bounds__\s*\([^()]*\)", " ", code)
    found = re.findall(r"(template\s*<[^{};]*>[^{};]*)?__global__[^{};(]*?(\w+)\s*\(", code)
    return list(dict.fromkeys(f"{name}<...>" if template else name for template, name in found))


# --- arguments --------------------------------------------------------------------------------------


def _three(sizes, name):
    given = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    whole = all(isinstance(one, int | np.integer) and 0 < one <= LARGEST_SIZE for one in given)
    if not 1 <= len(given) <= 3 or not whole:
        raise ValueError(f"{name} must be one to three sizes from 1 to {LARGEST_SIZE}; got {sizes!r}")
    return tuple(int(one) for one in (*given, 1, 1)[:3])


def _parameter_types(ptx, entry):
    """PTX's type of each parameter of a kernel: "f32", "u64"; "b8" and the like do not say which numbers."""
    found = re.search(rf"\.entry\s+{re.escape(entry)}\s*\(([^)]*)\)", ptx)
    return re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.([a-z]\d+)", found[1]) if found else []


def _values(arguments, arrays, sizes, types):
    """ctypes values of the arguments, in their order."""
    if len(arguments) != len(sizes):
        raise ValueError(f"arguments must be one for each of {len(sizes)} parameters; got {len(arguments)}")
    on_device = iter(arrays)
    kinds = [one[0] for one in types] if len(types) == len(sizes) else "b" * len(sizes)
    return [
        _value(one, size, kind, place, on_device)
        for place, (one, size, kind) in enumerate(zip(arguments, sizes, kinds, strict=True))
    ]


def _value(argument, size, kind, place, on_device):
    name = f"arguments[{place}]"
    if argument is None or isinstance(argument, np.ndarray | Unwritten):
        array = None if argument is None else next(on_device)
        if size != ctypes.sizeof(ctypes.c_uint64):
            got = "None" if argument is None else "an array"
            raise ValueError(f"{name} must be a number of {size} bytes, as the parameter is; got {got}")
        return ctypes.c_uint64(array.ctypes.data if array is not None and array.nbytes else 0)
    if type(argument) is int and kind == "f":
        try:
            argument = float(argument)
        except OverflowError:
            raise ValueError(f"{name} must fit into a float of {size} bytes; got {argument}") from None
    if isinstance(argument, float) and not isinstance(argument, np.generic) and kind in "us":
        raise TypeError(f"{name} must be an integer, as the parameter is; got {argument!r}")
    return _bytes(_scalar(argument, size, name))


def _scalar(argument, size, name):
    """A number as a NumPy scalar as wide as the parameter."""
    if isinstance(argument, np.generic):
        if argument.nbytes != size:
            raise ValueError(f"{name} must have {size} bytes, as the parameter has; got {argument.dtype} {argument}")
        return argument
    kinds = _FLOATS if isinstance(argument, float) else _INTEGERS
    if isinstance(argument, bool) or not isinstance(argument, int | float) or size not in kinds:
        raise TypeError(f"{name} must be an array or a number of {size} bytes; got {argument!r}")
    if isinstance(argument, float):
        with np.errstate(over="ignore"):
            narrowed = kinds[size](argument)
        if np.isinf(narrowed) and not np.isinf(argument):
            raise ValueError(f"{name} must fit into a float of {size} bytes; got {argument}")
        return narrowed
    bits = 8 * size
    if not -(1 << (bits - 1)) <= argument < 1 << bits:
        raise ValueError(f"{name} must fit into {size} bytes; got {argument}")
    return np.array(argument % (1 << bits), f"u{size}")[()]


def _bytes(scalar):
    raw = scalar.tobytes()
    return (ctypes.c_uint8 * len(raw)).from_buffer_copy(raw)
