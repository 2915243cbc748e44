"""The checks of the software GPU: for each a kernel that must be reported, and one nearly the same that must not be.

A report names what is wrong, the instruction, the thread, and the line of the PTX and of the source.
"""

import ctypes
import gc
import re

import numpy as np
import pytest
from ptx_kernels import SOURCE_LINE, fault_of, run, text_of, thread_in

from cuda_kernels.emulator import driver_calls, loading

WARP = {"threads": 32}
TWO_WARPS = {"threads": 64}


def wrong(name, body, said, instruction, thread=0, **how):
    """A body that must be reported: what is said, of which instruction and thread."""
    return pytest.param(body, said, instruction, thread, how, id=name)


def right(name, body, expected, **how):
    """A body that must run, and the words of its threads."""
    return pytest.param(body, expected, how, id=name)


def require_report(body, said, instruction, thread, how):
    """Run a body that must fail and compare the report."""
    report = fault_of(body, **how)
    assert said in report
    assert f": {instruction}, line " in report
    assert f", kernel.cu:{SOURCE_LINE}, in k" in report
    assert thread is None or thread_in(report) == thread
    line = int(re.search(r"line (\d+) of the PTX", report)[1])
    text = text_of(body, () if "threads" in how else [name for name in "abc" if name in how])
    assert instruction in text.splitlines()[line - 1]


def require_result(body, expected, how):
    """Run a body that is right."""
    assert list(run(body, **how)) == expected


# --- addresses --------------------------------------------------------------------------------------

NOWHERE = "mov.u64 %rd5, 0xFFFFFFFFFFFFFFF0; ld.global.u32 %d, [%rd5];"
ADDRESSES_WRONG = [
    wrong(
        "behind",
        "ld.global.u32 %d, [%in+8];",
        "invalid read of 4 bytes",
        "ld.global.u32 %d, [%in+8]",
        a=[1, 2],
        threads=1,
    ),
    wrong(
        "half behind",
        "ld.global.v4.u32 {%d, %r1, %r2, %r3}, [%in];",
        "0 bytes into arguments[2], 12 bytes",
        "ld.global.v4.u32 {%d, %r1, %r2, %r3}, [%in]",
        a=[1, 2, 3],
        threads=1,
    ),
    wrong(
        "far in the red zone",
        "ld.global.u32 %d, [%in+508];",
        "500 bytes behind the end of arguments[2], 8 bytes",
        "ld.global.u32 %d, [%in+508]",
        a=[1, 2],
        threads=1,
    ),
    wrong(
        "before",
        "st.global.u32 [%in+-4], %t;",
        "4 bytes before arguments[2], 8 bytes",
        "st.global.u32 [%in+-4], %t",
        a=[1, 2],
        threads=1,
    ),
    wrong(
        "one lane of many",
        "add.u64 %rd5, %in, %x; ld.global.u32 %d, [%rd5];",
        "invalid read of 4 bytes",
        "ld.global.u32 %d, [%rd5]",
        31,
        a=range(31),
        **WARP,
    ),
    wrong("null", "mov.u64 %rd5, 0; ld.global.u32 %d, [%rd5+16];", "a null pointer", "ld.global.u32 %d, [%rd5+16]"),
    wrong(
        "null, generic",
        "mov.u64 %rd5, 0; st.u32 [%rd5], %t;",
        "invalid write of 4 bytes at 0x0, a null pointer",
        "st.u32 [%rd5], %t",
    ),
    wrong("nowhere", NOWHERE, "in no allocation", "ld.global.u32 %d, [%rd5]"),
    wrong(
        "atomic",
        "atom.global.add.u32 %d, [%in+8], 1;",
        "invalid write of 4 bytes",
        "atom.global.add.u32 %d, [%in+8], 1",
        a=[1, 2],
        threads=1,
    ),
    wrong(
        "misaligned",
        "ld.global.u32 %d, [%in+2];",
        "misaligned access of 4 bytes",
        "ld.global.u32 %d, [%in+2]",
        a=[1, 2],
        threads=1,
    ),
    wrong(
        "misaligned vector",
        "ld.global.v2.u32 {%d, %r1}, [%in+4];",
        "misaligned access of 8 bytes",
        "ld.global.v2.u32 {%d, %r1}, [%in+4]",
        a=[1, 2, 3],
        threads=1,
    ),
    wrong(
        "misaligned in shared memory",
        "st.shared.u32 [buffer+1], 0;",
        "misaligned access of 4 bytes",
        "st.shared.u32 [buffer+1], 0",
    ),
    wrong(
        "beyond shared memory",
        "ld.shared.u32 %d, [buffer+1024];",
        "access beyond the 1024 bytes of shared memory",
        "ld.shared.u32 %d, [buffer+1024]",
    ),
    wrong(
        "beyond local memory",
        "ld.local.u32 %d, [loc+64];",
        "access beyond the 64 bytes of local memory",
        "ld.local.u32 %d, [loc+64]",
    ),
    wrong(
        "source of cp.async",
        "cp.async.ca.shared.global [%s], [%in+4], 8;",
        "misaligned access of 8 bytes",
        "cp.async.ca.shared.global [%s], [%in+4], 8",
        a=[1, 2, 3],
        threads=1,
    ),
    wrong(
        "behind, by cp.async",
        "cp.async.ca.shared.global [%s], [%in+8], 4;",
        "invalid read of 4 bytes",
        "cp.async.ca.shared.global [%s], [%in+8], 4",
        a=[1, 2],
        threads=1,
    ),
]
ADDRESSES_RIGHT = [
    right("the last word", "ld.global.u32 %d, [%in+4];", [2], a=[1, 2], threads=1),
    right("all lanes", "add.u64 %rd5, %in, %x; ld.global.u32 %d, [%rd5];", list(range(32)), a=range(32), **WARP),
    right(
        "a lane that does not take part",
        "add.u64 %rd5, %in, %x; setp.lt.u32 %p1, %t, 31; @%p1 ld.global.u32 %d, [%rd5];",
        [*range(31), 0],
        a=range(31),
        **WARP,
    ),
    right("bytes need no alignment", "ld.global.u8 %d, [%in+3];", [4], a=[0x04030201], threads=1),
    right(
        "a null pointer that nobody follows",
        "mov.u64 %rd5, 0; setp.ne.u64 %p1, %rd5, 0; @%p1 ld.global.u32 %d, [%rd5];",
        [0],
    ),
    right("the last word of shared memory", "st.shared.u32 [buffer+1020], 5; ld.shared.u32 %d, [buffer+1020];", [5]),
]


