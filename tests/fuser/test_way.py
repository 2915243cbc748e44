"""The way from an operation to the stored byte is short, and no two modules of `fuser` import each other."""

import ast
from pathlib import Path

import pytest
import torch

import fuser
from calls import calls_of
from fuser import ops
from fuser.recipe import MXFP8BlockScaling

pytestmark = pytest.mark.check

ROOT = Path(__file__).resolve().parents[2]
#: Calls of Python functions of this project from a call of SwiGLU with a quantizer behind it to its result, and files
#: on the way to the loop that stores its bytes.
MOST_CALLS, MOST_FILES = 80, 14


def test_few_calls_from_swiglu_to_the_stored_byte():
    model = ops.Sequential(ops.SwiGLU(), ops.Quantize()).bfloat16()
    x = torch.ones(64, 512, dtype=torch.bfloat16)
    with torch.no_grad(), fuser.autocast(recipe=MXFP8BlockScaling()):
        for _ in range(3):
            y = model(x)
        y, calls = calls_of(lambda: model(x))
    assert isinstance(y, fuser.MXFP8Tensor)
    called = [(file, name) for file, name, c_function in calls if c_function is None]
    names = [name for _, name in called]
    files = {file for file, _ in called[: names.index("walk") + 1]}
    assert {"fuser/sequential.py", "fuser/dispatch.py", "cuda_kernels/host/tiles.py"} <= files
    assert len(called) <= MOST_CALLS, names
    assert len(files) <= MOST_FILES, sorted(files)


def imported(name, text, modules):
    """Those of `modules` that a module imports: anywhere in it, also in functions and for type checkers alone.

    Not what is imported by a name in a string, when it is first needed: `fuser`, `fuser.compat`, `fuser.torch_load`.
    """
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = [f"{node.module}.{alias.name}" for alias in node.names]
            found.update(part if part in modules else node.module for part in parts)
    return {one for one in found if one in modules and one != name}


def circles(imports):
    """What is left when modules that import none of the others, or that none imports, go again and again."""
    left = dict(imports)
    while True:
        wanted = {one for found in left.values() for one in found}
        inside = {name: found & left.keys() for name, found in left.items() if name in wanted and found & left.keys()}
        if inside == left:
            return left
        left = inside


def test_no_module_imports_one_that_imports_it():
    paths = {}
    for path in (ROOT / "fuser").rglob("*.py"):
        paths[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = path
    imports = {name: imported(name, path.read_text(), paths) for name, path in paths.items() if name != "fuser"}
    assert imports["fuser.op"] >= {"fuser.fuser", "fuser.fusible"} and len(imports) > 50
    assert circles(imports) == {}


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    from fuser.b import x",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import fuser.b",
        "from fuser import b",
    ],
)
def test_a_circle_is_seen(text):
    modules = {"fuser.a": text, "fuser.b": "from fuser import a, c", "fuser.c": ""}
    imports = {name: imported(name, text, modules) for name, text in modules.items()}
    assert set(circles(imports)) == {"fuser.a", "fuser.b"}
