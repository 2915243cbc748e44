"""The puzzles: solutions pass and compile for a GPU, unfilled holes do not pass, wrong fillings are named."""

import ast
import inspect
import json
import os
import re
import resource
import subprocess
import sys
import textwrap
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from wrong_fillings import CAUSES, SHOWN

from cuda_kernels import accesses, puzzles
from cuda_kernels.puzzles import causes, checker, command, evidence, holes, solutions, source, stopping
from cuda_kernels.simulator import launch
from tiers import sampled

ROOT = Path(__file__).resolve().parents[2]
NAMES = list(puzzles.PUZZLES)

#: (puzzle, what goes into its holes, what the verdict must say). "" leaves a line out.
WRONG_FILLINGS = [
    (
        "add_bias",
        ["y[i] = x[i] + bias[i % columns]"],
        r"out of bounds: load of x\[300\], which has 300.*thread 44 of block 1",
    ),
    (
        "add_bias",
        ["y[i] = x[i] + bias[i % columns]"],
        r"Each thread that has no element does this: the guard is missing",
    ),
    (
        "add_bias",
        ["if i <= rows * columns:\n    y[i] = x[i] + bias[i % columns]"],
        r"Only the thread behind the last element does this, number 300",
    ),
    (
        "add_bias",
        ["if i < rows * columns:\n    y[i] = x[i * columns] + bias[i % columns]"],
        r"out of bounds: load of x\[256\].*every thread has an element, so no guard is missing",
    ),
    (
        "add_bias",
        ["for j in range(rows * columns):\n    y[j] = x[j] + bias[j % columns]"],
        r"result is right, but two threads store y\[0\]: thread 0 of block 0 and thread 1 of block 0.*line \d+: y\[j\]",
    ),
    (
        "add_bias",
        ["if i == 0:\n    for j in range(rows * columns):\n        y[j] = x[j] + bias[j % columns]"],
        r"the result is right, but thread 0 of block 0 stores 256 elements of y.*The part of one thread is 1",
    ),
    ("add_bias", ["if i < rows * columns:\n    y[i] = x[i] + bias[i // columns]"], r"the bias of its row's number"),
    ("add_bias", ["if i < rows * columns:\n    y[i] = x[i]"], r"y\[0, 0\]: got .*The bias is not added"),
    (
        "add_bias",
        ["if i < rows:\n    y[i] = x[i] + bias[i % columns]"],
        r"never written: 248 of 256 elements of y, the first y\[0, 8\]",
    ),
    ("widen_bf16", ["x[i]"], r"read as a whole number"),
    ("widen_bf16", ["as_f32(x[i] << 16)"], r"a uint16 shifted by 16 is 0"),
    ("widen_bf16", ["as_f32(np.uint32(x[i]))"], r"must move up by 16"),
    ("swiglu", ["x[row * 2 * columns + columns + column]", "x[row * 2 * columns + column]"], r"gate-order"),
    ("swiglu", ["x[i]", "x[i + columns]"], r"y\[1, 0\]: got"),
    (
        "swiglu",
        ["x[row * columns + column]", "x[row * columns + columns + column]"],
        r"A row of x has 2 \* columns elements",
    ),
    ("swiglu", ["x[row, column]", "x[row, column]"], r"x is flat, its index one integer"),
    (
        "absolute",
        ["8 * cuda.threadIdx.x + k"],
        r"the result is right, but one load of x touches 16 sectors where 2 would do",
    ),
    ("absolute", ["k * 64"], r"never written|race|two threads"),
    ("block_amax", ["largest = maximum(largest, cuda.shfl_xor_sync(WARP, largest, 16))"], r"amax\[0\]: got"),
    (
        "block_amax",
        ["for d in (16, 8, 2, 1):\n    largest = maximum(largest, cuda.shfl_xor_sync(WARP, largest, d))"],
        r"The step of distance 4 is missing",
    ),
    (
        "block_amax",
        [
            "if i < count:\n    for d in (16, 8, 4, 2, 1):\n"
            "        largest = maximum(largest, cuda.shfl_xor_sync(WARP, largest, d))"
        ],
        r"12 of the 32 threads of warp 1 of block \(1, 0, 0\) wait at shuffle.*A shuffle stands outside every `if`",
    ),
    ("block_amax", [""], r"knows its own element only"),
    (
        "block_amax",
        ["for d in (16, 8, 4, 2, 1):\n    largest = largest + cuda.shfl_xor_sync(WARP, largest, d)"],
        r"The shuffled values are added",
    ),
    (
        "block_amax",
        ["largest = maximum(largest, cuda.shfl_xor_sync(WARP, largest, 32))"],
        r"a shuffle's distance must be below 32.*got 32\n  line \d+: largest",
    ),
    ("scale_byte", ["bits >> U32(23)"], r"The exponent is rounded down"),
    ("scale_byte", ["(as_u32(amax[i]) >> U32(23)) - U32(8)"], r"scale-floor"),
    ("scale_byte", ["np.uint32(bits + U32(0x400000)) >> U32(23)"], r"rounded to the nearest power of two"),
    ("scale_byte", ["(bits >> U32(23)) + U32(1)"], r"scale\[\d+, 0\]: got 0x\w+ .*A mantissa of zero needs no more"),
    (
        "mxfp8",
        ["np.uint8(casts.e4m3(value * casts.e8m0_value(byte)))", "scales[i // 32] = np.uint8(byte)"],
        r"multiplied by the scale, 2\^\(byte - 127\)",
    ),
    (
        "mxfp8",
        ["np.uint8(casts.e4m3(value * casts.e8m0_multiplier(byte)))", ""],
        r"never written: 8 of 8 elements of scales, the first scales\[0, 0\]",
    ),
    (
        "mxfp8",
        [
            "np.uint8(casts.e4m3(value * casts.e8m0_multiplier(byte)))",
            "if cuda.threadIdx.x == 0:\n    scales[i // 32] = np.uint8(byte)",
        ],
        r"wrong: never written: 7 of 8 elements of scales.*Only thread 0 of block 0 stores in scales",
    ),
    (
        "mxfp8",
        ["np.uint8(casts.e4m3(value * casts.e8m0_multiplier(byte)))", "scales[i // 32] = np.uint8(byte)"],
        r"the result is right, but two threads store scales\[0\].*Each element is stored by one thread",
    ),
    (
        "mxfp8",
        ["np.uint8(casts.e5m2(value * casts.e8m0_multiplier(byte)))", "scales[i // 32] = np.uint8(byte)"],
        r"The codes are FP8 E5M2's",
    ),
    ("mxfp8", ["casts.e4m3(value)", "scales[i // 32] = np.uint8(byte)"], r"cast as they are"),
    ("pack_fp4", ["np.uint8(second | first << U32(4))"], r"it is the other way round"),
    ("pack_fp4", ["np.uint8(first | second)"], r"codes\[0, 0\].*: got .*must move up by four bits"),
    ("pack_fp4", ["np.uint8(first + second << U32(4))"], r"\+ binds tighter than <<"),
    ("pack_fp4", ["first + second << 4"], r"\+ binds tighter than <<"),
    (
        "transpose",
        ["33", "cuda.syncthreads()", "AS_IT_IS"],
        r"The tiles are in their places, but not turned",
    ),
    ("transpose", ["32", "cuda.syncthreads()", "TURN"], r"result is right, but 32 threads of a warp meet in one bank"),
    (
        "transpose",
        ["columns + 1", "cuda.syncthreads()", "TURN"],
        r"shape of cuda.shared.array must be constant; got columns \+ 1\n  line \d+: tile = .*Numba compiles the shape",
    ),
    ("transpose", ["cuda.blockDim.x + 1", "cuda.syncthreads()", "TURN"], r"must be constant; got cuda.blockDim.x \+ 1"),
    ("transpose", ["33", "", "TURN"], r"reads tile\[.*\] before any thread has written it: is a barrier missing"),
    (
        "transpose",
        [
            "33",
            "cuda.syncthreads()",
            "row, column = row0 + ty + k, column0 + tx\nif row < rows and column < columns:\n"
            "    y[column * rows + row] = np.uint8(tile[ty + k, tx])",
        ],
        r"one store of y touches 32 sectors where 1 would do",
    ),
    (
        "transpose",
        ["33", "if row0 + ty < rows:\n    cuda.syncthreads()", "TURN"],
        r"every thread of a block must reach.*BARRIER",
    ),
    (
        "dbias",
        ["partial[ty, tx] = total\nif ty == 0 and column < columns:\n    FINISH"],
        r"before any thread has written it",
    ),
    (
        "dbias",
        ["TREE    half = half // 2\nif ty == 0 and column < columns:\n    sums[column] = partial[0, tx]"],
        r"got .*Thread 0 of block 0 reads partial\[1, 0\] in line \d+ and thread \(0, 1\) of block 0 stores it in line "
        r"\d+, in no order: is a barrier missing\?",
    ),
    (
        "dbias",
        [
            "partial[ty, tx] = total\ncuda.syncthreads()\nif ty == 1:\n    partial[ty, tx] = total\n"
            "if ty == 0 and column < columns:\n    FINISH"
        ],
        r"the result is right, but by chance: a barrier is missing.*Thread 0 of block 0 reads partial\[1, 0\]",
    ),
    (
        "dbias",
        ["partial[ty, tx] = total\nif ty == 7 and column < columns:\n    LAST"],
        r"the result is right, but by chance: a barrier is missing.*Thread 0 of block 0 stores partial\[0, 0\]",
    ),
    ("dbias", ["partial[:, tx] = total"], r"partial is read and written by single elements, its indices integers"),
    (
        "dbias",
        ["if ty == 0 and column < columns:\n    sums[column] = total"],
        r"Only the rows of the threads with ty == 0",
    ),
    (
        "dbias",
        ["if column < columns:\n    sums[column] = sums[column] + total"],
        r"reads sums\[0\], an output, before any thread has stored it",
    ),
    (
        "dbias",
        ["partial[ty, tx] = total\nif ty == 0 and column < columns:\n    cuda.syncthreads()\n    FINISH"],
        r"32 of 256 threads .* wait at syncthreads.*BARRIER",
    ),
    (
        "dbias",
        ["partial[ty, tx] = total\nif column < columns:\n    cuda.syncthreads()\n    if ty == 0:\n        FINAL"],
        r"64 of 256 threads of block \(1, 0, 0\) wait at syncthreads.*BARRIER",
    ),
    (
        "dbias",
        ["partial[ty, tx] = total\ncuda.syncthreads()\nif column < columns:\n    ALL"],
        r"the result is right, but two threads store sums\[0\]: thread 0 of block 0 and thread \(0, 1\) of block 0",
    ),
    (
        "dbias",
        ["partial[ty, tx] = total\ncuda.syncthreads()\nif ty == 0 and column < columns:\n    TWICE"],
        r"counted twice",
    ),
    (
        "dbias",
        ["partial[tx, ty] = total\ncuda.syncthreads()"],
        r"out of bounds: store of \[8, 0\] in shared memory of shape \[8, 32\].*in the right order",
    ),
    (
        "dbias",
        ["partial[ty, tx] = total\ncuda.syncthreads()\nif ty == 0:\n    FINISH"],
        r"out of bounds: store of sums\[40\].*the guard is missing",
    ),
]
SHORT = {
    "TREE": "partial[ty, tx] = total\ncuda.syncthreads()\nhalf = 4\nwhile half > 0:\n    if ty < half:\n"
    "        partial[ty, tx] = partial[ty, tx] + partial[ty + half, tx]\n",
    "TURN": "row, column = row0 + tx, column0 + ty + k\nif row < rows and column < columns:\n"
    "    y[column * rows + row] = np.uint8(tile[tx, ty + k])",
    "FINAL": "for k in range(1, 8):\n            total = total + partial[k, tx]\n        sums[column] = total",
    "TWICE": "for k in range(8):\n        total = total + partial[k, tx]\n    sums[column] = total",
    "LAST": "for k in range(7):\n        total = total + partial[k, tx]\n    sums[column] = total",
    "ALL": "total = F(0)\n    for k in range(8):\n        total = total + partial[k, tx]\n    sums[column] = total",
    "AS_IT_IS": "row, column = row0 + tx, column0 + ty + k\nif row < rows and column < columns:\n"
    "    y[column * rows + row] = np.uint8(tile[ty + k, tx])",
    "FINISH": "for k in range(1, 8):\n        total = total + partial[k, tx]\n    sums[column] = total",
}


