"""What a new activation or a new scaling costs: one file, and what is measured and generated. In a copy of this
repository it is added and used everywhere.

`tests/new_rows/mish.py` and `leaky_relu.py`, which has a parameter, go into refops/activations;
`tests/measured/measure_activations.py` and `docs/generate.py` write what is measured and generated, and each check of
`tests/new_rows/use_activation.py` runs in a process of its own. The tests of activations run as well: their parameters
are the table's rows. `tests/new_rows/mx64.py` goes into refops/scalings; its checks are those of
`tests/new_rows/use_scaling.py`, and `docs/capabilities.py` writes its row of the capability table.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[1]
NEW_ROWS = ROOT / "tests" / "new_rows"
#: What the copy holds.
COPIED = (
    "refops",
    "cuda_kernels",
    "fuser",
    "tests",
    "docs",
    "README.md",
    "CONTRIBUTING.md",
    "setup.cfg",
    "pyproject.toml",
)
ACTIVATIONS = ("mish.py", "leaky_relu.py")
LONGEST_ACTIVATION, LONGEST_SCALING = 30, 40
#: Modules of refops/scalings that have more to say: TE's, and what scalings share.
LONGER = ("__init__", "arithmetic", "block", "current", "declaration", "delayed", "mxfp8", "nvfp4", "rules")

ACTIVATION_CHECKS = (
    "truth",
    "reference",
    "host",
    "simulator",
    "software_gpu",
    "compiled",
    "judged_and_named",
    "commands",
    "fuser",
    "jax",
    "documents",
)

SCALING_CHECKS = (
    "reference",
    "host",
    "simulator",
    "software_gpu",
    "judged_and_named",
    "commands",
    "fuser",
)


def copy_of_the_repository(folder):
    """A copy without what programs made."""
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info", "results", ".venv")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=unwanted)
        else:
            shutil.copy(source, folder / name)
    for results in ("tests/benchmarks/results", "tests/peers/results"):  # tables of the documents are made of them
        shutil.copytree(ROOT / results, folder / results)


def run_in(copy, *arguments, **variables):
    """Run Python in a copy; what it printed, once it has ended well."""
    paths = os.pathsep.join([str(copy), str(copy / "tests")])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", **variables}
    done = subprocess.run([sys.executable, *arguments], cwd=copy, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return done.stdout


@pytest.fixture(scope="module")
def with_activations(tmp_path_factory):
    """A copy of the repository that has mish, mishglu, leaky_relu and leaky_reglu."""
    copy = tmp_path_factory.mktemp("with_activations")
    copy_of_the_repository(copy)
    for file in ACTIVATIONS:
        shutil.copy(NEW_ROWS / file, copy / "refops" / "activations")
    run_in(copy, "tests/measured/measure_activations.py", "mish", "mishglu", "leaky_relu", "leaky_reglu")
    run_in(copy, "docs/generate.py", "--write")
    return copy


@pytest.mark.parametrize("file", ACTIVATIONS)
def test_an_activation_is_one_short_file(file):
    assert len((NEW_ROWS / file).read_text(encoding="utf-8").splitlines()) <= LONGEST_ACTIVATION


@pytest.mark.parametrize("check", ACTIVATION_CHECKS)
def test_a_new_activation_works_without_another_edit(with_activations, check):
    needed = {"software_gpu": "numba.cuda", "compiled": "numba.cuda", "fuser": "torch", "jax": "jax", "truth": "mpmath"}
    pytest.importorskip(needed.get(check, "numba"))
    run_in(
        with_activations, "tests/new_rows/use_activation.py", check, NUMBA_ENABLE_CUDASIM=str(int(check == "simulator"))
    )


@pytest.mark.parametrize(
    "file",
    [
        "tests/refops/test_activations_exhaustive.py",
        "tests/oracle/test_enclosure.py",
        "tests/cuda_kernels/test_formulas.py",
        "tests/fuser/test_functional.py",
    ],
)
def test_the_tests_have_the_new_rows(with_activations, file):
    printed = run_in(with_activations, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", file, "-k", "mish")
    assert " passed" in printed


@pytest.fixture(scope="module")
def with_mx64(tmp_path_factory):
    """A copy of the repository that has MX64Scaling."""
    copy = tmp_path_factory.mktemp("with_mx64")
    copy_of_the_repository(copy)
    shutil.copy(NEW_ROWS / "mx64.py", copy / "refops" / "scalings")
    return copy


def test_a_scaling_is_one_short_file():
    added = [path for path in (ROOT / "refops" / "scalings").glob("*.py") if path.stem not in LONGER]
    lengths = {p.name: len(p.read_text(encoding="utf-8").splitlines()) for p in (*added, NEW_ROWS / "mx64.py")}
    assert max(lengths.values()) <= LONGEST_SCALING, lengths


@pytest.mark.parametrize("check", SCALING_CHECKS)
def test_a_new_scaling_works_without_another_edit(with_mx64, check):
    pytest.importorskip({"software_gpu": "numba.cuda", "fuser": "torch"}.get(check, "numba"))
    run_in(with_mx64, "tests/new_rows/use_scaling.py", check, NUMBA_ENABLE_CUDASIM=str(int(check == "simulator")))


def test_the_capability_table_has_the_new_scaling(with_mx64):
    """Measured on every backend for its row alone; TE's JAX interface has no mode for it."""
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    before = (with_mx64 / "docs" / "capabilities.json").read_text(encoding="utf-8").count(": [")
    run_in(with_mx64, "docs/capabilities.py", "--write", "mx64")
    run_in(with_mx64, "docs/generate.py", "--write")
    row = "| `mx64`: MXFP8: E4M3, one E8M0 scale byte per 64 elements | all | all | all | all | - |"
    assert row in (with_mx64 / "docs" / "guide" / "coverage.md").read_text(encoding="utf-8")
    after = (with_mx64 / "docs" / "capabilities.json").read_text(encoding="utf-8").count(": [")
    assert after == before + 5, "other rows stay"
