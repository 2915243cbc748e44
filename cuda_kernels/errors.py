"""Errors about what is missing, which say what to install or change."""

from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

from cuda_kernels import ptx_cache

#: Wheels that NVVM lies in: that of CUDA 13, that of CUDA 12.
COMPILER_PACKAGES = ("nvidia-nvvm", "nvidia-cuda-nvcc-cu12")
INSTALL = "pip install 'numba-cuda[cu13]' (or [cu12] for a CUDA 12 driver)"
ALTERNATIVE = (
    "CPU arrays go to cuda_kernels.host; the kernels run on a software GPU in `with cuda_kernels.emulated():`, and as "
    "Python, in the simulator, with NUMBA_ENABLE_CUDASIM=1"
)
#: What a linker or a driver says that is older than the compiler: of the PTX, or of an architecture it does not know.
TOO_OLD = (
    "Unsupported .version",
    "UNSUPPORTED_PTX_VERSION",
    "is not defined for option 'gpu-name'",
    "UNRECOGNIZED_ARCH",
)


class NoGPUError(RuntimeError):
    """There is no GPU, no driver, or no compiler for one."""


class NoKernelsError(TypeError, NotImplementedError):
    """`refops` computes it, but no kernel does: a scaling of another kind, or a formula beyond the vocabulary."""


@contextmanager
def explain_missing_numba():
    """Say what to install if Numba is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("numba", "llvmlite"):
            raise
        raise ImportError(
            "cuda_kernels needs Numba: pip install '.[host]' for CPUs, '.[cuda13]' or '.[cuda12]' for GPUs, by their "
            "driver's CUDA version (or '.[simulator]' with NUMBA_ENABLE_CUDASIM=1 to run kernels as Python)"
        ) from error


@contextmanager
def explain_missing_nvrtc():
    """Say what to install where CUDA's Python bindings, and so the compiler of CUDA C++, are missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ImportError(
            f"CUDA C++ needs NVRTC, which comes with cuda-bindings: pip install '.[emulator]'; got: {error}"
        ) from error


@contextmanager
def explain_missing():
    """Turn what a missing package or driver raises into a `NoGPUError` that says what to do."""
    try:
        require_numba_cuda()
        yield
    except ImportError as error:
        raise NoGPUError(f"GPU kernels need numba-cuda and cuda-core: {INSTALL}. {ALTERNATIVE}. ({error})") from error
    except NoGPUError:
        raise
    except Exception as error:  # cuda.core's and the driver's own errors have no common class
        raise NoGPUError(f"no usable CUDA device: {type(error).__name__}: {error}. {ALTERNATIVE}.") from error


def require_numba_cuda():
    """Raise NoGPUError if numba would fall back to its stale built-in `numba.cuda`."""
    from numba import cuda

    implementation = getattr(cuda, "implementation", "built-in")
    if implementation != "NVIDIA":
        raise NoGPUError(
            f"numba.cuda is numba's own outdated copy (implementation {implementation!r}), numba-cuda is not installed "
            f"or was not activated: {INSTALL}. {ALTERNATIVE}."
        )


@contextmanager
def explain_linking(ptx, architecture):
    """Turn a refusal of the linker or of the driver into a `NoGPUError` that says which part is too old.

    Args:
        ptx: text of the kernel. architecture: what it is linked for, such as "sm_90".
    """
    try:
        yield
    except Exception as error:  # the classes of cuda.core's, nvJitLink's and the driver's errors are not public
        said = f"{type(error).__name__}: {error}".rstrip("\n\0")
        raise NoGPUError(f"a kernel for {architecture} cannot be loaded. {_remedy(said, ptx)} ({said})") from error


def _remedy(said, ptx):
    """What to install, from what was said and from what is installed."""
    if any(words in said for words in TOO_OLD):
        return _newer_linker(ptx_cache.version_of(ptx))
    if "NO_BINARY_FOR_GPU" in said or "INVALID_IMAGE" in said or "DRIVER_MISMATCH" in said:
        return (
            f"The driver does not read what {_linker()} links: update the driver, or install the packages of its CUDA "
            "version: pip install 'numba-cuda[cu12]' for a CUDA 12 driver, 'numba-cuda[cu13]' for a CUDA 13 driver."
        )
    return f"It was linked by {_linker()}."


def _newer_linker(version):
    """The remedy for PTX that the linker is too old for."""
    compiler, linker, release = _compiler_package(), _linker_version(), ""
    if compiler:
        release = ">=" + ".".join(compiler[1].split(".")[:2])
    written = f"{compiler[0]} {compiler[1]}" if compiler else f"the NVVM at {ptx_cache.compiler_paths().get('nvvm')}"
    cuda12 = (compiler and compiler[0].endswith("cu12")) or (not compiler and linker and linker[0] == 12)
    package = "nvidia-nvjitlink-cu12" if cuda12 else "nvidia-nvjitlink"
    return (
        f"Its PTX {version}, written by {written}, is newer than what {_linker()} reads: "
        f"pip install --upgrade '{package}{release}'."
    )


def _compiler_package():
    """(name, version) of the wheel that contains NVVM; None if no wheel does."""
    path = ptx_cache.compiler_paths().get("nvvm")
    for package in COMPILER_PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            wheel = metadata.distribution(package)
            if path and any(Path(wheel.locate_file(file)) == Path(path) for file in wheel.files or ()):
                return package, wheel.version
    return None


def _linker_version():
    """(major, minor) of the nvJitLink that cuda.core uses; None if there is none."""
    try:
        from cuda.bindings import nvjitlink

        return tuple(nvjitlink.version())
    except Exception:  # too old to say, or not there: each version of the bindings has its own error
        return None


def _linker():
    """What links: nvJitLink, or the driver if that is missing."""
    version = _linker_version()
    return f"nvJitLink {version[0]}.{version[1]}" if version else "the driver (there is no nvJitLink)"
