"""Every kernel compiled without a GPU: no spills, no local memory, no float64, wide accesses and budgets as promised.

The target is an H100's; with EVERY_TARGET=1 in the environment all of `compile_report.TARGETS`, which takes minutes
unless they were compiled before. And the report itself: what it reads from disassembly, that it catches kernels that
are bad on purpose, what it says when a tool is missing.
"""

import json
import os
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from cuda_kernels import compile_report, ptx_cache
from cuda_kernels.__main__ import main
from cuda_kernels.compile_report import Measured, MissingToolError, instructions_of, problems

TARGETS = compile_report.TARGETS if os.environ.get("EVERY_TARGET") == "1" else ((9, 0),)
Entry = namedtuple("Entry", "limits wide_loads wide_stores")


def missing_tools():
    """Why nothing can be compiled here, or None."""
    try:
        compile_report.require_compiler()
        for tool in ("ptxas", "nvdisasm"):
            compile_report.find_tool(tool)
    except MissingToolError as error:
        return str(error)
    return None


needs_compiler = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))


# --- the catalogue ----------------------------------------------------------------------------------


def first_of_each_kind():
    """Entries of the catalogue: the first of each kind of kernel, and a tenth of the others."""
    kinds, others = {}, []
    for entry in compile_report.catalogue():
        if kinds.setdefault(entry.spec.title, entry) is not entry:
            others.append(entry)
    return [*kinds.values(), *others[::10]]


@pytest.fixture(scope="module", params=["first of each kind", pytest.param("all", marks=pytest.mark.sweep)])
def reported(request):
    """(entries of the catalogue, [(Measured, problems)] of them)."""
    entries = compile_report.catalogue() if request.param == "all" else first_of_each_kind()
    with mock.patch.object(compile_report, "catalogue", lambda pattern: entries):
        return entries, compile_report.report(targets=TARGETS)


@pytest.mark.full
@needs_compiler
def test_no_kernel_has_a_problem(reported):
    _, results = reported
    wrong = [f"{m.name} for {compile_report.architecture(m.target)}: {p}" for m, found in results for p in found]
    assert not wrong, "\n".join(wrong)


@pytest.mark.full
@needs_compiler
def test_the_report_has_every_kernel_once_for_each_target(reported):
    entries, results = reported
    every = [entry.name for entry in compile_report.catalogue()]
    assert len(every) == len(set(every))
    names = [entry.name for entry in entries]
    assert [(m.name, m.target) for m, _ in results] == [(name, t) for name in names for t in sorted(TARGETS, key=str)]


# --- small kernels of known content -----------------------------------------------------------------


@pytest.fixture(scope="module")
def small():
    """name -> {"measured": ..., "problems": [...]} of bad_kernels.py."""
    run = subprocess.run(
        [sys.executable, Path(__file__).parent / "bad_kernels.py"],
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "0", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.full
@needs_compiler
@pytest.mark.parametrize(
    ("name", "accesses"),
    [
        ("wide", {"LDG.E.128": 2, "STG.E.128": 1}),
        ("narrow", {"LDG.E.U8": 1, "STG.E.64": 1}),
        ("many", {"LDG.E.32": 96, "STG.E.32": 96}),
    ],
)
def test_accesses_are_counted(small, name, accesses):
    assert small[name]["measured"]["accesses"] == accesses
    assert small[name]["problems"] == []


@needs_compiler
@pytest.mark.parametrize(
    ("name", "words"),
    [("float64", "computes in float64"), ("local", "has a stack of 256 bytes"), ("spill", "spills")],
)
def test_bad_kernels_are_caught(small, name, words):
    assert any(words in sentence for sentence in small[name]["problems"]), small[name]


@needs_compiler
def test_the_slow_path_of_a_division_is_counted_apart(small):
    measured = small["division"]["measured"]
    assert measured["called"] > 50
    assert 10 < measured["instructions"] - measured["called"] < 30


@needs_compiler
def test_loops_are_seen_and_straight_code_has_none(small):
    assert small["loop"]["measured"]["loops"] >= 1
    assert {name for name, one in small.items() if one["measured"]["loops"]} == {"loop", "local"}


def test_an_output_that_the_kernel_lost_is_seen():
    text = "ld.param.u64 %rd1, [kernel_param_0];\n ld.param.u64 %rd2, [kernel_param_2];"
    assert compile_report.unused_arguments(text, {0: "x of Inputs", 1: "scales of Outputs", 2: "data of Outputs"}) == [
        "scales of Outputs"
    ]


# --- reading disassembly ----------------------------------------------------------------------------

SASS = """
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/              @!P0 LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0020*/                   NOP ;
        /*0030*/              @UP0 BRA `(.L_x_1) ;
        /*0040*/                   EXIT ;
        .weak           $__internal_0_$__cuda_sm3x_div
$__internal_0_$__cuda_sm3x_div:
        /*0050*/                   FADD R1, R2, R3 ;
        /*0060*/                   RET.REL.NODEC R2 `(kernel) ;
.L_x_2:
        /*0070*/                   BRA `(.L_x_2);
        /*0080*/                   NOP;
"""


def test_instructions_without_padding_and_with_subroutines_marked():
    instructions, labels = instructions_of(SASS)
    names = [(opcode, inside) for _, opcode, _, inside in instructions]
    assert names == [
        ("LDC", False),
        ("LDG.E.128.CONSTANT", False),
        ("BRA", False),
        ("EXIT", False),
        ("FADD", True),
        ("RET.REL.NODEC", True),
    ]
    assert compile_report.count_loops(instructions, labels) == 1


@pytest.mark.parametrize(
    ("opcode", "access"),
    [
        ("LDG.E", "LDG.E.32"),
        ("LDG.E.128", "LDG.E.128"),
        ("LDG.E.64.CONSTANT", "LDG.E.64"),
        ("LDG.E.EF.128", "LDG.E.128"),
        ("LDG.E.U8.CONSTANT", "LDG.E.U8"),
        ("STG.E.U16", "STG.E.U16"),
        ("STG.E.NA.128", "STG.E.128"),
        ("LDS.128", None),
        ("LDL.64", None),
    ],
)
def test_access_of(opcode, access):
    assert compile_report.access_of(opcode) == access


# --- judging ----------------------------------------------------------------------------------------

GOOD = Measured("k", (9, 0), False, 32, 0, 0, 0, 0, 100, 0, {"LDG.E.128": 2}, bytes_per_thread=20.0)
PROMISES = Entry({"registers": 32, "instr_per_byte": {(9, 0): 5.0}, "instr_per_byte_fast_math": {(9, 0): 4.9}}, 2, 0)


def test_a_kernel_that_keeps_its_promises_has_no_problem():
    assert problems(GOOD, PROMISES) == []
    assert (GOOD.instr_per_byte, round(GOOD.issue_share, 3)) == (5.0, 0.521)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"registers": 33}, "33 registers, more than 32"),
        ({"instructions": 101}, "5.05 instructions for each byte, more than 5.0"),
        ({"fast_math": True}, "more than 4.9"),
        ({"accesses": {"LDG.E.128": 1}}, "has 1 LDG.E.128, not 2"),
        ({"accesses": {"LDG.E.128": 2, "STG.E.128": 1}}, "has 1 STG.E.128, not 0"),
        ({"loops": 1}, "1 loops"),
        ({"local": 1}, "1 local accesses"),
        ({"spill_loads": 4}, "reloads 4"),
        ({"float64": True}, "float64"),
    ],
)
def test_each_broken_promise_is_one_sentence(change, words):
    (sentence,) = problems(replace(GOOD, **change), PROMISES)
    assert words in sentence


