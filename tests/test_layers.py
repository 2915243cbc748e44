"""The packages import in one direction, refops <- cuda_kernels <- fuser, and refops needs NumPy and ml_dtypes alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from cuda_kernels import ptx_cache

pytestmark = pytest.mark.check

ROOT = Path(__file__).resolve().parent.parent
#: package -> top-level modules that it must never import.
FORBIDDEN = {
    "refops": {"cuda_kernels", "fuser", "numba", "torch", "jax"},
    "cuda_kernels": {"fuser", "torch", "jax"},
    "fuser": set(),
}
#: What the command line imports beyond NumPy and ml_dtypes: file or directory of refops/ -> modules. Nothing else does.
COMMAND_LINE = {
    "display": {"rich", "matplotlib"},
    "files.py": {"safetensors", "torch"},
}
#: What a family of kernels is written in: modules of cuda_kernels.
FAMILIES_READ = {
    "casts",
    "copies",
    "directions",
    "formulas",
    "hadamard",
    "launch",
    "operands",
    "reads",
    "scale_rules",
    "simt",
    "stores",
    "tiles",
    "vectors",
}
#: Who knows the families: modules of cuda_kernels.
FAMILIES_READERS = {"catalogue.py", "gpu.py", "naive.py"}
#: torch may be imported lazily to read .pt files.
LAZY = {("refops/files.py", "torch")}


def imports(path):
    """Top-level names of all modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module.split(".")[0]


@pytest.mark.parametrize("package", FORBIDDEN)
def test_no_import_against_the_layers(package):
    for path in (ROOT / package).rglob("*.py"):
        name = str(path.relative_to(ROOT))
        wrong = {module for module in imports(path) if module in FORBIDDEN[package] and (name, module) not in LAZY}
        assert not wrong, f"{name} imports {wrong}"


def test_the_two_front_ends_are_apart():
    """JAX in fuser/xla alone, which in turn needs no torch: each is an extra of its own."""
    for path in (ROOT / "fuser").rglob("*.py"):
        in_xla = path.relative_to(ROOT / "fuser").parts[0] == "xla"
        found = set(imports(path))
        assert not found & ({"torch"} if in_xla else {"jax", "jaxlib"}), path


def modules_of(path, package):
    """Modules of a package that a file imports: `a` of `from package.a import ...` and of `from package import a`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == package:
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module.startswith(f"{package}."):
            yield node.module.split(".")[1]


def test_a_family_of_kernels_needs_the_vocabulary_alone():
    package, readers = ROOT / "cuda_kernels", set()
    for path in package.rglob("*.py"):
        found, inside = set(modules_of(path, "cuda_kernels")), path.relative_to(package)
        if inside.parts[0] == "families":
            assert found <= FAMILIES_READ, f"{inside} imports {found - FAMILIES_READ}"
        elif "families" in found:
            readers.add(str(inside))
    assert readers == FAMILIES_READERS


def test_the_reference_itself_needs_numpy_and_ml_dtypes_alone():
    everywhere = {"refops", "numpy", "ml_dtypes"} | sys.stdlib_module_names
    more = {}
    for path in (ROOT / "refops").rglob("*.py"):
        beyond = set(imports(path)) - everywhere
        if beyond:
            more.setdefault(path.relative_to(ROOT / "refops").parts[0], set()).update(beyond)
    assert more == COMMAND_LINE


def test_import_refops_is_quick_and_light():
    """Bound: 0.3 s, most of it NumPy's own import. Processor time, best of five: a busy machine is no fault."""
    code = (
        "import sys, time; start = time.process_time(); import refops; seconds = time.process_time() - start\n"
        "loaded = {'torch', 'numba', 'rich', 'safetensors', 'jax', 'matplotlib'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
        "print(seconds)"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
        for _ in range(5)
    ]
    assert min(float(run.stdout) for run in runs) < 0.3


def test_what_is_compiled_imports_nothing_that_its_digest_leaves_out():
    """Else an edit there would leave wrong machine code on disk."""
    for package, left_out in ptx_cache.UNCOMPILED.items():
        for name in left_out:
            assert (ROOT / package / name).exists(), f"{package}/{name}"
    paths = {path for package in ptx_cache.UNCOMPILED for path in (ROOT / package).rglob("*.py")}
    compiled = {path for path in paths if not module_left_out(".".join(path.relative_to(ROOT).with_suffix("").parts))}
    assert {ROOT / "cuda_kernels" / "casts.py", ROOT / "refops" / "formats.py"} <= compiled < paths
    for path in compiled:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                found = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            else:
                found = {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
            wrong = {name for name in found if module_left_out(name)}
            assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


def module_left_out(name):
    """Whether the digest leaves out a module, or the part of a package that it lies in."""
    package, part, *_ = [*name.split("."), ""]
    return bool({part, f"{part}.py"} & ptx_cache.UNCOMPILED.get(package, set()))
