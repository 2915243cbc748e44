"""A kernel of PTX around a few instructions, run on the software GPU: words in, words out.

In a body stand

    %a, %b, %c      32-bit words of this thread, of the arrays `a`, `b`, `c`
    %d, %d1         what becomes the thread's words of the first and of the second result
    %t              the thread's number in its block
    %at, %in        addresses of the first result's and of `a`'s first word; %mine and %given: of this thread's words
    %s, %ts         addresses in shared memory: of 1024 bytes `buffer`, and of this thread's word there
    loc             64 bytes of local memory

and %r0.., %rd0.. (64 bits), %f0.., %fd0.., %h0.. (16 bits), %b0.. (8 bits), %p0.. (predicates) to use freely.
"""

import math
import re

import numpy as np

from cuda_kernels.emulator import driver_calls, loading, programs

#: Instructions of a warp after which it hangs: fewer than the software GPU's own limit, so that hangs are found sooner.
LONGEST = 8_000_000
#: Device 0.
TARGET = "sm_90"

#: What the bodies below stand at, as `.loc` says: faults name it.
SOURCE_LINE = 17

HEAD = """
.version 8.8
.target {target}
.address_size 64
.file 1 "kernel.cu"
.extern .shared .align 16 .b8 dynamic[];
{functions}
.visible .entry k(.param .u64 out, .param .u64 out1, .param .u64 pa, .param .u64 pb, .param .u64 pc)
{{
 .reg .b32 %r<64>; .reg .f32 %f<20>; .reg .b64 %rd<20>; .reg .f64 %fd<8>; .reg .pred %p<8>; .reg .b16 %h<20>;
 .reg .b8 %b<8>; .reg .b32 %a, %b, %c, %d, %d1, %t, %s, %ts, %n; .reg .b64 %at, %at1, %in, %mine, %given, %x;
 .shared .align 16 .b8 buffer[1024];
 .local .align 8 .b8 loc[64];
 ld.param.u64 %at, [out]; ld.param.u64 %at1, [out1]; ld.param.u64 %in, [pa];
 mov.u32 %t, %tid.x; mov.u32 %n, %ctaid.x; mov.u32 %d, %ntid.x; mad.lo.u32 %n, %n, %d, %t;
 mul.wide.u32 %x, %n, 4; add.u64 %mine, %at, %x; add.u64 %given, %in, %x; add.u64 %at1, %at1, %x;
 mov.u32 %s, buffer; shl.b32 %ts, %t, 2; add.u32 %ts, %s, %ts;
 {loads}
 mov.u32 %d, 0; mov.u32 %d1, 0;
 .loc 1 {line} 3
"""
TAIL = """
 st.global.b32 [%mine], %d;{second}
 ret;
}}
"""
LOAD = " ld.param.u64 %x, [p{name}]; mad.wide.u32 %x, %n, 4, %x; ld.global.b32 %{name}, [%x];"


def text_of(body, arrays=(), functions="", second=False):
    """The PTX of a kernel `k` around `body`, for the device as it is."""
    loads = "\n".join(LOAD.format(name=name) for name in arrays)
    head = HEAD.format(target=TARGET, functions=functions, loads=loads, line=SOURCE_LINE)
    return head + body + TAIL.format(second="\n st.global.b32 [%at1], %d1;" if second else "")


def words_of(values):
    """Values of 4 bytes, or integers of any sign, as uint32."""
    array = np.asarray(values)
    if array.dtype.kind == "f" and array.itemsize == 4:
        return np.ascontiguousarray(array).view(np.uint32)
    return (array.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32)


def run(body, *, threads=None, a=(), b=None, c=None, words=None, second=False, functions="", block=None, **behaviour):
    """Run a body in each of `threads` threads (as many as `a` has words; else 1) and return the words of %d.

    Args:
        a, b, c: words for each thread; `a` alone may have any number, which the body then reads itself.
        words: words of the result, if not one for each thread.
        second: return (words of %d, words of %d1).
        functions: PTX in front of the kernel.
        block: threads of a block; as many as fit if not given.
        behaviour: attributes of `Settings` for this run.

    Raises:
        DeviceError: the software GPU refused the code, or found a fault.
    """
    given = {name: words_of(array) for name, array in (("a", a), ("b", b), ("c", c)) if array is not None}
    own_loads = [name for name in given if threads is None and given[name].size]
    threads = threads or max(1, given["a"].size)
    block = block or (threads if threads <= 1024 else math.gcd(threads, 1024))
    out = np.zeros(words or threads, np.uint32)
    if threads % block:
        raise ValueError(f"threads must be a multiple of block; got {threads} and {block}")
    arrays = [given.get(name, np.zeros(0, np.uint32)) for name in "abc"]
    before = loading.behaviour(**{"longest": LONGEST, **behaviour})
    try:
        source = text_of(body, own_loads, functions, second)
        ran = programs.run(
            source,
            "k",
            threads // block,
            block,
            [out, out.copy(), *arrays],
            target=TARGET,
            uninitialised=loading.settings().uninitialised,
            longest=loading.settings().longest,
        )
    finally:
        loading.load(before)
    return ran.arrays[:2] if second else ran.arrays[0]


def fault_of(body, **how):
    """What the software GPU says of a body that must fail.

    Raises:
        AssertionError: it does not fail.
    """
    try:
        found = run(body, **how)
    except driver_calls.DeviceError as error:
        return str(error)
    raise AssertionError(f"nothing is wrong here; the kernel gave {found}")


def thread_in(fault):
    """The number of the thread that a fault names."""
    return int(re.search(r"thread (\d+): ", fault)[1])
