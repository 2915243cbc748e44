"""The driver alone, call by call: handles, order of work, faults, graphs, pools, peers; each eager and deferred."""

import ctypes

import pytest
from driver import (
    ADD_ONE,
    ADDRESS,
    CAPTURE_IMPLICIT,
    CAPTURE_INVALIDATED,
    CAPTURE_UNJOINED,
    CAPTURE_UNSUPPORTED,
    CONTEXT_IS_DESTROYED,
    COUNT_LAUNCHES,
    HANDLE,
    ILLEGAL_ADDRESS,
    INVALID_HANDLE,
    INVALID_VALUE,
    NO_BINARY,
    NOT_FOUND,
    NOT_SUPPORTED,
    SIZE,
    CallError,
)

from cuda_kernels.emulator import loading

pytestmark = pytest.mark.usefixtures("order")
COUNT = ctypes.c_int(32)
BYTES = SIZE(128)


def refused(code, text, function, *arguments):
    """Assert that a call is refused with a code and a text."""
    with pytest.raises(CallError) as raised:
        function(*arguments)
    assert raised.value.code == code
    assert text in str(raised.value)


# --- handles ----------------------------------------------------------------------------------------


def test_destroyed_stream_is_refused(driver):
    stream = driver.stream()
    driver.cuStreamDestroy_v2(stream)
    refused(INVALID_HANDLE, "was destroyed", driver.cuStreamSynchronize, stream)
    assert driver.stream().value != stream.value


def test_destroyed_event_is_refused(driver):
    event = driver.event()
    refused(INVALID_HANDLE, "of kind: event", driver.cuStreamSynchronize, event)
    driver.cuEventDestroy_v2(event)
    refused(INVALID_HANDLE, "was destroyed", driver.cuEventRecord, event, None)


def test_destroyed_context_is_refused(driver):
    context = driver.made("cuCtxCreate_v2", 0, 0)
    stream = driver.stream()
    driver.cuCtxDestroy_v2(context)
    refused(CONTEXT_IS_DESTROYED, "was destroyed", driver.cuCtxSetCurrent, context)
    refused(INVALID_HANDLE, "was destroyed", driver.cuStreamSynchronize, stream)
    refused(INVALID_HANDLE, "gave out", driver.cuStreamSynchronize, HANDLE(12345))


def test_reset_context_has_the_same_handle_again(driver):
    before = driver.use(3)
    stream = driver.stream()
    driver.cuDevicePrimaryCtxReset_v2(3)
    refused(CONTEXT_IS_DESTROYED, "was destroyed", driver.cuCtxSynchronize)
    refused(INVALID_HANDLE, "was destroyed", driver.cuStreamQuery, stream)
    assert driver.use(3).value == before.value
    driver.cuCtxSynchronize()


def test_stream_of_another_context_is_refused(driver):
    driver.use(1)
    stream = driver.stream()
    driver.use(0)
    kernel, x = driver.kernel(), driver.allocate(128)
    refused(INVALID_HANDLE, "of the current context", driver.launch, kernel, stream, x, x, COUNT)


# --- order of work ----------------------------------------------------------------------------------


def add_one_twice(driver, first, second):
    """Two kernels that write the same bytes, in two streams."""
    kernel, x, y = driver.kernel(), driver.allocate(128), driver.allocate(128)
    driver.fill(x, [1.0] * 32)
    driver.launch(kernel, first, x, y, COUNT)
    driver.launch(kernel, second, x, y, COUNT)
    driver.cuCtxSynchronize()


def test_kernels_in_no_order_are_reported(driver, capfd):
    add_one_twice(driver, driver.stream(), driver.stream())
    (found,) = loading.unordered()
    assert (found.first, found.second, found.bytes) == ("kernel add_one", "kernel add_one", 128)
    assert found.first_stream != found.second_stream
    assert "no event or wait between" in capfd.readouterr().err


def test_kernels_of_one_stream_are_in_order(driver):
    stream = driver.stream()
    add_one_twice(driver, stream, stream)
    assert loading.unordered() == []