def filled(name, fillings):
    """The text of `holes` with the holes of one kernel filled."""
    source = Path(holes.__file__).read_text()
    node = next(n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == name)
    lines, left = source.splitlines(), list(fillings)
    for number in range(node.lineno - 1, node.end_lineno):
        line = lines[number]
        while "..." in line:
            filling = left.pop(0)
            for word, text in SHORT.items():
                filling = filling.replace(word, text)
            alone = line.strip() == "..."
            line = (
                textwrap.indent(filling or "pass", line[: -len(line.lstrip())])
                if alone
                else line.replace("...", filling, 1)
            )
        lines[number] = line
    assert not left
    return "\n".join(lines) + "\n"


def verdict_of(tmp_path, name, fillings):
    """The verdict on a kernel whose holes are filled so."""
    path = tmp_path / "puzzles.py"
    path.write_text(filled(name, fillings))
    return puzzles.check(command.load(path, path.read_text())[name])


@pytest.mark.parametrize("name", NAMES)
def test_solution(name):
    verdict = puzzles.check(getattr(solutions, name))
    assert verdict.solved, str(verdict)
    assert verdict.accesses


@pytest.mark.parametrize("name", NAMES)
def test_holes_are_not_yet(name):
    verdict = puzzles.check(getattr(holes, name))
    assert verdict.status == checker.NOT_YET
    line = int(re.search(r"hole in line (\d+)", str(verdict))[1])
    assert "..." in Path(holes.__file__).read_text().splitlines()[line - 1]


