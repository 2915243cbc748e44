"""Modules of a package whose own `__init__` imports what only training or export needs."""

import importlib
import importlib.util
import sys
import types
from pathlib import Path


def load_alone(name, *, packages, stand_ins=()):
    """Import the module `name`, the `__init__` of `packages` not run, and leave the packages unimported again.

    Args:
        name: full name of the module.
        packages: full names, outer ones first; the first is that of an installed package.
        stand_ins: modules that are not installed, and that what is imported names without use.

    Raises:
        ImportError: the first package, or something that the module needs, is not installed.
    """
    spec = importlib.util.find_spec(packages[0])
    if spec is None:
        raise ImportError(f"No package {packages[0]}")
    (root,) = spec.submodule_search_locations
    before = set(sys.modules)
    for package in packages:
        module = types.ModuleType(package)
        module.__path__ = [str(Path(root, *package.split(".")[1:]))]
        sys.modules[package] = module
    for stand_in in stand_ins:
        if importlib.util.find_spec(stand_in) is None:
            sys.modules[stand_in] = _AnyName(stand_in)
    try:
        return importlib.import_module(name)
    finally:
        for added in set(sys.modules) - before:
            if added.split(".")[0] in (packages[0].split(".")[0], *stand_ins):
                del sys.modules[added]


class _AnyName(types.ModuleType):
    """A module in which every name is a class."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})