@pytest.mark.parametrize("body, said, instruction, thread, how", ADDRESSES_WRONG)
def test_wrong_addresses(body, said, instruction, thread, how):
    require_report(body, said, instruction, thread, how)


@pytest.mark.parametrize("body, expected, how", ADDRESSES_RIGHT)
def test_right_addresses(body, expected, how):
    require_result(body, expected, how)


def launch(body, addresses, stream=0, threads=1):
    """Start a body in a stream: addresses for the first result and for `a`."""
    kernel = driver_calls.Kernel(text_of(body), "k")
    out, given = addresses
    values = [ctypes.c_uint64(one) for one in (out, out, given, given, given)]
    kernel.launch((1, 1, 1), (threads, 1, 1), 0, values, stream)
    return kernel


@pytest.mark.parametrize("is_freed", [False, True])
def test_use_after_free(is_freed):
    out, memory = driver_calls.zeros(1, np.uint32), driver_calls.to_device(np.full(1, 7, np.uint32))
    address = memory.ctypes.data
    if is_freed:
        del memory
        gc.collect()
        driver_calls.synchronize()
        with pytest.raises(driver_calls.DeviceError, match="0 bytes into a freed allocation of 4 bytes"):
            launch("ld.global.u32 %d, [%in];", (out.ctypes.data, address))
            driver_calls.synchronize()
        return
    launch("ld.global.u32 %d, [%in];", (out.ctypes.data, address))
    assert driver_calls.to_host(out)[0] == 7


# --- bytes that nobody wrote ------------------------------------------------------------------------

