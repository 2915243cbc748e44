"""`python -m cuda_kernels profile`, what it counts in shared memory, and the budgets of the project's kernels."""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from kernels_on_arrays import counted

import cuda_kernels
import refops
from cuda_kernels.catalogue import catalogue
from cuda_kernels.emulator import profile as profiler
from cuda_kernels.emulator import run
from refops.survey import SCALINGS
from tiers import SWEEP, sampled

TARGET = "sm_90"
ROOT = Path(__file__).resolve().parents[2]

# --- the banks of shared memory ---------------------------------------------------------------------

#: A warp whose lanes touch shared memory once, at offsets of a table; a lane with a negative one does not.
ONE_ACCESS = """
.version 8.0
.target sm_75
.address_size 64
.visible .entry touch(.param .u64 table)
{{
    .reg .pred off; .reg .b32 lane, at, base, r<4>; .reg .b64 a, b, d<2>; .reg .b16 h;
    .shared .align 16 .b8 memory[8192];
    ld.param.u64 a, [table];
    mov.u32 lane, %tid.x;
    mul.wide.u32 b, lane, 4;
    add.u64 a, a, b;
    ld.global.s32 at, [a];
    setp.lt.s32 off, at, 0;
    mov.u32 base, memory;
    add.u32 at, at, base;
    mov.u32 r0, 1; mov.u32 r1, 1; mov.u32 r2, 1; mov.u32 r3, 1; mov.u64 d0, 1; mov.u16 h, 1;
    @!off {access};
    ret;
}}
"""
LOADS = {
    1: "ld.shared.u8 r0, [at]",
    2: "ld.shared.b16 h, [at]",
    4: "ld.shared.b32 r0, [at]",
    8: "ld.shared.v2.b32 {r0, r1}, [at]",
    16: "ld.shared.v4.b32 {r0, r1, r2, r3}, [at]",
}
STORES = {
    1: "st.shared.u8 [at], r0",
    2: "st.shared.b16 [at], h",
    4: "st.shared.b32 [at], r0",
    8: "st.shared.b64 [at], d0",
    16: "st.shared.v4.b32 [at], {r0, r1, r2, r3}",
}
#: Bytes of a lane's access, offset of a lane (negative: none), wavefronts, wavefronts without conflicts.
BANKS = {
    "neighbouring words": (4, lambda lane: 4 * lane, 1, 1),
    "neighbouring words, from the last lane on": (4, lambda lane: 4 * (31 - lane), 1, 1),
    "every second word": (4, lambda lane: 8 * lane, 2, 1),
    "every fourth word": (4, lambda lane: 16 * lane, 4, 1),
    "one bank": (4, lambda lane: 128 * lane, 32, 1),
    "an odd pitch": (4, lambda lane: 132 * lane, 1, 1),
    "one word, which all lanes get": (4, lambda lane: 64, 1, 1),
    "two words of one bank": (4, lambda lane: 128 * (lane % 2), 2, 1),
    "two words of two banks": (4, lambda lane: 4 * (lane % 2), 1, 1),
    "bytes, four of a word": (1, lambda lane: lane, 1, 1),
    "bytes of 32 words of one bank": (1, lambda lane: 128 * lane + lane % 4, 32, 1),
    "halves of words": (2, lambda lane: 2 * lane, 1, 1),
    "8 bytes: two halves of a warp": (8, lambda lane: 8 * lane, 2, 2),
    "8 bytes, every second place": (8, lambda lane: 16 * lane, 4, 2),
    "8 bytes, both halves of the warp the same": (8, lambda lane: 8 * (lane % 16), 2, 2),
    "16 bytes: four quarters of a warp": (16, lambda lane: 16 * lane, 4, 4),
    "16 bytes, every second place": (16, lambda lane: 32 * lane, 8, 4),
    "16 bytes, one place": (16, lambda lane: 0, 4, 4),
    "16 bytes, a pitch of 144": (16, lambda lane: 144 * lane, 4, 4),
    "one lane": (4, lambda lane: 4 if lane == 7 else -1, 1, 1),
    "8 bytes, only the first half of a warp": (8, lambda lane: 8 * lane if lane < 16 else -1, 1, 1),
    "16 bytes, lanes of one quarter": (16, lambda lane: 128 * lane if lane < 8 else -1, 8, 1),
    "no lane": (4, lambda lane: -1, 0, 0),
}


