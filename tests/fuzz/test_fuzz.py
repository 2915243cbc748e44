"""The fuzzer itself: it reaches all that is public, finds seeded faults, repeats its cases, and finds nothing now."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full
HERE = Path(__file__).resolve().parent
#: Target with a fault -> what its failure says.
FAULTS = {
    "crashes": "SIGSEGV",
    "exits": "exit code 0",
    "hangs": "ran for more than 1 s",
    "eats_memory": "MemoryError",
    "raises": "KeyError",
    "undocumented": "not by a check of the argument",
    "warns": "warned: UserWarning: look out",
    "writes_to_its_input": "changed its argument",
    "wrong_result": "zero is not one",
    "unpickles": "code in a file was executed",
    "leaves_a_partial_file": "FileError",
    "leaves_half_a_picture": "half a picture",
    "leaves_a_temporary_file": "temporary files were left",
    "prints_a_traceback": "a traceback",
    "prints_control_characters": "a control character",
}


def python(code, *arguments, timeout=300):
    """Run code that may import the modules of this folder; targets and limits stay out of this process."""
    script = f"import sys; sys.path[:0] = {[str(HERE), str(HERE.parent.parent), str(HERE.parent)]!r}\n{code}"
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def seeded():
    """Outcomes and failures of the faulty targets."""
    code = """
import json
import run
from harness import TARGETS
run.load(["faulty_targets"])
tallies, not_run = run.fuzz(run.numbers_of(TARGETS, 1), 7, modules=["faulty_targets"])
print(json.dumps({"never": run.never_returned(tallies), "not_run": not_run, "targets": {
    name: {"outcomes": tally.outcomes, "failures": tally.failures} for name, tally in tallies.items()}}))
"""
    return json.loads(python(code).splitlines()[-1])


@pytest.mark.parametrize("name", FAULTS)
def test_seeded_fault_is_reported(seeded, name):
    ((number, text),) = seeded["targets"][name]["failures"]
    assert FAULTS[name] in text
    assert number == (1 if name == "crashes" else 0)


def test_the_cases_around_a_fault_run_on(seeded):
    targets = seeded["targets"]
    assert targets["crashes"]["outcomes"] == {"result": 2, "failure": 1}
    assert targets["fine"] == {"outcomes": {"result": 3}, "failures": []}
    assert targets["refuses"] == {"outcomes": {"refused": 1}, "failures": []}
    assert seeded["not_run"] == 0


def test_a_promise_that_is_not_kept_is_noticed(seeded):
    assert seeded["never"] == ["refops.swizzle"]


def test_every_public_function_has_a_target():
    """And one without a target is noticed."""
    code = """
import run, surface
run.load()
print(surface.uncovered())
del run.TARGETS["swizzling"]
print(surface.uncovered())
"""
    assert python(code) == "[]\n['refops.swizzle', 'refops.unswizzle']\n"


def test_cases_repeat():
    code = """
import tempfile
import harness
import run
run.load(["targets.reference"])
def outcomes():
    with tempfile.TemporaryDirectory() as folder:
        for name in ("encode", "quantize", "settings"):
            for number in range(15):
                case = harness.Case(name, 3, number, f"{folder}/{name}-{number}")
                yield case.run(harness.TARGETS[name].run), sorted(case.calls.items())
first, second = list(outcomes()), list(outcomes())
assert first == second
print(len({str(one) for one in first}) > 10)
"""
    assert python(code) == "True\n"


def test_smoke(tmp_path):
    """A few cases of the targets that need no compiler."""
    names = ["settings", "encode", "quantize", "quantized", "activation_grad", "update_delayed_scale", "oracle_right"]
    names += [
        "oracle_wrong",
        "oracle_nonsense",
        "oracle_acceptable",
        "read_safetensors",
        "read_npy",
        "read_npz",
        "golden",
        "cli_explain",
    ]
    names += ["cli_check", "cli_golden", "cli_inspect", "cli_words", "cli_sqnr"]
    counts = tmp_path / "counts.json"
    arguments = [word for name in names for word in ("--only", name)]
    options = ["--share", "0.04", "--seed", "11", "--json", str(counts)]
    done = subprocess.run(
        [sys.executable, str(HERE / "run.py"), *options, *arguments], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout
    written = json.loads(counts.read_text())
    assert written["failures"] == 0 == written["not_run"]
    assert written["results"] > 50 < written["documented_errors"]
    assert written["cases"] == written["results"] + written["documented_errors"]


def test_one_case_is_run_again():
    command = [sys.executable, str(HERE / "run.py"), "--seed", "5", "--only", "encode", "--case", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "seed 5" in done.stdout
