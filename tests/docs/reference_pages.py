"""The names that docs/reference describes, read from its directives; and those that it must describe."""

import importlib
import inspect
import re
from pathlib import Path

PAGES = Path(__file__).resolve().parents[2] / "docs" / "reference"
#: Packages and modules whose public names are a promise.
PUBLIC = (
    "refops",
    "refops.oracle",
    "refops.oracle.testing",
    "refops.golden",
    "refops.products",
    "cuda_kernels",
    "cuda_kernels.emulator",
    "cuda_kernels.host",
    "fuser",
    "fuser.comparison",
    "fuser.compat",
    "fuser.conversion",
    "fuser.custom_recipes.quantizer_factories",
    "fuser.custom_recipes.quantizer_factory_zoo",
    "fuser.custom_recipes.reference",
    "fuser.dispatch",
    "fuser.distributed",
    "fuser.explanation",
    "fuser.functional",
    "fuser.fused",
    "fuser.gemm",
    "fuser.jit",
    "fuser.ops",
    "fuser.quantization",
    "fuser.recipe",
    "fuser.recording",
    "fuser.xla",
)


def public_names(module_name):
    """Names of a module that a user may import from it, modules excepted: `__all__`, or what it defines itself."""
    module = importlib.import_module(module_name)
    if hasattr(module, "__all__"):
        names = module.__all__
    else:
        own = lambda value: getattr(value, "__module__", None) == module_name  # noqa: E731
        names = [name for name, value in vars(module).items() if not name.startswith("_") and own(value)]
    return [name for name in names if not inspect.ismodule(getattr(module, name))]


#: A directive of the pages: kind, argument, options; lines that go on are indented.
DIRECTIVE = re.compile(r"^\.\. ([\w:]+):: ?(.*(?:\n +[^\s:].*)*)((?:\n {3}:.*(?:\n {4,}\S.*)*)*)", re.MULTILINE)


def described():
    """(module, name) of everything that a directive of the reference pages describes."""
    found = set()
    for page in PAGES.glob("*.md"):
        module = None
        for kind, argument, options in DIRECTIVE.findall(page.read_text()):
            if kind == "currentmodule":
                module = argument
            elif kind == "automodule":
                found |= {(argument, name) for name in members(argument, options)}
            else:
                found |= {(module, name) for name in argument.split()}
    return found


def members(module, options):
    """The names that an `automodule` with these options describes."""
    listed = re.search(r":members:(.*(?:\n {4,}\S.*)*)", options)
    if ":no-members:" in options or not listed:
        return set()
    excluded = re.search(r":exclude-members: (.*)", options)
    names = re.findall(r"\w+", listed[1]) or public_names(module)
    return set(names) - set(re.findall(r"\w+", excluded[1]) if excluded else ())
