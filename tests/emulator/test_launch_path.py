"""The launch path on the software GPU: streams, devices, contexts, linking, and what a launch costs the host."""

import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

import cuda_kernels
import refops
from arrays import assert_same_bits
from cuda_kernels.emulator import behaviour
from cuda_kernels.launch import cuda_core, launcher_for
from cuda_kernels.operands import Spec, pointer
from cuda_kernels.simt import kernel
from refops import E4M3, oracle

cuda = pytest.importorskip("numba.cuda")
bindings = pytest.importorskip("cuda.bindings.driver")

MXFP8 = refops.MXFP8Scaling(E4M3)
F = np.float32


class Exported:
    """Somebody's array with a CUDA array interface: the memory of a Numba array under another stream or device."""

    def __init__(self, array, stream=None):
        self.array, self.stream = array, stream

    @property
    def __cuda_array_interface__(self):
        return {**self.array.__cuda_array_interface__, "stream": self.stream, "version": 3}


def numbers(rng, shape=(16, 64)):
    """Numbers of many sizes."""
    return (rng.standard_normal(shape) * np.exp2(rng.integers(-6, 7, shape))).astype(F)


@pytest.fixture
def rng():
    return np.random.default_rng(17)


@pytest.fixture(scope="module", autouse=True)
def primary_contexts():
    """Numba makes the primary context of a device where no other one is current, else it would pop that one."""
    for device in cuda.gpus:
        device.get_primary_context()


@pytest.fixture(autouse=True)
def device_0(primary_contexts):
    """Device 0 is current."""
    with cuda.gpus[0]:
        yield


def on_host(array):
    """A copy of a result, after all work of all streams."""
    cuda.synchronize()
    return array.copy_to_host()


# --- streams of arrays ------------------------------------------------------------------------------


def nonblocking_stream():
    """Handle of a stream that does not wait for the default one, nor it for the stream."""
    code, stream = bindings.cuStreamCreate(bindings.CUstream_flags.CU_STREAM_NON_BLOCKING)
    assert not int(code)
    return int(stream)


def copy_in_stream(source, target, stream):
    (code,) = bindings.cuMemcpyDtoDAsync(address(target), address(source), source.nbytes, stream)
    assert not int(code)


def address(array):
    return array.__cuda_array_interface__["data"][0]


STREAMS = {"own": nonblocking_stream, "of the thread": lambda: 2, "legacy": lambda: 1, "none": lambda: None}


@pytest.mark.parametrize("name", STREAMS)
def test_work_waits_for_the_stream_that_an_array_names(name, rng):
    """The input is written in that stream, and nobody has waited for it yet: the call must."""
    stream, x = STREAMS[name](), numbers(rng)
    source, given = cuda.to_device(x), cuda.to_device(np.zeros_like(x))
    cuda_kernels.quantize(given, MXFP8)  # compiled, and the plan of the second call
    for backward in (False, True, False):
        given.copy_to_device(np.zeros_like(x))
        cuda.synchronize()
        behaviour(deferred=True, backward=backward)
        copy_in_stream(source, given, 0 if stream is None else stream)
        q = cuda_kernels.quantize(Exported(given, stream), MXFP8)
        behaviour(deferred=False, backward=False)
        assert_same_bits(on_host(q.rowwise_data), refops.quantize(x, MXFP8).rowwise_data, name)


def test_work_waits_for_the_streams_of_all_arrays(rng):
    x, dy = numbers(rng), numbers(rng)
    first, second = nonblocking_stream(), nonblocking_stream()
    sources, given = [cuda.to_device(a) for a in (dy, x)], [cuda.to_device(np.zeros_like(x)) for _ in range(2)]
    expected = None
    for turn in range(3):
        cuda.synchronize()
        behaviour(deferred=turn > 0, backward=turn > 1)
        for source, target, stream in zip(sources, given, (first, second), strict=True):
            copy_in_stream(source, target, stream)
        if turn == 0:
            cuda.synchronize()
        dx = cuda_kernels.activation_grad("silu", *map(Exported, given, (first, second)))
        behaviour(deferred=False, backward=False)
        expected = on_host(dx) if expected is None else expected
        assert_same_bits(on_host(dx), expected, f"turn {turn}")
        for target in given:
            target.copy_to_device(np.zeros_like(x))
    oracle.check("dsilu", {"dy": dy, "x": x}, {"dx": expected}).raise_for_mismatch()