@sampled(("name", "fillings", "said"), WRONG_FILLINGS, 8, in_all=8)
def test_wrong_filling(tmp_path, name, fillings, said):
    verdict = verdict_of(tmp_path, name, fillings)
    assert verdict.status == checker.WRONG
    said = said.replace("BARRIER", "A barrier stands outside every `if`")
    assert re.search(said, str(verdict), re.DOTALL), str(verdict)


def each_filling(table):
    """(name of a puzzle, fillings, sentence) for each wrong filling of a table."""
    return [
        (name, fillings, sentence)
        for name, rows in table.items()
        for sentence, wrong in rows.items()
        for fillings in wrong
    ]


@sampled(("name", "fillings", "cause"), each_filling(CAUSES), 16, in_all=12)
def test_the_cause_of_a_wrong_filling_and_no_other_is_named(tmp_path, name, fillings, cause):
    verdict = verdict_of(tmp_path, name, fillings)
    assert verdict.status == checker.WRONG
    assert [line for line in verdict.details if line.startswith("Why: ")] == [f"Why: {cause}"], str(verdict)


@sampled(("name", "fillings", "line"), each_filling(SHOWN), 16, in_all=12)
def test_what_a_run_shows_is_said_and_no_cause_is_named(tmp_path, name, fillings, line):
    verdict = verdict_of(tmp_path, name, fillings)
    assert verdict.status == checker.WRONG
    said = [re.sub(r"^Line \d+", "Line N", detail) for detail in (verdict.reason, *verdict.details)]
    assert line in said and "Why: " not in str(verdict), str(verdict)


def answered(puzzle, answer, case):
    """What a known wrong answer leaves in each output, as bytes."""
    with np.errstate(all="ignore"):
        found = answer(**case.arrays)
    arrays = zip(puzzle.expected(case).values(), found if isinstance(found, tuple) else (found,), strict=True)
    return tuple(np.broadcast_to(mine, right.shape).astype(right.dtype).tobytes() for right, mine in arrays)


@pytest.mark.parametrize("name", causes.ANSWERS)
def test_known_wrong_answers_differ(name):
    """From each other on the first input on which any differs from the right one, and so from the right one on one."""
    puzzle = puzzles.PUZZLES[name]
    left = causes.ANSWERS[name]
    for case in puzzle.cases():
        right = tuple(array.tobytes() for array in puzzle.expected(case).values())
        keys = {sentence: answered(puzzle, answer, case) for sentence, answer in left.items()}
        wrong = {sentence: key for sentence, key in keys.items() if key != right}
        assert len(set(wrong.values())) == len(wrong), wrong
        left = {sentence: answer for sentence, answer in left.items() if sentence not in wrong}
    assert not left