def test_no_claim_is_judged_where_there_is_none():
    assert problems(replace(GOOD, target=(8, 0), instructions=10_000), PROMISES) == []
    assert replace(GOOD, target=(8, 0)).issue_share is None
    assert replace(GOOD, loops=1).issue_share is None


# --- the command ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "target"), [("sm_90", (9, 0)), ("9.0", (9, 0)), ("sm_100a", (10, 0, "a")), ("12.0a", (12, 0, "a"))]
)
def test_targets_are_read_in_two_spellings(text, target):
    assert compile_report.parse_target(text) == target


def test_the_table_shows_problems(capsys):
    compile_report.show([(GOOD, ["spills 4 bytes"])])
    out = capsys.readouterr().out
    assert "spills 4" in out
    assert "sm_90" in out
    assert "52%" in out


def test_a_missing_tool_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setattr(compile_report, "_site_packages", lambda: None)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MissingToolError, match=r"ptxas is neither .* pip install .*nvidia-cuda-nvcc"):
        compile_report.find_tool("ptxas")


def test_an_old_ptxas_is_named(tmp_path):
    tool = tmp_path / "ptxas"
    tool.write_text("#!/bin/sh\necho 'ptxas k.ptx, line 9; fatal : Unsupported .version 9.5' >&2\nexit 255\n")
    tool.chmod(0o755)
    with pytest.raises(MissingToolError, match="older than Numba's NVVM"):
        compile_report._run(str(tool))


def test_numba_without_numba_cuda_is_named(monkeypatch):
    cuda = pytest.importorskip("numba.cuda")
    monkeypatch.setattr(cuda, "implementation", "built-in", raising=False)
    with pytest.raises(MissingToolError, match="numba-cuda is missing"):
        compile_report.require_compiler()


@pytest.mark.parametrize(
    ("arguments", "said"), [(["nonsense"], "invalid choice: 'nonsense'"), ([], "required: command")]
)
def test_a_command_that_is_none_is_an_error(capsys, arguments, said):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    last = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2 and last.startswith("python -m cuda_kernels: error: ") and said in last


@needs_compiler
def test_the_command_prints_json_and_fails_for_unknown_kernels():
    command = [sys.executable, "-m", "cuda_kernels", "report", "--target", "sm_90", "--json", "--kernel"]
    run = subprocess.run([*command, "amax of bf16"], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    (row,) = json.loads(run.stdout)
    assert (row["name"], row["target"], row["accesses"]["LDG.E.128"]) == ("amax of bf16", "sm_90", 2)
    assert run.returncode == bool(row["problems"])
    run = subprocess.run([*command, "no such"], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert (run.returncode, run.stdout) == (2, "")
    assert "no such" in run.stderr


def test_a_cache_that_cannot_be_replaced_keeps_no_temporary_file(tmp_path, monkeypatch):
    def replace(old, new):
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(ptx_cache.os, "replace", replace)
    assert ptx_cache.get("key", "target", lambda: "ptx") == "ptx"
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
