"""What a row of one table needs in the others: a failure names the file, CONTRIBUTING.md has the steps."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import refops
from cuda_kernels import operands
from cuda_kernels.families import mxfp8
from refops import scalings, survey

pytestmark = pytest.mark.check

ROOT = Path(__file__).resolve().parent.parent


def assert_none_missing(wanted, found, where, section):
    missing = sorted(set(wanted) - set(found))
    assert not missing, f"{where} lacks {', '.join(missing)}: CONTRIBUTING.md, '{section}'"


def test_kernels_cast_elements_to_every_signed_format():
    names = [fmt.name for fmt in refops.FORMATS.values() if fmt.signed]
    found = [fmt.name for fmt in operands.ELEMENT_FORMATS]
    assert_none_missing(names, found, "cuda_kernels/operands.py: ELEMENT_FORMATS", "Add a format")


def test_every_activation_has_budgets():
    both = [kernel for name in refops.ACTIVATIONS for kernel in (name, f"d{name}")]
    assert_none_missing(both, mxfp8.ROW_BUDGETS, "cuda_kernels/row_budgets.json", "Add an activation")


def test_every_activation_has_an_operation():
    pytest.importorskip("torch")
    from fuser import ops

    classes = [getattr(ops, name) for name in ops.__all__]
    found = [getattr(cls, "activation", None) for cls in classes]
    assert_none_missing(refops.ACTIVATIONS, found, "fuser.ops", "Add an activation")


def test_every_scaling_is_public_and_shown():
    names, section = [cls.__name__ for cls in scalings.SCALINGS], "Add a scaling"
    shown = [type(row.scaling).__name__ for row in survey.SCALINGS.values()]
    assert_none_missing(names, refops.__all__, "refops/__init__.py: __all__", section)
    assert_none_missing(names, shown, "refops/survey.py: SCALINGS", section)


def test_every_operation_is_in_the_readme():
    pytest.importorskip("torch")
    from fuser import ops

    names = [*ops.fused.__all__, *(name for name in ops.basic.__all__ if isinstance(getattr(ops, name), type))]
    words = re.findall(r"\w+", (ROOT / "fuser/README.md").read_text(encoding="utf-8"))
    assert_none_missing(names, words, "fuser/README.md", "Add an operation")


def test_names_in_files_exist():
    """`name` of `file.py`, or in it, in CONTRIBUTING.md: some file of that name has the word."""
    text = " ".join((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split())
    folders = ("refops", "cuda_kernels", "fuser", "tests", "docs")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    pattern = r"((?:`\w+`(?:, | and )?)+) (?:there )?(?:of|in) `([\w/]+\.py)`"
    found = [(name, file) for names, file in re.findall(pattern, text) for name in re.findall(r"`(\w+)`", names)]
    assert len(found) > 20
    for name, file in found:
        texts = [path.read_text(encoding="utf-8") for path in files if path.as_posix().endswith(f"/{file}")]
        assert any(re.search(rf"\b{name}\b", text) for text in texts), f"CONTRIBUTING.md: {name} of {file}"


def test_the_sections_that_failures_name_exist():
    """In this file and in the other tests."""
    headings = re.findall(r"^## (.*)$", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE)
    named = {
        name
        for path in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r"[\"'](Add an? \w+)[\"']", path.read_text(encoding="utf-8"))
    }
    assert named and named <= set(headings)


#: Message of a commit -> what the hook says of it, "" where it takes it.
MESSAGES = {
    "Add a format\n\nNVIDIA's next tensor cores multiply it.\n": "",
    "Add a format\n\nWhy.\n# Please enter the commit message\n": "",
    "oracle: Name the format\n\nWhy.\n": "",
    f"Add {'x' * 68}\n\nWhy.\n": "",
    f"Add {'x' * 69}\n\nWhy.\n": "at most 72 characters; it has 73",
    "Add a format.\n\nWhy.\n": "full stop",
    "Added a format\n\nWhy.\n": "imperative",
    "Adding a format\n\nWhy.\n": "imperative",
    "Add a format\nWhy.\n": "second line must be empty",
    "Add a format\n": "body must say why",
    "Add a format\n\n# Please enter the commit message\n": "body must say why",
    "Seed a fault\n\nWhy.\n": "",
    "fixup! Add a format\n": "",
}


@pytest.mark.skipif(not (shutil.which("git") and shutil.which("sh")), reason="git runs the hook in sh")
@pytest.mark.parametrize("message", MESSAGES)
def test_the_hook_reads_messages(message, tmp_path):
    file = tmp_path / "message"
    file.write_text(message)
    ran = subprocess.run([ROOT / ".githooks" / "commit-msg", file], capture_output=True, text=True)
    assert ran.returncode == bool(MESSAGES[message]) and MESSAGES[message] in ran.stderr, ran.stderr
