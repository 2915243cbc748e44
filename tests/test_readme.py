"""The README's Python examples run and print what the README says."""

import contextlib
import io
import re
import sys
from pathlib import Path

import pytest

from refops import ACTIVATIONS

ROOT = Path(__file__).resolve().parent.parent
READMES = {path: (ROOT / path).read_text() for path in ("README.md", "fuser/README.md")}
README = READMES["README.md"]


def examples(text):
    """(code, output) of each Python block."""
    return re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("path", READMES)
def test_examples_print_what_the_readme_says(path):
    """In their order and one namespace, as pasted into a shell."""
    names = {}
    try:
        for code, output in examples(READMES[path]):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(code, path, "exec"), names)
            assert printed.getvalue() == output
    finally:
        if "fuser.compat" in sys.modules:
            sys.modules["fuser.compat"].uninstall()


@pytest.mark.parametrize("path", READMES)
def test_every_python_block_has_its_output_checked(path):
    assert len(examples(READMES[path])) == READMES[path].count("```python") >= 1


def test_table_of_activations_is_the_codes():
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|$", README, re.MULTILINE))
    assert rows == {name: row.formula for name, row in ACTIVATIONS.items()}