@pytest.mark.parametrize("name", causes.READS)
def test_known_wrong_indices_differ(name):
    """On each input, but for those that are right there."""
    for case in puzzles.PUZZLES[name].cases():
        numbers, seen = np.arange(puzzles.PUZZLES[name].threads.elements(case.sizes)), {}
        for sentence, indices in causes.READS[name].items():
            places = indices(numbers, **case.sizes).items()
            key = tuple(
                (array, np.sort([place + 0 * numbers for place in each], axis=0).tobytes()) for array, each in places
            )
            assert seen.get(key, "") == "", (sentence, seen[key])
            seen.setdefault(key, sentence)


def test_each_cause_has_a_wrong_filling():
    """Causes that differ in numbers only, as those of distances do, share one."""

    def kinds(sentences):
        return {re.sub(r"\b\d+(, \d+)*\b", "N", sentence) for sentence in sentences}

    for table in (causes.ANSWERS, causes.READS):
        for name, rows in table.items():
            missing = kinds(rows) - kinds(CAUSES[name]) - {""}
            assert not missing, (name, missing)


def test_a_cause_fits_the_inputs_before_too():
    """What is right on the first input has no cause that would be wrong there."""
    puzzle = puzzles.PUZZLES["dbias"]
    first, _, last = puzzle.cases()
    answer = causes.ANSWERS["dbias"][
        "The part of the thread with ty == 0 is counted twice: it is in `total` and in `partial[0, tx]`."
    ]
    got = {"sums": answer(**last.arrays)}
    assert "counted twice" in evidence.known_answer(evidence.Run(puzzle, last, got, accesses.Recorder(), ()))
    assert evidence.known_answer(evidence.Run(puzzle, last, got, accesses.Recorder(), (first,))) == ""


@pytest.mark.parametrize(
    ("name", "fillings"),
    [
        ("dbias", ["ATOMIC"]),
        (
            "dbias",
            [
                "TREE    cuda.syncthreads()\n    half = half // 2\n"
                "if ty == 0 and column < columns:\n    sums[column] = partial[0, tx]"
            ],
        ),
        (
            "dbias",
            [
                "if ty == 0:\n    partial[0, tx] = F(0)\ncuda.syncthreads()\ncuda.atomic.add(partial, (0, tx), total)\n"
                "cuda.syncthreads()\nif ty == 0 and column < columns:\n    sums[column] = partial[0, tx]"
            ],
        ),
        ("transpose", ["32 + 1", "cuda.syncthreads()", "TURN"]),
        ("dbias", ["partial[ty, tx] = total\ncuda.syncthreads()\nif ty == 7 and column < columns:\n    LAST"]),
        ("absolute", ["k * 64 + 63 - cuda.threadIdx.x"]),
        (
            "block_amax",
            ["for d in (1, 2, 4, 8, 16):\n    largest = maximum(cuda.shfl_xor_sync(WARP, largest, d), largest)"],
        ),
        ("mxfp8", ["casts.e4m3(value * casts.e8m0_multiplier(byte))", "if i % 32 == 31:\n    scales[i // 32] = byte"]),
        ("transpose", ["35", "cuda.syncthreads()", "TURN"]),
        ("pack_fp4", ["np.uint8(first + second * 16)"]),
    ],
)
def test_other_solutions(tmp_path, name, fillings):
    """Atomic adds, another thread that finishes, threads the other way round, the last thread that stores the byte."""
    texts = {
        "ATOMIC": "if ty == 0 and column < columns:\n    sums[column] = F(0)\ncuda.syncthreads()\n"
        "if column < columns:\n    cuda.atomic.add(sums, column, total)",
    }
    for word, text in texts.items():
        fillings = [filling.replace(word, text) for filling in fillings]
    verdict = verdict_of(tmp_path, name, fillings)
    assert verdict.solved, str(verdict)


@pytest.mark.parametrize(
    ("shape", "constant"),
    [
        ("(32, 33)", True),
        ("64", True),
        ("(32, 32 + 1)", True),
        ("(32, literal)", True),
        ("(32, WARP)", True),
        ("(32, literal + 1)", False),
        ("(32, twice)", False),
        ("(32, columns)", False),
        ("columns", False),
        ("(32, len(x))", False),
        ("(32, min(32, 33))", False),
    ],
)
def test_a_shape_is_what_numba_knows_while_it_compiles(tmp_path, shape, constant):
    lines = ["literal = 33", "twice = 33", "twice = 34", f"cuda.local.array({shape}, np.float32)", "AS_BEFORE"]
    fillings = ["\n".join(lines).replace("AS_BEFORE", "if i < rows * columns:\n    y[i] = x[i] + bias[i % columns]")]
    path = tmp_path / "puzzles.py"
    path.write_text(filled("add_bias", fillings))
    kernel = command.load(path, path.read_text())["add_bias"]
    found = list(source.shapes_known_at_launch(kernel))
    assert (not found) is constant, found


def test_each_puzzle_has_wrong_fillings():
    for name in NAMES:
        assert sum(row[0] == name for row in WRONG_FILLINGS) >= 2, name


@pytest.mark.parametrize("name", NAMES)
def test_solution_fills_the_holes_and_changes_nothing_else(name):
    before, after = (inspect.getsource(getattr(module, name)) for module in (holes, solutions))
    pattern = r"[\s\S]+?".join(re.escape(part) for part in before.split("..."))
    assert re.fullmatch(pattern, after)


