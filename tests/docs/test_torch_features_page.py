"""docs/guide/torch_features.md: each row says what becomes of a feature, and names a test that shows it."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/guide/torch_features.md"


def rows():
    """(feature, what becomes of it, why, test) of the first table."""
    table = re.search(r"^\| feature \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1].splitlines()]


def functions(path):
    """The functions of a file, those of classes as Class::function."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        found.update(prefix + member.name for member in members if isinstance(member, ast.FunctionDef))
    return found


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_a_row_names_its_test(row):
    feature, state, why, test = row
    assert feature and why and state in ("works", "refused", "caution")
    path, name = re.fullmatch(r"`(tests/[\w/]+\.py)::([\w:]+)`", test).groups()
    assert name in functions(ROOT / path)
    assert name.split("::")[-1].startswith("test_") or "_worker" in path


def test_features_and_tests_are_there_once():
    assert len(rows()) > 30
    for column in (0, 3):
        cells = [row[column] for row in rows()]
        assert len(set(cells)) == len(cells)
