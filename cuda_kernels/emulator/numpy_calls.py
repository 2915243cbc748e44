"""`emulated`: a context in which the GPU calls of cuda_kernels work on NumPy arrays.

    with cuda_kernels.emulated(target="sm_90"):
        q = cuda_kernels.activation_quantize("swiglu", x, MXFP8Scaling(E4M3), columnwise=True)

Arguments are copied to the device's memory, the call runs as on a GPU (Numba's compiler, nvJitLink, cuda.core, the
driver), and its results are copied back. Results are NumPy arrays, and `cuda_kernels.result.Quantized` of them.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from cuda_kernels.emulator import loading
from cuda_kernels.emulator.settings import Settings, targets_with


@dataclass(eq=False)
class _Entered:
    """A context that is entered.

    Attributes:
        device, settings: its own. before: the settings before the first context of the process was entered.
        holds: whether it was not left yet.
    """

    device: int
    settings: Settings
    before: Settings
    holds: bool = True


#: The contexts of this thread (or task), the innermost last.
_of_thread: ContextVar[tuple[_Entered, ...]] = ContextVar("emulated", default=())
#: Those of all threads, the one entered last at the end.
_of_process: list[_Entered] = []
_changing = threading.RLock()


@contextmanager
def emulated(target: str = "sm_90", **behaviour: bool | int) -> Iterator[Settings]:
    """A context in which the calls of `cuda_kernels` take NumPy arrays and run on the software GPU.

    It holds for the thread that enters it, until it ends, in whatever order contexts end; within one, another may
    choose another target. How the devices behave is a matter of the whole process: the context that was entered last
    decides. Enter the first one, or load the software GPU, before anything else uses CUDA.

    Args:
        target: which device, a name of `settings.TARGETS`.
        behaviour: attributes of `Settings` except `targets`: deferred, backward, contract, perturb, uninitialised,
            longest.

    Yields:
        The `Settings`.

    Raises:
        ValueError, TypeError: an argument out of its range, or of another type; no device of this process is of that
            target.
        RuntimeError: CUDA was used before. CompilerMissingError: nothing to compile the software GPU with.
        DeviceError: from a call in the context: a kernel failed, with its instruction, thread and line. Later calls
            work.
    """
    entered = _enter(target, behaviour)
    try:
        yield entered.settings
    finally:
        _leave(entered)


def _settings_for(target, behaviour):
    """The process's devices, once there are any, with another behaviour."""
    targets = loading.settings().targets if loading.is_loaded() else targets_with(target)
    return Settings(targets=targets, **behaviour)


def _before_all(target):
    """The settings before the first context that is entered now."""
    if _of_process:
        return _of_process[0].before
    return loading.settings() if loading.is_loaded() else _settings_for(target, {})


def _enter(target, behaviour):
    with _changing:
        wanted = _settings_for(target, behaviour)
        entered = _Entered(wanted.device_of(target), wanted, _before_all(target))
        loading.load(wanted)
        from cuda_kernels import arrays  # only now: it lets Numba look for a driver

        _of_process.append(entered)
    _of_thread.set((*_of_thread.get(), entered))
    arrays.numpy_memory.set(_innermost)
    return entered


def _leave(entered):
    with _changing:
        entered.holds = False
        _of_process.remove(entered)
        if loading.fault():
            loading.reset()
        loading.load(_of_process[-1].settings if _of_process else entered.before)
    _of_thread.set(tuple(one for one in _of_thread.get() if one.holds))


def _innermost():
    """The memory of NumPy arrays in this thread now, None outside of every context.

    One that a generator entered, and that was left from elsewhere, no longer holds.
    """
    from cuda_kernels.emulator.numpy_memory import NumpyMemory

    holding = [one for one in _of_thread.get() if one.holds]
    return NumpyMemory(holding[-1].device) if holding else None
