"""What the driver knows: which device is current, where memory lies, and the order of work in two streams.

Nothing is remembered here: a context may be destroyed and made again, and the driver gives handles out again.
"""

import importlib
from contextlib import contextmanager, nullcontext
from functools import lru_cache

#: What `device_scope` returns where there is nothing to do.
NOTHING = nullcontext()
#: Handles of the default streams: 0 and 1 are the legacy one, which waits for others and they for it.
NO_STREAM, LEGACY_STREAM, PER_THREAD_STREAM = 0, 1, 2


@lru_cache(maxsize=1)
def cuda_core():
    """The module `cuda.core`, under its older name before 0.5."""
    core = importlib.import_module("cuda.core")
    return core if hasattr(core, "launch") else importlib.import_module("cuda.core.experimental")


@lru_cache(maxsize=1)
def driver():
    """The module `cuda.bindings.driver`, under its older name before 12.8."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ModuleNotFoundError:
        return importlib.import_module("cuda.cuda")


@lru_cache(maxsize=1)
def _device_ordinal():
    return driver().CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL


def _required(answer):
    """The values of a driver's answer, without its code.

    Raises:
        RuntimeError: the driver refused the call.
    """
    code, *values = answer
    if int(code):
        raise RuntimeError(f"the CUDA driver refused a call: {code.name} ({int(code)})")
    return values[0] if len(values) == 1 else values


# --- devices ----------------------------------------------------------------------------------------


def is_current(number):
    """Whether the context of this thread is one of a device; False where there is no context yet."""
    code, device = driver().cuCtxGetDevice()
    return not code and int(device) == number


def device_scope(number):
    """A context manager in which a device is current; afterwards the previous one, if any, is current again."""
    return NOTHING if is_current(number) else _pushed(number)


@contextmanager
def _pushed(number):
    """The primary context is held as long as it is current: nobody can destroy it meanwhile."""
    cuda = driver()
    _required(cuda.cuInit(0))
    context = _required(cuda.cuDevicePrimaryCtxRetain(number))
    try:
        _required(cuda.cuCtxPushCurrent(context))
        try:
            yield
        finally:
            cuda.cuCtxPopCurrent()
    finally:
        cuda.cuDevicePrimaryCtxRelease(number)


def device_of_pointer(address, name):
    """Number of the device on which memory lies.

    Raises:
        ValueError: no device has memory there. RuntimeError: the driver answers nothing, after a fault for example.
    """
    answer = driver().cuPointerGetAttribute(_device_ordinal(), address)
    code = answer[0]
    if code == driver().CUresult.CUDA_ERROR_INVALID_VALUE:
        raise ValueError(f"{name} must point to the memory of a device; got address {address:#x} ({code.name})")
    return _required(answer)


def fill_with_zeros(address, size, stream):
    """Set bytes to zero, in the order of a stream."""
    if size:
        _required(driver().cuMemsetD8Async(address, 0, size, stream))


def copy_memory(source, target, size, stream):
    """Copy bytes of a device, in the order of a stream."""
    _required(driver().cuMemcpyDtoDAsync(target, source, size, stream))


def fetch_memory(source, host, stream):
    """Copy bytes of a device to a NumPy array, in the order of a stream, and wait for it."""
    _required(driver().cuMemcpyDtoHAsync(host.ctypes.data, source, host.nbytes, stream))
    _required(driver().cuStreamSynchronize(stream))


# --- streams ----------------------------------------------------------------------------------------


def same_stream(one, other):
    """Whether two handles are of one stream; 0 and 1 are."""
    return (one or LEGACY_STREAM) == (other or LEGACY_STREAM)


def wait_for_stream(stream, earlier):
    """Let later work of a stream wait for all work given so far to another stream of the same device."""
    if same_stream(stream, earlier):
        return
    cuda = driver()
    event = _required(cuda.cuEventCreate(cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING))
    try:
        _required(cuda.cuEventRecord(event, earlier))
        _required(cuda.cuStreamWaitEvent(stream, event, 0))
    finally:
        cuda.cuEventDestroy(event)  # the driver keeps it until the wait is over
