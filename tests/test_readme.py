"""The README's Python examples run and print what the README says."""

import contextlib
import io
import re
from pathlib import Path

from refops import ACTIVATIONS

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, re.DOTALL)


def test_examples_print_what_the_readme_says():
    """In their order and one namespace, as pasted into a shell."""
    names = {}
    for code, output in EXAMPLES:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "README.md", "exec"), names)
        assert printed.getvalue() == output


def test_every_python_block_has_its_output_checked():
    assert len(EXAMPLES) == README.count("```python") >= 1


def test_table_of_activations_is_the_codes():
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|$", README, re.MULTILINE))
    assert rows == {name: row.formula for name, row in ACTIVATIONS.items()}
