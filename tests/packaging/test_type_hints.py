"""Every public name says its types: to a reader of `help`, to `typing.get_type_hints`, and to a type checker."""

import ast
import importlib
import inspect
import typing
from pathlib import Path

import pytest

import cuda_kernels
import fuser
import refops

ROOT = Path(__file__).resolve().parent.parent.parent
MODULES = (
    "refops",
    "refops.oracle",
    "refops.golden",
    "refops.products",
    "cuda_kernels",
    "cuda_kernels.host",
    "fuser",
    "fuser.ops",
    "fuser.recipe",
    "fuser.functional",
    "fuser.xla",
)
#: Names that Python calls itself, with arguments that everybody knows.
PROTOCOLS = ("__init__", "__call__", "__enter__", "__exit__", "__iter__", "__getitem__")


def public_names(module):
    """(qualified name, object) of what a module offers."""
    offered = getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]
    return [(f"{module.__name__}.{name}", getattr(module, name)) for name in offered]


def functions_of(name, value):
    """The functions that a public name stands for: itself, or what a class of ours defines, properties included."""
    if inspect.isroutine(value) and is_ours(value):
        yield name, value
    elif inspect.isclass(value):
        for base in value.__mro__:
            if not is_ours(base):
                continue
            for attribute, member in vars(base).items():
                if attribute.startswith("_") and attribute not in PROTOCOLS:
                    continue
                function = getattr(member, "fget", None) or getattr(member, "func", None)  # properties
                function = function or getattr(member, "__func__", member)  # class and static methods
                if inspect.isfunction(function) and is_ours(function) and function.__code__.co_filename != "<string>":
                    yield f"{name}.{attribute}", function  # "<string>": what a dataclass made


def is_ours(value):
    """Whether a function or class was written here."""
    return (getattr(value, "__module__", None) or "").split(".")[0] in ("refops", "cuda_kernels", "fuser")


def missing_hints(function):
    """Names of the parameters without a hint, and "return"."""
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    missing = [p.name for p in parameters if p.annotation is inspect.Parameter.empty]
    if signature.return_annotation is inspect.Signature.empty and getattr(function, "__name__", "") != "__init__":
        missing.append("return")
    return missing


@pytest.mark.parametrize("module", MODULES)
def test_every_public_call_has_hints_that_resolve(module):
    functions = [f for name, value in public_names(importlib.import_module(module)) for f in functions_of(name, value)]
    assert functions
    incomplete = {name: missing for name, function in functions if (missing := missing_hints(function))}
    assert not incomplete
    for name, function in functions:
        try:
            typing.get_type_hints(function)
        except NameError as error:
            pytest.fail(f"{name}: {error}")


def test_stub_of_the_calls_on_a_gpu_is_the_package():
    """`cuda_kernels/__init__.pyi`: the same names, parameters, kinds and hints as the functions made at import."""
    path = ROOT / "cuda_kernels" / "__init__.pyi"
    stub = {}
    source = path.read_text().replace("@overload\n", "")  # the last overload, which takes every value of `dbias`, stays
    exec(compile(source, path, "exec"), stub)
    assert stub["__all__"] == cuda_kernels.__all__
    for name in set(cuda_kernels.__all__) - {"host"}:
        written = inspect.signature(stub[name]).parameters
        made = inspect.signature(getattr(cuda_kernels, name)).parameters
        assert [(p.name, p.kind, p.annotation) for p in written.values()] == [
            (p.name, p.kind, p.annotation) for p in made.values()
        ], name


def test_overloads_are_the_implementation():
    """Each overload takes the implementation's parameters in its order, and leaves out the same ones' defaults."""
    paths = ("refops/ops.py", "refops/quantization/delayed.py", "cuda_kernels/interface.py", "fuser/functional.py")
    for path in paths:
        functions = {}
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.FunctionDef):
                functions.setdefault(node.name, []).append(node)
        for name, (*overloads, implementation) in functions.items():
            for overload in overloads:
                if any(isinstance(d, ast.Name) and d.id == "overload" for d in overload.decorator_list):
                    assert names_of(overload) == names_of(implementation), (path, name)


def names_of(function):
    """Names of all parameters of a function's syntax tree."""
    arguments = function.args
    return [a.arg for a in (*arguments.args, *arguments.kwonlyargs)] + [arguments.kwarg and arguments.kwarg.arg]


def test_names_that_fuser_imports_late_are_those_that_a_type_checker_sees():
    (block,) = [
        node
        for node in ast.parse((ROOT / "fuser" / "__init__.py").read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    seen = {(alias.asname, node.module) for node in block.body for alias in node.names}
    lazy = {(name, fuser._HOME_OF.get(name, "fuser")) for name in fuser.__all__}
    assert seen == lazy


def test_packages_are_typed():
    for package in ("refops", "cuda_kernels", "fuser"):
        assert (ROOT / package / "py.typed").exists()


def test_hints_name_the_settings():
    assert typing.get_type_hints(refops.quantize)["scaling"] == refops.scalings.Scaling