@pytest.mark.parametrize("accesses", [LOADS, STORES], ids=["loads", "stores"])
@pytest.mark.parametrize("name", BANKS)
def test_wavefronts_of_one_access(name, accesses):
    size, offset, wavefronts, ideal = BANKS[name]
    table = np.array([offset(lane) for lane in range(32)], np.int32)
    ran = run(ONE_ACCESS.format(access=accesses[size]), "touch", 1, 32, [table], target=TARGET, uninitialised=False)
    assert (ran.counters.shared_wavefronts, ran.counters.shared_ideal) == (wavefronts, ideal)
    assert ran.counters.shared_accesses == (wavefronts > 0)


# --- budgets ----------------------------------------------------------------------------------------

#: Passes through shared memory, over those that a kernel without bank conflicts needs.
MOST_WAVEFRONTS = 1.2
#: Whole tiles, blocks and bands of every kernel; the edges of each, in multiples of 16 that NVFP4 needs.
SHAPES = ((256, 512), (144, 304))


def shares_memory(entry):
    """Whether the threads of a kernel share memory."""
    return "shared" in entry.build((9, 0), False).__code__.co_names


def with_other_stages():
    """(name, spec) of each kernel of the catalogue that uses shared memory, and of it with float32 in its tile."""
    for entry in catalogue():
        if not shares_memory(entry):
            continue
        yield entry.name, entry.spec
        wider = staged_as_float32(entry.spec)
        if wider != entry.spec and fits(wider):
            yield f"{entry.name}, staged as float32", wider


def staged_as_float32(spec):
    """A kernel that reads float32, and so has them in its tile."""
    if hasattr(spec, "values"):
        return replace(spec, values=replace(spec.values, storage="float32"))
    return replace(spec, storage="float32")


def fits(spec):
    """Whether a tile is as wide as the blocks that a kernel needs."""
    try:
        spec.function((9, 0))
    except ValueError:
        return False
    return True


SHARING = dict(with_other_stages())


@sampled(("name", "shape"), [*product(SHARING, SHAPES)], 3, ids=str)
def test_shared_memory_has_no_conflicts(name, shape):
    counters = counted(SHARING[name], shape, TARGET)
    assert counters.shared > 0 and counters.shared_ideal > 0
    assert counters.wavefronts_over_ideal < MOST_WAVEFRONTS


def test_every_kind_of_kernel_that_shares_memory_is_there():
    assert {spec.title for spec in SHARING.values()} == {
        "fused columns",
        "dequantize turned",
        "blocks in both directions",
        "NVFP4 in both directions",
        "amaxes of columns",
        "per tensor in both directions",
        "squares",
        "squares turned",
        "a choice of scales in both directions",
        "a choice of scales for squares",
    }


#: Kinds of kernels whose threads read 32 or more neighbouring bytes in two or more requests: each touches twice the
#: sectors that it uses, and the L1 cache has the other halves for the next one. "dequantize rows" stores likewise.
WIDE = (
    "fused rows",
    "fused halves",
    "blocks along rows",
    "NVFP4 along rows",
    "a choice of scales along rows",
    "amax of a tensor",
    "known scale along rows",
    "known scale along rows, both halves",
    "scale in memory along rows",
    "maxima of squares",
    "squares along rows",
    "squares turned",
    "encode",
)
#: Kernels whose lanes read neighbouring elements one after the other, for rows that are not whole vectors, or codes
#: below a transform: name -> (bytes of a read, bytes from a lane to the next). A request of a warp spans as many
#: sectors of 32 bytes as these are. A lane that stores MXFP8 codes owns 16 elements of two bytes: it reads a sector of
#: its own, and the L1 cache has it for the other fifteen reads. Of a gradient a lane owns 8.
BY_ELEMENT = {
    "bf16 -> MXFP8, guarded": (2, 32),
    "dswiglu bf16 -> MXFP8, guarded": (2, 16),
    "MXFP8 -> bf16, any K": (1, 16),
    "NVFP4 columnwise + RHT -> bf16": (1, 4),
}

#: Of scales alone, few bytes: one thread, or a thread for each.
OF_SCALES = ("scale of a tensor", "scales that blocks share", "delayed scale", "scales in GEMM order")


def first_of_each_kind():
    """The catalogue's kernels; of those that are not the first of their kind `make test-all` runs a tenth."""
    seen, others = set(), 0
    for entry in catalogue():
        marks, kind = (), entry.spec.title
        if kind in seen:
            marks = SWEEP if others % 10 else pytest.mark.full
            others += 1
        yield pytest.param(entry, id=entry.name, marks=marks)
        seen.add(kind)