SEEN = {"uninitialised": True}
UNWRITTEN_WRONG = [
    wrong(
        "shared",
        "ld.shared.u32 %d, [buffer+8];",
        "read of shared memory that nobody wrote, at byte 8",
        "ld.shared.u32 %d, [buffer+8]",
    ),
    wrong(
        "shared, half",
        "st.shared.u16 [buffer], 1; ld.shared.u32 %d, [buffer];",
        "read of shared memory that nobody wrote",
        "ld.shared.u32 %d, [buffer]",
    ),
    wrong("local", "ld.local.u32 %d, [loc];", "read of local memory that nobody wrote", "ld.local.u32 %d, [loc]"),
    wrong(
        "cp.async without a wait",
        "cp.async.ca.shared.global [%s], [%in], 4; cp.async.commit_group; ld.shared.u32 %d, [buffer];",
        "read of shared memory that nobody wrote",
        "ld.shared.u32 %d, [buffer]",
        a=[1],
        threads=1,
    ),
]
UNWRITTEN_RIGHT = [
    right("global", "ld.global.u32 %d, [%in];", [5], a=[5], threads=1),
    right("shared", "st.shared.v2.u32 [buffer+8], {1, 2}; ld.shared.u16 %d, [buffer+12];", [2]),
    right("local", "st.local.u32 [loc], 6; ld.local.u32 %d, [loc];", [6]),
    right("global that the kernel wrote", "st.global.u32 [%at], 3; ld.global.u32 %d, [%at];", [3]),
    right(
        "cp.async",
        "cp.async.ca.shared.global [%s], [%in], 4; cp.async.wait_all; ld.shared.u32 %d, [buffer];",
        [1],
        a=[1],
        threads=1,
    ),
]


@pytest.mark.parametrize("body, said, instruction, thread, how", UNWRITTEN_WRONG)
def test_bytes_that_nobody_wrote(body, said, instruction, thread, how):
    require_report(body, said, instruction, thread, {**how, **SEEN})


@pytest.mark.parametrize("body, said, instruction, thread, how", UNWRITTEN_WRONG)
def test_bytes_that_nobody_wrote_are_noticed_on_request_alone(body, said, instruction, thread, how):
    run(body, **how)


@pytest.mark.parametrize("body, expected, how", UNWRITTEN_RIGHT)
def test_bytes_that_somebody_wrote(body, expected, how):
    require_result(body, expected, {**how, **SEEN})


@pytest.mark.parametrize("is_written", [False, True])
def test_global_memory_that_nobody_wrote(is_written):
    before = loading.behaviour(uninitialised=True)
    try:
        out, memory = driver_calls.empty(1, np.uint32), driver_calls.empty(2, np.uint32)
        addresses = out.ctypes.data, memory.ctypes.data
        launch("st.global.u32 [%in], 4;", addresses)
        if is_written:
            launch("ld.global.u32 %d, [%in];", addresses)
            driver_calls.synchronize()
            assert driver_calls.to_host(out)[0] == 4
            return
        with pytest.raises(
            driver_calls.DeviceError, match=r"read of memory that nobody wrote: 4 bytes .* 4 bytes into"
        ):
            launch("ld.global.u32 %d, [%in+4];", addresses)
            driver_calls.synchronize()
    finally:
        loading.load(before)


# --- races in shared memory -------------------------------------------------------------------------

