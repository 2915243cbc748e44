"""The simulator itself: what a kernel does wrong raises, or shows when the threads run in the other order."""

import re
from collections import namedtuple

import numpy as np
import pytest

from cuda_kernels import simt, simulator
from cuda_kernels.simt import cuda, load_words, store_words
from cuda_kernels.simulator import Pointer, launch

pytestmark = pytest.mark.check

SHARED_FILL = 0xA5A5A5A5


def run(kernel, *arguments, block=(32, 1, 1), grid=(1, 1, 1), order="forward"):
    launch(kernel, grid, block, arguments, order=order)


def words(count):
    """Zeros from an address divisible by 16."""
    buffer = np.zeros(count + 4, np.uint32)
    start = -buffer.ctypes.data // 4 % 4
    return buffer[start : start + count]


def test_kernels_are_simulated():
    assert simt.SIMULATED and simt.cuda is simulator.cuda


@pytest.mark.parametrize("index", [8, -1, 2**40])
@pytest.mark.parametrize("access", ["read", "write", "atomic"])
def test_an_index_outside_the_array_raises(index, access):
    def kernel(p):
        if access == "read":
            p[index]
        elif access == "write":
            p[index] = 1
        else:
            simt.atomic_max(p, index, 1)

    kind = "store" if access == "write" else "load"
    said = rf"^thread 0 of block 0: out of bounds: {kind} of p\[{index}\], which has 8 elements$"
    with pytest.raises(IndexError, match=said):
        run(kernel, Pointer(np.zeros(8, np.int32)), block=(1,))


def test_a_wrong_access_is_told_with_thread_block_and_the_field_of_the_argument():
    record = namedtuple("record", "data scale")

    def kernel(record, n):
        if (cuda.threadIdx.x, cuda.threadIdx.y, cuda.blockIdx.x) == (3, 2, 1):
            load_words(record.scale, n)

    said = r"^thread \(3, 2\) of block 1: out of bounds: load of record.scale\[8\] to \[11\], which has 10 elements$"
    with pytest.raises(IndexError, match=said):
        run(kernel, record(Pointer(words(8)), Pointer(words(10))), 8, block=(4, 3, 1), grid=(2,))


@pytest.mark.parametrize(
    ("use", "error", "said"),
    [
        (lambda p: p + p, TypeError, "p is a whole array; a thread computes with single elements: p[i]"),
        (lambda p: 2 * p, TypeError, "p is a whole array"),
        (lambda p: np.float32(2) * p, TypeError, "p is a whole array"),
        (np.abs, TypeError, "p is a whole array"),
        (float, TypeError, "p is a whole array"),
        (lambda p: p < 3, TypeError, "p is a whole array"),
        (lambda p: 1 if p else 0, TypeError, "p is a whole array"),
        (simt.magnitude, TypeError, "p is a whole array; a thread computes with single elements: p[i]"),
        (simt.as_f32, TypeError, "p is a whole array"),
        (lambda p: p.__setitem__(0, p), TypeError, "p is a whole array"),
        (lambda p: cuda.shared.array(4, np.float32).__setitem__(0, p), TypeError, "p is a whole array"),
        (lambda p: cuda.shfl_xor_sync(0xFFFFFFFF, p, 1), TypeError, "p is a whole array"),
        (len, TypeError, "p has no len() in a kernel"),
        (list, TypeError, "p cannot be looped over"),
        (lambda p: p.shape, AttributeError, "p has no .shape in a kernel, only elements: p[i]"),
        (lambda p: p[0, 1], TypeError, "p is flat, its index one integer: row * columns + column; got (0, 1)"),
        (lambda p: p[0:2], TypeError, "p is flat"),
        (lambda p: p[0.0], TypeError, "p is flat"),
        (lambda p: p[p], TypeError, "p is flat, its index one integer: row * columns + column; got p"),
    ],
)
def test_what_a_kernel_does_with_a_whole_array_is_refused_by_its_name(use, error, said):
    def kernel(p):
        use(p)

    with pytest.raises(error, match=re.escape(f"thread 0 of block 0: {said}")):
        run(kernel, Pointer(np.zeros(8, np.float32)), block=(1,))