def test_kernels_that_only_read_the_same_bytes_need_no_order(driver):
    kernel, x = driver.kernel(), driver.allocate(128)
    driver.fill(x, [1.0] * 32)
    results = driver.allocate(128), driver.allocate(128)
    for result in results:
        driver.launch(kernel, driver.stream(), x, result, COUNT)
    driver.cuCtxSynchronize()
    assert [driver.floats(result, 1) for result in results] == [[2.0], [2.0]]
    assert loading.unordered() == []


def test_kernels_on_two_halves_of_an_allocation_need_no_order(driver):
    kernel, x, y = driver.kernel(), driver.allocate(128), driver.allocate(256)
    driver.fill(x, [1.0] * 32)
    driver.launch(kernel, driver.stream(), x, y, COUNT)
    driver.launch(kernel, driver.stream(), x, ADDRESS(y.value + 128), COUNT)
    driver.cuCtxSynchronize()
    assert driver.floats(y, 64) == [2.0] * 64
    assert loading.unordered() == []


def test_event_orders_a_kernel_and_a_fill(driver):
    kernel, x, y = driver.kernel(), driver.allocate(128), driver.allocate(128)
    driver.fill(x, [1.0] * 32)
    one, two, event = driver.stream(), driver.stream(), driver.event()
    driver.launch(kernel, one, x, y, COUNT)
    driver.cuEventRecord(event, one)
    driver.cuStreamWaitEvent(two, event, 0)
    driver.cuMemsetD8Async(y, 0, BYTES, two)
    driver.cuStreamSynchronize(two)
    assert driver.floats(y, 32) == [0.0] * 32
    assert loading.unordered() == []


def test_wait_of_the_host_orders_a_kernel_and_a_fill(driver):
    kernel, x, y = driver.kernel(), driver.allocate(128), driver.allocate(128)
    driver.fill(x, [1.0] * 32)
    one, two = driver.stream(), driver.stream()
    driver.launch(kernel, one, x, y, COUNT)
    driver.cuStreamSynchronize(one)
    driver.cuMemsetD8Async(y, 0, BYTES, two)
    driver.cuCtxSynchronize()
    assert loading.unordered() == []


def test_kernel_and_fill_in_no_order_are_reported(driver):
    kernel, x, y = driver.kernel(), driver.allocate(128), driver.allocate(128)
    driver.fill(x, [1.0] * 32)
    driver.launch(kernel, driver.stream(), x, y, COUNT)
    driver.cuMemsetD8Async(y, 0, BYTES, driver.stream())
    driver.cuCtxSynchronize()
    (found,) = loading.unordered()
    assert {"kernel add_one", "the fill of 128 bytes"} == {found.first, found.second}


def test_copy_does_not_wait_for_a_stream_that_does_not_block(driver):
    y = driver.allocate(128)
    driver.cuMemsetD8Async(y, 0, BYTES, driver.stream())
    driver.floats(y, 32)
    assert len(loading.unordered()) == 1


def test_copy_waits_for_a_stream_that_blocks(driver):
    y = driver.allocate(128)
    driver.cuMemsetD8Async(y, 0, BYTES, driver.made("cuStreamCreate", 0))
    assert driver.floats(y, 32) == [0.0] * 32
    assert loading.unordered() == []


def pinned(driver, count):
    """Pinned memory as an array of floats, zeroed, and its address."""
    address = driver.made("cuMemHostAlloc", SIZE(4 * count), 0)
    values = (ctypes.c_float * count).from_address(address.value)
    ctypes.memset(values, 0, 4 * count)
    return values, address


def test_pinned_memory_read_before_its_stream_finished(driver, order):
    """A copy to pinned memory returns before it is done: deferred, who reads too early sees the bytes before it."""
    kernel, x, stream = driver.kernel(), driver.allocate(128), driver.stream()
    driver.fill(x, [1.0] * 32)
    values, address = pinned(driver, 32)
    driver.launch(kernel, stream, x, x, COUNT)
    driver.cuMemcpyDtoHAsync_v2(address, x, BYTES, stream)
    assert values[0] == (2.0 if order == "eager" else 0.0)
    driver.cuStreamSynchronize(stream)
    assert list(values) == [2.0] * 32


