"""numba.cuda and cuda.core on the software GPU: unchanged libraries, as their users call them."""

import ctypes
import gc
import weakref

import numpy as np
import pytest

pytest.importorskip("numba_cuda")
core = pytest.importorskip("cuda.core")
from driver import ADD_ONE  # noqa: E402
from numba import cuda, float32  # noqa: E402

from cuda_kernels.emulator import loading  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("order"),
    pytest.mark.filterwarnings("ignore:Grid size"),
    pytest.mark.filterwarnings("ignore:Host array used in CUDA kernel"),
]


# --- numba.cuda -------------------------------------------------------------------------------------


@cuda.jit
def add_one(x, y):
    """y = x + 1."""
    i = cuda.grid(1)
    if i < x.size:
        y[i] = x[i] + float32(1)


@cuda.jit
def add_one_everywhere(x, y):
    """The same without a bound."""
    i = cuda.grid(1)
    y[i] = x[i] + float32(1)


@cuda.jit
def reversed_blocks(x, y):
    """Each block of 64 backwards, through shared memory; and the sum of all, with an atomic addition."""
    shared = cuda.shared.array(64, float32)
    thread = cuda.threadIdx.x
    shared[thread] = x[cuda.blockIdx.x * 64 + thread]
    cuda.syncthreads()
    y[cuda.blockIdx.x * 64 + thread] = shared[63 - thread]
    cuda.atomic.add(y, y.size - 1, shared[thread])


def test_numba_device_arrays_and_shared_memory():
    x = np.arange(128, dtype=np.float32)
    on_device, y = cuda.to_device(x), cuda.to_device(np.zeros(129, np.float32))
    reversed_blocks[2, 64](on_device, y)
    got = y.copy_to_host()
    np.testing.assert_array_equal(got[:128], x.reshape(2, 64)[:, ::-1].reshape(-1))
    assert got[128] == x.sum()
    np.testing.assert_array_equal(on_device[32:64].copy_to_host(), x[32:64])


def test_numba_streams_and_events():
    x, stream = np.arange(100, dtype=np.float32), cuda.stream()
    start, end = cuda.event(), cuda.event()
    with cuda.pinned(x):
        on_device = cuda.to_device(x, stream=stream)
        y = cuda.device_array_like(on_device)
        start.record(stream)
        add_one[1, 128, stream](on_device, y)
        end.record(stream)
        host = y.copy_to_host(stream=stream)
        end.synchronize()
    assert cuda.event_elapsed_time(start, end) >= 0
    stream.synchronize()
    np.testing.assert_array_equal(host, x + 1)
    assert loading.unordered() == []


def test_numba_streams_without_an_order_are_reported():
    x, y = cuda.to_device(np.zeros(100, np.float32)), cuda.device_array(100, np.float32)
    streams = cuda.stream(), cuda.stream()
    gc.collect()  # whatever is freed between the launches would order them
    with cuda.defer_cleanup():
        for stream in streams:
            add_one[1, 128, stream](x, y)
    cuda.synchronize()
    (found,) = loading.unordered()
    assert "add_one" in found.first
    assert "add_one" in found.second


def test_numba_pinned_mapped_and_managed_memory():
    for make in (cuda.pinned_array, cuda.mapped_array, cuda.managed_array):
        x = make(64, np.float32)
        x[:] = np.arange(64)
        y = cuda.device_array(64, np.float32)
        add_one[1, 64](x if make is not cuda.pinned_array else cuda.to_device(x), y)
        np.testing.assert_array_equal(y.copy_to_host(), np.arange(64) + 1)


def test_numba_devices():
    capabilities = [tuple(device.compute_capability) for device in cuda.gpus]
    assert capabilities == [(9, 0), (8, 0), (10, 0), (12, 0)]
    x = np.arange(64, dtype=np.float32)
    for device in range(4):
        with cuda.gpus[device]:
            y = cuda.device_array(64, np.float32)
            add_one[1, 64](cuda.to_device(x), y)
            np.testing.assert_array_equal(y.copy_to_host(), x + 1)


def test_numba_exception_says_what_went_wrong():
    x = cuda.to_device(np.zeros(10, np.float32))
    with pytest.raises(
        Exception, match=r"CUDA_ERROR_ILLEGAL_ADDRESS.*: invalid read of 4 bytes .* thread 10: ld.global"
    ):
        add_one_everywhere[1, 32](x, x)
        cuda.synchronize()
    with cuda.gpus[1]:
        assert cuda.to_device(np.ones(3))[0] == 1  # other devices go on
    loading.reset()
    assert cuda.to_device(np.ones(3))[0] == 1


def test_numba_memory_that_nobody_wrote():
    loading.behaviour(uninitialised=True)
    x, y = cuda.device_array(64, np.float32), cuda.device_array(64, np.float32)
    with pytest.raises(Exception, match="read of memory that nobody wrote"):
        add_one[1, 64](x, y)
        cuda.synchronize()
    loading.reset()
    add_one[1, 64](cuda.to_device(np.ones(64, np.float32)), y)
    assert y.copy_to_host()[5] == 2


# --- cuda.core --------------------------------------------------------------------------------------


