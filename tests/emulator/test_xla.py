"""XLA's CUDA handlers on the software GPU: called as XLA calls them, with a call frame in memory, on XLA's stream.

Only XLA itself is missing: its frame and the functions of its API are those of `xla_frames`, and its memory and its
stream are the driver's.
"""

import ctypes
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from tiers import sampled

pytest.importorskip("numba_cuda")
import refops
from cuda_kernels.emulator import driver_calls, loading
from fuser.xla import ffi
from fuser.xla.settings import ACTIVATION_NAMES
from xla_frames import FakeRuntime

#: Number of device -> whose place in `Settings.targets` that is.
SM_90, SM_100 = 0, 2
ROWS, COLUMNS = 64, 128
#: Arrays of a quantized result, in the order of XLA's results.
RESULTS = ("rowwise_data", "columnwise_data", "rowwise_scale_inv", "columnwise_scale_inv")
#: Name -> (scaling mode of XLA, settings, dtype of the data, whether columns are quantized too).
MODES = {
    "delayed": (1, refops.DelayedScaling(refops.E4M3, 4.0), "float8_e4m3fn", True),
    "mxfp8": (2, refops.MXFP8Scaling(refops.E4M3), "float8_e4m3fn", True),
    "current": (3, refops.CurrentScaling(refops.E4M3), "float8_e4m3fn", False),
    "nvfp4": (4, refops.NVFP4Scaling(), "float4_e2m1fn", True),
}
HANDLE = ctypes.c_void_p


class Runtime(FakeRuntime):
    """XLA on a device: a stream that does not wait for the default one, and memory in its order."""

    def __init__(self, device, *described):
        self.device, self.live = device, {}
        super().__init__(*described)
        self.stream = HANDLE()
        with driver_calls.current(device):
            driver_calls.checked(loading.driver().cuStreamCreate(ctypes.byref(self.stream), 1))

    def stream_get(self, address):
        ffi.StreamGet.from_address(address).stream = self.stream.value

    def device_ordinal_get(self, address):
        ffi.DeviceOrdinalGet.from_address(address).ordinal = self.device

    def device_memory_allocate(self, address):
        request, data = ffi.MemoryAllocate.from_address(address), ctypes.c_uint64()
        size = ctypes.c_size_t(request.size)
        driver_calls.checked(loading.driver().cuMemAllocAsync(ctypes.byref(data), size, self.stream))
        request.data = data.value
        self.live[data.value] = request.size

    def device_memory_free(self, address):
        request = ffi.MemoryFree.from_address(address)
        assert self.live.pop(request.data) == request.size
        driver_calls.checked(loading.driver().cuMemFreeAsync(ctypes.c_uint64(request.data), self.stream))

    def run(self, kind):
        """Call the handler of a kind with the device current, as XLA does, and wait for the stream."""
        handler = ffi.handler(lambda frame: ffi.on_cuda(kind, frame))
        with driver_calls.current(self.device):
            failed = self.call(handler)
            driver_calls.checked(loading.driver().cuStreamSynchronize(self.stream))
        assert not self.live
        return failed


def as_float4(array):
    """Bytes of two codes each, described as XLA describes float4_e2m1fn."""
    shape = (*array.shape[:-1], 2 * array.shape[-1])
    dtype = SimpleNamespace(name="float4_e2m1fn")
    return SimpleNamespace(ndim=array.ndim, shape=shape, dtype=dtype, ctypes=array.ctypes, kept=array)


def described(array, dtype):
    """An array of codes as XLA describes it."""
    return as_float4(array) if dtype == "float4_e2m1fn" else array.view(dtype)


def attributes_of(name, mode, columnwise, dbias):
    """A call's attributes, TE's."""
    return {
        "act_enum": np.int64(ACTIVATION_NAMES.index(name)),
        "scaling_mode": np.int64(mode),
        "quantize_layout": np.int64(2 if columnwise else 0),
        "act_params": {},
        "is_dbias": np.bool_(dbias),
        "output_amax_when_no_scaling": np.bool_(mode == 0),
    }