def test_pinned_memory_written_before_its_stream_finished(driver, order):
    """A copy from pinned memory reads it when it is done: deferred, what is written too early arrives."""
    x, stream = driver.allocate(128), driver.stream()
    values, address = pinned(driver, 32)
    driver.cuMemcpyHtoDAsync_v2(x, address, BYTES, stream)
    values[0] = 5.0
    driver.cuStreamSynchronize(stream)
    assert driver.floats(x, 1) == [0.0 if order == "eager" else 5.0]


def test_host_memory_may_be_reused_after_a_copy_from_it(driver):
    x, stream = driver.allocate(128), driver.stream()
    values = (ctypes.c_float * 32)(*[3.0] * 32)
    driver.cuMemcpyHtoDAsync_v2(x, values, BYTES, stream)
    values[0] = 5.0
    driver.cuStreamSynchronize(stream)
    assert driver.floats(x, 1) == [3.0]


def test_host_function_runs_in_the_order_of_its_stream(driver):
    called, stream, event = [], driver.stream(), driver.event()
    function = ctypes.CFUNCTYPE(None, HANDLE)(lambda data: called.append(data))
    driver.cuLaunchHostFunc(stream, function, HANDLE(41))
    driver.cuEventRecord(event, stream)
    driver.cuEventSynchronize(event)
    driver.cuEventQuery(event)
    assert called == [41]


# --- faults -----------------------------------------------------------------------------------------


def test_copy_from_freed_memory_is_a_fault_that_stays(driver):
    x = driver.allocate(128)
    driver.cuMemFree_v2(x)
    refused(ILLEGAL_ADDRESS, "freed", driver.floats, x, 1)
    refused(ILLEGAL_ADDRESS, "freed", driver.cuCtxSynchronize)
    refused(ILLEGAL_ADDRESS, "freed", driver.allocate, 128)
    assert "freed" in loading.fault()
    loading.reset()
    driver.cuCtxSynchronize()
    assert loading.fault() == ""


def fail(driver):
    """A kernel that reads beyond its array, and a wait for it."""
    kernel, x = driver.kernel(), driver.allocate(64)
    driver.launch(kernel, None, x, x, COUNT)
    driver.cuCtxSynchronize()


def test_kernels_fault_names_instruction_thread_and_line(driver):
    refused(ILLEGAL_ADDRESS, "thread 16: ld.global.f32 %f1, [%rd4], line 19 of the PTX, in add_one", fail, driver)


def test_fault_breaks_its_device_alone(driver):
    driver.use(1)
    refused(ILLEGAL_ADDRESS, "0 bytes behind the end of an allocation of 64 bytes of device 1", fail, driver)
    refused(ILLEGAL_ADDRESS, "thread 16", driver.stream)
    driver.use(0)
    x = driver.allocate(128)
    driver.fill(x, [1.0] * 32)
    driver.launch(driver.kernel(), None, x, x, COUNT)
    assert driver.floats(x, 1) == [2.0]
    driver.use(1)
    refused(ILLEGAL_ADDRESS, "thread 16", driver.cuCtxSynchronize)


def test_reset_of_the_primary_context_ends_its_fault(driver):
    driver.use(1)
    refused(ILLEGAL_ADDRESS, "thread 16", fail, driver)
    driver.cuDevicePrimaryCtxReset_v2(1)
    driver.use(1)
    driver.cuCtxSynchronize()


def test_stream_of_a_broken_device_is_refused_from_another_one(driver):
    driver.use(1)
    stream = driver.stream()
    refused(ILLEGAL_ADDRESS, "thread 16", fail, driver)
    driver.use(0)
    refused(ILLEGAL_ADDRESS, "thread 16", driver.cuStreamSynchronize, stream)


