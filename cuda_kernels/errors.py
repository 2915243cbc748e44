"""What is missing, said so that the reader knows what to install or change."""

from contextlib import contextmanager

INSTALL = "pip install 'numba-cuda[cu13]' (or [cu12] for a CUDA 12 driver)"
ALTERNATIVE = "CPU arrays go to cuda_kernels.host; NUMBA_ENABLE_CUDASIM=1 runs kernels in the simulator"


class NoGPUError(RuntimeError):
    """There is no GPU, no driver, or no compiler for one."""


@contextmanager
def explain_missing_numba():
    """Say what to install where Numba is missing."""
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
    """Raise NoGPUError where numba would fall back to its stale built-in `numba.cuda`."""
    from numba import cuda

    implementation = getattr(cuda, "implementation", "built-in")
    if implementation != "NVIDIA":
        raise NoGPUError(
            f"numba.cuda is numba's own outdated copy (implementation {implementation!r}), numba-cuda is not installed "
            f"or was not activated: {INSTALL}. {ALTERNATIVE}."
        )


@contextmanager
def explain_linking():
    """Turn a refusal of the linker into a `NoGPUError`: mostly an nvJitLink older than the NVVM that wrote the PTX."""
    try:
        yield
    except Exception as error:  # cuda.core's linker errors have no public class
        raise NoGPUError(
            f"linking failed: {type(error).__name__}: {error}. PTX of a newer NVVM needs an nvJitLink as new: install "
            "nvidia-nvvm and nvidia-nvjitlink of one CUDA release (pip install --upgrade 'numba-cuda[cu13]')."
        ) from error
