"""The README's Python examples run and print what the README says."""

import contextlib
import io
import re
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize(("code", "output"), EXAMPLES)
def test_example_prints_what_the_readme_says(code, output):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {})
    assert printed.getvalue() == output


def test_every_python_block_has_its_output_checked():
    assert len(EXAMPLES) == README.count("```python") >= 1
