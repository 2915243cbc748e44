"""Kernels stay short enough to read: at most 40 lines, device functions 15, docstrings apart."""

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.check

PACKAGE = Path(__file__).resolve().parents[2] / "cuda_kernels"
LIMITS = {"kernel": 40, "device": 15, "ptx": 15, "on_gpu": 15}


def functions():
    """(file:line name, decorator, lines without the docstring) of every kernel and device function."""
    for path in sorted(PACKAGE.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef) or path.name == "simt.py":
                continue
            for decorator in node.decorator_list:
                name = getattr(getattr(decorator, "func", decorator), "id", "")
                if name in LIMITS:
                    first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
                    yield f"{path.name}:{node.lineno} {node.name}", name, node.end_lineno - first.lineno + 1


@pytest.mark.parametrize("kind", LIMITS)
def test_length(kind):
    found = [(where, lines) for where, decorator, lines in functions() if decorator == kind]
    assert found
    assert [(where, lines) for where, lines in found if lines > LIMITS[kind]] == []
