"""What the driver refuses, as a real one does: memory that is not its own, attributes that do not exist, limits."""

import ctypes

import numpy as np
import pytest
from driver import ADD_ONE, ADDRESS, HANDLE, INVALID_VALUE, SIZE, CallError

from cuda_kernels.emulator import driver_calls, loading

CONTEXT_IS_DESTROYED, UNKNOWN = 709, 999
KILOBYTE = 1024


def refused(code, text, function, *arguments):
    """Assert that a call is refused with a code and a text."""
    with pytest.raises(CallError, match=text) as raised:
        function(*arguments)
    assert raised.value.code == code


# --- memory of the host -------------------------------------------------------------------------------


def registered(driver, size=4096):
    """A NumPy array of the caller, full of ones, whose memory kernels may use."""
    array = np.ones(size // 4, np.float32)
    driver.cuMemHostRegister_v2(HANDLE(array.ctypes.data), SIZE(array.nbytes), 0)
    return array


@pytest.mark.parametrize("free", ["cuMemFree_v2", "cuMemFreeHost", "cuMemFreeAsync"])
def test_registered_memory_is_the_callers_and_is_not_freed(driver, free):
    array = registered(driver)
    stream = (HANDLE(0),) if free == "cuMemFreeAsync" else ()
    refused(INVALID_VALUE, "registered host memory", getattr(driver, free), ADDRESS(array.ctypes.data), *stream)
    driver.cuCtxSynchronize()
    assert (array == 1).all()
    driver.cuMemHostUnregister(HANDLE(array.ctypes.data))


def test_each_kind_of_memory_has_its_own_free(driver):
    pinned, on_device = driver.made("cuMemHostAlloc", SIZE(64), 0), driver.allocate(64)
    refused(INVALID_VALUE, "dptr must be memory of a device; .*pinned", driver.cuMemFree_v2, ADDRESS(pinned.value))
    refused(INVALID_VALUE, "p must be pinned host memory; ", driver.cuMemFreeHost, HANDLE(on_device.value))
    driver.cuMemFreeHost(pinned)
    driver.cuMemFree_v2(on_device)


def test_variable_of_a_module_is_not_freed(driver):
    text = ".version 8.0\n.target sm_75\n.address_size 64\n.visible .global .align 4 .u32 launches = 7;\n"
    library, address = driver.library_of(text), ADDRESS()
    driver.cuLibraryGetGlobal(ctypes.byref(address), None, library, b"launches")
    refused(INVALID_VALUE, "dptr must be memory of a device; .*variable", driver.cuMemFree_v2, address)
    driver.cuLibraryUnload(library)


def test_memory_that_is_no_longer_registered_leaves_nothing_behind(driver):
    """A later allocation that covers the address is one allocation, from its begin to its end."""
    array = np.ones(1024, np.float32)
    middle = array.ctypes.data + 2048
    driver.cuMemHostRegister_v2(HANDLE(middle), SIZE(1024), 0)
    driver.cuMemHostUnregister(HANDLE(middle))
    driver.cuMemHostRegister_v2(HANDLE(array.ctypes.data), SIZE(array.nbytes), 0)
    x, y = ADDRESS(middle), driver.allocate(128)
    driver.launch(driver.kernel(), None, x, y, ctypes.c_uint32(32))
    driver.cuCtxSynchronize()
    assert driver.floats(y, 32) == [2.0] * 32
    driver.cuMemHostUnregister(HANDLE(array.ctypes.data))
    refused(INVALID_VALUE, "live memory", driver.made, "cuPointerGetAttribute", 2, ADDRESS(middle))


def test_registered_ranges_do_not_overlap(driver):
    array = registered(driver)
    half = HANDLE(array.ctypes.data + 2048)
    refused(712, "p must not be registered", driver.cuMemHostRegister_v2, half, SIZE(64), 0)
    driver.cuMemHostUnregister(HANDLE(array.ctypes.data))
    driver.cuMemHostRegister_v2(half, SIZE(64), 0)
    refused(712, "p must not", driver.cuMemHostRegister_v2, HANDLE(array.ctypes.data), SIZE(array.nbytes), 0)
    driver.cuMemHostUnregister(half)


def test_strided_view_is_read_after_the_work(driver):
    loading.behaviour(deferred=True)
    x = driver_calls.to_device(np.ones((4, 8), np.float32))
    kernel = driver_calls.Kernel(ADD_ONE, "add_one")
    address = ADDRESS(x.ctypes.data)
    kernel.launch((1, 1, 1), (32, 1, 1), 0, [address, address, ctypes.c_uint32(32)])
    np.testing.assert_array_equal(driver_calls.to_host(x[:, ::2]), np.full((4, 4), 2, np.float32))


# --- faults -------------------------------------------------------------------------------------------

#: A copy of one number of 4 bytes, from an address to another.
COPY = """
.version 8.0
.target sm_75
.address_size 64
.visible .entry invalid_copy(.param .u64 x, .param .u64 y) {
    .reg .b32 %r<2>;
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [x];
    ld.param.u64 %rd2, [y];
    ld.global.u32 %r1, [%rd1];
    st.global.u32 [%rd2], %r1;
    ret;
}
"""


@pytest.mark.parametrize(
    ("offset", "code", "text"), [(1, 716, "misaligned access"), (1 << 30, 700, "invalid read"), (None, 719, "race")]
)
def test_code_of_a_fault(driver, offset, code, text):
    x = driver.allocate(64)
    if offset is None:  # every thread writes its own number to the same place of shared memory
        source = COPY.replace("    ret;", "    mov.u32 %r1, %tid.x;\n    st.shared.u32 [s], %r1;\n    ret;").replace(
            "    .reg .b32", "    .shared .align 4 .b8 s[4];\n    .reg .b32", 1
        )
    else:
        source = COPY
    kernel = driver.kernel(source, b"invalid_copy")

    def run():
        driver.launch(kernel, None, ADDRESS(x.value + (offset or 0)), x)
        driver.cuCtxSynchronize()

    refused(code, text, run)


def test_code_that_cannot_be_read_is_a_fault(driver):
    broken = COPY.replace("%r<2>", "%r<99999999999999999999>")
    refused(218, "PTX, line 6: not a number", driver.library_of, broken)


def test_no_exception_leaves_an_entry_point(driver):
    """More bytes than there are addresses: the driver cannot keep a copy of them."""
    x, host = driver.allocate(64), (ctypes.c_uint8 * 64)()
    refused(UNKNOWN, "length|vector", driver.cuMemcpyHtoDAsync_v2, x, host, SIZE(2**64 - 1), HANDLE(0))
    driver.cuMemcpyHtoD_v2(x, host, SIZE(64))


# --- primary contexts ---------------------------------------------------------------------------------


def test_primary_context_keeps_its_handle(driver):
    """Whoever retained it before somebody reset it goes on once it is retained again; what was in it is gone."""
    before = driver.use(3)
    stream = driver.stream()
    own = driver.made("cuStreamCreate", 1)
    memory, kernel = driver.allocate(128), driver.kernel()
    driver.cuStreamSynchronize(HANDLE(2))
    driver.cuDevicePrimaryCtxReset_v2(3)
    refused(CONTEXT_IS_DESTROYED, "context .* was destroyed", driver.cuCtxPushCurrent_v2, before)
    after = driver.made("cuDevicePrimaryCtxRetain", 3)
    assert after.value == before.value
    driver.cuCtxPushCurrent_v2(before)
    for old in (stream, own):
        refused(400, "was destroyed", driver.cuStreamSynchronize, old)
    refused(INVALID_VALUE, "live memory", driver.cuMemFree_v2, memory)
    driver.cuStreamSynchronize(HANDLE(2))  # a thread's default stream, of the context as it is now
    x = driver.allocate(128)
    driver.fill(x, [1.0] * 32)
    driver.launch(kernel, HANDLE(2), x, x, ctypes.c_uint32(32))
    assert driver.floats(x, 32) == [2.0] * 32
    driver.cuCtxPopCurrent_v2(None)


def test_reset_of_a_primary_context_releases_nothing(driver):
    """Those that retained it still have to release it, and may."""
    driver.made("cuDevicePrimaryCtxRetain", 3)
    driver.cuDevicePrimaryCtxReset_v2(3)
    driver.cuDevicePrimaryCtxRelease_v2(3)
    driver.made("cuDevicePrimaryCtxRetain", 3)


def test_variables_of_code_start_again_after_a_reset(driver):
    driver.use(3)
    text = ".version 8.0\n.target sm_75\n.address_size 64\n.visible .global .align 4 .u32 launches = 7;\n"
    library = driver.library_of(text)

    def variable():
        address, value = ADDRESS(), ctypes.c_uint32()
        driver.cuLibraryGetGlobal(ctypes.byref(address), None, library, b"launches")
        driver.cuMemcpyDtoH_v2(ctypes.byref(value), address, SIZE(4))
        return value.value, address

    value, address = variable()
    driver.cuMemsetD8_v2(address, 1, SIZE(4))
    assert (value, variable()[0]) == (7, 0x01010101)
    driver.cuDevicePrimaryCtxReset_v2(3)
    driver.made("cuDevicePrimaryCtxRetain", 3)
    assert variable()[0] == 7


# --- attributes and limits ----------------------------------------------------------------------------

#: Uses what a launch adds to 1024 bytes of shared memory.
SHARED = """
.version 8.0
.target sm_75
.address_size 64
.extern .shared .align 16 .b8 more[];
.visible .entry shared_memory() DIRECTIVES {
    .shared .align 16 .b8 mine[1024];
    .reg .b32 %r<2>;
    mov.u32 %r1, 0;
    atom.shared.exch.b32 %r1, [mine], %r1;
    atom.shared.exch.b32 %r1, [more], %r1;
    ret;
}
"""
MAX_THREADS, MAX_DYNAMIC, CARVEOUT, CLUSTER_WIDTH = 0, 8, 9, 11


def shared_kernel(driver, directives=""):
    """The kernel of `SHARED`, with directives of its entry."""
    return driver.kernel(SHARED.replace("DIRECTIVES", directives), b"shared_memory")


def launch(driver, kernel, shared=4, block=(1, 1, 1)):
    driver.cuLaunchKernel(kernel, 1, 1, 1, *block, shared, None, None, None)
    driver.cuCtxSynchronize()


def test_attribute_of_a_device_that_there_is_not(driver):
    for number in (0, 162, 1000):
        refused(INVALID_VALUE, f"attribute {number} of devices", driver.made, "cuDeviceGetAttribute", number, 0)


def test_every_attribute_of_cuda_h_has_a_value(driver):
    names = pytest.importorskip("cuda.bindings.driver")
    known = [one for one in names.CUdevice_attribute if not one.name.endswith("_MAX")]
    assert len(known) > 100
    values = {one.name[20:]: driver.made("cuDeviceGetAttribute", int(one), 0, kind=ctypes.c_int).value for one in known}
    assert values["COMPUTE_CAPABILITY_MAJOR"] == 9
    assert values["CLUSTER_LAUNCH"] == values["COOPERATIVE_LAUNCH"] == values["TENSOR_MAP_ACCESS_SUPPORTED"] == 0
    assert values["SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO"] == 2
    kernel = shared_kernel(driver)
    for one in names.CUfunction_attribute:
        if not one.name.endswith("_MAX"):
            driver.made("cuFuncGetAttribute", int(one), kernel, kind=ctypes.c_int)


def test_attribute_of_a_function_that_there_is_not(driver):
    kernel = shared_kernel(driver)
    for number in (-1, 18, 99):
        refused(INVALID_VALUE, f"attribute {number} of functions", driver.made, "cuFuncGetAttribute", number, kernel)
        refused(INVALID_VALUE, f"attribute {number} of functions", driver.cuFuncSetAttribute, kernel, number, 1)
    refused(INVALID_VALUE, "attribute 0 of functions .* set", driver.cuFuncSetAttribute, kernel, MAX_THREADS, 1)
    refused(801, "runs no clusters; got attribute 11", driver.cuFuncSetAttribute, kernel, CLUSTER_WIDTH, 2)
    driver.cuFuncSetAttribute(kernel, CARVEOUT, 50)
    assert driver.made("cuFuncGetAttribute", CARVEOUT, kernel, kind=ctypes.c_int).value == 50
    refused(INVALID_VALUE, "from -1 to 100; got 101", driver.cuFuncSetAttribute, kernel, CARVEOUT, 101)


def test_dynamic_shared_memory_must_be_asked_for(driver):
    kernel, usual, most = shared_kernel(driver), 47 * KILOBYTE, 226 * KILOBYTE
    assert driver.made("cuFuncGetAttribute", MAX_DYNAMIC, kernel, kind=ctypes.c_int).value == usual
    launch(driver, kernel, usual)
    text = f"sharedMemBytes must be from 0 to {usual}; got {usual + 1}"
    refused(INVALID_VALUE, text, launch, driver, kernel, usual + 1)
    text = f"value must be from 0 to {most}; got {most + 1}"
    refused(INVALID_VALUE, text, driver.cuFuncSetAttribute, kernel, MAX_DYNAMIC, most + 1)
    driver.cuFuncSetAttribute(kernel, MAX_DYNAMIC, most)
    launch(driver, kernel, most)
    refused(INVALID_VALUE, "to 232448; got 232449", launch, driver, kernel, most + 1)
    driver.cuFuncSetAttribute(kernel, MAX_DYNAMIC, 100 * KILOBYTE)
    launch(driver, kernel, 100 * KILOBYTE)  # the kernel's own 1024 bytes are not part of it


def test_threads_that_a_kernel_says_it_is_made_for(driver):
    kernel = shared_kernel(driver, ".maxntid 8, 4, 2")
    assert driver.made("cuFuncGetAttribute", MAX_THREADS, kernel, kind=ctypes.c_int).value == 64
    for block in ((64, 1, 1), (1, 1, 64)):
        launch(driver, kernel, block=block)
    refused(INVALID_VALUE, "at most 64 threads.*maxntid; got 65", launch, driver, kernel, 4, (65, 1, 1))


def test_block_that_a_kernel_requires(driver):
    kernel = shared_kernel(driver, ".reqntid 32, 2\n.minnctapersm 1")
    launch(driver, kernel, block=(32, 2, 1))
    assert driver.made("cuFuncGetAttribute", MAX_THREADS, kernel, kind=ctypes.c_int).value == 64
    for block in ((64, 1, 1), (32, 1, 1), (32, 2, 2)):
        text = rf"block must be \(32, 2, 1\), .*reqntid; got \({block[0]}, {block[1]}, {block[2]}\)"
        refused(INVALID_VALUE, text, launch, driver, kernel, 4, block)


def test_functions_of_the_threads_default_stream_are_not_there(driver):
    entry, status = HANDLE(), ctypes.c_int()
    arguments = (b"cuMemcpyHtoDAsync", ctypes.byref(entry), 13000, ctypes.c_uint64(2), ctypes.byref(status))
    text = "no cuMemcpyHtoDAsync of CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM"
    refused(500, text, driver.cuGetProcAddress_v2, *arguments)
    assert status.value == 1 and not entry.value