@pytest.mark.parametrize("name", NAMES)
def test_spec_is_what_the_judge_accepts(name):
    """NumPy's exp and refops' may differ in the last bits, so the oracle decides."""
    puzzle = puzzles.PUZZLES[name]
    for case in puzzle.cases():
        assert puzzle.judge is None or puzzle.judge(case.arrays, puzzle.expected(case)).ok


def test_specs_have_three_lines_at_most_and_every_puzzle_its_rule():
    source = Path(holes.__file__).read_text()
    for puzzle in puzzles.PUZZLES.values():
        assert len(inspect.getsource(puzzle.spec).strip().splitlines()) <= 4  # with its `def`
        assert f"# --- {puzzle.number}. {puzzle.title} ---" in source
        assert len(inspect.getsource(getattr(solutions, puzzle.name)).splitlines()) <= 20  # fits on a slide


COMPILE = """
import importlib.util, json, sys
from cuda_kernels.compile_report import MissingToolError, measure, problems, to_ptx
from cuda_kernels.launch import numba_type
from cuda_kernels.operands import pointer, scalar
from cuda_kernels.puzzles import solutions
found = {}
try:
    for name, arguments in json.loads(sys.argv[1]).items():
        types = tuple(numba_type(scalar("int32") if one == "size" else pointer(one)) for one in arguments)
        found[name] = problems(measure(to_ptx(getattr(solutions, name), types, (9, 0)), (9, 0)))
except MissingToolError as error:
    found = {"missing": str(error)}
print(json.dumps(found))
"""


@pytest.mark.full
def test_solutions_compile_without_spills_or_float64():
    """What runs on a GPU is compiled as well as simulated."""
    described = {}
    for name, puzzle in puzzles.PUZZLES.items():
        case = next(iter(puzzle.cases()))
        arrays = {**case.arrays, **puzzle.expected(case)}
        carried = {key: "uint16" if a.dtype.name == "bfloat16" else a.dtype.name for key, a in arrays.items()}
        described[name] = [carried.get(argument, "size") for argument in puzzle.arguments]
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "0"}
    command_line = [sys.executable, "-c", COMPILE, json.dumps(described)]
    done = subprocess.run(command_line, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    if "missing" in found:
        pytest.skip(found["missing"])
    assert found == {name: [] for name in NAMES}


# --- what users do ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("filling", "said"),
    [
        ("raise ValueError('mine')", "ValueError: mine\n  line"),
        ("raise ValueError('mine') from TypeError('its cause')", "ValueError: mine\n  line"),
        ("undefined + 1", "NameError: name 'undefined' is not defined"),
        ("raise SystemExit(0)", "a kernel cannot end the program"),
        ("x[0] = 0", "x is an input"),
        ("y[0.5] = 0", "its index one integer"),
        ("y[-1] = 0", "out of bounds: store of y[-1]"),
        ("magnitude(x)", "WholeArrayError: x is a whole array; a thread computes with single elements: x[i]\n  line"),
        ("y[0] = bias", "WholeArrayError: bias is a whole array"),
        ("def f():\n    return f()\nf()", "RecursionError"),
    ],
)
def test_errors_of_kernels_are_reported(tmp_path, filling, said):
    verdict = verdict_of(tmp_path, "add_bias", [filling])
    assert verdict.status == checker.WRONG
    assert said in str(verdict)


ENDLESS = ["while True:\n        pass", "while True:\n        y[0] = 1"]


def assert_stopped(verdict):
    assert (verdict.status, verdict.reason) == (checker.WRONG, "stopped after 0.5 s: does a loop never end?")
    assert re.match(r"line \d+: ", verdict.details[0])
    time.sleep(0.1)  # nothing is left behind


@pytest.mark.parametrize("filling", ENDLESS)
def test_a_loop_without_end_is_stopped(tmp_path, monkeypatch, filling):
    monkeypatch.setattr(checker, "SECONDS", 0.5)
    assert_stopped(verdict_of(tmp_path, "add_bias", [filling]))


@pytest.mark.parametrize("filling", ENDLESS)
def test_a_loop_without_end_is_stopped_in_a_thread(tmp_path, monkeypatch, filling):
    monkeypatch.setattr(checker, "SECONDS", 0.5)
    with ThreadPoolExecutor(1) as pool:
        assert_stopped(pool.submit(verdict_of, tmp_path, "add_bias", [filling]).result(timeout=60))


#: What a parent may leave to its children; a script's background jobs have the first.
DISPOSITIONS = {
    "SIGINT ignored": "signal.signal(signal.SIGINT, signal.SIG_IGN)",
    "all ignored": "[signal.signal(s, signal.SIG_IGN) for s in signal.valid_signals() - {9, 17, 19, 32, 33}]",
    "all blocked": "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())",
}


@pytest.mark.parametrize("disposition", DISPOSITIONS)
def test_a_loop_without_end_is_stopped_whatever_signals_do(tmp_path, disposition):
    """The whole command, in a process that started with them so: Python leaves an ignored SIGINT ignored."""
    (tmp_path / "puzzles.py").write_text(filled("add_bias", [ENDLESS[0]]))
    code = (
        "import sys; from cuda_kernels.puzzles import checker, command; checker.SECONDS = 0.5; sys.exit(command.main())"
    )
    start = f"import os, signal, sys; {DISPOSITIONS[disposition]}; os.execv(sys.executable, sys.argv[1:])"
    command_line = [sys.executable, "-c", start, sys.executable, "-c", code, "--only", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command_line, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=60)
    assert (done.returncode, done.stderr) == (1, "")
    assert "1  add_bias     wrong    stopped after 0.5 s: does a loop never end?" in done.stdout