@pytest.mark.parametrize("cause", [TypeError("of the cause"), KeyError("of the cause")])
def test_a_kernel_s_own_error_and_its_cause_are_shown(cause):
    def kernel():
        try:
            raise cause
        except (TypeError, KeyError) as error:
            raise ValueError("bad tile") from error

    with pytest.raises(ValueError, match=r"^thread 0 of block 0: bad tile$") as raised:
        run(kernel, block=(1,))
    assert raised.value.__cause__ is cause


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda: cuda.shfl_down_sync, "no cuda.shfl_down_sync; cuda has atomic, blockDim, "),
        (lambda: cuda.atomic.min, "no cuda.atomic.min; cuda.atomic has add, max here"),
        (lambda: cuda.shared.zeros, "no cuda.shared.zeros; cuda.shared has array here"),
        (lambda: cuda.local.zeros, "no cuda.local.zeros; cuda.local has array here"),
        (lambda: cuda.threadIdx.w, "no cuda.threadIdx.w; cuda.threadIdx has x, y, z here"),
    ],
)
def test_what_the_simulator_lacks_is_refused_by_name(use, said):
    with pytest.raises(AttributeError, match=re.escape(f"thread 0 of block 0: the simulator has {said}")):
        run(lambda: use(), block=(1,))


@pytest.mark.parametrize(("index", "error"), [(0, None), (4, None), (2, ValueError), (6, IndexError), (-4, IndexError)])
def test_vector_accesses_must_be_aligned_and_inside(index, error):
    source, target = words(8), words(8)
    source[:] = range(8)

    def kernel(source, target):
        store_words(target, index, load_words(source, index))

    if error is None:
        run(kernel, Pointer(source), Pointer(target), block=(1,))
        assert target.tolist() == [i if index <= i < index + 4 else 0 for i in range(8)]
        return
    with pytest.raises(error):
        run(kernel, Pointer(source), Pointer(target), block=(1,))


def test_vector_access_from_a_misaligned_base_raises():
    with pytest.raises(ValueError, match="not aligned"):
        run(lambda p: load_words(p, 0), Pointer(words(8)[1:]), block=(1,))


def test_arrays_must_be_contiguous():
    with pytest.raises(ValueError, match="contiguous"):
        Pointer(np.zeros((4, 4))[:, ::2])


@pytest.mark.parametrize("order", ["forward", "backward"])
def test_a_thread_that_misses_a_barrier_raises(order):
    def kernel():
        if cuda.threadIdx.x != 5:
            cuda.syncthreads()

    with pytest.raises(RuntimeError, match=r"31 of 32 threads .* every thread of a block must reach every barrier"):
        run(kernel, order=order)


def test_threads_at_different_barriers_raise():
    def kernel():
        if cuda.threadIdx.x < 16:
            cuda.syncthreads()
        else:
            cuda.shfl_xor_sync(0xFFFFFFFF, 1, 1)

    with pytest.raises(RuntimeError, match="shuffle and syncthreads"):
        run(kernel)


@pytest.mark.parametrize("order", ["forward", "backward"])
def test_those_who_wait_are_counted_over_the_whole_block(order):
    def kernel():
        if cuda.threadIdx.x % 32 < 8:
            cuda.syncthreads()

    with pytest.raises(RuntimeError, match=r"^64 of 256 threads of block \(0, 0, 0\) wait at syncthreads"):
        run(kernel, block=(256,), order=order)


def test_a_shuffle_that_some_threads_miss_names_the_warp():
    def kernel():
        if cuda.threadIdx.x < 44:
            cuda.shfl_xor_sync(0xFFFFFFFF, 1, 1)

    with pytest.raises(RuntimeError, match=r"^12 of the 32 threads of warp 1 of block \(0, 0, 0\) wait at shuffle: "):
        run(kernel, block=(64,))


@pytest.mark.parametrize("distance", [32, -1])
def test_a_shuffle_reaches_the_own_warp_only(distance):
    with pytest.raises(ValueError, match="distance must be below 32"):
        run(lambda: cuda.shfl_xor_sync(0xFFFFFFFF, 1, distance), block=(64,))


def test_a_warp_that_misses_a_barrier_raises():
    def kernel():
        if cuda.threadIdx.x < 32:
            cuda.syncthreads()

    with pytest.raises(RuntimeError, match="32 of 64 threads"):
        run(kernel, block=(64,))


