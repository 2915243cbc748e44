"""Kernels stay short enough to read: at most 40 lines, device functions 15, docstrings apart."""

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.check

PACKAGE = Path(__file__).resolve().parents[2] / "cuda_kernels"
LIMITS = {"kernel": 40, "device": 15, "ptx": 15, "on_gpu": 15}


def functions():
    """(file:line name, decorator, lines without the docstring) of every kernel and device function."""
    for path in sorted([*PACKAGE.glob("*.py"), *PACKAGE.glob("families/*.py")]):
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


FAMILIES = sorted(path for path in PACKAGE.glob("families/*.py") if path.name != "__init__.py")
MOST_IDEAS, MOST_LINES_OF_A_CLASS = 5, 60


def decorated(node, name):
    """Whether a function is decorated with a name."""
    return isinstance(node, ast.FunctionDef) and any(getattr(one, "id", "") == name for one in node.decorator_list)


@pytest.mark.parametrize("path", FAMILIES, ids=lambda path: path.stem)
def test_a_family_reads_from_the_top(path):
    """Six chapters; a naive kernel; the first fused one calls at most five functions beside the words of `simt`."""
    text = path.read_text()
    tree = ast.parse(text)
    chapters = [line.split(".")[0][-1] for line in text.splitlines() if line.startswith("# --- ")]
    assert chapters == list("123456")
    from_simt = {
        alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module == "cuda_kernels.simt"
        for alias in node.names
    }
    assert any(decorated(node, "kernel") and node.name.endswith("_naive") for node in ast.walk(tree))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    assert max(node.end_lineno - node.lineno + 1 for node in classes) <= MOST_LINES_OF_A_CLASS
    fused = next(node for one in classes for node in ast.walk(one) if decorated(node, "kernel"))
    called = {
        node.func.id for node in ast.walk(fused) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert len(called - from_simt - {"range"}) <= MOST_IDEAS, called - from_simt