@pytest.mark.parametrize("stream", [None, 1, 2])
def test_results_name_the_stream_in_which_they_become_ready(stream, rng):
    given = Exported(cuda.to_device(numbers(rng)), stream)
    for _ in range(2):  # the first call, and its plan
        q = cuda_kernels.quantize(given, MXFP8, columnwise=True)
        named = {array.__cuda_array_interface__["stream"] for array in q.arrays.values()}
        assert named == {stream or 1}


def test_a_result_in_a_numba_stream_keeps_it_alive(rng):
    stream = cuda.stream()
    y = cuda_kernels.activation("silu", cuda.to_device(numbers(rng), stream=stream))
    assert y.stream is stream and y.__cuda_array_interface__["stream"] == int(stream)


def test_a_consumer_that_waits_for_the_named_stream_reads_the_result(rng):
    x = numbers(rng)
    given = cuda.to_device(x)
    expected = refops.quantize(x, MXFP8).rowwise_data
    cuda_kernels.quantize(given, MXFP8)
    behaviour(deferred=True)
    data = cuda_kernels.quantize(given, MXFP8).rowwise_data
    host = np.zeros(data.shape, np.uint8)
    stream = nonblocking_stream()
    event = bindings.cuEventCreate(0)[1]
    bindings.cuEventRecord(event, data.__cuda_array_interface__["stream"])
    bindings.cuStreamWaitEvent(stream, event, 0)
    bindings.cuMemcpyDtoHAsync(host.ctypes.data, address(data), host.nbytes, stream)
    bindings.cuStreamSynchronize(stream)
    assert_same_bits(host, expected, "read in another stream")


def test_stream_0_is_refused_as_the_interface_says(rng):
    x = cuda.to_device(numbers(rng))
    cuda_kernels.activation("silu", x)
    with pytest.raises(ValueError, match=r"x\.__cuda_array_interface__ .* 2 for the thread's, or None; got stream 0"):
        cuda_kernels.activation("silu", Exported(x, 0))
    with pytest.raises(ValueError, match=r"dy\.__cuda_array_interface__ .*got stream 0"):
        cuda_kernels.activation_grad("silu", Exported(x, 0), x)


# --- devices ----------------------------------------------------------------------------------------


def current_device():
    code, number = bindings.cuCtxGetDevice()
    return int(number) if not int(code) else None


def device_of(array):
    code, number = bindings.cuPointerGetAttribute(
        bindings.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address(array)
    )
    assert not int(code)
    return number


def put(x, number):
    """A Numba array on a device."""
    with cuda.gpus[number]:
        return cuda.to_device(x)


@pytest.mark.parametrize("deferred", [False, True])
def test_the_device_is_the_array_s_and_the_current_one_stays(deferred, rng):
    x = numbers(rng)
    given = put(x, 1)
    with cuda.gpus[0]:
        for _ in range(3):
            behaviour(deferred=deferred)
            q = cuda_kernels.quantize(given, MXFP8, columnwise=True)
            y = cuda_kernels.activation("swiglu", given)
            assert current_device() == 0
            assert {device_of(array) for array in (*q.arrays.values(), y)} == {1}
            behaviour(deferred=False)
            host, expected = q.to_host(), refops.quantize(x, MXFP8, columnwise=True)
            assert current_device() == 0
            for name in q.arrays:
                assert_same_bits(getattr(host, name), getattr(expected, name), name)
            assert device_of(q.swizzled().rowwise_scale_inv) == 1 and current_device() == 0