OTHER_WARP = "xor.b32 %r3, %t, 32; shl.b32 %r3, %r3, 2; add.u32 %r3, %s, %r3;"
HALF = "setp.lt.u32 %p1, %t, 16; selp.b32 %r1, 0xFFFF, 0xFFFF0000, %p1;"
BY_WARP = "shr.u32 %r1, %t, 5; setp.gt.u32 %p1, %r1, 1;"
RACES = [
    wrong(
        "lanes without __syncwarp",
        "st.shared.u32 [%ts], %t; ld.shared.u32 %d, [%s];",
        "race in shared memory at byte 0 with thread 0, which wrote it; no barrier or __syncwarp between",
        "ld.shared.u32 %d, [%s]",
        1,
        **WARP,
    ),
    wrong(
        "lanes write different values",
        "st.shared.u32 [%s], %t;",
        "thread 0 writes another value there in the same instruction",
        "st.shared.u32 [%s], %t",
        1,
        **WARP,
    ),
    wrong(
        "lanes overwrite what others read",
        "st.shared.u32 [%ts], %t; bar.warp.sync -1; ld.shared.u32 %d, [%s+124]; st.shared.u32 [%ts], 9;",
        "with thread 0, which read it; no barrier or __syncwarp between",
        "st.shared.u32 [%ts], 9",
        31,
        **WARP,
    ),
    wrong(
        "halves of a warp sync apart",
        f"st.shared.u32 [%ts], %t; {HALF} bar.warp.sync %r1; ld.shared.u32 %d, [%s];",
        "with thread 0, which wrote it",
        "ld.shared.u32 %d, [%s]",
        16,
        **WARP,
    ),
    wrong(
        "warps without a barrier",
        f"{OTHER_WARP} st.shared.u32 [%ts], %t; bar.warp.sync -1; ld.shared.u32 %d, [%r3];",
        "with warp 0, which read it; no barrier between",
        "st.shared.u32 [%ts], %t",
        32,
        **TWO_WARPS,
    ),
    wrong(
        "warps overwrite what others read",
        f"{OTHER_WARP} st.shared.u32 [%ts], %t; bar.sync 0; ld.shared.u32 %d, [%r3]; st.shared.u32 [%ts], 9;",
        "with thread 0, which wrote it; no barrier between",
        "ld.shared.u32 %d, [%r3]",
        32,
        **TWO_WARPS,
    ),
    wrong(
        "warps of different named barriers",
        f"st.shared.u32 [%ts], %t; {BY_WARP} @%p1 bra B;"
        " bar.sync 1, 64; ld.shared.u32 %d, [%s+384]; bra E; B: bar.sync 2, 64; ld.shared.u32 %d, [%s+384]; E:",
        "race in shared memory at byte 384",
        "ld.shared.u32 %d, [%s+384]",
        None,
        threads=128,
    ),
    wrong(
        "an atomic and a store",
        "setp.lt.u32 %p1, %t, 32; @%p1 bra A; st.shared.u32 [%s], 5; bra E; A: atom.shared.add.u32 %d, [%s], 1; E:",
        "race in shared memory at byte 0",
        "st.shared.u32 [%s], 5",
        32,
        **TWO_WARPS,
    ),
    wrong(
        "a loop that lacks its second barrier",
        f"{OTHER_WARP} mov.u32 %r4, 0; L: st.shared.u32 [%ts], %r4; bar.sync 0; ld.shared.u32 %d, [%r3];"
        " add.u32 %r4, %r4, 1; setp.lt.u32 %p1, %r4, 2; @%p1 bra L;",
        "with thread 0, which wrote it; no barrier between",
        "ld.shared.u32 %d, [%r3]",
        32,
        **TWO_WARPS,
    ),
    wrong(
        "cp.async of another thread",
        "cp.async.ca.shared.global [%ts], [%given], 4; cp.async.wait_all; ld.shared.u32 %d, [%s];",
        "with thread 0, which wrote it",
        "ld.shared.u32 %d, [%s]",
        1,
        a=range(32),
        **WARP,
    ),
]
NO_RACES = [
    right("__syncwarp", "st.shared.u32 [%ts], %t; bar.warp.sync -1; ld.shared.u32 %d, [%s+4];", [1] * 32, **WARP),
    right("the same value", "st.shared.u32 [%s], 7; bar.warp.sync -1; ld.shared.u32 %d, [%s];", [7] * 32, **WARP),
    right("its own word", "st.shared.u32 [%ts], %t; ld.shared.u32 %d, [%ts];", list(range(32)), **WARP),
    right(
        "all read a word",
        "setp.eq.u32 %p1, %t, 0; @%p1 st.shared.u32 [%s], 3; bar.sync 0; ld.shared.u32 %d, [%s];",
        [3] * 64,
        **TWO_WARPS,
    ),
    right(
        "bytes beside each other",
        "add.u32 %r1, %s, %t; st.shared.u8 [%r1], %t; bar.warp.sync -1; ld.shared.u8 %d, [%s+3];",
        [3] * 32,
        **WARP,
    ),
    right(
        "bytes of one word from two warps",
        "add.u32 %r1, %s, %t; st.shared.u8 [%r1], %t; bar.sync 0; ld.shared.u8 %d, [%s+33];",
        [33] * 64,
        **TWO_WARPS,
    ),
    right(
        "halves of a warp sync apart and read their own",
        f"st.shared.u32 [%ts], %t; {HALF} bar.warp.sync %r1; and.b32 %r2, %t, 16; shl.b32 %r2, %r2, 2;"
        " add.u32 %r2, %r2, %s; ld.shared.u32 %d, [%r2];",
        [0] * 16 + [16] * 16,
        **WARP,
    ),
    right(
        "bar.sync",
        f"{OTHER_WARP} st.shared.u32 [%ts], %t; bar.sync 0; ld.shared.u32 %d, [%r3];",
        [n ^ 32 for n in range(64)],
        **TWO_WARPS,
    ),
    right(
        "a named barrier of some warps",
        f"st.shared.u32 [%ts], %t; {BY_WARP} @%p1 bra B;"
        " bar.sync 1, 64; ld.shared.u32 %d, [%s+128]; bra E; B: bar.sync 2, 64; ld.shared.u32 %d, [%s+384]; E:",
        [32] * 64 + [96] * 64,
        threads=128,
    ),
    right(
        "bar.arrive",
        "setp.lt.u32 %p1, %t, 32; @!%p1 bra B; st.shared.u32 [%ts], %t; bar.arrive 3, 64; mov.u32 %d, 1; bra E;"
        " B: bar.sync 3, 64; ld.shared.u32 %d, [%s+4]; E:",
        [1] * 64,
        **TWO_WARPS,
    ),
    right(
        "atomics",
        "setp.eq.u32 %p1, %t, 0; @%p1 st.shared.u32 [%s], 0; bar.sync 0; atom.shared.add.u32 %r1, [%s], 1;"
        " bar.sync 0; ld.shared.u32 %d, [%s];",
        [64] * 64,
        **TWO_WARPS,
    ),
    right(
        "volatile",
        "setp.eq.u32 %p1, %t, 0; @%p1 st.volatile.shared.u32 [%s], 5; ld.volatile.shared.u32 %d, [%s];",
        [5] * 32,
        **WARP,
    ),
    right(
        "a shuffle between",
        "st.shared.u32 [%ts], %t; shfl.sync.idx.b32 %r1, %t, 0, 31, -1; ld.shared.u32 %d, [%s+4];",
        [1] * 32,
        **WARP,
    ),
    right(
        "a loop with both barriers",
        f"{OTHER_WARP} mov.u32 %r4, 0; L: st.shared.u32 [%ts], %r4; bar.sync 0; ld.shared.u32 %d, [%r3]; bar.sync 0;"
        " add.u32 %r4, %r4, 1; setp.lt.u32 %p1, %r4, 2; @%p1 bra L;",
        [1] * 64,
        **TWO_WARPS,
    ),
    right(
        "cp.async, waited for and met",
        "cp.async.ca.shared.global [%ts], [%given], 4; cp.async.wait_all; bar.sync 0; ld.shared.u32 %d, [%s+4];",
        [1] * 64,
        a=range(64),
        **TWO_WARPS,
    ),
]