def test_uninitialised_memory(driver):
    loading.behaviour(uninitialised=True)
    kernel, x, y = driver.kernel(), driver.allocate(128), driver.allocate(128)
    driver.cuMemcpyDtoDAsync_v2(y, x, BYTES, None)  # a copy alone is none

    def launch(source):
        driver.launch(kernel, None, source, x, COUNT)
        driver.cuCtxSynchronize()

    refused(719, "memory that nobody wrote", launch, y)
    loading.reset()
    driver.fill(x, [1.0] * 32)
    driver.cuMemcpyDtoDAsync_v2(y, x, BYTES, None)
    launch(y)
    one, two = driver.made("cuDevicePrimaryCtxRetain", 0), driver.made("cuDevicePrimaryCtxRetain", 1)
    driver.cuCtxSetCurrent(two)
    z = driver.allocate(128)
    driver.cuCtxSetCurrent(one)
    driver.cuMemcpyPeer(z, two, y, one, BYTES)
    driver.cuMemcpyPeer(x, one, z, two, BYTES)
    launch(x)
    z = driver.allocate(128)
    driver.cuMemsetD32_v2(z, 0, SIZE(32))
    launch(z)
    assert driver.floats(x, 1) == [1.0]


def test_uninitialised_memory_that_a_graph_filled(driver):
    loading.behaviour(uninitialised=True)
    kernel, x, stream = driver.kernel(), driver.allocate(128), driver.stream()
    graph = capture(driver, stream, lambda: driver.cuMemsetD8Async(x, 0, BYTES, stream))
    executable = driver.made("cuGraphInstantiateWithFlags", graph, ctypes.c_uint64(0))
    driver.cuGraphLaunch(executable, stream)
    driver.launch(kernel, stream, x, x, COUNT)
    driver.cuStreamSynchronize(stream)
    assert driver.floats(x, 1) == [1.0]


def test_pinned_memory_is_never_uninitialised(driver):
    loading.behaviour(uninitialised=True)
    values, address = pinned(driver, 32)
    driver.launch(driver.kernel(), None, ADDRESS(address.value), ADDRESS(address.value), COUNT)
    driver.cuCtxSynchronize()
    assert values[0] == 1.0


# --- devices ----------------------------------------------------------------------------------------


def attribute(driver, which, device):
    """A device's attribute."""
    return driver.made("cuDeviceGetAttribute", which, device, kind=ctypes.c_int).value


def test_each_device_is_its_own_target(driver):
    capabilities = [(attribute(driver, 75, device), attribute(driver, 76, device)) for device in range(4)]
    assert capabilities == [(9, 0), (8, 0), (10, 0), (12, 0)]
    assert [attribute(driver, 16, device) for device in range(4)] == [132, 108, 148, 170]
    assert [attribute(driver, 97, device) >> 10 for device in range(4)] == [227, 163, 227, 99]
    name = ctypes.create_string_buffer(100)
    driver.cuDeviceGetName(name, 100, 2)
    assert name.value == b"Software GPU sm_100"
    refused(101, "device must be from 0 to 3; got 4", driver.made, "cuDeviceGet", 4)


@pytest.mark.parametrize(
    ("target", "fitting"),
    [
        ("sm_80", [0, 1, 2, 3]),
        ("sm_90", [0, 2, 3]),
        ("sm_90a", [0]),
        ("sm_100", [2, 3]),
        ("sm_100a", [2]),
        ("sm_100f", [2]),
        ("sm_120a", [3]),
        ("sm_121", []),
    ],
)
def test_code_runs_on_devices_that_are_no_older(driver, target, fitting):
    text = ADD_ONE.replace("sm_75", target)
    for device in range(4):
        driver.use(device)
        if device in fitting:
            driver.kernel(text)
        else:
            refused(NO_BINARY, f"which device {device} is; got code for {target}", driver.kernel, text)


def test_cubin_runs_on_its_own_generation_alone(driver):
    core = pytest.importorskip("cuda.core")
    options = core.LinkerOptions(arch="sm_80")
    cubin = core.Linker(core.ObjectCode.from_ptx(ADD_ONE.encode()), options=options).link("cubin")
    driver.use(1)
    driver.made("cuLibraryLoadData", cubin.code, None, None, 0, None, None, 0)
    driver.use(0)
    with pytest.raises(CallError, match="a cubin must be for sm_90, which device 0 is; got one for sm_80"):
        driver.made("cuLibraryLoadData", cubin.code, None, None, 0, None, None, 0)