@pytest.fixture
def device():
    """Device 0 of cuda.core, current."""
    made = core.Device(0)
    made.set_current()
    yield made
    made.set_current()


def kernel_of(device, architecture="sm_90"):
    """`add_one` of `driver.ADD_ONE`, linked."""
    options = core.LinkerOptions(arch=architecture)
    cubin = core.Linker(core.ObjectCode.from_ptx(ADD_ONE.encode()), options=options).link("cubin")
    return cubin.get_kernel("add_one")


def floats(device, buffer, stream):
    """What a buffer holds, after the work of a stream."""
    host = (ctypes.c_float * (buffer.size // 4))()
    driver = loading.driver()
    code = driver.cuMemcpyDtoHAsync_v2(
        host, ctypes.c_uint64(int(buffer.handle)), ctypes.c_size_t(buffer.size), handle(stream)
    )
    assert code == 0
    stream.sync()
    return list(host)


def handle(stream):
    """A stream's handle for ctypes."""
    return ctypes.c_void_p(int(stream.handle))


CONFIGURATION = core.LaunchConfig(grid=1, block=32)


def test_core_streams_events_and_buffers(device):
    one, two = device.create_stream(), device.create_stream()
    x, y = device.allocate(128, stream=one), device.allocate(128, stream=one)
    x.fill(0, stream=one)
    core.launch(one, CONFIGURATION, kernel_of(device), x, y, ctypes.c_int(32))
    event = one.record()
    two.wait(event)
    x.copy_from(y, stream=two)
    assert floats(device, x, two) == [1.0] * 32
    event.sync()
    assert event.is_done
    assert loading.unordered() == []
    x.close(two)
    y.close(two)


def test_core_work_in_no_order_is_reported(device):
    one, two = device.create_stream(), device.create_stream()
    x, y = device.allocate(128, stream=one), device.allocate(128, stream=one)
    x.fill(0, stream=one)
    core.launch(one, CONFIGURATION, kernel_of(device), x, y, ctypes.c_int(32))
    y.fill(0, stream=two)
    two.sync()
    one.sync()
    assert any({"kernel add_one", "the fill of 128 bytes"} == {each.first, each.second} for each in loading.unordered())


def test_core_closed_stream_is_not_another_one(device):
    """A handle is never given out twice: a use after the end is an error, not work in a stream of somebody else."""
    stream = device.create_stream()
    old = int(stream.handle)
    stream.close()
    del stream
    assert int(device.create_stream().handle) != old
    assert loading.driver().cuStreamSynchronize(ctypes.c_void_p(old)) == 400


def test_core_graph(device):
    stream, kernel = device.create_stream(), kernel_of(device)
    x = device.allocate(128, stream=stream)
    x.fill(0, stream=stream)
    builder = stream.create_graph_builder().begin_building()
    for _ in range(3):
        core.launch(builder, CONFIGURATION, kernel, x, x, ctypes.c_int(32))
    graph = builder.end_building().complete()
    assert floats(device, x, stream) == [0.0] * 32
    for _ in range(2):
        graph.launch(stream)
    assert floats(device, x, stream) == [6.0] * 32


def test_core_devices(device):
    names = [core.Device(number).name for number in range(4)]
    assert names == [f"Software GPU {target}" for target in ("sm_90", "sm_80", "sm_100", "sm_120")]
    other = core.Device(2)
    other.set_current()
    stream = other.create_stream()
    x = other.allocate(128, stream=stream)
    x.fill(0, stream=stream)
    core.launch(stream, CONFIGURATION, kernel_of(other, "sm_100a"), x, x, ctypes.c_int(32))
    assert floats(other, x, stream) == [1.0] * 32


def test_core_code_for_another_device_is_refused(device):
    with pytest.raises(
        Exception, match=r"NO_BINARY_FOR_GPU.*: a cubin must be for sm_90, which device 0 is; got one for sm_100"
    ):
        stream = device.create_stream()
        core.launch(stream, CONFIGURATION, kernel_of(device, "sm_100a"), 0, 0, ctypes.c_int(32))


def test_core_exception_says_what_went_wrong(device):
    stream = device.create_stream()
    x = device.allocate(64, stream=stream)
    x.fill(0, stream=stream)
    with pytest.raises(
        Exception, match=r"CUDA_ERROR_ILLEGAL_ADDRESS: .*invalid read of 4 bytes .*thread 16: ld.global"
    ):
        core.launch(stream, CONFIGURATION, kernel_of(device), x, x, ctypes.c_int(32))
        stream.sync()
    loading.reset()
    other = device.create_stream()
    other.sync()


def test_core_memory_is_given_back(device):
    stream = device.create_stream()
    stream.sync()
    before = loading.allocations()
    buffers = [device.allocate(1000, stream=stream) for _ in range(4)]
    gone = weakref.ref(buffers[0])
    assert loading.allocations() == before + 4
    del buffers
    stream.sync()
    assert gone() is None
    assert loading.allocations() == before


def test_bindings_name_what_is_missing(device):
    from cuda.bindings import driver

    with pytest.raises(RuntimeError, match="cuIpcGetMemHandle"):
        driver.cuIpcGetMemHandle(driver.CUdeviceptr(1))