@pytest.mark.parametrize("body, said, instruction, thread, how", RACES)
def test_races(body, said, instruction, thread, how):
    require_report(body, said, instruction, thread, how)


@pytest.mark.parametrize("body, expected, how", NO_RACES)
@pytest.mark.parametrize("backward", [False, True])
def test_no_races(body, expected, how, backward):
    require_result(body, expected, {**how, "backward": backward})


# --- barriers and hangs -----------------------------------------------------------------------------

WAITS = "W: mbarrier.try_wait.shared.b64 %p1, [%s], %rd5; @!%p1 bra W;"
HANGS = [
    wrong(
        "a warp ends before a barrier",
        "setp.lt.u32 %p1, %t, 32; @%p1 bra E; bar.sync 0; E: mov.u32 %d, 1;",
        "threads ended before a barrier that others wait at",
        "bar.sync 0",
        32,
        **TWO_WARPS,
    ),
    wrong(
        "half a warp at a barrier",
        "setp.lt.u32 %p1, %t, 16; @%p1 bar.sync 0; mov.u32 %d, 1;",
        "barrier",
        "@%p1 bar.sync 0",
        0,
        **WARP,
    ),
    wrong(
        "warps at different barriers",
        "setp.lt.u32 %p1, %t, 32; @%p1 bra A; bar.sync 1; bra E; A: bar.sync 2; E:",
        "threads wait at different barriers",
        "bar.sync 2",
        0,
        **TWO_WARPS,
    ),
    wrong(
        "a barrier for more threads than come",
        "bar.sync 1, 96;",
        "threads wait at different barriers",
        "bar.sync 1, 96",
        0,
        **TWO_WARPS,
    ),
    wrong(
        "a barrier of no whole warps",
        "bar.sync 1, 40;",
        "a barrier's threads are whole warps, not 40",
        "bar.sync 1, 40",
        0,
        **TWO_WARPS,
    ),
    wrong(
        "an endless loop", "L: add.u32 %d, %d, 1; setp.ge.u32 %p1, %d, 0; @%p1 bra L;", "an endless loop", "@%p1 bra L"
    ),
    wrong(
        "spinning on a flag that nobody sets",
        "st.shared.u32 [%s], 0; L: ld.volatile.shared.u32 %d, [%s]; setp.eq.u32 %p1, %d, 0; @%p1 bra L;",
        "an endless loop",
        "@%p1 bra L",
    ),
    wrong(
        "an mbarrier that nobody completes",
        f"mbarrier.init.shared.b64 [%s], 2; mbarrier.arrive.shared.b64 %rd5, [%s]; {WAITS}",
        "threads wait at an mbarrier whose phase nobody ends",
        "mbarrier.try_wait.shared.b64 %p1, [%s], %rd5",
    ),
    wrong(
        "an mbarrier without init",
        "mbarrier.arrive.shared.b64 %rd5, [%s];",
        "was never initialised",
        "mbarrier.arrive.shared.b64 %rd5, [%s]",
    ),
    wrong("a trap", "setp.eq.u32 %p1, %t, 3; @%p1 trap;", "the kernel trapped", "@%p1 trap", 3, **WARP),
]
NO_HANGS = [
    right(
        "all at a barrier by different ways",
        "setp.lt.u32 %p1, %t, 32; @%p1 bra A; bar.sync 0; mov.u32 %d, 1; bra E; A: bar.sync 0; mov.u32 %d, 2; E:",
        [2] * 32 + [1] * 32,
        **TWO_WARPS,
    ),
    right(
        "a warp that ends after the barrier",
        "bar.sync 0; setp.lt.u32 %p1, %t, 32; @%p1 bra E; mov.u32 %d, 1; E:",
        [0] * 32 + [1] * 32,
        **TWO_WARPS,
    ),
    right(
        "barrier.sync lane by lane",
        "setp.lt.u32 %p1, %t, 16; @%p1 barrier.sync 0; @!%p1 barrier.sync 0; mov.u32 %d, 1;",
        [1] * 32,
        **WARP,
    ),
    right("a named barrier of all that it names", "bar.sync 1, 64; mov.u32 %d, 1;", [1] * 64, **TWO_WARPS),
    right("a long loop", "L: add.u32 %d, %d, 1; setp.lt.u32 %p1, %d, 300000; @%p1 bra L;", [300000]),
    right(
        "spinning on a flag that another warp sets",
        "setp.eq.u32 %p1, %t, 0; @%p1 st.volatile.shared.u32 [%s], 0; bar.sync 0; setp.ge.u32 %p2, %t, 32; @%p2 bra B;"
        " L: ld.volatile.shared.u32 %d, [%s]; setp.eq.u32 %p1, %d, 0; @%p1 bra L; bra E;"
        " B: mov.u32 %r1, 0; M: add.u32 %r1, %r1, 1; setp.lt.u32 %p3, %r1, 1000; @%p3 bra M;"
        " mov.u32 %d, 5; setp.eq.u32 %p4, %t, 40; @%p4 st.volatile.shared.u32 [%s], 5; E:",
        [5] * 64,
        **TWO_WARPS,
    ),
    right(
        "an mbarrier",
        f"mbarrier.init.shared.b64 [%s], 1; mbarrier.arrive.shared.b64 %rd5, [%s]; {WAITS} mov.u32 %d, 1;",
        [1],
    ),
    right("a trap that nobody reaches", "setp.eq.u32 %p1, %t, 32; @%p1 trap; mov.u32 %d, 1;", [1] * 32, **WARP),
]