def test_variables_of_a_library_differ_between_devices(driver):
    library = driver.library_of(COUNT_LAUNCHES)
    kernel = driver.made("cuLibraryGetKernel", library, b"count_launches")
    found = []
    for device, launches in ((0, 1), (1, 2)):
        driver.use(device)
        for _ in range(launches):
            driver.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, None, None, None)
        size = SIZE()
        address = driver.made("cuLibraryGetGlobal", ctypes.byref(size), library, b"launches", kind=ADDRESS)
        value = ctypes.c_int()
        driver.cuMemcpyDtoH_v2(ctypes.byref(value), address, size)
        found.append((address.value, value.value))
    assert [value for _, value in found] == [8, 9]
    assert found[0][0] != found[1][0]


def test_memory_of_another_device_must_be_opened(driver):
    one = driver.use(1)
    zero = driver.use(0)
    kernel, x = driver.kernel(), driver.allocate(128)
    driver.fill(x, [1.0] * 32)
    driver.cuCtxSetCurrent(one)
    y, stream = driver.allocate(128), driver.stream()
    driver.cuCtxEnablePeerAccess(zero, 0)
    driver.launch(kernel, stream, x, y, COUNT)
    driver.cuStreamSynchronize(stream)
    assert driver.floats(y, 1) == [2.0]
    driver.cuCtxDisablePeerAccess(zero)

    def launch():
        driver.launch(kernel, stream, x, y, COUNT)
        driver.cuStreamSynchronize(stream)

    refused(ILLEGAL_ADDRESS, "device 0", launch)
    loading.reset()
    driver.cuMemcpyPeer(y, one, x, zero, BYTES)
    driver.cuCtxSynchronize()
    assert driver.floats(y, 1) == [1.0]


# --- graphs -----------------------------------------------------------------------------------------


def capture(driver, stream, work):
    """The graph of what `work` does."""
    driver.cuStreamBeginCapture_v2(stream, 0)
    work()
    graph = HANDLE()
    driver.cuStreamEndCapture(stream, ctypes.byref(graph))
    return graph


def instantiated(driver, graph):
    """An executable graph."""
    return driver.made("cuGraphInstantiateWithFlags", graph, ctypes.c_uint64(0))


def test_graph_runs_at_each_launch_with_its_branches(driver):
    kernel, x, y, z = driver.kernel(), *(driver.allocate(128) for _ in range(3))
    stream, side, fork, join = driver.stream(), driver.stream(), driver.event(), driver.event()

    def work():
        driver.launch(kernel, stream, x, y, COUNT)
        driver.cuEventRecord(fork, stream)
        driver.cuStreamWaitEvent(side, fork, 0)
        driver.launch(kernel, side, y, z, COUNT)
        driver.launch(kernel, stream, y, x, COUNT)
        driver.cuEventRecord(join, side)
        driver.cuStreamWaitEvent(stream, join, 0)

    driver.fill(x, [1.0] * 32)
    graph = capture(driver, stream, work)
    assert driver.floats(x, 1) == [1.0]
    executable = instantiated(driver, graph)
    driver.cuGraphLaunch(executable, stream)
    driver.cuGraphLaunch(executable, stream)
    driver.cuStreamSynchronize(stream)
    assert (driver.floats(x, 1), driver.floats(y, 1), driver.floats(z, 1)) == ([5.0], [4.0], [5.0])
    assert loading.unordered() == []
    count = SIZE()
    driver.cuGraphGetNodes(graph, None, ctypes.byref(count))
    assert count.value == 3
    driver.cuGraphDestroy(graph)
    driver.cuGraphLaunch(executable, stream)
    driver.cuStreamSynchronize(stream)
    assert driver.floats(x, 1) == [7.0]
    driver.cuGraphExecDestroy(executable)
    refused(INVALID_HANDLE, "was destroyed", driver.cuGraphLaunch, executable, stream)


def test_branches_that_write_the_same_bytes_are_reported(driver):
    y, stream, side, fork, join = (
        driver.allocate(128),
        driver.stream(),
        driver.stream(),
        driver.event(),
        driver.event(),
    )

    def work():
        driver.cuEventRecord(fork, stream)
        driver.cuStreamWaitEvent(side, fork, 0)
        driver.cuMemsetD8Async(y, 0, BYTES, side)
        driver.cuMemsetD8Async(y, 1, SIZE(64), stream)
        driver.cuEventRecord(join, side)
        driver.cuStreamWaitEvent(stream, join, 0)

    executable = instantiated(driver, capture(driver, stream, work))
    driver.cuGraphLaunch(executable, stream)
    driver.cuCtxSynchronize()
    assert len(loading.unordered()) == 1