@pytest.mark.parametrize("entry", [*first_of_each_kind()])
def test_loads_use_the_sectors_that_they_touch(entry):
    """Of whole rows; more than 1: lanes share what they read."""
    counters = counted(entry.spec, SHAPES[0], TARGET)
    if entry.name in BY_ELEMENT:
        read, apart = BY_ELEMENT[entry.name]
        assert counters.load_sectors_per_request <= apart
        assert counters.used_load_share >= read / apart
    elif entry.spec.title in OF_SCALES:
        assert counters.load_sectors_per_request <= 16
    elif entry.spec.title in WIDE:
        assert counters.used_load_share >= 0.5
    else:
        assert counters.used_load_share >= 1 and counters.load_sectors_per_request <= 16


# --- a call -----------------------------------------------------------------------------------------


def profiled(capsys, *arguments):
    """What `profile --json` prints for arguments."""
    assert profiler.main([*arguments, "--target", TARGET, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_counts_of_a_call_whose_numbers_are_known(capsys):
    """128 x 128 blocks of a 256 x 512 tensor: 8 tiles of 256 threads."""
    found = profiled(capsys, "--op", "none", "--scaling", "block-128x128", "--columnwise")
    assert (found["op"], found["scaling"], found["shape"], found["dtype"]) == (
        "none",
        "block-128x128",
        [256, 512],
        "bfloat16",
    )
    (kernel,) = found["kernels"]
    counted, elements = kernel["counted"], 256 * 512
    assert (kernel["elements"], counted["launches"], counted["blocks"]) == (elements, 1, 8)
    assert kernel["block"] == [256, 1, 1]
    assert counted["barriers"] == 2 * 8
    assert counted["global_load_bytes"] == 2 * elements and counted["global_load_sectors"] == 2 * elements // 32
    assert counted["global_loads"] == 2 * elements // (32 * 16)  # a warp reads 512 bytes
    assert counted["global_store_bytes"] == 2 * elements + 4 * 2 * 8  # codes and float32 scales, both directions
    assert counted["atomics"] == elements // (8 * 32)  # a warp raises its maxima in one instruction
    assert counted["thread_instructions"] == kernel["derived"]["thread_instructions_per_element"] * elements
    assert 31 < kernel["derived"]["active_lanes"] <= 32
    assert kernel["derived"]["load_sectors_per_request"] == 16 and kernel["derived"]["used_load_share"] == 1
    static = kernel["static"]
    assert 0 < static["registers"] <= 64
    assert static["shared"] == counted["shared"] > 128 * 128 * 2
    assert (static["spills"], static["loops"] > 0) == (0, True)
    assert 100 < static["instructions"] < counted["warp_instructions"]


def test_counts_are_those_of_the_call_alone(capsys):
    """Once more in the same process: no launch of an earlier call is counted."""
    calls = [profiled(capsys, "--op", "swiglu", "--scaling", "mxfp8")["kernels"] for _ in range(2)]
    for (kernel,) in calls:
        del kernel["counted"]["seconds"]
    assert calls[0] == calls[1]


def test_launches_of_one_kernel_are_one_column(capsys):
    found = profiled(capsys, "--op", "gelu", "--scaling", "current", "--columnwise")
    launches = {kernel["name"]: kernel["counted"]["launches"] for kernel in found["kernels"]}
    assert launches == {
        "elementwise: gelu bfloat16 -> bfloat16 + amax": 1,
        "scale of a tensor": 1,
        "per tensor in both directions: bfloat16 -> current": 1,
    }


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (
            ["--op", "swiglu", "--scaling", "mxfp8", "--columnwise"],
            ["fused columns: swiglu bfloat16 -> mxfp8 + columns"],
        ),
        (["--op", "none", "--scaling", "mxfp8", "--shape", "2x3x32"], ["fused rows: bfloat16 -> mxfp8"]),
        (["--op", "none", "--scaling", "mxfp8", "--set", "fmt=e5m2"], ["fused rows: bfloat16 -> mxfp8"]),
        (["--op", "swiglu"], ["elementwise: swiglu bfloat16 -> bfloat16"]),
        (["--op", "dswiglu", "--dtype", "float32"], ["elementwise gradient: dswiglu float32 -> float32"]),
        (["--op", "dgelu", "--scaling", "mxfp8", "--dbias"], ["band: dgelu bfloat16 -> mxfp8 + sums", "finish sums"]),
        (["--op", "none", "--scaling", "mxfp8", "--shape", "0x32"], []),
    ],
)
def test_which_kernels_run(capsys, arguments, names):
    assert [kernel["name"] for kernel in profiled(capsys, *arguments)["kernels"]] == names