@pytest.mark.parametrize("body, said, instruction, thread, how", HANGS)
def test_hangs(body, said, instruction, thread, how):
    require_report(body, said, instruction, thread, how)


@pytest.mark.parametrize("body, expected, how", NO_HANGS)
@pytest.mark.parametrize("backward", [False, True])
def test_no_hangs(body, expected, how, backward):
    require_result(body, expected, {**how, "backward": backward})


# --- lanes that are missing -------------------------------------------------------------------------

LOWER_HALF = "setp.lt.u32 %p1, %t, 16; @!%p1 bra E;"
MISSING = [
    wrong(
        "a shuffle of a lane that takes no part",
        f"{LOWER_HALF} shfl.sync.bfly.b32 %d, %t, 16, 31, 0xFFFF; E:",
        "a shuffle reads lane 16, which takes no part",
        "shfl.sync.bfly.b32 %d, %t, 16, 31, 0xFFFF",
        0,
        **WARP,
    ),
    wrong(
        "a mask that names lanes elsewhere",
        f"{LOWER_HALF} shfl.sync.bfly.b32 %d, %t, 1, 31, -1; bra F; E: mov.u32 %d, 1; W: bar.sync 0; F: mov.u32 %d, 2;",
        "lanes that the mask names never arrive",
        "shfl.sync.bfly.b32 %d, %t, 1, 31, -1",
        0,
        **WARP,
    ),
    wrong(
        "a mask that names lanes that ended",
        "setp.ge.u32 %p1, %t, 16; @%p1 exit; shfl.sync.bfly.b32 %d, %t, 1, 31, -1;",
        "the mask names lanes that have ended",
        "shfl.sync.bfly.b32 %d, %t, 1, 31, -1",
        0,
        **WARP,
    ),
    wrong(
        "a mask without the lane itself",
        "shfl.sync.bfly.b32 %d, %t, 1, 31, 0xFFFF;",
        "the mask does not name the lane itself",
        "shfl.sync.bfly.b32 %d, %t, 1, 31, 0xFFFF",
        16,
        **WARP,
    ),
    wrong(
        "a vote of lanes that ended",
        "setp.ge.u32 %p1, %t, 16; @%p1 exit; vote.sync.ballot.b32 %d, %p1, -1;",
        "the mask names lanes that have ended",
        "vote.sync.ballot.b32 %d, %p1, -1",
        0,
        **WARP,
    ),
]
NOT_MISSING = [
    right(
        "a shuffle inside the mask",
        f"{LOWER_HALF} shfl.sync.bfly.b32 %d, %t, 8, 31, 0xFFFF; E:",
        [n ^ 8 for n in range(16)] + [0] * 16,
        **WARP,
    ),
    right(
        "both halves at different instructions",
        f"{LOWER_HALF} shfl.sync.bfly.b32 %d, %t, 1, 31, 0xFFFF; bra F;"
        " E: shfl.sync.bfly.b32 %d, %t, 2, 31, 0xFFFF0000; F:",
        [n ^ 1 for n in range(16)] + [n ^ 2 for n in range(16, 32)],
        **WARP,
    ),
    right(
        "lanes come one after another",
        "setp.lt.u32 %p1, %t, 16; @%p1 bra A; add.u32 %d, %t, 1; A: shfl.sync.bfly.b32 %d, %t, 16, 31, -1;",
        [n ^ 16 for n in range(32)],
        **WARP,
    ),
    right(
        "a vote of a block of no whole warp",
        "setp.lt.u32 %p1, %t, 2; vote.sync.ballot.b32 %d, %p1, -1;",
        [3] * 4,
        threads=4,
    ),
]


