"""Faults of the past: wrong numbers, or an error that said something other than what was wrong."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

import cuda_kernels
from cuda_kernels import plans
from cuda_kernels.emulator import loading, programs

cuda = pytest.importorskip("numba.cuda")

F = np.float32
WRITE = "__global__ void write(int* a, int n) { a[threadIdx.x] = n; }"


def described(address, shape=(4, 32), typestr="<f4"):
    """An array that offers a CUDA array interface alone."""
    interface = {"shape": shape, "typestr": typestr, "data": (address, False), "version": 3}
    return SimpleNamespace(__cuda_array_interface__=interface)


@pytest.fixture
def x():
    return cuda.to_device(np.ones((4, 32), F))


def test_a_wrong_address_has_the_name_of_its_argument_with_a_plan_too(x):
    plans.PLANS.forget()
    good, wrong = described(x.device_ctypes_pointer.value), described(0x1000)
    for _ in range(2):
        with pytest.raises(ValueError, match="dy must point to the memory of a device; got address 0x1000"):
            cuda_kernels.activation_grad("relu", wrong, x)
        with pytest.raises(ValueError, match="x must point to the memory of a device; got address 0x1000"):
            cuda_kernels.activation_grad("relu", x, wrong)
        cuda_kernels.activation_grad("relu", good, x)
        cuda_kernels.activation("relu", good)


def test_a_call_after_a_fault_does_not_blame_its_array(x):
    """The driver then refuses every call, even the question which device memory lies on."""
    cuda_kernels.activation("relu", x)
    too_long = described(x.device_ctypes_pointer.value, (4096, 32))
    with pytest.raises(Exception, match="ILLEGAL_ADDRESS"):
        cuda_kernels.activation("relu", too_long).copy_to_host()
    with pytest.raises(RuntimeError, match="the CUDA driver refused a call: CUDA_ERROR_ILLEGAL_ADDRESS"):
        cuda_kernels.activation("relu", x)
    loading.reset()
    assert cuda_kernels.activation("relu", x).copy_to_host().all()


def test_bytes_in_the_other_order_are_refused():
    """NumPy calls them float32 too; the kernels read 4.6e-41 for 1."""
    swapped = cuda.to_device(np.ones((4, 32), ">f4").view("<f4"))
    for _ in range(2):
        with pytest.raises(TypeError, match="x must have its bytes in the order of the machine; got '>f4'"):
            cuda_kernels.activation("relu", described(swapped.device_ctypes_pointer.value, typestr=">f4"))


@pytest.mark.parametrize("size", [2**31, 2**32 + 1, 2**70])
def test_sizes_of_a_launch_do_not_lose_their_upper_bits(size):
    """2**32 + 1 blocks once were one."""
    arguments = [programs.Unwritten((32,), np.int32), 7]
    for grid, block, shared, name in ((size, 32, 0, "grid"), (1, (32, size), 0, "block"), (1, 32, size, "shared")):
        with pytest.raises(ValueError, match=f"{name} must be .* to 2147483647; got .*{size}"):
            programs.run(WRITE, "write", grid, block, arguments, shared=shared)
    assert (programs.run(WRITE, "write", 1, 32, arguments).arrays[0] == 7).all()


@pytest.mark.parametrize("size", ["9" * 14, "9" * 30])
def test_scratch_memory_that_no_machine_has(size, run, tmp_path):
    np.save(tmp_path / "x.npy", np.ones(32, F))
    (tmp_path / "k.cu").write_text("__global__ void k(float* y, char* s) {}")
    words = ["check", "--op", "relu", "--input", tmp_path / "x.npy", "--cuda", tmp_path / "k.cu", "--entry", "k"]
    words += ["--grid", "1", "--block", "1", "--argument", "y", "--argument", f"scratch:{size}"]
    code, out, err = run(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"--argument scratch must fit into memory; got 'scratch:{size}'" in err


def test_numbers_are_what_the_parameter_is():
    """A 1 for a float was once the float with the bits of 1, and 2.5 for an int the int with those of 2.5."""
    source = "__global__ void add(float* y, float f, double d, int n, bool b) { *y = f + float(d) + n + b; }"
    y = programs.Unwritten((1,), F)
    assert programs.run(source, "add", 1, 1, [y, 1, 2, 3, 1]).arrays[0] == 7
    assert programs.run(source, "add", 1, 1, [y, 1.5, np.float64(2), -3, 0]).arrays[0] == 0.5
    with pytest.raises(TypeError, match=r"arguments\[3\] must be an integer, as the parameter is; got 2.5"):
        programs.run(source, "add", 1, 1, [y, 1, 2, 2.5, 1])
    with pytest.raises(ValueError, match=r"arguments\[1\] must fit into a float of 4 bytes; got 1.5e\+300"):
        programs.run(source, "add", 1, 1, [y, 1.5e300, 2, 2, 1])
    with pytest.raises(ValueError, match=r"arguments\[2\] must fit into a float of 8 bytes"):
        programs.run(source, "add", 1, 1, [y, 1, 10**400, 2, 1])


def test_kernels_of_several_threads_run_one_after_the_other():
    """They once mixed up their counters, and left the settings of the first one behind."""
    before, failures = loading.settings(), []
    source = """__global__ void sum(const int* x, int* y, int n) {
        int sum = 0;
        for (int i = 0; i < 3000; i++) sum += x[i % 4];
        y[threadIdx.x] = sum + n;
    }"""
    ptx, entry = programs.compile_cuda(source, "sum", "sm_90")

    def work(blocks):
        try:
            for _ in range(15):
                ran = programs.run(ptx, entry, blocks, 32, [np.ones(4, np.int32), np.zeros(32, np.int32), blocks])
                assert (ran.arrays[1] == 3000 + blocks).all()
                assert ran.counters.blocks == blocks
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(blocks,)) for blocks in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    assert loading.settings() == before


def test_threads_read_the_counters_while_others_run():
    """The driver's text was once read while it was written anew."""
    failures = []

    def ask():
        try:
            for _ in range(200):
                loading.counted()
        except BaseException as error:
            failures.append(error)

    programs.run(WRITE, "write", 1, 32, [programs.Unwritten((32,), np.int32), 7])
    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