def test_one_call_for_each_of_two_devices(rng):
    """The same arguments but for the device: a plan of one must not serve the other."""
    x = numbers(rng)
    for number in (0, 1, 0, 1, 1, 0):
        y = cuda_kernels.activation("silu", put(x, number))
        assert device_of(y) == number
        with cuda.gpus[number]:
            oracle.check("silu", x, on_host(y)).raise_for_mismatch()


def test_arrays_of_two_devices_are_refused(rng):
    x = numbers(rng)
    here, there = put(x, 0), put(x, 1)
    for _ in range(2):
        with pytest.raises(ValueError, match="x must be on device 0, where the first argument is; got 1"):
            cuda_kernels.activation_grad("silu", here, there)
        cuda_kernels.activation_grad("silu", here, here)  # its plan is of one device


def test_an_address_of_no_device_is_refused():
    described = {"shape": (4, 32), "typestr": "<f4", "data": (0x1000, False), "version": 3}
    wrong = SimpleNamespace(__cuda_array_interface__=described)
    with pytest.raises(ValueError, match="x must point to the memory of a device; got address 0x1000"):
        cuda_kernels.activation("silu", wrong)


def test_an_array_without_elements_lies_nowhere(rng):
    empty = cuda.to_device(np.zeros((0, 64), F))
    for _ in range(2):
        assert cuda_kernels.activation("silu", empty).shape == (0, 64)
        assert cuda_kernels.quantize(Exported(empty, 1), MXFP8).rowwise_data.shape == (0, 64)


class WithDlpack:
    """An array that offers DLPack alone, on a device."""

    def __init__(self, x, number):
        import cuda.core as core
        from cuda.core.utils import StridedMemoryView

        with cuda.gpus[number]:
            device = core.Device(number)
            self.buffer = device.memory_resource.allocate(x.nbytes, stream=device.default_stream)
            contiguous = np.ascontiguousarray(x)
            assert not int(bindings.cuMemcpyHtoD(int(self.buffer.handle), contiguous.ctypes.data, x.nbytes)[0])
            self.view = StridedMemoryView.from_buffer(self.buffer, x.shape, dtype=x.dtype)
        self.streams = []

    def __dlpack_device__(self):
        return self.view.__dlpack_device__()

    def __dlpack__(self, *, stream=None, **options):
        self.streams.append(stream)
        return self.view.__dlpack__(stream=stream, **options)


@pytest.mark.parametrize("number", [0, 1])
def test_an_array_with_dlpack_alone(number, rng):
    """Its library is told the stream that the work goes to; the device is the array's."""
    x = numbers(rng)
    given = WithDlpack(x, number)
    for _ in range(2):
        q = cuda_kernels.quantize(given, MXFP8)
        assert {device_of(array) for array in q.arrays.values()} == {number} and current_device() == 0
        assert_same_bits(q.to_host().rowwise_data, refops.quantize(x, MXFP8).rowwise_data, "codes")
    assert set(given.streams) == {1}
    with pytest.raises(
        ValueError, match=f"x must be on device {1 - number}, where the first argument is; got {number}"
    ):
        cuda_kernels.activation_grad("silu", put(x, 1 - number), given)


# --- contexts and streams that end ------------------------------------------------------------------


@kernel
def copy_one(source, target):
    """target[0] = source[0]. One thread."""
    target[0] = source[0]


@dataclass(frozen=True)
class CopyOne(Spec):
    """A small kernel."""

    title = "copy one"

    def operands(self):
        return pointer(F), pointer(F)

    def build(self, target):
        return copy_one


def launch_copy(number, source, target):
    """Start it on a device, in the default stream."""
    launcher_for(number).launch(CopyOne(), [source, target], (1, 1, 1), (1, 1, 1), 0)