@pytest.mark.parametrize("body, said, instruction, thread, how", MISSING)
def test_missing_lanes(body, said, instruction, thread, how):
    require_report(body, said, instruction, thread, how)


@pytest.mark.parametrize("body, expected, how", NOT_MISSING)
def test_no_missing_lanes(body, expected, how):
    require_result(body, expected, how)


# --- work of streams --------------------------------------------------------------------------------


class Streams:
    """Two streams that nothing orders, and memory that both may use."""

    def __init__(self):
        self.driver = loading.driver()
        self.handles = [ctypes.c_void_p() for _ in range(2)]
        for handle in self.handles:
            driver_calls.checked(self.driver.cuStreamCreate(ctypes.byref(handle), 1))
        self.memory = driver_calls.zeros(64, np.uint32)
        self.host = np.zeros(64, np.uint32)
        self.kernels = []
        driver_calls.synchronize()
        loading.forget()

    def kernel(self, which, body, first=0, given=0):
        """Start a body whose result begins at word `first` and whose `a` begins at word `given`."""
        addresses = (self.memory.ctypes.data + 4 * first, self.memory.ctypes.data + 4 * given)
        self.kernels.append(launch(body, addresses, self.handles[which].value, threads=8))

    def copy_out(self, which, first, count):
        """Copy words to the host in a stream."""
        source = ctypes.c_uint64(self.memory.ctypes.data + 4 * first)
        size = ctypes.c_size_t(4 * count)
        target = ctypes.c_void_p(self.host.ctypes.data)
        driver_calls.checked(self.driver.cuMemcpyDtoHAsync_v2(target, source, size, self.handles[which]))

    def wait(self, which):
        """Wait for a stream."""
        driver_calls.checked(self.driver.cuStreamSynchronize(self.handles[which]))

    def pairs(self):
        """What used the same bytes in no order."""
        driver_calls.synchronize()
        return loading.unordered()


@pytest.fixture(params=[False, True], ids=["eager", "deferred"])
def streams(request):
    """`Streams`, with work done at once and when somebody waits."""
    before = loading.behaviour(deferred=request.param)
    with driver_calls.current():
        made = Streams()
        yield made
        driver_calls.synchronize()
        for handle in made.handles:
            made.driver.cuStreamDestroy_v2(handle)
    loading.forget()
    loading.load(before)


