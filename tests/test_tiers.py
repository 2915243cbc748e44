"""The tiers and their limits: a test that hangs fails by itself, and each tier has what CONTRIBUTING.md says."""

import os
import re
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

from refops import ACTIVATIONS
from refops.survey import SCALINGS
from tiers import sampled

ROOT = Path(__file__).resolve().parent.parent

#: What each test does for ever, and one that ends.
HANGING = """
import threading

def test_a_loop_of_python():
    while True:
        pass

def test_a_wait_for_another_thread():
    threading.Event().wait()

def test_a_call_into_c():
    sum(iter(int, 1))

def test_that_ends():
    pass
"""


@pytest.mark.full
@pytest.mark.parametrize("workers", [0, 1], ids=["alone", "pytest-xdist"])
def test_a_test_that_hangs_fails_with_a_traceback(tmp_path, workers):
    """With SIGINT ignored, as in the background of a shell, and with the settings of setup.cfg but shorter times."""
    (tmp_path / "test_hanging.py").write_text(HANGING)
    ignored = "signal.signal(signal.SIGINT, signal.SIG_IGN)"
    start = f"import os, signal, sys; {ignored}; os.execv(sys.executable, sys.argv[1:])"
    words = [sys.executable, "-m", "pytest", "-c", ROOT / "setup.cfg", "-p", "no:cacheprovider", "-n", workers]
    words += ["-o", "timeout=1", "-o", "faulthandler_timeout=4", tmp_path]
    done = subprocess.run(
        [sys.executable, "-c", start, *map(str, words)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=100,
    )
    assert done.returncode == 1
    assert re.search(r'File ".*test_hanging.py", line \d+ in test_a_call_into_c', done.stderr)
    if workers:
        assert done.stdout.count("Failed: Timeout") >= 2 and "while True:" in done.stdout
        assert "test_a_call_into_c" in done.stdout and "crashed" in done.stdout
        assert "3 failed, 1 passed" in done.stdout


@pytest.mark.full
def test_a_file_that_hangs_when_it_is_imported_ends_the_run(tmp_path):
    (tmp_path / "test_hanging.py").write_text("while True:\n    pass\n")
    words = [sys.executable, "-m", "pytest", "-c", ROOT / "setup.cfg", "-p", "no:cacheprovider", "-p", "conftest"]
    done = subprocess.run(
        [*map(str, words), "-o", "faulthandler_timeout=3", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests")},
        timeout=100,
    )
    assert done.returncode == 1
    assert re.search(r'File ".*test_hanging.py", line \d in <module>', done.stderr)


def test_every_test_has_a_limit():
    settings = ConfigParser(interpolation=None)
    settings.read(ROOT / "setup.cfg")
    pytest_settings = settings["tool:pytest"]
    assert 0 < pytest_settings.getint("timeout") < pytest_settings.getint("faulthandler_timeout")
    assert pytest_settings.getboolean("faulthandler_exit_on_timeout")


def test_sampled_drops_no_case():
    cases = [("a", 1), ("b", 2), ("c", 3), ("d", 4), ("e", 5)]
    made = sampled("pair", cases, 2).args[1]
    assert [case.values for case in made] == [(pair,) for pair in cases]
    assert [case.values for case in sampled(("name", "number"), cases, 2).args[1]] == cases
    assert [bool(case.marks) for case in made] == [False, True, False, True, False]


def test_sampled_leaves_a_share_to_the_sweeps():
    marks = [{mark.name for mark in case.marks} for case in sampled("n", range(9), 4, in_all=2).args[1]]
    swept = {"full", "sweep"}
    assert marks == [set(), {"full"}, swept, {"full"}, set(), swept, {"full"}, swept, set()]


def collected(marks, *path, **variables):
    """Ids of the tests of a file or folder, or of all but the simulated and emulated ones, that `pytest -m` takes."""
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", marks, *path]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=os.environ | variables)
    assert done.returncode in (0, 5), done.stdout  # 5: no tests
    return re.findall(r"::(.*)", done.stdout)


@pytest.mark.full
def test_check_has_every_operation_scaling_and_backend():
    scalings, backends = ["none", *SCALINGS], ["refops", "host", "torch", "jax"]
    found = collected("check", "tests/docs/test_generated.py")
    operations, activations = (
        f"test_{what}_are_right_where_the_table_has_them" for what in ("operations", "activations")
    )
    for backend in backends:
        assert {f"{operations}[{backend}-{scaling}]" for scaling in scalings} <= set(found)
        assert {f"{activations}[{backend}-{name}]" for name in ACTIVATIONS} <= set(found)
    simulated = collected("check", "tests/simulated/test_simulated_calls.py", NUMBA_ENABLE_CUDASIM="1")
    assert {f"{operations}[{scaling}]" for scaling in scalings} <= set(simulated)
    assert {f"{activations}[{name}]" for name in ACTIVATIONS} <= set(simulated)
    emulated = collected("check", "tests/emulator/test_emulated.py")
    assert {f"test_activation[{name}]" for name in ACTIVATIONS} <= set(emulated)
    assert any("test_quantize" in name for name in emulated)


def test_a_test_for_the_first_and_the_last_tier_alone_is_refused(tmp_path):
    (tmp_path / "test_both.py").write_text(
        "import pytest\n@pytest.mark.check\n@pytest.mark.full\ndef test_it(): pass\n"
    )
    words = [sys.executable, "-m", "pytest", "-c", ROOT / "setup.cfg", "-p", "no:cacheprovider", "-p", "conftest"]
    done = subprocess.run(
        [*map(str, words), str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests")},
        timeout=100,
    )
    assert done.returncode != 0 and "must be marked check or full, not both; got test_both.py::test_it" in done.stderr