class FillParameters(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS."""

    _fields_ = (
        ("dst", ADDRESS),
        ("pitch", SIZE),
        ("value", ctypes.c_uint),
        ("elementSize", ctypes.c_uint),
        ("width", SIZE),
        ("height", SIZE),
    )


def test_graph_made_of_nodes(driver):
    context, x, stream = driver.use(0), driver.allocate(128), driver.stream()
    graph = driver.made("cuGraphCreate", 0)
    bits = ctypes.c_uint.from_buffer(ctypes.c_float(4.0)).value
    fill = driver.made(
        "cuGraphAddMemsetNode",
        graph,
        None,
        SIZE(0),
        ctypes.byref(FillParameters(x.value, 0, bits, 4, 32, 1)),
        context,
    )
    kernel = driver.kernel()
    child = capture(driver, stream, lambda: driver.launch(kernel, stream, x, x, COUNT))
    driver.made("cuGraphAddChildGraphNode", graph, ctypes.byref(fill), SIZE(1), child)
    executable = instantiated(driver, graph)
    for _ in range(2):
        driver.cuGraphLaunch(executable, stream)
    driver.cuStreamSynchronize(stream)
    assert driver.floats(x, 32) == [5.0] * 32
    rows = FillParameters(x.value, 64, 0, 4, 8, 2)
    with pytest.raises(CallError, match="cuGraphAddMemsetNode: the software GPU fills one row; got 2 rows"):
        driver.made("cuGraphAddMemsetNode", graph, None, SIZE(0), ctypes.byref(rows), context)


@pytest.mark.parametrize("forbidden", ["synchronize", "allocate"])
def test_capture_forbids_some_calls_and_is_invalid_after_them(driver, forbidden):
    y, stream, graph = driver.allocate(128), driver.stream(), HANDLE()
    driver.cuStreamBeginCapture_v2(stream, 0)
    if forbidden == "synchronize":
        refused(CAPTURE_UNSUPPORTED, "captures", driver.cuStreamSynchronize, stream)
    else:
        refused(CAPTURE_UNSUPPORTED, "cuMemAlloc", driver.allocate, 128)
    refused(CAPTURE_INVALIDATED, "invalid since", driver.cuMemsetD8Async, y, 0, SIZE(1), stream)
    refused(CAPTURE_INVALIDATED, "invalid since", driver.cuStreamEndCapture, stream, ctypes.byref(graph))


def test_capture_must_wait_for_every_stream_that_took_part(driver):
    y, stream, side, graph, event = driver.allocate(128), driver.stream(), driver.stream(), HANDLE(), driver.event()
    driver.cuStreamBeginCapture_v2(stream, 0)
    driver.cuEventRecord(event, stream)
    driver.cuStreamWaitEvent(side, event, 0)
    driver.cuMemsetD8Async(y, 0, SIZE(1), side)
    refused(CAPTURE_UNJOINED, "never waits", driver.cuStreamEndCapture, stream, ctypes.byref(graph))


def test_default_stream_is_forbidden_while_a_blocking_stream_captures(driver):
    y, graph, blocking = driver.allocate(128), HANDLE(), driver.made("cuStreamCreate", 0)
    driver.cuStreamBeginCapture_v2(blocking, 2)
    refused(CAPTURE_IMPLICIT, "default stream", driver.cuMemsetD8Async, y, 0, SIZE(1), None)
    refused(CAPTURE_INVALIDATED, "invalid since", driver.cuStreamEndCapture, blocking, ctypes.byref(graph))


# --- memory -----------------------------------------------------------------------------------------


def test_pool_counts_what_it_gave(driver):
    pool, stream = driver.made("cuDeviceGetMemPool", 0), driver.stream()
    driver.cuCtxSynchronize()
    before = loading.allocations()
    address = driver.made("cuMemAllocAsync", SIZE(1000), stream, kind=ADDRESS)
    used, told = ctypes.c_uint64(), HANDLE()
    driver.cuMemPoolGetAttribute(pool, 7, ctypes.byref(used))
    driver.cuPointerGetAttribute(ctypes.byref(told), 17, address)
    assert used.value >= 1000
    assert told.value == pool.value
    driver.cuMemFreeAsync(address, stream)
    driver.cuStreamSynchronize(stream)
    assert loading.allocations() == before


def test_attributes_of_a_pointer(driver):
    driver.use(2)
    x = driver.allocate(128)
    inside = ADDRESS(x.value + 100)

    def told(which, kind):
        return driver.made("cuPointerGetAttribute", which, inside, kind=kind).value

    kind, device, start, size = told(2, ctypes.c_uint), told(9, ctypes.c_int), told(11, ADDRESS), told(12, SIZE)
    assert (kind, device, start, size) == (2, 2, x.value, 128)
    host = ctypes.create_string_buffer(8)
    outside = ADDRESS(ctypes.addressof(host))
    refused(INVALID_VALUE, "live memory of a device", driver.made, "cuPointerGetAttribute", 2, outside)
    unknown = (ctypes.c_uint * 1)(7)
    which, out = (ctypes.c_int * 1)(2), (HANDLE * 1)(ctypes.addressof(unknown))
    driver.cuPointerGetAttributes(1, which, out, outside)
    assert unknown[0] == 0


def test_memory_that_is_used_up_is_refused(driver):
    total, free = SIZE(), SIZE()
    driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    refused(2, f"device 0 has {total.value} bytes", driver.allocate, total.value)


# --- finding entry points ---------------------------------------------------------------------------


def found_for(driver, name, version):
    """What cuGetProcAddress gives a caller of a CUDA version."""
    found = HANDLE()
    driver.cuGetProcAddress_v2(name, ctypes.byref(found), version, ctypes.c_uint64(0), None)
    return found.value


@pytest.mark.parametrize(
    ("name", "version", "symbol"),
    [
        (b"cuInit", 12000, "cuInit"),
        (b"cuMemAlloc", 12000, "cuMemAlloc_v2"),
        (b"cuCtxCreate", 12000, "cuCtxCreate_v3"),
        (b"cuCtxCreate", 13000, "cuCtxCreate_v4"),
        (b"cuGraphGetEdges", 12020, "cuGraphGetEdges"),
        (b"cuGraphGetEdges", 12030, "cuGraphGetEdges_v2"),
        (b"cuGraphInstantiate", 12000, "cuGraphInstantiateWithFlags"),
    ],
)
def test_entry_points_are_those_of_the_callers_version(driver, name, version, symbol):
    wanted = ctypes.cast(getattr(loading.driver(), symbol), HANDLE).value
    assert found_for(driver, name, version) == wanted


def test_missing_entry_point_is_not_found(driver):
    refused(NOT_FOUND, "cuTexRefCreate", found_for, driver, b"cuTexRefCreate", 13000)


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute with an int."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16))


class LaunchConfiguration(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("shapes", ctypes.c_uint * 6),
        ("shared", ctypes.c_uint),
        ("stream", HANDLE),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("count", ctypes.c_uint),
    )


@pytest.mark.parametrize(("attribute", "value"), [(2, 1), (4, 2)])
def test_cooperative_launch_and_cluster_are_refused(driver, attribute, value):
    kernel, x = driver.kernel(), driver.allocate(128)
    driver.fill(x, [1.0] * 32)
    one = LaunchAttribute(attribute, 0, (value, 1, 1))
    configuration = LaunchConfiguration((1, 1, 1, 32, 1, 1), 0, None, ctypes.pointer(one), 1)
    values = (HANDLE * 3)(*(ctypes.addressof(value) for value in (x, x, COUNT)))
    text = f"the software GPU runs no clusters and nothing cooperative; got launch attribute {attribute}"
    refused(NOT_SUPPORTED, text, driver.cuLaunchKernelEx, ctypes.byref(configuration), kernel, values, None)
    one.id = 8  # a priority changes nothing
    driver.cuLaunchKernelEx(ctypes.byref(configuration), kernel, values, None)
    assert driver.floats(x, 1) == [2.0]