READS = "mul.wide.u32 %rd5, %t, 4; add.u64 %rd5, %in, %rd5; ld.global.u32 %d, [%rd5];"


def test_a_kernel_that_reads_what_another_stream_writes(streams):
    streams.kernel(0, "mov.u32 %d, %t;", first=0)
    streams.kernel(1, READS, first=32, given=0)
    (pair,) = streams.pairs()
    assert (pair.first, pair.second) == ("kernel k", "kernel k")
    assert (pair.address, pair.bytes) == (streams.memory.ctypes.data, 32)


def test_a_kernel_that_waits_for_the_other_stream(streams):
    streams.kernel(0, "mov.u32 %d, %t;", first=0)
    streams.wait(0)
    streams.kernel(1, READS, first=32, given=0)
    assert streams.pairs() == []
    assert list(driver_calls.to_host(streams.memory)[32:40]) == list(range(8))


def test_a_kernel_of_the_same_stream(streams):
    streams.kernel(0, "mov.u32 %d, %t;", first=0)
    streams.kernel(0, READS, first=32, given=0)
    assert streams.pairs() == []


@pytest.mark.parametrize("step, expected", [(4, 1), (8, 0)])
def test_bytes_of_one_allocation(streams, step, expected):
    """What a kernel uses is known to the byte: neighbours in an allocation are no conflict."""
    streams.kernel(0, "mov.u32 %d, %t;", first=0)
    streams.kernel(1, "mov.u32 %d, %t;", first=step)
    found = streams.pairs()
    assert len(found) == expected
    assert [pair.bytes for pair in found] == [16] * expected


def test_words_between_each_other_are_no_conflict(streams):
    """Even words in one stream, odd ones in the other."""
    every_other = "shl.b32 %r1, %t, 3; cvt.u64.u32 %rd5, %r1; add.u64 %mine, %at, %rd5; mov.u32 %d, %t;"
    streams.kernel(0, every_other, first=0)
    streams.kernel(1, every_other, first=1)
    assert streams.pairs() == []
    streams.kernel(0, every_other, first=2)
    assert len(streams.pairs()) == 0  # the host has waited


def test_reading_the_same_bytes_is_no_conflict(streams):
    streams.kernel(0, READS, first=32, given=0)
    streams.kernel(1, READS, first=48, given=0)
    assert streams.pairs() == []


@pytest.mark.parametrize("waits, expected", [(False, 1), (True, 0)])
def test_a_copy_of_what_another_stream_writes(streams, waits, expected):
    streams.kernel(0, "mov.u32 %d, %t;", first=0)
    if waits:
        streams.wait(0)
    streams.copy_out(1, 0, 8)
    found = streams.pairs()
    assert len(found) == expected
    for pair in found:
        kernel, copy = sorted((pair.first, pair.second), key=lambda what: "kernel" not in what)
        assert kernel == "kernel k" and "copy" in copy


def test_a_copy_of_other_bytes(streams):
    streams.kernel(0, "mov.u32 %d, %t;", first=0)
    streams.copy_out(1, 8, 8)
    assert streams.pairs() == []


# --- limits of launches -----------------------------------------------------------------------------

LIMITS = {
    "threads of a block": ((1, 1, 1), (1025, 1, 1), 0, (1024, 1, 1)),
    "threads of a block in y": ((1, 1, 1), (32, 64, 1), 0, (32, 32, 1)),
    "threads of a block in z": ((1, 1, 1), (1, 1, 65), 0, (1, 1, 64)),
    "blocks in y": ((1, 65536, 1), (1, 1, 1), 0, (1, 1, 1)),
    "shared memory": ((1, 1, 1), (1, 1, 1), 48 * 1024 - 1023, (1, 1, 1)),
}


@pytest.mark.parametrize("name", LIMITS)
def test_limits_of_launches(name):
    grid, block, shared, allowed = LIMITS[name]
    memory = driver_calls.zeros(1 << 16, np.uint32)
    kernel = driver_calls.Kernel(text_of("st.global.u32 [%at], 1;"), "k")
    values = [ctypes.c_uint64(memory.ctypes.data)] * 5
    with pytest.raises(driver_calls.DeviceError):
        kernel.launch(grid, block, shared, values)
    kernel.launch(tuple(min(size, 65535) for size in grid), allowed, max(shared - 1, 0), values)
    driver_calls.synchronize()