def inputs(seed=0):
    """(dz, x) in bfloat16: dz (ROWS, COLUMNS), x (ROWS, 2, COLUMNS). Small multiples of 1/4: sums are exact."""
    rng = np.random.default_rng(seed)
    dz, x = (rng.integers(-16, 17, (ROWS, *shape)) / 4 for shape in ((COLUMNS,), (2, COLUMNS)))
    return dz.astype(ml_dtypes.bfloat16), x.astype(ml_dtypes.bfloat16)


def same_bits(array, expected, device):
    """Assert that an array of the device has the expected bits."""
    got, wanted = driver_calls.to_host(array, device).view(np.uint8), np.ascontiguousarray(expected).view(np.uint8)
    np.testing.assert_array_equal(got.reshape(-1), wanted.reshape(-1))


@pytest.mark.parametrize("device", [SM_90, SM_100])
@pytest.mark.parametrize("gradient", [False, True], ids=["activation", "gradient"])
@sampled("mode", [None, *MODES], 2, in_all=3)
def test_handler_fills_xlas_results(order, device, gradient, mode):
    number, settings, dtype, columnwise = MODES.get(mode, (0, None, "bfloat16", False))
    dz, x = inputs()
    rows = x.reshape(ROWS, 2 * COLUMNS)
    arguments, options = (("sreglu", dz, rows), {"dbias": True}) if gradient else (("sreglu", rows), {})
    function = "activation_grad" if gradient else "activation"
    if settings is None:
        made = getattr(refops, function)(*arguments, **options)
    else:
        made = getattr(refops, f"{function}_quantize")(*arguments, settings, columnwise=columnwise, **options)
    made, dbias = made if gradient else (made, None)
    wanted = [made] if settings is None else [getattr(made, one) for one in RESULTS]
    wanted += [None] * (4 - len(wanted))

    put = lambda array: driver_calls.to_device(array, device)  # noqa: E731
    scale, amax = put(np.full(1, 4.0, np.float32)), put(np.zeros(1, np.float32))
    operands = [*([put(dz)] if gradient else []), put(x), scale, amax]
    absent = np.empty(1, np.uint8)
    shapes = [absent if one is None else one for one in wanted]
    results = [driver_calls.empty(one.shape, one.dtype, device) for one in shapes]
    sums = driver_calls.empty((2, COLUMNS), ml_dtypes.bfloat16, device)
    seen = [described(one, dtype) if place < 2 and settings else one for place, one in enumerate(results)]
    runtime = Runtime(device, operands, [*seen, amax, sums], attributes_of("sreglu", number, columnwise, gradient))
    failed = runtime.run(ffi.GRADIENT if gradient else ffi.ACTIVATION)
    assert (failed, runtime.errors) == (None, [])
    for result, one in zip(results, wanted, strict=True):
        if one is not None:
            same_bits(result, one, device)
    if gradient:
        same_bits(sums, dbias, device)
    assert loading.unordered() == []


def test_fault_becomes_an_error_of_xla():
    """A result that is too small: the kernel's fault is what XLA is told."""
    _, x = inputs()
    x = driver_calls.to_device(x)
    scale, amax = driver_calls.zeros(1, np.float32), driver_calls.zeros(1, np.float32)
    small = driver_calls.empty((ROWS // 2, COLUMNS), ml_dtypes.bfloat16)
    claimed = SimpleNamespace(ndim=2, shape=(ROWS, COLUMNS), dtype=small.dtype, ctypes=small.ctypes)
    others = [driver_calls.empty(1, np.uint8) for _ in range(3)]
    runtime = Runtime(SM_90, [x, scale, amax], [claimed, *others, amax], attributes_of("sreglu", 0, False, False))
    with pytest.raises(driver_calls.DeviceError, match="invalid write"):
        runtime.run(ffi.ACTIVATION)
    ((code, message),) = runtime.errors
    assert code == ffi.INTERNAL
    assert "invalid write of 16 bytes" in message
    assert "st.global" in message