def test_a_thread_whose_context_was_taken_away_gets_one_again(rng):
    """A library may pop the context that a launch found before."""
    source, target = put(numbers(rng), 0), put(np.zeros(64, F), 0)
    failures = []

    def work():
        try:
            for _ in range(2):
                bindings.cuCtxSetCurrent(bindings.cuDevicePrimaryCtxRetain(0)[1])
                launch_copy(0, address(source), address(target))
                bindings.cuCtxSetCurrent(0)
                launch_copy(0, address(source), address(target))
                assert current_device() is None
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures, failures[0]


def test_a_device_that_was_reset_is_used_again():
    """Its primary context is another one then, under the same handle; kernels that were loaded before still run."""
    number = 3
    for value in (1.0, 2.0):
        context = bindings.cuDevicePrimaryCtxRetain(number)[1]
        bindings.cuCtxPushCurrent(context)
        source, target = (bindings.cuMemAlloc(4)[1] for _ in range(2))
        host = np.array([value], F)
        bindings.cuMemcpyHtoD(source, host.ctypes.data, 4)
        launch_copy(number, int(source), int(target))
        got = np.zeros(1, F)
        assert not int(bindings.cuMemcpyDtoH(got.ctypes.data, target, 4)[0])
        assert got[0] == value
        bindings.cuCtxPopCurrent()
        launch_copy(number, int(source), int(target))  # current is none, or another device's
        bindings.cuDevicePrimaryCtxReset(number)
    bindings.cuDevicePrimaryCtxRetain(number)  # for those in this process who hold the context and did not reset it


def test_no_stream_is_remembered(monkeypatch):
    """The driver gives the handle of a stream that was destroyed to another one, which may be of another device."""
    from cuda_kernels import launch

    made = []

    class Streams:
        @staticmethod
        def from_handle(handle):
            made.append(handle)
            return object()

    core = launch.cuda_core()
    monkeypatch.setattr(core, "Stream", Streams)
    assert launch.stream_of(4096) is not launch.stream_of(4096)
    assert made == [4096, 4096]


def test_the_default_stream_is_that_of_the_current_context(rng):
    """One object stands for it on every device."""
    from cuda_kernels import launch

    x = numbers(rng)
    assert launch.stream_of(0) is launch.stream_of(1)
    behaviour(deferred=True)
    results = [(number, cuda_kernels.activation("silu", put(x, number))) for number in (0, 1, 2, 1, 0)]
    behaviour(deferred=False)
    for number, y in results:
        with cuda.gpus[number]:
            oracle.check("silu", x, on_host(y)).raise_for_mismatch()


# --- linking ----------------------------------------------------------------------------------------


def compile_gradient(name, fast_math=False):
    """PTX of a gradient's kernel, as it would be linked."""
    from cuda_kernels import compile_report

    (entry,) = compile_report.catalogue(f"{name} bf16 -> MXFP8")
    return compile_report.to_ptx(entry.build((9, 0), fast_math), entry.signature, (9, 0))


@pytest.mark.parametrize("name", ["dgelu", "dgeglu", "dsituglu"])
def test_a_linker_that_contracts_changes_no_bit(name, rng):
    """These have multiplications whose product is only added: one rounding in place of two, where PTX allows it."""
    gated = name != "dgelu"
    x, dy = numbers(rng, (32, 128)), numbers(rng, (32, 64 if gated else 128))
    given = cuda.to_device(dy), cuda.to_device(x)
    results = []
    for contract in (False, True):
        behaviour(contract=contract)
        kernels_forgotten()
        results.append(on_host(cuda_kernels.activation_grad(name.removeprefix("d"), *given)))
    assert_same_bits(*results, name)


def kernels_forgotten():
    """Let every kernel be loaded again."""
    from cuda_kernels import launch

    launch._launchers.clear()
    try:
        from cuda_kernels import plans
    except ImportError:
        return
    plans.PLANS.forget()


@pytest.mark.parametrize("fast_math", [False, True])
def test_ptx_leaves_no_rounding_open(fast_math):
    import re

    for name in ("dgelu", "dgeglu", "dsituglu"):
        ptx = compile_gradient(name, fast_math)
        assert len(re.findall(r"\bmul\.rn\.f32\b", ptx)) > 16
        left_open = re.findall(r"\b(?:add|sub|mul)(?:\.ftz|\.sat)*\.(?:f|bf)(?:16|32|64)(?:x2)?\b", ptx)
        assert not left_open, (name, left_open)