def test_which_kernels_dequantize():
    """Of rows, of columns with scales of their own, and of transposed data."""
    x = profiler.random_tensor((64, 96), np.float32)
    for scaling, columnwise, name in (
        (refops.MXFP8Scaling(refops.E4M3), False, "dequantize rows: mxfp8 -> float16"),
        (refops.MXFP8Scaling(refops.E4M3), True, "dequantize columns: mxfp8 -> float16"),
        (refops.NVFP4Scaling(rht=True), True, "dequantize turned: nvfp4 -> float16"),
    ):
        with cuda_kernels.emulated(target=TARGET):
            q = cuda_kernels.quantize(x, scaling, rowwise=not columnwise, columnwise=columnwise)
        call = lambda q=q: cuda_kernels.dequantize(q, dtype="float16")  # noqa: E731
        assert [one.name for one in profiler.profile(call, target=TARGET)] == [name]


def test_columns_of_a_scaling_that_is_about_columns(capsys):
    """RHT changes the columnwise copy alone."""
    names = [kernel["name"] for kernel in profiled(capsys, "--op", "none", "--scaling", "nvfp4-rht")["kernels"]]
    assert names[-1] == "NVFP4 in both directions: bfloat16 -> nvfp4"


def test_fewer_instructions_with_fast_math(capsys):
    accurate, fast = (
        profiled(capsys, "--op", "silu", *more)["kernels"][0]["counted"]["thread_instructions"]
        for more in ([], ["--fast-math"])
    )
    assert fast < accurate


def test_the_table_has_a_column_for_each_kernel(capsys):
    arguments = ["--op", "dgelu", "--scaling", "delayed-scale-1", "--columnwise", "--dbias", "--target", TARGET]
    assert profiler.main(arguments) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0] == f"dgelu delayed-scale-1 bfloat16 256x512 on {TARGET} columnwise dbias"
    for words in (
        "per tensor in both directions: dgelu",
        "finish sums",
        "active lanes of 32",
        "over the ideal",
        "static: registers",
    ):
        assert words in text
    loads, stores = (line for line in text.splitlines() if "sectors a request" in line)
    assert loads != stores
    assert text.endswith(f"\n{profiler.CAPTION}\n")  # its lines begin at the margin


def test_nothing_runs_for_a_tensor_without_elements(capsys):
    assert profiler.main(["--op", "none", "--scaling", "mxfp8", "--shape", "0x32", "--target", TARGET]) == 0
    assert "no kernel ran" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--op"]),
        (["--op", "swigl"], ["--op", "'swigl'", "none", "swiglu", "dswiglu"]),
        (["--op", "dequantize"], ["--op", "'dequantize'", "none"]),
        (["--op", "swiglu", "--scaling", "mx"], ["--scaling", "'mx'", *SCALINGS]),
        (["--op", "swiglu", "--target", "sm_20"], ["--target", "'sm_20'", "sm_90", "sm_100a"]),
        (["--op", "swiglu", "--dtype", "int8"], ["--dtype", "'int8'", "float16"]),
        (["--op", "swiglu", "--shape", "4y4"], ["--shape", "'4y4'", "64x256"]),
        (["--op", "none"], ["--op none", "--scaling", *SCALINGS]),
        (["--op", "gelu", "--columnwise"], ["--columnwise", "--scaling"]),
        (["--op", "gelu", "--dbias"], ["--dbias", "--op gelu"]),
        (["--op", "gelu", "--set", "fmt=e5m2"], ["--set", "--scaling"]),
        (["--op", "swiglu", "--shape", "4x5"], ["even last dimension", "(4, 5)"]),
        (["--op", "none", "--scaling", "nvfp4-1x16", "--shape", "4x20"], ["K % 16 == 0", "(4, 20)"]),
    ],
)
def test_a_bad_word_is_named_with_the_choices(capsys, arguments, words):
    try:
        code = profiler.main(["--target", TARGET, *arguments])
    except SystemExit as stopped:
        code = stopped.code
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    for word in words:
        assert word in said.err


def test_the_command_in_a_process_of_its_own():
    command = [sys.executable, "-m", "cuda_kernels", "profile", "--op", "swiglu", "--scaling", "mxfp8", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert [kernel["name"] for kernel in json.loads(done.stdout)["kernels"]] == ["fused rows: swiglu bfloat16 -> mxfp8"]