def test_a_shuffle_is_no_barrier_for_the_block():
    """The other warp's value is there in neither order: forward the second warp has not run, backward the first."""
    for order in ("forward", "backward"):
        out = np.zeros(64, np.uint32)

        def kernel(out):
            tile = cuda.shared.array(64, np.uint32)
            i = cuda.threadIdx.x
            tile[i] = i
            cuda.shfl_xor_sync(0xFFFFFFFF, i, 1)
            out[i] = tile[63 - i]

        run(kernel, Pointer(out), block=(64,), order=order)
        assert (out == SHARED_FILL).sum() == 32


def test_shared_memory_that_nobody_wrote_shows():
    out = np.zeros(32, np.uint32)

    def kernel(out):
        tile = cuda.shared.array(32, np.uint32)
        i = cuda.threadIdx.x
        if i % 2:
            tile[i] = i
        cuda.syncthreads()
        out[i] = tile[i]

    run(kernel, Pointer(out))
    assert out.tolist() == [i if i % 2 else SHARED_FILL for i in range(32)]


def test_shared_memory_belongs_to_a_block():
    out = np.zeros(4, np.uint32)

    def kernel(out):
        cell = cuda.shared.array(1, np.uint32)
        out[cuda.blockIdx.x] = cell[0]
        cell[0] = 7

    run(kernel, Pointer(out), block=(1,), grid=(4,))
    assert out.tolist() == [SHARED_FILL] * 4


@pytest.mark.parametrize("barrier", [False, True])
def test_a_race_shows_in_the_other_order(barrier):
    results = []
    for order in ("forward", "backward"):
        out = np.zeros(32, np.uint32)

        def kernel(out):
            tile = cuda.shared.array(32, np.uint32)
            i = cuda.threadIdx.x
            tile[i] = i
            if barrier:
                cuda.syncthreads()
            out[i] = tile[31 - i]

        run(kernel, Pointer(out), order=order)
        results.append(out.tolist())
    assert (results[0] == results[1]) is barrier
    assert barrier is (results[0] == list(range(31, -1, -1)))


@pytest.mark.parametrize("order", ["forward", "backward"])
@pytest.mark.parametrize("distance", [1, 2, 16])
def test_shuffles(distance, order):
    out = np.zeros(64, np.int64)

    def kernel(out):
        i = cuda.threadIdx.x
        first = cuda.shfl_xor_sync(0xFFFFFFFF, i, distance)
        out[i] = 100 * first + cuda.shfl_xor_sync(0xFFFFFFFF, first, 1)

    run(kernel, Pointer(out), block=(64,), order=order)
    assert out.tolist() == [100 * (i ^ distance) + (i ^ distance ^ 1) for i in range(64)]


def test_every_thread_of_every_block_runs_once():
    grid, block = (3, 2, 2), (4, 2, 3)
    out = np.zeros((2, 2, 3, 3, 2, 4), np.int32)

    def kernel(out):
        t, b = cuda.threadIdx, cuda.blockIdx
        assert (cuda.gridDim.x, cuda.gridDim.y, cuda.gridDim.z) == grid
        assert (cuda.blockDim.x, cuda.blockDim.y, cuda.blockDim.z) == block
        i = ((b.z * 2 + b.y) * 3 + b.x) * 24 + (t.z * 2 + t.y) * 4 + t.x
        cuda.atomic.add(out, i, 1)

    run(kernel, Pointer(out), grid=grid, block=block)
    assert (out == 1).all()


def test_atomics_give_the_old_value():
    cell, old = np.zeros(1, np.int32), np.zeros(4, np.int32)

    def kernel(cell, old):
        old[cuda.threadIdx.x] = cuda.atomic.max(cell, 0, [3, 1, 7, 5][cuda.threadIdx.x])

    run(kernel, Pointer(cell), Pointer(old), block=(4,))
    assert cell[0] == 7 and old.tolist() == [0, 3, 3, 7]


def test_an_error_in_a_thread_reaches_the_caller():
    def kernel():
        if cuda.threadIdx.x == 9:
            raise KeyError("mine")
        cuda.syncthreads()

    with pytest.raises(KeyError, match="mine"):
        run(kernel)
    run(lambda: cuda.syncthreads())  # and the simulator goes on