# --- what a call costs the host -----------------------------------------------------------------------

#: What a call may take of the host's time until its kernel is launched, as a multiple of what `cuda.core.launch` alone
#: takes of the same kernel in the same process. Allocations are left out: the caller's library makes them.
#: Measured: 6 to 9 launches of 1.6 us on a quiet machine, up to 14 beside other work; a call without a plan takes 65 to
#: 135.
MOST_LAUNCHES = 16
#: A machine that others use may be slow in one half of an attempt, not in every one of them.
ATTEMPTS = 5


def seconds_of(work, times=300, rounds=5):
    """Seconds of the median call, in the best round: calls right after a wait find the processor's caches cold."""
    medians = []
    for _ in range(rounds):
        cuda.synchronize()
        stamps = [time.perf_counter()]
        for _ in range(times):
            work()
            stamps.append(time.perf_counter())
        medians.append(np.median(np.diff(stamps)))
    cuda.synchronize()
    return min(medians)


def launched_by(work, monkeypatch):
    """The arguments of `cuda.core.launch` in a call of one kernel."""
    core, seen = cuda_core(), []
    with monkeypatch.context() as patched:
        plain = core.launch
        patched.setattr(core, "launch", lambda *given: (seen.append(given), plain(*given)))
        work()
    (given,) = seen
    return given


@pytest.fixture
def nothing_allocated(monkeypatch):
    """Results are the same arrays in every call."""
    from cuda_kernels import arrays

    made, plain = {}, arrays.InterfaceMemory._new

    def new(memory, how, shape, dtype):
        key = (how, tuple(shape), str(dtype))
        if key not in made:
            made[key] = plain(memory, how, shape, dtype)
        return made[key]

    monkeypatch.setattr(arrays.InterfaceMemory, "_new", new)


COSTS = {
    "activation": lambda x: cuda_kernels.activation("silu", x),
    "quantize": lambda x: cuda_kernels.quantize(x, MXFP8),
    "activation_quantize": lambda x: cuda_kernels.activation_quantize("gelu", x, MXFP8),
    "gradient": lambda x: cuda_kernels.activation_grad("silu", x, x),
}


class Buffer:
    """The memory of a `cuda.core` buffer as an array."""

    def __init__(self, x):
        import cuda.core as core

        device = core.Device(0)
        device.set_current()
        self.buffer = device.memory_resource.allocate(x.nbytes, stream=device.default_stream)
        (code,) = bindings.cuMemcpyHtoD(int(self.buffer.handle), np.ascontiguousarray(x).ctypes.data, x.nbytes)
        assert not int(code)
        data = (int(self.buffer.handle), False)
        self.__cuda_array_interface__ = {"shape": x.shape, "typestr": "<f4", "data": data, "version": 3, "stream": 1}


@pytest.mark.parametrize("make", [cuda.to_device, Buffer], ids=["Numba", "buffer"])
@pytest.mark.parametrize("name", COSTS)
def test_what_a_launch_costs_the_host(name, make, rng, monkeypatch, nothing_allocated):
    given = make(numbers(rng))
    work = lambda: COSTS[name](given)  # noqa: E731
    work()
    behaviour(deferred=True)
    arguments = launched_by(work, monkeypatch)
    launch = cuda_core().launch
    for _ in range(ATTEMPTS):
        seconds, alone = seconds_of(work), seconds_of(lambda: launch(*arguments))
        print(f"{name}: {seconds * 1e6:.1f} us, of which cuda.core.launch {alone * 1e6:.1f} us")
        if seconds <= MOST_LAUNCHES * alone:
            return
    pytest.fail(f"{name} takes more than {MOST_LAUNCHES} launches, in each of {ATTEMPTS} attempts")