@pytest.mark.parametrize("filling", ["__import__('time').sleep(1e6)", "sum(iter(int, 1))"], ids=["waits", "in C"])
def test_the_command_ends_even_if_the_kernel_cannot_be_stopped(tmp_path, filling):
    """In the second one no Python runs at all: a clock of C ends it."""
    (tmp_path / "puzzles.py").write_text(filled("add_bias", [filling]))
    code = (
        "import sys; from cuda_kernels.puzzles import checker, command; checker.SECONDS = 0.2; command.GRACE = 0.5; "
        "sys.exit(command.main(['--only', '1']))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=60
    )
    assert done.returncode == 1
    if "sleep" in filling:
        assert done.stdout.startswith("add_bias cannot be stopped: a call that never returns") and done.stderr == ""
    else:
        assert re.search(r'Timeout.*\n(.*\n)* *File ".*puzzles.py", line \d+ in add_bias', done.stderr)


def test_results_and_errors_pass_through_a_time_limit():
    assert stopping.call_within(5, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        stopping.call_within(5, lambda: 1 / 0)


def watching():
    """How many threads watch a call."""
    frames = list(sys._current_frames().values())
    return sum(any(f.f_code is stopping._Watch._run.__code__ for f, _ in traceback.walk_stack(one)) for one in frames)


def spin(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_calls_that_end_at_the_limit_leave_nothing_behind(monkeypatch):
    """An interrupt that arrives while the call ends is raised by it, or never."""
    monkeypatch.setattr(stopping, "AGAIN", 0.01)
    before, stopped, count = sys.getswitchinterval(), 0, 400
    steps = 0.00002, 0.0001  # close to the limit, and so far from it that some calls end and some are stopped
    sys.setswitchinterval(1e-5)  # the watching thread gets its turn at once
    try:
        for number in range(count):
            try:
                stopping.call_within(0.002, partial(spin, 0.002 + steps[number % 2] * (number % 40 - 10)))
            except stopping.TooLongError:
                stopped += 1
    finally:
        sys.setswitchinterval(before)
    assert 0 < stopped < count
    for _ in range(100):  # an interrupt that was left behind is raised here
        time.sleep(0.001)
    assert watching() == 0


def test_a_limit_ends_with_its_call_whatever_interrupts_that():
    """Also an error on the way into the end, as Ctrl-C may be one."""
    real, calls = stopping._Watch.end, []

    def end(watch):
        calls.append(watch)
        if len(calls) == 1:
            raise KeyboardInterrupt
        real(watch)

    with mock.patch.object(stopping._Watch, "end", end), pytest.raises(KeyboardInterrupt):
        stopping.call_within(0.05, lambda: None)
    time.sleep(0.1)
    assert len(calls) > 1 and watching() == 0


@pytest.mark.parametrize("first", [KeyboardInterrupt, ValueError])
def test_an_interrupt_while_an_error_is_raised_does_not_replace_it(first):
    real, calls = stopping._Watch._raise, []

    def late(watch, error):
        calls.append(error)
        if len(calls) == 1:
            raise watch.interrupt
        real(watch, error)

    def call():
        raise first

    with mock.patch.object(stopping._Watch, "_raise", late), pytest.raises(first):
        stopping.call_within(60, call)
    time.sleep(0.1)
    assert len(calls) > 1 and watching() == 0


def test_ctrl_c_just_before_the_limit_is_ctrl_c():
    """The limit's interrupt arrives on the way into the end, while KeyboardInterrupt is raised."""
    real, calls = stopping._Watch.end, []

    def end(watch):
        calls.append(watch)
        if len(calls) == 1:
            raise watch.interrupt
        real(watch)

    def call():
        raise KeyboardInterrupt

    with mock.patch.object(stopping._Watch, "end", end), pytest.raises(KeyboardInterrupt):
        stopping.call_within(60, call)
    time.sleep(0.1)
    assert watching() == 0


@pytest.mark.parametrize("seconds", [0, -1, -1e9])
def test_a_limit_in_the_past_stops_at_once(seconds):
    with pytest.raises(stopping.TooLongError):
        stopping.call_within(seconds, partial(spin, 60))


def test_calls_near_the_recursion_limit_end():
    """At each depth the call returns or raises RecursionError, and nothing watches afterwards."""
    ended = []

    def deeper():
        try:
            ended.append(stopping.call_within(60, lambda: True))
        except RecursionError:
            ended.append(False)
        deeper()

    with pytest.raises(RecursionError):
        deeper()
    assert set(ended) == {True, False}
    time.sleep(0.1)
    assert watching() == 0


def test_a_limit_in_a_limit_is_told_apart(monkeypatch):
    """Also while inner ones start and end without a pause."""
    with pytest.raises(stopping.TooLongError, match=r"stopped after 0\.2 s"):
        stopping.call_within(0.2, lambda: stopping.call_within(60, partial(spin, 60)))
    with pytest.raises(stopping.TooLongError, match=r"stopped after 0\.2 s"):
        stopping.call_within(60, lambda: stopping.call_within(0.2, partial(spin, 60)))
    for _ in range(5):
        with pytest.raises(stopping.TooLongError, match=r"stopped after 0\.1 s"):
            stopping.call_within(0.1, lambda: [stopping.call_within(1e12, int) for _ in iter(int, 1)])


def test_an_interrupt_that_a_finalizer_loses_comes_again(monkeypatch):
    lost = []
    monkeypatch.setattr(stopping, "AGAIN", 0.05)
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: lost.append(unraisable.exc_type))

    class Endless:
        def __del__(self):
            while True:
                pass

    def run():
        Endless()
        while True:
            pass

    with pytest.raises(stopping.TooLongError, match=r"stopped after 0\.1 s"):
        stopping.call_within(0.1, run)
    assert len(lost) == 1


def test_what_is_no_puzzle():
    with pytest.raises(TypeError, match="a kernel is a function; got int"):
        puzzles.check(3)
    with pytest.raises(ValueError, match="no puzzle has the name 'launch': a kernel is known by its puzzle's name"):
        puzzles.check(launch)


def test_a_missing_barrier_that_only_one_order_shows(tmp_path):
    """The threads with ty == 0 begin each sum: forward they come first, by chance."""
    begin = "if ty == 0 and column < columns:\n    sums[column] = F(0)\n"
    verdict = verdict_of(tmp_path, "dbias", [begin + "if column < columns:\n    cuda.atomic.add(sums, column, total)"])
    assert "Right when the threads run from the first to the last, wrong in the other order." in verdict.details


# --- accesses ---------------------------------------------------------------------------------------


def test_sectors_and_banks_are_counted(tmp_path):
    bad = verdict_of(tmp_path, "absolute", ["8 * cuda.threadIdx.x + k"])
    load = next(request for request in bad.accesses if request.kind == "load")
    assert (len(load.sectors), load.asked, load.repeats, len(load.lanes)) == (16, 64, 8, 32)
    assert str(load).startswith("load x, line") and "64 bytes in 16 sectors, 512 bytes move" in str(load)
    drawn = puzzles.draw([load]).splitlines()
    assert drawn[2] == "  sector     0        ##.............................."
    assert drawn[-1] == "  ... and 8 more sectors"
    good = puzzles.check(solutions.transpose).accesses
    assert [(r.kind, r.array, r.memory, r.ways if r.memory == "shared" else len(r.sectors)) for r in good] == [
        ("load", "x", "global", 1),
        ("store", "tile", "shared", 1),
        ("load", "tile", "shared", 1),
        ("store", "y", "global", 1),
    ]


def test_a_wide_access_is_one():
    from cuda_kernels.simt import cuda, load_words

    buffer = np.zeros(256 + 8, np.uint16)
    x = buffer[-buffer.ctypes.data % 16 // 2 :][:256]

    def kernel(x):
        load_words(x, 8 * cuda.threadIdx.x)

    recorder = accesses.Recorder()
    launch(kernel, (1,), (32,), [recorder.array("x", x)], watch=recorder.shared)
    (request,) = recorder.requests()
    assert (request.code, len(request.sectors), request.asked) == ("load_words(x, 8 * cuda.threadIdx.x)", 16, 512)


def test_plot():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    figure = puzzles.plot(puzzles.check(solutions.transpose).accesses, "transpose")
    assert [axis.get_title() for axis in figure.axes][1] == "store tile: 1 in one bank"
    matplotlib.pyplot.close(figure)


def test_accesses_of_the_teaching_kernels_here_and_from_an_unsimulated_process():
    naive, coalesced = (accesses.of_naive(f"mxfp8 {kind}", 32, 128) for kind in ("naive", "coalesced"))
    assert [len(request.sectors) for request in naive] == [32, 1, 32, 32]
    assert [len(request.sectors) for request in coalesced] == [2, 1, 1]
    code = "from cuda_kernels import accesses; print(accesses.draw(accesses.of_naive('mxfp8 naive', 32, 128)))"
    environment = {k: v for k, v in os.environ.items() if k != "NUMBA_ENABLE_CUDASIM"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.stdout.strip() == accesses.draw(naive), done.stderr


# --- the command ------------------------------------------------------------------------------------


def run(folder, *arguments, environment=None):
    """Run `python -m cuda_kernels puzzles` in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
    return subprocess.run(
        [sys.executable, "-m", "cuda_kernels", "puzzles", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        timeout=120,
    )


def test_the_command_writes_the_file_and_then_checks_it(tmp_path):
    first = run(tmp_path, environment={"NUMBA_ENABLE_CUDASIM": "0"})
    path = tmp_path / "puzzles.py"
    assert (first.returncode, first.stderr) == (1, "") and first.stdout.startswith("puzzles.py is written: 10 kernels")
    assert path.read_text() == Path(holes.__file__).read_text()
    second = run(tmp_path)
    assert second.returncode == 1 and second.stdout.count("not yet") == 11 and "0 of 10 solved." in second.stdout
    path.write_text(filled("add_bias", ["if i < rows * columns:\n    y[i] = x[i] + bias[i % columns]"]))
    kept = path.read_text()
    third = run(tmp_path)
    assert "1  add_bias     solved" in third.stdout and "1 of 10 solved." in third.stdout
    assert "2. bfloat16 is the upper half of float32 (puzzles.py)" in third.stdout
    assert path.read_text() == kept
    only = run(tmp_path, "--only", "1")
    assert only.returncode == 0 and "1 of 1 solved." in only.stdout and "sector     0        ########" in only.stdout
    assert run(tmp_path, "--only", "widen_bf16").returncode == 1


def test_a_file_in_a_folder_that_is_not_there_is_refused(tmp_path):
    done = run(tmp_path, "none/there/p.py")
    said = "error: FILE must lie in a folder that exists; got 'none/there/p.py': there is no 'none/there'"
    assert (done.returncode, done.stdout, done.stderr.splitlines()[-1].partition(": ")[2]) == (2, "", said)


def test_a_puzzle_where_a_file_stands_is_that_puzzle(tmp_path):
    first = run(tmp_path, "transpose")
    assert first.returncode == 1 and "replace the `...` of `transpose`" in first.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["puzzles.py"]
    for word in ("transpose", "9"):
        assert run(tmp_path, word).stdout == run(tmp_path, "--only", "transpose").stdout
    solved = run(tmp_path, "--solutions", "dbias")
    assert solved.returncode == 0 and "1 of 1 solved." in solved.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["puzzles.py"]
    (tmp_path / "transpose").write_text("")  # a file of this name is a file
    assert "transpose has no function add_bias" in run(tmp_path, "transpose").stdout


def test_the_command_hints_at_one_puzzle_alone(tmp_path):
    hint = "`--only N`, a number or a name, shows one of them alone, with what its threads ask memory for."
    run(tmp_path)
    assert run(tmp_path).stdout.endswith(f"\n\n{hint}\n")
    assert hint not in run(tmp_path, "--only", "1").stdout


def test_a_full_disk_leaves_no_half_file(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "holes", SimpleNamespace(__file__=str(tmp_path / "holes.py")))
    (tmp_path / "holes.py").write_text("x" * 100_000)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limit[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            command.write(tmp_path / "puzzles.py", puzzles.PUZZLES["add_bias"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not (tmp_path / "puzzles.py").exists()


def test_the_command_says_which_hole_fails_and_why(tmp_path):
    (tmp_path / "mine.py").write_text(filled("scale_byte", ["(as_u32(amax[i]) >> U32(23)) - U32(8)"]))
    done = run(tmp_path, "mine.py", "--only", "6")
    assert done.returncode == 1
    assert re.search(r"scale\[0, 0\].*: got 0x\w+ .*, acceptable 0x\w+", done.stdout)
    assert "scale-floor: The scale bytes follow the OCP floor rule" in done.stdout


def test_the_command_checks_the_solutions(tmp_path):
    done = run(tmp_path, "--solutions")
    assert (done.returncode, done.stderr) == (0, "") and "10 of 10 solved." in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_closed_pipe_is_no_error(tmp_path):
    code = (
        "import os, sys; read, write = os.pipe(); os.close(read); os.dup2(write, 1); "
        "from cuda_kernels.__main__ import main; sys.exit(main(['puzzles']))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def add_bias(:\n", "puzzles.py cannot be run: line 1: SyntaxError"),
        ("\nimport nowhere\n", "puzzles.py cannot be run: line 2: ModuleNotFoundError"),
        ("raise SystemExit(0)\n", "puzzles.py cannot be run: line 1: SystemExit"),
        ("", "puzzles.py has no function add_bias"),
        ("add_bias = 3\n", "add_bias is no function but int"),
        ("def add_bias(x):\n    pass\n", "TypeError: add_bias() takes 1 positional argument but 5 were given"),
    ],
)
def test_a_broken_file_is_reported(tmp_path, text, said):
    (tmp_path / "puzzles.py").write_text(text)
    done = run(tmp_path)
    assert done.returncode == 1 and said in done.stdout and done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "11"], "no puzzle has the number or name '11'"),
        (["--nonsense"], "unrecognized arguments"),
        (["--solutions", "mine.py"], "leave FILE out"),
        (["nowhere/mine.py"], "FILE must lie in a folder that exists; got 'nowhere/mine.py'"),
        (["tranpose"], "no file and no puzzle has the name 'tranpose'; puzzles: add_bias, "),
        (["11"], "no file and no puzzle has the name '11'"),
        (["transpose", "--only", "3"], "transpose is a puzzle and no file, and --only 3 names one too"),
        (["."], "Is a directory"),
    ],
)
def test_bad_use(tmp_path, arguments, said):
    done = run(tmp_path, *arguments)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_an_unsimulated_process_is_told(tmp_path):
    code = "from cuda_kernels import simt, puzzles; puzzles.check(puzzles.PUZZLES['dbias'].spec)"
    environment = {k: v for k, v in os.environ.items() if k != "NUMBA_ENABLE_CUDASIM"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert "RuntimeError: cuda_kernels was imported unsimulated in this process" in done.stderr


# --- the notebook -----------------------------------------------------------------------------------


def notebook_cells(kind):
    """The texts of the notebook's cells of one kind."""
    cells = json.loads((ROOT / "notebooks" / "06_write_the_kernel.ipynb").read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == kind]


def test_the_notebook_has_the_same_rules_in_words():
    """A title and what stands below it, however the lines are broken."""
    source = Path(holes.__file__).read_text()
    rules = re.findall(r"^# --- (\d+\. .*?) -+\n((?:#.*\n)+)", source, re.MULTILINE)
    in_file = {title: words.replace("#", "").split() for title, words in rules}
    in_notebook = {}
    for text in notebook_cells("markdown"):
        heading, *lines = text.splitlines()
        if re.match(r"## \d+\. ", heading):
            in_notebook[heading.removeprefix("## ")] = " ".join(lines).split()
    assert len(in_file) == len(puzzles.PUZZLES)
    assert in_file == in_notebook


def test_the_notebook_has_the_same_kernels():
    functions = [
        ast.unparse(node)
        for text in notebook_cells("code")
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef)
    ]
    for name in NAMES:
        for function in (puzzles.PUZZLES[name].spec, getattr(holes, name), getattr(solutions, name)):
            assert ast.unparse(ast.parse(inspect.getsource(function))) in functions, name
